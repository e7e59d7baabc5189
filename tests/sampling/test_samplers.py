"""The samplers end to end, on known distributions: how their chunks are distributed, their cost, and their refusals.

B rows, N draws, C chunks, K tokens per chunk. Seeds are fixed (see `laws.FALSE_ALARM`).
"""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from calm_jax.errors import UserError
from calm_jax.sampling import exact, search, temperature
from calm_jax.sampling.chunk_model import ChunkModel
from calm_jax.sampling.config import MOST_COMPARED, SamplerConfig
from calm_jax.sampling.pools import Prefix, complete_chunk
from calm_jax.sampling.samplers import SAMPLERS, check_sampler, fewest_draws, sample_chunk
from tests.compiler_options import OPTIMISED
from tests.sampling import laws
from tests.sampling.laws import FALSE_ALARM, FAR, PROBS, compositions, known_model, model_of, power


def config_of(temperature_, sampler, **changes):
    values = {"num_candidates": 8, "max_draws": 48, "draws_at_once": 10**6, "top_p": 1.0}
    return SamplerConfig(temperature_, sampler, **(values | changes))


def compiled(function, rows):
    """Jits a function of so many rows; many compute for longer than optimising the program takes."""
    return jax.jit(function, compiler_options=OPTIMISED if rows >= 3000 else None)


def run(model, config, rows, law=0, seed=0, active=None):
    """Runs `sample_chunk`, traced anew: the indices of the sampled chunks [B], and `Sampled`."""
    h_BD = jnp.broadcast_to(jnp.asarray(law, jnp.float32), (rows,))[:, None]
    key_B = jax.random.split(jax.random.key(seed), rows)
    active_B = np.ones(rows, bool) if active is None else active
    sample = compiled(lambda *args: sample_chunk(model, *args, config), rows)
    sampled = jax.device_get(sample(h_BD, key_B, active_B))
    return number_of(sampled.tokens), sampled


def number_of(tokens_BK):
    return tokens_BK[:, 0] + 3 * tokens_BK[:, 1]


def p_value(number_B, law_C):
    """Of a chi-square test that the chunks' numbers are draws of a distribution."""
    return laws.p_value(np.bincount(number_B, minlength=len(law_C)), law_C)


def choice_law(counts, n, leave_out):
    """The distribution of a choice by weight from one pool at 1/T = n, straight from the formulas (`temperature.log_weights`)."""
    n = min(n, max(counts))
    weight = [math.comb(c, n) for c in counts]
    if leave_out:
        left = [math.comb(max(c - n, 0), n) for c in counts]
        weight = [w / (1 + sum(weight) - w + y) for w, y in zip(weight, left, strict=True)]
    return np.array(weight) / sum(weight)


def test_no_more_draws_are_kept_back_than_are_compared_in_pairs():
    config = config_of(0.4, "pooled", max_draws=2**22, num_candidates=2**20)
    assert search.kept_back(config, 3) == MOST_COMPARED


# --- Exact samplers -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "temperature_", [0.5, *(pytest.param(one, marks=pytest.mark.slow) for one in (0.8, 0.4, 0.3))]
)
@pytest.mark.parametrize("sampler", ["pooled", "rejection"])
def test_exact_samplers_draw_the_power_of_the_law(sampler, temperature_, monkeypatch):
    """With a budget that is never used up, pools that are small enough to refuse, and rows of two distributions."""
    monkeypatch.setattr(exact, "FIRST_POOL", 4)
    monkeypatch.setattr(exact, "_LARGEST_POOL", 8)
    monkeypatch.setattr(exact, "_BLOCK", 4)
    both, rows = (PROBS, (0.1, 0.45, 0.25, 0.2)), 8000
    law_B = np.arange(rows) % 2
    config = config_of(temperature_, sampler, max_draws=4000, num_candidates=1)
    number_B, sampled = run(known_model(*both), config, rows, law_B)
    assert sampled.exact.all()
    assert (sampled.draws > 8).mean() > 0.01  # some rows needed a second pool
    for index, law in enumerate(both):
        expected = power(law, 1 / temperature_)
        assert p_value(number_B[law_B == index], expected) > FALSE_ALARM


