"""Parsing of command-line flags: an error is one line and exit status 2, never a traceback.

The functions are for `app.run(main, flags_parser=...)`.
"""

import contextlib
import os
import pathlib
import re
import runpy
import sys
from collections.abc import Callable, Iterator

from absl import flags
from ml_collections import ConfigDict, config_flags

from calm_jax.cli.command import open_streams, say, status_unwritten
from calm_jax.cli.files import local_path
from calm_jax.errors import UserError, nearest, typed_reason_of

# Flags that functions of this module define appear in the --help of the command that calls them.
flags.disclaim_key_flags()


def _status_of_help() -> int:
    try:
        sys.stdout.flush()
    except OSError as error:
        return status_unwritten(error)
    return 0


def _in_words(message: str) -> str:
    """Python's messages for words that are no numbers, such as "invalid literal for int() with base 10: 'x'", in other words."""
    message = re.sub(
        r"invalid literal for int\(\) with base \d+: .*", "give a whole number", message
    )
    return re.sub(r"could not convert string to float: .*", "give a number", message)


@contextlib.contextmanager
def _one_line_errors() -> Iterator[None]:
    """Ends the command with one line and status 2, as a `UserError` does, at any error while flags are parsed."""
    open_streams()
    try:
        yield
    except UserError as error:
        message = str(error)
    except (flags.Error, AttributeError, KeyError, TypeError, ValueError) as error:
        message = _in_words(" ".join(str(error).split()))
    except SystemExit as end:
        if end.code != 1:
            raise
        # absl ends --help with status 1, which means a defect here.
        sys.exit(_status_of_help())
    except OSError as error:
        sys.exit(status_unwritten(error))
    else:
        return
    say(f"error: {UserError(message)}")
    sys.exit(2)


class FractionParser(flags.FloatParser):
    """A number, or a fraction such as 1/3."""

    syntactic_help = "a number, or a fraction such as 1/3"

    def convert(self, argument: str | float) -> float:
        over, *under = str(argument).split("/", 1)
        try:
            return float(over) / float(*(under or ["1"]))
        except (ValueError, ZeroDivisionError):
            raise ValueError("give a number such as 0.5, or a fraction such as 1/3") from None


def define_fraction(name: str, default: float | None, help_text: str) -> flags.FlagHolder:
    """Defines a flag whose value is a number or a fraction, such as 0.5 or 1/3."""
    parser = FractionParser()
    return flags.DEFINE(parser, name, default, help_text, serializer=flags.ArgumentSerializer())


@_one_line_errors()
def parse_flags_and_arguments(argv: list[str]) -> list[str]:
    """Parses the flags of a command that takes other arguments, too; returns its name and these arguments."""
    return flags.FLAGS(argv)


@_one_line_errors()
def parse_flags(argv: list[str]) -> list[str]:
    """Parses the flags of a command that takes nothing else; returns its name."""
    try:
        name, *arguments = flags.FLAGS(argv)
    except flags.UnrecognizedFlagError as error:
        config = flags.FLAGS["config"].value if "config" in flags.FLAGS else None
        keys = [] if config is None else list(_keys_ending_in(error.flagname, config))
        if not keys:
            raise
        raise UserError(
            f"unknown flag --{error.flagname}: keys of the recipe are given as {' or '.join(keys)}"
        ) from error
    if arguments:
        raise UserError(
            f"unexpected argument {arguments[0]!r}: all values are given as --NAME=VALUE; --help lists the names"
        )
    return [name]


def _keys_ending_in(name: str, config: ConfigDict, path: str = "") -> Iterator[str]:
    """The flags of the config's keys that are `name`, or end in a dot and `name`."""
    for key, value in config.items():
        if isinstance(value, ConfigDict):
            yield from _keys_ending_in(name, value, f"{path}{key}.")
        elif f".{path}{key}".endswith(f".{name}"):
            yield f"--config.{path}{key}"


def given_folder(flag: flags.FlagHolder[str], what: str) -> pathlib.Path:
    """The folder that a flag names. Raises `UserError` if the flag is not given, or for a URL."""
    if not flag.value:
        raise UserError(f"give {what}: --{flag.name}=DIR")
    return local_path(flag.value, f"--{flag.name}")


