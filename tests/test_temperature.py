"""Likelihood-free temperature sampling, and the decode loop on a toy model with a known answer."""

import functools
import itertools
import math
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from calm_jax import sampling, temperature
from calm_jax.errors import UserError
from calm_jax.sampling import ChunkModel, SamplingConfig

PROBS = (0.5, 0.3, 0.2)


def pool(letters: str, chunk_size: int = 4) -> np.ndarray:
    """A pool with one chunk per letter, [N, K]; different letters differ in the last token alone."""
    tokens = np.zeros((len(letters), chunk_size), np.int32)
    tokens[:, -1] = [ord(letter) - ord("A") for letter in letters]
    return tokens


count_equal = jax.jit(temperature.count_equal)
choose = jax.jit(temperature.choose, static_argnums=1)


def softmax(log_weight_BN: np.ndarray) -> np.ndarray:
    weight_BN = np.exp(log_weight_BN - log_weight_BN.max(1, keepdims=True))
    return weight_BN / weight_BN.sum(1, keepdims=True)


@functools.partial(jax.jit, static_argnums=1)
def log_weights_of_draws(tokens_BNK, temperature_):
    return temperature.batch_log_weights(temperature.count_equal(tokens_BNK), temperature_)


def law_of_draws(tokens_BNK: np.ndarray, temperature_: float) -> np.ndarray:
    """The probability that `choose` takes each draw, [B, N]."""
    log_weight_BN, _ = log_weights_of_draws(tokens_BNK, temperature_)
    return softmax(np.asarray(log_weight_BN, np.float64))


def law_of_counts(count_BC: np.ndarray, temperature_: float) -> tuple[np.ndarray, np.ndarray]:
    """The probability of each chunk, [B, C], in pools where they stand `count_BC` times; the levels."""
    # The weights are per draw, and a draw's depends on the counts alone: one draw of each chunk will do.
    filled_BC = jnp.asarray(np.maximum(count_BC, 1), jnp.int32)
    log_weight_BC, level_B = temperature.batch_log_weights(filled_BC, temperature_)
    with np.errstate(divide="ignore"):
        return softmax(np.asarray(log_weight_BC, np.float64) + np.log(count_BC)), np.asarray(
            level_B
        )


def counts_law(counts, temperature_: float) -> np.ndarray:
    """The probability of each chunk of one pool."""
    count_1C = np.array([[*counts, *[0] * (5 - len(counts))]])  # one shape compiles once
    return law_of_counts(count_1C, temperature_)[0][0, : len(counts)]


def reference_law(counts, temperature_: float) -> np.ndarray:
    """The same in double precision, from the formulas of the specification."""
    s = 1 / temperature_
    while True:
        n = math.floor(s + 1e-6)
        a = max(s - n, 0.0) if abs(s - round(s)) > 1e-6 else 0.0
        weight = [
            0.0
            if c < n
            else math.exp(math.lgamma(c + 1) - math.lgamma(c + 1 - n - a))
            * ((1 - a) ** 2 if c == n else 1)
            for c in counts
        ]
        if sum(weight):
            return np.array(weight) / sum(weight)
        s -= 1


def compositions(total: int) -> np.ndarray:
    """All (a, b, c) with a + b + c = total."""
    return np.array([(a, b, total - a - b) for a in range(total + 1) for b in range(total + 1 - a)])


# --- The batch rule -----------------------------------------------------------------------------


def test_law_over_all_ordered_pools():
    """Every pool of 4 draws of (.5, .3, .2) with its probability, at T = 1/2: .59 (paper.md)."""
    pools = np.array(list(itertools.product(range(3), repeat=4)))
    tokens_BNK = np.stack([np.zeros_like(pools), pools], axis=-1)
    prob_BN = law_of_draws(tokens_BNK, 1 / 2)
    pool_prob_B = np.prod(np.array(PROBS)[pools], axis=1)
    total = [(pool_prob_B[:, None] * prob_BN)[pools == chunk].sum() for chunk in range(3)]
    assert sum(total) == pytest.approx(1, abs=1e-6)
    assert total[0] == pytest.approx(0.59, abs=1e-6)


