"""Devices whose losses are quadratic: what they must come to is known."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedpress_client import Trained, TrainingRequest
from fedpress_compression.tensors import Vector
from fedpress_protocols.model import Model


@dataclass
class Bowl:
    """The loss sum(curvature * (x - centre)^2) / 2, by full gradient steps."""

    centre: Vector
    curvature: Vector
    num_examples: int = 1
    steps: int = 5
    rate: float = 0.1
    honours = frozenset({"proximal", "control", "full_batch", "steps", "loss"})

    def gradient(self, x: Vector) -> Vector:
        return self.curvature * (x - self.centre)

    def loss(self, x: Vector) -> float:
        return float((self.curvature * (x - self.centre) ** 2).sum() / 2)

    def train(self, model: Model, work: TrainingRequest) -> Trained:
        x = model.parameters.copy()
        steps = 1 if work.full_batch else work.terms.local_steps or self.steps
        rate = np.float32(work.terms.learning_rate or self.rate)
        for _ in range(steps):
            x = x - rate * (self.gradient(x) + work.added(model, x))
        report = {"steps": steps, "loss": self.loss(model.parameters)}
        return Trained(x.astype(np.float32), self.num_examples, report=report)

    def evaluate(self, model: Model) -> None:
        return None


def bowls(count: int, size: int, seed: int = 0) -> list[Bowl]:
    """Losses whose minima and curvatures differ, and whose examples and steps do."""
    rng = np.random.default_rng(seed)
    return [
        Bowl(
            rng.normal(size=size).astype(np.float32),
            rng.uniform(0.2, 2, size).astype(np.float32),
            int(rng.integers(1, 20)),
            int(rng.integers(2, 12)),
        )
        for _ in range(count)
    ]
