"""BrierLM of single chunks: its terms from given samples, its score and standard error, the frequency floor."""

import collections
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calm_jax import brier
from calm_jax.sampling.chunk_model import ChunkModel

# A known distribution over chunks that share prefixes of every length; the last chunk has probability 0.
CHUNKS = np.array(
    [[0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 1, 0], [0, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1]], np.int32
)
PROBS = np.array([0.35, 0.2, 0.15, 0.2, 0.1, 0.0])


sums_of = jax.jit(brier.block_sums)


@jax.jit
def terms_of(sample_PSK, target_PK):
    """The Brier terms of given samples, [P, 4]; each position is a block of two chunks, of which the second is scored."""
    sample_PSK, target_PK = jnp.asarray(sample_PSK), jnp.asarray(target_PK)
    positions, num_samples, _ = sample_PSK.shape

    def advance(tokens_BLK, memory):
        return jnp.zeros((*tokens_BLK.shape[:2], 1)), memory

    # A position's "key" is its index, by which its samples are looked up.
    model = ChunkModel(
        latents=lambda h_PD, num_draws, key_P, noise_scale: sample_PSK[key_P],
        unfold=lambda latent_RK: latent_RK[..., None],
        argmax_tokens=lambda x, prior: x[..., 0],
        advance=advance,
        empty_cache=None,
        fork=None,
        log_probs=None,
        prior=None,
    )
    token_BLK = jnp.stack([target_PK, target_PK], axis=1)
    key_BLJ = jnp.arange(positions)[:, None, None]
    reading = brier.read(model, token_BLK, None)
    protocol = brier.Protocol(num_samples)
    terms_BP4 = brier.brier_terms(model, token_BLK, reading, key_BLJ, protocol, 1, 1)
    return terms_BP4[:, 0]


def test_blocks_that_are_too_short_for_an_ngram_have_no_score():
    token_BLK = jnp.zeros((3, 2, 2), jnp.int32)
    model = ChunkModel(*[None] * 8)
    protocol, key_BLJ = brier.Protocol(2), jnp.zeros((3, 1, 2))
    reading = brier.Reading(jnp.zeros((3, 1, 1)), None)
    terms_BP4 = brier.brier_terms(model, token_BLK, reading, key_BLJ, protocol, 1, 1)
    starts_P = protocol.starts(4, 2)
    counted_BP4 = brier.counted(token_BLK.reshape(3, 4), starts_P, pad_id=9)
    assert math.isnan(brier.score(brier.block_sums(terms_BP4, counted_BP4)).brierlm)


def expected_terms() -> np.ndarray:
    """`2 p_n(y) - sum p_n^2` for each chunk as the target and n = 1..4, [6, 4]."""
    terms = np.zeros((len(CHUNKS), 4))
    for n in range(1, 5):
        prefix = collections.Counter()
        for chunk, prob in zip(CHUNKS, PROBS, strict=True):
            prefix[tuple(chunk[:n])] += prob
        collision = sum(prob**2 for prob in prefix.values())
        terms[:, n - 1] = [2 * prefix[tuple(chunk[:n])] - collision for chunk in CHUNKS]
    return terms


@pytest.mark.parametrize("num_samples", [2, 3])
def test_terms_are_unbiased_by_enumeration(num_samples):
    """Over every tuple of draws with its probability: exact, not random."""
    tuples = list(itertools.product(range(5), repeat=num_samples))
    weight = np.prod(PROBS[np.array(tuples)], axis=1)
    sample_PSK = CHUNKS[np.array(tuples)]
    for target, expected in zip(CHUNKS, expected_terms(), strict=True):
        target_PK = np.tile(target, (len(tuples), 1))
        terms = np.asarray(terms_of(sample_PSK, target_PK), np.float64)
        np.testing.assert_allclose(weight @ terms, expected, atol=1e-6)


def random_chunks(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2, shape).astype(np.int32)


