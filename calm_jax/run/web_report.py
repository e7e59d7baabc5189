"""report.html of a workdir, and a page that compares several: one file each, without network or scripts."""

import dataclasses
import functools
import html
import json
import math
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from calm_jax.cli import progress
from calm_jax.cli.files import write_atomically
from calm_jax.config import as_dict
from calm_jax.cost import flops
from calm_jax.run import report
from calm_jax.run.charts import NUM_COLOURS, Series, chart, short
from calm_jax.run.workdir import Workdir
from calm_jax.training.log import read_records

_STAGES = {"autoencoder": "Autoencoder", "lm": "Language model"}
# Each chart of a stage: its title, the split, the metrics that share it. What is in none has a chart of its own.
_CHARTS = {
    "autoencoder": (
        ("training loss", "train", ("loss", "cross_entropy")),
        ("KL divergence, nats", "train", ("kl",)),
        ("validation loss", "validation", ("loss",)),
        (
            "accuracy on held-out text",
            "validation",
            (
                "token_accuracy_from_mean",
                "token_accuracy_from_sample",
                "chunk_accuracy_from_mean",
                "chunk_accuracy_from_sample",
            ),
        ),
        ("tokens a second", "train", ("tokens_per_second",)),
    ),
    "lm": (
        ("training loss", "train", ("loss", "head_loss", "token_loss")),
        ("validation loss", "validation", ("loss",)),
        ("BrierLM", "validation", ("brierlm",)),
        ("Brier 1 to 4", "validation", ("brier_1", "brier_2", "brier_3", "brier_4")),
        ("tokens a second", "train", ("tokens_per_second",)),
    ),
}
_BRIER = {
    f"brier{name}{error}" for name in ("lm", "_1", "_2", "_3", "_4") for error in ("", "_error")
}
# What each of a run's results must have to be shown, and each sample and point of a plane.
_NEEDED = {
    "autoencoder": {
        f"{kind}_accuracy_from_{what}" for kind in ("token", "chunk") for what in ("sample", "mean")
    },
    "lm": {"loss", *_BRIER},
    "floor": _BRIER,
    "equal_context": {"ngrams", *_BRIER},
    "equal_context_floor": _BRIER,
}
_OF_A_SAMPLE = {"prompt", "tokens", "chunk_ends"}
_OF_A_POINT = {
    "sampler",
    "temperature",
    "candidates",
    "collision",
    "accuracy",
    "accuracy_error",
}
# Characters of all samples, and of the config and other texts, that a page shows at most.
_MOST_CHARACTERS = 60_000

_STYLE = (
    """
:root { color-scheme: light dark; --paper: #fff; --ink: #1b1f24; --muted: #667; --line: #d8dce2; --soft: #f2f4f7;
  --c0: #0072b2; --c1: #d55e00; --c2: #009e73; --c3: #cc79a7; --c4: #b8860b; --c5: #56b4e9; --c6: #7b4bb3; --c7: #555; }
@media (prefers-color-scheme: dark) { :root { --paper: #14171a; --ink: #e6e8ea; --muted: #99a2ad; --line: #333a42;
  --soft: #1f242a; --c0: #4aa8e0; --c1: #f08a45; --c2: #2fc495; --c3: #e29cc4; --c4: #e0b040; --c5: #8fd0f5; --c6: #b094e0;
  --c7: #aaa; } }
* { box-sizing: border-box; }
body { background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 0 auto;
  padding: 1rem; }
h1, h2 { line-height: 1.2; overflow-wrap: anywhere; }
h2 { border-top: 1px solid var(--line); margin-top: 2rem; padding-top: 1rem; }
.note { color: var(--muted); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; }
td, th { border-bottom: 1px solid var(--line); padding: 0.25rem 0.8rem 0.25rem 0; text-align: left; vertical-align: top;
  white-space: pre-wrap; }
.charts { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); }
figure { margin: 0; min-width: 0; max-width: 36rem; }
figcaption { font-weight: 600; }
svg { width: 100%; height: auto; display: block; }
svg text { fill: var(--muted); font-size: 13px; }
.grid { stroke: var(--line); }
.line { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
.level { stroke-dasharray: 5 4; }
circle { stroke: none; }
.legend { display: flex; flex-wrap: wrap; gap: 0.2rem 1rem; font-size: 0.85rem; }
.legend span::before { content: ""; display: inline-block; width: 1.2em; border-top: 3px solid; margin-right: 0.4em;
  vertical-align: middle; }
.legend span.level::before { border-top-style: dashed; }
pre { background: var(--soft); border-radius: 6px; padding: 0.7rem; overflow-x: auto; white-space: pre-wrap;
  overflow-wrap: anywhere; font-size: 0.85rem; }
pre .odd { background: color-mix(in srgb, var(--c0) 22%, transparent); }
pre .even { background: color-mix(in srgb, var(--c1) 16%, transparent); }
pre b { color: var(--muted); font-weight: 400; }
summary { cursor: pointer; padding: 0.5rem 0; }
"""
    + "".join(
        f".c{i} {{ stroke: var(--c{i}); color: var(--c{i}); fill: none; }} circle.c{i} {{ fill: var(--c{i}); }}\n"
        for i in range(NUM_COLOURS)
    )
    + ".legend span { color: var(--ink); }\n"
    + "".join(
        f".legend .c{i}::before {{ border-color: var(--c{i}); }}\n" for i in range(NUM_COLOURS)
    )
)


