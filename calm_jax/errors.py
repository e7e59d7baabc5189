"""The two exceptions that mean something to whoever typed the command, and a hint for them."""

import difflib


class UserError(Exception):
    """Bad input, in one line that names the thing, its value and the way out.

    Commands print it without a traceback and exit with status 2.
    """


class Interrupted(BaseException):
    """The run was asked to stop (SIGTERM, Ctrl-C); what it says is what was saved.

    Like KeyboardInterrupt it is no Exception, so that nothing on the way out takes it for a failure.
    """


def nearest(name: str, names: list[str]) -> str:
    """A hint at the name that was meant."""
    close = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"there are {', '.join(names)}"
