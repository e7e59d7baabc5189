"""Ends a command that would hang because the machine's clock was set back.

Two libraries wait some milliseconds by the wall clock, which is not monotonic: if the clock is set back by a day, they wait for
a day. TensorStore, which reads and writes checkpoints, so waits between the starts of two threads, and Dask between two messages.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator

from calm_jax.cli.signals import EXIT_INTERRUPTED

# Seconds between checks of the clock; also the smallest set-back, in seconds, that ends the process.
_PATIENCE = 60.0


def _ahead() -> float:
    """The wall clock minus the monotonic clock, in seconds. Only its changes have a meaning."""
    return time.time() - time.monotonic()


# The difference of the clocks when this process started.
_AHEAD = _ahead()


@contextlib.contextmanager
def ends_if_set_back(name: str, waits: str, goes_on: str) -> Iterator[None]:
    """Ends the process, with one line and status 75, if the `with` block runs for a minute and the clock was set back.

    Only a clock that was set back by more than a minute since the process started counts. An ordinary exit would hang, too: the
    interpreter waits for the libraries' threads.

    Args:
      name: the folder that is read or written, for the line.
      waits: what would wait for the clock, such as "the checkpoint".
      goes_on: what the same command then does.
    """
    done = threading.Event()

    def watch() -> None:
        while not done.wait(_PATIENCE):
            seconds = _AHEAD - _ahead()
            if seconds > _PATIENCE:
                print(
                    f"interrupted: {name}: the clock of this machine was set back by {seconds:.0f} s since the start, so {waits} "
                    f"would not finish until the clock has caught up; the same command {goes_on}",
                    file=sys.stderr,
                    flush=True,
                )
                os._exit(EXIT_INTERRUPTED)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        done.set()
