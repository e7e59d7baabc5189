"""Line charts as inline SVG, for report.html.

They do not use matplotlib, which is an optional dependency (for plane.png) and draws in fixed colours. Every run has a report,
and the style sheet of its page adapts the charts to the reader's light or dark mode. A point shows its numbers under the pointer.
"""

import dataclasses
import html
import itertools
import math
from collections.abc import Sequence

_WIDTH, _HEIGHT = 480, 270
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 10, 42
# More points than this are averaged with their neighbours: a report stays small for a run of any length.
_MOST_POINTS = 300
# A positive axis that spans a larger factor is logarithmic.
_LINEAR_SPAN = 30.0
# Colours of the style sheet, classes c0 to c7.
NUM_COLOURS = 8


@dataclasses.dataclass(frozen=True)
class Series:
    """A line of a chart.

    Attributes:
        name: the name in the legend.
        points: (x, y, standard error of y), in the order of the line. A point whose x or y is not finite is left out, and
            an error that is not finite is not drawn.
        labels: one for each point, drawn beside it, where all points are finite; empty for none.
        is_level: a single y, drawn as a dashed line across the chart.
        colour: the number of its colour; -1: by its place among the series.
    """

    name: str
    points: Sequence[tuple[float, ...]]
    labels: Sequence[str] = ()
    is_level: bool = False
    colour: int = -1


def short(value: float) -> str:
    """A number in at most about six characters: "0.123", "1.2M", "3e+20"."""
    if not math.isfinite(value) or abs(value) < 9999.5:
        return f"{value:.4g}"
    if abs(value) >= 999.5e12:
        return f"{value:.3g}"
    # The largest unit of which a number rounded to three digits has at least one.
    size, unit = next(
        (size, unit)
        for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
        if abs(value) >= 0.9995 * size
    )
    return f"{value / size:.3g}{unit}"


class _Axis:
    """An axis: maps values to pixels, on a linear or logarithmic scale, and chooses the ticks."""

    def __init__(self, values: Sequence[float], first: float, last: float):
        low, high = min(values), max(values)
        self._is_log = low > 0 and high / low > _LINEAR_SPAN
        if self._is_log:
            low, high = math.log10(low), math.log10(high)
        margin = 0.04 * (high - low) or abs(high) * 0.1 or 1.0
        self._low, self._high = low - margin, high + margin
        self._first, self._last = first, last

    def __call__(self, value: float) -> float:
        place = math.log10(value) if self._is_log else value
        share = (place - self._low) / (self._high - self._low)
        return round(self._first + share * (self._last - self._first), 1)

    def ticks(self) -> list[float]:
        """Round values, usually four to seven of them."""
        if self._is_log:
            decades = range(math.floor(self._low), math.ceil(self._high) + 1)
            digits = (1, 2, 5) if self._high - self._low < 2 else (1,)
            every = max(1, len(decades) // 6)
            values = [d * 10.0**power for power in decades[::every] for d in digits]
            return [v for v in values if self._low <= math.log10(v) <= self._high]
        rough = (self._high - self._low) / 7
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(d * power for d in (1, 2, 5, 10) if d * power >= rough)
        first = math.ceil(self._low / step)
        return [i * step for i in range(first, math.floor(self._high / step) + 1)]


def _thinned(points: Sequence[tuple[float, ...]]) -> list[tuple[float, ...]]:
    """Points whose values are finite; means of neighbours where there are too many."""
    finite = [point for point in points if all(map(math.isfinite, point[:2]))]
    size = -(-len(finite) // _MOST_POINTS)
    if size <= 1:
        return finite
    groups = [finite[i : i + size] for i in range(0, len(finite), size)]
    return [
        tuple(sum(column) / len(group) for column in zip(*group, strict=True)) for group in groups
    ]


def chart(title: str, series: Sequence[Series], x_label: str) -> str:
    """A `<figure>` with the lines and a legend; empty text if no series has a point. All text is escaped."""
    drawn = [
        dataclasses.replace(
            one,
            points=_thinned(one.points) if not one.labels else one.points,
            colour=(one.colour if one.colour >= 0 else number) % NUM_COLOURS,
        )
        for number, one in enumerate(series)
    ]
    drawn = [one for one in drawn if one.points]
    xs = [point[0] for one in drawn if not one.is_level for point in one.points]
    if not xs:
        return ""
    ys = [point[1] for one in drawn for point in one.points]
    x_axis = _Axis(xs, _LEFT, _WIDTH - _RIGHT)
    y_axis = _Axis(ys, _HEIGHT - _BOTTOM, _TOP)
    parts = [*_grid(x_axis, y_axis), _text(_WIDTH / 2, _HEIGHT - 6, x_label, "middle")]
    for one in drawn:
        parts += _level(one, y_axis) if one.is_level else _line(one, x_axis, y_axis)
    # The title says what a single line is.
    named = drawn if len(drawn) > 1 else []
    legend = "".join(
        f'<span class="c{one.colour}{" level" if one.is_level else ""}">{html.escape(one.name)}</span>'
        for one in named
    )
    title = html.escape(title)
    return (
        f'<figure><figcaption>{title}</figcaption><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{title}">{"".join(parts)}</svg><div class="legend">{legend}</div></figure>'
    )


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}">{html.escape(text)}</text>'


def _grid(x_axis: _Axis, y_axis: _Axis) -> list[str]:
    parts = []
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    for value in x_axis.ticks():
        x = x_axis(value)
        parts.append(f'<path class="grid" d="M{x:g} {_TOP}V{bottom}"/>')
        parts.append(_text(x, bottom + 15, short(value), "middle"))
    for value in y_axis.ticks():
        y = y_axis(value)
        parts.append(f'<path class="grid" d="M{_LEFT} {y:g}H{right}"/>')
        parts.append(_text(_LEFT - 6, y + 4, short(value), "end"))
    return parts


def _level(one: Series, y_axis: _Axis) -> list[str]:
    y = y_axis(one.points[0][1])
    return [f'<path class="line level c{one.colour}" d="M{_LEFT} {y:g}H{_WIDTH - _RIGHT}"/>']


def _line(one: Series, x_axis: _Axis, y_axis: _Axis) -> list[str]:
    bottom, labels = _HEIGHT - _BOTTOM, one.labels or itertools.repeat("")
    path, parts = [], []
    for point, label in zip(one.points, labels, strict=False):
        x, y = x_axis(point[0]), y_axis(point[1])
        path.append(f"{x:g} {y:g}")
        error = point[2] if math.isfinite(point[2]) else 0.0
        shown = f"{one.name}: {short(point[1])} at {short(point[0])}"
        if error:
            # The ends of an error bar stay inside the chart, even if one is below 0 on a logarithmic axis.
            low = point[1] - error
            ends = [bottom if low <= 0 and point[1] > 0 else y_axis(low), y_axis(point[1] + error)]
            top, end = (min(max(end, _TOP), bottom) for end in reversed(ends))
            parts.append(f'<path class="line c{one.colour}" d="M{x:g} {top:g}V{end:g}"/>')
            shown = f"{one.name}: {short(point[1])} ± {short(error)} at {short(point[0])}"
        if len(one.points) <= 60:
            parts.append(
                f'<circle class="c{one.colour}" cx="{x:g}" cy="{y:g}" r="3"><title>{html.escape(shown)}</title></circle>'
            )
        if label:
            parts.append(_text(x + 5, y + 11, label, "start"))
    return [f'<path class="line c{one.colour}" d="M{"L".join(path)}"/>', *parts]
