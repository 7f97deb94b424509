"""Curves of a metric over rounds and over bytes, of runs that different programs have written.

A run's file is the history.json of `fedpress simulate` or `fedpress demo`, a list of them, or what
`fedpress round list TASK --limit 1000 --json` prints.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedpress.command_line import read
from fedpress_protocols.errors import ConfigurationError

SUFFIXES = (".png", ".svg", ".pdf")
_WRITERS = "history.json of fedpress simulate or demo, or `fedpress round list TASK --json`"


class Point(NamedTuple):
    """A round that was measured: `num_bytes` went up and down until then, of all clients."""

    round: int
    num_bytes: int
    value: float


class Run(NamedTuple):
    name: str
    points: Sequence[Point]


def runs_in(path: Path, metric: str) -> list[Run]:
    """The runs in a file, with the rounds that have `metric`.

    Raises ConfigurationError for a file of another kind, and for one without the metric.
    """
    try:
        document = json.loads(read(path))
        runs = list(_runs(document, path, metric))
    except (ValueError, TypeError, KeyError, AttributeError) as exc:
        raise ConfigurationError(
            f"{path} is no history of rounds", hint=f"give the {_WRITERS}"
        ) from exc
    if not any(run.points for run in runs):
        raise ConfigurationError(
            f"{path} has no round with {metric!r}",
            hint=f"choose another with --metric, of: {', '.join(sorted(_names(document))) or '-'}",
        )
    return runs


def draw(runs: Sequence[Run], metric: str, path: Path) -> None:
    """Draw the runs, `metric` over rounds and over bytes, in the format of the file's name."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    # One above the other, so that a phone's width leaves the text legible.
    figure, (by_round, by_bytes) = pyplot.subplots(
        2, 1, figsize=(6, 6.5), layout="constrained", sharey=True
    )
    for run in runs:
        values = [point.value for point in run.points]
        by_round.plot([point.round for point in run.points], values, ".-", label=run.name)
        by_bytes.plot([point.num_bytes for point in run.points], values, ".-", label=run.name)
    by_round.set(xlabel="round", ylabel=metric)
    by_round.xaxis.set_major_locator(MaxNLocator(integer=True))
    by_bytes.set(xlabel="sent up and down by all clients (log scale)", ylabel=metric)
    if any(run.points for run in runs):
        log_bytes(by_bytes)
        by_round.legend()
    for axes in (by_round, by_bytes):
        axes.grid(alpha=0.3, which="both")
    save(figure, path)


def log_bytes(axes: Any) -> None:
    """Make the x axis, in bytes, logarithmic, with labels such as 200 kB."""
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

    axes.set_xscale("log")
    least, most = axes.get_xlim()
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if most < 100 * least else (1,)))
    axes.xaxis.set_major_formatter(EngFormatter("B"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def save(figure: Any, path: Path) -> None:
    """Write a figure of pyplot in the format of the file's name, and close it; the same figure
    gives the same SVG."""
    import matplotlib
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    dated = {"metadata": {"Date": None}} if path.suffix == ".svg" else {}
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fedpress"}):
        figure.savefig(path, dpi=150, **dated)
    pyplot.close(figure)


def points_of(rounds: Iterable[tuple[int, int, float | None]]) -> list[Point]:
    """The points of rounds in order: number, bytes of this round, and value if it was measured."""
    points, total = list[Point](), 0
    for number, num_bytes, value in rounds:
        total += num_bytes
        if value is not None and math.isfinite(value):
            points.append(Point(number, total, value))
    return points


def _runs(document: Any, path: Path, metric: str) -> Iterator[Run]:
    if isinstance(document, list):
        if document and "history" in document[0]:
            for each in document:
                yield from _runs(each, path, metric)
        else:
            attempts = sorted(document, key=lambda each: (each["round"], each["attempt"]))
            rounds = (
                (each["round"], _bytes(each), each["metrics"].get(metric)) for each in attempts
            )
            yield Run(document[0]["task"] if document else path.stem, points_of(rounds))
    elif "history" in document:
        rounds = (
            (row["round"], row["up_bytes"] + row["down_bytes"], _measured(row).get(metric))
            for row in document["history"]
        )
        yield Run(document["name"], points_of(rounds))
    else:
        for name, curve in document["tasks"].items():
            rounds = ((each["round"], _bytes(each), each.get(metric)) for each in curve["rounds"])
            yield Run(name, points_of(rounds))


def _bytes(each: Mapping[str, Any]) -> int:
    return int(each["upload_bytes"]) + int(each["download_bytes"])


def _measured(row: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of a simulated round: on the test set, else as clients evaluate, else train."""
    return {**row["train"], **row["evaluation"], **row["test"]}


def _names(document: Any) -> set[str]:
    """The metrics in a readable file."""
    if isinstance(document, list):
        return {name for each in document for name in _names(each)}
    if "metrics" in document:
        return set(document["metrics"])
    if "history" in document:
        return {name for row in document["history"] for name in _measured(row)}
    return {"accuracy"} if "tasks" in document else set()
