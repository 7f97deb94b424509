"""`ecsq` with `rdo`: fewer bytes at the same error, and nothing large is missed."""

from __future__ import annotations

import numpy as np
import pytest

from fedpress.update_file import Updates
from fedpress_compression.coding import decode, encode
from fedpress_compression.compressor import Public, from_config, to_config
from fedpress_compression.compressors.coded import Coded
from fedpress_compression.compressors.ecsq import Ecsq
from fedpress_compression.contexts import contexts_of
from fedpress_compression.randomness import PublicRandomness
from fedpress_compression.tensors import ModelSpec, TensorSpec, Vector
from fedpress_protocols.errors import IncompatiblePlan

SPEC = ModelSpec((TensorSpec("w", (120, 80)), TensorSpec("b", (120,)), TensorSpec("g", ())))
RNG = np.random.default_rng(0)


def known(spec: ModelSpec) -> Public:
    return Public(spec, PublicRandomness(bytes(32)))


def received(made: Ecsq, update: Vector, spec: ModelSpec) -> tuple[int, Vector]:
    """Bytes of the body and what it decodes to."""
    layout = made.layout(spec)
    body = encode(made.compress(update, None, known(spec), RNG)[0], layout)
    return len(body), made.decompress(decode(body, layout), known(spec)).dense()


def error(update: Vector, other: Vector) -> float:
    whole = update.astype(np.float64)
    return float(np.square(whole - other).sum() / np.square(whole).sum())


@pytest.mark.parametrize(("nmse", "share"), [(0.05, 0.99), (0.2, 0.97), (0.5, 0.94), (0.7, 0.95)])
@pytest.mark.parametrize("contexts", ["none", "previous"])
def test_real_updates_take_fewer_bytes_at_the_same_error(
    nmse: float, share: float, contexts: str
) -> None:
    file = Updates.load("fixture")
    sizes: dict[float, int] = {0.0: 0, 0.14: 0}
    for rdo in sizes:
        config = {"id": "ecsq", "control": "nmse", "target": nmse, "rdo": rdo}
        made = from_config({"id": "coded", "contexts": contexts, "inner": config})
        assert isinstance(made, Coded)
        layout = made.layout(file.spec)
        context = contexts_of(layout, file.public)
        for update in file.updates:
            symbols, _ = made.compress(update, None, file.public, RNG)
            body = encode(symbols, layout, context)
            back = made.decompress(decode(body, layout, context), file.public).dense()
            assert error(update, back) <= 1.001 * nmse
            sizes[rdo] += len(body)
    assert sizes[0.14] <= share * sizes[0.0]


@pytest.mark.parametrize("rdo", [0.0, 0.14, 1.0])
@pytest.mark.parametrize(("control", "target"), [("nmse", 0.02), ("bits", 0.3), ("bits", 1e-6)])
@pytest.mark.parametrize("height", [1e2, 1e6, 1e30])
def test_few_huge_values_are_never_missed(
    rdo: float, control: str, target: float, height: float
) -> None:
    rng = np.random.default_rng(3)
    update = rng.standard_t(3, SPEC.size).astype(np.float32)
    outliers = rng.choice(SPEC.size, 5, replace=False)
    update[outliers] = np.float32(height) * np.array([1, -1, 1, -1, 1], np.float32)
    made = Ecsq(control, target, rdo=rdo)  # type: ignore[arg-type]
    _, back = received(made, update, SPEC)
    np.testing.assert_allclose(back[outliers], update[outliers], rtol=0.02)


@pytest.mark.parametrize("nmse", [0.01, 0.3, 0.9])
@pytest.mark.parametrize("tail", [1, 2, 30])
def test_the_error_keeps_to_its_target(nmse: float, tail: int) -> None:
    update = np.random.default_rng(tail).standard_t(tail, SPEC.size).astype(np.float32)
    _, back = received(Ecsq("nmse", nmse, rdo=0.14), update, SPEC)
    finest = np.abs(update).max() / 256
    assert error(update, back) <= max(1.002 * nmse, SPEC.size * finest**2 / np.square(update).sum())
    assert back.any()


def test_a_held_rate_has_less_error() -> None:
    update = Updates.load("fixture").updates[0]
    spec = Updates.load("fixture").spec
    (plain_bytes, plain), (bytes_, back) = (
        received(Ecsq("bits", 0.3, rdo=rdo), update, spec) for rdo in (0.0, 0.14)
    )
    assert bytes_ <= 0.3 * spec.size / 8
    assert error(update, back) < error(update, plain)
    assert bytes_ <= 1.01 * plain_bytes


def test_what_rounds_to_nothing_stays_nothing() -> None:
    update = np.full(SPEC.size, 0.55, np.float32)
    assert not received(Ecsq("step", 1.0, rdo=0.14), update, SPEC)[1].any()


def test_a_configuration_without_it_is_the_one_of_before() -> None:
    assert "rdo" not in to_config(Ecsq())
    assert to_config(Ecsq(rdo=0.14))["rdo"] == 0.14
    assert from_config(to_config(Ecsq(rdo=0.14))) == Ecsq(rdo=0.14)
    with pytest.raises(IncompatiblePlan, match=r"rdo must lie in \[0, 1\], not 3"):
        from_config({"id": "ecsq", "rdo": 3})


def test_a_small_update_has_the_bytes_that_a_body_has_at_least() -> None:
    update = np.random.default_rng(8).standard_normal(SPEC.size).astype(np.float32)
    plain = received(Ecsq("bits", 0.1), update, SPEC)[0]
    least = 4 * plain
    bytes_, back = received(Ecsq("bits", 0.1, min_bytes=least), update, SPEC)
    assert 0.9 * least <= bytes_ <= least
    assert error(update, back) < 0.8 * error(update, received(Ecsq(), update, SPEC)[1])
    assert received(Ecsq("bits", 0.1, min_bytes=plain // 2), update, SPEC)[0] == plain
    assert "min_bytes" not in to_config(Ecsq())


@pytest.mark.parametrize("target", [0.05, 0.1, 0.4, 2.0])
@pytest.mark.parametrize("rdo", [0.03, 0.14, 0.5])
@pytest.mark.parametrize("kind", ["normal", "heavy", "residual"])
def test_the_rate_sent_is_the_rate_asked_for(target: float, rdo: float, kind: str) -> None:
    """A residual has no outliers: what was large has been sent, and the rate falls steeply with the
    step."""
    rng = np.random.default_rng(5)
    drawn = rng.standard_normal(SPEC.size) if kind == "normal" else rng.standard_t(2, SPEC.size)
    update: Vector = drawn.astype(np.float32)
    made = Ecsq("bits", target, rdo=rdo)
    for _ in range(12 if kind == "residual" else 0):
        new = rng.standard_t(3, SPEC.size).astype(np.float32)
        update = (update + new - received(made, update, SPEC)[1]).astype(np.float32)
    bits = 8 * received(made, update, SPEC)[0] / SPEC.size
    assert 0.94 * target <= bits <= target


def test_a_rate_below_a_single_value_sends_one() -> None:
    update = np.random.default_rng(6).standard_normal(SPEC.size).astype(np.float32)
    _, back = received(Ecsq("bits", 1e-6, rdo=0.14), update, SPEC)
    assert np.count_nonzero(back) == 1


def test_a_rate_above_the_finest_step_is_not_an_error() -> None:
    update = np.random.default_rng(7).standard_normal(SPEC.size).astype(np.float32)
    bytes_, back = received(Ecsq("bits", 30.0, rdo=0.14), update, SPEC)
    assert bytes_ < 30 * SPEC.size / 8
    assert error(update, back) < 1e-4
