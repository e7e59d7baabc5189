"""The two exceptions that end a command with one line instead of a traceback, and a hint at misspelt names."""

import difflib

_LONGEST_MESSAGE = 1500


class UserError(Exception):
    """Bad input. The message is one line with the flag, key or file, its value, and what to do instead.

    Commands print it without a traceback and exit with status 2. Line breaks and the end of a very long line come from what was
    read, which a message may quote; they are left out.
    """

    def __init__(self, message: str):
        super().__init__(" ".join(message.splitlines())[:_LONGEST_MESSAGE])


class Interrupted(BaseException):
    """A signal (SIGTERM or Ctrl-C) stopped the run. The message says what was saved.

    Not a subclass of Exception, as KeyboardInterrupt is not: `except Exception` must not handle it as a failure.
    """


def nearest(name: str, names: list[str]) -> str:
    """A hint for an unknown name: the most similar one of `names`, or all of them if none is similar."""
    close = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"there are {', '.join(names)}"
