"""The hardware that this machine can compile for without having it: TPU slices, and hosts of NVIDIA GPUs."""

import contextlib
import dataclasses
import importlib.util
import math
import os
import pathlib
from collections.abc import Iterator

import jax
from jax.experimental import topologies

from calm_jax.errors import UserError, installation, require_one_of
from calm_jax.parallel.devices import GPUS_PER_HOST, Accelerator, accelerator

_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBIC = (
    *("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16"),
    "16x16x16",
)
# The share of a GPU's memory that launch/common.sh and benchmarks/gpu.py let JAX allocate; its own default is 0.75.
GPU_MEMORY_SHARE = 0.92


# Environment variables to set before libtpu is loaded: do not ask a cloud's metadata server, which takes minutes where there
# is none; allow several processes to load libtpu, because none uses a TPU; log nothing.
_LIBTPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
    # Without these two, libtpu looks for a TPU host's settings and logs that there are none.
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
}
# Replacements for the functions by which JAX checks cuDNN and the GPU; they answer as for a Hopper GPU with cuDNN 9.10.
_CUDNN_ANSWERS = {
    "check_cudnn_version": lambda: 91000,
    "check_compute_capability": lambda capability: float(capability) <= 9.0,
    "is_cuda_compute_capability_equal": lambda capability: capability == "9.0",
}


@dataclasses.dataclass(frozen=True)
class Family:
    """One kind of hardware.

    Attributes:
      kind: the beginning of JAX's `Device.device_kind`.
      platform: JAX's name, "tpu" or "cuda".
      sizes: the sizes that the vendor offers, ascending.
    """

    kind: str
    platform: str
    sizes: tuple[str, ...]


FAMILIES = {
    "v4": Family("TPU v4", "tpu", _CUBIC),
    "v5e": Family("TPU v5 lite", "tpu", _FLAT),
    "v5p": Family("TPU v5", "tpu", (*_CUBIC, "16x16x24")),
    "v6e": Family("TPU v6 lite", "tpu", _FLAT),
    "h100": Family(
        "NVIDIA H100", "cuda", ("1", "2", "4", "8", "8x2", "8x4", "8x8", "8x16", "8x32")
    ),
}


@dataclasses.dataclass(frozen=True)
class Topology:
    """A family in one of its sizes, such as v5e:4x4."""

    family: str
    size: str

    def __str__(self) -> str:
        return f"{self.family}:{self.size}"

    @property
    def num_devices(self) -> int:
        return math.prod(int(side) for side in self.size.split("x"))

    @property
    def platform(self) -> str:
        """JAX's name of the platform, "tpu" or "cuda"."""
        return FAMILIES[self.family].platform

    @property
    def accelerator(self) -> Accelerator:
        """Each device's peak rates. Between GPUs of several hosts, `interconnect` is the network's bandwidth."""
        known = accelerator(FAMILIES[self.family].kind, self.num_devices)
        assert known is not None
        return known

    @property
    def memory(self) -> float:
        """Bytes of each device that a program may use."""
        share = GPU_MEMORY_SHARE if self.platform == "cuda" else 1.0
        return share * self.accelerator.memory

    def check_compiler(self) -> None:
        """Raises `UserError` unless the compiler for this hardware is installed."""
        if self.platform == "tpu":
            _need("libtpu", f"{self}: compiling for TPUs needs {installation('plan')}")
        else:
            _need(
                "jax_plugins.xla_cuda13",
                f"{self}: compiling for NVIDIA needs {installation('plan-cuda')}",
            )

    def devices(self) -> list[jax.Device]:
        """Stand-ins for the devices, to compile for. Raises `UserError` as `check_compiler` does."""
        self.check_compiler()
        return _tpus(self) if self.platform == "tpu" else _gpus(self)

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Lets JAX lower cuDNN's attention in the `with` block, where it would otherwise need cuDNN and a GPU here."""
        if self.platform != "cuda":
            yield
            return
        from jax._src.cudnn import fused_attention_stablehlo as asked

        before = {name: getattr(asked, name, None) for name in _CUDNN_ANSWERS}
        if None in before.values():
            raise UserError(
                f"--topology={self}: planning with cuDNN's attention does not support this version of jax: give --config.lm.model.attention=xla"
            )
        try:
            for name, answer in _CUDNN_ANSWERS.items():
                setattr(asked, name, answer)
            yield
        finally:
            for name, function in before.items():
                setattr(asked, name, function)


def parse(text: str) -> Topology:
    """The topology that a name such as "v5e:4x4" stands for. Raises a `UserError` that lists the valid names."""
    name, _, size = text.partition(":")
    if name not in FAMILIES:
        raise UserError(f"--topology={text!r} is none of these: {_listed()}")
    sizes = FAMILIES[name].sizes
    if size not in sizes:
        raise UserError(
            f"--topology={text!r}: {name} has no size {size!r}; its sizes are {', '.join(sizes)}"
        )
    return Topology(name, size)


def of_family(name: str) -> list[Topology]:
    """All sizes of a family, the smallest first. Raises `UserError` for an unknown family."""
    require_one_of("--fit", name, FAMILIES)
    return [Topology(name, size) for size in FAMILIES[name].sizes]


def _listed() -> str:
    return "; ".join(f"{name}: {', '.join(about.sizes)}" for name, about in FAMILIES.items())


def _need(module: str, message: str) -> None:
    try:
        found = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        found = False
    if not found:
        raise UserError(message)


def _tpus(topology: Topology) -> list[jax.Device]:
    for name, value in _LIBTPU.items():
        os.environ.setdefault(name, value)
    flat = topology.size.count("x") == 1
    description = topologies.get_topology_desc(
        platform="tpu",
        topology_name=str(topology),
        # A chip of two cores is one device, as on real TPU hosts.
        chip_config_name="default" if flat else "megacore",
        chips_per_host_bounds=(1, 1, 1) if topology.size == "1x1" else (2, 2, 1),
    )
    return list(description.devices)


def _gpus(topology: Topology) -> list[jax.Device]:
    hosts = max(1, topology.num_devices // GPUS_PER_HOST)
    each = topology.num_devices // hosts
    target = pathlib.Path(__file__).parent / "targets" / f"{topology.family}.txtpb"
    description = topologies.get_topology_desc(
        platform="cuda",
        topology_name=str(topology),
        target_config=target.read_text(),
        topology=f"1x{hosts}x{each}",
    )
    return list(description.devices)
