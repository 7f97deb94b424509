"""What a compressor keeps on the device moves with an included upload, and with no other."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from fedpress_client import Ledger
from fedpress_compression.compressor import Compressor
from fedpress_compression.compressors.cafe import Cafe
from fedpress_compression.compressors.clip import Clip
from fedpress_compression.compressors.coded import Coded
from fedpress_compression.compressors.ef21 import EF21
from fedpress_compression.compressors.error_feedback import ErrorFeedback, Feedback
from fedpress_compression.compressors.per_tensor import PerTensor
from fedpress_compression.compressors.powersgd import PowerSGD
from fedpress_compression.compressors.quantize import Quantize
from fedpress_compression.compressors.topk import TopK
from fedpress_compression.plain_states import plain
from fedpress_compression.tensors import Vector
from fedpress_protocols.messages import Assignment, Receipt
from fedpress_protocols.model import Model
from fedpress_protocols.plan import RoundPlan
from tests.client.fake_server import make_plan

MODEL = Model.from_tensors({"w": np.zeros((20, 16), np.float32), "b": np.zeros(16, np.float32)})
PREVIOUS = np.random.default_rng(9).normal(size=MODEL.spec.size).astype(np.float32)


def draw(seed: int) -> Vector:
    return np.random.default_rng(seed).normal(size=MODEL.spec.size).astype(np.float32)


def prepared(
    ledger: Ledger,
    made: Compressor[Any],
    number: int,
    update: Vector,
    previous: Vector = PREVIOUS,
) -> tuple[Ledger, RoundPlan, bytes]:
    plan = make_plan(MODEL, made, round_=number, previous_model="0" * 64)
    about = {"client_id": ledger.client_id, "plan": plan, "profile": "p0"}
    assignment = Assignment(assignment=f"a{number}", **about)
    rng = np.random.default_rng(number)
    ledger, body = ledger.prepare(
        assignment, update, 1, MODEL.spec, rng, knowledge={"previous": previous}
    )
    assert body is not None
    return ledger, plan, body


def settled(ledger: Ledger, plan: RoundPlan, body: bytes, *, included: bool) -> Ledger:
    receipt = Receipt(
        assignment=f"a{plan.round}",
        client_id=ledger.client_id,
        task=plan.task,
        round=plan.round,
        attempt=plan.attempt,
        outcome="included" if included else "not-included",
        reason="included" if included else "round-abandoned",
        upload=hashlib.sha256(body).hexdigest(),
        model="1" * 64 if included else None,
        issued_at=0,
    )
    return Ledger.from_bytes(ledger.settle(receipt).to_bytes())


@pytest.mark.parametrize(
    "made",
    [EF21(TopK(0.1)), PowerSGD(2), ErrorFeedback(PowerSGD(1, 2)), Cafe(PowerSGD(2))],
)
def test_states_obey_the_receipt_through_the_disk(made: Compressor[Any]) -> None:
    task = make_plan(MODEL, made, previous_model="0" * 64).task
    lossy = made.inner if isinstance(made, ErrorFeedback) else made
    state: Any = lossy.init(MODEL.spec)
    ledger = Ledger(task, "client")
    for number, included in enumerate((True, False, True, True), 1):
        residual = ledger.residual if isinstance(made, ErrorFeedback) else None
        whole = draw(number) if residual is None else draw(number) + residual
        ledger, plan, body = prepared(ledger, made, number, draw(number))
        public = plan.public(MODEL.spec, {"previous": PREVIOUS})
        _, after = lossy.compress(whole, state, public, np.random.default_rng(number))
        ledger = settled(ledger, plan, body, included=included)
        state = after if included else state
        ((_, stored),) = ledger.states.values()
        if isinstance(made, ErrorFeedback):
            (stored,) = Feedback(*stored).inner.values()
        assert flat(stored) == pytest.approx(flat(plain(state)))


@pytest.mark.parametrize(
    "rates",
    [
        [EF21(TopK(0.25)), EF21(TopK(0.5))],
        [EF21(TopK(0.25)), EF21(PowerSGD(1)), EF21(PowerSGD(2)), EF21(PerTensor())],
        [EF21(TopK(0.25)), Coded(EF21(TopK(0.5))), Clip(EF21(TopK(0.5)), 1e3)],
        [PerTensor(EF21(TopK(f)), Quantize(b), min_size=1) for f, b in ((0.25, 8), (0.5, 6))],
    ],
)
def test_an_estimate_outlives_a_change_of_rate(rates: list[Compressor[Any]]) -> None:
    """A lone client whose update is always `update`: its mean is the model's last step."""
    ledger, update = Ledger("task", "client"), draw(1)
    step = np.zeros_like(update)
    for number in range(1, 41):
        made = rates[number % len(rates)]
        ledger, plan, body = prepared(ledger, made, number, update, step)
        step = ledger.pending[f"a{number}"].update.dense()
        ledger = settled(ledger, plan, body, included=True)
    assert step == pytest.approx(update, abs=0.02)


def flat(state: Any) -> Vector:
    """Every number of a state, in order."""
    if isinstance(state, np.ndarray):
        return state.ravel()
    items = state.values() if isinstance(state, Mapping) else state
    parts = [flat(part) for part in items if part is not None]
    return np.concatenate(parts) if parts else np.empty(0, np.float32)
