"""The energy score compared with its definition and with its closed form on Gaussians; KL and cross-entropy by hand."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from calm_jax.losses import Posterior, clamped_kl, cross_entropy, energy_score
from tests.models.networks import shapes_in

score_of = jax.jit(energy_score, static_argnames="beta")

BETAS = (0.5, 1.0, 1.5, 2.0)
# The expected loss 2 E|x-y| - E|x-x'| for x ~ N(mu, s^2 I), y ~ N(m, t^2 I): (d, s, |mu - m|, t, loss).
CLOSED_FORM = (
    (3, 0.8, 1.1, 0.5, 1.8455),
    (16, 0.5, 2.0, 0.3, 3.2814),
    (128, 0.3, 0.0, 0.3, 4.7906),
    (128, 1.0, 3.0, 0.3, 8.3576),
    (1, 1.0, 0.0, 0.0, 0.46739),
)
# In standard errors, two-sided: a correct estimator fails one comparison in 150,000, and the seeds are fixed.
SIGMAS = 4.5


def naive_score(x_PNZ, mean_PZ, std_PZ, eps_PMZ, beta):
    """The energy score straight from its definition, in float64."""
    x_PNZ, mean_PZ, std_PZ, eps_PMZ = (
        np.asarray(array, np.float64) for array in (x_PNZ, mean_PZ, std_PZ, eps_PMZ)
    )
    t_PMZ = mean_PZ[:, None] + std_PZ[:, None] * eps_PMZ
    num = x_PNZ.shape[1]
    between = np.linalg.norm(x_PNZ[:, :, None] - x_PNZ[:, None], axis=-1) ** beta
    to_target = np.linalg.norm(x_PNZ[:, :, None] - t_PMZ[:, None], axis=-1) ** beta
    return between.sum((1, 2)) / (num * (num - 1)) - 2 * to_target.mean((1, 2))


def random_case(seed=0, P=3, N=5, M=7, Z=6):
    rng = np.random.default_rng(seed)
    x_PNZ = rng.normal(0.3, 1, (P, N, Z)).astype(np.float32)
    posterior = Posterior(
        rng.normal(0, 1, (P, Z)).astype(np.float32), rng.normal(-1, 0.3, (P, Z)).astype(np.float32)
    )
    return x_PNZ, posterior, rng.normal(size=(P, M, Z)).astype(np.float32)


@functools.partial(jax.jit, static_argnames="beta")
def gradient(x_PNZ, posterior, eps_PMZ, beta):
    return jax.grad(lambda x: energy_score(x, posterior, eps_PMZ, beta).sum())(x_PNZ)


def gaussian_losses(d, s, distance, t, N, M, positions, beta=1.0):
    """One loss per position, for draws of N(mu, s^2 I) against draws of N(m, t^2 I) with |mu - m| = distance."""
    rng = np.random.default_rng([d, N, M, int(100 * s)])
    center = np.full(d, 0.7)
    mu = center + distance * np.eye(d)[0]
    x_PNZ = (mu + s * rng.normal(size=(positions, N, d))).astype(np.float32)
    mean = np.broadcast_to(center, (positions, d)).astype(np.float32)
    log_std = np.full((positions, d), math.log(t) if t else -np.inf, np.float32)
    eps_PMZ = rng.normal(size=(positions, M, d)).astype(np.float32)
    return -np.asarray(score_of(x_PNZ, Posterior(mean, log_std), eps_PMZ, beta), np.float64)


def sigmas_off(losses, expected):
    return abs(losses.mean() - expected) / (losses.std(ddof=1) / math.sqrt(len(losses)))


@pytest.mark.parametrize("beta", BETAS)
def test_energy_score_equals_its_definition(beta):
    x_PNZ, posterior, eps_PMZ = random_case()
    score = score_of(x_PNZ, posterior, eps_PMZ, beta)
    std = np.exp(posterior.log_std)
    np.testing.assert_allclose(
        score, naive_score(x_PNZ, posterior.mean, std, eps_PMZ, beta), rtol=2e-6, atol=2e-6
    )


@pytest.mark.parametrize(("d", "s", "distance", "t", "expected"), CLOSED_FORM)
def test_energy_loss_of_gaussians_is_the_closed_form(d, s, distance, t, expected):
    losses = gaussian_losses(d, s, distance, t, N=8, M=16, positions=2000)
    assert sigmas_off(losses, expected) < SIGMAS
    # A control: the test would detect a sum over pairs that is divided by N^2.
    spread = 2 * s * math.gamma((d + 1) / 2) / math.gamma(d / 2)
    assert sigmas_off(losses, expected + spread / 8) > SIGMAS


@pytest.mark.parametrize("M", [1, 2, 7])
@pytest.mark.parametrize("N", [2, 3, 5])
def test_energy_score_is_unbiased_for_every_number_of_draws(N, M):
    d, s, distance, t, expected = CLOSED_FORM[0]
    losses = gaussian_losses(d, s, distance, t, N, M, positions=4000)
    assert sigmas_off(losses, expected) < SIGMAS
    spread = 2 * s * math.gamma((d + 1) / 2) / math.gamma(d / 2)
    assert sigmas_off(losses, expected + spread / N) > SIGMAS


@pytest.mark.parametrize("s", [0.2, 1.5])
def test_with_beta_two_the_score_does_not_depend_on_the_spread_of_the_draws(s):
    d, distance, t = 4, 1.1, 0.5
    losses = gaussian_losses(d, s, distance, t, N=8, M=16, positions=4000, beta=2.0)
    assert sigmas_off(losses, 2 * (distance**2 + d * t**2)) < SIGMAS


@pytest.mark.parametrize("beta", BETAS)
def test_gradient_equals_finite_differences(beta):
    x_PNZ, posterior, eps_PMZ = random_case(seed=1, P=2, N=3, M=4, Z=3)
    std, step = np.exp(posterior.log_std.astype(np.float64)), 1e-6
    numeric = np.zeros(x_PNZ.shape)
    for index in np.ndindex(x_PNZ.shape):
        moved = np.zeros(x_PNZ.shape)
        moved[index] = step
        up, down = (
            naive_score(x_PNZ.astype(np.float64) + sign * moved, posterior.mean, std, eps_PMZ, beta)
            for sign in (1, -1)
        )
        numeric[index] = (up - down).sum() / (2 * step)
    np.testing.assert_allclose(
        gradient(x_PNZ, posterior, eps_PMZ, beta), numeric, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("beta", BETAS)
def test_two_draws_that_coincide_have_distance_zero_and_finite_equal_gradients(beta):
    x_PNZ, posterior, eps_PMZ = random_case(seed=2)
    x_PNZ[:, 1] = x_PNZ[:, 0]
    std = np.exp(posterior.log_std)
    np.testing.assert_allclose(
        score_of(x_PNZ, posterior, eps_PMZ, beta),
        naive_score(x_PNZ, posterior.mean, std, eps_PMZ, beta),
        rtol=2e-6,
        atol=2e-6,
    )
    twins = gradient(x_PNZ, posterior, eps_PMZ, beta)
    assert np.isfinite(twins).all()
    # Their other distances are the same.
    np.testing.assert_allclose(twins[:, 1], twins[:, 0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("beta", BETAS)
def test_the_gradient_of_equal_draws_comes_from_the_target_alone(beta):
    x_PNZ, posterior, eps_PMZ = random_case(seed=3)
    x_PNZ[:] = x_PNZ[:, :1]
    difference = x_PNZ[:, :1] - (
        posterior.mean[:, None] + np.exp(posterior.log_std)[:, None] * eps_PMZ
    )
    norm = np.linalg.norm(difference, axis=-1, keepdims=True)
    pull = -2 / x_PNZ.shape[1] * (beta * norm ** (beta - 2) * difference).mean(1)
    ours = gradient(x_PNZ, posterior, eps_PMZ, beta)
    np.testing.assert_allclose(
        ours, np.broadcast_to(pull[:, None], ours.shape), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("log_std", [-np.inf, -200.0])
@pytest.mark.parametrize("beta", BETAS)
def test_a_posterior_of_std_zero_is_a_single_target_point(beta, log_std):
    x_PNZ, posterior, eps_PMZ = random_case(seed=4)
    point = Posterior(posterior.mean, np.full_like(posterior.log_std, log_std))
    np.testing.assert_allclose(
        score_of(x_PNZ, point, eps_PMZ, beta),
        naive_score(x_PNZ, point.mean, np.zeros_like(point.mean), eps_PMZ, beta),
        rtol=2e-6,
        atol=2e-6,
    )
    # Every draw on that point: the score and its gradient are zero, not NaN.
    x_PNZ[:] = point.mean[:, None]
    assert (np.asarray(score_of(x_PNZ, point, eps_PMZ, beta)) == 0).all()
    assert (gradient(x_PNZ, point, eps_PMZ, beta) == 0).all()


def test_no_array_of_the_energy_score_is_larger_than_the_target_draws():
    P, N, M, Z = 3, 2, 50, 20

    def largest(score, beta):
        x_PNZ, posterior, eps_PMZ = random_case(P=P, N=N, M=M, Z=Z)
        both = jax.value_and_grad(lambda x: score(x, posterior, jnp.asarray(eps_PMZ), beta).sum())
        return max(map(math.prod, shapes_in(jax.make_jaxpr(jax.jit(both))(x_PNZ))))

    def direct(x_PNZ, posterior, eps_PMZ, beta):
        t_PMZ = posterior.mean[:, None] + posterior.std[:, None] * eps_PMZ
        return -(((x_PNZ[:, :, None] - t_PMZ[:, None]) ** 2).sum(-1) ** (beta / 2))

    assert max(largest(energy_score, beta) for beta in BETAS) <= P * M * Z
    assert largest(direct, 1.0) >= P * N * M * Z  # a control: `shapes_in` finds such an array


def test_clamped_kl_by_hand():
    # Per dimension: 0, then 1/8 + ln 2, then 7/2 - ln 2.
    posterior = Posterior(
        jnp.array([[0.0, 1.0, 2.0]]), jnp.array([[0.0, -math.log(2), math.log(2)]])
    )
    np.testing.assert_allclose(clamped_kl(posterior, 0.0), [3.625], rtol=1e-6)
    np.testing.assert_allclose(clamped_kl(posterior, 0.5), [4.125], rtol=1e-6)
    np.testing.assert_allclose(clamped_kl(posterior, 1.0), [2 + 3.5 - math.log(2)], rtol=1e-6)


def test_dimensions_below_the_kl_clamp_get_no_gradient():
    posterior = Posterior(jnp.array([[0.5, 2.0]]), jnp.array([[0.1, 0.0]]))
    by_mean, by_log_std = jax.grad(lambda p: clamped_kl(p, 0.5).sum())(posterior)
    np.testing.assert_allclose(by_mean, [[0, 2]], atol=1e-6)
    np.testing.assert_allclose(by_log_std, [[0, 0]], atol=1e-6)


def test_cross_entropy_by_hand_and_masked_targets_give_zero():
    logits = jnp.log(jnp.array([[[1.0, 3.0, 4.0]] * 3]))
    target = jnp.array([[1, -100, 2]])
    np.testing.assert_allclose(
        cross_entropy(logits, target), [[math.log(8 / 3), 0, math.log(2)]], rtol=1e-6
    )
    slope = np.asarray(jax.grad(lambda x: cross_entropy(x, target).sum())(logits))
    p = np.array([1, 3, 4]) / 8
    np.testing.assert_allclose(
        slope[0], [p - [0, 1, 0], [0, 0, 0], p - [0, 0, 1]], rtol=1e-5, atol=1e-6
    )


def test_cross_entropy_and_its_gradient_equal_automatic_differentiation():
    """Against optax, also for logits that differ by more than float32's exponential can hold."""
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(scale=60, size=(7, 3, 11)), jnp.float32)
    target = rng.integers(-1, 11, (7, 3))
    weight = jnp.asarray(rng.normal(size=(7, 3)), jnp.float32)

    def by_optax(logits):
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(target, 0))
        return (jnp.where(target >= 0, loss, 0) * weight).sum()

    ours = jax.value_and_grad(lambda logits: (cross_entropy(logits, target) * weight).sum())
    for a, b in zip(ours(logits), jax.value_and_grad(by_optax)(logits), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    half = jax.grad(lambda logits: cross_entropy(logits, target).sum())(logits.astype(jnp.bfloat16))
    assert half.dtype == jnp.bfloat16


def test_cross_entropy_is_computed_in_float32():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 50)), jnp.bfloat16)
    target = jnp.arange(6).reshape(2, 3)
    loss = cross_entropy(logits, target)
    assert loss.dtype == jnp.float32
    np.testing.assert_array_equal(loss, cross_entropy(logits.astype(jnp.float32), target))
