"""Enrolment of devices: tokens, and the requests that use them."""

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
    """Creates tokens and enrols devices with them; `approve_each`: all wait for approval."""

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
        """Create a token, of which only the hash is stored. `by` is the actor."""
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
        """The newest tokens created before the token `before`. Raises NotFound."""

        def read(connection: Connection) -> list[EnrolmentToken]:
            at = None if before is None else _known(connection, before)
            return identities.tokens(connection, at, limit)

        return await self._database.read(read)

    async def revoke_token(self, token_id: str, by: str) -> EnrolmentToken:
        """Revoke a token; devices that enrolled with it stay. Raises NotFound."""
        now = self._clock()

        def write(connection: Connection) -> EnrolmentToken:
            token = _known(connection, token_id)
            if token.revoked_at is not None:
                return token
            identities.revoke_token(connection, token_id, now)
            audit.add(connection, now, by, "token.revoked", token_id, used=token.used)
            return replace(token, revoked_at=now)

        revoked = await self._database.write(write)
        self._limits.forget(revoked.token_hash)
        return revoked

    # Devices

    async def enrol(self, request: Request, body: EnrolRequest) -> tuple[Device, bool]:
        """Enrol a device; returns it and whether it is new.

        Idempotent: the same key with the same token is the same device and uses the token once.
        Raises InvalidToken, AlreadyExists for a key enrolled with another token, UnknownDevice for
        a revoked or replaced key, TooManyRequests.
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
            self._limits.forget(
                token_hash
            )  # further requests with it spend from the failure budget again
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
            raise MalformedRequest("the key rotations do not lead to the key to enrol")
        first = links[0].old if links else public_key
        client_id = _client_id(first)
        if links and links[0].signed.rotation.client_id != client_id:
            raise MalformedRequest(
                "the key rotations do not belong to the device with that first key"
            )

        def look(connection: Connection) -> EnrolmentToken | Device:
            return _looked_up(connection, token_hash, public_key, client_id, links, now)

        # Read first: a request that will be refused must not wait for the writer.
        match = await self._database.read(look)
        if isinstance(match, Device):
            return match, False
        await asyncio.to_thread(_check, links)

        def write(connection: Connection) -> tuple[Device, bool]:
            match = look(connection)
            if isinstance(match, Device):
                return match, False
            waits = match.approve_each or self._approve_each
            device = Device(
                client_id=client_id,
                key_id=key_id_of(public_key),
                public_key=public_key,
                name=body.name,
                token_id=match.token_id,
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
                token=match.token_id,
                approval=device.approval,
                former_keys=[link.old_id for link in links],
            )
            return device, True

        return await self._database.write(write)


def _known(connection: Connection, token_id: str) -> EnrolmentToken:
    token = identities.token(connection, token_id)
    if token is None:
        raise NotFound(f"no enrolment token {token_id[:64]!r}")
    return token


def _looked_up(
    connection: Connection,
    token_hash: str,
    public_key: bytes,
    client_id: str,
    links: tuple[Link, ...],
    now: float,
) -> EnrolmentToken | Device:
    """The token for the key, or the device that already has it; raises like `enrol`."""
    token = records.token_by_hash(connection, token_hash)
    if token is None:
        raise InvalidToken("the enrolment token is unknown")
    key_id = key_id_of(public_key)
    device = records.device_by_key(connection, key_id)
    if device is not None and device.revoked_at is not None:
        raise revoked(device)
    if identities.former_by_key(connection, [key_id]):
        raise UnknownDevice(
            f"device key {key_id} was replaced by another",
            hint="use the key that replaced it, or enrol with a new one",
        )
    if device is not None and device.token_id == token.token_id:
        return device
    if token.revoked_at is not None:
        raise InvalidToken("the enrolment token was revoked")
    if now >= token.expires_at:
        raise InvalidToken("the enrolment token has expired")
    if token.used >= token.uses:
        raise InvalidToken("the enrolment token is used up")
    if device is not None:
        raise AlreadyExists("this device key was enrolled with another token")
    before = identities.device(connection, client_id)
    if before is not None:
        if before.revoked_at is not None:
            raise revoked(before)
        raise AlreadyExists(
            "this device is enrolled with an earlier key",
            hint="register the next key with POST /v1/key-rotation",
        )
    earlier = [link.old_id for link in links]
    if earlier and (
        identities.devices_by_key(connection, earlier)
        or identities.former_by_key(connection, earlier)
    ):
        raise AlreadyExists("an earlier key of this device is, or was, another device's")
    return token


def former(links: tuple[Link, ...], client_id: str, now: float) -> list[FormerKey]:
    """The keys that these statements replace."""
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
    """The client id, derived from the key of the first enrolment, so that a device that enrols
    again after its records were lost keeps its id and its local state."""
    return to_base64url(hashlib.sha256(b"fedpress client\x00" + public_key).digest()[:12])
