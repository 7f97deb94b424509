"""Differential privacy: what terms cost, the noise's distribution, and the grid it is added on."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from scipy import special, stats

from fedpress_protocols.errors import ConfigurationError, IncompatiblePlan, InvalidUpdate
from fedpress_protocols.masking import payload as payload_module
from fedpress_protocols.masking.graph import Adversary, honest_survivors
from fedpress_protocols.masking.payload import Payload
from fedpress_protocols.messages import PrivacyStatus
from fedpress_protocols.plan import PrivacyTerms, RoundPlan
from fedpress_protocols.privacy import accounting, discrete_gaussian, gaussian, skellam, tables
from fedpress_protocols.privacy import grid as grid_module
from fedpress_protocols.privacy.grid import SECRET_BYTES, SUM_TAIL, Grid, NarrowGrid
from tests.protocols.test_masked_payload import (
    KNOWN,
    METHODS,
    SHARED,
    SPEC,
    made_plan,
    secret_of,
    some_update,
    summed,
)

PRIVATE = {"clip": 0.3, "noise_multiplier": 1.0, "participations": 1, "epsilon": 8.0}

# dp-accounting 0.6.0: RdpAccountant(accounting.ORDERS), GaussianDpEvent(noise multiplier) composed
# so many times, epsilon at delta; settings drawn at random, as printed.
DP_ACCOUNTING = [
    (9.3269, 100, 1e-06, 5.671059),
    (1.2236, 1, 1e-06, 4.161818),
    (1.7922, 10, 1e-04, 8.320414),
    (0.4841, 298, 1e-04, 1279.411103),
    (5.1335, 3, 1e-05, 1.405376),
    (18.0789, 167, 1e-06, 3.586822),
    (10.8738, 9, 1e-07, 1.400524),
    (5.6459, 1, 1e-06, 0.790376),
    (3.5156, 4, 1e-05, 2.503056),
    (0.5142, 48, 1e-08, 198.576377),
    (12.0313, 3, 1e-06, 0.633661),
    (12.1309, 1, 1e-08, 0.428082),
    (6.369, 1, 1e-04, 0.515179),
    (2.2077, 3, 1e-06, 3.978431),
    (1.426, 99, 1e-04, 56.509155),
    (0.7166, 53, 1e-05, 113.336746),
    (2.3127, 95, 1e-07, 32.493521),
    (1.3975, 95, 1e-05, 58.769589),
    (2.9077, 17, 1e-08, 9.006446),
    (0.4234, 204, 1e-05, 1148.090466),
]


@pytest.fixture(autouse=True)
def _repeatable_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same noise in each run of a test, so that a test of chance cannot fail by chance."""
    repeats = SimpleNamespace(urandom=np.random.default_rng(5).bytes)
    monkeypatch.setattr(payload_module, "os", repeats)


# The accountant


@pytest.mark.parametrize(("noise", "count", "delta", "epsilon"), DP_ACCOUNTING)
def test_epsilon_is_that_of_dp_accounting(
    noise: float, count: int, delta: float, epsilon: float
) -> None:
    curve = count * accounting.gaussian(noise)
    assert accounting.epsilon_of(curve, delta) == pytest.approx(epsilon, rel=1e-4)


@pytest.mark.parametrize(("noise", "count", "delta", "epsilon"), DP_ACCOUNTING)
def test_the_terms_cost_what_gaussian_noise_costs_and_never_less(
    noise: float, count: int, delta: float, epsilon: float
) -> None:
    spent = accounting.skellam_participation(noise).times(count).epsilon(delta)
    assert epsilon * (1 - 1e-4) <= spent <= epsilon * (1.02 if noise >= 0.7 else 1.06)


