"""SQLite databases that have their tables already; statements that are compiled once."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from fedpress_server.storage import database


class _Compiled(dict[Any, Any]):
    """Statements by database and shape, for all servers of this process: each has an engine, with
    a dialect of its own in its keys, and would compile them all anew."""

    def __getitem__(self, key: tuple[Any, ...]) -> Any:
        return super().__getitem__(self._of(key))

    def __setitem__(self, key: tuple[Any, ...], compiled: Any) -> None:
        super().__setitem__(self._of(key), compiled)

    def get(self, key: tuple[Any, ...], default: Any = None) -> Any:
        return super().get(self._of(key), default)

    @staticmethod
    def _of(key: tuple[Any, ...]) -> tuple[Any, ...]:
        dialect, *rest = key
        return (type(dialect), *rest)


_COMPILED = _Compiled()


@sa.event.listens_for(sa.Engine, "engine_connect")
def _shares(connection: sa.Connection) -> None:
    connection.execution_options(compiled_cache=_COMPILED)


@cache
def _migrated() -> bytes:
    with tempfile.TemporaryDirectory(prefix="fedpress-db-") as folder:
        file = Path(folder) / "migrated.db"
        database.migrate(f"sqlite:///{file}")
        return file.read_bytes()


def lay(file: Path) -> None:
    """Put a database of the newest schema there, unless there is one: as the migrations make it,
    which take ten times as long as all else at a server's start."""
    if not file.exists():
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file.write_bytes(_migrated())
        file.chmod(0o600)
