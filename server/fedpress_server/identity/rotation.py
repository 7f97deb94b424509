"""Rotation of the server's signing key: create the next key, sign the rollover, switch.

    rotate → (copy the file to every machine that has one of its own) → switch → retire

The server's key is in FILE. The next key is FILE.next, the previous one FILE.former, and FILE.chain
has the rollover statements; FILE.replacing is a key created by `replace` until it becomes FILE. A
server uses the one that the database names, so files and database need not change atomically; every
step is idempotent and can be repeated after a crash.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
from collections.abc import Callable, Collection
from pathlib import Path

import sqlalchemy as sa
from pydantic import TypeAdapter, ValidationError
from sqlalchemy.engine import Connection

from fedpress_protocols.errors import ConfigurationError, Conflict, FedpressError
from fedpress_protocols.key_rollover import (
    MAX_KEY_ROLLOVERS,
    SignedKeyRollover,
    follow_rollovers,
    sign_key_rollover,
    verify_key_rollover,
)
from fedpress_protocols.local_files import check_private, sync_folder
from fedpress_protocols.plan import Term
from fedpress_protocols.signatures import DeviceKey, from_base64url, key_id_of, to_base64url
from fedpress_protocols.validation import format_validation_errors
from fedpress_server.identity import audit
from fedpress_server.identity.signing import (
    KeyIsElsewhere,
    Ring,
    SigningKeys,
    history,
    statements,
)
from fedpress_server.storage.database import Database
from fedpress_server.storage.payloads import LocalPayloads
from fedpress_server.storage.tables import audit_log, rounds, server_keys, tasks
from fedpress_server.storage.tables import server_key_successions as successions

_MAX_CHAIN = 2**20
_STATEMENTS = TypeAdapter(list[SignedKeyRollover])


class Standing(Term):
    """The state of the server's keys, by ids. `here` are those with a private half on this
    machine."""

    current: str
    next: str | None
    """Created, but not active."""
    former: tuple[str, ...]
    here: tuple[str, ...]
    public: str
    """The current public key, base64url, as configured on devices."""


class Retired(Term):
    erased: str | None
    """The id of the key; None if there was none to erase."""


# The files


def next_file(place: Path) -> Path:
    return place.with_name(place.name + ".next")


def former_file(place: Path) -> Path:
    return place.with_name(place.name + ".former")


def replacing_file(place: Path) -> Path:
    return place.with_name(place.name + ".replacing")


def key_files(place: Path) -> tuple[Path, ...]:
    """The possible files of the server's private keys, `place` first."""
    return place, next_file(place), former_file(place), replacing_file(place)


def chain_file(place: Path) -> Path:
    return place.with_name(place.name + ".chain")


def ring(place: Path) -> Ring:
    """All keys of the server at `place` and beside it; raises ConfigurationError for a file without
    a key."""
    keys: dict[bytes, DeviceKey] = {}
    for file in key_files(place):
        check_private(file, "the server's key")
        try:
            key = DeviceKey.from_pem(file.read_bytes())
        except FileNotFoundError:
            continue
        except OSError as exc:
            raise ConfigurationError(f"{file}: {exc.strerror}") from exc
        except (FedpressError, ValueError) as exc:
            raise ConfigurationError(
                f"{file} is not an Ed25519 private key in PEM",
                hint="restore the server's own key file",
            ) from exc
        keys[key.public] = key
    return keys


def chain(place: Path) -> list[SignedKeyRollover]:
    """The statements in the chain file beside the key; none without a file."""
    file = chain_file(place)
    try:
        with file.open("rb") as stream:
            data = stream.read(_MAX_CHAIN + 1)
    except FileNotFoundError:
        return []
    except OSError as exc:
        raise ConfigurationError(f"{file}: {exc.strerror}") from exc
    try:
        statements_ = _STATEMENTS.validate_json(data)
        for each in statements_:
            verify_key_rollover(each)
    except (ValidationError, FedpressError) as exc:
        why = format_validation_errors(exc) if isinstance(exc, ValidationError) else exc.detail
        raise ConfigurationError(
            f"{file} is not a chain of server keys: {why}", hint="restore it from a copy"
        ) from exc
    return statements_


