"""Which of a machine's keys signs, as the database has it.

A server's key is changed while servers run (`rotation`). The database says which key signs, and
since when; a server reads that again and again, and with every change of a task. What is to come
out the same on every server, the masked session of an attempt, goes by when the attempt was opened.
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
    """The public keys that have signed for a database, in order; each but the first since one of
    the times `since`, Unix seconds, later than every attempt that was opened before."""

    keys: tuple[bytes, ...]
    since: tuple[float, ...] = ()

    @property
    def newest(self) -> bytes:
        return self.keys[-1]

    def at(self, opened_at: float) -> bytes:
        """The key of an attempt's masked session."""
        return self.keys[bisect_left(self.since, opened_at)]


def history(connection: Connection, first: bytes) -> History:
    """What the database says; `first` is the key that signs if it says nothing."""
    query = (
        sa.select(successions.c.public_key, successions.c.successor, successions.c.active_at)
        .where(successions.c.active_at.is_not(None))
        .order_by(successions.c.active_at)
    )
    rows = connection.execute(query).all()
    if not rows:
        query = sa.select(server_keys.c.public_key).where(server_keys.c.purpose == "server")
        found = connection.execute(query).scalar_one_or_none()
        return History((first if found is None else bytes(found),))
    keys = (bytes(rows[0].public_key), *(bytes(row.successor) for row in rows))
    return History(keys, tuple(row.active_at for row in rows))


def statements(connection: Connection) -> list[SignedKeyRollover]:
    """Every change of key that has come into force, the oldest first."""
    query = (
        sa.select(successions.c.statement)
        .where(successions.c.active_at.is_not(None))
        .order_by(successions.c.active_at)
    )
    found = connection.execute(query).scalars()
    return [SignedKeyRollover.model_validate_json(text) for text in found]


class SigningKeys:
    """The keys that this machine has, and what it knows of the database's history.

    `load` reads the key files again. Values are replaced whole, so any thread may ask.
    """

    def __init__(self, ring: Ring, known: History, load: Callable[[], Ring]) -> None:
        self._load = load
        self._ring, self._known = ring, known

    @classmethod
    def of(cls, key: DeviceKey) -> SigningKeys:
        """One key for all time."""
        ring = {key.public: key}
        return cls(ring, History((key.public,)), lambda: ring)

    @property
    def current(self) -> DeviceKey:
        """What signs receipts: the newest key of the database that is here.

        Raises Unavailable where none of them is, as after a change without a chain.
        """
        ring, known = self._ring, self._known
        found = next((ring[key] for key in reversed(known.keys) if key in ring), None)
        if found is None:
            raise Unavailable(
                f"the database is signed for with server key {key_id_of(known.newest)}, and this "
                "machine has none of its keys",
                hint="copy the new key's file to this machine",
                retry_after=_RETRY_AFTER,
            )
        return found

    @property
    def first(self) -> bytes:
        """The public key that signed first, as far as the database says: changes with a chain
        leave it as it is, and one without (`rotation.replace`) begins anew."""
        return self._known.keys[0]

    @property
    def missing(self) -> str | None:
        """The id of the key that should sign and is not here; None if all is well."""
        newest = self._known.newest
        return None if newest in self._ring else key_id_of(newest)

    def at(self, opened_at: float) -> DeviceKey:
        """The key of the masked session of an attempt that was opened then (Unix seconds).

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
        """Whether what the key of this id has signed is to be signed anew: it is neither the
        current key nor one after it, of which this machine may not have the file yet.

        Raises Unavailable as `current` does.
        """
        ids = [key_id_of(key) for key in self._known.keys]
        return key_id not in ids[ids.index(self.current.key_id) :]

    def read(self, connection: Connection) -> None:
        """Take in what the database says by now."""
        known = history(connection, self._known.keys[0])
        if known == self._known and known.newest in self._ring:
            return
        is_news = known != self._known
        if known.newest not in self._ring:
            self._ring = {**self._ring, **self._load()}
        self._known = known
        if is_news and self.missing is None:
            _log.warning("signing with server key %s from now on", self.current.key_id)
        elif is_news:
            _log.error(
                "the database is signed for with server key %s, which is not on this machine: copy "
                "the new key's file here; until then the newest of its keys that is here signs, "
                "which devices believe for a day, and where there is none nothing is signed",
                self.missing,
            )
