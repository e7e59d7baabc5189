"""The device mesh, and the table of rules by which every array is sharded over it."""

import dataclasses
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from calm_jax.errors import UserError

AXES = ("data", "fsdp", "tensor")
# The rows of a batch are split over both axes.
BATCH = PartitionSpec(("data", "fsdp"))

# (pattern searched in a parameter's path, spec); the first match wins. The paths of Adam's moments end in those of their
# parameters, so that the same rules hold for them. The first axis of scanned modules is that of the stacked layers.
RULES: tuple[tuple[str, PartitionSpec], ...] = (
    # Not over the vocabulary: the mesh's sizes do not divide Llama 3's 128,257, and for a lookup in a table that is split
    # over both axes the compiler gathers the whole table.
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
                "which takes all remaining devices"
            )


def make_mesh(config: MeshConfig, devices: list[jax.Device] | None = None) -> Mesh:
    """The mesh of the given devices.

    Args:
      config: sizes of the axes; -1 takes the remaining devices.
      devices: all of `jax.devices()` if None.

    Raises:
      UserError: if the product of the sizes is not the number of devices, or a TPU slice cannot be divided that way.
    """
    devices = jax.devices() if devices is None else devices
    sizes = [config.data, config.fsdp, config.tensor]
    fixed = math.prod(size for size in sizes if size != -1)
    sizes = [len(devices) // fixed if size == -1 else size for size in sizes]
    if math.prod(sizes) != len(devices):
        raise UserError(
            f"mesh: data={config.data} x fsdp={config.fsdp} x tensor={config.tensor} does not make up "
            f"{len(devices)} device(s): --config.mesh.data=-1 --config.mesh.fsdp=1 --config.mesh.tensor=1 takes all"
        )
    try:
        return jax.make_mesh(tuple(sizes), AXES, axis_types=(AxisType.Auto,) * 3, devices=devices)
    except (NotImplementedError, AssertionError) as error:
        # Each mesh axis has to consist of whole sides of a TPU slice. The assertion is that the devices fill a cuboid.
        raise UserError(
            f"mesh: data={sizes[0]} x fsdp={sizes[1]} x tensor={sizes[2]} does not suit the shape of this slice of "
            f"{len(devices)} devices: the size of each axis must be a product of sides of the slice"
        ) from error


def make_training_mesh(config: MeshConfig, batch_sizes: Iterable[int]) -> Mesh:
    """The mesh of all devices, or of as many as the batches divide over, if an axis of batches is -1.

    Args:
      config: sizes of the axes. If `data` or `fsdp` is -1, it takes so many of the remaining devices that data x fsdp
        divides every batch size. On TPUs, numbers of devices are skipped that do not divide the slice's or do not fit its shape.
      batch_sizes: rows of the batches that are split over the mesh.

    Raises:
      UserError: as `make_mesh` does.
    """
    devices, batch_sizes = jax.devices(), list(batch_sizes)
    fixed_ways = max(config.data, config.fsdp)
    free, rest = divmod(len(devices), max(1, fixed_ways * config.tensor))
    # Several processes use all devices, because every process needs some. If no size fits, all devices are used as well:
    # `make_mesh` then refuses the mesh, or `check_batch` the batch size, with a message that names it.
    if -1 in (config.data, config.fsdp) and not rest and jax.process_count() == 1:
        for size in range(free, 0, -1):
            used = size * fixed_ways * config.tensor
            # The compiler for TPUs aborts at sums over, for example, 6 of 8 chips.
            if devices[0].platform == "tpu" and len(devices) % used:
                continue
            if any(rows % (size * fixed_ways) for rows in batch_sizes):
                continue
            try:
                return make_mesh(config, devices[:used])
            except UserError:
                # A number may still not suit the slice's shape. If all devices make no mesh, the config is at fault.
                if size == free:
                    raise
    return make_mesh(config, devices)


def adapted(config: MeshConfig, devices: Sequence[jax.Device]) -> MeshConfig:
    """The mesh to use on these devices for parameters that were trained on `config`'s mesh.

    It is `config` itself if the devices can make that mesh. Otherwise `tensor` and `fsdp` become the largest divisors of their
    sizes with which the devices make one, and `data` takes the remaining devices.
    """
    most_tensor, most_fsdp = max(1, config.tensor), max(0, config.fsdp)
    others = (
        MeshConfig(-1, fsdp, tensor)
        for tensor in _divisors(math.gcd(len(devices), most_tensor))
        # An fsdp of -1 is 0 here, and gcd(x, 0) = x, so that all divisors are tried.
        for fsdp in _divisors(math.gcd(len(devices) // tensor, most_fsdp))
    )
    return next(one for one in (config, *others) if _can_make(one, devices))


def _divisors(number: int) -> list[int]:
    """The divisors of a number, in descending order."""
    return [one for one in range(number, 0, -1) if number % one == 0]


def _can_make(config: MeshConfig, devices: Sequence[jax.Device]) -> bool:
    try:
        make_mesh(config, list(devices))
    except UserError:
        return False
    return True


def num_row_shards(mesh: Mesh | AbstractMesh) -> int:
    """The number of parts into which the rows of a batch are split; 1 for an empty mesh."""
    (axes,) = BATCH
    return math.prod(mesh.shape.get(axis, 1) for axis in axes)


def divisible(rows: int, mesh: Mesh | None) -> int:
    """`rows`, rounded up so that each part of the mesh has as many rows; unchanged without a mesh."""
    ways = 1 if mesh is None else num_row_shards(mesh)
    return -(-rows // ways) * ways


def check_batch(name: str, batch_size: int, mesh: Mesh) -> None:
    """Raises `UserError`, which calls the batch size `name`, unless it divides over the mesh."""
    ways = num_row_shards(mesh)
    if batch_size % ways:
        raise UserError(
            f"{name}={batch_size} must be a multiple of mesh.data x mesh.fsdp = {ways} devices"
        )


def spec_of(path: str, shape: tuple[int, ...], mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """The spec of an array by the table; an axis that does not divide evenly is not split."""
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


def shardings(tree: Any, mesh: Mesh | AbstractMesh) -> Any:
    """The sharding by the table of every leaf of a tree of arrays or shapes."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: NamedSharding(mesh, spec_of(path_of(path), leaf.shape, mesh)), tree
    )


def with_layout(shapes: Any, layout: Any) -> Any:
    """The shapes of a tree of arrays or shapes, each with its sharding in the tree `layout`."""
    return jax.tree.map(
        lambda one, sharding: jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=sharding),
        shapes,
        layout,
    )


def sharded_shapes(shapes: Any, mesh: Mesh) -> Any:
    """The shapes of a tree of arrays or shapes, each with its sharding by the table."""
    return with_layout(shapes, shardings(shapes, mesh))


def rows_here(batch_size: int, mesh: Mesh) -> list[int]:
    """The rows of a global batch that this process's devices hold, ascending.

    They need not be adjacent, and where the `tensor` axis spans processes, those processes hold the same rows.
    """
    places = NamedSharding(mesh, BATCH).addressable_devices_indices_map((batch_size,))
    rows = {row for index in places.values() if index for row in range(batch_size)[index[0]]}
    return sorted(rows)


def global_batch(batch: dict[str, np.ndarray], batch_size: int, mesh: Mesh) -> dict[str, jax.Array]:
    """Global arrays, sharded as batches are, from the rows that each process has.

    Args:
      batch: arrays whose first axis is the rows of `rows_here`, in that order.
      batch_size: number of rows of the global batch.
      mesh: the mesh.
    """
    sharding = NamedSharding(mesh, BATCH)
    return {
        name: jax.make_array_from_process_local_data(sharding, rows, (batch_size, *rows.shape[1:]))
        for name, rows in batch.items()
    }
