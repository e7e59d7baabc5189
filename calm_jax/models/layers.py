"""Layers that several networks share."""

import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from calm_jax.parallel.constraints import constrain_groups, each_group, gathered_in
from calm_jax.parallel.devices import target_device
from calm_jax.parallel.mesh import path_of
from calm_jax.parallel.products import has_all_rows_on_one_cpu, is_one_cpu_device, product

# Standard deviation of every Linear and Embedding at initialisation (`initializer_range` of the published configs).
normal_init = nn.initializers.normal(0.02)


def _operands_in_dtype(
    *arrays: Array | None, dtype: Any = None, inexact: bool = True
) -> list[Array | None]:
    """The input and the kernel of a linear layer in `dtype`, and its float32 bias."""
    x, kernel, bias = arrays
    return [*nn.dtypes.promote_dtype(x, kernel, dtype=dtype, inexact=inexact), bias]


class _RoundedLinear(nn.DenseGeneral):
    """A linear layer that adds its bias in float32 and rounds the sum to `dtype`; for bfloat16 on CPUs.

    The gradient of a bfloat16 bias is a sum over rows, which XLA's CPU backend rounds to bfloat16 after each addition; this also
    takes it three times as long as a float32 sum.
    """

    def __call__(self, inputs: Array) -> Array:
        return super().__call__(inputs).astype(self.dtype)


def _summed_in_float32(
    layer: type[nn.DenseGeneral],
    features: int | tuple[int, ...],
    dtype: DTypeLike,
    name: str | None,
    axis: int | tuple[int, ...],
    kernel_init: nn.initializers.Initializer,
) -> nn.DenseGeneral:
    """A linear layer with operands in `dtype`, whose products and bias are added in float32."""
    return layer(
        features,
        axis=axis,
        dtype=dtype,
        promote_dtype=_operands_in_dtype,
        kernel_init=kernel_init,
        dot_general=functools.partial(product, in_float32=True),
        name=name,
    )


def linear(
    features: int | tuple[int, ...],
    dtype: DTypeLike,
    name: str | None = None,
    axis: int | tuple[int, ...] = -1,
    use_bias: bool = True,
    kernel_init: nn.initializers.Initializer = normal_init,
) -> nn.DenseGeneral:
    """A linear layer that contracts `axis`; it computes in `dtype` and has float32 parameters."""
    if use_bias and jnp.dtype(dtype) == jnp.bfloat16 and is_one_cpu_device():
        return _summed_in_float32(_RoundedLinear, features, dtype, name, axis, kernel_init)
    return nn.DenseGeneral(
        features,
        axis=axis,
        use_bias=use_bias,
        dtype=dtype,
        kernel_init=kernel_init,
        dot_general=product,
        name=name,
    )


def in_compute_dtype(params: Any, dtype: DTypeLike) -> Any:
    """Casts kernels and embedding tables to `dtype` once, for inference: layers would otherwise cast them at every use.

    The results of a model that computes in `dtype` do not change. Scales and biases stay float32, because norms use them
    in float32.
    """
    if jnp.dtype(dtype) == jnp.float32:
        return params

    def cast(path: tuple[Any, ...], x: Array) -> Array:
        return x.astype(dtype) if path_of(path).endswith(("kernel", "embedding")) else x

    return jax.jit(functools.partial(jax.tree_util.tree_map_with_path, cast))(params)


def linear_in_float32(
    features: int,
    dtype: DTypeLike,
    name: str | None = None,
    kernel_init: nn.initializers.Initializer = normal_init,
) -> nn.DenseGeneral:
    """A linear layer with operands in `dtype` and a float32 result: the last layer of a network whose output is float32."""
    return _summed_in_float32(nn.DenseGeneral, features, dtype, name, -1, kernel_init)


def look_up(embed: nn.Embed, tokens: Array) -> Array:
    """The embeddings of tokens, as `embed(tokens)`; gathers a sharded table to each device, not the tokens to the table.

    Each device then looks up its own rows of the batch. The gradients of equal tokens are added up in float32: a
    bfloat16 sum stops growing at 256 equal terms.
    """

    def take(table: Array, tokens: Array) -> Array:
        return jnp.take(table, tokens, axis=0).astype(embed.dtype)

    table = gathered_in(embed.dtype, embed.embedding)
    tables = each_group(table, tokens)
    if tables is None:
        return take(table, tokens)
    parts = tokens.reshape(len(tables), -1, *tokens.shape[1:])
    return constrain_groups(jax.vmap(take)(tables, parts)).reshape(*tokens.shape, -1)


