"""The round machine: every outcome by example, and what holds after any events in any order."""

from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fedpress_server.rounds import (
    PROTOCOLS,
    Aborted,
    Aggregated,
    AggregationFailed,
    Assign,
    Cancelled,
    ClientCheckedIn,
    CohortChosen,
    DeadlinePassed,
    Declined,
    EndTask,
    Event,
    Extend,
    OpenRound,
    Round,
    Settle,
    Stage,
    StartAggregation,
    SynchronousRound,
    UploadStaged,
    diagram,
    from_record,
    to_record,
)
from tests.server import rounds
from tests.server.rounds import after


def opened(**changes: object) -> SynchronousRound:
    return rounds.opened(SynchronousRound, **changes)


def three_assigned(**changes: object) -> SynchronousRound:
    return after(opened(**changes), *(ClientCheckedIn(f"c{i}", f"a{i}") for i in range(3)))


def test_clients_are_assigned_in_the_order_they_come() -> None:
    round_, effects = opened().on(ClientCheckedIn("c0", "a0"), 1.0)
    assert effects == (Assign("a0", "c0", 0),)
    round_, effects = round_.on(ClientCheckedIn("c1", "a1"), 1.0)
    assert effects == (Assign("a1", "c1", 1),)
    assert round_.part_of("c1") == ("a1", round_.parts["a1"])


def test_a_client_is_assigned_once_in_an_attempt() -> None:
    round_ = after(opened(), ClientCheckedIn("c0", "a0"))
    assert round_.on(ClientCheckedIn("c0", "other"), 1.0) == (round_, ())
    declined = after(round_, Declined("a0"))
    assert declined.on(ClientCheckedIn("c0", "other"), 1.0) == (declined, ())


def test_no_more_than_the_over_selected_are_assigned() -> None:
    full = three_assigned()
    assert full.on(ClientCheckedIn("c3", "a3"), 1.0) == (full, ())


def test_a_declined_place_goes_to_another() -> None:
    round_, effects = three_assigned().on(Declined("a1"), 1.0)
    assert effects == (Settle("a1", "declined", None),)
    round_, effects = round_.on(ClientCheckedIn("c3", "a3"), 1.0)
    assert effects == (Assign("a3", "c3", 3),)


def test_an_upload_that_is_in_cannot_be_declined() -> None:
    round_ = after(three_assigned(), UploadStaged("a0", "x"))
    assert round_.on(Declined("a0"), 1.0) == (round_, ())


def test_the_round_closes_with_the_last_upload_it_wants() -> None:
    round_ = after(three_assigned(), UploadStaged("a2", "x"))
    assert round_.phase == "collecting"
    round_, effects = round_.on(UploadStaged("a0", "y"), 1.0)
    assert effects == (Stage("a0", "y"), Settle("a1", "round-full", None), StartAggregation())
    assert (round_.phase, round_.staged) == ("folding", ("a0", "a2"))


def test_an_upload_after_the_close_has_no_place() -> None:
    full = after(three_assigned(), UploadStaged("a0", "x"), UploadStaged("a1", "y"))
    assert full.on(UploadStaged("a2", "z"), 1.0) == (full, ())


def test_an_upload_at_the_deadline_is_late() -> None:
    round_ = three_assigned()
    assert round_.on(UploadStaged("a0", "x"), 10.0) == (round_, ())
    assert round_.on(UploadStaged("a0", "x"), 9.999)[1]


def test_a_second_upload_has_no_place() -> None:
    round_ = after(three_assigned(), UploadStaged("a0", "x"))
    assert round_.on(UploadStaged("a0", "x"), 1.0) == (round_, ())
    assert round_.on(UploadStaged("a0", "other"), 1.0) == (round_, ())
    assert round_.on(UploadStaged("nobody", "x"), 1.0) == (round_, ())


def test_databases_hold_the_names_that_events_have_had() -> None:
    for event, name in ((Aggregated("m"), "Folded"), (AggregationFailed("NaN"), "FoldFailed")):
        assert to_record(event)["event"] == name
        assert from_record(to_record(event)) == event


def test_the_deadline_aggregates_what_is_there() -> None:
    round_ = after(three_assigned(), UploadStaged("a1", "x"))
    assert round_.on(DeadlinePassed(), 9.9) == (round_, ())
    round_, effects = round_.on(DeadlinePassed(), 10.0)
    assert effects == (
        Settle("a0", "missed-deadline", None),
        Settle("a2", "missed-deadline", None),
        StartAggregation(),
    )
    assert round_.phase == "folding"


