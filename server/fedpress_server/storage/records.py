"""SQL statements about devices, tasks, rounds, uploads and receipts; each runs in its caller's
transaction."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Connection, Row

from fedpress_protocols.messages import MEANS, RoundFigures, RoundStatus, TaskState
from fedpress_server.storage import evaluation
from fedpress_server.storage.prepared import Prepared, Rows, each_of
from fedpress_server.storage.tables import (
    assignments,
    bases,
    clients,
    enrolment_tokens,
    models,
    request_nonces,
    round_events,
    rounds,
    session_messages,
    tasks,
    uploads,
    waiting,
)

RoundKey = tuple[str, int, int]
"""Task, round, attempt."""
Approval = Literal["waiting", "approved", "rejected"]
"""An operator's decision about a device; most need none."""


# Devices


@dataclass(frozen=True, slots=True)
class Device:
    """An enrolled device and the key that signs its requests."""

    client_id: str
    key_id: str
    public_key: bytes
    name: str
    token_id: str
    enrolled_at: float
    revoked_at: float | None
    approval: Approval = "approved"
    decided_at: float | None = None
    """When an operator approved or rejected it."""
    rotated_at: float | None = None
    """When it rotated to this key; None if it never did."""
    seen_at: float | None = None
    """When one of its requests was noted, see `Authenticator`; None before the first."""
    agent: str = ""
    """Its software, as the device's User-Agent says."""
    clock_ahead: float | None = None
    """Seconds by which its clock was ahead of the server's then."""


@dataclass(frozen=True, slots=True)
class EnrolmentToken:
    token_id: str
    token_hash: str
    uses: int
    used: int
    created_at: float
    expires_at: float
    note: str
    approve_each: bool = False
    """Whether devices that enrol with it wait for approval."""
    revoked_at: float | None = None


def devices(connection: Connection) -> list[Device]:
    return [Device(*row) for row in connection.execute(sa.select(clients))]


def device_by_key(connection: Connection, key_id: str) -> Device | None:
    row = connection.execute(sa.select(clients).where(clients.c.key_id == key_id)).one_or_none()
    return Device(*row) if row else None


def add_device(connection: Connection, device: Device) -> None:
    """Add a device and count one use of its token."""
    token = enrolment_tokens.c
    connection.execute(
        sa.update(enrolment_tokens)
        .where(token.token_id == device.token_id)
        .values(used=token.used + 1)
    )
    connection.execute(sa.insert(clients), _fields(device))


def revoked_among(connection: Connection, client_ids: Sequence[str]) -> set[str]:
    """The revoked devices among `client_ids`."""
    return set(_REVOKED.run(connection, client_ids=json.dumps(list(client_ids))).scalars())


def add_token(connection: Connection, token: EnrolmentToken) -> None:
    connection.execute(sa.insert(enrolment_tokens), _fields(token))


def token_by_hash(connection: Connection, token_hash: str) -> EnrolmentToken | None:
    row = connection.execute(
        sa.select(enrolment_tokens).where(enrolment_tokens.c.token_hash == token_hash)
    ).one_or_none()
    return EnrolmentToken(*row) if row else None


# Models and tasks


@dataclass(frozen=True, slots=True)
class ModelRecord:
    digest: str
    spec: str
    num_bytes: int
    created_at: float


@dataclass(frozen=True, slots=True)
class TaskRecord:
    task: str
    config: str
    state: TaskState
    model: str
    spec: str
    optimizer_state: str | None
    published: dict[str, str] | None
    round: int
    rounds: int
    max_body_bytes: int
    created_at: float
    ended_at: float | None
    best: str | None = None
    reason: str | None = None
    version: int = 0
    """The version of the task's records, incremented by every write that other servers must see."""
    held_at: float | None = None
    """When an operator paused assignments; None if they are not paused."""


def model(connection: Connection, digest: str) -> ModelRecord | None:
    row = connection.execute(sa.select(models).where(models.c.digest == digest)).one_or_none()
    return ModelRecord(*row) if row else None


