"""Successive refinement: what is received is the sum, what is lost is what the second lost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpress_compression.coding import decode, encode
from fedpress_compression.compressor import Public, from_config, properties, to_config
from fedpress_compression.compressors.coded import Coded
from fedpress_compression.compressors.ecsq import Ecsq
from fedpress_compression.compressors.error_feedback import ErrorFeedback, check_feedback
from fedpress_compression.compressors.half import Half
from fedpress_compression.compressors.lowrank import LowRank
from fedpress_compression.compressors.qsgd import Qsgd
from fedpress_compression.compressors.quantize import Quantize
from fedpress_compression.compressors.successive_refinement import SuccessiveRefinement
from fedpress_compression.compressors.topk import TopK
from fedpress_compression.errors import DecodingError
from fedpress_compression.randomness import PublicRandomness
from fedpress_compression.tensors import ModelSpec, TensorSpec, Vector
from fedpress_protocols.errors import IncompatiblePlan

SPEC = ModelSpec((TensorSpec("w", (24, 20)), TensorSpec("b", (24,))))
PUBLIC = Public(SPEC, PublicRandomness(bytes(32)))
STAGES = st.sampled_from(
    [TopK(0.05), TopK(0.02, scope="tensor"), LowRank(), Ecsq("nmse", 0.4), Quantize(3)]
)


def drawn(seed: int, tail: int) -> Vector:
    return np.random.default_rng(seed).standard_t(tail, SPEC.size).astype(np.float32)


@given(STAGES, STAGES, st.integers(0, 2**32), st.integers(1, 9))
def test_what_is_lost_is_what_the_second_stage_lost(
    first: Any, second: Any, seed: int, tail: int
) -> None:
    made, update = SuccessiveRefinement(first, second), drawn(seed, tail)
    symbols, _ = made.compress(update, None, PUBLIC, np.random.default_rng(seed))
    body = encode(symbols, made.layout(SPEC))
    back = made.decompress(decode(body, made.layout(SPEC)), PUBLIC).dense()

    fields = len(first.layout(SPEC))
    coarse = first.decompress(symbols[:fields], PUBLIC).dense()
    fine = second.decompress(symbols[fields:], PUBLIC).dense()
    np.testing.assert_array_equal(back, coarse + fine)
    scale = float(np.abs(update).max())
    np.testing.assert_allclose(update - back, update - coarse - fine, atol=1e-6 * scale)
    lost = np.linalg.norm((update - back).astype(np.float64))
    assert lost <= (1 + 1e-6) * np.linalg.norm((update - coarse).astype(np.float64))


def test_low_rank_and_its_rest_come_near_an_update_of_both_kinds() -> None:
    rng = np.random.default_rng(0)
    update = rng.standard_normal(SPEC.size).astype(np.float32) * 0.1
    update[:480] += np.outer(rng.standard_normal(24), rng.standard_normal(20)).ravel()
    alone, both = (
        made.decompress(made.compress(update, None, PUBLIC, rng)[0], PUBLIC).dense()
        for made in (LowRank(), SuccessiveRefinement(LowRank(), Ecsq("nmse", 0.25)))
    )
    errors = [np.square((update - each).astype(np.float64)).sum() for each in (alone, both)]
    assert errors[1] <= 0.3 * errors[0]


@given(st.binary(max_size=80))
def test_forged_bytes_decode_within_the_layout_or_are_refused(data: bytes) -> None:
    made = SuccessiveRefinement(TopK(0.02), Ecsq())
    try:
        symbols = decode(data, made.layout(SPEC))
    except DecodingError:
        return
    assert made.decompress(symbols, PUBLIC).size == SPEC.size


def test_every_shorter_body_is_refused() -> None:
    made = SuccessiveRefinement(TopK(0.02), Ecsq())
    layout = made.layout(SPEC)
    body = encode(made.compress(drawn(1, 3), None, PUBLIC, np.random.default_rng(0))[0], layout)
    for end in range(len(body)):
        with pytest.raises(DecodingError):
            decode(body[:end], layout)


def test_it_contracts_where_one_stage_does_and_the_other_loses_no_more() -> None:
    assert properties(SuccessiveRefinement(TopK(0.1), Ecsq())).contractive
    assert properties(SuccessiveRefinement(Ecsq("step", 0.1), TopK(0.1))).contractive
    grids = properties(SuccessiveRefinement(Ecsq("step", 0.1), Ecsq("step", 0.1)))
    assert grids.non_expansive
    assert not grids.contractive
    expands = SuccessiveRefinement(TopK(0.1), Qsgd(1, 512))
    assert not properties(expands).suits_feedback
    check_feedback(ErrorFeedback(SuccessiveRefinement()))
    with pytest.raises(IncompatiblePlan, match="qsgd"):
        check_feedback(ErrorFeedback(expands))


@pytest.mark.parametrize(
    ("stage", "says"),
    [
        ({"id": "error_feedback"}, "error feedback goes around successive_refinement"),
        ({"id": "dgc"}, "around successive_refinement|keeps"),
        ({"id": "ef21"}, "first is 'ef21', which keeps .* a stage must keep nothing"),
        ({"id": "delta"}, "first is 'delta', which keeps"),
        ({"id": "powersgd"}, "first is 'powersgd', which keeps"),
        (3, "3 is not a compressor"),
    ],
)
def test_a_stage_that_keeps_state_is_refused(stage: Any, says: str) -> None:
    with pytest.raises(IncompatiblePlan, match=says):
        from_config({"id": "successive_refinement", "first": stage})


# A target of the whole upload

LARGER = ModelSpec((TensorSpec("w", (48, 40)), TensorSpec("v", (4, 48)), TensorSpec("b", (48,))))
SETTINGS = LowRank(3, 5, rest=Half())


def mixed(seed: int, rank: int, noise: float, spec: ModelSpec = LARGER) -> Vector:
    """Each matrix of `rank`, of columns one weaker than the other, and noise; vectors of noise."""
    rng = np.random.default_rng(seed)
    update = noise * rng.standard_t(4, spec.size)
    for tensor in spec.trained:
        if len(tensor.shape) > 1:
            left = rng.standard_normal((tensor.shape[0], rank)) * 0.5 ** np.arange(rank)
            right = rng.standard_normal((rank, tensor.size // tensor.shape[0]))
            update[spec.slices[tensor.name]] += (left @ right).ravel()
    return update.astype(np.float32)


def sent(made: Any, update: Vector, spec: ModelSpec = LARGER) -> tuple[int, float]:
    """Bytes under the range coder, and the share of the squares that is lost."""
    known, layout = Public(spec, PublicRandomness(bytes(32))), Coded(made).layout(spec)
    symbols, _ = made.compress(update, None, known, np.random.default_rng(0))
    body = encode(symbols, layout)
    back = made.decompress(decode(body, layout), known).dense().astype(np.float64)
    whole = np.square(update.astype(np.float64)).sum()
    return len(body), float(np.square(update - back).sum() / whole)


@given(
    st.integers(0, 2**32),
    st.integers(0, 4),
    st.sampled_from([0.0, 0.03, 0.3, 1.0]),
    st.sampled_from([0.02, 0.1, 0.3, 0.7]),
    st.sampled_from([0.0, 0.14]),
)
def test_the_error_keeps_to_the_target_and_bytes_to_those_of_the_second_stage_alone(
    seed: int, rank: int, noise: float, target: float, rdo: float
) -> None:
    update = mixed(seed, rank, noise, SPEC)
    if not update.any():
        return
    second = Ecsq("nmse", target, rdo=rdo)
    size, error = sent(SuccessiveRefinement(SETTINGS, second, "whole"), update, SPEC)
    assert error <= target * (1 + 1e-5)
    silent = SETTINGS.compress(np.zeros_like(update), None, PUBLIC, np.random.default_rng(0))[0]
    assert size <= sent(second, update, SPEC)[0] + len(encode(silent, SETTINGS.layout(SPEC))) + 2


@pytest.mark.parametrize("target", [0.02, 0.1, 0.3])
def test_components_are_sent_where_they_pay(target: float) -> None:
    second = Ecsq("nmse", target, rdo=0.14)
    made = SuccessiveRefinement(SETTINGS, second, "whole")
    assert sent(made, mixed(0, 1, 0.1))[0] < 0.7 * sent(second, mixed(0, 1, 0.1))[0]
    assert 0 <= sent(made, mixed(1, 0, 1.0))[0] - sent(second, mixed(1, 0, 1.0))[0] < 30


def test_each_matrix_has_the_components_that_pay_there() -> None:
    spec = ModelSpec((TensorSpec("flat", (40, 40)), TensorSpec("deep", (40, 40))))
    update = mixed(2, 2, 0.05, spec)
    update[:1600] = np.random.default_rng(2).standard_normal(1600) / 2
    made = SuccessiveRefinement(SETTINGS, Ecsq("nmse", 0.2), "whole")
    known = Public(spec, PublicRandomness(bytes(32)))
    symbols, _ = made.compress(update, None, known, np.random.default_rng(0))
    assert not symbols[2][:3].any()
    assert np.count_nonzero(symbols[2][3:]) == 2


@pytest.mark.parametrize(("bits", "rdo"), [(0.6, 0.0), (0.6, 0.14), (2.0, 0.0)])
def test_bits_are_those_of_both_stages(bits: float, rdo: float) -> None:
    second = Ecsq("bits", bits, rdo=rdo)
    made = SuccessiveRefinement(SETTINGS, second, "whole")
    known = Public(LARGER, PublicRandomness(bytes(32)))
    for update in (mixed(0, 1, 0.1), mixed(1, 0, 1.0)):
        symbols, _ = made.compress(update, None, known, np.random.default_rng(0))
        assert len(encode(symbols, made.layout(LARGER))) <= bits * LARGER.size / 8 + 2
    assert sent(made, mixed(0, 1, 0.1))[1] < 0.7 * sent(second, mixed(0, 1, 0.1))[1]


def test_a_budget_that_the_first_stage_exceeds_goes_to_the_second() -> None:
    made = SuccessiveRefinement(SETTINGS, Ecsq("bits", 0.02), "whole")
    symbols, _ = made.compress(mixed(0, 1, 0.1, SPEC), None, PUBLIC, np.random.default_rng(0))
    assert not symbols[2].any()
    assert symbols[5].size, "nothing at all was sent"


def test_at_a_step_components_pay_or_are_left_out() -> None:
    update, second = mixed(0, 1, 0.1), Ecsq("step", 0.5)
    made = SuccessiveRefinement(SETTINGS, second, "whole")
    (size, error), (alone, more) = sent(made, update), sent(second, update)
    assert size < 0.8 * alone
    assert error < 1.2 * more
    assert sent(made, mixed(1, 0, 1.0))[1] == sent(second, mixed(1, 0, 1.0))[1]


def test_a_first_stage_that_is_enough_leaves_nothing_to_send() -> None:
    update = np.outer(np.sign(mixed(3, 1, 1.0)[:48]), np.ones(40)).ravel().astype(np.float32)
    spec = LARGER.select(["w"])
    made = SuccessiveRefinement(SETTINGS, Ecsq("nmse", 0.1), "whole")
    known = Public(spec, PublicRandomness(bytes(32)))
    symbols, _ = made.compress(update, None, known, np.random.default_rng(0))
    assert np.count_nonzero(symbols[2]) == 1
    assert not symbols[3].size
    assert sent(made, update, spec)[1] < 1e-6


def test_zeros_and_models_without_matrices_have_no_components() -> None:
    made = SuccessiveRefinement(SETTINGS, Ecsq("nmse", 0.1), "whole")
    zeros = np.zeros(SPEC.size, np.float32)
    symbols, _ = made.compress(zeros, None, PUBLIC, np.random.default_rng(0))
    assert not made.decompress(symbols, PUBLIC).dense().any()
    vectors = ModelSpec((TensorSpec("row", (1, 90)), TensorSpec("b", (9,))))
    size, error = sent(made, mixed(0, 1, 1.0, vectors), vectors)
    assert error <= 0.1
    assert size <= sent(made.second, mixed(0, 1, 1.0, vectors), vectors)[0] + 8


def test_feedback_keeps_what_neither_stage_sent() -> None:
    made = ErrorFeedback(SuccessiveRefinement(SETTINGS, Ecsq("nmse", 0.4), "whole"))
    state, rng = made.init(SPEC), np.random.default_rng(0)
    total, arrived = np.zeros((2, SPEC.size))
    for number in range(6):
        update = mixed(number, 1, 0.5, SPEC)
        symbols, state = made.compress(update, state, PUBLIC, rng)
        total += update
        arrived += made.decompress(symbols, PUBLIC).dense()
    assert state.residual is not None
    np.testing.assert_allclose(arrived + state.residual, total, atol=1e-4)


def test_a_receiver_does_not_have_to_know_whose_target_it_was() -> None:
    second = Ecsq("nmse", 0.1)
    made, known = SuccessiveRefinement(SETTINGS, second, "whole"), mixed(0, 2, 0.1, SPEC)
    symbols, _ = made.compress(known, None, PUBLIC, np.random.default_rng(0))
    other = SuccessiveRefinement(SETTINGS, second)
    body = encode(symbols, made.layout(SPEC))
    received = other.decompress(decode(body, other.layout(SPEC)), PUBLIC).dense()
    np.testing.assert_array_equal(received, made.decompress(symbols, PUBLIC).dense())
    assert to_config(made)["target_of"] == "whole"
    assert "target_of" not in to_config(other), "ends that do not know it go on reading this"


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"target_of": "all"}, "target_of is rest or whole, not 'all'"),
        ({"target_of": "whole", "first": {"id": "topk"}}, "takes lowrank as first and ecsq"),
        ({"target_of": "whole", "second": {"id": "topk"}}, "set target_of to rest"),
    ],
)
def test_whose_target_it_is_must_be_plain(config: dict[str, Any], says: str) -> None:
    with pytest.raises(IncompatiblePlan, match=says):
        from_config({"id": "successive_refinement", **config})
