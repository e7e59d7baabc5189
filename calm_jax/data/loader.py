"""Makes batches of blocks with Grain: mixes and shuffles the sources, and gives each process its rows of every batch.

Grain imports JAX and Orbax, so it is imported inside functions: importing this module needs neither.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from calm_jax.data.packing import MASKED, BlockSource

if TYPE_CHECKING:
    import grain

# Batches that each reading thread prepares ahead of training.
_READ_AHEAD = 2


@dataclasses.dataclass(frozen=True)
class TrainingText:
    """The training blocks of a stage.

    Attributes:
        sources: the blocks, all of the same size.
        weights: the relative frequency of each source's blocks; empty to visit every block once per epoch.
    """

    sources: Sequence[BlockSource]
    weights: Sequence[float]

    @property
    def block_tokens(self) -> int:
        return self.sources[0].block_tokens

    @property
    def num_blocks(self) -> int:
        """Blocks of all sources together."""
        return sum(map(len, self.sources))

    def targets(self, most_blocks: int) -> np.ndarray:
        """The targets of a sample of blocks, int32 [N, T]: evenly spaced blocks of each source, in proportion to the weights.

        N is at most about `most_blocks`, and smaller if a source has too few blocks for its share.
        """
        weights = np.asarray(self.weights or [len(source) for source in self.sources], float)
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

    def rows(self, seed: int) -> "grain.MapDataset":
        """An endless dataset of blocks, reshuffled in every epoch.

        Without weights an epoch is every block once. With weights each source has epochs of its own, and is drawn from
        in proportion to its weight.
        """
        import grain

        if not self.weights:
            sources = [grain.MapDataset.source(source) for source in self.sources]
            # A single source is not wrapped, so that runs begun before there were mixtures keep their order.
            whole = sources[0] if len(sources) == 1 else grain.MapDataset.concatenate(sources)
            return whole.seed(seed).shuffle().repeat()
        orders = [
            grain.MapDataset.source(source).seed(seed + place).shuffle().repeat()
            for place, source in enumerate(self.sources)
        ]
        return grain.MapDataset.mix(orders, self.weights)


@dataclasses.dataclass(frozen=True)
class _ProcessBatches:
    """A Grain source of batches: one process's rows of every global batch.

    The rows of all processes together are exactly the batches that a single process would make.

    Attributes:
        dataset: the rows of all batches.
        batch_size: rows of a global batch.
        rows: the indices, within each global batch, of this process's rows.
    """

    dataset: "grain.MapDataset"
    batch_size: int
    rows: Sequence[int]

    def __len__(self) -> int:
        # The length of an endless dataset is sys.maxsize; half of that leaves Grain room to round up.
        return len(self.dataset) // 2 // self.batch_size

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        first = index * self.batch_size
        return _stacked([self.dataset[first + row] for row in self.rows])


def _stacked(blocks: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {name: np.stack([block[name] for block in blocks]) for name in blocks[0]}


def training_batches(
    rows: "grain.MapDataset",
    batch_size: int,
    first_batch: int,
    mine: Sequence[int],
    read_threads: int,
) -> Iterator[dict[str, np.ndarray]]:
    """An endless iterator over this process's part of each batch.

    Its only state is the number of batches taken, so that a run may resume on another number of processes.

    Args:
        rows: an endless dataset of blocks, as from `TrainingText.rows`.
        batch_size: rows of a global batch.
        first_batch: the number of batches to skip.
        mine: the rows of each global batch that this process reads.
        read_threads: threads that read ahead; 0 reads in the calling thread.

    Returns:
        Batches {"tokens", "targets", ...} of arrays [len(mine), T].
    """
    import grain

    batches = grain.MapDataset.source(_ProcessBatches(rows, batch_size, mine))
    # Without threads there is no handover between threads, which is fastest for text in memory or on a local disk.
    options = grain.ReadOptions(
        num_threads=read_threads, prefetch_buffer_size=_READ_AHEAD * read_threads
    )
    iterator = iter(batches.to_iter_dataset(options))
    iterator.set_state({"next_index": first_batch})
    return iterator


def evaluation_batches(
    blocks: BlockSource,
    indices: Sequence[int],
    batch_size: int,
    mine: Sequence[int],
) -> Iterator[tuple[dict[str, np.ndarray], np.ndarray]]:
    """Batches of chosen blocks in order; the last one is filled up with blocks whose targets are all masked.

    Args:
        blocks: the source of blocks.
        indices: the blocks to evaluate.
        batch_size: rows of a global batch.
        mine: the rows of each global batch that this process reads.

    Yields:
        `(batch, index_B)`: arrays [len(mine), T] and the blocks' indices, int32 [len(mine)], -1 for filler.
    """
    for start in range(0, len(indices), batch_size):
        places = [start + row for row in mine]
        taken = [indices[place] if place < len(indices) else -1 for place in places]
        masked = {name: np.zeros_like(row) for name, row in blocks[0].items()}
        masked["targets"] = np.full_like(masked["tokens"], MASKED)
        items = [masked if index < 0 else blocks[index] for index in taken]
        yield _stacked(items), np.asarray(taken, np.int32)
