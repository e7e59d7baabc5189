"""Bounded reads of regular files, and atomic writes: a file or folder appears under its name only when it is complete.

Writes do not follow symbolic links: a folder that comes from somebody else may hold links to files outside of it.
"""

import errno
import hashlib
import io
import json
import math
import os
import pathlib
import re
import shutil
import stat
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from calm_jax.cli.ownership import LOCK, is_foreign, owned
from calm_jax.cli.signals import ignore_the_next
from calm_jax.errors import UserError

# Bytes of the largest JSON file that is read: far more than any has, and far less than would fill the memory.
_MOST_JSON_BYTES = 2**26
# Bytes of the largest other file that is read whole.
_MOST_BYTES = 2**30
# Bytes read at once.
_PIECE = 2**20
# How long an ended command waits for what the threads of a library still write.
_SECONDS_OF_LATE_WRITES = 0.2
# How often it tries to delete what they write to.
_MOST_ATTEMPTS = 10


def local_path(name: str, flag: str) -> pathlib.Path:
    """The path that a flag or config key names. Raises `UserError` for a URL (`refuse_url`)."""
    refuse_url(name, f"{flag}={name}")
    return pathlib.Path(name)


def refuse_url(name: str, given: str) -> None:
    """Raises `UserError` if a name is a URL, of which `pathlib` would make local folders. `given`: flag or key with its value.

    Remote storage has no locks, no appending and no renaming of folders, on which workdirs and prepared text depend.
    """
    # Only a scheme at the very beginning counts: recipe.py:gs://bucket/x is a recipe with a URL as its argument.
    if re.match(r"[^/:]*://", name):
        raise UserError(
            f"{given} must be a path of a file system: only text is read from URLs; give a local path, and copy there or from "
            "there"
        )


def is_unicode(text: str) -> bool:
    """Whether a text can be written as UTF-8: a name of a file and a string in JSON may hold lone surrogates, which cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


@contextmanager
def os_errors(what: object, done: str) -> Iterator[None]:
    """Turns an `OSError` inside the `with` block into a `UserError`: `what` cannot be `done`, such as "written"."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{what} cannot be {done}: {error.strerror or error}") from error


