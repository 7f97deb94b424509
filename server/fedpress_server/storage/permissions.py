"""Who else on this machine may read and change what the server keeps."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

import sqlalchemy as sa

from fedpress_protocols.errors import ConfigurationError

_OTHERS = 0o027
"""What the data folder is to nobody but its owner: its group may read it, for backups, say."""
_log = logging.getLogger(__name__)


def close_folder(folder: Path) -> None:
    """Take the data folder from others, where they have it.

    Raises ConfigurationError where others can write to it and it is not this user's to change.
    """
    mode = stat.S_IMODE(folder.stat().st_mode)
    if not mode & _OTHERS:
        return
    try:
        folder.chmod(mode & ~_OTHERS)
    except PermissionError as exc:
        if mode & stat.S_IWOTH:
            raise ConfigurationError(
                f"everybody on this machine can change what is in {folder}: its mode is {mode:04o}",
                hint=f"have its owner chmod 0700 {folder}",
            ) from exc
        _log.warning("others can read %s: its mode is %04o, and it is another user's", folder, mode)
        return
    closed = mode & ~_OTHERS
    _log.warning("others had %s open: its mode was %04o, and is %04o", folder, mode, closed)


def sqlite_file(url: str) -> Path | None:
    """The file of a SQLite database; None for another one, and for one in memory."""
    try:
        parsed = sa.make_url(url)
    except sa.exc.ArgumentError:
        return None  # whoever opens it says so
    if parsed.get_backend_name() != "sqlite" or parsed.database in (None, "", ":memory:"):
        return None
    return Path(str(parsed.database))


def close_database(file: Path) -> None:
    """Make a SQLite file that is its owner's alone, or close one that is open to others.

    SQLite gives the files beside it the same mode.
    """
    try:
        os.close(os.open(file, os.O_RDWR | os.O_CREAT, 0o600))
    except OSError:
        return  # whoever opens the database says why it cannot be
    for each in (file, *(file.with_name(f"{file.name}-{part}") for part in ("wal", "shm"))):
        try:
            mode = stat.S_IMODE(each.stat().st_mode)
            if mode & 0o077:
                each.chmod(0o600)
                _log.warning("others could read %s: its mode was %04o, and is 0600", each, mode)
        except FileNotFoundError:
            continue
        except PermissionError:
            _log.warning("others can read %s, and it is another user's", each)
