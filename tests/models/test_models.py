"""The networks and the two stages' tasks: equivalences between two computations, and invariances."""

import dataclasses
import functools
import importlib
import math
import types

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from calm_jax import build
from calm_jax.brier import Protocol
from calm_jax.config import resolve
from calm_jax.data.packing import MASKED
from calm_jax.errors import UserError
from calm_jax.losses import Posterior, cross_entropy, energy_score
from calm_jax.models import layers, stack
from calm_jax.models.autoencoder import Autoencoder
from calm_jax.models.calm import CALM, TokenPredictor
from calm_jax.models.heads.energy import EnergyHead, EnergyHeadConfig
from calm_jax.sampling import temperature
from calm_jax.sampling.config import SamplerConfig
from calm_jax.sampling.counting import count_draws
from calm_jax.sampling.pools import Prefix, complete_chunk
from calm_jax.sampling.samplers import sample_chunk
from calm_jax.tasks import AutoencoderTask, CalmTask
from calm_jax.tasks.base import call
from tests.models import networks
from tests.models.networks import (
    EPSILON,
    assert_close,
    autoencoder_config,
    count,
    keys,
    shapes_in,
    transformer_config,
)

V, PAD, K, D, Z, E, N, M = 263, 262, 4, 16, 10, 6, 3, 5
BODY = transformer_config(hidden_size=D)
HEAD = EnergyHeadConfig(
    "energy",
    2,
    E,
    N,
    M,
    beta=1.0,
)
AUTOENCODER = autoencoder_config(latent_size=Z)


def autoencoder_task(dtype=jnp.float32):
    return AutoencoderTask(Autoencoder(AUTOENCODER, V, K, dtype), PAD, random_chunks=0.0)


def calm_task(dtype=jnp.float32, **body):
    config = dataclasses.replace(BODY, **body)
    head = EnergyHead(HEAD, D, Z, EPSILON, dtype)
    model = CALM(config, head, None, V, PAD, dtype)
    return CalmTask(
        model, autoencoder_task().model, Protocol(num_samples=2), token_prior_weight=0.0
    )


def random_params(task, seed=0):
    """Random parameters, none at an initial zero or one except the pad's row in CALM's embedding."""
    params = networks.random_params(task, seed)
    if "tokens" in params["embed"]:
        table = params["embed"]["tokens"]
        table["embedding"] = table["embedding"].at[PAD].set(0)
    return params


def random_tokens(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, V - 1, shape).astype(np.int32)


@functools.cache
def both_tasks():
    """(task, parameters, frozen) of both stages."""
    autoencoder, calm = autoencoder_task(), calm_task()
    frozen = {"params": random_params(autoencoder, seed=1)}
    return (autoencoder, frozen["params"], {}), (calm, random_params(calm), frozen)


def batch_of(B=3, L=5, seed=0):
    tokens = random_tokens(B, L * K, seed=seed)
    return {"tokens": tokens, "targets": tokens.copy()}


@functools.cache
def loss_of(task):
    return jax.jit(lambda params, frozen, batch, key_B: task.loss(params, frozen, batch, key_B))


@functools.cache
def hidden_of(task):
    def hidden(params, tokens_BLK, cache=None):
        return task.model.apply({"params": params}, tokens_BLK, cache, method="hidden")

    return jax.jit(hidden)


# --- The backbone


@pytest.mark.slow
@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
def test_cached_decode_equals_full_forward(num_kv_heads):
    task = calm_task(num_kv_heads=num_kv_heads)
    params, hidden, tokens = random_params(task), hidden_of(task), random_tokens(2, 6, K)
    full, _ = hidden(params, tokens)
    cache = task.bind({}, {}).empty_cache(2, 8, 8)
    first, cache = hidden(params, tokens[:, :3], cache)
    steps = [first]
    for place in range(3, 6):
        h_BLD, cache = hidden(params, tokens[:, place : place + 1], cache)
        steps.append(h_BLD)
    assert_close(np.concatenate(steps, axis=1), full)
    np.testing.assert_array_equal(cache.length, [6, 6])


