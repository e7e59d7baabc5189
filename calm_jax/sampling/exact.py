"""Exact samplers at a temperature: `pooled` (ours) and `rejection` (the paper's Algorithm 1).

p is the model's distribution of the next chunk, T the temperature; `1/T = s = n + a` with n a whole number and
0 <= a < 1. B rows, G of them computed together, N draws of each (a pool), K tokens per chunk. `active_B` is true for
the rows that need a chunk; the other rows make no draws, and their chunk is undefined.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from calm_jax.sampling import temperature as law
from calm_jax.sampling.chunk_model import ChunkModel
from calm_jax.sampling.config import MOST_COMPARED, SamplerConfig
from calm_jax.sampling.counting import count_draws
from calm_jax.sampling.search import (
    FIRST_POOL,
    Sampled,
    Search,
    finished,
    for_active,
    from_pool,
    kept_back,
    keys,
    most_drawn,
    new_search,
    take_draw,
)

# After each refusal the next pool is _GROWTH times as large, up to _LARGEST_POOL. In most contexts of trained models p
# is either so peaked that the first pool emits, or so flat that medium pools refuse too: few, large steps waste the
# fewest draws (measured).
_LARGEST_POOL, _GROWTH = 1024, 4
# Algorithm 1 uses draws one after the other; they are made in blocks of this many.
_BLOCK = 16


def pool_sizes(max_draws: int, n: int) -> tuple[int, ...]:
    """The sizes of successive pools for the exponent n: 16, 64, 256, 1024, with a sum of at most `max_draws`.

    For n > 8 the first has 2n - 1 draws, with which a model that is certain always emits (`temperature.emission_probabilities`),
    and the others are larger in proportion. If only the first pool fits, the draws that are left over make a second one.
    Otherwise they enlarge the last pool, unless it has 1024 or more. If `max_draws` is too small for two pools as large as
    the first, there is one pool of all draws. No pool has more than `MOST_COMPARED` draws, which are compared in pairs.
    """
    first = min(max(FIRST_POOL, 2 * n - 1), MOST_COMPARED)
    if max_draws < 2 * first:
        return (min(max_draws, MOST_COMPARED),)
    sizes = [first]
    while sum(sizes) + _GROWTH * sizes[-1] <= max_draws and sizes[-1] < _LARGEST_POOL:
        sizes.append(_GROWTH * sizes[-1])
    left = max_draws - sum(sizes)
    if len(sizes) == 1 and first < _LARGEST_POOL:
        sizes.append(left)
    elif sizes[-1] < _LARGEST_POOL:
        sizes[-1] = min(sizes[-1] + left, MOST_COMPARED)
    return tuple(sizes)


def pooled(
    model: ChunkModel, h_BD: Array, key_B: Array, active_B: Array, config: SamplerConfig
) -> Sampled:
    """A draw of exactly `p^s` (ours): fresh pools of growing size until one emits, then Algorithm 1's fraction step.

    Pools have `pool_sizes`, the last of which repeats while the budget lasts; if n = 1, each pool is one draw. A pool
    emits or refuses by `temperature.emit`. Where the budget `max_draws` ends first, the chunk is reported as not exact.
    It is chosen by leave-out weights: from the last pool if s is a whole number, else from draws reserved for that
    (`search.kept_back`). If the budget ends during the fraction step, the candidate may be kept instead (`accept_fraction`).
    """
    n, a = law.split_exponent(config.temperature)
    reserve = kept_back(config, n + 1) if a else 0
    budget = config.max_draws - reserve
    # The fraction step makes its draws in blocks of this size.
    block = min(_BLOCK, budget - n) if a else 0
    # For n = 1 one draw is enough: its distribution is p.
    sizes = pool_sizes(budget - block, n) if n > 1 else (1,)
    last = len(sizes) - 1
    found = new_search(model, h_BD, key_B, active_B, config)

    def affords(found: Search) -> Array:
        return found.draws + jnp.asarray(sizes)[found.level] + block <= budget

    def try_pool(given: tuple[Array, Array], found: Search, level: int) -> Search:
        h_GD, key_G = given
        size = sizes[level]
        draw_key_G, emit_key_G, pick_key_G, fraction_key_G = keys(key_G, found.rounds, 4)
        latent_GNZ = model.latents(h_GD, size, draw_key_G, 1)
        # The choice by weight may fall back to any level, so the last pool needs all counts from 2 on; so do candidates.
        may_fall_back = level == last and not a
        needs_all = may_fall_back or config.shown_candidates
        counted = count_draws(model, h_GD, latent_GNZ, min_count=2 if needs_all else n)
        index_G, emitted_G = law.emit(counted.count, n, emit_key_G)
        if may_fall_back:
            weight_GN, _ = law.log_weights(counted.count, config.temperature, leave_out=True)
            index_G = jnp.where(emitted_G, index_G, law.pick(weight_GN, pick_key_G))
        found = found._replace(
            latent=take_draw(latent_GNZ, index_G),
            draws=found.draws + size,
            decoded=found.decoded + counted.decoded,
            level=jnp.minimum(found.level + ~emitted_G, last),
            rounds=found.rounds + 1,
            candidates=most_drawn(latent_GNZ, counted.count, counted.is_first, config),
        )
        if not a:
            return found._replace(exact=emitted_G, done=emitted_G)
        return accept_fraction(model, h_GD, fraction_key_G, found, emitted_G, a, block, budget)

    def try_all(found: Search) -> Search:
        for level, size in enumerate(sizes):
            group = max(1, config.draws_at_once // max(size, block))
            found = for_active(
                lambda given, found, level=level: try_pool(given, found, level),  # type: ignore[misc]
                ~found.done & (found.level == level) & affords(found),
                group,
                (h_BD, key_B),
                found,
            )
        return found

    found = jax.lax.while_loop(lambda found: (~found.done & affords(found)).any(), try_all, found)
    if reserve:
        found = from_pool(model, h_BD, key_B, found, reserve, config, leave_out=True)
    return finished(model, h_BD, found, active_B)


def accept_fraction(
    model: ChunkModel,
    h_GD: Array,
    key_G: Array,
    found: Search,
    emitted_G: Array,
    a: float,
    block: int,
    budget: int,
) -> Search:
    """The fraction step: accepts the candidate chunk x of each row with probability p(x)^a, namely if one of R draws is x.

    R is drawn by `temperature.patience`. A row whose budget ends before R draws are made keeps its candidate, as not
    exact, with probability (1-a)^2 (see `_undecided`).

    Args:
        model: the model's `ChunkModel` interface.
        h_GD: hidden states of the rows.
        key_G: one key per row.
        found: the searches, none of which is exact yet.
        emitted_G: bool, the rows that have a candidate: `latent`, with the distribution p^n.
        a: the fraction, in (0, 1).
        block: how many draws are made at once.
        budget: the most draws that a row's whole search may make.

    Returns:
        The searches: `exact` and `done` where the candidate was accepted, `done` alone where it was kept at the end of
        the budget, and neither where it was rejected or there was none.
    """
    patience_key_G, end_key_G, key_G = jax.vmap(lambda key: jax.random.split(key, 3), out_axes=1)(
        key_G
    )
    patience_G = law.patience(a, patience_key_G)
    tokens_GK = model.decode(h_GD, found.latent[:, None])[:, 0]
    chunk_size = tokens_GK.shape[1]

    def searching(state: tuple[Search, Array, Array]) -> Array:
        _, searching_G, _ = state
        return searching_G.any()

    def search(state: tuple[Search, Array, Array]) -> tuple[Search, Array, Array]:
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

    found = found._replace(decoded=found.decoded + chunk_size * emitted_G)
    return jax.lax.while_loop(searching, search, (found, emitted_G, jnp.int32(0)))[0]


def _undecided(is_over_B: Array, a: float, key_B: Array) -> Array:
    """Which rows keep their candidate, as not exact, because the budget ended during its fraction step; bool [B].

    Dropping all of these candidates would favour frequent chunks, which are soon drawn again. Each is kept with
    probability (1-a)^2, the factor that `temperature.log_weights` gives to a chunk of count n for the same reason.
    """
    uniform_B = jax.vmap(jax.random.uniform)(key_B)
    return is_over_B & (uniform_B < (1 - a) ** 2)


class _Candidate(NamedTuple):
    """The state of Algorithm 1 in each row.

    Attributes:
        chunk: int32 [B, K], the candidate.
        seen: int32 [B], how many draws step (1) has used; n means that step (2) is running.
        equal: bool [B], whether all draws of step (1) so far are equal to the candidate.
        tries: int32 [B], how many draws step (2) has used.
    """

    chunk: Array
    seen: Array
    equal: Array
    tries: Array


def rejection(
    model: ChunkModel, h_BD: Array, key_B: Array, active_B: Array, config: SamplerConfig
) -> Sampled:
    """A draw of exactly `p^s` by the paper's Algorithm 1; draws are made in blocks and used in order.

    (1) Draw n chunks; unless all are equal, start again. Their chunk is the candidate. (2) If a > 0, for i = 1, 2, ...:
    draw a chunk; if it equals the candidate, accept; otherwise start again from (1) with probability a/i. Where the
    budget `max_draws` ends first, the chunk is reported as not exact. It is chosen by leave-out weights from draws
    reserved for that; a candidate in step (2) is kept instead with probability (1-a)^2 (see `_undecided`).
    """
    n, a = law.split_exponent(config.temperature)
    reserve = kept_back(config, n + (a > 0))
    budget = config.max_draws - reserve
    # A budget below one block is drawn as one smaller block.
    size = min(_BLOCK, budget)
    found = new_search(model, h_BD, key_B, active_B, config)

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
        # `fails`: step (1) ends without n equal draws. `gives_up`: step (2) rejects, and the search starts again from (1).
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
        token_GNK = model.decode(h_GD, latent_GNZ)
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
        # One more round, so that the choice by weight gets fresh keys.
        found = found._replace(
            done=found.done | _undecided(is_over_B, a, end_key_B), rounds=found.rounds + 1
        )
    if reserve:
        found = from_pool(model, h_BD, key_B, found, reserve, config, leave_out=True)
    return finished(model, h_BD, found, active_B)
