"""The benchmark of optimizer-coupled methods: a few rounds of one of each kind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import optimizer_methods as benchmark
import pytest
from digits_task import SPEC
from optimizer_methods import METHODS, Method
from threadpoolctl import threadpool_limits

ROUNDS = 4
WHOLE = 4 * SPEC.size * benchmark.COHORT * ROUNDS


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Products this small cost twenty times as much when they are shared out."""
    with threadpool_limits(1):
        yield


def method(name: str) -> Method:
    return next(method for method in METHODS if method.name == name)


def test_every_method_is_measured_against_one_that_is_there() -> None:
    names = [each.name for each in METHODS]
    assert len(set(names)) == len(names)
    assert {each.like for each in METHODS} - set(names) == {""}
    assert all(each.like or "float32" in each.name for each in METHODS)


@pytest.mark.slow
def test_bytes_are_the_bodies_and_runs_repeat(tmp_path: Path) -> None:
    dense = benchmark.run(method("momentum, float32"), 0, ROUNDS, tmp_path)
    assert WHOLE < dense.uploaded < 1.001 * WHOLE
    assert dense.warm_up_rounds == 0
    pressed = benchmark.run(method("DGC, .2 %, no warm-up"), 0, ROUNDS, tmp_path)
    assert 500 < WHOLE / pressed.uploaded < 2000
    assert benchmark.run(method("DGC, .2 %, no warm-up"), 0, ROUNDS, tmp_path) == pressed


@pytest.mark.slow
def test_a_budget_too_small_for_its_rounds_has_one_of_each_period(tmp_path: Path) -> None:
    found = benchmark.run(method("1-bit adam, 8 bits on a budget"), 0, ROUNDS, tmp_path)
    assert found.warm_up_rounds == 1
    assert 0 < found.warm_up_bytes < 0.25 * WHOLE / 4
    ladder = benchmark.run(method("DGC, .2 %, sparsities on a budget"), 0, ROUNDS, tmp_path)
    assert ladder.warm_up_rounds == 4
