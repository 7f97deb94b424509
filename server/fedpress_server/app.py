"""The application: every part made once, in order, and put away in the other."""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.openapi.utils import get_openapi

from fedpress_protocols.errors import ConfigurationError
from fedpress_server.api.administration import administration_routes
from fedpress_server.api.description import description_routes
from fedpress_server.api.devices import (
    device_routes,
    enrolment,
    rotation,
    shared_routes,
    upload_routes,
)
from fedpress_server.api.health import health_routes, metrics_routes
from fedpress_server.api.listeners import Listener, Listening
from fedpress_server.api.observing import observing_routes
from fedpress_server.api.operators import operator_routes
from fedpress_server.api.parts import resumable_routes
from fedpress_server.api.problems import Problem, RequestGuard, install, responses
from fedpress_server.api.registry import registry_routes
from fedpress_server.api.roster import roster_routes
from fedpress_server.api.server_keys import server_key_routes
from fedpress_server.api.sessions import session_routes
from fedpress_server.coordination.coordinator import Coordinator
from fedpress_server.coordination.figures import Figures
from fedpress_server.coordination.server_registry import ServerRegistry
from fedpress_server.identity.admission import EnrolmentLimits
from fedpress_server.identity.enrolment import Enrolment
from fedpress_server.identity.gatekeeper import Gatekeeper
from fedpress_server.identity.membership import Authority
from fedpress_server.identity.operators import Operators
from fedpress_server.identity.refusals import Refusals
from fedpress_server.identity.roster import Roster
from fedpress_server.identity.server_keys import signing_key, signing_keys
from fedpress_server.intake.bodies import BytesInFlight
from fedpress_server.intake.resumable import PartLimits, Resumable
from fedpress_server.intake.sessions import SessionDesk
from fedpress_server.intake.uploads import Intake
from fedpress_server.metrics import Metrics
from fedpress_server.observing import traces
from fedpress_server.observing.logs import Lines, Pseudonyms
from fedpress_server.observing.requests import RequestObserver
from fedpress_server.settings import Settings
from fedpress_server.storage.bucket import opened_payloads
from fedpress_server.storage.database import Database
from fedpress_server.storage.permissions import close_database, close_folder, sqlite_file

_DESCRIPTION = """\
Coordinates federated training with compressed uploads. Every device request is signed by the
device's Ed25519 key: a fixed profile of RFC 9421, which `protocols/SPEC-signatures.md` describes.
Errors are RFC 9457 problems whose `type` never changes its meaning.
"""


