"""The tables and the plot at the end of a run or an evaluation."""

import io
import json
import math
import pathlib
import shlex
import shutil
import sys
from collections.abc import Mapping
from typing import Any, TypeGuard

import rich.table
import rich.text

from calm_jax.cli import progress
from calm_jax.cli.files import append_line, nan_to_none, os_errors, sync, write_atomically
from calm_jax.config import Config
from calm_jax.errors import UserError, installation
from calm_jax.evaluation.tradeoff import name_of
from calm_jax.run.run_files import STAGES
from calm_jax.run.workdir import Workdir


def _is_finite(value: float | None) -> TypeGuard[float]:
    """False for NaN and infinity, and for None, which stands for them in files."""
    return value is not None and math.isfinite(value)


def _percent(value: float | None) -> str:
    return f"{value:.2%}" if _is_finite(value) else "nothing to score"


def _number(value: float | None) -> str:
    return f"{value:.4g}" if _is_finite(value) else "not finite"


def with_error(values: Mapping, name: str, scale: float) -> str:
    """`values[name] ± values[name_error]`, both times `scale`."""
    value, error = values[name], values[f"{name}_error"]
    if not _is_finite(value):
        return "no positions to score"
    text = f"{scale * value:.2f}"
    # The standard error is NaN where BrierLM is 0 because one of its four factors is not positive.
    return f"{text} ± {scale * error:.2f}" if _is_finite(error) else text


def brier_columns(values: Mapping) -> list[str]:
    """BrierLM and 100 x Brier 1 to 4 of `brier.as_values`, with their standard errors."""
    return [with_error(values, "brierlm", 1), *_factors(values)]


def _factors(values: Mapping) -> list[str]:
    return [with_error(values, f"brier_{order}", 100) for order in range(1, 5)]


def _brier(values: Mapping) -> str:
    return ", ".join(_factors(values))


_LOSSES = {
    "energy": "minus energy score",
    "diffusion": "noise error and bound",
    "flow": "velocity error",
    "softmax": "cross-entropy, nats a token",
}


def _scores(results: Mapping[str, Mapping], name: str, floor: str) -> list[tuple[str, str]]:
    values = results[name]
    score = with_error(values, "brierlm", 1)
    # An edited file may lack the number.
    if not _is_finite(values["brierlm_error"]) and "ngrams" in values:
        score += f", from {values['ngrams']:,.0f} n-grams of four tokens"
    rows = [
        ("  BrierLM", score),
        ("  100 x Brier 1 to 4", _brier(values)),
    ]
    # The floor needs training text, which an evaluation may not have.
    if floor in results:
        floor_values = results[floor]
        rows.insert(
            1, ("  BrierLM of frequencies (the floor)", with_error(floor_values, "brierlm", 1))
        )
        rows.append(("  100 x Brier 1 to 4 of the floor", _brier(floor_values)))
    return rows


def rows(results: Mapping[str, Mapping], config: Config, workdir: Workdir) -> list[tuple[str, str]]:
    """The table of results: names and values. For the arguments see `print_results`."""
    shown = []
    for stage, title in STAGES.items():
        if stage not in results:
            continue
        values = results[stage]
        trained = "converted" if workdir.is_converted else f"step {values['step']}"
        if "training_seconds" in values:
            trained += f", trained in {progress.duration(values['training_seconds'])}"
        shown.append((title.lower(), trained))
        if stage == "autoencoder":
            shown += [
                (
                    f"  held-out {kind}s right, from a sample / the mean",
                    f"{_percent(values[f'{kind}_accuracy_from_sample'])} / "
                    f"{_percent(values[f'{kind}_accuracy_from_mean'])}",
                )
                for kind in ("token", "chunk")
            ]
        else:
            # A head that was added from outside the package is not in `_LOSSES`.
            kind = _LOSSES.get(config.lm.head.name, "as the head defines it")
            loss = f"  validation loss ({kind})"
            shown += [(loss, _number(values["loss"])), *_scores(results, "lm", "floor")]
    if "equal_context" in results:
        scored = config.eval
        shown += [
            (
                "at equal context",
                f"tokens {scored.context_tokens} to {scored.block_tokens} of windows over documents, "
                f"{results['equal_context']['ngrams']:,.0f} n-grams",
            ),
            *_scores(results, "equal_context", "equal_context_floor"),
        ]
    return shown


