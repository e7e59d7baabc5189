"""The next chunk of each row at a temperature: `sample_chunk`, and `SAMPLERS`, the ways to get it (paper, section 5).

p is the model's law of the next chunk, which can be drawn from and not evaluated; T the temperature;
`1/T = s = n + a` with n whole and 0 <= a < 1. B rows, G of them together, N draws of each (a pool),
K tokens a chunk. A row's draws come from its own key, so its chunk does not depend on its neighbours.
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from calm_jax import temperature as law
from calm_jax.errors import UserError
from calm_jax.exact_samplers import pooled, rejection
from calm_jax.pool_samplers import growing, one_pool
from calm_jax.sampler_search import Sampled, finished, nothing
from calm_jax.sampling import ChunkModel

# Bounds of what is asked for: draws of a chunk, and draws that are compared each with each (16 MiB for 4096).
_MOST_DRAWS, MOST_COMPARED = 2**24, 4096


@dataclasses.dataclass(frozen=True)
class SamplerConfig:
    """The part of `config.sample` that decides how a chunk is drawn; see `configs/common.py` for the keys.

    An argument of jitted functions, so two different ones compile twice.
    """

    temperature: float
    sampler: str
    num_candidates: int
    max_draws: int
    draws_at_once: int
    top_p: float

    def __post_init__(self):
        if not 0 <= self.temperature < math.inf:
            raise UserError(f"temperature={self.temperature:g} must be a number from 0 on")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p={self.top_p:g} must be in (0, 1]")
        if self.sampler not in SAMPLERS:
            raise UserError(f"sampler={self.sampler!r} is none of {', '.join(SAMPLERS)}")
        for name in ("num_candidates", "max_draws", "draws_at_once"):
            if not 1 <= getattr(self, name) <= _MOST_DRAWS:
                raise UserError(
                    f"{name}={getattr(self, name)} must be at least 1 and at most {_MOST_DRAWS}"
                )
        # Draws of one pool are compared each with each.
        pools = {"batch": "num_candidates", "published": "num_candidates", "growing": "max_draws"}
        name = pools.get(self.sampler)
        if name and getattr(self, name) > MOST_COMPARED:
            raise UserError(
                f"{name}={getattr(self, name)} must be at most {MOST_COMPARED} with sampler={self.sampler!r}, which compares "
                "all of them with each other"
            )

    def check_latent_head(self) -> None:
        """Raises `UserError` for what a head that can only be sampled cannot do."""
        n, a = law.split_exponent(self.temperature)
        if self.top_p != 1:
            raise UserError(
                f"top_p={self.top_p:g} needs the probabilities of tokens, which only lm.head.name='softmax' knows; a "
                "temperature below 1 sharpens the draws of the others"
            )
        if self.sampler == "published" and a:
            raise UserError(
                f"temperature={self.temperature:g}: sampler='published' takes 1, 1/2, 1/3, ... alone; sampler='batch' "
                "and 'pooled' take any in (0, 1]"
            )
        least = n + (a > 0)
        if self.sampler in ("pooled", "rejection", "growing") and self.max_draws < least:
            raise UserError(
                f"max_draws={self.max_draws} must be at least {least} at temperature={self.temperature:g}, which compares "
                f"{least} draws"
            )


def _at_noise(
    model: ChunkModel, h_BD: Array, key_B: Array, active_B: Array, config: SamplerConfig
) -> Sampled:
    """One draw with the head's noise times T: the paper's suggestion, no power of p."""
    found = nothing(model, h_BD, key_B, active_B)
    latent_B1Z = model.latents(h_BD, 1, key_B, config.temperature)
    found = found._replace(
        latent=latent_B1Z[:, 0],
        draws=active_B.astype(jnp.int32),
        exact=active_B & (config.temperature == 1),
    )
    return finished(model, found, active_B)


_Sampler = Callable[[ChunkModel, Array, Array, Array, SamplerConfig], Sampled]
SAMPLERS: dict[str, _Sampler] = {
    "pooled": pooled,
    "batch": one_pool(leave_out=True),
    "published": one_pool(leave_out=False),
    "rejection": rejection,
    "growing": growing,
    "noise": _at_noise,
}


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


def sample_chunk(
    model: ChunkModel, h_BD: Array, key_B: Array, active_B: Array, config: SamplerConfig
) -> Sampled:
    """The next chunk of each active row at a config's temperature, by its sampler; the others get anything.

    A model that knows its probabilities needs no sampler. At T = 1 every sampler is one draw.
    """
    one_B = active_B.astype(jnp.int32)
    if model.log_probs is not None:
        token_B = sample_token(model.log_probs(h_BD), key_B, config.temperature, config.top_p)
        return Sampled(token_B[:, None], one_B, one_B, active_B)
    with jax.named_scope("temperature"):
        if config.temperature == 1:
            return _at_noise(model, h_BD, key_B, active_B, config)
        return SAMPLERS[config.sampler](model, h_BD, key_B, active_B, config)
