"""What the training loop and evaluation need of each kind of model: autoencoder, CALM, autoregressive baseline."""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from calm_jax import brier
from calm_jax.data.blocks import MASKED
from calm_jax.losses import Posterior, cross_entropy
from calm_jax.models.autoencoder import Autoencoder
from calm_jax.models.autoregressive import AutoregressiveLM
from calm_jax.models.calm import CALM
from calm_jax.models.transformer import Fork, KVCache, Memory, Packed, TransformerConfig
from calm_jax.placement import rows_per_device
from calm_jax.sampling import ChunkModel, at_once

Params = dict[str, Any]
Batch = dict[str, Array]
# A metric is a (sum, weight) pair, divided once on the host: right under masks, microbatches and hosts.
Metrics = dict[str, tuple[Array, Array]]


class Task(Protocol):
    """A model and its objective, as the loop sees it.

    A batch is {"tokens", "targets"}, int32 [B, T] each, where targets are the tokens, or MASKED; and with
    `data.isolate_documents` {"segments"}, int32 [B, T]: equal numbers are one document's tokens.
    Every row has its own random key, so that rows may be split in any way.
    """

    def init(self, key: Array) -> Params:
        """Fresh float32 parameters."""
        ...

    def loss(self, params: Params, frozen: Params, batch: Batch, key_B: Array) -> Metrics:
        """Training metrics, with the one to minimise under "loss"."""
        ...

    def evaluate(self, params: Params, frozen: Params, batch: Batch, key_B: Array) -> Any:
        """A tree of sums over the batch, to be added over a split."""
        ...

    def report(self, sums: Any) -> dict[str, float]:
        """The named values of a split's sums, on the host."""
        ...


def split_keys(key_B: Array, num: int) -> Array:
    """`num` keys from each row's key, [B, num]."""
    return jax.vmap(lambda key: jax.random.split(key, num))(key_B)


def _flat(x: Array) -> Array:
    """The first two axes as one."""
    return x.reshape(-1, *x.shape[2:])


def _chunks(batch: Batch, chunk_size: int) -> tuple[Array, Array]:
    """tokens and targets as chunks, [B, L, K] each."""
    shape = (len(batch["tokens"]), -1, chunk_size)
    return batch["tokens"].reshape(shape), batch["targets"].reshape(shape)


def documents_of(batch: Batch, chunk_size: int) -> Packed | None:
    """Which chunks but a block's last see each other; None if all do."""
    if "segments" not in batch:
        return None
    # Documents are whole chunks.
    return Packed(batch["segments"][:, ::chunk_size][:, :-1])


def total(x: Array, counted: Array) -> tuple[Array, Array]:
    """The metric of `x` over what is counted."""
    return jnp.where(counted, x, 0).sum(), counted.sum(dtype=jnp.float32)


def ratio(pair: tuple[Any, Any]) -> float:
    """A metric's value; NaN for no weight."""
    total, weight = pair
    return float(total) / float(weight) if float(weight) else float("nan")


