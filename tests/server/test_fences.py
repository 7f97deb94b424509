"""What keeps one server's late or blind write out of what another has written, wall by wall.

Nothing here waits or races: a server is behind, or has lost its lease, because nobody told it.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import anyio
import pytest
import sqlalchemy as sa

from fedpress_protocols.errors import Unavailable
from fedpress_server.coordination.commands import Pause
from fedpress_server.coordination.live import PendingCommand
from fedpress_server.coordination.task_store import StaleVersion
from fedpress_server.registry.sweeping import sweep
from fedpress_server.storage import leases, records
from fedpress_server.storage.leases import Lease, LeaseLost
from fedpress_server.storage.payloads import LocalPayloads
from fedpress_server.storage.tables import jobs
from tests.server.replicated import LEASE, Databases, Replica, Replicas, fill, replicas

pytestmark = pytest.mark.both_databases(short=True)
HOUR = 3600.0


def test_who_has_not_seen_the_newest_write_writes_nothing(databases: Databases) -> None:
    async def go() -> None:
        async with replicas(databases) as servers:
            first, second = servers.all
            await servers.begin(2)
            task = await second.services.store.fresh("digits")
            await first.services.lifecycle.pause("digits")
            store = second.services.store
            late = await store._planner.plan(task, [PendingCommand(Pause("late"), None)], 0.0)
            with pytest.raises(StaleVersion):
                await store._write(task, late)
            summary = await first.services.queries.task("digits")
            assert (summary.rounds, summary.reason) == (2, "held by the operator")
            version = await first.database.read(lambda c: records.task_version(c, "digits"))
            assert version == 1

    anyio.run(go)


def test_an_event_that_meets_a_newer_one_is_tried_again_after_it(databases: Databases) -> None:
    """The second server has seen neither the first upload nor the hold when it writes."""

    async def go() -> None:
        async with replicas(databases) as servers:
            second = servers.all[1].services.store
            await servers.begin(2)
            for device in range(2):
                await servers.check_in(1, device)
            behind = second.get("digits").record.version
            await servers.upload(0, 0)
            await servers.all[0].services.lifecycle.pause("digits")
            assert second.get("digits").record.version == behind
            await servers.upload(1, 1)
            assert len(servers.acknowledged) == 2
            assert (await servers.all[0].services.queries.task("digits")).reason
            await servers.all[0].services.lifecycle.resume("digits")
            await servers.finish(2)
            await servers.check()

    anyio.run(go)


def test_a_server_that_is_behind_ends_no_round_that_has_ended(databases: Databases) -> None:
    async def go() -> None:
        async with replicas(databases) as servers:
            first, second = (each.services for each in servers.all)
            await servers.begin(2)
            await servers.check_in(1, 0)
            task, known = second.store.get("digits"), second.store.get("digits").attempt
            assert known is not None
            await first.lifecycle.abort_round("digits", "by the operator")
            servers.clock.advance(HOUR)
            await first.scheduler.tick()
            await second.store.pass_deadline(task)
            history = await first.queries.history("digits")
            assert [status.attempt for status in history] == list(range(1, len(history) + 1))
            assert [status.state for status in history[:-1]] == ["abandoned"] * (len(history) - 1)

    anyio.run(go)


async def lost(servers: Replicas) -> tuple[Lease, Lease]:
    """A lease of the first server's that ran out, and the second's of the same job."""
    first, second = servers.all
    await servers.begin(2)
    await fill(servers, 2)
    old = await first.work._acquire()
    servers.clock.advance(LEASE)
    new = await second.work._acquire()
    assert old is not None
    assert new is not None
    assert old.job == new.job
    assert new.has_expired
    return old, new


def put_back(connection: sa.Connection, lease: Lease) -> None:
    leases.put_back(connection, lease, 0.0, "late", counts=True)


def renew(connection: sa.Connection, lease: Lease) -> None:
    if not leases.renew(connection, lease, 1e12):
        raise LeaseLost


@pytest.mark.parametrize("late", [leases.finish, put_back, renew])
def test_who_has_lost_a_lease_changes_nothing_of_the_job(
    databases: Databases, late: Callable[[sa.Connection, Lease], None]
) -> None:
    async def go() -> None:
        async with replicas(databases) as servers:
            old, new = await lost(servers)
            database = servers.all[0].database

            def row(connection: sa.Connection) -> Any:
                return connection.execute(sa.select(jobs)).one()

            before = await database.read(row)
            with pytest.raises(LeaseLost):
                await database.write(lambda c: late(c, old), locks=True)
            assert await database.read(row) == before
            await database.write(lambda c: late(c, new), locks=True)
            assert await database.read(row) != before

    anyio.run(go)


def test_what_a_fold_came_to_under_a_lost_lease_is_not_written(databases: Databases) -> None:
    async def go() -> None:
        async with replicas(databases) as servers:
            old, new = await lost(servers)
            first, second = servers.all
            with pytest.raises(LeaseLost):
                await first.work._do(old)
            assert (await second.services.queries.task("digits")).round == 0
            assert await first.database.read(lambda c: c.execute(sa.select(jobs)).one())
            await second.work._do(new)
            assert (await first.services.queries.task("digits")).round == 1
            await servers.finish(2)
            await servers.check()

    anyio.run(go)


def test_a_worker_that_was_killed_has_its_job_again_at_once(databases: Databases) -> None:
    """By its data folder: nobody else can be in there."""

    async def go() -> None:
        async with replicas(databases) as servers:
            first, second = servers.all
            await servers.begin(2)
            await fill(servers, 2)
            assert await first.work._acquire() is not None
            assert await second.work._acquire() is None
            folder = first.services.settings.data_dir
            again = Replica(servers.url, servers.payloads, servers.clock, folder)
            servers.all.append(again)
            assert await again.work.once()
            assert (await second.services.queries.task("digits")).round == 1
            assert again.metrics.lease_expired._value.get() == 0

    anyio.run(go)


def test_a_task_is_seen_whole_or_not_at_all(
    databases: Databases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two requests come to a server that has not heard of their task."""

    async def go() -> None:
        async with replicas(databases) as servers:
            steps = servers.all[1].services.store
            await servers.begin(2)
            reading, go_on = asyncio.Event(), asyncio.Event()
            spec = steps.spec

            async def late(digest: str) -> Any:
                reading.set()
                await go_on.wait()
                return await spec(digest)

            monkeypatch.setattr(steps, "spec", late)
            one = asyncio.create_task(steps.fresh("digits"))
            await reading.wait()
            other = asyncio.create_task(steps.fresh("digits"))
            for _ in range(20):
                await asyncio.sleep(0)
            assert "digits" not in steps.tasks
            go_on.set()
            found = await asyncio.gather(one, other)
            assert found[0] is found[1]
            assert found[0].attempt is not None

    anyio.run(go)


