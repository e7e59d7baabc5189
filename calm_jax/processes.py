"""Several processes as one: JAX's runtime over them, what they agree on, and how they end together.

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
from absl import flags
from jax.experimental import multihost_utils

from calm_jax.errors import UserError

# After so many seconds without a sign of life of one process the others end.
HEARTBEAT_SECONDS = 60
# How long processes wait for one that is still reading text, or writing.
_WAIT_SECONDS = 3600
# How long a network file system may take to show what another machine wrote.
SHARED_SECONDS = 30

# The file by which processes see that they share a folder.
MARK = "process_0"

_barriers = itertools.count()
_Result = TypeVar("_Result")


class AgreedError(UserError):
    """An error that all processes raise at the same place: one says it, and they end in peace."""


def define_flags() -> Callable[[], None]:
    """Defines the flags that say which processes there are; gives what starts JAX's runtime over them."""
    distributed = flags.DEFINE_enum(
        "distributed",
        "auto",
        ["auto", "on", "off"],
        "several processes as one: auto asks the environment (Slurm, Open MPI, GKE), on lets JAX find them (TPU VMs)",
    )
    coordinator = flags.DEFINE_string(
        "coordinator", "", "HOST:PORT of process 0, where nothing else says it"
    )
    num_processes = flags.DEFINE_integer("num_processes", 0, "with --coordinator: how many")
    process_id = flags.DEFINE_integer("process_id", -1, "with --coordinator: which one this is")
    seconds = flags.DEFINE_integer("connect_seconds", 300, "how long processes wait for each other")

    def start() -> None:
        if seconds.value < 1:
            raise UserError(f"--connect_seconds={seconds.value} must be at least 1")
        if coordinator.value:
            if distributed.value == "off":
                raise UserError(f"--coordinator={coordinator.value} and --distributed=off: which?")
            known = _of_open_mpi(os.environ)
            number = num_processes.value or known.get("num_processes", 0)
            index = known.get("process_id", -1) if process_id.value < 0 else process_id.value
            check_given(coordinator.value, number, index)
            wait_for_coordinator(coordinator.value, index, seconds.value)
            local = known.get("local_id")
            _initialize(seconds.value, coordinator.value, number, index, local)
            return
        for flag, unset in ((num_processes, 0), (process_id, -1)):
            if flag.value != unset:
                raise UserError(f"--{flag.name}={flag.value} needs --coordinator=HOST:PORT")
        if distributed.value == "on" or (
            distributed.value == "auto" and cluster_of(os.environ) is not None
        ):
            _initialize(seconds.value)

    return start


def cluster_of(environment: Mapping[str, str]) -> str | None:
    """What started several processes, by the environment of one; None for a process by itself.

    Raises `UserError` where it does not say how they find each other.
    """

    def several(name: str) -> bool:
        return int(environment.get(name, "1")) > 1

    if several("SLURM_STEP_NUM_TASKS"):
        return "Slurm"
    if several("OMPI_COMM_WORLD_SIZE"):
        # From Open MPI 5 on there is no address in it.
        if "OMPI_MCA_orte_hnp_uri" not in environment:
            raise UserError(
                f"Open MPI started {environment['OMPI_COMM_WORLD_SIZE']} processes and does not say where they meet: give "
                "--coordinator=HOST:PORT, with the host of rank 0 and a free port"
            )
        return "Open MPI"
    addresses = environment.get(
        "TPU_PROCESS_ADDRESSES", environment.get("TPU_WORKER_HOSTNAMES", "")
    )
    if "," in addresses or several("MEGASCALE_NUM_SLICES"):
        return "GKE"
    return None


def _of_open_mpi(environment: Mapping[str, str]) -> dict[str, int]:
    names = {
        "num_processes": "OMPI_COMM_WORLD_SIZE",
        "process_id": "OMPI_COMM_WORLD_RANK",
        "local_id": "OMPI_COMM_WORLD_LOCAL_RANK",
    }
    return {name: int(environment[key]) for name, key in names.items() if key in environment}


def check_given(coordinator: str, num_processes: int, process_id: int) -> None:
    _, _, port = coordinator.rpartition(":")
    if not port.isdecimal() or coordinator.startswith(":"):
        raise UserError(f"--coordinator={coordinator!r} must be HOST:PORT")
    if num_processes < 1:
        raise UserError(f"--num_processes={num_processes} must be at least 1")
    if not 0 <= process_id < num_processes:
        raise UserError(
            f"--process_id={process_id} must be in [0, {num_processes}), --num_processes of them"
        )


def wait_for_coordinator(coordinator: str, process_id: int, seconds: int) -> None:
    """Raises `UserError` if process 0 does not answer in time: JAX's own end for that is a crash."""
    if process_id == 0:
        return
    host, _, port = coordinator.rpartition(":")
    ends = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=min(5, seconds)).close()
            return
        except OSError as error:
            if time.monotonic() > ends:
                raise UserError(
                    f"process {process_id}: the coordinator {coordinator} cannot be reached in {seconds} s "
                    f"({error.strerror or error}): is process 0 running there?"
                ) from error
            time.sleep(0.2)


def _initialize(
    seconds: int,
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    local_device: int | None = None,
) -> None:
    where = f"of {num_processes} at {coordinator}" if coordinator else "as the environment says"
    who = "" if process_id is None else f" {process_id}"
    # If not all come, JAX ends the process with a page of its own; this line is what it is about.
    print(f"process{who} {where}: waiting at most {seconds} s for all", file=sys.stderr, flush=True)
    try:
        jax.distributed.initialize(
            coordinator,
            num_processes,
            process_id,
            local_device,
            initialization_timeout=seconds,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        )
        jax.devices()
    except (ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"process{who} {where}: JAX cannot start over several processes ({reason}); give --coordinator=HOST:PORT, "
            "--num_processes and --process_id, or --distributed=off for one"
        ) from error
    if not is_first():
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


def are_many() -> bool:
    """Whether this is one process of several."""
    return jax.distributed.is_initialized() and jax.process_count() > 1


def is_first() -> bool:
    """Whether this is the process that speaks and writes; so is one by itself."""
    return not jax.distributed.is_initialized() or jax.process_index() == 0


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
        elif isinstance(error, jax.errors.JaxRuntimeError) or "Gloo" in str(error):
            reason = " ".join(str(error).split())[:200]
            print(
                f"error: {name}: another process has ended, see there ({reason})", file=sys.stderr
            )
        else:
            print(f"error: {name}:", file=sys.stderr)
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