def parse_config_flags(config: ConfigDict) -> Callable[[list[str]], list[str]]:
    """A parser for a command with a fixed config, whose keys `--config.KEY=VALUE` flags change.

    The command reads the changed config from `flags.FLAGS["config"]`.
    """

    @_one_line_errors()
    def parse(argv: list[str]) -> list[str]:
        _check_keys(argv, config)
        # Only after the check for unknown keys: defining the flag already parses the values.
        config_flags.DEFINE_config_dict("config", config, "keys of the config", sys_argv=argv)
        return parse_flags(argv)

    return parse


def define_recipe(
    help_text: str,
    values: flags.FlagValues = flags.FLAGS,
    argv: list[str] | None = None,
) -> flags.FlagHolder[ConfigDict | None]:
    """Defines `--config=FILE[:ARGUMENT]`, which names a recipe, and `--config.KEY=VALUE`, which change its keys.

    Args:
      help_text: the help text of `--config`.
      values: the set of flags to which it is added.
      argv: the command's name and arguments, from which the flags will be parsed; None takes `sys.argv` at that time.
    """
    holder = config_flags.DEFINE_config_file(
        "config", None, help_text, flag_values=values, sys_argv=argv
    )
    values["config"].parser = _RecipeParser(argv)
    return holder


class _RecipeParser(flags.ArgumentParser):
    """Executes a recipe. Raises `UserError` for any error in it, for which the library would show a traceback."""

    def __init__(self, argv: list[str] | None):
        self._argv = argv

    def parse(self, recipe_flag: str) -> ConfigDict:
        words = sys.argv if self._argv is None else self._argv
        given = [word for word in words[1:] if re.match("--?config(=|$)", word)]
        if len(given) > 1:
            raise UserError(f"{' and '.join(given)}: give one recipe")
        local_path(recipe_flag, "--config")
        file, *argument = recipe_flag.split(":", 1)
        # `pathlib.Path.is_file` would raise an error for a name that is too long.
        if not os.path.isfile(file):
            raise UserError(f"--config={recipe_flag}: there is no file {file}")
        try:
            config = runpy.run_path(file)["get_config"](*argument)
        except UserError:
            raise
        except Exception as error:
            reason = typed_reason_of(error)
            if "get_config() takes 0 positional" in reason:
                reason = "this recipe takes no argument after a colon"
            raise UserError(f"--config={recipe_flag}: {reason}") from error
        if not isinstance(config, ConfigDict):
            kind = type(config).__name__
            raise UserError(
                f"--config={recipe_flag}: get_config() returns {kind}, not a ConfigDict"
            )
        # The flag then applies the `--config.KEY=VALUE` among these arguments, so unknown keys are refused first.
        _check_keys(sys.argv if self._argv is None else self._argv, config)
        return config.lock()


# As many keys of one name are listed in the place of the keys of a section.
_MOST_ELSEWHERE = 4


def _check_keys(argv: list[str], config: ConfigDict) -> None:
    """Raises `UserError` for the first `--config.KEY` that `config` does not have, with keys of the same or a similar name."""
    for arg in argv:
        name = arg.partition("=")[0]
        if not name.startswith("--config."):
            continue
        section, known = config, "config"
        *_, last = keys = name.removeprefix("--config.").split(".")
        for key in keys:
            if not isinstance(section, ConfigDict) or key not in section:
                names = list(section) if isinstance(section, ConfigDict) else []
                # Of an unknown section, the similar name of a section helps more.
                elsewhere = list(_keys_ending_in(key, config)) if key == last else []
                if 0 < len(elsewhere) <= _MOST_ELSEWHERE:
                    hint = f"it is in another section: {' or '.join(elsewhere)}"
                else:
                    hint = nearest(key, names) if names else f"{known} has no keys under it"
                raise UserError(f"{name}: {known} has no key {key!r}: {hint}")
            section, known = section[key], f"{known}.{key}"
