"""Fields in interleaved lanes: the flags and values of `ranged` under tables that are sent ahead.

Nothing adapts, so that lanes and groups of lanes decode side by side, on a GPU as well. In place of
what the range coder learns, levels of rows and columns are sent: the chance of a flag follows from
the sum of its row's and its column's, and a row or column without any flag costs no more than its
level. Magnitudes have the number of coordinates in their row times that in their column. Both have
the symbol before them in their lane besides.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fedpress_compression import kernels
from fedpress_compression.coding.alphabets import plan_alphabet, read_alphabet
from fedpress_compression.coding.bits import Ints, Octets, Reader, uvarint
from fedpress_compression.coding.exp_golomb import MAX_MANTISSA, plan_numbers, read_numbers
from fedpress_compression.coding.sequences import Candidate
from fedpress_compression.errors import DecodingError
from fedpress_compression.kernels.wire import LANE_BITS, LANES, Tables

_ONE = 1 << LANE_BITS
_BAND = 1024
_LEVELS, _CLOSED = 16, 64
"""Levels are below 16, classes of open coordinates below 64."""
_LANE_BYTES = 256
"""A lane costs two bytes; so many or more for each keep that below 1 %."""
_MOST_LANES = 1 << 15
_MOST_MEMORY = 4
_STEPS = ((3, 3), (5, 5), (8, 8), (12, 12), (5, 0), (8, 0), (16, 0), (0, 0))
"""Widths of levels that are tried for rows and columns, in 1/8 of a factor of 2 in the odds."""
_SHIFTS = (0, 1, 2, 31)
_DIRECT = 7
_BIT = 1 << 16
"""Costs are in 1/65536 of a bit: whole numbers, so that every machine chooses alike."""
_COSTS = np.append(0, np.rint(-np.log2(np.arange(1, _ONE + 1) / _ONE) * _BIT)).astype(np.int64)
"""The cost of a symbol by its frequency."""
_ENTRY, _NO_ENTRY = 6 * _BIT, _BIT
"""The assumed costs of an entry of a table, and of none, while classes are chosen."""


class Lines:
    """The rows and columns of a plane: lines 1, 2, ..., the rows of all matrices, then the columns.

    One row alone is cut into rows of 1024, without columns: line 0 stands for these.
    """

    def __init__(self, matrices: Ints) -> None:
        shapes = [(height, width) for height, width in matrices.tolist() if height * width]
        cut = [(-(-w // _BAND), min(w, _BAND)) if h == 1 else (h, w) for h, w in shapes]
        self._height, self._width = np.array(cut, np.int64).reshape(-1, 2).T
        self._has_columns = np.array([height > 1 for height, _ in shapes], np.bool_)
        self._start = np.cumsum([0, *(height * width for height, width in shapes)])
        self._row = 1 + np.cumsum([0, *self._height])
        self._column = self._row[-1] + np.cumsum([0, *(self._width * self._has_columns)])
        self.size, self.num = int(self._start[-1]), int(self._column[-1])

    def of(self, where: Ints) -> tuple[Ints, Ints]:
        """The row and the column of each coordinate, as lines."""
        which = np.searchsorted(self._start, where, side="right") - 1
        rows, columns = np.divmod(where - self._start[which], self._width[which])
        columns += self._column[which]
        columns *= self._has_columns[which]
        return rows + self._row[which], columns

    def counts(self, place: tuple[Ints, Ints] | None) -> Ints:
        """How many of the coordinates at `place`, or of all, lie in each line [num]; of line 0,
        nothing."""
        counts = np.zeros(self.num, np.int64)
        if place is not None:
            for lines in place:
                counts += np.bincount(lines, minlength=self.num)
        else:
            for at, has_columns in enumerate(self._has_columns.tolist()):
                rows, columns = self._of(at, counts)
                rows[:] = self._width[at]
                rows[-1] -= rows.sum() - (self._start[at + 1] - self._start[at])
                if has_columns:
                    columns[:] = self._height[at]
        counts[0] = 0
        return counts

    def open(self, parts: Ints) -> tuple[Ints, Octets]:
        """The coordinates that are not closed, and their classes: `parts` [num] of row and column,
        added."""
        places, classes = [np.zeros(0, np.int64)], [np.zeros(0, np.uint8)]
        for at in range(self._height.size):
            rows, columns = self._of(at, parts)
            row, column = np.flatnonzero(rows < _CLOSED), np.flatnonzero(columns < _CLOSED)
            place = (row * self._width[at] + self._start[at])[:, np.newaxis] + column
            sums = (rows[row, np.newaxis] + columns[column]).astype(np.uint8)
            inside = int(np.searchsorted(place.ravel(), self._start[at + 1]))
            places.append(place.ravel()[:inside])
            classes.append(sums.ravel()[:inside])
        return np.concatenate(places), np.concatenate(classes)

    def histogram(self, parts: Ints) -> Ints:
        """How many coordinates `open` has of each class; the last row cut of one as if whole."""
        counts = np.zeros(_CLOSED, np.int64)
        for at in range(self._height.size):
            rows, columns = (
                np.bincount(each[each < _CLOSED], minlength=_LEVELS) for each in self._of(at, parts)
            )
            product = np.convolve(rows, columns)
            counts[: product.size] += product
        return counts

    def levels(self, odds: Ints, of_ones: Ints, steps: tuple[int, int]) -> Octets:
        """Levels from 1 on for the odds of each line, `steps` wide for rows and columns, where 0 is
        one level for all; 0 for lines without a one."""
        levels = np.ones(self.num, np.int64)
        rows, columns = slice(1, self._row[-1]), slice(self._row[-1], self.num)
        for part, step in zip((rows, columns), steps, strict=True):
            any_ = of_ones[part] > 0
            if step and any_.any():
                above = odds[part] - odds[part][any_].min()
                raised = np.minimum(1 + (above + step // 2) // step, _LEVELS - 1)
                levels[part] = np.where(any_, raised, 0)
        return levels.astype(np.uint8)

    def _of(self, at: int, each: Ints) -> tuple[Ints, Ints]:
        """The values of `each` line that belong to the rows and to the columns of a matrix."""
        rows = each[self._row[at] : self._row[at + 1]]
        if not self._has_columns[at]:
            return rows, np.zeros(self._width[at], np.int64)
        return rows, each[self._column[at] : self._column[at + 1]]


# Flags, and values with signs.


def encode_flags(positions: Ints, matrices: Ints) -> bytes:
    """The coordinates `positions` of the plane of `matrices`, one or more."""
    return _encode_bits(positions, None, Lines(matrices))


def read_flags(reader: Reader, num: int, matrices: Ints) -> Ints:
    """Read `num` coordinates; work and memory are proportional to the plane."""
    places, bits = _read_bits(reader, None, Lines(matrices))
    positions: Ints = places[bits != 0]
    if positions.size != num:
        raise DecodingError(f"{positions.size} flags set, expected {num}")
    return positions


def encode_values(
    magnitudes: Ints, signs: Octets, signed: int, most: int, where: Ints, matrices: Ints
) -> bytes:
    """One or more `magnitudes` in [0, most] at the coordinates `where`, with their `signs`: of none
    (`signed` 0), of those that are not 0 (1), or of all (2)."""
    lines = Lines(matrices)
    mantissa = most.bit_length() if most >> _DIRECT == 0 else _DIRECT if most < 256 else 2
    symbols, raw = kernels.split(magnitudes, mantissa)
    raw_widths = _raw_widths(most, mantissa)
    parts = [bytes((mantissa,))]
    if most:
        lengths = _lengths(where, lines)
        plans = {s: _Plan(symbols, lengths >> np.uint8(s), raw_widths.size) for s in _SHIFTS}
        shift = min(plans, key=lambda each: plans[each].cost)
        parts = [bytes((mantissa | shift << 3,)), plans[shift].write()]
    parts.append(kernels.write_raw(symbols, raw, raw_widths))
    having = _having_signs(magnitudes, signed)
    if having.any():
        ones = where[having & (signs != 0)]
        parts.append(_encode_bits(ones, where[having], lines))
    return b"".join(parts)


def read_values(
    reader: Reader, signed: int, most: int, where: Ints, matrices: Ints
) -> tuple[Ints, Octets]:
    """Read the magnitudes, which may exceed `most`, and the signs."""
    lines = Lines(matrices)
    head = reader.read(8)
    mantissa, shift = head & 7, head >> 3
    raw_widths = _raw_widths(most, mantissa)
    if raw_widths.size > 256:
        raise DecodingError(f"values in {raw_widths.size} buckets, at most 256")
    symbols = np.zeros(where.size, np.uint8)
    if most:
        symbols = _read_laned(reader, _lengths(where, lines) >> np.uint8(shift), raw_widths.size)
    raw, end = kernels.read_raw(reader.octets, reader.at, reader.end, symbols, raw_widths)
    reader.skip(end - reader.at)
    reader.align()
    magnitudes = kernels.join(symbols, raw, mantissa)
    signs, having = np.zeros(where.size, np.uint8), _having_signs(magnitudes, signed)
    if having.any():
        signs[having] = _read_bits(reader, where[having], lines)[1]
    return magnitudes, signs


def _having_signs(magnitudes: Ints, signed: int) -> npt.NDArray[np.bool_]:
    return magnitudes >= (1 << 40, 1, 0)[signed]


def _raw_widths(most: int, mantissa: int) -> Ints:
    """The number of raw bits of each bucket of magnitudes up to `most`."""
    exponent = (most + (1 << mantissa)).bit_length() - 1
    width = exponent - mantissa
    last = ((width - 1) << mantissa) + ((most + (1 << mantissa)) >> width)
    return np.arange(last + 1, dtype=np.int64) >> mantissa


def _lengths(where: Ints, lines: Lines) -> Octets:
    """The bits of the number of coordinates in each one's row times that in its column."""
    place = lines.of(where)
    counts = lines.counts(place)
    counts[0] = 1
    product = counts[place[0]] * counts[place[1]]
    return np.frexp(product.astype(np.float64))[1].astype(np.uint8)


