"""Bytes at an equal error of other projects' coders and of ours, on frozen updates.

    pip install --no-deps nncodec==2.1.3          # and what it imports; torchvision is not needed
    pip install --no-deps openfl==1.9 fedlab==1.3.0             # and what their pipelines import
    python benchmarks/beside_the_field.py --json benchmarks/results/beside_the_field.json
    python benchmarks/beside_the_field.py --json FILE --only openfl,fedlab   # keeps the others
    python benchmarks/beside_the_field.py --table # of the kept figures; measures nothing

Twelve updates of `make_frozen_updates.py`, checked against their digests. Every method sends one
whole body for all tensors of an update, which is decoded again; errors are of what was decoded.
NNCodec has whole numbers for its step (two to four a factor of two) and EDEN a few rates: between
two settings their bytes are interpolated (logarithms over NMSE), which favours them. NNCodec has
one step for all tensors, biases among them, row skipping, and at each error the best of uniform
and dependent quantisation, each with rate-distortion optimisation and without. Ours knows the
model's last step (`previous`), as NNCodec would in its temporal mode (`tca`), which needs a
bitstream of before and is off. OpenFL's pipelines run tensor by tensor, as it runs them; its bytes
are those of its protobuf messages. FedLab's are those of the tensors that its compressors return,
in their own types: it has no other coder. What is not installed is left out, and said. Times are
CPU seconds of one encoding or decoding at NMSE .3, medians.
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
OPENFL = ("OpenFL, STC", "OpenFL, SKC", "OpenFL, KC", "OpenFL, EDEN")
FEDLAB = ("FedLab, top-k", "FedLab, QSGD")
OURS = ("ecsq", "ecsq, rdo", "low rank + ecsq, rdo")
METHODS = ("float16 + zstd", "EDEN", "NNCodec 2", *OPENFL, *FEDLAB, *OURS)
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
    """Up to three components of each matrix where they pay, and `ecsq` for the rest; the settings
    were chosen on other updates."""
    first = {"id": "lowrank", "rank": 3, "bits": 5, "rest": {"id": "half"}}
    second = {"id": "ecsq", "control": "nmse", "target": error, "rdo": 0.14}
    stages = {"first": first, "second": second, "target_of": "whole"}
    return ours({"id": "successive_refinement", **stages}, update, file)


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


def openfl(update: Vector, file: Updates) -> dict[str, list[Point]]:
    """Its lossy pipelines; k-means with its own six clusters."""
    pipelines = importlib.import_module("openfl.pipelines")
    protocols = importlib.import_module("openfl.protocols.utils")
    shares = (0.01, 0.03, 0.1, 0.3, 0.9)
    made: dict[str, list[Any]] = {
        "OpenFL, STC": [pipelines.STCPipeline(p_sparsity=share) for share in shares],
        "OpenFL, SKC": [pipelines.SKCPipeline(p_sparsity=share) for share in shares],
        "OpenFL, KC": [pipelines.KCPipeline()],
        "OpenFL, EDEN": [pipelines.EdenPipeline(bits, dim_threshold=1) for bits in range(1, 6)],
    }  # its way of sending tensors of less than 100 values fails with numpy 2.4

    def measured(pipeline: Any) -> Point:
        sent: dict[str, tuple[bytes, Any]] = {}

        def encoded() -> bytes:
            messages = b""
            for name, array in file.spec.unflatten(update).items():
                data, metadata = pipeline.forward(array.copy())
                key = (name, "client", 1, False, ())
                message = protocols.construct_named_tensor(key, data, metadata, False)
                messages += message.SerializeToString()
                sent[name] = data, metadata
            return messages

        def decoded(body: bytes) -> Vector:
            arrays = {name: pipeline.backward(*each) for name, each in sent.items()}
            shaped = {t.name: arrays[t.name].reshape(t.shape) for t in file.spec.tensors}
            return file.spec.flatten({n: a.astype(np.float32) for n, a in shaped.items()})

        return timed(update, encoded, decoded)

    return {name: [measured(pipeline) for pipeline in each] for name, each in made.items()}


def fedlab(update: Vector, file: Updates) -> dict[str, list[Point]]:
    """Its two compressors, over the whole update as one vector, as it serialises models."""
    import torch

    compressors = importlib.import_module("fedlab.contrib.compressor")
    torch.manual_seed(0)
    tensor = torch.from_numpy(update.copy())
    sent: list[Any] = []

    def measured(made: Any, *shape: Any) -> Point:
        def encoded() -> bytes:
            sent[:] = made.compress(tensor)
            return b"".join(each.numpy().tobytes() for each in sent)

        def decoded(body: bytes) -> Vector:
            back = made.decompress(*sent, *shape) if shape else made.decompress(sent)
            return np.asarray(back.numpy())

        return timed(update, encoded, decoded)

    shares = (0.003, 0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 0.7)
    top = [measured(compressors.TopkCompressor(share), tensor.shape) for share in shares]
    qsgd = [measured(compressors.QSGDCompressor(bits, random=False)) for bits in range(1, 9)]
    return dict(zip(FEDLAB, (top, qsgd), strict=True))


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


def _others(update: Vector, file: Updates, only: Sequence[str]) -> dict[str, list[Point]]:
    """By method of other projects, its points; those whose package is missing are left out."""
    points = dict[str, list[Point]]()
    coders: tuple[tuple[str, Callable[[], dict[str, list[Point]]]], ...] = (
        ("zstandard", lambda: {METHODS[0]: [float16(update)]}),
        ("fedpress", lambda: {METHODS[1]: eden(update, file)}),
        ("openfl", lambda: openfl(update, file)),
        ("fedlab", lambda: fedlab(update, file)),
        ("nncodec", lambda: {METHODS[2]: nncodec(update, file)}),  # last: it hides modules
    )
    for package, runs in coders:
        if only and package not in only:
            continue
        try:
            points |= runs()
        except ImportError as exc:
            print(f"{package} is left out: {exc}", file=sys.stderr)
    return points


def measured(kept: dict[str, Any], only: Sequence[str]) -> dict[str, Any]:
    """For each update and method, bytes at each of ERRORS; medians of seconds at NMSE .3. With
    `only` some packages are measured, ours as `fedpress`, and the rest stays as in `kept`."""
    before = {row["update"]: row["bytes"] for row in kept.get("rows", ())}
    rows, times = list[dict[str, Any]](), {method: list[Point]() for method in METHODS}
    for name, file in frozen():
        for client, update in enumerate(file.updates):
            sizes = before.get(f"{name}, client {client}", {})
            sizes = {method: each for method, each in sizes.items() if method in METHODS}
            for method, points in _others(update, file, only).items():
                sizes[method] = [at(points, error) for error in ERRORS]
                times[method].append(min(points, key=lambda p: abs(p[0] - 0.3)))
            own: dict[str, Callable[[float], Point]] = {
                OURS[0]: lambda error: ecsq(error, update, file, 0.0),  # noqa: B023 - used here
                OURS[1]: lambda error: ecsq(error, update, file, 0.14),  # noqa: B023
                OURS[2]: lambda error: refined(error, update, file),  # noqa: B023
            }
            for method, made in own.items() if not only or "fedpress" in only else ():
                points = [made(error) for error in ERRORS]
                sizes[method] = [float(point[1]) for point in points]
                times[method].append(points[ERRORS.index(0.3)])
            rows.append({"update": f"{name}, client {client}", "bytes": sizes})
            print(rows[-1]["update"], {m: [_whole(b) for b in s] for m, s in sizes.items()})
    seconds = {m: each for m, each in kept.get("seconds", {}).items() if m in METHODS}
    for method, points in times.items():
        if points:
            seconds[method] = [float(np.median([p[i] for p in points])) for i in (2, 3)]
    return {"machine": machine(), "errors": ERRORS, "rows": rows, "seconds": seconds}


def _whole(size: float) -> str:
    return f"{size:.0f}" if math.isfinite(size) else "-"


def table(figures: dict[str, Any]) -> Iterator[str]:
    """Geometric means over the updates of bytes, and NNCodec's as multiples of ours with `rdo`;
    none where an update has no setting with so small an error."""
    errors = figures["errors"]
    yield "| bytes at NMSE | " + " | ".join(f"{e:g}" for e in errors) + " | encode, decode ms |"
    yield "|---" * (len(errors) + 2) + "|"

    def logs(method: str) -> Any:
        return np.log([row["bytes"][method] for row in figures["rows"]])

    for method in METHODS:
        if method not in figures["seconds"]:
            continue
        sizes = " | ".join(_whole(size) for size in np.exp(logs(method).mean(0)))
        encoding, decoding = (1000 * second for second in figures["seconds"][method])
        yield f"| {method} | {sizes} | {encoding:.0f}, {decoding:.0f} |"
    for own in OURS[1:] if {"NNCodec 2", *OURS[1:]} <= figures["seconds"].keys() else ():
        ratios = np.exp(logs("NNCodec 2") - logs(own))
        for name, each in (
            ("mean", np.exp(np.log(ratios).mean(0))),
            ("least", ratios.min(0)),
            ("most", ratios.max(0)),
        ):
            cells = " | ".join(f"{ratio:.2f}" for ratio in each)
            yield f"| NNCodec 2 / `{own}`, {name} | {cells} | |"


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--table", action="store_true", help="print the table of the kept figures")
    made.add_argument("--only", default="", help="packages; the rest stays as in --json FILE")
    asked = made.parse_args()
    only = [each for each in asked.only.split(",") if each]
    file = KEPT if asked.table else asked.json if only else None
    kept = json.loads(file.read_text()) if file else {}
    figures = kept if asked.table else measured(kept, only)
    report("\n".join(table(figures)), figures, None if asked.table else asked.json)


if __name__ == "__main__":
    main()
