"""A clock that is set back while a command waits."""

import pytest

from tests.workdirs import run_program

# Waits for two seconds, in a process whose clock was set back by so many seconds; the clock is looked at after 0.2 s.
PROGRAM = """
import pathlib, sys, time
from calm_jax.cli import clock
from calm_jax.training.checkpoint_files import errors_named, writing
true, seconds, waiting = time.time, float(sys.argv[1]), {"read": lambda folder: errors_named(folder, None), "write": writing}
clock._PATIENCE, time.time = 0.2, lambda: true() - seconds
with waiting[sys.argv[2]](pathlib.Path("runs/mine/lm")):
    time.sleep(2)
print("went on")
"""


@pytest.mark.slow
@pytest.mark.parametrize("waits", ["read", "write"])
@pytest.mark.parametrize(
    ("seconds", "status", "shown"),
    [
        (0, 0, "went on"),
        (3600, 75, "interrupted: runs/mine/lm: the clock of this machine was set back by 3600 s"),
    ],
)
def test_a_checkpoint_that_waits_for_a_clock_that_was_set_back_ends_the_process(
    seconds, status, shown, waits
):
    done = run_program(PROGRAM, str(seconds), waits, status=status, timeout=100)
    assert shown in done.stdout + done.stderr
