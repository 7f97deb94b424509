"""Top-k sparsification with few-bit magnitudes (Stich et al. 2018, arXiv:1809.07599; with no
magnitude bits it is the sparse ternary compression of Sattler et al. 2019, arXiv:1903.02891; in
chunks, that of SparseLoCo, Sarfi et al. 2025, arXiv:2508.15706, Section 3)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from fedpress_compression import kernels
from fedpress_compression.coding.alphabets import Grouped
from fedpress_compression.coding.fields import Alphabet, Layout, Positions, Reals, Symbols
from fedpress_compression.compressor import (
    Properties,
    Public,
    Stateless,
    check_shape,
    check_values,
    compressor,
)
from fedpress_compression.kernels.buffer_pool import pooled
from fedpress_compression.tensors import ModelSpec, Vector
from fedpress_compression.update import Indices, Piece, Tabled, Update
from fedpress_compression.values import check_share, check_whole

_LLOYD_STEPS = 12
_WORTH = 0.05
_MANY = 16
"""Values a level up to which an outlier moves its level's mean enough to get a level for itself."""


@compressor("topk")
@dataclass(frozen=True, slots=True)
class TopK(Stateless):
    """Keep the k entries largest in magnitude: where they are, their signs, few-bit magnitudes.

    k is `count`, or else `fraction` of the coordinates rounded up, over the whole model or in each
    tensor, or, with `chunk`, in each run of so many coordinates of these (the last may be shorter).
    Exactly k are sent unless fewer differ from zero; of equal magnitudes the first count.
    The 2**`magnitude_bits` levels are fitted to what was selected (Lloyd 1982), so the lowest lies
    at the selection threshold or above: a grid with a zero level would round a sixth of what was
    selected to nothing.
    """

    fraction: float = 0.01
    count: int | None = None
    magnitude_bits: int = 2
    scope: Literal["model", "tensor"] = "model"
    chunk: int | None = None

    def __post_init__(self) -> None:
        check_share("fraction", self.fraction)
        if self.count is not None:
            check_whole("count", self.count, 1, 2**32)
        check_whole("magnitude_bits", self.magnitude_bits, 0, 4)
        if self.scope not in ("model", "tensor"):
            raise ValueError(f"scope is model or tensor, not {self.scope!r}")
        if self.chunk is not None:
            check_whole("chunk", self.chunk, 1, 2**31)

    @property
    def properties(self) -> Properties:
        return Properties(
            rate="fraction * (log2(1 / fraction) + 1.4 + 1 + magnitude_bits)",
            contractive=True,
            source="Stich et al. 2018",
        )

    @property
    def num_levels(self) -> int:
        return int(2**self.magnitude_bits)

    def layout(self, spec: ModelSpec) -> Layout:
        groups = self._groups(spec)
        at_most = sum(
            self._k(chunk.stop - chunk.start) for g in groups for chunk in self._chunks(g)
        )
        magnitudes = (Alphabet(self.num_levels),) if self.magnitude_bits else ()
        return (
            Positions(spec.size, at_most),
            Alphabet(2),
            *magnitudes,
            Reals(len(groups) * self.num_levels, width=2),
            Reals(len(groups)),
        )

    def compress(
        self, update: Vector, state: None, public: Public, rng: np.random.Generator
    ) -> tuple[Symbols, None]:
        check_shape(update, public.spec)

        def kept(chunk: slice, k: int) -> tuple[Indices, Vector]:
            return kernels.largest(update[chunk], k)

        return self.compress_kept(public.spec, kept), None

    def compress_sum(
        self,
        update: Vector,
        other: Vector,
        state: None,
        public: Public,
        rng: np.random.Generator,
        *,
        scale: float = 1.0,
    ) -> tuple[Vector, Symbols, None]:
        """`scale`, a power of two, times `update` plus `other`, and the symbols that `compress`
        gives for it; one pass over the vectors serves all."""
        check_shape(update, public.spec)
        total = pooled(update.size, np.float32)

        def kept(chunk: slice, k: int) -> tuple[Indices, Vector]:
            return kernels.add_largest(update[chunk], other[chunk], k, total[chunk], scale)

        return total, self.compress_kept(public.spec, kept), None

    def compress_kept(
        self, spec: ModelSpec, kept_of: Callable[[slice, int], tuple[Indices, Vector]]
    ) -> Symbols:
        """The symbols for what `kept_of` keeps of each chunk: given its slice and k, the rising
        indices in it of its k largest, and these. Raises InvalidUpdate on NaN or infinity."""
        positions, signs, magnitudes, ratios, scales = [], [], [], [], []
        for group in self._groups(spec):
            chunks = self._chunks(group)
            kept = [kept_of(c, self._k(c.stop - c.start)) for c in chunks]
            positions += [
                where + c.start if c.start else where
                for (where, _), c in zip(kept, chunks, strict=True)
            ]
            chosen = _joined([values for _, values in kept], np.float32)
            check_values(chosen)  # NaN and infinity are the largest of all
            symbols, group_ratios, scale = fit_levels(np.abs(chosen), self.num_levels)
            signs.append((chosen < 0).astype(np.uint8))
            magnitudes.append(symbols)
            ratios.append(group_ratios)
            scales.append(scale)
        where, sign = _joined(positions, np.int64), _joined(signs, np.uint8)
        levels = (_joined(magnitudes, np.uint8),) if self.magnitude_bits else ()
        return (where, sign, *levels, _joined(ratios, "<f2"), np.array(scales, "<f4"))

    def decompress(self, symbols: Symbols, public: Public, num_summands: int = 1) -> Update:
        where = cast(Indices, symbols[0])
        magnitudes = symbols[2] if self.magnitude_bits else np.zeros(where.size, np.uint8)
        ratios = symbols[-2].astype(np.float32).reshape(-1, self.num_levels)
        scales = symbols[-1].astype(np.float32)
        with np.errstate(over="ignore"):  # a forged scale; Update.check refuses what comes of it
            levels = ratios * scales[:, np.newaxis]
        signed = np.concatenate([levels, -levels], axis=1)
        which: npt.NDArray[np.integer]
        which = np.uint8(self.num_levels) * symbols[1].astype(np.uint8, copy=False)
        which += magnitudes.astype(np.uint8, copy=False)
        if self.scope == "tensor":
            stops = [s.stop for s in self._groups(public.spec)]
            tensors = np.searchsorted(stops, where, side="right")
            which = which + 2 * self.num_levels * tensors
        return Update(public.spec.size, (Piece(where, signed.ravel()[which]),))

    def tabled(self, symbols: Sequence[Any], public: Public) -> Tabled | None:
        """The result of `decompress`, as symbols and their values; None if tensors differ."""
        if self.scope == "tensor" or self.magnitude_bits == 0:
            return None
        with np.errstate(over="ignore"):
            levels = symbols[-2].astype(np.float32) * symbols[-1].astype(np.float32)
        sign, level = (f.read() if isinstance(f, Grouped) else f for f in symbols[1:3])
        signed = level + np.uint8(self.num_levels) * sign
        table = np.concatenate([levels, -levels])[np.newaxis]
        ends = np.array([public.spec.size], np.int64)
        return Tabled(public.spec.size, signed, symbols[0], ends, table)

    def _groups(self, spec: ModelSpec) -> list[slice]:
        if self.scope == "tensor":
            return list(spec.slices.values())
        return [slice(0, spec.size)]

    def _chunks(self, group: slice) -> list[slice]:
        """The parts of `group` in each of which k are kept."""
        size = group.stop - group.start if self.chunk is None else self.chunk
        starts = range(group.start, group.stop, max(1, size))
        return [slice(start, min(start + size, group.stop)) for start in starts]

    def _k(self, size: int) -> int:
        return min(size, math.ceil(self.fraction * size) if self.count is None else self.count)


