"""The device mesh and the one table that says how every array lies on it."""

import dataclasses
import functools
import math
import re
from typing import Any

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from calm_jax.errors import UserError

AXES = ("data", "fsdp", "tensor")
# Rows of a batch lie over both of these.
BATCH = PartitionSpec(("data", "fsdp"))

# Under this name the results of `product` are known to the policies of `lm.model.remat`.
PRODUCT = "product"

# (pattern found in a parameter's path, spec); the first match wins. Adam's moments end in the same
# paths, so the same rules hold for them. Layers are stacked on the first axis of scanned modules.
RULES: tuple[tuple[str, PartitionSpec], ...] = (
    # Not over the vocabulary: 128,257 divides by nothing, and a lookup in a table split both ways is gathered whole.
    (r"embedding$", PartitionSpec(None, "fsdp")),
    (r"attention/(query|key|value)/kernel$", PartitionSpec(None, "fsdp", "tensor", None)),
    (r"attention/output/kernel$", PartitionSpec(None, "tensor", None, "fsdp")),
    (r"mlp/(gate|up)/kernel$", PartitionSpec(None, "fsdp", "tensor")),
    (r"mlp/down/kernel$", PartitionSpec(None, "tensor", "fsdp")),
    (
        r"blocks/(input_kernel|(gate_up|up|modulation)/kernel)$",
        PartitionSpec(None, "fsdp", "tensor"),
    ),
    (r"blocks/(hidden|down)/kernel$", PartitionSpec(None, "tensor", "fsdp")),
    (r"kernel$", PartitionSpec("fsdp", "tensor")),
    (r"(bias|scale)$", PartitionSpec()),
)


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """`config.mesh`; every key is described in `configs/common.py`."""

    data: int
    fsdp: int
    tensor: int

    def __post_init__(self):
        sizes = (self.data, self.fsdp, self.tensor)
        if any(size < 1 and size != -1 for size in sizes) or sizes.count(-1) > 1:
            raise UserError(
                f"mesh: data={self.data}, fsdp={self.fsdp}, tensor={self.tensor} must be at least 1 each; one may be -1, "
                "for the devices that are left"
            )


def make_mesh(config: MeshConfig, devices: list[jax.Device] | None = None) -> Mesh:
    """A mesh of all devices. Raises `UserError` if the sizes do not multiply to their number."""
    devices = jax.devices() if devices is None else devices
    sizes = [config.data, config.fsdp, config.tensor]
    fixed = math.prod(size for size in sizes if size != -1)
    sizes = [len(devices) // fixed if size == -1 else size for size in sizes]
    if math.prod(sizes) != len(devices):
        raise UserError(
            f"mesh: data={config.data} x fsdp={config.fsdp} x tensor={config.tensor} does not make up "
            f"{len(devices)} device(s)"
        )
    return jax.make_mesh(tuple(sizes), AXES, axis_types=(AxisType.Auto,) * 3, devices=devices)


def check_batch(name: str, batch_size: int, mesh: Mesh) -> None:
    """Raises `UserError` unless batches of this size divide over the mesh."""
    ways = mesh.shape["data"] * mesh.shape["fsdp"]
    if batch_size % ways:
        raise UserError(
            f"{name}={batch_size} must be a multiple of mesh.data x mesh.fsdp = {ways} devices"
        )


def _ways() -> int:
    """Over how many devices of the mesh that is set rows lie; 1 without one."""
    shape = jax.sharding.get_abstract_mesh().shape
    return math.prod(shape.get(axis, 1) for axis in ("data", "fsdp"))


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
    if _ways() == 1 or len(x) % _ways() or x.size < kernel.size:
        plain = jax.lax.dot_general(x, kernel, dimension_numbers, precision)
        return checkpoint_name(plain, PRODUCT)

    def dot(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return jax.lax.dot_general(x, kernel, dimension_numbers, precision)

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
    shape = jax.sharding.get_abstract_mesh().shape
    return None if rows % math.prod(shape[axis] for axis in axes) else axes


def tensor_spec(size: int) -> str | None:
    """The axis over which heads lie that are so many; None if they cannot be split."""
    return None if size % jax.sharding.get_abstract_mesh().shape["tensor"] else "tensor"


def spec_of(path: str, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """The table's spec of an array; an axis that does not divide evenly is not split."""
    for pattern, spec in RULES:
        if re.search(pattern, path):
            return PartitionSpec(
                *(
                    axis if axis is None or size % mesh.shape[axis] == 0 else None
                    for axis, size in zip(spec, shape, strict=False)
                )
            )
    return PartitionSpec()


def path_of(path: tuple[Any, ...]) -> str:
    """A tree path as "a/b/c"."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def shardings(tree: Any, mesh: Mesh) -> Any:
    """The sharding of every array of a tree (of arrays or their shapes)."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: NamedSharding(mesh, spec_of(path_of(path), leaf.shape, mesh)), tree
    )


def laid_out(tree: Any) -> Any:
    """The same arrays, on the mesh that is set as the table has them."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return tree
    specs = jax.tree_util.tree_map_with_path(
        lambda path, leaf: spec_of(path_of(path), leaf.shape, mesh), tree
    )
    return jax.lax.with_sharding_constraint(tree, specs)


def rows_here(batch_size: int, mesh: Mesh) -> list[int]:
    """Which rows of a global batch lie on this process's devices, in order.

    Processes may share rows, where the `tensor` axis goes over several, and theirs need not be next to each other.
    """
    places = NamedSharding(mesh, BATCH).addressable_devices_indices_map((batch_size,))
    rows = {row for (rows,) in places.values() for row in range(batch_size)[rows]}
    return sorted(rows)


def global_batch(batch: dict[str, np.ndarray], batch_size: int, mesh: Mesh) -> dict[str, jax.Array]:
    """The global arrays of `batch_size` rows, of which this process has those of `rows_here`."""
    place_of = {row: place for place, row in enumerate(rows_here(batch_size, mesh))}

    def placed(rows: np.ndarray) -> jax.Array:
        def part(index: tuple[slice, ...]) -> np.ndarray:
            return rows[[place_of[row] for row in range(batch_size)[index[0]]]]

        shape = (batch_size, *rows.shape[1:])
        return jax.make_array_from_callback(shape, NamedSharding(mesh, BATCH), part)

    return {name: placed(rows) for name, rows in batch.items()}
