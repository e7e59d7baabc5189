"""Sharding constraints inside a compiled step, on the mesh of `jax.set_mesh`: rows stay where they are, and weights are
gathered to them."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from calm_jax.parallel.devices import target_device
from calm_jax.parallel.mesh import BATCH, path_of, spec_of

# The checkpoint name of `product`'s results, for the policies of `lm.model.remat`.
PRODUCT = "product"
# Products of up to so many rows take most of their time to read the kernels.
_FEW_ROWS = 256


def unrolled(length: int) -> int:
    """The `unroll` of a scan over `length` layers with stacked kernels, where products have few rows.

    On CPUs and GPUs the scan is unrolled completely: a loop over layers would copy each kernel out of its stack for each chunk. With
    unrolled layers CPUs copy each kernel once, before the loop over chunks, but GPUs mostly once for each chunk. Generation therefore
    stores each layer's parameters separately (`calm_jax.models.stack.for_generation`). TPUs do not copy kernels, and need no unrolling.
    """
    return 1 if target_device().platform == "tpu" else length


def unrolled_in_training(length: int) -> int:
    """The `unroll` of a scan over `length` layers that read whole blocks of text, in training above all.

    On GPUs the scan is unrolled completely. A loop would copy what each layer keeps for the backward pass into stacks, which it
    fills with zeros first, and copy it out again: a third of the bytes that a step of CALM-M moves. On TPUs and CPUs
    the layers stay a loop, which compiles faster.
    """
    return length if target_device().platform in GPUS else 1


def _ways() -> int:
    """The number of devices that a batch's rows are split over; 1 without a mesh."""
    (axes,), shape = BATCH, jax.sharding.get_abstract_mesh().shape
    return math.prod(shape.get(axis, 1) for axis in axes)


