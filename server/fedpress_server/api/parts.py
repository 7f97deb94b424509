"""The routes of uploads by parts, for bodies that a link may not carry in one go.

As in the tus protocol a part is taken at the exact offset and nowhere else, and HEAD tells where
that is. The offset is in the query, because a signature covers the query and no header of that
kind; and there is a completion, because a device's word that it has sent all is due under its key.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Body, Query, Request, Response

from fedpress_protocols.errors import (
    BodyTooLarge,
    FedpressError,
    MalformedRequest,
    UnknownPartial,
)
from fedpress_protocols.messages import (
    Identifier,
    PartialCompletion,
    PartialIntent,
    PartialUpload,
    UploadAck,
    UploadFigures,
)
from fedpress_server.api import examples
from fedpress_server.api.devices import head_bytes
from fedpress_server.api.examples import answered, asked
from fedpress_server.api.listeners import Parts
from fedpress_server.api.problems import responses
from fedpress_server.api.routing import DeviceRoute, content_of, device_of, read_body

OFFSET_OCTETS = "application/offset+octet-stream"

resumable_routes = APIRouter(
    prefix="/v1",
    route_class=DeviceRoute,
    tags=["devices"],
    responses=responses(401),
)


_HEADERS: dict[str, Any] = {
    "Upload-Offset": {
        "description": "Bytes that the server holds",
        "schema": {"type": "integer"},
    },
    "Upload-Digest": {
        "description": "SHA-256 of these bytes, hex",
        "schema": {"type": "string"},
    },
    "Upload-Expires": {
        "description": "Unix seconds until which they are kept",
        "schema": {"type": "number"},
    },
    "Upload-Part-Bytes": {
        "description": "The longest part that is taken",
        "schema": {"type": "integer"},
    },
}


@resumable_routes.post(
    "/assignments/{assignment}/partials",
    status_code=201,
    responses=responses(
        400,
        403,
        404,
        409,
        413,
        503,
        besides={
            201: answered(examples.PARTIAL),
            200: {
                "model": PartialUpload,
                "description": "It was begun before: go on from its offset; or the body that was "
                "asked about is staged, and `ack` says so",
            },
        },
    ),
)
async def begin_partial(
    request: Request,
    response: Response,
    assignment: Identifier,
    body: Annotated[PartialIntent, Body(openapi_examples=asked(examples.PARTIAL_INTENT))],
    services: Parts,
) -> PartialUpload:
    """Begin an upload by parts, or find the one that was begun: there is one for each body.

    A longer `max_bytes` than before begins it anew. Nothing of it counts as an upload before its
    completion; it is forgotten once it has had no part for a while, or nobody awaits it any more.
    """
    device = device_of(request)
    slot = await services.intake.slot(device.client_id, assignment, device.key_id)
    status, is_new = await services.resumable.begin(slot, body)
    if not is_new:
        response.status_code = 200
    return status


@resumable_routes.head(
    "/assignments/{assignment}/partials/{partial}",
    status_code=204,
    response_class=Response,
    responses=responses(
        403, 404, 408, besides={204: {"description": "How far it has come", "headers": _HEADERS}}
    ),
)
async def held_of_partial(
    request: Request,
    assignment: Identifier,
    partial: Identifier,
    services: Parts,
) -> Response:
    """Return the offset of the next part. A part that is still being read is abandoned; one that is
    being written is awaited."""
    device = device_of(request)
    slot = await services.intake.slot(device.client_id, assignment, device.key_id)
    async with services.resumable.turn(slot, partial):
        status = await services.resumable.held(slot, partial)
    headers = {
        "Upload-Offset": str(status.offset),
        "Upload-Digest": status.digest,
        "Upload-Expires": str(status.expires_at),
        "Upload-Part-Bytes": str(status.part_bytes),
        "Cache-Control": "no-store",
    }
    return Response(status_code=204, headers=headers)


@resumable_routes.patch(
    "/assignments/{assignment}/partials/{partial}",
    responses=responses(
        400,
        403,
        404,
        408,
        409,
        411,
        413,
        503,
        507,
        besides={200: answered(examples.PARTIAL)},
    ),
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {OFFSET_OCTETS: {"schema": {"type": "string", "format": "binary"}}},
        },
    },
)
async def append_part(
    request: Request,
    assignment: Identifier,
    partial: Identifier,
    offset: Annotated[int, Query(ge=0, lt=2**53)],
    services: Parts,
) -> PartialUpload:
    """Send the part that begins at `offset`. 200 says that it lies on the disk.

    409 `offset-conflict` with the right `offset`, before the body is read, if it begins elsewhere
    than the parts before it end. Of two requests for one upload the newer one counts: the other is
    answered 408.
    """
    content, device = content_of(request), device_of(request)
    slot = await services.intake.slot(device.client_id, assignment, device.key_id)
    request.state.round_key = slot.record.key
    metrics, task = services.metrics, slot.record.task
    try:
        async with services.resumable.turn(slot, partial) as turn:
            await services.resumable.check_part(slot, partial, offset, content.length)
            sender = f"part of {partial}"
            with services.bytes_in_flight.hold(sender, content.length, device.client_id) as place:
                began_at = services.now
                async with place.reading(services.settings.upload_seconds) as count:
                    reading = read_body(request, content.length, content, count)
                    data = await turn.read(reading)
                services.intake.arrived(assignment, len(data), began_at, services.now - began_at)
                status = await services.resumable.append(
                    slot,
                    partial,
                    offset,
                    data,
                    content.sha256.hex(),
                    head_bytes(request) + len(data),
                )
    except FedpressError as exc:
        metrics.parts.labels(task, exc.slug).inc()
        raise
    metrics.parts.labels(task, "kept").inc()
    return status


@resumable_routes.post(
    "/assignments/{assignment}/partials/{partial}/completion",
    status_code=201,
    responses=responses(
        400,
        403,
        404,
        408,
        409,
        413,
        422,
        503,
        507,
        besides={
            201: answered(examples.ACK),
            200: {"model": UploadAck, "description": "These bytes were staged before"},
        },
    ),
)
async def complete_partial(
    request: Request,
    response: Response,
    assignment: Identifier,
    partial: Identifier,
    body: Annotated[PartialCompletion, Body(openapi_examples=asked(examples.COMPLETION))],
    services: Parts,
    figures: Annotated[UploadFigures, Query()],
) -> UploadAck:
    """Say, signed, that the parts are the whole: from here on it is as if the body had come in one.

    201 says that it lies on the disk, checked. It may be said again. 409 `offset-conflict` if the
    server holds another number of bytes, 400 `digest-mismatch` if it holds others.
    """
    device = device_of(request)
    slot = await services.intake.slot(device.client_id, assignment, device.key_id)
    if body.num_bytes > slot.max_body_bytes:
        raise BodyTooLarge(
            f"a body of {body.num_bytes} bytes where the plan allows {slot.max_body_bytes}",
            limit=slot.max_body_bytes,
        )
    wire_bytes = head_bytes(request) + content_of(request).length
    try:
        async with services.resumable.turn(slot, partial):
            assignment, whose = slot.record.assignment, device.client_id
            with services.bytes_in_flight.hold(assignment, body.num_bytes, whose) as place:
                place.fill()
                ack, is_new = await services.resumable.complete(
                    slot, partial, body, wire_bytes, figures
                )
    except UnknownPartial:
        ack, is_new = await services.resumable.completed(slot, body.upload), False
    if not is_new:
        response.status_code = 200
    return ack


@resumable_routes.delete(
    "/assignments/{assignment}/partials/{partial}",
    status_code=204,
    response_class=Response,
    responses=responses(403, 404, 408),
)
async def drop_partial(
    request: Request,
    assignment: Identifier,
    partial: Identifier,
    services: Parts,
) -> None:
    """Have the server forget an upload by parts. The assignment stays open."""
    if content_of(request).length:
        raise MalformedRequest("a body where none is due")
    device = device_of(request)
    slot = await services.intake.slot(device.client_id, assignment, device.key_id)
    async with services.resumable.turn(slot, partial):
        await services.resumable.drop(partial)
