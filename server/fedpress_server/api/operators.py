"""The API of the operators: models and tasks; `device_registry` has that of devices."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Body, Depends, Query, Request, Response
from pydantic import Field

from fedpress_protocols.messages import (
    Continuation,
    TaskConfig,
    TaskSummary,
)
from fedpress_protocols.plan import Digest, Name, Term
from fedpress_protocols.restores import RestoreStatus
from fedpress_server.api import examples
from fedpress_server.api.devices import BEARER
from fedpress_server.api.examples import asked
from fedpress_server.api.listeners import Parts
from fedpress_server.api.paging import LINKED, MOST, Limit, first_page
from fedpress_server.api.problems import responses
from fedpress_server.api.routing import (
    By,
    OperatorRoute,
    check_digest,
    check_name,
    declared_bytes,
    read_body,
    read_body_to,
)
from fedpress_server.registry import restores

operator_routes = APIRouter(
    prefix="/v1/admin",
    route_class=OperatorRoute,
    tags=["operators"],
    dependencies=[Depends(BEARER)],
    responses=responses(401, 403, 429),
)

_IN_MEMORY = 2**24
"""Bytes of a model beyond which it is received in a file."""


class ModelStatus(Term):
    digest: Digest
    spec: Digest
    num_bytes: int


class Reason(Term):
    detail: Annotated[str, Field(max_length=256)] = "by the operator"


@operator_routes.put(
    "/models/{digest}",
    status_code=201,
    responses=responses(
        400,
        413,
        422,
        507,
        besides={200: {"model": ModelStatus, "description": "The model was here already"}},
    ),
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {
                "application/octet-stream": {"schema": {"type": "string", "format": "binary"}}
            },
        },
    },
)
async def put_model(
    request: Request, response: Response, digest: Digest, services: Parts, by: By
) -> ModelStatus:
    """Bring a model, a safetensors file, under its SHA-256."""
    most = services.settings.max_body_bytes
    num_bytes = declared_bytes(request, most)
    if num_bytes is None or num_bytes > _IN_MEMORY:
        with services.models.temporary() as path:
            check_name(await read_body_to(request, most, path), digest)
            record, is_new = await services.models.add_file(path, digest, by=by)
    else:
        data = await read_body(request, most)
        check_digest(data, digest)
        record, is_new = await services.models.add(data, digest, by=by)
    if not is_new:
        response.status_code = 200
    return ModelStatus(digest=record.digest, spec=record.spec, num_bytes=record.num_bytes)


@operator_routes.post("/tasks", status_code=201, responses=responses(400, 404, 409, 422))
async def create_task(
    body: Annotated[TaskConfig, Body(openapi_examples=asked(examples.CONFIG))],
    services: Parts,
    by: By,
) -> TaskSummary:
    """Begin a task on a model that is here."""
    return await services.lifecycle.create(body, by=by)


@operator_routes.get("/tasks/{task}/configuration", responses=responses(404))
async def get_configuration(task: Name, services: Parts) -> TaskConfig:
    """A task's configuration as it stands, every default written out: what created it, with the
    seed that was drawn, and the rounds and the model of its newest continuation."""
    return await services.queries.configuration(task)


@operator_routes.post("/tasks/{task}/continue", responses=responses(400, 404, 409))
async def continue_task(
    task: Name,
    body: Annotated[Continuation, Body(openapi_examples=asked(examples.CONTINUATION))],
    services: Parts,
    by: By,
) -> TaskSummary:
    """More rounds for a task that has stopped, from its own model or another of the same tensors.

    The same call again changes nothing.
    """
    return await services.lifecycle.continue_(task, body, by=by)


@operator_routes.post("/tasks/{task}/pause", responses=responses(404, 409))
async def pause_task(task: Name, services: Parts, by: By) -> TaskSummary:
    """Give no device work from now on. Uploads under way are taken, and with enough of them the
    round ends; the next one waits. Nothing is lost: the optimizer, residuals and the round stay."""
    return await services.lifecycle.pause(task, by=by)


@operator_routes.post("/tasks/{task}/resume", responses=responses(404, 409))
async def resume_task(task: Name, services: Parts, by: By) -> TaskSummary:
    """Give devices work again."""
    return await services.lifecycle.resume(task, by=by)


@operator_routes.post("/tasks/{task}/finish", responses=responses(404, 409))
async def finish_task(task: Name, services: Parts, by: By) -> TaskSummary:
    """End a paused task for good: its devices may go."""
    return await services.lifecycle.finish(task, by=by)


@operator_routes.post("/tasks/{task}/cancel", responses=responses(404, 409))
async def cancel_task(
    task: Name, services: Parts, by: By, body: Reason | None = None
) -> TaskSummary:
    """End a task; uploads of its open round are not included."""
    return await services.lifecycle.cancel(task, "cancelled " + (body or Reason()).detail, by=by)


@operator_routes.post("/tasks/{task}/abort-round", responses=responses(404, 409))
async def abort_round(
    task: Name, services: Parts, by: By, body: Reason | None = None
) -> TaskSummary:
    """Give the open attempt up and begin the next; it counts among the task's attempts."""
    return await services.lifecycle.abort_round(task, "aborted " + (body or Reason()).detail, by=by)


@operator_routes.get("/restores", responses=responses(400, besides={200: LINKED}))
async def list_restores(
    request: Request,
    response: Response,
    services: Parts,
    before: Annotated[
        int | None, Query(ge=0, lt=2**31, description="A restore: those before it are shown.")
    ] = None,
    limit: Limit = MOST,
) -> list[RestoreStatus]:
    """The restores from backups, the newest first, with the rounds that devices have reported as
    committed after them. What was in those is back at the devices, or reported as discarded there.
    """
    entries = await services.database.read(lambda c: restores.listed(c, before, limit + 1))
    return first_page(request, response, entries, limit, before=lambda each: each.number)
