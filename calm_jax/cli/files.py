"""Atomic writes: a file or folder appears under its name only when it is complete."""

import math
import os
import pathlib
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from calm_jax.errors import UserError


def write_atomically(path: pathlib.Path, text: str, tag: str = "") -> None:
    """Writes a text file under a temporary name and renames it, so that it is never seen half-written, even after a power cut.

    Args:
      path: the file to write.
      text: its content.
      tag: part of the temporary name; must differ between processes that may write the same file at once.

    Raises:
      UserError: if the file cannot be written.
    """
    unfinished = path.with_name(f"{path.name}{tag}.tmp")
    try:
        with open(unfinished, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from error


def refuse_existing(path: pathlib.Path) -> None:
    """Raises `UserError` if `path`, where a folder is to be made, is anything but free or an empty folder."""
    try:
        is_taken = path.exists() and (not path.is_dir() or any(path.iterdir()))
        if is_taken or path.is_symlink():
            raise UserError(f"{path} is there already: give another folder, or delete it")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error


@contextmanager
def atomic_folder(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Gives a temporary folder to fill. It is renamed to `path` when the `with` block succeeds, and deleted when it fails.

    Raises `UserError` if `path` exists and is not an empty folder, or if it cannot be written.
    """
    refuse_existing(path)
    path = path.absolute()
    # Parent folders that are made here, innermost first. They are deleted again if the block fails.
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
            # Fails for a folder that is not empty, as after a success.
            with suppress(OSError):
                parent.rmdir()


def nan_to_none(value: Any) -> Any:
    """A copy of nested JSON values with None for NaN and infinities, which JSON does not have."""
    if isinstance(value, Mapping):
        return {key: nan_to_none(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [nan_to_none(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
