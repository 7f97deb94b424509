"""Inputs of the adaptive policies, read from the records; see `fedpress_strategies.policies`.

A course is made once, when its round opens, and kept in the round's row; the profile that a client
is given is part of the event that gives it. Nothing here is asked again by a replay.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from fedpress_compression.tensors import ModelSpec
from fedpress_protocols.messages import Attributes, TaskConfig
from fedpress_protocols.policies import (
    UPLINK,
    Comparison,
    Course,
    automatic,
    bandwidth_aware,
    divergence_guard,
)
from fedpress_server.coordination.attempts import Attempt
from fedpress_server.coordination.background import Background
from fedpress_server.storage import records
from fedpress_server.storage.database import Database
from fedpress_server.storage.scoreboard import Scoreboard
from fedpress_server.storage.tables import assignments, rounds, uploads
from fedpress_strategies.policies.bandwidth_aware import Link, Transfer, choose
from fedpress_strategies.policies.decisions import next_course, with_comparison
from fedpress_strategies.policies.facts import (
    FLAT_ROUNDS,
    Facts,
    estimated_population,
    least_population,
    mostly_flat,
)
from fedpress_strategies.policies.sizes import expected_bytes

_NEWEST = 256
"""Uploads of a task that tell how large its bodies are, of as many rounds at most."""
_OF_CLIENT = 32
"""Assignments of a client that tell of its link."""
_DRAWN = 2**15
"""Assignments that tell from how many clients cohorts are drawn, of `_DRAWN_ROUNDS` at most."""
_DRAWN_ROUNDS = 64
_MBIT = 1e6 / 8


# Rounds


def course_of(
    connection: Connection,
    config: TaskConfig,
    board: Scoreboard,
    number: int,
    attempt: int,
    comparison: Comparison | None = None,
    *,
    has_statistics: bool = False,
) -> Course | None:
    """Return the policies' decision for attempt `attempt` at round `number`; None without policies.

    `comparison` is of the round before, if that was a probe and ends in this very transaction. An
    attempt made again has the course of the first, but is no probe: devices of an earlier release
    decline one. A continued task begins anew. `has_statistics` is of the model, see Facts.
    """
    if not config.policies:
        return None
    before = None
    if attempt > 1:
        before = _course_in(connection, config.task, number)
        if before is not None:
            return with_comparison(before, None).model_copy(update={"probe": False})
    if number > config.schedule_after + 1:
        before = _course_in(connection, config.task, number - 1)
        if before is not None and comparison is not None:
            before = with_comparison(before, comparison)
    facts = replace(_facts(connection, config, board, number), has_statistics=has_statistics)
    return next_course(config.policies, len(config.profiles), before, facts)


def _course_in(connection: Connection, task: str, number: int) -> Course | None:
    """The course of the newest attempt at a round; None if it has none."""
    query = (
        sa.select(rounds.c.course)
        .where(rounds.c.task == task, rounds.c.round == number)
        .order_by(rounds.c.attempt.desc())
    )
    document = connection.execute(query.limit(1)).scalar_one_or_none()
    return None if document is None else Course.model_validate(document)


def _facts(connection: Connection, config: TaskConfig, board: Scoreboard, number: int) -> Facts:
    """Losses, of models that enough devices have measured, whatever the task's own metric is; that
    one, if it is to be low and devices measure no loss."""
    least, metric = config.evaluation.least_clients, config.evaluation.metric
    losses: list[float | None] = [None] * number
    scores = board.scores(connection, "loss", least)
    if not scores and config.evaluation.goal == "lowest":
        scores = board.scores(connection, metric, least)
    for score in scores:
        if 0 <= score.round < number:
            losses[score.round] = score.value
    classes = {}
    if divergence_guard(config.policies) is not None:
        tallies = board.counted(connection, least)
        classes = {model: tally for model, tally in tallies.items() if 0 <= model < number}
    auto, uploaded = automatic(config.policies), list[int]()
    if auto is not None and auto.upload_bytes is not None:
        uploaded = records.uploaded(connection, config.task, config.schedule_after)
        del uploaded[number - config.schedule_after - 1 :]
    size, population, fewest, are_flat = config.cohort.size, None, None, False
    if auto is not None:
        are_flat = mostly_flat(*records.flat(connection, config.task, number - FLAT_ROUNDS))
        since = number - min(_DRAWN_ROUNDS, max(2, _DRAWN // size))
        drawn = records.drawn(connection, config.task, since)
        population, fewest = estimated_population(*drawn), least_population(*drawn, size)
    return Facts(
        number, config.rounds, losses, classes, uploaded, size, population, fewest, are_flat
    )


# Clients


def link_of(connection: Connection, task: str, client_id: str) -> Link:
    """Estimate a client's link to the server from its last assignments in the task."""
    rows = connection.execute(
        sa.select(
            assignments.c.assigned_at,
            assignments.c.receipt,
            uploads.c.num_bytes,
            uploads.c.began_at,
            uploads.c.seconds,
        )
        .select_from(assignments.outerjoin(uploads))
        .where(assignments.c.client_id == client_id, assignments.c.task == task)
        .order_by(assignments.c.assigned_at.desc(), assignments.c.assignment)
        .limit(_OF_CLIENT)
    )
    transfers, missed, has_come = [], 0, False
    for row in rows:
        has_come |= row.num_bytes is not None
        if row.began_at is not None:
            before = max(0.0, row.began_at - row.assigned_at)
            transfers.append(Transfer(row.num_bytes, row.seconds, before))
        elif not has_come and row.receipt is not None:
            missed += json.loads(row.receipt)["receipt"]["reason"] == "missed-deadline"
    return Link(tuple(transfers), missed)


