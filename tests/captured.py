"""A command's exit status and output, where several commands run one after the other in a test's own process."""

import contextlib
import io
import traceback
from collections.abc import Callable


def captured(command: Callable[[], None]) -> tuple[int, str, str]:
    """Calls a command: its exit status, stdout and stderr. An exception is a traceback on stderr and status 1.

    stdout and stderr raise an error for text that is not valid Unicode, as those of a terminal do.
    """
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            command()
            raise AssertionError("a command ends with an exit status")
        except SystemExit as stop:
            status = stop.code
        except BaseException:
            status = 1
            traceback.print_exc()
    shown = []
    for stream in (out, err):
        stream.flush()
        shown.append(stream.buffer.getvalue().decode())
    return status, shown[0], shown[1]
