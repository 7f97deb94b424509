"""The jobs of tasks, under leases: aggregation, in batches or whole."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy.engine import Connection

from fedpress_protocols.errors import InvalidShare, Unavailable
from fedpress_server import failpoints
from fedpress_server.aggregation.accumulate import AggregationJob, StagedUpload, add_batch
from fedpress_server.aggregation.aggregate import AggregationResult, aggregate
from fedpress_server.aggregation.masked import Sums, unmasked
from fedpress_server.aggregation.probing import compare
from fedpress_server.coordination.attempts import Attempt
from fedpress_server.coordination.background import Background
from fedpress_server.coordination.commands import FinishedJob, Happen
from fedpress_server.coordination.live import LiveTask
from fedpress_server.coordination.noise import noised_before
from fedpress_server.coordination.publisher import JobSignal
from fedpress_server.coordination.queries import Queries
from fedpress_server.coordination.task_store import TaskStore
from fedpress_server.metrics import Metrics
from fedpress_server.observing import outages, traces
from fedpress_server.observing.logs import about
from fedpress_server.rounds import Aggregated, AggregationFailed, Event, UnmaskFailed
from fedpress_server.rounds.session import Session
from fedpress_server.settings import Settings
from fedpress_server.storage import evaluation, leases, privacy
from fedpress_server.storage.database import Database
from fedpress_server.storage.files import uploads_folder
from fedpress_server.storage.leases import JobKey, Lease, LeaseLost
from fedpress_server.storage.payloads import Payloads
from fedpress_server.storage.records import RoundKey
from fedpress_strategies.private import has_own_noise

_RETRY_AT_MOST = 60.0
_TRIES = 10
"""Leases that a job has before the round is given up for it."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SharedWithJobs:
    """`lease_time` is the one clock of all workers' leases; `sums` are those of masked bodies."""

    sums: Sums
    signal: JobSignal
    lease_time: Callable[[Connection], float]


