"""A second decoder of coded fields, written from protocols/SPEC-coding.md alone, bit by bit.

That it agrees with the first on every golden vector says that the text is enough to write one.
"""

from __future__ import annotations

import math
import struct
from bisect import bisect_right
from itertools import pairwise
from typing import Any


class Refused(ValueError):
    """The body breaks a MUST."""


def must(holds: bool, what: str) -> None:
    if not holds:
        raise Refused(what)


def bits(n: int) -> int:
    return n.bit_length()


class Body:
    def __init__(self, data: bytes) -> None:
        self.data, self.at, self.end = data, 0, 8 * len(data)

    def number(self, width: int) -> int:
        must(self.at + width <= self.end, "the body ends early")
        value = 0
        for i in range(width):
            value |= (self.data[self.at >> 3] >> (self.at & 7) & 1) << i
            self.at += 1
        return value

    def padding(self) -> None:
        must(self.number(-self.at % 8) == 0, "padding is not 0")

    def uvarint(self) -> int:
        value = 0
        for i in range(5):
            byte = self.number(8)
            value |= (byte & 127) << (7 * i)
            if byte < 128:
                must(not (i and byte == 0) and value < 2**32, "not the shortest uvarint")
                return value
        raise Refused("a uvarint of more than 5 bytes")


class Code:
    """A prefix code as its table gives it: (length, code, first bit highest) to symbol."""

    def __init__(self, body: Body, alphabet: int) -> None:
        self.symbols: dict[tuple[int, int], int] = {}
        if body.number(1):
            only = body.number(bits(alphabet - 1))
            must(only < alphabet, "the only symbol is not in the alphabet")
            self.symbols[0, 0] = only
            return
        lengths = self._lengths(body, alphabet)
        code = 0
        for length in range(1, 13):
            for symbol in sorted(s for s in lengths if lengths[s] == length):
                self.symbols[length, code] = symbol
                code += 1
            code *= 2

    @staticmethod
    def _lengths(body: Body, alphabet: int) -> dict[int, int]:
        lengths: dict[int, int] = {}
        symbol, before, kraft, ran = 0, 5, 0, False
        while kraft < 4096:
            ones = 0
            while ones < 4 and body.number(1):
                ones += 1
            if ones == 3:
                must(not ran, "a run follows a run")
                zeros = 0
                while not body.number(1):
                    zeros += 1
                must(zeros <= 7, "a run too long")
                symbol += 2**zeros + body.number(zeros)
                ran = True
                continue
            length = before
            if ones == 4:
                length = body.number(4)
                must(abs(length - before) > 2, "a length written out")
            elif ones:
                length = before - ones if body.number(1) else before + ones
            must(1 <= length <= 12 and symbol < alphabet, "a length or symbol out of range")
            lengths[symbol] = before = length
            kraft += 4096 >> length
            symbol, ran = symbol + 1, False
        must(kraft == 4096, "Kraft sum above 1")
        return lengths

    def symbol(self, body: Body) -> int:
        length = code = 0
        while (length, code) not in self.symbols:
            code = 2 * code + body.number(1)
            length += 1
        return self.symbols[length, code]


