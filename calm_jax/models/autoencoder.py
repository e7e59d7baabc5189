"""The autoencoder, which maps a chunk of K tokens to one continuous latent vector and back (paper, section 2).

It is variational: the encoder gives a Gaussian posterior per chunk, and training clamps the KL term and drops tokens
and latents, so that the latent space is smooth enough for a language model to predict samples of it.
Axes: P chunks, R rows of any leading axes, E features of a prior.
"""

import dataclasses
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from calm_jax.errors import UserError, require_at_least, require_within
from calm_jax.losses import Posterior, clamped_kl
from calm_jax.models import vocabulary
from calm_jax.models.layers import SwiGLU, linear, linear_in_float32, look_up, normal_init
from calm_jax.models.stack import Stacks, scanned
from calm_jax.parallel.constraints import constrain


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
                    "the layers works on token vectors, the other half on chunk vectors"
                )
        path = "autoencoder.model."
        require_at_least(1, self, path, "latent_size", "hidden_size", "intermediate_size")
        require_within(0, 1e6, self, path, "kl_clamp", "kl_weight")
        require_within(1e-20, 1, self, path, "norm_epsilon")
        if not 0 <= self.dropout < 1:
            raise UserError(f"autoencoder.model.dropout={self.dropout} must be in [0, 1)")


