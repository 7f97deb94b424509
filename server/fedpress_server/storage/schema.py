"""Schema versions: migration of a database, and the check of its version."""

from __future__ import annotations

from functools import cache

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy.engine import Connection

from fedpress_protocols import __version__
from fedpress_protocols.errors import ConfigurationError
from fedpress_server.storage import leases
from fedpress_server.storage.engines import Backend
from fedpress_server.storage.servers import GONE_SECONDS
from fedpress_server.storage.tables import schema_releases, servers


def migrate(backend: Backend, *, while_running: bool = True) -> tuple[str | None, str]:
    """Migrate the schema atomically; returns the versions before and after.

    Concurrent migrations wait. Raises ConfigurationError for a database of a newer release, and,
    without `while_running`, if servers of the old schema run on it.
    """
    head = _head()
    with backend.altering().connect() as connection, connection.begin():
        current = _found(connection)
        if current == head:
            return current, head
        if not while_running:
            _check_nobody_runs(connection, current, head)
        config = _config()
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
        connection.execute(sa.insert(schema_releases), {"revision": head, "release": __version__})
    backend.dispose()  # SQLite: no other connection may start with foreign keys off
    return current, head


def _check_nobody_runs(connection: Connection, current: str | None, head: str) -> None:
    """Raise ConfigurationError if a server has given a sign of itself just now; one on SQLite gives
    too few."""
    if connection.dialect.name == "sqlite" or not sa.inspect(connection).has_table(servers.name):
        return
    since = leases.now_of(connection) - GONE_SECONDS
    query = sa.select(servers.c.name).where(servers.c.seen_at >= since).order_by(servers.c.name)
    if names := list(connection.execute(query).scalars()):
        raise ConfigurationError(
            f"the schema has to change from {current} to {head}, and servers of another release "
            f"run on this database: {', '.join(names)}",
            hint=f"stop them first; one that was killed is forgotten after {GONE_SECONDS:.0f} s",
        )


def check(backend: Backend) -> None:
    """Raise ConfigurationError unless the database has this release's schema."""
    head = _head()
    with backend.reads.connect() as connection:
        current = _found(connection)
    if current != head:
        state = "has no tables yet" if current is None else f"has schema {current}"
        raise ConfigurationError(
            f"the database {state}, and this release of fedpress, {__version__}, needs {head}",
            hint="run `fedpress server migrate` with the same settings first",
        )


def revision(connection: Connection) -> str:
    """The schema version; raises ConfigurationError if there is none."""
    current = MigrationContext.configure(connection).get_current_revision()
    if current is None:
        raise ConfigurationError("the database has no tables")
    return current


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", "fedpress_server:migrations")
    return config


@cache
def _scripts() -> ScriptDirectory:
    """This release's migrations, each of which is a module that is executed to be known."""
    return ScriptDirectory.from_config(_config())


def _head() -> str:
    head = _scripts().get_current_head()
    if head is None:
        raise AssertionError("there are no migrations")
    return head


def _found(connection: Connection) -> str | None:
    """The schema version, if this release knows it; None without a schema."""
    current = MigrationContext.configure(connection).get_current_revision()
    revisions = {each.revision for each in _scripts().walk_revisions()}
    if current is None or current in revisions:
        return current
    made_by = None
    if sa.inspect(connection).has_table(schema_releases.name):
        query = sa.select(schema_releases.c.release).where(schema_releases.c.revision == current)
        made_by = connection.execute(query).scalar_one_or_none()
    newer = f"fedpress {made_by}" if made_by else "a newer release"
    raise ConfigurationError(
        f"the database has schema {current}, which {newer} made; this one, {__version__}, knows no "
        f"schema after {max(revisions)}",
        hint=f"run {made_by or 'a newer release'} or a later one" if made_by else "run that one",
    )
