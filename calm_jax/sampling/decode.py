"""Generation, chunk after chunk, on device: `prefill` reads prompts, `insert` gives them rows of a batch, `decode` generates.

A row's text depends on its own prompt and key alone, not on the other rows. On a mesh the rows are split over its `data`
and `fsdp` axes. B rows, M of them read together, L chunks of prompt, S chunks that one call may generate, K tokens per
chunk.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from calm_jax.models.kv_cache import KVCache
from calm_jax.parallel.constraints import constrain, rows_spec, tensor_spec
from calm_jax.sampling.chunk_model import ChunkModel
from calm_jax.sampling.config import SamplerConfig
from calm_jax.sampling.pools import Prefix, complete_chunk
from calm_jax.sampling.samplers import sample_chunk
from calm_jax.sampling.search import Sampled

# `(params, frozen) -> ChunkModel`, the method `bind` of the tasks of language models.
Bind = Callable[[Any, Any], ChunkModel]


# The most chunks that one call of the compiled `decode` generates. Between calls the host looks for stop strings.
CHUNKS_PER_CALL = 32
# The prompts of one call of `prefill` have together at most this many chunks, padding included; a longer prompt is read alone.
CHUNKS_READ_TOGETHER = 4096
# Options of XLA; platforms ignore those of others.
_OPTIONS = {
    # XLA for GPUs merges products that share an operand, and for that copies their kernels side by side at each step. This option
    # turns merging off. Products to merge are merged before (`calm_jax.models.stack.for_generation`).
    "xla_gpu_dot_merger_threshold_mb": 0,
    # On CPUs a library computes matrix products, and as of jaxlib 0.11 sums, too. The library cannot fuse a sum with the slice of
    # the cache that is summed, so the slice is copied (`UnslicedLayer`). This option leaves it only the products.
    "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT",
}


class State(NamedTuple):
    """The state of a generation, between two chunks.

    Attributes:
        h: [B, D], the hidden state that the next chunk is drawn from.
        cache: the cache of all chunks so far.
        step: int32, the number of chunks generated so far by the batch.
        ended: bool [B], rows whose text has ended; nothing more is drawn for them.
        began: int32 [B], the `step` at which each row began; `step - began` numbers its random keys.
    """

    h: Array
    cache: KVCache
    step: Array
    ended: Array
    began: Array


def _split_over_devices(state: State) -> State:
    """Splits the rows over the devices of the mesh, and the heads of the cache over `tensor`; does nothing without a mesh."""
    if jax.sharding.get_abstract_mesh().empty:
        return state
    _, batch, num_kv_heads, _, _ = state.cache.key.shape
    spec = PartitionSpec(None, rows_spec(batch), tensor_spec(num_kv_heads), None, None)
    key, value = jax.lax.with_sharding_constraint((state.cache.key, state.cache.value), spec)
    return state._replace(h=constrain(state.h), cache=state.cache._replace(key=key, value=value))


def _filled(x: Array, *shape: int) -> Array:
    """`x`, padded with zeros at the end of its axes to the given shape."""
    return jnp.pad(x, [(0, new - old) for old, new in zip(x.shape, shape, strict=True)])


def _padded(cache: KVCache, batch: int, size: int) -> KVCache:
    """The cache, padded with zeros to `batch` rows and `size` places; no row's text may be longer than the given cache."""

    def cached(x: Array) -> Array:
        return _filled(x, x.shape[0], batch, x.shape[2], size, x.shape[4])

    return cache._replace(
        key=cached(cache.key), value=cached(cache.value), length=_filled(cache.length, batch)
    )


