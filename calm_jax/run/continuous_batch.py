"""Continuous batching: `ContinuousBatch` continues many prompts together, each in a place (a slot of the batch).

A place whose text ends takes the next prompt. Axes of arrays: P places of a batch, M prompts read together, L chunks of a prompt,
K tokens per chunk.
"""

import collections
import contextlib
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from calm_jax.data.tokenizers import Tokenizer
from calm_jax.parallel import multihost
from calm_jax.parallel.mesh import divisible
from calm_jax.rng import stream
from calm_jax.run.continuation import Piece, Row
from calm_jax.sampling.config import SamplerConfig
from calm_jax.sampling.decode import (
    CHUNKS_PER_CALL,
    CHUNKS_READ_TOGETHER,
    State,
    complete_prefix,
    decode,
    insert,
    prefill,
    with_room,
)
from calm_jax.sampling.pools import Prefix
from calm_jax.sampling.search import Sampled
from calm_jax.tasks import LmTask, Params

# Chunks that prefill reads at once where the context slides.
_CHUNKS_PER_READ = 64
# Prompts and caches are padded to a power of two of chunks, so that similar lengths share a compiled program. A prompt is padded
# to at least this many chunks, which cost time to read.
_SHORTEST_READ = 8
# A cache has room for a prompt of at least this many chunks, so that short prompts share a program. On CPUs unused room costs no
# time, on GPUs and TPUs little.
_SHORTEST_CACHED = 16


def power_of_two(num: int) -> int:
    """The least power of two that is at least `num`."""
    return 1 << (num - 1).bit_length()


def padded_length(num_chunks: int) -> int:
    """The length to which `num_chunks` chunks are padded: the next power of two, at least 8."""
    return max(_SHORTEST_READ, power_of_two(num_chunks))


def mesh_of_params(params: Params) -> Mesh | None:
    """The mesh over whose devices parameters are laid out; None for a single device."""
    for leaf in jax.tree.leaves(params):
        if isinstance(leaf.sharding, NamedSharding) and leaf.sharding.num_devices > 1:
            assert isinstance(leaf.sharding.mesh, Mesh)
            return leaf.sharding.mesh
    return None