def test_too_few_at_the_deadline_abandon_the_attempt() -> None:
    round_ = after(three_assigned(minimum=2), UploadStaged("a1", "x"))
    round_, effects = round_.on(DeadlinePassed(), 10.0)
    assert effects == (
        Settle("a0", "missed-deadline", None),
        Settle("a1", "round-abandoned", "x"),
        Settle("a2", "missed-deadline", None),
        OpenRound(1, 2),
    )
    assert round_.phase == "abandoned"
    assert round_.reason == "1 uploads at the deadline, fewer than 2"


def test_the_last_attempt_takes_the_task_with_it() -> None:
    round_ = three_assigned(attempt=2)
    _, effects = round_.on(DeadlinePassed(), 10.0)
    assert effects[-1] == EndTask("cancelled")


def test_a_deadline_that_nobody_met_because_nobody_came_is_moved() -> None:
    round_, effects = opened().on(DeadlinePassed(), 12.0)
    assert effects == (Extend(22.0),)
    assert (round_.phase, round_.deadline, round_.attempt) == ("collecting", 22.0, 1)


def test_a_deadline_out_of_reach_is_moved_and_keeps_who_came() -> None:
    alone = after(opened(minimum=2), ClientCheckedIn("c0", "a0"), UploadStaged("a0", "x"))
    round_, effects = alone.on(DeadlinePassed(), 12.0)
    assert effects == (Extend(22.0),)
    assert (round_.attempt, round_.staged) == (1, ("a0",))
    joined = after(round_, ClientCheckedIn("c1", "a1"), now=13.0)
    assert joined.on(DeadlinePassed(), 22.0)[0].phase == "abandoned"


def test_an_outage_of_the_store_uses_up_no_attempt() -> None:
    few = three_assigned(attempt=2)
    away = DeadlinePassed(store_was_away=True)
    assert few.on(away, 9.9) == (few, ())
    round_, effects = few.on(away, 10.0)
    assert effects == (Extend(20.0),)
    assert (round_.phase, round_.attempt, len(round_.parts)) == ("collecting", 2, 3)
    assert after(round_, UploadStaged("a0", "x"), now=13.0).staged == ("a0",)
    assert after(few, UploadStaged("a1", "y")).on(away, 10.0)[0].phase == "folding"
    assert from_record(to_record(away)) == away
    assert to_record(DeadlinePassed()) == {"event": "DeadlinePassed"}, "as earlier releases read it"


def test_an_aggregation_commits_the_round_and_opens_the_next() -> None:
    aggregating = after(three_assigned(), UploadStaged("a0", "x"), UploadStaged("a2", "y"))
    round_, effects = aggregating.on(Aggregated("m"), 2.0)
    assert effects == (
        Settle("a0", "included", "x"),
        Settle("a2", "included", "y"),
        OpenRound(2, 1),
    )
    assert round_.phase == "committed"


def test_the_last_round_finishes_the_task() -> None:
    aggregating = after(three_assigned(number=3, size=1), UploadStaged("a0", "x"))
    _, effects = aggregating.on(Aggregated("m"), 2.0)
    assert effects[-1] == EndTask("finished")


@pytest.mark.parametrize("event", [AggregationFailed("NaN"), Aborted("NaN")])
def test_a_failed_aggregation_gives_every_upload_back(event: Event) -> None:
    aggregating = after(three_assigned(), UploadStaged("a0", "x"), UploadStaged("a2", "y"))
    round_, effects = aggregating.on(event, 2.0)
    assert effects == (
        Settle("a0", "round-abandoned", "x"),
        Settle("a2", "round-abandoned", "y"),
        OpenRound(1, 2),
    )
    assert (round_.phase, round_.reason) == ("abandoned", "NaN")


def test_cancelling_settles_everybody() -> None:
    round_ = after(three_assigned(), UploadStaged("a0", "x"))
    _, effects = round_.on(Cancelled("enough"), 2.0)
    assert effects == (
        Settle("a0", "cancelled", "x"),
        Settle("a1", "cancelled", None),
        Settle("a2", "cancelled", None),
        EndTask("cancelled"),
    )


def test_what_is_over_stays_over() -> None:
    round_ = after(three_assigned(), Cancelled("enough"))
    for event in (
        ClientCheckedIn("c9", "a9"),
        UploadStaged("a0", "x"),
        Aggregated("m"),
        Aborted(""),
    ):
        assert round_.on(event, 2.0) == (round_, ())


