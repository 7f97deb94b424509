"""An attempt at a round as it is now: the machine, its plan's terms, and in the masked lane the
session, which move in one step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fedpress_protocols.errors import FedpressError
from fedpress_protocols.masking.messages import ClientMessage
from fedpress_protocols.messages import Assignment
from fedpress_protocols.plan import RoundPlan
from fedpress_protocols.policies import Course
from fedpress_server.folds.adding import StagedUpload
from fedpress_server.folds.masked import Host, Message, Session
from fedpress_server.folds.terms import RoundTerms
from fedpress_server.rounds import (
    BeginSession,
    CarriedOver,
    DeadlinePassed,
    Effect,
    Event,
    Folded,
    Part,
    Round,
    Said,
    SessionEnded,
    SessionFailed,
    UnmaskFailed,
    UploadStaged,
)
from fedpress_server.storage.files import upload_name, uploads_folder
from fedpress_server.storage.records import AssignmentRecord, RoundKey


@dataclass(frozen=True)
class Attempt:
    """An attempt at a round as it is now; `seq` counts its events.

    In the masked lane `session` is the round's once it has begun, under the keys of `host`. The two
    move in one step: what becomes of the session the round is told at once.

    In an asynchronous task an assignment stays what it was when another attempt takes it over: it
    keeps the key and the plan of the attempt that gave it, which are among the `earlier`.
    """

    round: Round
    terms: RoundTerms
    seq: int = 0
    host: Host | None = None
    session: Session | None = None
    course: Course | None = None
    """What the task's policies made of the round."""
    earlier: Mapping[tuple[int, int], RoundPlan] = field(default_factory=dict)
    """By round and attempt: the plans of assignments that were taken over."""
    opened_at: float = 0.0

    @property
    def key(self) -> RoundKey:
        return self.terms.plan.task, self.round.number, self.round.attempt

    @property
    def plans(self) -> tuple[RoundPlan, ...]:
        """Under which uploads may come."""
        return self.terms.plan, *self.earlier.values()

    def key_of(self, assignment: str) -> RoundKey:
        """Of the attempt that gave one of this attempt's assignments."""
        given = self.round.parts[assignment].given
        return self.key if given is None else (self.key[0], *given)

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
        given = self.round.parts[assignment].given
        return self.terms if given is None else replace(self.terms, plan=self.earlier[given])

    def taking_over(
        self, ended: Attempt, opening: CarriedOver, now: float
    ) -> tuple[Attempt, tuple[Effect, ...]]:
        """This new attempt with what it takes over from the one before, and what must be done."""
        plans = {**ended.earlier, ended.key[1:]: ended.terms.plan}
        given = {(each.round, each.attempt) for each in opening.carried}
        begun = replace(self, earlier={key: plans[key] for key in sorted(given)})
        return begun.after(opening, now)

    def after(
        self, event: Event, now: float, message: ClientMessage | None = None
    ) -> tuple[Attempt, tuple[Effect, ...]]:
        """The attempt after `event`, and what must be done; nothing if it has no place here.

        `message` is what was `Said`, admitted before.
        """
        if self.round.phase == "masking" and self._is_out_of_turn(event, now):
            return self, ()
        round_, effects = self.round.on(event, now)
        if not effects:
            return self, ()
        terms = self.terms
        if round_.deadline != self.round.deadline:
            plan = terms.plan.model_copy(update={"deadline": round_.deadline})
            terms = replace(terms, plan=plan)
        if round_.basis != self.round.basis:
            terms = replace(terms, basis=f"{uploads_folder(self.key)}/{round_.basis}")
        after = replace(self, round=round_, terms=terms, seq=self.seq + 1)
        if not round_.is_masked:
            return after, effects
        return after._with_session(event, effects, message, now)

    def admits(self, event: Event, said: Message, now: float) -> bool:
        """Whether what was `said` counts; False for a repeat. Raises as `Session.admits` does."""
        if self.session is None or not isinstance(event, Said):
            return False
        if event.assignment not in self.round.queue:
            return False
        return self.session.admits(event.assignment, said.message, said.identity, now)

    @property
    def session_phase(self) -> str:
        return "" if self.session is None else self.session.machine.phase

    def _is_out_of_turn(self, event: Event, now: float) -> bool:
        """Whether the session has no place for what its round would take."""
        if self.session is None:
            return False
        match event:
            case DeadlinePassed():
                return now < self.session.machine.deadline
            case UploadStaged(assignment):
                return not self.session.takes_body(assignment, now)
            case _:
                return False

    def _with_session(
        self, event: Event, effects: tuple[Effect, ...], message: ClientMessage | None, now: float
    ) -> tuple[Attempt, tuple[Effect, ...]]:
        """With the session moved on too, and the round by what came of it."""
        session, verdict = self.session, None
        try:
            if BeginSession() in effects and self.host is not None:
                parts = self.round.parts
                clients = {name: parts[name].client_id for name in self.round.queue}
                session = Session.begun(self.host, self.terms, clients, self.opened_at, now)
        except FedpressError as exc:
            verdict = SessionFailed(f"no session can begin: {exc.detail}")
        if session is None:
            return self._told(verdict, effects, now)
        match event:
            case Said(assignment) if message is not None:
                session = session.said(assignment, message, now, len(self.round.queue))
            case UploadStaged(assignment):
                session = session.staged(assignment, now)
            case DeadlinePassed() if BeginSession() not in effects:
                session = session.passed(now)
            case UnmaskFailed(detail, suspects):
                session = session.unmask_failed(detail, suspects, now)
            case Folded(suspects=suspects):
                session = session.suspecting(suspects)
        return replace(self, session=session)._told(session.outcome, effects, now)

    def _told(
        self, verdict: SessionEnded | SessionFailed | None, effects: tuple[Effect, ...], now: float
    ) -> tuple[Attempt, tuple[Effect, ...]]:
        if verdict is None:
            return self, effects
        round_, more = self.round.on(verdict, now)
        return replace(self, round=round_), (*effects, *more)

    def is_due(self, now: float) -> bool:
        if self.round.phase == "masking" and self.session is not None:
            return now >= self.session.machine.deadline
        return self.round.phase == "collecting" and now >= self.round.next_deadline

    def has_place_for(self, client_id: str) -> bool:
        return self.round.phase == "collecting" and self.round.admits(client_id)

    def assignment_of(self, client_id: str) -> Assignment | None:
        """What the client still has to do."""
        found = self.round.part_of(client_id)
        if not self.round.takes_uploads or found is None or not found[1].is_open:
            return None
        name, part = found
        if part.first is not None and self.round.basis is None:
            return None
        return Assignment(
            assignment=name,
            client_id=client_id,
            plan=self._plan_for(part),
            profile=self.terms_of(name).profile(part.index, part.profile),
            own=self.terms.bases.get(client_id),
            basis=self.round.basis,
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
        is_time = self.round.takes_uploads and not self.round.is_first_trip
        return is_time and now < min(self.round.deadline, part.due)

    def takes_first(self, assignment: str, now: float) -> bool:
        part = self.round.parts.get(assignment)
        is_new = part is not None and part.is_open and part.first is None
        is_time = self.round.phase == "collecting" and self.round.is_first_trip
        return is_new and is_time and now < self.round.deadline

    def first_of(self, assignment: str) -> str | None:
        """SHA-256 of the body of the assignment's first trip."""
        part = self.round.parts.get(assignment)
        return None if part is None else part.first

    @property
    def firsts(self) -> tuple[StagedUpload, ...]:
        """Where the first trips lie that a basis is made of, in the order of their assignments."""
        parts = self.round.parts
        return tuple(
            StagedUpload(
                upload_name(self.key, name, digest),
                digest,
                self.terms.profile(parts[name].index, parts[name].profile),
            )
            for name in self.round.firsts
            if (digest := parts[name].first) is not None
        )

    @property
    def staged(self) -> tuple[StagedUpload, ...]:
        """Where the uploads lie that wait for the fold, in the order of their assignments."""
        found = []
        for name in self.round.staged:
            part, own = self.round.parts[name], self.terms_of(name)
            if part.upload is not None:
                where = upload_name(self.key_of(name), name, part.upload)
                profile = own.profile(part.index, part.profile)
                staleness = self.round.staleness(part)
                found.append(
                    StagedUpload(where, part.upload, profile, part.client_id, own.plan, staleness)
                )
        return tuple(found)

    def spent(self, follows: Attempt | None) -> tuple[str, ...]:
        """The files and folders of uploads that nothing leads to once this attempt is over."""
        taken_over = follows.round.parts if follows is not None else {}
        kept = {self.key_of(name) for name in taken_over}
        ours = {self.key, *((self.key[0], *given) for given in self.earlier)}
        files = [
            upload_name(self.key_of(name), name, part.upload)
            for name, part in self.round.parts.items()
            if part.upload is not None and part.reason is not None and self.key_of(name) in kept
        ]
        return *map(uploads_folder, sorted(ours - kept)), *files
