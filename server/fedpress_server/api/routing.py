"""Route classes: authenticate a request and bound its body before the body is read."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Request, Response
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError
from starlette.types import Message

from fedpress_protocols.errors import BodyTooLarge, DigestMismatch, MalformedRequest, NotFound
from fedpress_protocols.messages import CheckInRequest, Identifier
from fedpress_protocols.plan import Name
from fedpress_protocols.signatures import Content
from fedpress_protocols.validation import format_validation_errors
from fedpress_server import failpoints
from fedpress_server.api.listeners import listener_of, services_of
from fedpress_server.api.permissions import permission_of
from fedpress_server.identity.authentication import bearer_token
from fedpress_server.observing import traces
from fedpress_server.storage.records import Device

MAX_JSON_BYTES = 2**20
_IDENTIFIER: TypeAdapter[str] = TypeAdapter(Identifier)
_NAME: TypeAdapter[str] = TypeAdapter(Name)
_PIECE = 2**20
"""Bytes of a body that are written to a file at a time."""
T = TypeVar("T")
Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class BoundedRoute(APIRoute):
    """A JSON route with a body of at most `most_bytes`, which arrives in `most_seconds`."""

    most_bytes = MAX_JSON_BYTES
    most_seconds: float | None = None

    def get_route_handler(self) -> Handler:
        handle = super().get_route_handler()

        async def bounded(request: Request) -> Response:
            content = await self.admit(request)
            if self.body_field is None:
                return await handle(request)
            try:
                async with asyncio.timeout(self.most_seconds):
                    body = await read_body(request, self.most_bytes)
            except TimeoutError as exc:
                raise MalformedRequest(
                    f"the body took longer than {self.most_seconds:g} s", hint="send it again"
                ) from exc
            if content is not None:
                content.check(Content.of(body))
            check_keys(body)
            replayed = Request(request.scope, _once(body))
            return await handle(replayed)

        return bounded

    async def admit(self, request: Request) -> Content | None:
        """Authorize the request, or raise; returns the required content of its body, if known."""
        return None


class DeviceRoute(BoundedRoute):
    """A route for enrolled devices: `device_of(request)` and `content_of(request)` in the
    handler."""

    is_asked_again = False
    """Whether the handler's transaction checks again that the device is not revoked."""
    is_spent_later = False
    """Whether the handler itself spends the request, if it comes to change something."""

    async def admit(self, request: Request) -> Content | None:
        authenticator = (await services_of(request)).authenticator
        with traces.span("verify"):
            device, content = await authenticator.check_device(
                request,
                is_asked_again=self.is_asked_again,
                is_spent_later=self.is_spent_later,
            )
        request.state.device, request.state.content = device, content
        if content.length and self.body_field is None and request.method in ("GET", "DELETE"):
            raise MalformedRequest(f"a {request.method} request with a body")
        return content


class SignedRoute(BoundedRoute):
    """A route for signed requests of anybody; the handler checks the key and its permissions.

    Strangers come this far, so a body may neither be large nor stay long.
    """

    most_bytes = 2**17  # a little more than MAX_ROTATIONS need
    most_seconds = 30.0

    async def admit(self, request: Request) -> Content | None:
        (await services_of(request)).authenticator.signer_of(request)
        return None


class EnrolmentRoute(SignedRoute):
    """A signed request with a token, which the handler checks too."""

    async def admit(self, request: Request) -> Content | None:
        bearer_token(request)
        return await super().admit(request)


class CheckInRoute(DeviceRoute):
    """For what devices send most of all: the endpoint takes the request, the task and the message.
    What FastAPI finds out of an endpoint's parameters with every request costs as much as the
    signature, and here it is known. Most change nothing."""

    is_spent_later = True

    def get_route_handler(self) -> Handler:
        async def admitted(request: Request) -> Response:
            content = await self.admit(request)
            body = await read_body(request, MAX_JSON_BYTES, content)
            check_keys(body)
            task = _parsed(("path", "task"), _NAME.validate_python, request.path_params["task"])
            message = _parsed(("body",), CheckInRequest.model_validate_json, body)
            answer: Response = await self.endpoint(request, task, message)
            return answer

        return admitted


def _parsed(place: tuple[str, ...], parse: Callable[[Any], T], value: Any) -> T:
    """Raises MalformedRequest, with the fault's place after `place`."""
    try:
        return parse(value)
    except ValidationError as exc:
        raise MalformedRequest(format_validation_errors(exc, place)) from exc


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
            answer: Response = await self.endpoint(request, assignment)
            return answer

        return admitted


class OperatorRoute(BoundedRoute):
    """For an operator with the permission that `PERMISSIONS` asks for: `actor_of(request)`."""

    def get_route_handler(self) -> Handler:
        permission_of(self.methods, self.path)  # a route without one is not made
        return super().get_route_handler()

    async def admit(self, request: Request) -> Content | None:
        await _admit_operator(request, self)
        return None


class MetricsRoute(OperatorRoute):
    """For whoever has the metrics token or an operator's, or for anybody if the settings say so."""

    async def admit(self, request: Request) -> Content | None:
        if not (await services_of(request)).settings.open_metrics:
            operators = (await services_of(request)).operators
            await operators.check_reader(request, permission_of(self.methods, self.path))
        return None


