"""The interface of an application to the device: train a model on local data, and measure it."""

from __future__ import annotations

import inspect
import warnings
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import index
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from fedpress_client.progress import Report, unreported
from fedpress_compression.tensors import ModelSpec, Vector
from fedpress_compression.update import Indices
from fedpress_protocols.errors import ConfigurationError
from fedpress_protocols.model import Model
from fedpress_protocols.plan import TrainingTerms
from fedpress_protocols.upload import MAX_EXAMPLES

_FLATTEN = "return model.spec.flatten(tensors)"
_NOT_NUMBERS = "OSUMmc"
"""Kinds of numpy's dtypes."""


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
    """More than the task's `max_examples` count as so many."""
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
        """Measure `model`, which must not be changed in place either, on local data; None if there
        is nothing to measure on."""
        ...


def check_trainer(trainer: object) -> None:
    """Raise ConfigurationError unless `trainer` is an object with train and evaluate."""
    if inspect.isclass(trainer):
        raise ConfigurationError(
            f"the trainer is the class {trainer.__name__}, not an object of it",
            hint=f"give {trainer.__name__}(...)",
        )
    names = [n for n in ("train", "evaluate") if not callable(getattr(trainer, n, None))]
    if names:
        raise ConfigurationError(
            f"the trainer is a {type(trainer).__name__}, which has no {' and no '.join(names)}",
            hint="a Trainer has train(model, request), and evaluate(model), which may return None",
        )


@contextmanager
def unchanged(model: Model, call: str) -> Iterator[None]:
    """Raises ConfigurationError if the trainer's `call` within has changed `model` in place: the
    update is the difference to it."""
    before = _checksum(model)
    try:
        yield
    finally:
        if _checksum(model) != before:
            raise ConfigurationError(
                f"{call} has changed the model that it was given in place",
                hint="work on copies: model.parameters.copy(), or model.tensors()[name].copy()",
            )


def _checksum(model: Model) -> int:
    """Of every value; arrays that are read-only would have torch.from_numpy warn."""
    checksum = 0
    for array in (model.parameters, *model.buffers.values()):
        checksum = zlib.crc32(np.ascontiguousarray(array).data, checksum)
    return checksum


def check_trained(result: object, model: Model) -> Trained:
    """The result of `Trainer.train` for `model`, with parameters as float32 [spec.size] and plain
    numbers, finite or not; raises ConfigurationError for anything else."""
    if not isinstance(result, Trained):
        raise ConfigurationError(
            f"train returned a {type(result).__name__}, not a Trained",
            hint="return Trained(parameters, num_examples)",
        )
    parameters = _vector(result.parameters)
    if parameters.shape != model.parameters.shape:
        raise ConfigurationError(
            f"the trainer returned parameters of shape {parameters.shape} where "
            f"{model.parameters.shape} is due",
            hint=_FLATTEN,
        )
    return Trained(
        parameters,
        _count(result.num_examples),
        _numbers("metrics", result.metrics),
        _numbers("reported numbers", result.report),
    )


def check_evaluation(result: object) -> Evaluation | None:
    """The result of `Trainer.evaluate`, with metrics as floats, finite or not; raises
    ConfigurationError for anything but an Evaluation or None."""
    if result is None:
        return None
    if not isinstance(result, Evaluation):
        raise ConfigurationError(
            f"evaluate returned a {type(result).__name__}, not an Evaluation",
            hint='return Evaluation(num_examples, {"accuracy": 0.9}), or None',
        )
    metrics = _numbers("metrics", result.metrics)
    return Evaluation(_count(result.num_examples), metrics, result.classes)


def _vector(parameters: object) -> Vector:
    try:
        array = np.asarray(parameters)
        if array.dtype.kind not in _NOT_NUMBERS:
            with np.errstate(over="ignore", invalid="ignore"):  # infinity is refused later
                return array.astype(np.float32, copy=False)
    except (TypeError, ValueError, RuntimeError):
        pass
    kind, dtype = type(parameters).__name__, getattr(parameters, "dtype", None)
    raise ConfigurationError(
        f"the trainer returned parameters that are a {kind}{f' of {dtype}' if dtype else ''}, not "
        "an array of real numbers",
        hint=_FLATTEN,
    )


def _count(num_examples: object) -> int:
    try:
        count = index(num_examples)  # type: ignore[arg-type]
    except TypeError:
        count = 0
    if not 1 <= count <= MAX_EXAMPLES:
        raise ConfigurationError(
            f"num_examples must be a whole number from 1 to {MAX_EXAMPLES}, not {num_examples!r}"
        )
    return count


def _numbers(what: str, values: object) -> dict[str, float]:
    if not isinstance(values, Mapping):
        raise ConfigurationError(
            f"{what} are a {type(values).__name__}, not a mapping of names to numbers",
            hint='give them as {"accuracy": 0.9}',
        )
    for name, value in values.items():
        try:
            float(value)
        except (TypeError, ValueError, OverflowError) as exc:
            raise ConfigurationError(f"{name!r} of the {what} is {value!r}, not a number") from exc
    return {str(name): float(value) for name, value in values.items()}


def __getattr__(name: str) -> Any:
    """The former name of TrainingRequest, for one release."""
    if name != "Work":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn("Work is now called TrainingRequest", DeprecationWarning, stacklevel=2)
    return TrainingRequest
