"""Leases on jobs: workers acquire, renew and finish them.

A lease is a token with an expiry time. Only the holder of the newest lease may write the job's
result, in one transaction with the check (fencing), so a worker that was paused past its lease
changes nothing. All times are of the database's clock.
"""

from __future__ import annotations

import re
import secrets
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from fedpress_server.storage.payloads import LocalPayloads
from fedpress_server.storage.records import RoundKey
from fedpress_server.storage.tables import jobs

Kind = Literal["sum", "fold", "basis"]
"""A batch of uploads added up; the round's model made, once all sums are there. An earlier release
has jobs for a basis."""
JobKey = tuple[str, int, int, Kind, int]
"""Task, round, attempt, kind, batch."""


_HOLDER = "worker"


class LeaseLost(Exception):
    """Another worker has the job, or the job was dropped: nothing may be written."""


@dataclass(frozen=True, slots=True)
class Job:
    """A job of the attempt `key`: for a sum, its uploads [start, stop)."""

    key: RoundKey
    kind: Kind
    batch: int = 0
    start: int = 0
    stop: int = 0

    @property
    def job_key(self) -> JobKey:
        return (*self.key, self.kind, self.batch)


@dataclass(frozen=True, slots=True)
class Lease:
    """A leased job; `tries` counts its leases, including this one."""

    job: Job
    token: str
    tries: int
    reason: str
    """The error of the last try, "" if none."""
    has_expired: bool
    """Whether a previous lease expired."""


def now_of(connection: Connection) -> float:
    """The database's clock, Unix seconds: one for all workers."""
    moment = "(julianday('now') - 2440587.5) * 86400.0"
    if connection.dialect.name == "postgresql":
        moment = "extract(epoch FROM clock_timestamp())"
    return float(connection.execute(sa.select(sa.text(moment))).scalar_one())


def has_outputs(connection: Connection, due: Sequence[Job]) -> bool:
    """Whether the attempt of these jobs has any job rows."""
    query = sa.select(sa.literal(1)).where(*_of_round(due[0].key)).limit(1)
    return connection.execute(query).first() is not None


def add(connection: Connection, due: Sequence[Job], now: float) -> None:
    """Add all jobs of an attempt that has none."""
    rows = [
        {
            **dict(zip(_NAMES, job.job_key, strict=True)),
            "start": job.start,
            "stop": job.stop,
            "state": "open",
            "attempts": 0,
            "lease_expiry": now,
            "reason": "",
        }
        for job in due
    ]
    connection.execute(sa.insert(jobs), rows)


def num_held(connection: Connection, now: float) -> Counter[str]:
    """The number of leases that have not expired, by holder."""
    query = sa.select(jobs.c.lease_token).where(
        jobs.c.state == "open", jobs.c.lease_token.is_not(None), jobs.c.lease_expiry > now
    )
    tokens = connection.execute(query).scalars()
    return Counter(token.rpartition("-")[0] for token in tokens)


def longest_wait(connection: Connection, now: float) -> float:
    """Seconds for which the job that waits longest could have been leased; 0 without one."""
    row = _next(connection, None, now, (), lock=False)
    return 0.0 if row is None else max(0.0, now - row.lease_expiry)


def is_any_due(
    connection: Connection, holder: str, now: float, but: Collection[JobKey] = ()
) -> bool:
    """Whether `acquire` would return a job."""
    return _next(connection, holder, now, but, lock=False) is not None


def acquire(
    connection: Connection,
    holder: str,
    now: float,
    seconds: float,
    but: Collection[JobKey] = (),
) -> Lease | None:
    """Lease the longest waiting job for `seconds`, except those in `but`. Concurrent workers get
    different jobs and never wait for each other.

    Jobs leased by `holder` itself that are not in `but` were acquired in a commit with unknown
    outcome, or before a kill; they are available to it at once.
    """
    row = _next(connection, holder, now, but, lock=True)
    if row is None:
        return None
    key: RoundKey = (row.task, row.round, row.attempt)
    job = Job(key, row.kind, row.batch, row.start, row.stop)
    token = f"{holder}-{secrets.token_hex(8)}"
    changed = connection.execute(
        sa.update(jobs)
        .where(*_is(job), _same_token(row.lease_token))
        .values(lease_token=token, lease_expiry=now + seconds, attempts=row.attempts + 1)
    )
    if changed.rowcount != 1:
        return None
    is_anothers = row.lease_token is not None and not row.lease_token.startswith(holder)
    return Lease(job, token, row.attempts + 1, row.reason, is_anothers)


def renew(connection: Connection, lease: Lease, until: float) -> bool:
    """Extend the lease; False if it is lost."""
    changed = connection.execute(sa.update(jobs).where(*_held(lease)).values(lease_expiry=until))
    return changed.rowcount == 1


