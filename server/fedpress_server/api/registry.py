"""The operators' routes of the model registry: versions, aliases, and what is given up."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query

from fedpress_protocols.plan import Name
from fedpress_protocols.registry import (
    Alias,
    Collected,
    CollectRequest,
    ModelLineage,
    ModelVersion,
    Promotion,
    Rollback,
)
from fedpress_server.api.devices import BEARER
from fedpress_server.api.listeners import Parts
from fedpress_server.api.problems import responses
from fedpress_server.api.routing import By, OperatorRoute
from fedpress_server.registry import versions as registry

MOST_VERSIONS = 1000

registry_routes = APIRouter(
    prefix="/v1/admin",
    route_class=OperatorRoute,
    tags=["operators"],
    dependencies=[Depends(BEARER)],
    responses=responses(401, 403, 429),
)


Which = Annotated[str, Path(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


@registry_routes.get("/tasks/{task}/versions", responses=responses(400, 404))
async def list_versions(
    task: Name,
    services: Parts,
    before: Annotated[int | None, Query(ge=0, lt=2**31)] = None,
    limit: Annotated[int, Query(ge=1, le=MOST_VERSIONS)] = MOST_VERSIONS,
) -> list[ModelVersion]:
    """The versions of a task's model, the newest first; go on with `before` the last one shown."""
    return await services.database.read(lambda c: registry.versions(c, task, before, limit))


@registry_routes.get("/tasks/{task}/versions/{which}", responses=responses(400, 404))
async def get_version(task: Name, which: Which, services: Parts) -> ModelLineage:
    """A version by its number, by an alias, or as newest or best, with what it was made of."""
    return await services.database.read(lambda c: registry.lineage(c, task, which))


@registry_routes.get("/tasks/{task}/aliases", responses=responses(400, 404))
async def list_aliases(task: Name, services: Parts) -> list[Alias]:
    """List the task's aliases, with the versions that they point and have pointed to."""
    return await services.database.read(lambda c: registry.aliases(c, task))


@registry_routes.put("/tasks/{task}/aliases/{alias}", responses=responses(400, 404, 409, 422))
async def promote(task: Name, alias: Name, body: Promotion, services: Parts, by: By) -> Alias:
    """Move an alias to a version. The same move again changes nothing; 409 says where the alias
    points if that is not what was expected."""
    now = services.now
    return await services.database.write(
        lambda c: registry.promote(c, task, alias, body, now, by=by)
    )


@registry_routes.post("/tasks/{task}/aliases/{alias}/rollback", responses=responses(400, 404, 409))
async def roll_back(
    task: Name, alias: Name, services: Parts, by: By, body: Rollback | None = None
) -> Alias:
    """Move an alias back to where it pointed before its last move. Say what you expect, so that a
    repeated request does not go back twice."""
    now, asked = services.now, body or Rollback()
    return await services.database.write(
        lambda c: registry.rollback(c, task, alias, asked, now, by=by)
    )


@registry_routes.post("/models/collect")
async def collect(services: Parts, by: By, body: CollectRequest | None = None) -> Collected:
    """Give up the files of models that no policy keeps and nothing needs, now."""
    return await services.retention.collect(dry_run=(body or CollectRequest()).dry_run, by=by)
