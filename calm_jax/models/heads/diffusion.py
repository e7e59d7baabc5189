"""The diffusion head, which denoises a latent in many small steps (paper, section 3 and its ablation).

The process is that of "Improved Denoising Diffusion Probabilistic Models" (Nichol and Dhariwal, 2021): a cosine schedule
of 1000 steps, a network that predicts the noise and an interpolation v between two variances, and a sampler that visits
a subset of the steps.

P positions, N draws or targets of each, Z latent size.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from calm_jax.errors import UserError, require_at_least
from calm_jax.losses import Posterior
from calm_jax.models.heads.adaln import AdaLNMLP, over_steps, training_draws
from calm_jax.models.stack import Stacks

NUM_TRAINING_STEPS = 1000


@dataclasses.dataclass(frozen=True)
class DiffusionHeadConfig:
    """`config.lm.head` of a diffusion head; every key is described in `configs/common.py`."""

    name: str
    num_blocks: int
    num_samples: int
    num_steps: int

    def __post_init__(self):
        require_at_least(1, self, "lm.head.", "num_blocks", "num_samples")
        if not 2 <= self.num_steps <= NUM_TRAINING_STEPS:
            raise UserError(
                f"lm.head.num_steps={self.num_steps} must be from 2 to {NUM_TRAINING_STEPS}, the number of steps in training"
            )


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """Constants of a diffusion process, float64 [steps]; step 0 adds the least noise.

    Attributes:
        time: the integer time of each step, the network's input.
        alpha_bar: the share of signal in the variance of the state after the step.
    """

    time: np.ndarray
    alpha_bar: np.ndarray

    @property
    def alpha_bar_before(self) -> np.ndarray:
        """`alpha_bar` of the state before the step."""
        return np.append(1.0, self.alpha_bar[:-1])

    @property
    def beta(self) -> np.ndarray:
        """The variance of the noise that the step adds."""
        return 1 - self.alpha_bar / self.alpha_bar_before

    @property
    def posterior_variance(self) -> np.ndarray:
        """The variance of the state before the step, given the state after it and the start (the clean latent)."""
        return self.beta * (1 - self.alpha_bar_before) / (1 - self.alpha_bar)

    @property
    def posterior_log_variance(self) -> np.ndarray:
        """The logarithm of `posterior_variance`; step 0, where that is zero, has the value of step 1."""
        variance = self.posterior_variance
        return np.log(np.append(variance[1], variance[1:]))

    @property
    def mean_of_start(self) -> np.ndarray:
        """The coefficient of the start in the posterior mean, `mean_of_start * start + mean_of_state * state`."""
        return self.beta * np.sqrt(self.alpha_bar_before) / (1 - self.alpha_bar)

    @property
    def mean_of_state(self) -> np.ndarray:
        """The coefficient of the state after the step in the posterior mean."""
        return (1 - self.alpha_bar_before) * np.sqrt(1 - self.beta) / (1 - self.alpha_bar)


def cosine_schedule() -> Schedule:
    """The process of training: 1000 steps with `alpha_bar(t) = cos^2((t + 0.008) / 1.008 * pi / 2)`, betas at most 0.999."""
    edge = np.arange(NUM_TRAINING_STEPS + 1) / NUM_TRAINING_STEPS
    signal = np.cos((edge + 0.008) / 1.008 * math.pi / 2) ** 2
    beta = np.minimum(1 - signal[1:] / signal[:-1], 0.999)
    return Schedule(np.arange(NUM_TRAINING_STEPS), np.cumprod(1 - beta))


def respaced(schedule: Schedule, num_steps: int) -> Schedule:
    """The process that visits `num_steps` evenly spaced steps of another one, the first and the last included."""
    last = len(schedule.time) - 1
    kept = np.array([round(step * last / (num_steps - 1)) for step in range(num_steps)])
    return Schedule(schedule.time[kept], schedule.alpha_bar[kept])


def _at(values: np.ndarray, step: Array) -> Array:
    """A schedule's constant at each step, with a last axis to broadcast over Z."""
    return jnp.asarray(values, jnp.float32)[step][..., None]


@dataclasses.dataclass(frozen=True)
class Reverse:
    """The reverse step that a network predicts: a Gaussian over the state before a step.

    Attributes:
        mean: [..., Z].
        log_variance: [..., Z].
        start: [..., Z], the predicted clean latent.
    """

    mean: Array
    log_variance: Array
    start: Array


def reverse(schedule: Schedule, output: Array, state: Array, step: Array) -> Reverse:
    """The reverse step from the network's output.

    Args:
        schedule: of the process.
        output: of the network, [..., 2 Z]: the noise, then v. `(v + 1) / 2`, not clipped, interpolates between the
            logarithms of the posterior variance and of beta.
        state: after the step, [..., Z].
        step: int [...].
    """
    noise, v = jnp.split(output, 2, axis=-1)
    signal = schedule.alpha_bar
    start = _at(np.sqrt(1 / signal), step) * state - _at(np.sqrt(1 / signal - 1), step) * noise
    mean = _at(schedule.mean_of_start, step) * start + _at(schedule.mean_of_state, step) * state
    most, least = _at(np.log(schedule.beta), step), _at(schedule.posterior_log_variance, step)
    share = (v + 1) / 2
    return Reverse(mean, share * most + (1 - share) * least, start)


