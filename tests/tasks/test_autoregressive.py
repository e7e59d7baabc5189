"""The autoregressive baseline: its loss by hand, invariances, and draws from known distributions."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calm_jax.brier import Protocol
from calm_jax.data.packing import MASKED
from calm_jax.models import vocabulary
from calm_jax.models.autoregressive import AutoregressiveLM
from calm_jax.models.heads.softmax import SoftmaxHead
from calm_jax.sampling import decode
from calm_jax.sampling.config import SamplerConfig
from calm_jax.sampling.samplers import sample_chunk, sample_token
from calm_jax.tasks import AutoregressiveTask
from calm_jax.tasks.base import ratio
from tests.models import networks
from tests.models.networks import keys, transformer_config
from tests.sampling.laws import p_value

V, PAD, D, F, LAYERS = 23, 22, 16, 24, 2
BODY = transformer_config(hidden_size=D, intermediate_size=F, num_layers=LAYERS)


def ar_task(**body):
    head = SoftmaxHead(V, D, jnp.float32)
    model = AutoregressiveLM(dataclasses.replace(BODY, **body), head, V, jnp.float32)
    return AutoregressiveTask(model, PAD, Protocol(num_samples=2))


@functools.cache
def random_params():
    """Parameters large enough that tokens and positions matter."""
    return networks.random_params(ar_task())


def random_tokens(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, V, shape).astype(np.int32)


def batch_of(B=3, T=7, seed=0):
    tokens = random_tokens(B, T, seed=seed)
    return {"tokens": tokens, "targets": tokens.copy()}


@functools.cache
def _forward(task):
    def forward(params, tokens_BT):
        variables = {"params": params}
        h_BLD, _ = task.model.apply(variables, tokens_BT[..., None], method="hidden")
        logits_BTV = jnp.einsum("BLD,DV->BLV", h_BLD, params["head"]["kernel"], precision="highest")
        return h_BLD, logits_BTV

    return jax.jit(forward)


def forward(tokens_BT, params=None, task=None):
    """Hidden states and logits at every position, without a cache."""
    return _forward(task or ar_task())(random_params() if params is None else params, tokens_BT)


@functools.cache
def _loss_of(task):
    return jax.jit(lambda params, batch: task.loss(params, {}, batch, keys(len(batch["tokens"]))))


def loss_of(batch, task=None, params=None):
    """The loss's (sum, weight)."""
    return _loss_of(task or ar_task())(random_params() if params is None else params, batch)["loss"]


# --- The loss


def by_hand(batch):
    """Cross-entropy of each token but the first given those before it, [B, T-1], in float64."""
    _, logits_BTV = forward(batch["tokens"])
    logits_BTV = np.asarray(logits_BTV, np.float64)[:, :-1]
    log_normaliser_BT = np.log(np.exp(logits_BTV).sum(-1))
    target_BT1 = batch["targets"][:, 1:, None]
    chosen = np.take_along_axis(logits_BTV, np.maximum(target_BT1, 0), axis=-1)[..., 0]
    return np.where(target_BT1[..., 0] >= 0, log_normaliser_BT - chosen, 0)


def test_loss_is_the_cross_entropy_of_each_token_given_those_before_it():
    batch = batch_of()
    total, weight = loss_of(batch)
    assert weight == 3 * 6
    np.testing.assert_allclose(total, by_hand(batch).sum(), rtol=1e-5)


def test_an_untrained_model_has_the_loss_of_the_uniform_law():
    """log V, nearly: logits are small, as products of 16 numbers of size 1 and 0.02."""
    params = jax.jit(ar_task().init)(jax.random.key(0))
    assert abs(ratio(loss_of(batch_of(), params=params)) - math.log(V)) < 0.1


def test_masked_targets_do_not_count_but_are_read():
    """A mask removes the token's own term and weight; later tokens still attend to the token."""
    batch = batch_of()
    terms_BT = by_hand(batch)
    batch["targets"][0, 3] = batch["targets"][2, 1:4] = MASKED
    kept_BT = batch["targets"][:, 1:] != MASKED
    total, weight = loss_of(batch)
    assert weight == kept_BT.sum() == 14
    np.testing.assert_allclose(total, terms_BT[kept_BT].sum(), rtol=1e-5)


