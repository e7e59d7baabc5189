"""Samplers that end with exactly `p^s`: `pooled` (ours) and `rejection` (the paper's Algorithm 1). See `sampler_search` for the letters."""

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from calm_jax import temperature as law
from calm_jax.sampler_search import (
    FIRST_POOL,
    Found,
    Sampled,
    finished,
    from_pool,
    kept_back,
    keys,
    nothing,
    take,
)
from calm_jax.sampling import ChunkModel, count_draws, for_active

if TYPE_CHECKING:
    from calm_jax.samplers import SamplerConfig

# How fresh pools grow from the first on, and the largest. Contexts of trained models are mostly either so peaked
# that the first pool emits or so flat that many draws tell little: fewer, larger steps waste least (measured).
_LARGEST_POOL, _GROWTH = 1024, 4
# Draws made together where they are used one after the other.
_BLOCK = 16


def pool_sizes(max_draws: int) -> tuple[int, ...]:
    """16, 64, 256, 1024 as far as `max_draws` reach; the last of them but the first takes what would be left over."""
    if max_draws < 2 * FIRST_POOL:
        return (max_draws,)
    sizes = [FIRST_POOL]
    while sum(sizes) + _GROWTH * sizes[-1] <= max_draws and sizes[-1] < _LARGEST_POOL:
        sizes.append(_GROWTH * sizes[-1])
    left = max_draws - sum(sizes)
    if len(sizes) == 1:
        sizes.append(left)
    elif sizes[-1] < _LARGEST_POOL:
        sizes[-1] += left
    return tuple(sizes)


