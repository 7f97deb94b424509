"""Adaptive binary range coding in plain Python: flags of a sparse support, and values.

An interval of [0, 1) is narrowed bit by bit, in proportion to the chance of the bit (Martin 1979;
with carries as in Schindler 1998). The chances are estimated in several contexts at once, each by
counting, and mixed in the logistic domain under weights that learn which of them to trust (Mahoney
2005, "Adaptive weighing of context models for lossless data compression"). Integers throughout, so
that every machine has the same chances; protocols/SPEC-coding.md says all of it exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np

from fedpress_compression.errors import DecodingError
from fedpress_compression.kernels.range_model import (
    BITS,
    COLUMN_ROWS,
    DECISIONS,
    FLAG_SHIFT,
    FLAG_SIZES,
    FLAG_WEIGHT,
    LEARNT,
    LEAST_CHANCE,
    LONGER,
    MOST,
    MOST_CHANCE,
    RATES,
    SETS,
    SIGN,
    VALUE_SHIFT,
    VALUE_SIZES,
    VALUE_WEIGHT,
    tables,
)
from fedpress_compression.kernels.wire import Ints, Octets

_CHANCES, _LOGITS = (table.tolist() for table in tables())
_FLAG_STARTS = (0, *accumulate(FLAG_SIZES))
_VALUE_STARTS = (0, *accumulate(DECISIONS * size for size in VALUE_SIZES))
_ONE = 1 << 32
_FULL, _FEW = (1 << 32) - 1, 1 << 24
_EVEN = 1 << 15


def encode_flags(
    positions: Ints, size: int, matrices: Ints, contexts: Octets, at_most: int
) -> bytes | None:
    """Encode `positions` of [0, size), one or more and at most half, as flags.

    `matrices` [m, 2] are heights and widths, `size` coordinates in all; `contexts` [size] are below
    64, or it is empty. None if more than `at_most` bytes would be needed.
    """
    coder = _Encoder(at_most)
    flags = bytearray(size)
    for position in positions.tolist():
        flags[position] = 1
    _flags(coder, flags, positions.size, matrices.tolist(), contexts.tobytes())
    return coder.finish()


def decode_flags(
    octets: Octets, at: int, stop: int, num: int, size: int, matrices: Ints, contexts: Octets
) -> tuple[Ints, int]:
    """The `num` positions coded from byte `at` on, and the byte after; nothing is read from byte
    `stop` on. Raises DecodingError."""
    coder = _Decoder(octets, at, stop)
    flags = bytearray(size)
    count = _flags(coder, flags, num, matrices.tolist(), contexts.tobytes())
    if count < num:
        raise DecodingError(f"{count} flags set, expected {num}")
    return np.flatnonzero(np.frombuffer(flags, np.uint8)), coder.finish()


def encode_values(
    magnitudes: Ints,
    signs: Octets,
    signed: int,
    most: int,
    where: Ints,
    matrices: Ints,
    contexts: Octets,
    at_most: int,
) -> bytes | None:
    """One or more `magnitudes` in [0, most], most < 2**32, at the rising coordinates `where`, with
    their `signs`: of none (`signed` 0), of those that are not 0 (1), or of all (2)."""
    coder = _Encoder(at_most)
    values = magnitudes.copy().data, signs.copy().data
    _values(coder, *values, signed, most, where, matrices.tolist(), contexts.tobytes())
    return coder.finish()


def decode_values(
    octets: Octets,
    at: int,
    stop: int,
    signed: int,
    most: int,
    where: Ints,
    matrices: Ints,
    contexts: Octets,
) -> tuple[Ints, Octets, int]:
    """The magnitudes, which may exceed `most`, the signs, and the byte after them."""
    coder = _Decoder(octets, at, stop)
    magnitudes, signs = np.zeros(where.size, np.int64), np.zeros(where.size, np.uint8)
    values = magnitudes.data, signs.data
    _values(coder, *values, signed, most, where, matrices.tolist(), contexts.tobytes())
    return magnitudes, signs, coder.finish()


class _Encoder:
    """The interval [low, low + width) of what is still open, above it the bytes that are settled
    but for a carry."""

    def __init__(self, at_most: int) -> None:
        self._octets = bytearray()
        self._low, self._width = 0, _FULL
        self._at_most = at_most

    def bit(self, chance: int, bit: int) -> int:
        """Code `bit`, whose chance of being 1 is `chance` / 65536."""
        part = self._width * chance >> 16
        if bit:
            self._width = part
        else:
            self._low += part
            self._width -= part
        while self._width < _FEW:
            self._width <<= 8
            self._put()
        return bit

    def finish(self) -> bytes | None:
        """The bytes, to the first that leaves no doubt whatever comes after them."""
        num_bytes = 1 if self._width >= 2 * _FEW else 2
        unit = _ONE >> 8 * num_bytes
        self._low = -(-self._low // unit) * unit
        for _ in range(num_bytes):
            self._put()
        return bytes(self._octets) if len(self._octets) <= self._at_most else None

    def _put(self) -> None:
        """Settle the highest byte of `low`."""
        if self._low >= _ONE:
            place = len(self._octets) - 1
            while self._octets[place] == 255:
                self._octets[place] = 0
                place -= 1
            self._octets[place] += 1
            self._low -= _ONE
        self._octets.append(self._low >> 24)
        self._low = self._low << 8 & _FULL


class _Decoder:
    """The decoder's state: the code's offset in the interval, and the interval's width."""

    def __init__(self, octets: Octets, at: int, stop: int) -> None:
        self._octets, self._at, self._stop = octets[at:stop].tobytes(), 0, stop
        self._start = at
        self._above, self._width = 0, _FULL
        for _ in range(4):
            self._take()

    def bit(self, chance: int, bit: int) -> int:
        """The next bit."""
        part = self._width * chance >> 16
        if self._above < part:
            self._width, bit = part, 1
        else:
            self._above -= part
            self._width, bit = self._width - part, 0
        while self._width < _FEW:
            self._width <<= 8
            self._take()
        return bit

    def finish(self) -> int:
        """The byte after the string, whose last one must leave no doubt whatever comes after."""
        num_bytes = 1 if self._width >= 2 * _FEW else 2
        end = self._at - 4 + num_bytes
        unit = _ONE >> 8 * num_bytes
        after = (self._octets[end : self._at] + bytes(4))[: 4 - num_bytes]
        first = self._above - int.from_bytes(after, "big")
        if end > len(self._octets) or first < 0 or first + unit > self._width:
            raise DecodingError("a range-coded string with a wrong end")
        return self._start + end

    def _take(self) -> None:
        byte = self._octets[self._at] if self._at < len(self._octets) else 0
        self._above = self._above << 8 | byte
        self._at += 1


