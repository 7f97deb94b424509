"""Creating a backup of a running server: first a snapshot of the records, then the files that they
refer to, which never change and are not removed during the backup."""

from __future__ import annotations

import asyncio
import io
import secrets
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from fedpress_protocols import __version__
from fedpress_protocols.errors import ConfigurationError, NotFound
from fedpress_protocols.signatures import DeviceKey
from fedpress_server.backup import snapshots
from fedpress_server.backup.archive import (
    DATABASE,
    FILES,
    KEYS,
    Manifest,
    Writer,
    check_place,
    writer,
)
from fedpress_server.identity import audit
from fedpress_server.identity.server_keys import PURPOSES, key_file, signing_keys
from fedpress_server.registry import restores
from fedpress_server.registry.sweeping import needed_by_rounds, needed_by_tasks
from fedpress_server.settings import Settings
from fedpress_server.storage import engines, schema
from fedpress_server.storage.bucket import opened_payloads
from fedpress_server.storage.database import Database, damage_refused
from fedpress_server.storage.files import base_name, model_name
from fedpress_server.storage.payloads import Payloads
from fedpress_server.storage.tables import bases, model_files, models

HOLD_SECONDS = 600.0
"""Seconds of a lease on the files, renewed during the backup: it expires after a kill."""


async def back_up(
    settings: Settings,
    place: Path,
    *,
    with_keys: bool = False,
    clock: Callable[[], float] = time.time,
    before_files: Callable[[], None] = lambda: None,
) -> Manifest:
    """Copy the server of `settings` to `place`, a new folder or `.tar` file.

    The server may run. Keys are left out unless `with_keys`. Raises ConfigurationError; after this
    and any other error, nothing is left behind. `before_files` is called between the snapshot and
    the first file. A completed backup is recorded in the audit log.
    """
    _check(settings, place)
    database = await asyncio.to_thread(Database, settings.resolved_database_url, migrates=False)
    try:
        with (
            damage_refused(),
            tempfile.TemporaryDirectory(dir=place.parent, prefix=f".{place.name}.") as scratch,
        ):
            keys = await signing_keys(settings.server_key_file, settings.data_dir, database, clock)
            # The store's cache belongs to its server.
            store_settings = settings.model_copy(update={"data_dir": Path(scratch) / "store"})
            of = store_settings if settings.store_url else settings
            payloads = await asyncio.to_thread(opened_payloads, of)
            copy = await asyncio.to_thread(writer, place)
            try:
                backup = _Taking(
                    settings, database, payloads, keys.current, copy, clock, before_files, place
                )
                return await backup.run(Path(scratch) / DATABASE, with_keys=with_keys)
            except BaseException:
                await asyncio.to_thread(copy.abandon)
                raise
    finally:
        await asyncio.to_thread(database.close)


def _check(settings: Settings, place: Path) -> None:
    url = sa.make_url(settings.resolved_database_url)
    if url.get_backend_name() == "sqlite" and not Path(url.database or "").is_file():
        raise ConfigurationError(
            f"there is no server database {url.database}", hint="name its folder as --data-dir"
        )
    if place.absolute().is_relative_to(settings.data_dir.absolute()):
        raise ConfigurationError(
            f"{place} is inside the server's own folder",
            hint="choose a place outside of it, best on another disk",
        )
    check_place(place)


