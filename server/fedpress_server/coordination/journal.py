"""The tasks on the disk: written step by step, read again by replay.

An event is written with all that follows from it, receipts among it, in one transaction: the rows
never tell of half a step.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy.engine import Connection

from fedpress_compression.tensors import ModelSpec
from fedpress_protocols.errors import UnknownDevice
from fedpress_protocols.messages import (
    RECEIPT_CONTEXT,
    Receipt,
    SessionStatus,
    SignedReceipt,
    TaskConfig,
)
from fedpress_protocols.model import spec_of
from fedpress_protocols.plan import RoundPlan
from fedpress_protocols.policies import Comparison, Course
from fedpress_protocols.signatures import DeviceKey, sign_document
from fedpress_server.aggregation.aggregate import AggregationResult
from fedpress_server.aggregation.masked import Host, left_out, read_message
from fedpress_server.aggregation.terms import RoundTerms
from fedpress_server.coordination.attempts import Attempt
from fedpress_server.coordination.commands import (
    AuditEntry,
    Command,
    Create,
    FinishedJob,
    Happen,
    LeftQueue,
    ReceivedMessage,
    ReceivedUpload,
    Sender,
)
from fedpress_server.coordination.jobs import jobs_of
from fedpress_server.coordination.live import LiveTask
from fedpress_server.coordination.opening import masked_by, round_of
from fedpress_server.coordination.steps import AppliedEvent, Step
from fedpress_server.identity import audit
from fedpress_server.registry import restores
from fedpress_server.registry import versions as registry
from fedpress_server.rounds import (
    Aggregated,
    Assign,
    Declined,
    Effect,
    Extend,
    Said,
    Settle,
    UnmaskFailed,
    from_record,
    to_record,
)
from fedpress_server.storage import (
    declines,
    identities,
    leases,
    participants,
    privacy,
    records,
)
from fedpress_server.storage.files import model_name
from fedpress_server.storage.payloads import Payloads
from fedpress_server.storage.records import AssignmentRecord, ModelRecord, RoundKey, TaskRecord
from fedpress_strategies.policies.decisions import with_comparison

_IN_MEMORY = 2**24
"""Bytes of a model's file beyond which only its header is read."""
_REMEMBERED = 20
"""Attempts for which those that masked sessions named are left out."""


def reopened(
    connection: Connection, config: TaskConfig, spec: ModelSpec, payloads: Payloads, host: Host
) -> Attempt:
    """The task's newest attempt, as its events have left it."""
    newest = records.newest_round(connection, config.task)
    plan = RoundPlan.from_json(newest.plan)
    round_ = round_of(config, plan, newest.opened_at)
    bases = records.bases_of(connection, config.task)
    course = None if newest.course is None else Course.model_validate(newest.course)
    terms = RoundTerms(plan, spec, payloads, bases)
    opened_attempt = Attempt(masked_by(round_, host, terms, newest.opened_at), terms, course=course)
    attempt, _ = replayed(connection, without_excluded(connection, opened_attempt))
    sources = {part.given for part in attempt.round.parts.values() if part.given is not None}
    plans = {key: records.plan_of(connection, (config.task, *key)) for key in sorted(sources)}
    return replace(attempt, earlier={key: RoundPlan.from_json(plans[key]) for key in plans})


def without_excluded(
    connection: Connection, attempt: Attempt, status: SessionStatus | None = None
) -> Attempt:
    """`attempt` without the clients that earlier sessions of its task suspect, and without those
    that have spent their privacy budget, or took part too recently by its terms. `status` is of the
    last session, if it is not stored yet."""
    round_, terms = attempt.round, attempt.terms.plan.privacy
    names = frozenset[str]()
    if round_.is_masked:
        rows = records.last_sessions(connection, attempt.key, _REMEMBERED)
        sessions = [SessionStatus.model_validate_json(json.dumps(row)) for row in rows]
        if status is not None:
            sessions.append(status)
        turn, rules = round_.number + round_.attempt, round_.rules
        names = left_out(sessions, turn, rules.members or frozenset(), rules.minimum)
    if terms is not None:
        spent, most = privacy.participations(connection, attempt.key, terms.participations)
        resting = privacy.resting(connection, attempt.key, terms.separation) - spent
        names |= spent | resting
        round_ = replace(
            round_, participations=most, num_spent=len(spent), num_resting=len(resting)
        )
    return replace(attempt, round=replace(round_, left_out=names))


