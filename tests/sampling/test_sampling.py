"""Under the samplers: counting equal draws, decoding in blocks of the vocabulary, and steps over active rows.

B rows, N draws of each, K tokens per chunk, V vocabulary. All results are exact: no statistical tests.
"""

import collections
import dataclasses
import math
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calm_jax.brier import Protocol
from calm_jax.models.autoencoder import Autoencoder, AutoencoderConfig
from calm_jax.sampling import chunk_model, temperature
from calm_jax.sampling.chunk_model import ChunkModel
from calm_jax.sampling.counting import count_draws
from calm_jax.sampling.search import for_active
from calm_jax.tasks import CalmTask

# A model whose latents are its tokens.
TOKENS = ChunkModel(
    latents=None,
    unfold=lambda latent_RK: latent_RK[..., None],
    argmax_tokens=lambda x, prior: x[..., 0].astype(jnp.int32),
    advance=None,
    empty_cache=None,
    fork=None,
    log_probs=None,
    prior=None,
)

# --- Counting -----------------------------------------------------------------------------------


def random_pools(batch, num_draws, chunk_size):
    """Pools from all equal to all different: alphabets of 1 to 40 tokens, uniform and skewed."""
    rng = np.random.default_rng(chunk_size * num_draws)
    size_B11 = rng.integers(1, 41, (batch, 1, 1))
    uniform_BNK = rng.random((batch, num_draws, chunk_size)) ** rng.choice([1, 3, 8], (batch, 1, 1))
    return (uniform_BNK * size_B11).astype(np.int32)


def counted_by_hand(pool_NK, company):
    """How many tokens of a pool are decoded: from the last position on, of draws whose tokens so far enough draws share."""
    kept, decoded = [tuple(chunk) for chunk in pool_NK.tolist()], 0
    for place in reversed(range(pool_NK.shape[1])):
        decoded += len(kept)
        shared = collections.Counter(chunk[place:] for chunk in kept)
        kept = [chunk for chunk in kept if shared[chunk[place:]] >= company]
    return decoded


# 5 x 6 draws are decoded in one block, the others in several; 61 x 13 is not a multiple of the block.
@pytest.mark.parametrize(
    "batch, num_draws, chunk_size, company",
    [
        (5, 6, 4, 2),
        (700, 24, 4, 2),
        (700, 24, 4, 3),
        (61, 13, 1, 2),
        (400, 20, 2, 5),
        (400, 20, 2, 1),
        (300, 7, 3, 9),
    ],
)
def test_pruned_counts_equal_the_counts_of_whole_chunks(batch, num_draws, chunk_size, company):
    """From `company` on; smaller counts are only known to be smaller. Also checks how many tokens are decoded."""
    pool_BNK = random_pools(batch, num_draws, chunk_size)
    expected = np.asarray(jax.jit(temperature.count_equal)(pool_BNK))
    counted = jax.jit(lambda pool_BNK: count_draws(TOKENS, None, pool_BNK, company))(pool_BNK)
    count_BN = np.asarray(counted.count)
    assert count_BN.dtype == np.int32 and (count_BN >= 1).all()
    frequent_BN = expected >= company
    np.testing.assert_array_equal(count_BN[frequent_BN], expected[frequent_BN])
    assert (count_BN[~frequent_BN] < company).all()
    if company <= 2:
        np.testing.assert_array_equal(count_BN, expected)
    assert counted.decoded.tolist() == [counted_by_hand(pool, company) for pool in pool_BNK]


def test_pruned_counts_lead_to_the_same_choices_as_counts_of_whole_chunks():
    """The same choice by weight, and the same emission or refusal, from the same draws and keys."""
    pool_BNK = random_pools(500, 16, 3)
    key_B = jax.random.split(jax.random.key(0), 500)

    @jax.jit
    def choices(pool_BNK):
        whole_BN, results = temperature.count_equal(pool_BNK), []
        for n in (2, 3):
            for count_BN in (whole_BN, count_draws(TOKENS, None, pool_BNK, n).count):
                results.append(temperature.emit(count_BN, n, key_B))
        for count_BN in (whole_BN, count_draws(TOKENS, None, pool_BNK, 2).count):
            log_weight_BN, _ = temperature.log_weights(count_BN, 1 / 3, leave_out=True)
            results.append(temperature.pick(log_weight_BN, key_B))
        return results

    results = choices(pool_BNK)
    for whole, pruned in zip(results[::2], results[1::2], strict=True):
        for one, other in zip(jax.tree.leaves(whole), jax.tree.leaves(pruned), strict=True):
            np.testing.assert_array_equal(one, other)
    emitted_B = np.asarray(results[0][1])
    assert emitted_B.any() and not emitted_B.all()


