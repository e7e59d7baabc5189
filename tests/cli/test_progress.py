"""The countdown of long work."""

import pytest

from calm_jax.cli import progress


@pytest.fixture
def clock(monkeypatch):
    """Sets the time: `clock(seconds)`."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return lambda seconds: now.__setitem__(0, seconds)


def run(clock, times, total=100, **options) -> None:
    """One thing is done at each of the times."""
    clock(0.0)
    with progress.Countdown("counting", total, "things", **options) as countdown:
        for seconds in times:
            clock(seconds)
            countdown.add(1)


def test_short_work_shows_nothing(clock, capsys):
    run(clock, [0.1 * i for i in range(1, 99)])
    assert capsys.readouterr() == ("", "")


def test_the_first_thing_does_not_count_for_the_time_left(clock, capsys):
    """Sixty seconds for the first of 100, which compiles, and one for each other: 98 are left after the second."""
    run(clock, [60.0 + i for i in range(10)])
    assert capsys.readouterr().err == "counting: 2 of 100 things, 1 min 38 s left\n"


def test_without_a_terminal_there_is_a_line_every_half_minute(clock, capsys):
    run(clock, [float(i) for i in range(1, 101)])
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" of")[0] for line in lines] == [f"counting: {n}" for n in (10, 40, 70, 100)]
    assert lines[1].endswith("1 min 0 s left")


def test_more_than_all_is_all(clock, capsys):
    run(clock, [1.0, 20.0, 21.0, 60.0], total=3)
    assert capsys.readouterr().err.splitlines()[-1] == "counting: 3 of 3 things"


def test_without_a_terminal_lines_that_were_begun_end_with_the_last_thing(clock, capsys):
    run(clock, [1.0, 20.0, 21.0, 22.0], total=3)
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["counting: 2 of 3 things, 19 s left", "counting: 3 of 3 things"]


def test_a_terminal_has_one_line_which_is_cleared(clock, capsys, monkeypatch):
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: True, raising=False)
    run(clock, [float(i) for i in range(1, 13)])
    shown = capsys.readouterr().err.split("\r")
    assert [text.strip() for text in shown if text.strip()] == [
        f"counting: {n} of 100 things, {progress.duration(100 - n)} left" for n in (10, 11, 12)
    ]
    assert not shown[-1] and not shown[-2].strip() and len(shown[-2]) >= len(shown[-3].rstrip())


def test_a_process_that_prints_nothing_shows_nothing(clock, capsys):
    run(clock, [20.0, 40.0], shown=False)
    assert capsys.readouterr() == ("", "")
