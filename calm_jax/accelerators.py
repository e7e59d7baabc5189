"""What accelerators can do, by the names that JAX gives them."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """Dense bfloat16 products a second of one device, and bytes of its memory."""

    flops: float
    memory: float


# By what `jax.Device.device_kind` begins with, the longest first; the vendors' figures.
ACCELERATORS = {
    "TPU v6 lite": Accelerator(918e12, 32 * 2**30),
    "TPU v5 lite": Accelerator(197e12, 16 * 2**30),
    "TPU v5": Accelerator(459e12, 95 * 2**30),
    "TPU v4": Accelerator(275e12, 32 * 2**30),
    "NVIDIA H200": Accelerator(989e12, 141e9),
    "NVIDIA H100": Accelerator(989e12, 80e9),
    "NVIDIA A100": Accelerator(312e12, 80e9),
}


def accelerator(device_kind: str) -> Accelerator | None:
    """None for one that is not known, such as a CPU."""
    known = (about for name, about in ACCELERATORS.items() if device_kind.startswith(name))
    return next(known, None)