@pytest.mark.slow
def test_ragged_rows_decode_as_each_row_alone():
    """Prefill of right-padded rows, `length` set back, then two chunks each: the padding leaves no trace."""
    task = calm_task()
    params, hidden, lengths = random_params(task), hidden_of(task), np.array([1, 4, 2], np.int32)
    prompt, more = random_tokens(3, 4, K), random_tokens(3, 2, K, seed=1)
    cache = task.bind({}, {}).empty_cache(3, 6, 6)
    prefilled, cache = hidden(params, prompt, cache)
    cache = cache._replace(length=jnp.asarray(lengths))
    steps = []
    for step in range(2):
        h_BLD, cache = hidden(params, more[:, step : step + 1], cache)
        steps.append(h_BLD[:, 0])
    for row, length in enumerate(lengths):
        alone = np.concatenate([prompt[row, :length], more[row]])[None]
        expected, _ = hidden(params, alone)
        assert_close(prefilled[row, :length], expected[0, :length])
        assert_close(np.stack([step[row] for step in steps]), expected[0, length:])


def test_grouped_heads_equal_heads_with_repeated_keys_and_values():
    grouped, whole = calm_task(num_kv_heads=2), calm_task(num_kv_heads=4)
    params, tokens = random_params(grouped), random_tokens(2, 5, K)
    flat = flax.traverse_util.flatten_dict(params, sep="/")
    for name in ("key", "value"):
        path = f"backbone/layers/attention/{name}/kernel"
        flat[path] = np.repeat(flat[path], 2, axis=2)
    repeated = flax.traverse_util.unflatten_dict(flat, sep="/")
    ours, _ = hidden_of(grouped)(params, tokens)
    expected, _ = hidden_of(whole)(repeated, tokens)
    assert_close(ours, expected)


@pytest.mark.parametrize("place", [1, 3, 4])
def test_no_hidden_state_sees_a_later_chunk(place):
    task = calm_task()
    params, hidden, tokens = random_params(task), hidden_of(task), random_tokens(1, 5, K)
    changed = tokens.copy()
    changed[:, place] = (changed[:, place] + 1) % PAD
    (before, _), (after, _) = hidden(params, tokens), hidden(params, changed)
    np.testing.assert_allclose(before[:, :place], after[:, :place], rtol=0, atol=1e-6)
    assert (np.abs(before - after)[:, place:].max(-1) > 1e-3).all()


def gradient_of(remat, attention="xla"):
    """A function from parameters to the loss and its gradient, with a `remat` policy; and parameters."""
    task = calm_task(remat=remat, attention=attention)
    _, (_, params, frozen) = both_tasks()

    def loss(params):
        return task.loss(params, frozen, batch_of(), keys(3))["loss"][0]

    return jax.jit(jax.value_and_grad(loss)), params


@pytest.mark.slow
@pytest.mark.parametrize(
    ("remat", "attention"),
    [("full", "xla"), ("dots", "xla"), pytest.param("dots", "splash", marks=pytest.mark.slow)],
)
def test_remat_changes_neither_loss_nor_gradient(remat, attention):
    expected_of, params = gradient_of("none")
    (loss, kept), (same_loss, recomputed) = (
        of(params) for of in (expected_of, gradient_of(remat, attention)[0])
    )
    np.testing.assert_allclose(loss, same_loss, rtol=1e-6)
    jax.tree.map(assert_close, recomputed, kept)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "full"])
def test_layers_one_after_the_other_train_like_a_loop_over_them(remat, monkeypatch):
    """Unrolled layers and head blocks (CPUs, GPUs) give the gradient of a loop over them (TPUs)."""
    unrolled, params = gradient_of(remat)
    expected = unrolled(params)
    fewer = unrolled.lower(params).as_text().count("stablehlo.while")
    # A barrier for each layer keeps the compiler from joining what is recomputed with what was computed before.
    barriers = {
        kept: gradient_of(kept)[0].lower(params).as_text().count("optimization_barrier")
        for kept in ("none", "full")
    }
    assert barriers["full"] >= barriers["none"] + BODY.num_layers
    monkeypatch.setattr(stack, "unrolled", lambda length: 1)
    in_a_loop, _ = gradient_of(remat)
    # Backbone and head have two each, forward and backward; the encoder has single layers.
    assert in_a_loop.lower(params).as_text().count("stablehlo.while") - fewer == 4
    jax.tree.map(assert_close, in_a_loop(params), expected)


