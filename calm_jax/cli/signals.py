"""SIGTERM and Ctrl-C end a command with one line. `calm_jax.parallel.signals` extends this to several processes."""

import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

from calm_jax.errors import Interrupted

# EX_TEMPFAIL of sysexits.h, "try again later": the launch scripts restart a command that ends with it.
EXIT_INTERRUPTED = 75


def interrupted(name: str) -> Interrupted:
    """The error for a signal outside training, where all results are on disk already. `name`: such as "SIGTERM"."""
    return Interrupted(f"{name}: finished results are kept; give the same command again to go on")


class SignalHandler:
    """Calls `received(number)` for the given signals inside a `with` block, and restores the previous handlers after it."""

    def __init__(self, signals: tuple[signal.Signals, ...], received: Callable[[int], None]):
        self._signals, self._received = signals, received
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "SignalHandler":
        def handle(number: int, frame: FrameType | None) -> None:
            self._received(number)

        self._previous = {number: signal.signal(number, handle) for number in self._signals}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)


class EndOnSignal(SignalHandler):
    """Raises `Interrupted` at once on SIGTERM or Ctrl-C inside a `with` block, also in place of an error that follows.

    A library that is interrupted in the midst of something may end with an error of its own.
    """

    def __init__(self) -> None:
        super().__init__((signal.SIGTERM, signal.SIGINT), self._end)
        self._interruption: Interrupted | None = None

    def _end(self, number: int) -> None:
        self._interruption = interrupted(signal.Signals(number).name)
        raise self._interruption

    def __exit__(self, *given: object) -> None:
        super().__exit__(*given)
        _, error, _ = given
        if isinstance(error, Exception) and self._interruption is not None:
            raise self._interruption from error
