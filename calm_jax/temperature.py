"""Likelihood-free temperature: from draws of p alone, a draw of p^(1/T), exactly or nearly (paper, section 5).

Pure functions of how often each draw's chunk stands in its pool; `calm_jax.samplers` does the drawing.
B rows, N draws a row (the pool), c the count of a draw's chunk in its pool, C(c, n) binomials. Write
`1/T = s = n + a` with n whole and 0 <= a < 1.
"""

import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from calm_jax.errors import UserError


def check_temperature(temperature: float) -> None:
    """Raises `UserError` unless 0 < temperature <= 1."""
    if not 0 < temperature <= 1:
        raise UserError(
            f"temperature={temperature:g} must be in (0, 1]: draws can be sharpened, not flattened"
        )


def split_exponent(temperature: float) -> tuple[int, float]:
    """`(n, a)` of `1/T = n + a`; a T that is 1/n rounded (0.33, 0.143, 0.33333333) counts as 1/n."""
    check_temperature(temperature)
    # No pool holds a chunk as often as that, so what lies beyond makes no difference.
    exponent = min(1 / temperature, 2.0**30)
    whole = round(exponent)
    # Of few decimals only small n are meant: 0.33 is a third, but 0.12 need not be an eighth.
    is_rounded = any(
        whole**2 <= 10 ** (decimals - 1) and temperature == round(1 / whole, decimals)
        for decimals in range(2, 7)
    )
    if is_rounded or math.isclose(exponent, whole, rel_tol=1e-6):
        return whole, 0.0
    return math.floor(exponent), exponent - math.floor(exponent)


def count_equal(tokens_BNK: Array) -> Array:
    """How often each draw's chunk stands in its pool, [B, N] int32; at least 1."""
    # One token at a time: the comparison of whole chunks would hold [B, N, N, K].
    equal_BNN = jnp.ones((*tokens_BNK.shape[:2], tokens_BNK.shape[1]), bool)
    for tokens_BN in jnp.moveaxis(tokens_BNK, -1, 0):
        equal_BNN &= tokens_BN[:, :, None] == tokens_BN[:, None]
    return equal_BNN.sum(-1, dtype=jnp.int32)


# Summed in float64: float32's own lgamma would lose four digits.
_log_gamma = np.vectorize(math.lgamma, otypes=[float])


def _log_binomial(top: np.ndarray, bottom: np.ndarray, least: np.ndarray) -> np.ndarray:
    """log C(top, bottom) by Gamma functions; -inf where `top` is below `least`."""
    inside = top >= least
    top = np.where(inside, top, least)
    value = _log_gamma(top + 1) - _log_gamma(bottom + 1) - _log_gamma(top - bottom + 1)
    return np.where(inside, value, -np.inf)


