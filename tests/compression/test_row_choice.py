"""Flat updates, as of Adam or of signs, go by rows: more of them arrives for the same bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from fedpress_compression.coding import encode
from fedpress_compression.compressor import Public, from_config, to_config
from fedpress_compression.compressors.ecsq import Ecsq
from fedpress_compression.contexts import contexts_of
from fedpress_compression.randomness import PublicRandomness
from fedpress_compression.row_choice import RowChoice, choose_rows
from fedpress_compression.tensors import ModelSpec, TensorSpec
from fedpress_protocols.errors import IncompatiblePlan

SPEC = ModelSpec((TensorSpec("w", (200, 96)), TensorSpec("b", (200,)), TensorSpec("v", (40, 32))))
UPLOADS = 12


def known(spec: ModelSpec = SPEC) -> Public:
    knowledge = {"previous": np.zeros(spec.size, np.float32)}
    return Public(spec, PublicRandomness(bytes(32)), knowledge)  # type: ignore[arg-type]


def adam_like(rng: np.random.Generator, steps: int, size: int) -> npt.NDArray[np.float32]:
    """The sum of so many steps, each of nearly the same size everywhere, in a common direction and
    in one of their own."""
    drift = np.random.default_rng(0).choice([-0.3, 0.3], size)
    directions = np.sign(rng.normal(size=(steps, size)) + drift)
    step = directions.sum(0) * (1 + 0.05 * rng.random(size))
    return step.astype(np.float32)


def arrived(steps: int, bits: float, *, by_rows: bool) -> tuple[float, float]:
    """The share of all updates that is with the server after some uploads under error feedback, and
    the bits a value that these took."""
    ecsq = {"id": "ecsq", "target": bits, "by_rows": by_rows}
    made = from_config(
        {
            "id": "error_feedback",
            "inner": {"id": "coded", "contexts": "previous", "inner": ecsq},
        }
    )
    rng, public = np.random.default_rng(1), known()
    state: Any = made.init(SPEC)
    layout, num_bytes = made.layout(SPEC), 0
    total, sent = np.zeros((2, SPEC.size))
    for _ in range(UPLOADS):
        update = adam_like(rng, steps, SPEC.size)
        symbols, state = made.compress(update, state, public, rng)
        num_bytes += len(encode(symbols, layout, contexts_of(layout, public)))
        total += update
        sent += made.decompress(symbols, public).dense()
    return float(sent @ total / (total @ total)), 8 * num_bytes / UPLOADS / SPEC.size


@pytest.mark.parametrize(("steps", "more"), [(1, 1.0), (3, 1.25), (10, 1.25)])
def test_more_of_flat_updates_arrives_for_no_more_bytes(steps: int, more: float) -> None:
    plain, plain_bits = arrived(steps, 0.1, by_rows=False)
    by_rows, bits = arrived(steps, 0.1, by_rows=True)
    assert by_rows > more * plain
    assert bits < 1.1 * max(plain_bits, 0.1)


@pytest.mark.parametrize("bits", [0.1, 0.4, 1.6])
def test_bodies_keep_to_the_budget_under_the_range_coder(bits: float) -> None:
    update = adam_like(np.random.default_rng(3), 2, SPEC.size)
    made = from_config({"id": "coded", "inner": {"id": "ecsq", "target": bits, "by_rows": True}})
    symbols, _ = made.compress(update, None, known(), np.random.default_rng(0))
    assert 0.6 * bits <= 8 * len(encode(symbols, made.layout(SPEC))) / SPEC.size <= 1.05 * bits


def test_updates_that_are_not_flat_are_sent_as_before() -> None:
    rng = np.random.default_rng(4)
    update = (rng.standard_t(3, SPEC.size) ** 3).astype(np.float32)
    for bits in (0.05, 0.2, 0.8):
        plain, _ = Ecsq(target=bits).compress(update, None, known(), rng)
        by_rows, _ = Ecsq(target=bits, by_rows=True).compress(update, None, known(), rng)
        for one, other in zip(plain, by_rows, strict=True):
            assert np.array_equal(one, other)


def test_what_is_sent_of_a_row_is_what_the_step_says() -> None:
    """And the squared error is no larger than without it."""
    update = adam_like(np.random.default_rng(5), 1, SPEC.size)
    made = Ecsq(target=0.2, by_rows=True)
    symbols, _ = made.compress(update, None, known(), np.random.default_rng(0))
    received = made.decompress(symbols, known()).dense()
    is_sent = received != 0
    assert (np.sign(received[is_sent]) == np.sign(update[is_sent])).all()
    assert np.square(update - received).sum() < np.square(update).sum()
    rows = is_sent[: 200 * 96].reshape(200, 96).mean(1)
    assert ((rows == 0) | (rows == 1)).all()
    assert 0 < rows.mean() < 1


def choice(magnitudes: npt.NDArray[np.float64], bits: float) -> RowChoice | None:
    rows = [(magnitudes.shape[0], magnitudes.shape[1])]
    return choose_rows(magnitudes.ravel(), rows, bits, 0.3, (1.4, 1 / 256), 256)


def test_the_rows_that_save_most_are_chosen_within_the_bits() -> None:
    magnitudes = np.full((100, 20), 0.2)
    magnitudes[[3, 11, 70]] = 1.0
    magnitudes[50:60] = 0.9
    chosen = choice(magnitudes, 170)
    assert chosen is not None
    rows = chosen.is_sent.reshape(100, 20)
    assert rows[[3, 11, 70]].all()
    assert 4 <= rows.all(1).sum() <= 8
    assert rows.any(1).sum() == rows.all(1).sum()
    assert not rows[:50].any(1).sum() > 2
    assert chosen.saved == pytest.approx(np.square(magnitudes[rows.all(1)]).sum(), rel=0.05)


def test_one_large_value_does_not_hide_the_others() -> None:
    magnitudes = np.full((100, 20), 0.05)
    magnitudes[5, 3] = 1.0
    chosen = choice(magnitudes, 400)
    assert chosen is not None
    assert 200 < chosen.is_sent.sum() < 400


def test_no_bits_are_no_choice() -> None:
    assert choice(np.ones((4, 50)), 1.0) is None


def test_a_row_beyond_the_budget_is_sent_in_pieces() -> None:
    chosen = choice(np.ones((1, 4000)), 400)
    assert chosen is not None
    assert 100 <= chosen.is_sent.sum() <= 250
    assert np.count_nonzero(np.diff(chosen.is_sent.astype(int))) <= 20


def test_a_configuration_leaves_by_rows_out_where_it_is_off() -> None:
    assert "by_rows" not in to_config(Ecsq())
    assert to_config(Ecsq(by_rows=True))["by_rows"] is True
    for wrong in (
        {"by_rows": 1},
        {"by_rows": True, "rdo": 0.1},
        {"by_rows": True, "control": "step"},
    ):
        with pytest.raises(IncompatiblePlan, match="by_rows"):
            from_config({"id": "ecsq", **wrong})
