"""Restoring a server from a backup into an empty place: a new epoch of its records."""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import sqlalchemy as sa

from fedpress_protocols.errors import ConfigurationError
from fedpress_protocols.local_files import sync_folder
from fedpress_protocols.messages import Restore
from fedpress_server.backup import snapshots
from fedpress_server.backup.archive import DATABASE, FILES, KEYS, Reader, reader
from fedpress_server.backup.verifying import Report, verify
from fedpress_server.identity import audit
from fedpress_server.identity.server_keys import PURPOSES, Purpose, key_file, known_key
from fedpress_server.registry import restores
from fedpress_server.settings import Settings
from fedpress_server.storage import database as door
from fedpress_server.storage import engines
from fedpress_server.storage.bucket import opened_payloads
from fedpress_server.storage.payloads import LocalPayloads
from fedpress_server.storage.records import RoundKey
from fedpress_server.storage.tables import partial_parts, partial_uploads

_RECORDS = "fedpress.db"


@dataclass(frozen=True, slots=True)
class Restored:
    """The result of a restore, and the remaining steps."""

    restore: Restore
    report: Report
    open_rounds: tuple[RoundKey, ...]
    """Rounds open in the backup; the server abandons them when it starts."""
    missing_keys: tuple[str, ...]
    """Files that the server needs before it starts."""


def restore(
    place: Path, settings: Settings, *, key_id: str = "", clock: Callable[[], float] = time.time
) -> Restored:
    """Restore the backup as the server of `settings`, whose data folder, database and store must be
    new or empty.

    The backup is verified first, against the server's key `key_id` if that is given. A new folder
    is prepared under a temporary name and renamed; an existing one, which may be a volume, is
    filled in place. Raises ConfigurationError, and leaves the data folder unchanged.
    """
    target = settings.data_dir
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigurationError(
            f"{target} is not empty", hint="choose a new folder: nothing is overwritten"
        )
    url = sa.make_url(settings.resolved_database_url)
    is_inside = url.get_backend_name() == "sqlite"
    if is_inside and settings.database_url:
        raise ConfigurationError(
            "a SQLite database is restored into the data folder",
            hint="restore without database_url, and move fedpress.db afterwards",
        )
    report = verify(place, key_id=key_id)
    if report.is_anothers:
        raise ConfigurationError(
            f"{place} is a backup of the server with key {report.key_id}, expected {key_id}",
            hint="look at --key-id, or restore a backup of the expected server",
        )
    if report.faults or report.manifest is None:
        raise ConfigurationError(
            f"{place} is damaged: {'; '.join(report.faults[:3])}",
            hint="fedpress server verify-backup lists all errors; restore another backup",
        )
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    parent = target if target.is_dir() else target.parent
    beside = parent / f".{target.name}.{secrets.token_hex(4)}.partial"
    try:
        folder = LocalPayloads(beside)
        with reader(place) as backup:
            at = beside / _RECORDS
            _copy(backup, DATABASE, at)
            door.migrate(f"sqlite:///{at}")
            restored, open_rounds = _in_new_epoch(at, report.manifest.began_at, clock())
            purposes = _known_keys(at)
            snapshots.settle(at)
            for name in sorted(backup.names()):
                if name.startswith(KEYS):
                    _copy(backup, name, beside / name.removeprefix(KEYS))
            # The store's cache is inside the new folder.
            unpacked = settings.model_copy(update={"data_dir": beside})
            payloads = opened_payloads(unpacked) if settings.store_url else folder
            for entry in report.manifest.files:
                if entry.name.startswith(FILES):
                    with backup.open(entry.name) as file:
                        payloads.put(entry.name.removeprefix(FILES), file.read())
        if not is_inside:
            snapshots.put_into(at, settings.resolved_database_url)
            at.unlink()
        sync_folder(beside)
        if parent == target:
            _move_up(beside)
        else:
            beside.rename(target)
        sync_folder(parent)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    key_files = [key_file(purpose, settings) for purpose in purposes]
    missing = tuple(str(file) for file in key_files if not file.is_file())
    return Restored(restored, report, tuple(open_rounds), missing)


def _move_up(filled: Path) -> None:
    """Move the contents of `filled` to its parent, the records last, so that no server sees a
    part."""
    entries: list[Path] = []
    try:
        for entry in sorted(filled.iterdir(), key=lambda each: each.name == _RECORDS):
            entries.append(entry.rename(filled.parent / entry.name))
        filled.rmdir()
    except BaseException:
        for entry in entries:
            entry.rename(filled / entry.name)
        raise


def _in_new_epoch(file: Path, backup_at: int, now: float) -> tuple[Restore, list[RoundKey]]:
    """Record the restore, and drop uploads in parts, which cannot be resumed."""
    backend = engines.opened(f"sqlite:///{file}")
    try:
        with backend.writes.connect() as connection, connection.begin():
            restored = restores.add(connection, secrets.token_urlsafe(12), backup_at, now)
            details = {"number": restored.number, "backup_at": restored.backup_at}
            audit.add(connection, now, audit.COMMAND, "server.restored", restored.epoch, **details)
            for table in (partial_parts, partial_uploads):
                connection.execute(sa.delete(table))
            return restored, restores.open_rounds(connection)
    finally:
        backend.dispose()


def _known_keys(file: Path) -> list[Purpose]:
    backend = engines.opened(f"sqlite:///{file}")
    try:
        with backend.reads.connect() as connection:
            return [each for each in PURPOSES if known_key(connection, each) is not None]
    finally:
        backend.dispose()


def _copy(backup: Reader, name: str, place: Path) -> None:
    descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with backup.open(name) as source, open(descriptor, "wb") as file:
        shutil.copyfileobj(source, file)
        file.flush()
        os.fsync(descriptor)
