"""BrierLM over several chunks (K < 4), whose samples continue their own path; and which n-grams are scored."""

import collections
import dataclasses
import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calm_jax import brier
from calm_jax.brier import Protocol
from calm_jax.data.packing import MASKED
from calm_jax.models.autoencoder import Autoencoder
from calm_jax.models.autoregressive import AutoregressiveLM
from calm_jax.models.calm import CALM
from calm_jax.models.heads.energy import EnergyHead, EnergyHeadConfig
from calm_jax.models.heads.softmax import SoftmaxHead
from calm_jax.models.kv_cache import Fork, KVCache
from calm_jax.sampling.chunk_model import ChunkModel
from calm_jax.tasks import AutoencoderTask, AutoregressiveTask, CalmTask
from tests.models.networks import autoencoder_config, random_params, transformer_config

# --- A known distribution in a network's place ------------------------------------------------------

# For each K, the chunks that the distribution can draw; they share prefixes of every length.
CHUNKS = {
    1: "0 1 2",
    2: "00 01 10 11",
    3: "000 001 010 110 111",
    4: "0000 0001 0010 0110 1111",
    8: "00000000 00010010 00100111 01101101 10010010",
}
STATES = 5
# The next chunk's probabilities in each state; for fewer chunks only the first columns, normalised again.
WEIGHTS = np.random.default_rng(0).dirichlet([0.3] * 5, STATES) + 0.04


def chunks(chunk_size):
    return np.array([list(chunk) for chunk in CHUNKS[chunk_size].split()], np.int32)


def probabilities(chunk_size):
    weights = WEIGHTS[:, : len(chunks(chunk_size))]
    return weights / weights.sum(-1, keepdims=True)


def after(state, number):
    """The state after one more chunk; two contexts that differ in one chunk, or in length, have different states."""
    return (2 * state + number + 1) % STATES


class Seen(NamedTuple):
    """The distribution's cache: state_BS is the state after 0, 1, ... chunks, length_B the number of chunks read."""

    state_BS: jax.Array
    length_B: jax.Array

    def state(self):
        return jnp.take_along_axis(self.state_BS, self.length_B[:, None], axis=1)[:, 0]


def known_model(chunk_size, exact, table):
    """The distribution as a model, whose hidden state is the state of the distribution; if `exact`, the model has `log_probs`."""
    book, log_table = jnp.asarray(chunks(chunk_size)), jnp.log(table)

    def advance(tokens_BLK, memory):
        if memory is None:
            batch, size, _ = tokens_BLK.shape
            memory = empty_cache(batch, size, size)
        number_BL = (tokens_BLK[:, :, None] == book).all(-1).argmax(-1)
        states = [memory.state()]
        for number_B in number_BL.T:
            states.append(after(states[-1], number_B))
        state_BL = jnp.stack(states[1:], axis=1)
        place_BL = memory.length_B[:, None] + jnp.arange(1, len(states))
        rows_B1 = jnp.arange(len(place_BL))[:, None]
        missing = max(0, len(states) - memory.state_BS.shape[1])
        state_BS = jnp.pad(memory.state_BS, ((0, 0), (0, missing)))
        memory = Seen(state_BS.at[rows_B1, place_BL].set(state_BL), place_BL[:, -1])
        return state_BL[..., None].astype(jnp.float32), memory

    def empty_cache(batch, size, window):
        return Seen(jnp.zeros((batch, size + 1), jnp.int32), jnp.zeros(batch, jnp.int32))

    def fork(cache, length_B, size):
        memory = empty_cache(len(length_B), size, size)
        state_B = Seen(cache.state_BS, length_B).state()
        return memory._replace(state_BS=memory.state_BS.at[:, 0].set(state_B))

    def log_probs(h_PD):
        return log_table[h_PD[:, 0].astype(jnp.int32)]

    def latents(h_PD, num_draws, key_P, noise_scale):
        draw = jax.vmap(lambda key, row: jax.random.categorical(key, row, shape=(num_draws, 1)))
        return draw(key_P, log_probs(h_PD)).astype(jnp.float32)

    def unfold(latent_R1):
        return book[latent_R1[:, 0].astype(jnp.int32)][..., None]

    def argmax_tokens(token, prior):
        return token[..., 0]

    known = log_probs if exact else None
    return ChunkModel(latents, unfold, argmax_tokens, advance, empty_cache, fork, known, None)


