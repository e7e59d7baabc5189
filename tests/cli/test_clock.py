"""A clock that is set back while a command waits."""

import pytest

from tests.workdirs import run_program

# A save of two seconds, in a process whose clock was set back by so many seconds; the clock is looked at after 0.2 s.
PROGRAM = """
import sys, time
from calm_jax.cli import clock
true, seconds = time.time, float(sys.argv[1])
clock._PATIENCE, time.time = 0.2, lambda: true() - seconds
with clock.ends_if_set_back("runs/mine/lm", "the checkpoint", "resumes from it"):
    time.sleep(2)
print("saved")
"""


@pytest.mark.parametrize(
    ("seconds", "status", "shown"),
    [
        (0, 0, "saved"),
        (3600, 75, "interrupted: runs/mine/lm: the clock of this machine was set back by 3600 s"),
    ],
)
def test_a_save_that_waits_for_a_clock_that_was_set_back_ends_the_process(seconds, status, shown):
    done = run_program(PROGRAM, str(seconds), status=status, timeout=100)
    assert shown in done.stdout + done.stderr
