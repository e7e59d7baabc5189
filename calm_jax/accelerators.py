"""What accelerators can do, by the names that JAX gives them."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """Of one device: dense bfloat16 products a second, bytes of memory, and bytes a second that it receives from others.

    The last is half of what vendors call bidirectional bandwidth, all links together: Google's Cloud TPU pages of each version,
    NVIDIA's data sheets of the SXM cards (NVLink, within one host).
    """

    flops: float
    memory: float
    interconnect: float


# By what `jax.Device.device_kind` begins with, the longest first; the vendors' figures.
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
    """None for one that is not known, such as a CPU."""
    known = (about for name, about in ACCELERATORS.items() if device_kind.startswith(name))
    return next(known, None)
