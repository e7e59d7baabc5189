"""The training loop: accumulation, several devices, non-finite updates, resumed metrics."""

import dataclasses
import errno
import functools
import gc
import json
import os
import pathlib
import re
import signal
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from calm_jax.build import make_autoencoder_task, make_lm_task
from calm_jax.cli.progress import Progress
from calm_jax.config import Config, resolve
from calm_jax.data.loader import TrainingText, training_batches
from calm_jax.data.packing import MASKED, Blocks
from calm_jax.data.tokenizers import Vocabulary
from calm_jax.errors import Interrupted, UserError
from calm_jax.models.heads import HEADS
from calm_jax.parallel.devices import Accelerator
from calm_jax.parallel.mesh import global_batch, make_mesh, shardings
from calm_jax.tasks.base import ratio
from calm_jax.training import loop as train_lib
from calm_jax.training.checkpoint import Checkpointer
from calm_jax.training.log import MetricsLog
from calm_jax.training.loop import Profile, Stage, Trainer
from calm_jax.training.optimizer import make_optimizer
from calm_jax.training.step import init_state, make_step
from tests.simulated_devices import run_program
from tests.tiny_recipe import get_config
from tests.workdirs import params

KEY = jax.random.key(0)


# Of the byte tokenizer.
BYTES = Vocabulary(vocab_size=259, pad_id=258)


def tiny_config(arguments: str = "") -> Config:
    return resolve(get_config(f"*.txt,{arguments}"))


def make_batch(rows: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 256, (rows, 32)).astype(np.int32)
    targets = tokens.copy()
    targets[0, 8:16] = MASKED
    targets[rows - 1, 28:] = MASKED
    return {"tokens": tokens, "targets": targets}


@functools.cache
def make_stage(name: str, config: Config):
    """The task of a stage and its frozen parameters."""
    autoencoder = make_autoencoder_task(config, BYTES)
    if name == "autoencoder":
        return autoencoder, {}
    frozen = {}
    if config.has_autoencoder:
        frozen = {"params": jax.jit(autoencoder.init)(jax.random.key(5))}
    return make_lm_task(config, BYTES), frozen


def run_steps(
    name: str, steps: int, mesh_sizes: tuple[int, ...] = (1, 1, 1), initial=None, **training
):
    """The states before and after each of some steps on batches of 8 rows, and each step's metrics.

    name: a stage, with arguments of the recipe after a comma, as in "lm,head=flow". initial: the state to begin with, on any
      devices; None: a new one, which takes a second to trace.
    """
    name, _, arguments = name.partition(",")
    config = tiny_config(arguments)
    stage = getattr(config, name)
    task, frozen = make_stage(name, config)
    settings = dataclasses.replace(stage.training, batch_size=8, **training)
    mesh_config = dataclasses.replace(
        config.mesh, data=mesh_sizes[0], fsdp=mesh_sizes[1], tensor=mesh_sizes[2]
    )
    mesh = make_mesh(mesh_config, jax.devices()[: int(np.prod(mesh_sizes))])
    # Without warm-up, so that the first step changes the parameters, and at a rate at which training is stable: at the
    # recipe's 0.02 differences by rounding grow beyond the tolerance.
    rate = dataclasses.replace(stage.optimizer, warmup_steps=0, learning_rate=3e-3)
    optimizer = make_optimizer(rate, 100)
    with jax.set_mesh(mesh):
        frozen = jax.device_put(frozen, shardings(frozen, mesh))
        if initial is None:
            state = init_state(task, optimizer, KEY, mesh)
        else:
            state = jax.device_put(initial, shardings(initial, mesh))
        step = jax.jit(
            make_step(task, optimizer, settings, KEY, BYTES.pad_id),
            out_shardings=shardings(state, mesh),
        )
        states, metrics = [state], []
        for seed in range(steps):
            # Without the sums of the steps before.
            given = states[-1]._replace(metrics=jax.tree.map(jnp.zeros_like, states[-1].metrics))
            states.append(step(given, frozen, global_batch(make_batch(8, seed), 8, mesh)))
            values = jax.device_get(states[-1].metrics)
            metrics.append({key: ratio(pair) for key, pair in values.items()})
    return states, metrics