def add_model(connection: Connection, record: ModelRecord) -> bool:
    """Add a model; False if it exists, as the same digest is the same model."""
    if model(connection, record.digest):
        return False
    connection.execute(sa.insert(models), _fields(record))
    return True


def task_records(connection: Connection) -> list[TaskRecord]:
    return [TaskRecord(*row) for row in connection.execute(sa.select(tasks))]


def task_record(connection: Connection, task: str) -> TaskRecord:
    return TaskRecord(*connection.execute(sa.select(tasks).where(tasks.c.task == task)).one())


def add_task(connection: Connection, record: TaskRecord) -> None:
    connection.execute(sa.insert(tasks), _fields(record))


def set_task(connection: Connection, record: TaskRecord) -> None:
    """Write the record except its version, which `claim_task` increments."""
    values = _fields(record)
    del values["version"]
    connection.execute(sa.update(tasks).where(tasks.c.task == record.task).values(**values))


def claim_task(connection: Connection, task: str, version: int) -> bool:
    """Increment the task's version if it is still `version`; returns whether it was.

    One statement compares, increments and, with concurrent writers, locks: a second writer waits
    for the row, and then sees another version.
    """
    return _CLAIM.run(connection, of_task=task, at_version=version).rowcount == 1


def task_version(connection: Connection, task: str) -> int | None:
    """The task's version; None for an unknown task."""
    return _VERSION.run(connection, of_task=task).scalar_one_or_none()


def task_versions(connection: Connection) -> dict[str, int]:
    return {row.task: row.version for row in _VERSIONS.run(connection)}


# Rounds


def open_round(
    connection: Connection,
    key: RoundKey,
    *,
    plan: str,
    base_model: str,
    size: int,
    minimum: int,
    opened_at: float,
    deadline: float,
    course: dict[str, Any] | None = None,
) -> None:
    task, number, attempt = key
    connection.execute(
        sa.insert(rounds).values(
            task=task,
            round=number,
            attempt=attempt,
            plan=plan,
            state="collecting",
            reason="",
            base_model=base_model,
            size=size,
            minimum=minimum,
            assigned=0,
            received=0,
            included=0,
            num_examples=0,
            upload_bytes=0,
            wire_upload_bytes=0,
            download_bytes=0,
            opened_at=opened_at,
            deadline=deadline,
            course=course,
        )
    )


def update_round(connection: Connection, key: RoundKey, **values: Any) -> None:
    connection.execute(sa.update(rounds).where(*_is_round(rounds, key)).values(**values))


def count(connection: Connection, key: RoundKey, **amounts: float) -> None:
    """Add `amounts` to the round's counters by name."""
    task, number, attempt = key
    added = {f"add_{name}": amount for name, amount in amounts.items()}
    counting = _counting(tuple(amounts))
    counting.run(connection, of_task=task, of_round=number, of_attempt=attempt, **added)


@cache
def _counting(names: tuple[str, ...]) -> Prepared:
    of = zip(_KEY, ("of_task", "of_round", "of_attempt"), strict=True)
    values = {name: rounds.c[name] + sa.bindparam(f"add_{name}") for name in names}
    is_this = [rounds.c[name] == sa.bindparam(parameter) for name, parameter in of]
    return Prepared(sa.update(rounds).where(*is_this).values(**values))


@dataclass(frozen=True, slots=True)
class OpenRoundRecord:
    """The data of a task's newest attempt that a restart needs."""

    round: int
    attempt: int
    plan: str
    opened_at: float
    course: dict[str, Any] | None = None


def newest_round(connection: Connection, task: str) -> OpenRoundRecord:
    row = connection.execute(
        sa.select(
            rounds.c.round, rounds.c.attempt, rounds.c.plan, rounds.c.opened_at, rounds.c.course
        )
        .where(rounds.c.task == task)
        .order_by(rounds.c.round.desc(), rounds.c.attempt.desc())
        .limit(1)
    ).one()
    return OpenRoundRecord(*row)


