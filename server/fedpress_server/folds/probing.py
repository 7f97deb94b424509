"""What a probe came to: the compressed updates of a round beside those of the reference."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fedpress_protocols.errors import ServerError
from fedpress_protocols.policies import LEAST_COMPARED, Comparison
from fedpress_server.folds.adding import StagedUpload
from fedpress_server.folds.terms import RoundTerms

_DROWNED = 0.02
"""Of an update's energy: what the mean of all has to have of it for the two to be told apart."""


class _Group:
    """Updates of one kind, as far as their mean and the products of different ones go."""

    def __init__(self, size: int) -> None:
        self.total: npt.NDArray[np.float64] = np.zeros(size)
        self.weight = self.squares = self.norms = self.weighted_norms = 0.0
        self.count = self.num_bytes = 0

    def add(self, update: npt.NDArray[np.float64], weight: int, num_bytes: int) -> None:
        norm = float(update @ update)
        self.total += weight * update
        self.weight += weight
        self.squares += float(weight) ** 2
        self.norms += norm
        self.weighted_norms += float(weight) ** 2 * norm
        self.count += 1
        self.num_bytes += num_bytes

    @property
    def norm(self) -> float:
        """An unbiased estimate of the squared norm of what the mean tends to: that of the products
        of different clients' updates, in which what is each one's own cancels."""
        pairs = self.weight**2 - self.squares
        return (float(self.total @ self.total) - self.weighted_norms) / pairs

    def along(self, other: _Group) -> float:
        return float(self.total @ other.total) / (self.weight * other.weight)


def compare(
    terms: RoundTerms, uploads: Sequence[StagedUpload], reference: str
) -> Comparison | None:
    """What the uploads with the profile `reference` tell of the others, in the order of their
    assignments; None with fewer than two of either kind, or if they move nothing.

    Every upload is decoded once more; the memory is that of three models in float64.
    """
    size = terms.shared.size
    groups = {True: _Group(size), False: _Group(size)}
    for staged in uploads:
        if staged.plan is not None and staged.plan.round != terms.plan.round:
            continue  # of an asynchronous task's earlier model
        body = terms.payloads.get(staged.name)
        if hashlib.sha256(body).hexdigest() != staged.digest:
            raise ServerError(f"{staged.name} was changed on the disk")
        update, num_examples, _ = terms.decoded(body, staged.profile, staged.client_id)
        dense = update.dense().astype(np.float64)
        groups[staged.profile == reference].add(dense, num_examples, len(body))
    dear, pressed = groups[True], groups[False]
    if min(dear.count, pressed.count) < LEAST_COMPARED or not dear.norms:
        return None
    inner, norm, other = pressed.along(dear), dear.norm, pressed.norm
    floor = _DROWNED * dear.norms / dear.count
    cosine, is_known = None, norm > floor
    if is_known and other > floor:
        cosine = max(-1.0, min(1.0, inner / math.sqrt(norm * other)))
    return Comparison(
        progress=inner / norm if is_known else None,
        cosine=cosine,
        nmse=max(0.0, (other - 2 * inner + norm) / norm) if is_known else None,
        energy=(pressed.norms / pressed.count) / (dear.norms / dear.count),
        inner=inner,
        norm=norm,
        compressed=pressed.count,
        reference=dear.count,
        extra_bytes=round(dear.num_bytes - dear.count * pressed.num_bytes / pressed.count),
    )
