"""Disks that are full, and logs that do not grow for ever.

The disk is a real one, a small tmpfs, where this user may mount; else the tests say why not.
"""

import asyncio
import logging
import sqlite3
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import sqlalchemy as sa

from fedpress_protocols.errors import ServerError, StorageFull, Unavailable
from fedpress_protocols.model import Model
from fedpress_server.storage.database import Database
from fedpress_server.storage.payloads import LocalPayloads
from fedpress_server.storage.tables import models
from tests.devices import Device, Operator
from tests.server.in_process import Clock, Server, Start, history, ones

MIB = 2**20


class Disk:
    """A file system of `size` bytes, of which `fill` leaves as much as it is told."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ballast = folder / "ballast"

    def fill(self, leave: int = 0) -> None:
        """What is full stays full meanwhile: the ballast only grows, to be cut at the end."""
        for size in (64 * 1024, 4 * 1024, 64):
            with self._ballast.open("ab", buffering=0) as file, suppress(OSError):
                while file.write(bytes(size)) == size:
                    pass
        if leave:
            size = self._ballast.stat().st_size
            with self._ballast.open("r+b") as file:
                file.truncate(max(0, size - leave))

    def free(self) -> None:
        self._ballast.unlink()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    folder = tmp_path / "disk"
    folder.mkdir()
    try:
        mount = ["mount", "-t", "tmpfs", "-o", "size=16m,mode=700", "tmpfs", str(folder)]
        done = subprocess.run(mount, capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command to make a small disk with")
    if done.returncode:
        pytest.skip(f"a small disk needs the right to mount: {done.stderr.decode().strip()}")
    try:
        yield Disk(folder)
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def heavy() -> Model:
    values = np.linspace(-1, 1, 100_000, dtype=np.float32)
    return Model.from_tensors({"weight": values})


def is_ready(http: Server) -> int:
    http.app.services.readiness.fresh_until = 0.0
    return http.get("/readyz").status_code


def test_a_full_disk_is_said_and_heals_by_itself(
    disk: Disk, start: Start, clock: Clock, heavy: Model
) -> None:
    """For bodies: 507 and a time to come back; nothing half-written is left, and nothing lost."""
    data_dir = disk.folder / "data"
    with start(data_dir=data_dir) as http:
        operator = Operator(http)
        operator.begin(heavy, rounds=1, cohort={"size": 2, "minimum": 2})
        devices = [Device(http, clock) for _ in range(2)]
        for device in devices:
            device.enrol(operator.token())
        given = [device.assignment("digits") for device in devices]
        bodies = [
            device.body_for(each, ones(heavy, 1.0 + number))
            for number, (device, each) in enumerate(zip(devices, given, strict=True))
        ]
        devices[0].upload(given[0].assignment, bodies[0])
        disk.fill(leave=200_000)
        answer = devices[1].put(given[1].assignment, bodies[1])
        assert answer.status_code == 507
        assert int(answer.headers["retry-after"]) > 0
        assert answer.json()["type"].endswith("storage-full")
        assert not list(data_dir.rglob("*.tmp"))
        assert devices[1].receipt(given[1].assignment) is None
        disk.fill()
        assert is_ready(http) == 503
        disk.free()
        assert is_ready(http) == 200
        assert devices[1].put(given[1].assignment, bodies[1]).status_code == 201
        told = devices[1].check_in("digits", given[1].assignment, wait=30)
        assert told is not None
        assert told.task.state == "finished"
        after = devices[0].model(told.task.model).parameters
        np.testing.assert_allclose(after - heavy.parameters, 1.5, atol=1e-5)


def test_a_round_that_cannot_be_written_down_is_aggregated_once_there_is_room(
    disk: Disk, start: Start, clock: Clock, heavy: Model
) -> None:
    with start(data_dir=disk.folder / "data") as http:
        operator = Operator(http)
        operator.begin(heavy, rounds=1, cohort={"size": 1, "minimum": 1})
        device = Device(http, clock)
        device.enrol(operator.token())
        given = device.assignment("digits")
        body = device.body_for(given, ones(heavy))
        disk.fill(leave=len(body) + 100_000)
        assert device.put(given.assignment, body).status_code == 201
        http.call(anyio.sleep, 0.5)
        assert {each.state for each in history(operator)} <= {"folding", "abandoned", "collecting"}
        disk.free()
        for _ in range(50):
            clock.advance(61)
            http.tick()
            told = device.check_in("digits", given.assignment, wait=1)
            if told is not None and told.receipts:
                break
        assert told is not None
        [signed] = told.receipts
        if signed.receipt.outcome == "not-included":  # the attempt was given up, the task goes on
            again = device.assignment("digits")
            device.upload(again.assignment, device.body_for(again, ones(heavy)))
            told = device.check_in("digits", again.assignment, wait=30)
        assert told is not None
        assert told.task.state == "finished"
        after = device.model(told.task.model).parameters
        np.testing.assert_allclose(after - heavy.parameters, 1.0, atol=1e-5)


def test_a_full_disk_is_two_lines_of_the_log(
    disk: Disk,
    start: Start,
    clock: Clock,
    heavy: Model,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of each of its doors, and no traceback, whatever is tried again meanwhile."""
    caplog.set_level(logging.WARNING, logger="fedpress_server")  # whatever ran before this
    with start(data_dir=disk.folder / "data", follow_seconds=0.05, tick_seconds=0.05) as http:
        operator = Operator(http)
        operator.begin(heavy, rounds=1, cohort={"size": 1, "minimum": 1})
        device = Device(http, clock)
        device.enrol(operator.token())
        given = device.assignment("digits")
        body = device.body_for(given, ones(heavy))
        doors: tuple[Any, ...] = (http.app.services.database, http.app.services.payloads)
        for door in doors:
            monkeypatch.setattr(door._full, "_quiet", 3600.0)
        disk.fill(leave=len(body) + 100_000)
        assert device.put(given.assignment, body).status_code == 201
        disk.fill()
        for _ in range(20):  # deadlines that cannot pass, jobs that cannot be done
            clock.advance(600)
            http.call(anyio.sleep, 0.1)
        meanwhile = [each for each in caplog.messages if "free some space" not in each]
        for _ in range(100):  # a try that failed in the meantime has given its room back
            disk.fill()
            if is_ready(http) == 503:
                break
        assert is_ready(http) == 503
        disk.free()
        for door in doors:
            monkeypatch.setattr(door._full, "_quiet", 2.0)
        for _ in range(300):  # a try that began before there was room may still fail
            http.call(anyio.sleep, 0.2)
            ready = is_ready(http)
            operator.token()
            if sum("has disk space again" in line for line in caplog.messages) == 2:
                break
        assert ready == 200
    assert not [each for each in caplog.records if each.exc_info]
    full = [
        line
        for line in caplog.messages
        if "free some space, and the server resumes by itself" in line
    ]
    over = [line for line in caplog.messages if line.endswith("has disk space again")]
    assert len(full) == len(over) == 2
    assert meanwhile == []


