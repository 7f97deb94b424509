"""Write the golden vectors of whole upload bodies.

    python protocols/vectors/make_upload_vectors.py [folder]

`uploads.json` has bodies with and without reported numbers and sketches, and
`malformed-uploads.json` what a decoder refuses. A row has `sketch`, the plan's number of cells, and
`sketched`, the bytes of the sketch, only where the plan asks for one. A vector never changes once
it was released.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fedpress_compression import sketches
from fedpress_compression.coding import Alphabet, Reals
from fedpress_protocols.upload import Upload

LAYOUT = (Alphabet(4, 6), Reals(2))
AS_JSON = [{"alphabet": {"size": 4, "count": 6}}, {"reals": {"count": 2, "width": 4}}]
SYMBOLS = [[3, 0, 0, 1, 0, 2], [0.5, -1.25]]
Row = dict[str, Any]


def body(
    report: dict[str, float], num_examples: int = 300, profile: int = 2, sketch: bytes = b""
) -> bytes:
    symbols = (np.array(SYMBOLS[0], np.uint8), np.array(SYMBOLS[1], "<f4"))
    upload = Upload(profile, num_examples, symbols, tuple(report.values()), sketch)
    return upload.to_bytes(LAYOUT)


def sketch_of(num_cells: int) -> bytes:
    return sketches.to_bytes((np.arange(num_cells) * 37 % 64 - 31.5) / 16)


def vectors() -> Iterator[Row]:
    largest = 2.0**24
    cases: dict[str, tuple[dict[str, float], int, int]] = {
        "nothing is reported": ({}, 300, 2),
        "steps": ({"steps": 12}, 1, 0),
        "steps and loss": ({"steps": 40, "loss": 0.6875}, 2**32 - 1, 255),
        "the order is the plan's": ({"loss": 2.5, "steps": 1}, 128, 1),
        "the bounds": ({"steps": largest, "loss": 0.0, "own": -largest}, 127, 2),
        "a number by a name of the trainer's": ({"entropy": -3.0517578125e-05}, 300, 2),
    }
    for name, (report, num_examples, profile) in cases.items():
        yield {
            "name": name,
            "profile": profile,
            "num_examples": num_examples,
            "report": list(report),
            "reported": list(report.values()),
            "layout": AS_JSON,
            "symbols": SYMBOLS,
            "body": body(report, num_examples, profile).hex(),
        }
    sketched: dict[str, tuple[dict[str, float], bytes]] = {
        "a sketch": ({}, sketch_of(64)),
        "a sketch after reported numbers": ({"steps": 12.0, "loss": 0.5}, sketch_of(128)),
        "a sketch of an update of zeros": ({}, sketches.to_bytes(np.zeros(64))),
        "a sketch with a scale of -0": ({}, struct.pack("<f", -0.0) + bytes([0b11100100]) * 16),
    }
    for name, (report, sketch) in sketched.items():
        yield {
            "name": name,
            "profile": 2,
            "num_examples": 300,
            "report": list(report),
            "reported": list(report.values()),
            "sketch": 4 * (len(sketch) - 4),
            "sketched": sketch.hex(),
            "layout": AS_JSON,
            "symbols": SYMBOLS,
            "body": body(report, sketch=sketch).hex(),
        }


def malformed() -> Iterator[Row]:
    """Bodies of one upload, each with something wrong in what it reports or in its sketch."""
    good = body({"steps": 12.0, "loss": 0.5})
    at = 4
    wrong = {
        "steps of 0": (0, 0.0),
        "steps of a half": (0, 0.5),
        "steps above 2^24": (0, 2.0**24 + 2),
        "steps that are NaN": (0, float("nan")),
        "a negative loss": (1, -0.125),
        "an infinite loss": (1, float("inf")),
        "a loss that is NaN": (1, float("nan")),
    }
    bodies = {
        reason: good[: at + 4 * place] + struct.pack("<f", value) + good[at + 4 * place + 4 :]
        for reason, (place, value) in wrong.items()
    }
    bodies |= {
        "the end in the first number": good[: at + 3],
        "the end before the second number": good[: at + 4],
        "the end before the fields": good[: at + 8],
        "numbers that nobody asked for": body({"steps": 12.0, "loss": 0.5, "own": 1.0}),
        "nothing reported": body({}),
        "another profile": body({"steps": 12.0, "loss": 0.5}, profile=1),
        "another wire version": b"\2" + good[1:],
        "no examples": good[:2] + b"\0" + good[4:],
    }
    for reason, data in bodies.items():
        report = ["steps", "loss"]
        yield {
            "reason": reason,
            "profile": 2,
            "report": report,
            "layout": AS_JSON,
            "body": data.hex(),
        }
    yield from malformed_sketches()


def malformed_sketches() -> Iterator[Row]:
    report = {"steps": 12.0, "loss": 0.5}
    good, at = body(report, sketch=sketch_of(64)), 12
    wrong = {
        "a sketch with a negative scale": -0.125,
        "a sketch with an infinite scale": float("inf"),
        "a sketch with a scale that is NaN": float("nan"),
    }
    bodies = {
        reason: good[:at] + struct.pack("<f", scale) + good[at + 4 :]
        for reason, scale in wrong.items()
    }
    bodies |= {
        "the end in the scale of the sketch": good[: at + 3],
        "the end in the codes of the sketch": good[: at + 19],
        "the end after the sketch": good[: at + 20],
        "no sketch": body(report),
        "a sketch of more cells": body(report, sketch=sketch_of(128)),
    }
    for reason, data in bodies.items():
        yield {
            "reason": reason,
            "profile": 2,
            "report": list(report),
            "sketch": 64,
            "layout": AS_JSON,
            "body": data.hex(),
        }
    yield {
        "reason": "a sketch that nobody asked for",
        "profile": 2,
        "report": list(report),
        "layout": AS_JSON,
        "body": good.hex(),
    }


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    for name, rows in (("uploads", vectors()), ("malformed-uploads", malformed())):
        text = json.dumps(list(rows), indent=1) + "\n"
        (folder / f"{name}.json").write_text(text)


if __name__ == "__main__":
    main()