def expected_terms(chunk_size, number_BL, starts_P, table):
    """`2 p_n(y) - sum p_n^2` given the true chunks before a start, over all continuations, [B, P, 4]."""
    book, num_chunks = chunks(chunk_size), brier.chunks_of(chunk_size)
    expected = np.zeros((len(number_BL), len(starts_P), 4))
    for (block, number_L), (place, start) in itertools.product(
        enumerate(number_BL), enumerate(starts_P)
    ):
        chunk, offset = divmod(start, chunk_size)
        before = functools.reduce(after, number_L[:chunk], 0)
        law = [collections.Counter() for _ in range(4)]
        for path in itertools.product(range(table.shape[1]), repeat=num_chunks):
            prob, state = 1.0, before
            for number in path:
                prob, state = prob * table[state, number], after(state, number)
            text = tuple(book[list(path)].reshape(-1)[offset:].tolist())
            for n in range(1, 5):
                law[n - 1][text[:n]] += prob
        truth = tuple(book[number_L[chunk : chunk + num_chunks]].reshape(-1)[offset:].tolist())
        for n, p_n in enumerate(law, 1):
            collision = sum(prob**2 for prob in p_n.values())
            expected[block, place, n - 1] = 2 * p_n[truth[:n]] - collision
    return expected


# --- Unbiased, by many draws ----------------------------------------------------------------------

TRUTHS, REPEATS = 2, 8000
# (K, exact)
MODELS = [(1, False), (1, True), (2, False), (3, False), (4, False), (8, False)]


def ignore_own(model):
    """A wrong model: a path does not read its own chunks."""

    def advance(tokens_BLK, memory):
        if tokens_BLK.shape[1] > 1:
            return model.advance(tokens_BLK, memory)
        return memory.state()[:, None, None].astype(jnp.float32), memory

    return dataclasses.replace(model, advance=advance)


def see_one_more(model):
    """A wrong model: a path sees the true chunk at its start, and then its own."""

    def fork(cache, length_B, size):
        return model.fork(cache, length_B + 1, size)

    return dataclasses.replace(model, fork=fork)


def follow_truth(model):
    """A wrong model: a path sees the true chunk at its start in place of its own."""
    return ignore_own(see_one_more(model))


def read_terms(model, token_BLK, *arguments):
    """`brier.brier_terms` of blocks that are read first."""
    return brier.brier_terms(model, token_BLK, brier.read(model, token_BLK, None), *arguments)


@functools.cache
def drawn_terms(chunk_size, num_samples, exact, wrong=None):
    """Terms of every start, [truths, repeats, P, 4], and their expectations, [truths, P, 4]."""
    protocol = Protocol(num_samples, inner_starts=True)
    model = known_model(chunk_size, exact, probabilities(chunk_size))
    if wrong is not None:
        model = wrong(model)
    book = chunks(chunk_size)
    num_chunks = brier.chunks_of(chunk_size)
    shape = (TRUTHS, num_chunks + 2)
    number_BL = np.random.default_rng(chunk_size).integers(len(book), size=shape)
    token_BLK = book[number_BL.repeat(REPEATS, axis=0)]
    key_BLJ = jax.random.split(
        jax.random.key(num_samples), (len(token_BLK), shape[1] - 1, num_chunks)
    )

    @jax.jit
    def run(token_BLK, key_BLJ):
        return read_terms(model, token_BLK, key_BLJ, protocol, 4, 3)

    terms_BP4 = np.asarray(run(token_BLK, key_BLJ), np.float64)
    terms = terms_BP4.reshape(TRUTHS, REPEATS, *terms_BP4.shape[1:])
    starts_P = protocol.starts(token_BLK[0].size, chunk_size)
    return terms, expected_terms(chunk_size, number_BL, starts_P, probabilities(chunk_size))