@pytest.mark.parametrize(
    ("variance", "shift", "order", "exact"), [(25, 1, 2, 0.039975), (400, 3, 32, 0.355243)]
)
def test_the_skellam_curve_is_above_the_exact_divergence(
    variance: int, shift: int, order: int, exact: float
) -> None:
    k = np.arange(-40 * int(math.sqrt(variance)), 40 * int(math.sqrt(variance)) + 1)

    def log_pmf(values: np.ndarray) -> np.ndarray:
        return np.log(special.ive(np.abs(values), float(variance)))

    inside = np.isfinite(log_pmf(k)) & np.isfinite(log_pmf(k - shift))
    p, q = log_pmf(k)[inside], log_pmf(k - shift)[inside]
    divergence = special.logsumexp(order * p - (order - 1) * q) / (order - 1)
    assert divergence == pytest.approx(exact, rel=1e-4)
    noise = math.sqrt(variance) / shift
    bound = accounting.skellam(noise, shift, shift)[accounting.ORDERS.index(order)]
    general = accounting.skellam(noise, shift, shift**2)[accounting.ORDERS.index(order)]
    assert divergence < bound <= general < 1.1 * divergence


@pytest.mark.parametrize(
    ("noise", "sensitivity", "l1"), [(0.5, 2, 2.0), (1.5, 40, 700), (9, 32, 9)]
)
def test_the_skellam_curve_is_that_of_the_theorem(
    noise: float, sensitivity: float, l1: float
) -> None:
    """Agarwal, Kairouz and Liu 2021, Theorem 3.5, in fractions: `mu` is the variance."""
    mu = Fraction(noise) ** 2 * Fraction(sensitivity) ** 2
    for order, found in zip(
        accounting.ORDERS, accounting.skellam(noise, sensitivity, l1), strict=True
    ):
        first = ((2 * order - 1) * Fraction(sensitivity) ** 2 + 6 * Fraction(l1)) / (4 * mu**2)
        second = 3 * Fraction(l1) / (2 * mu)
        exact = order * Fraction(sensitivity) ** 2 / (2 * mu) + min(first, second)
        assert found == pytest.approx(float(exact), rel=1e-12)


@given(st.floats(0.3, 30), st.integers(1, 10**6))
@settings(max_examples=50, deadline=None)
def test_one_participation_costs_no_less_than_its_grid(noise: float, size: int) -> None:
    grid = Grid(size, 1.0, noise, 5)
    sensitivity = math.sqrt(grid.squared_sensitivity)
    l1 = min(math.sqrt(size) * sensitivity, grid.squared_sensitivity)
    total = math.sqrt(5 * grid.variance) / sensitivity
    assert total >= noise * (1 - 1e-12)
    exact = accounting.skellam(total, sensitivity, l1)
    bound = accounting.skellam_participation(noise).skellam
    assert bound is not None
    assert (exact <= bound * (1 + 1e-12)).all()


def test_the_noise_found_for_an_epsilon_is_the_least() -> None:
    for epsilon, delta, count in ((2.0, 1e-5, 10), (8.0, 1e-6, 1), (0.5, 1e-9, 100)):
        noise = accounting.noise_multiplier_for(epsilon, delta, count)
        cost = [
            accounting.skellam_participation(each).times(count).epsilon(delta)
            for each in (noise, 0.999 * noise)
        ]
        assert cost[0] <= epsilon < cost[1]


@pytest.mark.parametrize("shares", [1, 4])
def test_gaussian_noise_on_a_grid_is_by_its_sensitivity(shares: int) -> None:
    grid = Grid(10_000, 1.0, 3.0, shares, is_gaussian=True)
    deviation = 3.0 * math.sqrt(grid.squared_sensitivity / shares)
    noise = gaussian.sample(10_000, deviation, secret_of(1))
    np.testing.assert_array_equal(grid.noise(secret_of(1)), noise)
    assert grid.largest == 2 * 100 + 32
    assert Grid(10_000, 1.0, 0.001, shares, is_gaussian=True).largest == 2 * 100 + 32
    under_masks = Grid(10_000, 1.0, 3.0, shares)
    noise = skellam.sample(10_000, under_masks.variance, secret_of(1))
    np.testing.assert_array_equal(under_masks.noise(secret_of(1)), noise)