@pytest.mark.slow
@pytest.mark.parametrize("name", ["autoencoder", "lm,token_predictor"])
def test_gradient_accumulation_equals_the_whole_batch(name):
    """Also with unequal weights of the microbatches, which masked chunks cause."""
    states, whole = run_steps(name, 7)
    _, accumulated = run_steps(name, 7, initial=states[0], accumulation_steps=4)
    for one, other in zip(whole, accumulated, strict=True):
        for key in one:
            assert other[key] == pytest.approx(one[key], rel=1e-4), key


EIGHT_DEVICES = """
import json, sys
import jax
import numpy as np
from tests.training.test_loop import MESHES, ON_MESHES, first_moments, run_steps
assert len(jax.devices()) == 8
by_name = {}
for name in ON_MESHES:
    by_name[name], initial = [], None
    for number, sizes in enumerate(MESHES[: ON_MESHES[name]]):
        states, metrics = run_steps(name, 12, sizes, initial)
        # One device and the mesh with all three axes each draw an initial state; the other meshes begin with a copy of the latter's.
        initial = states[0] if number else None
        np.savez(f"{sys.argv[1]}/{name} {number}.npz", **first_moments(states[1]))
        by_name[name].append([values["loss"] for values in metrics])
print(json.dumps(by_name))
"""
# The first is one device.
MESHES = ((1, 1, 1), (2, 2, 2), (1, 8, 1), (8, 1, 1))
# How many of the meshes each is trained on. To save time, the autoencoder and the other heads train on one device and on the mesh with
# three axes alone. The energy head is that of "lm,token_predictor".
ON_MESHES = {f"lm,head={head}": 2 for head in HEADS if head != "energy"} | {
    "autoencoder": 2,
    "lm,token_predictor": len(MESHES),
}


def first_moments(state) -> dict[str, np.ndarray]:
    """Adam's first moments by path; after one step they are the gradient times a factor."""
    leaves = jax.tree_util.tree_leaves_with_path(state.opt_state)
    named = {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
    return {name: np.asarray(leaf) for name, leaf in named.items() if ".mu" in name}


@pytest.fixture(scope="module")
def eight_devices(tmp_path_factory) -> tuple[dict[str, list[list[float]]], pathlib.Path]:
    """The losses on every mesh by name, and the folder of the gradients, from one process for all."""
    folder = tmp_path_factory.mktemp("eight_devices")
    return json.loads(run_program(8, EIGHT_DEVICES, str(folder)).stdout), folder


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_MESHES)
def test_training_on_eight_devices_equals_one(name, eight_devices):
    """Loss and gradient of step 1 to a relative 1e-5, the losses of 12 steps to 1e-3."""
    losses, folder = eight_devices
    single, *others = losses[name]
    gradients = [np.load(folder / f"{name} {number}.npz") for number in range(ON_MESHES[name])]
    whole = np.sqrt(sum((gradients[0][path] ** 2).sum() for path in gradients[0]))
    assert len(gradients[0].files) > 5 and whole > 0
    for losses, gradient in zip(others, gradients[1:], strict=True):
        assert losses[0] == pytest.approx(single[0], rel=1e-5)
        assert losses == pytest.approx(single, rel=1e-3)
        for path in gradient:
            one = gradients[0][path]
            # The error of a small gradient is compared with a thousandth of the whole gradient's norm.
            size = max(np.linalg.norm(one), 1e-3 * whole)
            assert np.linalg.norm(gradient[path] - one) <= 1e-5 * size, path


@dataclasses.dataclass(frozen=True)
class Fragile:
    """A task with a quadratic loss, which on a batch that holds the token 255 is NaN or overflows in bfloat16."""

    overflows: bool = False
    stacks: ClassVar[tuple] = ()
    metric_names: ClassVar[tuple] = ("loss",)

    def init(self, key):
        return {"kernel": jnp.ones(2)}

    def loss(self, params, frozen, batch, key_B):
        bad = (batch["tokens"] == 255).any()
        dtype, worst = (jnp.bfloat16, 3e38) if self.overflows else (jnp.float32, jnp.nan)
        value = (params["kernel"] ** 2).sum().astype(dtype) * jnp.where(bad, worst, 1).astype(dtype)
        return {"loss": (value, jnp.float32(1))}