def _joined(arrays: Sequence[npt.NDArray[Any]], kind: npt.DTypeLike) -> npt.NDArray[Any]:
    """All of them, end to end; one alone is not copied."""
    return arrays[0] if len(arrays) == 1 else np.concatenate([*arrays, np.empty(0, kind)])


def largest(values: npt.NDArray[np.floating], k: int) -> Indices:
    """The rising indices of the k largest in magnitude, ties to the lower index, zeros left out."""
    if not k:
        return np.empty(0, np.int64)
    return kernels.largest(values.astype(np.float32, copy=False), k)[0]


def fit_levels(
    magnitudes: Vector, num_levels: int
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.floating], float]:
    """Level of each magnitude, the levels as float16 ratios [num_levels] of a float32 scale.

    Lloyd's iteration from equal shares of the sorted magnitudes. Of many values outliers leave it
    stuck: where a level is spent better elsewhere it goes there, and the iteration begins again.
    A level's symbol is chosen by the values as the decoder will see them, so that what is sent is
    the nearest that can be sent.
    """
    if not magnitudes.size:
        return np.empty(0, np.uint8), np.zeros(num_levels, "<f2"), 0.0
    edges = np.linspace(0, magnitudes.size, num_levels + 1).round().astype(np.int64)
    rising = np.sort(magnitudes)
    centres = kernels.lloyd(rising, edges, _LLOYD_STEPS)
    if num_levels > 1 and rising.size >= _MANY * num_levels:
        wide = rising.astype(np.float64)
        inner = np.searchsorted(wide, (centres[1:] + centres[:-1]) / 2)
        edges = np.array(_moved(wide, [0, *inner.tolist(), wide.size]), np.int64)
        centres = kernels.lloyd(rising, edges, _LLOYD_STEPS)
    scale = np.float32(centres[-1])
    ratios = (centres / np.float64(scale)).astype("<f2")
    levels = ratios.astype(np.float32) * scale
    symbols = kernels.nearest_levels(magnitudes, cast(Vector, (levels[1:] + levels[:-1]) / 2))
    return symbols, ratios, float(scale)