def last_sessions(connection: Connection, key: RoundKey, count: int) -> list[dict[str, Any]]:
    """The stored status of the sessions of the task's last attempts, newest first, without the
    attempt `key`."""
    query = (
        sa.select(rounds.c.session)
        .where(rounds.c.task == key[0], ~sa.and_(*_is_round(rounds, key)))
        .order_by(rounds.c.round.desc(), rounds.c.attempt.desc())
        .limit(count)
    )
    return [each for each in connection.execute(query).scalars() if each]


def plan_of(connection: Connection, key: RoundKey) -> str:
    query = sa.select(rounds.c.plan).where(*_is_round(rounds, key))
    return str(connection.execute(query).scalar_one())


def plans_in_use(connection: Connection, task: str) -> list[str]:
    """The plans of the task's newest attempt, and of others with an assignment without receipt."""
    newest = newest_round(connection, task)
    query = (
        sa.select(rounds.c.plan)
        .distinct()
        .join(assignments, sa.and_(*(rounds.c[name] == assignments.c[name] for name in _KEY)))
        .where(rounds.c.task == task, assignments.c.receipt.is_(None))
    )
    return [newest.plan, *connection.execute(query).scalars()]


def add_events(
    connection: Connection, key: RoundKey, at: float, numbered: Sequence[tuple[int, dict[str, Any]]]
) -> None:
    """Add several events of an attempt with their numbers and one time."""
    _EVENTS.add(connection, [(*key, seq, at, event) for seq, event in numbered])


def events(
    connection: Connection, key: RoundKey, after: int = 0
) -> list[tuple[float, dict[str, Any]]]:
    """The events of the attempt after its event `after`, with times, in order."""
    rows = connection.execute(
        sa.select(round_events.c.at, round_events.c.event)
        .where(*_is_round(round_events, key), round_events.c.seq > after)
        .order_by(round_events.c.seq)
    )
    return [(at, event) for at, event in rows]


def num_old_events(connection: Connection, task: str, through: int, closed_by: float) -> int:
    """The number of events that `drop_old_events` would delete in all."""
    old = _old_events(task, through, closed_by).subquery()
    return connection.execute(sa.select(sa.func.count()).select_from(old)).scalar_one()


def drop_old_events(
    connection: Connection, task: str, through: int, closed_by: float, most: int
) -> int:
    """Delete the first `most` events of the task's attempts at rounds up to `through`, of those
    closed by that time; returns how many there were.

    Only the newest attempt's events are ever read again: see `Journal.newest`.
    """
    old = _old_events(task, through, closed_by)
    old = old.order_by(*(round_events.c[name] for name in (*_KEY[1:], "seq"))).limit(most)
    key = sa.tuple_(*(round_events.c[name] for name in (*_KEY, "seq")))
    return connection.execute(sa.delete(round_events).where(key.in_(old))).rowcount


def _old_events(task: str, through: int, closed_by: float) -> sa.Select[Any]:
    """The keys of these events."""
    event, row = round_events.c, rounds.c
    of_attempt = sa.and_(*(event[name] == row[name] for name in _KEY))
    first = sa.select(sa.func.min(event.round)).where(event.task == task).scalar_subquery()
    return (
        sa.select(event.task, event.round, event.attempt, event.seq)
        .join(rounds, of_attempt)
        .where(row.task == task, row.round.between(first, through), row.closed_at <= closed_by)
    )


def unfinished_rounds(connection: Connection) -> set[RoundKey]:
    rows = connection.execute(
        sa.select(rounds.c.task, rounds.c.round, rounds.c.attempt).where(
            rounds.c.state.in_(["collecting", "basing", "masking", "folding"])
        )
    )
    return {(task, number, attempt) for task, number, attempt in rows}


