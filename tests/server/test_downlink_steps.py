"""What is published step by step: within budget, near the target, nothing lost for good."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from fedpress_compression.tensors import Vector
from fedpress_protocols.defaults import MIN_BYTES
from fedpress_protocols.downlink import encode_difference, encode_model, finest
from fedpress_protocols.errors import ConfigurationError
from fedpress_protocols.messages import DownlinkTerms
from fedpress_protocols.model import Model
from fedpress_strategies.downlink import rounded, stepped

TERMS = DownlinkTerms()


def model_of(seed: int, size: int = 30) -> Model:
    rng = np.random.default_rng(seed)
    return Model.from_tensors(
        {
            "w": (0.05 * rng.standard_normal((size, 50))).astype(np.float32),
            "b": np.zeros(50, np.float32),
            "scale": np.ones(50, np.float32),
        }
    )


def moves(model: Model, seed: int, scale: float) -> Vector:
    rng = np.random.default_rng([seed, 1])
    heavy = rng.gamma(0.4, 1, model.spec.size)
    return (scale * heavy * rng.standard_normal(model.spec.size)).astype(np.float32)


@settings(deadline=None, max_examples=12)
@example(bits=4, rate=1.0, octave=-6.0, seed=33)
@given(st.integers(4, 14), st.floats(0.05, 3.2), st.floats(-12, 2), st.integers(0, 99))
def test_a_step_is_within_budget_and_as_fine_as_it_can_be(
    bits: int, rate: float, octave: float, seed: int
) -> None:
    terms = DownlinkTerms(bits=bits, rate=rate)
    base = rounded(model_of(seed), terms)
    target = base.parameters + moves(base, seed, 2.0**octave)
    made = stepped(base, target, terms)
    budget = max(rate * base.spec.size / 8, MIN_BYTES)
    coded = len(encode_difference(base, made, terms.coder))
    farthest = np.abs(target - base.parameters).max()
    assert coded <= budget
    if 0.7 * budget > coded:  # no room is left but where grids or coded steps are coarse
        for where in base.spec.slices.values():
            gap = np.abs(target[where] - made.parameters[where])
            exponent = finest(np.maximum(target[where], base.parameters[where]), bits)
            least = finest(np.minimum(target[where], base.parameters[where]), bits)
            steps = [2.0**-each for each in (exponent, least) if each is not None]
            assert gap.max() <= 0.51 * max(steps)
    # equal where a coarse grid cannot move the farthest coordinate: 4 bits step 1.0 by a quarter
    assert np.abs(target - made.parameters).max() <= max(farthest, 2.0**-6)
    assert len(encode_model(made)) <= (bits + 2) * base.spec.size / 8 + 300
    again = stepped(base, target, terms)
    assert again.to_bytes() == made.to_bytes()


def test_the_error_is_fed_back_and_stays_bounded() -> None:
    """The published models follow the strategy's over many steps, at half a bit each."""
    terms = DownlinkTerms(rate=0.5, bits=14)
    first = model_of(1)
    target, published = first.parameters, rounded(first, terms)
    gaps = []
    for number in range(40):
        target = target + moves(first, number, 0.001)
        published = stepped(published, target, terms)
        gaps.append(float(np.linalg.norm(target - published.parameters)))
    way = float(np.linalg.norm(target - first.parameters))
    assert max(gaps) < 0.5 * way
    for _ in range(60):  # the strategy stands still, and what is published comes to it
        published = stepped(published, target, terms)
    assert np.linalg.norm(target - published.parameters) < 0.02 * way


def test_nothing_moves_where_nothing_is_to_move() -> None:
    base = rounded(model_of(2), TERMS)
    assert stepped(base, base.parameters, TERMS).to_bytes() == base.to_bytes()
    zeros = Model.from_tensors({"w": np.zeros(9, np.float32)})
    assert stepped(zeros, zeros.parameters, TERMS).to_bytes() == zeros.to_bytes()


def test_a_tensor_that_outgrows_its_grid_has_a_coarser_one() -> None:
    base = rounded(model_of(3), TERMS)
    target = base.parameters.copy()
    target[base.spec.slices["b"]] = 1000.0
    made = stepped(base, target, DownlinkTerms(rate=3.2))
    assert np.abs(made.parameters - target).max() < 1.0
    assert len(encode_model(made)) < len(base.to_bytes()) / 2
    assert made.parameters[base.spec.slices["w"]] == pytest.approx(
        base.parameters[base.spec.slices["w"]]
    )


def test_a_first_model_is_rounded_once() -> None:
    first = model_of(4)
    made = rounded(first, TERMS)
    assert rounded(made, TERMS).to_bytes() == made.to_bytes()
    step = np.abs(first.parameters).max() / 2**11
    assert np.abs(made.parameters - first.parameters).max() <= step
    assert len(encode_model(made)) < 0.42 * len(first.to_bytes())


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_target_that_is_no_number_is_refused(value: float) -> None:
    base = rounded(model_of(5), TERMS)
    target = base.parameters.copy()
    target[3] = value
    with pytest.raises(ConfigurationError, match="NaN or infinity"):
        stepped(base, target, TERMS)


@pytest.mark.parametrize(
    "terms", [{"bits": 3}, {"bits": 15}, {"rate": 0}, {"rate": 3.3}, {"keep": 0}, {"coder": "zip"}]
)
def test_terms_that_would_break_the_promise_are_refused(terms: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        DownlinkTerms.model_validate(terms)