def print_results(
    results: Mapping[str, Mapping], config: Config, workdir: Workdir, are_evaluated: bool
) -> None:
    """Prints a table of stages, scores and files, and the commands to run next.

    Args:
      results: values by name: "autoencoder", "lm", "floor", "equal_context" and "equal_context_floor", those that were computed.
      config: the config that they were computed with.
      workdir: the run.
      are_evaluated: whether `--mode=eval` computed them.
    """
    table = rich.table.Table(show_header=False)
    for name, value in rows(results, config, workdir):
        table.add_row(name, rich.text.Text(value))
    files = ["report.html", "config.json", "metrics.jsonl", "tensorboard", "samples.txt"]
    files += ["evaluations.jsonl", "plane.png"]
    files = [name for name in files if (workdir.path / name).exists()]
    table.add_row("files", rich.text.Text(f"{workdir.path}/: {', '.join(files)}"))
    path = shlex.quote(str(workdir.path))
    progress.console().print(table, highlight=False)
    if "lm" in results:
        block = config.lm.data.block_tokens
        # A text of the usual length would be refused.
        shorter = f" --max_tokens={block // 2}" if config.sample.max_tokens >= block else ""
        print("next:")
        print(f"  {_python()} -m calm_jax.generate --workdir={path} --prompt=TEXT{shorter}")
        if not workdir.is_converted and not are_evaluated:
            print(f"  {_python()} -m calm_jax.main --mode=eval --config=configs/workdir.py:{path}")
    elif "autoencoder" in results and not workdir.is_converted:
        print("next:")
        print(
            f"  {_python()} -m calm_jax.main --config=configs/workdir.py:{path} --config.stage=lm"
        )


def _python() -> str:
    """This process's Python as a shell finds it: `python` in an environment that is active, otherwise its path."""
    if shutil.which("python") == sys.executable:
        return "python"
    path, here = pathlib.Path(sys.executable), pathlib.Path.cwd()
    return shlex.quote(str(path.relative_to(here) if path.is_relative_to(here) else path))


def append(workdir: Workdir, record: Mapping) -> None:
    """Adds one line to `evaluations.jsonl`. Raises `UserError` if it cannot be written."""
    path = workdir.evaluations_path
    with os_errors(path, "written"):
        append_line(path, json.dumps(nan_to_none(record), allow_nan=False))
        sync(path)


def print_plane(plane: Mapping[str, Any]) -> None:
    """Prints the points of the accuracy-diversity plane (`tradeoff.measure`) as a table."""
    table = rich.table.Table(
        title=f"accuracy and collision (%) over {plane['contexts']} contexts; the rest per chunk"
    )
    for column in ("T", "sampler", "accuracy", "collision", "draws", "decoded", "exact", "ms"):
        table.add_column(column, justify="left" if column == "sampler" else "right")
    for point in plane["points"]:
        table.add_row(
            f"{point['temperature']:.2g}",
            name_of(point),
            with_error(point, "accuracy", 1),
            with_error(point, "collision", 1),
            f"{point['draws']:.1f}",
            f"{point['decoded']:.1f}",
            f"{point['exact']:.1%}",
            f"{1e3 * point['seconds']:.3g}",
        )
    progress.console().print(table, highlight=False)
    if "collision_probability" in plane:
        values = plane["collision_probability"]
        shares = ", ".join(
            f"{name.removeprefix('quantile_')} % {value:.3g}"
            for name, value in values.items()
            if name.startswith("quantile")
        )
        print(
            f"two draws of the model are the same chunk with probability {values['mean']:.3f} (mean over contexts; "
            f"quantiles {shares})"
        )


def check_drawable() -> None:
    """Raises `UserError` if matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"eval.temperatures: the plane is drawn with matplotlib, which is not installed: {installation('plot')}"
        ) from error


def plane_lines(plane: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The points of each sampler, from high temperatures to low ones.

    The line of every sampler of a latent head begins at T = 1, where samples are plain draws of the model.
    """
    points = plane["points"]
    own = [point for point in points if point["sampler"] == "model" and point["temperature"] == 1]
    lines = {}
    for name in dict.fromkeys(map(name_of, points)):
        line = [point for point in points if name_of(point) == name]
        line = line if name == "model" else [*own, *line]
        lines[name] = sorted(line, key=lambda point: -point["temperature"])
    return lines


def draw_plane(plane: Mapping[str, Any], path: pathlib.Path) -> None:
    """Writes a PNG of the points: one line for each sampler, each point labelled with its temperature.

    Samples are more diverse to the left, and more often correct towards the top.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), layout="constrained")
    axes = figure.subplots()
    for name, line in plane_lines(plane).items():
        x, y = ([point[key] for point in line] for key in ("collision", "accuracy"))
        axes.plot(x, y, "o" if name == "model" else "o-", label=name, markersize=4)
        for point in line:
            axes.annotate(
                f"{point['temperature']:.2g}",
                (point["collision"], point["accuracy"]),
                textcoords="offset points",
                xytext=(4, -8),
                fontsize=7,
            )
    axes.set_xlabel("collision: two samples are equal (%)")
    axes.set_ylabel("accuracy: a sample equals the true text (%)")
    axes.legend(title="sampler")
    axes.grid(alpha=0.3)
    image = io.BytesIO()
    figure.savefig(image, dpi=150, format="png")
    write_atomically(path, image.getvalue())
