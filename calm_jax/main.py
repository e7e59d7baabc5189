"""Trains and evaluates a recipe.

python -m calm_jax.main --config=configs/quickstart.py [--workdir=DIR] [--mode=train|eval] [--config.KEY=VALUE ...]

Every process of several runs this command (see `calm_jax.processes`).
"""

import pathlib
import re
import sys

from absl import app, flags
from ml_collections import config_flags

from calm_jax import processes, recipe
from calm_jax.command import command, unknown_key
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
_start_processes = processes.define_flags()


def _default_workdir(config_flag: str) -> pathlib.Path:
    """`runs/<config name>`, with the config's argument if it has one; `workdir.py:DIR` is DIR."""
    file, _, argument = config_flag.partition(":")
    name = pathlib.Path(file).stem
    if name == "workdir" and argument:
        return pathlib.Path(argument)
    suffix = "-" + re.sub(r"[^\w.=-]+", "-", argument) if argument else ""
    return pathlib.Path("runs") / (name + suffix)


def _parse_flags(argv: list[str]) -> list[str]:
    """Parses flags; what is wrong with them is one line instead of a traceback."""
    recipe_flag = _recipe_flag(argv)
    try:
        file = recipe_flag.partition(":")[0]
        if file and not pathlib.Path(file).is_file():
            raise UserError(f"--config={recipe_flag}: there is no file {file}")
        return flags.FLAGS(argv)
    except UserError as error:
        message = str(error)
    except (AttributeError, KeyError) as error:
        message = _unknown_key(argv, recipe_flag) or f"--config={recipe_flag}: {error!r}"
    except (TypeError, ValueError, OSError, ImportError, SyntaxError, flags.Error) as error:
        message = " ".join(str(error).split())
        if "get_config() takes 0 positional" in message:
            message = f"--config={recipe_flag}: this recipe takes no argument after a colon"
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def _recipe_flag(argv: list[str]) -> str:
    """The last value of --config, as `--config=FILE` or `--config FILE`; empty if there is none."""
    value = ""
    for arg, after in zip(argv, [*argv[1:], ""], strict=True):
        name, is_given, text = arg.partition("=")
        if name in ("--config", "-config"):
            value = text if is_given else after
    return value


def _unknown_key(argv: list[str], recipe_flag: str) -> str:
    """Names the first `--config.KEY` that the recipe does not have; empty if it has them all."""
    alone = [argv[0], f"--config={recipe_flag}"]
    values = flags.FlagValues()
    config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=alone)
    values(alone)
    return unknown_key(argv, values.config)


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
    app.run(main, flags_parser=_parse_flags)