def fragile_run(bad_steps: set[int], steps: int, max_nonfinite_steps: int, overflows: bool = False):
    """The states before and after each step of training `Fragile`, with non-finite losses at `bad_steps`."""
    config = tiny_config()
    settings = dataclasses.replace(config.lm.training, max_nonfinite_steps=max_nonfinite_steps)
    task, optimizer = Fragile(overflows), make_optimizer(config.lm.optimizer, 100)
    mesh = make_mesh(config.mesh)
    good = make_batch(4)
    good["tokens"] %= 200
    bad = {**good, "tokens": np.full_like(good["tokens"], 255)}
    state = init_state(task, optimizer, KEY, mesh)
    step = jax.jit(make_step(task, optimizer, settings, KEY, BYTES.pad_id))
    states = [state]
    for number in range(1, steps + 1):
        states.append(step(states[-1], {}, bad if number in bad_steps else good))
    return states


@pytest.mark.parametrize("accumulation_steps", [1, 4])
def test_loss_and_update_are_traced_once_for_their_step_and_not_for_a_new_state(accumulation_steps):
    calls = []

    class Counting(Fragile):
        def loss(self, *arguments):
            calls.append(1)
            return super().loss(*arguments)

    config = tiny_config()
    settings = dataclasses.replace(config.lm.training, accumulation_steps=accumulation_steps)
    task, optimizer = Counting(), make_optimizer(config.lm.optimizer, 100)
    batch = make_batch(4)
    updates = []

    def update(*arguments):
        updates.append(1)
        return optimizer.update(*arguments)

    counting = optax.GradientTransformation(optimizer.init, update)
    state = init_state(task, optimizer, KEY, make_mesh(config.mesh))
    assert not calls
    jax.jit(make_step(task, counting, settings, KEY, BYTES.pad_id)).lower(state, {}, batch)
    assert len(calls) == len(updates) == 1


@pytest.mark.parametrize("name", ["autoencoder", "lm", "lm,token_predictor", "lm,head=softmax"])
def test_a_task_names_the_metrics_of_its_loss(name):
    stage, _, arguments = name.partition(",")
    task, frozen = make_stage(stage, tiny_config(arguments))
    params = jax.eval_shape(task.init, KEY)
    metrics = jax.eval_shape(task.loss, params, frozen, make_batch(4), jax.random.split(KEY, 4))
    assert set(metrics) == set(task.metric_names)


@pytest.mark.parametrize("overflows", [False, True], ids=["nan", "overflow in bfloat16"])
def test_a_nonfinite_update_is_skipped_and_counted(overflows):
    states = fragile_run({3, 4}, 6, 10, overflows)
    same = jax.tree.map(
        lambda a, b: bool((a == b).all()),
        (states[4].params, states[4].opt_state),
        (states[2].params, states[2].opt_state),
    )
    assert all(jax.tree.leaves(same))
    assert [int(state.nonfinite_streak) for state in states] == [0, 0, 0, 1, 2, 0, 0]
    assert int(states[-1].nonfinite_total) == 2
    assert float(states[-1].params["kernel"][0]) < float(states[2].params["kernel"][0])
    assert np.isfinite(jax.device_get(jax.tree.leaves(states[-1].metrics))).all()


def test_the_state_stops_changing_after_too_many_nonfinite_updates():
    states = fragile_run({3, 4, 5}, 8, 3)
    last = states[-1]
    assert (int(last.step), int(last.nonfinite_streak)) == (5, 3)
    assert np.array_equal(last.params["kernel"], states[2].params["kernel"])


def test_poisoned_batches_are_skipped_counted_and_reported(tmp_path, capsys):
    """Training goes on over them; checkpoints are finite and metrics.jsonl has their number."""
    config = tiny_config()
    tokens = np.ones((20, 32), np.int32)
    tokens[[3, 11]] = 255
    text = TrainingText([Blocks(tokens, np.full(20, 32))], ())
    training = dataclasses.replace(
        config.lm.training,
        batch_size=2,
        num_steps=20,
        log_every=5,
        eval_every=1000,
        checkpoint_every=10,
    )
    batches = training_batches(text.rows(0), 2, 0, [0, 1], 0)
    poisoned = [(next(batches)["tokens"] == 255).any() for _ in range(20)]
    assert 2 <= sum(poisoned) <= 4
    stage = Stage("lm", Fragile(), {}, None, text, 0, None, training, config.lm.optimizer, 1e6)
    mesh, log = make_mesh(config.mesh), MetricsLog(tmp_path)
    checkpointer = Checkpointer(tmp_path / "lm", 2)
    none = Profile(-1, -1, "")
    with jax.set_mesh(mesh):
        Trainer(stage, 0, BYTES.pad_id, 1, mesh, checkpointer, log, {}, none).run()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    reported = [json.loads(line)["skipped_updates"] for line in lines]
    assert reported == [sum(poisoned[:step]) for step in (5, 10, 15, 20)]
    notes = re.findall(
        r"lm: skipped (\d+) update\(s\) up to step \d+, because ", capsys.readouterr().out
    )
    assert sum(map(int, notes)) == sum(poisoned)
    for step in (10, 20):
        kernel = params(tmp_path, "lm", step)["kernel"]
        assert np.isfinite(kernel).all() and not np.array_equal(kernel, np.ones(2))


