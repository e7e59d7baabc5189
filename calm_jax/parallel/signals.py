"""SIGTERM, SIGHUP and Ctrl-C in runs of several processes, and in training, which ends with a checkpoint.

A signal may reach only some of the processes. JAX's distributed runtime handles SIGTERM itself and tells the other
processes, so that all of them end at the same step: at the same call of `poll` or `NoteSignal.asked`.
"""

import abc
import itertools
import os
import signal

import jax
from jax.experimental import multihost_utils

from calm_jax.cli.signals import ENDING, EXIT_INTERRUPTED, SignalHandler, interrupted

# Numbers the calls of JAX's `reached_preemption_sync_point`, which matches the calls of all processes by their numbers. All
# stages share the counter.
_polls = itertools.count()


def poll() -> None:
    """Raises `Interrupted` at the same call on all processes if one of them got a signal; for work outside training."""
    if _is_signalled():
        raise interrupted("SIGTERM")


def _is_signalled() -> bool:
    """Whether any process got SIGTERM. All processes must call this equally often, and get the same answer."""
    on = jax.distributed.is_initialized()
    return on and multihost_utils.reached_preemption_sync_point(next(_polls))


class _Handled(SignalHandler, abc.ABC):
    """Handles SIGTERM, SIGHUP and Ctrl-C inside a `with`, with or without JAX's distributed runtime.

    With the runtime, the first SIGHUP or Ctrl-C becomes a SIGTERM, which the runtime announces to all processes; the next one ends
    this process at once.
    """

    _is_passed_on = False

    def __init__(self) -> None:
        # The runtime handles SIGTERM itself.
        its_own = (signal.SIGTERM,) if jax.distributed.is_initialized() else ()
        ours = tuple(number for number in ENDING if number not in its_own)
        super().__init__(ours, self._pass_on_or_handle)

    def _pass_on_or_handle(self, number: int) -> None:
        if not jax.distributed.is_initialized():
            self._handle(signal.Signals(number).name)
        elif self._is_passed_on:
            # This process may hang in a collective with a process that has ended.
            os._exit(EXIT_INTERRUPTED)
        else:
            self._is_passed_on = True
            self.note()
            os.kill(os.getpid(), signal.SIGTERM)

    @abc.abstractmethod
    def _handle(self, name: str) -> None: ...


class EndTogetherOnSignal(_Handled):
    """For work outside training, when everything worth keeping is on disk: raises `Interrupted` at once, or with JAX's distributed
    runtime at the next `poll`."""

    def _handle(self, name: str) -> None:
        self.interrupt(name)


class NoteSignal(_Handled):
    """Notes a signal, so that a loop can end between two steps; a second signal raises `Interrupted` at once.

    A signal within a second of the first is ignored.
    """

    _name = ""

    def _handle(self, name: str) -> None:
        if not self._name:
            self._name = name
            self.note()
        else:
            self.interrupt(name)

    def asked(self) -> str:
        """The name of the signal that came, or "".

        All processes must call this equally often, and get the same answer.
        """
        if not self._name and _is_signalled():
            self._name = "SIGTERM"
        return self._name
