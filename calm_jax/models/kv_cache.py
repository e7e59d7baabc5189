"""The transformer's `memory` argument: a key-value cache, a fork of a cache, or the segment ids of packed documents.

All three are arguments of pure functions, never state of a module; caches and forks are results too. Layers only read
them: a layer attends to its part of a cache and to the new chunks, and the new keys and values of all layers are written
together, once. So a compiled loop over chunks updates its cache in place, and copies no places that it does not read.

B rows, L new chunks, S places of a cache, H query heads, G key-value heads, R = H / G query heads per key-value head,
A features per head.
"""

import itertools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from calm_jax.parallel.devices import GPUS, target_device
from calm_jax.parallel.products import is_single_row

# How many places of a cache `UnslicedLayer` reads at once; fewer if this does not divide the cache's number of places.
BLOCK = 32
# The most query heads per key-value head for which `UnslicedLayer` multiplies elementwise. XLA's CPU backend fuses these products
# with the slice of the cache, so that the slice is not copied (as of jaxlib 0.11 with the options of `calm_jax.sampling.decode`).
# With more query heads, copying the slice costs less than multiplying elementwise.
_MOST_ELEMENTWISE = 2
# How many partial sums `UnslicedLayer` computes side by side for one score.
_LANES = 8
# Keys and values of the new chunks, [layers, B, L, G, A] each; inside a layer [B, L, G, A].
Written = tuple[Array, Array]
# Keys and values, [B, S, G, A] each, and the mask of those that each query attends to, bool [B, L, S].
Part = tuple[Array, Array, Array]


def _attend(query_BLHA: Array, parts: list[Part]) -> Array:
    """Attention with one softmax over all parts, [B, L, H, A]."""
    batch, length, heads, size = query_BLHA.shape
    groups = parts[0][0].shape[2]
    if heads == groups and is_single_row((batch, length), "tpu"):
        # XLA for TPUs would compute the products of a single query elementwise, which moves more bytes than the products of two.
        # The second query is of zeros.
        query_BLHA = jnp.pad(query_BLHA, ((0, 0), (0, 1), (0, 0), (0, 0)))
    query_BLGRA = query_BLHA.reshape(batch, -1, groups, heads // groups, size)
    scores = []
    for key_BSGA, _, seen_BLS in parts:
        score_BGRLS = jnp.einsum(
            "BLGRA,BSGA->BGRLS", query_BLGRA, key_BSGA, preferred_element_type=jnp.float32
        )
        if target_device().platform in GPUS and length == 1:
            # XLA for GPUs would compute these products, elementwise for a single query, inside the concatenation, which is slow.
            score_BGRLS = jax.lax.optimization_barrier(score_BGRLS)
        scores.append(jnp.where(seen_BLS[:, None, None], score_BGRLS / math.sqrt(size), -jnp.inf))
    weight_BGRLS = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1)
    ends = itertools.accumulate(score.shape[-1] for score in scores)
    mixed_BLGRA = jnp.zeros(query_BLGRA.shape, jnp.float32)
    for end, (_, value_BSGA, _) in zip(ends, parts, strict=True):
        mixed_BLGRA += jnp.einsum(
            "BGRLS,BSGA->BLGRA",
            weight_BGRLS[..., end - value_BSGA.shape[1] : end].astype(value_BSGA.dtype),
            value_BSGA,
            preferred_element_type=jnp.float32,
        )
    return mixed_BLGRA.astype(query_BLHA.dtype).reshape(query_BLHA.shape)[:, :length]


