"""Prints the table of training plans in docs/scaling.md: every model size on every kind of hardware, compiled for that hardware.

    python -m benchmarks.planning --folder=DIR

Each plan takes minutes, and its line is printed when it is ready. Plans that DIR already has are not made again.
"""

import json
import pathlib
import shlex
import subprocess
import sys

from absl import app, flags

from calm_jax.cli.command import command
from calm_jax.cli.flags import parse_flags
from calm_jax.errors import UserError

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


def options(recipe: str, topology: str, data: int, fsdp: int, microbatches: int) -> list[str]:
    """The options of `python -m calm_jax.plan` for one line of the table."""
    return [
        f"--config=configs/{recipe}.py",
        f"--topology={topology}",
        f"--config.mesh.data={data}",
        f"--config.mesh.fsdp={fsdp}",
        f"--config.lm.training.accumulation_steps={microbatches}",
        "--config.lm.model.remat=full",
    ]


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


@command
def main(argv: list[str]) -> None:
    if len(argv) > 1 or not _FOLDER.value:
        raise UserError("give a folder for the plans, --folder=DIR, and no other argument")
    folder = pathlib.Path(_FOLDER.value)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--folder={folder} cannot be made: {error.strerror}") from error
    for chosen in PLANS:
        recipe, topology, *_ = chosen
        path = folder / f"{recipe}-{topology.replace(':', '-')}.json"
        if not path.exists():
            asked = [sys.executable, "-m", "calm_jax.plan", *options(*chosen), f"--output={path}"]
            done = subprocess.run(asked, capture_output=True, text=True, check=False)
            if not path.exists():
                raise UserError(f"{shlex.join(asked)}: {done.stderr.splitlines()[-1]}")
        print(line(chosen, json.loads(path.read_text())), flush=True)


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
