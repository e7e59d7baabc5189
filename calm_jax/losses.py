"""Loss functions: cross-entropy, the autoencoder's KL, and the energy score, which trains CALM's energy head.

All are functions in float32 that return one value per position.

P positions, N draws of the model, M draws of the target, Z latent size, V vocabulary.
"""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax import Array


class Posterior(NamedTuple):
    """The autoencoder's posterior of a chunk's latent, a diagonal Gaussian: two float32 arrays [..., Z]."""

    mean: Array
    log_std: Array

    @property
    def std(self) -> Array:
        return jnp.exp(self.log_std)


def cross_entropy(logits: Array, target: Array) -> Array:
    """Cross-entropy in nats of each position.

    Args:
        logits: [..., V].
        target: token ids [...]; a negative id is masked and gives 0.

    Returns:
        float32 [...].
    """
    chex.assert_shape(target, logits.shape[:-1])
    return _cross_entropy(logits.astype(jnp.float32), target)


# `_cross_entropy` has a custom gradient, because automatic differentiation makes more passes over the logits.
@jax.custom_vjp
def _cross_entropy(logits: Array, target: Array) -> Array:
    return _cross_entropy_forward(logits, target)[0]


def _cross_entropy_forward(logits: Array, target: Array) -> tuple[Array, tuple[Array, ...]]:
    largest = logits.max(-1, keepdims=True)
    exps = jnp.exp(logits - largest)
    total = exps.sum(-1, keepdims=True)
    at_target = jnp.take_along_axis(logits, jnp.maximum(target, 0)[..., None], axis=-1)
    loss = (jnp.log(total) + largest - at_target)[..., 0]
    return jnp.where(target >= 0, loss, 0.0), (exps, total, target)


def _cross_entropy_backward(kept: tuple[Array, ...], cotangent: Array) -> tuple[Array, None]:
    exps, total, target = kept
    weight = jnp.where(target >= 0, cotangent, 0.0)[..., None]
    is_target = target[..., None] == jnp.arange(exps.shape[-1])
    return exps * (weight / total) - jnp.where(is_target, weight, 0.0), None


_cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)


def clamped_kl(posterior: Posterior, clamp: float) -> Array:
    """KL(posterior || N(0, I)) in nats, summed over Z: [P]; each dimension counts at least `clamp` (paper, section 2).

    A dimension below the clamp gets no gradient, so that the KL term does not make latent dimensions collapse to the
    prior.
    """
    mean, log_std = posterior
    kl_PZ = 0.5 * (mean**2 + jnp.exp(2 * log_std) - 1 - 2 * log_std)
    return jnp.maximum(kl_PZ, clamp).sum(-1)


def _power(square: Array, beta: float) -> Array:
    """`sqrt(square) ** beta` with value and gradient 0 where `square <= 0`."""
    positive = square > 0
    safe = jnp.where(positive, square, 1.0)
    return jnp.where(positive, jnp.sqrt(safe) if beta == 1 else safe ** (beta / 2), 0.0)


def energy_score(x_PNZ: Array, posterior: Posterior, eps_PMZ: Array, beta: float) -> Array:
    """The energy score of the model's draws x against draws t = mean + std * eps of the posterior (paper, section 3).

    `mean_{i != j} |x_i - x_j|^beta - 2 mean_{i, m} |x_i - t_m|^beta`: the first term rewards diversity, the second
    fidelity to the target. An unbiased estimate of a score that is strictly proper for 0 < beta < 2.

    Args:
        x_PNZ: N >= 2 draws of the model at each position.
        posterior: of the target chunks, [P, Z].
        eps_PMZ: standard normal noise, which makes M draws of the posterior.
        beta: the exponent of the distances.

    Returns:
        The score of each position, float32 [P]; higher is better. Where two draws coincide, their distance has the
        gradient 0, not NaN.
    """
    fidelity_P, diversity_P = energy_terms(x_PNZ, posterior, eps_PMZ, beta)
    return diversity_P - 2 * fidelity_P


def energy_terms(
    x_PNZ: Array, posterior: Posterior, eps_PMZ: Array, beta: float
) -> tuple[Array, Array]:
    """The two means of `energy_score`, float32 [P] each: `|x_i - t_m|^beta` (fidelity), `|x_i - x_j|^beta` (diversity)."""
    # No [N, M, Z] array of differences is formed: with the posterior's mean as origin, |x - t|^2 = |x|^2 + |t|^2 - 2 x.t
    # is a matrix product, and loses no digits to cancellation unless a draw nearly equals a random target. Draws of the
    # model do come close to each other (at the start of training they all coincide), so their differences are computed
    # directly.
    num_draws, num_targets = x_PNZ.shape[1], eps_PMZ.shape[1]
    chex.assert_shape([posterior.mean, posterior.log_std], (x_PNZ.shape[0], x_PNZ.shape[2]))
    chex.assert_shape(eps_PMZ, (x_PNZ.shape[0], num_targets, x_PNZ.shape[2]))
    x_PNZ = x_PNZ.astype(jnp.float32) - posterior.mean[:, None]
    t_PMZ = posterior.std[:, None] * eps_PMZ

    product_PNM = jnp.einsum("PNZ,PMZ->PNM", x_PNZ, t_PMZ, precision="highest")
    square_PNM = (x_PNZ**2).sum(-1)[:, :, None] + (t_PMZ**2).sum(-1)[:, None] - 2 * product_PNM
    to_target = _power(square_PNM, beta).sum((1, 2)) / (num_draws * num_targets)

    square_PNN = ((x_PNZ[:, :, None] - x_PNZ[:, None]) ** 2).sum(-1)
    to_each_other = _power(square_PNN, beta).sum((1, 2)) / (num_draws * (num_draws - 1))
    return to_target, to_each_other
