"""Trust in the server's key: the one pinned at enrolment, or what a chain of
statements has led to from there. It lies in identity.json, so every process of the device agrees.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from fedpress_client.state import Identity, StateDirectory
from fedpress_protocols.errors import InvalidSignature, NotFound
from fedpress_protocols.key_rollover import ServerKeys, follow_rollovers
from fedpress_protocols.signatures import (
    from_base64url,
    key_id_of,
    to_base64url,
    verify_document,
)

_log = logging.getLogger(__name__)

FORMER_SECONDS = 24 * 3600.0
"""Time for which the previous key is believed once a device has followed it: of several servers,
one may hear of the change later than another. Afterwards a copy of the old key is worth nothing."""


class Source(Protocol):
    """The server, as far as its keys go."""

    def server_keys(self) -> ServerKeys: ...


class ServerTrust:
    """Believes `identity.server_key`, and follows it with the server's statements."""

    def __init__(
        self,
        directory: StateDirectory,
        identity: Identity,
        source: Source,
        now: Callable[[], float],
    ) -> None:
        self._directory, self._identity = directory, identity
        self._source, self._now = source, now

    def verify(self, document: Mapping[str, Any], context: str) -> None:
        """Raises InvalidSignature unless the server signed `document`, with its key of now or with
        one that a chain leads to, which is then the one that is pinned."""
        key_id = str(document.get("key_id"))
        verify_document(document, self._called(key_id) or self._follow(key_id), context=context)

    def believes(self, key: bytes) -> bool:
        """Whether `key` (32 bytes) is the server's, as `verify` finds it."""
        key_id = key_id_of(key)
        try:
            return key == (self._called(key_id) or self._follow(key_id))
        except InvalidSignature as exc:
            _log.warning("%s", exc)
            return False

    def _called(self, key_id: str) -> bytes | None:
        """A key that is believed without asking anybody."""
        identity = self._identity
        names = [identity.server_key]
        if identity.former_server_key and self._now() < identity.followed_at + FORMER_SECONDS:
            names.append(identity.former_server_key)
        keys = [from_base64url(name, 32) for name in names]
        return next((key for key in keys if key_id_of(key) == key_id), None)

    def _follow(self, key_id: str) -> bytes:
        with self._directory.alone():
            self._identity = self._directory.identity() or self._identity
            if (key := self._called(key_id)) is not None:
                return key  # another process of this device was first
            pinned = from_base64url(self._identity.server_key, 32)
            try:
                successions = self._source.server_keys().successions
            except NotFound:  # a server that has never heard of changing its key
                successions = ()
            chain = (pinned, *follow_rollovers(pinned, key_id, successions))
            former = (*self._identity.left_server_keys, *map(to_base64url, chain[:-1]))
            self._identity = self._identity.model_copy(
                update={
                    "server_key": to_base64url(chain[-1]),
                    "former_server_key": to_base64url(chain[-2]),
                    "followed_at": self._now(),
                    "left_server_keys": tuple(dict.fromkeys(former)),
                }
            )
            self._directory.enrolled(self._identity)
        _log.warning("the server signs with key %s now, and its key before says so", key_id)
        return chain[-1]


def pinned_anew(
    directory: StateDirectory, identity: Identity, server_key: str, source: Source
) -> Identity:
    """`identity` with the key that somebody who knows names as the server's (base64url), durably.

    Where a chain leads from that key to the one that is pinned, the latter is the newer, and stays.
    So it does where this device has left that key by a chain before: who has copied the old key
    need only keep silent about the chain.
    """
    replacement = from_base64url(server_key, 32)
    pinned = from_base64url(identity.server_key, 32)
    if replacement == pinned or server_key in {
        identity.former_server_key,
        *identity.left_server_keys,
    }:
        return identity
    try:
        follow_rollovers(replacement, key_id_of(pinned), source.server_keys().successions)
    except (InvalidSignature, NotFound):
        _log.warning(
            "server key %s is pinned in the place of %s", key_id_of(replacement), key_id_of(pinned)
        )
    else:
        return identity
    after = identity.model_copy(
        update={"server_key": server_key, "former_server_key": "", "followed_at": 0.0}
    )
    with directory.alone():
        directory.enrolled(after)
    return after
