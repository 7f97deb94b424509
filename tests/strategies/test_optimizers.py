"""Every optimizer, devices and server together, against its paper in a few lines of numpy."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from federation import Federation

from fedpress_compression.fixed_point import FixedPoint
from fedpress_compression.tensors import ModelSpec, TensorSpec
from fedpress_compression.update import Update
from fedpress_protocols.errors import ConfigurationError, InvalidUpdate
from fedpress_protocols.model import Model
from fedpress_protocols.plan import TrainingTerms
from fedpress_strategies import from_config
from fedpress_strategies import strategy as strategy_module
from fedpress_strategies.adasum import Tree, combined
from fedpress_strategies.strategy import (
    ALONE,
    EXAMPLE_TERMS,
    AggregationSpace,
    ServerOptimizer,
    ServerSGD,
    Tally,
    applied,
    example_of,
    figures,
    strategies,
)
from tests.strategies.bowls import Bowl, bowls

CLIENTS, SIZE, ROUNDS = 6, 20, 5
FIXED = FixedPoint.widest(max_abs=256.0, max_weight=10_000)
TERMS = TrainingTerms(local_steps=4, learning_rate=0.1)
START = np.linspace(-1, 1, SIZE, dtype=np.float32)
Dense = npt.NDArray[np.float64]


def cohort(number: int) -> list[int]:
    """Four of the six clients."""
    chosen = np.random.default_rng(number).choice(CLIENTS, 4, replace=False)
    return [int(index) for index in chosen]


def federated(
    folder: Path, strategy: dict[str, Any], training: TrainingTerms = TERMS
) -> Federation:
    model = Model.from_tensors({"w": START.copy()})
    made = Federation(folder, model, strategy, bowls(CLIENTS, SIZE), training)
    for number in range(ROUNDS):
        made.run(cohort(number))
    return made


def local(
    client: Bowl,
    x: Dense,
    added: Callable[[Dense], Any] = lambda y: 0,
    steps: int = 4,
) -> Dense:
    """Where local training from `x` ends."""
    y = x.copy()
    for _ in range(steps):
        y = y - 0.1 * (client.curvature * (y - client.centre) + added(y))
    return y


def rounds() -> list[list[tuple[int, Bowl]]]:
    clients = bowls(CLIENTS, SIZE)
    return [[(index, clients[index]) for index in cohort(number)] for number in range(ROUNDS)]


def mean(chosen: list[tuple[int, Bowl]], x: Dense) -> Dense:
    weights = [client.num_examples for _, client in chosen]
    updates = [local(client, x) - x for _, client in chosen]
    return np.average(updates, axis=0, weights=weights)


@pytest.mark.parametrize(
    ("rule", "corrected"),
    [
        ("fedadam", False),
        ("fedadam", True),
        ("fedyogi", False),
        ("fedyogi", True),
        ("fedadagrad", False),
    ],
)
def test_adaptive_optimizers_follow_algorithm_2(tmp_path: Path, rule: str, corrected: bool) -> None:
    x, tau, rate, b1, b2 = START.astype(np.float64), 0.01, 0.05, 0.8, 0.95
    m, v = np.zeros(SIZE), np.full(SIZE, 0 if corrected else tau**2)
    for number, chosen in enumerate(rounds(), 1):
        delta = mean(chosen, x)
        m = b1 * m + (1 - b1) * delta
        if rule == "fedadagrad":
            v = v + delta**2
        elif rule == "fedadam":
            v = b2 * v + (1 - b2) * delta**2
        else:
            v = v - (1 - b2) * delta**2 * np.sign(v - delta**2)
        of_m, of_v = (1 - b1**number, 1 - b2**number) if corrected else (1, 1)
        x = x + rate * (m / of_m) / (np.sqrt(v / of_v) + tau)
    settings: dict[str, Any] = {"learning_rate": rate, "beta1": b1, "tau": tau}
    if rule != "fedadagrad":
        settings |= {"beta2": b2, "bias_correction": corrected}
    made = federated(tmp_path, {"id": rule, **settings})
    assert made.model.parameters == pytest.approx(x, abs=1e-5)


@pytest.mark.parametrize("rule", ["fedadam", "fedyogi", "fedadagrad"])
def test_adaptive_optimizers_follow_flowers_rules(tmp_path: Path, rule: str) -> None:
    """As its FedAdam, FedYogi and FedAdagrad have them, flwr 1.41, `aggregate_train`."""
    x, eta, tau = START.astype(np.float64), 0.05, 0.05
    beta_1, beta_2 = (0.0, 0.0) if rule == "fedadagrad" else (0.9, 0.99)
    m_t, v_t = np.zeros(SIZE), np.zeros(SIZE)
    for server_round, chosen in enumerate(rounds(), 1):
        delta_t = mean(chosen, x)
        m_t = beta_1 * m_t + (1 - beta_1) * delta_t
        eta_t = eta
        if rule == "fedadagrad":
            v_t = v_t + delta_t**2
        elif rule == "fedyogi":
            v_t = v_t - (1 - beta_2) * delta_t**2 * np.sign(v_t - delta_t**2)
        else:
            v_t = beta_2 * v_t + (1 - beta_2) * delta_t**2
            eta_t *= np.sqrt(1 - beta_2 ** (server_round + 1)) / (1 - beta_1 ** (server_round + 1))
        x = x + eta_t * m_t / (np.sqrt(v_t) + tau)
    settings = {"id": rule, "learning_rate": eta, "tau": tau}
    made = federated(tmp_path / "flwr", {**settings, "variant": "flwr"})
    assert made.model.parameters == pytest.approx(x, abs=1e-5)
    paper = federated(tmp_path / "paper", settings)
    assert np.abs(paper.model.parameters - x).max() > 1e-4


def test_fedsgd_takes_the_gradient_over_all_examples(tmp_path: Path) -> None:
    x = START.astype(np.float64)
    for chosen in rounds():
        weights = [client.num_examples for _, client in chosen]
        gradients = [client.curvature * (x - client.centre) for _, client in chosen]
        x = x - 0.1 * np.average(gradients, axis=0, weights=weights)
    made = federated(tmp_path, {"id": "fedsgd"})
    assert made.model.parameters == pytest.approx(x, abs=1e-5)


def test_fedprox_pulls_towards_the_rounds_model(tmp_path: Path) -> None:
    x = START.astype(np.float64)
    for chosen in rounds():
        weights = [client.num_examples for _, client in chosen]
        ends = [local(client, x, lambda y, at=x: 0.7 * (y - at)) for _, client in chosen]  # type: ignore[misc]
        x = np.average(ends, axis=0, weights=weights)
    made = federated(tmp_path, {"id": "fedprox", "mu": 0.7})
    assert made.model.parameters == pytest.approx(x, abs=1e-5)


def test_fedprox_without_a_pull_is_fedavg_to_the_last_bit(tmp_path: Path) -> None:
    prox = federated(tmp_path / "prox", {"id": "fedprox", "mu": 0})
    plain = federated(tmp_path / "plain", {"id": "fedavg"})
    assert prox.model.digest == plain.model.digest


def test_scaffold_is_option_two_of_its_algorithm(tmp_path: Path) -> None:
    x, c, own = START.astype(np.float64), np.zeros(SIZE), np.zeros((CLIENTS, SIZE))
    for chosen in rounds():
        moves, changes = [], []
        for index, client in chosen:
            y = local(client, x, lambda y, i=index, c=c: c - own[i])  # type: ignore[misc]
            after = own[index] - c + (x - y) / (4 * 0.1)
            moves.append(y - x)
            changes.append(after - own[index])
            own[index] = after
        x = x + 0.8 * np.mean(moves, axis=0)
        c = c + len(chosen) / CLIENTS * np.mean(changes, axis=0)
    made = federated(tmp_path, {"id": "scaffold", "clients": CLIENTS, "learning_rate": 0.8})
    assert made.model.parameters == pytest.approx(x, abs=1e-5)
    assert made.server_control == pytest.approx(c, abs=1e-5)
    for index, ledger in enumerate(made.ledgers):
        kept = np.zeros(SIZE) if ledger.control is None else ledger.control
        assert kept == pytest.approx(own[index], abs=1e-5)


def test_a_step_takes_no_more_memory_than_its_result() -> None:
    size = 2**21 + 5
    rng = np.random.default_rng(0)
    parameters, delta = rng.standard_normal(size, np.float32), rng.standard_normal(size)
    optimizer = ServerSGD(0.7)
    tracemalloc.start()
    try:
        moved, _ = optimizer.apply(parameters, delta, {})
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert np.array_equal(moved, (parameters.astype(np.float64) + 0.7 * delta).astype(np.float32))
    assert peak < 8 * size


def test_diloco_steps_as_torchs_nesterov_momentum_does(tmp_path: Path) -> None:
    x, velocity = START.astype(np.float64), np.zeros(SIZE)
    for chosen in rounds():
        delta = mean(chosen, x)
        velocity = 0.6 * velocity + delta
        x = x + 0.5 * (delta + 0.6 * velocity)
    config = {"id": "diloco", "learning_rate": 0.5, "momentum": 0.6}
    assert federated(tmp_path, config).model.parameters == pytest.approx(x, abs=1e-5)
    plain = federated(tmp_path, {"id": "diloco", "learning_rate": 0.5, "momentum": 0.0})
    same = federated(tmp_path, {"id": "fedavg", "learning_rate": 0.5})
    assert plain.model.parameters == pytest.approx(same.model.parameters, abs=1e-6)
    with pytest.raises(ConfigurationError, match="momentum must lie in"):
        from_config({"id": "diloco", "momentum": 1})


def test_fednova_averages_steps_and_directions_apart(tmp_path: Path) -> None:
    x = START.astype(np.float64)
    for chosen in rounds():
        weights = [client.num_examples for _, client in chosen]
        steps = [client.steps for _, client in chosen]
        directions = [(local(b, x, steps=b.steps) - x) / b.steps for _, b in chosen]
        x = x + np.average(steps, weights=weights) * np.average(directions, axis=0, weights=weights)
    made = federated(tmp_path, {"id": "fednova"}, TrainingTerms(learning_rate=0.1))
    assert made.model.parameters == pytest.approx(x, abs=1e-5)


def test_feddyn_is_its_algorithm(tmp_path: Path) -> None:
    x, h, alpha, own = START.astype(np.float64), np.zeros(SIZE), 0.3, np.zeros((CLIENTS, SIZE))
    for chosen in rounds():
        ends = []
        for index, client in chosen:
            y = local(client, x, lambda y, i=index, at=x: alpha * (y - at) - own[i])  # type: ignore[misc]
            own[index] = own[index] - alpha * (y - x)
            ends.append(y)
        h = h - alpha / CLIENTS * np.sum([y - x for y in ends], axis=0)
        x = np.mean(ends, axis=0) - h / alpha
    made = federated(tmp_path, {"id": "feddyn", "clients": CLIENTS, "alpha": alpha})
    assert made.model.parameters == pytest.approx(x, abs=1e-5)


@pytest.mark.parametrize("q", [0.0, 0.5, 2.0])
def test_qfedavg_weighs_by_powers_of_the_loss(tmp_path: Path, q: float) -> None:
    x, lipschitz = START.astype(np.float64), 1 / 0.1
    for chosen in rounds():
        steps, lengths = [], []
        for _, client in chosen:
            loss = (client.curvature * (x - client.centre) ** 2).sum() / 2
            gradient = lipschitz * (x - local(client, x))
            steps.append(loss**q * gradient)
            lengths.append(q * loss ** (q - 1) * (gradient**2).sum() + lipschitz * loss**q)
        x = x - np.sum(steps, axis=0) / np.sum(lengths)
    made = federated(tmp_path, {"id": "qfedavg", "q": q})
    assert made.model.parameters == pytest.approx(x, abs=1e-5)


def test_adasum_combines_in_a_tree(tmp_path: Path) -> None:
    def pair(a: Dense, b: Dense) -> Dense:
        return (1 - a @ b / (2 * a @ a)) * a + (1 - a @ b / (2 * b @ b)) * b

    x = START.astype(np.float64)
    for chosen in rounds():
        a, b, c, d = (local(client, x) - x for _, client in chosen)
        x = x + pair(pair(a, b), pair(c, d))
    made = federated(tmp_path, {"id": "adasum"})
    assert made.model.parameters == pytest.approx(x, abs=1e-5)


@pytest.mark.parametrize("uploads", range(9))
def test_adasum_holds_a_vector_for_each_level(uploads: int) -> None:
    rng = np.random.default_rng(uploads)
    rows = rng.normal(size=(uploads, SIZE)).astype(np.float32)
    tree = Tree(SIZE, FIXED)
    for row in rows:
        tree.add(Update.from_dense(row), 1)
    assert len(tree._pairs._levels) <= np.log2(max(uploads, 1)) + 1
    assert tree.result().shape == (SIZE,)
    # What is orthogonal is added, what is equal is averaged.
    twice = START.astype(np.float64) * 2
    flat = Tree(SIZE, FIXED)
    for index in range(uploads):
        flat.add(Update.from_dense(np.eye(SIZE, dtype=np.float32)[index]), 1)
    assert flat.result().sum() == uploads
    assert (combined(twice, twice) == twice).all()


def test_aggregators_refuse_updates_of_another_size() -> None:
    fair = from_config({"id": "qfedavg"}, TERMS).aggregator(SIZE, FIXED)
    for aggregator in (Tree(SIZE, FIXED), fair):
        with pytest.raises(InvalidUpdate, match="an update of 3 values, expected 20"):
            aggregator.add(Update.from_dense(np.ones(3, np.float32)), 1, {"loss": 1.0})
        with pytest.raises(InvalidUpdate, match="larger than the plan's"):
            aggregator.add(Update.from_dense(np.full(SIZE, 300, np.float32)), 1, {"loss": 1.0})
        assert not aggregator.result().any()


def test_the_average_of_the_rounds_is_published_beside_them(tmp_path: Path) -> None:
    config = {"id": "ema", "decay": 0.6, "inner": {"id": "fedavgm", "momentum": 0.5}}
    x, velocity, average = START.astype(np.float64), np.zeros(SIZE), np.zeros(SIZE)
    for number, chosen in enumerate(rounds(), 1):
        velocity = 0.5 * velocity + mean(chosen, x)
        x = x + velocity
        average = average + max(0.4, 1 / number) * (x - average)
    made = federated(tmp_path, config)
    assert made.model.parameters == pytest.approx(x, abs=1e-5)
    assert made.stored(made.published["average"]).parameters == pytest.approx(average, abs=1e-5)


def test_strategies_nest(tmp_path: Path) -> None:
    """Averages of SCAFFOLD are published with its control variate, and change nothing in it."""
    inside = {"id": "scaffold", "clients": CLIENTS}
    plain = federated(tmp_path / "plain", inside)
    averaged = federated(tmp_path / "averaged", {"id": "ema", "inner": inside})
    assert averaged.model.digest == plain.model.digest
    assert (averaged.server_control == plain.server_control).all()
    assert "average" in averaged.published


@pytest.mark.parametrize("name", strategies())
def test_every_strategy_has_an_example_and_says_what_it_is(name: str) -> None:
    made = from_config(example_of(name), EXAMPLE_TERMS)
    assert made.properties.source
    assert made.linear == made.aggregator(SIZE, FIXED).linear


@pytest.mark.parametrize(
    ("config", "training", "says"),
    [
        ({"id": "fedadam", "learning_rate": 0}, {}, "learning_rate must be positive"),
        ({"id": "fedyogi", "variant": "torch"}, {}, "variant must be paper or flwr, not 'torch'"),
        (
            {"id": "fedadam", "variant": "flwr", "bias_correction": True},
            {},
            "flwr, which has its own",
        ),
        ({"id": "fedyogi", "beta2": 1}, {}, r"beta2 must lie in \[0, 1\)"),
        ({"id": "fedadagrad", "tau": 0}, {}, "tau must be positive"),
        ({"id": "fedprox", "mu": -1}, {}, "proximal"),
        (
            {"id": "fedprox", "inner": {"id": "feddyn", "clients": 9}},
            {},
            "already has a proximal term",
        ),
        ({"id": "scaffold", "clients": 9}, {}, "set training.local_steps"),
        ({"id": "scaffold", "clients": 0}, TERMS, "clients must be at least 1"),
        ({"id": "scaffold", "clients": 9, "damping": 0}, TERMS, r"damping must lie in \(0, 1\]"),
        ({"id": "scaffold", "clients": 9, "learning_rate": 0}, TERMS, "must be positive"),
        ({"id": "scaffold"}, TERMS, "clients"),
        ({"id": "scaffold", "clients": 9, "training": {}}, TERMS, "not training"),
        ({"id": "feddyn", "clients": 9, "alpha": 0}, {}, "alpha must be positive"),
        ({"id": "qfedavg"}, {}, "set training.learning_rate"),
        ({"id": "qfedavg", "q": -1}, TERMS, r"q must lie in \[0, 10\]"),
        ({"id": "ema", "decay": 1}, {}, r"decay must lie in \[0, 1\)"),
        ({"id": "ema", "inner": {"id": "nothing"}}, {}, "no strategy has the id 'nothing'"),
        ({"id": "fedper", "personal": [""]}, {}, "personal"),
    ],
)
def test_settings_that_cannot_work_say_why(
    config: dict[str, Any], training: Any, says: str
) -> None:
    terms = training if isinstance(training, TrainingTerms) else TrainingTerms()
    with pytest.raises(ConfigurationError, match=says):
        from_config(config, terms)


def test_a_decaying_rate_is_whole_for_its_rounds_then_falls_in_a_line_and_stays() -> None:
    """Weight by weight against the formula, over more rounds than the decay has."""
    fields = {"learning_rate": 0.5, "constant_rounds": 2, "decay_rounds": 4, "final": 0.2}
    optimizer = from_config({"id": "fedavgm", "momentum": 0.8, **fields}, TERMS).optimizer
    x, state = START.copy(), optimizer.init(START)
    expected, velocity = START.astype(np.float64), np.zeros(SIZE)
    for factor in (1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2):
        delta = np.linspace(0, 1, SIZE)
        velocity = 0.8 * velocity + delta
        expected = expected + 0.5 * factor * velocity
        x, state = optimizer.apply(x, delta, state)
        np.testing.assert_allclose(x, expected, rtol=1e-5)


@pytest.mark.parametrize("decay", [{}, {"constant_rounds": 1, "decay_rounds": 3, "final": 0.2}])
def test_a_policy_takes_momentum_off_a_step_and_adds_none(decay: dict[str, Any]) -> None:
    """Under the default's wrappers, against the optimizer with the lesser momentum; the velocity
    stays, and goes on when all momentum is back."""

    def made(momentum: float) -> ServerOptimizer:
        inner = {"id": "fedavgm", "momentum": momentum, **decay}
        clipped = {"id": "spike_clipping", "inner": inner}
        return from_config({"id": "ema", "decay": 0.6, "inner": clipped}, TERMS).optimizer

    usual, less = made(0.8), made(0.5)
    delta = np.linspace(-1, 1, SIZE)
    x, state = START, usual.init(START)
    for most, same in ((0.5, less), (0.9, usual), (None, usual), (0.5, less)):
        expected, after = same.apply(x, delta, state)
        x, state = usual.apply(x, delta, state, replace(ALONE, momentum=most))
        np.testing.assert_array_equal(x, expected)
        assert {n: each.tolist() for n, each in state.items()} == {
            n: each.tolist() for n, each in after.items()
        }
    without, state = usual.apply(x, delta, state, replace(ALONE, momentum=0.0))
    again, _ = usual.apply(without, delta, state, replace(ALONE, momentum=1.0))
    assert np.linalg.norm(again - without) > np.linalg.norm(without - x)


@pytest.mark.parametrize(
    "lengths", [[1.0, 2.0, 3.0, 300.0, 1.0, 0.0], [1.0, 300.0, 1.0, 2.0], [1.0, 1.0, 300.0, 1.0]]
)
def test_a_spike_is_clipped_to_the_rounds_mean_and_momentum_does_not_repeat_it(
    lengths: list[float],
) -> None:
    inner = {"id": "fedavgm", "momentum": 0.5}
    optimizer = from_config({"id": "spike_clipping", "inner": inner}).optimizer
    rng = np.random.default_rng(5)
    unit = rng.standard_normal(SIZE)
    unit /= np.linalg.norm(unit)
    means, weight, velocity = 0.0, 0.0, 0.0
    values, state = START, optimizer.init(START)
    for count, length in enumerate(lengths):
        ratio = 3 if count < 3 else 1.5
        kept = min(length, ratio * means / weight) if count else length
        means, weight = 0.9 * means + kept, 0.9 * weight + 1
        velocity = 0.5 * velocity + kept
        before = values
        values, state = optimizer.apply(values, length * unit, state)
        np.testing.assert_allclose(values - before, velocity * unit, rtol=0, atol=1e-5)
        share = 1 - kept / length if length else 0.0
        expected = {"clipped_share": pytest.approx(share)} if share > 1e-9 else {}
        assert figures(optimizer, state) == expected
    still = optimizer.init(START)
    for _ in range(5):  # rounds without any update bound nothing
        _, still = optimizer.apply(START, np.zeros(SIZE), still)
    moved, _ = optimizer.apply(START, unit, still)
    np.testing.assert_allclose(moved - START, unit, rtol=0, atol=1e-6)
    with pytest.raises(ConfigurationError, match=r"ratio must be 1 or more, not 0\.5"):
        from_config({"id": "spike_clipping", "ratio": 0.5})


@pytest.mark.parametrize("inner", ["scaffold", "feddyn"])
def test_control_variates_and_clipping_are_refused(inner: str) -> None:
    wrapped = {"id": "spike_clipping", "inner": {"id": inner, "clients": 4}}
    with pytest.raises(ConfigurationError, match="clients move theirs by whole updates"):
        from_config(wrapped, TERMS)


@pytest.mark.parametrize(
    "fields",
    [{"constant_rounds": 3}, {"decay_rounds": -1}, {"decay_rounds": 4, "final": 0.0}, {"final": 2}],
)
def test_a_decay_that_makes_no_sense_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        from_config({"id": "fedavgm", **fields}, TERMS)


@pytest.mark.parametrize("name", strategies())
def test_a_step_in_blocks_is_the_step(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit, of every optimizer that says that it goes coordinate by coordinate."""
    monkeypatch.setattr(strategy_module, "_BLOCK", 7)
    optimizer = from_config(example_of(name), EXAMPLE_TERMS).optimizer
    if not getattr(optimizer, "is_by_coordinate", False):
        pytest.skip("steps the whole vector at once")
    rng, space = np.random.default_rng(3), AggregationSpace(tmp_path, 0)
    spec = ModelSpec((TensorSpec("w", (10,)), TensorSpec("running_var", (SIZE - 10,))))
    whole: tuple[Any, Any] = (START.copy(), None)
    blocks: tuple[Any, Any] = (START.copy(), None)
    for count in range(1, 5):
        delta, tally = rng.standard_normal(SIZE), Tally(count, {"steps": 3.5}, spec=spec)
        state = whole[1] or optimizer.init(whole[0])
        whole = optimizer.apply(whole[0], delta, state, tally)
        blocks = applied(optimizer, blocks[0], delta, blocks[1] or None, tally, space)
        assert whole[0].tobytes() == blocks[0].tobytes()
        assert {n: a.tobytes() for n, a in whole[1].items()} == {
            n: a.tobytes() for n, a in blocks[1].items()
        }


def test_a_file_for_an_array_needs_its_room_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk must not end the process when a page is written later."""
    array = AggregationSpace(tmp_path, 100).zeros(1000, np.int64)
    array += 5
    assert int(array.sum()) == 5000
    assert not list(tmp_path.iterdir())

    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full, raising=False)
    with pytest.raises(OSError, match="No space"):
        AggregationSpace(tmp_path, 100).zeros(1000, np.int64)
    AggregationSpace(tmp_path, 8000).zeros(1000, np.int64)
