"""The scripts of launch/ with stand-ins for what they call: what status 75 and SIGTERM do."""

import os
import pathlib
import shlex
import signal
import subprocess
import time

import pytest

from tests.test_launch import CLUSTER, FOLDER, ON_PODS, POD, RECIPE, SLICE
from tests.test_recipe import ROOT

# A stand-in notes how it was called, and does what its test says.
STUB = """#!/bin/bash
{ printf '%q ' "${0##*/}" "$@"; echo; } >> "$STUBS/calls"
# The first line of a file, which loses it; the last one stays.
next() { head -n 1 "$STUBS/$1"; if (($(wc -l < "$STUBS/$1") > 1)); then sed -i 1d "$STUBS/$1"; fi; }
"""
# Runs until it gets SIGTERM, saves, and ends.
SAVES = """
echo $$ > "$STUBS/pid"
trap 'echo "saved" >> "$STUBS/calls"; exit 75' TERM
while :; do /bin/sleep 0.02; done
"""


class Stubs:
    """Stand-ins in a folder that is first on PATH."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self.environment = {
            "PATH": f"{folder}:/usr/bin:/bin",
            "STUBS": str(folder),
            "HOME": str(folder),
        }

    def add(self, name: str, body: str) -> None:
        path = self.folder / name
        path.write_text(STUB + body)
        path.chmod(0o755)

    def answers(self, name: str, *lines: str) -> None:
        """What `next NAME` gives, one after another."""
        (self.folder / name).write_text("".join(f"{line}\n" for line in lines))

    def calls(self) -> list[list[str]]:
        path = self.folder / "calls"
        return (
            [shlex.split(line) for line in path.read_text().splitlines()] if path.exists() else []
        )

    def named(self, name: str) -> list[list[str]]:
        return [call[1:] for call in self.calls() if call[0] == name]

    def start(self, script: str, *flags: str, **environment: str) -> subprocess.Popen:
        return subprocess.Popen(
            ["bash", str(FOLDER / script), *flags],
            cwd=self.folder,
            env=self.environment | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, script: str, *flags: str, **environment: str) -> tuple[int, str]:
        process = self.start(script, *flags, **environment)
        _, err = process.communicate(timeout=60)
        return process.returncode, err


@pytest.fixture
def stubs(tmp_path) -> Stubs:
    (tmp_path / "stubs").mkdir()
    return Stubs(tmp_path / "stubs")


def wait_for(path: pathlib.Path) -> None:
    deadline = time.monotonic() + 60
    while not (path.exists() and path.read_text().strip()):
        assert time.monotonic() < deadline, path
        time.sleep(0.01)


# --- One host


@pytest.mark.parametrize("statuses, calls", [((0,), 1), ((75, 75, 0), 3), ((75, 3), 2), ((2,), 1)])
def test_one_host_starts_again_on_75_and_on_nothing_else(statuses, calls, stubs):
    stubs.add("python", "exit $(next statuses)")
    stubs.answers("statuses", *map(str, statuses))
    status, _ = stubs.run("single_host.sh", RECIPE, "--config.data.train_files=a 'b'/*")
    assert status == statuses[-1]
    command = ["-m", "calm_jax.main", RECIPE, "--config.data.train_files=a 'b'/*"]
    assert stubs.named("python") == [command] * calls


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_the_script_reaches_the_run_once_and_ends_both(number, stubs):
    stubs.add("python", SAVES)
    process = stubs.start("single_host.sh", RECIPE)
    wait_for(stubs.folder / "pid")
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == 75
    assert [call[0] for call in stubs.calls()] == ["python", "saved"]


def test_a_signal_reaches_the_run_through_the_script_of_all_steps(stubs):
    stubs.add("python", SAVES)
    process = stubs.start("reproduce_calm_m.sh", "--steps=lm,samples", "--workdir=run")
    wait_for(stubs.folder / "pid")
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75 and "the step lm ended with status 75" in err
    assert [call[0] for call in stubs.calls()] == ["python", "saved"]


# --- Slurm

JOB = {"SLURM_JOB_ID": "123", "SLURM_GPUS_ON_NODE": "8", "SLURM_NTASKS_PER_NODE": "8"}


@pytest.mark.parametrize(
    "status, state, requeued",
    [(75, "RUNNING", True), (75, "CANCELLED", False), (75, "", False), (0, "RUNNING", False)],
)
def test_a_job_that_saved_goes_back_into_the_queue_unless_it_was_cancelled(
    status, state, requeued, stubs
):
    stubs.add("srun", f"exit {status}")
    stubs.add("squeue", f"echo {state}")
    stubs.add("scontrol", "")
    assert stubs.run("slurm_gpu.sh", RECIPE, "--workdir=runs/m", **JOB)[0] == status
    (call,) = stubs.named("srun")
    assert call[call.index("python") :] == [
        "python",
        "-m",
        "calm_jax.main",
        RECIPE,
        "--workdir=runs/m",
    ]
    assert stubs.named("scontrol") == [["requeue", "123"]] * requeued


def test_a_signal_to_the_batch_script_goes_to_the_tasks_and_not_to_srun(stubs):
    stubs.add("srun", SAVES)
    # As Slurm does, which gives it to every task.
    stubs.add("scancel", 'kill -TERM "$(cat "$STUBS/pid")"')
    stubs.add("squeue", "echo RUNNING")
    stubs.add("scontrol", "")
    process = stubs.start("slurm_gpu.sh", RECIPE, **JOB)
    wait_for(stubs.folder / "pid")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 75
    assert [call[0] for call in stubs.calls()] == ["srun", "scancel", "saved", "squeue", "scontrol"]
    assert stubs.named("scancel") == [["--signal=TERM", "123"]]


def test_slurm_runs_a_copy_and_takes_one_process_a_gpu(stubs):
    stubs.add("srun", "")
    copy = stubs.folder / "slurm_script"
    copy.write_bytes((FOLDER / "slurm_gpu.sh").read_bytes())
    submitted = JOB | {"SLURM_SUBMIT_DIR": str(ROOT)}
    assert stubs.run(str(copy), RECIPE, **submitted) == (0, "")
    status, err = stubs.run(str(copy), RECIPE, **submitted | {"SLURM_NTASKS_PER_NODE": "1"})
    assert status == 2 and "--gpus-per-node=8 and --ntasks-per-node=1 must be equal" in err
    status, err = stubs.run(str(copy), RECIPE, **submitted | {"SLURM_SUBMIT_DIR": "/"})
    assert status == 2 and "submit from the root of the checkout" in err
    assert len(stubs.named("srun")) == 1


# --- TPU pods

RESUME = ("tpu_pod.sh", "resume", *POD, *SLICE, *ON_PODS, "--poll=1")
# The look at the hosts prints what it is told; everything else works.
CLOUD = """
case "$*" in
    *"queued-resources list"*) next states ;;
    *"echo calm_jax:absent"*) for word in $(next hosts); do echo "calm_jax:$word"; done ;;
