"""What a device computed and where it is now: a value, and the steps that move it.

    prepare   update + residual  →  body and what it stands for (pending), the rest (residual)
    masked    session            →  the body under the masks of this session and of no other
    settle    receipt            →  included: pending is done with
                                    not included: pending goes back into the residual
    recalled  the server's word  →  what a restore of the server undid goes back into the residual

At every moment, for each coordinate and in unweighted units,

    included + residual + pending + reported discards = everything computed

to float32 rounding. Under dgc what was computed is the velocities, and an upload's coordinates lose
theirs when it is included, not before. What an upload stands for is taken from its own decoded
bytes, or whole numbers where they are to be masked, in units of the update whatever its weight in
the sum. Nothing in here touches a disk, a network or a clock.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt
import safetensors
from safetensors.numpy import load as load_arrays
from safetensors.numpy import save as save_arrays

from fedpress_compression import kernels
from fedpress_compression.coding.fields import Layout
from fedpress_compression.compressor import Compressor, Public, check_finite, state_key
from fedpress_compression.compressors.dgc import Dgc, stilled
from fedpress_compression.compressors.error_feedback import ErrorFeedback
from fedpress_compression.contexts import contexts_of
from fedpress_compression.kernels.buffer_pool import pooled
from fedpress_compression.tensors import ModelSpec, Vector
from fedpress_compression.update import Piece, Update
from fedpress_protocols.errors import (
    ConfigurationError,
    Conflict,
    DigestMismatch,
    Forbidden,
    InvalidUpdate,
    StateCorrupt,
)
from fedpress_protocols.masking.payload import SECRET_BYTES, Payload
from fedpress_protocols.messages import Assignment, IncludedUpload, Outcome, Recall, Receipt
from fedpress_protocols.upload import Upload, check_report

FORMAT = 1
REMEMBERED = 256
"""Outcomes kept, so that a second receipt which contradicts the first is noticed."""

Reason = Literal[
    "not-sent", "not-included", "spec-changed", "decayed", "capped", "invalid", "not-saved",
    "rolled-back",
]  # fmt: skip
State = Any
"""A compressor's state in plain form: None, numbers, text, arrays, lists and dicts of them."""

_METADATA = "fedpress.ledger"
_PERSONAL = "personal."
_SEAL = re.compile(rb"sha256:[0-9a-f]{64}")
_BLANK = b"sha256:" + b"0" * 64


@dataclass(frozen=True, slots=True)
class ResidualRules:
    """Optional limits on what waits in the residual; by default there are none.

    The residual is multiplied by `decay` for every round this device sat out, then scaled down
    to at most `max_ratio` times the new update's norm. What either takes away is reported. These
    are the device's own; where the plan's error feedback sets limits too, the stricter count.
    """

    decay: float = 1.0
    max_ratio: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.decay <= 1:
            raise ConfigurationError(f"decay must lie in [0, 1], not {self.decay}")
        if self.max_ratio is not None and not self.max_ratio >= 0:
            raise ConfigurationError(f"max_ratio must be 0 or more, not {self.max_ratio}")

    def stricter(self, plan: ErrorFeedback) -> ResidualRules:
        """The lower of each limit here and in `plan`."""
        ratios = [ratio for ratio in (self.max_ratio, plan.max_ratio) if ratio is not None]
        return ResidualRules(min(self.decay, plan.decay), min(ratios, default=None))


KEEP_ALL = ResidualRules()


