"""Who is assigned: the policies by their frequencies, the wait by its clock, the rest by replay."""

import math
import time
from collections import Counter
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpress_compression.randomness import PublicStream
from fedpress_protocols.errors import FedpressError
from fedpress_protocols.messages import (
    Eligibility,
    EvaluationReport,
    SelectionTerms,
    TaskConfig,
)
from fedpress_protocols.model import Model
from fedpress_protocols.upload import Upload
from fedpress_server.rounds import (
    Assign,
    BeginSession,
    CallUp,
    ClientCheckedIn,
    ClientReady,
    CohortChosen,
    Declined,
    MaskedRound,
    Round,
    SynchronousRound,
    from_record,
    to_record,
)
from fedpress_server.rounds.selection import (
    Candidate,
    Candidates,
    choose,
    is_eligible,
    stream_of,
)
from fedpress_server.storage import participants
from tests.devices import Device, Operator
from tests.server import rounds
from tests.server.in_process import Clock, Enrolled, Server, Start, history, ones

pytestmark = pytest.mark.both_databases

POLICIES = ("uniform", "weighted", "seldom", "reliable", "loss")
CHI_SQUARE_19_DF_1_IN_1000 = 43.8


def stream(seed: int) -> PublicStream:
    return stream_of(seed, "digits", 1, 1, 1)


def frequencies(
    policy: str, table: list[Candidate], places: int, draws: int = 2000
) -> dict[str, float]:
    """By client, the share of the draws, each from a seed of its own, in which it is chosen."""
    terms = SelectionTerms.model_validate({"policy": policy})
    counts: Counter[str] = Counter()
    for seed in range(draws):
        counts.update(choose(terms, table, places, stream(seed)))
    return {each.client_id: counts[each.client_id] / draws for each in table}


# Policies

candidates = st.lists(
    st.builds(
        Candidate,
        client_id=st.text("abcdef", min_size=1, max_size=6),
        num_examples=st.none() | st.integers(1, 2**32 - 1),
        loss=st.none() | st.floats(0, 1e6),
        given=st.integers(0, 10**6),
        delivered=st.integers(0, 10),
    ),
    max_size=30,
    unique_by=lambda each: each.client_id,
)


@given(
    policy=st.sampled_from(POLICIES),
    table=candidates,
    places=st.integers(1, 12),
    seed=st.integers(0, 2**63 - 1),
    data=st.data(),
)
def test_places_go_to_different_candidates_and_no_more_than_there_are(
    policy: str, table: list[Candidate], places: int, seed: int, data: st.DataObject
) -> None:
    terms = SelectionTerms.model_validate({"policy": policy})
    chosen = choose(terms, table, places, stream(seed))
    assert len(chosen) == len(set(chosen)) == min(places, len(table))
    assert set(chosen) <= {each.client_id for each in table}
    shuffled = data.draw(st.permutations(table))
    assert choose(terms, shuffled, places, stream(seed)) == chosen


def test_uniform_gives_every_set_the_same_chance() -> None:
    table = [Candidate(name) for name in "abcdef"]
    sets = {frozenset(pick): 0 for pick in combinations("abcdef", 3)}
    terms, draws = SelectionTerms(policy="uniform"), 4000
    for seed in range(draws):
        sets[frozenset(choose(terms, table, 3, stream(seed)))] += 1
    expected = draws / len(sets)
    statistic = sum((count - expected) ** 2 / expected for count in sets.values())
    assert statistic < CHI_SQUARE_19_DF_1_IN_1000


def test_weighted_includes_in_proportion_to_examples() -> None:
    examples = {"a": 100, "b": 200, "c": 300, "d": 400, "e": 1000}
    table = [Candidate(name, num) for name, num in examples.items()]
    found = frequencies("weighted", table, 2)
    assert found == pytest.approx({n: 2 * num / 2000 for n, num in examples.items()}, abs=0.04)
    assert found["e"] == 1.0


