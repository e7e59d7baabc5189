"""Dask workers, on this machine or of a running cluster, and their reports of progress."""

import contextlib
import logging
import os
import pathlib
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from multiprocessing import resource_tracker
from typing import Any

import rich.progress

from calm_jax.cli.progress import counted, duration
from calm_jax.errors import UserError, installation

_IN_WORKERS = "distributed.nanny.pre-spawn-environ"
_DASK = {
    # Dask logs every worker that comes or goes; its client, which has a level of its own, every lost connection, with traceback.
    "logging": {"distributed": "critical", "distributed.client": "critical"},
    # More than Dask's 3, for machines that may be preempted at any time.
    "distributed.scheduler.allowed-failures": 10,
    f"{_IN_WORKERS}.DASK_LOGGING__DISTRIBUTED": "critical",
    # Each core has a worker process, so a tokenizer's own threads would only compete for cores.
    f"{_IN_WORKERS}.TOKENIZERS_PARALLELISM": "false",
    f"{_IN_WORKERS}.RAYON_NUM_THREADS": "1",
    # By default Dask makes malloc return memory at once, which costs a page fault for every page of every document.
    f"{_IN_WORKERS}.MALLOC_TRIM_THRESHOLD_": str(2**26),
    f"{_IN_WORKERS}.MALLOC_MMAP_THRESHOLD_": str(2**25),
}
# Seconds between lines of progress where there is no terminal.
_LINE_EVERY = 10.0
# Seconds to wait for a scheduler.
_CLUSTER_TIMEOUT = 60
# Seconds to wait for its first worker, which may be in a queue.
_WORKERS_TIMEOUT = 3600
# Seconds without a finished task after which the workers are counted.
_LOOK_EVERY = 15
# How often a call to all workers is tried at the start, if a worker dies during it.
_ATTEMPTS = 5
_WORKERS_LOG = "stderr.log"
_GOES_ON = "finished work is kept; run the same command again to continue"


class Progress:
    """Shows progress: a live line on a terminal, otherwise a plain line every 10 seconds.

    Args:
        what: the name of the pass.
        total: documents to process; 0 if unknown.
    """

    def __init__(self, what: str, total: int):
        self._what, self._total = what, total
        self._counts = {"documents": 0, "characters": 0, "tokens": 0}
        self._began = self._shown = time.monotonic()
        self._bar = None
        if sys.stdout.isatty():
            self._bar = rich.progress.Progress(
                rich.progress.TextColumn("{task.description}"),
                rich.progress.BarColumn(),
                rich.progress.TextColumn("{task.fields[text]}"),
            )
            self._task = self._bar.add_task(what, total=total or None, text="")
            self._bar.start()

    def add(self, documents: int, characters: int, tokens: int) -> None:
        """Adds the numbers since the last call."""
        self._counts["documents"] += documents
        self._counts["characters"] += characters
        self._counts["tokens"] += tokens
        now = time.monotonic()
        if self._bar:
            self._bar.update(self._task, completed=self._counts["documents"], text=self._text(now))
        elif now - self._shown > _LINE_EVERY:
            self._shown = now
            print(f"{self._what}: {self._text(now)}", flush=True)

    def _counted(self, now: float) -> str:
        seconds = max(now - self._began, 1e-9)
        parts = [counted(self._counts["documents"], "document")]
        name = "tokens" if self._counts["tokens"] else "characters"
        if count := self._counts[name]:
            parts.append(f"{count / 1e6:,.1f}M {name}, {count / seconds / 1e6:.2f}M a second")
        return ", ".join(parts)

    def _text(self, now: float) -> str:
        done = self._counts["documents"]
        if not 0 < done < self._total:
            return self._counted(now)
        left = (now - self._began) / done * (self._total - done)
        return f"{self._counted(now)}, {duration(left)} left"

    def close(self) -> None:
        """Ends the live line, or prints a last plain line."""
        now = time.monotonic()
        if self._bar:
            self._bar.stop()
        else:
            print(f"{self._what}: {self._counted(now)}, {duration(now - self._began)}", flush=True)


def dask_setup(worker: Any) -> None:
    """Called by Dask as each process of this machine starts to work: what it writes to stderr goes to a file.

    A worker that loses the process that watches over it ends with a traceback, beside the command's own line. The file
    is in the folder of the workers' temporary files, and is removed with them.
    """
    log = pathlib.Path(worker.local_directory).parent / _WORKERS_LOG
    sys.stderr = log.open("a", buffering=1)


class Stopped(Exception):
    """Raised in a worker: the command that submitted this task has ended."""