@pytest.mark.parametrize(
    "n, num_draws, first",
    [
        (2, 4, 0.59),
        (2, 10, 0.617446),
        (2, 20, 0.634718),
        (2, 50, 0.647705),
        (2, 100, 0.652621),
        (3, 10, 0.677294),
        (3, 20, 0.717494),
        (3, 50, 0.751677),
        (3, 100, 0.765643),
        (1, 10, 0.5),
    ],
)
def test_law_is_the_table_of_the_paper_notes(n, num_draws, first):
    """Over all counts of a pool, with their multinomial probability; the limit for n = 2 is .657895."""
    counts_C3 = compositions(num_draws)
    one_shape_C3 = np.resize(counts_C3, (5151, 3))
    prob_C3 = law_of_counts(one_shape_C3, 1 / n)[0][: len(counts_C3)]
    multinomial_C = scipy.stats.multinomial.pmf(counts_C3, num_draws, PROBS)
    # Half a unit of the last printed digit, and the rounding of log-gamma in float32, which grows with N.
    tolerance = 5e-7 + 1e-7 * num_draws
    assert multinomial_C @ prob_C3[:, 0] == pytest.approx(first, abs=tolerance)


def test_example_pool():
    """{A,C,A,D,B,E,A,F,B,G} at n = 2: C(3,2) : C(2,2) = 3/4 : 1/4, all others 0."""
    (prob_N,) = law_of_draws(pool("ACADBEAFBG")[None], 1 / 2)
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
    """C(c, n), and n-1 for n where no chunk stands n times."""
    np.testing.assert_allclose(counts_law(counts, 1 / n), expected, atol=2e-6)


def test_each_row_has_its_own_level():
    count_BC = np.array([[3, 1, 0, 0], [2, 1, 1, 0], [1, 1, 1, 1], [9, 0, 0, 0]])
    prob_BC, level_B = law_of_counts(count_BC, 1 / 3)
    assert level_B.tolist() == [3, 2, 1, 3]
    expected = [[1, 0, 0, 0], [1, 0, 0, 0], [1 / 4] * 4, [1, 0, 0, 0]]
    np.testing.assert_allclose(prob_BC, expected, atol=1e-6)


@pytest.mark.parametrize("temperature_", [0.95, 0.8, 0.6, 0.51, 0.45, 0.4, 0.3, 0.15])
@pytest.mark.parametrize(
    "counts", [(1, 1), (1, 2), (3, 2, 1, 1), (2, 2, 1), (20, 9, 4, 2, 1), (60, 40, 7)]
)
def test_real_exponents_follow_the_gamma_formula(temperature_, counts):
    expected = reference_law(counts, temperature_)
    np.testing.assert_allclose(counts_law(counts, temperature_), expected, rtol=2e-4, atol=1e-7)


def test_reference_law_by_hand():
    """T = 2/3: s = 1.5; G(3)/G(1.5) against (1/4) G(2)/G(0.5), for c = 2 and 1."""
    weights = 2 / (math.sqrt(math.pi) / 2), 0.25 / math.sqrt(math.pi)
    expected = np.array(weights) / sum(weights)
    np.testing.assert_allclose(reference_law((2, 1), 2 / 3), expected, rtol=1e-12)
    np.testing.assert_allclose(counts_law((2, 1), 2 / 3), expected, rtol=1e-5)


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("side", [-1, 1])
@pytest.mark.parametrize(
    "counts", [(1, 1, 1), (2, 1, 1), (3, 2, 1, 1), (2, 2, 1), (12, 5, 3, 2, 1)]
)
def test_law_is_continuous_where_the_exponent_is_whole(n, side, counts):
    """From both sides, and far enough from 1/n not to be taken for it."""
    exact, distances = counts_law(counts, 1 / n), []
    for distance in (1e-2, 1e-4):
        near = (1 + side * distance) / n
        assert temperature.split_exponent(near)[1] != 0
        distances.append(np.abs(counts_law(counts, near) - exact).max())
    assert distances[1] < 1e-3
    assert distances[1] <= distances[0] / 20 + 1e-6


