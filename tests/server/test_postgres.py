"""PostgreSQL under several servers: one write at a time, connections lost, hints, wrong URLs."""

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import anyio
import numpy as np
import pytest
import sqlalchemy as sa

from fedpress_protocols.errors import ConfigurationError, MissingExtra, Unavailable
from fedpress_protocols.model import Model
from fedpress_server.storage import records
from fedpress_server.storage.database import Database, migrate
from fedpress_server.storage.engines import opened
from fedpress_server.storage.records import EnrolmentToken, ModelRecord
from fedpress_server.storage.tables import enrolment_tokens, models
from tests.devices import Operator
from tests.postgres import Cluster
from tests.server.in_process import Enrolled, Server, ones

TOKEN = EnrolmentToken(
    "one", "0" * 64, uses=10_000, used=0, created_at=0.0, expires_at=1.0, note=""
)


@contextmanager
def doors(url: str, number: int) -> Iterator[list[Database]]:
    """As many servers' doors to one database."""
    made = [Database(url, migrates=False) for _ in range(number)]
    try:
        yield made
    finally:
        for door in made:
            door.close()


def write(door: Database, work: Callable[[sa.Connection], Any], **how: bool) -> Any:
    return anyio.run(lambda: door.write(work, **how))


def used(connection: sa.Connection) -> int:
    return int(connection.execute(sa.select(enrolment_tokens.c.used)).scalar_one())


def set_used(connection: sa.Connection, number: int) -> None:
    connection.execute(sa.update(enrolment_tokens).values(used=number))


@pytest.fixture
def url(cluster: Cluster) -> str:
    return cluster.new()


def test_what_a_write_has_read_stays_until_it_commits_whoever_else_writes(url: str) -> None:
    with doors(url, 3) as servers, ThreadPoolExecutor(12) as pool:
        write(servers[0], lambda c: records.add_token(c, TOKEN))
        at_once = [
            pool.submit(write, door, lambda c: set_used(c, used(c) + 1)) for door in servers * 40
        ]
        for each in at_once:
            each.result()
        assert anyio.run(servers[0].read, used) == 120


def test_writes_that_lock_their_rows_go_on_beside_each_other(url: str) -> None:
    locked = sa.select(enrolment_tokens.c.used).with_for_update()
    together = threading.Barrier(2, timeout=30)
    with doors(url, 2) as servers, ThreadPoolExecutor(8) as pool:
        write(servers[0], lambda c: records.add_token(c, TOKEN))
        both = [pool.submit(write, door, lambda c: together.wait(), locks=True) for door in servers]
        assert {each.result() for each in both} == {0, 1}

        def count(connection: sa.Connection) -> None:
            set_used(connection, connection.execute(locked).scalar_one() + 1)

        mixed = [pool.submit(write, servers[n % 2], count, locks=n % 3 > 0) for n in range(60)]
        for each in mixed:
            each.result()
        assert anyio.run(servers[0].read, used) == 60


def test_the_same_row_brought_by_several_at_once_is_new_to_one(url: str) -> None:
    record = ModelRecord("0" * 64, "1" * 64, 3, 0.0)
    with doors(url, 4) as servers, ThreadPoolExecutor(16) as pool:
        brought = [
            pool.submit(write, door, lambda c: records.add_model(c, record)) for door in servers * 4
        ]
        assert sorted(each.result() for each in brought) == [False] * 15 + [True]


def test_a_read_ends_with_a_commit(url: str) -> None:
    with doors(url, 1) as (door,):
        ended: list[str] = []
        for how in ("commit", "rollback"):
            sa.event.listen(door._backend.reads, how, lambda c, how=how: ended.append(how))
        for _ in range(3):
            anyio.run(lambda: door.read(used_tokens))
    assert ended == ["commit"] * 3


def used_tokens(connection: sa.Connection) -> int:
    count = sa.select(sa.func.count()).select_from(enrolment_tokens)
    return int(connection.execute(count).scalar_one())


def test_a_reader_sees_one_moment(url: str) -> None:
    with doors(url, 2) as (one, other):
        write(one, lambda c: records.add_token(c, TOKEN))

        def twice(connection: sa.Connection) -> list[int]:
            return [used(connection), write(other, lambda c: set_used(c, 7)) or used(connection)]

        assert anyio.run(one.read, twice) == [0, 0]
        with pytest.raises(sa.exc.InternalError, match="read-only"):
            anyio.run(one.read, lambda c: set_used(c, 8))


def test_a_commit_is_on_the_disk_whatever_the_database_is_set_to(url: str) -> None:
    name = sa.make_url(url).database
    with doors(url, 1) as (door,):
        write(
            door, lambda c: c.exec_driver_sql(f"ALTER DATABASE {name} SET synchronous_commit=off")
        )
    with doors(url, 1) as (door,):
        told = write(door, lambda c: c.exec_driver_sql("SHOW synchronous_commit").scalar())
    assert told == "on"


def test_a_server_that_stalls_in_a_write_holds_the_others_up_for_a_while_only(url: str) -> None:
    begun, others_are_done = threading.Event(), threading.Event()
    impatient = f"{url}&options=-c%20idle_in_transaction_session_timeout%3D200ms"
    with (
        doors(impatient, 1) as (stalled,),
        doors(url, 1) as (other,),
        ThreadPoolExecutor(2) as pool,
    ):
        write(other, lambda c: records.add_token(c, TOKEN))

        def slowly(connection: sa.Connection) -> None:
            number = used(connection)
            begun.set()
            others_are_done.wait(30)
            set_used(connection, number + 1)

        slow = pool.submit(write, stalled, slowly)
        assert begun.wait(30)
        write(other, lambda c: set_used(c, 10))
        others_are_done.set()
        slow.result()
        assert anyio.run(other.read, used) == 11  # what it had read before is not what it wrote


