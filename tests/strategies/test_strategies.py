"""Every strategy against a few lines of plain numpy, and the errors of its configuration."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import fedpress_strategies.strategy as registry
from fedpress_compression.fixed_point import FixedPoint
from fedpress_compression.update import Update
from fedpress_protocols.errors import ConfigurationError
from fedpress_strategies import Strategy, from_config, strategies
from fedpress_strategies.strategy import strategy

FIXED = FixedPoint.widest(max_abs=256.0, max_weight=10_000)
SIZE = 50


def updates(number: int) -> list[tuple[npt.NDArray[np.float32], int]]:
    rng = np.random.default_rng(number)
    return [(rng.standard_normal(SIZE).astype(np.float32), int(w)) for w in rng.integers(1, 99, 4)]


def run(config: dict[str, Any], rounds: int = 5) -> npt.NDArray[np.float32]:
    made = from_config(config)
    parameters = np.linspace(-1, 1, SIZE, dtype=np.float32)
    state = made.optimizer.init(parameters)
    for number in range(rounds):
        aggregator = made.aggregator(SIZE, FIXED)
        assert aggregator.linear
        for values, weight in updates(number):
            aggregator.add(Update.from_dense(values), weight)
        parameters, state = made.optimizer.apply(parameters, aggregator.result(), state)
    return parameters


def mean(number: int) -> npt.NDArray[np.float64]:
    pairs = updates(number)
    total = sum(weight * values.astype(np.float64) for values, weight in pairs)
    return np.asarray(total / sum(weight for _, weight in pairs))


@pytest.mark.parametrize("rate", [1.0, 0.3])
def test_fedavg_adds_the_weighted_mean(rate: float) -> None:
    expected = np.linspace(-1, 1, SIZE, dtype=np.float32).astype(np.float64)
    for number in range(5):
        expected += rate * mean(number)
    assert run({"id": "fedavg", "learning_rate": rate}) == pytest.approx(expected, abs=1e-5)


def test_fedavgm_keeps_a_heavy_ball() -> None:
    expected = np.linspace(-1, 1, SIZE, dtype=np.float32).astype(np.float64)
    velocity = np.zeros(SIZE)
    for number in range(5):
        velocity = 0.7 * velocity + mean(number)
        expected += 0.5 * velocity
    config = {"id": "fedavgm", "learning_rate": 0.5, "momentum": 0.7}
    assert run(config) == pytest.approx(expected, abs=1e-5)


def test_fedavgm_without_momentum_is_fedavg() -> None:
    assert (run({"id": "fedavgm", "momentum": 0}) == run({"id": "fedavg"})).all()


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({}, "no strategy has the id None; known are .*fedavg, fedavgm"),
        ({"id": "fedavg", "momentum": 0.5}, "takes learning_rate, not momentum"),
        ({"id": "fedavg", "learning_rate": 0}, "learning_rate must be positive"),
        ({"id": "fedavg", "learning_rate": "fast"}, "strategy 'fedavg' from"),
        ({"id": "fetchsgd", "rows": 0}, "strategy 'fetchsgd' from .*rows"),
        ({"id": "fedavgm", "momentum": 1}, r"momentum must lie in \[0, 1\)"),
    ],
)
def test_a_configuration_that_cannot_work_says_why(config: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        from_config(config)


def test_a_name_belongs_to_one_strategy() -> None:
    def impostor() -> Strategy:
        return from_config({"id": "fedavg"})

    assert "fedavg" in strategies()
    impostor.__module__ = "fedpress_strategies.other"
    with pytest.raises(ValueError, match="strategy 'fedavg' is already registered by fedavg"):
        strategy("fedavg")(impostor)
    impostor.__module__ = "acme"
    with pytest.raises(ValueError, match=r"has the form package\.name, and 'mine' has not"):
        strategy("mine")(impostor)


def test_installed_packages_bring_strategies_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedpress_strategies.strategy._by_id", dict(strategies()))
    theirs = SimpleNamespace(name="acme.theirs", dist=SimpleNamespace(name="acme"), module="acme")

    def build() -> Strategy:
        return from_config({"id": "fedavg"})

    theirs.load = lambda: strategy("acme.theirs")(build)

    monkeypatch.setattr(registry, "_load", registry._load.__wrapped__)

    def installed(group: str) -> list[SimpleNamespace]:
        return [theirs] if group == "fedpress.strategies" else []

    monkeypatch.setattr("fedpress_compression.plugins.entry_points", installed)
    assert strategies()["acme.theirs"] is build
    theirs.load = lambda: strategies
    with pytest.raises(ConfigurationError, match="acme cannot be loaded: it points to None"):
        strategies()


def test_an_unknown_strategy_names_the_package_that_has_it() -> None:
    with pytest.raises(ConfigurationError, match="of the package acme-tools, which is not instal"):
        from_config({"id": "acme_tools.theirs"})


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"id": "scaffold"}, "'scaffold' needs clients"),
        ({"id": "fedprox", "mu": -1}, "proximal: must be 0 or more, not -1"),
        ({"id": "fedprox", "mu": math.nan}, "mu must be a finite number, not nan"),
        ({"id": "fedavgm", "learning_rate": math.inf}, "learning_rate must be a finite number"),
        ({"id": "fedper", "personal": 3}, "a setting is of the wrong kind"),
        ({"id": "ema", "inner": 3}, "a setting is of the wrong kind"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_in_plain_words(
    config: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigurationError, match=says) as caught:
        from_config(config)
    assert "validation error" not in str(caught.value)


def test_strategies_within_one_another_are_bounded() -> None:
    config: dict[str, Any] = {"id": "fedavg"}
    for _ in range(200):
        config = {"id": "ema", "inner": config}
    with pytest.raises(ConfigurationError, match="nested more than 16 levels deep"):
        from_config(config)
