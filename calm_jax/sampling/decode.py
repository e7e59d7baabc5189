"""Generation, chunk after chunk, on device: `prefill` reads the prompts, `decode` generates.

A row's text depends on its own prompt and key alone, not on the other rows. B rows, L chunks of prompt, S chunks that
one call may generate, K tokens per chunk.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax import Array

from calm_jax.models.kv_cache import KVCache
from calm_jax.sampling.chunk_model import ChunkModel
from calm_jax.sampling.config import SamplerConfig
from calm_jax.sampling.pools import Prefix, complete_chunk
from calm_jax.sampling.samplers import sample_chunk
from calm_jax.sampling.search import Sampled

# `(params, frozen) -> ChunkModel`, the method `bind` of the tasks of language models.
Bind = Callable[[Any, Any], ChunkModel]


class State(NamedTuple):
    """The state of a generation, between two chunks.

    Attributes:
        h: [B, D], the hidden state that the next chunk is drawn from.
        cache: of all chunks so far.
        step: int32, the number of chunks generated so far; numbers the random keys.
        ended: bool [B], rows whose text has ended; nothing more is drawn for them.
    """

    h: Array
    cache: KVCache
    step: Array
    ended: Array


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
        model: as samplers see it.
        prompt_BLK: token ids; chunks of a row after its first `length_B` are ignored.
        length_B: the number of chunks in each row's prompt, at least 1.
        size: how many chunks the cache has room for.
        window: how many of the last chunks each chunk sees.
        piece: how many chunks are read at once; divides L. Where the text is to outgrow the cache, `size` must be a
            multiple of it and at least window + piece.

    Returns:
        The state before the first generated chunk.
    """
    batch, num_chunks, _ = prompt_BLK.shape
    chex.assert_shape(length_B, (batch,))
    chex.assert_is_divisible(num_chunks, piece)

    def read(carry: tuple[Array, KVCache], tokens_BLK: Array):
        h_BD, cache = carry
        is_over_B = cache.length >= length_B
        h_BLD, longer = model.advance(tokens_BLK, cache)
        last_B = length_B - 1 - cache.length
        own_h_BD = jax.vmap(lambda h_LD, last: h_LD[last])(h_BLD, jnp.clip(last_B, 0, piece - 1))
        # A row whose prompt has ended keeps its cache: chunks beyond its prompt could overwrite ones that it sees.
        kept = is_over_B[:, None, None, None]
        longer = longer._replace(
            key=jnp.where(kept, cache.key, longer.key),
            value=jnp.where(kept, cache.value, longer.value),
        )
        return (jnp.where(is_over_B[:, None], h_BD, own_h_BD), longer), None

    pieces = prompt_BLK.reshape(batch, -1, piece, prompt_BLK.shape[-1]).swapaxes(0, 1)
    cache = model.empty_cache(batch, size, window)
    width = jax.eval_shape(lambda: model.advance(pieces[0], cache)[0])
    nothing_BD = jnp.zeros((batch, width.shape[-1]), width.dtype)
    (h_BD, cache), _ = jax.lax.scan(read, (nothing_BD, cache), pieces)
    ended_B = jnp.zeros(batch, bool)
    return State(h_BD, cache._replace(length=length_B), jnp.int32(0), ended_B)


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
        model: as samplers see it.
        state: from `read_prompts` or an earlier call.
        limit: the most chunks to generate now, at most `num_chunks`; may be traced.
        num_chunks: S, the room for chunks in the result.
        eos_id: the token that ends a row's text.
        next_chunk: `(h_BD, step, active_B) -> Sampled`, such as `sample_chunk`; rows that are not active have ended.

    Returns:
        The state after the last chunk, and the chunks with what they cost, [B, S, ...]; a row's chunks after its last
        one are undefined.
    """
    batch, first = len(state.h), state.step
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
        return State(h_B1D[:, 0], cache, state.step + 1, ended_B), chunks

    return jax.lax.while_loop(unfinished, one, (state, chunks))


def _step_keys(key_B: Array, step: Array) -> Array:
    return jax.vmap(jax.random.fold_in, (0, None))(key_B, step)


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
    return read_prompts(bind(params, frozen), prompt_BLK, length_B, size, window, piece)


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
    model = bind(params, frozen)
    return complete_chunk(model, state.h, key_B, ~state.ended, config, prefix)


@functools.partial(
    jax.jit,
    static_argnames=("bind", "num_chunks", "eos_id", "config"),
    donate_argnames=("state",),
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
    """`generate_chunks` by `sample_chunk`, compiled; each row's draws come from its own key and the step."""
    model = bind(params, frozen)

    def next_chunk(h_BD: Array, step: Array, active_B: Array) -> Sampled:
        return sample_chunk(model, h_BD, _step_keys(key_B, step), active_B, config)

    return generate_chunks(model, state, limit, num_chunks, eos_id, next_chunk)
