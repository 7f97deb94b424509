"""The API of the devices: enrol, check in, fetch a model, upload, learn what became of it."""

from __future__ import annotations

import asyncio
import errno
import math
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Annotated, Any, BinaryIO

import anyio
from fastapi import APIRouter, Body, Depends, HTTPException, Query, Request, Response
from fastapi.responses import StreamingResponse
from fastapi.security import HTTPBearer
from pydantic import Field, ValidationError
from starlette.types import Receive, Scope, Send

from fedpress_protocols.errors import (
    BodyTooLarge,
    MalformedRequest,
    Unavailable,
)
from fedpress_protocols.messages import (
    CheckInRequest,
    CheckInResponse,
    EnrolRequest,
    EnrolResponse,
    EvaluationReport,
    Identifier,
    RotationRequest,
    RotationResponse,
    RoundStatus,
    SignedReceipt,
    TaskSummary,
    UploadAck,
    UploadFigures,
)
from fedpress_protocols.plan import Digest, Name
from fedpress_protocols.signatures import to_base64url
from fedpress_protocols.validation import format_validation_errors
from fedpress_server.api import examples
from fedpress_server.api.examples import answered, asked
from fedpress_server.api.listeners import Parts, services_of
from fedpress_server.api.paging import LINKED, MOST, Limit, first_page
from fedpress_server.api.problems import responses
from fedpress_server.api.routing import (
    AnyoneKnownRoute,
    CheckInRoute,
    DeviceRoute,
    EnrolmentRoute,
    SignedRoute,
    UploadRoute,
    content_of,
    device_of,
    read_body,
)
from fedpress_server.coordination.downloads import Form
from fedpress_server.observing import traces
from fedpress_server.storage.evaluation import MAX_METRIC
from fedpress_server.storage.files import artefact_name, model_name
from fedpress_server.storage.payloads import Payloads

_CHUNK = 2**18
_SPAN = re.compile(r"bytes=([0-9]{0,18})-([0-9]{0,18})")
BEARER = HTTPBearer(auto_error=False, description="The enrolment token, or the admin token.")

enrolment = APIRouter(prefix="/v1", route_class=EnrolmentRoute, tags=["devices"])
rotation = APIRouter(prefix="/v1", route_class=SignedRoute, tags=["devices"])
device_routes = APIRouter(
    prefix="/v1",
    route_class=DeviceRoute,
    tags=["devices"],
    responses=responses(401),
)
upload_routes = APIRouter(
    prefix="/v1",
    route_class=UploadRoute,
    tags=["devices"],
    responses=responses(401),
)
shared_routes = APIRouter(
    prefix="/v1",
    route_class=AnyoneKnownRoute,
    tags=["tasks"],
    responses=responses(401, 403, 429),
)


@enrolment.post(
    "/enrol",
    status_code=201,
    dependencies=[Depends(BEARER)],
    responses=responses(
        400,
        401,
        409,
        429,
        besides={
            201: answered(examples.ENROLLED),
            200: {"model": EnrolResponse, "description": "This key was enrolled before"},
        },
    ),
)
async def enrol(
    request: Request,
    response: Response,
    body: Annotated[EnrolRequest, Body(openapi_examples=asked(examples.ENROL))],
    services: Parts,
) -> EnrolResponse:
    """Register a device key with an enrolment token.

    The request is signed by the very key, which proves that the device has it. The same key with
    the same token gets the same answer again and uses the token up no further. Where devices have
    to be approved, this one's other requests are refused with 403 until it is.
    """
    key = services.server_keys.current
    device, is_new = await services.enrolment.enrol(request, body)
    if not is_new:
        response.status_code = 200
    return EnrolResponse(
        client_id=device.client_id,
        server_key=to_base64url(key.public),
        server_time=services.now,
    )


@rotation.post(
    "/key-rotation",
    responses=responses(400, 401, 403, 409, besides={200: answered(examples.ROTATED)}),
)
async def rotate_key(
    request: Request,
    body: Annotated[RotationRequest, Body(openapi_examples=asked(examples.ROTATE))],
    services: Parts,
) -> RotationResponse:
    """Go on with another key as the same device; from now on the one before is refused.

    The request is signed by either of the two, and the change by both. It may be sent again.
    """
    device = await services.device_registry.rotate(request, body)
    return RotationResponse(
        client_id=device.client_id, key_id=device.key_id, server_time=services.now
    )


