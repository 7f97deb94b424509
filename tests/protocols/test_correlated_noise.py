"""Correlated noise: the sensitivity and the error of the mechanism, against other computations."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from scipy import linalg, optimize, signal

from fedpress_protocols.plan import PrivacyTerms
from fedpress_protocols.privacy import accounting, correlated

# jax-privacy 2.0.0: matrix_factorization.toeplitz with noising_coef as `coefficients` has them:
# rounds, separation, participations, bands, the root of minsep_sensitivity_squared, the root of the
# mean of per_query_error.
JAX_PRIVACY = [
    (100, 10, 10, 2, 3.654694, 3.657185),
    (100, 10, 10, 4, 4.245698, 2.454977),
    (100, 10, 10, 8, 5.336322, 1.890801),
    (100, 100, 1, 4, 1.273736, 2.454977),
    (100, 100, 1, 16, 1.453158, 1.625933),
    (200, 5, 40, 4, 10.087528, 3.303168),
    (500, 50, 10, 8, 4.338158, 3.515305),
    (500, 50, 10, 16, 4.756282, 2.614162),
    (1000, 10, 100, 4, 13.501277, 7.069255),
    (1000, 10, 100, 16, 23.371043, 3.471795),
    (1000, 100, 10, 16, 4.604769, 3.471795),
    (2000, 20, 100, 8, 14.647734, 6.728126),
    (2000, 20, 100, 16, 18.314076, 4.742295),
    (2000, 400, 5, 16, 3.24937, 4.742295),
]

# The same library's optimize_banded_toeplitz(n, bands): rounds, separation, participations, bands
# of the strategy, and the root mean square error at noise multiplier 1.
BANDED = [
    (100, 100, 1, 16, 2.663),
    (500, 50, 10, 16, 14.868),
    (1000, 10, 100, 8, 83.516),
    (1000, 100, 10, 16, 19.853),
    (2000, 20, 100, 16, 85.346),
    (2000, 400, 5, 16, 19.084),
]


def noising(bands: int, rounds: int) -> np.ndarray:
    """D, dense."""
    column = np.zeros(rounds)
    column[: min(bands, rounds)] = correlated.coefficients(bands)[:rounds]
    return linalg.toeplitz(column, np.zeros(rounds))


def matrices(bands: int, rounds: int) -> tuple[np.ndarray, np.ndarray]:
    """D and C, dense."""
    made = noising(bands, rounds)
    return made, linalg.inv(made)


def patterns(rounds: int, separation: int, participations: int) -> list[tuple[int, ...]]:
    return [
        each
        for count in range(1, participations + 1)
        for each in itertools.combinations(range(rounds), count)
        if all(b - a >= separation for a, b in itertools.pairwise(each))
    ]


@pytest.mark.parametrize(("rounds", "separation", "participations", "bands"), [
    (12, 1, 4, 3), (12, 2, 3, 1), (12, 2, 4, 4), (12, 3, 3, 2), (12, 4, 3, 6), (10, 5, 2, 10),
])  # fmt: skip
def test_no_pattern_of_participation_moves_more_than_the_sensitivity(
    rounds: int, separation: int, participations: int, bands: int
) -> None:
    """Of any signs and directions: the updates of the worst pattern are equal."""
    _, strategy = matrices(bands, rounds + 60)
    claimed = correlated.sensitivity(bands, separation, participations)
    rng, worst = np.random.default_rng(1), 0.0
    for pattern in patterns(rounds, separation, participations):
        columns = strategy[:, list(pattern)]
        worst = max(worst, float(np.linalg.norm(columns.sum(axis=1))))
        updates = rng.normal(size=(len(pattern), 3))
        updates /= np.linalg.norm(updates, axis=1, keepdims=True)
        assert np.linalg.norm(columns @ updates) <= claimed
    assert worst == pytest.approx(claimed, rel=1e-3)
    assert worst <= claimed


@pytest.mark.parametrize("bands", [2, 3, 5, 8])
def test_noise_that_begins_anew_costs_no_more(bands: int) -> None:
    """The strategy of a task whose noise began anew is one of blocks."""
    claimed = correlated.sensitivity(bands, 2, 5)
    for first in range(1, 12):
        blocks = [matrices(bands, size)[1] for size in (first, 12 - first)]
        strategy = linalg.block_diag(*blocks)
        for pattern in patterns(12, 2, 5):
            assert np.linalg.norm(strategy[:, list(pattern)].sum(axis=1)) <= claimed


MANY = (96, 133, 190, 256, 376, correlated.MAX_BANDS)


def column_of(bands: int, rounds: int) -> np.ndarray:
    """The first column of C, by the recurrence of its entries."""
    first = np.zeros(rounds)
    first[0] = 1
    return np.asarray(signal.lfilter([1.0], correlated.coefficients(bands), first))


@pytest.mark.parametrize("bands", [*range(1, 65), *MANY])
def test_the_entries_of_the_strategy_fall_from_one_and_are_none_below_zero(bands: int) -> None:
    column = column_of(bands, max(400, 24 * bands))
    assert column[0] == 1
    assert (np.diff(column) <= 1e-15).all()
    assert (column >= 0).all()
    assert column.sum() <= correlated.gain(bands) * (1 + 1e-12)


@pytest.mark.parametrize("bands", [1, 2, 3, 17, 64, *MANY])
@pytest.mark.parametrize(("separation", "participations"), [(1, 1), (1, 7), (13, 4), (700, 3)])
def test_the_sensitivity_is_that_of_the_columns(
    bands: int, separation: int, participations: int
) -> None:
    rounds = 40 * bands + separation * participations
    column, moved = column_of(bands, rounds), np.zeros(rounds)
    for number in range(participations):
        start = number * separation
        moved[start:] += column[: rounds - start]
    claimed = correlated.sensitivity(bands, separation, participations)
    assert claimed == pytest.approx(np.linalg.norm(moved), rel=1e-8)
    assert claimed >= np.linalg.norm(moved)


def least_noise(rounds: int, bands: int) -> float:
    """Of any lower-triangular Toeplitz matrix C of so many bands and with ones on its diagonal, the
    least product of its first column's norm and the error of its inverse: by descent from the
    square root."""
    length = 1 << (2 * rounds).bit_length()
    weights = np.arange(rounds, 0, -1) / rounds

    def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.fft.irfft(np.fft.rfft(a, length) * np.fft.rfft(b, length), length)[:rounds]

    def log_noise(tail: np.ndarray) -> tuple[float, np.ndarray]:
        column = np.concatenate([[1.0], tail])
        noising, size = np.ones(1), 1
        while size < rounds:  # Newton's iteration for the inverse of a power series
            size = min(2 * size, rounds)
            noising = (
                2 * np.pad(noising, (0, size - noising.size))
                - product(column[:size], product(noising, noising))[:size]
            )
        sums = np.cumsum(noising)
        error, norm = weights @ sums**2, column @ column
        by_noising = np.cumsum((weights * sums)[::-1]) / error
        slope = column / norm - product(by_noising, product(noising, noising))[::-1][:bands]
        return (math.log(error) + math.log(norm)) / 2, slope[1:]

    steps = np.arange(1, bands)
    start = np.cumprod((steps - 0.5) / steps)
    options = {"maxiter": 500, "maxfun": 1000}
    found = optimize.minimize(log_noise, start, jac=True, method="L-BFGS-B", options=options)
    return math.exp(found.fun)


@pytest.mark.parametrize("rounds", [100, 200, 500, 1000, 2000])
def test_one_participation_has_the_noise_of_the_best_matrix_to_a_hundredth(rounds: int) -> None:
    """The best Toeplitz matrix's to 1 % and, by the nuclear norm of the matrix of prefix sums, that
    of any factorisation to 8 % (Henzinger, Upadhyay and Upadhyay 2023, arXiv:2211.05006)."""
    bands = correlated.best_bands(rounds, 1, rounds)
    noise = correlated.sensitivity(bands, rounds, 1) * correlated.prefix_error(bands, rounds)
    odd = 2 * np.arange(1, rounds + 1) - 1
    any_factorisation = np.sum(0.5 / np.sin(odd * math.pi / (4 * rounds + 2))) / rounds
    best = least_noise(rounds, rounds)
    assert any_factorisation < best < noise < 1.01 * best
    assert noise < 1.08 * any_factorisation
    few = correlated.best_bands(rounds, 1, rounds, 64)
    assert few <= 64
    more = correlated.sensitivity(few, rounds, 1) * correlated.prefix_error(few, rounds)
    assert (more > 1.1 * best) == (rounds >= 1000)


@pytest.mark.parametrize(("rounds", "separation", "participations", "most"), [
    (100, 50, 2, 1.03), (1000, 500, 2, 1.03), (1000, 250, 4, 1.05), (1000, 100, 10, 1.08),
    (2000, 400, 5, 1.06), (2000, 20, 100, 1.085),
])  # fmt: skip
def test_several_participations_have_little_more_noise_than_a_strategy_of_bands(
    rounds: int, separation: int, participations: int, most: float
) -> None:
    """One whose columns do not overlap where a device takes part, of as many bands as devices rest
    for: it moves by the root of the participations times a column's norm."""
    bands = correlated.best_bands(separation, participations, rounds)
    noise = correlated.sensitivity(bands, separation, participations)
    noise *= correlated.prefix_error(bands, rounds)
    best = math.sqrt(participations) * least_noise(rounds, separation)
    assert best < noise < most * best


