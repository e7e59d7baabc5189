"""The scripts of launch/ for clouds, with stubs of gcloud and xpk: preemption, status 75 and SIGTERM."""

import os
import shlex
import signal
import subprocess

import pytest

from tests.launch.stubs import CLUSTER, ON_PODS, POD, SAVES, SLICE, Stubs, wait_for
from tests.workdirs import ROOT

# --- TPU pods

RESUME = ("tpu_pod.sh", "resume", *POD, *SLICE, *ON_PODS, "--poll=1")
# The stub of gcloud: lists of states, polls of hosts and copies answer as the test says; every other call succeeds.
CLOUD = """
case "$*" in
    *"queued-resources list"*) answer=$(next states) ;;
    *"echo calm_jax:absent"*) answer=$(next hosts | sed "s/[^ ]* */calm_jax:&\\n/g") ;;
    *" scp "*) answer=$(next copies) ;;
esac
[[ $answer != *fails* ]] || exit 1
echo "$answer"
"""


def told(call: list[str]) -> str:
    """The purpose of a call of gcloud, in a word."""
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


def resume(
    stubs: Stubs, states: list[str], hosts: list[str], copies: tuple[str, ...] = ("",)
) -> tuple[int, list[str]]:
    """The exit status of `resume`, and the purposes of its calls that change something.

    states, hosts, copies: gcloud's answers to the polls of the resource, to those of the hosts, and to scp.
    """
    stubs.add("gcloud", CLOUD)
    stubs.add("sleep", "")
    stubs.answers("states", *states)
    stubs.answers("hosts", *hosts)
    stubs.answers("copies", *copies)
    status, err = stubs.run(*RESUME)
    assert status == 0 or "error: " not in err or "did not become ACTIVE" in err
    asked = [told(call) for call in stubs.named("gcloud")]
    return status, [name for name in asked if name not in ("list", "look")]


SET_UP = ["copy", "install", "run"]


@pytest.mark.slow
def test_a_slice_is_requested_again_after_each_preemption(stubs):
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
        # A host that was rebooted while the others waited for it.
        (["idle idle", "running idle", "1 idle", "running running", "0 0"], 0, 2),
        (["idle idle", "3 1"], 1, 1),
        (["idle idle", "75 1", "running running", "0 0"], 0, 2),
        (["idle idle", "stopped stopped"], 75, 1),
        # A run that was stopped, or failed, before this call of the script is started again.
        (["stopped stopped", "running running", "0 0"], 0, 1),
        (["3 3", "0 0"], 0, 1),
        # A run that another call has started is only polled.
        (["running running", "0 0"], 0, 0),
    ],
)
def test_the_answers_of_hosts_decide_what_resume_does(hosts, status, runs, stubs):
    ended, asked = resume(stubs, ["ACTIVE"], hosts)
    assert (ended, asked) == (status, ["run"] * runs)


@pytest.mark.slow
def test_calls_that_fail_are_tried_again(stubs):
    states = ["fails", "ACTIVE", "fails", "ACTIVE"]
    hosts = ["fails", "absent", "absent", "fails", "0"]
    status, asked = resume(stubs, states, hosts, copies=("fails", ""))
    assert status == 0 and asked == ["copy", *SET_UP]


def test_resume_ends_after_ten_failed_requests(stubs):
    status, asked = resume(stubs, ["FAILED"], [""])
    assert status == 1 and asked == ["delete", "create"] * 10


# A stub of gcloud whose one host is the folder of the stubs.
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
# A stub of python3 -m uv, which makes the virtual environment.
MAKES = """
if [[ $* == "-m uv venv"* ]]; then mkdir -p .venv/bin && touch .venv/bin/activate; fi
"""


@pytest.mark.slow
def test_the_commands_for_hosts_work_in_a_real_shell(stubs):
    """Installed, run, preempted, resumed, stopped, resumed, and ended."""
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


def test_a_workload_restarts_on_75_and_its_command_is_an_exec(stubs):
    """`exec`, so that python gets the pod's signals."""
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


# How xpk runs a command in a pod: a shell passes SIGTERM on to the subshell of the command.
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
