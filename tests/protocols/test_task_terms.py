"""The terms of a task: what cannot go together is refused with the reason."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from fedpress_protocols.errors import ConfigurationError, IncompatiblePlan
from fedpress_protocols.messages import (
    ClassCount,
    Eligibility,
    EvaluationReport,
    EvaluationTerms,
    TaskConfig,
    TaskSummary,
)
from fedpress_protocols.plan import PrivacyTerms, Profile, RoundPlan, parsed
from fedpress_protocols.policies import Policies, check_policies, prober
from tests.protocols.test_plan import SPEC, make_plan

PLAIN = {"name": "plain", "compressor": {"id": "none"}}
SPARSE = {"name": "sparse", "compressor": {"id": "topk", "fraction": 0.1}}
TWO_TRIPS = {"name": "two", "compressor": {"id": "powersgd", "trips": 2}}
OWN = {"name": "own", "compressor": {"id": "delta", "inner": {"id": "topk", "fraction": 0.1}}}
GUARD = {"id": "divergence_guard"}
MODEL = "a" * 64
READ: TypeAdapter[Policies] = TypeAdapter(Policies)
LADDER = [Profile.model_validate(each) for each in (PLAIN, SPARSE)]


def task(**changes: Any) -> TaskConfig:
    fields: dict[str, Any] = {
        "task": "digits",
        "model": MODEL,
        "rounds": 5,
        "profiles": [PLAIN, SPARSE],
        "cohort": {"size": 4, "minimum": 4},
        "round_seconds": 60.0,
    }
    return parsed(TaskConfig, json.dumps(fields | changes))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"lane": "masked"}, "cannot use the masked lane"),
        ({"profiles": [OWN]}, "decode only within their round"),
        ({"cohort": {"size": 4, "minimum": 3}}, "cohort.minimum of 3, but .* cohort.size = 4"),
        (
            {"cohort": {"size": 4, "minimum": 4, "over_selection": 1.5}},
            "over_selection of 1.5 in an asynchronous task",
        ),
    ],
)
def test_an_asynchronous_task_waits_for_nobody(changes: dict[str, Any], says: str) -> None:
    terms = {"asynchronous": {"concurrency": 8}}
    assert task(**terms).asynchronous is not None
    assert task(**{key: value for key, value in changes.items() if key != "lane"})
    with pytest.raises(IncompatiblePlan, match=says):
        task(**terms, **changes)


@pytest.mark.parametrize(
    ("terms", "says"),
    [
        ({"window": 60}, "selection.window of 60 s in rounds of 60 s; choose a shorter window"),
        ({"candidates": 3}, "selection.candidates of 3 for 4 places leaves nothing to choose"),
    ],
)
def test_a_selection_has_time_and_somebody_to_choose_from(terms: dict[str, Any], says: str) -> None:
    assert task(selection={"policy": "first", **terms})
    assert task(selection={"policy": "loss", "window": 59, "candidates": 4})
    with pytest.raises(IncompatiblePlan, match=says):
        task(selection={"policy": "loss", **terms})


def test_of_an_asynchronous_task_each_place_is_chosen_for_alone() -> None:
    terms = {"selection": {"policy": "loss", "candidates": 1}}
    assert task(**terms, asynchronous={"concurrency": 8})
    with pytest.raises(IncompatiblePlan, match="set at least 4"):
        task(**terms)


def test_two_phases_are_read_and_not_begun() -> None:
    config = task(profiles=[TWO_TRIPS])
    with pytest.raises(IncompatiblePlan, match="profile 'two'"):
        config.check_new()
    task().check_new()


@pytest.mark.parametrize(
    ("policies", "changes", "says"),
    [
        ([{"id": "bandwidth_aware"}] * 2, {}, "a policy twice: bandwidth_aware, bandwidth_aware"),
        ([GUARD], {"ladder": 1}, "over one profile, which leaves nothing to choose"),
        ([{"id": "bandwidth_aware"}], {"lane": "masked"}, "adds up one kind of numbers"),
        ([GUARD], {"lane": "masked"}, "where no update is seen by itself"),
        ([GUARD], {"size": 3}, "probes cohorts of 3, where 4 updates are the least"),
    ],
)
def test_policies_that_cannot_work_say_why(
    policies: list[Any], changes: dict[str, Any], says: str
) -> None:
    size, lane = changes.get("size", 4), changes.get("lane", "clear")
    with pytest.raises(ConfigurationError, match=says) as refused:
        check_policies(
            READ.validate_python(policies), LADDER[: changes.get("ladder")], lane=lane, size=size
        )
    if "size" in changes:
        assert refused.value.hint == "make cohort.size 4 or more, or set sketch to 0"


def test_four_clients_are_enough_to_compare() -> None:
    check_policies(READ.validate_python([GUARD]), LADDER, lane="clear", size=4)


def test_a_guard_without_probes_goes_with_everything() -> None:
    for lane, size in (("masked", 4), ("clear", 1)):
        policies = READ.validate_python([{**GUARD, "sketch": 0}])
        check_policies(policies, LADDER, lane=lane, size=size)


def test_a_policy_s_sketch_is_of_a_power_of_two() -> None:
    for policy in ("auto", "divergence_guard"):
        assert READ.validate_python([{"id": policy, "sketch": 64}])
        for wrong in (1, 1000, 2**17, -2):
            with pytest.raises(ValidationError, match="sketch"):
                READ.validate_python([{"id": policy, "sketch": wrong}])


def test_who_probes_has_a_sketch() -> None:
    auto, guard = READ.validate_python([{"id": "auto"}]), READ.validate_python([GUARD])
    assert (prober(auto), prober(guard)) == (auto[0], guard[0])
    assert prober(READ.validate_python([{**GUARD, "sketch": 0}])) is None
    assert prober(READ.validate_python([{"id": "accuracy_driven"}])) is None


# Corrected learning rates


def corrected(**changes: Any) -> RoundPlan:
    return make_plan(profiles=[PLAIN, SPARSE | {"learning_rate_factor": 0.5}], **changes)


def test_a_profile_corrects_the_rate_of_its_own_clients_alone() -> None:
    plan = corrected()
    assert plan.training_of("plain") == plan.training
    assert plan.training_of("sparse").learning_rate == pytest.approx(0.05)
    assert plan.training_of("sparse").local_epochs == plan.training.local_epochs


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"training": {"local_epochs": 2}}, "'sparse' corrects the learning rate, and the plan"),
        ({"client_terms": {"control": {"scale": 1.0}}}, "control variates count on the plan's"),
    ],
)
def test_a_rate_is_corrected_where_the_plan_sets_it(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(IncompatiblePlan, match=says):
        corrected(**changes)
    assert make_plan(profiles=[PLAIN, SPARSE], **changes), "without a factor there is no conflict"


def test_a_control_variate_and_a_residual_would_count_twice() -> None:
    held_back = {"name": "held", "compressor": {"id": "error_feedback", "inner": {"id": "topk"}}}
    assert make_plan(profiles=[held_back])
    assert make_plan(profiles=[SPARSE], client_terms={"control": {"scale": 1.0}})
    with pytest.raises(IncompatiblePlan, match="counted twice it diverges; use topk without"):
        make_plan(profiles=[held_back], client_terms={"control": {"scale": 1.0}})


def test_the_bound_of_bodies_counts_both_trips() -> None:
    one = make_plan(profiles=[{"name": "one", "compressor": {"id": "powersgd"}}])
    two = make_plan(profiles=[TWO_TRIPS], previous_model="b" * 64)
    assert two.first_trip is not None
    assert 0 < two.max_body_bytes(SPEC) <= one.max_body_bytes(SPEC)


# What devices measure


def test_counts_that_cannot_be_are_refused() -> None:
    fields = {"model": MODEL, "num_examples": 10, "metrics": {"loss": 1.0}}
    count = {"num_examples": 5, "correct": 5}
    assert EvaluationReport.model_validate(fields | {"classes": {"a": count, "b": count}})
    with pytest.raises(ValueError, match=r"correct must be at most num_examples \(5\), not 6"):
        ClassCount(num_examples=5, correct=6)
    more = {"a": count, "b": {"num_examples": 6, "correct": 0}}
    with pytest.raises(ValueError, match=r"count 11 examples, more than num_examples \(10\)"):
        EvaluationReport.model_validate(fields | {"classes": more})


def test_a_metric_is_a_cost_in_the_direction_of_its_goal() -> None:
    assert EvaluationTerms().cost(2.0) == 2.0
    assert EvaluationTerms(metric="accuracy", goal="highest").cost(2.0) == -2.0


def test_another_metric_than_the_loss_needs_its_goal() -> None:
    with pytest.raises(ValueError, match="the metric 'accuracy' needs a goal; add"):
        EvaluationTerms(metric="accuracy")
    assert EvaluationTerms(metric="loss").goal == "lowest"


@pytest.mark.parametrize(
    ("condition", "admits", "refuses"),
    [
        ({"minimum": 2}, [2, 3.5], [1, None, "3"]),
        ({"maximum": 2}, [2, -1], [2.5, None, "1"]),
        ({"minimum": 1, "maximum": 1}, [1], [0, 2]),
        ({"one_of": ["eu", 3]}, ["eu", 3], ["us", 4, None]),
    ],
)
def test_a_condition_admits_what_it_names(
    condition: dict[str, Any], admits: list[Any], refuses: list[Any]
) -> None:
    asked = Eligibility.model_validate(condition)
    assert all(asked.admits(value) for value in admits)
    assert not any(asked.admits(value) for value in refuses)


@pytest.mark.parametrize(
    ("condition", "says"),
    [
        ({}, "set either one_of, or minimum, maximum or both"),
        ({"minimum": 1, "one_of": ["eu"]}, "set either one_of, or minimum, maximum or both"),
        ({"minimum": 2, "maximum": 1}, "minimum 2 is larger than maximum 1"),
    ],
)
def test_a_condition_that_asks_for_two_things_or_none_is_refused(
    condition: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        Eligibility.model_validate(condition)


def test_the_average_is_served_unless_the_newest_is_the_best() -> None:
    newest, average = "a" * 64, "b" * 64
    fields = {"task": "t", "state": "running", "spec": "c" * 64, "round": 1, "rounds": 2}
    status = TaskSummary.model_validate(fields | {"model": newest})
    assert status.served == newest
    averaged = status.model_copy(update={"published": {"average": average}})
    assert averaged.served == average
    assert averaged.model_copy(update={"best": average}).served == average
    assert averaged.model_copy(update={"best": newest}).served == newest


# Privacy

PRIVATE = {"clip": 0.3, "noise_multiplier": 1.0, "participations": 1, "epsilon": 8.0}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"lane": "clear"}, "privacy terms in the clear lane"),
        ({"policies": [{"id": "accuracy_driven"}]}, "accuracy_driven under privacy terms"),
        (
            {"lane": "clear", "privacy": PRIVATE | {"lane": "central"}, "profiles": None},
            r"auto under privacy terms: .* name profiles",
        ),
        ({"selection": {"policy": "loss"}}, "selection by loss under privacy terms"),
        ({"members": ["a", "b"]}, "2 members who take part 1 times each are enough for 0 rounds"),
        ({"evaluation": {"patience": 2}}, "evaluation.patience under privacy terms"),
    ],
)
def test_a_private_task_uses_nothing_without_noise(changes: dict[str, Any], says: str) -> None:
    terms: dict[str, Any] = {"lane": "masked", "privacy": PRIVATE}
    assert task(**terms).privacy is not None
    with pytest.raises(IncompatiblePlan, match=says):
        task(**terms | changes)


def test_a_claim_that_no_noise_keeps_asks_for_fewer_participations() -> None:
    with pytest.raises(ValueError, match="lower participations"):
        PrivacyTerms.model_validate(PRIVATE | {"participations": 2**20, "epsilon": 1e-6})


def test_a_plan_of_the_clear_lane_counts_no_noise_and_two_trips_are_not_begun() -> None:
    assert make_plan().noise_shares == 0
    with pytest.raises(IncompatiblePlan):
        make_plan(profiles=[TWO_TRIPS], previous_model="b" * 64).public(SPEC)
