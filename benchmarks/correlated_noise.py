"""Noise that is correlated over rounds: fedpress's against the least that is known, by settings.

    python benchmarks/correlated_noise.py                  # the table of docs/privacy.md

For tasks of some rounds, in which a device takes part so many times at most, that many rounds
apart: the noise in the model, root mean square over the rounds, for the same epsilon, over

- that of the best strategy whose matrix C is lower-triangular Toeplitz with as many bands as rounds
  lie between participations (arXiv:2306.08153, Section 4), found by descent. Columns of one device
  then have no row in common, so that its sensitivity is the root of the participations times a
  column's norm. For one participation C has no zeros, and it is the best Toeplitz matrix;
- the same strategy, its inverse cut off after so many terms, so that noise is drawn again from as
  many seeds as in fedpress: by the exact sensitivity of the matrix that is then inverted.

Beside them the noise vectors that a server draws, or keeps, in each round: fedpress draws `bands`
and keeps none; the best strategy keeps the noise of `separation` - 1 rounds, or draws all rounds'.
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
SETTINGS = (
    (100, 100, 1), (100, 50, 2), (100, 20, 5), (100, 10, 10),
    (500, 500, 1), (500, 250, 2), (500, 100, 5), (500, 50, 10),
    (1000, 1000, 1), (1000, 500, 2), (1000, 200, 5), (1000, 100, 10),
    (2000, 2000, 1), (2000, 1000, 2), (2000, 400, 5), (2000, 200, 10),
)  # fmt: skip


class Row(NamedTuple):
    """`ours` and `cut`, at as many terms as ours has bands and at five separations, are noise over
    the best strategy's."""

    rounds: int
    separation: int
    participations: int
    bands: int
    ours: float
    cut_at_bands: float
    cut_at_five: float


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


def log_noise(column: Floats, rounds: int) -> tuple[float, Floats]:
    """The logarithm of norm times error of a banded strategy, and its gradient."""
    terms = inverse(column, rounds)
    sums, weights = np.cumsum(terms), rounds - np.arange(rounds)
    error = float(sums**2 @ weights)
    outer = 2 * np.cumsum((sums * weights)[::-1])[::-1]
    size = 2 * rounds
    squared = np.fft.irfft(np.fft.rfft(terms, size) ** 2, size)[:rounds]
    pulled = np.fft.irfft(np.fft.rfft(outer, size) * np.conj(np.fft.rfft(squared, size)), size)
    norm = float(column @ column)
    gradient = -pulled[: column.size] / (2 * error) + column / norm
    return 0.5 * math.log(error * norm), gradient


def best_banded(bands: int, rounds: int) -> Floats:
    """The first column [bands] of the best banded strategy, 1 at the top."""
    steps = np.arange(1, bands)
    start = np.concatenate([[1.0], np.cumprod((steps - 0.5) / steps)])
    options = {"maxiter": 5000, "maxfun": 8000, "ftol": 1e-14, "gtol": 1e-10}
    found = minimize(log_noise, start, (rounds,), "L-BFGS-B", jac=True, options=options)
    return np.asarray(found.x / found.x[0])


def sensitivity(terms: Floats, separation: int, participations: int, length: int) -> float:
    """That of the matrix whose inverse has these `terms`, as far as `length` rows go: as
    `correlated.sensitivity`, by magnitudes."""
    column = np.abs(inverse(terms, length))
    spectrum = np.abs(np.fft.rfft(column, 2 * length)) ** 2
    products = np.fft.irfft(spectrum, 2 * length)[:length]
    products = np.maximum.accumulate(products[::-1])[::-1][::separation][:participations]
    pairs = 2.0 * (participations - np.arange(products.size))
    pairs[0] = participations
    return math.sqrt(float(pairs @ products))


def row_of(rounds: int, separation: int, participations: int) -> Row:
    bands = correlated.best_bands(separation, participations, rounds)
    ours = correlated.sensitivity(bands, separation, participations)
    ours *= correlated.prefix_error(bands, rounds)
    column = best_banded(separation, rounds)
    terms = inverse(column, rounds)
    norm = math.sqrt(participations * float(column @ column))
    best = norm * prefix_error(terms, rounds)

    def cut(count: int) -> float:
        length = max(8 * rounds, 8192)
        own = sensitivity(terms[:count], separation, participations, length)
        return own * prefix_error(terms[:count], rounds) / best

    five = min(rounds, 5 * separation)
    return Row(rounds, separation, participations, bands, ours / best, cut(bands), cut(five))


def table(rows: list[Row]) -> str:
    lines = [
        "| rounds | separation | participations | bands | noise over the best "
        "| the best, cut to as many terms | cut to five separations |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in rows:
        five = min(each.rounds, 5 * each.separation)
        lines.append(
            f"| {each.rounds} | {each.separation} | {each.participations} | {each.bands} | "
            f"{each.ours:.3f} | {each.cut_at_bands:.3f} | {each.cut_at_five:.3f} at {five} |"
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