def test_lower_temperature_sharpens():
    first = [counts_law((30, 20, 10), t)[0] for t in (1, 0.9, 0.7, 0.5, 0.45, 0.33, 0.2, 0.1)]
    assert first == sorted(first)
    assert first[0] == pytest.approx(0.5, abs=1e-5)
    assert first[-1] > 0.98


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
        (0.999, 1, 1 / 999),
    ],
)
def test_split_exponent(temperature_, n, a):
    whole, fraction = temperature.split_exponent(temperature_)
    assert whole == n
    assert fraction == pytest.approx(a, abs=1e-9)
    assert (fraction == 0) == (a == 0)


def test_a_third_in_single_precision_is_a_third():
    for counts in ((5, 4, 3, 2), (2, 1), (1, 1)):
        np.testing.assert_array_equal(counts_law(counts, 0.33333334), counts_law(counts, 1 / 3))


@pytest.mark.parametrize(
    "tiny",
    [
        1e-3,
        1e-8,
        1e-10,
        5e-324,
    ],
)
def test_tiny_temperatures_take_the_most_frequent_chunk(tiny):
    assert counts_law((2, 3, 1), tiny).tolist() == [0, 1, 0]


@pytest.mark.parametrize("chunk_size", [1, 2, 4])
def test_count_equal_against_brute_force(chunk_size):
    rng = np.random.default_rng(chunk_size)
    tokens = rng.integers(0, 3, (5, 30, chunk_size)).astype(np.int32)
    rows = [[tuple(chunk) for chunk in row] for row in tokens.tolist()]
    expected = [[row.count(chunk) for chunk in row] for row in rows]
    assert np.asarray(count_equal(tokens)).tolist() == expected


# --- choose -------------------------------------------------------------------------------------

# A test of a right program fails for one seed in a hundred thousand; the seeds are fixed.
FALSE_ALARM = 1e-5


def chi_square(observed: np.ndarray, expected: np.ndarray) -> float:
    """The p-value of observed counts; what cannot happen must not have happened."""
    possible = expected > 0
    assert not observed[~possible].any()
    return scipy.stats.chisquare(observed[possible], observed.sum() * expected[possible]).pvalue


@pytest.mark.parametrize("temperature_", [0.8, 0.5, 0.3])
def test_frequencies_of_choose_in_one_pool(temperature_):
    letters, rows = "AAAAABBBCCD", 4000
    tokens_BNK = np.tile(pool(letters), (rows, 1, 1))
    choice = choose(tokens_BNK, temperature_, jax.random.split(jax.random.key(1), rows))
    assert choice.tokens.shape == (rows, 4)
    chosen_B = np.asarray(choice.tokens)[:, -1]
    observed = np.bincount(chosen_B, minlength=4)
    assert chi_square(observed, reference_law((5, 3, 2, 1), temperature_)) > FALSE_ALARM
    np.testing.assert_array_equal(choice.count, np.array([5, 3, 2, 1])[chosen_B])
    assert set(np.asarray(choice.level)) == {math.floor(1 / temperature_ + 1e-6)}


@pytest.mark.parametrize("temperature_, num_draws, first", [(1, 10, 0.5), (1 / 2, 4, 0.59)])
def test_frequencies_over_random_pools(temperature_, num_draws, first):
    """`sample_chunk` on a known p: the law of the table, pools and choice together; p itself at T = 1."""
    rows = 4000

    def latents(h_PD, num, key_P):
        def draw(key):
            return jax.random.categorical(key, jnp.log(jnp.array(PROBS)), shape=(num, 1))

        return jax.vmap(draw)(key_P)

    model = ChunkModel(latents, lambda latent_PNZ: latent_PNZ, None, None, None, None)
    key_B = jax.random.split(jax.random.key(2), rows)
    config = SamplingConfig(temperature_, 1.0, num_draws, 128, "left", ("x",))
    sample = jax.jit(sampling.sample_chunk, static_argnums=(0, 3))
    chunk_BK = sample(model, jnp.zeros((rows, 1)), key_B, config)
    observed = np.bincount(np.asarray(chunk_BK)[:, 0] == 0, minlength=2)
    assert chi_square(observed, np.array([1 - first, first])) > FALSE_ALARM