@dataclasses.dataclass(frozen=True)
class AutoencoderTask:
    """Stage 1. Chunks are independent; a block's row is only a bundle of them."""

    model: Autoencoder
    pad_id: int

    def init(self, key: Array) -> Params:
        tokens_PK = jnp.zeros((1, self.model.chunk_size), jnp.int32)
        return self.model.init(key, tokens_PK)["params"]

    def loss(self, params: Params, frozen: Params, batch: Batch, key_B: Array) -> Metrics:
        tokens_BLK, targets_BLK = _chunks(batch, self.model.chunk_size)
        key_BL = split_keys(key_B, tokens_BLK.shape[1])
        noise = self.model.draw_noise(_flat(key_BL))
        ce_PK, kl_P = self.model.apply({"params": params}, _flat(tokens_BLK), noise, method="loss")
        counted_P = _flat((targets_BLK != MASKED).all(-1))
        loss_P = ce_PK.sum(-1) + self.model.config.kl_weight * kl_P
        return {
            "loss": total(loss_P, counted_P),
            "cross_entropy": total(ce_PK.mean(-1), counted_P),
            "kl": total(kl_P, counted_P),
        }

    def evaluate(self, params: Params, frozen: Params, batch: Batch, key_B: Array) -> Metrics:
        """Without dropout. Accuracies leave out pads; the loss does not."""
        tokens_BLK, targets_BLK = _chunks(batch, self.model.chunk_size)
        num_chunks = tokens_BLK.shape[1]

        def of_position(tokens_BK: Array, targets_BK: Array, eps_BZ: Array) -> Metrics:
            posterior = self.model.apply({"params": params}, tokens_BK, method="encode")
            is_target_BK = targets_BK != MASKED
            is_text_BK = is_target_BK & (targets_BK != self.pad_id)
            counted_B = is_text_BK.any(-1)
            metrics = {"posterior_std": (posterior.std.mean(-1) @ counted_B, counted_B.sum())}
            for source, latent_BZ in (
                ("from_sample", posterior.mean + posterior.std * eps_BZ),
                ("from_mean", posterior.mean),
            ):
                logits_BKV = self.model.apply({"params": params}, latent_BZ, method="decode")
                right_BK = logits_BKV.argmax(-1) == targets_BK
                metrics |= {
                    f"token_accuracy_{source}": ((right_BK & is_text_BK).sum(), is_text_BK.sum()),
                    f"chunk_accuracy_{source}": (
                        ((right_BK | ~is_text_BK).all(-1) & counted_B).sum(),
                        counted_B.sum(),
                    ),
                }
                if source == "from_sample":
                    ce_BK = cross_entropy(logits_BKV, targets_BK)
                    metrics["loss"] = (ce_BK.sum(), is_target_BK.sum())
            return metrics

        shape = (num_chunks, self.model.config.latent_size)
        eps_BLZ = jax.vmap(lambda key: jax.random.normal(key, shape))(key_B)
        over_L = [x.swapaxes(0, 1) for x in (tokens_BLK, targets_BLK, eps_BLZ)]
        # A few positions at a time, so that the logits of a whole block are never held.
        size = len(tokens_BLK) * self.model.chunk_size * self.model.vocab_size
        sums = jax.lax.map(lambda xs: of_position(*xs), tuple(over_L), batch_size=at_once(size))
        return jax.tree.map(lambda x_L: x_L.sum(0, dtype=jnp.float32), sums)

    def report(self, sums: Metrics) -> dict[str, float]:
        return {name: ratio(pair) for name, pair in sums.items()}


def _chunk_model(
    model: CALM | AutoregressiveLM,
    params: Params,
    latents: Callable[[Array, int, Array, float], Array],
    unfold: Callable[[Array], Array],
    likeliest: Callable[[Array], Array],
    log_probs: Callable[[Array], Array] | None,
) -> ChunkModel:
    """What the samplers see of a language model; reading works the same way in all of them."""

    def advance(tokens_BLK: Array, memory: Memory | None) -> tuple[Array, Memory | None]:
        return model.apply({"params": params}, tokens_BLK, memory, method="hidden")

    def empty_cache(batch: int, size: int, window: int | Array) -> KVCache:
        return KVCache.empty(model.config, batch, size, window, model.dtype)

    return ChunkModel(latents, unfold, likeliest, advance, empty_cache, Fork.at, log_probs)


def _score(
    model: ChunkModel,
    config: TransformerConfig,
    protocol: brier.Protocol,
    vocab_size: int,
    pad_id: int,
    tokens_BLK: Array,
    targets_BLK: Array,
    key_BLJ: Array,
    documents: Packed | None,
) -> brier.BlockSums:
    """BrierLM's sums over a batch of blocks; n-grams with pads in them do not count."""
    batch, num_chunks, chunk_size = tokens_BLK.shape
    rows = rows_per_device(batch)
    logits = rows * protocol.num_samples * chunk_size * vocab_size
    # Of one start: attention weights, and the keys and values of its own chunks.
    attention = rows * config.num_heads * num_chunks
    own = 2 * rows * config.num_layers * brier.ORDERS * config.num_kv_heads * config.head_size
    terms_BP4 = brier.brier_terms(
        model,
        tokens_BLK,
        key_BLJ,
        protocol,
        chunks_at_once=at_once(logits),
        paths_at_once=at_once(max(logits, attention, own)),
        documents=documents,
    )
    starts_P = protocol.starts(num_chunks * chunk_size, chunk_size)
    counted_BP4 = brier.counted(targets_BLK.reshape(batch, -1), starts_P, pad_id)
    return brier.block_sums(terms_BP4, counted_BP4)


