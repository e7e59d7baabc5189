"""Causal attention over whole blocks of text; `lm.model.attention` chooses among implementations that agree up to rounding.

"xla" is the reference and works on every device; "blocks" is written for CPUs; "cudnn" (NVIDIA GPUs) and "splash"
(TPUs) never store the [L, L] scores. The device is read from the mesh that is set (`jax.set_mesh`), so that a program
compiled ahead of time for other hardware gets the implementation for that hardware.
"""

import math

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from calm_jax.errors import UserError
from calm_jax.models.attention_in_blocks import ATTENTION, attend_in_blocks
from calm_jax.parallel.constraints import rows_spec, tensor_spec
from calm_jax.parallel.devices import target_device

CHOICES = ("auto", "xla", "blocks", "cudnn", "splash")
# Sides of the square tiles of scores that the splash kernel computes: multiples of 128, and larger ones are faster.
_LARGEST_TILE, _SMALLEST_TILE = 512, 128


def _not_cudnn(head_size: int, dtype: DTypeLike, isolated: bool) -> str:
    """Why cuDNN's attention cannot be used; empty if it can."""
    if not target_device().device_kind.startswith("NVIDIA"):
        return f"needs an NVIDIA GPU, and the device is {target_device().device_kind}"
    if jnp.dtype(dtype) != jnp.bfloat16:
        return "needs compute_dtype='bfloat16'"
    if isolated:
        return "would need an L x L mask for lm.data.isolate_documents"
    # CPUs have no compute capability. If they compile for GPUs ahead of time, assume that of a data-centre GPU, 9.0.
    capability = getattr(jax.local_devices()[0], "compute_capability", "9.0")
    largest = 256 if float(capability) >= 9 else 128
    if head_size % 8 or head_size > largest:
        return f"needs a head size that is a multiple of 8 and at most {largest} on this device, and it is {head_size}"
    return ""


def check(choice: str, head_size: int, dtype: DTypeLike, isolated: bool) -> None:
    """Checks that an implementation can be used on the devices of the mesh that is set.

    Args:
        choice: one of `CHOICES`.
        head_size: A, features per head.
        dtype: of queries, keys and values.
        isolated: whether documents are isolated (`lm.data.isolate_documents`).

    Raises:
        UserError: if it cannot; the message names the reason.
    """
    reason = ""
    if choice == "cudnn":
        reason = _not_cudnn(head_size, dtype, isolated)
    # On a CPU the splash kernel is interpreted: slow, with the same results.
    elif choice == "splash" and target_device().platform not in ("tpu", "cpu"):
        reason = f"needs a TPU, and the device is {target_device().device_kind}"
    if reason:
        raise UserError(
            f"lm.model.attention={choice!r} {reason}: give --config.lm.model.attention=auto"
        )


def attend(
    query_BLHA: Array,
    key_BLGA: Array,
    value_BLGA: Array,
    segment_BL: Array | None,
    choice: str,
) -> Array:
    """Causal attention: each position attends to itself and the positions before it, within its own segment.

    Args:
        query_BLHA: not scaled; this function scales by 1 / sqrt(A).
        key_BLGA: H is a multiple of G; consecutive query heads share a key-value head.
        value_BLGA: as the keys.
        segment_BL: int32, the document of each position; None if every position attends to all before it.
        choice: one of `CHOICES`; "auto" takes the fastest one that can be used.

    Returns:
        [B, L, H, A], of the queries' dtype.

    Raises:
        UserError: if the choice cannot be used (see `check`).
    """
    about = query_BLHA.shape[-1], query_BLHA.dtype, segment_BL is not None
    check(choice, *about)
    if choice == "auto":
        if target_device().platform == "tpu":
            choice = "splash"
        elif target_device().platform == "cpu":
            choice = "blocks"
        else:
            choice = "xla" if _not_cudnn(*about) else "cudnn"
    if choice == "splash":
        return _splash(query_BLHA, key_BLGA, value_BLGA, segment_BL)
    if choice == "cudnn":
        return _cudnn(query_BLHA, key_BLGA, value_BLGA)
    if choice == "blocks":
        return attend_in_blocks(query_BLHA, key_BLGA, value_BLGA, segment_BL)
    mask_B1LL = None
    if segment_BL is not None:
        mask_B1LL = (segment_BL[:, :, None] == segment_BL[:, None])[:, None]
    return jax.nn.dot_product_attention(
        query_BLHA, key_BLGA, value_BLGA, mask=mask_B1LL, is_causal=True
    )