@pytest.mark.parametrize(
    ("size", "noise", "shares", "cohort", "squared", "variance", "largest"),
    [
        (4, 0.5, 20, 40, 640, 9, 26),  # 8 h / z**2, and no value beyond the norm
        (4, 2.0, 1, 1, 64, 260, 8),  # the least
        (1000, 1.0, 3, 4, 2250, 752, 48),  # 9 n / 4
        (1000, 0.1, 100, 100, 80_000, 9, 36),  # four times the root mean square
        (10_000, 1.0, 20, 40, 22_500, 1126, 23),  # half a bit of the noise
        (10_000, 0.0625, 9, 9, 22_500, 11, 6),
    ],
)
def test_a_narrow_grid_has_the_steps_and_the_room_that_it_claims(
    size: int, noise: float, shares: int, cohort: int, squared: int, variance: int, largest: int
) -> None:
    grid = NarrowGrid(size, 1.5, noise, shares, cohort=cohort)
    assert (grid.squared_sensitivity, grid.variance, grid.largest) == (squared, variance, largest)
    assert grid.step == pytest.approx(1.5 / math.sqrt(squared))
    assert grid.sum_bound(3) == 3 * largest + math.ceil(math.sqrt(2 * 40 * 3 * variance))
    assert grid.bound == largest + math.ceil(math.sqrt(2 * 100 * variance))


@pytest.mark.parametrize(
    ("size", "noise", "shares", "squared", "variance", "largest"),
    [
        (100, 2.0, 7, 2786, 1592, 52),
        (10_000, 0.25, 3, 56_606, 1180, 232),
        (1, 0.001, 50, 1191, 1, 34),
        (10_000, 0.001, 50, 56_606, 1, 70),
    ],
)
def test_a_grid_has_the_steps_and_the_room_that_it_claims(
    size: int, noise: float, shares: int, squared: int, variance: int, largest: int
) -> None:
    grid = Grid(size, 1.5, noise, shares)
    assert (grid.squared_sensitivity, grid.variance, grid.largest) == (squared, variance, largest)
    assert grid.step == pytest.approx(1.5 / (2 * math.sqrt(size) + 32))
    reach = math.ceil(100 / 3 + math.sqrt(100**2 / 9 + 200 * variance))
    assert grid.bound == largest + reach
    assert grid.sum_bound(3) == 3 * grid.bound


def test_tasks_of_both_kinds_of_noise_cost_what_their_curves_add_up_to() -> None:
    skellam_cost = accounting.skellam_participation(4.0).times(3)
    assert skellam_cost.skellam is not None
    both = accounting.together(
        [
            skellam_cost,
            accounting.gaussian_participation(5.0).times(2),
            accounting.gaussian_participation(3.0),
        ]
    )
    curve = skellam_cost.skellam + 2 * accounting.gaussian(5.0) + accounting.gaussian(3.0)
    assert both.epsilon(1e-5) == pytest.approx(accounting.epsilon_of(curve, 1e-5), rel=1e-12)


def test_an_impossible_epsilon_or_delta_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="no noise makes 1 participations cost"):
        accounting.noise_multiplier_for(1e-9, 1e-6, 1)
    with pytest.raises(ConfigurationError, match="delta must lie in"):
        accounting.epsilon_of(accounting.gaussian(1.0), 0.0)
    for delta in (9.9e-12, 1.0):
        with pytest.raises(ConfigurationError, match=r"delta must lie in \[1e-11, 1\), not"):
            accounting.gaussian_epsilon(1.0, delta)
    accounting.check_delta(1e-11)


