"""A Llama decoder, with an optional key-value cache that is an argument and a result (paper, section 3)."""

import dataclasses
import math
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from calm_jax.errors import UserError
from calm_jax.models import attention
from calm_jax.models.layers import SwiGLU, linear, rotary_angles, rotate
from calm_jax.placement import PRODUCT, constrain

# What each way of `lm.model.remat` keeps of a layer for the backward pass; None for everything.
_KEPT = {
    "none": None,
    "full": jax.checkpoint_policies.nothing_saveable,
    # Products with weights, and what the splash kernel gives; never the scores of attention.
    "dots": jax.checkpoint_policies.save_only_these_names(PRODUCT, attention.KEPT),
}


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """`config.lm.model`; every key is described in `configs/common.py`."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    rope_theta: float
    norm_epsilon: float
    remat: str
    attention: str

    def __post_init__(self):
        for name, choices in (("remat", tuple(_KEPT)), ("attention", attention.CHOICES)):
            if getattr(self, name) not in choices:
                raise UserError(
                    f"lm.model.{name}={getattr(self, name)!r} is none of {', '.join(choices)}"
                )
        for name in ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"):
            if getattr(self, name) < 1:
                raise UserError(f"lm.model.{name}={getattr(self, name)} must be at least 1")
        for name in ("rope_theta", "norm_epsilon"):
            if getattr(self, name) <= 0:
                raise UserError(f"lm.model.{name}={getattr(self, name)} must be positive")
        if self.hidden_size % (2 * self.num_heads):
            raise UserError(
                f"lm.model.hidden_size={self.hidden_size} must be a multiple of twice lm.model.num_heads="
                f"{self.num_heads}, so that a head has an even number of features to rotate"
            )
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"lm.model.num_kv_heads={self.num_kv_heads} must divide lm.model.num_heads={self.num_heads}"
            )

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads


# Keys and values, [layers, B, S, G, A] each, without the first axis inside a layer.
Written = tuple[Array, Array]


class KVCache(NamedTuple):
    """Keys and values of the chunks seen so far, one row per sequence; the chunk of position i at place i mod S.

    key, value: see `Written`. length: [B] int32, how many chunks a row has seen. window: int32, how many
    of the last chunks, with itself, each chunk sees: a number, or [B, L] for the L chunks of one read (see
    `Packed`). To see W chunks of a longer text, S has to be at least W + L - 1, where L chunks are read at once,
    and such a read must not go over the end of the S places.
    """

    key: Array
    value: Array
    length: Array
    window: Array

    @staticmethod
    def empty(
        config: TransformerConfig, batch: int, size: int, window: int | Array, dtype: DTypeLike
    ) -> "KVCache":
        shape = (config.num_layers, batch, size, config.num_kv_heads, config.head_size)
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
        """With what the layers wrote for `num_new` more chunks."""
        return self._replace(key=written[0], value=written[1], length=self.length + num_new)

    def write(self, key_BLGA: Array, value_BLGA: Array) -> tuple[Written, Array]:
        """In a layer: new keys and values in place, and which places each of them sees, bool [B, L, S]."""
        size, num_new = self.key.shape[1], key_BLGA.shape[1]
        put = jax.vmap(lambda rows, new, at: jax.lax.dynamic_update_slice(rows, new, (at, 0, 0)))
        first_B = self.length % size
        written = put(self.key, key_BLGA, first_B), put(self.value, value_BLGA, first_B)
        # The position whose chunk stands at each place; below 0 where none has been written.
        last_B1 = self.length[:, None] + num_new - 1
        at_BS = last_B1 - (last_B1 - jnp.arange(size)) % size
        behind_BLS = (self.length[:, None] + jnp.arange(num_new))[..., None] - at_BS[:, None]
        seen_BLS = (at_BS[:, None] >= 0) & (behind_BLS >= 0) & (behind_BLS < self.window[..., None])
        return written, seen_BLS

    def attend(
        self, query_BLHA: Array, key_BLGA: Array, value_BLGA: Array
    ) -> tuple[Array, Written]:
        """In a layer: what new chunks take from all before them and themselves; keys and values with theirs."""
        written, mask_BLS = self.write(key_BLGA, value_BLGA)
        return jax.nn.dot_product_attention(query_BLHA, *written, mask=mask_BLS[:, None]), written


class Fork(NamedTuple):
    """A continuation of the first chunks of a cache that it only reads, with a small cache of its own.

    It sees of them what the last one saw, and the cache must hold every chunk from the first on. Under `vmap` over
    forks of one prefix, the prefix is held once. `prefix.length` is how many chunks of it there are for the fork, and
    `prefix.window`, a number or [B, 1], how many of the last of these it sees.
    """

    prefix: KVCache
    own: KVCache

    @staticmethod
    def at(prefix: KVCache, length_B: Array, size: int) -> "Fork":
        """A fork after the first `length` chunks of `prefix`, with room for `size` of its own."""

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
        return self.prefix.length + self.own.length

    def extended(self, written: Written, num_new: int) -> "Fork":
        return self._replace(own=self.own.extended(written, num_new))

    def attend(
        self, query_BLHA: Array, key_BLGA: Array, value_BLGA: Array
    ) -> tuple[Array, Written]:
        """One softmax over what is seen of the prefix and of the fork's own chunks."""
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