def _page(title: str, parts: Sequence[str]) -> str:
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body>\n"
        + "\n".join(part for part in parts if part)
        + "\n</body></html>\n"
    )


def _table(rows: Sequence[Sequence[str]], head: Sequence[str] = ()) -> str:
    def cells(row: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) + "</tr>"

    top = cells(head, "th") if head else ""
    body = "".join(cells(row, "td") for row in rows)
    return f'<div class="wide"><table>{top}{body}</table></div>'


def _section(title: str, *parts: str) -> str:
    """A section, or nothing if all its parts are empty."""
    inside = "\n".join(part for part in parts if part)
    return f"<section><h2>{html.escape(title)}</h2>\n{inside}</section>" if inside else ""


def _folded(title: str, text: str) -> str:
    cut = text[:_MOST_CHARACTERS] + ("\n..." if len(text) > _MOST_CHARACTERS else "")
    return (
        f"<details><summary>{html.escape(title)}</summary><pre>{html.escape(cut)}</pre></details>"
    )


def _charts(figures: Sequence[str]) -> str:
    shown = [figure for figure in figures if figure]
    return f'<div class="charts">{"".join(shown)}</div>' if shown else ""


class _Run:
    """What a workdir's files hold; missing ones are empty."""

    def __init__(self, workdir: Workdir):
        self.workdir, self.config = workdir, workdir.config
        self.records = read_records(workdir.metrics_path)
        self.results = _results(_json(workdir.results_path))
        # Each with its results, and with what it says about how they were computed.
        self.evaluations = [
            (found, record)
            for record in _json_lines(workdir.evaluations_path)
            if (found := _results(record)) or "plane" in record
        ]

    @property
    def name(self) -> str:
        return self.workdir.path.resolve().name

    def stages(self) -> list[str]:
        found = {record["stage"] for record in self.records} | set(self.results)
        return [stage for stage in _STAGES if stage in found]

    def of(self, stage: str, split: str) -> list[dict]:
        """The records of a stage: of training, or of validation, on a part of the split or all of it."""
        return [
            record
            for record in self.records
            if record["stage"] == stage and record["split"].startswith(split)
        ]

    def metrics(self, stage: str, split: str) -> list[str]:
        names = dict.fromkeys(name for record in self.of(stage, split) for name in record)
        own = ("stage", "split", "step", "seconds", "ngrams")
        return [name for name in names if name not in own and not name.endswith("_error")]

    def points(
        self, stage: str, split: str, metric: str, x: Callable[[int], float] = float
    ) -> list[tuple[float, ...]]:
        """(x, value, standard error) of a metric, NaN where there is none; `x` is computed of the step."""
        return [
            (
                x(record["step"]),
                _number(record[metric]),
                _number(record.get(f"{metric}_error")),
            )
            for record in self.of(stage, split)
            if metric in record
        ]

    def latest(self) -> dict[str, Any]:
        """The results of training, with those of the latest evaluation over them."""
        scored, _ = self.evaluations[-1] if self.evaluations else ({}, {})
        found = self.results | {
            name: self.results.get(name, {}) | values for name, values in scored.items()
        }
        # Only those of training have the step.
        return {
            name: values
            for name, values in found.items()
            if name not in _STAGES or "step" in values or self.workdir.is_converted
        }

    @functools.cached_property
    def clocks(self) -> dict[str, tuple[list[int], list[float]]]:
        """Of each stage, steps in order, and the seconds of training up to each."""
        clocks = {}
        for stage in _STAGES:
            seconds = {r["step"]: r["seconds"] for r in self.of(stage, "train") if "seconds" in r}
            steps = sorted({0} | set(seconds))
            clocks[stage] = steps, [seconds.get(step, 0.0) for step in steps]
        return clocks


def _has(values: Any, needed: set[str]) -> bool:
    return isinstance(values, dict) and needed <= values.keys()


