"""Draws docs/pictures/training_curves.svg, the metrics of healthy and of failing runs in docs/training.md.

    python docs/pictures/training_curves.py                # of the values in training_curves.jsonl
    python docs/pictures/training_curves.py DIR DIR ...    # of workdirs, whose values replace those

Needs matplotlib: pip install -c constraints.txt -e '.[plot]'.
"""

import json
import pathlib
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

INK, MUTED = "#1f2933", "#64707d"
COLOURS = ("#0072b2", "#d55e00", "#cc79a7", "#009e73")
HERE = pathlib.Path(__file__).parent
VALUES = HERE / "training_curves.jsonl"
KEPT = (
    "step",
    "brierlm",
    "brier_1",
    "energy_loss",
    "energy_floor",
    "conditional_gap",
    "draw_variance",
    "within_context_variance",
    "target_variance",
)


def collect(folders: list[str]) -> None:
    """Copies the evaluations during training of some workdirs, under the names of their folders."""
    lines = []
    for folder in map(pathlib.Path, folders):
        for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            if record["stage"] == "lm" and record["split"] == "validation_part":
                values = {name: round(record[name], 4) for name in KEPT}
                lines.append(json.dumps({"run": folder.resolve().name} | values) + "\n")
    VALUES.write_text("".join(lines), encoding="utf-8")


def draw(path: pathlib.Path) -> None:
    """Draws the picture of the values that are kept."""
    plt.rcParams["svg.hashsalt"] = "training_curves"
    plt.rcParams |= {"font.size": 9, "text.color": INK, "axes.edgecolor": MUTED}
    runs: dict[str, list[dict]] = {}
    for line in VALUES.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        runs.setdefault(record["run"], []).append(record)
    figure, places = plt.subplots(1, 4, figsize=(12, 3.1), layout="constrained")
    for colour, (name, records) in zip(COLOURS, runs.items(), strict=False):
        steps = [record["step"] for record in records]
        # Of squared distances, the energy score has another size.
        shown = () if "beta=2" in name else ("energy_loss", "conditional_gap")
        for place, metric in zip(places[1:], shown, strict=False):
            values = [record[metric] for record in records]
            place.plot(steps, values, "o-", color=colour, markersize=3)
        # Older runs did not keep Brier-1.
        scores = [
            100 * record["brier_1"] if "brier_1" in record else record["brierlm"]
            for record in records
        ]
        places[0].plot(steps, scores, "o-", color=colour, markersize=3)
        for metric, style in (("draw_variance", "o-"), ("within_context_variance", "o--")):
            shares = [record[metric] / record["target_variance"] for record in records]
            places[3].plot(steps, shares, style, color=colour, markersize=3)
        places[0].plot([], [], "o-", color=colour, markersize=3, label=name)
    places[3].plot([], [], "-", color=MUTED, label="of all draws")
    places[3].plot([], [], "--", color=MUTED, label="within a context")
    places[3].axhline(1, color=MUTED, linewidth=0.8)
    titles = (
        "100 x brier_1 (first run), brierlm",
        "energy_loss",
        "conditional_gap",
        "variance of draws / target_variance",
    )
    for place, title in zip(places, titles, strict=True):
        place.set_title(title, fontsize=9)
        place.set_xlabel("step")
        place.spines[["top", "right"]].set_visible(False)
        place.grid(alpha=0.25)
    places[2].axhline(0, color=MUTED, linewidth=0.8)
    places[3].set_ylim(0, 1.15)
    places[3].legend(fontsize=7, loc="lower right")
    handles, labels = places[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=len(runs), fontsize=9, frameon=False
    )
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        collect(sys.argv[1:])
    draw(HERE / "training_curves.svg")
