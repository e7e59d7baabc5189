"""The training loop, the same for every `Task`."""

import contextlib
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from calm_jax.cli.progress import Progress
from calm_jax.data.loader import TrainingText, training_batches
from calm_jax.errors import Interrupted
from calm_jax.evaluation.evaluator import Evaluator
from calm_jax.parallel.devices import accelerator, peak_memory
from calm_jax.parallel.mesh import global_batch, rows_here
from calm_jax.parallel.multihost import AgreedError
from calm_jax.parallel.signals import NoteSignal
from calm_jax.rng import stream
from calm_jax.tasks import Params, Task
from calm_jax.tasks.base import ratio
from calm_jax.training.checkpoint import Checkpointer
from calm_jax.training.checkpoint_files import check_step
from calm_jax.training.log import MetricsLog
from calm_jax.training.norms import by_layer, make_norms
from calm_jax.training.optimizer import OptimizerConfig, make_optimizer, make_schedule
from calm_jax.training.step import (
    TrainingConfig,
    TrainState,
    init_state,
    jit_step,
    make_step,
    state_shapes,
)

# The key of a checkpoint's `about` with the number of metrics records before it; checkpoints of earlier commits lack it.
_NUM_RECORDS = "metrics_records"


@dataclasses.dataclass(frozen=True)
class Profile:
    """Which steps to trace with JAX's profiler.

    Attributes:
      first: the first step; negative for no trace.
      last: the last step, inclusive.
      folder: where the trace is written.
    """

    first: int
    last: int
    folder: str


@dataclasses.dataclass(frozen=True)
class Stage:
    """One stage of a recipe: its task, data and settings.

    Attributes:
      name: "autoencoder" or "lm".
      task: the model and its loss.
      frozen: parameters that the task reads and does not train.
      initial: loads the parameters to start from; None for fresh ones.
      text: the blocks to train on.
      read_threads: threads that read batches ahead.
      evaluator: scores the parameters on the validation split.
      training: `config.<stage>.training`.
      optimizer: `config.<stage>.optimizer`.
      flops_per_token: FLOPs of training per token, from `calm_jax.cost.flops`; for the logged `mfu`.
      compiled: the compiled update, if there is one already (`calm_jax.planning.fitting`); None compiles it at the first step.
    """

    name: str
    task: Task
    frozen: Params
    initial: Callable[[], Params] | None
    text: TrainingText
    read_threads: int
    evaluator: Evaluator
    training: TrainingConfig
    optimizer: OptimizerConfig
    flops_per_token: float
    compiled: Callable[..., TrainState] | None = None


def training_key(seed: int, stage: str) -> jax.Array:
    """The random key of a stage's training, for `make_step`."""
    return stream(seed, f"train/{stage}")


def _all_but_params(state: TrainState) -> dict[str, Any]:
    """The training state without the parameters, which are a separate item of a checkpoint."""
    rest = state._asdict()
    del rest["params"]
    return rest


class _EvaluationStopped(Exception):
    """A signal came during an evaluation."""


