"""report.html of a workdir: its results, curves and samples in one file, without network or scripts."""

import html
import json
import math

from calm_jax.cli.files import write_atomically
from calm_jax.config import as_dict
from calm_jax.errors import typed_reason_of
from calm_jax.run import report
from calm_jax.run.charts import Series, chart
from calm_jax.run.run_files import STAGES, RunFiles, as_float, text_of
from calm_jax.run.web_page import MOST_CHARACTERS, charts, folded, html_page, note, section, table
from calm_jax.run.workdir import Workdir

_COST = (
    ("tokens a second", "train", ("tokens_per_second",)),
    ("peak memory, bytes", "train", ("peak_memory_bytes",)),
)
# The charts of each stage: title, split, and the metrics that are drawn together. A metric that is in none of them gets a chart
# of its own.
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
        ("posterior's standard deviation", "validation", ("posterior_std",)),
        ("collapsed latent dimensions", "validation", ("collapsed_dimensions",)),
        *_COST,
    ),
    "lm": (
        ("training loss", "train", ("loss", "head_loss", "token_loss")),
        ("validation loss", "validation", ("loss",)),
        ("BrierLM", "validation", ("brierlm",)),
        ("Brier 1 to 4", "validation", ("brier_1", "brier_2", "brier_3", "brier_4")),
        (
            "the energy score's terms",
            "validation",
            ("energy_loss", "energy_fidelity", "energy_diversity", "energy_floor"),
        ),
        ("conditional gap", "validation", ("conditional_gap",)),
        (
            "variance of latents",
            "validation",
            ("target_variance", "draw_variance", "within_context_variance"),
        ),
        *_COST,
    ),
}


def _name(metric: str) -> str:
    return "BrierLM" if metric == "brierlm" else metric.replace("_", " ")


def _stage_section(run: RunFiles, stage: str) -> str:
    figures, used = [], {("train", "tokens_per_step")}
    for title, split, metrics in _CHARTS[stage]:
        used |= {(split, metric) for metric in metrics}
        lines = [Series(_name(metric), run.points(stage, split, metric)) for metric in metrics]
        if metrics == ("brierlm",) and run.results.get("floor", {}).get("brierlm") is not None:
            floor = run.results["floor"]["brierlm"]
            lines.append(Series("the floor", [(0.0, floor, math.nan)], is_level=True))
        figures.append(chart(title, lines, "step"))
    more = []
    for kind in ("parameter_norm", "update_norm"):
        layers = [name for name in run.metrics(stage, "train") if name.startswith(f"{kind}/")]
        used |= {("train", name) for name in layers}
        lines = [
            Series(name.removeprefix(f"{kind}/"), run.points(stage, "train", name))
            for name in layers
        ]
        more.append(chart(f"{_name(kind)} of each layer", lines, "step"))
    more += [
        chart(f"{_name(metric)} ({split})", [Series(metric, points)], "step")
        for split in ("train", "validation")
        for metric in run.metrics(stage, split)
        if (split, metric) not in used and (points := run.points(stage, split, metric))
    ]
    rest = charts(more)
    if rest:
        rest = f"<details><summary>more metrics</summary>{rest}</details>"
    return section(STAGES[stage], charts(figures), rest)


def _samples(run: RunFiles) -> str:
    """The samples with the boundaries of their chunks; older workdirs have no samples.jsonl, and only the text is shown."""
    if not run.samples:
        text = text_of(run.workdir.samples_path)
        return f"<pre>{html.escape(text[:MOST_CHARACTERS])}</pre>" if text else ""
    tokenizer = run.workdir.tokenizer
    parts = [note(f"Each colour is a chunk of {run.config.chunk_size} tokens; the prompt is grey.")]
    left = MOST_CHARACTERS
    for one in run.samples:
        given, ends = one["prompt"], one["chunk_ends"]
        prompt = given if isinstance(given, str) else tokenizer.decode(given)
        chunks, shown = [], ""
        for number, end in enumerate(ends):
            text = tokenizer.decode(one["tokens"][:end])
            # The bytes of a character may be split over two chunks: the character is shown with the second.
            text = text if end == ends[-1] else text.rstrip("\ufffd")
            kind = "odd" if number % 2 else "even"
            chunks.append(f'<span class="{kind}">{html.escape(text[len(shown) :])}</span>')
            shown = text
        left -= len(prompt) + len(shown)
        if left < 0:
            parts.append(note("The rest is in samples.jsonl."))
            break
        parts.append(f"<pre><b>{html.escape(prompt)}</b>{''.join(chunks)}</pre>")
    return "".join(parts)


