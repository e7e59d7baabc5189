"""Terminal output of long work: durations, tables and the progress line."""

import sys
import time
from collections.abc import Mapping

import rich.console
import rich.progress


def duration(seconds: float) -> str:
    """A duration as people write it: "45 s", "3 min 20 s", "5 h 12 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def counted(number: int, noun: str) -> str:
    """A number of things: "1 document", "2,000 documents"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


class Progress:
    """The progress of a stage: a live line on a terminal, else a plain line for each logged step.

    Args:
      stage: its name.
      first_step: the step that training begins or resumes at.
      num_steps: the last step.
    """

    def __init__(self, stage: str, first_step: int, num_steps: int):
        self._stage, self._first, self._num_steps = stage, first_step, num_steps
        self._began = time.monotonic()
        self._bar = None
        if sys.stdout.isatty():
            self._bar = rich.progress.Progress(
                rich.progress.TextColumn("{task.description}"),
                rich.progress.BarColumn(),
                rich.progress.TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
                rich.progress.TextColumn("{task.fields[values]}"),
                rich.progress.TextColumn("{task.fields[left]}"),
            )
            self._task = self._bar.add_task(
                stage, total=num_steps, completed=first_step, values="compiling", left=""
            )
            self._bar.start()

    def step(self, step: int) -> None:
        """Updates the live line to a step."""
        if self._bar:
            self._bar.update(self._task, completed=step, left=self._left(step))

    def values(self, step: int, values: Mapping[str, float]) -> None:
        """Shows the loss and the speed of a logged step; `values` has "loss" and "tokens_per_second"."""
        loss, speed = values["loss"], values["tokens_per_second"]
        text = f"loss {loss:.4g}  {speed:,.0f} tokens/s"
        if self._bar:
            self._bar.update(self._task, completed=step, values=text, left=self._left(step))
        else:
            print(
                f"{self._stage}: step {step}/{self._num_steps}  {text}  {self._left(step)}",
                flush=True,
            )

    def note(self, text: str) -> None:
        """Prints a line that stays above the live line."""
        if self._bar:
            self._bar.console.print(f"{self._stage}: {text}", highlight=False)
        else:
            print(f"{self._stage}: {text}", flush=True)

    def _left(self, step: int) -> str:
        done = step - self._first
        if done <= 0:
            return ""
        seconds = (time.monotonic() - self._began) / done * (self._num_steps - step)
        return f"{duration(seconds)} left"

    def close(self) -> None:
        if self._bar:
            self._bar.stop()


# Seconds before `Countdown` shows the time left, and between two of its lines if stderr is not a terminal.
_PATIENCE = 10.0
_BETWEEN_LINES = 30.0


class Countdown:
    """Shows on stderr how much of some work is done, and the time left; nothing for work of less than ten seconds.

    On a terminal it is a live line, otherwise a line every half minute. A context manager, which clears the live line.

    Args:
      what: the name of the work, with which the line begins.
      total: the number of items to process.
      unit: the name of the items, in the plural.
      shown: False for a process that prints nothing.
    """

    def __init__(self, what: str, total: int, unit: str, shown: bool = True):
        self._what, self._total, self._unit, self._shown = what, total, unit, shown
        self._live = sys.stderr.isatty()
        # In a log, the last item gets a line after any other line, so that the log does not end at 2 of 3.
        self._owes_last_line = False
        self._done = 0
        self._next = time.monotonic() + _PATIENCE
        # The time and number of items at the first report. The speed is measured from there on, because the first items
        # take longer if a program is compiled for them.
        self._first: tuple[float, int] | None = None
        self._width = 0

    def done(self, number: int) -> None:
        """Notes that `number` items are done in total; a number above `total`, from a filled-up last batch, counts as it."""
        number, now = min(number, self._total), time.monotonic()
        if self._first is None:
            self._first = now, number
        began, first = self._first
        is_end = number == self._total and self._owes_last_line
        if not self._shown or (now < self._next and not is_end) or number == first:
            return
        self._next = now + (1.0 if self._live else _BETWEEN_LINES)
        self._owes_last_line = not self._live and number < self._total
        left = (now - began) / (number - first) * (self._total - number)
        left_text = f", {duration(left)} left" if number < self._total else ""
        self._show(f"{self._what}: {number:,} of {self._total:,} {self._unit}{left_text}")

    def add(self, number: int) -> None:
        """Notes that `number` more items are done."""
        self._done += number
        self.done(self._done)

    def _show(self, line: str) -> None:
        if not self._live:
            print(line, file=sys.stderr, flush=True)
            return
        print(f"\r{line:{self._width}}", end="", file=sys.stderr, flush=True)
        self._width = len(line)

    def __enter__(self) -> "Countdown":
        return self

    def __exit__(self, *_: object) -> None:
        if self._width:
            self._show("")
            print("\r", end="", file=sys.stderr, flush=True)


class _Console(rich.console.Console):
    def on_broken_pipe(self) -> None:
        """Called where `BrokenPipeError` is handled: `calm_jax.cli.command` ends all commands alike, where Rich exits with status 1."""
        raise


def console() -> rich.console.Console:
    """A console for tables: as wide as the terminal, else 120 columns."""
    return _Console(width=None if sys.stdout.isatty() else 120)