def _predicted_keys(key_B: Array, num_chunks: int, num_keys: int) -> Array:
    """Keys of each chunk but a block's first, [B, L-1, num_keys]."""
    return jax.vmap(lambda key: split_keys(key, num_keys))(split_keys(key_B, num_chunks - 1))


def _report(sums: Any) -> dict[str, float]:
    score = brier.score(brier.BlockSums(*sums["brier"]))
    return {"loss": ratio(sums["loss"])} | brier.as_values(score)


def counted_chunks(first_token: int, targets_BLK: Array) -> Array:
    """Which predicted chunks the loss runs over, bool [B, L-1]: valid ones, from `first_token` on."""
    num_chunks, chunk_size = targets_BLK.shape[1:]
    late_L = np.arange(1, num_chunks) * chunk_size >= first_token
    return (targets_BLK[:, 1:] != MASKED).all(-1) & late_L


@dataclasses.dataclass(frozen=True)
class CalmTask:
    """Stage 2: the language model over a frozen autoencoder's latents.

    Its frozen parameters are `{"params": ...}` of the autoencoder.
    """

    model: CALM
    autoencoder: Autoencoder
    protocol: brier.Protocol

    @property
    def chunk_size(self) -> int:
        return self.autoencoder.chunk_size

    def init(self, key: Array) -> Params:
        tokens_BLK = jnp.zeros((1, 1, self.chunk_size), jnp.int32)
        return self.model.init(key, tokens_BLK, jax.random.split(key, 1))["params"]

    def bind(self, params: Params, frozen: Params) -> ChunkModel:
        """The model as samplers see it."""

        def latents(h_PD: Array, num_draws: int, key_P: Array, noise_scale: float) -> Array:
            return self.model.apply(
                {"params": params}, h_PD, num_draws, key_P, noise_scale, method="sample"
            )

        def unfold(latent_RZ: Array) -> Array:
            return self.autoencoder.apply(frozen, latent_RZ, method="unfold")

        def likeliest(x_RD: Array) -> Array:
            block = at_once(len(x_RD))
            return self.autoencoder.apply(frozen, x_RD, block, method="likeliest")

        return _chunk_model(self.model, params, latents, unfold, likeliest, log_probs=None)

    def posterior(self, frozen: Params, tokens_PK: Array) -> Posterior:
        """The frozen autoencoder's posterior of whole chunks, without dropout."""
        return jax.lax.stop_gradient(self.autoencoder.apply(frozen, tokens_PK, method="encode"))

    def hidden(self, params: Params, tokens_BLK: Array, documents: Packed | None = None) -> Array:
        """The hidden state that predicts each chunk but the first, [B, L-1, D]."""
        h_BLD, _ = self.model.apply(
            {"params": params}, tokens_BLK[:, :-1], documents, method="hidden"
        )
        return h_BLD

    def loss(self, params: Params, frozen: Params, batch: Batch, key_B: Array) -> Metrics:
        tokens_BLK, targets_BLK = _chunks(batch, self.chunk_size)
        h_PD = _flat(self.hidden(params, tokens_BLK, documents_of(batch, self.chunk_size)))
        posterior = self.posterior(frozen, _flat(tokens_BLK[:, 1:]))
        key_P = _flat(split_keys(key_B, tokens_BLK.shape[1] - 1))
        loss_P = self.model.apply({"params": params}, h_PD, posterior, key_P, method="loss")
        return {"loss": total(loss_P, _flat(counted_chunks(0, targets_BLK)))}

    def evaluate(self, params: Params, frozen: Params, batch: Batch, key_B: Array) -> Any:
        """Sums of the loss and of BrierLM."""
        tokens_BLK, targets_BLK = _chunks(batch, self.chunk_size)
        rows, num_chunks, _ = tokens_BLK.shape
        num_draws = brier.chunks_of(self.chunk_size)
        key_BLJ = _predicted_keys(key_B, num_chunks, 1 + num_draws)

        def loss_of(xs: tuple[Array, Array, Array]) -> Array:
            h_BD, tokens_BK, key_B = xs
            posterior = self.posterior(frozen, tokens_BK)
            return self.model.apply({"params": params}, h_BD, posterior, key_B, method="loss")

        documents = documents_of(batch, self.chunk_size)
        h_BLD = self.hidden(params, tokens_BLK, documents)
        over_L = (h_BLD, tokens_BLK[:, 1:], key_BLJ[..., num_draws])
        width = self.model.config.hidden_size
        loss_LB = jax.lax.map(
            loss_of,
            jax.tree.map(lambda x: x.swapaxes(0, 1), over_L),
            batch_size=at_once(rows * width * self.model.head.config.num_samples),
        )
        return {
            "loss": total(loss_LB.T, counted_chunks(self.protocol.first_token, targets_BLK)),
            "brier": _score(
                self.bind(params, frozen),
                self.model.config,
                self.protocol,
                self.autoencoder.vocab_size,
                self.model.pad_id,
                tokens_BLK,
                targets_BLK,
                key_BLJ[..., :num_draws],
                documents,
            ),
        }

    def report(self, sums: Any) -> dict[str, float]:
        return _report(sums)


