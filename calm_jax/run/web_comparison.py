"""A page that compares the runs of several workdirs over steps, tokens, FLOPs and seconds."""

import dataclasses
import functools
import html
from collections.abc import Callable, Sequence

import numpy as np

from calm_jax.cli import progress
from calm_jax.cost import flops
from calm_jax.run import report
from calm_jax.run.charts import Series, chart, short
from calm_jax.run.run_files import STAGES, RunFiles
from calm_jax.run.web_page import charts, html_page, note, section, table
from calm_jax.run.workdir import Workdir


@dataclasses.dataclass(frozen=True)
class _Axis:
    """What runs are compared over: `of` gives it for a run, a stage and a step."""

    label: str
    of: Callable[[RunFiles, str, int], float]


def _tokens(run: RunFiles, stage: str, step: int) -> float:
    settings = getattr(run.config, stage)
    return float(step * settings.training.batch_size * settings.data.block_tokens)


def _flops(run: RunFiles, stage: str, step: int) -> float:
    vocab_size = run.workdir.tokenizer.vocab_size
    return _tokens(run, stage, step) * flops.training(run.config, stage, vocab_size)


def _seconds(run: RunFiles, stage: str, step: int) -> float:
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
    ("lm", "validation", "conditional_gap", "conditional gap (compares with one autoencoder)"),
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
    runs = [RunFiles(workdir) for workdir in workdirs]
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        names = [str(run.workdir.path) for run in runs]
    parts = []
    for stage, title in reversed(STAGES.items()):
        rows = [
            f"<h3>{html.escape(what)}</h3>{figures}"
            for compared, split, metric, what in _COMPARED
            if compared == stage
            and (
                figures := charts(
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
        parts.append(section(title, *rows))
    return html_page(
        "runs compared",
        [
            "<h1>Runs compared</h1>",
            table([*_summary(runs, names)], _SUMMARY),
            *(
                note(f"{name}: {text}")
                for run, name in zip(runs, names, strict=True)
                for text in run.left_out
            ),
            *parts,
        ],
    )


def _lines(
    runs: Sequence[RunFiles], names: Sequence[str], stage: str, split: str, metric: str, axis: _Axis
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


def _summary(runs: Sequence[RunFiles], names: Sequence[str]) -> list[Sequence[str]]:
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
