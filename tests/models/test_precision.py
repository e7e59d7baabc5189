"""Where bfloat16 and an accelerator's default precision would lose digits, the programs compute in float32.

CPUs multiply float32 operands in full anyway, so that the precision is read in the lowered programs.
"""

import re
import types

import flax.linen as nn
import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calm_jax import build
from calm_jax.config import resolve
from calm_jax.data.tokenizers import Vocabulary
from calm_jax.models.heads.adaln import AdaLNMLP
from calm_jax.models.heads.energy import EnergyHead, NoiseBlock
from calm_jax.models.layers import look_up
from calm_jax.models.vocabulary import logits
from calm_jax.parallel import products
from tests import tiny_recipe
from tests.models.networks import random_like

TENSOR = r"tensor<(?:\d+x)*(\w+)>"
# One product in StableHLO: the precision of its operands, if it has one; the dtypes of both and of the result.
PRODUCT = re.compile(
    r"stablehlo\.dot_general [^\n]*?(?:precision = \[(\w+), (\w+)\] )?"
    rf": \({TENSOR}, {TENSOR}\) -> {TENSOR}"
)


def products_of(text: str) -> list[tuple[str, str, str, str]]:
    """Of each product: the precision of both operands, "DEFAULT" if none is given; dtypes of operands and result."""
    found = PRODUCT.findall(text)
    assert len(found) == text.count("stablehlo.dot_general ")
    assert all(one[0] == one[1] for one in found)
    return [(one[0] or "DEFAULT", *one[2:]) for one in found]


def test_the_gradient_of_4096_equal_tokens_is_exact_in_bfloat16():
    """A bfloat16 sum of ones stops at 256, whose next larger neighbour is 258."""
    embed = nn.Embed(3, 2, dtype=jnp.bfloat16)
    tokens = jnp.ones(4096, jnp.int32)

    def total(table):
        return (
            look_up(embed.bind({"params": {"embedding": table}}), tokens).astype(jnp.float32).sum()
        )

    gradient_of = jax.jit(jax.grad(total))
    gradient = gradient_of(jnp.zeros((3, 2)))
    assert gradient.dtype == jnp.float32
    np.testing.assert_array_equal(gradient, [[0, 0], [4096, 4096], [0, 0]])
    scatters = re.findall(
        r"stablehlo\.scatter.*?-> tensor<(\w+)>",
        gradient_of.lower(jnp.zeros((3, 2))).as_text(),
        re.S,
    )
    assert scatters == ["3x2xf32"]


def test_embeddings_in_bfloat16_are_the_rounded_rows():
    table = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    embed = nn.Embed(5, 3, dtype=jnp.bfloat16).bind({"params": {"embedding": table}})
    tokens = jnp.array([[4, 0], [1, 1]])
    rows = look_up(embed, tokens)
    assert rows.dtype == jnp.bfloat16
    np.testing.assert_array_equal(rows, embed(tokens))


