"""Feedback between rounds: what its guards do, what it refuses, what it reports."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fedpress_compression.compressor import Compressor, Knowledge, Public, from_config, state_key
from fedpress_compression.compressors.cafe import Cafe
from fedpress_compression.compressors.clip import Clip
from fedpress_compression.compressors.coded import Coded
from fedpress_compression.compressors.count_sketch import CountSketch
from fedpress_compression.compressors.delta import Delta
from fedpress_compression.compressors.dgc import Dgc
from fedpress_compression.compressors.ef21 import EF21
from fedpress_compression.compressors.error_feedback import ErrorFeedback
from fedpress_compression.compressors.lowrank import LowRank
from fedpress_compression.compressors.none import Uncompressed
from fedpress_compression.compressors.per_tensor import PerTensor
from fedpress_compression.compressors.powersgd import PowerSGD
from fedpress_compression.compressors.powersgd_onesided import OneSidedPowerSGD
from fedpress_compression.compressors.quantize import Quantize
from fedpress_compression.compressors.topk import TopK
from fedpress_compression.plain_states import plain
from fedpress_compression.randomness import PublicRandomness
from fedpress_compression.tensors import ModelSpec, TensorSpec, Vector
from fedpress_compression.update import Update
from fedpress_protocols.errors import ConfigurationError, IncompatiblePlan, InvalidUpdate
from fedpress_protocols.plan import CohortRules, FixedPointTerms, Profile, RoundPlan

SPEC = ModelSpec((TensorSpec("w", (20, 15)),))


def public(previous: Vector | None, number: int = 1) -> Public:
    knowledge: dict[Knowledge, Vector] = {} if previous is None else {"previous": previous}
    return Public(SPEC, PublicRandomness(bytes(32)), knowledge, number)


def draw(seed: int) -> Vector:
    return np.random.default_rng(seed).standard_normal(SPEC.size).astype(np.float32)


def sent(made: Compressor[Any], update: Vector, known: Public) -> Vector:
    symbols, _ = made.compress(update, made.init(SPEC), known, np.random.default_rng(0))
    return made.decompress(symbols, known).dense()


def lost(made: Compressor[Any], update: Vector, known: Public) -> float:
    return float(np.linalg.norm(update - sent(made, update, known)))


def test_cafe_loses_less_the_better_the_prediction() -> None:
    update = draw(1)
    made = Cafe(TopK(0.05), factor=1.0)
    near, far = public(update + 0.1 * draw(2)), public(draw(3))
    assert lost(made, update, near) < 0.2 * lost(TopK(0.05), update, near)
    assert lost(made, update, far) > lost(TopK(0.05), update, far)


def test_guard_1_never_loses_more_than_the_inner_compressor_may() -> None:
    made = Cafe(TopK(0.05), factor=1.0, guard=1.0)
    for seed in range(20):
        update, known = draw(seed), public(np.float32(0.3 * (seed % 7)) * draw(100 + seed))
        assert lost(made, update, known) <= np.linalg.norm(update)


@pytest.mark.parametrize(("guard", "stops"), [(2.0, True), (None, False)])
def test_the_guard_ends_steps_that_no_client_asks_for(guard: float | None, stops: bool) -> None:
    """The collapse at factor 1: clients are content, and the model walks on."""
    made = Cafe(TopK(0.01), factor=1.0, guard=guard)
    step = draw(4)
    for _ in range(5):
        step = sent(made, np.float32(1e-3) * draw(5), public(step))
    assert (np.linalg.norm(step) < 0.1) == stops


def test_without_a_prediction_the_update_is_as_sparse_as_the_inner_compressor_s() -> None:
    known = public(np.float32(100) * draw(6))
    made = Cafe(TopK(0.05))
    symbols, _ = made.compress(draw(7), None, known, np.random.default_rng(0))
    assert symbols[-1].tolist() == [0]
    assert made.decompress(symbols, known).num_values == 15


def test_cafe_of_a_linear_compressor_is_linear() -> None:
    made = Cafe(Quantize(8, clip=4.0), factor=0.9)
    known = public(draw(8))
    assert made.commutes_with_sum
    symbols = [made.compress(draw(s), None, known, np.random.default_rng(0))[0] for s in (1, 2, 8)]
    summed = tuple(
        sum(field.astype(np.int64) for field in fields) for fields in zip(*symbols, strict=True)
    )
    whole = sum(made.decompress(told, known).dense() for told in symbols)
    assert made.decompress(summed, known, 3).dense() == pytest.approx(whole, abs=1e-4)


@pytest.mark.parametrize("made", [Cafe(), EF21(), Cafe(guard=None)])
def test_what_nobody_gave_is_asked_for(made: Compressor[Any]) -> None:
    with pytest.raises(ConfigurationError, match="reads previous, which it was not given"):
        sent(made, draw(0), public(None))


@pytest.mark.parametrize("made", [Cafe(guard=None), EF21(), Delta()])
def test_a_difference_beyond_float32_is_refused(made: Compressor[Any]) -> None:
    edge = np.full(SPEC.size, np.finfo(np.float32).max)
    state = made.init(SPEC)
    if isinstance(made, EF21):
        state = state._replace(own=-edge)
    known = public(-edge)
    known = replace(known, knowledge={**known.knowledge, "own": -edge})
    with pytest.raises(InvalidUpdate, match="NaN or infinity"):
        made.compress(edge, state, known, np.random.default_rng(0))


def plan(
    made: Compressor[Any], previous: str | None = "2" * 64, *, fixed_cohort: bool = False
) -> RoundPlan:
    return RoundPlan(
        task="t",
        round=3,
        attempt=1,
        model="0" * 64,
        spec=SPEC.digest,
        profiles=(Profile(name="only", compressor=made),),
        cohort=CohortRules(size=2, minimum=2),
        fixed_cohort=fixed_cohort,
        deadline=0.0,
        fixed_point=FixedPointTerms(scale_bits=16, max_abs=16.0, max_examples=100),
        public_seed="1" * 64,
        previous_model=previous,
    )


@pytest.mark.parametrize("made", [Delta(), ErrorFeedback(Delta()), Cafe(Delta())])
def test_a_plan_refuses_what_would_have_the_server_keep_every_client(made: Compressor[Any]) -> None:
    with pytest.raises(ValueError, match="name the task's members, so that their number"):
        plan(made)
    assert "own" in plan(made, fixed_cohort=True).needs


def test_a_plan_without_the_model_that_a_compressor_reads_is_refused() -> None:
    with pytest.raises(ValueError, match="reads previous, but the plan has no digest"):
        plan(Cafe(), None)


@pytest.mark.parametrize(
    "around",
    [
        lambda m: m,
        Clip,
        Coded,
        Cafe,
        ErrorFeedback,
        PerTensor,
        lambda m: PerTensor(rules=(("w", m),)),
        lambda m: LowRank(rest=m),
        lambda m: PowerSGD(rest=m),
    ],
)
def test_a_wrapper_needs_the_plain_mean_if_a_member_does(around: Any) -> None:
    assert around(EF21()).needs_plain_mean
    assert not around(TopK()).needs_plain_mean


@pytest.mark.parametrize("made", [EF21(), PerTensor(Clip(EF21()))])
def test_who_follows_the_mean_is_alone_in_its_plan(made: Compressor[Any]) -> None:
    fields = {name: getattr(plan(made), name) for name in RoundPlan.model_fields}
    other = Profile(name="other", compressor=TopK())
    for profiles in ((*fields["profiles"], other), (other, *fields["profiles"])):
        with pytest.raises(ValueError, match="give the plan this profile alone"):
            RoundPlan(**{**fields, "profiles": profiles})


def test_a_state_goes_on_where_what_it_describes_does() -> None:
    estimates: list[Compressor[Any]] = [
        EF21(TopK(0.1)),
        EF21(PowerSGD(2)),
        Clip(EF21()),
        Coded(EF21()),
        Cafe(EF21()),
    ]
    assert [state_key(made) for made in estimates] == ["ef21"] * 5
    assert state_key(Delta(EF21())) == "ef21"
    assert state_key(PerTensor(EF21(TopK(0.1)))) == state_key(PerTensor(EF21(TopK(0.2))))
    assert state_key(PerTensor(TopK(0.1))) == state_key(PerTensor(Quantize()))
    assert state_key(PowerSGD(1)) != state_key(PowerSGD(2))


def test_what_both_ends_know_names_the_round() -> None:
    known = plan(Cafe()).public(SPEC, {"previous": draw(9)})
    assert known.round == known.part(["w"]).round == 3
    assert (known.known("previous") == draw(9)).all()
    drifting = replace(known, knowledge={**known.knowledge, "drift": draw(10)})
    assert (drifting.known("drift") == draw(10)).all()


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"id": "cafe", "inner": 3}, "3 is not a compressor"),
        ({"id": "cafe", "inner": {"id": "error_feedback"}}, "goes around cafe, not into it"),
        ({"id": "cafe", "factor": 0}, r"factor must lie in \(0, 1\]"),
        ({"id": "cafe", "guard": 0}, "guard must be positive"),
        ({"id": "ef21", "participation": 0}, r"participation must lie in \(0, 1\]"),
        ({"id": "ef21", "inner": {"id": "error_feedback"}}, "goes around ef21"),
        ({"id": "delta", "inner": {"id": "error_feedback"}}, "goes around delta"),
        ({"id": "error_feedback", "decay": 1.1}, r"decay must lie in \[0, 1\]"),
        ({"id": "error_feedback", "max_ratio": -1}, "max_ratio must be 0 or more"),
    ],
)
def test_a_configuration_that_cannot_work_says_why(config: dict[str, Any], says: str) -> None:
    with pytest.raises(IncompatiblePlan, match=says):
        from_config(config)


def test_the_residual_decays_for_every_round_sat_out_and_says_so() -> None:
    made = ErrorFeedback(TopK(count=1), decay=0.5)
    zero = np.zeros(SPEC.size, np.float32)
    _, state = made.compress(draw(11), made.init(SPEC), public(None, 1), np.random.default_rng(0))
    assert not state.lost
    _, next_round = made.compress(zero, state, public(None, 2), np.random.default_rng(0))
    assert not next_round.lost
    symbols, later = made.compress(zero, state, public(None, 4), np.random.default_rng(0))
    ((reason, decayed),) = later.lost
    assert reason == "decayed"
    assert state.residual is not None
    assert later.residual is not None
    assert decayed == pytest.approx(0.75 * state.residual)
    received = made.decompress(symbols, public(None)).dense()
    assert received + later.residual + decayed == pytest.approx(state.residual, abs=1e-6)
    assert later.round == 4


def test_the_residual_is_capped_by_the_update_and_says_so() -> None:
    made = ErrorFeedback(TopK(count=1), max_ratio=2.0)
    rng = np.random.default_rng(0)
    _, state = made.compress(draw(12), made.init(SPEC), public(None), rng)
    large, small = draw(13), np.float32(0.1) * draw(13)
    assert not made.compress(large, state, public(None), rng)[1].lost
    _, capped = made.compress(small, state, public(None), rng)
    ((reason, lost),) = capped.lost
    assert reason == "capped"
    assert state.residual is not None
    kept = state.residual - lost
    assert np.linalg.norm(kept) == pytest.approx(2 * np.linalg.norm(small), rel=1e-5)


def test_with_the_inner_compressor_lossless_nothing_is_ever_left() -> None:
    known = public(draw(14))
    update = draw(15)
    for made in (Cafe(Uncompressed()), EF21(Uncompressed())):
        lossless = sent(made, update, known)
        if isinstance(made, EF21):
            lossless = lossless - draw(14)
        assert lossless == pytest.approx(update, abs=1e-6)


@pytest.mark.parametrize(
    "made",
    [
        EF21(),
        OneSidedPowerSGD(),
        LowRank(rest=Cafe()),
        PowerSGD(rest=OneSidedPowerSGD()),
        ErrorFeedback(Cafe()),
    ],
)
def test_what_is_read_is_asked_of_the_plan(made: Compressor[Any]) -> None:
    assert made.needs == {"previous"}


def test_an_upload_that_came_to_nothing_goes_back_into_the_residual() -> None:
    made = ErrorFeedback(TopK(0.05))
    symbols, state = made.compress(
        draw(16), made.init(SPEC), public(None), np.random.default_rng(0)
    )
    back = made.roll_back(state, made.decompress(symbols, public(None)))
    assert back.residual == pytest.approx(draw(16), abs=1e-6)
    assert back.round == state.round == 1


def test_a_sketch_that_outlives_its_round_needs_a_seed() -> None:
    with pytest.raises(ConfigurationError, match="hashes anew in every round"):
        CountSketch().randomness()


def test_a_number_of_numpy_is_stored_as_a_number() -> None:
    assert plain((np.float32(0.5), np.int64(3))) == [0.5, 3]


def test_what_is_taken_back_is_unsent_and_what_counts_stands_still() -> None:
    sent_update = Update.from_dense(draw(4))
    made = ErrorFeedback(TopK(0.1))
    back = made.roll_back(made.init(SPEC), sent_update)
    np.testing.assert_array_equal(back.residual, draw(4))
    twice = made.roll_back(back, sent_update)
    np.testing.assert_array_equal(twice.residual, 2 * draw(4))
    still = Dgc(TopK(0.1))
    assert (
        still.commit(still.init(SPEC)._replace(velocity=None), None, sent_update).velocity is None
    )


class NextLargest(TopK):
    """Keeps the largest of the smaller half, to be told from what it inherits."""

    def compress(
        self, update: Vector, state: None, public: Public, rng: np.random.Generator
    ) -> tuple[Any, None]:
        small = np.abs(update) <= np.median(np.abs(update))
        return super().compress(np.where(small, update, np.float32(0)), state, public, rng)


def test_a_subclass_s_own_compress_is_what_sends_the_residual_too() -> None:
    made, known = ErrorFeedback(NextLargest(0.05)), public(None)
    update, rng = draw(1), np.random.default_rng(0)
    _, state = made.compress(update, made.init(SPEC), known, rng)
    symbols, _ = made.compress(update, state, known, rng)
    assert state.residual is not None
    total = update + state.residual
    assert np.array_equal(made.decompress(symbols, known).dense(), sent(made.lossy, total, known))
