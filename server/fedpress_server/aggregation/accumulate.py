"""Decode staged bodies and add them up: all at once, or in batches that any worker may take.

A batch's sum is a file of integers, so batches summed in any order, by any workers, give the same
result as all uploads at once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import fsum
from typing import Any, NamedTuple, TypeGuard, cast

import numpy as np
import numpy.typing as npt
import safetensors.numpy

from fedpress_compression.decode_add import decode_add
from fedpress_compression.fixed_point import Accumulator as Sums
from fedpress_compression.update import Update
from fedpress_protocols.errors import IncompatiblePlan, ServerError
from fedpress_protocols.messages import DownlinkTerms
from fedpress_protocols.model import Buffer, arrays_in, write_arrays
from fedpress_protocols.plan import RoundPlan
from fedpress_protocols.upload import WITHIN_CLIP
from fedpress_server import failpoints
from fedpress_server.aggregation.terms import RoundTerms
from fedpress_server.storage.payloads import Payloads, put_by_digest
from fedpress_strategies import Strategy
from fedpress_strategies.private import (
    NoisedSum,
    adapted_clip,
    has_own_noise,
    noised_mean,
)
from fedpress_strategies.staleness import DiscountedMean
from fedpress_strategies.strategy import (
    AggregationSpace,
    Aggregator,
    Delta,
    Divisible,
    Part,
    Report,
    SymbolAggregator,
    Tally,
    UniformMean,
    WeightedMean,
)

_PART = "part."
_WEIGHTS = "weights"
_REPORTS = "told"
_BASES = "bases"


@dataclass(frozen=True, slots=True)
class StagedUpload:
    """The file of an upload's body, and its SHA-256."""

    name: str
    digest: str
    profile: str
    client_id: str = ""
    plan: RoundPlan | None = None
    """The plan that it was made under, where that may differ from the aggregation's."""
    staleness: int = 0
    """The number of models published since the one that it was trained from."""


@dataclass(frozen=True)
class AggregationJob:
    """`uploads` in the order of their assignments; `optimizer_state` as the last aggregation left
    it."""

    terms: RoundTerms
    strategy: Strategy
    optimizer_state: str | None
    uploads: tuple[StagedUpload, ...]
    downlink: DownlinkTerms | None = None
    momentum: float | None = None
    """The most of the step, where a policy decides on it."""
    sums: tuple[str, ...] = ()
    """The files of the uploads' sums, batch by batch, where they were added up before."""
    noise_secret: bytes | None = None
    """Of the task, where the server adds noise to its sums."""
    noised_before: tuple[NoisedSum, ...] = ()
    """The sums of the rounds before that the noise is correlated with, newest first."""
    first_clip: float = 0.0
    """Of the task, where the clip of privacy terms is adaptive."""


class Summed(NamedTuple):
    """The aggregate of a round's uploads: `delta` as the strategy's optimizer takes it."""

    delta: Delta
    num_examples: int
    tally: Tally
    clip: float | None = None
    """Of the round after, where it is adaptive."""


class Accumulator(NamedTuple):
    """`add` adds one body to `aggregator`, and returns its number of examples and its report."""

    add: Callable[[bytes, StagedUpload], tuple[int, Report]]
    aggregator: Aggregator | SymbolAggregator


def read_body(staged: StagedUpload, payloads: Payloads) -> bytes:
    """Return the body; raises ServerError if it is not the one that was staged."""
    body = payloads.get(staged.name)
    if hashlib.sha256(body).hexdigest() != staged.digest:
        raise ServerError(f"{staged.name} was changed on the disk")
    return body


def sum_uploads(
    job: AggregationJob, payloads: Payloads, space: AggregationSpace, bases: dict[str, str]
) -> Summed:
    """Aggregate the job's uploads, one by one or from the sums of their batches."""
    accumulator = _accumulator_in(job, space, bases)
    weights, reports = list[int](), list[tuple[float, ...]]()
    for name in job.sums:
        part, more_weights, more_reports, more_bases = _part(payloads.mapped(name, space.memory))
        cast(Divisible, accumulator.aggregator).merge(part)
        weights += more_weights
        reports += more_reports
        bases.update(more_bases)
    if not job.sums:
        weights, reports = _add_each(job, payloads, accumulator)
    names, num_examples = job.terms.plan.report, sum(weights)
    # Rounded once, whatever the order.
    means = {
        name: fsum(weight * report[index] for weight, report in zip(weights, reports, strict=True))
        / max(num_examples, 1)
        for index, name in enumerate(names)
        if name != WITHIN_CLIP  # of which no more than a noised count is used
    }
    delta = _result(job, accumulator)
    tally = Tally(len(weights), means)
    return Summed(delta, num_examples, tally, _next_clip(job, reports))


