"""Work that any worker may do: rows that are leased, renewed, and finished by whoever holds them.

A lease is a token and a time. Who holds one may work; only who holds the newest may write what came
of it, in one transaction with the check, so a worker that was paused past its lease changes nothing
however late it wakes. All times here are of one clock.
"""

from __future__ import annotations

import re
import secrets
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
    """Somebody else has the job, or the job is no more: nothing may be written."""


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be done, of the attempt `key`: for a sum, its uploads [start, stop)."""

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
    """A job, and that it is ours; `tries` counts the leases it has had, this one among them."""

    job: Job
    token: str
    tries: int
    reason: str
    """What went wrong the last time, "" if nothing did."""
    has_expired: bool
    """Whether another's lease ran out before this one."""


def now_of(connection: Connection) -> float:
    """The database's clock, Unix seconds: one for all workers."""
    moment = "(julianday('now') - 2440587.5) * 86400.0"
    if connection.dialect.name == "postgresql":
        moment = "extract(epoch FROM clock_timestamp())"
    return float(connection.execute(sa.select(sa.text(moment))).scalar_one())


def has_outputs(connection: Connection, due: Sequence[Job]) -> bool:
    """Whether the attempt that these are all jobs of has any."""
    query = sa.select(sa.literal(1)).where(*_of_round(due[0].key)).limit(1)
    return connection.execute(query).first() is not None


def add(connection: Connection, due: Sequence[Job], now: float) -> None:
    """All the jobs of an attempt that has none."""
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


def is_any_due(
    connection: Connection, holder: str, now: float, but: Collection[JobKey] = ()
) -> bool:
    """Whether `acquire` would find a job."""
    return _next(connection, holder, now, but, lock=False) is not None


def acquire(
    connection: Connection,
    holder: str,
    now: float,
    seconds: float,
    but: Collection[JobKey] = (),
) -> Lease | None:
    """The job that has waited longest, for `seconds`; none of `but`. Workers that ask at a time get
    different jobs, and none waits for another.

    What `holder` has itself, and not among `but`, it has without knowing, as after a commit whose
    outcome it was not told, or since before it was killed; it may have it again at once.
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
    """False if the lease is lost."""
    changed = connection.execute(sa.update(jobs).where(*_held(lease)).values(lease_expiry=until))
    return changed.rowcount == 1


def finish(connection: Connection, lease: Lease, output: str | None = None) -> None:
    """To be called in the transaction that writes what the job came to; raises LeaseLost.

    `output` is the digest of a batch's sum.
    """
    done = {"state": "done", "output": output, "lease_token": None}
    changed = connection.execute(sa.update(jobs).where(*_held(lease)).values(**done))
    if changed.rowcount != 1:
        raise LeaseLost(f"the lease of {lease.job} is another's")


def put_back(connection: Connection, lease: Lease, at: float, reason: str, *, counts: bool) -> None:
    """Nobody holds the job any more, and it may be had from `at` on; without `counts` this try
    was none. Raises LeaseLost."""
    tries = lease.tries if counts else lease.tries - 1
    values = {"lease_token": None, "lease_expiry": at, "reason": reason, "attempts": tries}
    changed = connection.execute(sa.update(jobs).where(*_held(lease)).values(**values))
    if changed.rowcount != 1:
        raise LeaseLost(f"the lease of {lease.job} is another's")


def outputs(connection: Connection, key: RoundKey) -> list[str]:
    """The digests of the attempt's sums, in the order of their batches."""
    found = connection.execute(
        sa.select(jobs.c.output)
        .where(*_of_round(key), jobs.c.kind == "sum", jobs.c.state == "done")
        .order_by(jobs.c.batch)
    )
    return list(found.scalars())


def all_outputs(connection: Connection) -> list[tuple[RoundKey, str]]:
    """Every digest that `outputs` has for any attempt."""
    query = sa.select(jobs.c.task, jobs.c.round, jobs.c.attempt, jobs.c.output)
    found = connection.execute(query.where(jobs.c.output.is_not(None)))
    return [((task, number, attempt), output) for task, number, attempt, output in found]


def holder_of(data_dir: Path) -> str:
    """The name of the one worker that holds this folder, the same after a restart.

    Should a copy of the folder have another worker, the two take each other's leases: then work is
    done twice, and still counts once.
    """
    file = data_dir / _HOLDER
    with suppress(FileNotFoundError):
        found = file.read_text("ascii", "replace").strip()
        if re.fullmatch(r"[0-9a-f]{12}", found):
            return found
    made = secrets.token_hex(6)
    LocalPayloads(data_dir).put(_HOLDER, f"{made}\n".encode())
    return made


def drop(connection: Connection, key: RoundKey) -> None:
    """For when the attempt is past its work: whoever still holds a lease has lost it."""
    connection.execute(sa.delete(jobs).where(*_of_round(key)))


_NAMES = ("task", "round", "attempt", "kind", "batch")


def _next(
    connection: Connection, holder: str, now: float, but: Collection[JobKey], *, lock: bool
) -> sa.Row[Any] | None:
    part = jobs.alias()
    is_summed = ~sa.exists().where(
        *(part.c[name] == jobs.c[name] for name in _NAMES[:3]),
        part.c.kind == "sum",
        part.c.state == "open",
    )
    is_free = sa.or_(jobs.c.lease_expiry <= now, jobs.c.lease_token.startswith(f"{holder}-"))
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
