"""Likelihood-free temperature: the distribution of a choice from one pool, by enumerating all pools, and of the fraction step.

B rows, N draws per row, C chunks or cases, R trials. Seeds are fixed (see `laws.FALSE_ALARM`).
"""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from calm_jax.errors import UserError
from calm_jax.sampling import temperature
from tests.sampling.laws import FALSE_ALARM, FAR, PROBS, compositions, p_value, power


def pool(letters: str, chunk_size: int = 4) -> np.ndarray:
    """A pool with one chunk per letter, [N, K]; different letters differ only in the last token."""
    tokens = np.zeros((len(letters), chunk_size), np.int32)
    tokens[:, -1] = [ord(letter) - ord("A") for letter in letters]
    return tokens


def normalised(log_weight_BN: np.ndarray) -> np.ndarray:
    weight_BN = np.exp(log_weight_BN - log_weight_BN.max(1, keepdims=True))
    return weight_BN / weight_BN.sum(1, keepdims=True)


@functools.partial(jax.jit, static_argnums=(1, 2))
def log_weights(count_BN, temperature_, leave_out):
    return temperature.log_weights(count_BN, temperature_, leave_out)


def law_of_counts(count_BC, temperature_, leave_out=False) -> tuple[np.ndarray, np.ndarray]:
    """In float64, the probability of choosing each chunk from pools with these counts, [B, C]; and the levels, [B]."""
    count_BC = np.asarray(count_BC)
    # The N draws of each pool, chunk by chunk; shorter pools are filled with draws of count 0, which are not chosen.
    ends_BC = count_BC.cumsum(-1)
    chunk_BN = (np.arange(ends_BC.max())[:, None] >= ends_BC[:, None]).sum(-1)
    padded_BC = np.pad(count_BC, ((0, 0), (0, 1)))
    count_BN = np.take_along_axis(padded_BC, chunk_BN, axis=1)
    with jax.enable_x64(True):
        log_weight_BN, level_B = log_weights(count_BN, temperature_, leave_out)
    assert log_weight_BN.dtype == np.float64
    prob_BN = normalised(np.asarray(log_weight_BN))
    chunks = np.arange(count_BC.shape[1])[:, None, None]
    return np.where(chunk_BN == chunks, prob_BN, 0).sum(-1).T, np.asarray(level_B)


def counts_law(counts, temperature_, leave_out=False) -> np.ndarray:
    """The probability of choosing each chunk from one pool."""
    return law_of_counts([counts], temperature_, leave_out)[0][0]


def binomial(top: float, bottom: float) -> float:
    """`C(top, bottom)` by Gamma functions."""
    return math.exp(math.lgamma(top + 1) - math.lgamma(bottom + 1) - math.lgamma(top - bottom + 1))


def comb(top: int, bottom: int) -> int:
    return math.comb(top, bottom) if top >= bottom else 0


def reference_law(counts, temperature_, leave_out=False) -> np.ndarray:
    """As `counts_law`, one count at a time, straight from the formulas (`temperature.log_weights`)."""
    s = 1 / temperature_
    n = math.floor(s + 1e-6)
    a = 0.0 if abs(s - round(s)) < 1e-6 else s - n
    n = min(n, max(counts))
    weight = [
        0.0 if c < n else binomial(c, n + a) * ((1 - a) ** 2 if c == n else 1.0) for c in counts
    ]
    if leave_out:
        assert a == 0  # the formula is for whole exponents
        left = [comb(c - n, n) for c in counts]
        weight = [w / (1 + sum(weight) - w + rest) for w, rest in zip(weight, left, strict=True)]
    return np.array(weight) / sum(weight)


# --- How often draws are equal ------------------------------------------------------------------


@pytest.mark.parametrize("chunk_size", [1, 2, 4])
def test_count_equal_equals_brute_force(chunk_size):
    rng = np.random.default_rng(chunk_size)
    tokens = rng.integers(0, 3, (5, 30, chunk_size)).astype(np.int32)
    rows = [[tuple(chunk) for chunk in row] for row in tokens.tolist()]
    expected = [[row.count(chunk) for chunk in row] for row in rows]
    assert np.asarray(jax.jit(temperature.count_equal)(tokens)).tolist() == expected