def _next_clip(job: AggregationJob, reports: Sequence[tuple[float, ...]]) -> float | None:
    """Of the round after, None where it is not adaptive; the reports are of bits alone then."""
    names = job.terms.plan.report
    if WITHIN_CLIP not in names:
        return None
    if job.noise_secret is None:
        raise ServerError("a count that needs the server's noise cannot be had without")
    within = [report[names.index(WITHIN_CLIP)] for report in reports]
    digests = [staged.digest for staged in job.uploads]
    return adapted_clip(job.terms.plan, within, digests, job.noise_secret, job.first_clip)


def _result(job: AggregationJob, accumulator: Accumulator) -> Delta:
    if not has_own_noise(job.terms.plan):
        mean = accumulator.aggregator
        return mean.sums.into_mean() if _is_mean(mean) else mean.result()
    if job.noise_secret is None or not isinstance(accumulator.aggregator, WeightedMean):
        raise ServerError("a sum that needs the server's noise cannot be had without")
    digests = [staged.digest for staged in job.uploads]
    mean, before = accumulator.aggregator, job.noised_before
    return noised_mean(job.terms, mean, digests, job.noise_secret, before)


def _is_mean(aggregator: Aggregator | SymbolAggregator) -> TypeGuard[WeightedMean]:
    """Whether bodies may be added to its sums directly."""
    return type(aggregator) in (WeightedMean, UniformMean)


def _accumulator_in(
    job: AggregationJob, space: AggregationSpace, bases: dict[str, str]
) -> Accumulator:
    """As `make_accumulator`, with the sums of a mean in `space`."""
    accumulator = make_accumulator(job.terms, job.strategy, space, bases)
    if _is_mean(accumulator.aggregator):
        size, bounds = job.terms.shared.size, job.terms.plan.sum_bounds()
        accumulator.aggregator.sums = Sums(size, bounds, space.zeros(size, np.int64))
    return accumulator


def add_batch(job: AggregationJob, payloads: Payloads, folder: str, memory: int) -> str:
    """Sum the job's uploads alone, and store the sum durably in `folder`; returns its digest, which
    is its name there. `memory` as for `aggregate`. Raises FedpressError if the uploads have no
    valid sum."""
    bases: dict[str, str] = {}
    accumulator = _accumulator_in(job, AggregationSpace(payloads.scratch, memory), bases)
    weights, reports = _add_each(job, payloads, accumulator)
    part = cast(Divisible, accumulator.aggregator).part()
    num_reports = len(job.terms.plan.report)
    arrays: dict[str, npt.NDArray[Any]] = {
        **{_PART + name: array for name, array in part.items()},
        _WEIGHTS: np.array(weights, np.int64),
        _REPORTS: np.array(reports, np.float64).reshape(len(reports), num_reports),
        _BASES: np.frombuffer(json.dumps(bases, sort_keys=True).encode(), np.uint8),
    }
    return store_arrays(arrays, payloads, lambda digest: f"{folder}/{digest}", memory)


def store_arrays(
    arrays: Mapping[str, npt.NDArray[Any]],
    payloads: Payloads,
    name: Callable[[str], str],
    memory: int,
) -> str:
    """Store arrays durably, without a copy of more than `memory` bytes; returns the digest of the
    file, from which it has its `name`."""
    arrays = {key: np.ascontiguousarray(array) for key, array in arrays.items()}
    if sum(array.nbytes for array in arrays.values()) > memory:
        with payloads.temporary() as path:
            write_arrays(path, arrays)
            return put_by_digest(payloads, name, path)[0]
    data = safetensors.numpy.save(arrays)
    digest = hashlib.sha256(data).hexdigest()
    payloads.put(name(digest), data)
    return digest


def _add_each(
    job: AggregationJob, payloads: Payloads, accumulator: Accumulator
) -> tuple[list[int], list[tuple[float, ...]]]:
    """Return each upload's number of examples, and its report in the order of the plan's names."""
    weights, reports = [], []
    for staged in job.uploads:
        weight, report = accumulator.add(read_body(staged, payloads), staged)
        failpoints.reach("upload-added")
        weights.append(weight)
        reports.append(tuple(report[name] for name in job.terms.plan.report))
    return weights, reports


