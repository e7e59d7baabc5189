"""Hides the errors of reads and writes of checkpoints that fail after an earlier one has already failed."""

import functools
import logging
import sys
import traceback
from typing import Any


def _is_late(error: BaseException | None) -> bool:
    """Whether an error is one of those that `hide_late_errors` hides."""
    if isinstance(error, RuntimeError) and str(error) == "Event loop is closed":
        return True
    frames = traceback.extract_tb(error.__traceback__) if error else []
    return "OCDBT" in str(error) or any("orbax" in frame.filename for frame in frames)


class _NoLateErrors(logging.Filter):
    """Drops asyncio's log records about errors that nobody retrieved (see `hide_late_errors`)."""

    def filter(self, record: logging.LogRecord) -> bool:
        is_unasked = "exception was never retrieved" in record.getMessage()
        return not (is_unasked and _is_late(record.exc_info[1] if record.exc_info else None))


@functools.cache
def hide_late_errors() -> None:
    """From now on, keeps this process from printing the errors of reads and writes that end after another one has failed.

    Orbax reads and writes all arrays concurrently. At the first error it closes its event loop and raises the error. The others
    end later: TensorStore's threads then find the loop closed, and if such a read or write fails too, nobody retrieves its error.
    """
    shown = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        code = getattr(unraisable.object, "cr_code", None)
        if not (_is_late(unraisable.exc_value) or (code and "orbax" in code.co_filename)):
            shown(unraisable)

    sys.unraisablehook = hook
    logging.getLogger("asyncio").addFilter(_NoLateErrors())
