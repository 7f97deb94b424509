"""A compressor as a pure transformation with explicit state.

A compressor is a frozen dataclass: its fields are its configuration, the very one the server
advertises and the client runs. What changes from round to round is a value that goes in and comes
out. `compress` and `decompress` are lossy, vectors to symbols and back; making bytes of symbols is
`fedpress_compression.coding`'s affair.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import pkgutil
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, Protocol, Self, TypeVar, cast

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
"""The kinds of side information, see `Public`."""
_ID = "id"
_ADDED = "added"
ADDED: Mapping[str, bool] = {_ADDED: True}
"""The metadata of a field that a released id got later: configurations leave it out at its default,
so that ends that do not know it go on reading them."""
_MOST_DEPTH = 16
"""Of compressors within one another."""


@dataclass(frozen=True, slots=True)
class Public:
    """The knowledge that both ends share before the upload: the tensors, the round's randomness and
    side information.

    `knowledge` has a vector for each kind that the compressor at hand `needs`, [spec.size] but for
    "basis". "previous" is the round's model less the one before it; "drift" is the round's model
    less the task's first; "activity" ranks the coordinates by how much they have moved of late, see
    `activity`; "own" is the update that the last included upload of this client stood for; all are
    zeros in the first round. "basis" is what the server made of a first exchange, see `powersgd`.
    `round` counts from 1; its attempts share it.
    """

    spec: ModelSpec
    randomness: PublicRandomness
    knowledge: Mapping[Knowledge, Vector] = field(default_factory=dict)
    round: int = 1

    def known(self, kind: Knowledge) -> Vector:
        """The vector of this kind; raises ConfigurationError where it was not given."""
        vector = self.knowledge.get(kind)
        if vector is None:
            raise ConfigurationError(f"a compressor reads {kind}, which it was not given")
        return vector

    def stream(self, wire_id: str, own: str = "") -> PublicStream:
        """The stream that the compressor `wire_id` reads for these tensors; `own`: one client's."""
        words = (wire_id, self.spec.digest, *([own] if own else []))
        return self.randomness.stream(" ".join(words))

    def part(self, names: Sequence[str]) -> Public:
        """The same knowledge of the tensors `names` alone."""
        rows = [self.spec.slices[name] for name in names]
        knowledge: dict[Knowledge, Vector] = {
            kind: np.concatenate([vector[row] for row in rows])
            for kind, vector in self.knowledge.items()
            if kind != "basis"
        }
        return dataclasses.replace(self, spec=self.spec.select(names), knowledge=knowledge)


class Lossy(Protocol[StateT]):
    """The two halves of lossy compression: vectors [spec.size] to symbols, and back."""

    def compress(
        self, update: Vector, state: StateT, public: Public, rng: np.random.Generator
    ) -> tuple[Symbols, StateT]:
        """Symbols for `update` and the state once they are included.

        `rng` is the client's own. Raises InvalidUpdate on NaN or infinity.
        """
        ...

    def decompress(self, symbols: Symbols, public: Public, num_summands: int = 1) -> Update:
        """The update that `symbols` stand for; the same bits on every machine.

        `num_summands` says how many clients' symbols were summed; only a compressor that
        commutes with the sum takes more than one.
        """
        ...


