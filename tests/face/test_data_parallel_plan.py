"""`fedpress plan --ddp`: its costs are those of the hook, and its advice that of the benchmark."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from fedpress.cli import app
from fedpress.planning.data_parallel import (
    BESIDE,
    Cluster,
    MethodCost,
    Report,
    choose,
    measure,
    predict,
)
from fedpress.planning.situation import sized
from fedpress_ddp.methods import HALVES, LOSSES, METHODS

RESULTS = Path(__file__).parents[2] / "benchmarks/results"
LINKS: dict[str, Any] = json.loads((RESULTS / "data_parallel_links.json").read_text())
CELLS = [
    pytest.param(size, gbit, id=f"{size}-{gbit}")
    for size, links in LINKS["cells"].items()
    for gbit in ("0.1", "1", "10")
    if gbit in links
]
CLUSTER = Cluster(parameters=25_000_000, processes=8, step_seconds=0.2, network=1.0)
SPARSE = "top-k .1 %, feedback"
COSTS = {
    "torch fp16": MethodCost(50e6, 0.01, is_reduced=True),
    SPARSE: MethodCost(60e3, 0.05, 0.002),
    "PowerSGD, rank 2, feedback": MethodCost(400e3, 0.15, is_reduced=True, passes=2),
}


def fedpress(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["plan", "--ddp", *arguments])


@pytest.mark.parametrize(("size", "gbit"), CELLS)
def test_the_plan_agrees_with_the_benchmark(size: str, gbit: str) -> None:
    """It names a method only where that was faster than none, one of ours only where that was
    faster than torch's halves, too; and none wherever no method was faster."""
    links = LINKS["cells"][size]
    measured = links[gbit]["methods"]
    cluster = Cluster(
        parameters=links["parameters"],
        processes=LINKS["world"],
        step_seconds=links[gbit]["compute_seconds"],
        network=float(gbit),
        latency=links[gbit]["latency_seconds"],
    )
    costs = {name: MethodCost(**cost) for name, cost in links["costs"].items()}
    best, _ = choose(predict(cluster, costs), cluster)
    plain = measured["none"]["seconds"]
    assert best == "none" or measured[best]["seconds"] < plain
    if best in METHODS:
        assert all(measured[best]["seconds"] < measured[half]["seconds"] for half in HALVES)
    if min(measured[name]["seconds"] for name in costs if name in measured) >= plain:
        assert best == "none"


@pytest.mark.parametrize("size", LINKS["cells"])
def test_the_plan_s_bytes_are_near_the_hook_s(size: str) -> None:
    """Within a factor of two, as its gradients are synthetic."""
    links = LINKS["cells"][size]
    for name in set(METHODS) & set(links["1"]["methods"]):
        sent = links["1"]["methods"][name]["num_bytes"]
        assert 0.5 * sent < links["costs"][name]["num_bytes"] < 2 * sent


def test_costs_of_all_reduces_and_of_a_gathered_exchange() -> None:
    cluster = replace(CLUSTER, latency=1e-3)
    assert cluster.ring(1e9) == pytest.approx(2 * 7 / 8 * 8 + 14e-3)
    assert cluster.tree(1e9) == pytest.approx(2 * 8 + 6e-3)
    assert cluster.all_reduce(1.0) == pytest.approx(6e-3, rel=1e-3)
    assert cluster.all_gather(1e9) == pytest.approx(7 * 8.001)
    rows = {row.name: row for row in predict(CLUSTER, COSTS)}
    sparse = rows[SPARSE]
    assert sparse.sent_bytes == 7 * (60e3 + 8) + 16
    assert sparse.compute_seconds == pytest.approx(BESIDE * (0.05 + 7 * 0.002))
    assert sparse.step_seconds == pytest.approx(
        0.2 + sparse.compute_seconds + sparse.exchange_seconds
    )
    plain = rows["none"]  # a part is hidden behind the backward pass
    assert plain.exchange_seconds < plain.step_seconds < 0.2 + plain.exchange_seconds


def test_the_slower_the_network_the_more_compression_pays() -> None:
    for network, due in ((0.1, SPARSE), (1.0, SPARSE), (1000.0, "none")):
        cluster = replace(CLUSTER, network=network)
        rows = predict(cluster, COSTS)
        assert choose(rows, cluster)[0] == due
        for row in rows[1:]:
            assert row.pays_below is not None
            assert (network < row.pays_below) == (row.step_seconds < rows[0].step_seconds)
    never = {"torch fp16": MethodCost(1e9, 0.01, is_reduced=True)}
    assert predict(CLUSTER, never)[1].pays_below is None
    always = {"torch fp16": MethodCost(1e6, 0.0, is_reduced=True)}
    assert predict(CLUSTER, always)[1].pays_below == math.inf


def test_buckets_are_exchanged_once_their_gradients_are_there() -> None:
    """1 MiB, whose exchange ends before the next bucket is there, then 3 of 4 parts at the end."""
    half = MethodCost(2 * 2**20, 0.0, is_reduced=True)
    cluster = Cluster(2**20, 2, step_seconds=0.3, network=8e-9 * 2**21 / 0.12, latency=0.0)
    (row,) = predict(cluster, {"torch fp16": half})[1:]
    assert row.exchange_seconds == pytest.approx(0.12)
    assert row.step_seconds == pytest.approx(0.3 + 0.75 * 0.12)
    slow = replace(cluster, step_seconds=0.03)  # the first bucket's exchange outlasts the backward
    (row,) = predict(slow, {"torch fp16": half})[1:]
    assert row.step_seconds == pytest.approx(0.01 + 0.005 + 0.12)


