"""The server's key files: for receipts, and for certificates if it is the authority.

They are files on this machine, never in the store, and do not depend on its privacy. The database
records their public halves, so that all servers of one database sign with the same key: devices
reject a receipt signed by another.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from fedpress_protocols.errors import ConfigurationError, FedpressError, NotFound
from fedpress_protocols.local_files import check_private
from fedpress_protocols.signatures import DeviceKey, key_id_of
from fedpress_server.identity import rotation
from fedpress_server.identity.signing import SigningKeys, history
from fedpress_server.settings import Settings
from fedpress_server.storage.database import Database
from fedpress_server.storage.payloads import LocalPayloads
from fedpress_server.storage.tables import server_keys

Purpose = Literal["server", "authority"]
PURPOSES: tuple[Purpose, ...] = ("server", "authority")


async def signing_key(
    purpose: Purpose, file: Path | None, data_dir: Path, database: Database
) -> DeviceKey:
    """Load a key from `file`, or from `<purpose>-key.pem` in the data folder, where the first
    server of a database creates it, readable only by its owner. Raises ConfigurationError."""
    setting, default = f"{purpose}_key_file", f"{purpose}-key.pem"
    recorded = await database.read(lambda c: known_key(c, purpose))
    key = _from_file(setting, file) if file else _from_folder(default, data_dir)
    if key is None:
        if recorded is not None:
            raise ConfigurationError(
                f"this server has no {purpose} key, but the database's is {key_id_of(recorded)}",
                hint=f"copy {default} from a server of this database and name it as {setting} "
                f"(FEDPRESS_{setting.upper()})",
            )
        key = DeviceKey.generate()
        LocalPayloads(data_dir).put(default, key.to_pem())
    public = key.public
    if recorded is None:
        recorded = await database.write(
            lambda c: known_key(c, purpose) or _record(c, purpose, public)
        )
    if recorded != public:
        raise ConfigurationError(
            f"this server's {purpose} key is {key_id_of(public)}, but the database's is "
            f"{key_id_of(recorded)}",
            hint=f"give every server of one database the same {setting} "
            f"(FEDPRESS_{setting.upper()})",
        )
    return key


async def signing_keys(
    file: Path | None, data_dir: Path, database: Database, clock: Callable[[], float] = time.time
) -> SigningKeys:
    """Load the server's keys, the first like `signing_key`. This machine needs the newest key in
    the database, and that of each open masked round.

    If the chain file is ahead of the database, as after a restore, its rollovers are applied to the
    database. Raises ConfigurationError.
    """
    place = file or data_dir / "server-key.pem"
    ring = await asyncio.to_thread(rotation.ring, place)
    await rotation.bring_forward(database, place, ring, clock)
    recorded = await database.read(lambda c: known_key(c, "server"))
    if recorded is None or recorded not in ring:
        key = await signing_key("server", file, data_dir, database)
        recorded, ring = key.public, {key.public: key}
    first = recorded
    if (earliest := await database.read(rotation.first_key)) is not None:
        first = earliest
    keys = SigningKeys(
        ring, await database.read(lambda c: history(c, first)), lambda: rotation.ring(place)
    )
    await database.read(lambda c: rotation.check_open_sessions(c, keys))
    return keys


async def first_keys(settings: Settings, database: Database) -> list[Path]:
    """Create the missing key files of the settings, if the database has no signing key yet, so that
    servers that share them find them. Returns the created files.

    Concurrent calls, here or on other machines, are serialized by the database.
    """
    created = []
    for purpose in PURPOSES:
        file: Path | None = getattr(settings, f"{purpose}_key_file")
        if file is None or (purpose == "authority" and settings.masking_authority):
            continue
        if await database.write(partial(_make, purpose, file, DeviceKey.generate())):
            created.append(file)
    return created


def _make(purpose: Purpose, file: Path, key: DeviceKey, connection: Connection) -> bool:
    """Store `key` if there is neither a file nor a recorded key; returns whether it was stored. The
    file is durable before the record: a recorded key without a file could never sign."""
    if known_key(connection, purpose) is not None:
        return False  # the key exists elsewhere: the operator has to copy it here
    if not file.exists():
        try:
            LocalPayloads(file.parent).put(file.name, key.to_pem())
        except OSError as exc:
            raise ConfigurationError(
                f"{purpose}_key_file names {file}, which does not exist and cannot be created: "
                f"{exc.strerror}",
                hint="create the key elsewhere with `openssl genpkey -algorithm ed25519` and put "
                "it there, for example by a Secret",
            ) from exc
    elif not _holds(file, key):  # until this is repeated
        return False
    _record(connection, purpose, key.public)
    return True


def _holds(file: Path, key: DeviceKey) -> bool:
    try:
        return file.read_bytes() == key.to_pem()
    except OSError:
        return False


def key_file(purpose: Purpose, settings: Settings) -> Path:
    """The key file of a server with these settings."""
    path: Path | None = getattr(settings, f"{purpose}_key_file")
    return path or settings.data_dir / f"{purpose}-key.pem"


def known_key(connection: Connection, purpose: Purpose) -> bytes | None:
    """The public half recorded in the database."""
    query = sa.select(server_keys.c.public_key).where(server_keys.c.purpose == purpose)
    key = connection.execute(query).scalar_one_or_none()
    return None if key is None else bytes(key)


def _record(connection: Connection, purpose: Purpose, public: bytes) -> bytes:
    connection.execute(sa.insert(server_keys), {"purpose": purpose, "public_key": public})
    return public


def _from_folder(name: str, data_dir: Path) -> DeviceKey | None:
    check_private(data_dir / name, "the server's key")
    try:
        pem = LocalPayloads(data_dir).get(name)
    except NotFound:
        return None
    return _parsed(pem, str(data_dir / name))


def _from_file(setting: str, file: Path) -> DeviceKey:
    check_private(file, setting)
    try:
        pem = file.read_bytes()
    except OSError as exc:
        raise ConfigurationError(f"{setting}: {exc}") from exc
    return _parsed(pem, str(file))


def _parsed(pem: bytes, where: str) -> DeviceKey:
    try:
        return DeviceKey.from_pem(pem)
    except (FedpressError, ValueError) as exc:
        raise ConfigurationError(
            f"{where} is not an Ed25519 private key in PEM", hint="put the server's own back"
        ) from exc
