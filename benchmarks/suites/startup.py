"""The suite `startup`: seconds from the quickstart's command to its first training step, each time in a fresh process.

That includes importing, training the tokenizer, reading the text, compiling and the step itself, as a user meets them. Each round
has two processes with one cache folder: it is empty for the first ("cold"), and holds the first one's compiled programs for
the second ("warm"). Once the first step is logged, the process is killed.
"""

import math
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

from benchmarks import ROOT
from benchmarks.measure import Cases, Options, Record, record
from calm_jax.errors import UserError

# The command writes its metrics after each step, so that the first one is seen.
_COMMAND = (
    *("calm_jax.main", "--config=configs/quickstart.py"),
    "--config.autoencoder.training.log_every=1",
)


def cases(options: Options) -> Cases:
    """The quickstart alone."""
    return {"startup": lambda: _records(options)}


def _process(cache: pathlib.Path) -> tuple[float, float]:
    """Seconds until the first step is logged, and the peak of the process's memory in MiB.

    Raises:
      UserError: if the command ends before.
    """
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as errors:
        log = pathlib.Path(folder) / "run" / "metrics.jsonl"
        command = [sys.executable, "-m", *_COMMAND, f"--workdir={log.parent}"]
        # The variables of JAX's own cache would take precedence.
        env = {name: value for name, value in os.environ.items() if "CACHE" not in name}
        env["XDG_CACHE_HOME"] = str(cache)
        began = time.perf_counter()
        with subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=errors
        ) as process:
            while not (log.exists() and log.stat().st_size):
                time.sleep(0.02)
                if process.poll() is not None:
                    errors.seek(0)
                    reason = (errors.read().strip().splitlines() or ["no reason given"])[-1]
                    raise UserError(f"startup: the command failed: {reason}")
            seconds, peak = time.perf_counter() - began, _peak_mib(process.pid)
            process.kill()
        return seconds, peak


def _peak_mib(pid: int) -> float:
    """The largest memory that a process has had, in MiB; NaN where the operating system does not tell (only Linux does)."""
    status = pathlib.Path(f"/proc/{pid}/status")
    peak = re.search(r"VmHWM:\s*(\d+) kB", status.read_text() if status.exists() else "")
    return int(peak[1]) / 1024 if peak else math.nan


def _records(options: Options) -> list[Record]:
    found: dict[str, list[tuple[float, float]]] = {"cold": [], "warm": []}
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as cache:
            for results in found.values():
                results.append(_process(pathlib.Path(cache)))
    return [
        record(
            "startup",
            f"startup:{kind}",
            [seconds for seconds, _ in results],
            rss_mb=max(peak for _, peak in results),
        )
        for kind, results in found.items()
    ]