def test_the_number_of_groups_is_the_sum_of_binomials_of_the_counts():
    """`sum_x C(c_x, n)`; draws with count 0 are in no group."""
    rows = [(5, 3, 2), (10,), (4, 4), (1,) * 10, (2, 2, 2, 2, 2), ()]
    count_BN = np.zeros((len(rows), 10), np.int32)
    for row, counts in enumerate(rows):
        count_BN[row, : sum(counts)] = np.repeat(counts, counts)
    for n in (1, 2, 3, 5, 11):
        expected = [sum(math.comb(c, n) for c in counts) for counts in rows]
        np.testing.assert_allclose(temperature.groups(count_BN, n), expected, rtol=1e-6)


def test_groups_of_a_large_pool_stay_finite():
    groups = np.asarray(temperature.groups(np.full((1, 1024), 1024, np.int32), 300))
    assert np.isfinite(groups).all() and (groups > 1e6).all()


# --- Exact from one pool: `emission_probabilities` ----------------------------------------------


@functools.partial(jax.jit, static_argnums=1)
def emission_of_pools(pool_BN, n):
    count_BN = temperature.count_equal(pool_BN[..., None])
    return temperature.emission_probabilities(count_BN, n)


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("num_draws", [2, 3, 4, 5, 6, 7, 8])
def test_emission_over_every_ordered_pool_is_proportional_to_the_power(num_draws, n):
    """For every pool size from n on, to 1e-12, for two distributions; a smaller pool always refuses."""
    pool_BN = np.array(list(itertools.product(range(3), repeat=num_draws)))
    with jax.enable_x64(True):
        prob_BN = np.asarray(emission_of_pools(pool_BN, n))
    assert (prob_BN >= 0).all() and (prob_BN.sum(-1) <= 1 + 1e-12).all()
    if num_draws < n:
        assert not prob_BN.any()
        return
    for probs in (PROBS, (0.7, 0.05, 0.25)):
        of_pool_B1 = np.prod(np.array(probs)[pool_BN], axis=1)[:, None]
        law = np.array([(of_pool_B1 * prob_BN)[pool_BN == chunk].sum() for chunk in range(3)])
        np.testing.assert_allclose(law / law.sum(), power(probs, n), rtol=0, atol=1e-12)
    # Some pools refuse; a pool of equal draws emits for certain once it is large enough.
    assert (prob_BN.sum(-1) < 0.999).any()
    if num_draws >= 2 * n - 1:
        assert prob_BN.sum(-1)[(pool_BN == 0).all(1)] == pytest.approx(1)


def emission_by_hand(counts, n):
    """The probability of emitting each chunk of one pool, straight from the formula."""
    probs = []
    for chunk, c in enumerate(counts):
        rest = [other - n * (i == chunk) for i, other in enumerate(counts)]
        if c < n:
            probs.append(0.0)
            continue
        left, r = sum(math.comb(y, n) for y in rest), max(n - 1, *rest)
        probs.append(math.comb(c, n) / (left + math.comb(r + n, n) - math.comb(r, n)))
    return probs


def test_emission_of_larger_pools_in_single_precision_follows_the_formula():
    """Also where several chunks share the largest count."""
    rows = [(20, 9, 4, 2, 1), (12, 12, 12), (18, 18), (36,), (30, 1, 5), (35, 1), (34, 2)]
    rows += [(1,) * 36, (2,) * 18, (3,) * 12, (2, *[1] * 34), (3, *[1] * 33)]
    count_BN = np.array([np.repeat(counts, counts) for counts in rows])
    for n in (2, 3, 7):
        prob_BN = jax.jit(temperature.emission_probabilities, static_argnums=1)(count_BN, n)
        expected = [
            np.repeat(np.array(emission_by_hand(counts, n)) / counts, counts) for counts in rows
        ]
        np.testing.assert_allclose(prob_BN, expected, rtol=2e-5, atol=1e-30)


