"""The softmax head of the autoregressive baseline: probabilities of the next token.

B rows, L tokens of each, P positions, N draws, V vocabulary.
"""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from calm_jax.losses import cross_entropy
from calm_jax.models.layers import normal_init
from calm_jax.placement import gathered_in


@dataclasses.dataclass(frozen=True)
class SoftmaxHeadConfig:
    """`config.lm.head` of the autoregressive baseline; it has a name alone."""

    name: str


class SoftmaxHead(nn.Module):
    """Hidden states [P, D] -> float32 logits [P, V], by a table of its own (not the embedding's)."""

    vocab_size: int
    hidden_size: int
    dtype: DTypeLike

    def setup(self):
        self.kernel = self.param("kernel", normal_init, (self.hidden_size, self.vocab_size))

    def logits(self, h_PD: Array) -> Array:
        return self._logits(h_PD, self.kernel)

    def _logits(self, h_PD: Array, kernel: Array) -> Array:
        with jax.named_scope("head"):
            return jnp.einsum(
                "...D,DV->...V",
                h_PD.astype(self.dtype),
                kernel.astype(self.dtype),
                preferred_element_type=jnp.float32,
            )

    def log_probs(self, h_PD: Array) -> Array:
        """Log-probabilities of the next token, [P, V] float32."""
        return jax.nn.log_softmax(self.logits(h_PD))

    def loss(self, h_BLD: Array, target_BL: Array, block: int) -> Array:
        """Cross-entropy of each position in nats, [B, L]; logits of `block` positions of every row are held at once.

        They are computed again for the gradient. A negative target (masked) gives 0.
        """
        # Once for all blocks.
        kernel = gathered_in(self.dtype, self.kernel)

        def of_position(xs: tuple[Array, Array]) -> Array:
            h_BD, target_B = xs
            return cross_entropy(self._logits(h_BD, kernel)[:, None], target_B[:, None])[:, 0]

        over_L = (h_BLD.swapaxes(0, 1), target_BL.swapaxes(0, 1))
        return jax.lax.map(jax.checkpoint(of_position), over_L, batch_size=block).swapaxes(0, 1)

    def sample(self, h_PD: Array, num_draws: int, key_P: Array) -> Array:
        """Draws of the next token, [P, N]."""

        def draw(key: Array, logits_V: Array) -> Array:
            return jax.random.categorical(key, logits_V, shape=(num_draws,))

        return jax.vmap(draw)(key_P, self.logits(h_PD)).astype(jnp.int32)
