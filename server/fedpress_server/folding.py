"""From staged bytes to the next model: decode, add, apply, one upload at a time.

The memory is that of a few models, whatever the number of uploads. Everything here is a function of
bytes on the disk, and sums are exact, so a fold that is run again gives the same model to the last
bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import safetensors
import safetensors.numpy

from fedpress_protocols.coding.fields import Contexts, Layout
from fedpress_protocols.compression.compressor import Public
from fedpress_protocols.compression.contexts import contexts_of
from fedpress_protocols.errors import IncompatiblePlan, InvalidUpdate, ServerError
from fedpress_protocols.model import Model, ModelSpec, Vector
from fedpress_protocols.plan import RoundPlan
from fedpress_protocols.update import Update
from fedpress_protocols.upload import Upload
from fedpress_server.payloads import Payloads
from fedpress_strategies import Strategy
from fedpress_strategies.strategy import Delta, OptimizerState, ServerSGD, WeightedMean

_MASTER = "parameters"
_STATE = "state."


@dataclass(frozen=True)
class RoundTerms:
    """A plan with the spec of its model and the place of the models it names: enough to read any
    upload. What is derived is made once, in the thread that asks first."""

    plan: RoundPlan
    spec: ModelSpec
    payloads: Payloads

    @cached_property
    def layouts(self) -> tuple[Layout, ...]:
        return self.plan.layouts(self.spec)

    @cached_property
    def public(self) -> Public:
        plan = self.plan
        previous = self._since(plan.previous_model) if "previous" in plan.needs else None
        drift = self._since(plan.first_model) if "drift" in plan.needs else None
        return plan.public(self.spec, previous=previous, drift=drift)

    @cached_property
    def contexts(self) -> tuple[Contexts, ...]:
        """Those of each profile's layout."""
        return tuple(contexts_of(layout, self.public) for layout in self.layouts)

    def _since(self, earlier: str | None) -> Vector:
        """The plan's model less an `earlier` one, in float32, as the device subtracts them."""
        if earlier is None or earlier == self.plan.model:
            return np.zeros(self.spec.size, np.float32)
        after, before = (
            Model.from_bytes(self.payloads.get(model_name(digest))).parameters
            for digest in (self.plan.model, earlier)
        )
        return after - before

    def profile(self, index: int) -> str:
        """The profile of the assignment at `index`: the plan's in turn."""
        return self.plan.profiles[index % len(self.plan.profiles)].name

    def read(self, body: bytes, profile: str) -> Upload:
        """The symbols in `body` and the number of examples, as the plan allows them.

        Raises InvalidUpdate, DecodingError among it, or WireVersionMismatch.
        """
        index = self.plan.profile_index(profile)
        upload = Upload.from_bytes(body, self.layouts, index, self.contexts[index])
        most = self.plan.fixed_point.max_examples
        if upload.num_examples > most:
            raise InvalidUpdate(f"num_examples of {upload.num_examples} where {most} are allowed")
        return upload

    def decoded(self, body: bytes, profile: str) -> tuple[Update, int]:
        """The update in `body` and its number of examples, within the plan's bounds; raises as
        `read` does."""
        upload = self.read(body, profile)
        with np.errstate(over="ignore", invalid="ignore"):  # forged values; check refuses them
            update = self.plan.compressor(profile).decompress(upload.symbols, self.public)
            update.check(self.plan.fixed_point.max_abs)
        return update, upload.num_examples


@dataclass(frozen=True, slots=True)
class StagedUpload:
    """Where an upload's body lies, and its SHA-256."""

    name: str
    digest: str
    profile: str


@dataclass(frozen=True)
class FoldJob:
    """`uploads` in the order of their assignments; `optimizer_state` as the last fold left it."""

    terms: RoundTerms
    strategy: Strategy
    optimizer_state: str | None
    uploads: tuple[StagedUpload, ...]


@dataclass(frozen=True, slots=True)
class FoldResult:
    """Names of what lies on the disk now."""

    model: str
    spec: str
    num_bytes: int
    optimizer_state: str | None
    num_examples: int


def model_name(digest: str) -> str:
    return f"models/{digest}.safetensors"


def optimizer_name(digest: str) -> str:
    return f"optimizers/{digest}.safetensors"


