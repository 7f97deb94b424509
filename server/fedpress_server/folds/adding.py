"""Staged bodies, decoded and added up: all at once, or in batches that any worker may take.

A batch's sum is a file of whole numbers, so that batches in any order, by whichever workers, come
to what all uploads at once do.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import fsum
from typing import NamedTuple, cast

import numpy as np
import safetensors
import safetensors.numpy

from fedpress_compression.decode_add import decode_add
from fedpress_compression.update import Update
from fedpress_protocols.errors import IncompatiblePlan, ServerError
from fedpress_protocols.messages import DownlinkTerms
from fedpress_protocols.plan import RoundPlan
from fedpress_server import failpoints
from fedpress_server.folds.terms import RoundTerms
from fedpress_server.storage.payloads import Payloads
from fedpress_strategies import Strategy
from fedpress_strategies.staleness import DiscountedMean
from fedpress_strategies.strategy import (
    Aggregator,
    Delta,
    Divisible,
    FoldSpace,
    Part,
    Report,
    SymbolAggregator,
    Tally,
    UniformMean,
    WeightedMean,
)

_PART = "part."
_WEIGHTS = "weights"
_TOLD = "told"
_BASES = "bases"


@dataclass(frozen=True, slots=True)
class StagedUpload:
    """Where an upload's body lies, and its SHA-256."""

    name: str
    digest: str
    profile: str
    client_id: str = ""
    plan: RoundPlan | None = None
    """Under which it was made, where that may be another than the fold's."""
    staleness: int = 0
    """How many models its own is behind the newest."""


@dataclass(frozen=True)
class FoldJob:
    """`uploads` in the order of their assignments; `optimizer_state` as the last fold left it."""

    terms: RoundTerms
    strategy: Strategy
    optimizer_state: str | None
    uploads: tuple[StagedUpload, ...]
    downlink: DownlinkTerms | None = None
    sums: tuple[str, ...] = ()
    """The files of the uploads' sums, batch by batch, where they were added up before."""


class Summed(NamedTuple):
    """What a round's uploads come to: `delta` as the strategy's optimizer takes it."""

    delta: Delta
    num_examples: int
    tally: Tally


class Adding(NamedTuple):
    """`add` takes one body in, and returns its number of examples and what it reports; `fold` has
    what all came to."""

    add: Callable[[bytes, StagedUpload], tuple[int, Report]]
    fold: Aggregator | SymbolAggregator


def body_of(staged: StagedUpload, payloads: Payloads) -> bytes:
    """Raises ServerError if it is not the one that was staged."""
    body = payloads.get(staged.name)
    if hashlib.sha256(body).hexdigest() != staged.digest:
        raise ServerError(f"{staged.name} was changed on the disk")
    return body


def added(job: FoldJob, payloads: Payloads, space: FoldSpace, bases: dict[str, str]) -> Summed:
    """What the job's uploads come to: one by one, or by the sums of their batches."""
    adds = adding(job.terms, job.strategy, space, bases)
    weights, reports = list[int](), list[tuple[float, ...]]()
    for name in job.sums:
        part, more_weights, more_reports, more_bases = _part(payloads.get(name))
        cast(Divisible, adds.fold).merge(part)
        weights += more_weights
        reports += more_reports
        bases.update(more_bases)
    if not job.sums:
        weights, reports = _each(job, payloads, adds)
    names, num_examples = job.terms.plan.report, sum(weights)
    # Rounded once, whatever the order.
    means = {
        name: fsum(weight * report[index] for weight, report in zip(weights, reports, strict=True))
        / max(num_examples, 1)
        for index, name in enumerate(names)
    }
    return Summed(adds.fold.result(), num_examples, Tally(len(weights), means))