async def check_in(
    request: Request,
    task: Name,
    body: Annotated[CheckInRequest, Body(openapi_examples=asked(examples.CHECK_IN))],
) -> Response:
    """Ask for work and for the fate of what is pending; waits up to `wait` seconds for news.

    A device has one assignment for each attempt at a round, and gets an open one again however
    often it asks. A pending id without a receipt in the answer is open, or not this device's:
    its receipt (202 or 404) tells which.
    """
    services = await services_of(request)
    check_ins, client_id = services.check_ins, device_of(request).client_id
    spend = partial(services.authenticator.spend, request)
    answer = await check_ins.check_in(client_id, task, body, spend)
    if answer is None:
        window = check_ins.window(client_id, task, body)
        shown = {"Retry-Window": f"{window.least:.3f}-{window.most:.3f}"}
        return Response(status_code=204, headers=_retry_after(window.least) | shown)
    return Response(answer.model_dump_json(), media_type="application/json")


device_routes.add_api_route(
    "/tasks/{task}/check-in",
    check_in,
    methods=["POST"],
    route_class_override=CheckInRoute,
    response_model=CheckInResponse,
    responses=responses(
        400,
        404,
        besides={
            200: answered(examples.CHECKED_IN),
            204: {
                "description": "Nothing to do: come back after Retry-After seconds, or better at a "
                "moment drawn from Retry-Window, seconds from least to most"
            },
        },
    ),
)


@shared_routes.get(
    "/models/{digest}",
    response_class=StreamingResponse,
    responses=responses(
        404,
        besides={
            200: {
                "description": "The safetensors file",
                "content": {"application/octet-stream": {}},
            },
            206: {"description": "The range asked for"},
            304: {"description": "The copy that the device has is this model"},
            416: {"description": "The range lies outside the file"},
        },
    ),
)
async def get_model(
    request: Request, digest: Digest, services: Parts, task: Name | None = None
) -> Response:
    """A model by the SHA-256 of its file; it never changes. One range is honoured.

    `task` says on whose behalf: its round counts the bytes.
    """
    record = await services.models.get(digest)
    return await immutable(request, model_name(digest), digest, record.num_bytes, task or "")


_FILE: dict[int | str, dict[str, Any]] = {
    200: {"description": "Its bytes", "content": {"application/octet-stream": {}}},
    206: {"description": "The range asked for"},
    304: {"description": "The copy that the device has is the one"},
    416: {"description": "The range lies outside the file"},
}


@shared_routes.get(
    "/models/{digest}/coded",
    response_class=StreamingResponse,
    responses=responses(404, besides=_FILE),
)
async def get_coded_model(
    request: Request, digest: Digest, services: Parts, task: Name
) -> Response:
    """A model of a task with a downlink, coded: what `digest` is the SHA-256 of, once it is decoded
    (SPEC.md, "Models on the way down"). It never changes. One range is honoured, and the round of
    `task` counts the bytes.
    """
    config = await services.queries.configuration(task)
    coded = await services.coded_models.find(config, digest, None)
    return await immutable(request, coded.name, coded.tag, coded.num_bytes, task, "coded")


@shared_routes.get(
    "/models/{digest}/from/{base}",
    response_class=StreamingResponse,
    responses=responses(404, besides=_FILE),
)
async def get_difference(
    request: Request, digest: Digest, base: Digest, services: Parts, task: Name
) -> Response:
    """The same as the difference to a model `base` that the device holds; 404 where `base` is too
    old, or the whole model is no longer than the difference.
    """
    config = await services.queries.configuration(task)
    coded = await services.coded_models.find(config, digest, base)
    return await immutable(request, coded.name, coded.tag, coded.num_bytes, task, "difference")


@shared_routes.get(
    "/models/{digest}/over/{base}",
    response_class=StreamingResponse,
    responses=responses(404, besides=_FILE),
)
async def get_trained_tensors(
    request: Request, digest: Digest, base: Digest, services: Parts, task: Name
) -> Response:
    """The trained tensors of a model, for a device that holds its base: the tensors that are not
    trained, named by the SHA-256 of their file. 404 where the model has another base.
    """
    config = await services.queries.configuration(task)
    await services.models.get(digest)
    coded = await services.coded_models.find_trained(config, digest, base)
    return await immutable(request, coded.name, coded.tag, coded.num_bytes, task, "difference")


