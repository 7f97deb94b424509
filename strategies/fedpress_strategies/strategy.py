"""Aggregators, server optimizers and strategies.

An aggregator is a streaming reduction: it takes a stream of updates and returns one result, in
memory independent of their number. A server optimizer treats that result as a gradient (Reddi et
al. 2021, arXiv:2003.00295, Algorithm 1). A strategy combines both with terms for its clients.
Configurations nest: a strategy that wraps another takes it as `inner`.
"""

from __future__ import annotations

import importlib
import inspect
import math
import mmap
import os
import pkgutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from fedpress_compression import plugins
from fedpress_compression.coding.fields import Symbols, check_symbols
from fedpress_compression.compressor import Compressor, Public
from fedpress_compression.fixed_point import Accumulator, FixedPoint
from fedpress_compression.running_statistics import statistics
from fedpress_compression.tensors import ModelSpec, Vector
from fedpress_compression.update import Update
from fedpress_protocols.errors import ConfigurationError, IncompatiblePlan, InvalidUpdate
from fedpress_protocols.plan import ClientTerms, RoundPlan, TrainingTerms
from fedpress_protocols.validation import format_validation_errors

Delta = npt.NDArray[np.float64]
OptimizerState = Mapping[str, npt.NDArray[Any]]
"""Named arrays: the state of any optimizer, stored beside its model."""
Report = Mapping[str, float]
"""The numbers that an upload reports, by the names in the strategy's `report`."""
NO_REPORT: Report = MappingProxyType({})
CONTROL = "control"
"""The name of the vector that an optimizer publishes for the plan's `ControlTerms.server`."""


@dataclass(frozen=True, slots=True)
class Tally:
    """Statistics of a round besides its update: the number of included uploads, and the mean of
    each reported number, weighted by examples."""

    count: int = 1
    report: Report = field(default_factory=dict)
    warming: bool = False
    """Whether the round is part of a warm-up, after which an optimizer freezes some of its
    state."""
    spec: ModelSpec | None = None
    """The tensors of the vectors, if known."""
    norm: float | None = None
    """The L2 norm of the whole aggregated update, if known; always where a block of it is given."""
    momentum: float | None = None
    """The most that `fedavgm` uses in this step, where a policy decides on it."""
    start: int = 0
    """Where the vectors begin in the whole ones of `spec`."""


ALONE = Tally()
_BLOCK = 2**18
"""Values of a step that are computed at a time."""


def norm_of(delta: Delta) -> float:
    """Return the L2 norm: float64 sums of blocks, added exactly."""
    blocks = (delta[start : start + _BLOCK] for start in range(0, delta.size, _BLOCK))
    return math.sqrt(math.fsum(float(np.square(block).sum()) for block in blocks))


@dataclass(frozen=True, slots=True)
class Properties:
    """A strategy's description for users.

    The states name the data that either end keeps across rounds, `memory` the server's memory
    during aggregation if it is more than a few models, `source` the paper.
    """

    server_state: str = "none"
    client_state: str = "none"
    memory: str = "O(model)"
    source: str = ""


class Aggregator(Protocol):
    """Aggregates the updates of one round, one at a time."""

    @property
    def linear(self) -> bool:
        """Whether it only needs the weighted sum, the only thing that masking reveals."""
        ...

    def add(self, update: Update, weight: int, report: Report = NO_REPORT) -> None:
        """Add one update of `weight` examples; raises InvalidUpdate without adding anything."""
        ...

    def result(self) -> Delta:
        """The aggregated update [size] of the round."""
        ...


Part = Mapping[str, npt.NDArray[np.int64]]
"""The partial sums of a batch of uploads, integers by names that the aggregator defines."""


@runtime_checkable
class Divisible(Protocol):
    """An aggregator that supports separate batches of uploads: its sums are exact, so any batches
    in any order give the same result."""

    def part(self) -> Part:
        """The partial sum so far."""
        ...

    def merge(self, part: Part) -> None:
        """Add the partial sum of another batch of the same round; raises InvalidUpdate beyond
        bounds."""
        ...


