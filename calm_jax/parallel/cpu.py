"""What this machine's CPU is and can compute, read without starting JAX."""

import pathlib
import platform


def _fact(*names: str) -> str:
    """The value of the first line of Linux's list that begins with one of the names; empty on other systems."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(names)), "").partition(":")[2].strip()


def model() -> str:
    """The CPU's model by its maker's name, or its architecture where the system does not tell."""
    return _fact("model name") or platform.processor() or platform.machine()


def extensions() -> list[str]:
    """The CPU's instruction sets by Linux's names, such as "amx_bf16"; none on other systems."""
    return _fact("flags", "Features").split()


def has_amx() -> bool:
    """Whether the CPU multiplies bfloat16 matrices by AMX, which Intel's Xeons do since Sapphire Rapids."""
    return "amx_bf16" in extensions()