def replayed(connection: Connection, start: Attempt) -> tuple[Attempt, tuple[Effect, ...]]:
    """Apply the stored events that `start` lacks; return the attempt and their effects.

    Raises KeyError if a message was deleted, as all are once the attempt is over.
    """
    attempt, effects = start, list[Effect]()
    rows = records.events(connection, start.key, start.seq)
    whose = {row["assignment"] for _, row in rows if row["event"] == Said.__name__}
    bodies = records.session_bodies(connection, start.key, whose) if whose else {}
    for seq, (at, row) in enumerate(rows, start.seq + 1):
        message = None
        if row["event"] == Said.__name__:
            message = read_message(row["step"], bodies[row["assignment"], row["step"]])
        attempt, more = attempt.after(from_record(row, message), at)
        attempt = replace(attempt, seq=seq)  # also behind an event that changes nothing any more
        effects += more
    return attempt, tuple(effects)


class Journal:
    """Reads tasks from the disk, and writes the steps of a batch; all of it in the caller's
    transaction.

    `lease_time` is the one clock of all workers' leases; `epoch` names the last restore that the
    records have been through.
    """

    def __init__(
        self,
        payloads: Payloads,
        host: Host,
        lease_time: Callable[[Connection], float],
        epoch: str | None = None,
    ) -> None:
        self._payloads = payloads
        self._host = host
        self._lease_time = lease_time
        self._epoch = epoch

    def spec(self, digest: str) -> ModelSpec:
        """Of a model's tensors."""
        return spec_of(self._payloads.mapped(model_name(digest), _IN_MEMORY))

    def newest(
        self, connection: Connection, name: str, cached: Attempt | None, spec: ModelSpec
    ) -> tuple[TaskRecord, Attempt | None, tuple[Effect, ...]]:
        """The stored task, its running attempt, and the effects of the events that `cached` lacks.

        All are of one version, also where each statement has its own view of the database.
        """
        while True:
            record = records.task_record(connection, name)
            self._host.keys.read(connection)
            config = TaskConfig.model_validate_json(record.config)
            attempt, effects = None, tuple[Effect, ...]()
            try:
                if record.state == "running":
                    newest = records.newest_round(connection, name)
                    if cached is not None and cached.key[1:] == (newest.round, newest.attempt):
                        attempt, effects = replayed(connection, cached)
                    else:
                        attempt = reopened(connection, config, spec, self._payloads, self._host)
            except KeyError:
                if records.task_version(connection, name) == record.version:
                    raise
                continue
            if records.task_version(connection, name) == record.version:
                return record, attempt, effects

    def write(
        self, connection: Connection, task: LiveTask, steps: Sequence[Step], now: float
    ) -> bool:
        """All that follows from `steps`, which follow one another; whether a backup under way holds
        the files that the task leaves.

        Raises UnknownDevice for a sender that was revoked, LeaseLost for a job that is another
        worker's by now.
        """
        first, last = steps[0], steps[-1]
        if isinstance(first.command, Create):
            self._host.keys.read(connection)  # of which the new task's version cannot tell
        gives_up = last.record is not task.record or any(each.ends_attempt for each in steps)
        is_held = gives_up and restores.is_held(connection, now)
        for step in steps:
            self._write_models(connection, step, now)
        if isinstance(first.command, Create):
            records.add_task(connection, first.record)
            registry.add_first_version(connection, first.record, now)
        applied = [step for step in steps if step.applied is not None]
        if applied:
            self._write_events(connection, task, applied, now)
        for step in steps:
            if step.jobs:
                leases.add(connection, step.jobs, self._lease_time(connection))
            if step.opened is not None:
                self._write_opening(connection, task, step, now)
            for entry in step.entries:
                about = (entry.by, entry.action, step.record.task)
                audit.add(connection, now, *about, **entry.details)
        if last.record is not task.record:
            records.set_task(connection, last.record)
        return is_held

    def _write_models(self, connection: Connection, step: Step, now: float) -> None:
        """The rows of models that the step publishes, and of the version that they are."""
        if step.model is not None:
            records.add_model(connection, step.model)
            registry.keep_again(connection, self._payloads, {step.model.digest})
        applied = step.applied
        if applied is None or applied.result is None:
            return
        result, after = applied.result, applied.after
        sizes = {result.model: result.num_bytes, **dict(result.published.values())}
        for digest, num_bytes in sizes.items():
            records.add_model(connection, ModelRecord(digest, result.spec, num_bytes, now))
        registry.keep_again(connection, self._payloads, sizes)
        parts = after.round.parts.values()
        registry.add_version(
            connection,
            step.record,
            version=after.round.number,
            attempt=after.key[2],
            model=result.model,
            parent=after.terms.plan.model,
            published={name: digest for name, (digest, _) in result.published.items()},
            updates=[part.upload for part in parts if part.reason == "included" and part.upload],
            now=now,
        )

    def _write_events(
        self, connection: Connection, task: LiveTask, steps: Sequence[Step], now: float
    ) -> None:
        """Events of one attempt, with their effects: rows of one kind together."""
        events = [step.applied for step in steps if step.applied is not None]
        before, after = events[0].before, events[-1].after
        numbered = [(each.after.seq, to_record(each.event)) for each in events]
        records.add_events(connection, after.key, now, numbered)
        _write_places(connection, after, events, now)
        self._write_payloads(connection, after, [step.command for step in steps], now)
        for each in events:
            self._write_effects(connection, each, now)
        _write_attempt(connection, before, after, now)
        for each in events:
            if each.result is not None:
                _write_result(connection, each, each.result)
        retries = any(isinstance(each.event, UnmaskFailed) for each in events)
        self._write_jobs(connection, task, before, after, retries=retries)
        if after.round.is_over and steps[-1].opened is None:
            records.drop_bases(connection, after.key[0])

    def _write_payloads(
        self, connection: Connection, after: Attempt, commands: Sequence[Command], now: float
    ) -> None:
        uploads = []
        for command in commands:
            if not isinstance(command, Happen):
                continue
            match command.payload:
                case ReceivedUpload() as received:
                    uploads.append(received)
                case ReceivedMessage(_, body) if isinstance(command.event, Said):
                    event = command.event
                    where = (event.assignment, event.step, event.digest)
                    records.add_message(connection, *where, body)
                case FinishedJob(lease):
                    leases.finish(connection, lease)
                case AuditEntry(by, action, detail):
                    audit.add(connection, now, by, action, after.key[0], reason=detail)
                case LeftQueue(client_ids):
                    records.drop_waiting(connection, after.key[0], client_ids)
                case _:
                    pass
        if uploads:
            write_received(connection, uploads, now)
            if after.round.chooses:
                note_delivered(connection, uploads, now)

    def _write_effects(self, connection: Connection, applied: AppliedEvent, now: float) -> None:
        after, event = applied.after, applied.event
        for effect in applied.effects:
            match effect:
                case Settle():
                    if isinstance(event, Declined) and effect.assignment == event.assignment:
                        why = (event.reason, event.needed_seconds)
                        given_by = after.key_of(event.assignment)
                        declines.add(connection, event.assignment, given_by, *why)
                    receipt = _receipt(after, effect, now, applied.result, self._epoch)
                    signed = signed_receipt(receipt, self._host.keys.current)
                    records.set_receipt(connection, effect.assignment, signed.model_dump_json())
                case Extend(deadline):
                    plan = after.terms.plan.to_json()
                    records.update_round(connection, after.key, deadline=deadline, plan=plan)
                case _:
                    pass

    def _write_jobs(
        self,
        connection: Connection,
        task: LiveTask,
        before: Attempt | None,
        after: Attempt,
        *,
        retries: bool = False,
    ) -> None:
        """Add the jobs that an attempt needs, and drop them once it is past them.

        With `retries` a job ended without a result, and the attempt may need it again: if more
        shares arrived meanwhile, it is still, or again, in the phase in which the job began.
        """
        due = jobs_of(after, task.strategy)
        was_due = before is not None and bool(jobs_of(before, task.strategy))
        if after.round.is_over or (was_due and (retries or not due)):
            leases.drop(connection, after.key)
        if due and (retries or not was_due):
            leases.add(connection, due, self._lease_time(connection))

    def _write_opening(
        self, connection: Connection, task: LiveTask, step: Step, now: float
    ) -> None:
        """The attempt that begins with the step, and what it takes over."""
        attempt = step.opened
        if attempt is None:
            return
        plan = attempt.terms.plan
        records.open_round(
            connection,
            attempt.key,
            plan=plan.to_json(),
            base_model=plan.model,
            size=plan.cohort.size,
            minimum=plan.cohort.minimum,
            opened_at=now,
            deadline=plan.deadline,
            course=None if attempt.course is None else attempt.course.model_dump(mode="json"),
        )
        if step.carried is not None:
            event, effects = step.carried
            records.add_events(connection, attempt.key, now, [(attempt.seq, to_record(event))])
            self._write_effects(connection, AppliedEvent(event, attempt, attempt, effects), now)
            state = {"state": attempt.round.phase, "reason": attempt.round.reason}
            records.update_round(connection, attempt.key, **state)
        self._write_jobs(connection, task, None, attempt)