def test_emission_of_a_thousand_draws_adds_up_to_at_most_one():
    """In single precision, although binomials reach 1e180: never NaN, and 1 when all draws are equal."""
    rng = np.random.default_rng(0)
    rows = [np.full(1024, 1024), np.ones(1024)]
    for share in (0.5, 0.9, 0.99):
        counts = rng.multinomial(1024, [share, *[(1 - share) / 20] * 20])
        rows.append(np.repeat(counts, counts))
    count_BN = np.array(rows, np.int32)
    for n in (2, 3, 40):
        prob_BN = np.asarray(temperature.emission_probabilities(count_BN, n))
        assert np.isfinite(prob_BN).all() and (prob_BN >= 0).all()
        sum_B = prob_BN.sum(-1)
        assert (sum_B < 1 + 1e-3).all()
        assert sum_B[0] == pytest.approx(1, rel=1e-3) and sum_B[1] == 0


@pytest.mark.parametrize("n", [2, 3, 5])
def test_counts_below_n_do_not_change_emission(n):
    """So that counting need not make them exact."""
    rng = np.random.default_rng(n)
    tokens_BN1 = rng.integers(0, 9, (300, 24, 1)) ** 2 // 8
    count_BN = np.asarray(temperature.count_equal(jnp.asarray(tokens_BN1)))
    other_BN = np.where(count_BN < n, rng.integers(1, n, count_BN.shape), count_BN)
    assert (other_BN != count_BN).any() or n == 2
    np.testing.assert_array_equal(
        temperature.emission_probabilities(jnp.asarray(count_BN), n),
        temperature.emission_probabilities(jnp.asarray(other_BN), n),
    )


def test_emit_draws_and_refuses_with_the_emission_probabilities():
    counts, rows = (5, 3, 1, 1), 20_000
    count_N = np.repeat(counts, counts)
    prob_N = np.repeat(np.array(emission_by_hand(counts, 2)) / counts, counts)
    key_B = jax.random.split(jax.random.key(4), rows)
    index_B, emitted_B = jax.jit(temperature.emit, static_argnums=1)(
        np.tile(count_N, (rows, 1)), 2, key_B
    )
    outcome_B = np.where(emitted_B, index_B, len(count_N))
    assert (np.asarray(index_B) < len(count_N)).all()  # also of a refusal
    expected = np.append(prob_N, 1 - prob_N.sum())
    assert expected[-1] > 0.05
    assert p_value(np.bincount(outcome_B, minlength=11), expected) > FALSE_ALARM


# --- A choice by weight: `log_weights` ----------------------------------------------------------


def test_algorithm_2_over_all_ordered_pools_has_its_known_law():
    """Every pool of 4 draws of (.5, .3, .2) with its probability, at T = 1/2: the first chunk has .59."""
    pool_BN = np.array(list(itertools.product(range(3), repeat=4)))
    count_BN = temperature.count_equal(jnp.asarray(pool_BN[..., None]))
    prob_BN = normalised(np.asarray(log_weights(count_BN, 1 / 2, False)[0], np.float64))
    of_pool_B = np.prod(np.array(PROBS)[pool_BN], axis=1)
    law = [(of_pool_B[:, None] * prob_BN)[pool_BN == chunk].sum() for chunk in range(3)]
    assert sum(law) == pytest.approx(1, abs=1e-6)
    assert law[0] == pytest.approx(0.59, abs=1e-6)


def expected_law(num_draws: int, temperature_: float, leave_out: bool) -> np.ndarray:
    """The distribution of a choice from one pool, over all counts with their multinomial probability."""
    counts_C3 = compositions(num_draws, 3)
    multinomial_C = scipy.stats.multinomial.pmf(counts_C3, num_draws, PROBS)
    return multinomial_C @ law_of_counts(counts_C3, temperature_, leave_out)[0]


# n, the pool's size, and the probability of the most likely chunk by Algorithm 2.
TABLE = [
    (2, 4, 0.59),
    (2, 10, 0.617446),
    (2, 20, 0.634718),
    (2, 50, 0.647705),
    (2, 100, 0.652621),
    (3, 10, 0.677294),
    (3, 20, 0.717494),
    (3, 50, 0.751677),
    (3, 100, 0.765643),
]