class KVCache(NamedTuple):
    """Keys and values of the chunks read so far: a ring buffer with S places (slots), where chunk i has place i mod S.

    A chunk "sees" the chunks that it attends to. If a chunk sees only the last W chunks, a text may be longer than the
    cache. To read L chunks at once, S must then be at least W + L - 1: a row with fewer new chunks is padded to L, and the padding
    overwrites older chunks, of which the row's next chunk still sees W - 1. A cache with S = 0 becomes as large as the first read:
    it gets one place per chunk. Heads come before places, so that `UnslicedLayer` need not transpose the cache. Inside a
    layer (`parts`, `attend`), `key` and `value` are those of the layer, [B, S, G, A].

    Attributes:
        key: [layers, B, G, S, A], rotated by position.
        value: [layers, B, G, S, A].
        length: int32 [B], how many chunks each row has read.
        window: int32, how many of the last chunks, itself included, each chunk sees: a scalar, or [B, L] for the L
            chunks of one read (see `SegmentIds.window`). With a window of S or more, a chunk sees every chunk that is still in the
            cache.
    """

    key: Array
    value: Array
    length: Array
    window: Array

    @staticmethod
    def empty(
        num_layers: int,
        batch: int,
        size: int,
        num_kv_heads: int,
        head_size: int,
        window: int | Array,
        dtype: DTypeLike,
    ) -> "KVCache":
        """A cache that has read nothing, with room for `size` chunks in each of `batch` rows."""
        shape = (num_layers, batch, num_kv_heads, size, head_size)
        return KVCache(
            jnp.zeros(shape, dtype),
            jnp.zeros(shape, dtype),
            jnp.zeros(batch, jnp.int32),
            jnp.int32(window),
        )

    def for_layers(self) -> "KVCache":
        """The cache in the layout for a scan over layers, [layers, B, S, G, A], which compilers for GPUs and TPUs read
        without a copy."""
        return self._replace(key=self.key.swapaxes(2, 3), value=self.value.swapaxes(2, 3))

    def next_position(self) -> Array:
        """The position of each row's next chunk, [B]."""
        return self.length

    def extended(self, written: Written) -> "KVCache":
        """The cache with the new chunks' keys and values, as the layers returned them."""
        num_new, size = written[0].shape[2], self.key.shape[3]
        if size:
            row_B1 = jnp.arange(len(self.length))[:, None]
            place_BL = (self.length[:, None] + jnp.arange(num_new)) % size

            def put(places: Array, new: Array) -> Array:
                at = places.at[:, row_B1, :, place_BL]
                # Indexing as in NumPy puts the axes of the index arrays, B and L, first.
                new_BL = new.transpose(1, 2, 0, 3, 4)
                return at.set(new_BL, unique_indices=True, mode="promise_in_bounds")

            key, value = put(self.key, written[0]), put(self.value, written[1])
        else:
            key, value = (x.swapaxes(2, 3) for x in written)
        return self._replace(key=key, value=value, length=self.length + num_new)

    def seen(self, num_new: int, size: int) -> tuple[Array, Array]:
        """The attention masks of the new chunks: over the S places of the cache, bool [B, L, S], and over the new chunks,
        bool [B, L, L]."""
        # The position of the chunk at each place; negative where nothing has been written.
        last_B1 = self.length[:, None] - 1
        at_BS = last_B1 - (last_B1 - jnp.arange(size)) % max(1, size)
        new_L = jnp.arange(num_new)
        behind_BLS = (self.length[:, None] + new_L)[..., None] - at_BS[:, None]
        # A new chunk overwrites the chunk S before it, and so never sees chunks that are S or more behind.
        window = self.window[..., None]
        old_BLS = (at_BS[:, None] >= 0) & (behind_BLS < jnp.minimum(window, size))
        behind_LL = new_L[:, None] - new_L
        new_BLL = (behind_LL >= 0) & (behind_LL < window)
        return old_BLS, jnp.broadcast_to(new_BLL, (len(self.length), num_new, num_new))

    def parts(self, key_BLGA: Array, value_BLGA: Array) -> list[Part]:
        """Inside a layer: the keys, values and masks for the new chunks' attention to the cache and to themselves."""
        size = self.key.shape[1]
        old_BLS, new_BLL = self.seen(key_BLGA.shape[1], size)
        new = key_BLGA, value_BLGA, new_BLL
        return [(self.key, self.value, old_BLS), new] if size else [new]

    def attend(self, query_BLHA: Array, key_BLGA: Array, value_BLGA: Array) -> Array:
        """Inside a layer: attention of the new chunks to the cache and themselves, [B, L, H, A]."""
        return _attend(query_BLHA, self.parts(key_BLGA, value_BLGA))


