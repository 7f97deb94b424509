"""Privacy terms under Flower's messages: the lanes' noise, the device's account, what leaves it."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")

from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.serverapp import strategy as flowers

from fedpress_client import MaskingRules, PrivacyRules
from fedpress_client.privacy_budget import NO_RULES
from fedpress_compression.compressors.none import Uncompressed
from fedpress_compression.compressors.quantize import Quantize
from fedpress_compression.compressors.shared_support import SharedSupport
from fedpress_compression.compressors.topk import TopK
from fedpress_flower import envelope
from fedpress_flower.client import MAX_EPSILON, compression_mod
from fedpress_flower.server import FedpressStrategy, MaskedStrategy, Plan
from fedpress_flower.server.spending import Spending
from fedpress_protocols.errors import ConfigurationError, IncompatiblePlan
from fedpress_protocols.plan import MaskingTerms, PrivacyTerms
from fedpress_strategies import from_config
from tests.flower.fleet import Fleet
from tests.flower.masked_fleet import MaskedFleet
from tests.flower.test_mod_and_strategy import (
    SIZE,
    app_of,
    flat,
    measuring,
    run,
    start_arrays,
    step,
    training,
)

logging.getLogger("flwr").setLevel(logging.ERROR)

CLIP = 0.25
WHOLE = Quantize(clip=0.5)
FEDAVG = {"id": "fedavg"}


def terms_of(lane: str = "central", **fields: Any) -> PrivacyTerms:
    usual = {"clip": CLIP, "noise_multiplier": 2.0, "participations": 3, "epsilon": 8.0}
    return PrivacyTerms.model_validate({"lane": lane, **usual, **fields})


def plan_of(lane: str = "central", minimum: int = 2, **fields: Any) -> Plan:
    return Plan(WHOLE, minimum=minimum, seed=3, privacy=terms_of(lane, **fields))


def ours(plan: Plan, **sampling: Any) -> FedpressStrategy:
    return FedpressStrategy(from_config(FEDAVG), plan, **sampling)


def fleet_of(folder: Path, count: int, privacy: PrivacyRules = NO_RULES, **options: Any) -> Fleet:
    app = app_of(compression_mod(state_dir=folder, seed=1, durable=False, privacy=privacy))
    return Fleet(app, count, **options)


def of_run(run_id: int, fleet: Fleet) -> Fleet:
    for context in fleet.contexts.values():
        context.run_id = run_id
    return fleet


def models_of(strategy: Any, fleet: Fleet, rounds: int) -> list[np.ndarray]:
    """The model [SIZE] at the start and after each round."""
    models = [flat(start_arrays())]

    def seen(number: int, arrays: Any) -> None:
        if number:
            models.append(flat(arrays))

    run(strategy, fleet, rounds, evaluate_fn=seen)
    return models


def clipped_mean(number: int, nodes: range, size: int) -> np.ndarray:
    total = np.zeros(SIZE)
    for node in nodes:
        update = flat(step(number, node)).astype(np.float64)
        total += update * min(1.0, CLIP / float(np.linalg.norm(update)))
    return total / size


# The lanes


def test_in_the_central_lane_the_model_moves_by_the_clipped_mean_and_the_servers_noise(
    tmp_path: Path,
) -> None:
    """The noise of 130 numbers over 3 rounds is of the claimed size, and nothing else is added."""
    strategy = ours(plan_of(noise_multiplier=5.0))
    models = models_of(strategy, fleet_of(tmp_path, 4), 3)
    left = []
    for number in (1, 2, 3):
        change = models[number] - models[number - 1]
        left.append(change - clipped_mean(number, range(1, 5), 4))
    expected = 5.0 * CLIP / 4
    found = float(np.std(np.concatenate(left)))
    assert abs(found / expected - 1) < 5 / math.sqrt(2 * 3 * SIZE), (found, expected)
    assert [report.privacy.participations for report in strategy.reports if report.privacy] == [
        1,
        2,
        3,
    ]
    last = strategy.reports[-1].privacy
    assert last is not None
    assert last.epsilon == terms_of(noise_multiplier=5.0).spent(3)
    assert "not the server" in last.against


def test_the_denominator_is_the_cohorts_size_whoever_stays_away(tmp_path: Path) -> None:
    """One of four fails in round 2; the others count a quarter each, as before."""
    fleet = fleet_of(
        tmp_path, 4, fate=lambda call, node: "unreached" if (call, node) == (2, 4) else "answers"
    )
    strategy = ours(plan_of(noise_multiplier=1.0, epsilon=30.0, clip=CLIP))
    models = models_of(strategy, fleet, 2)
    noise = models[2] - models[1] - clipped_mean(2, range(1, 4), 4)
    assert float(np.std(noise)) < 1.5 * CLIP / 4
    assert strategy.reports[1].included == (1, 2, 3)


def test_correlated_noise_takes_earlier_noise_away(tmp_path: Path) -> None:
    """Devices rest for three rounds; round 2's noise has minus half of round 1's."""
    correlation = {"separation": 4, "rounds": 4, "weight": 1.0, "decay": 1.0}
    terms = plan_of(correlation=correlation, participations=1, noise_multiplier=6.0)
    strategy = ours(terms, fraction_train=0.25, min_train_nodes=2)
    fleet = fleet_of(tmp_path, 8)
    models = models_of(strategy, fleet, 4)
    asked = [set(report.asked) for report in strategy.reports]
    assert [len(each) for each in asked] == [2, 2, 2, 2]
    assert len(set.union(*asked)) == 8, "nobody within four rounds twice"
    noise = []
    for number, nodes in enumerate(asked, 1):
        mean = sum(clipped_mean(number, range(node, node + 1), 2) for node in nodes)
        noise.append(models[number] - models[number - 1] - mean)
    covariance = float(np.mean(noise[0] * noise[1])) / float(np.var(noise[0]))
    assert abs(covariance + 0.5) < 4 * math.sqrt(1.25 / SIZE), covariance


@pytest.mark.parametrize("inner", [from_config(FEDAVG), None])
def test_in_the_local_lane_each_device_adds_its_own_noise(tmp_path: Path, inner: Any) -> None:
    strategy = FedpressStrategy(
        inner or flowers.FedAvg(fraction_evaluate=0.0),
        Plan(Uncompressed(), minimum=1, privacy=terms_of("local", noise_multiplier=5.0)),
    )
    models = models_of(strategy, fleet_of(tmp_path, 4), 1)
    noise = models[1] - models[0] - clipped_mean(1, range(1, 5), 4)
    expected = 5.0 * CLIP / 2
    assert abs(float(np.std(noise)) / expected - 1) < 5 / math.sqrt(2 * SIZE)


def test_in_the_distributed_lane_devices_share_the_noise_of_a_masked_sum(tmp_path: Path) -> None:
    """All five come, where the noise is for fewer that are certain to be honest."""
    terms = terms_of("distributed", noise="discrete_gaussian", noise_multiplier=8.0)
    plan = Plan(SharedSupport(fraction=1.0), minimum=3, seed=3, privacy=terms)
    strategy = MaskedStrategy(from_config(FEDAVG), plan, MaskingTerms(adversary="semi-honest"))
    rules = MaskingRules(adversary="semi-honest")
    fleet = MaskedFleet(tmp_path, 5, training, rules=rules)
    models = models_of(strategy, fleet, 1)
    noise = models[1] - models[0] - clipped_mean(1, range(1, 6), 5)
    shares = fleet.payloads[1].plan.noise_shares
    assert 2 <= shares < 5
    expected = 8.0 * CLIP / 5 * math.sqrt(5 / shares)
    assert abs(float(np.std(noise)) / expected - 1) < 5 / math.sqrt(2 * SIZE)
    report = strategy.reports[0]
    assert report.privacy is not None
    assert report.privacy.participations == 1


def test_an_adaptive_clip_moves_towards_the_updates(tmp_path: Path) -> None:
    """From far too small it rises in each round, by the noised count of bits alone."""
    adaptive = {"quantile": 0.5, "learning_rate": 0.5, "count_noise": 2.6}
    strategy = ours(plan_of(noise_multiplier=1.0, epsilon=30.0, clip=0.01, adaptive=adaptive))
    models_of(strategy, fleet_of(tmp_path, 6), 3)
    clips = [report.privacy.clip for report in strategy.reports if report.privacy]
    assert clips[0] == 0.01
    assert len(set(clips)) == 3


# What leaves the device


def test_nothing_but_the_noised_upload_leaves_a_device(tmp_path: Path) -> None:
    said: list[Message] = []

    class Listening(Fleet):
        def on_way(self, message: Message, reply: Message) -> Message:
            said.append(reply)
            return reply

    app = app_of(compression_mod(state_dir=tmp_path, seed=1, durable=False))
    fleet = Listening(app, 3)
    run(ours(plan_of()), fleet, 2)
    assert len(said) == 6, "nobody was asked to evaluate"
    for reply in said:
        assert set(reply.content) == {"arrays", "metrics", envelope.RECORD}
        assert dict(reply.content["metrics"]) == {"num-examples": 1}
        assert set(reply.content[envelope.RECORD]) == {envelope.ASSIGNMENT}
        assert list(reply.content["arrays"]) == [envelope.BODY]


def test_a_client_of_a_private_run_measures_for_nobody(tmp_path: Path) -> None:
    fleet = fleet_of(tmp_path, 3)
    run(ours(plan_of()), fleet, 1)
    message = Message(RecordDict({"m": MetricRecord({"a": 1})}), dst_node_id=1,
                      message_type="evaluate")  # fmt: skip
    mod = compression_mod(state_dir=tmp_path)
    with pytest.raises(IncompatiblePlan, match="has no noise, and stays with it"):
        mod(message, fleet.contexts[1], measuring)
    fresh = Context(7, 9, {}, RecordDict(), {})
    assert mod(message, fresh, lambda m, c: m) is message
    strict = compression_mod(state_dir=tmp_path, privacy=PrivacyRules())
    with pytest.raises(IncompatiblePlan, match="set fraction_evaluate"):
        strict(message, fresh, measuring)


# The account


def account(folder: Path, node: int) -> dict[str, Any]:
    path = folder / "budgets" / f"partition-{node - 1}" / "privacy.json"
    tasks: dict[str, Any] = json.loads(path.read_text())["tasks"]
    return tasks


def test_a_participation_is_debited_before_the_upload_leaves_also_if_nothing_arrives(
    tmp_path: Path,
) -> None:
    fleet = fleet_of(tmp_path, 3, fate=lambda call, node: "unheard" if node == 2 else "answers")
    strategy = ours(plan_of())
    run(strategy, fleet, 2)
    assert [account(tmp_path, node)["flower"]["participations"] for node in (1, 2, 3)] == [2, 2, 2]
    assert strategy.reports[1].included == (1, 3)
    assert strategy.reports[1].privacy is not None
    assert strategy.reports[1].privacy.participations == 2


def test_the_server_asks_no_client_beyond_its_participations(tmp_path: Path) -> None:
    """Three each: of five rounds the last two have nobody to ask, and the model stays."""
    strategy = ours(plan_of())
    fleet = fleet_of(tmp_path, 3)
    models = models_of(strategy, fleet, 5)
    assert [report.round for report in strategy.reports] == [1, 2, 3]
    np.testing.assert_array_equal(models[5], models[3])


def test_a_round_that_does_not_begin_is_no_measure_for_the_cohort(tmp_path: Path) -> None:
    spending = Spending(terms_of())
    messages = [
        Message(RecordDict({}), dst_node_id=node, message_type="train") for node in range(1, 7)
    ]
    assert not spending.chosen(messages[:1], [1], 1, minimum=2, seed=None)
    assert len(spending.chosen(messages[:3], range(1, 7), 2, minimum=2, seed=None)) == 3
    assert len(spending.chosen(messages, range(1, 7), 3, minimum=2, seed=None)) == 3
    spending.count([1, 2], 3)
    spending.count([1, 2], 4)
    spending.count([1, 2], 5)
    kept = spending.chosen(messages[:3], range(1, 7), 6, minimum=2, seed=1)
    asked = {message.metadata.dst_node_id for message in kept}
    assert len(asked) == 3
    assert not asked & {1, 2}
    assert 3 in asked


def test_another_run_of_the_same_task_goes_on_with_the_devices_account(tmp_path: Path) -> None:
    run(ours(plan_of()), fleet_of(tmp_path, 3), 3)
    again = ours(plan_of())
    models = models_of(again, of_run(8, fleet_of(tmp_path, 3)), 1)
    assert not again.reports[0].included
    np.testing.assert_array_equal(models[1], models[0])
    reason = again.reports[0].dropped[1]
    assert "after 3 participations, which is all that" in reason
    assert "Plan(task=...) names the task" in reason
    other = ours(Plan(WHOLE, task="another", minimum=2, privacy=terms_of()))
    run(other, of_run(9, fleet_of(tmp_path, 3)), 1)
    assert other.reports[0].included == (1, 2, 3)


def test_terms_that_change_within_a_task_are_declined(tmp_path: Path) -> None:
    run(ours(plan_of()), fleet_of(tmp_path, 3), 1)
    changed = ours(plan_of(clip=0.5))
    run(changed, of_run(8, fleet_of(tmp_path, 3)), 1)
    assert "changes the privacy terms: clip from 0.25 to 0.5" in changed.reports[0].dropped[1]
    without = ours(Plan(WHOLE, minimum=2))
    run(without, of_run(9, fleet_of(tmp_path, 3)), 1)
    assert (
        "without noise, and the task's terms of before had some" in (without.reports[0].dropped[1])
    )


def test_a_server_that_renames_the_task_within_a_run_gets_nothing_without_noise(
    tmp_path: Path,
) -> None:
    fleet = fleet_of(tmp_path, 3)
    run(ours(plan_of()), fleet, 1)
    renamed = ours(Plan(WHOLE, task="another", minimum=2))
    run(renamed, fleet, 1)
    assert not renamed.reports[0].included
    assert "has joined the run when it had privacy terms" in renamed.reports[0].dropped[1]


def test_what_an_owner_bounds_no_plan_overrules(tmp_path: Path) -> None:
    strategy = ours(plan_of())
    fleet = fleet_of(tmp_path, 3, PrivacyRules(required=True))
    run(strategy, fleet, 1)
    assert "takes part in distributed, local only" in strategy.reports[0].dropped[1]
    fleet = fleet_of(tmp_path / "b", 3)
    for context in fleet.contexts.values():
        context.node_config[MAX_EPSILON] = 0.5
    strategy = ours(plan_of())
    run(strategy, fleet, 1)
    assert "more than its 0.5" in strategy.reports[0].dropped[1]
    for context in fleet.contexts.values():
        context.node_config[MAX_EPSILON] = "much"
    strategy = ours(plan_of())
    run(strategy, fleet, 1)
    assert "where a positive number is due" in strategy.reports[0].dropped[1]


def test_a_masked_client_debits_too(tmp_path: Path) -> None:
    terms = terms_of("distributed", participations=1)
    plan = Plan(SharedSupport(fraction=0.5), minimum=3, seed=3, privacy=terms)
    terms_of_masks = MaskingTerms(adversary="semi-honest")
    strategy = MaskedStrategy(from_config(FEDAVG), plan, terms_of_masks)
    rules = MaskingRules(adversary="semi-honest")
    gone = {(1, 2): ("shares", "unreached")}
    fleet = MaskedFleet(tmp_path, 5, training, rules=rules, gone=gone)
    run(strategy, fleet, 2)
    assert strategy.reports[0].included == (1, 3, 4, 5)
    assert len(strategy.reports) == 1, "nobody is left for a second round"
    assert account(tmp_path, 2)["flower"]["participations"] == 1, (
        "also if the round goes on without"
    )
    again = MaskedStrategy(from_config(FEDAVG), plan, terms_of_masks)
    run(again, of_run(8, MaskedFleet(tmp_path, 5, training, rules=rules)), 1)
    assert not again.reports[0].included
    assert "after 1 participations" in again.reports[0].dropped[1]


# Refused


@pytest.mark.parametrize(
    ("strategy", "reason"),
    [
        (
            lambda: FedpressStrategy(None, Plan(WHOLE, privacy=terms_of("distributed"))),
            "use MaskedStrategy",
        ),
        (
            lambda: MaskedStrategy(None, Plan(SharedSupport(0.5), minimum=3, privacy=terms_of())),
            "use FedpressStrategy",
        ),
        (lambda: FedpressStrategy(flowers.FedAvg(), plan_of()), "noise of the central lane is for"),
        (
            lambda: FedpressStrategy(flowers.QFedAvg(1.0), plan_of("local")),
            "clients measure on their data",
        ),
        (lambda: Plan(privacy=terms_of()), "name a compressor"),
    ],
)
def test_refused_when_the_strategy_is_made(strategy: Any, reason: str) -> None:
    with pytest.raises(IncompatiblePlan, match=reason):
        strategy()


@pytest.mark.parametrize(
    ("plan", "config", "reason"),
    [
        (Plan(TopK(0.1), minimum=2, privacy=terms_of()), FEDAVG, "chooses the coordinates"),
        (Plan(WHOLE, minimum=1, privacy=terms_of()), FEDAVG, "cohort.minimum is 1; raise it to 2"),
        (plan_of(), {"id": "median"}, "looks at updates one by one"),
        (plan_of(per_tensor=[["w", 1]]), FEDAVG, "no pattern of privacy.per_tensor fits"),
    ],
)
def test_refused_when_the_first_round_opens(
    tmp_path: Path, plan: Plan, config: Any, reason: str
) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        run(FedpressStrategy(from_config(config), plan), fleet_of(tmp_path, 3), 1)


def test_an_upload_beyond_the_clip_is_not_counted(tmp_path: Path) -> None:
    """A client whose own terms have a clip a hundred times as large is dropped by name."""

    class Lying(Fleet):
        def push_messages(self, messages: Any) -> list[str]:
            messages = list(messages)
            for message in messages:
                if message.metadata.dst_node_id == 1 and envelope.RECORD in message.content:
                    record = message.content[envelope.RECORD]
                    plan = json.loads(record[envelope.PLAN])
                    plan["privacy"]["clip"] *= 100
                    plan["fixed_point"]["scale_bits"] -= 7
                    record[envelope.PLAN] = json.dumps(plan)
            return super().push_messages(messages)

    app = app_of(compression_mod(state_dir=tmp_path, seed=1, durable=False))
    strategy = ours(plan_of())
    run(strategy, Lying(app, 3), 1)
    assert strategy.reports[0].included == (2, 3)
    assert "larger than the clip of 0.25" in strategy.reports[0].dropped[1]
