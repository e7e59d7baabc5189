"""What a person and a program see of a run: metrics.jsonl, TensorBoard events, the progress line."""

import json
import math
import pathlib
import sys
import time
from collections.abc import Mapping
from typing import Any

import rich.console
import rich.progress
import tensorboardX

from calm_jax import processes
from calm_jax.atomic import write_atomically
from calm_jax.errors import UserError


def duration(seconds: float) -> str:
    """A duration as people write it: "45 s", "3 min 20 s", "5 h 12 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def finite(value: Any) -> Any:
    """A tree of JSON values in which a number that is not finite is null, as JSON has no NaN."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class MetricsLog:
    """`metrics.jsonl`, one object a line, and the same values as TensorBoard events.

    A record is {"stage", "split", "step", and named values}; a value that is not a finite number
    is null. Every process of several has the same records in mind, and the first one writes them. `seconds` and `tokens_per_second` alone differ between two equal runs.
    """

    def __init__(self, folder: pathlib.Path):
        self._path = folder / "metrics.jsonl"
        self._events_folder = folder / "tensorboard"
        self._events: dict[str, tensorboardX.SummaryWriter] = {}
        self.records: list[dict] = processes.agree(self._read())

    def _read(self) -> list[dict]:
        if not self._path.exists():
            return []
        lines = self._path.read_text(encoding="utf-8", errors="replace").splitlines()
        return [record for line in lines if (record := _parse(line)) is not None]

    def cut_back(self, stage: str, step: int) -> None:
        """Forgets what a stage wrote after `step`, so that no step stands twice after a resume."""
        self.records = [
            record for record in self.records if record["stage"] != stage or record["step"] <= step
        ]
        if not processes.is_first():
            return
        lines = "".join(json.dumps(record) + "\n" for record in self.records)
        write_atomically(self._path, lines)
        self._open_events(stage, purge_step=step + 1)

    def find(self, stage: str, split: str, step: int) -> dict | None:
        """The record of a stage's step, if it was written."""
        for record in reversed(self.records):
            if (record["stage"], record["split"], record["step"]) == (stage, split, step):
                return record
        return None

    def seconds(self, stage: str) -> float:
        """How long a stage has trained up to its last record, over all the runs that it took."""
        times = [record["seconds"] for record in self._of(stage) if record["split"] == "train"]
        return times[-1] if times else 0.0

    def _of(self, stage: str) -> list[dict]:
        return [record for record in self.records if record["stage"] == stage]

    def write(self, stage: str, split: str, step: int, values: Mapping[str, float]) -> None:
        numbers = finite({name: float(value) for name, value in values.items()})
        record = {"stage": stage, "split": split, "step": step} | numbers
        self.records.append(record)
        if not processes.is_first():
            return
        try:
            with open(self._path, "a", encoding="utf-8") as lines:
                lines.write(json.dumps(record) + "\n")
            events = self._open_events(stage)
            for name, value in numbers.items():
                if value is not None:
                    events.add_scalar(f"{split}/{name}", value, step)
            events.flush()
        except OSError as error:
            raise UserError(f"{self._path} cannot be written: {error.strerror}") from error

    def _open_events(self, stage: str, purge_step: int | None = None) -> tensorboardX.SummaryWriter:
        if stage not in self._events:
            folder = str(self._events_folder / stage)
            self._events[stage] = tensorboardX.SummaryWriter(folder, purge_step=purge_step)
        return self._events[stage]

    def close(self) -> None:
        for events in self._events.values():
            events.close()


def _parse(line: str) -> dict | None:
    """A killed run may leave its last line unfinished; what is no record of ours is left out."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    is_record = isinstance(record, dict) and {"stage", "split", "step"} <= record.keys()
    return record if is_record else None


class Progress:
    """A live line on a terminal; on anything else a plain line now and then."""

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
        """Moves the live line."""
        if self._bar:
            self._bar.update(self._task, completed=step, left=self._left(step))

    def values(self, step: int, values: Mapping[str, float]) -> None:
        """Shows a step's values."""
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
        """A line that stays."""
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


def console() -> rich.console.Console:
    """A console whose tables are never cut: what is no terminal gets lines as long as they need to be."""
    return rich.console.Console(width=None if sys.stdout.isatty() else 120)
