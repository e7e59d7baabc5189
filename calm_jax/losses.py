"""Loss functions: pure, in float32, one value per position.

P positions, N draws of the model, M draws of the target, Z latent size, K tokens a chunk, V vocabulary.
"""

from typing import NamedTuple

import chex
import jax.numpy as jnp
import optax
from jax import Array


class Posterior(NamedTuple):
    """A diagonal Gaussian over latents: two float32 arrays [..., Z]."""

    mean: Array
    log_std: Array

    @property
    def std(self) -> Array:
        return jnp.exp(self.log_std)


def cross_entropy(logits_PKV: Array, target_PK: Array) -> Array:
    """Cross-entropy in nats of each token, [P, K]; a negative target (masked) gives 0."""
    chex.assert_equal_shape_prefix([logits_PKV, target_PK], 2)
    loss = optax.softmax_cross_entropy_with_integer_labels(
        logits_PKV.astype(jnp.float32), jnp.maximum(target_PK, 0)
    )
    return jnp.where(target_PK >= 0, loss, 0.0)


def clamped_kl(posterior: Posterior, clamp: float) -> Array:
    """KL(posterior || N(0, I)) in nats, each dimension at least `clamp`, summed over Z: [P]."""
    mean, log_std = posterior
    kl_PZ = 0.5 * (mean**2 + jnp.exp(2 * log_std) - 1 - 2 * log_std)
    return jnp.maximum(kl_PZ, clamp).sum(-1)


def _power(square: Array, beta: float) -> Array:
    """`sqrt(square) ** beta` with value and gradient 0 where `square <= 0`."""
    positive = square > 0
    safe = jnp.where(positive, square, 1.0)
    return jnp.where(positive, jnp.sqrt(safe) if beta == 1 else safe ** (beta / 2), 0.0)


def energy_score(x_PNZ: Array, posterior: Posterior, eps_PMZ: Array, beta: float) -> Array:
    """The energy score of N draws against M draws `mean + std * eps` of the posterior: [P], higher is better.

    `mean_{i != j} |x_i - x_j|^beta - 2 mean_{i, m} |x_i - t_m|^beta` (paper, section 3), strictly proper
    for 0 < beta < 2. Unbiased for N >= 2. Its gradient is 0, not NaN, for two draws that coincide.

    No [N, M, Z] difference is formed: with the posterior's mean as origin, |x - t|^2 =
    |x|^2 + |t|^2 - 2 x.t is a matrix product, and does not cancel unless a draw hits a random target.
    Draws of the model do come close to each other (at the start of training all coincide), so their
    differences are taken directly.
    """
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
    return to_each_other - 2 * to_target