def standard_errors_off(chunk_size, num_samples, exact, wrong=None):
    """The distance of each mean from its expectation, in standard errors, [truths, P, 4]."""
    terms, expected = drawn_terms(chunk_size, num_samples, exact, wrong)
    # An exact term has no standard error; 1e-6 is for rounding.
    error = terms.std(1, ddof=1) / np.sqrt(REPEATS) + 1e-6
    return (terms.mean(1) - expected) / error


@pytest.mark.slow
@pytest.mark.parametrize("num_samples", [2, 8])
@pytest.mark.parametrize(("chunk_size", "exact"), MODELS)
def test_terms_are_unbiased_on_a_known_law(chunk_size, exact, num_samples):
    """All of 304 means are within 5 standard errors: one false alarm in 5,000 choices of seeds."""
    assert np.abs(standard_errors_off(chunk_size, num_samples, exact)).max() < 5


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [ignore_own, see_one_more, follow_truth])
@pytest.mark.parametrize(("chunk_size", "exact"), [(1, True), (2, False)])
def test_the_test_above_detects_wrong_paths(chunk_size, exact, wrong):
    """Their means are more than 10 standard errors off, and its bound is 5."""
    off = np.abs(standard_errors_off(chunk_size, 2, exact, wrong))
    assert off.max() > 10
    # Terms of the first chunk's tokens do not depend on the path.
    assert off[..., :chunk_size].max() < 5


@pytest.mark.slow
@pytest.mark.parametrize("chunk_size", [2, 4])
def test_more_samples_have_less_variance(chunk_size):
    few, many = (drawn_terms(chunk_size, num_samples, False)[0].var(1) for num_samples in (2, 8))
    assert (many < 0.4 * few).all()


# --- Unbiased, by enumeration ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chunk_size", "exact", "num_samples"),
    [(1, True, 2), (1, True, 3), (1, False, 2), (2, False, 2), (3, False, 2)],
)
def test_terms_are_unbiased_over_every_outcome_of_the_draws(chunk_size, exact, num_samples):
    """Over every outcome with its probability: exact, not random. One start, after two true chunks."""
    num_chunks, some = brier.chunks_of(chunk_size), 2 if chunk_size == 1 else 3
    book, table = chunks(chunk_size)[:some], probabilities(chunk_size)[:, :some]
    table = table / table.sum(-1, keepdims=True)
    model = known_model(chunk_size, exact, table)
    # The "key" of a draw is its outcome: the indices of its S chunks.
    model = dataclasses.replace(
        model, latents=lambda h_PD, num_draws, outcome_PS, noise_scale: outcome_PS[..., None]
    )
    outcomes = np.array(list(itertools.product(range(some), repeat=num_samples)))
    # The draws that the terms depend on: those along the path (with log_probs all but the last), and, for match terms
    # without log_probs, those after true chunks. The first draw of the path is also the first of these.
    on_path = num_chunks - exact
    given_truth = 0 if exact else num_chunks - 1
    case_RJ = np.array(list(itertools.product(range(len(outcomes)), repeat=on_path + given_truth)))
    draw_RJS = outcomes[case_RJ]

    number_L = np.array([1, 0, 1, 1, 0, 1])[: 2 + num_chunks]
    state = functools.reduce(after, number_L[:2], 0)
    weight_R, path_R = np.ones(len(case_RJ)), np.full(len(case_RJ), state)
    key_RLJS = np.zeros((len(case_RJ), 1 + num_chunks, num_chunks, num_samples), np.int32)
    for index in range(on_path):
        key_RLJS[:, 1, index] = draw_RJS[:, index]
        weight_R *= table[path_R[:, None], draw_RJS[:, index]].prod(-1)
        path_R = after(path_R, draw_RJS[:, index, 0])
    for index in range(given_truth):
        key_RLJS[:, 2 + index, 0] = draw_RJS[:, on_path + index]
        state = after(state, number_L[2 + index])
        weight_R *= table[state][draw_RJS[:, on_path + index]].prod(-1)
    assert weight_R.sum() == pytest.approx(1)

    protocol = Protocol(num_samples, first_token=2 * chunk_size)
    token_RLK = np.broadcast_to(book[number_L], (len(case_RJ), *book[number_L].shape))

    @jax.jit
    def run(token_RLK, key_RLJS):
        return read_terms(model, token_RLK, key_RLJS, protocol, 2, 1)

    terms_RP4 = np.asarray(run(token_RLK, key_RLJS), np.float64)
    expected = expected_terms(chunk_size, number_L[None], [2 * chunk_size], table)
    np.testing.assert_allclose(np.einsum("R,RPN->PN", weight_R, terms_RP4), expected[0], atol=1e-6)


