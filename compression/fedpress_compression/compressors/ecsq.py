"""Entropy-constrained scalar quantisation: one uniform step with a dead zone, then the coder
(Sullivan 1996, IEEE Trans. Inf. Theory 42(5), on the dead zone; of updates, Mitchell et al. 2022,
arXiv:2201.02664, Section 3). Rate-distortion-optimised quantisation as in Karczewicz et al. 2008
(ITU-T VCEG-AH21), with the rates of this package's coder in place of those of a video's."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, cast

import numpy as np
import numpy.typing as npt

from fedpress_compression.coding import encode
from fedpress_compression.coding.fields import Alphabet, Layout, Positions, Reals, Symbols
from fedpress_compression.compressor import (
    ADDED,
    Properties,
    Public,
    Stateless,
    check_finite,
    compressor,
)
from fedpress_compression.contexts import grid_of
from fedpress_compression.row_choice import RowChoice, choose_rows
from fedpress_compression.tensors import ModelSpec, Vector
from fedpress_compression.update import Indices, Piece, Update
from fedpress_compression.values import LARGEST, check_positive, check_whole, flatness

Numbers = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

_MOST = 256
_HALVINGS = 14
_TRIALS = 4
_PASSES = 2
_PRIOR = 4
"""Flags that a row's or column's rate starts with, at the rate of its tensor."""
_NEAR, _WIDER = 0.998, 0.85
_ENOUGH = 0.9
"""Of a budget of bytes: a step that uses less is compared with a choice of rows."""
_HEADS = 12
"""Bytes of a body beside its positions, signs, numbers and centroids."""
_WORTH = 1.1
"""Times what one step for all saves of the squared error, for which a flat update sends rows."""
_FLAT = 0.65
"""The least `flatness`, which is .2 to .64 with SGD, residual included."""


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

    With `rdo` above 0 each value is zero, the whole number below or the one above: whichever has
    the least squared error, in squared steps, plus `rdo` for each bit that it is likely to take
    where rows and columns are as full as its own. A finer step makes up for the error. The receiver
    does not have to know.

    With `control` "bits" a body has a budget of `min_bytes` at least: of a small update, less would
    be little beside a request's headers. Where so many values are alike that one step sends too few
    of them and the next too many, as after few local steps of Adam or of signs, some rows of the
    tensors are sent, and nothing of the others.

    With `by_rows` it sends rows of every flat update, as those of Adam are, if they save more error
    than one step for all, see `choose_rows`. Their bits are an estimate for the range coder, which
    `coded` brings; static codes may take up to twice as many. With error feedback, which brings the
    other rows later, more of what clients computed arrives sooner.
    """

    control: Literal["bits", "nmse", "step"] = "bits"
    target: float = 0.1
    theta: float = 0.3
    centroids: int = 2
    rdo: float = field(default=0.0, metadata=ADDED)
    min_bytes: int = field(default=0, metadata=ADDED)
    by_rows: bool = field(default=False, metadata=ADDED)

    def __post_init__(self) -> None:
        if self.control not in ("bits", "nmse", "step"):
            raise ValueError(f"control is bits, nmse or step, not {self.control!r}")
        check_positive("target", self.target)
        if self.control == "nmse" and self.target >= 1:
            raise ValueError(f"an nmse must lie below 1, not {self.target}")
        if not 0 <= self.theta <= 0.5:
            raise ValueError(f"theta must lie in [0, 0.5], not {self.theta}")
        check_whole("centroids", self.centroids, 1, 8)
        if not 0 <= self.rdo <= 1:
            raise ValueError(f"rdo must lie in [0, 1], not {self.rdo}")
        check_whole("min_bytes", self.min_bytes, 0, 2**31 - 1)
        if not isinstance(self.by_rows, bool):
            raise ValueError(f"by_rows is true or false, not {self.by_rows!r}")
        if self.by_rows and (self.control != "bits" or self.rdo):
            raise ValueError("by_rows needs control bits, and no rdo")

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
        largest, is_sent = float(np.abs(update).max(initial=0.0)), None
        if not largest:
            return self._quantised(update, 0.0, public.spec), None
        unit = update / np.float64(largest)
        coarsest = (1 - 1e-6) / (1 - self.theta)
        if self.control == "step":
            step = max(self.target / largest, 1 / _MOST)
        elif self.control == "nmse":
            cells = _Cells.of(unit, self.theta)

            def near(step: float) -> bool:
                return cells.error(step, self.centroids) <= self.target * cells.energy

            step = _edge(near, coarsest, finest_that_holds=False)
            if self.rdo:
                step = self._step_of_error(
                    unit, self.target * cells.energy, step, coarsest, public.spec
                )
        else:
            budget = max(self.target * update.size / 8, self.min_bytes)
            step, is_sent = self._within(unit, budget, coarsest, public.spec)
        return self._quantised(update, step * largest, public.spec, is_sent), None

    def decompress(self, symbols: Symbols, public: Public, num_summands: int = 1) -> Update:
        where, signs = cast(Indices, symbols[0]), symbols[1]
        above = symbols[2].astype(np.intp)
        offsets = symbols[3].astype(np.float32)[np.minimum(above, self.centroids - 1)]
        with np.errstate(over="ignore"):  # a forged step; Update.check refuses what comes of it
            values = ((above + 1).astype(np.float32) + offsets) * symbols[4].astype(np.float32)
        return Update(public.spec.size, (Piece(where, np.where(signs == 1, -values, values)),))

    def _quantised(
        self, update: Vector, step: float, spec: ModelSpec, is_sent: Flags | None = None
    ) -> Symbols:
        """The symbols at `step`, or at the nearest float32 that keeps them in range, of all
        coordinates or of those of `is_sent`."""
        magnitudes = np.abs(update.astype(np.float64))
        narrow = np.float32(min(step, float(LARGEST)))
        scaled = magnitudes / np.float64(narrow) if narrow else magnitudes
        whole = (
            np.minimum(np.floor(scaled + self.theta), _MOST) if narrow else np.zeros(update.size)
        )
        if is_sent is not None:
            whole = np.where(is_sent, whole, 0)
        if self.rdo and narrow:
            whole = self._optimised(scaled, whole, spec)
        where = np.flatnonzero(whole)
        above = whole[where].astype(np.int64) - 1
        classes = np.minimum(above, self.centroids - 1)
        counts = np.bincount(classes, minlength=self.centroids)
        sums = np.bincount(classes, scaled[where] - above - 1, minlength=self.centroids)
        offsets = np.clip(sums / np.maximum(counts, 1), -1, _MOST)
        signs = (update[where] < 0).astype(np.uint8)
        step_sent = np.array([narrow], "<f4")
        return where, signs, above.astype(np.uint8), offsets.astype("<f2"), step_sent

    def _optimised(self, scaled: Numbers, whole: Numbers, spec: ModelSpec) -> Numbers:
        """`whole` [size], what `scaled` is rounded to, with fewer bits and more error."""
        near = np.flatnonzero(scaled >= 0.5)
        places = _Places.of(near, spec)
        exact, levels = scaled[near], whole[near]
        below = np.minimum(np.floor(exact), _MOST)
        for _ in range(_PASSES):
            is_sent = levels > 0
            if not is_sent.any():
                break
            likely = places.chances(is_sent)
            sent = np.log2((1 - likely) / likely) + 1
            ones = levels == 1
            larger = levels[levels > 1]
            first = float(exact[ones].mean()) if ones.any() else 1.0
            later = float((exact[levels > 1] - larger).mean()) if larger.size else 0.0
            alone = (ones.sum() + 1) / (is_sent.sum() + 2)
            last = 1 / (1 + float((larger - 2).mean())) if larger.size else 0.5
            last = min(max(last, 1e-3), 0.999)
            best, least = np.zeros(near.size), np.square(exact)
            for level in (below, np.minimum(below + 1, _MOST)):
                value = np.where(level == 1, first, level + later)
                extra = -np.log2(last * (1 - alone)) - (level - 2) * np.log2(1 - last)
                bits = sent + np.where(level == 1, -np.log2(alone), extra)
                cost = np.square(exact - value) + self.rdo * bits
                is_better = (level > 0) & (cost < least)
                best, least = np.where(is_better, level, best), np.where(is_better, cost, least)
            levels = best if best.any() else np.where(exact == exact.max(), levels, 0)
        optimised = np.zeros_like(whole)
        optimised[near] = levels
        return optimised

    def _step_of_error(
        self, unit: Numbers, most: float, step: float, coarsest: float, spec: ModelSpec
    ) -> float:
        """The coarsest step found near `step` whose squared error is at most `most`, or the finest
        of all."""
        narrow = unit.astype(np.float32)
        magnitudes, energy = np.abs(unit), float(np.square(unit).sum())

        def error(step: float) -> float:
            where, _, above, offsets, sent = self._quantised(narrow, step, spec)
            classes = np.minimum(above, self.centroids - 1)
            levels = above.astype(np.float64) + 1 + offsets.astype(np.float64)[classes]
            values = levels * float(sent[0])
            return energy + float((values * (values - 2 * magnitudes[where])).sum())

        return _farthest(error, most, step, 1 / _MOST, coarsest, _TRIALS)

    def _within(
        self, unit: Numbers, budget: float, coarsest: float, spec: ModelSpec
    ) -> tuple[float, Flags | None]:
        """The step, and what to send at it, for `budget` bytes: all, or a choice of rows."""
        layout, narrow, aim = self.layout(spec), unit.astype(np.float32), budget
        cells, sizes = _Cells.of(unit, self.theta), dict[float, int]()

        def size(step: float, is_sent: Flags | None = None) -> int:
            return len(encode(self._quantised(narrow, step, spec, is_sent), layout))

        if self.rdo:  # the estimate knows nothing of what it leaves out
            step = _edge(partial(self._meets, cells, aim), coarsest)
            return _farthest(size, budget, step, coarsest, 1 / _MOST, 2 * _TRIALS), None
        for _ in range(_TRIALS):  # the estimate is off by a share that varies little with the step
            step = _edge(partial(self._meets, cells, aim), coarsest)
            sizes[step] = size(step)
            aim *= 0.998 * budget / sizes[step]
        while min(sizes.values()) > budget and step < coarsest:
            step = min(1.1 * step, coarsest)
            sizes[step] = size(step)
        best = min((each for each, coded in sizes.items() if coded <= budget), default=step)
        plain = cells.energy - cells.error(best, self.centroids) if sizes[best] <= budget else 0.0
        bits, is_full = 8 * budget, _ENOUGH * budget <= sizes[best] <= budget
        if flatness(unit) < _FLAT or (is_full and not self.by_rows):
            return best, None
        while True:
            choice = self._choice(unit, bits, coarsest, spec)
            if choice is None or choice.saved <= plain * (_WORTH if is_full else 1):
                return best, None
            coded = 0 if self.by_rows else size(choice.step, choice.is_sent)
            if coded <= budget:
                return choice.step, choice.is_sent
            bits *= _ENOUGH * budget / coded

    def _choice(
        self, unit: Numbers, bits: float, coarsest: float, spec: ModelSpec
    ) -> RowChoice | None:
        left = bits - 8 * (2 * self.centroids + _HEADS)
        steps = coarsest, 1 / _MOST
        return choose_rows(np.abs(unit), grid_of(spec).matrices, left, self.theta, steps, _MOST)

    def _meets(self, cells: _Cells, aim: float, step: float) -> bool:
        return self._estimated(cells, step) <= aim

    def _estimated(self, cells: _Cells, step: float) -> float:
        """Bytes at `step`, as if every number were by itself: the entropy, and the signs."""
        counts = np.diff(cells.bounds(step))
        sent = cells.size - int(counts[0])
        counts = counts[counts > 0]
        bits = float((counts * np.log2(cells.size / counts)).sum())
        return (bits + sent) / 8 + 2 * self.centroids + 4