class PageRoute(OperatorRoute):
    """For an operator with a browser, who gives the token as the password that it asks for."""

    async def admit(self, request: Request) -> Content | None:
        scheme, _, credentials = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "basic":
            with suppress(ValueError):
                token = base64.b64decode(credentials, validate=True).partition(b":")[2]
                bearer = [(b"authorization", b"Bearer " + token)]
                request = Request({**request.scope, "headers": bearer})
        await _admit_operator(request, self)
        return None


class AnyoneKnownRoute(DeviceRoute):
    """For an enrolled device, or an operator with the permission; where operators have a listener
    of their own, for one of the two."""

    def get_route_handler(self) -> Handler:
        permission_of(self.methods, self.path)
        return super().get_route_handler()

    async def admit(self, request: Request) -> Content | None:
        has_token, listener = "authorization" in request.headers, listener_of(request)
        if has_token and listener == "devices":
            raise NotFound(
                f"no route {request.url.path[:200]!r} for operators",
                hint="they have a listener of their own here: FEDPRESS_ADMIN_PORT",
            )
        if has_token or listener == "operators":
            await _admit_operator(request, self)
            return None
        return await super().admit(request)


async def _admit_operator(request: Request, route: APIRoute) -> None:
    operators = (await services_of(request)).operators
    permission = permission_of(route.methods, route.path)
    request.state.actor = await operators.check(request, permission)


async def actor_of(request: Request) -> str:
    """The operator who asks, as the audit log names one."""
    actor: str = request.state.actor
    return actor


By = Annotated[str, Depends(actor_of)]


def device_of(request: Request) -> Device:
    device: Device = request.state.device
    return device


def content_of(request: Request) -> Content:
    """Return the digest of the body that the signature states."""
    content: Content = request.state.content
    return content


async def read_body(
    request: Request,
    most: int,
    due: Content | None = None,
    count: Callable[[int], None] = lambda num_bytes: None,
) -> bytes:
    """The body; raises BodyTooLarge past `most` bytes, DigestMismatch unless it is what is `due`,
    where it is not left to others to find out. `count` is told of the bytes of each piece."""
    declared_bytes(request, most)
    received, num_bytes, digest = list[bytes](), 0, hashlib.sha256()
    async for chunk in request.stream():
        received.append(chunk)
        num_bytes += len(chunk)
        if due is not None:
            digest.update(chunk)
        failpoints.reach("body-begun")
        if num_bytes > most:
            raise BodyTooLarge(f"a body of more than {most} bytes", limit=most)
        count(len(chunk))
    if due is not None:
        due.check(Content(digest.digest(), num_bytes))
    return b"".join(received)


def declared_bytes(request: Request, most: int) -> int | None:
    """The length that the request's header says; raises BodyTooLarge if it is above `most`."""
    declared = request.headers.get("content-length", "")
    if not declared.isdecimal():
        return None
    if int(declared) > most:
        raise BodyTooLarge(f"a body of {declared} bytes where {most} are allowed", limit=most)
    return int(declared)


async def read_body_to(request: Request, most: int, path: Path) -> str:
    """Write the body to the file at `path`; returns its SHA-256. Raises BodyTooLarge past `most`
    bytes, and OSError."""
    digest, num_bytes, pending = hashlib.sha256(), 0, bytearray()
    with await asyncio.to_thread(path.open, "wb") as file:

        def write(data: bytes) -> None:
            digest.update(data)
            file.write(data)

        async for chunk in request.stream():
            pending += chunk
            num_bytes += len(chunk)
            if num_bytes > most:
                raise BodyTooLarge(f"a body of more than {most} bytes", limit=most)
            if len(pending) >= _PIECE:
                await asyncio.to_thread(write, bytes(pending))
                pending.clear()
        await asyncio.to_thread(write, bytes(pending))
    return digest.hexdigest()


def check_keys(body: bytes) -> None:
    """Raise MalformedRequest for a JSON body in which an object has a key twice: of the two values
    one reader takes the first and another the last. What is no JSON is found out by its parser."""
    with suppress(ValueError, RecursionError):
        json.loads(body, object_pairs_hook=_unrepeated)


def _unrepeated(pairs: list[tuple[str, Any]]) -> None:
    seen = set[str]()
    for key, _ in pairs:
        if key in seen:
            raise MalformedRequest(
                f"the JSON body has the key {ascii(key)[:64]} twice in an object",
                hint="send it once",
            )
        seen.add(key)


def check_digest(data: bytes, digest: str) -> None:
    """Raises DigestMismatch unless `digest` (hex) is the SHA-256 of `data`."""
    check_name(hashlib.sha256(data).hexdigest(), digest)


def check_name(actual: str, digest: str) -> None:
    """Raises DigestMismatch unless a body of SHA-256 `actual` has the name `digest`."""
    if actual != digest:
        raise DigestMismatch(f"a body of SHA-256 {actual} under the name {digest}")


def _once(body: bytes) -> Callable[[], Coroutine[Any, Any, Message]]:
    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    return receive
