"""Authentication of devices by signed requests.

A single process caches all devices in memory; changes are on disk first. With several servers, each
request asks the database for the device, those that wait together in one query, and a request that
changes something stores its nonce there before it does. Checks that are repeated in the writing
transaction may be cached for a while; a server that changes a device invalidates the caches of the
others.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from sqlalchemy.engine import Connection
from starlette.requests import Request

from fedpress_protocols.errors import (
    DeviceNotApproved,
    DeviceRejected,
    FedpressError,
    InvalidSignature,
    InvalidToken,
    MalformedRequest,
    ReplayedRequest,
    Unavailable,
    UnknownDevice,
)
from fedpress_protocols.signatures import (
    Content,
    ParsedSignature,
    ReplayGuard,
    Target,
    key_id_of,
    parse_signature,
    signed_headers,
    to_base64url,
    verify_request,
)
from fedpress_server.storage import identities, records
from fedpress_server.storage.batched import Batched
from fedpress_server.storage.database import Database
from fedpress_server.storage.identities import FormerKey, Sighting
from fedpress_server.storage.records import Device, Nonce

_CHANGING = ("POST", "DELETE")
"""Methods whose repetition could have an effect. A repeated GET returns the same; a PUT and a PATCH
name the bytes and their offset."""
_READING = "GET"
"""The method whose nonces are not stored: a device sends mostly these, and anyone who can replay
one has seen its answer. A HEAD interrupts the part of a running upload.
"""
_REMEMBERED = 60.0
"""Seconds for which an enrolled device is cached where the writing transaction checks it again."""
_MOST_REMEMBERED = 65536
SEEN_EVERY = 3600.0
"""Seconds between two notes that a device was seen: a fleet of 10,000 costs three rows a second."""
_AGENT_CHARACTERS = 64
_TOPIC = "@devices"
"""Prefix of notifications to other servers about a changed device; no task name starts with it."""
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}


class Authenticator:
    """Authenticates devices by headers alone; `start()` loads the enrolled devices."""

    def __init__(
        self,
        database: Database,
        clock: Callable[[], float],
        *,
        clock_skew: float,
        approval_poll: float = 30.0,
        is_shared: bool | None = None,
        skewed: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        """`is_shared`: whether other servers see devices too; None: as the database says.
        `approval_poll`: seconds after which a device that waits for approval may ask again.
        `skewed` is told how far each device's clock is ahead of this one, in seconds."""
        self._is_shared = database.is_shared if is_shared is None else is_shared
        self._database = database
        self._clock = clock
        self._clock_skew = clock_skew
        self._approval_poll = approval_poll
        self._skewed = skewed
        self._devices: dict[str, Device] = {}
        """By key id. Empty if other servers may change devices."""
        self._former: set[str] = set()
        """Ids of replaced keys; empty likewise."""
        self._read: dict[str, tuple[float, Device]] = {}
        """If other servers may change devices: cached devices with their read times."""
        self._looking = asyncio.Lock()
        self._guard = ReplayGuard(opened=clock())
        self._by_key = Batched(self._devices_of)
        self._store_nonce = Batched(self._store_nonces)
        self._note = Batched(self._note_all)

    async def start(self) -> None:
        if self._is_shared:
            loop = asyncio.get_running_loop()

            def heard(topic: str | None) -> None:
                if topic in (None, _TOPIC):
                    with suppress(RuntimeError):  # the loop has ended
                        loop.call_soon_threadsafe(self._read.clear)

            self._database.listen(heard)
            return
        for device in await self._database.read(records.devices):
            self._devices[device.key_id] = device
        self._former.update(await self._database.read(identities.former_key_ids))

    # Changes of devices

    def announce(self, connection: Connection) -> None:
        """Invalidate the caches of other servers once this is committed."""
        self._database.notify(connection, _TOPIC)

    async def know(self, client_id: str) -> None:
        """One that is enrolled, as it is by now: it may have been revoked since that was read."""
        if not self._is_shared:
            await self.look_again(client_id)

    async def look_again(self, client_id: str) -> Device | None:
        """Know a device by what the database says now, whatever became of a write."""
        self._read.clear()
        if self._is_shared:
            return await self._database.read(lambda c: identities.device(c, client_id))

        def read(connection: Connection) -> tuple[Device | None, list[FormerKey]]:
            device = identities.device(connection, client_id)
            return device, identities.former_of(connection, client_id)

        async with self._looking:  # what was read first is not to be known last
            device, former = await self._database.read(read)
            for each in former:
                self._devices.pop(each.key_id, None)
                self._former.add(each.key_id)
            if device is not None:
                self._devices[device.key_id] = device
        return device

    # Requests

    async def check_device(
        self, request: Request, *, is_asked_again: bool = False, is_spent_later: bool = False
    ) -> tuple[Device, Content]:
        """The device that signed the request, and the body that it must turn out to have.

        One that `is_asked_again`, when what it sends is written, may have been read a moment ago.
        A request that `is_spent_later` changes nothing before `spend`.

        Raises one of the Unauthorized family, LengthRequired or MalformedRequest.
        """
        headers = signed_headers(request.scope["headers"])
        parsed = parse_signature(headers)
        device = await self._device(parsed.key_id, is_asked_again)
        if device is None:
            raise await self.stranger(parsed.key_id)
        if device.revoked_at is not None:
            raise revoked(device)
        now = self._clock()
        content = self._verify(request, parsed, headers, device.public_key, now)
        if device.approval != "approved":  # before storing its nonce
            raise self.unapproved(device)
        if request.method != _READING:
            self._guard.check(parsed, now)
        self._skewed(parsed.created - now)
        if request.method in _CHANGING and not is_spent_later:
            await self._spend(parsed)
        await self._see(device, request.headers.get("user-agent", ""), parsed.created, now)
        return device, content

    async def _see(self, device: Device, agent: str, created: float, now: float) -> None:
        """Note that the device was seen, if it was not within SEEN_EVERY. Where that cannot be
        written, a later request notes it."""
        if device.seen_at is not None and 0 <= now - device.seen_at < SEEN_EVERY:
            return
        legible = "".join(each for each in agent if each.isprintable())[:_AGENT_CHARACTERS]
        seen = Sighting(device.client_id, now, legible, created - now)
        try:
            await self._note(seen)
        except Unavailable:
            return

        def noted(known: Device) -> Device:
            return replace(known, seen_at=now, agent=legible, clock_ahead=seen.clock_ahead)

        if (known := self._devices.get(device.key_id)) is not None:
            self._devices[device.key_id] = noted(known)
        if (cached := self._read.get(device.key_id)) is not None:
            self._read[device.key_id] = cached[0], noted(cached[1])

    async def _note_all(self, sightings: Sequence[Sighting]) -> list[None]:
        await self._database.write(lambda c: identities.note_sightings(c, sightings), locks=True)
        return [None] * len(sightings)

    async def spend(self, request: Request) -> None:
        """Store the nonce of a checked request that is about to change something: none does so
        twice, whatever servers it is sent to. Raises ReplayedRequest."""
        await self._spend(parse_signature(signed_headers(request.scope["headers"])))

    async def _device(self, key_id: str, may_be_old: bool) -> Device | None:
        if not self._is_shared:
            return self._devices.get(key_id)
        now = self._clock()
        read_at, device = self._read.get(key_id, (0.0, None))
        if not may_be_old or device is None or not 0 <= now - read_at < _REMEMBERED:
            device = await self._by_key(key_id)
            self._read.pop(key_id, None)
            while len(self._read) >= _MOST_REMEMBERED:
                del self._read[next(iter(self._read))]
            if device is not None:
                self._read[key_id] = now, device
        return device

    async def _devices_of(self, key_ids: Sequence[str]) -> list[Device | None]:
        found = await self._database.read(
            lambda c: identities.devices_by_key(c, key_ids), snapshot=False
        )
        return [found.get(key_id) for key_id in key_ids]

    async def _spend(self, parsed: ParsedSignature) -> None:
        if not self._is_shared:
            return  # this process's own memory has it
        nonce = to_base64url(parsed.nonce)
        if not await self._store_nonce((parsed.key_id, nonce, parsed.expires)):
            raise ReplayedRequest(f"nonce {nonce} of key {parsed.key_id} was used before")

    async def _store_nonces(self, nonces: Sequence[Nonce]) -> list[bool]:
        return await self._database.write(lambda c: records.add_nonces(c, nonces), locks=True)

    async def stranger(self, key_id: str) -> UnknownDevice:
        """The error for a key of no device."""
        was_known = key_id in self._former
        if self._is_shared:
            former_keys = await self._database.read(lambda c: identities.former_by_key(c, [key_id]))
            was_known = key_id in former_keys
        if was_known:
            return UnknownDevice(
                f"device key {key_id} was replaced by another",
                hint="if this device did not rotate it, somebody else has a copy of its key: have "
                "the operator revoke the device",
            )
        return UnknownDevice(f"device key {key_id} was never enrolled")

    def unapproved(self, device: Device) -> FedpressError:
        """The error for a device that is waiting or rejected."""
        if device.approval == "rejected":
            return DeviceRejected(f"an operator has rejected this device, key {device.key_id}")
        return DeviceNotApproved(
            f"this device, key {device.key_id}, waits for an operator's approval",
            retry_after=self._approval_poll,
            key_id=device.key_id,
        )

    def signer_of(self, request: Request) -> str:
        """The key id that the request claims; nothing is verified."""
        return parse_signature(signed_headers(request.scope["headers"])).key_id

    def check_key(self, request: Request, public_key: bytes) -> Content:
        """Verify that the request is signed by `public_key`, of a device or not.

        Replays are allowed: enrolment and key rotation are idempotent, and nonces are only stored
        for devices, so that strangers cannot exhaust the memory.
        """
        headers = signed_headers(request.scope["headers"])
        parsed = parse_signature(headers)
        if parsed.key_id != key_id_of(public_key):
            raise InvalidSignature(f"signed by key {parsed.key_id}, expected the key to enrol")
        return self._verify(request, parsed, headers, public_key, self._clock())

    def _verify(
        self,
        request: Request,
        parsed: ParsedSignature,
        headers: dict[str, str],
        public_key: bytes,
        now: float,
    ) -> Content:
        return verify_request(
            parsed,
            public_key,
            target_of(request, headers),
            headers,
            now=now,
            max_skew=self._clock_skew,
        )


def bearer_token(request: Request) -> str:
    """The bearer token of the request; raises InvalidToken if there is none."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        raise InvalidToken("the request carries no bearer token", hint="send Authorization: Bearer")
    return token.strip()


def target_of(request: Request, headers: dict[str, str]) -> Target:
    """The signed target: request line and Host as received."""
    scope = request.scope
    host = headers.get("host")
    if host is None:
        raise MalformedRequest("the request has no Host header")
    authority = host.lower().removesuffix(_DEFAULT_PORTS.get(scope["scheme"], ""))
    raw_path: bytes = scope.get("raw_path") or scope["path"].encode()
    query: bytes = scope.get("query_string", b"")
    path = raw_path.partition(b"?")[0]
    return Target(scope["method"], authority, path.decode("latin-1"), query.decode("latin-1"))


def revoked(device: Device) -> UnknownDevice:
    """The error for a revoked device."""
    return UnknownDevice(
        f"device key {device.key_id} was revoked",
        hint="an operator may enrol the device again, with a new state directory and a new token",
    )


def hash_of(token: str) -> str:
    """The hash of a token, as stored."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()