def _write_places(
    connection: Connection, after: Attempt, events: Sequence[AppliedEvent], now: float
) -> None:
    rows = []
    for applied in events:
        for effect in applied.effects:
            if isinstance(effect, Assign):
                profile = after.terms.profile(effect.index, effect.profile)
                row = (effect.assignment, *after.key, effect.client_id, effect.index, profile)
                rows.append(AssignmentRecord(*row, now, None, effect.turn))
    if rows:
        records.add_assignments(connection, rows)
        records.count(connection, after.key, assigned=len(rows))
        if after.round.chooses:
            for each in rows:
                participants.add_assignment(connection, after.key[0], each.client_id)


def _write_attempt(connection: Connection, before: Attempt, after: Attempt, now: float) -> None:
    """The attempt's row, where what it shows has changed."""
    values: dict[str, Any] = {}
    if (before.round.phase, before.round.reason) != (after.round.phase, after.round.reason):
        values = {"state": after.round.phase, "reason": after.round.reason}
    if after.session is not None and after.session is not before.session:
        values["session"] = after.session.status.model_dump()
    if after.round.is_over:
        values["closed_at"] = now
    if values:
        records.update_round(connection, after.key, **values)
    if after.round.is_over:
        records.drop_messages(connection, after.key)


def _write_result(connection: Connection, applied: AppliedEvent, result: AggregationResult) -> None:
    """The model that the round has made."""
    event, after = applied.event, applied.after
    values: dict[str, Any] = {
        "model": result.model,
        "published": {name: digest for name, (digest, _) in result.published.items()},
        "included": sum(part.reason == "included" for part in after.round.parts.values()),
        "num_examples": result.num_examples,
        "update_norm": result.update_norm,
        "strategy_figures": dict(result.figures),
    }
    if isinstance(event, Aggregated) and event.comparison is not None and after.course is not None:
        comparison = Comparison.model_validate(dict(event.comparison))
        values["course"] = with_comparison(after.course, comparison).model_dump(mode="json")
    records.update_round(connection, after.key, **values)
    for client_id, digest in result.bases.items():
        records.set_base(connection, after.key[0], client_id, digest)


