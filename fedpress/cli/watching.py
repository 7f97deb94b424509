"""The command `fedpress round watch`: a line for each event of a task's rounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

import click

from fedpress.cli.outcomes import FAILED
from fedpress.cli.tables import lasting, size
from fedpress.command_line import Command, Number, as_json, operates
from fedpress_protocols.errors import TransportError, Unavailable

if TYPE_CHECKING:
    from fedpress.operator import Operator
    from fedpress_protocols.messages import RoundStatus

T = TypeVar("T")
_MOST_PAUSE = 30.0
_LOOK_BACK = 50
"""Attempts that are asked for at a time: of more in one pause the oldest are not told."""


@click.command(
    "watch",
    cls=Command,
    epilog="An unreachable server is retried until it answers. With --json each "
    "line is an attempt as one JSON object.",
)
@click.argument("task")
@click.option(
    "--round", "until", type=click.IntRange(min=1), help="Only until this round is committed."
)
@click.option(
    "--every",
    type=Number(0.1, 3600),
    default=2.0,
    help="Seconds between two requests to the server.",
)
@as_json
@operates
def watch(server: Operator, task: str, until: int | None, every: float, as_json: bool) -> None:
    """Follow a task until it ends, a line for each change; exit code 1 if it was cancelled."""
    seen: dict[tuple[int, int], RoundStatus] = {}
    last, is_first = (0, 0), True
    asked = polled(lambda: (server.task(task), server.rounds(task, limit=_LOOK_BACK)), every)
    for summary, attempts in asked:
        fresh = [a for a in attempts if (a.round, a.attempt) >= last]
        for attempt in fresh[-1:] if is_first else fresh:
            name = attempt.round, attempt.attempt
            if _is_news(seen.get(name), attempt):
                click.echo(attempt.model_dump_json() if as_json else _line(attempt))
            seen, last = {name: attempt}, max(name, last)
        is_first = False
        if until is not None and summary.round >= until:
            return
        if summary.state != "running":
            if not as_json:
                why = f": {summary.reason}" if summary.reason else ""
                click.echo(f"task {task} {summary.state}, {summary.round}/{summary.rounds}{why}")
            if summary.state == "cancelled" or until is not None:
                raise click.exceptions.Exit(FAILED)
            return


def polled(ask: Callable[[], T], every: float) -> Iterator[T]:
    """The answers of a server, which is asked again `every` seconds; while it cannot be reached it
    is asked less often, and stderr says so. Raises what the first request raises."""
    pause, is_first = every, True
    while True:
        try:
            answer = ask()
        except (TransportError, Unavailable) as exc:
            if is_first:
                raise
            click.echo(f"fedpress: {exc.detail}; retrying in {pause:g} s", err=True)
            time.sleep(pause)
            pause = min(2 * pause, max(every, _MOST_PAUSE))
            continue
        pause, is_first = every, False
        yield answer
        time.sleep(every)


def _is_news(before: RoundStatus | None, now: RoundStatus) -> bool:
    return before is None or (before.state, before.received) != (now.state, now.received)


def _line(attempt: RoundStatus) -> str:
    at = time.strftime("%H:%M:%S", time.gmtime(attempt.closed_at or time.time()))
    what = f"{at}  round {attempt.round}.{attempt.attempt}  {attempt.state}"
    uploads = f"{attempt.received} of {attempt.minimum} to {attempt.size} uploads"
    if attempt.closed_at is None:
        left = attempt.deadline - time.time()
        return f"{what}  {uploads}, {lasting(left)} left" if left > 0 else f"{what}  {uploads}"
    if attempt.state == "abandoned":
        return f"{what}  {uploads}: {attempt.reason}"
    metrics = "".join(f", {name} {value:.4g}" for name, value in attempt.metrics.items())
    took = lasting(attempt.closed_at - attempt.opened_at)
    sent = size(attempt.wire_upload_bytes)
    return f"{what}  {attempt.included} included, {sent} up, {took}{metrics}"