@pytest.mark.parametrize("n, num_draws, first", TABLE)
def test_algorithm_2_has_the_law_of_the_table(n, num_draws, first):
    """To half a unit of the last digit. For infinite pools the probabilities are .657895 and .78125."""
    law = expected_law(num_draws, 1 / n, leave_out=False)
    assert law.sum() == pytest.approx(1, abs=1e-12)
    assert law[0] == pytest.approx(first, abs=5.1e-7)


@pytest.mark.parametrize("leave_out", [False, True])
def test_a_choice_at_temperature_1_is_a_draw(leave_out):
    np.testing.assert_allclose(expected_law(10, 1, leave_out), PROBS, atol=1e-12)


def test_a_pool_of_two_at_one_half_is_a_draw():
    np.testing.assert_allclose(expected_law(2, 1 / 2, False), PROBS, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 3])
def test_leave_out_weights_have_a_smaller_bias_that_falls_faster(n):
    """In total variation from the power. The published bias falls like 1/N: to a fifth for five times the draws."""

    def bias(num_draws, leave_out):
        return np.abs(expected_law(num_draws, 1 / n, leave_out) - power(PROBS, n)).sum() / 2

    published = [bias(num_draws, False) for num_draws in (20, 100)]
    ours = [bias(num_draws, True) for num_draws in (20, 100)]
    assert ours[0] < 0.6 * published[0]
    assert ours[1] < 0.1 * published[1]
    assert published[1] > published[0] / 6
    assert ours[1] < ours[0] / 12


@pytest.mark.slow
def test_leave_out_weights_have_a_smaller_bias_for_real_exponents():
    """From 20 draws to 100 the bias falls to less than half, for every exponent."""
    for temperature_ in (0.99, 0.9, 0.8, 2 / 3, 0.55, 0.45, 0.4, 0.36):
        power_ = power(PROBS, 1 / temperature_)
        published, few, many = (
            np.abs(expected_law(num_draws, temperature_, leave_out) - power_).sum() / 2
            for num_draws, leave_out in ((100, False), (20, True), (100, True))
        )
        assert many < 0.5 * few + 1e-4, temperature_
        assert many < 0.5 * published + 1e-4, temperature_


def test_algorithm_2_on_an_example_pool():
    """{A,C,A,D,B,E,A,F,B,G} at n = 2: C(3,2) : C(2,2) = 3/4 : 1/4, all others 0."""
    count_BN = temperature.count_equal(jnp.asarray(pool("ACADBEAFBG")[None]))
    (prob_N,) = normalised(np.asarray(log_weights(count_BN, 1 / 2, False)[0], np.float64))
    expected = {"A": 3 / 4 / 3, "B": 1 / 4 / 2}
    np.testing.assert_allclose(prob_N, [expected.get(x, 0) for x in "ACADBEAFBG"], atol=1e-6)


@pytest.mark.parametrize(
    "counts, n, expected",
    [
        ((3, 2, 1), 3, (1, 0, 0)),
        ((3, 3), 3, (1 / 2, 1 / 2)),
        ((2, 2, 1, 1), 3, (1 / 2, 1 / 2, 0, 0)),
        ((1, 1, 1, 1), 3, (1 / 4,) * 4),
        ((4, 3, 2), 9, (1, 0, 0)),
        ((4, 3, 2), 3, (4 / 5, 1 / 5, 0)),
        ((4, 3, 2), 2, (6 / 10, 3 / 10, 1 / 10)),
        ((4, 3, 2), 1, (4 / 9, 3 / 9, 2 / 9)),
        ((1,), 5, (1,)),
    ],
)
def test_weights_are_binomials_and_fall_back_to_lower_levels(counts, n, expected):
    """C(c, n), with n-1 in place of n where no chunk has a count of n."""
    np.testing.assert_allclose(counts_law(counts, 1 / n), expected, atol=1e-12)


def test_leave_out_weights_by_hand():
    """Counts (4, 3, 2), n = 2: C(c, n) of 6, 3, 1, divided by the sums over the rest of the pool."""
    weights = 6 / (1 + 4 + 1), 3 / (1 + 7 + 0), 1 / (1 + 9 + 0)
    expected = np.array(weights) / sum(weights)
    np.testing.assert_allclose(counts_law((4, 3, 2), 1 / 2, leave_out=True), expected, rtol=1e-12)
    np.testing.assert_allclose(reference_law((4, 3, 2), 1 / 2, True), expected, rtol=1e-12)


