"""Records, a prompt and a completion each, to blocks of tokens: for training on completions alone."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from calm_jax.data.packing import BlockConfig, Blocks, cut_blocks, filled_blocks
from calm_jax.data.tokenizers import Tokenizer


def _completion(ids: np.ndarray, tokenizer: Tokenizer, chunk_size: int) -> np.ndarray:
    """A completion's tokens, eos, and pads up to a whole number of chunks."""
    pads = -(len(ids) + 1) % chunk_size
    end = [tokenizer.eos_id, *[tokenizer.pad_id] * pads]
    return np.concatenate([ids, np.asarray(end, np.int32)])


def pack_completions(
    completions: Sequence[np.ndarray],
    tokenizer: Tokenizer,
    config: BlockConfig,
    chunk_size: int,
    keep_remainder: bool,
    name: str,
) -> Blocks:
    """Blocks of completions without their prompts, to train an autoencoder on the chunks that the language model generates.

    The completions' chunks are those of `pack_records`; for the arguments see `pack`.
    """
    pieces = [_completion(ids, tokenizer, chunk_size) for ids in completions]
    return cut_blocks(pieces, tokenizer.pad_id, config.block_tokens, keep_remainder, name)


def pack_records(
    names: Sequence[str],
    prompts: Sequence[np.ndarray],
    completions: Sequence[np.ndarray],
    tokenizer: Tokenizer,
    config: BlockConfig,
    chunk_size: int,
) -> tuple[Blocks, list[str]]:
    """Packs one record (prompt and completion) in each block, laid out as in generation.

    A block is pads, bos, prompt, completion, eos, pads. The first pads let the completion begin on a chunk boundary, the
    last ones fill its last chunk. Targets are the completion, eos and the pads of that chunk.

    Blocks are as long as the longest record, and at most `config.block_tokens`.

    Args:
        names: a name of each record.
        prompts: token ids of each prompt.
        completions: token ids of each completion.
        tokenizer: the source of bos, eos and pad.
        config: the longest block.
        chunk_size: K, tokens per chunk.

    Returns:
        The blocks, and the names of the records left out because they are longer than `config.block_tokens`.
    """
    rows, given, too_long = [], [], []
    for name, prompt, completion in zip(names, prompts, completions, strict=True):
        front = -(1 + len(prompt)) % chunk_size
        begin = [*[tokenizer.pad_id] * front, tokenizer.bos_id]
        row = np.concatenate(
            [np.asarray(begin, np.int32), prompt, _completion(completion, tokenizer, chunk_size)]
        )
        if len(row) > config.block_tokens:
            too_long.append(name)
            continue
        rows.append(row)
        given.append(front + 1 + len(prompt))
    longest = max(map(len, rows), default=chunk_size)
    blocks = filled_blocks(rows, longest, tokenizer.pad_id)
    return dataclasses.replace(blocks, num_given=np.asarray(given, int)), too_long