@pytest.mark.parametrize("kind", [Grid, partial(NarrowGrid, cohort=1)])
def test_a_grid_whose_noise_no_table_has_is_refused_before_anything_is_drawn(kind: Any) -> None:
    with pytest.raises(ConfigurationError, match="expected 1 to 1073741824"):
        kind(100, 1.0, 5000.0, 1).vector("values", 1)
    assert kind(100, 1.0, 500.0, 1).variance > 2**24


# Noise


@pytest.mark.parametrize("variance", [1, 4, 30, 400, 12345])
def test_noise_has_the_skellam_distribution(variance: int) -> None:
    values = skellam.sample(200_000, variance, secret_of(variance))
    spread = 2.5 * math.sqrt(variance)
    edges = np.unique(np.round(np.linspace(-spread, spread, 40)))
    half = variance / 2
    probability = np.diff(np.concatenate([[0], stats.skellam.cdf(edges, half, half), [1]]))
    counts = np.bincount(np.searchsorted(edges, values, side="left"), minlength=edges.size + 1)
    assert stats.chisquare(counts, probability * values.size).pvalue > 1e-4
    assert abs(values).max() <= skellam.reach(variance)


@pytest.mark.parametrize("variance", [1, 9, 1000])
def test_the_table_is_the_exact_distribution(variance: int) -> None:
    table = skellam._table(variance)
    assert table.reach == skellam.reach(variance)
    k = np.arange(-table.reach, table.reach)
    exact = stats.skellam.cdf(k, variance / 2, variance / 2)
    found = np.array([each / 2**256 for each in table.fine])
    np.testing.assert_allclose(found, exact, atol=1e-12)
    tail = sum(special.ive(np.arange(table.reach + 1, 4 * table.reach + 9), float(variance)))
    assert tail <= math.exp(-tables.TAIL)


def test_equal_leading_bits_are_decided_by_further_ones() -> None:
    table = skellam._table(4)
    middle = table.reach
    uniform = np.full(1000, table.leading[middle], np.uint64)
    values = table.values(uniform, secret_of(3), 0, uniform.size)
    below = (table.fine[middle] & (2**192 - 1)) / 2**192
    assert set(values.tolist()) == {0, 1}
    assert np.mean(values == 0) == pytest.approx(below, abs=0.07)


def test_noise_of_a_secret_is_the_same_whatever_the_chunks(monkeypatch: Any) -> None:
    whole = skellam.sample(1000, 50, secret_of(1))
    monkeypatch.setattr(tables, "_CHUNK", 64)
    np.testing.assert_array_equal(skellam.sample(1000, 50, secret_of(1)), whole)
    assert whole[:8].tolist() == FROZEN


FROZEN = [-5, -2, -21, 1, 1, -5, -12, -5]


@pytest.mark.parametrize("variance", [0, tables.MAX_VARIANCE + 1])
def test_noise_beyond_the_table_is_refused(variance: int) -> None:
    with pytest.raises(ConfigurationError, match="expected 1 to"):
        skellam.sample(1, variance, secret_of(0))


# The published figures of a privacy loss distribution, at delta 1e-6 (dp-accounting 0.6.0,
# from_discrete_gaussian_mechanism of sensitivity 1).
DISCRETE_GAUSSIAN = [(2, 2.27579), (5, 0.834976), (20, 0.189257)]