@dataclass(frozen=True, slots=True, eq=False)
class Discard:
    """Something computed that will not reach the model, and why.

    not-sent      compression without error feedback lost it, or took it beyond the plan's bound
    not-included  an upload without error feedback came to nothing
    spec-changed  it was waiting for a model of other tensors
    decayed       ResidualRules.decay
    capped        ResidualRules.max_ratio
    invalid       NaN, infinity or beyond float32: nothing of the update could be kept
    not-saved     the account with it could not be written: a full disk
    rolled-back   a restore of the server undid it, and it was not kept: `lost_norm` is all of it
                  that is known, and `update` is zeros

    A crash between deciding and telling has it told again, under the same `number`.
    """

    number: int
    reason: Reason
    assignment: str | None
    update: Update
    lost_norm: float | None = None

    @property
    def norm(self) -> float:
        """Euclidean."""
        if self.lost_norm is not None:
            return self.lost_norm
        squares = (np.square(p.values.astype(np.float64)).sum() for p in self.update.pieces)
        return float(np.sqrt(sum(squares)))

    @property
    def vector(self) -> Vector:
        """Dense [size of its model]."""
        return self.update.dense()


@dataclass(frozen=True, slots=True, eq=False)
class Pending:
    """An upload that has no receipt yet: its bytes, and `update`, what they decode to."""

    body: bytes
    update: Update
    num_examples: int
    round: int
    attempt: int
    model: str
    spec: str
    profile: str
    feedback: bool
    """Whether it returns to the residual if it is not included."""
    compressor: str
    state: State
    """The compressor's state once this upload is included."""
    number: int
    """Pendings are numbered as they are made."""
    control: float = 0.0
    """Times what it decodes to, it moves the client's control variate once it is included."""
    is_base: bool = False
    """Whether it is what later uploads are differences to, once it is included."""
    is_first: bool = False
    """Whether `body` is the first of two trips; `update` is then all that was computed."""
    stills: bool = False
    """Whether what it sent is to lose its velocity once it is included."""
    report: tuple[float, ...] = ()
    """The numbers that the plan names, for the second trip."""
    lane: str = "clear"
    session: str | None = None
    """Of the masked lane: the id of the one session that `body` is masked for; None before."""

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of the body."""
        return hashlib.sha256(self.body).hexdigest()


@dataclass(frozen=True, slots=True, eq=False)
class Included:
    """An upload that was included, for as long as a restore of the server may undo that."""

    update: Update | None
    """What it stood for; None if there was no room for it."""
    norm: float
    """Euclidean, of the update."""
    round: int
    attempt: int
    model: str | None
    """That it went into."""
    issued_at: int
    """Of its receipt, Unix seconds of the server."""
    epoch: str | None
    """Of the server's last restore before."""
    spec: str
    feedback: bool
    number: int
    control: float

    @property
    def num_values(self) -> int:
        return 0 if self.update is None else sum(p.values.size for p in self.update.pieces)


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
    velocity: Vector | None = None
    """Of the updates since, under dgc; None stands for zeros."""
    states: Mapping[str, tuple[int, State]] = dataclasses.field(default_factory=dict)
    """By a compressor's `state_key`: the number of the last pending included, what it left."""
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
        previous: Vector | None = None,
        drift: Vector | None = None,
        activity: Vector | None = None,
        own: Vector | None = None,
        report: Mapping[str, float] = MappingProxyType({}),
        personal: Mapping[str, Vector] = MappingProxyType({}),
        secret: bytes | None = None,
        sections: Callable[[bytes], None] | None = None,
    ) -> tuple[Ledger, bytes | None]:
        """The account once `update` is on its way, and the bytes to send; `spec` is the model's,
        `update` of the size that the plan's uploads are over.

        None where compression, in scaling up what it sends, took it beyond the plan's `max_abs`:
        then everything joins the residual or, without error feedback, is discarded.

        An assignment prepared before gives its first bytes again, whatever `update` is. Values
        beyond the plan's `max_abs` are clipped, and what that takes off is left over like all that
        compression leaves. `rng` is the compressor's private randomness; `previous`, `drift`
        and `activity` are Public's, for a compressor that needs them. `report` has the numbers that
        the plan names, `personal` the tensors that stay here. Raises InvalidUpdate on NaN or
        infinity, IncompatiblePlan if `spec` is not the plan's.

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
        public = plan.public(spec, previous=previous, drift=drift, activity=activity, own=own)
        layouts, spec = plan.layouts(spec), public.spec
        check_finite(update, spec)
        told = tuple(report[name] for name in plan.report)
        check_report(told, plan.report)
        compressor = plan.compressor(assignment.profile)
        feedback = isinstance(compressor, ErrorFeedback)
        lossy = compressor.inner if isinstance(compressor, ErrorFeedback) else compressor
        ledger, whole = self._for_spec(spec), update
        if isinstance(compressor, Dgc):
            whole = update = compressor.velocity(update, ledger.velocity, spec)
            ledger = replace(ledger, velocity=update)
        if isinstance(compressor, ErrorFeedback):
            ledger = ledger._tended(rules.stricter(compressor), update, plan.round)
            if ledger.residual is not None:
                with np.errstate(over="ignore"):  # check_finite, when compressed
                    whole = np.add(update, ledger.residual, out=pooled(spec.size, np.float32))
        name = json.dumps(state_key(lossy), sort_keys=True)
        limit = np.float32(plan.fixed_point.max_abs)
        within = whole if kernels.peak(whole) <= limit else np.clip(whole, -limit, limit)
        examples = min(num_examples, plan.fixed_point.max_examples)
        after: State = None
        if plan.lane == "masked":
            body, sent = _for_masking(Payload(plan, public), within, examples, report, secret)
        elif plan.first_trip is not None:
            first = Upload(0, examples, plan.first_trip.first(within, public))
            body = first.to_bytes(plan.first_trip.first_layout(spec))
            sent = Update.from_dense(whole)  # until the basis is known nothing of it is left
        else:
            before = _restored(ledger.states.get(name, (0, None))[1], lossy.init(spec))
            symbols, after = lossy.compress(within, before, public, rng)
            upload = Upload(plan.profile_index(assignment.profile), examples, symbols, told)
            body, sent = _as_received(upload, layouts, lossy, public, plan.report, sections)
        ledger = replace(ledger, round=max(ledger.round, plan.round), personal=dict(personal))
        try:
            if plan.first_trip is None:
                sent.check(plan.fixed_point.max_abs)
        except InvalidUpdate:
            ledger = replace(ledger, settled=ledger._remembering(key, "not-included"))
            return ledger._left(whole, key, feedback=feedback), None
        left = pooled(spec.size, np.float32)
        np.copyto(left, whole)
        sent.add_to(left, sign=-1.0)
        ledger = ledger._left(left, key, feedback=feedback)
        control = plan.client_terms.control
        pending = Pending(
            body=body,
            update=sent,
            num_examples=examples,
            round=plan.round,
            attempt=plan.attempt,
            model=plan.model,
            spec=spec.digest,
            profile=assignment.profile,
            feedback=feedback,
            compressor=name,
            state=_plain(after),
            number=ledger.counter + 1,
            control=control.scale if control is not None else 0.0,
            is_base="own" in plan.needs,
            is_first=plan.first_trip is not None,
            stills=isinstance(compressor, Dgc),
            report=told,
            lane=plan.lane,
        )
        ledger = replace(
            ledger,
            counter=ledger.counter + 1,
            pending={**ledger.pending, key: pending},
        )
        return ledger, body

    def second(
        self,
        assignment: Assignment,
        spec: ModelSpec,
        rng: np.random.Generator,
        basis: Vector,
        *,
        previous: Vector | None = None,
        drift: Vector | None = None,
        activity: Vector | None = None,
        own: Vector | None = None,
    ) -> tuple[Ledger, bytes | None]:
        """The account once the second of two trips is on its way, and the bytes to send: of the
        very update that the first was of, against the `basis` that the first ones came to.

        What is left over joins the residual now, and not before. Made before, it gives the same
        bytes again. None as in `prepare`. Raises Conflict if there was no first trip.
        """
        key, plan = assignment.assignment, assignment.plan
        held, lossy = self.pending.get(key), plan.first_trip
        if held is None or lossy is None:
            raise Conflict(f"assignment {key} has made no first trip")
        if not held.is_first:
            return self, held.body
        public = plan.public(
            spec, previous=previous, drift=drift, activity=activity, own=own, basis=basis
        )
        whole, limit = held.update.dense(), np.float32(plan.fixed_point.max_abs)
        before = _restored(self.states.get(held.compressor, (0, None))[1], lossy.init(public.spec))
        symbols, after = lossy.compress(np.clip(whole, -limit, limit), before, public, rng)
        upload = Upload(0, held.num_examples, symbols, tuple(held.report))
        body, sent = _as_received(upload, plan.layouts(spec), lossy, public, plan.report)
        try:
            sent.check(plan.fixed_point.max_abs)
        except InvalidUpdate:
            pending = {other: item for other, item in self.pending.items() if other != key}
            ledger = replace(self, pending=pending, settled=self._remembering(key, "not-included"))
            return ledger._taken_back(held, key), None
        left = whole.copy()
        sent.add_to(left, sign=-1.0)
        if held.feedback and self.residual is not None:
            left += self.residual
        ledger = self._left(left, key, feedback=held.feedback)
        made = replace(held, body=body, update=sent, state=_plain(after), is_first=False)
        return replace(ledger, pending={**self.pending, key: made}), body

    def masked(self, assignment: str, session: str, body: bytes) -> Ledger:
        """The account once an upload of the masked lane is masked for `session`, as `body`.

        It is to be durable before the first byte leaves. From then on these bytes are what is sent,
        also after a restart, and no other session ever gets this update: under two sets of masks,
        or in two cohorts, the difference would tell of it. If the session comes to nothing, the
        receipt says so, and the update goes back into the residual. Raises Conflict if there is no
        such upload, or it was masked before in other words.
        """
        held = self.pending.get(assignment)
        if held is None or held.lane != "masked" or len(body) != len(held.body):
            raise Conflict(f"{len(body)} masked bytes for {assignment}, which has no such upload")
        if held.session is not None:
            if (held.session, held.body) != (session, body):
                raise Conflict(f"{assignment} was masked for session {held.session[:12]} before")
            return self
        after = replace(held, body=body, session=session)
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
            kept = self.kept.get(key)
            if kept is not None and receipt.epoch not in (None, kept.epoch):
                return self._undone(key, kept)
            raise Conflict(
                f"receipt {key} says {receipt.outcome}; an earlier one said {self.settled[key]}"
            )
        held = self.pending.get(key)
        if held is None:
            return self
        if (receipt.round, receipt.attempt) != (held.round, held.attempt):
            raise Conflict(
                f"receipt {key} is for round {receipt.round}.{receipt.attempt}, its upload for "
                f"round {held.round}.{held.attempt}"
            )
        is_included = receipt.outcome == "included"
        if receipt.upload != held.digest and (is_included or receipt.upload is not None):
            raise DigestMismatch(
                f"receipt {key} speaks of an upload {str(receipt.upload)[:12]}, sent was "
                f"{held.digest[:12]}"
            )
        ledger = replace(
            self,
            pending={other: item for other, item in self.pending.items() if other != key},
            settled=self._remembering(key, receipt.outcome),
            included=self.included + is_included,
            not_included=self.not_included + (not is_included),
        )
        if not is_included:
            return ledger._taken_back(held, key)
        return ledger._committed(held)._keeping(held, receipt)

    def goes_back_to(self, backup_at: int) -> Ledger:
        """The account once it is known how far the server may go back, Unix seconds: of what was
        included before, the norm is kept and no more, since an older backup may still come back."""
        if self.backup_at is not None and self.backup_at >= backup_at:
            return self
        kept = {
            key: each if each.issued_at >= backup_at else replace(each, update=None)
            for key, each in self.kept.items()
        }
        return replace(self, backup_at=backup_at, kept=kept)

    @property
    def fates(self) -> tuple[IncludedUpload, ...]:
        """What the account takes for included, and a restore may have undone."""
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
            held, kept = ledger.pending.get(key), ledger.kept.get(key)
            if held is not None:
                pending = {other: each for other, each in ledger.pending.items() if other != key}
                settled = ledger._remembering(key, "not-included")
                ledger = replace(
                    ledger,
                    pending=pending,
                    settled=settled,
                    not_included=ledger.not_included + 1,
                )._taken_back(held, key)
            elif kept is not None:
                ledger = ledger._undone(key, kept)
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

    def _left(self, left: Vector, key: str, *, feedback: bool) -> Ledger:
        """This account with `left` [spec.size], residual and all, for the next upload or lost."""
        if feedback:
            return replace(self, residual=left)
        return self._discarding("not-sent", Update.from_dense(left), key)

    def _remembering(self, key: str, outcome: Outcome) -> dict[str, Outcome]:
        recent = list(self.settled.items())[-(REMEMBERED - 1) :]
        return dict(recent) | {key: outcome}

    def _committed(self, held: Pending) -> Ledger:
        if held.spec != self.spec:
            return self
        ledger = self
        if held.control:
            control = np.zeros(held.update.size, np.float32)
            if self.control is not None:
                control = self.control.copy()
            held.update.add_to(control, held.control)
            ledger = replace(ledger, control=control)
        if held.stills and self.velocity is not None:
            ledger = replace(ledger, velocity=stilled(self.velocity, held.update))
        if held.is_base and (self.own is None or held.number > self.own[0]):
            ledger = replace(ledger, own=(held.number, held.update.dense()))
        number, _ = self.states.get(held.compressor, (0, None))
        if held.state is None or held.number < number:
            return ledger
        return replace(ledger, states={**self.states, held.compressor: (held.number, held.state)})

    def _keeping(self, held: Pending, receipt: Receipt) -> Ledger:
        """With what `held` stood for, if the server may go back behind its receipt."""
        if self.backup_at is None:
            return self
        norm = Discard(0, "rolled-back", None, held.update).norm
        new = Included(
            update=held.update if receipt.issued_at >= self.backup_at else None,
            norm=norm,
            round=held.round,
            attempt=held.attempt,
            model=receipt.model,
            issued_at=receipt.issued_at,
            epoch=receipt.epoch,
            spec=held.spec,
            feedback=held.feedback,
            number=held.number,
            control=held.control,
        )
        room, kept = held.update.size // 2, list[tuple[str, Included]]()
        for key, each in [(receipt.assignment, new), *reversed(list(self.kept.items()))][
            :REMEMBERED
        ]:
            room -= each.num_values
            kept.append((key, each if room >= 0 else replace(each, update=None)))
        return replace(self, kept=dict(reversed(kept)))

    def _undone(self, key: str, undone: Included) -> Ledger:
        """What counted as included is included no more."""
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
        return ledger._returned(undone.update, key, undone.spec, feedback=undone.feedback)

    def _taken_back(self, held: Pending, key: str) -> Ledger:
        return self._returned(held.update, key, held.spec, feedback=held.feedback)

    def _returned(self, update: Update, key: str, spec: str, *, feedback: bool) -> Ledger:
        if not feedback:
            return self._discarding("not-included", update, key)
        if spec != self.spec:
            return self._discarding("spec-changed", update, key)
        residual = np.zeros(update.size, np.float32)
        if self.residual is not None:
            residual = self.residual.copy()
        update.add_to(residual)
        return replace(self, residual=residual)

    def _for_spec(self, spec: ModelSpec) -> Ledger:
        """This account for models of `spec`; what waits for another model is discarded."""
        if self.spec == spec.digest:
            return self
        ledger = self
        if self.residual is not None:
            ledger = self._discarding("spec-changed", Update.from_dense(self.residual), None)
        cleared = replace(ledger, residual=None, velocity=None, states={}, control=None, own=None)
        return replace(cleared, spec=spec.digest, round=0)

    def _tended(self, rules: ResidualRules, update: Vector, round_: int) -> Ledger:
        ledger = self
        sat_out = max(0, round_ - self.round - 1) if self.round else 0
        if rules.decay < 1 and sat_out:
            ledger = ledger._shrunk(rules.decay**sat_out, "decayed")
        if rules.max_ratio is not None and ledger.residual is not None:
            norm = float(np.linalg.norm(ledger.residual.astype(np.float64)))
            at_most = rules.max_ratio * float(np.linalg.norm(update.astype(np.float64)))
            if norm > at_most:
                ledger = ledger._shrunk(at_most / norm, "capped")
        return ledger

    def _shrunk(self, factor: float, reason: Reason) -> Ledger:
        if self.residual is None:
            return self
        kept = self.residual * np.float32(factor)
        lost = Update.from_dense(self.residual - kept)
        return replace(self._discarding(reason, lost, None), residual=kept)

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
        arrays: dict[str, npt.NDArray[Any]] = {}
        document = {
            "seal": _BLANK.decode(),
            "format": FORMAT,
            "task": self.task,
            "client_id": self.client_id,
            "spec": self.spec,
            "round": self.round,
            "counter": self.counter,
            "own": None if self.own is None else self.own[0],
            "included": self.included,
            "not_included": self.not_included,
            "settled": list(self.settled.items()),
            "states": [
                [name, number, _stored(state, f"states.{index}", arrays)]
                for index, (name, (number, state)) in enumerate(self.states.items())
            ],
            "pending": [
                {
                    "assignment": key,
                    "update": _stored_update(held.update, f"pending.{index}.update", arrays),
                    "state": _stored(held.state, f"pending.{index}.state", arrays),
                    **{name: getattr(held, name) for name in _PENDING_SCALARS},
                }
                for index, (key, held) in enumerate(self.pending.items())
            ],
            "discards": [
                {
                    "number": discard.number,
                    "reason": discard.reason,
                    "assignment": discard.assignment,
                    "update": _stored_update(discard.update, f"discards.{index}", arrays),
                    "lost_norm": discard.lost_norm,
                }
                for index, discard in enumerate(self.discards)
            ],
            "epoch": self.epoch,
            "backup_at": self.backup_at,
            "kept": [
                {
                    "assignment": key,
                    "update": None
                    if each.update is None
                    else _stored_update(each.update, f"kept.{index}", arrays),
                    **{name: getattr(each, name) for name in _INCLUDED_SCALARS},
                }
                for index, (key, each) in enumerate(self.kept.items())
            ],
        }
        for index, held in enumerate(self.pending.values()):
            arrays[f"pending.{index}.body"] = np.frombuffer(held.body, np.uint8)
        if self.residual is not None:
            arrays["residual"] = self.residual
        if self.velocity is not None:
            arrays["velocity"] = self.velocity
        if self.control is not None:
            arrays["control"] = self.control
        if self.own is not None:
            arrays["own"] = self.own[1]
        arrays |= {_PERSONAL + name: values for name, values in self.personal.items()}
        data = bytearray(save_arrays(arrays, {_METADATA: json.dumps(document)}))
        start = _seal_of(data)
        data[start : start + len(_BLANK)] = b"sha256:" + hashlib.sha256(data).hexdigest().encode()
        return bytes(data)

    @classmethod
    def from_bytes(cls, data: bytes) -> Ledger:
        """The inverse of `to_bytes`; raises StateCorrupt for anything else."""
        try:
            start = _seal_of(data)
            stop = start + len(_BLANK)
            digest = hashlib.sha256(data[:start])
            digest.update(_BLANK)
            digest.update(memoryview(data)[stop:])
            if data[start:stop] != b"sha256:" + digest.hexdigest().encode():
                raise StateCorrupt("its bytes do not match their SHA-256")
            header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
            document = json.loads(header["__metadata__"][_METADATA])
            if document["format"] != FORMAT:
                raise StateCorrupt(
                    f"its format is {document['format']}, this release reads {FORMAT}",
                    hint="run the release of fedpress that wrote it, or a newer one",
                )
            return cls._parsed(document, load_arrays(data))
        except (ValueError, KeyError, TypeError, safetensors.SafetensorError) as exc:
            raise StateCorrupt(f"not a ledger: {exc!r}") from exc

    @classmethod
    def _parsed(cls, document: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> Ledger:
        return cls(
            task=document["task"],
            client_id=document["client_id"],
            spec=document["spec"],
            round=document["round"],
            residual=arrays.get("residual"),
            velocity=arrays.get("velocity"),
            control=arrays.get("control"),
            own=(document["own"], arrays["own"]) if "own" in arrays else None,
            personal={
                name.removeprefix(_PERSONAL): array
                for name, array in arrays.items()
                if name.startswith(_PERSONAL)
            },
            states={
                name: (number, _loaded(state, arrays)) for name, number, state in document["states"]
            },
            pending={
                item["assignment"]: Pending(
                    body=arrays[f"pending.{index}.body"].tobytes(),
                    update=_loaded_update(item["update"], arrays),
                    state=_loaded(item["state"], arrays),
                    **{name: item[name] for name in _PENDING_SCALARS if name in item},
                )
                for index, item in enumerate(document["pending"])
            },
            settled=dict(document["settled"]),
            discards=tuple(
                Discard(
                    item["number"],
                    item["reason"],
                    item["assignment"],
                    _loaded_update(item["update"], arrays),
                    item.get("lost_norm"),
                )
                for item in document["discards"]
            ),
            counter=document["counter"],
            included=document["included"],
            not_included=document["not_included"],
            epoch=document.get("epoch"),
            backup_at=document.get("backup_at"),
            kept={
                item["assignment"]: Included(
                    update=item["update"] and _loaded_update(item["update"], arrays),
                    **{name: item[name] for name in _INCLUDED_SCALARS},
                )
                for item in document.get("kept", ())
            },
        )


_PENDING_SCALARS = (
    "num_examples",
    "round",
    "attempt",
    "model",
    "spec",
    "profile",
    "feedback",
    "compressor",
    "number",
    "control",
    "is_base",
    "is_first",
    "stills",
    "report",
    "lane",
    "session",
)


_INCLUDED_SCALARS = (
    "norm",
    "round",
    "attempt",
    "model",
    "issued_at",
    "epoch",
    "spec",
    "feedback",
    "number",
    "control",
)


def _seal_of(data: bytes | bytearray) -> int:
    """Where the file's own SHA-256 stands; ValueError if nowhere in its header."""
    found = _SEAL.search(data, 8, 8 + int.from_bytes(data[:8], "little"))
    if found is None:
        raise ValueError("it has no SHA-256 of itself")
    return found.start()


