"""Likelihood-free temperature sampling: from draws of p alone, a draw of (nearly) p^(1/T) (paper, section 5).

B rows, N draws a row (the pool), K tokens a chunk. Write `1/T = n + a` with n whole and 0 <= a < 1.
"""

import math
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax import Array

from calm_jax.errors import UserError


class Choice(NamedTuple):
    """What was chosen from each row's pool.

    tokens: [B, K]. count: [B], how often the chosen chunk stands in its pool. level: [B], the n that
    was used: lower than asked for where no chunk stands n times in the pool.
    """

    tokens: Array
    count: Array
    level: Array


def check_temperature(temperature: float) -> None:
    """Raises `UserError` unless 0 < temperature <= 1."""
    if not 0 < temperature <= 1:
        raise UserError(
            f"temperature={temperature:g} must be in (0, 1]: draws can be sharpened, not flattened"
        )


def split_exponent(temperature: float) -> tuple[int, float]:
    """`(n, a)` of `1/T = n + a`; a T within rounding of 1/n (0.33333333) counts as 1/n."""
    check_temperature(temperature)
    # No pool holds a chunk as often as that, so what lies beyond makes no difference.
    exponent = min(1 / temperature, 2.0**30)
    whole = round(exponent)
    if math.isclose(exponent, whole, rel_tol=1e-6):
        return whole, 0.0
    return math.floor(exponent), exponent - math.floor(exponent)


def count_equal(tokens_BNK: Array) -> Array:
    """How often each draw's chunk stands in its pool, [B, N] int32; at least 1."""
    # One token at a time: the comparison of whole chunks would hold [B, N, N, K].
    equal_BNN = jnp.ones((*tokens_BNK.shape[:2], tokens_BNK.shape[1]), bool)
    for tokens_BN in jnp.moveaxis(tokens_BNK, -1, 0):
        equal_BNN &= tokens_BN[:, :, None] == tokens_BN[:, None]
    return equal_BNN.sum(-1, dtype=jnp.int32)


def batch_log_weights(count_BN: Array, temperature: float) -> tuple[Array, Array]:
    """Log-weights of the batch rule for each *draw*, [B, N] float32, and the level used, [B].

    For 1/T = n the paper's Algorithm 2: a chunk seen c times has weight C(c, n); if none was seen n
    times, n-1 takes its place, and so on. A chunk's weight is split evenly over its c draws.
    Biased towards p for a finite pool, asymptotically right. Between whole n the weight is
    `Gamma(c+1) / Gamma(c+1-1/T)`, times `(1-a)^2` at c = n (a fitted factor; it makes the rule
    continuous in T).
    """
    whole, fraction = split_exponent(temperature)
    level_B = jnp.minimum(whole, count_BN.max(-1))
    level_B1 = level_B[:, None]
    count = count_BN.astype(jnp.float32)
    above_BN = count - level_B1
    weight_BN = jax.lax.lgamma(count + 1) - jax.lax.lgamma(jnp.maximum(above_BN, 0) + 1 - fraction)
    # The normaliser keeps C(c, n) instead of c! / (c-n)!, so that weights stay of the order of one.
    weight_BN -= jax.lax.lgamma(level_B1 + 1.0)
    weight_BN += jnp.where(above_BN == 0, 2 * math.log1p(-fraction), 0)
    weight_BN = jnp.where(above_BN < 0, -jnp.inf, weight_BN)
    return weight_BN - jnp.log(count), level_B


def choose(tokens_BNK: Array, temperature: float, key_B: Array) -> Choice:
    """Chooses one chunk from each row's pool by the batch rule; a row's choice depends on its own key."""
    chex.assert_rank(tokens_BNK, 3)
    chex.assert_equal_shape_prefix([tokens_BNK, key_B], 1)
    with jax.named_scope("temperature"):
        count_BN = count_equal(tokens_BNK)
        weight_BN, level_B = batch_log_weights(count_BN, temperature)
        index_B = jax.vmap(jax.random.categorical)(key_B, weight_BN)
        pick = jax.vmap(lambda row, index: row[index])
        return Choice(pick(tokens_BNK, index_B), pick(count_BN, index_B), level_B)
