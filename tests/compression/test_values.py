"""How flat vectors are."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fedpress_compression.values import flatness


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], 0.0),
        ([0.0, 0.0], 0.0),
        ([3e38, 0.0, -3e38], 1.0),
        ([1e-37, 1e-37], 1.0),
        ([1.0, 3.0, 0.0], 4 / 5),
        ([1.0, -1.0, 1e-3, 1e-3], 1.0),
        ([1.0, -1.0, 0.1, 0.1], 2.2**2 / 4 / 2.02),
        ([math.inf, 1.0], 0.0),
        ([math.nan, 1.0], 0.0),
    ],
)
def test_zeros_and_scale_do_not_count(values: list[float], expected: float) -> None:
    assert flatness(np.array(values, np.float32)) == pytest.approx(expected)


def test_normally_distributed_values_have_two_over_pi() -> None:
    values = np.random.default_rng(0).standard_normal(100_000, np.float32)
    assert flatness(values) == pytest.approx(2 / math.pi, abs=0.01)


@given(
    arrays(
        np.float32,
        st.integers(1, 50),
        elements=st.floats(-(2.0**99), 2.0**99, width=32, allow_subnormal=False),
    )
)
def test_it_lies_between_the_share_of_one_value_and_one(values: Any) -> None:
    found = flatness(values)
    num = np.count_nonzero(values)
    assert (found == 0) == (num == 0)
    assert num == 0 or (1 - 1e-5) / num <= found <= 1
