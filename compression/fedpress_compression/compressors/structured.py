"""Only the rows that training touched: embeddings, experts (Niu et al. 2019, arXiv:1911.02254,
whose clients send a submodel; here which rows they are is no secret from the server)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt

from fedpress_compression.coding.fields import Alphabet, Layout, Positions, Reals, Symbols
from fedpress_compression.compressor import Properties, Public, Stateless, check_finite, compressor
from fedpress_compression.tensors import ModelSpec, Vector
from fedpress_compression.update import Indices, Piece, Update
from fedpress_compression.values import (
    Rounding,
    check_rounding,
    check_whole,
    from_planes,
    from_symbols,
    levels_of,
    to_planes,
    to_symbols,
)

_CELL = 16


@compressor("structured")
@dataclass(frozen=True, slots=True)
class Structured(Stateless):
    """Send the rows that are not all zero: where they are, and every value in them.

    A row is what lies under one index of a tensor's first dimension (a token's vector, an expert's
    weights); a tensor of one dimension is one row. Give the embeddings to this method and the rest
    to another with the rules of `per_tensor`. Rows travel in cells of 16 values, so that positions
    cost a sixteenth of a bit a value and a cell that is all zero costs nothing.

    With `bits` values are rounded to 2**bits - 1 levels, the tensor's largest at the end:
    `nearest` for error feedback, `stochastic` to be unbiased. None sends float32 by its bytes and
    loses nothing. Weight decay and Adam's moments touch every row; a trainer must leave the rows
    it did not read alone, or nothing is gained here.
    """

    bits: int | None = 8
    rounding: Rounding = "nearest"

    def __post_init__(self) -> None:
        if self.bits is not None:
            check_whole("bits", self.bits, 2, 8)
        check_rounding(self.rounding)

    @property
    def properties(self) -> Properties:
        exact = self.bits is None
        return Properties(
            rate="touched * (bits or 32)",
            unbiased=exact or self.rounding == "stochastic",
            contractive=exact or self.rounding == "nearest",
            contracts_with="nearest rounding",
            source="Niu et al. 2019",
        )

    def layout(self, spec: ModelSpec) -> Layout:
        num_cells = int(_Cells(spec).starts[-1])
        where = Positions(num_cells, num_cells)
        if self.bits is None:
            return where, *(Alphabet(256) for _ in range(4 * _CELL))
        values = (Alphabet(2 * levels_of(self.bits) + 1) for _ in range(_CELL))
        return where, *values, Reals(len(spec.trained))

    def compress(
        self, update: Vector, state: None, public: Public, rng: np.random.Generator
    ) -> tuple[Symbols, None]:
        check_finite(update, public.spec)
        cells = _Cells(public.spec)
        if self.bits is None:
            dense = cells.of(update)
            where = np.flatnonzero(dense.any(axis=1))
            planes = [
                p for column in dense[where].T for p in to_planes(np.ascontiguousarray(column))
            ]
            return (where, *planes), None
        levels = levels_of(self.bits)
        parts = [update[part] for part in public.spec.slices.values()]
        largest = np.array([np.abs(part).max(initial=0.0) for part in parts], np.float64)
        steps = np.nextafter((largest / levels).astype("<f4"), np.float32(0)).astype("<f4")
        wide = np.repeat(steps, [part.size for part in parts])
        rounded = cells.of(to_symbols(update, wide, levels, self.rounding, rng), levels)
        where = np.flatnonzero((rounded != levels).any(axis=1))
        return (where, *np.ascontiguousarray(rounded[where].T), steps), None

    def decompress(self, symbols: Symbols, public: Public, num_summands: int = 1) -> Update:
        cells, where = _Cells(public.spec), cast(Indices, symbols[0])
        tensors, indices, inside = cells.coordinates(where)
        if self.bits is None:
            columns = [from_planes(symbols[1 + 4 * i : 5 + 4 * i]) for i in range(_CELL)]
        else:
            steps = symbols[-1].astype(np.float32)[tensors]
            levels = levels_of(self.bits)
            columns = [from_symbols(column, steps, levels) for column in symbols[1:-1]]
        values = np.stack(columns, axis=1)[inside]
        return Update(public.spec.size, (Piece(indices[inside], values),))


class _Cells:
    """The trained values of a spec in cells of 16, no cell in two rows, padded at rows' ends."""

    def __init__(self, spec: ModelSpec) -> None:
        shapes = [t.shape if len(t.shape) > 1 else (1, t.size) for t in spec.trained]
        self.rows = np.array([shape[0] for shape in shapes], np.int64)
        self.lengths = np.array([math.prod(shape[1:]) for shape in shapes], np.int64)
        self.cells_in_row = -(-self.lengths // _CELL)
        counts = self.rows * self.cells_in_row
        self.starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        self.offsets = np.array([part.start for part in spec.slices.values()], np.int64)

    def of(self, flat: npt.NDArray[np.generic], padding: int = 0) -> npt.NDArray[np.generic]:
        """`flat` [spec.size] as [number of cells, 16]."""
        parts = [np.empty((0, _CELL), flat.dtype)]
        for rows, length, num, start in zip(
            self.rows, self.lengths, self.cells_in_row, self.offsets, strict=True
        ):
            part = flat[start : start + rows * length].reshape(rows, length)
            after = ((0, 0), (0, int(num) * _CELL - int(length)))
            parts.append(np.pad(part, after, constant_values=padding).reshape(-1, _CELL))
        return np.concatenate(parts)

    def coordinates(self, cells: Indices) -> tuple[Indices, Indices, npt.NDArray[np.bool_]]:
        """Each cell's tensor [k], its values' coordinates [k, 16], which of them are in its row."""
        tensors = np.searchsorted(self.starts, cells, side="right") - 1
        in_tensor = cells - self.starts[tensors]
        row, cell = np.divmod(in_tensor, np.maximum(self.cells_in_row[tensors], 1))
        first = self.offsets[tensors] + row * self.lengths[tensors] + cell * _CELL
        column = np.arange(_CELL, dtype=np.int64)
        inside = cell[:, None] * _CELL + column < self.lengths[tensors][:, None]
        return tensors, first[:, None] + column, inside