def test_rows_are_independent_of_their_neighbours():
    rng = np.random.default_rng(0)
    tokens_BNK = jnp.asarray(rng.integers(0, 2, (6, 12, 3)).astype(np.int32))
    key_B = jax.random.split(jax.random.key(3), 6)
    together = choose(tokens_BNK, 0.4, key_B)
    for row in range(6):
        alone = choose(tokens_BNK[row : row + 1], 0.4, key_B[row : row + 1])
        for one, other in zip(alone, together, strict=True):
            np.testing.assert_array_equal(one[0], other[row])
    turned = choose(tokens_BNK[::-1], 0.4, key_B[::-1])
    np.testing.assert_array_equal(turned.tokens[::-1], together.tokens)


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"num_candidates": 0},
        {"max_tokens": 0},
        {"prompt_alignment": "right"},
    ],
)
def test_bad_sampling_config_is_refused(changes):
    good = {
        "temperature": 0.5,
        "top_p": 1.0,
        "num_candidates": 200,
        "max_tokens": 128,
        "prompt_alignment": "left",
        "prompts": ("x",),
    }
    SamplingConfig(**good)
    with pytest.raises(UserError, match=next(iter(changes))):
        SamplingConfig(**(good | changes))


# --- The decode loop ----------------------------------------------------------------------------

CHUNK, VOCAB, EOS = 3, 11, 10


class ToyCache(NamedTuple):
    """The chunks read so far, laid out as a KV cache is: [B, S, K], of which [B] are filled."""

    tokens: jax.Array
    length: jax.Array


def toy_advance(tokens_BLK, cache):
    """A chunk's hidden state is a checksum of it, its place and every chunk before it in its row."""
    num_new = tokens_BLK.shape[1]
    write = jax.vmap(lambda rows, new, at: jax.lax.dynamic_update_slice(rows, new, (at, 0)))
    seen_BSK = write(cache.tokens, tokens_BLK, cache.length)
    weight_SK = (jnp.arange(seen_BSK.shape[1] * CHUNK).reshape(-1, CHUNK) * 7 + 1) % 101
    part_BS = (seen_BSK * weight_SK).sum(-1)
    sum_BS = jnp.cumsum(part_BS, axis=1) % 1009
    place_BL = cache.length[:, None] + jnp.arange(num_new)
    h_BL = jnp.take_along_axis(sum_BS, place_BL, axis=1)
    return h_BL[..., None], ToyCache(seen_BSK, cache.length + num_new)


def toy_empty_cache(batch, size):
    return ToyCache(jnp.zeros((batch, size, CHUNK), jnp.int32), jnp.zeros(batch, jnp.int32))


TOY = ChunkModel(None, None, toy_advance, toy_empty_cache, None, None)


def toy_next(h_BD, step):
    """The next chunk as a function of the checksum and the step; eos about once in four chunks."""
    return (h_BD * jnp.arange(2, 2 + CHUNK) + step) % VOCAB


def toy_continuation(prompt: list[list[int]], num_chunks: int) -> list[list[int]]:
    """What `generate` should give for one row, from the definition, without any cache."""
    chunks, generated = list(prompt), []
    for step in range(num_chunks):
        flat = [token for chunk in chunks for token in chunk]
        checksum = sum(token * ((7 * i + 1) % 101) for i, token in enumerate(flat)) % 1009
        chunk = [(checksum * factor + step) % VOCAB for factor in range(2, 2 + CHUNK)]
        generated.append(chunk)
        chunks.append(chunk)
        if EOS in chunk:
            break
    return generated


def ragged_prompts(rows: int = 12) -> tuple[np.ndarray, np.ndarray]:
    """Prompts of 1 to 5 chunks; what stands beyond a row's length is rubbish, with eos in it."""
    rng = np.random.default_rng(0)
    length_B = rng.integers(1, 6, rows).astype(np.int32)
    length_B[:2] = 5, 1
    return rng.integers(0, VOCAB, (rows, 5, CHUNK)).astype(np.int32), length_B


