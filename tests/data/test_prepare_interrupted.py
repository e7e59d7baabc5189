"""An interrupted preparation leaves no process, and the same command completes it to the same bytes."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
import types

import psutil
import pytest

from calm_jax.data.prepare.cluster import Cluster
from calm_jax.data.prepare.preparation import _runs
from calm_jax.data.shards import PreparedText
from calm_jax.data.tokenizers import TokenizerConfig, make_tokenizer
from calm_jax.errors import UserError
from tests.data.preparing import contents, frames, json_lines, prepared, random_texts
from tests.data.test_prepare import (
    PREPARE,
    finished,
    refused,
    sentencepiece_model,
    touched,
    workers_of,
)
from tests.workdirs import ROOT, run, run_program, start, wait_until


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> tuple[list[str], dict[str, bytes]]:
    """Arguments of a preparation that takes some seconds, and the files that it writes."""
    folder = tmp_path_factory.mktemp("large")
    model, rng = folder / "tokenizer.model", random.Random(0)
    model.write_bytes(sentencepiece_model())
    lines = random_texts(4, 2000, 400)
    texts = ["".join(rng.choices(lines, k=10)) for _ in range(2000)]
    files = [folder / "a.jsonl", folder / "b.jsonl.zst", folder / "c.jsonl"]
    for number, file in enumerate(files):
        data = json_lines(texts[number::3])
        file.write_bytes(frames(data, 2**16) if file.suffix == ".zst" else data)
    tokenizer = make_tokenizer(TokenizerConfig("sentencepiece", str(model), 0, True), ())
    prepared(folder / "loop", files, tokenizer, shard_characters=100_000)
    given = [f"--input={','.join(map(str, files))}", f"--tokenizer={model}"]
    return [*given, "--shard_characters=100000"], contents(folder / "loop")


CLOCK_SET_BACK = """
import sys, time
from calm_jax.cli import clock
true = time.time
clock._PATIENCE, time.time = 0.2, lambda: true() - 3600
sys.argv[0] = "prepare"
from absl import app
from calm_jax.cli.flags import parse_flags
from calm_jax.data.prepare.__main__ import main
app.run(main, flags_parser=parse_flags)
"""


@pytest.mark.slow
def test_a_clock_that_is_set_back_ends_a_preparation_which_then_goes_on(large, tmp_path):
    """Dask would wait until the clock has caught up."""
    command, output = [*large[0], "--workers=1", f"--output={tmp_path}/out"], f"{tmp_path}/out"
    done = run_program(CLOCK_SET_BACK, *command, status=75, timeout=100)
    assert done.stdout == ""
    (line,) = [one for one in done.stderr.splitlines() if one.startswith("interrupted: ")]
    assert line.startswith(f"interrupted: {output}: the clock of this machine was set back by 3600")
    assert line.endswith("; the same command goes on with it")
    run(PREPARE, *command)
    assert finished(tmp_path / "out") == large[1]


def test_shards_are_divided_into_tasks_also_while_no_worker_is_there():
    """As between the passes, when the workers were killed and new ones have not come yet."""
    layout = types.SimpleNamespace(bounds=range(20), can_begin_at=lambda bound: bound == 0)
    assert _runs(layout, range(20), 0) == [(0, 8), (8, 16), (16, 20)]
    assert len(_runs(layout, range(20), 4)) == 7


@pytest.mark.parametrize("failures", [0, 2, 9])
def test_workers_that_die_while_they_are_set_up_are_asked_again(failures, tmp_path, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    left = [OSError("Stream is closed")] * failures

    def ask(question: str) -> str:
        if left:
            raise left.pop()
        return question

    cluster = Cluster(tmp_path, 2, "")
    if failures < 5:
        assert cluster._on_all_workers(ask, "ready") == "ready"
    else:
        with pytest.raises(UserError, match=r"workers die at their start \(Stream is closed\)"):
            cluster._on_all_workers(ask, "ready")


def start_large(large, output, workers: int, shards: int = 3) -> subprocess.Popen:
    """Starts a preparation in a process group of its own, and waits until it has made some shards."""
    asked = [*large[0], f"--output={output}", f"--workers={workers}"]
    command = start(PREPARE, *asked, start_new_session=True)
    wait_until(lambda: len(list(output.glob("shard-*"))) >= shards or command.poll() is not None)
    assert command.poll() is None and not (output / "index.json").exists()
    return command


def resume(large, output, workers: int) -> str:
    """Runs the same command again; asserts that it completes the folder and leaves complete shards as they are."""
    before = {path: touched(path) for path in output.glob("shard-*")}
    assert before and not (output / "index.json").exists()
    printed = run(PREPARE, *large[0], f"--output={output}", f"--workers={workers}")
    assert finished(output) == large[1]
    assert all(touched(path) == times for path, times in before.items())
    return printed


def test_the_result_of_a_finished_task_is_not_fetched_from_a_worker_that_may_be_dead(tmp_path):
    """With all workers of a running cluster, Dask would wait for it without end."""

    class Finished:
        status = "finished"

        def result(self) -> None:
            raise AssertionError("it would wait")

    cluster = Cluster(tmp_path, 1, "")
    cluster._distributed = types.SimpleNamespace(wait=lambda pending, **_: (pending, set()))
    cluster._wait([Finished()])


@pytest.mark.slow
def test_a_scheduler_that_dies_ends_a_preparation_with_one_line(tmp_path):
    file = tmp_path / "scheduler.json"
    where = ["--scheduler-file", str(file)]
    options = ["--no-dashboard", "--host", "127.0.0.1"]
    python = [sys.executable, "-m"]
    commands = [
        [*python, "distributed.cli.dask_scheduler", *where, *options, "--port", "0"],
        [*python, "distributed.cli.dask_worker", *where, *options, "--nthreads", "1", "--no-nanny"],
    ]
    processes = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for command in commands
    ]
    try:
        wait_until(lambda: file.exists() and file.read_text().endswith("}"))
        address = json.loads(file.read_text())["address"]
        work = tmp_path / "work"
        work.mkdir()
        program = (
            "import sys, time; from pathlib import Path; from calm_jax.data.prepare.cluster import Cluster\n"
            "from calm_jax.errors import UserError\n"
            "with Cluster(Path(sys.argv[1]), 0, sys.argv[2]) as cluster:\n"
            "    print('begins', flush=True)\n"
            "    try: cluster.run(time.sleep, [0.1] * 1000)\n"
            "    except UserError as error: print(error, flush=True)\n"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(work), address],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        processes.append(process)
        lines = iter(process.stdout.readline, "begins\n")
        assert set(lines) <= {f"waiting for workers of {address}\n"}
        time.sleep(1)
        processes[0].kill()
        out, _ = process.communicate(timeout=100)
        assert out == (
            "the scheduler is gone; finished work is kept; run the same command again to continue\n"
        )
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.slow
def test_workers_that_are_killed_are_replaced(tmp_path, large):
    output = tmp_path / "out"
    command = start_large(large, output, 2)
    for _ in range(2):
        workers_of(command)[0].kill()
        made = len(list(output.glob("shard-*")))
        wait_until(lambda made=made: len(list(output.glob("shard-*"))) >= made + 3)
    out, err = command.communicate(timeout=100)
    assert command.returncode == 0, err
    assert "error" not in err and "Traceback" not in out + err, err
    assert finished(output) == large[1]


@pytest.mark.slow
def test_a_task_whose_workers_keep_dying_ends_with_one_line(tmp_path, large):
    output = tmp_path / "out"
    asked = [*large[0], "--shard_characters=1000000000", f"--output={output}", "--workers=1"]
    command = start(PREPARE, *asked)
    wait_until(lambda: (output / "work" / "checked.json").exists())
    while command.poll() is None:
        time.sleep(0.6)
        with contextlib.suppress(psutil.Error):
            for worker in workers_of(command):
                worker.kill()
    out, err = command.communicate()
    # Dask gives up on the task or on the worker.
    refused((command.returncode, out, err), "finished work is kept; run the same command again")


@pytest.mark.slow
def test_what_a_worker_writes_to_stderr_goes_to_a_file(tmp_path, capfd):
    """A worker ends with a traceback where the process that watches over it dies first."""
    with Cluster(tmp_path, 1, "") as cluster:
        cluster.client.run(lambda: print("a traceback", file=sys.stderr))
        (log,) = tmp_path.rglob("stderr.log")
        assert log.read_text() == "a traceback\n"
    assert "a traceback" not in capfd.readouterr().err


@pytest.mark.slow
def test_a_killed_command_leaves_no_process_and_can_be_resumed(tmp_path, large):
    output = tmp_path / "out"
    command = start_large(large, output, 2)
    processes = psutil.Process(command.pid).children(recursive=True)
    assert len(workers_of(command)) == 2
    command.kill()
    command.communicate()
    _, alive = psutil.wait_procs(processes, timeout=30)
    assert not alive
    resume(large, output, 1)


@pytest.mark.slow
@pytest.mark.parametrize("number, whole_group", [(signal.SIGTERM, False), (signal.SIGINT, True)])
def test_a_signal_ends_with_75_and_one_line(tmp_path, large, number, whole_group):
    """SIGTERM goes to the command alone; SIGINT, as from a terminal, to its workers, too."""
    output = tmp_path / "out"
    command = start_large(large, output, 2)
    processes = psutil.Process(command.pid).children(recursive=True)
    (os.killpg if whole_group else os.kill)(command.pid, number)
    out, err = command.communicate(timeout=60)
    assert command.returncode == 75, out + err
    assert err.startswith("interrupted: SIG") and err.count("\n") == 1, err
    assert "Traceback" not in out
    assert not psutil.wait_procs(processes, timeout=30)[1]
    resume(large, output, 1)


@pytest.mark.slow
def test_ctrl_c_while_the_workers_start_prints_one_line(tmp_path, large):
    """Python and Dask would print a traceback for each worker."""
    asked = [*large[0], f"--output={tmp_path / 'out'}", "--workers=2"]
    for seconds in (0.0, 0.5, 1.0):
        command = start(PREPARE, *asked, start_new_session=True)
        wait_until(lambda command=command: workers_of(command) or command.poll() is not None)
        time.sleep(seconds)
        os.killpg(command.pid, signal.SIGINT)
        out, err = command.communicate(timeout=60)
        assert command.returncode == 75, out + err
        assert err.startswith("interrupted: SIGINT") and err.count("\n") == 1, err


@pytest.mark.slow
def test_a_command_killed_in_the_first_pass_can_be_resumed(tmp_path, large):
    output = tmp_path / "out"
    asked = [*large[0], f"--output={output}", "--workers=1", "--deduplicate"]
    for wait in ("lock", "work", "work/checked-00000.json"):
        command = start(PREPARE, *asked)
        wait_until(lambda wait=wait: (output / wait).exists() or (output / "index.json").exists())
        command.kill()
        command.communicate()
    run(PREPARE, *asked)
    texts = PreparedText(output)
    assert texts.num_documents == len({tokens.tobytes() for tokens in texts.documents(1)})
    expected = json.loads(large[1]["index.json"])
    assert (
        texts.num_documents + texts.index["left_out"].get("equal to one before", 0)
        == (expected["documents"])
    )


@pytest.mark.slow
def test_a_second_command_for_the_same_output_is_refused(tmp_path, large):
    output = tmp_path / "out"
    command = start_large(large, output, 2, shards=1)
    # Stopped, so that it does not finish before the second command starts.
    command.send_signal(signal.SIGSTOP)
    try:
        line = run(PREPARE, *large[0], f"--output={output}", status=2)
    finally:
        command.send_signal(signal.SIGCONT)
    assert line.startswith(f"error: --output={output} is in use: process {command.pid} on ")
    out, err = command.communicate(timeout=100)
    assert command.returncode == 0, out + err
    assert finished(output) == large[1]
