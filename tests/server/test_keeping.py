"""Bodies kept together: what each comes to, and rows added by one statement."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from fedpress_protocols.errors import FedpressError, InvalidUpdate, StorageFull
from fedpress_server import failpoints
from fedpress_server.intake.body_writer import BodyWriter
from fedpress_server.storage.payloads import LocalPayloads
from fedpress_server.storage.prepared import Prepared, Rows, each_of


@pytest.fixture
def payloads(tmp_path: Path) -> LocalPayloads:
    return LocalPayloads(tmp_path / "store")


@pytest.fixture
def writer(payloads: LocalPayloads) -> Iterator[BodyWriter]:
    made = BodyWriter(payloads, threads=2)
    yield made
    made.stop()


def test_each_body_gets_its_own_outcome(writer: BodyWriter, payloads: LocalPayloads) -> None:
    """Refused, failed or kept, whoever it was kept together with."""

    def check(number: int) -> int | FedpressError:
        if number % 10 == 3:
            return InvalidUpdate(f"number {number}")
        if number % 10 == 7:
            raise ZeroDivisionError(number)
        return number

    async def keep() -> list[object]:
        waiting = [
            writer.write(f"uploads/t/1-1/{n}", b"%d" % n, lambda n=n: check(n))  # type: ignore[misc]
            for n in range(200)
        ]
        return list(await asyncio.gather(*waiting, return_exceptions=True))

    found = asyncio.run(keep())
    for number, each in enumerate(found):
        kept = (payloads.root / f"uploads/t/1-1/{number}").exists()
        assert kept == (number % 10 not in (3, 7))
        if number % 10 == 3:
            assert isinstance(each, InvalidUpdate)
            assert each.detail == f"number {number}"
        elif number % 10 == 7:
            assert isinstance(each, ZeroDivisionError)
        else:
            assert each == number
            assert payloads.get(f"uploads/t/1-1/{number}") == b"%d" % number
    assert not list(payloads.root.rglob("*.tmp"))


def test_bodies_that_wait_share_a_sync_of_their_folder(
    writer: BodyWriter, payloads: LocalPayloads, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, begun, go_on = list[bool](), threading.Semaphore(0), threading.Event()
    fsync = os.fsync

    def counted(descriptor: int) -> None:
        synced.append(os.path.isdir(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def held() -> int:
        begun.release()
        assert go_on.wait(30)
        return 0

    async def keep() -> None:
        first = [asyncio.ensure_future(writer.write(f"a/{n}", b"x", held)) for n in range(2)]
        for _ in first:
            await asyncio.to_thread(begun.acquire)
        rest = [asyncio.ensure_future(writer.write(f"a/{n}", b"x", int)) for n in range(2, 34)]
        await asyncio.sleep(0)
        go_on.set()
        await asyncio.gather(*first, *rest)

    payloads.put("a/there", b"x")
    monkeypatch.setattr(os, "fsync", counted)
    asyncio.run(keep())
    assert synced.count(False) == 34
    assert 4 <= synced.count(True) < 12  # two of the first, and at least two of the rest


def test_a_full_disk_fails_what_it_refuses_alone(
    payloads: LocalPayloads, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, calls = os.write, list[int]()

    def full(descriptor: int, data: bytes) -> int:
        calls.append(len(data))
        if len(data) > 10:
            raise OSError(28, "No space left on device")
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", full)
    found = payloads.put_all([("f/small", b"1"), ("f/large", b"1" * 100), ("g/small", b"2")])
    assert [type(each) for each in found] == [type(None), StorageFull, type(None)]
    assert payloads.get("f/small") == b"1"
    assert payloads.get("g/small") == b"2"
    assert not (payloads.root / "f/large").exists()
    assert not list(payloads.root.rglob("*.tmp"))


def test_a_folder_that_was_dropped_meanwhile_is_made_again(
    payloads: LocalPayloads, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename, dropped = os.rename, list[str]()

    def dropping(source: str, to: str) -> None:
        rename(source, to)
        if not dropped:
            dropped.append(to)
            payloads.drop("f")

    monkeypatch.setattr(os, "rename", dropping)
    assert payloads.put_all([("f/1", b"1"), ("f/2", b"2")]) == [None, None]
    assert payloads.get("f/2") == b"2"


def test_a_folder_that_somebody_else_made_is_named_before_a_file_in_it_counts(
    payloads: LocalPayloads, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = list[str]()
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        if len(synced) == 1:  # the parent's, of whoever makes the folder
            raise OSError(errno.EIO, "the disk")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    with pytest.raises(OSError, match="the disk"):
        payloads.put("f/1", b"1")
    assert (payloads.root / "f").is_dir()
    payloads.put("f/2", b"2")
    assert synced[1] == str(payloads.root)
    again = len(synced)
    payloads.put("f/3", b"3")
    assert str(payloads.root) not in synced[again:]


def test_a_failpoint_in_a_group_strikes_one(payloads: LocalPayloads) -> None:
    with failpoints.armed("file-written:raise:2"):
        found = payloads.put_all([(f"f/{n}", b"1") for n in range(3)])
    assert [type(each) for each in found] == [type(None), failpoints.FailpointReached, type(None)]
    assert not (payloads.root / "f/1").exists()


@pytest.mark.both_databases(short=True)
def test_rows_and_statements_mean_what_sqlalchemy_s_do(
    database_url: Callable[[Path], str], tmp_path: Path
) -> None:
    """Texts with quotes and letters of all kinds, numbers to the last bit, None and JSON."""
    table = sa.Table(
        "of_the_test",
        sa.MetaData(),
        sa.Column("name", sa.String(64), primary_key=True),
        sa.Column("number", sa.BigInteger, nullable=False),
        sa.Column("at", sa.Double),
        sa.Column("told", sa.JSON, nullable=False),
    )
    rows = [
        ("a'b\"c\\d%s", 2**62 + 1, 0.1 + 0.2, {"a": [1, None, "ü"]}),
        ("日本", -1, None, {"b": "%s ? :x"}),
    ]
    url = database_url(tmp_path)
    where = sa.make_url(url).set(drivername="postgresql+psycopg") if url else "sqlite:///"
    engine = sa.create_engine(where, poolclass=None if url else sa.StaticPool)
    chosen = Prepared(
        lambda dialect: (
            sa.select(table.c.name)
            .where(
                table.c.name.in_(each_of(dialect, "names")), table.c.number > sa.bindparam("least")
            )
            .order_by(table.c.number)
        )
    )
    raised = Prepared(
        sa.update(table)
        .where(table.c.name == sa.bindparam("of_name"))
        .values(number=table.c.number + 1)
    )
    try:
        with engine.begin() as connection:
            table.create(connection)
            Rows(table).add(connection, rows)
            assert connection.execute(sa.select(table)).all() == rows
            names = '["日本", "a\'b\\"c\\\\d%s", "nobody"]'
            found = chosen.run(connection, names=names, least=-2).scalars().all()
            assert found == ["日本", "a'b\"c\\d%s"]
            assert raised.run(connection, of_name="日本").rowcount == 1
            assert raised.run(connection, of_name="nobody").rowcount == 0
            assert chosen.run(connection, names='["日本"]', least=-1).scalars().all() == ["日本"]
        with pytest.raises(sa.exc.IntegrityError), engine.begin() as connection:
            Rows(table).add(connection, [("new", 1, None, {}), rows[0]])
        with engine.connect() as connection:
            assert connection.scalar(sa.select(sa.func.count()).select_from(table)) == 2
    finally:
        table.drop(engine, checkfirst=True)
        engine.dispose()
