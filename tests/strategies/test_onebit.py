"""1-bit Adam and 1-bit LAMB against plain Adam and LAMB that freeze at the same round."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from fedpress_compression.compressor import Public
from fedpress_compression.compressors.error_feedback import ErrorFeedback
from fedpress_compression.compressors.none import Uncompressed
from fedpress_compression.compressors.sign import Sign
from fedpress_compression.fixed_point import FixedPoint
from fedpress_compression.randomness import PublicRandomness
from fedpress_compression.tensors import ModelSpec, TensorSpec, Vector
from fedpress_protocols.errors import ConfigurationError
from fedpress_strategies import from_config
from fedpress_strategies.strategy import Strategy, Tally

SPEC = ModelSpec((TensorSpec("w", (20, 12)), TensorSpec("b", (20,)), TensorSpec("head", (12,))))
CLIENTS, ROUNDS, WARM_UP = 5, 60, 15
FIXED = FixedPoint.widest(max_abs=64.0, max_weight=CLIENTS)
RATE, BETA1, BETA2, BETA3, TAU = 0.02, 0.9, 0.99, 0.8, 1e-3
Doubles = npt.NDArray[np.float64]
START = np.random.default_rng(9).standard_normal(SPEC.size).astype(np.float32)


def update_of(client: int, number: int, parameters: npt.NDArray[Any]) -> Doubles:
    """A step towards the client's own optimum, of a scale of its own for every coordinate."""
    rng = np.random.default_rng([client, number])
    optimum = np.random.default_rng(client).standard_normal(SPEC.size)
    steepness = np.random.default_rng(77).uniform(0.01, 1, SPEC.size)
    noise = 0.3 * rng.standard_normal(SPEC.size)
    return np.asarray(0.1 * steepness * (optimum - parameters + noise))


def run(strategy: Strategy, made: Any) -> list[Vector]:
    """The model after every round; `made` compresses once the warm-up is over."""
    parameters, state = START, strategy.optimizer.init(START)
    feedback = [ErrorFeedback(made).init(SPEC)] * CLIENTS
    found = []
    for number in range(1, ROUNDS + 1):
        public = Public(SPEC, PublicRandomness(bytes(32)), round=number)
        warming = number <= WARM_UP
        aggregator = strategy.aggregator(SPEC.size, FIXED)
        compressor = ErrorFeedback(Uncompressed() if warming else made)
        for client in range(CLIENTS):
            update = update_of(client, number, parameters).astype(np.float32)
            rng = np.random.default_rng([client, number])
            symbols, feedback[client] = compressor.compress(update, feedback[client], public, rng)
            aggregator.add(compressor.decompress(symbols, public), 1)
        tally = Tally(CLIENTS, warming=warming, spec=SPEC)
        parameters, state = strategy.optimizer.apply(parameters, aggregator.result(), state, tally)
        found.append(parameters)
    return found


def settings(name: str, **more: Any) -> Strategy:
    common = {"learning_rate": RATE, "beta1": BETA1, "beta2": BETA2, "tau": TAU}
    return from_config({"id": name, **common, **more})


class PlainAdam:
    """Kingma and Ba 2015, Algorithm 1; its second moment stands still after the warm-up."""

    def __init__(self) -> None:
        self.m = np.zeros(SPEC.size)
        self.v = np.zeros(SPEC.size)
        self.v_hat = np.zeros(SPEC.size)

    def direction(self, number: int, update: Doubles) -> Doubles:
        self.m = BETA1 * self.m + (1 - BETA1) * update
        if number <= WARM_UP:
            self.v = BETA2 * self.v + (1 - BETA2) * update**2
            self.v_hat = self.v / (1 - BETA2**number)
        return np.asarray(self.m / (1 - BETA1**number) / (np.sqrt(self.v_hat) + TAU))


def mean_update(number: int, parameters: npt.NDArray[Any]) -> Doubles:
    return np.asarray(
        np.mean([update_of(client, number, parameters) for client in range(CLIENTS)], axis=0)
    )


def test_with_the_identity_1_bit_adam_is_adam_whose_variance_is_frozen() -> None:
    adam, oracle = PlainAdam(), START.astype(np.float64)
    for number, theirs in enumerate(
        run(settings("onebit_adam", both_ways=False), Uncompressed()), 1
    ):
        oracle = oracle + RATE * adam.direction(number, mean_update(number, oracle))
        assert theirs == pytest.approx(oracle, abs=2e-5)


@pytest.mark.parametrize("change", [0.0, 0.1])
def test_with_the_identity_1_bit_lamb_is_lamb_frozen_at_the_same_round(change: float) -> None:
    """Li et al. 2021, Algorithm 1, written out for every layer."""
    strategy = settings("onebit_lamb", both_ways=False, beta3=BETA3, factor_change=change)
    adam, oracle = PlainAdam(), START.astype(np.float64)
    average = dict.fromkeys(SPEC.slices, 0.0)
    last = dict.fromkeys(SPEC.slices, 1.0)
    fresh, moved = np.zeros(SPEC.size), set()
    for number, theirs in enumerate(run(strategy, Uncompressed()), 1):
        update = mean_update(number, oracle)
        direction = adam.direction(number, update)
        fresh = BETA2 * fresh + (1 - BETA2) * update**2
        for name, layer in SPEC.slices.items():
            if number <= WARM_UP:
                c = float(np.linalg.norm(oracle[layer]) / np.linalg.norm(direction[layer]))
                c = min(max(c, 0.01), 10.0)
                average[name] = BETA3 * average[name] + (1 - BETA3) * c
            else:
                frozen = np.sqrt(adam.v_hat[layer]) + TAU
                now = np.sqrt(fresh[layer] / (1 - BETA2**number)) + TAU
                r = min(max(float((frozen / now).max()), 0.5), 4.0)
                r = min(max(r, (1 - change) * last[name]), (1 + change) * last[name])
                moved.add(r)
                last[name] = r
                c = r * average[name] / (1 - BETA3**WARM_UP)
            oracle[layer] += RATE * c * direction[layer]
        assert theirs == pytest.approx(oracle, abs=5e-5)
    assert (len(moved) > 1) == (change > 0)