@pytest.mark.parametrize("chunk_size", [4, 6])
def test_two_samples_are_the_published_estimator(chunk_size):
    """`1[a=y] + 1[b=y] - 1[a=b]` over the first n tokens; tokens after the fourth are ignored."""
    sample, target = random_chunks(200, 2, chunk_size), random_chunks(200, chunk_size, seed=1)
    terms = np.asarray(terms_of(sample, target))
    for n in range(1, 5):
        a, b, y = sample[:, 0, :n], sample[:, 1, :n], target[:, :n]
        published = (a == y).all(-1) * 1.0 + (b == y).all(-1) - (a == b).all(-1)
        np.testing.assert_array_equal(terms[:, n - 1], published)
    assert set(np.unique(terms)) == {-1.0, 0.0, 1.0}


def test_terms_of_many_samples_equal_brute_force():
    sample, target = random_chunks(30, 5, 4), random_chunks(30, 4, seed=1)
    terms = np.asarray(terms_of(sample, target))
    for position, n in itertools.product(range(30), range(1, 5)):
        prefixes = [tuple(chunk[:n]) for chunk in sample[position]]
        match = np.mean([prefix == tuple(target[position, :n]) for prefix in prefixes])
        collision = np.mean([a == b for a, b in itertools.permutations(prefixes, 2)])
        assert terms[position, n - 1] == pytest.approx(2 * match - collision, abs=1e-6)


def test_certain_samples_score_one_where_right_and_minus_one_where_wrong():
    sample = np.zeros((2, 3, 4), np.int32)
    target = np.array([[0, 0, 0, 0], [0, 0, 9, 0]], np.int32)
    np.testing.assert_array_equal(terms_of(sample, target), [[1, 1, 1, 1], [1, 1, -1, -1]])


# --- The score ----------------------------------------------------------------------------------


def random_terms(blocks=40, positions=25, seed=0, ragged=True) -> tuple[np.ndarray, np.ndarray]:
    """Random terms, positive on average and correlated within a block, and which of them count."""
    rng = np.random.default_rng(seed)
    level_B4 = np.array([0.5, 0.4, 0.3, 0.25]) + rng.normal(0, 0.08, (blocks, 1))
    terms = level_B4[:, None] + rng.normal(0, 0.3, (blocks, positions, 4))
    counted = np.ones(terms.shape, bool)
    if ragged:
        length = rng.integers(3, positions + 1, (blocks, 1, 1))
        counted = (np.arange(positions)[:, None] < length) & (rng.random(terms.shape) < 0.95)
    return terms.astype(np.float32), counted


def score_of(terms: np.ndarray, counted: np.ndarray) -> brier.Score:
    return brier.score(sums_of(terms, counted))


def averages(terms, counted) -> np.ndarray:
    return np.where(counted, terms, 0).sum((0, 1), dtype=np.float64) / counted.sum((0, 1))


def test_score_is_the_geometric_mean_of_the_averages():
    terms, counted = random_terms()
    mean_4 = averages(terms, counted)
    score = score_of(terms, counted)
    np.testing.assert_allclose(score.brier, mean_4, rtol=1e-5)
    assert score.brierlm == pytest.approx(100 * np.prod(mean_4) ** 0.25, rel=1e-5)


def test_standard_errors_follow_the_delta_method_with_blocks_as_clusters():
    terms, counted = random_terms()
    blocks = len(terms)
    mean_4 = averages(terms, counted)
    count_4 = counted.sum((0, 1))
    residual_B4 = np.where(counted, terms - mean_4, 0).sum(1, dtype=np.float64) / count_4
    correct = blocks / (blocks - 1)
    score = score_of(terms, counted)
    np.testing.assert_allclose(
        score.brier_error, np.sqrt(correct * (residual_B4**2).sum(0)), rtol=1e-3
    )
    brierlm = 100 * np.prod(mean_4) ** 0.25
    influence_B = brierlm / 4 * (residual_B4 / mean_4).sum(1)
    expected = np.sqrt(correct * (influence_B**2).sum())
    assert score.standard_error == pytest.approx(expected, rel=1e-3)


def test_the_standard_error_is_near_the_jackknifes():
    """The jackknife leaves out one block at a time, and equals the delta method up to order 1 / blocks."""
    terms, counted = random_terms(blocks=80)
    scores = []
    for block in range(80):
        rest = np.arange(80) != block
        scores.append(100 * np.prod(averages(terms[rest], counted[rest])) ** 0.25)
    jackknife = np.sqrt(79 / 80 * ((scores - np.mean(scores)) ** 2).sum())
    assert score_of(terms, counted).standard_error == pytest.approx(jackknife, rel=0.04)