def test_logits_of_bfloat16_are_float32_and_have_bfloat16_products_in_both_passes():
    rng = np.random.default_rng(0)
    x_PD = jnp.asarray(rng.normal(size=(6, 32)), jnp.bfloat16)
    table_VD = rng.normal(size=(9, 32)).astype(np.float32)
    weight_PV = rng.normal(size=(6, 9)).astype(np.float32)

    def both(x_PD, table_VD):
        y_PV, pull = jax.vjp(logits, x_PD, table_VD)
        return y_PV, *pull(weight_PV)

    program = jax.jit(both)
    found = products_of(program.lower(x_PD, table_VD).as_text())
    # On CPUs; accelerators round the two gradients in the products.
    assert found == [("DEFAULT", "bf16", "bf16", "f32")] * 3
    y_PV, x_gradient, table_gradient = program(x_PD, table_VD)
    x, w = np.asarray(x_PD, np.float64), np.asarray(table_VD.astype(jnp.bfloat16), np.float64)
    # Products of 8-bit significands are exact in float32; only the sums are rounded.
    np.testing.assert_allclose(y_PV, x @ w.T, atol=1e-5)
    g = np.asarray(weight_PV.astype(jnp.bfloat16), np.float64)
    # One rounding to bfloat16: half a unit in the last place, 2^-8 relative.
    np.testing.assert_allclose(x_gradient.astype(np.float32), g @ w, rtol=2**-8, atol=1e-5)
    np.testing.assert_allclose(table_gradient, g.T @ x, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("head", ["energy", "diffusion", "flow"])
def test_a_heads_output_is_not_rounded_to_bfloat16(head):
    """Without a kernel the output is the bias; one in bfloat16 would be wrong by 2^-9."""
    width, size, epsilon = 8, 3, 1e-6
    h_PD, x_PNZ = jnp.ones((2, width)), jnp.ones((2, 4, size))
    if head == "energy":
        config = resolve(tiny_recipe.get_config("*.txt")).lm.head
        net = EnergyHead(config, width, size, epsilon, jnp.bfloat16)
        arguments = h_PD, jnp.ones((2, 4, config.noise_size))
    else:
        net = AdaLNMLP(1, width, size, epsilon, jnp.bfloat16)
        arguments = x_PNZ, jnp.ones((2, 4), jnp.int32), h_PD
    params = random_like(jax.eval_shape(net.init, jax.random.key(0), *arguments))["params"]
    bias = np.float32([1 + 2**-20, -3 - 2**-18, 0.1])
    zero_kernel = {"kernel": jnp.zeros((width, size)), "bias": bias}
    apply = jax.jit(lambda params: net.apply({"params": params}, *arguments))
    output = apply(params | {"output": zero_kernel})
    np.testing.assert_array_equal(output, np.broadcast_to(bias, (2, 4, size)))
    # The product's result is float32, too: values of random kernels are no bfloat16 numbers.
    output = apply(params | {"output": params["output"] | {"bias": jnp.zeros(size)}})
    assert (output != output.astype(jnp.bfloat16).astype(jnp.float32)).mean() > 0.9


def test_the_gradients_of_the_energy_heads_biases_are_summed_in_float32():
    """4096 equal positions have 4096 times the gradients of one, which sums in bfloat16 would miss by 5 %."""
    block = NoiseBlock(1e-6, jnp.bfloat16)
    x_PND, condition_PD = jnp.ones((1, 2, 8), jnp.bfloat16), jnp.ones((1, 8), jnp.bfloat16)
    shapes = jax.eval_shape(block.init, jax.random.key(0), x_PND, condition_PD)
    params = random_like(shapes)["params"]

    def gradients(positions):
        def total(params):
            inputs = jnp.tile(x_PND, (positions, 1, 1)), jnp.tile(condition_PD, (positions, 1))
            return block.apply({"params": params}, *inputs)[0].astype(jnp.float32).sum()

        flat = flax.traverse_util.flatten_dict(jax.jit(jax.grad(total))(params))
        return {path: value for path, value in flat.items() if path[-1].endswith("bias")}

    many, one = gradients(4096), gradients(1)
    assert ("input_bias",) in many and len(many) == 5
    for path, value in many.items():
        # Each row's gradient is rounded to bfloat16 before the sum.
        np.testing.assert_allclose(value, 4096 * one[path], rtol=2e-2, atol=2, err_msg=str(path))


def test_the_frozen_autoencoder_multiplies_at_the_highest_precision(monkeypatch):
    """Encoder and decoder; lowered as for a TPU, where products are not rewritten for CPUs."""
    monkeypatch.setattr(products, "target_device", lambda: types.SimpleNamespace(platform="tpu"))
    tree = tiny_recipe.get_config("*.txt,token_predictor")
    # Without the token prior, whose products are in the model's dtype.
    tree.compute_dtype, tree.lm.token_prior_weight = "bfloat16", 0.0
    config, words = resolve(tree), Vocabulary(11, 3)
    task = build.make_lm_task(config, words)
    frozen_task = build.make_autoencoder_task(config, words)
    frozen = {"params": jax.eval_shape(frozen_task.init, jax.random.key(0))}
    tokens_PK = jnp.zeros((2, config.chunk_size), jnp.int32)
    latent_PNZ = jnp.zeros((1, 3, config.autoencoder.model.latent_size))

    def encoded_and_decoded(frozen, tokens_PK, latent_PNZ):
        model = task.bind({}, frozen)
        return task.posterior(frozen, tokens_PK), model.decode(None, latent_PNZ)

    found = products_of(jax.jit(encoded_and_decoded).lower(frozen, tokens_PK, latent_PNZ).as_text())
    assert set(found) == {("HIGHEST", "f32", "f32", "f32")}
