"""Two commands on one workdir: the second is refused and changes nothing, and a killed one is taken over."""

import os
import re
import signal
import subprocess

import pytest

from tests.workdirs import assert_same_bits, metrics, run, start, train


@pytest.mark.slow
def test_a_second_command_on_a_workdir_is_refused_until_the_first_has_ended(
    finished, text_glob, tmp_path
):
    workdir = tmp_path / "run"
    recipe = f"--config=tests/tiny_recipe.py:{text_glob}"
    command = ("calm_jax.main", recipe, f"--workdir={workdir}")
    often = "--config.lm.training.checkpoint_every=2"
    process = start(*command, often, stderr=subprocess.DEVNULL)
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
        for second in ((recipe,), (recipe, "--overwrite"), (stored, "--mode=eval")):
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
    out = train(text_glob, workdir, often)
    assert re.search(r"lm: resumed at step [468]\n", out)
    assert_same_bits(workdir, finished[0])
    assert metrics(workdir) == metrics(finished[0])
    assert (workdir / "lock").read_bytes() == b""
