"""Several processes that run one command: exchange of values, writing by process 0, and a common end.

Every process runs the same command and takes part in every computation. Only process 0 prints and writes files. In a process
that runs alone all functions work too, and exchange nothing.
"""

import contextlib
import itertools
import json
import os
import pathlib
import secrets
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from calm_jax.cli.files import write_atomically
from calm_jax.errors import UserError, reason_of

# How long a process waits for others that still read text or write files.
_WAIT_SECONDS = 3600
# How long a network file system may take to show a file that another machine wrote.
SHARED_SECONDS = 30

# The temporary file with which `check_shared` tests that all processes see the same folder.
PROBE_FILE = "process_0"

# Words in JAX's errors that mean that another process has ended.
_LOST = ("Gloo", "CoordinationService", "heartbeat timeout")

_barriers = itertools.count()
_Result = TypeVar("_Result")


class AgreedError(UserError):
    """An error that all processes raise at the same place, so that none waits for another; process 0 prints it."""


def is_multiprocess() -> bool:
    """Whether the command runs in more than one process."""
    return jax.distributed.is_initialized() and jax.process_count() > 1


def is_primary() -> bool:
    """Whether this is process 0, which prints and writes; true for a process that runs alone."""
    return not jax.distributed.is_initialized() or jax.process_index() == 0


def wait_for_all() -> None:
    """Returns when all processes have called it. It is not a collective, which on a CPU would give up after 30 s."""
    if is_multiprocess():
        everyone = set(range(jax.process_count()))
        name = f"calm_jax/{next(_barriers)}"
        ocp.multihost.sync_global_processes(name, timeout=_WAIT_SECONDS, processes=everyone)


def broadcast(value: Any) -> Any:
    """Process 0's `value`, on all processes; it must consist of JSON's types."""
    return all_gather(value)[0]


def all_gather(value: Any) -> list[Any]:
    """The values of all processes, in the order of their indices; they must consist of JSON's types."""
    if not is_multiprocess():
        return [value]
    wait_for_all()
    data = np.frombuffer(json.dumps(value).encode("utf-8"), np.uint8)
    sizes = multihost_utils.process_allgather(np.array([len(data)], np.int32)).ravel()
    padded = np.zeros(sizes.max(), np.uint8)
    padded[: len(data)] = data
    rows = multihost_utils.process_allgather(padded)
    return [
        json.loads(row[:size].tobytes())
        for row, size in zip(rows.astype(np.uint8), sizes, strict=True)
    ]


def run_on_all(run: Callable[[], _Result]) -> _Result:
    """Calls `run` on every process and returns its result once all calls have returned.

    Args:
      run: must not wait for other processes.

    Raises:
      AgreedError: on all processes, if `run` raised a `UserError` on any of them. (A process that runs alone raises the
        `UserError` itself.)
    """
    if not is_multiprocess():
        return run()
    message = ""
    try:
        result = run()
    except UserError as error:
        message = str(error)
    for process, theirs in enumerate(all_gather(message)):
        if theirs:
            raise AgreedError(f"process {process}: {theirs}" if process else theirs)
    return result


def check_same(collect: Callable[[], Mapping[str, Any]]) -> None:
    """Checks that `collect` returns equal values on all processes; a process that runs alone does not call it.

    Args:
      collect: returns named values of JSON's types; may raise `UserError`.

    Raises:
      AgreedError: on all processes, with the first value that differs.
    """
    if not is_multiprocess():
        return
    here = json.loads(json.dumps(run_on_all(collect)))
    everyone = all_gather(here)
    for process, theirs in enumerate(everyone):
        for name in here | theirs:
            ours, other = everyone[0].get(name), theirs.get(name)
            if ours != other:
                raise AgreedError(
                    f"process {process} has {name}={other!r}, process 0 has {ours!r}: start all processes with the same command and the same files"
                )


def write_once(write: Callable[[], object]) -> None:
    """Calls `write`, which writes files, on process 0 alone. All processes return, or raise its error, when it is done."""

    def write_on_primary() -> None:
        if is_primary():
            write()

    run_on_all(write_on_primary)


@contextlib.contextmanager
def entered_once(
    context: contextlib.AbstractContextManager[_Result],
) -> Iterator[_Result | None]:
    """Enters `context` on process 0 alone, for all processes. All go on, or raise its error, when it is entered.

    Yields what `context` yields on process 0, and None on the others.
    """
    entered: list[_Result] = []
    with contextlib.ExitStack() as stack:
        write_once(lambda: entered.append(stack.enter_context(context)))
        yield entered[0] if entered else None


def check_shared(folder: pathlib.Path) -> None:
    """Checks that all processes see the same `folder`, which must exist.

    Process 0 writes a random text into it, and the others wait until they read that text.

    Raises:
      AgreedError: if a process does not read it within `SHARED_SECONDS`.
    """
    if not is_multiprocess():
        return
    text = broadcast(secrets.token_hex(16))
    path = folder / PROBE_FILE

    def wait_for_text() -> None:
        ends = time.monotonic() + SHARED_SECONDS
        while not (path.exists() and path.read_text(encoding="utf-8") == text):
            if time.monotonic() > ends:
                raise UserError(
                    f"{folder.resolve()} on {socket.gethostname()} is not the folder that process 0 writes to: give a "
                    "--workdir on a file system that all processes share"
                )
            time.sleep(0.1)

    write_once(lambda: write_atomically(path, text))
    try:
        run_on_all(wait_for_text)
    finally:
        if is_primary():
            path.unlink(missing_ok=True)


def fetch_global(tree: Any) -> Any:
    """The whole arrays of a tree as NumPy arrays, gathered from the devices of all processes, which must all call it."""

    def whole(x: Any) -> np.ndarray:
        if isinstance(x, jax.Array) and not x.is_fully_addressable and not x.is_fully_replicated:
            return multihost_utils.process_allgather(x, tiled=True)
        return np.asarray(x)

    return jax.tree.map(whole, tree)


@contextlib.contextmanager
def exit_on_failure() -> Iterator[None]:
    """Ends a process that fails inside at once, so that the others do not hang in a collective.

    The process prints its error and exits with status 2 for a `UserError`, else with 1. An `AgreedError`, which all
    processes raise, passes through, and so does every error of a process that runs alone.
    """
    try:
        yield
    except AgreedError:
        raise
    except Exception as error:
        if not is_multiprocess():
            raise
        name = f"process {jax.process_index()}"
        status = 1
        if isinstance(error, UserError):
            print(f"error: {name}: {error}", file=sys.stderr)
            status = 2
        elif any(word in str(error) for word in _LOST):
            print(
                f"error: {name}: another process has ended; its own output says why ({reason_of(error)})",
                file=sys.stderr,
            )
        else:
            print(f"error: {name}:", file=sys.stderr)
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