class ServerOptimizer(Protocol):
    """A server optimizer: applies the round's update to the parameters.

    An optimizer may have `published(state)`: vectors by name, float32 [size], which the server
    publishes with the round's model. The vector CONTROL is for the clients' `ControlTerms`; any
    other is the parameters of a further model. It may have `figures(state)`, see there.

    One with a true `is_by_coordinate` computes each coordinate, in its state too, from that
    coordinate and the `tally` alone, so that a large model may be stepped in blocks, see `applied`.
    """

    def init(self, parameters: Vector) -> OptimizerState: ...

    def apply(
        self, parameters: Vector, delta: Delta, state: OptimizerState, tally: Tally = ALONE
    ) -> tuple[Vector, OptimizerState]:
        """The next parameters [size], float32, and the next state."""
        ...


def published(optimizer: ServerOptimizer, state: OptimizerState) -> Mapping[str, Vector]:
    """The vectors that `optimizer` publishes from its `state`; none without such a method."""
    publish: Callable[[OptimizerState], Mapping[str, Vector]] | None
    publish = getattr(optimizer, "published", None)
    return publish(state) if publish else {}


def figures(optimizer: ServerOptimizer, state: OptimizerState) -> Mapping[str, float]:
    """The numbers about the last round that `optimizer` keeps in its `state`, for operators, by the
    names of the server's metrics without `fedpress_`; none without such a method."""
    read: Callable[[OptimizerState], Mapping[str, float]] | None
    read = getattr(optimizer, "figures", None)
    return read(state) if read else {}


def applied(
    optimizer: ServerOptimizer,
    parameters: Vector,
    delta: Delta,
    state: OptimizerState | None,
    tally: Tally,
    space: AggregationSpace,
) -> tuple[Vector, OptimizerState]:
    """Return what `optimizer.apply` does, from its `init` without a `state`, to the last bit; in
    blocks of coordinates if it allows that, with arrays of `space`."""
    size = parameters.size
    if size <= _BLOCK or not getattr(optimizer, "is_by_coordinate", False):
        before = optimizer.init(parameters) if state is None else state
        return optimizer.apply(parameters, delta, before, tally)
    tally = replace(tally, norm=norm_of(delta) if tally.norm is None else tally.norm)
    moved, after = space.zeros(size, np.float32), dict[str, npt.NDArray[Any]]()
    for start in range(0, size, _BLOCK):
        here = slice(start, min(start + _BLOCK, size))
        values, length = parameters[here], here.stop - start
        before = (
            optimizer.init(values)
            if state is None
            else {name: each[here] if each.size == size else each for name, each in state.items()}
        )
        here_tally = replace(tally, start=start)
        moved[here], block = optimizer.apply(values, delta[here], before, here_tally)
        for name, each in block.items():
            if start == 0:
                is_whole = each.size == length
                after[name] = space.zeros(size, each.dtype) if is_whole else each
            if after[name].size == size:
                after[name][here] = each
    return moved, after


class SymbolAggregator(Protocol):
    """Aggregates the uploads of one round before they are decompressed."""

    def add(self, symbols: Symbols, weight: int) -> None:
        """Add one upload; raises InvalidUpdate without adding anything."""
        ...

    def result(self) -> Delta:
        """The aggregated symbols of the round, in the form that the strategy's optimizer
        expects."""
        ...

    def part(self) -> Part: ...

    def merge(self, part: Part) -> None: ...


