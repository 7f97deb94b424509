"""Routes for observing the servers: log levels and fleet statistics."""

from __future__ import annotations

from fastapi import APIRouter, Depends

from fedpress_protocols.fleet import FleetStatus, LogLevelStatus, ServerList
from fedpress_server.api.devices import BEARER
from fedpress_server.api.listeners import Parts
from fedpress_server.api.problems import responses
from fedpress_server.api.routing import By, OperatorRoute
from fedpress_server.observing import logs

observing_routes = APIRouter(
    prefix="/v1/admin",
    route_class=OperatorRoute,
    tags=["operators"],
    dependencies=[Depends(BEARER)],
    responses=responses(401, 403, 429),
)


@observing_routes.get("/log-level")
async def read_log_level(services: Parts) -> LogLevelStatus:
    """The least severe message that each server logs."""
    registry = services.server_registry
    levels = await registry.log_levels()
    return LogLevelStatus(level=logs.level_now(), server=registry.name, servers=levels)


@observing_routes.put("/log-level", responses=responses(400))
async def set_log_level(services: Parts, body: LogLevelStatus, by: By) -> LogLevelStatus:
    """Have all servers that run log from another level on, workers and schedulers among them, each
    until it restarts."""
    registry = services.server_registry
    levels = await registry.set_log_level(body.level, by, services.now)
    return LogLevelStatus(level=logs.level_now(), server=registry.name, servers=levels)


@observing_routes.get("/servers")
async def list_servers(services: Parts) -> ServerList:
    """The servers that run, and for an hour those that fell silent without being stopped."""
    return await services.server_registry.status()


@observing_routes.get("/fleet")
async def read_fleet(services: Parts) -> FleetStatus:
    """Links and clocks of the devices that have come to any server that runs, and what was sent to
    them."""
    return await services.server_registry.fleet()
