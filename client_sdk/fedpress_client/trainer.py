"""What an application gives the device: a way to train a model on local data, and to measure it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from fedpress_protocols.model import Model, Vector
from fedpress_protocols.plan import TrainingTerms


@dataclass(frozen=True, slots=True)
class Work:
    """What is asked for once: `terms` override the trainer's own choices where they are set.

    The same `seed` (0 .. 2**63 - 1) must give the same training; it is derived from the client's
    seed, the round and the attempt, and is random if the client has none.
    """

    task: str
    round: int
    attempt: int
    terms: TrainingTerms
    seed: int


@dataclass(frozen=True, slots=True)
class Trained:
    """The new `parameters` [spec.size], float32, and the number of examples that they stand for.

    A trainer of named tensors makes the vector with `model.spec.flatten(tensors)`.
    """

    parameters: Vector
    num_examples: int
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Measures of a model on this device's data, each a mean over `num_examples`."""

    num_examples: int
    metrics: Mapping[str, float]


@runtime_checkable
class Trainer(Protocol):
    """Local training; called from one thread, one call at a time."""

    def train(self, model: Model, work: Work) -> Trained:
        """Learn from local data, beginning at `model`, which must not be changed in place."""
        ...

    def evaluate(self, model: Model) -> Evaluation | None:
        """Measure `model` on local data; None if there is nothing to measure on."""
        ...