def cost_at(matrix: npt.NDArray[np.floating], step: float, theta: float) -> tuple[float, float]:
    """The squared error, in squared steps, and the bits of `matrix` [rows, columns] at `step`.

    An estimate: a value that is sent takes h(p) / p bits for where it is, h the binary entropy and
    p its chance by row and column, and those of its sign and, by the entropy, of its number.
    """
    scaled = np.abs(matrix).astype(np.float64, copy=False).ravel()
    scaled /= step
    error = float(scaled @ scaled)
    where = np.flatnonzero(scaled >= 1 - theta)
    if not where.size:
        return error, 0.0
    exact = scaled[where]
    levels = np.minimum(np.floor(exact + theta), _MOST)
    classes = (levels > 1).astype(np.intp)
    means = np.bincount(classes, exact - levels) / np.maximum(np.bincount(classes), 1)
    values = levels + means[classes]
    error += float((values * (values - 2 * exact)).sum())
    counts = np.bincount(levels.astype(np.intp))
    counts = counts[counts > 0]
    bits = where.size + float((counts * np.log2(where.size / counts)).sum())
    chances = _Places.on(where, [matrix.shape]).chances(np.ones(where.size, np.bool_))
    return error, bits + float((_entropy(chances) / chances).sum())


def _entropy(chance: Numbers) -> Numbers:
    """Of a flag, in bits."""
    bits: Numbers = -chance * np.log2(chance) - (1 - chance) * np.log2(1 - chance)
    return bits


