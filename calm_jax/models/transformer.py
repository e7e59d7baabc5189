"""A Llama decoder, with an optional key-value cache that is an argument and a result (paper, section 3)."""

import dataclasses
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from calm_jax.errors import UserError
from calm_jax.models.layers import SwiGLU, linear, rotary_angles, rotate


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
    remat: bool

    def __post_init__(self):
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


class KVCache(NamedTuple):
    """Keys and values of the chunks seen so far, one row per sequence.

    key, value: [layers, B, S, G, A]. length: [B] int32, how many of a row's S places are filled.
    """

    key: Array
    value: Array
    length: Array

    @staticmethod
    def empty(config: TransformerConfig, batch: int, size: int, dtype: DTypeLike) -> "KVCache":
        shape = (config.num_layers, batch, size, config.num_kv_heads, config.head_size)
        return KVCache(
            jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.zeros(batch, jnp.int32)
        )


class Attention(nn.Module):
    """Causal self-attention with rotary positions and grouped key-value heads."""

    config: TransformerConfig
    dtype: DTypeLike

    @nn.compact
    def __call__(
        self, x_BLD: Array, angle_BLA: Array, cache: tuple[Array, Array] | None, length_B: Array
    ) -> tuple[Array, tuple[Array, Array] | None]:
        config = self.config

        def project(heads: int, name: str) -> Array:
            shape = (heads, config.head_size)
            return linear(shape, self.dtype, name, use_bias=False)(x_BLD)

        query_BLHA = rotate(project(config.num_heads, "query"), angle_BLA)
        key_BLGA = rotate(project(config.num_kv_heads, "key"), angle_BLA)
        value_BLGA = project(config.num_kv_heads, "value")
        if cache is None:
            mixed = jax.nn.dot_product_attention(query_BLHA, key_BLGA, value_BLGA, is_causal=True)
        else:
            write = jax.vmap(
                lambda rows, new, at: jax.lax.dynamic_update_slice(rows, new, (at, 0, 0))
            )
            key_BSGA, value_BSGA = cache = (
                write(cache[0], key_BLGA, length_B),
                write(cache[1], value_BLGA, length_B),
            )
            place_BL = length_B[:, None] + jnp.arange(x_BLD.shape[1])
            mask_BLS = jnp.arange(key_BSGA.shape[1]) <= place_BL[..., None]
            mixed = jax.nn.dot_product_attention(
                query_BLHA, key_BSGA, value_BSGA, mask=mask_BLS[:, None]
            )
        output = linear(config.hidden_size, self.dtype, "output", axis=(-2, -1), use_bias=False)
        return output(mixed), cache


class Block(nn.Module):
    """Pre-norm attention and SwiGLU, both residual."""

    config: TransformerConfig
    dtype: DTypeLike

    @nn.compact
    def __call__(
        self,
        x_BLD: Array,
        cache: tuple[Array, Array] | None,
        angle_BLA: Array,
        length_B: Array,
    ) -> tuple[Array, tuple[Array, Array] | None]:
        config = self.config
        norm = nn.RMSNorm(config.norm_epsilon, dtype=self.dtype, name="attention_norm")
        attention = Attention(config, self.dtype, name="attention")
        mixed, cache = attention(norm(x_BLD), angle_BLA, cache, length_B)
        x_BLD = x_BLD + mixed
        norm = nn.RMSNorm(config.norm_epsilon, dtype=self.dtype, name="mlp_norm")
        mlp = SwiGLU(config.intermediate_size, self.dtype, name="mlp")
        return x_BLD + mlp(norm(x_BLD)), cache


class Transformer(nn.Module):
    """Layers and final norm: [B, L, D] -> [B, L, D], in `dtype` arithmetic."""

    config: TransformerConfig
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x_BLD: Array, cache: KVCache | None = None) -> tuple[Array, KVCache | None]:
        """With a cache, the L inputs of row b take places `length[b]..length[b]+L-1` of it.

        The returned cache counts all L inputs as filled; a caller whose rows are shorter sets
        `length` back, and what stands beyond it is neither read nor kept.
        """
        config = self.config
        batch, num_new, _ = x_BLD.shape
        length_B = jnp.zeros(batch, jnp.int32) if cache is None else cache.length
        position_BL = length_B[:, None] + jnp.arange(num_new)
        angle_BLA = rotary_angles(position_BL, config.head_size, config.rope_theta)
        block = nn.remat(Block, prevent_cse=False) if config.remat else Block
        layers = nn.scan(
            block,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=(0, nn.broadcast, nn.broadcast),
            length=config.num_layers,
        )(config, self.dtype, name="layers")
        pairs = None if cache is None else (cache.key, cache.value)
        with jax.named_scope("backbone"):
            x_BLD, pairs = layers(x_BLD.astype(self.dtype), pairs, angle_BLA, length_B)
            x_BLD = nn.RMSNorm(config.norm_epsilon, dtype=self.dtype, name="norm")(x_BLD)
        if cache is not None:
            cache = KVCache(*pairs, length_B + num_new)
        return x_BLD, cache
