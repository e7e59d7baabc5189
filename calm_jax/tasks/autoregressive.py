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

    @property
    def metric_names(self) -> tuple[str, ...]:
        """See `Task.metric_names`."""
        return ("loss",)

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

    def _loss(self, params: Params, h_BLD: Array, targets_BLK: Array) -> Array:
        """The cross-entropy of each token but the first in nats, [B, T-1], from the hidden states before them; 0 where masked."""
        return call(self.model, {"params": params}, "loss", h_BLD, targets_BLK[:, 1:, 0])

    def loss(self, params: Params, frozen: Params, batch: Batch, key_B: Array) -> Metrics:
        """The cross-entropy per token in nats."""
        tokens_BLK, targets_BLK = chunks(batch, 1)
        # The last token is read too, as in `CalmTask.hidden`.
        inputs = tokens_BLK, documents_of(batch, 1)
        h_BLD, _ = call(self.model, {"params": params}, "hidden", *inputs)
        loss_BL = self._loss(params, h_BLD[:, :-1], targets_BLK)
        return {"loss": total(loss_BL, counted_chunks(0, targets_BLK))}

    def evaluate(self, params: Params, frozen: Params, batch: Batch, key_B: Array) -> Any:
        """Sums of the loss and of BrierLM; known probabilities make some of its terms exact (see `brier_terms`)."""
        tokens_BLK, targets_BLK = chunks(batch, 1)
        key_BLJ = predicted_keys(key_B, targets_BLK.shape[1], brier.ORDERS)
        model = self.bind(params, frozen)
        reading = brier.read(model, tokens_BLK, documents_of(batch, 1))
        loss_BL = self._loss(params, reading.h_BLD, targets_BLK)
        return {
            "loss": total(loss_BL, counted_chunks(self.protocol.first_token, targets_BLK)),
            "brier": score(
                model,
                self.model.config,
                self.protocol,
                self.model.vocab_size,
                self.pad_id,
                tokens_BLK,
                targets_BLK,
                reading,
                key_BLJ,
            ),
        }

    def report(self, sums: Any) -> dict[str, float]:
        """See `Task.report`."""
        return report(sums)