def read_prompts(
    model: ChunkModel,
    prompt_BLK: Array,
    length_B: Array,
    size: int,
    window: Array | int,
    piece: int,
) -> State:
    """Reads prompts of different lengths into a fresh cache.

    Args:
        model: the model's `ChunkModel` interface.
        prompt_BLK: token ids; chunks of a row after its first `length_B` are ignored.
        length_B: the number of chunks in each row's prompt, at least 1.
        size: how many chunks the cache has room for.
        window: how many of the last chunks each chunk sees.
        piece: how many chunks are read at once; divides L. If the text will become longer than the cache, `size` must be
            a multiple of `piece` and at least window + piece.

    Returns:
        The state before the first generated chunk.
    """
    batch, num_chunks, _ = prompt_BLK.shape
    chex.assert_shape(length_B, (batch,))
    chex.assert_is_divisible(num_chunks, piece)

    def own_last(h_BLD: Array, length_B: Array) -> Array:
        last_B = jnp.clip(length_B - 1, 0, piece - 1)
        return jax.vmap(lambda h_LD, last: h_LD[last])(h_BLD, last_B)

    def read(carry: tuple[Array, KVCache], tokens_BLK: Array):
        h_BD, cache = carry
        is_over_B = cache.length >= length_B
        h_BLD, longer = model.advance(tokens_BLK, cache)
        own_h_BD = own_last(h_BLD, length_B - cache.length)
        # A row whose prompt has ended keeps its cache: padding after its prompt could overwrite chunks that it still sees.
        kept = is_over_B[:, None, None, None]
        longer = longer._replace(
            key=jnp.where(kept, cache.key, longer.key),
            value=jnp.where(kept, cache.value, longer.value),
        )
        return (jnp.where(is_over_B[:, None], h_BD, own_h_BD), longer), None

    # The first piece has nothing before it to attend to.
    h_BLD, cache = model.advance(prompt_BLK[:, :piece], model.empty_cache(batch, 0, window))
    h_BD, cache = own_last(h_BLD, length_B), _padded(cache, batch, size)
    if piece < num_chunks:
        pieces = prompt_BLK[:, piece:].reshape(batch, -1, piece, prompt_BLK.shape[-1])
        (h_BD, cache), _ = jax.lax.scan(read, (h_BD, cache), pieces.swapaxes(0, 1))
    return State(
        h_BD,
        cache._replace(length=length_B),
        step=jnp.int32(0),
        ended=jnp.zeros(batch, bool),
        began=jnp.zeros(batch, jnp.int32),
    )


def generate_chunks(
    model: ChunkModel,
    state: State,
    limit: Array | int,
    num_chunks: int,
    eos_id: int,
    next_chunk: Callable[[Array, Array, Array], Sampled],
) -> tuple[State, Sampled]:
    """Generates chunks until `limit` is reached or every row has ended; a row ends with a chunk that holds eos.

    Args:
        model: the model's `ChunkModel` interface.
        state: from `read_prompts` or an earlier call.
        limit: the most chunks to generate now, at most `num_chunks`; may be traced.
        num_chunks: S, the room for chunks in the result.
        eos_id: the token that ends a row's text.
        next_chunk: `(h_BD, step, active_B) -> Sampled`, such as `sample_chunk`; rows that are not active have ended.

    Returns:
        The state after the last chunk, and the chunks with their costs, [B, S, ...]; a row's chunks after its last one
        are undefined.
    """
    batch, first = len(state.h), state.step
    # Jitted, so that the shapes and the loop share one trace; inlined, so that the program does not change. (Profiles show the line of
    # the call as the source of its operations.)
    next_chunk = jax.jit(next_chunk, inline=True)
    like = jax.eval_shape(next_chunk, state.h, state.step, state.ended)
    chunks = jax.tree.map(lambda x: jnp.zeros((batch, num_chunks, *x.shape[1:]), x.dtype), like)

    def unfinished(carry: tuple[State, Sampled]) -> Array:
        state, _ = carry
        return (state.step - first < limit) & ~state.ended.all()

    def one(carry: tuple[State, Sampled]) -> tuple[State, Sampled]:
        state, chunks = carry
        new = next_chunk(state.h, state.step, ~state.ended)
        chunks = jax.tree.map(lambda x, one: x.at[:, state.step - first].set(one), chunks, new)
        ended_B = state.ended | (new.tokens == eos_id).any(-1)
        h_B1D, cache = model.advance(new.tokens[:, None], state.cache)
        state = state._replace(h=h_B1D[:, 0], cache=cache, step=state.step + 1, ended=ended_B)
        return state, chunks

    return jax.lax.while_loop(unfinished, one, (state, chunks))


