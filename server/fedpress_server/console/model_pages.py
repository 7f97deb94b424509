"""The console's pages of a task's models: versions, their difference, promotion and roll-back."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import RedirectResponse
from pydantic import Field, TypeAdapter, ValidationError
from sqlalchemy.engine import Connection

from fedpress_protocols.errors import Conflict, MalformedRequest, NotFound
from fedpress_protocols.model import Model
from fedpress_protocols.plan import Digest, Name
from fedpress_protocols.promotion_gate import Requirement, checked
from fedpress_protocols.registry import ModelLineage, Promotion, Rollback
from fedpress_protocols.validation import format_validation_errors
from fedpress_server.api.devices import immutable
from fedpress_server.api.listeners import Parts
from fedpress_server.api.routing import By
from fedpress_server.console.rendering import confirm, render, size
from fedpress_server.console.routing import ConsoleRoute, form_of
from fedpress_server.registry import versions as registry
from fedpress_server.services import Services
from fedpress_server.settings import MIB
from fedpress_server.storage.files import model_name
from fedpress_server.storage.payloads import Payloads

MAX_ROWS = 200
"""Rows of a table on one page."""
MAX_COMPARED_BYTES = 256 * MIB
"""Of a model's file that is compared: both are in memory then."""
_ALIAS: TypeAdapter[str] = TypeAdapter(Name)
_Version = Annotated[int, Field(ge=0, lt=2**31)]

model_pages = APIRouter(prefix="/console", route_class=ConsoleRoute, include_in_schema=False)


@model_pages.get("/tasks/{task}/models")
async def show_models(
    request: Request,
    task: Name,
    services: Parts,
    before: Annotated[int | None, Query(ge=0, lt=2**31)] = None,
) -> Response:
    """The versions of a task's model, and its aliases."""
    database = services.database
    versions = await database.read(lambda c: registry.versions(c, task, before, MAX_ROWS))
    aliases = await database.read(lambda c: registry.aliases(c, task))
    more = versions[-1].version if len(versions) == MAX_ROWS else None
    return render(request, "models.html", task=task, versions=versions, aliases=aliases, more=more)


class _Change(NamedTuple):
    """The change of one tensor between two versions; NaN for numbers that it does not have."""

    name: str
    shape: str
    norm: float
    """L2 norm in the earlier version."""
    moved: float
    """L2 norm of the difference."""
    largest: float
    """The largest change of a value."""


@model_pages.get("/tasks/{task}/difference")
async def show_difference(
    request: Request,
    task: Name,
    services: Parts,
    old: Annotated[_Version, Query()],
    new: Annotated[_Version, Query()],
) -> Response:
    """Two versions of a task's model: what devices measured of them, and how far each tensor
    moved."""

    def read(connection: Connection) -> tuple[ModelLineage, ModelLineage]:
        return (
            registry.lineage(connection, task, str(old)),
            registry.lineage(connection, task, str(new)),
        )

    both = await services.database.read(read)
    for each in both:
        record = await services.models.get(each.model)
        if record.num_bytes > MAX_COMPARED_BYTES:
            raise Conflict(
                f"version {each.version} has {size(record.num_bytes)}, and models of up to "
                f"{size(MAX_COMPARED_BYTES)} are compared here",
                hint="download both versions and compare the files",
            )
    changes = await asyncio.to_thread(_changes, services.payloads, both[0].model, both[1].model)
    measured = [await _metrics_of(services, task, each.version) for each in both]
    names = sorted({name for each in measured for name in each})
    return render(
        request,
        "difference.html",
        task=task,
        old=both[0],
        new=both[1],
        metrics=[(name, *(each.get(name) for each in measured)) for name in names],
        changes=changes,
        whole=_Change(
            "all tensors",
            "",
            _root([each.norm for each in changes]),
            _root([each.moved for each in changes]),
            max((each.largest for each in changes), default=0.0),
        ),
        most=MAX_ROWS,
    )


async def _metrics_of(services: Services, task: str, version: int) -> dict[str, float]:
    """What devices measured of a version; version 0 is of no round."""
    if not version:
        return {}
    try:
        return dict((await services.queries.round_status(task, version)).metrics)
    except NotFound:  # given up by the retention
        return {}


def _root(norms: list[float]) -> float:
    return float(np.linalg.norm(norms))