def test_both_ways_to_gate_halves_have_the_same_value_and_gradient():
    draw = np.random.default_rng(0).normal
    x, g = draw(size=(3, 14)).astype(np.float32), draw(size=(3, 7)).astype(np.float32)
    expected, actual = (
        (value, *pull(g))
        for value, pull in (
            jax.vjp(gate, x) for gate in (layers._halves, layers._halves_in_one_gradient)
        )
    )
    jax.tree.map(assert_close, actual, expected)


@pytest.mark.slow
@pytest.mark.parametrize(("attention", "kept"), [("xla", False), ("blocks", True)])
def test_remat_recomputes_only_the_products_that_its_policy_drops(attention, kept):
    """Counts products. A layer has 7 with weights and 2 of attention; a product that is recomputed adds one."""
    products = {}
    for remat in ("none", "dots", "full"):
        of, params = gradient_of(remat, attention)
        products[remat] = str(of.trace(params).jaxpr).count("dot_general")
    # "dots" keeps the results of the attention in blocks.
    assert products["dots"] - products["none"] == (0 if kept else 2)
    # "full" recomputes all but one of the products with weights: the backward pass needs no value of the last one.
    assert products["full"] - products["none"] == 2 + 7 - 1


@pytest.mark.slow
def test_bfloat16_arithmetic_gives_close_float32_results():
    tokens = random_tokens(2, 5, K)
    noise = np.random.default_rng(0).uniform(-0.5, 0.5, (10, N, E)).astype(np.float32)

    def outputs(dtype):
        task, autoencoder = calm_task(dtype), autoencoder_task(dtype)
        params, encoder_params = random_params(task), random_params(autoencoder)

        @jax.jit
        def forward():
            h_BLD, _ = task.model.apply({"params": params}, tokens, method="hidden")
            head = {"params": params["head"]}
            latents = task.model.head.apply(head, h_BLD.reshape(-1, D), noise)
            variables, model = {"params": encoder_params}, autoencoder.model
            posterior = model.apply(variables, tokens.reshape(-1, K), method="encode")
            logits = model.apply(variables, posterior.mean, method="decode")
            return h_BLD, latents, posterior.mean, posterior.log_std, logits

        return forward()

    exact, rounded = outputs(jnp.float32), outputs(jnp.bfloat16)
    assert rounded[0].dtype == jnp.bfloat16
    assert all(output.dtype == jnp.float32 for output in rounded[1:])
    for ours, expected in zip(rounded, exact, strict=True):
        assert_close(ours, expected, tolerance=0.1)
        assert np.abs(np.asarray(ours, np.float32) - expected).max() > 0


def test_parameters_are_float32_whatever_the_arithmetic():
    for task in (calm_task(jnp.bfloat16), autoencoder_task(jnp.bfloat16)):
        params = jax.eval_shape(task.init, jax.random.key(0))
        assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}


# --- Embedding and initial values


@pytest.mark.slow
def test_initial_parameters():
    """Pad's row and the head's last layer are zero; matrices N(0, 0.02); biases 0, scales 1."""
    task = calm_task()
    params = jax.jit(task.init)(jax.random.key(0))
    flat = flax.traverse_util.flatten_dict(params, sep="/")
    table = flat.pop("embed/tokens/embedding")
    assert (table[PAD] == 0).all()
    assert (np.abs(table[:PAD]).max(-1) > 0).all()
    assert abs(table[:PAD].std() / 0.02 - 1) < 0.1
    assert (flat.pop("head/output/kernel") == 0).all()
    for path, value in flat.items():
        if path.endswith("kernel"):
            assert abs(value.std() / 0.02 - 1) < 0.3, path
        else:
            assert (value == path.endswith("scale")).all(), path

    h_PD = np.random.default_rng(0).normal(size=(4, D)).astype(np.float32)
    latents = task.model.apply({"params": params}, h_PD, 5, keys(4), 1, method="sample")
    np.testing.assert_array_equal(latents, np.zeros((4, 5, Z)))


