"""Numbers as bits, as buckets, as gaps and as groups of digits, in numpy."""

from __future__ import annotations

from typing import cast

import numpy as np
import numpy.typing as npt

from fedpress_compression.errors import DecodingError
from fedpress_compression.kernels.wire import Ints, Octets, Words

_ONE = np.uint64(1)
_SIX, _SIXTY_THREE = np.uint64(6), np.uint64(63)


# Bits.


def gather(octets: Octets, starts: Ints, widths: Ints | int) -> Words:
    """Read `widths` bits, 57 at most, at each of the bit offsets `starts`.

    A window of 64 bits begins at the byte of each offset, so `octets` goes on for 8 bytes after it.
    """
    windows = np.ndarray((octets.size - 7,), "<u8", octets, 0, (1,))
    fields: Words = windows[starts >> 3].astype(np.uint64, copy=False)
    fields >>= (starts & 7).astype(np.uint64)
    fields &= (_ONE << np.asarray(widths, np.uint64)) - _ONE
    return fields


def pack(values: Words, widths: Ints) -> bytes:
    """Concatenate one or more `values`, each in as many bits as its width says, 63 at most.

    Neighbours are first joined in pairs for as long as every pair fits into 63 bits, which leaves
    few items to place.
    """
    items, sizes = values, widths.astype(np.uint64)
    while items.size > 1:
        even = items.size & ~1
        joined = sizes[0:even:2] + sizes[1:even:2]
        if int(joined.max()) > 63:
            break
        pairs = items[0:even:2] | (items[1:even:2] << sizes[0:even:2])
        items, sizes = np.append(pairs, items[even:]), np.append(joined, sizes[even:])
    ends = np.cumsum(sizes, dtype=np.uint64)
    starts = ends - sizes
    places = (starts >> _SIX).astype(np.int64)
    shifts = starts & _SIXTY_THREE
    first = np.flatnonzero(np.diff(places, prepend=-1))  # of the items that begin in each word
    last = np.append(first[1:], items.size) - 1
    words = np.zeros(int(places[-1]) + 2, "<u8")
    words[places[first]] = np.bitwise_or.reduceat(items << shifts, first)
    words[places[last] + 1] |= (items[last] >> _ONE) >> (_SIXTY_THREE - shifts[last])
    return words.tobytes()[: (int(ends[-1]) + 7) >> 3]


def read_fields(octets: Octets, at: int, num: int, width: int) -> Ints:
    """`num` numbers of `width` bits each, 0 <= width <= 32, from bit `at` on; they are there."""
    starts = at + width * np.arange(num, dtype=np.int64)
    return gather(octets, starts, width).astype(np.int64)


def write_octets(symbols: Octets, width: int) -> bytes:
    """Each symbol in `width` bits, 8 at most; padded."""
    rows = np.unpackbits(symbols[:, np.newaxis], axis=1, count=width, bitorder="little")
    return np.packbits(rows, bitorder="little").tobytes()


def read_octets(octets: Octets, start: int, num: int, width: int) -> Octets:
    """Read the output of `write_octets` at byte `start`, which must exist."""
    rows = np.unpackbits(octets[start:], count=num * width, bitorder="little").reshape(num, width)
    return np.packbits(rows, axis=1, bitorder="little").ravel()


def write_raw(symbols: Octets, raw: Ints, raw_widths: Ints) -> bytes:
    """The `raw` bits of symbols [up to a block], as many as each one's width says; padded."""
    return pack(raw.astype(np.uint64), raw_widths[symbols])


def read_raw(
    octets: Octets, at: int, stop: int, symbols: Octets, raw_widths: Ints
) -> tuple[Ints, int]:
    """Read the output of `write_raw` at bit `at`; returns it with its end; numbers that would go on
    past bit `stop` are said to end beyond it and mean nothing."""
    widths = raw_widths[symbols]
    ends = np.cumsum(widths)
    end = at + int(ends[-1])
    if end > stop:
        return np.zeros(symbols.size, np.int64), end
    return gather(octets, at + ends - widths, widths).astype(np.int64), end


# Buckets.


def split(values: Ints, mantissa: int) -> tuple[Octets, Ints]:
    """The bucket and the raw bits of each value, below 2**33."""
    shifted = values + (1 << mantissa)
    exponents = np.frexp(shifted.astype(np.float64))[1].astype(np.int64) - 1  # exact below 2**53
    widths = exponents - mantissa
    leading = shifted >> widths
    buckets = ((widths - 1) << mantissa) + leading
    return buckets.astype(np.uint8), shifted - (leading << widths)


def join(buckets: Octets, raw: Ints, mantissa: int) -> Ints:
    """Invert `split`."""
    index = buckets.astype(np.int64)
    leading = (index & ((1 << mantissa) - 1)) + (1 << mantissa)
    return (leading << (index >> mantissa)) - (1 << mantissa) + raw


# Gaps between coordinates.


def gaps_of(positions: Ints) -> Ints:
    """The gaps before each of the increasing `positions`."""
    return np.diff(positions, prepend=-1) - 1


