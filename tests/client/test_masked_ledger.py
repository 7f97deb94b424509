"""The ledger in the masked lane: the same equation, and no update under two sets of masks."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpress_client.ledger import Ledger
from fedpress_compression.compressor import from_config
from fedpress_protocols.errors import Conflict, IncompatiblePlan, InvalidUpdate
from fedpress_protocols.masking.payload import SECRET_BYTES, Payload
from fedpress_protocols.messages import Assignment, Receipt
from fedpress_protocols.model import Model
from fedpress_protocols.plan import (
    CohortRules,
    FixedPointTerms,
    MaskingTerms,
    Profile,
    RoundPlan,
)

EPS = float(np.finfo(np.float32).eps)
SHARED = {"id": "shared_support", "fraction": 0.2, "explore": 0.2}
METHODS = (
    {"id": "error_feedback", "inner": SHARED},
    {"id": "error_feedback", "inner": {"id": "powersgd_onesided", "rank": 1}},
    {"id": "error_feedback", "inner": {"id": "randomk", "fraction": 0.3, "bits": 4}},
    {"id": "error_feedback", "inner": {"id": "clip", "inner": SHARED, "max_norm": 0.1}},
    {"id": "count_sketch", "fraction": 0.5},
    {"id": "quantize", "clip": 1.0},
    SHARED,
)
MODEL = Model.from_tensors(
    {
        "w": np.random.default_rng(1).normal(size=(20, 12)).astype(np.float32),
        "b": np.zeros(12, np.float32),
    }
)
SPEC, SIZE = MODEL.spec, MODEL.spec.size
PREVIOUS = np.random.default_rng(2).normal(size=SIZE).astype(np.float32) * np.float32(0.01)


def plan_of(config: dict[str, Any], round_: int = 1, **masking: Any) -> RoundPlan:
    return RoundPlan(
        task="task",
        round=round_,
        attempt=1,
        model=MODEL.digest,
        previous_model=MODEL.digest,
        spec=SPEC.digest,
        lane="masked",
        masking=MaskingTerms(**masking),
        profiles=(Profile(name="only", compressor=from_config(config)),),
        cohort=CohortRules(size=5, minimum=3),
        deadline=1e9,
        fixed_point=FixedPointTerms(scale_bits=24, max_abs=64.0, max_examples=1000),
        public_seed=hashlib.sha256(str(round_).encode()).hexdigest(),
    )


def assignment(plan: RoundPlan, client: str = "me") -> Assignment:
    return Assignment(
        assignment=f"a{plan.round}-{client}", client_id=client, plan=plan, profile="only"
    )


def prepared(ledger: Ledger, plan: RoundPlan, update: np.ndarray, **options: Any) -> Any:
    rng = np.random.default_rng(0)
    options = {"num_examples": 10, "client": ledger.client_id, **options}
    client, num_examples = options.pop("client"), options.pop("num_examples")
    return ledger.prepare(
        assignment(plan, client),
        update,
        num_examples,
        SPEC,
        rng,
        knowledge={"previous": PREVIOUS},
        **options,
    )


def receipt(ledger: Ledger, key: str, *, included: bool, reason: str = "dropped-out") -> Receipt:
    held = ledger.pending[key]
    return Receipt(
        assignment=key,
        client_id=ledger.client_id,
        task="task",
        round=held.round,
        attempt=held.attempt,
        outcome="included" if included else "not-included",
        reason="included" if included else reason,
        upload=held.digest if included else None,
        model=None,
        issued_at=0,
    )


def heavy_tailed(rng: np.random.Generator) -> np.ndarray:
    scale = 10.0 ** rng.integers(-6, 1)
    return (rng.standard_t(2, SIZE) * scale).astype(np.float32)


@given(data=st.data())
def test_nothing_is_lost_under_masks(data: st.DataObject) -> None:
    """included + residual + pending + discards = computed, in units of the update, whatever the
    weights, for rounds that end in the sum, without it, or not at all."""
    ledger = Ledger("task", "me")
    computed, included, discarded, magnitude = (np.zeros(SIZE) for _ in range(4))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    for round_ in range(1, data.draw(st.integers(1, 4)) + 1):
        plan = plan_of(
            data.draw(st.sampled_from(METHODS)),
            round_,
            levels=data.draw(st.sampled_from([1, 4, 100])),
            max_weight=data.draw(st.sampled_from([None, 1, 50])),
        )
        update = heavy_tailed(rng)
        examples = data.draw(st.integers(1, 2000))
        ledger, body = prepared(ledger, plan, update, num_examples=examples)
        key = f"a{round_}-me"
        assert prepared(ledger, plan, update * 2) == (ledger, body)
        computed += update
        magnitude += np.abs(update)
        if body is not None and data.draw(st.booleans()):
            masked = rng.bytes(len(body))
            ledger = ledger.masked(key, "5" * 64, masked)
            assert ledger.pending[key].body == masked
            assert ledger.masked(key, "5" * 64, masked) is ledger
        for name in data.draw(st.lists(st.sampled_from(sorted(ledger.pending)), unique=True)):
            sent = ledger.pending[name].update.dense()
            is_in = data.draw(st.booleans())
            told = receipt(ledger, name, included=is_in)
            ledger = ledger.settle(told)
            assert ledger.settle(told) is ledger
            included += sent * is_in
            magnitude += np.abs(sent)
        if data.draw(st.booleans()):
            ledger = Ledger.from_bytes(ledger.to_bytes())
        for discard in ledger.discards:
            discarded += discard.vector
        ledger = ledger.told()
        pending = sum((p.update.dense() for p in ledger.pending.values()), np.zeros(SIZE))
        residual = np.zeros(SIZE) if ledger.residual is None else ledger.residual
        magnitude += np.abs(residual) + np.abs(pending)
        error = np.abs(included + residual + pending + discarded - computed)
        assert (error <= 2 * EPS * magnitude + 1e-30).all()


@pytest.mark.parametrize("max_weight", [None, 40])
def test_what_the_sum_gained_is_what_the_residuals_lost(max_weight: int | None) -> None:
    """Over a cohort with a drop-out: the weighted mean that the server finds is that of what each
    survivor's account says was included."""
    plan = plan_of(METHODS[0], levels=5, max_weight=max_weight)
    payload = Payload(plan, plan.public(SPEC, {"previous": PREVIOUS}))
    rng = np.random.default_rng(3)
    words = np.zeros(payload.packing.num_words, np.uint64)
    gained, total = np.zeros(SIZE), 0.0
    for index, examples in enumerate((3, 40, 25, 900)):
        update = heavy_tailed(rng)
        ledger, body = prepared(Ledger("task", f"c{index}"), plan, update, num_examples=examples)
        key = f"a1-c{index}"
        if index == 2:  # drops out
            ledger = ledger.settle(receipt(ledger, key, included=False))
            np.testing.assert_allclose(
                ledger.residual, update, atol=4 * EPS * np.abs(update).max(), rtol=0
            )
            continue
        words += payload.packing.from_bytes(body)
        ledger = ledger.settle(receipt(ledger, key, included=True))
        weight = 1.0 if max_weight is None else min(examples, max_weight)
        gained += weight * (update.astype(np.float64) - ledger.residual)
        total += weight
    mean = payload.decompress(payload.packing.unpack(words), 3).mean.dense()
    np.testing.assert_allclose(mean, gained / total, atol=1e-6 * np.abs(mean).max())


