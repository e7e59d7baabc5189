"""The backbone: a Llama decoder; its optional key-value cache is an argument and a result (paper, section 3)."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from calm_jax.errors import UserError, require_at_least, require_one_of, require_within
from calm_jax.models import attention
from calm_jax.models.attention_in_blocks import ATTENTION
from calm_jax.models.kv_cache import Fork, KVCache, Memory, SegmentIds, UnslicedLayer, Written
from calm_jax.models.layers import Rotation, SwiGLU, linear, rotate, rotation_at
from calm_jax.models.stack import recomputed, stack
from calm_jax.parallel.constraints import constrain
from calm_jax.parallel.devices import target_device
from calm_jax.parallel.products import PRODUCT

# For each `lm.model.remat`, the policy that says which values of a layer are kept for the backward pass; None keeps all.
# The policy of "auto" does not matter: it is replaced before a training step is compiled, and nothing else has a backward
# pass.
_REMAT_POLICIES = {
    "auto": None,
    "none": None,
    "full": jax.checkpoint_policies.nothing_saveable,
    # Keeps products with weights and the results of the attention "blocks" and "splash", but never the scores.
    "dots": jax.checkpoint_policies.save_only_these_names(PRODUCT, ATTENTION),
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
    rms_norm_epsilon: float
    norm_epsilon: float
    remat: str
    attention: str

    def __post_init__(self):
        require_one_of("lm.model.remat", self.remat, _REMAT_POLICIES)
        require_one_of("lm.model.attention", self.attention, attention.CHOICES)
        sizes = ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads")
        require_at_least(1, self, "lm.model.", *sizes)
        require_within(1, 1e12, self, "lm.model.", "rope_theta")
        require_within(1e-20, 1, self, "lm.model.", "rms_norm_epsilon", "norm_epsilon")
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
        """A, features per head."""
        return self.hidden_size // self.num_heads


class Attention(nn.Module):
    """Causal self-attention with rotary positions and grouped key-value heads."""

    config: TransformerConfig
    dtype: DTypeLike

    @nn.compact
    def __call__(
        self, x_BLD: Array, memory: Memory | UnslicedLayer | None, rotation: Rotation
    ) -> tuple[Array, Written | None]:
        config = self.config

        def project(heads: int, name: str) -> Array:
            shape = (heads, config.head_size)
            return linear(shape, self.dtype, name, use_bias=False)(x_BLD)

        heads, groups = config.num_heads, config.num_kv_heads
        if self.has_variable("params", "query_key_value"):
            ends = heads, heads + groups
            parts = jnp.split(project(heads + 2 * groups, "query_key_value"), ends, axis=-2)
        else:
            parts = [project(heads, "query"), project(groups, "key"), project(groups, "value")]
        query_BLHA, key_BLGA = (rotate(part, rotation) for part in parts[:2])
        value_BLGA = parts[2]
        written = None
        if memory is None or isinstance(memory, SegmentIds):
            segment_BL = None if memory is None else memory.segment
            mixed = attention.attend(query_BLHA, key_BLGA, value_BLGA, segment_BL, config.attention)
        else:
            mixed = memory.attend(query_BLHA, key_BLGA, value_BLGA)
            written = key_BLGA, value_BLGA
        output = linear(config.hidden_size, self.dtype, "output", axis=(-2, -1), use_bias=False)
        return output(mixed), written


class Block(nn.Module):
    """Pre-norm attention and SwiGLU, both residual."""

    config: TransformerConfig
    dtype: DTypeLike

    @nn.compact
    def __call__(
        self, x_BLD: Array, memory: Memory | UnslicedLayer | None, rotation: Rotation
    ) -> tuple[Array, Written | None]:
        config = self.config
        norm = nn.RMSNorm(config.rms_norm_epsilon, dtype=self.dtype, name="attention_norm")
        mix = Attention(config, self.dtype, name="attention")
        mixed, written = mix(norm(x_BLD), memory, rotation)
        x_BLD = x_BLD + mixed
        norm = nn.RMSNorm(config.rms_norm_epsilon, dtype=self.dtype, name="mlp_norm")
        mlp = SwiGLU(config.intermediate_size, self.dtype, name="mlp")
        return constrain(x_BLD + mlp(norm(x_BLD))), written


def _per_layer(memory: Memory | UnslicedLayer | None) -> Any:
    """The `in_axes` of a memory in the scan over layers: 0 for arrays with an axis of layers, broadcast for the others."""
    if memory is None:
        return None
    if isinstance(memory, SegmentIds):
        return SegmentIds(nn.broadcast)  # type: ignore[arg-type]  # a tree of axes, not of arrays
    if isinstance(memory, UnslicedLayer):
        return UnslicedLayer(nn.broadcast, 0)  # type: ignore[arg-type]
    if isinstance(memory, Fork):
        return Fork(_per_layer(memory.prefix), _per_layer(memory.own))
    return KVCache(0, 0, nn.broadcast, nn.broadcast)  # type: ignore[arg-type]


class Transformer(nn.Module):
    """Layers and final norm, in `dtype` arithmetic."""

    config: TransformerConfig
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x_BLD: Array, memory: Memory | None = None) -> tuple[Array, Memory | None]:
        """Hidden states of L inputs.

        Args:
            x_BLD: embedded inputs.
            memory: a cache or fork that the inputs continue; segment ids, to keep documents apart; or None.

        Returns:
            Hidden states [B, L, D], and the cache or fork extended by the L inputs (None without one). The `length` of
            the cache then counts all L inputs of every row, padding too. A caller that pads rows sets `length` to the
            number of real chunks: later inputs do not attend to the padding, and overwrite it.
        """
        config = self.config
        batch, num_new, _ = x_BLD.shape
        first_B = jnp.zeros(batch, jnp.int32) if memory is None else memory.next_position()
        position_BL = first_B[:, None] + jnp.arange(num_new)
        factors = rotation_at(position_BL, config.head_size, config.rope_theta)
        read: Memory | UnslicedLayer | None = None if memory is None else memory.for_layers()
        # Prompts and forks read each kernel for many rows, so that a loop costs nothing. It compiles faster.
        is_long = isinstance(memory, Fork) or (isinstance(memory, KVCache) and num_new > 1)
        is_on_cpu = target_device().platform == "cpu"
        if isinstance(memory, KVCache) and not is_long and memory.key.size and is_on_cpu:
            read = UnslicedLayer(memory, jnp.arange(config.num_layers))
        kept = _REMAT_POLICIES[config.remat]
        block = Block if kept is None else recomputed(Block, config.num_layers, kept, is_long)
        in_axes = _per_layer(read), nn.broadcast
        layers = stack(
            self, block, (config, self.dtype), "layers", config.num_layers, in_axes, is_long
        )
        with jax.named_scope("backbone"):
            x_BLD = constrain(x_BLD.astype(self.dtype))
            x_BLD, written = layers(x_BLD, read, factors)
            # The new keys and values are made to depend on the last layer's result, after which nothing reads the cache.
            # Otherwise XLA's CPU backend would copy the whole cache before writing to it.
            written = jax.tree.map(lambda x_BLGA: x_BLGA + 0 * x_BLD[..., :1, None], written)
            x_BLD = nn.RMSNorm(config.rms_norm_epsilon, dtype=self.dtype, name="norm")(x_BLD)
        # `written` is None unless the memory is a cache or a fork.
        return x_BLD, None if written is None else memory.extended(written)  # type: ignore[union-attr]
