"""Tools of the low-rank methods: tensors seen as matrices, their products, public bases.

A tensor of shape (out, ...) is seen as a matrix of `out` rows. Products of factors are made in a
fixed order, so that the same factors give the same bits on every machine. A basis that both ends
derive is made of whole numbers, small enough that every sum in it is exact: the order in which a
linear algebra library adds, which differs from machine to machine, cannot change it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedpress_compression.errors import IncompatiblePlan
from fedpress_compression.randomness import PublicStream
from fedpress_compression.tensors import ModelSpec, Vector
from fedpress_compression.values import LARGEST

Matrix = npt.NDArray[np.float64]
Whole = npt.NDArray[np.float64]
"""Float64 that holds whole numbers below 2**53, where sums and products are exact."""

_COARSE = 2.0**14
"""The integer to which the largest magnitude of a public matrix is scaled."""
_FINE = 2.0**15
"""The integer to which the largest magnitude of a basis column is scaled."""
_LONGEST = 2**23
"""Rows or columns up to which _COARSE * _FINE * length stays below 2**53."""
_DEAD = 2.0**-10
"""A column is redrawn if less than this share of it is left after projecting out the others."""


@dataclass(frozen=True, slots=True)
class View:
    """A tensor as a `rows` x `columns` matrix, of which `rank` components are kept."""

    where: slice
    rows: int
    columns: int
    rank: int

    def of(self, vector: Vector) -> Matrix:
        return vector[self.where].reshape(self.rows, self.columns).astype(np.float64)


def views(spec: ModelSpec, rank: int, min_rate: float) -> tuple[tuple[View, ...], tuple[str, ...]]:
    """The tensors worth factoring, and the names of the others, each in the model's order.

    Worth it is what rank components make smaller than a `min_rate`-th in numbers (Vogels et al.
    2019, Section 4.1, and torch's min_compression_rate).
    """
    matrices, others = [], []
    for tensor in spec.trained:
        rows = tensor.shape[0] if len(tensor.shape) > 1 else 1
        columns = tensor.size // rows if rows else 0
        view_rank = min(rank, rows, columns)
        if 0 < (rows + columns) * view_rank * min_rate < tensor.size:
            matrices.append(View(spec.slices[tensor.name], rows, columns, view_rank))
        else:
            others.append(tensor.name)
    return tuple(matrices), tuple(others)


def product(left: Matrix, right: Matrix, scales: Iterable[float]) -> Vector:
    """The sum over j, in rising order, of (left[:, j] x right[:, j]) * scales[j], in float64.

    Each product and sum is rounded by itself; the result, row by row, to float32.
    """
    total = np.zeros((left.shape[0], right.shape[0]))
    with np.errstate(over="ignore", invalid="ignore"):  # forged scales; Update.check refuses them
        for j, scale in enumerate(scales):
            total += np.outer(left[:, j], right[:, j]) * scale
        return total.ravel().astype(np.float32)


def in_range(left: Matrix, right: Matrix, scales: Matrix) -> Matrix:
    """`scales` with which the `product` of the factors stays within float32: as they are, or all
    smaller by one factor. A cut-off matrix, projected, can be larger than what it was cut from."""
    tops = np.abs(left).max(axis=0, initial=0.0) * np.abs(right).max(axis=0, initial=0.0)
    tops *= np.abs(scales)
    if float(tops.sum()) <= float(LARGEST):
        return scales
    peak = max(float(tops.max()), float(np.abs((left * scales) @ right.T).max()))
    return scales * min(1.0, 0.99 * float(LARGEST) / peak)


def orthonormal(columns: Matrix) -> Matrix:
    """An orthonormal basis of their span, by whatever library is here: for one end alone."""
    return np.asarray(np.linalg.qr(columns)[0])


def on_grid(values: Matrix, largest: float) -> Whole:
    """Whole multiples, |w| <= `largest`, of the step that takes the largest magnitude there."""
    magnitude = float(np.abs(values).max(initial=0.0))
    if not magnitude:
        return np.zeros_like(values)
    whole: Whole = np.rint(values * (largest / magnitude))
    return whole


def root_mean_square(values: Matrix, num: int) -> float:
    """The root of the squares of `values` over `num`, from whole numbers: the same bits everywhere
    for |values| that are float32's."""
    magnitude = float(np.abs(values).max(initial=0.0))
    squares = int(np.square(on_grid(values, _COARSE).astype(np.int64)).sum())
    return math.sqrt(squares / max(num, 1)) * (magnitude / _COARSE)


def public_basis(known: Matrix, rank: int, stream: PublicStream) -> tuple[Whole, Matrix]:
    """Orthogonal columns [rows of `known`, rank] near its leading left singular vectors, as whole
    numbers, and the length of each: the same bits wherever `known` is.

    Two steps of a power iteration from signs of `stream` (Halko et al. 2011, arXiv:0909.4061,
    Algorithm 4.4), then Gram and Schmidt's process. What `known` has no more columns for, all of
    them where it is zero, is drawn from `stream` as well.
    """
    if max(known.shape) > _LONGEST:
        raise IncompatiblePlan(
            f"a matrix of {known.shape[0]} x {known.shape[1]}; a public basis is exact up to "
            f"{_LONGEST} rows and columns",
            hint="send this tensor through another compressor",
        )
    whole = on_grid(known, _COARSE)
    columns = _signs(stream, known.shape[1], rank)
    for _ in range(2):
        images = _columns_on_grid(whole @ columns)
        columns = _columns_on_grid(whole.T @ images)
    return _orthogonal(_columns_on_grid(whole @ columns), stream)


def _orthogonal(columns: Whole, stream: PublicStream) -> tuple[Whole, Matrix]:
    basis = np.zeros_like(columns)
    squares = np.zeros(columns.shape[1])
    for j in range(columns.shape[1]):
        column = columns[:, j]
        while True:
            column, share = _apart(column, basis[:, :j], squares[:j])
            if share >= _DEAD:
                break
            column = _signs(stream, columns.shape[0], 1)[:, 0]
        basis[:, j], squares[j] = column, float(column @ column)
    return basis, np.sqrt(squares)


def _apart(column: Whole, basis: Whole, squares: Matrix) -> tuple[Whole, float]:
    """`column` less its part in `basis`, twice over, and the share that the first time left."""
    shares = []
    for _ in range(2):
        before = float(np.abs(column).max(initial=0.0))
        left = column
        for j, square in enumerate(squares):
            left = np.rint(left - (float(left @ basis[:, j]) / square) * basis[:, j])
        shares.append(float(np.abs(left).max(initial=0.0)) / before if before else 0.0)
        column = on_grid(left, _FINE)
    return column, shares[0]


def _columns_on_grid(values: Whole) -> Whole:
    return np.stack([on_grid(column, _FINE) for column in values.T], axis=1)


def _signs(stream: PublicStream, rows: int, columns: int) -> Whole:
    """-_FINE for a bit of 0 and _FINE for 1, column by column."""
    bits = stream.bits(rows * columns).reshape(columns, rows).T
    return np.where(bits == 1, _FINE, -_FINE)