def test_an_update_is_masked_for_one_session_and_no_other() -> None:
    ledger, body = prepared(
        Ledger("task", "me"), plan_of(METHODS[0]), heavy_tailed(np.random.default_rng(0))
    )
    held = ledger.pending["a1-me"]
    assert (held.lane, held.session, held.body) == ("masked", None, body)
    masked = bytes(len(body))
    after = Ledger.from_bytes(ledger.masked("a1-me", "1" * 64, masked).to_bytes())
    held = after.pending["a1-me"]
    assert (held.session, held.body) == ("1" * 64, masked)
    assert held.digest == hashlib.sha256(masked).hexdigest()
    for session, other in (("2" * 64, masked), ("1" * 64, b"\x01" * len(body)), ("2" * 64, body)):
        with pytest.raises(Conflict, match="was masked for session 111111111111 before"):
            after.masked("a1-me", session, other)
    for key, other in (("a1-me", masked + b"\x00"), ("unknown", masked)):
        with pytest.raises(Conflict, match="which has no such upload"):
            ledger.masked(key, "1" * 64, other)


def test_after_an_aborted_session_the_next_update_is_another() -> None:
    """x is never sent again: it joins the residual, and what goes to the next cohort is the sum."""
    plan, rng = plan_of(METHODS[0]), np.random.default_rng(0)
    first = heavy_tailed(rng)
    ledger, body = prepared(Ledger("task", "me"), plan, first)
    ledger = ledger.masked("a1-me", "1" * 64, bytes(len(body)))
    ledger = ledger.settle(receipt(ledger, "a1-me", included=False, reason="round-abandoned"))
    np.testing.assert_allclose(ledger.residual, first, atol=4 * EPS * np.abs(first).max(), rtol=0)
    with pytest.raises(Conflict, match="has its receipt"):
        prepared(ledger, plan, first)
    with pytest.raises(Conflict, match="no such upload"):
        ledger.masked("a1-me", "2" * 64, bytes(len(body)))