def others(symbols: Octets, common: int) -> Ints:
    """The positions of symbols other than `common`."""
    return np.flatnonzero(symbols != common)


def positions_of(gaps: Ints) -> Ints:
    """The inverse of `gaps_of`."""
    return np.cumsum(gaps + 1) - 1


def read_rice(octets: Octets, at: int, stop: int, num: int, parameter: int) -> tuple[Ints, int]:
    """The positions whose gaps `write_rice` wrote at bit `at`, and the bit where they end, by bit
    `stop`. They are fewer than `num` if unary bits run out, or hold more than two zeros to a one.

    The caller has seen that the low bits are there.
    """
    low = read_fields(octets, at, num, parameter)
    high, end = _read_unary(octets, at + num * parameter, stop, num)
    return positions_of((high << parameter) + low[: high.size]), end


def rice_sums(gaps: Ints, first: int, last: int) -> Ints:
    """The sum of gaps >> r for r = first .. last."""
    return np.array([int((gaps >> r).sum()) for r in range(first, last + 1)], np.int64)


def write_rice(gaps: Ints, parameter: int) -> bytes:
    """The low `parameter` bits of every gap; then its other bits in unary, as many zeros and a
    one; padded."""
    low = gaps & ((1 << parameter) - 1)
    ones = np.cumsum((gaps >> parameter) + 1) - 1
    unary = np.zeros(int(ones[-1]) + 1, np.uint64)
    unary[ones] = 1
    widths = np.concatenate([np.full(gaps.size, parameter), np.ones(unary.size, np.int64)])
    return pack(np.concatenate([low.astype(np.uint64), unary]), widths)


def _read_unary(octets: Octets, at: int, stop: int, num: int) -> tuple[Ints, int]:
    """`num` numbers in unary from bit `at` on and the bit where they end, by bit `stop`.

    They are fewer than `num` if bits run out, or if they hold more than two zeros to a one.
    """
    stop = min(stop, at + 3 * num)
    bits = np.unpackbits(octets[at >> 3 : (stop + 7) >> 3], bitorder="little")
    ones = np.flatnonzero(bits[at & 7 : (at & 7) + stop - at])[:num]
    return np.diff(ones, prepend=-1) - 1, at + (int(ones[-1]) + 1 if ones.size else 0)


# Several symbols in a byte.


def group(symbols: Octets, size: int, per_group: int) -> Octets:
    """Bytes whose digits to the base `size` are the symbols, the first lowest; zeros fill up."""
    filled = np.zeros(-(-symbols.size // per_group) * per_group, np.uint8)
    filled[: symbols.size] = symbols
    digits = filled.reshape(-1, per_group)
    groups = digits[:, -1].copy()
    for place in range(per_group - 2, -1, -1):
        groups *= np.uint8(size)
        groups += digits[:, place]
    return groups


def ungroup(groups: Octets, size: int, per_group: int, num: int) -> Octets:
    """The inverse of `group` for groups below size**per_group; DecodingError on other padding."""
    symbols = digits_of(size, per_group)[groups].ravel()
    if symbols[num:].any():
        raise DecodingError("symbols after the last are not zero")
    return symbols[:num]


def digits_of(size: int, per_group: int) -> Octets:
    """The symbols of every group [size**per_group, per_group]."""
    places = size ** np.arange(per_group)
    digits = np.arange(size**per_group)[:, np.newaxis] // places % size
    return cast(Octets, digits.astype(np.uint8))


# Signed numbers in lanes of a word.


def lanes_of(bits: int) -> int:
    """The number of lanes of `bits` in a 64-bit word."""
    return 64 // bits


def pack_lanes(values: npt.NDArray[np.signedinteger], bits: int) -> Words:
    """The sum of value * 2**(bits * lane) mod 2**64 for each L = 64 // bits values, the first of
    them in lane 0, 8 <= bits <= 32; zeros fill up [ceil(num / L)].

    Words may be added mod 2**64, and so sum their lanes: `unpack_lanes` gives these sums as long as
    each lies in [-2**(bits - 1), 2**(bits - 1)).
    """
    lanes = lanes_of(bits)
    filled = np.zeros(-(-values.size // lanes) * lanes, np.int64)
    filled[: values.size] = values
    shifts = np.arange(0, lanes * bits, bits, dtype=np.uint64)
    moved = filled.view(np.uint64).reshape(-1, lanes) << shifts
    words: Words = moved.sum(axis=1, dtype=np.uint64)
    return words


def unpack_lanes(words: Words, bits: int, num: int) -> Ints:
    """The `num` numbers in the lanes of ceil(num / L) words, whatever else these hold.

    They are the word's balanced digits: with half the base added to each, which takes one addition
    to the word, they are its digits to the base 2**bits.
    """
    lanes = lanes_of(bits)
    shifts = np.arange(0, lanes * bits, bits, dtype=np.uint64)
    raised = words + np.uint64(sum(1 << (bits * lane + bits - 1) for lane in range(lanes)))
    digits = (raised[:, np.newaxis] >> shifts) & np.uint64((1 << bits) - 1)
    return digits.view(np.int64).ravel()[:num] - (1 << (bits - 1))
