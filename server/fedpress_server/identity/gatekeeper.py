"""Who is asking: enrolment, signed requests, the operator's token.

Devices are kept in memory where one process serves them all; what changes is on the disk first.
Where several do, each request asks the database who is enrolled, and one that may change something
leaves its nonce there.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable
from dataclasses import replace

from sqlalchemy.engine import Connection
from starlette.requests import Request

from fedpress_protocols.errors import (
    AlreadyExists,
    InvalidSignature,
    InvalidToken,
    MalformedRequest,
    NotFound,
    ReplayedRequest,
    UnknownDevice,
)
from fedpress_protocols.messages import EnrolRequest
from fedpress_protocols.signatures import (
    Content,
    ParsedSignature,
    ReplayGuard,
    Target,
    from_base64url,
    key_id_of,
    parse_signature,
    signed_headers,
    to_base64url,
    verify_request,
)
from fedpress_server.storage import records
from fedpress_server.storage.database import Database
from fedpress_server.storage.records import Device, EnrolmentToken

_CHANGING = ("POST", "DELETE")
"""Methods of requests that may do something more when they come again. To repeat a GET tells what
it told; a PUT and a PATCH name the bytes and their place."""
_REMEMBERED = 60.0
"""Seconds for which a device is taken to be enrolled that is asked again before it matters."""
_MOST_REMEMBERED = 65536
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}


class Gatekeeper:
    """Tells devices from strangers, by headers alone; `start()` reads who is enrolled."""

    def __init__(
        self,
        database: Database,
        clock: Callable[[], float],
        *,
        admin_token: str | None,
        clock_skew: float,
        is_shared: bool | None = None,
    ) -> None:
        """`is_shared`: whether other servers see devices too; None: as the database says."""
        self._is_shared = database.is_shared if is_shared is None else is_shared
        self._database = database
        self._clock = clock
        self._admin = _hash(admin_token) if admin_token else None
        self._clock_skew = clock_skew
        self._devices: dict[str, Device] = {}
        self._read: dict[str, tuple[float, Device]] = {}
        """Where other servers see devices too: whom this one read of, and when."""
        self._guard = ReplayGuard(opened=clock())

    async def start(self) -> None:
        for device in await self._database.read(records.devices):
            self._devices[device.key_id] = device

    # Requests

    async def check_device(
        self, request: Request, *, is_asked_again: bool = False
    ) -> tuple[Device, Content]:
        """The device that signed the request, and the body that it must turn out to have.

        One that `is_asked_again`, when what it sends is written, may have been read a moment ago.

        Raises one of the Unauthorized family, LengthRequired or MalformedRequest.
        """
        headers = signed_headers(request.scope["headers"])
        parsed = parse_signature(headers)
        device = await self._device(parsed.key_id, is_asked_again)
        if device is None or device.revoked_at is not None:
            what = "was never enrolled" if device is None else "was revoked"
            raise UnknownDevice(f"device key {parsed.key_id} {what}")
        now = self._clock()
        content = self._verify(request, parsed, headers, device.public_key, now)
        self._guard.check(parsed, now)
        if self._is_shared and request.method in _CHANGING:
            await self._remember(parsed)
        return device, content

    async def _device(self, key_id: str, may_be_old: bool) -> Device | None:
        if not self._is_shared:
            return self._devices.get(key_id)
        now = self._clock()
        read_at, device = self._read.get(key_id, (0.0, None))
        if not may_be_old or device is None or not 0 <= now - read_at < _REMEMBERED:
            device = await self._database.read(lambda c: records.device_by_key(c, key_id))
            self._read.pop(key_id, None)
            while len(self._read) >= _MOST_REMEMBERED:
                del self._read[next(iter(self._read))]
            if device is not None:
                self._read[key_id] = now, device
        return device

    async def _remember(self, parsed: ParsedSignature) -> None:
        """Raises ReplayedRequest if another server has seen the request."""
        nonce = to_base64url(parsed.nonce)
        is_new = await self._database.write(
            lambda c: records.add_nonce(c, parsed.key_id, nonce, parsed.expires)
        )
        if not is_new:
            raise ReplayedRequest(f"nonce {nonce} of key {parsed.key_id} was used before")

    def check_key(self, request: Request, public_key: bytes) -> Content:
        """That the request is signed by `public_key`, which is nobody's yet.

        It may come again: enrolment is idempotent, and the memory of nonces is for the devices,
        so that strangers cannot fill it.
        """
        headers = signed_headers(request.scope["headers"])
        parsed = parse_signature(headers)
        if parsed.key_id != key_id_of(public_key):
            raise InvalidSignature(f"signed by key {parsed.key_id}, not by the one to be enrolled")
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

    def check_admin(self, request: Request) -> None:
        """Raises InvalidToken; where no admin token is set, always."""
        token = bearer_token(request)
        if self._admin is None:
            raise InvalidToken(
                "this server has no admin token",
                hint="set FEDPRESS_ADMIN_TOKEN or FEDPRESS_ADMIN_TOKEN_FILE and restart it",
            )
        if not hmac.compare_digest(_hash(token).encode(), self._admin.encode()):
            raise InvalidToken("the admin token is wrong", hint="use the server's own")

    # Enrolment

    async def make_token(self, *, uses: int, expires_in: float, note: str) -> tuple[str, float]:
        """A new enrolment token, of which only the hash is kept, and when it expires."""
        token, now = "fpe_" + secrets.token_urlsafe(24), self._clock()
        record = EnrolmentToken(
            token_id=secrets.token_urlsafe(12),
            token_hash=_hash(token),
            uses=uses,
            used=0,
            created_at=now,
            expires_at=now + expires_in,
            note=note,
        )
        await self._database.write(lambda c: records.add_token(c, record))
        return token, record.expires_at

    async def enrol(self, request: Request, body: EnrolRequest) -> tuple[Device, bool]:
        """The device, and whether it is new.

        The same key with the same token is the same device, and uses the token up no further.
        Raises InvalidToken, or AlreadyExists for a key enrolled with another token.
        """
        token_hash = _hash(bearer_token(request))
        public_key = from_base64url(body.public_key, 32)
        content = self.check_key(request, public_key)
        content.check(Content.of(await request.body()))
        now = self._clock()

        def write(connection: Connection) -> tuple[Device, bool]:
            token = records.token_by_hash(connection, token_hash)
            if token is None:
                raise InvalidToken("the enrolment token is unknown")
            known = records.device_by_key(connection, key_id_of(public_key))
            if known is not None and known.revoked_at is not None:
                raise UnknownDevice(
                    "this device key was revoked", hint="make a new key and ask for a new token"
                )
            if known is not None and known.token_id == token.token_id:
                return known, False
            if now >= token.expires_at:
                raise InvalidToken("the enrolment token has expired")
            if token.used >= token.uses:
                raise InvalidToken("the enrolment token is used up")
            if known is not None:
                raise AlreadyExists("this device key was enrolled with another token")
            device = Device(
                client_id=_client_id(public_key),
                key_id=key_id_of(public_key),
                public_key=public_key,
                name=body.name,
                token_id=token.token_id,
                enrolled_at=now,
                revoked_at=None,
            )
            records.add_device(connection, device)
            return device, True

        device, is_new = await self._database.write(write)
        self._devices.setdefault(device.key_id, device)
        return device, is_new

    async def devices(self) -> list[Device]:
        found = await self._database.read(records.devices)
        return sorted(found, key=lambda device: device.enrolled_at)

    async def revoke(self, client_id: str) -> Device:
        """From now on the device is a stranger; what it has had acknowledged, stays."""
        for device in await self.devices():
            if device.client_id == client_id:
                break
        else:
            raise NotFound(f"no client {client_id[:64]!r}")
        if device.revoked_at is None:
            device = replace(device, revoked_at=self._clock())
            at = device.revoked_at
            await self._database.write(lambda c: records.revoke_device(c, client_id, at or 0.0))
            self._devices[device.key_id] = device
        return device


def bearer_token(request: Request) -> str:
    """Raises InvalidToken if there is none."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        raise InvalidToken("the request carries no bearer token", hint="send Authorization: Bearer")
    return token.strip()


def target_of(request: Request, headers: dict[str, str]) -> Target:
    """The request line and the Host as they came, which is what was signed."""
    scope = request.scope
    host = headers.get("host")
    if host is None:
        raise MalformedRequest("the request has no Host header")
    authority = host.lower().removesuffix(_DEFAULT_PORTS.get(scope["scheme"], ""))
    raw_path: bytes = scope.get("raw_path") or scope["path"].encode()
    query: bytes = scope.get("query_string", b"")
    path = raw_path.partition(b"?")[0]
    return Target(scope["method"], authority, path.decode("latin-1"), query.decode("latin-1"))


def _client_id(public_key: bytes) -> str:
    """The same for a key that is enrolled again, after records that knew it were lost: what the
    device has is under this name."""
    return to_base64url(hashlib.sha256(b"fedpress client\x00" + public_key).digest()[:12])


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()