class Compressor(Lossy[StateT], Protocol[StateT]):
    """Vectors of `spec.size` float32 values to symbols; lossy.

    `compress` serves where an upload is included for certain. Where that is known later, `send`
    gives the state for the time between, and the receipt decides: `commit` or `roll_back`.
    `Stateful`, `Stateless` and `Wrapper` are bases with the usual ones of these.

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
        """The vectors of `Public` that this compressor reads, at both ends."""
        ...

    @property
    def keeps_residual(self) -> bool:
        """Whether what it does not send is added to the next update. Then its state is a
        `HasResidual`, and nothing that it is given is lost without being told as `lost`."""
        ...

    @property
    def lossy(self) -> Compressor[Any]:
        """The compressor whose symbols are sent: itself, or the one within error feedback."""
        ...

    def stricter(self, decay: float, max_ratio: float | None) -> Self:
        """The same with its residual, if it keeps one, limited at least so; see
        `error_feedback`."""
        ...

    def layout(self, spec: ModelSpec) -> Layout:
        """The fields that `compress` emits for the tensors of `spec`; the decoder needs no other
        schema."""
        ...

    def init(self, spec: ModelSpec) -> StateT:
        """The state of a client that has sent nothing yet."""
        ...

    def send(
        self,
        channel: Lossy[Any],
        update: Vector,
        state: StateT,
        public: Public,
        rng: np.random.Generator,
    ) -> tuple[Symbols, StateT, Any]:
        """Compress `update` by `channel`, which stands for `lossy` and everything on the way to
        the other end: coding, masks, a collective. It is asked once, and then for what its symbols
        stand for.

        Its symbols, the state for as long as nothing is known of their fate, and a mark: plain data
        that `commit` needs, None if nothing.
        """
        ...

    def commit(self, state: StateT, mark: Any, sent: Update) -> StateT:
        """The state once the upload with this `mark`, which stood for `sent`, is included.

        `mark` is None, too, where an upload of later was included before.
        """
        ...

    def roll_back(self, state: StateT, sent: Update) -> StateT:
        """The state once an upload that stood for `sent` is known not to be included."""
        ...


class HasResidual(Protocol):
    """A state with what waits to be sent."""

    @property
    def residual(self) -> Vector | None:
        """[spec.size], in units of the update; None: zeros."""
        ...

    @property
    def lost(self) -> tuple[tuple[str, Vector], ...]:
        """The parts of the residual that its limits removed in the last `send`: the reason and the
        values [spec.size] of each."""
        ...

    def _replace(self, **changes: Any) -> Any: ...


@dataclass(frozen=True, slots=True)
class Properties:
    """The declared properties of a compressor, by which one is chosen.

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
    """The attribute `properties` of `made`; the default without one, which claims nothing."""
    claimed: Properties = getattr(made, "properties", Properties())
    return claimed


def state_key(made: Compressor[Any]) -> Any:
    """Plain JSON; a state that one compressor left goes on with any other of an equal key.

    Its attribute `state_key`, or else its configuration with the keys of its members.
    """
    own = getattr(made, "state_key", None)
    return _config(made, state_key) if own is None else own


def state_name(made: Compressor[Any]) -> str:
    """`state_key` as text."""
    return json.dumps(state_key(made), sort_keys=True)


class Stateful:
    """The half of a compressor whose state moves when an upload is included, and only then.

    Such a state is what `compress` returned for the newest upload that was included.
    """

    __slots__ = ()

    @property
    def keeps_residual(self) -> bool:
        return False

    @property
    def lossy(self) -> Compressor[Any]:
        made: Any = self
        return cast(Compressor[Any], made)

    def stricter(self, decay: float, max_ratio: float | None) -> Self:
        return self

    def send(
        self,
        channel: Lossy[Any],
        update: Vector,
        state: Any,
        public: Public,
        rng: np.random.Generator,
    ) -> tuple[Symbols, Any, Any]:
        symbols, after = channel.compress(update, state, public, rng)
        return symbols, state, after

    def commit(self, state: Any, mark: Any, sent: Update) -> Any:
        return state if mark is None else mark

    def roll_back(self, state: Any, sent: Update) -> Any:
        return state


class Stateless(Stateful):
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


