"""How commands end: on bad flags, and when the reader of their output has exited."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from calm_jax.cli import signals
from calm_jax.cli.files import atomic_folder, nan_to_none
from calm_jax.cli.flags import FractionParser
from calm_jax.errors import Interrupted, UserError
from calm_jax.parallel.signals import EndTogetherOnSignal
from tests.workdirs import ROOT, run, run_program

FULL_DISK = "error: No space left on device, for the output or a file: make room; files that are complete are kept\n"


@pytest.mark.parametrize(
    "flag, words",
    [
        ("--seed=abc", "--seed=abc: give a whole number"),
        ("--seed=0xg", "--seed=0xg: give a whole number"),
        ("--top_p=a'b", "--top_p=a'b: give a number"),
        *(
            (f"--temperature={value}", "give a number such as 0.5, or a fraction such as 1/3")
            for value in ("1/", "1/0", "1/2/3", "half")
        ),
        ("--max_tokens", "max_tokens"),
        ("--promt=x", "promt"),
    ],
)
def test_a_bad_flag_is_refused_in_one_line(flag, words):
    assert words in run("calm_jax.generate", flag, status=2)


@pytest.mark.parametrize(("given", "value"), [("0.5", 0.5), ("1/3", 1 / 3), ("1", 1.0)])
def test_a_fraction_is_a_number(given, value):
    assert FractionParser().parse(given) == value


@pytest.mark.parametrize("flag", ["--help", "--helpfull"])
def test_help_is_no_error(flag):
    assert "--prompt" in run("calm_jax.generate", flag)


def test_a_command_ends_without_a_line_when_the_reader_of_its_output_exits():
    """As with `| head`: the next write fails with a broken pipe. Its work may be unfinished, so the status is not 0."""
    code = (
        "import sys\n"
        "from absl import app\n"
        "from calm_jax.cli.command import command\n"
        "from calm_jax.cli.flags import parse_flags\n"
        "@command\n"
        "def main(argv):\n"
        "    for _ in range(100000):\n"
        "        print('text', flush=True)\n"
        "app.run(main, flags_parser=parse_flags)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(timeout=60) == 128 + signal.SIGPIPE


# The error comes when Python flushes its buffer, or without a buffer when absl prints.
@pytest.mark.slow
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_help_that_cannot_be_written_ends_as_all_output_does(unbuffered):
    """As with `--help | true`, `--help > /dev/full` and `--help >&-`."""
    command = [sys.executable, "-m", "calm_jax.generate", "--help"]
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}

    def end(stdout, *shell):
        done = subprocess.run(
            [*shell, *command], cwd=ROOT, env=environment, stdout=stdout, stderr=subprocess.PIPE
        )
        return done.returncode, done.stderr.decode()

    reader, writer = os.pipe()
    os.close(reader)
    assert end(writer) == (128 + signal.SIGPIPE, "")
    os.close(writer)
    with open("/dev/full", "w") as full:
        assert end(full) == (2, FULL_DISK)
    assert end(None, "sh", "-c", 'exec "$0" "$@" >&-') == (0, "")


def test_a_message_that_quotes_much_keeps_its_reason():
    message = str(UserError(f"--seed={'7' * 3000} must be in [0, 2**32)"))
    assert len(message) == 1500
    assert message.startswith("--seed=7") and message.endswith("7 must be in [0, 2**32)")


def test_nan_and_infinities_become_null_at_every_depth_of_a_json_tree():
    tree = {"a": [{"b": float("nan")}, 1.5], "c": float("inf")}
    assert json.dumps(nan_to_none(tree), allow_nan=False) == '{"a": [{"b": null}, 1.5], "c": null}'


PRINTS = """
from absl import app
from calm_jax.cli.command import command

@command
def main(argv):
    print("text")

app.run(main)
"""
TABLE = """
import time
from absl import app
from calm_jax.cli.command import command
from calm_jax.cli.progress import console

@command
def main(argv):
    while True:
        console().print("text")

app.run(main)
"""


def test_output_to_a_full_disk_ends_with_one_line():
    with open("/dev/full", "w") as full:
        done = run_program(PRINTS, status=2, stdout=full)
    assert done.stderr == FULL_DISK


FAILS = """
from absl import app
from calm_jax.cli.command import command
from calm_jax.errors import Interrupted, UserError