def create_app(
    settings: Settings, *, clock: Callable[[], float] = time.time, lines: Lines | None = None
) -> FastAPI:
    """The server as an ASGI application; its lifespan opens the data folder, and holds it.

    With `admin_port` it is the devices' listener, and `app.state.for_operators` the operators', to
    be served beside it within the one lifespan. A worker's or a scheduler's answers nothing but
    /livez, /readyz and /metrics. Raises ConfigurationError for a role that needs what the settings
    do not name.

    `clock` tells Unix seconds; deadlines, signatures and receipts go by it alone. `lines` are those
    of the log, which name devices once the server's key is there.
    """
    metrics = Metrics(price=settings.egress_price, currency=settings.egress_currency)
    _check_role(settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        with _held(settings.data_dir):
            database = await asyncio.to_thread(_opened, settings, metrics)
            try:
                payloads = await asyncio.to_thread(opened_payloads, settings)
                keys = await signing_keys(
                    settings.server_key_file, settings.data_dir, database, clock
                )
                if lines is not None:
                    lines.pseudonyms = Pseudonyms(keys.current.to_bytes())
                    lines.tracing = traces.ids
                if settings.otlp_endpoint:
                    traces.start(
                        traces.to_collector(
                            settings.otlp_endpoint,
                            settings.role,
                            _version(),
                            keys.first,
                            settings.trace_share,
                        )
                    )
                gatekeeper = Gatekeeper(
                    database,
                    clock,
                    clock_skew=settings.clock_skew,
                    skewed=metrics.skewed,
                    approval_poll=settings.approval_poll_seconds,
                )
                authority = await _authority(settings, database)
                coordinator = Coordinator(
                    settings, database, payloads, keys, authority, metrics, clock
                )
                app.state.database = database
                app.state.payloads = payloads
                app.state.server_keys = keys
                app.state.gatekeeper = gatekeeper
                app.state.operators = operators = _operators(settings, database, clock, metrics)
                app.state.roster = Roster(gatekeeper, database, clock)
                app.state.enrolment = Enrolment(
                    gatekeeper,
                    database,
                    clock,
                    EnrolmentLimits(
                        settings.enrolments_per_second, settings.enrolment_failures_per_minute
                    ),
                    approve_each=settings.approve_each_device,
                )
                app.state.authority = authority
                app.state.sessions = SessionDesk(coordinator)
                app.state.coordinator = coordinator
                figures = Figures(metrics, settings, database, coordinator.steps.tasks, _version())
                metrics.sources.append(figures.set)
                app.state.server_registry = registry = ServerRegistry(
                    settings, database, metrics, coordinator.steps.lease_time
                )
                app.state.intake = intake = Intake(
                    coordinator, database, payloads, metrics, settings.worker_threads
                )
                part_limits = PartLimits(
                    settings.max_part_bytes, settings.max_partial_bytes, settings.partial_seconds
                )
                app.state.resumable = resumable = Resumable(
                    intake, database, payloads, metrics, clock, part_limits
                )
                await gatekeeper.start()
                await coordinator.start()
                await resumable.start()
                await operators.start(
                    socket.gethostname(),
                    release=_version(),
                    role=settings.role,
                    settings=settings.public_digest,
                )
                await registry.start()
                try:
                    yield
                finally:
                    await registry.stop()
                    await operators.stop()
                    await resumable.stop()
                    await coordinator.stop()
                    await asyncio.to_thread(intake.stop)
            finally:
                await asyncio.to_thread(database.close)
                await asyncio.to_thread(traces.stop)

    observer = RequestObserver(metrics.requests, metrics.egress)

    def listening(listener: Listener, *routers: APIRouter) -> Listening:
        made = Listening(
            listener,
            routers,
            title="fedpress",
            version=_version(),
            description=_DESCRIPTION,
            lifespan=lifespan,
            separate_input_output_schemas=False,
            openapi_url=None,  # operators' own, see api/description.py
        )
        install(made, metrics)
        made.add_middleware(RequestGuard, observer=observer, hosts=settings.hosts)
        _describe(made)
        return made

    shared, devices = [health_routes], list[APIRouter]()
    operators = list[APIRouter]()
    if settings.role in ("all", "api"):
        devices += [upload_routes, device_routes, enrolment, rotation, resumable_routes]
        devices += [session_routes, server_key_routes]
        operators += [observing_routes, operator_routes, roster_routes, registry_routes]
        operators += [administration_routes, description_routes]
        shared += [shared_routes]
    if settings.admin_port is None:
        app = listening("everybody", *devices, *shared, *operators, metrics_routes)
    else:
        app = listening("devices", *devices, *shared)
        app.state.for_operators = listening("operators", *shared, *operators, metrics_routes)
        app.state.for_operators.state = app.state
    app.state.settings = settings
    app.state.clock = clock
    app.state.metrics = metrics
    app.state.ready_until = 0.0
    app.state.stopping = False
    app.state.bytes_in_flight = BytesInFlight(settings.max_bytes_in_flight, metrics.bytes_in_flight)
    return app


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
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    close_folder(folder)
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            raise ConfigurationError(
                f"another server holds {folder}", hint="stop it, or choose another data_dir"
            ) from exc
        yield
    finally:
        os.close(descriptor)


def _check_role(settings: Settings) -> None:
    """Several servers meet in a database and a store, and nowhere else."""
    if settings.role == "all":
        return
    if settings.resolved_database_url.startswith("sqlite"):
        raise ConfigurationError(
            f"role {settings.role!r} needs a database that several servers share, and SQLite is "
            "one server's own",
            hint="set FEDPRESS_DATABASE_URL to a postgresql:// URL, or leave the role at all",
        )
    if not settings.store_url:
        raise ConfigurationError(
            f"role {settings.role!r} needs a store that several servers share, and the data folder "
            "is one server's own",
            hint="set FEDPRESS_STORE_URL to s3://bucket/prefix, or leave the role at all",
        )


def _opened(settings: Settings, metrics: Metrics) -> Database:
    file = sqlite_file(settings.resolved_database_url)
    if file is not None:
        close_database(file)
    return Database(
        settings.resolved_database_url,
        migrates=settings.role == "all",
        retries=lambda kind: metrics.transaction_retries.labels(kind).inc(),
        batches=metrics.commit_batch.observe,
    )


def _operators(
    settings: Settings, database: Database, clock: Callable[[], float], metrics: Metrics
) -> Operators:
    token, seen = settings.admin_token, settings.metrics_token
    return Operators(
        database,
        clock,
        Refusals(clock, lambda reason: metrics.operator_refusals.labels(reason).inc()),
        settings_token=token.get_secret_value() if token else None,
        metrics_token=seen.get_secret_value() if seen else None,
    )


async def _authority(settings: Settings, database: Database) -> Authority:
    if settings.masking_authority:
        return Authority.apart(settings.population, settings.masking_authority)
    file = settings.authority_key_file
    key = await signing_key("authority", file, settings.data_dir, database)
    return Authority.here(settings.population, key)


def _version() -> str:
    try:
        return version("fedpress")
    except PackageNotFoundError:
        return "0"
