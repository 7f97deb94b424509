"""The list of servers: who runs, who fell silent, what each holds and how late its work is."""

from __future__ import annotations

import anyio
import pytest
import sqlalchemy as sa

from fedpress_protocols.fleet import ServerStatus
from fedpress_server.storage.tables import servers as rows
from tests.server.replicated import LEASE, Databases, Replica, fill, replicas


async def listed(asked: Replica) -> dict[str, ServerStatus]:
    """As this server lists them, by version: each test server has one of its own."""
    answer = await asked.services.server_registry.status()
    return {each.version: each for each in answer.servers}


@pytest.mark.both_databases(short=True)
def test_servers_are_listed_with_their_leases_and_the_wait_of_the_oldest_job(
    databases: Databases,
) -> None:
    async def go() -> None:
        async with replicas(databases) as servers:
            first, second = servers.all
            for each in servers.all:
                await each.services.server_registry.start()
            await servers.begin(2)
            await fill(servers, 2)
            servers.clock.advance(7)
            assert [each.lag_seconds for each in (await listed(first)).values()] == [7.0, 7.0]
            assert await second.work._acquire() is not None
            before = await listed(first)
            assert {name: each.leases for name, each in before.items()} == {"0": 0, "1": 1}
            assert [each.lag_seconds for each in before.values()] == [0.0, 0.0]
            assert {each.role for each in before.values()} == {"all"}
            servers.clock.advance(LEASE)
            assert [each.leases for each in (await listed(first)).values()] == [0, 0]

    anyio.run(go)


def test_a_server_without_a_heartbeat_is_stale_and_leaves_the_list_in_an_hour(
    databases: Databases,
) -> None:
    async def go() -> None:
        async with replicas(databases) as servers:
            first, second = servers.all
            for each in servers.all:
                await each.services.server_registry.start()
            began = servers.clock()
            servers.clock.advance(16)
            silent = (await listed(first))["1"]
            assert (silent.is_stale, silent.seen_at) == (True, began)
            assert not (await listed(second))["1"].is_stale
            await second.services.server_registry._sign()
            assert not any(each.is_stale for each in (await listed(first)).values())
            servers.clock.advance(3601)
            assert list(await listed(first)) == ["0"]
            await first.services.server_registry._sign()
            count = sa.select(sa.func.count()).select_from(rows)
            assert await first.database.read(lambda c: c.execute(count).scalar_one()) == 1

    anyio.run(go)


def test_a_server_of_a_sqlite_file_gives_signs_too(databases: Databases) -> None:
    async def go() -> None:
        async with replicas(databases) as servers:
            first, second = servers.all
            registry = first.services.server_registry
            await registry.start()
            servers.clock.advance(100)
            registry._asked.set()  # as a minute without it would
            with anyio.fail_after(30):
                while (await listed(second))["0"].seen_at != servers.clock():
                    pass
            await registry.stop()

    anyio.run(go)


def test_a_scheduler_that_has_not_acted_on_a_deadline_is_late(databases: Databases) -> None:
    async def go() -> None:
        async with replicas(databases) as servers:
            first, second = servers.all
            await servers.begin(2)
            await servers.check_in(0, 0)
            servers.clock.advance(69)
            assert (await listed(first))["0"].lag_seconds == 9.0
            await first.services.server_registry.start()
            assert (await listed(second))["0"].lag_seconds == 9.0
            await servers.tick(0)
            assert (await listed(first))["0"].lag_seconds == 0.0

    anyio.run(go)