@command
def main(argv):
    raise {error}("reason")

app.run(main)
"""


@pytest.mark.parametrize("error, status", [("UserError", 2), ("Interrupted", 75)])
def test_a_line_that_cannot_be_written_does_not_change_the_status(error, status):
    """As with `2>&1 | tee log`, where Ctrl-C ends `tee` first, and with stderr on a full disk."""
    code = FAILS.format(error=error)
    reader, writer = os.pipe()
    os.close(reader)
    with open("/dev/full", "w") as full, os.fdopen(writer, "w") as unread:
        for stderr in (full, unread):
            run_program(code, status=status, stdout=stderr, stderr=stderr)


def test_a_command_needs_no_output():
    """As with `>&- 2>&-`."""
    command = 'exec "$0" -c "$1" >&- 2>&-'
    done = subprocess.run(["sh", "-c", command, sys.executable, PRINTS], cwd=ROOT)
    assert done.returncode == 0


def test_a_table_that_nobody_reads_ends_as_all_output_does():
    command = [sys.executable, "-c", TABLE]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 128 + signal.SIGPIPE


SWALLOWS = """
import contextlib, os, signal
from absl import app
from calm_jax.cli.command import command
from calm_jax.cli.signals import tell_of_no_files

@command
def main(argv):
    if argv[1:]:
        tell_of_no_files()
    with contextlib.suppress(BaseException):
        os.kill(os.getpid(), signal.SIGTERM)
    assert False, "a library's own error"

app.run(main)
"""


def test_an_error_that_follows_a_signal_is_the_signals_end():
    assert run_program(SWALLOWS, status=75).stderr == (
        "interrupted: SIGTERM: files that are complete are kept, and none is half-written; give the same command again\n"
    )
    # A command that writes no files says nothing of them.
    done = run_program(SWALLOWS, "no files", status=75)
    assert done.stderr == "interrupted: SIGTERM: give the same command again\n"


IMPORTS = """
import time
from absl import app
from calm_jax.cli.command import command

@command
def main(argv):
    import signalled
    while True:
        time.sleep(0.01)

app.run(main)
"""
SIGNALLED = """
import os, signal, time
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(1.2)
print("imported", flush=True)
"""


@pytest.mark.slow
def test_a_signal_in_the_midst_of_an_import_is_raised_after_it(tmp_path):
    (tmp_path / "signalled.py").write_text(SIGNALLED)
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = run_program(IMPORTS, status=75, env=environment, timeout=60)
    assert done.stdout == "imported\n"
    assert done.stderr.startswith("interrupted: SIGTERM: ") and done.stderr.count("\n") == 1


NEVER_ENDS = """
import sys, threading, time
from absl import app
from calm_jax.cli import command
from calm_jax.errors import Interrupted

command._EXIT_SECONDS = 1

def late():
    time.sleep(0.5)
    print("Traceback of a library", file=sys.stderr, flush=True)
    time.sleep(1000)

@command.command
def main(argv):
    print("text")
    threading.Thread(target=late).start()
    raise Interrupted("SIGTERM: reason")

app.run(main)
"""


def test_a_thread_that_never_ends_keeps_no_interrupted_command_and_prints_nothing():
    done = run_program(NEVER_ENDS, status=75, timeout=60)
    assert (done.stdout, done.stderr) == ("text\n", "interrupted: SIGTERM: reason\n")


COMPUTES = """
from absl import app
from calm_jax.cli.command import command
from calm_jax.errors import Interrupted

@command
def main(argv):
    import jax, jax.numpy as jnp
    # Minutes of work, for which nobody waits.
    multiply = jax.jit(lambda x: jax.lax.fori_loop(0, 10**6, lambda _, x: 1e-3 * x @ x, x))
    multiply(jnp.ones((500, 500)))
    raise Interrupted("SIGTERM: reason")

app.run(main)
"""


@pytest.mark.slow
def test_what_devices_still_compute_keeps_no_interrupted_command():
    """Python's own end would wait for the device, or crash."""
    done = run_program(COMPUTES, status=75, timeout=120)
    assert (done.stdout, done.stderr) == ("", "interrupted: SIGTERM: reason\n")


