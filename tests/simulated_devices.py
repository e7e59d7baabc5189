"""Commands and programs in a process that sees several devices, simulated on the CPU."""

import os
import subprocess

from tests import forked, workdirs


def on(number: int) -> str:
    """The XLA_FLAGS of a process that sees so many devices."""
    flags = os.environ.get("XLA_FLAGS", "")
    return f"{flags} --xla_force_host_platform_device_count={number}"


def run_program(
    number: int, program: str, *arguments: str, **environment: str
) -> subprocess.CompletedProcess:
    """Runs Python text on so many devices; it must end with status 0.

    environment: further variables, with which a process of its own is started.
    """
    if not environment:
        command = ("tests.program_text", program, *arguments)
        done = subprocess.CompletedProcess(command, *forked.run(command, on(number)))
        assert done.returncode == 0, done.stderr
        return done
    given = os.environ | {"XLA_FLAGS": on(number)} | environment
    rarely = (
        "import jax\nfrom tests.forked import collect_garbage_rarely\ncollect_garbage_rarely()\n"
    )
    return workdirs.run_program(rarely + program, *arguments, env=given)
