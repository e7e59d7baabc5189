"""`Engine`: the one thread that owns the model, and continues the prompts of all requests in one batch."""

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncIterator

import jax

from calm_jax.run.continuation import Piece, Row
from calm_jax.run.generator import Generator
from calm_jax.sampling.decode import CHUNKS_PER_CALL

_LOG = logging.getLogger(__name__)
# Each new `SamplerConfig` compiles programs. After this many different ones, all compiled programs are dropped.
_MOST_COMPILED = 64


class EngineError(Exception):
    """The model failed while it computed a text; the log has the reason."""


class Job:
    """The texts of one request while they are computed.

    Attributes:
      rows: one for each text, those of a prompt one after the other.
      texts_per_prompt: the number of texts of each prompt.
      streams: whether `pieces` yields every chunk as soon as it is generated; otherwise it yields the last piece of each text.
    """

    def __init__(self, rows: list[Row], texts_per_prompt: int, streams: bool):
        self.rows, self.texts_per_prompt, self.streams = rows, texts_per_prompt, streams
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Piece | None] = asyncio.Queue()

    @property
    def num_prompt_tokens(self) -> int:
        """The tokens of the request's prompts, each prompt counted once."""
        return sum(len(row.ids) for row in self.rows[:: self.texts_per_prompt])

    def put(self, event: Piece | None) -> None:
        """Adds a piece of a text, or None if the model failed or its thread has ended. Any thread may call it."""
        self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    async def pieces(self, seconds: float) -> AsyncIterator[Piece]:
        """Yields pieces as they are generated, up to the end of all texts.

        Raises:
          EngineError: if the model failed.
          TimeoutError: after `seconds`.
        """
        unfinished, ends = len(self.rows), self._loop.time() + seconds
        while unfinished:
            async with asyncio.timeout_at(ends):
                piece = await self._events.get()
            if piece is None:
                raise EngineError
            unfinished -= piece.is_last
            yield piece


class Engine:
    """Continues the texts of jobs in its own thread.

    Its methods are called from the event loop's thread, except `stop`, which blocks and is called from another thread.
    """

    def __init__(self, generator: Generator, num_places: int):
        """Makes the thread, which `start` starts.

        Args:
          generator: the model.
          num_places: how many texts are continued together.
        """
        self._generator, self.num_places = generator, num_places
        self._jobs: set[Job] = set()
        self.is_alive = True
        # Guards the two above: no job is added unseen while the thread ends.
        self._lock = threading.Lock()
        self._orders: queue.SimpleQueue[tuple[str, Job | None]] = queue.SimpleQueue()
        # A daemon, because the process must be able to end while the model computes.
        self._thread = threading.Thread(target=self._work, name="model", daemon=True)
        self._batch = generator.batch(num_places)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after the chunks that it is computing."""
        self._orders.put(("stop", None))
        self._thread.join()

    def count_unfinished(self) -> tuple[int, int]:
        """How many texts of open jobs are being continued, and how many wait for a place."""
        rows = [row for job in self._jobs for row in job.rows if not row.continuation.finish]
        num_running = sum(row.began > 0 for row in rows)
        return num_running, len(rows) - num_running

    def submit(self, job: Job) -> None:
        """Adds a job, whose texts come from `Job.pieces`. The caller must `close` the job, however it ends."""
        with self._lock:
            self._jobs.add(job)
            if not self.is_alive:
                job.put(None)
        self._orders.put(("submit", job))

    def close(self, job: Job) -> None:
        """Removes a job. Nothing more is computed for its unfinished texts."""
        with self._lock:
            self._jobs.discard(job)
        self._orders.put(("cancel", job))

    def _work(self) -> None:
        try:
            self._run()
        finally:
            # Nobody would answer these jobs any more.
            with self._lock:
                self.is_alive = False
                for job in self._jobs:
                    job.put(None)

    def _run(self) -> None:
        jobs: dict[int, Job] = {}
        seen: set[object] = set()
        while True:
            try:
                while True:
                    order, job = self._orders.get(block=self._batch.is_idle)
                    if job is None:
                        return
                    for row in job.rows:
                        if order == "cancel":
                            self._batch.cancel(row)
                            jobs.pop(id(row.continuation), None)
                        else:
                            self._batch.submit(row)
                            jobs[id(row.continuation)] = job
                            seen.add(row.options.batch_config)
            except queue.Empty:
                pass
            if len(seen) > _MOST_COMPILED:
                jax.clear_caches()
                seen.clear()
            streams = any(job.streams for job in jobs.values())
            try:
                pieces = self._batch.step(1 if streams else CHUNKS_PER_CALL)
            except Exception:
                _LOG.exception("the model failed")
                for job in set(jobs.values()):
                    job.put(None)
                jobs.clear()
                self._batch = self._generator.batch(self.num_places)
                continue
            for piece in pieces:
                job = jobs[id(piece.continuation)]
                if piece.is_last or job.streams:
                    job.put(piece)
                if piece.is_last:
                    del jobs[id(piece.continuation)]
