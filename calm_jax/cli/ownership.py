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


def _sign(lock: int) -> None:
    now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    os.truncate(lock, 0)
    os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()} since {now}".encode(), 0)


def _owner(folder: pathlib.Path) -> str:
    try:
        with open(folder / LOCK, encoding="utf-8", errors="replace") as file:
            return file.read(200)
    except OSError:
        return ""


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
      UserError: if another process owns the folder, or if it cannot be written.
    """
    missing = [path for path in (folder, *folder.absolute().parents) if not path.exists()]
    lock = filelock.FileLock(
        folder / LOCK, timeout=0, fallback_to_soft=False, preserve_lock_file=True, on_acquired=_sign
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
        print(
            f"note: {flag} is on a file system without locks: let no other command write to it",
            file=sys.stderr,
        )
    try:
        locked = os.stat(folder / LOCK)

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
            if _is_file(folder / LOCK, locked):
                os.truncate(folder / LOCK, 0)
                if missing and os.listdir(folder) == [LOCK]:
                    (folder / LOCK).unlink()
        for path in missing:
            # Fails, as intended, for a folder that is not empty, such as after a success.
            with contextlib.suppress(OSError):
                path.rmdir()
        lock.release()
