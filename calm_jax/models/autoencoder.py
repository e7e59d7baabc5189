"""The autoencoder that squeezes a chunk of K tokens into one continuous vector (paper, section 2)."""

import dataclasses
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from calm_jax.errors import UserError
from calm_jax.losses import Posterior, clamped_kl, cross_entropy
from calm_jax.models.layers import SwiGLU, linear, look_up, normal_init
from calm_jax.placement import constrain


@dataclasses.dataclass(frozen=True)
class AutoencoderConfig:
    """`config.autoencoder.model`; every key is described in `configs/common.py`."""

    latent_size: int
    hidden_size: int
    intermediate_size: int
    num_encoder_layers: int
    num_decoder_layers: int
    norm_epsilon: float
    dropout: float
    kl_clamp: float
    kl_weight: float

    def __post_init__(self):
        for name in ("num_encoder_layers", "num_decoder_layers"):
            if getattr(self, name) < 2 or getattr(self, name) % 2:
                raise UserError(
                    f"autoencoder.model.{name}={getattr(self, name)} must be even and at least 2: one half of "
                    "the layers works on tokens, the other on chunks"
                )
        for name in ("latent_size", "hidden_size", "intermediate_size"):
            if getattr(self, name) < 1:
                raise UserError(
                    f"autoencoder.model.{name}={getattr(self, name)} must be at least 1"
                )
        for name in ("kl_clamp", "kl_weight"):
            if getattr(self, name) < 0:
                raise UserError(
                    f"autoencoder.model.{name}={getattr(self, name)} must not be negative"
                )
        if self.norm_epsilon <= 0:
            raise UserError(f"autoencoder.model.norm_epsilon={self.norm_epsilon} must be positive")
        if not 0 <= self.dropout < 1:
            raise UserError(f"autoencoder.model.dropout={self.dropout} must be in [0, 1)")


class Noise(NamedTuple):
    """The random numbers of one training loss of P chunks (see `Autoencoder.loss`).

    keep_token: bool [P, K]; eps: standard normal [P, Z]; keep_latent: bool [P, Z].
    """

    keep_token: Array
    eps: Array
    keep_latent: Array


class ResidualMLP(nn.Module):
    """`x + SwiGLU(RMSNorm(x))`. There is no attention: a chunk is encoded on its own."""

    config: AutoencoderConfig
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: Array, _: None) -> tuple[Array, None]:
        norm = nn.RMSNorm(self.config.norm_epsilon, dtype=self.dtype, name="norm")
        mlp = SwiGLU(self.config.intermediate_size, self.dtype, name="mlp")
        return constrain(x + mlp(norm(x))), None


def _stack(config: AutoencoderConfig, num_layers: int, dtype: DTypeLike) -> nn.Module:
    scanned = nn.scan(
        ResidualMLP, variable_axes={"params": 0}, split_rngs={"params": True}, length=num_layers
    )
    return scanned(config, dtype)


