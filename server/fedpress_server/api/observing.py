"""What operators ask of the servers: how much they log, and what they have seen of the fleet."""

from __future__ import annotations

from typing import cast

from fastapi import APIRouter, Depends, Request

from fedpress_protocols.fleet import FleetStatus, LogLevelStatus
from fedpress_server.api.devices import BEARER
from fedpress_server.api.problems import responses
from fedpress_server.api.routing import By, OperatorRoute
from fedpress_server.coordination.server_registry import ServerRegistry
from fedpress_server.observing import logs

observing_routes = APIRouter(
    prefix="/v1/admin",
    route_class=OperatorRoute,
    tags=["operators"],
    dependencies=[Depends(BEARER)],
    responses=responses(401, 403, 429),
)


@observing_routes.get("/log-level")
async def read_log_level(request: Request) -> LogLevelStatus:
    """The least severe message that each server logs."""
    registry = _registry(request)
    found = await registry.log_levels()
    return LogLevelStatus(level=logs.level_now(), server=registry.name, servers=found)


@observing_routes.put("/log-level", responses=responses(400))
async def set_log_level(request: Request, body: LogLevelStatus, by: By) -> LogLevelStatus:
    """Have all servers that run log from another level on, workers and schedulers among them, each
    until it is started anew."""
    registry = _registry(request)
    found = await registry.set_log_level(body.level, by, request.app.state.clock())
    return LogLevelStatus(level=logs.level_now(), server=registry.name, servers=found)


@observing_routes.get("/fleet")
async def read_fleet(request: Request) -> FleetStatus:
    """Links and clocks of the devices that have come to any server that runs, and what was sent to
    them."""
    return await _registry(request).fleet()


def _registry(request: Request) -> ServerRegistry:
    return cast(ServerRegistry, request.app.state.server_registry)
