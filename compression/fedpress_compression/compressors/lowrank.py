"""Low-rank updates in a basis of the client's own, with few-bit factors.

Konečný et al. 2016, arXiv:1610.05492, Section 2, take one factor at random; here both are fitted to
the update by power iterations (Vogels et al. 2019, arXiv:1905.13727, Section 3).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from fedpress_compression.coding.fields import Alphabet, Layout, Reals, Symbols
from fedpress_compression.compressor import (
    Compressor,
    Knowledge,
    Properties,
    Public,
    Stateful,
    check_finite,
    check_inner,
    compressor,
    properties,
)
from fedpress_compression.compressors.quantize import Quantize
from fedpress_compression.matrices import Matrix, in_range, orthonormal, product, views
from fedpress_compression.tensors import ModelSpec, Vector
from fedpress_compression.update import Piece, Update
from fedpress_compression.values import Bytes, check_positive, check_whole, levels_of


@compressor("lowrank")
@dataclass(frozen=True, slots=True)
class LowRank(Stateful):
    """Each matrix as the sum of `rank` products left_j right_j^T scale_j.

    The factors are whole numbers of `bits` bits, fitted by `iterations` power iterations and
    rounded one after the other: the right ones make up for the rounding of the left, the scales, by
    least squares, for all rounding. So no more is ever lost than the update itself.

    A tensor is factored if that makes it smaller than a `min_compression_rate`-th in numbers;
    the others, biases among them, go to `rest` together, as one vector in the model's order.
    """

    rank: int = 1
    bits: int = 4
    iterations: int = 2
    min_compression_rate: float = 2.0
    rest: Compressor[Any] = field(default_factory=Quantize)

    def __post_init__(self) -> None:
        check_whole("rank", self.rank, 1, 256)
        check_whole("bits", self.bits, 2, 8)
        check_whole("iterations", self.iterations, 1, 16)
        check_positive("min_compression_rate", self.min_compression_rate)
        check_inner(self.rest, "lowrank")

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
            rate="bits * rank * (rows + columns) / (rows * columns)",
            contractive=rest.contractive,
            non_expansive=rest.suits_feedback,
            contracts_with=rest.contracts_with,
            client_state=rest.client_state,
            server_state=rest.server_state,
            source="Vogels et al. 2019, Section 3",
        )

    def layout(self, spec: ModelSpec) -> Layout:
        matrices, others = self._views(spec)
        size = 2 * levels_of(self.bits) + 1
        factors = (
            Alphabet(size, sum(view.rows * view.rank for view in matrices)),
            Alphabet(size, sum(view.columns * view.rank for view in matrices)),
            Reals(sum(view.rank for view in matrices)),
        )
        return (*factors, *(self.rest.layout(spec.select(others)) if others else ()))

    def init(self, spec: ModelSpec) -> Any:
        _, others = self._views(spec)
        return self.rest.init(spec.select(others)) if others else None

    def compress(
        self, update: Vector, state: Any, public: Public, rng: np.random.Generator
    ) -> tuple[Symbols, Any]:
        check_finite(update, public.spec)
        matrices, others = self._views(public.spec)
        levels = levels_of(self.bits)
        factors = self._packed(
            [_fitted(view.of(update), view.rank, levels, self.iterations, rng) for view in matrices]
        )
        if not others:
            return factors, state
        part = np.concatenate([update[public.spec.slices[name]] for name in others])
        symbols, after = self.rest.compress(part, state, public.part(others), rng)
        return (*factors, *symbols), after

    def components(self, update: Vector, public: Public, rng: np.random.Generator) -> Components:
        """What `update` offers to an encoder that takes the components that pay; the tensors that
        are not factored count as zeros."""
        matrices, others = self._views(public.spec)
        symbols: Symbols = ()
        if others:
            inside = public.part(others)
            zeros = np.zeros(inside.spec.size, np.float32)
            symbols, _ = self.rest.compress(zeros, self.rest.init(inside.spec), inside, rng)
        whole = [view.of(update) for view in matrices]
        pairs = zip(whole, matrices, strict=True)
        leading = [_leading(matrix, view.rank, self.iterations, rng) for matrix, view in pairs]
        return Components(self, whole, leading, symbols)

    def _packed(self, fitted: Sequence[tuple[Matrix, Matrix, Matrix]]) -> Symbols:
        levels = levels_of(self.bits)
        scales = [np.empty(0), *(in_range(*each) for each in fitted)]
        return (
            np.concatenate([_NOTHING, *(_symbols(left, levels) for left, _, _ in fitted)]),
            np.concatenate([_NOTHING, *(_symbols(right, levels) for _, right, _ in fitted)]),
            np.concatenate(scales).astype("<f4"),
        )

    def decompress(self, symbols: Symbols, public: Public, num_summands: int = 1) -> Update:
        matrices, others = self._views(public.spec)
        levels = levels_of(self.bits)
        lefts, rights, scales = symbols[:3]
        pieces, rows, columns, components = [], 0, 0, 0
        for view in matrices:
            left = _factor(lefts[rows : rows + view.rows * view.rank], view.rank, levels)
            right = _factor(rights[columns : columns + view.columns * view.rank], view.rank, levels)
            own = scales[components : components + view.rank].astype(np.float64)
            pieces.append(Piece(view.where, product(left, right, own)))
            rows, columns = rows + left.size, columns + right.size
            components += view.rank
        if others:
            slices = tuple(public.spec.slices[name] for name in others)
            part = self.rest.decompress(symbols[3:], public.part(others), num_summands)
            pieces.extend(part.placed(slices, public.spec.size).pieces)
        return Update(public.spec.size, tuple(pieces))

    def _views(self, spec: ModelSpec) -> Any:
        return views(spec, self.rank, self.min_compression_rate)


_NOTHING = np.empty(0, np.uint8)
_THETA = 0.4
"""Of a coefficient: rounded up from 1 - _THETA on, since zeros take the fewest bits."""


@dataclass(frozen=True, slots=True)
class Components:
    """The leading components of an update's `matrices`, for an encoder that takes some of them.

    `leading` holds left vectors [rows, rank], singular values [rank] and right vectors [columns,
    rank] of each; `others` the symbols of what is not factored, which stand for nothing.
    """

    made: LowRank
    matrices: Sequence[Matrix]
    leading: Sequence[tuple[Matrix, Matrix, Matrix]]
    others: Symbols

    def worth(self, step: float, slope: float, cost: Callable[[Matrix], float]) -> Symbols:
        """Symbols of the components that pay, the strongest first until one does not.

        A component's vectors, times its singular value, are coefficients of an orthonormal
        transform, so one `step` suits them all: that at which a bit is worth `slope` squared steps
        of error, as of what the components leave, which costs `cost` squared steps, bits included.
        """
        pairs = zip(self.matrices, self.leading, strict=True)
        chosen = [self._chosen(matrix, each, step, slope, cost) for matrix, each in pairs]
        return (*self.made._packed(chosen), *self.others)

    def none(self) -> Symbols:
        """Symbols of no component at all."""
        nothing = [tuple(map(np.zeros_like, each)) for each in self.leading]
        return (*self.made._packed([(u, v, s) for u, s, v in nothing]), *self.others)

    def _chosen(
        self,
        matrix: Matrix,
        leading: tuple[Matrix, Matrix, Matrix],
        step: float,
        slope: float,
        cost: Callable[[Matrix], float],
    ) -> tuple[Matrix, Matrix, Matrix]:
        levels, scales = levels_of(self.made.bits), np.zeros(leading[1].size)
        left, right = np.zeros_like(leading[0]), np.zeros_like(leading[2])
        rest, least = matrix, cost(matrix)
        for index, strength in enumerate(leading[1]):
            wide = math.sqrt(6 * slope / math.log(2)) * step / max(strength, 1e-30)
            column, bits = _coarse(leading[0][:, index], wide, levels)
            row, more = _coarse(leading[2][:, index], wide, levels)
            if not (column.any() and row.any()):
                break
            scale = float(column @ rest @ row) / float((column @ column) * (row @ row))
            after = rest - np.outer(column * scale, row)
            new = cost(after) + slope * (bits + more)
            if new >= least:
                break
            rest, least = after, new - slope * (bits + more)
            left[:, index], right[:, index], scales[index] = column, row, scale
        return left, right, scales


def _leading(
    matrix: Matrix, rank: int, iterations: int, rng: np.random.Generator
) -> tuple[Matrix, Matrix, Matrix]:
    """Near the leading singular vectors and values."""
    right = rng.standard_normal((matrix.shape[1], rank))
    for _ in range(iterations + 1):
        left = orthonormal(matrix @ right)
        right = matrix.T @ left
    turned, values, rows = np.linalg.svd(right.T, full_matrices=False)
    return left @ turned, values, rows.T


def _coarse(unit: Matrix, step: float, levels: int) -> tuple[Matrix, float]:
    """`unit` in whole numbers, |w| <= `levels`, of `step` or the finest that keeps to them, and the
    bits that these take."""
    step = max(step, float(np.abs(unit).max()) / levels)
    whole = np.sign(unit) * np.minimum(np.floor(np.abs(unit) / step + _THETA), levels)
    return whole, bits_of(whole.astype(np.int8))


def bits_of(field: npt.NDArray[np.generic]) -> float:
    """An estimate for a field of these symbols: their entropy and half a logarithm for each that
    occurs, as of an adaptive code; all bits of real numbers."""
    if field.dtype.kind == "f":
        return 8.0 * field.nbytes
    counts = np.unique(field, return_counts=True)[1]
    each = math.log2(max(field.size, 1))
    return float((counts * (each - np.log2(counts))).sum()) + each * len(counts) / 2


def _fitted(
    matrix: Matrix, rank: int, levels: int, iterations: int, rng: np.random.Generator
) -> tuple[Matrix, Matrix, Matrix]:
    """Whole factors, |w| <= `levels`, and scales that come near `matrix`."""
    right = rng.standard_normal((matrix.shape[1], rank))
    for _ in range(iterations):
        left = orthonormal(matrix @ right)
        right = matrix.T @ left
    turned = np.linalg.svd(right, full_matrices=False)[2]
    left = _whole(left @ turned.T, levels)
    right = _whole(matrix.T @ left @ np.linalg.pinv(left.T @ left), levels)
    gram = (left.T @ left) * (right.T @ right)
    scales = np.linalg.pinv(gram) @ ((matrix @ right) * left).sum(axis=0)
    return left, right, scales


def _whole(columns: Matrix, levels: int) -> Matrix:
    """Each column rounded on the grid that takes its largest magnitude to `levels`."""
    largest = np.abs(columns).max(axis=0, initial=0.0)
    whole: Matrix = np.rint(columns * (levels / np.where(largest > 0, largest, 1.0)))
    return whole


def _symbols(factor: Matrix, levels: int) -> Bytes:
    """Component after component, counted from -levels."""
    return (factor.T.ravel() + levels).astype(np.uint8)


def _factor(symbols: Any, rank: int, levels: int) -> Matrix:
    whole: Matrix = (symbols.astype(np.float64) - levels).reshape(rank, -1).T
    return whole
