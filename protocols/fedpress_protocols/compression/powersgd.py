"""PowerSGD (Vogels et al. 2019, arXiv:1905.13727, Algorithm 1): one step of a power iteration that
goes on from round to round.

As published it takes two trips: all send P_i = M_i Q, all receive an orthonormal basis of the mean
P, all send M_i^T P, and what comes out is the mean update projected on P. `two_trips` is that, for
a group that can talk twice in one step. Between a server and devices a second trip is a second wait
for the slowest, so the compressor here sends both factors of its own update at once, and goes on
from its own last right factor. That is not linear: for sums under masks, see `powersgd_onesided`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from fedpress_protocols.coding.fields import Layout, Reals, Symbols
from fedpress_protocols.compression.compressor import (
    Compressor,
    Knowledge,
    Properties,
    Public,
    check_finite,
    check_inner,
    compressor,
    properties,
)
from fedpress_protocols.compression.matrices import Matrix, View, orthonormal, product, views
from fedpress_protocols.compression.none import Uncompressed
from fedpress_protocols.compression.values import LARGEST, check_positive, check_whole
from fedpress_protocols.model import ModelSpec, Vector
from fedpress_protocols.update import Piece, Update

_DEAD = 1e-9


class Warm(NamedTuple):
    """The right factors [columns, rank] of the last upload that was included, for each matrix, and
    the state of `rest`; zeros before the first."""

    rights: tuple[Matrix, ...]
    rest: Any


@compressor("powersgd")
@dataclass(frozen=True, slots=True)
class PowerSGD:
    """Each matrix M as P Q^T: P orthonormal from M times the last Q, Q = M^T P, of `rank` columns.

    Columns of the last Q that are all but zero are drawn anew. Numbers are sent in `width` bytes,
    4 as published, the columns of P and Q in units of their largest magnitude. A tensor is factored
    if that makes it smaller than a `min_compression_rate`-th in numbers; the others go to `rest`
    together. Meant for error feedback, as in the paper. `lowrank` sends it in few bits.
    """

    rank: int = 2
    width: Literal[2, 4] = 4
    min_compression_rate: float = 2.0
    rest: Compressor[Any] = field(default_factory=Uncompressed)

    def __post_init__(self) -> None:
        check_whole("rank", self.rank, 1, 256)
        if self.width not in (2, 4):
            raise ValueError(f"width is 2 or 4 bytes, not {self.width}")
        check_positive("min_compression_rate", self.min_compression_rate)
        check_inner(self.rest, "powersgd")

    @property
    def commutes_with_sum(self) -> bool:
        return False

    @property
    def needs(self) -> frozenset[Knowledge]:
        return self.rest.needs

    @property
    def properties(self) -> Properties:
        rest = properties(self.rest)
        return Properties(
            rate="8 * width * rank * (rows + columns) / (rows * columns)",
            client_state="right factors",
            server_state=rest.server_state,
            source="Vogels et al. 2019, Algorithm 1",
        )

    def layout(self, spec: ModelSpec) -> Layout:
        matrices, others = self._views(spec)
        factors = (
            Reals(sum(view.rows * view.rank for view in matrices), self.width),
            Reals(sum(view.columns * view.rank for view in matrices), self.width),
            Reals(sum(view.rank for view in matrices)),
        )
        return (*factors, *(self.rest.layout(spec.select(others)) if others else ()))

    def init(self, spec: ModelSpec) -> Warm:
        matrices, others = self._views(spec)
        rights = tuple(np.zeros((view.columns, view.rank)) for view in matrices)
        return Warm(rights, self.rest.init(spec.select(others)) if others else None)

    def compress(
        self, update: Vector, state: Warm, public: Public, rng: np.random.Generator
    ) -> tuple[Symbols, Warm]:
        check_finite(update, public.spec)
        matrices, others = self._views(public.spec)
        dtype = np.dtype(f"<f{self.width}")
        lefts, rights, scales, warm = [_NOTHING], [_NOTHING], [_NOTHING], []
        for view, last in zip(matrices, state.rights, strict=True):
            matrix = view.of(update)
            left = orthonormal(matrix @ orthonormal(revived(last, rng)))
            right = matrix.T @ left
            heights, widths = _largest(left), _largest(right)
            lefts.append((left / heights).T.ravel())
            rights.append((right / widths).T.ravel())
            scales.append(np.minimum(heights * widths, LARGEST))
            warm.append(right)
        symbols: Symbols = (
            np.concatenate(lefts).astype(dtype),
            np.concatenate(rights).astype(dtype),
            np.concatenate(scales).astype("<f4"),
        )
        rest = state.rest
        if others:
            part = np.concatenate([update[public.spec.slices[name]] for name in others])
            told, rest = self.rest.compress(part, rest, public.part(others), rng)
            symbols = (*symbols, *told)
        return symbols, Warm(tuple(warm), rest)

    def decompress(self, symbols: Symbols, public: Public, num_summands: int = 1) -> Update:
        matrices, others = self._views(public.spec)
        lefts, rights, scales = (array.astype(np.float64) for array in symbols[:3])
        pieces, rows, columns, components = [], 0, 0, 0
        for view in matrices:
            left = lefts[rows : rows + view.rows * view.rank].reshape(view.rank, -1).T
            right = rights[columns : columns + view.columns * view.rank].reshape(view.rank, -1).T
            own = scales[components : components + view.rank]
            pieces.append(Piece(view.where, product(left, right, own)))
            rows, columns = rows + left.size, columns + right.size
            components += view.rank
        if others:
            slices = tuple(public.spec.slices[name] for name in others)
            part = self.rest.decompress(symbols[3:], public.part(others), num_summands)
            pieces.extend(part.placed(slices, public.spec.size).pieces)
        return Update(public.spec.size, tuple(pieces))

    def _views(self, spec: ModelSpec) -> tuple[tuple[View, ...], tuple[str, ...]]:
        return views(spec, self.rank, self.min_compression_rate)


_NOTHING = np.empty(0)


def _largest(columns: Matrix) -> Matrix:
    """The largest magnitude of each column, 1 where it is zero throughout."""
    found = np.abs(columns).max(axis=0)
    return np.where(found > 0, found, 1.0)


def revived(columns: Matrix, rng: np.random.Generator) -> Matrix:
    """`columns`, those drawn anew that are all but zero beside the largest."""
    norms = np.linalg.norm(columns, axis=0)
    dead = norms <= _DEAD * norms.max(initial=0.0)
    return np.where(dead, rng.standard_normal(columns.shape), columns)


def two_trips(matrices: Sequence[Matrix], right: Matrix) -> tuple[Matrix, Matrix]:
    """The mean of `matrices`, one for each member of a group, as the group would agree on it in two
    trips from the last right factor, and the next right factor [columns, rank].

    A member's error is its own matrix less that mean's approximation, as in Algorithm 2.
    """
    start = orthonormal(right)
    left = orthonormal(np.sum([matrix @ start for matrix in matrices], axis=0))
    after = np.mean([matrix.T @ left for matrix in matrices], axis=0)
    return left @ after.T, after
