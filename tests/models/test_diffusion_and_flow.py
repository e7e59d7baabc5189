"""The diffusion and the flow head: their processes, and exact results with networks that are known in closed form."""

import dataclasses
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from calm_jax.losses import Posterior
from calm_jax.models.heads import diffusion
from calm_jax.models.heads.diffusion import (
    NUM_TRAINING_STEPS,
    DiffusionHead,
    cosine_schedule,
    diffused,
    loss_terms,
    respaced,
    reverse,
)
from calm_jax.models.heads.flow import FlowHead, FlowHeadConfig, integer_times
from tests.models.networks import EPSILON, keys
from tests.models.tiny_heads import CONFIGS, D, draws_of, normal

TARGET, TARGET_STD = np.array([0.7, -1.5], np.float32), 0.4

# --- Diffusion


def test_respacing_to_all_steps_changes_nothing():
    ours, whole = respaced(cosine_schedule(), NUM_TRAINING_STEPS), cosine_schedule()
    for field in ("time", "alpha_bar", "beta", "posterior_log_variance", "mean_of_start"):
        np.testing.assert_array_equal(getattr(ours, field), getattr(whole, field))


def test_the_cosine_schedule():
    """alpha_bar falls from almost 1 to almost 0 along a squared cosine; betas are at most 0.999."""
    schedule = cosine_schedule()
    edge = np.arange(1, 1001) / 1000

    def curve(t):
        return np.cos((t + 0.008) / 1.008 * np.pi / 2) ** 2

    # Relative to t = 0; only the last beta, which would be 1, is clipped.
    np.testing.assert_allclose(schedule.alpha_bar[:-1], (curve(edge) / curve(0))[:-1], rtol=1e-9)
    assert schedule.beta.max() == pytest.approx(0.999)
    assert (schedule.beta > 0.9985).sum() == 1
    assert (np.diff(schedule.alpha_bar) < 0).all()


@pytest.mark.parametrize("num_steps", [2, 3, 10, 100, 999])
def test_a_respaced_process_visits_even_steps_with_their_alpha_bar(num_steps):
    """The first and the last step are among them, and the recomputed betas multiply to the alpha_bars."""
    whole = cosine_schedule()
    ours = respaced(whole, num_steps)
    assert len(ours.time) == len(set(ours.time)) == num_steps
    assert (ours.time[0], ours.time[-1]) == (0, 999)
    assert np.abs(ours.time - np.linspace(0, 999, num_steps)).max() <= 0.5
    np.testing.assert_array_equal(ours.alpha_bar, whole.alpha_bar[ours.time])
    np.testing.assert_allclose(np.cumprod(1 - ours.beta), ours.alpha_bar, rtol=1e-6)


@pytest.mark.parametrize("num_steps", [100, 1000])
def test_the_true_noise_gives_the_start_and_the_posterior_of_the_step_back(num_steps):
    """Compared with Bayes's rule for one step; v = 1 and v = -1 give the two variances."""
    schedule = respaced(cosine_schedule(), num_steps)
    step = np.arange(num_steps)
    target, noise = normal(num_steps, 3), normal(num_steps, 3, seed=1)
    state = diffused(schedule, target, noise, step)
    for v in (-1.0, 1.0):
        output = jnp.concatenate([noise, jnp.full_like(noise, v)], axis=-1)
        to = reverse(schedule, output, state, step)
        # Rounding of the state is multiplied by 1 / sqrt(alpha_bar), up to 20,000 at the last step.
        magnified = np.abs(to.start - target) * np.sqrt(schedule.alpha_bar)[:, None]
        assert magnified.max() < 1e-6
        before, beta = schedule.alpha_bar_before[1:, None], schedule.beta[1:, None]
        # x, before the step, has the distribution N(sqrt(before) target, 1 - before); the state N(sqrt(1 - beta) x, beta).
        precision = 1 / (1 - before) + (1 - beta) / beta
        mean = np.sqrt(before) * target[1:] / (1 - before)
        mean = (mean + np.sqrt(1 - beta) * np.asarray(state)[1:] / beta) / precision
        np.testing.assert_allclose(to.mean[1:], mean, atol=1e-4)
        variance = beta if v == 1 else 1 / precision
        log_variance = np.broadcast_to(np.log(variance), mean.shape)
        np.testing.assert_allclose(to.log_variance[1:], log_variance, atol=1e-4)
    # Step 0 leads to the start itself; its variance, zero, is replaced by that of step 1.
    np.testing.assert_allclose(to.mean[0], target[0], atol=1e-4)
    assert schedule.posterior_log_variance[0] == schedule.posterior_log_variance[1]


