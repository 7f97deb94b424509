"""Masked rounds over Flower's messages: the very mean, from whoever stays, and nothing else."""

import logging
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("flwr")

from flwr.app import ConfigRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import strategy as flowers

from fedpress.simulate import flower_runtime as runtime
from fedpress_client import MaskingRules
from fedpress_client.ledger_records import Discard
from fedpress_client.masking import _Diary
from fedpress_compression.compressors.shared_support import SharedSupport
from fedpress_compression.compressors.topk import TopK
from fedpress_flower import envelope
from fedpress_flower.client import compression_mod, masking_mod
from fedpress_flower.server import FedpressStrategy, Plan, RoundReport
from fedpress_protocols.errors import ConfigurationError, IncompatiblePlan
from fedpress_protocols.masking.client import MaskingClient
from fedpress_protocols.masking.messages import Reveal, Survivors, parse
from fedpress_protocols.plan import MaskingTerms, PhaseTerms, TrainingTerms
from fedpress_protocols.signatures import DeviceKey, to_base64url
from fedpress_strategies import from_config
from tests.flower.fleet import StreamingFleet, record_of, reply, step_of
from tests.flower.masked_fleet import FINE, HALF, STEPS, MaskedFleet, PolledFleet, strategy_of
from tests.flower.test_mod_and_strategy import SIZE, flat, run, start_arrays, step, training

logging.getLogger("flwr").setLevel(logging.ERROR)

HONEST = FINE.model_copy(update={"adversary": "semi-honest"})
TRUSTING = MaskingRules(adversary="semi-honest", reports_evaluations=True)


def go(fleet: MaskedFleet, strategy: Any, rounds: int = 1) -> list[np.ndarray]:
    """The model [SIZE] at the start and after each round."""
    models = [flat(start_arrays())]

    def seen(number: int, arrays: Any) -> None:
        if number:
            models.append(flat(arrays))

    run(strategy, fleet, rounds, evaluate_fn=seen)
    return models


def report_of(strategy: Any, number: int = 1) -> RoundReport:
    found: RoundReport = strategy.reports[number - 1]
    assert found.round == number
    assert {*found.included, *found.dropped} == {*found.asked}
    return found


# The sum


@pytest.mark.parametrize("adversary", ["malicious", "semi-honest"])
@pytest.mark.parametrize("inner", ["ours", "flower"])
def test_the_model_moves_by_the_mean_of_those_who_stay_whoever_falls_silent_when(
    adversary: str, inner: str, tmp_path: Path
) -> None:
    """One of fourteen after each step, in each of two rounds, half of them after having done their
    part; to the last bit what the same whole numbers give when they are added up in clear."""
    masking = FINE if adversary == "malicious" else HONEST
    gone = {
        (number, node): (at, how)
        for number, how in ((1, "unheard"), (2, "unreached"))
        for node, at in enumerate(["train", "shares", "masked", "reveal"], number)
    }
    rules = None if adversary == "malicious" else TRUSTING
    fleet = MaskedFleet(tmp_path, 14, training, gone=gone, rules=rules)
    made = (
        strategy_of(from_config({"id": "fedavg"}), masking=masking, fraction_evaluate=0.0)
        if inner == "ours"
        else strategy_of(flowers.FedAvg(fraction_evaluate=0.0), masking=masking)
    )
    models = go(fleet, made, 2)
    for number in (1, 2):
        report = report_of(made, number)
        assert report.included == tuple(n for n in range(1, 15) if not number <= n <= number + 2)
        mean = fleet.mean(number, report.included)
        before = models[number - 1]
        expected = (
            (before.astype(np.float64) + mean).astype(np.float32)
            if inner == "ours"
            else before + mean.astype(np.float32)
        )
        np.testing.assert_array_equal(models[number], expected)
        assert [report.dropped[n] for n in range(number, number + 3)] == [
            "no answer",
            "no answer to shares",
            "no answer to masked",
        ]
        steps = {"train": 1, "shares": 1, "masked": 1, "reveal": 1}
        if adversary == "malicious":
            steps["consent"] = 0
        assert report.silent == steps
        assert report.upload_bytes == 11 * fleet.payloads[number].packing.num_bytes
        assert report.session_up_bytes > 1000
        assert report.session_down_bytes > report.session_up_bytes
        assert not report.abandoned


