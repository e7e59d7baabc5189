"""How commands end: on bad flags, and when nobody reads what they print."""

import json
import subprocess
import sys

import pytest

from calm_jax.metrics import finite
from tests.test_recipe import ROOT, run


@pytest.mark.parametrize(
    "flag, words",
    [
        ("--seed=abc", "seed"),
        ("--temperature=warm", "temperature"),
        ("--max_tokens", "max_tokens"),
        ("--promt=x", "promt"),
    ],
)
def test_a_bad_flag_is_one_line(flag, words):
    assert words in run("calm_jax.generate", flag, status=2)


def test_a_command_whose_reader_has_gone_ends_quietly():
    """As with `| head`: the first write after that fails."""
    code = (
        "import sys\n"
        "from absl import app\n"
        "from calm_jax.command import command, parse_flags\n"
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


def test_json_has_null_for_what_is_not_finite_however_deep():
    tree = {"a": [{"b": float("nan")}, 1.5], "c": float("inf")}
    assert json.dumps(finite(tree), allow_nan=False) == '{"a": [{"b": null}, 1.5], "c": null}'
