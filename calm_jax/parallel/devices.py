"""The devices, by JAX's names for them: peak rates of accelerators, memory and its use, cores, and the device that a program is
compiled for."""

import contextlib
import dataclasses
import os
import pathlib
import resource
import socket
import sys

import jax

from calm_jax.parallel import multihost


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """One device's figures, as its vendor publishes them.

    Attributes:
      flops: dense bfloat16 FLOPs per second.
      memory: bytes.
      bandwidth: bytes per second read from and written to this memory.
      interconnect: bytes per second received from other devices, over all links together: half of the bidirectional
        bandwidth on Google's page of each Cloud TPU version and in NVIDIA's data sheets (within one host: NVLink
        of the SXM cards, and half of the slot's rate in both directions for the others).
    """

    flops: float
    memory: float
    bandwidth: float
    interconnect: float


# The keys are prefixes of `jax.Device.device_kind`. The first match counts, so that longer names stand before their prefixes.
ACCELERATORS = {
    "TPU v6 lite": Accelerator(918e12, 32 * 2**30, 1640e9, 400e9),
    "TPU v5 lite": Accelerator(197e12, 16 * 2**30, 819e9, 200e9),
    "TPU v5": Accelerator(459e12, 95 * 2**30, 2765e9, 600e9),
    "TPU v4": Accelerator(275e12, 32 * 2**30, 1228e9, 300e9),
    "NVIDIA H200 NVL": Accelerator(835e12, 141e9, 4800e9, 64e9),
    "NVIDIA H200": Accelerator(989e12, 141e9, 4800e9, 450e9),
    "NVIDIA H100 NVL": Accelerator(835e12, 94e9, 3900e9, 64e9),
    "NVIDIA H100 PCIe": Accelerator(756e12, 80e9, 2000e9, 64e9),
    "NVIDIA H100": Accelerator(989e12, 80e9, 3350e9, 450e9),
    "NVIDIA A100-SXM4-40GB": Accelerator(312e12, 40e9, 1555e9, 300e9),
    "NVIDIA A100-PCIE-40GB": Accelerator(312e12, 40e9, 1555e9, 32e9),
    "NVIDIA A100 80GB PCIe": Accelerator(312e12, 80e9, 1935e9, 32e9),
    "NVIDIA A100": Accelerator(312e12, 80e9, 2039e9, 300e9),
}


# JAX's names of the platform of GPUs.
GPUS = ("gpu", "cuda")
GPUS_PER_HOST = 8
# Bytes per second that a GPU receives from other hosts: one 400 Gbit/s network card for each GPU, as in NVIDIA's DGX H100.
_BETWEEN_HOSTS = 50e9


def accelerator(device_kind: str, num_devices: int = 1) -> Accelerator | None:
    """The figures of one of `num_devices` devices by its `device_kind`; None for an unknown one, such as a CPU.

    For GPUs of more than one host, `interconnect` is the rate of the network between hosts.
    """
    about = next(
        (about for name, about in ACCELERATORS.items() if device_kind.startswith(name)), None
    )
    if about is not None and device_kind.startswith("NVIDIA") and num_devices > GPUS_PER_HOST:
        return dataclasses.replace(about, interconnect=_BETWEEN_HOSTS)
    return about


def memory_here() -> float:
    """Bytes of memory of each of this process's devices. CPU devices get equal shares of the memory of their machine.

    All processes must call it.
    """
    device = jax.local_devices()[0]
    if device.platform != "cpu":
        stats = device.memory_stats() or {}
        known = accelerator(device.device_kind)
        if "bytes_limit" in stats:
            return float(stats["bytes_limit"])
        if known is not None:
            return known.memory
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # The control group of a container or a job may have less memory than the machine, and so may the groups around it.
    root = pathlib.Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):
        own = root / pathlib.Path("/proc/self/cgroup").read_text().rpartition("::/")[2].strip()
        for group in (own, *own.parents):
            with contextlib.suppress(OSError, ValueError):
                memory = min(memory, int((group / "memory.max").read_text()))
    hosts = multihost.all_gather(socket.gethostname())
    return memory / hosts.count(socket.gethostname()) / jax.local_device_count()


def num_cores() -> int:
    """The cores that this process may use; on macOS, which cannot tell, those of the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def peak_memory() -> int:
    """The peak memory so far of this process's fullest device, in bytes; the process's peak resident memory where devices
    have no such statistics (CPUs)."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [one["peak_bytes_in_use"] for one in stats if "peak_bytes_in_use" in one]
    return max(peaks) if peaks else peak_resident()


def peak_resident() -> int:
    """The peak resident memory of this process so far, in bytes."""
    # Linux counts in KiB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def target_device() -> jax.Device | jax.sharding.AbstractDevice:
    """A device that the program is compiled for: one of the mesh that is set, or a local one without a mesh."""
    return jax.sharding.get_abstract_mesh().abstract_device or jax.local_devices()[0]
