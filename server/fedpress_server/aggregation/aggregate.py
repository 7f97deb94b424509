"""From staged bytes to the next model: decode, add, apply, one upload at a time.

The memory is that of a few models, whatever the number of uploads, and what `AggregationSpace`
grants to strategies that ask for more; arrays beyond that are files in the payloads' folder.
Everything here is a function of bytes on the disk, and sums
are exact, so an aggregation that is run again gives the same model to the last bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from fedpress_compression import activity
from fedpress_compression.running_statistics import with_statistics, with_variances
from fedpress_compression.tensors import ModelSpec, Vector
from fedpress_protocols.errors import IncompatiblePlan
from fedpress_protocols.messages import DownlinkTerms, MaskedSum
from fedpress_protocols.model import Model, arrays_in
from fedpress_server import failpoints
from fedpress_server.aggregation.accumulate import (
    AggregationJob,
    Summed,
    make_accumulator,
    store_arrays,
    sum_uploads,
)
from fedpress_server.aggregation.terms import RoundTerms
from fedpress_server.storage.files import (
    artefact_name,
    model_name,
    optimizer_name,
)
from fedpress_server.storage.payloads import Payloads, put_by_digest
from fedpress_strategies import Strategy
from fedpress_strategies.downlink import rounded, stepped
from fedpress_strategies.strategy import (
    CONTROL,
    AggregationSpace,
    OptimizerState,
    UniformMean,
    WeightedMean,
    applied,
    figures,
    norm_of,
    published,
)

_DEFAULT_SPACE = AggregationSpace()
_MASTER = "parameters"
_ACTIVITY = "activity"
_STATE = "state."


@dataclass(frozen=True, slots=True)
class AggregationResult:
    """Names of the files that the aggregation has written."""

    model: str
    spec: str
    num_bytes: int
    optimizer_state: str | None
    num_examples: int
    update_norm: float
    """The L2 norm of the aggregated update, before the server's optimizer."""
    activity: str | None = None
    control: str | None = None
    published: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    """The models besides: by name, the digest and the size in bytes."""
    bases: Mapping[str, str] = field(default_factory=dict)
    """As those of RoundTerms, for the clients whose uploads were aggregated."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """The strategy's own about the round, see `strategy.figures`."""
    masked: MaskedSum | None = None
    """In the masked lane: the sum that the model was made from."""
    suspects: tuple[int, ...] = ()
    """Of its session: the slots whose shares were wrong."""
    clip: float | None = None
    """Of the round after, where privacy terms adapt it."""

    @property
    def artefacts(self) -> frozenset[str]:
        return frozenset(digest for digest in (self.activity, self.control) if digest)


def aggregate(
    job: AggregationJob,
    payloads: Payloads,
    memory: int = _DEFAULT_SPACE.memory,
    summed: Summed | None = None,
) -> AggregationResult:
    """Make and store the round's model; raises FedpressError if these uploads give no valid one.

    `memory`: bytes for strategies that compare updates; their files are in the payloads' folder.
    `summed` is the aggregate of uploads that were added up under masks.
    """
    plan, spec = job.terms.plan, job.terms.spec
    space = AggregationSpace(payloads.scratch, memory)
    base = Model.from_buffer(payloads.mapped(model_name(plan.model), memory), space.zeros)
    earlier = _load_state(job.optimizer_state, payloads, memory)
    shared = job.terms.shared
    before = spec.part(base.parameters, shared)
    if earlier.master is not None:
        before = with_statistics(shared, earlier.master, before)
    bases: dict[str, str] = {}
    if summed is None:
        summed = sum_uploads(job, payloads, space, bases)
    optimizer, num_examples, clip = job.strategy.optimizer, summed.num_examples, summed.clip
    norm = norm_of(summed.delta[: before.size])  # `lora` has products behind it
    tally = replace(
        summed.tally, warming=plan.warming, spec=shared, norm=norm, momentum=job.momentum
    )
    parameters, state = applied(
        optimizer, before, summed.delta, earlier.optimizer or None, tally, space
    )
    del summed  # with its array
    parameters = with_variances(shared, before, parameters)
    failpoints.reach("model-stepped")

    def with_shared(values: Vector) -> Vector:
        return spec.with_part(base.parameters, shared, values)

    def store_model(values: Vector) -> tuple[str, int]:
        return _store_model(base.with_parameters(with_shared(values)), payloads, space)

    if job.downlink is None:
        digest, num_bytes = store_model(parameters)
    else:
        next_model = stepped(base, with_shared(parameters), job.downlink)
        digest, num_bytes = _store_model(next_model, payloads, space)
    public = dict(published(optimizer, state))
    control = public.pop(CONTROL, None)
    control_digest = None if control is None else _store(control.astype("<f4").tobytes(), payloads)
    average, map_digest = None, None
    if "activity" in plan.needs:
        average = activity.averaged(earlier.activity, parameters - before)
        map_digest = _store(activity.to_bytes(average, shared), payloads)
    master = parameters if _is_rounded(spec) or job.downlink is not None else None
    state_digest = _store_state(_CarriedState(state, master, average), payloads, space)
    return AggregationResult(
        digest,
        spec.digest,
        num_bytes,
        state_digest,
        num_examples,
        norm,
        map_digest,
        control_digest,
        {name: store_model(with_variances(shared, before, v)) for name, v in public.items()},
        bases,
        figures(optimizer, state),
        clip=clip,
    )