@pytest.mark.slow
def test_the_pad_embedding_gets_no_gradient_and_is_never_read():
    """In CALM's backbone."""
    _, (task, params, frozen) = both_tasks()
    batch = batch_of()
    batch["tokens"][:, 5:9] = batch["targets"][:, 5:9] = PAD

    def loss(params):
        return task.loss(params, frozen, batch, keys(3))["loss"][0]

    gradient = jax.jit(jax.grad(loss))(params)["embed"]["tokens"]["embedding"]
    assert (gradient[PAD] == 0).all()
    read = np.unique(batch["tokens"][:, : 4 * K])
    assert (np.abs(gradient[read[read != PAD]]).max(-1) > 0).all()

    table = params["embed"]["tokens"]["embedding"]
    tampered = {"tokens": {"embedding": table.at[PAD].set(9.0)}}
    other = params | {"embed": params["embed"] | tampered}
    hidden, tokens_BLK = hidden_of(task), batch["tokens"].reshape(3, 5, K)
    np.testing.assert_array_equal(hidden(params, tokens_BLK)[0], hidden(other, tokens_BLK)[0])


# --- The energy head


def silu(x):
    return x / (1 + np.exp(-x))


def naive_head(params, h_PD, noise_PNE):
    """The energy head as its formula says, in float64: the condition is concatenated to every draw."""
    flat = flax.traverse_util.flatten_dict(params["head"], sep="/")
    flat = {path: np.asarray(value, np.float64) for path, value in flat.items()}

    def dense(name, x, layer=...):
        return x @ flat[f"{name}/kernel"][layer] + flat[f"{name}/bias"][layer]

    def norm(name, x, layer=...):
        x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON)
        return x * flat[f"{name}/scale"][layer] + flat[f"{name}/bias"][layer]

    x = norm("noise_norm", dense("noise", noise_PNE))
    y = norm("hidden_norm", dense("hidden", h_PD))
    y = np.broadcast_to(y[:, None], x.shape)
    for i in range(HEAD.num_blocks):
        a = np.concatenate([norm("blocks/norm", x, i), y], axis=-1)
        a = silu(a @ flat["blocks/input_kernel"][i] + flat["blocks/input_bias"][i])
        a = silu(dense("blocks/hidden", a, i))
        gate, up = np.split(dense("blocks/gate_up", a, i), 2, axis=-1)
        x = x + dense("blocks/down", silu(gate) * up, i)
    return dense("output", silu(dense("output_hidden", norm("output_norm", x))))


def test_the_head_that_computes_the_condition_once_equals_the_naive_head():
    task, rng = calm_task(), np.random.default_rng(0)
    params = random_params(task)
    h_PD = rng.normal(size=(3, D)).astype(np.float32)
    noise_PNE = rng.uniform(-0.5, 0.5, (3, N, E)).astype(np.float32)
    ours = task.model.head.apply({"params": params["head"]}, h_PD, noise_PNE)
    assert_close(ours, naive_head(params, h_PD, noise_PNE))


def test_head_noise_is_uniform_around_zero_and_comes_from_the_positions_key():
    head = calm_task().model.head
    noise_PNE = np.asarray(head.draw_noise(400, keys(3)))
    assert noise_PNE.shape == (3, 400, E)
    assert np.abs(noise_PNE).max() <= 0.5
    # 7,200 numbers of variance 1/12; bounds of 5 standard errors: one false alarm in a million.
    assert abs(noise_PNE.mean()) < 5 * math.sqrt(1 / 12 / 7200)
    assert abs(noise_PNE.var() - 1 / 12) < 5 * math.sqrt(1 / 180 / 7200)
    np.testing.assert_array_equal(head.draw_noise(400, keys(3)[1:2])[0], noise_PNE[1])