# --- Decoding -----------------------------------------------------------------------------------

V, K, Z, D = 11, 3, 5, 4


def autoencoder(epsilon=1e-6):
    config = AutoencoderConfig(Z, D, 6, 2, 2, epsilon, dropout=0.1, kl_clamp=0.5, kl_weight=1e-3)
    return Autoencoder(config, V, K, jnp.float32)


def random_variables(model, seed=0):
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, K), jnp.int32))
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(0.3, 0.7, x.shape), jnp.float32), shapes)


def bound(variables, model):
    """The autoencoder as samplers see it, without a language model."""
    return CalmTask(None, model, Protocol(num_samples=2), token_prior_weight=0.0).bind(
        {}, variables
    )


# The most logits at once: for 63 tokens (21 chunks of 3) blocks of 1, 2, 5 and 10 (11 is not a multiple), 11 and all.
@pytest.mark.slow
@pytest.mark.parametrize("most", [1, 63 * 2, 63 * 5, 63 * 10, 63 * 11, 10**9])
def test_decoding_in_blocks_of_the_vocabulary_takes_the_argmax(monkeypatch, most):
    for name in ("_MAX_LOGITS", "_MAX_LOGITS_ON_CPU"):
        monkeypatch.setattr(chunk_model, name, most)
    monkeypatch.setattr("calm_jax.tasks.calm.at_once", chunk_model.at_once)
    model = autoencoder()
    variables = random_variables(model)
    latent_PNZ = np.random.default_rng(1).normal(size=(3, 7, Z)).astype(np.float32)
    logits = model.apply(variables, latent_PNZ.reshape(-1, Z), method="decode")
    decode = jax.jit(lambda latent_PNZ: bound(variables, model).decode(None, latent_PNZ))
    tokens_PNK = decode(latent_PNZ)
    assert tokens_PNK.dtype == jnp.int32
    np.testing.assert_array_equal(tokens_PNK.reshape(-1, K), logits.argmax(-1))
    assert len(np.unique(tokens_PNK)) > 3
    # No array of logits exceeds the limit, except for the least possible, one logit per token.
    program = str(jax.make_jaxpr(decode)(latent_PNZ))
    blocks = {int(width) for width in re.findall(r"f32\[63,(\d+)\]", program)} - {D, 6, 12}
    assert max(blocks) == min(V, max(1, most // 63))


@pytest.mark.slow
def test_of_equally_likely_tokens_the_first_is_taken_for_every_block_size():
    """Ties are exact because logits are whole numbers: layers are zero, and all features are 1 or -1."""
    model = autoencoder(epsilon=1e-20)
    variables = jax.tree.map(jnp.zeros_like, random_variables(model))
    rng = np.random.default_rng(0)
    table_VD = rng.integers(-1, 2, (V, D)).astype(np.float32)
    table_VD[[3, 9]], table_VD[10] = table_VD[1], table_VD[0]
    params = variables["params"]
    params = {
        **params,
        "embed": {"embedding": jnp.asarray(table_VD)},
        "decoder_norm": {"scale": jnp.ones(D)},
    }
    x_RD = rng.choice([-1, 1], (200, D)).astype(np.float32)
    logits = x_RD @ table_VD.T
    is_tied_R = (logits == logits.max(-1, keepdims=True)).sum(-1) > 1
    assert is_tied_R.mean() > 0.3
    for block in range(1, V + 2):
        token_R = model.apply({"params": params}, x_RD, block, None, method="argmax_tokens")
        np.testing.assert_array_equal(token_R, logits.argmax(-1))


@pytest.mark.slow
def test_pruned_counts_with_a_real_decoder_equal_the_counts_of_whole_chunks():
    """Latents are near the points of a coarse lattice, so that many chunks are equal."""
    model = autoencoder()
    variables = random_variables(model)
    rng = np.random.default_rng(3)
    latent_BNZ = rng.integers(-1, 2, (30, 25, 1)) * rng.normal(size=Z)
    latent_BNZ = (latent_BNZ + rng.normal(size=latent_BNZ.shape) / 10).astype(np.float32)
    chunks = bound(variables, model)
    tokens_BNK = jax.jit(lambda latent_BNZ: chunks.decode(None, latent_BNZ))(latent_BNZ)
    counted = jax.jit(lambda latent_BNZ: count_draws(chunks, None, latent_BNZ, 2))(latent_BNZ)
    expected = np.asarray(temperature.count_equal(tokens_BNK))
    np.testing.assert_array_equal(counted.count, expected)
    assert expected.min() == 1 and expected.max() > 5
    by_hand = [counted_by_hand(np.asarray(tokens_NK), 2) for tokens_NK in tokens_BNK]
    assert counted.decoded.tolist() == by_hand
    assert sum(by_hand) < tokens_BNK.size  # some decoding was saved


def test_draw_decodes_latents_from_each_positions_own_key():
    def latents(h_PD, num_draws, key_P, noise_scale):
        assert noise_scale == 1
        draw = jax.vmap(lambda key: jax.random.randint(key, (num_draws, 2), 0, 1000))
        return draw(key_P) + h_PD[:, None].astype(jnp.int32)

    model = dataclasses.replace(TOKENS, latents=latents)
    key_P = jax.random.split(jax.random.key(0), 3)
    h_PD = jnp.array([[0.0], [1000], [2000]])
    drawn_PNK = model.draw(h_PD, 5, key_P)
    assert drawn_PNK.shape == (3, 5, 2)
    np.testing.assert_array_equal(drawn_PNK // 1000, np.arange(3)[:, None, None] + np.zeros((5, 2)))
    np.testing.assert_array_equal(model.draw(h_PD[::-1], 5, key_P[::-1])[::-1], drawn_PNK)
    with pytest.raises(AssertionError):
        model.draw(h_PD, 5, key_P[:2])


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("size, expected", [(1, 100), (30, 3), (100, 1), (101, 1), (10**9, 1)])
def test_at_once_is_at_least_one(monkeypatch, platform, size, expected):
    device = types.SimpleNamespace(platform=platform)
    monkeypatch.setattr(chunk_model, "target_device", lambda: device)
    name = "_MAX_LOGITS_ON_CPU" if platform == "cpu" else "_MAX_LOGITS"
    monkeypatch.setattr(chunk_model, name, 100)
    assert chunk_model.at_once(size) == expected


# --- Steps over active rows ---------------------------------------------------------------------


@pytest.mark.parametrize("group", [1, 3, 4, 7, 10, 99])
def test_for_active_updates_only_active_rows_in_as_few_groups_as_possible(group):
    """For several masks and group sizes; inactive rows are unchanged."""
    batch = 10
    rng = np.random.default_rng(group)
    fixed = rng.normal(size=(batch, 2)).astype(np.float32), np.arange(batch)
    state = {"a": rng.normal(size=(batch, 3)).astype(np.float32), "b": np.arange(batch) % 2 > 0}
    state["calls"] = np.zeros(batch, np.int32)

    def step(fixed, state):
        assert len(fixed[0]) == len(state["a"]) == min(group, batch)
        new_a = state["a"] * fixed[0][:, :1] + fixed[1][:, None]
        return {"a": new_a, "b": ~state["b"], "calls": state["calls"] + 1}

    @jax.jit
    def apply(active_B):
        def counting(fixed, state):
            jax.debug.callback(lambda: groups.append(1))
            return step(fixed, state)

        return for_active(counting, active_B, group, *jax.tree.map(jnp.asarray, (fixed, state)))

    for share in (0, 0.3, 0.7, 1):
        active_B, groups = rng.random(batch) < share, []
        result = jax.device_get(apply(active_B))
        jax.effects_barrier()
        expected_a = state["a"] * fixed[0][:, :1] + fixed[1][:, None]
        np.testing.assert_allclose(
            result["a"], np.where(active_B[:, None], expected_a, state["a"]), rtol=1e-6
        )
        np.testing.assert_array_equal(result["a"][~active_B], state["a"][~active_B])
        np.testing.assert_array_equal(result["b"], state["b"] ^ active_B)
        np.testing.assert_array_equal(result["calls"], active_B)
        assert len(groups) == math.ceil(active_B.sum() / min(group, batch))
