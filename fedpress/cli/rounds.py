"""The commands `fedpress round ...`: finished rounds and the open one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import click

from fedpress.cli.following import follow
from fedpress.cli.tables import echo, fields, lasting, moment, size, table, terminal_width
from fedpress.cli.watching import watch
from fedpress.command_line import Group, argument, as_json, operates

if TYPE_CHECKING:
    from fedpress.operator import Operator
    from fedpress_protocols.messages import (
        Durations,
        Measured,
        PrivacyStatus,
        RoundFigures,
        RoundStatus,
    )


@click.group("round", cls=Group)
def rounds() -> None:
    """Inspect a task's rounds: list, show, watch, follow, abort."""


@rounds.command("list")
@click.argument("task")
@click.option("--limit", type=click.IntRange(1, 1000), default=20, help="Attempts, the newest.")
@click.option(
    "--before", type=click.IntRange(min=1), metavar="ROUND", help="Only rounds older than this one."
)
@as_json
@operates
def list_rounds(server: Operator, task: str, limit: int, before: int | None, as_json: bool) -> None:
    """List the attempts at a task's rounds, the newest first."""
    attempts = newest(server, task, limit, before)
    headings = ("round", "state", "included", "up", "down", "took", "measured", "why")
    metric = "" if as_json else server.configuration(task).evaluation.metric
    lines = (
        table(headings, [_row(each, metric) for each in attempts], width=terminal_width())
        if attempts
        else ["no round before that" if before else "no round yet"]
    )
    echo(attempts, lines, as_json=as_json)


@rounds.command("show")
@click.argument("task")
@argument(
    "number",
    metavar="[ROUND]",
    type=click.IntRange(min=1),
    required=False,
    help="The newest by default.",
)
@as_json
@operates
def show_round(server: Operator, task: str, number: int | None, as_json: bool) -> None:
    """Show the last attempt at a round, with metrics by group and class."""
    if number is None:
        newest_attempts = newest(server, task, 1, None)
        number = newest_attempts[0].round if newest_attempts else 1
    attempt = server.round(task, number)
    echo(attempt, _whole(attempt), as_json=as_json)


rounds.add_command(watch)
rounds.add_command(follow)


@rounds.command("abort")
@click.argument("task")
@click.option("--why", default="", show_default=False, help="For the round's record.")
@as_json
@operates
def abort_round(server: Operator, task: str, why: str, as_json: bool) -> None:
    """Abort the open attempt and start the round again; devices keep their updates."""
    summary = server.abort_round(task, why)
    lines = [f"task {task}: {summary.state}, {summary.round} of {summary.rounds} rounds"]
    aborted = next((a for a in newest(server, task, 4, None) if a.state == "abandoned"), None)
    if aborted is not None:
        lines.insert(0, f"round {_name(aborted)} is abandoned: {aborted.reason}")
    echo(summary, lines, as_json=as_json)


def newest(server: Operator, task: str, limit: int, before: int | None) -> list[RoundStatus]:
    """Of the attempts at rounds below `before` the last `limit`, the newest first."""
    at = None if before is None else str(before)
    return server.rounds(task, before=at, limit=limit)[::-1]


def _name(attempt: RoundStatus) -> str:
    return f"{attempt.round}.{attempt.attempt}"


def _row(attempt: RoundStatus, metric: str) -> Sequence[str]:
    """Bytes are those of bodies and of a masked session's messages, without headers, as the console
    shows them; the task's own `metric` comes first."""
    is_over = attempt.closed_at is not None
    messages = attempt.session.message_bytes if attempt.session else 0
    measured = dict(sorted(attempt.metrics.items(), key=lambda each: each[0] != metric))
    counted = attempt.included if is_over else attempt.received
    return (
        _name(attempt),
        attempt.state,
        f"{counted} of {attempt.assigned}",
        size(attempt.upload_bytes + messages),
        size(attempt.download_bytes),
        lasting(attempt.closed_at - attempt.opened_at) if attempt.closed_at else "open",
        _measured(measured, most=2),
        _note(attempt),
    )


def _note(attempt: RoundStatus) -> str:
    """Why the attempt ended, why devices declined, and by which signs training may diverge."""
    signs = f"may diverge: {', '.join(attempt.warnings)}" if attempt.warnings else ""
    return "; ".join(filter(None, (attempt.reason, _declined(attempt, "declined: "), signs)))


def _declined(attempt: RoundStatus, before: str = "") -> str:
    counts = ", ".join(f"{count} {reason}" for reason, count in attempt.declined.items())
    return before + counts if counts else ""


def _took(durations: Durations | None) -> str:
    if durations is None:
        return ""
    return (
        f"{durations.median:.1f} s in the middle, {durations.longest:.1f} s at most; "
        f"{durations.suggested_round_seconds:.0f} s would do as round_seconds"
    )


