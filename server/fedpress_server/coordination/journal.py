"""The attempts on the disk: written event by event, read again by replay.

An event is written with all that follows from it, receipts among it, in one transaction: the rows
never tell of half a step.
"""

from __future__ import annotations

import json
from dataclasses import replace

from sqlalchemy.engine import Connection

from fedpress_compression.tensors import ModelSpec
from fedpress_protocols.messages import (
    RECEIPT_CONTEXT,
    Receipt,
    SessionStatus,
    SignedReceipt,
    TaskConfig,
)
from fedpress_protocols.plan import RoundPlan
from fedpress_protocols.policies import Comparison, Course
from fedpress_protocols.signatures import DeviceKey, sign_document
from fedpress_server.coordination.attempts import Attempt
from fedpress_server.coordination.opening import round_of
from fedpress_server.folds.folding import FoldResult
from fedpress_server.folds.masked import Host, left_out, read_message
from fedpress_server.folds.terms import RoundTerms
from fedpress_server.policies.decisions import with_comparison
from fedpress_server.rounds import (
    Assign,
    BeginSecond,
    Declined,
    Effect,
    Event,
    Extend,
    Folded,
    Said,
    Settle,
    from_record,
    to_record,
)
from fedpress_server.storage import declines, participants, records
from fedpress_server.storage.payloads import Payloads
from fedpress_server.storage.records import AssignmentRecord

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
    begun = Attempt(round_, terms, host=host, course=course, opened_at=newest.opened_at)
    attempt, _ = continued(connection, kept_out(connection, begun))
    given = {part.given for part in attempt.round.parts.values() if part.given is not None}
    plans = {key: records.plan_of(connection, (config.task, *key)) for key in sorted(given)}
    return replace(attempt, earlier={key: RoundPlan.from_json(plans[key]) for key in plans})


def kept_out(
    connection: Connection, attempt: Attempt, ended: SessionStatus | None = None
) -> Attempt:
    """`attempt` without those that the sessions of its task before have named; `ended`: the last of
    them, where it is not on the disk yet."""
    if not attempt.round.is_masked:
        return attempt
    rows = records.last_sessions(connection, attempt.key, _REMEMBERED)
    sessions = [SessionStatus.model_validate_json(json.dumps(row)) for row in rows]
    if ended is not None:
        sessions.append(ended)
    round_ = attempt.round
    names = left_out(
        sessions, round_.number + round_.attempt, round_.members or frozenset(), round_.minimum
    )
    return replace(attempt, round=replace(round_, left_out=names))


def continued(connection: Connection, held: Attempt) -> tuple[Attempt, tuple[Effect, ...]]:
    """The attempt with the events that are on the disk and not in `held`, and their effects.

    Raises KeyError where a message is gone, as it is once the attempt is over.
    """
    attempt, effects = held, list[Effect]()
    found = [(at, from_record(row)) for at, row in records.events(connection, held.key, held.seq)]
    whose = {event.assignment for _, event in found if isinstance(event, Said)}
    said = records.session_bodies(connection, held.key, whose) if whose else {}
    for at, event in found:
        message = None
        if isinstance(event, Said):
            message = read_message(event.step, said[event.assignment, event.step])
        attempt, more = attempt.after(event, at, message)
        effects += more
    return attempt, tuple(effects)


def write_opening(connection: Connection, attempt: Attempt, now: float) -> None:
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


def write_step(
    connection: Connection,
    after: Attempt,
    event: Event,
    effects: tuple[Effect, ...],
    now: float,
    *,
    key: DeviceKey,
    result: FoldResult | None,
    epoch: str | None = None,
) -> None:
    """`event` and its `effects` on the attempt itself; `key` signs the receipts, which name the
    restore `epoch` in which they are issued."""
    round_, of = after.round, after.key
    records.add_event(connection, of, after.seq, now, to_record(event))
    for effect in effects:
        match effect:
            case Assign(name, client_id, index, turn, named):
                profile = after.terms.profile(index, named)
                given = AssignmentRecord(name, *of, client_id, index, profile, now, None, turn)
                records.add_assignment(connection, given)
                if round_.chooses:
                    participants.was_given(connection, of[0], client_id)
                records.count(connection, of, assigned=1)
            case Settle():
                if isinstance(event, Declined) and effect.assignment == event.assignment:
                    given_by = after.key_of(event.assignment)
                    why = (event.reason, event.needed_seconds)
                    declines.add(connection, event.assignment, given_by, *why)
                signed = signed_receipt(_receipt(after, effect, now, result, epoch), key)
                records.set_receipt(connection, effect.assignment, signed.model_dump_json())
            case Extend(deadline) | BeginSecond(deadline):
                plan = after.terms.plan.to_json()
                records.update_round(connection, of, deadline=deadline, plan=plan)
            case _:
                pass
    records.update_round(connection, of, state=round_.phase, reason=round_.reason)
    if after.session is not None:
        records.update_round(connection, of, session=after.session.status.model_dump())
    if round_.is_over:
        records.update_round(connection, of, closed_at=now)
        records.drop_messages(connection, of)
    if isinstance(event, Folded) and event.comparison is not None and after.course is not None:
        course = with_comparison(after.course, Comparison.model_validate(dict(event.comparison)))
        records.update_round(connection, of, course=course.model_dump(mode="json"))
    if result is not None:
        for client_id, digest in result.bases.items():
            records.set_base(connection, of[0], client_id, digest)
        records.update_round(
            connection,
            of,
            model=result.model,
            published={name: digest for name, (digest, _) in result.published.items()},
            included=sum(part.reason == "included" for part in round_.parts.values()),
            num_examples=result.num_examples,
        )


def _receipt(
    attempt: Attempt, settled: Settle, now: float, result: FoldResult | None, epoch: str | None
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