@dataclass(frozen=True, slots=True)
class _Places:
    """Some coordinates of a grid: the tensor, the row and the column of each, numbered through all
    tensors, and the extents of those."""

    tensors: Indices
    rows: Indices
    columns: Indices
    heights: Indices
    widths: Indices

    @classmethod
    def of(cls, where: Indices, spec: ModelSpec) -> _Places:
        return cls.on(where, grid_of(spec).matrices)

    @classmethod
    def on(cls, where: Indices, matrices: Sequence[tuple[int, int]]) -> _Places:
        extents = np.array(matrices, np.int64).reshape(-1, 2)
        heights, widths = extents[:, 0], extents[:, 1]
        ends = np.cumsum(heights * widths)
        tensors = np.searchsorted(ends, where, side="right")
        inside = where - (ends - heights * widths)[tensors]
        row, column = np.divmod(inside, widths[tensors])
        rows = row + (np.cumsum(heights) - heights)[tensors]
        columns = column + (np.cumsum(widths) - widths)[tensors]
        return cls(tensors, rows, columns, heights, widths)

    def chances(self, is_sent: npt.NDArray[np.bool_]) -> Numbers:
        """Of each coordinate, the chance that it is not zero where those of `is_sent` are all that
        are not: odds that its row and its column each multiply."""

        def rates(index: Indices, sizes: Indices, prior: Numbers) -> Numbers:
            counts = np.bincount(index[is_sent], minlength=sizes.size)
            return np.clip((counts + _PRIOR * prior) / (sizes + _PRIOR), 1e-5, 0.99)

        none = np.full(self.heights.size, is_sent.mean() * 1e-3)
        tensor = rates(self.tensors, self.heights * self.widths, none)
        row = rates(
            self.rows, np.repeat(self.widths, self.heights), np.repeat(tensor, self.heights)
        )
        # a vector is one row: its columns tell of one coordinate each
        tall = np.where(self.heights > 1, self.heights, self.widths)
        column = rates(self.columns, np.repeat(tall, self.widths), np.repeat(tensor, self.widths))
        single = np.repeat(self.heights == 1, self.widths)
        column = np.where(single, np.repeat(tensor, self.widths), column)
        odds = _logit(row[self.rows]) + _logit(column[self.columns]) - _logit(tensor[self.tensors])
        chances: Numbers = np.clip(1 / (1 + np.exp(-odds)), 1e-5, 0.98)
        return chances