class JobRunner:
    """Takes jobs under leases, does them in threads, and applies their results to the task.

    Whatever is done twice comes to the same bytes, and is written once: in the transaction that
    writes it the lease is held up to the newest, see `leases`.
    """

    def __init__(
        self,
        store: TaskStore,
        queries: Queries,
        database: Database,
        payloads: Payloads,
        metrics: Metrics,
        background: Background,
        settings: Settings,
        shared: SharedWithJobs,
    ) -> None:
        self._store = store
        self._queries = queries
        self._sums = shared.sums
        self._lease_time = shared.lease_time
        self._wake = shared.signal.event
        self._database = database
        self._payloads = payloads
        self._metrics = metrics
        self._background = background
        self._memory = settings.fold_memory_bytes
        self._seconds = settings.lease_seconds
        self._pause = settings.follow_seconds
        self._room = asyncio.Semaphore(settings.worker_threads)
        self.holder = leases.holder_of(settings.data_dir)
        self._ours: dict[JobKey, Lease | None] = {}
        """The leases of this process; None for a job that failed here and waits for a retry."""

    async def serve(self) -> None:
        """Do jobs as they come due, several at a time."""
        while True:
            await self._room.acquire()
            lease = None
            try:
                self._wake.clear()
                lease = await self._background.shielded(self._acquire())
            except Exception as exc:  # the database is away: a moment later, again
                outages.tell(_log, exc, "no job could be leased")
            if lease is None:
                self._room.release()
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._pause):
                        await self._wake.wait()
            else:
                self._background.serve(self._hold(lease))

    async def give_back(self) -> None:
        """Put back what is held, so that nobody has to wait for the leases to run out."""
        for lease in [lease for lease in self._ours.values() if lease is not None]:
            with suppress(Exception):
                await self._put_back(lease, "the worker was stopped", counts=False)

    async def _acquire(self) -> Lease | None:
        ours = tuple(self._ours)

        def read(connection: Connection) -> bool:
            return leases.is_any_due(connection, self.holder, self._lease_time(connection), ours)

        def write(connection: Connection) -> Lease | None:
            now = self._lease_time(connection)
            return leases.acquire(connection, self.holder, now, self._seconds, ours)

        if not await self._database.read(read):
            return None
        lease = await self._database.write(write, locks=True)
        if lease is not None:
            failpoints.reach("job-leased")
            self._ours[lease.job.job_key] = lease
            if lease.has_expired:
                self._metrics.lease_expired.inc()
        return lease

    async def once(self) -> bool:
        """Do one job, if one is due; whether it was."""
        lease = await self._background.shielded(self._acquire())
        if lease is not None:
            await self._try(lease)
            del self._ours[lease.job.job_key]
        return lease is not None

    async def _hold(self, lease: Lease) -> None:
        """Try a job; if it fails, this worker leaves it alone for a while."""
        try:
            pause = await self._try(lease)
        finally:
            self._room.release()
        self._ours[lease.job.job_key] = None
        await asyncio.sleep(pause)
        del self._ours[lease.job.job_key]
        self._wake.set()

    async def _try(self, lease: Lease) -> float:
        """Do the job, renewing its lease meanwhile. What fails is there for any worker at once, and
        for this one after the seconds that are returned."""
        key, kind = lease.job.key, lease.job.kind
        with about(*key, job=kind), traces.in_round(key, f"job: {kind}"):
            return await self._tried(lease)

    async def _tried(self, lease: Lease) -> float:
        pause, start = 0.0, time.perf_counter()
        renewing = asyncio.create_task(self._renew(lease))
        try:
            await self._do(lease)
            self._metrics.job_seconds.labels(lease.job.kind).observe(time.perf_counter() - start)
        except LeaseLost:
            _log.warning("the lease of %s was lost; what it came to is dropped", lease.job)
        except Exception as exc:
            outages.tell(_log, exc, "%s could not be done yet", lease.job)
            pause = min(2.0 ** (lease.tries - 1), _RETRY_AT_MOST)
            with suppress(Exception):
                await self._put_back(lease, str(exc), counts=not outages.is_one(exc))
        finally:
            renewing.cancel()
        return pause

    async def _renew(self, lease: Lease) -> None:
        def write(connection: Connection) -> bool:
            until = self._lease_time(connection) + self._seconds
            return leases.renew(connection, lease, until)

        while True:
            await asyncio.sleep(self._seconds / 3)
            try:
                if not await self._database.write(write, locks=True):
                    return
            except Exception:
                _log.warning("the lease of %s could not be renewed yet", lease.job)

    async def _put_back(self, lease: Lease, reason: str, *, counts: bool) -> None:
        def write(connection: Connection) -> None:
            now = self._lease_time(connection)
            leases.put_back(connection, lease, now, reason[:1000], counts=counts)

        await self._database.write(write, locks=True)

    async def _do(self, lease: Lease) -> None:
        job = lease.job
        task = await self._store.fresh(job.key[0])
        async with task.lock:  # the job is on the disk a moment before memory has come to it
            attempt = task.attempt
        if attempt is None or attempt.key != job.key:
            raise LeaseLost(f"{job} is of an attempt that is over")
        if lease.tries > _TRIES:
            self._metrics.jobs_abandoned.inc()
            why = f"{job.kind} failed {_TRIES} times: {lease.reason or 'the worker fell silent'}"
            await self._tell(task, lease, AggregationFailed(why))
        elif job.kind == "sum":
            await self._sum(task, attempt, lease)
        elif job.kind == "basis":
            raise LeaseLost(f"{job} is of rounds in two phases, which this release has not")
        else:
            await self._aggregate(task, attempt, lease)

    async def _tell(
        self, task: LiveTask, lease: Lease, event: Event, result: AggregationResult | None = None
    ) -> None:
        """Let the attempt know, if the lease is ours still."""

        command = Happen(event, lease.job.key, FinishedJob(lease, result))
        with traces.span("publish" if result is not None else "tell"):
            await self._store.apply(task, command)
        failpoints.reach("round-committed")

    async def _sum(self, task: LiveTask, attempt: Attempt, lease: Lease) -> None:
        job = self._job(task, attempt, attempt.staged[lease.job.start : lease.job.stop])
        folder = uploads_folder(attempt.key)
        try:
            digest = await self._background.in_thread(
                add_batch, job, self._payloads, folder, self._memory
            )
        except (Unavailable, OSError, MemoryError):
            raise
        except Exception as exc:
            _log.exception("task %s round %d.%d cannot be aggregated", *attempt.key)
            await self._tell(task, lease, AggregationFailed(f"the aggregation failed: {exc}"))
            return

        def write(connection: Connection) -> None:
            leases.finish(connection, lease, digest)

        failpoints.reach("sum-kept")
        await self._database.write(write, locks=True)
        failpoints.reach("sum-committed")

    async def _aggregate(self, task: LiveTask, attempt: Attempt, lease: Lease) -> None:
        digests = await self._database.read(lambda c: leases.outputs(c, attempt.key))
        folder = uploads_folder(attempt.key)
        sums = tuple(f"{folder}/{digest}" for digest in digests)
        job = replace(self._job(task, attempt, attempt.staged), sums=sums)
        if has_own_noise(attempt.terms.plan):
            secret = await self._database.write(lambda c: privacy.noise_secret(c, attempt.key[0]))
            before = await self._database.read(lambda c: noised_before(c, attempt.terms.plan))
            terms = task.config.privacy
            clip = 0.0 if terms is None else terms.clip
            job = replace(job, noise_secret=secret, noised_before=before, first_clip=clip)
        event: Event
        result: AggregationResult | None = None
        with self._metrics.fold_seconds.labels(attempt.key[0]).time():
            try:
                result = await self._background.in_thread(self._aggregated, job, attempt.session)
                event = Aggregated(result.model)
            except (Unavailable, OSError, MemoryError):
                raise
            except InvalidShare as exc:
                event = UnmaskFailed(exc.detail, tuple(exc.members.get("suspects", ())))
            except Exception as exc:
                _log.exception("task %s round %d.%d cannot be aggregated", *attempt.key)
                event = AggregationFailed(f"the aggregation failed: {exc}")
        if result is not None:
            failpoints.reach("model-kept")
            self._metrics.aggregated(attempt.key[0], result.figures)
            for name, value in result.figures.items():
                _log.info("task %s round %d.%d: %s %.4g", *attempt.key, name, value)
            comparison = await self._compared(attempt.key, job)
            rated = await self._rated(task, result.model)
            event = replace(rated, comparison=comparison, suspects=result.suspects)
        await self._tell(task, lease, event, result)
        if result is not None:
            self._background.serve(self._warn(task.record.task))

    async def _warn(self, name: str) -> None:
        """Log the signs of divergence that the task shows now."""
        try:
            warnings = await self._queries.warnings(name)
        except Exception as exc:  # the round's record and the console have them all the same
            outages.tell(_log, exc, "task %s: its rounds could not be looked at", name)
            return
        for warning in warnings.values():
            _log.warning("task %s may diverge: %s", name, warning)

    def _job(
        self, task: LiveTask, attempt: Attempt, uploads: tuple[StagedUpload, ...]
    ) -> AggregationJob:
        state, downlink = task.record.optimizer_state, task.config.downlink
        momentum = None if attempt.course is None else attempt.course.momentum
        return AggregationJob(attempt.terms, task.strategy, state, uploads, downlink, momentum)

    async def _rated(self, task: LiveTask, model: str) -> Aggregated:
        """The event that `model` is stored, with the verdicts of the evaluation so far: the reason
        to stop, if there is one, and the best model."""
        name, terms = task.record.task, task.config.evaluation

        def read(connection: Connection) -> tuple[list[evaluation.Score], int]:
            rated = task.scoreboard.rated(connection, terms)
            return rated, evaluation.last_stop(connection, name)

        rated, first_round = await self._database.read(read)
        first_round = max(first_round, task.config.schedule_after)
        since = [score for score in rated if score.round >= first_round]
        stop = evaluation.reason_to_stop(since, terms)
        return Aggregated(model, stop, evaluation.best(rated, terms))

    async def _compared(self, key: RoundKey, job: AggregationJob) -> dict[str, Any] | None:
        """Return the comparison of an attempt that is a probe; None for any other.

        A failure is logged and gives None, since the model does not depend on the comparison; an
        outage of the storage is raised, and the job is tried again.
        """
        if not job.terms.plan.sketch:
            return None
        try:
            comparison = await self._background.in_thread(compare, job.terms, job.uploads)
        except (Unavailable, OSError):
            raise
        except Exception:
            _log.exception("task %s round %d.%d cannot be compared", *key)
            return None
        if comparison is None:
            return None
        if comparison.progress is not None:
            self._metrics.progress.labels(key[0]).set(comparison.progress)
        return comparison.model_dump(mode="json")

    def _aggregated(self, job: AggregationJob, session: Session | None) -> AggregationResult:
        if session is None:
            return aggregate(job, self._payloads, self._memory)
        summed, masked, suspects = unmasked(job, session, self._sums, self._payloads)
        result = aggregate(job, self._payloads, self._memory, summed)
        return replace(result, masked=masked, suspects=suspects)
