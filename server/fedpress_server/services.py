"""The parts of a running server, made and joined in one place, and how routes come to them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from sqlalchemy.engine import Connection

from fedpress_server.aggregation.masked import Host, Sums
from fedpress_server.coordination.adaptive import Rates
from fedpress_server.coordination.background import Background
from fedpress_server.coordination.check_ins import CheckIns
from fedpress_server.coordination.coded_models import CodedModels
from fedpress_server.coordination.downloads import Downloads
from fedpress_server.coordination.evaluations import Evaluations
from fedpress_server.coordination.figures import Figures
from fedpress_server.coordination.file_cleanup import FileCleanup
from fedpress_server.coordination.job_runner import JobRunner, SharedWithJobs
from fedpress_server.coordination.journal import Journal
from fedpress_server.coordination.lifecycle import Lifecycle
from fedpress_server.coordination.live import LONGEST_WAIT, Memory
from fedpress_server.coordination.models import Models
from fedpress_server.coordination.placement import Placement
from fedpress_server.coordination.planner import Planner
from fedpress_server.coordination.publisher import JobSignal, Publisher
from fedpress_server.coordination.queries import Queries
from fedpress_server.coordination.resources import Resources
from fedpress_server.coordination.scheduler import Scheduler
from fedpress_server.coordination.server_registry import ServerRegistry, Signs
from fedpress_server.coordination.task_store import TaskStore
from fedpress_server.identity.admission import EnrolmentLimits
from fedpress_server.identity.authentication import Authenticator
from fedpress_server.identity.browser_sessions import BrowserSessions
from fedpress_server.identity.device_registry import DeviceRegistry
from fedpress_server.identity.enrolment import Enrolment
from fedpress_server.identity.operators import Operators
from fedpress_server.identity.refusals import Refusals
from fedpress_server.intake.bodies import BytesInFlight
from fedpress_server.intake.resumable import PartLimits, Resumable
from fedpress_server.intake.session_messages import SessionMessages
from fedpress_server.intake.uploads import Intake
from fedpress_server.registry.retention import Retention
from fedpress_server.storage import leases


@dataclass
class Readiness:
    """Whether requests should come here."""

    is_stopping: bool = False
    fresh_until: float = 0.0
    """Seconds of the event loop's clock until which the last look at the stores is good."""


@dataclass(frozen=True, kw_only=True)
class Services(Resources):
    """Every part of one server. `assembled` makes them; what they are is fixed from then on."""

    authenticator: Authenticator
    operators: Operators
    browser_sessions: BrowserSessions
    device_registry: DeviceRegistry
    enrolment: Enrolment
    store: TaskStore
    queries: Queries
    models: Models
    coded_models: CodedModels
    downloads: Downloads
    evaluations: Evaluations
    check_ins: CheckIns
    lifecycle: Lifecycle
    job_runner: JobRunner
    retention: Retention
    scheduler: Scheduler
    intake: Intake
    session_messages: SessionMessages
    resumable: Resumable
    server_registry: ServerRegistry
    bytes_in_flight: BytesInFlight
    readiness: Readiness = field(default_factory=Readiness)

    @property
    def now(self) -> float:
        """Unix seconds."""
        return self.clock()


@dataclass(frozen=True)
class _Shared:
    """The parts inside of the others."""

    background: Background
    memory: Memory
    host: Host
    sums: Sums
    signal: JobSignal
    cleanup: FileCleanup
    lease_time: Callable[[Connection], float]