def round_history(
    connection: Connection, task: str, before: tuple[int, int] | None, limit: int
) -> list[RoundStatus]:
    """The newest `limit` attempts, optionally before `before` (round, attempt); oldest first."""
    row = rounds.c
    query = sa.select(*_SHOWN, *_SUMS).where(row.task == task)
    if before is not None:
        number, attempt = before
        is_before = sa.or_(row.round < number, row.attempt < attempt)
        query = query.where(row.round <= number, is_before)
    newest_first = query.order_by(row.round.desc(), row.attempt.desc()).limit(limit)
    rows = connection.execute(newest_first).all()[::-1]
    means = evaluation.means(connection, task, {row.model for row in rows if row.model})
    return [_status(row, means.get(row.model, {})) for row in rows]


def newest_models(connection: Connection, task: str, most: int) -> list[str]:
    """The task's newest models, bases and results of its rounds; newest first."""
    row = rounds.c
    query = (
        sa.select(row.round, row.attempt, row.model, row.base_model)
        .where(row.task == task)
        .order_by(row.round.desc(), row.attempt.desc())
        .limit(most)
    )
    newest: dict[str, None] = {}
    before = _BEYOND, _BEYOND
    while len(newest) < most:
        page = connection.execute(
            query.where(sa.tuple_(row.round, row.attempt) < sa.tuple_(*before))
        ).all()
        for number, attempt, *digests in page:
            before = number, attempt
            newest.update(dict.fromkeys(digest for digest in digests if digest is not None))
        if len(page) < most:
            break
    return list(newest)[:most]


def uploaded(connection: Connection, task: str, after: int) -> list[int]:
    """The accepted upload bytes of each round after `after`, all its attempts together, in order.
    Repeated and refused bodies are not counted.

    One number per round of the task, at most 2^30, from one sum over the uploads: only for
    schedules with a budget, once per opened round, in a concurrent read.
    """
    of_attempt = sa.and_(
        assignments.c.task == rounds.c.task,
        assignments.c.round == rounds.c.round,
        assignments.c.attempt == rounds.c.attempt,
    )
    query = (
        sa.select(sa.func.coalesce(sa.func.sum(uploads.c.num_bytes), 0))
        .select_from(rounds.outerjoin(assignments, of_attempt).outerjoin(uploads))
        .where(rounds.c.task == task, rounds.c.round > after)
        .group_by(rounds.c.round)
        .order_by(rounds.c.round)
    )
    return [int(total) for total in connection.scalars(query)]


def drawn(connection: Connection, task: str, since: int) -> tuple[int, int]:
    """Return how many assignments there were from round `since` on, and of how many clients."""
    query = sa.select(sa.func.count(), sa.func.count(assignments.c.client_id.distinct())).where(
        assignments.c.task == task, assignments.c.round >= since
    )
    num_assignments, num_clients = connection.execute(query).one()
    return int(num_assignments), int(num_clients)


def flat(connection: Connection, task: str, since: int) -> tuple[int, int]:
    """Return how many of the updates that came from round `since` on are flat, of how many."""
    query = sa.select(
        sa.func.coalesce(sa.func.sum(rounds.c.num_flat), 0),
        sa.func.coalesce(sa.func.sum(rounds.c.received), 0),
    ).where(rounds.c.task == task, rounds.c.round >= since)
    num_flat, received = connection.execute(query).one()
    return int(num_flat), int(received)


def _status(row: Row[Any], metrics: dict[str, float]) -> RoundStatus:
    """`row` has the columns `_SHOWN`, then those of `_SUMS`."""
    values = tuple(row)
    (num_uploads, *sums), shown = values[-len(_SUMS) :], values[: -len(_SUMS)]
    fields = dict(zip(_NAMES, shown, strict=True))
    if num_uploads:
        means = {name: total / num_uploads for name, total in zip(MEANS, sums, strict=True)}
        fields["figures"] = RoundFigures(num_uploads=num_uploads, **means)
    for name in ("published", "strategy_figures"):
        fields[name] = fields[name] or {}
    return RoundStatus(**fields, metrics=metrics)


