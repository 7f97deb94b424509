"""Policies over rounds as pure functions: what they decide, and what a task may not have."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from fedpress_compression.compressors.error_feedback import ErrorFeedback
from fedpress_compression.compressors.none import Uncompressed
from fedpress_compression.compressors.powersgd import PowerSGD
from fedpress_compression.compressors.topk import TopK
from fedpress_compression.tensors import ModelSpec, TensorSpec
from fedpress_protocols.errors import ConfigurationError
from fedpress_protocols.messages import TaskConfig
from fedpress_protocols.model import Model
from fedpress_protocols.plan import Profile, RoundPlan
from fedpress_protocols.policies import (
    AccuracyDriven,
    Auto,
    BandwidthAware,
    Comparison,
    Course,
    DivergenceGuard,
    Trend,
    Watch,
    bandwidth_aware,
    divergence_guard,
)
from fedpress_strategies.policies.accuracy_driven import next_trend
from fedpress_strategies.policies.bandwidth_aware import (
    Link,
    Transfer,
    choose,
    seconds,
    uplink_of,
)
from fedpress_strategies.policies.decisions import (
    every_choice,
    next_course,
    profiles_of,
    sketch_of,
    with_comparison,
)
from fedpress_strategies.policies.divergence_guard import next_watch
from fedpress_strategies.policies.facts import Facts, Tally
from fedpress_strategies.policies.sizes import check_order, expected_bytes
from tests.client.fake_server import make_plan

LADDER = tuple(
    Profile(name=f"p{index}", compressor=TopK(share))
    for index, share in enumerate((0.5, 0.1, 0.01))
)
MBIT = 1e6 / 8


def config(**changes: Any) -> TaskConfig:
    fields: dict[str, Any] = {
        "task": "t",
        "model": "a" * 64,
        "rounds": 100,
        "profiles": LADDER,
        "cohort": {"size": 10, "minimum": 5},
    }
    return TaskConfig.model_validate({**fields, **changes})


# BandwidthAware


def link(mbits: float, before: float = 2.0, num_bytes: int = 10**6, count: int = 3) -> Link:
    transfer = Transfer(num_bytes, num_bytes / (mbits * MBIT), before)
    return Link((transfer,) * count)


SIZES = (4_000_000, 400_000, 40_000)


@pytest.mark.parametrize(("mbits", "index"), [(50, 0), (2, 1), (0.3, 2), (0.001, 2)])
def test_each_client_has_the_gentlest_profile_that_arrives(mbits: float, index: int) -> None:
    assert choose(BandwidthAware(), link(mbits), SIZES, seconds_left=10) == index


@given(
    mbits=st.floats(0.01, 1000),
    before=st.floats(0, 20),
    left=st.floats(0.1, 100),
    margin=st.floats(0.1, 1),
)
def test_nobody_is_given_what_the_estimate_says_is_late_but_the_hardest(
    mbits: float, before: float, left: float, margin: float
) -> None:
    policy, known = BandwidthAware(margin=margin), link(mbits, before)
    index = choose(policy, known, SIZES, left)
    expected = [seconds(policy, known, size) or math.inf for size in SIZES]
    assert index == len(SIZES) - 1 or expected[index] <= margin * left
    assert all(each > margin * left for each in expected[:index])


def test_training_takes_its_part_of_the_time() -> None:
    policy = BandwidthAware()
    assert choose(policy, link(50, before=1), SIZES, seconds_left=10) == 0
    assert choose(policy, link(50, before=7), SIZES, seconds_left=10) == 1
    assert choose(policy, link(50, before=60), SIZES, seconds_left=10) == 2


def test_large_bodies_tell_of_a_link_before_its_owner_does() -> None:
    policy, small = BandwidthAware(), Transfer(1000, 0.0001, 1)
    assert uplink_of(policy, link(2)) == pytest.approx(2 * MBIT)
    measured = Link((*link(2).transfers, small), said=500 * MBIT)
    assert uplink_of(policy, measured) == pytest.approx(2 * MBIT)
    assert uplink_of(policy, Link((small,), said=3 * MBIT)) == 3 * MBIT
    assert uplink_of(policy, Link((small,))) == 1000 / 0.05, "what arrived at once proves no more"


def test_one_slow_day_among_five_does_not_count_and_an_old_one_is_forgotten() -> None:
    fast, slow = link(10).transfers[0], link(0.1).transfers[0]
    policy = BandwidthAware(window=5)
    assert uplink_of(policy, Link((fast, slow, fast, fast, fast))) == pytest.approx(10 * MBIT)
    assert uplink_of(policy, Link((fast,) * 5 + (slow,) * 9)) == pytest.approx(10 * MBIT)


def test_a_client_that_nobody_knows_has_the_middle_or_what_it_says() -> None:
    policy = BandwidthAware()
    assert choose(policy, Link(), SIZES, 10) == 1
    assert choose(policy, Link(said=100 * MBIT), SIZES, 10) == 0
    assert choose(policy, Link(said=100 * MBIT), SIZES, 10, usual=7.4) == 1


def test_a_missed_deadline_is_a_reason_to_send_less() -> None:
    policy, known = BandwidthAware(), link(10, before=1)
    chosen = [choose(policy, Link(known.transfers, missed), SIZES, 10) for missed in range(4)]
    assert chosen == [0, 1, 1, 2]
    assert [choose(policy, Link(missed=missed), SIZES, 10) for missed in range(3)] == [1, 2, 2]


# AccuracyDriven


def losses(rungs: Sequence[int], pace: Sequence[float]) -> list[float]:
    """What models measure that a task makes which has these rungs: each falls by `pace` of its
    rung, a power of the rounds."""
    found = [2.3]
    for number, rung in enumerate(rungs, 1):
        found.append(found[-1] * (number / (number + 1)) ** pace[rung])
    return found


def driven(
    policy: AccuracyDriven,
    pace: Sequence[float],
    rounds: int = 200,
    *,
    noise: float = 0.0,
    blind: bool = False,
) -> list[int]:
    """The rungs of a task that loses this much speed on each."""
    rungs: list[int] = []
    trend, rng = Trend(), np.random.default_rng(0)
    shakes = np.exp(noise * rng.standard_normal(rounds + 1))
    for number in range(1, rounds + 1):
        known = [
            None if blind or model > number - 2 else float(loss * shakes[model])
            for model, loss in enumerate(losses(rungs, pace))
        ]
        trend, _ = next_trend(policy, trend, Facts(number, rounds, known), len(pace) - 1)
        rungs.append(trend.rung)
    return rungs


def test_a_rate_that_costs_nothing_is_used() -> None:
    rungs = driven(AccuracyDriven(), [0.8, 0.8, 0.8])
    assert rungs[:20] == [0] * 20, "the track is drawn first"
    assert rungs[-1] == 2
    assert rungs == sorted(rungs)


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_a_rate_that_stalls_training_is_given_up_and_seldom_tried_again(noise: float) -> None:
    rungs = driven(AccuracyDriven(), [0.8, 0.75, 0.05], noise=noise)
    assert rungs[-1] < 2
    assert 0 < rungs.count(2) < 70
    tries = [i for i in range(1, 200) if rungs[i] == 2 != rungs[i - 1]]
    assert len(tries) <= 5


def test_the_end_is_not_the_time_to_try() -> None:
    rungs = driven(AccuracyDriven(settle=0.5), [0.8, 0.8, 0.8])
    assert len(set(rungs[101:])) == 1


def test_without_a_measure_the_rate_stays_and_the_round_says_so() -> None:
    assert driven(AccuracyDriven(), [0.8, 0.8], blind=True) == [0] * 200
    trend, why = next_trend(AccuracyDriven(), Trend(), Facts(30, 200, [None] * 30), 1)
    assert trend == Trend()
    assert why == "no loss has been measured since the last change"
    assert next_trend(AccuracyDriven(), Trend(), Facts(3, 200, [None] * 3), 1)[1] == ""


def test_a_lowered_ceiling_takes_the_loop_with_it() -> None:
    trend, why = next_trend(AccuracyDriven(), Trend(rung=2), Facts(9, 100, [1.0] * 9), 1)
    assert (trend.rung, trend.since, why) == (1, 8, "lowered")


# DivergenceGuard


def probe(progress: float, energy: float = 1.0) -> Comparison:
    return Comparison(
        progress=progress,
        error=0.05,
        cosine=progress,
        nmse=(1 - progress) ** 2,
        energy=energy,
        inner=progress,
        norm=1.0,
        clients=10,
    )


def guarded(
    guard: DivergenceGuard, found: Sequence[Comparison | None], measured: Sequence[float] = ()
) -> list[Course]:
    """Courses of a task of three profiles; `found[i]` is what probes of ceiling i come to."""
    courses: list[Course] = []
    before = None
    for number in range(1, 121):
        facts = Facts(number, 120, list(measured[:number]))
        course = next_course((guard,), 3, before, facts)
        courses.append(course)
        before = with_comparison(course, found[course.hardest] if course.probe else None)
    return courses


def test_a_sound_rate_is_probed_at_first_and_now_and_then() -> None:
    courses = guarded(DivergenceGuard(), [probe(0.9)] * 3)
    assert [each.round for each in courses if each.probe] == [1, 2, 3, 26, 51, 76, 101]
    assert {each.hardest for each in courses} == {2}
    assert not any(each.warnings for each in courses)


def test_a_rate_that_goes_nowhere_is_told_of_and_then_lowered() -> None:
    courses = guarded(DivergenceGuard(), [probe(0.9), probe(0.9), probe(0.05)])
    warned = [each.round for each in courses if each.warnings]
    assert warned == [2, 3]
    assert "0.05 of the way, less than 0.2" in courses[1].warnings[0]
    assert [courses[index].hardest for index in (0, 1, 2, 60, -1)] == [2, 2, 1, 1, 1]


def test_a_rate_is_lowered_as_far_as_it_takes() -> None:
    courses = guarded(DivergenceGuard(), [probe(0.01)] * 3)
    assert courses[-1].hardest == 0
    gentlest = [each for each in courses if each.hardest == 0]
    assert any(each.warnings for each in gentlest[10:]), "it goes on to warn"
    assert sum(each.probe for each in gentlest) < 12, "and does not probe all the time"


def test_a_late_probe_is_confirmed_before_the_rate_is_lowered() -> None:
    """Drift shows late: three good probes, and from round 51 on bad ones."""
    guard, before = DivergenceGuard(), None
    probes = []
    for number in range(1, 80):
        course = next_course((guard,), 3, before, Facts(number, 100))
        if course.probe:
            probes.append((number, course.hardest))
        bad = number >= 51 and course.hardest == 2
        before = with_comparison(course, probe(-0.5 if bad else 0.9) if course.probe else None)
    assert probes == [(1, 2), (2, 2), (3, 2), (26, 2), (51, 2), (52, 2), (63, 1), (76, 1)]


def test_noise_of_unbiased_methods_is_a_finding_too() -> None:
    courses = guarded(DivergenceGuard(), [probe(1), probe(1), probe(1.0, energy=40)])
    assert "40.0 times the energy" in courses[1].warnings[0]
    assert courses[-1].hardest == 1


def test_one_bad_probe_among_good_ones_warns_and_no_more() -> None:
    watch, found = next_watch(DivergenceGuard(), Watch(ceiling=2), Facts(40, 100), probe(0.1), True)
    assert (len(found), watch.strikes, watch.ceiling, watch.probe_at) == (1, 1, 2, 40)
    after, found = next_watch(DivergenceGuard(), watch, Facts(41, 100), probe(0.9), True)
    assert (found, after.strikes, after.probe_at) == ((), 0, 51)


def test_a_loss_that_rises_lowers_the_rate_without_a_probe() -> None:
    measured = [2.3 * 0.97**number for number in range(60)] + [3.0] * 61
    courses = guarded(DivergenceGuard(sketch=0), [None] * 3, measured)
    assert not any(each.probe for each in courses)
    first = next(each for each in courses if each.warnings)
    assert 60 < first.round < 68
    assert "the loss of the last 5 models is" in first.warnings[0]
    assert courses[first.round].hardest == 1, "the second finding in a row"
    assert {each.hardest for each in courses[first.round : first.round + 10]} == {1}, "time to heal"


def classes(rounds: int, after: int, accuracy: float) -> dict[int, dict[str, Tally]]:
    """Class b is right 90 % of the time, and from model `after` on this share of it."""

    def counted(model: int) -> dict[str, Tally]:
        right = 0.9 if model < after else accuracy
        return {"a": Tally(100, 90), "b": Tally(100, round(100 * right))}

    return {model: counted(model) for model in range(rounds)}


@pytest.mark.parametrize(("accuracy", "found"), [(0.5, True), (0.8, False)])
def test_a_class_that_models_lose_is_a_blind_spot(accuracy: float, found: bool) -> None:
    facts = Facts(41, 100, [1.0] * 41, classes(40, 30, accuracy))
    _, warnings = next_watch(DivergenceGuard(sketch=0), Watch(ceiling=2), facts, None, False)
    expected = ("class b is right 50 % of the time, after 90 %",)
    assert warnings == (expected if found else ())


def test_a_class_of_few_examples_is_given_the_benefit_of_the_doubt() -> None:
    old, new = {"rare": Tally(2, 2)}, {"rare": Tally(2, 1)}
    facts = Facts(11, 100, [], {model: old if model < 5 else new for model in range(10)})
    assert next_watch(DivergenceGuard(), Watch(ceiling=2), facts, None, False)[1] == ()
    unseen = Facts(11, 100, [], {m: {"x" if m < 5 else "y": Tally(9, 9)} for m in range(10)})
    assert next_watch(DivergenceGuard(), Watch(ceiling=2), unseen, None, False)[1] == ()


def test_a_probe_that_tells_nothing_is_no_finding_and_is_forgotten() -> None:
    drowned = probe(0.1).model_copy(update={"progress": None, "inner": -0.02, "norm": 0.01})
    before = Watch(ceiling=2, inner=0.5, norm=1.0)
    watch, found = next_watch(DivergenceGuard(), before, Facts(40, 100), drowned, True)
    assert found == ()
    assert (watch.inner, watch.norm, watch.strikes) == (0.5, 1.0, 0)


@pytest.mark.parametrize("policy", [DivergenceGuard(), Auto(window=1)])
def test_the_plan_of_a_probe_asks_for_a_sketch_that_fits_the_model(
    policy: DivergenceGuard | Auto,
) -> None:
    courses, before = list[Course](), None
    for number in range(1, 40):
        before = next_course((policy,), 3, before, Facts(number, 100, size=10))
        courses.append(before)
    assert 1 < sum(each.probe for each in courses) < 20
    for course in courses:
        assert sketch_of((policy,), course, 10**6) == (2048 if course.probe else 0)
    probed = next(each for each in courses if each.probe)
    of_sizes = {12: 64, 1024: 64, 2048: 128, 4095: 128, 32_767: 1024, 32_768: 2048, 10**9: 2048}
    assert {size: sketch_of((policy,), probed, size) for size in of_sizes} == of_sizes
    larger = policy.model_copy(update={"sketch": 2**16})
    assert sketch_of((larger,), probed, 10**9) == 2**16
    assert sketch_of((larger,), probed, 10**6) == 2**15
    assert sketch_of((larger,), None, 10**9) == 0
    assert sketch_of((AccuracyDriven(),), probed, 10**9) == 0


def test_policies_without_a_sketch_do_not_probe() -> None:
    for policy in (DivergenceGuard(sketch=0), Auto(sketch=0, window=1)):
        before = None
        for number in range(1, 40):
            before = next_course((policy,), 3, before, Facts(number, 100, size=10))
            assert not before.probe


# Together


def test_policies_compose() -> None:
    """The loop says how hard at least, the guard how hard at most, links decide between."""
    aware, loop, guard = BandwidthAware(), AccuracyDriven(), DivergenceGuard(sketch=0)
    watch = Watch(ceiling=1)
    before = Course(round=39, gentlest=0, hardest=2, trend=Trend(rung=2, since=30), watch=watch)
    facts = Facts(40, 100)

    def ends(*policies: Any) -> tuple[int, int]:
        made = next_course(policies, 3, before, facts)
        return made.gentlest, made.hardest

    assert ends(aware) == (0, 2)
    assert ends(loop) == (2, 2)
    assert ends(guard) == (1, 1)
    assert ends(aware, loop) == (2, 2)
    assert ends(aware, guard) == (0, 1)
    assert ends(loop, guard) == (1, 1)
    assert ends(aware, loop, guard) == (1, 1)
    assert next_course((loop,), 3, None, facts).gentlest == 0, "a loop begins at the gentlest"


def test_a_round_s_plan_has_the_profiles_of_its_course() -> None:
    policies = (BandwidthAware(), DivergenceGuard())
    course = next_course(policies, 3, None, Facts(1, 100))
    assert course.probe
    assert profiles_of(LADDER, course) == LADDER, "each client's own, in a probe as in any round"
    assert divergence_guard(policies) == DivergenceGuard()
    assert bandwidth_aware(policies[1:]) is None
    later = course.model_copy(update={"probe": False, "hardest": 1})
    assert profiles_of(LADDER, later) == LADDER[:2]
    assert list(every_choice(policies, LADDER)) == [LADDER]
    for alone in (DivergenceGuard(), AccuracyDriven(), Auto()):
        assert list(every_choice((alone,), LADDER)) == [(each,) for each in LADDER]


def test_a_course_survives_json() -> None:
    policies = (BandwidthAware(), AccuracyDriven(), DivergenceGuard())
    course = with_comparison(next_course(policies, 3, None, Facts(1, 9)), probe(0.5))
    assert Course.model_validate_json(course.model_dump_json()) == course
    made = config(policies=policies)
    assert TaskConfig.model_validate_json(made.model_dump_json()) == made


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"policies": [{"id": "accuracy_driven"}] * 2}, "a policy twice"),
        ({"policies": [{"id": "bandwidth_aware"}], "profiles": LADDER[:1]}, "over one profile"),
        (
            {"policies": [{"id": "bandwidth_aware"}], "lane": "masked"},
            "bandwidth_aware in the masked lane",
        ),
        (
            {"policies": [{"id": "divergence_guard"}], "lane": "masked"},
            "no update is seen by itself",
        ),
        ({"policies": [{"id": "divergence_guard", "sketch": 1000}]}, "a power of two of cells"),
        ({"policies": [{"id": "divergence_guard", "share": 0.5}]}, "share"),
        (
            {
                "policies": [{"id": "divergence_guard"}],
                "cohort": {"size": 3, "minimum": 3},
            },
            "probes cohorts of 3, where 4 updates are the least",
        ),
        ({"policies": [{"id": "accuracy_driven", "keep": 0}]}, "greater than 0"),
        ({"policies": [{"id": "weather"}]}, "does not match any of the expected tags"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        config(**changes)


def test_a_masked_task_may_have_a_loop_and_a_guard_that_does_not_probe() -> None:
    policies = [{"id": "accuracy_driven"}, {"id": "divergence_guard", "sketch": 0}]
    assert len(config(policies=policies, lane="masked").policies) == 2


# The order of a ladder


def test_a_harder_profile_before_a_gentler_one_of_its_kind_is_refused() -> None:
    spec = Model.from_tensors({"w": np.zeros((20, 30), np.float32)}).spec
    check_order(LADDER, spec)
    with pytest.raises(ConfigurationError, match=r"'p2' comes before 'p1'.*put the gentlest first"):
        check_order((LADDER[0], LADDER[2], LADDER[1]), spec)
    fed_back = [
        Profile(name=f"k{share}", compressor=ErrorFeedback(TopK(share))) for share in (0.01, 0.5)
    ]
    with pytest.raises(ConfigurationError, match=r"'k0\.01' comes before 'k0\.5'"):
        check_order(fed_back, spec)


def test_the_order_of_two_methods_is_left_to_whoever_chose_it() -> None:
    """Nobody knows which of them is the gentler, and sizes of a sample do not tell."""
    spec = Model.from_tensors({"w": np.zeros((20, 30), np.float32)}).spec
    whole = Profile(name="whole", compressor=Uncompressed())
    check_order((LADDER[2], whole), spec)
    check_order((whole, whole), spec)
    more = Profile(name="more", compressor=TopK(0.4, magnitude_bits=0))
    finer = Profile(name="finer", compressor=TopK(0.35, magnitude_bits=4))
    assert expected_bytes(finer.compressor, spec) > 1.3 * expected_bytes(more.compressor, spec)
    check_order((more, finer), spec)


# The learning rate


def test_a_profile_corrects_the_learning_rate_of_its_clients() -> None:
    model_plan = plan_of(0.2)
    assert model_plan.training_of("p0") is model_plan.training
    assert model_plan.training_of("p1").learning_rate == pytest.approx(0.18)
    assert RoundPlan.from_json(model_plan.to_json()) == model_plan


def plan_of(learning_rate: float | None, **client_terms: Any) -> RoundPlan:
    model = Model.from_tensors({"w": np.zeros((20, 30), np.float32)})
    plan = make_plan(model, TopK(), Uncompressed())
    fields = plan.model_dump(mode="json")
    fields["profiles"][1]["learning_rate_factor"] = 0.9
    fields["training"]["learning_rate"] = learning_rate
    fields["client_terms"] |= client_terms
    return RoundPlan.model_validate_json(json.dumps(fields))


def test_a_correction_of_nothing_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"set training\.learning_rate"):
        plan_of(None)
    with pytest.raises(ValidationError, match="control variates count on the plan's"):
        plan_of(0.2, control={"scale": 1.0})


def test_a_profile_without_a_correction_reads_as_it_always_did() -> None:
    assert "learning_rate_factor" not in LADDER[0].model_dump_json()


# Sizes


class Refusing(Uncompressed):
    """A method that does not fit the model."""

    def compress(self, *args: Any) -> Any:
        raise ValueError("no such rank")


@pytest.mark.parametrize("size", [1 << 12, 1 << 21])
def test_bodies_are_guessed_of_the_right_order(size: int) -> None:
    spec = ModelSpec((TensorSpec("w", (size // 64, 64)), TensorSpec("b", ())))
    dense = expected_bytes(Uncompressed(), spec)
    assert dense == pytest.approx(4 * spec.size, rel=0.01)
    pressed = expected_bytes(TopK(0.01), spec)
    assert 0.05 < 8 * pressed / spec.size < 0.5
    assert expected_bytes(PowerSGD(trips=2), spec) == 4 * spec.size
    assert expected_bytes(Refusing(), spec) == 4 * spec.size
