"""Helpers that run the commands of the package as subprocesses, and read the workdirs that they write."""

import json
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
import orbax.checkpoint as ocp

from tests import forked
from tests.forked import ROOT

WORDS = [
    *("def", "class", "return", "import", "self", "value", "name", "for", "in", "if", "not"),
    *("None", "True", "x", "y", "(", ")", ":", "=", ".", "\n"),
]
STAGES = ("autoencoder", "lm")


def start(*args: str, stderr=subprocess.PIPE, **popen) -> subprocess.Popen:
    """Starts `python -m ARGS`. A test that reads stdout line by line gives a file for stderr, as a full pipe blocks."""
    return subprocess.Popen(
        [sys.executable, "-m", *args],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=stderr,
        **popen,
    )


def run(*args: str, status: int = 0, xla_flags: str | None = None, **popen) -> str:
    """Runs `python -m ARGS`, which must end with `status`. Returns stdout, or for another status than 0 the line of error.

    xla_flags: XLA_FLAGS in place of the caller's; empty: programs are compiled as users' are, with all optimisation, which tests
      leave out (conftest.py). popen: options of `Popen`, with which a process of its own is started.
    """
    if not popen and not args[0].startswith("calm_jax.data."):
        returncode, out, err = forked.run(args, xla_flags)
    else:
        assert xla_flags is None, "a process of its own takes XLA_FLAGS from env"
        process = start(*args, **popen)
        out, err = process.communicate(timeout=500)
        returncode = process.returncode
    assert returncode == status, out + err
    if not status:
        return out
    assert "Traceback" not in out + err
    lines = [line for line in err.splitlines() if line.startswith(("error: ", "interrupted: "))]
    assert len(lines) == 1, err
    return lines[0]


def run_program(
    program: str, *arguments: str, status: int = 0, **options
) -> subprocess.CompletedProcess:
    """Runs Python text in a process of its own, which must end with `status`. `options`: of `subprocess.run`."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    asked = {"cwd": ROOT, **pipes, "text": True, "timeout": 500} | options
    done = subprocess.run([sys.executable, "-c", program, *arguments], **asked)
    assert done.returncode == status, done.stderr
    return done


def wait_until(happens: Callable[[], object], what: object = "") -> None:
    """Returns when `happens` is true, and fails after a minute. what: shown when it fails."""
    ends = time.monotonic() + 60
    while not happens():
        assert time.monotonic() < ends, what or "nothing happens"
        time.sleep(0.01)


def train(text_glob: str, workdir, *args: str, **options) -> str:
    """Trains the tiny recipe. `text_glob` may have config arguments after it, as in `GLOB,head=flow`."""
    recipe = f"--config=tests/tiny_recipe.py:{text_glob}"
    return run("calm_jax.main", recipe, f"--workdir={workdir}", *args, **options)


def metrics(workdir: pathlib.Path) -> list[dict]:
    """The records of metrics.jsonl without times, rates and memory."""
    records = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    measured = ("seconds", "tokens_per_second", "peak_memory_bytes")
    return [{k: v for k, v in record.items() if k not in measured} for record in records]


def params(workdir: pathlib.Path, stage: str, step: int = 12) -> dict:
    """The parameters in a checkpoint."""
    path = workdir / stage / str(step) / "params"
    with ocp.PyTreeCheckpointer() as checkpointer:
        return checkpointer.restore(path.resolve())


def assert_same_bits(ours: pathlib.Path, theirs: pathlib.Path, stages=STAGES) -> None:
    """Asserts that two workdirs have bitwise equal parameters."""
    import jax

    for stage in stages:
        left, right = params(ours, stage), params(theirs, stage)
        assert jax.tree.structure(left) == jax.tree.structure(right)
        assert all(
            np.array_equal(a, b)
            for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
        )


def evaluate(workdir: pathlib.Path, *options: str, xla_flags: str | None = None) -> dict:
    """Runs --mode=eval on a workdir and returns the record that it appended to evaluations.jsonl. xla_flags: as of `run`."""
    stored = f"--config=configs/workdir.py:{workdir}"
    assert "BrierLM" in run("calm_jax.main", "--mode=eval", stored, *options, xla_flags=xla_flags)
    return json.loads((workdir / "evaluations.jsonl").read_text().splitlines()[-1])