def first_model(digest: str, downlink: DownlinkTerms, payloads: Payloads) -> tuple[str, int]:
    """Round the model `digest` to the grid, and store the result, with which a task with this
    downlink begins; returns its digest and its size in bytes. Raises ConfigurationError."""
    model = Model.from_bytes(payloads.get(model_name(digest)))
    return _store_model(rounded(model, downlink), payloads, AggregationSpace(payloads.scratch))


def first_state(
    digest: str, shared: ModelSpec, payloads: Payloads, last_state: str | None = None
) -> str | None:
    """Store what rounding the model `digest` removed from it, as the state that the first
    aggregation loads; returns the state's digest.

    `last_state` is the state of a task that continues from its own last model: its optimizer is
    reset, what was not sent down is kept.
    """
    space = AggregationSpace(payloads.scratch)
    parameters = _load_state(last_state, payloads, space.memory).master
    if parameters is None:
        data = payloads.mapped(model_name(digest), space.memory)
        model = Model.from_buffer(data, space.zeros)
        parameters = model.spec.part(model.parameters, shared)
    return _store_state(_CarriedState(None, parameters, None), payloads, space)


def _store_model(model: Model, payloads: Payloads, space: AggregationSpace) -> tuple[str, int]:
    """Store a model; returns its digest and its size in bytes."""
    if sum(tensor.num_bytes for tensor in model.spec.tensors) > space.memory:
        with payloads.temporary() as path:
            model.write(path, space.zeros)
            return put_by_digest(payloads, model_name, path)
    data = model.to_bytes()
    digest = hashlib.sha256(data).hexdigest()
    payloads.put(model_name(digest), data)
    return digest, len(data)


def _store(data: bytes, payloads: Payloads) -> str:
    """Store an artefact; returns its digest."""
    digest = hashlib.sha256(data).hexdigest()
    payloads.put(artefact_name(digest), data)
    return digest


def check_strategy(
    terms: RoundTerms, strategy: Strategy, memory: int = _DEFAULT_SPACE.memory
) -> None:
    """Raises IncompatiblePlan if the strategy cannot aggregate the plan's uploads in this
    `memory`."""
    masking = terms.plan.masking
    if masking is not None and masking.max_weight and strategy.aggregator is UniformMean:
        raise IncompatiblePlan(
            "the strategy counts all clients the same, and masking.max_weight counts them by their "
            "examples; leave max_weight out"
        )
    try:
        make_accumulator(terms, strategy, AggregationSpace(terms.payloads.scratch, memory), {})
    except (TypeError, ValueError) as exc:
        raise IncompatiblePlan(f"the strategy cannot aggregate the plan's uploads: {exc}") from exc
    is_plain_mean = (
        strategy.symbol_aggregator is None
        and strategy.aggregator is WeightedMean
        and getattr(strategy.optimizer, "is_plain", False)
        and not _is_rounded(terms.spec)
    )
    for profile in terms.plan.profiles:
        if getattr(profile.compressor, "needs_plain_mean", False) and not is_plain_mean:
            raise IncompatiblePlan(
                f"profile {profile.name!r} counts on a model that moves by the very mean of the "
                "updates: a strategy with learning_rate 1 and no momentum, a model in float32",
                hint="choose fedavg with its defaults, or another compressor",
            )


def _is_rounded(spec: ModelSpec) -> bool:
    """Whether the model's file holds less than float32, so that small steps would be lost in it."""
    return any(tensor.dtype != "float32" for tensor in spec.trained)


class _CarriedState(NamedTuple):
    """The state that one aggregation passes to the next: the optimizer's state, None before the
    first; the parameters in float32, where the model's file rounds them; the average step that the
    map of activity is drawn from, where a profile reads it."""

    optimizer: OptimizerState | None
    master: Vector | None
    activity: Vector | None


def _load_state(digest: str | None, payloads: Payloads, memory: int) -> _CarriedState:
    if digest is None:
        return _CarriedState(None, None, None)
    arrays = arrays_in(payloads.mapped(optimizer_name(digest), memory))
    master, average = arrays.pop(_MASTER, None), arrays.pop(_ACTIVITY, None)
    state = {name.removeprefix(_STATE): array for name, array in arrays.items()}
    return _CarriedState(state, master, average)


def _store_state(state: _CarriedState, payloads: Payloads, space: AggregationSpace) -> str | None:
    arrays = {_STATE + name: array for name, array in (state.optimizer or {}).items()}
    values = {_MASTER: state.master, _ACTIVITY: state.activity}
    arrays |= {name: array for name, array in values.items() if array is not None}
    if not arrays:
        return None
    return store_arrays(arrays, payloads, optimizer_name, space.memory)
