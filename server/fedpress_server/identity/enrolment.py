"""How devices get in: tokens, and the requests that use them up."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Callable
from dataclasses import replace

from sqlalchemy.engine import Connection
from starlette.requests import Request

from fedpress_protocols.device_keys import Link, chain
from fedpress_protocols.errors import (
    AlreadyExists,
    InvalidSignature,
    InvalidToken,
    MalformedRequest,
    NotFound,
    TooManyRequests,
    UnknownDevice,
)
from fedpress_protocols.messages import EnrolRequest
from fedpress_protocols.signatures import Content, from_base64url, key_id_of, to_base64url
from fedpress_server.identity import audit
from fedpress_server.identity.admission import MOST_TOKENS, EnrolmentLimits
from fedpress_server.identity.authentication import Authenticator, bearer_token, hash_of, revoked
from fedpress_server.identity.limits import address_of
from fedpress_server.storage import identities, records
from fedpress_server.storage.database import Database
from fedpress_server.storage.identities import FormerKey
from fedpress_server.storage.records import Device, EnrolmentToken


class Enrolment:
    """Makes tokens, and takes devices in for them; `approve_each`: all wait for an operator."""

    def __init__(
        self,
        gate: Authenticator,
        database: Database,
        clock: Callable[[], float],
        limits: EnrolmentLimits,
        *,
        approve_each: bool,
    ) -> None:
        self._gate = gate
        self._database = database
        self._clock = clock
        self._limits = limits
        self._approve_each = approve_each

    # Tokens

    async def make_token(
        self, by: str, *, uses: int, expires_in: float, note: str, approve_each: bool = False
    ) -> tuple[str, EnrolmentToken]:
        """A new token, of which only the hash is kept. `by`: who has it made."""
        token, now = "fpe_" + secrets.token_urlsafe(24), self._clock()
        record = EnrolmentToken(
            token_id=secrets.token_urlsafe(12),
            token_hash=hash_of(token),
            uses=uses,
            used=0,
            created_at=now,
            expires_at=now + expires_in,
            note=note,
            approve_each=approve_each or self._approve_each,
        )

        def write(connection: Connection) -> None:
            records.add_token(connection, record)
            audit.add(
                connection,
                now,
                by,
                "token.created",
                record.token_id,
                uses=uses,
                expires_at=int(record.expires_at),
                approve_each=record.approve_each,
                note=note,
            )

        await self._database.write(write)
        self._limits.learn(record.token_hash)
        return token, record

    async def tokens(self, before: str | None, limit: int) -> list[EnrolmentToken]:
        """The newest tokens, those made before the token `before`. Raises NotFound."""

        def read(connection: Connection) -> list[EnrolmentToken]:
            at = None if before is None else _known(connection, before)
            return identities.tokens(connection, at, limit)

        return await self._database.read(read)

    async def revoke_token(self, token_id: str, by: str) -> EnrolmentToken:
        """No device enrols with it from now on; those that have, stay. Raises NotFound."""
        now = self._clock()

        def write(connection: Connection) -> EnrolmentToken:
            found = _known(connection, token_id)
            if found.revoked_at is not None:
                return found
            identities.revoke_token(connection, token_id, now)
            audit.add(connection, now, by, "token.revoked", token_id, used=found.used)
            return replace(found, revoked_at=now)

        revoked = await self._database.write(write)
        self._limits.forget(revoked.token_hash)
        return revoked

    # Devices

    async def enrol(self, request: Request, body: EnrolRequest) -> tuple[Device, bool]:
        """The device, and whether it is new.

        The same key with the same token is the same device, and uses the token up no further.
        Raises InvalidToken, AlreadyExists for a key enrolled with another token, UnknownDevice for
        one that is never to come back, TooManyRequests.
        """
        token_hash, now = hash_of(bearer_token(request)), self._clock()
        place = None
        if not self._limits.knows(token_hash):
            try:
                place = self._limits.place(address_of(request), token_hash, now)
            except TooManyRequests:
                await self._read_list(now)
                if not self._limits.knows(token_hash):
                    raise
        if place is None:
            self._limits.admit(now)
        try:
            device, is_new = await self._enrolled(request, body, token_hash, now)
        except (InvalidToken, InvalidSignature, MalformedRequest):
            self._limits.forget(token_hash)  # who sends it now pays for failures again
            raise
        if place is not None:
            place.was_good()
        if is_new:
            self._limits.learn(token_hash)
        await self._gate.know(device.client_id)
        return device, is_new

    async def _read_list(self, now: float) -> None:
        if self._limits.list_is_due(now):
            read = await self._database.read(
                lambda c: identities.live_tokens(c, now, MOST_TOKENS // 2)
            )
            for token_hash in read:
                self._limits.learn(token_hash)

    async def _enrolled(
        self, request: Request, body: EnrolRequest, token_hash: str, now: float
    ) -> tuple[Device, bool]:
        public_key = from_base64url(body.public_key, 32)
        content = self._gate.check_key(request, public_key)
        content.check(Content.of(await request.body()))
        links = chain(body.rotations)
        if links and links[-1].new != public_key:
            raise MalformedRequest("the changes of key do not lead to the key to be enrolled")
        first = links[0].old if links else public_key
        client_id = _client_id(first)
        if links and links[0].signed.rotation.client_id != client_id:
            raise MalformedRequest("the changes of key are not of the device with that first key")

        def look(connection: Connection) -> EnrolmentToken | Device:
            return _looked_up(connection, token_hash, public_key, client_id, links, now)

        # In a read first: what comes to nothing is not to wait for a writer's turn.
        found = await self._database.read(look)
        if isinstance(found, Device):
            return found, False
        await asyncio.to_thread(_check, links)

        def write(connection: Connection) -> tuple[Device, bool]:
            found = look(connection)
            if isinstance(found, Device):
                return found, False
            waits = found.approve_each or self._approve_each
            device = Device(
                client_id=client_id,
                key_id=key_id_of(public_key),
                public_key=public_key,
                name=body.name,
                token_id=found.token_id,
                enrolled_at=now,
                revoked_at=None,
                approval="waiting" if waits else "approved",
                rotated_at=now if links else None,
            )
            records.add_device(connection, device)
            if links:
                identities.retire_keys(connection, former(links, client_id, now))
            audit.add(
                connection,
                now,
                audit.by_device(client_id),
                "device.enrolled",
                client_id,
                key_id=device.key_id,
                token=found.token_id,
                approval=device.approval,
                former_keys=[link.old_id for link in links],
            )
            return device, True

        return await self._database.write(write)


def _known(connection: Connection, token_id: str) -> EnrolmentToken:
    found = identities.token(connection, token_id)
    if found is None:
        raise NotFound(f"no enrolment token {token_id[:64]!r}")
    return found


def _looked_up(
    connection: Connection,
    token_hash: str,
    public_key: bytes,
    client_id: str,
    links: tuple[Link, ...],
    now: float,
) -> EnrolmentToken | Device:
    """The token that lets the key in, or the device that it is already; raises as `enrol` does."""
    token = records.token_by_hash(connection, token_hash)
    if token is None:
        raise InvalidToken("the enrolment token is unknown")
    key_id = key_id_of(public_key)
    known = records.device_by_key(connection, key_id)
    if known is not None and known.revoked_at is not None:
        raise revoked(known)
    if identities.former_by_key(connection, [key_id]):
        raise UnknownDevice(
            f"device key {key_id} was replaced by another",
            hint="go on with the key that came after it, or enrol with a new one",
        )
    if known is not None and known.token_id == token.token_id:
        return known
    if token.revoked_at is not None:
        raise InvalidToken("the enrolment token was revoked")
    if now >= token.expires_at:
        raise InvalidToken("the enrolment token has expired")
    if token.used >= token.uses:
        raise InvalidToken("the enrolment token is used up")
    if known is not None:
        raise AlreadyExists("this device key was enrolled with another token")
    before = identities.device(connection, client_id)
    if before is not None:
        if before.revoked_at is not None:
            raise revoked(before)
        raise AlreadyExists(
            "this device is enrolled with an earlier key",
            hint="bring in the next by /v1/key-rotation",
        )
    earlier = [link.old_id for link in links]
    if earlier and (
        identities.devices_by_key(connection, earlier)
        or identities.former_by_key(connection, earlier)
    ):
        raise AlreadyExists("an earlier key of this device is, or was, another device's")
    return token


def former(links: tuple[Link, ...], client_id: str, now: float) -> list[FormerKey]:
    """The keys that a device has left with these statements."""
    return [
        FormerKey(
            key_id=link.old_id,
            client_id=client_id,
            public_key=link.old,
            next_key_id=link.new_id,
            retired_at=now,
            rotation=link.signed.model_dump(mode="json"),
        )
        for link in links
    ]


def _check(links: tuple[Link, ...]) -> None:
    for link in links:
        link.check()


def _client_id(public_key: bytes) -> str:
    """Of the key with which a device first enrolled. It is the same for one that is enrolled again,
    after records that knew it were lost: what the device has is under this name."""
    return to_base64url(hashlib.sha256(b"fedpress client\x00" + public_key).digest()[:12])
