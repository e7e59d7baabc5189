"""Likelihood-free temperature sampling: a draw of p^(1/T), normalised, from draws of p alone (paper, section 5).

CALM can draw the next chunk from its distribution p, but cannot evaluate p. This module has the mathematics that turns
draws of p into a draw at temperature T, exactly or approximately: pure functions of how often each chunk was drawn.
exact.py and pools.py are the samplers, which draw from the model and call these functions.

B rows; a pool is N independent draws for a row; c is the count of a draw's chunk in its pool, C(c, n) a binomial
coefficient. `1/T = s = n + a` with n a whole number and 0 <= a < 1.
"""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from calm_jax.errors import UserError, shown


def check_temperature(temperature: float) -> None:
    """Raises `UserError` unless 0 < temperature <= 1."""
    if not 0 < temperature <= 1:
        raise UserError(
            f"temperature={shown(temperature)} must be in (0, 1]: draws can be sharpened, but neither flattened nor taken "
            "greedily"
        )


def split_exponent(temperature: float) -> tuple[int, float]:
    """`(n, a)` of `1/T = n + a`; a T that is 1/n rounded to some decimals (0.33, 0.143, 0.33333333) counts as 1/n."""
    check_temperature(temperature)
    # Larger exponents give the same weights: no pool holds 2^30 copies of a chunk.
    exponent = min(1 / temperature, 2.0**30)
    whole = round(exponent)
    # With few decimals only small n are unambiguous: 0.33 means a third, but 0.12 need not mean an eighth.
    is_rounded = any(
        whole**2 <= 10 ** (decimals - 1) and temperature == round(1 / whole, decimals)
        for decimals in range(2, 7)
    )
    if is_rounded or math.isclose(exponent, whole, rel_tol=1e-6):
        return whole, 0.0
    return math.floor(exponent), exponent - math.floor(exponent)


def equal(tokens_BNK: Array) -> Array:
    """Which draws of a pool are the same chunk, bool [B, N, N]."""
    # One token at a time: comparing whole chunks would hold [B, N, N, K].
    equal_BNN = jnp.ones((*tokens_BNK.shape[:2], tokens_BNK.shape[1]), bool)
    for tokens_BN in jnp.moveaxis(tokens_BNK, -1, 0):
        equal_BNN &= tokens_BN[:, :, None] == tokens_BN[:, None]
    return equal_BNN


def count_equal(tokens_BNK: Array) -> Array:
    """The count of each draw's chunk in its pool, itself included, int32 [B, N]."""
    return equal(tokens_BNK).sum(-1, dtype=jnp.int32)


# Computed in float64, because differences of float32 lgamma values would lose four digits.
_log_gamma = np.vectorize(math.lgamma, otypes=[float])


def _log_binomial(top: np.ndarray, bottom: np.ndarray, least: np.ndarray) -> np.ndarray:
    """log C(top, bottom) for real arguments, by Gamma functions; -inf where `top` is below `least`."""
    inside = top >= least
    top = np.where(inside, top, least)
    value = _log_gamma(top + 1) - _log_gamma(bottom + 1) - _log_gamma(top - bottom + 1)
    return np.where(inside, value, -np.inf)