def _normal_cdf(x: Array) -> Array:
    """The standard normal CDF, by the usual tanh approximation."""
    return 0.5 * (1 + jnp.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _discretised_log_likelihood(x: Array, mean: Array, log_std: Array) -> Array:
    """Log-likelihood of x under a Gaussian discretised to bins of half-width 1/255; the bins beyond +-0.999 are unbounded."""
    upper = _normal_cdf((x - mean + 1 / 255) * jnp.exp(-log_std))
    lower = _normal_cdf((x - mean - 1 / 255) * jnp.exp(-log_std))
    mass = jnp.where(x < -0.999, upper, jnp.where(x > 0.999, 1 - lower, upper - lower))
    return jnp.log(jnp.maximum(mass, 1e-12))


def _kl(mean: Array, log_variance: Array, other_mean: Array, other_log_variance: Array) -> Array:
    """KL divergence of a Gaussian from another one, in nats, elementwise."""
    difference = log_variance - other_log_variance
    square = (mean - other_mean) ** 2 * jnp.exp(-other_log_variance)
    return 0.5 * (jnp.exp(difference) - 1 - difference + square)


def diffused(schedule: Schedule, target: Array, noise: Array, step: Array) -> Array:
    """The state after `step` of the forward process that starts at `target`."""
    signal = schedule.alpha_bar
    return _at(np.sqrt(signal), step) * target + _at(np.sqrt(1 - signal), step) * noise


def loss_terms(output: Array, target: Array, noise: Array, step: Array) -> tuple[Array, Array]:
    """The two terms of the training loss.

    Args:
        output: of the network at the state `diffused(...)`, [..., 2 Z].
        target: the clean latent, [..., Z].
        noise: the noise that the state was made with, [..., Z].
        step: int [...].

    Returns:
        The mean squared error of the noise, and the variational bound in bits per dimension, [...] each. The bound
        trains only the variance: its gradient is stopped at the mean.
    """
    schedule = cosine_schedule()
    state = diffused(schedule, target, noise, step)
    predicted = reverse(schedule, output, state, step)
    mean = jax.lax.stop_gradient(predicted.mean)
    error = ((output[..., : target.shape[-1]] - noise) ** 2).mean(-1)
    true_mean = (
        _at(schedule.mean_of_start, step) * target + _at(schedule.mean_of_state, step) * state
    )
    true_log_variance = _at(schedule.posterior_log_variance, step)
    kl = _kl(true_mean, true_log_variance, mean, predicted.log_variance).mean(-1)
    likelihood = _discretised_log_likelihood(target, mean, 0.5 * predicted.log_variance).mean(-1)
    return error, jnp.where(step == 0, -likelihood, kl) / math.log(2)


class DiffusionHead(nn.Module):
    """A latent head by diffusion; see `calm_jax.models.heads`.

    Attributes:
        config: `config.lm.head`.
        hidden_size: D, of the head's network and of the hidden states.
        latent_size: Z.
        norm_epsilon: of every LayerNorm.
        dtype: of the arithmetic; parameters, losses and draws are float32.
    """

    config: DiffusionHeadConfig
    hidden_size: int
    latent_size: int
    norm_epsilon: float
    dtype: DTypeLike
    stacks: ClassVar[Stacks] = (("net", "blocks"),)

    def setup(self):
        self.net = AdaLNMLP(
            self.config.num_blocks,
            self.hidden_size,
            2 * self.latent_size,
            self.norm_epsilon,
            self.dtype,
        )

    def predict(self, state_PNZ: Array, time: Array, h_PD: Array) -> Array:
        """The network's output [P, N, 2 Z]: noise and v."""
        return self.net(state_PNZ, time, h_PD)

    def loss(self, h_PD: Array, posterior: Posterior, key_P: Array) -> Array:
        """The loss at each position, float32 [P]: the mean over N targets, each with its own step and noise."""

        def draw_steps(key: Array, shape: tuple[int]) -> Array:
            return jax.random.randint(key, shape, 0, NUM_TRAINING_STEPS)

        draws = training_draws(posterior, self.config.num_samples, key_P, draw_steps)
        return self.loss_of_draws(h_PD, *draws)

    def loss_of_draws(
        self, h_PD: Array, target_PNZ: Array, step_PN: Array, noise_PNZ: Array
    ) -> Array:
        """`loss` for given targets, steps and noise."""
        state_PNZ = diffused(cosine_schedule(), target_PNZ, noise_PNZ, step_PN)
        output = self.net(state_PNZ, step_PN, h_PD)
        error_PN, bound_PN = loss_terms(output, target_PNZ, noise_PNZ, step_PN)
        return (error_PN + bound_PN).mean(-1)

    def sample(self, h_PD: Array, num_draws: int, key_P: Array, noise_scale: float) -> Array:
        """Draws of the next chunk's latent, float32 [P, N, Z].

        `noise_scale` multiplies the noise of the steps, not the initial state, as in the published code.
        """
        shape = (num_draws, self.latent_size)

        def normal(step: int | Array) -> Array:
            def draw(key: Array) -> Array:
                return jax.random.normal(jax.random.fold_in(key, step), shape)

            return jax.vmap(draw)(key_P)

        start = normal(self.config.num_steps)
        return self.denoise(h_PD, start, lambda step: noise_scale * normal(step))

    def denoise(self, h_PD: Array, state_PNZ: Array, noise_of: Callable[[Array], Array]) -> Array:
        """Ancestral sampling from the noisiest state; `noise_of(step)` is the noise of a step, [P, N, Z]."""
        schedule = respaced(cosine_schedule(), self.config.num_steps)
        time = jnp.asarray(schedule.time)

        def step_back(head: "DiffusionHead", state_PNZ: Array, step: Array):
            output = head.net(state_PNZ, time[step][None, None], h_PD)
            to = reverse(schedule, output, state_PNZ, step[None, None])
            noise_PNZ = jnp.where(step > 0, jnp.exp(0.5 * to.log_variance) * noise_of(step), 0)
            return to.mean + noise_PNZ, None

        return over_steps(self, step_back, state_PNZ, jnp.arange(self.config.num_steps)[::-1])