def test_v_interpolates_the_log_variances_without_clipping():
    """Linearly, also beyond [-1, 1]."""
    schedule, step = cosine_schedule(), np.array([500])
    v = jnp.array([-3.0, -1.0, 0.0, 1.0, 3.0])
    output = jnp.concatenate([jnp.zeros(5), v])[None]
    log_variance = np.asarray(reverse(schedule, output, jnp.ones((1, 5)), step).log_variance[0])
    low, high = schedule.posterior_log_variance[500], np.log(schedule.beta[500])
    np.testing.assert_allclose(
        log_variance, low + (np.asarray(v) + 1) / 2 * (high - low), rtol=1e-5
    )


def test_the_variational_bound_is_positive_and_zero_for_the_true_posterior():
    """At every step but 0: positive for any output, 0 for the true noise and the smaller variance."""
    step = np.arange(1, NUM_TRAINING_STEPS)
    target, noise = normal(999, 3), normal(999, 3, seed=1)
    _, bound = loss_terms(normal(999, 6, seed=2), target, noise, step)
    assert (np.asarray(bound) > 0).all()
    truth = np.concatenate([noise, np.full_like(noise, -1)], axis=-1)
    error, bound = loss_terms(truth, target, noise, step)
    np.testing.assert_array_equal(error, np.zeros(999))
    # The first steps' variances are tiny: rounding of the means counts there.
    assert np.abs(bound).max() < 1e-3


def test_the_bound_is_in_bits():
    """With the true noise and v = 1 it is the KL divergence of two Gaussians with one mean, divided by ln 2."""
    schedule, step = cosine_schedule(), np.array([5, 100, 990])
    noise = normal(3, 2)
    output = np.concatenate([noise, np.ones_like(noise)], axis=-1)
    _, bound = loss_terms(output, normal(3, 2, seed=1), noise, step)
    share = schedule.posterior_variance[step] / schedule.beta[step]
    np.testing.assert_allclose(bound, 0.5 * (share - 1 - np.log(share)) / math.log(2), atol=2e-4)


def test_the_bound_trains_only_the_variance_and_the_error_only_the_noise():
    step = np.array([0, 1, 500, 999])
    output, target, noise = normal(4, 6), normal(4, 3, seed=1), normal(4, 3, seed=2)
    # A likely target at step 0, as an unlikely one has a likelihood below 1e-12, which has no gradient.
    output[0, :3] = noise[0] + 0.1

    def gradient(term):
        return jax.grad(lambda o: loss_terms(o, target, noise, step)[term].sum())(output)

    of_error, of_bound = gradient(0), gradient(1)
    np.testing.assert_array_equal(of_bound[:, :3], np.zeros((4, 3)))
    assert (np.abs(of_bound[:, 3:]).max(-1) > 1e-6).all()
    np.testing.assert_array_equal(of_error[:, 3:], np.zeros((4, 3)))
    np.testing.assert_allclose(of_error[:, :3], 2 / 3 * (output[:, :3] - noise), rtol=1e-5)


@pytest.mark.parametrize("mean", [-1.3, -0.2, 0.6, 0.999])
@pytest.mark.parametrize("std", [0.01, 0.2, 3.0])
def test_the_discretised_likelihood_sums_to_one(mean, std):
    """Over bins of width 2/255 from -1 to 1, of which the first and the last are unbounded."""
    centre = jnp.arange(256) * 2 / 255 - 1
    log_p = diffusion._discretised_log_likelihood(centre, jnp.float32(mean), math.log(std))
    # 256 float32 differences of numbers up to 1.
    np.testing.assert_allclose(np.exp(np.asarray(log_p, np.float64)).sum(), 1, atol=1e-5)


