"""The application: every part made once, in order, and put away in the other."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.openapi.utils import get_openapi

from fedpress_protocols.errors import ConfigurationError
from fedpress_protocols.local_files import open_lock, try_lock
from fedpress_server import preconditions
from fedpress_server.api.administration import administration_routes
from fedpress_server.api.description import description_routes
from fedpress_server.api.device_registry import device_registry_routes
from fedpress_server.api.devices import (
    device_routes,
    enrolment,
    rotation,
    shared_routes,
    upload_routes,
)
from fedpress_server.api.health import health_routes, metrics_routes
from fedpress_server.api.listeners import Listener, Listening, Process
from fedpress_server.api.observing import observing_routes
from fedpress_server.api.operators import operator_routes
from fedpress_server.api.parts import resumable_routes
from fedpress_server.api.problems import Problem, RequestGuard, install, responses
from fedpress_server.api.registry import registry_routes
from fedpress_server.api.server_keys import server_key_routes
from fedpress_server.api.sessions import session_routes
from fedpress_server.console.comparison import comparison_routes
from fedpress_server.console.creating import creating_routes
from fedpress_server.console.device_pages import device_pages
from fedpress_server.console.model_pages import model_pages
from fedpress_server.console.pages import console_routes, missing_pages
from fedpress_server.coordination.resources import Clock, Resources
from fedpress_server.identity.membership import Authority
from fedpress_server.identity.server_keys import signing_key, signing_keys
from fedpress_server.metrics import Metrics
from fedpress_server.observing import traces
from fedpress_server.observing.logs import Lines, Pseudonyms
from fedpress_server.observing.requests import RequestObserver
from fedpress_server.registry import restores
from fedpress_server.services import assembled, started
from fedpress_server.settings import Settings
from fedpress_server.storage.bucket import opened_payloads
from fedpress_server.storage.database import Database
from fedpress_server.storage.permissions import close_database, close_folder, sqlite_file

_DESCRIPTION = """\
Coordinates federated training with compressed uploads. Every device request is signed by the
device's Ed25519 key: a fixed profile of RFC 9421, which `protocols/SPEC-signatures.md` describes.
Errors are RFC 9457 problems whose `type` never changes its meaning; `fedpress explain` with its
last part says what it means and what to do.
"""


def create_app(
    settings: Settings,
    *,
    clock: Clock = time.time,
    session_clock: Clock | None = None,
    lines: Lines | None = None,
) -> Listening:
    """The server as an ASGI application; its lifespan opens the data folder, and holds it.

    With `admin_port` it is the devices' listener, and its `for_operators` the operators', to be
    served beside it within the one lifespan. A worker's or a scheduler's answers nothing but
    /livez, /readyz and /metrics. Raises ConfigurationError for what `preconditions` refuse.

    `clock` tells Unix seconds; deadlines, signatures and receipts go by it alone, and browsers'
    sessions by `session_clock`, where `clock` is a simulation's. `lines` are those of the log,
    which name devices once the server's key is there.
    """
    metrics = Metrics(price=settings.egress_price, currency=settings.egress_currency)
    preconditions.check(settings)
    process = Process(settings, metrics)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with _opened(settings, metrics, clock) as resources:
            resources = replace(resources, session_clock=session_clock)
            _observe(resources, lines)
            process.running = services = assembled(resources, _version())
            async with started(services, socket.gethostname(), _version()):
                yield

    observer = RequestObserver(metrics.requests, metrics.egress)

    def listening(listener: Listener, *routers: APIRouter) -> Listening:
        app = Listening(
            listener,
            process,
            routers,
            title="fedpress",
            version=_version(),
            description=_DESCRIPTION,
            lifespan=lifespan,
            separate_input_output_schemas=False,
            openapi_url=None,  # operators' own, see api/description.py
        )
        install(app, metrics)
        app.add_middleware(RequestGuard, observer=observer, hosts=settings.hosts)
        _describe(app)
        return app

    shared, devices, operators = _routes(settings)
    if settings.admin_port is None:
        return listening("everybody", *devices, *shared, *operators, metrics_routes)
    app = listening("devices", *devices, *shared)
    app.for_operators = listening("operators", *shared, *operators, metrics_routes)
    return app


def _routes(settings: Settings) -> tuple[list[APIRouter], list[APIRouter], list[APIRouter]]:
    """Those of everybody, of devices and of operators, for a server of this role."""
    if settings.role not in ("all", "api"):
        return [health_routes], [], []
    devices = [upload_routes, device_routes, enrolment, rotation, resumable_routes]
    devices += [session_routes, server_key_routes]
    operators = [observing_routes, operator_routes, device_registry_routes, registry_routes]
    operators += [administration_routes, description_routes]
    operators += [console_routes, comparison_routes, creating_routes, device_pages, model_pages]
    operators += [missing_pages]
    return [health_routes, shared_routes], devices, operators


@asynccontextmanager
async def _opened(settings: Settings, metrics: Metrics, clock: Clock) -> AsyncIterator[Resources]:
    """The data folder held for this process, and what lies under it opened."""
    with _held(settings.data_dir):
        database = await asyncio.to_thread(_database, settings, metrics)
        try:
            payloads = await asyncio.to_thread(opened_payloads, settings)
            keys = await signing_keys(settings.server_key_file, settings.data_dir, database, clock)
            authority = await _authority(settings, database)
            restore = await database.read(restores.newest)
            yield Resources(settings, metrics, clock, database, payloads, keys, authority, restore)
        finally:
            await asyncio.to_thread(database.close)
            await asyncio.to_thread(traces.stop)


def _observe(resources: Resources, lines: Lines | None) -> None:
    """Name devices in the log by pseudonyms, and send traces where the settings say so."""
    settings, keys = resources.settings, resources.server_keys
    if lines is not None:
        lines.pseudonyms = Pseudonyms(keys.current.to_bytes())
        lines.tracing = traces.ids
    if settings.otlp_endpoint:
        where = settings.otlp_endpoint, settings.role, _version(), keys.first
        traces.start(traces.to_collector(*where, settings.trace_share))


def _describe(app: FastAPI) -> None:
    """Add to OpenAPI what the routes cannot say: the problem's schema, the signature scheme."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(
                title=app.title,
                version=app.version,
                description=app.description,
                routes=app.routes,
                separate_input_output_schemas=False,
            )
            parts = schema.setdefault("components", {})
            parts.setdefault("schemas", {})["Problem"] = Problem.model_json_schema()
            parts.setdefault("securitySchemes", {})["signature"] = {
                "type": "apiKey",
                "in": "header",
                "name": "Signature",
                "description": "RFC 9421, with Signature-Input, Content-Digest and Content-Length.",
            }
            for path, operations in schema["paths"].items():
                for operation in operations.values():
                    _correct(operation, path)
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _correct(operation: dict[str, Any], path: str) -> None:
    answers = operation["responses"]
    if list(answers.get("422", {}).get("content", {})) == ["application/json"]:
        del answers["422"]  # FastAPI's own validation error, which is a 400 here
    if operation.get("parameters") or "requestBody" in operation:
        answers.update(responses(400) if "400" not in answers else {})
    if path == "/v1/enrol":
        operation["security"] = [{"HTTPBearer": [], "signature": []}]
    elif "devices" in operation["tags"]:
        operation["security"] = [{"signature": []}]
    elif "tasks" in operation["tags"]:
        operation["security"] = [{"signature": []}, {"HTTPBearer": []}]


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """The data folder, for this process alone; raises ConfigurationError."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        close_folder(folder)
        descriptor = open_lock(folder / "lock")
    except (FileExistsError, FileNotFoundError, NotADirectoryError, PermissionError) as exc:
        is_other = folder.exists() and not folder.is_dir()
        reason = "is no folder" if is_other else f"cannot be used: {exc.strerror}"
        raise ConfigurationError(
            f"the data folder {str(folder)!r} {reason}",
            hint="name another as --data-dir or FEDPRESS_DATA_DIR",
        ) from exc
    try:
        if not try_lock(descriptor):
            raise ConfigurationError(
                f"another server uses the data folder {str(folder)!r}",
                hint="stop it, or choose another data_dir",
            )
        yield
    finally:
        os.close(descriptor)


def _database(settings: Settings, metrics: Metrics) -> Database:
    file = sqlite_file(settings.resolved_database_url)
    if file is not None:
        close_database(file)
    return Database(
        settings.resolved_database_url,
        migrates=settings.role == "all",
        retries=lambda kind: metrics.transaction_retries.labels(kind).inc(),
        batches=metrics.commit_batch.observe,
    )


async def _authority(settings: Settings, database: Database) -> Authority:
    if settings.masking_authority:
        return Authority.apart(settings.population, settings.masking_authority)
    file = settings.authority_key_file
    key = await signing_key("authority", file, settings.data_dir, database)
    return Authority.here(settings.population, key)


@cache
def _version() -> str:
    try:
        return version("fedpress")
    except PackageNotFoundError:
        return "0"