class UnslicedLayer(NamedTuple):
    """One layer's view of a cache for one new chunk per row, for CPUs: it reads only blocks of places that hold chunks.

    XLA's CPU backend copies the slice of a layer, with all its places, before each product. This class reads a block of places
    at a time, and stops after the last block of the row with the most chunks, for all rows. In programs with the options of
    `calm_jax.sampling.decode` it copies a block only for more than `_MOST_ELEMENTWISE` query heads per key-value head.

    Attributes:
        cache: the cache of all layers.
        layer: int32, the layer's number.
    """

    cache: KVCache
    layer: Array

    def attend(self, query_B1HA: Array, key_B1GA: Array, value_B1GA: Array) -> Array:
        """As `KVCache.attend`, up to rounding, with an online softmax over the blocks (Milakov and Gimelshein 2018,
        arXiv 1805.02867)."""
        cache = self.cache
        batch, _, heads, size = query_B1HA.shape
        _, _, groups, places, _ = cache.key.shape
        block = places if places < BLOCK else math.gcd(places, BLOCK)
        query_BGRA = query_B1HA.reshape(batch, groups, heads // groups, size) / math.sqrt(size)
        seen_B1S, _ = cache.seen(1, places)

        def at(x: Array, first: Array) -> Array:
            shape = (1, batch, groups, block, size)
            return jax.lax.dynamic_slice(x, (self.layer, 0, 0, first, 0), shape)[0]

        is_elementwise = heads <= _MOST_ELEMENTWISE * groups

        def scores(key_BGSA: Array) -> Array:
            x = query_BGRA.astype(key_BGSA.dtype)
            if not is_elementwise:
                return jnp.einsum(
                    "BGRA,BGSA->BGRS", x, key_BGSA, preferred_element_type=jnp.float32
                )
            products = x[:, :, :, None].astype(jnp.float32) * key_BGSA[:, :, None]
            # The first sum is vectorised, because its axis is not the last one.
            lanes = math.gcd(size, _LANES)
            return products.reshape(*products.shape[:-1], -1, lanes).sum(-2).sum(-1)

        def mix(weight_BGRS: Array, value_BGSA: Array) -> Array:
            x = weight_BGRS.astype(value_BGSA.dtype)
            if not is_elementwise:
                return jnp.einsum(
                    "BGRS,BGSA->BGRA", x, value_BGSA, preferred_element_type=jnp.float32
                )
            return (x[..., None].astype(jnp.float32) * value_BGSA[:, :, None]).sum(3)

        def add(index: Array, sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            largest_BGR1, sum_BGR1, mixed_BGRA = sums
            first = index * block
            score_BGRS = scores(at(cache.key, first))
            seen_BS = jax.lax.dynamic_slice_in_dim(seen_B1S[:, 0], first, block, axis=1)
            score_BGRS = jnp.where(seen_BS[:, None, None], score_BGRS, -jnp.inf)
            new_BGR1 = jnp.maximum(largest_BGR1, score_BGRS.max(-1, keepdims=True))
            weight_BGRS, kept_BGR1 = (
                jnp.exp(score_BGRS - new_BGR1),
                jnp.exp(largest_BGR1 - new_BGR1),
            )
            mixed_BGRA *= kept_BGR1
            mixed_BGRA += mix(weight_BGRS, at(cache.value, first))
            return new_BGR1, sum_BGR1 * kept_BGR1 + weight_BGRS.sum(-1, keepdims=True), mixed_BGRA

        # The new chunk sees itself, so that the largest score is finite from the beginning.
        own_BGR1 = scores(key_B1GA.swapaxes(1, 2))
        value_BGRA = jnp.broadcast_to(
            value_B1GA[:, 0, :, None].astype(jnp.float32), query_BGRA.shape
        )
        num_written = jnp.minimum(cache.length.max(), places)
        _, sum_BGR1, mixed_BGRA = jax.lax.fori_loop(
            0,
            (num_written + block - 1) // block,
            add,
            (own_BGR1, jnp.ones_like(own_BGR1), value_BGRA),
        )
        return (mixed_BGRA / sum_BGR1).astype(query_B1HA.dtype).reshape(query_B1HA.shape)


class Fork(NamedTuple):
    """A continuation of the first chunks of a cache. The cache is only read; the fork's own chunks are in a second one.

    Under `vmap` over forks of one prefix, the prefix is stored once.

    Attributes:
        prefix: the cache; its text must not be longer than the cache, so that chunk i is at place i. Its `length` is the
            number of chunks before the fork. Its `window`, a scalar or [B, 1], is that of the last chunk before the fork: each
            chunk of the fork sees that many of the last chunks of the prefix, and the fork's own chunks up to itself.
        own: the cache of the fork's own chunks.
    """

    prefix: KVCache
    own: KVCache

    @staticmethod
    def at(prefix: KVCache, length_B: Array, size: int) -> "Fork":
        """A fork after the first `length_B` chunks of `prefix`, with room for `size` chunks of its own."""

        def room(x: Array) -> Array:
            return jnp.zeros((*x.shape[:3], size, x.shape[4]), x.dtype)

        own = KVCache(
            room(prefix.key), room(prefix.value), jnp.zeros_like(prefix.length), jnp.int32(size)
        )
        window = prefix.window
        if window.ndim:
            window = jnp.take_along_axis(window, length_B[:, None] - 1, axis=1)
        return Fork(prefix._replace(length=length_B, window=window), own)

    def for_layers(self) -> "Fork":
        """See `KVCache.for_layers`."""
        return Fork(self.prefix.for_layers(), self.own.for_layers())

    def next_position(self) -> Array:
        """The position of each row's next chunk, [B]."""
        return self.prefix.length + self.own.length

    def extended(self, written: Written) -> "Fork":
        """The fork with the new chunks' keys and values, as the layers returned them, among its own."""
        return self._replace(own=self.own.extended(written))

    def attend(self, query_BLHA: Array, key_BLGA: Array, value_BLGA: Array) -> Array:
        """Inside a layer: attention of the new chunks to the prefix's window, the fork's own chunks and themselves."""
        behind_BS = self.prefix.length[:, None] - jnp.arange(self.prefix.key.shape[1])
        seen_BS = (behind_BS > 0) & (behind_BS <= self.prefix.window)
        seen_BLS = jnp.broadcast_to(
            seen_BS[:, None], (len(seen_BS), query_BLHA.shape[1], seen_BS.shape[1])
        )
        prefix = self.prefix.key, self.prefix.value, seen_BLS
        return _attend(query_BLHA, [prefix, *self.own.parts(key_BLGA, value_BLGA)])


class SegmentIds(NamedTuple):
    """The document of each chunk in packed blocks, so that documents do not attend to each other; without a cache.

    Attributes:
        segment: int32 [B, L]; chunks with equal ids belong to one document, and are contiguous.
    """

    segment: Array

    def next_position(self) -> Array:
        """The position of each row's first chunk, 0. Positions do not restart with each document: rotary attention depends
        only on differences of positions."""
        return jnp.zeros(len(self.segment), jnp.int32)

    def for_layers(self) -> "SegmentIds":
        """Itself: all layers see the same documents."""
        return self

    def window(self) -> Array:
        """Each chunk's place in its document, counted from 1, int32 [B, L]: the `window` that keeps documents apart."""
        begins_BL = jnp.diff(self.segment, axis=1, prepend=self.segment[:, :1]) != 0
        place_L = jnp.arange(self.segment.shape[1])
        return place_L + 1 - jax.lax.cummax(jnp.where(begins_BL, place_L, 0), axis=1)


# The `memory` argument of the transformer and the language models.
Memory = KVCache | Fork | SegmentIds
