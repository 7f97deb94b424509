"""PowerSGD with one factor a round, the other being public: linear, so that sums can be masked.

Vogels et al. 2019, arXiv:1905.13727, Algorithm 1, one half of it in every round in turn, as their
published code does with `num_iters_per_step=1`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from fedpress_compression.coding.fields import Integers, Layout, Symbols
from fedpress_compression.compressor import (
    Knowledge,
    Properties,
    Public,
    Stateless,
    check_finite,
    compressor,
)
from fedpress_compression.linear import LinearMap, Numbers
from fedpress_compression.matrices import (
    Matrix,
    View,
    Whole,
    product,
    public_basis,
    root_mean_square,
    views,
)
from fedpress_compression.tensors import ModelSpec, Vector
from fedpress_compression.update import Piece, Update
from fedpress_compression.values import check_positive, check_whole, levels_of


@compressor("powersgd_onesided")
@dataclass(frozen=True, slots=True)
class OneSidedPowerSGD(Stateless):
    """Project each matrix M on a public orthonormal basis B and send the coefficients.

    In even rounds B has a row for each column of M and M B is sent, in odd rounds a row for each
    row of M and M^T B: in turn, as a power iteration takes them. B is derived from the step that
    the model made last (`previous`), by the exact arithmetic of `public_basis`; in the first round
    it is random. B is the same for all of the cohort, so their coefficients add up.

    Coefficients are rounded to whole steps that the cohort has in common: the largest that `bits`
    bits hold is `headroom` times the root mean square of the coefficients that `previous` would
    have, or `first_range` where `previous` is zero. What lies outside is clipped. Tensors not worth
    factoring are sent value by value, in steps found alike. What is lost, error feedback has to
    keep: B leaves most of M out in any one round.
    """

    rank: int = 4
    bits: int = 12
    headroom: float = 64.0
    first_range: float = 1.0
    min_compression_rate: float = 2.0

    def __post_init__(self) -> None:
        check_whole("rank", self.rank, 1, 256)
        check_whole("bits", self.bits, 2, 24)
        check_positive("headroom", self.headroom)
        check_positive("first_range", self.first_range)
        check_positive("min_compression_rate", self.min_compression_rate)

    @property
    def commutes_with_sum(self) -> bool:
        return True

    @property
    def needs(self) -> frozenset[Knowledge]:
        return frozenset({"previous"})

    @property
    def properties(self) -> Properties:
        return Properties(
            rate="bits * rank / columns, or rows in odd rounds",
            non_expansive=True,
            server_state="previous model",
            source="Vogels et al. 2019, Algorithm 1",
        )

    def layout(self, spec: ModelSpec) -> Layout:
        return (Integers(levels_of(self.bits), self._count(spec)),)

    def compress(
        self, update: Vector, state: None, public: Public, rng: np.random.Generator
    ) -> tuple[Symbols, None]:
        check_finite(update, public.spec)
        levels = levels_of(self.bits)
        symbols = np.zeros(self._count(public.spec), np.int32)
        start = 0
        for part in self._parts(public):
            steps = np.rint(part.coefficients(update) / part.step)
            symbols[start : start + part.num] = np.clip(steps, -levels, levels)
            start += part.num
        return (symbols,), None

    def decompress(self, symbols: Symbols, public: Public, num_summands: int = 1) -> Update:
        parts = tuple(self._parts(public))
        return _Coefficients(public.spec, parts).lift(symbols[0].astype(np.float64))

    def linear_map(self, public: Public) -> LinearMap:
        parts = tuple(replace(part, step=1.0) for part in self._parts(public))
        return _Coefficients(public.spec, parts)

    def _count(self, spec: ModelSpec) -> int:
        """Room for the longer factor of each matrix: a layout knows no round."""
        matrices, others = views(spec, self.rank, self.min_compression_rate)
        longer = sum(max(view.rows, view.columns) * view.rank for view in matrices)
        return longer + spec.select(others).size

    def _parts(self, public: Public) -> Iterator[_Projected | _Whole]:
        """The parts of the body in their order; zeros pad the last one."""
        previous = public.known("previous")
        matrices, others = views(public.spec, self.rank, self.min_compression_rate)
        stream = public.stream("powersgd_onesided")
        to_rows = public.round % 2 == 0
        for view in matrices:
            known = view.of(previous)
            basis, lengths = public_basis(known.T if to_rows else known, view.rank, stream)
            num = (view.rows if to_rows else view.columns) * view.rank
            spread = root_mean_square(known, num)
            yield _Projected(view, to_rows, basis, lengths, num, spread, self._step(spread))
        for name in others:
            where = public.spec.slices[name]
            known = previous[where].astype(np.float64)
            spread = root_mean_square(known, known.size)
            yield _Whole(where, known.size, spread, self._step(spread))

    def _step(self, spread: float) -> float:
        return (self.headroom * spread or self.first_range) / levels_of(self.bits)


@dataclass(frozen=True)
class _Coefficients:
    """The map to the coefficients of all parts, in their steps."""

    spec: ModelSpec
    parts: tuple[_Projected | _Whole, ...]

    @property
    def spread(self) -> Numbers:
        found = [np.full(part.num, part.spread / part.step) for part in self.parts]
        return np.concatenate([np.empty(0), *found])

    def project(self, update: Vector) -> Numbers:
        check_finite(update, self.spec)
        found = [part.coefficients(update) / part.step for part in self.parts]
        return np.concatenate([np.empty(0), *found])

    def lift(self, numbers: Numbers) -> Update:
        pieces, start = [], 0
        for part in self.parts:
            values = part.values(numbers[start : start + part.num])
            pieces.append(Piece(part.where, values))
            start += part.num
        return Update(self.spec.size, tuple(pieces))


@dataclass(frozen=True, slots=True)
class _Projected:
    """A matrix by its coefficients [rows, rank] to `basis`, or [columns, rank], row by row;
    `spread` is the root mean square that those of `previous` have."""

    view: View
    to_rows: bool
    basis: Whole
    lengths: Matrix
    num: int
    spread: float
    step: float

    @property
    def where(self) -> slice:
        return self.view.where

    def coefficients(self, update: Vector) -> Matrix:
        matrix = self.view.of(update)
        oriented = matrix if self.to_rows else matrix.T
        return (oriented @ (self.basis / self.lengths)).ravel()

    def values(self, steps: Matrix) -> Vector:
        factor, scales = steps.reshape(-1, self.view.rank), self.step / self.lengths
        if self.to_rows:
            return product(factor, self.basis, scales)
        return product(self.basis, factor, scales)


@dataclass(frozen=True, slots=True)
class _Whole:
    """A tensor value by value."""

    where: slice
    num: int
    spread: float
    step: float

    def coefficients(self, update: Vector) -> Matrix:
        return update[self.where].astype(np.float64)

    def values(self, steps: Matrix) -> Vector:
        with np.errstate(over="ignore"):  # forged steps; Update.check refuses what comes of them
            return (steps * self.step).astype(np.float32)