def test_step_0_is_scored_by_the_likelihood_of_the_target():
    """In bits, with the network's variance; here the target is the mean."""
    noise, target = np.zeros((1, 1), np.float32), np.full((1, 1), 0.3, np.float32)
    step = np.array([0])
    scored = [
        float(loss_terms(np.array([[0, v]], np.float32), target, noise, step)[1][0])
        for v in (-1, 1)
    ]
    schedule = cosine_schedule()
    for bits, variance in zip(
        scored, (schedule.posterior_variance[1], schedule.beta[0]), strict=True
    ):
        half_width = 1 / 255 / math.sqrt(variance)
        mass = math.erf(half_width / math.sqrt(2))
        # The tanh approximation of the normal CDF has an error of 3e-4; the mean is the target up to rounding.
        assert bits == pytest.approx(-math.log2(mass), abs=2e-3)


class KnownNoise(nn.Module):
    """In place of the network: the exact reversal of the process that starts at N(TARGET, TARGET_STD^2).

    Looked up by the network's time input, among the times of `num_steps` steps.
    """

    num_steps: int

    @nn.compact
    def __call__(self, x_PNZ, time, h_PD):
        schedule = respaced(cosine_schedule(), self.num_steps)
        signal = schedule.alpha_bar
        of_state = signal * TARGET_STD**2 + 1 - signal
        of_start = TARGET_STD**2 * (1 - signal) / of_state
        variance = np.exp(schedule.posterior_log_variance) + schedule.mean_of_start**2 * of_start
        least, most = schedule.posterior_log_variance, np.log(schedule.beta)
        v = 2 * (np.log(variance) - least) / (most - least) - 1

        def at(values):
            # Any other time gives NaN.
            table = np.full(NUM_TRAINING_STEPS, np.nan, np.float32)
            table[schedule.time] = values
            return jnp.asarray(table)[time][..., None]

        noise = at(np.sqrt(1 - signal) / of_state) * (x_PNZ - at(np.sqrt(signal)) * TARGET)
        return jnp.concatenate([noise, jnp.broadcast_to(at(v), x_PNZ.shape)], axis=-1)


class KnownDiffusionHead(DiffusionHead):
    def setup(self):
        self.net = KnownNoise(self.config.num_steps)


@pytest.mark.slow
@pytest.mark.parametrize("num_steps", [10, 100, 1000])
def test_diffusion_sampling_with_the_exact_reversal_has_the_targets_law(num_steps):
    """The reversal of a process that starts at a Gaussian is Gaussian, and so exact for any number of steps."""
    config = dataclasses.replace(CONFIGS["diffusion"], num_steps=num_steps)
    head = KnownDiffusionHead(config, D, 2, EPSILON, jnp.float32)
    drawn = np.asarray(draws_of(head, {}, jnp.zeros((2, D)), 5000, keys(2)), np.float64)
    drawn = drawn.reshape(-1, 2)
    # 5 standard errors of 10,000 draws, one false alarm in a million each.
    np.testing.assert_allclose(drawn.mean(0), TARGET, atol=5 * TARGET_STD / 100)
    np.testing.assert_allclose(drawn.std(0), TARGET_STD, atol=5 * TARGET_STD / math.sqrt(20000))
    assert abs(np.corrcoef(drawn.T)[0, 1]) < 0.05
    assert scipy.stats.kstest((drawn[:, 0] - TARGET[0]) / TARGET_STD, "norm").pvalue > 1e-6


# --- Flow


class KnownVelocity(nn.Module):
    """In place of the network: the exact velocity field from N(0, I) to N(TARGET, TARGET_STD^2)."""

    @nn.compact
    def __call__(self, x_PNZ, time, h_PD):
        t = jnp.asarray(time, jnp.float32)[..., None] / 1000
        variance = (1 - t) ** 2 + t**2 * TARGET_STD**2
        return TARGET + (t * TARGET_STD**2 - (1 - t)) / variance * (x_PNZ - t * TARGET)


