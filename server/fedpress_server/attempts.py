"""An attempt at a round as it is kept: opened with a plan, written event by event, read by replay.

An event is written with all that follows from it, receipts among it, in one transaction: the rows
never tell of half a step.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

from pydantic import ValidationError
from sqlalchemy.engine import Connection

from fedpress_protocols.errors import ConfigurationError, IncompatiblePlan
from fedpress_protocols.fixed_point import FixedPoint
from fedpress_protocols.messages import (
    RECEIPT_CONTEXT,
    Assignment,
    Receipt,
    SignedReceipt,
    TaskConfig,
)
from fedpress_protocols.model import ModelSpec
from fedpress_protocols.plan import FixedPointTerms, RoundPlan, explained
from fedpress_protocols.signatures import DeviceKey, sign_document
from fedpress_server import records
from fedpress_server.folding import FoldResult, RoundTerms, StagedUpload
from fedpress_server.payloads import Payloads
from fedpress_server.records import AssignmentRecord, RoundKey
from fedpress_server.rounds import (
    Assign,
    Effect,
    Event,
    Extend,
    Round,
    Settle,
    UploadStaged,
    from_record,
    to_record,
)


@dataclass(frozen=True)
class Attempt:
    """An attempt at a round as it is now; `seq` counts its events."""

    round: Round
    terms: RoundTerms
    seq: int = 0

    @property
    def key(self) -> RoundKey:
        return self.terms.plan.task, self.round.number, self.round.attempt

    def after(self, event: Event, now: float) -> tuple[Attempt, tuple[Effect, ...]]:
        """The attempt after `event`, and what must be done; nothing if it has no place here."""
        round_, effects = self.round.on(event, now)
        if not effects:
            return self, ()
        terms = self.terms
        if round_.deadline != self.round.deadline:
            plan = terms.plan.model_copy(update={"deadline": round_.deadline})
            terms = replace(terms, plan=plan)
        return Attempt(round_, terms, self.seq + 1), effects

    def is_due(self, now: float) -> bool:
        return self.round.phase == "collecting" and now >= self.round.deadline

    def has_place_for(self, client_id: str) -> bool:
        round_ = self.round
        is_new = round_.part_of(client_id) is None
        return round_.phase == "collecting" and round_.places_left > 0 and is_new

    def assignment_of(self, client_id: str) -> Assignment | None:
        """What the client still has to do."""
        found = self.round.part_of(client_id)
        if self.round.phase != "collecting" or found is None or not found[1].is_open:
            return None
        name, part = found
        return Assignment(
            assignment=name,
            client_id=client_id,
            plan=self.terms.plan,
            profile=self.terms.profile(part.index),
        )

    def takes_upload(self, assignment: str, now: float) -> bool:
        part = self.round.parts.get(assignment)
        is_awaited = self.round.phase == "collecting" and part is not None and part.is_open
        return is_awaited and now < self.round.deadline

    @property
    def staged(self) -> tuple[StagedUpload, ...]:
        """Where the uploads lie that wait for the fold, in the order of their assignments."""
        parts = self.round.parts
        return tuple(
            StagedUpload(
                upload_name(self.key, name, digest), digest, self.terms.profile(parts[name].index)
            )
            for name in self.round.staged
            if (digest := parts[name].upload) is not None
        )


def opened(
    config: TaskConfig,
    spec: ModelSpec,
    payloads: Payloads,
    *,
    model: str,
    previous: str | None,
    number: int,
    attempt: int,
    now: float,
) -> Attempt:
    """A new attempt on `model`, which came after `previous`; raises IncompatiblePlan."""
    round_ = _round(config, number, attempt, now)
    bounds = FixedPoint.widest(
        max_abs=config.max_abs, max_weight=config.max_examples * config.cohort.size
    )
    needs = frozenset().union(*(profile.compressor.needs for profile in config.profiles))
    seed = f"fedpress public seed v1|{config.seed}|{config.task}|{number}|{attempt}"
    try:
        plan = RoundPlan(
            task=config.task,
            round=number,
            attempt=attempt,
            model=model,
            spec=spec.digest,
            profiles=config.profiles,
            training=config.training,
            cohort=config.cohort,
            deadline=round_.deadline,
            fixed_point=FixedPointTerms(
                scale_bits=bounds.scale_bits,
                max_abs=config.max_abs,
                max_examples=config.max_examples,
            ),
            previous_model=previous if "previous" in needs else None,
            first_model=config.model if "drift" in needs else None,
            public_seed=hashlib.sha256(seed.encode()).hexdigest(),
        )
    except ValidationError as exc:
        raise IncompatiblePlan(explained(exc)) from exc
    return Attempt(round_, RoundTerms(plan, spec, payloads))


def reopened(
    connection: Connection, config: TaskConfig, spec: ModelSpec, payloads: Payloads
) -> Attempt:
    """The task's newest attempt, as its events have left it."""
    newest = records.newest_round(connection, config.task)
    plan = RoundPlan.from_json(newest.plan)
    round_ = _round(config, newest.round, newest.attempt, newest.opened_at)
    happened = records.events(connection, (config.task, newest.round, newest.attempt))
    for at, event in happened:
        round_, _ = round_.on(from_record(event), at)
    return Attempt(round_, RoundTerms(plan, spec, payloads), len(happened))


