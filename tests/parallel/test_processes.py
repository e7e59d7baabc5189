"""Runs of several real processes on one machine: they give one result, and end together."""

import contextlib
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from calm_jax.errors import UserError
from calm_jax.parallel import mesh, multihost, startup
from tests import forked
from tests.workdirs import ROOT, metrics, run, train

# A process that hangs is killed after so many seconds.
KILLED_AFTER = 280

SLURM = {"SLURM_JOB_ID": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2"}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}


@pytest.mark.parametrize(
    "environment, cluster",
    [
        ({}, None),
        (SLURM, "Slurm"),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "1"}, None),
        # A batch script, or a shell in an allocation: a single process, however many tasks the job has.
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4"}, None),
        (OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": "1.0;tcp://10.0.0.1:4000"}, "Open MPI"),
        ({"OMPI_COMM_WORLD_SIZE": "1"}, None),
        ({"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "0"}, "GKE"),
        ({"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}, None),
        ({"TPU_WORKER_HOSTNAMES": "a", "MEGASCALE_NUM_SLICES": "2"}, "GKE"),
    ],
)
def test_the_launcher_is_found_by_environment_variables(environment, cluster):
    assert startup.cluster_of(environment) == cluster


def test_open_mpi_without_an_address_needs_a_coordinator():
    with pytest.raises(
        UserError, match=r"2 processes, but .* lacks .*: give --coordinator=HOST:PORT"
    ):
        startup.cluster_of(OPEN_MPI)


@pytest.mark.parametrize(
    "given, words",
    [
        (("host", 2, 0), "--coordinator='host' must be HOST:PORT"),
        ((":80", 2, 0), "--coordinator=':80' must be HOST:PORT"),
        (("host:http", 2, 0), "must be HOST:PORT"),
        (("host:65536", 2, 0), "must be HOST:PORT"),
        (("host:0", 2, 0), "must be HOST:PORT"),
        (("host:80", 0, 0), "--num_processes=0"),
        (("host:80", 2, 2), "--process_id=2 must be in [0, 2)"),
        (("host:80", 2, -1), "--process_id=-1"),
    ],
)
def test_invalid_coordinator_and_process_numbers_are_refused(given, words):
    with pytest.raises(UserError, match=re.escape(words)):
        startup.check_given(*given)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def test_a_coordinator_may_have_an_ipv6_address():
    try:
        listener = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError as error:
        pytest.skip(f"this machine has no IPv6: {error}")
    with listener:
        startup.wait_for_coordinator(f"[::1]:{listener.getsockname()[1]}", 1, 1)


def test_an_unreachable_coordinator_is_reported_within_the_limit():
    address, began = f"localhost:{free_port()}", time.monotonic()
    with pytest.raises(UserError, match=f"process 1: the coordinator {address} cannot be reached"):
        startup.wait_for_coordinator(address, 1, 1)
    # The limit is one second; the rest is room for a busy machine.
    assert time.monotonic() - began < 60


def test_a_process_that_runs_alone_exchanges_nothing(tmp_path):
    done = []
    assert multihost.is_primary() and not multihost.is_multiprocess()
    assert multihost.broadcast([None]) == [None]
    assert multihost.run_on_all(lambda: 3) == 3
    multihost.write_once(lambda: done.append(1))
    multihost.check_shared(tmp_path)
    assert done == [1] and not list(tmp_path.iterdir())
    with pytest.raises(UserError, match="as it is"), multihost.exit_on_failure():
        raise UserError("as it is")
    whole = multihost.fetch_global({"a": jax.numpy.arange(3)})
    np.testing.assert_array_equal(whole["a"], [0, 1, 2])


def test_one_process_holds_all_rows_of_a_batch():
    one = jax.make_mesh((1, 1, 1), mesh.AXES, axis_types=(jax.sharding.AxisType.Auto,) * 3)
    assert mesh.rows_here(4, one) == [0, 1, 2, 3]
    batch = {"tokens": np.arange(8).reshape(4, 2)}
    placed = mesh.global_batch(batch, 4, one)
    np.testing.assert_array_equal(placed["tokens"], batch["tokens"])


class Several:
    """A command in `number` processes, whose output goes to files: `python -m ARGS`, or Python text `program` with these arguments.

    cwd: the working folder of the process of an index. own: flags for the process of an index. fresh: processes of their own, for
      tests whose processes handle a signal; others are forked where the package is imported already.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        *args: str,
        number: int = 2,
        cwd=lambda _: ROOT,
        own=lambda _: [],
        program: str = "",
        fresh: bool = False,
    ):
        folder.mkdir()
        port = free_port()
        self._files = [folder / f"{index}.txt" for index in range(number)]
        self.processes = []
        for index, file in enumerate(self._files):
            flags = [f"--coordinator=localhost:{port}", f"--num_processes={number}"]
            module = ("tests.program_text", program) if program else ()
            command = (*module, *args, *own(index), *flags, f"--process_id={index}")
            if not fresh:
                # It is read before the process has begun.
                file.touch()
                self.processes.append(forked.Started(command, file, file, cwd(index)))
                continue
            with open(file, "w", encoding="utf-8") as output:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", *command],
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        cwd=cwd(index),
                        env=os.environ | {"PYTHONPATH": str(ROOT)},
                    )
                )

    def text(self, index: int) -> str:
        return self._files[index].read_text(encoding="utf-8")

    def wait_for(self, line: str) -> None:
        """Returns when process 0 has printed a line that begins with `line`."""
        ends = time.monotonic() + KILLED_AFTER
        while f"\n{line}" not in self.text(0):
            assert self.processes[0].poll() is None and time.monotonic() < ends, self.text(0)
            time.sleep(0.05)

    def statuses(self) -> list[int]:
        return [process.wait(KILLED_AFTER) for process in self.processes]

    def errors(self) -> list[str]:
        return [
            line
            for index in range(len(self.processes))
            for line in self.text(index).splitlines()
            if line.startswith(("error: ", "interrupted: "))
        ]

    def close(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()


@pytest.fixture
def several(tmp_path):
    """A function that starts `Several`, whose processes are killed at the end of the test."""
    begun = []

    def start_several(*args: str, **options) -> Several:
        folder = tmp_path / f"output {len(begun)}"
        begun.append(Several(folder, *args, **options))
        return begun[-1]

    yield start_several
    for one in begun:
        one.close()


def values(workdir: pathlib.Path) -> dict[tuple, dict]:
    return {(r["stage"], r["split"], r["step"]): r for r in metrics(workdir)}


@pytest.mark.slow
def test_two_processes_equal_one_through_a_signal_and_on_another_mesh(text_glob, tmp_path, several):
    """In training, evaluation and generation; the signal goes to process 1, which writes nothing."""
    recipe = f"--config=tests/tiny_recipe.py:{text_glob}"
    common = (
        "--config.autoencoder.training.log_every=1",
        "--config.lm.training.log_every=1",
        # A cosine depends on the last step, which differs between the runs.
        "--config.lm.optimizer.schedule=constant",
        # Never, as every process would compile it anew; the evaluation below compares these scores.
        "--config.lm.training.eval_every=1000",
    )
    # The runtime takes up to a second to pass on a signal, so that the stage has to last longer.
    long = (*common, "--config.lm.training.num_steps=150")
    two = tmp_path / "two"
    on_both = ("calm_jax.main", recipe, f"--workdir={two}", "--config.mesh.fsdp=2", *long)
    both = several(*on_both, fresh=True)
    both.wait_for("lm: step 4/")
    both.processes[1].send_signal(signal.SIGTERM)
    assert both.statuses() == [75, 75], both.text(0)
    (message,) = both.errors()
    step = re.search(r"interrupted: SIGTERM: stage lm is saved at step (\d+);", message)[1]
    assert (two / "lm" / step).is_dir() and 4 < int(step) < 150
    assert "step" not in both.text(1)

    # One process on one device goes on from the checkpoint.
    last = max(21, int(step) + 1)
    resumed = ("--config.mesh.fsdp=1", *common, f"--config.lm.training.num_steps={last}")
    train(text_glob, two, *resumed)
    one = tmp_path / "one"
    train(text_glob, one, *common, "--config.lm.training.num_steps=21")
    ours, theirs = values(two), values(one)
    assert {("lm", "train", step) for step in range(1, last + 1)} <= ours.keys()
    early = [place for place in theirs if place[2] <= 20]
    assert early == [place for place in ours if place[2] <= 20]
    assert {("autoencoder", "train", 1), ("autoencoder", "validation_part", 6)} <= set(early)
    assert len(early) > 30
    for place in early:
        for name in ("loss", "gradient_norm", "tokens_per_step"):
            if name in theirs[place]:
                rel = 1e-5 if place[2] == 1 else 1e-3
                expected = pytest.approx(theirs[place][name], rel=rel)
                assert ours[place][name] == expected, (place, name)

    scored = several("calm_jax.main", "--mode=eval", f"--config=configs/workdir.py:{two}")
    assert scored.statuses() == [0, 0], scored.text(0) + scored.text(1)
    (record,) = map(json.loads, (two / "evaluations.jsonl").read_text().splitlines())
    for name in ("loss", "brierlm"):
        expected = ours["lm", "validation", last][name]
        assert record["lm"][name] == pytest.approx(expected, rel=1e-5), name

    asked = (f"--workdir={two}", "--prompt=def ", "--prompt=class x", "--max_tokens=12")
    written = several("calm_jax.generate", *asked, f"--output={tmp_path / 'two.jsonl'}")
    assert written.statuses() == [0, 0], written.text(0) + written.text(1)
    run("calm_jax.generate", *asked, f"--output={tmp_path / 'one.jsonl'}")
    texts = [
        [json.loads(line)["tokens"] for line in (tmp_path / name).read_text().splitlines()]
        for name in ("one.jsonl", "two.jsonl")
    ]
    assert texts[0] == texts[1] and len(texts[0]) == 2


def autoencoder(text_glob: str, workdir: pathlib.Path, *more: str) -> tuple[str, ...]:
    """A command that trains the autoencoder only."""
    recipe = f"--config=tests/tiny_recipe.py:{text_glob}"
    stage = "--config.stage=autoencoder"
    return "calm_jax.main", recipe, f"--workdir={workdir}", stage, *more


@pytest.mark.slow
def test_a_signal_stops_all_processes_also_after_a_resume(text_glob, tmp_path, several):
    """While every step saves a checkpoint; at last in a run of one process with the distributed runtime."""
    command = autoencoder(
        text_glob,
        tmp_path / "run",
        "--config.autoencoder.training.num_steps=300",
        "--config.autoencoder.training.checkpoint_every=1",
        "--config.autoencoder.training.log_every=1",
        # Never, as every process would compile it anew.
        "--config.autoencoder.training.eval_every=1000",
    )
    saved = [0]
    for number, index in ((2, 1), (1, 0)):
        some = several(*command, number=number, fresh=True)
        some.wait_for(f"autoencoder: step {saved[-1] + 8}/")
        some.processes[index].send_signal(signal.SIGINT if index == number - 1 else signal.SIGTERM)
        assert some.statuses() == [75] * number, some.text(0)
        (message,) = some.errors()
        saved.append(int(re.search(r"is saved at step (\d+);", message)[1]))
    assert saved == sorted(saved) and saved[-1] < 300


@pytest.mark.slow
def test_processes_with_different_configs_or_texts_are_refused(text_glob, tmp_path, several):
    """The error names the first difference, and nothing is written."""
    key = "autoencoder.optimizer.learning_rate"
    command = autoencoder(text_glob, tmp_path / "run")
    both = several(*command, own=lambda index: [f"--config.{key}={0.25 + index / 2}"])
    assert both.statuses() == [2, 2]
    (message,) = both.errors()
    assert message.startswith(f"error: process 1 has {key}=0.75, process 0 has 0.25: start all")

    cwd = own_folders(tmp_path)
    for index in range(2):
        for name in "abcdef":
            text = f"text {name} {index * (name == 'c')} " * 200
            (tmp_path / str(index) / f"{name}.txt").write_text(text)
    recipe = f"--config={ROOT}/tests/tiny_recipe.py:*.txt"
    workdir = f"--workdir={tmp_path / 'run'}"
    both = several("calm_jax.main", recipe, workdir, cwd=cwd)
    assert both.statuses() == [2, 2]
    (message,) = both.errors()
    assert re.match(r"error: process 1 has (train|validation) text=.*, process 0 has ", message)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_when_a_process_is_killed_the_other_ends_and_its_checkpoint_restores(
    text_glob, tmp_path, several
):
    workdir = tmp_path / "run"
    both = several(
        "calm_jax.main",
        f"--config=tests/tiny_recipe.py:{text_glob}",
        f"--workdir={workdir}",
        "--config.autoencoder.training.num_steps=100000",
        # Never, as every process would compile it anew.
        "--config.autoencoder.training.eval_every=100000",
    )
    # The save of step 10 has waited for that of step 5.
    both.wait_for("autoencoder: step 12/")

    both.processes[1].kill()
    began = time.monotonic()
    status = both.processes[0].wait(KILLED_AFTER)
    # A collective fails at once. Outside one the runtime notices after a heartbeat, and a save may wait as long again.
    assert time.monotonic() - began < 2 * startup.HEARTBEAT_SECONDS
    assert status not in (0, 75)
    saved = max(
        int(path.name) for path in (workdir / "autoencoder").iterdir() if path.name.isdigit()
    )
    out = run(
        "calm_jax.main",
        f"--config=tests/tiny_recipe.py:{text_glob}",
        f"--workdir={workdir}",
        f"--config.autoencoder.training.num_steps={saved + 2}",
        "--config.stage=autoencoder",
    )
    assert f"resumed at step {saved}" in out


@pytest.mark.slow
@pytest.mark.parametrize(
    "flag, words",
    [
        ("--config.mesh.data=3", "error: mesh: data=3 x fsdp=1 x tensor=1 does not make up 2"),
        ("--config.lm.training.batch_size=3", "error: lm.training.batch_size=3 must be a multiple"),
    ],
)
def test_a_mesh_or_batch_that_does_not_divide_is_one_error(
    text_glob, tmp_path, several, flag, words
):
    recipe = f"--config=tests/tiny_recipe.py:{text_glob}"
    both = several("calm_jax.main", recipe, f"--workdir={tmp_path / 'run'}", flag)
    assert both.statuses() == [2, 2]
    (message,) = both.errors()
    assert message.startswith(words) and not (tmp_path / "run").exists()


@pytest.mark.slow
def test_processes_with_different_memory_try_the_same_microbatches(text_glob, tmp_path, several):
    """Process 0 has too little for any, process 1 enough for all: both compile the same steps, and refuse."""
    program = (
        "import runpy, sys, calm_jax.planning.fitting as f; "
        "f.memory_here = lambda: 1e9 if '--process_id=1' in sys.argv else 3e5; "
        "runpy.run_module('calm_jax.main', run_name='__main__', alter_sys=True)"
    )
    _, *flags = autoencoder(
        text_glob,
        tmp_path / "run",
        # Microbatches of four rows, or of two, which are one for each process.
        "--config.autoencoder.training.batch_size=4",
        "--config.autoencoder.training.accumulation_steps=0",
    )
    both = several(*flags, program=program)
    assert both.statuses() == [2, 2], both.text(0) + both.text(1)
    (message,) = both.errors()
    assert message.startswith("error: autoencoder: a training step does not fit into memory: ")


def own_folders(folder: pathlib.Path):
    """Makes a working folder for each of two processes, as on machines without a shared file system.

    Returns the function from a process's index to its folder.
    """
    for index in range(2):
        (folder / str(index)).mkdir(exist_ok=True)
    return lambda index: folder / str(index)


@pytest.mark.slow
def test_a_workdir_that_not_all_processes_see_is_refused(text_glob, tmp_path, several):
    # The command with a shorter wait for the file system.
    program = (
        "import runpy, calm_jax.parallel.multihost as p; p.SHARED_SECONDS = 1; "
        "runpy.run_module('calm_jax.main', run_name='__main__', alter_sys=True)"
    )
    recipe = f"--config={ROOT}/tests/tiny_recipe.py:{text_glob}"
    both = several(recipe, "--workdir=run", program=program, cwd=own_folders(tmp_path))
    assert both.statuses() == [2, 2]
    (message,) = both.errors()
    assert message.startswith("error: process 1: ") and str(tmp_path / "1" / "run") in message
    assert "file system that all processes share" in message
    assert not (tmp_path / "0" / "run" / multihost.PROBE_FILE).exists()


@pytest.mark.slow
def test_text_that_one_process_cannot_read_ends_all_processes(text_glob, tmp_path, several):
    cwd = own_folders(tmp_path)
    for name in "abcdef":
        (tmp_path / "0" / f"{name}.txt").write_text(f"text {name} " * 200)
    recipe = f"--config={ROOT}/tests/tiny_recipe.py:*.txt"
    both = several("calm_jax.main", recipe, f"--workdir={tmp_path / 'run'}", cwd=cwd)
    assert both.statuses() == [2, 2]
    (message,) = both.errors()
    assert message.startswith("error: process 1: ") and "*.txt" in message
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_process_that_no_other_joins_ends_within_the_limit(text_glob, tmp_path):
    """JAX's runtime ends it, after our line with the address."""
    port = free_port()
    status, _, err = forked.run(
        (
            "calm_jax.main",
            f"--config=tests/tiny_recipe.py:{text_glob}",
            f"--workdir={tmp_path / 'run'}",
            f"--coordinator=localhost:{port}",
            "--num_processes=2",
            "--process_id=0",
            "--connect_seconds=3",
        ),
        timeout=KILLED_AFTER,
    )
    assert status not in (0, 75)
    waiting = "waiting at most 3 s for all processes to connect"
    assert err.startswith(f"process 0 of 2 at localhost:{port}: {waiting}\n")
    assert not (tmp_path / "run").exists()