def test_training_that_stays_nonfinite_ends_with_an_error(tmp_path):
    """The error names the steps and the last good checkpoint."""
    config = tiny_config()
    training = dataclasses.replace(
        config.lm.training, batch_size=2, log_every=1, checkpoint_every=2, max_nonfinite_steps=3
    )
    blocks = Blocks(np.full((8, 32), 255, np.int32), np.full(8, 32))
    text = TrainingText([blocks], ())
    stage = Stage("lm", Fragile(), {}, None, text, 0, None, training, config.lm.optimizer, 1e6)
    mesh, log = make_mesh(config.mesh), MetricsLog(tmp_path)
    checkpointer = Checkpointer(tmp_path / "lm", 2)
    trainer = Trainer(stage, 0, BYTES.pad_id, 1, mesh, checkpointer, log, {}, Profile(-1, -1, ""))
    expected = "3 updates in a row, steps 1 to 3; the checkpoint of step 2 is good"
    with jax.set_mesh(mesh), pytest.raises(UserError, match=expected):
        trainer.run()
    assert [record["skipped_updates"] for record in log.records] == [1, 2]
    assert os.listdir(tmp_path / "lm") == ["2"]
    assert np.array_equal(params(tmp_path, "lm", 2)["kernel"], np.ones(2))


@pytest.mark.slow
def test_no_checkpoint_is_saved_after_too_many_nonfinite_updates(tmp_path):
    """Also where checkpoints are more frequent than logs; training resumes from the last good checkpoint."""
    config = tiny_config()
    training = dataclasses.replace(
        config.lm.training,
        batch_size=2,
        log_every=50,
        eval_every=1000,
        checkpoint_every=4,
        max_nonfinite_steps=3,
    )
    mesh = make_mesh(config.mesh)

    def train_on(token: int, num_steps: int) -> None:
        blocks = Blocks(np.full((8, 32), token, np.int32), np.full(8, 32))
        steps = dataclasses.replace(training, num_steps=num_steps)
        text = TrainingText([blocks], ())
        stage = Stage("lm", Fragile(), {}, None, text, 0, None, steps, config.lm.optimizer, 1e6)
        checkpointer = Checkpointer(tmp_path / "lm", 2)
        none = Profile(-1, -1, "")
        log = MetricsLog(tmp_path)
        with jax.set_mesh(mesh):
            Trainer(stage, 0, BYTES.pad_id, 1, mesh, checkpointer, log, {}, none).run()

    train_on(1, 4)
    with pytest.raises(UserError, match="steps 5 to 7; the checkpoint of step 4 is good"):
        train_on(255, 60)
    train_on(1, 8)
    assert (tmp_path / "lm" / "8").is_dir()


def short_run(
    folder: pathlib.Path,
    num_steps: int,
    checkpoint_every: int = 2,
    log_every: int = 2,
    task: Fragile | None = None,
) -> MetricsLog:
    """Trains `task`, or else `Fragile()`, up to step `num_steps` from the latest checkpoint."""
    config = tiny_config()
    training = dataclasses.replace(
        config.lm.training,
        batch_size=2,
        num_steps=num_steps,
        log_every=log_every,
        eval_every=1000,
        checkpoint_every=checkpoint_every,
    )
    text = TrainingText([Blocks(np.full((8, 32), 1, np.int32), np.full(8, 32))], ())
    task = Fragile() if task is None else task
    stage = Stage("lm", task, {}, None, text, 0, None, training, config.lm.optimizer, 1e6)
    mesh, log = make_mesh(config.mesh), MetricsLog(folder)
    checkpointer, none = Checkpointer(folder / "lm", 9), Profile(-1, -1, "")
    try:
        with jax.set_mesh(mesh):
            Trainer(stage, 0, BYTES.pad_id, 1, mesh, checkpointer, log, {}, none).run()
    finally:
        checkpointer.close()
        log.close()
    return log


