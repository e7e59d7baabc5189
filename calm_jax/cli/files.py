"""Atomic writes: a file or folder appears under its name only when it is complete."""

import math
import os
import pathlib
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from calm_jax.cli.ownership import LOCK, owned
from calm_jax.errors import UserError


def local_path(name: str, flag: str) -> pathlib.Path:
    """The path that a flag or config key names. Raises `UserError` for a URL, of which `pathlib` would make local folders.

    Remote storage has no locks, no appending and no renaming of folders, on which workdirs and prepared text depend.
    """
    if re.match(r"[A-Za-z][\w+.-]*://", name):
        raise UserError(
            f"{flag}={name} must be a path of a file system: only text is read from URLs; give a local folder, and copy it "
            "afterwards"
        )
    return pathlib.Path(name)


def sync(path: pathlib.Path) -> None:
    """Waits until the content of a file, or the names in a folder, are on the disk, where they survive a power cut."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def write_atomically(path: pathlib.Path, content: str | bytes, tag: str = "") -> None:
    """Writes a file under a temporary name and renames it, so that it is never seen half-written, even after a power cut.

    Args:
      path: the file to write.
      content: what it holds, text as UTF-8.
      tag: part of the temporary name; must differ between processes that may write the same file at once.

    Raises:
      UserError: if the file cannot be written.
    """
    unfinished = path.with_name(f"{path.name}{tag}.tmp")
    try:
        with open(unfinished, "wb") as file:
            file.write(content.encode("utf-8") if isinstance(content, str) else content)
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


def empty(folder: pathlib.Path, keep: Collection[str]) -> None:
    """Deletes everything in `folder` but the names in `keep`. Raises `UserError` if something cannot be deleted."""
    try:
        for entry in folder.iterdir():
            if entry.name in keep:
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
    except OSError as error:
        raise UserError(f"{folder} cannot be emptied: {error.strerror or error}") from error


@contextmanager
def atomic_folder(path: pathlib.Path, flag: str) -> Iterator[pathlib.Path]:
    """Gives a temporary folder to fill. It is renamed to `path` when the `with` block succeeds, and deleted when it fails.

    The temporary folder, `.NAME.unfinished` beside `path`, is owned while it is filled. What a killed command left in it
    is deleted.

    Args:
      path: the folder to make.
      flag: the flag that names it, for messages.

    Raises:
      UserError: if `path` exists and is not an empty folder, if another process is making it, or if it cannot be written.
    """
    refuse_existing(path)
    path = path.absolute()
    unfinished = path.with_name(f".{path.name}.unfinished")
    with owned(unfinished, f"{flag}={path}"):
        try:
            # Again, as its last owner may have made it just now.
            refuse_existing(path)
            empty(unfinished, keep={LOCK})
            yield unfinished
            for entry in (unfinished, *unfinished.rglob("*")):
                sync(entry)
            unfinished.rename(path)
            sync(path.parent)
        except BaseException as error:
            with suppress(UserError, OSError):
                empty(unfinished, keep={LOCK})
                # Also one that a killed command left, which is therefore not new.
                (unfinished / LOCK).unlink()
                unfinished.rmdir()
            if isinstance(error, OSError):
                raise UserError(f"{path} cannot be written: {error.strerror or error}") from error
            raise
        (path / LOCK).unlink(missing_ok=True)


def nan_to_none(value: Any) -> Any:
    """A copy of nested JSON values with None for NaN and infinities, which JSON does not have."""
    if isinstance(value, Mapping):
        return {key: nan_to_none(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [nan_to_none(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
