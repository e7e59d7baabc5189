"""Parsing of command-line flags: an error is one line and exit status 2, never a traceback.

The functions are for `app.run(main, flags_parser=...)`.
"""

import pathlib
import sys
from collections.abc import Callable

from absl import flags
from ml_collections import ConfigDict, config_flags

from calm_jax.errors import UserError, nearest


def parse_flags(argv: list[str]) -> list[str]:
    """Parses the flags of a command without a config."""
    try:
        return flags.FLAGS(argv)
    except (flags.Error, ValueError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)


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
        print(f"error: {message}", file=sys.stderr)
        sys.exit(2)

    return parse


def parse_recipe_flags(argv: list[str]) -> list[str]:
    """Parses the flags of a command whose `--config=FILE[:ARGUMENT]` names a recipe."""
    recipe_flag = _recipe_flag(argv)
    try:
        file = recipe_flag.partition(":")[0]
        if file and not pathlib.Path(file).is_file():
            raise UserError(f"--config={recipe_flag}: there is no file {file}")
        return flags.FLAGS(argv)
    except UserError as error:
        message = str(error)
    except (AttributeError, KeyError) as error:
        message = _unknown_key_of_recipe(argv, recipe_flag) or f"--config={recipe_flag}: {error!r}"
    except (TypeError, ValueError, OSError, ImportError, SyntaxError, flags.Error) as error:
        message = " ".join(str(error).split())
        if isinstance(error, SyntaxError):
            message = f"--config={recipe_flag}: {message}"
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


def _unknown_key_of_recipe(argv: list[str], recipe_flag: str) -> str:
    """A message about the first `--config.KEY` that the recipe does not have; empty if it has them all."""
    alone = [argv[0], f"--config={recipe_flag}"]
    values = flags.FlagValues()
    config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=alone)
    values(alone)
    return unknown_key(argv, values.config)


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
