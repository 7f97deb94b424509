"""Accuracy of each strategy under forged updates.

    python benchmarks/robustness.py [--quick] [--seeds 0,1,2] [--rounds 80] [--json FILE]

20 clients share scikit-learn's digits by Dirichlet(5) over the classes, mildly uneven; all take
part in each of 80 rounds, with 10 steps of SGD on batches of 16 at a rate of 0.3, on a perceptron
64-64-10. In an attack 4 of the 20 are forgers. They know all honest updates and tell the truth
about their numbers of examples. The updates go, uncompressed, through the very aggregators and
optimizers that the server runs; one with a value beyond 256 is refused, as the server does.

An accuracy is that on 540 images held out, the mean of the last 10 rounds (models come and go by a
point) and of 3 seeds for split, model and batches; without attack the forgers-to-be are honest.

As JSON: the settings under `setting`, and under `rows` for each strategy and attack `strategy` (its
configuration), `attack`, `accuracies` (one for each seed), `accuracy` (their mean), and `lost`, in
points of 100, against the same strategy without attack.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from statistics import NormalDist, mean
from typing import Any

import numpy as np
import numpy.typing as npt
from harness import parser, report, seed_list

from fedpress.demo.digits import NUM_CLASSES, Images, split
from fedpress_compression.fixed_point import FixedPoint
from fedpress_compression.tensors import ModelSpec, TensorSpec, Vector
from fedpress_compression.update import Update
from fedpress_protocols.errors import InvalidUpdate
from fedpress_strategies import from_config

CLIENTS, FORGERS = 20, 4
ROUNDS, STEPS, BATCH, LEARNING_RATE = 80, 10, 16, 0.3
CONCENTRATION = 5.0
COUNTED_ROUNDS = 10
SCALE = 10.0
MAX_ABS = 256.0

STRATEGIES: tuple[dict[str, Any], ...] = (
    {"id": "fedavg"},
    {"id": "median"},
    {"id": "trimmed_mean", "trim": FORGERS / CLIENTS},
    {"id": "krum", "byzantine": FORGERS / CLIENTS},
    {"id": "multi_krum", "byzantine": FORGERS / CLIENTS},
    {"id": "bulyan", "byzantine": FORGERS / CLIENTS},
    {"id": "geometric_median"},
    {"id": "norm_bounding"},
)

SPEC = ModelSpec(
    (
        TensorSpec("0.weight", (64, 64)),
        TensorSpec("0.bias", (64,)),
        TensorSpec("1.weight", (64, NUM_CLASSES)),
        TensorSpec("1.bias", (NUM_CLASSES,)),
    )
)
"""Weights are [inputs, outputs]."""

Updates = npt.NDArray[np.float32]
"""[clients, SPEC.size]"""
Attack = Callable[[Updates], Updates]
"""The forgers' updates [FORGERS, SPEC.size] for what all clients have trained, honestly or on
flipped labels; the first FORGERS rows are the forgers'."""


def _little(updates: Updates) -> Updates:
    """Baruch et al. 2019, "A Little Is Enough", arXiv:1902.06156, Algorithm 3: every coordinate
    off the honest mean by so many honest deviations that enough honest ones lie farther out."""
    honest = updates[FORGERS:].astype(np.float64)
    supporters = CLIENTS // 2 + 1 - FORGERS
    deviations = NormalDist().inv_cdf((len(honest) - supporters) / len(honest))
    forged = honest.mean(axis=0) - deviations * honest.std(axis=0)
    return np.tile(forged.astype(np.float32), (FORGERS, 1))


ATTACKS: Mapping[str, Attack] = {
    "none": lambda updates: updates[:FORGERS],
    "label flip": lambda updates: updates[:FORGERS],
    f"label flip x{SCALE:.0f}": lambda updates: np.float32(SCALE) * updates[:FORGERS],
    "sign flip": lambda updates: -updates[:FORGERS],
    f"sign flip x{SCALE:.0f}": lambda updates: np.float32(-SCALE) * updates[:FORGERS],
    "a little": _little,
}
"""Flipped labels, 9 less the label, are in the data already."""


@dataclass(frozen=True)
class Row:
    """A strategy under an attack; see the module's docstring."""

    strategy: dict[str, Any]
    attack: str
    accuracies: tuple[float, ...]
    accuracy: float
    lost: float


def figures(rows: Sequence[Row], seeds: Sequence[int], rounds: int) -> dict[str, Any]:
    """The figures for machines; see the module's docstring."""
    setting = {
        "clients": CLIENTS,
        "forgers": FORGERS,
        "concentration": CONCENTRATION,
        "rounds": rounds,
        "steps": STEPS,
        "batch": BATCH,
        "learning_rate": LEARNING_RATE,
        "seeds": list(seeds),
        "counted_rounds": COUNTED_ROUNDS,
    }
    return {"setting": setting, "rows": [asdict(row) for row in rows]}


def measured(seeds: Sequence[int], rounds: int) -> Iterator[Row]:
    """Strategy by strategy, first without attack."""
    for strategy in STRATEGIES:
        undisturbed = 0.0
        for attack in ATTACKS:
            accuracies = tuple(federated(strategy, attack, seed, rounds) for seed in seeds)
            accuracy = mean(accuracies)
            undisturbed = accuracy if attack == "none" else undisturbed
            lost = 100 * (undisturbed - accuracy)
            yield Row(strategy, attack, accuracies, accuracy, lost)