def _filled(x_BL: Array, multiple: int) -> Array:
    """Pads the end of the sequence axis with zeros to a multiple; causal attention hides them from the positions before."""
    filler = -x_BL.shape[1] % multiple
    return jnp.pad(x_BL, [(0, 0), (0, filler)] + [(0, 0)] * (x_BL.ndim - 2))


def _cudnn(query_BLHA: Array, key_BLGA: Array, value_BLGA: Array) -> Array:
    """cuDNN's attention. JAX accepts only even lengths when training; an odd L is padded."""
    even = [_filled(x_BLHA, 2) for x_BLHA in (query_BLHA, key_BLGA, value_BLGA)]
    mixed_BLHA = jax.nn.dot_product_attention(*even, is_causal=True, implementation="cudnn")
    return mixed_BLHA[:, : query_BLHA.shape[1]]


def _splash(
    query_BLHA: Array, key_BLGA: Array, value_BLGA: Array, segment_BL: Array | None
) -> Array:
    """The splash kernel under `shard_map`, as the compiler cannot partition a kernel: each device computes its rows and heads."""
    arguments = query_BLHA, key_BLGA, value_BLGA, segment_BL
    if jax.sharding.get_abstract_mesh().empty:
        return _splash_on_one_device(*arguments)
    rows = rows_spec(query_BLHA.shape[0])
    # Tensor parallelism splits the G key-value heads; query heads are on the device of their key-value head.
    spec = PartitionSpec(rows, None, tensor_spec(key_BLGA.shape[2]), None)
    on_all = jax.shard_map(
        _splash_on_one_device,
        in_specs=(spec, spec, spec, PartitionSpec(rows)),
        out_specs=spec,
        check_vma=False,
    )
    return on_all(*arguments)


def _splash_on_one_device(
    query_BLHA: Array, key_BLGA: Array, value_BLGA: Array, segment_BL: Array | None
) -> Array:
    # Imported here, as the import is slow and most runs do not need it.
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    _, length, heads, head_size = query_BLHA.shape
    tile = _SMALLEST_TILE
    while tile < min(length, _LARGEST_TILE):
        tile *= 2
    # The length has to be a multiple of the tile; the head size need not be, as the kernel pads it itself.
    whole = length + -length % tile
    mask = splash.CausalMask((whole, whole))
    kernel = splash.make_splash_mha(
        splash.MultiHeadMask([mask] * heads),
        block_sizes=splash.BlockSizes(*[tile] * 8),  # type: ignore[arg-type]  # its first eight fields
        head_shards=1,
        q_seq_shards=1,
        residual_checkpoint_name=ATTENTION,
        interpret=target_device().platform == "cpu",
    )
    # The kernel does not scale the queries.
    heads_first = [
        _filled(x_BLHA, tile).swapaxes(1, 2)
        for x_BLHA in (query_BLHA / math.sqrt(head_size), key_BLGA, value_BLGA)
    ]
    segments = None
    if segment_BL is not None:
        segment_BS = _filled(segment_BL, tile)
        segments = splash.SegmentIds(segment_BS, segment_BS)
    mixed_BHLA = jax.vmap(kernel)(*heads_first, segments)
    return mixed_BHLA.swapaxes(1, 2)[:, :length]
