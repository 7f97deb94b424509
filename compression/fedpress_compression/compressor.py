"""A compressor as a pure transformation with explicit state.

A compressor is a frozen dataclass: its fields are its configuration, the very one the server
advertises and the client runs. What changes from round to round is a value that goes in and comes
out. `compress` and `decompress` are lossy, vectors to symbols and back; making bytes of symbols is
`fedpress_compression.coding`'s affair.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Protocol, TypeVar

import numpy as np

from fedpress_compression import kernels, plugins
from fedpress_compression.coding.fields import Known, Layout, Symbols
from fedpress_compression.errors import ConfigurationError, IncompatiblePlan, InvalidUpdate
from fedpress_compression.randomness import PublicRandomness, PublicStream
from fedpress_compression.tensors import ModelSpec, Vector
from fedpress_compression.update import Update

StateT = TypeVar("StateT")
Config = Mapping[str, Any]
Knowledge = Known | Literal["own", "basis"]
"""`Public`'s vectors."""
_ID = "id"
_MOST_DEPTH = 16
"""Of compressors within one another."""


@dataclass(frozen=True, slots=True)
class Public:
    """What both ends know before the upload: the tensors at hand and the round's randomness, and,
    for the compressors that need them, vectors [spec.size] that what is published gives.

    `previous` is the round's model less the one before it, what the last aggregate made of the
    model; `drift` is the round's model less the task's first; `activity` ranks the coordinates by
    how much they have moved of late, see `activity`. `own` is what the last included upload of the
    client at hand stood for. All are zero in the first round, and None where nobody asked for them.
    `basis`, of a length of its own, is what the server made of a first trip, see `powersgd`.
    `round` counts from 1; its attempts share it.
    """

    spec: ModelSpec
    randomness: PublicRandomness
    previous: Vector | None = None
    drift: Vector | None = None
    round: int = 1
    activity: Vector | None = None
    own: Vector | None = None
    basis: Vector | None = None

    def known(self, what: Knowledge) -> Vector:
        """The vector `what` [spec.size], which whoever made this was to give."""
        vector: Vector | None = getattr(self, what)
        if vector is None:
            raise ConfigurationError(f"a compressor reads {what}, which it was not given")
        return vector

    def stream(self, wire_id: str, own: str = "") -> PublicStream:
        """The stream that the compressor `wire_id` reads for these tensors; `own`: one client's."""
        words = (wire_id, self.spec.digest, *([own] if own else []))
        return self.randomness.stream(" ".join(words))

    def part(self, names: Sequence[str]) -> Public:
        """The same knowledge of the tensors `names` alone."""
        rows = [self.spec.slices[name] for name in names]

        def cut(vector: Vector | None) -> Vector | None:
            return None if vector is None else np.concatenate([vector[row] for row in rows])

        return dataclasses.replace(
            self,
            spec=self.spec.select(names),
            previous=cut(self.previous),
            drift=cut(self.drift),
            activity=cut(self.activity),
            own=cut(self.own),
            basis=None,
        )


class Compressor(Protocol[StateT]):
    """Vectors of `spec.size` float32 values to symbols; lossy.

    Two attributes more are optional. `needs_plain_mean`: the server must apply the plain mean of
    the uploads (learning rate 1, no momentum) to a float32 model, since its estimate of what the
    clients hold is `previous`; without it, whether a member needs it. `state_key`: see `state_key`.
    """

    @property
    def commutes_with_sum(self) -> bool:
        """Whether symbols summed in integers decompress to the sum of the updates."""
        ...

    @property
    def needs(self) -> frozenset[Knowledge]:
        """Which of `Public`'s vectors this compressor reads, at both ends."""
        ...

    def layout(self, spec: ModelSpec) -> Layout:
        """What `compress` emits for the tensors of `spec`; the decoder needs no other schema."""
        ...

    def init(self, spec: ModelSpec) -> StateT:
        """The state of a client that has sent nothing yet."""
        ...

    def compress(
        self, update: Vector, state: StateT, public: Public, rng: np.random.Generator
    ) -> tuple[Symbols, StateT]:
        """Symbols for `update` [spec.size] and the state once they are included.

        `rng` is the client's own. Raises InvalidUpdate on NaN or infinity.
        """
        ...

    def decompress(self, symbols: Symbols, public: Public, num_summands: int = 1) -> Update:
        """The update that `symbols` stand for; the same bits on every machine.

        `num_summands` says how many clients' symbols were summed; only a compressor that
        commutes with the sum takes more than one.
        """
        ...