def _weight_tables(
    whole: int, fraction: float, most: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Three tables of logarithms over counts c, float64 [most + 1]; n = `whole`, s = n + a.

    The first is the weight of a chunk at level n: C(c, s) for c > n, `(1-a)^2 C(c, s)` at c = n, 0 below. The factor at
    c = n makes the rule continuous in T; the square is fitted, not derived. The second is the weight that the chunk keeps
    when the chosen copies are left out of the pool: C(c-s, s), which is 0 for c < n, and so at all lower levels. The third
    is the weight at the lower levels m, where m is the largest count, so that only chunks with c = m have a weight:
    `(1-a)^2 C(c, c+a)`.
    """
    count, exponent = np.arange(most + 1.0), np.asarray(whole + fraction)
    at_level = 2 * math.log1p(-fraction)
    weight = _log_binomial(count, exponent, least=np.asarray(whole))
    weight += np.where(count == whole, at_level, 0)
    # C(c-s, s) falls smoothly to 0 at a pole of the Gamma function in its denominator; below the pole it is set to 0.
    above_pole = count - 2 * exponent + 1
    inside = above_pole > 0
    above_pole = np.where(inside, above_pole, 1)
    left = _log_gamma(above_pole + exponent) - _log_gamma(exponent + 1) - _log_gamma(above_pole)
    lower = _log_binomial(count, count + fraction, least=count) + at_level
    return weight, np.where(inside, left, -np.inf), lower


def groups(count_BN: Array, n: int) -> Array:
    """The number of groups of n equal draws in each pool, `sum_x C(c_x, n)`, float [B]."""
    num_draws = count_BN.shape[1]
    count = np.arange(num_draws + 1.0)
    table = _log_binomial(count, np.asarray(float(n)), least=np.asarray(n))
    # Capped at e^80, near the largest float32; callers compare the number with a small bound.
    groups_N = np.exp(np.minimum(table, 80))
    return (jnp.asarray(groups_N, float)[count_BN] / jnp.maximum(count_BN, 1)).sum(-1)


def log_weights(count_BN: Array, temperature: float, leave_out: bool) -> tuple[Array, Array]:
    """Weights for the choice of one draw from a pool: the paper's Algorithm 2, and ours with a smaller bias.

    For 1/T = n, a chunk seen c times has the weight C(c, n). If no chunk was seen n times, n-1 takes the place of n,
    and so on. For an exponent n + a between whole numbers, Gamma functions continue the binomials. A chunk's weight is
    split evenly over its c draws.

    Args:
        count_BN: int [B, N], the count of each draw's chunk in its pool; a draw with count 0 is not chosen.
        temperature: T in (0, 1].
        leave_out: whether to divide each weight by `1 + sum_y C(c_y, n) - C(c, n) + C(c-n, n)` (ours): 1 plus the sum of
            the weights of the pool after n copies of the chunk are removed. The bias of the choice, towards p, is then
            O(1/N^2); without it, O(1/N).

    Returns:
        Log-weights of the draws, float [B, N], not normalised; and the level, int [B]: the whole number that was used
        instead of n.
    """
    whole, fraction = split_exponent(temperature)
    tables = _weight_tables(whole, fraction, count_BN.shape[1])
    weight_BN, left_BN, lower_BN = (jnp.asarray(table, float)[count_BN] for table in tables)
    level_B = jnp.minimum(whole, count_BN.max(-1))
    level_B1 = level_B[:, None]
    lower_BN = jnp.where(count_BN == level_B1, lower_BN, -jnp.inf)
    weight_BN = jnp.where(level_B1 == whole, weight_BN, lower_BN)
    once_BN = jnp.maximum(count_BN, 1)
    if leave_out:
        # Relative to the row's largest weight, so that nothing overflows.
        largest_B1 = weight_BN.max(-1, keepdims=True)
        relative_BN = jnp.exp(weight_BN - largest_B1)
        sum_B1 = (relative_BN / once_BN).sum(-1, keepdims=True)
        others_BN = jnp.maximum(sum_B1 - relative_BN, 0)
        kept_BN = jnp.exp(left_BN - largest_B1)
        weight_BN -= jnp.log(jnp.exp(-largest_B1) + others_BN + kept_BN)
    return weight_BN - jnp.log(once_BN), level_B


def emission_probabilities(count_BN: Array, n: int) -> Array:
    """The probability with which a pool emits each of its draws; with the remaining probability it refuses (ours).

    A chunk that is emitted has exactly the distribution p^n, for any N.

    For each chunk x with c >= n, let `rest` be the pool without n of its copies. The pool emits x with probability

        C(c, n) / (left + C(r+n, n) - C(r, n)),   left = sum_y C(rest_y, n),   r = max(n-1, max_y rest_y).

    Why an emitted chunk has the distribution p^n: the denominator depends on `rest` alone, and `rest` is N-n independent draws
    of p whatever x is. Why the probabilities sum to at most 1: the denominator is at least `sum_y C(c_y, n)` of the
    whole pool. After a refusal a fresh pool can be tried, whose size may depend on the earlier pools.

    Args:
        count_BN: int [B, N], the count of each draw's chunk in its pool, at least 1; counts below n need not be exact.
        n: the whole exponent 1/T.

    Returns:
        float [B, N]. A chunk's probability is split evenly over its c draws; the probability of a refusal is 1 minus
        the sum over a row.
    """
    num_draws = count_BN.shape[1]
    if num_draws < n:
        return jnp.zeros(count_BN.shape)
    count = np.arange(num_draws + n + 1.0)
    table = jnp.asarray(_log_binomial(count, np.asarray(float(n)), least=np.asarray(n)), float)
    most_B1 = count_BN.max(-1, keepdims=True)
    largest_B1 = jnp.maximum(table[most_B1], 0)

    def binomial(count: Array) -> Array:
        """C(count, n), relative to the row's largest binomial."""
        return jnp.exp(table[count] - largest_B1)

    weight_BN = binomial(count_BN)
    sum_B1 = (weight_BN / count_BN).sum(-1, keepdims=True)
    # For each draw, the largest count of a chunk other than its own.
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
    """Emits a draw by `emission_probabilities`: its index, int [B], and whether the pool emits at all, bool [B].

    Where a pool refuses, the index is valid but has no meaning.
    """
    chex.assert_equal_shape_prefix([count_BN, key_B], 1)
    below_BN = jnp.cumsum(emission_probabilities(count_BN, n), axis=-1)
    uniform_B = jax.vmap(lambda key: jax.random.uniform(key, dtype=below_BN.dtype))(key_B)
    index_B = (below_BN <= uniform_B[:, None]).sum(-1)
    return jnp.minimum(index_B, count_BN.shape[1] - 1), index_B < count_BN.shape[1]


def pick(log_weight_BN: Array, key_B: Array) -> Array:
    """Chooses one draw per row by its weight: its index, int [B]."""
    return jax.vmap(jax.random.categorical)(key_B, log_weight_BN)


def patience(fraction: float, key_B: Array) -> Array:
    """How many draws R the fraction step may make before it rejects, float [B].

    The fraction step accepts a candidate chunk x with probability p(x)^a: the second step of the paper's Algorithm 1,
    a Bernoulli factory. There, draw i that is not x rejects with probability a/i. Equivalently, x is accepted when one
    of the next R draws is x, where R is drawn beforehand with `P(R > k) = prod_{j<=k} (1 - a/j)`: geometric, with a
    success probability from Beta(a, 1-a). The mean of R is infinite.

    Args:
        fraction: a, in (0, 1).
        key_B: one key per row.
    """

    def draw(key: Array) -> Array:
        rate_key, key = jax.random.split(key)
        rate = jax.random.beta(rate_key, fraction, 1 - fraction)
        # The smallest k with (1 - rate)^k <= u; a rate that is rounded to 1 stops at the first draw.
        u = jax.random.uniform(key, minval=jnp.finfo(jnp.float32).tiny)
        return jnp.maximum(jnp.ceil(jnp.log(u) / jnp.log1p(-rate)), 1)

    return jax.vmap(draw)(key_B)
