"""Line charts as numbers: templates/chart.html draws them as SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

WIDTH, HEIGHT = 520, 220
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 12, 34
MAX_POINTS = 400


class Tick(NamedTuple):
    at: float
    label: str


class Chart(NamedTuple):
    """A drawn line; `points` is the `points` attribute of a polyline."""

    title: str
    x_label: str
    points: str
    last: tuple[float, float]
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
    data: Sequence[tuple[float, float]],
    x_format: Callable[[float], str] = plain,
) -> Chart | None:
    """A chart of the finite points; None for fewer than two. At most MAX_POINTS are drawn."""
    finite = [(x, y) for x, y in data if math.isfinite(x) and math.isfinite(y)]
    if len(finite) < 2:
        return None
    step = math.ceil(len(finite) / MAX_POINTS)
    drawn = finite[::step] if (len(finite) - 1) % step == 0 else [*finite[::step], finite[-1]]
    xs, ys = [x for x, _ in finite], [y for _, y in finite]
    low_x, high_x, low_y, high_y = min(xs), max(xs), min(ys), max(ys)
    span_x = (high_x - low_x) or 1.0
    margin = (high_y - low_y) * 0.05 or abs(high_y) * 0.05 or 1.0
    low_y, high_y = low_y - margin, high_y + margin

    def place(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (x - low_x) / span_x * (WIDTH - LEFT - RIGHT)
        down = TOP + (high_y - y) / (high_y - low_y) * (HEIGHT - TOP - BOTTOM)
        return round(across, 1), round(down, 1)

    at_x = [low_x + span_x * part / 4 for part in range(5)]
    at_y = [low_y + (high_y - low_y) * part / 4 for part in range(5)]
    (first_x, first_y), (last_x, last_y) = finite[0], finite[-1]
    return Chart(
        title,
        x_label,
        " ".join(f"{x},{y}" for x, y in (place(*point) for point in drawn)),
        place(last_x, last_y),
        tuple(Tick(place(x, low_y)[0], x_format(x)) for x in at_x),
        tuple(Tick(place(low_x, y)[1], plain(y)) for y in at_y),
        f"{title} from {plain(first_y)} at {x_format(first_x)} to {plain(last_y)} at "
        f"{x_format(last_x)}; lowest {plain(min(ys))}, highest {plain(max(ys))}.",
    )