def _moved(rising: npt.NDArray[np.float64], edges: list[int]) -> list[int]:
    """`edges` of the groups of `rising`, one level each, after groups were split where that takes
    most off the squared error, and for each the two merged that lose least.

    Each move takes a share of `_WORTH` off at least: finer ones are left to the iteration.
    """
    sums = np.concatenate([[0.0], np.cumsum(rising)])
    energy = float(np.square(rising).sum())
    for _ in range(len(edges) - 1):
        kept = [_kept(sums, a, b) for a, b in pairwise(edges)]
        error = energy - sum(kept)
        gain, at = max(
            _best_split(sums, a, b, own) for (a, b), own in zip(pairwise(edges), kept, strict=True)
        )
        split = sorted([*edges, at])
        costs = [
            (_kept(sums, a, b) + _kept(sums, b, c) - _kept(sums, a, c), b)
            for a, b, c in zip(split, split[1:], split[2:], strict=False)
            if b != at
        ]
        cost, without = min(costs, default=(math.inf, at))
        if gain - cost <= _WORTH * error + 1e-9 * energy:
            break
        split.remove(without)
        edges = split
    return edges


def _kept(sums: npt.NDArray[np.float64], start: int, stop: int) -> float:
    """The squares of a group that its mean stands for."""
    return float((sums[stop] - sums[start]) ** 2 / (stop - start)) if stop > start else 0.0


def _best_split(
    sums: npt.NDArray[np.float64], start: int, stop: int, kept: float
) -> tuple[float, int]:
    """By how much the squared error of a group falls if it becomes two, and where."""
    if stop - start < 2:
        return 0.0, start
    inside = sums[start + 1 : stop]
    left = np.arange(1.0, stop - start)
    both = np.square(inside - sums[start]) / left + np.square(sums[stop] - inside) / left[::-1]
    at = int(both.argmax())
    return float(both[at]) - kept, start + 1 + at
