"""Result of a probe: what a round's updates were before they were compressed, beside what came.

Each client of a probe sends a sketch of its update besides. Products of different clients' updates
tell how long the mean is that infinitely many clients would have, without what is each one's own;
since both sides are of the same clients, what the draw of the cohort does to one it does to the
other, and it drops out of their ratio.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fedpress_compression import sketches
from fedpress_compression.compressor import Public
from fedpress_compression.update import Update
from fedpress_protocols.policies import LEAST_COMPARED, Comparison
from fedpress_protocols.upload import Upload

_TELLING = 0.25
"""The standard error of a progress beyond which it tells nothing."""
_LONGEST = 3.0
"""A client's norm relative to the median, beyond which it is scaled down: training that diverged
would be all that a probe sees."""
_KEPT = 0.88
"""The share of a Gaussian sketch's squared norm in what four levels keep of it."""

Rows = npt.NDArray[np.float64]


class _Products(NamedTuple):
    """Mean products of different clients': of compressed by whole updates, of whole ones, and of
    compressed ones."""

    inner: float
    norm: float
    other: float


class Probe:
    """The sketches of a probe's round; add them in an order that does not depend on when they
    came."""

    def __init__(self, public: Public, num_cells: int) -> None:
        self._num_cells = num_cells
        self._places = sketches.Places(public.spec.size, num_cells, public.stream(sketches.LABEL))
        self._whole = list[Rows]()
        self._compressed = list[Rows]()
        self._weights = list[float]()

    def add(self, upload: Upload, update: Update) -> None:
        """One client's `upload`, which decodes to `update`."""
        self._whole.append(sketches.from_bytes(upload.sketch, self._num_cells))
        self._compressed.append(self._places.sketch(update))
        self._weights.append(float(upload.num_examples))

    def comparison(self) -> Comparison | None:
        """None with fewer than `LEAST_COMPARED` clients, or if the updates move nothing."""
        count = len(self._weights)
        if count < LEAST_COMPARED:
            return None
        whole, compressed = np.array(self._whole), np.array(self._compressed)
        squares = np.einsum("ij,ij->i", whole, whole)
        if not squares.any():
            return None
        limit = _LONGEST * float(np.median(np.sqrt(squares[squares > 0])))
        factors = np.minimum(1.0, limit / np.sqrt(np.where(squares > 0, squares, 1.0)))[:, None]
        weights = np.array(self._weights)
        whole, compressed = whole * factors, compressed * factors
        unit = _KEPT * float((whole**2).sum()) / count
        energy = float((compressed**2).sum()) / count / unit
        everyone = _products(whole, compressed, weights)
        without = [
            _products(*(np.delete(rows, place, axis=0) for rows in (whole, compressed, weights)))
            for place in range(count)
        ]
        progress, error = _ratio(everyone, without)
        is_known = error <= _TELLING
        inner, norm, other = everyone
        cosine = None
        if is_known and other > 0:
            cosine = max(-1.0, min(1.0, inner / math.sqrt(norm * other)))
        return Comparison(
            progress=progress if is_known else None,
            error=error if math.isfinite(error) else None,
            cosine=cosine,
            nmse=max(0.0, (other - 2 * inner + norm) / norm) if is_known else None,
            energy=energy,
            inner=inner / unit,
            norm=norm / unit,
            clients=count,
        )


def _products(whole: Rows, compressed: Rows, weights: npt.NDArray[np.float64]) -> _Products:
    pairs = weights.sum() ** 2 - (weights**2).sum()

    def between(rows: Rows, others: Rows) -> float:
        of_each = np.einsum("ij,ij->i", rows, others)
        total = (weights @ rows) @ (weights @ others)
        return float((total - weights**2 @ of_each) / pairs)

    return _Products(
        between(compressed, whole), between(whole, whole), between(compressed, compressed)
    )


def _ratio(everyone: _Products, without: list[_Products]) -> tuple[float, float]:
    """The progress and its standard error, by leaving out each client in turn (the jackknife, Efron
    1982); the error is infinite where a mean drowns in the differences between clients."""
    if everyone.norm <= 0 or any(each.norm <= 0 for each in without):
        return 0.0, math.inf
    ratios = np.array([each.inner / each.norm for each in without])
    variance = (len(ratios) - 1) / len(ratios) * float(((ratios - ratios.mean()) ** 2).sum())
    return everyone.inner / everyone.norm, math.sqrt(variance)