@pytest.mark.parametrize("leave_out", [False, True])
def test_each_row_has_its_own_level(leave_out):
    count_BC = [[3, 1, 0, 0], [2, 1, 1, 0], [1, 1, 1, 1], [4, 0, 0, 0]]
    expected = [[1, 0, 0, 0], [1, 0, 0, 0], [1 / 4] * 4, [1, 0, 0, 0]]
    for temperature_ in (1 / 3, 0.3):
        prob_BC, level_B = law_of_counts(count_BC, temperature_, leave_out)
        assert level_B.tolist() == [3, 2, 1, 3]
        np.testing.assert_allclose(prob_BC, expected, atol=1e-12)


@pytest.mark.parametrize(
    "temperature_, leave_out",
    [
        *itertools.product([1, 0.95, 0.8, 0.6, 0.51, 0.5, 0.45, 0.4, 1 / 3, 0.15], [False]),
        *itertools.product([1, 1 / 2, 1 / 3, 1 / 7], [True]),
    ],
)
def test_weights_follow_the_formulas(temperature_, leave_out):
    """Of `log_weights`, at every level that these pools fall back to."""
    rows = [(1, 1), (1, 2), (3, 2, 1, 1), (2, 2, 1), (20, 9, 4, 2, 1), (60, 40, 7), (7, 6)]
    count_BC = np.array([counts + (0,) * (5 - len(counts)) for counts in rows])
    law_BC, _ = law_of_counts(count_BC, temperature_, leave_out)
    expected = [reference_law(counts, temperature_, leave_out) for counts in count_BC]
    np.testing.assert_allclose(law_BC, expected, rtol=1e-9, atol=1e-15)


def test_weights_in_single_precision_follow_the_formulas():
    """To 2e-4, in a pool of 1008; only the tables are computed in double precision."""
    counts = (500, 300, 150, 50, 5, 2, 1)
    count_BN = np.repeat(counts, counts)[None].astype(np.int32)
    for temperature_, leave_out in ((0.5, False), (0.5, True), (0.3, False), (1 / 3, True)):
        prob_N = normalised(np.asarray(log_weights(count_BN, temperature_, leave_out)[0]))[0]
        law = np.add.reduceat(prob_N, np.cumsum([0, *counts[:-1]]))
        np.testing.assert_allclose(
            law, reference_law(counts, temperature_, leave_out), rtol=2e-4, atol=1e-7
        )


def test_real_exponents_by_hand():
    """T = 2/3: s = 1.5; G(3)/G(1.5) against (1/4) G(2)/G(0.5), for c = 2 and 1."""
    weights = 2 / (math.sqrt(math.pi) / 2), 0.25 / math.sqrt(math.pi)
    expected = np.array(weights) / sum(weights)
    np.testing.assert_allclose(reference_law((2, 1), 2 / 3), expected, rtol=1e-12)
    np.testing.assert_allclose(counts_law((2, 1), 2 / 3), expected, rtol=1e-12)


@pytest.mark.parametrize("leave_out", [False, True])
@pytest.mark.parametrize("n", [2, 3])
def test_law_is_continuous_where_the_exponent_is_whole(n, leave_out):
    """From both sides, at distances from 1/n that are not rounded away; also with pools that fall back."""
    count_BC = [
        [1, 1, 1, 0, 0],
        [2, 1, 1, 0, 0],
        [3, 2, 1, 1, 0],
        [2, 2, 1, 0, 0],
        [12, 5, 3, 2, 1],
    ]
    exact, _ = law_of_counts(count_BC, 1 / n, leave_out)
    for side in (-1, 1):
        gaps = []
        for distance in (1.2e-2, 1.2e-5):
            near = (1 + side * distance) / n
            assert temperature.split_exponent(near)[1] != 0
            gaps.append(np.abs(law_of_counts(count_BC, near, leave_out)[0] - exact).max())
        assert gaps[1] < 1e-4
        assert gaps[1] < gaps[0] / 200


