"""SIGTERM and Ctrl-C: end a command with a message, and a training stage with a checkpoint.

Of several processes any one may get a signal. JAX's runtime tells the others (and takes SIGTERM for that, in place of a
handler), so that all of them end after the same step: where they `poll`.
"""

import abc
import itertools
import math
import os
import signal
import time
from types import FrameType

from jax.experimental import multihost_utils

from calm_jax import processes
from calm_jax.errors import Interrupted

_SAME_SIGNAL_SECONDS = 1.0

# sysexits.h EX_TEMPFAIL, "try again later": launch scripts turn it into a restart.
EXIT_INTERRUPTED = 75

# Over all stages, as processes count together.
_polls = itertools.count()


def poll() -> None:
    """Raises `Interrupted` on all processes at the same call of this one, if one of them got a signal outside training."""
    if _is_asked():
        raise _interrupted("SIGTERM")


def _is_asked() -> bool:
    on = processes.is_runtime_on()
    return on and multihost_utils.reached_preemption_sync_point(next(_polls))


def _interrupted(name: str) -> Interrupted:
    return Interrupted(f"{name}: what was complete is kept; give the same command again")


class _Handled(abc.ABC):
    """Handles both signals inside a `with`; what was there before comes back after it.

    With the runtime on, Ctrl-C becomes SIGTERM, which all hear of; a second one ends this process at once.
    """

    _is_passed_on = False

    def __enter__(self):
        # SIGTERM is the runtime's if it is on.
        on = processes.is_runtime_on()
        numbers = [signal.SIGINT] if on else [signal.SIGTERM, signal.SIGINT]
        self._previous = {number: signal.signal(number, self._received) for number in numbers}
        return self

    def __exit__(self, *_):
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _received(self, number: int, frame: FrameType | None) -> None:
        if not processes.is_runtime_on():
            self._handle(signal.Signals(number).name)
        elif self._is_passed_on:
            # All may wait for something that does not come.
            os._exit(EXIT_INTERRUPTED)
        else:
            self._is_passed_on = True
            os.kill(os.getpid(), signal.SIGTERM)

    @abc.abstractmethod
    def _handle(self, name: str) -> None: ...


class EndOnSignal(_Handled):
    """Ends what is being done at once: outside training everything worth keeping is on disk."""

    def _handle(self, name: str) -> None:
        raise _interrupted(name)


class NoteSignal(_Handled):
    """Notes a signal, for a loop that ends between two steps; a second one ends at once.

    Not one that comes with the first: a host that shuts down signals both a script and what the script passes it on to.
    """

    _name = ""
    _noted_at = -math.inf

    def _handle(self, name: str) -> None:
        now = time.monotonic()
        if not self._name:
            self._name, self._noted_at = name, now
        elif now - self._noted_at > _SAME_SIGNAL_SECONDS:
            raise _interrupted(name)

    def asked(self) -> str:
        """The signal that came, empty for none. Every process of several has to ask equally often, and gets the same answer."""
        if _is_asked():
            self._name = "SIGTERM"
        return self._name