class Noise(NamedTuple):
    """The random numbers that the training loss of P chunks needs (see `Autoencoder.loss`).

    Attributes:
        keep_token: bool [P, K], false for input tokens to drop.
        eps: standard normal, float32 [P, Z], which samples the posterior.
        keep_latent: bool [P, Z], false for latent dimensions to drop.
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


def _stack(parent: "Autoencoder", num_layers: int) -> nn.Module:
    loop = scanned(parent, ResidualMLP, num_layers, (nn.broadcast,))
    return loop(parent.config, parent.dtype)


class Autoencoder(nn.Module):
    """Encoder and decoder of chunks, with tied input and output embeddings.

    Attributes:
        config: `config.autoencoder.model`.
        vocab_size: V.
        chunk_size: K.
        dtype: of the layers' arithmetic; parameters, posteriors and logits are float32.
    """

    config: AutoencoderConfig
    vocab_size: int
    chunk_size: int
    dtype: DTypeLike
    stacks: ClassVar[Stacks] = (
        ("encoder_token_layers",),
        ("encoder_chunk_layers",),
        ("decoder_chunk_layers",),
        ("decoder_token_layers",),
    )

    def setup(self):
        config, dtype = self.config, self.dtype
        self.embed = nn.Embed(
            self.vocab_size, config.hidden_size, dtype=dtype, embedding_init=normal_init
        )
        self.encoder_token_layers = _stack(self, config.num_encoder_layers // 2)
        self.squeeze = linear(config.hidden_size, dtype)
        self.encoder_chunk_layers = _stack(self, config.num_encoder_layers // 2)
        self.encoder_norm = nn.RMSNorm(config.norm_epsilon, dtype=dtype)
        self.to_posterior = linear_in_float32(2 * config.latent_size, dtype)

        self.from_latent = linear(config.hidden_size, dtype)
        self.decoder_chunk_layers = _stack(self, config.num_decoder_layers // 2)
        self.expand = linear(self.chunk_size * config.hidden_size, dtype)
        self.decoder_token_layers = _stack(self, config.num_decoder_layers // 2)
        self.decoder_norm = nn.RMSNorm(config.norm_epsilon, dtype=dtype)

    def encode(self, tokens_PK: Array) -> Posterior:
        """Chunks of token ids [P, K] -> the posterior over their latents [P, Z]."""
        with jax.named_scope("encode"):
            x_PKD, _ = self.encoder_token_layers(constrain(look_up(self.embed, tokens_PK)), None)
            x_PD = constrain(self.squeeze(x_PKD.reshape(len(tokens_PK), -1)))
            x_PD, _ = self.encoder_chunk_layers(x_PD, None)
            both = self.to_posterior(self.encoder_norm(x_PD))
            return Posterior(*jnp.split(both, 2, axis=-1))

    def decode(self, latent_PZ: Array) -> Array:
        """Latents [P, Z] -> float32 logits [P, K, V]."""
        with jax.named_scope("decode"):
            x_PKD = self._refine(self.unfold(latent_PZ))
            return vocabulary.logits(x_PKD, self.embed.embedding)

    def unfold(self, latent_PZ: Array) -> Array:
        """First part of the decoder: latents [P, Z] -> one vector for each of the K positions, [P, K, D].

        The rest of the decoder works on each position separately, so that a caller may decode some positions only.
        """
        with jax.named_scope("unfold"):
            x_PD, _ = self.decoder_chunk_layers(self.from_latent(latent_PZ), None)
            return self.expand(x_PD).reshape(len(latent_PZ), self.chunk_size, -1)

    def _refine(self, x: Array) -> Array:
        """Second part of the decoder: unfolded positions [..., D] -> the vectors that give the logits, [..., D]."""
        x, _ = self.decoder_token_layers(x, None)
        return self.decoder_norm(x)

    def argmax_tokens(self, x: Array, block: int, prior: tuple[Array, Array] | None) -> Array:
        """The most likely token at each unfolded position.

        Args:
            x: vectors from `unfold` [..., D], for any positions.
            block: how many tokens of the vocabulary have their logits computed at once; bounds memory.
            prior: features [..., E], with axes that broadcast against those of x, and a table [V, E], whose `vocabulary.logits`
                are added to the logits. None adds nothing.

        Returns:
            Token ids, int32 [...]. Among equally likely tokens the first one is chosen, whatever the block.
        """
        with jax.named_scope("argmax_tokens"):
            table_VD, leading = self.embed.embedding, x.shape[:-1]
            x_RD = self._refine(x.reshape(-1, x.shape[-1]))

            def logits(rows: Callable[[Array], Array]) -> Array:
                logit = vocabulary.logits(x_RD, rows(table_VD)).reshape(*leading, -1)
                if prior is None:
                    return logit
                features, table_VE = prior
                return logit + vocabulary.logits(features, rows(table_VE))

            if block >= self.vocab_size:
                return vocabulary.argmax(logits(lambda table: table))

            def better(index: Array, best: tuple[Array, Array]) -> tuple[Array, Array]:
                # The last block starts early enough to be whole; tokens that it repeats do not change the maximum.
                first = jnp.minimum(index * block, self.vocab_size - block)
                logit = logits(lambda table: jax.lax.dynamic_slice_in_dim(table, first, block))
                most, token = logit.max(-1), vocabulary.argmax(logit) + first
                is_better = most > best[0]
                return jnp.where(is_better, most, best[0]), jnp.where(is_better, token, best[1])

            none = jnp.full(leading, -jnp.inf), jnp.zeros(leading, jnp.int32)
            return jax.lax.fori_loop(0, -(-self.vocab_size // block), better, none)[1]

    def draw_noise(self, key_P: Array) -> Noise:
        """The random numbers for `loss`; each chunk's come from its own key."""
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
        """The terms of the training loss, which is `cross_entropy.sum(K) + kl_weight * kl` (paper, section 2).

        Dropped input tokens become id 0, dropped latent dimensions zero; the targets are always the true tokens.

        Args:
            tokens_PK: chunks of token ids, int32.
            noise: from `draw_noise`.

        Returns:
            Cross-entropy of each token in nats, [P, K], and clamped KL divergence of each chunk in nats, [P].
        """
        posterior = self.encode(jnp.where(noise.keep_token, tokens_PK, 0))
        latent_PZ = posterior.mean + posterior.std * noise.eps
        latent_PZ = jnp.where(noise.keep_latent, latent_PZ / (1 - self.config.dropout), 0)
        with jax.named_scope("decode"):
            x_PKD = self._refine(self.unfold(latent_PZ))
            ce_PK = vocabulary.cross_entropy(x_PKD, self.embed.embedding, tokens_PK)
        return ce_PK, clamped_kl(posterior, self.config.kl_clamp)

    def __call__(self, tokens_PK: Array) -> Array:
        """The logits [P, K, V] of each chunk's mean latent; uses every parameter, for `init`."""
        return self.decode(self.encode(tokens_PK).mean)
