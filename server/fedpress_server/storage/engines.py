"""The two databases: how their connections are made ready, who may write when, what errors mean.

What is written on top of this is the same for both. A writer that has taken its turn alone is the
only one, in SQLite's file as in a PostgreSQL that several servers share: what it has read cannot
change before it commits. Writers that lock every row which their writing depends on may work
beside each other in PostgreSQL; in SQLite a turn is always alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Literal, Protocol

import sqlalchemy as sa
from sqlalchemy.engine import URL, Connection, Engine

from fedpress_protocols.errors import (
    ConfigurationError,
    MissingExtra,
    StorageFull,
    Unavailable,
)

READERS = 4
"""Threads that read, each with a connection of its own."""

_LOG_BYTES = 8 * 2**20
_ALTERS = "fedpress_alters"
_WRITES = "fedpress_writes"
_TURNS = 0x66656470  # the number of an advisory lock; any will do
_CHANNEL = "fedpress"
_HEARS = 0.5
_AWAY = 5.0
_READ_ONLY = "25006"
_PASSING = {
    "40001",  # serialization failure
    "40P01",  # deadlock
    "55P03",  # a lock was not to be had in time
    "25P03",  # the transaction stalled, and the database ended it
    "57P01",  # the database is shut down
    "57P02",
    "57P03",  # ... or is not up yet
    "53300",  # too many connections
}
_AWAY_CLASSES = {"08", "53", "57", "58"}
_SESSION = {
    "synchronous_commit": "on",
    "statement_timeout": "30s",
    "lock_timeout": "10s",
    "idle_in_transaction_session_timeout": "15s",
}


class Backend(Protocol):
    """One database, by its engine for consistent reads and that for writes."""

    dialect: Literal["sqlite", "postgresql"]
    reads: Engine
    writes: Engine

    def take_turn(self, connection: Connection, *, alone: bool) -> None:
        """Wait until this transaction may write; the first thing that it does."""
        ...

    def altering(self) -> Engine:
        """An engine whose transactions may change the schema, one at a time."""
        ...

    def is_passing(self, exc: BaseException) -> bool:
        """Whether the same transaction may succeed if it is run again from its beginning."""
        ...

    def is_undone(self, connection: Connection) -> bool:
        """Whether the database itself has undone the transaction, and not a part of it alone."""
        ...

    def translated(self, exc: BaseException) -> BaseException:
        """What a caller is told: Unavailable or StorageFull for what an operator can mend."""
        ...

    def notify(self, connection: Connection, topic: str) -> None:
        """Wake who listens, once the transaction commits."""
        ...

    def listen(self, heard: Callable[[str | None], None], is_over: Callable[[], bool]) -> None:
        """Tell `heard` every topic, None where some may have been missed, until `is_over` or the
        connection is lost."""
        ...

    def log_bytes(self) -> int:
        """Length of the write-ahead log, where it is a file of this machine."""
        ...

    def dispose(self) -> None: ...


def opened(database_url: str) -> Backend:
    """The database behind an SQLAlchemy URL, which no error here repeats: it may hold a password.

    Raises ConfigurationError, or MissingExtra where the driver is not installed.
    """
    url = _parsed(database_url)
    if url.get_backend_name() == "sqlite":
        return SQLite(url)
    return PostgreSQL(url)


def _parsed(database_url: str) -> URL:
    how = "give sqlite:////folder/file.db or postgresql://user:password@host:5432/name"
    try:
        url = sa.make_url(database_url)
        if not url.port:
            url = url.set(port=None)
    except (sa.exc.ArgumentError, ValueError):
        raise ConfigurationError("database_url is no database's URL", hint=how) from None
    if "@" in (url.host or ""):
        raise ConfigurationError(
            "the user or the password in database_url holds an @", hint="write it as %40"
        )
    match url.get_backend_name():
        case "sqlite":
            if not url.database or url.database == ":memory:":
                raise ConfigurationError("database_url names no file", hint=how)
            return url.set(drivername="sqlite")
        case "postgresql" | "postgres":
            if not url.database:
                raise ConfigurationError("database_url names no database", hint=how)
            return url.set(drivername="postgresql+psycopg")
        case other:
            raise ConfigurationError(
                f"database_url begins with {other[:20]!r}, a database that is not spoken here",
                hint=how,
            )


class SQLite:
    """A file, which one server holds."""

    dialect: Literal["sqlite", "postgresql"] = "sqlite"

    def __init__(self, url: URL) -> None:
        engine = sa.create_engine(url, hide_parameters=True)
        sa.event.listen(engine, "connect", self._prepare)
        sa.event.listen(engine, "begin", self._begin)
        self.reads: Engine = engine
        self.writes: Engine = engine.execution_options(**{_WRITES: True})

    @staticmethod
    def _prepare(connection: Any, record: Any) -> None:
        # The driver's own idea of when a transaction begins breaks savepoints; see _begin.
        connection.isolation_level = None
        cursor = connection.cursor()
        for pragma in (
            "journal_mode=WAL",
            "synchronous=FULL",
            "foreign_keys=ON",
            "secure_delete=ON",  # shares of masks are not left to be found in free pages
            "busy_timeout=10000",
            f"journal_size_limit={_LOG_BYTES}",  # what a long reader let grow is cut back
        ):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    @staticmethod
    def _begin(connection: Connection) -> None:
        options = connection.get_execution_options()
        if options.get(_ALTERS):  # a table that is made anew is gone for a moment
            connection.exec_driver_sql("PRAGMA foreign_keys=OFF")
        connection.exec_driver_sql("BEGIN IMMEDIATE" if options.get(_WRITES) else "BEGIN")

    def take_turn(self, connection: Connection, *, alone: bool) -> None:
        """BEGIN IMMEDIATE has."""

    def altering(self) -> Engine:
        return self.writes.execution_options(**{_ALTERS: True})

    def is_passing(self, exc: BaseException) -> bool:
        return False  # busy_timeout has waited already

    def is_undone(self, connection: Connection) -> bool:
        """As on a full disk: savepoints and all that was written before are gone with it."""
        driver: Any = connection.connection.driver_connection
        return not driver.in_transaction

    def translated(self, exc: BaseException) -> BaseException:
        if not isinstance(exc, sa.exc.OperationalError):
            return exc
        said = str(exc.orig)
        if any("disk is full" in each or "No space left" in each for each in _reasons(exc)):
            return _caused(StorageFull("no space is left on the server", retry_after=60), exc)
        if "database is locked" in said:
            return _caused(Unavailable("the database is busy", retry_after=_AWAY), exc)
        return exc

    def notify(self, connection: Connection, topic: str) -> None:
        """Who would listen is this process."""

    def listen(self, heard: Callable[[str | None], None], is_over: Callable[[], bool]) -> None:
        """Nobody else writes."""

    def log_bytes(self) -> int:
        with suppress(OSError):
            return os.stat(f"{self.reads.url.database}-wal").st_size
        return 0

    def dispose(self) -> None:
        self.reads.dispose()


class PostgreSQL:
    """A server that others may share.

    A commit is on its disk when it returns, whatever the server is set to; only `options` in the
    URL could say otherwise. A transaction that stalls, as in a stopped process, is ended by the
    server after a quarter of a minute, and its locks with it.

    Transactions that write are READ COMMITTED under an advisory lock, which those that must be
    alone take exclusively and those that lock their rows share. SERIALIZABLE would tell the same
    writers apart by failing them; see docs/design.md.
    """

    dialect: Literal["sqlite", "postgresql"] = "postgresql"

    def __init__(self, url: URL) -> None:
        given = url.query.get("options", "")
        options = [f"-c {name}={value}" for name, value in _SESSION.items()]
        options.append(given if isinstance(given, str) else " ".join(given))
        try:
            engine = sa.create_engine(
                url.difference_update_query(["options"]),
                isolation_level="READ COMMITTED",
                hide_parameters=True,
                pool_size=READERS + 1,
                max_overflow=0,
                pool_timeout=10,
                connect_args={
                    "options": " ".join(options).strip(),
                    "application_name": "fedpress",
                    "client_encoding": "utf8",
                    "connect_timeout": 5,
                    "keepalives_idle": 10,
                    "keepalives_interval": 5,
                    "keepalives_count": 3,
                    "tcp_user_timeout": 15_000,
                },
            )
        except ModuleNotFoundError as exc:
            raise MissingExtra(
                "a PostgreSQL database needs psycopg", hint="pip install fedpress[postgres]"
            ) from exc
        sa.event.listen(engine, "handle_error", self._tell_apart)
        self.writes: Engine = engine
        self.reads: Engine = engine.execution_options(
            isolation_level="REPEATABLE READ", postgresql_readonly=True
        )

    @staticmethod
    def _tell_apart(context: sa.engine.ExceptionContext) -> None:
        # A standby, after another has taken over: to be made again, with whoever takes writes now.
        connection = context.connection
        is_reader = connection and connection.get_execution_options().get("postgresql_readonly")
        state = getattr(context.original_exception, "sqlstate", None)
        if state == _READ_ONLY and not is_reader:
            context.is_disconnect = True

    def take_turn(self, connection: Connection, *, alone: bool) -> None:
        shared = "" if alone else "_shared"
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock{shared}({_TURNS})")

    def altering(self) -> Engine:
        engine = self.writes.execution_options()

        @sa.event.listens_for(engine, "begin")
        def _begin(connection: Connection) -> None:
            connection.exec_driver_sql("SET LOCAL statement_timeout = 0")
            connection.exec_driver_sql("SET LOCAL lock_timeout = '60s'")
            self.take_turn(connection, alone=True)

        return engine

    def is_passing(self, exc: BaseException) -> bool:
        if not isinstance(exc, sa.exc.DBAPIError):
            return False
        return exc.connection_invalidated or _state(exc) in _PASSING

    def is_undone(self, connection: Connection) -> bool:
        return False

    def translated(self, exc: BaseException) -> BaseException:
        if isinstance(exc, sa.exc.TimeoutError):
            return _caused(
                Unavailable("the database's connections are all in use", retry_after=_AWAY), exc
            )
        if not isinstance(exc, sa.exc.DBAPIError):
            return exc
        state = _state(exc)
        if state == "53100":
            return _caused(StorageFull("the database's disk is full", retry_after=60), exc)
        is_away = state is None and isinstance(exc, sa.exc.OperationalError)
        if is_away or self.is_passing(exc) or (state or "")[:2] in _AWAY_CLASSES:
            return _caused(Unavailable("the database does not answer", retry_after=_AWAY), exc)
        return exc

    def notify(self, connection: Connection, topic: str) -> None:
        connection.execute(sa.select(sa.func.pg_notify(_CHANNEL, topic)))

    def listen(self, heard: Callable[[str | None], None], is_over: Callable[[], bool]) -> None:
        # A connection taken out of the pool, and in the driver's hands: SQLAlchemy cannot wait.
        pooled = self.writes.raw_connection()
        driver: Any = pooled.driver_connection
        pooled.detach()
        with driver:
            driver.autocommit = True
            driver.execute(f"LISTEN {_CHANNEL}")
            heard(None)
            while not is_over():
                for said in driver.notifies(timeout=_HEARS):
                    heard(said.payload)

    def log_bytes(self) -> int:
        return 0

    def dispose(self) -> None:
        self.writes.dispose()


def _reasons(exc: BaseException | None) -> Iterator[str]:
    """What was said last, and what came before it."""
    while exc is not None:
        yield str(exc)
        exc = exc.__cause__ or exc.__context__


def _state(exc: sa.exc.DBAPIError) -> str | None:
    """The SQLSTATE, if the database got as far as to give one."""
    state = getattr(exc.orig, "sqlstate", None)
    return str(state) if state else None


def _caused(error: Exception, cause: BaseException) -> Exception:
    error.__cause__ = cause
    return error
