"""CALM, the continuous autoregressive language model: next-vector prediction over chunks of tokens (paper, section 3).

A chunk of K tokens is one step of the sequence. The backbone, a Llama transformer, reads chunks of token ids and gives
one hidden state per chunk; from the hidden state of chunk i, a generative head draws the latent vector of chunk i+1.
The frozen autoencoder (autoencoder.py) decodes that latent to K tokens, and these tokens, not the latent, are the
backbone's next input: the paper found latents as input much worse.

Read next: heads/energy.py, the head; `calm_jax.losses`, the scores that train it; `calm_jax.brier`, how the model is
scored; `calm_jax.sampling.temperature`, how it is sampled at a temperature.

E: the K D features of a chunk's tokens.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from calm_jax.losses import Posterior
from calm_jax.models.heads.softmax import SoftmaxHead
from calm_jax.models.kv_cache import Memory
from calm_jax.models.layers import layer_norm, linear, look_up, normal_init, silu
from calm_jax.models.transformer import Transformer, TransformerConfig
from calm_jax.parallel.constraints import constrain


def _normal_but_zero_row(row: int) -> nn.initializers.Initializer:
    def init(rng: Array, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        return normal_init(rng, shape, dtype).at[row].set(0)

    return init


class ChunkEmbedding(nn.Module):
    """Chunks of token ids [B, L, K] -> [B, L, D]: K embeddings, concatenated and compressed by an MLP.

    The pad token's embedding is zero and gets no gradient, as in the published code.
    """

    vocab_size: int
    pad_id: int
    hidden_size: int
    norm_epsilon: float
    dtype: DTypeLike

    @nn.compact
    def __call__(self, tokens_BLK: Array) -> Array:
        with jax.named_scope("embed"):
            embed = nn.Embed(
                self.vocab_size,
                self.hidden_size,
                dtype=self.dtype,
                embedding_init=_normal_but_zero_row(self.pad_id),
                name="tokens",
            )
            is_text = (tokens_BLK != self.pad_id)[..., None]
            x_BLKD = jnp.where(is_text, constrain(look_up(embed, tokens_BLK)), 0)
            x_BLD = x_BLKD.reshape(*tokens_BLK.shape[:2], -1)
            x_BLD = silu(linear(2 * self.hidden_size, self.dtype, "up")(x_BLD))
            x_BLD = linear(self.hidden_size, self.dtype, "down")(x_BLD)
            return layer_norm(self.norm_epsilon, self.dtype, "norm")(x_BLD)


class TokenPredictor(nn.Module):
    """An auxiliary task: predicts each token of the next chunk from the hidden state (not in the paper).

    The K tokens are predicted independently of each other, so this is no model of the chunk. Its loss teaches the backbone the
    likely next tokens much earlier than the head's loss does. Its logits may also be a prior in decoding the head's draws
    (`calm_jax.tasks.calm.CalmTask.token_prior_weight`).

    Attributes:
        weight: of its loss, positive.
        vocab_size: V.
        chunk_size: K.
        hidden_size: D.
        norm_epsilon: of the LayerNorm.
        dtype: of the arithmetic; parameters and losses are float32.
    """

    weight: float
    vocab_size: int
    chunk_size: int
    hidden_size: int
    norm_epsilon: float
    dtype: DTypeLike

    def setup(self):
        self.up = linear(2 * self.hidden_size, self.dtype)
        self.expand = linear(self.chunk_size * self.hidden_size, self.dtype)
        self.norm = layer_norm(self.norm_epsilon, self.dtype)
        self.vocabulary = SoftmaxHead(self.vocab_size, self.hidden_size, self.dtype)

    def features(self, h_BLD: Array) -> Array:
        """Hidden states -> the vectors that give the logits of the K tokens of each next chunk, [B, L, K, D]."""
        with jax.named_scope("token_predictor"):
            # Without the constraints XLA computes a wrong gradient on a mesh with data, fsdp and tensor axes (jaxlib 0.10.1).
            x_BLE = constrain(self.expand(constrain(silu(self.up(h_BLD)))))
            x_BTD = self.norm(x_BLE.reshape(len(h_BLD), -1, self.hidden_size))
            return x_BTD.reshape(*h_BLD.shape[:2], self.chunk_size, self.hidden_size)

    def loss(self, x_BLKD: Array, tokens_BLK: Array) -> Array:
        """Cross-entropy of each next chunk's K tokens in nats, summed, float32 [B, L].

        Args:
            x_BLKD: from `features`.
            tokens_BLK: the chunks to predict.
        """
        with jax.named_scope("token_predictor"):
            x_BTD = x_BLKD.reshape(len(x_BLKD), -1, self.hidden_size)
            target_BT = tokens_BLK.reshape(len(x_BLKD), -1)
            return self.vocabulary.loss(x_BTD, target_BT).reshape(tokens_BLK.shape).sum(-1)


class CALM(nn.Module):
    """The language model: `hidden` reads chunks, `sample` draws the next chunk's latent, `loss` trains backbone and head.

    Attributes:
        config: of the backbone.
        head: a latent head (see `calm_jax.models.heads`).
        token_predictor: the auxiliary task, and with `CalmTask.token_prior_weight` a part of decoding; None to train without it.
        vocab_size: V, of the embedding table; pads included.
        pad_id: the token whose embedding stays zero.
        dtype: of the arithmetic; parameters are float32.
    """

    config: TransformerConfig
    head: nn.Module
    token_predictor: TokenPredictor | None
    vocab_size: int
    pad_id: int
    dtype: DTypeLike

    def setup(self):
        self.embed = ChunkEmbedding(
            self.vocab_size,
            self.pad_id,
            self.config.hidden_size,
            self.config.norm_epsilon,
            self.dtype,
        )
        self.backbone = Transformer(self.config, self.dtype)

    def hidden(
        self, tokens_BLK: Array, memory: Memory | None = None
    ) -> tuple[Array, Memory | None]:
        """Reads chunks.

        Args:
            tokens_BLK: token ids, int32 [B, L, K].
            memory: a key-value cache, or a fork of one, to continue from; or segment ids, which keep documents apart (see
                `calm_jax.models.kv_cache`); None for whole blocks in which every chunk attends to all chunks before it.

        Returns:
            Hidden states [B, L, D], the one at chunk i to generate chunk i+1 from; and the cache or fork, extended
            by the L chunks (None without one).
        """
        return self.backbone(self.embed(tokens_BLK), memory)

    def embedded(self, tokens_BLK: Array) -> Array:
        """The inputs of the transformer, one vector per chunk, [B, L, D]."""
        return self.embed(tokens_BLK)

    def loss(self, h_PD: Array, posterior: Posterior, key_P: Array) -> Array:
        """The head's loss at each position, float32 [P]: hidden states against the latents of the next chunks."""
        return self.head.loss(h_PD, posterior, key_P)

    def token_features(self, h_BLD: Array) -> Array:
        """See `TokenPredictor.features`."""
        assert self.token_predictor is not None
        return self.token_predictor.features(h_BLD)

    def token_loss(self, x_BLKD: Array, tokens_BLK: Array) -> Array:
        """See `TokenPredictor.loss`."""
        assert self.token_predictor is not None
        return self.token_predictor.loss(x_BLKD, tokens_BLK)

    def sample(self, h_PD: Array, num_draws: int, key_P: Array, noise_scale: float) -> Array:
        """Draws of the next chunk's latent, [P, N, Z]; see `calm_jax.models.heads`."""
        return self.head.sample(h_PD, num_draws, key_P, noise_scale)

    def __call__(self, tokens_BLK: Array, key_P: Array) -> Array:
        """One latent per position, [B*L, 1, Z]; uses every parameter, for `init`."""
        h_BLD, _ = self.hidden(tokens_BLK)
        h_PD = h_BLD.reshape(-1, h_BLD.shape[-1])
        if self.token_predictor is not None:
            self.token_loss(self.token_features(h_BLD), tokens_BLK)
        return self.head.sample(h_PD, 1, key_P, noise_scale=1)
