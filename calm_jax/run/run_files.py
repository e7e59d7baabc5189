"""Reads the files of a workdir for its report.

Files may be damaged or edited. Records that are incomplete, or whose values have other types than those that a run writes, are
left out, and counted, but for the unfinished last line that a running training may leave in metrics.jsonl.
"""

import dataclasses
import functools
import json
import math
import pathlib
from typing import Any

import numpy as np
from absl import logging

from calm_jax.cli.files import read_file
from calm_jax.config import Config
from calm_jax.errors import UserError
from calm_jax.run.workdir import Workdir
from calm_jax.training.log import is_number, read_with_damage

# The stages, with the titles of their sections in the report.
STAGES = {"autoencoder": "Autoencoder", "lm": "Language model"}
_BRIER = {
    f"brier{name}{error}" for name in ("lm", "_1", "_2", "_3", "_4") for error in ("", "_error")
}
# The numbers that an entry of results.json or evaluations.jsonl needs; an entry that lacks one is not shown.
_NEEDED = {
    "autoencoder": {
        f"{kind}_accuracy_from_{what}" for kind in ("token", "chunk") for what in ("sample", "mean")
    },
    "lm": {"loss", *_BRIER},
    "floor": _BRIER,
    "equal_context": {"ngrams", *_BRIER},
    "equal_context_floor": _BRIER,
}
# Optional numbers of an entry, and the numbers that must be finite.
_WELCOME = ("step", "training_seconds")
_FINITE = (*_WELCOME, "ngrams")


class RunFiles:
    """The content of a workdir's files. A missing file counts as empty.

    Attributes:
      workdir, config: the workdir of the run and its config.
      records: the records of metrics.jsonl.
      results: the complete entries of results.json, by name.
      evaluations: for each line of evaluations.jsonl, its complete entries by name, and the whole record.
      samples: the continuations in samples.jsonl.
      left_out: a sentence for each file with incomplete or damaged parts, which are not shown; each is logged as a warning.
    """

    def __init__(self, workdir: Workdir, results: str | None = None):
        """`results`: what results.json is going to hold; None if it is there."""
        self.workdir, self.config = workdir, workdir.config
        self.left_out: list[str] = []
        self.records, damaged = read_with_damage(workdir.metrics_path)
        if damaged:
            # Reading has warned of them.
            self.left_out.append(_damaged(workdir.metrics_path, len(damaged)))
        if not (self.records or damaged or workdir.is_converted):
            what = "has no records" if workdir.metrics_path.exists() else "is missing"
            self._leave_out(f"{workdir.metrics_path.name} {what}: no curves are shown.")
        text = text_of(workdir.results_path) if results is None else results
        found = _object(text)
        self.results = _results(found)
        has_results = results is not None or workdir.results_path.exists()
        if has_results and not (found and _is_whole(found)):
            self._leave_out(
                f"{workdir.results_path.name}: incomplete or damaged entries are not shown."
            )
        records = _json_lines(workdir.evaluations_path)
        self.evaluations = [
            (found, record)
            for record in records
            if (found := _results(record)) or _is_plane(record.get("plane"))
        ]
        whole = [record for record in records if record and _is_whole(record)]
        self._note(workdir.evaluations_path, len(records) - len(whole))
        vocab_size = workdir.tokenizer.vocab_size
        lines = _json_lines(workdir.samples_jsonl_path)
        self.samples = [one for one in lines if _is_sample(one, vocab_size)]
        self._note(workdir.samples_jsonl_path, len(lines) - len(self.samples))

    def _note(self, path: pathlib.Path, num: int) -> None:
        """Adds a sentence about the incomplete or damaged lines of a file, if it has any."""
        if num:
            self._leave_out(_damaged(path, num))

    def _leave_out(self, sentence: str) -> None:
        """Adds a sentence, and logs it as a warning."""
        self.left_out.append(sentence)
        logging.warning("%s/%s", self.workdir.path, sentence.removesuffix("."))

    @property
    def name(self) -> str:
        return self.workdir.path.resolve().name

    def stages(self) -> list[str]:
        found = {record["stage"] for record in self.records} | set(self.results)
        return [stage for stage in STAGES if stage in found]

    def of(self, stage: str, split: str) -> list[dict]:
        """The log records of a stage. `split`: "train", or "validation" for validation on the whole split or a part of it."""
        return [
            record
            for record in self.records
            if record["stage"] == stage and record["split"].startswith(split)
        ]

    def metrics(self, stage: str, split: str) -> list[str]:
        names = dict.fromkeys(name for record in self.of(stage, split) for name in record)
        own = ("stage", "split", "step", "seconds", "ngrams")
        return [name for name in names if name not in own and not name.endswith("_error")]

    def points(self, stage: str, split: str, metric: str) -> list[tuple[float, ...]]:
        """(step, value, standard error) of a metric in each record, NaN where unknown."""
        return [
            (
                float(record["step"]),
                as_float(record[metric]),
                as_float(record.get(f"{metric}_error")),
            )
            for record in self.of(stage, split)
            if metric in record
        ]

    @functools.cached_property
    def tokens_per_step(self) -> dict[str, float]:
        """For each stage the mean number of tokens in the logged steps that have a loss; NaN without a log.

        It is not rows x `block_tokens`, as records with prompts are shorter, and pads and prompts have no loss.
        """
        means = {}
        for stage in STAGES:
            logged = [as_float(record.get("tokens_per_step")) for record in self.of(stage, "train")]
            # NaN: all updates of the interval were skipped.
            known = [tokens for tokens in logged if math.isfinite(tokens)]
            means[stage] = float(np.mean(known)) if known else math.nan
        return means

    def latest(self) -> dict[str, Any]:
        """The results of training by name, updated by those of the latest evaluation."""
        scored, _ = self.evaluations[-1] if self.evaluations else ({}, {})
        trained = dict(self.results)
        if "lm" in scored:
            # The floor is of the text that is scored, and an evaluation without training text has none.
            trained.pop("floor", None)
        return self._with_steps(
            trained | {name: self.results.get(name, {}) | values for name, values in scored.items()}
        )

    def config_of_latest(self) -> Config:
        """The run's config, with the windows of the latest evaluation, which may have other sizes."""
        _, record = self.evaluations[-1] if self.evaluations else ({}, {})
        section = record.get("eval")
        if not isinstance(section, dict):
            return self.config
        context, block = section.get("context_tokens"), section.get("block_tokens")
        if not isinstance(context, int) or not isinstance(block, int):
            return self.config
        try:
            changed = dataclasses.replace(
                self.config.eval, context_tokens=context, block_tokens=block
            )
        except UserError:  # an edited file
            return self.config
        return dataclasses.replace(self.config, eval=changed)

    def of_training(self) -> dict[str, Any]:
        """The results of training by name."""
        return self._with_steps(self.results)

    def _with_steps(self, results: dict[str, Any]) -> dict[str, Any]:
        """Leaves out a trained stage without a `step`, as in an edited file: tables show the step."""
        return {
            name: values
            for name, values in results.items()
            if name not in STAGES or "step" in values or self.workdir.is_converted
        }

    def plane(self) -> dict[str, Any] | None:
        """The accuracy-diversity plane of the latest evaluation that has one."""
        planes = [record["plane"] for _, record in self.evaluations if "plane" in record]
        planes = [plane for plane in planes if _is_plane(plane)]
        return planes[-1] if planes else None

    @functools.cached_property
    def clocks(self) -> dict[str, tuple[list[int], list[float]]]:
        """For each stage, the logged steps in ascending order from 0, and the seconds of training up to each of them."""
        clocks = {}
        for stage in STAGES:
            seconds = {
                record["step"]: record["seconds"]
                for record in self.of(stage, "train")
                if record.get("seconds") is not None
            }
            steps = sorted({0} | set(seconds))
            clocks[stage] = steps, [seconds.get(step, 0.0) for step in steps]
        return clocks