@pytest.mark.slow
def test_training_does_not_resume_from_a_checkpoint_under_the_name_of_another_step(tmp_path):
    short_run(tmp_path, 4)
    (tmp_path / "lm" / "4").rename(tmp_path / "lm" / "99")
    with pytest.raises(UserError, match=r"/lm/99 is of step 4, not 99: .*`mv \S+/99 \S+/4`"):
        short_run(tmp_path, 8)
    (tmp_path / "lm" / "99").rename(tmp_path / "lm" / "4")
    short_run(tmp_path, 8)
    assert (tmp_path / "lm" / "8").is_dir()


def test_a_signal_while_the_last_checkpoint_is_written_ends_the_command(tmp_path, monkeypatch):
    """Not after the next stage, which has no signal of its own."""
    wait = Checkpointer.wait

    def wait_long(self):
        os.kill(os.getpid(), signal.SIGTERM)
        wait(self)

    monkeypatch.setattr(Checkpointer, "wait", wait_long)
    with pytest.raises(Interrupted, match="SIGTERM: stage lm is saved at step 4; the same command"):
        short_run(tmp_path, 4)
    assert (tmp_path / "lm" / "4").is_dir()


@pytest.mark.slow
@pytest.mark.parametrize(
    "number, error, message",
    [
        (signal.SIGINT, Interrupted, "SIGINT: stage lm is saved at step 6"),
        # The terminal is gone.
        (signal.SIGHUP, Interrupted, "SIGHUP: stage lm is saved at step 6"),
        (None, BrokenPipeError, None),
    ],
)
def test_output_that_nobody_reads_any_more_loses_no_step(
    number, error, message, tmp_path, monkeypatch, request
):
    """Ctrl-C reaches `| tee` as well, which ends before the training has asked for the signal."""
    # It stays ignored where `nohup` has started the tests.
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    request.addfinalizer(lambda: signal.signal(signal.SIGHUP, before))
    values = Progress.values

    def write(self, step, shown):
        if step == 6:
            if number:
                os.kill(os.getpid(), number)
            raise BrokenPipeError
        values(self, step, shown)

    monkeypatch.setattr(Progress, "values", write)
    with pytest.raises(error, match=message):
        short_run(tmp_path, 12, checkpoint_every=100)
    assert [path.name for path in (tmp_path / "lm").iterdir() if path.is_dir()] == ["6"]
    monkeypatch.undo()
    assert [one["step"] for one in short_run(tmp_path, 12).records] == [2, 4, 6, 8, 10, 12]


@pytest.mark.slow
def test_text_that_cannot_be_read_any_more_loses_no_step(tmp_path, monkeypatch):
    """The step of the batch that was not read is not done."""
    batches = train_lib.training_batches

    def failing(*given):
        for number, batch in enumerate(batches(*given), 1):
            if number == 6:
                raise OSError(errno.EIO, "Input/output error")
            yield batch

    monkeypatch.setattr(train_lib, "training_batches", failing)
    with pytest.raises(OSError, match="Input/output error"):
        short_run(tmp_path, 12, checkpoint_every=100)
    assert [path.name for path in (tmp_path / "lm").iterdir() if path.is_dir()] == ["5"]
    monkeypatch.undo()
    assert [one["step"] for one in short_run(tmp_path, 12).records] == [2, 4, 6, 8, 10, 12]