# Bits in the classes of rows and columns.


def _encode_bits(ones: Ints, where: Ints | None, lines: Lines) -> bytes:
    """A bit for each of `where`, rising, or of all coordinates: 1 for the `ones` among them."""
    place = None if where is None else lines.of(where)
    in_all, row_column = lines.counts(place), lines.of(ones)
    of_ones = lines.counts(row_column)
    odds = _odds(of_ones, in_all)

    def priced(steps: tuple[int, int]) -> tuple[int, Candidate, Ints]:
        levels = lines.levels(odds, of_ones, steps)
        parts = _parts(levels)
        sent = plan_alphabet(levels[in_all > 0], _LEVELS)
        if place is None:
            total = lines.histogram(parts)
        else:
            total = np.bincount(parts[place[0]] + parts[place[1]], minlength=_CLOSED)[:_CLOSED]
        set_ = np.bincount(parts[row_column[0]] + parts[row_column[1]], minlength=_CLOSED)
        counts = np.stack([np.maximum(total - set_, 0), set_], axis=1)
        return _cost(counts) + 8 * _BIT * sent.size, sent, parts

    _, sent, parts = min(map(priced, _STEPS), key=lambda candidate: candidate[0])
    places, classes = _open(where, place, lines, parts)
    bits = np.zeros(places.size, np.uint8)
    bits[np.searchsorted(places, ones)] = 1
    return sent.write() + (_Plan(bits, classes, 2).write() if bits.size else b"")


