"""Successive refinement: what is received is the sum, what is lost is what the second lost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpress_compression.coding import decode, encode
from fedpress_compression.compressor import Public, from_config, properties
from fedpress_compression.compressors.ecsq import Ecsq
from fedpress_compression.compressors.error_feedback import ErrorFeedback, check_feedback
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