@pytest.mark.slow
def test_head_loss_is_minus_the_energy_score_of_its_draws():
    task, rng = calm_task(), np.random.default_rng(0)
    head, params = task.model.head, {"params": random_params(task)["head"]}
    h_PD = rng.normal(size=(3, D)).astype(np.float32)
    posterior = Posterior(*rng.normal(size=(2, 3, Z)).astype(np.float32))
    ours = head.apply(params, h_PD, posterior, keys(3), method="loss")
    noise_key_P, target_key_P = jax.vmap(jax.random.split, out_axes=1)(keys(3))
    eps_PMZ = jax.vmap(lambda key: jax.random.normal(key, (M, Z)))(target_key_P)
    draws = head.apply(params, h_PD, head.draw_noise(N, noise_key_P))
    assert_close(ours, -energy_score(draws, posterior, eps_PMZ, HEAD.beta), 1e-6)


# --- The token predictor


@pytest.mark.slow
def test_the_token_predictor_adds_its_weighted_cross_entropy_to_the_heads_loss():
    plain = calm_task()
    predictor = TokenPredictor(0.5, V, K, D, EPSILON, jnp.float32)
    task = dataclasses.replace(plain, model=plain.model.clone(token_predictor=predictor))
    params, frozen = random_params(task), {"params": random_params(autoencoder_task(), seed=1)}
    batch, key_B = batch_of(), keys(3)
    batch["targets"][1, 9] = MASKED
    metrics = loss_of(task)(params, frozen, batch, key_B)
    without = {name: part for name, part in params.items() if name != "token_predictor"}
    expected = loss_of(plain)(without, frozen, batch, key_B)["loss"]
    assert_close(metrics["head_loss"], expected)

    tokens_BLK = batch["tokens"].reshape(3, -1, K)
    h_BLD = np.asarray(hidden_of(task)(params, tokens_BLK[:, :-1])[0])
    weights = params["token_predictor"]
    weights = jax.tree.map(np.asarray, weights)
    x_BLE = h_BLD @ weights["up"]["kernel"] + weights["up"]["bias"]
    x_BLE /= 1 + np.exp(-x_BLE)
    x_BLE = x_BLE @ weights["expand"]["kernel"] + weights["expand"]["bias"]
    x_BLKD = x_BLE.reshape(*x_BLE.shape[:2], K, D)
    x_BLKD -= x_BLKD.mean(-1, keepdims=True)
    x_BLKD /= np.sqrt((x_BLKD**2).mean(-1, keepdims=True) + EPSILON)
    x_BLKD = x_BLKD * weights["norm"]["scale"] + weights["norm"]["bias"]
    ce_BLK = cross_entropy(x_BLKD @ weights["vocabulary"]["kernel"], tokens_BLK[:, 1:])
    ce_BL = np.array(ce_BLK.sum(-1))
    # Token 9 of row 1 is masked: it lies in chunk 2, the second that is predicted.
    ce_BL[1, 1] = 0
    assert_close(metrics["token_loss"], (ce_BL.sum(), 3 * 4 - 1), 1e-4)
    assert_close(metrics["loss"][0], metrics["head_loss"][0] + 0.5 * metrics["token_loss"][0], 1e-5)


def task_with_prior(weight: float) -> CalmTask:
    plain = calm_task()
    predictor = TokenPredictor(0.5, V, K, D, EPSILON, jnp.float32)
    model = plain.model.clone(token_predictor=predictor)
    return dataclasses.replace(plain, model=model, token_prior_weight=weight)


