"""The one exception that means "the input is bad", and how commands show it."""

import functools
import sys
from collections.abc import Callable

from absl import flags, logging


class UserError(Exception):
    """Bad input, in one line that names the thing, its value and the way out.

    Commands print it without a traceback and exit with status 2.
    """


class Interrupted(Exception):
    """The run was asked to stop (SIGTERM, Ctrl-C) and has saved what it had."""


# sysexits.h EX_TEMPFAIL: "try again later"; launch scripts turn it into a restart.
EXIT_INTERRUPTED = 75


def command(main: Callable[[list[str]], int | None]) -> Callable[[list[str]], None]:
    """Wraps a command's `main(argv)`: a `UserError` becomes one line and exit status 2."""

    @functools.wraps(main)
    def run(argv: list[str]) -> None:
        # Libraries log every checkpoint and compilation at INFO; --verbosity=0 shows it.
        if not flags.FLAGS["verbosity"].present:
            logging.set_verbosity(logging.WARNING)
        try:
            sys.exit(main(argv) or 0)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(2)
        except Interrupted as interruption:
            print(f"interrupted: {interruption}", file=sys.stderr)
            sys.exit(EXIT_INTERRUPTED)

    return run
