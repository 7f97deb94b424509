"""Models go down coded: as differences to what a client holds, and whole where it holds nothing."""

import logging
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")

from flwr.app import Array, ConfigRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import strategy as flowers

from fedpress_compression.compressors.cafe import Cafe
from fedpress_compression.compressors.ef21 import EF21
from fedpress_compression.compressors.none import Uncompressed
from fedpress_compression.compressors.topk import TopK
from fedpress_flower import envelope
from fedpress_flower.client import compression_mod
from fedpress_flower.server import FedpressStrategy, Plan
from fedpress_flower.server.arrays import model_of
from fedpress_protocols.errors import IncompatiblePlan
from fedpress_protocols.messages import DownlinkTerms
from fedpress_strategies import from_config
from tests.flower.fleet import Fate, Fleet, answers, record_of, reply

logging.getLogger("flwr").setLevel(logging.ERROR)
SHAPES = {"w": (60, 40), "b": (40,)}
SIZE = 2440
RAW = 4 * SIZE
TERMS = DownlinkTerms()


def first_arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.normal(0, 0.1, s).astype(np.float32) for name, s in SHAPES.items()}


def values_of(arrays: Any) -> dict[str, np.ndarray]:
    return {name: array.numpy() for name, array in arrays.items()}


def flat(arrays: Any) -> np.ndarray:
    return np.concatenate([value.ravel() for value in values_of(arrays).values()])


class Clients(Fleet):
    """Their training adds what depends on the node and the round alone. `seen` has by node and
    round the model that the app was given; `sent` what travelled."""

    def __init__(self, count: int, *mods: Any, fate: Fate = answers, **options: Any) -> None:
        self.seen: dict[tuple[int, int], dict[str, np.ndarray]] = {}
        self.measured: dict[tuple[int, int], dict[str, np.ndarray]] = {}
        self.has_mod = bool(mods)
        app = ClientApp(mods=list(mods))
        app.train()(self._train)
        app.evaluate()(self._evaluate)
        super().__init__(app, count, fate=fate, **options)

    def _train(self, message: Message, context: Context) -> Message:
        number = int(message.content["config"]["server-round"])
        assert not self.has_mod or sorted(message.content) == ["arrays", "config"]
        model = values_of(message.content["arrays"])
        self.seen[number, context.node_id] = model
        rng = np.random.default_rng([number, context.node_id])
        after = {
            name: np.asarray(array + rng.normal(0, 0.01, array.shape), array.dtype)
            for name, array in model.items()
        }
        return reply(message, after, train_loss=1.0)

    def _evaluate(self, message: Message, context: Context) -> Message:
        number = int(message.content["config"]["server-round"])
        self.measured[number, context.node_id] = values_of(message.content["arrays"])
        answer = reply(message, {}, mean=1.0)
        del answer.content["arrays"]
        return answer

    def forms(self, kind: str = "train") -> dict[int, list[str]]:
        """By node: how the model came in each message of the kind."""
        forms = defaultdict(list)
        for message in self.sent:
            if message.metadata.message_type == kind:
                coded = envelope.MODEL in message.content["arrays"]
                has_base = envelope.BASE in message.content.get(envelope.RECORD, {})
                form = ("difference" if has_base else "whole") if coded else "arrays"
                forms[message.metadata.dst_node_id].append(form)
        return dict(forms)


def run(strategy: Any, fleet: Fleet, rounds: int, arrays: Any = None) -> Any:
    first = record_of(first_arrays() if arrays is None else arrays)
    return strategy.start(fleet, first, num_rounds=rounds, timeout=5.0)


def mod(folder: Path) -> Any:
    return compression_mod(state_dir=folder, seed=1, durable=False)


def training_only() -> Any:
    return flowers.FedAvg(fraction_evaluate=0.0)