@device_routes.get(
    "/artefacts/{digest}",
    response_class=StreamingResponse,
    responses=responses(404, besides=_FILE),
)
async def get_artefact(
    request: Request, digest: Digest, services: Parts, task: Name | None = None
) -> Response:
    """Return an artefact, other than a model, that the plan of an open round names by its SHA-256.
    As for a model, one range is honoured, and the round of `task` counts the bytes.
    """
    size = await services.queries.artefact_bytes(digest)
    return await immutable(request, artefact_name(digest), digest, size, task or "")


class _FileResponse(StreamingResponse):
    """Closes its file, whether it came to be read or not."""

    def __init__(self, file: BinaryIO, *streamed: Any, **how: Any) -> None:
        super().__init__(*streamed, **how)
        self._file = file

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await asyncio.to_thread(self._file.close)


async def immutable(
    request: Request, name: str, digest: str, size: int, task: str, form: Form = "plain"
) -> Response:
    """The file `name`, or the range of it that the device asks for."""
    services = await services_of(request)
    etag = f'"{digest}"'
    headers = {
        "ETag": etag,
        "Cache-Control": "private, max-age=31536000, immutable",
        "Accept-Ranges": "bytes",
    }
    known_tags = request.headers.get("if-none-match", "")
    if known_tags.strip() == "*" or etag in [
        tag.strip().removeprefix("W/") for tag in known_tags.split(",")
    ]:
        return Response(status_code=304, headers=headers)
    span = None
    if request.headers.get("if-range", etag) == etag:
        span = _span(request.headers.get("range", ""), size)
    start, stop = span or (0, size)
    headers["Content-Length"] = str(stop - start)
    if span is not None:
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"

    def count(num_bytes: int) -> Awaitable[None]:
        device = getattr(request.state, "device", None)
        return services.downloads.count(device.client_id if device else "", task, num_bytes, form)

    location = services.settings.download_location
    if location:  # the proxy sends the bytes; an answer of no bytes would be no model
        link = await asyncio.to_thread(services.payloads.link, name)
        await count(stop - start)
        del headers["Accept-Ranges"]
        headers |= {"X-Accel-Redirect": location + link, "Content-Length": "0"}
        return Response(headers=headers, media_type="application/octet-stream")
    file = await _opened(services.payloads, name)
    return _FileResponse(
        file,
        _chunks(file, start, stop, count),
        status_code=206 if span else 200,
        headers=headers,
        media_type="application/octet-stream",
    )


def _span(header: str, size: int) -> tuple[int, int] | None:
    """The one range of `header`, [start, stop); None to send it all. 416 if it is outside."""
    match = _SPAN.fullmatch(header.replace(" ", ""))
    if match is None or not (match[1] or match[2]):
        return None
    if match[1]:
        start = int(match[1])
        stop = min(size, int(match[2]) + 1) if match[2] else size
        if match[2] and int(match[2]) < start:
            return None
    else:
        start, stop = max(0, size - int(match[2])), size
    if start >= stop:
        raise HTTPException(
            416,
            f"range {header[:64]!r} of a file of {size} bytes",
            headers={"Content-Range": f"bytes */{size}"},
        )
    return start, stop


async def _opened(payloads: Payloads, name: str) -> BinaryIO:
    """The file `name`, before anything of the answer has gone out."""
    try:
        return await asyncio.to_thread(payloads.open, name)
    except OSError as exc:
        if exc.errno in (errno.EMFILE, errno.ENFILE):
            raise Unavailable("no more files can be opened now", retry_after=2) from exc
        raise


async def _chunks(
    file: BinaryIO,
    start: int,
    stop: int,
    count: Callable[[int], Awaitable[None]],
) -> AsyncIterator[bytes]:
    """The bytes [start, stop) of a file; tells `count` how many went out, before the last does."""
    sent, is_counted = 0, False
    try:
        wrapped = anyio.wrap_file(file)
        await wrapped.seek(start)
        while start + sent < stop:
            chunk = await wrapped.read(min(_CHUNK, stop - start - sent))
            if not chunk:
                raise EOFError(f"a file ends at byte {start + sent}, where {stop} were stored")
            sent += len(chunk)
            if start + sent == stop:
                is_counted = True
                await count(sent)
            yield chunk
    finally:
        if not is_counted:
            count(sent)


