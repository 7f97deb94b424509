"""Line charts as numbers: templates/chart.html draws them as SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

WIDTH, HEIGHT = 520, 220
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 12, 34
MAX_POINTS = 400
_FLAT = 0.004
"""Values that differ by a smaller share of the largest have ticks of the same four digits."""
Points = Sequence[tuple[float, float]]


class Format(Protocol):
    """Writes a value, by default with three or four digits."""

    def __call__(self, value: float, /, digits: int = ...) -> str: ...


class Tick(NamedTuple):
    at: float
    label: str


class Line(NamedTuple):
    """A drawn line; `points` is the `points` attribute of a polyline, and `number` the place from 1
    among all lines asked for, drawn or not, which gives the colour."""

    name: str
    number: int
    points: str
    last: tuple[float, float]


class Chart(NamedTuple):
    title: str
    x_label: str
    lines: tuple[Line, ...]
    missing: tuple[str, ...]
    """Names of the lines that are not drawn."""
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    summary: str
    """The same in words."""


def plain(value: float, digits: int = 4) -> str:
    """A number with at most `digits` digits; a whole one below a million with all of them."""
    is_short = float(value).is_integer() and abs(value) < 1e6
    return f"{value:.0f}" if is_short else f"{value:.{digits}g}"


def line(
    title: str,
    x_label: str,
    data: Points,
    x_format: Format = plain,
) -> Chart | None:
    """A chart of the finite points of one line; None for fewer than two."""
    return overlay(title, x_label, {"": data}, x_format)


def overlay(
    title: str,
    x_label: str,
    data: Mapping[str, Points],
    x_format: Format = plain,
) -> Chart | None:
    """A chart of several lines by name, on common axes. Of each, the finite points count, at most
    MAX_POINTS are drawn, and fewer than two make no line; None if no line is left. The axis of
    values that are all within 0 and 1 is, too."""
    finite = {
        name: [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
        for name, points in data.items()
    }
    finite = {name: points for name, points in finite.items() if len(points) > 1}
    if not finite:
        return None
    xs = [x for points in finite.values() for x, _ in points]
    ys = [y for points in finite.values() for _, y in points]
    low_x, high_x, low_y, high_y = min(xs), max(xs), min(ys), max(ys)
    span_x = (high_x - low_x) or 1.0
    spread, is_flat = high_y - low_y, high_y - low_y < _FLAT * abs(high_y)
    margin = spread * 0.05 if spread and not is_flat else abs(high_y) * 0.05 or 1.0
    low_y = low_y - margin if low_y < 0 else max(low_y - margin, 0.0)
    high_y = high_y + margin if high_y > 1 else min(high_y + margin, 1.0)

    def place(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (x - low_x) / span_x * (WIDTH - LEFT - RIGHT)
        down = TOP + (high_y - y) / (high_y - low_y) * (HEIGHT - TOP - BOTTOM)
        return round(across, 1), round(down, 1)

    lines = tuple(
        Line(
            name,
            number,
            " ".join(f"{x},{y}" for x, y in (place(*point) for point in _thinned(points))),
            place(*points[-1]),
        )
        for number, name in enumerate(data, 1)
        if (points := finite.get(name))
    )
    at_x = [low_x + span_x * part / 4 for part in range(5)]
    if all(x == round(x) for x in xs):
        at_x = [float(x) for x in dict.fromkeys(map(round, at_x))]
    at_y = [low_y + (high_y - low_y) * part / 4 for part in range(5)]
    return Chart(
        title,
        x_label,
        lines,
        tuple(name for name in data if name not in finite),
        _ticks([place(x, low_y)[0] for x in at_x], at_x, x_format),
        _ticks([place(low_x, y)[1] for y in at_y], at_y, plain),
        " ".join(_in_words(name or title, points, x_format) for name, points in finite.items()),
    )


def _ticks(places: Sequence[float], values: Sequence[float], form: Format) -> tuple[Tick, ...]:
    """Ticks of `values`, with as many digits as tell them apart."""
    labels = [form(value) for value in values]
    for digits in range(4, 16):
        if len(set(labels)) == len(values):
            break
        labels = [form(value, digits) for value in values]
    return tuple(Tick(at, label) for at, label in zip(places, labels, strict=True))


def _thinned(points: Points) -> Points:
    """At most about MAX_POINTS of them, the last included."""
    step = math.ceil(len(points) / MAX_POINTS)
    return points[::step] if (len(points) - 1) % step == 0 else [*points[::step], points[-1]]


def _in_words(name: str, points: Points, x_format: Format) -> str:
    ys = [y for _, y in points]
    (first_x, first_y), (last_x, last_y) = points[0], points[-1]
    return (
        f"{name} from {plain(first_y)} at {x_format(first_x)} to {plain(last_y)} at "
        f"{x_format(last_x)}; lowest {plain(min(ys))}, highest {plain(max(ys))}."
    )
