"""Two commands on one workdir: the second is refused and changes nothing, and a killed one is taken over."""

import json
import os
import re
import shutil
import signal
import subprocess

import pytest

from calm_jax.config import resolve
from calm_jax.errors import UserError
from calm_jax.run import recipe
from calm_jax.run.workdir import Workdir
from calm_jax.training.log import MetricsLog
from calm_jax.training.loop import Profile
from tests.tiny_recipe import get_config
from tests.workdirs import assert_same_bits, metrics, run, start, train


@pytest.mark.slow
def test_a_second_command_on_a_workdir_is_refused_until_the_first_has_ended(
    finished, text_glob, tmp_path
):
    workdir = tmp_path / "run"
    given = f"--config=tests/tiny_recipe.py:{text_glob}"
    command = ("calm_jax.main", given, f"--workdir={workdir}")
    # The commands meet in the second stage, so that the first need not be trained.
    options = (
        f"--config.autoencoder.checkpoint={finished[0]}",
        "--config.lm.training.checkpoint_every=2",
    )
    process = start(*command, *options, stderr=subprocess.DEVNULL)
    for line in process.stdout:
        if line.startswith("lm: step 8/"):
            break
    # Stopped, so that it does not end before the other commands, and still the owner.
    process.send_signal(signal.SIGSTOP)
    # The signal is sent at once, but each thread of the process ends its system call first.
    os.waitpid(process.pid, os.WUNTRACED)
    try:
        before = {path: path.stat().st_mtime_ns for path in workdir.rglob("*")}
        stored = f"--config=configs/workdir.py:{workdir}"
        for second in ((given,), (given, "--overwrite"), (stored, "--mode=eval")):
            line = run("calm_jax.main", *second, f"--workdir={workdir}", status=2)
            assert re.match(
                rf"error: --workdir={workdir} is in use: process {process.pid} on ", line
            )
        assert {path: path.stat().st_mtime_ns for path in workdir.rglob("*")} == before
        text = run("calm_jax.generate", f"--workdir={workdir}", "--prompt=def ")
        assert text.startswith("def ")
    finally:
        process.kill()
        process.communicate()
    out = train(text_glob, workdir, *options)
    assert re.search(r"lm: resumed at step [468]\n", out)
    assert_same_bits(workdir, finished[0])
    ours, expected = (
        [record for record in metrics(one) if record["stage"] == "lm"]
        for one in (workdir, finished[0])
    )
    assert ours == expected and expected
    assert (workdir / "lock").read_bytes() == b""


@pytest.mark.slow
@pytest.mark.parametrize("before", ["the first checkpoint", "the results"])
def test_training_ends_with_an_error_when_its_workdir_is_deleted(
    text_glob, tmp_path, monkeypatch, before
):
    """It neither goes on nor leaves a workdir of checkpoints alone, which no command could read."""
    tree = get_config(text_glob)
    tree.stage = "autoencoder"
    workdir, sync, syncs = tmp_path / "run", MetricsLog.sync, []

    def delete(log: MetricsLog) -> None:
        # The log is synced before each of the three checkpoints, and before the results.
        sync(log)
        syncs.append(log)
        if len(syncs) == {"the first checkpoint": 1, "the results": 4}[before]:
            shutil.rmtree(workdir)

    monkeypatch.setattr(MetricsLog, "sync", delete)
    with pytest.raises(UserError, match=rf"^--workdir={workdir} was deleted, moved or replaced"):
        recipe.run_training(resolve(tree), Workdir(workdir), False, Profile(-1, -1, ""))
    assert not workdir.exists()


OURS = {"train": {"documents": 1, "characters": 2, "fingerprint": "0123456789abcdef"}}


@pytest.mark.parametrize(
    "files",
    [
        {"corpus.json": '{"text": "precious"}'},
        {"corpus.json": json.dumps(OURS)},
        {"tokenizer/model": "precious"},
        {"lock": "", "corpus.json": '{"text": "precious"}'},
        {"lock": "", "tokenizer/vocabulary": "precious"},
        {"lock": "precious", "corpus.json": json.dumps(OURS)},
        {"lock": "precious"},
    ],
)
def test_the_files_of_somebody_else_are_no_begun_workdir(files, tmp_path):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    refused = pytest.raises(
        UserError, match=r"^--workdir=.* (is no workdir|is no lock) of calm_jax"
    )
    with refused, Workdir(tmp_path).owned():
        pass
    assert {
        str(path.relative_to(tmp_path)): path.read_text()
        for path in tmp_path.rglob("*")
        if path.is_file()
    } == files


def test_what_a_killed_command_left_of_a_workdir_is_taken_over(tmp_path):
    """The files in the order in which they are made; each may be the last."""
    signed = "process 7 on host since 2026-01-02 03:04:05 UTC"
    for lock in ("", signed):
        folder = tmp_path / f"lock of {len(lock)} bytes"
        folder.mkdir()
        steps = {
            "lock": lock,
            "tokenizer/model.tmp": "",
            "tokenizer/model": "",
            "tokenizer/description.json": "{}",
            "corpus.json.tmp": "{",
            "corpus.json": json.dumps(OURS),
            "config.json.tmp": "{",
        }
        for name, text in steps.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text)
            with Workdir(folder).owned():
                pass
