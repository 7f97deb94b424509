"""Noise that is correlated over rounds: fedpress's against the least that is known, by settings.

    python benchmarks/correlated_noise.py                  # the table of docs/privacy.md

For tasks of some rounds, in which a device takes part so many times at most, that many rounds
apart: the noise in the model, root mean square over the rounds, for the same epsilon, over that of
the best strategy whose matrix C is lower-triangular Toeplitz with as many bands as rounds lie
between participations (arXiv:2306.08153, Section 4), found by descent. Columns of one device then
have no row in common, so that its sensitivity is the root of the participations times a column's
norm. For one participation C has no zeros, and it is the best Toeplitz matrix. Compared with it:

- fedpress's, whose column is chosen by two numbers, `correlated.best`;
- a buffered linear Toeplitz matrix (BLT, arXiv:2404.16706 and 2408.08868): below its diagonal of
  ones, a column of C is the sum of `BUFFERS` decays, w_1 + w_2 + w_3, then w_1 q_1 + w_2 q_2 +
  w_3 q_3, and so on by powers of the q. A round's noise takes one draw and a vector that is kept
  for each decay. Weights are positive, so that columns fall and the worst devices take part as
  closely as they may; weights and decays are the best for the setting, found by descent.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from harness import parser, report
from scipy.optimize import minimize
from scipy.signal import lfilter

from fedpress_protocols.privacy import correlated

Floats = npt.NDArray[np.float64]
BUFFERS = 3
SETTINGS = (
    (100, 100, 1), (100, 50, 2), (100, 20, 5), (100, 10, 10),
    (500, 500, 1), (500, 250, 2), (500, 100, 5), (500, 50, 10),
    (1000, 1000, 1), (1000, 500, 2), (1000, 200, 5), (1000, 100, 10),
    (2000, 2000, 1), (2000, 1000, 2), (2000, 400, 5), (2000, 200, 10),
)  # fmt: skip


class Row(NamedTuple):
    """`ours` and `buffered` are noise over the best strategy's, `independent` is ours over that of
    noise which each round draws for itself."""

    rounds: int
    separation: int
    participations: int
    ours: float
    buffered: float
    independent: float


def inverse(column: Floats, length: int) -> Floats:
    """The first column [length] of the inverse of the Toeplitz matrix of a first `column`."""
    unit = np.zeros(length)
    unit[0] = 1.0
    return np.asarray(lfilter([1.0], column, unit))


def prefix_error(terms: Floats, rounds: int) -> float:
    """Root mean square noise of the sums up to each round, by noise of these `terms`."""
    whole = np.zeros(rounds)
    whole[: min(rounds, terms.size)] = terms[:rounds]
    return math.sqrt(float(np.cumsum(whole) ** 2 @ (rounds - np.arange(rounds))) / rounds)


def log_noise(
    column: Floats, rounds: int, separation: int, participations: int
) -> tuple[float, Floats]:
    """The logarithm of sensitivity times error of the strategy whose first column is this with
    zeros below, and its gradient; entries fall, or are zero from the separation on."""
    terms = inverse(column, rounds)
    sums, weights = np.cumsum(terms), rounds - np.arange(rounds)
    error = float(sums**2 @ weights)
    outer = 2 * np.cumsum((sums * weights)[::-1])[::-1]
    size = 2 * rounds
    squared = np.fft.irfft(np.fft.rfft(terms, size) ** 2, size)[:rounds]
    pulled = np.fft.irfft(np.fft.rfft(outer, size) * np.conj(np.fft.rfft(squared, size)), size)
    moved = np.zeros(participations * separation + column.size)
    starts = range(0, participations * separation, separation)
    for start in starts:
        moved[start : start + column.size] += column
    moved[rounds:] = 0
    norm = float(moved @ moved)
    slope = sum((moved[start : start + column.size] for start in starts), np.zeros(column.size))
    gradient = -pulled[: column.size] / (2 * error) + slope / norm
    return 0.5 * math.log(error * norm / rounds), gradient


def best_banded(separation: int, rounds: int) -> Floats:
    """The first column [separation] of the best banded strategy, 1 at the top."""
    steps = np.arange(1, separation)
    start = np.concatenate([[1.0], np.cumprod((steps - 0.5) / steps)])
    options = {"maxiter": 5000, "maxfun": 8000, "ftol": 1e-14, "gtol": 1e-10}
    setting = (rounds, rounds, 1)
    solution = minimize(log_noise, start, setting, "L-BFGS-B", jac=True, options=options)
    return np.asarray(solution.x / solution.x[0])


def buffered_column(weights: Floats, decays: Floats, length: int) -> Floats:
    """The first column of a BLT of these weights and decays: 1 and the sums of the decays."""
    powers = decays[:, None] ** np.arange(length - 1)
    return np.concatenate([[1.0], (weights[:, None] * powers).sum(axis=0)])


def best_buffered(rounds: int, separation: int, participations: int) -> tuple[Floats, Floats]:
    """The weights and the decays, `BUFFERS` each, of the best BLT: from decays over one to `rounds`
    rounds, and over a part of that."""

    def by_logarithms(x: Floats) -> tuple[float, Floats]:
        """Of the weights, and of the decays' odds."""
        weights, decays = np.exp(x[:BUFFERS]), 1 / (1 + np.exp(-x[BUFFERS:]))
        column = buffered_column(weights, decays, rounds)
        value, slope = log_noise(column, rounds, separation, participations)
        exponents = np.arange(rounds - 1)
        powers = decays[:, None] ** exponents
        by_weight = weights * (powers * slope[1:]).sum(axis=1)
        by_decay = weights * (1 - decays) * (powers * exponents * slope[1:]).sum(axis=1)
        return value, np.concatenate([by_weight, by_decay])

    tried = []
    bounds = [(-12.0, -0.7)] * BUFFERS + [(-4.0, 14.0)] * BUFFERS
    for longest in (rounds, rounds / 4, separation / 2):
        spans = np.geomspace(1, max(longest, 4), BUFFERS)
        start = np.concatenate([np.log(0.5 / BUFFERS / np.sqrt(1 + spans)), np.log(spans)])
        options = {"maxiter": 300, "ftol": 1e-11, "gtol": 1e-8}
        each = minimize(
            by_logarithms, start, method="L-BFGS-B", jac=True, bounds=bounds, options=options
        )
        tried.append((each.fun, each.x))
    best = min(tried, key=lambda each: each[0])[1]
    return np.exp(best[:BUFFERS]), 1 / (1 + np.exp(-best[BUFFERS:]))


