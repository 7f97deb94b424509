"""Compression under Flower's own strategies and ours: nothing is lost, nothing is changed twice."""

import json
import logging
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import adaptiveclipping_mod, fixedclipping_mod
from flwr.serverapp import strategy as flowers

from fedpress_client.ledger_records import Discard
from fedpress_compression.compressors.cafe import Cafe
from fedpress_compression.compressors.delta import Delta
from fedpress_compression.compressors.dgc import Dgc
from fedpress_compression.compressors.ef21 import EF21
from fedpress_compression.compressors.error_feedback import ErrorFeedback
from fedpress_compression.compressors.none import Uncompressed
from fedpress_compression.compressors.randomk import RandomK
from fedpress_compression.compressors.topk import TopK
from fedpress_flower import envelope
from fedpress_flower.client import SEED, STATE_DIR, compression_mod
from fedpress_flower.server import FedpressStrategy, MaskedStrategy, Plan
from fedpress_protocols.errors import ConfigurationError, IncompatiblePlan
from fedpress_protocols.plan import TrainingTerms
from fedpress_strategies import from_config
from tests.flower.fleet import Fleet, StreamingFleet, record_of, reply

SHAPES = {"w": (12, 10), "b": (10,)}
SIZE = 130
FEEDBACK = ErrorFeedback(TopK(fraction=0.05))

logging.getLogger("flwr").setLevel(logging.ERROR)


def start_arrays(value: float = 0.0) -> dict[str, np.ndarray]:
    return {name: np.full(shape, value, np.float32) for name, shape in SHAPES.items()}


def step(number: int, node: int) -> dict[str, np.ndarray]:
    """What a client's training makes of any model in a round."""
    rng = np.random.default_rng([number, node])
    return {name: rng.normal(0, 0.1, s).astype(np.float32) for name, s in SHAPES.items()}


def flat(arrays: Any) -> np.ndarray:
    values = [a.numpy() if hasattr(a, "numpy") else a for a in arrays.values()]
    return np.concatenate([value.ravel() for value in values])


def training(message: Message, context: Context) -> Message:
    number = int(message.content["config"]["server-round"])
    model = {name: array.numpy() for name, array in message.content["arrays"].items()}
    change = step(number, context.node_id)
    after = {name: model[name] + change[name] for name in model}
    return reply(message, after, train_loss=0.5 + 0.1 * context.node_id)


def measuring(message: Message, context: Context) -> Message:
    metrics = MetricRecord({"num-examples": 2, "mean": float(context.node_id)})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


def app_of(*mods: Any, train: Callable[[Message, Context], Message] = training) -> ClientApp:
    app = ClientApp()
    app.train(mods=list(mods))(train)
    app.evaluate()(measuring)
    return app


def fleet_of(folder: Path, count: int, **options: Any) -> Fleet:
    app = app_of(compression_mod(state_dir=folder, seed=1, durable=False))
    return Fleet(app, count, **options)


def run(strategy: Any, fleet: Fleet, rounds: int, arrays: Any = None, **options: Any) -> Any:
    first = record_of(start_arrays() if arrays is None else arrays)
    return strategy.start(fleet, first, num_rounds=rounds, timeout=0.3, **options)


