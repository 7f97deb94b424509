"""Count sketches: every coordinate added, with a random sign, to one random cell in each of a few
rows (Charikar et al. 2002; for gradients, Ivkin et al. 2019, arXiv:1903.04488)."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from fedpress_compression.coding.fields import Integers, Layout, Symbols
from fedpress_compression.compressor import Properties, Public, Stateless, check_finite, compressor
from fedpress_compression.compressors.topk import largest
from fedpress_compression.errors import ConfigurationError
from fedpress_compression.linear import LinearMap, Numbers
from fedpress_compression.matrices import root_mean_square
from fedpress_compression.randomness import PublicRandomness
from fedpress_compression.sketches import hashed
from fedpress_compression.tensors import ModelSpec, Vector
from fedpress_compression.update import Piece, Update
from fedpress_compression.values import Rounding, check_rounding, check_share, check_whole, rounded

Cells = npt.NDArray[np.float64]
"""[rows, columns]; a client's are whole numbers of steps."""

_LARGEST = 2**31 - 1
_DOMAIN = b"fedpress count sketch v1\x00"


@compressor("count_sketch")
@dataclass(frozen=True, slots=True)
class CountSketch(Stateless):
    """Add every coordinate, in whole steps of 2**-scale_bits, to one cell in each of `rows` rows.

    A row has `fraction` * size / rows cells, rounded up. Cells are whole numbers and exact, so
    sketches of a cohort add up to the sketch of its sum, to the last bit (unless a cell, or a
    coordinate, is beyond 2**31 steps and is clipped).

    `mean` recovers a coordinate as the mean of its cells: linear, unbiased, and with a variance of
    the whole update's squares / cells, so good for nothing but sums. `median` takes the median of
    its cells, and of the medians the `keep` largest: heavy hitters come out right even where
    single cells are spoilt. Where a server keeps sketches from round to round, as the strategy
    fetchsgd does, all rounds must hash alike: `seed` sees to it; without it every round hashes
    anew.
    """

    rows: int = 5
    fraction: float = 0.1
    scale_bits: int = 16
    rounding: Rounding = "nearest"
    recover: Literal["mean", "median"] = "mean"
    keep: float = 0.01
    seed: int | None = None

    def __post_init__(self) -> None:
        check_whole("rows", self.rows, 1, 32)
        check_share("fraction", self.fraction)
        check_whole("scale_bits", self.scale_bits, 0, 40)
        check_rounding(self.rounding)
        if self.recover not in ("mean", "median"):
            raise ValueError(f"recover is mean or median, not {self.recover!r}")
        check_share("keep", self.keep)
        if self.seed is not None:
            check_whole("seed", self.seed, 0, 2**63 - 1)

    @property
    def commutes_with_sum(self) -> bool:
        return self.recover == "mean"

    @property
    def properties(self) -> Properties:
        return Properties(
            rate="32 * fraction",
            unbiased=self.recover == "mean" and self.rounding == "stochastic",
            source="Charikar et al. 2002, Section 3.2",
        )

    def columns(self, size: int) -> int:
        """Cells in a row, for a vector of `size`."""
        return max(1, math.ceil(self.fraction * size / self.rows))

    def layout(self, spec: ModelSpec) -> Layout:
        return (Integers(_LARGEST, self.rows * self.columns(spec.size)),)

    def compress(
        self, update: Vector, state: None, public: Public, rng: np.random.Generator
    ) -> tuple[Symbols, None]:
        check_finite(update, public.spec)
        scaled = update.astype(np.float64) * 2.0**self.scale_bits
        steps = np.clip(rounded(scaled, self.rounding, rng), -_LARGEST, _LARGEST)
        cells = self.sketch(steps, self.randomness(public))
        return (np.clip(cells, -_LARGEST, _LARGEST).ravel().astype(np.int32),), None

    def decompress(self, symbols: Symbols, public: Public, num_summands: int = 1) -> Update:
        cells = symbols[0].astype(np.float64) * 2.0**-self.scale_bits
        return self.linear_map(public).lift(cells)

    def linear_map(self, public: Public) -> LinearMap:
        return _Cells(self, public)

    def randomness(self, public: Public | None = None) -> PublicRandomness:
        """The randomness of the hashes: the seed's, if there is one; else the round's."""
        if self.seed is not None:
            digest = hashlib.sha256(_DOMAIN + self.seed.to_bytes(8, "little")).digest()
            return PublicRandomness(digest)
        if public is None:
            raise ConfigurationError("a count sketch without a seed hashes anew in every round")
        return public.randomness

    def sketch(self, values: Cells, randomness: PublicRandomness) -> Cells:
        """The cells that `values` [size] add up to, in the order of the coordinates."""
        cells = np.zeros((self.rows, self.columns(values.size)))
        for block, buckets, signs in self._hashes(values.size, randomness):
            for row in range(self.rows):
                np.add.at(cells[row], buckets[row], signs[row] * values[block])
        return cells

    def estimates(self, cells: Cells, size: int, randomness: PublicRandomness) -> Cells:
        """Every coordinate [size] as its cells tell it: their mean or their median."""
        found = np.empty(size)
        for block, buckets, signs in self._hashes(size, randomness):
            told = signs * np.take_along_axis(cells, buckets, axis=1)
            if self.recover == "mean":
                found[block] = told.sum(axis=0) / self.rows
            else:
                found[block] = _median(told)
        return found

    def touched(
        self, chosen: npt.NDArray[np.bool_], randomness: PublicRandomness
    ) -> npt.NDArray[np.bool_]:
        """The cells [rows, columns] that a coordinate of `chosen` [size] falls into."""
        cells = np.zeros((self.rows, self.columns(chosen.size)), bool)
        for block, buckets, _ in self._hashes(chosen.size, randomness):
            for row in range(self.rows):
                cells[row, buckets[row, chosen[block]]] = True
        return cells

    def _hashes(
        self, size: int, randomness: PublicRandomness
    ) -> Iterator[tuple[slice, npt.NDArray[np.int64], npt.NDArray[np.int8]]]:
        """Cell and sign of each coordinate in each row, a block of coordinates at a time."""
        streams = [randomness.stream(f"count_sketch {row}") for row in range(self.rows)]
        of_rows = (hashed(stream, size, self.columns(size)) for stream in streams)
        for rows in zip(*of_rows, strict=True):
            yield rows[0][0], np.stack([row[1] for row in rows]), np.stack([row[2] for row in rows])


