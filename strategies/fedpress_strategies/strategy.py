"""How many updates become one, and how one update moves the model.

An aggregator is a fold: updates stream in, one result comes out, in memory that does not grow with
their number. A server optimizer treats that result as a gradient (Reddi et al. 2021,
arXiv:2003.00295, Algorithm 1). A strategy names both, and the terms it sets for its clients.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from fedpress_protocols.coding.fields import Symbols, check_symbols
from fedpress_protocols.compression.compressor import Compressor, Public
from fedpress_protocols.errors import ConfigurationError, IncompatiblePlan, InvalidUpdate
from fedpress_protocols.fixed_point import Accumulator, FixedPoint
from fedpress_protocols.model import Vector
from fedpress_protocols.update import Update

Delta = npt.NDArray[np.float64]
OptimizerState = Mapping[str, npt.NDArray[Any]]
"""Named arrays, so that any optimizer's state can be stored beside its model."""


class Aggregator(Protocol):
    """A fold over the updates of one round."""

    @property
    def linear(self) -> bool:
        """Whether it needs no more than the weighted sum, as masking leaves nothing else."""
        ...

    def add(self, update: Update, weight: int) -> None:
        """Take one update in; raises InvalidUpdate, and then nothing was added."""
        ...

    def result(self) -> Delta:
        """One update [size] for the round."""
        ...


class ServerOptimizer(Protocol):
    """How the round's update moves the parameters."""

    def init(self, parameters: Vector) -> OptimizerState: ...

    def apply(
        self, parameters: Vector, delta: Delta, state: OptimizerState
    ) -> tuple[Vector, OptimizerState]:
        """The next parameters [size], float32, and the next state."""
        ...


class SymbolAggregator(Protocol):
    """A fold over the uploads of one round before they are decompressed."""

    def add(self, symbols: Symbols, weight: int) -> None:
        """Take one upload in; raises InvalidUpdate, and then nothing was added."""
        ...

    def result(self) -> Delta:
        """What the round's symbols come to, in whatever form the strategy's optimizer takes."""
        ...


class Strategy(NamedTuple):
    """`aggregator` makes a fresh fold for a round over `size` coordinates.

    A strategy that works on the symbols of a linear compressor gives `symbol_aggregator` besides,
    and then that is used: uploads are added up as they are, none is decompressed by itself.
    """

    aggregator: Callable[[int, FixedPoint], Aggregator]
    optimizer: ServerOptimizer
    client_terms: Mapping[str, Any] = {}
    symbol_aggregator: Callable[[Compressor[Any], Public, FixedPoint], SymbolAggregator] | None = (
        None
    )


class WeightedMean:
    """The mean of the updates, each weighted by its examples; exact in fixed point."""

    linear = True

    def __init__(self, size: int, fixed_point: FixedPoint) -> None:
        self._sum = Accumulator(size, fixed_point)

    def add(self, update: Update, weight: int) -> None:
        self._sum.add(update, weight)

    def result(self) -> Delta:
        return self._sum.mean()


class SymbolSum:
    """The mean of updates, each weighted by its examples, from the sum of their symbols: exact in
    int64, decompressed once. The memory is that of one upload's symbols and one update."""

    def __init__(
        self, compressor: Compressor[Any], public: Public, fixed_point: FixedPoint
    ) -> None:
        if not compressor.commutes_with_sum:
            raise IncompatiblePlan(
                f"symbols of {compressor} cannot be summed: it does not commute with the sum",
                hint="choose a linear compressor, or a strategy that takes decoded updates",
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

    def result(self) -> Delta:
        if not self.weight:
            return np.zeros(self._public.spec.size)
        summed = self._compressor.decompress(self.total, self._public, self.weight)
        return summed.dense().astype(np.float64) / self.weight


@dataclass(frozen=True, slots=True)
class ServerSGD:
    """parameters += learning_rate * velocity, velocity = momentum * velocity + delta."""

    learning_rate: float = 1.0
    momentum: float = 0.0

    def __post_init__(self) -> None:
        if not self.learning_rate > 0:
            raise ConfigurationError(f"learning_rate must be positive, not {self.learning_rate}")
        if not 0 <= self.momentum < 1:
            raise ConfigurationError(f"momentum must lie in [0, 1), not {self.momentum}")

    def init(self, parameters: Vector) -> OptimizerState:
        return {"velocity": np.zeros(parameters.size)} if self.momentum else {}

    def apply(
        self, parameters: Vector, delta: Delta, state: OptimizerState
    ) -> tuple[Vector, OptimizerState]:
        velocity = delta
        if self.momentum:
            velocity = self.momentum * state["velocity"] + delta
            state = {"velocity": velocity}
        moved = parameters.astype(np.float64) + self.learning_rate * velocity
        return moved.astype(np.float32), state


Builder = Callable[..., Strategy]
BuilderT = TypeVar("BuilderT", bound=Builder)
_by_id: dict[str, Builder] = {}


def strategy(identifier: str) -> Callable[[BuilderT], BuilderT]:
    """Register a function that builds a strategy from its configuration."""

    def claim(build: BuilderT) -> BuilderT:
        if _by_id.setdefault(identifier, build).__qualname__ != build.__qualname__:
            raise ValueError(f"strategy {identifier!r} is {_by_id[identifier].__qualname__}'s")
        return build

    return claim


def strategies() -> Mapping[str, Builder]:
    """Every strategy by name: the modules of this package, then installed entry points."""
    package = importlib.import_module(__package__)
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{__package__}.{module.name}")
    for entry in entry_points(group="fedpress.strategies"):
        entry.load()
    return dict(sorted(_by_id.items()))


def from_config(config: Mapping[str, Any]) -> Strategy:
    """The strategy that {"id": ..., **settings} names; raises ConfigurationError."""
    settings = dict(config)
    identifier = settings.pop("id", None)
    known = strategies()
    if identifier not in known:
        raise ConfigurationError(f"no strategy {identifier!r}; known are {', '.join(known)}")
    build = known[identifier]
    names = list(inspect.signature(build).parameters)
    unknown = sorted(set(settings) - set(names))
    if unknown:
        raise ConfigurationError(
            f"strategy {identifier!r} takes {', '.join(names)}, not {', '.join(unknown)}"
        )
    try:
        return build(**settings)
    except (TypeError, ValueError) as exc:
        raise ConfigurationError(f"strategy {identifier!r} from {dict(config)}: {exc}") from exc
