"""Requests that wait at one moment share one transaction, and each gets its own answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from fedpress_protocols.errors import ReplayedRequest
from fedpress_protocols.model import Model
from fedpress_protocols.signatures import Content
from fedpress_server.storage import records
from fedpress_server.storage.batched import Batched
from fedpress_server.storage.database import Database
from fedpress_server.storage.tables import request_nonces
from tests.devices import Device, Operator, checked
from tests.server.in_process import Clock, Server, Start, include_one
from tests.server.replicated import Databases


def test_what_comes_while_a_call_runs_shares_the_next_one() -> None:
    calls: list[list[int]] = []
    has_begun, may_end = asyncio.Event(), asyncio.Event()

    async def double(items: Sequence[int]) -> list[int]:
        has_begun.set()
        calls.append(list(items))
        await may_end.wait()
        return [2 * item for item in items]

    async def go() -> list[int]:
        batched = Batched(double, most=3)
        first = asyncio.create_task(batched(1))
        await has_begun.wait()
        rest = [asyncio.create_task(batched(item)) for item in (2, 3, 4, 5)]
        await asyncio.sleep(0)
        assert calls == [[1]], "a call that runs takes nobody in who came after it had begun"
        may_end.set()
        return await asyncio.gather(first, *rest)

    assert asyncio.run(go()) == [2, 4, 6, 8, 10]
    assert calls == [[1], [2, 3, 4], [5]]


def test_a_failure_is_of_those_who_shared_the_call_and_of_nobody_after() -> None:
    async def invert(items: Sequence[int]) -> list[float]:
        return [1 / item for item in items]

    async def go() -> None:
        batched = Batched(invert)
        both = await asyncio.gather(batched(0), batched(1), return_exceptions=True)
        assert [type(each) for each in both] == [ZeroDivisionError] * 2
        assert await batched(4) == 0.25

    asyncio.run(go())


def test_who_no_longer_waits_keeps_nobody_from_an_answer() -> None:
    async def same(items: Sequence[int]) -> list[int]:
        await asyncio.sleep(0)
        return list(items)

    async def go() -> None:
        batched = Batched(same)
        gone, stays = asyncio.create_task(batched(1)), asyncio.create_task(batched(2))
        await asyncio.sleep(0)
        gone.cancel()
        assert await stays == 2

    asyncio.run(go())


@pytest.mark.both_databases(short=True)
def test_of_equal_nonces_one_is_new(databases: Databases, tmp_path: Path) -> None:
    url = databases.new(tmp_path)
    database = Database(url)
    try:
        first = [("a", "1", 9), ("a", "2", 9), ("a", "1", 9)]
        then = [("a", "2", 9), ("b", "2", 9)]
        for nonces, expected in ((first, [True, True, False]), (then, [False, True])):
            found = asyncio.run(
                database.write(lambda c, n=nonces: records.add_nonces(c, n), locks=True)  # type: ignore[misc]
            )
            assert found == expected
    finally:
        database.close()
        databases.give_back(url)


@pytest.fixture
def two(start: Start, database_url: Callable[[Path], str], tmp_path: Path, clock: Clock) -> Any:
    """Two servers on one database of PostgreSQL, and on the folders of one store."""
    for folder in ("models", "uploads", "optimizers", "coded", "bases", "sums"):
        (tmp_path / "data" / folder).mkdir(parents=True, mode=0o700)
        (tmp_path / "other").mkdir(exist_ok=True, mode=0o700)
        (tmp_path / "other" / folder).symlink_to(tmp_path / "data" / folder)
    url = database_url(tmp_path / "data")
    keys = {
        f"{purpose}_key_file": tmp_path / "data" / f"{purpose}-key.pem"
        for purpose in ("server", "authority")
    }
    with start() as first, start(data_dir=tmp_path / "other", database_url=url, **keys) as second:
        yield first, second


@pytest.mark.parametrize("dialect", ["postgresql"], indirect=True)
def test_a_check_in_that_gets_nothing_writes_nothing(
    two: tuple[Server, Server], model: Model, clock: Clock
) -> None:
    first, _ = two
    operator = Operator(first)
    operator.begin(model, cohort={"size": 1, "minimum": 1})
    devices = [Device(first, clock) for _ in range(2)]
    for device in devices:
        device.enrol(operator.token())
    devices[0].assignment("digits")

    def nonces() -> int:
        query = sa.select(sa.func.count()).select_from(request_nonces)
        database = first.app.services.database
        return int(first.call(database.read, lambda c: c.execute(query).scalar_one()))

    assert nonces() == 1, "it took a place"
    for server in two:
        devices[1].http = server
        assert devices[1].check_in("digits") is None
    assert nonces() == 1


@pytest.mark.parametrize("dialect", ["postgresql"], indirect=True)
def test_a_check_in_that_took_a_place_takes_no_other_at_another_server(
    two: tuple[Server, Server], model: Model, clock: Clock
) -> None:
    first, second = two
    operator = Operator(first)
    device = Device(first, clock)
    device.enrol(operator.token())
    operator.begin(model, rounds=2, cohort={"size": 1, "minimum": 1})
    path, body = "/v1/tasks/digits/check-in", b"{}"
    signed = device.sign("POST", path, Content.of(body)) | {"Content-Type": "application/json"}
    assert first.post(path, headers=signed, content=body).status_code == 200
    include_one(device, model)
    give_up = time.monotonic() + 60
    while operator.get("/v1/tasks/digits")["round"] < 1:
        assert time.monotonic() < give_up, "the round was not aggregated"
        time.sleep(0.01)
    with pytest.raises(ReplayedRequest):
        checked(second.post(path, headers=signed, content=body))
    assert device.assignment("digits").plan.round == 2