def test_match_terms_of_known_probabilities_are_exact():
    """`2 prod p(y)` for any draws: without it, terms of different truths with the same keys are equal."""
    truths = np.array(list(itertools.product(range(3), repeat=4)))
    number_BL = np.concatenate([np.full((len(truths), 1), 2), truths], axis=1)
    key_LJ = jax.random.split(jax.random.key(1), (4, 4))
    key_BLJ = jnp.broadcast_to(key_LJ, (len(truths), 4, 4))
    table = probabilities(1)
    model = known_model(1, True, table)
    terms_B14 = jax.jit(lambda token_BLK: read_terms(model, token_BLK, key_BLJ, Protocol(2), 9, 9))(
        number_BL[..., None].astype(np.int32)
    )
    match_B4 = np.ones((len(truths), 4))
    for row, number_L in enumerate(number_BL):
        state = after(0, number_L[0])
        for n, number in enumerate(number_L[1:]):
            match_B4[row, n:] *= table[state, number]
            state = after(state, number)
    collision_B4 = 2 * match_B4 - terms_B14[:, 0]
    assert (collision_B4[0, :2] > 0).all()
    np.testing.assert_allclose(collision_B4, np.tile(collision_B4[0], (81, 1)), atol=1e-6)
    # The collision term of one token is exact, too.
    assert collision_B4[0, 0] == pytest.approx((table[after(0, 2)] ** 2).sum(), abs=1e-6)


# --- Networks: all starts at once, compared with each start alone ---------------------------------

V, PAD, D, Z = 6, 5, 16, 5


@functools.cache
def network(chunk_size, exact=False, num_kv_heads=2):
    """A tiny CALM or autoregressive model with random parameters, as samplers see it."""
    config = transformer_config(hidden_size=D, num_kv_heads=num_kv_heads)
    protocol = Protocol(num_samples=2)
    if exact:
        task = AutoregressiveTask(
            AutoregressiveLM(config, SoftmaxHead(V, D, jnp.float32), V, jnp.float32), PAD, protocol
        )
        return task.bind(random_params(task), {})
    head_config = EnergyHeadConfig("energy", 2, 6, 2, 2, 1.0)
    head = EnergyHead(head_config, D, Z, 1e-6, jnp.float32)
    autoencoder = AutoencoderTask(
        Autoencoder(autoencoder_config(latent_size=Z), V, chunk_size, jnp.float32),
        PAD,
        random_chunks=0.0,
    )
    task = CalmTask(
        CALM(config, head, None, V, PAD, jnp.float32),
        autoencoder.model,
        protocol,
        token_prior_weight=0.0,
    )
    return task.bind(random_params(task), {"params": random_params(autoencoder, seed=1)})


def random_tokens(*shape):
    return np.random.default_rng(2).integers(0, V - 1, shape).astype(np.int32)