@dataclass(frozen=True, slots=True)
class Properties:
    """What a compressor claims to be, for whoever has to choose one.

    `unbiased`: over its randomness the mean of what is received is the update, wherever nothing is
    clipped. `contractive`: in the mean over it, the squared norm of what is lost is below the
    update's by a factor less than 1. `non_expansive`: it is no larger than the update's, but for a
    constant that the settings fix (steps of a grid). The common tests prove all three.
    `contracts_with` names settings under which a method that is neither would contract. `rate`
    names the bits that a value costs before coding; the states say what either end keeps from
    round to round; `source` is where the method is from.
    """

    rate: str = ""
    unbiased: bool = False
    contractive: bool = False
    non_expansive: bool = False
    contracts_with: str = ""
    client_state: str = "none"
    server_state: str = "none"
    source: str = ""

    @property
    def suits_feedback(self) -> bool:
        """Whether a residual cannot grow by itself: nobody loses more than there was."""
        return self.contractive or self.non_expansive


def properties(made: Any) -> Properties:
    """What `made` claims in its attribute `properties`; nothing where it has none."""
    claimed: Properties = getattr(made, "properties", Properties())
    return claimed


def state_key(made: Compressor[Any]) -> Any:
    """Plain JSON; a state that one compressor left goes on with any other of an equal key.

    Its attribute `state_key`, or else its configuration with the keys of its members.
    """
    own = getattr(made, "state_key", None)
    return _config(made, state_key) if own is None else own


class Stateless:
    """The half of a compressor that remembers nothing and does not commute with the sum."""

    __slots__ = ()

    @property
    def state_key(self) -> str:
        return "none"

    @property
    def commutes_with_sum(self) -> bool:
        return False

    @property
    def needs(self) -> frozenset[Knowledge]:
        return frozenset()

    def init(self, spec: ModelSpec) -> None:
        return None


_by_id: dict[str, type[Any]] = {}
ClassT = TypeVar("ClassT", bound=type[Any])


def compressor(wire_id: str) -> Callable[[ClassT], ClassT]:
    """Claim `wire_id` for a class, for ever: a new behaviour is a new id. Outside this package it
    has the form package.name, see `plugins`.

    A class that does not say whether it `needs_plain_mean` does if one of its members does.
    """

    def claim(cls: ClassT) -> ClassT:
        plugins.check_id(wire_id, cls.__module__, "fedpress_compression")
        holder = _by_id.setdefault(wire_id, cls)
        if holder.__qualname__ != cls.__qualname__:
            raise ValueError(f"wire id {wire_id!r} is {holder.__qualname__}'s")
        cls.wire_id = wire_id
        if not hasattr(cls, "needs_plain_mean"):
            cls.needs_plain_mean = property(_has_plain_mean_member)
        return cls

    return claim


def compressors() -> Mapping[str, type[Any]]:
    """Every compressor by wire id: the modules of `compressors/`, then installed entry points."""
    _load()
    return dict(sorted(_by_id.items()))


@cache
def _load() -> None:
    """Let compressors register themselves; once a process, since every installed package is looked
    at for entry points."""
    package = importlib.import_module("fedpress_compression.compressors")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
    plugins.load("fedpress.compressors", lambda made: getattr(made, "wire_id", None))


def from_config(config: Config) -> Compressor[Any]:
    """The compressor that {"id": ..., **fields} names; IncompatiblePlan says what is off."""
    return _from_config(config, 1)