@pytest.mark.parametrize(
    "inner", [flowers.FedAdam, flowers.FedYogi, flowers.FedAdagrad, flowers.FedAvgM]
)
def test_strategies_of_flower_that_take_a_mean_get_the_mean(inner: Any, tmp_path: Path) -> None:
    """As if every client had sent that mean in clear."""
    fleet = MaskedFleet(tmp_path, 4, training)
    made = strategy_of(inner(fraction_evaluate=0.0))
    models = go(fleet, made)
    mean = fleet.mean(1, [1, 2, 3, 4]).astype(np.float32)
    plain, arrays = inner(fraction_evaluate=0.0), start_arrays()
    after, start = {}, 0
    for name, array in arrays.items():
        after[name] = array + mean[start : start + array.size].reshape(array.shape)
        start += array.size
    asked = plain.configure_train(1, record_of(arrays), ConfigRecord(), fleet)
    found, _ = plain.aggregate_train(1, [reply(next(iter(asked)), after)])
    np.testing.assert_allclose(models[1], flat(found), rtol=1e-6)


def test_examples_weigh_and_are_summed_where_the_terms_say_so(tmp_path: Path) -> None:
    weighing = FINE.model_copy(update={"max_weight": 4})
    fleet = MaskedFleet(tmp_path, 4, training)
    made = strategy_of(flowers.FedAvg(fraction_evaluate=0.0), masking=weighing)
    models = go(fleet, made)
    assert report_of(made).num_examples == 12
    np.testing.assert_array_equal(models[1], fleet.mean(1, range(1, 5)).astype(np.float32))


def test_on_flowers_own_grids_silence_costs_a_phase_its_time_and_shares_too_many_none(
    tmp_path: Path,
) -> None:
    """One is silent while bodies are collected; another at the end, when enough others are not."""
    gone = {(1, 2): ("masked", "unreached"), (1, 3): ("reveal", "unreached")}
    brief = FINE.model_copy(
        update={"seconds": PhaseTerms(advertise=1, share=60, mask=1, consent=60, reveal=60)}
    )
    fleet = PolledFleet(tmp_path, 12, training, gone=gone)
    made = strategy_of(from_config({"id": "fedavg"}), masking=brief, fraction_evaluate=0.0)
    models = go(fleet, made)
    report = report_of(made)
    assert report.included == (1, *range(3, 13))
    assert report.silent == {"train": 0, "shares": 0, "masked": 1, "consent": 0, "reveal": 0}
    np.testing.assert_array_equal(models[1], fleet.mean(1, report.included).astype(np.float32))


# Nothing is lost, nothing is told


