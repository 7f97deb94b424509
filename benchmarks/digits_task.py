"""The digits task of the benchmarks: a perceptron 64-256-128-10 on scikit-learn's digits.

100 clients that each see few classes, 10 of them a round, 10 local steps of batches of 16. Small
enough to train in numpy in seconds, and its updates are like those of larger tasks in what matters
to a coder: heavy-tailed, clustered in rows and columns, many of them exactly zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from sklearn.datasets import load_digits

from fedpress_compression.tensors import ModelSpec, TensorSpec, Vector

CLIENTS, COHORT, LOCAL_STEPS, BATCH = 100, 10, 10, 16
CONCENTRATION, LEARNING_RATE = 0.3, 0.2
TEST_IMAGES = 360
SIZES = (64, 256, 128, 10)

SPEC = ModelSpec(
    tuple(
        TensorSpec(f"{layer}.{name}", shape)
        for layer, (inputs, outputs) in enumerate(pairwise(SIZES))
        for name, shape in (("weight", (outputs, inputs)), ("bias", (outputs,)))
    )
)
Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Digits:
    """`pixels` [n, 64] and `labels` [n]; whose rows are whose, and which are for testing."""

    pixels: Vector
    labels: Rows
    clients: tuple[Rows, ...]
    test: Rows

    @classmethod
    def split(
        cls, seed: int, clients: int = CLIENTS, concentration: float = CONCENTRATION
    ) -> Digits:
        """Dirichlet over the classes (Hsu et al. 2019, arXiv:1909.06335, Section 3.1)."""
        pixels, labels = load_digits(return_X_y=True)
        rng = np.random.default_rng(seed)
        order = rng.permutation(labels.size)
        test, rest = order[:TEST_IMAGES], order[TEST_IMAGES:]
        shares: list[list[Rows]] = [[] for _ in range(clients)]
        for digit in range(10):
            rows = rest[labels[rest] == digit]
            proportions = rng.dirichlet([concentration] * clients)
            cuts = (np.cumsum(proportions)[:-1] * rows.size).astype(np.int64)
            for share, part in zip(shares, np.split(rows, cuts), strict=True):
                share.append(part)
        own = [np.concatenate(share) for share in shares]
        for poor in (i for i, rows in enumerate(own) if not rows.size):
            rich = max(range(clients), key=lambda i: own[i].size)
            own[poor], own[rich] = own[rich][:1], own[rich][1:]
        return cls((pixels / 16).astype(np.float32), labels.astype(np.int64), tuple(own), test)

    def update(
        self,
        model: Vector,
        client: int,
        rng: np.random.Generator,
        rate: float = LEARNING_RATE,
        support: Rows | None = None,
    ) -> Vector:
        """The update of `client` to `model`, new values less old, zero outside `support`."""
        rows, trained = self.clients[client], model.copy()
        where = slice(None) if support is None else support
        for _ in range(LOCAL_STEPS):
            batch = rng.choice(rows, min(BATCH, rows.size), replace=False)
            gradient = gradient_of(trained, self.pixels[batch], self.labels[batch])
            trained[where] -= np.float32(rate) * gradient[where]
        return trained - model

    def accuracy(self, model: Vector) -> float:
        """The share of the test images that `model` gets right."""
        scores = _forward(model, self.pixels[self.test])[-1]
        return float((scores.argmax(axis=1) == self.labels[self.test]).mean())


def first_model(seed: int) -> Vector:
    """Uniform within 1 / sqrt(inputs), as torch begins."""
    rng = np.random.default_rng([seed, 1])
    flat = np.empty(SPEC.size, np.float32)
    for layer, inputs in enumerate(SIZES[:-1]):
        for name in ("weight", "bias"):
            part = SPEC.slices[f"{layer}.{name}"]
            flat[part] = rng.uniform(-1, 1, part.stop - part.start) / np.sqrt(inputs)
    return flat


def cohorts(seed: int, rounds: int) -> list[list[int]]:
    """Who takes part in each round."""
    rng = np.random.default_rng([seed, 2])
    return [rng.choice(CLIENTS, COHORT, replace=False).tolist() for _ in range(rounds)]


def _forward(model: Vector, pixels: Vector) -> list[Vector]:
    tensors = SPEC.unflatten(model)
    outputs = [pixels]
    for layer in range(len(SIZES) - 1):
        inputs = outputs[-1] if layer == 0 else np.maximum(outputs[-1], 0)
        outputs.append(inputs @ tensors[f"{layer}.weight"].T + tensors[f"{layer}.bias"])
    return outputs


def gradient_of(model: Vector, pixels: Vector, labels: Rows) -> Vector:
    """Of the mean cross-entropy."""
    tensors, outputs = SPEC.unflatten(model), _forward(model, pixels)
    scores = outputs[-1] - outputs[-1].max(axis=1, keepdims=True)
    back = np.exp(scores)
    back /= back.sum(axis=1, keepdims=True)
    back[np.arange(labels.size), labels] -= 1
    back /= labels.size
    found = {}
    for layer in reversed(range(len(SIZES) - 1)):
        inputs = outputs[layer] if layer == 0 else np.maximum(outputs[layer], 0)
        found[f"{layer}.weight"], found[f"{layer}.bias"] = back.T @ inputs, back.sum(axis=0)
        if layer:
            back = (back @ tensors[f"{layer}.weight"]) * (outputs[layer] > 0)
    return SPEC.flatten(found)


def loss_of(model: Vector, pixels: Vector, labels: Rows) -> float:
    """The mean cross-entropy."""
    scores = _forward(model, pixels)[-1]
    scores = scores - scores.max(axis=1, keepdims=True)
    told = np.log(np.exp(scores).sum(axis=1)) - scores[np.arange(labels.size), labels]
    return float(told.mean())
