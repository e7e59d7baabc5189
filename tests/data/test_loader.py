"""Blocks to batches: epochs, seeds, processes, and filler in evaluation."""

import itertools

import numpy as np
import pytest

from calm_jax.data.loader import TrainingText, evaluation_batches, training_batches
from calm_jax.data.packing import MASKED, Blocks
from tests.data.test_packing import block_config, packed


def numbered(num_blocks: int) -> Blocks:
    """Blocks of two tokens whose first token is the block's index."""
    tokens = np.stack([np.arange(num_blocks), np.full(num_blocks, 7)], axis=1).astype(np.int32)
    return Blocks(tokens, np.full(len(tokens), tokens.shape[1]))


def take(iterator, number: int) -> list[np.ndarray]:
    """The blocks' indices in each of the next batches."""
    return [batch["tokens"][:, 0] for batch in itertools.islice(iterator, number)]


def batches_of(blocks, batch_size, first=0, seed=0, process_index=0, process_count=1):
    rows = TrainingText([blocks], ()).rows(seed)
    return training_batches(
        rows, batch_size, first, part(batch_size, process_index, process_count), 0
    )


def part(batch_size, process_index, process_count):
    """The rows of a batch that one process reads, if all read equally many."""
    rows = batch_size // process_count
    return range(process_index * rows, (process_index + 1) * rows)


def test_batches_have_tokens_and_targets():
    batch = next(batches_of(packed([range(17)], block_config()), 3))
    assert sorted(batch) == ["targets", "tokens"]
    assert batch["tokens"].shape == batch["targets"].shape == (3, 8)
    assert (batch["targets"] == MASKED).sum() == 6
    valid = batch["targets"] != MASKED
    np.testing.assert_array_equal(batch["targets"][valid], batch["tokens"][valid])


@pytest.mark.parametrize(
    "batch_size",
    [
        1,
        2,
        4,
        10,
        16,
    ],
)
def test_each_epoch_covers_every_block_once_in_a_new_order(batch_size):
    """Also where an epoch ends inside a batch, and where a batch is larger than an epoch."""
    batches = take(batches_of(numbered(10), batch_size), -(-40 // batch_size))
    epochs = np.concatenate(batches)[:40].reshape(4, 10)
    np.testing.assert_array_equal(np.sort(epochs), np.tile(np.arange(10), (4, 1)))
    assert len({tuple(epoch) for epoch in epochs.tolist()}) == 4
    assert tuple(range(10)) not in {tuple(epoch) for epoch in epochs.tolist()}


def test_the_order_depends_on_the_seed_alone():
    first, same, other = (take(batches_of(numbered(10), 5, seed=s), 4) for s in (0, 0, 1))
    np.testing.assert_array_equal(first, same)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize("now", [1, 2, 4])
@pytest.mark.parametrize("then", [1, pytest.param(2, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("done", [0, pytest.param(1, marks=pytest.mark.slow), 7])
def test_a_resumed_run_gets_the_remaining_batches_on_any_number_of_processes(done, then, now):
    """7 batches of 4 end in the third epoch of 10 blocks."""

    def all_processes(count, first, number):
        parts = [
            take(batches_of(numbered(10), 4, first, 3, index, count), number)
            for index in range(count)
        ]
        return np.concatenate(parts, axis=1)

    whole = all_processes(1, 0, done + 6)
    np.testing.assert_array_equal(all_processes(then, 0, done + 2)[:done], whole[:done])
    np.testing.assert_array_equal(all_processes(now, done, 6), whole[done:])


@pytest.mark.parametrize("process_count", [2, 4])
def test_batches_of_all_processes_side_by_side_are_those_of_one(process_count):
    one = take(batches_of(numbered(10), 8, seed=1), 7)
    parts = [
        take(batches_of(numbered(10), 8, 0, 1, index, process_count), 7)
        for index in range(process_count)
    ]
    assert {len(part) for part in itertools.chain(*parts)} == {8 // process_count}
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), one)


@pytest.mark.parametrize("indices", [range(10), [0, 3, 6], [5], range(8)])
@pytest.mark.parametrize("process_count", [1, 2])
def test_evaluation_covers_each_index_once_with_masked_filler(indices, process_count):
    blocks = numbered(10)
    processes = [
        list(evaluation_batches(blocks, indices, 4, part(4, index, process_count)))
        for index in range(process_count)
    ]
    assert {len(batches) for batches in processes} == {-(-len(indices) // 4)}
    seen = []
    for side_by_side in zip(*processes, strict=True):
        for batch, index in side_by_side:
            assert batch["tokens"].shape == batch["targets"].shape == (4 // process_count, 2)
            real = index >= 0
            np.testing.assert_array_equal(batch["tokens"][real], blocks.tokens[index[real]])
            np.testing.assert_array_equal(batch["targets"][real], blocks.tokens[index[real]])
            assert (index[~real] == -1).all()
            assert (batch["targets"][~real] == MASKED).all()
        seen += np.concatenate([index for _, index in side_by_side]).tolist()
    assert [index for index in seen if index >= 0] == list(indices)
    assert len(seen) == -(-len(indices) // 4) * 4