def write_received(connection: Connection, received: Sequence[ReceivedUpload], now: float) -> None:
    """Raises UnknownDevice if one of the devices was revoked, or has left the key that signed."""
    check_senders(connection, [each.sender for each in received])
    counts: dict[RoundKey, dict[str, float]] = {}
    for each in received:
        sums = counts.setdefault(each.key, {})
        for name, amount in each.amounts.items():
            sums[name] = sums.get(name, 0) + amount
    records.add_uploads(connection, [each.upload for each in received], now)
    for key, sums in counts.items():
        records.count(connection, key, **sums)


def check_senders(connection: Connection, senders: Sequence[Sender]) -> None:
    """Check that all of them, clients and the keys that they signed with, may still send; raises
    UnknownDevice."""
    key_ids = {key_id for _, key_id in senders if key_id is not None}
    strangers = identities.strangers_among(connection, key_ids) if key_ids else set[str]()
    others = [client_id for client_id, key_id in senders if key_id is None]
    revoked = records.revoked_among(connection, others) if others else set[str]()
    if strangers or revoked:
        num = len(strangers) + len(revoked)
        raise UnknownDevice(f"{num} of these devices were revoked, or signed with a former key")


def note_delivered(connection: Connection, received: Sequence[ReceivedUpload], now: float) -> None:
    """For choices among the clients to come; see `participants`."""
    for each in received:
        participants.add_upload(
            connection,
            each.key[0],
            each.sender[0],
            num_examples=each.upload.num_examples,
            loss=each.upload.loss,
            at=now,
        )


def _receipt(
    attempt: Attempt,
    settled: Settle,
    now: float,
    result: AggregationResult | None,
    epoch: str | None,
) -> Receipt:
    task, number, attempt_number = attempt.key_of(settled.assignment)
    is_in = settled.reason == "included"
    return Receipt(
        assignment=settled.assignment,
        client_id=attempt.round.parts[settled.assignment].client_id,
        task=task,
        round=number,
        attempt=attempt_number,
        outcome="included" if is_in else "not-included",
        reason=settled.reason,
        upload=settled.upload,
        model=result.model if is_in and result else None,
        issued_at=int(now),
        masked=result.masked if is_in and result else None,
        epoch=epoch,
    )


def signed_receipt(receipt: Receipt, key: DeviceKey) -> SignedReceipt:
    """The signature is over the receipt's fields with `key_id` beside them."""
    signed = sign_document(receipt.model_dump(mode="json"), key, context=RECEIPT_CONTEXT)
    return SignedReceipt(receipt=receipt, key_id=signed["key_id"], signature=signed["signature"])