def step_by_step(model, token_BLK, key_BLJ, num_samples):
    """The terms of every start straight from the definition, each start with an ordinary cache of its own."""
    batch, num_chunks, chunk_size = token_BLK.shape
    several = brier.chunks_of(chunk_size)
    advance, draw = jax.jit(model.advance), jax.jit(model.draw, static_argnums=1)
    log_probs = None if model.log_probs is None else jax.jit(model.log_probs)

    size = num_chunks + several
    cache = model.empty_cache(batch, size, size)
    seen = [(None, cache)]
    for chunk in range(num_chunks):
        h_B1D, cache = advance(token_BLK[:, chunk : chunk + 1], cache)
        seen.append((h_B1D[:, 0], cache))

    terms = []
    for start in range(1, num_chunks - several + 1):
        match, collision = [np.ones(batch)], []
        right_BS, agree_B = np.ones((batch, num_samples)), np.ones(batch)
        h_BD, cache = seen[start]
        for step in range(several):
            # Samples after the true chunks, for the match; then samples along the first sample's path, for the collision.
            h_true_BD, truth_BK = seen[start + step][0], token_BLK[:, start + step]
            if log_probs is None:
                sample_BSK = np.asarray(
                    draw(h_true_BD, num_samples, key_BLJ[:, start + step - 1, 0])
                )
                for place in range(chunk_size):
                    right_BS = right_BS * (sample_BSK[..., place] == truth_BK[:, None, place])
                    match.append(right_BS.mean(-1))
            else:
                log_prob_BV = np.asarray(log_probs(h_true_BD))
                match.append(match[-1] * np.exp(log_prob_BV[np.arange(batch), truth_BK[:, 0]]))
            sample_BSK = np.asarray(draw(h_BD, num_samples, key_BLJ[:, start - 1, step]))
            if log_probs is None:
                for n in range(1, chunk_size + 1):
                    same = [
                        (sample_BSK[:, s, :n] == sample_BSK[:, r, :n]).all(-1)
                        for s, r in itertools.permutations(range(num_samples), 2)
                    ]
                    collision.append(agree_B * np.mean(same, axis=0))
            else:
                collision.append(agree_B * np.exp(2 * np.asarray(log_probs(h_BD))).sum(-1))
            others = [(sample_BSK[:, r] == sample_BSK[:, 0]).all(-1) for r in range(1, num_samples)]
            agree_B = agree_B * np.mean(others, axis=0)
            h_B1D, cache = advance(sample_BSK[:, :1], cache)
            h_BD = h_B1D[:, 0]
        terms.append(2 * np.stack(match[1:5], axis=-1) - np.stack(collision[:4], axis=-1))
    return np.stack(terms, axis=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chunk_size", "exact", "at_once"),
    [
        (1, True, [99]),
        pytest.param(1, False, [99], marks=pytest.mark.slow),
        pytest.param(2, False, [1, 4, 99], marks=pytest.mark.slow),
        pytest.param(3, False, [99], marks=pytest.mark.slow),
    ],
)
def test_all_starts_at_once_equal_each_start_alone(chunk_size, exact, at_once, monkeypatch):
    """With the same keys, for every start, and for several numbers of starts that are continued at once."""
    monkeypatch.setattr(brier, "_PARTS", 1)
    model, num_samples = network(chunk_size, exact), 3
    token_BLK = random_tokens(16, 8, chunk_size)
    key_BLJ = jax.random.split(jax.random.key(0), (16, 7, brier.chunks_of(chunk_size)))
    expected = step_by_step(model, token_BLK, key_BLJ, num_samples)
    run = jax.jit(read_terms, static_argnums=(0, 3, 4, 5))
    for paths_at_once in at_once:
        terms = run(model, token_BLK, key_BLJ, Protocol(num_samples), 2, paths_at_once)
        np.testing.assert_allclose(terms, expected, atol=1e-5)
    # A control: terms take several values, so samples both agree and disagree.
    assert all(len(np.unique(expected[..., n].round(4))) > 3 for n in range(4))