def test_the_standard_error_for_blocks_of_equal_weight_has_a_simple_formula():
    """`BrierLM/4 * sd over blocks of (sum_n b_n / mean b_n) / sqrt(blocks)`."""
    terms, counted = random_terms(ragged=False)
    block_B4 = terms.mean(1, dtype=np.float64)
    mean_4 = block_B4.mean(0)
    spread = (block_B4 / mean_4).sum(1).std(ddof=1)
    expected = 100 * np.prod(mean_4) ** 0.25 / 4 * spread / np.sqrt(len(terms))
    score = score_of(terms, counted)
    assert score.standard_error == pytest.approx(expected, rel=1e-3)
    np.testing.assert_allclose(
        score.brier_error, block_B4.std(0, ddof=1) / np.sqrt(len(terms)), rtol=1e-3
    )


@pytest.mark.parametrize(
    "means",
    [(0.5, 0.3, 0.2, 0.0), (0.5, 0.3, 0.2, -0.1), (0.5, 0.3, -0.2, -0.1), (-1, -1, -1, -1)],
)
def test_score_is_zero_when_any_factor_is_not_positive(means):
    """Two negative factors have a positive product, which the published code takes for a score."""
    terms = np.stack([np.full((3, 4), 0.0), np.full((3, 4), 2.0)]) * np.array(means)
    score = score_of(terms.astype(np.float32), np.ones((2, 3, 4), bool))
    assert score.brierlm == 0.0
    assert np.isnan(score.standard_error)
    np.testing.assert_allclose(score.brier, means, rtol=1e-6)
    # For two blocks with the values 0 and 2 m, the standard error of their mean is |m|.
    np.testing.assert_allclose(score.brier_error, np.abs(means), rtol=1e-5)


def test_a_single_block_has_a_score_without_a_standard_error():
    terms, counted = random_terms(blocks=1)
    score = score_of(terms, counted)
    assert score.brierlm > 0
    assert np.isnan(score.standard_error) and np.isnan(score.brier_error).all()


def test_a_split_without_counted_n_grams_scores_nan():
    terms, counted = random_terms()
    counted[..., 3] = False
    score = score_of(terms, counted)
    assert np.isnan(score.brierlm) and np.isnan(score.standard_error)


def test_equal_blocks_have_the_standard_error_zero():
    score = score_of(np.full((40, 25, 4), 0.25, np.float32), np.ones((40, 25, 4), bool))
    assert score.brierlm == pytest.approx(25)
    assert score.standard_error == pytest.approx(0, abs=1e-6)
    assert score.brier_error == pytest.approx((0,) * 4, abs=1e-8)


def test_a_variance_that_rounding_makes_negative_counts_as_zero():
    sums = sums_of(np.full((40, 25, 4), 0.25, np.float32), np.ones((40, 25, 4), bool))
    rounded = np.asarray(sums.product).copy()
    np.fill_diagonal(rounded, np.nextafter(rounded.diagonal(), np.float32(0)))
    score = brier.score(sums._replace(product=rounded))
    assert score.standard_error == pytest.approx(0, abs=0.02)
    assert score.brier_error == pytest.approx((0,) * 4, abs=2e-4)


def test_a_score_has_named_values_for_metrics():
    terms, counted = random_terms()
    score = score_of(terms, counted)
    values = brier.as_values(score)
    assert values["brierlm"] == score.brierlm
    assert values["brierlm_error"] == score.standard_error
    for n in range(1, 5):
        assert values[f"brier_{n}"] == score.brier[n - 1]
        assert values[f"brier_{n}_error"] == score.brier_error[n - 1]


def test_terms_that_do_not_count_are_ignored_even_if_nan():
    terms, counted = random_terms()
    noise = np.where(counted, terms, np.nan).astype(np.float32)
    assert score_of(noise, counted) == score_of(terms, counted)


def test_blocks_without_a_counted_position_do_not_change_the_score_or_its_error():
    terms, counted = random_terms()
    with_filler = np.concatenate([terms, np.ones_like(terms[:5])])
    filler_counted = np.concatenate([counted, np.zeros_like(counted[:5])])
    np.testing.assert_allclose(
        score_of(with_filler, filler_counted)[:2], score_of(terms, counted)[:2], rtol=1e-5
    )


