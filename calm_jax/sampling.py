"""Everything that samples stands on a few primitives of a model, above all `draw` and `advance`.

BrierLM, temperature sampling and generation use nothing else of a model, so that each head gets all
of them, and a known distribution can be put in a head's place.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax import Array

from calm_jax import temperature as temperature_lib
from calm_jax.errors import UserError
from calm_jax.models.transformer import KVCache, Memory

# Largest array of logits that decoding holds at once, in elements: 256 MiB in float32.
_MAX_LOGITS = 2**26


@dataclasses.dataclass(frozen=True)
class ChunkModel:
    """A model as the samplers see it, its parameters bound.

    latents: `(h_PD, num_draws, key_P) -> [P, N, Z]`, draws of the next chunk's latent.
    decode: `[P, N, Z] -> [P, N, K]`, the most likely tokens of each latent.
    advance: `(tokens_BLK, memory) -> h_BLD, memory`, reads chunks after those in a cache or fork.
    empty_cache: `(batch, size) -> cache` for `size` chunks.
    fork: `(cache, length_B, size) -> memory` that goes on after a cache's first `length` chunks, by
    up to `size` of its own, and leaves the cache as it is.
    log_probs: `h_PD -> [P, V]` for a model that knows the probabilities of its next token (K = 1, and
    its latents are the tokens); None for one that can only be sampled.
    """

    latents: Callable[[Array, int, Array], Array]
    decode: Callable[[Array], Array]
    advance: Callable[[Array, Memory | None], tuple[Array, Memory | None]]
    empty_cache: Callable[[int, int], KVCache]
    fork: Callable[[KVCache, Array, int], Memory]
    log_probs: Callable[[Array], Array] | None

    def draw(self, h_PD: Array, num_draws: int, key_P: Array) -> Array:
        """Independent draws of the next chunk, [P, N, K]; those of a position from its own key."""
        chex.assert_equal_shape_prefix([h_PD, key_P], 1)
        return self.decode(self.latents(h_PD, num_draws, key_P))


def at_once(size: int) -> int:
    """How many things of `size` logits each may be decoded together."""
    return max(1, _MAX_LOGITS // size)


def decode_in_blocks(logits_of: Callable[[Array], Array], latent_PNZ: Array, size: int) -> Array:
    """Argmax tokens [P, N, K] of latents, without holding the logits of all N draws.

    logits_of: `[R, Z] -> [R, K, V]`. size: K V, the logits of one latent.
    """
    positions, num_draws, _ = latent_PNZ.shape
    block = at_once(positions * size)

    def decode(latent_PZ: Array) -> Array:
        return logits_of(latent_PZ).argmax(-1).astype(jnp.int32)

    if block >= num_draws:
        tokens = decode(latent_PNZ.reshape(positions * num_draws, -1))
        return tokens.reshape(positions, num_draws, -1)
    tokens_NPK = jax.lax.map(decode, latent_PNZ.swapaxes(0, 1), batch_size=block)
    return tokens_NPK.swapaxes(0, 1)


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """`config.sample`; every key is described in `configs/common.py`.

    An argument of jitted functions, so two different ones compile twice.
    """

    temperature: float
    top_p: float
    num_candidates: int
    max_tokens: int
    prompt_alignment: str
    prompts: tuple[str, ...]

    def __post_init__(self):
        if not 0 <= self.temperature < math.inf:
            raise UserError(f"temperature={self.temperature:g} must be a number from 0 on")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p={self.top_p:g} must be in (0, 1]")
        if not self.prompts:
            raise UserError("sample.prompts=() must hold at least one prompt; '' starts a document")
        if self.num_candidates < 1:
            raise UserError(f"num_candidates={self.num_candidates} must be at least 1")
        if self.max_tokens < 1:
            raise UserError(f"max_tokens={self.max_tokens} must be at least 1")
        if self.prompt_alignment not in ("left", "pad"):
            raise UserError(
                f"prompt_alignment={self.prompt_alignment!r} must be 'left' (pads before the text, as "
                "lm.data.front_fill='random' trains it) or 'pad' (pads after it, as the published code does)"
            )


def sample_token(log_probs_BV: Array, key_B: Array, temperature: float, top_p: float) -> Array:
    """The next token of each row from known probabilities, [B]; a temperature below 1e-6 takes the likeliest.

    top_p: only the likeliest tokens that together reach this probability, after the temperature; the
    one that reaches it is the last.
    """
    if temperature < 1e-6:
        return log_probs_BV.argmax(-1).astype(jnp.int32)
    logits_BV = jax.nn.log_softmax(log_probs_BV / temperature)
    if top_p < 1:
        order_BV = jnp.argsort(-logits_BV, axis=-1)
        sorted_BV = jnp.exp(jnp.take_along_axis(logits_BV, order_BV, axis=-1))
        before_BV = jnp.cumsum(sorted_BV, axis=-1) - sorted_BV
        rank_BV = jnp.argsort(order_BV, axis=-1)
        kept_BV = jnp.take_along_axis(before_BV < top_p, rank_BV, axis=-1)
        logits_BV = jnp.where(kept_BV, logits_BV, -jnp.inf)
    return jax.vmap(jax.random.categorical)(key_B, logits_BV).astype(jnp.int32)


def sample_chunk(model: ChunkModel, h_BD: Array, key_B: Array, config: SamplingConfig) -> Array:
    """The next chunk of each row at a config's temperature, [B, K]."""
    if model.log_probs is not None:
        token_B = sample_token(model.log_probs(h_BD), key_B, config.temperature, config.top_p)
        return token_B[:, None]
    if config.temperature == 1:
        return model.draw(h_BD, 1, key_B)[:, 0]
    draw_key_B, choice_key_B = jax.vmap(jax.random.split, out_axes=1)(key_B)
    tokens_BNK = model.draw(h_BD, config.num_candidates, draw_key_B)
    return temperature_lib.choose(tokens_BNK, config.temperature, choice_key_B).tokens


