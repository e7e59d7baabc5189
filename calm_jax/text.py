"""Prompts in, text out: what the `generate` command and the end of a training run share."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from calm_jax.config import Config
from calm_jax.data.tokenizers import Tokenizer
from calm_jax.errors import UserError
from calm_jax.sampling import SamplingConfig, generate_chunks
from calm_jax.streams import stream
from calm_jax.tasks import LmTask, Params


def _encode(text: str, tokenizer: Tokenizer, chunk_size: int, alignment: str) -> np.ndarray:
    """bos and the prompt, filled up with pads to whole chunks, [L, K]."""
    try:
        ids = [tokenizer.bos_id, *tokenizer.encode(text)]
    except (UnicodeEncodeError, TypeError) as error:
        raise UserError(f"the prompt {text!r} is not valid Unicode text") from error
    pads = [tokenizer.pad_id] * (-len(ids) % chunk_size)
    filled = pads + ids if alignment == "left" else ids + pads
    return np.asarray(filled, np.int32).reshape(-1, chunk_size)


def continuations(
    task: LmTask,
    params: Params,
    frozen: Params,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    config: SamplingConfig,
    seed: int,
) -> list[str]:
    """The text that follows each prompt; it depends on the seed, the prompt and its place alone.

    A text ends at eos, or after exactly `max_tokens` tokens.
    """
    encoded = [
        _encode(prompt, tokenizer, task.chunk_size, config.prompt_alignment) for prompt in prompts
    ]
    longest = max(len(chunks) for chunks in encoded)
    prompt_BLK = np.full((len(prompts), longest, task.chunk_size), tokenizer.pad_id, np.int32)
    for row, chunks in zip(prompt_BLK, encoded, strict=True):
        row[: len(chunks)] = chunks
    key_B = jax.vmap(jax.random.fold_in, (None, 0))(
        stream(seed, "generate"), jnp.arange(len(prompts))
    )
    continuation = jax.device_get(
        generate_chunks(
            task.bind,
            params,
            frozen,
            prompt_BLK,
            np.asarray([len(chunks) for chunks in encoded], np.int32),
            key_B,
            num_chunks=-(-config.max_tokens // task.chunk_size),
            eos_id=tokenizer.eos_id,
            config=config,
        )
    )
    texts = []
    for tokens, length in zip(continuation.tokens, continuation.length, strict=True):
        ids = tokens[:length].reshape(-1)[: config.max_tokens].tolist()
        if tokenizer.eos_id in ids:
            ids = ids[: ids.index(tokenizer.eos_id)]
        texts.append(tokenizer.decode(ids))
    return texts


def samples(
    task: LmTask, params: Params, frozen: Params, tokenizer: Tokenizer, config: Config
) -> str:
    """What a run writes at its end: the config's prompts and how the model goes on."""
    sample = config.sample
    texts = continuations(task, params, frozen, tokenizer, sample.prompts, sample, config.seed)
    head = f"temperature {sample.temperature:g}, seed {config.seed}"
    if not config.has_autoencoder:
        head += f", top_p {sample.top_p:g}"
    elif sample.temperature < 1:
        head += f", {sample.num_candidates} candidates a chunk"
    parts = [
        f"--- prompt: {prompt!r} ---\n{prompt}{text}"
        for prompt, text in zip(sample.prompts, texts, strict=True)
    ]
    return "\n\n".join([head, *parts]) + "\n"
