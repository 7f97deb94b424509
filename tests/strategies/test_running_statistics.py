"""Running statistics of normalisation layers: no momentum, and no variance below zero."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from federation import Federation

from fedpress_client import Trained
from fedpress_compression.compressor import from_config
from fedpress_compression.running_statistics import with_statistics, with_variances
from fedpress_compression.tensors import Vector
from fedpress_protocols.defaults import completed
from fedpress_protocols.downlink import encode_difference
from fedpress_protocols.messages import DownlinkTerms
from fedpress_protocols.model import Model
from fedpress_strategies.downlink import rounded, stepped

SHOWN = ("weight", "bn.running_mean", "bn.running_var")
MODEL = Model.from_tensors(
    {
        "weight": np.zeros(60, np.float32),
        "bn.running_mean": np.zeros(20, np.float32),
        "bn.running_var": np.ones(20, np.float32),
        "moving_variance.scale": np.zeros(5, np.float32),
    }
)
SPEC, NONE = MODEL.spec, from_config({"id": "none"})
DEFAULT: dict[str, Any] = completed(
    {
        "task": "t",
        "model": MODEL.digest,
        "rounds": 40,
        "training": {},
        "cohort": {"size": 20, "minimum": 1},
    }
)


class Layer:
    """Its weights go towards 1; its statistics come to what batches have, here 3 and .01."""

    def train(self, model: Model, _: Any) -> Trained:
        tensors = {name: each.copy() for name, each in model.tensors().items()}
        for name, goal in zip(SHOWN, (1.0, 3.0, 0.01), strict=True):
            tensors[name] += np.float32(0.1 if name == "weight" else 0.97) * (goal - tensors[name])
        return Trained(SPEC.flatten(tensors), 10)

    def evaluate(self, model: Model) -> None:
        return None


@pytest.mark.parametrize("is_compressed", [False, True])
def test_the_default_has_positive_variances_in_every_model(
    tmp_path: Path, is_compressed: bool
) -> None:
    """Momentum alone made them negative in the second round."""
    compressor = from_config(DEFAULT["profiles"][-1]["compressor"]) if is_compressed else NONE
    strategy, layers = DEFAULT["strategy"], [Layer()] * 3
    made = Federation(tmp_path, MODEL, strategy, layers, compressor=lambda _: compressor)
    for _ in range(30):
        made.run([0, 1, 2])
        for digest in (made.model.digest, made.published["average"]):
            assert made.stored(digest).tensors()["bn.running_var"].min() > 0
    tensors = made.model.tensors()
    assert tensors["bn.running_mean"] == pytest.approx(3, abs=0.2)
    assert tensors["bn.running_var"] == pytest.approx(0.01, abs=0.03)
    assert tensors["weight"] == pytest.approx(1, abs=0.2)


@pytest.mark.parametrize("inner", ["fedavgm", "diloco", "fedbuff"])
def test_statistics_come_at_once_and_weights_with_momentum(tmp_path: Path, inner: str) -> None:
    strategy = {"id": inner, "learning_rate": 1.0, "momentum": 0.8}
    weight, means, _ = moves(tmp_path, strategy)
    assert weight[1] > weight[0]
    assert means == pytest.approx((2.91, 0.0873, 0.0026), abs=1e-3)


@pytest.mark.parametrize("inner", ["fedadam", "fedyogi", "fedadagrad"])
def test_statistics_come_at_once_and_weights_by_moments(tmp_path: Path, inner: str) -> None:
    """A step of moments has the length of the learning rate, whatever the update's."""
    weight, means, variances = moves(tmp_path, {"id": inner, "learning_rate": 0.01})
    assert 0 < max(weight) < 0.02
    assert means == pytest.approx((2.91, 0.0873, 0.0026), abs=1e-3)
    assert sum(variances) == pytest.approx(0.01 - 1, abs=0.01)


def moves(folder: Path, strategy: dict[str, Any]) -> list[tuple[float, ...]]:
    """By tensor of SHOWN: how far each of three rounds moves its first value."""
    made = Federation(folder, MODEL, strategy, [Layer()], compressor=lambda _: NONE)
    rounds = []
    for _ in range(3):
        before = made.model.tensors()
        made.run([0])
        after = made.model.tensors()
        rounds.append([float(after[name][0] - before[name][0]) for name in SHOWN])
    return list(zip(*rounds, strict=True))


def test_a_downlink_takes_no_variance_below_a_tenth_and_waits_for_no_room() -> None:
    base = MODEL.with_parameters(MODEL.parameters * np.float32(0.125))
    target: Vector = base.parameters + np.float32(0.25)
    target[SPEC.slices["bn.running_var"]] = 0.001
    parameters = stepped(base, target, DownlinkTerms(rate=0.01)).parameters
    variances = parameters[SPEC.slices["bn.running_var"]]
    assert variances == pytest.approx(0.0125, rel=1 / 32)
    assert (variances >= 0.0125).all()
    means = parameters[SPEC.slices["bn.running_mean"]]
    assert means == pytest.approx(0.25, abs=0.112 / 64)  # of the published deviation


@pytest.mark.parametrize("variance", [0.02, 1e-5, 40.0])
def test_published_statistics_come_to_what_devices_measure_and_stay_there(variance: float) -> None:
    """However the weights beside them move, and whatever the server keeps besides."""
    terms, rng = DownlinkTerms(), np.random.default_rng(1)
    base = rounded(MODEL, terms)
    kept, sizes = base.parameters, list[int]()
    goal: dict[str, Any] = {"bn.running_mean": 0.3, "bn.running_var": variance}
    for number in range(12):
        update = rng.normal(scale=0.1, size=SPEC.size).astype(np.float32)
        for name, value in goal.items():
            update[SPEC.slices[name]] = np.float32(value) - base.parameters[SPEC.slices[name]]
        before = with_statistics(SPEC, kept, base.parameters)
        kept = with_variances(SPEC, before, before + update)
        after = stepped(base, kept, terms)
        sizes.append(len(encode_difference(base, after, terms.coder)))
        assert Model.from_bytes(after.to_bytes()).digest == after.digest
        base = after
        if number > 5:
            for name, value in goal.items():
                off = value / 64 if name == "bn.running_var" else max(variance, 1e-5) ** 0.5 / 64
                assert base.tensors()[name] == pytest.approx(value, abs=1.01 * off)
    assert sizes[-1] <= sizes[0]