@pytest.mark.parametrize("inner", ["flower", "ours"])
def test_every_client_has_the_published_model_to_the_last_bit(inner: str, tmp_path: Path) -> None:
    fleet = Clients(3, mod(tmp_path))
    made = flowers.FedAvg() if inner == "flower" else from_config({"id": "fedavg"})
    strategy = FedpressStrategy(made, Plan(Uncompressed(), seed=1), downlink=TERMS)
    result = run(strategy, fleet, 4)
    digests = [report.model for report in strategy.reports]
    for number in range(1, 5):
        measured = {model_of(record_of(fleet.measured[number, n])).digest for n in (1, 2, 3)}
        assert measured == {digests[number - 1]}
        if number > 1:
            seen = {model_of(record_of(fleet.seen[number, node])).digest for node in (1, 2, 3)}
            assert seen == {digests[number - 2]}
    assert model_of(result.arrays).digest == digests[-1]
    assert fleet.forms() == {node: ["whole"] + ["difference"] * 3 for node in (1, 2, 3)}
    assert fleet.forms("evaluate") == {node: ["difference"] * 4 for node in (1, 2, 3)}


@pytest.mark.parametrize("name", ["FedAvg", "FedAvgM", "FedAdam", "fedavg", "fedadam"])
def test_the_strategy_goes_on_as_if_nothing_were_rounded(name: str, tmp_path: Path) -> None:
    """What is not published in a round is not lost: it is in the strategy's own parameters."""

    def made() -> Any:
        if name.islower():
            return from_config({"id": name})
        return getattr(flowers, name)(fraction_evaluate=0.0)

    plain = FedpressStrategy(made(), Plan(Uncompressed(), seed=1))
    bare = flat(run(plain, Clients(3, mod(tmp_path / "plain")), 6).arrays)
    strategy = FedpressStrategy(made(), Plan(Uncompressed(), seed=1), downlink=TERMS)
    result = run(strategy, Clients(3, mod(tmp_path / "coded")), 6)
    assert strategy._downlink is not None
    np.testing.assert_allclose(flat(strategy._downlink.own), bare, atol=3e-5)
    moved = np.linalg.norm(bare - flat(record_of(first_arrays())))
    assert np.linalg.norm(flat(result.arrays) - bare) < 0.5 * moved


def test_bytes_down_are_those_that_travelled(tmp_path: Path) -> None:
    fleet = Clients(4, mod(tmp_path))
    strategy = FedpressStrategy(flowers.FedAvg(), Plan(Uncompressed()), downlink=TERMS)
    result = run(strategy, fleet, 5)
    sizes = defaultdict[tuple[str, int], int](int)
    for message in fleet.sent:
        number = int(message.content["config"]["server-round"])
        size = sum(len(array.data) for array in message.content["arrays"].values())
        sizes[message.metadata.message_type, number] += size
    for report in strategy.reports:
        assert report.download_bytes == sizes["train", report.round]
        assert report.coded_download_bytes == report.download_bytes
        differences = report.download_bytes if report.round > 1 else 0
        assert report.difference_download_bytes == differences
        measured = result.train_metrics_clientapp[report.round]
        assert measured["fedpress-download-bytes"] == report.download_bytes
        evaluated = result.evaluate_metrics_clientapp[report.round]
        assert evaluated["fedpress-download-bytes"] == sizes["evaluate", report.round]
    assert sizes["train", 1] < 0.5 * 4 * RAW
    assert all(size < 0.1 * 4 * RAW for key, size in sizes.items() if key != ("train", 1))


def test_without_a_downlink_the_arrays_are_counted(tmp_path: Path) -> None:
    strategy = FedpressStrategy(training_only(), Plan(Uncompressed()))
    run(strategy, Clients(3, mod(tmp_path)), 2)
    for report in strategy.reports:
        assert RAW * 3 < report.download_bytes < RAW * 3 + 3000  # numpy's heads
        assert report.coded_download_bytes == report.difference_download_bytes == 0