# Nothing is lost


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**31 - 1),
    compressor=st.sampled_from(
        [FEEDBACK, ErrorFeedback(RandomK(fraction=0.2)), Cafe(TopK(fraction=0.1)), TopK(0.1)]
    ),
)
def test_nothing_is_lost_whatever_does_not_arrive(
    tmp_path_factory: pytest.TempPathFactory, seed: int, compressor: Any
) -> None:
    """Included, waiting, in the residual or reported as lost: it is everything computed."""
    folder, count, rounds = tmp_path_factory.mktemp("state"), 4, 6
    chance = np.random.default_rng(seed)
    fates = {
        (call, node): str(chance.choice(["answers", "unreached", "unheard"], p=[0.6, 0.2, 0.2]))
        for call in range(1, rounds + 1)
        for node in range(1, count + 1)
    }
    lost: dict[int, np.ndarray] = defaultdict(lambda: np.zeros(SIZE))
    at = {"node": 0}

    def discarded(discard: Discard) -> None:
        lost[at["node"]] += discard.vector

    computed: dict[int, np.ndarray] = defaultdict(lambda: np.zeros(SIZE))
    uploads: dict[tuple[int, int], np.ndarray] = {}

    def noting(message: Message, context: Context, call_next: Any) -> Message:
        at["node"] = context.node_id
        number = int(message.content["config"]["server-round"])
        answer = call_next(message, context)
        computed[context.node_id] += flat(step(number, context.node_id))
        held = fleet.ledger(context.node_id).pending[f"{number}-{context.node_id}"]
        uploads[number, context.node_id] = held.update.dense()
        return answer

    mod = compression_mod(state_dir=folder, seed=1, durable=False, on_discard=discarded)
    fleet = StreamingFleet(app_of(noting, mod), count, fate=lambda call, node: fates[call, node])
    strategy = FedpressStrategy(
        from_config({"id": "fedavg"}), Plan(compressor, seed=seed), fraction_evaluate=0.0
    )
    result = run(strategy, fleet, rounds)
    reports = {report.round: report for report in strategy.reports}
    for node in range(1, count + 1):
        if node not in computed:
            continue
        ledger = fleet.ledger(node)
        total = lost[node].copy()
        total += np.zeros(SIZE) if ledger.residual is None else ledger.residual
        for number, report in reports.items():
            if node in report.included or f"{number}-{node}" in ledger.pending:
                total += uploads[number, node]
        np.testing.assert_allclose(total, computed[node], atol=2e-6)
    moved = np.zeros(SIZE)
    for report in strategy.reports:
        assert set(report.included) == {
            n for n in report.asked if fates[report.round, n] == "answers"
        }
        if report.included:
            moved += np.mean([uploads[report.round, node] for node in report.included], axis=0)
    if any(report.included for report in strategy.reports):
        np.testing.assert_allclose(flat(result.arrays), moved, atol=1e-6)


def test_the_residual_is_in_a_file_and_the_state_says_where(tmp_path: Path) -> None:
    fleet = fleet_of(tmp_path, 2)
    run(FedpressStrategy(flowers.FedAvg(fraction_evaluate=0.0), Plan(FEEDBACK)), fleet, 2)
    state = fleet.contexts[1].state
    assert list(state) == ["fedpress"]
    assert state["fedpress"].count_bytes() < 400
    assert fleet.ledger(1).residual is not None
    assert Path(str(state["fedpress"]["account"])).is_relative_to(tmp_path)


def test_the_runs_configuration_says_where_and_by_which_seed(tmp_path: Path) -> None:
    found = []
    for folder in ("a", "b"):
        fleet = Fleet(
            app_of(compression_mod(durable=False)),
            2,
            run_config={STATE_DIR: str(tmp_path / folder), SEED: 5},
        )
        plan = Plan(RandomK(fraction=0.3, shared=False), seed=2)
        found.append(flat(run(FedpressStrategy(flowers.FedAvg(), plan), fleet, 2).arrays))
        assert fleet.ledger(1).included == 1
    one, other = found
    assert np.array_equal(one, other)


def test_a_message_that_a_later_one_overtook_is_refused(tmp_path: Path) -> None:
    fleet = fleet_of(tmp_path, 2)
    run(FedpressStrategy(flowers.FedAvg(fraction_evaluate=0.0), Plan(FEEDBACK)), fleet, 2)
    before = fleet.ledger(1)
    late = next(m for m in fleet.sent if m.metadata.dst_node_id == 1)
    with pytest.raises(Exception, match="round 1 came after round 2"):
        fleet.app(late, fleet.contexts[1])
    assert fleet.ledger(1).to_bytes() == before.to_bytes()


def test_a_message_that_comes_twice_gets_the_same_bytes(tmp_path: Path) -> None:
    from fedpress.simulate import flower_runtime as runtime

    fleet = fleet_of(tmp_path, 2)
    strategy = FedpressStrategy(flowers.FedAvg(), Plan(FEEDBACK))
    arrays = record_of(start_arrays())
    message = next(iter(strategy.configure_train(1, arrays, ConfigRecord(), fleet)))
    node = message.metadata.dst_node_id
    bodies = [
        fleet.app(runtime.copied(message), fleet.contexts[node]).content["arrays"]["upload"].data
        for _ in range(2)
    ]
    assert bodies[0] == bodies[1]
    assert len(fleet.ledger(node).pending) == 1