def _settle(place: Path, current: bytes, rollovers: Collection[SignedKeyRollover]) -> None:
    """Rename the files according to the database; the statements come first."""
    folder, on_disk = LocalPayloads(place.parent), ring(place)
    if rollovers:
        text = json.dumps([each.model_dump(mode="json") for each in rollovers], indent=1) + "\n"
        folder.put(chain_file(place).name, text.encode())
    if current not in on_disk:
        return

    def has(file: Path) -> bool:
        return file.exists() and DeviceKey.from_pem(file.read_bytes()).public == current

    following = next(filter(has, (next_file(place), replacing_file(place))), None)
    if following is None:
        return
    if place.exists() and not has(place):
        os.replace(place, former_file(place))
    os.replace(following, place)
    sync_folder(place.parent)


# The database


def first_key(connection: Connection) -> bytes | None:
    """The key before the first rollover; None if there was none."""
    query = (
        sa.select(successions.c.public_key)
        .where(successions.c.active_at.is_not(None))
        .order_by(successions.c.active_at)
        .limit(1)
    )
    key = connection.execute(query).scalar_one_or_none()
    return None if key is None else bytes(key)


def check_open_sessions(connection: Connection, keys: SigningKeys) -> None:
    """Raise ConfigurationError if an open masked round needs a key that is not on this machine."""
    for opened_at in _open_masked(connection):
        try:
            keys.at(opened_at)
        except KeyIsElsewhere as exc:
            raise ConfigurationError(str(exc)) from exc


def _current(connection: Connection) -> bytes | None:
    query = sa.select(server_keys.c.public_key).where(server_keys.c.purpose == "server")
    key = connection.execute(query).scalar_one_or_none()
    return None if key is None else bytes(key)


def _prepared(connection: Connection) -> SignedKeyRollover | None:
    query = sa.select(successions.c.statement).where(successions.c.active_at.is_(None))
    text = connection.execute(query).scalar_one_or_none()
    return None if text is None else SignedKeyRollover.model_validate_json(text)


def _open_masked(connection: Connection) -> list[float]:
    """The opening times of open attempts of masked tasks."""
    query = (
        sa.select(rounds.c.opened_at, tasks.c.config)
        .join(tasks, tasks.c.task == rounds.c.task)
        .where(rounds.c.closed_at.is_(None), tasks.c.state == "running")
    )
    return [
        row.opened_at
        for row in connection.execute(query)
        if json.loads(row.config).get("lane") == "masked"
    ]


def _write(connection: Connection, signed: SignedKeyRollover, active_at: float | None) -> None:
    key, successor = verify_key_rollover(signed)
    row = {
        "public_key": key,
        "successor": successor,
        "statement": signed.model_dump_json(),
        "active_at": active_at,
    }
    connection.execute(sa.insert(successions), row)


def _put_in_force(connection: Connection, signed: SignedKeyRollover, now: float, by: str) -> None:
    """Activate the successor. Increments the version of every task, so that no server writes
    another step before it has read the new key."""
    key, successor = verify_key_rollover(signed)
    newest_opening = connection.execute(sa.select(sa.func.max(rounds.c.opened_at))).scalar() or 0.0
    before = connection.execute(sa.select(sa.func.max(successions.c.active_at))).scalar()
    later = 0.0 if before is None else math.nextafter(before, math.inf)
    at = max(now, newest_opening, later)
    changed = connection.execute(
        sa.update(successions)
        .where(successions.c.public_key == key, successions.c.active_at.is_(None))
        .values(active_at=at)
    )
    if changed.rowcount != 1:
        raise Conflict(
            "the server's key was changed concurrently; check the state and retry",
            hint="look again",
        )
    connection.execute(
        sa.update(server_keys).where(server_keys.c.purpose == "server").values(public_key=successor)
    )
    connection.execute(sa.update(tasks).values(version=tasks.c.version + 1))
    audit.add(
        connection, now, by, "server-key.activated", key_id_of(successor), former=signed.key_id
    )


