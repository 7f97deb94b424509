"""File permissions: other users' access to the server's data."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

import sqlalchemy as sa

from fedpress_protocols.errors import ConfigurationError

_OTHERS = 0o027
"""Permissions removed from the data folder; its group may read it, for example for backups."""
_log = logging.getLogger(__name__)


def close_folder(folder: Path) -> None:
    """Remove other users' access to the data folder.

    Raises ConfigurationError if others can write to it and this user may not change that.
    """
    mode = stat.S_IMODE(folder.stat().st_mode)
    if not mode & _OTHERS:
        return
    try:
        folder.chmod(mode & ~_OTHERS)
    except PermissionError as exc:
        if mode & stat.S_IWOTH:
            raise ConfigurationError(
                f"every user of this machine can change the files in {folder}: its mode is "
                f"{mode:04o}",
                hint=f"its owner must run chmod 0700 {folder}",
            ) from exc
        _log.warning(
            "other users can read %s: its mode is %04o, and it belongs to another user",
            folder,
            mode,
        )
        return
    closed = mode & ~_OTHERS
    _log.warning(
        "other users had access to %s: changed its mode from %04o to %04o", folder, mode, closed
    )


def sqlite_file(url: str) -> Path | None:
    """The file of a SQLite database; None for another one, and for one in memory."""
    try:
        parsed = sa.make_url(url)
    except sa.exc.ArgumentError:
        return None  # opening it will report the error
    if parsed.get_backend_name() != "sqlite" or parsed.database in (None, "", ":memory:"):
        return None
    return Path(str(parsed.database))


def close_database(file: Path) -> None:
    """Create a SQLite file with owner-only access, or restrict an existing one.

    SQLite gives the files beside it the same mode.
    """
    try:
        os.close(os.open(file, os.O_RDWR | os.O_CREAT, 0o600))
    except OSError:
        return  # opening the database will report the error
    for each in (file, *(file.with_name(f"{file.name}-{part}") for part in ("wal", "shm"))):
        try:
            mode = stat.S_IMODE(each.stat().st_mode)
            if mode & 0o077:
                each.chmod(0o600)
                _log.warning(
                    "other users could read %s: changed its mode from %04o to 0600", each, mode
                )
        except FileNotFoundError:
            continue
        except PermissionError:
            _log.warning("other users can read %s, which belongs to another user", each)
