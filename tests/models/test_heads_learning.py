"""The heads learn: each overfits one batch, and the latent heads learn a distribution with two modes."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.spatial
import scipy.special

from calm_jax.brier import Protocol
from calm_jax.losses import Posterior
from calm_jax.models.autoencoder import Autoencoder
from calm_jax.models.autoregressive import AutoregressiveLM
from calm_jax.models.calm import CALM
from calm_jax.models.heads import LATENT_HEADS
from calm_jax.models.heads.diffusion import cosine_schedule
from calm_jax.models.heads.softmax import SoftmaxHead
from calm_jax.tasks import AutoregressiveTask, CalmTask
from tests.compiler_options import OPTIMISED
from tests.models.networks import autoencoder_config, keys, random_like, transformer_config
from tests.models.tiny_heads import D, build_head, draws_of, initial, normal


def trained(loss_of, params, steps, learning_rate, seed=0):
    """Trains with Adam on `loss_of(params, key)`, with a fresh key each step: the parameters, and the loss of each step."""
    # The learning rate decays to zero, so that the last steps add no noise to the fit.
    optimizer = optax.adam(optax.cosine_decay_schedule(learning_rate, steps))

    def step(state, i):
        params, moments = state
        key = jax.random.fold_in(jax.random.key(seed), i)
        loss, gradient = jax.value_and_grad(loss_of)(params, key)
        updates, moments = optimizer.update(gradient, moments)
        return (optax.apply_updates(params, updates), moments), loss

    def run(params):
        return jax.lax.scan(step, (params, optimizer.init(params)), jnp.arange(steps))

    (params, _), losses = jax.jit(run, compiler_options=OPTIMISED)(params)
    return params, np.asarray(losses)


def gamma_ratio(d):
    """Gamma((d+1)/2) / Gamma(d/2)."""
    return math.exp(math.lgamma((d + 1) / 2) - math.lgamma(d / 2))


def mean_norm(d, std, distance=0.0):
    """E|x| for x ~ N(mu, std^2 I_d) with |mu| = distance."""
    factor = scipy.special.hyp1f1(-0.5, d / 2, -(distance**2) / (2 * std**2))
    return math.sqrt(2) * std * gamma_ratio(d) * factor


# --- Overfitting one batch

V, PAD, K, Z = 33, 32, 2, 6
POSTERIOR_STD = 0.1
BODY = transformer_config(hidden_size=D, intermediate_size=32, num_layers=1, num_heads=2)
ROWS, CHUNKS = 3, 5


def calm_task(name):
    config = autoencoder_config(latent_size=Z, hidden_size=16, intermediate_size=16)
    model = CALM(BODY, build_head(name, Z), None, V, PAD, jnp.float32)
    return CalmTask(
        model,
        Autoencoder(config, V, K, jnp.float32),
        Protocol(num_samples=2),
        token_prior_weight=0.0,
    )


def random_autoencoder(model):
    """A random frozen autoencoder whose posteriors all have the standard deviation POSTERIOR_STD.

    Random is enough: training a head needs only a fixed encoding that differs between chunks.
    """
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, K), jnp.int32))
    variables = random_like(shapes, seed=1)
    layer = variables["params"]["to_posterior"]
    layer["kernel"] = layer["kernel"].at[:, Z:].set(0)
    layer["bias"] = layer["bias"].at[Z:].set(math.log(POSTERIOR_STD))
    return variables


def overfitted_latent_head(name, steps, learning_rate):
    """Trains a whole CALM on one batch: the losses, the posterior means [P, Z], and 32 draws for each of them."""
    task = calm_task(name)
    frozen = random_autoencoder(task.autoencoder)
    tokens = np.random.default_rng(0).integers(0, V - 1, (ROWS, CHUNKS * K)).astype(np.int32)
    batch = {"tokens": tokens, "targets": tokens}

    def loss(params, key):
        total, weight = task.loss(params, frozen, batch, jax.random.split(key, ROWS))["loss"]
        return total / weight

    params, losses = trained(loss, jax.jit(task.init)(jax.random.key(0)), steps, learning_rate)

    @jax.jit
    def latents(params):
        tokens_BLK = tokens.reshape(ROWS, CHUNKS, K)
        posterior = task.posterior(frozen, tokens_BLK[:, 1:].reshape(-1, K))
        h_PD = task.hidden(params, tokens_BLK).reshape(-1, D)
        drawn = task.bind(params, frozen).latents(h_PD, 32, keys(len(h_PD)), 1)
        return posterior, drawn

    posterior, drawn_PNZ = latents(params)
    np.testing.assert_allclose(posterior.std, POSTERIOR_STD, rtol=1e-6)
    return losses, np.asarray(posterior.mean), np.asarray(drawn_PNZ)


def loss_floor(name):
    """The expected loss of a head whose draws have exactly the distribution of each position's posterior, a Gaussian."""
    std = POSTERIOR_STD
    if name == "energy":
        # 2 E|x - t| - E|x - x'|, where x, x' and t have one distribution.
        return mean_norm(Z, math.sqrt(2) * std)
    if name == "flow":
        # The variance of target - noise given the state, std^2 / ((1-t)^2 + t^2 std^2), over t in (0, 1).
        return std * math.pi / 2
    # The variance of the noise given the state; plus half the log-ratio between the variance of the reverse step and
    # its variance for a known start. Step 0, one of 1000, is left out.
    schedule = cosine_schedule()
    signal = schedule.alpha_bar
    of_start = std**2 * (1 - signal) / (signal * std**2 + 1 - signal)
    of_noise = signal * of_start / (1 - signal)
    excess = schedule.mean_of_start[1:] ** 2 * of_start[1:] / schedule.posterior_variance[1:]
    return of_noise.mean() + (0.5 * np.log2(1 + excess)).mean()


