"""The next chunk of each row at a temperature: `sample_chunk`, and `SAMPLERS`, the ways to get it (paper, section 5).

p is the model's law of the next chunk, which can be drawn from and not evaluated; T the temperature;
`1/T = s = n + a` with n whole and 0 <= a < 1. B rows, G of them together, N draws of each (a pool),
K tokens a chunk. A row's draws come from its own key, so its chunk does not depend on its neighbours.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from calm_jax import temperature as law
from calm_jax.errors import UserError
from calm_jax.sampling import ChunkModel, count_draws, for_active

# The first and the largest of fresh pools, and how they grow. Contexts of trained models are mostly either so peaked
# that the first pool emits or so flat that many draws tell little: fewer, larger steps waste least (measured).
_FIRST_POOL, _LARGEST_POOL, _GROWTH = 16, 1024, 4
# Bounds of what is asked for: draws of a chunk, and draws that are compared each with each (16 MiB for 4096).
_MOST_DRAWS, MOST_COMPARED = 2**24, 4096
# Draws made together where they are used one after the other.
_BLOCK = 16
# A growing pool is large enough when it holds this many groups of n equal draws.
_ENOUGH_COLLISIONS = 16


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


class Sampled(NamedTuple):
    """tokens: [B, K], the next chunk. draws: [B], latents drawn for it. decoded: [B], tokens decoded for it.

    exact: [B], whether an exact sampler came to its end within its budget. For whole 1/T such a chunk has the law
    `p^(1/T)`; between, long searches end first, and those are of rare chunks.
    """

    tokens: Array
    draws: Array
    decoded: Array
    exact: Array


class _Found(NamedTuple):
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


def _keys(key_B: Array, rounds_B: Array, num: int) -> Array:
    """Fresh keys for each row's next round, [num, B]."""
    round_key_B = jax.vmap(jax.random.fold_in)(key_B, rounds_B)
    return jax.vmap(lambda key: jax.random.split(key, num), out_axes=1)(round_key_B)


def _nothing(model: ChunkModel, h_BD: Array, key_B: Array, active_B: Array) -> _Found:
    latent = jax.eval_shape(lambda: model.latents(h_BD, 1, key_B, 1))
    zero_B = jnp.zeros(len(h_BD), jnp.int32)
    return _Found(
        jnp.zeros((len(h_BD), latent.shape[-1]), latent.dtype),
        draws=zero_B,
        decoded=zero_B,
        exact=zero_B > 0,
        done=~active_B,
        level=zero_B,
        rounds=zero_B,
    )


def _finished(model: ChunkModel, found: _Found, active_B: Array) -> Sampled:
    """Decodes what was found."""
    tokens_BK = model.decode(found.latent[:, None])[:, 0]
    decoded_B = found.decoded + tokens_BK.shape[1] * active_B
    return Sampled(tokens_BK, found.draws, decoded_B, found.exact & active_B)


def _take(latent_GNZ: Array, index_G: Array) -> Array:
    return jnp.take_along_axis(latent_GNZ, index_G[:, None, None], axis=1)[:, 0]


def _at_noise(
    model: ChunkModel, h_BD: Array, key_B: Array, active_B: Array, config: SamplerConfig
) -> Sampled:
    """One draw with the head's noise times T: the paper's suggestion, no power of p."""
    found = _nothing(model, h_BD, key_B, active_B)
    latent_B1Z = model.latents(h_BD, 1, key_B, config.temperature)
    found = found._replace(
        latent=latent_B1Z[:, 0],
        draws=active_B.astype(jnp.int32),
        exact=active_B & (config.temperature == 1),
    )
    return _finished(model, found, active_B)