@dataclass(frozen=True)
class _Cells:
    """The map to the cells of `sketch`, row by row; linear back as well where it recovers means."""

    sketch: CountSketch
    public: Public

    @property
    def spread(self) -> Numbers:
        previous = self.public.known("previous").astype(np.float64)
        columns = self.sketch.columns(previous.size)
        return np.full(self.sketch.rows * columns, root_mean_square(previous, columns))

    def project(self, update: Vector) -> Numbers:
        check_finite(update, self.public.spec)
        randomness = self.sketch.randomness(self.public)
        return self.sketch.sketch(update.astype(np.float64), randomness).ravel()

    def lift(self, numbers: Numbers) -> Update:
        size, sketch = self.public.spec.size, self.sketch
        cells = numbers.reshape(sketch.rows, sketch.columns(size))
        estimates = sketch.estimates(cells, size, sketch.randomness(self.public))
        values = estimates.astype(np.float32)
        if sketch.recover == "mean":
            return Update.from_dense(values)
        where = largest(np.abs(values), math.ceil(sketch.keep * size))
        return Update(size, (Piece(where, values[where]),))


def _median(told: Cells) -> Cells:
    """Over the first axis; of an even number, half the sum of the two in the middle."""
    ordered = np.sort(told, axis=0)
    middle: Cells = (ordered[(len(told) - 1) // 2] + ordered[len(told) // 2]) / 2
    return middle
