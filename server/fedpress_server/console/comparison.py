"""The console's comparison of tasks: their curves on common axes, and the figures as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from fedpress_protocols.messages import RoundStatus
from fedpress_protocols.plan import Name
from fedpress_server.api.listeners import Parts
from fedpress_server.console import charts
from fedpress_server.console.rendering import render, sent_up, size
from fedpress_server.console.routing import ConsoleRoute
from fedpress_server.services import Services

MAX_COMPARED = 8
MAX_ROUNDS = 1000
"""Attempts of each task, the newest."""
MAX_METRICS = 6
_COLUMNS = ("round", "attempt", "state", "included", "upload_bytes", "download_bytes", "closed_at")
Ticked = Annotated[tuple[Name, ...], Query(alias="task")]
Compared = Annotated[tuple[Name, ...], Query(alias="task", max_length=MAX_COMPARED)]

comparison_routes = APIRouter(prefix="/console", route_class=ConsoleRoute, include_in_schema=False)


@comparison_routes.get("/compare")
async def compare(request: Request, services: Parts, ticked: Ticked = ()) -> Response:
    """What devices measured of several tasks' models, over rounds and over bytes."""
    chosen = tuple(dict.fromkeys(ticked))
    is_too_many = len(chosen) > MAX_COMPARED
    runs = {} if is_too_many else await _runs(services, chosen)
    drawn = list[charts.Chart | None]()
    for metric in _metrics(runs):
        title = metric.replace("_", " ").capitalize()
        over_rounds, over_bytes = dict[str, charts.Points](), dict[str, charts.Points]()
        for task, attempts in runs.items():
            points = list(measured(metric, attempts))
            over_rounds[task] = [(at, value) for at, _, value in points]
            over_bytes[task] = [(at, value) for _, at, value in points]
        drawn.append(charts.overlay(title, "rounds", over_rounds))
        drawn.append(charts.overlay(title, "bytes sent", over_bytes, size))
    return render(
        request,
        "compare.html",
        400 if is_too_many else 200,
        tasks=await services.queries.tasks(),
        chosen=chosen,
        is_too_many=is_too_many,
        most=MAX_COMPARED,
        charts=[each for each in drawn if each is not None],
    )


@comparison_routes.get("/compare.csv")
async def compared_figures(services: Parts, compared: Compared = ()) -> Response:
    """A line for each attempt at a round, the oldest first."""
    runs = await _runs(services, compared)
    metrics = _metrics(runs)
    text = io.StringIO()
    lines = csv.writer(text)
    lines.writerow(["task", *_COLUMNS, "message_bytes", *metrics])
    for task, attempts in runs.items():
        for each in attempts:
            figures = [getattr(each, column) for column in _COLUMNS]
            figures.append(each.session.message_bytes if each.session else 0)
            lines.writerow([task, *figures, *(each.metrics.get(metric) for metric in metrics)])
    return Response(
        text.getvalue(),
        media_type="text/csv",
        headers={"Content-Disposition": 'attachment; filename="fedpress-tasks.csv"'},
    )


async def _runs(services: Services, tasks: Sequence[str]) -> dict[str, list[RoundStatus]]:
    """The attempts of each task, oldest first; raises UnknownTask."""
    return {
        task: await services.queries.history(task, limit=MAX_ROUNDS)
        for task in dict.fromkeys(tasks)
    }


def _metrics(runs: dict[str, list[RoundStatus]]) -> list[str]:
    """Loss and accuracy, then what else was measured by name; those of which there is a value."""
    names = {name for attempts in runs.values() for each in attempts for name in each.metrics}
    first = [name for name in ("loss", "accuracy") if name in names]
    return [*first, *sorted(names.difference(first))][:MAX_METRICS]


def measured(metric: str, attempts: Sequence[RoundStatus]) -> Iterator[tuple[int, int, float]]:
    """Round, bytes sent until then, and value; `attempts` oldest first."""
    num_bytes = 0
    for each in attempts:
        num_bytes += sent_up(each) + each.download_bytes
        if metric in each.metrics:
            yield each.round, num_bytes, each.metrics[metric]
