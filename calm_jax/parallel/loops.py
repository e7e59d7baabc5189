"""Loops inside a compiled step: over blocks of positions, whose memory is that of one block, and over layers."""

from collections.abc import Callable
from typing import Any

import jax

from calm_jax.parallel.devices import target_device


def map_positions(function: Callable[[Any], Any], most: int, tree: Any) -> Any:
    """`function` for each entry of the first axis, as `jax.lax.map`, in blocks of equal size of at most `most` entries.

    With a `batch_size` that does not divide the entries, `jax.lax.map` compiles the function a second time, for the remainder. Here
    the first entries fill the last block.

    Args:
        function: maps arrays without the first axis, which must not be sharded, to arrays.
        most: how many entries are computed together, at most; at least 1.
        tree: arrays with P >= 1 entries, also keys.
    """
    num = len(jax.tree.leaves(tree)[0])
    # The fewest blocks, and the size that makes them equal.
    num_blocks = -(-num // most)
    size = -(-num // num_blocks)
    if num_blocks == 1:
        return jax.vmap(function)(tree)
    filling = num_blocks * size - num
    if filling:
        tree = jax.tree.map(lambda x: jax.numpy.concatenate([x, x[:filling]]), tree)
    return jax.tree.map(lambda x: x[:num], jax.lax.map(function, tree, batch_size=size))


def unrolled(length: int) -> int:
    """The `unroll` of a scan over `length` layers with stacked kernels.

    On CPUs and GPUs the scan is unrolled completely. In training, a loop would copy what each layer keeps for the backward pass into
    stacks, which it fills with zeros first, and copy it out again: on GPUs a third of the bytes that a step of CALM-M moves.
    In generation, a loop over layers would copy each kernel out of its stack for each chunk. With unrolled layers CPUs copy each
    kernel once, before the loop over chunks, but GPUs mostly once for each chunk; generation therefore stores each layer's
    parameters separately (`calm_jax.models.stack.for_generation`).

    TPUs do not copy kernels out of stacks. Their layers stay a loop, which compiles faster.
    """
    return 1 if target_device().platform == "tpu" else length
