"""Files and folders that appear only when they are whole."""

import os
import pathlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from calm_jax.errors import UserError


def write_atomically(path: pathlib.Path, text: str, tag: str = "") -> None:
    """Writes a file beside its place and moves it there, so that it is never half-written, not even by a power cut.

    tag: tells apart the files beside of processes that write the same.
    """
    beside = path.with_name(f"{path.name}{tag}.tmp")
    try:
        with open(beside, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from error


def refuse_existing(path: pathlib.Path) -> None:
    """Raises `UserError` if a folder to be made is there already with something in it."""
    try:
        is_taken = path.exists() and (not path.is_dir() or any(path.iterdir()))
        if is_taken or path.is_symlink():
            raise UserError(f"{path} is there already: give another folder, or delete it")
    except OSError as error:
        raise UserError(f"{path} cannot be looked into: {error.strerror}") from error


@contextmanager
def beside(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A folder to fill that becomes `path` when all went well, and else vanishes.

    Raises `UserError` if `path` is there already with something in it.
    """
    refuse_existing(path)
    path = path.absolute()
    # From the nearest up; they go, too, if it comes to nothing.
    missing = [parent for parent in path.parents if not parent.exists()]
    unfinished = path.with_name(f".{path.name}.unfinished-{os.getpid()}")
    try:
        unfinished.mkdir(parents=True)
        yield unfinished
        unfinished.rename(path)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
        for parent in missing:
            # Only empty ones can be removed.
            with suppress(OSError):
                parent.rmdir()
