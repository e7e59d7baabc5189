"""The autoregressive baseline: the same transformer over tokens, with a softmax."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array

from calm_jax import brier
from calm_jax.models.autoregressive import AutoregressiveLM
from calm_jax.models.stack import Stacks
from calm_jax.sampling.chunk_model import ChunkModel
from calm_jax.tasks.base import Batch, Metrics, Params, call, chunks, total
from calm_jax.tasks.language_model import (
    chunk_model,
    counted_chunks,
    documents_of,
    predicted_keys,
    report,
    score,
    stacks_of,
)


@dataclasses.dataclass(frozen=True)
class AutoregressiveTask:
    """The autoregressive baseline. It has no frozen parameters.

    Attributes:
        model: the network.
        pad_id: n-grams with this token are not scored.
        protocol: of BrierLM.
    """

    model: AutoregressiveLM
    pad_id: int
    protocol: brier.Protocol

    @property
    def chunk_size(self) -> int:
        """K = 1: its chunks are single tokens."""
        return 1

    @property
    def stacks(self) -> Stacks:
        """See `stacks_of`."""
        return stacks_of(self.model)

    def init(self, key: Array) -> Params:
        """See `Task.init`."""
        return self.model.init(key, jnp.zeros((1, 1, 1), jnp.int32))["params"]

    def bind(self, params: Params, frozen: Params) -> ChunkModel:
        """The model's interface to samplers. Its latents are the token ids themselves, and `noise_scale` has no effect."""
        variables = {"params": params}

        def latents(h_PD: Array, num_draws: int, key_P: Array, noise_scale: float) -> Array:
            return call(self.model, variables, "sample", h_PD, num_draws, key_P)[..., None]

        def log_probs(h_PD: Array) -> Array:
            return call(self.model, variables, "log_probs", h_PD)

        def unfold(token_R1: Array) -> Array:
            return token_R1[:, None]

        def argmax_tokens(token: Array, prior: Array | None) -> Array:
            return token[..., 0]

        return chunk_model(
            self.model, params, latents, unfold, argmax_tokens, log_probs, prior=None
        )

    def _loss(self, params: Params, batch: Batch) -> Array:
        """Cross-entropy of each token but the first in nats, [B, T-1]; 0 where masked."""
        tokens_BLK, targets_BLK = chunks(batch, 1)
        variables = {"params": params}
        # The last token is read too, as in `CalmTask.hidden`.
        inputs = tokens_BLK, documents_of(batch, 1)
        h_BLD, _ = call(self.model, variables, "hidden", *inputs)
        return call(self.model, variables, "loss", h_BLD[:, :-1], targets_BLK[:, 1:, 0])

    def loss(
        self, params: Params, frozen: Params, batch: Batch, key_B: Array, step: Array
    ) -> Metrics:
        """The cross-entropy per token in nats."""
        _, targets_BLK = chunks(batch, 1)
        return {"loss": total(self._loss(params, batch), counted_chunks(0, targets_BLK))}

    def evaluate(self, params: Params, frozen: Params, batch: Batch, key_B: Array) -> Any:
        """Sums of the loss and of BrierLM; known probabilities make some of its terms exact (see `brier_terms`)."""
        tokens_BLK, targets_BLK = chunks(batch, 1)
        key_BLJ = predicted_keys(key_B, targets_BLK.shape[1], brier.ORDERS)
        counted_BL = counted_chunks(self.protocol.first_token, targets_BLK)
        return {
            "loss": total(self._loss(params, batch), counted_BL),
            "brier": score(
                self.bind(params, frozen),
                self.model.config,
                self.protocol,
                self.model.vocab_size,
                self.pad_id,
                tokens_BLK,
                targets_BLK,
                key_BLJ,
                documents_of(batch, 1),
            ),
        }

    def report(self, sums: Any) -> dict[str, float]:
        """See `Task.report`."""
        return report(sums)
