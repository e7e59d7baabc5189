"""Where activations and weights lie inside a compiled step, on the mesh that is set: rows stay, and weights come to them."""

import functools
import math
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from calm_jax.mesh import BATCH, path_of, spec_of

# Under this name the results of `product` are known to the policies of `lm.model.remat`.
PRODUCT = "product"


def _ways() -> int:
    """Over how many devices of the mesh that is set rows lie; 1 without one."""
    (axes,), shape = BATCH, jax.sharding.get_abstract_mesh().shape
    return math.prod(shape.get(axis, 1) for axis in axes)


def rows_per_device(rows: int) -> int:
    """How many rows of a global batch lie on one device of the mesh that is set; all of them without one."""
    return max(1, rows // _ways())


def constrain(tree: Any) -> Any:
    """The same arrays, whose first axis (rows, or positions of rows) lies as batches do, and no other axis over `fsdp`.

    Without it the compiler may leave the weights where they lie and move activations instead. What does not divide
    over the mesh that is set is left to the compiler.
    """
    ways = _ways()

    def of_rows(x: jax.Array) -> jax.Array:
        if ways == 1 or len(x) % ways:
            return x
        return jax.lax.with_sharding_constraint(x, BATCH)

    return jax.tree.map(of_rows, tree)


@jax.custom_vjp
def gathered(x: jax.Array) -> jax.Array:
    """A parameter, whole on every device; cast it before, so that fewer bytes move.

    Its gradient is not gathered: it ends where the parameter lies.
    """
    return x if _ways() == 1 else jax.lax.with_sharding_constraint(x, PartitionSpec())


gathered.defvjp(lambda x: (gathered(x), None), lambda _, gradient: (gradient,))


def gathered_kernel(kernel: jax.Array) -> jax.Array:
    """The same for what a tensor axis would keep split: with one, the compiler decides."""
    tensor = jax.sharding.get_abstract_mesh().shape.get("tensor", 1)
    return kernel if tensor > 1 else gathered(kernel)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def gathered_in(dtype: jax.typing.DTypeLike, x: jax.Array) -> jax.Array:
    """The same for a parameter that is cast to `dtype` where it is used: it moves in it, and its gradients add up in `x`'s."""
    return x if _ways() == 1 else gathered(x.astype(dtype)).astype(x.dtype)


gathered_in.defvjp(
    lambda dtype, x: (gathered_in(dtype, x), None), lambda dtype, _, gradient: (gradient,)
)


def each_group(x: jax.Array, rows: jax.Array) -> jax.Array | None:
    """A parameter once for each place along the data axis, [data, ...], for that group's rows; None if one axis has them all,
    or the rows do not divide.

    Its gradient then is summed in two steps, scattered over `fsdp` first, so that only shards are summed over `data`. For one
    array the compiler sums whole gradients over all devices.
    """
    shape = jax.sharding.get_abstract_mesh().shape
    groups = shape.get("data", 1)
    if groups == 1 or shape.get("fsdp", 1) == 1 or len(rows) % _ways():
        return None
    free = (PartitionSpec.UNCONSTRAINED,) * x.ndim
    copies = jax.numpy.broadcast_to(x, (groups, *x.shape))
    return jax.lax.with_sharding_constraint(copies, PartitionSpec("data", *free))


def constrain_groups(x: jax.Array) -> jax.Array:
    """What was computed with `each_group`, [data, rows, ...]: rows lie as batches do, in two axes."""
    return jax.lax.with_sharding_constraint(x, PartitionSpec("data", "fsdp"))


def product(
    x: jax.Array,
    kernel: jax.Array,
    dimension_numbers: jax.lax.DotDimensionNumbers,
    precision: jax.lax.PrecisionLike = None,
) -> jax.Array:
    """`lax.dot_general` of activations and a parameter, the smaller of which moves to the other.

    A parameter that is gathered is gathered anew for the gradient and not kept.
    """

    def dot(x: jax.Array, kernel: jax.Array) -> jax.Array:
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
    """The axes of the mesh that is set over which a batch of so many rows lies; None if it cannot be split."""
    (axes,) = BATCH
    return None if rows % _ways() else axes


def tensor_spec(size: int) -> str | None:
    """The axis over which heads lie that are so many; None if they cannot be split."""
    return None if size % jax.sharding.get_abstract_mesh().shape["tensor"] else "tensor"


def laid_out(tree: Any) -> Any:
    """The same arrays, on the mesh that is set as the table has them."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return tree
    specs = jax.tree_util.tree_map_with_path(
        lambda path, leaf: spec_of(path_of(path), leaf.shape, mesh), tree
    )
    return jax.lax.with_sharding_constraint(tree, specs)