@pytest.mark.slow
def test_metrics_that_lost_records_are_named_and_the_file_is_kept(tmp_path, capsys):
    """Nothing is said, and nothing kept, where all records up to the checkpoint are there."""
    path = tmp_path / "metrics.jsonl"
    short_run(tmp_path, 4)
    # Later than the checkpoint, as after a kill.
    with open(path, "a") as lines:
        lines.write('{"stage": "lm", "split": "train", "step": 5}\n{"stage": "l')
    short_run(tmp_path, 8)
    assert "note: " not in capsys.readouterr().out
    # The first of four records, and the beginning of the second.
    half = path.read_text()
    half = half[: half.index("\n") + 20]
    path.write_text(half)
    # Killed before its first checkpoint, and given again.
    for _ in range(2):
        log = MetricsLog(tmp_path)
        log.cut_back("lm", 8, 4)
        log.close()
    assert list(tmp_path.glob("metrics.jsonl.*")) == [tmp_path / "metrics.jsonl.damaged"]
    log = short_run(tmp_path, 10)
    line = (
        f"note: {path}: 3 of the 4 records up to the checkpoint of lm, step 8, are missing; the file as it was is kept as "
        f"{path}.damaged\n"
    )
    assert line in capsys.readouterr().out
    assert (tmp_path / "metrics.jsonl.damaged").read_text() == half
    assert [record["step"] for record in log.records] == [2, 10]
    # The checkpoint of step 10 knows of the two records that there are.
    short_run(tmp_path, 12)
    assert "note: " not in capsys.readouterr().out
    path.unlink()
    short_run(tmp_path, 14)
    out = capsys.readouterr().out
    assert "3 of the 3 records up to the checkpoint of lm, step 12, are missing\n" in out
    assert not (tmp_path / "metrics.jsonl.damaged-2").exists()


def test_metrics_with_a_damaged_line_are_kept_before_it_is_left_out(tmp_path, capsys):
    """Also where a file of the same name was kept before."""
    path = tmp_path / "metrics.jsonl"
    log = short_run(tmp_path, 4)
    for number, name in enumerate(("metrics.jsonl.damaged", "metrics.jsonl.damaged-2"), 1):
        damaged = f"{path.read_text()}{number}\n"
        path.write_text(damaged)
        log = MetricsLog(tmp_path)
        log.cut_back("lm", 4)
        log.cut_back("lm", 4)
        log.close()
        assert (tmp_path / name).read_text() == damaged and len(log.records) == 2
        assert capsys.readouterr().out.splitlines()[-1].endswith(f"is kept as {tmp_path / name}")
    assert sorted(one.name for one in tmp_path.glob("metrics*")) == [
        "metrics.jsonl",
        "metrics.jsonl.damaged",
        "metrics.jsonl.damaged-2",
    ]


def test_a_file_in_place_of_the_folder_of_events_is_one_line(tmp_path):
    (tmp_path / "tensorboard").touch()
    with pytest.raises(UserError, match=r"/tensorboard cannot be written: "):
        MetricsLog(tmp_path).cut_back("lm", 0)


@dataclasses.dataclass(frozen=True)
class Large(Fragile):
    """`Fragile` with 4 MiB of parameters."""

    def init(self, key):
        return {"kernel": jnp.ones(2**20)}


def live_bytes() -> int:
    """Bytes of all arrays on the only device. An array and its shard are two with the same memory."""
    gc.collect()
    return sum({x.unsafe_buffer_pointer(): x.nbytes for x in jax.live_arrays()}.values())


@pytest.mark.slow
def test_a_trainer_holds_one_state_at_a_time(tmp_path, monkeypatch):
    """Also at the moment when it restores a checkpoint, or takes initial parameters."""
    config = tiny_config()
    training = dataclasses.replace(config.lm.training, batch_size=2, num_steps=2, log_every=2)
    blocks = Blocks(np.full((8, 32), 1, np.int32), np.full(8, 32))
    text, mesh = TrainingText([blocks], ()), make_mesh(config.mesh)
    stage = Stage("lm", Large(), {}, None, text, 0, None, training, config.lm.optimizer, 1e6)
    params_bytes = 4 * 2**20
    # Parameters and both moments of Adam; the rest of the state has some numbers.
    state_bytes, few = 3 * params_bytes, 2**14
    restore, seen = Checkpointer.restore, {}

    def spied(*arguments):
        seen["restore"] = live_bytes() - before
        return restore(*arguments)

    def initial():
        seen["initial"] = live_bytes() - before
        return Large().init(None)

    def trainer(name: str, stage: Stage) -> Trainer:
        checkpointer, none = Checkpointer(tmp_path / name, 2), Profile(-1, -1, "")
        log = MetricsLog(tmp_path)
        return Trainer(stage, 0, BYTES.pad_id, 1, mesh, checkpointer, log, {}, none)

    monkeypatch.setattr(Checkpointer, "restore", spied)
    with jax.set_mesh(mesh):
        trainer("lm", stage).run()
        before = live_bytes()
        resumed = trainer("lm", stage)
        assert seen.pop("restore") < few
        assert state_bytes <= live_bytes() - before < state_bytes + few
        assert resumed._first_step == 2
        del resumed
        begun = trainer("other", dataclasses.replace(stage, initial=initial))
        assert seen == {"initial": pytest.approx(2 * params_bytes, abs=few)}
        assert state_bytes <= live_bytes() - before < state_bytes + few
        del begun


