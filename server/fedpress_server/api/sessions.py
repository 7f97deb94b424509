"""The routes of the masked lane beside those of every upload; bodies are canonical bytes."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from fedpress_protocols.errors import BodyTooLarge, MalformedRequest
from fedpress_protocols.messages import Identifier, Membership
from fedpress_server.api import examples
from fedpress_server.api.examples import answered
from fedpress_server.api.listeners import Parts
from fedpress_server.api.problems import responses
from fedpress_server.api.routing import DeviceRoute, content_of, device_of, read_body
from fedpress_server.rounds import Step
from fedpress_server.rounds.session import Answer

_OCTETS = "application/octet-stream"
_BINARY = {_OCTETS: {"schema": {"type": "string", "format": "binary"}}}

session_routes = APIRouter(
    prefix="/v1",
    route_class=DeviceRoute,
    tags=["devices"],
    responses=responses(401),
)


@session_routes.get(
    "/membership", responses=responses(besides={200: answered(examples.MEMBERSHIP)})
)
async def get_membership(request: Request, services: Parts) -> Membership:
    """Return this device's credentials for masked sessions: a fresh certificate, where the server
    holds the enrolment authority's key, and the authority's name in any case."""
    return services.authority.membership(device_of(request), services.now)


@session_routes.post(
    "/assignments/{assignment}/ready",
    status_code=204,
    response_class=Response,
    responses=responses(400, 403, 404, 409),
)
async def ready(request: Request, assignment: Identifier, services: Parts) -> None:
    """Say that the update is trained, and wait for the session to begin. It may be said again."""
    if content_of(request).length:
        raise MalformedRequest("a body where none is due")
    await services.session_messages.ready(device_of(request).client_id, assignment)


@session_routes.post(
    "/assignments/{assignment}/session/{step}",
    status_code=204,
    response_class=Response,
    responses=responses(400, 403, 404, 408, 409, 411, 413, 422, 503, 507),
    openapi_extra={"requestBody": {"required": True, "content": _BINARY}},
)
async def post(request: Request, assignment: Identifier, step: Step, services: Parts) -> None:
    """Answer a step of the session. 204 says that the answer is on the disk.

    The same bytes get the same answer, other bytes get 409. The step `masked` announces the masked
    body, which goes where every update goes. Before the body is read, who sends it and its length
    are checked.
    """
    content, device = content_of(request), device_of(request)
    bound = await services.session_messages.bound(device.client_id, assignment, step)
    if content.length > bound:
        raise BodyTooLarge(
            f"a message of {content.length} bytes where {bound} are allowed", limit=bound
        )
    sender = f"{assignment} says"
    with services.bytes_in_flight.hold(sender, content.length, device.client_id) as place:
        async with place.reading(services.settings.upload_seconds) as count:
            body = await read_body(request, bound, content, count)
        await services.session_messages.post(device, assignment, step, body)


@session_routes.get(
    "/assignments/{assignment}/session/{step}",
    response_class=Response,
    responses=responses(
        400,
        403,
        404,
        409,
        besides={
            200: {"description": "The server's message", "content": _BINARY},
            204: {"description": "Not there yet: come back after Retry-After seconds"},
        },
    ),
)
async def poll(
    request: Request,
    assignment: Identifier,
    step: Answer,
    services: Parts,
    wait: Annotated[float, Query(ge=0, le=30)] = 0.0,
) -> Response:
    """Return the server's message after `step`; waits up to `wait` seconds for it.

    `offer` comes before the first step. 409 once the attempt is over: the receipt says the rest.
    """
    message = await services.session_messages.poll(device_of(request), assignment, step, wait)
    if message is None:
        return Response(status_code=204, headers={"Retry-After": "0" if wait else "1"})
    return Response(message, media_type=_OCTETS)