_Coder = _Encoder | _Decoder


class _Mixer:
    """Estimates by context, `starts[k]` the first of the k-th kind, and weights for each set."""

    def __init__(
        self, chances: list[int], seen: int, num: int, sets: int, weight: int, shift: int, base: int
    ) -> None:
        self._chances, self._seen = chances, [seen] * len(chances)
        self._weights = [[weight] * num for _ in range(sets)]
        self._shift, self._base = shift, base

    def code(self, coder: _Coder, used: Sequence[int], chosen: int, bit: int) -> int:
        """Code a bit, or find it, in the contexts `used`, and learn from it."""
        chances, seen, weights, base = self._chances, self._seen, self._weights[chosen], self._base
        logits = [_LOGITS[chances[cell] >> 16] - base for cell in used]
        total = sum(map(int.__mul__, weights, logits))
        logit = min(max(base + (total >> 16), -MOST), MOST)
        chance = min(max(_CHANCES[logit + MOST], LEAST_CHANCE), MOST_CHANCE)
        bit = coder.bit(chance, bit)
        error, half = (bit << 16) - chance, 1 << self._shift - 1
        for k, cell in enumerate(used):
            weights[k] += logits[k] * error + half >> self._shift
            moved = chances[cell] + (((bit << 32) - chances[cell]) * RATES[seen[cell]] >> 16)
            chances[cell] = min(max(moved, 1 << 16), _ONE - (1 << 16))
            seen[cell] = min(seen[cell] + 1, LEARNT)
        return bit