@settings(max_examples=12)
@given(seed=st.integers(0, 2**31 - 1), chance=st.sampled_from([0.1, 0.3, 0.6]))
def test_nothing_is_lost_whatever_step_a_client_falls_silent_at(
    tmp_path_factory: pytest.TempPathFactory, seed: int, chance: float
) -> None:
    """Included, waiting for its session's last word, in the residual: it is all that was computed,
    and what was included is what the models moved by."""
    folder, count, rounds = tmp_path_factory.mktemp("state"), 6, 4
    rng = np.random.default_rng(seed)
    gone = {
        (number, node): (str(rng.choice(STEPS)), str(rng.choice(["unreached", "unheard"])))
        for number in range(1, rounds + 1)
        for node in range(1, count + 1)
        if rng.random() < chance
    }
    lost: dict[int, np.ndarray] = defaultdict(lambda: np.zeros(SIZE))

    def discarded(discard: Discard) -> None:
        raise AssertionError(discard.reason)

    fleet = MaskedFleet(folder, count, training, gone=gone, on_discard=discarded)
    made = strategy_of(from_config({"id": "fedavg"}), fraction_evaluate=0.0)
    models = go(fleet, made, rounds)
    for number in range(1, rounds + 1):
        report = report_of(made, number)
        moved = models[number].astype(np.float64) - models[number - 1]
        if not report.included:
            assert not moved.any()
            assert report.abandoned
            continue
        np.testing.assert_allclose(moved, fleet.mean(number, report.included), atol=1e-6)
    for node in range(1, count + 1):
        own = sorted(number for number, each in fleet.plain if each == node)
        if not own:
            continue
        ledger = fleet.ledger(node)
        total = lost[node].copy()
        if ledger.residual is not None:
            total += ledger.residual
        for held in ledger.pending.values():
            total += held.update.dense()
        for number in own:
            if node in report_of(made, number).included and number != max(own):
                total += fleet.plain[number, node].update.dense()
        last = f"{max(own)}-{node}"
        assert last in ledger.pending
        computed = sum(flat(step(number, node)).astype(np.float64) for number in own)
        np.testing.assert_allclose(total, computed, atol=1e-5)


def test_a_client_commits_what_is_in_the_sum_though_its_last_words_were_lost(
    tmp_path: Path,
) -> None:
    """Its round's last word reaches it two rounds later: the message in between was lost too."""
    gone = {(1, 2): ("reveal", "unheard"), (2, 2): ("train", "unreached")}
    fleet = MaskedFleet(tmp_path, 5, training, gone=gone)
    made = strategy_of(from_config({"id": "fedavg"}), fraction_evaluate=0.0)
    go(fleet, made, 3)
    assert [2 in report_of(made, number).included for number in (1, 2, 3)] == [True, False, True]
    ledger = fleet.ledger(2)
    assert (ledger.included, ledger.not_included) == (1, 0)
    assert list(ledger.pending) == ["3-2"]


def test_no_message_and_no_state_of_flowers_holds_a_secret_or_an_update(tmp_path: Path) -> None:
    secrets: list[bytes] = []

    def looking(message: Message, reply: Message) -> Message:
        node = message.metadata.dst_node_id
        path = Path(str(fleet.contexts[node].state[envelope.RECORD]["account"]))
        data = path.with_suffix(".session").read_bytes()
        assert path.with_suffix(".session").stat().st_mode & 0o077 == 0
        assert path.with_suffix(".key").stat().st_mode & 0o077 == 0
        diary = _record_of(data)
        client = MaskingClient.from_bytes(diary, identity=fleet.key(node), policy=None)  # type: ignore[arg-type]
        state = client._state
        secrets.extend(
            each for each in (state.mask_secret, state.seed, state.channel_secret) if each
        )
        secrets.extend(mask.material for mask in state.masks)
        secrets.append(fleet.key(node).to_bytes())
        return reply

    lies = {(1, node, at): looking for node in range(1, 5) for at in STEPS}
    fleet = MaskedFleet(tmp_path, 4, training, lies=lies)
    made = strategy_of(from_config({"id": "fedavg"}), fraction_evaluate=0.0)
    go(fleet, made)
    assert len(report_of(made).included) == 4
    assert len({*secrets}) == 4 * 3 + 4 + 6 + 4  # own, self masks, pairs, keys
    bodies = [held.body for held in fleet.plain.values()]
    heard = [_bytes_of(reply.content) for reply in fleet.replies]
    heard += [_bytes_of(context.state) for context in fleet.contexts.values()]
    for told in heard:
        assert not any(secret in told for secret in secrets)
        assert not any(body in told for body in bodies)
    kinds = {name for reply in fleet.replies for name in reply.content}
    assert kinds == {envelope.RECORD, envelope.BODY_RECORD}


def _record_of(diary: bytes) -> bytes:
    return _Diary.from_bytes(diary).record


def _bytes_of(records: Any) -> bytes:
    return runtime.records_to_bytes(records)