async def bring_forward(
    database: Database, place: Path, keys: Ring, clock: Callable[[], float]
) -> None:
    """Apply the rollovers in FILE.chain to a database that was restored from before them."""
    rollovers = await asyncio.to_thread(chain, place)
    if not rollovers:
        return

    def write(connection: Connection) -> None:
        current, last = _current(connection), verify_key_rollover(rollovers[-1])[1]
        if current is None or current == last or last not in keys:
            return
        already = {each.succession.successor for each in statements(connection)}
        if rollovers[-1].succession.successor in already:
            return  # the database is ahead of the file
        try:
            follow_rollovers(current, key_id_of(last), rollovers)
        except FedpressError as exc:
            raise ConfigurationError(
                f"the database's signing key is {key_id_of(current)}, and {chain_file(place)} "
                f"does not lead from it to {key_id_of(last)}",
                hint="are both from the same server? Restore the chain file of this key",
            ) from exc
        by_key = {verify_key_rollover(each)[0]: each for each in rollovers}
        connection.execute(sa.delete(successions).where(successions.c.active_at.is_(None)))
        while current != last:
            _write(connection, by_key[current], None)
            _put_in_force(connection, by_key[current], clock(), audit.SERVER)
            current = verify_key_rollover(by_key[current])[1]

    await database.write(write)


# Operator commands


async def standing(database: Database, place: Path) -> Standing:
    keys = await asyncio.to_thread(ring, place)

    def read(connection: Connection) -> Standing:
        current, prepared = _current(connection), _prepared(connection)
        if current is None:
            raise ConfigurationError(
                "the database has no signing key yet", hint="start the server once"
            )
        return Standing(
            current=key_id_of(current),
            next=None if prepared is None else key_id_of(verify_key_rollover(prepared)[1]),
            former=tuple(each.key_id for each in statements(connection)),
            here=tuple(map(key_id_of, keys)),
            public=to_base64url(current),
        )

    return await database.read(read)


async def rotate(database: Database, place: Path, clock: Callable[[], float]) -> Standing:
    """Create the next key, FILE.next, and the statement that names it. Nothing signs with it
    yet."""
    before = await standing(database, place)
    details = {
        key_id_of(public): key for public, key in (await asyncio.to_thread(ring, place)).items()
    }
    if before.next is not None:
        if before.next not in details:
            raise ConfigurationError(
                f"the next key {before.next} was created on another machine",
                hint=f"copy {next_file(place).name} from there, then fedpress server key switch",
            )
        return before
    if before.current not in details:
        raise ConfigurationError(
            f"server key {before.current} is not at {place}, but the current key must sign the "
            "next",
            hint="run this on a machine that has the key of a server of this database",
        )
    if len(before.former) >= MAX_KEY_ROLLOVERS:
        raise ConfigurationError(
            f"the server's key was already changed {MAX_KEY_ROLLOVERS} times, the maximum"
        )
    rollovers = await database.read(statements)
    current = details[before.current]
    await asyncio.to_thread(_settle, place, current.public, rollovers)
    following = next_file(place)
    if following.exists():  # left by a run that was killed before the database had it
        new = DeviceKey.from_pem(following.read_bytes())
    else:
        new = DeviceKey.generate()
        await asyncio.to_thread(LocalPayloads(place.parent).put, following.name, new.to_pem())
    signed = sign_key_rollover(current, new.public, int(clock()))

    def write(connection: Connection) -> None:
        if _current(connection) != current.public or _prepared(connection) is not None:
            raise Conflict(
                "the server's key was changed concurrently; check the state and retry",
                hint="look again",
            )
        _write(connection, signed, None)
        audit.add(
            connection,
            clock(),
            audit.COMMAND,
            "server-key.announced",
            new.key_id,
            former=current.key_id,
        )

    await database.write(write)
    return await standing(database, place)


