"""The loss over the vocabulary in blocks equals the one over all of it, and never holds all logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calm_jax.models import vocabulary
from tests.models.networks import shapes_in

# V is prime. Blocks of 128 leave 127 rows of the last one to fill; one of 256 fills both sorts of blocks.
P, V, D = 37, 257, 8


def case(seed=0, scale=1.0):
    """Features, table, targets of which some are masked, and weights of both signs; logits are exact in float32."""
    rng = np.random.default_rng(seed)
    x_PD = scale * np.float32(rng.integers(-8, 9, (P, D)) / 8)
    table_VD = np.float32(rng.integers(-8, 9, (V, D)) / 8)
    target_P = rng.integers(0, V, P).astype(np.int32)
    target_P[:3] = 0, V - 1, -100
    return x_PD, table_VD, target_P, rng.normal(size=P).astype(np.float32)


def program():
    """Loss and gradients as a function, a new one for each test: JAX would reuse what it traced with other blocks."""

    def loss_and_gradients(x_PD, table_VD, target_P, weight_P):
        loss_P, pull = jax.vjp(
            lambda x, table: vocabulary.cross_entropy(x, table, target_P), x_PD, table_VD
        )
        return loss_P, *pull(weight_P)

    return loss_and_gradients


def by_hand(x_PD, table_VD, target_P, weight_P):
    """The same in float64."""
    x_PD, table_VD = np.asarray(x_PD, np.float64), np.asarray(table_VD, np.float64)
    logit_PV = x_PD @ table_VD.T
    largest_P1 = logit_PV.max(-1, keepdims=True)
    log_p_PV = logit_PV - largest_P1 - np.log(np.exp(logit_PV - largest_P1).sum(-1, keepdims=True))
    # No token where the target is masked.
    one_hot_PV = target_P[:, None] == np.arange(len(table_VD))
    weight_P1 = (weight_P * (target_P >= 0))[:, None]
    gradient_PV = weight_P1 * (np.exp(log_p_PV) - one_hot_PV)
    return -(log_p_PV * one_hot_PV).sum(-1), gradient_PV @ table_VD, gradient_PV.T @ x_PD


@pytest.fixture(params=[128, 256])
def block(request, monkeypatch):
    monkeypatch.setattr(vocabulary, "_MAX_LOGITS_ON_CPU", request.param * P)
    assert vocabulary.block_size(P, V, on_cpu=True) == request.param
    return request.param


def test_rows_that_fill_a_block_have_no_part_in_gradients_of_very_negative_logits(block):
    """Their logit is 0, and all others are below -100, where the exponential of the difference overflows."""
    x_PD, table_VD, target_P, weight_P = case()
    arguments = abs(x_PD) + 8, -abs(table_VD) - 2, target_P, weight_P
    for ours, expected in zip(jax.jit(program())(*arguments), by_hand(*arguments), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scale", [1, 1024])
def test_loss_and_gradients_in_blocks_are_those_of_all_logits(block, scale):
    """With logits in the thousands, too, whose exponentials overflow float32 unless the largest is subtracted."""
    arguments = case(scale=scale)
    ours, expected = jax.jit(program())(*arguments), by_hand(*arguments)
    assert ours[0][2] == 0
    for a, b in zip(ours, expected, strict=True):
        assert a.dtype == jnp.float32
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6 * np.abs(b).max())


def test_blocks_that_need_no_filling(monkeypatch):
    """256 tokens in two blocks, with targets at their ends."""
    monkeypatch.setattr(vocabulary, "_MAX_LOGITS_ON_CPU", 128 * P)
    x_PD, table_VD, target_P, weight_P = case()
    target_P = np.minimum(target_P, 255)
    target_P[3:7] = 0, 127, 128, 255
    arguments = x_PD, table_VD[:256], target_P, weight_P
    assert "scan" in str(jax.make_jaxpr(program())(*arguments))
    for ours, expected in zip(jax.jit(program())(*arguments), by_hand(*arguments), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-5)


def test_one_block_is_the_cross_entropy_of_all_logits():
    arguments = case()
    assert vocabulary.block_size(P, V, on_cpu=True) == V
    for a, b in zip(jax.jit(program())(*arguments), by_hand(*arguments), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6 * np.abs(b).max())


def test_no_value_is_as_large_as_all_logits_and_no_block_adds_to_the_whole_table(block):
    jaxpr = jax.make_jaxpr(program())(*case()).jaxpr
    assert max(np.prod(shape) for shape in shapes_in(jaxpr)) < P * V
    scans = [one for one in jaxpr.eqns if one.primitive.name == "scan"]
    assert len(scans) == 2
    num_blocks = -(-V // block)
    for scan in scans:
        # What is not stacked over the blocks is carried from one to the next.
        carried = [one.aval for one in scan.outvars if one.aval.shape[0] != num_blocks]
        assert carried and all(value.size <= P * D for value in carried)


def test_bfloat16_operands_have_float32_sums_in_blocks(block):
    x_PD, table_VD, target_P, weight_P = case()
    x_PD = x_PD.astype(jnp.bfloat16)
    arguments = x_PD, table_VD, target_P, weight_P
    loss_P, x_gradient, table_gradient = jax.jit(program())(*arguments)
    expected = by_hand(x_PD, table_VD, target_P, weight_P)
    np.testing.assert_allclose(loss_P, expected[0], rtol=1e-5, atol=1e-5)
    # The gradient of the logits is rounded once, and each result once: 2^-9 relative of each term, of sums with signs.
    for a, b in ((x_gradient, expected[1]), (table_gradient, expected[2])):
        np.testing.assert_allclose(np.float32(a), b, atol=2**-7 * np.abs(b).max())
    assert x_gradient.dtype == jnp.bfloat16 and table_gradient.dtype == jnp.float32
    operands = {
        tuple(str(value.aval.dtype) for value in one.invars)
        for one in products_in(jax.make_jaxpr(program())(*arguments).jaxpr)
    }
    assert operands == {("bfloat16", "bfloat16")}


def products_in(jaxpr):
    """All products of a jaxpr, inner jaxprs included."""
    for one in jaxpr.eqns:
        if one.primitive.name == "dot_general":
            yield one
        for inner in jax.tree.leaves(one.params, is_leaf=lambda leaf: hasattr(leaf, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from products_in(inner)


@pytest.mark.parametrize(
    "positions, vocab_size, on_cpu, size",
    [
        # Stage 1 of the quickstart with K = 4, all at once; of CALM-M on 8 devices; a position alone; more positions than fit.
        (1024, 512, False, 512),
        (1024, 512, True, 512),
        (65_536, 128_257, False, 2048),
        (4096, 4096, True, 2048),
        (1, 128_257, False, 128_257),
        (2**22, 128_257, False, 128),
    ],
)
def test_a_block_is_as_large_as_the_memory_for_logits_allows(positions, vocab_size, on_cpu, size):
    assert vocabulary.block_size(positions, vocab_size, on_cpu) == size
    most = vocabulary._MAX_LOGITS_ON_CPU if on_cpu else vocabulary._MAX_LOGITS
    assert size in (128, vocab_size) or size * positions <= most
