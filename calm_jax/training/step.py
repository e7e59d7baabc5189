"""One update of the parameters: the training state, and the function that is compiled."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import Mesh, NamedSharding

from calm_jax.data.packing import MASKED, BlockConfig
from calm_jax.errors import UserError, require_at_least
from calm_jax.parallel.constraints import laid_out
from calm_jax.parallel.devices import target_device
from calm_jax.parallel.mesh import BATCH, check_batch, sharded_shapes, shardings, with_layout
from calm_jax.tasks import Batch, Metrics, Params, Task

# XLA's CPU backend (as of jaxlib 0.12) removes optimization barriers before it joins equal operations. That joins what
# rematerialisation computes again with what was computed before, so that everything is kept. Without the pass that removes
# them, barriers stay.
_CPU_OPTIONS = {"xla_disable_hlo_passes": "cse_barrier_expander"}


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """`config.<stage>.training`; every key is described in `configs/common.py`."""

    num_steps: int
    batch_size: int
    accumulation_steps: int
    log_every: int
    eval_every: int
    checkpoint_every: int
    max_nonfinite_steps: int

    def __post_init__(self):
        every = ("log_every", "eval_every", "checkpoint_every")
        names = ("num_steps", "batch_size", *every, "max_nonfinite_steps")
        require_at_least(1, self, "training.", *names)
        require_at_least(0, self, "training.", "accumulation_steps")
        if self.accumulation_steps and self.batch_size % self.accumulation_steps:
            raise UserError(
                f"training.batch_size={self.batch_size} must be a multiple of training.accumulation_steps="
                f"{self.accumulation_steps}"
            )

    @property
    def fewest_rows(self) -> int:
        """The rows of a microbatch; those of the whole batch while `accumulation_steps` is 0, to be chosen automatically."""
        return self.batch_size // max(1, self.accumulation_steps)


class TrainState(NamedTuple):
    """Everything that an update changes and a resume restores.

    Attributes:
      step: number of updates so far, skipped ones included; update n takes the n-th batch of the data.
      params: the parameters that are trained.
      opt_state: the optimizer's state.
      metrics: a (sum, weight) pair for each name, added up since the last multiple of `log_every`. The step only adds; the loop resets them.
      nonfinite_streak: number of latest updates in a row that were skipped.
      nonfinite_total: number of all updates that were skipped.
    """

    step: Array
    params: Params
    opt_state: Any
    metrics: Metrics
    nonfinite_streak: Array
    nonfinite_total: Array


Step = Callable[[TrainState, Params, Batch], TrainState]


def make_step(
    task: Task,
    optimizer: optax.GradientTransformation,
    config: TrainingConfig,
    key: Array,
    pad_id: int,
) -> Step:
    """The function of one update, to be jitted.

    Every random number is keyed by (`key`, step, row of the batch). The gradient is that of the summed loss, added over
    microbatches and divided once by the total weight, so that the split into microbatches and devices changes nothing but
    rounding. An update whose loss or gradient is not finite is skipped and counted. After
    `max_nonfinite_steps` skipped updates in a row the state no longer changes; the loop then ends the run with an error.

    Args:
      task: defines the loss.
      optimizer: made by `make_optimizer`.
      config: `config.<stage>.training`, with the number of microbatches (`accumulation_steps` is not 0).
      key: the random key of the stage's training.
      pad_id: the pad token, which `tokens_per_step` does not count.

    Returns:
      A function (state, frozen parameters, batch) -> state. The frozen parameters are those that the task does not
      train, such as the autoencoder's. The batch is {"tokens", "targets"}, int32 [batch_size, block_tokens] each, and
      "segments" of the same shape where documents are isolated.
    """

    assert config.accumulation_steps, "chosen by calm_jax.planning.fitting"

    def gradient_sums(params: Params, frozen: Params, batch: Batch, key_B: Array):
        def loss_sum(params: Params) -> tuple[Array, Metrics]:
            metrics = task.loss(params, frozen, batch, key_B)
            return metrics["loss"][0], metrics

        gradient, metrics = jax.grad(loss_sum, has_aux=True)(params)
        return laid_out(gradient), metrics

    def step(state: TrainState, frozen: Params, batch: Batch) -> TrainState:
        rows = len(batch["tokens"])
        step_key = jax.random.fold_in(key, state.step)
        key_B = jax.vmap(jax.random.fold_in, (None, 0))(step_key, jnp.arange(rows))
        parts, fixed = config.accumulation_steps, (state.params, frozen)
        if parts == 1:
            gradient, metrics = gradient_sums(*fixed, batch, key_B)
        else:
            # Microbatches take every n-th row, so that each device has rows in every microbatch.
            micro = jax.tree.map(
                lambda x: x.reshape(rows // parts, parts, *x.shape[1:]).swapaxes(0, 1),
                (batch, key_B),
            )

            # Jitted, so that the shapes and the loop share one trace; inlined, so that the program does not change.
            one_trace = jax.jit(gradient_sums, inline=True)

            def add(total, batch_and_key):
                return jax.tree.map(jnp.add, total, one_trace(*fixed, *batch_and_key)), None

            shapes = jax.eval_shape(one_trace, *fixed, *jax.tree.map(lambda x: x[0], micro))
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
            (gradient, metrics), _ = jax.lax.scan(add, zeros, micro)

        # A product, which XLA for CPUs fuses into what uses it, where it would write a quotient to memory.
        per_target = 1 / jnp.maximum(metrics["loss"][1], 1)
        gradient = jax.tree.map(lambda g: g * per_target, gradient)
        norm = optax.tree.norm(gradient)
        # Then the new parameters are finite, too (`OptimizerConfig`).
        finite = jnp.isfinite(norm) & jnp.isfinite(metrics["loss"][0])
        streak = jnp.where(finite, 0, state.nonfinite_streak + 1)
        goes_on = state.nonfinite_streak < config.max_nonfinite_steps

        def choose(condition: Array, new: Any, old: Any) -> Any:
            return jax.tree.map(functools.partial(jnp.where, condition), new, old)

        # Jitted and inlined for one trace, as above.
        @functools.partial(jax.jit, inline=True)
        def updated(gradient: Params, params: Params, opt_state: Any, is_applied: Array) -> Any:
            updates, new = optimizer.update(gradient, opt_state, params)
            moved = optax.apply_updates(params, updates)
            return choose(is_applied, (moved, new), (params, opt_state))

        given, is_applied = (gradient, state.params), finite & goes_on
        params, opt_state = updated(*given, state.opt_state, is_applied)
        if target_device().platform == "cpu":
            # XLA for CPUs has a program for each new array, which reads the old ones. The parameters come first here, and the
            # optimizer's state is computed from what the barrier returns, so that each array is written in its place. Otherwise
            # the state could be written first, and XLA would copy the old one.
            old_opt_state, params = jax.lax.optimization_barrier((state.opt_state, params))
            _, opt_state = updated(*given, old_opt_state, is_applied)

        is_text = (batch["targets"] != MASKED) & (batch["targets"] != pad_id)
        one = jnp.float32(1)
        metrics = metrics | {"gradient_norm": (norm, one), "tokens_per_step": (is_text.sum(), one)}
        # A run that resumes between two logs restores the sums, and reports the same values as an uninterrupted one.
        metrics = jax.tree.map(
            lambda new, old: jnp.where(finite, new, 0).astype(jnp.float32) + old,
            metrics,
            state.metrics,
        )
        step, metrics, streak, total = choose(
            goes_on,
            (state.step + 1, metrics, streak, state.nonfinite_total + ~finite),
            (state.step, state.metrics, state.nonfinite_streak, state.nonfinite_total),
        )
        return TrainState(step, params, opt_state, metrics, streak, total)

    return step


def check_batches(name: str, config: TrainingConfig, mesh: Mesh) -> None:
    """Raises `UserError` unless the batches and microbatches of stage `name` divide over the mesh."""
    check_batch(f"{name}.training.batch_size", config.batch_size, mesh)
    check_batch(f"{name}.training.batch_size / accumulation_steps", config.fewest_rows, mesh)


def batch_shapes(config: TrainingConfig, block_tokens: int) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes of a step's batch, without "segments"."""
    shape = jax.ShapeDtypeStruct((config.batch_size, block_tokens), jnp.int32)
    return {"tokens": shape, "targets": shape}