def toy_generate(prompt_BLK, length_B, num_chunks=8, next_chunk=toy_next):
    run = jax.jit(sampling.generate, static_argnums=(0, 3, 4, 5))
    return run(TOY, prompt_BLK, length_B, num_chunks, EOS, next_chunk)


def test_generate_gives_ragged_rows_what_the_definition_says():
    prompt_BLK, length_B = ragged_prompts()
    tokens, length = toy_generate(prompt_BLK, length_B)
    assert tokens.shape == (12, 8, CHUNK)
    for row in range(12):
        expected = toy_continuation(prompt_BLK[row, : length_B[row]].tolist(), 8)
        assert length[row] == len(expected)
        assert tokens[row, : len(expected)].tolist() == expected
    # The law is worth something only if rows end at different steps, some of them not at all.
    assert len(set(np.asarray(length).tolist())) > 3
    assert any(EOS not in np.asarray(tokens)[row, : length[row]] for row in range(12))


def test_generate_gives_ragged_rows_what_each_gives_alone():
    prompt_BLK, length_B = ragged_prompts()
    together = toy_generate(prompt_BLK, length_B)
    for row in range(3):
        alone = toy_generate(prompt_BLK[row : row + 1, : length_B[row]], length_B[row : row + 1])
        assert alone.length[0] == together.length[row]
        num = int(alone.length[0])
        np.testing.assert_array_equal(alone.tokens[0, :num], together.tokens[row, :num])


def ends_at(last_steps: list[int], place: int = 0):
    """Chunks of zeros, with eos at `place` of the chunk of each row's step."""
    last_B = jnp.array(last_steps)

    def next_chunk(h_BD, step):
        is_eos_BK = (step == last_B)[:, None] & (jnp.arange(CHUNK) == place)
        return jnp.where(is_eos_BK, EOS, 1)

    return next_chunk


@pytest.mark.parametrize("place", range(CHUNK))
def test_a_row_ends_with_the_chunk_that_holds_eos(place):
    prompt_BLK, length_B = ragged_prompts(4)
    tokens, length = toy_generate(prompt_BLK, length_B, 6, ends_at([0, 3, 5, 99], place))
    assert length.tolist() == [1, 4, 6, 6]
    assert tokens[1, :4, place].tolist() == [1, 1, 1, EOS]


def test_generation_stops_once_every_row_has_ended():
    prompt_BLK, length_B = ragged_prompts(3)
    steps = []

    def counted(h_BD, step):
        jax.debug.callback(lambda step: steps.append(int(step)), step)
        return ends_at([0, 2, 1])(h_BD, step)

    _, length = toy_generate(prompt_BLK, length_B, 50, counted)
    jax.effects_barrier()
    assert sorted(steps) == [0, 1, 2]
    assert length.tolist() == [1, 3, 2]


def test_eos_in_the_prompt_does_not_end_a_row():
    prompt_BLK = np.full((1, 2, CHUNK), EOS, np.int32)
    _, length = toy_generate(prompt_BLK, np.array([2], np.int32), 4, ends_at([99]))
    assert length.tolist() == [4]


def bind_random(params, frozen):
    """The toy with random chunks: uniform over four that the hidden state chooses."""

    def latents(h_PD, num_draws, key_P):
        draw = jax.vmap(lambda key: jax.random.randint(key, (num_draws, 1), 0, 4))(key_P)
        return draw + h_PD[:, None] % 50

    def decode(latent_PNZ):
        return (latent_PNZ * jnp.arange(1, 1 + CHUNK)) % (VOCAB - 1)

    return ChunkModel(latents, decode, toy_advance, toy_empty_cache, None, None)


