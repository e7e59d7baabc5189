"""The metrics of a run, in metrics.jsonl and as TensorBoard events."""

import itertools
import json
import os
import pathlib
from collections.abc import Iterator, Mapping

from absl import logging

from calm_jax.cli.files import (
    append_line,
    nan_to_none,
    os_errors,
    read_file,
    sync,
    write_atomically,
)
from calm_jax.errors import UserError
from calm_jax.parallel import multihost
from calm_jax.training.events import EventFile


class MetricsLog:
    """`metrics.jsonl`, one record a line, and the same values as TensorBoard events.

    Every process keeps the same records in memory; process 0 writes them. Two runs of one config differ only in `seconds`,
    `tokens_per_second`, `mfu` and `peak_memory_bytes`.

    Attributes:
      records: objects {"stage", "split", "step", and named values}; a value that is not finite is None.
    """

    def __init__(self, folder: pathlib.Path):
        self._path = folder / "metrics.jsonl"
        self._events_folder = folder / "tensorboard"
        self._events: dict[str, EventFile] = {}
        records, damaged = read_with_damage(self._path)
        self._is_damaged, self._is_kept = bool(damaged), False
        self.records: list[dict] = multihost.broadcast(records)

    def cut_back(self, stage: str, step: int, num_known: int = 0) -> None:
        """Removes a stage's records after `step`, so that a resumed run writes no step twice.

        The old file is kept beside the new one if it has damaged lines. It is also kept if it lacks records, unless a copy that
        was kept earlier begins with those that it has.

        Args:
          stage: the stage that is resumed.
          step: the step of its checkpoint.
          num_known: how many records there were when that checkpoint was saved.
        """
        self.records = [
            record for record in self.records if record["stage"] != stage or record["step"] <= step
        ]
        if not multihost.is_primary():
            return
        lines = "".join(json.dumps(record) + "\n" for record in self.records)
        num_lost = num_known - len(self.records)
        if num_lost > 0:
            reason = f"{num_lost} of the {num_known} records up to the checkpoint of {stage}, step {step}, are missing"
            # If the resumed run is killed before its next checkpoint, the next one finds the same records missing, and must not keep
            # a second copy.
            self._keep(reason, keeps=self._is_damaged or not self._is_in_a_copy(lines))
        elif self._is_damaged:
            self._keep("its damaged lines are left out from now on", keeps=True)
        write_atomically(self._path, lines)
        self._open_events(stage, purge_step=step + 1)

    def _copies(self) -> Iterator[pathlib.Path]:
        """The names of kept files, in their order; those that exist are followed by those that do not."""
        return (self._path.with_name(f"{self._path.name}{end}") for end in _kept_ends())

    def _is_in_a_copy(self, lines: str) -> bool:
        """Whether a kept file begins with these lines."""
        copies = itertools.takewhile(os.path.lexists, self._copies())
        with os_errors(self._path, "compared with its copies"):
            return any(read_file(copy).startswith(lines.encode()) for copy in copies)

    def _keep(self, reason: str, keeps: bool) -> None:
        """Says what is wrong with the file that was read, and keeps it under another name if `keeps`."""
        kept = ""
        if keeps and not self._is_kept and self._path.exists():
            path = next(path for path in self._copies() if not os.path.lexists(path))
            with os_errors(self._path, "read"):
                content = read_file(self._path)
            write_atomically(path, content)
            kept = f"; the file as it was is kept as {path}"
            self._is_kept = True
        self._is_damaged = False
        print(f"note: {self._path}: {reason}{kept}", flush=True)

    def sync(self) -> None:
        """Waits until the records are on the disk. Raises `UserError` if they cannot be written."""
        if not multihost.is_primary() or not self._path.exists():
            return
        with os_errors(self._path, "written"):
            sync(self._path)

    def find(self, stage: str, split: str, step: int) -> dict | None:
        """The record of a stage's step in a split; None if there is none."""
        for record in reversed(self.records):
            if (record["stage"], record["split"], record["step"]) == (stage, split, step):
                return record
        return None

    def seconds(self, stage: str) -> float:
        """Seconds that a stage has trained up to its last record, summed over its interrupted runs."""
        times = [record.get("seconds") for record in self._of(stage) if record["split"] == "train"]
        # An edited or damaged record may lack the time.
        return next((time for time in reversed(times) if time is not None), 0.0)

    def _of(self, stage: str) -> list[dict]:
        return [record for record in self.records if record["stage"] == stage]

    def write(self, stage: str, split: str, step: int, values: Mapping[str, float]) -> None:
        """Appends a record. Raises `UserError` if it cannot be written."""
        numbers = nan_to_none({name: float(value) for name, value in values.items()})
        record = {"stage": stage, "split": split, "step": step} | numbers
        self.records.append(record)
        if not multihost.is_primary():
            return
        with os_errors(self._path, "written"):
            append_line(self._path, json.dumps(record))
        scalars = {f"{split}/{name}": value for name, value in numbers.items() if value is not None}
        with os_errors(self._events_folder, "written"):
            self._open_events(stage).write(step, scalars)

    def _open_events(self, stage: str, purge_step: int | None = None) -> EventFile:
        if stage not in self._events:
            with os_errors(self._events_folder, "written"):
                self._events[stage] = EventFile(self._events_folder / stage, purge_step)
        return self._events[stage]

    def close(self) -> None:
        """Closes the files for TensorBoard. Raises `UserError` if their last records cannot be written."""
        with os_errors(self._events_folder, "written"):
            for events in self._events.values():
                events.close()


def _kept_ends() -> Iterator[str]:
    yield ".damaged"
    yield from (f".damaged-{number}" for number in itertools.count(2))


def read_records(path: pathlib.Path) -> list[dict]:
    """The records of a metrics.jsonl; an empty list if there is no such file.

    Lines that are not records are left out with a warning. A killed run may leave an unfinished last line, which is left
    out without a warning.

    Raises:
      UserError: if the file cannot be read.
    """
    return read_with_damage(path)[0]


def read_with_damage(path: pathlib.Path) -> tuple[list[dict], list[int]]:
    """`read_records`, and the numbers of the lines that it warns of."""
    try:
        text = read_file(path).decode("utf-8", "replace")
    except FileNotFoundError:
        return [], []
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    *lines, unfinished = text.split("\n")
    records = [_parse(line) for line in lines]
    left_out = [
        number
        for number, (line, record) in enumerate(zip(lines, records, strict=True), 1)
        if record is None and line.strip()
    ]
    if left_out:
        logging.warning(
            "%s: ignoring %d line(s) that are not metrics records; the first is line %d",
            path,
            len(left_out),
            left_out[0],
        )
    whole = [record for record in (*records, _parse(unfinished)) if record is not None]
    return whole, left_out


def _parse(line: str) -> dict | None:
    """The record in a line; None if the line is not a record."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not {"stage", "split", "step"} <= record.keys():
        return None
    values = {name: value for name, value in record.items() if name not in ("stage", "split")}
    is_record = (
        isinstance(record["stage"], str)
        and isinstance(record["split"], str)
        and type(record["step"]) is int
        and 0 <= record["step"] < 2**53
        and all(value is None or is_number(value) for value in values.values())
    )
    return record if is_record else None


def is_number(value: object) -> bool:
    """Whether a value of a JSON file is a finite number that a float can hold."""
    return type(value) in (int, float) and abs(value) < 1e300  # type: ignore[operator,arg-type]