# What a client does not do


def test_a_message_that_comes_again_gets_the_same_bytes(tmp_path: Path) -> None:
    fleet = MaskedFleet(tmp_path, 4, training)
    asked: dict[str, tuple[Message, bytes]] = {}

    def again(message: Message, reply: Message) -> Message:
        second = fleet.ask_again(message)
        asked[step_of(message)] = (message, _bytes_of(reply.content))
        assert _bytes_of(second.content) == _bytes_of(reply.content)
        return second

    fleet.lies = {(1, 2, at): again for at in STEPS}
    made = strategy_of(from_config({"id": "fedavg"}), fraction_evaluate=0.0)
    go(fleet, made)
    assert len(report_of(made).included) == 4
    assert [*asked] == list(STEPS)


def test_a_client_answers_for_one_set_of_survivors_and_for_no_other(tmp_path: Path) -> None:
    """Though the server signs both: the second answer would give away the other secret."""
    fleet = MaskedFleet(tmp_path, 6, training, rules=TRUSTING)
    made = strategy_of(from_config({"id": "fedavg"}), masking=HONEST, fraction_evaluate=0.0)
    go(fleet, made)
    assert len(report_of(made).included) == 6
    message = fleet.sent_to(2, "reveal")
    record: Any = message.content[envelope.RECORD]
    told = parse(record[envelope.HEARD])
    assert isinstance(told, Survivors)
    session = _session_of(fleet, 2)
    others = Survivors(frozenset(sorted(told.members)[:-1])).signed(made._host.key, session)
    record[envelope.HEARD] = others.to_bytes()
    answer = fleet.ask_again(message)
    first = next(
        each
        for each in fleet.replies
        if each.metadata.src_node_id == 2 and _said_in(each)[0] == Reveal.TAG
    )
    assert _said_in(answer) == _said_in(first)


def _said_in(reply: Message) -> bytes:
    said: Any = reply.content[envelope.RECORD]
    return bytes(said[envelope.SAID])


def _session_of(fleet: MaskedFleet, node: int) -> bytes:
    path = Path(str(fleet.contexts[node].state[envelope.RECORD]["account"]))
    record = _record_of(path.with_suffix(".session").read_bytes())
    client = MaskingClient.from_bytes(record, identity=fleet.key(node), policy=None)  # type: ignore[arg-type]
    return client.sid


def test_training_that_is_not_masked_is_refused_and_so_is_measuring(tmp_path: Path) -> None:
    fleet = MaskedFleet(tmp_path, 3, training, rules=MaskingRules())
    for made in (
        flowers.FedAvg(fraction_evaluate=0.0),
        FedpressStrategy(flowers.FedAvg(fraction_evaluate=0.0), Plan(SharedSupport(0.5))),
    ):
        run(made, fleet, 1)
    asked = [message for message in fleet.sent if step_of(message) == "train"]
    assert len(asked) == 6
    for message in asked:
        answer = fleet.ask_again(message)
        assert "not masked" in answer.error.reason
    message = asked[0]
    message.metadata.message_type = "evaluate"
    mod = masking_mod(state_dir=tmp_path, durable=False)
    with pytest.raises(IncompatiblePlan, match="stays with it"):
        mod(message, fleet.contexts[1], lambda message, context: message)


@pytest.mark.parametrize(
    ("rules", "why"),
    [
        (MaskingRules(min_support=10**6), "numbers of an update"),
        (MaskingRules(compressors=("randomk",)), "compresses by shared_support"),
    ],
)
def test_a_client_bounds_what_a_plan_may_choose(
    tmp_path: Path, rules: MaskingRules, why: str
) -> None:
    fleet = MaskedFleet(tmp_path, 3, training, rules=rules)
    run(strategy_of(flowers.FedAvg(fraction_evaluate=0.0)), fleet, 1)
    answer = fleet.ask_again(fleet.sent_to(1, "train"))
    assert "PlanDeclined" in answer.error.reason
    assert why in answer.error.reason
    assert fleet.plain == {}


