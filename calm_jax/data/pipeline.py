"""Documents to batches of token blocks: packing, shuffling, per-process sharding, batching (Grain)."""

import dataclasses
from collections.abc import Iterator, Sequence

import grain
import numpy as np

from calm_jax.data.tokenizers import Tokenizer
from calm_jax.errors import UserError

# Label of a token that is no target. Pads that fill a document's last chunk are ordinary targets.
MASKED = -100
# Documents handed to the tokenizer at once; enough for its own threads, little enough for a progress report.
_ENCODE_BATCH = 256
# The lengths of records' blocks are multiples of so many chunks: attention and matrix units like round numbers.
_RECORD_CHUNKS = 16


@dataclasses.dataclass(frozen=True)
class BlockConfig:
    """`config.<stage>.data`; every key is described in `configs/common.py`."""

    block_tokens: int
    append_eos: bool
    align_documents_to_chunks: bool
    front_fill: str

    def __post_init__(self):
        if self.front_fill not in ("none", "random"):
            raise UserError(f"data.front_fill={self.front_fill!r} must be 'none' or 'random'")


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
) -> Blocks:
    """Concatenates documents (bos, text, eos, pads as the config says) and cuts them into blocks.

    `front_fill='random'` puts 0 to K-1 pads before bos, drawn per document from `seed`. What does
    not fill the last block is dropped, or with `keep_remainder` filled up with masked pads.
    """
    rng = np.random.default_rng(seed)
    pieces: list[np.ndarray] = []
    for ids in encoded:
        front = int(rng.integers(chunk_size)) if config.front_fill == "random" else 0
        length = front + 1 + len(ids) + config.append_eos
        back = -length % chunk_size if config.align_documents_to_chunks else 0
        pieces += [
            np.full(front, tokenizer.pad_id, np.int32),
            np.asarray([tokenizer.bos_id], np.int32),
            ids,
            np.asarray([tokenizer.eos_id] * config.append_eos, np.int32),
            np.full(back, tokenizer.pad_id, np.int32),
        ]
    return _cut(pieces, tokenizer.pad_id, config.block_tokens, keep_remainder, name)


def _cut(
    pieces: Sequence[np.ndarray], pad_id: int, block: int, keep_remainder: bool, name: str
) -> Blocks:
    flat = np.concatenate(pieces)
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


class _ProcessRows(grain.MapDataset):
    """This process's rows of every global batch: the same contiguous part of each.

    The batches of all processes side by side are then exactly the batches of a single one.
    """

    def __init__(
        self, parent: grain.MapDataset, batch_size: int, process_index: int, process_count: int
    ):
        super().__init__(parent)
        self._batch_size = batch_size
        self._rows = batch_size // process_count
        self._first = process_index * self._rows

    def __len__(self) -> int:
        # An endless parent is sys.maxsize long; half of that leaves Grain room to round up.
        return len(self._parent) // 2 // self._batch_size * self._rows

    def __getitem__(self, index):
        batch, row = divmod(index, self._rows)
        return self._parent[batch * self._batch_size + self._first + row]


def training_batches(
    blocks: Blocks, batch_size: int, seed: int, process_index: int, process_count: int
) -> grain.DatasetIterator:
    """An endless iterator of this process's part of each batch, in a new random order each epoch.

    Its state is saved in checkpoints; a restored iterator goes on with exactly the next batch.
    """
    dataset = grain.MapDataset.source(blocks).seed(seed).shuffle().repeat()
    dataset = _ProcessRows(dataset, batch_size, process_index, process_count)
    dataset = dataset.batch(batch_size // process_count)
    # Blocks are in memory: threads would only add hand-over.
    return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)))


def evaluation_batches(
    blocks: Blocks,
    indices: Sequence[int],
    batch_size: int,
    process_index: int,
    process_count: int,
) -> Iterator[tuple[dict[str, np.ndarray], np.ndarray]]:
    """This process's part of each batch, with the blocks' indices; filled up with masked blocks (-1)."""
    rows = batch_size // process_count
    for start in range(0, len(indices), batch_size):
        first = start + process_index * rows
        mine = list(indices[first : min(first + rows, start + batch_size)])
        mine += [-1] * (rows - len(mine))
        masked = {
            "tokens": np.zeros(blocks.tokens.shape[1], np.int32),
            "targets": np.full(blocks.tokens.shape[1], MASKED, np.int32),
        }
        items = [masked if index < 0 else blocks[index] for index in mine]
        yield (
            {key: np.stack([item[key] for item in items]) for key in masked},
            np.asarray(mine, np.int32),
        )
