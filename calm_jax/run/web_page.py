"""The HTML that the reports of runs have in common: a page with its style, tables, sections and grids of charts."""

import html
from collections.abc import Sequence

from calm_jax.run.charts import NUM_COLOURS

# A page shows at most this many characters of all samples together, and of each folded text, such as the config.
MOST_CHARACTERS = 60_000

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


def html_page(title: str, parts: Sequence[str]) -> str:
    """A whole page of HTML parts, of which empty ones are left out."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body>\n"
        + "\n".join(part for part in parts if part)
        + "\n</body></html>\n"
    )


def table(rows: Sequence[Sequence[str]], head: Sequence[str] = ()) -> str:
    def cells(row: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) + "</tr>"

    top = cells(head, "th") if head else ""
    body = "".join(cells(row, "td") for row in rows)
    return f'<div class="wide"><table>{top}{body}</table></div>'


def section(title: str, *parts: str) -> str:
    """A section, or nothing if all its parts are empty."""
    inside = "\n".join(part for part in parts if part)
    return f"<section><h2>{html.escape(title)}</h2>\n{inside}</section>" if inside else ""


def folded(title: str, text: str) -> str:
    cut = text[:MOST_CHARACTERS] + ("\n..." if len(text) > MOST_CHARACTERS else "")
    return (
        f"<details><summary>{html.escape(title)}</summary><pre>{html.escape(cut)}</pre></details>"
    )


def note(text: str) -> str:
    return f'<p class="note">{html.escape(text)}</p>'


def charts(figures: Sequence[str]) -> str:
    shown = [figure for figure in figures if figure]
    return f'<div class="charts">{"".join(shown)}</div>' if shown else ""
