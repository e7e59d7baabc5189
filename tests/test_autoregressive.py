"""The autoregressive baseline: its loss by hand, what must not matter to it, and draws with a known law."""

import dataclasses
import functools
import math

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from calm_jax import generation, sampling
from calm_jax.brier import Protocol
from calm_jax.data.blocks import MASKED
from calm_jax.heads.softmax import SoftmaxHead
from calm_jax.models.autoregressive import AutoregressiveLM
from calm_jax.models.transformer import KVCache, TransformerConfig
from calm_jax.samplers import SamplerConfig, sample_chunk, sample_token
from calm_jax.tasks import ArTask, ratio

V, PAD, D, F, LAYERS = 23, 22, 16, 24, 2
BODY = TransformerConfig(
    hidden_size=D,
    intermediate_size=F,
    num_layers=LAYERS,
    num_heads=4,
    num_kv_heads=2,
    rope_theta=1e4,
    norm_epsilon=1e-6,
    remat="none",
    attention="auto",
)


def ar_task(**body):
    head = SoftmaxHead(V, D, jnp.float32)
    model = AutoregressiveLM(dataclasses.replace(BODY, **body), head, V, jnp.float32)
    return ArTask(model, PAD, Protocol(num_samples=2))


@functools.cache
def random_params(seed=0):
    """Parameters with nothing left at its initial value; large enough that tokens and places matter."""
    rng = np.random.default_rng(seed)
    shapes = flax.traverse_util.flatten_dict(
        jax.eval_shape(ar_task().init, jax.random.key(0)), sep="/"
    )
    params = {
        path: jnp.asarray(rng.normal(path.endswith("scale"), 0.3, leaf.shape), jnp.float32)
        for path, leaf in shapes.items()
    }
    return flax.traverse_util.unflatten_dict(params, sep="/")


def random_tokens(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, V, shape).astype(np.int32)


def batch_of(B=3, T=7, seed=0):
    tokens = random_tokens(B, T, seed=seed)
    return {"tokens": tokens, "targets": tokens.copy()}


def keys(B, seed=7):
    return jax.random.split(jax.random.key(seed), B)


@functools.cache
def _forward(task):
    def forward(params, tokens_BT):
        variables = {"params": params}
        h_BLD, _ = task.model.apply(variables, tokens_BT[..., None], method="hidden")
        logits_BTV = jnp.einsum("BLD,DV->BLV", h_BLD, params["head"]["kernel"], precision="highest")
        return h_BLD, logits_BTV

    return jax.jit(forward)


def forward(tokens_BT, params=None, task=None):
    """Hidden states and logits of every place, without a cache."""
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


def test_a_fresh_model_knows_nothing():
    """Its loss is log V, as of the uniform law: its logits are products of 16 numbers of size 1 and 0.02."""
    params = jax.jit(ar_task().init)(jax.random.key(0))
    assert abs(ratio(loss_of(batch_of(), params=params)) - math.log(V)) < 0.1


def test_masked_targets_count_nothing():
    """A mask takes its own term and weight out, and nothing else: it is still read by later tokens."""
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


@pytest.mark.parametrize("block", [1, 4, 6, 100])
def test_blocks_of_positions_change_neither_loss_nor_gradient(block):
    """Against a log-softmax over everything at once; 4 does not divide the 6 positions."""
    rng = np.random.default_rng(0)
    h_BLD = rng.normal(size=(3, 6, D)).astype(np.float32)
    target_BL = random_tokens(3, 6)
    target_BL[1, 2] = target_BL[2, 5] = MASKED
    weight_BL = rng.normal(size=(3, 6)).astype(np.float32)
    head, params = SoftmaxHead(V, D, jnp.float32), {"kernel": random_params()["head"]["kernel"]}

    def in_blocks(params, h_BLD):
        return head.apply({"params": params}, h_BLD, target_BL, block, method="loss")

    def plain(params, h_BLD):
        log_p_BLV = jax.nn.log_softmax(jnp.einsum("BLD,DV->BLV", h_BLD, params["kernel"]))
        one_hot_BLV = target_BL[..., None] == np.arange(V)  # all false at a mask
        return -jnp.where(one_hot_BLV, log_p_BLV, 0).sum(-1)

    def results(loss):
        def weighted(params, h_BLD):
            # Weights of both signs, so that each position's own gradient shows.
            return (weight_BL * loss(params, h_BLD)).sum()

        return loss(params, h_BLD), jax.grad(weighted, (0, 1))(params, h_BLD)

    ours, expected = jax.jit(lambda: (results(in_blocks), results(plain)))()
    assert ours[0].shape == (3, 6)
    assert ours[0][1, 2] == ours[0][2, 5] == 0
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), ours, expected
    )