async def switch(database: Database, place: Path, clock: Callable[[], float]) -> Standing:
    """Activate the next key, and rename this machine's files."""
    before = await standing(database, place)
    if before.next is not None:
        if before.next not in before.here:
            raise ConfigurationError(
                f"the next key {before.next} is not at {next_file(place)}",
                hint="copy it from the machine that created it; every server needs it",
            )

        def write(connection: Connection) -> None:
            prepared = _prepared(connection)
            if prepared is None or key_id_of(verify_key_rollover(prepared)[1]) != before.next:
                raise Conflict(
                    "the server's key was changed concurrently; check the state and retry"
                )
            _put_in_force(connection, prepared, clock(), audit.COMMAND)

        await database.write(write)
    current = await database.read(_current)
    rollovers = await database.read(statements)
    if current is not None:
        await asyncio.to_thread(_settle, place, current, rollovers)
    return await standing(database, place)


async def replace(database: Database, place: Path, clock: Callable[[], float]) -> Standing:
    """Replace the key without a chain, after a leak: devices trust nothing until they are given the
    new key. Deletes the old key and its chain. Raises Conflict while a masked round is open.

    The chain file is deleted before the database's statements, since a chain file without them
    would look like another server's; the new key is FILE.replacing until the database has it, then
    FILE.
    """

    def current_of(connection: Connection) -> bytes:
        current = _current(connection)
        if current is None:
            raise ConfigurationError(
                "the database has no signing key yet", hint="start the server once"
            )
        if _open_masked(connection):
            raise Conflict(
                "a masked round is open, and the old key signs its session",
                hint="abort it first (fedpress round abort)",
            )
        return current

    before = await database.read(current_of)
    await asyncio.to_thread(_settle, place, before, ())
    new = DeviceKey.generate()
    folder = LocalPayloads(place.parent)
    await asyncio.to_thread(folder.put, replacing_file(place).name, new.to_pem())

    def write(connection: Connection) -> None:
        current = current_of(connection)
        replaced_keys = [to_base64url(key) for key in history(connection, current).keys]
        connection.execute(sa.delete(successions))
        connection.execute(
            sa.update(server_keys)
            .where(server_keys.c.purpose == "server")
            .values(public_key=new.public)
        )
        connection.execute(sa.update(tasks).values(version=tasks.c.version + 1))
        audit.add(
            connection,
            clock(),
            audit.COMMAND,
            "server-key.activated",
            new.key_id,
            former=key_id_of(current),
            chain=False,
            replaced=replaced_keys,
        )

    chain_file(place).unlink(missing_ok=True)
    await database.write(write)
    await asyncio.to_thread(_settle, place, new.public, ())
    for file in (former_file(place), next_file(place)):
        file.unlink(missing_ok=True)
    return await standing(database, place)


def replaced(connection: Connection) -> list[bytes]:
    """The replaced public keys and their predecessors, which are no longer trusted, but signed the
    receipts of their time."""
    row = audit_log.c
    activated = sa.select(row.details).where(row.action == "server-key.activated").order_by(row.seq)
    return [
        from_base64url(key, 32)
        for details in connection.scalars(activated)
        for key in json.loads(details).get("replaced", ())
    ]


async def retire(database: Database, place: Path, clock: Callable[[], float]) -> Retired:
    """Delete FILE.former. Raises Conflict while a masked round is open that started under it."""
    file = former_file(place)
    if not file.exists():
        return Retired(erased=None)
    key = DeviceKey.from_pem(file.read_bytes())
    current = await database.read(_current)
    if current is None or key.public == current:
        raise ConfigurationError(
            f"{file} is the active key, not a former one", hint="name the files anew"
        )

    def newest_change(connection: Connection) -> float:
        return connection.execute(sa.select(sa.func.max(successions.c.active_at))).scalar() or 0.0

    changed_at = await database.read(newest_change)
    if any(each <= changed_at for each in await database.read(_open_masked)):
        raise Conflict(
            f"a masked round that started under key {key.key_id} is still open",
            hint="wait until it closes, or abort it (fedpress round abort)",
        )
    await database.write(
        lambda c: audit.add(c, clock(), audit.COMMAND, "server-key.retired", key.key_id)
    )
    file.unlink()
    return Retired(erased=key.key_id)
