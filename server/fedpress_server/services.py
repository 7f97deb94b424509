"""The parts of a running server, made and joined in one place, and how routes come to them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

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
from fedpress_server.identity.signing import SigningKeys
from fedpress_server.intake.bodies import BytesInFlight
from fedpress_server.intake.resumable import PartLimits, Resumable
from fedpress_server.intake.sessions import SessionDesk
from fedpress_server.intake.uploads import Intake
from fedpress_server.metrics import Metrics
from fedpress_server.settings import Settings
from fedpress_server.storage.database import Database
from fedpress_server.storage.payloads import Payloads

Clock = Callable[[], float]


@dataclass
class Readiness:
    """Whether requests should come here."""

    is_stopping: bool = False
    fresh_until: float = 0.0
    """Seconds of the event loop's clock until which the last look at the stores is good."""


@dataclass(frozen=True)
class Resources:
    """The parts that a server opens before all others, and closes after them."""

    settings: Settings
    metrics: Metrics
    clock: Clock
    database: Database
    payloads: Payloads
    server_keys: SigningKeys
    authority: Authority


@dataclass(frozen=True)
class Services(Resources):
    """Every part of one server. `assembled` makes them; what they are is fixed from then on."""

    gatekeeper: Gatekeeper
    operators: Operators
    roster: Roster
    enrolment: Enrolment
    coordinator: Coordinator
    sessions: SessionDesk
    intake: Intake
    resumable: Resumable
    server_registry: ServerRegistry
    bytes_in_flight: BytesInFlight
    readiness: Readiness = field(default_factory=Readiness)

    @property
    def now(self) -> float:
        """Unix seconds."""
        return self.clock()


def assembled(resources: Resources, release: str) -> Services:
    """All parts of a server over these resources, none of them started; `release` is its version.

    Raises ConfigurationError for settings that fit no server.
    """
    settings, metrics, clock = resources.settings, resources.metrics, resources.clock
    database, payloads = resources.database, resources.payloads
    gatekeeper = Gatekeeper(
        database,
        clock,
        clock_skew=settings.clock_skew,
        skewed=metrics.skewed,
        approval_poll=settings.approval_poll_seconds,
    )
    limits = EnrolmentLimits(settings.enrolments_per_second, settings.enrolment_failures_per_minute)
    coordinator = Coordinator(
        settings, database, payloads, resources.server_keys, resources.authority, metrics, clock
    )
    figures = Figures(metrics, settings, database, coordinator.steps.tasks, release)
    metrics.sources.append(figures.set)
    intake = Intake(coordinator, database, payloads, metrics, settings.worker_threads)
    part_limits = PartLimits(
        settings.max_part_bytes, settings.max_partial_bytes, settings.partial_seconds
    )
    return Services(
        **vars(resources),
        gatekeeper=gatekeeper,
        operators=_operators(resources),
        roster=Roster(gatekeeper, database, clock),
        enrolment=Enrolment(
            gatekeeper, database, clock, limits, approve_each=settings.approve_each_device
        ),
        coordinator=coordinator,
        sessions=SessionDesk(coordinator),
        intake=intake,
        resumable=Resumable(intake, database, payloads, metrics, clock, part_limits),
        server_registry=ServerRegistry(settings, database, metrics, coordinator.steps.lease_time),
        bytes_in_flight=BytesInFlight(settings.max_bytes_in_flight, metrics.bytes_in_flight),
    )


def _operators(resources: Resources) -> Operators:
    settings, clock, metrics = resources.settings, resources.clock, resources.metrics
    token, seen = settings.admin_token, settings.metrics_token
    return Operators(
        resources.database,
        clock,
        Refusals(clock, lambda reason: metrics.operator_refusals.labels(reason).inc()),
        settings_token=token.get_secret_value() if token else None,
        metrics_token=seen.get_secret_value() if seen else None,
    )


@asynccontextmanager
async def started(services: Services, host: str, release: str) -> AsyncIterator[None]:
    """The parts at work, begun in order and ended in the other; `host` is the machine's name."""
    settings = services.settings
    await services.gatekeeper.start()
    await services.coordinator.start()
    await services.resumable.start()
    await services.operators.start(
        host, release=release, role=settings.role, settings=settings.public_digest
    )
    await services.server_registry.start()
    try:
        yield
    finally:
        await services.server_registry.stop()
        await services.operators.stop()
        await services.resumable.stop()
        await services.coordinator.stop()
        await asyncio.to_thread(services.intake.stop)
