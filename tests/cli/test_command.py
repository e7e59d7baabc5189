"""How commands end: on bad flags, and when the reader of their output has exited."""

import json
import subprocess
import sys

import pytest

from calm_jax.cli.files import nan_to_none
from tests.workdirs import ROOT, run


@pytest.mark.parametrize(
    "flag, words",
    [
        ("--seed=abc", "seed"),
        ("--temperature=warm", "temperature"),
        ("--max_tokens", "max_tokens"),
        ("--promt=x", "promt"),
    ],
)
def test_a_bad_flag_is_refused_in_one_line(flag, words):
    assert words in run("calm_jax.generate", flag, status=2)


def test_a_command_ends_without_an_error_when_the_reader_of_its_output_exits():
    """As with `| head`: the next write fails with a broken pipe."""
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
    assert process.wait(timeout=60) == 0


def test_nan_and_infinities_become_null_at_every_depth_of_a_json_tree():
    tree = {"a": [{"b": float("nan")}, 1.5], "c": float("inf")}
    assert json.dumps(nan_to_none(tree), allow_nan=False) == '{"a": [{"b": null}, 1.5], "c": null}'


SWALLOWS = """
import contextlib, os, signal
from absl import app
from calm_jax.cli.command import command

@command
def main(argv):
    with contextlib.suppress(BaseException):
        os.kill(os.getpid(), signal.SIGTERM)
    assert False, "a library's own error"

app.run(main)
"""


def test_an_error_that_follows_a_signal_is_the_signals_end():
    done = subprocess.run(
        [sys.executable, "-c", SWALLOWS], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 75
    assert done.stderr == (
        "interrupted: SIGTERM: finished results are kept; give the same command again to go on\n"
    )
