"""A device finds its account again, whatever Flower calls its node; accounts of old runs go."""

import json
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import strategy as flowers

from fedpress_client.ledger import Ledger
from fedpress_compression.compressors.error_feedback import ErrorFeedback
from fedpress_compression.compressors.topk import TopK
from fedpress_flower.client import DEVICE_ID, compression_mod
from fedpress_flower.server import FedpressStrategy, Plan
from tests.flower.fleet import RUN, Fleet, record_of, reply

logging.getLogger("flwr").setLevel(logging.ERROR)
SIZE = 120
START = {"w": np.zeros(SIZE, np.float32)}


def step(number: int, device: int) -> np.ndarray:
    return np.random.default_rng([number, device]).normal(0, 0.1, SIZE).astype(np.float32)


class Restarting(Fleet):
    """Three devices; before round 3, and again before round 5, the second one's SuperNode starts
    again: under another node's id, with nothing in its state. `lost` are rounds whose reply from
    this device does not arrive."""

    def __init__(self, folder: Path, config: dict[str, Any], lost: tuple[int, ...] = ()) -> None:
        app = ClientApp(mods=[compression_mod(state_dir=folder, seed=1, durable=False)])
        app.train()(self._train)
        self.folder, self.lost, self.round = folder, lost, 0
        self.uploads: dict[tuple[int, int], np.ndarray] = {}
        super().__init__(app, 3, fate=self._fate)
        self.node = 2
        self.contexts[2].node_config.clear()
        self.contexts[2].node_config.update(config)

    def _fate(self, call: int, node: int) -> str:
        return "unheard" if node == self.node and call in self.lost else "answers"

    def get_node_ids(self) -> set[int]:
        self.round += 1
        if self.round in (3, 5):
            before = self.contexts.pop(self.node)
            self.node += 10
            self.contexts[self.node] = Context(
                RUN, self.node, before.node_config, RecordDict(), before.run_config
            )
        return super().get_node_ids()

    def _train(self, message: Message, context: Context) -> Message:
        number = int(message.content["config"]["server-round"])
        device = 2 if context.node_id == self.node else context.node_id
        model = message.content["arrays"]["w"].numpy()
        return reply(message, {"w": model + step(number, device)})

    def on_way(self, message: Message, answer: Message) -> Message:
        """Note what each upload stands for."""
        if answer.has_error():
            return answer
        node = message.metadata.dst_node_id
        number = int(message.content["config"]["server-round"])
        pending = self.ledger(node).pending[f"{number}-{node}"]
        self.uploads[number, node] = pending.update.dense().astype(np.float64)
        return answer

    def second(self) -> Ledger:
        return self.ledger(self.node)


def run(fleet: Fleet, rounds: int) -> FedpressStrategy:
    plan = Plan(ErrorFeedback(TopK(0.05)), seed=1)
    strategy = FedpressStrategy(flowers.FedAvg(fraction_evaluate=0.0), plan)
    strategy.start(fleet, record_of(START), num_rounds=rounds, timeout=0.5)
    return strategy


@pytest.mark.parametrize("config", [{"partition-id": 1}, {DEVICE_ID: "pi-7"}], ids=str)
@pytest.mark.parametrize("lost", [(), (2,), (4,), (2, 4), (3,)], ids=str)
def test_a_supernode_that_starts_again_without_keys_loses_nothing(
    config: dict[str, Any], lost: tuple[int, ...], tmp_path: Path
) -> None:
    """Whatever the server has of it, under whatever names, is sent; all else is in its account."""
    fleet = Restarting(tmp_path, config, lost)
    strategy = run(fleet, 7)
    ledger = fleet.second()
    assert list(ledger.pending) == ["7-22"]  # the server answers for all that came before
    assert ledger.included == sum(
        node in report.included for report in strategy.reports[:6] for node in (2, 12, 22)
    )
    computed = np.sum([step(number, 2) for number in range(1, 8)], axis=0, dtype=np.float64)
    assert ledger.residual is not None
    waiting = ledger.residual + ledger.pending["7-22"].update.dense()
    included = [
        fleet.uploads[report.round, node]
        for report in strategy.reports[:6]
        for node in report.included
        if node % 10 == 2
    ]
    np.testing.assert_allclose(np.sum(included, axis=0) + waiting, computed, atol=3e-6)
    assert len(list(tmp_path.glob("*/*/*.account"))) == 3


def test_a_node_without_a_name_says_that_it_may_have_lost_its_account(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(Restarting(tmp_path, {}), 3)
    assert "restarted without authentication keys" in caplog.text
    assert DEVICE_ID in caplog.text


def test_two_nodes_by_one_name_are_told_of_it(tmp_path: Path) -> None:
    fleet = Restarting(tmp_path, {"partition-id": 0})  # the first device's
    strategy = run(fleet, 2)
    (one,) = strategy.reports[0].dropped.items()  # whoever is asked second
    assert one[0] in (1, 2)
    assert "round 1 came after round 1 was answered" in one[1]
    assert DEVICE_ID in one[1]


def test_questions_that_make_no_sense_are_passed_over(tmp_path: Path) -> None:
    def asking(message: Message, context: Context, call_next: Any) -> Message:
        answer: Message = call_next(message, context)
        forged = ["0-1", "9999999999-1", "x", "1-", "-1", "1-2-3", "1-" + "9" * 30]
        if context.node_id == 3:
            answer.content["fedpress"]["asks"] = [*forged, "1-1"] * 9
        return answer

    fleet = Restarting(tmp_path, {"partition-id": 1})
    mod = compression_mod(state_dir=tmp_path, seed=1, durable=False)
    fleet.app = ClientApp(mods=[asking, mod])
    fleet.app.train()(fleet._train)
    strategy = run(fleet, 4)
    assert [len(report.included) for report in strategy.reports] == [3] * 4
    last = [m for m in fleet.sent if m.metadata.dst_node_id == 3][-1].content["fedpress"]
    assert [json.loads(each)["assignment"] for each in last["receipts"]] == ["1-1", "1-1"]


def test_a_name_that_is_no_file_name_is_refused(tmp_path: Path) -> None:
    grid = Restarting(tmp_path, {DEVICE_ID: "../7"})
    assert DEVICE_ID in run(grid, 1).reports[0].dropped[grid.node]


def test_accounts_of_runs_long_over_are_collected(tmp_path: Path) -> None:
    kept, gone, foreign = (tmp_path / name / "flower" for name in ("5", "6", "letters"))
    for folder in (kept, gone, foreign):
        (folder / "1.models").mkdir(parents=True)
        for name in ("1.account", "1.models/a", "notes.txt"):
            (folder / name).write_bytes(b"x")
        for path in [*folder.rglob("*")]:
            if folder is not kept:
                os.utime(path, (1e9, 1e9))
    (gone / "notes.txt").unlink()
    run(Restarting(tmp_path, {"partition-id": 1}), 1)
    assert (kept / "1.account").exists()
    assert (foreign / "1.account").exists()
    assert not gone.parent.exists()
