"""Stage 1: the autoencoder's training loss and its reconstruction accuracy (paper, section 2).

R: positions of all chunks, flattened.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from calm_jax.data.packing import MASKED
from calm_jax.losses import cross_entropy
from calm_jax.models import vocabulary
from calm_jax.models.autoencoder import Autoencoder
from calm_jax.models.stack import Stacks
from calm_jax.parallel.constraints import rows_per_device
from calm_jax.parallel.loops import map_positions
from calm_jax.sampling.chunk_model import at_once
from calm_jax.tasks.base import (
    Batch,
    Metrics,
    Params,
    call,
    chunks,
    flatten,
    ratio,
    split_keys,
    total,
)
from calm_jax.tasks.latents import COLLAPSED, Moments


def with_random_chunks(
    tokens_LK: Array, key: Array, share: float, vocab_size: int, pad_id: int
) -> Array:
    """Replaces a share of a row's chunks by random ones of three kinds, equally often: tokens of the row in random order,
    uniformly random tokens, and uniformly random tokens with pads from a random place on."""
    num_chunks, size = tokens_LK.shape
    kind_key, order_key, token_key, place_key = jax.random.split(key, 4)
    shuffled_LK = jax.random.permutation(order_key, tokens_LK.reshape(-1)).reshape(tokens_LK.shape)
    uniform_LK = jax.random.randint(token_key, tokens_LK.shape, 0, vocab_size)
    end_L1 = jax.random.randint(place_key, (num_chunks, 1), 1, size + 1)
    cut_LK = jnp.where(jnp.arange(size) < end_L1, uniform_LK, pad_id)
    # 0, 1 and 2 are the three kinds; chunks with a larger number stay as they are.
    kind_L1 = jnp.floor(3 / share * jax.random.uniform(kind_key, (num_chunks, 1)))
    kinds = [kind_L1 == kind for kind in range(3)]
    return jnp.select(kinds, [shuffled_LK, uniform_LK, cut_LK], tokens_LK)


@dataclasses.dataclass(frozen=True)
class AutoencoderTask:
    """Stage 1: the autoencoder. Every chunk is a sample of its own; a row of a batch only groups them.

    Attributes:
        model: the autoencoder.
        pad_id: the token that fills chunks up.
        random_chunks: the share of a training batch's chunks that random ones replace (`autoencoder.random_chunks`).
    """

    model: Autoencoder
    pad_id: int
    random_chunks: float

    @property
    def stacks(self) -> Stacks:
        """See `Task.stacks`."""
        return self.model.stacks

    @property
    def metric_names(self) -> tuple[str, ...]:
        """See `Task.metric_names`."""
        return "loss", "cross_entropy", "kl"

    def init(self, key: Array) -> Params:
        """See `Task.init`."""
        tokens_PK = jnp.zeros((1, self.model.chunk_size), jnp.int32)
        return self.model.init(key, tokens_PK)["params"]

    def loss(self, params: Params, frozen: Params, batch: Batch, key_B: Array) -> Metrics:
        """Metrics per chunk, of chunks without a masked token: `loss`, `cross_entropy` (nats per token), `kl` (nats)."""
        tokens_BLK, targets_BLK = chunks(batch, self.model.chunk_size)
        if self.random_chunks:
            key_B2 = split_keys(key_B, 2)
            random_key_B, key_B = key_B2[:, 0], key_B2[:, 1]
            tokens_BLK = jax.vmap(
                lambda tokens_LK, key: with_random_chunks(
                    tokens_LK, key, self.random_chunks, self.model.vocab_size, self.pad_id
                )
            )(tokens_BLK, random_key_B)
        key_BL = split_keys(key_B, tokens_BLK.shape[1])
        noise = self.model.draw_noise(flatten(key_BL))
        ce_PK, kl_P = call(self.model, {"params": params}, "loss", flatten(tokens_BLK), noise)
        counted_P = flatten((targets_BLK != MASKED).all(-1))
        loss_P = ce_PK.sum(-1) + self.model.config.kl_weight * kl_P
        return {
            "loss": total(loss_P, counted_P),
            "cross_entropy": total(ce_PK.mean(-1), counted_P),
            "kl": total(kl_P, counted_P),
        }

    def evaluate(self, params: Params, frozen: Params, batch: Batch, key_B: Array) -> Any:
        """Sums of the metrics without dropout: cross-entropy, accuracies of the argmax tokens, and statistics of the posterior.

        Accuracies are measured for a sample of the posterior and for its mean, the cross-entropy (`loss`) for the
        sample. Accuracies leave out pads; the cross-entropy counts them.
        """
        tokens_BLK, targets_BLK = chunks(batch, self.model.chunk_size)
        num_chunks = tokens_BLK.shape[1]

        def of_position(tokens_BK: Array, targets_BK: Array, eps_BZ: Array) -> Any:
            posterior = call(self.model, {"params": params}, "encode", tokens_BK)
            is_target_BK = targets_BK != MASKED
            is_text_BK = is_target_BK & (targets_BK != self.pad_id)
            counted_B = is_text_BK.any(-1)
            metrics: dict[str, Any] = {
                "posterior_std": total(posterior.std.mean(-1), counted_B),
                "posterior_mean": Moments.of(posterior.mean[:, None], counted_B),
            }
            for source, latent_BZ in (
                ("from_sample", posterior.mean + posterior.std * eps_BZ),
                ("from_mean", posterior.mean),
            ):
                logits_BKV = call(self.model, {"params": params}, "decode", latent_BZ)
                best_R = vocabulary.argmax(logits_BKV.reshape(-1, logits_BKV.shape[-1]))
                right_BK = best_R.reshape(targets_BK.shape) == targets_BK
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
        # A few chunks of every row at a time, so that the logits of a whole block are never stored.
        rows = rows_per_device(len(tokens_BLK))
        size = rows * self.model.chunk_size * self.model.vocab_size
        sums = map_positions(lambda xs: of_position(*xs), at_once(size), tuple(over_L))
        return jax.tree.map(lambda x_L: x_L.sum(0, dtype=jnp.float32), sums)

    def report(self, sums: Any) -> dict[str, float]:
        """See `Task.report`."""
        pairs = dict(sums)
        variance_Z = pairs.pop("posterior_mean").variance()
        values = {name: ratio(pair) for name, pair in pairs.items()}
        return values | {"collapsed_dimensions": float((variance_Z < COLLAPSED).sum())}
