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
from calm_jax.models import vocabulary
from calm_jax.models.layers import normal_init
from calm_jax.parallel.constraints import gathered_in


@dataclasses.dataclass(frozen=True)
class SoftmaxHeadConfig:
    """`config.lm.head` of the autoregressive baseline; it has no options."""

    name: str


class SoftmaxHead(nn.Module):
    """Hidden states -> logits over the vocabulary, by an output table that is not tied to the embedding.

    Attributes:
        vocab_size: V.
        hidden_size: D.
        dtype: of the product's operands; logits are float32.
    """

    vocab_size: int
    hidden_size: int
    dtype: DTypeLike

    def setup(self):
        self.kernel = self.param("kernel", normal_init, (self.hidden_size, self.vocab_size))

    def logits(self, h_PD: Array) -> Array:
        """Logits of the next token, float32 [P, V]."""
        return self._logits(h_PD, self.kernel)

    def _logits(self, h_PD: Array, kernel: Array) -> Array:
        with jax.named_scope("head"):
            return vocabulary.logits(h_PD.astype(self.dtype), kernel.T)

    def log_probs(self, h_PD: Array) -> Array:
        """Log-probabilities of the next token, float32 [P, V]."""
        return jax.nn.log_softmax(self.logits(h_PD))

    def loss(self, h_BLD: Array, target_BL: Array, block: int) -> Array:
        """Cross-entropy at each position in nats, float32 [B, L].

        Args:
            h_BLD: hidden states.
            target_BL: the next tokens, int32; a negative one is masked and gives 0.
            block: the logits of this many positions of every row are stored at once; the backward pass computes them
                again. Bounds memory.
        """
        # Gathered once for all blocks.
        kernel = gathered_in(self.dtype, self.kernel)
        batch, length, width = h_BLD.shape
        if block >= length:
            logits_PV = self._logits(h_BLD.reshape(batch * length, width), kernel)
            return cross_entropy(logits_PV, target_BL.reshape(-1)).reshape(batch, length)

        def of_position(xs: tuple[Array, Array]) -> Array:
            h_BD, target_B = xs
            return cross_entropy(self._logits(h_BD, kernel), target_B)

        over_L = (h_BLD.swapaxes(0, 1), target_BL.swapaxes(0, 1))
        return jax.lax.map(jax.checkpoint(of_position), over_L, batch_size=block).swapaxes(0, 1)

    def sample(self, h_PD: Array, num_draws: int, key_P: Array) -> Array:
        """Draws of the next token, int32 [P, N]."""

        def draw(key: Array, logits_V: Array) -> Array:
            return jax.random.categorical(key, logits_V, shape=(num_draws,))

        return jax.vmap(draw)(key_P, self.logits(h_PD)).astype(jnp.int32)