def test_a_batch_of_masks_has_no_loss_no_weight_and_no_gradient():
    batch = batch_of()
    batch["targets"][:] = MASKED

    def loss(params):
        return ar_task().loss(params, {}, batch, keys(3))["loss"]

    gradient_of = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (total, weight), gradient = gradient_of(random_params())
    assert (total, weight) == (0, 0)
    assert all((np.asarray(leaf) == 0).all() for leaf in jax.tree.leaves(gradient))


def test_the_first_token_is_no_target():
    batch = batch_of()
    expected = loss_of(batch)
    batch["targets"][:, 0] = MASKED
    jax.tree.map(np.testing.assert_array_equal, loss_of(batch), expected)


def test_the_task_loss_does_not_depend_on_how_many_logits_are_stored_at_once(monkeypatch):
    batch = batch_of()
    whole = loss_of(batch)
    monkeypatch.setattr(vocabulary, "_MAX_LOGITS_ON_CPU", 1)
    monkeypatch.setattr(vocabulary, "_TILE", 4)
    assert vocabulary.block_size(18, V, on_cpu=True) == 4
    in_blocks = jax.jit(lambda p: ar_task().loss(p, {}, batch, keys(3)))(random_params())["loss"]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), in_blocks, whole)


@pytest.mark.parametrize("remat", ["full", pytest.param("dots", marks=pytest.mark.slow)])
def test_remat_changes_neither_loss_nor_gradient(remat):
    def of(remat):
        task, batch = ar_task(remat=remat), batch_of()

        def loss(params):
            return task.loss(params, {}, batch, keys(3))["loss"][0]

        return jax.jit(jax.value_and_grad(loss))(random_params())

    (loss, kept), (same_loss, recomputed) = of("none"), of(remat)
    np.testing.assert_allclose(loss, same_loss, rtol=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), recomputed, kept
    )


def test_a_pad_has_an_ordinary_trained_embedding():
    """Unlike in CALM: it is initialised as any other, is read, and gets a gradient."""
    fresh = jax.jit(ar_task().init)(jax.random.key(0))["embed"]["embedding"]
    # A row's 16 numbers N(0, 0.02^2): a root mean square half or twice that happens once in 10^4 rows.
    assert 0.01 < np.sqrt((fresh[PAD] ** 2).mean()) < 0.04
    assert abs(fresh.std() / 0.02 - 1) < 0.25

    batch = batch_of()
    batch["tokens"][1, 2] = batch["targets"][1, 2] = PAD
    batch["tokens"][batch["tokens"] == 0] = 1  # token 0 is a control: not read
    batch["targets"][batch["targets"] == 0] = 1

    def loss(params):
        return ar_task().loss(params, {}, batch, keys(3))["loss"][0]

    gradient = jax.jit(jax.grad(loss))(random_params())["embed"]["embedding"]
    assert np.abs(gradient[PAD]).max() > 1e-3
    assert (gradient[0] == 0).all()
    other = batch["tokens"].copy()
    other[1, 2] = 5
    assert np.abs(forward(other)[0][1, 2:] - forward(batch["tokens"])[0][1, 2:]).max() > 1e-3


# --- The network


@pytest.mark.parametrize("place", [1, 3, 6])
def test_no_hidden_state_sees_a_later_token(place):
    tokens = random_tokens(2, 7)
    changed = tokens.copy()
    changed[:, place] = (changed[:, place] + 1) % V
    before, after = (np.asarray(forward(t)[0]) for t in (tokens, changed))
    np.testing.assert_allclose(before[:, :place], after[:, :place], rtol=0, atol=1e-6)
    assert (np.abs(before - after)[:, place:].max(-1) > 1e-3).all()