@pytest.mark.slow
def test_mfu_is_achieved_flops_over_the_devices_peak(tmp_path, monkeypatch):
    """On an accelerator whose peak is known; on others it is not logged."""
    config = tiny_config()
    training = dataclasses.replace(config.lm.training, batch_size=2, num_steps=4, log_every=2)
    blocks = Blocks(np.full((8, 32), 1, np.int32), np.full(8, 32))
    text, mesh = TrainingText([blocks], ()), make_mesh(config.mesh)
    stage = Stage("lm", Fragile(), {}, None, text, 0, None, training, config.lm.optimizer, 1e6)

    def logged(name: str) -> list[dict]:
        log = MetricsLog(tmp_path / name)
        checkpointer, none = Checkpointer(tmp_path / name / "lm", 2), Profile(-1, -1, "")
        with jax.set_mesh(mesh):
            Trainer(stage, 0, BYTES.pad_id, 1, mesh, checkpointer, log, {}, none).run()
        return [record for record in log.records if record["split"] == "train"]

    assert all("mfu" not in record for record in logged("cpu"))
    known = Accelerator(flops=1e12, memory=1e9, bandwidth=1e9, interconnect=1e9)
    monkeypatch.setattr(train_lib, "accelerator", lambda _: known)
    for record in logged("known"):
        # All 64 tokens of a step are text.
        expected = 1e6 * record["tokens_per_second"] / (1e12 * jax.device_count())
        assert record["mfu"] == pytest.approx(expected)


def test_metric_sums_since_the_last_log_are_part_of_the_state():
    """So that a checkpoint has them, and a resumed run reports the same values."""
    states = fragile_run(set(), 3, 10)
    assert float(states[3].metrics["loss"][1]) == 3


class RandomLoss(Fragile):
    """A task whose loss is a random number of the step, and has no gradient."""

    def loss(self, params, frozen, batch, key_B):
        number = jax.random.uniform(key_B[0])
        return {"loss": (number + 0 * params["kernel"].sum(), jnp.float32(1))}


@pytest.mark.slow
@pytest.mark.parametrize(
    "before, stopped, after, expected",
    [
        (4, 4, 3, {4: [0, 1, 2, 3], 6: [4, 5]}),
        (4, 6, 3, {4: [0, 1, 2, 3], 6: [4, 5], 9: [6, 7, 8]}),
        (2, 3, 5, {2: [0, 1], 3: [2], 5: [2, 3, 4]}),
        (2, 3, 2, {2: [0, 1], 3: [2], 4: [2, 3]}),
    ],
)
def test_a_record_is_the_mean_over_the_steps_since_the_last_multiple_of_log_every(
    before, stopped, after, expected, tmp_path
):
    """Also in a run that is resumed with another `log_every`. After its last step a run writes a record of an unfinished period."""

    def logged(folder, last, every):
        log = short_run(tmp_path / folder, last, checkpoint_every=100, log_every=every, task=task)
        return {record["step"]: record["loss"] for record in log.records}

    task = RandomLoss()
    each = logged("each", max(expected), 1)
    assert len(set(each.values())) == len(each) == max(expected)
    logged("run", stopped, before)
    means = {step: np.mean([each[n + 1] for n in ns]) for step, ns in expected.items()}
    assert logged("run", max(expected), after) == pytest.approx(means)


def test_targets_of_a_block_are_masked_after_its_text():
    blocks = Blocks(np.arange(64, dtype=np.int32).reshape(2, 32), np.array([32, 8]))
    assert (blocks[1]["targets"][:8] == np.arange(32, 40)).all()
    assert (blocks[1]["targets"][8:] == MASKED).all()