def _as_received(
    upload: Upload,
    layouts: tuple[Layout, ...],
    lossy: Compressor[Any],
    public: Public,
    report: tuple[str, ...],
    sections: Callable[[bytes], None] | None = None,
) -> tuple[bytes, Update]:
    """The bytes to be sent, and what they stand for once they are decoded."""
    index = upload.profile
    contexts = contexts_of(layouts[index], public)
    coded = []
    for section in upload.sections(layouts[index], contexts):
        if sections is not None:
            sections(section)
        coded.append(section)
    body = b"".join(coded)
    received = Upload.from_bytes(body, layouts, index, contexts, report)
    return body, lossy.decompress(received.symbols, public)


def _for_masking(
    payload: Payload,
    update: Vector,
    num_examples: int,
    report: Mapping[str, float],
    secret: bytes | None,
) -> tuple[bytes, Update]:
    """The bytes to be masked, and what they stand for."""
    secret = secrets.token_bytes(SECRET_BYTES) if secret is None else secret
    made = payload.compress(update, num_examples, report, secret)
    return payload.packing.to_bytes(payload.packing.pack(made.integers)), made.update


# A compressor's state: plain form ⇄ its own types, plain form ⇄ JSON and named arrays


def _plain(state: Any) -> State:
    """Tuples and dataclasses as lists; None if nothing is in it to remember."""
    match state:
        case None | bool() | int() | float() | str():
            plain: State = state
        case np.ndarray():
            plain = state
        case np.generic():
            plain = state.item()
        case Mapping():
            plain = {str(name): _plain(item) for name, item in state.items()}
        case tuple() | list():
            plain = [_plain(item) for item in state]
        case _ if dataclasses.is_dataclass(state):
            plain = [_plain(item) for item in _fields(state)]
        case _:
            raise ConfigurationError(
                f"a compressor's state holds a {type(state).__name__}, which cannot be stored"
            )
    return plain if any(True for _ in _leaves(plain)) else None


