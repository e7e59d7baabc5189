"""What the samplers share: how a search for the next chunk stands, and the choice by weight from one pool.

p is the model's law of the next chunk, T the temperature; `1/T = s = n + a` with n whole and 0 <= a < 1. B rows, G of them
together, N draws of each (a pool), K tokens a chunk.
"""

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from calm_jax import temperature as law
from calm_jax.sampling import ChunkModel, count_draws, for_active

if TYPE_CHECKING:
    from calm_jax.samplers import SamplerConfig

# Draws of the first pool, and of what is drawn block by block.
FIRST_POOL = 16


class Sampled(NamedTuple):
    """tokens: [B, K], the next chunk. draws: [B], latents drawn for it. decoded: [B], tokens decoded for it.

    exact: [B], whether an exact sampler came to its end within its budget. For whole 1/T such a chunk has the law
    `p^(1/T)`; between, long searches end first, and those are of rare chunks.
    """

    tokens: Array
    draws: Array
    decoded: Array
    exact: Array


class Found(NamedTuple):
    """Where each row's search stands.

    latent: [B, Z], the chunk's, or the best so far. level: [B], which pool is next. rounds: [B], pools
    and blocks so far, which number the random keys.
    """

    latent: Array
    draws: Array
    decoded: Array
    exact: Array
    done: Array
    level: Array
    rounds: Array


def keys(key_B: Array, rounds_B: Array, num: int) -> Array:
    """Fresh keys for each row's next round, [num, B]."""
    round_key_B = jax.vmap(jax.random.fold_in)(key_B, rounds_B)
    return jax.vmap(lambda key: jax.random.split(key, num), out_axes=1)(round_key_B)


def nothing(model: ChunkModel, h_BD: Array, key_B: Array, active_B: Array) -> Found:
    latent = jax.eval_shape(lambda: model.latents(h_BD, 1, key_B, 1))
    zero_B = jnp.zeros(len(h_BD), jnp.int32)
    return Found(
        jnp.zeros((len(h_BD), latent.shape[-1]), latent.dtype),
        draws=zero_B,
        decoded=zero_B,
        exact=zero_B > 0,
        done=~active_B,
        level=zero_B,
        rounds=zero_B,
    )


def finished(model: ChunkModel, found: Found, active_B: Array) -> Sampled:
    """Decodes what was found."""
    tokens_BK = model.decode(found.latent[:, None])[:, 0]
    decoded_B = found.decoded + tokens_BK.shape[1] * active_B
    return Sampled(tokens_BK, found.draws, decoded_B, found.exact & active_B)


def take(latent_GNZ: Array, index_G: Array) -> Array:
    return jnp.take_along_axis(latent_GNZ, index_G[:, None, None], axis=1)[:, 0]


def from_pool(
    model: ChunkModel,
    h_BD: Array,
    key_B: Array,
    found: Found,
    size: int,
    config: "SamplerConfig",
    leave_out: bool,
) -> Found:
    """Chooses from one pool by weight, for the rows that are not done."""

    def step(given: tuple[Array, Array], found: Found) -> Found:
        h_GD, key_G = given
        draw_key_G, pick_key_G = keys(key_G, found.rounds, 2)
        latent_GNZ = model.latents(h_GD, size, draw_key_G, 1)
        counted = count_draws(model, latent_GNZ, company=2)
        weight_GN, _ = law.log_weights(counted.count, config.temperature, leave_out)
        return found._replace(
            latent=take(latent_GNZ, law.pick(weight_GN, pick_key_G)),
            draws=found.draws + size,
            decoded=found.decoded + counted.decoded,
            done=jnp.ones_like(found.done),
        )

    group = max(1, config.draws_at_once // size)
    return for_active(step, ~found.done, group, (h_BD, key_B), found)


def kept_back(config: "SamplerConfig", least: int) -> int:
    """Draws kept back for a choice by weight where an exact search, which needs `least`, may end without a pool."""
    return max(0, min(config.num_candidates, config.max_draws // 2, config.max_draws - least))