class _Taking:
    def __init__(
        self,
        settings: Settings,
        database: Database,
        payloads: Payloads,
        key: DeviceKey,
        copy: Writer,
        clock: Callable[[], float],
        before_files: Callable[[], None],
        place: Path,
    ) -> None:
        self._settings = settings
        self._database = database
        self._payloads = payloads
        self._key = key
        self._copy = copy
        self._clock = clock
        self._before_files = before_files
        self._name = secrets.token_urlsafe(12)
        # The audit log is Unicode, but a file name may be any bytes.
        self._file_name = place.name.encode(errors="replace").decode()

    async def run(self, file: Path, *, with_keys: bool) -> Manifest:
        name, began_at = self._name, self._clock()
        until = began_at + HOLD_SECONDS
        await self._database.write(lambda c: restores.begin_backup(c, name, began_at, until))
        holding = asyncio.create_task(self._hold())
        try:
            await snapshots.take(self._database, self._settings.resolved_database_url, file)
            revision, names = await asyncio.to_thread(_read, file)
            await asyncio.to_thread(self._add_database, file)
            self._before_files()
            for each in names:
                await asyncio.to_thread(self._add, each)
                if holding.done():
                    holding.result()
            if with_keys:
                await asyncio.to_thread(self._add_keys)
            manifest = Manifest(
                backup=name,
                release=__version__,
                revision=revision,
                dialect=self._database.dialect,
                began_at=int(began_at),
                files=tuple(self._copy.entries),
            )
            await self._hold_on()
            await asyncio.to_thread(self._copy.commit, manifest.to_bytes(self._key))
        except BaseException:
            await self._forget()
            raise
        finally:
            holding.cancel()
            with suppress(asyncio.CancelledError, ConfigurationError):
                await holding
        await self._finish(manifest, with_keys=with_keys)
        return manifest

    async def _hold(self) -> None:
        while True:
            await asyncio.sleep(HOLD_SECONDS / 10)
            await self._hold_on()

    async def _hold_on(self) -> None:
        now = self._clock()
        is_held = await self._database.write(
            lambda c: restores.hold_on(c, self._name, now, now + HOLD_SECONDS)
        )
        if not is_held:
            raise ConfigurationError(
                f"the backup was stopped for {HOLD_SECONDS:.0f} s, and the server may have removed "
                "files that it needs",
                hint="make another",
            )

    async def _forget(self) -> None:
        now = self._clock()
        await self._database.write(
            lambda c: restores.end_backup(c, self._name, now, is_whole=False)
        )

    async def _finish(self, manifest: Manifest, *, with_keys: bool) -> None:
        now = self._clock()

        def write(connection: Connection) -> None:
            restores.end_backup(connection, self._name, now, is_whole=True)
            restore = restores.newest(connection)
            audit.add(
                connection,
                now,
                audit.COMMAND,
                "server.backed-up",
                self._file_name,
                backup=self._name,
                backup_at=manifest.began_at,
                epoch="" if restore is None else restore.epoch,
                files=len(manifest.files),
                keys=with_keys,
            )

        await self._database.write(write)

    def _add_database(self, file: Path) -> None:
        with file.open("rb") as source:
            self._copy.add(DATABASE, source, file.stat().st_size)

    def _add(self, name: str) -> None:
        try:
            with self._payloads.open(name) as source:
                self._copy.add(FILES + name, source, self._payloads.size(name))
        except NotFound as exc:
            raise ConfigurationError(
                f"the server's records refer to {name}, which is not in the store",
                hint="the store has lost it: restore it from an earlier backup",
            ) from exc

    def _add_keys(self) -> None:
        pem = self._key.to_pem()
        self._copy.add(f"{KEYS}server-key.pem", io.BytesIO(pem), len(pem))
        for purpose in PURPOSES:
            file = key_file(purpose, self._settings)
            if purpose != "server" and file.is_file():
                with file.open("rb") as source:
                    self._copy.add(f"{KEYS}{purpose}-key.pem", source, file.stat().st_size)


def _read(file: Path) -> tuple[str, list[str]]:
    """The schema version of a snapshot, and the names of the files that it refers to."""
    backend = engines.opened(f"sqlite:///{file.absolute()}")
    try:
        with backend.reads.connect() as connection:
            return schema.revision(connection), sorted(needed(connection))
    except sa.exc.DatabaseError as exc:
        raise backend.translated(exc) from exc
    finally:
        backend.dispose()
        snapshots.settle(file)


def needed(connection: Connection) -> set[str]:
    """The names of all files that the records refer to."""
    given_up = sa.select(model_files.c.digest).where(model_files.c.collected_at.is_not(None))
    kept_models = sa.select(models.c.digest).where(models.c.digest.not_in(given_up))
    names = {model_name(digest) for digest in connection.execute(kept_models).scalars()}
    for row in connection.execute(sa.select(bases.c.task, bases.c.client_id, bases.c.digest)):
        names.add(base_name(*row))
    return names | needed_by_rounds(connection) | needed_by_tasks(connection)
