"""The transformer's `memory` argument: a key-value cache, a fork of a cache, or the segment ids of packed documents.

All three are arguments of pure functions, never state of a module; caches and forks are results too. B rows, L new
chunks, S places of a cache, H query heads, G key-value heads, A features per head.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

# Keys and values of a whole cache, [layers, B, S, G, A] each; inside a layer [B, S, G, A].
Written = tuple[Array, Array]


class KVCache(NamedTuple):
    """Keys and values of the chunks read so far: a ring buffer with S places, where chunk i has place i mod S.

    If a chunk sees only the last W chunks, a text may be longer than the cache. To read L chunks at once, S must then be
    at least W + L - 1, and the L chunks must not wrap around the end of the S places. Inside a layer (`write`, `attend`), `key`
    and `value` are those of the layer, [B, S, G, A].

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

    def extended(self, written: Written, num_new: int) -> "KVCache":
        """The cache with the keys and values that the layers returned, which hold `num_new` more chunks."""
        return self._replace(key=written[0], value=written[1], length=self.length + num_new)

    def write(self, key_BLGA: Array, value_BLGA: Array) -> tuple[Written, Array]:
        """Inside a layer: the keys and values with the new ones written, and the mask of the new queries.

        The mask is bool [B, L, S], true at the places that each new chunk sees.
        """
        size, num_new = self.key.shape[1], key_BLGA.shape[1]
        put = jax.vmap(lambda rows, new, at: jax.lax.dynamic_update_slice(rows, new, (at, 0, 0)))
        first_B = self.length % size
        written = put(self.key, key_BLGA, first_B), put(self.value, value_BLGA, first_B)
        # The position of the chunk at each place; negative where nothing has been written.
        last_B1 = self.length[:, None] + num_new - 1
        at_BS = last_B1 - (last_B1 - jnp.arange(size)) % size
        behind_BLS = (self.length[:, None] + jnp.arange(num_new))[..., None] - at_BS[:, None]
        seen_BLS = (at_BS[:, None] >= 0) & (behind_BLS >= 0) & (behind_BLS < self.window[..., None])
        return written, seen_BLS

    def attend(
        self, query_BLHA: Array, key_BLGA: Array, value_BLGA: Array
    ) -> tuple[Array, Written]:
        """Inside a layer: attention of the new chunks to the cache and themselves, [B, L, H, A], and the new cache."""
        written, mask_BLS = self.write(key_BLGA, value_BLGA)
        return jax.nn.dot_product_attention(query_BLHA, *written, mask=mask_BLS[:, None]), written


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

    def extended(self, written: Written, num_new: int) -> "Fork":
        """The fork with its own keys and values as the layers returned them, which hold `num_new` more chunks."""
        return self._replace(own=self.own.extended(written, num_new))

    def attend(
        self, query_BLHA: Array, key_BLGA: Array, value_BLGA: Array
    ) -> tuple[Array, Written]:
        """Inside a layer: as `KVCache.attend`, with one softmax over the prefix's window and the fork's own chunks."""
        written, own_mask_BLS = self.own.write(key_BLGA, value_BLGA)
        shape = query_BLHA.shape
        groups = key_BLGA.shape[2]
        query_BLGRA = query_BLHA.reshape(*shape[:2], groups, -1, shape[3]) / math.sqrt(shape[3])

        def scores(key_BSGA: Array, mask_BLS: Array) -> Array:
            score = jnp.einsum(
                "BLGRA,BSGA->BGRLS", query_BLGRA, key_BSGA, preferred_element_type=jnp.float32
            )
            return jnp.where(mask_BLS[:, None, None], score, -jnp.inf)

        behind_BS = self.prefix.length[:, None] - jnp.arange(self.prefix.key.shape[1])
        seen_BS = (behind_BS > 0) & (behind_BS <= self.prefix.window)
        shared = scores(self.prefix.key, seen_BS[:, None])
        weights = jax.nn.softmax(
            jnp.concatenate([shared, scores(written[0], own_mask_BLS)], axis=-1), axis=-1
        ).astype(query_BLHA.dtype)
        split = self.prefix.key.shape[1]
        mixed = jnp.einsum("BGRLS,BSGA->BLGRA", weights[..., :split], self.prefix.value)
        mixed += jnp.einsum("BGRLS,BSGA->BLGRA", weights[..., split:], written[1])
        return mixed.reshape(shape), written


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
