"""How a language model's draws of latents compare with the autoencoder's posteriors: the metrics of docs/training.md.

They are the same for all latent heads, also for those that are not trained by the energy score. B rows, L predicted chunks,
N draws of the model and M of the posterior for each, Z latent size.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from calm_jax.losses import Posterior, energy_terms
from calm_jax.parallel.constraints import rows_per_device
from calm_jax.parallel.loops import map_positions
from calm_jax.sampling.chunk_model import at_once
from calm_jax.tasks.base import Metrics, ratio, total

# N and M. Means are unbiased for any number from 2 on; few draws suffice, because a text has thousands of chunks.
_DRAWS, _TARGET_DRAWS = 2, 2
# A dimension of the posterior is collapsed if the variance of its mean over the text is below this ("active units" of
# Burda, Grosse and Salakhutdinov, 2016); a dimension of the draws, if its variance is below this share of the targets'.
COLLAPSED = 0.01


class Moments(NamedTuple):
    """Sums over many vectors: their number, the sum of their values [Z] and the sum of their squares [Z]."""

    count: Any
    values: Any
    squares: Any

    @classmethod
    def of(cls, x_BNZ: Array, counted_B: Array) -> "Moments":
        """The sums over the N vectors of each row where `counted_B` is true."""
        x_BNZ = jnp.where(counted_B[:, None, None], x_BNZ.astype(jnp.float32), 0)
        count = counted_B.sum(dtype=jnp.float32) * x_BNZ.shape[1]
        return cls(count, x_BNZ.sum((0, 1)), (x_BNZ**2).sum((0, 1)))

    def variance(self) -> np.ndarray:
        """The variance of each dimension, [Z]; NaN without vectors."""
        with np.errstate(invalid="ignore", divide="ignore"):
            mean_Z = np.asarray(self.values) / self.count
            return np.asarray(self.squares) / self.count - mean_Z**2


class LatentSums(NamedTuple):
    """Sums over the predicted chunks of a text.

    Attributes:
      means: (sum, weight) of the metrics that are means over chunks.
      draws: moments of the model's draws.
      targets: moments of the posterior's draws.
    """

    means: Metrics
    draws: Moments
    targets: Moments


def latent_sums(
    latents: Callable[[Array, int, Array, float], Array],
    posterior_BL: Posterior,
    beta: float,
    h_BLD: Array,
    key_BL: Array,
    counted_BL: Array,
    is_whole_BL: Array,
) -> LatentSums:
    """Draws latents for each predicted chunk and compares them with its posterior and with that of another chunk.

    The other chunk is the one half a block away. Its posterior gives the score that the model would have if context and
    next chunk did not belong together. It is taken from the same block, so that a block's numbers do not depend on other
    blocks.

    Args:
      latents: the model's draws of latents, as in `ChunkModel`.
      posterior_BL: the autoencoder's posteriors of the predicted chunks.
      beta: the exponent of the energy score's distances.
      h_BLD: the hidden states that predict the chunks.
      key_BL: a random key for each predicted chunk.
      counted_BL: bool, which chunks count.
      is_whole_BL: bool, which chunks have no masked token.
    """
    rows, num_chunks, width = h_BLD.shape

    def elsewhere(tree: Any) -> Any:
        return jax.tree.map(lambda x_BL: jnp.roll(x_BL, num_chunks // 2, axis=1), tree)

    def of_chunk(xs: tuple[Any, ...]) -> LatentSums:
        h_BD, of_target, of_other, key_B, counted_B, both_B = xs
        key_B, target_key_B = jax.vmap(jax.random.split, out_axes=1)(key_B)
        x_BNZ = latents(h_BD, _DRAWS, key_B, 1)
        shape = (_TARGET_DRAWS, x_BNZ.shape[-1])
        eps_BMZ = jax.vmap(lambda key: jax.random.normal(key, shape))(target_key_B)
        t_BMZ = of_target.mean[:, None] + of_target.std[:, None] * eps_BMZ
        fidelity_B, diversity_B = energy_terms(x_BNZ, of_target, eps_BMZ, beta)
        far_B, _ = energy_terms(x_BNZ, of_other, eps_BMZ, beta)
        # No model can do better than to draw from the posterior itself. The energy loss is then the mean distance of such draws.
        _, floor_B = energy_terms(t_BMZ, of_target, eps_BMZ, beta)
        means = {
            "energy_loss": total(2 * fidelity_B - diversity_B, counted_B),
            "energy_fidelity": total(fidelity_B, counted_B),
            "energy_diversity": total(diversity_B, counted_B),
            "energy_floor": total(floor_B, counted_B),
            # The diversity of the draws is the same in both scores, and cancels.
            "conditional_gap": total(2 * (far_B - fidelity_B), both_B),
            "within_context_variance": total(x_BNZ.var(1, ddof=1).sum(-1), counted_B),
        }
        return LatentSums(means, Moments.of(x_BNZ, counted_B), Moments.of(t_BMZ, counted_B))

    both_BL = counted_BL & elsewhere(is_whole_BL)
    over_L = jax.tree.map(
        lambda x: x.swapaxes(0, 1),
        (h_BLD, posterior_BL, elsewhere(posterior_BL), key_BL, counted_BL, both_BL),
    )
    width = max(width, posterior_BL.mean.shape[-1])
    # Array elements per chunk position: the energy terms compare all pairs of N = M draws.
    size = rows_per_device(rows) * width * _DRAWS**2
    sums_L = map_positions(of_chunk, at_once(size), over_L)
    return jax.tree.map(lambda x_L: x_L.sum(0), sums_L)


def report(sums: LatentSums) -> dict[str, float]:
    """The metrics by name. Variances are sums over the Z dimensions."""
    draws_Z, targets_Z = sums.draws.variance(), sums.targets.variance()
    values = {name: ratio(pair) for name, pair in sums.means.items()}
    return values | {
        "draw_variance": float(draws_Z.sum()),
        "target_variance": float(targets_Z.sum()),
        "collapsed_dimensions": float((draws_Z < COLLAPSED * targets_Z).sum()),
    }
