"""Draws docs/pictures/two_stages.svg, the picture of CALM's two stages in the README.

    python docs/pictures/two_stages.py [FILE]

Needs matplotlib: pip install -c constraints.txt -e '.[plot]'.
"""

import pathlib
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

INK, MUTED, PAPER = "#1f2933", "#64707d", "#ffffff"
TRAINED, FROZEN, LATENT, TOKEN = "#f2b872", "#cfd6de", "#3f7cac", "#eaf1f7"
CHUNKS = (
    ("def", " add", "(a", ","),
    (" b", "):", "\n", "   "),
    (" return", " a", " +", " b"),
)


def box(axes, x, y, width, height, text, face, *, size=10.5, edge=INK, weight="normal"):
    """A rounded box around its centre (x, y)."""
    patch = FancyBboxPatch(
        (x - width / 2, y - height / 2),
        width,
        height,
        boxstyle="round,pad=0,rounding_size=0.09",
        facecolor=face,
        edgecolor=edge,
        linewidth=1.1,
    )
    axes.add_patch(patch)
    axes.text(x, y, text, ha="center", va="center", color=INK, fontsize=size, fontweight=weight)


def tokens(axes, x, y, words, *, cell=0.62):
    """A chunk: one cell for each token."""
    for place, word in enumerate(words):
        left = x + (place - len(words) / 2) * cell
        axes.add_patch(
            Rectangle((left, y - 0.19), cell, 0.38, facecolor=TOKEN, edgecolor=MUTED, linewidth=0.8)
        )
        shown = word.replace("\n", "\\n").replace(" ", "\u00b7")
        axes.text(
            left + cell / 2,
            y - 0.01,
            shown,
            ha="center",
            va="center",
            color=INK,
            fontsize=7.8,
            family="monospace",
        )


def latent(axes, x, y, seed, *, width=1.5):
    """A latent: one bar for each of some numbers."""
    values = np.random.default_rng(seed).normal(size=22).clip(-2, 2)
    step = width / len(values)
    for place, value in enumerate(values):
        axes.add_patch(
            Rectangle(
                (x - width / 2 + place * step, y),
                0.75 * step,
                0.12 * value,
                facecolor=LATENT,
                edgecolor="none",
            )
        )
    axes.plot([x - width / 2, x + width / 2], [y, y], color=LATENT, linewidth=0.8)


def arrow(axes, start, end, *, style="-", bend=0.0, color=INK):
    axes.add_patch(
        FancyArrowPatch(
            start,
            end,
            arrowstyle="-|>",
            mutation_scale=11,
            linewidth=1.2,
            color=color,
            linestyle=style,
            connectionstyle=f"arc3,rad={bend}",
            shrinkA=0,
            shrinkB=0,
        )
    )


def note(axes, x, y, text, *, size=8.6, ha="center", color=MUTED):
    axes.text(x, y, text, ha=ha, va="center", color=color, fontsize=size, linespacing=1.35)


def stage_1(axes):
    axes.text(0.35, 7.02, "Stage 1: the autoencoder", fontsize=13, fontweight="bold", color=INK)
    note(
        axes,
        0.35,
        6.68,
        "A chunk of K tokens becomes one vector and comes back.",
        ha="left",
        size=9.5,
    )
    y = 5.85
    tokens(axes, 1.75, y, CHUNKS[2])
    note(axes, 1.75, y - 0.42, "K = 4 tokens")
    arrow(axes, (3.05, y), (3.5, y))
    box(axes, 4.2, y, 1.4, 0.62, "encoder", TRAINED)
    arrow(axes, (4.9, y), (5.35, y))
    latent(axes, 6.2, y, 3)
    note(axes, 6.2, y - 0.42, "latent z, 128 numbers")
    arrow(axes, (7.05, y), (7.5, y))
    box(axes, 8.2, y, 1.4, 0.62, "decoder", TRAINED)
    arrow(axes, (8.9, y), (9.35, y))
    tokens(axes, 10.65, y, CHUNKS[2])
    note(axes, 10.65, y - 0.42, "the same tokens, over 99.9 % in the paper")


def stage_2(axes):
    axes.plot([0.35, 12.05], [5.02, 5.02], color="#d5dbe1", linewidth=1)
    axes.text(0.35, 4.55, "Stage 2: the language model", fontsize=13, fontweight="bold", color=INK)
    note(
        axes,
        0.35,
        4.21,
        "A transformer reads chunks; a head draws the vector of the next one.",
        ha="left",
        size=9.5,
    )
    bottom, low, high, top = 0.72, 1.56, 2.5, 3.44
    columns = (1.75, 4.55)
    for x, words in zip(columns, CHUNKS[:2], strict=True):
        tokens(axes, x, bottom, words)
        arrow(axes, (x, bottom + 0.22), (x, low - 0.28))
        box(axes, x, low, 1.9, 0.54, "chunk embedding", TRAINED, size=9.5)
        arrow(axes, (x, low + 0.27), (x, high - 0.3))
    box(axes, 3.15, high, 4.7, 0.6, "transformer, one position for each chunk", TRAINED)
    arrow(axes, (4.55, high + 0.3), (4.55, top - 0.3))
    note(axes, 4.34, 2.98, "hidden state", ha="right")
    box(axes, 4.55, top, 1.9, 0.58, "generative head", TRAINED)
    note(axes, 2.3, top, "random noise", ha="center")
    arrow(axes, (2.95, top), (3.58, top))
    arrow(axes, (5.5, top), (6.1, top))
    latent(axes, 6.95, top, 3)
    note(axes, 6.95, top + 0.42, "draw of the next latent")
    arrow(axes, (7.8, top), (8.4, top))
    box(axes, 9.1, top, 1.4, 0.58, "decoder", FROZEN)
    arrow(axes, (9.1, top - 0.29), (9.1, high + 0.22))
    tokens(axes, 9.1, high, CHUNKS[2])
    note(axes, 10.55, high, "the next chunk", ha="left")
    axes.plot([9.1, 9.1], [high - 0.22, bottom], color=INK, linewidth=1.2)
    arrow(axes, (9.1, bottom), (5.95, bottom))
    note(axes, 7.55, bottom - 0.27, "appended to the text: one step for K tokens")
    box(axes, 10.2, 1.5, 0.34, 0.26, "", TRAINED)
    note(axes, 10.5, 1.5, "trained", ha="left")
    box(axes, 10.2, 1.12, 0.34, 0.26, "", FROZEN)
    note(axes, 10.5, 1.12, "frozen after stage 1", ha="left")


def draw(path: pathlib.Path) -> None:
    """Writes the picture; the ending of the file's name decides the format."""
    # Equal bytes on every call.
    plt.rcParams["svg.hashsalt"] = "two_stages"
    figure = plt.figure(figsize=(12.4, 7.4), facecolor=PAPER)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, 12.4), ylim=(0, 7.4))
    axes.axis("off")
    stage_1(axes)
    stage_2(axes)
    metadata = {"Date": None} if path.suffix == ".svg" else None
    figure.savefig(path, metadata=metadata, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    given = sys.argv[1:]
    draw(pathlib.Path(given[0]) if given else pathlib.Path(__file__).with_suffix(".svg"))
