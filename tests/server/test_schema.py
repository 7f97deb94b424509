"""The schema: made by migrations alone, never half done, and refused where it does not fit."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import anyio
import pytest
import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

from fedpress_protocols import __version__
from fedpress_protocols.errors import ConfigurationError
from fedpress_server.storage import database, leases
from fedpress_server.storage.database import Database
from fedpress_server.storage.engines import opened
from fedpress_server.storage.tables import metadata, schema_releases
from tests.postgres import Cluster

pytestmark = pytest.mark.both_databases(short=True)

OLDEST = "0007"
"""The schema of the oldest release."""

_DIES = """
import os, signal, sys
import sqlalchemy as sa
from fedpress_server.storage import database

url, at = sys.argv[1:]
count = 0

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def one_more(connection, cursor, statement, *_):
    global count
    count += statement.split()[0].upper() in ("CREATE", "ALTER", "DROP", "INSERT", "UPDATE")
    if str(count) == at:
        die()

sa.event.listen(sa.Engine, "after_cursor_execute", one_more)
if at == "commit":
    sa.event.listen(sa.Engine, "commit", die)
database.migrate(url)
"""


@pytest.fixture
def url(dialect: str, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database without any table."""
    if dialect == "sqlite":
        return f"sqlite:///{tmp_path / 'test.db'}"
    cluster: Cluster = request.getfixturevalue("cluster")
    return cluster.new(is_migrated=False)


def config_for(connection: sa.Connection) -> Config:
    config = Config()
    config.set_main_option("script_location", "fedpress_server:migrations")
    config.attributes["connection"] = connection
    return config


def altered(url: str, change: Callable[[sa.Connection], None]) -> None:
    backend = opened(url)
    with backend.altering().connect() as connection, connection.begin():
        change(connection)
    backend.dispose()


def made(url: str, revision: str) -> None:
    altered(url, lambda c: command.upgrade(config_for(c), revision))


def version_and_tables(url: str) -> tuple[str | None, list[str]]:
    backend = opened(url)
    with backend.reads.connect() as connection:
        version = MigrationContext.configure(connection).get_current_revision()
        found = version, sorted(sa.inspect(connection).get_table_names())
    backend.dispose()
    return found


def head() -> str:
    config = Config()
    config.set_main_option("script_location", "fedpress_server:migrations")
    found = ScriptDirectory.from_config(config).get_current_head()
    assert found is not None
    return found


def test_the_migrations_make_the_tables_of_the_code_and_can_be_undone(url: str) -> None:
    assert database.migrate(url) == (None, head())
    assert database.migrate(url) == (head(), head())

    def undone(connection: sa.Connection) -> None:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
        command.downgrade(config_for(connection), "base")
        assert sa.inspect(connection).get_table_names() == ["alembic_version"]

    altered(url, undone)
    Database(url).close()


def test_servers_that_migrate_at_once_wait_for_each_other(url: str) -> None:
    with ThreadPoolExecutor(3) as pool:
        found = sorted(
            pool.map(database.migrate, [url] * 3), key=lambda versions: versions[0] or ""
        )
    assert found == [(None, head()), (head(), head()), (head(), head())]


@pytest.mark.parametrize(
    "at",
    [
        pytest.param("1", marks=pytest.mark.slow),
        "7",
        pytest.param("commit", marks=pytest.mark.slow),
    ],
)
def test_a_migration_that_is_killed_leaves_the_old_schema(url: str, at: str) -> None:
    made(url, OLDEST)
    before = version_and_tables(url)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", _DIES, url, at], env=environment)
    assert done.returncode == -signal.SIGKILL
    assert version_and_tables(url) == before
    assert database.migrate(url) == (OLDEST, head())


def test_a_server_that_does_not_migrate_refuses_another_schema(url: str) -> None:
    with pytest.raises(ConfigurationError, match=r"no tables yet.*fedpress server migrate"):
        Database(url, migrates=False)
    made(url, OLDEST)
    with pytest.raises(
        ConfigurationError, match=rf"schema {OLDEST}.*{head()}.*fedpress server migrate"
    ):
        Database(url, migrates=False)
    assert version_and_tables(url)[0] == OLDEST
    database.migrate(url)
    Database(url, migrates=False).close()


def test_a_schema_is_not_changed_under_servers_that_run(url: str, dialect: str) -> None:
    before = "0023"
    made(url, before)
    row = {"server_id": "a", "name": "worker host 7", "role": "worker", "log_level": "info"}

    def sign(connection: sa.Connection, ago: float) -> None:
        connection.execute(sa.text("DELETE FROM servers"))
        insert = (
            "INSERT INTO servers (server_id, name, role, log_level, seen_at, fleet) "
            "VALUES (:server_id, :name, :role, :log_level, :seen_at, '{}')"
        )
        seen_at = leases.now_of(connection) - ago
        connection.execute(sa.text(insert), {**row, "seen_at": seen_at})

    altered(url, lambda c: sign(c, ago=1.0))
    if dialect == "postgresql":  # one on SQLite signs at its start alone
        wrong = rf"from {before} to {head()}.*worker host 7.*stop them first"
        with pytest.raises(ConfigurationError, match=wrong):
            database.migrate(url)
        assert version_and_tables(url)[0] == before
        altered(url, lambda c: sign(c, ago=16.0))
    assert database.migrate(url) == (before, head())
    altered(url, lambda c: sign(c, ago=1.0))
    assert database.migrate(url) == (head(), head())


@pytest.mark.parametrize("migrates", [True, False])
def test_a_database_of_a_newer_release_is_left_alone(url: str, migrates: bool) -> None:
    database.migrate(url)
    newer = {"revision": "9999", "release": "7.5.0"}

    def renamed(connection: sa.Connection) -> None:
        connection.execute(sa.text("UPDATE alembic_version SET version_num = '9999'"))

    altered(url, renamed)
    with pytest.raises(ConfigurationError, match="9999, which a newer release made"):
        Database(url, migrates=migrates)

    def made_by_newer(connection: sa.Connection) -> None:
        connection.execute(sa.insert(schema_releases), newer)

    altered(url, made_by_newer)
    with pytest.raises(ConfigurationError, match=r"fedpress 7\.5\.0 made.*run 7\.5\.0"):
        Database(url, migrates=migrates)


def test_the_database_remembers_which_release_made_its_schema(url: str) -> None:
    made(url, OLDEST)
    opened_here = Database(url)
    rows = anyio.run(opened_here.read, lambda c: c.execute(sa.select(schema_releases)).all())
    opened_here.close()
    assert [tuple(row) for row in rows] == [(head(), __version__)]
