"""Correlated noise: the sensitivity and the error of the mechanism, against other computations."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from scipy import linalg, optimize

from fedpress_protocols.plan import PrivacyTerms
from fedpress_protocols.privacy import accounting, correlated
from fedpress_protocols.privacy.correlated import Correlation

# jax-privacy 2.0.0, root mean square error at noise multiplier 1 of
# optimize_banded_toeplitz(rounds, separation), 1,000 steps, and of
# buffered_toeplitz.optimize(error="mean"), by minsep_sensitivity_squared and per_query_error:
# rounds, separation, participations, both errors.
JAX_PRIVACY = [
    (100, 100, 1, 2.31932, 2.32078),
    (100, 50, 2, 3.32464, 3.43322),
    (100, 20, 5, 5.73678, 6.02752),
    (100, 10, 10, 9.31766, 9.89352),
    (500, 250, 2, 4.04428, 4.12028),
    (500, 50, 10, 10.8824, 11.49818),
    (1000, 1000, 1, 3.04905, 3.05108),
]

# dp-accounting 0.6.0, PLDAccountant of one GaussianDpEvent of the noise multiplier over the norm of
# a column by the root of the count: noise multiplier, count, the correlation, delta, epsilon.
DP_ACCOUNTING = [
    (2.0, 10, (10, 100, 1.2, 1.03), 1e-5, 12.88704),
    (3.0, 5, (20, 100, 1.1, 1.008), 1e-6, 5.69181),
    (1.5, 1, (100, 100, 1.066, 0.99), 1e-5, 4.40443),
    (6.0, 40, (5, 200, 1.3, 1.05), 1e-7, 8.82392),
    (4.0, 20, (50, 1000, 1.168, 1.009), 1e-5, 10.12104),
]


def made(separation: int, rounds: int, weight: float = 1.2, decay: float = 1.01) -> Correlation:
    return Correlation(separation=separation, rounds=rounds, weight=weight, decay=decay)


def strategy(correlation: Correlation, rounds: int) -> np.ndarray:
    """C, dense, of so many rounds without a new beginning."""
    column = np.zeros(rounds)
    length = min(correlation.separation, correlation.rounds, rounds)
    column[0] = 1.0
    for index in range(1, length):
        root = math.prod((step - 0.5) / step for step in range(1, index + 1))
        column[index] = correlation.weight * root * correlation.decay**index
    return np.asarray(linalg.toeplitz(column, np.zeros(rounds)))


def blocks(correlation: Correlation, rounds: int) -> np.ndarray:
    """C, dense, of a task whose noise begins again after each `correlation.rounds`."""
    starts = range(0, rounds, correlation.rounds)
    sizes = [min(correlation.rounds, rounds - start) for start in starts]
    return np.asarray(linalg.block_diag(*(strategy(correlation, size) for size in sizes)))


def patterns(rounds: int, separation: int, participations: int) -> list[tuple[int, ...]]:
    return [
        each
        for count in range(1, participations + 1)
        for each in itertools.combinations(range(rounds), count)
        if all(b - a >= separation for a, b in itertools.pairwise(each))
    ]


@pytest.mark.parametrize(("separation", "rounds", "participations"), [
    (2, 12, 4), (3, 12, 3), (4, 12, 3), (4, 5, 3), (3, 2, 4), (5, 12, 2), (12, 12, 1), (20, 12, 1),
])  # fmt: skip
def test_no_pattern_of_participation_moves_more_than_the_sensitivity(
    separation: int, rounds: int, participations: int
) -> None:
    """Of any signs and directions, and however often the noise begins again."""
    correlation = made(separation, rounds)
    dense = blocks(correlation, 12)
    rng, worst = np.random.default_rng(1), 0.0
    for pattern in patterns(12, separation, participations):
        claimed = correlation.sensitivity * math.sqrt(len(pattern))
        updates = rng.normal(size=(len(pattern), 3))
        updates /= np.linalg.norm(updates, axis=1, keepdims=True)
        moved = float(np.linalg.norm(dense[:, list(pattern)] @ updates))
        assert moved <= claimed
        worst = max(worst, moved / claimed)
    assert worst == pytest.approx(1.0, rel=1e-8)


@pytest.mark.parametrize("first", range(1, 12))
def test_noise_that_begins_again_at_any_round_costs_no_more(first: int) -> None:
    correlation = made(2, 12)
    dense = linalg.block_diag(*(strategy(correlation, size) for size in (first, 12 - first)))
    for pattern in patterns(12, 2, 5):
        moved = np.linalg.norm(dense[:, list(pattern)].sum(axis=1))
        assert moved <= correlation.sensitivity * math.sqrt(len(pattern))


@pytest.mark.parametrize(("separation", "rounds"), [(2, 9), (10, 100), (100, 30), (700, 900)])
def test_the_noise_is_made_by_the_inverse_of_the_strategy(separation: int, rounds: int) -> None:
    correlation = made(separation, rounds, 1.05, 1.0001)
    product = strategy(correlation, rounds) @ correlation.noising
    np.testing.assert_allclose(product, np.eye(rounds)[0], rtol=0, atol=1e-12)
    dense = strategy(correlation, rounds)
    assert correlation.gain >= np.linalg.norm(dense, 2)
    assert correlation.gain == pytest.approx(dense[:, 0].sum())


def test_factors_are_the_same_bits_on_every_machine() -> None:
    """They are made by single additions and products in one order: here once more, one by one."""
    correlation = made(4, 9)
    column = [1.0]
    root = 1.2
    for step in range(1, 4):
        factor = (step - 0.5) / step * 1.01
        root = factor if step == 1 else root * factor
        column.append(1.2 * root)
    factors = [1.0]
    for index in range(1, 9):
        total = 0.0
        for earlier in range(max(0, index - 3), index):
            total -= factors[earlier] * column[index - earlier]
        factors.append(total)
    assert correlation.noising.tolist() == factors


@pytest.mark.parametrize(("rounds", "own"), [(20, 20), (50, 20), (60, 20), (7, 20), (300, 128)])
def test_the_error_is_the_dense_one_with_every_new_beginning(rounds: int, own: int) -> None:
    correlation = made(8, own, 1.1, 1.02)
    sums = np.tri(rounds) @ linalg.inv(blocks(correlation, rounds))
    dense = math.sqrt(np.sum(sums**2) / rounds)
    assert correlation.prefix_error(rounds) == pytest.approx(dense)
    independent = math.sqrt(np.sum(np.tri(rounds) ** 2) / rounds)
    assert correlated.independent_error(rounds) == pytest.approx(independent)


def noise(correlation: Correlation, rounds: int) -> float:
    return correlation.sensitivity * correlation.prefix_error(rounds)


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


@pytest.mark.parametrize("rounds", [100, 500, 2000])
def test_one_participation_has_the_noise_of_the_best_matrix(rounds: int) -> None:
    """The best Toeplitz matrix's to 0.3 % and, by the nuclear norm of the matrix of prefix sums,
    that of any factorisation to 7 % (Henzinger, Upadhyay and Upadhyay 2023, arXiv:2211.05006)."""
    ours = noise(correlated.best(rounds, rounds), rounds)
    odd = 2 * np.arange(1, rounds + 1) - 1
    any_factorisation = np.sum(0.5 / np.sin(odd * math.pi / (4 * rounds + 2))) / rounds
    best = least_noise(rounds, rounds)
    assert any_factorisation < best < ours < 1.003 * best
    assert ours < 1.07 * any_factorisation


@pytest.mark.parametrize(("rounds", "separation"), [
    (32, 4), (100, 50), (1000, 100), (1000, 10), (2000, 200),
])  # fmt: skip
def test_several_participations_have_the_noise_of_the_best_strategy_of_bands(
    rounds: int, separation: int
) -> None:
    """To 0.5 %: of as many bands as devices rest for, whose columns do not overlap."""
    best = least_noise(rounds, separation)
    assert best < noise(correlated.best(separation, rounds), rounds) < 1.005 * best


def test_a_separation_of_few_rounds_in_a_long_task_costs_under_a_hundredth() -> None:
    assert noise(correlated.best(20, 2000), 2000) < 1.0075 * least_noise(2000, 20)


def test_no_correlation_near_the_best_has_less_noise() -> None:
    best = correlated.best(10, 100)
    least, rng = noise(best, 100), np.random.default_rng(2)
    for by_weight, by_decay in rng.normal(0, [0.03, 0.003], (100, 2)):
        near = made(10, 100, best.weight + by_weight, best.decay + by_decay)
        assert noise(near, 100) > least * (1 - 1e-4)


def test_draws_are_of_so_many_rounds_at_most_and_fewer_leave_more_noise() -> None:
    all_of_them, few = correlated.best(100, 1000), correlated.best(100, 1000, 250)
    assert (all_of_them.rounds, few.rounds) == (1000, 250)
    assert noise(all_of_them, 1000) < noise(few, 1000) < 1.3 * noise(all_of_them, 1000)
    assert correlated.best(100, 10**6).rounds == correlated.MAX_ROUNDS
    assert correlated.best(2, 1).rounds == 2


def test_correlated_noise_is_less_in_a_model_than_independent_noise() -> None:
    for separation, rounds in ((2, 2), (4, 32), (10, 100), (100, 1000), (5, 4)):
        ours = noise(correlated.best(separation, rounds), rounds)
        assert ours < correlated.independent_error(rounds)


@pytest.mark.parametrize(
    ("rounds", "separation", "participations", "banded", "buffered"), JAX_PRIVACY
)
def test_the_error_is_that_of_jax_privacy_to_half_a_percent(
    rounds: int, separation: int, participations: int, banded: float, buffered: float
) -> None:
    """Of its best banded strategy; of its buffered ones it is less, or as small for one
    participation."""
    ours = noise(correlated.best(separation, rounds), rounds) * math.sqrt(participations)
    assert banded * (1 - 1e-4) < ours < banded * 1.005
    assert ours < buffered * (1.003 if participations == 1 else 1.0)


TERMS: dict[str, Any] = {
    "lane": "central", "clip": 0.5, "noise_multiplier": 2.0, "participations": 10, "epsilon": 30.0,
    "correlation": {"separation": 10, "rounds": 100, "weight": 1.2, "decay": 1.03},
}  # fmt: skip


@pytest.mark.parametrize(
    ("noise", "count", "separation"), [(1.0, 1, 4), (2.0, 10, 10), (3.0, 5, 20)]
)
def test_epsilon_is_that_of_a_gaussian_mechanism_of_the_dense_sensitivity(
    noise: float, count: int, separation: int
) -> None:
    rounds = separation * (count + 1)
    correlation = made(separation, rounds)
    columns = strategy(correlation, rounds)[:, : count * separation : separation]
    moved = float(np.linalg.norm(columns.sum(axis=1)))
    fields = {"noise_multiplier": noise, "correlation": correlation, "participations": count}
    spent = PrivacyTerms(**{**TERMS, **fields}).spent(count)
    assert spent == pytest.approx(accounting.gaussian_epsilon(moved / noise, 1e-5), rel=1e-6)


def test_terms_without_correlation_are_written_as_before() -> None:
    terms, plain = PrivacyTerms(**TERMS), PrivacyTerms(**{**TERMS, "correlation": None})
    assert "correlation" not in plain.model_dump()
    assert terms.model_dump()["correlation"] == TERMS["correlation"]
    assert PrivacyTerms.model_validate_json(terms.model_dump_json()) == terms
    assert (plain.separation, terms.separation) == (1, 10)
    assert plain.spent(10) < terms.spent(10)
    assert terms.spent(0) == 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"weight": 1.9, "decay": 1.2}, "by up to 1.7e.03, more than 1; take both from"),
        ({"weight": 2, "decay": 2, "separation": 2048, "rounds": 2048}, "by up to nan, more"),
        ({"separation": 1}, "greater than or equal to 2"),
        ({"rounds": 2049}, "less than or equal to 2048"),
        ({"decay": math.nan}, "finite"),
        ({"bands": 4}, "Extra inputs are not permitted"),
    ],
)
def test_a_correlation_out_of_range_is_refused(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        PrivacyTerms(**{**TERMS, "correlation": {**TERMS["correlation"], **change}})


def test_terms_name_the_noise_that_the_correlation_needs() -> None:
    with pytest.raises(ValidationError, match="raise noise_multiplier to"):
        PrivacyTerms(**{**TERMS, "epsilon": 4.0})
    correlation = Correlation(**TERMS["correlation"])
    noise = accounting.noise_multiplier_for(
        4.0, 1e-5, 10, accounting.participation("central", correlation)
    )
    terms = PrivacyTerms(**{**TERMS, "epsilon": 4.0, "noise_multiplier": noise})
    assert 3.99 < terms.spent(10) <= 4.0


@pytest.mark.parametrize(("noise", "count", "correlation", "delta", "epsilon"), DP_ACCOUNTING)
def test_epsilon_is_that_of_dp_accounting(
    noise: float,
    count: int,
    correlation: tuple[int, int, float, float],
    delta: float,
    epsilon: float,
) -> None:
    fields = {"noise_multiplier": noise, "participations": count, "delta": delta}
    terms = PrivacyTerms(**{**TERMS, **fields, "correlation": made(*correlation)})
    assert terms.spent(count) == pytest.approx(epsilon, rel=1e-3)
