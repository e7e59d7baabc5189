"""How every command of the package ends: quietly, with one line, or with an exit status that means "again"."""

import functools
import sys
from collections.abc import Callable

from absl import flags, logging

from calm_jax.errors import Interrupted, UserError
from calm_jax.interrupt import EndOnSignal

# sysexits.h EX_TEMPFAIL, "try again later": launch scripts turn it into a restart.
EXIT_INTERRUPTED = 75


def command(main: Callable[[list[str]], int | None]) -> Callable[[list[str]], None]:
    """Wraps a command's `main(argv)`: a `UserError` becomes one line and exit status 2."""

    @functools.wraps(main)
    def run(argv: list[str]) -> None:
        # Libraries log every checkpoint and compilation at INFO; --verbosity=0 shows it.
        if not flags.FLAGS["verbosity"].present:
            logging.set_verbosity(logging.WARNING)
        try:
            with EndOnSignal():
                status = main(argv) or 0
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            status = 2
        except Interrupted as interruption:
            print(f"interrupted: {interruption}", file=sys.stderr)
            status = EXIT_INTERRUPTED
        sys.exit(status)

    return run
