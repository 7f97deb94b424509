"""The masked benchmark: its bytes are the bodies', drop-outs lose nothing, it repeats itself."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import masked_bytes_to_accuracy as benchmark
import numpy as np
import pytest
from masked_bytes_to_accuracy import METHODS, Curve, Method, Task
from threadpoolctl import threadpool_limits

from fedpress_client.ledger import Ledger
from fedpress_protocols.messages import Receipt


def method(name: str) -> Method:
    return next(method for method in METHODS["digits"] if method.name == name)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Products this small cost twenty times as much when they are shared out."""
    with threadpool_limits(1):
        yield


@pytest.fixture(scope="module")
def task() -> Task:
    return benchmark.task_of("digits", None, 0)


def test_float32_costs_four_bytes_a_value_and_learns(task: Task) -> None:
    curve = benchmark.train(task, METHODS["digits"][0], 0, 3)
    bodies = 20 * 4 * 50_826
    assert all(0 < got - bodies * (n + 1) <= 140 * (n + 1) for n, got in enumerate(curve.bodies))
    assert curve.sessions == [0] * 3
    assert curve.newest[-1] > 0.2


def test_a_masked_body_is_its_numbers_and_little_else(task: Task) -> None:
    """5 % of the values, each of the bits that 2 * levels * cohort + 1 sums need."""
    made = Method("m", benchmark.support(0.05), benchmark.FEDAVG, 0.2, {"levels": 4}, True)
    curve = benchmark.train(task, made, 0, 2)
    body = curve.bodies[-1] / 40
    needed = math.ceil(0.05 * 50_826) * math.log2(2 * 4 * 20 + 1) / 8
    assert needed < body <= 1.03 * needed + 16
    assert curve.sessions[-1] == 40 * benchmark.session_bytes(20)


def test_a_session_costs_what_the_specification_says() -> None:
    """The table of the protocol: 14.8 kB at 100 clients, the consent among it."""
    assert benchmark.session_bytes(100) == 208 + 160 + 99 * 144
    assert benchmark.session_bytes(100, malicious=False) == 208 + 99 * 144


def test_who_drops_out_takes_the_update_back(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes: list[str] = []
    settle = Ledger.settle

    def settled(ledger: Ledger, receipt: Receipt) -> Ledger:
        outcomes.append(receipt.outcome)
        after = settle(ledger, receipt)
        assert not after.pending
        if receipt.outcome == "not-included":
            sent = ledger.pending[receipt.assignment].update.dense()
            before = np.zeros_like(sent) if ledger.residual is None else ledger.residual
            assert after.residual is not None
            np.testing.assert_allclose(after.residual, before + sent, atol=1e-6)
        return after

    monkeypatch.setattr(Ledger, "settle", settled)
    benchmark.train(task, method("5 %, EF"), 0, 2)
    assert outcomes.count("not-included") == 2 * 2
    assert outcomes.count("included") == 2 * 18


def test_a_run_repeats_to_the_last_bit(task: Task) -> None:
    made = method("5 %, restricted, M .8")
    assert benchmark.train(task, made, 1, 2) == benchmark.train(task, made, 1, 2)


def test_a_target_is_reached_by_the_mean_of_three_measurements() -> None:
    curve = Curve([1, 2, 3, 4], [10, 20, 30, 40], [1, 2, 3, 4], [0.9, 0.99, 0.93, 0.96], [0.0] * 4)
    assert curve.bytes_to(0.935, "newest") == (30, 33)
    assert curve.bytes_to(0.95, "newest") == (40, 44)
    assert all(np.isnan(each) for each in curve.bytes_to(0.97, "newest"))


def test_it_prints_and_writes_what_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = tmp_path / "found.json"
    asked = ["benchmark", "--quick", "--rounds", "3", "--only", "EF21", "--json", str(found)]
    monkeypatch.setattr("sys.argv", asked)
    benchmark.main()
    out = capsys.readouterr().out
    rows = json.loads(found.read_text())["rows"]
    assert [row["name"] for row in rows] == ["float32, FedAvg"]
    assert all(row["name"] in out for row in rows)
