"""What this machine's CPU can compute, read without starting JAX."""

import pathlib


def extensions() -> list[str]:
    """The CPU's instruction sets by Linux's names, such as "amx_bf16"; none on other systems."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    names = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return names.partition(":")[2].split()


def has_amx() -> bool:
    """Whether the CPU multiplies bfloat16 matrices by AMX, which Intel's Xeons do since Sapphire Rapids."""
    return "amx_bf16" in extensions()