def _read_bits(reader: Reader, where: Ints | None, lines: Lines) -> tuple[Ints, Octets]:
    """Read bits and their coordinates: `where`, or those of all that are open."""
    place = None if where is None else lines.of(where)
    present = lines.counts(place) > 0
    levels = np.zeros(lines.num, np.uint8)
    levels[present] = read_alphabet(reader, _LEVELS, int(present.sum()))
    places, classes = _open(where, place, lines, _parts(levels))
    bits = _read_laned(reader, classes, 2) if places.size else np.zeros(0, np.uint8)
    if where is None:
        return places, bits
    all_bits = np.zeros(where.size, np.uint8)
    all_bits[np.searchsorted(where, places)] = bits
    return where, all_bits


def _open(
    where: Ints | None, place: tuple[Ints, Ints] | None, lines: Lines, parts: Ints
) -> tuple[Ints, Octets]:
    """The coordinates, of `where` at `place` or of all, that are open, and their classes."""
    if where is None or place is None:
        return lines.open(parts)
    classes = parts[place[0]] + parts[place[1]]
    is_open = classes < _CLOSED
    return where[is_open], classes[is_open].astype(np.uint8)


def _parts(levels: Octets) -> Ints:
    """The summand of each line to the class of its coordinates: its level, or to close them, 64."""
    parts = np.where(levels == 0, _CLOSED, levels).astype(np.int64)
    parts[0] = 0
    return parts