# Steps and learning rate; enough to pass the thresholds with a margin.
OVERFIT = {"energy": (600, 1e-2), "diffusion": (800, 5e-3), "flow": (500, 1e-2)}


@pytest.mark.slow
@pytest.mark.parametrize("name", LATENT_HEADS)
def test_a_latent_head_overfits_one_batch(name):
    """A whole CALM memorises a batch: the loss gets near its floor, and the draws near the posteriors."""
    losses, mean_PZ, drawn_PNZ = overfitted_latent_head(name, *OVERFIT[name])
    floor, last = loss_floor(name), losses[-40:].mean()
    assert losses[0] > 4 * floor  # a control: it starts far from the floor
    # At most 1.5 floors; the last losses have a statistical error of a few per cent.
    assert floor * 0.9 < last < floor * 1.5

    # Medians, since a few draws of the diffusion head are far away (see CONFIGS). In a perfect fit the median error of
    # a coordinate is 0.67 standard deviations; without a fit it is above 10, as the gap between targets.
    error = np.median(np.abs(drawn_PNZ - mean_PZ[:, None])) / POSTERIOR_STD
    assert 0.5 < error < 1.2
    gap_PP = np.linalg.norm(mean_PZ[:, None] - mean_PZ, axis=-1) + 1e9 * np.eye(len(mean_PZ))
    assert gap_PP.min() > 10 * POSTERIOR_STD  # all targets are far from each other
    nearest_PN = np.linalg.norm(drawn_PNZ[:, :, None] - mean_PZ, axis=-1).argmin(-1)
    # The nearest target is the right one: always in a perfect fit, 1/12 of the time by chance.
    assert (nearest_PN == np.arange(len(mean_PZ))[:, None]).mean() > 0.97


@pytest.mark.slow
def test_the_softmax_head_overfits_one_batch():
    """Every token becomes the most likely one after the tokens before it; the loss falls from log V to near 0."""
    model = AutoregressiveLM(BODY, SoftmaxHead(V, D, jnp.float32), V, jnp.float32)
    task = AutoregressiveTask(model, PAD, Protocol(num_samples=2))
    tokens = np.random.default_rng(0).integers(0, V, (ROWS, 12)).astype(np.int32)
    tokens[:, 0] = np.arange(
        ROWS
    )  # no two rows begin with the same token, which would be ambiguous
    batch = {"tokens": tokens, "targets": tokens}

    def loss(params, key):
        total, weight = task.loss(params, {}, batch, jax.random.split(key, ROWS))["loss"]
        return total / weight

    params, losses = trained(loss, jax.jit(task.init)(jax.random.key(0)), 300, 1e-2)
    assert abs(losses[0] - math.log(V)) < 0.2
    assert losses[-1] < 0.02
    log_p = jax.jit(lambda p: model.apply({"params": p}, tokens[..., None]))(params)
    np.testing.assert_array_equal(log_p[:, :-1].argmax(-1), tokens[:, 1:])


# --- A distribution with two modes

MODE, MODE_STD, NUM_DRAWS = np.array([1.2, 0.6]), 0.3, 2000


def mixture(num, seed):
    """Draws of 1/2 N(MODE, MODE_STD^2) + 1/2 N(-MODE, MODE_STD^2)."""
    rng = np.random.default_rng(seed)
    return rng.choice([-1, 1], (num, 1)) * MODE + MODE_STD * rng.normal(size=(num, 2))


