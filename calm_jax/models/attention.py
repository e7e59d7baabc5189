"""Causal attention over whole blocks, in three ways that agree but for rounding; `lm.model.attention` chooses.

"xla" is the reference and works everywhere; "cudnn" and "splash" never hold the [L, L] scores. Which device it is for
is read from the mesh that is set, so that compiling for hardware that is not here chooses as that hardware would.
"""

import math

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from calm_jax.errors import UserError
from calm_jax.placement import rows_spec, tensor_spec

CHOICES = ("auto", "xla", "cudnn", "splash")
# Under this name the splash kernel's results are known to the policies of `lm.model.remat`.
KEPT = "attention"
# The splash kernel works on square tiles of the scores: large ones are fast, and a side is a multiple of 128.
_LARGEST_TILE, _SMALLEST_TILE = 512, 128


def _device() -> jax.Device | jax.sharding.AbstractDevice:
    """A device of the mesh that is set; without one, a device that is here."""
    return jax.sharding.get_abstract_mesh().abstract_device or jax.local_devices()[0]


def _not_cudnn(head_size: int, dtype: DTypeLike, isolated: bool) -> str:
    """Why cuDNN's attention cannot do it; empty if it can."""
    if not _device().device_kind.startswith("NVIDIA"):
        return f"needs an NVIDIA GPU, and this is for {_device().device_kind}"
    if jnp.dtype(dtype) != jnp.bfloat16:
        return "needs compute_dtype='bfloat16'"
    if isolated:
        return "would need a mask of L x L for lm.data.isolate_documents"
    # Compiling on a CPU, for a GPU that is not here, is for one of a data centre.
    capability = getattr(jax.local_devices()[0], "compute_capability", "9.0")
    largest = 256 if float(capability) >= 9 else 128
    if head_size % 8 or head_size > largest:
        return f"needs heads of a multiple of 8 features, at most {largest} here, and these have {head_size}"
    return ""


def check(choice: str, head_size: int, dtype: DTypeLike, isolated: bool) -> None:
    """Raises `UserError` if a choice cannot be computed on the devices of the mesh that is set."""
    reason = ""
    if choice == "cudnn":
        reason = _not_cudnn(head_size, dtype, isolated)
    # On a CPU it is interpreted: slow, but the same.
    elif choice == "splash" and _device().platform not in ("tpu", "cpu"):
        reason = f"needs a TPU, and this is for {_device().device_kind}"
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
    """What each place takes from itself and those before it, of its own segment if there are any, [B, L, H, A].

    H may be a multiple of G: heads in a row share keys and values. Raises `UserError` as `check` does.
    """
    about = query_BLHA.shape[-1], query_BLHA.dtype, segment_BL is not None
    check(choice, *about)
    if choice == "auto":
        if _device().platform == "tpu":
            choice = "splash"
        else:
            choice = "xla" if _not_cudnn(*about) else "cudnn"
    if choice == "splash":
        return _splash(query_BLHA, key_BLGA, value_BLGA, segment_BL)
    if choice == "cudnn":
        return _cudnn(query_BLHA, key_BLGA, value_BLGA)
    mask_B1LL = None
    if segment_BL is not None:
        mask_B1LL = (segment_BL[:, :, None] == segment_BL[:, None])[:, None]
    return jax.nn.dot_product_attention(
        query_BLHA, key_BLGA, value_BLGA, mask=mask_B1LL, is_causal=True
    )


def _filled(x_BL: Array, multiple: int) -> Array:
    """With zeros behind, which no place sees, up to a length that a kernel can do."""
    filler = -x_BL.shape[1] % multiple
    return jnp.pad(x_BL, [(0, 0), (0, filler)] + [(0, 0)] * (x_BL.ndim - 2))


def _cudnn(query_BLHA: Array, key_BLGA: Array, value_BLGA: Array) -> Array:
    """By cuDNN; for training, JAX lets it have even lengths alone, and ours are one chunk short of that."""
    even = [_filled(x_BLHA, 2) for x_BLHA in (query_BLHA, key_BLGA, value_BLGA)]
    mixed_BLHA = jax.nn.dot_product_attention(*even, is_causal=True, implementation="cudnn")
    return mixed_BLHA[:, : query_BLHA.shape[1]]


def _splash(
    query_BLHA: Array, key_BLGA: Array, value_BLGA: Array, segment_BL: Array | None
) -> Array:
    """By the TPU's kernel: each device computes its own rows and heads, which no sharding could tell from the kernel."""
    arguments = query_BLHA, key_BLGA, value_BLGA, segment_BL
    if jax.sharding.get_abstract_mesh().empty:
        return _splash_on_one_device(*arguments)
    rows = rows_spec(query_BLHA.shape[0])
    # Queries go where their keys are: groups are what is split.
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
    # Where it is not asked for, nothing has to wait for it.
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    _, length, heads, head_size = query_BLHA.shape
    tile = _SMALLEST_TILE
    while tile < min(length, _LARGEST_TILE):
        tile *= 2
    # Lengths have to be whole tiles; heads of any size are filled up by the kernel itself.
    whole = length + -length % tile
    mask = splash.CausalMask((whole, whole))
    kernel = splash.make_splash_mha(
        splash.MultiHeadMask([mask] * heads),
        block_sizes=splash.BlockSizes(*[tile] * 8),
        head_shards=1,
        q_seq_shards=1,
        residual_checkpoint_name=KEPT,
        interpret=_device().platform == "cpu",
    )
    # The kernel does not scale.
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