def test_uploads_travel_as_an_array_of_their_own_type(tmp_path: Path) -> None:
    fleet = fleet_of(tmp_path, 2)
    strategy = FedpressStrategy(flowers.FedAvg(), Plan(FEEDBACK))
    messages = list(strategy.configure_train(1, record_of(start_arrays()), ConfigRecord(), fleet))
    answer = fleet.app(messages[0], fleet.contexts[messages[0].metadata.dst_node_id])
    (array,) = answer.content["arrays"].values()
    assert (array.stype, array.dtype) == (envelope.STYPE, "uint8")
    assert len(array.data) < SIZE
    with pytest.raises(TypeError, match="Unsupported"):
        array.numpy()


def test_a_message_of_another_strategy_passes_as_it_is(tmp_path: Path) -> None:
    fleet = fleet_of(tmp_path, 3)
    plain = run(flowers.FedAvg(), fleet, 2)
    bare = run(flowers.FedAvg(), Fleet(app_of(), 3), 2)
    assert np.array_equal(flat(plain.arrays), flat(bare.arrays))
    assert not fleet.contexts[1].state
    assert not list(tmp_path.iterdir())


# Flower's strategies

CLIPPED = {"noise_multiplier": 0.1, "clipping_norm": 1.0, "num_sampled_clients": 8}
ADAPTIVE = {"noise_multiplier": 0.1, "num_sampled_clients": 8, "clipped_count_stddev": 0.4}
STRATEGIES: dict[str, tuple[Callable[[], Any], tuple[Any, ...]]] = {
    "FedAvg": (lambda: flowers.FedAvg(), ()),
    "FedAvgM": (lambda: flowers.FedAvgM(server_momentum=0.5), ()),
    "FedProx": (lambda: flowers.FedProx(proximal_mu=0.1), ()),
    "FedAdagrad": (lambda: flowers.FedAdagrad(), ()),
    "FedAdam": (lambda: flowers.FedAdam(), ()),
    "FedYogi": (lambda: flowers.FedYogi(), ()),
    "FedMedian": (lambda: flowers.FedMedian(), ()),
    "FedTrimmedAvg": (lambda: flowers.FedTrimmedAvg(beta=0.2), ()),
    "Krum": (lambda: flowers.Krum(num_malicious_nodes=1), ()),
    "MultiKrum": (lambda: flowers.MultiKrum(num_malicious_nodes=1, num_nodes_to_select=4), ()),
    "Bulyan": (lambda: flowers.Bulyan(num_malicious_nodes=1), ()),
    "QFedAvg": (lambda: flowers.QFedAvg(client_learning_rate=0.1), ()),
    "DP server fixed": (
        lambda: flowers.DifferentialPrivacyServerSideFixedClipping(flowers.FedAvg(), **CLIPPED),
        (),
    ),
    "DP client fixed": (
        lambda: flowers.DifferentialPrivacyClientSideFixedClipping(flowers.FedAvg(), **CLIPPED),
        (fixedclipping_mod,),
    ),
    "DP server adaptive": (
        lambda: flowers.DifferentialPrivacyServerSideAdaptiveClipping(flowers.FedAvg(), **ADAPTIVE),
        (),
    ),
    "DP client adaptive": (
        lambda: flowers.DifferentialPrivacyClientSideAdaptiveClipping(flowers.FedAvg(), **ADAPTIVE),
        (adaptiveclipping_mod,),
    ),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_any_strategy_of_flowers_does_what_it_did(name: str, tmp_path: Path) -> None:
    """With nothing lost on the way, wrapped and bare come to the same models."""
    make, mods = STRATEGIES[name]
    np.random.seed(3)  # noqa: NPY002 - Flower's noise
    bare = run(make(), Fleet(app_of(*mods), 8), 3)
    np.random.seed(3)  # noqa: NPY002
    mod = compression_mod(state_dir=tmp_path, durable=False)
    wrapped = FedpressStrategy(make(), Plan(Uncompressed()))
    result = run(wrapped, Fleet(app_of(mod, *mods), 8), 3)
    np.testing.assert_allclose(flat(result.arrays), flat(bare.arrays), atol=2e-6)
    assert [len(report.included) for report in wrapped.reports] == [8, 8, 8]
    measured = result.train_metrics_clientapp[2]
    assert measured["train_loss"] == pytest.approx(
        bare.train_metrics_clientapp[2]["train_loss"], rel=1e-6
    )
    assert measured["fedpress-upload-bytes"] == wrapped.reports[1].upload_bytes
    assert result.evaluate_metrics_clientapp[3]["mean"] == pytest.approx(4.5)


@pytest.mark.parametrize("name", ["FedAvg", "FedAdam", "Krum"])
def test_compressed_they_still_learn(name: str, tmp_path: Path) -> None:
    fleet = fleet_of(tmp_path, 8)
    strategy = FedpressStrategy(STRATEGIES[name][0](), Plan(FEEDBACK))
    result = run(strategy, fleet, 3)
    assert np.isfinite(flat(result.arrays)).all()
    assert flat(result.arrays).any()
    assert all(0 < report.nmse < 1 for report in strategy.reports)
    assert all(report.upload_bytes < 8 * SIZE for report in strategy.reports)


@pytest.mark.parametrize("name", ["FedMedian", "FedTrimmedAvg", "Bulyan", "DP around FedMedian"])
def test_rules_for_single_coordinates_refuse_those_that_clients_choose(
    name: str, tmp_path: Path
) -> None:
    """The median of client-chosen top-k is zero nearly everywhere."""

    def made() -> Any:
        if name in STRATEGIES:
            return STRATEGIES[name][0]()
        wrapper = flowers.DifferentialPrivacyServerSideFixedClipping
        return wrapper(flowers.FedMedian(), **CLIPPED)

    for refused in (FEEDBACK, TopK(0.1), RandomK(fraction=0.2, shared=False)):
        fleet = fleet_of(tmp_path / str(hash(refused)), 8)
        with pytest.raises(IncompatiblePlan, match="coordinate-wise rules need dense or shared"):
            run(FedpressStrategy(made(), Plan(refused)), fleet, 1)
        assert not fleet.sent
    fleet = fleet_of(tmp_path / "shared", 8)
    strategy = FedpressStrategy(made(), Plan(ErrorFeedback(RandomK(fraction=0.2))))
    run(strategy, fleet, 2)
    assert [len(report.included) for report in strategy.reports] == [8, 8]


@pytest.mark.parametrize("name", ["DP client fixed", "DP client adaptive"])
@pytest.mark.parametrize("plan", [Plan(), Plan(FEEDBACK), Plan(Dgc())], ids=["auto", "ef", "dgc"])
def test_noise_for_what_clients_clip_refuses_error_feedback(name: str, plan: Plan) -> None:
    """A client would add to a clipped update what it held back, and send more than the clip."""
    inner = STRATEGIES[name][0]()
    with pytest.raises(IncompatiblePlan, match="noise would be too small") as caught:
        FedpressStrategy(inner, plan)
    assert "ServerSide" in (caught.value.hint or "")
    around = flowers.DifferentialPrivacyServerSideFixedClipping(inner, **CLIPPED)
    with pytest.raises(IncompatiblePlan, match="noise would be too small"):
        FedpressStrategy(around, plan)
    FedpressStrategy(inner, Plan(TopK(0.02)))


def test_trees_are_refused() -> None:
    strategy = FedpressStrategy(flowers.FedXgbBagging(), Plan(FEEDBACK))
    trees = ArrayRecord({"0": Array(np.zeros(9, np.uint8))})
    with pytest.raises(ConfigurationError, match="nothing to compress"):
        strategy.start(Fleet(app_of(), 2), trees, num_rounds=1)


def test_a_model_keeps_its_types(tmp_path: Path) -> None:
    """Flower averages integers to float64; here they stay, and so does float64."""
    arrays = {
        "half": np.zeros(3, np.float16),
        "double": np.zeros(4),
        "count": np.array(5, np.int64),
    }

    def train(message: Message, context: Context) -> Message:
        model = {name: array.numpy() for name, array in message.content["arrays"].items()}
        return reply(message, {n: np.asarray(a + a.dtype.type(1)) for n, a in model.items()})

    for inner in (flowers.FedAvg(), from_config({"id": "fedavg"})):
        app = app_of(compression_mod(state_dir=tmp_path / str(id(inner))), train=train)
        strategy = FedpressStrategy(inner, Plan(Uncompressed()))
        found = run(strategy, Fleet(app, 3), 2, arrays).arrays
        assert {n: str(a.numpy().dtype) for n, a in found.items()} == {
            "half": "float16",
            "double": "float64",
            "count": "int64",
        }
        assert found["half"].numpy().tolist() == [2.0] * 3
        assert found["count"].numpy() == 5


# Ours


def test_ours_and_flowers_mean_are_the_same_mean(tmp_path: Path) -> None:
    found = []
    for inner in (flowers.FedAvg(), from_config({"id": "fedavg"})):
        fleet = fleet_of(tmp_path / str(id(inner)), 5)
        found.append(flat(run(FedpressStrategy(inner, Plan(FEEDBACK, seed=1)), fleet, 4).arrays))
    one, other = found
    np.testing.assert_allclose(one, other, atol=1e-6)


@pytest.mark.parametrize(
    "config",
    [
        {"id": "fedavgm", "momentum": 0.5},
        {"id": "fedadam"},
        {"id": "median"},
        {"id": "krum", "byzantine": 0.1},
        {"id": "trimmed_mean"},
    ],
    ids=lambda config: str(config["id"]),
)
def test_our_strategies_run_under_flower(config: dict[str, Any], tmp_path: Path) -> None:
    found = []
    for turn in range(2):
        fleet = fleet_of(tmp_path / str(turn), 8)
        compressor = ErrorFeedback(RandomK(fraction=0.2))
        strategy = FedpressStrategy(from_config(config), Plan(compressor, minimum=6, seed=1))
        found.append(flat(run(strategy, fleet, 3).arrays))
        assert all(len(report.included) == 8 for report in strategy.reports)
    one, other = found
    assert np.array_equal(one, other)
    assert found[0].any()


def test_a_strategy_that_needs_a_number_takes_it_from_the_metrics(tmp_path: Path) -> None:
    def train(message: Message, context: Context) -> Message:
        return reply(message, start_arrays(1.0), loss=0.25 * context.node_id)

    app = app_of(compression_mod(state_dir=tmp_path), train=train)
    strategy = FedpressStrategy(
        from_config({"id": "qfedavg"}, TrainingTerms(learning_rate=0.1)), Plan(Uncompressed())
    )
    run(strategy, Fleet(app, 3), 1)
    assert strategy.reports[0].included == (1, 2, 3)


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"id": "fedprox", "mu": 0.1}, "proximal"),
        ({"id": "fedper", "personal": ["b"]}, "personal layers"),
    ],
    ids=["fedprox", "fedper"],
)
def test_what_no_flower_app_knows_is_refused(config: dict[str, Any], complaint: str) -> None:
    with pytest.raises(IncompatiblePlan, match=complaint):
        FedpressStrategy(from_config(config), Plan(FEEDBACK))