def _round(config: TaskConfig, number: int, attempt: int, opened_at: float) -> Round:
    return Round(
        number=number,
        attempt=attempt,
        last_round=config.rounds,
        max_attempts=config.max_attempts,
        size=config.cohort.size,
        minimum=config.cohort.minimum,
        places=config.cohort.assigned,
        seconds=config.round_seconds,
        deadline=opened_at + config.round_seconds,
    )


def checked_bound(terms: RoundTerms, most: int) -> int:
    """The plan's largest body; raises IncompatiblePlan for a profile the model does not fit."""
    try:
        bound = terms.plan.max_body_bytes(terms.spec)
    except ValueError as exc:
        raise IncompatiblePlan(f"a profile does not fit the model: {exc}") from exc
    if bound > most:
        raise ConfigurationError(
            f"an upload may need {bound} bytes where the server takes {most}",
            hint="raise max_body_bytes, or choose a profile that compresses more",
        )
    return bound


# Writing


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
) -> None:
    """`event` and its `effects` on the attempt itself; `key` signs the receipts."""
    round_, of = after.round, after.key
    records.add_event(connection, of, after.seq, now, to_record(event))
    for effect in effects:
        match effect:
            case Assign(name, client_id, index):
                profile = after.terms.profile(index)
                records.add_assignment(
                    connection, AssignmentRecord(name, *of, client_id, index, profile, now, None)
                )
                records.count(connection, of, assigned=1)
            case Settle():
                signed = _signed(_receipt(after, effect, now, result), key)
                records.set_receipt(connection, effect.assignment, signed.model_dump_json())
            case Extend(deadline):
                plan = after.terms.plan.to_json()
                records.update_round(connection, of, deadline=deadline, plan=plan)
            case _:
                pass
    records.update_round(connection, of, state=round_.phase, reason=round_.reason)
    if round_.is_over:
        records.update_round(connection, of, closed_at=now)
    if result is not None:
        records.update_round(
            connection,
            of,
            model=result.model,
            included=sum(part.reason == "included" for part in round_.parts.values()),
            num_examples=result.num_examples,
        )


def _receipt(attempt: Attempt, settled: Settle, now: float, result: FoldResult | None) -> Receipt:
    task, number, attempt_number = attempt.key
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
    )


def _signed(receipt: Receipt, key: DeviceKey) -> SignedReceipt:
    """The signature is over the receipt's fields with `key_id` beside them."""
    signed = sign_document(receipt.model_dump(mode="json"), key, context=RECEIPT_CONTEXT)
    return SignedReceipt(receipt=receipt, key_id=signed["key_id"], signature=signed["signature"])


# Files


def uploads_folder(key: RoundKey) -> str:
    task, number, attempt = key
    return f"uploads/{task}/{number}-{attempt}"


def upload_name(key: RoundKey, assignment: str, digest: str) -> str:
    """Two different bodies sent at once under one assignment lie in two files."""
    return f"{uploads_folder(key)}/{assignment}-{digest}"


def sweep(connection: Connection, payloads: Payloads) -> None:
    """Remove what a killed server left that nothing on record leads to; for a start."""
    payloads.sweep_temporaries()
    kept: set[str] = set()
    for key in records.unfinished_rounds(connection):
        kept.add(uploads_folder(key))
        for _, record in records.events(connection, key):
            event = from_record(record)
            if isinstance(event, UploadStaged):
                kept.add(upload_name(key, event.assignment, event.upload))
    for of_task in list(payloads.names("uploads")):
        for folder in list(payloads.names(of_task)):
            for name in [folder, *payloads.names(folder)]:
                if name not in kept:
                    payloads.drop(name)
    for name in list(payloads.names("models")):
        if records.model(connection, _digest_in(name)) is None:
            payloads.drop(name)
    states = {record.optimizer_state for record in records.task_records(connection)}
    for name in list(payloads.names("optimizers")):
        if _digest_in(name) not in states:
            payloads.drop(name)


def _digest_in(name: str) -> str:
    return name.rpartition("/")[2].partition(".")[0]
