"""The autoregressive baseline: a Llama language model over tokens. Its module has CALM's backbone and method names."""

import flax.linen as nn
import jax
from jax import Array
from jax.typing import DTypeLike

from calm_jax.models.heads.softmax import SoftmaxHead
from calm_jax.models.kv_cache import Memory
from calm_jax.models.layers import look_up, normal_init
from calm_jax.models.transformer import Transformer, TransformerConfig


class AutoregressiveLM(nn.Module):
    """Token embeddings, transformer, softmax over the vocabulary. Its chunks are single tokens, K = 1.

    The pad token's embedding is learned as any other (in CALM it is zero); the output table is not tied to the embedding.
    """

    config: TransformerConfig
    head: SoftmaxHead
    vocab_size: int
    dtype: DTypeLike

    def setup(self):
        self.embed = nn.Embed(
            self.vocab_size, self.config.hidden_size, dtype=self.dtype, embedding_init=normal_init
        )
        self.backbone = Transformer(self.config, self.dtype)

    def hidden(
        self, tokens_BLK: Array, memory: Memory | None = None
    ) -> tuple[Array, Memory | None]:
        """Reads tokens, [B, L, 1]; see `CALM.hidden`. Token i+1 is predicted from hidden state i, [B, L, D]."""
        with jax.named_scope("embed"):
            x_BLD = look_up(self.embed, tokens_BLK[..., 0])
        return self.backbone(x_BLD, memory)

    def log_probs(self, h_PD: Array) -> Array:
        """See `SoftmaxHead.log_probs`."""
        return self.head.log_probs(h_PD)

    def loss(self, h_BLD: Array, target_BL: Array) -> Array:
        """See `SoftmaxHead.loss`."""
        return self.head.loss(h_BLD, target_BL)

    def sample(self, h_PD: Array, num_draws: int, key_P: Array) -> Array:
        """See `SoftmaxHead.sample`."""
        return self.head.sample(h_PD, num_draws, key_P)

    def __call__(self, tokens_BLK: Array) -> Array:
        """Log-probabilities of the next token, [B, L, V]; uses every parameter, for `init`."""
        return self.head.log_probs(self.hidden(tokens_BLK)[0])