@pytest.mark.slow
@pytest.mark.parametrize(("chunk_size", "exact", "at_once"), [(2, False, 2), (1, True, 3)])
def test_starts_that_are_continued_in_parts_get_the_terms_of_each_alone(chunk_size, exact, at_once):
    """For parts that do not divide the number of starts, rows of which different numbers of starts agree, and starts that do
    not count, of which each row has some."""
    model, num_samples, num_chunks = network(chunk_size, exact), 3, brier.chunks_of(chunk_size)
    token_BLK = random_tokens(3, 24, chunk_size)
    seen_P = jnp.arange(1, 24)
    # With a single token in a row all its starts agree; with random ones few do.
    sample_BPSK = np.array(random_tokens(3, 23, num_samples, chunk_size))
    sample_BPSK[0] = 1
    sample_BPSK[1, ::2, 1] = sample_BPSK[1, ::2, 0]
    counted_BP = np.random.default_rng(0).random((3, 23)) < 0.8
    key_BPJ = jax.random.split(jax.random.key(3), (3, 23, num_chunks))
    _, cache = jax.jit(model.advance)(token_BLK, model.empty_cache(3, 0, 24))

    @jax.jit
    def together(cache):
        given = seen_P, sample_BPSK, counted_BP, key_BPJ
        return brier.agreeing_path_collisions(model, cache, *given, at_once)

    @jax.jit
    def alone(cache, seen, sample_BSK, key_BJ):
        agree_B = brier.agreement(sample_BSK)
        start = jnp.full(3, seen), sample_BSK[:, 0], agree_B, key_BJ
        return brier.path_collisions(model, cache, *start, num_samples)

    each = [
        alone(cache, seen, sample_BPSK[:, place], key_BPJ[:, place])
        for place, seen in enumerate(seen_P)
    ]
    expected = np.stack(each, axis=1)
    of_counted = np.where(counted_BP[..., None], expected, 0)
    np.testing.assert_allclose(together(cache), of_counted, atol=1e-6)
    assert 0 < np.count_nonzero(of_counted) < np.count_nonzero(expected)
    agree_BP = np.asarray(brier.agreement(sample_BPSK)) > 0
    assert agree_BP[2].sum() < agree_BP[1].sum() < agree_BP[0].sum() == 23
    assert not expected[~agree_BP].any() and expected[agree_BP].any(-1).mean() > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("num_kv_heads", [4, 2])
def test_a_fork_of_a_shared_cache_equals_an_ordinary_cache(num_kv_heads):
    """Hidden states of two chunks, read one by one and together, after each number of chunks of the shared cache."""
    model = network(2, num_kv_heads=num_kv_heads)
    token_BLK, own_PBLK = random_tokens(3, 5, 2), random_tokens(5, 3, 2, 2)
    _, cache = jax.jit(model.advance)(token_BLK, model.empty_cache(3, 6, 6))
    # Rows of one fork have different lengths; over the starts each row has all lengths from 1 to 5.
    length_PB = 1 + (np.arange(5)[:, None] + np.arange(3)) % 5

    @jax.jit
    def by_fork(cache, length_PB, own_PBLK):
        def of_start(length_B, own_BLK):
            fork = model.fork(cache, length_B, 2)
            together, _ = model.advance(own_BLK, fork)
            first, fork = model.advance(own_BLK[:, :1], fork)
            second, fork = model.advance(own_BLK[:, 1:], fork)
            return together, jnp.concatenate([first, second], axis=1), fork

        # The prefix is returned without an axis of starts: it is stored once.
        prefix = KVCache(None, None, 0, None)
        return jax.vmap(of_start, out_axes=(0, 0, Fork(prefix, 0)))(length_PB, own_PBLK)

    together, one_by_one, fork = by_fork(cache, length_PB, own_PBLK)
    np.testing.assert_array_equal(fork.prefix.key, cache.key)
    np.testing.assert_array_equal(fork.prefix.value, cache.value)
    np.testing.assert_array_equal(fork.own.length, np.full((5, 3), 2))

    advance = jax.jit(model.advance)
    caches = [model.empty_cache(3, 8, 8)]
    for chunk in range(5):
        caches.append(advance(token_BLK[:, chunk : chunk + 1], caches[-1])[1])
    for start, row in itertools.product(range(5), range(3)):
        expected, _ = advance(own_PBLK[start], caches[length_PB[start, row]])
        np.testing.assert_allclose(together[start, row], expected[row], atol=1e-5)
        np.testing.assert_allclose(one_by_one[start, row], expected[row], atol=1e-5)


# --- Which n-grams are scored ---------------------------------------------------------------------