@pytest.mark.parametrize("variance", [1, 8, 31, 400, 12345])
def test_noise_has_the_discrete_gaussian_distribution(variance: int) -> None:
    values = discrete_gaussian.sample(200_000, variance, secret_of(variance))
    reach = math.ceil(3 * math.sqrt(variance))
    k = np.arange(-8 * reach, 8 * reach + 1)
    mass = np.exp(-(k.astype(float) ** 2) / (2 * variance))
    step = max(1, reach // 15)
    edges = np.arange(-reach, reach + 1, step)
    probability = np.bincount(np.searchsorted(edges, k), mass / mass.sum(), edges.size + 1)
    counts = np.bincount(np.searchsorted(edges, values), minlength=edges.size + 1)
    assert stats.chisquare(counts, probability * values.size).pvalue > 1e-4
    assert abs(values).max() <= discrete_gaussian.reach(variance)


def test_the_table_of_discrete_gaussian_noise_is_exact() -> None:
    table = discrete_gaussian._table(9)
    k = np.arange(-table.reach, table.reach + 1)
    mass = np.exp(-(k.astype(float) ** 2) / 18)
    exact = np.cumsum(mass / mass.sum())[:-1]
    np.testing.assert_allclose([each / 2**256 for each in table.fine], exact, atol=1e-14)
    assert 2 * math.exp(-((table.reach + 1) ** 2) / 18) <= 2 * math.exp(-tables.TAIL)


def test_discrete_gaussian_noise_of_a_secret_is_frozen() -> None:
    assert discrete_gaussian.sample(1000, 50, secret_of(1))[:8].tolist() == [
        -5,
        -2,
        -21,
        1,
        1,
        -5,
        -12,
        -5,
    ]


@pytest.mark.parametrize(("deviation", "epsilon"), DISCRETE_GAUSSIAN)
def test_discrete_gaussian_noise_costs_what_gaussian_noise_less_the_smoothing_does(
    deviation: int, epsilon: float
) -> None:
    counted = math.sqrt(deviation**2 - discrete_gaussian.SMOOTHING) if deviation > 2 else 0
    if counted:
        claimed = accounting.gaussian_participation(counted).epsilon(1e-6)
        assert epsilon <= claimed <= 1.25 * epsilon
    assert accounting.gaussian_participation(deviation).epsilon(1e-6) == pytest.approx(
        epsilon, rel=0.01
    )


@pytest.mark.parametrize("parties", [2, 3, 7])
def test_a_sum_of_the_least_noise_is_discrete_gaussian(parties: int) -> None:
    variance = discrete_gaussian.MIN_VARIANCE
    k = np.arange(-200, 201).astype(float)
    one = np.exp(-(k**2) / (2 * variance))
    total = one / one.sum()
    for _ in range(parties - 1):
        total = np.convolve(total, one / one.sum(), mode="same")
    due = np.exp(-(k**2) / (2 * parties * variance))
    near = abs(k) < 6 * math.sqrt(parties * variance)
    np.testing.assert_allclose(total[near], (due / due.sum())[near], rtol=1e-12)


def test_gaussian_noise_that_is_smoothed_is_discrete_gaussian() -> None:
    smooth, rest = discrete_gaussian.SMOOTHING, 21.0
    k, y = np.arange(-60, 61), np.linspace(-60, 60, 24_001)
    weights = np.exp(-((k[:, None] - y) ** 2) / (2 * smooth))
    of_y = np.exp(-(y**2) / (2 * rest))
    found = weights / weights.sum(axis=0) @ of_y
    due = np.exp(-(k**2) / (2 * (smooth + rest)))
    near = abs(k) <= 25
    np.testing.assert_allclose(
        found[near] / found.sum(), due[near] / due.sum(), rtol=1e-9, atol=1e-12
    )


# The grid


@given(st.integers(1, 3000), st.floats(1e-3, 1e3), st.floats(0.3, 30), st.integers(2, 500))
@settings(max_examples=60, deadline=None)
def test_no_input_leaves_the_sensitivity_of_a_narrow_grid(
    size: int, scale: float, noise: float, cohort: int
) -> None:
    grid = NarrowGrid(size, 1.0, noise, cohort, cohort=cohort)
    rng = np.random.default_rng(size)
    values = grid.rounded(rng.normal(size=size) * scale, rng.bytes(SECRET_BYTES))
    assert int(values @ values) <= grid.squared_sensitivity
    assert math.sqrt(grid.squared_sensitivity) * grid.step == pytest.approx(grid.clip)
    assert abs(values).max() <= grid.largest
    counted = cohort * grid.variance - discrete_gaussian.SMOOTHING
    assert counted >= noise**2 * grid.squared_sensitivity * (1 - 1e-12)
    assert grid.variance >= discrete_gaussian.MIN_VARIANCE
    noised = values + grid.noise(rng.bytes(SECRET_BYTES))
    assert abs(noised).max() <= grid.bound
    room = grid.sum_bound(cohort) - cohort * grid.largest
    assert 2 * math.exp(-(room**2) / (2 * cohort * grid.variance)) <= 2 * math.exp(-SUM_TAIL)


def test_a_narrow_grid_is_that_of_the_specification() -> None:
    """S, v, Q, the bound of `values`, and one client's, by SPEC-payload.md, "Privacy"."""

    def figures(grid: NarrowGrid) -> tuple[int, ...]:
        bound = grid.vector("values", grid.cohort).bound
        return grid.squared_sensitivity, grid.variance, grid.largest, bound, grid.bound

    assert figures(NarrowGrid(1000, 0.5, 2.5, 70, cohort=100)) == (2250, 201, 6, 19, 207)
    assert figures(NarrowGrid(20, 0.5, 1.0, 900, cohort=1000)) == (7200, 9, 76, 77, 119)


def test_a_narrow_grid_takes_fewer_bits_and_adds_no_more_noise() -> None:
    wide, narrow = Grid(1000, 1.0, 4.0, 90), NarrowGrid(1000, 1.0, 4.0, 90, cohort=100)
    bits = [math.log2(2 * each.sum_bound(100)) for each in (wide, narrow)]
    assert bits[1] < bits[0] - 3
    errors = [math.sqrt(each.variance) * each.step for each in (wide, narrow)]
    assert errors[1] < errors[0]


def test_numbers_at_the_clip_of_a_narrow_grid_lose_a_tenth_at_most() -> None:
    rng = np.random.default_rng(4)
    grid, numbers = NarrowGrid(2000, 0.5, 4.0, 10, cohort=12), rng.normal(size=2000)
    values = grid.rounded(numbers, secret_of(2)) * grid.step
    kept = values @ numbers / np.linalg.norm(numbers)
    assert 0.45 < kept <= 0.5


@given(st.integers(1, 3000), st.floats(1e-3, 1e3), st.integers(0, 2**32), st.booleans())
@settings(max_examples=60, deadline=None)
def test_no_input_leaves_the_sensitivity(
    size: int, scale: float, seed: int, is_spike: bool
) -> None:
    grid = Grid(size, 1.0, 1.0, 10)
    rng = np.random.default_rng(seed)
    numbers = rng.normal(size=size) * scale
    if is_spike:
        numbers[0] = 1e30
    values = grid.rounded(numbers, rng.bytes(SECRET_BYTES))
    assert int(values @ values) <= grid.squared_sensitivity
    assert abs(values).max() <= grid.largest
    noised = values + grid.noise(rng.bytes(SECRET_BYTES))
    assert abs(noised).max() <= grid.bound


def test_numbers_within_the_clip_are_rounded_without_bias() -> None:
    grid, rng = Grid(500, 1.0, 4.0, 10), np.random.default_rng(1)
    numbers = rng.normal(size=500) * 0.02
    mean = np.mean([grid.rounded(numbers, rng.bytes(SECRET_BYTES)) for _ in range(400)], axis=0)
    np.testing.assert_allclose(mean * grid.step, numbers, atol=5 * 0.5 * grid.step / 20)


def test_numbers_beyond_the_clip_are_scaled_to_it() -> None:
    grid, numbers = Grid(2000, 0.5, 4.0, 10), np.full(2000, 3.0)
    values = grid.rounded(numbers, secret_of(2)) * grid.step
    assert np.linalg.norm(values) == pytest.approx(0.5, rel=0.05)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_number_that_is_none_is_refused(value: float) -> None:
    with pytest.raises(InvalidUpdate, match="not finite"):
        Grid(3, 1.0, 1.0, 10).rounded(np.array([0.0, value, 1.0]), secret_of(0))


# Terms


def test_terms_whose_noise_is_too_small_are_refused_with_what_would_do() -> None:
    with pytest.raises(ValidationError, match=r"raise noise_multiplier to 2\.01\d+"):
        PrivacyTerms(clip=1, noise_multiplier=0.5, participations=10, epsilon=8)
    terms = PrivacyTerms(clip=1, noise_multiplier=2.02, participations=10, epsilon=8)
    assert 7.9 < terms.spent(10) <= 8


@pytest.mark.parametrize(
    "wrong",
    [
        {"clip": 0},
        {"clip": math.nan},
        {"noise_multiplier": 0},
        {"participations": 0},
        {"epsilon": 70333, "noise_multiplier": 0.01},
        {"delta": 0},
        {"strength": 1},
    ],
)
def test_terms_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        PrivacyTerms(**{**PRIVATE, **wrong})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"lane": "clear", "masking": None, "previous_model": None}, "in the clear lane"),
        ({"masking": {"max_weight": 5}}, "leave max_weight out"),
        ({"report": ["loss"]}, "sent without noise"),
        ({"client_terms": {"control": {"scale": 1.0}}}, "control variates"),
        ({"masking": {"corrupt": 0.4, "adversary": "semi-honest"}}, "raise cohort.minimum"),
        ({"profiles": [{"name": "a", "compressor": {"id": "topk", "fraction": 0.1}}]}, "commute"),
    ],
)
def test_a_plan_that_cannot_be_private_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(IncompatiblePlan, match=reason):
        made_plan(SHARED, privacy=PRIVATE, **changes)


