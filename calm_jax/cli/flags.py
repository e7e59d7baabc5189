"""Parsing of command-line flags: an error is one line and exit status 2, never a traceback.

The functions are for `app.run(main, flags_parser=...)`.
"""

import os
import runpy
import sys
from collections.abc import Callable
from typing import NoReturn

from absl import flags
from ml_collections import ConfigDict, config_flags

from calm_jax.errors import UserError, nearest


def _refuse(message: str) -> NoReturn:
    """Ends the command as a `UserError` does."""
    print(f"error: {UserError(message)}", file=sys.stderr)
    sys.exit(2)


def parse_flags(argv: list[str]) -> list[str]:
    """Parses the flags of a command without a config."""
    try:
        return flags.FLAGS(argv)
    except (flags.Error, ValueError) as error:
        _refuse(" ".join(str(error).split()))


def parse_config_flags(config: ConfigDict) -> Callable[[list[str]], list[str]]:
    """A parser for a command with a fixed config, whose keys `--config.KEY=VALUE` flags change.

    The command reads the changed config from `flags.FLAGS["config"]`.
    """

    def parse(argv: list[str]) -> list[str]:
        message = unknown_key(argv, config)
        if not message:
            try:
                # Only after the check for unknown keys: defining the flag already parses the values.
                config_flags.DEFINE_config_dict(
                    "config", config, "keys of the config", sys_argv=argv
                )
                return flags.FLAGS(argv)
            except (flags.Error, AttributeError, KeyError, TypeError, ValueError) as error:
                message = " ".join(str(error).split())
        _refuse(message)

    return parse


def parse_recipe_flags(argv: list[str]) -> list[str]:
    """Parses the flags of a command whose `--config=FILE[:ARGUMENT]` names a recipe."""
    recipe_flag = _recipe_flag(argv)
    try:
        message = "" if recipe_flag is None else unknown_key(argv, _recipe(recipe_flag))
        if not message:
            return flags.FLAGS(argv)
    except UserError as error:
        message = str(error)
    except (flags.Error, TypeError, ValueError) as error:
        message = " ".join(str(error).split())
    _refuse(message)


def _recipe_flag(argv: list[str]) -> str | None:
    """The last value of --config, as `--config=FILE` or `--config FILE`; None without the flag."""
    value = None
    for arg, after in zip(argv, [*argv[1:], ""], strict=True):
        name, is_given, text = arg.partition("=")
        if name in ("--config", "-config"):
            value = text if is_given else after
    return value


def _recipe(recipe_flag: str) -> ConfigDict:
    """The config of `--config=FILE[:ARGUMENT]`. Raises `UserError` for everything that the file raises.

    The flag itself would show such an error as a traceback, or not before the config is read.
    """
    file, *argument = recipe_flag.split(":", 1)
    # Not pathlib's, which raises an error for a name that is too long.
    if not os.path.isfile(file):
        raise UserError(f"--config={recipe_flag}: there is no file {file}")
    try:
        return runpy.run_path(file)["get_config"](*argument)
    except UserError:
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        if "get_config() takes 0 positional" in reason:
            reason = "this recipe takes no argument after a colon"
        raise UserError(f"--config={recipe_flag}: {reason}") from error


def unknown_key(argv: list[str], config: ConfigDict) -> str:
    """A message about the first `--config.KEY` that `config` does not have, with a similar key; empty if it has them all."""
    for arg in argv:
        name = arg.partition("=")[0]
        if not name.startswith("--config."):
            continue
        section, known = config, "config"
        for key in name.removeprefix("--config.").split("."):
            if not isinstance(section, ConfigDict) or key not in section:
                names = list(section) if isinstance(section, ConfigDict) else []
                hint = nearest(key, names) if names else f"{known} has no keys under it"
                return f"{name}: {known} has no key {key!r}: {hint}"
            section, known = section[key], f"{known}.{key}"
    return ""
