"""The end of every command: exit status 0, one line of error and status 2, or status 75 after a signal."""

import atexit
import contextlib
import errno
import functools
import logging as logging_lib
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn, TextIO

from absl import flags, logging

from calm_jax.cli.signals import EXIT_INTERRUPTED, EndOnSignal
from calm_jax.errors import Interrupted, UserError

# What to do about errors of stdout: the disk, or the user's share of it, is full; or it cannot be written, as a terminal that is
# gone.
_WAYS_OUT = {
    errno.ENOSPC: "make room",
    errno.EDQUOT: "make room",
    errno.EIO: "is the terminal gone, or does a disk fail?",
}
# The longest time for a process to end after a signal; several processes of one run end together.
_EXIT_SECONDS = 20
# Whether a signal has ended the command.
_is_interrupted = False


class _Plain(logging_lib.Formatter):
    """`warning: MESSAGE`, like the line of an error; behind it the traceback of an exception that is logged."""

    def format(self, record: logging_lib.LogRecord) -> str:
        line = f"{record.levelname.lower()}: {record.getMessage()}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _is_no_orbax_error(record: logging_lib.LogRecord) -> bool:
    """False for errors that Orbax logs with a traceback: the command raises the same error itself, in one line."""
    return not (record.levelno >= logging_lib.ERROR and "orbax" in record.pathname)


def _nowhere() -> TextIO:
    return open(os.devnull, "w", encoding="utf-8")


def _drop(stream: TextIO) -> None:
    """Sends a stream's output nowhere. Python flushes it at exit, which must not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def say(line: str) -> None:
    """Prints a line on stderr, if that can be written."""
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        _drop(sys.stderr)


def _require_folder() -> None:
    """Raises `UserError` if the current folder, in which relative paths begin, was deleted."""
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise UserError("the current folder was deleted: `cd` to another one") from error


@atexit.register
def _end_before_libraries_are_unloaded() -> None:
    """XLA may still compute what a signal cut short. Python's own end would wait for it, or crash.

    It is registered when this module is imported, before JAX is, and Python calls what was registered first last.
    """
    if _is_interrupted:
        os._exit(EXIT_INTERRUPTED)


def open_streams() -> None:
    """Python has no object for a stream that was closed, as by `>&-`: gives it one that goes nowhere."""
    sys.stdout = sys.stdout or _nowhere()
    sys.stderr = sys.stderr or _nowhere()


def status_unwritten(error: OSError) -> int:
    """The exit status of a command whose output nobody reads any more, or cannot be written, which it says.

    From here on the output goes nowhere. Raises any other `error` again.
    """
    if isinstance(error, BrokenPipeError):
        _drop(sys.stdout)
        _drop(sys.stderr)
        return 128 + signal.SIGPIPE
    if error.errno not in _WAYS_OUT:
        raise error
    _drop(sys.stdout)
    # A command's own file that cannot be written is a `UserError` (`os_errors`). This may be stdout, after that file.
    say(
        f"error: {error.strerror}, for the output or a file: {_WAYS_OUT[error.errno]}; files that are complete are kept"
    )
    return 2


def end_soon() -> NoReturn:
    """Ends the process with status 75, after a signal.

    Threads of libraries that it cut short may print tracebacks, or never end, for which Python would wait.
    """
    global _is_interrupted
    _is_interrupted = True
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    _drop(sys.stderr)
    signal.signal(signal.SIGALRM, lambda *_: os._exit(EXIT_INTERRUPTED))
    signal.alarm(_EXIT_SECONDS)
    sys.exit(EXIT_INTERRUPTED)


def command(main: Callable[[list[str]], int | None]) -> Callable[[list[str]], None]:
    """Wraps a command's `main(argv)`, which returns an exit status or None, so that it never ends with a traceback.

    A `UserError` or a full disk becomes one line on stderr and exit status 2; a signal (`Interrupted`) becomes one line and status
    75. If nobody reads the output any more, as with `| head`, the command ends without a line, with the status that shells give to
    a program that SIGPIPE has ended. For a command that may run as several processes see `calm_jax.parallel.startup.multihost_command`.
    """

    @functools.wraps(main)
    def run(argv: list[str]) -> None:
        # Libraries log every checkpoint and compilation at level INFO, which is hidden unless --verbosity is given.
        if not flags.FLAGS["verbosity"].present:
            logging.set_verbosity(logging.WARNING)
            logging.get_absl_logger().addFilter(_is_no_orbax_error)
            logging.get_absl_handler().setFormatter(_Plain())
        open_streams()
        # A character that the terminal cannot encode is printed as its escape sequence.
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
        try:
            with EndOnSignal():
                _require_folder()
                status = main(argv) or 0
                sys.stdout.flush()
        except UserError as error:
            say(f"error: {error}")
            status = 2
        except OSError as error:
            status = status_unwritten(error)
        except Interrupted as interruption:
            say(f"interrupted: {interruption}")
            end_soon()
        sys.exit(status)

    return run
