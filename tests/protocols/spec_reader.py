"""A second decoder of coded fields, written from protocols/SPEC.md alone, bit by bit.

That it agrees with the first on every golden vector says that the text is enough to write one.
"""

from __future__ import annotations

import math
import struct
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
    else:
        raise Refused("no such mode of an alphabet")
    must(max(symbols) < s, "a symbol out of range")
    return symbols


def reals(body: Body, count: int, width: int) -> list[float]:
    data = bytes(body.number(8) for _ in range(count * width))
    numbers = struct.unpack(f"<{count}{'f' if width == 4 else 'e'}", data)
    must(all(math.isfinite(x) for x in numbers), "a real that is not finite")
    return list(numbers)


def read(data: bytes, layout: list[dict[str, Any]]) -> list[list[Any]]:
    """The symbols of a body under a layout as the golden vectors write it; or Refused."""
    body, fields, num_positions = Body(data), [], 0
    for field in layout:
        [(kind, given)] = field.items()
        values: list[Any]
        if kind == "positions":
            values = positions(body, given["size"], given["at_most"])
            num_positions = len(values)
        elif kind == "alphabet":
            count = given["count"]
            values = alphabet(body, given["size"], num_positions if count is None else count)
        else:
            values = reals(body, given["count"], given["width"])
        fields.append(values)
    must(body.at == body.end, "the body goes on")
    return fields
