"""Result of a probe: what a round's updates were before they were compressed, beside what came.

Each client of a probe sends a sketch of its update besides. Products of different clients' updates
tell how long the mean is that infinitely many clients would have, without what is each one's own;
since both sides are of the same clients, what the draw of the cohort does to one it does to the
other, and it drops out of their ratio.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fedpress_compression import sketches
from fedpress_compression.compressor import Public
from fedpress_compression.update import Update
from fedpress_protocols.policies import LEAST_COMPARED, Comparison
from fedpress_protocols.upload import Upload

_SURE_ENOUGH = 0.25
"""The standard error of a progress beyond which it tells nothing."""
_LONGEST, _LONGEST_SENT = 3.0, 5.0
"""A client's norm relative to the median, beyond which it is scaled down: training that diverged,
or a device that forges, would be all that a probe sees. What is sent may hold a residual, too."""
_KEPT = 0.88
"""The share of a sketch's squared norm in what four levels keep of it, if its cells are normal."""

Rows = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.float64]


class Probe:
    """The sketches of a probe's round; add them in an order that does not depend on when they
    came."""

    def __init__(self, public: Public, num_cells: int) -> None:
        self._num_cells = num_cells
        self._places = sketches.Places(public.spec.size, num_cells, public.stream(sketches.LABEL))
        self._whole = list[npt.NDArray[np.float32]]()
        self._sent = list[npt.NDArray[np.float32]]()
        self._weights = list[float]()

    def add(self, upload: Upload, update: Update) -> None:
        """One client's `upload`, which decodes to `update`."""
        whole = sketches.from_bytes(upload.sketch, self._num_cells)
        self._whole.append(whole.astype(np.float32))
        self._sent.append(self._places.sketch(update).astype(np.float32))
        self._weights.append(float(upload.num_examples))

    def comparison(self) -> Comparison | None:
        """None with fewer than `LEAST_COMPARED` clients, or if the updates move nothing."""
        count = len(self._weights)
        if count < LEAST_COMPARED:
            return None
        factors = _limits(_norms(self._whole), _LONGEST)
        whole = np.stack(self._whole) * factors[:, None]
        sent = np.stack(self._sent) * factors[:, None]
        sent *= _limits(_norms(list(sent)), _LONGEST_SENT)[:, None]
        unit = _KEPT * _mean_square(whole)
        if not unit:
            return None
        weights = np.array(self._weights)
        inner, inners = _products(sent, whole, weights)
        norm, norms = _products(whole, whole, weights)
        other, _ = _products(sent, sent, weights)
        error = math.inf
        if norm > 0 and (norms > 0).all():
            ratios = inners / norms
            jackknife = (count - 1) / count * float(((ratios - ratios.mean()) ** 2).sum())
            shared = max(0.0, other / norm - (inner / norm) ** 2) / self._num_cells
            error = math.sqrt(jackknife + shared)
        is_known = error <= _SURE_ENOUGH
        cosine = None
        if is_known and other > 0:
            cosine = max(-1.0, min(1.0, inner / math.sqrt(norm * other)))
        return Comparison(
            progress=inner / norm if is_known else None,
            error=error if math.isfinite(error) else None,
            cosine=cosine,
            nmse=max(0.0, (other - 2 * inner + norm) / norm) if is_known else None,
            energy=_mean_square(sent) / unit,
            inner=inner / unit,
            norm=norm / unit,
            clients=count,
        )


def _products(rows: Rows, others: Rows, weights: Numbers) -> tuple[float, Numbers]:
    """The weighted mean product of different clients' rows: of all, and without each client in
    turn (the jackknife, Efron 1982)."""
    own = np.einsum("ij,ij->i", rows, others)
    left, right = weights @ rows, weights @ others
    squares, total = weights**2, float(weights.sum())
    summed = float(left @ right - squares @ own)
    without = summed - weights * (rows @ right + others @ left) + 2 * squares * own
    pairs = total**2 - float(squares.sum())
    return summed / pairs, without / (pairs - 2 * weights * (total - weights))


def _norms(rows: Sequence[npt.NDArray[Any]]) -> Numbers:
    return np.array([math.sqrt(float(np.square(row, dtype=np.float64).sum())) for row in rows])


def _limits(norms: Numbers, longest: float) -> Numbers:
    """The factors that bring norms to `longest` times their median at most."""
    some = norms[norms > 0]
    limit = longest * float(np.median(some)) if some.size else 0.0
    return np.minimum(1.0, limit / np.where(norms > 0, norms, 1.0))


def _mean_square(rows: Rows) -> float:
    return float(np.einsum("ij,ij->", rows, rows)) / len(rows)
