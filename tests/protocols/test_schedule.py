"""Which period a round is of, and what one period may follow."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from fedpress_client import Ledger
from fedpress_compression.compressors.dgc import SPARSITIES, Dgc
from fedpress_compression.compressors.error_feedback import ErrorFeedback
from fedpress_compression.compressors.quantize import Quantize
from fedpress_compression.compressors.topk import TopK
from fedpress_protocols.errors import ConfigurationError
from fedpress_protocols.messages import Assignment, TaskConfig
from fedpress_protocols.model import Model
from fedpress_protocols.schedule import Period, period_at, sparsity_warm_up
from tests.client.fake_server import make_plan
from tests.ledgers import velocity

NONE = {"name": "only", "compressor": {"id": "none"}}
WHOLE = 100_000


def period(**terms: Any) -> Period:
    return Period.model_validate({"profiles": [NONE], **terms})


def config(**changes: Any) -> TaskConfig:
    fields = {"task": "t", "model": "a" * 64, "rounds": 10, "profiles": [NONE]}
    return TaskConfig.model_validate({**fields, "cohort": {"size": 2, "minimum": 1}, **changes})


def uploaded(costs: list[int], schedule: list[Period], rounds: int) -> list[Period | None]:
    """The period of each round where one of the i-th costs `costs[i]`, and after all the last."""
    spent: list[int] = []
    found = []
    for _ in range(rounds):
        found.append(period_at(schedule, spent, WHOLE))
        at = len(schedule) if found[-1] is None else schedule.index(found[-1])
        spent.append(costs[at])
    return found


def test_periods_by_rounds_follow_one_another() -> None:
    first, second = period(rounds=2), period(rounds=1, warms_up=True)
    found = uploaded([9, 9, 9], [first, second], 5)
    assert found == [first, first, second, None, None]


def test_a_budget_holds_over_the_rounds_of_its_period_alone() -> None:
    first, second = period(budget=0.025), period(budget=0.02, warms_up=True)
    found = uploaded([800, 500, 10], [first, second], 10)
    assert found == [first] * 3 + [second] * 4 + [None] * 3  # 2400 of 2500 bytes, 2000 of 2000


@given(
    budgets=st.lists(st.floats(0.001, 0.2), min_size=1, max_size=4),
    costs=st.lists(st.integers(1, 30_000), min_size=5, max_size=5),
)
def test_no_period_spends_more_than_its_budget_or_one_round(
    budgets: list[float], costs: list[int]
) -> None:
    schedule = [period(budget=each + 1e-6 * i) for i, each in enumerate(budgets)]
    found = uploaded(costs, schedule, 400)
    for index, each in enumerate(schedule):
        rounds, cost = found.count(each), costs[index]
        if each in found and found[-1] != each:
            assert rounds >= 1
            assert rounds == 1 or rounds * cost <= (each.budget or 0) * WHOLE
            assert (rounds + 1) * cost > (each.budget or 0) * WHOLE
    order = [len(schedule) if each is None else schedule.index(each) for each in found]
    assert order == sorted(order), "a schedule never goes back"


def test_a_round_so_dear_that_the_budget_has_room_for_none_is_one_still() -> None:
    assert uploaded([5000, 1], [period(budget=0.01)], 3) == [period(budget=0.01), None, None]


@pytest.mark.parametrize("terms", [{}, {"rounds": 1, "budget": 0.1}])
def test_a_period_has_one_length(terms: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="rounds or a budget, one of them"):
        period(**terms)


def test_the_published_sparsities_become_periods() -> None:
    made = Dgc()
    by_rounds = sparsity_warm_up(made, rounds=3)
    fractions = [each.profiles[0].compressor.inner.fraction for each in by_rounds]
    assert fractions == pytest.approx([1 - each for each in SPARSITIES[:-1]])
    assert [each.rounds for each in by_rounds] == [3] * 4
    on_budget = sparsity_warm_up(ErrorFeedback(TopK(0.01)), budget=0.03, name="p0")
    assert [each.budget for each in on_budget] == pytest.approx([0.01] * 3)
    assert {each.profiles[0].name for each in on_budget} == {"p0"}
    assert sparsity_warm_up(Dgc(TopK(0.25)), rounds=3) == ()
    assert sparsity_warm_up(Dgc(TopK(0.5)), budget=0.1) == ()
    for other in (Dgc(TopK(count=3)), ErrorFeedback(Quantize())):
        with pytest.raises(ConfigurationError, match="for top-k by its fraction"):
            sparsity_warm_up(other, rounds=3)


def test_a_schedule_survives_json() -> None:
    made = config(schedule=[*sparsity_warm_up(Dgc(), budget=0.01)], schedule_after=2)
    again = TaskConfig.model_validate_json(made.model_dump_json())
    assert again == made
    assert [each.name for each in again.every_profile] == ["only"] * 5


def follows(*configs: dict[str, Any], **more: Any) -> TaskConfig:
    """Periods of one round with each of these compressors, the last one's profiles the task's."""
    profiles = [{"name": "only", "compressor": each} for each in configs]
    schedule = [{"profiles": [each], "rounds": 1} for each in profiles[:-1]]
    return config(schedule=schedule, profiles=profiles[-1:], **more)


EF21, MORE = {"id": "ef21"}, {"id": "ef21", "inner": {"id": "topk", "fraction": 0.1}}
ACTIVE = {"id": "coded", "contexts": "activity"}


@pytest.mark.parametrize("others", [[{"id": "none"}, EF21], [EF21, {"id": "topk"}]])
def test_an_estimate_that_others_would_move_is_alone_in_its_schedule(
    others: list[dict[str, Any]],
) -> None:
    with pytest.raises(ValidationError, match="before or after a compressor that follows its own"):
        follows(*others)
    assert len(follows(EF21, MORE).every_profile) == 2


def test_a_map_that_no_round_before_drew_is_not_read() -> None:
    with pytest.raises(ValidationError, match="give every period a profile that reads it, or none"):
        follows({"id": "none"}, ACTIVE)
    assert follows(ACTIVE, ACTIVE).schedule


def test_a_period_is_held_to_an_asynchronous_task_s_terms() -> None:
    terms = {"asynchronous": {"concurrency": 2}, "cohort": {"size": 2, "minimum": 2}}
    with pytest.raises(ValidationError, match="cannot use delta"):
        follows({"id": "delta"}, {"id": "none"}, **terms)


def test_residual_and_velocity_go_on_from_period_to_period() -> None:
    """Over a warm-up of dgc, and on to error feedback: all that was computed is accounted for."""
    model = Model.from_tensors({"w": np.zeros((20, 30), np.float32)})
    rng, ledger = np.random.default_rng(0), Ledger("task", "me")
    steps = [each.profiles[0].compressor for each in sparsity_warm_up(Dgc(), rounds=1)]
    computed, sent = np.zeros((2, model.spec.size))
    for number, made in enumerate([*steps, Dgc(), ErrorFeedback(TopK(0.01))], 1):
        plan = make_plan(model, made, round_=number)
        name = f"a{number}"
        assignment = Assignment(assignment=name, client_id="me", plan=plan, profile="p0")
        update = rng.standard_normal(model.spec.size).astype(np.float32)
        ledger, _ = ledger.prepare(assignment, update, 1, model.spec, rng)
        computed += velocity(ledger) if isinstance(made, Dgc) else update
        sent += ledger.pending[name].update.dense()
        assert ledger.residual is not None
        assert sent + ledger.residual == pytest.approx(computed, abs=1e-4)
    assert ledger.residual is not None
    assert np.count_nonzero(ledger.residual) > 0.5 * model.spec.size
