"""Sharding constraints inside a compiled step, on the mesh of `jax.set_mesh`: rows stay where they are, and weights are
gathered to them."""

import functools
from typing import Any

import jax
from jax.sharding import PartitionSpec

from calm_jax.parallel.mesh import BATCH, num_row_shards, path_of, spec_of


def batch_shards() -> int:
    """The number of devices that a batch's rows are split over; 1 without a mesh."""
    return num_row_shards(jax.sharding.get_abstract_mesh())


def rows_per_device(rows: int) -> int:
    """The number of rows of a global batch on each device, rounded down, at least 1; all of them without a mesh."""
    return max(1, rows // batch_shards())


def rows_spec(rows: int) -> tuple[str, ...] | None:
    """The mesh axes over which a batch of `rows` rows is split; None if it does not divide."""
    (axes,) = BATCH
    return None if rows % batch_shards() else axes


def tensor_spec(size: int) -> str | None:
    """The mesh axis over which `size` heads are split; None if they do not divide."""
    return None if size % jax.sharding.get_abstract_mesh().shape["tensor"] else "tensor"


def constrain(tree: Any) -> Any:
    """Shards the first axis of a tree's arrays (rows, or positions of rows) as batches are, and no other axis.

    Without this constraint the compiler may leave the weights sharded and move activations instead. An array whose first
    axis does not divide over the mesh is left to the compiler.
    """
    ways = batch_shards()

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
    return x if batch_shards() == 1 else jax.lax.with_sharding_constraint(x, PartitionSpec())


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
    return x if batch_shards() == 1 else gathered(x.astype(dtype)).astype(x.dtype)


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
    if groups == 1 or shape.get("fsdp", 1) == 1 or len(rows) % batch_shards():
        return None
    free = (PartitionSpec.UNCONSTRAINED,) * x.ndim
    copies = jax.numpy.broadcast_to(x, (groups, *x.shape))
    return jax.lax.with_sharding_constraint(copies, PartitionSpec("data", *free))


def constrain_groups(x: jax.Array) -> jax.Array:
    """Shards activations that were computed with the copies of `each_group`, [data, rows of a share, ...]."""
    return jax.lax.with_sharding_constraint(x, PartitionSpec("data", "fsdp"))


def laid_out(tree: Any) -> Any:
    """Shards a tree of parameters (or gradients, or moments) by `mesh.RULES`; without a mesh, returns it as it is."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return tree
    specs = jax.tree_util.tree_map_with_path(
        lambda path, leaf: spec_of(path_of(path), leaf.shape, mesh), tree
    )
    return jax.lax.with_sharding_constraint(tree, specs)