_UPLOAD: dict[str, Any] = {
    "status_code": 201,
    "response_model": UploadAck,
    "responses": responses(
        400,
        403,
        404,
        408,
        409,
        411,
        413,
        422,
        503,
        507,
        besides={
            201: answered(examples.ACK),
            200: {"model": UploadAck, "description": "These bytes were staged before"},
        },
    ),
    "openapi_extra": {
        "parameters": [
            {"name": name, "in": "query", "schema": schema}
            for name, schema in UploadFigures.model_json_schema()["properties"].items()
        ],
        "requestBody": {
            "required": True,
            "content": {
                "application/octet-stream": {"schema": {"type": "string", "format": "binary"}}
            },
        },
    },
}


@upload_routes.put("/assignments/{assignment}/update", **_UPLOAD)
async def put_update(request: Request, assignment: Identifier) -> Response:
    """Upload an assignment's update. 201 says that it lies on the disk, checked.

    The same bytes get the same answer, also long after the round; other bytes get 409. Before the
    body is read, who sends it, its length and its place are checked. An assignment has one body on
    its way at a time: another is put off, 503. The query may have figures of the update.
    """
    services, device, figures = await services_of(request), device_of(request), _figures(request)
    intake = services.intake
    slot = await intake.slot(device.client_id, assignment, device.key_id)
    content, record = content_of(request), slot.record
    request.state.round_key = record.key
    if content.length > slot.max_body_bytes:
        raise BodyTooLarge(
            f"a body of {content.length} bytes where the plan allows {slot.max_body_bytes}",
            limit=slot.max_body_bytes,
        )
    digest = content.sha256.hex()
    await intake.admit(slot, digest)
    # A device has any number of settled assignments, all of which it may repeat.
    is_open = record.receipt is None
    sender = record.assignment if is_open else f"settled of {record.client_id}"
    with services.bytes_in_flight.hold(sender, content.length, record.client_id) as place:
        began_at = services.now
        with traces.span("read"):
            async with place.reading(services.settings.upload_seconds) as count:
                body = await read_body(request, content.length, count=count)
        seconds = services.now - began_at
        intake.arrived(record.assignment, len(body), began_at, seconds)
        wire_bytes = head_bytes(request) + len(body)
        ack, is_new = await intake.stage(
            slot, body, digest, wire_bytes, due=content, figures=figures
        )
    status = 201 if is_new else 200
    return Response(ack.model_dump_json(), status, media_type="application/json")


def _figures(request: Request) -> UploadFigures | None:
    if not request.scope["query_string"]:
        return None
    try:
        return UploadFigures.model_validate_strings(dict(request.query_params))
    except ValidationError as exc:
        raise MalformedRequest(f"query.{format_validation_errors(exc)}") from exc


@upload_routes.put("/assignments/{assignment}/first", **_UPLOAD)
async def put_first(request: Request, assignment: Identifier) -> Response:
    """Answer a device that sends the first of two phases with 409: a round has one. Tasks of an
    earlier release that had two are cancelled, and the assignment's receipt says so.
    """
    uploads, device = (await services_of(request)).intake, device_of(request)
    raise await uploads.closed(await uploads.slot(device.client_id, assignment, device.key_id))


def head_bytes(request: Request) -> int:
    """The request line and the headers as HTTP/1.1 writes them, with the empty line after."""
    scope = request.scope
    target = len(scope.get("raw_path") or scope["path"].encode())
    target += len(scope["query_string"]) + 1 if scope["query_string"] else 0
    line = len(scope["method"]) + len(" ") + target + len(" HTTP/1.1\r\n")
    return line + sum(len(name) + len(value) + 4 for name, value in scope["headers"]) + 2


@device_routes.get(
    "/assignments/{assignment}/own",
    response_class=StreamingResponse,
    responses=responses(403, 404, besides=_FILE),
)
async def get_own(
    request: Request, assignment: Identifier, services: Parts, task: Name | None = None
) -> Response:
    """Return the update of the device's last included upload to a device that has lost it: `own` of
    the open assignment is its SHA-256. As for a model, one range is honoured.
    """
    name, digest = await services.queries.own_name(device_of(request).client_id, assignment)
    num_bytes = await asyncio.to_thread(services.payloads.size, name)
    return await immutable(request, name, digest, num_bytes, task or "")