def test_a_node_that_missed_rounds_gets_a_difference_while_its_model_is_kept(
    tmp_path: Path,
) -> None:
    def fate(call: int, node: int) -> str:
        return "answers" if node == 1 or call not in (2, 3, 4) else "unreached"

    for keep, last in ((8, "difference"), (2, "whole")):
        fleet = Clients(2, mod(tmp_path / str(keep)), fate=fate)
        inner = flowers.FedAvg(fraction_evaluate=0.0)
        terms = DownlinkTerms(keep=keep)
        strategy = FedpressStrategy(inner, Plan(Uncompressed()), downlink=terms)
        strategy.start(fleet, record_of(first_arrays()), num_rounds=5, timeout=0.3)
        assert fleet.forms()[2][-1] == last
        assert strategy.reports[-1].included == (1, 2)
        assert model_of(record_of(fleet.seen[5, 2])).digest == strategy.reports[3].model


def test_a_lost_reply_leaves_the_client_with_both_models(tmp_path: Path) -> None:
    """The server goes on from what was confirmed, and the client has that still."""
    lost = {(2, 2), (3, 2)}
    fleet = Clients(
        2, mod(tmp_path), fate=lambda call, n: "unheard" if (call, n) in lost else "answers"
    )
    strategy = FedpressStrategy(training_only(), Plan(Uncompressed()), downlink=TERMS)
    strategy.start(fleet, record_of(first_arrays()), num_rounds=4, timeout=0.3)
    assert fleet.forms()[2] == ["whole", "difference", "difference", "difference"]
    assert strategy.reports[-1].included == (1, 2)
    assert len(list(tmp_path.glob("*/*/*.models/*"))) <= 4


@pytest.mark.parametrize("harm", ["removed", "damaged"])
def test_a_client_that_lost_its_files_gets_the_whole_in_the_same_round(
    harm: str, tmp_path: Path
) -> None:
    def losing(message: Message, context: Context, call_next: Any) -> Message:
        if message.content["config"]["server-round"] == 3 and context.node_id == 2:
            for path in tmp_path.glob("*/*/*models"):
                if harm == "removed":
                    shutil.rmtree(path, ignore_errors=True)
                    continue
                for file in path.iterdir():
                    file.write_bytes(file.read_bytes()[:-1] + b"\1")
        return call_next(message, context)

    fleet = Clients(2, losing, mod(tmp_path))
    strategy = FedpressStrategy(training_only(), Plan(Uncompressed()), downlink=TERMS)
    run(strategy, fleet, 4)
    # The second harm does not follow: what comes whole is kept, and read at once.
    assert fleet.forms()[2] == ["whole", "difference", "difference", "whole", "difference"]
    assert [report.included for report in strategy.reports] == [(1, 2)] * 4
    third = strategy.reports[2]
    assert third.difference_download_bytes < third.coded_download_bytes == third.download_bytes


def refusing_coded(message: Message, context: Context, call_next: Any) -> Message:
    """As the mod of an earlier release does, which knows no coded model."""
    ours: Any = message.content.get(envelope.RECORD, {})
    for array in message.content["arrays"].values():
        array.numpy()
    assert envelope.DIGEST not in ours
    return call_next(message, context)


def test_clients_without_the_mod_or_with_an_older_one_lose_no_round(tmp_path: Path) -> None:
    older = Clients(3, refusing_coded, mod(tmp_path / "older"))
    without = Clients(3)
    for fleet in (older, without):
        strategy = FedpressStrategy(flowers.FedAvg(), Plan(Uncompressed()), downlink=TERMS)
        run(strategy, fleet, 3)
        assert [report.included for report in strategy.reports] == [(1, 2, 3)] * 3
        assert fleet.forms()[1] == ["whole", "arrays", "arrays", "arrays"]
        assert fleet.forms("evaluate")[1] == ["whole"] + ["arrays"] * 3 or fleet is older
        assert len(fleet.measured) == 9