def test_no_more_bands_are_taken_than_half_a_percent_needs() -> None:
    for separation, participations, rounds in ((4, 8, 32), (10, 10, 100), (500, 2, 1000)):
        noise = [
            correlated.sensitivity(bands, separation, participations)
            * correlated.prefix_error(bands, rounds)
            for bands in range(1, min(rounds, correlated.MAX_BANDS) + 1)
        ]
        first = next(bands for bands, each in enumerate(noise, 1) if each <= 1.005 * min(noise))
        assert correlated.best_bands(separation, participations, rounds) == first


@pytest.mark.parametrize(
    ("rounds", "separation", "participations", "bands", "sensitivity", "error"), JAX_PRIVACY
)
def test_the_mechanism_is_that_of_jax_privacy(
    rounds: int, separation: int, participations: int, bands: int, sensitivity: float, error: float
) -> None:
    """Its sensitivity is of so many rounds, this one of a task of any length: never less."""
    ours = correlated.sensitivity(bands, separation, participations)
    assert sensitivity <= ours * (1 + 1e-6)
    assert ours == pytest.approx(sensitivity, rel=0.01)
    assert correlated.prefix_error(bands, rounds) == pytest.approx(error, rel=1e-5)


@pytest.mark.parametrize(("rounds", "separation", "participations", "bands", "error"), BANDED)
def test_the_error_is_within_a_fiftieth_of_an_optimal_banded_strategy(
    rounds: int, separation: int, participations: int, bands: int, error: float
) -> None:
    best = min(
        correlated.sensitivity(each, separation, participations)
        * correlated.prefix_error(each, rounds)
        for each in range(1, bands + 1)
    )
    assert best <= 1.02 * error