def test_a_plan_without_terms_is_what_it_was_before_there_were_any() -> None:
    plan = made_plan(SHARED)
    assert "privacy" not in plan.to_json()
    private = made_plan(SHARED, privacy=PRIVATE)
    assert RoundPlan.from_json(private.to_json()) == private
    assert private.digest != plan.digest
    assert PrivacyStatus.of(plan, 1) is None
    spent = PrivacyStatus.of(private, 1)
    assert spent is not None
    assert spent.participations == 1


@pytest.mark.parametrize(
    ("minimum", "maximum", "adversary", "least"),
    [
        (15, 20, "malicious", 13),
        (15, 20, "semi-honest", 13),
        (100, 100, "malicious", 90),
        (180, 200, "malicious", 82),
        (180, 200, "semi-honest", 160),
        (1, 20, "malicious", 0),
    ],
)
def test_noise_is_shared_by_survivors_that_are_surely_honest(
    minimum: int, maximum: int, adversary: Adversary, least: int
) -> None:
    assert honest_survivors(minimum, maximum, corrupt=0.1, adversary=adversary) == least


# Under masks


@pytest.mark.parametrize("name", METHODS)
def test_a_sum_with_discrete_gaussian_noise_is_exact_in_fewer_bits(name: str) -> None:
    narrow, wide = private_payload(name, noise="discrete_gaussian"), private_payload(name)
    grid, clients = narrow.grid, 7
    assert grid is not None
    made = [narrow.compress(some_update(i), 10, {}, secret_of(i)) for i in range(clients)]
    assert narrow.packing.num_bytes < wide.packing.num_bytes
    words = np.sum([narrow.packing.pack(each.integers) for each in made], axis=0)
    sums = narrow.packing.unpack(words)["values"]
    np.testing.assert_array_equal(sums, sum(each.integers["values"] for each in made))
    plain = [narrow._map.project(each.update.dense()) for each in made]
    found = narrow.decompress({"values": sums}, clients)
    error = (found.numbers - np.mean(plain, axis=0)) * clients / grid.step
    if name not in ("powersgd_onesided", "count_sketch", "randomk scaled"):  # lift, project: not 1
        assert np.var(error) == pytest.approx(clients * grid.variance, rel=0.35)
    with pytest.raises(InvalidUpdate, match="not a valid sum of 3"):
        narrow.decompress({"values": np.full(sums.size, grid.sum_bound(3) + 1)}, 3)


