"""Evaluation of a task over a split: sums over each batch on device, added up on the host."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from calm_jax.brier import ORDERS, Protocol
from calm_jax.cli.progress import Countdown
from calm_jax.data.loader import evaluation_batches
from calm_jax.data.packing import BlockSource
from calm_jax.errors import UserError, require_at_least, require_seed
from calm_jax.parallel import multihost
from calm_jax.parallel.mesh import divisible, global_batch, rows_here
from calm_jax.parallel.signals import poll
from calm_jax.rng import stream
from calm_jax.sampling.samplers import SAMPLERS, check_sampler
from calm_jax.tasks import Params, Task


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """`config.eval`; every key is described in `configs/common.py`."""

    batch_size: int
    num_samples: int
    inner_starts: bool
    skip_last_start: bool
    context_tokens: int
    block_tokens: int
    start_every: int
    part_blocks: int
    temperatures: tuple[float, ...]
    samplers: tuple[str, ...]
    candidates: tuple[int, ...]
    plane_contexts: int
    seed: int

    def __post_init__(self):
        if not 1 <= self.context_tokens <= self.block_tokens - ORDERS:
            raise UserError(
                f"eval.context_tokens={self.context_tokens} must be at least 1, and at least {ORDERS} below "
                f"eval.block_tokens={self.block_tokens}, so that an n-gram follows the context"
            )
        require_at_least(2, self, "eval.", "num_samples")
        require_seed("eval.seed", self.seed)
        names = ("batch_size", "part_blocks", "start_every", "plane_contexts")
        require_at_least(1, self, "eval.", *names)
        for name in self.samplers:
            check_sampler("eval.samplers", name)
        if not self.samplers:
            raise UserError(f"eval.samplers=() must hold at least one of {', '.join(SAMPLERS)}")
        if min(self.candidates, default=0) < 2:
            raise UserError(
                f"eval.candidates={self.candidates} must hold at least one number, and each must be at least 2"
            )

    @property
    def published(self) -> Protocol:
        """The protocol of the published scores, if `num_samples` and `inner_starts` have their defaults: blocks as in training, n-grams
        from every chunk but the first. With K < 4 the published code also skips each block's last start (`skip_last_start`)."""
        return Protocol(
            self.num_samples,
            inner_starts=self.inner_starts,
            skip_last_start=self.skip_last_start,
        )

    @property
    def equal_context(self) -> Protocol:
        """The same n-grams after the same context for models of every K, so that their scores can be compared."""
        return Protocol(
            self.num_samples,
            first_token=self.context_tokens,
            start_every=self.start_every,
            inner_starts=True,
        )


def part_of(num_blocks: int, part: int) -> Sequence[int]:
    """Indices of at most `part` of `num_blocks` blocks, evenly spaced."""
    if part >= num_blocks:
        return range(num_blocks)
    return [index * num_blocks // part for index in range(part)]


def batch_size(config: EvalConfig, mesh: Mesh) -> int:
    """The rows of a batch: `eval.batch_size`, rounded up so that each device has as many. The last batch is padded in any case."""
    return divisible(config.batch_size, mesh)


def jit_sums(name: str, task: Task, config: EvalConfig, mesh: Mesh) -> jax.stages.Wrapped:
    """The jitted sums of a task over a batch: `sums(params, frozen, batch)`; `batch` has the blocks' indices as "index"."""

    @functools.partial(jax.jit, out_shardings=NamedSharding(mesh, PartitionSpec()))
    def sums(params: Params, frozen: Params, batch: dict):
        batch = dict(batch)
        index_B = batch.pop("index")
        key = stream(config.seed, f"evaluate/{name}")
        key_B = jax.vmap(jax.random.fold_in, (None, 0))(key, index_B)
        return task.evaluate(params, frozen, batch, key_B)

    return sums


def add_sums(total: Any, new: Any) -> Any:
    """Trees of sums, added up on the host in float64; `total` is None at first."""
    new = jax.tree.map(lambda x: np.asarray(x, np.float64), jax.device_get(new))
    return new if total is None else jax.tree.map(np.add, total, new)


class Evaluator:
    """Evaluates one task on one split; compiled once.

    The random numbers of a block depend on `eval.seed`, the evaluator's name and the block's index alone, not on how
    blocks are batched or divided over devices.

    Args:
        name: the name of the evaluation, which seeds its random numbers.
        task: the task whose `evaluate` and `report` are used.
        blocks: the split.
        config: `config.eval`.
        mesh: the devices.
    """

    def __init__(self, name: str, task: Task, blocks: BlockSource, config: EvalConfig, mesh: Mesh):
        self._name, self._task, self._blocks, self._mesh = name, task, blocks, mesh
        self._batch_size = batch_size(config, mesh)
        self._sums = jit_sums(name, task, config, mesh)

    def __call__(
        self,
        params: Params,
        frozen: Params,
        part: int | None = None,
        between: Callable[[], Any] = poll,
    ) -> dict[str, float]:
        """Evaluates the task.

        Args:
            params: the task's trained parameters.
            frozen: the task's frozen parameters.
            part: how many evenly spaced blocks to evaluate; None for the whole split.
            between: called after each batch is started; the devices may still compute the last two.

        Returns:
            The task's report.
        """
        indices = part_of(len(self._blocks), len(self._blocks) if part is None else part)
        # Parts are scored during training, which shows its own progress line.
        shown = part is None and multihost.is_primary()
        total = pending = None
        size = self._batch_size
        mine = rows_here(size, self._mesh)
        with Countdown(f"{self._name}: evaluating", len(indices), "blocks", shown) as countdown:
            for batch, index in evaluation_batches(self._blocks, indices, size, mine):
                placed = global_batch(batch | {"index": index}, size, self._mesh)
                # The devices compute while the host waits for the batch before, and while it packs the next one.
                started = self._sums(params, frozen, placed)
                if pending is not None:
                    total = add_sums(total, pending)
                pending = started
                countdown.add(size)
                between()
            total = add_sums(total, pending)
        return self._task.report(total)