@pytest.mark.slow
@pytest.mark.parametrize("block", [V, 7])
def test_a_draw_decodes_to_the_largest_sum_of_the_decoders_and_the_weighted_priors_logits(
    block, monkeypatch
):
    task = task_with_prior(1.5)
    params, frozen = random_params(task), {"params": random_params(autoencoder_task(), seed=1)}
    h_PD = np.random.default_rng(0).normal(size=(20, D)).astype(np.float32)
    monkeypatch.setattr("calm_jax.tasks.calm.at_once", lambda size: block)
    ours_PNK = jax.jit(lambda: task.bind(params, frozen).draw(h_PD, 6, keys(20)))()

    latent_PNZ = task.draw_latents(params, h_PD, 6, keys(20), 1)
    logit_RKV = call(task.autoencoder, frozen, "decode", latent_PNZ.reshape(20 * 6, -1))
    logit_PKNV = logit_RKV.reshape(20, 6, K, -1).swapaxes(1, 2)
    x_PKD = call(task.model, {"params": params}, "token_features", h_PD[None])[0]
    prior_PKV = x_PKD @ params["token_predictor"]["vocabulary"]["kernel"]
    sum_PKNV = logit_PKNV + 1.5 * prior_PKV[:, :, None]
    np.testing.assert_array_equal(ours_PNK, sum_PKNV.argmax(-1).swapaxes(1, 2))
    assert (sum_PKNV.argmax(-1) != logit_PKNV.argmax(-1)).any()


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampler, temperature", [("noise", 1.0), ("noise", 0.5), ("pooled", 0.5), ("growing", 0.5)]
)
def test_a_sampler_that_doubles_the_prior_draws_from_the_model_of_twice_its_weight(
    sampler, temperature
):
    tasks = {weight: task_with_prior(weight) for weight in (1.5, 3.0)}
    params = random_params(tasks[1.5])
    frozen = {"params": random_params(autoencoder_task(), seed=1)}
    h_BD = jnp.asarray(np.random.default_rng(0).normal(size=(40, D)), jnp.float32)
    config = SamplerConfig(
        temperature, sampler, num_candidates=8, max_draws=48, draws_at_once=16, top_p=1.0
    )

    def drawn(weight: float, scale: float) -> tuple[Array, Array]:
        model = tasks[weight].bind(params, frozen)
        scaled = dataclasses.replace(config, token_prior_scale=scale)
        is_active_B, prefix = jnp.ones(40, bool), Prefix(tokens_BK, jnp.full(40, 1))
        chunk = sample_chunk(model, h_BD, keys(40), is_active_B, scaled)
        model = model.with_prior_times(scale)
        fits, completed = complete_chunk(model, h_BD, keys(40), is_active_B, scaled, prefix)
        return chunk.tokens, jnp.where(fits[:, None], completed.tokens, -1)

    # A first token that some draws have.
    tokens_BK = tasks[3.0].bind(params, frozen).draw(h_BD, 1, keys(40))[:, 0]
    doubled = jax.tree.map(np.asarray, drawn(1.5, 2.0))
    for one, other, plain in zip(doubled, drawn(3.0, 1.0), drawn(1.5, 1.0), strict=True):
        np.testing.assert_array_equal(one, other)
        assert (one != plain).any()


@pytest.mark.slow
def test_draws_with_a_prior_are_counted_as_they_decode():
    """Latents are near the points of a coarse lattice, so that many chunks are equal."""
    task = task_with_prior(1.5)
    params, frozen = random_params(task), {"params": random_params(autoencoder_task(), seed=1)}
    rng, model = np.random.default_rng(3), task.bind(params, frozen)
    size = task.autoencoder.config.latent_size
    h_BD = rng.normal(size=(6, D)).astype(np.float32)
    latent_BNZ = rng.integers(-1, 2, (6, 20, 1)) * rng.normal(size=size)
    latent_BNZ = (latent_BNZ + rng.normal(size=latent_BNZ.shape) / 50).astype(np.float32)
    tokens_BNK = jax.jit(model.decode)(h_BD, latent_BNZ)
    count_BN = jax.jit(lambda: count_draws(model, h_BD, latent_BNZ, 2).count)()
    expected = np.asarray(temperature.count_equal(tokens_BNK))
    np.testing.assert_array_equal(count_BN, expected)
    assert expected.min() == 1 and expected.max() > 3
    assert (tokens_BNK != model.decode(h_BD[::-1], latent_BNZ)).any()


