"""The effect of clients that differ on plain averaging, and on three strategies against it.

    python benchmarks/drift.py [--seeds 3] [--quick] [--routes] [--json FILE]

scikit-learn's digits on 10 clients, all in every round, batches of 16, rate .1. *classes*: few
classes each (Dirichlet .1), 20 local steps, the perceptron of `digits_task.py`, 40 rounds. *steps*:
clients of even number see the digits below 5 and take 20 steps, the others see the other digits and
take 4; softmax regression, which has one minimum, 100 rounds. What runs is the product's own code
without its network: plans, ledgers, bodies, the server's aggregation. The accuracy is the mean of
the last five rounds' on held-out images; bytes are `len(body)` over all clients and rounds.

--routes compares four ways to compress a control variate instead, on *classes*, top-k 1 %:
c_i from the decoded update with error feedback; c_i from the decoded update + K r c without it, as
the product has it; both vectors sent with error feedback; an exact c_i with error feedback.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the products are too small to share

import digits_task
import numpy as np
from digits_task import Digits, Rows, first_model, gradient_of
from federation import Federation
from harness import parser, save

from fedpress_client import Trained, TrainingRequest
from fedpress_compression.compressor import from_config
from fedpress_compression.tensors import ModelSpec, TensorSpec, Vector
from fedpress_protocols.model import Model
from fedpress_protocols.plan import TrainingTerms

CLIENTS, CONCENTRATION, BATCH, RATE, STEPS = 10, 0.1, 16, 0.1, 20
MANY, FEW = 20, 4
ROUNDS = {"classes": 40, "steps": 100}
SMOOTHED = 5
LINEAR = ModelSpec((TensorSpec("weight", (64, 10)), TensorSpec("bias", (10,))))
NONE = {"id": "none"}
TOPK = {"id": "topk", "fraction": 0.01, "magnitude_bits": 4}
TOPK_EF = {"id": "error_feedback", "inner": TOPK}
TOPK_5_EF = {"id": "error_feedback", "inner": {**TOPK, "fraction": 0.05}}
AVERAGED = {"id": "fedavg"}
SCAFFOLD = {"id": "scaffold", "clients": CLIENTS}
FEDDYN = {"id": "feddyn", "clients": CLIENTS, "alpha": 0.1}
FEDNOVA = {"id": "fednova"}
Config = Mapping[str, Any]
METHODS: dict[str, tuple[tuple[str, Config, Config], ...]] = {
    "classes": (
        ("FedAvg", AVERAGED, NONE),
        ("SCAFFOLD", SCAFFOLD, NONE),
        ("FedDyn", FEDDYN, NONE),
        ("FedAvg, top-k 1 %, EF", AVERAGED, TOPK_EF),
        ("SCAFFOLD, top-k 1 %", SCAFFOLD, TOPK),
        ("FedDyn, top-k 1 %", FEDDYN, TOPK),
    ),
    "steps": (
        ("FedAvg", AVERAGED, NONE),
        ("FedNova", FEDNOVA, NONE),
        ("FedAvg, top-k 5 %, EF", AVERAGED, TOPK_5_EF),
        ("FedNova, top-k 5 %, EF", FEDNOVA, TOPK_5_EF),
    ),
}


@dataclass(frozen=True)
class DigitsTrainer:
    """SGD on one client's images; `steps` where the plan leaves them open."""

    digits: Digits
    client: int
    steps: int
    gradient: Callable[[Vector, Vector, Rows], Vector]
    honours = frozenset({"proximal", "control", "steps"})

    def train(self, model: Model, work: TrainingRequest) -> Trained:
        x, rows = model.parameters.copy(), self.digits.clients[self.client]
        steps, rng = work.terms.local_steps or self.steps, np.random.default_rng(work.seed)
        for _ in range(steps):
            batch = rng.choice(rows, min(BATCH, rows.size), replace=False)
            slope = self.gradient(x, self.digits.pixels[batch], self.digits.labels[batch])
            x -= np.float32(RATE) * (slope + work.added(model, x))
        return Trained(x, rows.size, report={"steps": steps})

    def evaluate(self, model: Model) -> None:
        return None


@dataclass(frozen=True)
class Outcome:
    """One run: accuracies after each round, and the bytes of all uploads."""

    accuracies: tuple[float, ...]
    uploaded: int

    @property
    def last(self) -> float:
        return float(np.mean(self.accuracies[-SMOOTHED:]))


