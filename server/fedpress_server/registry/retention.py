"""Retention of model files and of rounds' events: never deletes what a round, an alias, a device or
a backup needs.

The deletion of a model is recorded first, then the files are removed, each in an exclusive
transaction. Code that writes such a model again checks the record in a transaction too, see
`registry.keep_again`, so no file is missing that the database says exists.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from fedpress_protocols.messages import RetentionTerms, TaskConfig
from fedpress_protocols.plan import RoundPlan
from fedpress_protocols.registry import Collected, CollectedModel
from fedpress_server import failpoints
from fedpress_server.identity import audit
from fedpress_server.registry import restores
from fedpress_server.storage import records
from fedpress_server.storage.database import Database
from fedpress_server.storage.payloads import Payloads
from fedpress_server.storage.records import TaskRecord
from fedpress_server.storage.tables import alias_moves, model_files, model_versions

_TOGETHER = 32
"""Files removed in one transaction, during which other writers wait."""
_EVENTS_TOGETHER = 1000
"""Events removed in one transaction."""

_log = logging.getLogger(__name__)


class Retention:
    """Deletes models and events every `every` seconds, and on request.

    A model younger than `grace` seconds stays, so that devices have time to fetch it, and so do the
    events of a round that was closed less than `grace` seconds ago. During a backup files stay,
    until the next collection.
    """

    def __init__(
        self,
        database: Database,
        payloads: Payloads,
        clock: Callable[[], float],
        *,
        grace: float,
        every: float,
    ) -> None:
        self._database = database
        self._payloads = payloads
        self._clock = clock
        self._grace = grace
        self._every = every
        self._due = clock() + every
        self._collecting = asyncio.Lock()

    def is_due(self) -> bool:
        """Whether a collection is due; at most once per `every` seconds."""
        now = self._clock()
        if now < self._due:
            return False
        self._due = now + self._every
        return True

    async def collect(self, *, dry_run: bool = False, by: str = audit.SERVER) -> Collected:
        """Delete the models and events that no policy keeps and nothing needs; idempotent."""
        since = self._clock() - self._grace
        if dry_run:

            def look(connection: Connection) -> Collected:
                old = _with_old_events(connection)
                counts = [records.num_old_events(connection, *each, since) for each in old]
                return _told(collectable(connection, since), sum(counts), dry_run=True)

            return await self._database.read(look)
        async with self._collecting:
            now = self._clock()

            def give_up(connection: Connection) -> list[CollectedModel]:
                chosen = collectable(connection, since)
                for each in chosen:
                    _set_collected(connection, each.model, now)
                if chosen:
                    report = {
                        "models": len(chosen),
                        "bytes": sum(each.num_bytes for each in chosen),
                    }
                    audit.add(connection, now, by, "models.collected", "", **report)
                return chosen

            models = await self._database.write(give_up)
            failpoints.reach("models-given-up")
            given_up = await self._database.read(_given_up)
            names = await asyncio.to_thread(lambda: list(self._files_of(given_up)))
            for start in range(0, len(names), _TOGETHER):
                chunk = names[start : start + _TOGETHER]
                await self._database.write(partial(self._remove, chunk))
            num_events = await self._drop_events(since, by)
        report = _told(models, num_events, dry_run=False)
        if models or num_events:
            _log.info(
                "%d models deleted, %d bytes; %d events of old rounds",
                len(report.models),
                report.num_bytes,
                num_events,
            )
        return report

    async def _drop_events(self, since: float, by: str) -> int:
        """Delete the events of old rounds, some at a time; returns how many there were.

        Nothing reads them again, so whoever is killed in between leaves some for the next time, and
        nothing that is incomplete.
        """
        total = 0
        for task, through in await self._database.read(_with_old_events):
            dropped = _EVENTS_TOGETHER
            while dropped == _EVENTS_TOGETHER:
                drop = partial(
                    records.drop_old_events,
                    task=task,
                    through=through,
                    closed_by=since,
                    most=_EVENTS_TOGETHER,
                )
                dropped = await self._database.write(drop)
                failpoints.reach("events-dropped")
                total += dropped
        if total:
            now = self._clock()
            await self._database.write(
                lambda c: audit.add(c, now, by, "rounds.collected", "", events=total)
            )
        return total

    def _files_of(self, given_up: set[str]) -> Iterable[str]:
        """The existing files of deleted models, including those left by a killed server."""
        folders = ["models", *self._payloads.names("coded")]
        for folder in folders:
            for name in self._payloads.names(folder):
                if given_up.intersection(_digests_in(name)):
                    yield name

    def _remove(self, names: Sequence[str], connection: Connection) -> None:
        if restores.is_held(connection, self._clock()):
            return
        given_up = _given_up(connection)
        for name in names:
            if given_up.intersection(_digests_in(name)):
                self._payloads.drop(name)


def collectable(connection: Connection, since: float) -> list[CollectedModel]:
    """The models that may be deleted: versions of tasks with retention that nothing needs. Those
    created after `since` are too young."""
    brought_or_gone = sa.select(model_files.c.digest).where(
        sa.or_(model_files.c.brought_at.is_not(None), model_files.c.collected_at.is_not(None))
    )
    in_use = set(connection.execute(brought_or_gone).scalars()) | set(_promoted(connection))
    versions: dict[str, dict[str, int]] = {}
    for record in records.task_records(connection):
        config = TaskConfig.model_validate_json(record.config)
        in_use |= _in_use(connection, record, config)
        rows = connection.execute(
            sa.select(
                model_versions.c.version,
                model_versions.c.model,
                model_versions.c.published,
                model_versions.c.created_at,
            )
            .where(model_versions.c.task == record.task)
            .order_by(model_versions.c.version.desc())
        )
        for place, (version, model, published, created_at) in enumerate(rows):
            digests = {model, *published.values()}
            if created_at > since or keeps(config.retention, version, place):
                in_use |= digests
                continue
            for digest in digests:
                versions.setdefault(digest, {})[record.task] = version
    unused = {digest: versions[digest] for digest in versions.keys() - in_use}
    return sorted(_sized(connection, unused), key=lambda each: sorted(each.versions.items()))


def _with_old_events(connection: Connection) -> list[tuple[str, int]]:
    """The tasks with retention, each with the last round whose events it does not keep."""
    old = []
    for record in records.task_records(connection):
        terms = TaskConfig.model_validate_json(record.config).retention
        if terms is not None and record.round > terms.last:
            old.append((record.task, record.round - terms.last))
    return old


def keeps(terms: RetentionTerms | None, version: int, place: int) -> bool:
    """Whether the policy keeps a version; `place` counts from the newest, 0."""
    if terms is None or version == 0 or place < terms.last:
        return True
    return terms.every is not None and version % terms.every == 0


def _promoted(connection: Connection) -> Iterable[str]:
    """The models that aliases point to or have pointed to."""
    same = sa.and_(
        model_versions.c.task == alias_moves.c.task,
        model_versions.c.version == alias_moves.c.version,
    )
    query = sa.select(model_versions.c.model, model_versions.c.published).join(alias_moves, same)
    for model, published in connection.execute(query):
        yield from (model, *published.values())


def _in_use(connection: Connection, record: TaskRecord, config: TaskConfig) -> set[str]:
    """The models that a task reads, publishes, evaluates, or uses as base of differences."""
    digests = {config.model, record.model, *(record.published or {}).values()}
    if record.best is not None:
        digests.add(record.best)
    for text in records.plans_in_use(connection, record.task):
        plan = RoundPlan.from_json(text)
        sources = (plan.model, plan.previous_model, plan.first_model)
        digests |= {digest for digest in sources if digest is not None}
    if config.downlink is not None:
        digests |= set(records.newest_models(connection, record.task, config.downlink.keep + 1))
    return digests


def _sized(
    connection: Connection, candidates: dict[str, dict[str, int]]
) -> Iterable[CollectedModel]:
    for digest, versions in candidates.items():
        record = records.model(connection, digest)
        if record is not None:
            yield CollectedModel(model=digest, num_bytes=record.num_bytes, versions=versions)


def _set_collected(connection: Connection, digest: str, now: float) -> None:
    row = {"digest": digest, "brought_at": None, "collected_at": now}
    changed = sa.update(model_files).where(model_files.c.digest == digest)
    if not connection.execute(changed.values(collected_at=now)).rowcount:
        connection.execute(sa.insert(model_files), row)


def _given_up(connection: Connection) -> set[str]:
    query = sa.select(model_files.c.digest).where(model_files.c.collected_at.is_not(None))
    return set(connection.execute(query).scalars())


def _digests_in(name: str) -> list[str]:
    """The digests in a file's name: of its model, and of the base of a difference."""
    return name.rpartition("/")[2].partition(".")[0].split("-")


def _told(models: list[CollectedModel], num_events: int, *, dry_run: bool) -> Collected:
    total = sum(each.num_bytes for each in models)
    return Collected(dry_run=dry_run, models=tuple(models), num_bytes=total, num_events=num_events)
