"""The account of what a device's privacy has cost, and the plans that it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedpress_client import PrivacyRules
from fedpress_client.privacy_budget import PrivacyBudget
from fedpress_client.state import StateDirectory
from fedpress_protocols.errors import ConfigurationError, PlanDeclined, StateCorrupt
from fedpress_protocols.plan import PrivacyTerms, RoundPlan
from tests.protocols.test_masked_payload import plan_fields

TERMS: dict[str, Any] = {
    "lane": "central", "clip": 0.3, "noise_multiplier": 4.0, "participations": 3, "epsilon": 6.0,
}  # fmt: skip
LOCAL = {**TERMS, "lane": "local"}
ANY = PrivacyRules(required=False)


def plan_of(
    terms: dict[str, Any] | None = TERMS, *, number: int = 1, task: str = "digits"
) -> RoundPlan:
    fields = plan_fields(
        {"id": "none"}, lane="clear", masking=None, round=number, task=task, privacy=terms
    )
    if terms is not None:
        fields["fixed_point"] |= {"max_examples": 1, "max_abs": 0.1}
    if terms is not None and "adaptive" in terms:
        fields["report"] = ["within-clip"]
    return RoundPlan.model_validate(fields)


def budget_of(folder: Path, rules: PrivacyRules = ANY) -> PrivacyBudget:
    return PrivacyBudget(StateDirectory.open(folder), rules)


def declined(budget: PrivacyBudget, plan: RoundPlan) -> tuple[str, str]:
    """The broken rule and the reason; both ways of asking refuse alike."""
    with pytest.raises(PlanDeclined) as checked:
        budget.check(plan)
    with pytest.raises(PlanDeclined) as debited:
        budget.debit(plan)
    assert debited.value.detail == checked.value.detail
    return str(checked.value.members["rule"]), str(checked.value.detail)


def test_a_debit_says_what_this_task_and_all_tasks_have_cost(tmp_path: Path) -> None:
    terms, budget = PrivacyTerms(**TERMS), budget_of(tmp_path)
    for count in (1, 2, 3):
        debit = budget.debit(plan_of(number=count))
        assert debit is not None
        assert (debit.participations, debit.max_participations) == (count, 3)
        assert debit.epsilon == debit.total_epsilon == terms.spent(count)
        assert debit.delta == terms.delta
        assert debit.against == plan_of().private_against
    other = budget_of(tmp_path).debit(plan_of(task="other"))
    assert other is not None
    assert (other.participations, other.epsilon) == (1, terms.spent(1))
    assert other.total_epsilon == pytest.approx(terms.cost(4).epsilon(terms.delta))


def test_the_last_participation_is_counted_and_the_next_is_refused(tmp_path: Path) -> None:
    budget = budget_of(tmp_path)
    for number in (1, 2, 3):
        budget.check(plan_of(number=number))
        budget.debit(plan_of(number=number))
    rule, reason = declined(budget_of(tmp_path), plan_of(number=4))
    assert rule == "participations"
    assert "after 3 participations, which is all" in reason
    account = json.loads((tmp_path / "privacy.json").read_text())
    assert account["tasks"]["digits"]["participations"] == 3
    assert "last_round" not in account["tasks"]["digits"]


def test_a_plan_without_terms_costs_nothing_where_no_rule_requires_them(tmp_path: Path) -> None:
    budget = budget_of(tmp_path)
    budget.check(plan_of(None))
    assert budget.debit(plan_of(None)) is None
    assert not budget.is_private("digits")
    assert not (tmp_path / "privacy.json").exists()


def test_a_task_is_private_from_its_first_terms_on(tmp_path: Path) -> None:
    budget = budget_of(tmp_path)
    budget.check(plan_of())
    assert budget.is_private("digits")
    assert not budget.is_private("other")
    assert not budget_of(tmp_path).is_private("digits")
    budget.debit(plan_of())
    again = budget_of(tmp_path)
    assert again.is_private("digits")
    assert not again.is_private("other")
    with pytest.raises(PlanDeclined, match="the task's terms of before had some"):
        again.check(plan_of(None))
    assert again.debit(plan_of(None)) is None


def test_a_device_that_requires_privacy_takes_part_in_its_lanes_only(tmp_path: Path) -> None:
    rules = PrivacyRules()
    budget = budget_of(tmp_path, rules)
    with pytest.raises(PlanDeclined, match="this device requires privacy"):
        budget.check(plan_of(None))
    rule, reason = declined(budget, plan_of())
    assert (rule, "in distributed, local only" in reason) == ("privacy", True)
    assert budget.debit(plan_of(LOCAL)) is not None
    central = PrivacyRules(lanes=frozenset({"central"}))
    assert budget_of(tmp_path / "b", central).debit(plan_of()) is not None
    assert budget_of(tmp_path / "c").debit(plan_of()) is not None, "no rule"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"clip": 0.2}, "changes the privacy terms: clip from 0.3 to 0.2"),
        ({"participations": 4}, "participations from 3 to 4"),
        ({"lane": "local"}, "lane from central to local"),
        ({"adaptive": {"count_noise": 5.0}}, "adaptive from none to "),
    ],
)
def test_terms_hold_for_a_whole_task(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    budget = budget_of(tmp_path)
    budget.debit(plan_of())
    rule, shown = declined(budget, plan_of({**TERMS, **change}, number=2))
    assert rule == "privacy terms"
    assert reason in shown
    assert shown.count(" from ") == 1
    budget.debit(plan_of({**TERMS, **change}, task="other"))


def test_the_clip_alone_may_move_where_it_adapts(tmp_path: Path) -> None:
    moving = {**TERMS, "adaptive": {"count_noise": 5.0}}
    budget = budget_of(tmp_path)
    budget.debit(plan_of(moving))
    debit = budget.debit(plan_of({**moving, "clip": 0.2}, number=2))
    assert debit is not None
    assert debit.participations == 2
    assert budget.debit(plan_of({**moving, "clip": 0.4}, number=3)) is not None
    other = budget_of(tmp_path / "other")
    other.debit(plan_of(moving))
    rule, reason = declined(other, plan_of({**moving, "clip": 0.2, "epsilon": 7.0}, number=2))
    assert rule == "privacy terms"
    assert reason.endswith("changes the privacy terms: epsilon from 6 to 7")
    rule, reason = declined(other, plan_of(TERMS, number=2))
    assert rule == "privacy terms"


def test_rounds_of_correlated_noise_are_their_separation_apart(tmp_path: Path) -> None:
    correlation = {"separation": 4, "rounds": 20, "weight": 1.2, "decay": 1.0}
    budget, terms = budget_of(tmp_path), {**TERMS, "correlation": correlation}
    budget.debit(plan_of(terms, number=5))
    account = json.loads((tmp_path / "privacy.json").read_text())
    assert account["tasks"]["digits"]["last_round"] == 5
    for number in (6, 8):
        rule, reason = declined(budget, plan_of(terms, number=number))
        assert rule == "separation"
        assert "too soon after round 5" in reason
        assert "a separation of 4 rounds" in reason
    budget.check(plan_of(terms, number=9))
    budget.check(plan_of(terms, number=5))  # another attempt at the same round
    with pytest.raises(PlanDeclined, match="comes too soon") as raised:
        budget.check(plan_of(terms, number=4))
    assert raised.value.hint == "this device takes part again from round 9 on"


def test_a_bound_on_epsilon_holds_over_all_tasks_at_the_device_s_delta(tmp_path: Path) -> None:
    terms = PrivacyTerms(**TERMS)
    bound = terms.cost(3).epsilon(1e-7)
    budget = budget_of(tmp_path, PrivacyRules(bound, delta=1e-7, required=False))
    budget.debit(plan_of(number=1))
    budget.debit(plan_of(number=2))
    assert budget.debit(plan_of(task="other")) is not None, "up to the bound itself"
    rule, reason = declined(budget, plan_of(number=3))
    assert rule == "max_epsilon"
    assert f"to epsilon {terms.cost(4).epsilon(1e-7):.3g} at delta 1e-07, more" in reason
    assert budget.debit(plan_of(None, task="plain")) is None


def test_an_account_that_cannot_be_read_stops_the_device(tmp_path: Path) -> None:
    budget = budget_of(tmp_path)
    budget.debit(plan_of())
    path = tmp_path / "privacy.json"
    path.write_text(path.read_text().replace('"format":1', '"format":2'))
    with pytest.raises(StateCorrupt, match=r"privacy.json: format"):
        budget.check(plan_of())
    path.unlink()
    path.mkdir()
    with pytest.raises(StateCorrupt, match="Is a directory"):
        budget.debit(plan_of())


@pytest.mark.parametrize(
    ("rules", "reason"),
    [
        ({"max_epsilon": 0.0}, "max_epsilon must be a number above 0, not 0.0"),
        ({"max_epsilon": float("nan")}, "max_epsilon must be a number above 0, not nan"),
        ({"delta": 1.0}, "delta must lie in"),
        ({"delta": 1e-12}, "delta must lie in"),
        ({"lanes": frozenset()}, "lanes must be some of distributed, central, local, not none"),
        ({"lanes": frozenset({"local", "open"})}, "not local, open"),
        ({"lanes": "local"}, "lanes must be some of .*, not 'local'"),
        ({"required": "no"}, "required must be True or False, not 'no'"),
        ({"delta": "small"}, "delta must be a number"),
    ],
)
def test_rules_that_no_plan_keeps_are_refused(rules: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        PrivacyRules(**rules)
    assert PrivacyRules(max_epsilon=1e-9).max_epsilon == 1e-9


def test_every_task_of_a_device_that_requires_privacy_is_private(tmp_path: Path) -> None:
    """So that no evaluation of it is reported, whatever a server says or keeps to itself."""
    assert budget_of(tmp_path, PrivacyRules()).is_private("digits")
    budget = budget_of(tmp_path)
    assert not budget.is_private("digits")
    budget.debit(plan_of())
    assert budget.is_private("digits")
    assert not budget.is_private("other")