def row_of(rounds: int, separation: int, participations: int) -> Row:
    own = correlated.best(separation, rounds)
    ours = own.sensitivity * own.prefix_error(rounds)
    column = best_banded(separation, rounds)
    best = float(np.linalg.norm(column)) * prefix_error(inverse(column, rounds), rounds)
    weights, decays = best_buffered(rounds, separation, participations)
    whole = buffered_column(weights, decays, rounds)
    buffered = math.exp(log_noise(whole, rounds, separation, participations)[0])
    return Row(
        rounds,
        separation,
        participations,
        ours / best,
        buffered / best / math.sqrt(participations),
        ours / correlated.independent_error(rounds),
    )


def table(rows: list[Row]) -> str:
    lines = [
        "| rounds | separation | participations | noise over the best | BLT's over the best "
        "| noise over independent noise |",
        "|---|---|---|---|---|---|",
    ]
    for each in rows:
        lines.append(
            f"| {each.rounds} | {each.separation} | {each.participations} | {each.ours:.4f} | "
            f"{each.buffered:.3f} | {each.independent:.3f} |"
        )
    return "\n".join(lines)


def main() -> None:
    made = parser(__doc__, quick="100 rounds alone")
    options = made.parse_args()
    settings = [each for each in SETTINGS if each[0] == 100 or not options.quick]
    rows = [row_of(*each) for each in settings]
    report(table(rows), [row._asdict() for row in rows], options.json)


if __name__ == "__main__":
    main()