def test_a_rate_that_only_the_app_could_correct_is_refused(tmp_path: Path) -> None:
    fleet = fleet_of(tmp_path, 2)
    strategy = FedpressStrategy(flowers.FedAvg(), Plan(FEEDBACK))
    message = next(
        iter(strategy.configure_train(1, record_of(start_arrays()), ConfigRecord(), fleet))
    )
    record = message.content[envelope.RECORD]
    plan = json.loads(record[envelope.PLAN])
    plan["training"]["learning_rate"] = 0.1
    plan["profiles"][0]["learning_rate_factor"] = 1.1
    record[envelope.PLAN] = json.dumps(plan)
    with pytest.raises(IncompatiblePlan, match="a Flower app sets for itself"):
        fleet.app(message, fleet.contexts[message.metadata.dst_node_id])


def test_a_compressor_in_place_of_a_plan_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="the plan is a TopK, not a Plan"):
        FedpressStrategy(flowers.FedAvg(), TopK(0.01))  # type: ignore[arg-type]


LEGACY = type("FedAvg", (), {"__module__": "flwr.server.strategy.fedavg"})


@pytest.mark.parametrize(
    ("inner", "wrapped", "hint"),
    [
        (FEEDBACK, "a ErrorFeedback", "plan=Plan(ErrorFeedback(...))"),
        (Plan(), "a Plan", "(plan=Plan(...))"),
        ("fedavg", "'fedavg'", "from_config({\"id\": 'fedavg'})"),
        (flowers.FedAvg, "the class FedAvg", "(FedAvg(...), plan)"),
        (LEGACY(), "a FedAvg", "older API"),
    ],
    ids=["compressor", "plan", "name", "class", "legacy"],
)
@pytest.mark.parametrize("kind", [FedpressStrategy, MaskedStrategy])
def test_what_is_no_strategy_is_refused_at_once(
    kind: Any, inner: Any, wrapped: str, hint: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        kind(inner)
    assert f"{kind.__name__} is to wrap {wrapped}, where a strategy" in caught.value.detail
    assert hint in (caught.value.hint or "")


@pytest.mark.parametrize(
    "fields",
    [
        {"compressor": "topk"},
        {"compressor": TopK},
        {"task": "two words"},
        {"minimum": 0},
        {"max_abs": float("nan")},
        {"max_abs": 0},
        {"max_abs": "1"},
        {"max_examples": 10**12},
        {"max_examples": 0.5},
        {"seed": -1},
        {"auto": "x"},
        {"restricted": "yes"},
        {"privacy": {}},
    ],
    ids=str,
)
def test_a_plan_refuses_what_no_round_could_begin_with(fields: dict[str, Any]) -> None:
    ((name, value),) = fields.items()
    found = re.escape(f"the plan's {name} is {value!r}, where")
    with pytest.raises(ConfigurationError, match=found):
        Plan(**fields)


def test_a_downlink_is_terms_or_whether_there_is_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="downlink is 'x', where"):
        FedpressStrategy(flowers.FedAvg(), Plan(FEEDBACK), downlink="x")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="masking is a dict, where"):
        MaskedStrategy(flowers.FedAvg(), None, {})  # type: ignore[arg-type]
    strategy = FedpressStrategy(flowers.FedAvg(), Plan(FEEDBACK), downlink=True)
    run(strategy, fleet_of(tmp_path, 2), 1)
    (report,) = strategy.reports
    assert report.included == (1, 2)
    assert report.coded_download_bytes == report.download_bytes > 0