def add_batch(job: FoldJob, payloads: Payloads, folder: str) -> str:
    """Add up the job's uploads alone, durably: the digest of their sum, under which it lies in
    `folder`. Raises FedpressError if they come to none."""
    bases: dict[str, str] = {}
    adds = adding(job.terms, job.strategy, FoldSpace(), bases)
    weights, reports = _each(job, payloads, adds)
    num_reports = len(job.terms.plan.report)
    arrays = {
        **{_PART + name: array for name, array in cast(Divisible, adds.fold).part().items()},
        _WEIGHTS: np.array(weights, np.int64),
        _TOLD: np.array(reports, np.float64).reshape(len(reports), num_reports),
        _BASES: np.frombuffer(json.dumps(bases, sort_keys=True).encode(), np.uint8),
    }
    data = safetensors.numpy.save({n: np.ascontiguousarray(a) for n, a in arrays.items()})
    digest = hashlib.sha256(data).hexdigest()
    payloads.put(f"{folder}/{digest}", data)
    return digest


def _each(
    job: FoldJob, payloads: Payloads, adds: Adding
) -> tuple[list[int], list[tuple[float, ...]]]:
    """The examples of each upload, and what it reports in the order of the plan's names."""
    weights, reports = [], []
    for staged in job.uploads:
        weight, report = adds.add(body_of(staged, payloads), staged)
        failpoints.reach("upload-added")
        weights.append(weight)
        reports.append(tuple(report[name] for name in job.terms.plan.report))
    return weights, reports


def _part(data: bytes) -> tuple[Part, list[int], list[tuple[float, ...]], dict[str, str]]:
    """What `add_batch` kept."""
    arrays = safetensors.numpy.load(data)
    bases = json.loads(arrays.pop(_BASES).tobytes())
    weights = arrays.pop(_WEIGHTS).tolist()
    reports = [tuple(row) for row in arrays.pop(_TOLD).tolist()]
    return {name.removeprefix(_PART): a for name, a in arrays.items()}, weights, reports, bases


def adding(
    terms: RoundTerms, strategy: Strategy, space: FoldSpace, bases: dict[str, str]
) -> Adding:
    """How the plan's uploads are added up under the strategy. `bases` is filled where the plan
    reads them. Raises IncompatiblePlan, TypeError or ValueError where they cannot be."""
    plan = terms.plan
    if strategy.symbol_aggregator is None:
        if strategy.planned_aggregator is not None:
            aggregator = strategy.planned_aggregator(plan, terms.public, space)
        else:
            aggregator = strategy.aggregator(terms.shared.size, plan.sum_bounds())
        if type(aggregator) in (WeightedMean, UniformMean) and "own" not in plan.needs:
            mean = cast(WeightedMean, aggregator)

            def add_straight(body: bytes, staged: StagedUpload) -> tuple[int, Report]:
                fields, num_examples, report = terms.fields(body, staged.profile)
                compressor = plan.compressor(staged.profile)
                weight = mean.weight_of(num_examples)
                with np.errstate(over="ignore", invalid="ignore"):  # as in `decoded`
                    decode_add(fields, compressor, terms.public, mean.sums, weight)
                return num_examples, report

            return Adding(add_straight, mean)
        if isinstance(aggregator, DiscountedMean):
            return Adding(_adding_by_age(terms, aggregator), aggregator)

        def add(body: bytes, staged: StagedUpload) -> tuple[int, Report]:
            client_id = staged.client_id
            update, num_examples, report = terms.decoded(body, staged.profile, client_id)
            aggregator.add(update, num_examples, report)
            if "own" in plan.needs:
                bases[client_id] = terms.keep_base(client_id, update)
            return num_examples, report

        return Adding(add, aggregator)
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

    return Adding(add_symbols, symbol_sums)


def _adding_by_age(
    terms: RoundTerms, mean: DiscountedMean
) -> Callable[[bytes, StagedUpload], tuple[int, Report]]:
    """How one body of an asynchronous task is added: read as its own plan has it. What is derived
    from an earlier plan is kept while uploads of that plan follow one another, and no longer."""
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