def pooled(
    model: ChunkModel, h_BD: Array, key_B: Array, active_B: Array, config: "SamplerConfig"
) -> Sampled:
    """Exactly `p^s` (ours): fresh pools of growing size until one emits, then Algorithm 1's fraction step.

    After `max_draws` the choice is by weight, leave-out, and counts as not exact: from the last pool
    where s is whole, else from draws kept back for it.
    """
    n, a = law.split_exponent(config.temperature)
    reserve = kept_back(config, n + 1) if a else 0
    budget = config.max_draws - reserve
    # Draws of the fraction step made together.
    block = min(_BLOCK, budget - n) if a else 0
    # A single draw has the law p.
    sizes = pool_sizes(budget - block) if n > 1 else (1,)
    last = len(sizes) - 1
    found = nothing(model, h_BD, key_B, active_B)

    def affords(found: Found) -> Array:
        return found.draws + jnp.asarray(sizes)[found.level] + block <= budget

    def try_pool(given: tuple[Array, Array], found: Found, level: int) -> Found:
        h_GD, key_G = given
        size = sizes[level]
        draw_key_G, emit_key_G, pick_key_G, fraction_key_G = keys(key_G, found.rounds, 4)
        latent_GNZ = model.latents(h_GD, size, draw_key_G, 1)
        # The choice by weight may fall back to any level, so the last pool counts pairs, too.
        may_fall_back = level == last and not a
        counted = count_draws(model, latent_GNZ, company=2 if may_fall_back else n)
        index_G, emitted_G = law.emit(counted.count, n, emit_key_G)
        if may_fall_back:
            weight_GN, _ = law.log_weights(counted.count, config.temperature, leave_out=True)
            index_G = jnp.where(emitted_G, index_G, law.pick(weight_GN, pick_key_G))
        found = found._replace(
            latent=take(latent_GNZ, index_G),
            draws=found.draws + size,
            decoded=found.decoded + counted.decoded,
            exact=emitted_G,
            level=jnp.minimum(found.level + ~emitted_G, last),
            rounds=found.rounds + 1,
        )
        if not a:
            return found._replace(done=found.exact)
        return accept_fraction(model, h_GD, fraction_key_G, found, a, block, budget)

    def try_all(found: Found) -> Found:
        for level, size in enumerate(sizes):
            group = max(1, config.draws_at_once // max(size, block))
            found = for_active(
                lambda given, found, level=level: try_pool(given, found, level),
                ~found.done & (found.level == level) & affords(found),
                group,
                (h_BD, key_B),
                found,
            )
        return found

    found = jax.lax.while_loop(lambda found: (~found.done & affords(found)).any(), try_all, found)
    if reserve:
        found = from_pool(model, h_BD, key_B, found, reserve, config, leave_out=True)
    return finished(model, found, active_B)


def accept_fraction(
    model: ChunkModel,
    h_GD: Array,
    key_G: Array,
    found: Found,
    a: float,
    block: int,
    budget: int,
) -> Found:
    """Keeps `found.exact` of a chunk x with probability p(x)^a: if one of R draws is x (see `law.patience`).

    Where the budget ends before R draws are made, see `_undecided`.
    """
    patience_key_G, end_key_G, key_G = jax.vmap(lambda key: jax.random.split(key, 3), out_axes=1)(
        key_G
    )
    patience_G = law.patience(a, patience_key_G)
    tokens_GK = model.decode(found.latent[:, None])[:, 0]
    chunk_size = tokens_GK.shape[1]

    def searching(state: tuple[Found, Array, Array]) -> Array:
        _, searching_G, _ = state
        return searching_G.any()

    def search(state: tuple[Found, Array, Array]) -> tuple[Found, Array, Array]:
        found, searching_G, made = state
        block_key_G = jax.vmap(jax.random.fold_in, (0, None))(key_G, made)
        drawn_GNK = model.draw(h_GD, block, block_key_G)
        is_match_GN = (drawn_GNK == tokens_GK[:, None]).all(-1)
        in_time_GN = made + jnp.arange(block) < patience_G[:, None]
        matched_G = (is_match_GN & in_time_GN).any(-1)
        made += block
        goes_on_G = searching_G & ~matched_G & (made < patience_G)
        found = found._replace(
            draws=found.draws + block * searching_G,
            decoded=found.decoded + block * chunk_size * searching_G,
            exact=found.exact | (searching_G & matched_G),
        )
        is_over_G = found.draws + block > budget
        found = found._replace(
            done=found.done | found.exact | _undecided(goes_on_G & is_over_G, a, end_key_G)
        )
        return found, goes_on_G & ~is_over_G, made

    searching_G = found.exact
    found = found._replace(
        exact=jnp.zeros_like(found.exact), decoded=found.decoded + chunk_size * found.exact
    )
    return jax.lax.while_loop(searching, search, (found, searching_G, jnp.int32(0)))[0]


def _undecided(is_over_B: Array, a: float, key_B: Array) -> Array:
    """Which chunks are taken, not exactly, where the budget ended within their fraction step.

    To drop all of them would favour chunks that are soon drawn again. They are taken with the factor that
    a chunk of count n has in `law.log_weights`, for the same reason.
    """
    uniform_B = jax.vmap(jax.random.uniform)(key_B)
    return is_over_B & (uniform_B < (1 - a) ** 2)


class _Candidate(NamedTuple):
    """Where a row stands in Algorithm 1.

    chunk: [B, K], the candidate. seen: [B], draws of the first step; n of them mean the second. equal:
    [B], whether all those are the candidate. tries: [B], draws of the second step.
    """

    chunk: Array
    seen: Array
    equal: Array
    tries: Array


def rejection(
    model: ChunkModel, h_BD: Array, key_B: Array, active_B: Array, config: "SamplerConfig"
) -> Sampled:
    """Exactly `p^s`: the paper's Algorithm 1, its draws made in blocks and used in order.

    (1) n draws; unless all are equal, again. (2) For a > 0 and i = 1, 2, ...: a draw; if it is that chunk,
    done; else with probability a/i from (1) again. After `max_draws` the choice is by weight from draws
    kept back for it, and counts as not exact.
    """
    n, a = law.split_exponent(config.temperature)
    reserve = kept_back(config, n + (a > 0))
    budget = config.max_draws - reserve
    # A budget below one block is used up in one go.
    size = min(_BLOCK, budget)
    found = nothing(model, h_BD, key_B, active_B)

    def use(state, drawn):
        found, candidate = state
        latent_GZ, token_GK, uniform_G = drawn
        is_first_G = candidate.seen == 0
        in_second_G = candidate.seen == n
        fresh_G = ~found.done & is_first_G
        chunk_GK = jnp.where(fresh_G[:, None], token_GK, candidate.chunk)
        match_G = (token_GK == chunk_GK).all(-1)

        equal_G = jnp.where(in_second_G, True, match_G & (is_first_G | candidate.equal))
        seen_G = jnp.where(in_second_G, n, candidate.seen + 1)
        tries_G = jnp.where(in_second_G, candidate.tries + 1, 0)
        # Where the first step has just ended, and where the second one gives up.
        fails_G = ~in_second_G & (seen_G == n) & ~equal_G
        gives_up_G = in_second_G & ~match_G & (uniform_G * tries_G < a)
        ends_G = in_second_G & match_G
        if not a:
            ends_G |= ~in_second_G & (seen_G == n) & equal_G
        seen_G = jnp.where(fails_G | gives_up_G, 0, seen_G)
        exact_G = found.exact | (~found.done & ends_G)
        found = found._replace(
            latent=jnp.where(fresh_G[:, None], latent_GZ, found.latent),
            exact=exact_G,
            done=found.done | exact_G,
        )
        return (found, _Candidate(chunk_GK, seen_G, equal_G, tries_G)), None

    def step(given, state):
        h_GD, key_G = given
        found, candidate = state
        draw_key_G, uniform_key_G = keys(key_G, found.rounds, 2)
        latent_GNZ = model.latents(h_GD, size, draw_key_G, 1)
        token_GNK = model.decode(latent_GNZ)
        uniform_GN = jax.vmap(lambda key: jax.random.uniform(key, (size,)))(uniform_key_G)
        found = found._replace(
            draws=found.draws + size,
            decoded=found.decoded + token_GNK[0].size,
            rounds=found.rounds + 1,
        )
        in_order = jax.tree.map(lambda x: x.swapaxes(0, 1), (latent_GNZ, token_GNK, uniform_GN))
        return jax.lax.scan(use, (found, candidate), in_order)[0]

    def searching(state) -> Array:
        found, _ = state
        return ~found.done & (found.draws + size <= budget)

    batch = len(h_BD)
    chunk = jax.eval_shape(lambda: model.draw(h_BD, 1, key_B))
    zero_B = jnp.zeros(batch, jnp.int32)
    candidate = _Candidate(
        jnp.zeros((batch, chunk.shape[-1]), jnp.int32), zero_B, zero_B > 0, zero_B
    )
    group = max(1, config.draws_at_once // size)
    found, candidate = jax.lax.while_loop(
        lambda state: searching(state).any(),
        lambda state: for_active(step, searching(state), group, (h_BD, key_B), state),
        (found, candidate),
    )
    if a:
        (end_key_B,) = keys(key_B, found.rounds, 1)
        is_over_B = ~found.done & (candidate.seen == n)
        # Keys of the choice by weight are those of a round more.
        found = found._replace(
            done=found.done | _undecided(is_over_B, a, end_key_B), rounds=found.rounds + 1
        )
    if reserve:
        found = from_pool(model, h_BD, key_B, found, reserve, config, leave_out=True)
    return finished(model, found, active_B)
