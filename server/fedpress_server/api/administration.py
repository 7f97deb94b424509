"""Routes for operator accounts and the audit log."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request, Response

from fedpress_protocols.audit import AuditPage
from fedpress_protocols.messages import Identifier
from fedpress_protocols.operators import OperatorRequest, OperatorStatus, OperatorToken
from fedpress_server.api.devices import BEARER
from fedpress_server.api.listeners import Parts
from fedpress_server.api.paging import LINKED, MOST, Limit, first_page
from fedpress_server.api.problems import responses
from fedpress_server.api.routing import By, OperatorRoute
from fedpress_server.identity import audit

administration_routes = APIRouter(
    prefix="/v1/admin",
    route_class=OperatorRoute,
    tags=["operators"],
    dependencies=[Depends(BEARER)],
    responses=responses(401, 403, 429),
)


@administration_routes.post("/operators", status_code=201, responses=responses(400))
async def make_operator(body: OperatorRequest, services: Parts, by: By) -> OperatorToken:
    """A token for somebody who is to operate the server, with a role."""
    return await services.operators.create(body, by)


@administration_routes.get("/operators", responses=responses(400, besides={200: LINKED}))
async def list_operators(
    request: Request,
    response: Response,
    services: Parts,
    after: Annotated[str, Query(pattern=r"^[A-Za-z0-9_-]{0,64}$")] = "",
    limit: Limit = MOST,
) -> list[OperatorStatus]:
    """Whoever has or had a token, by the ids; without the tokens, and without the settings' own."""
    operators = await services.operators.listed(after, limit + 1)
    return first_page(request, response, operators, limit, after=lambda each: each.operator_id)


@administration_routes.delete("/operators/{operator_id}", responses=responses(400, 404))
async def revoke_operator(operator_id: Identifier, services: Parts, by: By) -> OperatorStatus:
    """Refuse somebody's token from now on; again, it changes nothing."""
    return await services.operators.revoke(operator_id, by)


@administration_routes.get("/audit", responses=responses(400))
async def read_audit(
    services: Parts,
    after: Annotated[int, Query(ge=0, lt=2**53, description="Entries later than this one.")] = 0,
    limit: Limit = 100,
) -> AuditPage:
    """The audit log from `after` on, and where it ends; docs/audit.md says what is in it."""
    return await services.database.read(lambda c: audit.page(c, after, limit))