FORGETS = """
import os, signal, time
from absl import app
from calm_jax.cli.command import command

class Forgets:
    def __del__(self):
        os.kill(os.getpid(), signal.{name})

@command
def main(argv):
    {within}
        Forgets()
        time.sleep(60)

app.run(main)
"""
TOGETHER = "from calm_jax.parallel.signals import EndTogetherOnSignal as E\n    with E():"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
@pytest.mark.parametrize("within", ["if True:", TOGETHER])
def test_a_signal_that_comes_in_a_destructor_ends_the_command(name, within):
    """Python would print the exception that is raised in a destructor, and go on."""
    code = FORGETS.format(name=name, within=within)
    done = run_program(code, status=75, timeout=50)
    assert done.stderr.startswith(f"interrupted: {name}: ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("within", [contextlib.nullcontext, EndTogetherOnSignal])
def test_a_signal_after_the_result_has_its_name_is_no_interruption(within, tmp_path, monkeypatch):
    """Else the command would ask to be given again, and would then be refused, as its result exists."""
    with signals.EndOnSignal(), atomic_folder(tmp_path / "made", "--output") as folder:
        (folder / "part").touch()
    with pytest.raises(Interrupted), signals.EndOnSignal(), within():
        with atomic_folder(tmp_path / "whole", "--output") as folder:
            (folder / "part").touch()
        # A script and its command may both be signalled.
        for number in (signal.SIGTERM, signal.SIGTERM):
            os.kill(os.getpid(), number)
        assert (tmp_path / "whole" / "part").exists()
        # A later one ends a command that waits for something.
        monkeypatch.setattr(signals, "_SAME_SIGNAL_SECONDS", 0.0)
        os.kill(os.getpid(), signal.SIGTERM)
        pytest.fail("the second signal was ignored")
    with pytest.raises(Interrupted), signals.EndOnSignal():
        os.kill(os.getpid(), signal.SIGTERM)
        pytest.fail("an earlier command's result counted")


def test_a_terminal_that_is_gone_ends_a_command_unless_nohup_started_it():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals.EndOnSignal():
            os.kill(os.getpid(), signal.SIGHUP)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with pytest.raises(Interrupted, match=r"^SIGHUP: "), signals.EndOnSignal():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_command_in_a_folder_that_was_deleted_says_so(tmp_path):
    (tmp_path / "gone").mkdir()
    code = "import os, sys; os.rmdir(os.getcwd()); os.execv(sys.executable, sys.argv[1:])"
    command = [sys.executable, "-m", "calm_jax.report", "runs/x"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = run_program(code, *command, status=2, cwd=tmp_path / "gone", env=environment, timeout=50)
    assert done.stderr == "error: the current folder was deleted: `cd` to another one\n"


def test_what_is_cleaned_up_after_a_signal_is_not_interrupted(monkeypatch):
    monkeypatch.setattr(signals, "_AGAIN_SECONDS", 0.01)
    alarms, again = [], signals.SignalHandler._again

    def counted(self, number, frame):
        alarms.append(number)
        again(self, number, frame)

    monkeypatch.setattr(signals.SignalHandler, "_again", counted)
    done = []
    with pytest.raises(Interrupted), signals.EndOnSignal():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            try:
                raise OSError
            except OSError:
                while len(alarms) < 5:
                    time.sleep(0.001)
            while len(alarms) < 10:
                time.sleep(0.001)
            done.append(True)
    assert done
    number = len(alarms)
    time.sleep(0.05)
    assert len(alarms) == number


def test_a_warning_is_one_line_like_an_error():
    code = (
        "from absl import app, logging; from calm_jax.cli.command import command; "
        "app.run(command(lambda argv: logging.warning('%s is %d', 'x', 1)), argv=['x'])"
    )
    done = run_program(code, timeout=50)
    assert (done.stdout, done.stderr) == ("", "warning: x is 1\n")
    code = code.replace("logging.warning('%s is %d', 'x', 1)", "failing()")
    code = (
        "def failing():\n try: 1 / 0\n except ZeroDivisionError: logging.exception('it failed')\n"
        + code
    )
    done = run_program(code, timeout=50)
    assert done.stderr.startswith("error: it failed\nTraceback")
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")
