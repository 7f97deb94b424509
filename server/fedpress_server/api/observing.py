"""What operators ask of one server: how much it logs, and what it has seen of the fleet."""

from __future__ import annotations

import logging
import os
import socket
from typing import cast

from fastapi import APIRouter, Depends, Request

from fedpress_protocols.fleet import FleetStatus, LogLevelStatus, Spread
from fedpress_server.api.devices import BEARER
from fedpress_server.api.problems import responses
from fedpress_server.api.routing import By, OperatorRoute
from fedpress_server.identity import audit
from fedpress_server.metrics import Metrics
from fedpress_server.observing import logs
from fedpress_server.observing.series import Distribution
from fedpress_server.settings import Settings
from fedpress_server.storage.database import Database

observing_routes = APIRouter(
    prefix="/v1/admin",
    route_class=OperatorRoute,
    tags=["operators"],
    dependencies=[Depends(BEARER)],
    responses=responses(401, 403, 429),
)
_log = logging.getLogger(__name__)


@observing_routes.get("/log-level")
async def read_log_level(request: Request) -> LogLevelStatus:
    """The least severe message that this server logs."""
    return LogLevelStatus(level=logs.level_now(), server=_server(request))


@observing_routes.put("/log-level", responses=responses(400))
async def set_log_level(request: Request, body: LogLevelStatus, by: By) -> LogLevelStatus:
    """Log from another level on, until this server is started anew. Of several servers it is the
    one that answers; SIGUSR1 is for all of them, and for those that answer no operator."""
    state, host = request.app.state, socket.gethostname()
    database, now, level = cast(Database, state.database), state.clock(), body.level
    await database.write(lambda c: audit.add(c, now, by, "log-level.changed", host, level=level))
    _log.warning("the log level is %s now", body.level, extra={"by": by})
    logs.set_level(body.level)
    return LogLevelStatus(level=logs.level_now(), server=_server(request))


@observing_routes.get("/fleet")
async def read_fleet(request: Request) -> FleetStatus:
    """Links and clocks of the devices that have come here, and what was sent to them."""
    metrics = cast(Metrics, request.app.state.metrics)
    sent = {str(kind): each.value for (kind,), each in metrics.egress}
    return FleetStatus(
        server=_server(request),
        since=metrics.since,
        uplink_bits_per_second=_spread(metrics.uplink.labels()),
        uplink_unmeasured=int(metrics.uplink_unmeasured.labels().value),
        clocks_ahead_seconds=_spread(metrics.clock_skew.labels("ahead")),
        clocks_behind_seconds=_spread(metrics.clock_skew.labels("behind")),
        download_bytes=int(sent.get("download", 0)),
        answer_bytes=int(sent.get("answer", 0)),
        egress_cost=metrics.cost(sum(sent.values())),
        egress_currency=metrics.currency,
        staged_bytes=int(sum(each.value for _, each in metrics.staged_bytes)),
        staged_float32_bytes=int(sum(each.value for _, each in metrics.staged_float32_bytes)),
    )


def _spread(seen: Distribution) -> Spread:
    return Spread(
        num=sum(seen.counts),
        tenth=seen.quantile(0.1),
        median=seen.quantile(0.5),
        nine_tenths=seen.quantile(0.9),
    )


def _server(request: Request) -> str:
    settings = cast(Settings, request.app.state.settings)
    return f"{settings.role} {socket.gethostname()} {os.getpid()}"