@functools.lru_cache
def _weight_tables(whole: int, fraction: float, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Logarithms over levels m = 0 .. `whole` and counts c = 0 .. `most`, for the exponent m + a.

    First a chunk's weight, C(c, m + a); at c = m it is `(1-a)^2` of that (a fitted factor, which makes
    the rule continuous in T) and below it nothing. Then what is left of the chunk's weight without the
    copies that were chosen, C(c-s, s) with s = m + a.
    """
    level, count = np.arange(whole + 1.0)[:, None], np.arange(most + 1.0)
    exponent = level + fraction
    weight = _log_binomial(count, exponent, least=level)
    weight += np.where(count == level, 2 * math.log1p(-fraction), 0)
    # Nothing from the pole of the Gamma function on, down to which the binomial falls smoothly.
    above_pole = count - 2 * exponent + 1
    inside = above_pole > 0
    above_pole = np.where(inside, above_pole, 1)
    left = _log_gamma(above_pole + exponent) - _log_gamma(exponent + 1) - _log_gamma(above_pole)
    return weight, np.where(inside, left, -np.inf)


def groups(count_BN: Array, n: int) -> Array:
    """How many groups of n equal draws each pool holds, `sum_x C(c_x, n)`, float [B]."""
    num_draws = count_BN.shape[1]
    count = np.arange(num_draws + 1.0)
    table = _log_binomial(count, np.asarray(float(n)), least=np.asarray(n))
    # Nobody counts further than that, and float32 does not reach far further.
    groups_N = np.exp(np.minimum(table, 80))
    return (jnp.asarray(groups_N, float)[count_BN] / jnp.maximum(count_BN, 1)).sum(-1)


def log_weights(count_BN: Array, temperature: float, leave_out: bool) -> tuple[Array, Array]:
    """Log-weights of each *draw* of one pool for the choice among them, [B, N], and the level used, [B].

    For 1/T = n a chunk seen c times has weight C(c, n); if none was seen n times, n-1 takes its place,
    and so on: the paper's Algorithm 2. Between whole n binomials go on by Gamma functions. The law is
    biased towards p by O(1/N). leave_out: weights divided by what the rest of the pool adds up to,
    `1 + sum_y C(c_y, n) - C(c, n) + C(c-n, n)`, which leaves a bias of O(1/N^2) (ours).
    A chunk's weight is split evenly over its c draws; a draw with count 0 does not take part.
    """
    whole, fraction = split_exponent(temperature)
    num_draws = count_BN.shape[1]
    tables = _weight_tables(min(whole, num_draws), fraction, num_draws)
    weight_table, left_table = (jnp.asarray(table, float) for table in tables)
    level_B = jnp.minimum(whole, count_BN.max(-1))
    once_BN = jnp.maximum(count_BN, 1)
    weight_BN = weight_table[level_B[:, None], count_BN]
    if leave_out:
        # Relative to the row's largest, so that nothing overflows.
        largest_B1 = weight_BN.max(-1, keepdims=True)
        relative_BN = jnp.exp(weight_BN - largest_B1)
        sum_B1 = (relative_BN / once_BN).sum(-1, keepdims=True)
        left_BN = jnp.exp(left_table[level_B[:, None], count_BN] - largest_B1)
        others_BN = jnp.maximum(sum_B1 - relative_BN, 0)
        weight_BN -= jnp.log(jnp.exp(-largest_B1) + others_BN + left_BN)
    return weight_BN - jnp.log(once_BN), level_B


def emission_probabilities(count_BN: Array, n: int) -> Array:
    """With which probability each draw is emitted, [B, N]; what is missing to 1 is a refusal (ours).

    A pool emits a chunk with probability proportional to p^n, exactly, whatever N is: chunk x with

        C(c, n) / (left + C(r+n, n) - C(r, n)),   rest = the pool without n copies of x,
        left = sum_y C(rest_y, n),   r = max(n-1, max_y rest_y),

    whose denominator depends on the rest alone, which are N-n draws of p whatever x is, and is at least
    the pool's own sum. A refusal says nothing about a fresh pool, whose size may depend on it. Counts
    below n make no difference. A chunk's probability is split evenly over its c draws.
    """
    num_draws = count_BN.shape[1]
    if num_draws < n:
        return jnp.zeros(count_BN.shape)
    count = np.arange(num_draws + n + 1.0)
    table = jnp.asarray(_log_binomial(count, np.asarray(float(n)), least=np.asarray(n)), float)
    most_B1 = count_BN.max(-1, keepdims=True)
    largest_B1 = jnp.maximum(table[most_B1], 0)

    def binomial(count: Array) -> Array:
        """C(count, n) over that of the row's largest count."""
        return jnp.exp(table[count] - largest_B1)

    weight_BN = binomial(count_BN)
    sum_B1 = (weight_BN / count_BN).sum(-1, keepdims=True)
    # The largest count among the other chunks.
    is_most_BN = count_BN == most_B1
    second_B1 = jnp.where(is_most_BN, 0, count_BN).max(-1, keepdims=True)
    is_only_most_BN = is_most_BN & (is_most_BN.sum(-1, keepdims=True) == most_B1)
    others_BN = jnp.where(is_only_most_BN, second_B1, most_B1)
    left_own_BN = jnp.maximum(count_BN - n, 0)
    r_BN = jnp.maximum(n - 1, jnp.maximum(others_BN, left_own_BN))
    left_BN = jnp.maximum(sum_B1 - weight_BN, 0) + binomial(left_own_BN)
    bound_BN = left_BN + binomial(r_BN + n) - binomial(r_BN)
    return jnp.where(count_BN >= n, weight_BN / bound_BN / count_BN, 0)


def emit(count_BN: Array, n: int, key_B: Array) -> tuple[Array, Array]:
    """A draw's index by its emission probability, [B], and whether there is one or the pool refuses, bool [B]."""
    chex.assert_equal_shape_prefix([count_BN, key_B], 1)
    below_BN = jnp.cumsum(emission_probabilities(count_BN, n), axis=-1)
    uniform_B = jax.vmap(lambda key: jax.random.uniform(key, dtype=below_BN.dtype))(key_B)
    index_B = (below_BN <= uniform_B[:, None]).sum(-1)
    return jnp.minimum(index_B, count_BN.shape[1] - 1), index_B < count_BN.shape[1]


def pick(log_weight_BN: Array, key_B: Array) -> Array:
    """A draw's index by its weight, [B]."""
    return jax.vmap(jax.random.categorical)(key_B, log_weight_BN)


def patience(fraction: float, key_B: Array) -> Array:
    """How many draws R the fraction step may make, float [B]: `P(R > k) = prod_{j<=k} (1 - a/j)`.

    A chunk x is accepted when one of R draws is x: with probability p(x)^a, as in the second step of
    the paper's Algorithm 1. R is geometric with a success probability drawn from Beta(a, 1-a); its mean
    is infinite.
    """

    def draw(key: Array) -> Array:
        rate_key, key = jax.random.split(key)
        rate = jax.random.beta(rate_key, fraction, 1 - fraction)
        # The smallest k with (1 - rate)^k <= u; a rate that is rounded to 1 stops at the first draw.
        u = jax.random.uniform(key, minval=jnp.finfo(jnp.float32).tiny)
        return jnp.maximum(jnp.ceil(jnp.log(u) / jnp.log1p(-rate)), 1)

    return jax.vmap(draw)(key_B)