def _plane(run: RunFiles) -> str:
    plane = run.plane()
    # Without a context to score, the points have no numbers.
    if plane is None or any(
        p[name] is None for p in plane["points"] for name in ("collision", "accuracy")
    ):
        return ""
    lines = [
        Series(
            name,
            [
                tuple(map(as_float, (p["collision"], p["accuracy"], p["accuracy_error"])))
                for p in line
            ],
            [f"{point['temperature']:.2g}" for point in line],
        )
        for name, line in report.plane_lines(plane).items()
    ]
    title = "accuracy (%), over collision (%): each point is a temperature"
    return charts([chart(title, lines, "collision: two samples are equal (%)")])


def _evaluations(run: RunFiles) -> str:
    rows = [
        (
            str(number),
            _time(record),
            *(
                report.brier_columns(found[name])[0] if name in found else ""
                for name in ("lm", "floor", "equal_context", "equal_context_floor")
            ),
            _num_samples(record),
            _changed(record),
        )
        for number, (found, record) in enumerate(run.evaluations, 1)
    ]
    scores = ("BrierLM", "floor", "at equal context", "its floor")
    head = ("", "time", *scores, "samples per position", "changed keys")
    return table(rows, head) if rows else ""


def _time(record: dict) -> str:
    """When an evaluation ended; nothing for a record of an earlier commit, which does not say so."""
    time = record.get("time")
    return time if isinstance(time, str) else ""


def _changed(record: dict) -> str:
    """In which keys the evaluation's config differed from the run's; nothing for a record of an earlier commit."""
    changed = record.get("changed")
    if not isinstance(changed, dict):
        return ""
    return ", ".join(f"{key}={value}" for key, value in changed.items())


def _num_samples(record: dict) -> str:
    settings = record.get("eval")
    if not isinstance(settings, dict) or "num_samples" not in settings:
        return ""
    return str(settings["num_samples"])


def page(workdir: Workdir, results: str | None = None) -> str:
    """The report of a workdir as HTML: results, curves, samples, evaluations and config.

    Args:
      workdir: the workdir.
      results: what results.json is going to hold; None if it is there.

    Raises `UserError` if the folder is no workdir. Files that are missing or damaged leave their sections out.
    """
    run = RunFiles(workdir, results)
    config = run.config
    about = f"K = {config.chunk_size}, head {config.lm.head.name}, seed {config.seed}"
    sections = [_stage_section(run, stage) for stage in run.stages()]
    latest = run.latest()
    return html_page(
        f"{run.name}: report",
        [
            f"<h1>{html.escape(run.name)}</h1>",
            note(about),
            *map(note, run.left_out),
            section(
                "Results",
                table(report.rows(latest, run.config_of_latest(), workdir)) if latest else "",
            ),
            *sections,
            section("Samples", _samples(run)),
            section("Accuracy and diversity", _plane(run)),
            section("Evaluations", _evaluations(run)),
            section(
                "Config and text",
                folded("config.json", json.dumps(as_dict(config), indent=2)),
                *(
                    folded(path.name, text)
                    for path in (workdir.corpus_path, workdir.memory_path)
                    if (text := text_of(path))
                ),
            ),
        ],
    )


def try_to_write(workdir: Workdir, results: str | None = None) -> None:
    """Writes report.html (see `page`). An error is printed and not raised, as a report must not fail a run that has its results."""
    try:
        write_atomically(workdir.report_path, page(workdir, results))
    except Exception as error:
        reason = typed_reason_of(error)
        print(f"report: {workdir.report_path} was not written ({reason})", flush=True)
