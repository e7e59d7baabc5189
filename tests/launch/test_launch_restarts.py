"""The scripts of launch/ for one host, Slurm and the reproduction, with stubs: status 75 and SIGTERM."""

import os
import signal
import sys

import pytest

from tests.launch.stubs import FOLDER, RECIPE, SAVES, Stubs, wait_for
from tests.workdirs import ROOT

# --- One host


@pytest.mark.parametrize("statuses, calls", [((0,), 1), ((75, 75, 0), 3), ((75, 3), 2), ((2,), 1)])
def test_one_host_restarts_on_75_and_on_no_other_status(statuses, calls, stubs):
    stubs.add("python", "exit $(next statuses)")
    stubs.answers("statuses", *map(str, statuses))
    status, _ = stubs.run("single_host.sh", RECIPE, "--config.data.train_files=/a 'b'/*")
    assert status == statuses[-1]
    command = ["-m", "calm_jax.main", RECIPE, "--config.data.train_files=/a 'b'/*"]
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


# Handles signals as calm_jax.main does: a second one ends it before it has saved.
HANDLES_BOTH = """
import os, signal, time

folder, seen = os.environ["STUBS"], []
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, frame: seen.append(number))
with open(f"{folder}/pid", "w") as file:
    file.write("here")
while not seen:
    time.sleep(0.02)
time.sleep(0.2)
raise SystemExit(75 if len(seen) == 1 else 1)
"""


def test_a_terminals_ctrl_c_reaches_the_run_once(stubs):
    """A terminal signals its whole foreground process group."""
    (stubs.folder / "main.py").write_text(HANDLES_BOTH)
    stubs.add("python", f'exec {sys.executable} "$STUBS/main.py"')
    process = stubs.start("single_host.sh", RECIPE, new_session=True)
    wait_for(stubs.folder / "pid")
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 75


def test_a_signal_to_the_reproduction_reaches_the_preparation(stubs, tmp_path):
    """Else it would go on without its script, and keep its folder."""
    stubs.add("python", SAVES)
    for name in [f"pile/{number:02}.jsonl.zst" for number in range(30)] + ["tokenizer", "text"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"text": ""}\n')
    given = f"--pile={tmp_path}/pile", f"--tokenizer={tmp_path}/tokenizer"
    prepared = f"--validation={tmp_path}/text", f"--prepared={tmp_path}/prepared"
    process = stubs.start("reproduce_calm_m.sh", "--steps=prepare", *given, *prepared)
    wait_for(stubs.folder / "pid")
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75 and "the step prepare ended with status 75" in err
    assert [call[0] for call in stubs.calls()] == ["python", "saved"]


def test_a_signal_to_the_reproduction_reaches_the_run(stubs):
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
def test_a_job_that_saved_is_requeued_unless_it_was_cancelled(status, state, requeued, stubs):
    stubs.add("srun", f"exit {status}")
    stubs.add("squeue", f"echo {state}")
    stubs.add("scontrol", "")
    assert stubs.run("slurm_gpu.sh", RECIPE, "--workdir=/runs/m", **JOB)[0] == status
    (call,) = stubs.named("srun")
    assert call[call.index("python") :] == [
        "python",
        "-m",
        "calm_jax.main",
        RECIPE,
        "--workdir=/runs/m",
    ]
    assert stubs.named("scontrol") == [["requeue", "123"]] * requeued


def test_a_signal_to_the_batch_script_goes_to_the_tasks_and_not_to_srun(stubs):
    stubs.add("srun", SAVES)
    # Slurm sends the signal to every task.
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


def test_slurms_copy_of_the_script_works_and_needs_one_task_for_each_gpu(stubs):
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


# --- From the raw text to the score


def steps(stubs: Stubs) -> list[str]:
    """The step of the reproduction that each call of python belongs to."""
    found = []
    for call in stubs.named("python"):
        stage = [flag.partition("=")[2] for flag in call if flag.startswith("--config.stage=")]
        found += stage or (["eval"] if "--mode=eval" in call else [call[1].rpartition(".")[2]])
    return found


def test_the_steps_run_in_order_and_resume_after_a_failure(stubs, pile_folder):
    stubs.add("python", "exit $(next statuses)")
    flags = [
        f"--pile={pile_folder}/pile",
        f"--tokenizer={pile_folder}/tokenizer.model",
        f"--validation={pile_folder}/wikitext.json",
        "--prepared=prepared",
        "--workdir=run",
        "--config.lm.training.accumulation_steps=2",
    ]
    # The second stage is preempted, which restarts it, and then runs out of memory.
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

    # A step whose file exists is not repeated.
    (stubs.folder / "run").mkdir()
    for name in ("evaluations.jsonl", "headline_samples.jsonl"):
        (stubs.folder / "run" / name).write_text("{}\n")
    assert stubs.run("reproduce_calm_m.sh", *flags)[0] == 0
    assert steps(stubs)[11:] == ["prepare", "prepare", "autoencoder", "lm"]


def test_the_launcher_runs_the_steps_that_need_devices(stubs):
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
