"""Several processes as one: what they agree on, what one of them writes, and how they end together.

Every process runs the same command. All compute; process 0 alone speaks, and writes files.
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

from calm_jax.errors import UserError

# How long processes wait for one that is still reading text, or writing.
_WAIT_SECONDS = 3600
# How long a network file system may take to show what another machine wrote.
SHARED_SECONDS = 30

# The file by which processes see that they share a folder.
MARK = "process_0"

# What errors say that come of another process's end.
_LOST = ("Gloo", "CoordinationService", "heartbeat timeout")

_barriers = itertools.count()
_Result = TypeVar("_Result")


class AgreedError(UserError):
    """An error that all processes raise at the same place: one says it, and they end in peace."""


def is_runtime_on() -> bool:
    """Whether JAX's runtime for several processes was started, if only for one."""
    return jax.distributed.is_initialized()


def are_many() -> bool:
    """Whether this is one process of several."""
    return is_runtime_on() and jax.process_count() > 1


def is_first() -> bool:
    """Whether this is the process that speaks and writes; so is one by itself."""
    return not is_runtime_on() or jax.process_index() == 0


def wait_for_all() -> None:
    """Returns when all processes are here. Not a collective, which on a CPU would give up after 30 s."""
    if are_many():
        everyone = set(range(jax.process_count()))
        name = f"calm_jax/{next(_barriers)}"
        ocp.multihost.sync_global_processes(name, timeout=_WAIT_SECONDS, processes=everyone)


def agree(value: Any) -> Any:
    """Process 0's value, which is made of what JSON has, on all."""
    return _exchange(value)[0] if are_many() else value


def _exchange(value: Any) -> list[Any]:
    """Every process's value."""
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


def together(run: Callable[[], _Result]) -> _Result:
    """What `run` returns, when it has returned on all processes; a `UserError` of any of them is raised on all.

    `run` must not wait for the others.
    """
    if not are_many():
        return run()
    result, message = None, ""
    try:
        result = run()
    except UserError as error:
        message = str(error)
    for process, theirs in enumerate(_exchange(message)):
        if theirs:
            raise AgreedError(f"process {process}: {theirs}" if process else theirs)
    return result


def check_same(collect: Callable[[], Mapping[str, Any]]) -> None:
    """Raises `AgreedError` that names the first of the collected values, made of what JSON has, that is not the same on all
    processes. One process by itself collects nothing."""
    if not are_many():
        return
    here = json.loads(json.dumps(together(collect)))
    everyone = _exchange(here)
    for process, theirs in enumerate(everyone):
        for name in here | theirs:
            ours, other = everyone[0].get(name), theirs.get(name)
            if ours != other:
                raise AgreedError(
                    f"process {process} has {name}={other!r}, process 0 has {ours!r}: give all the same command, and the same files"
                )


def write(run: Callable[[], None]) -> None:
    """Runs what writes files, on process 0 alone; all go on when it is done, and end if it fails."""

    def write_if_first() -> None:
        if is_first():
            run()

    together(write_if_first)


def check_shared(folder: pathlib.Path) -> None:
    """Raises `AgreedError` unless `folder`, which is there, is the same one for all processes."""
    if not are_many():
        return
    text = agree(secrets.token_hex(16))
    path = folder / MARK

    def look() -> None:
        ends = time.monotonic() + SHARED_SECONDS
        while not (path.exists() and path.read_text(encoding="utf-8") == text):
            if time.monotonic() > ends:
                raise UserError(
                    f"{folder.resolve()} on {socket.gethostname()} is not the folder that process 0 writes to: give a "
                    "--workdir on a file system that all processes share"
                )
            time.sleep(0.1)

    if is_first():
        path.write_text(text, encoding="utf-8")
    wait_for_all()
    try:
        together(look)
    finally:
        if is_first():
            path.unlink(missing_ok=True)


def fetch(tree: Any) -> Any:
    """Arrays on the host, whole, also those that lie on the devices of several processes; all have to ask."""

    def whole(x: Any) -> np.ndarray:
        if isinstance(x, jax.Array) and not x.is_fully_addressable and not x.is_fully_replicated:
            return multihost_utils.process_allgather(x, tiled=True)
        return np.asarray(x)

    return jax.tree.map(whole, tree)


@contextlib.contextmanager
def ending_on_failure() -> Iterator[None]:
    """What fails inside on one process of several ends it at once, with its message: the others do not come to where it would wait."""
    try:
        yield
    except AgreedError:
        raise
    except Exception as error:
        if not are_many():
            raise
        name = f"process {jax.process_index()}"
        status = 1
        if isinstance(error, UserError):
            print(f"error: {name}: {error}", file=sys.stderr)
            status = 2
        elif any(word in str(error) for word in _LOST):
            reason = " ".join(str(error).split())[:200]
            print(f"error: {name}: lost another process, see there ({reason})", file=sys.stderr)
        else:
            print(f"error: {name}:", file=sys.stderr)
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
