"""SIGTERM, SIGHUP (the terminal is gone) and Ctrl-C end a command with one line.

`calm_jax.parallel.signals` extends this to several processes.
"""

import math
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from calm_jax.errors import Interrupted

# EX_TEMPFAIL of sysexits.h, "try again later": the launch scripts restart a command that ends with it.
EXIT_INTERRUPTED = 75
# The signals that end a command.
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_AGAIN_SECONDS = 0.5
_SAME_SIGNAL_SECONDS = 1.0
# The handlers whose `with` block is being run.
_handlers: list["SignalHandler"] = []


def ignore_the_next() -> None:
    """Call it before a command's result gets its name, after which there is little left to do: the next signal is ignored.

    Else a command that is complete would ask to be given again, and would then be refused because its result exists.
    """
    for handler in _handlers:
        handler.ignores_next = True


def tell_of_no_files() -> None:
    """From now on the message about a signal does not mention files. `generate` calls it where it prints to the terminal."""
    for handler in _handlers:
        handler.writes_files = False


def interrupted(name: str) -> Interrupted:
    """The error for a signal outside training's steps. `name`: such as "SIGTERM"."""
    writes = all(handler.writes_files for handler in _handlers)
    of_files = "files that are complete are kept, and none is half-written; " if writes else ""
    return Interrupted(f"{name}: {of_files}give the same command again")


def _is_importing() -> bool:
    """Whether a module is being imported at this moment."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename != "<frozen importlib._bootstrap>":
        frame = frame.f_back
    return frame is not None


class SignalHandler:
    """Calls `received(number)` for the given signals inside a `with` block, and restores the previous handlers after it.

    SIGHUP stays ignored where it is, as in commands that `nohup` starts.

    Attributes:
      ignores_next: whether the next signal is ignored.
      writes_files: whether the command writes files; the message about a signal mentions files only then.
    """

    def __init__(self, signals: tuple[signal.Signals, ...], received: Callable[[int], None]):
        self._signals, self._received = signals, received
        self.ignores_next = False
        self.writes_files = True
        self._noted_at = -math.inf
        self._previous: dict[signal.Signals, Any] = {}
        self._interruption: Interrupted | None = None
        self._previous_hook = sys.unraisablehook

    def note(self) -> None:
        """From now on signals are ignored for a second: a host that shuts down signals both a script and the command to which the
        script passes the signal on."""
        self._noted_at = time.monotonic()

    def interrupt(self, name: str) -> None:
        """Raises `Interrupted` for a signal, such as "SIGTERM", and again every half second as long as the block goes on.

        Python forgets an exception that is raised in a destructor or a callback, such as those of garbage collection, and a signal
        may come in the midst of one. In the midst of an import it is raised later: jaxlib aborts the process if an exception comes
        while it is being imported, and numpy prints a traceback.
        """
        self._interruption = interrupted(name)
        if signal.SIGALRM not in self._previous:
            self._previous[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._again)
            self._previous_hook, sys.unraisablehook = sys.unraisablehook, self._report_forgotten
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_SECONDS, _AGAIN_SECONDS)
        self._raise()

    def _raise(self) -> None:
        assert self._interruption is not None
        if not _is_importing():
            raise self._interruption

    def _again(self, number: int, frame: FrameType | None) -> None:
        # What is being cleaned up on the way to the end of the block is not interrupted.
        error = sys.exc_info()[1]
        while error is not None:
            if error is self._interruption:
                return
            error = error.__context__
        self._raise()

    def _report_forgotten(self, forgotten: Any) -> None:
        # It is raised again, and its traceback need not be printed.
        if forgotten.exc_value is not self._interruption:
            self._previous_hook(forgotten)

    def __enter__(self) -> "SignalHandler":
        def handle(number: int, frame: FrameType | None) -> None:
            if time.monotonic() - self._noted_at <= _SAME_SIGNAL_SECONDS:
                return
            if self.ignores_next:
                self.ignores_next = False
                self.note()
            else:
                self._received(number)

        self._previous = {
            number: signal.signal(number, handle)
            for number in self._signals
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
        }
        _handlers.append(self)
        return self

    def __exit__(self, *given: object) -> None:
        _handlers.remove(self)
        if self._interruption is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
            sys.unraisablehook = self._previous_hook
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        _, error, _ = given
        if isinstance(error, Exception) and self._interruption is not None:
            # A library that is interrupted in the midst of something may end with an error of its own.
            raise self._interruption from error


class EndOnSignal(SignalHandler):
    """Raises `Interrupted` at once on a signal inside a `with` block."""

    def __init__(self) -> None:
        super().__init__(ENDING, self._end)

    def _end(self, number: int) -> None:
        self.interrupt(signal.Signals(number).name)