def _from_config(config: Config, depth: int) -> Compressor[Any]:
    if depth > _MOST_DEPTH:
        raise IncompatiblePlan(f"a compressor within more than {_MOST_DEPTH} others")
    fields = {key: _parsed(value, depth + 1) for key, value in dict(config).items()}
    wire_id = fields.pop(_ID, None)
    known = compressors()
    if wire_id not in known:
        detail, hint = plugins.missing("compressor", wire_id, list(known))
        raise IncompatiblePlan(detail, hint=hint)
    cls = known[wire_id]
    names = [field.name for field in dataclasses.fields(cls)]
    unknown = sorted(set(fields) - set(names))
    if unknown:
        raise IncompatiblePlan(f"{wire_id!r} takes {', '.join(names)}, not {', '.join(unknown)}")
    try:
        made: Compressor[Any] = cls(**fields)
    except TypeError as exc:
        raise IncompatiblePlan(
            f"{wire_id!r} from {dict(config)}: a setting is of the wrong kind",
            hint=f"`fedpress compressors show {wire_id}` has an example",
        ) from exc
    except ValueError as exc:
        raise IncompatiblePlan(f"{wire_id!r} from {dict(config)}: {exc}") from exc
    return made


def to_config(made: Compressor[Any]) -> dict[str, Any]:
    """The inverse of `from_config`: plain JSON, defaults spelled out."""
    return _config(made, to_config)


def _config(made: Any, of_member: Callable[[Any], Any]) -> dict[str, Any]:
    fields = {f.name: _plain(getattr(made, f.name), of_member) for f in dataclasses.fields(made)}
    return {_ID: made.wire_id, **fields}


def _has_plain_mean_member(made: Any) -> bool:
    return any(getattr(member, "needs_plain_mean", False) for member in members(made))


def members(made: Any) -> Iterator[Any]:
    """The compressors among the fields of `made`."""
    return _members([getattr(made, f.name) for f in dataclasses.fields(made)])


def _members(value: Any) -> Iterator[Any]:
    if hasattr(value, "wire_id"):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _members(item)


def _parsed(value: Any, depth: int) -> Any:
    if isinstance(value, Mapping) and _ID in value:
        return _from_config(value, depth)
    if isinstance(value, list | tuple):
        if depth > _MOST_DEPTH:
            raise IncompatiblePlan(f"lists within lists, more than {_MOST_DEPTH} deep")
        return tuple(_parsed(item, depth + 1) for item in value)
    return value


def _plain(value: Any, of_member: Callable[[Any], Any]) -> Any:
    if hasattr(value, "wire_id"):
        return of_member(value)
    if isinstance(value, list | tuple):
        return [_plain(item, of_member) for item in value]
    return value


def check_finite(update: Vector, spec: ModelSpec) -> None:
    """Raise InvalidUpdate unless `update` is float32 [spec.size] without NaN or infinity."""
    check_shape(update, spec)
    check_values(update)


def check_shape(update: Vector, spec: ModelSpec) -> None:
    """Raise InvalidUpdate unless `update` is float32 [spec.size]."""
    if update.shape != (spec.size,) or update.dtype != np.float32:
        raise InvalidUpdate(
            f"an update of {update.dtype}{list(update.shape)} where float32[{spec.size}] is due"
        )


def check_values(values: Vector) -> None:
    """Raise InvalidUpdate on NaN or infinity."""
    if not kernels.peak(values) < np.inf:
        raise InvalidUpdate(
            "the update holds NaN or infinity", hint="training diverged: lower the learning rate"
        )


def check_inner(inner: Any, outer: str) -> None:
    """Raise ValueError unless `inner` may stand inside the combinator `outer`."""
    if not hasattr(inner, "wire_id"):
        raise ValueError(f"{inner!r} is not a compressor")
    if getattr(inner, "keeps_residual", False):
        raise ValueError(f"error feedback goes around {outer}, not into it")