def _logit(chance: Numbers) -> Numbers:
    odds: Numbers = np.log(chance / (1 - chance))
    return odds


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
        """Indices of the sorted magnitudes where the cells of 0, 1, 2 and so on begin, and the end
        of the last one."""
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


def _farthest(
    cost: Callable[[float], float],
    most: float,
    step: float,
    safest: float,
    last: float,
    trials: int,
) -> float:
    """The step found nearest to `last` whose `cost` is at most `most`, or `safest`.

    The search begins at `step` and takes `cost` to rise from `safest` to `last`, steps between
    which all lie. Between one that holds and one that does not it interpolates, at most `trials`
    times: the cost is close to a power of the step.
    """
    widen = _WIDER if last < safest else 1 / _WIDER
    low, high = min(safest, last), max(safest, last)
    near, far = step, step
    below = above = cost(step)
    while below > most and near != safest:
        far, above = near, below
        near = min(max(near / widen, low), high)
        below = cost(near)
    while above <= most and far != last:
        near, below = far, above
        far = min(max(far * widen, low), high)
        above = cost(far)
    for _ in range(trials):
        if not below < _NEAR * most < most < above:
            break
        share = math.log((1 + _NEAR) / 2 * most / below) / math.log(above / below)
        step = near * (far / near) ** min(max(share, 0.1), 0.9)
        new = cost(step)
        if new <= most:
            near, below = step, new
        else:
            far, above = step, new
    return far if above <= most else near


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
