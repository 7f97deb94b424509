"""Queries about tasks, rounds and assignments; nothing here changes any."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from sqlalchemy.engine import Connection

from fedpress_protocols.errors import Forbidden, NotFound, UnknownAssignment, UnknownRound
from fedpress_protocols.messages import (
    DivergenceSign,
    RoundFigures,
    RoundStatus,
    TaskConfig,
    TaskSummary,
)
from fedpress_server.aggregation.terms import RoundTerms
from fedpress_server.coordination import divergence
from fedpress_server.coordination.attempts import Attempt
from fedpress_server.coordination.live import LiveTask
from fedpress_server.coordination.task_store import TaskStore
from fedpress_server.storage import declines, privacy, records
from fedpress_server.storage.database import Database
from fedpress_server.storage.files import artefact_name, base_name
from fedpress_server.storage.payloads import Payloads
from fedpress_server.storage.records import AssignmentRecord


class Queries:
    """Reads tasks as memory has them, brought up to date first, and the records on the disk."""

    def __init__(
        self,
        store: TaskStore,
        database: Database,
        payloads: Payloads,
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._database = database
        self._payloads = payloads
        self._clock = clock

    async def task(self, name: str) -> TaskSummary:
        """Raises UnknownTask."""
        return (await self._store.fresh(name)).summary

    async def configuration(self, name: str) -> TaskConfig:
        """Raises UnknownTask."""
        return (await self._store.fresh(name)).config

    async def held_since(self, name: str) -> float | None:
        """Unix seconds since which an operator lets no device have work; raises UnknownTask."""
        return (await self._store.fresh(name)).record.held_at

    async def tasks(self, after: str | None = None, limit: int = 1000) -> list[TaskSummary]:
        """The first `limit` of those whose names come after `after`, in their order."""
        if self._store.is_shared:
            await self._store.follow()
        names = sorted(name for name in self._store.tasks if after is None or name > after)
        return [self._store.tasks[name].summary for name in names[:limit]]

    async def history(
        self, name: str, before: tuple[int, int] | None = None, limit: int = 1000
    ) -> list[RoundStatus]:
        """See `records.round_history`; raises UnknownTask."""
        task = await self._store.fresh(name)

        def read(connection: Connection) -> list[RoundStatus]:
            statuses = _judged(connection, task, before, limit)
            if not statuses:
                return statuses
            num_declined = declines.counts(connection, name, [each.round for each in statuses])
            return [
                _with(each, declined=num_declined.get((each.round, each.attempt), {}))
                for each in privacy.with_privacy(connection, name, statuses)
            ]

        return await self._database.read(read)

    async def warnings(self, name: str) -> dict[DivergenceSign, str]:
        """Why the task's training looks as if it diverges, by sign; raises UnknownTask."""
        task = await self._store.fresh(name)
        newest = await self._database.read(lambda c: _judged(c, task, None, divergence.WINDOW))
        return divergence.current_warnings(newest)

    async def all_warnings(self) -> dict[str, dict[DivergenceSign, str]]:
        """The same by running task."""
        running = [each.task for each in await self.tasks() if each.state == "running"]
        return {name: await self.warnings(name) for name in running}

    async def round_status(self, name: str, number: int) -> RoundStatus:
        """The latest attempt at the round; raises UnknownRound."""
        task = await self._store.fresh(name)
        config, least = task.config, task.config.evaluation.least_clients

        def read(connection: Connection) -> RoundStatus | None:
            status = records.measured_attempt(connection, name, number, least)
            if status is None:
                return None
            num_declined = declines.counts(connection, name, [number])
            key = name, number, status.attempt
            seconds = declines.durations(connection, key, config.round_seconds)
            why = num_declined.get((number, status.attempt), {})
            (judged,) = _judged(connection, task, (number, status.attempt + 1), 1)
            (status,) = privacy.with_privacy(connection, name, [status])
            shown = {"figures": judged.figures, "warnings": judged.warnings}
            return status.model_copy(update={"declined": why, "durations": seconds, **shown})

        record = await self._database.read(read)
        if record is None:
            raise UnknownRound(f"task {name!r} has no round {number}", task=name)
        return record

    async def artefact_bytes(self, digest: str) -> int:
        """The size of what an open plan names besides models; raises NotFound."""
        if self._store.is_shared:
            await self._store.follow()
        for task in self._store.tasks.values():
            plans = task.attempt.plans if task.attempt is not None else ()
            if any(digest in plan.artefacts for plan in plans):
                return await asyncio.to_thread(self._payloads.size, artefact_name(digest))
        raise NotFound(f"no open round names {digest[:12]}")

    async def assignment(self, client_id: str, name: str) -> AssignmentRecord:
        """Raises UnknownAssignment, or Forbidden for another device's."""
        record = await self._database.read(lambda c: records.assignment(c, name))
        if record is None:
            raise UnknownAssignment(f"no assignment {name[:64]!r}")
        if record.client_id != client_id:
            raise Forbidden("the assignment is another device's")
        return record

    async def assignments(
        self, name: str, number: int, attempt: int, most: int
    ) -> list[AssignmentRecord]:
        """The first `most` assignments of an attempt, by position."""
        key = name, number, attempt
        return await self._database.read(lambda c: records.assignments_of(c, key, most))

    def held(self, assignment: str) -> tuple[LiveTask, Attempt] | None:
        """The task in memory, and its attempt, in which the assignment awaits its upload.

        Another server may be ahead. Whoever goes by this finds out when it writes.
        """
        for task in self._store.tasks.values():
            attempt = task.attempt
            if attempt is not None and attempt.takes_upload(assignment, self._clock()):
                return task, attempt
        return None

    async def takes_upload(self, assignment: AssignmentRecord) -> RoundTerms | None:
        """The terms of the upload that this assignment still awaits."""
        task = await self._store.fresh(assignment.task)
        await self._store.pass_deadline(task)
        attempt, name = task.attempt, assignment.assignment
        if attempt is None or not attempt.holds(name, assignment.key):
            return None
        return attempt.terms_of(name) if attempt.takes_upload(name, self._clock()) else None

    async def attempt_of(self, assignment: AssignmentRecord) -> Attempt | None:
        """The attempt that the assignment is a part of; None if it is over."""
        task = await self._store.fresh(assignment.task)
        await self._store.pass_deadline(task)
        attempt = task.attempt
        if attempt is None or not attempt.holds(assignment.assignment, assignment.key):
            return None
        return attempt

    async def own_name(self, client_id: str, assignment: str) -> tuple[str, str]:
        """The file of what the client's last included upload stood for, and its digest, while the
        assignment is open. Raises UnknownAssignment, Forbidden or NotFound."""
        record = await self.assignment(client_id, assignment)
        attempt = (await self._store.fresh(record.task)).attempt
        if attempt is not None and attempt.key == record.key:
            digest = attempt.terms.bases.get(client_id)
            if digest is not None:
                return base_name(record.task, client_id, digest), digest
        raise NotFound("the assignment names no upload before it, or is over")

    async def max_body_bytes(self, task: str) -> int:
        """The largest upload of any of the task's rounds."""
        return (await self._store.fresh(task)).record.max_body_bytes


def _judged(
    connection: Connection, task: LiveTask, before: tuple[int, int] | None, limit: int
) -> list[RoundStatus]:
    """See `records.round_history`; with the signs of divergence, and the figures to be shown."""
    name, least = task.record.task, task.config.evaluation.least_clients
    statuses = records.round_history(connection, name, before, limit + divergence.WINDOW)
    shown = [_with(each, figures=_shown(each.figures, least)) for each in statuses]
    judges_nmse = divergence.judges_nmse(task.config, task.strategy)
    return divergence.with_warnings(shown, judges_nmse=judges_nmse)[-limit:]


def _with(status: RoundStatus, **fields: Any) -> RoundStatus:
    """Copied only if a field changes: pages read a thousand at once."""
    changed = {name: value for name, value in fields.items() if getattr(status, name) != value}
    return status.model_copy(update=changed) if changed else status


def _shown(figures: RoundFigures | None, least: int) -> RoundFigures | None:
    """None for means over fewer than `least` uploads: devices may read them."""
    return figures if figures is not None and figures.num_uploads >= least else None