def test_connections_that_are_cut_are_made_again(url: str) -> None:
    cut = (
        "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
        "WHERE datname = current_database() AND pid != pg_backend_pid()"
    )
    with doors(url, 2) as (one, other):
        write(one, lambda c: records.add_token(c, TOKEN))
        for number in range(1, 6):
            assert write(other, lambda c: c.exec_driver_sql(cut).scalar()) >= 1
            write(one, lambda c: set_used(c, used(c) + 1))
            assert anyio.run(one.read, used) == number


@pytest.mark.slow
@pytest.mark.parametrize("dialect", ["postgresql"], indirect=True)
def test_while_the_database_is_away_a_server_says_so_and_then_goes_on(
    cluster: Cluster,
    http: Server,
    enrolled: Enrolled,
    operator: Operator,
    model: Model,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    operator.begin(model, rounds=2, cohort={"size": 1, "minimum": 1})
    device = enrolled()
    assignment = device.assignment("digits")
    body = device.body_for(assignment, ones(model))
    monkeypatch.setattr(http.app.services.database._away, "_quiet", 0.0)
    cluster.stop()
    try:
        answer = device.put(assignment.assignment, body)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
        assert device.http.get("/readyz").status_code == 503
        assert device.http.get("/livez").status_code == 200
    finally:
        cluster.start()
    assert device.put(assignment.assignment, body).status_code in (200, 201)
    news = device.check_in("digits", assignment.assignment, wait=30)
    assert news is not None
    np.testing.assert_allclose(
        device.model(news.task.model).parameters - model.parameters, 1.0, atol=1e-6
    )
    assert device.http.get("/readyz").status_code == 200
    assert not [each for each in caplog.records if each.exc_info]
    begun = [each for each in caplog.messages if each.startswith("the database does not answer")]
    assert len(begun) == caplog.messages.count("the database answers again") == 1
    for _ in range(300):
        if "listening to the database again" in caplog.messages:
            break
        time.sleep(0.1)
    heard = [each for each in caplog.messages if "listening to the database" in each]
    assert [each.partition(" ")[0] for each in heard] == ["interrupted", "listening"]


def test_a_database_that_crashes_keeps_what_was_acknowledged(cluster: Cluster, url: str) -> None:
    with doors(url, 1) as (door,):
        for number in range(30):
            record = ModelRecord(f"{number:064d}", "1" * 64, 3, 0.0)
            write(door, partial(records.add_model, record=record))
        cluster.stop(how=signal.SIGQUIT)
        with pytest.raises(Unavailable) as caught:
            write(door, lambda c: None)
        assert caught.value.members["retry_after"] == 5.0
        with pytest.raises(Unavailable):
            anyio.run(door.read, used)
        cluster.start()
        count = sa.select(sa.func.count()).select_from(models)
        assert anyio.run(door.read, lambda c: c.execute(count).scalar()) == 30


def test_what_is_said_in_a_transaction_is_heard_when_it_commits(cluster: Cluster, url: str) -> None:
    heard: list[str | None] = []

    def until(*topics: str | None) -> None:
        for _ in range(600):
            if heard[-len(topics) :] == list(topics):
                return
            time.sleep(0.05)
        raise AssertionError(heard)

    def fails(connection: sa.Connection) -> None:
        other.notify(connection, "undone")
        raise ValueError("undone")

    with doors(url, 2) as (one, other):
        one.listen(heard.append)
        until(None)
        with pytest.raises(ValueError, match="undone"):
            write(other, fails)
        write(other, lambda c: other.notify(c, "digits"))
        until(None, "digits")
        cluster.stop()
        cluster.start()
        until("digits", None)  # some may have been missed
        write(other, lambda c: other.notify(c, "letters"))
        until("letters")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("foo", "not a database URL"),
        ("postgresql://ada:secret@host:port/name", "not a database URL"),
        ("postgresql://ada:se@secret@host/name", "write it as %40"),
        ("mysql://ada:secret@host/name", "'mysql'"),
        ("postgresql://ada:secret@host", "names no database"),
        ("sqlite://", "names no file"),
        ("postgresql://ada:secret@127.0.0.1:1/name", "cannot be used"),
    ],
)
def test_a_wrong_url_is_told_in_a_sentence_without_its_password(given: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said) as caught:
        Database(given)
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_driver_is_told_by_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(MissingExtra, match=r"fedpress\[postgres\]"):
        opened("postgresql://ada:secret@host/name")


def test_a_database_of_no_encoding_is_as_good_as_one_of_utf8(cluster: Cluster) -> None:
    maintenance = sa.create_engine(
        sa.make_url(cluster.url("postgres")).set(drivername="postgresql+psycopg"),
        isolation_level="AUTOCOMMIT",
        poolclass=sa.NullPool,
        connect_args={"client_encoding": "utf8"},
    )
    with maintenance.connect() as connection:
        connection.exec_driver_sql(
            "CREATE DATABASE no_encoding ENCODING 'SQL_ASCII' LOCALE 'C' TEMPLATE template0"
        )
    url = cluster.url("no_encoding")
    migrate(url)
    with doors(url, 1) as [door]:
        noted = replace(TOKEN, note="Zürich")
        write(door, lambda connection: records.add_token(connection, noted))
        query = sa.select(enrolment_tokens.c.note)
        note = anyio.run(lambda: door.read(lambda c: c.execute(query).scalar_one()))
        assert note == "Zürich"
