"""Deep gradient compression against its published recurrence, step by step."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpress_client import Ledger
from fedpress_compression.coding.fields import Layout, Symbols
from fedpress_compression.compressor import Public, Stateless
from fedpress_compression.compressors.dgc import Dgc
from fedpress_compression.compressors.error_feedback import Feedback
from fedpress_compression.compressors.none import Uncompressed
from fedpress_compression.compressors.topk import TopK
from fedpress_compression.fixed_point import FixedPoint
from fedpress_compression.randomness import PublicRandomness
from fedpress_compression.tensors import ModelSpec, TensorSpec, Vector
from fedpress_compression.update import Update
from fedpress_protocols.messages import Assignment, Receipt
from fedpress_protocols.model import Model
from fedpress_strategies import from_config
from tests.client.fake_server import make_plan
from tests.ledgers import velocity

SPEC = ModelSpec((TensorSpec("w", (12, 10)), TensorSpec("b", (15,))))
CLIENTS, STEPS, RATE = 4, 30, 0.03
FRACTIONS = [0.25] * 5 + [0.0625] * 5 + [0.02] * (STEPS - 10)
FIXED = FixedPoint.widest(max_abs=64.0, max_weight=CLIENTS)
Doubles = npt.NDArray[np.float64]


def gradient(client: int, step: int, parameters: npt.NDArray[Any]) -> Doubles:
    """Of a bowl with the client's own optimum, with noise."""
    rng = np.random.default_rng([client, step])
    optimum = np.random.default_rng(client).standard_normal(SPEC.size)
    return np.asarray(parameters - optimum + 0.3 * rng.standard_normal(SPEC.size))


class Published:
    """Algorithm 4 with Section 3.2's clipping, as it is written: gradients are divided by N before,
    and summed after; thresholds are taken layer by layer."""

    def __init__(self, momentum: float, threshold: float | None) -> None:
        self.momentum, self.threshold = momentum, threshold
        self.u, self.v = np.zeros((2, CLIENTS, SPEC.size))
        self.clipped = 0

    def step(self, gradients: list[Doubles], fraction: float) -> Doubles:
        total = np.zeros(SPEC.size)
        for k, g in enumerate(gradients):
            own = g / CLIENTS
            if self.threshold is not None:
                norm = float(np.linalg.norm(own))
                local = CLIENTS**-0.5 * self.threshold
                self.clipped += norm > local
                own = own * min(1.0, local / norm)
            self.u[k] = self.momentum * self.u[k] + own
            self.v[k] = self.v[k] + self.u[k]
            for layer in SPEC.slices.values():
                magnitudes = np.abs(self.v[k][layer])
                threshold = np.sort(magnitudes)[-int(np.ceil(fraction * magnitudes.size))]
                mask = magnitudes >= threshold
                total[layer] += self.v[k][layer] * mask
                self.v[k][layer] *= ~mask
                self.u[k][layer] *= ~mask
        return total


@dataclass(frozen=True, slots=True)
class Exact(Stateless):
    """What top-k selects in each tensor, as it is: what is compared is the recurrence alone."""

    fraction: float
    wire_id = "exact"

    def layout(self, spec: ModelSpec) -> Layout:
        return Uncompressed().layout(spec)

    def compress(
        self, update: Vector, state: None, public: Public, rng: np.random.Generator
    ) -> tuple[Symbols, None]:
        (where, *_), _ = TopK(self.fraction, scope="tensor").compress(update, None, public, rng)
        kept = np.zeros_like(update)
        kept[where.astype(np.int64)] = update[where.astype(np.int64)]
        return (kept,), None

    def decompress(self, symbols: Symbols, public: Public, num_summands: int = 1) -> Update:
        return Uncompressed().decompress(symbols, public)


@pytest.mark.parametrize(("threshold", "momentum"), [(None, 0.9), (2.5, 0.9), (2.5, 0.0)])
def test_dgc_is_the_published_recurrence(threshold: float | None, momentum: float) -> None:
    """Updates are -RATE times gradients, in units of which the threshold is RATE times as large."""
    published = Published(momentum, threshold)
    strategy = from_config({"id": "fedavg"})
    parameters, oracle = np.zeros(SPEC.size, np.float32), np.zeros(SPEC.size)
    limit = None if threshold is None else RATE * threshold
    states: list[Feedback] = []
    for step, fraction in enumerate(FRACTIONS):
        public = Public(SPEC, PublicRandomness(bytes(32)), round=step + 1)
        made = Dgc(Exact(fraction), momentum=momentum, max_norm=limit, cohort=CLIENTS)
        states = states or [made.init(SPEC)] * CLIENTS
        aggregator = strategy.aggregator(SPEC.size, FIXED)
        gradients = [gradient(client, step, parameters) for client in range(CLIENTS)]
        for client, own in enumerate(gradients):
            symbols, states[client] = made.compress(
                (-RATE * own).astype(np.float32),
                states[client],
                public,
                np.random.default_rng(0),
            )
            aggregator.add(made.decompress(symbols, public), 1)
        parameters, _ = strategy.optimizer.apply(parameters, aggregator.result(), {})
        oracle = oracle - RATE * published.step(gradients, fraction)
        assert parameters == pytest.approx(oracle, abs=2e-5)
        for client, state in enumerate(states):
            scale = -RATE * CLIENTS
            assert state.velocity == pytest.approx(scale * published.u[client], abs=2e-5)
            assert state.residual == pytest.approx(scale * published.v[client], abs=5e-5)
    assert (published.clipped > 0) == (threshold is not None)
    assert np.abs(published.u).max() > 0.01
    assert np.count_nonzero(published.u) < published.u.size, "nothing was ever masked"


