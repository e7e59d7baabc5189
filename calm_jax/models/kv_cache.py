"""The transformer's `memory` argument: a key-value cache, a fork of a cache, or the segment ids of packed documents.

All three are arguments of pure functions, never state of a module; caches and forks are results too. Layers only read
them: a layer attends to its part of a cache and to the new chunks, and the new keys and values of all layers are written
together, once. So a compiled loop over chunks updates its cache in place, and moves no more of it than it reads.
B rows, L new chunks, S places of a cache, R query heads of a key-value head, H query heads, G key-value heads, A features
per head.
"""

import itertools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

# Keys and values of the chunks that are being read, [layers, B, L, G, A] each; inside a layer [B, L, G, A].
Written = tuple[Array, Array]
# Keys and values that queries attend to, [B, S, G, A] each, and the mask of those that each query sees, bool [B, L, S].
Part = tuple[Array, Array, Array]


def _attend(query_BLHA: Array, parts: list[Part]) -> Array:
    """Attention with one softmax over all parts, [B, L, H, A]."""
    batch, length, heads, size = query_BLHA.shape
    groups = parts[0][0].shape[2]
    query_BLGRA = query_BLHA.reshape(batch, length, groups, heads // groups, size)
    scores = []
    for key_BSGA, _, seen_BLS in parts:
        score_BGRLS = jnp.einsum(
            "BLGRA,BSGA->BGRLS", query_BLGRA, key_BSGA, preferred_element_type=jnp.float32
        )
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
    return mixed_BLGRA.astype(query_BLHA.dtype).reshape(query_BLHA.shape)


class KVCache(NamedTuple):
    """Keys and values of the chunks read so far: a ring buffer with S places, where chunk i has place i mod S.

    If a chunk sees only the last W chunks, a text may be longer than the cache. To read L chunks at once, S must then be
    at least W + L - 1, and the L chunks must not wrap around the end of the S places. A cache of no places gets as many as
    the chunks that it reads first. Inside a layer (`parts`, `attend`), `key` and `value` are those of the layer,
    [B, S, G, A].

    Attributes:
        key: [layers, B, S, G, A], rotated by position.
        value: [layers, B, S, G, A].
        length: int32 [B], how many chunks each row has read.
        window: int32, how many of the last chunks, itself included, each chunk sees: a scalar, or [B, L] for the L
            chunks of one read (see `SegmentIds.window`). With S or more, a chunk sees all chunks before it.
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
        shape = (num_layers, batch, size, num_kv_heads, head_size)
        return KVCache(
            jnp.zeros(shape, dtype),
            jnp.zeros(shape, dtype),
            jnp.zeros(batch, jnp.int32),
            jnp.int32(window),
        )

    def next_position(self) -> Array:
        """The position of each row's next chunk, [B]."""
        return self.length

    def extended(self, written: Written) -> "KVCache":
        """The cache with the new chunks' keys and values, as the layers returned them."""
        num_new, size = written[0].shape[2], self.key.shape[2]
        if size:
            row_B1 = jnp.arange(len(self.length))[:, None]
            place_BL = (self.length[:, None] + jnp.arange(num_new)) % size

            def put(places: Array, new: Array) -> Array:
                at = places.at[:, row_B1, place_BL]
                return at.set(new, unique_indices=True, mode="promise_in_bounds")

            key, value = put(self.key, written[0]), put(self.value, written[1])
        else:
            key, value = written
        return self._replace(key=key, value=value, length=self.length + num_new)

    def seen(self, num_new: int) -> tuple[Array, Array]:
        """What each new chunk sees of the places of the cache, bool [B, L, S], and of the new chunks, bool [B, L, L]."""
        size = self.key.shape[-3]
        # The position of the chunk at each place; negative where nothing has been written.
        last_B1 = self.length[:, None] - 1
        at_BS = last_B1 - (last_B1 - jnp.arange(size)) % max(1, size)
        new_L = jnp.arange(num_new)
        behind_BLS = (self.length[:, None] + new_L)[..., None] - at_BS[:, None]
        # The new chunks overwrite the oldest ones.
        window = self.window[..., None]
        old_BLS = (at_BS[:, None] >= 0) & (behind_BLS < jnp.minimum(window, size))
        behind_LL = new_L[:, None] - new_L
        new_BLL = (behind_LL >= 0) & (behind_LL < window)
        return old_BLS, jnp.broadcast_to(new_BLL, (len(self.length), num_new, num_new))

    def parts(self, key_BLGA: Array, value_BLGA: Array) -> list[Part]:
        """Inside a layer: what the new chunks attend to, the cache and themselves."""
        old_BLS, new_BLL = self.seen(key_BLGA.shape[1])
        new = key_BLGA, value_BLGA, new_BLL
        return [(self.key, self.value, old_BLS), new] if self.key.shape[-3] else [new]

    def attend(self, query_BLHA: Array, key_BLGA: Array, value_BLGA: Array) -> Array:
        """Inside a layer: attention of the new chunks to the cache and themselves, [B, L, H, A]."""
        return _attend(query_BLHA, self.parts(key_BLGA, value_BLGA))


class Fork(NamedTuple):
    """A continuation of the first chunks of a cache. The cache is only read; the fork's own chunks are in a second one.

    Under `vmap` over forks of one prefix, the prefix is stored once.

    Attributes:
        prefix: the cache, whose text must not have outgrown it: chunk i is at place i. Its `length` is the number of
            chunks before the fork. Its `window`, a scalar or [B, 1], is that of the last chunk before the fork: each
            chunk of the fork sees that many of the last chunks of the prefix, and the fork's own chunks up to itself.
        own: the cache of the fork's own chunks.
    """

    prefix: KVCache
    own: KVCache

    @staticmethod
    def at(prefix: KVCache, length_B: Array, size: int) -> "Fork":
        """A fork after the first `length_B` chunks of `prefix`, with room for `size` chunks of its own."""

        def room(x: Array) -> Array:
            return jnp.zeros((*x.shape[:2], size, *x.shape[3:]), x.dtype)

        own = KVCache(
            room(prefix.key), room(prefix.value), jnp.zeros_like(prefix.length), jnp.int32(size)
        )
        window = prefix.window
        if window.ndim:
            window = jnp.take_along_axis(window, length_B[:, None] - 1, axis=1)
        return Fork(prefix._replace(length=length_B, window=window), own)

    def next_position(self) -> Array:
        """The position of each row's next chunk, [B]."""
        return self.prefix.length + self.own.length

    def extended(self, written: Written) -> "Fork":
        """The fork with the new chunks' keys and values, as the layers returned them, among its own."""
        return self._replace(own=self.own.extended(written))

    def attend(self, query_BLHA: Array, key_BLGA: Array, value_BLGA: Array) -> Array:
        """Inside a layer: as `KVCache.attend`, to the prefix's window, the fork's own chunks and the new ones."""
        behind_BS = self.prefix.length[:, None] - jnp.arange(self.prefix.key.shape[1])
        seen_BS = (behind_BS > 0) & (behind_BS <= self.prefix.window)
        seen_BLS = jnp.broadcast_to(
            seen_BS[:, None], (len(seen_BS), query_BLHA.shape[1], seen_BS.shape[1])
        )
        prefix = self.prefix.key, self.prefix.value, seen_BLS
        return _attend(query_BLHA, [prefix, *self.own.parts(key_BLGA, value_BLGA)])


class SegmentIds(NamedTuple):
    """The documents of packed blocks that are read whole, to keep documents from attending to each other.

    Attributes:
        segment: int32 [B, L]; chunks with equal ids belong to one document, and are contiguous.
    """

    segment: Array

    def next_position(self) -> Array:
        """Positions count through the block, over all documents: rotary attention depends on differences only."""
        return jnp.zeros(len(self.segment), jnp.int32)

    def window(self) -> Array:
        """Each chunk's place in its document, counted from 1, int32 [B, L]: the `window` that keeps documents apart."""
        begins_BL = jnp.diff(self.segment, axis=1, prepend=self.segment[:, :1]) != 0
        place_L = jnp.arange(self.segment.shape[1])
        return place_L + 1 - jax.lax.cummax(jnp.where(begins_BL, place_L, 0), axis=1)


# The `memory` argument of the transformer and the language models.
Memory = KVCache | Fork | SegmentIds