@pytest.mark.slow
@pytest.mark.parametrize("sampler, n", [("pooled", 2), ("pooled", 3), ("rejection", 3)])
def test_exact_rows_draw_the_power_where_other_rows_exhaust_their_budget(sampler, n):
    """For whole exponents, where the length of a search is independent of the chunk that it finds."""
    law = np.arange(1.0, 13) ** -0.3
    law /= law.sum()
    config = config_of(1 / n, sampler, max_draws={2: 7, 3: 48}[n])
    number_B, sampled = run(known_model(law), config, 12_000)
    assert 0.05 < sampled.exact.mean() < 0.95
    assert p_value(number_B[sampled.exact], power(law, n)) > FALSE_ALARM
    # A control of the flag and of the statistical test: rows that are not exact have another distribution.
    assert p_value(number_B[~sampled.exact], power(law, n)) < FALSE_ALARM


@pytest.mark.slow
def test_when_the_last_pool_refuses_its_chunk_is_chosen_by_leave_out_weights():
    """The distribution of the refused rows, from all possible counts of one pool of 5."""
    number_B, sampled = run(known_model(PROBS), config_of(1 / 2, "pooled", max_draws=5), 12_000)
    assert 0.1 < sampled.exact.mean() < 0.9
    law = np.zeros(3)
    for counts in compositions(5, 3):
        count_N = np.repeat(counts, counts)
        emitted_N = np.asarray(temperature.emission_probabilities(jnp.asarray([count_N]), 2))[0]
        refused = 1 - emitted_N.sum()
        law += scipy.stats.multinomial.pmf(counts, 5, PROBS) * refused * choice_law(counts, 2, True)
    assert 1 - sampled.exact.mean() == pytest.approx(law.sum(), abs=0.03)
    assert p_value(number_B[~sampled.exact], law / law.sum()) > FALSE_ALARM


@pytest.mark.slow
@pytest.mark.parametrize(
    "temperature_, expected", [(0.8, 4.18659), (0.5, 5.26316), (0.4, 10.68745), (0.3, 26.90975)]
)
def test_rejection_takes_the_expected_number_of_draws(temperature_, expected, monkeypatch):
    """`(n + [a > 0] sum p^(s-1)) / sum p^s` (paper, section 5), with blocks of one draw."""
    monkeypatch.setattr(exact, "_BLOCK", 1)
    config = config_of(temperature_, "rejection", max_draws=2000, num_candidates=1)
    _, sampled = run(known_model(PROBS), config, 4000)
    assert sampled.exact.all()
    draws_B = sampled.draws
    assert abs(draws_B.mean() - expected) < FAR * draws_B.std() / math.sqrt(len(draws_B))
    # Every draw is decoded, and at the end the chosen latent again.
    np.testing.assert_array_equal(sampled.decoded, 2 * (draws_B + 1))


@pytest.mark.parametrize("prob, a", [(0.25, 0.5), (0.1, 0.3), (0.5, 0.9)])
def test_the_fraction_step_accepts_a_chunk_with_probability_p_to_the_a(prob, a):
    """With draws made in blocks of 8."""
    rows, model = 8000, known_model((prob, 1 - prob))
    h_B1, key_B = jnp.zeros((rows, 1)), jax.random.split(jax.random.key(2), rows)
    found = search.new_search(model, h_B1, key_B, np.ones(rows, bool), config_of(0.5, "rejection"))
    # Every fifth row has no candidate.
    emitted_B = np.arange(rows) % 5 > 0

    @jax.jit
    def accept(found):
        return exact.accept_fraction(model, h_B1, key_B, found, emitted_B, a, 8, 10**6)

    accepted = jax.device_get(accept(found))
    test = scipy.stats.binomtest(int(accepted.exact.sum()), int(emitted_B.sum()), prob**a)
    assert test.pvalue > FALSE_ALARM
    np.testing.assert_array_equal(accepted.done, accepted.exact)
    np.testing.assert_array_equal(accepted.latent, found.latent)
    assert (accepted.draws % 8 == 0).all()
    np.testing.assert_array_equal(accepted.draws > 0, emitted_B)
    assert not accepted.exact[~emitted_B].any()