class Bodies(NamedTuple):
    """Of a task's newest uploads: by profile the median of their bytes, and of the seconds that
    passed from an assignment to the first byte."""

    sizes: Mapping[str, int]
    before: float | None


def bodies_of(connection: Connection, task: str) -> Bodies:
    """No more of the task's history is read than tells: the last round, the last four and so on."""
    row = assignments.c
    query = (
        sa.select(
            row.profile,
            uploads.c.num_bytes,
            (uploads.c.began_at - row.assigned_at).label("before"),
        )
        .select_from(uploads.join(assignments))
        .where(row.task == task)
        .order_by(uploads.c.received_at.desc(), uploads.c.assignment)
        .limit(_NEWEST)
    )
    newest = connection.execute(sa.select(sa.func.max(row.round)).where(row.task == task)).scalar()
    rows: Sequence[Any] = ()
    num_rounds = 1
    while newest is not None and len(rows) < _NEWEST and num_rounds <= _NEWEST:
        rows = connection.execute(query.where(row.round > newest - num_rounds)).all()
        num_rounds *= 4
    sizes: dict[str, list[int]] = {}
    waits = []
    for profile, num_bytes, before in rows:
        sizes.setdefault(profile, []).append(num_bytes)
        if before is not None:
            waits.append(max(0.0, before))
    medians = {profile: round(median(each)) for profile, each in sizes.items()}
    return Bodies(medians, median(waits) if waits else None)


def said_uplink(attributes: Attributes) -> float | None:
    """The uplink that a device reports, in bytes a second; None without one, or of a wrong one."""
    value = attributes.get(UPLINK)
    return value * _MBIT if isinstance(value, float) and 0 < value < 1e9 else None


class Rates:
    """Gives each client of a round its profile, where a policy does."""

    def __init__(self, database: Database, background: Background) -> None:
        self._database = database
        self._background = background
        self._expected: dict[tuple[str, str], int] = {}
        """By model spec and profile: the bytes of a body before the first has come."""

    async def profiles_for(
        self, config: TaskConfig, attempt: Attempt, said: Mapping[str, float | None], now: float
    ) -> list[str | None]:
        """Choose each client's profile in the attempt, in the order of `said`: by client, what it
        says of its uplink, in bytes a second.

        The name of a profile; None where the plan has only one or assigns them in turn.
        """
        course, plan = attempt.course, attempt.terms.plan
        policy = bandwidth_aware(config.policies)
        if policy is None or course is None or len(plan.profiles) == 1:
            return [None] * len(said)
        names = [each.name for each in plan.profiles][: course.hardest - course.gentlest + 1]
        bodies, links = await self._known(config.task, said)
        sizes = await self._sizes(attempt, bodies)
        in_order = [sizes[each] for each in names]
        remaining_seconds = (
            config.round_seconds if config.asynchronous else attempt.round.deadline - now
        )
        return [
            names[choose(policy, links[each], in_order, remaining_seconds, bodies.before)]
            for each in said
        ]

    async def _known(
        self, task: str, said: Mapping[str, float | None]
    ) -> tuple[Bodies, dict[str, Link]]:
        if not said:
            return Bodies({}, None), {}

        def read(connection: Connection) -> tuple[Bodies, dict[str, Link]]:
            links = {each: link_of(connection, task, each) for each in said}
            return bodies_of(connection, task), links

        bodies, links = await self._database.read(read)
        return bodies, {each: replace(link, said=said[each]) for each, link in links.items()}

    async def _sizes(self, attempt: Attempt, bodies: Bodies) -> dict[str, int]:
        """The bytes of each of the plan's profiles: as they came, or else as they may be."""
        plan, spec = attempt.terms.plan, attempt.terms.shared
        sizes = dict(bodies.sizes)
        for profile in plan.profiles:
            if profile.name not in sizes:
                sizes[profile.name] = await self._guess(spec, profile.name, profile.compressor)
        return sizes

    async def _guess(self, spec: ModelSpec, name: str, compressor: object) -> int:
        key = (spec.digest, f"{name} {compressor!r}")
        if key not in self._expected:
            self._expected[key] = await self._background.in_thread(expected_bytes, compressor, spec)
        return self._expected[key]
