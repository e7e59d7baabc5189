"""Memory under checkpoints, in a process of its own, because TensorStore's functions are replaced for the whole process."""

import json
import subprocess
import sys

import pytest

from calm_jax.training.tensorstore_leak import leaks
from tests.forked import ROOT

# Saves 4, then 30 more checkpoints of 60 arrays, with the mend or without; prints the growth of the number of
# allocated blocks of Python's memory for each save, and what a specification of a store is converted to.
PROGRAM = """
import gc, json, pathlib, sys, tempfile
import jax.numpy as jnp
import tensorstore
from calm_jax.training import tensorstore_leak
from calm_jax.training.checkpoint import Checkpointer
from calm_jax.training.checkpoint_files import latest_step
if sys.argv[1] == "as it is":
    tensorstore_leak.leaks = lambda: False
params = {str(number): jnp.full((2, 2), number) for number in range(60)}
with tempfile.TemporaryDirectory() as folder:
    checkpoints = Checkpointer(pathlib.Path(folder), keep=2)

    def save(steps):
        for step in steps:
            checkpoints.save(step, params, {"step": jnp.int32(step)}, {})
            checkpoints.wait()
        gc.collect()
        return sys.getallocatedblocks()

    before = save(range(4))
    growth = (save(range(4, 34)) - before) / 30
    latest = checkpoints.latest_step
    checkpoints.close()
spec = tensorstore.KvStore.Spec({"driver": "file", "path": "/a/"})
spec.to_json()["path"] = "/another/"
print(json.dumps([growth, latest, spec.to_json(), list(spec.to_json(include_defaults=True))]))
"""


def saved(mended: str) -> tuple:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, mended],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return tuple(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.slow
def test_memory_is_flat_under_checkpoints():
    growth, latest, spec, with_defaults = saved("mended")
    assert latest == 33
    # One block is some 60 bytes. Orbax and asyncio keep a few.
    assert growth < 60
    # A caller cannot change the cached result, and results with and without defaults are cached separately.
    assert spec == {"driver": "file", "path": "/a/"}
    assert "file_io_sync" in with_defaults


@pytest.mark.slow
@pytest.mark.skipif(not leaks(), reason="the installed TensorStore does not leak")
def test_memory_grows_without_the_mend():
    growth, *_ = saved("as it is")
    assert growth > 400