@functools.partial(jax.jit, static_argnames=("bind", "size", "piece"))
def prefill(
    bind: Bind,
    params: Any,
    frozen: Any,
    prompt_BLK: Array,
    length_B: Array,
    window: Array,
    size: int,
    piece: int,
) -> State:
    """`read_prompts`, compiled."""
    state = read_prompts(bind(params, frozen), prompt_BLK, length_B, size, window, piece)
    return _split_over_devices(state)


@functools.partial(jax.jit, static_argnames=("batch", "size"))
def with_room(state: State, batch: int, size: int) -> State:
    """The state, padded with zeros to `batch` rows and to a cache for `size` chunks.

    No row's text may be longer than the given state's cache.
    """

    return _split_over_devices(
        State(
            _filled(state.h, batch, state.h.shape[1]),
            _padded(state.cache, batch, size),
            state.step,
            _filled(state.ended, batch),
            _filled(state.began, batch),
        )
    )


@functools.partial(jax.jit, donate_argnames=("state",))
def insert(state: State, new: State, row_M: Array) -> State:
    """Puts prompts that `prefill` read into the rows `row_M` of a state.

    Args:
        state: its cache has room for at least as many chunks as that of `new`. Its buffers are donated.
        new: from `prefill`, M rows; unless its cache is as large as the state's, none of its texts may be longer than its
            cache.
        row_M: int32; prompts whose row index is outside the state are dropped.
    """

    def put(x: Array, row: Array) -> Array:
        return x.at[row_M].set(row, mode="drop")

    def cached(x: Array, new: Array) -> Array:
        # The whole row is replaced, so that nothing of the row's previous text remains.
        room = [(0, 0)] * x.ndim
        room[3] = (0, x.shape[3] - new.shape[3])
        return x.at[:, row_M].set(jnp.pad(new, room), mode="drop")

    cache = state.cache._replace(
        key=cached(state.cache.key, new.cache.key),
        value=cached(state.cache.value, new.cache.value),
        length=put(state.cache.length, new.cache.length),
    )
    return _split_over_devices(
        State(
            put(state.h, new.h),
            cache,
            state.step,
            put(state.ended, new.ended),
            put(state.began, jnp.broadcast_to(state.step, row_M.shape)),
        )
    )


@functools.partial(jax.jit, static_argnames=("bind", "config"))
def complete_prefix(
    bind: Bind,
    params: Any,
    frozen: Any,
    state: State,
    prefix: Prefix,
    key_B: Array,
    config: SamplerConfig,
) -> tuple[Array, Sampled]:
    """`complete_chunk` after the prompts, compiled, for the rows that have not ended."""
    model = bind(params, frozen).with_prior_times(config.token_prior_scale)
    return complete_chunk(model, state.h, key_B, ~state.ended, config, prefix)


@functools.partial(
    jax.jit,
    static_argnames=("bind", "num_chunks", "eos_id", "config"),
    donate_argnames=("state",),
    compiler_options=_OPTIONS,
)
def decode(
    bind: Bind,
    params: Any,
    frozen: Any,
    state: State,
    key_B: Array,
    limit: Array,
    num_chunks: int,
    eos_id: int,
    config: SamplerConfig,
) -> tuple[State, Sampled]:
    """`generate_chunks` by `sample_chunk`, compiled; the buffers of `state` are donated.

    A row's random keys depend only on its own key and on how many chunks it has. The cache of a row that has ended before
    is overwritten.
    """
    model, began_B = bind(params, frozen), state.began
    # All rows advance together. Rows that have ended begin again with an empty cache, because on CPUs all rows cost as much
    # as the longest one (`UnslicedLayer`).
    length_B = jnp.where(state.ended, 0, state.cache.length)
    state = state._replace(cache=state.cache._replace(length=length_B))

    def next_chunk(h_BD: Array, step: Array, active_B: Array) -> Sampled:
        step_key_B = jax.vmap(jax.random.fold_in)(key_B, step - began_B)
        return sample_chunk(model, h_BD, step_key_B, active_B, config)

    state, chunks = generate_chunks(model, state, limit, num_chunks, eos_id, next_chunk)
    return _split_over_devices(state), chunks
