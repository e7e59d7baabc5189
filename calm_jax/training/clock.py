"""What a clock that is set back does to checkpoints, and the end of a run that would wait for it.

TensorStore writes checkpoints with threads that it starts when it needs them. The next one starts some milliseconds after the
one before by the machine's clock, which need not be steady: if the clock was set back by a day in between, none starts for a day.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator

from calm_jax.cli.signals import EXIT_INTERRUPTED

# Seconds that a save may take before the clock is looked at, and by which the clock must have been set back.
_PATIENCE = 60.0


def _ahead() -> float:
    """Seconds by which the machine's clock is ahead of the steady one, whose zero is anywhere."""
    return time.time() - time.monotonic()


# When this process started.
_AHEAD = _ahead()


@contextlib.contextmanager
def ends_if_set_back(name: str) -> Iterator[None]:
    """Ends the process, with one line and status 75, if its body still runs after a minute and the clock was set back.

    Nothing else ends a save that waits: it runs in TensorStore's threads, for which the interpreter's exit would wait, too.

    Args:
      name: what is saved, for the line.
    """
    done = threading.Event()

    def watch() -> None:
        while not done.wait(_PATIENCE):
            seconds = _AHEAD - _ahead()
            if seconds > _PATIENCE:
                print(
                    f"interrupted: {name}: the clock of this machine was set back by {seconds:.0f} s since the start, and the "
                    "checkpoint would wait until it has caught up; the same command goes on from the last complete one",
                    file=sys.stderr,
                    flush=True,
                )
                os._exit(EXIT_INTERRUPTED)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        done.set()
