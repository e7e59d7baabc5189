"""Trains a recipe, or evaluates a trained one.

python -m calm_jax.main --config=configs/quickstart.py [--workdir=DIR] [--mode=train|eval] [--config.KEY=VALUE ...]

A second call with the same flags resumes a run that was stopped. configs/common.py describes every KEY. To train on several
hosts, run the command on each of them (flags: --helpfull, under calm_jax.parallel.startup).
"""

import pathlib
import re
from typing import Any

from absl import app, flags

from calm_jax.cli.files import local_path
from calm_jax.cli.flags import define_recipe, parse_flags
from calm_jax.errors import UserError
from calm_jax.parallel import startup
from calm_jax.parallel.compilation_cache import set_up_compiler
from calm_jax.parallel.host_memory import keep_freed_memory
from calm_jax.parallel.startup import multihost_command

_CONFIG = define_recipe(
    "Python file with the recipe, if needed with arguments, as in configs/calm_m.py:head=flow,k=8"
)
_WORKDIR = flags.DEFINE_string(
    "workdir", "", "folder of the run; if empty, runs/ and the name of the recipe"
)
_MODE = flags.DEFINE_enum(
    "mode", "train", ["train", "eval"], "train the recipe, or only score what the workdir holds"
)
_OVERWRITE = flags.DEFINE_bool(
    "overwrite", False, "delete the run in the workdir and train from step 0"
)
_PROFILE = flags.DEFINE_string(
    "profile",
    "",
    "A:B writes a JAX profiler trace of training steps A to B of each stage, to profile/ in the workdir",
)
_start_processes = startup.define_flags()


def _default_workdir(config_flag: str) -> pathlib.Path:
    """`runs/NAME` for configs/NAME.py, `runs/NAME-ARGUMENT` for configs/NAME.py:ARGUMENT, DIR for configs/workdir.py:DIR."""
    file, _, argument = config_flag.partition(":")
    name = pathlib.Path(file).stem
    if name == "workdir" and argument:
        return local_path(argument, "--workdir")
    suffix = "-" + re.sub(r"[^\w.=-]+", "-", argument) if argument else ""
    return pathlib.Path("runs") / (name + suffix)


def _profiled_steps(text: str) -> tuple[int, int]:
    if not text:
        return -1, -1
    match = re.fullmatch(r"(\d{1,18}):(\d{1,18})", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise UserError(f"--profile={text!r} must be A:B, the first and the last step to trace")
    return int(match[1]), int(match[2])


@multihost_command
def main(argv: list[str]) -> None:
    # Imported here, so that --help and bad flags do not wait for JAX.
    from calm_jax.config import resolve
    from calm_jax.run import recipe
    from calm_jax.run.workdir import Workdir
    from calm_jax.training.loop import Profile

    if _CONFIG.value is None:
        raise UserError("give a recipe: --config=configs/quickstart.py")
    config_flag: Any = flags.FLAGS["config"]
    default = _default_workdir(config_flag.config_filename)
    path = local_path(_WORKDIR.value, "--workdir") if _WORKDIR.value else default
    config, workdir = resolve(_CONFIG.value), Workdir(path)
    if _MODE.value == "eval":
        for name, value in (("--overwrite", _OVERWRITE.value), ("--profile", _PROFILE.value)):
            if value:
                raise UserError(f"{name} has no meaning with --mode=eval: leave it out")
    profile = Profile(*_profiled_steps(_PROFILE.value), str(path / "profile"))
    _start_processes()
    set_up_compiler()
    if _MODE.value == "eval":
        recipe.run_evaluation(config, workdir)
    else:
        recipe.run_training(config, workdir, _OVERWRITE.value, profile)


if __name__ == "__main__":
    keep_freed_memory()
    app.run(main, flags_parser=parse_flags)
