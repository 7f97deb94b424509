"""Consistent snapshots of the records as a SQLite file, from and to either database.

SQLite's own backup copies all pages in one step under a read transaction, while the server
continues to write. From PostgreSQL rows are read in one REPEATABLE READ transaction, and restored
in one transaction: no PostgreSQL tools are needed, the format does not depend on the source, and a
backup can be restored to the other database.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from fedpress_protocols.errors import ConfigurationError
from fedpress_server.storage import database as door
from fedpress_server.storage import engines
from fedpress_server.storage.database import Database
from fedpress_server.storage.tables import metadata

_ROWS = 500


async def take(database: Database, database_url: str, file: Path) -> None:
    """Copy everything committed to a new SQLite file."""
    if database.dialect == "sqlite":
        source = sa.make_url(database_url).database or ""
        await database.read(lambda connection: _copy_file(Path(source), file))
    else:
        door.migrate(_url(file))
        await database.read(lambda connection: _copy_out(connection, file))
    settle(file)


def settle(file: Path) -> None:
    """Switch the file to a journal mode without a log file beside it."""
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("PRAGMA journal_mode=DELETE")


def faults(file: Path) -> list[str]:
    """The integrity errors that SQLite reports for a file without writers."""
    try:
        with closing(sqlite3.connect(f"file:{file}?immutable=1", uri=True)) as connection:
            lines = [str(row[0]) for row in connection.execute("PRAGMA integrity_check(5)")]
            violations = connection.execute("PRAGMA foreign_key_check").fetchmany(5)
    except sqlite3.DatabaseError as exc:
        return [str(exc)]
    errors = [line for line in lines if line != "ok"]
    return errors + [
        f"a row of {table} refers to a missing row of {other}" for table, _, other, _ in violations
    ]


def put_into(file: Path, database_url: str) -> None:
    """Copy all rows of the SQLite file, which has the newest schema, into an empty database.

    Raises ConfigurationError if it is not empty, or cannot be used.
    """
    door.migrate(database_url)
    source, target = engines.opened(_url(file)), engines.opened(database_url)
    try:
        with source.reads.connect() as read, target.writes.connect() as written, written.begin():
            target.take_turn(written, alone=True)
            for table in metadata.sorted_tables:
                if (
                    table.name != "schema_releases"
                    and written.execute(
                        sa.select(sa.literal(1)).select_from(table).limit(1)
                    ).first()
                ):
                    raise ConfigurationError(
                        f"the database already has rows in {table.name}",
                        hint="create a new database and name that one",
                    )
            _copy_rows(read, written)
    finally:
        source.dispose()
        target.dispose()


def _copy_file(source: Path, target: Path) -> None:
    with closing(sqlite3.connect(source)) as read, closing(sqlite3.connect(target)) as written:
        read.backup(written)


def _copy_out(read: Connection, file: Path) -> None:
    backend = engines.opened(_url(file))
    try:
        with backend.writes.connect() as written, written.begin():
            _copy_rows(read, written)
    finally:
        backend.dispose()


def _copy_rows(read: Connection, written: Connection) -> None:
    for table in reversed(metadata.sorted_tables):
        written.execute(sa.delete(table))
    for table in metadata.sorted_tables:
        rows = read.execution_options(yield_per=_ROWS).execute(sa.select(table))
        for some in rows.mappings().partitions(_ROWS):
            written.execute(sa.insert(table), [dict(row) for row in some])


def _url(file: Path) -> str:
    return f"sqlite:///{file.absolute()}"
