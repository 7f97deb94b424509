"""Selection of the signing key among a machine's keys, by the database.

A server's key is rotated while servers run (`rotation`). The database has the active key and its
start time; a server reads it periodically, and with every change of a task. A masked session must
be the same on every server, so its key is the one that was active when the attempt was opened.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from fedpress_protocols.errors import Unavailable
from fedpress_protocols.key_rollover import SignedKeyRollover
from fedpress_protocols.signatures import DeviceKey, key_id_of
from fedpress_server.storage.tables import server_key_successions as successions
from fedpress_server.storage.tables import server_keys

_RETRY_AFTER = 5
"""Seconds."""
_log = logging.getLogger(__name__)
Ring = Mapping[bytes, DeviceKey]
"""The private keys of this machine, by their public halves."""


class KeyIsElsewhere(LookupError):
    """An attempt was opened under a key that this machine does not have."""


@dataclass(frozen=True, slots=True)
class History:
    """The signing keys of a database in order; `since` has the start time of each but the first,
    Unix seconds, later than every attempt that was opened before."""

    keys: tuple[bytes, ...]
    since: tuple[float, ...] = ()

    @property
    def newest(self) -> bytes:
        return self.keys[-1]

    def at(self, opened_at: float) -> bytes:
        """The key of an attempt's masked session."""
        return self.keys[bisect_left(self.since, opened_at)]


def history(connection: Connection, first: bytes) -> History:
    """The history in the database; `first` is the active key if it has none."""
    query = (
        sa.select(successions.c.public_key, successions.c.successor, successions.c.active_at)
        .where(successions.c.active_at.is_not(None))
        .order_by(successions.c.active_at)
    )
    rows = connection.execute(query).all()
    if not rows:
        query = sa.select(server_keys.c.public_key).where(server_keys.c.purpose == "server")
        key = connection.execute(query).scalar_one_or_none()
        return History((first if key is None else bytes(key),))
    keys = (bytes(rows[0].public_key), *(bytes(row.successor) for row in rows))
    return History(keys, tuple(row.active_at for row in rows))


def statements(connection: Connection) -> list[SignedKeyRollover]:
    """All active rollovers, oldest first."""
    query = (
        sa.select(successions.c.statement)
        .where(successions.c.active_at.is_not(None))
        .order_by(successions.c.active_at)
    )
    texts = connection.execute(query).scalars()
    return [SignedKeyRollover.model_validate_json(text) for text in texts]


class SigningKeys:
    """This machine's keys, and its copy of the database's key history.

    `load` reads the key files again. Values are replaced atomically, so it is thread-safe.
    """

    def __init__(self, ring: Ring, key_history: History, load: Callable[[], Ring]) -> None:
        self._load = load
        self._ring, self._known = ring, key_history

    @classmethod
    def of(cls, key: DeviceKey) -> SigningKeys:
        """A single key without rollovers."""
        ring = {key.public: key}
        return cls(ring, History((key.public,)), lambda: ring)

    @property
    def current(self) -> DeviceKey:
        """The key for receipts: the newest key of the database on this machine.

        Raises Unavailable if there is none, as after a replacement without a chain.
        """
        ring, key_history = self._ring, self._known
        newest = next((ring[key] for key in reversed(key_history.keys) if key in ring), None)
        if newest is None:
            raise Unavailable(
                f"the database's server key is {key_id_of(key_history.newest)}, but this machine "
                "has none of its keys",
                hint="copy the new key's file to this machine",
                retry_after=_RETRY_AFTER,
            )
        return newest

    @property
    def first(self) -> bytes:
        """The first public key in the database's history: rollovers keep it, a replacement without
        a chain (`rotation.replace`) resets it."""
        return self._known.keys[0]

    @property
    def missing(self) -> str | None:
        """The id of the active key if it is missing on this machine; None otherwise."""
        newest = self._known.newest
        return None if newest in self._ring else key_id_of(newest)

    def at(self, opened_at: float) -> DeviceKey:
        """The key for the masked session of an attempt opened at this time (Unix seconds).

        Raises KeyIsElsewhere.
        """
        key = self._known.at(opened_at)
        try:
            return self._ring[key]
        except KeyError:
            raise KeyIsElsewhere(
                f"a masked round was opened under server key {key_id_of(key)}, which is not on "
                "this machine: put its file back beside the newer one, or abort the round"
            ) from None

    def is_outdated(self, key_id: str) -> bool:
        """Whether a document of this key must be signed again: the key is neither the current one
        nor a later one, whose file this machine may not have yet.

        Raises Unavailable like `current`.
        """
        ids = [key_id_of(key) for key in self._known.keys]
        return key_id not in ids[ids.index(self.current.key_id) :]

    def read(self, connection: Connection) -> None:
        """Read the database's current key history."""
        key_history = history(connection, self._known.keys[0])
        if key_history == self._known and key_history.newest in self._ring:
            return
        is_news = key_history != self._known
        if key_history.newest not in self._ring:
            self._ring = {**self._ring, **self._load()}
        self._known = key_history
        if is_news and self.missing is None:
            _log.warning("signing with server key %s from now on", self.current.key_id)
        elif is_news:
            _log.error(
                "the database's server key is %s, which is not on this machine: copy "
                "the new key's file here; until then the newest of its keys on this machine signs, "
                "which devices accept for a day; without any, nothing is signed",
                self.missing,
            )