def assembled(resources: Resources, release: str, *, is_shared: bool | None = None) -> Services:
    """All parts of a server over these resources, none of them started; `release` is its version.

    `is_shared`: whether other servers may write to the database; None: as it says itself. Leases go
    by the database's clock, unless a test turns the clock. Raises ConfigurationError for settings
    that fit no server.
    """
    settings, metrics, clock = resources.settings, resources.metrics, resources.clock
    database, payloads = resources.database, resources.payloads
    is_shared = database.is_shared if is_shared is None else is_shared
    shared = _shared(resources, is_shared=is_shared)
    background, lease_time = shared.background, shared.lease_time
    rates = Rates(database, background)
    placement = Placement(database, rates, is_shared=is_shared)
    store = _store(resources, shared, placement, is_shared=is_shared)
    queries = Queries(store, database, payloads, clock)
    models = Models(database, payloads, background, clock)
    check_ins = CheckIns(resources, store, queries, placement, background)
    with_jobs = SharedWithJobs(shared.sums, shared.signal, lease_time)
    runner = JobRunner(store, queries, database, payloads, metrics, background, settings, with_jobs)
    retention = Retention(
        database, payloads, clock, grace=settings.retention_grace, every=settings.retention_seconds
    )
    authenticator = Authenticator(
        database,
        clock,
        clock_skew=settings.clock_skew,
        skewed=metrics.skewed,
        approval_poll=settings.approval_poll_seconds,
    )
    limits = EnrolmentLimits(settings.enrolments_per_second, settings.enrolment_failures_per_minute)
    figures = Figures(metrics, settings, database, store.tasks, release)
    metrics.sources.append(figures.set)
    sums = shared.sums if settings.role == "all" else None
    intake = Intake(resources, store, queries, sums)
    part_limits = PartLimits(
        settings.max_part_bytes, settings.max_partial_bytes, settings.partial_seconds
    )
    scheduler = Scheduler(
        resources, store, check_ins, runner, shared.cleanup, retention, background
    )

    def lag() -> float:
        late = scheduler.late() if settings.role in ("all", "scheduler") else 0.0
        return max(late, check_ins.load.late)

    holder = runner.holder if settings.role in ("all", "worker") else ""
    signs = Signs(release, holder, lag)
    return Services(
        **vars(resources),
        authenticator=authenticator,
        operators=_operators(resources),
        browser_sessions=BrowserSessions(resources.server_keys, resources.session_clock or clock),
        device_registry=DeviceRegistry(authenticator, database, clock),
        enrolment=Enrolment(
            authenticator, database, clock, limits, approve_each=settings.approve_each_device
        ),
        store=store,
        queries=queries,
        models=models,
        coded_models=CodedModels(database, payloads, background),
        downloads=Downloads(store, database, metrics, background),
        evaluations=Evaluations(store, database, metrics, clock),
        check_ins=check_ins,
        lifecycle=Lifecycle(
            settings, store, models, database, payloads, shared.host, background, clock
        ),
        job_runner=runner,
        retention=retention,
        scheduler=scheduler,
        intake=intake,
        session_messages=SessionMessages(store, queries, check_ins),
        resumable=Resumable(intake, database, payloads, metrics, clock, part_limits),
        server_registry=ServerRegistry(settings, database, metrics, lease_time, signs),
        bytes_in_flight=BytesInFlight(settings.max_bytes_in_flight, metrics.bytes_in_flight),
    )


def _shared(resources: Resources, *, is_shared: bool) -> _Shared:
    settings, clock = resources.settings, resources.clock
    background = Background(settings.worker_threads)
    memory = Memory(LONGEST_WAIT + 2 * settings.poll_seconds)
    database, payloads = resources.database, resources.payloads
    return _Shared(
        background,
        memory,
        Host(resources.server_keys, resources.authority),
        Sums(),
        JobSignal(),
        FileCleanup(memory, database, payloads, background, clock, is_shared=is_shared),
        leases.now_of if clock is time.time else lambda connection: clock(),
    )


def _store(
    resources: Resources, shared: _Shared, placement: Placement, *, is_shared: bool
) -> TaskStore:
    database, payloads, restore = resources.database, resources.payloads, resources.restore
    epoch = None if restore is None else restore.epoch
    return TaskStore(
        shared.memory,
        database,
        payloads,
        Journal(payloads, shared.host, shared.lease_time, epoch),
        Planner(database, payloads, shared.host, shared.background, placement),
        Publisher(resources.metrics, shared.cleanup, shared.sums, shared.signal),
        shared.background,
        resources.clock,
        is_shared=is_shared,
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
    await services.authenticator.start()
    await services.scheduler.start()
    await services.resumable.start()
    await services.operators.start(
        host, release=release, role=settings.role, settings=settings.public_digest
    )
    if settings.role in ("all", "api"):
        await services.operators.warn_if_closed()
    await services.server_registry.start()
    try:
        yield
    finally:
        await services.server_registry.stop()
        await services.operators.stop()
        await services.resumable.stop()
        await services.scheduler.stop()
        await asyncio.to_thread(services.intake.stop)
