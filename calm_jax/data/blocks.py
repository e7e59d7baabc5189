"""Documents to blocks of tokens, in memory: what stands around documents, and the ways to cut them."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np

from calm_jax.data.tokenizers import Tokenizer
from calm_jax.errors import UserError

# Label of a token that is no target. Pads that fill a document's last chunk are ordinary targets.
MASKED = -100
# Documents handed to the tokenizer at once; enough for its own threads, little enough for a progress report.
_ENCODE_BATCH = 256
# The lengths of records' blocks are multiples of so many chunks: attention and matrix units like round numbers.
_RECORD_CHUNKS = 16


# Documents of which the published packing drops together what does not fill a block (SPEC 1).
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

    def __post_init__(self):
        if self.isolate_documents and not self.align_documents_to_chunks:
            raise UserError(
                "data.isolate_documents=True needs data.align_documents_to_chunks=True: a chunk of two documents cannot be "
                "kept from either"
            )
        if self.front_fill not in ("none", "random"):
            raise UserError(f"data.front_fill={self.front_fill!r} must be 'none' or 'random'")
        if self.packing not in ("windows", "documents", "published"):
            raise UserError(
                f"data.packing={self.packing!r} must be 'windows', 'documents' or 'published'"
            )

    def frame(self, chunk_size: int) -> "Frame":
        return Frame(self.append_eos, self.align_documents_to_chunks, self.front_fill, chunk_size)


@dataclasses.dataclass(frozen=True)
class Frame:
    """What stands around a document's tokens: bos before them, eos and pads as asked for."""

    append_eos: bool
    align_documents_to_chunks: bool
    front_fill: str
    chunk_size: int

    def draw_front(self, rng: np.random.Generator) -> int:
        """The number of pads before bos."""
        return int(rng.integers(self.chunk_size)) if self.front_fill == "random" else 0

    def around(self, ids: np.ndarray, front: int, tokenizer: Tokenizer) -> np.ndarray:
        """A whole document, int32."""
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
    """Packed token blocks: a random-access source of {"tokens", "targets"}, int32 [T] each.

    tokens: [blocks, T]. num_valid: [blocks], how many of a block's tokens are text; the rest are filler.
    num_given: [blocks], how many of its first ones are a prompt. The targets of filler and prompts are MASKED.
    """

    tokens: np.ndarray
    num_valid: np.ndarray
    num_given: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def block_tokens(self) -> int:
        return self.tokens.shape[1]

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        tokens = self.tokens[index]
        # Nearly all blocks of running text, at every step.
        is_whole = self.num_valid[index] == tokens.size and not self.num_given[index]
        targets = tokens if is_whole else self.targets(np.asarray([index]))[0]
        return {"tokens": tokens, "targets": targets}

    def targets(self, index_N: np.ndarray) -> np.ndarray:
        """The targets of some blocks, [N, T]."""
        place_T = np.arange(self.tokens.shape[1])
        given_NT = place_T < self.num_given[index_N, None]
        valid_NT = place_T < self.num_valid[index_N, None]
        return np.where(valid_NT & ~given_NT, self.tokens[index_N], np.int32(MASKED))


class BlockSource(Protocol):
    """Blocks by their number: {"tokens", "targets"}, int32 [block_tokens] each."""

    @property
    def block_tokens(self) -> int: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, np.ndarray]: ...

    def targets(self, index_N: np.ndarray) -> np.ndarray: ...