# --- Approximate samplers -----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampler, n, num_candidates",
    [("published", 2, 6), ("published", 3, 6), ("batch", 2, 6), ("batch", 3, 7)],
)
def test_a_choice_from_one_pool_has_the_law_of_its_formula(sampler, n, num_candidates):
    """Over all possible counts of the pool. A control: the same test rejects the exact power."""
    law = sum(
        scipy.stats.multinomial.pmf(counts, num_candidates, PROBS)
        * choice_law(counts, n, leave_out=sampler == "batch")
        for counts in compositions(num_candidates, 3)
    )
    config = config_of(1 / n, sampler, num_candidates=num_candidates)
    number_B, sampled = run(known_model(PROBS), config, 20_000)
    assert p_value(number_B, law) > FALSE_ALARM
    assert p_value(number_B, power(PROBS, n)) < FALSE_ALARM
    assert (sampled.draws == num_candidates).all() and not sampled.exact.any()


@pytest.mark.slow
def test_a_large_pool_approximates_the_power_at_any_temperature():
    """The bias with 200 draws is below 0.005 (test_temperature.py); the rest of the tolerance is statistical."""
    for temperature_ in (0.8, 0.4):
        config = config_of(temperature_, "batch", num_candidates=200)
        number_B, _ = run(known_model(PROBS), config, 3000)
        frequency = np.bincount(number_B, minlength=3) / len(number_B)
        slack = FAR * math.sqrt(0.25 / len(number_B)) + 0.005
        assert np.abs(frequency - power(PROBS, 1 / temperature_)).max() < slack


def test_noise_is_one_draw_with_noise_scaled_by_the_temperature():
    def latents(h_PD, num_draws, key_P, noise_scale):
        return jnp.full((len(h_PD), num_draws, 1), 1000 * noise_scale)

    for temperature_, is_exact in ((0.25, False), (0.7, False), (1, True)):
        number_B, sampled = run(model_of(latents), config_of(temperature_, "noise"), 3)
        assert number_B.tolist() == [1000 * temperature_] * 3
        assert sampled.draws.tolist() == [1, 1, 1]
        assert sampled.exact.tolist() == [is_exact] * 3


@pytest.mark.slow
def test_a_growing_pool_stops_at_sixteen_groups_of_equal_draws():
    """First pools of 16 with given numbers of equal pairs; later draws are all different."""
    firsts = {
        "a" * 16: 16,  # C(16, 2)
        "aaaaaabb" + "cdefghij": 16,  # 15 + 1
        "aaaaaa" + "cdefghijkl": 24,  # 15
        "aabbccddeeffgghh": 24,  # 8
        "abcdefghijklmnop": 24,
        "aaaabbbbccdefghi": 24,  # 6 + 6 + 1
        "aaaabbbbcccdddde": 16,  # 6 + 6 + 3 + 6
    }
    first_BN = jnp.array([[ord(letter) - ord("a") for letter in word] for word in firsts])

    def latents(h_PD, num_draws, key_P, noise_scale):
        row_P1 = h_PD.astype(jnp.int32)
        later_PN = 100 + jnp.arange(num_draws) + 0 * row_P1
        number_PN = first_BN[row_P1[:, 0]] if num_draws == 16 else later_PN
        return number_PN[..., None].astype(jnp.float32)

    config = config_of(1 / 2, "growing", max_draws=24)
    number_B, sampled = run(model_of(latents), config, len(firsts), law=np.arange(len(firsts)))
    assert sampled.draws.tolist() == list(firsts.values())
    assert not sampled.exact.any()
    # A chunk with an equal pair is chosen, never one that was drawn once.
    assert number_B[0] == 0 and number_B[1] in (0, 1) and number_B[2] == 0 and number_B[3] < 8


