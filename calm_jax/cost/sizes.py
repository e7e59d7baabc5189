"""Parameters of a recipe's models, by part, and the bytes of training state and traffic that follow from them.

Parameters are counted on the shapes of the real models, without allocating them; a count depends on the config and the
vocabulary's size alone.
"""

import functools
from collections.abc import Mapping

import flax.traverse_util
import jax
import jax.numpy as jnp

from calm_jax.build import make_autoencoder_task, make_lm_task
from calm_jax.config import Config
from calm_jax.data.tokenizers import Vocabulary
from calm_jax.tasks import Task

# Number of parameters by part of a model.
Parameters = Mapping[str, int]

_BYTES_OF_FLOAT32 = 4

# The part that a parameter belongs to, by the beginning of its path; the first match wins.
_AUTOENCODER_PARTS = {
    "embed/": "token embeddings",
    "encoder_": "encoder",
    "squeeze/": "encoder",
    "to_posterior/": "encoder",
    "": "decoder",
}
_CALM_PARTS = {
    "embed/tokens/": "token embeddings",
    "backbone/": "backbone",
    "embed/": "chunk embedding",
    "head/": "head",
    "token_predictor/": "token predictor",
}
_AUTOREGRESSIVE_PARTS = {
    "embed/": "token embeddings",
    "backbone/": "backbone",
    "head/": "vocabulary",
}


def _count(task: Task, parts: dict[str, str]) -> Parameters:
    shapes = jax.eval_shape(task.init, jax.random.key(0))
    counts = dict.fromkeys(parts.values(), 0)
    for path, leaf in flax.traverse_util.flatten_dict(shapes, sep="/").items():
        counts[next(part for start, part in parts.items() if path.startswith(start))] += leaf.size
    return counts


def _vocabulary(vocab_size: int) -> Vocabulary:
    # The number of parameters does not depend on the id of the pad token.
    return Vocabulary(vocab_size, vocab_size - 1)


@functools.lru_cache
def language_model(config: Config, vocab_size: int) -> Parameters:
    """The parameters that stage 2 trains.

    Parts of CALM: token embeddings, backbone, chunk embedding, head, token predictor. Parts of the autoregressive baseline:
    token embeddings, backbone, vocabulary (the softmax head).
    """
    task = make_lm_task(config, _vocabulary(vocab_size))
    return _count(task, _CALM_PARTS if config.has_autoencoder else _AUTOREGRESSIVE_PARTS)


@functools.lru_cache
def autoencoder(config: Config, vocab_size: int) -> Parameters:
    """The parameters that stage 1 trains: token embeddings (which also are the weights of the logits), encoder, decoder."""
    task = make_autoencoder_task(config, _vocabulary(vocab_size))
    return _count(task, _AUTOENCODER_PARTS)


def trained(config: Config, stage: str, vocab_size: int) -> Parameters:
    """The parameters that `stage` trains, "autoencoder" or "lm"."""
    count = autoencoder if stage == "autoencoder" else language_model
    return count(config, vocab_size)


def frozen(config: Config, stage: str, vocab_size: int) -> Parameters:
    """The parameters that `stage` reads and does not train: the autoencoder's in stage "lm" of a CALM recipe, else none."""
    if stage == "autoencoder" or not config.has_autoencoder:
        return {}
    return autoencoder(config, vocab_size)


def state_bytes(config: Config, stage: str, vocab_size: int) -> dict[str, int]:
    """Bytes of parameters, optimizer, gradients and frozen parameters, all float32, summed over all devices.

    The optimizer's bytes are Adam's two moments; step counters and metrics are left out.
    """
    trained_bytes = sum(trained(config, stage, vocab_size).values()) * _BYTES_OF_FLOAT32
    frozen_bytes = sum(frozen(config, stage, vocab_size).values()) * _BYTES_OF_FLOAT32
    return {
        "parameters": trained_bytes,
        "optimizer": 2 * trained_bytes,
        "gradients": trained_bytes,
        "frozen": frozen_bytes,
    }


def fsdp_traffic(
    config: Config, stage: str, vocab_size: int, microbatches: int, data: int, fsdp: int
) -> float:
    """Bytes that each device receives in a training step of ideal FSDP, which moves parameters and gradients alone.

    Per microbatch:
      - every trained parameter is gathered for the forward pass and again for the backward pass, and its gradient is
        scattered once, all in `compute_dtype`. The language model's token embeddings are gathered only once, because
        their gradient does not need their values;
      - of the frozen autoencoder, the encoder and the embeddings are gathered once, in float32.
    Per step, on a mesh with a data axis: an all-reduce over it of each device's shard of the gradients.

    Args:
      config: the recipe.
      stage: "autoencoder" or "lm".
      vocab_size: number of token ids, with the pad token.
      microbatches: `accumulation_steps`.
      data: size of the mesh's data axis.
      fsdp: size of the mesh's fsdp axis.
    """
    parts, size = trained(config, stage, vocab_size), jnp.dtype(config.compute_dtype).itemsize
    trained_bytes = sum(parts.values()) * size
    # The autoencoder's embeddings are the weights of its logits too, whose gradient needs them.
    gathered_once = parts["token embeddings"] * size if stage == "lm" else 0
    frozen_parts = frozen(config, stage, vocab_size)
    read = frozen_parts.get("encoder", 0) + frozen_parts.get("token embeddings", 0)
    whole = microbatches * (3.0 * trained_bytes - gathered_once + read * _BYTES_OF_FLOAT32)
    return whole * (fsdp - 1) / fsdp + 2 * (data - 1) / data * trained_bytes / fsdp