def trained(split: str, strategy: Config, compressor: Config, seed: int, rounds: int) -> Outcome:
    gradient: Callable[[Vector, Vector, Rows], Vector]
    if split == "classes":
        digits = Digits.split(seed, CLIENTS, CONCENTRATION)
        model = Model(digits_task.SPEC, first_model(seed), {})
        gradient, steps = gradient_of, [STEPS] * CLIENTS
        accuracy: Callable[[Vector], float] = digits.accuracy
        terms = TrainingTerms(local_steps=STEPS, batch_size=BATCH, learning_rate=RATE)
    else:
        digits = halves(seed)
        model = Model(LINEAR, np.zeros(LINEAR.size, np.float32), {})
        gradient, steps = linear_gradient, [MANY, FEW] * (CLIENTS // 2)
        terms = TrainingTerms(batch_size=BATCH, learning_rate=RATE)

        def linear_accuracy(x: Vector) -> float:
            scores = linear_scores(x, digits.pixels[digits.test])
            return float((scores.argmax(axis=1) == digits.labels[digits.test]).mean())

        accuracy = linear_accuracy

    with tempfile.TemporaryDirectory() as folder:
        trainers = [DigitsTrainer(digits, i, steps[i], gradient) for i in range(CLIENTS)]
        made = Federation(
            Path(folder), model, dict(strategy), trainers, terms, lambda _: from_config(compressor)
        )
        accuracies = []
        for _ in range(rounds):
            made.run(range(CLIENTS))
            accuracies.append(accuracy(made.model.parameters))
    return Outcome(tuple(accuracies), made.uploaded)


def halves(seed: int) -> Digits:
    """Clients of even number have the digits below 5, the others the rest."""
    digits = Digits.split(seed)
    rng = np.random.default_rng([seed, 9])
    rest = np.setdiff1d(np.arange(digits.labels.size), digits.test)
    parts = [rng.permutation(rest[(digits.labels[rest] < 5) == low]) for low in (True, False)]
    shares = [np.array_split(rows, CLIENTS // 2) for rows in parts]
    return replace(
        digits, clients=tuple(each for pair in zip(*shares, strict=True) for each in pair)
    )


def linear_scores(x: Vector, pixels: Vector) -> Vector:
    tensors = LINEAR.unflatten(x)
    scores: Vector = pixels @ tensors["weight"] + tensors["bias"]
    return scores


def linear_gradient(x: Vector, pixels: Vector, labels: Rows) -> Vector:
    """Of the mean cross-entropy of softmax regression."""
    scores = linear_scores(x, pixels)
    back = np.exp(scores - scores.max(axis=1, keepdims=True))
    back /= back.sum(axis=1, keepdims=True)
    back[np.arange(labels.size), labels] -= 1
    back /= labels.size
    return LINEAR.flatten({"weight": pixels.T @ back, "bias": back.sum(axis=0)})


ROUTES = ("update + K r c, no feedback", "update, feedback", "two vectors, feedback", "exact c_i")


def routed(route: str, seed: int, rounds: int, fraction: float = 0.01) -> float:
    """The last accuracy of SCAFFOLD in plain numpy, its vectors compressed by top-k one way."""
    digits, x = Digits.split(seed, CLIENTS, CONCENTRATION), first_model(seed)
    length, control = np.float32(STEPS * RATE), np.zeros_like(x)
    own, unsent, unsent_change = np.zeros((3, CLIENTS, x.size), np.float32)
    accuracies = []
    for number in range(rounds):
        total, change = np.zeros_like(x), np.zeros_like(x)
        for client, rows in enumerate(digits.clients):
            rng, y = np.random.default_rng([seed, number, client]), x.copy()
            for _ in range(STEPS):
                batch = rng.choice(rows, min(BATCH, rows.size), replace=False)
                slope = gradient_of(y, digits.pixels[batch], digits.labels[batch])
                y -= np.float32(RATE) * (slope + control - own[client])
            update, exact = y - x, -control - (y - x) / length
            if route == ROUTES[0]:
                sent = _topk(update + length * control, fraction)
                own[client] -= sent / length
                change -= sent / length
                total += sent - length * control
                continue
            sent = _topk(update + unsent[client], fraction)
            unsent[client] += update - sent
            moved = -control - sent / length
            if route == ROUTES[1]:
                own[client] += moved
            else:
                own[client] += exact
            if route == ROUTES[2]:
                moved = _topk(exact + unsent_change[client], fraction)
                unsent_change[client] += exact - moved
            change += moved
            total += sent
        x, control = x + total / np.float32(CLIENTS), control + change / np.float32(CLIENTS)
        if not np.abs(x).max() < 1e6:
            return 0.0
        accuracies.append(digits.accuracy(x))
    return float(np.mean(accuracies[-SMOOTHED:]))


def _topk(values: Vector, fraction: float) -> Vector:
    count = int(np.ceil(fraction * values.size))
    least = np.partition(np.abs(values), -count)[-count]
    return np.where(np.abs(values) >= least, values, np.float32(0))


def main() -> None:
    command = parser(__doc__, quick="one seed, 8 rounds")
    command.add_argument("--seeds", type=int, default=3)
    command.add_argument("--routes", action="store_true")
    asked = command.parse_args()
    rounds = dict.fromkeys(ROUNDS, 8) if asked.quick else ROUNDS
    seeds = range(1 if asked.quick else asked.seeds)
    rows: list[dict[str, Any]] = []
    if asked.routes:
        for route in ROUTES:
            found = [routed(route, seed, rounds["classes"]) for seed in seeds]
            rows.append({"split": "classes", "method": route, "accuracies": found})
    for split, methods in {} if asked.routes else METHODS.items():
        for name, strategy, compressor in methods:
            runs = [trained(split, strategy, compressor, seed, rounds[split]) for seed in seeds]
            row: dict[str, Any] = {
                "split": split,
                "method": name,
                "accuracies": [run.last for run in runs],
            }
            rows.append(row | {"bytes": int(np.mean([run.uploaded for run in runs]))})
    for row in rows:
        each = " ".join(f"{100 * found:5.1f}" for found in row["accuracies"])
        size = f"{row['bytes'] / 1e6:8.2f} MB" if "bytes" in row else ""
        print(f"{row['split']:8} {row['method']:28} {each}  {size}")
    save({"rounds": rounds, "rows": rows}, asked.json)


if __name__ == "__main__":
    main()
