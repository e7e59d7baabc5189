"""The output layer of the autoencoder, the baseline and the token predictor: logits over the vocabulary, and their loss.

P positions, D features, V tokens of the vocabulary, W tokens of one block of the vocabulary.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array

from calm_jax import losses
from calm_jax.parallel.constraints import (
    constrain,
    gathered,
    gathered_in,
    rows_per_device,
    scattered,
)
from calm_jax.parallel.devices import target_device
from calm_jax.parallel.products import product_in_float32, transposed_product

# The largest array of logits that the loss holds on an accelerator, in elements: 512 MiB in float32, a thirtieth of the smallest
# one's memory. The arithmetic in `cross_entropy` says why it is not smaller.
_MAX_LOGITS = 2**27
# The same on a CPU: 32 MiB, which mostly stay in its cache. Computing these logits twice takes no longer than writing all
# logits to memory and reading them again (docs/benchmarks.md).
_MAX_LOGITS_ON_CPU = 2**23
# The number of tokens in a block of the vocabulary is a multiple of this, the tile size of accelerators.
_TILE = 128


def logits(x: Array, table_VD: Array) -> Array:
    """Logits: the dot products of feature vectors with the table's row of each token.

    Args:
        x: features [..., D]; the table is cast to their dtype.
        table_VD: the parameter, one row per token.

    Returns:
        float32 [..., V].
    """
    table_VD = table_VD.astype(x.dtype)
    dimension_numbers = (((x.ndim - 1,), (1,)), ((), ()))
    if x.dtype == jnp.float32:
        return jax.lax.dot_general(x, table_VD, dimension_numbers)
    return product_in_float32(x, table_VD, dimension_numbers)


def argmax(logit: Array) -> Array:
    """The first token with the largest logit, [..., V] -> int32 [...]. If a logit is NaN, the token is arbitrary.

    The logits must not be an expression such as `a + w * b`. CPUs compare them with their own maximum, and the compiler may compute
    such an expression twice and round differently, by a fused multiply-add; then none is equal to the maximum.
    """
    if target_device().platform != "cpu":
        return logit.argmax(-1).astype(jnp.int32)
    # XLA's CPU backend computes an argmax by a scalar loop, three to seven times slower than this.
    last = logit.shape[-1] - 1
    is_largest = logit == logit.max(-1, keepdims=True)
    return jnp.where(is_largest, jnp.arange(last + 1, dtype=jnp.int32), last).min(-1)


def block_size(positions: int, vocab_size: int, on_cpu: bool) -> int:
    """How many tokens of the vocabulary `cross_entropy` processes at once for `positions` positions per device; at most V."""
    most = _MAX_LOGITS_ON_CPU if on_cpu else _MAX_LOGITS
    block = max(_TILE, most // positions // _TILE * _TILE)
    if block >= vocab_size:
        return vocab_size
    # The blocks have nearly equal sizes, because the last one is padded with zeros.
    num_blocks = -(-vocab_size // block)
    return -(-vocab_size // num_blocks // _TILE) * _TILE


def cross_entropy(x: Array, table_VD: Array, target: Array) -> Array:
    """The cross-entropy of `logits(x, table_VD)`, computed in blocks of the vocabulary where the logits are large.

    Logits are large if a device would hold more than `_MAX_LOGITS` of them, or a CPU `_MAX_LOGITS_ON_CPU`. The blocks are then
    processed one after the other, each for all positions. The forward pass keeps the log-sum-exp of each position; the backward pass computes
    each block's logits again. The gradient of a block's rows of the table is complete when the block is, so that the loop
    carries no [V, D] sum, and on a mesh each row's gradient is summed over the devices once. The loop carries only the
    [P, D] gradient of x.

    With bfloat16 operands a block of W tokens costs 8 P D W FLOPs (four products). Writing and reading its float32 logits
    and their bfloat16 gradients moves 26 P W bytes, and the gradient of x 8 P D bytes, which is 0.3 D / W of that: 8 % for
    the 65,536 positions per device of stage 1 of CALM-M on eight devices, with W = 2048 and D = 512. A loop over blocks of
    positions would carry the table's gradient instead: 8 V D bytes for each block of B positions, a share of 0.3 D / B. With
    the same memory, B V = P W, that is more where V is larger than P, and a mesh would need another sum over the devices.
    The smaller memory costs one of the four products, because the logits are computed twice.

    Args:
        x: features [..., D], in the dtype of the products' operands; sums are float32. P positions in all.
        table_VD: the parameter, one row per token.
        target: token ids [...]; a negative one is masked and gives 0.

    Returns:
        The cross-entropy of each position in nats, float32 [...].
    """
    vocab_size = len(table_VD)
    on_cpu = target_device().platform == "cpu"
    block = block_size(rows_per_device(target.size), vocab_size, on_cpu)
    if block == vocab_size:
        table_VD = gathered_in(x.dtype, table_VD)
        return losses.cross_entropy(logits(x, table_VD), target)
    loss_P = _in_blocks(block, x.reshape(-1, x.shape[-1]), table_VD, target.reshape(-1))
    return loss_P.reshape(target.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _in_blocks(block: int, x_PD: Array, table_VD: Array, target_P: Array) -> Array:
    return _forward(block, x_PD, table_VD, target_P)[0]


def _blocks(block: int, table_VD: Array, x_PD: Array) -> tuple[Array, Array]:
    """The table in the dtype of x, on every device, [blocks, W, D]; and the first token of each block."""
    table_VD = gathered(table_VD.astype(x_PD.dtype))
    first = jnp.arange(0, len(table_VD), block)
    filled_VD = jnp.pad(table_VD, ((0, -len(table_VD) % block), (0, 0)))
    return filled_VD.reshape(len(first), block, -1), first


def _dot(x: Array, y: Array, axis_of_y: int) -> Array:
    """The product over the last axis of `x` and one of `y`, two matrices, in float32."""
    dimension_numbers = (((1,), (axis_of_y,)), ((), ()))
    return jax.lax.dot_general(x, y, dimension_numbers, preferred_element_type=jnp.float32)


def _logits_of_block(x_PD: Array, rows_WD: Array, first: Array, vocab_size: int) -> Array:
    """The logits of the tokens from `first` on, float32 [P, W]; -inf for rows that only fill up the last block.

    Such rows would have the logit 0, which may be far above all others and overflow in exp.
    """
    logit_PW = _dot(x_PD, rows_WD, 1)
    block = len(rows_WD)
    if vocab_size % block == 0:
        return logit_PW
    return jnp.where(first + jnp.arange(block) < vocab_size, logit_PW, -jnp.inf)


def _at_target(logit_PW: Array, place_P: Array) -> Array:
    """The logit of each position's target, [P]; 0 where the target's place in the block is outside of it."""
    block = logit_PW.shape[1]
    if target_device().platform != "cpu":
        # Accelerators compute this sum in the same pass over the logits as the others.
        return jnp.where(jnp.arange(block) == place_P[:, None], logit_PW, 0).sum(-1)
    # CPUs would write the masked logits to memory.
    logit_P = jnp.take_along_axis(logit_PW, place_P[:, None], axis=1, mode="clip")[:, 0]
    return jnp.where((place_P >= 0) & (place_P < block), logit_P, 0)


def _forward(
    block: int, x_PD: Array, table_VD: Array, target_P: Array
) -> tuple[Array, tuple[Array, ...]]:
    vocab_size = len(table_VD)

    def add_block(sums: tuple[Array, ...], rows_and_first: tuple[Array, Array]):
        (largest_P, total_P, at_target_P), (rows_WD, first) = sums, rows_and_first
        logit_PW = _logits_of_block(x_PD, rows_WD, first, vocab_size)
        new_P = jnp.maximum(largest_P, logit_PW.max(-1))
        exp_sum_P = jnp.exp(logit_PW - new_P[:, None]).sum(-1)
        sums = (
            new_P,
            total_P * jnp.exp(largest_P - new_P) + exp_sum_P,
            at_target_P + _at_target(logit_PW, target_P - first),
        )
        return constrain(sums), None

    zeros_P = jnp.zeros(len(x_PD), jnp.float32)
    blocks = _blocks(block, table_VD, x_PD)
    (largest_P, total_P, at_target_P), _ = jax.lax.scan(
        add_block, constrain((zeros_P - jnp.inf, zeros_P, zeros_P)), blocks
    )
    log_sum_P = largest_P + jnp.log(total_P)
    loss_P = jnp.where(target_P >= 0, log_sum_P - at_target_P, 0)
    return loss_P, (x_PD, table_VD, target_P, log_sum_P)


def _backward(block: int, kept: tuple[Array, ...], cotangent_P: Array) -> tuple[Array, Array, None]:
    x_PD, table_VD, target_P, log_sum_P = kept
    vocab_size = len(table_VD)
    weight_P1 = jnp.where(target_P >= 0, cotangent_P, 0)[:, None]

    def add_block(x_gradient_PD: Array, rows_and_first: tuple[Array, Array]):
        rows_WD, first = rows_and_first
        logit_PW = _logits_of_block(x_PD, rows_WD, first, vocab_size)
        is_target_PW = first + jnp.arange(block) == target_P[:, None]
        gradient_PW = weight_P1 * (jnp.exp(logit_PW - log_sum_P[:, None]) - is_target_PW)
        gradient_PW = gradient_PW.astype(x_PD.dtype)
        x_gradient_PD += _dot(gradient_PW, rows_WD, 0)
        rows_gradient_WD = scattered(transposed_product(gradient_PW, x_PD, x_PD.dtype))
        return constrain(x_gradient_PD), rows_gradient_WD

    x_gradient_PD, gradient = jax.lax.scan(
        add_block,
        constrain(jnp.zeros(x_PD.shape, jnp.float32)),
        _blocks(block, table_VD, x_PD),
    )
    table_gradient_VD = gradient.reshape(-1, gradient.shape[-1])[:vocab_size]
    return x_gradient_PD.astype(x_PD.dtype), table_gradient_VD.astype(table_VD.dtype), None


_in_blocks.defvjp(_forward, _backward)
