"""Chunk after chunk on device: `start` reads the prompts, `go_on` generates; a row's text is its own alone.

B rows, L chunks of prompt, S chunks that one call may generate, K tokens a chunk.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax import Array

from calm_jax.errors import UserError
from calm_jax.models.transformer import KVCache
from calm_jax.pool_samplers import Prefix, complete_chunk
from calm_jax.sampler_search import Sampled
from calm_jax.samplers import MOST_COMPARED, SamplerConfig, sample_chunk
from calm_jax.sampling import ChunkModel


@dataclasses.dataclass(frozen=True)
class SampleConfig(SamplerConfig):
    """`config.sample`; every key is described in `configs/common.py`."""

    max_tokens: int
    stop: tuple[str, ...]
    prompt_alignment: str
    long_context: str
    batch_size: int
    prompts: tuple[str, ...]

    def __post_init__(self):
        super().__post_init__()
        for name in ("max_tokens", "batch_size"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)} must be at least 1")
        if isinstance(self.stop, str):
            raise UserError(f"stop={self.stop!r} must be a tuple of strings")
        if "" in self.stop:
            raise UserError("stop='' would end every text before it begins: leave it out")
        if self.prompt_alignment not in ("left", "pad", "match"):
            raise UserError(
                f"prompt_alignment={self.prompt_alignment!r} must be 'left' (pads before the text, as "
                "lm.data.front_fill='random' trains it), 'match' (draws of the last chunk that begin as the prompt ends) "
                "or 'pad' (pads after it, as the published code does)"
            )
        if self.prompt_alignment == "match" and self.max_draws > MOST_COMPARED:
            raise UserError(
                f"max_draws={self.max_draws} must be at most {MOST_COMPARED} with prompt_alignment='match', which compares "
                "all of them with each other"
            )
        if self.long_context not in ("refuse", "slide"):
            raise UserError(
                f"long_context={self.long_context!r} must be 'refuse' or 'slide' (see the last chunks alone)"
            )
        if not self.prompts:
            raise UserError("sample.prompts=() must hold at least one prompt; '' starts a document")

    @property
    def sampler_config(self) -> SamplerConfig:
        """What compiled programs depend on."""
        names = [field.name for field in dataclasses.fields(SamplerConfig)]
        return SamplerConfig(*(getattr(self, name) for name in names))


Bind = Callable[[Any, Any], ChunkModel]


class State(NamedTuple):
    """Where generation stands. h: [B, D], what the next chunk is drawn from. step: chunks generated so far.

    ended: [B], rows that are done; nothing is drawn for them any more.
    """

    h: Array
    cache: KVCache
    step: Array
    ended: Array


def prefill(
    model: ChunkModel, prompt_BLK: Array, length_B: Array, size: int, window: Array, piece: int
) -> State:
    """Reads each row's prompt, its first `length_B` chunks; what stands beyond is ignored.

    size: of the cache. window: how many of the last chunks each chunk sees. piece: chunks that are read
    at once; all of them where `size` holds the whole text, else `size` must be a multiple of it and at least window + piece.
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
        # A row that is over keeps its cache: what is read beyond it could overwrite what it sees.
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


def generate(
    model: ChunkModel,
    state: State,
    limit: Array | int,
    num_chunks: int,
    eos_id: int,
    next_chunk: Callable[[Array, Array, Array], Sampled],
) -> tuple[State, Sampled]:
    """Up to `limit` <= `num_chunks` more chunks of each row, until all have ended; the others end with their eos.

    next_chunk: `(h_BD, step, active_B) -> Sampled`, such as `sample_chunk`. Of the result, [B, S, ...], a
    row's chunks after its end are not defined.
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
def start(
    bind: Bind,
    params: Any,
    frozen: Any,
    prompt_BLK: Array,
    length_B: Array,
    window: Array,
    size: int,
    piece: int,
) -> State:
    """`prefill`, compiled. bind: `(params, frozen) -> ChunkModel`."""
    return prefill(bind(params, frozen), prompt_BLK, length_B, size, window, piece)


@functools.partial(jax.jit, static_argnames=("bind", "config"))
def complete(
    bind: Bind,
    params: Any,
    frozen: Any,
    state: State,
    prefix: Prefix,
    key_B: Array,
    config: SamplerConfig,
) -> tuple[Array, Sampled]:
    """`complete_chunk` after a prompt, compiled; for the rows that have not ended."""
    model = bind(params, frozen)
    return complete_chunk(model, state.h, key_B, ~state.ended, config, prefix)


@functools.partial(
    jax.jit,
    static_argnames=("bind", "num_chunks", "eos_id", "config"),
    donate_argnames=("state",),
)
def go_on(
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
    """`generate` by a config's sampler, compiled; a row's draws come from its own key and the step."""
    model = bind(params, frozen)

    def next_chunk(h_BD: Array, step: Array, active_B: Array) -> Sampled:
        return sample_chunk(model, h_BD, _step_keys(key_B, step), active_B, config)

    return generate(model, state, limit, num_chunks, eos_id, next_chunk)
