"""Costs of one upload under a profile: real bodies and real CPU time, by the device's own code.

A ledger prepares uploads of drawn updates as a device does, residual, contexts and the reading of
its own bytes included; the sum adds them as a server does. Models of more than SAMPLE values are
measured on a smaller one and multiplied.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import mean, median
from typing import TypeVar

import numpy as np
from pydantic import ValidationError

from fedpress.planning.profiles import Candidate
from fedpress.planning.sessions import ROUND_TRIPS, SessionSeconds, session_bytes
from fedpress.planning.situation import Situation, sample
from fedpress.planning.updates import Drawn
from fedpress_client.ledger import Ledger
from fedpress_compression import kernels
from fedpress_compression.contexts import contexts_of
from fedpress_compression.decode_add import decode_add
from fedpress_compression.fixed_point import Accumulator, FixedPoint
from fedpress_protocols.errors import ConfigurationError, IncompatiblePlan
from fedpress_protocols.masking.agreement import agreed
from fedpress_protocols.masking.payload import SECRET_BYTES, Payload
from fedpress_protocols.messages import Assignment, Receipt
from fedpress_protocols.plan import (
    CohortRules,
    FixedPointTerms,
    Profile,
    RoundPlan,
    TrainingTerms,
)
from fedpress_protocols.upload import Upload
from fedpress_protocols.validation import format_validation_errors

SAMPLE = 2_000_000 if kernels.CHOSEN in ("numba", "prebuilt") else 200_000
"""Values up to which a model is measured as it is."""

T = TypeVar("T")

_UPLOADS = 4
"""The first warms the kernels and leaves a residual, and does not count."""
_MAX_ABS, _MAX_EXAMPLES = 64.0, 4096
_EXAMPLES = 100
_DIGEST = "0" * 64
_POPULATION = "fedpress"
_PLAIN_TRIPS = 3
"""A check-in, the model, the upload."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one upload. `client_seconds` and `server_seconds` are CPU time of one thread of this
    machine; `body` are bytes of the body alone, `sent` and `received` what a masked session says
    besides. `factor` is how many times larger the model is than what was measured."""

    body: float
    client_seconds: float
    server_seconds: float
    sent: int = 0
    received: int = 0
    round_trips: int = _PLAIN_TRIPS
    factor: float = 1.0


def cost(candidate: Candidate, situation: Situation, real: Drawn | None = None) -> Cost:
    """Measure `candidate`, on `real` updates of the whole model if there are any.

    Raises IncompatiblePlan where no task could have it.
    """
    spec, factor = (situation.spec, 1.0) if real else sample(situation.spec, SAMPLE)
    drawn = real or Drawn.of(spec, _UPLOADS)
    if real is None and situation.lane == "clear" and candidate.made.keeps_residual:
        # What a device sends then is what steps have lacked, of which the last one tells little.
        # Drawn updates are too alike for that: bodies in context would be half of real ones.
        drawn = replace(drawn, previous=np.zeros_like(drawn.previous))
    with _one_thread():
        measured = _masked if situation.lane == "masked" else _clear
        return measured(candidate, situation, drawn, factor)


def _clear(candidate: Candidate, situation: Situation, drawn: Drawn, factor: float) -> Cost:
    plan = _plan(candidate, situation, drawn, 1)
    public = plan.public(drawn.spec, {"previous": drawn.previous, "drift": drawn.previous})
    made = candidate.made
    layout = made.layout(drawn.spec)
    contexts = contexts_of(layout, public)
    sums = Accumulator(drawn.spec.size, plan.sum_bounds())
    bodies, seconds, adding = [], [], []
    for body, preparing in _prepared(candidate, situation, drawn):
        begun = time.thread_time()
        _, _, fields = Upload.find(body, (layout,), 0, contexts)
        decode_add(fields, made, public, sums, 1)
        adding.append(time.thread_time() - begun)
        bodies.append(len(body))
        seconds.append(preparing)
    return Cost(
        body=factor * mean(bodies[1:]),
        client_seconds=factor * median(seconds[1:]),
        server_seconds=factor * median(adding[1:]),
        factor=factor,
    )


def _masked(candidate: Candidate, situation: Situation, drawn: Drawn, factor: float) -> Cost:
    plan = _plan(candidate, situation, drawn, 1)
    payload = Payload(plan, plan.public(drawn.spec, {"previous": drawn.previous}))
    config = agreed(payload, population=_POPULATION, server_key=bytes(32))
    graph = config.parameters(situation.cohort)
    messages = session_bytes(config)
    packing = payload.packing
    session = SessionSeconds.measured(packing.num_words)
    total = np.zeros(packing.num_words, np.uint64)
    bodies, seconds, adding = [], [], []
    for body, preparing in _prepared(candidate, situation, drawn):
        words, reading = _timed(lambda: packing.from_bytes(body))  # noqa: B023
        writing = _timed(lambda: packing.to_bytes(words))[1]  # noqa: B023
        begun = time.thread_time()
        total += words
        adding.append(time.thread_time() - begun + reading)
        bodies.append(len(body))
        seconds.append(preparing + writing)
    masks = 1 + graph.degree
    lost = config.dropout / 1e4
    return Cost(
        body=factor * mean(bodies[1:]),
        client_seconds=factor * (median(seconds[1:]) + masks * session.mask)
        + graph.degree * session.neighbour,
        server_seconds=factor
        * (median(adding[1:]) + (1 - lost + lost * graph.degree) * session.mask),
        sent=messages.sent,
        received=messages.received,
        round_trips=_PLAIN_TRIPS + ROUND_TRIPS,
        factor=factor,
    )


def _prepared(
    candidate: Candidate, situation: Situation, drawn: Drawn
) -> Iterator[tuple[bytes, float]]:
    """Every body of a device that is included each time, and the CPU seconds it took."""
    ledger = Ledger("plan", "device")
    for number, update in enumerate(drawn.updates, start=1):
        plan = _plan(candidate, situation, drawn, number)
        assignment = Assignment(
            assignment=f"plan-{number}", client_id="device", plan=plan, profile="only"
        )
        rng = np.random.default_rng(number)
        begun = time.thread_time()
        ledger, body = ledger.prepare(
            assignment,
            update,
            _EXAMPLES,
            drawn.spec,
            rng,
            knowledge={"previous": drawn.previous, "drift": drawn.previous},
            secret=bytes([number]) * SECRET_BYTES,
        )
        seconds = time.thread_time() - begun
        if body is None:
            raise ConfigurationError(
                f"{candidate.name} makes more than {_MAX_ABS:g} of values of a thousandth",
                hint="choose a compressor that scales less",
            )
        yield body, seconds
        receipt = Receipt(
            assignment=assignment.assignment,
            client_id="device",
            task="plan",
            round=number,
            attempt=1,
            outcome="included",
            reason="included",
            upload=hashlib.sha256(body).hexdigest(),
            model=_DIGEST,
            issued_at=0,
        )
        ledger = ledger.told().settle(receipt)


def _plan(candidate: Candidate, situation: Situation, drawn: Drawn, number: int) -> RoundPlan:
    """Round `number` of a task with this profile alone."""
    bounds = FixedPoint.widest(max_abs=_MAX_ABS, max_weight=_MAX_EXAMPLES * situation.cohort)
    try:
        return RoundPlan(
            task="plan",
            round=number,
            attempt=1,
            model=_DIGEST,
            spec=drawn.spec.digest,
            lane=situation.lane,
            masking=candidate.masking,
            profiles=(Profile(name="only", compressor=candidate.made),),
            training=TrainingTerms(restricted=candidate.restricted),
            cohort=CohortRules(size=situation.cohort, minimum=situation.cohort),
            deadline=0.0,
            fixed_point=FixedPointTerms(
                scale_bits=bounds.scale_bits, max_abs=_MAX_ABS, max_examples=_MAX_EXAMPLES
            ),
            public_seed=hashlib.sha256(bytes([number])).hexdigest(),
            previous_model=_DIGEST,
            first_model=_DIGEST,
        )
    except ValidationError as exc:
        raise IncompatiblePlan(format_validation_errors(exc)) from exc


def _timed(call: Callable[[], T]) -> tuple[T, float]:
    begun = time.thread_time()
    done = call()
    return done, time.thread_time() - begun


@contextmanager
def _one_thread() -> Iterator[None]:
    """Limit kernels to one thread, since CPU time of other threads is not measured."""
    before = kernels.limit_threads(1)
    try:
        yield
    finally:
        kernels.limit_threads(before)
