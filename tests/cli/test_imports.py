"""What is imported: no JAX where text is prepared, which many processes do, nor before a command has read its flags."""

import json
import pkgutil

import calm_jax.data
from tests.workdirs import run_program

_IMPORT_ALL = """
import importlib, json, sys
from absl import flags

for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
    # Two commands may define flags of the same name.
    for flag in list(flags.FLAGS):
        delattr(flags.FLAGS, flag)
print(json.dumps(sorted(sys.modules)))
"""
# Grain imports JAX and Orbax.
JAX = {"jax", "jaxlib", "flax", "optax", "orbax", "grain"}
# Of the extra `data`.
OPTIONAL = {"dask", "distributed", "fsspec", "pyarrow", "zstandard"}
COMMANDS = (
    *("calm_jax.main", "calm_jax.generate", "calm_jax.plan", "calm_jax.report", "calm_jax.lm_eval"),
    "calm_jax.brierlm",
    *("calm_jax.interop.convert", "calm_jax.interop.export", "calm_jax.interop.verify"),
    "calm_jax.serve.__main__",
)


def imported(names) -> set[str]:
    """The modules of a process that has imported `names`."""
    found = set(json.loads(run_program(_IMPORT_ALL, json.dumps(names)).stdout))
    assert set(names) <= found
    return found


def test_importing_calm_jax_data_imports_neither_jax_nor_optional_libraries():
    modules = pkgutil.walk_packages(calm_jax.data.__path__, "calm_jax.data.")
    names = [module.name for module in modules]
    assert {"calm_jax.data.loader", "calm_jax.data.prepare.__main__"} <= set(names)
    assert not (JAX | OPTIONAL) & imported(names)


def test_commands_read_their_flags_before_jax_is_imported():
    assert not JAX & imported(COMMANDS)
