"""Bytes at an equal error of NNCodec 2, EDEN, float16 with zstd and ours, on frozen updates.

    pip install --no-deps nncodec==2.1.3          # and what it imports; torchvision is not needed
    python benchmarks/beside_the_field.py --json benchmarks/results/beside_the_field.json
    python benchmarks/beside_the_field.py --table # of the kept figures; measures nothing

Twelve updates of `make_frozen_updates.py`, checked against their digests. Every method sends one
whole body for all tensors of an update, which is decoded again; errors are of what was decoded.
NNCodec has whole numbers for its step (two to four a factor of two) and EDEN a few rates: between
two settings their bytes are interpolated (logarithms over NMSE), which favours them. NNCodec has
one step for all tensors, biases among them, row skipping, and at each error the best of uniform
and dependent quantisation, each with rate-distortion optimisation and without. Ours knows the
model's last step (`previous`), as NNCodec would in its temporal mode (`tca`), which needs a
bitstream of before and is off. Times are CPU seconds of one encoding or decoding at NMSE .3,
medians.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import io
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
from harness import machine, parser, report

from fedpress.update_file import Updates
from fedpress_compression.coding import decode, encode
from fedpress_compression.compressor import Compressor, from_config
from fedpress_compression.contexts import contexts_of
from fedpress_compression.tensors import Vector

FOLDER = Path(__file__).parent / "fixtures" / "frozen"
KEPT = Path(__file__).parent / "results" / "beside_the_field.json"
ERRORS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7)
METHODS = ("float16 + zstd", "EDEN", "NNCodec 2", "ecsq", "ecsq, rdo", "rank 1 + ecsq, rdo")
UNUSED = (
    *("torchvision", "torchvision.transforms", "torchvision.datasets", "torchvision.models"),
    *("torchvision.io", "pandas", "ptflops", "timm", "wandb", "tensorflow", "h5py", "flwr"),
    *("cv2", "tqdm", "torchmetrics", "PIL"),
)
SCALES = (0.0, 1.0)
"""NNCodec's `lambda_scale`, of its rate-distortion optimisation: off, its default, and on."""
Point = tuple[float, int, float, float]
"""NMSE, bytes, seconds to encode, seconds to decode."""


def frozen() -> Iterator[tuple[str, Updates]]:
    """The files, each as its digest says; raises ValueError."""
    for line in (FOLDER / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split()
        if hashlib.sha256((FOLDER / name).read_bytes()).hexdigest() != digest:
            raise ValueError(f"{name} is not the file that SHA256SUMS is of: check it out anew")
        yield name.removesuffix(".npz"), Updates.load(str(FOLDER / name))


def timed(
    update: Vector, encoded: Callable[[], bytes], decoded: Callable[[bytes], Vector]
) -> Point:
    begin = time.process_time()
    body = encoded()
    middle = time.process_time()
    back = decoded(body).astype(np.float64)
    end = time.process_time()
    whole = update.astype(np.float64)
    nmse = float(np.square(whole - back).sum() / np.square(whole).sum())
    return nmse, len(body), middle - begin, end - middle


def ours(config: dict[str, Any], update: Vector, file: Updates) -> Point:
    made: Compressor[Any] = from_config({"id": "coded", "contexts": "previous", "inner": config})
    layout = made.layout(file.spec)
    contexts = contexts_of(layout, file.public)
    rng = np.random.default_rng(0)

    def encoded() -> bytes:
        symbols, _ = made.compress(update, made.init(file.spec), file.public, rng)
        return encode(symbols, layout, contexts)

    def decoded(body: bytes) -> Vector:
        return made.decompress(decode(body, layout, contexts), file.public).dense()

    return timed(update, encoded, decoded)


def ecsq(error: float, update: Vector, file: Updates, rdo: float) -> Point:
    return ours({"id": "ecsq", "control": "nmse", "target": error, "rdo": rdo}, update, file)


def refined(error: float, update: Vector, file: Updates) -> Point:
    """Rank 1, and `ecsq` for the rest unless rank 1 is enough."""
    rest = {"id": "ecsq", "control": "nmse", "target": 0.3, "rdo": 0.14}
    rank1 = {"id": "lowrank", "rank": 1, "rest": rest}
    alone = ours(rank1, update, file)
    if alone[0] <= error:
        return alone
    second = {"id": "ecsq", "control": "nmse", "target": error / alone[0], "rdo": 0.14}
    return ours({"id": "successive_refinement", "first": rank1, "second": second}, update, file)


def eden(update: Vector, file: Updates) -> list[Point]:
    rates = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 1, 2, 3, 4)
    return [ours({"id": "eden", "bits": b, "scale": "mmse"}, update, file) for b in rates]


def float16(update: Vector) -> Point:
    import zstandard

    def decoded(body: bytes) -> Vector:
        return np.frombuffer(zstandard.decompress(body), "<f2").astype(np.float32)

    return timed(update, lambda: zstandard.compress(update.astype("<f2").tobytes(), 19), decoded)