def _flags(
    coder: _Coder, flags: bytearray, num: int, matrices: list[list[int]], contexts: bytes
) -> int:
    """Code `flags`, or find them, until `num` of them are set; how many were."""
    density = (num << 32) // len(flags)
    plain = max(density, 1 << 16)
    chances = [_ONE >> 1] * _FLAG_STARTS[-1]
    chances[_FLAG_STARTS[1] : _FLAG_STARTS[4]] = [plain] * (_FLAG_STARTS[4] - _FLAG_STARTS[1])
    mixer = _Mixer(chances, 1, len(FLAG_SIZES), 1, FLAG_WEIGHT, FLAG_SHIFT, _LOGITS[plain >> 16])
    count = place = 0
    for tensor, (height, width) in enumerate(matrices):
        columns = [density >> 16] * width
        above = bytearray(width + 2)
        for row in range(height):
            here = bytearray(width + 2)
            dense, ones, before = density >> 16, 0, 0
            for column in range(width):
                if count == num:
                    return count
                context = contexts[place] & 15 if contexts else 0
                a, b = _bucket(dense), _bucket(columns[column])
                near = before | above[column + 1] << 2 | (above[column] | above[column + 2]) << 3
                used = (
                    context * 16 + min(tensor, 15),
                    _FLAG_STARTS[1] + a * 16 + min(ones, 15),
                    _FLAG_STARTS[2] + b * 16 + min(row, 15),
                    _FLAG_STARTS[3] + near * 10 + (a + b >> 1),
                    _FLAG_STARTS[4] + (context * 10 + a) * 10 + b,
                    _FLAG_STARTS[5] + context * 10 + a,
                    _FLAG_STARTS[6] + context * 10 + b,
                )
                bit = mixer.code(coder, used, 0, flags[place])
                flags[place] = bit
                dense += (bit << 16) - dense >> 4
                rate = RATES[min(row, COLUMN_ROWS)]
                columns[column] += ((bit << 16) - columns[column]) * rate >> 16
                before = (before << 1 | bit) & 3
                here[column + 1] = bit
                ones, count, place = ones + bit, count + bit, place + 1
            above = here
    return count


def _bucket(density: int) -> int:
    """The scale of a density in 1/65536: 0 below 1/1024, one more for each doubling, 9 at most."""
    return min((density >> 6).bit_length(), 9)


class _History:
    """The history of a row, of a column, or of all: the size of the last magnitude, the balance of
    the signs, the last sign."""

    __slots__ = ("balance", "last", "size")

    def __init__(self) -> None:
        self.size, self.balance, self.last = 0, 3, 0

    def tell(self, sign: int) -> None:
        self.balance = max(self.balance - 1, 0) if sign else min(self.balance + 1, 6)
        self.last = 1 + sign


def _values(
    coder: _Coder,
    magnitudes: memoryview,
    signs: memoryview,
    signed: int,
    most: int,
    where: Ints,
    matrices: list[list[int]],
    contexts: bytes,
) -> None:
    """Code `magnitudes` and `signs`, or find them."""
    chances = [_ONE >> 1] * _VALUE_STARTS[-1]
    mixer = _Mixer(chances, 0, len(VALUE_SIZES), SETS, VALUE_WEIGHT, VALUE_SHIFT, 0)
    longest = (most + 1).bit_length() - 1
    before = _History()
    for index, (place, along, above) in enumerate(_histories(where, matrices)):
        context = contexts[place] if contexts else 0
        inputs: tuple[int, ...] = (
            along.size * 8 + before.size,
            above.size * 8 + before.size,
            context & 15,
            0,
            (along.size * 8 + above.size) * 8 + before.size,
        )
        number, length = magnitudes[index] + 1, 0
        while length < longest:
            more = int(number >> length > 1)
            if not mixer.code(coder, _cells(LONGER + length, inputs), 1 + min(length, 7), more):
                break
            length += 1
        node = 1
        for rest in range(length - 1, -1, -1):
            bit = number >> rest & 1
            if node < 8:
                decision = BITS + 7 * (min(length, 16) - 1) + node - 1
                bit = mixer.code(coder, _cells(decision, inputs), 9, bit)
            else:
                bit = coder.bit(_EVEN, bit)
            node = node << 1 | bit
        along.size = above.size = before.size = min(length + 1, 7)
        if signed == 2 or (signed == 1 and node > 1):
            inputs = (
                along.balance * 3 + along.last,
                above.balance * 3 + above.last,
                context,
                (along.last * 3 + above.last) * 3 + before.last,
                (along.balance * 7 + above.balance) * 4 + (context >> 4),
            )
            signs[index] = mixer.code(coder, _cells(SIGN, inputs), 0, signs[index])
            for history in (along, above, before):
                history.tell(signs[index])
        magnitudes[index] = node - 1


def _cells(decision: int, contexts: tuple[int, ...]) -> list[int]:
    return [
        start + decision * size + context
        for start, size, context in zip(_VALUE_STARTS, VALUE_SIZES, contexts, strict=False)
    ]


def _histories(where: Ints, matrices: list[list[int]]) -> Iterator[tuple[int, _History, _History]]:
    """Each coordinate with the history of its row and that of its column."""
    rest = iter(matrices)
    first = last = 0
    width, row = 1, -1
    along, columns = _History(), dict[int, _History]()
    for place in where.data:
        while place >= last:
            height, width = next(rest)
            first, last = last, last + height * width
            row, columns = -1, {}
        if (place - first) // width != row:
            row, along = (place - first) // width, _History()
        yield place, along, columns.setdefault((place - first) % width, _History())
