"""Trains the arms of an experiment with several seeds, one run after the other, and compares what they learn.

    python -m benchmarks.learning --arms=benchmarks/comparison.py --folder=DIR [--seeds=0,1,2]

The file of `--arms` has `get_arms()`, which returns for each arm, by its name, the flags of `python -m calm_jax.main` that
make it: `--config=RECIPE` and `--config.KEY=VALUE`. `{NAME}` in a flag stands for the workdir of an earlier arm, such
as an autoencoder that several arms share (`--config.autoencoder.checkpoint={NAME}`). That arm has one run, with the first
seed; all others have one for each seed. Language models are scored by `--mode=eval` after training.

The runs are in DIR/ARM/SEED, their output beside them. The same call goes on where the last one was stopped: a finished run is
left as it is, and a stopped one resumes. At the end there is a table, and DIR/learning.html has the curves over steps, tokens,
FLOPs and seconds: means over the seeds with their standard errors.
"""

import runpy

import rich.table
from absl import app, flags

from benchmarks import arms
from calm_jax.cli import progress
from calm_jax.cli.command import command
from calm_jax.cli.files import write_atomically
from calm_jax.cli.flags import given_folder, parse_flags
from calm_jax.errors import UserError, typed_reason_of
from calm_jax.run import web_comparison

_ARMS = flags.DEFINE_string("arms", "", "Python file with get_arms(), or FILE:ARGUMENT for it")
_FOLDER = flags.DEFINE_string("folder", "", "folder for runs and results")
_SEEDS = flags.DEFINE_list("seeds", ["0", "1", "2"], "seeds of the runs of each arm")


def _read(name: str) -> arms.Arms:
    """The arms of FILE or FILE:ARGUMENT. Raises `UserError` for a file without any."""
    file, *argument = name.split(":", 1)
    try:
        return runpy.run_path(file)["get_arms"](*argument)
    except UserError:
        raise
    except Exception as error:  # of the file, which may be any program
        reason = typed_reason_of(error)
        raise UserError(f"--arms={name}: its get_arms() gives no arms ({reason})") from error


@command
def main(argv: list[str]) -> int:
    folder = given_folder(_FOLDER, "a folder for the runs").absolute()
    if not _ARMS.value:
        raise UserError("give the arms: --arms=FILE")
    if not _SEEDS.value or not all(text.isdecimal() for text in _SEEDS.value):
        raise UserError(f"--seeds={','.join(_SEEDS.value)} must be numbers, as in 0,1,2")
    experiment = _read(_ARMS.value), [int(text) for text in _SEEDS.value]
    failed = arms.train(*experiment, folder)
    begun = arms.begun(*experiment, folder)
    page = folder / "learning.html"
    write_atomically(page, web_comparison.comparison(begun))
    table = rich.table.Table(
        *web_comparison.SUMMARY, box=None, pad_edge=False, collapse_padding=True
    )
    for row in web_comparison.summary(begun):
        table.add_row(*row)
    progress.console().print(table)
    print(f"{page} has the curves")
    for sentence in failed:
        print(f"failed: {sentence}")
    return int(bool(failed))


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