def test_terms_with_discrete_gaussian_noise_spend_what_gaussian_noise_does() -> None:
    shared = PrivacyTerms(**PRIVATE, noise="discrete_gaussian")
    assert shared.spent(1) == PrivacyTerms(**PRIVATE, lane="central").spent(1)
    assert shared.spent(1) < PrivacyTerms(**PRIVATE).spent(1)
    assert 'noise"' not in PrivacyTerms(**PRIVATE).model_dump_json()
    assert PrivacyTerms.model_validate_json(shared.model_dump_json()) == shared
    with pytest.raises(ValidationError, match="discrete_gaussian noise in the central lane"):
        PrivacyTerms(**PRIVATE, lane="central", noise="discrete_gaussian")


def private_payload(name: str = "shared_support", **terms: Any) -> Payload:
    plan = made_plan(METHODS[name], privacy={**PRIVATE, **terms})
    return Payload(plan, plan.public(SPEC, {"previous": KNOWN}))


@pytest.mark.parametrize("name", METHODS)
def test_the_sum_has_the_noise_of_all_survivors_and_the_mean_is_of_what_was_sent(name: str) -> None:
    payload = private_payload(name)
    grid = payload.grid
    assert grid is not None
    made = [payload.compress(some_update(i), 10, {}, secret_of(i)) for i in range(7)]
    found = summed(payload, made)
    plain = [payload._map.project(each.update.dense()) for each in made]
    error = (found.numbers - np.mean(plain, axis=0)) * 7 / grid.step
    assert grid.shares == 4  # of 5 survivors in a cohort of 10, 10 % corrupt
    if name not in ("powersgd_onesided", "count_sketch", "randomk scaled"):  # lift, project: not 1
        assert np.var(error) == pytest.approx(7 * grid.variance, rel=0.35)
    assert 7 * grid.variance > 1.0**2 * grid.squared_sensitivity
    assert (found.num_clients, found.num_examples, found.report) == (7, 7, {})


