"""Packs documents into blocks of tokens, in memory: adds special tokens around each document, and cuts blocks."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np

from calm_jax.data.tokenizers import Tokenizer
from calm_jax.errors import UserError, require_one_of

# The target at a position without loss. Pads that fill a document's last chunk are ordinary targets.
MASKED = -100
# Documents per call of a tokenizer: enough to keep its own threads busy.
_ENCODE_BATCH = 256
# The published packing concatenates this many documents and drops the tokens after their last whole block.
PUBLISHED_GROUP = 1000


@dataclasses.dataclass(frozen=True)
class BlockConfig:
    """`config.<stage>.data`; every key is described in `configs/common.py`."""

    block_tokens: int
    packing: str
    append_eos: bool
    align_documents_to_chunks: bool
    front_fill: str
    isolate_documents: bool

    def __post_init__(self) -> None:
        if self.isolate_documents and not self.align_documents_to_chunks:
            raise UserError(
                "data.isolate_documents=True needs data.align_documents_to_chunks=True: a chunk must not hold "
                "tokens of two documents, because attention masks whole chunks"
            )
        require_one_of("data.front_fill", self.front_fill, ("none", "random"))
        require_one_of("data.packing", self.packing, ("windows", "documents", "published"))

    def frame(self, chunk_size: int) -> "Frame":
        """The special tokens around each document, for chunks of `chunk_size` tokens."""
        return Frame(self.append_eos, self.align_documents_to_chunks, self.front_fill, chunk_size)


@dataclasses.dataclass(frozen=True)
class Frame:
    """The special tokens around each document's tokens: pads, bos, text, eos, pads.

    Attributes:
        append_eos: whether eos follows the text.
        align_documents_to_chunks: whether pads follow, up to a whole number of chunks.
        front_fill: "random" puts 0 to `chunk_size - 1` pads before bos, "none" puts none.
        chunk_size: K, tokens per chunk.
    """

    append_eos: bool
    align_documents_to_chunks: bool
    front_fill: str
    chunk_size: int

    def draw_front(self, rng: np.random.Generator) -> int:
        """Draws the number of pads before a document's bos."""
        return int(rng.integers(self.chunk_size)) if self.front_fill == "random" else 0

    def around(self, ids: np.ndarray, front: int, tokenizer: Tokenizer) -> np.ndarray:
        """Adds the special tokens to a document's `ids`, with `front` pads before bos; int32."""
        length = front + 1 + len(ids) + self.append_eos
        back = -length % self.chunk_size if self.align_documents_to_chunks else 0
        framed = np.full(length + back, tokenizer.pad_id, np.int32)
        framed[front] = tokenizer.bos_id
        framed[front + 1 : front + 1 + len(ids)] = ids
        if self.append_eos:
            framed[front + 1 + len(ids)] = tokenizer.eos_id
        return framed


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Blocks in memory: a random-access source of {"tokens", "targets"}, int32 [T] each.

    Targets are the tokens themselves, except that those of filler and prompts are MASKED.

    Attributes:
        tokens: int32 [blocks, T].
        num_valid: [blocks], the number of tokens in each block before its filler.
        is_given: bool [blocks, T], True for tokens of prompts and the pads and bos before them; None without prompts.
    """

    tokens: np.ndarray
    num_valid: np.ndarray
    is_given: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def block_tokens(self) -> int:
        return self.tokens.shape[1]

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        tokens = self.tokens[index]
        # A shortcut for nearly all blocks of running text: nothing is masked.
        is_whole = self.num_valid[index] == tokens.size and self.is_given is None
        targets = tokens if is_whole else self.targets(np.asarray([index]))[0]
        return {"tokens": tokens, "targets": targets}

    def targets(self, index_N: np.ndarray) -> np.ndarray:
        """The targets of the blocks `index_N`, [N, T]."""
        is_target_NT = np.arange(self.tokens.shape[1]) < self.num_valid[index_N, None]
        if self.is_given is not None:
            is_target_NT &= ~self.is_given[index_N]
        return np.where(is_target_NT, self.tokens[index_N], np.int32(MASKED))


class BlockSource(Protocol):
    """A random-access source of {"tokens", "targets"}, int32 [block_tokens] each.

    `targets(index_N)` gives the targets of several blocks, [N, T].
    """

    @property
    def block_tokens(self) -> int: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, np.ndarray]: ...

    def targets(self, index_N: np.ndarray) -> np.ndarray: ...


@dataclasses.dataclass(frozen=True)
class IsolatedBlocks:
    """Packed blocks with segment ids, so that attention can keep their documents apart.

    Adds "segments", int32 [T], equal for tokens of one document. The first chunk of a document inside a block is masked:
    it would be predicted from another document. (The first chunk of a block is never predicted.)

    Attributes:
        packed: the blocks.
        starts_D: the index at which each document begins in the concatenation of all documents with their special tokens.
        first_N: the index at which each block begins in the concatenation; None if blocks follow each other without gaps.
        chunk_size: K, tokens per chunk.
    """

    packed: BlockSource
    starts_D: np.ndarray
    first_N: np.ndarray | None
    chunk_size: int

    def __len__(self) -> int:
        return len(self.packed)

    @property
    def block_tokens(self) -> int:
        return self.packed.block_tokens

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        block, segments = self.packed[index], self._segments(index)
        targets, size = block["targets"].copy(), self.chunk_size
        targets[size:][segments[size:] != segments[:-size]] = MASKED
        return block | {"targets": targets, "segments": segments}

    def targets(self, index_N: np.ndarray) -> np.ndarray:
        """The targets of the blocks `index_N`, [N, T]."""
        return np.stack([self[index]["targets"] for index in index_N])

    def _segments(self, index: int) -> np.ndarray:
        size = self.block_tokens
        first = int(index) * size if self.first_N is None else self.first_N[index]
        begin, end = np.searchsorted(self.starts_D, [first, first + size])
        # Filler gets the segment ids of the text that follows the block. This is harmless: filler comes after all targets,
        # and attention is causal.
        begins_T = np.bincount(self.starts_D[begin:end] - first, minlength=size)
        return begins_T.cumsum().astype(np.int32)


def encode_documents(texts: Sequence[str], tokenizer: Tokenizer) -> list[np.ndarray]:
    """Token ids of each text, int32, without bos or eos."""
    encoded = []
    for start in range(0, len(texts), _ENCODE_BATCH):
        encoded += [
            np.asarray(ids, np.int32)
            for ids in tokenizer.encode_batch(texts[start : start + _ENCODE_BATCH])
        ]
    return encoded


def pack(
    encoded: Sequence[np.ndarray],
    tokenizer: Tokenizer,
    config: BlockConfig,
    chunk_size: int,
    seed: int,
    keep_remainder: bool,
    name: str,
) -> Blocks | IsolatedBlocks:
    """Concatenates documents with the special tokens around them, and cuts blocks.

    Args:
        encoded: token ids of each document.
        tokenizer: the source of bos, eos and pad.
        config: the size of blocks, the special tokens, and how documents are packed: "windows" cuts the concatenation,
            "documents" keeps documents whole where they fit, "published" drops the end of each group of 1,000 documents.
        chunk_size: K, tokens per chunk.
        seed: seeds the random number of pads that `front_fill="random"` puts before each document.
        keep_remainder: whether the last block is filled up with masked pads; otherwise a partial block is dropped.
            "documents" ignores this and fills up every block.
        name: what the documents are, for messages.

    Raises:
        UserError: the documents do not fill one block, and a partial block would be dropped.
    """
    rng, frame = np.random.default_rng(seed), config.frame(chunk_size)
    framed = [frame.around(ids, frame.draw_front(rng), tokenizer) for ids in encoded]
    block, pad_id = config.block_tokens, tokenizer.pad_id
    if config.packing == "published":
        num_tokens, framed = sum(map(len, framed)), list(whole_blocks(framed, block))
        if num_tokens >= block and not framed:
            raise UserError(
                f"{name} has no group of {PUBLISHED_GROUP} documents that fills a block of {block} tokens, and packing='published' "
                "drops what is left of each group: give packing='windows' in the section `data` of the stage"
            )
    starts_D, first_N = np.cumsum([0, *map(len, framed[:-1])]), None
    if config.packing == "documents":
        flat = np.concatenate(framed)
        first_N, size_N = document_blocks(starts_D, len(flat), block)
        rows = [flat[i : i + size] for i, size in zip(first_N, size_N, strict=True)]
        blocks = filled_blocks(rows, block, pad_id)
    else:
        blocks = cut_blocks(framed, pad_id, block, keep_remainder, name)
    if config.isolate_documents:
        return IsolatedBlocks(blocks, starts_D, first_N, chunk_size)
    return blocks


def whole_blocks(framed: Iterable[np.ndarray], block_tokens: int) -> Iterator[np.ndarray]:
    """The published packing: drops the tokens after the last whole block of each group of 1,000 documents.

    The last documents of a group may be cut off or missing. `framed` are all documents with their special tokens.
    """
    framed = iter(framed)
    while group := list(itertools.islice(framed, PUBLISHED_GROUP)):
        left = sum(map(len, group)) // block_tokens * block_tokens
        for tokens in group:
            if left:
                yield tokens[:left]
                left -= min(left, len(tokens))


def document_blocks(
    starts_D: np.ndarray, num_tokens: int, block: int
) -> tuple[np.ndarray, np.ndarray]:
    """Cuts a text into blocks of whole documents, each of as many consecutive documents as fit.

    A document longer than a block is split into parts of a block each; the rest of it is packed like a short document.

    Args:
        starts_D: the token at which each document begins; the first is 0.
        num_tokens: tokens of the text.
        block: the most tokens of a block.

    Returns:
        `(first_N, size_N)`: the first token and the number of tokens of each block.
    """
    length_D = np.diff(starts_D, append=num_tokens)
    parts_D = -(-length_D // block)
    document_P = np.repeat(np.arange(len(starts_D)), parts_D)
    place_P = np.arange(len(document_P)) - np.repeat(np.cumsum(parts_D) - parts_D, parts_D)
    first_P = starts_D[document_P] + place_P * block
    stop_P = np.append(first_P[1:], num_tokens)
    # For a block that begins with part p, the first part that does not fit into it.
    next_P = np.searchsorted(stop_P, first_P + block, side="right").tolist()
    begins, part = [], 0
    while part < len(next_P):
        begins.append(part)
        part = next_P[part]
    first_N = first_P[begins]
    return first_N, stop_P[np.asarray([*begins[1:], len(next_P)]) - 1] - first_N


def cut_blocks(
    pieces: Sequence[np.ndarray], pad_id: int, block: int, keep_remainder: bool, name: str
) -> Blocks:
    """Blocks of `block` tokens from the concatenation of `pieces`.

    The last one is filled up with masked pads if `keep_remainder`, otherwise dropped.

    Raises:
        UserError: not `keep_remainder`, and too few tokens for a block; `name` is the text's, for the message.
    """
    flat = np.concatenate([np.zeros(0, np.int32), *pieces])
    if not keep_remainder and len(flat) < block:
        raise UserError(
            f"{name} has {len(flat)} tokens, and one block needs {block}: give more text, or a smaller "
            "block_tokens in the section `data` of the stage"
        )
    num_blocks = -(-len(flat) // block) if keep_remainder else len(flat) // block
    return filled_blocks(
        [flat[i * block : (i + 1) * block] for i in range(num_blocks)], block, pad_id
    )


def filled_blocks(rows: Sequence[np.ndarray], block: int, pad_id: int) -> Blocks:
    """Makes blocks of `block` tokens from rows of at most `block` tokens, which are filled up with pads."""
    tokens = np.full((len(rows), block), pad_id, np.int32)
    for filled, row in zip(tokens, rows, strict=True):
        filled[: len(row)] = row
    return Blocks(tokens, np.asarray([len(row) for row in rows]))


def document_windows(
    documents: Sequence[np.ndarray], pad_id: int, block_tokens: int, context_tokens: int, unit: int
) -> Blocks:
    """Windows over each document, in which every token after the first `context_tokens` is scored once.

    A window begins `block_tokens - context_tokens` tokens after the previous one. Its first `context_tokens` are only context.
    They are not masked here: `brier.Protocol.first_token` leaves them out of the score. The scored tokens and their
    context are the same for every chunk size, so that models of any K compare. A document of at most `context_tokens`
    has no window.

    Args:
        documents: token ids of each document, with bos.
        pad_id: the token of the filler.
        block_tokens: the most tokens of a window.
        context_tokens: tokens of context, at the beginning of each window.
        unit: the blocks' size is a multiple of this, usually the chunk size; the filler is masked.
    """
    stride = block_tokens - context_tokens
    rows = [
        document[start : start + block_tokens]
        for document in documents
        for start in range(0, len(document) - context_tokens, stride)
    ]
    longest = max(map(len, rows), default=block_tokens)
    return filled_blocks(rows, longest + -longest % unit, pad_id)