class Trainer:
    """Trains a stage to its last step, resuming from its latest checkpoint if there is one."""

    def __init__(
        self,
        stage: Stage,
        seed: int,
        pad_id: int,
        part_blocks: int,
        mesh: Mesh,
        checkpointer: Checkpointer,
        log: MetricsLog,
        about: dict,
        profile: Profile,
    ):
        """Restores or initialises the state, which allocates it on the devices.

        Args:
          stage: what to train.
          seed: the recipe's seed, of which all random streams are made.
          pad_id: the pad token, which `tokens_per_step` does not count.
          part_blocks: how many blocks of the validation split are evaluated during training.
          mesh: the current mesh (`jax.set_mesh`).
          checkpointer: the stage's checkpoints.
          log: gets the metrics.
          about: facts saved in each checkpoint.
          profile: which steps to trace.
        """
        self._stage, self._part_blocks, self._mesh = stage, part_blocks, mesh
        self._checkpointer, self._log = checkpointer, log
        self._about, self._profile = about, profile
        config = stage.training
        optimizer = make_optimizer(stage.optimizer, config.num_steps)
        self._schedule = make_schedule(stage.optimizer, config.num_steps)
        of_state = stage.task, optimizer, stream(seed, f"init/{stage.name}")
        self._saved_step = checkpointer.latest_step
        if self._saved_step is not None:
            self._state = self._restored(state_shapes(*of_state))
        else:
            self._state = init_state(*of_state, mesh)
            if stage.initial is not None:
                # Random parameters are released before the others are loaded, as there may be no memory for both.
                self._state = self._state._replace(params={})
                self._state = self._state._replace(params=stage.initial())
        self._first_step = int(self._state.step)
        replicated = NamedSharding(mesh, PartitionSpec())
        self._zeros = jax.jit(
            lambda tree: jax.tree.map(jnp.zeros_like, tree), out_shardings=replicated
        )
        if self._saved_step is not None:
            check_step(checkpointer.folder, self._saved_step, self._first_step)
            if self._first_step % config.log_every == 0:
                # The checkpoint may be of another `log_every`, or of a run that failed to write its metrics.
                self._reset_sums()
        self._data = training_batches(
            stage.text.rows(seed),
            config.batch_size,
            self._first_step,
            rows_here(config.batch_size, mesh),
            stage.read_threads,
        )
        log.cut_back(stage.name, self._first_step, self._num_known_records())
        key = training_key(seed, stage.name)
        step = make_step(stage.task, optimizer, config, key, pad_id)
        self._update = stage.compiled or jit_step(step, self._state, mesh)
        norms = make_norms(stage.optimizer, config.num_steps, stage.task.stacks)
        self._norms = jax.jit(norms, out_shardings=replicated)
        self._to_host = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree), out_shardings=replicated)

    def _restored(self, shapes: TrainState) -> TrainState:
        """Restores the state of the latest checkpoint. `shapes` has the shapes of its arrays."""
        params, rest = self._checkpointer.restore(
            shapes.params, _all_but_params(shapes), self._mesh
        )
        # A resumed run counts non-finite updates in a row from zero.
        streak = jax.device_put(np.int32(0), rest["nonfinite_streak"].sharding)
        return TrainState(params=params, **rest | {"nonfinite_streak": streak})

    def _reset_sums(self) -> None:
        self._state = self._state._replace(metrics=self._zeros(self._state.metrics))

    def _num_known_records(self) -> int:
        """How many metrics records there were when the checkpoint to resume from was saved; 0 if it does not say so."""
        about = {} if self._saved_step is None else self._checkpointer.about()
        known = about.get(_NUM_RECORDS)
        return known if isinstance(known, int) else 0

    def _save(self, step: int) -> None:
        if step != self._saved_step:
            # After too many non-finite updates the state no longer changes, and must not be saved as a later step.
            self._check_finite()
            # A run that resumes from this checkpoint needs the records before it.
            self._log.sync()
            rest = _all_but_params(self._state)
            about = self._about | {_NUM_RECORDS: len(self._log.records)}
            self._checkpointer.save(step, self._state.params, rest, about)
            self._saved_step = step

    def run(self) -> Params:
        """Trains from the first step to the last.

        Returns:
          The parameters after the last step.

        Raises:
          Interrupted: after a signal, once a checkpoint is saved.
          OSError: if the output cannot be written, or the text not be read; with a single process, once a checkpoint is saved.
          UserError: if `max_nonfinite_steps` updates in a row are not finite, or a checkpoint or the metrics cannot be written.
        """
        stage, config = self._stage, self._stage.training
        self._progress = Progress(stage.name, self._first_step, config.num_steps)
        if self._first_step:
            is_past = self._first_step > config.num_steps
            past = f", past num_steps={config.num_steps}: nothing is trained" * is_past
            self._progress.note(f"resumed at step {self._first_step}{past}")
        self._logged_at = time.monotonic()
        self._logged_step, self._seconds = self._first_step, self._log.seconds(stage.name)
        self._skipped = int(self._state.nonfinite_total)
        self._profiling = False
        try:
            stop = NoteSignal()
            with stop:
                step, unwritten = self._train(stop)
                if step > self._first_step:
                    self._save(step)
                self._checkpointer.wait()
                # Asked again, as the last checkpoint of a stage may take minutes.
                signal = stop.asked()
                if signal:
                    raise Interrupted(
                        f"{signal}: stage {stage.name} is saved at step {step}; the same command resumes from there"
                    )
                if unwritten is not None:
                    raise unwritten
        finally:
            if self._profiling:
                self._stop_profile(int(self._state.step))
            # A terminal that is gone has no live line to end.
            with contextlib.suppress(OSError):
                self._progress.close()
        return self._state.params

    def _train(self, stop: NoteSignal) -> tuple[int, OSError | None]:
        """Trains to the last step, or until a signal or an `OSError` comes, such as that of output that cannot be written.

        Returns the last step that was done, and the error if there was one.
        """
        config, step = self._stage.training, self._first_step
        try:
            # The interrupted run may have ended between its checkpoint and the evaluation of that step.
            self._evaluate(step, stop)
            for step in range(self._first_step + 1, config.num_steps + 1):
                self._step(step)
                if step % config.log_every == 0 or step == config.num_steps:
                    self._write_metrics(step)
                if step % config.log_every == 0:
                    self._reset_sums()
                self._evaluate(step, stop)
                if stop.asked():
                    break
                if step % config.checkpoint_every == 0:
                    self._save(step)
        except OSError as error:
            # Printing failed (a closed pipe, a terminal that is gone), or the text could not be read. A single process saves a
            # checkpoint before it raises the error. With several processes only this one has the error, and saving needs them all.
            if jax.process_count() > 1:
                raise
            return int(self._state.step), error
        return step, None

    def _step(self, step: int) -> None:
        if self._profile.first <= step <= self._profile.last and not self._profiling:
            jax.profiler.start_trace(self._profile.folder)
            self._profiling = True
        size = self._stage.training.batch_size
        batch = global_batch(next(self._data), size, self._mesh)
        self._state = self._update(self._state, self._stage.frozen, batch)
        if self._profiling and step == self._profile.last:
            self._stop_profile(step)
        self._progress.step(step)

    def _stop_profile(self, step: int) -> None:
        jax.block_until_ready(self._state)
        jax.profiler.stop_trace()
        self._profiling = False
        self._progress.note(f"profile up to step {step} in {self._profile.folder}")

    def _write_metrics(self, step: int) -> None:
        state = self._state
        self._check_finite()
        metrics, skipped = jax.device_get(self._to_host((state.metrics, state.nonfinite_total)))
        norms = by_layer(self._norms(state.params, state.opt_state))
        values = {name: ratio(pair) for name, pair in metrics.items()}
        now = time.monotonic()
        self._seconds += now - self._logged_at
        steps_per_second = (step - self._logged_step) / (now - self._logged_at)
        values |= {
            # The schedule counts the updates that were not skipped.
            "learning_rate": float(self._schedule(step - int(skipped) - 1)),
            "skipped_updates": int(skipped),
            "tokens_per_second": values["tokens_per_step"] * steps_per_second,
            "seconds": self._seconds,
            "peak_memory_bytes": peak_memory(),
            **norms,
        }
        self._logged_at, self._logged_step = now, step
        device = accelerator(jax.devices()[0].device_kind)
        if device is not None:
            # Model FLOPs utilisation. Pad and masked tokens count, because they are computed too.
            tokens = self._stage.training.batch_size * self._stage.text.block_tokens
            achieved = self._stage.flops_per_token * tokens * steps_per_second
            values["mfu"] = achieved / (device.flops * self._mesh.size)
        self._log.write(self._stage.name, "train", step, values)
        self._progress.values(step, values)
        if skipped > self._skipped:
            self._progress.note(
                f"skipped {skipped - self._skipped} update(s) up to step {step}, because loss or gradient was not finite"
            )
            self._skipped = skipped

    def _evaluate(self, step: int, stop: NoteSignal) -> None:
        """Evaluates a part of the validation split every `eval_every` steps, except after the last step.

        After the last step the caller evaluates the whole split. A signal stops an evaluation, so that the checkpoint is
        saved soon; the resumed run evaluates that step again.
        """
        config, name = self._stage.training, self._stage.name
        if step % config.eval_every or not 0 < step < config.num_steps:
            return
        # Updates that are under way count as training.
        jax.block_until_ready(self._state)
        began = time.monotonic()
        if self._log.find(name, "validation_part", step) is None:

            def stop_if_signalled() -> None:
                if stop.asked():
                    raise _EvaluationStopped

            with contextlib.suppress(_EvaluationStopped):
                values = self._stage.evaluator(
                    self._state.params, self._stage.frozen, self._part_blocks, stop_if_signalled
                )
                self._log.write(name, "validation_part", step, values)
        # Neither `tokens_per_second` nor `seconds` counts evaluation time.
        self._logged_at += time.monotonic() - began

    def _check_finite(self) -> None:
        """Waits for the latest update. Raises `AgreedError` if too many in a row were not finite."""
        counts = self._to_host((self._state.nonfinite_streak, self._state.step))
        streak, step = (int(count) for count in jax.device_get(counts))
        if streak < self._stage.training.max_nonfinite_steps:
            return
        self._checkpointer.wait()
        kept, name = self._checkpointer.latest_step, self._stage.name
        good = (
            "no checkpoint was written yet"
            if kept is None
            else f"the checkpoint of step {kept} is good"
        )
        raise AgreedError(
            f"{name}: loss or gradient was not finite in {streak} updates in a row, steps {step - streak + 1} to {step}; "
            f"{good}. A lower {name}.optimizer.learning_rate or {name}.optimizer.max_grad_norm may help"
        )