class Continuation(NamedTuple):
    """tokens: [B, steps, K]. length: [B], chunks generated up to and with the one that holds eos."""

    tokens: Array
    length: Array


def generate(
    model: ChunkModel,
    prompt_BLK: Array,
    length_B: Array,
    num_chunks: int,
    eos_id: int,
    next_chunk: Callable[[Array, Array], Array],
) -> Continuation:
    """Continues each row's prompt, its first `length_B` chunks, until eos or for `num_chunks` chunks.

    What stands beyond a row's length is ignored, so ragged prompts give row by row what each gives
    alone. Chunks after a row's eos are not defined.
    next_chunk: `(h_BD, step) -> [B, K]`, such as `sample_chunk` at a temperature.
    """
    batch, prompt_chunks, chunk_size = prompt_BLK.shape
    chex.assert_shape(length_B, (batch,))
    h_BLD, cache = model.advance(prompt_BLK, model.empty_cache(batch, prompt_chunks + num_chunks))
    h_BD = jax.vmap(lambda h_LD, length: h_LD[length - 1])(h_BLD, length_B)
    cache = cache._replace(length=length_B)

    def body(state):
        step, h_BD, cache, tokens_BSK, generated_B, ended_B = state
        chunk_BK = next_chunk(h_BD, step)
        tokens_BSK = tokens_BSK.at[:, step].set(chunk_BK)
        generated_B = jnp.where(ended_B, generated_B, step + 1)
        ended_B |= (chunk_BK == eos_id).any(-1)
        h_B1D, cache = model.advance(chunk_BK[:, None], cache)
        return step + 1, h_B1D[:, 0], cache, tokens_BSK, generated_B, ended_B

    def unfinished(state):
        step, *_, ended_B = state
        return (step < num_chunks) & ~ended_B.all()

    state = (
        jnp.int32(0),
        h_BD,
        cache,
        jnp.zeros((batch, num_chunks, chunk_size), jnp.int32),
        jnp.zeros(batch, jnp.int32),
        jnp.zeros(batch, bool),
    )
    _, _, _, tokens_BSK, generated_B, _ = jax.lax.while_loop(unfinished, body, state)
    return Continuation(tokens_BSK, generated_B)


@functools.partial(jax.jit, static_argnames=("bind", "num_chunks", "eos_id", "config"))
def generate_chunks(
    bind: Callable[..., ChunkModel],
    params,
    frozen,
    prompt_BLK: Array,
    length_B: Array,
    key_B: Array,
    num_chunks: int,
    eos_id: int,
    config: SamplingConfig,
) -> Continuation:
    """`generate` at a config's temperature, compiled; a row's draws come from its own key.

    bind: `(params, frozen) -> ChunkModel`.
    """
    model = bind(params, frozen)

    def next_chunk(h_BD: Array, step: Array) -> Array:
        step_key_B = jax.vmap(jax.random.fold_in, (0, None))(key_B, step)
        return sample_chunk(model, h_BD, step_key_B, config)

    return generate(model, prompt_BLK, length_B, num_chunks, eos_id, next_chunk)