MODEL = Model.from_tensors({"w": np.zeros((12, 10), np.float32), "b": np.zeros(15, np.float32)})


def settled(ledger: Ledger, name: str, *, included: bool) -> Ledger:
    held = ledger.pending[name]
    receipt = Receipt(
        assignment=name,
        client_id=ledger.client_id,
        task=ledger.task,
        round=held.round,
        attempt=held.attempt,
        outcome="included" if included else "not-included",
        reason="included" if included else "round-abandoned",
        upload=hashlib.sha256(held.body).hexdigest(),
        model=None,
        issued_at=0,
    )
    return Ledger.from_bytes(ledger.settle(receipt).to_bytes())


def test_on_a_device_nothing_is_lost_and_a_lost_upload_is_one_that_sent_nothing() -> None:
    """Through the disk, over changes of rate; a plain recurrence follows what the device sent."""
    ledger, rng = Ledger("task", "me"), np.random.default_rng(3)
    u, v, computed, included = np.zeros((4, MODEL.spec.size))
    outcomes = rng.random(STEPS) < 0.7
    for number, (fraction, is_in) in enumerate(zip(FRACTIONS, outcomes, strict=True), 1):
        made = Dgc(TopK(fraction, scope="tensor"), max_norm=2.0, cohort=9)
        plan = make_plan(MODEL, made, round_=number)
        name = f"a{number}"
        assignment = Assignment(assignment=name, client_id="me", plan=plan, profile="p0")
        update = rng.standard_normal(MODEL.spec.size).astype(np.float32)
        ledger, body = ledger.prepare(assignment, update, 1, MODEL.spec, rng)
        assert body is not None
        clipped = update * min(1.0, 6.0 / float(np.linalg.norm(update)))
        u = 0.9 * u + clipped
        computed += u
        y = ledger.pending[name].update.dense()
        v = v + u - y
        assert velocity(ledger) == pytest.approx(u, abs=1e-4)
        ledger = settled(ledger, name, included=bool(is_in))
        if is_in:
            included += y
            u = u * (y == 0)
        else:
            v = v + y
        assert velocity(ledger) == pytest.approx(u, abs=1e-4)
        assert ledger.residual == pytest.approx(v, abs=1e-4)
        assert included + ledger.residual == pytest.approx(computed, abs=1e-3)
    assert 5 < outcomes.sum() < STEPS - 5
    assert not ledger.discards


@given(data=st.data())
def test_any_order_of_uploads_and_receipts_conserves(data: st.DataObject) -> None:
    """Several uploads under way at once, restarts, rates and bounds that change."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    ledger, size = Ledger("task", "me"), MODEL.spec.size
    computed, included, magnitude = np.zeros((3, size))
    for number in range(1, data.draw(st.integers(1, 7)) + 1):
        share, clip = data.draw(st.sampled_from([0.01, 0.2, 1.0])), data.draw(st.booleans())
        made = Dgc(TopK(share), max_norm=1.0 if clip else None, cohort=3)
        plan = make_plan(MODEL, made, round_=number, max_abs=data.draw(st.sampled_from([0.5, 64])))
        name = f"a{number}"
        assignment = Assignment(assignment=name, client_id="me", plan=plan, profile="p0")
        update = (rng.standard_t(2, size) * 10.0 ** rng.integers(-6, 1)).astype(np.float32)
        ledger, _ = ledger.prepare(assignment, update, 1, MODEL.spec, rng)
        computed += velocity(ledger)
        magnitude += np.abs(velocity(ledger))
        for other in data.draw(st.lists(st.sampled_from(sorted(ledger.pending)), unique=True)):
            y, is_in = ledger.pending[other].update.dense(), data.draw(st.booleans())
            ledger = settled(ledger, other, included=is_in)
            included += y * is_in
            magnitude += np.abs(y)
            if is_in:
                assert not velocity(ledger)[y != 0].any()
        waiting = sum((p.update.dense() for p in ledger.pending.values()), np.zeros(size))
        assert ledger.residual is not None
        magnitude += np.abs(ledger.residual)
        error = np.abs(included + ledger.residual + waiting - computed)
        assert (error <= 2 * np.finfo(np.float32).eps * magnitude + 1e-30).all()
    assert not ledger.discards


def test_what_cannot_be_sent_at_all_keeps_residual_and_velocity() -> None:
    made = Dgc(TopK(0.1))  # whose levels, in float16, round to beyond the bound
    plan = make_plan(MODEL, made, max_abs=1e-3)
    ledger = Ledger("task", "me")
    assignment = Assignment(assignment="a", client_id="me", plan=plan, profile="p0")
    update = np.ones(MODEL.spec.size, np.float32)
    rng = np.random.default_rng(0)
    ledger, body = ledger.prepare(assignment, update, 1, MODEL.spec, rng)
    assert body is None
    assert (velocity(ledger) == update).all()
    assert ledger.residual is not None
    assert np.array_equal(ledger.residual, update)


def test_velocities_begin_anew_for_a_model_of_other_tensors() -> None:
    rng, ledger = np.random.default_rng(0), Ledger("task", "me")
    for number, size in ((1, 8), (2, 9)):
        model = Model.from_tensors({"w": np.zeros(size, np.float32)})
        plan = make_plan(model, Dgc(TopK(0.5)), round_=number)
        name = f"a{number}"
        assignment = Assignment(assignment=name, client_id="me", plan=plan, profile="p0")
        ledger, _ = ledger.prepare(assignment, np.ones(size, np.float32), 1, model.spec, rng)
        assert (velocity(ledger) == np.ones(size)).all()
        if number == 2:  # the upload for the tensors that were is included only now
            after = settled(ledger, "a1", included=True)
            assert (velocity(after) == velocity(ledger)).all()
