"""Top-k sparsification with few-bit magnitudes (Stich et al. 2018, arXiv:1809.07599; with no
magnitude bits it is the sparse ternary compression of Sattler et al. 2019, arXiv:1903.02891)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, cast

import numpy as np
import numpy.typing as npt

from fedpress_protocols.coding.fields import Alphabet, Layout, Positions, Reals, Symbols
from fedpress_protocols.compression.compressor import Public, Stateless, check_finite, compressor
from fedpress_protocols.model import ModelSpec, Vector
from fedpress_protocols.update import Indices, Piece, Update

_LLOYD_STEPS = 12


@compressor("topk")
@dataclass(frozen=True, slots=True)
class TopK(Stateless):
    """Keep the k entries largest in magnitude: where they are, their signs, few-bit magnitudes.

    k is `count`, or else `fraction` of the coordinates rounded up, over the whole model or in each
    tensor. Exactly k are sent unless fewer differ from zero; of equal magnitudes the first count.
    The 2**`magnitude_bits` levels are fitted to what was selected (Lloyd 1982), so the lowest lies
    at the selection threshold or above: a grid with a zero level would round a sixth of what was
    selected to nothing.
    """

    fraction: float = 0.01
    count: int | None = None
    magnitude_bits: int = 2
    scope: Literal["model", "tensor"] = "model"

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ValueError(f"fraction must lie in (0, 1], not {self.fraction}")
        if self.count is not None and (not isinstance(self.count, int) or self.count < 1):
            raise ValueError(f"count must be at least 1, not {self.count}")
        if not isinstance(self.magnitude_bits, int) or not 0 <= self.magnitude_bits <= 4:
            raise ValueError(f"magnitude_bits must be 0 to 4, not {self.magnitude_bits}")
        if self.scope not in ("model", "tensor"):
            raise ValueError(f"scope is model or tensor, not {self.scope!r}")

    @property
    def num_levels(self) -> int:
        return int(2**self.magnitude_bits)

    def layout(self, spec: ModelSpec) -> Layout:
        groups = self._groups(spec)
        at_most = sum(self._k(group.stop - group.start) for group in groups)
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
        check_finite(update, public.spec)
        positions, magnitudes, ratios, scales = [], [], [], []
        for group in self._groups(public.spec):
            part = update[group]
            chosen = _largest(np.abs(part), self._k(part.size))
            symbols, group_ratios, scale = _fit_levels(np.abs(part[chosen]), self.num_levels)
            positions.append(chosen + group.start)
            magnitudes.append(symbols)
            ratios.append(group_ratios)
            scales.append(scale)
        where = np.concatenate(positions) if positions else np.empty(0, np.int64)
        signs = (update[where] < 0).astype(np.uint8)
        levels = np.concatenate(magnitudes) if magnitudes else np.empty(0, np.uint8)
        flat_ratios = np.concatenate(ratios) if ratios else np.empty(0, "<f2")
        fields = (where, signs, *((levels,) if self.magnitude_bits else ()))
        return (*fields, flat_ratios, np.array(scales, "<f4")), None

    def decompress(self, symbols: Symbols, public: Public, num_summands: int = 1) -> Update:
        where = cast(Indices, symbols[0])
        magnitudes = symbols[2] if self.magnitude_bits else np.zeros(where.size, np.uint8)
        ratios = symbols[-2].astype(np.float32).reshape(-1, self.num_levels)
        scales = symbols[-1].astype(np.float32)
        group = np.zeros(where.size, np.intp)
        if self.scope == "tensor":
            stops = [s.stop for s in self._groups(public.spec)]
            group = np.searchsorted(stops, where, side="right")
        with np.errstate(over="ignore"):  # a forged scale; Update.check refuses what comes of it
            levels = ratios * scales[:, np.newaxis]
        values = levels[group, magnitudes]
        return Update(public.spec.size, (Piece(where, np.where(symbols[1] == 1, -values, values)),))

    def _groups(self, spec: ModelSpec) -> list[slice]:
        if self.scope == "tensor":
            return list(spec.slices.values())
        return [slice(0, spec.size)]

    def _k(self, size: int) -> int:
        return min(size, math.ceil(self.fraction * size) if self.count is None else self.count)


def _largest(magnitudes: Vector, k: int) -> Indices:
    """The rising indices of the k largest, ties to the lower index, zeros left out."""
    if k >= magnitudes.size:
        return np.flatnonzero(magnitudes)
    threshold = np.partition(magnitudes, magnitudes.size - k)[magnitudes.size - k]
    if threshold == 0:
        return np.flatnonzero(magnitudes)
    above = np.flatnonzero(magnitudes > threshold)
    ties = np.flatnonzero(magnitudes == threshold)[: k - above.size]
    return np.sort(np.concatenate([above, ties]))


def _fit_levels(
    magnitudes: Vector, num_levels: int
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.floating], float]:
    """Level of each magnitude, the levels as float16 ratios [num_levels] of a float32 scale.

    Lloyd's iteration from equal shares of the sorted magnitudes. A level's symbol is chosen by the
    values as the decoder will see them, so that what is sent is the nearest that can be sent.
    """
    if not magnitudes.size:
        return np.empty(0, np.uint8), np.zeros(num_levels, "<f2"), 0.0
    ordered = np.sort(magnitudes).astype(np.float64)
    sums = np.concatenate([[0.0], np.cumsum(ordered)])
    edges = np.linspace(0, ordered.size, num_levels + 1).round().astype(np.int64)
    centres = np.zeros(num_levels)
    for _ in range(_LLOYD_STEPS):
        counts = np.diff(edges)
        means = np.diff(sums[edges]) / np.maximum(counts, 1)
        centres = np.maximum.accumulate(np.where(counts > 0, means, centres))
        inner = np.searchsorted(ordered, (centres[1:] + centres[:-1]) / 2)
        moved = np.concatenate([[0], inner, [ordered.size]])
        if (moved == edges).all():
            break
        edges = moved
    scale = np.float32(centres[-1])
    ratios = (centres / np.float64(scale)).astype("<f2")
    levels = ratios.astype(np.float32) * scale
    symbols = np.searchsorted((levels[1:] + levels[:-1]) / 2, magnitudes, side="right")
    return symbols.astype(np.uint8), ratios, float(scale)
