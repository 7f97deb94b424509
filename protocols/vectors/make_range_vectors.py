"""Write the golden vectors of fields under the range coder.

    python protocols/vectors/make_range_vectors.py [folder]

As `make_coding_vectors.py` does for the static codes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from make_coding_vectors import (
    Draw,
    as_json,
    as_symbols,
    bell,
    coordinates,
    skewed,
    ternary,
    written,
)

from fedpress_compression.coding import (
    Alphabet,
    Grid,
    Integers,
    Layout,
    Positions,
    Reals,
    encode,
)

Vector = tuple[str, Layout, list[list[Any]], Sequence[list[int] | None]]

MATRICES = ((30, 20), (1, 30), (4, 50), (1, 4), (0, 9), (50, 1))
SIZE = sum(height * width for height, width in MATRICES)
GRID = Grid(tuple("abcdef"), MATRICES)


def support(draw: Draw, in_1000: int) -> list[int]:
    """Coordinates of the matrices, dense in every third row and every fourth column."""
    found, at = [], 0
    for height, width in MATRICES:
        for row in range(height):
            for column in range(width):
                scale = (1 + 6 * (row % 3 == 0)) * (1 + 4 * (column % 4 == 0))
                if draw.below(1000) < in_1000 * scale:
                    found.append(at)
                at += 1
    return found


def contexts(draw: Draw, near: list[int]) -> list[int]:
    """High classes at the coordinates `near`, mostly low ones elsewhere; any sign."""
    likely = set(near)
    classes = [min(10, draw.geometric(1) + 5 * (at in likely)) for at in range(SIZE)]
    return [c + 16 * draw.below(3) if c else 0 for c in classes]


def vectors() -> Iterator[Vector]:
    """Name, layout, symbols and contexts of each vector."""
    yield from positions_vectors()
    yield from symbols_vectors()
    yield from integers_vectors()
    yield from upload_vectors()


def positions_vectors() -> Iterator[Vector]:
    draw = Draw(11)
    for name, positions, size in (
        ("row", coordinates(draw, 40, 20), 1000),
        ("one", [0], 2),
        ("last", [999], 1000),
        ("none", [], 10),
        ("all", list(range(10)), 10),
    ):
        yield f"positions-{name}", (Positions(size, size, "range"),), [positions], (None,)
    found = support(draw, 15)
    yield "positions-grid", (Positions(SIZE, SIZE, "range", GRID),), [found], (None,)
    absent = set(support(draw, 10))
    present = [at for at in range(SIZE) if at not in absent]
    yield "positions-absent", (Positions(SIZE, SIZE, "range", GRID),), [present], (None,)
    known = contexts(draw, found)
    for what in ("previous", "drift"):
        grid = replace(GRID, known=what)
        yield f"positions-{what}", (Positions(SIZE, SIZE, "range", grid),), [found], (known,)


def symbols_vectors() -> Iterator[Vector]:
    draw = Draw(12)

    def dense(name: str, symbols: list[int], size: int) -> Vector:
        return f"alphabet-{name}", (Alphabet(size, SIZE, "range", GRID),), [symbols], (None,)

    yield dense("constant", [2] * SIZE, 5)
    yield dense("two", [int(draw.below(30) == 0) for _ in range(SIZE)], 2)
    yield dense("ternary", ternary(draw, SIZE, 40), 3)
    yield dense("ternary-gaps", ternary(draw, SIZE, 93), 3)
    yield dense("odd", bell(draw, SIZE, 2, 15), 15)
    yield dense("even", bell(draw, SIZE, 9, 256), 256)
    yield dense("magnitudes", skewed(draw, SIZE, 3, 100), 100)
    apart = set(support(draw, 12))
    few = [100 + draw.bell(3) if at in apart else 100 for at in range(SIZE)]
    yield dense("gaps", few, 201)
    row = [(x >> 3) % 7 for x in range(200)]
    yield "alphabet-row", (Alphabet(7, 200, "range"),), [row], (None,)
    known = contexts(draw, support(draw, 15))
    signs = [int(x // 16 == 1) ^ int(draw.below(6) == 0) for x in known]
    layout = (Alphabet(2, SIZE, "range", replace(GRID, known="previous")),)
    yield "alphabet-previous", layout, [signs], (known,)


def integers_vectors() -> Iterator[Vector]:
    draw = Draw(13)
    for name, values, bound in (
        ("dense", [draw.bell(40) for _ in range(SIZE)], 300),
        ("gaps", [draw.bell(40) if draw.below(12) == 0 else 0 for _ in range(SIZE)], 300),
        ("zeros", [0] * SIZE, 1),
        ("wide", [(draw.below(2**32) >> draw.below(31)) - 1 for _ in range(SIZE)], 2**31 - 1),
    ):
        clipped = [max(-bound, min(bound, x)) for x in values]
        yield f"integers-{name}", (Integers(bound, SIZE, "range", GRID),), [clipped], (None,)


def upload_vectors() -> Iterator[Vector]:
    """Top-k with signs and magnitudes of all sorts, in the context of the last step."""
    draw = Draw(14)
    found = support(draw, 20)
    known = contexts(draw, found)
    negative = [int(known[at] // 16 == 1) ^ int(draw.below(5) == 0) for at in found]
    grid = replace(GRID, known="previous")
    layout = (
        Positions(SIZE, len(found), "auto", grid),
        Alphabet(2, None, "auto"),
        Alphabet(4, None, "range"),
        Integers(5000, None, "range"),
        Reals(4, 2),
        Alphabet(3, 5, "auto"),
    )
    values: list[list[Any]] = [
        found,
        negative,
        skewed(draw, len(found), 1, 4),
        [draw.bell(30) for _ in found],
        [0.25, 0.5, 0.75, 1.0],
        [0, 1, 2, 1, 1],
    ]
    yield "upload", layout, values, (known, None, None, None, None, None)


Malformed = tuple[str, Layout, str]


def malformed() -> Iterator[Malformed]:
    """Why a body is refused, its layout, the body in hex."""
    ten, row = (Positions(10, 10, "range"),), (Positions(1000, 500, "range"),)
    sound = encode(as_symbols([[3, 5, 40, 41, 999]], row), row)
    yield "flags where the coder is huffman", (Positions(1000, 500),), sound.hex()
    yield "the body ends before a head", ten, ""
    yield "flags with a parameter", ten, "0b 01 00"
    yield "flags of no coordinates", ten, "03 00"
    yield "flags of none that are absent", ten, "07 00"
    yield "flags of more coordinates than at_most", (Positions(10, 3, "range"),), "03 04 0000"
    yield "flags of those that are present where they are not the fewer", ten, "03 06 0000"
    yield "flags of those that are absent where they are not the fewer", ten, "07 05 0000"
    yield "fewer flags than there should be", ten, "03 02 ffffffff"
    yield "the body ends within flags", row, sound[:-1].hex()
    yield "a byte after flags", row, (sound + bytes(1)).hex()
    yield "flags whose last byte leaves a doubt", row, doubtful(sound)
    seven, six = Alphabet(7, 4, "range"), Alphabet(6, 4, "range")
    beyond = encode(as_symbols([[6, 0, 5, 6]], (seven,)), (seven,)).hex()
    yield "values where the coder is huffman", (Alphabet(7, 4),), beyond
    yield "a magnitude of 6 in 6", (six,), beyond
    yield "symbols with parameter 2", (seven,), "14 00"
    yield "symbols in mode 6", (seven,), "06 00"
    yield "the body ends within values", (seven,), beyond[:-2]
    yield "range gaps about symbol 7 in 7", (seven,), "05 07 00"
    yield "range gaps with more than half", (seven,), "05 01 03 0000"
    yield "range gaps at positions", (*ten, Alphabet(7, None, "range")), "00 01 05 05 01 00"
    wide, narrow = Integers(6, 4, "range"), Integers(5, 4, "range")
    beyond = encode(as_symbols([[6, -6, 5, 6]], (wide,)), (wide,)).hex()
    yield "integers under range where the coder is huffman", (Integers(6, 4),), beyond
    yield "an integer of 6 in 5", (narrow,), beyond
    yield "integers with a parameter", (wide,), "0b 00"
    yield "integers in mode 5", (wide,), "05 00"
    yield "integers in range gaps, more than half", (wide,), "04 03 0000"
    yield (
        "integers in range gaps at positions",
        (*ten, Integers(7, None, "range")),
        "00 01 05 04 00",
    )


def doubtful(body: bytes) -> str:
    """`body` with its last byte one less: what comes after it would decide."""
    return (body[:-1] + bytes((body[-1] - 1 & 255,))).hex()


def main(folder: Path) -> None:
    """Write all vectors into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, layout, values, known in vectors():
        symbols = as_symbols(values, layout)
        arrays = [None if each is None else np.array(each, np.uint8) for each in known]
        lines = {
            "name": name,
            "layout": as_json(layout),
            "contexts": known,
            "symbols": values,
            "body": encode(symbols, layout, arrays).hex(),
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
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "range")