def _leaves(plain: State) -> Iterator[Any]:
    match plain:
        case None:
            return
        case dict():
            for item in plain.values():
                yield from _leaves(item)
        case list():
            for item in plain:
                yield from _leaves(item)
        case _:
            yield plain


def _fields(state: Any) -> Iterator[Any]:
    return (getattr(state, field.name) for field in dataclasses.fields(state))


def _restored(plain: State, like: Any) -> Any:
    """`plain` in the types of `like`, the state of a client that has sent nothing yet."""
    if plain is None or like is None:
        return like if plain is None else plain
    if isinstance(like, Mapping):
        return {name: _restored(plain.get(name), item) for name, item in like.items()}
    is_dataclass = dataclasses.is_dataclass(like)
    if is_dataclass or isinstance(like, tuple | list):
        items = list(_fields(like) if is_dataclass else like)
        restored = [_restored(p, item) for p, item in zip(plain, items, strict=True)]
        by_position = is_dataclass or hasattr(like, "_fields")
        return type(like)(*restored) if by_position else type(like)(restored)
    return plain


def _stored(plain: State, name: str, arrays: dict[str, npt.NDArray[Any]]) -> Any:
    match plain:
        case np.ndarray():
            arrays[name] = np.ascontiguousarray(plain).reshape(plain.shape)
            return {"array": name}
        case dict():
            items = {key: _stored(item, f"{name}.{key}", arrays) for key, item in plain.items()}
            return {"map": items}
        case list():
            return [_stored(item, f"{name}.{index}", arrays) for index, item in enumerate(plain)]
        case _:
            return plain