def test_a_simpler_method_is_preferred_within_the_error_of_the_prediction() -> None:
    rows = predict(replace(CLUSTER, network=0.5), COSTS)
    plain, half, sparse = rows[:3]
    near = replace(half, step_seconds=sparse.step_seconds / 0.95)
    assert choose([plain, half, sparse], CLUSTER)[0] == SPARSE
    assert choose([plain, near, sparse], CLUSTER)[0] == "torch fp16"
    assert (
        choose([replace(plain, step_seconds=near.step_seconds), near, sparse], CLUSTER)[0] == "none"
    )


def test_what_loses_too_much_or_an_unknown_amount_is_not_recommended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow = replace(CLUSTER, network=0.01, most_loss=0.0)
    monkeypatch.setattr("fedpress.planning.data_parallel.LOSSES", {SPARSE: 0.5})
    rows = predict(slow, COSTS)
    assert choose(rows, slow) == ("none", "no method is known to lose 0 points or less")
    assert choose(rows, replace(slow, most_loss=0.5))[0] == SPARSE
    assert "unknown" in Report("25M", slow, COSTS).to_text()


def test_money_is_hours_and_bytes() -> None:
    priced = replace(CLUSTER, steps=1000, price_hour=3.0, price_gb=0.05)
    row = predict(priced, COSTS)[0]
    assert row.hours == pytest.approx(1000 * row.step_seconds / 3600)
    sent = 2 * 7 / 8 * 4 * 25e6
    assert row.sent_bytes == pytest.approx(sent)
    assert row.money == pytest.approx(8 * (3 * row.hours + 0.05 * 1e-9 * sent * 1000))
    assert "money" in Report("25M", priced, COSTS).to_text()
    assert "money" not in Report("25M", CLUSTER, COSTS).to_text()


def test_every_method_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = measure(sized(30_000))
    assert list(costs) == [*HALVES, *METHODS]
    for name, cost in costs.items():
        assert 0 < cost.num_bytes < 4 * 30_000
        assert cost.is_reduced == (name in HALVES or "PowerSGD" in name)
        assert cost.is_reduced or cost.decode_seconds > 0
    assert costs["sign, feedback"].num_bytes > costs[SPARSE].num_bytes
    assert costs["PowerSGD, rank 2, feedback"].passes == 2
    monkeypatch.setattr("fedpress.planning.data_parallel.SAMPLE", 30_000)
    larger = measure(sized(300_000))  # a part is measured, and multiplied
    assert larger[SPARSE].num_bytes == pytest.approx(10 * costs[SPARSE].num_bytes, rel=0.3)
    rank = "PowerSGD, rank 2, feedback"
    assert larger[rank].num_bytes < 5 * costs[rank].num_bytes  # grows with rows and columns


def test_losses_are_those_of_the_stored_benchmark() -> None:
    rows = json.loads((RESULTS / "data_parallel_digits.json").read_text())
    baseline = max(row["accuracy"] for name, row in rows.items() if name.startswith("float32"))
    assert set(LOSSES) == {*METHODS, *HALVES}
    for name, loss in LOSSES.items():
        assert loss == pytest.approx(max(0.0, 100 * (baseline - rows[name]["accuracy"])), abs=0.05)


def test_the_command_prints_a_table_or_json(tmp_path: Path) -> None:
    usual = ["20k", "--processes", "4", "--step-time", "0.05", "--network", "0.01"]
    printed = fedpress(*usual)
    assert printed.exit_code == 0, printed.output
    assert "recommended: " in printed.output
    assert "unknown for your model" in printed.output
    assert "on a ring" in printed.output
    figures = json.loads(fedpress(*usual, "--json", "-").output)
    assert figures["cluster"]["processes"] == 4
    assert [row["name"] for row in figures["methods"]] == ["none", *HALVES, *METHODS]
    assert figures["recommended"] != "none"
    fast = [*usual[:-1], "100"]
    assert "recommended: none" in fedpress(*fast).output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["20k", "--processes", "4"], "needs --step-time, --network"),
        (["20k", "--processes", "1", "--step-time", "1", "--network", "1"], "at least 2, not 1"),
        (["20k", "--processes", "2", "--step-time", "0", "--network", "1"], "--step-time must be"),
        (["20k", "--processes", "2", "--step-time", "1", "--network", "-1"], "--network must be"),
        (
            ["20k", "--processes", "2", "--step-time", "1", "--network", "1", "--latency", "nan"],
            "--latency must be 0 or more",
        ),
        (
            ["20k", "--processes", "2", "--step-time", "1", "--network", "1", "--steps", "0"],
            "--steps must be at least 1",
        ),
        (
            ["20k", "--processes", "2", "--step-time", "1", "--network", "1", "--cohort", "5"],
            "--cohort: not for a plan with --ddp",
        ),
    ],
)
def test_wrong_options_are_refused(arguments: list[str], says: str) -> None:
    result = fedpress(*arguments)
    assert result.exit_code != 0
    assert says in str(result.exception) + result.output


def test_options_of_the_other_plan_are_refused() -> None:
    result = CliRunner().invoke(app, ["plan", "20k", "--link", "1", "--processes", "4"])
    assert "--processes: only with --ddp" in str(result.exception) + result.output
    result = CliRunner().invoke(app, ["plan", "20k"])
    assert "a plan needs --link" in str(result.exception) + result.output