def test_a_full_disk_of_the_database_is_said_and_heals_by_itself(disk: Disk) -> None:
    """A transaction that does not fit is undone as a whole."""
    database = Database(f"sqlite:///{disk.folder / 'test.db'}")

    def row(number: int) -> dict[str, Any]:
        digest = f"{number:064d}"
        return {"digest": digest, "spec": digest, "num_bytes": 1, "created_at": 0.0}

    def count(connection: sa.Connection) -> int:
        return connection.execute(sa.select(sa.func.count()).select_from(models)).scalar_one()

    def many(connection: sa.Connection) -> None:
        connection.execute(sa.insert(models), [row(number) for number in range(1, 40_000)])

    try:
        anyio.run(database.write, lambda c: c.execute(sa.insert(models), [row(0)]))
        disk.fill(leave=MIB)
        with pytest.raises((StorageFull, ServerError)) as caught:
            anyio.run(database.write, many)
        assert isinstance(caught.value, StorageFull)
        assert caught.value.members["retry_after"] > 0
        assert anyio.run(database.read, count) == 1

        async def together() -> list[BaseException | None]:
            """One that fits and the one that does not, in one commit."""
            held, queued = asyncio.Event(), threading.Event()

            async def outcome(work: Any) -> BaseException | None:
                try:
                    await database.write(work)
                except Exception as exc:
                    return exc
                return None

            def waits(connection: sa.Connection) -> None:
                loop.call_soon_threadsafe(held.set)
                assert queued.wait(60)

            loop = asyncio.get_running_loop()
            first = asyncio.create_task(outcome(waits))
            await held.wait()
            works = (
                lambda c: c.execute(sa.insert(models), [row(50_000)]),
                many,
                lambda c: c.execute(sa.insert(models), [row(50_001)]),
            )
            others = [asyncio.create_task(outcome(work)) for work in works]
            await asyncio.sleep(0)  # each has begun, and is in the queue
            queued.set()
            return [await first, *await asyncio.gather(*others)]

        found = asyncio.run(together())
        assert [type(each) for each in found] == [type(None), *3 * [StorageFull]]
        assert anyio.run(database.read, count) == 1
        disk.free()
        anyio.run(database.write, lambda c: c.execute(sa.insert(models), [row(1)]))
        assert anyio.run(database.read, count) == 2
    finally:
        database.close()


