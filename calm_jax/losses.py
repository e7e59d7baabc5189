"""Loss functions: the autoencoder's cross-entropy and KL, and the two scores that train CALM's energy head.

All are functions in float32 that return one value per position.

P positions, N draws of the model, M draws of the target, Z latent size, K tokens a chunk, V vocabulary.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from calm_jax.parallel.devices import target_device
from calm_jax.parallel.loops import map_in_blocks

# The largest array of logits that a loss computes at once on an accelerator, in elements: 512 MiB in float32, a thirtieth of the
# smallest one's memory.
MAX_LOGITS = 2**27
# The largest array of logits of `brier_of_draws` on a CPU: 4 MiB.
_MAX_LOGITS_ON_CPU = 2**20
# For fewer rows of logits than about this, reading the decoder's table takes most of the time of a product.
_MIN_ROWS = 64

# The longest n-gram of the Brier scores, which are computed for n = 1 to 4.
ORDERS = 4


class Posterior(NamedTuple):
    """The autoencoder's posterior of a chunk's latent, a diagonal Gaussian: two float32 arrays [..., Z]."""

    mean: Array
    log_std: Array

    @property
    def std(self) -> Array:
        return jnp.exp(self.log_std)


class Target(NamedTuple):
    """The next chunks, as a latent head's loss sees them.

    Attributes:
        posterior: the frozen autoencoder's, [P, Z].
        tokens_PK: their tokens.
        decode: `(latent_PNZ, context) -> logits [P, K, N, V]`, the decoder of N draws.
        context: what `decode` needs besides the draws, a tree of arrays [P, ...].
        step: number of updates so far, int32; None in evaluation, where losses leave out terms that only help training.
    """

    posterior: Posterior
    tokens_PK: Array
    decode: Callable[[Array, Any], Array]
    context: Any
    step: Array | None


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


@jax.custom_vjp
def _products_of_pairs(prob_PKNV: Array) -> Array:
    """Sums over V of the products of two draws' probabilities, [P, K, N, N]."""
    return jnp.einsum("PKiV,PKjV->PKij", prob_PKNV, prob_PKNV, precision="highest")


_products_of_pairs.defvjp(
    lambda prob_PKNV: (_products_of_pairs(prob_PKNV), prob_PKNV),
    # The two arguments of the product are one array, so its gradient is one product and not two.
    lambda prob_PKNV, g: (
        jnp.einsum("PKij,PKjV->PKiV", g + g.swapaxes(2, 3), prob_PKNV, precision="highest"),
    ),
)


def decoded_brier(logit_PKNV: Array, tokens_PK: Array, temperature: float) -> Array:
    """The Brier loss of a chunk's n-grams, for a model that decodes each of its draws to a distribution of tokens.

    The model's distribution of an n-gram is the mean over its draws of the product of the tokens' probabilities. The
    Brier loss of an n-gram is the sum of the squared probabilities minus twice the probability of the true n-gram; BrierLM
    is made of the same score (`calm_jax.brier`, paper, section 4). It is proper, and the estimate is unbiased: the squares are
    products of two different draws.

    The probabilities are softmax(logits / temperature). At temperature 1 they are those of the logits. A decoder is nearly certain
    almost everywhere, so a draw that decodes to a wrong token then has hardly any gradient; a higher temperature gives it one.
    The loss is then least where these flatter probabilities have the distribution of the text.

    Args:
        logit_PKNV: logits of each token, decoded from N >= 2 draws.
        tokens_PK: the true tokens.
        temperature: above 0.

    Returns:
        The sum over n = 1, ..., min(K, 4) of the mean loss of the chunk's n-grams, float32 [P]; at least -min(K, 4).
    """
    chunk_size, num_draws = logit_PKNV.shape[1:3]
    prob_PKNV = jax.nn.softmax(logit_PKNV.astype(jnp.float32) / temperature)
    right_PKN = jnp.take_along_axis(prob_PKNV, tokens_PK[:, :, None, None], axis=-1)[..., 0]
    equal_PKNN = _products_of_pairs(prob_PKNV)
    is_pair_NN = ~np.eye(num_draws, dtype=bool)
    loss_P = jnp.zeros(len(tokens_PK))
    # Products of the values of n consecutive tokens, for n = 1; each iteration extends them by one token.
    right, equal = right_PKN, equal_PKNN
    for order in range(1, min(chunk_size, ORDERS) + 1):
        if order > 1:
            right = right[:, :-1] * right_PKN[:, order - 1 :]
            equal = equal[:, :-1] * equal_PKNN[:, order - 1 :]
        squares = jnp.where(is_pair_NN, equal, 0).sum((2, 3)) / (num_draws * (num_draws - 1))
        loss_P += (squares - 2 * right.mean(2)).mean(1)
    return loss_P


def brier_of_draws(x_PNZ: Array, target: Target, temperature: float) -> Array:
    """`decoded_brier` of a head's draws, which are decoded for one block of positions after the other.

    The logits of all draws are N K V numbers a position: 16 MB for CALM-M, and 34 GB for one block of its text. No position's
    loss depends on another position, and only the draws get a gradient. So a block's loss and the gradient for its draws are
    computed together in the forward pass, and the backward pass only multiplies this gradient, which has the size of the
    draws. No logits are kept or computed twice.

    Args:
        x_PNZ: N >= 2 draws of latents at each position.
        target: the next chunks. Nothing in it gets a gradient.
        temperature: as of `decoded_brier`.

    Returns:
        As of `decoded_brier`. Where its gradient is not finite, it is NaN. Its second derivative is wrongly zero.
    """

    def loss_and_gradient(block: tuple[Array, Array, Any]) -> tuple[Array, Array]:
        draws_RNZ, tokens_RK, context = block

        def loss_of(x_RNZ: Array) -> Array:
            return decoded_brier(target.decode(x_RNZ, context), tokens_RK, temperature)

        loss_R, pull = jax.vjp(loss_of, draws_RNZ)
        return loss_R, *pull(jnp.ones_like(loss_R))

    context = jax.lax.stop_gradient(target.context)
    _, K, N, V = jax.eval_shape(target.decode, x_PNZ, context).shape
    most = _MAX_LOGITS_ON_CPU if target_device().platform == "cpu" else MAX_LOGITS
    block = max(-(-_MIN_ROWS // (K * N)), most // (K * N * V))
    fixed_PNZ = jax.lax.stop_gradient(x_PNZ)
    blocks = fixed_PNZ, target.tokens_PK, context
    loss_P, gradient_PNZ = map_in_blocks(loss_and_gradient, block, blocks)
    # Adds zero, whose derivative is the gradient computed above.
    return loss_P + (gradient_PNZ * (x_PNZ - fixed_PNZ)).sum((1, 2))
