"""How every command of the package ends: quietly, with one line, or with an exit status that means "again"."""

import functools
import logging as logging_lib
import os
import pathlib
import sys
from collections.abc import Callable

from absl import flags, logging
from ml_collections import ConfigDict, config_flags

from calm_jax import processes
from calm_jax.errors import Interrupted, UserError, nearest
from calm_jax.interrupt import EXIT_INTERRUPTED, EndOnSignal


def _is_news(record: logging_lib.LogRecord) -> bool:
    """Orbax logs a failed background write with its traceback; it also reaches us, as one line."""
    return not (record.levelno >= logging_lib.ERROR and "orbax" in record.pathname)


def parse_flags(argv: list[str]) -> list[str]:
    """For `app.run(main, flags_parser=parse_flags)`: what is wrong with flags is one line and exit status 2."""
    try:
        return flags.FLAGS(argv)
    except (flags.Error, ValueError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)


def parse_config_flags(config: ConfigDict) -> Callable[[list[str]], list[str]]:
    """The same for a command whose `--config.KEY` flags change `config`, which it finds in `flags.FLAGS["config"]`."""

    def parse(argv: list[str]) -> list[str]:
        message = unknown_key(argv, config)
        if not message:
            try:
                # Not before: defining it reads the values.
                config_flags.DEFINE_config_dict("config", config, "recipe's keys", sys_argv=argv)
                return flags.FLAGS(argv)
            except (flags.Error, AttributeError, KeyError, TypeError, ValueError) as error:
                message = " ".join(str(error).split())
        print(f"error: {message}", file=sys.stderr)
        sys.exit(2)

    return parse


def parse_recipe_flags(argv: list[str]) -> list[str]:
    """The same for a command whose `--config` names a recipe's file."""
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
    """Names the first `--config.KEY` that the recipe does not have; empty if it has them all."""
    alone = [argv[0], f"--config={recipe_flag}"]
    values = flags.FlagValues()
    config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=alone)
    values(alone)
    return unknown_key(argv, values.config)


def unknown_key(argv: list[str], config: ConfigDict) -> str:
    """Names the first `--config.KEY` that `config` does not have, and the nearest that it has."""
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


def command(main: Callable[[list[str]], int | None]) -> Callable[[list[str]], None]:
    """Wraps a command's `main(argv)`: a `UserError` becomes one line and exit status 2."""

    @functools.wraps(main)
    def run(argv: list[str]) -> None:
        # Libraries log every checkpoint and compilation at INFO; --verbosity=0 shows it.
        if not flags.FLAGS["verbosity"].present:
            logging.set_verbosity(logging.WARNING)
            logging.get_absl_logger().addFilter(_is_news)
        # A terminal that lacks a character shows its number.
        sys.stdout.reconfigure(errors="backslashreplace")
        try:
            with EndOnSignal(), processes.ending_on_failure():
                status = main(argv) or 0
        except UserError as error:
            if processes.is_first():
                print(f"error: {error}", file=sys.stderr)
            status = 2
        except BrokenPipeError:
            # Whoever read the output has had enough, as `head` has; nothing more may be written at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            status = 0
        except Interrupted as interruption:
            if processes.is_first():
                print(f"interrupted: {interruption}", file=sys.stderr)
            status = EXIT_INTERRUPTED
        sys.exit(status)

    return run