def test_a_plan_that_needs_what_messages_do_not_carry_is_refused() -> None:
    with pytest.raises(IncompatiblePlan, match="reads own"):
        Plan(Delta(TopK(0.1)))
    with pytest.raises(IncompatiblePlan, match="very mean"):
        FedpressStrategy(from_config({"id": "fedadam"}), Plan(EF21(TopK(0.1))))
    with pytest.raises(IncompatiblePlan, match="very mean"):
        FedpressStrategy(flowers.FedAvgM(), Plan(EF21(TopK(0.1))))


def test_settings_for_sampling_belong_to_ours() -> None:
    with pytest.raises(ConfigurationError, match="give them to FedAvg"):
        FedpressStrategy(flowers.FedAvg(), Plan(FEEDBACK), fraction_train=0.5)


def test_a_compressor_that_reads_earlier_models_is_sent_them(tmp_path: Path) -> None:
    fleet = fleet_of(tmp_path, 3)
    strategy = FedpressStrategy(from_config({"id": "fedavg"}), Plan(Cafe(TopK(0.1)), seed=1))
    run(strategy, fleet, 3)
    (last,) = [m for m in fleet.sent if m.metadata.dst_node_id == 1][-2:-1]
    assert "fedpress.previous" in last.content
    assert [len(report.included) for report in strategy.reports] == [3, 3, 3]