def federated(config: Mapping[str, Any], attack: str, seed: int, rounds: int) -> float:
    """Run all rounds; the mean accuracy of the last ones."""
    test, honest = _images(seed)
    shares = list(honest)
    if attack.startswith("label flip"):
        shares[:FORGERS] = [Images(s.pixels, NUM_CLASSES - 1 - s.labels) for s in shares[:FORGERS]]
    strategy = from_config(config)
    examples = [share.labels.size for share in shares]
    bounds = FixedPoint.widest(max_abs=MAX_ABS, max_weight=sum(examples))
    model = _first_model(seed)
    state = strategy.optimizer.init(model)
    rng = np.random.default_rng([seed, 1])
    accuracies = []
    for _ in range(rounds):
        updates = _trained(model, shares, rng)
        updates[:FORGERS] = ATTACKS[attack](updates)
        aggregator = strategy.aggregator(SPEC.size, bounds)
        for update, weight in zip(updates, examples, strict=True):
            with suppress(InvalidUpdate):
                aggregator.add(Update.from_dense(update), weight)
        model, state = strategy.optimizer.apply(model, aggregator.result(), state)
        accuracies.append(_accuracy(model, test))
    return mean(accuracies[-COUNTED_ROUNDS:])


@cache
def _images(seed: int) -> tuple[Images, list[Images]]:
    return split(seed, CLIENTS, CONCENTRATION)


def _first_model(seed: int) -> Vector:
    """Uniform within 1 / sqrt(inputs), as torch begins."""
    rng = np.random.default_rng([seed, 0])
    return (rng.uniform(-1, 1, SPEC.size) / 8).astype(np.float32)


def _trained(model: Vector, shares: list[Images], rng: np.random.Generator) -> Updates:
    """The update of every client to `model`; all clients at once."""
    drawn = [rng.integers(0, share.labels.size, (STEPS, BATCH)) for share in shares]
    pixels = np.stack([share.pixels[rows] for share, rows in zip(shares, drawn, strict=True)])
    labels = np.stack([share.labels[rows] for share, rows in zip(shares, drawn, strict=True)])
    models = np.tile(model, (len(shares), 1))
    with np.errstate(over="ignore", invalid="ignore"):  # a model that an attack has ruined
        for step in range(STEPS):
            gradients = _gradients(models, pixels[:, step], labels[:, step])
            models -= np.float32(LEARNING_RATE) * gradients
        return models - model


def _gradients(
    models: Updates, pixels: npt.NDArray[np.float32], labels: npt.NDArray[np.int64]
) -> Updates:
    """Of each model's mean cross-entropy on its own `pixels` [clients, batch, 64]."""
    first, first_bias, second, second_bias = _layers(models)
    hidden = np.maximum(pixels @ first + first_bias, 0)
    scores = hidden @ second + second_bias
    back = np.exp(scores - scores.max(axis=2, keepdims=True))
    back /= back.sum(axis=2, keepdims=True)
    back -= np.eye(NUM_CLASSES, dtype=np.float32)[labels]
    back /= BATCH
    inner = (back @ second.transpose(0, 2, 1)) * (hidden > 0)
    parts = (
        pixels.transpose(0, 2, 1) @ inner,
        inner.sum(axis=1),
        hidden.transpose(0, 2, 1) @ back,
        back.sum(axis=1),
    )
    return np.concatenate([part.reshape(len(models), -1) for part in parts], axis=1)


def _accuracy(model: Vector, images: Images) -> float:
    first, first_bias, second, second_bias = _layers(model[np.newaxis])
    hidden = np.maximum(images.pixels @ first + first_bias, 0)
    scores = (hidden @ second + second_bias)[0]
    return float((scores.argmax(axis=1) == images.labels).mean())


def _layers(models: Updates) -> list[Updates]:
    """The tensors of each of `models`: weights [models, inputs, outputs], biases
    [models, 1, outputs]."""
    return [
        models[:, SPEC.slices[tensor.name]].reshape(len(models), -1, tensor.shape[-1])
        for tensor in SPEC.trained
    ]


def table(rows: Sequence[Row]) -> Iterator[str]:
    """A line for each strategy: accuracy, and in brackets the points lost to the attack."""
    names = [f"{name:>18}" for name in ATTACKS]
    yield f"{'strategy':<18}" + "".join(names)
    for strategy in STRATEGIES:
        cells = [
            f"{100 * row.accuracy:.1f} %"
            if row.attack == "none"
            else f"{100 * row.accuracy:.1f} % ({-row.lost:+.1f})"
            for row in rows
            if row.strategy == strategy
        ]
        yield f"{strategy['id']:<18}" + "".join(f"{cell:>18}" for cell in cells)
    yield "accuracy on images held out; in brackets the points won or lost by the attack"


def main() -> None:
    command = parser(__doc__, quick="one seed, 10 rounds", seeds="0,1,2")
    command.add_argument("--rounds", type=int, default=ROUNDS)
    options = command.parse_args()
    seeds, rounds = seed_list(options), COUNTED_ROUNDS if options.quick else options.rounds
    rows = list(measured(seeds, rounds))
    report("\n".join(table(rows)), figures(rows, seeds, rounds), options.json)


if __name__ == "__main__":
    main()