esac
"""


def told(call: list[str]) -> str:
    """What a call of gcloud is for."""
    text = " ".join(call)
    for part, name in {
        "queued-resources create": "create",
        "queued-resources delete": "delete",
        "queued-resources list": "list",
        " scp ": "copy",
        "echo calm_jax:absent": "look",
        "uv pip install": "install",
        "nohup": "run",
    }.items():
        if part in text:
            return name
    raise AssertionError(text)


def resume(stubs: Stubs, states: list[str], hosts: list[str]) -> tuple[int, list[str]]:
    stubs.add("gcloud", CLOUD)
    stubs.add("sleep", "")
    stubs.answers("states", *states)
    stubs.answers("hosts", *hosts)
    status, err = stubs.run(*RESUME)
    assert status == 0 or "error: " not in err or "did not become ACTIVE" in err
    asked = [told(call) for call in stubs.named("gcloud")]
    return status, [name for name in asked if name not in ("list", "look")]


SET_UP = ["copy", "install", "run"]


def test_a_slice_is_got_again_after_each_preemption(stubs):
    states = ["", "WAITING_FOR_RESOURCES", "ACTIVE", "ACTIVE", "SUSPENDED", "FAILED", "ACTIVE"]
    hosts = ["absent absent", "running running", "absent absent", "running 0", "0 0"]
    status, asked = resume(stubs, states, hosts)
    assert status == 0
    assert asked == ["create", *SET_UP, "delete", "create", "delete", "create", *SET_UP]
    (first, *_) = [call for call in stubs.named("gcloud") if "create" in call]
    assert "--spot" in first and "--accelerator-type=v5litepod-256" in first
    ran = [call for call in stubs.named("gcloud") if told(call) == "run"]
    assert all("--worker=all" in call and "--distributed=on" in call[-1] for call in ran)


@pytest.mark.parametrize(
    "hosts, status, runs",
    [
        # A host that was booted again while the others waited for it.
        (["idle idle", "running idle", "1 idle", "running running", "0 0"], 0, 2),
        (["idle idle", "3 1"], 1, 1),
        (["idle idle", "75 1", "running running", "0 0"], 0, 2),
        (["idle idle", "stopped stopped"], 75, 1),
        # What was stopped, or failed, before this call of the script is set going by it.
        (["stopped stopped", "running running", "0 0"], 0, 1),
        (["3 3", "0 0"], 0, 1),
        # What another call has started is watched.
        (["running running", "0 0"], 0, 0),
    ],
)
def test_what_hosts_say_decides_what_is_done(hosts, status, runs, stubs):
    ended, asked = resume(stubs, ["ACTIVE"], hosts)
    assert (ended, asked) == (status, ["run"] * runs)


def test_a_request_that_fails_again_and_again_ends(stubs):
    status, asked = resume(stubs, ["FAILED"], [""])
    assert status == 1 and asked == ["delete", "create"] * 10


# A host: a folder, in which commands run; python3 makes what uv would.
HOST = """
command="${!#}"
command=${command#--command=}
cd "$STUBS"
case "$*" in
    *"queued-resources list"*) echo ACTIVE ;;
    *" scp "*) cp "$5" . ;;
    *" ssh "*) bash -c "${command//\\/tmp\\/calm_jax_run/$STUBS/marks}" ;;
