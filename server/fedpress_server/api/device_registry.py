"""The operators' API of the device registry: enrolment tokens, and approval of devices."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request, Response

from fedpress_protocols.enrolment import (
    ClientDetails,
    ClientStatus,
    DeviceState,
    KeyLeft,
    TokenRequest,
    TokenResponse,
    TokenState,
    TokenStatus,
)
from fedpress_protocols.messages import Identifier
from fedpress_server.api.devices import BEARER
from fedpress_server.api.listeners import Parts
from fedpress_server.api.paging import LINKED, MOST, Limit, first_page
from fedpress_server.api.problems import responses
from fedpress_server.api.routing import By, OperatorRoute
from fedpress_server.services import Services
from fedpress_server.storage.records import Device, EnrolmentToken

device_registry_routes = APIRouter(
    prefix="/v1/admin",
    route_class=OperatorRoute,
    tags=["operators"],
    dependencies=[Depends(BEARER)],
    responses=responses(401, 403, 429),
)


@device_registry_routes.post("/tokens", status_code=201, responses=responses(400))
async def make_token(
    request: Request, body: TokenRequest, services: Parts, by: By
) -> TokenResponse:
    """Create an enrolment token."""
    token, record = await services.enrolment.make_token(
        by,
        uses=body.uses,
        expires_in=body.expires_in,
        note=body.note,
        approve_each=body.approve_each,
    )
    return TokenResponse(token=token, **_token(services, record))


@device_registry_routes.get("/tokens", responses=responses(400, 404, besides={200: LINKED}))
async def list_tokens(
    request: Request,
    response: Response,
    services: Parts,
    before: Annotated[
        Identifier | None, Query(description="A token's id: tokens created before it are listed.")
    ] = None,
    limit: Limit = MOST,
) -> list[TokenStatus]:
    """The newest enrolment tokens, without their secrets, the newest first; the link leads to those
    before."""
    tokens = await services.enrolment.tokens(before, limit + 1)
    shown = first_page(request, response, tokens, limit, before=lambda each: each.token_id)
    return [TokenStatus(**_token(services, each)) for each in shown]


@device_registry_routes.post("/tokens/{token_id}/revoke", responses=responses(404))
async def revoke_token(token_id: Identifier, services: Parts, by: By) -> TokenStatus:
    """Revoke a token; devices that enrolled with it stay."""
    return TokenStatus(**_token(services, await services.enrolment.revoke_token(token_id, by)))


@device_registry_routes.get("/clients", responses=responses(400, 404, besides={200: LINKED}))
async def list_clients(
    request: Request,
    response: Response,
    services: Parts,
    state: Annotated[DeviceState | None, Query(description="Of these alone.")] = None,
    after: Annotated[
        Identifier | None, Query(description="A client: clients enrolled after it are listed.")
    ] = None,
    limit: Limit = MOST,
) -> list[ClientStatus]:
    """All devices ever enrolled, in order of enrolment; the link leads to the next ones."""
    devices = await services.device_registry.devices(state, after, limit + 1)
    shown = first_page(request, response, devices, limit, after=lambda each: each.client_id)
    return [ClientStatus(**_client(each)) for each in shown]


@device_registry_routes.get("/clients/{client_id}", responses=responses(404))
async def get_client(client_id: Identifier, services: Parts) -> ClientDetails:
    """One device, with its former keys."""
    device, former = await services.device_registry.device(client_id)
    left = tuple(KeyLeft(key_id=each.key_id, retired_at=each.retired_at) for each in former)
    return ClientDetails(former_keys=left, **_client(device))


@device_registry_routes.post("/clients/{client_id}/approve", responses=responses(404, 409))
async def approve_client(client_id: Identifier, services: Parts, by: By) -> ClientStatus:
    """Approve a waiting or rejected device."""
    return ClientStatus(**_client(await services.device_registry.approve(client_id, by)))


@device_registry_routes.post("/clients/{client_id}/reject", responses=responses(404, 409))
async def reject_client(client_id: Identifier, services: Parts, by: By) -> ClientStatus:
    """Reject a waiting device."""
    return ClientStatus(**_client(await services.device_registry.reject(client_id, by)))


@device_registry_routes.post("/clients/{client_id}/revoke", responses=responses(404))
async def revoke_client(client_id: Identifier, services: Parts, by: By) -> ClientStatus:
    """Revoke a device permanently."""
    return ClientStatus(**_client(await services.device_registry.revoke(client_id, by)))


def _token(services: Services, record: EnrolmentToken) -> dict[str, Any]:
    state: TokenState = "good"
    if record.revoked_at is not None:
        state = "revoked"
    elif record.used >= record.uses:
        state = "used-up"
    elif services.now >= record.expires_at:
        state = "expired"
    return {
        "token_id": record.token_id,
        "state": state,
        "uses": record.uses,
        "used": record.used,
        "created_at": record.created_at,
        "expires_at": record.expires_at,
        "note": record.note,
        "approve_each": record.approve_each,
        "revoked_at": record.revoked_at,
    }


def _client(device: Device) -> dict[str, Any]:
    return {
        "client_id": device.client_id,
        "state": device.approval if device.revoked_at is None else "revoked",
        "key_id": device.key_id,
        "name": device.name,
        "token_id": device.token_id,
        "enrolled_at": device.enrolled_at,
        "decided_at": device.decided_at,
        "rotated_at": device.rotated_at,
        "revoked_at": device.revoked_at,
        "seen_at": device.seen_at,
        "agent": device.agent,
        "clock_ahead": device.clock_ahead,
    }