def sequence(body: Body, n: int, raw: list[int], anchored: bool) -> tuple[Any, Any, Any]:
    """Symbols, their raw bits as numbers, anchors of blocks (None without blocks)."""
    if n <= 2048:
        code = Code(body, len(raw))
        symbols = [code.symbol(body) for _ in range(n)]
        numbers = [body.number(raw[s]) for s in symbols]
        body.padding()
        return symbols, numbers, None
    num_tables = body.number(2) + 1
    codes = [Code(body, len(raw)) for _ in range(num_tables)]
    body.padding()
    blocks = [min(8192, n - start) for start in range(0, n, 8192)]
    rows = []
    for _ in blocks:
        streams = [body.number(16) for _ in range(4)]
        index, streams[0] = streams[0] // 4096, streams[0] % 4096
        must(index < num_tables, "no such table")
        must(max(streams) <= 3072, "a stream too long")
        raw_bytes = body.number(16) if any(raw) else 0
        rows.append((codes[index], streams, raw_bytes, body.number(32) if anchored else None))
    symbols = []
    for m, (code, streams, _, _) in zip(blocks, rows, strict=True):
        for j, size in enumerate(streams):
            stop = body.at + 8 * size
            symbols += [code.symbol(body) for _ in range(m * j // 4, m * (j + 1) // 4)]
            body.padding()
            must(body.at == stop, "a stream of another length")
    numbers = []
    if any(raw):
        for b, (_, _, size, _) in enumerate(rows):
            stop = body.at + 8 * size
            numbers += [body.number(raw[s]) for s in symbols[8192 * b : 8192 * (b + 1)]]
            body.padding()
            must(body.at == stop, "raw bits of another length")
    return symbols, numbers, [row[3] for row in rows]


def buckets(body: Body, n: int, bound: int, m: int, anchored: bool) -> tuple[list[int], Any]:
    u = bound - 1 + 2**m
    e = bits(u) - 1
    largest = (e - m) * 2**m + (u >> (e - m)) - 2**m
    symbols, raw, anchors = sequence(body, n, [k >> m for k in range(largest + 1)], anchored)
    raw = raw or [0] * n
    values = [((k % 2**m + 2**m) << (k >> m)) + r - 2**m for k, r in zip(symbols, raw, strict=True)]
    must(max(values) < bound, "a number beyond its bound")
    return values, anchors


def positions(body: Body, size: int, at_most: int) -> list[int]:
    head = body.number(8)
    mode, absent, parameter = head & 3, head >> 2 & 1, head >> 3
    num = body.uvarint()
    count = size - num if absent else num
    must(0 <= count <= min(size, at_most), "too many coordinates")
    must(bool(absent) == (2 * count > size), "absent where it must not be, or not where it must")
    must(num <= body.end - body.at, "more coordinates than bits")
    must(num > 0 or mode == 0, "a mode for no coordinates")
    coded: list[int] = []
    gaps: list[int] = []
    anchors = None
    if mode == 0 and parameter == 0:
        coded = [body.number(max(1, bits(size - 1))) for _ in range(num)]
        body.padding()
    elif mode == 1:
        low = [body.number(parameter) for _ in range(num)]
        zeros = 0
        for g in low:
            high = 0
            while not body.number(1):
                high += 1
                zeros += 1
                must(zeros <= 2 * num, "too many zeros")
            gaps.append((high << parameter) + g)
        body.padding()
    elif mode == 2 and parameter <= 3:
        gaps, anchors = buckets(body, num, size, parameter, True)
    else:
        raise Refused("no such mode of positions")
    for gap in gaps:
        coded.append((coded[-1] if coded else -1) + gap + 1)
    for b, anchor in enumerate(anchors or []):
        must(anchor == (coded[8192 * b - 1] + 1 if b else 0), "an anchor out of place")
    must(all(a < b for a, b in pairwise(coded)), "coordinates do not rise")
    must(not coded or coded[-1] < size, "a coordinate out of range")
    if absent:
        left_out = set(coded)
        return [p for p in range(size) if p not in left_out]
    return coded


def ungrouped(groups: list[int], s: int, g: int, n: int) -> list[int]:
    must(max(groups) < s**g, "a group out of range")
    symbols = [group // s**place % s for group in groups for place in range(g)]
    must(not any(symbols[n:]), "places after the last symbol are not 0")
    return symbols[:n]


def alphabet(body: Body, s: int, n: int, nested: bool = False) -> list[int]:
    if n == 0 or s == 1:
        return [0] * n
    head = body.number(8)
    mode, parameter = head & 7, head >> 3
    if mode == 0 and parameter == 0 and s in (3, 5, 6):
        g = 5 if s == 3 else 3
        return ungrouped([body.number(8) for _ in range(-(-n // g))], s, g, n)
    if mode == 0 and parameter == 0:
        symbols = [body.number(bits(s - 1)) for _ in range(n)]
        body.padding()
    elif mode == 1 and parameter and s**parameter <= 256:
        num_groups = -(-n // parameter)
        groups, _, _ = sequence(body, num_groups, [0] * s**parameter, False)
        return ungrouped(groups, s, parameter, n)
    elif mode == 2 and parameter <= 7 and n <= 65536:
        symbols, _ = buckets(body, n, s, parameter & 3, False)
        if parameter & 4:
            c = s // 2
            symbols = [c - (y + 1) // 2 if y % 2 else c + y // 2 for y in symbols]
    elif mode == 3 and parameter == 0 and not nested:
        common = body.number(8)
        must(common < s, "the common symbol is out of range")
        where = positions(body, n, n // 2)
        others = alphabet(body, s - 1, len(where), nested=True)
        symbols = [common] * n
        for place, x in zip(where, others, strict=True):
            symbols[place] = x + (x >= common)
    elif mode == 6 and s == 2 and parameter <= 7:
        count = body.uvarint()
        must(1 <= count <= n, "too many runs, or none")
        lengths, _ = buckets(body, count, n, parameter & 3, False)
        turns = range(parameter >> 2, count + (parameter >> 2))
        must(sum(lengths) + count == n, "runs of more or fewer symbols")
        symbols = [
            t % 2 for t, length in zip(turns, lengths, strict=True) for _ in range(length + 1)
        ]
    else:
        raise Refused("no such mode of an alphabet")
    must(max(symbols) < s, "a symbol out of range")
    return symbols


def reals(body: Body, count: int, width: int) -> list[float]:
    data = bytes(body.number(8) for _ in range(count * width))
    numbers = struct.unpack(f"<{count}{'f' if width == 4 else 'e'}", data)
    must(all(math.isfinite(x) for x in numbers), "a real that is not finite")
    return list(numbers)


def integers(body: Body, bound: int, n: int, nested: bool = False) -> list[int]:
    if n == 0:
        return []
    head = body.number(8)
    mode, parameter = head & 7, head >> 3
    if mode == 0 and parameter == 0:
        values = [body.number(bits(2 * bound)) - bound for _ in range(n)]
        body.padding()
    elif mode == 1 and parameter <= 3:
        folded, _ = buckets(body, n, 2 * bound + 1, parameter, False)
        values = [-(y + 1) // 2 if y % 2 else y // 2 for y in folded]
    elif mode == 2 and parameter == 0 and not nested:
        where = positions(body, n, n // 2)
        values = [0] * n
        for place, x in zip(where, integers(body, bound, len(where), nested=True), strict=True):
            values[place] = x + (x >= 0)
    else:
        raise Refused("no such mode of integers")
    must(max(map(abs, values)) <= bound, "an integer out of range")
    return values


S = [32768, 40793, 47911, 53581, 57724, 60565, 62428, 63615, 64357, 64816, 65097, 65269, 65374]
S += [65438, 65476, 65500, 65514, 65523, 65528, 65531, 65533, 65534, 65535, 65535, 65536]


def chance(t: int) -> int:
    if t < 0:
        return 65536 - chance(-t)
    i, r = t >> 7, t % 128
    return S[i] + ((S[i + 1] - S[i]) * r + 64 >> 7) if r else S[i]


CHANCES = [chance(t) for t in range(-3072, 3073)]


def logit(c: int) -> int:
    return bisect_right(CHANCES, c) - 1 - 3072


class RangeDecoder:
    def __init__(self, body: Body) -> None:
        must(body.at % 8 == 0, "not on a byte")
        self.body, self.start, self.taken = body, body.at // 8, 0
        self.above, self.width = 0, 2**32 - 1
        for _ in range(4):
            self.above = self.above << 8 | self.take()

    def take(self) -> int:
        at = self.start + self.taken
        self.taken += 1
        return self.body.data[at] if at < len(self.body.data) else 0

    def bit(self, c: int) -> int:
        part = self.width * c >> 16
        found = int(self.above < part)
        if found:
            self.width = part
        else:
            self.above -= part
            self.width -= part
        while self.width < 2**24:
            self.width <<= 8
            self.above = (self.above << 8) + self.take()
        return found

    def end(self) -> None:
        k = 1 if self.width >= 2**25 else 2
        end = self.start + self.taken - (4 - k)
        must(end <= len(self.body.data), "the body ends within a range coder's string")
        after = self.body.data[end : end + 4 - k]
        first = self.above - int.from_bytes(after.ljust(4 - k, b"\0"), "big")
        must(first >= 0 and first + 2 ** (32 - 8 * k) <= self.width, "bytes after it matter")
        self.body.at = 8 * end


class Mixture:
    """Estimates of several inputs, made as they are first met, and weights in sets."""

    def __init__(self, weight: int, b: int, h: int, start: Any) -> None:
        self.weight, self.b, self.h, self.start = weight, b, h, start
        self.estimates: dict[Any, list[int]] = {}
        self.weights: dict[int, list[int]] = {}

    def bit(self, decoder: RangeDecoder, chosen: list[Any], weights: int = 0) -> int:
        found = [
            self.estimates.setdefault((j, key), list(self.start(j))) for j, key in enumerate(chosen)
        ]
        w = self.weights.setdefault(weights, [self.weight] * len(chosen))
        t = [logit(p >> 16) - self.b for p, _ in found]
        mixed = self.b + (sum(a * x for a, x in zip(w, t, strict=True)) >> 16)
        c = chance(max(-3072, min(3072, mixed)))
        c = max(4, min(65532, c))
        bit = decoder.bit(c)
        for j, estimate in enumerate(found):
            w[j] += t[j] * (bit * 65536 - c) + 2 ** (self.h - 1) >> self.h
            p, n = estimate
            p += (bit * 2**32 - p) * (131072 // (2 * n + 3)) >> 16
            estimate[:] = max(2**16, min(2**32 - 2**16, p)), min(n + 1, 255)
        return bit


class Plane:
    def __init__(self, matrices: list[list[int]], contexts: list[int] | None, lanes: bool) -> None:
        self.matrices, self.lanes = matrices, lanes
        self.size = sum(height * width for height, width in matrices)
        self._contexts = contexts

    def context(self, i: int) -> int:
        return self._contexts[i] if self._contexts else 0

    def walk(self) -> Any:
        """Matrix, row and column of each coordinate."""
        for m, (height, width) in enumerate(self.matrices):
            for r in range(height):
                for q in range(width):
                    yield m, r, q


def flags(body: Body, num: int, plane: Plane) -> list[int]:
    if plane.lanes:
        return laned_flags(body, num, plane)
    decoder = RangeDecoder(body)
    d = num * 2**32 // plane.size
    e = max(d, 2**16)
    mixture = Mixture(9362, logit(e >> 16), 16, lambda j: (e, 1) if j in (1, 2, 3) else (2**31, 1))
    found: list[int] = []
    ones: set[tuple[int, int, int]] = set()
    of_row: dict[Any, int] = {}
    of_column: dict[Any, int] = {}
    in_row: dict[Any, int] = {}
    for i, (m, r, q) in enumerate(plane.walk()):
        if len(found) == num:
            break
        x = plane.context(i) % 16
        row_density = of_row.get((m, r), d >> 16)
        column_density = of_column.get((m, q), d >> 16)
        a, b = min(bits(row_density >> 6), 9), min(bits(column_density >> 6), 9)
        near = ((m, r, q - 1) in ones) + 2 * ((m, r, q - 2) in ones) + 4 * ((m, r - 1, q) in ones)
        near += 8 * ((m, r - 1, q - 1) in ones or (m, r - 1, q + 1) in ones)
        o = in_row.get((m, r), 0)
        chosen = [
            *((x, min(m, 15)), (a, min(o, 15)), (b, min(r, 15)), (near, (a + b) // 2)),
            *((x, a, b), (x, a), (x, b)),
        ]
        bit = mixture.bit(decoder, chosen)
        of_row[m, r] = row_density + (bit * 65536 - row_density >> 4)
        rate = 131072 // (2 * min(r, 60) + 3)
        of_column[m, q] = column_density + ((bit * 65536 - column_density) * rate >> 16)
        in_row[m, r] = o + bit
        if bit:
            ones.add((m, r, q))
            found.append(i)
    must(len(found) == num, "fewer flags than there should be")
    decoder.end()
    return found


class History:
    def __init__(self) -> None:
        self.size, self.balance, self.last = 0, 3, 0


def values(body: Body, most: int, signs: str, where: list[int], plane: Plane) -> list[Any]:
    """Pairs of magnitude and sign."""
    if plane.lanes:
        return laned_values(body, most, signs, where, plane)
    if not where or (most == 0 and signs != "all"):
        return [(0, 0)] * len(where)
    decoder = RangeDecoder(body)
    mixture = Mixture(19661, 0, 14, lambda j: (2**31, 0))
    rows: dict[Any, History] = {}
    columns: dict[Any, History] = {}
    every = History()
    places = dict(enumerate(plane.walk()))
    found = []
    for i in where:
        m, r, q = places[i]
        row, column = rows.setdefault((m, r), History()), columns.setdefault((m, q), History())
        x = plane.context(i)
        three = (row, column, every)
        also = [
            *((row.size, every.size), (column.size, every.size), x % 16, 0),
            (row.size, column.size, every.size),
        ]

        def decide(decision: Any, weights: int, also: list[Any] = also) -> int:
            return mixture.bit(decoder, [(decision, key) for key in also], weights)

        long = 0
        while long < bits(most + 1) - 1 and decide(("long", long), 1 + min(long, 7)):
            long += 1
        u = 1
        for done in range(long):
            if done < 3:
                u = 2 * u + decide(("bits", min(long, 16), u), 9)
            else:
                u = 2 * u + decoder.bit(32768)
        for history in three:
            history.size = min(long + 1, 7)
        sign = 0
        if signs == "all" or (signs == "those not 0" and u > 1):
            also = [
                *((row.balance, row.last), (column.balance, column.last), x),
                *((row.last, column.last, every.last), (row.balance, column.balance, x // 16)),
            ]
            sign = decide("sign", 0, also)
            for history in three:
                step = -1 if sign else 1
                history.balance = max(0, min(6, history.balance + step))
                history.last = 1 + sign
        must(u - 1 <= most, "a magnitude out of range")
        found.append((u - 1, sign))
    decoder.end()
    return found


class Lines:
    """The row and the column of each coordinate: (kind, number) in the order of lines, or None."""

    def __init__(self, matrices: list[list[int]]) -> None:
        self.row: list[tuple[int, int]] = []
        self.column: list[tuple[int, int] | None] = []
        rows = columns = 0
        for height, width in matrices:
            for r in range(height if width else 0):
                for q in range(width):
                    self.row.append((0, rows + (r if height > 1 else q // 1024)))
                    self.column.append((1, columns + q) if height > 1 else None)
            if width and height:
                rows += height if height > 1 else -(-width // 1024)
                columns += width if height > 1 else 0


def laned(body: Body, classes: list[int], alphabet_size: int) -> list[int]:
    head = body.number(8)
    num_lanes, g, m = 2 ** (head & 15), head >> 4 & 3, head >> 6
    n = len(classes)
    must(num_lanes <= n, "more lanes than symbols")
    thresholds = [body.number(8) for _ in range(g)]
    edges = [0, *thresholds, alphabet_size]
    must(all(a < b for a, b in pairwise(edges)), "thresholds out of order")
    occurring = sorted(set(classes))
    num_tables, width = len(occurring) * (g + 1), alphabet_size - 1
    numbers, _ = buckets(body, num_tables * width, 4097, m, False)
    tables = {}
    for t in range(num_tables):
        others = numbers[t * width : (t + 1) * width]
        must(sum(others) <= 4096, "frequencies of more than 4096")
        tables[occurring[t // (g + 1)], t % (g + 1)] = [4096 - sum(others), *others]
    groups = [range(j, min(j + 32, num_lanes)) for j in range(0, num_lanes, 32)]
    num_words = [body.uvarint() for _ in groups]
    states = [body.number(32) for _ in range(num_lanes)]
    symbols = [0] * n
    for lanes, size in zip(groups, num_words, strict=True):
        stop = body.at + 16 * size
        must(stop <= body.end, "the body ends within words")
        longest = max(n * (j + 1) // num_lanes - n * j // num_lanes for j in lanes)
        for i in range(longest):
            for j in lanes:
                at = n * j // num_lanes + i
                if at >= n * (j + 1) // num_lanes:
                    continue
                memory = sum(i > 0 and symbols[at - 1] >= t for t in thresholds)
                f, x = tables[classes[at], memory], states[j]
                slot, s, below = x % 4096, 0, 0
                while slot >= below + f[s]:
                    below += f[s]
                    s += 1
                symbols[at] = s
                x = f[s] * (x >> 12) + slot - below
                if x < 2**16:
                    must(body.at < stop, "too few words")
                    x = 2**16 * x + body.number(16)
                states[j] = x
        must(body.at == stop, "words left over")
    must(all(x == 2**16 for x in states), "a lane in another state")
    return symbols


def bits_of_lines(body: Body, where: list[int], plane: Plane) -> list[int]:
    lines = Lines(plane.matrices)
    met = {lines.row[p] for p in where} | {line for p in where if (line := lines.column[p])}
    levels = dict(zip(sorted(met), alphabet(body, 16, len(met)), strict=True))
    places = []
    for k, p in enumerate(where):
        row, column = levels[lines.row[p]], lines.column[p]
        if row and (column is None or levels[column]):
            places.append((k, row + (levels[column] if column else 0)))
    found = [0] * len(where)
    if places:
        for (k, _), bit in zip(places, laned(body, [c for _, c in places], 2), strict=True):
            found[k] = bit
    return found


def laned_flags(body: Body, num: int, plane: Plane) -> list[int]:
    found = [p for p, bit in enumerate(bits_of_lines(body, list(range(plane.size)), plane)) if bit]
    must(len(found) == num, "another number of flags")
    return found


def laned_values(body: Body, most: int, signs: str, where: list[int], plane: Plane) -> list[Any]:
    if not where or (most == 0 and signs != "all"):
        return [(0, 0)] * len(where)
    head = body.number(8)
    m, s = head & 7, head >> 3
    e = bits(most + 2**m) - 1
    size = 1 + (e - m) * 2**m + ((most + 2**m) >> (e - m)) - 2**m
    must(size <= 256, "too many buckets")
    lines = Lines(plane.matrices)
    keys = [0] * len(where)
    if most:
        in_line: dict[Any, int] = {}
        for p in where:
            for line in (lines.row[p], lines.column[p]):
                in_line[line] = in_line.get(line, 0) + 1
        in_line[None] = 1
        classes = [bits(in_line[lines.row[p]] * in_line[lines.column[p]]) >> s for p in where]
        keys = laned(body, classes, size)
    magnitudes = [((k % 2**m + 2**m) << (k >> m)) + body.number(k >> m) - 2**m for k in keys]
    body.padding()
    must(max(magnitudes) <= most, "a magnitude out of range")
    signed = [k for k, x in enumerate(magnitudes) if signs == "all" or (x and signs != "none")]
    found = [[x, 0] for x in magnitudes]
    if signed:
        drawn = bits_of_lines(body, [where[k] for k in signed], plane)
        for k, sign in zip(signed, drawn, strict=True):
            found[k][1] = sign
    return found


def range_positions(body: Body, size: int, at_most: int, plane: Plane) -> list[int]:
    head = body.number(8)
    absent = head >> 2 & 1
    must(head >> 3 == plane.lanes, "no such mode of positions")
    num = body.uvarint()
    count = size - num if absent else num
    must(num > 0 and 0 <= count <= min(size, at_most), "too many coordinates, or none")
    must(bool(absent) == (2 * count > size), "absent where it must not be, or not where it must")
    coded = flags(body, num, plane)
    left_out = set(coded)
    return [p for p in range(size) if p not in left_out] if absent else coded


def range_symbols(body: Body, s: int, f: int, where: list[int], plane: Plane) -> list[int]:
    if not f:
        return [m for m, _ in values(body, s - 1, "none", where, plane)]
    if s % 2:
        most = (s - 1) // 2
        return [
            most - m if sign else most + m
            for m, sign in values(body, most, "those not 0", where, plane)
        ]
    return [
        s // 2 - 1 - m if sign else s // 2 + m
        for m, sign in values(body, s // 2 - 1, "all", where, plane)
    ]


def range_alphabet(body: Body, s: int, n: int, where: list[int] | None, plane: Plane) -> list[int]:
    head = body.number(8)
    mode, f = head & 7, head >> 3 & 1
    must(head >> 4 == plane.lanes, "no such parameter")
    if mode == 4:
        return range_symbols(body, s, f, list(range(n)) if where is None else where, plane)
    must(mode == 5 and where is None, "no such mode of an alphabet")
    common = body.number(8)
    must(common < s, "the common symbol is out of range")
    num = body.uvarint()
    must(2 * num <= n, "too many that are not common")
    others = flags(body, num, plane) if num else []
    symbols = [common] * n
    for place, x in zip(others, range_symbols(body, s - 1, f, others, plane), strict=True):
        symbols[place] = x + (x >= common)
    return symbols


def range_integers(
    body: Body, bound: int, n: int, where: list[int] | None, plane: Plane
) -> list[int]:
    head = body.number(8)
    must(head >> 3 == plane.lanes, "no such parameter")
    if head & 7 == 3:
        places = list(range(n)) if where is None else where
        pairs = values(body, bound, "those not 0", places, plane)
        return [-m if sign else m for m, sign in pairs]
    must(head & 7 == 4 and where is None, "no such mode of integers")
    num = body.uvarint()
    must(2 * num <= n, "too many that are not 0")
    others = flags(body, num, plane) if num else []
    found = [0] * n
    pairs = values(body, bound - 1, "all", others, plane)
    for place, (m, sign) in zip(others, pairs, strict=True):
        found[place] = -m - 1 if sign else m + 1
    return found


REPORT_BOUNDS = {"steps": (1, 2**24), "loss": (0, 2**24)}


def upload(
    data: bytes, profile: int, report: list[str], layout: list[dict[str, Any]], sketch: int = 0
) -> tuple[int, list[float], list[float], list[list[Any]]]:
    """The number of examples, what is reported, the cells that the sketch stands for and the
    symbols of an upload's body; or Refused."""
    head = Body(data)
    must(head.number(8) == 1, "another wire version")
    must(head.number(8) == profile, "another profile")
    num_examples = head.uvarint()
    must(num_examples > 0, "no examples")
    told = []
    for name in report:
        (value,) = struct.unpack("<f", head.number(32).to_bytes(4, "little"))
        least, most = REPORT_BOUNDS.get(name, (-(2**24), 2**24))
        must(math.isfinite(value) and least <= value <= most, f"{name} out of bounds")
        told.append(value)
    cells = list[float]()
    if sketch:
        (scale,) = struct.unpack("<f", head.number(32).to_bytes(4, "little"))
        must(math.isfinite(scale) and scale >= 0, "the scale of a sketch out of bounds")
        cells = [(head.number(2) - 1.5) * scale for _ in range(sketch)]
    return num_examples, told, cells, read(data[head.at // 8 :], layout)


def read(
    data: bytes, layout: list[dict[str, Any]], contexts: list[Any] | None = None
) -> list[list[Any]]:
    """The symbols of a body under a layout as the golden vectors write it; or Refused."""
    body, fields = Body(data), list[list[Any]]()
    last: list[int] = []
    below = Plane([[1, 0]], None, False)
    for field, known in zip(layout, contexts or [None] * len(layout), strict=True):
        [(kind, given)] = field.items()
        coded: list[Any]
        if kind == "reals":
            fields.append(reals(body, given["count"], given["width"]))
            continue
        coder = given.get("coder", "huffman")
        ranges = coder != "huffman"
        count = given["size"] if kind == "positions" else given["count"]
        tied = count is None
        n = len(last) if tied else count
        grid = given.get("grid")
        plane = (
            below
            if tied
            else Plane(grid["matrices"] if grid else [[1, n]], known, coder == "lanes")
        )
        head = body.data[body.at // 8] if body.at < body.end else 0
        where = last if tied else None
        if kind == "positions":
            size, at_most = given["size"], given["at_most"]
            if ranges and head & 3 == 3:
                coded = range_positions(body, size, at_most, plane)
            else:
                coded = positions(body, size, at_most)
            last, below = coded, plane
        elif kind == "alphabet":
            if ranges and n and given["size"] > 1 and head & 7 in (4, 5):
                coded = range_alphabet(body, given["size"], n, where, plane)
            else:
                coded = alphabet(body, given["size"], n)
        elif ranges and n and head & 7 >= 3:
            coded = range_integers(body, given["bound"], n, where, plane)
        else:
            coded = integers(body, given["bound"], n)
        fields.append(coded)
    must(body.at == body.end, "the body goes on")
    return fields