_BEYOND = 2**31 - 1
"""Greater than every attempt, and still a database INTEGER."""


def newest_attempt(connection: Connection, task: str, number: int) -> RoundStatus | None:
    """The newest attempt at round `number`; None if there is none."""
    statuses = round_history(connection, task, (number, _BEYOND), 1)
    return statuses[0] if statuses and statuses[0].round == number else None


def measured_attempt(
    connection: Connection, task: str, number: int, least: int
) -> RoundStatus | None:
    """The newest attempt at round `number`, with metrics by group and class of at least `least`
    devices."""
    status = newest_attempt(connection, task, number)
    if status is None or status.model is None:
        return status
    of_model = (connection, task, status.model, least)
    measured = {
        "measured": evaluation.measured(connection, task, status.model),
        "groups": evaluation.groups(*of_model),
        "classes": evaluation.classes(*of_model),
    }
    return status.model_copy(update=measured)


def bases_of(connection: Connection, task: str) -> dict[str, str]:
    """By client: the digest of its last included update, decoded, if it is stored."""
    query = sa.select(bases.c.client_id, bases.c.digest).where(bases.c.task == task)
    return {client_id: digest for client_id, digest in connection.execute(query)}


def set_base(connection: Connection, task: str, client_id: str, digest: str) -> None:
    mine = (bases.c.task == task, bases.c.client_id == client_id)
    changed = connection.execute(sa.update(bases).where(*mine).values(digest=digest))
    if not changed.rowcount:
        row = {"task": task, "client_id": client_id, "digest": digest}
        connection.execute(sa.insert(bases), row)


def drop_bases(connection: Connection, task: str) -> None:
    connection.execute(sa.delete(bases).where(bases.c.task == task))


def unenrolled(connection: Connection, client_ids: Iterable[str]) -> list[str]:
    """The ids among `client_ids` without a device, in order."""
    enrolled = set(connection.execute(sa.select(clients.c.client_id)).scalars())
    return [client_id for client_id in client_ids if client_id not in enrolled]


# Assignments and uploads


@dataclass(frozen=True, slots=True)
class UploadRecord:
    assignment: str
    digest: str
    num_bytes: int
    num_examples: int
    received_at: float
    loss: float | None = None
    """The loss at the round's model, if the plan reports it."""
    began_at: float | None = None
    seconds: float | None = None
    """Seconds from the first byte, at `began_at`, to the last; None if unknown."""


@dataclass(frozen=True, slots=True)
class AssignmentRecord:
    assignment: str
    task: str
    round: int
    attempt: int
    client_id: str
    position: int
    profile: str
    assigned_at: float
    receipt: str | None
    turn: int = 0

    @property
    def key(self) -> RoundKey:
        return self.task, self.round, self.attempt


def add_assignments(connection: Connection, batch: Sequence[AssignmentRecord]) -> None:
    _ASSIGNMENTS.add(connection, [_values(each) for each in batch])


def assignment(connection: Connection, name: str) -> AssignmentRecord | None:
    row = connection.execute(
        sa.select(assignments).where(assignments.c.assignment == name)
    ).one_or_none()
    return AssignmentRecord(*row) if row else None


def assignments_of(connection: Connection, key: RoundKey, most: int) -> list[AssignmentRecord]:
    """The first `most` assignments of an attempt, by position."""
    query = sa.select(assignments).where(*_is_round(assignments, key))
    rows = connection.execute(query.order_by(assignments.c.position).limit(most))
    return [AssignmentRecord(*row) for row in rows]


@dataclass(frozen=True, slots=True)
class ProfileUse:
    """How often a profile was assigned in an attempt, and what came of it."""

    profile: str
    assigned: int
    uploads: int
    num_bytes: int
    """Of the uploads' bodies."""