def test_a_client_gives_a_run_no_more_updates_than_it_is_willing_to(tmp_path: Path) -> None:
    rules = MaskingRules(max_rounds=1, reports_evaluations=True)
    fleet = MaskedFleet(tmp_path, 3, training, rules=rules)
    run(strategy_of(flowers.FedAvg(fraction_evaluate=0.0)), fleet, 2)
    assert {number for number, _ in fleet.plain} == {1}


def test_a_client_of_masked_rounds_sends_nothing_compressed_in_the_clear(tmp_path: Path) -> None:
    fleet = MaskedFleet(tmp_path, 3, training)
    run(strategy_of(flowers.FedAvg(fraction_evaluate=0.0)), fleet, 1)
    fleet.app = ClientApp()
    fleet.app.train(mods=[compression_mod(state_dir=tmp_path)])(training)
    run(FedpressStrategy(flowers.FedAvg(fraction_evaluate=0.0), Plan(SharedSupport(0.5))), fleet, 1)
    last = [each for each in fleet.sent if step_of(each) == "train"][-1]
    answer = fleet.ask_again(last)
    assert "joined the task when it was masked" in answer.error.reason


def test_what_the_server_did_not_sign_is_not_believed(tmp_path: Path) -> None:
    """Somebody on the way changes what one client hears; it says so and drops out."""

    class Tampering(MaskedFleet):
        def push_messages(self, messages: Any) -> list[str]:
            messages = list(messages)
            for message in messages:
                if (step_of(message), message.metadata.dst_node_id) == (at, 2):
                    record: Any = message.content[envelope.RECORD]
                    name = envelope.OFFER if at == "train" else envelope.HEARD
                    data = record[name]
                    record[name] = data[:-1] + bytes([data[-1] ^ 1])
            return super().push_messages(messages)

    for at in STEPS:
        fleet = Tampering(tmp_path / at, 5, training)
        made = strategy_of(from_config({"id": "fedavg"}), fraction_evaluate=0.0)
        go(fleet, made)
        report = report_of(made)
        assert (2 in report.included) == (at in ("consent", "reveal"))
        assert "InvalidSignature" in {**report.dropped, **report.faults}[2]
        assert len(report.included) >= 4


# What is refused


def refused(match: str, inner: Any = None, plan: Plan | None = None, **options: Any) -> None:
    with pytest.raises(ConfigurationError, match=match):
        strategy_of(flowers.FedAvg() if inner is None else inner, plan, **options)


def test_what_cannot_work_under_masks_is_refused_with_the_reason(tmp_path: Path) -> None:
    for kind in (flowers.FedMedian, flowers.Krum, flowers.FedTrimmedAvg, flowers.QFedAvg):
        options = {"client_learning_rate": 0.1} if kind is flowers.QFedAvg else {}
        options |= {"num_malicious_nodes": 1} if kind is flowers.Krum else {}
        refused("looks at updates one by one", kind(**options))
    refused(
        "looks at updates one by one",
        flowers.DifferentialPrivacyServerSideFixedClipping(flowers.FedAvg(), 1.0, 1.0, 4),
    )
    refused("looks at updates one by one", from_config({"id": "median"}))
    refused("how old their models are", from_config({"id": "fedbuff"}))
    refused("no Flower app knows", from_config({"id": "fedprox"}))
    terms = TrainingTerms(learning_rate=0.1)
    refused("looks at updates one by one", from_config({"id": "qfedavg"}, terms))
    refused("does not commute", plan=Plan(TopK(0.1), minimum=3))
    refused("a sum of 2", plan=Plan(HALF, minimum=2))
    refused("a sum of 1", plan=Plan(HALF))


def test_a_round_of_too_few_is_refused_and_nobody_trains(tmp_path: Path) -> None:
    fleet = MaskedFleet(tmp_path, 4, training)
    made = strategy_of(flowers.FedAvg(fraction_evaluate=0.0), Plan(HALF, minimum=5))
    with pytest.raises(IncompatiblePlan, match="asks 4 clients"):
        go(fleet, made)
    assert not fleet.sent