def energy_distance(x, y):
    """The energy distance of two samples, 2 E|x-y| - E|x-x'| - E|y-y'|, with pairs of a draw with itself included."""

    def mean(a, b):
        return scipy.spatial.distance.cdist(a, b).mean()

    return 2 * mean(x, y) - mean(x, x) - mean(y, y)


def expected_energy_distance(num):
    """The expected energy distance of two samples of the mixture; not 0, because of the pairs of a draw with itself."""
    std = math.sqrt(2) * MODE_STD
    between = 0.5 * (mean_norm(2, std) + mean_norm(2, std, 2 * np.linalg.norm(MODE)))
    return 2 * between / num


def test_energy_distance_separates_the_mixture_from_a_gaussian_with_its_moments():
    """Checks the measure of the next test on known distributions."""
    expected = expected_energy_distance(NUM_DRAWS)
    exact = [energy_distance(mixture(NUM_DRAWS, s), mixture(NUM_DRAWS, 50 + s)) for s in range(8)]
    assert max(exact) < 3 * expected
    # The mean of 8 has a relative standard error of about 0.15.
    assert abs(np.mean(exact) / expected - 1) < 0.6
    covariance = np.outer(MODE, MODE) + MODE_STD**2 * np.eye(2)
    gaussian = np.random.default_rng(9).multivariate_normal([0, 0], covariance, NUM_DRAWS)
    assert energy_distance(gaussian, mixture(NUM_DRAWS, 1)) > 50 * expected


# Positions in a batch, training steps, learning rate.
TWO_MODES = {"energy": (32, 1500, 1e-2), "diffusion": (32, 1000, 1e-2), "flow": (16, 500, 3e-3)}


def two_mode_draws(name, seed=0):
    """NUM_DRAWS draws of a head before and after training on the mixture, all for one hidden state."""
    head, (positions, steps, learning_rate) = build_head(name, 2), TWO_MODES[name]
    h_PD = jnp.tile(normal(1, D), (positions, 1))
    # A posterior has one mode; half of the positions have the one, half the other, all with the same hidden state.
    sign_P1 = np.where(np.arange(positions) % 2, 1, -1)[:, None]
    log_std_PZ = jnp.full((positions, 2), math.log(MODE_STD), jnp.float32)
    posterior = Posterior(jnp.asarray(sign_P1 * MODE, jnp.float32), log_std_PZ)

    def loss(variables, key):
        key_P = jax.random.split(key, positions)
        return head.apply(variables, h_PD, posterior, key_P, method="loss").mean()

    fresh = initial(head, seed)
    fitted, _ = trained(loss, fresh, steps, learning_rate, seed=seed + 100)
    before, after = (
        np.asarray(draws_of(head, variables, h_PD[:1], NUM_DRAWS, keys(1))[0], np.float64)
        for variables in (fresh, fitted)
    )
    return before, after


@pytest.mark.slow
@pytest.mark.parametrize("name", LATENT_HEADS)
def test_a_latent_head_learns_a_law_with_two_modes(name):
    """The energy distance of its draws to the mixture is at most 10 times the expected one of the mixture's own draws.

    Over a few seeds the heads reach 0.3 to 6 times; a Gaussian with the mixture's moments has 58 times, the
    untrained flow head, a standard normal, 130.
    """
    before, after = two_mode_draws(name)
    # The mixture lies within 3, six standard deviations from its modes. A few draws in a thousand of the diffusion head
    # are far beyond (see CONFIGS): they are counted here, and then clipped, so that they do not dominate the distance.
    assert (np.abs(after) > 3).any(-1).mean() < 0.02
    before, after = np.clip(before, -3, 3), np.clip(after, -3, 3)
    expected, exact = expected_energy_distance(NUM_DRAWS), mixture(NUM_DRAWS, 1)
    assert energy_distance(before, exact) > 50 * expected
    assert energy_distance(after, exact) < 10 * expected
    along = after @ MODE / np.linalg.norm(MODE)
    # Both modes are equally frequent; the standard error is 0.011, and training leaves an imbalance of that size.
    assert abs((along > 0).mean() - 0.5) < 0.06
    # The middle fifth between the modes holds 0.05 % of the mixture and 15 % of the Gaussian with its moments. The
    # energy head, a continuous function of its noise, has some draws there.
    assert (np.abs(along) < 0.2 * np.linalg.norm(MODE)).mean() < 0.06
    for sign in (-1, 1):
        mode = after[sign * along > 0]
        np.testing.assert_allclose(np.median(mode, axis=0), sign * MODE, atol=0.1)