def test_the_clear_lane_is_never_masked() -> None:
    plan = plan_of(METHODS[0]).model_copy(update={"lane": "clear", "masking": None})
    ledger, body = prepared(Ledger("task", "me"), plan, np.ones(SIZE, np.float32))
    assert ledger.pending["a1-me"].lane == "clear"
    with pytest.raises(Conflict, match="which has no such upload"):
        ledger.masked("a1-me", "1" * 64, bytes(len(body)))


def test_an_account_of_before_the_masked_lane_is_read() -> None:
    """Files that say nothing of lanes are of the clear one."""
    plan = plan_of(METHODS[0]).model_copy(update={"lane": "clear", "masking": None})
    ledger, _ = prepared(Ledger("task", "me"), plan, np.ones(SIZE, np.float32))
    data = ledger.to_bytes()
    for word in (b', \\"lane\\": \\"clear\\"', b', \\"session\\": null'):
        assert data.count(word) == 1
        data = data.replace(word, b" " * len(word))
    start = data.index(b"sha256:")
    blank = data[:start] + b"sha256:" + b"0" * 64 + data[start + 71 :]
    sealed = blank[:start] + b"sha256:" + hashlib.sha256(blank).hexdigest().encode()
    again = Ledger.from_bytes(sealed + blank[start + 71 :])
    assert (again.pending["a1-me"].lane, again.pending["a1-me"].session) == ("clear", None)


def test_rounding_follows_the_secret_and_is_fresh_without() -> None:
    plan, update = plan_of(METHODS[0]), np.full(SIZE, 0.003, np.float32)

    def bodies(**options: Any) -> set[bytes]:
        return {prepared(Ledger("task", "me"), plan, update, **options)[1] for _ in range(2)}

    assert len(bodies(secret=bytes(SECRET_BYTES))) == 1
    assert len(bodies()) == 2


def test_reports_go_into_the_sum_and_another_support_is_refused() -> None:
    plan = plan_of(METHODS[0]).model_copy(update={"report": ("loss",)})
    payload = Payload(plan, plan.public(SPEC, {"previous": PREVIOUS}))
    update = np.ones(SIZE, np.float32)
    _, body = prepared(Ledger("task", "me"), plan, update, report={"loss": 0.75})
    sums = payload.packing.unpack(payload.packing.from_bytes(body))
    assert payload.decompress(sums, 1).report == {"loss": 0.75}
    with pytest.raises(InvalidUpdate, match="loss of -1"):
        prepared(Ledger("task", "me"), plan, update, report={"loss": -1.0})
    other = plan_of(METHODS[0], support="f" * 64)
    with pytest.raises(IncompatiblePlan, match="the plan says ffffffffffff"):
        prepared(Ledger("task", "me"), other, update)