@dataclass(frozen=True, slots=True)
class AggregationSpace:
    """Resources of an aggregation: `memory` bytes for strategies that compare updates, and for any
    array of the model's size; `folder` for unnamed files in the place of larger ones (None: the
    system's temporary folder)."""

    folder: Path | None = None
    memory: int = 256 * 2**20

    def zeros(self, size: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Zeros [size], in memory or in an unnamed file; raises OSError if the disk has no room."""
        num_bytes = size * np.dtype(dtype).itemsize
        if num_bytes <= self.memory:
            return np.zeros(size, dtype)
        with tempfile.TemporaryFile(dir=self.folder, suffix=".tmp") as file:
            if hasattr(os, "posix_fallocate"):  # or a full disk would end the process later
                os.posix_fallocate(file.fileno(), 0, num_bytes)
            file.truncate(num_bytes)
            return np.frombuffer(mmap.mmap(file.fileno(), num_bytes), dtype)


FoldSpace = AggregationSpace
"""The earlier name of `AggregationSpace`, for one more release."""


class Strategy(NamedTuple):
    """An aggregator with a server optimizer and terms for clients.

    `aggregator` returns a new Aggregator for a round over `size` coordinates; uploads `report` the
    numbers that it or the optimizer needs.

    A strategy that works on the symbols of a linear compressor also sets `symbol_aggregator`, which
    is then used: uploads are summed without decompressing each.

    A strategy whose aggregation depends on the plan, or needs disk space, also sets
    `planned_aggregator`, which a server then uses. It raises IncompatiblePlan if it cannot
    aggregate under the plan.
    """

    aggregator: Callable[[int, FixedPoint], Aggregator]
    optimizer: ServerOptimizer
    client_terms: ClientTerms = ClientTerms()
    report: tuple[str, ...] = ()
    symbol_aggregator: Callable[[Compressor[Any], Public, FixedPoint], SymbolAggregator] | None = (
        None
    )
    planned_aggregator: Callable[[RoundPlan, Public, AggregationSpace], Aggregator] | None = None
    needs_warm_up: bool = False
    """Whether a task must start with a warm-up, see Tally."""
    properties: Properties = Properties()

    @property
    def linear(self) -> bool:
        """Whether its rounds may be masked, since it only needs weighted sums."""
        return self.aggregator(1, FixedPoint(0, 1.0, 1)).linear

    @property
    def divisible(self) -> bool:
        """Whether its uploads may be aggregated in batches, see Divisible."""
        if self.symbol_aggregator is not None:
            return True
        if self.planned_aggregator is not None:
            return False
        return isinstance(self.aggregator(1, FixedPoint(0, 1.0, 1)), Divisible)

    def asking(self, **terms: Any) -> Strategy:
        """Return this strategy with further client terms; raises ValueError for invalid ones."""
        whole = self.client_terms.model_dump() | terms
        return self._replace(client_terms=ClientTerms.model_validate(whole))


class WeightedMean:
    """The mean of the updates, each weighted by its examples; exact in fixed point.

    A caller may add to `sums` directly, as `decode_add` does with an upload's bytes, or set it to
    an accumulator of its own.
    """

    linear = True

    def __init__(self, size: int, fixed_point: FixedPoint) -> None:
        self._size, self._fixed_point = size, fixed_point

    @cached_property
    def sums(self) -> Accumulator:
        return Accumulator(self._size, self._fixed_point)

    def weight_of(self, num_examples: int) -> int:
        """The weight of an upload."""
        return num_examples

    def add(self, update: Update, weight: int, report: Report = NO_REPORT) -> None:
        self.sums.add(update, self.weight_of(weight))

    def result(self) -> Delta:
        return self.sums.mean()

    def part(self) -> Part:
        return {"total": self.sums.total, "weight": np.array([self.sums.weight])}

    def merge(self, part: Part) -> None:
        self.sums.add_sums(part["total"], int(part["weight"][0]))


class UniformMean(WeightedMean):
    """The mean of the updates in which every client counts once."""

    def weight_of(self, num_examples: int) -> int:
        return 1


class SymbolSum:
    """The mean of updates, each weighted by its examples, from the sum of their symbols: exact in
    int64, decompressed once. The memory is that of one upload's symbols and one update."""

    def __init__(
        self, compressor: Compressor[Any], public: Public, fixed_point: FixedPoint
    ) -> None:
        if not compressor.commutes_with_sum:
            raise IncompatiblePlan(
                f"symbols of {compressor} cannot be summed: it does not commute with the sum",
                hint="choose a linear compressor, or a strategy that uses decoded updates",
            )
        if fixed_point.max_weight >= 2**32:
            raise IncompatiblePlan(
                f"weights of {fixed_point.max_weight} in all times 32-bit symbols can overflow",
                hint="lower max_examples or the cohort",
            )
        self._compressor, self._public = compressor, public
        self._layout = compressor.layout(public.spec)
        self._max_weight = fixed_point.max_weight
        self.total: tuple[npt.NDArray[np.int64], ...] = ()
        self.weight = 0

    def add(self, symbols: Symbols, weight: int) -> None:
        check_symbols(symbols, self._layout)
        if not 1 <= weight <= self._max_weight - self.weight:
            raise InvalidUpdate(
                f"weight {weight} on top of {self.weight}, where the plan allows {self._max_weight}"
            )
        if not self.total:
            self.total = tuple(np.zeros(array.size, np.int64) for array in symbols)
        for total, array in zip(self.total, symbols, strict=True):
            total += array.astype(np.int64) * np.int64(weight)
        self.weight += weight

    def part(self) -> Part:
        totals = {f"total{index}": total for index, total in enumerate(self.total)}
        return {**totals, "weight": np.array([self.weight])}

    def merge(self, part: Part) -> None:
        weight = int(part["weight"][0])
        if not 0 <= weight <= self._max_weight - self.weight:
            raise InvalidUpdate(
                f"weight {weight} on top of {self.weight}, where the plan allows {self._max_weight}"
            )
        if not weight:
            return
        if not self.total:
            self.total = tuple(
                np.zeros(len(part[f"total{i}"]), np.int64) for i in range(len(part) - 1)
            )
        for index, total in enumerate(self.total):
            total += part[f"total{index}"]
        self.weight += weight

    def result(self) -> Delta:
        if not self.weight:
            return np.zeros(self._public.spec.size)
        summed = self._compressor.decompress(self.total, self._public, self.weight)
        return summed.dense().astype(np.float64) / self.weight


@dataclass(frozen=True, slots=True)
class ServerSGD:
    """parameters += learning_rate * velocity, velocity = momentum * velocity + delta; running
    statistics have no momentum."""

    learning_rate: float = 1.0
    momentum: float = 0.0
    is_by_coordinate: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.learning_rate > 0:
            raise ConfigurationError(f"learning_rate must be positive, not {self.learning_rate}")
        if not 0 <= self.momentum < 1:
            raise ConfigurationError(f"momentum must lie in [0, 1), not {self.momentum}")

    @property
    def is_plain(self) -> bool:
        """Whether the step equals the update."""
        return self == ServerSGD()

    def init(self, parameters: Vector) -> OptimizerState:
        return {"velocity": np.zeros(parameters.size)} if self.momentum else {}

    def apply(
        self, parameters: Vector, delta: Delta, state: OptimizerState, tally: Tally = ALONE
    ) -> tuple[Vector, OptimizerState]:
        velocity = delta
        if self.momentum:
            most = self.momentum if tally.momentum is None else tally.momentum
            velocity = min(self.momentum, most) * state["velocity"] + delta
            for where in statistics(tally.spec, tally.start, parameters.size):
                velocity[where] = delta[where]
            state = {"velocity": velocity}
        moved = np.empty_like(parameters)
        for start in range(0, parameters.size, _BLOCK):  # of a large model no float64 copies
            here = slice(start, start + _BLOCK)
            moved[here] = parameters[here].astype(np.float64) + self.learning_rate * velocity[here]
        return moved, state


def check_clients(clients: int) -> None:
    """Raise ConfigurationError unless a task can have this number of clients."""
    if clients < 1:
        raise ConfigurationError(f"clients must be at least 1, not {clients}")


Builder = Callable[..., Strategy]
BuilderT = TypeVar("BuilderT", bound=Builder)
_by_id: dict[str, Builder] = {}
_examples: dict[str, Mapping[str, Any]] = {}
_TRAINING = "training"
_NO_TERMS = TrainingTerms()
_MOST_DEPTH = 16
"""Maximum depth of nested strategies."""


def strategy(identifier: str, **example: Any) -> Callable[[BuilderT], BuilderT]:
    """Register a function that builds a strategy from its configuration.

    Its parameters are the settings, except `training`, which gets the task's TrainingTerms.
    `example` has a value for every setting without a default.
    """

    def claim(build: BuilderT) -> BuilderT:
        plugins.check_id(identifier, build.__module__, "fedpress_strategies")
        if _by_id.setdefault(identifier, build).__qualname__ != build.__qualname__:
            raise ValueError(
                f"strategy {identifier!r} is already registered by "
                f"{_by_id[identifier].__qualname__}"
            )
        _examples[identifier] = example
        return build

    return claim


def strategies() -> Mapping[str, Builder]:
    """Every strategy by name: the modules of this package, then installed entry points."""
    _load()
    return dict(sorted(_by_id.items()))


@cache
def _load() -> None:
    """Let strategies register themselves; once a process, since every installed package is looked
    at for entry points."""
    package = importlib.import_module(__package__)
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{__package__}.{module.name}")
    plugins.load("fedpress.strategies", _id_of)


def _id_of(build: object) -> str | None:
    return next((each for each, builder in _by_id.items() if builder is build), None)


EXAMPLE_TERMS = TrainingTerms(local_steps=10, learning_rate=0.1)
"""The training terms of tasks with `example_of`."""


def example_of(identifier: str) -> dict[str, Any]:
    """A complete configuration of the strategy `identifier`: its defaults, and its example's values
    for settings without one."""
    parameters = inspect.signature(strategies()[identifier]).parameters
    defaults = {name: each.default for name, each in parameters.items() if name != _TRAINING}
    settings = defaults | dict(_examples[identifier])
    plain = {name: dict(v) if isinstance(v, Mapping) else v for name, v in settings.items()}
    return {"id": identifier, **plain}


def from_config(config: Mapping[str, Any], training: TrainingTerms = _NO_TERMS) -> Strategy:
    """The strategy that {"id": ..., **settings} names, for tasks of these training terms; raises
    ConfigurationError."""
    return _from_config(config, training, 1)


def _from_config(config: Mapping[str, Any], training: TrainingTerms, depth: int) -> Strategy:
    if depth > _MOST_DEPTH:
        raise ConfigurationError(f"strategies nested more than {_MOST_DEPTH} levels deep")
    settings = dict(config)
    identifier = settings.pop("id", None)
    registered = strategies()
    if identifier not in registered:
        detail, hint = plugins.missing("strategy", identifier, list(registered))
        raise ConfigurationError(detail, hint=hint)
    build = registered[identifier]
    parameters = inspect.signature(build).parameters
    names = list(parameters)
    is_given_training = _TRAINING in names
    names = [name for name in names if name != _TRAINING]
    unknown = sorted(set(settings) - set(names))
    if unknown:
        raise ConfigurationError(
            f"strategy {identifier!r} takes {', '.join(names)}, not {', '.join(unknown)}"
        )
    missing = [
        name
        for name in names
        if name not in settings and parameters[name].default is inspect.Parameter.empty
    ]
    if missing:
        raise ConfigurationError(f"strategy {identifier!r} needs {', '.join(missing)}")
    for name, value in settings.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigurationError(
                f"strategy {identifier!r}: {name} must be a finite number, not {value}"
            )
        if isinstance(value, Mapping) and "id" in value:
            settings[name] = _from_config(value, training, depth + 1)
    if is_given_training:
        settings[_TRAINING] = training
    try:
        return build(**settings)
    except (TypeError, AttributeError) as exc:
        raise ConfigurationError(
            f"strategy {identifier!r} from {dict(config)}: a setting is of the wrong kind",
            hint="`fedpress strategies` lists all strategies with their settings",
        ) from exc
    except ValueError as exc:
        reason = format_validation_errors(exc) if isinstance(exc, ValidationError) else exc
        raise ConfigurationError(f"strategy {identifier!r} from {dict(config)}: {reason}") from exc