# --- Draws, budgets, rows -----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampler, temperature_, max_draws",
    [
        ("pooled", 0.8, 40),
        ("pooled", 0.5, 19),
        ("pooled", 0.5, 2),
        ("pooled", 0.4, 53),
        ("pooled", 0.3, 4),
        ("rejection", 0.9, 37),
        ("rejection", 0.5, 33),
        ("rejection", 0.4, 3),
        ("growing", 0.5, 35),
        ("growing", 0.3, 5),
    ],
)
def test_draws_stay_within_the_budget_and_an_exhausted_budget_is_not_exact(
    sampler, temperature_, max_draws
):
    """On a distribution that is too flat for a search to succeed; the chunk is then still one of the draws."""
    flat, peaked = np.full(1800, 1 / 1800), np.r_[np.zeros(1900), [0.9, 0.1]]
    law_B = np.arange(60) % 2
    config = config_of(temperature_, sampler, max_draws=max_draws)
    number_B, sampled = run(known_model(flat, peaked), config, 60, law_B)
    assert (sampled.draws <= max_draws).all() and (sampled.draws > 0).all()
    flat_B = law_B == 0
    assert sampled.exact[flat_B].mean() < 0.2
    if temperature.split_exponent(temperature_)[1] == 0:
        # The unused rest is less than a block. (For other exponents a search may end undecided before.)
        assert (sampled.draws[flat_B & ~sampled.exact] > max_draws - 16).all()
    # Chunks come from the row's own distribution, and rows differ.
    assert (number_B[flat_B] < 1800).all() and len(set(number_B[flat_B])) > 20
    assert np.isin(number_B[~flat_B], (1900, 1901)).all()
    assert (sampled.decoded <= 2 * (max_draws * 2 + 1)).all()


@pytest.mark.slow
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_rows_chunk_depends_neither_on_other_rows_nor_on_the_group_size(sampler):
    """Bit for bit: with other neighbours, in another order, next to inactive rows, and computed two rows at a time."""
    config = config_of(0.5 if sampler == "published" else 0.4, sampler, max_draws=40)
    model = known_model(PROBS, np.full(50, 0.02))
    law_B = np.arange(12) % 2
    h_B1, key_B = law_B[:, None].astype(np.float32), jax.random.split(jax.random.key(3), 12)
    other_key_B = jax.random.split(jax.random.key(4), 12)

    def of_config(config):
        sample = jax.jit(lambda *args: sample_chunk(model, *args, config))
        return lambda *args: jax.device_get(sample(*args))

    def assert_same(some, others):
        jax.tree.map(np.testing.assert_array_equal, some, others)

    def rows(sampled, index):
        return jax.tree.map(lambda x: x[index], sampled)

    sample, active_B = of_config(config), np.ones(12, bool)
    together = sample(h_B1, key_B, active_B)
    order = np.random.default_rng(0).permutation(12)
    turned = sample(h_B1[order], key_B[order], active_B)
    assert_same(turned, rows(together, order))

    some_B = np.arange(12) % 3 == 0
    keys_B = jnp.where(some_B, key_B, other_key_B)
    assert_same(rows(sample(h_B1, keys_B, active_B), some_B), rows(together, some_B))
    assert (sample(h_B1, keys_B, active_B).tokens != together.tokens).any()
    alone = sample(h_B1, key_B, some_B)
    assert_same(rows(alone, some_B), rows(together, some_B))
    for nothing in (alone.draws, alone.decoded, alone.exact):
        assert not nothing[~some_B].any()

    few = of_config(config_of(config.temperature, sampler, max_draws=40, draws_at_once=32))
    assert_same(few(h_B1, key_B, active_B), together)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampler, temperature_", [*((sampler, 0.5) for sampler in SAMPLERS), ("pooled", 0.4)]
)
def test_candidates_are_the_counts_of_the_pool_and_change_no_chunk(sampler, temperature_):
    """Of more candidates than chunks, the votes add up to the pool; of fewer, they are the most frequent ones."""
    rows, model = 300, known_model(PROBS)
    chunk_B, plain = run(model, config_of(temperature_, sampler), rows)
    assert plain.candidates is None
    votes_BC = {}
    for num in (5, 2) if sampler == "batch" else (5,):
        shown_B, sampled = run(model, config_of(temperature_, sampler, shown_candidates=num), rows)
        np.testing.assert_array_equal(shown_B, chunk_B)
        for name in ("draws", "exact"):
            np.testing.assert_array_equal(getattr(sampled, name), getattr(plain, name))
        found = sampled.candidates
        assert found.chunk.shape == (rows, num, 2) and (np.diff(found.votes) <= 0).all()
        votes_BC[num] = np.zeros((rows, len(PROBS)), int)
        for row, (chunk_CK, votes_C) in enumerate(zip(found.chunk, found.votes, strict=True)):
            named = number_of(chunk_CK[votes_C > 0])
            assert len(set(named)) == len(named)
            votes_BC[num][row, named] = votes_C[votes_C > 0]
    np.testing.assert_array_equal(votes_BC[5].sum(1), found.pool)
    if sampler == "batch":
        np.testing.assert_array_equal(np.sort(votes_BC[2])[:, 1:], np.sort(votes_BC[5])[:, 1:])
    has_pool_B = found.pool > 0
    assert has_pool_B.all() == (sampler not in ("noise", "rejection"))
    # The chunk comes from the pool.
    assert votes_BC[5][has_pool_B, chunk_B[has_pool_B]].all()
    if sampler in ("batch", "published"):
        assert (found.pool == 8).all()
        assert laws.p_value(votes_BC[5].sum(0), PROBS) > FALSE_ALARM


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampler, temperature_, fewest",
    [
        ("pooled", 0.5, 16),
        # A candidate of two draws, and a block for the fraction: half of the budget of 48 is kept back.
        ("pooled", 0.8, 17),
        ("published", 0.5, 8),
        # Twenty equal draws take two blocks.
        ("rejection", 0.05, 32),
        ("noise", 0.5, 1),
        ("pooled", 1.0, 1),
    ],
)
def test_the_fewest_draws_are_those_of_a_certain_model(sampler, temperature_, fewest):
    config = config_of(temperature_, sampler)
    assert fewest_draws(config) == fewest
    _, sampled = run(known_model((0.6, 0.4)), config, 50)
    assert sampled.draws.min() >= fewest
    if fewest > 1:
        assert sampled.draws.max() > fewest or sampler == "published"