@device_routes.delete(
    "/assignments/{assignment}",
    responses=responses(403, 404, 409, besides={200: answered(examples.RECEIPT)}),
)
async def decline(
    request: Request,
    assignment: Identifier,
    services: Parts,
    reason: Annotated[
        str | None,
        Query(
            pattern=r"^[a-z][a-z0-9-]{0,31}$",
            description="Why, as SPEC.md lists it; counted as `other` if it is not listed there.",
        ),
    ] = None,
    needed_seconds: Annotated[
        float | None,
        Query(ge=0, le=1e9, description="What a device that is `too-slow` expects to need."),
    ] = None,
) -> SignedReceipt:
    """Give an assignment back, so that another device may have its place. Declined again, it has
    the same receipt."""
    client_id = device_of(request).client_id
    return await services.check_ins.decline(client_id, assignment, reason, needed_seconds)


@device_routes.get(
    "/assignments/{assignment}/receipt",
    response_model=SignedReceipt,
    responses=responses(
        403,
        404,
        besides={
            200: answered(examples.RECEIPT),
            202: {"description": "The round is not over: come back after Retry-After seconds"},
        },
    ),
)
async def get_receipt(
    request: Request, assignment: Identifier, services: Parts
) -> SignedReceipt | Response:
    """Return the signed receipt of an assignment, its final outcome; it never changes."""
    receipt = await services.check_ins.receipt(device_of(request).client_id, assignment)
    if receipt is None:
        return Response(status_code=202, headers=_retry_after(services.settings.poll_seconds))
    return receipt


@device_routes.post(
    "/tasks/{task}/evaluations",
    status_code=204,
    response_class=Response,
    responses=responses(400, 404),
)
async def evaluate(
    request: Request,
    task: Name,
    body: Annotated[EvaluationReport, Body(openapi_examples=asked(examples.EVALUATION))],
    services: Parts,
) -> None:
    """Report how a model does on the device's own data; of several reports the last one counts."""
    for name, value in body.metrics.items():
        if abs(value) > MAX_METRIC:
            raise MalformedRequest(f"{name} of {value} where {MAX_METRIC:g} is the most")
    await services.evaluations.keep(device_of(request).client_id, task, body)


@shared_routes.get(
    "/tasks", responses=responses(400, besides={200: answered([examples.TASK]) | LINKED})
)
async def list_tasks(
    request: Request,
    response: Response,
    services: Parts,
    after: Annotated[
        Name | None, Query(description="A task: those after it in the alphabet are shown.")
    ] = None,
    limit: Limit = MOST,
) -> list[TaskSummary]:
    """The tasks of this server, by name."""
    tasks = await services.queries.tasks(after, limit + 1)
    return first_page(request, response, tasks, limit, after=lambda each: each.task)


@shared_routes.get(
    "/tasks/{task}", responses=responses(404, besides={200: answered(examples.TASK)})
)
async def get_task(task: Name, services: Parts) -> TaskSummary:
    """One task."""
    return await services.queries.task(task)


@shared_routes.get(
    "/tasks/{task}/rounds",
    responses=responses(400, 404, besides={200: answered([examples.ROUND]) | LINKED}),
)
async def list_rounds(
    request: Request,
    response: Response,
    task: Name,
    services: Parts,
    before: Annotated[
        str | None,
        Query(
            pattern=r"^[0-9]{1,9}(\.[0-9]{1,9})?$",
            description="A round, or an attempt as ROUND.ATTEMPT: those before it are shown.",
        ),
    ] = None,
    limit: Limit = MOST,
) -> list[RoundStatus]:
    """The newest attempts at the task's rounds, oldest first; the link leads to those before."""
    at = None
    if before is not None:
        number, _, attempt = before.partition(".")
        at = int(number), int(attempt or 0)
    attempts = await services.queries.history(task, at, limit + 1)
    attempts.reverse()
    shown = first_page(
        request, response, attempts, limit, before=lambda each: f"{each.round}.{each.attempt}"
    )
    return shown[::-1]


@shared_routes.get(
    "/tasks/{task}/rounds/{number}",
    responses=responses(400, 404, besides={200: answered(examples.ROUND)}),
)
async def get_round(
    task: Name, number: Annotated[int, Field(ge=1, lt=2**31)], services: Parts
) -> RoundStatus:
    """The latest attempt at a round."""
    return await services.queries.round_status(task, number)


def _retry_after(seconds: float) -> dict[str, str]:
    return {"Retry-After": str(math.ceil(seconds))}
