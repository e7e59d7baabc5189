"""What the training loop and evaluation need of each kind of model: the two tasks of the recipe."""

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import Array

from calm_jax import brier
from calm_jax.data.pipeline import MASKED
from calm_jax.losses import Posterior, cross_entropy
from calm_jax.models.autoencoder import Autoencoder
from calm_jax.models.calm import CALM
from calm_jax.models.transformer import KVCache
from calm_jax.sampling import ChunkModel, at_once, decode_in_blocks

Params = dict[str, Any]
Batch = dict[str, Array]
# A metric is a (sum, weight) pair, divided once on the host: right under masks, microbatches and hosts.
Metrics = dict[str, tuple[Array, Array]]


class Task(Protocol):
    """A model and its objective, as the loop sees it.

    A batch is {"tokens", "targets"}, int32 [B, T] each, where targets are the tokens, or MASKED.
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


def counted_for_brier(targets_BLK: Any, pad_id: int) -> Any:
    """Which chunk counts for which n, bool [B, L, 4]: those whose first n tokens are all text."""
    is_text_BLK = (targets_BLK != MASKED) & (targets_BLK != pad_id)
    return is_text_BLK[..., : brier.ORDERS].cumprod(-1).astype(bool)


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


@dataclasses.dataclass(frozen=True)
class CalmTask:
    """Stage 2: the language model over a frozen autoencoder's latents.

    Its frozen parameters are `{"params": ...}` of the autoencoder.
    """

    model: CALM
    autoencoder: Autoencoder
    num_eval_samples: int

    @property
    def chunk_size(self) -> int:
        return self.autoencoder.chunk_size

    def init(self, key: Array) -> Params:
        tokens_BLK = jnp.zeros((1, 1, self.chunk_size), jnp.int32)
        return self.model.init(key, tokens_BLK, jax.random.split(key, 1))["params"]

    def bind(self, params: Params, frozen: Params) -> ChunkModel:
        """The model as samplers see it."""
        variables = {"params": params}
        config = self.model.config

        def latents(h_PD: Array, num_draws: int, key_P: Array) -> Array:
            return self.model.apply(variables, h_PD, num_draws, key_P, method="sample")

        def decode(latent_PNZ: Array) -> Array:
            def logits_of(latent_RZ: Array) -> Array:
                return self.autoencoder.apply(frozen, latent_RZ, method="decode")

            size = self.chunk_size * self.autoencoder.vocab_size
            return decode_in_blocks(logits_of, latent_PNZ, size)

        def advance(
            tokens_BLK: Array, cache: KVCache | None = None
        ) -> tuple[Array, KVCache | None]:
            return self.model.apply(variables, tokens_BLK, cache, method="hidden")

        def empty_cache(batch: int, size: int) -> KVCache:
            return KVCache.empty(config, batch, size, self.model.dtype)

        return ChunkModel(latents, decode, advance, empty_cache)

    def _hidden(self, params: Params, tokens_BLK: Array) -> Array:
        """The hidden state that predicts each chunk but the first, [B, L-1, D]."""
        h_BLD, _ = self.model.apply({"params": params}, tokens_BLK[:, :-1], method="hidden")
        return h_BLD

    def posterior(self, frozen: Params, tokens_PK: Array) -> Posterior:
        """The frozen autoencoder's posterior of whole chunks, without dropout."""
        return jax.lax.stop_gradient(self.autoencoder.apply(frozen, tokens_PK, method="encode"))

    def loss(self, params: Params, frozen: Params, batch: Batch, key_B: Array) -> Metrics:
        tokens_BLK, targets_BLK = _chunks(batch, self.chunk_size)
        h_PD = _flat(self._hidden(params, tokens_BLK))
        posterior = self.posterior(frozen, _flat(tokens_BLK[:, 1:]))
        key_P = _flat(split_keys(key_B, tokens_BLK.shape[1] - 1))
        loss_P = self.model.apply({"params": params}, h_PD, posterior, key_P, method="loss")
        return {"loss": self.total(loss_P, targets_BLK)}

    @staticmethod
    def total(x_P: Array, targets_BLK: Array) -> tuple[Array, Array]:
        """Sum and count over predicted chunks all of whose labels are valid."""
        return total(x_P, _flat((targets_BLK[:, 1:] != MASKED).all(-1)))

    def evaluate(self, params: Params, frozen: Params, batch: Batch, key_B: Array) -> Any:
        """Sums of the loss and of BrierLM, whose positions leave out pads."""
        tokens_BLK, targets_BLK = _chunks(batch, self.chunk_size)
        model = self.bind(params, frozen)
        h_BLD = self._hidden(params, tokens_BLK)
        targets_BLK = targets_BLK[:, 1:]
        key_BL = split_keys(key_B, h_BLD.shape[1])

        def of_position(xs):
            h_BD, tokens_BK, targets_BK, key_B = xs
            key_B, loss_key_B = jax.vmap(jax.random.split, out_axes=1)(key_B)
            posterior = self.posterior(frozen, tokens_BK)
            loss_B = self.model.apply(
                {"params": params}, h_BD, posterior, loss_key_B, method="loss"
            )
            sample_BSK = model.draw(h_BD, self.num_eval_samples, key_B)
            return loss_B, brier.brier_terms(sample_BSK, targets_BK)

        over_L = (h_BLD, tokens_BLK[:, 1:], targets_BLK, key_BL)
        # A few positions at a time, so that the logits of a whole block are never held.
        logits = self.num_eval_samples * self.chunk_size * self.autoencoder.vocab_size
        loss_LB, terms_LB4 = jax.lax.map(
            of_position,
            jax.tree.map(lambda x: x.swapaxes(0, 1), over_L),
            batch_size=at_once(len(h_BLD) * logits),
        )
        counted_BL = (targets_BLK != MASKED).all(-1)
        counted_BL4 = counted_for_brier(targets_BLK, self.model.pad_id)
        return {
            "loss": total(loss_LB.T, counted_BL),
            "brier": brier.block_sums(terms_LB4.swapaxes(0, 1), counted_BL4),
        }

    def report(self, sums: Any) -> dict[str, float]:
        score = brier.score(brier.BlockSums(*sums["brier"]))
        return {"loss": ratio(sums["loss"])} | brier.as_values(score)