@dataclasses.dataclass(frozen=True)
class IsolatedBlocks:
    """Packed blocks whose documents are not to see each other: with "segments", int32 [T], too, equal for one document's.

    The first chunk of a document inside a block is no target: what precedes it is another document, and the block's own
    first chunk is none either. starts_D: where documents begin in the running text. first_N: where each block begins
    there; None for blocks that are all of it, one after the other.
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
        """The targets of some blocks, [N, T]."""
        return np.stack([self[index]["targets"] for index in index_N])

    def _segments(self, index: int) -> np.ndarray:
        size = self.block_tokens
        first = int(index) * size if self.first_N is None else self.first_N[index]
        begin, end = np.searchsorted(self.starts_D, [first, first + size])
        # Filler, which stands behind all that is a target, is given the numbers of the text that follows.
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
    """Documents (bos, text, eos, pads as the config says) one behind the other, cut into blocks by `config.packing`.

    `front_fill='random'` puts 0 to K-1 pads before bos, drawn per document from `seed`. What does
    not fill the last block is dropped, or with `keep_remainder` filled up with masked pads.
    """
    rng, frame = np.random.default_rng(seed), config.frame(chunk_size)
    framed = [frame.around(ids, frame.draw_front(rng), tokenizer) for ids in encoded]
    block, pad_id = config.block_tokens, tokenizer.pad_id
    if config.packing == "published":
        framed = list(whole_blocks(framed, block))
    starts_D, first_N = np.cumsum([0, *map(len, framed[:-1])]), None
    if config.packing == "documents":
        flat = np.concatenate(framed)
        first_N, size_N = document_blocks(starts_D, len(flat), block)
        rows = [flat[i : i + size] for i, size in zip(first_N, size_N, strict=True)]
        blocks = _filled(rows, block, pad_id)
    else:
        blocks = _cut(framed, pad_id, block, keep_remainder, name)
    if config.isolate_documents:
        return IsolatedBlocks(blocks, starts_D, first_N, chunk_size)
    return blocks


def whole_blocks(framed: Iterable[np.ndarray], block_tokens: int) -> Iterator[np.ndarray]:
    """Of every group of documents what fills blocks; the last document of a group may be cut off."""
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
    """Blocks that begin with a document and end with one, as `(first tokens, sizes)` of a text.

    Each takes the documents that follow as long as they fit. Of a document longer than a block every part of a block's size is
    one, and what is left of it is packed as a document. starts_D: where documents begin, the first at 0.
    """
    length_D = np.diff(starts_D, append=num_tokens)
    parts_D = -(-length_D // block)
    document_P = np.repeat(np.arange(len(starts_D)), parts_D)
    place_P = np.arange(len(document_P)) - np.repeat(np.cumsum(parts_D) - parts_D, parts_D)
    first_P = starts_D[document_P] + place_P * block
    stop_P = np.append(first_P[1:], num_tokens)
    # Of a block that begins with a part, the part that does not fit any more.
    next_P = np.searchsorted(stop_P, first_P + block, side="right").tolist()
    begins, part = [], 0
    while part < len(next_P):
        begins.append(part)
        part = next_P[part]
    first_N = first_P[begins]
    return first_N, stop_P[np.asarray([*begins[1:], len(next_P)]) - 1] - first_N


def _cut(
    pieces: Sequence[np.ndarray], pad_id: int, block: int, keep_remainder: bool, name: str
) -> Blocks:
    flat = np.concatenate([np.zeros(0, np.int32), *pieces])
    if not keep_remainder and len(flat) < block:
        raise UserError(
            f"{name} has {len(flat)} tokens, and one block needs {block}: give more text, or a smaller "
            "data.block_tokens"
        )
    num_blocks = -(-len(flat) // block) if keep_remainder else len(flat) // block
    return _filled([flat[i * block : (i + 1) * block] for i in range(num_blocks)], block, pad_id)


def _completion(ids: np.ndarray, tokenizer: Tokenizer, chunk_size: int) -> np.ndarray:
    """A completion as whole chunks: its tokens, eos, pads."""
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
    """The chunks that a language model of records has to hit, without their prompts: what its autoencoder is for."""
    pieces = [_completion(ids, tokenizer, chunk_size) for ids in completions]
    return _cut(pieces, tokenizer.pad_id, config.block_tokens, keep_remainder, name)


def pack_records(
    names: Sequence[str],
    prompts: Sequence[np.ndarray],
    completions: Sequence[np.ndarray],
    tokenizer: Tokenizer,
    config: BlockConfig,
    chunk_size: int,
) -> tuple[Blocks, list[str]]:
    """A record (prompt and completion) a block, as generation sees them: `(blocks, the names of what is too long)`.

    Blocks are as long as the longest record, in groups of chunks, and at most `block_tokens`.

    The prompt follows bos, with pads before it so that the completion begins on a chunk boundary; eos and pads up
    to a whole chunk follow the completion. Completion, eos and these pads are the targets.
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
    longest = max(map(len, rows), default=0)
    size = min(config.block_tokens, longest + -longest % (_RECORD_CHUNKS * chunk_size))
    blocks = _filled(rows, size, tokenizer.pad_id)
    return dataclasses.replace(blocks, num_given=np.asarray(given, int)), too_long


def _filled(rows: Sequence[np.ndarray], block: int, pad_id: int) -> Blocks:
    """Rows of at most `block` tokens as blocks."""
    tokens = np.full((len(rows), block), pad_id, np.int32)
    for filled, row in zip(tokens, rows, strict=True):
        filled[: len(row)] = row
    return Blocks(tokens, np.asarray([len(row) for row in rows]), np.zeros(len(rows), int))


def document_windows(
    documents: Sequence[np.ndarray], pad_id: int, block_tokens: int, context_tokens: int, unit: int
) -> Blocks:
    """Windows of `block_tokens` over each document for itself.

    Each begins `block_tokens - context_tokens` after the one before, so that what follows its first
    `context_tokens` is in no other. Which tokens these are, and what precedes each of them in its window, does
    not depend on the chunk size, for which filler is added to the longest up to a multiple of `unit`. A document without a
    token after the first `context_tokens` has no window.
    """
    stride = block_tokens - context_tokens
    rows = [
        document[start : start + block_tokens]
        for document in documents
        for start in range(0, len(document) - context_tokens, stride)
    ]
    longest = max(map(len, rows), default=block_tokens)
    return _filled(rows, longest + -longest % unit, pad_id)
