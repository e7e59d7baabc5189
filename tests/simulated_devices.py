"""Commands and programs in a process that sees several devices, simulated on the CPU."""

import os
import subprocess

from tests import workdirs


def on(number: int) -> dict[str, str]:
    """The environment of a process that sees so many devices."""
    flags = os.environ.get("XLA_FLAGS", "")
    return os.environ | {"XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count={number}"}


def run_program(
    number: int, program: str, *arguments: str, **environment: str
) -> subprocess.CompletedProcess:
    """Runs Python text on so many devices; it must end with status 0. `environment`: further variables."""
    return workdirs.run_program(program, *arguments, env=on(number) | environment)