@pytest.mark.parametrize("temperature_", [1.0, 0.4])
def test_random_rows_depend_on_their_own_key_and_prompt_alone(temperature_):
    config = SamplingConfig(temperature_, 1.0, 5, 128, "left", ("x",))
    prompt_BLK, length_B = ragged_prompts(3)
    key_B, other_key_B = jax.random.split(jax.random.key(0), (2, 3))

    def run(prompt_BLK, length_B, key_B):
        continuation = sampling.generate_chunks(
            bind_random, {}, {}, prompt_BLK, length_B, key_B, 6, EOS, config
        )
        return np.asarray(continuation.tokens)

    rows = run(prompt_BLK, length_B, key_B)
    turned = np.array([2, 0, 1])
    np.testing.assert_array_equal(
        run(prompt_BLK[turned], length_B[turned], key_B[turned]), rows[turned]
    )
    # Other neighbours, one of them of another length.
    prompt_BLK[1:] = 1
    length_B[1] = 4
    key_of_first_B = jnp.arange(3) == 0
    among_others = run(prompt_BLK, length_B, jnp.where(key_of_first_B, key_B, other_key_B))
    np.testing.assert_array_equal(among_others[0], rows[0])
    assert (among_others != rows)[1:].any((1, 2)).all()
    # Another key, the same prompt.
    assert (run(prompt_BLK, length_B, other_key_B)[0] != rows[0]).any()


def bind_uniform(params, frozen):
    """Chunks of one number below a million, whatever came before."""

    def latents(h_PD, num_draws, key_P):
        return jax.vmap(lambda key: jax.random.randint(key, (num_draws, 1), 0, 10**6))(key_P)

    def decode(latent_PNZ):
        return jnp.tile(latent_PNZ, (1, 1, CHUNK))

    return ChunkModel(latents, decode, toy_advance, toy_empty_cache, None, None)


def test_every_step_of_every_row_has_randomness_of_its_own():
    prompt_BLK, length_B = ragged_prompts(3)
    key_B = jax.random.split(jax.random.key(0), 3)
    config = SamplingConfig(1.0, 1.0, 1, 128, "left", ("x",))
    tokens, _ = sampling.generate_chunks(
        bind_uniform, {}, {}, prompt_BLK, length_B, key_B, 6, -1, config
    )
    assert len(np.unique(np.asarray(tokens)[..., 0])) == 3 * 6


# --- Decoding in blocks -------------------------------------------------------------------------


@pytest.mark.parametrize("most", [1, 3 * 2 * 5, 3 * 2 * 5 * 2, 3 * 2 * 5 * 3, 3 * 2 * 5 * 7, 10**9])
def test_decoding_in_blocks_changes_nothing(monkeypatch, most):
    """P = 3, N = 7, K = 2, V = 5; from one draw at once, over 2 and 3 (no divisors of 7), to all."""
    rng = np.random.default_rng(0)
    weight_ZKV = jnp.asarray(rng.normal(size=(4, 2, 5)), jnp.float32)
    latent_PNZ = jnp.asarray(rng.normal(size=(3, 7, 4)), jnp.float32)

    def decode(latent_PNZ):
        return sampling.decode_in_blocks(
            lambda latent_RZ: jnp.einsum("RZ,ZKV->RKV", latent_RZ, weight_ZKV), latent_PNZ, 2 * 5
        )

    monkeypatch.setattr(sampling, "_MAX_LOGITS", most)
    tokens = decode(latent_PNZ)
    expected = np.einsum("PNZ,ZKV->PNKV", latent_PNZ, weight_ZKV).argmax(-1)
    assert tokens.dtype == jnp.int32
    np.testing.assert_array_equal(tokens, expected)
    # No array is larger than allowed, short of the inputs and of one draw's logits.
    program = str(jax.make_jaxpr(decode)(latent_PNZ))
    shapes = [shape.split(",") for shape in re.findall(r"f32\[([\d,]+)\]", program)]
    largest = max(math.prod(map(int, shape)) for shape in shapes)
    assert largest <= max(most, 3 * 2 * 5, latent_PNZ.size)


@pytest.mark.parametrize("size, expected", [(1, 100), (30, 3), (100, 1), (101, 1), (10**9, 1)])
def test_at_once_is_at_least_one(monkeypatch, size, expected):
    monkeypatch.setattr(sampling, "_MAX_LOGITS", 100)
    assert sampling.at_once(size) == expected
