"""Packs records, each a prompt and a completion, into blocks of tokens, for training on the completions alone."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from calm_jax.data.packing import (
    BlockConfig,
    Blocks,
    IsolatedBlocks,
    cut_blocks,
    document_blocks,
    filled_blocks,
)
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

    Completions are split into the same chunks as by `pack_records`; for the arguments see `pack`.
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
    is_mixed: bool,
) -> tuple[Blocks | IsolatedBlocks, list[str]]:
    """Packs records, each a prompt and a completion, laid out as in generation.

    A record is pads, bos, prompt, completion, eos, pads. The first pads let the completion begin on a chunk boundary, the
    last ones fill its last chunk. Targets are the completion, eos and the pads of that chunk.

    A block holds one record. With `config.isolate_documents` it holds as many consecutive records as fit, and no record
    attends to another.

    Args:
        names: the name of each record.
        prompts: token ids of each prompt.
        completions: token ids of each completion.
        tokenizer: the source of bos, eos and pad.
        config: its `block_tokens` is the most tokens of a block.
        chunk_size: K, tokens per chunk.
        is_mixed: whether training mixes these blocks with blocks of other text. Blocks have `config.block_tokens` tokens if
            they are mixed or hold several records; otherwise they have as many tokens as the longest record.

    Returns:
        The blocks, and the names of the records left out because they are longer than `config.block_tokens`.
    """
    rows, given, too_long = [], [], []
    for name, prompt, completion in zip(names, prompts, completions, strict=True):
        front = -(1 + len(prompt)) % chunk_size
        begin = [*[tokenizer.pad_id] * front, tokenizer.bos_id]
        answer = _completion(completion, tokenizer, chunk_size)
        row = np.concatenate([np.asarray(begin, np.int32), prompt, answer])
        if len(row) > config.block_tokens:
            too_long.append(name)
            continue
        rows.append(row)
        given.append(np.arange(len(row)) < len(row) - len(answer))
    lengths_D = np.asarray([len(row) for row in rows], int)
    starts_D = np.cumsum(lengths_D) - lengths_D
    first_N, size_N, block = starts_D, lengths_D, config.block_tokens
    if config.isolate_documents and rows:
        first_N, size_N = document_blocks(starts_D, int(lengths_D.sum()), block)
    elif not is_mixed:
        block = max(lengths_D, default=chunk_size)
    flat = np.concatenate([np.zeros(0, np.int32), *rows])
    flat_given = np.concatenate([np.zeros(0, bool), *given])
    places = [slice(first, first + size) for first, size in zip(first_N, size_N, strict=True)]
    blocks = filled_blocks([flat[place] for place in places], block, tokenizer.pad_id)
    is_given = np.zeros(blocks.tokens.shape, bool)
    for filled, place in zip(is_given, places, strict=True):
        filled[: place.stop - place.start] = flat_given[place]
    blocks = dataclasses.replace(blocks, is_given=is_given)
    if config.isolate_documents:
        return IsolatedBlocks(blocks, starts_D, first_N, chunk_size), too_long
    return blocks, too_long
