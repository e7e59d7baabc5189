"""Checks, before long work, that a command's output file can be written, that no file is overwritten unasked, and that no
other command is going to write it."""

import contextlib
import os
import pathlib
from collections.abc import Iterator

from absl import flags

from calm_jax.cli.files import local_path, os_errors, unfinished_folder, write_atomically
from calm_jax.cli.signals import ignore_the_next
from calm_jax.errors import UserError


def new_file(path: pathlib.Path, flag: str, overwrite: bool) -> pathlib.Path:
    """The resolved path of a file to write.

    Raises `UserError` if `path` exists and is not a file, if the file exists and `overwrite` is False, or if its folder
    cannot be written to.
    """
    with os_errors(f"{flag}={path}", "written"):
        is_there = path.exists()
    if is_there and not path.is_file():
        raise UserError(f"{flag}={path} is not a file")
    if is_there and not overwrite:
        raise UserError(f"{flag}={path} already exists: give another name, or --overwrite")
    path = path.resolve()
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise UserError(
            f"{flag}={path} cannot be written: there is no such folder, or it is not writable"
        )
    return path


@contextlib.contextmanager
def owned_file(path: pathlib.Path, flag: str, overwrite: bool) -> Iterator[pathlib.Path]:
    """`new_file`, whose result is owned inside the `with` block: another command that is to write the file is refused.

    The lock is in a folder beside the file, see `unfinished_folder`.

    Raises:
        UserError: as `new_file` does; also if another process owns the file or has written it meanwhile.
    """
    path = new_file(path, flag, overwrite)
    with unfinished_folder(path, flag):
        # Checked again, because another process may have written it before this one got the lock.
        yield new_file(path, flag, overwrite)


@contextlib.contextmanager
def owned_output(flag: flags.FlagHolder[str], overwrite: bool) -> Iterator[pathlib.Path | None]:
    """`owned_file` for the file that a flag names; None if the flag is empty."""
    if not flag.value:
        yield None
        return
    name = f"--{flag.name}"
    with owned_file(local_path(flag.value, name), name, overwrite) as path:
        yield path


def write_result(path: pathlib.Path, text: str, tag: str = "") -> None:
    """`write_atomically` of the file that is a command's result, after which a signal does not ask for the command again."""
    ignore_the_next()
    write_atomically(path, text, tag)
