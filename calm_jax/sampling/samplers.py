"""`sample_chunk` draws the next chunk of each row at a temperature; `SAMPLERS` is the table of samplers (paper, section 5).

p is the model's distribution of the next chunk, which can be drawn from but not evaluated; T is the temperature;
`1/T = s = n + a` with n a whole number and 0 <= a < 1. B rows, N draws of each (a pool), K tokens per chunk. A row's
draws come from its own key, so its chunk does not depend on the other rows.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from calm_jax.errors import require_one_of
from calm_jax.models import vocabulary
from calm_jax.sampling.chunk_model import ChunkModel
from calm_jax.sampling.config import SamplerConfig
from calm_jax.sampling.exact import pooled, rejection
from calm_jax.sampling.pools import growing, one_pool
from calm_jax.sampling.search import Sampled, finished, new_search


def _at_noise(
    model: ChunkModel, h_BD: Array, key_B: Array, active_B: Array, config: SamplerConfig
) -> Sampled:
    """One draw with the head's noise multiplied by T, which the paper suggests; its distribution is not a power of p for T < 1."""
    found = new_search(model, h_BD, key_B, active_B, config)
    latent_B1Z = model.latents(h_BD, 1, key_B, config.temperature)
    found = found._replace(
        latent=latent_B1Z[:, 0],
        draws=active_B.astype(jnp.int32),
        exact=active_B & (config.temperature == 1),
    )
    return finished(model, h_BD, found, active_B)


_Sampler = Callable[[ChunkModel, Array, Array, Array, SamplerConfig], Sampled]
SAMPLERS: dict[str, _Sampler] = {
    "pooled": pooled,
    "batch": one_pool(leave_out=True),
    "published": one_pool(leave_out=False),
    "rejection": rejection,
    "growing": growing,
    "noise": _at_noise,
}


def check_sampler(key: str, name: str) -> None:
    """Raises `UserError`, with the name of the config key, unless there is a sampler `name`."""
    require_one_of(key, name, SAMPLERS)


def sample_token(log_probs_BV: Array, key_B: Array, temperature: float, top_p: float) -> Array:
    """The next token of each row, from known probabilities (the autoregressive baseline).

    Args:
        log_probs_BV: log-probabilities of the next token.
        key_B: one key per row.
        temperature: at least 0; below 1e-6 the most likely token is taken.
        top_p: draws only from the smallest set of most likely tokens whose probability, after the temperature, reaches
            this; 1 for all tokens.

    Returns:
        Token ids, int32 [B].
    """
    if temperature < 1e-6:
        return vocabulary.argmax(log_probs_BV)
    logits_BV = jax.nn.log_softmax(log_probs_BV / temperature)
    if top_p < 1:
        sorted_BV = jnp.sort(logits_BV, axis=-1, descending=True)
        prob_BV = jnp.exp(sorted_BV)
        is_kept_BV = jnp.cumsum(prob_BV, axis=-1) - prob_BV < top_p
        least_B1 = jnp.where(is_kept_BV, sorted_BV, jnp.inf).min(-1, keepdims=True)
        is_more_BV, is_equal_BV = logits_BV > least_B1, logits_BV == least_B1
        # Of the tokens that are as likely as the last one that is kept, the first ones.
        left_B1 = is_kept_BV.sum(-1, keepdims=True) - is_more_BV.sum(-1, keepdims=True)
        is_kept_BV = is_more_BV | is_equal_BV & (jnp.cumsum(is_equal_BV, axis=-1) <= left_B1)
        logits_BV = jnp.where(is_kept_BV, logits_BV, -jnp.inf)
    return jax.vmap(jax.random.categorical)(key_B, logits_BV).astype(jnp.int32)


def sample_chunk(
    model: ChunkModel, h_BD: Array, key_B: Array, active_B: Array, config: SamplerConfig
) -> Sampled:
    """The next chunk of each row, by the temperature and the sampler of a config.

    If the model knows its probabilities (softmax head), the chunk is drawn from them without a sampler. At T = 1 every
    sampler is one draw of the model.

    Args:
        model: the model's `ChunkModel` interface.
        h_BD: hidden states.
        key_B: one key per row.
        active_B: bool; the other rows get an undefined chunk, and samplers that draw pools draw none for them. Where
            every row takes one draw (T = 1, softmax heads, "noise"), theirs is computed too, but not counted.
        config: the temperature, the sampler and its budget, and the scale of the model's token prior.

    Returns:
        The chunks. Those of a softmax head are exact unless `top_p` leaves tokens out.

    Raises:
        UserError: for an unknown sampler.
    """
    one_B = active_B.astype(jnp.int32)
    if model.log_probs is not None:
        token_B = sample_token(model.log_probs(h_BD), key_B, config.temperature, config.top_p)
        return Sampled(token_B[:, None], one_B, one_B, active_B & (config.top_p == 1))
    model = model.with_prior_times(config.token_prior_scale)
    with jax.named_scope("temperature"):
        if config.temperature == 1:
            return _at_noise(model, h_BD, key_B, active_B, config)
        check_sampler("sampler", config.sampler)
        return SAMPLERS[config.sampler](model, h_BD, key_B, active_B, config)


@functools.cache
def fewest_draws(config: SamplerConfig) -> int:
    """The draws that a latent head's sampler makes for a chunk in the best case: the model is certain, so all draws are equal."""

    def certain(h_PD: Array, num_draws: int, key_P: Array, noise_scale: float) -> Array:
        return jnp.zeros((len(h_PD), num_draws, 1))

    def argmax_tokens(x: Array, prior: Array | None) -> Array:
        return x[..., 0].astype(jnp.int32)

    def not_sampled(*arguments: object) -> Any:
        raise AssertionError("a sampler reads no text")

    # K = 1, and the only token is 0.
    model = ChunkModel(
        certain,
        lambda latent_RZ: latent_RZ[:, None],
        argmax_tokens,
        not_sampled,
        not_sampled,
        not_sampled,
        log_probs=None,
        prior=None,
    )
    one_BD, key_B = jnp.zeros((1, 1)), jax.random.split(jax.random.key(0), 1)
    draw = jax.jit(lambda: sample_chunk(model, one_BD, key_B, jnp.ones(1, bool), config).draws)
    return int(draw()[0])