@jax.checkpoint
def silu(x: Array) -> Array:
    """`x * sigmoid(x)`, of which the backward pass keeps only `x`; differentiation alone would keep three arrays."""
    return nn.silu(x)


@jax.checkpoint
def gated(gate: Array, up: Array) -> Array:
    """`silu(gate) * up`, of which the backward pass keeps only the two arguments."""
    return nn.silu(gate) * up


def gated_halves(x: Array) -> Array:
    """`silu(gate) * up` for `gate, up = jnp.split(x, 2, axis=-1)`, [..., 2 F] -> [..., F]."""
    return _halves(x) if target_device().platform == "cpu" else _halves_in_one_gradient(x)


def _halves(x: Array) -> Array:
    gate, up = jnp.split(x, 2, axis=-1)
    return nn.silu(gate) * up


# The gradient is one elementwise expression over both halves. Automatic differentiation of `_halves` would concatenate two arrays,
# which XLA's GPU backend writes and then copies. On CPUs, where arithmetic costs more than copies, differentiation is faster.
_halves_in_one_gradient = jax.custom_vjp(_halves)


def _halves_backward(x: Array, g: Array) -> tuple[Array]:
    gate, up = jnp.split(x[..., None, :], 2, axis=-1)
    weight = nn.sigmoid(gate)
    is_gate = jnp.arange(2)[:, None] == 0
    of_gate, of_up = up * weight * (1 + gate * (1 - weight)), gate * weight
    return ((g[..., None, :] * jnp.where(is_gate, of_gate, of_up)).reshape(x.shape),)


_halves_in_one_gradient.defvjp(lambda x: (_halves(x), x), _halves_backward)


def layer_norm(
    epsilon: float, dtype: DTypeLike, name: str | None = None, affine: bool = True
) -> nn.LayerNorm:
    """LayerNorm with float32 statistics and the two-pass variance, which has no cancellation."""
    return nn.LayerNorm(
        epsilon,
        dtype=dtype,
        use_bias=affine,
        use_scale=affine,
        use_fast_variance=False,
        name=name,
    )


class SwiGLU(nn.Module):
    """`down(silu(gate x) * up x)`, without biases: [..., D] -> [..., D]."""

    intermediate_size: int
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: Array) -> Array:
        if self.has_variable("params", "gate_up"):
            both = linear(2 * self.intermediate_size, self.dtype, "gate_up", use_bias=False)(x)
            gate, up = jnp.split(both, 2, axis=-1)
        else:
            gate = linear(self.intermediate_size, self.dtype, "gate", use_bias=False)(x)
            up = linear(self.intermediate_size, self.dtype, "up", use_bias=False)(x)
        return linear(x.shape[-1], self.dtype, "down", use_bias=False)(gated(gate, up))


class Rotation(NamedTuple):
    """The rotary embedding's factors at some positions, for all layers: float32 [B, L, A/2] each."""

    cos: Array
    sin: Array


def rotation_at(position_BL: Array, head_size: int, theta: float) -> Rotation:
    """The rotary embedding's factors at integer positions."""
    frequency = theta ** (-jnp.arange(0, head_size, 2, dtype=jnp.float32) / head_size)
    angle_BLA = position_BL[..., None].astype(jnp.float32) * frequency

    def factors(angle_BLA: Array) -> Rotation:
        return Rotation(jnp.cos(angle_BLA), jnp.sin(angle_BLA))

    def at_zero(angle_BLA: Array) -> Rotation:
        return Rotation(jnp.ones_like(angle_BLA), jnp.zeros_like(angle_BLA))

    # A compiler would fuse sines and cosines into their users, and compute them again in each layer, for each head of queries and
    # keys. A barrier prevents that, but not in the CPU backend of jaxlib 0.10, which removes it first. No compiler fuses the result
    # of a conditional, so on CPUs a branch computes the sines and cosines; it is taken unless all positions are 0.
    if has_all_rows_on_one_cpu():
        rotation = jax.lax.cond(jnp.any(position_BL != 0), factors, at_zero, angle_BLA)
    else:
        rotation = factors(angle_BLA)
    return jax.lax.optimization_barrier(rotation)


def rotate(x_BLHA: Array, rotation: Rotation) -> Array:
    """Applies the rotary embedding, in the "rotate half" layout of Hugging Face's Llama."""
    cos, sin = rotation.cos[:, :, None], rotation.sin[:, :, None]
    first, second = jnp.split(x_BLHA.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_BLHA.dtype)