class Packed(NamedTuple):
    """Whole blocks, nothing before them, of documents that do not see each other: equal numbers are one document's.

    segment: [B, L] int32.
    """

    segment: Array

    def next_position(self) -> Array:
        """Positions run on over all documents: only differences of them matter."""
        return jnp.zeros(len(self.segment), jnp.int32)

    def window(self) -> Array:
        """How many of the last chunks, with itself, each chunk sees, [B, L]."""
        begins_BL = jnp.diff(self.segment, axis=1, prepend=self.segment[:, :1]) != 0
        place_L = jnp.arange(self.segment.shape[1])
        return place_L + 1 - jax.lax.cummax(jnp.where(begins_BL, place_L, 0), axis=1)


# What a forward pass may continue from, or be divided by.
Memory = KVCache | Fork | Packed


class Attention(nn.Module):
    """Causal self-attention with rotary positions and grouped key-value heads."""

    config: TransformerConfig
    dtype: DTypeLike

    @nn.compact
    def __call__(
        self, x_BLD: Array, memory: Memory | None, angle_BLA: Array
    ) -> tuple[Array, Written | None]:
        config = self.config

        def project(heads: int, name: str) -> Array:
            shape = (heads, config.head_size)
            return linear(shape, self.dtype, name, use_bias=False)(x_BLD)

        query_BLHA = rotate(project(config.num_heads, "query"), angle_BLA)
        key_BLGA = rotate(project(config.num_kv_heads, "key"), angle_BLA)
        value_BLGA = project(config.num_kv_heads, "value")
        written = None
        if memory is None or isinstance(memory, Packed):
            segment_BL = None if memory is None else memory.segment
            mixed = attention.attend(query_BLHA, key_BLGA, value_BLGA, segment_BL, config.attention)
        else:
            mixed, written = memory.attend(query_BLHA, key_BLGA, value_BLGA)
        output = linear(config.hidden_size, self.dtype, "output", axis=(-2, -1), use_bias=False)
        return output(mixed), written


class Block(nn.Module):
    """Pre-norm attention and SwiGLU, both residual."""

    config: TransformerConfig
    dtype: DTypeLike

    @nn.compact
    def __call__(
        self, x_BLD: Array, memory: Memory | None, angle_BLA: Array
    ) -> tuple[Array, Written | None]:
        config = self.config
        norm = nn.RMSNorm(config.norm_epsilon, dtype=self.dtype, name="attention_norm")
        mix = Attention(config, self.dtype, name="attention")
        mixed, written = mix(norm(x_BLD), memory, angle_BLA)
        x_BLD = x_BLD + mixed
        norm = nn.RMSNorm(config.norm_epsilon, dtype=self.dtype, name="mlp_norm")
        mlp = SwiGLU(config.intermediate_size, self.dtype, name="mlp")
        return constrain(x_BLD + mlp(norm(x_BLD))), written


def _per_layer(memory: Memory | None) -> Any:
    """Which parts of a memory each layer has its own of (their first axis), and which all layers share."""
    if memory is None:
        return None
    if isinstance(memory, Packed):
        return Packed(nn.broadcast)
    if isinstance(memory, Fork):
        return Fork(_per_layer(memory.prefix), _per_layer(memory.own))
    return KVCache(0, 0, nn.broadcast, nn.broadcast)


class Transformer(nn.Module):
    """Layers and final norm: [B, L, D] -> [B, L, D], in `dtype` arithmetic."""

    config: TransformerConfig
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x_BLD: Array, memory: Memory | None = None) -> tuple[Array, Memory | None]:
        """With a cache, the L inputs of row b take places `length[b]..length[b]+L-1` of it.

        The returned cache counts all L inputs as filled; a caller whose rows are shorter sets
        `length` back, and what stands beyond it is neither read nor kept.
        """
        config = self.config
        batch, num_new, _ = x_BLD.shape
        first_B = jnp.zeros(batch, jnp.int32) if memory is None else memory.next_position()
        position_BL = first_B[:, None] + jnp.arange(num_new)
        angle_BLA = rotary_angles(position_BL, config.head_size, config.rope_theta)
        kept = _KEPT[config.remat]
        block = Block if kept is None else nn.remat(Block, prevent_cse=False, policy=kept)
        layers = nn.scan(
            block,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=(_per_layer(memory), nn.broadcast),
            length=config.num_layers,
        )(config, self.dtype, name="layers")
        with jax.named_scope("backbone"):
            x_BLD = constrain(x_BLD.astype(self.dtype))
            x_BLD, written = layers(x_BLD, memory, angle_BLA)
            x_BLD = nn.RMSNorm(config.norm_epsilon, dtype=self.dtype, name="norm")(x_BLD)
        return x_BLD, None if written is None else memory.extended(written, num_new)