# --- Sizes


PUBLISHED = {"calm_m": "371.7M", "calm_l": "735.3M", "calm_xl": "1.830B", "calm_ablation": ""}


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_counts_are_the_published_ones(name):
    tree = importlib.import_module(f"configs.{name}").get_config()
    tree.tokenizer.path = "tokenizer.model"
    config = resolve(tree)
    tokenizer = types.SimpleNamespace(vocab_size=128257, pad_id=128256)

    assert f"{count(build.make_autoencoder_task(config, tokenizer)) / 1e6:.1f}M" == "75.8M"
    ours = count(build.make_lm_task(config, tokenizer))
    if PUBLISHED[name]:
        assert PUBLISHED[name] in (f"{ours / 1e6:.1f}M", f"{ours / 1e9:.3f}B")

    d, f = config.lm.model.hidden_size, config.lm.model.intermediate_size
    embedding = 128257 * d + (4 * d * 2 * d + 2 * d) + (2 * d * d + d) + 2 * d
    layer = 4 * d * d + 3 * d * f + 2 * d
    block = 2 * d + (2 * d * d + d) + (d * d + d) + (d * 2 * d + 2 * d) + (d * d + d)
    head = (64 * d + d) + (d * d + d) + 3 * 2 * d + (d * d + d) + (d * 128 + 128)
    backbone = embedding + config.lm.model.num_layers * layer + d
    assert ours == backbone + head + config.lm.head.num_blocks * block


@pytest.mark.parametrize("name", ["num_encoder_layers", "num_decoder_layers"])
@pytest.mark.parametrize("layers", [1, 3, 0])
def test_odd_autoencoder_layers_are_refused(name, layers):
    with pytest.raises(UserError, match=rf"autoencoder\.model\.{name}={layers} must be even"):
        dataclasses.replace(AUTOENCODER, **{name: layers})


# --- Losses of the tasks


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1], ids=["autoencoder", "calm"])
def test_a_masked_or_partly_masked_chunk_does_not_count(stage):
    task, params, frozen = both_tasks()[stage]
    loss, batch, key_B = loss_of(task), batch_of(), keys(3)

    def sums(hide):
        targets = batch["targets"].copy()
        hide(targets)
        metrics = loss(params, frozen, batch | {"targets": targets}, key_B)
        return {name: np.array(pair, np.float64) for name, pair in metrics.items()}

    def hide_one(targets):
        targets[1, 3 * K : 4 * K] = MASKED

    def hide_part_of_one(targets):
        targets[1, 3 * K + 2] = MASKED

    def hide_others(targets):
        kept = targets[1, 3 * K : 4 * K].copy()
        targets[:] = MASKED
        targets[1, 3 * K : 4 * K] = kept

    everything, without, alone = sums(lambda targets: None), sums(hide_one), sums(hide_others)
    partly = sums(hide_part_of_one)
    chunks = 3 * (5 - stage)
    for name, total in everything.items():
        assert (total[1], without[name][1], alone[name][1]) == (chunks, chunks - 1, 1)
        assert abs(alone[name][0]) > 1e-3
        np.testing.assert_allclose(without[name] + alone[name], total, rtol=1e-5)
        np.testing.assert_array_equal(partly[name], without[name])


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1], ids=["autoencoder", "calm"])
def test_a_batch_with_a_masked_row_has_the_loss_of_the_other_rows(stage):
    task, params, frozen = both_tasks()[stage]
    loss, batch, key_B = loss_of(task), batch_of(), keys(3)
    batch["targets"][1] = MASKED
    without = {name: rows[[0, 2]] for name, rows in batch.items()}
    masked = loss(params, frozen, batch, key_B)
    expected = loss(params, frozen, without, key_B[jnp.array([0, 2])])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), masked, expected)


def test_the_first_chunk_is_no_target_of_the_language_model():
    _, (task, params, frozen) = both_tasks()
    batch = batch_of()
    batch["targets"][:, :K] = MASKED
    masked = loss_of(task)(params, frozen, batch, keys(3))
    expected = loss_of(task)(params, frozen, batch_of(), keys(3))
    jax.tree.map(np.testing.assert_array_equal, masked, expected)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1], ids=["autoencoder", "calm"])
