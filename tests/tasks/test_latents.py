"""The metrics that compare draws with posteriors, on models whose draws and posteriors are known."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calm_jax.build import make_autoencoder_task
from calm_jax.config import resolve
from calm_jax.data.tokenizers import Vocabulary
from calm_jax.losses import Posterior, energy_terms
from calm_jax.tasks import latents
from tests.tiny_recipe import get_config

# Sixteen kinds of chunk, each with a mean in six dimensions.
MEAN_VZ = np.random.default_rng(0).normal(0, 2, (16, 6)).astype(np.float32)
ROWS, CHUNKS = 48, 30
# In standard errors, two-sided: a correct metric fails one comparison in 15,000, and the seeds are fixed.
SIGMAS = 4.0
BYTES = Vocabulary(vocab_size=259, pad_id=258)


def informed(std: float, scale=1.0):
    """Draws from the posterior of the next chunk, whose mean is the hidden state."""

    def draw(h_PD, num, key_P, noise_scale):
        shape = (num, h_PD.shape[-1])
        eps_PNZ = jax.vmap(lambda key: jax.random.normal(key, shape))(key_P)
        return scale * (h_PD[:, None] + std * noise_scale * eps_PNZ)

    return draw


def marginal(std: float):
    """Draws a kind of chunk that has nothing to do with the context."""

    def draw(h_PD, num, key_P, noise_scale):
        kind_PN = jax.vmap(lambda key: jax.random.randint(key, (num,), 0, len(MEAN_VZ)))(key_P)
        eps_PNZ = informed(std)(0 * h_PD, num, key_P, noise_scale)
        return jnp.asarray(MEAN_VZ)[kind_PN] + eps_PNZ

    return draw


def of_rows(draw, std, counted=None, whole=None, seed=0) -> tuple[list[dict], np.ndarray]:
    """The metrics of each row by itself and of all together (last), and the kinds of the rows' chunks."""
    kind_BL = np.random.default_rng(seed).integers(0, len(MEAN_VZ), (ROWS, CHUNKS))
    every = np.ones((ROWS, CHUNKS), bool)
    counted, whole = every if counted is None else counted, every if whole is None else whole

    @jax.jit
    def sums(kind_BL, key_BL, counted, whole):
        h_BLD = jnp.asarray(MEAN_VZ)[kind_BL]
        log_std_BLZ = jnp.full_like(h_BLD, math.log(std) if std else -jnp.inf)
        posterior_BL = Posterior(h_BLD, log_std_BLZ)
        return latents.latent_sums(draw, posterior_BL, 1.0, h_BLD, key_BL, counted, whole)

    key_BL = jax.random.split(jax.random.key(seed), (ROWS, CHUNKS))
    parts = [
        jax.device_get(sums(*(x[row : row + 1] for x in (kind_BL, key_BL, counted, whole))))
        for row in range(ROWS)
    ]
    together = jax.tree.map(lambda *xs: np.sum(xs, axis=0, dtype=np.float64), *parts)
    return [*map(latents.report, parts), latents.report(together)], kind_BL


def is_near(rows: list[dict], name: str, expected: float) -> bool:
    values = np.array([row[name] for row in rows[:-1]])
    return abs(values.mean() - expected) < SIGMAS * values.std(ddof=1) / math.sqrt(len(values))


