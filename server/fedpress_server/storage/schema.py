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
from fedpress_server.storage.engines import Backend
from fedpress_server.storage.tables import schema_releases


def migrate(backend: Backend) -> tuple[str | None, str]:
    """Migrate the schema atomically; returns the versions before and after.

    Concurrent migrations wait. Raises ConfigurationError for a database of a newer release.
    """
    head = _head()
    with backend.altering().connect() as connection, connection.begin():
        found = _found(connection)
        if found == head:
            return found, head
        config = _config()
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
        connection.execute(sa.insert(schema_releases), {"revision": head, "release": __version__})
    backend.dispose()  # SQLite: no other connection may start with foreign keys off
    return found, head


def check(backend: Backend) -> None:
    """Raise ConfigurationError unless the database has this release's schema."""
    head = _head()
    with backend.reads.connect() as connection:
        found = _found(connection)
    if found != head:
        what = "has no tables yet" if found is None else f"has schema {found}"
        raise ConfigurationError(
            f"the database {what}, and this release of fedpress, {__version__}, needs {head}",
            hint="run `fedpress server migrate` with the same settings first",
        )


def revision(connection: Connection) -> str:
    """The schema version; raises ConfigurationError if there is none."""
    found = MigrationContext.configure(connection).get_current_revision()
    if found is None:
        raise ConfigurationError("the database has no tables")
    return found


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
    found = MigrationContext.configure(connection).get_current_revision()
    known = {each.revision for each in _scripts().walk_revisions()}
    if found is None or found in known:
        return found
    made_by = None
    if sa.inspect(connection).has_table(schema_releases.name):
        query = sa.select(schema_releases.c.release).where(schema_releases.c.revision == found)
        made_by = connection.execute(query).scalar_one_or_none()
    newer = f"fedpress {made_by}" if made_by else "a newer release"
    raise ConfigurationError(
        f"the database has schema {found}, which {newer} made; this one, {__version__}, knows no "
        f"schema after {max(known)}",
        hint=f"run {made_by or 'a newer release'} or a later one" if made_by else "run that one",
    )
