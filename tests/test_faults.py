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
from calm_jax.errors import UserError
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
        reference = {"cpu_seconds": 0.01, "seconds": 0.01, "bytes": 1, "outcome": {}}
        record = faults._trial("hung", fault, 0, job, reference, tmp_path)
        assert record["wrong"] == ["it hangs"]
    commands = pathlib.Path("/proc").glob("[0-9]*/cmdline")
    assert not any(sleep[-1].encode() in _read(command) for command in commands)


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_clock_is_set_back_by_a_day(tmp_path):
    times = "import time; a = time.time(); time.sleep(0.5); print(time.time() - a)"
    log = tmp_path / "log"

    def shown(seconds: float) -> float:
        preloaded = {
            "LD_PRELOAD": faults._preloaded(tmp_path, "clock"),
            "CLOCK_BACK_AT": str(time.monotonic() + seconds),
            "CLOCK_LOG": str(log),
        }
        command = [sys.executable, "-S", "-c", times]
        env = os.environ | preloaded
        return float(subprocess.run(command, env=env, capture_output=True, check=True).stdout)

    assert 0.5 <= shown(600) < 100
    assert not log.exists()
    # The process starts within three tenths of a second, or it starts after the jump and sees none.
    between = [shown(0.3) for _ in range(5)]
    assert any(-86400 < seconds < -86300 for seconds in between)
    assert len(log.read_text().splitlines()) == 5


@pytest.mark.slow
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


@pytest.mark.parametrize(
    "about_to_end, status, wrong",
    [
        (5, 75, []),
        (5, 0, []),
        (0, 0, ["0 s after SIGTERM it ended with status 0: "]),
        (5, 3, ["0 s after SIGTERM it ended with status 3: "]),
    ],
)
def test_what_a_signal_meets_is_recorded(about_to_end, status, wrong, tmp_path, monkeypatch):
    """A command that handles SIGTERM has to end with status 75, or very soon with status 0."""
    monkeypatch.setattr(faults, "_ABOUT_TO_END", about_to_end)
    handled = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit({})); "
    # Not signal.pause, which waits for ever if the signal comes just before it.
    rest = "open({!r}, 'w').close()\nwhile True: time.sleep(0.01)"
    ready = tmp_path / "ready"
    code = handled.format(status) + rest.format(str(ready))
    job = faults.Job(lambda output: [], lambda output: {})
    found = faults.Disturbance()
    log = tmp_path / "log"
    log.write_text("")
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        while not ready.exists():
            time.sleep(0.01)
        faults._signal("term", process, job, found, log, random.Random(0))
    assert (found.status, found.wrong, found.has_hit) == (status, wrong, True)
    assert found.victim.startswith("-c import signal")
    assert not faults._handles(process.pid, signal.SIGTERM)
    assert faults._role(process.pid) == "ended"


def test_what_a_fault_finds_on_the_disk_is_recorded(tmp_path):
    output, found = tmp_path / "train", faults.Disturbance()
    job = faults.Job(lambda output: [], faults._of_run)
    found.meets(job, output, 8192)
    assert (found.stage, found.written) == ("", 0)
    (output / "autoencoder").mkdir(parents=True)
    (output / "autoencoder" / "file").write_bytes(b"x")
    found.meets(job, output, 8192)
    assert (found.stage, found.written) == ("autoencoder", 0.5)


def test_a_changed_text_differs_anywhere_and_remains_text():
    texts = [json.dumps({"text": "aio" * n}).encode() for n in range(1, 40)]
    for seed, content in enumerate(texts):
        other = faults._with_other_part(content, random.Random(seed))
        assert other != content and len(other) == len(content)
    content = texts[-1]
    others = [faults._with_other_part(content, random.Random(seed)) for seed in range(50)]
    assert sum(other[:30] == content[:30] for other in others) > 10
    assert sum(other[-30:] == content[-30:] for other in others) > 5
    assert sum(set(json.loads(other)) == {"text"} for other in others if other[:1] == b"{") > 40


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

    def changed(job: faults.Job, seed: int) -> faults.Disturbance:
        found = faults.Disturbance()
        faults._change_text(job, output, found, random.Random(seed))
        return found

    for seed in range(4):
        found = changed(job, seed)
        assert {path.name: path.read_bytes() for path in (tmp_path / "text").iterdir()} == contents
        # The command fails where a file is gone, with a status that no command has.
        assert "status 1" in found.wrong[0] if found.changed else not found.wrong
    # A command that does not look at the text again, after a checkpoint.
    (output / "lm" / "6").mkdir(parents=True)
    careless = dataclasses.replace(job, arguments=lambda output: ["timeit", "-n1", "-r1", "pass"])
    assert changed(careless, 0).wrong == ["it went on with a changed text"]
    (output / "results.json").touch()
    assert changed(careless, 0).wrong == []


def _read(command: pathlib.Path) -> bytes:
    """The command of a process; of one that has ended, nothing."""
    try:
        return command.read_bytes()
    except OSError:
        return b""


# Faults that need the right to mount a tmpfs.
_MOUNTED = ("full", "readonly")
# A trial of each fault: most with an export, the shortest command that starts JAX; a power cut to a training; and what is about
# child processes, with a server and a preparation. tests/run/test_recipe.py kills and stops a training, and
# tests/parallel/test_processes.py one of two processes that train together.
_CAMPAIGN = {
    "train": ("cut",),
    "serve": ("kill",),
    "prepare": ("term", "source"),
    "export": ("kill", "int", "stop", "orphan", "two", "clock", *_MOUNTED),
}


def _can_mount(folder: pathlib.Path) -> bool:
    folder.mkdir()
    try:
        with faults._mounted(folder, 0):
            return True
    except UserError:
        return False


@pytest.mark.slow
def test_commands_that_are_disturbed_lose_nothing(tmp_path):
    assert {fault for some in _CAMPAIGN.values() for fault in some} == set(faults.FAULTS)
    campaign = dict(_CAMPAIGN)
    if not _can_mount(tmp_path / "mounted"):
        print("faults full and readonly are left out: this user cannot mount a tmpfs")
        campaign["export"] = tuple(one for one in campaign["export"] if one not in _MOUNTED)
    command = ("benchmarks.faults", f"--folder={tmp_path}/runs", "--times=1")
    for job, some in campaign.items():
        run(*command, f"--jobs={job}", f"--faults={','.join(some)}")
    trials = tmp_path / "runs" / "trials.jsonl"
    records = [json.loads(line) for line in trials.read_text().splitlines()]
    expected = [(job, fault) for job, some in campaign.items() for fault in some]
    assert [(one["job"], one["fault"]) for one in records] == expected
    assert [one["wrong"] for one in records] == [[]] * len(records)
    # Moments are random, and a fault may come after the command's end; most hit.
    assert sum(one["has_hit"] for one in records) > len(records) / 2
    # What is done is not done again.
    run(*command, "--jobs=export", f"--faults={','.join(campaign['export'])}")
    assert len(trials.read_text().splitlines()) == len(records)
