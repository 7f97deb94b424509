"""A PostgreSQL of the tests' own, on a socket in a temporary folder."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import sqlalchemy as sa

from fedpress_server.storage import database

MISSING = "PostgreSQL's initdb and postgres are not installed here"
_DEBIAN = Path("/usr/lib/postgresql")
_TEMPLATE = "fedpress_template"


def binaries() -> Path | None:
    """The folder of `initdb` and `postgres`, of the newest version that is installed."""
    debian = sorted(_DEBIAN.glob("*/bin"), key=lambda path: int(path.parent.name), reverse=True)
    on_path = [Path(found).resolve().parent for found in [shutil.which("initdb")] if found]
    for folder in [*debian, *on_path]:
        if (folder / "initdb").is_file() and (folder / "postgres").is_file():
            return folder
    return None


class Cluster:
    """A running server. Nothing is synced to the disk unless it `is_durable`: a test that kills
    a process, not the machine, can tell no difference."""

    def __init__(self, folder: Path, programs: Path, *, is_durable: bool = False) -> None:
        self._folder, self._programs = folder, programs
        self._account = pwd.getpwnam("postgres") if os.geteuid() == 0 else None
        self._settings = {
            "listen_addresses": "",
            "unix_socket_directories": str(folder),
            "shared_buffers": "32MB",
            "max_connections": "100",
            "logging_collector": "off",
            "log_min_messages": "fatal",
        }
        if not is_durable:
            self._settings |= {"fsync": "off", "full_page_writes": "off"}
        self._num_databases = 0
        self._unused: list[str] = []
        self._process: subprocess.Popen[bytes] | None = None
        if self._account is not None:
            os.chown(folder, self._account.pw_uid, self._account.pw_gid)
        options = ["-A", "trust", "-U", "fedpress", "-E", "UTF8", "--locale=C.UTF-8", "--no-sync"]
        self._run("initdb", "-D", str(folder / "data"), *options)
        self.start()

    def start(self) -> None:
        chosen = [
            part for name, value in self._settings.items() for part in ("-c", f"{name}={value}")
        ]
        self._process = subprocess.Popen(
            self._command("postgres", "-D", str(self._folder / "data"), *chosen),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._run("pg_isready", "-q", "-h", str(self._folder), "-t", "60", is_patient=True)

    def stop(self, *, how: signal.Signals = signal.SIGINT) -> None:
        """SIGINT: connections are cut; SIGQUIT: as in a crash, which the next start repairs."""
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(60)
            self._process = None

    def url(self, name: str) -> str:
        return f"postgresql://fedpress@/{name}?host={self._folder}"

    def new(self, *, is_migrated: bool = True) -> str:
        """The URL of a database nobody has used, with the newest schema unless told otherwise."""
        if is_migrated and self._unused:
            return self._unused.pop()
        with self._maintenance() as connection:
            if is_migrated and not self._has_template:
                connection.exec_driver_sql(f"CREATE DATABASE {_TEMPLATE}")
                database.migrate(self.url(_TEMPLATE))
                self._has_template = True
            self._num_databases += 1
            name = f"test_{self._num_databases}"
            template = f"TEMPLATE {_TEMPLATE}" if is_migrated else ""
            connection.exec_driver_sql(f"CREATE DATABASE {name} {template}")
        return self.url(name)

    _has_template = False

    def give_back(self, url: str) -> None:
        """A database that is used no more, and still has the newest schema: emptied for another
        test, which costs less than a new one."""
        kept = {"alembic_version", "schema_releases"}
        engine = sa.create_engine(_with_driver(url), poolclass=sa.NullPool)
        with engine.begin() as connection:
            connection.exec_driver_sql("SET LOCAL lock_timeout = '10s'")
            names = sorted(set(sa.inspect(connection).get_table_names()) - kept)
            connection.exec_driver_sql(f"TRUNCATE {', '.join(names)}")
        self._unused.append(url)

    @contextmanager
    def _maintenance(self) -> Iterator[sa.Connection]:
        url = _with_driver(self.url("postgres"))
        engine = sa.create_engine(url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
        with engine.connect() as connection:
            yield connection

    def _command(self, program: str, *arguments: str) -> Sequence[str]:
        command = [str(self._programs / program), *arguments]
        if self._account is None:
            return command
        user, group = str(self._account.pw_uid), str(self._account.pw_gid)
        as_user = [f"--reuid={user}", f"--regid={group}", "--clear-groups"]
        return ["setpriv", *as_user, "--pdeathsig=QUIT", *command]  # it ends when the tests do

    def _run(self, program: str, *arguments: str, is_patient: bool = False) -> None:
        for _ in range(600 if is_patient else 1):
            done = subprocess.run(
                self._command(program, *arguments), capture_output=True, text=True, cwd="/"
            )
            if done.returncode == 0:
                return
            if is_patient:
                assert self._process is not None
                try:
                    self._process.wait(0.1)
                    break
                except subprocess.TimeoutExpired:
                    continue
        raise RuntimeError(f"{program}: {done.stderr or done.stdout or done.returncode}")


def _with_driver(url: str) -> sa.URL:
    return sa.make_url(url).set(drivername="postgresql+psycopg")


@contextmanager
def cluster(*, is_durable: bool = False) -> Iterator[Cluster]:
    """A cluster while it is needed; call it where `binaries()` are."""
    programs = binaries()
    assert programs is not None, MISSING
    # Not pytest's folder: a socket's path is short, and every folder above it must let others in.
    folder = Path(tempfile.mkdtemp(prefix="fedpress-pg-"))
    try:
        made = Cluster(folder, programs, is_durable=is_durable)
        try:
            yield made
        finally:
            made.stop(how=signal.SIGQUIT)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
