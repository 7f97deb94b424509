"""Entropy-constrained scalar quantisation: one uniform step with a dead zone, then the coder
(Sullivan 1996, IEEE Trans. Inf. Theory 42(5), on the dead zone; of updates, Mitchell et al. 2022,
arXiv:2201.02664, Section 3)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, cast

import numpy as np
import numpy.typing as npt

from fedpress_compression.coding import encode
from fedpress_compression.coding.fields import Alphabet, Layout, Positions, Reals, Symbols
from fedpress_compression.compressor import Properties, Public, Stateless, check_finite, compressor
from fedpress_compression.tensors import ModelSpec, Vector
from fedpress_compression.update import Indices, Piece, Update
from fedpress_compression.values import LARGEST, check_positive, check_whole

_MOST = 256
_HALVINGS = 14
_TRIALS = 4


@compressor("ecsq")
@dataclass(frozen=True, slots=True)
class Ecsq(Stateless):
    """Round |x| / step + `theta` down: where it is not zero, the sign and the whole number.

    One step serves the whole model, which shares bits out between layers as it should be: a quiet
    layer becomes all zeros. `theta` below a half widens the cell of zero, since a value is worth
    its bits only when it saves enough error. What is received is the mean of each cell, not its
    middle: `centroids` of them are sent, for 1, 2 and so on, the last for all larger numbers.

    The step is `target` itself (`control` = "step"), or the finest at which the upload's coded part
    keeps to `target` bits a value ("bits"), or the coarsest at which the squared error keeps to
    `target` of the squared norm ("nmse"). It is never finer than the largest value over 256, nor,
    unless it is given, so coarse that nothing is sent; very small targets give way to that. Bits
    are counted as static codes take them; the range coder then needs fewer. Biased and contractive,
    good with error feedback and without.
    """

    control: Literal["bits", "nmse", "step"] = "bits"
    target: float = 0.1
    theta: float = 0.3
    centroids: int = 2

    def __post_init__(self) -> None:
        if self.control not in ("bits", "nmse", "step"):
            raise ValueError(f"control is bits, nmse or step, not {self.control!r}")
        check_positive("target", self.target)
        if self.control == "nmse" and self.target >= 1:
            raise ValueError(f"an nmse must lie below 1, not {self.target}")
        if not 0 <= self.theta <= 0.5:
            raise ValueError(f"theta must lie in [0, 0.5], not {self.theta}")
        check_whole("centroids", self.centroids, 1, 8)

    @property
    def properties(self) -> Properties:
        return Properties(
            rate="target, or what its error takes",
            contractive=self.control != "step",
            non_expansive=True,
            source="Sullivan 1996; Mitchell et al. 2022",
        )

    def layout(self, spec: ModelSpec) -> Layout:
        return (
            Positions(spec.size, spec.size),
            Alphabet(2),
            Alphabet(_MOST),
            Reals(self.centroids, width=2),
            Reals(1),
        )

    def compress(
        self, update: Vector, state: None, public: Public, rng: np.random.Generator
    ) -> tuple[Symbols, None]:
        check_finite(update, public.spec)
        largest = float(np.abs(update).max(initial=0.0))
        if not largest:
            return self._quantised(update, 0.0), None
        unit = update / np.float64(largest)
        coarsest = (1 - 1e-6) / (1 - self.theta)
        if self.control == "step":
            step = max(self.target / largest, 1 / _MOST)
        elif self.control == "nmse":
            cells = _Cells.of(unit, self.theta)

            def near(step: float) -> bool:
                return cells.error(step, self.centroids) <= self.target * cells.energy

            step = _edge(near, coarsest, finest_that_holds=False)
        else:
            step = self._step_within(unit, self.target * update.size / 8, coarsest, public.spec)
        return self._quantised(update, step * largest), None

    def decompress(self, symbols: Symbols, public: Public, num_summands: int = 1) -> Update:
        where, signs = cast(Indices, symbols[0]), symbols[1]
        above = symbols[2].astype(np.intp)
        offsets = symbols[3].astype(np.float32)[np.minimum(above, self.centroids - 1)]
        with np.errstate(over="ignore"):  # a forged step; Update.check refuses what comes of it
            values = ((above + 1).astype(np.float32) + offsets) * symbols[4].astype(np.float32)
        return Update(public.spec.size, (Piece(where, np.where(signs == 1, -values, values)),))

    def _quantised(self, update: Vector, step: float) -> Symbols:
        """The symbols at `step`, or at the nearest float32 that keeps them in range."""
        magnitudes = np.abs(update.astype(np.float64))
        narrow = np.float32(min(step, float(LARGEST)))
        scaled = magnitudes / np.float64(narrow) if narrow else magnitudes
        whole = (
            np.minimum(np.floor(scaled + self.theta), _MOST) if narrow else np.zeros(update.size)
        )
        where = np.flatnonzero(whole)
        above = whole[where].astype(np.int64) - 1
        classes = np.minimum(above, self.centroids - 1)
        counts = np.bincount(classes, minlength=self.centroids)
        sums = np.bincount(classes, scaled[where] - above - 1, minlength=self.centroids)
        offsets = np.clip(sums / np.maximum(counts, 1), -1, _MOST)
        signs = (update[where] < 0).astype(np.uint8)
        step_sent = np.array([narrow], "<f4")
        return where, signs, above.astype(np.uint8), offsets.astype("<f2"), step_sent

    def _step_within(
        self, unit: npt.NDArray[np.float64], budget: float, coarsest: float, spec: ModelSpec
    ) -> float:
        """The finest step found whose coded size is at most `budget` bytes, or `coarsest`."""
        layout, narrow, best, aim = self.layout(spec), unit.astype(np.float32), math.inf, budget
        cells = _Cells.of(unit, self.theta)

        def size(step: float) -> int:
            return len(encode(self._quantised(narrow, step), layout))

        for _ in range(_TRIALS):  # the estimate is off by a share that varies little with the step
            step = _edge(partial(self._meets, cells, aim), coarsest)
            coded = size(step)
            if coded <= budget:
                best = min(best, step)
            aim *= 0.998 * budget / coded
        while best > coarsest:
            step = min(1.1 * step, coarsest)
            if step == coarsest or size(step) <= budget:
                best = step
        return best

    def _meets(self, cells: _Cells, aim: float, step: float) -> bool:
        return self._estimated(cells, step) <= aim

    def _estimated(self, cells: _Cells, step: float) -> float:
        """Bytes at `step`, as if every number were by itself: the entropy, and the signs."""
        counts = np.diff(cells.bounds(step))
        sent = cells.size - int(counts[0])
        counts = counts[counts > 0]
        bits = float((counts * np.log2(cells.size / counts)).sum())
        return (bits + sent) / 8 + 2 * self.centroids + 4


@dataclass(frozen=True, slots=True)
class _Cells:
    """The magnitudes of an update, sorted, with their running sums and those of their squares, each
    [size + 1]: what a step does to all of them comes of a few look-ups."""

    magnitudes: npt.NDArray[np.float64]
    sums: npt.NDArray[np.float64]
    squares: npt.NDArray[np.float64]
    theta: float

    @classmethod
    def of(cls, unit: npt.NDArray[np.float64], theta: float) -> _Cells:
        """`unit` [size], the largest magnitude 1."""
        magnitudes = np.sort(np.abs(unit))
        sums, squares = np.zeros((2, magnitudes.size + 1))
        np.cumsum(magnitudes, out=sums[1:])
        np.cumsum(np.square(magnitudes), out=squares[1:])
        return cls(magnitudes, sums, squares, theta)

    @property
    def size(self) -> int:
        return self.magnitudes.size

    @property
    def energy(self) -> float:
        return float(self.squares[-1])

    def bounds(self, step: float) -> npt.NDArray[np.intp]:
        """Where the cells of 0, 1, 2 and so on begin among the magnitudes, and where the last one
        ends."""
        cells = min(int(1 / step + self.theta) + 1, _MOST)
        edges = (np.arange(1, cells + 1) - self.theta) * step
        inner = np.searchsorted(self.magnitudes, edges)
        return np.concatenate([[0], inner, [self.size]])

    def error(self, step: float, centroids: int) -> float:
        """The squared error at `step`, each cell received as its mean, those from `centroids` on
        at the mean of their offsets."""
        bounds = self.bounds(step)
        counts, sums, squares = (
            np.diff(bounds).astype(np.float64),
            np.diff(self.sums[bounds]),
            np.diff(self.squares[bounds]),
        )
        offsets = sums - counts * np.arange(counts.size) * step
        classes = np.minimum(np.arange(counts.size), centroids)
        means = np.bincount(classes, offsets) / np.maximum(np.bincount(classes, counts), 1)
        means[0] = 0
        values = np.arange(counts.size) * step + means[classes]
        return float((squares - 2 * values * sums + counts * np.square(values)).sum())


def _edge(
    holds: Callable[[float], bool], coarsest: float, *, finest_that_holds: bool = True
) -> float:
    """The finest (or coarsest) step in [1 / 256, `coarsest`] for which `holds`, by bisection.

    `holds` is to be true of all steps on the far side of one point; the coarsest (or finest) is
    returned where it is true nowhere.
    """
    fine, coarse = math.log2(1 / _MOST), math.log2(coarsest)
    bad, good = (fine, coarse) if finest_that_holds else (coarse, fine)
    for _ in range(_HALVINGS):
        middle = (good + bad) / 2
        if holds(2**middle):
            good = middle
        else:
            bad = middle
    return float(2**good)