def test_while_memory_is_read_anew_nobody_finds_the_round_gone(
    databases: Databases, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def go() -> None:
        async with replicas(databases) as servers:
            server = servers.all[0]
            await servers.begin(2)
            task = server.services.store.get("digits")
            seen = []
            read = server.database.read

            async def watched(work: Any) -> Any:
                seen.append(task.attempt)
                return await read(work)

            async def away(work: Any, **options: Any) -> Any:
                raise Unavailable("the database is away")

            monkeypatch.setattr(server.database, "read", watched)
            monkeypatch.setattr(server.database, "write", away)
            with pytest.raises(Unavailable):
                await server.services.store.apply(task, Pause("nobody"))
            assert seen
            assert None not in seen
            assert task.attempt is not None

    anyio.run(go)


def test_one_task_that_cannot_be_read_keeps_nobody_from_the_others(databases: Databases) -> None:
    async def go() -> None:
        async with replicas(databases) as servers:
            first, second = servers.all
            await servers.begin(2)
            record = first.services.store.get("digits").record
            strange = replace(record, task="a task of the next release", config="{}")
            await first.database.write(lambda c: records.add_task(c, strange))
            await second.services.store.follow()
            assert "digits" in second.services.store.tasks

    anyio.run(go)


def aged(payloads: LocalPayloads, name: str, seconds: float) -> None:
    at = time.time() - seconds
    os.utime(payloads.path(name), (at, at))


def test_only_what_has_lain_there_for_a_while_is_swept(databases: Databases) -> None:
    """A server may be about to write the row of what is young, also if it put it again."""

    async def go() -> None:
        async with replicas(databases) as servers:
            await servers.begin(2)
            await fill(servers, 2)
            payloads, server = servers.payloads, servers.all[0]
            left = {age: f"uploads/digits/1-1/left-{age:064x}" for age in (0, 30, 90)}
            orphans = [f"models/{'0' * 64}.safetensors", *left.values()]
            for name in orphans:
                payloads.put(name, b"of nobody")
            staged = sorted(set(payloads.names("uploads/digits/1-1")) - set(orphans))
            assert len(staged) == 2
            for name in (*staged, *orphans, *payloads.names("models")):
                aged(payloads, name, 2 * HOUR)
            for age, name in left.items():
                aged(payloads, name, 60.0 * age)
            payloads.put(orphans[0], b"put again")
            await server.services.scheduler._cleanup.sweep()
            assert sorted(payloads.names("uploads/digits/1-1")) == sorted(
                [*staged, left[0], left[30]]
            )
            assert orphans[0] in payloads.names("models")
            await servers.finish(2)
            await servers.check()

    anyio.run(go)


def test_what_is_put_again_while_the_sweep_reads_the_records_stays(
    databases: Databases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An aggregation that is run again makes what a killed one left long ago."""

    async def go() -> None:
        async with replicas(databases) as servers:
            await servers.begin(2)
            payloads, database = servers.payloads, servers.all[0].database
            name = f"optimizers/{'1' * 64}.safetensors"
            payloads.put(name, b"a state")
            aged(payloads, name, 2 * HOUR)
            read = database.read

            async def meanwhile(work: Any) -> Any:
                found = await read(work)
                payloads.put(name, b"a state")
                return found

            monkeypatch.setattr(database, "read", meanwhile)
            await sweep(database, payloads, servers.clock(), HOUR)
            assert payloads.get(name) == b"a state"
            monkeypatch.undo()
            aged(payloads, name, 2 * HOUR)
            await sweep(database, payloads, servers.clock(), HOUR)
            assert list(payloads.names("optimizers")) == []

    anyio.run(go)