# Clients that do not do as they should


def odd(message: Message, context: Context) -> Message:
    answer = training(message, context)
    match context.node_id:
        case 1:
            raise RuntimeError("no data here")
        case 2:
            answer.content["arrays"]["w"] = Array(np.full(SHAPES["w"], np.nan, np.float32))
        case 3:
            answer.content["arrays"]["w"] = Array(np.zeros((2, 2), np.float32))
        case 4:
            del answer.content["metrics"]["num-examples"]
        case 5:
            answer.content["metrics"]["num-examples"] = float("nan")
        case 6:
            del answer.content["arrays"]["b"]
        case 7:
            answer.content["arrays"]["w"] = Array(np.full(SHAPES["w"], 1e6, np.float32))
        case 8:
            del answer.content["arrays"]
    return answer


WHY = {
    1: "no data here",
    2: "NaN or infinity",
    3: "shape",
    4: "positive number",
    5: "positive number|not finite",
    6: "missing|other tensors",
    7: "larger than",
    8: "array records",
    9: "no answer",
}


@pytest.mark.parametrize("inner", ["flower", "ours"])
@pytest.mark.parametrize("with_mod", [True, False], ids=["mod", "bare"])
def test_a_client_that_does_not_is_dropped_with_the_reason(
    inner: str, with_mod: bool, tmp_path: Path
) -> None:
    mods = [compression_mod(state_dir=tmp_path, on_discard=lambda d: None)] if with_mod else []
    fleet = Fleet(
        app_of(*mods, train=odd),
        12,
        fate=lambda call, node: "unheard" if node == 9 else "answers",
    )
    made = (
        flowers.FedAvg(fraction_evaluate=0.0)
        if inner == "flower"
        else from_config({"id": "fedavg"})
    )
    options: dict[str, Any] = {} if inner == "flower" else {"fraction_evaluate": 0.0}
    strategy = FedpressStrategy(made, Plan(Uncompressed(), max_abs=100.0), **options)
    result = run(strategy, fleet, 2)
    for report in strategy.reports:
        expected = {10, 11, 12}
        if with_mod:  # clipped to the plan's bound, and what is left over is reported
            expected |= {7}
        assert set(report.included) == expected, report.dropped
        for node, reason in report.dropped.items():
            assert re.search(WHY[node], reason), (node, reason)
    assert np.isfinite(flat(result.arrays)).all()


