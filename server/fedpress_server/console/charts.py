"""Line charts as numbers: templates/chart.html draws them as SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

WIDTH, HEIGHT = 520, 220
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 12, 34
MAX_POINTS = 400
_FLAT = 0.004
"""Values that differ by a smaller share of the largest have ticks of the same four digits."""
Points = Sequence[tuple[float, float]]


class Tick(NamedTuple):
    at: float
    label: str


class Line(NamedTuple):
    """A drawn line; `points` is the `points` attribute of a polyline."""

    name: str
    points: str
    last: tuple[float, float]


class Chart(NamedTuple):
    title: str
    x_label: str
    lines: tuple[Line, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    summary: str
    """The same in words."""


def plain(value: float) -> str:
    """A number with at most four digits."""
    return f"{value:.4g}"


def line(
    title: str,
    x_label: str,
    data: Points,
    x_format: Callable[[float], str] = plain,
) -> Chart | None:
    """A chart of the finite points of one line; None for fewer than two."""
    return overlay(title, x_label, {"": data}, x_format)


def overlay(
    title: str,
    x_label: str,
    data: Mapping[str, Points],
    x_format: Callable[[float], str] = plain,
) -> Chart | None:
    """A chart of several lines by name, on common axes. Of each, the finite points count, at most
    MAX_POINTS are drawn, and fewer than two make no line; None if no line is left."""
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
    low_y, high_y = low_y - margin if low_y < 0 else max(low_y - margin, 0.0), high_y + margin

    def place(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (x - low_x) / span_x * (WIDTH - LEFT - RIGHT)
        down = TOP + (high_y - y) / (high_y - low_y) * (HEIGHT - TOP - BOTTOM)
        return round(across, 1), round(down, 1)

    lines = tuple(
        Line(
            name,
            " ".join(f"{x},{y}" for x, y in (place(*point) for point in _thinned(points))),
            place(*points[-1]),
        )
        for name, points in finite.items()
    )
    at_x = [low_x + span_x * part / 4 for part in range(5)]
    at_y = [low_y + (high_y - low_y) * part / 4 for part in range(5)]
    return Chart(
        title,
        x_label,
        lines,
        tuple(Tick(place(x, low_y)[0], x_format(x)) for x in at_x),
        tuple(Tick(place(low_x, y)[1], plain(y)) for y in at_y),
        " ".join(_in_words(name or title, points, x_format) for name, points in finite.items()),
    )


def _thinned(points: Points) -> Points:
    """At most about MAX_POINTS of them, the last included."""
    step = math.ceil(len(points) / MAX_POINTS)
    return points[::step] if (len(points) - 1) % step == 0 else [*points[::step], points[-1]]


def _in_words(name: str, points: Points, x_format: Callable[[float], str]) -> str:
    ys = [y for _, y in points]
    (first_x, first_y), (last_x, last_y) = points[0], points[-1]
    return (
        f"{name} from {plain(first_y)} at {x_format(first_x)} to {plain(last_y)} at "
        f"{x_format(last_x)}; lowest {plain(min(ys))}, highest {plain(max(ys))}."
    )
