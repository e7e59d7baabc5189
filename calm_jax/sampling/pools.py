"""Samplers that choose by weight from one pool: `one_pool`, `growing`, and `complete_chunk` for a partly given chunk."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from calm_jax.sampling import temperature as law
from calm_jax.sampling.chunk_model import ChunkModel
from calm_jax.sampling.config import SamplerConfig
from calm_jax.sampling.counting import is_first_of
from calm_jax.sampling.search import (
    FIRST_POOL,
    Sampled,
    finished,
    for_active,
    from_pool,
    keys,
    most_drawn,
    new_search,
    no_candidates,
    take_draw,
)

# A growing pool is large enough when it holds this many groups of n equal draws.
_ENOUGH_COLLISIONS = 16


def one_pool(leave_out: bool) -> Callable[..., Sampled]:
    """A sampler that chooses by weight from one pool of N = `num_candidates` draws.

    Args:
        leave_out: leave-out weights (ours), for any T, with a bias of O(1/N^2); otherwise the paper's Algorithm 2, for
            T = 1/n, with a bias of O(1/N). See `temperature.log_weights`.
    """

    def sample(
        model: ChunkModel, h_BD: Array, key_B: Array, active_B: Array, config: SamplerConfig
    ) -> Sampled:
        found = new_search(model, h_BD, key_B, active_B, config)
        found = from_pool(model, h_BD, key_B, found, config.num_candidates, config, leave_out)
        return finished(model, h_BD, found, active_B)

    return sample


class Prefix(NamedTuple):
    """The first tokens of each row's next chunk.

    Attributes:
        tokens: int32 [B, K]; those after the first `length` are ignored.
        length: int32 [B], how many tokens are given, 0 to K.
    """

    tokens: Array
    length: Array


def complete_chunk(
    model: ChunkModel,
    h_BD: Array,
    key_B: Array,
    active_B: Array,
    config: SamplerConfig,
    prefix: Prefix,
) -> tuple[Array, Sampled]:
    """The next chunk given its first tokens, chosen among the draws that begin with them (ours).

    The pool doubles until enough of its draws fit the prefix: one draw at T = 1, and at T < 1 a number of groups of n
    equal draws. Leave-out weights choose among them. At T = 1 the distribution is exactly p given the prefix; at T < 1 it
    approximates the normalised power s of that distribution. `config.sampler` is not used.

    Args:
        model: the model's `ChunkModel` interface.
        h_BD: hidden states.
        key_B: one key per row.
        active_B: bool; the other rows get an undefined chunk, and nothing is drawn for them.
        config: the temperature and the budget `max_draws`. The scale of the model's token prior is not used: the model has it
            already.
        prefix: the given tokens.

    Returns:
        Whether a draw fitted the prefix, bool [B], and the chunks; the chunk of a row without a fitting draw is
        undefined.
    """
    n, a = law.split_exponent(config.temperature)
    # If s is not a whole number, groups of n + 1 equal draws are needed; at T = 1 a single draw is enough.
    together = n + (a > 0)
    enough = _ENOUGH_COLLISIONS if together > 1 else 1
    batch, chunk_size = prefix.tokens.shape
    sizes = [min(FIRST_POOL, config.max_draws)]
    while sizes[-1] < config.max_draws:
        sizes.append(min(2 * sizes[-1], config.max_draws))
    found = new_search(model, h_BD, key_B, active_B, config)
    found = found._replace(candidates=no_candidates(prefix.tokens, config))
    pool_BNK = jnp.zeros((batch, sizes[-1], chunk_size), jnp.int32)
    before = 0
    state = found, pool_BNK, jnp.zeros_like(prefix.tokens), jnp.zeros(batch, bool)
    for size in sizes:

        def step(given, state, before=before, size=size):
            h_GD, key_G, prefix = given
            found, pool_GNK, _, _ = state
            draw_key_G, pick_key_G = keys(key_G, found.rounds, 2)
            new_GNK = model.draw(h_GD, size - before, draw_key_G)
            pool_GNK = pool_GNK.at[:, before:size].set(new_GNK)
            drawn_GNK = pool_GNK[:, :size]
            is_free_GK = jnp.arange(chunk_size) >= prefix.length[:, None]
            fits_GNK = (drawn_GNK == prefix.tokens[:, None]) | is_free_GK[:, None]
            equal_GNN = law.equal(drawn_GNK)
            count_GN = jnp.where(fits_GNK.all(-1), equal_GNN.sum(-1, dtype=jnp.int32), 0)
            weight_GN, _ = law.log_weights(count_GN, config.temperature, leave_out=True)
            index_G = law.pick(weight_GN, pick_key_G)
            found = found._replace(
                draws=found.draws + size - before,
                decoded=found.decoded + new_GNK[0].size,
                rounds=found.rounds + 1,
                done=law.groups(count_GN, together) >= enough,
                candidates=most_drawn(drawn_GNK, count_GN, is_first_of(equal_GNN), config),
            )
            return found, pool_GNK, take_draw(pool_GNK, index_G), count_GN.any(-1)

        group = max(1, config.draws_at_once // (size - before))
        state = for_active(step, ~state[0].done, group, (h_BD, key_B, prefix), state)
        before = size
    found, _, tokens_BK, fits_B = state
    return fits_B, Sampled(
        tokens_BK,
        found.draws,
        found.decoded,
        fits_B & active_B & (config.temperature == 1),
        found.candidates,
    )


def growing(
    model: ChunkModel, h_BD: Array, key_B: Array, active_B: Array, config: SamplerConfig
) -> Sampled:
    """One pool that doubles until it holds enough groups of n equal draws; leave-out weights choose from it (ours).

    Approximately `p^s`; meant for a tight budget at T <= 1/3.
    """
    chunk = jax.eval_shape(lambda: model.draw(h_BD, 1, key_B))
    anything = Prefix(
        jnp.zeros((len(h_BD), chunk.shape[-1]), jnp.int32), jnp.zeros(len(h_BD), jnp.int32)
    )
    return complete_chunk(model, h_BD, key_B, active_B, config, anything)[1]
