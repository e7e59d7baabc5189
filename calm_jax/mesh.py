"""The device mesh and the one table that says how every array lies on it."""

import dataclasses
import math
import re
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from calm_jax.errors import UserError

AXES = ("data", "fsdp", "tensor")
# Rows of a batch lie over both of these.
BATCH = PartitionSpec(("data", "fsdp"))

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
    try:
        return jax.make_mesh(tuple(sizes), AXES, axis_types=(AxisType.Auto,) * 3, devices=devices)
    except NotImplementedError as error:
        # Axes of a TPU's mesh follow the sides of its slice.
        raise UserError(
            f"mesh: data={sizes[0]} x fsdp={sizes[1]} x tensor={sizes[2]} cannot be laid over these {len(devices)} devices, each "
            "axis over whole sides of the slice: give sizes that are products of its sides"
        ) from error


def check_batch(name: str, batch_size: int, mesh: Mesh) -> None:
    """Raises `UserError` unless batches of this size divide over the mesh."""
    ways = mesh.shape["data"] * mesh.shape["fsdp"]
    if batch_size % ways:
        raise UserError(
            f"{name}={batch_size} must be a multiple of mesh.data x mesh.fsdp = {ways} devices"
        )


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
