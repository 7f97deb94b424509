"""The interface of an application to the device: train a model on local data, and measure it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from fedpress_client.progress import Report, unreported
from fedpress_compression.tensors import ModelSpec, Vector
from fedpress_compression.update import Indices
from fedpress_protocols.model import Model
from fedpress_protocols.plan import TrainingTerms


@dataclass(frozen=True, slots=True)
class TrainingRequest:
    """One training; `terms` override the trainer's own choices where they are set.

    The same `seed` (0 .. 2**63 - 1) must give the same training; it is derived from the client's
    seed, the round and the attempt, and is random if the client has none.

    A plan or its strategy may ask for more, of trainers that name it in their attribute `honours`:

    "proximal", "control"    `added` goes to every gradient
    "full_batch"             one step, along the mean gradient over all local examples
    "restricted"             with a `support`, rising indices into the flat vector, every other
                             coordinate of the new parameters equals the model's to the last bit
    "steps", "loss", ...     `Trained.report` has what is in `report`: the steps that the optimizer
                             took, the mean loss over the local examples at the model given, or what
                             the trainer calls by that name
    """

    task: str
    round: int
    attempt: int
    terms: TrainingTerms
    seed: int
    support: Indices | None = None
    proximal: float = 0.0
    correction: Vector | None = None
    """[spec.size]; None stands for zeros."""
    full_batch: bool = False
    report: tuple[str, ...] = ()
    progress: Report = field(default=unreported, repr=False, compare=False)
    """`progress(done, total)` may be called as training goes on, with a `total` of None if it is
    not known; see `Client(on_progress=...)`."""

    def added(self, model: Model, parameters: Vector) -> Vector:
        """The term [spec.size] of the gradient at `parameters`, in a training from `model`."""
        added = np.zeros_like(parameters) if self.correction is None else self.correction
        if not self.proximal:
            return added
        return added + np.float32(self.proximal) * (parameters - model.parameters)

    def trains(self, spec: ModelSpec) -> Mapping[str, npt.NDArray[np.bool_]]:
        """By name, a mask for each trained tensor of `spec`: True where it may move."""
        flat = np.full(spec.size, self.support is None)
        if self.support is not None:
            flat[self.support] = True
        return {t.name: flat[spec.slices[t.name]].reshape(t.shape) for t in spec.trained}


@dataclass(frozen=True, slots=True)
class Trained:
    """The new `parameters` [spec.size], float32, and the number of examples that they stand for.

    A trainer of named tensors makes the vector with `model.spec.flatten(tensors)`.
    """

    parameters: Vector
    num_examples: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    report: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Measures of a model on this device's data, each a mean over `num_examples`.

    `classes` gives, by name, how many of the examples are of a class, and of how many of these the
    model was right; 1000 classes at most, none if they are not counted.
    """

    num_examples: int
    metrics: Mapping[str, float]
    classes: Mapping[str, tuple[int, int]] = field(default_factory=dict)


@runtime_checkable
class Trainer(Protocol):
    """Local training; called from one thread, one call at a time.

    An attribute `honours`, a collection of names, says which of the terms that TrainingRequest
    lists the trainer knows. A device declines assignments whose terms its trainer does not know.
    """

    def train(self, model: Model, request: TrainingRequest, /) -> Trained:
        """Learn from local data, beginning at `model`, which must not be changed in place."""
        ...

    def evaluate(self, model: Model) -> Evaluation | None:
        """Measure `model` on local data; None if there is nothing to measure on."""
        ...


def __getattr__(name: str) -> Any:
    """The former name of TrainingRequest, for one release."""
    if name != "Work":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn("Work is now called TrainingRequest", DeprecationWarning, stacklevel=2)
    return TrainingRequest
