"""The two exceptions that end a command with one line instead of a traceback, and checks of values that raise them."""

import difflib
from collections.abc import Iterable

_LONGEST_MESSAGE = 1500


def shortened(message: str, most: int) -> str:
    """A message of at most `most` characters. Its middle is left out, as it may quote input of any length between key and reason."""
    if len(message) <= most:
        return message
    cut = " ... "
    kept = most - len(cut)
    return f"{message[: kept // 2]}{cut}{message[kept // 2 - kept :]}"


class UserError(Exception):
    """Bad input. The message is one line with the flag, key or file, its value, and what to do instead.

    Commands print it without a traceback and exit with status 2. Because a message may quote input of any length, line breaks
    are replaced by spaces, and the middle of more than 1500 characters is left out.
    """

    def __init__(self, message: str):
        super().__init__(shortened(" ".join(message.splitlines()), _LONGEST_MESSAGE))


def reason_of(error: BaseException) -> str:
    """The message of a library's error, in one line of at most 300 characters; its type if it has no message."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def typed_reason_of(error: BaseException) -> str:
    """`reason_of` after the error's type, for messages that may be short, such as a missing key."""
    kind, reason = type(error).__name__, reason_of(error)
    return kind if reason == kind else f"{kind}: {reason}"


def shown(number: float) -> str:
    """A number for messages: short, but never rounded to another number."""
    short = f"{number:g}"
    return short if float(short) == number else repr(number)


class Interrupted(BaseException):
    """A signal (SIGTERM, SIGHUP or Ctrl-C) stopped the run. The message says what was saved.

    Not a subclass of Exception, as KeyboardInterrupt is not: `except Exception` must not handle it as a failure.
    """


def require_one_of(key: str, value: object, known: Iterable[str]) -> None:
    """Raises `UserError` unless the value of a key is one of `known`."""
    names = tuple(known)
    if value not in names:
        raise UserError(f"{key}={value!r} is none of {', '.join(names)}")


def require_at_least(least: int, section: object, path: str, *names: str) -> None:
    """Raises `UserError` for the first of a section's keys, `path` with each of `names`, whose value is below `least`."""
    for name in names:
        if getattr(section, name) < least:
            raise UserError(f"{path}{name}={getattr(section, name)} must be at least {least}")


def require_within(least: float, most: float, section: object, path: str, *names: str) -> None:
    """As `require_at_least`: raises `UserError` for the first value that is not from `least` to `most`, NaN included."""
    for name in names:
        if not least <= getattr(section, name) <= most:
            value = getattr(section, name)
            raise UserError(f"{path}{name}={value} must be from {least:g} to {most:g}")


def require_seed(key: str, seed: int) -> None:
    """Raises `UserError` unless a seed fits the 32 bits from which random keys are made."""
    if not 0 <= seed < 2**32:
        raise UserError(f"{key}={seed} must be in [0, 2**32)")


def installation(extra: str) -> str:
    """How to install an extra of pyproject.toml, for messages. Not by the package's name: it is not on PyPI."""
    return f"pip install -c constraints.txt -e '.[{extra}]' in the clone"


def nearest(name: str, names: list[str]) -> str:
    """A hint for an unknown name: the most similar one of `names`, or all of them if none is similar."""
    close = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"the known names are {', '.join(names)}"