def _measured(metrics: dict[str, float], most: int = 100) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in list(metrics.items())[:most])


def _whole(attempt: RoundStatus) -> Iterator[str]:
    width = terminal_width()
    session, course = attempt.session, attempt.course
    suspects = session.suspects if session else ()
    failures = session.failures if session else ()
    pairs = [
        ("round", f"{attempt.round} of task {attempt.task}, attempt {attempt.attempt}"),
        ("state", attempt.state),
        ("why", attempt.reason),
        ("opened", moment(attempt.opened_at)),
        ("deadline", "" if attempt.closed_at else moment(attempt.deadline)),
        ("closed", moment(attempt.closed_at)),
        ("cohort", f"{attempt.size} wanted, {attempt.minimum} at least"),
        (
            "uploads",
            f"{attempt.assigned} assigned, {attempt.received} received, "
            f"{attempt.included} included",
        ),
        ("declined", _declined(attempt)),
        ("devices took", _took(attempt.durations)),
        ("examples", f"{attempt.num_examples:,}"),
        (
            "up",
            f"{attempt.upload_bytes:,} bytes, {attempt.wire_upload_bytes:,} with headers",
        ),
        ("down", f"{attempt.download_bytes:,} bytes" + _forms(attempt)),
        ("compression", _figures(attempt.figures)),
        ("update", _update(attempt)),
        ("privacy", "" if attempt.privacy is None else privacy_spent(attempt.privacy)),
        ("made from", attempt.base_model),
        ("model", attempt.model or ""),
        *((f"  {name}", digest) for name, digest in attempt.published.items()),
        ("measured", _measured(attempt.metrics) + _by_whom(attempt.measured)),
        *([] if session is None else [("session", _steps(session.began, session.answered))]),
        *(("disturbed by", each) for each in suspects),
        *((("not opened", f"shares of {other}, by {one}") for one, other in failures)),
        *([] if course is None else [("policies", course.why)]),
        *((("warning", each) for each in course.warnings) if course is not None else ()),
        *(("may diverge", each) for each in attempt.warnings.values()),
    ]
    yield from fields(pairs, width=width)
    for heading, measured_by_key in (("group", attempt.groups), ("class", attempt.classes)):
        if measured_by_key:
            yield ""
            yield from table(
                (heading, "devices", "examples", "measured"), _by(measured_by_key), width=width
            )


def _figures(figures: RoundFigures | None) -> str:
    if figures is None:
        return ""
    return (
        f"NMSE {figures.nmse:.3g}, residual {figures.residual:.3g} of an update's norm of "
        f"{figures.norm:.3g}; {figures.train:.3g} s of training and {figures.compress:.3g} s of "
        f"compression; means of {figures.num_uploads} devices"
    )


def _update(attempt: RoundStatus) -> str:
    if attempt.update_norm is None:
        return ""
    of_strategy = _measured(attempt.strategy_figures)
    return f"norm {attempt.update_norm:.3g}" + (f"; {of_strategy}" if of_strategy else "")


def privacy_spent(status: PrivacyStatus) -> str:
    """The privacy spent, and against whom that is, in a sentence."""
    correlated = ""
    if status.separation > 1:
        correlated = f", {status.separation} rounds apart; its noise is correlated over rounds"
    clip = ""
    if status.quantile is not None:
        clip = f"; clip {status.clip:.3g}, by the {status.quantile:g} quantile of norms"
    if status.per_tensor:
        clip = f"; clip {status.clip:.3g}, of which each tensor has its share"
    return (
        f"epsilon {status.epsilon:.3g} of {status.max_epsilon:g} at delta {status.delta:g}, by "
        f"{status.participations} of {status.max_participations} participations of a device at "
        f"most{correlated}{clip}; against {status.against}"
    )


def _by_whom(measured: Measured | None) -> str:
    if measured is None:
        return ""
    return f"; by {measured.num_clients} devices on {measured.num_examples:,} examples"


def _by(measured: dict[str, Measured]) -> list[Sequence[str]]:
    return [
        (name, str(each.num_clients), f"{each.num_examples:,}", _measured(each.metrics))
        for name, each in measured.items()
    ]


def _forms(attempt: RoundStatus) -> str:
    coded = attempt.coded_download_bytes, attempt.difference_download_bytes
    return f", {coded[0]:,} of them coded whole, {coded[1]:,} as differences" if any(coded) else ""


def _steps(began: int, answered: dict[str, int]) -> str:
    steps = ", ".join(f"{step} {number}" for step, number in answered.items())
    return f"{began} began" + (f"; answered: {steps}" if steps else "")