def _from_pool(
    model: ChunkModel,
    h_BD: Array,
    key_B: Array,
    found: _Found,
    size: int,
    config: SamplerConfig,
    leave_out: bool,
) -> _Found:
    """Chooses from one pool by weight, for the rows that are not done."""

    def step(given: tuple[Array, Array], found: _Found) -> _Found:
        h_GD, key_G = given
        draw_key_G, pick_key_G = _keys(key_G, found.rounds, 2)
        latent_GNZ = model.latents(h_GD, size, draw_key_G, 1)
        counted = count_draws(model, latent_GNZ, company=2)
        weight_GN, _ = law.log_weights(counted.count, config.temperature, leave_out)
        return found._replace(
            latent=_take(latent_GNZ, law.pick(weight_GN, pick_key_G)),
            draws=found.draws + size,
            decoded=found.decoded + counted.decoded,
            done=jnp.ones_like(found.done),
        )

    group = max(1, config.draws_at_once // size)
    return for_active(step, ~found.done, group, (h_BD, key_B), found)


def _one_pool(leave_out: bool) -> "_Sampler":
    """One pool of `num_candidates`, from which weights choose.

    leave_out: any T, `p^s` with a bias of O(1/N^2) (ours); else the paper's Algorithm 2, weights C(c, n), T = 1/n,
    bias of O(1/N).
    """

    def sample(
        model: ChunkModel, h_BD: Array, key_B: Array, active_B: Array, config: SamplerConfig
    ) -> Sampled:
        found = _nothing(model, h_BD, key_B, active_B)
        found = _from_pool(model, h_BD, key_B, found, config.num_candidates, config, leave_out)
        return _finished(model, found, active_B)

    return sample


def _reserve(config: SamplerConfig, least: int) -> int:
    """Draws kept back for a choice by weight where an exact search, which needs `least`, may end without a pool."""
    return max(0, min(config.num_candidates, config.max_draws // 2, config.max_draws - least))


def pool_sizes(max_draws: int) -> tuple[int, ...]:
    """16, 64, 256, 1024 as far as `max_draws` reach; the last of them but the first takes what would be left over."""
    if max_draws < 2 * _FIRST_POOL:
        return (max_draws,)
    sizes = [_FIRST_POOL]
    while sum(sizes) + _GROWTH * sizes[-1] <= max_draws and sizes[-1] < _LARGEST_POOL:
        sizes.append(_GROWTH * sizes[-1])
    left = max_draws - sum(sizes)
    if len(sizes) == 1:
        sizes.append(left)
    elif sizes[-1] < _LARGEST_POOL:
        sizes[-1] += left
    return tuple(sizes)


def _pooled(
    model: ChunkModel, h_BD: Array, key_B: Array, active_B: Array, config: SamplerConfig
) -> Sampled:
    """Exactly `p^s` (ours): fresh pools of growing size until one emits, then Algorithm 1's fraction step.

    After `max_draws` the choice is by weight, leave-out, and counts as not exact: from the last pool
    where s is whole, else from draws kept back for it.
    """
    n, a = law.split_exponent(config.temperature)
    reserve = _reserve(config, n + 1) if a else 0
    budget = config.max_draws - reserve
    # Draws of the fraction step made together.
    block = min(_BLOCK, budget - n) if a else 0
    # A single draw has the law p.
    sizes = pool_sizes(budget - block) if n > 1 else (1,)
    last = len(sizes) - 1
    found = _nothing(model, h_BD, key_B, active_B)

    def affords(found: _Found) -> Array:
        return found.draws + jnp.asarray(sizes)[found.level] + block <= budget

    def try_pool(given: tuple[Array, Array], found: _Found, level: int) -> _Found:
        h_GD, key_G = given
        size = sizes[level]
        draw_key_G, emit_key_G, pick_key_G, fraction_key_G = _keys(key_G, found.rounds, 4)
        latent_GNZ = model.latents(h_GD, size, draw_key_G, 1)
        # The choice by weight may fall back to any level, so the last pool counts pairs, too.
        may_fall_back = level == last and not a
        counted = count_draws(model, latent_GNZ, company=2 if may_fall_back else n)
        index_G, emitted_G = law.emit(counted.count, n, emit_key_G)
        if may_fall_back:
            weight_GN, _ = law.log_weights(counted.count, config.temperature, leave_out=True)
            index_G = jnp.where(emitted_G, index_G, law.pick(weight_GN, pick_key_G))
        found = found._replace(
            latent=_take(latent_GNZ, index_G),
            draws=found.draws + size,
            decoded=found.decoded + counted.decoded,
            exact=emitted_G,
            level=jnp.minimum(found.level + ~emitted_G, last),
            rounds=found.rounds + 1,
        )
        if not a:
            return found._replace(done=found.exact)
        return _accept_fraction(model, h_GD, fraction_key_G, found, a, block, budget)

    def try_all(found: _Found) -> _Found:
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
        found = _from_pool(model, h_BD, key_B, found, reserve, config, leave_out=True)
    return _finished(model, found, active_B)


def _accept_fraction(
    model: ChunkModel,
    h_GD: Array,
    key_G: Array,
    found: _Found,
    a: float,
    block: int,
    budget: int,
) -> _Found:
    """Keeps `found.exact` of a chunk x with probability p(x)^a: if one of R draws is x (see `law.patience`).

    Where the budget ends before R draws are made, see `_undecided`.
    """
    patience_key_G, end_key_G, key_G = jax.vmap(lambda key: jax.random.split(key, 3), out_axes=1)(
        key_G
    )
    patience_G = law.patience(a, patience_key_G)
    tokens_GK = model.decode(found.latent[:, None])[:, 0]
    chunk_size = tokens_GK.shape[1]

    def searching(state: tuple[_Found, Array, Array]) -> Array:
        _, searching_G, _ = state
        return searching_G.any()

    def search(state: tuple[_Found, Array, Array]) -> tuple[_Found, Array, Array]:
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


def _rejection(
    model: ChunkModel, h_BD: Array, key_B: Array, active_B: Array, config: SamplerConfig
) -> Sampled:
    """Exactly `p^s`: the paper's Algorithm 1, its draws made in blocks and used in order.

    (1) n draws; unless all are equal, again. (2) For a > 0 and i = 1, 2, ...: a draw; if it is that chunk,
    done; else with probability a/i from (1) again. After `max_draws` the choice is by weight from draws
    kept back for it, and counts as not exact.
    """
    n, a = law.split_exponent(config.temperature)
    reserve = _reserve(config, n + (a > 0))
    budget = config.max_draws - reserve
    # A budget below one block is used up in one go.
    size = min(_BLOCK, budget)
    found = _nothing(model, h_BD, key_B, active_B)

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
        draw_key_G, uniform_key_G = _keys(key_G, found.rounds, 2)
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
        (end_key_B,) = _keys(key_B, found.rounds, 1)
        is_over_B = ~found.done & (candidate.seen == n)
        # Keys of the choice by weight are those of a round more.
        found = found._replace(
            done=found.done | _undecided(is_over_B, a, end_key_B), rounds=found.rounds + 1
        )
    if reserve:
        found = _from_pool(model, h_BD, key_B, found, reserve, config, leave_out=True)
    return _finished(model, found, active_B)


class Prefix(NamedTuple):
    """How the next chunk of each row has to begin. tokens: [B, K]. length: [B], how many of them are given."""

    tokens: Array
    length: Array


def _growing_pool(
    model: ChunkModel,
    h_BD: Array,
    key_B: Array,
    active_B: Array,
    config: SamplerConfig,
    prefix: Prefix,
) -> tuple[Array, Sampled]:
    """A choice by weight, leave-out, from one pool that doubles until it holds enough of what fits a prefix.

    Enough: a number of groups of n equal draws, at T = 1 one draw. First of the results: whether anything
    fits, bool [B].
    """
    n, a = law.split_exponent(config.temperature)
    # Between whole exponents as for the next one; at T = 1 a single draw tells all.
    together = n + (a > 0)
    enough = _ENOUGH_COLLISIONS if together > 1 else 1
    batch, chunk_size = prefix.tokens.shape
    sizes = [min(_FIRST_POOL, config.max_draws)]
    while sizes[-1] < config.max_draws:
        sizes.append(min(2 * sizes[-1], config.max_draws))
    found = _nothing(model, h_BD, key_B, active_B)
    pool_BNK = jnp.zeros((batch, sizes[-1], chunk_size), jnp.int32)
    before = 0
    state = found, pool_BNK, jnp.zeros_like(prefix.tokens), jnp.zeros(batch, bool)
    for size in sizes:

        def step(given, state, before=before, size=size):
            h_GD, key_G, prefix = given
            found, pool_GNK, _, _ = state
            draw_key_G, pick_key_G = _keys(key_G, found.rounds, 2)
            new_GNK = model.draw(h_GD, size - before, draw_key_G)
            pool_GNK = pool_GNK.at[:, before:size].set(new_GNK)
            drawn_GNK = pool_GNK[:, :size]
            is_free_GK = jnp.arange(chunk_size) >= prefix.length[:, None]
            fits_GNK = (drawn_GNK == prefix.tokens[:, None]) | is_free_GK[:, None]
            count_GN = jnp.where(fits_GNK.all(-1), law.count_equal(drawn_GNK), 0)
            weight_GN, _ = law.log_weights(count_GN, config.temperature, leave_out=True)
            index_G = law.pick(weight_GN, pick_key_G)
            found = found._replace(
                draws=found.draws + size - before,
                decoded=found.decoded + new_GNK[0].size,
                rounds=found.rounds + 1,
                done=law.groups(count_GN, together) >= enough,
            )
            return found, pool_GNK, _take(pool_GNK, index_G), count_GN.any(-1)

        group = max(1, config.draws_at_once // (size - before))
        state = for_active(step, ~state[0].done, group, (h_BD, key_B, prefix), state)
        before = size
    found, _, tokens_BK, fits_B = state
    return fits_B, Sampled(
        tokens_BK,
        found.draws,
        found.decoded,
        fits_B & active_B & (config.temperature == 1),
    )


def _growing(
    model: ChunkModel, h_BD: Array, key_B: Array, active_B: Array, config: SamplerConfig
) -> Sampled:
    """One pool that doubles until it holds enough groups of n equal draws; then the choice is by weight, leave-out.

    Nearly `p^s`, for a tight budget at T <= 1/3 (ours).
    """
    chunk = jax.eval_shape(lambda: model.draw(h_BD, 1, key_B))
    anything = Prefix(
        jnp.zeros((len(h_BD), chunk.shape[-1]), jnp.int32), jnp.zeros(len(h_BD), jnp.int32)
    )
    return _growing_pool(model, h_BD, key_B, active_B, config, anything)[1]


def complete_chunk(
    model: ChunkModel,
    h_BD: Array,
    key_B: Array,
    active_B: Array,
    config: SamplerConfig,
    prefix: Prefix,
) -> tuple[Array, Sampled]:
    """The next chunk given its first tokens, by drawing and keeping what begins so (ours).

    Whether any of at most `max_draws` draws did, bool [B]; without one the chunk is not defined. The law
    is p given the prefix, exactly, at T = 1, and nearly its power s below, whatever `sampler` is.
    """
    return _growing_pool(model, h_BD, key_B, active_B, config, prefix)


_Sampler = Callable[[ChunkModel, Array, Array, Array, SamplerConfig], Sampled]
SAMPLERS: dict[str, _Sampler] = {
    "pooled": _pooled,
    "batch": _one_pool(leave_out=True),
    "published": _one_pool(leave_out=False),
    "rejection": _rejection,
    "growing": _growing,
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