def test_at_temperature_1_every_sampler_is_the_same_single_draw():
    """With the distribution p, and the same random numbers for all samplers."""
    results = [
        run(known_model(PROBS), config_of(1, sampler, max_draws=1), 5000) for sampler in SAMPLERS
    ]
    for number_B, sampled in results:
        assert (sampled.draws == 1).all() and (sampled.decoded == 2).all() and sampled.exact.all()
        np.testing.assert_array_equal(number_B, results[0][0])
    assert p_value(results[0][0], PROBS) > FALSE_ALARM


def test_a_model_with_log_probs_is_sampled_directly_at_any_temperature():
    log_probs = jnp.log(jnp.array(PROBS))
    model = ChunkModel(*[None] * 6, lambda h_PD: jnp.tile(log_probs, (len(h_PD), 1)), None)
    h_B1, active_B = jnp.zeros((5000, 1)), np.arange(5000) % 5 > 0
    key_B = jax.random.split(jax.random.key(0), 5000)
    config = config_of(0.4, "published", max_draws=1)
    sampled = jax.device_get(sample_chunk(model, h_B1, key_B, active_B, config))
    assert sampled.tokens.shape == (5000, 1)
    assert p_value(sampled.tokens[active_B, 0], power(PROBS, 2.5)) > FALSE_ALARM
    for counted in (sampled.draws, sampled.decoded, sampled.exact):
        np.testing.assert_array_equal(counted, active_B)
    # Without the least likely tokens the law is not that of the temperature.
    some = dataclasses.replace(config, top_p=0.9)
    assert not sample_chunk(model, h_B1, key_B, active_B, some).exact.any()


def test_pool_sizes_grow_fourfold_and_use_up_the_budget():
    """Up to 1024; draws that are left over enlarge the last pool, but never the first of several."""
    assert exact.pool_sizes(16 + 64 + 256, 2) == (16, 64, 256)
    assert exact.pool_sizes(16 + 64 + 255, 8) == (16, 64 + 255)
    assert exact.pool_sizes(9, 2) == (9,)
    assert exact.pool_sizes(10_000, 2) == (16, 64, 256, 1024)
    assert exact.pool_sizes(216, 10) == (19, 197)
    assert exact.pool_sizes(40, 30) == (40,)
    assert exact.pool_sizes(10_000, 1000) == (1999,)
    for max_draws in (5000, 10_000, 2**24):
        assert max(exact.pool_sizes(max_draws, 10_000)) == 4096
    assert exact.pool_sizes(5300, 128) == (255, 4096)
    for n, max_draws in itertools.product((1, 2, 8, 9, 30, 600), range(1, 4000)):
        sizes, first = exact.pool_sizes(max_draws, n), max(16, 2 * n - 1)
        assert sizes[0] == first or (len(sizes) == 1 and max_draws < 2 * first)
        assert all(later >= 4 * before for before, later in itertools.pairwise(sizes[1:]))
        assert min(sizes) >= min(first, max_draws)
        assert sum(sizes) <= max_draws
        assert sum(sizes) == max_draws or sizes[-1] >= 1024


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 8, 9, 10, 30])
def test_a_certain_model_needs_one_pool(n):
    config = config_of(1 / n, "pooled", max_draws=216)
    _, sampled = run(known_model((1.0, 0.0, 0.0)), config, 1000)
    assert sampled.exact.all()
    assert (sampled.draws == max(16, 2 * n - 1)).all()