def test_without_noise_all_metrics_are_those_of_the_means():
    """Also where some chunks do not count, and others have masked tokens."""
    rng = np.random.default_rng(3)
    whole = rng.random((ROWS, CHUNKS)) < 0.8
    counted = whole & (rng.random((ROWS, CHUNKS)) < 0.7)
    (*_, values), kind_BL = of_rows(informed(0.0), 0.0, counted, whole)
    mean_BLZ = MEAN_VZ[kind_BL].astype(np.float64)
    far_BL = np.linalg.norm(mean_BLZ - np.roll(mean_BLZ, CHUNKS // 2, axis=1), axis=-1)
    both = counted & np.roll(whole, CHUNKS // 2, axis=1)
    variance = mean_BLZ[counted].var(0).sum()
    expected = dict.fromkeys(
        ("energy_loss", "energy_fidelity", "energy_diversity", "energy_floor"), 0.0
    ) | {
        "conditional_gap": 2 * far_BL[both].mean(),
        "draw_variance": variance,
        "target_variance": variance,
        "within_context_variance": 0.0,
        "collapsed_dimensions": 0.0,
    }
    assert values == pytest.approx(expected, rel=1e-5, abs=2e-3)


def test_a_perfect_model_is_at_the_floor():
    std = 0.7
    rows, kind_BL = of_rows(informed(std), std)
    own = len(MEAN_VZ[0]) * std**2
    # Of two draws of the posterior: sqrt(2) std times the mean of a chi distribution with six degrees of freedom.
    floor = math.sqrt(2) * std * math.sqrt(2) * math.gamma(3.5) / math.gamma(3)
    for name in ("energy_loss", "energy_fidelity", "energy_diversity", "energy_floor"):
        assert is_near(rows, name, floor), name
    assert is_near(rows, "within_context_variance", own)
    between = MEAN_VZ[kind_BL].reshape(-1, 6).var(0).sum()
    for name in ("draw_variance", "target_variance"):
        assert rows[-1][name] == pytest.approx(between + own, rel=0.03), name
    assert rows[-1]["conditional_gap"] > 5


def test_a_model_of_the_marginal_has_no_conditional_gap():
    rows, _ = of_rows(marginal(0.7), 0.7)
    assert is_near(rows, "conditional_gap", 0.0)
    # A control: the test sees a twentieth of an informed model's gap.
    informed_rows, _ = of_rows(informed(0.7), 0.7)
    assert not is_near(rows, "conditional_gap", informed_rows[-1]["conditional_gap"] / 20)
    last = rows[-1]
    assert last["draw_variance"] == pytest.approx(last["target_variance"], rel=0.05)
    assert last["within_context_variance"] == pytest.approx(last["draw_variance"], rel=0.05)
    assert last["energy_loss"] > last["energy_floor"] + 3


def test_dimensions_without_spread_are_counted():
    scale = jnp.array([1.0, 0.0, 0.05, 0.3, 1.0, 0.0])
    (*_, values), _ = of_rows(informed(0.7, scale), 0.7)
    assert values["collapsed_dimensions"] == 3


@pytest.mark.parametrize("beta", [0.5, 1.0])
def test_the_terms_are_the_means_of_their_distances(beta):
    rng = np.random.default_rng(5)
    x_PNZ, eps_PMZ = rng.normal(size=(3, 4, 6)), rng.normal(size=(3, 5, 6))
    posterior = Posterior(rng.normal(size=(3, 6)), rng.normal(-1, 0.3, (3, 6)))
    t_PMZ = posterior.mean[:, None] + np.exp(posterior.log_std)[:, None] * eps_PMZ
    fidelity_P, diversity_P = energy_terms(x_PNZ, posterior, eps_PMZ, beta)
    to_target = np.linalg.norm(x_PNZ[:, :, None] - t_PMZ[:, None], axis=-1) ** beta
    np.testing.assert_allclose(fidelity_P, to_target.mean((1, 2)), rtol=1e-5)
    apart = np.linalg.norm(x_PNZ[:, :, None] - x_PNZ[:, None], axis=-1) ** beta
    np.testing.assert_allclose(diversity_P, apart.sum((1, 2)) / 12, rtol=1e-5)


@pytest.mark.slow
def test_an_autoencoder_that_ignores_dimensions_has_them_collapsed():
    config = resolve(get_config("*.txt"))
    task = make_autoencoder_task(config, BYTES)
    params = jax.jit(task.init)(jax.random.key(0))
    # Larger outputs, so that the other dimensions have spread.
    kernel = params["to_posterior"]["kernel"] * 1e3
    tokens = np.random.default_rng(0).integers(0, 256, (4, 32)).astype(np.int32)
    batch = {"tokens": tokens, "targets": tokens}
    evaluate = jax.jit(task.evaluate)
    for collapsed in (0, 3):
        params["to_posterior"]["kernel"] = kernel.at[..., :collapsed].set(0)
        sums = evaluate(params, {}, batch, jax.random.split(jax.random.key(1), 4))
        assert task.report(jax.device_get(sums))["collapsed_dimensions"] == collapsed