def nncodec(update: Vector, file: Updates) -> list[Point]:
    for unused in UNUSED:  # its data sets' and trainers' imports, which its coder does not need
        sys.modules.setdefault(unused, MagicMock())
    nnc = importlib.import_module("nncodec.nnc")

    spec, points = file.spec, list[Point]()

    def measured(qp: int, dependent: bool, scale: float) -> Point:
        def encoded() -> bytes:
            tensors = {n: a.copy() for n, a in spec.unflatten(update).items()}
            steps = dict.fromkeys(tensors, qp)
            options = {"qp": qp, "qp_per_tensor": steps, "use_dq": dependent}
            options |= {"lambda_scale": scale, "row_skipping": True, "return_bitstream": True}
            return bytes(nnc.compress(tensors, bitstream_path=None, **options))

        def decoded(body: bytes) -> Vector:
            return spec.flatten(nnc.decompress(bytearray(body)))

        with contextlib.redirect_stdout(io.StringIO()):
            return timed(update, encoded, decoded)

    finest = round(4 * float(np.log2(np.sqrt(np.square(update.astype(np.float64)).mean()))))
    for dependent, scale in itertools.product((False, True), SCALES):
        qp = finest - 3
        while True:
            points.append(measured(qp, dependent, scale))
            if points[-1][0] > max(ERRORS):
                break
            qp += 1 if points[-1][0] > 0.04 else 2
    return points


def at(points: Sequence[Point], error: float) -> float:
    """The fewest bytes for `error`, between neighbours of the points that nothing else beats."""
    best = list[Point]()
    for point in sorted(points):
        while best and best[-1][1] >= point[1] and best[-1][0] >= point[0]:
            best.pop()
        if not best or point[1] < best[-1][1]:
            best.append(point)
    above = [index for index, point in enumerate(best) if point[0] > error]
    if not best or best[0][0] > error:
        return math.inf
    if not above:
        return best[-1][1]
    low, high = best[above[0] - 1], best[above[0]]
    share = (error - low[0]) / (high[0] - low[0])
    return float(low[1] * (high[1] / low[1]) ** share)


def measured() -> dict[str, Any]:
    """For each update and method, bytes at each of ERRORS; medians of seconds at NMSE .3."""
    rows, times = list[dict[str, Any]](), {method: list[Point]() for method in METHODS}
    for name, file in frozen():
        for client, update in enumerate(file.updates):
            raw, rates, field = float16(update), eden(update, file), nncodec(update, file)
            sizes: dict[str, list[float]] = {
                METHODS[0]: [raw[1]] * len(ERRORS),
                METHODS[1]: [at(rates, error) for error in ERRORS],
                METHODS[2]: [at(field, error) for error in ERRORS],
            }
            own = {
                METHODS[3]: [ecsq(error, update, file, 0.0) for error in ERRORS],
                METHODS[4]: [ecsq(error, update, file, 0.14) for error in ERRORS],
                METHODS[5]: [refined(error, update, file) for error in ERRORS],
            }
            sizes |= {method: [float(p[1]) for p in points] for method, points in own.items()}
            times[METHODS[0]].append(raw)
            for method, points in zip(METHODS[1:3], (rates, field), strict=True):
                times[method].append(min(points, key=lambda p: abs(p[0] - 0.3)))
            for method, points in own.items():
                times[method].append(points[ERRORS.index(0.3)])
            rows.append({"update": f"{name}, client {client}", "bytes": sizes})
            print(rows[-1]["update"], {m: [round(b) for b in s] for m, s in sizes.items()})
    seconds = {
        method: [float(np.median([p[i] for p in points])) for i in (2, 3)]
        for method, points in times.items()
    }
    return {"machine": machine(), "errors": ERRORS, "rows": rows, "seconds": seconds}


def table(figures: dict[str, Any]) -> Iterator[str]:
    """Geometric means over the updates of bytes, and NNCodec's as multiples of `ecsq, rdo`."""
    errors = figures["errors"]
    yield "| bytes at NMSE | " + " | ".join(f"{e:g}" for e in errors) + " | encode, decode ms |"
    yield "|---" * (len(errors) + 2) + "|"

    def logs(method: str) -> Any:
        return np.log([row["bytes"][method] for row in figures["rows"]])

    for method in METHODS:
        sizes = " | ".join(f"{size:.0f}" for size in np.exp(logs(method).mean(0)))
        encoding, decoding = (1000 * second for second in figures["seconds"][method])
        yield f"| {method} | {sizes} | {encoding:.0f}, {decoding:.0f} |"
    ratios = np.exp(logs("NNCodec 2") - logs("ecsq, rdo"))
    for name, each in (
        ("mean", np.exp(np.log(ratios).mean(0))),
        ("least", ratios.min(0)),
        ("most", ratios.max(0)),
    ):
        cells = " | ".join(f"{ratio:.2f}" for ratio in each)
        yield f"| NNCodec 2 / `ecsq, rdo`, {name} | {cells} | |"


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--table", action="store_true", help="print the table of the kept figures")
    asked = made.parse_args()
    figures = json.loads(KEPT.read_text()) if asked.table else measured()
    report("\n".join(table(figures)), figures, None if asked.table else asked.json)


if __name__ == "__main__":
    main()
