"""Prints the tables of plans in docs/scaling.md, compiled for hardware that this machine lacks.

    python -m benchmarks.planning --folder=DIR                    # the published batch on every kind of hardware
    python -m benchmarks.planning --folder=DIR --table=machines   # which config for my machine
    python -m benchmarks.planning --folder=DIR --table=machines --compile=0   # what DIR has

Each plan takes minutes, and its line is printed when it is ready. Plans that DIR already has are not made again, so that the
command can be interrupted and repeated.
"""

import itertools
import json
import pathlib
import shlex
import subprocess
import sys

from absl import app, flags

from benchmarks.machines import MACHINES, RECIPES, USES, Cell, options
from calm_jax.cli.command import command
from calm_jax.cli.files import os_errors
from calm_jax.cli.flags import given_folder, parse_flags

_TABLE = flags.DEFINE_enum("table", "sizes", ["sizes", "machines"], "the table to print")
_COMPILE = flags.DEFINE_bool("compile", True, "make the plans that the folder lacks")
_FOLDER = flags.DEFINE_string("folder", "", "where the plans are kept, as JSON files")

# (recipe, hardware, devices along data, devices along fsdp, microbatches), for the published batch of 256 x 8192 tokens.
PLANS = (
    ("calm_m", "v5e:4x4", 1, 16, 8),
    ("calm_m", "v5p:2x2x1", 1, 4, 8),
    ("calm_m", "v6e:2x4", 1, 8, 8),
    ("calm_m", "h100:8", 1, 8, 4),
    ("calm_l", "v5e:4x8", 1, 32, 8),
    ("calm_l", "v5p:2x2x2", 1, 8, 8),
    ("calm_l", "v6e:4x4", 1, 16, 8),
    ("calm_l", "h100:8", 1, 8, 8),
    ("calm_xl", "v5e:16x16", 16, 16, 1),
    ("calm_xl", "v5p:2x2x4", 1, 16, 4),
    ("calm_xl", "v6e:8x8", 8, 8, 4),
    ("calm_xl", "h100:8", 1, 8, 16),
)


def line(chosen: tuple, plan: dict) -> str:
    """One line of the table, in Markdown."""
    recipe, topology, data, fsdp, microbatches = chosen
    gib = 2**30
    cells = [
        f"`{recipe}`",
        f"`{topology}`",
        f"{data} x {fsdp}",
        str(microbatches),
        f"{plan['needed'] / gib:.1f} of {plan['available'] / gib:.1f}",
        f"{plan['traffic'] / 1e9:.1f}",
        f"{plan['traffic'] / plan['ideal_traffic']:.2f}",
        f"{plan['seconds']:.2f}",
        f"{plan['device_hours']:,.0f}",
    ]
    if not plan["fits"]:
        cells[5:] = ["does not fit"] + [""] * 3
    return f"| {' | '.join(cells)} |"


def planned(path: pathlib.Path, asked: list[str]) -> dict | None:
    """The plan in a file, made first if the file is missing; None if that failed, or with --compile=0."""
    if not path.exists() and _COMPILE.value:
        program = [sys.executable, "-m", "calm_jax.plan", *asked, f"--output={path}"]
        done = subprocess.run(program, capture_output=True, text=True, check=False)
        if not path.exists():
            # For example, the hardware's compiler is not installed.
            reason = (done.stderr.splitlines() or [f"status {done.returncode}"])[-1]
            print(f"{shlex.join(program)}: {reason}", file=sys.stderr)
    return json.loads(path.read_text()) if path.exists() else None


@command
def main(argv: list[str]) -> None:
    folder = given_folder(_FOLDER, "a folder for the plans")
    with os_errors(f"--folder={folder}", "made"):
        folder.mkdir(parents=True, exist_ok=True)
    if _TABLE.value == "machines":
        for machine, use in itertools.product(MACHINES, USES):
            cells = [Cell(machine, recipe, use) for recipe in RECIPES]
            texts = [one.text(planned(folder / f"{one.name}.json", one.options)) for one in cells]
            print(f"| {machine} | {use} | {' | '.join(texts)} |", flush=True)
        return
    for chosen in PLANS:
        recipe, topology, *_ = chosen
        plan = planned(folder / f"{recipe}-{topology.replace(':', '-')}.json", options(*chosen))
        if plan is not None:
            print(line(chosen, plan), flush=True)


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
