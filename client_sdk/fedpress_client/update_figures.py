"""Figures of one update: how much compression left unsent, its norm, and the seconds it took."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fedpress_client.ledger import Ledger
from fedpress_compression.tensors import Vector
from fedpress_compression.values import flatness
from fedpress_protocols.messages import UploadFigures

_LARGEST_RATIO, _LARGEST_NORM = 1e9, 1e30
"""The bounds of `UploadFigures`."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of a round's parts."""

    train: float
    compress: float


def figures_of(ledger: Ledger, assignment: str, update: Vector, timing: Timing) -> UploadFigures:
    """The figures of `update` [size], which `ledger` has as the pending upload of `assignment`.

    The sums are float32's, as long as it has them: they are for people and not for models. Figures
    that come to nothing, of an update of zeros for instance, are left out.
    """
    pending = ledger.pending[assignment]
    if pending.feedback and ledger.residual is not None:
        rest = ledger.residual
    else:
        rest = update.copy()
        pending.update.add_to(rest, sign=-1.0)
    norm, left = _norm(update), _norm(rest)
    both = sum(_inner(rest[piece.where], piece.values) for piece in pending.update.pieces)
    total = left**2 + 2 * both + pending.update.norm**2
    return UploadFigures(
        nmse=_ratio(left**2, total),
        residual=_ratio(left, norm) if pending.feedback else 0.0,
        norm=norm if norm <= _LARGEST_NORM else None,
        train=timing.train,
        compress=timing.compress,
        flatness=flatness(update) or None,
    )


def _norm(vector: Vector) -> float:
    return math.sqrt(_inner(vector, vector))


def _inner(one: Vector, other: Vector) -> float:
    """In float64 where training diverges, and float32 has no such numbers."""
    with np.errstate(over="ignore", invalid="ignore"):
        product = float(one @ other)
    if not math.isfinite(product):
        product = float(one.astype(np.float64) @ other.astype(np.float64))
    return product


def _ratio(part: float, whole: float) -> float | None:
    """None where it says nothing, of a whole that is zero, and where it is beyond all sense."""
    if not 0 < whole < math.inf:
        return None
    ratio = part / whole
    return ratio if ratio <= _LARGEST_RATIO else None