def _loaded(stored: Any, arrays: Mapping[str, npt.NDArray[Any]]) -> State:
    match stored:
        case {"array": name}:
            return arrays[name]
        case {"map": items}:
            return {key: _loaded(item, arrays) for key, item in items.items()}
        case list():
            return [_loaded(item, arrays) for item in stored]
        case _:
            return stored


def _stored_update(update: Update, name: str, arrays: dict[str, npt.NDArray[Any]]) -> Any:
    pieces = []
    for index, piece in enumerate(update.pieces):
        arrays[f"{name}.{index}.values"] = np.ascontiguousarray(piece.values)
        if isinstance(piece.where, slice):
            pieces.append([piece.where.start, piece.where.stop])
        else:
            arrays[f"{name}.{index}.where"] = np.ascontiguousarray(piece.where)
            pieces.append([])
    return {"size": update.size, "pieces": pieces, "name": name}


def _loaded_update(stored: Any, arrays: Mapping[str, npt.NDArray[Any]]) -> Update:
    pieces = []
    for index, bounds in enumerate(stored["pieces"]):
        name = f"{stored['name']}.{index}"
        where = slice(*bounds) if bounds else arrays[f"{name}.where"]
        pieces.append(Piece(where, cast(Vector, arrays[f"{name}.values"])))
    return Update(stored["size"], tuple(pieces))
