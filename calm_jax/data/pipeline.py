"""Blocks to batches: several sources in one random order, per-process sharding, batching (Grain)."""

import dataclasses
import math
from collections.abc import Iterator, Sequence

import grain
import numpy as np

from calm_jax.data.blocks import MASKED, BlockSource

# Batches that each thread is ahead of the training.
_READ_AHEAD = 2


@dataclasses.dataclass(frozen=True)
class TrainingText:
    """What a stage is trained on: sources, and how often blocks are of each; without weights as they are."""

    sources: Sequence[BlockSource]
    weights: Sequence[float]

    @property
    def block_tokens(self) -> int:
        return self.sources[0].block_tokens

    @property
    def num_blocks(self) -> int:
        """Of all sources."""
        return sum(map(len, self.sources))

    def targets(self, most_blocks: int) -> np.ndarray:
        """The targets of evenly spaced blocks of each source, as often as the weights say, [N, T]; N at most about `most_blocks`."""
        weights = np.asarray(self.weights or [len(source) for source in self.sources], float)
        # Of no source more than there is.
        total = min(
            most_blocks,
            *(len(s) / w * weights.sum() for s, w in zip(self.sources, weights, strict=True)),
        )
        strides = [
            max(1, math.ceil(len(source) / (total * weight / weights.sum())))
            for source, weight in zip(self.sources, weights, strict=True)
        ]
        return np.concatenate(
            [
                source.targets(np.arange(0, len(source), stride))
                for source, stride in zip(self.sources, strides, strict=True)
            ]
        )

    def rows(self, seed: int) -> grain.MapDataset:
        """Blocks without end, in a new random order each time they are through: all of them once, or each source by its weight."""
        if not self.weights:
            sources = [grain.MapDataset.source(source) for source in self.sources]
            # As it was while there was one source alone: the orders of runs that have begun.
            whole = sources[0] if len(sources) == 1 else grain.MapDataset.concatenate(sources)
            return whole.seed(seed).shuffle().repeat()
        orders = [
            grain.MapDataset.source(source).seed(seed + place).shuffle().repeat()
            for place, source in enumerate(self.sources)
        ]
        return grain.MapDataset.mix(orders, self.weights)


class _ProcessRows(grain.MapDataset):
    """Some rows of every global batch, the same of each.

    The batches of all processes side by side are then exactly the batches of a single one.
    """

    def __init__(self, parent: grain.MapDataset, batch_size: int, rows: Sequence[int]):
        super().__init__(parent)
        self._batch_size, self._rows = batch_size, rows

    def __len__(self) -> int:
        # An endless parent is sys.maxsize long; half of that leaves Grain room to round up.
        return len(self._parent) // 2 // self._batch_size * len(self._rows)

    def __getitem__(self, index):
        batch, place = divmod(index, len(self._rows))
        return self._parent[batch * self._batch_size + self._rows[place]]


def training_batches(
    rows: grain.MapDataset,
    batch_size: int,
    first_batch: int,
    mine: Sequence[int],
    read_threads: int,
) -> Iterator[dict[str, np.ndarray]]:
    """An endless iterator of this process's part of each batch, the rows `mine`, from the `first_batch`-th on.

    The number of batches that were taken is all there is to its state, also on another number of processes.
    """
    dataset = _ProcessRows(rows, batch_size, mine).batch(len(mine))
    # Without threads there is nothing to hand over: the fastest way to what is in memory or on a local disk.
    options = grain.ReadOptions(
        num_threads=read_threads, prefetch_buffer_size=_READ_AHEAD * read_threads
    )
    batches = iter(dataset.to_iter_dataset(options))
    batches.set_state({"next_index": first_batch})
    return batches


def evaluation_batches(
    blocks: BlockSource,
    indices: Sequence[int],
    batch_size: int,
    mine: Sequence[int],
) -> Iterator[tuple[dict[str, np.ndarray], np.ndarray]]:
    """The rows `mine` of each batch, with the blocks' indices; filled up with masked blocks (-1)."""
    for start in range(0, len(indices), batch_size):
        places = [start + row for row in mine]
        taken = [indices[place] if place < len(indices) else -1 for place in places]
        masked = {name: np.zeros_like(row) for name, row in blocks[0].items()}
        masked["targets"] = np.full_like(masked["tokens"], MASKED)
        items = [masked if index < 0 else blocks[index] for index in taken]
        yield (
            {key: np.stack([item[key] for item in items]) for key in masked},
            np.asarray(taken, np.int32),
        )