def test_a_candidate_heavier_than_a_place_is_certain_and_the_rest_share_what_is_left() -> None:
    table = [Candidate("giant", 10**6), *(Candidate(name, 1) for name in "abcd")]
    found = frequencies("weighted", table, 3)
    assert found.pop("giant") == 1.0
    assert found == pytest.approx(dict.fromkeys("abcd", 0.5), abs=0.05)


def test_who_told_no_examples_counts_as_the_mean() -> None:
    table = [Candidate("a", 100), Candidate("b", 300), Candidate("new")]
    assert frequencies("weighted", table, 1)["new"] == pytest.approx(1 / 3, abs=0.04)


def test_seldom_evens_out_and_reliable_follows_the_record() -> None:
    often, rarely = Candidate("often", given=7, delivered=7), Candidate("rarely", given=1)
    assert frequencies("seldom", [often, rarely], 1)["rarely"] == pytest.approx(0.8, abs=0.03)
    # (1 + 7) / (2 + 7) against (1 + 0) / (2 + 1)
    assert frequencies("reliable", [often, rarely], 1)["often"] == pytest.approx(8 / 11, abs=0.03)


@given(losses=st.lists(st.floats(0, 100), min_size=6, max_size=6, unique=True))
def test_power_of_choice_takes_the_largest_of_all_it_may_see(losses: list[float]) -> None:
    table = [Candidate(f"c{i}", 10, loss) for i, loss in enumerate(losses)]
    terms = SelectionTerms(policy="loss", candidates=6)
    chosen = choose(terms, table, 2, stream(3))
    best = sorted(table, key=lambda each: each.loss or 0)[-2:]
    assert set(chosen) == {each.client_id for each in best}


def test_power_of_choice_looks_at_d_candidates_drawn_by_examples() -> None:
    table = [Candidate(f"c{i}", 1, float(i)) for i in range(10)]
    terms, draws = SelectionTerms(policy="loss", candidates=3), 2000
    top: Counter[str] = Counter()
    for seed in range(draws):
        top.update(choose(terms, table, 1, stream(seed)))
    # Of 10, the largest of 3 is c9 with the chance 3/10, c8 with 7/10 x 3/9, and never c0 or c1.
    assert top["c9"] / draws == pytest.approx(0.3, abs=0.04)
    assert top["c8"] / draws == pytest.approx(7 / 30, abs=0.04)
    assert top["c0"] == top["c1"] == 0


def test_who_told_no_loss_comes_first_and_ties_are_drawn() -> None:
    known = [Candidate(f"c{i}", loss=9.0) for i in range(4)]
    terms = SelectionTerms(policy="loss", candidates=5)
    chosen = [choose(terms, [*known, Candidate("new")], 2, stream(seed)) for seed in range(40)]
    assert all("new" in each for each in chosen)
    assert len(set(chosen)) == 4


def test_each_choice_of_a_task_draws_from_its_own_stream() -> None:
    table, terms = [Candidate(str(i)) for i in range(40)], SelectionTerms(policy="uniform")
    keys = [(7, "digits", 1, 1, 1), (8, "digits", 1, 1, 1), (7, "other", 1, 1, 1)]
    keys += [(7, "digits", 2, 1, 1), (7, "digits", 1, 2, 1), (7, "digits", 1, 1, 2)]
    assert len({choose(terms, table, 20, stream_of(*key)) for key in keys}) == len(keys)
    again = choose(terms, table, 20, stream_of(*keys[0]))
    assert again == choose(terms, table, 20, stream_of(*keys[0]))


# Eligibility


def test_rules_admit_numbers_within_and_values_among() -> None:
    rules = {
        "memory": Eligibility(minimum=2, maximum=8),
        "region": Eligibility(one_of=("eu", "uk", 7.0)),
    }
    assert is_eligible(rules, {"memory": 2.0, "region": "eu", "more": "x"})
    assert is_eligible(rules, {"memory": 8.0, "region": 7.0})
    others: tuple[dict[str, float | str], ...] = (
        {"memory": 1.9, "region": "eu"},
        {"memory": 8.1, "region": "eu"},
        {"memory": "4", "region": "eu"},
        {"memory": 4.0, "region": "us"},
        {"memory": 4.0},
        {"region": "eu"},
    )
    for attributes in others:
        assert not is_eligible(rules, attributes)
    assert is_eligible({}, {})
    assert is_eligible({"memory": Eligibility(maximum=3)}, {"memory": -math.pi})


