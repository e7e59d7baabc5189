"""The memory that a process has used, as its metrics record it."""

import pathlib
import sys
import types

import jax
import pytest

from calm_jax.parallel import devices


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_peak_memory_of_cpus_is_resident_memory_in_bytes():
    """A wrong unit would be too small for what is resident now, or too large for the machine."""
    status = pathlib.Path("/proc/self/status").read_text()
    resident = 1024 * int(status.partition("VmRSS:")[2].split()[0])
    memory = 1024 * int(pathlib.Path("/proc/meminfo").read_text().split()[1])
    assert 0.9 * resident < devices.peak_memory() < memory
    assert 1024 * resident > memory


def test_peak_memory_of_accelerators_is_that_of_the_fullest_device(monkeypatch):
    counts = ({"peak_bytes_in_use": 5, "bytes_in_use": 1}, {"peak_bytes_in_use": 7}, {})
    found = [types.SimpleNamespace(memory_stats=lambda one=one: one) for one in counts]
    monkeypatch.setattr(jax, "local_devices", lambda: found)
    assert devices.peak_memory() == 7
