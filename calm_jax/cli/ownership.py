"""One owner for a folder: a command that writes to a folder locks it, and a second command is refused. Reading needs no lock.

The lock is the operating system's (`flock`), on the file `lock` in the folder. It therefore ends with its process, however
that ends, and nobody has to delete anything afterwards. On a network file system it holds between machines as far as that
passes locks on: NFS from version 4 on, Lustre and GPFS if they are mounted with locks. Where a file system has no locks at
all, the command says so and goes on without one.
"""

import contextlib
import errno
import os
import pathlib
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator

import filelock

from calm_jax.errors import UserError

# The locked file. Its content says who owns the folder; it is empty when nobody does, or the owner was killed before.
LOCK = "lock"
# The errors of a file system that has no locks.
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)


# A signature of `_sign` after `_is_ours` has replaced the process, the host and every digit.
_SIGNATURE = b"process 0 on host since 0000-00-00 00:00:00 UTC"
# More bytes than a signature has, and the most zeros in its place.
_MOST_BYTES = 500
_MOST_ZEROS = 200


def _sign(lock: int) -> None:
    now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    os.truncate(lock, 0)
    os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()} since {now}".encode(), 0)


def _is_ours(content: bytes) -> bool:
    """Whether this is all of a file `lock` that `_sign` wrote: a signature, or a beginning and zeros, as after a power cut."""
    written = content.rstrip(b"\0")
    if len(content) >= _MOST_BYTES or len(content) - len(written) > _MOST_ZEROS:
        return False
    written = re.sub(rb"^process \d+", b"process 0", written)
    # A host that is cut off is replaced, too.
    written = re.sub(rb"^process 0 on [^\s\0]+", b"process 0 on host", written)
    return _SIGNATURE.startswith(re.sub(rb"\d", b"0", written))


def _refuse_foreign(content: bytes, folder: pathlib.Path, flag: str) -> None:
    if not _is_ours(content):
        raise UserError(
            f"{flag} cannot be written: {folder / LOCK} is no lock of calm_jax but another file, which would be lost: give "
            "another folder, or move the file away"
        )


def _content(folder: pathlib.Path) -> bytes:
    """The first bytes of the file `lock`. Raises `OSError` if it is missing or no file."""
    # A pipe that nobody writes to would block an ordinary open.
    with open(
        folder / LOCK, "rb", opener=lambda name, mode: os.open(name, mode | os.O_NONBLOCK)
    ) as file:
        return file.read(_MOST_BYTES)


def _owner(folder: pathlib.Path) -> str:
    try:
        content = _content(folder).strip(b"\0")
    except OSError:
        return ""
    return content.decode(errors="replace") if _is_ours(content) else ""


def is_foreign(folder: pathlib.Path) -> bool:
    """Whether a folder holds files and no lock that `owned` made, so that no command, not even a killed one, left the files.

    A folder with nothing but a file `lock` is left to `owned`. Raises `OSError` if something cannot be read.
    """

    def has_files() -> bool:
        try:
            return bool(set(os.listdir(folder)) - {LOCK})
        except FileNotFoundError:
            return False

    def has_our_lock() -> bool:
        try:
            return _is_ours(_content(folder))
        except (FileNotFoundError, IsADirectoryError):
            return False

    # Asked twice: a command makes the lock before its files and deletes it after them, perhaps at this moment.
    return has_files() and not has_our_lock() and has_files()


def _is_file(path: pathlib.Path, file: os.stat_result) -> bool:
    """Whether `path` is still the file that `file` describes."""
    try:
        return os.path.samestat(os.stat(path), file)
    except (FileNotFoundError, NotADirectoryError):
        return False


@contextlib.contextmanager
def owned(folder: pathlib.Path, flag: str) -> Iterator[Callable[[], None]]:
    """Makes `folder` if it is missing, and owns it inside the `with` block: holds the lock on the file `lock` in it.

    If the folder was made here and has nothing but the file `lock` at the end, it is removed again, with the parents that
    were made for it.

    Args:
      folder: the folder to write to.
      flag: the flag that names it, with its value, for messages.

    Yields:
      A function that raises `UserError` if the folder of this name is no longer the owned one, because it was deleted, moved
      or replaced.

    Raises:
      UserError: if another process owns the folder, if it cannot be written, or if its file `lock` is somebody else's.
    """

    def sign(lock: int) -> None:
        # Checked under the lock: its owner may be writing the content.
        _refuse_foreign(os.pread(lock, _MOST_BYTES, 0), folder, flag)
        _sign(lock)

    missing = [path for path in (folder, *folder.absolute().parents) if not path.exists()]
    lock = filelock.FileLock(
        folder / LOCK, timeout=0, fallback_to_soft=False, preserve_lock_file=True, on_acquired=sign
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except filelock.Timeout as error:
        owner = _owner(folder) or "another process"
        raise UserError(
            f"{flag} is in use: {owner} writes to it; wait for its end, stop it, or give another folder"
        ) from error
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise UserError(f"{flag} cannot be written: {error.strerror or error}") from error
        # The hook that checks it was not called, and the content is deleted at the end.
        _refuse_foreign(_content(folder), folder, flag)
        print(
            f"note: {flag} is on a file system without locks: let no other command write to it",
            file=sys.stderr,
        )
    locked = None
    try:
        try:
            locked = os.stat(folder / LOCK)
        except OSError as error:  # another command has deleted the folder since
            raise UserError(f"{flag} cannot be written: {error.strerror or error}") from error

        def check() -> None:
            # Any other error may pass, and if it does not, the write that follows shows it.
            with contextlib.suppress(OSError):
                if _is_file(folder / LOCK, locked):
                    return
                raise UserError(
                    f"{flag} was deleted, moved or replaced while this command wrote to it: nothing more is written there; "
                    "bring the folder back, or start again"
                )

        yield check
    finally:
        with contextlib.suppress(OSError):
            # If the folder was renamed meanwhile, another process may have made a new one of this name: leave that alone.
            if locked and _is_file(folder / LOCK, locked):
                os.truncate(folder / LOCK, 0)
                if missing and os.listdir(folder) == [LOCK]:
                    (folder / LOCK).unlink()
        for path in missing:
            # Fails, as intended, for a folder that is not empty, such as after a success.
            with contextlib.suppress(OSError):
                path.rmdir()
        lock.release()
