"""The suite `startup`: how long the quickstart takes until its first step of a stage is done, each time in a fresh process.

Each round has two processes with one persistent compilation cache, a temporary folder: it is empty for the first ("cold"),
and holds the first one's programs for the second ("warm"). The parts are: importing `calm_jax.main`; making the
parameters and the optimizer's state, with what is compiled for that; compiling the step; running it.
"""

import functools
import json
import os
import pathlib
import subprocess
import sys
import tempfile

from benchmarks.measure import ROOT, Cases, Options, Record, record
from calm_jax.errors import UserError

_PARTS = ("import", "state", "compile", "step")


def cases(options: Options) -> Cases:
    """Both stages of the quickstart."""
    return {
        f"startup:{stage}": functools.partial(_stage, options, stage)
        for stage in ("autoencoder", "lm")
    }


def _process(stage: str, cache: pathlib.Path) -> Record:
    """Runs a fresh process and returns its measurements."""
    keep_all = {
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    asked = [sys.executable, "-m", "benchmarks.suites.first_step", stage]
    done = subprocess.run(
        asked, cwd=ROOT, env=os.environ | keep_all, capture_output=True, text=True, check=False
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise UserError(f"startup:{stage}: the process failed: {reason}")
    return json.loads(done.stdout.splitlines()[-1])


def _stage(options: Options, stage: str) -> list[Record]:
    found: dict[str, list[Record]] = {"cold": [], "warm": []}
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as cache:
            for results in found.values():
                results.append(_process(stage, pathlib.Path(cache)))
    return [
        record(
            "startup",
            f"startup:{stage}:{part}-{kind}",
            [result["seconds"][part] for result in results],
            rss_mb=max(result["rss_mb"] for result in results),
        )
        for part in _PARTS
        for kind, results in found.items()
    ]