@pytest.mark.parametrize(
    "rule", [{}, {"minimum": 1, "one_of": ["a"]}, {"minimum": 2, "maximum": 1}]
)
def test_a_rule_asks_for_one_thing_that_can_be(rule: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"one_of|larger"):
        Eligibility.model_validate(rule)


# The wait


def test_the_window_begins_with_the_first_who_waits() -> None:
    terms, wait = SelectionTerms(policy="uniform", window=10, candidates=3), Candidates(60)

    def is_due(now: float, places: int = 2, most: int | None = None) -> bool:
        return wait.is_due(terms, "round 1", places, most, now)

    assert not is_due(0)
    wait.add("a", "round 1", 100.0)
    wait.add("b", "round 1", 105.0)
    wait.add("a", "round 1", 109.0)
    assert not is_due(109.9)
    assert is_due(110.0)
    assert not is_due(110.0, places=0)
    assert is_due(109.0, most=2)
    wait.add("c", "round 1", 109.0)
    assert is_due(109.0)
    wait.chosen(["a"])
    assert not is_due(125.0)
    wait.add("b", "round 1", 130.0)
    assert wait.waiting(130.0) == ("c", "b")
    assert is_due(140.0)
    assert not wait.is_due(terms, "round 2", 1, None, 140.0)
    wait.add("c", "round 2", 150.0)
    assert not wait.is_due(terms, "round 2", 1, None, 159.0)


def test_who_does_not_come_back_waits_no_longer() -> None:
    wait = Candidates(60)
    wait.add("a", 1, 0.0)
    wait.add("b", 1, 10.0)
    wait.add("a", 1, 20.0)
    assert wait.waiting(69.9) == ("b", "a")
    assert wait.waiting(70.0) == ("a",)
    wait.remove("a")
    wait.remove("nobody")
    assert wait.waiting(70.0) == ()
    wait.add("late", 1, 500.0)
    terms = SelectionTerms(policy="uniform", window=10, candidates=3)
    assert not wait.is_due(terms, 1, 1, None, 509.0)
    assert wait.is_due(terms, 1, 1, None, 510.0)


# The event


def opened(**changes: Any) -> SynchronousRound:
    return rounds.opened(SynchronousRound, **({"places": 2, "chooses": True} | changes))


def event(*clients: str) -> CohortChosen:
    return CohortChosen(tuple(ClientCheckedIn(c, f"of-{c}") for c in clients))


def test_a_choice_assigns_all_of_it_and_is_read_again() -> None:
    chosen = event("c2", "c0")
    assert from_record(to_record(chosen)) == chosen
    round_, effects = opened().on(chosen, 1.0)
    assert effects == (Assign("of-c2", "c2", 0), Assign("of-c0", "c0", 1), CallUp())
    assert round_.places_left == 0


def test_nobody_else_is_assigned_where_a_policy_chooses() -> None:
    round_ = opened()
    assert round_.on(ClientCheckedIn("c0", "a0"), 1.0) == (round_, ())
    first_come = opened(chooses=False)
    assert first_come.on(event("c0"), 1.0) == (first_come, ())


def test_a_choice_that_does_not_fit_changes_nothing() -> None:
    round_ = opened(members=frozenset({"c0", "c1", "c2", "c3"}))
    begun, _ = round_.on(event("c0"), 1.0)
    declined, _ = begun.on(Declined("of-c0"), 2.0)
    for before, wrong in (
        (round_, event()),
        (round_, event("c0", "c0")),
        (round_, event("c0", "c1", "c2")),
        (round_, event("c0", "stranger")),
        (begun, event("c0", "c1")),
        (declined, event("c0")),
    ):
        assert before.on(wrong, 3.0) == (before, ())
    assert round_.on(event("c0"), 10.0) == (round_, ())
    assert declined.places_left == 2
    assert declined.on(event("c1", "c3"), 3.0)[1][-1] == CallUp()