def profile_use(connection: Connection, key: RoundKey) -> list[ProfileUse]:
    """Of an attempt, by name."""
    query = (
        sa.select(
            assignments.c.profile,
            sa.func.count(),
            sa.func.count(uploads.c.assignment),
            sa.func.coalesce(sa.func.sum(uploads.c.num_bytes), 0),
        )
        .outerjoin(uploads, uploads.c.assignment == assignments.c.assignment)
        .where(*_is_round(assignments, key))
        .group_by(assignments.c.profile)
        .order_by(assignments.c.profile)
    )
    return [
        ProfileUse(profile, assigned, num, int(num_bytes))
        for profile, assigned, num, num_bytes in connection.execute(query)
    ]


def add_uploads(connection: Connection, taken: Sequence[UploadRecord], now: float) -> None:
    """Add uploads, with `now` as their time of receipt."""
    _UPLOADS.add(connection, [_values(each, received_at=now) for each in taken])


def upload(connection: Connection, name: str) -> UploadRecord | None:
    row = connection.execute(sa.select(uploads).where(uploads.c.assignment == name)).one_or_none()
    return UploadRecord(*row) if row else None


def set_receipt(connection: Connection, name: str, receipt: str) -> None:
    """Set the final receipt; a second one for an assignment is a bug, and raises."""
    changed = connection.execute(
        sa.update(assignments)
        .where(assignments.c.assignment == name, assignments.c.receipt.is_(None))
        .values(receipt=receipt)
    )
    if changed.rowcount != 1:
        raise AssertionError(f"assignment {name} has a receipt, or does not exist")


def receipts(
    connection: Connection, client_id: str, names: Sequence[str]
) -> tuple[list[str], set[str]]:
    """The client's receipts for the assignments `names`, and those of these that are the
    client's."""
    rows = connection.execute(
        sa.select(assignments.c.assignment, assignments.c.receipt)
        .where(assignments.c.assignment.in_(names), assignments.c.client_id == client_id)
        .order_by(assignments.c.assigned_at, assignments.c.assignment)
    ).all()
    return [receipt for _, receipt in rows if receipt], {name for name, _ in rows}


def set_waiting(
    connection: Connection,
    task: str,
    client_id: str,
    is_eligible: bool,
    uplink: float | None,
    at: float,
) -> None:
    """Record that the device waits for an assignment since its check-in `at`, if it is eligible."""
    mine = (waiting.c.task == task, waiting.c.client_id == client_id)
    values = {"is_eligible": is_eligible, "seen_at": at, "uplink": uplink}
    update = sa.update(waiting).where(*mine).values(looks=waiting.c.looks + 1, **values)
    if not connection.execute(update).rowcount:
        row = {"task": task, "client_id": client_id, "looks": 1, **values}
        connection.execute(sa.insert(waiting), row)


@dataclass(frozen=True, slots=True)
class Waiting:
    """A device that checked in without getting an assignment, `looks` times in a row, and what it
    says of its `uplink`, in bytes a second."""

    client_id: str
    is_eligible: bool
    seen_at: float
    looks: int
    uplink: float | None


def waiting_since(connection: Connection, task: str, at: float) -> list[Waiting]:
    """The devices that checked in after `at`, in order of time."""
    row = waiting.c
    rows = connection.execute(
        sa.select(row.client_id, row.is_eligible, row.seen_at, row.looks, row.uplink)
        .where(row.task == task, row.seen_at > at)
        .order_by(row.seen_at)
    )
    return [Waiting(*each) for each in rows]


def drop_waiting(connection: Connection, task: str, client_ids: Collection[str]) -> None:
    mine = (waiting.c.task == task, waiting.c.client_id.in_(list(client_ids)))
    connection.execute(sa.delete(waiting).where(*mine))


def forget_waiting(connection: Connection, before: float) -> None:
    connection.execute(sa.delete(waiting).where(waiting.c.seen_at <= before))


Nonce = tuple[str, str, int]
"""Key id, nonce, expiry."""