def test_the_page_on_rounds_shows_the_diagrams() -> None:
    page = Path(__file__).parents[2] / "docs" / "rounds.md"
    for protocol in PROTOCOLS:
        assert diagram(protocol.table()).strip() in page.read_text()


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_diagram_draws_every_row(protocol: type[Round]) -> None:
    drawn = diagram(protocol.table())
    assert drawn.startswith("stateDiagram-v2\n    [*] --> collecting\n")
    for row in protocol.table():
        assert f"{row.source} --> {row.target}: {row.event.__name__}" in drawn


names = st.sampled_from([f"a{i}" for i in range(8)])


class AnyOrder(RuleBasedStateMachine):
    """Whatever comes, in whatever order: receipts are single, and nobody is left without one."""

    @initialize(
        size=st.integers(1, 3),
        spare=st.integers(0, 2),
        attempt=st.integers(1, 2),
        chooses=st.booleans(),
        data=st.data(),
    )
    def begin(
        self,
        size: int,
        spare: int,
        attempt: int,
        chooses: bool,
        data: st.DataObject,
    ) -> None:
        terms = {"minimum": data.draw(st.integers(1, size)), "chooses": chooses}
        self.round = self.first = opened(size=size, places=size + spare, attempt=attempt, **terms)
        self.now = 0.0
        self.events: list[tuple[Event, float]] = []
        self.receipts: dict[str, Settle] = {}
        self.assigned: dict[str, str] = {}
        self.acknowledged: dict[str, str] = {}
        self.sequels: list[OpenRound | EndTask] = []
        self.aggregations = 0

    def happen(self, event: Event) -> None:
        before = self.round
        self.round, effects = before.on(event, self.now)
        if not effects:
            assert self.round is before
            return
        self.events.append((event, self.now))
        for effect in effects:
            match effect:
                case Assign(name, client, index):
                    assert client not in self.assigned.values()
                    assert index == len(self.assigned)
                    self.assigned[name] = client
                case Stage(name, upload):
                    assert name not in self.acknowledged
                    assert name not in self.receipts
                    self.acknowledged[name] = upload
                case Settle(name):
                    assert name not in self.receipts
                    self.receipts[name] = effect
                case StartAggregation():
                    self.aggregations += 1
                case OpenRound() | EndTask():
                    self.sequels.append(effect)
                case Extend():
                    assert len(self.assigned) < self.round.rules.minimum

    @rule(number=st.integers(0, 7))
    def check_in(self, number: int) -> None:
        self.happen(ClientCheckedIn(f"c{number}", f"a{len(self.round.parts)}"))

    @rule(numbers=st.lists(st.integers(0, 7), max_size=4))
    def choose(self, numbers: list[int]) -> None:
        come = len(self.round.parts)
        chosen = [ClientCheckedIn(f"c{each}", f"a{come + i}") for i, each in enumerate(numbers)]
        self.happen(CohortChosen(tuple(chosen)))
        assert self.round.places_left >= 0

    @rule(name=names, upload=st.sampled_from(["x", "y"]))
    def upload(self, name: str, upload: str) -> None:
        self.happen(UploadStaged(name, upload))

    @rule(name=names)
    def decline(self, name: str) -> None:
        self.happen(Declined(name))

    @rule(seconds=st.sampled_from([1.0, 9.0, 30.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.happen(DeadlinePassed())

    @precondition(lambda self: self.round.phase == "folding")
    @rule(event=st.sampled_from([Aggregated("m"), AggregationFailed("no")]))
    def aggregate(self, event: Event) -> None:
        self.happen(event)

    @rule(event=st.sampled_from([Aggregated("m"), Aborted("no"), Cancelled("no")]))
    def interfere(self, event: Event) -> None:
        self.happen(event)

    @invariant()
    def what_is_included_was_acknowledged(self) -> None:
        included = {n: s.upload for n, s in self.receipts.items() if s.reason == "included"}
        assert included.items() <= self.acknowledged.items()
        assert len(self.acknowledged) <= self.round.rules.size
        if self.round.phase == "committed":
            assert self.round.rules.minimum <= len(included)
            assert included == self.acknowledged

    @invariant()
    def receipts_come_once_and_to_all(self) -> None:
        assert set(self.receipts) <= set(self.assigned)
        for name, part in self.round.parts.items():
            settled = self.receipts.get(name)
            assert part.reason == (settled.reason if settled else None)
        if self.round.is_over:
            assert set(self.receipts) == set(self.assigned)

    @invariant()
    def one_thing_follows_an_end(self) -> None:
        assert len(self.sequels) == self.round.is_over
        assert self.aggregations <= 1

    @invariant()
    def a_replay_gives_the_same_round(self) -> None:
        replayed = self.first
        for event, at in self.events:
            replayed, _ = replayed.on(from_record(to_record(event)), at)
        assert replayed == self.round


TestAnyOrder = AnyOrder.TestCase