SIZES = [1, 2, 3, 4, 5, 6, 8, 16]
PROTOCOLS = [
    Protocol(2),
    Protocol(2, inner_starts=True),
    Protocol(2, skip_last_start=True),
    Protocol(2, first_token=10, start_every=2, inner_starts=True, skip_last_start=True),
]


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=str)
@pytest.mark.parametrize("chunk_size", SIZES)
def test_scored_n_grams_lie_in_whole_predicted_chunks(chunk_size, protocol):
    """Starts ascend; no n-gram is in the first chunk, before `first_token`, or beyond the block."""
    num_tokens = 6 * chunk_size + 12 // chunk_size * chunk_size
    starts_P = protocol.starts(num_tokens, chunk_size)
    assert len(starts_P) and (np.diff(starts_P) > 0).all()
    assert starts_P[0] >= max(chunk_size, protocol.first_token)
    assert (starts_P % protocol.start_every == 0).all()
    assert (brier.windows(starts_P) < num_tokens).all()
    last_chunk = starts_P // chunk_size + brier.chunks_of(chunk_size)
    assert (last_chunk * chunk_size <= num_tokens).all()
    np.testing.assert_array_equal(
        brier.windows(starts_P) - starts_P[:, None], [range(4)] * len(starts_P)
    )


@pytest.mark.parametrize("chunk_size", SIZES)
def test_every_chunk_is_a_start_if_its_n_gram_fits_into_the_block(chunk_size):
    num_chunks = 9
    last = num_chunks - {1: 4, 2: 2, 3: 2}.get(chunk_size, 1)
    boundaries = np.arange(1, last + 1) * chunk_size
    starts_P = Protocol(2).starts(num_chunks * chunk_size, chunk_size)
    np.testing.assert_array_equal(starts_P, boundaries)
    skipped = Protocol(2, skip_last_start=True).starts(num_chunks * chunk_size, chunk_size)
    np.testing.assert_array_equal(skipped, boundaries[:-1] if chunk_size < 4 else boundaries)


@pytest.mark.parametrize("chunk_size", SIZES)
def test_inner_starts_are_all_tokens_with_four_tokens_in_one_chunk(chunk_size):
    num_tokens = 6 * chunk_size
    outer = set(Protocol(2).starts(num_tokens, chunk_size))
    inner = {
        start
        for start in range(chunk_size, num_tokens - 3)
        if start // chunk_size == (start + 3) // chunk_size
    }
    starts_P = Protocol(2, inner_starts=True).starts(num_tokens, chunk_size)
    assert set(starts_P) == outer | inner


@pytest.mark.parametrize(
    ("num_tokens", "start_every", "sizes"),
    [(64, 4, (1, 2, 4, 8, 16)), (72, 12, (1, 2, 3, 4)), (72, 12, (6, 12, 2))],
)
def test_starts_with_one_stride_are_the_same_for_every_chunk_size(num_tokens, start_every, sizes):
    """So that models with different K are scored on the same n-grams."""
    protocol = Protocol(2, first_token=16, start_every=start_every, inner_starts=True)
    expected = [start for start in range(16, num_tokens) if start % start_every == 0]
    for chunk_size in sizes:
        assert protocol.starts(num_tokens, chunk_size).tolist() == expected


def test_an_n_gram_counts_when_its_first_n_tokens_are_text():
    """For each n separately, at any start."""
    pad = 9
    rng = np.random.default_rng(0)
    target_BT = rng.choice([0, 3, pad, MASKED], (20, 30), p=[0.4, 0.4, 0.1, 0.1])
    starts_P = np.array([1, 2, 3, 9, 10, 26])
    counted_BP4 = brier.counted(target_BT, starts_P, pad)
    assert counted_BP4.dtype == bool
    for block, (place, start), n in itertools.product(range(20), enumerate(starts_P), range(1, 5)):
        text = not {pad, MASKED} & set(target_BT[block, start : start + n].tolist())
        assert counted_BP4[block, place, n - 1] == text
    assert counted_BP4.any((0, 1)).all() and not counted_BP4.all((0, 1)).any()


def test_n_grams_with_a_mask_or_pad_do_not_count():
    target_BT = np.array([[1, 2, 9, 4, 5, 6, 7, MASKED]])
    counted = brier.counted(target_BT, np.array([0, 2, 3, 4]), 9)[0].astype(int)
    assert counted.tolist() == [[1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1], [1, 1, 1, 0]]
