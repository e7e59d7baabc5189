"""Stage 2: the language model, which predicts the latents of a frozen autoencoder (paper, section 3)."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from calm_jax import brier
from calm_jax.losses import Posterior
from calm_jax.models.autoencoder import Autoencoder
from calm_jax.models.calm import CALM
from calm_jax.models.kv_cache import SegmentIds
from calm_jax.models.stack import Stacks
from calm_jax.parallel.constraints import rows_per_device
from calm_jax.parallel.loops import map_positions
from calm_jax.rng import named
from calm_jax.sampling.chunk_model import ChunkModel, at_once
from calm_jax.tasks import latents
from calm_jax.tasks.base import Batch, Metrics, Params, call, chunks, flatten, split_keys, total
from calm_jax.tasks.language_model import (
    chunk_model,
    counted_chunks,
    documents_of,
    predicted_keys,
    report,
    score,
    stacks_of,
)


def _token_table(params: Params) -> Array:
    """The token predictor's table of output weights, [V, D]. It is trained by the token loss alone."""
    return jax.lax.stop_gradient(params["token_predictor"]["vocabulary"]["kernel"]).T


@dataclasses.dataclass(frozen=True)
class CalmTask:
    """Stage 2: the language model, which predicts the latents of a frozen autoencoder.

    Its `frozen` parameters are the autoencoder's, as `{"params": ...}`.

    Attributes:
        model: the language model.
        autoencoder: encodes the target chunks, and decodes the draws.
        protocol: of BrierLM.
        token_prior_weight: what the token predictor's logits are multiplied by before they are added to the logits of the
            autoencoder's decoder, wherever draws of the head are decoded. A draw between the latents of two likely
            chunks then decodes to tokens that are likely after the text so far. 0: the decoder alone, as in the paper.
    """

    model: CALM
    autoencoder: Autoencoder
    protocol: brier.Protocol
    token_prior_weight: float

    @property
    def chunk_size(self) -> int:
        """K, tokens per chunk."""
        return self.autoencoder.chunk_size

    @property
    def stacks(self) -> Stacks:
        """See `stacks_of`."""
        return stacks_of(self.model)

    @property
    def metric_names(self) -> tuple[str, ...]:
        """See `Task.metric_names`."""
        parts = () if self.model.token_predictor is None else ("head_loss", "token_loss")
        return "loss", *parts

    def init(self, key: Array) -> Params:
        """See `Task.init`."""
        tokens_BLK = jnp.zeros((1, 1, self.chunk_size), jnp.int32)
        return self.model.init(key, tokens_BLK, jax.random.split(key, 1))["params"]

    def bind(self, params: Params, frozen: Params) -> ChunkModel:
        """The model's interface to samplers."""

        def argmax_tokens(x: Array, features: Array | None) -> Array:
            prior = None if features is None else (features, _token_table(params))
            block = at_once(x.size // x.shape[-1])
            return self._frozen(frozen, "argmax_tokens", x, block, prior)

        def prior(h_PD: Array) -> Array:
            # The features are weighted and not their logits, because `vocabulary.argmax` does not allow `a + w * b`.
            return self.token_prior_weight * self._token_features(params, h_PD[:, None])[:, 0]

        return chunk_model(
            self.model,
            params,
            functools.partial(self.draw_latents, params),
            functools.partial(self._frozen, frozen, "unfold"),
            argmax_tokens,
            log_probs=None,
            prior=prior if self.token_prior_weight else None,
        )

    def draw_latents(
        self, params: Params, h_PD: Array, num_draws: int, key_P: Array, noise_scale: float
    ) -> Array:
        """Draws of the next chunk's latent alone, [P, N, Z]; for the arguments see `ChunkModel`."""
        arguments = h_PD, num_draws, key_P, noise_scale
        return call(self.model, {"params": params}, "sample", *arguments)

    def _token_features(self, params: Params, h_BLD: Array) -> Array:
        return call(self.model, {"params": params}, "token_features", h_BLD)

    def _frozen(self, frozen: Params, method: str, *arguments: Any) -> Any:
        """Calls the autoencoder in full float32 precision.

        By default TPUs multiply float32 operands in bfloat16, and GPUs in TF32.
        """
        with jax.default_matmul_precision("highest"):
            return call(self.autoencoder, frozen, method, *arguments)

    def posterior(self, frozen: Params, tokens_PK: Array) -> Posterior:
        """The frozen autoencoder's posterior of chunks of true tokens [P, K], without dropout."""
        return jax.lax.stop_gradient(self._frozen(frozen, "encode", tokens_PK))

    def hidden(
        self, params: Params, tokens_BLK: Array, documents: SegmentIds | None = None
    ) -> Array:
        """The hidden states that predict each chunk but the first, [B, L-1, D].

        The last chunk, from which nothing is predicted, is read too: L is a multiple of what kernels want, and L - 1 is not.
        """
        h_BLD, _ = call(self.model, {"params": params}, "hidden", tokens_BLK, documents)
        return h_BLD[:, :-1]

    def loss(self, params: Params, frozen: Params, batch: Batch, key_B: Array) -> Metrics:
        """The loss per chunk, over chunks without a masked token; the first chunk is not predicted.

        It is the head's loss, plus the weighted loss of the token predictor where there is one.
        """
        tokens_BLK, targets_BLK = chunks(batch, self.chunk_size)
        h_BLD = self.hidden(params, tokens_BLK, documents_of(batch, self.chunk_size))
        next_BLK = tokens_BLK[:, 1:]
        posterior = self.posterior(frozen, flatten(next_BLK))
        key_P = flatten(split_keys(key_B, tokens_BLK.shape[1] - 1))
        loss_P = call(self.model, {"params": params}, "loss", flatten(h_BLD), posterior, key_P)
        counted_P = flatten(counted_chunks(0, targets_BLK))
        predictor = self.model.token_predictor
        if predictor is None:
            return {"loss": total(loss_P, counted_P)}
        x_BLKD = self._token_features(params, h_BLD)
        token_P = flatten(call(self.model, {"params": params}, "token_loss", x_BLKD, next_BLK))
        return {
            "loss": total(loss_P + predictor.weight * token_P, counted_P),
            "head_loss": total(loss_P, counted_P),
            "token_loss": total(token_P, counted_P),
        }

    def evaluate(self, params: Params, frozen: Params, batch: Batch, key_B: Array) -> Any:
        """Sums of the head's loss, of BrierLM and of the metrics that compare draws with posteriors (`latents.latent_sums`)."""
        tokens_BLK, targets_BLK = chunks(batch, self.chunk_size)
        rows, num_chunks, _ = tokens_BLK.shape
        num_draws = brier.chunks_of(self.chunk_size)
        key_BLJ = predicted_keys(key_B, num_chunks, 1 + num_draws)

        def loss_of(xs: tuple[Array, Posterior, Array]) -> Array:
            return call(self.model, {"params": params}, "loss", *xs)

        model = self.bind(params, frozen)
        reading = brier.read(model, tokens_BLK, documents_of(batch, self.chunk_size))
        h_BLD = reading.h_BLD
        posterior_BL = jax.tree.map(
            lambda x_PZ: x_PZ.reshape(rows, num_chunks - 1, -1),
            self.posterior(frozen, flatten(tokens_BLK[:, 1:])),
        )
        over_L = (h_BLD, posterior_BL, key_BLJ[..., num_draws])
        width, num_samples = self.model.config.hidden_size, self.model.head.config.num_samples
        loss_LB = map_positions(
            loss_of,
            at_once(rows_per_device(rows) * width * num_samples),
            jax.tree.map(lambda x: x.swapaxes(0, 1), over_L),
        )
        counted_BL = counted_chunks(self.protocol.first_token, targets_BLK)
        latents_key_B = jax.vmap(lambda key: named(key, "latents"))(key_B)
        return {
            "loss": total(loss_LB.T, counted_BL),
            "latents": latents.latent_sums(
                functools.partial(self.draw_latents, params),
                posterior_BL,
                # The exponent of the energy score; heads that have none are compared with the paper's exponent, 1.
                getattr(self.model.head.config, "beta", 1.0),
                h_BLD,
                split_keys(latents_key_B, num_chunks - 1),
                counted_BL,
                counted_chunks(0, targets_BLK),
            ),
            "brier": score(
                model,
                self.model.config,
                self.protocol,
                self.autoencoder.vocab_size,
                self.model.pad_id,
                tokens_BLK,
                targets_BLK,
                reading,
                key_BLJ[..., :num_draws],
            ),
        }

    def report(self, sums: Any) -> dict[str, float]:
        """See `Task.report`."""
        return report(sums) | latents.report(sums["latents"])