@pytest.mark.slow
@pytest.mark.parametrize("num_kv_heads", [4, 2])
def test_cached_decode_equals_full_forward(num_kv_heads):
    task = ar_task(num_kv_heads=num_kv_heads)
    shapes = jax.eval_shape(task.init, jax.random.key(0))
    rng = np.random.default_rng(3)
    params = jax.tree.map(lambda leaf: rng.normal(0.2, 0.3, leaf.shape).astype(np.float32), shapes)
    tokens_BLK = random_tokens(2, 6, 1)
    full, none = task.model.apply({"params": params}, tokens_BLK, method="hidden")
    assert none is None
    advance = jax.jit(lambda t, c: task.model.apply({"params": params}, t, c, method="hidden"))
    cache, steps = task.bind({}, {}).empty_cache(2, 8, 8), []
    for first, last in ((0, 3), (3, 4), (4, 5), (5, 6)):
        h_BLD, cache = advance(tokens_BLK[:, first:last], cache)
        steps.append(h_BLD)
    np.testing.assert_allclose(np.concatenate(steps, axis=1), full, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(cache.length, [6, 6])


def test_log_probs_are_the_log_softmax_of_the_logits():
    """Of the model's `__call__`, and of `log_probs` in the task's interface to samplers."""
    task, params, tokens = ar_task(), random_params(), random_tokens(2, 5)
    h_BLD, logits = forward(tokens)
    expected = jax.nn.log_softmax(logits)
    called = task.model.apply({"params": params}, tokens[..., None])
    np.testing.assert_allclose(called, expected, atol=1e-5)
    bound = task.bind(params, {}).log_probs(h_BLD.reshape(-1, D))
    np.testing.assert_allclose(bound, expected.reshape(-1, V), atol=1e-5)


@pytest.mark.parametrize("num_layers,num_kv_heads", [(1, 4), (3, 4), (2, 2)])
def test_parameter_count(num_layers, num_kv_heads):
    """Two tables, layers and a norm; a layer has four projections (smaller for grouped keys and values), a SwiGLU, two norms."""
    task = ar_task(num_layers=num_layers, num_kv_heads=num_kv_heads)
    shapes = jax.tree.leaves(jax.eval_shape(task.init, jax.random.key(0)))
    attention = 2 * D * D + 2 * D * (D // 4) * num_kv_heads
    if num_kv_heads == 4:
        assert attention == 4 * D * D
    layer = attention + 3 * D * F + 2 * D
    assert sum(math.prod(leaf.shape) for leaf in shapes) == 2 * V * D + num_layers * layer + D


# --- Generation


def argmax_continuation(prompt, steps):
    """The most likely token after each longer text, by full forward passes."""
    tokens = list(prompt)
    for _ in range(steps):
        # Padded to one shape, which compiles once; causal attention does not see the padding.
        padded = np.zeros((1, 12), np.int32)
        padded[0, : len(tokens)] = tokens
        tokens.append(int(forward(padded)[1][0, len(tokens) - 1].argmax()))
    return tokens[len(prompt) :]


def sampler_config(**changes):
    values = dict(
        temperature=0.0, sampler="batch", num_candidates=1, max_draws=1, draws_at_once=1, top_p=1.0
    )
    return SamplerConfig(**(values | changes))


def continued(prompt_BT, length_B, steps, eos_id):
    """The most likely continuation of each prompt by `prefill` and `decode`: the state and the chunks."""
    task, batch = ar_task(), len(prompt_BT)
    size = prompt_BT.shape[1] + steps
    state = decode.prefill(
        task.bind,
        random_params(),
        {},
        prompt_BT[..., None],
        np.array(length_B, np.int32),
        np.int32(size),
        size=size,
        piece=prompt_BT.shape[1],
    )
    state, chunks = decode.decode(
        task.bind,
        random_params(),
        {},
        state,
        keys(batch),
        np.int32(steps),
        num_chunks=steps,
        eos_id=eos_id,
        config=sampler_config(),
    )
    return jax.device_get((state, chunks))


def test_generation_at_temperature_0_equals_the_argmax_of_full_forward_passes():
    """With a cache, for prompts of different lengths in one batch."""
    prompts, lengths, steps = random_tokens(3, 5, seed=2), [5, 1, 3], 6
    state, chunks = continued(prompts, lengths, steps, eos_id=-1)
    expected = [argmax_continuation(prompts[b, :n], steps) for b, n in enumerate(lengths)]
    assert len(np.unique(expected)) > 3  # not one token over and over
    np.testing.assert_array_equal(chunks.tokens[..., 0], expected)
    assert state.step == steps and not state.ended.any()
    # With known probabilities a token costs one draw, and its distribution is exact.
    assert (chunks.draws == 1).all() and (chunks.decoded == 1).all() and chunks.exact.all()


def test_generation_ends_with_eos():
    """The eos here is a token of the argmax continuation; after it nothing is generated."""
    prompt, steps = random_tokens(1, 5, seed=2), 6
    expected = argmax_continuation(prompt[0], steps)
    eos = expected[3]
    length = expected.index(eos) + 1
    state, chunks = continued(prompt, [5], steps, eos)
    assert state.ended.all() and state.step == length < steps
    np.testing.assert_array_equal(chunks.tokens[0, :length, 0], expected[:length])
    assert not chunks.draws[0, length:].any()


# --- Draws. Chi-square tests at p > 1e-4: with another seed a test would fail once in ten thousand times.

PROBS = np.array([0.2, 0.05, 0.4, 0.1, 0.25])  # not sorted, so that ranks and ids differ
DRAWS = 20_000


@functools.partial(jax.jit, static_argnums=(1, 2))
def _draw(log_p_V, temperature, top_p):
    log_p_BV = jnp.broadcast_to(log_p_V, (DRAWS, len(log_p_V)))
    return sample_token(log_p_BV, keys(DRAWS, seed=11), temperature, top_p)


def counts(probs, temperature=1.0, top_p=1.0):
    """How many of DRAWS draws give each token."""
    log_p_V = jnp.log(jnp.asarray(probs, jnp.float32))
    tokens = np.asarray(_draw(log_p_V, temperature, top_p))
    assert tokens.dtype == np.int32
    return np.bincount(tokens, minlength=len(probs))


@pytest.mark.parametrize("temperature", [1.0, 2.0, 0.5, 0.3])
def test_draws_have_the_law_of_their_temperature(temperature):
    """p^(1/T), normalised. A control: the test rejects the distribution of a temperature that is a sixth lower."""
    count_V = counts(PROBS, temperature)
    assert p_value(count_V, PROBS ** (1 / temperature)) > 1e-4
    assert p_value(count_V, PROBS ** (1.2 / temperature)) < 1e-4


def test_high_temperatures_flatten_and_low_ones_sharpen():
    likeliest = [counts(PROBS, t)[2] / DRAWS for t in (0.01, 0.5, 1.0, 2.0, 100.0)]
    assert likeliest == sorted(likeliest, reverse=True)
    assert likeliest[0] == 1
    # 0.2 at infinity, 0.2028 at 100, plus 5 standard errors (0.0028): one false alarm in a million.
    assert likeliest[-1] < 0.217
    two = np.sqrt(PROBS) / np.sqrt(PROBS).sum()
    assert two.max() < PROBS.max()
    assert two.min() > PROBS.min()


def test_temperature_0_takes_the_likeliest():
    assert counts(PROBS, 0.0)[2] == DRAWS
    log_p_BV = jnp.log(jnp.asarray([PROBS, PROBS[::-1], np.roll(PROBS, 2)]))
    np.testing.assert_array_equal(sample_token(log_p_BV, keys(3), 0.0, 1.0), [2, 2, 4])


# For each top_p, the smallest set of tokens that reaches it. The sorted probabilities, 0.4 0.25 0.2 0.1 0.05, of the ids
# 2 4 0 3 1, have the partial sums 0.4 0.65 0.85 0.95 1; top_p is just below or above them, because of rounding.
TOP_P = {
    1e-6: {2},
    0.1: {2},
    0.3999: {2},
    0.4001: {2, 4},
    0.6499: {2, 4},
    0.6501: {2, 4, 0},
    0.8499: {2, 4, 0},
    0.8501: {2, 4, 0, 3},
    0.9499: {2, 4, 0, 3},
    0.9501: {2, 4, 0, 3, 1},
    1.0: {2, 4, 0, 3, 1},
}


def kept_of(probs, kept):
    """The probabilities with all but the kept tokens set to 0."""
    return np.where(np.isin(np.arange(len(probs)), list(kept)), probs, 0)


@pytest.mark.parametrize("top_p", TOP_P)
def test_top_p_keeps_the_smallest_likeliest_set_that_reaches_it(top_p):
    """Each kept token has a probability of at least 0.05, so that all of them occur among 20,000 draws."""
    count_V = counts(PROBS, top_p=top_p)
    assert set(np.flatnonzero(count_V)) == TOP_P[top_p]
    if len(TOP_P[top_p]) > 1:
        assert p_value(count_V, kept_of(PROBS, TOP_P[top_p])) > 1e-4


@pytest.mark.parametrize("top_p,size", [(0.39, 1), (0.41, 2), (0.59, 2), (0.61, 3), (0.81, 4)])
def test_top_p_keeps_no_more_of_equal_tokens_than_it_needs(top_p, size):
    """The most likely token is always kept; of the three equal ones, only as many as reach top_p."""
    count_V = counts([0.2, 0.2, 0.4, 0.2], top_p=top_p)
    assert count_V[2] > 0
    assert (count_V > 0).sum() == size


@pytest.mark.parametrize(
    "temperature,top_p,kept",
    [
        # p^2, normalised, has the partial sums 0.582, 0.809, ...
        (0.5, 0.5, {2}),
        (0.5, 0.6, {2, 4}),
        (0.5, 0.8, {2, 4}),
        # p^(1/2), normalised, has the partial sums 0.298, 0.534, 0.745, ...; for p itself 0.35 keeps one, 0.6 two.
        (2.0, 0.35, {2, 4}),
        (2.0, 0.6, {2, 4, 0}),
    ],
)
def test_top_p_applies_to_the_probabilities_after_the_temperature(temperature, top_p, kept):
    count_V = counts(PROBS, temperature, top_p)
    assert set(np.flatnonzero(count_V)) == kept
    if len(kept) > 1:
        assert p_value(count_V, kept_of(PROBS ** (1 / temperature), kept)) > 1e-4


def test_a_rows_draw_depends_only_on_its_own_key_and_law():
    """Not on the other rows; equal rows with different keys differ."""
    rng = np.random.default_rng(0)
    log_p_BV = jax.nn.log_softmax(jnp.asarray(rng.normal(size=(50, V)), jnp.float32))
    together = sample_token(log_p_BV, keys(50), 0.9, 0.95)
    some = np.array([31, 4, 17])
    np.testing.assert_array_equal(
        sample_token(log_p_BV[some], keys(50)[some], 0.9, 0.95), together[some]
    )
    # Fifty draws of two equally likely tokens are all the same about once in 10^15 times.
    alike = sample_token(jnp.zeros((50, 2)), keys(50), 1.0, 1.0)
    assert len(set(np.asarray(alike).tolist())) == 2


def test_draw_and_sample_chunk_have_the_law_of_log_probs():
    """`draw` is what BrierLM uses, `sample_chunk` what generation uses."""
    task, params = ar_task(), random_params()
    model = task.bind(params, {})
    h_1D = np.random.default_rng(1).normal(size=(1, D)).astype(np.float32)
    law_V = np.exp(np.asarray(model.log_probs(h_1D)[0], np.float64))
    assert (
        law_V.max() < 0.5
    )  # a distribution worth testing; expected counts are at least 5 in all but rare tokens
    drawn = np.asarray(model.draw(h_1D, DRAWS, keys(1)))
    assert drawn.shape == (1, DRAWS, 1)
    h_BD, active_B = np.repeat(h_1D, DRAWS, axis=0), np.ones(DRAWS, bool)
    config = sampler_config(temperature=1.0)
    sampled = np.asarray(sample_chunk(model, h_BD, keys(DRAWS, seed=3), active_B, config).tokens)
    assert sampled.shape == (DRAWS, 1)
    for tokens in (drawn, sampled):
        count_V = np.bincount(tokens.reshape(-1), minlength=V)
        assert p_value(count_V, law_V) > 1e-4
