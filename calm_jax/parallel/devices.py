"""Peak rates and memory of accelerators, by JAX's names for them."""

import contextlib
import dataclasses
import os
import pathlib

import jax


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """One device's figures, as its vendor publishes them.

    Attributes:
      flops: dense bfloat16 FLOPs per second.
      memory: bytes.
      interconnect: bytes per second received from other devices, over all links together: half of the bidirectional
        bandwidth on Google's page of each Cloud TPU version and in NVIDIA's data sheets of the SXM cards (NVLink, within
        one host).
    """

    flops: float
    memory: float
    interconnect: float


# By the beginning of `jax.Device.device_kind`; a longer name stands before its prefix.
ACCELERATORS = {
    "TPU v6 lite": Accelerator(918e12, 32 * 2**30, 400e9),
    "TPU v5 lite": Accelerator(197e12, 16 * 2**30, 200e9),
    "TPU v5": Accelerator(459e12, 95 * 2**30, 600e9),
    "TPU v4": Accelerator(275e12, 32 * 2**30, 300e9),
    "NVIDIA H200": Accelerator(989e12, 141e9, 450e9),
    "NVIDIA H100": Accelerator(989e12, 80e9, 450e9),
    "NVIDIA A100": Accelerator(312e12, 80e9, 300e9),
}


def accelerator(device_kind: str) -> Accelerator | None:
    """The figures of a device by its `device_kind`; None for an unknown one, such as a CPU."""
    known = (about for name, about in ACCELERATORS.items() if device_kind.startswith(name))
    return next(known, None)


def memory_here() -> float:
    """Bytes of memory of each of this process's devices; of the machine, shared out between them, where they are CPUs."""
    device = jax.local_devices()[0]
    if device.platform != "cpu":
        stats = device.memory_stats() or {}
        known = accelerator(device.device_kind)
        if "bytes_limit" in stats:
            return float(stats["bytes_limit"])
        if known is not None:
            return known.memory
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # A container may have less than its machine.
    with contextlib.suppress(OSError, ValueError):
        memory = min(memory, int(pathlib.Path("/sys/fs/cgroup/memory.max").read_text()))
    return memory / jax.local_device_count()


def target_device() -> jax.Device | jax.sharding.AbstractDevice:
    """A device that the program is compiled for: one of the mesh that is set, or a local one without a mesh."""
    return jax.sharding.get_abstract_mesh().abstract_device or jax.local_devices()[0]
