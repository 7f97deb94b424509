"""Account of a device's updates: an immutable value, and the transitions between its states.

    prepare   update + residual  →  body and what it stands for (pending), the rest (residual)
    masked    session            →  the body under the masks of this session and of no other
    settle    receipt            →  included: pending is done with
                                    not included: pending goes back into the residual
    recalled  the server's word  →  what a restore of the server undid goes back into the residual

At every moment, for each coordinate and in unweighted units,

    included + residual + pending + reported discards = everything computed

to float32 rounding. What a compressor keeps from update to update, the residual included, is its
own affair: it says what an upload under way, a receipt and a rejection do to its state (`send`,
`commit`, `roll_back`), and the ledger stores that. Under dgc what was computed is the velocities.
Under control variates what compression leaves out does not count: it is in later gradients too.
What an upload stands for is taken from its own decoded bytes, or whole numbers where they are to be
masked, in units of the update whatever its weight in the sum. Nothing in here touches a disk, a
network or a clock.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from fedpress_client import ledger_file
from fedpress_client.channels import (
    ClearChannel,
    ClosedChannel,
    MaskedChannel,
    PrivateChannel,
    Sections,
    clipped,
)
from fedpress_client.ledger_records import (
    KEEP_ALL,
    Discard,
    Included,
    Pending,
    Reason,
    ResidualRules,
    compressor_of,
)
from fedpress_compression import sketches
from fedpress_compression.compressor import (
    Compressor,
    Knowledge,
    check_shape,
    state_name,
    to_config,
)
from fedpress_compression.plain_states import State, plain, restored
from fedpress_compression.tensors import ModelSpec, Vector
from fedpress_compression.update import Update
from fedpress_protocols.errors import (
    Conflict,
    DigestMismatch,
    Forbidden,
    InvalidUpdate,
)
from fedpress_protocols.masking.payload import Payload
from fedpress_protocols.messages import Assignment, IncludedUpload, Outcome, Recall, Receipt
from fedpress_protocols.upload import check_report

REMEMBERED = 256
"""Outcomes kept, so that a second receipt which contradicts the first is noticed."""
_NO_TENSORS = ModelSpec(())


@dataclass(frozen=True, slots=True, eq=False)
class Ledger:
    """One device's account with one task. `residual` and `control` None stand for zeros.

    `control`, the client's vector of the plan's `ControlTerms`, is always the sum of what every
    included upload made of it, since the model has had these tensors. `personal` has the tensors
    that stay here, by name, as the newest training left them: nobody else's sum depends on them, so
    they wait for no receipt.
    """

    task: str
    client_id: str
    spec: str = ""
    round: int = 0
    """Of the newest update prepared."""
    residual: Vector | None = None
    """Of the states of compressors that keep one, which have it in common."""
    tensors: ModelSpec | None = None
    """Tensors of the updates; None before the first, and in files of older releases."""
    states: Mapping[str, tuple[int, State]] = dataclasses.field(default_factory=dict)
    """By a compressor's `state_name`: the number of the last pending included, and the state,
    without its residual."""
    pending: Mapping[str, Pending] = dataclasses.field(default_factory=dict)
    settled: Mapping[str, Outcome] = dataclasses.field(default_factory=dict)
    """By assignment, with those for which nothing could be sent as not included."""
    control: Vector | None = None
    personal: Mapping[str, Vector] = dataclasses.field(default_factory=dict)
    own: tuple[int, Vector] | None = None
    """Number of the last pending included that later ones are differences to; what it stood for."""
    discards: tuple[Discard, ...] = ()
    """Decided, and not yet known to have been told."""
    counter: int = 0
    included: int = 0
    not_included: int = 0
    epoch: str | None = None
    """Of the server's last restore of which this account has taken account."""
    backup_at: int | None = None
    """The server may go back to here, Unix seconds; None if it has said nothing of backups."""
    kept: Mapping[str, Included] = dataclasses.field(default_factory=dict)
    """By assignment, what was included since, the oldest first: as many as REMEMBERED, of which the
    newest have what they stood for, as many values in all as half a model has parameters."""

    def prepare(
        self,
        assignment: Assignment,
        update: Vector,
        num_examples: int,
        spec: ModelSpec,
        rng: np.random.Generator,
        rules: ResidualRules = KEEP_ALL,
        *,
        knowledge: Mapping[Knowledge, Vector] = MappingProxyType({}),
        report: Mapping[str, float] = MappingProxyType({}),
        personal: Mapping[str, Vector] = MappingProxyType({}),
        secret: bytes | None = None,
        sections: Sections | None = None,
    ) -> tuple[Ledger, bytes | None]:
        """The account once `update` is on its way, and the bytes to send; `spec` is the model's,
        `update` of the size that the plan's uploads are over.

        None where compression, in scaling up what it sends, took it beyond the plan's `max_abs`:
        then everything joins the residual or, without error feedback, is discarded.

        An assignment prepared before gives its first bytes again, whatever `update` is. Values
        beyond the plan's `max_abs` are clipped, and what that takes off is left over like all that
        compression leaves. `rng` is the compressor's private randomness, `knowledge` its side
        information, see Public. `report` has the numbers that the plan names, `personal` the
        tensors that stay here. Raises InvalidUpdate on NaN or infinity, IncompatiblePlan if `spec`
        is not the plan's.

        In the masked lane the bytes are those to be masked, see `masked`; whole numbers are rounded
        by `secret` instead (SECRET_BYTES used once), or by the system's randomness.

        `sections` is told of the clear lane's body section by section, each once it is coded; none
        of it may be made to count before this account is durable, and None may come of it yet.
        """
        key, plan = assignment.assignment, assignment.plan
        if key in self.pending:
            return self, self.pending[key].body
        if key in self.settled:
            raise Conflict(f"assignment {key} has its receipt: {self.settled[key]}")
        public = plan.public(spec, knowledge)
        check_shape(update, public.spec)
        numbers = tuple(report[name] for name in plan.trainer_report)
        check_report(numbers, plan.trainer_report)
        compressor = plan.compressor(assignment.profile)
        compressor = compressor.stricter(rules.decay, rules.max_ratio)
        examples = min(num_examples, plan.fixed_point.max_examples)
        channel: ClearChannel | MaskedChannel | PrivateChannel
        if plan.lane == "masked":
            channel = MaskedChannel(Payload(plan, public), plan, examples, report, secret)
        elif plan.privacy is not None:
            clear = ClearChannel(compressor.lossy, plan, assignment.profile, examples, numbers)
            channel = PrivateChannel(clear, plan.privacy)
        else:
            channel = ClearChannel(
                compressor.lossy, plan, assignment.profile, examples, numbers, sections
            )
            if plan.sketch:
                stream = public.stream(sketches.LABEL)
                cells = sketches.sketch(clipped(update, plan), plan.sketch, stream)
                channel.sketch = sketches.to_bytes(cells)
        ledger = self._for_spec(public.spec)
        before = ledger._state(compressor, state_name(compressor))
        _, state, mark = compressor.send(channel, update, before, public, rng)
        ledger = replace(ledger, round=max(ledger.round, plan.round), personal=dict(personal))
        try:
            channel.sent.check(plan.fixed_point.max_abs)
        except InvalidUpdate:
            closed = ClosedChannel()
            _, state, _ = compressor.send(closed, update, before, public, rng)
            ledger = replace(ledger, settled=ledger._remembering(key, "not-included"))
            return ledger._left(compressor, state, update, closed.sent, key), None
        control = plan.client_terms.control
        if control is None:
            ledger = ledger._left(compressor, state, update, channel.sent, key)
        else:
            ledger = ledger._with_state(compressor, state, state_name(compressor))
        pending = Pending(
            body=channel.body,
            update=channel.sent,
            num_examples=examples,
            round=plan.round,
            attempt=plan.attempt,
            model=plan.model,
            spec=public.spec.digest,
            profile=assignment.profile,
            feedback=compressor.keeps_residual,
            compressor=json.dumps(to_config(compressor)),
            state_name=state_name(compressor),
            mark=plain(mark),
            number=ledger.counter + 1,
            control=control.scale if control is not None else 0.0,
            is_base="own" in plan.needs,
            report=numbers,
            lane=plan.lane,
        )
        ledger = replace(
            ledger,
            counter=ledger.counter + 1,
            pending={**ledger.pending, key: pending},
        )
        return ledger, channel.body

    def masked(self, assignment: str, session: str, body: bytes) -> Ledger:
        """The account once an upload of the masked lane is masked for `session`, as `body`.

        It is to be durable before the first byte leaves. From then on these bytes are what is sent,
        also after a restart, and no other session ever gets this update: under two sets of masks,
        or in two cohorts, the difference would tell of it. If the session comes to nothing, the
        receipt says so, and the update goes back into the residual. Raises Conflict if there is no
        such upload, or it was masked before in other words.
        """
        pending = self.pending.get(assignment)
        if pending is None or pending.lane != "masked" or len(body) != len(pending.body):
            raise Conflict(f"{len(body)} masked bytes for {assignment}, which has no such upload")
        if pending.session is not None:
            if (pending.session, pending.body) != (session, body):
                raise Conflict(f"{assignment} was masked for session {pending.session[:12]} before")
            return self
        after = replace(pending, body=body, session=session)
        return replace(self, pending={**self.pending, assignment: after})

    def settle(self, receipt: Receipt) -> Ledger:
        """The account once the fate of an upload is known.

        The receipt's signature was verified before. A receipt seen before changes nothing, nor
        does one for an upload not held here. Raises Forbidden for another client's or task's,
        DigestMismatch if it speaks of other bytes, Conflict if it contradicts an earlier one or
        itself; the account is then as it was.
        """
        key = receipt.assignment
        if (receipt.client_id, receipt.task) != (self.client_id, self.task):
            raise Forbidden(
                f"a receipt for client {receipt.client_id} in task {receipt.task} came to client "
                f"{self.client_id} in task {self.task}"
            )
        if (receipt.outcome == "included") != (receipt.reason == "included"):
            raise Conflict(f"receipt {key} says {receipt.outcome}, because {receipt.reason}")
        if key in self.settled:
            if self.settled[key] == receipt.outcome:
                return self
            included = self.kept.get(key)
            if included is not None and receipt.epoch not in (None, included.epoch):
                return self._undone(key, included)
            raise Conflict(
                f"receipt {key} says {receipt.outcome}; an earlier one said {self.settled[key]}"
            )
        pending = self.pending.get(key)
        if pending is None:
            return self
        if (receipt.round, receipt.attempt) != (pending.round, pending.attempt):
            raise Conflict(
                f"receipt {key} is for round {receipt.round}.{receipt.attempt}, its upload for "
                f"round {pending.round}.{pending.attempt}"
            )
        is_included = receipt.outcome == "included"
        if receipt.upload != pending.digest and (is_included or receipt.upload is not None):
            raise DigestMismatch(
                f"receipt {key} speaks of an upload {str(receipt.upload)[:12]}, sent was "
                f"{pending.digest[:12]}"
            )
        ledger = replace(
            self,
            pending={other: item for other, item in self.pending.items() if other != key},
            settled=self._remembering(key, receipt.outcome),
            included=self.included + is_included,
            not_included=self.not_included + (not is_included),
        )
        if not is_included:
            return ledger._rolled_back(pending, pending.update, key)
        return ledger._committed(pending)._keeping(pending, receipt)

    def restarted(self) -> Ledger:
        """The account before the first round of another training. The residual becomes a discard;
        pending uploads count as not included and are not sent again."""
        ledger = self
        if self.residual is not None:
            residual = Update.from_dense(self.residual)
            ledger = self._discarding("other-model", residual, None)
        for key in self.pending:
            ledger = replace(ledger, settled=ledger._remembering(key, "not-included"))
        return replace(
            Ledger(self.task, self.client_id),
            settled=ledger.settled,
            discards=ledger.discards,
            counter=ledger.counter,
            included=self.included,
            not_included=self.not_included + len(self.pending),
        )

    def goes_back_to(self, backup_at: int) -> Ledger:
        """The account once it is known how far the server may go back, Unix seconds: of what was
        included before, the norm is kept and no more, since an older backup may still come back."""
        if self.backup_at is not None and self.backup_at >= backup_at:
            return self
        included = {
            key: each if each.issued_at >= backup_at else replace(each, update=None)
            for key, each in self.kept.items()
        }
        return replace(self, backup_at=backup_at, kept=included)

    @property
    def fates(self) -> tuple[IncludedUpload, ...]:
        """The included uploads that a restore of the server may have undone."""
        return tuple(
            IncludedUpload(assignment=key, round=each.round, attempt=each.attempt, model=each.model)
            for key, each in self.kept.items()
        )

    def recalled(self, recall: Recall) -> Ledger:
        """The account once it is known what a restored server does not know.

        The signature was verified before. What is pending returns to the residual, and so does what
        was included and is kept; what was not kept is a discard. Without error feedback all of it
        is. Seen before, a recall changes nothing. Raises Forbidden for another client's or task's.
        """
        if (recall.client_id, recall.task) != (self.client_id, self.task):
            raise Forbidden(
                f"a recall for client {recall.client_id} in task {recall.task} came to client "
                f"{self.client_id} in task {self.task}"
            )
        ledger = self
        for key in recall.unknown:
            upload, included = ledger.pending.get(key), ledger.kept.get(key)
            if upload is not None:
                pending = {other: each for other, each in ledger.pending.items() if other != key}
                settled = ledger._remembering(key, "not-included")
                ledger = replace(
                    ledger,
                    pending=pending,
                    settled=settled,
                    not_included=ledger.not_included + 1,
                )._rolled_back(upload, upload.update, key)
            elif included is not None:
                ledger = ledger._undone(key, included)
        return ledger

    def in_epoch(self, epoch: str) -> Ledger:
        """The account once everything was asked about that the restore `epoch` may have undone."""
        return replace(self, epoch=epoch)

    def refuse(self, assignment: str, update: Vector, reason: Reason = "invalid") -> Ledger:
        """The account once it is clear that `update` cannot be sent nor kept: a discard."""
        return self._discarding(reason, Update.from_dense(update), assignment)

    def told(self) -> Ledger:
        """The account once every discard was reported."""
        return replace(self, discards=()) if self.discards else self

    def _state(self, compressor: Compressor[Any], name: str) -> Any:
        """The state `name`, in the types of `compressor`, with the residual if it keeps one."""
        _, stored = self.states.get(name, (0, None))
        state = restored(stored, compressor.init(self.tensors or _NO_TENSORS))
        return state._replace(residual=self.residual) if compressor.keeps_residual else state

    def _with_state(
        self, compressor: Compressor[Any], state: Any, name: str, number: int = 0
    ) -> Ledger:
        """This account with a compressor's state; `number` is that of an upload now included."""
        ledger = self
        if compressor.keeps_residual:
            ledger = replace(ledger, residual=state.residual)
            state = state._replace(residual=None, lost=())
        stored = plain(state)
        if stored is None and name not in self.states:
            return ledger
        newest = max(number, self.states.get(name, (0, None))[0])
        return replace(ledger, states={**self.states, name: (newest, stored)})

    def _left(
        self, compressor: Compressor[Any], state: Any, update: Vector, sent: Update, key: str
    ) -> Ledger:
        """This account with the `state` after `sent` is under way; what is lost is a discard."""
        ledger = self._with_state(compressor, state, state_name(compressor))
        if compressor.keeps_residual:
            for reason, discarded in state.lost:
                ledger = ledger._discarding(reason, Update.from_dense(discarded), None)
            return ledger
        remainder = update.copy()
        sent.add_to(remainder, sign=-1.0)
        return ledger._discarding("not-sent", Update.from_dense(remainder), key)

    def _remembering(self, key: str, outcome: Outcome) -> dict[str, Outcome]:
        recent = list(self.settled.items())[-(REMEMBERED - 1) :]
        return dict(recent) | {key: outcome}

    def _committed(self, pending: Pending) -> Ledger:
        if pending.spec != self.spec:
            return self
        ledger = self
        if pending.control:
            control = np.zeros(pending.update.size, np.float32)
            if self.control is not None:
                control = self.control.copy()
            pending.update.add_to(control, pending.control)
            ledger = replace(ledger, control=control)
        if pending.is_base and (self.own is None or pending.number > self.own[0]):
            ledger = replace(ledger, own=(pending.number, pending.update.dense()))
        name = pending.state_name
        newest, stored = self.states.get(name, (0, None))
        mark = pending.mark if pending.number >= newest else None
        if stored is None and mark is None:
            return ledger
        compressor = compressor_of(pending)
        state = compressor.commit(ledger._state(compressor, name), mark, pending.update)
        return ledger._with_state(compressor, state, name, 0 if mark is None else pending.number)

    def _keeping(self, pending: Pending, receipt: Receipt) -> Ledger:
        """With a record of the included upload, if a restore of the server may undo its receipt."""
        if self.backup_at is None:
            return self
        norm = Discard(0, "rolled-back", None, pending.update).norm
        new = Included(
            update=pending.update if receipt.issued_at >= self.backup_at else None,
            norm=norm,
            round=pending.round,
            attempt=pending.attempt,
            model=receipt.model,
            issued_at=receipt.issued_at,
            epoch=receipt.epoch,
            spec=pending.spec,
            feedback=pending.feedback,
            number=pending.number,
            control=pending.control,
            compressor=pending.compressor,
            state_name=pending.state_name,
        )
        room, included = pending.update.size // 2, list[tuple[str, Included]]()
        for key, each in [(receipt.assignment, new), *reversed(list(self.kept.items()))][
            :REMEMBERED
        ]:
            room -= each.num_values
            included.append((key, each if room >= 0 else replace(each, update=None)))
        return replace(self, kept=dict(reversed(included)))

    def _undone(self, key: str, undone: Included) -> Ledger:
        """Revert an included upload that the server has undone."""
        ledger = replace(
            self,
            kept={other: each for other, each in self.kept.items() if other != key},
            settled=self._remembering(key, "not-included"),
            included=self.included - 1,
            not_included=self.not_included + 1,
            own=None if self.own is not None and self.own[0] == undone.number else self.own,
        )
        if undone.update is None:
            nothing = Update(0, ())
            return ledger._adding(Discard(0, "rolled-back", key, nothing, undone.norm))
        if undone.control and ledger.control is not None and undone.spec == self.spec:
            control = ledger.control.copy()
            undone.update.add_to(control, -undone.control)
            ledger = replace(ledger, control=control)
        return ledger._rolled_back(undone, undone.update, key)

    def _rolled_back(self, upload: Pending | Included, update: Update, key: str) -> Ledger:
        """With `update`, which `upload` stood for, back in the residual; else a discard."""
        if upload.spec != self.spec:
            reason: Reason = "spec-changed" if upload.feedback else "not-included"
            return self._discarding(reason, update, key)
        ledger = self if upload.feedback else self._discarding("not-included", update, key)
        name = upload.state_name
        if not upload.feedback and name not in self.states:
            return ledger
        compressor = compressor_of(upload)
        state = compressor.roll_back(ledger._state(compressor, name), update)
        return ledger._with_state(compressor, state, name)

    def _for_spec(self, spec: ModelSpec) -> Ledger:
        """This account for models of `spec`; what waits for another model is discarded."""
        if self.spec == spec.digest:
            return self if self.tensors is not None else replace(self, tensors=spec)
        ledger = self
        if self.residual is not None:
            ledger = self._discarding("spec-changed", Update.from_dense(self.residual), None)
        cleared = replace(ledger, residual=None, states={}, control=None, own=None)
        return replace(cleared, spec=spec.digest, tensors=spec, round=0)

    def _discarding(self, reason: Reason, update: Update, assignment: str | None) -> Ledger:
        if not any(piece.values.any() for piece in update.pieces):
            return self
        return self._adding(Discard(0, reason, assignment, update))

    def _adding(self, discard: Discard) -> Ledger:
        """With one discard more, which is numbered here."""
        discard = replace(discard, number=self.counter + 1)
        return replace(self, counter=self.counter + 1, discards=(*self.discards, discard))

    def to_bytes(self) -> bytes:
        """One safetensors file that carries the SHA-256 of itself; equal accounts, equal bytes."""
        return b"".join(ledger_file.parts_of(self))

    @classmethod
    def from_bytes(cls, data: bytes) -> Ledger:
        """The inverse of `to_bytes`; raises StateCorrupt for anything else."""
        return cls(**ledger_file.fields_of(data))
