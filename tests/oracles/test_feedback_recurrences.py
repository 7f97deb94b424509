"""Feedback methods through compressors and strategies, step by step against their recurrences."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from fedpress_compression.compressor import Compressor, Public
from fedpress_compression.compressors.cafe import Cafe
from fedpress_compression.compressors.delta import Delta
from fedpress_compression.compressors.ef21 import EF21
from fedpress_compression.compressors.topk import TopK
from fedpress_compression.fixed_point import FixedPoint
from fedpress_compression.randomness import PublicRandomness
from fedpress_compression.tensors import ModelSpec, TensorSpec, Vector
from fedpress_strategies import from_config

SPEC = ModelSpec((TensorSpec("w", (12, 10)),))
CLIENTS, STEPS = 6, 25
INNER = TopK(fraction=0.1, magnitude_bits=4)
FIXED = FixedPoint.widest(max_abs=64.0, max_weight=CLIENTS * 10)
Doubles = npt.NDArray[np.float64]


def optima() -> Doubles:
    return np.random.default_rng(1).standard_normal((CLIENTS, SPEC.size))


def computed(client: int, parameters: npt.NDArray[Any]) -> Doubles:
    """A step of gradient descent towards the client's own optimum."""
    return np.asarray(0.3 * (optima()[client] - parameters))


def pressed(vector: Doubles) -> Doubles:
    """What the inner compressor makes of a vector."""
    public = Public(SPEC, PublicRandomness(bytes(32)))
    symbols, _ = INNER.compress(vector.astype(np.float32), None, public, np.random.default_rng(0))
    return INNER.decompress(symbols, public).dense().astype(np.float64)


def run(made: Compressor[Any], cohorts: list[list[int]]) -> list[Vector]:
    """The model after every round, under plain averaging at learning rate 1."""
    strategy = from_config({"id": "fedavg"})
    parameters = before = np.zeros(SPEC.size, np.float32)
    states = [made.init(SPEC) for _ in range(CLIENTS)]
    found = []
    for number, cohort in enumerate(cohorts, 1):
        randomness = PublicRandomness(bytes([number] * 32))
        public = Public(SPEC, randomness, {"previous": parameters - before}, round=number)
        aggregator = strategy.aggregator(SPEC.size, FIXED)
        for client in cohort:
            update = computed(client, parameters).astype(np.float32)
            symbols, states[client] = made.compress(
                update, states[client], public, np.random.default_rng(0)
            )
            aggregator.add(made.decompress(symbols, public), 10)
        before = parameters
        parameters, _ = strategy.optimizer.apply(parameters, aggregator.result(), {})
        found.append(parameters)
    return found


def everybody() -> list[list[int]]:
    return [list(range(CLIENTS))] * STEPS


def test_ef21_is_its_recurrence() -> None:
    """g_i += C(u_i - g_i); g = mean of g_i; w += g."""
    parameters, own = np.zeros(SPEC.size), np.zeros((CLIENTS, SPEC.size))
    for theirs in run(EF21(INNER), everybody()):
        for client in range(CLIENTS):
            own[client] += pressed(computed(client, parameters) - own[client])
        parameters = parameters + own.mean(axis=0)
        assert theirs == pytest.approx(parameters, abs=2e-4)
        parameters = theirs.astype(np.float64)  # a tie in top-k decided the other way is no error
    assert np.linalg.norm(parameters - optima().mean(axis=0)) < 0.3


def test_ef21_follows_a_part_of_the_clients() -> None:
    """g += participation * mean over the cohort of C(u_i - g_i)."""
    rng = np.random.default_rng(2)
    cohorts = [rng.choice(CLIENTS, 2, replace=False).tolist() for _ in range(STEPS)]
    parameters, mean = np.zeros(SPEC.size), np.zeros(SPEC.size)
    own = np.zeros((CLIENTS, SPEC.size))
    made = EF21(INNER, participation=2 / CLIENTS)
    for cohort, theirs in zip(cohorts, run(made, cohorts), strict=True):
        for client in cohort:
            sent = pressed(computed(client, parameters) - own[client])
            own[client] += sent
            mean = mean + sent / CLIENTS
        parameters = parameters + mean
        assert theirs == pytest.approx(parameters, abs=2e-4)
        parameters = theirs.astype(np.float64)
    assert mean == pytest.approx(own.mean(axis=0), abs=1e-9)


@pytest.mark.parametrize("factor", [1.0, 0.9, 0.5])
@pytest.mark.parametrize("guard", [None, 1.0, 2.0])
def test_cafe_is_its_recurrence(factor: float, guard: float | None) -> None:
    """h = mean of (p_i + C(u_i - p_i)), p_i = factor * h or, if that is a stranger, 0; w += h."""
    parameters, step = np.zeros(SPEC.size), np.zeros(SPEC.size)
    left_out = 0
    for theirs in run(Cafe(INNER, factor, guard), everybody()):
        received = []
        for client in range(CLIENTS):
            update = computed(client, parameters)
            guess = factor * step
            if guard is not None and np.linalg.norm(update - guess) > guard * np.linalg.norm(
                update
            ):
                guess, left_out = np.zeros(SPEC.size), left_out + 1
            received.append(guess + pressed(update - guess))
        step = np.mean(received, axis=0)
        parameters = parameters + step
        assert theirs == pytest.approx(parameters, abs=2e-4)
        parameters = theirs.astype(np.float64)
    assert (left_out > 0) == (guard == 1.0)


def test_delta_for_a_whole_cohort_moves_the_model_as_ef21_does() -> None:
    made = Delta(INNER)
    parameters = np.zeros(SPEC.size, np.float32)
    states = [made.init(SPEC) for _ in range(CLIENTS)]
    lasts = np.zeros((CLIENTS, SPEC.size), np.float32)
    public = Public(SPEC, PublicRandomness(bytes(32)))
    for theirs in run(EF21(INNER), everybody()):
        for client in range(CLIENTS):
            update = computed(client, parameters).astype(np.float32)
            known = replace(public, knowledge={"own": lasts[client]})
            symbols, states[client] = made.compress(
                update, states[client], known, np.random.default_rng(0)
            )
            lasts[client] = made.decompress(symbols, known).dense()
        moved = parameters + lasts.mean(axis=0, dtype=np.float64)
        assert theirs == pytest.approx(moved, abs=2e-4)
        parameters = theirs