def _part(data: Buffer) -> tuple[Part, list[int], list[tuple[float, ...]], dict[str, str]]:
    """Read what `add_batch` stored."""
    arrays = arrays_in(data)
    bases = json.loads(arrays.pop(_BASES).tobytes())
    weights = arrays.pop(_WEIGHTS).tolist()
    reports = [tuple(row) for row in arrays.pop(_REPORTS).tolist()]
    return {name.removeprefix(_PART): a for name, a in arrays.items()}, weights, reports, bases


def make_accumulator(
    terms: RoundTerms, strategy: Strategy, space: AggregationSpace, bases: dict[str, str]
) -> Accumulator:
    """Return the accumulator of the plan's uploads under the strategy. It fills `bases` where the
    plan reads them. Raises IncompatiblePlan, TypeError or ValueError if the uploads cannot be
    added up."""
    plan = terms.plan
    if strategy.symbol_aggregator is None:
        if strategy.planned_aggregator is not None:
            aggregator = strategy.planned_aggregator(plan, terms.public, space)
        else:
            aggregator = strategy.aggregator(terms.shared.size, plan.sum_bounds())
        if _is_mean(aggregator) and "own" not in plan.needs:
            mean = aggregator

            def add_straight(body: bytes, staged: StagedUpload) -> tuple[int, Report]:
                fields, num_examples, report = terms.fields(body, staged.profile)
                compressor = plan.compressor(staged.profile)
                weight = mean.weight_of(num_examples)
                with np.errstate(over="ignore", invalid="ignore"):  # as in `decoded`
                    decode_add(fields, compressor, terms.public, mean.sums, weight)
                return num_examples, report

            return Accumulator(add_straight, mean)
        if isinstance(aggregator, DiscountedMean):
            return Accumulator(_add_by_staleness(terms, aggregator), aggregator)

        def add(body: bytes, staged: StagedUpload) -> tuple[int, Report]:
            client_id = staged.client_id
            update, num_examples, report = terms.decoded(body, staged.profile, client_id)
            aggregator.add(update, num_examples, report)
            if "own" in plan.needs:
                bases[client_id] = terms.keep_base(client_id, update)
            return num_examples, report

        return Accumulator(add, aggregator)
    if len(plan.profiles) > 1:
        raise IncompatiblePlan(
            f"a strategy that sums symbols takes one profile, the plan has {len(plan.profiles)}"
        )
    compressor = plan.compressor(plan.profiles[0].name)
    symbol_sums = strategy.symbol_aggregator(compressor, terms.public, plan.sum_bounds())

    def add_symbols(body: bytes, staged: StagedUpload) -> tuple[int, Report]:
        upload = terms.read(body, staged.profile)
        symbol_sums.add(upload.symbols, upload.num_examples)
        return upload.num_examples, dict(zip(plan.report, upload.report, strict=True))

    return Accumulator(add_symbols, symbol_sums)


def _add_by_staleness(
    terms: RoundTerms, mean: DiscountedMean
) -> Callable[[bytes, StagedUpload], tuple[int, Report]]:
    """Return a function that adds one body of an asynchronous task, read under its own plan. Values
    derived from an earlier plan are kept only while uploads of that plan follow one another."""
    own = terms

    def add(body: bytes, staged: StagedUpload) -> tuple[int, Report]:
        nonlocal own
        if staged.plan is None or staged.plan is terms.plan:
            own = terms
        elif staged.plan is not own.plan:
            own = replace(terms, plan=staged.plan)
        if mean.mixes and staged.staleness:
            update, num_examples, report = own.decoded(body, staged.profile, staged.client_id)
            ahead = terms.since(own.plan.model)
            update = Update.from_dense(update.dense() - ahead)
            mean.add(update, num_examples, staleness=staged.staleness)
            return num_examples, report
        fields, num_examples, report = own.fields(body, staged.profile)
        compressor = own.plan.compressor(staged.profile)
        weight = mean.weight_of(num_examples, staged.staleness)
        with np.errstate(over="ignore", invalid="ignore"):  # as in `decoded`
            decode_add(fields, compressor, own.public, mean.sums, weight)
        mean.count(num_examples)
        return num_examples, report

    return add
