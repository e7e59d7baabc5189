"""The installed jaxlib computes right numbers over many rows.

jaxlib 0.10.2 and 0.11.0 give wrong results on CPUs from 32,769 float32 rows on, without an error (jax issue 39103), and
crash in reductions of rank 7 (40412). A row's loss and gradient depend on no other row, so that each must be the same in
a batch of a few rows, which all versions compute right.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calm_jax.losses import Posterior, clamped_kl, cross_entropy, energy_score
from calm_jax.models.autoencoder import Autoencoder, AutoencoderConfig
from calm_jax.models.heads.energy import EnergyHead, EnergyHeadConfig
from tests.workdirs import run_program

# The first float32 rows that were wrong, and twice as many.
ROWS = (32_769, 65_537)
Z, V, K, D = 6, 11, 2, 8


def test_a_product_and_a_reduction_under_vmap():
    """The reproducer of jax issue 39103."""

    def squares(x):
        return jax.vmap(lambda row: jnp.sum((jnp.eye(3) @ row) ** 2))(x)

    for rows in ROWS:
        index = np.arange(rows, dtype=np.float32)
        x = np.stack([index, 0 * index, 0 * index], axis=1)
        np.testing.assert_allclose(jax.jit(squares)(x), index.astype(np.float64) ** 2, rtol=1e-6)


def test_a_reduction_of_rank_7_does_not_crash():
    """The reproducer of jax issue 40412, which ends the process."""
    program = (
        "import jax, jax.numpy as jnp, numpy as np\n"
        "u, v = np.random.default_rng(0).normal(size=(2, 3, 1, 2, 2, 8, 8, 8)).astype(np.float32)\n"
        "sums = jax.jit(lambda a, b: jnp.sum(a * b, axis=3))(u, v)\n"
        "np.testing.assert_allclose(sums, (u * v).sum(3), atol=1e-5)\n"
    )
    run_program(program)


def energy_loss(h_PZ, eps_PMZ):
    """Draws made of the row itself, so that the gradient runs through distances of both kinds."""
    draws_PNZ = jnp.stack([h_PZ, 2 * h_PZ, h_PZ[:, ::-1]], axis=1)
    posterior = Posterior(h_PZ[:, ::-1] / 3, 0.1 * h_PZ)
    return -energy_score(draws_PNZ, posterior, eps_PMZ, beta=1) + clamped_kl(posterior, 0.5)


def vocabulary_loss(h_PZ, eps_PMZ):
    table_ZV = jnp.sin(jnp.arange(Z * V, dtype=jnp.float32)).reshape(Z, V)
    target_P = (jnp.abs(h_PZ[:, 0]) * 7).astype(jnp.int32) % V
    return cross_entropy(h_PZ @ table_ZV, target_P)


def head_loss(h_PZ, eps_PMZ):
    head = EnergyHead(EnergyHeadConfig("energy", 1, 4, 2, 2, 1.0), Z, Z, 1e-6, jnp.float32)
    posterior = Posterior(eps_PMZ[:, 0], -jnp.ones_like(h_PZ))
    # A row's own key: from its numbers, whatever its place in the batch.
    seed_P = jnp.abs(eps_PMZ[:, 0, 0] * 1e4).astype(jnp.uint32)
    key_P = jax.vmap(jax.random.key)(seed_P)
    shapes = jax.eval_shape(
        lambda: head.init(jax.random.key(0), h_PZ[:1], 1, key_P[:1], 1, method="sample")
    )
    params = jax.tree.map(
        lambda x: 0.3 * jnp.sin(jnp.arange(x.size) + 1.0).reshape(x.shape), shapes
    )
    return head.apply(params, h_PZ, posterior, key_P, method="loss")


def autoencoder_loss(h_PZ, eps_PMZ):
    config = AutoencoderConfig(Z, D, 12, 2, 2, 1e-6, 0.0, 0.5, 1e-3)
    model = Autoencoder(config, V, K, jnp.float32)
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, K), jnp.int32))
    params = jax.tree.map(
        lambda x: 0.3 * jnp.sin(jnp.arange(x.size) + 1.0).reshape(x.shape), shapes
    )
    tokens_PK = (jnp.abs(eps_PMZ[:, 0, :K]) * 7).astype(jnp.int32) % V
    logits_PKV = model.apply(params, h_PZ, method="decode")
    posterior = model.apply(params, tokens_PK, method="encode")
    return cross_entropy(logits_PKV, tokens_PK).sum(-1) + clamped_kl(posterior, 0.5)


@pytest.mark.parametrize("rows", [ROWS[0], pytest.param(ROWS[1], marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "loss", [energy_loss, vocabulary_loss, head_loss, autoencoder_loss], ids=lambda f: f.__name__
)
def test_a_rows_loss_and_gradient_do_not_depend_on_how_many_rows_there_are(loss, rows):
    rng = np.random.default_rng(0)
    h_PZ = rng.normal(size=(rows, Z)).astype(np.float32)
    eps_PMZ = rng.normal(size=(rows, 2, Z)).astype(np.float32)

    @jax.jit
    def loss_and_gradient(h_PZ, eps_PMZ):
        value_P, pull = jax.vjp(lambda h_PZ: loss(h_PZ, eps_PMZ), h_PZ)
        return value_P, pull(jnp.ones_like(value_P))[0]

    some = np.r_[0:7, rows // 2 : rows // 2 + 7, rows - 7 : rows]
    everywhere = loss_and_gradient(h_PZ, eps_PMZ)
    alone = loss_and_gradient(h_PZ[some], eps_PMZ[some])
    for ours, theirs in zip(everywhere, alone, strict=True):
        # Rounding differs with the batch, relative to the largest terms of a sum; the defect is a thousand times larger.
        scale = np.abs(theirs).max()
        np.testing.assert_allclose(ours[some] / scale, theirs / scale, atol=1e-5)
