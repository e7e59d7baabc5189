"""`python -m benchmarks.faults`: a short campaign, and what its disk loses."""

import dataclasses
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time
import types

import psutil
import pytest

from benchmarks import faults
from tests.workdirs import run


def test_a_disk_loses_only_what_was_not_synced(tmp_path):
    paths = [tmp_path / name for name in ("synced", "half", "new")]
    for path in paths:
        path.write_bytes(b"x" * 1000)
    log = tmp_path / "log"
    log.write_text(f"{paths[0].stat().st_ino} 1000\n{paths[1].stat().st_ino} 400\n")
    sizes = set()
    for seed in range(20):
        for path in paths:
            path.write_bytes(b"x" * 1000)
        assert faults._lose(paths, log, random.Random(seed)) == 2
        sizes.add(tuple(path.stat().st_size for path in paths))
    assert {whole for whole, _, _ in sizes} == {1000}
    assert all(400 <= half < 1000 and 0 <= new < 1000 for _, half, new in sizes)
    assert len({new for _, _, new in sizes}) > 10


def test_an_output_that_differs_is_lost():
    assert faults._differing({"a": 1, "b": 2}, {"a": 1, "b": 3, "c": 4}) == ["b", "c"]
    assert faults._differing([1], [2]) == ["the output"]
    assert faults._differing({"a": [1]}, {"a": [1]}) == []


def test_a_command_that_hangs_is_killed_and_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr(faults, "_MOST_SECONDS", 0.3)
    monkeypatch.setattr(faults, "_SEED", types.SimpleNamespace(value=0))
    sleep = ["timeit", "-n1", f"__import__('time').sleep(600)  # {tmp_path}"]
    job = faults.Job(lambda output: sleep, lambda output: {})
    for fault in ("kill", "two"):
        record = faults._trial(
            "hung", fault, 0, job, {"cpu_seconds": 0.01, "outcome": {}}, tmp_path
        )
        assert record["wrong"] == ["it hangs"]
    commands = pathlib.Path("/proc").glob("[0-9]*/cmdline")
    assert not any(sleep[-1].encode() in _read(command) for command in commands)


def test_a_fault_comes_after_a_time_of_computing_and_not_of_waiting():
    """In the child of a shell, which sleeps before it computes."""
    work = "import time; time.sleep(1)\nwhile True: pass"
    with subprocess.Popen(["sh", "-c", '"$@"; exit', "sh", sys.executable, "-c", work]) as process:
        began, shell, used = time.monotonic(), psutil.Process(process.pid), 0.5
        faults._wait_for_moment(process, used)
        try:
            assert time.monotonic() - began > 1 + used / 2
            assert used <= faults._cpu_seconds(shell) < used + 5
        finally:
            for one in (*shell.children(), shell):
                one.kill()


def test_a_clock_is_set_back_by_a_day(tmp_path):
    times = "import time; a = time.time(); time.sleep(0.5); print(time.time() - a)"
    preloaded = {"LD_PRELOAD": faults._preloaded(tmp_path, "clock"), "CLOCK_BACK_AFTER": "0.2"}
    shown = subprocess.run(
        [sys.executable, "-S", "-c", times],
        env=os.environ | preloaded,
        capture_output=True,
        check=True,
    ).stdout
    assert -86400 < float(shown) < -86300


def test_a_signal_goes_to_one_of_the_processes_of_a_job(tmp_path):
    chance, job = random.Random(0), faults.Job(lambda output: [], lambda output: {})
    with subprocess.Popen(
        ["sh", "-c", "sleep 60 & sleep 60 & wait"], start_new_session=True
    ) as process:

        def victims(which: str) -> set[int]:
            some = dataclasses.replace(job, victims=which)
            return {faults._victim(process, some, chance) for _ in range(100)}

        try:
            while len(victims("children")) < 2:
                pass
            assert victims("itself") == {process.pid}
            assert process.pid not in victims("children") and len(victims("children")) == 2
            assert victims("all") == victims("children") | {process.pid}
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def test_a_changed_text_is_restored(tmp_path):
    (tmp_path / "text").mkdir()
    contents = {f"{n}.txt": f"text {n}".encode() for n in range(4)}
    for name, content in contents.items():
        (tmp_path / "text" / name).write_bytes(content)
    output = tmp_path / "trial" / "train"
    output.mkdir(parents=True)
    read = f"import pathlib; x = [p.read_text() for p in pathlib.Path('{tmp_path}/text').iterdir()]"
    job = faults.Job(
        lambda output: ["timeit", "-n1", "-r1", f"{read}; assert len(x) > 3"], lambda output: {}
    )
    for seed in range(4):
        wrong = faults._change_text(job, output, random.Random(seed))
        assert {path.name: path.read_bytes() for path in (tmp_path / "text").iterdir()} == contents
        # The command fails where a file is gone, with a status that no command has.
        assert not wrong or "status 1" in wrong[0]


def _read(command: pathlib.Path) -> bytes:
    """The command of a process; of one that has ended, nothing."""
    try:
        return command.read_bytes()
    except OSError:
        return b""


@pytest.mark.slow
def test_commands_that_are_disturbed_lose_nothing(tmp_path):
    """One trial of each: two processes, a server, and commands of one process."""
    command = ("benchmarks.faults", f"--folder={tmp_path}", "--times=1")
    env = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"}
    for more in (
        ("--jobs=train", "--faults=cut"),
        ("--jobs=export", "--faults=kill,two,orphan"),
        ("--jobs=serve", "--faults=kill"),
        ("--jobs=pair", "--faults=kill"),
    ):
        run(*command, *more, env=env)
    records = [json.loads(line) for line in (tmp_path / "trials.jsonl").read_text().splitlines()]
    assert [one["wrong"] for one in records] == [[]] * 6
    # What is done is not done again.
    run(*command, "--jobs=export", "--faults=kill,two,orphan", env=env)
    assert len((tmp_path / "trials.jsonl").read_text().splitlines()) == 6