def test_a_chosen_cohort_goes_on_to_a_masked_session() -> None:
    masked: Round = rounds.opened(MaskedRound, places=2, chooses=True)
    masked, _ = masked.on(event("c0", "c1"), 1.0)
    masked, _ = masked.on(ClientReady("of-c0"), 2.0)
    assert masked.on(ClientReady("of-c1"), 2.0)[1][-1] == BeginSession()


def test_as_many_members_may_come_as_have_no_assignment() -> None:
    round_ = opened(members=frozenset({"c0", "c1", "c2"}))
    assert opened().may_come is None
    assert round_.on(event("c1", "c2"), 1.0)[0].may_come == 1


# A task

UNIFORM = {"policy": "uniform", "candidates": 4, "window": 10.0}


@pytest.fixture
def fleet(enrolled: Enrolled) -> list[Device]:
    return [enrolled() for _ in range(4)]


def assigned(http: Server, devices: list[Device]) -> list[Device]:
    """Those who have an assignment once all have looked; the others wait once more.

    A server that shares its database chooses at a tick.
    """
    for device in devices:
        device.check_in("digits")
    http.tick()
    answers = [(device, device.check_in("digits")) for device in devices]
    return [device for device, news in answers if news is not None and news.assignment is not None]


def test_candidates_wait_until_there_are_enough(
    http: Server, operator: Operator, fleet: list[Device], model: Model
) -> None:
    operator.begin(model, selection=UNIFORM)
    assert assigned(http, fleet[:3]) == []
    chosen = assigned(http, fleet)
    assert len(chosen) == 2
    assert assigned(http, fleet) == chosen
    assert history(operator)[0].assigned == 2


def test_the_window_ends_the_wait_for_more(
    http: Server, operator: Operator, fleet: list[Device], model: Model, clock: Clock
) -> None:
    operator.begin(model, selection=UNIFORM)
    assert assigned(http, fleet[:1]) == []
    clock.advance(9)
    assert assigned(http, fleet[:1]) == []
    clock.advance(1)
    assert assigned(http, fleet[:1]) == fleet[:1]
    assert assigned(http, fleet[1:2]) == []
    clock.advance(10)
    assert assigned(http, fleet[1:2]) == fleet[1:2]


def test_those_left_over_are_candidates_for_a_place_given_back(
    http: Server, operator: Operator, fleet: list[Device], model: Model, clock: Clock
) -> None:
    operator.begin(model, selection=UNIFORM, cohort={"size": 1, "minimum": 1})
    (chosen,) = assigned(http, fleet)
    name = chosen.assignment("digits").assignment
    chosen.json("DELETE", f"/v1/assignments/{name}")
    others = [device for device in fleet if device is not chosen]
    assert assigned(http, fleet) == []
    clock.advance(10)
    (next_one,) = assigned(http, fleet)
    assert next_one in others


def test_a_choice_outlives_the_server(
    start: Start, clock: Clock, model: Model, tmp_path: Any
) -> None:
    with start() as http:
        operator = Operator(http)
        fleet = [Device(http, clock) for _ in range(4)]
        for device in fleet:
            device.enrol(operator.token())
        operator.begin(model, selection=UNIFORM)
        before = assigned(http, fleet)
        names = [device.assignment("digits").assignment for device in before]
    with start() as http:
        for device in fleet:
            device.http = http
        assert assigned(http, fleet) == before
        assert [device.assignment("digits").assignment for device in before] == names


