"""SQLite databases that have their tables already."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

from fedpress_server.storage import database


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
