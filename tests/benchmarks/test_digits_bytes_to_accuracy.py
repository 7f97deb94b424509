"""The benchmark: its bytes are the bodies', its curves mean what they say, it repeats itself."""

from __future__ import annotations

import json
from pathlib import Path

import digits_bytes_to_accuracy as benchmark
import numpy as np
import pytest
from digits_bytes_to_accuracy import METHODS, Curve, Method

from fedpress_compression import compressor as registry


def method(name: str) -> Method:
    return next(method for method in METHODS if method.name == name)


def test_float32_costs_four_bytes_a_value_and_learns(tmp_path: Path) -> None:
    curve = benchmark.train(method("float32, FedAvg"), 0, 4, tmp_path)
    bodies = 10 * 4 * 50_826
    assert all(0 < got - bodies * (n + 1) <= 70 * (n + 1) for n, got in enumerate(curve.uploaded))
    assert curve.accuracies[-1] > 0.2


def test_a_run_repeats_to_the_last_bit(tmp_path: Path) -> None:
    name = "top-k .1 % ternary, CAFe"
    first, second = (benchmark.train(method(name), 1, 3, tmp_path) for _ in range(2))
    assert first == second


def test_a_target_is_reached_by_the_mean_of_three_rounds() -> None:
    curve = Curve([10, 20, 30, 40, 50], [0.9, 0.99, 0.9, 0.93, 0.999])
    assert curve.bytes_to(0.94) == 40
    assert curve.bytes_to(0.90) == 30
    assert np.isnan(curve.bytes_to(0.95))


def test_every_client_has_images_and_none_is_two_clients() -> None:
    test, images = benchmark.split(3)
    sizes = [part.labels.size for part in images]
    assert min(sizes) >= 1
    assert sum(sizes) + test.labels.size == 1797


def test_it_prints_and_writes_what_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = tmp_path / "found.json"
    asked = ["benchmark", "--quick", "--only", "EF21", "--json", str(found)]
    monkeypatch.setattr("sys.argv", asked)
    # The benchmark registers a method of its own, which no other test is to find.
    monkeypatch.setattr(registry, "_by_id", dict(registry._by_id))
    benchmark.main()
    rows = json.loads(found.read_text())["rows"]
    out = capsys.readouterr().out
    assert rows
    assert all(row["name"] in out for row in rows)