def test_a_lower_temperature_makes_the_most_frequent_chunk_more_likely():
    for leave_out in (False, True):
        first = [
            counts_law((30, 20, 10), t, leave_out)[0]
            for t in (1, 0.9, 0.7, 0.5, 0.45, 0.33, 0.2, 0.1)
        ]
        assert first == sorted(first)
        assert first[0] == pytest.approx(0.5, abs=1e-12)
        assert first[-1] > 0.98


def test_a_third_rounded_to_single_precision_counts_as_a_third():
    for counts in ((5, 4, 3, 2), (2, 1), (1, 1)):
        np.testing.assert_array_equal(counts_law(counts, 0.33333334), counts_law(counts, 1 / 3))


@pytest.mark.parametrize("leave_out", [False, True])
@pytest.mark.parametrize("tiny", [1e-3, 1e-10, 5e-324])
def test_tiny_temperatures_take_the_most_frequent_chunk(tiny, leave_out):
    assert counts_law((2, 3, 1), tiny, leave_out).tolist() == [0, 1, 0]


@pytest.mark.parametrize("temperature_", [1 / 2, 0.0021])
def test_the_tables_of_a_pool_grow_with_its_draws_and_not_with_their_square(temperature_):
    """At every temperature: a compiled program holds the tables, and a server compiles for those that clients ask for."""
    traced = jax.make_jaxpr(lambda count_BN: temperature.log_weights(count_BN, temperature_, True))(
        np.ones((1, 1000), np.int32)
    )
    sizes = [np.size(table) for table in traced.consts]
    assert sizes and max(sizes) <= 1001 and sum(sizes) <= 3 * 1001


@pytest.mark.parametrize("leave_out", [False, True])
def test_draws_with_count_0_are_not_chosen(leave_out):
    """At any place in the pool; the other draws have the distribution of a pool without them."""
    count_BN = np.array([[0, 3, 0, 2, 3, 2, 0, 3, 1], [0, 0, 1, 0, 0, 0, 1, 0, 0]])
    for temperature_ in (1, 1 / 2, 0.4):
        log_weight_BN, level_B = log_weights(count_BN, temperature_, leave_out)
        prob_BN = normalised(np.asarray(log_weight_BN, np.float64))
        assert not prob_BN[count_BN == 0].any()
        law = counts_law((3, 2, 1), temperature_, leave_out)
        by_count = [prob_BN[0][count_BN[0] == c].sum() for c in (3, 2, 1)]
        np.testing.assert_allclose(by_count, law, atol=1e-6)
        np.testing.assert_allclose(prob_BN[1], count_BN[1] / 2, atol=1e-6)
        assert level_B.tolist() == [min(3, int(1 / temperature_)), 1]


def test_pick_chooses_draws_with_their_weights():
    counts, rows = (5, 3, 2, 1), 20_000
    count_N = np.repeat(counts, counts)
    key_B = jax.random.split(jax.random.key(1), rows)
    for temperature_, leave_out in ((0.8, False), (0.3, False), (0.5, True)):
        weight_BN, _ = log_weights(count_N[None], temperature_, leave_out)
        index_B = jax.jit(temperature.pick)(jnp.tile(weight_BN, (rows, 1)), key_B)
        observed = np.bincount(index_B, minlength=len(count_N))
        law = reference_law(counts, temperature_, leave_out)
        assert p_value(observed, np.repeat(law / counts, counts)) > FALSE_ALARM


# --- The fraction step --------------------------------------------------------------------------


def sibuya_survival(fraction: float, most: int) -> np.ndarray:
    """`P(R > k) = prod_{j<=k} (1 - a/j)` for k = 0 .. most."""
    return np.cumprod([1, *(1 - fraction / np.arange(1, most + 1))])


@functools.lru_cache
def patience_of(fraction: float) -> np.ndarray:
    key_R = jax.random.split(jax.random.key(5), 50_000)
    return np.asarray(jax.jit(temperature.patience, static_argnums=0)(fraction, key_R))


