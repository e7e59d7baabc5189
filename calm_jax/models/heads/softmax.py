"""The softmax head of the autoregressive baseline: probabilities of the next token.

B rows, L tokens of each, P positions, N draws, V vocabulary.
"""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from calm_jax.models import vocabulary
from calm_jax.models.layers import normal_init


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
        with jax.named_scope("head"):
            return vocabulary.logits(h_PD.astype(self.dtype), self.kernel.T)

    def log_probs(self, h_PD: Array) -> Array:
        """Log-probabilities of the next token, float32 [P, V]."""
        return jax.nn.log_softmax(self.logits(h_PD))

    def loss(self, h_BLD: Array, target_BL: Array) -> Array:
        """Cross-entropy at each position in nats, float32 [B, L] (see `vocabulary.cross_entropy`).

        Args:
            h_BLD: hidden states.
            target_BL: the next tokens, int32; a negative one is masked and gives 0.
        """
        h_PD = h_BLD.reshape(-1, h_BLD.shape[-1]).astype(self.dtype)
        with jax.named_scope("head"):
            loss_P = vocabulary.cross_entropy(h_PD, self.kernel.T, target_BL.reshape(-1))
        return loss_P.reshape(target_BL.shape)

    def sample(self, h_PD: Array, num_draws: int, key_P: Array) -> Array:
        """Draws of the next token, int32 [P, N]."""

        def draw(key: Array, logits_V: Array) -> Array:
            return jax.random.categorical(key, logits_V, shape=(num_draws,))

        return jax.vmap(draw)(key_P, self.logits(h_PD)).astype(jnp.int32)