def test_a_file_that_does_not_fit_leaves_nothing(disk: Disk) -> None:
    payloads = LocalPayloads(disk.folder / "store")
    disk.fill(leave=100_000)
    with pytest.raises(StorageFull):
        payloads.put("uploads/digits/1-1/body", bytes(MIB))
    assert not [path for path in payloads.root.rglob("*") if path.is_file()]
    disk.free()
    payloads.put("uploads/digits/1-1/body", bytes(MIB))
    assert payloads.size("uploads/digits/1-1/body") == MIB


def test_a_log_is_bounded_by_checkpoints(tmp_path: Path) -> None:
    """Also once a long reader, which no checkpoint can pass, has gone."""
    file = tmp_path / "test.db"
    database = Database(f"sqlite:///{file}")
    log = tmp_path / "test.db-wal"

    def written(start: int, more: int = 300) -> None:
        for number in range(start, start + more):
            digest = f"{number:064d}"
            row = {"digest": digest, "spec": digest, "num_bytes": 1, "created_at": 0.0}
            anyio.run(database.write, lambda c, row=row: c.execute(sa.insert(models), row))

    reader = sa.create_engine(f"sqlite:///{file}")
    try:
        written(0)
        quiet = log.stat().st_size
        assert quiet <= 1200 * 4128
        with reader.connect() as connection:
            connection.exec_driver_sql("BEGIN")
            before = connection.execute(sa.select(sa.func.count()).select_from(models)).scalar_one()
            with ThreadPoolExecutor(1) as pool:  # writers do not wait for it
                pool.submit(written, 300, 600).result(timeout=120)
            again = connection.execute(sa.select(sa.func.count()).select_from(models)).scalar_one()
            assert before == again == 300
            assert log.stat().st_size > 8 * MIB > quiet
        written(900)
        assert log.stat().st_size <= 8 * MIB
    finally:
        reader.dispose()
        database.close()
    assert not log.exists() or log.stat().st_size == 0


def test_a_database_that_is_busy_is_waited_for_and_then_said_to_be(tmp_path: Path) -> None:
    file = tmp_path / "test.db"
    database = Database(f"sqlite:///{file}")
    row = {"spec": "0" * 64, "num_bytes": 1, "created_at": 0.0}

    def written(number: int) -> None:
        values = row | {"digest": f"{number:064d}"}
        anyio.run(database.write, lambda c: c.execute(sa.insert(models), values))

    other = sqlite3.connect(file, isolation_level=None)
    try:
        with ThreadPoolExecutor(1) as pool:
            other.execute("BEGIN IMMEDIATE")
            waiting = pool.submit(written, 1)
            with pytest.raises(TimeoutError):
                waiting.result(timeout=0.3)
            other.execute("ROLLBACK")
            waiting.result(timeout=60)

        def hurry(connection: sqlite3.Connection, *_: object) -> None:
            connection.execute("PRAGMA busy_timeout = 50")

        sa.event.listen(database._backend.reads, "checkout", hurry)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(Unavailable, match="busy"):
            written(2)
        other.execute("ROLLBACK")
        written(3)
        found = other.execute("SELECT digest FROM models ORDER BY digest").fetchall()
        assert found == [(f"{number:064d}",) for number in (1, 3)]
    finally:
        other.close()
        database.close()