def _odds(ones: Ints, of: Ints) -> Ints:
    """8 log2 of the odds of a one, about: whole numbers, the same on every machine."""
    odds = ((2 * ones + 1) << 20) // (2 * (of - ones) + 1) + 8
    exponents = np.frexp(odds.astype(np.float64))[1].astype(np.int64) - 1
    return 8 * exponents + (odds << 3 >> exponents) - 8


# Symbols in lanes.


class _Plan:
    """Symbols [n] in [0, alphabet), each in a class below 64, with the memory that costs least."""

    def __init__(self, symbols: Octets, classes: Octets, alphabet: int) -> None:
        self._symbols, self._alphabet = symbols, alphabet
        self._classes, num_classes = _ranked(classes)
        self._before = np.append(np.uint8(0), symbols[:-1])
        cells = (self._classes.astype(np.int64) * alphabet + self._before) * alphabet + symbols
        joint = np.bincount(cells, minlength=num_classes * alphabet**2)
        joint = joint.reshape(num_classes, alphabet, alphabet)
        options = {
            self._thresholds(joint.sum(axis=(0, 1)), parts) for parts in range(1, _MOST_MEMORY + 1)
        } | {tuple(range(1, min(alphabet, _MOST_MEMORY)))}
        costs = {option: self._cost(joint, option) for option in sorted(options)}
        self._chosen = min(costs, key=lambda option: costs[option])
        self.cost = costs[self._chosen]

    def write(self) -> bytes:
        num = self._symbols.size
        num_lanes = (
            1 << (max(1, min(_MOST_LANES, self.cost // (8 * _BIT * _LANE_BYTES)))).bit_length() - 1
        )
        self._before[np.arange(num_lanes) * num // num_lanes] = 0
        memory = _memory(self._chosen, self._alphabet)
        per_class = len(self._chosen) + 1
        contexts = self._classes * np.uint8(per_class) + memory[self._before]
        num_contexts = (int(self._classes.max()) + 1) * per_class
        counts = np.bincount(
            contexts.astype(np.int64) * self._alphabet + self._symbols,
            minlength=num_contexts * self._alphabet,
        )
        tables = _frequencies(counts.reshape(num_contexts, self._alphabet))
        numbers = tables[:, 1:].astype(np.int64).ravel()
        described = {m: plan_numbers(numbers, _ONE + 1, m) for m in range(MAX_MANTISSA + 1)}
        mantissa = min(described, key=lambda m: described[m].size)
        num_words, stream = kernels.encode_lanes(self._symbols, contexts, tables, num_lanes)
        head = num_lanes.bit_length() - 1 | len(self._chosen) << 4 | mantissa << 6
        index = b"".join(uvarint(words) for words in num_words.tolist())
        parts = bytes((head, *self._chosen)), described[mantissa].write(), index, stream.tobytes()
        return b"".join(parts)

    @staticmethod
    def _thresholds(counts: Ints, parts: int) -> tuple[int, ...]:
        """The first symbols of the memory's values but for the first, of about as many symbols
        each."""
        shares = np.arange(1, parts) * counts.sum() // parts
        firsts = np.searchsorted(np.cumsum(counts), shares, side="right")
        return tuple(sorted({min(max(first, 1), counts.size - 1) for first in firsts.tolist()}))

    @staticmethod
    def _cost(joint: Ints, thresholds: tuple[int, ...]) -> int:
        counts = np.add.reduceat(joint, [0, *thresholds], axis=1)
        return _cost(counts.reshape(-1, joint.shape[2]))


def _read_laned(reader: Reader, classes: Octets, alphabet: int) -> Octets:
    """Read the output of `_Plan.write`, one or more symbols."""
    head = reader.read(8)
    num_lanes, num_thresholds, mantissa = 1 << (head & 15), head >> 4 & 3, head >> 6
    if num_lanes > classes.size:
        raise DecodingError(f"{num_lanes} lanes for {classes.size} symbols")
    thresholds = [reader.read(8) for _ in range(num_thresholds)]
    if any(b <= a for a, b in zip([0, *thresholds], [*thresholds, alphabet], strict=True)):
        raise DecodingError(f"thresholds {thresholds} do not rise between 0 and {alphabet}")
    ranks, num_classes = _ranked(classes)
    num_contexts = num_classes * (num_thresholds + 1)
    numbers, _ = read_numbers(reader, num_contexts * (alphabet - 1), _ONE + 1, mantissa)
    others = numbers.reshape(num_contexts, alphabet - 1)
    first = _ONE - others.sum(axis=1, keepdims=True)
    if int(first.min()) < 0:
        raise DecodingError(f"frequencies that sum to more than {_ONE}")
    num_words = np.array([reader.uvarint() for _ in range(-(-num_lanes // LANES))], np.int64)
    start = reader.skip(8 * (4 * num_lanes + 2 * int(num_words.sum()))) >> 3
    memory = _memory(thresholds, alphabet)
    tables = np.concatenate([first, others], axis=1).astype(np.uint16)
    return kernels.decode_lanes(reader.octets, start, num_words, ranks, memory, tables, num_lanes)


def _ranked(classes: Octets) -> tuple[Octets, int]:
    """Each class as its rank among those that occur, and their number."""
    occurs = np.bincount(classes, minlength=256) > 0
    ranks = (np.cumsum(occurs) - 1).astype(np.uint8)
    return ranks[classes], int(occurs.sum())


def _memory(thresholds: Sequence[int], alphabet: int) -> Octets:
    """Of each symbol, how many thresholds it reaches."""
    return np.searchsorted(thresholds, np.arange(alphabet), side="right").astype(np.uint8)


def _cost(counts: Ints) -> int:
    """The cost of symbols that are counted [contexts, alphabet], and of their tables."""
    tables = _frequencies(counts[counts.any(axis=1)])
    entries = int(np.count_nonzero(tables[:, 1:]))
    empty = tables[:, 1:].size - entries
    coded = int((counts[counts.any(axis=1)] * _COSTS[tables]).sum())
    return coded + _ENTRY * entries + _NO_ENTRY * empty


def _frequencies(counts: Ints) -> Tables:
    """Frequencies that sum to 4096 in each row, 1 or more for what occurs."""
    total = np.maximum(counts.sum(axis=1, keepdims=True), 1)
    occurs, rows = counts > 0, np.arange(len(counts))
    most = counts.argmax(axis=1)
    nearest = np.maximum((counts * (2 * _ONE) + total) // (2 * total), occurs)
    below = occurs + counts * (_ONE - occurs.sum(axis=1, keepdims=True)) // total
    nearest[rows, most] += _ONE - nearest.sum(axis=1)
    below[rows, most] += _ONE - below.sum(axis=1)
    holds = nearest[rows, most] > 0
    frequencies: Tables = np.where(holds[:, np.newaxis], nearest, below).astype(np.uint16)
    return frequencies
