"""An attempt at a round as it is now: the state of its protocol, and its plan's terms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fedpress_protocols.messages import Assignment
from fedpress_protocols.plan import RoundPlan
from fedpress_protocols.policies import Course
from fedpress_server.aggregation.accumulate import StagedUpload
from fedpress_server.aggregation.masked import SessionOpening
from fedpress_server.aggregation.terms import RoundTerms
from fedpress_server.rounds import (
    CarriedOver,
    Effect,
    Event,
    MaskedRound,
    Part,
    Round,
    Said,
    Session,
)
from fedpress_server.storage.files import upload_name, uploads_folder
from fedpress_server.storage.records import AssignmentRecord, RoundKey


@dataclass(frozen=True)
class Attempt:
    """An attempt at a round as it is now; `seq` counts its events.

    In an asynchronous task an assignment stays what it was when another attempt takes it over: it
    keeps the key and the plan of the attempt that gave it, which are among the `earlier`.
    """

    round: Round
    terms: RoundTerms
    seq: int = 0
    course: Course | None = None
    """The decisions of the task's policies for the round."""
    earlier: Mapping[tuple[int, int], RoundPlan] = field(default_factory=dict)
    """By round and attempt: the plans of assignments that were taken over."""

    @property
    def session(self) -> Session | None:
        """The session of a masked round, once it has begun; else None."""
        return self.round.session if isinstance(self.round, MaskedRound) else None

    @property
    def queue(self) -> tuple[str, ...]:
        """The assignments that wait for the session of a masked round, or are in it."""
        return self.round.queue if isinstance(self.round, MaskedRound) else ()

    @property
    def key(self) -> RoundKey:
        return self.terms.plan.task, self.round.number, self.round.attempt

    @property
    def plans(self) -> tuple[RoundPlan, ...]:
        """Under which uploads may come."""
        return self.terms.plan, *self.earlier.values()

    def key_of(self, assignment: str) -> RoundKey:
        """Of the attempt that gave one of this attempt's assignments."""
        source = self.round.parts[assignment].given
        return self.key if source is None else (self.key[0], *source)

    def holds(self, assignment: str, key: RoundKey) -> bool:
        """Whether an assignment that the attempt `key` gave is one of this attempt's."""
        return assignment in self.round.parts and self.key_of(assignment) == key

    def record_of(self, assignment: str) -> AssignmentRecord:
        """As its row has it, but for the time at which it was given, which is not kept here: 0."""
        part = self.round.parts[assignment]
        profile = self.terms_of(assignment).profile(part.index, part.profile)
        whose = (assignment, *self.key_of(assignment), part.client_id)
        return AssignmentRecord(*whose, part.index, profile, 0.0, None, part.turn)

    def concerns(self, event: Event, key: RoundKey | None) -> bool:
        """Whether what happens to the attempt `key`, None for any, happens to this one."""
        if key is None or key == self.key:
            return True
        assignment = getattr(event, "assignment", None)
        return assignment is not None and self.holds(assignment, key)

    def terms_of(self, assignment: str) -> RoundTerms:
        """Under which the assignment's upload is read."""
        plan_key = self.round.parts[assignment].given
        return self.terms if plan_key is None else replace(self.terms, plan=self.earlier[plan_key])

    def taking_over(
        self, previous: Attempt, opening: CarriedOver, now: float
    ) -> tuple[Attempt, tuple[Effect, ...]]:
        """This new attempt with what it takes over from the one before, and what must be done."""
        plans = {**previous.earlier, previous.key[1:]: previous.terms.plan}
        earlier_keys = {(each.round, each.attempt) for each in opening.carried}
        attempt = replace(self, earlier={key: plans[key] for key in sorted(earlier_keys)})
        return attempt.after(opening, now)

    def after(self, event: Event, now: float) -> tuple[Attempt, tuple[Effect, ...]]:
        """The attempt after `event`, and what must be done; nothing if it has no place here."""
        round_, effects = self.round.on(event, now)
        if not effects:
            return self, ()
        after = replace(self, round=round_, seq=self.seq + 1)
        if round_.deadline == self.round.deadline:
            return after, effects
        plan = self.terms.plan.model_copy(update={"deadline": round_.deadline})
        return after.under(replace(self.terms, plan=plan)), effects

    def under(self, terms: RoundTerms) -> Attempt:
        """With other terms, in which its session begins too."""
        round_ = self.round
        if isinstance(round_, MaskedRound) and isinstance(round_.opens, SessionOpening):
            round_ = replace(round_, opens=replace(round_.opens, terms=terms))
        return replace(self, round=round_, terms=terms)

    def admits(self, event: Said, identity: bytes, now: float) -> bool:
        """Whether the message of the event, by the device with this key, counts; False for a
        repeat. Raises as `Session.admits` does."""
        if self.session is None or event.message is None or event.assignment not in self.queue:
            return False
        return self.session.admits(event.assignment, event.message, identity, now)

    @property
    def session_phase(self) -> str:
        return "" if self.session is None else self.session.machine.phase

    @property
    def due(self) -> float | None:
        """When the deadline of its phase passes; None without one."""
        if self.round.phase == "masking" and self.session is not None:
            return self.session.machine.deadline
        return self.round.next_deadline if self.round.phase == "collecting" else None

    def is_due(self, now: float) -> bool:
        return self.due is not None and now >= self.due

    def has_place_for(self, client_id: str) -> bool:
        return self.round.phase == "collecting" and self.round.admits(client_id)

    def assignment_of(self, client_id: str) -> Assignment | None:
        """Return the client's open assignment; None without one or once uploads are closed."""
        newest = self.round.part_of(client_id)
        if not self.round.takes_uploads or newest is None or not newest[1].is_open:
            return None
        name, part = newest
        return Assignment(
            assignment=name,
            client_id=client_id,
            plan=self._plan_for(part),
            profile=self.terms_of(name).profile(part.index, part.profile),
            own=self.terms.bases.get(client_id),
            turn=part.turn,
        )

    def _plan_for(self, part: Part) -> RoundPlan:
        plan = self.terms.plan if part.given is None else self.earlier[part.given]
        if not self.round.is_asynchronous:
            return plan
        return plan.model_copy(update={"deadline": part.due})

    def takes_upload(self, assignment: str, now: float) -> bool:
        part = self.round.parts.get(assignment)
        if part is None or not part.is_open:
            return False
        if self.round.is_masked:
            return self.session is not None and self.session.takes_body(assignment, now)
        return self.round.takes_uploads and now < min(self.round.deadline, part.due)

    @property
    def staged(self) -> tuple[StagedUpload, ...]:
        """The staged uploads that wait for aggregation, in the order of `Round.staged`."""
        uploads = []
        for name in self.round.staged:
            part, own = self.round.parts[name], self.terms_of(name)
            if part.upload is not None:
                where = upload_name(self.key_of(name), name, part.upload)
                profile = own.profile(part.index, part.profile)
                staleness = self.round.staleness(part)
                uploads.append(
                    StagedUpload(where, part.upload, profile, part.client_id, own.plan, staleness)
                )
        return tuple(uploads)

    def spent(self, follows: Attempt | None) -> tuple[str, ...]:
        """The files and folders of uploads that nothing leads to once this attempt is over."""
        taken_over = follows.round.parts if follows is not None else {}
        kept_keys = {self.key_of(name) for name in taken_over}
        keys = {self.key, *((self.key[0], *source) for source in self.earlier)}
        files = [
            upload_name(self.key_of(name), name, part.upload)
            for name, part in self.round.parts.items()
            if part.upload is not None
            and part.reason is not None
            and self.key_of(name) in kept_keys
        ]
        return *map(uploads_folder, sorted(keys - kept_keys)), *files