@contextmanager
def open_regular(path: pathlib.Path) -> Iterator[io.BufferedReader]:
    """Opens a regular file for reading. Raises `OSError` for anything else: a pipe or a device might never end."""
    # A pipe that nobody writes to would block an ordinary open.
    with open(path, "rb", opener=lambda name, mode: os.open(name, mode | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        yield file


def read_file(path: pathlib.Path, most: int = _MOST_BYTES) -> bytes:
    """The content of a regular file of at most `most` bytes. Raises `OSError` for anything else."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            reason = f"it has {size} bytes, and at most {most} are read"
            raise OSError(errno.EFBIG, reason, str(path))
        return file.read(size)


def read_text(name: str, flag: str, most: int = _MOST_BYTES) -> str:
    """The UTF-8 text of the file, or pipe, that a flag names; a byte order mark at its beginning is left out.

    Raises `UserError` if it cannot be read, is not valid UTF-8 or has more than `most` bytes.
    """
    data = bytearray()
    try:
        with open(name, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            while size <= most and (part := file.read(_PIECE)):
                data += part
                size = max(size, len(data))
        if size > most:
            raise UserError(f"{flag}={name!r} has more than {most >> 20} MiB")
        return data.decode("utf-8-sig")
    except (OSError, ValueError) as error:
        if isinstance(error, UnicodeDecodeError):
            raise UserError(f"{flag}={name!r}: byte {error.start} is not valid UTF-8") from error
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{flag}={name!r} cannot be read: {reason}") from error


def read_json(path: pathlib.Path) -> Any:
    """The JSON value in a regular file. Raises `OSError` if it cannot be read, `ValueError` if it is malformed."""
    try:
        return json.loads(read_file(path, _MOST_JSON_BYTES).decode("utf-8"))
    except UnicodeDecodeError as error:
        # The text of `error` would contain the whole content of the file.
        raise ValueError(f"byte {error.start} is not valid UTF-8") from error
    except RecursionError as error:
        raise ValueError("too many levels of lists and objects") from error


def _checksum(name: str, content: object) -> str:
    return hashlib.sha256(json.dumps([name, content]).encode()).hexdigest()


def checked_json(name: str, content: object) -> str:
    """The text of a JSON file of this name that holds a value and a checksum of both, for `read_checked_json`."""
    return json.dumps({"sha256": _checksum(name, content), "content": content}, indent=1) + "\n"


def read_checked_json(path: pathlib.Path) -> Any:
    """The value in a file with the text of `checked_json`.

    Raises `OSError` if it cannot be read, `ValueError` if it is damaged or was written under another name.
    """
    stored = read_json(path)
    if not isinstance(stored, dict) or set(stored) != {"sha256", "content"}:
        raise ValueError("it has no checksum")
    if stored["sha256"] != _checksum(path.name, stored["content"]):
        raise ValueError("its checksum is wrong")
    return stored["content"]


def sync(path: pathlib.Path) -> None:
    """Waits until the content of a file, or the names in a folder, are on the disk, where they survive a power cut."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def sync_tree(folder: pathlib.Path) -> None:
    """`sync` of a folder and everything in it."""
    for path in (folder, *folder.rglob("*")):
        sync(path)


def write_atomically(path: pathlib.Path, content: str | bytes | memoryview, tag: str = "") -> None:
    """Writes a file under a temporary name and renames it, so that it is never seen half-written, even after a power cut.

    Args:
      path: the file to write.
      content: what it holds, text as UTF-8.
      tag: part of the temporary name; must differ between processes that may write the same file at once.

    Raises:
      UserError: if the file cannot be written.
    """
    unfinished = path.with_name(f"{path.name}{tag}.tmp")
    with os_errors(path, "written"):
        # The temporary name may be taken by the file of a killed command, by a link or by a pipe.
        unfinished.unlink(missing_ok=True)
        try:
            with open(unfinished, "xb") as file:
                file.write(content.encode("utf-8") if isinstance(content, str) else content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, path)
        except OSError:
            with suppress(OSError):
                unfinished.unlink()
            raise


def append_line(path: pathlib.Path, line: str) -> None:
    """Appends a line to a regular file. A line before it that was cut off, as by a full disk, is ended first.

    Raises `OSError` if it cannot be written, also for a symbolic link or a pipe.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
    with open(path, "a+b", opener=lambda name, _: os.open(name, flags, 0o666)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            line = line if file.read(1) == b"\n" else f"\n{line}"
        file.write(f"{line}\n".encode())


def refuse_existing(path: pathlib.Path) -> None:
    """Raises `UserError` unless `path`, where a folder is to be made, does not exist or is an empty folder."""
    with os_errors(path, "read"):
        is_taken = path.exists() and (not path.is_dir() or any(path.iterdir()))
        if is_taken or path.is_symlink():
            raise UserError(f"{path} already exists: give another folder, or delete it")


def empty(folder: pathlib.Path, keep: Collection[str]) -> None:
    """Deletes everything in `folder` but the names in `keep`. Raises `UserError` if something cannot be deleted."""
    with os_errors(folder, "emptied"):
        for entry in folder.iterdir():
            if entry.name in keep:
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()


def _delete_owned(folder: pathlib.Path) -> None:
    """Deletes what is in an owned folder, and the folder. Where a thread still writes to it, it stays, with the same file `lock`.

    Raises `UserError` or `OSError` if it stays.
    """
    empty(folder, keep={LOCK})
    # `owned` removes only folders that it made; this one may have been left by a killed command.
    lock, aside = folder / LOCK, folder.with_name(f"{folder.name}.{LOCK}")
    lock.rename(aside)
    try:
        folder.rmdir()
    except OSError:
        aside.rename(lock)
        raise
    aside.unlink()


def _delete_after_late_writes(folder: pathlib.Path, check: Callable[[], None]) -> None:
    """`_delete_owned` after an error, as on a full disk: threads of Orbax still write for a moment.

    If they make the folder again, it gets a file `lock`, by which the next command knows it as its own.

    Args:
      folder: the owned folder.
      check: raises `UserError` if the folder is no longer the owned one.

    Raises:
      UserError or OSError: if something cannot be deleted.
    """
    for attempt in range(1, _MOST_ATTEMPTS + 1):
        check()
        try:
            _delete_owned(folder)
            break
        except (UserError, OSError):
            if attempt == _MOST_ATTEMPTS:
                raise
            time.sleep(_SECONDS_OF_LATE_WRITES)
    time.sleep(_SECONDS_OF_LATE_WRITES)
    if folder.exists():
        (folder / LOCK).touch()


@contextmanager
def unfinished_folder(path: pathlib.Path, flag: str) -> Iterator[pathlib.Path]:
    """Owns `.NAME.unfinished` beside `path` inside the `with` block: an empty folder for what becomes `path`, or for its lock.

    What a killed command left in it is deleted. At the end it is deleted, unless it was renamed.

    Args:
      path: the file or folder that is made, absolute.
      flag: the flag that names it, for messages.

    Raises:
      UserError: if another process owns it, if it cannot be written, or if it holds files and no lock of a command.
    """
    unfinished = path.with_name(f".{path.name}.unfinished")
    if unfinished.is_symlink():
        raise UserError(f"{unfinished}, where {flag}={path} is made, is a symbolic link: delete it")
    with os_errors(unfinished, "read"):
        if is_foreign(unfinished):
            raise UserError(
                f"{unfinished}, where {flag}={path} is made, holds files that no command left there: move it away"
            )
    with owned(unfinished, f"{flag}={path}") as check:
        try:
            empty(unfinished, keep={LOCK})
            yield unfinished
        except BaseException:
            with suppress(UserError, OSError):
                _delete_after_late_writes(unfinished, check)
            raise
        # It is still there if it was not renamed. If it was, another process may have made a new one, which is left alone.
        with suppress(UserError, OSError):
            check()
            _delete_owned(unfinished)


@contextmanager
def atomic_folder(path: pathlib.Path, flag: str) -> Iterator[pathlib.Path]:
    """Gives a temporary folder to fill. It is renamed to `path` when the `with` block succeeds, and deleted when it fails.

    Args:
      path: the folder to make.
      flag: the flag that names it, for messages.

    Raises:
      UserError: if `path` exists and is not an empty folder, if another process is making it, or if it cannot be written.
    """
    refuse_existing(path)
    path = path.absolute()
    with unfinished_folder(path, flag) as unfinished:
        # Checked again, because another process may have made `path` before this one got the lock.
        refuse_existing(path)
        with os_errors(path, "written"):
            yield unfinished
            sync_tree(unfinished)
            ignore_the_next()
            unfinished.rename(path)
            sync(path.parent)
        (path / LOCK).unlink(missing_ok=True)


def nan_to_none(value: Any) -> Any:
    """A copy of nested JSON values with None for NaN and infinities, which JSON does not have."""
    if isinstance(value, Mapping):
        return {key: nan_to_none(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [nan_to_none(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