def finish(connection: Connection, lease: Lease, output: str | None = None) -> None:
    """Finish a job, in the transaction that writes its result; raises LeaseLost.

    `output` is the digest of a batch's sum.
    """
    values = {"state": "done", "output": output, "lease_token": None}
    changed = connection.execute(sa.update(jobs).where(*_held(lease)).values(**values))
    if changed.rowcount != 1:
        raise LeaseLost(f"the lease of {lease.job} was taken over by another worker")


def put_back(connection: Connection, lease: Lease, at: float, reason: str, *, counts: bool) -> None:
    """Release the job, available from `at` on; without `counts` this try is not counted. Raises
    LeaseLost."""
    tries = lease.tries if counts else lease.tries - 1
    values = {"lease_token": None, "lease_expiry": at, "reason": reason, "attempts": tries}
    changed = connection.execute(sa.update(jobs).where(*_held(lease)).values(**values))
    if changed.rowcount != 1:
        raise LeaseLost(f"the lease of {lease.job} was taken over by another worker")


def outputs(connection: Connection, key: RoundKey) -> list[str]:
    """The digests of the attempt's sums, in the order of their batches."""
    rows = connection.execute(
        sa.select(jobs.c.output)
        .where(*_of_round(key), jobs.c.kind == "sum", jobs.c.state == "done")
        .order_by(jobs.c.batch)
    )
    return list(rows.scalars())


def all_outputs(connection: Connection) -> list[tuple[RoundKey, str]]:
    """The digests of the sums of all attempts."""
    query = sa.select(jobs.c.task, jobs.c.round, jobs.c.attempt, jobs.c.output)
    rows = connection.execute(query.where(jobs.c.output.is_not(None)))
    return [((task, number, attempt), output) for task, number, attempt, output in rows]


def holder_of(data_dir: Path) -> str:
    """The holder name of this folder's worker, the same after a restart.

    Two workers with copies of the folder take each other's leases: then jobs are done twice, but
    count once.
    """
    file = data_dir / _HOLDER
    with suppress(FileNotFoundError):
        stored = file.read_text("ascii", "replace").strip()
        if re.fullmatch(r"[0-9a-f]{12}", stored):
            return stored
    holder = secrets.token_hex(6)
    LocalPayloads(data_dir).put(_HOLDER, f"{holder}\n".encode())
    return holder


def drop(connection: Connection, key: RoundKey) -> None:
    """Drop the jobs of a finished attempt: remaining leases are lost."""
    connection.execute(sa.delete(jobs).where(*_of_round(key)))


_NAMES = ("task", "round", "attempt", "kind", "batch")


def _next(
    connection: Connection, holder: str | None, now: float, but: Collection[JobKey], *, lock: bool
) -> sa.Row[Any] | None:
    """The longest waiting job whose lease has expired, or is `holder`'s own."""
    part = jobs.alias()
    is_summed = ~sa.exists().where(
        *(part.c[name] == jobs.c[name] for name in _NAMES[:3]),
        part.c.kind == "sum",
        part.c.state == "open",
    )
    is_free = jobs.c.lease_expiry <= now
    if holder is not None:
        is_free = sa.or_(is_free, jobs.c.lease_token.startswith(f"{holder}-"))
    is_ready = sa.or_(jobs.c.kind != "fold", is_summed)
    query = (
        sa.select(jobs)
        .where(jobs.c.state == "open", is_free, is_ready)
        .order_by(jobs.c.lease_expiry, jobs.c.task, jobs.c.batch)
        .limit(1)
    )
    for key in but:
        query = query.where(sa.not_(sa.and_(*_equal(key))))
    if lock:
        query = query.with_for_update(of=jobs, skip_locked=True)
    return connection.execute(query).one_or_none()


def _equal(key: JobKey) -> list[sa.ColumnElement[bool]]:
    return [jobs.c[name] == value for name, value in zip(_NAMES, key, strict=True)]


def _is(job: Job) -> list[sa.ColumnElement[bool]]:
    return _equal(job.job_key)


def _held(lease: Lease) -> list[sa.ColumnElement[bool]]:
    return [*_is(lease.job), jobs.c.lease_token == lease.token, jobs.c.state == "open"]


def _same_token(token: str | None) -> sa.ColumnElement[bool]:
    return jobs.c.lease_token.is_(None) if token is None else jobs.c.lease_token == token


def _of_round(key: RoundKey) -> list[sa.ColumnElement[bool]]:
    return [jobs.c[name] == value for name, value in zip(_NAMES[:3], key, strict=True)]
