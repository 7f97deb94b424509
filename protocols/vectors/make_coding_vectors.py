"""Write the golden vectors of coded fields.

    python protocols/vectors/make_coding_vectors.py [folder]

One file for each form of each field, and `malformed.json` for what a decoder refuses. The symbols
come from a generator of their own, so they depend on no library. A vector never changes once it was
released: a new form is a new vector.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fedpress_compression.coding import (
    Alphabet,
    Field,
    Integers,
    Layout,
    Positions,
    Reals,
    Symbols,
    encode,
)

WRITTEN_OUT = 700
"""A field of more values than this is given by its hash."""


class Draw:
    """Knuth's MMIX generator, the upper 32 bits of each state."""

    def __init__(self, seed: int) -> None:
        self._state = seed

    def below(self, bound: int) -> int:
        self._state = (self._state * 6364136223846793005 + 1442695040888963407) % 2**64
        return (self._state >> 32) * bound >> 32

    def geometric(self, mean: int) -> int:
        """About `mean` on average, never more than 40 times that."""
        return next((n for n in range(40 * mean) if not self.below(mean + 1)), 0)

    def bell(self, spread: int) -> int:
        """About normal: the sum of 12 uniform draws, of standard deviation `spread`."""
        return (sum(self.below(2**16) for _ in range(12)) - 6 * 2**16) * spread // 2**16


def coordinates(draw: Draw, num: int, mean_gap: int) -> list[int]:
    found, at = [], -1
    for _ in range(num):
        at += 1 + draw.geometric(mean_gap)
        found.append(at)
    return found


