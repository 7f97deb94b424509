"""How a request gets to its handler: who asks is known, and its body bounded, before it is read."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Coroutine
from typing import Any, cast

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError
from starlette.types import Message

from fedpress_protocols.errors import BodyTooLarge, DigestMismatch, MalformedRequest
from fedpress_protocols.messages import Identifier
from fedpress_protocols.signatures import Content
from fedpress_server import failpoints
from fedpress_server.identity.gatekeeper import Gatekeeper
from fedpress_server.storage.records import Device

MAX_JSON_BYTES = 2**20
_IDENTIFIER: TypeAdapter[str] = TypeAdapter(Identifier)
Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class BoundedRoute(APIRoute):
    """A JSON route: its body has at most MAX_JSON_BYTES."""

    def get_route_handler(self) -> Handler:
        handle = super().get_route_handler()

        async def bounded(request: Request) -> Response:
            content = await self.admit(request)
            if self.body_field is None:
                return await handle(request)
            body = await read_body(request, MAX_JSON_BYTES)
            if content is not None:
                content.check(Content.of(body))
            replayed = Request(request.scope, _once(body))
            return await handle(replayed)

        return bounded

    async def admit(self, request: Request) -> Content | None:
        """Raises unless the request may go on; what its body must be, if that is known."""
        return None


class DeviceRoute(BoundedRoute):
    """For an enrolled device: `device_of(request)` and `content_of(request)` in the handler."""

    is_asked_again = False
    """Whether what the request does fails if its device was revoked, and so writes nothing."""

    async def admit(self, request: Request) -> Content | None:
        gatekeeper = _gatekeeper(request)
        device, content = await gatekeeper.check_device(request, is_asked_again=self.is_asked_again)
        request.state.device, request.state.content = device, content
        if content.length and self.body_field is None and request.method in ("GET", "DELETE"):
            raise MalformedRequest(f"a {request.method} request with a body")
        return content


class UploadRoute(DeviceRoute):
    """For an enrolled device's upload. The endpoint takes the request, whose body is not read yet,
    and the assignment in its path, and answers itself: there is nothing else to be found for it,
    and a server does little but this."""

    is_asked_again = True

    def get_route_handler(self) -> Handler:
        async def admitted(request: Request) -> Response:
            await self.admit(request)
            try:
                assignment = _IDENTIFIER.validate_python(request.path_params["assignment"])
            except ValidationError as exc:
                raise MalformedRequest(f"path.assignment: {exc.errors()[0]['msg']}") from exc
            return cast(Response, await self.endpoint(request, assignment))

        return admitted


class OperatorRoute(BoundedRoute):
    """For whoever holds the admin token."""

    async def admit(self, request: Request) -> Content | None:
        _gatekeeper(request).check_admin(request)
        return None


class AnyoneKnownRoute(DeviceRoute):
    """For an enrolled device or the operator."""

    async def admit(self, request: Request) -> Content | None:
        if "authorization" in request.headers:
            _gatekeeper(request).check_admin(request)
            return None
        return await super().admit(request)


def device_of(request: Request) -> Device:
    return cast(Device, request.state.device)


def content_of(request: Request) -> Content:
    """What the signature says of the body."""
    return cast(Content, request.state.content)


async def read_body(request: Request, most: int, due: Content | None = None) -> bytes:
    """The body; raises BodyTooLarge past `most` bytes, DigestMismatch unless it is `due`."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > most:
        raise BodyTooLarge(f"a body of {declared} bytes where {most} are allowed", limit=most)
    received, digest = bytearray(), hashlib.sha256()
    async for chunk in request.stream():
        received += chunk
        digest.update(chunk)
        failpoints.reach("body-begun")
        if len(received) > most:
            raise BodyTooLarge(f"a body of more than {most} bytes", limit=most)
    if due is not None:
        due.check(Content(digest.digest(), len(received)))
    return bytes(received)


def check_digest(data: bytes, digest: str) -> None:
    """Raises DigestMismatch unless `digest` (hex) is the SHA-256 of `data`."""
    found = hashlib.sha256(data).hexdigest()
    if found != digest:
        raise DigestMismatch(f"a body of SHA-256 {found} under the name {digest}")


def _gatekeeper(request: Request) -> Gatekeeper:
    return cast(Gatekeeper, request.app.state.gatekeeper)


def _once(body: bytes) -> Callable[[], Coroutine[Any, Any, Message]]:
    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    return receive