def test_block_sums_of_parts_add_up_to_those_of_the_whole():
    terms, counted = random_terms(blocks=13)
    whole = sums_of(terms, counted)
    parts = [slice(0, 1), slice(1, 6), slice(6, 13)]
    sums = [sums_of(terms[part], counted[part]) for part in parts]
    added = jax.tree.map(lambda *xs: sum(xs), *sums)
    for one, other in zip(added, whole, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-3)
    assert int(added.blocks) == 13
    np.testing.assert_array_equal(whole.total[4:], counted.sum((0, 1)))


# --- Pads -----------------------------------------------------------------------------------------

PAD = 9


def test_pads_do_not_change_the_score():
    """A model that predicts every pad scores no better, one that predicts none no worse."""
    targets = random_chunks(6, 10, 4)
    samples = random_chunks(6, 10, 2, 4, seed=1)
    samples[:, :4] = targets[:, :4, None]
    scores = []
    for guess in (PAD, 1):
        padded = np.concatenate([targets, np.full_like(targets, PAD)], axis=1)
        guesses = np.concatenate([samples, np.full_like(samples, guess)], axis=1)
        terms = terms_of(guesses.reshape(-1, 2, 4), padded.reshape(-1, 4))
        counted = brier.counted(padded.reshape(6, -1), np.arange(0, 80, 4), PAD)
        scores.append(score_of(terms.reshape(6, 20, 4), counted))
    terms = terms_of(samples.reshape(-1, 2, 4), targets.reshape(-1, 4))
    scores.append(score_of(terms.reshape(6, 10, 4), np.ones((6, 10, 4), bool)))
    assert scores[0].brierlm > 0
    assert scores[0] == scores[1] == scores[2]


# --- The frequency floor ------------------------------------------------------------------------


def test_the_frequency_floor_equals_brute_force():
    rng = np.random.default_rng(0)
    # Skewed, so that n-grams repeat; some target tokens do not occur in the training text.
    train = rng.choice(3, (300, 4), p=[0.8, 0.15, 0.05])
    targets = rng.choice(4, (5, 12, 4), p=[0.8, 0.1, 0.05, 0.05])
    counted = rng.random((5, 12, 4)) < 0.8
    terms = np.zeros((5, 12, 4))
    for n in range(1, 5):
        seen = collections.Counter(tuple(gram[:n].tolist()) for gram in train)
        collision = sum((count / 300) ** 2 for count in seen.values())
        for block, position in itertools.product(range(5), range(12)):
            frequency = seen[tuple(targets[block, position, :n].tolist())] / 300
            terms[block, position, n - 1] = 2 * frequency - collision
    floor = brier.frequency_floor(train.astype(np.int32), targets.astype(np.int32), counted)
    expected = averages(terms, counted)
    assert (expected > 0).all()
    np.testing.assert_allclose(floor.brier, expected, rtol=1e-5)
    assert floor.brierlm == pytest.approx(100 * np.prod(expected) ** 0.25, rel=1e-5)
    assert floor.standard_error == pytest.approx(
        score_of(terms.astype(np.float32), counted).standard_error, rel=1e-3
    )


def test_the_frequency_floor_distinguishes_n_grams_of_large_ids():
    """Four ids of a real vocabulary do not fit into one 64-bit number."""
    rng = np.random.default_rng(1)
    ids = np.array([0, 1, 65_536, 128_255, 128_256])
    train, target = ids[rng.integers(5, size=(400, 4))], ids[rng.integers(5, size=(1, 50, 4))]
    assert not {tuple(gram) for gram in target[0].tolist()} <= set(map(tuple, train.tolist()))
    counted = np.ones((1, 50, 4), bool)
    large = brier.frequency_floor(train.astype(np.int32), target.astype(np.int32), counted)
    small = brier.frequency_floor(
        np.searchsorted(ids, train), np.searchsorted(ids, target), counted
    )
    assert large.brier == small.brier


def test_the_frequency_floor_of_no_training_text_is_0():
    target, counted = np.ones((1, 3, 4), np.int32), np.ones((1, 3, 4), bool)
    assert brier.frequency_floor(np.empty((0, 4), np.int32), target, counted).brier == (0,) * 4