def clustered(draw: Draw, num: int, near: int, far: int) -> list[int]:
    """Runs of 32 with gaps about `near` and about `far`, in turn."""
    found, at = [], -1
    for i in range(num):
        at += 1 + draw.geometric(far if i // 32 % 2 else near)
        found.append(at)
    return found


def ternary(draw: Draw, num: int, zeros_in_100: int) -> list[int]:
    return [1 if draw.below(100) < zeros_in_100 else 2 * draw.below(2) for _ in range(num)]


def bell(draw: Draw, num: int, spread: int, size: int) -> list[int]:
    half = size // 2
    return [half + max(-half, min(size - 1 - half, draw.bell(spread))) for _ in range(num)]


def skewed(draw: Draw, num: int, mean: int, size: int) -> list[int]:
    return [min(size - 1, draw.geometric(mean)) for _ in range(num)]


def runs(draw: Draw, num: int) -> list[int]:
    """0 and 1 in turn, about five of each, at last a 1."""
    found: list[int] = []
    while len(found) < num:
        found += [0] * (1 + draw.geometric(4)) + [1] * (1 + draw.geometric(4))
    return [*found[: num - 1], 1]


Vector = tuple[str, Layout, list[list[Any]]]


def vectors() -> Iterator[Vector]:
    """Name, layout and symbols of each vector."""
    yield (
        "worked-example",
        (Positions(1000, 8), Alphabet(8, 24)),
        [[3, 17, 18, 40, 41, 42, 300, 301], [int(x) for x in "334323343534323433423543"]],
    )
    yield "no-fields", (), []
    for name, positions, size in positions_vectors():
        at_most = max(len(positions), size // 2)
        yield f"positions-{name}", (Positions(size, at_most),), [positions]
    for name, symbols, size in alphabet_vectors():
        yield f"alphabet-{name}", (Alphabet(size, len(symbols)),), [symbols]
    for name, integers, bound in integers_vectors():
        yield f"integers-{name}", (Integers(bound, len(integers)),), [integers]
    yield "reals", (Reals(4), Reals(3, 2)), [[0.0, -1.5, 3.0517578125e-05, 2.0**127], [1, -0.5, 0]]
    yield "no-values", (Positions(0, 0), Alphabet(4), Alphabet(256, 0), Reals(0)), [[], [], [], []]
    yield from upload_vectors()


def positions_vectors() -> Iterator[tuple[str, list[int], int]]:
    draw = Draw(1)
    yield "none", [], 1000
    yield "all", list(range(1000)), 1000
    yield "the-only", [0], 1
    yield "stored", [2**32 - 1], 2**32
    yield "rice", coordinates(draw, 300, 100), 60_000
    yield "rice-low", coordinates(draw, 300, 1), 700
    yield "rice-high", [5, 2**31 + 3, 2**32 - 2], 2**32
    left_out = set(coordinates(draw, 60, 10))
    yield "absent", [p for p in range(1000) if p not in left_out], 1000
    yield "buckets", clustered(draw, 600, 2, 300), 200_000
    yield "buckets-far", [2**32 - 2001 + i for i in range(2000)], 2**32
    yield "blocks", clustered(draw, 2049, 3, 200), 2**20
    near, far = coordinates(draw, 8192, 3), coordinates(draw, 8000, 60)
    yield "blocks-two-tables", near + [near[-1] + 1 + p for p in far], 2**21


def alphabet_vectors() -> Iterator[tuple[str, list[int], int]]:
    draw = Draw(2)
    yield "one-symbol", [0] * 10, 1
    for size in (2, 3, 5, 6, 7, 16, 20, 256):
        yield f"stored-{size}", [draw.below(size) for _ in range(50)], size
    yield "constant", [3] * 1000, 5
    yield "single", skewed(draw, 300, 2, 16), 16
    yield "ternary-in-twos", ternary(draw, 200, 50), 3
    yield "ternary-in-fives", ternary(draw, 6000, 55), 3
    yield "long-codes", [symbol for symbol in range(14) for _ in range(2 ** (13 - symbol))], 32
    yield "wide-table", [17 * (i % 2) + 200 * (i % 3 == 0) for i in range(90)], 256
    yield "blocks", skewed(draw, 3000, 9, 200), 200
    yield "blocks-4-bits", bell(draw, 20_000, 2, 15), 15
    by_scale = [x for spread in (2, 30, 2, 8, 90) for x in bell(draw, 8192, spread, 255)]
    yield "blocks-four-tables", by_scale, 255
    constant = [7] * 8192 + skewed(draw, 8192, 20, 100) + [99]
    yield "blocks-constant", constant, 100
    yield "buckets", skewed(draw, 300, 30, 200), 200
    yield "buckets-folded", bell(draw, 400, 20, 255), 255
    yield "buckets-even", bell(draw, 300, 20, 256), 256
    yield "buckets-in-blocks", bell(draw, 2500, 40, 255), 255
    yield "gaps", ternary(draw, 2000, 95), 3
    yield "gaps-few", [0] * 500 + [4] + [0] * 500, 5
    yield "gaps-two", [int(not draw.below(30)) for _ in range(1000)], 2
    yield "gaps-in-blocks", ternary(draw, 30_000, 90), 3
    yield "runs", runs(draw, 800), 2
    yield "runs-one-first", runs(draw, 400)[::-1], 2
    yield "runs-in-blocks", runs(draw, 12_000), 2
    signs = runs(draw, 2000)
    yield "gaps-and-runs", [2 * signs[i] if draw.below(12) == 0 else 1 for i in range(2000)], 3


def integers_vectors() -> Iterator[tuple[str, list[int], int]]:
    draw = Draw(4)
    yield "none", [], 7
    yield "stored", [draw.below(201) - 100 for _ in range(50)], 100
    yield "wide", [2**31 - 1, 1 - 2**31, 5], 2**31 - 1
    yield "buckets", [draw.bell(300) for _ in range(500)], 4000
    yield "buckets-ternary", [draw.below(3) - 1 for _ in range(600)], 1
    yield "buckets-in-blocks", [draw.bell(70) * draw.below(900) for _ in range(2500)], 2**20
    few = [draw.bell(1000) if draw.below(40) == 0 else 0 for _ in range(3000)]
    yield "gaps", few, 2**15


def upload_vectors() -> Iterator[Vector]:
    """What compressors emit: top-k with signs and 2-bit magnitudes, with dense biases beside."""
    draw = Draw(3)
    where = clustered(draw, 500, 20, 150)
    yield (
        "upload",
        (
            Positions(50_000, 500),
            Alphabet(2),
            Alphabet(4),
            Reals(4, 2),
            Reals(1),
            Alphabet(255, 400),
            Reals(2),
        ),
        [
            where,
            [draw.below(2) for _ in where],
            skewed(draw, 500, 1, 4),
            [0.25, 0.5, 0.75, 1.0],
            [0.015625],
            bell(draw, 400, 25, 255),
            [0.001953125, 0.5],
        ],
    )


def as_symbols(values: list[list[Any]], layout: Layout) -> Symbols:
    def dtype(field: Field) -> np.dtype[Any]:
        match field:
            case Positions():
                return np.dtype("<i8")
            case Alphabet():
                return np.dtype("u1")
            case Integers():
                return np.dtype("<i4")
            case Reals():
                return field.dtype

    return tuple(np.array(v, dtype(field)) for v, field in zip(values, layout, strict=True))


def as_json(layout: Layout) -> list[dict[str, Any]]:
    """Fields as in the golden vectors: what a field has by default is left out."""

    def field(of: Field) -> dict[str, Any]:
        given: dict[str, Any]
        match of:
            case Positions(size, at_most):
                kind, given = "positions", {"size": size, "at_most": at_most}
            case Alphabet(size, count):
                kind, given = "alphabet", {"size": size, "count": count}
            case Integers(bound, count):
                kind, given = "integers", {"bound": bound, "count": count}
            case Reals(count, width):
                return {"reals": {"count": count, "width": width}}
        if of.coder != "huffman":
            given["coder"] = of.coder
        if of.grid is not None:
            matrices = [list(matrix) for matrix in of.grid.matrices]
            given["grid"] = {"matrices": matrices, "known": of.grid.known}
        return {kind: given}

    return [field(of) for of in layout]


def bits(text: str) -> str:
    """Hex of a string of bits in the order in which they are sent, padded with zeros."""
    plain = "".join(text.split())
    return int(plain[::-1], 2).to_bytes((len(plain) + 7) // 8, "little").hex()


Malformed = tuple[str, Layout, str]


def malformed() -> Iterator[Malformed]:
    """Why a body is refused, its layout, the body in hex."""
    yield from malformed_positions()
    yield from malformed_alphabets()
    yield from malformed_tables()
    yield from malformed_blocks()
    yield from malformed_integers()
    yield "a byte after no fields", (), "00"
    yield "a byte after the last field", (Positions(10, 4),), "00 00 00"
    yield "the body ends within reals", (Reals(2),), "0000803f 0000"
    yield "infinity", (Reals(1),), "0000807f"
    yield "a NaN of two bytes", (Reals(1, 2),), "007e"


def malformed_positions() -> Iterator[Malformed]:
    ten, four = (Positions(10, 4),), (Positions(4, 10),)
    yield "the body ends before a head", ten, ""
    yield "the body ends before a count", ten, "00"
    yield "the body ends within a count", ten, "00 80"
    yield "a count with a needless byte", ten, "00 8100"
    yield "a count of 2**32", ten, "00 8080808010"
    yield "a count of more than 5 bytes", ten, "00 808080808001"
    yield "more coordinates than at_most", ten, "00 05 103204"
    yield "more coordinates than size", four, "00 05 e4ffff"
    yield "more absent coordinates than size", four, "04 05 e4ffff"
    yield "all of more than at_most", ten, "04 00"
    yield "absent ones coded where they are not the fewer", four, "04 02 04"
    yield "present ones coded where they are not the fewer", four, "00 03 24"
    yield "more coordinates than bits", (Positions(2**20, 2**20),), "29 0a 00"
    yield "positions in mode 3", ten, "03 01 21"
    yield "stored coordinates with a parameter", ten, "08 01 01"
    yield "Rice codes of no coordinates", ten, "01 00"
    yield "buckets of no coordinates", ten, "02 00"
    yield "4 mantissa bits", ten, "22 01 0000"
    yield "the body ends within stored coordinates", ten, "00 04 21"
    yield "stored coordinates that do not rise", ten, "00 02 33"
    yield "a stored coordinate of 10 in 10", ten, "00 01 0a"
    yield "padding after a stored coordinate", ten, "00 01 11"
    yield "the body ends within the low bits of Rice codes", ten, "f9 02 ffffff"
    yield "the body ends within the high bits of Rice codes", ten, "01 03 01"
    yield "more zeros than Rice codes may have", ten, "01 01" + bits("0001")
    yield "padding after Rice codes", ten, "01 01" + bits("1 1")
    yield "a Rice coordinate of 15 in 10", ten, "21 01" + bits("1111 1")
    yield "a gap of 14 in 10", ten, "02 01" + bits("1 11 111")
    yield "two gaps of 7 in 10", ten, "02 02" + bits("1 11 000 000")
    yield "the body ends within raw bits", (Positions(2**20, 4),), "02 01" + bits("1 00101 00")


def malformed_alphabets() -> Iterator[Malformed]:
    five = (Alphabet(5, 4),)
    yield "the body ends before an alphabet", five, ""
    yield "an alphabet in mode 4", five, "04"
    yield "stored symbols with a parameter", five, "08 0000"
    yield "groups of 0", five, "01 01"
    yield "groups of 4 to the base 5", five, "21 01"
    yield "buckets with a parameter of 8", (Alphabet(40, 4),), "42 01"
    yield "buckets of 65537 symbols", (Alphabet(40, 65537),), "02 01"
    yield "the body ends within stored groups", five, "00 00"
    yield "a group of 125 of 3 digits to the base 5", five, "00 7d 00"
    yield "a stored symbol after the last", five, "00 00 19"
    yield "a symbol after the last under a code", (Alphabet(5, 3),), "11" + bits("1 10100")
    yield "the body ends within stored symbols", (Alphabet(7, 3),), "00 00"
    yield "a stored symbol of 7 in 7", (Alphabet(7, 1),), "00 07"
    yield "padding after stored symbols", (Alphabet(7, 1),), "00 08"
    yield "a number of 30 in 20", (Alphabet(20, 1),), "02" + bits("1 001 1111")
    yield "gaps with a parameter", five, "0b 00 00 00"
    yield "gaps about symbol 5 in 5", five, "03 05 00 00"
    yield "gaps with more than half of the symbols", five, "03 00 04 01 00 00 07"
    yield "runs of 3 symbols", (Alphabet(3, 40),), "06 01" + bits("1 100000")
    yield "runs with a parameter of 8", (Alphabet(2, 40),), "46 01 00"
    yield "no runs", (Alphabet(2, 40),), "06 00"
    yield "more runs than symbols", (Alphabet(2, 4),), "06 05 0000"
    yield "runs of 2 symbols where 4 are due", (Alphabet(2, 4),), "06 01" + bits("1 10 0")
    yield "gaps within gaps", (Alphabet(5, 40),), "03 00 00 01 05 03 00 00 00"


def malformed_tables() -> Iterator[Malformed]:
    five = (Alphabet(5, 4),)
    yield "the body ends within a table", five, "09" + bits("0 110 1 000")
    yield "an only symbol of 7 in 5", five, "09" + bits("1 111")
    yield "padding after codes", five, "09" + bits("1 000 1")
    yield "the body ends with 6 of 9 codes", (Alphabet(5, 9),), "09" + bits("0 1111 1000 0 101101")
    yield "a run after a run", five, "09" + bits("0 1110 1 1110 1 1111 1000 0")
    yield "a run beyond the alphabet", five, "09" + bits("0 1110 001 10 0 000")
    yield "a run of 8 zeros", five, "09" + bits("0 1110 00000000 1 00000000")
    yield "a table of more than its alphabet", five, "09" + bits("0 0 0 0 0 0 0")
    yield "length 3 written out after 5", five, "09" + bits("0 1111 1100 0 0 0")
    yield "a code of no bits", five, "09" + bits("0 1111 0000")
    yield "a code of 13 bits", five, "09" + bits("0 1111 1011")
    yield "a code shorter than 1 bit", five, "09" + bits("0 1111 1000 10 1")
    yield "a code longer than 12 bits", five, "09" + bits("0 1111 0011 10 0")
    yield "a Kraft sum of 5/4", five, "09" + bits("0 1111 1000 10 0 10 1")


def malformed_blocks() -> Iterator[Malformed]:
    """Faults in directories, streams and the raw bits of blocks."""
    layout = (Alphabet(7, 2049),)

    def coded(lengths: tuple[int, ...] = (64, 64, 64, 65), first_words_top: int = 0) -> str:
        """2049 symbols, 0 and 1 in turn, of one bit each."""
        directory = (lengths[0] + first_words_top, *lengths[1:])
        words = "".join(number.to_bytes(2, "little").hex() for number in directory)
        streams = bits("01" * 768) + bits("01" * 256 + "0")
        return "09" + bits("00 0 1111 1000 0") + words + streams

    sound = coded()
    yield "a block under table 1 of 1", layout, coded(first_words_top=4096)
    yield "a stream of 3073 bytes", layout, coded((3073, 64, 64, 65)) + "00" * 3009
    yield "a stream longer than its length", layout, coded((63, 65, 64, 65))
    yield "a stream shorter than its length", layout, coded((65, 63, 64, 65))
    yield "the body ends within a stream", layout, sound[:-2]
    yield "the body ends within a directory", layout, sound[:16]
    yield "padding after a stream", layout, sound[:-2] + "02"
    yield "padding after tables", layout, sound[:4] + f"{int(sound[4:6], 16) + 128:02x}" + sound[6:]

    def spaced(num: int, raw: tuple[int, ...], anchors: tuple[int, ...], streams: str) -> str:
        """`num` gaps of 4: all in bucket 4 of 2 mantissa bits, of no code and one raw bit."""
        head = {2049: "12 8110", 8193: "12 8140"}[num] + bits("00 1 001000")
        for size, anchor in zip(raw, anchors, strict=True):
            head += "00" * 8 + size.to_bytes(2, "little").hex() + anchor.to_bytes(4, "little").hex()
        return head + streams

    short, long = (Positions(2**16, 2049),), (Positions(2**16, 8193),)
    yield "an anchor of 1 in the first block", short, spaced(2049, (257,), (1,), "00" * 257)
    yield "an anchor 1 too far", long, spaced(8193, (1024, 1), (0, 40961), "00" * 1025)
    yield "raw bits longer than their length", short, spaced(2049, (256,), (0,), "00" * 257)
    yield "raw bits shorter than their length", short, spaced(2049, (258,), (0,), "00" * 258)
    yield "padding after raw bits", short, spaced(2049, (257,), (0,), "00" * 256 + "02")


def malformed_integers() -> Iterator[Malformed]:
    two = (Integers(2, 4),)
    yield "the body ends before a head of integers", two, ""
    yield "integers in mode 3", two, "03 00"
    yield "stored integers with a parameter", two, "08 00 00"
    yield "a stored integer of 3 in 2", two, "00" + bits("101 000 000 000")
    yield "padding after stored integers", two, "00" + bits("000 000 000 000 1")
    yield "4 mantissa bits of integers", two, "21 00"
    yield "an integer of -3 in 2", (Integers(2, 1),), "01" + bits("1 010 1")
    yield "gaps of more than half of the integers", two, "02 00 03 24 00 0000"
    yield "gaps within gaps of integers", two, "02 00 01 00 02 00 00"
    yield "an integer of 3 in 2, as a gap", two, "02 00 01 00 00" + bits("001")


def main(folder: Path) -> None:
    """Write all vectors into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, layout, values in vectors():
        symbols = as_symbols(values, layout)
        fields = [
            listed
            if len(listed) <= WRITTEN_OUT
            else {"num": array.size, "sha256": hashlib.sha256(array.tobytes()).hexdigest()}
            for array, listed in zip(symbols, values, strict=True)
        ]
        vector = {
            "name": name,
            "layout": as_json(layout),
            "symbols": fields,
            "body": encode(symbols, layout).hex(),
        }
        lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in vector.items()]
        written(folder / f"{name}.json", "{", lines, "}")
    cases = [
        {"reason": reason, "layout": as_json(layout), "body": "".join(body.split())}
        for reason, layout, body in malformed()
    ]
    written(folder / "malformed.json", "[", [json.dumps(case) for case in cases], "]")


def written(path: Path, before: str, lines: list[str], after: str) -> None:
    path.write_text(f"{before}\n" + ",\n".join(lines) + f"\n{after}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "coding")