class Autoencoder(nn.Module):
    """Encoder and decoder of chunks, with one embedding table at both ends.

    `dtype` is the arithmetic of the layers; parameters, posteriors and logits are float32.
    """

    config: AutoencoderConfig
    vocab_size: int
    chunk_size: int
    dtype: DTypeLike

    def setup(self):
        config, dtype = self.config, self.dtype
        self.embed = nn.Embed(
            self.vocab_size, config.hidden_size, dtype=dtype, embedding_init=normal_init
        )
        self.encoder_token_layers = _stack(config, config.num_encoder_layers // 2, dtype)
        self.squeeze = linear(config.hidden_size, dtype)
        self.encoder_chunk_layers = _stack(config, config.num_encoder_layers // 2, dtype)
        self.encoder_norm = nn.RMSNorm(config.norm_epsilon, dtype=dtype)
        self.to_posterior = linear(2 * config.latent_size, dtype)

        self.from_latent = linear(config.hidden_size, dtype)
        self.decoder_chunk_layers = _stack(config, config.num_decoder_layers // 2, dtype)
        self.expand = linear(self.chunk_size * config.hidden_size, dtype)
        self.decoder_token_layers = _stack(config, config.num_decoder_layers // 2, dtype)
        self.decoder_norm = nn.RMSNorm(config.norm_epsilon, dtype=dtype)

    def encode(self, tokens_PK: Array) -> Posterior:
        """Chunks of token ids [P, K] -> the posterior over their latents [P, Z]."""
        with jax.named_scope("encode"):
            x_PKD, _ = self.encoder_token_layers(constrain(look_up(self.embed, tokens_PK)), None)
            x_PD = constrain(self.squeeze(x_PKD.reshape(len(tokens_PK), -1)))
            x_PD, _ = self.encoder_chunk_layers(x_PD, None)
            both = self.to_posterior(self.encoder_norm(x_PD)).astype(jnp.float32)
            return Posterior(*jnp.split(both, 2, axis=-1))

    def decode(self, latent_PZ: Array) -> Array:
        """Latents [P, Z] -> float32 logits [P, K, V]."""
        with jax.named_scope("decode"):
            return self._logits(self._refine(self.unfold(latent_PZ)), self.embed.embedding)

    def unfold(self, latent_PZ: Array) -> Array:
        """Latents [P, Z] -> the beginnings of their K tokens, [P, K, D], which go on without each other."""
        with jax.named_scope("unfold"):
            x_PD, _ = self.decoder_chunk_layers(self.from_latent(latent_PZ), None)
            return self.expand(x_PD).reshape(len(latent_PZ), self.chunk_size, -1)

    def _refine(self, x: Array) -> Array:
        """Unfolded positions [..., D] -> what their logits are read from."""
        x, _ = self.decoder_token_layers(x, None)
        return self.decoder_norm(x)

    def likeliest(self, x_RD: Array, block: int) -> Array:
        """The argmax tokens of unfolded positions, int32 [R]; logits of `block` tokens are held at once."""
        with jax.named_scope("likeliest"):
            x_RD, table_VD = self._refine(x_RD), self.embed.embedding
            if block >= self.vocab_size:
                return self._logits(x_RD, table_VD).argmax(-1).astype(jnp.int32)

            def better(index: Array, best: tuple[Array, Array]) -> tuple[Array, Array]:
                # The last block begins early enough to be whole; what it sees twice changes nothing.
                first = jnp.minimum(index * block, self.vocab_size - block)
                rows = jax.lax.dynamic_slice_in_dim(table_VD, first, block)
                logit_RV = self._logits(x_RD, rows)
                most_R, token_R = logit_RV.max(-1), logit_RV.argmax(-1).astype(jnp.int32) + first
                is_better_R = most_R > best[0]
                return jnp.where(is_better_R, most_R, best[0]), jnp.where(
                    is_better_R, token_R, best[1]
                )

            none = jnp.full(len(x_RD), -jnp.inf), jnp.zeros(len(x_RD), jnp.int32)
            return jax.lax.fori_loop(0, -(-self.vocab_size // block), better, none)[1]

    def _logits(self, x: Array, table_VD: Array) -> Array:
        """[..., D] -> float32 [..., V], tied to the encoder's embedding."""
        return jnp.einsum(
            "...D,VD->...V",
            x,
            table_VD.astype(self.dtype),
            preferred_element_type=jnp.float32,
        )

    def draw_noise(self, key_P: Array) -> Noise:
        """Fresh random numbers for `loss`, those of a chunk from its own key."""
        keep_rate, latent_shape = 1 - self.config.dropout, (self.config.latent_size,)

        def draw(key: Array) -> Noise:
            token_key, eps_key, latent_key = jax.random.split(key, 3)
            return Noise(
                keep_token=jax.random.bernoulli(token_key, keep_rate, (self.chunk_size,)),
                eps=jax.random.normal(eps_key, latent_shape),
                keep_latent=jax.random.bernoulli(latent_key, keep_rate, latent_shape),
            )

        return jax.vmap(draw)(key_P)

    def loss(self, tokens_PK: Array, noise: Noise) -> tuple[Array, Array]:
        """Training terms (paper, section 2): cross-entropy of each token [P, K], clamped KL of each chunk [P].

        The loss of a chunk is the sum of the first over K plus `kl_weight` times the second. Tokens
        are dropped to id 0 on the way in, latents to zero on the way out; targets stay whole.
        """
        posterior = self.encode(jnp.where(noise.keep_token, tokens_PK, 0))
        latent_PZ = posterior.mean + posterior.std * noise.eps
        latent_PZ = jnp.where(noise.keep_latent, latent_PZ / (1 - self.config.dropout), 0)
        ce_PK = cross_entropy(self.decode(latent_PZ), tokens_PK)
        return ce_PK, clamped_kl(posterior, self.config.kl_clamp)

    def __call__(self, tokens_PK: Array) -> Array:
        """The logits [P, K, V] of a chunk's mean latent; touches every parameter, for `init`."""
        return self.decode(self.encode(tokens_PK).mean)