def _damaged(path: pathlib.Path, num: int) -> str:
    lines = f"{num} line has" if num == 1 else f"{num} lines have"
    return f"{path.name}: {lines} incomplete or damaged content, which is not shown."


def as_float(value: float | None) -> float:
    """A number of a JSON file, where None stands for one that is not finite."""
    return math.nan if value is None else float(value)


def _results(record: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The complete entries of a record, by name: those with all numbers of `_NEEDED`, of the right types."""
    found = {}
    for name, needed in _NEEDED.items():
        values = record.get(name)
        if not isinstance(values, dict) or not needed <= values.keys():
            continue
        shown = [*needed, *(key for key in _WELCOME if key in values)]
        # None stands for a number that is not finite, which a count or a time cannot be.
        if all(
            is_number(values[key]) or (values[key] is None and key not in _FINITE) for key in shown
        ):
            found[name] = values
    return found


def is_complete(name: str, values: dict[str, Any]) -> bool:
    """Whether the results of a stage have all numbers that the report needs."""
    return name in _results({name: values})


def _is_sample(one: dict, vocab_size: int) -> bool:
    if not {"prompt", "tokens", "chunk_ends"} <= one.keys():
        return False
    prompt, tokens, ends = one["prompt"], one["tokens"], one["chunk_ends"]
    return (
        (isinstance(prompt, str) or _are_ints(prompt, vocab_size - 1))
        and _are_ints(tokens, vocab_size - 1)
        and _are_ints(ends, len(tokens))
        and ends == sorted(ends)
    )


def _are_ints(values: Any, most: int) -> bool:
    return isinstance(values, list) and all(type(x) is int and 0 <= x <= most for x in values)


def _is_whole(record: dict[str, Any]) -> bool:
    """Whether all entries of a record, and its plane if it has one, are complete."""
    has_plane = "plane" not in record or _is_plane(record["plane"])
    return has_plane and record.keys() & _NEEDED.keys() == _results(record).keys()


def _is_plane(plane: Any) -> bool:
    return (
        isinstance(plane, dict)
        and isinstance(plane.get("points"), list)
        and bool(plane["points"])
        and all(map(_is_point, plane["points"]))
    )


def _is_point(point: Any) -> bool:
    measured = ("collision", "accuracy", "accuracy_error")
    return (
        isinstance(point, dict)
        and {"sampler", "temperature", "candidates", *measured} <= point.keys()
        and isinstance(point["sampler"], str)
        and is_number(point["temperature"])
        and is_number(point["candidates"])
        # None: there was no context to score.
        and all(point[name] is None or is_number(point[name]) for name in measured)
    )


def text_of(path: pathlib.Path) -> str:
    """The text of a file; empty if it cannot be read."""
    try:
        return read_file(path).decode("utf-8", "replace")
    except OSError:
        return ""


def _json_lines(path: pathlib.Path) -> list[dict]:
    """The objects of a file's lines, empty ones for damaged lines."""
    # Not `splitlines`: JSON strings may hold other line ends, such as U+2028.
    return [_object(line) for line in text_of(path).split("\n") if line.strip()]


def _object(text: str) -> dict[str, Any]:
    """Parses a text as a JSON object. Returns an empty dict for any other text."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
