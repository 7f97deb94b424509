"""The benchmark of networks with BatchNorm: its networks, and that its page has its table."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from torch import nn

from tests.benchmarks.scripts import printed

ROOT = Path(__file__).parents[2]


def test_the_page_has_the_table_of_what_was_kept() -> None:
    table = "\n".join(printed(ROOT / "benchmarks/batch_norm.py", "--table"))
    assert table in (ROOT / "docs/bench-auto.md").read_text()


def test_a_layer_comes_before_each_rectifier() -> None:
    from batch_norm import with_batch_norm

    network = nn.Sequential(
        *(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(12, 5), nn.ReLU(), nn.Linear(5, 2)),
    )
    made = [type(each).__name__ for each in with_batch_norm(network)]
    assert made == [
        *("Conv2d", "BatchNorm2d", "ReLU", "MaxPool2d", "Flatten"),
        *("Linear", "BatchNorm1d", "ReLU", "Linear"),
    ]
