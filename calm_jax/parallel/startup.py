"""The start of a run of several processes: detects such a run, and starts JAX's distributed runtime.

JAX is imported inside functions, so that --help and bad flags need not wait for it.
"""

import functools
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping

from absl import flags

from calm_jax.cli.command import command, end_soon
from calm_jax.errors import Interrupted, UserError, reason_of

# When a process has been silent for so many seconds, the others end.
HEARTBEAT_SECONDS = 60


def define_flags() -> Callable[[], None]:
    """Defines the flags about processes.

    Returns:
      A function to call after flags are parsed, which starts JAX's distributed runtime if the flags or the environment ask
      for it. It raises `UserError` for flags that contradict each other, and when the processes cannot connect.
    """
    distributed = flags.DEFINE_enum(
        "distributed",
        "auto",
        ["auto", "on", "off"],
        "run as one of several processes: 'auto' if the environment (Slurm, Open MPI, GKE) says so, 'on' lets JAX detect them (TPU VMs), 'off' never",
    )
    coordinator = flags.DEFINE_string(
        "coordinator",
        "",
        "HOST:PORT of process 0, needed if the environment does not give this address",
    )
    num_processes = flags.DEFINE_integer(
        "num_processes", 0, "with --coordinator: number of processes"
    )
    process_id = flags.DEFINE_integer("process_id", -1, "with --coordinator: index of this process")
    seconds = flags.DEFINE_integer(
        "connect_seconds", 300, "how long processes wait for each other at the start"
    )

    def start() -> None:
        if seconds.value < 1:
            raise UserError(f"--connect_seconds={seconds.value} must be at least 1")
        if coordinator.value:
            if distributed.value == "off":
                raise UserError(
                    f"--coordinator={coordinator.value} and --distributed=off contradict each other"
                )
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
    """The launcher that started this process as one of several, by its environment variables; None for a single process.

    Returns:
      "Slurm", "Open MPI", "GKE" or None.

    Raises:
      UserError: if the environment does not say how the processes find each other.
    """

    def several(name: str) -> bool:
        return _number(environment, name, 1) > 1

    if several("SLURM_STEP_NUM_TASKS"):
        return "Slurm"
    if several("OMPI_COMM_WORLD_SIZE"):
        # From version 5 on, Open MPI's variables have no address.
        if "OMPI_MCA_orte_hnp_uri" not in environment:
            raise UserError(
                f"Open MPI started {environment['OMPI_COMM_WORLD_SIZE']} processes, but their environment lacks the coordinator's address: give "
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
    """Open MPI's variables as arguments of `jax.distributed.initialize`."""
    names = {
        "num_processes": "OMPI_COMM_WORLD_SIZE",
        "process_id": "OMPI_COMM_WORLD_RANK",
        "local_id": "OMPI_COMM_WORLD_LOCAL_RANK",
    }
    return {name: _number(environment, key, 0) for name, key in names.items() if key in environment}


def _number(environment: Mapping[str, str], name: str, otherwise: int) -> int:
    text = environment.get(name, str(otherwise))
    if not text.isdecimal():
        raise UserError(
            f"{name}={text!r} in the environment is not a number; --distributed=off ignores it"
        )
    return int(text)


def check_given(coordinator: str, num_processes: int, process_id: int) -> None:
    """Raises `UserError` for values of --coordinator, --num_processes and --process_id that make no sense."""
    _, _, port = coordinator.rpartition(":")
    if not (port.isdecimal() and 0 < int(port) < 2**16) or coordinator.startswith(":"):
        raise UserError(f"--coordinator={coordinator!r} must be HOST:PORT")
    if num_processes < 1:
        raise UserError(f"--num_processes={num_processes} must be at least 1")
    if not 0 <= process_id < num_processes:
        raise UserError(
            f"--process_id={process_id} must be in [0, {num_processes}), as --num_processes says"
        )


def wait_for_coordinator(coordinator: str, process_id: int, seconds: int) -> None:
    """Raises `UserError` if process 0 cannot be reached within `seconds`; without this check JAX itself would crash."""
    if process_id == 0:
        return
    host, _, port = coordinator.rpartition(":")
    host = host.strip("[]")  # of an IPv6 address
    ends = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=min(5, seconds)).close()
            return
        except UnicodeError as error:
            raise UserError(
                f"--coordinator={coordinator!r} must be HOST:PORT, and {host!r} is no name of a host"
            ) from error
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
    import jax

    from calm_jax.parallel import multihost

    where = f"of {num_processes} at {coordinator}" if coordinator else "as the environment says"
    who = "" if process_id is None else f" {process_id}"
    # If a process does not connect in time, JAX ends the others with a long message, which this line explains beforehand.
    print(
        f"process{who} {where}: waiting at most {seconds} s for all processes to connect",
        file=sys.stderr,
        flush=True,
    )
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
        raise UserError(
            f"process{who} {where}: JAX's distributed runtime cannot start ({reason_of(error)}); give --coordinator=HOST:PORT, "
            "--num_processes and --process_id, or --distributed=off for one"
        ) from error
    if jax.default_backend() == "cpu" and multihost.is_multiprocess():
        # On CPUs only process 0 loads programs from the compilation cache. A cached program does not keep the order of its
        # collectives, which would then be matched with other collectives of the processes that have compiled the program
        # themselves (jaxlib 0.10.1).
        jax.config.update("jax_enable_compilation_cache", False)
    if not multihost.is_primary():
        # Only process 0 prints.
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


def multihost_command(
    main: Callable[[list[str]], int | None],
) -> Callable[[list[str]], None]:
    """`calm_jax.cli.command.command` for a command that may run in several processes.

    Only process 0 prints an error or an interruption that all processes raise; a process that fails alone prints its error
    and ends at once (see `multihost.exit_on_failure`).
    """

    @functools.wraps(main)
    def run(argv: list[str]) -> int | None:
        from calm_jax.parallel import multihost
        from calm_jax.parallel.signals import EndTogetherOnSignal

        try:
            with EndTogetherOnSignal(), multihost.exit_on_failure():
                return main(argv)
        except (UserError, Interrupted) as end:
            if multihost.is_primary():
                raise
            if isinstance(end, Interrupted):
                end_soon()
            sys.exit(2)

    return command(run)