def test_metrics_of_parts_of_a_batch_add_up_to_those_of_the_batch(stage):
    """However its rows are split, as every row has its own key."""
    task, params, frozen = both_tasks()[stage]
    loss, batch, key_B = loss_of(task), batch_of(), keys(3)
    whole = loss(params, frozen, batch, key_B)
    parts = [
        loss(params, frozen, {k: v[rows] for k, v in batch.items()}, key_B[jnp.array(rows)])
        for rows in ([1], [2, 0])
    ]
    added = jax.tree.map(jnp.add, *parts)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), added, whole)


def test_no_gradient_reaches_the_frozen_autoencoder():
    _, (task, params, frozen) = both_tasks()

    def loss(frozen):
        return task.loss(params, frozen, batch_of(), keys(3))["loss"][0]

    gradient = jax.jit(jax.grad(loss))(frozen)
    assert all((np.asarray(leaf) == 0).all() for leaf in jax.tree.leaves(gradient))


def test_language_model_training_never_computes_vocabulary_sized_arrays():
    """Only embedding tables and their gradients have an axis of V. A control: stage 1 has others."""

    def vocabulary_sized(task, params, frozen):
        def loss(params):
            return task.loss(params, frozen, batch_of(), keys(3))["loss"][0]

        jaxpr = jax.make_jaxpr(jax.jit(jax.value_and_grad(loss)))(params)
        return {shape for shape in shapes_in(jaxpr) if V in shape}

    stage_1, stage_2 = both_tasks()
    tables = {(V, D), (V, AUTOENCODER.hidden_size)}
    assert vocabulary_sized(*stage_2) <= tables
    assert (15, K, V) in vocabulary_sized(*stage_1)


# --- The autoencoder


def test_chunks_are_encoded_and_decoded_independently():
    task = autoencoder_task()
    variables, tokens = {"params": random_params(task)}, random_tokens(4, K)

    @jax.jit
    def coded(tokens_PK):
        posterior = task.model.apply(variables, tokens_PK, method="encode")
        return (*posterior, task.model.apply(variables, posterior.mean, method="decode"))

    together = coded(tokens)
    changed = tokens.copy()
    changed[2] = 0
    others = np.array([0, 1, 3])
    for ours, expected in zip(coded(changed), together, strict=True):
        np.testing.assert_allclose(ours[others], expected[others], rtol=0, atol=1e-6)
        assert np.abs(ours[2] - expected[2]).max() > 1e-3


def test_tokens_and_latents_are_dropped_at_the_rate_of_dropout():
    noise = autoencoder_task().model.draw_noise(keys(1000))
    for keep in (noise.keep_token, noise.keep_latent):
        error = math.sqrt(0.15 * 0.85 / keep.size)
        assert abs(1 - np.asarray(keep).mean() - 0.15) < 5 * error  # one false alarm in a million


@pytest.mark.slow
def test_dropped_tokens_are_read_as_id_0_and_stay_targets():
    task = autoencoder_task()
    variables, tokens = {"params": random_params(task)}, random_tokens(4, K) + 1
    noise = task.model.draw_noise(keys(4))
    whole = noise._replace(keep_token=jnp.ones((4, K), bool))
    dropped = tokens.copy()
    dropped[1, 2] = 0

    def loss(tokens_PK, noise):
        return task.model.apply(variables, tokens_PK, noise, method="loss")

    ce_PK, kl_P = loss(tokens, whole._replace(keep_token=jnp.asarray(dropped == tokens)))
    other_ce_PK, other_kl_P = loss(dropped, whole)
    np.testing.assert_allclose(kl_P, other_kl_P, rtol=1e-6)
    same = dropped == tokens
    np.testing.assert_allclose(ce_PK[same], other_ce_PK[same], rtol=1e-5)
    assert abs(ce_PK[1, 2] - other_ce_PK[1, 2]) > 1e-4
