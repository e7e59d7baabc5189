"""A page that compares runs, or several seeds of each, over steps, tokens, FLOPs and seconds."""

import dataclasses
import html
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from calm_jax.cli import progress
from calm_jax.cost import flops
from calm_jax.run import report
from calm_jax.run.charts import Series, chart, short
from calm_jax.run.run_files import STAGES, RunFiles, as_float
from calm_jax.run.web_page import charts, html_page, note, section, table
from calm_jax.run.workdir import Workdir


@dataclasses.dataclass(frozen=True)
class _Axis:
    """A quantity on the horizontal axis of a chart; `of` computes it from a run, a stage and a step."""

    label: str
    of: Callable[[RunFiles, str, int], float]


def _tokens(run: RunFiles, stage: str, step: int) -> float:
    return step * run.tokens_per_step[stage]


def _flops(run: RunFiles, stage: str, step: int) -> float:
    """Whole blocks are counted, pads included. For records with prompts this is an upper bound, as their blocks may be shorter."""
    settings, vocab_size = getattr(run.config, stage), run.workdir.tokenizer.vocab_size
    tokens = settings.training.batch_size * settings.data.block_tokens
    return float(step * tokens * flops.training(run.config, stage, vocab_size))


def _seconds(run: RunFiles, stage: str, step: int) -> float:
    """Seconds of training up to a step, interpolated linearly between the records of the log."""
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


@dataclasses.dataclass(frozen=True)
class _Arm:
    """An arm of the comparison: runs that differ in their seed alone."""

    name: str
    runs: Sequence[RunFiles]

    @property
    def stage(self) -> str:
        """The stage that the arm's row of the table is about."""
        return "autoencoder" if self.runs[0].stages() == ["autoencoder"] else "lm"

    def line(self, stage: str, split: str, metric: str, axis: _Axis) -> list[tuple[float, ...]]:
        """The `RunFiles.points` of a single run; for more runs, the means with their standard errors over the seeds."""
        lines = [
            {
                step: (axis.of(run, stage, int(step)), value, error)
                for step, value, error in run.points(stage, split, metric)
            }
            for run in self.runs
        ]
        means: list[tuple[float, ...]] = []
        for step in sorted(set().union(*lines)):
            places, values, errors = zip(
                *(line[step] for line in lines if step in line), strict=True
            )
            mean, error = _mean(values) if len(values) > 1 else (values[0], errors[0])
            means.append((float(np.mean(places)), mean, error))
        return means


def _mean(values: Sequence[float]) -> tuple[float, float]:
    """The mean of two or more values, and its standard error."""
    return float(np.mean(values)), float(np.std(values, ddof=1) / np.sqrt(len(values)))


def by_name(workdirs: Sequence[Workdir]) -> dict[str, list[Workdir]]:
    """The runs as arms of one run each, named by their folders, or by their paths if two folders have the same name."""
    names = [workdir.path.resolve().name for workdir in workdirs]
    if len(set(names)) < len(names):
        names = [str(workdir.path) for workdir in workdirs]
    return {name: [workdir] for name, workdir in zip(names, workdirs, strict=True)}


def comparison(workdirs: Mapping[str, Sequence[Workdir]]) -> str:
    """A page that compares runs over steps, tokens, FLOPs and seconds. Raises `UserError` if a folder is no workdir.

    workdirs: the arms by name. An arm with more than one run, which must differ in their seed alone, is one line of each chart:
        their mean, with the standard error over the seeds.
    """
    arms = _arms(workdirs)
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
                            [
                                Series(
                                    arm.name, arm.line(stage, split, metric, axis), colour=number
                                )
                                for number, arm in enumerate(arms)
                            ],
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
            table([_row(arm) for arm in arms], SUMMARY),
            *(
                note(f"{arm.name}: {text}")
                for arm in arms
                for run in arm.runs
                for text in run.left_out
            ),
            *parts,
        ],
    )


SUMMARY = (
    "run",
    "seeds",
    "K",
    "head",
    "steps",
    "tokens",
    "FLOPs",
    "training",
    "tokens right",
    "BrierLM",
    "floor",
    "equal context",
)


def summary(workdirs: Mapping[str, Sequence[Workdir]]) -> list[Sequence[str]]:
    """The rows of the table of `comparison`, under `SUMMARY`: means over seeds with their standard errors.

    For an arm of one run, the standard error of BrierLM is that of the evaluation. FLOPs and seconds are those of the stage that
    the row is about.
    """
    return [_row(arm) for arm in _arms(workdirs)]


def _arms(workdirs: Mapping[str, Sequence[Workdir]]) -> list[_Arm]:
    return [_Arm(name, list(map(RunFiles, several))) for name, several in workdirs.items()]


def _row(arm: _Arm) -> Sequence[str]:
    stage, config = arm.stage, arm.runs[0].config
    steps = [max((one["step"] for one in run.of(stage, "train")), default=0) for run in arm.runs]
    measured = [
        float(
            np.mean([axis.of(run, stage, step) for run, step in zip(arm.runs, steps, strict=True)])
        )
        for axis in _AXES
    ]
    latest = [run.latest() for run in arm.runs]

    def score(key: str) -> str:
        found = [results[key] for results in latest if key in results]
        # The floor depends on the text alone, not on the seed.
        if len(found) < 2 or key == "floor":
            return report.brier_columns(found[0])[0] if found else ""
        mean, error = _mean([as_float(one["brierlm"]) for one in found])
        return report.with_error({"brierlm": mean, "brierlm_error": error}, "brierlm", 1)

    right = [
        as_float(one["autoencoder"]["token_accuracy_from_sample"])
        for one in latest
        if "autoencoder" in one
    ]
    return (
        arm.name,
        str(len(arm.runs)),
        str(config.chunk_size),
        config.lm.head.name if stage == "lm" else stage,
        *map(short, measured[:3]),
        progress.duration(measured[3]),
        f"{np.mean(right):.2%}" if right and np.isfinite(right).all() else "",
        *map(score, ("lm", "floor", "equal_context")),
    )