def test_the_task_loss_does_not_depend_on_how_many_logits_are_held(monkeypatch):
    batch = batch_of()
    whole = loss_of(batch)
    monkeypatch.setattr(sampling, "_MAX_LOGITS", 1)  # one position at a time
    assert sampling.at_once(3 * V) == 1
    one_by_one = jax.jit(lambda p: ar_task().loss(p, {}, batch, keys(3)))(random_params())["loss"]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), one_by_one, whole)


@pytest.mark.parametrize("remat", ["full", pytest.param("dots", marks=pytest.mark.slow)])
def test_recomputing_layers_changes_neither_loss_nor_gradient(remat):
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
    """Unlike in CALM: its row starts as any other, is read, and gets a gradient."""
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
    cache, steps = KVCache.empty(task.model.config, 2, 8, 8, jnp.float32), []
    for first, last in ((0, 3), (3, 4), (4, 5), (5, 6)):
        h_BLD, cache = advance(tokens_BLK[:, first:last], cache)
        steps.append(h_BLD)
    np.testing.assert_allclose(np.concatenate(steps, axis=1), full, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(cache.length, [6, 6])


def test_the_models_parts_agree():
    """`__call__`, and `log_probs` of the task's sampler, are the log-softmax of the logits."""
    task, params, tokens = ar_task(), random_params(), random_tokens(2, 5)
    h_BLD, logits = forward(tokens)
    expected = jax.nn.log_softmax(logits)
    called = task.model.apply({"params": params}, tokens[..., None])
    np.testing.assert_allclose(called, expected, atol=1e-5)
    bound = task.bind(params, {}).log_probs(h_BLD.reshape(-1, D))
    np.testing.assert_allclose(bound, expected.reshape(-1, V), atol=1e-5)


@pytest.mark.parametrize("num_layers,num_kv_heads", [(1, 4), (3, 4), (2, 2)])
def test_parameter_count(num_layers, num_kv_heads):
    """Two tables; a layer has four square projections (narrower keys and values if grouped), a SwiGLU, two norms."""
    task = ar_task(num_layers=num_layers, num_kv_heads=num_kv_heads)
    shapes = jax.tree.leaves(jax.eval_shape(task.init, jax.random.key(0)))
    attention = 2 * D * D + 2 * D * (D // 4) * num_kv_heads
    if num_kv_heads == 4:
        assert attention == 4 * D * D
    layer = attention + 3 * D * F + 2 * D
    assert sum(math.prod(leaf.shape) for leaf in shapes) == 2 * V * D + num_layers * layer + D


# --- Generation


def argmax_continuation(prompt, steps):
    """Tokens that full forward passes over an ever longer text think likeliest."""
    tokens = list(prompt)
    for _ in range(steps):
        # One shape compiles once; what stands beyond the text is not seen.
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
    """The likeliest tokens after each prompt and which rows ended, as `Generator` asks for them."""
    task, batch = ar_task(), len(prompt_BT)
    size = prompt_BT.shape[1] + steps
    state = generation.start(
        task.bind,
        random_params(),
        {},
        prompt_BT[..., None],
        np.array(length_B, np.int32),
        np.int32(size),
        size=size,
        piece=prompt_BT.shape[1],
    )
    state, chunks = generation.go_on(
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


def test_generation_at_temperature_0_takes_the_likeliest_token_each_time():
    """With a cache and prompts of different lengths side by side, as with full forward passes one by one."""
    prompts, lengths, steps = random_tokens(3, 5, seed=2), [5, 1, 3], 6
    state, chunks = continued(prompts, lengths, steps, eos_id=-1)
    expected = [argmax_continuation(prompts[b, :n], steps) for b, n in enumerate(lengths)]
    assert len(np.unique(expected)) > 3  # not one token over and over
    np.testing.assert_array_equal(chunks.tokens[..., 0], expected)
    assert state.step == steps and not state.ended.any()
    # Probabilities are known: a token costs one draw, and its law is exact.
    assert (chunks.draws == 1).all() and (chunks.decoded == 1).all() and chunks.exact.all()


def test_generation_ends_with_eos():
    """Once every row had its eos, here a token that the argmax comes to, nothing more is generated."""
    prompt, steps = random_tokens(1, 5, seed=2), 6
    expected = argmax_continuation(prompt[0], steps)
    eos = expected[3]
    length = expected.index(eos) + 1
    state, chunks = continued(prompt, [5], steps, eos)
    assert state.ended.all() and state.step == length < steps
    np.testing.assert_array_equal(chunks.tokens[0, :length, 0], expected[:length])
    assert not chunks.draws[0, length:].any()


# --- Draws. Chi-square tests at p > 1e-4: another seed would fail one in ten thousand times.

PROBS = np.array([0.2, 0.05, 0.4, 0.1, 0.25])  # not in order, so that ranks and ids differ
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


def p_value(count_V, law_V):
    """Of the hypothesis that the counts have this law; 0 if something impossible was drawn."""
    law_V = np.asarray(law_V) / np.sum(law_V)
    possible = law_V > 0
    if count_V[~possible].any():
        return 0.0
    return scipy.stats.chisquare(count_V[possible], DRAWS * law_V[possible]).pvalue


@pytest.mark.parametrize("temperature", [1.0, 2.0, 0.5, 0.3])
def test_draws_have_the_law_of_their_temperature(temperature):
    """p^(1/T), normalised; a control: not that of a temperature a fifth away."""
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


# Sorted, 0.4 0.25 0.2 0.1 0.05 add up to 0.4 0.65 0.85 0.95 1; the ids are 2 4 0 3 1. The smallest
# set that reaches top_p; just below and above each sum, since a sum itself is at rounding's mercy.
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
    """The law of the kept tokens alone."""
    return np.where(np.isin(np.arange(len(probs)), list(kept)), probs, 0)


@pytest.mark.parametrize("top_p", TOP_P)
def test_top_p_keeps_the_smallest_likeliest_set_that_reaches_it(top_p):
    """Each kept token has a share of at least 0.05 of 20,000 draws: all of them come up."""
    count_V = counts(PROBS, top_p=top_p)
    assert set(np.flatnonzero(count_V)) == TOP_P[top_p]
    if len(TOP_P[top_p]) > 1:
        assert p_value(count_V, kept_of(PROBS, TOP_P[top_p])) > 1e-4


@pytest.mark.parametrize("top_p,size", [(0.39, 1), (0.41, 2), (0.59, 2), (0.61, 3), (0.81, 4)])
def test_top_p_keeps_no_more_of_equal_tokens_than_it_needs(top_p, size):
    """The likeliest is always kept; of the three equal ones, as many as reach top_p."""
    count_V = counts([0.2, 0.2, 0.4, 0.2], top_p=top_p)
    assert count_V[2] > 0
    assert (count_V > 0).sum() == size


@pytest.mark.parametrize(
    "temperature,top_p,kept",
    [
        # p^2 is 0.160 0.0625 0.04 ... of 0.275: 0.582, then 0.809; of p itself 0.6 would take two.
        (0.5, 0.5, {2}),
        (0.5, 0.6, {2, 4}),
        (0.5, 0.8, {2, 4}),
        # p^(1/2) is 0.632 0.5 0.447 ... of 2.119: 0.298, 0.534, 0.745; 0.35 and 0.6 of p take one and two.
        (2.0, 0.35, {2, 4}),
        (2.0, 0.6, {2, 4, 0}),
    ],
)
def test_top_p_is_of_the_probabilities_after_the_temperature(temperature, top_p, kept):
    count_V = counts(PROBS, temperature, top_p)
    assert set(np.flatnonzero(count_V)) == kept
    if len(kept) > 1:
        assert p_value(count_V, kept_of(PROBS ** (1 / temperature), kept)) > 1e-4


def test_draws_of_rows_are_their_keys_own():
    """Rows with laws of their own, drawn in any company; equal rows with other keys differ."""
    rng = np.random.default_rng(0)
    log_p_BV = jax.nn.log_softmax(jnp.asarray(rng.normal(size=(50, V)), jnp.float32))
    together = sample_token(log_p_BV, keys(50), 0.9, 0.95)
    some = np.array([31, 4, 17])
    np.testing.assert_array_equal(
        sample_token(log_p_BV[some], keys(50)[some], 0.9, 0.95), together[some]
    )
    # Fifty fair draws of one row: all alike once in 10^14 or so.
    alike = sample_token(jnp.zeros((50, 2)), keys(50), 1.0, 1.0)
    assert len(set(np.asarray(alike).tolist())) == 2


def test_the_heads_draws_and_sampled_chunks_have_its_law():
    """`draw`, which BrierLM uses, and `sample_chunk`, which generation uses: exp(log_probs) both."""
    task, params = ar_task(), random_params()
    model = task.bind(params, {})
    h_1D = np.random.default_rng(1).normal(size=(1, D)).astype(np.float32)
    law_V = np.exp(np.asarray(model.log_probs(h_1D)[0], np.float64))
    assert (
        law_V.max() < 0.5
    )  # a law worth testing; expected counts are at least 5 in all but rare tokens
    drawn = np.asarray(model.draw(h_1D, DRAWS, keys(1)))
    assert drawn.shape == (1, DRAWS, 1)
    h_BD, active_B = np.repeat(h_1D, DRAWS, axis=0), np.ones(DRAWS, bool)
    config = sampler_config(temperature=1.0)
    sampled = np.asarray(sample_chunk(model, h_BD, keys(DRAWS, seed=3), active_B, config).tokens)
    assert sampled.shape == (DRAWS, 1)
    for tokens in (drawn, sampled):
        count_V = np.bincount(tokens.reshape(-1), minlength=V)
        assert p_value(count_V, law_V) > 1e-4