def test_a_session_below_its_minimum_gives_no_sum_and_everything_back(tmp_path: Path) -> None:
    gone = {(1, node): ("masked", "unheard") for node in (1, 2)}
    fleet = MaskedFleet(tmp_path, 5, training, gone=gone)
    made = strategy_of(
        from_config({"id": "fedavg"}), Plan(HALF, minimum=4, seed=3), fraction_evaluate=0.0
    )
    models = go(fleet, made, 2)
    report = report_of(made)
    assert "too few" in report.abandoned
    assert not report.included
    assert "given up" in report.dropped[3]
    np.testing.assert_array_equal(models[1], models[0])
    assert len(report_of(made, 2).included) == 5
    for node in range(1, 6):
        ledger = fleet.ledger(node)
        assert (ledger.included, ledger.not_included) == (0, 1)


def test_terms_below_a_clients_own_are_declined_before_it_trains(tmp_path: Path) -> None:
    trained: list[int] = []

    def counting(message: Message, context: Any) -> Message:
        trained.append(context.node_id)
        return training(message, context)

    fleet = MaskedFleet(tmp_path, 4, counting)
    made = strategy_of(flowers.FedAvg(fraction_evaluate=0.0), masking=HONEST)
    go(fleet, made)
    assert not trained
    assert "no protection from a malicious server" in report_of(made).dropped[1]
    assert MaskingTerms().adversary == "malicious"


# Apps without the mod, and what models cost


def test_a_masked_rounds_metrics_count_the_models_that_went_down(tmp_path: Path) -> None:
    fleet = MaskedFleet(tmp_path, 4, training)
    made = strategy_of(flowers.FedAvg(fraction_evaluate=0.0))
    result = run(made, fleet, 1)
    models = [
        array
        for message in fleet.sent
        for record in message.content.array_records.values()
        for array in record.values()
    ]
    expected = sum(len(array.data) for array in models)
    assert expected >= 4 * 4 * SIZE
    assert report_of(made).download_bytes == expected
    assert result.train_metrics_clientapp[1]["fedpress-download-bytes"] == expected


@pytest.mark.parametrize("with_mod", [True, False], ids=["compression_mod", "no mod"])
@pytest.mark.parametrize("has_issuer", [True, False], ids=["certifies", "elsewhere"])
def test_an_app_without_masking_mod_is_told_what_it_lacks(
    with_mod: bool, has_issuer: bool, tmp_path: Path
) -> None:
    mods = [compression_mod(state_dir=tmp_path)] if with_mod else []
    app = ClientApp(mods=mods)
    app.train()(training)
    key = None if has_issuer else to_base64url(DeviceKey.generate().public)
    made = strategy_of(flowers.FedAvg(fraction_evaluate=0.0), authority=key)
    run(made, StreamingFleet(app, 4), 1)
    report = report_of(made)
    assert not report.included
    assert all("masking_mod" in why for why in report.dropped.values())
    if has_issuer:
        assert "see that the app has masking_mod" in report.abandoned
    if with_mod:
        assert all("and this app has compression_mod" in why for why in report.dropped.values())


def test_weights_of_a_masked_sum_are_whole_numbers(tmp_path: Path) -> None:
    def train(message: Message, context: Context) -> Message:
        answer = training(message, context)
        answer.content["metrics"]["num-examples"] = 0.5 if context.node_id == 1 else 2.0
        return answer

    fleet = MaskedFleet(tmp_path, 4, train)
    masking = FINE.model_copy(update={"max_weight": 8})
    made = strategy_of(flowers.FedAvg(fraction_evaluate=0.0), masking=masking)
    run(made, fleet, 1)
    report = report_of(made)
    assert report.included == (2, 3, 4)
    assert "masked sums weight by whole numbers" in report.dropped[1]
