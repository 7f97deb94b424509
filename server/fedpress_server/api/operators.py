"""The API of the operators: enrolment tokens, models, tasks, devices. Bearer admin token."""

from __future__ import annotations

from typing import Annotated, cast

from fastapi import APIRouter, Body, Depends, Request, Response
from pydantic import Field

from fedpress_protocols.messages import (
    WITHOUT_NUL,
    Continuation,
    Identifier,
    TaskConfig,
    TaskSummary,
)
from fedpress_protocols.plan import Digest, Name, Term
from fedpress_protocols.restores import RestoreStatus
from fedpress_server.api import examples
from fedpress_server.api.devices import BEARER, Rounds
from fedpress_server.api.examples import asked
from fedpress_server.api.problems import responses
from fedpress_server.api.routing import OperatorRoute, check_digest, read_body
from fedpress_server.identity.gatekeeper import Gatekeeper
from fedpress_server.registry import restores
from fedpress_server.settings import Settings
from fedpress_server.storage.database import Database
from fedpress_server.storage.records import Device

operator_routes = APIRouter(
    prefix="/v1/admin",
    route_class=OperatorRoute,
    tags=["operators"],
    dependencies=[Depends(BEARER)],
    responses=responses(401),
)


class TokenRequest(Term):
    uses: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    """How many devices may enrol with it."""
    expires_in: Annotated[float, Field(gt=0, le=10 * 366 * 86400)] = 86400.0
    """Seconds."""
    note: Annotated[str, Field(max_length=256, pattern=WITHOUT_NUL)] = ""


class TokenResponse(Term):
    token: str
    """Shown once: the server keeps only its hash."""
    uses: int
    expires_at: float


class ClientStatus(Term):
    client_id: Identifier
    key_id: str
    name: str
    enrolled_at: float
    revoked_at: float | None = None


class ModelStatus(Term):
    digest: Digest
    spec: Digest
    num_bytes: int


class Reason(Term):
    detail: Annotated[str, Field(max_length=256)] = "by the operator"


async def _gatekeeper(request: Request) -> Gatekeeper:
    return cast(Gatekeeper, request.app.state.gatekeeper)


Gate = Annotated[Gatekeeper, Depends(_gatekeeper)]


@operator_routes.post("/tokens", status_code=201, responses=responses(400))
async def make_token(body: TokenRequest, gate: Gate) -> TokenResponse:
    """A new enrolment token."""
    token, expires_at = await gate.make_token(
        uses=body.uses, expires_in=body.expires_in, note=body.note
    )
    return TokenResponse(token=token, uses=body.uses, expires_at=expires_at)


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
    request: Request, response: Response, digest: Digest, rounds: Rounds
) -> ModelStatus:
    """Bring a model, a safetensors file, under its SHA-256."""
    settings = cast(Settings, request.app.state.settings)
    data = await read_body(request, settings.max_body_bytes)
    check_digest(data, digest)
    record, is_new = await rounds.add_model(data, digest)
    if not is_new:
        response.status_code = 200
    return ModelStatus(digest=record.digest, spec=record.spec, num_bytes=record.num_bytes)


@operator_routes.post("/tasks", status_code=201, responses=responses(400, 404, 409, 422))
async def create_task(
    body: Annotated[TaskConfig, Body(openapi_examples=asked(examples.CONFIG))], rounds: Rounds
) -> TaskSummary:
    """Begin a task on a model that is here."""
    return await rounds.life.create(body)


@operator_routes.post("/tasks/{task}/continue", responses=responses(400, 404, 409))
async def continue_task(
    task: Name,
    body: Annotated[Continuation, Body(openapi_examples=asked(examples.CONTINUATION))],
    rounds: Rounds,
) -> TaskSummary:
    """More rounds for a task that has stopped, from its own model or another of the same tensors.

    The same call again changes nothing.
    """
    return await rounds.life.go_on(task, body)


@operator_routes.post("/tasks/{task}/pause", responses=responses(404, 409))
async def pause_task(task: Name, rounds: Rounds) -> TaskSummary:
    """Give no device work from now on. Uploads under way are taken, and with enough of them the
    round ends; the next one waits. Nothing is lost: the optimizer, residuals and the round stay."""
    return await rounds.life.hold(task)


@operator_routes.post("/tasks/{task}/resume", responses=responses(404, 409))
async def resume_task(task: Name, rounds: Rounds) -> TaskSummary:
    """Give devices work again."""
    return await rounds.life.release(task)


@operator_routes.post("/tasks/{task}/finish", responses=responses(404, 409))
async def finish_task(task: Name, rounds: Rounds) -> TaskSummary:
    """End a paused task for good: its devices may go."""
    return await rounds.life.finish(task)


@operator_routes.post("/tasks/{task}/cancel", responses=responses(404, 409))
async def cancel_task(task: Name, rounds: Rounds, body: Reason | None = None) -> TaskSummary:
    """End a task; uploads of its open round are not included."""
    return await rounds.life.cancel(task, "cancelled " + (body or Reason()).detail)


@operator_routes.post("/tasks/{task}/abort-round", responses=responses(404, 409))
async def abort_round(task: Name, rounds: Rounds, body: Reason | None = None) -> TaskSummary:
    """Give the open attempt up and begin the next; it counts among the task's attempts."""
    return await rounds.life.abort_round(task, "aborted " + (body or Reason()).detail)


@operator_routes.get("/restores")
async def list_restores(request: Request) -> list[RestoreStatus]:
    """Every restore from a backup, the newest first, with the rounds that devices have reported as
    committed after it. What was in those is back at the devices, or reported as discarded there."""
    database = cast(Database, request.app.state.database)
    return await database.read(restores.listed)


@operator_routes.get("/clients")
async def list_clients(gate: Gate) -> list[ClientStatus]:
    """Every device that was ever enrolled."""
    return [_status(device) for device in await gate.devices()]


@operator_routes.post("/clients/{client_id}/revoke", responses=responses(404))
async def revoke_client(client_id: Identifier, gate: Gate) -> ClientStatus:
    """Turn a device away from now on."""
    return _status(await gate.revoke(client_id))


def _status(device: Device) -> ClientStatus:
    return ClientStatus(
        client_id=device.client_id,
        key_id=device.key_id,
        name=device.name,
        enrolled_at=device.enrolled_at,
        revoked_at=device.revoked_at,
    )
