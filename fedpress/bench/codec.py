"""`fedpress bench codec`: CPU time and bytes of this machine's codec.

Times are CPU seconds of one thread, medians of repeats; `copy` is a copy of the update in memory,
a yardstick for the machine. The updates have Laplace values.
benchmarks/codec.py in the source tree compares with Shannon's bounds and other coders.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import numpy as np

from fedpress.compressor_option import compressor_from_option
from fedpress_compression import coding, kernels
from fedpress_compression.coding import Layout
from fedpress_compression.compressor import Compressor, Public, to_config
from fedpress_compression.decode_add import decode_add
from fedpress_compression.fixed_point import Accumulator, FixedPoint
from fedpress_compression.randomness import PublicRandomness
from fedpress_compression.tensors import ModelSpec, TensorSpec
from fedpress_protocols.errors import ConfigurationError

DEFAULTS = ("topk:fraction=0.01,magnitude_bits=4", "quantize:bits=4")
"""A sparse method and a dense one."""

T = TypeVar("T")
_SEED = 5
_REPEATS = 7
_QUICK_REPEATS = 3
_QUICK_VALUES = 100_000


@dataclass(frozen=True)
class Row:
    """One compressor: bytes of a coded update, CPU milliseconds of each step."""

    compressor: str
    config: dict[str, Any]
    bytes: int
    bits_per_value: float
    compress_ms: float
    encode_ms: float
    decode_ms: float
    """Bytes to the server's sum, every check included."""


def run(json_file: Path | None, quick: bool, values: int, options: Sequence[str] = DEFAULTS) -> str:
    """Measure updates of `values` values under each of `options` (see `--compressor`); the table
    for people, and the figures to `json_file` if there is one."""
    if values < 1:
        raise ConfigurationError(f"--values must be at least 1, not {values}")
    repeats = _QUICK_REPEATS if quick else _REPEATS
    values = min(values, _QUICK_VALUES) if quick else values
    made = {option: compressor_from_option(option) for option in options}
    threads = kernels.limit_threads(1)
    try:
        copy_ms = _copy_ms(values, repeats)
        rows = [measured(name, each, values, repeats) for name, each in made.items()]
    finally:
        kernels.limit_threads(threads)
    if json_file is not None:
        figures = {
            "kernels": kernels.CHOSEN,
            "values": values,
            "copy_ms": copy_ms,
            "rows": [asdict(row) for row in rows],
        }
        json_file.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return _table(rows, values, copy_ms)


def measured(name: str, compressor: Compressor[Any], values: int, repeats: int) -> Row:
    """Compress, encode and decode an update `repeats` times after a warm-up, which leaves the state
    of a device that has sent something."""
    side = max(1, int(values**0.5))
    matrix, rest = TensorSpec("w", (values // side, side)), values % side
    tensors = (matrix, TensorSpec("b", (rest,))) if rest else (matrix,)
    spec = ModelSpec(tensors)
    zeros = np.zeros(values, np.float32)
    public = Public(
        spec,
        PublicRandomness(bytes(32)),
        knowledge={"previous": zeros, "drift": zeros, "own": zeros},
    )
    rng = np.random.default_rng(_SEED)
    update = rng.laplace(0, 1e-3, values).astype(np.float32)
    layout = compressor.layout(spec)
    _, state = compressor.compress(update, compressor.init(spec), public, rng)
    times: dict[str, list[float]] = {"compress": [], "encode": [], "decode": []}
    for _ in range(1 + repeats):
        symbols, _ = _timed(
            times["compress"], partial(compressor.compress, update, state, public, rng)
        )
        body = _timed(times["encode"], partial(coding.encode, symbols, layout))
        total = Accumulator(values, FixedPoint(24, 100.0, 2**30))
        _timed(times["decode"], partial(_add, body, layout, compressor, public, total))
    compress, encode, decode = (1e3 * median(each[1:]) for each in times.values())
    return Row(
        compressor=name,
        config=to_config(compressor),
        bytes=len(body),
        bits_per_value=8 * len(body) / values,
        compress_ms=compress,
        encode_ms=encode,
        decode_ms=decode,
    )


def _add(
    body: bytes, layout: Layout, compressor: Compressor[Any], public: Public, total: Accumulator
) -> None:
    decode_add(coding.find(body, layout), compressor, public, total, 1)


def _timed(times: list[float], call: Callable[[], T]) -> T:
    begun = time.thread_time()
    result = call()
    times.append(time.thread_time() - begun)
    return result


def _copy_ms(values: int, repeats: int) -> float:
    source, target = np.ones(values, np.float32), np.empty(values, np.float32)
    times: list[float] = []
    for _ in range(1 + repeats):
        _timed(times, lambda: np.copyto(target, source))
    return 1e3 * median(times[1:])


def _table(rows: Sequence[Row], values: int, copy_ms: float) -> str:
    lines = [
        f"{values:,} values, {kernels.CHOSEN} kernels, one thread; a copy takes {copy_ms:.3f} ms",
        f"{'compressor':40} {'bytes':>10} {'bits/value':>10} {'compress ms':>11} "
        f"{'encode ms':>9} {'decode ms':>9}",
    ]
    lines += [
        f"{row.compressor:40} {row.bytes:>10} {row.bits_per_value:>10.4f} {row.compress_ms:>11.3f} "
        f"{row.encode_ms:>9.3f} {row.decode_ms:>9.3f}"
        for row in rows
    ]
    return "\n".join(lines)
