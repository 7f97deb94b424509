"""The round machine in the masked lane: who takes part in the session, and what becomes of it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fedpress_protocols.messages import SessionStatus
from fedpress_server.aggregation.masked import left_out
from fedpress_server.rounds import (
    Aborted,
    Aggregated,
    AggregationFailed,
    BeginSession,
    Cancelled,
    ClientCheckedIn,
    ClientReady,
    DeadlinePassed,
    Declined,
    EndTask,
    Event,
    Extend,
    Keep,
    MaskedRound,
    MoveSession,
    OpenRound,
    Queue,
    Said,
    SessionEnded,
    SessionFailed,
    Settle,
    Stage,
    StartAggregation,
    SynchronousRound,
    UnmaskFailed,
    UploadStaged,
    from_record,
    to_record,
)
from tests.server import rounds
from tests.server.rounds import after

pytestmark = pytest.mark.both_databases(short=True)


def opened(**changes: Any) -> MaskedRound:
    terms = {"size": 3, "minimum": 2, "places": 5, "seconds": 100.0, "deadline": 100.0}
    return rounds.opened(MaskedRound, **(terms | changes))


def queued(count: int, assigned: int = 4, **changes: Any) -> MaskedRound:
    """`assigned` clients with a part, the first `count` of them ready."""
    parts = [ClientCheckedIn(f"c{i}", f"a{i}") for i in range(assigned)]
    return after(opened(**changes), *parts, *(ClientReady(f"a{i}") for i in range(count)))


def reasons(effects: tuple[Any, ...]) -> dict[str, str]:
    return {each.assignment: each.reason for each in effects if isinstance(each, Settle)}


def test_a_session_begins_with_the_ready_queue_alone() -> None:
    round_, effects = queued(2).on(ClientReady("a2"), 5.0)
    assert effects == (Queue("a2"), Settle("a3", "round-full", None), BeginSession())
    assert (round_.phase, round_.queue) == ("masking", ("a0", "a1", "a2"))
    assert round_.on(ClientReady("a3"), 5.0) == (round_, ())


def test_being_ready_twice_is_being_ready_once() -> None:
    round_ = queued(1)
    assert round_.on(ClientReady("a0"), 1.0) == (round_, ())
    assert round_.on(ClientReady("nobody"), 1.0) == (round_, ())
    assert round_.on(ClientReady("a1"), 100.0) == (round_, ())
    clear = after(rounds.opened(SynchronousRound), ClientCheckedIn("c0", "a0"))
    assert clear.on(ClientReady("a0"), 1.0) == (clear, ())


def test_the_deadline_begins_with_the_minimum_and_abandons_with_fewer() -> None:
    round_, effects = queued(2).on(DeadlinePassed(), 100.0)
    assert round_.phase == "masking"
    assert effects[-1] == BeginSession()
    assert reasons(effects) == {"a2": "missed-deadline", "a3": "missed-deadline"}
    round_, effects = queued(1).on(DeadlinePassed(), 100.0)
    assert (round_.phase, round_.reason) == (
        "abandoned",
        "1 ready at the deadline, fewer than 2",
    )
    assert reasons(effects)["a0"] == "round-abandoned"
    assert reasons(effects)["a1"] == "missed-deadline"
    few, effects = queued(1, assigned=1).on(DeadlinePassed(), 100.0)
    assert effects == (Extend(200.0),)
    assert few.queue == ("a0",)


def test_a_ready_client_may_go_and_leaves_its_place() -> None:
    round_, effects = queued(1).on(Declined("a0"), 2.0)
    assert reasons(effects) == {"a0": "declined"}
    assert round_.queue == ()


def test_uploads_are_taken_in_the_session_alone() -> None:
    assert queued(2).on(UploadStaged("a0", "x"), 1.0)[1] == ()
    round_ = queued(3)
    assert round_.on(UploadStaged("a3", "x"), 1.0)[1] == ()
    round_, effects = round_.on(UploadStaged("a0", "x"), 500.0)
    assert effects == (Stage("a0", "x"),)
    assert round_.on(UploadStaged("a0", "y"), 500.0) == (round_, ())
    assert round_.on(Declined("a0"), 500.0) == (round_, ())
    round_ = after(round_, Declined("a1"))
    assert round_.on(UploadStaged("a1", "x"), 500.0) == (round_, ())


def test_only_those_in_the_session_are_heard() -> None:
    round_ = queued(3)
    assert round_.on(Said("a0", "shares", "d"), 1.0)[1] == (Keep("a0", "shares"),)
    assert round_.on(Said("a3", "shares", "d"), 1.0)[1] == ()
    assert queued(2).on(Said("a0", "shares", "d"), 1.0)[1] == ()


def test_what_is_staged_when_the_session_ends_is_summed() -> None:
    round_ = after(queued(3), UploadStaged("a2", "x"), UploadStaged("a0", "y"))
    assert round_.on(DeadlinePassed(), 200.0)[1] == (MoveSession(),)
    round_, effects = round_.on(SessionEnded(), 200.0)
    assert effects == (Settle("a1", "dropped-out", None), StartAggregation())
    assert (round_.phase, round_.staged) == ("folding", ("a0", "a2"))
    assert round_.on(UploadStaged("a1", "z"), 200.0) == (round_, ())
    _, effects = round_.on(Aggregated("m"), 201.0)
    assert reasons(effects) == {"a0": "included", "a2": "included"}


def test_shares_that_are_wrong_let_the_session_go_on() -> None:
    round_ = after(queued(3), *(UploadStaged(f"a{i}", "x") for i in range(3)), SessionEnded())
    assert round_.on(Said("a1", "reveal", "d"), 1.0)[1] == (Keep("a1", "reveal"),)
    round_, effects = round_.on(UnmaskFailed("a share is wrong"), 2.0)
    assert (round_.phase, effects) == ("masking", (MoveSession(),))
    again, effects = round_.on(SessionEnded(), 3.0)
    assert (again.phase, effects) == ("folding", (StartAggregation(),))
    assert again.staged == ("a0", "a1", "a2")


@pytest.mark.parametrize("event", [SessionFailed("no"), Aborted("no")])
def test_a_session_that_fails_gives_everything_back(event: Event) -> None:
    round_, effects = after(queued(3), UploadStaged("a0", "x")).on(event, 2.0)
    assert reasons(effects) == {f"a{i}": "round-abandoned" for i in range(3)}
    assert effects[-1] == OpenRound(1, 2)
    assert (round_.phase, round_.reason) == ("abandoned", "no")


class AnyOrder(RuleBasedStateMachine):
    """Whatever comes, in whatever order: what is summed was staged before the session ended, by
    those who were in it, and is what the receipts call included."""

    @initialize(size=st.integers(1, 4), data=st.data())
    def begin(self, size: int, data: st.DataObject) -> None:
        minimum = data.draw(st.integers(1, size))
        self.first = self.round = opened(size=size, minimum=minimum, places=size + 2)
        self.now = 0.0
        self.events: list[tuple[Event, float]] = []
        self.receipts: dict[str, Settle] = {}
        self.began: tuple[str, ...] = ()
        self.summed: tuple[str, ...] | None = None
        self.sequels = 0

    def happen(self, event: Event) -> None:
        self.round, effects = self.round.on(event, self.now)
        if effects:
            self.events.append((event, self.now))
        for effect in effects:
            match effect:
                case BeginSession():
                    assert not self.began
                    self.began = self.round.queue
                    assert self.round.rules.minimum <= len(self.began) <= self.round.rules.size
                case Stage(name) | Keep(name):
                    assert name in self.began
                case StartAggregation():
                    assert self.summed in (None, self.round.staged)
                    self.summed = self.round.staged
                case Settle(name):
                    assert name not in self.receipts
                    self.receipts[name] = effect
                case OpenRound() | EndTask():
                    self.sequels += 1

    @rule(number=st.integers(0, 5))
    def check_in(self, number: int) -> None:
        self.happen(ClientCheckedIn(f"c{number}", f"a{len(self.round.parts)}"))

    @rule(numbers=st.permutations(range(6)), count=st.integers(1, 6))
    def ready(self, numbers: list[int], count: int) -> None:
        for number in numbers[:count]:
            self.happen(ClientReady(f"a{number}"))

    @rule(number=st.integers(0, 5), event=st.sampled_from(["said", "staged", "declined"]))
    def answer(self, number: int, event: str) -> None:
        name = f"a{number}"
        events: dict[str, Event] = {
            "said": Said(name, "shares", "d"),
            "staged": UploadStaged(name, "x"),
            "declined": Declined(name),
        }
        self.happen(events[event])

    @rule(seconds=st.sampled_from([1.0, 10.0, 100.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.happen(DeadlinePassed())

    @precondition(lambda self: self.round.phase in ("masking", "folding"))
    @rule(
        event=st.sampled_from(
            [
                SessionEnded(),
                UnmaskFailed("no"),
                Aggregated("m"),
                AggregationFailed("no"),
                SessionFailed("no"),
            ]
        )
    )
    def end(self, event: Event) -> None:
        self.happen(event)

    @rule(event=st.sampled_from([Aborted("no"), Cancelled("no")]))
    def interfere(self, event: Event) -> None:
        if len(self.events) > 8:
            self.happen(event)

    @invariant()
    def receipts_tell_of_the_sum(self) -> None:
        included = tuple(n for n, s in self.receipts.items() if s.reason == "included")
        assert included == (self.summed if self.round.phase == "committed" else ())

    @invariant()
    def receipts_come_once_and_to_all(self) -> None:
        for name, part in self.round.parts.items():
            settled = self.receipts.get(name)
            assert part.reason == (settled.reason if settled else None)
        assert self.sequels == self.round.is_over
        if self.round.is_over:
            assert set(self.receipts) == set(self.round.parts)

    @invariant()
    def a_replay_gives_the_same_round(self) -> None:
        replayed = self.first
        for event, at in self.events:
            replayed, _ = replayed.on(from_record(to_record(event)), at)
        assert replayed == self.round


TestAnyOrder = AnyOrder.TestCase


def test_a_list_of_members_is_not_thinned_below_the_minimum() -> None:
    """Of four members one was named: three are enough for a minimum of three, not of four."""
    named = SessionStatus(began=4, answered={}, message_bytes=0, suspects=("a",))
    members = frozenset("abcd")
    assert left_out([named], 1, members, 3) == {"a"}
    assert left_out([named], 1, members, 4) == set()
    assert left_out([named], 1, frozenset(), 4) == {"a"}, "whoever comes may take part"
