"""Database backends: connection setup, write locks, and classification of errors.

All code above is the same for both. A writer with the exclusive lock is the only one, in SQLite as
in a PostgreSQL shared by several servers: rows that it has read cannot change before it commits.
Writers that lock every row on which their writes depend may run concurrently in PostgreSQL; in
SQLite every writer is exclusive.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Literal, Protocol

import sqlalchemy as sa
from sqlalchemy.engine import URL, Connection, Engine

from fedpress_protocols.errors import (
    ConfigurationError,
    MissingExtra,
    ServerError,
    StorageFull,
    Unavailable,
)

READERS = 4
"""Reader threads, each with its own connection."""
RESTORE = (
    "stop the server, keep a copy of the file, and restore a backup: docs/operations/restore.md"
)
"""What to do about a damaged SQLite file."""

_LOG_BYTES = 8 * 2**20
_ALTERS = "fedpress_alters"
_WRITES = "fedpress_writes"
_LOOKS = "fedpress_looks"
_TURNS = 0x66656470  # the number of an advisory lock; any will do
_CHANNEL = "fedpress"
_HEARS = 0.5
_AWAY = 5.0
_READ_ONLY = "25006"
_PASSING = {
    "40001",  # serialization failure
    "40P01",  # deadlock
    "55P03",  # lock timeout
    "25P03",  # the transaction was idle, and the database ended it
    "57P01",  # the database is shut down
    "57P02",
    "57P03",  # ... or is starting
    "53300",  # too many connections
}
_AWAY_CLASSES = {"08", "53", "57", "58"}
_DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
_SESSION = {
    "synchronous_commit": "on",
    "statement_timeout": "30s",
    "lock_timeout": "10s",
    "idle_in_transaction_session_timeout": "15s",
}


class Backend(Protocol):
    """A database: engines for consistent reads, for single statements that read, for writes."""

    dialect: Literal["sqlite", "postgresql"]
    reads: Engine
    looks: Engine
    writes: Engine

    def take_turn(self, connection: Connection, *, alone: bool) -> None:
        """Take the write lock; the first statement of a write transaction."""
        ...

    def altering(self) -> Engine:
        """An engine whose transactions may change the schema, one at a time."""
        ...

    def is_passing(self, exc: BaseException) -> bool:
        """Whether the error is transient, so that a retry of the whole transaction may succeed."""
        ...

    def is_undone(self, connection: Connection) -> bool:
        """Whether the database has rolled back the whole transaction."""
        ...

    def translated(self, exc: BaseException) -> BaseException:
        """The error for the caller: Unavailable or StorageFull for failures that an operator can
        fix, ServerError for a damaged file."""
        ...

    def notify(self, connection: Connection, topic: str) -> None:
        """Notify listeners once the transaction commits."""
        ...

    def listen(self, callback: Callable[[str | None], None], is_over: Callable[[], bool]) -> None:
        """Call `callback` with every topic, with None if some may have been missed, until `is_over`
        or the connection is lost."""
        ...

    def log_bytes(self) -> int:
        """Length of the write-ahead log, if it is a file on this machine."""
        ...

    def dispose(self) -> None: ...


def opened(database_url: str) -> Backend:
    """Open the database of an SQLAlchemy URL; no error repeats the URL, which may have a password.

    Raises ConfigurationError, or MissingExtra if the driver is not installed.
    """
    url = _parsed(database_url)
    if url.get_backend_name() == "sqlite":
        return SQLite(url)
    return PostgreSQL(url)


def _parsed(database_url: str) -> URL:
    how = "use sqlite:////folder/file.db or postgresql://user:password@host:5432/name"
    try:
        url = sa.make_url(database_url)
        if not url.port:
            url = url.set(port=None)
    except (sa.exc.ArgumentError, ValueError):
        raise ConfigurationError("database_url is not a database URL", hint=how) from None
    if "@" in (url.host or ""):
        raise ConfigurationError(
            "the user or the password in database_url contains an @", hint="write it as %40"
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
                f"database_url starts with {other[:20]!r}, which is not a supported database",
                hint=how,
            )


class SQLite:
    """A SQLite file of a single server."""

    dialect: Literal["sqlite", "postgresql"] = "sqlite"

    def __init__(self, url: URL) -> None:
        engine = sa.create_engine(url, hide_parameters=True)
        sa.event.listen(engine, "connect", self._prepare)
        sa.event.listen(engine, "begin", self._begin)
        self.reads: Engine = engine
        self.looks: Engine = engine.execution_options(**{_LOOKS: True})
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
            f"journal_size_limit={_LOG_BYTES}",  # shrink the log after a long reader
        ):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    @staticmethod
    def _begin(connection: Connection) -> None:
        options = connection.get_execution_options()
        if options.get(_LOOKS):  # the driver's own mode is autocommit
            return
        if options.get(_ALTERS):  # a recreated table does not exist for a moment
            connection.exec_driver_sql("PRAGMA foreign_keys=OFF")
        connection.exec_driver_sql("BEGIN IMMEDIATE" if options.get(_WRITES) else "BEGIN")

    def take_turn(self, connection: Connection, *, alone: bool) -> None:
        """BEGIN IMMEDIATE has taken the lock."""

    def altering(self) -> Engine:
        return self.writes.execution_options(**{_ALTERS: True})

    def is_passing(self, exc: BaseException) -> bool:
        return False  # busy_timeout has waited already

    def is_undone(self, connection: Connection) -> bool:
        """As on a full disk: savepoints and all earlier writes are rolled back."""
        driver: Any = connection.connection.driver_connection
        return not driver.in_transaction

    def translated(self, exc: BaseException) -> BaseException:
        if found := damage(exc):
            return _caused(ServerError(f"the database is damaged: {found}", hint=RESTORE), exc)
        if not isinstance(exc, sa.exc.OperationalError):
            return exc
        message = str(exc.orig)
        if any("disk is full" in each or "No space left" in each for each in _reasons(exc)):
            return _caused(StorageFull("no space is left on the server", retry_after=60), exc)
        if "database is locked" in message:
            return _caused(Unavailable("the database is busy", retry_after=_AWAY), exc)
        return exc

    def notify(self, connection: Connection, topic: str) -> None:
        """No-op: the only listener is this process."""

    def listen(self, callback: Callable[[str | None], None], is_over: Callable[[], bool]) -> None:
        """No-op: there are no other writers."""

    def log_bytes(self) -> int:
        with suppress(OSError):
            return os.stat(f"{self.reads.url.database}-wal").st_size
        return 0

    def dispose(self) -> None:
        self.reads.dispose()


class PostgreSQL:
    """A PostgreSQL database that other servers may share.

    A commit is durable when it returns, whatever the database's configuration; only `options` in
    the URL could change that. An idle transaction, as of a stopped process, is ended by the
    database after 15 seconds, with its locks.

    Write transactions are READ COMMITTED under an advisory lock, exclusive for those that must be
    alone and shared for those that lock their rows. SERIALIZABLE would fail the same writers
    instead; see docs/design.md.
    """

    dialect: Literal["sqlite", "postgresql"] = "postgresql"

    def __init__(self, url: URL) -> None:
        configured = url.query.get("options", "")
        options = [f"-c {name}={value}" for name, value in _SESSION.items()]
        options.append(configured if isinstance(configured, str) else " ".join(configured))
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
        self.looks: Engine = engine.execution_options(
            isolation_level="AUTOCOMMIT", **{_LOOKS: True}
        )

    @staticmethod
    def _tell_apart(context: sa.engine.ExceptionContext) -> None:
        # A standby after a failover: reconnect to the new primary.
        connection = context.connection
        options = connection.get_execution_options() if connection else {}
        is_reader = options.get("postgresql_readonly") or options.get(_LOOKS)
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

    def listen(self, callback: Callable[[str | None], None], is_over: Callable[[], bool]) -> None:
        # A connection detached from the pool: SQLAlchemy cannot wait for notifications.
        pooled = self.writes.raw_connection()
        driver: Any = pooled.driver_connection
        pooled.detach()
        with driver:
            driver.autocommit = True
            driver.execute(f"LISTEN {_CHANNEL}")
            callback(None)
            while not is_over():
                for notification in driver.notifies(timeout=_HEARS):
                    callback(notification.payload)

    def log_bytes(self) -> int:
        return 0

    def dispose(self) -> None:
        self.writes.dispose()


def damage(exc: BaseException) -> str:
    """What SQLite says of its file if it is damaged or no database; empty for any other error."""
    orig = getattr(exc, "orig", None) or exc
    code = getattr(orig, "sqlite_errorcode", 0) & 0xFF  # without the extended part
    return str(orig) if code in _DAMAGED else ""


def _reasons(exc: BaseException | None) -> Iterator[str]:
    """The error and its causes."""
    while exc is not None:
        yield str(exc)
        exc = exc.__cause__ or exc.__context__


def _state(exc: sa.exc.DBAPIError) -> str | None:
    """The SQLSTATE, if the database returned one."""
    state = getattr(exc.orig, "sqlstate", None)
    return str(state) if state else None


def _caused(error: Exception, cause: BaseException) -> Exception:
    error.__cause__ = cause
    return error
