"""The published PyTorch code beside this one: cases of `python -m benchmarks` and of another program, in turn (A B A B ...).

The other program is not part of this repository. It is called as `PEER=DIR PYTHON FILE CASE REPETITIONS`, where CASE is
"calm", "ae", "ar" or "gen:T:BATCH:TOKENS:FOLDER", and its last line is a JSON object with "ms", the median time of a call,
and "rss_mb", the peak of its process's memory in MiB. Both sides run in a fresh process each time, because two programs
at once, or the threads of one waiting beside the other, would disturb each other.
"""

import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import rich.table

from benchmarks import ROOT
from benchmarks.measure import Options, Record
from benchmarks.suites import generate
from calm_jax.cli import progress
from calm_jax.errors import UserError

_TRAIN = ("calm", "ae", "ar")
# A function that runs the case of a given name and returns its "ms" and "rss_mb".
Run = Callable[[str], Mapping[str, float]]


@dataclass(frozen=True)
class Peer:
    """The published code: its folder, the Python that runs it, the program that times it, and a model exported to it."""

    folder: str
    python: str
    bench: str
    exported: str

    def __post_init__(self) -> None:
        if not pathlib.Path(self.folder).is_dir():
            raise UserError(f"--peer={self.folder} is no folder")
        for name in ("python", "bench"):
            value = getattr(self, name)
            if not pathlib.Path(value).is_file():
                raise UserError(f"--peer_{name}={value} is no file; --peer needs it")
        if self.exported and not pathlib.Path(self.exported).is_dir():
            raise UserError(f"--exported={self.exported} is no folder")


def cases(suites: Sequence[str], peer: Peer, options: Options) -> dict[str, list[str]]:
    """Maps each case of the published code to the names of our cases that are compared with it.

    Generation needs an exported model, and the workdir that it was exported from.

    Raises:
      UserError: for an exported model without a workdir, and if nothing is compared.
    """
    chosen = {name: [name] for name in _TRAIN if "train" in suites}
    if "generate" in suites and peer.exported:
        if not options.workdir:
            raise UserError(
                f"--exported={peer.exported} needs --workdir=DIR, the run that it was exported from"
            )
        folder = pathlib.Path(peer.exported).absolute()
        for case in generate.grid(options, generate.config_of(options)):
            theirs = f"gen:{case.temperature:g}:{case.batch}:{options.new_tokens}:{folder}"
            chosen.setdefault(theirs, []).append(case.name)
    if not chosen:
        raise UserError(
            f"--suite={','.join(suites)} has no case of the published code: --peer compares train, and generate with "
            "--exported=DIR"
        )
    return chosen


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it printed nothing"])[-1]


def _call(name: str, asked: Sequence[str], environment: Mapping[str, str]) -> str:
    """Runs a process and returns its output. Raises `UserError` if it fails."""
    try:
        done = subprocess.run(
            asked, cwd=ROOT, env=dict(environment), capture_output=True, text=True, check=False
        )
    except OSError as error:
        raise UserError(f"{name}: {asked[0]} cannot be run: {error.strerror}") from error
    if done.returncode:
        raise UserError(f"{name} ended with status {done.returncode}: {_last_line(done.stderr)}")
    return done.stdout


def parse(case: str, printed: str) -> dict[str, float]:
    """The median and the memory that the published code's program printed. Raises `UserError` for anything else."""
    line = _last_line(printed)
    try:
        found = json.loads(line)
        return {name: float(found[name]) for name in ("ms", "rss_mb")}
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"--peer_bench, case {case}: its last line must be JSON with ms and rss_mb: {line!r}"
        ) from error


def theirs(peer: Peer, repeats: int) -> Run:
    """A function that runs a case of the published code."""
    environment = os.environ | {"PEER": str(pathlib.Path(peer.folder).absolute())}
    # Links are not resolved: the Python of a virtual environment is a link, and finds its packages by the link's path.
    python, bench = os.path.abspath(peer.python), os.path.abspath(peer.bench)

    def run(case: str) -> dict[str, float]:
        asked = [python, bench, case, str(repeats)]
        return parse(case, _call(f"--peer_bench, case {case},", asked, environment))

    return run


def ours(flags: Sequence[str]) -> Run:
    """A function that runs a case of `python -m benchmarks` with these flags."""

    def run(case: str) -> dict[str, float]:
        suite = "generate" if case.startswith("gen:") else "train"
        with tempfile.TemporaryDirectory() as folder:
            output = pathlib.Path(folder) / "results.json"
            chosen = [f"--suite={suite}", f"--case={case}", f"--output={output}"]
            asked = [sys.executable, "-m", "benchmarks", *flags, *chosen]
            _call(f"case {case}", asked, os.environ)
            [result] = json.loads(output.read_text(encoding="utf-8"))["results"]
        return result

    return run


def alternate(
    chosen: Mapping[str, Sequence[str]], rounds: int, run_theirs: Run, run_ours: Run
) -> list[Record]:
    """Runs both sides of every case in turn.

    Returns:
      A record for each of our cases: medians over the rounds in "ms" and "peer_ms", "ratio" published / ours, above 1 where
      ours is faster, the largest peaks of memory in "rss_mb" and "peer_rss_mb", and the times of all rounds.
    """
    records = []
    for case, names in chosen.items():
        peers: list[Mapping[str, float]] = []
        own: dict[str, list[Mapping[str, float]]] = {name: [] for name in names}
        for number in range(rounds):
            peers.append(run_theirs(case))
            for name in names:
                own[name].append(run_ours(name))
                print(
                    f"{name}, round {number + 1}: published {peers[-1]['ms']:.4g} ms, "
                    f"ours {own[name][-1]['ms']:.4g} ms",
                    flush=True,
                )
        for name, runs in own.items():
            ms = statistics.median(run["ms"] for run in runs)
            peer_ms = statistics.median(run["ms"] for run in peers)
            records.append(
                {
                    "suite": "peer",
                    "case": name,
                    "ms": ms,
                    "peer_ms": peer_ms,
                    "ratio": peer_ms / ms,
                    "rss_mb": max(run["rss_mb"] for run in runs),
                    "peer_rss_mb": max(run["rss_mb"] for run in peers),
                    "rounds_ms": [run["ms"] for run in runs],
                    "peer_rounds_ms": [run["ms"] for run in peers],
                }
            )
    return records


def print_table(records: Sequence[Record]) -> None:
    """Prints a line for each case."""
    table = rich.table.Table()
    table.add_column("case", no_wrap=True)
    for heading in (
        "published ms",
        "ours ms",
        "published / ours",
        "published peak MiB",
        "ours peak MiB",
    ):
        table.add_column(heading, justify="right")
    for one in records:
        times = f"{one['peer_ms']:.4g}", f"{one['ms']:.4g}", f"{one['ratio']:.3f}"
        table.add_row(one["case"], *times, f"{one['peer_rss_mb']:.0f}", f"{one['rss_mb']:.0f}")
    progress.console().print(table, highlight=False)