class Reporter:
    """Called in a worker: sends counts to the client's `Progress`. Raises `Stopped` if the client's run has ended.

    Args:
        marker: a file that exists as long as the run.
    """

    def __init__(self, marker: pathlib.Path):
        self._marker = marker

    def __call__(self, documents: int, characters: int, tokens: int) -> None:
        import distributed

        if not self._marker.exists():
            raise Stopped(f"{self._marker} is gone")
        distributed.get_worker().log_event(self._marker.name, (documents, characters, tokens))


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """Threads and processes that are started meanwhile, and those that they start, do not get SIGINT.

    Ctrl-C reaches all processes of a terminal, and the command ends its workers itself. Its own SIGINT waits until the end.
    """
    # Otherwise the first new process would start the resource tracker, and starting it unblocks SIGINT.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Cluster(contextlib.ExitStack):
    """Dask workers, in a `with`: processes on this machine, or the workers of a running cluster.

    `__enter__` raises `UserError` if there are no workers, or one does not see the folder `work`.

    Args:
        work: the folder of intermediate files, which all workers must share.
        workers: the number of processes to start, without a scheduler.
        scheduler: the address of a running cluster, or empty.

    Attributes:
        report: to be called by tasks with the numbers of documents, characters and tokens since the last call.
        num_workers: the number of workers at present.
    """

    def __init__(self, work: pathlib.Path, workers: int, scheduler: str):
        super().__init__()
        self._work, self._workers, self._scheduler = work, workers, scheduler
        # The marker's name is unique to this run: other runs may share the cluster, at the same time or later.
        self._marker = work / f"run-{uuid.uuid4().hex}"
        self.report = Reporter(self._marker)

    def __enter__(self) -> "Cluster":
        try:
            import dask

            # Dask would otherwise make a folder in /tmp, beside the one that the workers get.
            dask.config.set(_DASK | {"temporary-directory": str(self._work / "dask")})
            import distributed
        except ImportError as error:
            raise UserError(f"preparing text needs Dask: {installation('data')}") from error
        self._distributed = distributed
        self._marker.touch()
        self.callback(self._marker.unlink, missing_ok=True)
        # Closes cluster and client if a later step fails.
        with contextlib.ExitStack() as stack:
            address = self._scheduler or stack.enter_context(self._local())
            self.client = self._connected(address, stack)
            sees = self._on_all_workers(self.client.run, os.path.isdir, str(self._work))
            for worker, sees_it in sees.items():
                if not sees_it:
                    raise UserError(
                        f"worker {worker} does not see {self._work}: give an --output that all workers share"
                    )
            self.push(stack.pop_all())
        return self

    def _local(self) -> Any:
        try:
            with _without_interrupts():
                return self._distributed.LocalCluster(
                    # None: one for each core that this process may use.
                    n_workers=self._workers or None,
                    threads_per_worker=1,
                    # No limit by Dask, which would kill a worker with a large document.
                    memory_limit=0,
                    # Any free port: Dask's default may belong to another cluster of this machine.
                    dashboard_address="localhost:0",
                    local_directory=str(self._work / "dask"),
                    silence_logs=logging.CRITICAL,
                    # Where Dask finds `dask_setup`.
                    preload=[__name__],
                )
        except (OSError, RuntimeError) as error:
            raise UserError(f"--workers={self._workers} could not be started ({error})") from error

    def _connected(self, address: Any, stack: contextlib.ExitStack) -> Any:
        try:
            client = stack.enter_context(
                self._distributed.Client(address, timeout=_CLUSTER_TIMEOUT)
            )
            if not client.scheduler_info(n_workers=-1)["workers"]:
                print("waiting for workers", flush=True)
            client.wait_for_workers(1, timeout=_WORKERS_TIMEOUT)
        except (OSError, TimeoutError, ValueError) as error:
            where = f"--scheduler={self._scheduler!r}" if self._scheduler else "the local scheduler"
            raise UserError(f"{where} cannot be reached, or has no workers ({error})") from error
        return client

    def _on_all_workers(self, call: Callable, *arguments: Any) -> Any:
        """Calls a method of the client that reaches every worker. Tries again if a worker dies meanwhile and is replaced."""
        for attempt in range(_ATTEMPTS):
            try:
                return call(*arguments)
            except OSError as error:
                if attempt == _ATTEMPTS - 1:
                    raise UserError(f"workers die at their start ({error}); {_GOES_ON}") from error
                time.sleep(1)

    @property
    def num_workers(self) -> int:
        return len(self.client.scheduler_info(n_workers=-1)["workers"])

    def run(self, function: Callable, arguments: Sequence, title: str = "", total: int = 0) -> None:
        """Calls a function on the workers, once for each argument. If a worker dies, another one takes its task.

        Args:
            function: must be picklable.
            arguments: one for each call.
            title: the name of the pass, for the progress that the tasks report; empty if they report none.
            total: documents to process; 0 if unknown.

        Raises:
            UserError: a task raised it or could not read or write, or workers are lost. The first error cancels all tasks.
        """
        if not arguments:
            return
        topic = self._marker.name
        progress = Progress(title, total) if title else None
        if progress is not None:
            self.client.subscribe_topic(topic, lambda event: progress.add(*event[1]))
        futures = self.client.map(function, arguments, pure=False)
        try:
            self._wait(futures)
        except (CancelledError, self._distributed.comm.CommClosedError) as error:
            # Dask cancels the tasks of a client that has lost its scheduler.
            raise UserError(f"the scheduler is gone; {_GOES_ON}") from error
        except OSError as error:
            raise UserError(f"a task could not read or write: {error}") from error
        except self._distributed.KilledWorker as error:
            raise UserError(
                f"a task's workers died {error.allowed_failures + 1} times (is there enough memory?); {_GOES_ON}"
            ) from error
        finally:
            if progress is not None:
                self.client.unsubscribe_topic(topic)
                progress.close()
            self.client.cancel(futures, force=True)

    def _wait(self, futures: Sequence) -> None:
        """Waits for all tasks. Raises the first error, `UserError` if the workers are gone, or `CancelledError` if the scheduler is."""
        pending, looks = set(futures), 0
        while pending:
            try:
                done, pending = self._distributed.wait(
                    pending, timeout=_LOOK_EVERY, return_when="FIRST_COMPLETED"
                )
            except TimeoutError:
                looks = 0 if self.num_workers else looks + 1
                if looks > 2:
                    raise UserError(f"all workers are gone; {_GOES_ON}") from None
                continue
            for future in done:
                if future.status == "cancelled":
                    raise CancelledError
                # Only an error is fetched: the worker that holds the result of a finished task, which is None, may be dead.
                if future.status == "error":
                    future.result()