def test_the_ineligible_get_no_assignment(
    operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    operator.begin(model, eligible={"memory": {"minimum": 4}})
    path = "/v1/tasks/digits/check-in"
    small, large, silent = enrolled(), enrolled(), enrolled()
    assert small.json("POST", path, '{"attributes": {"memory": 2}}').status_code == 204
    assert silent.json("POST", path, "{}").status_code == 204
    given = large.json("POST", path, '{"attributes": {"memory": 4, "region": "eu"}}')
    assert given.json()["assignment"]["client_id"] == large.client_id
    # Whoever has an assignment keeps it, whatever it says of itself later.
    kept = large.json("POST", path, '{"attributes": {"memory": 1}}').json()
    assert kept["assignment"] == given.json()["assignment"]
    with pytest.raises(FedpressError, match="attributes"):
        small.json("POST", path, '{"attributes": {"a name with blanks": 2}}')


def test_the_highest_loss_reported_is_chosen_where_the_policy_asks_for_it(
    http: Server,
    operator: Operator,
    fleet: list[Device],
    model: Model,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = {"policy": "loss", "candidates": 4}
    # As if each had been assigned an earlier round.
    monkeypatch.setattr("fedpress_server.storage.evaluation.is_assigned", lambda *_: True)
    operator.begin(model, selection=policy, cohort={"size": 1, "minimum": 1})
    for device, loss in zip(fleet, (0.5, 2.0, 1.0, 0.1), strict=True):
        for told in (9.0, loss):  # the last one counts
            metrics = {"loss": told, "accuracy": 0.5}
            report = EvaluationReport(model=model.digest, num_examples=10, metrics=metrics)
            device.json("POST", "/v1/tasks/digits/evaluations", report.model_dump_json())
    assert assigned(http, fleet) == [fleet[1]]


def test_a_loss_that_an_upload_reports_counts_as_one_that_was_measured(
    http: Server, operator: Operator, fleet: list[Device], model: Model
) -> None:
    operator.begin(
        model,
        strategy={"id": "qfedavg", "q": 1.0},
        selection={"policy": "loss", "candidates": 4},
        cohort={"size": 4, "minimum": 4},
        training={"learning_rate": 0.1},
    )
    assigned(http, fleet)
    for device, loss in zip(fleet, (0.5, 1.0, 3.0, 0.1), strict=True):
        assignment = device.assignment("digits")
        assert assignment.plan.report == ("loss",)
        upload = Upload(0, 5, (ones(model).astype("<f4"),), (loss,))
        layout = assignment.plan.layouts(model.spec)[0]
        device.upload(assignment.assignment, upload.to_bytes(layout))
    names = [*(device.client_id for device in fleet), "stranger"]
    database = http.app.services.database
    found = http.call(database.read, lambda c: participants.candidates(c, "digits", names))
    assert [each.client_id for each in found] == names
    assert [each.loss for each in found[:4]] == pytest.approx([0.5, 1.0, 3.0, 0.1])
    assert [each.num_examples for each in found] == [5, 5, 5, 5, None]
    assert [(each.given, each.delivered) for each in found] == [(1, 1)] * 4 + [(0, 0)]
    assert found[4].loss is None


def test_an_asynchronous_task_chooses_for_each_place_that_comes_free(
    http: Server, operator: Operator, fleet: list[Device], model: Model
) -> None:
    operator.begin(
        model,
        rounds=20,
        strategy={"id": "fedbuff"},
        cohort={"size": 2, "minimum": 2},
        asynchronous={"concurrency": 2},
        selection={"policy": "seldom", "candidates": 2},
    )
    for _ in range(12):
        while history(operator)[-1].state != "collecting":
            time.sleep(0.005)
        for device in assigned(http, fleet)[:1]:
            assignment = device.assignment("digits")
            device.upload(assignment.assignment, device.body_for(assignment, ones(model)))
    statuses = history(operator)
    assert sum(status.received for status in statuses) == 12
    assert len({status.round for status in statuses}) > 3


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"selection": {"policy": "uniform", "window": 600}}, "window of 600 s"),
        ({"selection": {"policy": "uniform", "candidates": 1}}, "for 2 places"),
        ({"eligible": {"memory": {}}}, "one_of"),
    ],
)
def test_terms_that_cannot_work_are_refused(changes: dict[str, Any], complaint: str) -> None:
    fields = {
        "task": "digits",
        "model": "0" * 64,
        "rounds": 1,
        "profiles": [{"name": "whole", "compressor": {"id": "none"}}],
        "cohort": {"size": 2, "minimum": 1},
    }
    with pytest.raises(ValueError, match=complaint):
        TaskConfig.model_validate(fields | changes)
    TaskConfig.model_validate(fields | {"selection": {"policy": "uniform"}})
