"""Causal attention for CPUs, one block of queries at a time, each with only the keys up to its last query.

About half of the scores are never computed. The backward pass computes the weights again from the log-sum-exp of the scores
instead of storing them (as FlashAttention does; Dao et al. 2022, arXiv 2205.14135).
Axes: S keys, R query heads per key-value head.
"""

import math

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from calm_jax.parallel.products import is_one_cpu_device, transposed_product

# The number of queries that are processed at once.
_QUERY_BLOCK = 128
# The checkpoint name of the results, here and of the splash kernel, which the policies of `lm.model.remat` refer to.
ATTENTION = "attention"


def attend_in_blocks(
    query_BLHA: Array, key_BLGA: Array, value_BLGA: Array, segment_BL: Array | None
) -> Array:
    """See `calm_jax.models.attention.attend`."""
    batch, length, heads, size = query_BLHA.shape
    groups = key_BLGA.shape[2]
    # R is the number of query heads that share a key-value head. Heads come before positions, so that the rows of each
    # product are contiguous in memory.
    query = (query_BLHA / math.sqrt(size)).reshape(batch, length, groups, heads // groups, size)
    mixed_BGRLA = _attend(
        query.transpose(0, 2, 3, 1, 4),
        key_BLGA.transpose(0, 2, 1, 3),
        value_BLGA.transpose(0, 2, 1, 3),
        segment_BL,
    )
    return mixed_BGRLA.transpose(0, 3, 1, 2, 4).reshape(batch, length, heads, size)


@jax.custom_vjp
def _attend(
    query_BGRLA: Array, key_BGSA: Array, value_BGSA: Array, segment_BL: Array | None
) -> Array:
    return _blocks_forward(query_BGRLA, key_BGSA, value_BGSA, segment_BL)[0]


def _blocks(length: int) -> list[tuple[int, int]]:
    """The range [first, last) of each block's queries."""
    return [(first, min(first + _QUERY_BLOCK, length)) for first in range(0, length, _QUERY_BLOCK)]


def _scores(
    query_BGRLA: Array, key_BGSA: Array, segment_BL: Array | None, first: int, last: int
) -> Array:
    """The scores of queries [first, last) with keys [0, last), float32; -inf where they are masked."""
    score_BGRLS = jnp.einsum(
        "BGRLA,BGAS->BGRLS",
        query_BGRLA[:, :, :, first:last],
        key_BGSA[:, :, :last].swapaxes(2, 3),
        preferred_element_type=jnp.float32,
    )
    seen = jnp.arange(first, last)[:, None] >= jnp.arange(last)
    if segment_BL is not None:
        same_BLS = segment_BL[:, first:last, None] == segment_BL[:, None, :last]
        seen = (seen & same_BLS)[:, None, None]
    return jnp.where(seen, score_BGRLS, -jnp.inf)


def _blocks_forward(
    query_BGRLA: Array, key_BGSA: Array, value_BGSA: Array, segment_BL: Array | None
) -> tuple[Array, tuple[Array | None, ...]]:
    mixed, log_sums = [], []
    for first, last in _blocks(query_BGRLA.shape[3]):
        score_BGRLS = _scores(query_BGRLA, key_BGSA, segment_BL, first, last)
        largest_BGRL1 = score_BGRLS.max(-1, keepdims=True)
        weight_BGRLS = jnp.exp(score_BGRLS - largest_BGRL1)
        sum_BGRL1 = weight_BGRLS.sum(-1, keepdims=True)
        block_BGRLA = jnp.einsum(
            "BGRLS,BGSA->BGRLA",
            weight_BGRLS.astype(value_BGSA.dtype),
            value_BGSA[:, :, :last],
            preferred_element_type=jnp.float32,
        )
        mixed.append((block_BGRLA / sum_BGRL1).astype(query_BGRLA.dtype))
        log_sums.append(largest_BGRL1 + jnp.log(sum_BGRL1))
    mixed_BGRLA, log_sum_BGRL1 = (
        checkpoint_name(jnp.concatenate(parts, axis=3), ATTENTION) for parts in (mixed, log_sums)
    )
    kept = query_BGRLA, key_BGSA, value_BGSA, segment_BL, mixed_BGRLA, log_sum_BGRL1
    return mixed_BGRLA, kept


def _summed_over_queries(x_BGRLA: Array, y_BGRLS: Array) -> Array:
    """The product, summed over R and L: float32 [B, G, A, S]."""
    if x_BGRLA.dtype == jnp.bfloat16 and is_one_cpu_device():
        x_BGPA = x_BGRLA.reshape(*x_BGRLA.shape[:2], -1, x_BGRLA.shape[-1])
        y_BGPS = y_BGRLS.reshape(*y_BGRLS.shape[:2], -1, y_BGRLS.shape[-1])
        return transposed_product(x_BGPA, y_BGPS, jnp.float32)
    # In float32, because on several CPU devices a bfloat16 product of this layout fails at run time (jaxlib 0.10.1).
    return jnp.einsum(
        "BGARL,BGRLS->BGAS",
        x_BGRLA.transpose(0, 1, 4, 2, 3).astype(jnp.float32),
        y_BGRLS.astype(jnp.float32),
    )


def _blocks_backward(
    kept: tuple[Array, ...], cotangent_BGRLA: Array
) -> tuple[Array, Array, Array, None]:
    query_BGRLA, key_BGSA, value_BGSA, segment_BL, mixed_BGRLA, log_sum_BGRL1 = kept
    exact = jnp.float32
    # The sum over the keys of each weight times its gradient, computed from the output alone (as FlashAttention does).
    delta_BGRL1 = (cotangent_BGRLA.astype(exact) * mixed_BGRLA).sum(-1, keepdims=True)
    query_gradients = []
    # The gradients of keys and values are computed transposed, because XLA's CPU backend is slow at products that contract
    # the first axes of both sides.
    key_gradient_BGAS = jnp.zeros(key_BGSA.swapaxes(2, 3).shape, exact)
    value_gradient_BGAS = jnp.zeros_like(key_gradient_BGAS)
    for first, last in _blocks(query_BGRLA.shape[3]):
        block = (slice(None), slice(None), slice(None), slice(first, last))
        score_BGRLS = _scores(query_BGRLA, key_BGSA, segment_BL, first, last)
        weight_BGRLS = jnp.exp(score_BGRLS - log_sum_BGRL1[block])
        weight_gradient_BGRLS = jnp.einsum(
            "BGRLA,BGAS->BGRLS",
            cotangent_BGRLA[block],
            value_BGSA[:, :, :last].swapaxes(2, 3),
            preferred_element_type=exact,
        )
        score_gradient_BGRLS = weight_BGRLS * (weight_gradient_BGRLS - delta_BGRL1[block])
        score_gradient_BGRLS = score_gradient_BGRLS.astype(key_BGSA.dtype)
        query_gradients.append(
            jnp.einsum(
                "BGRLS,BGSA->BGRLA",
                score_gradient_BGRLS,
                key_BGSA[:, :, :last],
                preferred_element_type=exact,
            ).astype(query_BGRLA.dtype)
        )
        key_gradient_BGAS = key_gradient_BGAS.at[..., :last].add(
            _summed_over_queries(query_BGRLA[block], score_gradient_BGRLS)
        )
        value_gradient_BGAS = value_gradient_BGAS.at[..., :last].add(
            _summed_over_queries(cotangent_BGRLA[block], weight_BGRLS.astype(value_BGSA.dtype))
        )
    return (
        jnp.concatenate(query_gradients, axis=3),
        key_gradient_BGAS.swapaxes(2, 3).astype(key_BGSA.dtype),
        value_gradient_BGAS.swapaxes(2, 3).astype(value_BGSA.dtype),
        None,
    )


_attend.defvjp(_blocks_forward, _blocks_backward)