@pytest.mark.parametrize("name", ["onebit_adam", "onebit_lamb"])
@pytest.mark.parametrize("both_ways", [False, True])
def test_one_bit_with_feedback_comes_as_near_the_optimum_as_float32(
    name: str, both_ways: bool
) -> None:
    optimum = np.mean(
        [np.random.default_rng(client).standard_normal(SPEC.size) for client in range(CLIENTS)],
        axis=0,
    )
    strategy = settings(name, both_ways=both_ways, chunk=64)
    exact = run(settings(name, both_ways=False), Uncompressed())[-1]
    rough = run(strategy, Sign(chunk=64))[-1]
    begun, reached = (np.linalg.norm(each - optimum) for each in (START, exact))
    assert reached < 0.6 * begun
    slack = 0.25 if both_ways else 0.1  # what comes down is then rough in every single step
    assert np.linalg.norm(rough - optimum) < reached + slack * begun


def test_rounded_both_ways_a_step_is_a_sign_a_scale_and_the_frozen_root() -> None:
    """And what the rounding lost is in the next momentum: Tang et al. 2021, Algorithm 1."""
    strategy = settings("onebit_adam", both_ways=True, chunk=100)
    rng = np.random.default_rng(1)
    parameters, state = START, strategy.optimizer.init(START)
    for _ in range(3):
        delta = 0.01 * rng.standard_normal(SPEC.size)
        warming = Tally(warming=True)
        parameters, state = strategy.optimizer.apply(parameters, delta, state, warming)
    first, error = state["first"], np.zeros(SPEC.size)
    for _ in range(5):
        delta = 0.01 * rng.standard_normal(SPEC.size)
        _, state = strategy.optimizer.apply(parameters, delta, state, Tally())
        whole = BETA1 * first + (1 - BETA1) * delta + error
        for start in range(0, SPEC.size, 100):
            part = slice(start, start + 100)
            scale = np.abs(whole[part]).mean()
            assert np.abs(state["first"][part]) == pytest.approx(scale)
            assert (np.sign(state["first"][part]) == np.sign(whole[part])).all()
        first, error = state["first"], whole - state["first"]
        assert state["error"] == pytest.approx(error)


@pytest.mark.parametrize("name", ["onebit_adam", "onebit_lamb"])
def test_what_no_warm_up_has_settled_cannot_be_frozen(name: str) -> None:
    strategy = from_config({"id": name})
    assert strategy.needs_warm_up
    state = strategy.optimizer.init(START)
    with pytest.raises(ConfigurationError, match="the task had no warm-up"):
        strategy.optimizer.apply(START, np.zeros(SPEC.size), state)


@pytest.mark.parametrize("name", ["onebit_adam", "onebit_lamb"])
def test_what_is_frozen_stays_so(name: str) -> None:
    """Also where a later period of a schedule says that it warms up."""
    strategy = from_config({"id": name})
    state, parameters = strategy.optimizer.init(START), START
    rng = np.random.default_rng(0)
    for warming in (True, False):
        delta = rng.standard_normal(SPEC.size)
        tally = Tally(warming=warming, spec=SPEC)
        parameters, state = strategy.optimizer.apply(parameters, delta, state, tally)
    again = Tally(warming=True, spec=SPEC)
    _, after = strategy.optimizer.apply(parameters, np.ones(SPEC.size), state, again)
    assert (after["second"] == state["second"]).all()
    assert int(after["settled"][0]) == 1
    assert int(after["rounds"][0]) == 3


def test_without_the_tensors_lamb_takes_all_for_one_layer_and_zeros_for_no_scale() -> None:
    strategy = from_config({"id": "onebit_lamb", "learning_rate": 0.5})
    zeros = np.zeros(4, np.float32)
    state = strategy.optimizer.init(zeros)
    delta = np.array([1.0, -1.0, 1.0, -1.0])
    moved, state = strategy.optimizer.apply(zeros, delta, state, Tally(warming=True))
    assert moved == pytest.approx(0.5 * delta, abs=1e-3)
    assert state["coefficient"].size == 1


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ({"learning_rate": 0}, "learning_rate must be positive"),
        ({"beta1": 1}, r"beta1 must lie in \[0, 1\)"),
        ({"beta2": -0.1}, r"beta2 must lie in \[0, 1\)"),
        ({"tau": 0}, "tau must be positive"),
        ({"chunk": 0}, "chunk must be at least 1"),
        ({"beta3": 1}, r"beta3 must lie in \[0, 1\)"),
        ({"factor_change": 1}, r"factor_change must lie in \[0, 1\)"),
    ],
)
def test_a_setting_that_cannot_work_says_why(setting: dict[str, Any], says: str) -> None:
    for name in ("onebit_adam", "onebit_lamb"):
        if name == "onebit_lamb" or not {"beta3", "factor_change"} & set(setting):
            with pytest.raises(ConfigurationError, match=says):
                from_config({"id": name, **setting})