def fold(job: FoldJob, payloads: Payloads) -> FoldResult:
    """Make the round's model, durably; raises FedpressError if these uploads make none."""
    plan, spec = job.terms.plan, job.terms.spec
    base = Model.from_bytes(payloads.get(model_name(plan.model)))
    state, master = _load_state(job.optimizer_state, payloads)
    parameters = base.parameters if master is None else master
    add, delta = _folds(job.terms, job.strategy)
    num_examples = 0
    for staged in job.uploads:
        body = payloads.get(staged.name)
        if hashlib.sha256(body).hexdigest() != staged.digest:
            raise ServerError(f"{staged.name} was changed on the disk")
        num_examples += add(body, staged.profile)
    optimizer = job.strategy.optimizer
    if state is None:
        state = optimizer.init(parameters)
    parameters, state = optimizer.apply(parameters, delta(), state)
    data = base.with_parameters(parameters).to_bytes()
    digest = hashlib.sha256(data).hexdigest()
    payloads.put(model_name(digest), data)
    kept = _store_state(state, parameters if _is_rounded(spec) else None, payloads)
    return FoldResult(digest, spec.digest, len(data), kept, num_examples)


def check_strategy(terms: RoundTerms, strategy: Strategy) -> None:
    """Raises IncompatiblePlan if the strategy cannot fold the plan's uploads."""
    try:
        _folds(terms, strategy)
    except (TypeError, ValueError) as exc:
        raise IncompatiblePlan(f"the strategy cannot fold the plan's uploads: {exc}") from exc
    is_plain_mean = (
        strategy.symbol_aggregator is None
        and strategy.aggregator is WeightedMean
        and strategy.optimizer == ServerSGD()
        and not _is_rounded(terms.spec)
    )
    for profile in terms.plan.profiles:
        if getattr(profile.compressor, "needs_plain_mean", False) and not is_plain_mean:
            raise IncompatiblePlan(
                f"profile {profile.name!r} counts on a model that moves by the very mean of the "
                "updates: a strategy with learning_rate 1 and no momentum, a model in float32",
                hint="choose fedavg with its defaults, or another compressor",
            )


def _folds(
    terms: RoundTerms, strategy: Strategy
) -> tuple[Callable[[bytes, str], int], Callable[[], Delta]]:
    """How one body is added, which returns its number of examples, and what all came to."""
    plan = terms.plan
    if strategy.symbol_aggregator is None:
        aggregator = strategy.aggregator(terms.spec.size, plan.sum_bounds())

        def add(body: bytes, profile: str) -> int:
            update, weight = terms.decoded(body, profile)
            aggregator.add(update, weight)
            return weight

        return add, aggregator.result
    if len(plan.profiles) > 1:
        raise IncompatiblePlan(
            f"a strategy that sums symbols takes one profile, the plan has {len(plan.profiles)}"
        )
    compressor = plan.compressor(plan.profiles[0].name)
    sums = strategy.symbol_aggregator(compressor, terms.public, plan.sum_bounds())

    def add_symbols(body: bytes, profile: str) -> int:
        upload = terms.read(body, profile)
        sums.add(upload.symbols, upload.num_examples)
        return upload.num_examples

    return add_symbols, sums.result


def _is_rounded(spec: ModelSpec) -> bool:
    """Whether the model's file holds less than float32, so that small steps would be lost in it."""
    return any(tensor.dtype != "float32" for tensor in spec.trained)


def _load_state(
    digest: str | None, payloads: Payloads
) -> tuple[OptimizerState | None, Vector | None]:
    if digest is None:
        return None, None
    arrays = safetensors.numpy.load(payloads.get(optimizer_name(digest)))
    master = arrays.pop(_MASTER, None)
    state = {name.removeprefix(_STATE): array for name, array in arrays.items()}
    return state, master


def _store_state(state: OptimizerState, master: Vector | None, payloads: Payloads) -> str | None:
    arrays = {_STATE + name: np.ascontiguousarray(array) for name, array in state.items()}
    if master is not None:
        arrays[_MASTER] = np.ascontiguousarray(master)
    if not arrays:
        return None
    data = safetensors.numpy.save(arrays)
    digest = hashlib.sha256(data).hexdigest()
    payloads.put(optimizer_name(digest), data)
    return digest