class KnownFlowHead(FlowHead):
    def setup(self):
        self.net = KnownVelocity()


def flow_error(solver, num_steps):
    """The largest error of the solver's final state, which should be TARGET + TARGET_STD * noise."""
    config = FlowHeadConfig("flow", 1, 8, num_steps, solver)
    head = KnownFlowHead(config, D, 2, EPSILON, jnp.float32)
    noise_PNZ = np.linspace(-2, 2, 12, dtype=np.float32).reshape(1, 6, 2)
    carried = head.apply({}, jnp.zeros((1, D)), noise_PNZ, method="integrate")
    return float(np.abs(carried - (TARGET + TARGET_STD * noise_PNZ)).max())


def test_solvers_have_their_order_of_accuracy_on_a_known_field():
    """Twice the steps halve the error of Euler, and quarter that of midpoint, at times that are whole thousandths."""
    euler = [flow_error("euler", n) for n in (10, 20, 50, 100)]
    midpoint = [flow_error("midpoint", n) for n in (10, 20, 50, 100)]
    for few, many in ((0, 1), (2, 3)):
        assert 1.6 < euler[few] / euler[many] < 2.6
        assert midpoint[few] / midpoint[many] > 3.2
    assert midpoint[0] < 0.02  # the published number of steps
    assert euler[1] > 3 * midpoint[0]  # for the same number of network calls


@pytest.mark.parametrize("solver,num_steps", [("midpoint", 10), ("euler", 100)])
def test_flow_sampling_of_a_known_field_has_the_targets_law(solver, num_steps):
    config = FlowHeadConfig("flow", 1, 8, num_steps, solver)
    head = KnownFlowHead(config, D, 2, EPSILON, jnp.float32)
    drawn = np.asarray(draws_of(head, {}, jnp.zeros((2, D)), 5000, keys(2))).reshape(-1, 2)
    # 5 standard errors of 10,000 draws, and the solver's error for a draw at two standard deviations.
    slack = flow_error(solver, num_steps)
    np.testing.assert_allclose(drawn.mean(0), TARGET, atol=5 * TARGET_STD / 100 + slack)
    spread = 5 * TARGET_STD / math.sqrt(20000) + slack
    np.testing.assert_allclose(drawn.std(0), TARGET_STD, atol=spread)
    assert slack < 0.03


def test_flow_loss_at_the_known_field_is_its_floor():
    """pi/2 times the standard deviation: the variance of `target - noise` given the state, averaged over times."""
    config = FlowHeadConfig("flow", 1, 400, 10, "midpoint")
    head = KnownFlowHead(config, D, 2, EPSILON, jnp.float32)
    log_std = jnp.full((50, 2), math.log(TARGET_STD))
    posterior = Posterior(jnp.broadcast_to(TARGET, (50, 2)), log_std)
    loss_P = head.apply({}, jnp.zeros((50, D)), posterior, keys(50), method="loss")
    # 5 standard errors over positions; rounding the time down shifts the loss by less than 0.1 %.
    error = 5 * float(loss_P.std()) / math.sqrt(50)
    assert error < 0.03
    assert abs(float(loss_P.mean()) - TARGET_STD * math.pi / 2) < error


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param([1, 2, 3, 7, 10, 20, 29, 58, 100, 333, 500, 999, 1000], id="some"),
        pytest.param(range(1, 1001), id="all", marks=pytest.mark.slow),
    ],
)
def test_integer_times_are_whole_thousandths_rounded_down(steps):
    """`floor(1000 i / n)`, and the same for the middle of the step, without a rounding error."""
    # One program, as a call for each number would make one for each.
    every = jax.jit(lambda: [integer_times(n) for n in steps])()
    for n, times in zip(steps, every, strict=True):
        i = np.arange(n)
        expected = np.stack([1000 * i // n, 1000 * (2 * i + 1) // (2 * n)], axis=1)
        np.testing.assert_array_equal(times, expected)