def weighing(*weights: float) -> Callable[[Message, Context], Message]:
    """Client i makes of everything i, and reports the i-th weight."""

    def train(message: Message, context: Context) -> Message:
        made = start_arrays(float(context.node_id))
        return reply(message, made, **{"num-examples": weights[context.node_id - 1]})

    return train


@pytest.mark.parametrize("with_mod", [True, False], ids=["mod", "bare"])
def test_our_strategies_refuse_weights_that_they_would_round(
    with_mod: bool, tmp_path: Path
) -> None:
    mods = [compression_mod(state_dir=tmp_path)] if with_mod else []
    app = app_of(*mods, train=weighing(0.9, 3.0, 0.1))
    strategy = FedpressStrategy(from_config({"id": "fedavg"}), Plan(Uncompressed()))
    run(strategy, Fleet(app, 3), 1)
    (report,) = strategy.reports
    assert report.included == (2,)
    assert "'num-examples' is 0.9, and fedpress's strategies weight by whole" in report.dropped[1]
    flower = FedpressStrategy(flowers.FedAvg(), Plan(Uncompressed(), seed=1))
    result = run(flower, Fleet(app_of(train=weighing(0.9, 0.1)), 2), 1)
    assert flat(result.arrays) == pytest.approx(1.1)


@pytest.mark.parametrize("with_mod", [True, False], ids=["mod", "bare"])
def test_a_weight_beyond_the_plans_most_is_warned_of(
    with_mod: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mods = [compression_mod(state_dir=tmp_path)] if with_mod else []
    app = app_of(*mods, train=weighing(2**33, 50_000))
    plan = Plan(Uncompressed(), max_examples=100_000)
    strategy = FedpressStrategy(from_config({"id": "fedavg"}), plan)
    result = run(strategy, Fleet(app, 2), 1)
    assert flat(result.arrays) == pytest.approx(4 / 3, rel=1e-4)
    assert "1 clients, the first of them node 1, have more examples than" in caplog.text


def test_an_array_that_comes_back_in_another_type_is_named_with_it(tmp_path: Path) -> None:
    def train(message: Message, context: Context) -> Message:
        model = {name: array.numpy() for name, array in message.content["arrays"].items()}
        if context.node_id == 1:
            model["count"] = model["count"].astype(np.float64)
        if context.node_id == 2:
            model["w"] = model["w"].astype(np.int64)
        return reply(message, model)

    app = app_of(compression_mod(state_dir=tmp_path), train=train)
    strategy = FedpressStrategy(flowers.FedAvg(), Plan(FEEDBACK))
    run(strategy, Fleet(app, 3), 1, {**start_arrays(), "count": np.arange(2)})
    (report,) = strategy.reports
    assert "tensor 'count' is float32, and int64 was sent" in report.dropped[1]
    assert "tensor 'w' is int64, and float32 was sent" in report.dropped[2]
    assert report.included == (3,)


def test_forged_uploads_are_dropped_and_the_round_goes_on(tmp_path: Path) -> None:
    def forging(message: Message, context: Context, call_next: Any) -> Message:
        answer = call_next(message, context)
        array = answer.content["arrays"]["upload"]
        data = {1: array.data[:-1], 2: b"", 3: b"\x09" + array.data[1:], 4: array.data + b"x"}
        forged = data.get(context.node_id, array.data)
        answer.content["arrays"] = ArrayRecord(
            {"upload": Array("uint8", (len(forged),), envelope.STYPE, forged)}
        )
        if context.node_id == 5:
            answer.content["fedpress"]["assignment"] = "1-6"
        return answer

    for inner in (
        flowers.FedAvg(),
        from_config({"id": "fedavg"}),
        from_config({"id": "geometric_median"}),
    ):
        mod = compression_mod(state_dir=tmp_path / str(id(inner)))
        strategy = FedpressStrategy(inner, Plan(FEEDBACK, minimum=3))
        fleet = Fleet(app_of(forging, mod), 8)
        run(strategy, fleet, 2)
        assert [report.included for report in strategy.reports] == [(6, 7, 8)] * 2
        assert fleet.ledger(1).not_included == 1


def test_differential_privacy_skips_a_round_that_somebody_failed(tmp_path: Path) -> None:
    """Its noise is made for everybody who was asked."""
    strategy = FedpressStrategy(STRATEGIES["DP server fixed"][0](), Plan(Uncompressed()))
    app = app_of(compression_mod(state_dir=tmp_path), train=odd)
    result = run(strategy, Fleet(app, 8), 1)
    assert not result.arrays
    assert strategy.reports[0].included == ()


def test_a_round_of_too_few_leaves_the_model_as_it_is(tmp_path: Path) -> None:
    fleet = fleet_of(tmp_path, 4, fate=lambda call, node: "answers" if node < 3 else "unreached")
    strategy = FedpressStrategy(
        from_config({"id": "fedavg"}), Plan(FEEDBACK, minimum=3), fraction_evaluate=0.0
    )
    result = run(strategy, fleet, 2)
    assert not result.arrays
    assert "only 2 of at least 3" in strategy.reports[0].dropped[1]
    assert fleet.ledger(1).not_included == 1


def test_metrics_by_other_names_do_not_stop_a_strategy_of_flowers(tmp_path: Path) -> None:
    def train(message: Message, context: Context) -> Message:
        extra = {"extra": 1.0} if context.node_id == 2 else {}
        return reply(message, start_arrays(1.0), **extra)

    strategy = FedpressStrategy(flowers.FedAvg(), Plan(Uncompressed()))
    run(strategy, Fleet(app_of(compression_mod(state_dir=tmp_path), train=train), 4), 1)
    assert strategy.reports[0].included == (1, 3, 4)
    assert "most measured" in strategy.reports[0].dropped[2]


@pytest.mark.parametrize("inner", ["flower", "ours"])
@pytest.mark.parametrize("with_mod", [True, False], ids=["mod", "bare"])
def test_a_metric_that_is_no_number_costs_the_metric_and_not_the_update(
    inner: str, with_mod: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def train(message: Message, context: Context) -> Message:
        loss = float("nan") if context.node_id == 2 else float(context.node_id)
        return reply(message, start_arrays(float(context.node_id)), loss=loss, each=[1.0, 2.0])

    mods = [compression_mod(state_dir=tmp_path)] if with_mod else []
    made = flowers.FedAvg() if inner == "flower" else from_config({"id": "fedavg"})
    strategy = FedpressStrategy(made, Plan(Uncompressed()))
    result = run(strategy, Fleet(app_of(*mods, train=train), 4), 1)
    (report,) = strategy.reports
    assert report.included == (1, 2, 3, 4)
    assert flat(result.arrays) == pytest.approx(2.5)
    assert report.left_out == {2: ("loss",)}
    measured = result.train_metrics_clientapp[1]
    assert measured["loss"] == pytest.approx((1 + 3 + 4) / 3)
    assert measured["each"] == pytest.approx([1.0, 2.0])
    assert "node 2 measured loss that is NaN" in caplog.text


def test_a_loss_that_the_strategy_weighs_by_has_to_be_a_number(tmp_path: Path) -> None:
    def train(message: Message, context: Context) -> Message:
        loss = float("inf") if context.node_id == 2 else 0.5
        return reply(message, start_arrays(1.0), train_loss=loss)

    strategy = FedpressStrategy(STRATEGIES["QFedAvg"][0](), Plan(Uncompressed()))
    run(strategy, Fleet(app_of(train=train), 4), 1)
    assert strategy.reports[0].included == (1, 3, 4)
    assert "needs 'train_loss', which is inf" in strategy.reports[0].dropped[2]


def test_with_a_seed_the_cohort_hangs_on_the_round_alone(tmp_path: Path) -> None:
    found = []
    for turn in range(2):
        fleet = fleet_of(tmp_path / str(turn), 20)
        inner = flowers.FedAvg(fraction_train=0.3, fraction_evaluate=0.0)
        strategy = FedpressStrategy(inner, Plan(FEEDBACK, seed=4))
        run(strategy, fleet, 3)
        found.append([report.asked for report in strategy.reports])
    assert found[0] == found[1]
    assert len(set(found[0])) == 3


@pytest.mark.parametrize("made", [ErrorFeedback(RandomK(unbiased=True)), ErrorFeedback(EF21())])
def test_a_plan_refuses_feedback_that_diverges(made: ErrorFeedback) -> None:
    with pytest.raises(IncompatiblePlan, match="without error_feedback, or a method that contract"):
        Plan(made)
