"""Shared by the samplers: the state and the result of a search for the next chunk, and the choice by weight from one pool.

A search draws pools of latents for a row until it can choose the row's next chunk.

p is the model's distribution of the next chunk, T the temperature; `1/T = s = n + a` with n a whole number and
0 <= a < 1. B rows, G of them computed together, N draws of each (a pool), K tokens per chunk.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from calm_jax.sampling import temperature as law
from calm_jax.sampling.chunk_model import ChunkModel
from calm_jax.sampling.config import MOST_COMPARED, SamplerConfig
from calm_jax.sampling.counting import count_draws

# The number of draws in the first pool of a search.
FIRST_POOL = 16


class Candidates(NamedTuple):
    """The most frequent chunks of the pool that each row's chunk was chosen from, C of them.

    Attributes:
        chunk: their tokens, int32 [B, C, K]; during a search the latent of one draw of each, [B, C, Z].
        votes: int32 [B, C], how many draws of the pool are equal to each candidate, in falling order; 0 where the pool has
            fewer than C different chunks. Samplers without a pool give only zeros.
        pool: int32 [B], the number of draws in the pool.
    """

    chunk: Array
    votes: Array
    pool: Array


class Sampled(NamedTuple):
    """The next chunk of each row, and its cost.

    Attributes:
        tokens: int32 [B, K], the chunk.
        draws: int32 [B], the number of latents drawn for it.
        decoded: int32 [B], the number of tokens decoded for it.
        exact: bool [B], whether an exact sampler finished within its budget. If 1/T is a whole number, such chunks
            have the distribution `p^(1/T)`. Otherwise they favour frequent chunks: searches for rare ones take longer, so
            that the budget ends more of them.
        candidates: None if the config asks for none (`shown_candidates` is 0).
    """

    tokens: Array
    draws: Array
    decoded: Array
    exact: Array
    candidates: Candidates | None = None


class Search(NamedTuple):
    """The state of each row's search.

    Attributes:
        latent: [B, Z], the latent of the chosen chunk, or of the candidate so far.
        draws: int32 [B], the number of latents drawn so far.
        decoded: int32 [B], the number of tokens decoded so far.
        exact: bool [B], whether the latent has exactly the wanted distribution.
        done: bool [B], whether the search is over.
        level: int32 [B], the index of the next pool's size in the sampler's list of sizes.
        rounds: int32 [B], the number of pools and blocks drawn so far, which numbers the random keys.
        candidates: those of the latest pool; None if the config asks for none.
    """

    latent: Array
    draws: Array
    decoded: Array
    exact: Array
    done: Array
    level: Array
    rounds: Array
    candidates: Candidates | None = None


def keys(key_B: Array, rounds_B: Array, num: int) -> Array:
    """Fresh keys for each row's next round, [num, B]."""
    round_key_B = jax.vmap(jax.random.fold_in)(key_B, rounds_B)
    return jax.vmap(lambda key: jax.random.split(key, num), out_axes=1)(round_key_B)


def most_drawn(
    chunk_BNX: Array, count_BN: Array, is_first_BN: Array, config: SamplerConfig
) -> Candidates | None:
    """The most frequent chunks of a pool, as tokens or latents, if the config asks for them."""
    num, size = config.shown_candidates, count_BN.shape[1]
    if not num:
        return None
    votes_BC, index_BC = jax.lax.top_k(jnp.where(is_first_BN, count_BN, 0), min(num, size))
    missing = num - votes_BC.shape[1]
    votes_BC = jnp.pad(votes_BC, ((0, 0), (0, missing)))
    index_BC = jnp.pad(index_BC, ((0, 0), (0, missing)))
    chunk_BCX = jnp.take_along_axis(chunk_BNX, index_BC[..., None], axis=1)
    return Candidates(chunk_BCX, votes_BC, jnp.full(len(count_BN), size, jnp.int32))


def no_candidates(like_BX: Array, config: SamplerConfig) -> Candidates | None:
    """Zeros in place of candidates, for searches that have no pool yet; `like_BX` gives their shape, as tokens or latents."""
    nothing_B1 = jnp.zeros((len(like_BX), 1), jnp.int32)
    found = most_drawn(jnp.zeros_like(like_BX)[:, None], nothing_B1, nothing_B1 == 0, config)
    return found if found is None else found._replace(pool=nothing_B1[:, 0])


