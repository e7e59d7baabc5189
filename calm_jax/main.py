"""Trains and evaluates a recipe.

python -m calm_jax.main --config=configs/quickstart.py [--workdir=DIR] [--mode=train|eval] [--config.KEY=VALUE ...]

Every process of several runs this command (see `calm_jax.startup`).
"""

import pathlib
import re

from absl import app, flags
from ml_collections import config_flags

from calm_jax import recipe, startup
from calm_jax.command import command, parse_recipe_flags
from calm_jax.config import resolve
from calm_jax.errors import UserError
from calm_jax.train import Profile
from calm_jax.workdir import Workdir

_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "recipe: a file with get_config(), such as configs/quickstart.py"
)
_WORKDIR = flags.DEFINE_string("workdir", "", "folder of the run; runs/<config name> unless given")
_MODE = flags.DEFINE_enum("mode", "train", ["train", "eval"], "what to do")
_OVERWRITE = flags.DEFINE_bool("overwrite", False, "delete the run in the workdir and start anew")
_PROFILE = flags.DEFINE_string(
    "profile", "", "A:B writes a JAX profiler trace of steps A to B of each stage that trains"
)
_start_processes = startup.define_flags()


def _default_workdir(config_flag: str) -> pathlib.Path:
    """`runs/<config name>`, with the config's argument if it has one; `workdir.py:DIR` is DIR."""
    file, _, argument = config_flag.partition(":")
    name = pathlib.Path(file).stem
    if name == "workdir" and argument:
        return pathlib.Path(argument)
    suffix = "-" + re.sub(r"[^\w.=-]+", "-", argument) if argument else ""
    return pathlib.Path("runs") / (name + suffix)


def _profile(text: str, folder: pathlib.Path) -> Profile:
    if not text:
        return Profile(-1, -1, "")
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise UserError(f"--profile={text!r} must be A:B, the first and the last step to trace")
    return Profile(int(match[1]), int(match[2]), str(folder / "profile"))


@command
def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise UserError(f"unexpected argument {argv[1]!r}")
    if _CONFIG.value is None:
        raise UserError("give a recipe: --config=configs/quickstart.py")
    config_flag = flags.FLAGS["config"].config_filename
    path = pathlib.Path(_WORKDIR.value) if _WORKDIR.value else _default_workdir(config_flag)
    config, workdir = resolve(_CONFIG.value), Workdir(path)
    if _MODE.value == "eval":
        for name, value in (("--overwrite", _OVERWRITE.value), ("--profile", _PROFILE.value)):
            if value:
                raise UserError(f"{name} is for --mode=train")
    profile = _profile(_PROFILE.value, path)
    _start_processes()
    if _MODE.value == "eval":
        recipe.run_evaluation(config, workdir)
    else:
        recipe.run_training(config, workdir, _OVERWRITE.value, profile)


if __name__ == "__main__":
    app.run(main, flags_parser=parse_recipe_flags)
