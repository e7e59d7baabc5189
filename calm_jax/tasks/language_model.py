"""Shared by the tasks of both language models: the interface to samplers, and the score by BrierLM."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax import Array

from calm_jax import brier
from calm_jax.data.packing import MASKED
from calm_jax.models.autoregressive import AutoregressiveLM
from calm_jax.models.calm import CALM
from calm_jax.models.kv_cache import Fork, KVCache, Memory, SegmentIds
from calm_jax.models.stack import Stacks
from calm_jax.models.transformer import TransformerConfig
from calm_jax.parallel.constraints import rows_per_device
from calm_jax.sampling.chunk_model import ChunkModel, at_once
from calm_jax.tasks.base import Params, call, ratio, split_keys


def stacks_of(model: CALM | AutoregressiveLM) -> Stacks:
    """The paths of the stacks of equal layers in a model's parameters: the backbone's, and those that its head names.

    See `calm_jax.models.stack.for_generation`.
    """
    # A head need not name any: it then keeps its own layout.
    of_head = getattr(model.head, "stacks", ())
    return ("backbone", "layers"), *(("head", *path) for path in of_head)


def documents_of(batch: Mapping[str, Any], chunk_size: int) -> SegmentIds | None:
    """The documents of all chunks of each block, [B, L], to isolate them; None if they are not isolated."""
    if "segments" not in batch:
        return None
    # Isolated documents consist of whole chunks, so that a chunk's first token tells its document.
    return SegmentIds(batch["segments"][:, ::chunk_size])


def chunk_model(
    model: CALM | AutoregressiveLM,
    params: Params,
    latents: Callable[[Array, int, Array, float], Array],
    unfold: Callable[[Array], Array],
    argmax_tokens: Callable[[Array, Array | None], Array],
    log_probs: Callable[[Array], Array] | None,
    prior: Callable[[Array], Array] | None,
) -> ChunkModel:
    """A language model's interface to samplers; `advance`, `empty_cache` and `fork` are the same for both language models."""

    def advance(tokens_BLK: Array, memory: Memory | None) -> tuple[Array, Memory | None]:
        return call(model, {"params": params}, "hidden", tokens_BLK, memory)

    def empty_cache(batch: int, size: int, window: int | Array) -> KVCache:
        body = model.config
        return KVCache.empty(
            body.num_layers, batch, size, body.num_kv_heads, body.head_size, window, model.dtype
        )

    return ChunkModel(
        latents, unfold, argmax_tokens, advance, empty_cache, Fork.at, log_probs, prior
    )


def score(
    model: ChunkModel,
    config: TransformerConfig,
    protocol: brier.Protocol,
    vocab_size: int,
    pad_id: int,
    tokens_BLK: Array,
    targets_BLK: Array,
    reading: brier.Reading,
    key_BLJ: Array,
) -> brier.BlockSums:
    """BrierLM's sums over a batch of blocks; n-grams with a pad are not scored.

    Args:
        model: the model's `ChunkModel` interface.
        config: the backbone's, whose sizes decide how much is computed at once.
        protocol: which n-grams are scored, from how many samples.
        vocab_size: V.
        pad_id: the pad token.
        tokens_BLK: whole blocks.
        targets_BLK: the tokens, or MASKED.
        reading: what the model read of the blocks (`brier.read`).
        key_BLJ: keys of each chunk but a block's first (see `brier.brier_terms`).
    """
    batch, num_chunks, chunk_size = tokens_BLK.shape
    rows = rows_per_device(batch)
    logits = rows * protocol.num_samples * chunk_size * vocab_size
    # Elements per start: of the attention weights, and of the keys and values of the start's own chunks.
    attention = rows * config.num_heads * num_chunks
    own = 2 * rows * config.num_layers * brier.ORDERS * config.num_kv_heads * config.head_size
    starts_P = protocol.starts(num_chunks * chunk_size, chunk_size)
    counted_BP4 = brier.counted(targets_BLK.reshape(batch, -1), starts_P, pad_id)
    terms_BP4 = brier.brier_terms(
        model,
        tokens_BLK,
        reading,
        key_BLJ,
        protocol,
        chunks_at_once=at_once(logits),
        paths_at_once=at_once(max(logits, attention, own)),
        counted_BP4=counted_BP4,
    )
    return brier.block_sums(terms_BP4, counted_BP4)


def predicted_keys(key_B: Array, num_chunks: int, num_keys: int) -> Array:
    """Random keys for each predicted chunk (all but the first of a block), [B, L-1, num_keys]."""
    return jax.vmap(lambda key: split_keys(key, num_keys))(split_keys(key_B, num_chunks - 1))


def report(sums: Any) -> dict[str, float]:
    """The loss and the values of BrierLM (see `brier.as_values`)."""
    score = brier.score(sums["brier"])
    return {"loss": ratio(sums["loss"])} | brier.as_values(score)


def counted_chunks(first_token: int, targets_BLK: Array) -> Array:
    """Which predicted chunks count in the loss, bool [B, L-1]: those without a masked token, from `first_token` on."""
    num_chunks, chunk_size = targets_BLK.shape[1:]
    late_L = np.arange(1, num_chunks) * chunk_size >= first_token
    return (targets_BLK[:, 1:] != MASKED).all(-1) & late_L
