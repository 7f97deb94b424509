"""The console's form for a new task: fields for what most tasks set, JSON for the rest."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, Literal

from fastapi import APIRouter, Request, Response
from fastapi.responses import RedirectResponse
from pydantic import ValidationError

from fedpress_protocols.errors import ConfigurationError, FedpressError, UnknownModel
from fedpress_protocols.messages import TaskConfig
from fedpress_protocols.plan import Digest
from fedpress_protocols.validation import format_validation_errors, unrepeated
from fedpress_server.api.listeners import Parts
from fedpress_server.api.routing import By
from fedpress_server.console.rendering import render
from fedpress_server.console.routing import ConsoleRoute, form_of
from fedpress_server.coordination.lifecycle import Prospect
from fedpress_server.registry import versions as registry
from fedpress_server.services import Services

MAX_MODELS = 50
"""Models that the form proposes."""
_BRING = (
    "choose a model of another task, or bring one: fedpress task create CONFIG MODEL, or "
    "Operator(...).register_model(model) in a program"
)
_EMPTY = {
    "task": "",
    "model": "",
    "rounds": "100",
    "size": "10",
    "minimum": "5",
    "round_seconds": "600",
    "lane": "clear",
    "more": "",
    "uplink": "1",
}

creating_routes = APIRouter(prefix="/console", route_class=ConsoleRoute, include_in_schema=False)


@creating_routes.get("/create")
async def show_form(
    request: Request, services: Parts, model: Digest | Literal[""] = ""
) -> Response:
    """The form, empty but for usual values and the model of a link."""
    return await _form(request, services, {**_EMPTY, "model": model})


@creating_routes.post("/create")
async def create_task(request: Request, services: Parts, by: By) -> Response:
    """Check the task of the form; create it if that button was pressed."""
    form = form_of(request)
    values = {name: form.get(name, "").strip() for name in _EMPTY}
    try:
        config = _configuration(values)
        if form.get("do") == "create":
            summary = await services.lifecycle.create(config, by=by)
            return RedirectResponse(f"/console/tasks/{summary.task}", 303)
        bits = _uplink(values["uplink"])
        prospect = await services.lifecycle.check(config)
    except FedpressError as error:
        if isinstance(error, UnknownModel):
            error.hint = error.hint or _BRING
        return await _form(request, services, values, error=error)
    return await _form(
        request,
        services,
        values,
        config=config,
        prospect=prospect,
        seconds_of=lambda n: 8 * n / bits,
    )


async def _form(
    request: Request,
    services: Services,
    values: dict[str, str],
    *,
    error: FedpressError | None = None,
    config: TaskConfig | None = None,
    prospect: Prospect | None = None,
    seconds_of: Callable[[int], float] | None = None,
) -> Response:
    models = await services.database.read(lambda c: registry.newest_files(c, MAX_MODELS))
    return render(
        request,
        "create.html",
        200 if error is None else error.status,
        values=values,
        models=models,
        error=error,
        config=config,
        config_text=config and json.dumps(config.model_dump(mode="json"), indent=2),
        prospect=prospect,
        seconds_of=seconds_of,
    )


def _configuration(values: dict[str, str]) -> TaskConfig:
    """The task that the form describes; raises ConfigurationError with the field and the reason."""
    fields = _json(values["more"])
    cohort = fields.pop("cohort", {})
    if not isinstance(cohort, dict):
        raise ConfigurationError("cohort in the further settings is no JSON object")
    own: dict[str, int | float | str] = {name: values[name] for name in ("task", "model", "lane")}
    own |= {name: _number(values[name]) for name in ("rounds", "round_seconds")}
    sizes = {name: _number(values[name]) for name in ("size", "minimum")}
    if twice := sorted({*own, *sizes} & {*fields, *cohort}):
        raise ConfigurationError(
            f"the further settings name {', '.join(twice)}, which the form has a field for",
            hint="set it in the field alone",
        )
    try:
        return TaskConfig.model_validate({**fields, **own, "cohort": {**cohort, **sizes}})
    except ValidationError as exc:
        raise ConfigurationError(format_validation_errors(exc)) from exc


def _json(text: str) -> dict[str, Any]:
    try:
        fields = json.loads(text or "{}", object_pairs_hook=unrepeated)
    except (ValueError, RecursionError) as exc:
        raise ConfigurationError(f"the further settings are no JSON: {exc}") from exc
    if not isinstance(fields, dict):
        raise ConfigurationError(
            "the further settings are no JSON object", hint='write {"name": value, ...}'
        )
    return fields


def _uplink(text: str) -> float:
    """Bits a second; raises ConfigurationError."""
    megabits = _number(text)
    if isinstance(megabits, str) or not 0 < megabits < math.inf:
        raise ConfigurationError(
            f"an uplink of {text[:64]!r} Mbit/s", hint="write a number above 0, such as 1 or .25"
        )
    return 1e6 * megabits


def _number(text: str) -> int | float | str:
    """The number in a field, or its text, which the task's own check then refuses."""
    try:
        number = float(text)
        return int(number) if number.is_integer() else number
    except (ValueError, OverflowError):
        return text
