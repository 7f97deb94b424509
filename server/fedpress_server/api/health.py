"""Routes for supervisors: liveness, readiness, metrics."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import sqlalchemy as sa
from fastapi import APIRouter, Depends, Response
from prometheus_client import CONTENT_TYPE_LATEST

from fedpress_protocols.errors import Unavailable
from fedpress_protocols.plan import Term
from fedpress_server.api.devices import BEARER
from fedpress_server.api.listeners import Parts
from fedpress_server.api.problems import responses
from fedpress_server.api.routing import MetricsRoute

health_routes = APIRouter(tags=["health"])
metrics_routes = APIRouter(
    tags=["health"], route_class=MetricsRoute, dependencies=[Depends(BEARER)]
)
"""Answered where operators come."""
_FRESH = 1.0
_PATIENCE = 2.0
"""Seconds that a scrape waits for the database."""
_READY_WITHIN = 3.0
"""Seconds that a check waits for the database and the store: less than those that ask wait."""


class Health(Term):
    status: str = "ok"


@health_routes.get("/livez")
async def livez() -> Health:
    """The process answers."""
    return Health()


@health_routes.get("/readyz", responses=responses(503))
async def readyz(services: Parts) -> Health:
    """The database answers, the store takes writes, and the key that should sign is here, looked at
    once a second at most; and the server is not about to stop."""
    now, readiness = asyncio.get_running_loop().time(), services.readiness
    if readiness.is_stopping:
        raise Unavailable("this server is about to stop", retry_after=1)
    if now >= readiness.fresh_until:
        try:
            async with asyncio.timeout(_READY_WITHIN):
                await services.database.read(
                    lambda connection: connection.execute(sa.select(1)).scalar()
                )
                await asyncio.to_thread(services.payloads.check_writable)
        except Exception as exc:
            raise Unavailable("the database or the store does not work", retry_after=5) from exc
        keys = services.server_keys
        if keys.missing is not None:
            raise Unavailable(
                f"server key {keys.missing} is not on this machine",
                hint="copy the new key's file beside the old one",
                retry_after=5,
            )
        readiness.fresh_until = now + _FRESH
    return Health()


@metrics_routes.get("/metrics", response_class=Response, responses=responses(401, 403, 429))
async def metrics(services: Parts) -> Response:
    """For Prometheus, which sends the metrics token or an operator's."""
    with suppress(Exception):  # without a database the last signs stay, and all other figures count
        async with asyncio.timeout(_PATIENCE):
            services.metrics.warned(await services.queries.all_warnings())
    return Response(services.metrics.text(), media_type=CONTENT_TYPE_LATEST)
