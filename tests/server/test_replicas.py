"""Several coordinators on one database: what one writes the others know, and nothing counts twice.

Every replica here has its own door to the database and its own memory; they share nothing but the
database and the store. Devices' updates are one-hot, each at a coordinate of its own, so that one
counted twice or lost shows in the model itself.
"""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedpress_protocols.errors import (
    ConfigurationError,
    Conflict,
    Unavailable,
)
from fedpress_server import Settings, create_app
from fedpress_server.coordination import job_runner, jobs
from fedpress_server.storage import records
from fedpress_server.storage.leases import LeaseLost
from tests.lengths import examples
from tests.server.replicated import (
    FIRST,
    LEASE,
    Databases,
    Operation,
    fill,
    replicas,
)

DEVICES = 4
ACTIONS = ("check_in", "upload", "aggregate", "tick", "later", "decline")
OPERATION = st.tuples(
    st.sampled_from(("check_in", "check_in", "upload", "upload", *ACTIONS)),
    st.integers(0, 1),
    st.integers(0, DEVICES - 1),
)


@pytest.mark.both_databases(short=True)
@settings(
    max_examples=examples(4, 12),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(pairs=st.lists(st.tuples(OPERATION, OPERATION), max_size=25))
def test_two_servers_on_one_database_count_every_upload_once(
    databases: Databases, pairs: list[tuple[Operation, Operation]]
) -> None:
    """Each pair of operations is under way at a time, and both have looked before either writes."""

    async def go() -> None:
        async with replicas(databases) as servers:
            await servers.begin(DEVICES)
            for pair in pairs:
                await servers.at_once(pair)
            await servers.finish(DEVICES)
            await servers.check()

    anyio.run(go)


@pytest.mark.both_databases(short=True)
def test_a_worker_that_was_paused_past_its_lease_changes_nothing(databases: Databases) -> None:
    async def go() -> None:
        async with replicas(databases) as servers:
            first, second = servers.all
            await servers.begin(2)
            await fill(servers, 2)
            lease = await first.work._acquire()
            assert lease is not None
            assert lease.job.kind == "fold"
            assert not await second.work.once(), "the job is leased, and nobody else has it"
            servers.clock.advance(LEASE - 1)
            assert not await second.work.once()
            servers.clock.advance(1)
            assert await second.work.once()
            made = await second.services.queries.task("digits")
            assert made.round == 1
            assert second.metrics.lease_expired._value.get() == 1
            with pytest.raises(LeaseLost):
                await first.work._do(lease)
            assert await first.services.queries.task("digits") == made
            await servers.finish(2)
            await servers.check()

    anyio.run(go)


@pytest.mark.both_databases(short=True)
def test_an_aggregation_that_ends_after_its_lease_was_taken_writes_nothing(
    databases: Databases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first worker has made the model, and is about to say so, when another gets the job."""

    async def go() -> None:
        async with replicas(databases) as servers:
            first, second = servers.all
            await servers.begin(2)
            await fill(servers, 2)
            made, go_on = asyncio.Event(), asyncio.Event()
            tell = first.work._tell

            async def late(*args: Any) -> None:
                made.set()
                await go_on.wait()
                await tell(*args)

            monkeypatch.setattr(first.work, "_tell", late)
            running = asyncio.create_task(first.work.once())
            await made.wait()
            servers.clock.advance(LEASE)
            taken = await second.work._acquire()
            assert taken is not None
            go_on.set()
            await running
            assert (await first.services.queries.task("digits")).round == 0
            await second.work._do(taken)
            assert (await first.services.queries.task("digits")).round == 1
            monkeypatch.undo()
            await servers.finish(2)
            await servers.check()

    anyio.run(go)


@pytest.mark.both_databases(short=True)
@pytest.mark.parametrize("strategy", [{"id": "fedavgm", "momentum": 0.5}, {"id": "adasum"}])
def test_the_model_is_the_same_whatever_the_batches_and_the_workers(
    databases: Databases, strategy: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uploads in batches of one or two, done by two workers in turn; or all at once."""
    models, num_jobs = [], []

    async def go(batch: int) -> None:
        monkeypatch.setattr(jobs, "BATCH", batch)
        async with replicas(databases) as servers:
            await servers.begin(5, strategy=strategy, rounds=1, cohort={"size": 5, "minimum": 5})
            await fill(servers, 5)
            done = 0
            while await servers.all[done % 2].work.once():
                done += 1
            num_jobs.append(done)
            models.append((await servers.all[0].services.queries.task("digits")).model)

    for batch in (64, 2, 1):
        anyio.run(go, batch)
    assert models == [models[0]] * 3
    assert models[0] != FIRST.digest
    assert num_jobs == ([1, 4, 6] if strategy["id"] == "fedavgm" else [1, 1, 1])


@pytest.mark.both_databases(short=True)
def test_a_job_that_fails_ten_times_gives_the_round_up_with_the_reason(
    databases: Databases, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise MemoryError("no room for the sum")

    async def go() -> None:
        async with replicas(databases) as servers:
            await servers.begin(2)
            await fill(servers, 2)
            monkeypatch.setattr(job_runner, "aggregate", fail)
            for attempt in range(11):
                assert await servers.all[attempt % 2].work.once()
            monkeypatch.undo()
            history = await servers.all[0].services.queries.history("digits")
            assert history[0].state == "abandoned"
            assert history[0].reason == "fold failed 10 times: no room for the sum"
            assert servers.all[0].metrics.jobs_abandoned._value.get() == 1
            await servers.finish(2)
            await servers.check()

    anyio.run(go)


@pytest.mark.both_databases(short=True)
@pytest.mark.parametrize(
    "outage",
    [Unavailable("the store is away"), OSError(errno.ENOSPC, "No space left on device")],
    ids=["store", "temporary files"],
)
def test_an_outage_is_not_the_job_s_fault(
    databases: Databases, outage: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise outage

    async def go() -> None:
        async with replicas(databases) as servers:
            await servers.begin(2)
            await fill(servers, 2)
            monkeypatch.setattr(job_runner, "aggregate", fail)
            for attempt in range(30):
                assert await servers.all[attempt % 2].work.once()
            monkeypatch.undo()
            assert await servers.all[0].work.once()
            assert (await servers.all[1].services.queries.task("digits")).round == 1

    anyio.run(go)


@pytest.mark.both_databases(short=True)
def test_what_an_operator_does_on_one_server_the_other_knows_at_once(databases: Databases) -> None:
    async def go() -> None:
        async with replicas(databases) as servers:
            first, second = (each.services for each in servers.all)
            await servers.begin(2)
            await fill(servers, 1)
            await second.lifecycle.abort_round("digits", "by the operator")
            assert [status.attempt for status in await first.queries.history("digits")] == [1, 2]
            await servers.check_in(0, 0)
            assert servers.receipts
            await first.lifecycle.cancel("digits", "by the operator")
            with pytest.raises(Conflict):
                await second.lifecycle.cancel("digits", "by the operator")
            assert (await second.queries.task("digits")).state == "cancelled"

    anyio.run(go)


@pytest.mark.both_databases(short=True)
def test_a_policy_chooses_among_devices_that_other_servers_have_seen(databases: Databases) -> None:
    async def go() -> None:
        async with replicas(databases, 3) as servers:
            await servers.begin(4, selection={"policy": "uniform", "candidates": 4})
            for device in range(4):
                await servers.check_in(device % 2, device)
            assert not servers.given
            await servers.tick(2)
            for device in range(4):
                await servers.check_in(1 - device % 2, device)
            assert len(servers.given) == 2

    anyio.run(go)


@pytest.mark.both_databases(short=True)
@pytest.mark.parametrize("follower", [0, 1])
def test_a_window_begins_anew_on_every_server_when_one_of_them_has_chosen(
    databases: Databases, follower: int
) -> None:
    """Server 0 chooses; then a device looks at the `follower`."""

    async def go() -> None:
        async with replicas(databases) as servers:
            terms = {"policy": "uniform", "window": 30.0}
            await servers.begin(
                3, selection=terms, cohort={"size": 5, "minimum": 1}, round_seconds=600.0
            )
            for device in (0, 1):
                await servers.check_in(0, device)
            await servers.tick(follower)
            servers.clock.advance(31)
            await servers.tick(0)
            servers.clock.advance(2)
            for seconds in (0, 29):
                servers.clock.advance(seconds)
                await servers.check_in(follower, 2)
                await servers.tick(follower)
            await servers.check_in(follower, 2)
            assert not servers.given, "the window has another second"
            servers.clock.advance(1)
            await servers.tick(follower)
            for device in range(3):
                await servers.check_in(follower, device)
            assert set(servers.given) == {0, 1, 2}

    anyio.run(go)


@pytest.mark.both_databases(short=True)
@pytest.mark.parametrize("chooser", [0, 1])
def test_whoever_chooses_knows_what_devices_said_of_their_uplinks(
    databases: Databases, chooser: int
) -> None:
    """All tell server 0."""

    async def go() -> None:
        async with replicas(databases) as servers:
            ladder = [
                {"name": name, "compressor": {"id": "topk", "fraction": fraction}}
                for name, fraction in (("gentle", 0.5), ("middle", 0.1), ("hard", 0.01))
            ]
            await servers.begin(
                3,
                selection={"policy": "uniform", "window": 10.0},
                cohort={"size": 3, "minimum": 3},
                profiles=ladder,
                policies=[{"id": "bandwidth_aware"}],
            )
            await servers.check_in(0, 0, uplink_mbps=1000.0)
            await servers.check_in(0, 1, uplink_mbps=1e-6)
            await servers.check_in(0, 2)
            servers.clock.advance(10)
            await servers.tick(chooser)
            for device in range(3):
                await servers.check_in(0, device)
            given = [servers.given[device].profile for device in range(3)]
            assert given == ["gentle", "hard", "middle"]

    anyio.run(go)


@pytest.mark.both_databases(short=True)
def test_a_check_in_does_not_read_who_else_waits(
    databases: Databases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where servers share that list, only a tick reads it."""
    read, num_rows = records.waiting_since, 0

    def counted(*args: Any) -> list[records.Waiting]:
        nonlocal num_rows
        rows = read(*args)
        num_rows += len(rows)
        return rows

    monkeypatch.setattr(records, "waiting_since", counted)

    async def go() -> None:
        async with replicas(databases) as servers:
            await servers.begin(9, selection={"policy": "uniform", "candidates": 9})
            for device in range(9):
                await servers.check_in(device % 2, device)
            assert num_rows == 0
            await servers.tick(1)
            assert num_rows == 9
            for device in range(9):
                await servers.check_in(device % 2, device)
            assert len(servers.given) == 2

    anyio.run(go)


@pytest.mark.both_databases(short=True)
def test_a_device_that_waits_hears_of_the_next_choice(databases: Databases) -> None:
    """It is held by the server that chooses, or by another that follows."""

    async def go() -> None:
        async with replicas(databases) as servers:
            await servers.begin(2, selection={"policy": "uniform", "candidates": 2})
            with anyio.fail_after(10):
                async with anyio.create_task_group() as group:
                    for device in range(2):
                        group.start_soon(servers.check_in, device, device, 30.0)
                    while len(servers.given) < 2:
                        await servers.tick(1)
                        await servers.all[0].services.store.follow()
                        await anyio.sleep(0.005)

    anyio.run(go)


@pytest.mark.parametrize("role", ["api", "worker", "scheduler"])
@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({}, "SQLite is one server's own"),
        ({"database_url": "postgresql://localhost/x"}, "the data folder is one server's own"),
    ],
)
def test_a_role_of_its_own_needs_what_servers_share(
    role: str, changes: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        create_app(Settings(data_dir=tmp_path, role=role, **changes))


def test_a_worker_answers_supervisors_alone(tmp_path: Path) -> None:
    shared: dict[str, Any] = {
        "database_url": "postgresql://localhost/x",
        "store_url": "s3://bucket/prefix",
    }
    app = create_app(Settings(data_dir=tmp_path, role="worker", **shared))
    assert set(app.openapi()["paths"]) == {"/livez", "/readyz", "/metrics"}