class ContinuousBatch:
    """Prompts that are continued together. Prompts can be added at any time, also while others are being continued.

    A continuation depends on its `Row` alone (seed, index, prompt and options), not on the other prompts, the place or the
    number of places. Prompts get places in the order of submission. A compiled program draws with one `SamplerConfig`, so
    a prompt with another `batch_config`, and all prompts behind it, wait until the prompts before it are finished.

    On a mesh the places are split over its `data` and `fsdp` axes. With several processes, all must make the same calls.
    """

    def __init__(
        self,
        task: LmTask,
        params: Params,
        frozen: Params,
        tokenizer: Tokenizer,
        max_chunks: int,
        num_places: int,
    ):
        """An empty batch.

        Args:
          task, params, frozen: the model, as in `Generator`.
          tokenizer: gives the ids of eos and pad.
          max_chunks: the context, in chunks.
          num_places: P, how many prompts are continued together; rounded up so that it divides over the mesh.
        """
        self._model = task.bind, params, frozen
        self._chunk_size, self._tokenizer, self._max_chunks = task.chunk_size, tokenizer, max_chunks
        self._mesh = mesh_of_params(params)
        self._waiting: collections.deque[Row] = collections.deque()
        self._rows: list[Row | None] = [None] * divisible(num_places, self._mesh)
        # The data of each place's random key. A place that was never used has an arbitrary key.
        key_data = jax.random.key_data(jax.random.key(0))
        self._key_data_PX = np.tile(np.asarray(key_data), (len(self._rows), 1))
        self._reset()

    def _reset(self) -> None:
        """Drops the KV cache. The sampler and the size of the next cache are those of the prompts that wait.

        Until then a cache only grows: texts that run with or after a long one use its large cache, all of which attention
        reads on GPUs and TPUs. On CPUs attention reads only the blocks that hold chunks.
        """
        self._state: State | None = None
        self._cache_size = max(map(self._cache_size_of, self._waiting), default=0)
        self._num_steps = 0
        self._config: SamplerConfig | None = None

    @property
    def num_running(self) -> int:
        """How many prompts have a place."""
        return sum(row is not None and not row.continuation.finish for row in self._rows)

    @property
    def num_waiting(self) -> int:
        """How many prompts wait for a place."""
        return sum(not row.continuation.finish for row in self._waiting)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to do."""
        return not (self.num_running or self.num_waiting)

    def submit(self, row: Row) -> None:
        """Adds a prompt, to be continued by the next calls of `step`."""
        self._waiting.append(row)
        # The cache is made for the longest of the waiting texts, so that it seldom has to grow while it is in use.
        self._cache_size = max(self._cache_size, self._cache_size_of(row))

    def cancel(self, row: Row) -> None:
        """Ends a text, whose `finish` becomes "cancelled"; nothing more is computed for it."""
        if not row.continuation.finish:
            row.continuation.finish = "cancelled"
            self._free_places()

    def step(self, most: int = CHUNKS_PER_CALL) -> list[Piece]:
        """Gives free places to waiting prompts, and generates up to `most` chunks for all that have a place, at most
        `CHUNKS_PER_CALL`.

        Returns:
          A piece for each chunk of each row, a row's in order.
        """
        mesh = contextlib.nullcontext() if self._mesh is None else jax.set_mesh(self._mesh)
        with mesh:
            pieces = self._fill() + self._decode(most)
        self._free_places()
        return pieces

    def _free_places(self) -> None:
        """Frees the places of texts that have ended, and drops the KV cache if no text has a place."""
        self._rows = [row if row and not row.continuation.finish else None for row in self._rows]
        if not any(self._rows):
            self._waiting = collections.deque(
                row for row in self._waiting if not row.continuation.finish
            )
            self._reset()

    def _fill(self) -> list[Piece]:
        """Gives free places to waiting rows. Returns the pieces of prompts' last chunks that alignment "match" completed."""
        pieces: list[Piece] = []
        while True:
            free = [place for place, row in enumerate(self._rows) if row is None]
            taken = self._take(len(free))
            if not taken:
                return pieces
            pieces += self._place(taken, free)

    def _take(self, most: int) -> list[Row]:
        """The next waiting rows, up to `most`, that have the same sampler as the running ones and can be read together."""
        taken: list[Row] = []
        length = 0
        while self._waiting and len(taken) < most:
            row = self._waiting[0]
            if not row.continuation.finish:
                if self._config not in (None, row.options.batch_config):
                    break
                length = max(length, padded_length(row.prompt_chunks))
                if taken and (len(taken) + 1) * length > CHUNKS_READ_TOGETHER:
                    break
                self._config = row.options.batch_config
                row.began = time.monotonic()
                taken.append(row)
            self._waiting.popleft()
        return taken

    def _place(self, taken: list[Row], free: list[int]) -> list[Piece]:
        """Reads the prompts of rows into the first of the free places. Returns pieces as `_fill` does."""
        pieces, prompts = [], {}
        for row, completed in zip(taken, self._complete_prefixes(taken), strict=True):
            if completed is None:
                prompts[row] = row.padded()
            else:
                whole, given = row.split()
                row.continuation.alignment = "match"
                pieces.append(row.append(completed, len(given)))
                if not row.continuation.finish:
                    prompts[row] = [*whole, *completed.tokens]
        if not prompts:
            return pieces
        new = self._prefill(list(prompts.values()), slides=any(map(self._slides, prompts)))
        num_places = len(self._rows)
        if self._state is None:
            # All places are free: the prompts are in the first ones.
            self._state = with_room(new, num_places, self._cache_size)
        else:
            if self._state.cache.key.shape[3] < self._cache_size:
                self._state = with_room(self._state, num_places, self._cache_size)
            place_M = np.full(len(new.h), num_places, np.int32)
            place_M[: len(prompts)] = free[: len(prompts)]
            self._state = insert(self._state, new, place_M)
        key_data = np.asarray(jax.random.key_data(_row_keys("generate", list(prompts))))
        for place, row, data in zip(free, prompts, key_data, strict=False):
            self._rows[place] = row
            self._key_data_PX[place] = data
        return pieces

    def _decode(self, most: int) -> list[Piece]:
        """Generates chunks for all rows with a place."""
        running = {place: row for place, row in enumerate(self._rows) if row is not None}
        if not running:
            return []
        ended_P = np.ones(len(self._rows), bool)
        ended_P[list(running)] = False
        num_missing = [row.missing_chunks for row in running.values()]
        # While prompts wait, the call ends where a place becomes free.
        limit = min(num_missing) if self._waiting else max(num_missing)
        assert self._state is not None and self._config is not None
        self._state, chunks = decode(
            *self._model,
            self._state._replace(ended=jnp.asarray(ended_P)),
            jax.random.wrap_key_data(jnp.asarray(self._key_data_PX)),
            np.int32(min(limit, most, CHUNKS_PER_CALL)),
            num_chunks=CHUNKS_PER_CALL,
            eos_id=self._tokenizer.eos_id,
            config=self._config,
        )
        chunks, num_steps = multihost.fetch_global((chunks, self._state.step))
        pieces = []
        leaves, tree = jax.tree.flatten(chunks)
        num_new = num_steps - self._num_steps
        for number in range(num_new):
            for place, row in running.items():
                if not row.continuation.finish:
                    chunk = jax.tree.unflatten(tree, [x[place, number] for x in leaves])
                    pieces.append(row.append(chunk, 0, shows=number == num_new - 1))
        self._num_steps = num_steps
        return pieces

    def _slides(self, row: Row) -> bool:
        """Whether the text outgrows the context."""
        return row.prompt_chunks + row.new_chunks > self._max_chunks

    @property
    def _ring_size(self) -> int:
        """The size in chunks of a cache for texts of any length: the context, and the part of a prompt that is read at once."""
        return (-(-self._max_chunks // _CHUNKS_PER_READ) + 1) * _CHUNKS_PER_READ

    def _cache_size_of(self, row: Row) -> int:
        if self._slides(row):
            return self._ring_size
        size = power_of_two(
            max(_SHORTEST_CACHED, padded_length(row.prompt_chunks)) + row.new_chunks
        )
        return min(size, self._ring_size)

    def _prefill(self, prompts: Sequence[Sequence[int]], slides: bool) -> State:
        """Reads prompts of whole chunks into a cache of their own, which has room for them alone.

        Shapes are padded, so that prompts of similar lengths and numbers share a compiled program. If one of the texts
        slides, the cache has the size for texts of any length, and prompts are read part by part.
        """
        chunk_size = self._chunk_size
        num_read = min(divisible(power_of_two(len(prompts)), self._mesh), len(self._rows))
        length_M = np.ones(num_read, np.int32)
        length_M[: len(prompts)] = [len(ids) // chunk_size for ids in prompts]
        length = padded_length(int(length_M.max()))
        prompt_MLK = np.full((num_read, length, chunk_size), self._tokenizer.pad_id, np.int32)
        for row_LK, ids in zip(prompt_MLK, prompts, strict=False):
            row_LK.reshape(-1)[: len(ids)] = ids
        in_parts = slides or length > self._ring_size
        return prefill(
            *self._model,
            prompt_MLK,
            length_M,
            np.int32(self._max_chunks),
            size=self._ring_size if in_parts else length,
            piece=min(length, _CHUNKS_PER_READ) if in_parts else length,
        )

    def _complete_prefixes(self, rows: list[Row]) -> list[Sampled | None]:
        """Samples each row's incomplete last chunk, given its first tokens, for `prompt_alignment="match"`.

        None for a row that needs no completion, has no whole chunk before it to condition on, or found no draw that
        matches within `max_draws`.
        """
        wanted = [
            row for row in rows if row.options.prompt_alignment == "match" and all(row.split())
        ]
        if not wanted:
            return [None] * len(rows)
        assert self._config is not None
        slides = any(row.prompt_chunks > self._max_chunks for row in wanted)
        state = self._prefill([row.split()[0] for row in wanted], slides)
        num_read = len(state.h)
        prefix_MK = np.zeros((num_read, self._chunk_size), np.int32)
        length_M = np.zeros(num_read, np.int32)
        for index, row in enumerate(wanted):
            _, given = row.split()
            prefix_MK[index, : len(given)], length_M[index] = given, len(given)
        # Rows that only pad the batch are marked as ended: nothing is drawn for them.
        ended_M = np.arange(num_read) >= len(wanted)
        matched_M, chunks = complete_prefix(
            *self._model,
            state._replace(ended=jnp.asarray(ended_M)),
            Prefix(jnp.asarray(prefix_MK), jnp.asarray(length_M)),
            _row_keys("match", [*wanted, *wanted[:1] * (num_read - len(wanted))]),
            self._config,
        )
        matched_M, chunks = multihost.fetch_global((matched_M, chunks))
        completed: dict[Row, Sampled] = {}
        for index, row in enumerate(wanted):
            row.continuation.match_draws = int(chunks.draws[index])
            if matched_M[index]:
                completed[row] = jax.tree.map(lambda x, index=index: x[index], chunks)
        return [completed.get(row) for row in rows]


def _row_keys(name: str, rows: list[Row]) -> jax.Array:
    """A random key for each row, [M], by its seed and its index among the prompts of its call."""
    seeds = sorted({row.seed for row in rows})
    key_S = jnp.stack([stream(seed, name) for seed in seeds])
    of_seed_M = np.asarray([seeds.index(row.seed) for row in rows])
    index_M = np.asarray([row.continuation.index for row in rows])
    return jax.vmap(jax.random.fold_in)(key_S[of_seed_M], index_M)