# --- A chunk whose first tokens are given: `complete_chunk` ---------------------------------------------

# Chunks of three tokens.
CHUNKS = np.array([(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (1, 0, 1), (1, 1, 1)], np.int32)
CHUNK_PROBS = np.array([0.3, 0.1, 0.2, 0.05, 0.15, 0.2])


def completed(prefixes, config, rows, active=None):
    """Completes each prefix in `rows` rows: whether a chunk was found and its index, [rows, prefixes], and `Sampled`."""
    batch = rows * len(prefixes)
    length_B = np.tile([len(prefix) for prefix in prefixes], rows)
    # Tokens after a prefix must not matter.
    tokens_BK = np.tile([(*prefix, 7, 7, 7)[:3] for prefix in prefixes], (rows, 1))
    key_B = jax.random.split(jax.random.key(5), batch)
    model, h_B1 = known_model(CHUNK_PROBS, book=CHUNKS), jnp.zeros((batch, 1))
    active_B = np.ones(batch, bool) if active is None else active
    complete = compiled(lambda *args: complete_chunk(model, *args[:3], config, args[3]), batch)
    prefix = Prefix(jnp.asarray(tokens_BK), jnp.asarray(length_B))
    found_B, sampled = jax.device_get(complete(h_B1, key_B, active_B, prefix))
    is_chunk_BC = (sampled.tokens[:, None] == CHUNKS).all(-1)
    number_B = np.where(found_B, is_chunk_BC.argmax(-1), -1)
    assert is_chunk_BC.any(-1)[found_B].all()
    shape = (rows, len(prefixes))
    return found_B.reshape(shape), number_B.reshape(shape), sampled


PREFIXES = [(), (0,), (1, 0), (0, 0), (2,), (1, 1, 1)]


def fits(prefix):
    return (CHUNKS[:, : len(prefix)] == np.array(prefix, int)).all(-1)


@pytest.mark.slow
def test_completed_chunks_have_the_conditional_law_at_temperature_1():
    """Pools grow until a draw fits the prefix; a prefix that no chunk begins with is reported as not found."""
    config = config_of(1, "batch", max_draws=80)
    found_RC, number_RC, sampled = completed(PREFIXES, config, 3000)
    draws_RC = sampled.draws.reshape(found_RC.shape)
    assert set(draws_RC.ravel()) <= {16, 32, 64, 80}
    assert set(draws_RC[:, 2]) >= {16, 32}
    for case, prefix in enumerate(PREFIXES):
        law = np.where(fits(prefix), CHUNK_PROBS, 0)
        if not law.any():
            assert not found_RC[:, case].any() and (draws_RC[:, case] == 80).all()
            continue
        found_R = found_RC[:, case]
        assert found_R.mean() > 0.99
        assert p_value(number_RC[found_R, case], law) > FALSE_ALARM
    np.testing.assert_array_equal(sampled.exact, found_RC.ravel())


@pytest.mark.slow
def test_completed_chunks_have_the_law_of_leave_out_weights_at_temperature_one_half():
    """From one pool of 9, over all counts of the chunks that fit; other chunks are never chosen."""
    config, num_draws = config_of(1 / 2, "pooled", max_draws=9), 9
    found_RC, number_RC, sampled = completed(PREFIXES, config, 6000)
    assert (sampled.draws == num_draws).all() and not sampled.exact.any()
    for case, prefix in enumerate(PREFIXES):
        fitting = np.flatnonzero(fits(prefix))
        if not 0 < len(fitting) < 4:
            continue
        probs = np.append(CHUNK_PROBS[fitting], 1 - CHUNK_PROBS[fitting].sum())
        law, nothing = np.zeros(6), 0.0
        for counts in compositions(num_draws, len(probs)):
            prob = scipy.stats.multinomial.pmf(counts, num_draws, probs)
            if counts[:-1].any():
                law[fitting] += prob * choice_law(counts[:-1], 2, leave_out=True)
            else:
                nothing += prob
        found_R = found_RC[:, case]
        test = scipy.stats.binomtest(int((~found_R).sum()), len(found_R), nothing)
        assert test.pvalue > FALSE_ALARM
        assert p_value(number_RC[found_R, case], law) > FALSE_ALARM


@pytest.mark.slow
def test_completed_chunks_approximate_the_power_of_the_conditional_law():
    """The pool grows until it has sixteen pairs that fit: the bias is below .03, the rest of the tolerance is statistical."""
    found_RC, number_RC, _ = completed([(0,)], config_of(1 / 2, "pooled", max_draws=128), 3000)
    assert found_RC.all()
    frequency = np.bincount(number_RC[:, 0], minlength=6) / 3000
    expected = power(np.where(fits((0,)), CHUNK_PROBS, 0), 2)
    assert np.abs(frequency - expected).max() < FAR * math.sqrt(0.25 / 3000) + 0.03


def test_inactive_rows_are_not_completed():
    active_B = np.arange(60) % 4 == 0
    config = config_of(1, "batch", max_draws=16)
    _, _, sampled = completed(PREFIXES, config, 10, active_B)
    assert (sampled.draws == 16 * active_B).all()
    assert not sampled.exact[~active_B].any() and not sampled.decoded[~active_B].any()


# --- Configs ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": math.nan},
        {"num_candidates": 0},
        {"max_draws": 0},
        {"draws_at_once": -1},
        {"shown_candidates": -1},
        {"shown_candidates": 65},
    ],
)
def test_a_bad_config_is_refused(changes):
    good = SamplerConfig(0.5, "pooled", 200, 1008, 256, 1.0)
    with pytest.raises(UserError, match=next(iter(changes))):
        dataclasses.replace(good, **changes)