def _changes(payloads: Payloads, old: str, new: str) -> list[_Change]:
    """By tensor, what moved most, relative to its norm, first."""
    before, after = (
        Model.from_bytes(payloads.get(model_name(digest))).tensors() for digest in (old, new)
    )
    changes = [_change(name, values, after[name]) for name, values in before.items()]
    return sorted(changes, key=lambda each: -each.moved / (each.norm or 1.0))


def _change(name: str, old: npt.NDArray[Any], new: npt.NDArray[Any]) -> _Change:
    first, moved = old.astype(np.float64).ravel(), new.astype(np.float64).ravel()
    moved -= first
    return _Change(
        name,
        " × ".join(map(str, old.shape)) or "scalar",
        float(np.linalg.norm(first)),
        float(np.linalg.norm(moved)),
        float(np.abs(moved).max(initial=0.0)),
    )


@model_pages.get("/models/{digest}")
async def download(request: Request, digest: Digest, services: Parts) -> Response:
    """A model's file, safetensors."""
    record = await services.models.get(digest)
    answer = await immutable(request, model_name(digest), digest, record.num_bytes, "")
    name = f"{digest[:16]}.safetensors"
    answer.headers["Content-Disposition"] = f'attachment; filename="{name}"'
    return answer


@model_pages.get("/tasks/{task}/promote/{version}")
async def confirm_promotion(
    request: Request,
    task: Name,
    version: _Version,
    services: Parts,
) -> Response:
    """The form that asks for the alias."""
    lineage = await services.database.read(lambda c: registry.lineage(c, task, str(version)))
    return confirm(
        request,
        f"Promote version {version} of {task}",
        f"The alias will point to model {lineage.model[:16]}, made of {lineage.num_updates} "
        "updates.",
        f"/console/tasks/{task}/models",
        [
            ("alias", "Alias", "text", "production"),
            ("require", "Only if (optional), such as accuracy>=0.95; devices>=20", "text", ""),
        ],
    )


@model_pages.post("/tasks/{task}/promote/{version}")
async def promote(
    request: Request,
    task: Name,
    version: _Version,
    services: Parts,
    by: By,
) -> Response:
    """Move an alias to the version, if it meets the requirements of the form."""
    form, now = form_of(request), services.now
    alias, required = form.get("alias", "").strip(), form.get("require", "").split(";")
    if requirements := [Requirement.parsed(each) for each in required if each.strip()]:
        lineage = await services.database.read(lambda c: registry.lineage(c, task, str(version)))
        status = await services.queries.round_status(task, version) if version else None
        checked(requirements, lineage, status)
    promotion = Promotion(version=version)
    await services.database.write(
        lambda c: registry.promote(c, task, _name(alias), promotion, now, by=by)
    )
    return RedirectResponse(f"/console/tasks/{task}/models", 303)


@model_pages.get("/tasks/{task}/rollback/{alias}")
async def confirm_rollback(request: Request, task: Name, alias: Name, services: Parts) -> Response:
    """The versions between which the alias would move."""
    aliases = await services.database.read(lambda c: registry.aliases(c, task))
    standing = next((each for each in aliases if each.alias == alias), None)
    if standing is None:
        raise NotFound(f"task {task!r} has no alias {alias!r}")
    return confirm(
        request,
        f"Roll back {alias} of {task}",
        f"The alias points to version {standing.version} now, and will point where it did before.",
        f"/console/tasks/{task}/models",
        hidden={"expect": str(standing.version)},
    )


@model_pages.post("/tasks/{task}/rollback/{alias}")
async def roll_back(request: Request, task: Name, alias: Name, services: Parts, by: By) -> Response:
    """Move the alias back, if it still points to what the form showed."""
    now = services.now
    try:
        asked = Rollback.model_validate_strings({"expect": form_of(request).get("expect", "")})
    except ValidationError as exc:
        raise MalformedRequest(format_validation_errors(exc)) from exc
    await services.database.write(lambda c: registry.rollback(c, task, alias, asked, now, by=by))
    return RedirectResponse(f"/console/tasks/{task}/models", 303)


def _name(text: str) -> str:
    """Raises MalformedRequest unless it may be an alias."""
    try:
        return _ALIAS.validate_python(text)
    except ValidationError as exc:
        raise MalformedRequest(
            f"{text[:64]!r} is no alias", hint="use letters, digits, ., - and _, at most 64"
        ) from exc