def test_the_error_is_the_dense_one() -> None:
    for bands, rounds in ((1, 20), (4, 3), (4, 50), (16, 300)):
        noising, _ = matrices(bands, rounds)
        sums = np.tril(np.ones((rounds, rounds))) @ noising
        dense = math.sqrt(np.sum(sums**2) / rounds)
        assert correlated.prefix_error(bands, rounds) == pytest.approx(dense)


def test_the_best_bands_have_less_error_than_independent_noise_where_devices_rest() -> None:
    def error(bands: int, separation: int, participations: int, rounds: int) -> float:
        noise = correlated.sensitivity(bands, separation, participations)
        return noise * correlated.prefix_error(bands, rounds)

    assert correlated.best_bands(1, 8, 8) == 1
    for case in ((4, 8, 32), (10, 10, 100), (100, 10, 1000)):
        best = correlated.best_bands(*case)
        assert best > 1
        assert error(best, *case) < 0.66 * error(1, *case)


TERMS: dict[str, Any] = {
    "lane": "central", "clip": 0.5, "noise_multiplier": 2.0, "participations": 10, "epsilon": 30.0,
    "bands": 4, "separation": 10,
}  # fmt: skip


@pytest.mark.parametrize(
    ("noise", "count", "bands", "separation"), [(1.0, 1, 4, 1), (2.0, 10, 4, 10), (3.0, 5, 16, 20)]
)
def test_epsilon_is_that_of_a_gaussian_mechanism_of_the_dense_sensitivity(
    noise: float, count: int, bands: int, separation: int
) -> None:
    _, strategy = matrices(bands, count * separation + 600)
    moved = float(np.linalg.norm(strategy[:, : count * separation : separation].sum(axis=1)))
    terms = {**TERMS, "noise_multiplier": noise, "bands": bands, "separation": separation}
    spent = PrivacyTerms(**{**terms, "participations": count}).spent(count)
    assert spent == pytest.approx(accounting.gaussian_epsilon(moved / noise, 1e-5), rel=1e-6)


def test_terms_without_correlation_are_written_as_before() -> None:
    plain = PrivacyTerms(**{**TERMS, "bands": 1, "separation": 1})
    assert not {"bands", "separation"} & set(plain.model_dump())
    assert PrivacyTerms(**TERMS).model_dump()["separation"] == 10
    assert plain.spent(10) < PrivacyTerms(**TERMS).spent(10)
    assert PrivacyTerms(**TERMS).spent(0) == 0


def test_terms_name_the_noise_that_the_correlation_needs() -> None:
    with pytest.raises(ValidationError, match="raise noise_multiplier to"):
        PrivacyTerms(**{**TERMS, "epsilon": 4.0})
    noise = accounting.noise_multiplier_for(
        4.0, 1e-5, 10, accounting.participation("central", 4, 10, 10)
    )
    terms = PrivacyTerms(**{**TERMS, "epsilon": 4.0, "noise_multiplier": noise})
    assert 3.99 < terms.spent(10) <= 4.0


# dp-accounting 0.6.0, PLDAccountant of one GaussianDpEvent: the noise multiplier over the root of
# jax-privacy's minsep_sensitivity_squared.
DP_ACCOUNTING = [
    (2.0, 10, 4, 10, 1e-5, 10.76404),
    (3.0, 5, 16, 20, 1e-6, 6.55428),
    (1.5, 1, 8, 1, 1e-5, 3.94057),
    (6.0, 40, 6, 5, 1e-7, 12.24513),
    (4.0, 20, 12, 50, 1e-5, 7.6725),
]


@pytest.mark.parametrize(
    ("noise", "count", "bands", "separation", "delta", "epsilon"), DP_ACCOUNTING
)
def test_epsilon_is_that_of_dp_accounting(
    noise: float, count: int, bands: int, separation: int, delta: float, epsilon: float
) -> None:
    fields = {"noise_multiplier": noise, "participations": count, "delta": delta}
    terms = PrivacyTerms(**{**TERMS, **fields, "bands": bands, "separation": separation})
    assert terms.spent(count) == pytest.approx(epsilon, rel=1e-3)