class StepProgram(NamedTuple):
    """A jitted step, and the shapes of its arguments with their shardings: all that is needed to compile it.

    Attributes:
      step: takes and returns what `Step` does; the memory of the state is reused for the new one.
      arguments: the shapes of the step's arguments, (state, frozen parameters, batch).
    """

    step: Any
    arguments: tuple[TrainState, Params, Batch]


def step_program(
    task: Task,
    optimizer: optax.GradientTransformation,
    config: TrainingConfig,
    data: BlockConfig,
    frozen: Params,
    key: Array,
    pad_id: int,
    mesh: Mesh,
) -> StepProgram:
    """The step of a stage on the mesh, which must be the current one (`jax.set_mesh`).

    Args:
      task, optimizer, config, key, pad_id: as in `make_step`.
      data: `config.<stage>.data`.
      frozen: arrays or shapes of the parameters that the task does not train.
      mesh: the devices.
    """
    batch = batch_shapes(config, data.block_tokens)
    if data.isolate_documents:
        batch["segments"] = batch["tokens"]
    state = state_shapes(task, optimizer, key)
    step = jit_step(make_step(task, optimizer, config, key, pad_id), state, mesh)
    rows = {name: NamedSharding(mesh, BATCH) for name in batch}
    arguments = sharded_shapes(state, mesh), sharded_shapes(frozen, mesh), with_layout(batch, rows)
    return StepProgram(step, arguments)


def state_shapes(task: Task, optimizer: optax.GradientTransformation, key: Array) -> TrainState:
    """The shapes of a stage's state.

    Args:
      task, optimizer: as in `make_step`.
      key: the random key of the parameters.
    """
    return jax.eval_shape(functools.partial(_initial_state, task, optimizer), key)


def _initial_state(task: Task, optimizer: optax.GradientTransformation, key: Array) -> TrainState:
    params = task.init(key)
    names = [*task.metric_names, "gradient_norm", "tokens_per_step"]
    zeros = {name: (jnp.float32(0), jnp.float32(0)) for name in names}
    count = jnp.int32(0)
    return TrainState(count, params, optimizer.init(params), zeros, count, count)


def init_state(
    task: Task, optimizer: optax.GradientTransformation, key: Array, mesh: Mesh
) -> TrainState:
    """The initial state. Each device makes its own shards of it, as the whole may be too large for one.

    The arguments are those of `state_shapes`, and the mesh.
    """
    # One function for both, as JAX remembers what it traced, and tracing takes a second.
    make = functools.partial(_initial_state, task, optimizer, key)
    return jax.jit(make, out_shardings=shardings(jax.eval_shape(make), mesh))()


def jit_step(step: Step, state: TrainState, mesh: Mesh) -> Any:
    """Jits a step; the memory of the state, which has the shapes of `state`, is reused for the new state."""
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    return jax.jit(
        step,
        donate_argnums=0,
        out_shardings=shardings(state, mesh),
        compiler_options=_CPU_OPTIONS if on_cpu else None,
    )