def rows_per_device(rows: int) -> int:
    """The number of rows of a global batch on each device, rounded down, at least 1; all of them without a mesh."""
    return max(1, rows // _ways())


def _equal_blocks(num: int, most: int) -> tuple[int, int]:
    """The fewest blocks of at most `most` entries for `num` entries, and the size that makes them equal; the last may need filling."""
    num_blocks = -(-num // most)
    return num_blocks, -(-num // num_blocks)


def map_in_blocks(function: Callable[[Any], Any], most: int, tree: Any) -> Any:
    """`function(tree)`, computed for one block of rows after the other, so that its memory is that of one block.

    Args:
        function: maps arrays with R rows, their first axis, to arrays with R rows; what it does with a row depends on no other
            row. It is also called with rows of zeros, which fill the last block, and whose results are dropped.
        most: the number of rows of a block on each device, at least 1. Blocks are of equal size, which may be smaller.
        tree: arrays with P >= 1 rows. If P does not divide over the mesh, `most` counts the rows of all devices together.

    Returns:
        As `function(tree)`.
    """
    ways = _ways()
    rows = len(jax.tree.leaves(tree)[0])
    if rows % ways:
        ways = 1
    num_blocks, size = _equal_blocks(rows // ways, most)
    if num_blocks == 1:
        return function(tree)

    def split(x: jax.Array) -> jax.Array:
        x = x.reshape(ways, -1, *x.shape[1:])
        filling = [(0, 0), (0, num_blocks * size - x.shape[1])] + [(0, 0)] * (x.ndim - 2)
        x = jax.numpy.pad(x, filling).reshape(ways, num_blocks, size, *x.shape[2:])
        # Each block has rows of all devices, and all rows stay on their device.
        x = x.swapaxes(0, 1).reshape(num_blocks, ways * size, *x.shape[3:])
        return x if ways == 1 else jax.lax.with_sharding_constraint(x, PartitionSpec(None, *BATCH))

    def join(x: jax.Array) -> jax.Array:
        x = x.reshape(num_blocks, ways, size, *x.shape[2:]).swapaxes(0, 1)
        x = x.reshape(ways, num_blocks * size, *x.shape[3:])[:, : rows // ways]
        return constrain(x.reshape(rows, *x.shape[2:]))

    blocks = jax.tree.map(split, tree)
    return jax.tree.map(
        join, jax.lax.map(lambda block: constrain(function(constrain(block))), blocks)
    )


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
    num_blocks, size = _equal_blocks(num, most)
    if num_blocks == 1:
        return jax.vmap(function)(tree)
    filling = num_blocks * size - num
    if filling:
        tree = jax.tree.map(lambda x: jax.numpy.concatenate([x, x[:filling]]), tree)
    return jax.tree.map(lambda x: x[:num], jax.lax.map(function, tree, batch_size=size))


def constrain(tree: Any) -> Any:
    """Shards the first axis of a tree's arrays (rows, or positions of rows) as batches are, and no other axis.

    Without this constraint the compiler may leave the weights sharded and move activations instead. An array whose first
    axis does not divide over the mesh is left to the compiler.
    """
    ways = _ways()

    def of_rows(x: jax.Array) -> jax.Array:
        if ways == 1 or len(x) % ways:
            return x
        return jax.lax.with_sharding_constraint(x, BATCH)

    return jax.tree.map(of_rows, tree)


@jax.custom_vjp
def gathered(x: jax.Array) -> jax.Array:
    """All-gathers a parameter to every device; cast it before, so that fewer bytes move.

    The gradient is not gathered: it has no constraint here, so that the compiler may give each device only its shard.
    """
    return x if _ways() == 1 else jax.lax.with_sharding_constraint(x, PartitionSpec())


gathered.defvjp(lambda x: (gathered(x), None), lambda _, gradient: (gradient,))


def gathered_kernel(kernel: jax.Array) -> jax.Array:
    """`gathered` for a kernel that may be split over `tensor`: on a mesh with a tensor axis the compiler decides."""
    tensor = jax.sharding.get_abstract_mesh().shape.get("tensor", 1)
    return kernel if tensor > 1 else gathered(kernel)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def gathered_in(dtype: jax.typing.DTypeLike, x: jax.Array) -> jax.Array:
    """`gathered` for a parameter that is cast to `dtype` where it is used.

    The parameter is gathered in `dtype`, and cast back: result and gradient have the dtype of `x`, in which gradients are
    added up.
    """
    return x if _ways() == 1 else gathered(x.astype(dtype)).astype(x.dtype)


gathered_in.defvjp(
    lambda dtype, x: (gathered_in(dtype, x), None), lambda dtype, _, gradient: (gradient,)
)


def scattered(gradient: jax.Array) -> jax.Array:
    """Shards the last axis of a parameter's gradient over `fsdp`, so that its sum over devices is a reduce-scatter."""
    fsdp = jax.sharding.get_abstract_mesh().shape.get("fsdp", 1)
    if fsdp == 1 or gradient.shape[-1] % fsdp:
        return gradient
    spec = PartitionSpec(*(None,) * (gradient.ndim - 1), "fsdp")
    return jax.lax.with_sharding_constraint(gradient, spec)


def each_group(x: jax.Array, rows: jax.Array) -> jax.Array | None:
    """A copy of a parameter for each index of the data axis, [data, ...], to be used with that index's share of the rows.

    With copies the gradient is summed in two steps: it is scattered over `fsdp`, and only shards are summed over `data`.
    Without them the compiler sums whole gradients over all devices.

    Args:
      x: the parameter.
      rows: activations whose first axis is split over `data` and `fsdp`.

    Returns:
      The copies; None if `data` or `fsdp` has size 1, or the rows do not divide over both.
    """
    shape = jax.sharding.get_abstract_mesh().shape
    groups = shape.get("data", 1)
    if groups == 1 or shape.get("fsdp", 1) == 1 or len(rows) % _ways():
        return None
    free = (PartitionSpec.UNCONSTRAINED,) * x.ndim
    copies = jax.numpy.broadcast_to(x, (groups, *x.shape))
    return jax.lax.with_sharding_constraint(copies, PartitionSpec("data", *free))


def constrain_groups(x: jax.Array) -> jax.Array:
    """Shards activations that were computed with the copies of `each_group`, [data, rows of a share, ...]."""
    return jax.lax.with_sharding_constraint(x, PartitionSpec("data", "fsdp"))


def has_few_rows(x: jax.Array) -> bool:
    """Whether the products of activations [..., features] have so few rows that reading the kernels takes most of their time."""
    return math.prod(x.shape[:-1]) <= _FEW_ROWS


def matrix_product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """`x @ kernel`, activations [..., I] and a matrix [I, O], in a way that CPUs and GPUs compute fast for few rows.

    The variant for CPUs is not used for many rows, because it makes a training step 15 % slower. The result has the checkpoint
    name `PRODUCT`.
    """
    if has_few_rows(x) and is_one_cpu():
        result = _flat_product(x, kernel, 1)
    elif is_single_row(x.shape[:-1], *GPUS):
        result = (_with_second_row(x, 1) @ kernel)[..., 0, :]
    else:
        result = x @ kernel
    return checkpoint_name(result, PRODUCT)


def is_one_cpu() -> bool:
    """Whether all rows of a batch are on one CPU device; its weights may be split over `tensor`."""
    return _ways() == 1 and target_device().platform == "cpu"


def is_single_row(kept: tuple[int, ...], *platforms: str) -> bool:
    """Whether a product has a single row per device, and the devices are of one of `platforms`; `kept` holds the sizes of the
    activations' axes that are not contracted."""
    return rows_per_device(math.prod(kept)) == 1 and target_device().platform in platforms


# JAX's names of the platform of GPUs. XLA for GPUs computes the product of a single row as elementwise products and a sum, which
# is slower than the product of two rows.
GPUS = ("gpu", "cuda")


def _with_second_row(x: jax.Array, num_contracted: int) -> jax.Array:
    """`x` and zeros, stacked along a new axis of size 2 before the axes to contract."""
    axis = x.ndim - num_contracted
    widths = [(0, 1) if one == axis else (0, 0) for one in range(x.ndim + 1)]
    return jax.numpy.pad(jax.numpy.expand_dims(x, axis), widths)


def _flat_product(x: jax.Array, kernel: jax.Array, num_contracted: int) -> jax.Array:
    """The product over the last axes of `x` and the first of `kernel`, as one product of two matrices; for CPUs."""
    kept, features = x.shape[: x.ndim - num_contracted], kernel.shape[num_contracted:]
    size = math.prod(kernel.shape[:num_contracted])
    x = x.reshape(-1, size)
    kernel = kernel.reshape(size, -1)
    if len(x) == 1 and size % 2 == 0:
        # The CPU backend of jaxlib 0.10 computes the product of a single row by scalar loops. With a second row of zeros it would read
        # the kernel at half of the memory's bandwidth. So the features are halved: two products run at once on two cores, each at
        # that rate. Odd numbers of features, which no recipe has, stay slow.
        halves, kernels = x.reshape(2, 1, -1), kernel.reshape(2, size // 2, -1)
        result = jax.numpy.sum(halves @ kernels, axis=0)
    else:
        result = _matrix_product(x, kernel)
    return result.reshape(*kept, *features)


@jax.custom_vjp
def _matrix_product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """`x @ kernel`, whose gradients are products that XLA's CPU backend computes fast.

    A product that contracts the first axes of both sides is slow there, so the kernel's gradient is computed
    transposed, and then transposed.
    """
    return x @ kernel


_matrix_product.defvjp(
    lambda x, kernel: (x @ kernel, (x, kernel)),
    lambda kept, g: (g @ kept[1].T, (g.T @ kept[0]).T),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def product_in_float32(
    x: jax.Array, y: jax.Array, dimension_numbers: jax.lax.DotDimensionNumbers
) -> jax.Array:
    """`lax.dot_general` of bfloat16 operands with a float32 result, whose gradients are bfloat16 products again.

    Automatic differentiation would multiply the float32 cotangent by the operands in float32, for which the accelerators'
    bfloat16 matrix units cannot be used. All three products are summed in float32.
    """
    return jax.lax.dot_general(x, y, dimension_numbers, preferred_element_type=jax.numpy.float32)


def _product_in_float32_backward(
    dimension_numbers: jax.lax.DotDimensionNumbers, kept: tuple[jax.Array, jax.Array], g: jax.Array
) -> tuple[jax.Array, jax.Array]:
    _, pull = jax.vjp(lambda x, y: jax.lax.dot_general(x, y, dimension_numbers), *kept)
    return pull(g.astype(kept[0].dtype))


product_in_float32.defvjp(
    lambda x, y, dimension_numbers: (product_in_float32(x, y, dimension_numbers), (x, y)),
    _product_in_float32_backward,
)


def product(
    x: jax.Array,
    kernel: jax.Array,
    dimension_numbers: jax.lax.DotDimensionNumbers,
    precision: jax.lax.PrecisionLike = None,
    in_float32: bool = False,
) -> jax.Array:
    """`lax.dot_general` of activations and a parameter, where the smaller of the two moves between devices.

    If the parameter is at most as large as the activations, it is gathered. In a scan over layers it is gathered again in the
    backward pass, so that no more than one layer's is whole at a time; outside of scans XLA merges both gathers into one, and
    keeps the whole parameter in between. Otherwise, and if the rows do not divide over the mesh, the compiler decides what moves.

    Args:
      x: activations, sharded over their first axis.
      kernel: a parameter, in the dtype to compute in.
      dimension_numbers: as of `lax.dot_general`, without batch dimensions.
      precision: as of `lax.dot_general`.
      in_float32: whether the result is float32 for bfloat16 operands, too (see `product_in_float32`).

    Returns:
      As of `lax.dot_general`, with the checkpoint name `PRODUCT`.
    """

    def dot(x: jax.Array, kernel: jax.Array) -> jax.Array:
        if in_float32 and x.dtype != jax.numpy.float32:
            return product_in_float32(x, kernel, dimension_numbers)
        of_x, of_kernel = map(tuple, dimension_numbers[0])
        size = len(of_x)
        kept = x.shape[: x.ndim - size]
        is_plain = of_x == tuple(range(len(kept), x.ndim)) and of_kernel == tuple(range(size))
        if is_plain and precision is None and is_one_cpu():
            return _flat_product(x, kernel, size)
        if is_plain and is_single_row(kept, *GPUS):
            x = _with_second_row(x, size)
            contracted = (tuple(axis + 1 for axis in of_x), of_kernel)
            result = jax.lax.dot_general(x, kernel, (contracted, ((), ())), precision)
            return result[(slice(None),) * len(kept) + (0,)]
        return jax.lax.dot_general(x, kernel, dimension_numbers, precision)

    if _ways() == 1 or len(x) % _ways() or x.size < kernel.size:
        return checkpoint_name(dot(x, kernel), PRODUCT)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def with_whole(x: jax.Array, kernel: jax.Array) -> jax.Array:
        kernel = gathered_kernel(kernel)
        kernels = each_group(kernel, x)
        if kernels is None:
            return dot(x, kernel)
        groups = len(kernels)
        parts = jax.vmap(dot)(x.reshape(groups, len(x) // groups, *x.shape[1:]), kernels)
        return parts.reshape(len(x), *parts.shape[2:])

    return checkpoint_name(with_whole(x, kernel), PRODUCT)


def rows_spec(rows: int) -> tuple[str, ...] | None:
    """The mesh axes over which a batch of `rows` rows is split; None if it does not divide."""
    (axes,) = BATCH
    return None if rows % _ways() else axes


def tensor_spec(size: int) -> str | None:
    """The mesh axis over which `size` heads are split; None if they do not divide."""
    return None if size % jax.sharding.get_abstract_mesh().shape["tensor"] else "tensor"


def laid_out(tree: Any) -> Any:
    """Shards a tree of parameters (or gradients, or moments) by `mesh.RULES`; without a mesh, returns it as it is."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return tree
    specs = jax.tree_util.tree_map_with_path(
        lambda path, leaf: spec_of(path_of(path), leaf.shape, mesh), tree
    )
    return jax.lax.with_sharding_constraint(tree, specs)