@pytest.mark.slow
@pytest.mark.parametrize("fraction", [0.05, 0.3, 0.5, 0.9, 1e-4, 1 - 1e-4])
def test_patience_has_the_survival_function_of_the_bernoulli_factory(fraction):
    """From the first draw to the ten-thousandth: the mean of R is infinite, so the tail matters."""
    patience_R = patience_of(fraction)
    assert (patience_R >= 1).all()
    assert (np.trunc(patience_R) == patience_R).all()
    survival = sibuya_survival(fraction, 10_000)
    for k in (1, 2, 3, 5, 10, 100, 1000, 10_000):
        outlive = int((patience_R > k).sum())
        test = scipy.stats.binomtest(outlive, len(patience_R), survival[k])
        assert test.pvalue > FALSE_ALARM, k


def sequential_factory(prob: float, fraction: float, num: int) -> tuple[np.ndarray, np.ndarray]:
    """Runs the second step of Algorithm 1 draw by draw, `num` times: whether it accepts, and after how many draws."""
    rng = np.random.default_rng(6)
    accepts, draws = np.zeros(num, bool), np.zeros(num, int)
    going, i = np.arange(num), 0
    while len(going):
        i += 1
        match = rng.random(len(going)) < prob
        gives_up = ~match & (rng.random(len(going)) < fraction / i)
        accepts[going[match]] = True
        draws[going[match | gives_up]] = i
        going = going[~match & ~gives_up]
    return accepts, draws


@pytest.mark.slow
@pytest.mark.parametrize(
    "prob, fraction, accepted, mean_draws",
    [(0.25, 0.5, 0.5, 2.0), (0.1, 0.3, 0.50119, 5.0119), (0.5, 0.9, 0.53589, 1.07177)],
)
def test_patience_accepts_as_the_sequential_second_step_does(prob, fraction, accepted, mean_draws):
    """With probability p^a, after p^(a-1) draws on average; and the same joint distribution of both."""
    patience_R = patience_of(fraction)
    first_match_R = np.random.default_rng(7).geometric(prob, len(patience_R))
    draws_R = np.minimum(first_match_R, patience_R)
    accepts_R = first_match_R <= patience_R
    sequential = sequential_factory(prob, fraction, len(patience_R))
    for accepts, draws in ((accepts_R, draws_R), sequential):
        spread = math.sqrt(accepted * (1 - accepted) / len(draws))
        # 1e-5 for the digits of `accepted`.
        assert abs(accepts.mean() - accepted) < FAR * spread + 1e-5
        assert abs(draws.mean() - mean_draws) < FAR * draws.std() / math.sqrt(len(draws)) + 1e-4
    most = int(np.quantile(draws_R, 0.995))
    table = [
        np.bincount(2 * np.minimum(draws, most).astype(int) + accepts, minlength=2 * most + 2)[2:]
        for accepts, draws in ((accepts_R, draws_R), sequential)
    ]
    table = np.array(table)[:, np.sum(table, axis=0) > 20]
    assert scipy.stats.chi2_contingency(table).pvalue > FALSE_ALARM


# --- Temperatures -------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [0, 0.0, -0.5, 1.0001, 2, math.inf, -math.inf, math.nan])
def test_temperature_out_of_range_is_refused(bad):
    with pytest.raises(UserError, match=r"temperature=.* must be in \(0, 1\]"):
        temperature.check_temperature(bad)
    with pytest.raises(UserError):
        temperature.split_exponent(bad)


@pytest.mark.parametrize(
    "temperature_, n, a",
    [
        (1, 1, 0),
        (0.5, 2, 0),
        (0.1, 10, 0),
        (0.8, 1, 0.25),
        (0.4, 2, 0.5),
        (0.3, 3, 1 / 3),
        (0.33333334, 3, 0),
        (0.3333333, 3, 0),
        (0.33, 3, 0),
        (0.143, 7, 0),
        # Too few decimals to tell which fraction is meant.
        (0.12, 8, 1 / 3),
        (0.67, 1, 1 / 0.67 - 1),
        (0.999, 1, 1 / 999),
    ],
)
def test_split_exponent_takes_a_rounded_fraction_as_whole(temperature_, n, a):
    whole, fraction = temperature.split_exponent(temperature_)
    assert whole == n
    assert fraction == pytest.approx(a, abs=1e-9)
    assert (fraction == 0) == (a == 0)
