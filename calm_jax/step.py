"""One update of the parameters: its state, and the function that is compiled. It knows no model: a `Task` has the loss."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import Mesh

from calm_jax.data.blocks import MASKED
from calm_jax.errors import UserError
from calm_jax.mesh import check_batch, shardings
from calm_jax.placement import laid_out
from calm_jax.tasks import Batch, Metrics, Params, Task


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
        for field in dataclasses.fields(self):
            if getattr(self, field.name) < 1:
                raise UserError(
                    f"training.{field.name}={getattr(self, field.name)} must be at least 1"
                )
        if self.batch_size % self.accumulation_steps:
            raise UserError(
                f"training.batch_size={self.batch_size} must be a multiple of training.accumulation_steps="
                f"{self.accumulation_steps}"
            )


class TrainState(NamedTuple):
    """All that a step reads and writes, and all that a resume needs: step n takes the n-th batch of the data.

    metrics: sums since the last log. nonfinite: updates skipped in a row, and in all.
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
    """One update, to be jitted. Every random number is keyed by (`key`, step, row of the batch).

    Gradients are of the summed loss, added over microbatches and divided once by the total weight,
    so that masks and splits change nothing. An update whose loss or gradient is not finite is
    skipped and counted; after `max_nonfinite_steps` in a row the state stands still.
    """

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
        parts = config.accumulation_steps
        if parts == 1:
            gradient, metrics = gradient_sums(state.params, frozen, batch, key_B)
        else:
            # Strided, so that each device has rows in every microbatch.
            micro = jax.tree.map(
                lambda x: x.reshape(rows // parts, parts, *x.shape[1:]).swapaxes(0, 1),
                (batch, key_B),
            )

            def add(total, batch_and_key):
                return jax.tree.map(
                    jnp.add, total, gradient_sums(state.params, frozen, *batch_and_key)
                ), None

            shapes = jax.eval_shape(
                gradient_sums, state.params, frozen, *jax.tree.map(lambda x: x[0], micro)
            )
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
            (gradient, metrics), _ = jax.lax.scan(add, zeros, micro)

        weight = jnp.maximum(metrics["loss"][1], 1)
        gradient = jax.tree.map(lambda g: g / weight, gradient)
        norm = optax.tree.norm(gradient)
        updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)

        finite = jnp.isfinite(norm) & jnp.isfinite(metrics["loss"][0])
        streak = jnp.where(finite, 0, state.nonfinite_streak + 1)
        stopped = state.nonfinite_streak >= config.max_nonfinite_steps
        keep = finite & ~stopped

        def choose(new: Any, old: Any) -> Any:
            return jax.tree.map(functools.partial(jnp.where, keep), new, old)

        is_text = (batch["targets"] != MASKED) & (batch["targets"] != pad_id)
        one = jnp.float32(1)
        metrics = metrics | {"gradient_norm": (norm, one), "tokens_per_step": (is_text.sum(), one)}
        # The sums start anew after each log, here and not on the host, so that a resumed run that
        # begins between two logs reports what an uninterrupted one does.
        fresh = state.step % config.log_every == 0
        metrics = jax.tree.map(
            lambda new, old: (
                jnp.where(finite, new, 0).astype(jnp.float32) + jnp.where(fresh, 0, old)
            ),
            metrics,
            state.metrics,
        )
        advanced = TrainState(
            state.step + 1,
            choose(params, state.params),
            choose(opt_state, state.opt_state),
            metrics,
            streak,
            state.nonfinite_total + ~finite,
        )
        return jax.tree.map(functools.partial(jnp.where, stopped), state, advanced)

    return step


def check_batches(name: str, config: TrainingConfig, mesh: Mesh) -> None:
    """Raises `UserError` unless batches and microbatches of a stage divide over the mesh."""
    check_batch(f"{name}.training.batch_size", config.batch_size, mesh)
    micro = config.batch_size // config.accumulation_steps
    check_batch(f"{name}.training.batch_size / accumulation_steps", micro, mesh)


def batch_shapes(config: TrainingConfig, block_tokens: int) -> Batch:
    """A step's batch, as shapes."""
    shape = jax.ShapeDtypeStruct((config.batch_size, block_tokens), jnp.int32)
    return {"tokens": shape, "targets": shape}


def fresh_state(
    task: Task, optimizer: optax.GradientTransformation, frozen: Params, batch: Batch, key: Array
) -> Callable[[], TrainState]:
    """What makes a fresh state; to be traced, as it is larger than one device."""

    def init() -> TrainState:
        params = task.init(key)
        key_B = jax.random.split(jax.random.key(0), len(batch["tokens"]))
        metrics = jax.eval_shape(task.loss, params, frozen, batch, key_B)
        metrics |= {name: (0, 0) for name in ("gradient_norm", "tokens_per_step")}
        zeros = jax.tree.map(lambda _: jnp.float32(0), metrics)
        count = jnp.int32(0)
        return TrainState(count, params, optimizer.init(params), zeros, count, count)

    return init


def init_state(
    task: Task,
    optimizer: optax.GradientTransformation,
    frozen: Params,
    batch: Batch,
    key: Array,
    mesh: Mesh,
) -> TrainState:
    """A fresh state, made in place on the mesh."""
    init = fresh_state(task, optimizer, frozen, batch, key)
    return jax.jit(init, out_shardings=shardings(jax.eval_shape(init), mesh))()


def jit_step(step: Step, state: TrainState, mesh: Mesh) -> Any:
    """A step as it is compiled: the state, of which `state` has the shapes, is replaced in place."""
    return jax.jit(step, donate_argnums=0, out_shardings=shardings(state, mesh))