@dataclasses.dataclass(frozen=True)
class ArTask:
    """The autoregressive baseline: the same transformer over tokens, with a softmax. Nothing is frozen."""

    model: AutoregressiveLM
    pad_id: int
    protocol: brier.Protocol

    @property
    def chunk_size(self) -> int:
        return 1

    def init(self, key: Array) -> Params:
        return self.model.init(key, jnp.zeros((1, 1, 1), jnp.int32))["params"]

    def bind(self, params: Params, frozen: Params) -> ChunkModel:
        """The model as samplers see it; its latents are the tokens themselves, and have no noise to scale."""
        variables = {"params": params}

        def latents(h_PD: Array, num_draws: int, key_P: Array, noise_scale: float) -> Array:
            tokens_PN = self.model.apply(variables, h_PD, num_draws, key_P, method="sample")
            return tokens_PN[..., None]

        def log_probs(h_PD: Array) -> Array:
            return self.model.apply(variables, h_PD, method="log_probs")

        def unfold(token_R1: Array) -> Array:
            return token_R1[:, None]

        def likeliest(token_R1: Array) -> Array:
            return token_R1[:, 0]

        return _chunk_model(self.model, params, latents, unfold, likeliest, log_probs)

    def _loss(self, params: Params, batch: Batch) -> Array:
        """Cross-entropy of each token but the first, [B, T-1]; 0 for masked ones."""
        tokens_BLK, targets_BLK = _chunks(batch, 1)
        h_BLD, _ = self.model.apply(
            {"params": params}, tokens_BLK[:, :-1], documents_of(batch, 1), method="hidden"
        )
        block = at_once(rows_per_device(len(h_BLD)) * self.model.vocab_size)
        targets_BL = targets_BLK[:, 1:, 0]
        return self.model.apply({"params": params}, h_BLD, targets_BL, block, method="loss")

    def loss(self, params: Params, frozen: Params, batch: Batch, key_B: Array) -> Metrics:
        _, targets_BLK = _chunks(batch, 1)
        return {"loss": total(self._loss(params, batch), counted_chunks(0, targets_BLK))}

    def evaluate(self, params: Params, frozen: Params, batch: Batch, key_B: Array) -> Any:
        """Sums of the loss and of BrierLM, by probabilities where they make it exact."""
        tokens_BLK, targets_BLK = _chunks(batch, 1)
        key_BLJ = _predicted_keys(key_B, targets_BLK.shape[1], brier.ORDERS)
        counted_BL = counted_chunks(self.protocol.first_token, targets_BLK)
        return {
            "loss": total(self._loss(params, batch), counted_BL),
            "brier": _score(
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
        return _report(sums)


LmTask = CalmTask | ArTask