def test_nothing_but_noised_values_is_in_the_sum() -> None:
    assert [vector.name for vector in private_payload().vectors] == ["values"]


def test_what_a_client_takes_for_sent_has_no_noise_in_it() -> None:
    payload, update = private_payload(), some_update(4)
    twice = [payload.compress(update, 10, {}, secret_of(4)) for _ in range(2)]
    np.testing.assert_array_equal(twice[0].update.dense(), twice[1].update.dense())
    assert (twice[0].integers["values"] != twice[1].integers["values"]).any()


def test_an_update_beyond_the_clip_is_clipped_where_it_is_sent() -> None:
    payload = private_payload(clip=0.001)
    sent = payload.compress(some_update(1), 10, {}, secret_of(1)).update.dense()
    assert 0 < np.linalg.norm(sent) <= 0.00105


def test_a_sum_beyond_what_clients_can_send_is_refused() -> None:
    payload = private_payload()
    assert payload.grid is not None
    wrong = np.full(payload.vectors[0].length, 3 * payload.grid.bound + 1)
    with pytest.raises(InvalidUpdate, match="not a valid sum of 3"):
        payload.decompress({"values": wrong}, 3)


def test_a_rounding_that_never_keeps_the_norm_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid_module, "_TRIES", 0)
    with pytest.raises(InvalidUpdate, match="no rounding of the update keeps its norm"):
        Grid(10, 1.0, 1.0, 10).rounded(np.ones(10), bytes(SECRET_BYTES))
    with pytest.raises(InvalidUpdate, match="no rounding of the update keeps its norm"):
        NarrowGrid(10, 1.0, 1.0, 10, cohort=10).rounded(np.ones(10), bytes(SECRET_BYTES))
