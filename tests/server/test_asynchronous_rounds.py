"""The round machine in an asynchronous task: what is carried over, stale, counted."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from fedpress_server.rounds import (
    Aborted,
    Aggregated,
    AggregationFailed,
    Assign,
    Begin,
    BufferedRound,
    Cancelled,
    Carried,
    CarriedOver,
    ClientCheckedIn,
    DeadlinePassed,
    Declined,
    Effect,
    EndTask,
    Event,
    OpenRound,
    Settle,
    Stage,
    StartAggregation,
    UploadStaged,
    from_record,
    to_record,
)
from tests.server import rounds
from tests.server.rounds import after

INF = float("inf")


def opened(**changes: Any) -> BufferedRound:
    """Buffers of two, three clients at a time, ten seconds each."""
    terms = {"last_round": 9, "deadline": INF, "max_staleness": 2} | changes
    return rounds.opened(BufferedRound, **(terms | {"minimum": terms.get("size", 2)}))


def follow(
    round_: BufferedRound, effects: Iterable[Effect], now: float = 1.0
) -> tuple[BufferedRound, list[Effect]]:
    """The attempt that an end opens, begun as the server begins it."""
    opening = next(effect for effect in effects if isinstance(effect, OpenRound))
    assert opening.opening is not None
    fresh = opened(
        number=opening.number,
        attempt=opening.attempt,
        last_round=round_.rules.last_round,
        size=round_.rules.size,
        places=round_.rules.places,
        max_staleness=round_.max_staleness,
    )
    begun, made = fresh.on(opening.opening, now)
    return begun, list(made)


def aggregated(round_: BufferedRound, now: float = 1.0) -> tuple[BufferedRound, list[Effect]]:
    ended, effects = round_.on(Aggregated("m"), now)
    return follow(ended, effects, now)


def three() -> BufferedRound:
    return after(opened(), *(ClientCheckedIn(f"c{i}", f"a{i}") for i in range(3)))


def test_a_full_buffer_is_aggregated_and_what_is_open_stays_open() -> None:
    round_, effects = after(three(), UploadStaged("a0", "x")).on(UploadStaged("a1", "y"), 2.0)
    assert effects == (Stage("a1", "y"), StartAggregation())
    ended, effects = round_.on(Aggregated("m"), 3.0)
    carried = Carried("a2", "c2", round=1, attempt=1, index=2, turn=0, due=11.0)
    assert effects == (
        Settle("a0", "included", "x"),
        Settle("a1", "included", "y"),
        OpenRound(2, 1, CarriedOver(3, (carried,))),
    )
    begun, made = follow(ended, effects)
    assert made == [Begin()]
    assert begun.staleness(begun.parts["a2"]) == 1
    staged, effects = begun.on(UploadStaged("a2", "z"), 4.0)
    assert effects == (Stage("a2", "z"),)
    assert staged.staged == ("a2",)


def test_a_client_whose_upload_is_in_is_assigned_again_at_once() -> None:
    round_ = after(three(), UploadStaged("a0", "x"))
    again, effects = round_.on(ClientCheckedIn("c0", "a3"), 2.0)
    assert effects == (Assign("a3", "c0", 3, turn=1),)
    assert again.on(ClientCheckedIn("c0", "a4"), 2.0) == (again, ())
    assert again.part_of("c0") == ("a3", again.parts["a3"])


def test_no_more_are_open_at_a_time_than_the_task_says() -> None:
    full = three()
    assert full.on(ClientCheckedIn("c3", "a3"), 1.0) == (full, ())
    assert after(full, UploadStaged("a0", "x"), ClientCheckedIn("c3", "a3")).places_left == 0


def test_an_upload_that_comes_while_a_buffer_is_aggregated_is_for_the_next() -> None:
    aggregating = after(three(), UploadStaged("a0", "x"), UploadStaged("a1", "y"))
    late, effects = aggregating.on(UploadStaged("a2", "z"), 2.0)
    assert effects == (Stage("a2", "z"),)
    assert late.staged == ("a0", "a1")
    assert late.on(Declined("a2"), 2.0) == (late, ())
    begun, made = aggregated(late)
    assert (begun.phase, begun.staged, made) == ("collecting", ("a2",), [Begin()])


def test_no_work_is_given_while_a_buffer_is_aggregated() -> None:
    aggregating = after(three(), UploadStaged("a0", "x"), UploadStaged("a1", "y"))
    assert aggregating.on(ClientCheckedIn("c0", "a3"), 2.0) == (aggregating, ())


def test_a_buffer_that_filled_meanwhile_is_aggregated_at_once_and_no_more_than_that() -> None:
    wide = after(opened(places=5), *(ClientCheckedIn(f"c{i}", f"a{i}") for i in range(5)))
    aggregating = after(wide, *(UploadStaged(f"a{i}", f"x{i}") for i in range(5)))
    begun, made = aggregated(aggregating)
    assert made == [Begin(), StartAggregation()]
    assert (begun.phase, begun.staged) == ("folding", ("a2", "a3"))
    begun, made = aggregated(begun)
    assert (begun.phase, begun.staged, made) == ("collecting", ("a4",), [Begin()])


def test_beyond_the_bound_an_assignment_is_stale() -> None:
    round_ = after(opened(size=1), ClientCheckedIn("slow", "s"))
    for number in range(1, 4):
        assert round_.staleness(round_.parts["s"]) == number - 1
        busy = (ClientCheckedIn("fast", f"a{number}"), UploadStaged(f"a{number}", "x"))
        round_, made = aggregated(after(round_, *busy))
    assert made == [Begin(), Settle("s", "stale", None)]
    assert round_.on(UploadStaged("s", "late"), 1.0) == (round_, ())


def test_a_staleness_of_none_settles_whatever_was_open() -> None:
    round_ = after(opened(size=1, max_staleness=0), ClientCheckedIn("slow", "s"))
    _, made = aggregated(after(round_, ClientCheckedIn("fast", "a"), UploadStaged("a", "x")))
    assert made == [Begin(), Settle("s", "stale", None)]


def test_each_assignment_has_its_own_time() -> None:
    round_ = after(opened(), ClientCheckedIn("c0", "a0"), now=1.0)
    round_ = after(round_, ClientCheckedIn("c1", "a1"), now=5.0)
    assert round_.next_deadline == 11.0
    assert round_.on(DeadlinePassed(), 10.9) == (round_, ())
    assert round_.on(UploadStaged("a0", "x"), 11.0) == (round_, ())
    round_, effects = round_.on(DeadlinePassed(), 11.0)
    assert effects == (Settle("a0", "missed-deadline", None),)
    assert (round_.phase, round_.next_deadline) == ("collecting", 15.0)
    assert after(round_, UploadStaged("a1", "y"), now=14.0).next_deadline == INF


def test_time_goes_on_across_models() -> None:
    round_ = after(opened(size=1), ClientCheckedIn("slow", "s"), now=1.0)
    round_ = after(round_, ClientCheckedIn("fast", "a"), UploadStaged("a", "x"), now=9.0)
    begun, _ = aggregated(round_, now=9.5)
    assert begun.next_deadline == 11.0
    assert begun.on(DeadlinePassed(), 11.0)[1] == (Settle("s", "missed-deadline", None),)


@pytest.mark.parametrize("event", [AggregationFailed("NaN"), Aborted("NaN")])
def test_a_failed_aggregation_gives_its_buffer_back_and_nothing_else(event: Event) -> None:
    aggregating = after(three(), UploadStaged("a0", "x"), UploadStaged("a1", "y"))
    ended, effects = aggregating.on(event, 2.0)
    assert effects[:2] == (
        Settle("a0", "round-abandoned", "x"),
        Settle("a1", "round-abandoned", "y"),
    )
    begun, made = follow(ended, effects)
    assert (begun.number, begun.attempt, made) == (1, 2, [Begin()])
    assert begun.parts["a2"].is_open
    assert begun.staleness(begun.parts["a2"]) == 0


def test_the_last_attempt_takes_the_task_with_it_and_everybody_s_work() -> None:
    aggregating = after(three(), UploadStaged("a0", "x"), UploadStaged("a1", "y"))
    begun, _ = follow(*aggregating.on(AggregationFailed("NaN"), 2.0))
    begun = after(begun, ClientCheckedIn("c0", "b0"), ClientCheckedIn("c1", "b1"))
    full = after(begun, UploadStaged("a2", "z"), UploadStaged("b0", "w"))
    _, effects = full.on(AggregationFailed("NaN"), 3.0)
    assert set(effects) == {
        Settle("a2", "round-abandoned", "z"),
        Settle("b0", "round-abandoned", "w"),
        Settle("b1", "round-abandoned", None),
        EndTask("cancelled"),
    }


def test_the_last_model_settles_everybody() -> None:
    aggregating = after(three(), UploadStaged("a0", "x"), UploadStaged("a1", "y"))
    last = after(
        replace(aggregating, rules=replace(aggregating.rules, last_round=1)),
        UploadStaged("a2", "z"),
    )
    _, effects = last.on(Aggregated("m"), 2.0)
    assert effects == (
        Settle("a0", "included", "x"),
        Settle("a1", "included", "y"),
        Settle("a2", "round-full", "z"),
        EndTask("finished"),
    )


def test_profiles_go_round_over_models() -> None:
    """With buffers of one, every model gives one assignment: still each profile has its turn."""
    indices = []
    round_ = opened(size=1)
    for number in range(4):
        round_, effects = round_.on(ClientCheckedIn("c", f"a{number}"), 1.0)
        indices += [effect.index for effect in effects if isinstance(effect, Assign)]
        round_, _ = aggregated(after(round_, UploadStaged(f"a{number}", "x")))
    assert indices == [0, 1, 2, 3]


class AnyOrder(RuleBasedStateMachine):
    """Whatever comes, over many models: every assignment has one receipt, no upload is twice in a
    sum, and none is in a sum that its receipt does not tell of."""

    @initialize(
        size=st.integers(1, 3),
        places=st.integers(1, 4),
        max_staleness=st.integers(0, 3),
    )
    def begin(self, size: int, places: int, max_staleness: int) -> None:
        self.round = self.first = opened(
            size=size, places=places, max_staleness=max_staleness, last_round=8
        )
        self.now = 0.0
        self.events: list[tuple[Event, float]] = []
        self.assigned: dict[str, tuple[str, int]] = {}
        """By assignment: the client, and how many models there were."""
        self.acknowledged: dict[str, str] = {}
        self.receipts: dict[str, Settle] = {}
        self.sums: Counter[str] = Counter()
        self.indices: set[int] = set()
        self.staleness: list[int] = []
        self.end: EndTask | None = None

    def happen(self, event: Event) -> None:
        before = self.round
        is_aggregated = isinstance(event, Aggregated) and before.phase == "folding"
        buffer = before.staged if is_aggregated else ()
        self.round, effects = before.on(event, self.now)
        if not effects:
            assert self.round is before
            return
        self.events.append((event, self.now))
        self.sums.update(buffer)
        self.staleness += [before.number - self.assigned[name][1] for name in buffer]
        self.note(effects)
        opening = next((each for each in effects if isinstance(each, OpenRound)), None)
        if opening is not None:
            self.check_replay()
            fresh = opened(
                number=opening.number,
                attempt=opening.attempt,
                size=before.rules.size,
                places=before.rules.places,
                max_staleness=before.max_staleness,
                last_round=before.rules.last_round,
            )
            self.round, self.first, self.events = fresh, fresh, []
            assert opening.opening is not None
            self.happen(opening.opening)

    def note(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case Assign(name, client, index):
                    assert name not in self.assigned
                    assert index not in self.indices
                    self.indices.add(index)
                    self.assigned[name] = (client, self.round.number)
                case Stage(name, upload):
                    assert name not in self.acknowledged
                    assert name not in self.receipts
                    self.acknowledged[name] = upload
                case Settle(name):
                    assert name not in self.receipts
                    self.receipts[name] = effect
                case EndTask():
                    self.end = effect
                case _:
                    pass

    @rule(number=st.integers(0, 4))
    def check_in(self, number: int) -> None:
        self.happen(ClientCheckedIn(f"c{number}", f"a{len(self.assigned)}"))

    @rule(which=st.integers(0, 3))
    def finish(self, which: int) -> None:
        """One of those who train is done."""
        waiting = [name for name, part in self.round.parts.items() if part.is_open]
        for name in waiting[which : which + 1]:
            self.happen(UploadStaged(name, f"x{name}"))

    @rule()
    def fill(self) -> None:
        """All who train are done at once."""
        for name, part in list(self.round.parts.items()):
            if part.is_open:
                self.happen(UploadStaged(name, f"x{name}"))

    @rule(number=st.integers(0, 30), is_upload=st.booleans())
    def repeat(self, number: int, is_upload: bool) -> None:
        """Whatever the assignment, and whether there is one."""
        name = f"a{number}"
        self.happen(UploadStaged(name, "other") if is_upload else Declined(name))

    @rule(seconds=st.sampled_from([1.0, 1.0, 9.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.happen(DeadlinePassed())

    @rule()
    def aggregate(self) -> None:
        self.happen(Aggregated("m"))

    @precondition(lambda self: self.round.phase == "folding")
    @rule(
        event=st.sampled_from(
            [Aggregated("m"), Aggregated("m"), AggregationFailed("no"), Aborted("no")]
        )
    )
    def end_aggregation(self, event: Event) -> None:
        self.happen(event)

    @precondition(lambda self: len(self.assigned) > 12)
    @rule(event=st.sampled_from([Aborted("no"), Cancelled("no")]))
    def interfere(self, event: Event) -> None:
        self.happen(event)

    @invariant()
    def nothing_is_counted_twice_or_without_a_receipt(self) -> None:
        assert all(count == 1 for count in self.sums.values())
        included = {name for name, s in self.receipts.items() if s.reason == "included"}
        assert included == set(self.sums)
        assert all(self.receipts[name].upload == self.acknowledged[name] for name in included)
        assert all(stale <= (self.round.max_staleness or 0) for stale in self.staleness)

    @invariant()
    def receipts_come_once_and_to_all(self) -> None:
        held = {name for name, part in self.round.parts.items() if part.reason is None}
        if self.end is None:
            assert held | set(self.receipts) == set(self.assigned)
            assert not held & set(self.receipts)
        else:
            assert set(self.receipts) == set(self.assigned)

    @invariant()
    def one_is_open_for_each_client_and_few_in_all(self) -> None:
        open_ = [part.client_id for part in self.round.parts.values() if part.is_open]
        assert len(set(open_)) == len(open_) <= self.round.rules.places
        assert len(self.round.staged) <= self.round.rules.size

    @invariant()
    def check_replay(self) -> None:
        replayed = self.first
        for event, at in self.events:
            kept = json.loads(json.dumps(to_record(event)))
            replayed, _ = replayed.on(from_record(kept), at)
        assert replayed == self.round


TestAnyOrder = AnyOrder.TestCase


def test_whoever_declines_gets_nothing_more_of_a_buffer() -> None:
    """Else one device could go round and round, and the buffer grow by each turn."""
    declined = after(opened(), ClientCheckedIn("a", "1"), Declined("1"))
    assert not declined.admits("a")
    assert declined.on(ClientCheckedIn("a", "2"), 1.0) == (declined, ())
    assert declined.admits("b")
