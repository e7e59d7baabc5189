"""SIGTERM and Ctrl-C: end a command with a message, and a training stage with a checkpoint."""

import abc
import signal
from types import FrameType

from calm_jax.errors import Interrupted

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class _Handled(abc.ABC):
    """Handles both signals inside a `with`; what was there before comes back after it."""

    def __enter__(self):
        self._previous = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        return self

    def __exit__(self, *_):
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @abc.abstractmethod
    def _handle(self, number: int, frame: FrameType | None) -> None: ...


class EndOnSignal(_Handled):
    """Ends what is being done at once: outside training everything worth keeping is on disk."""

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        raise Interrupted(f"{name}: what was complete is kept; give the same command again")


class NoteSignal(_Handled):
    """Notes a signal in `name`, for a loop that ends between two steps; a second one ends at once."""

    name = ""

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.name = signal.Signals(number).name
        self.__exit__()