def add_nonces(connection: Connection, nonces: Sequence[Nonce]) -> list[bool]:
    """Add nonces; False for each that exists, or comes a second time.

    The statement locks what it depends on: whoever adds the same nonce beside it waits.
    """
    row = request_nonces.c
    insert = _INSERT[connection.dialect.name](request_nonces)
    added = connection.execute(
        insert.values([dict(zip(_NONCES, each, strict=True)) for each in nonces])
        .on_conflict_do_nothing()
        .returning(row.key_id, row.nonce)
    )
    new = {(key_id, nonce) for key_id, nonce in added}
    outcomes = []
    for key_id, nonce, _ in nonces:
        outcomes.append((key_id, nonce) in new)
        new.discard((key_id, nonce))
    return outcomes


def forget_nonces(connection: Connection, before: float) -> None:
    connection.execute(sa.delete(request_nonces).where(request_nonces.c.expires < before))


# Masked sessions


def add_message(
    connection: Connection, assignment: str, step: str, digest: str, body: bytes
) -> None:
    connection.execute(
        sa.insert(session_messages).values(
            assignment=assignment, step=step, digest=digest, body=body
        )
    )


def session_bodies(
    connection: Connection, key: RoundKey, whose: Collection[str]
) -> dict[tuple[str, str], bytes]:
    """The messages of clients in the round's session by assignment and phase; optionally only of
    the assignments `whose`."""
    query = (
        sa.select(session_messages.c.assignment, session_messages.c.step, session_messages.c.body)
        .join(assignments, assignments.c.assignment == session_messages.c.assignment)
        .where(*_is_round(assignments, key))
    )
    if len(whose) <= _FEW:
        query = query.where(session_messages.c.assignment.in_(list(whose)))
    return {(assignment, step): body for assignment, step, body in connection.execute(query)}


def drop_messages(connection: Connection, key: RoundKey) -> None:
    """Delete the messages of a finished round, which contain shares of its clients' masks."""
    of_round = sa.select(assignments.c.assignment).where(*_is_round(assignments, key))
    connection.execute(
        sa.delete(session_messages).where(session_messages.c.assignment.in_(of_round))
    )


def _is_round(table: sa.Table, key: RoundKey) -> Iterable[sa.ColumnElement[bool]]:
    return [table.c[name] == value for name, value in zip(_KEY, key, strict=True)]


_KEY = ("task", "round", "attempt")
_SHOWN = [column for column in rounds.c if column.name in RoundStatus.model_fields]
_NAMES = [column.name for column in _SHOWN]
_SUMS = [rounds.c.num_figures, *(rounds.c[f"{name}_sum"] for name in MEANS)]
_FEW = 100
_REVOKED = Prepared(
    lambda dialect: sa.select(clients.c.client_id).where(
        clients.c.client_id.in_(each_of(dialect, "client_ids")), clients.c.revoked_at.is_not(None)
    )
)
_CLAIM = Prepared(
    sa.update(tasks)
    .where(tasks.c.task == sa.bindparam("of_task"), tasks.c.version == sa.bindparam("at_version"))
    .values(version=tasks.c.version + 1)
)
_EVENTS, _ASSIGNMENTS, _UPLOADS = Rows(round_events), Rows(assignments), Rows(uploads)
_VERSION = Prepared(sa.select(tasks.c.version).where(tasks.c.task == sa.bindparam("of_task")))
_VERSIONS = Prepared(sa.select(tasks.c.task, tasks.c.version))
_NONCES = ("key_id", "nonce", "expires")
_INSERT: dict[str, Callable[[sa.Table], Any]] = {
    "postgresql": postgresql.insert,
    "sqlite": sqlite.insert,
}


def _fields(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__slots__}


def _values(record: Any, **other: Any) -> tuple[Any, ...]:
    """The record's values in column order, with some replaced by `other`."""
    names = record.__slots__
    return tuple([other[name] if name in other else getattr(record, name) for name in names])