@pytest.mark.parametrize("name", ["nucleus", ""])
def test_an_unknown_sampler_is_refused(name):
    """By `check_sampler`, and by `sample_chunk` itself."""
    words = f"sampler={name!r} is none of pooled, batch"
    with pytest.raises(UserError, match=words):
        check_sampler("sampler", name)
    with pytest.raises(UserError, match=words):
        run(known_model(PROBS), config_of(0.5, name), rows=1)


@pytest.mark.parametrize(
    "config, words",
    [
        (config_of(0.5, "pooled", top_p=0.9), "top_p=0.9 needs"),
        (config_of(0.4, "published"), "sampler='published' takes only 1, 1/2"),
        (config_of(0.0, "pooled"), r"temperature=0 must be in \(0, 1\]"),
        (config_of(1.2, "noise"), r"temperature=1.2 must be in \(0, 1\]"),
        (config_of(-0.1, "pooled"), r"temperature=-0.1 must be in \(0, 1\]"),
        (config_of(math.nan, "pooled"), r"temperature=nan must be in \(0, 1\]"),
        (config_of(1 / 3, "pooled", max_draws=2), "max_draws=2 must be at least 3"),
        (config_of(0.4, "rejection", max_draws=2), "max_draws=2 must be at least 3"),
        (config_of(0.1, "growing", max_draws=9), "max_draws=9 must be at least 10"),
    ],
)
def test_options_that_a_latent_head_cannot_compute_are_refused(config, words):
    with pytest.raises(UserError, match=words):
        config.check_latent_head()


@pytest.mark.parametrize("bad", [-0.1, math.nan, math.inf])
def test_a_temperature_that_the_baseline_cannot_take_is_refused(bad):
    with pytest.raises(UserError, match=f"temperature={bad} must be at least 0 and finite"):
        config_of(bad, "pooled").check_softmax_head()


@pytest.mark.parametrize(
    "config",
    [
        *[config_of(0.5, sampler) for sampler in SAMPLERS],
        *[config_of(0.4, sampler) for sampler in SAMPLERS if sampler != "published"],
        config_of(1 / 3, "published", max_draws=1),
        config_of(1 / 3, "rejection", max_draws=3),
        config_of(0.1, "batch", max_draws=1),
        config_of(1, "pooled", max_draws=1),
    ],
)
def test_options_that_a_latent_head_can_compute_are_accepted(config):
    config.check_latent_head()
