"""Figures of updates against their definitions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedpress_client.ledger import Ledger
from fedpress_client.update_figures import Timing, figures_of
from fedpress_compression.compressor import from_config
from fedpress_compression.tensors import Vector
from fedpress_compression.values import flatness
from fedpress_protocols.messages import Assignment
from fedpress_protocols.model import Model
from tests.client.fake_server import make_plan


def model(size: int) -> Model:
    return Model.from_tensors({"weight": np.zeros(size, np.float32)})


def prepared(
    ledger: Ledger, first: Model, compressor: Any, update: Vector, number: int
) -> tuple[str, Ledger]:
    plan = make_plan(first, compressor, round_=number)
    key = f"a{number}"
    assignment = Assignment(assignment=key, client_id="me", plan=plan, profile="p0")
    rng = np.random.default_rng(number)
    return key, ledger.prepare(assignment, update, 7, first.spec, rng)[0]


def total(update: Vector, before: Ledger) -> np.ndarray:
    residual = 0.0 if before.residual is None else before.residual.astype(np.float64)
    return update.astype(np.float64) + residual


@pytest.mark.parametrize(
    "compressor",
    [
        {"id": "none"},
        {"id": "topk", "fraction": 0.1},
        {"id": "quantize", "bits": 3},
        {"id": "error_feedback", "inner": {"id": "topk", "fraction": 0.1}},
        {"id": "error_feedback", "inner": {"id": "ecsq", "control": "bits", "target": 0.5}},
        {"id": "dgc", "inner": {"id": "topk", "fraction": 0.1}},
    ],
    ids=lambda each: each.get("inner", each)["id"] + "-" + each["id"],
)
def test_figures_are_what_their_definitions_say(compressor: dict[str, Any]) -> None:
    made = from_config(compressor)
    first = model(1000)
    ledger = Ledger("task", "me")
    rng = np.random.default_rng(3)
    for number in range(1, 4):
        update = rng.normal(scale=0.1, size=1000).astype(np.float32)
        before = ledger
        key, ledger = prepared(ledger, first, made, update, number)
        figures = figures_of(ledger, key, update, Timing(1.5, 0.25))
        sent = ledger.pending[key].update.dense().astype(np.float64)
        assert figures.norm == pytest.approx(np.linalg.norm(update), rel=1e-5)
        assert (figures.train, figures.compress) == (1.5, 0.25)
        assert figures.flatness == pytest.approx(flatness(update), rel=1e-6)
        if made.keeps_residual:
            assert ledger.residual is not None
            left = ledger.residual.astype(np.float64)
            ratio = np.linalg.norm(left) / np.linalg.norm(update)
            assert figures.residual == pytest.approx(ratio, rel=1e-5)
        else:
            left = total(update, before) - sent
            assert figures.residual == 0
        expected = np.sum(left**2) / np.sum((left + sent) ** 2)
        assert figures.nmse == pytest.approx(expected, rel=1e-3, abs=1e-9)


def test_figures_of_an_exploding_update_are_beyond_the_squares_of_float32() -> None:
    update = np.full(8, 1e25, np.float32)
    made = from_config({"id": "error_feedback", "inner": {"id": "topk", "fraction": 0.5}})
    key, ledger = prepared(Ledger("task", "me"), model(8), made, update, 1)
    figures = figures_of(ledger, key, update, Timing(0.0, 0.0))
    assert figures.norm == pytest.approx(8**0.5 * 1e25)
    assert figures.nmse == pytest.approx(1.0)  # the plan's `max_abs` leaves next to nothing of it
    assert figures.means


def test_a_norm_that_figures_do_not_take_is_left_out_without_a_warning() -> None:
    update = np.full(8, 3e38, np.float32)
    quantized = from_config({"id": "quantize", "bits": 3})
    key, ledger = prepared(Ledger("task", "me"), model(8), quantized, update, 1)
    assert figures_of(ledger, key, update, Timing(0.0, 0.0)).norm is None


def test_figures_of_nothing_are_left_out() -> None:
    update = np.zeros(8, np.float32)
    none = from_config({"id": "none"})
    key, ledger = prepared(Ledger("task", "me"), model(8), none, update, 1)
    figures = figures_of(ledger, key, update, Timing(0.0, 0.0))
    assert figures.nmse is None
    assert figures.flatness is None
    assert figures.means == {}
    assert figures.query == "residual=0&norm=0&train=0&compress=0"