esac
"""
MAKES = """
if [[ $* == "-m uv venv"* ]]; then mkdir -p .venv/bin && touch .venv/bin/activate; fi
"""


def test_the_commands_of_hosts_do_what_they_say(stubs):
    """On a host that is a folder: installed, run, preempted, gone on, stopped, gone on, and ended."""
    stubs.add("gcloud", HOST)
    stubs.add("python3", MAKES)
    stubs.add("sleep", "exec /bin/sleep 0.05")
    stubs.add("python", SAVES)
    process = stubs.start(*RESUME, "--mount=mkdir -p mnt")
    wait_for(stubs.folder / "pid")
    assert (stubs.folder / "mnt").is_dir() and (
        stubs.folder / "calm_jax" / "pyproject.toml"
    ).exists()
    # Something on the host asks the run to stop: single_host.sh starts it again there.
    first = int((stubs.folder / "pid").read_text())
    (stubs.folder / "pid").unlink()
    os.kill(first, signal.SIGTERM)
    wait_for(stubs.folder / "pid")
    assert len(stubs.named("python")) == 2
    assert stubs.run("tpu_pod.sh", "stop", *POD)[0] == 0
    process.communicate(timeout=60)
    assert process.returncode == 75 and len(stubs.named("python")) == 2
    assert "saved" in {call[0] for call in stubs.calls()}

    stubs.add("python", "exit 0")
    assert stubs.run(*RESUME)[0] == 0
    (_, _, command) = stubs.named("python")
    assert command == ["-m", "calm_jax.main", "--distributed=on", *ON_PODS]


# --- GKE


def test_a_workload_is_started_again_on_75_and_python_gets_its_signals(stubs):
    stubs.add("xpk", "exit 4")
    create = ("gke_xpk.sh", "create", *CLUSTER, "--workload=w", "--tpu_type=v5litepod-16")
    assert stubs.run(*create, *ON_PODS, "--storage=s", "--docker_image=i")[0] == 4
    assert stubs.run(*create, *ON_PODS)[0] == 4
    given, built = stubs.named("xpk")
    assert given[:2] == built[:2] == ["workload", "create"]
    for part in ("--restart-on-exit-codes=75", "--max-restarts=100", "--tpu-type=v5litepod-16"):
        assert part in given and part in built
    assert "--docker-image=i" in given and "--storage=s" in given
    assert f"--script-dir={ROOT}" in built
    for call in (given, built):
        (command,) = [part for part in call if part.startswith("--command=")]
        main = shlex.split(command.removeprefix("--command=").rpartition(" && ")[2])
        assert main == ["exec", "python", "-m", "calm_jax.main", *ON_PODS]


# xpk's way to run a command in a pod: a shell that hands SIGTERM to the one that the command began in.
POD_SHELL = """
_sigterm() (kill -SIGTERM $! 2>/dev/null;)
trap _sigterm SIGTERM
({command}) & PID=$!
while kill -0 $PID 2>/dev/null; do sleep 0.05; done
wait $PID
"""


def test_sigterm_to_a_pod_reaches_python(stubs):
    stubs.add("xpk", "")
    stubs.add("pip", "")
    stubs.add("python", SAVES)
    stubs.run("gke_xpk.sh", "create", *CLUSTER, "--workload=w", "--tpu_type=t", *ON_PODS)
    (call,) = stubs.named("xpk")
    command = call[-1].removeprefix("--command=")
    process = subprocess.Popen(
        ["bash", "-c", POD_SHELL.format(command=command)], env=stubs.environment, cwd=stubs.folder
    )
    wait_for(stubs.folder / "pid")
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 75


# --- From the raw text to the score


def steps(stubs: Stubs) -> list[str]:
    """What python was called for."""
    found = []
    for call in stubs.named("python"):
        stage = [flag.partition("=")[2] for flag in call if flag.startswith("--config.stage=")]
        found += stage or (["eval"] if "--mode=eval" in call else [call[1].rpartition(".")[2]])
    return found


def test_all_steps_run_in_order_and_what_failed_goes_on(stubs, pile_folder):
    stubs.add("python", "exit $(next statuses)")
    flags = [
        f"--pile={pile_folder}/pile",
        f"--tokenizer={pile_folder}/tokenizer.model",
        f"--validation={pile_folder}/wikitext.json",
        "--prepared=prepared",
        "--workdir=run",
        "--config.lm.training.accumulation_steps=2",
    ]
    # Preempted in the second stage, which goes on by itself, and then out of memory.
    stubs.answers("statuses", "0", "0", "0", "75", "1")
    status, err = stubs.run("reproduce_calm_m.sh", *flags)
    assert status == 1 and "the step lm ended with status 1" in err
    assert steps(stubs) == ["prepare", "prepare", "autoencoder", "lm", "lm"]
    stubs.answers("statuses", "0")
    assert stubs.run("reproduce_calm_m.sh", *flags)[0] == 0
    assert steps(stubs)[5:] == ["prepare", "prepare", "autoencoder", "lm", "eval", "generate"]
    trained = next(call for call in stubs.named("python") if "--config.stage=lm" in call)
    assert f"--config.data.train_files={stubs.folder}/prepared/pile/lm" in trained
    assert f"--workdir={stubs.folder}/run" in trained
    assert "--config.lm.training.accumulation_steps=2" in trained

    # What was scored and written is not done again.
    (stubs.folder / "run").mkdir()
    for name in ("evaluations.jsonl", "headline_samples.jsonl"):
        (stubs.folder / "run" / name).write_text("{}\n")
    assert stubs.run("reproduce_calm_m.sh", *flags)[0] == 0
    assert steps(stubs)[11:] == ["prepare", "prepare", "autoencoder", "lm"]


def test_another_script_does_what_needs_devices(stubs):
    for name in ("python", "elsewhere"):
        stubs.add(name, "")
    run = ("reproduce_calm_m.sh", "--steps=autoencoder,lm,evaluate,samples", "--workdir=run")
    assert stubs.run(*run, "--launcher=elsewhere --nodes=4")[0] == 0
    assert [call[:2] for call in stubs.named("elsewhere")] == [
        ["--nodes=4", RECIPE],
        ["--nodes=4", RECIPE],
        ["--nodes=4", "--mode=eval"],
    ]
    assert steps(stubs) == ["generate"]
