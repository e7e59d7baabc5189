"""What the CPU can compute, and the quickstart's choice of a dtype by it."""

import pathlib

import pytest

from calm_jax.parallel import cpu
from configs import quickstart

_CPUINFO = "processor\t: 0\nmodel name\t: A CPU\nflags\t\t: fpu sse2 {}\n\nprocessor\t: 1\nflags\t\t: fpu\n"


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("amx_tile amx_bf16", "bfloat16"), ("amx_tile amx_int8", "float32"), ("", "float32")],
)
def test_the_quickstart_is_in_bfloat16_on_a_cpu_with_amx(name, dtype, monkeypatch):
    text = _CPUINFO.format(name)
    monkeypatch.setattr(pathlib.Path, "read_text", lambda path, encoding: text)
    assert cpu.model() == "A CPU"
    assert cpu.extensions() == ["fpu", "sse2", *name.split()]
    assert quickstart.get_config().compute_dtype == dtype


def test_a_system_without_linuxs_file_has_no_known_extensions(monkeypatch):
    def missing(path, encoding):
        raise FileNotFoundError(path)

    monkeypatch.setattr(pathlib.Path, "read_text", missing)
    assert cpu.extensions() == [] and not cpu.has_amx()
    assert cpu.model()
