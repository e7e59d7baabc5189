"""Text is prepared by many processes, which must start fast and without JAX."""

import json
import pkgutil
import subprocess
import sys

import calm_jax.data
from tests.workdirs import ROOT

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
# Grain imports JAX and Orbax; the others belong to the extra `data`.
FORBIDDEN = {"jax", "jaxlib", "flax", "optax", "orbax", "grain"}
FORBIDDEN |= {"dask", "distributed", "fsspec", "pyarrow", "zstandard"}


def test_importing_calm_jax_data_imports_neither_jax_nor_optional_libraries():
    modules = pkgutil.walk_packages(calm_jax.data.__path__, "calm_jax.data.")
    names = [module.name for module in modules]
    assert {"calm_jax.data.loader", "calm_jax.data.prepare.__main__"} <= set(names)
    command = [sys.executable, "-c", _IMPORT_ALL, json.dumps(names)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    imported = set(json.loads(done.stdout))
    assert set(names) <= imported
    assert not FORBIDDEN & imported