def new_search(
    model: ChunkModel, h_BD: Array, key_B: Array, active_B: Array, config: SamplerConfig
) -> Search:
    """The searches before their first draw; rows that are not active are done."""
    latent = jax.eval_shape(lambda: model.latents(h_BD, 1, key_B, 1))
    zero_B = jnp.zeros(len(h_BD), jnp.int32)
    latent_BZ = jnp.zeros((len(h_BD), latent.shape[-1]), latent.dtype)
    return Search(
        latent_BZ,
        draws=zero_B,
        decoded=zero_B,
        exact=zero_B > 0,
        done=~active_B,
        level=zero_B,
        rounds=zero_B,
        candidates=no_candidates(latent_BZ, config),
    )


def finished(model: ChunkModel, h_BD: Array, found: Search, active_B: Array) -> Sampled:
    """The result of the searches: decodes their latents."""
    tokens_BK = model.decode(h_BD, found.latent[:, None])[:, 0]
    decoded_B = found.decoded + tokens_BK.shape[1] * active_B
    candidates = found.candidates
    if candidates is not None:
        candidates = candidates._replace(chunk=model.decode(h_BD, candidates.chunk))
    return Sampled(tokens_BK, found.draws, decoded_B, found.exact & active_B, candidates)


def take_draw(latent_GNZ: Array, index_G: Array) -> Array:
    """The draw of each row at an index, [G, Z]."""
    return jnp.take_along_axis(latent_GNZ, index_G[:, None, None], axis=1)[:, 0]


def from_pool(
    model: ChunkModel,
    h_BD: Array,
    key_B: Array,
    found: Search,
    size: int,
    config: SamplerConfig,
    leave_out: bool,
) -> Search:
    """Draws one pool of `size` and chooses from it by `temperature.log_weights`, for the rows that are not done."""

    def step(given: tuple[Array, Array], found: Search) -> Search:
        h_GD, key_G = given
        draw_key_G, pick_key_G = keys(key_G, found.rounds, 2)
        latent_GNZ = model.latents(h_GD, size, draw_key_G, 1)
        counted = count_draws(model, h_GD, latent_GNZ, min_count=2)
        weight_GN, _ = law.log_weights(counted.count, config.temperature, leave_out)
        return found._replace(
            latent=take_draw(latent_GNZ, law.pick(weight_GN, pick_key_G)),
            draws=found.draws + size,
            decoded=found.decoded + counted.decoded,
            done=jnp.ones_like(found.done),
            candidates=most_drawn(latent_GNZ, counted.count, counted.is_first, config),
        )

    group = max(1, config.draws_at_once // size)
    return for_active(step, ~found.done, group, (h_BD, key_B), found)


def kept_back(config: SamplerConfig, least: int) -> int:
    """How many draws of the budget an exact search reserves for a last pool.

    If the rest of the budget is spent before the search has a result, the chunk is chosen by weight from that pool.

    least: the fewest draws that the search itself needs.
    """
    most = min(config.num_candidates, MOST_COMPARED)
    return max(0, min(most, config.max_draws // 2, config.max_draws - least))


def for_active(
    step: Callable[[Any, Any], Any], active_B: Array, group: int, fixed: Any, state: Any
) -> Any:
    """Applies `step` to the active rows only, `group` of them at a time.

    Active rows are gathered into groups, so that rows that are done cost nothing.

    Args:
        step: `(fixed, state) -> state` over trees of [group, ...].
        active_B: bool, the rows to update.
        group: how many rows are computed together; bounds memory.
        fixed: a tree of [B, ...] that `step` reads.
        state: a tree of [B, ...] that `step` replaces.

    Returns:
        The state, with the active rows updated.
    """
    batch = len(active_B)
    group = min(group, batch)
    order = jnp.argsort(~active_B, stable=True)
    order = jnp.pad(order, (0, -batch % group), constant_values=batch)
    num_active = active_B.sum()

    def apply(index: Array, state: Any) -> Any:
        rows = jax.lax.dynamic_slice_in_dim(order, index * group, group)
        is_active = index * group + jnp.arange(group) < num_active
        own_fixed, own_state = jax.tree.map(
            lambda x: x[jnp.minimum(rows, batch - 1)], (fixed, state)
        )
        target = jnp.where(is_active, rows, batch)
        return jax.tree.map(
            lambda x, new: x.at[target].set(new, mode="drop"), state, step(own_fixed, own_state)
        )

    return jax.lax.fori_loop(0, -(-num_active // group), apply, state)