def _results(record: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The complete ones of the results in a record, by name."""
    return {name: record[name] for name, keys in _NEEDED.items() if _has(record.get(name), keys)}


def _number(value: float | None) -> float:
    """A number of a JSON file, where None stands for one that is not finite."""
    return math.nan if value is None else value


def _json(path: pathlib.Path) -> dict[str, Any]:
    """The object of a file; an empty one if it is missing or damaged."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _json_lines(path: pathlib.Path) -> list[dict]:
    """The objects of a file's lines; damaged lines and a missing file are left out."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            found.append(record)
    return found


def _name(metric: str) -> str:
    return "BrierLM" if metric == "brierlm" else metric.replace("_", " ")


def _stage_section(run: _Run, stage: str) -> str:
    figures, used = [], {("train", "tokens_per_step")}
    for title, split, metrics in _CHARTS[stage]:
        used |= {(split, metric) for metric in metrics}
        lines = [Series(_name(metric), run.points(stage, split, metric)) for metric in metrics]
        if metrics == ("brierlm",) and run.results.get("floor", {}).get("brierlm") is not None:
            floor = run.results["floor"]["brierlm"]
            lines.append(Series("the floor", [(0.0, floor, math.nan)], is_level=True))
        figures.append(chart(title, lines, "step"))
    more = [
        chart(f"{_name(metric)} ({split})", [Series(metric, points)], "step")
        for split in ("train", "validation")
        for metric in run.metrics(stage, split)
        if (split, metric) not in used and (points := run.points(stage, split, metric))
    ]
    folded = _charts(more)
    if folded:
        folded = f"<details><summary>more metrics</summary>{folded}</details>"
    return _section(_STAGES[stage], _charts(figures), folded)


def _samples(run: _Run) -> str:
    """The samples with the boundaries of their chunks; older workdirs have their text alone."""
    drawn = [one for one in _json_lines(run.workdir.samples_jsonl_path) if _has(one, _OF_A_SAMPLE)]
    if not drawn:
        text = _text_of(run.workdir.samples_path)
        return f"<pre>{html.escape(text[:_MOST_CHARACTERS])}</pre>" if text else ""
    tokenizer = run.workdir.tokenizer
    parts = [
        f'<p class="note">Each colour is a chunk of {run.config.chunk_size} tokens; the prompt is grey.</p>'
    ]
    left = _MOST_CHARACTERS
    for one in drawn:
        given, ends = one["prompt"], one["chunk_ends"]
        prompt = given if isinstance(given, str) else tokenizer.decode(given)
        chunks, shown = [], ""
        for number, end in enumerate(ends):
            text = tokenizer.decode(one["tokens"][:end])
            # A character may have bytes of two chunks: it is shown with the second.
            text = text if end == ends[-1] else text.rstrip("\ufffd")
            kind = "odd" if number % 2 else "even"
            chunks.append(f'<span class="{kind}">{html.escape(text[len(shown) :])}</span>')
            shown = text
        left -= len(prompt) + len(shown)
        if left < 0:
            parts.append('<p class="note">The rest is in samples.jsonl.</p>')
            break
        parts.append(f"<pre><b>{html.escape(prompt)}</b>{''.join(chunks)}</pre>")
    return "".join(parts)


def _text_of(path: pathlib.Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _plane(run: _Run) -> str:
    planes = [
        record["plane"]
        for _, record in run.evaluations
        if _has(record.get("plane"), {"points"})
        and all(_has(point, _OF_A_POINT) for point in record["plane"]["points"])
    ]
    # Without a context to score, the points have no numbers.
    if not planes or any(point["collision"] is None for point in planes[-1]["points"]):
        return ""
    lines = [
        Series(
            name,
            [
                tuple(map(_number, (p["collision"], p["accuracy"], p["accuracy_error"])))
                for p in line
            ],
            [f"{point['temperature']:.2g}" for point in line],
        )
        for name, line in report.plane_lines(planes[-1]).items()
    ]
    title = "accuracy (%), over collision (%): each point is a temperature"
    return _charts([chart(title, lines, "collision: two samples are equal (%)")])


def _evaluations(run: _Run) -> str:
    rows = [
        (
            str(number),
            *(
                report.brier_columns(found[name])[0] if name in found else ""
                for name in ("lm", "floor", "equal_context", "equal_context_floor")
            ),
            str(record.get("eval", {}).get("num_samples", "")),
        )
        for number, (found, record) in enumerate(run.evaluations, 1)
    ]
    head = ("", "BrierLM", "floor", "at equal context", "its floor", "samples a place")
    return _table(rows, head) if rows else ""


def page(workdir: Workdir) -> str:
    """The report of a workdir as HTML: results, curves, samples, evaluations and config.

    Raises `UserError` if the folder is no workdir. Files that are missing or damaged leave their sections out.
    """
    run = _Run(workdir)
    config = run.config
    about = f"K = {config.chunk_size}, head {config.lm.head.name}, seed {config.seed}"
    sections = [_stage_section(run, stage) for stage in run.stages()]
    latest = run.latest()
    return _page(
        f"{run.name}: report",
        [
            f"<h1>{html.escape(run.name)}</h1>",
            f'<p class="note">{html.escape(about)}</p>',
            _section("Results", _table(report.rows(latest, config, workdir)) if latest else ""),
            *sections,
            _section("Samples", _samples(run)),
            _section("Accuracy and diversity", _plane(run)),
            _section("Evaluations", _evaluations(run)),
            _section(
                "Config and text",
                _folded("config.json", json.dumps(as_dict(config), indent=2)),
                *(
                    _folded(path.name, text)
                    for path in (workdir.corpus_path, workdir.memory_path)
                    if (text := _text_of(path))
                ),
            ),
        ],
    )


def write(workdir: Workdir) -> pathlib.Path:
    """Writes report.html of a workdir, which appears when it is complete."""
    write_atomically(workdir.report_path, page(workdir))
    return workdir.report_path


def try_to_write(workdir: Workdir) -> None:
    """Writes report.html; prints a line where that fails, because a report must not end a run whose results are there."""
    try:
        write(workdir)
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        print(f"report: {workdir.report_path} was not written ({reason})", flush=True)


@dataclasses.dataclass(frozen=True)
class _Axis:
    """What runs are compared over: `of` gives it for a run, a stage and a step."""

    label: str
    of: Callable[[_Run, str, int], float]


def _tokens(run: _Run, stage: str, step: int) -> float:
    settings = getattr(run.config, stage)
    return float(step * settings.training.batch_size * settings.data.block_tokens)


def _flops(run: _Run, stage: str, step: int) -> float:
    vocab_size = run.workdir.tokenizer.vocab_size
    return _tokens(run, stage, step) * flops.training(run.config, stage, vocab_size)


def _seconds(run: _Run, stage: str, step: int) -> float:
    """Seconds of training up to a step: those of the last record before it, and of a part of the next."""
    return float(np.interp(step, *run.clocks[stage]))


_AXES = (
    _Axis("steps", lambda run, stage, step: float(step)),
    _Axis("tokens", _tokens),
    _Axis("FLOPs", _flops),
    _Axis("seconds of training", _seconds),
)
# Stage, split and metric of each row of charts.
_COMPARED = (
    ("lm", "validation", "brierlm", "BrierLM"),
    ("lm", "validation", "loss", "validation loss (compares within one head and K)"),
    ("lm", "train", "loss", "training loss (compares within one head and K)"),
    (
        "autoencoder",
        "validation",
        "token_accuracy_from_sample",
        "held-out tokens right, from a sample",
    ),
    ("autoencoder", "train", "loss", "training loss"),
)


def comparison(workdirs: Sequence[Workdir]) -> str:
    """A page that compares runs over steps, tokens, FLOPs and seconds. Raises `UserError` if a folder is no workdir."""
    runs = [_Run(workdir) for workdir in workdirs]
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        names = [str(run.workdir.path) for run in runs]
    parts = []
    for stage, title in reversed(_STAGES.items()):
        rows = [
            f"<h3>{html.escape(what)}</h3>{figures}"
            for compared, split, metric, what in _COMPARED
            if compared == stage
            and (
                figures := _charts(
                    [
                        chart(
                            f"over {axis.label}",
                            _lines(runs, names, stage, split, metric, axis),
                            axis.label,
                        )
                        for axis in _AXES
                    ]
                )
            )
        ]
        parts.append(_section(title, *rows))
    return _page(
        "runs compared",
        ["<h1>Runs compared</h1>", _table([*_summary(runs, names)], _SUMMARY), *parts],
    )


def _lines(
    runs: Sequence[_Run], names: Sequence[str], stage: str, split: str, metric: str, axis: _Axis
) -> list[Series]:
    return [
        Series(
            name,
            run.points(stage, split, metric, functools.partial(axis.of, run, stage)),
            colour=number,
        )
        for number, (run, name) in enumerate(zip(runs, names, strict=True))
    ]


_SUMMARY = (
    "run",
    "K",
    "head",
    "steps",
    "tokens",
    "FLOPs",
    "training",
    "BrierLM",
    "floor",
    "equal context",
)


def _summary(runs: Sequence[_Run], names: Sequence[str]) -> list[Sequence[str]]:
    rows: list[Sequence[str]] = []
    for run, name in zip(runs, names, strict=True):
        latest = run.latest()
        step = max((record["step"] for record in run.of("lm", "train")), default=0)
        scores = [
            report.brier_columns(latest[key])[0] if key in latest else ""
            for key in ("lm", "floor", "equal_context")
        ]
        measured = [
            short(step),
            short(_tokens(run, "lm", step)),
            short(_flops(run, "lm", step)),
            progress.duration(_seconds(run, "lm", step)),
        ]
        rows.append((name, str(run.config.chunk_size), run.config.lm.head.name, *measured, *scores))
    return rows
