"""Write the golden vectors of fields in interleaved lanes.

    python protocols/vectors/make_lanes_vectors.py [folder]

As `make_coding_vectors.py` does for the static codes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from make_coding_vectors import Draw, as_json, as_symbols, written

from fedpress_compression.coding import Alphabet, Field, Grid, Integers, Layout, Positions, encode
from fedpress_compression.coding.bits import uvarint
from fedpress_compression.coding.exp_golomb import plan_numbers

Vector = tuple[str, Layout, list[list[Any]]]

MATRICES = ((90, 80), (1, 40), (60, 50), (1, 1100), (0, 9), (200, 1))
SIZE = sum(height * width for height, width in MATRICES)
GRID = Grid(tuple("abcdef"), MATRICES)
SMALL = Grid(("a", "b", "c"), ((30, 60), (1, 1100), (100, 1)))


def support(draw: Draw, in_1000: int) -> list[int]:
    """Coordinates of the matrices: so many where a third of the rows and a quarter of the columns
    cross, none in a fifth of the rows, elsewhere one in 1000."""
    found, at = [], 0
    for height, width in MATRICES:
        for row in range(height):
            for column in range(width):
                dense = row * 31 % 89 < 30 and column * 7919 % 97 < 24
                if draw.below(1000) < (in_1000 if dense else row * 31 % 89 < 71):
                    found.append(at)
                at += 1
    return found


def drifting(draw: Draw, num: int, size: int, spread: int) -> list[int]:
    """Symbols near a level that moves slowly through [0, size)."""
    levels = [abs((3 * i // 10) % (2 * size) - size) for i in range(num)]
    return [max(0, min(size - 1, level + draw.bell(spread))) for level in levels]


def vectors() -> Iterator[Vector]:
    """Name, layout and symbols of each vector."""
    draw = Draw(21)

    def positions(coded: list[int]) -> tuple[Layout, list[list[Any]]]:
        return (Positions(SIZE, SIZE, "lanes", GRID),), [coded]

    found = support(draw, 600)
    yield "positions-grid", *positions(found)
    absent = set(support(draw, 700))
    yield "positions-absent", *positions([at for at in range(SIZE) if at not in absent])
    row = [at for at in range(12_000) if draw.below(100) < (2, 60)[at // 1024 % 3 == 1]]
    yield "positions-row", (Positions(12_000, 12_000, "lanes"),), [row]
    yield "positions-few", (Positions(SIZE, SIZE, "lanes", GRID),), [[3, 999]]
    yield "positions-none", (Positions(10, 10, "lanes"),), [[]]

    def dense(field: Field, values: list[int]) -> tuple[Layout, list[list[Any]]]:
        return (field,), [values]

    for size, spread in ((2, 1), (5, 1), (7, 1), (16, 2), (201, 4)):
        symbols = drifting(draw, SMALL.size, size, spread)
        yield f"alphabet-{size}", *dense(Alphabet(size, SMALL.size, "lanes", SMALL), symbols)
    apart = set(support(draw, 500))
    few = [draw.below(7) if at in apart else 3 for at in range(SIZE)]
    yield "alphabet-gaps", *dense(Alphabet(7, SIZE, "lanes", GRID), few)
    signs = [at // 60 % 2 ^ int(draw.below(9) == 0) for at in range(SMALL.size)]
    yield "alphabet-signs", *dense(Alphabet(2, SMALL.size, "lanes", SMALL), signs)
    yield "alphabet-256", *dense(Alphabet(256, 6_000, "lanes"), drifting(draw, 6_000, 256, 25))
    yield "alphabet-rare", *dense(Alphabet(256, 30_000, "lanes"), rare(draw, 30_000))
    for name, bound in (("direct", 100), ("buckets", 2000)):
        values = [x - bound for x in drifting(draw, SMALL.size, 2 * bound + 1, bound // 40)]
        yield f"integers-{name}", *dense(Integers(bound, SMALL.size, "lanes", SMALL), values)
    values = [1 - 2 * draw.below(2) if at in apart else 0 for at in range(SIZE)]
    yield "integers-gaps", *dense(Integers(3, SIZE, "lanes", GRID), values)
    layout = (
        Positions(SIZE, len(found), "lanes", GRID),
        Alphabet(2, None, "lanes"),
        Alphabet(16, None, "lanes"),
        Integers(5000, None, "lanes"),
    )
    negative = [int(at // 60 % 4 == 0) ^ int(draw.below(9) == 0) for at in found]
    levels = drifting(draw, len(found), 16, 1)
    yield "upload", layout, [found, negative, levels, drifting(draw, len(found), 400, 3)]


def rare(draw: Draw, num: int) -> list[int]:
    """50 symbols that are all as frequent, in phases, and 200 that are rare: their frequencies of 1
    would take more than the most frequent has."""
    phases = [(i // 25 + draw.below(25)) % 50 for i in range(num)]
    return [50 + i // 140 % 200 if i % 140 == 7 else phase for i, phase in enumerate(phases)]


Malformed = tuple[str, Layout, str]


def malformed() -> Iterator[Malformed]:
    """Why a body is refused, its layout, the body in hex."""
    row = (Positions(1000, 500, "lanes"),)
    head = "0b 02 00 01"  # two coordinates; stored, the level 1 of the row
    one = in_one_lane([int(at in (3, 40)) for at in range(1000)], [2])
    sound = bytes.fromhex(head) + one
    yield "flags in lanes where the coder is huffman", (Positions(1000, 500),), sound.hex()
    yield "flags in lanes where the coder is range", (Positions(1000, 500, "range"),), sound.hex()
    yield "flags under the range coder where the coder is lanes", row, "03 01 00"
    yield "flags of no coordinates", row, "0b 00"
    yield "the body ends within levels", row, "0b 02 00"
    yield "the body ends within lanes", row, sound[:-1].hex()
    yield "a byte after lanes", row, (sound + bytes(1)).hex()
    yield "three flags where there are two", row, "0b 03 00 01" + one.hex()
    yield "no flags, for the row is closed", row, "0b 02 00 00"
    yield "more lanes than symbols", row, head + "0a" + one[1:].hex()
    yield "a threshold of 0", row, head + "10 00" + one[1:].hex()
    yield "a threshold of 2 in 2", row, head + "10 02" + one[1:].hex()
    yield "two thresholds of 1", row, head + "20 01 01" + one[1:].hex()
    yield "a lane that ends in another state", row, sound[:-4].hex() + "00 00 02 00"
    few, more = in_one_lane([1, 0] * 500, [2], -1), in_one_lane([1, 0] * 500, [2], 1)
    yield "fewer words than the lane takes", (Positions(1000, 500, "lanes"),), words_of(few)
    yield "more words than the lane takes", (Positions(1000, 500, "lanes"),), words_of(more)
    seven, six = Alphabet(7, 4, "lanes"), Alphabet(6, 4, "lanes")
    values = in_one_lane([6, 0, 5, 6], [512] * 6)
    yield (
        "values in lanes where the coder is range",
        (Alphabet(7, 4, "range"),),
        f"14 03 {values.hex()}",
    )
    yield "values under the range coder where the coder is lanes", (seven,), f"04 {values.hex()}"
    large = in_one_lane([2] * 4, [0, 4096]) + b"\xff"
    yield "a magnitude of 6, at most 5", (six,), f"14 00 {large.hex()}"
    yield (
        "frequencies of more than 4096",
        (seven,),
        f"14 03 {in_one_lane([0] * 4, [700] * 6).hex()}",
    )
    wide = Alphabet(256, 4, "lanes")
    yield "lanes gaps about symbol 7 in 7", (seven,), "15 07 00"
    yield "lanes gaps with more than half", (seven,), "15 01 03 0000"
    many = Integers(2**31 - 1, 4, "lanes")
    yield "values in more than 256 buckets", (many,), "0b 07 00"
    raw = in_one_lane([4] * 4, [0, 0, 0, 4096, *[0] * 20])
    yield "the body ends before raw bits", (wide,), f"14 02 {raw.hex()}"
    yield "padding after raw bits that is not 0", (wide,), f"14 02 {raw.hex()} 10"
    yield "integers in lanes where the coder is range", (Integers(6, 4, "range"),), "0b 00"
    yield "integers under the range coder where it is lanes", (Integers(6, 4, "lanes"),), "03 00"


def words_of(lanes: bytes) -> str:
    """500 of 1000 coordinates, of which the one row has the level 1."""
    return f"0b f4 03 00 01 {lanes.hex()}"


def in_one_lane(symbols: list[int], others: list[int], more_words: int = 0) -> bytes:
    """Symbols in one lane, without memory, with the frequencies of the symbols from 1 on; the index
    says so many words more than there are."""
    frequencies = [4096 - sum(others), *others]
    state, words = 1 << 16, b""
    for symbol in reversed(symbols):
        frequency = max(1, frequencies[symbol])
        if state >= frequency << 20:
            words = (state & 0xFFFF).to_bytes(2, "little") + words
            state >>= 16
        state = (state // frequency << 12) + sum(frequencies[:symbol]) + state % frequency
    table = plan_numbers(np.array(others, np.int64), 4097, 0).write()
    num_words = len(words) // 2 + more_words
    words += bytes(2 * max(0, more_words))
    return bytes(1) + table + uvarint(num_words) + state.to_bytes(4, "little") + words


def main(folder: Path) -> None:
    """Write all vectors into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, layout, values in vectors():
        symbols = as_symbols(values, layout)
        lines = {
            "name": name,
            "layout": as_json(layout),
            "symbols": values,
            "body": encode(symbols, layout).hex(),
        }
        written(
            folder / f"{name}.json", "{", [f'"{k}": {json.dumps(v)}' for k, v in lines.items()], "}"
        )
    cases = [
        {"reason": reason, "layout": as_json(layout), "body": "".join(body.split())}
        for reason, layout, body in malformed()
    ]
    written(folder / "malformed.json", "[", [json.dumps(case) for case in cases], "]")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "lanes")