def test_a_client_that_fails_is_not_taken_for_one_that_cannot_read(tmp_path: Path) -> None:
    def failing(message: Message, context: Context, call_next: Any) -> Message:
        if message.content["config"]["server-round"] == 2 and context.node_id == 2:
            raise RuntimeError("out of memory")
        return call_next(message, context)

    fleet = Clients(2, mod(tmp_path), failing)
    strategy = FedpressStrategy(training_only(), Plan(Uncompressed()), downlink=TERMS)
    run(strategy, fleet, 3)
    assert "out of memory" in strategy.reports[1].dropped[2]
    assert fleet.forms()[2] == ["whole", "difference", "difference"]


def test_a_model_keeps_its_types_on_the_way_down(tmp_path: Path) -> None:
    arrays: dict[str, np.ndarray] = {
        "double": np.linspace(-1, 1, 50),
        "single": np.linspace(0, 2, 7, dtype=np.float32),
        "half": np.linspace(-2, 2, 9, dtype=np.float16),
        "count": np.array(7, np.int64),
    }
    fleet = Clients(2, mod(tmp_path))

    strategy = FedpressStrategy(training_only(), Plan(Uncompressed()), downlink=TERMS)
    result = run(strategy, fleet, 3, arrays)
    for found in (fleet.seen[3, 1], values_of(result.arrays)):
        assert list(found) == list(arrays)
        assert {n: a.dtype for n, a in found.items()} == {n: a.dtype for n, a in arrays.items()}
        assert found["count"] == 7


def test_earlier_models_that_a_compressor_reads_come_as_differences(tmp_path: Path) -> None:
    plan = Plan(Cafe(TopK(0.1)), seed=1)
    fleet = Clients(3, mod(tmp_path))
    strategy = FedpressStrategy(training_only(), plan, downlink=TERMS)
    run(strategy, fleet, 4)
    assert [report.included for report in strategy.reports] == [(1, 2, 3)] * 4
    assert all(report.nmse < 1 for report in strategy.reports)
    last = [message for message in fleet.sent if message.metadata.message_type == "train"][-1]
    assert list(last.content["fedpress.previous"]) == [envelope.MODEL]
    assert strategy.reports[-1].download_bytes < 3 * 2 * 0.1 * RAW


def test_a_compressor_that_counts_on_the_very_mean_is_refused() -> None:
    with pytest.raises(IncompatiblePlan, match="very mean"):
        FedpressStrategy(flowers.FedAvg(), Plan(EF21(TopK(0.1))), downlink=TERMS)


def test_a_strategy_that_is_started_again_begins_anew(tmp_path: Path) -> None:
    strategy = FedpressStrategy(training_only(), Plan(Uncompressed(), seed=1), downlink=TERMS)
    first = run(strategy, Clients(2, mod(tmp_path / "a")), 3)
    again = run(strategy, Clients(2, mod(tmp_path / "b")), 3)
    assert model_of(first.arrays).digest == model_of(again.arrays).digest


def test_a_model_that_is_none_is_refused_and_sent_as_it_is(tmp_path: Path) -> None:
    """A forged message is the client's failure, and trains nothing."""
    fleet = Clients(2, mod(tmp_path))
    strategy = FedpressStrategy(training_only(), Plan(Uncompressed()), downlink=TERMS)
    arrays = record_of(first_arrays())
    message = next(iter(strategy.configure_train(1, arrays, ConfigRecord(), fleet)))
    node = message.metadata.dst_node_id
    data = message.content["arrays"][envelope.MODEL].data
    for forged in (data[:-1], data[:50], b"", b"\2" + data[1:]):
        array = Array("uint8", (len(forged),), envelope.MODEL_STYPE, forged)
        message.content["arrays"][envelope.MODEL] = array
        with pytest.raises(Exception, match=r"(?i)form|decod|bytes|end|model|left"):
            fleet.app(message, fleet.contexts[node])
    assert not fleet.seen
