"""The command `fedpress round follow`: callbacks receive a task's rounds, outside the server."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fedpress.cli.outcomes import FAILED
from fedpress.cli.watching import polled
from fedpress.command_line import (
    PATH,
    Command,
    Number,
    as_json,
    callbacks,
    heed_stop_signals,
    operates,
    stopped,
)

if TYPE_CHECKING:
    from fedpress.callbacks import Delivery
    from fedpress.operator import Operator
    from fedpress_protocols.messages import RoundStatus, TaskSummary

_PAGE = 200


@click.command(
    "follow",
    cls=Command,
    epilog="A round is sent when the next one has closed, because devices measure its model in "
    "that one. An unreachable server is retried until it answers. With --json each line is a "
    "round as one JSON object.",
)
@click.argument("task")
@callbacks(required=True)
@click.option(
    "--state",
    type=PATH,
    metavar="FILE",
    help="Keeps which rounds each callback has received.  [default: TASK.callbacks.json]",
)
@click.option(
    "--every",
    type=Number(0.1, 3600),
    default=5.0,
    help="Seconds between two requests to the server.",
)
@click.option(
    "--settle",
    type=Number(0, 3600),
    default=30.0,
    help="Seconds to wait after the task's end: devices measure the last model then.",
)
@as_json
@operates
def follow(
    server: Operator,
    task: str,
    callback_texts: tuple[str, ...],
    state: Path | None,
    every: float,
    settle: float,
    as_json: bool,
) -> None:
    """Send a task's closed rounds to callbacks until it ends; run again to resume."""
    from fedpress.callbacks import Delivery, Result, from_options

    heed_stop_signals()
    made = from_options(callback_texts)
    configuration = server.configuration(task)
    path = Path(f"{task}.callbacks.json") if state is None else state
    delivery = Delivery(made, path, f"task {task!r} of {server.url}")
    _check_not_restored(server.task(task), delivery, path)
    delivery.begin(task, configuration.model_dump(mode="json"))
    profiles = [each.name for each in configuration.profiles]
    result = Result(delivery.position, is_complete=False, reason="stopped")
    try:
        for summary in polled(lambda: server.task(task), every):
            is_over = _is_over(summary)
            if is_over and settle:
                time.sleep(settle)
            last = summary.round if is_over else summary.round - 1
            _send(server, delivery, task, last, profiles, as_json=as_json)
            if is_over:
                reason = summary.reason
                result = Result(summary.round, summary.state == "finished", reason, summary.model)
                break
            if delivery.is_over:
                break
    except KeyboardInterrupt:
        stopped()
    finally:
        delivery.end(result)
    if delivery.failed:
        names = ", ".join(delivery.failed)
        click.echo(f"fedpress: failed: {names}; run again to send what is missing", err=True)
        raise click.exceptions.Exit(FAILED)


def _is_over(summary: TaskSummary) -> bool:
    """Whether no round will follow, unless the task is continued."""
    is_last = summary.state == "paused" and summary.round >= summary.rounds
    return is_last or summary.state in ("finished", "cancelled")


def _send(
    server: Operator,
    delivery: Delivery,
    task: str,
    last: int,
    profiles: list[str],
    *,
    as_json: bool,
) -> None:
    """Deliver the committed rounds up to `last` that are still to be delivered."""
    from fedpress.simulate.rows import committed, row_of

    if last <= delivery.position:
        return
    for attempts in committed(_attempts_after(server, task, delivery.position)):
        row = row_of(attempts, profiles)
        if row.round > last:
            return
        delivery.closed(row, attempts)
        if delivery.is_over:
            return
        if as_json:
            click.echo(json.dumps({"round": row.round, "model": row.model}))
        else:
            click.echo(f"round {row.round} of {task}: sent")


def _attempts_after(server: Operator, task: str, position: int) -> list[RoundStatus]:
    """The attempts at the rounds after `position`, page after page from the newest."""
    attempts: list[RoundStatus] = []
    before = None
    while True:
        page = server.rounds(task, before=before, limit=_PAGE)
        attempts += [each for each in page if each.round > position]
        if len(page) < _PAGE or page[0].round <= position:
            return attempts
        before = f"{page[0].round}.{page[0].attempt}"


def _check_not_restored(summary: TaskSummary, delivery: Delivery, path: Path) -> None:
    """Raise ConfigurationError if callbacks have rounds that the server no longer has."""
    from fedpress_protocols.errors import ConfigurationError

    if delivery.newest > summary.round:
        raise ConfigurationError(
            f"by {path} round {delivery.newest} has been sent, but task {summary.task!r} has "
            f"{summary.round} rounds: the server was restored, or the task is another",
            hint="give another --state, which sends all rounds to new runs",
        )