class Wrapper(Stateful):
    """The half of a compressor around one other, `inner`, whose symbols and state are its own."""

    __slots__ = ()
    inner: Compressor[Any]

    @property
    def commutes_with_sum(self) -> bool:
        return self.inner.commutes_with_sum

    @property
    def needs(self) -> frozenset[Knowledge]:
        return self.inner.needs

    @property
    def state_key(self) -> Any:
        return state_key(self.inner)

    def layout(self, spec: ModelSpec) -> Layout:
        return self.inner.layout(spec)

    def init(self, spec: ModelSpec) -> Any:
        return self.inner.init(spec)

    def compress(
        self, update: Vector, state: Any, public: Public, rng: np.random.Generator
    ) -> tuple[Symbols, Any]:
        return self.inner.compress(update, state, public, rng)

    def decompress(self, symbols: Symbols, public: Public, num_summands: int = 1) -> Update:
        return self.inner.decompress(symbols, public, num_summands)

    def commit(self, state: Any, mark: Any, sent: Update) -> Any:
        return self.inner.commit(state, mark, sent)

    def roll_back(self, state: Any, sent: Update) -> Any:
        return self.inner.roll_back(state, sent)


_HOOKS = ("keeps_residual", "lossy", "stricter", "send", "commit", "roll_back")
_by_id: dict[str, type[Any]] = {}
ClassT = TypeVar("ClassT", bound=type[Any])


def compressor(wire_id: str) -> Callable[[ClassT], ClassT]:
    """Claim `wire_id` for a class, for ever: a new behaviour is a new id. Outside this package it
    has the form package.name, see `plugins`.

    A class that does not say whether it `needs_plain_mean` does if one of its members does.
    """

    def claim(cls: ClassT) -> ClassT:
        plugins.check_id(wire_id, cls.__module__, "fedpress_compression")
        holder = _by_id.get(wire_id, cls)
        if holder.__qualname__ != cls.__qualname__:
            raise ValueError(f"wire id {wire_id!r} is {holder.__qualname__}'s")
        if missing := [name for name in _HOOKS if not hasattr(cls, name)]:
            raise TypeError(
                f"the compressor {wire_id!r} lacks {', '.join(missing)}; derive {cls.__qualname__} "
                "from Stateless, Stateful or Wrapper of fedpress.compressors, which have them"
            )
        _by_id[wire_id] = holder
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
    if not isinstance(wire_id, str) or wire_id not in known:
        detail, hint = plugins.missing("compressor", wire_id, list(known))
        raise IncompatiblePlan(detail, hint=hint)
    cls = known[wire_id]
    names = [field.name for field in dataclasses.fields(cls)]
    unknown = sorted(set(fields) - set(names))
    if unknown:
        raise IncompatiblePlan(f"{wire_id!r} takes {', '.join(names)}, not {', '.join(unknown)}")
    try:
        made: Compressor[Any] = cls(**fields)
        _check_numbers(made)
    except TypeError as exc:
        raise IncompatiblePlan(
            f"{wire_id!r} from {dict(config)}: a setting is of the wrong kind",
            hint=f"`fedpress compressors show {wire_id}` has an example",
        ) from exc
    except (ValueError, OverflowError) as exc:
        raise IncompatiblePlan(f"{wire_id!r} from {dict(config)}: {exc}") from exc
    return made


def _check_numbers(made: Any) -> None:
    """Raise ValueError for a numeric field that holds true or false, which Python takes for 1 and
    0."""
    for each in dataclasses.fields(made):
        value = getattr(made, each.name)
        kinds = re.findall(r"\w+", str(each.type)) if isinstance(value, bool) else []
        if {"int", "float"}.intersection(kinds) and "bool" not in kinds:
            raise ValueError(f"{each.name} must be a number, not {value}")


def to_config(made: Compressor[Any]) -> dict[str, Any]:
    """The inverse of `from_config`: plain JSON, defaults spelled out but those of `ADDED`."""
    return _config(made, to_config)


def _config(made: Any, of_member: Callable[[Any], Any]) -> dict[str, Any]:
    fields = {
        f.name: _plain(getattr(made, f.name), of_member)
        for f in dataclasses.fields(made)
        if not (f.metadata.get(_ADDED) and getattr(made, f.name) == f.default)
    }
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
