"""Bytes of coded updates against Shannon's bounds, speed against the machine's limits.

    python benchmarks/codec.py [--quick] [--json FILE]

Times are CPU time of one thread, each the median of repeats that are shuffled among each other, so
that ratios hold on a busy machine; only ratios are worth comparing between machines. What more
threads bring is timed on the clock. Libraries to compare with (torch, zstandard) and real updates
(torch, scikit-learn) have rows where they are installed. docs/bench-codec.md explains each key.
"""

from __future__ import annotations

import math
import time
import tracemalloc
import zlib
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import cold_start
import numpy as np
import numpy.typing as npt
from harness import machine, parser, report, shuffled_medians

from fedpress_compression import coding, kernels
from fedpress_compression.coding import Alphabet, Positions
from fedpress_compression.coding.sequences import plan
from fedpress_compression.compressor import Public
from fedpress_compression.compressors.error_feedback import ErrorFeedback
from fedpress_compression.compressors.quantize import Quantize
from fedpress_compression.compressors.topk import TopK
from fedpress_compression.decode_add import decode_add
from fedpress_compression.fixed_point import Accumulator, FixedPoint
from fedpress_compression.randomness import PublicRandomness
from fedpress_compression.tensors import ModelSpec, TensorSpec

Vector = npt.NDArray[np.float32]
Case = Callable[[], object]

SEED = 5
SPARSE = TopK(fraction=0.01, magnitude_bits=4)
DENSE = Quantize(bits=4)
_ZEROS = (0.34, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 0.999)
_LANE_BITS = 16
_THREADED = (
    *("topk", "quantise", "huffman_encode", "huffman_decode", "pack_lanes", "unpack_lanes"),
    *("encode_sparse", "encode_sparse_feedback", "encode_dense"),
    *("decode_add_sparse", "decode_add_dense"),
)
# The key of a ratio, the ratio that is due, the one that is aimed at; True where more is better.
TARGETS: dict[str, tuple[float, float, bool]] = {
    "positions_uniform / log2C": (1.006, 1.004, False),
    "positions_MLP / Elias-Fano": (0.55, 0.50, False),
    "positions_CNN / Elias-Fano": (0.68, 0.65, False),
    "dense_4bit / H0": (1.012, 1.006, False),
    "ternary_worst / H0": (1.012, 1.006, False),
    "huffman_encode x zlib": (7, 11, True),
    "huffman_encode x zstd": (0.9, 1.05, True),
    "huffman_decode x zlib": (3.5, 5.5, True),
    "huffman_decode x zstd": (0.8, 1.0, True),
    "topk / read": (2, 1.5, False),
    "topk x argpartition": (10, 25, True),
    "encode_sparse / memcpy": (1.2, 0.9, False),
    "encode_sparse_feedback / memcpy": (2.2, 1.8, False),
    "decode_add_sparse / add": (0.25, 0.12, False),
    "decode_add_dense / add": (2, 1.3, False),
    "range_decode Mbit/s": (30, 30, True),
    "cold_start_seconds": (1, 0.6, False),
}


def measure(quick: bool = False, size: int | None = None) -> dict[str, Any]:
    """All figures; `quick` leaves 10M out."""
    sizes = [size] if size else [1_000_000] if quick else [1_000_000, 10_000_000]
    fields: dict[str, Any] = {}
    for num in sizes:
        fields[f"synthetic {num:,}"] = _bytes_of(_heavy_tailed(num))
    for name, update in _trained().items():
        fields[name] = _bytes_of(update)
    speeds = {f"{num:,}": _speeds(num, 5 if quick else 15) for num in sizes}
    found: dict[str, Any] = {
        "machine": machine(),
        "bytes": fields,
        "entropy": _entropies(min(1_000_000, sizes[-1])),
        "speeds": speeds,
        **cold_start.measure(3 if quick else 15),
    }
    found["targets"] = _targets(found, f"{sizes[-1]:,}")
    return found


def _heavy_tailed(num: int) -> Vector:
    """Student's t with 3 degrees of freedom, independent: the support of the largest is uniform."""
    rng = np.random.default_rng(SEED)
    return (rng.standard_t(3, num) * 1e-3).astype(np.float32)


def _bell(num: int) -> Vector:
    """Laplace, clipped at five scales: what a clipped dense update looks like."""
    drawn = np.random.default_rng(SEED).laplace(0, 1e-3, num)
    return np.clip(drawn, -5e-3, 5e-3).astype(np.float32)


def _trained() -> dict[str, Vector]:
    if find_spec("torch") is None or find_spec("sklearn") is None:
        return {}
    import trained_updates

    return trained_updates.updates(SEED)


def _public(num: int) -> Public:
    return Public(ModelSpec((TensorSpec("w", (num,)),)), PublicRandomness(bytes(32)))


# Bytes.


def entropy_bits(symbols: npt.NDArray[np.integer]) -> float:
    """Of order 0, of all the symbols together."""
    counts = np.unique(symbols, return_counts=True)[1]
    return float(-(counts * np.log2(counts / symbols.size)).sum())


def choose_bits(size: int, num: int) -> float:
    """log2 C(size, num): the bits of a support drawn at random."""
    logs = math.lgamma(size + 1) - math.lgamma(num + 1) - math.lgamma(size - num + 1)
    return logs / math.log(2)


def elias_fano_bits(size: int, num: int) -> float:
    """num low parts of l = floor(log2(size / num)) bits, and as many unary high parts."""
    low = max(0, int(math.log2(size / num)))
    return float(num * (low + 1) + size / 2**low)


def _bytes_of(update: Vector) -> dict[str, Any]:
    """Each field of a sparse update at 1 % with 4-bit magnitudes, coded alone, and its bounds."""
    public = _public(update.size)
    symbols, _ = SPARSE.compress(update, None, public, np.random.default_rng(SEED))
    found: dict[str, Any] = {}
    where = symbols[0]
    for name, field, values in zip(
        ("positions", "signs", "magnitudes"), SPARSE.layout(public.spec), symbols, strict=False
    ):
        layout = (field,) if name == "positions" else (Alphabet(field.size, values.size),)  # type: ignore[union-attr]
        num_bytes = len(coding.encode((values,), layout))
        found[name] = {"bytes": num_bytes, "bits_each": 8 * num_bytes / values.size}
        if name != "positions":
            bits = entropy_bits(values.astype(np.int64))
            found[name] |= {"entropy_bytes": bits / 8, "ratio_to_entropy": 8 * num_bytes / bits}
    bits = 8 * found["positions"]["bytes"]
    gaps = kernels.gaps_of(where.astype(np.int64))
    bounds = {
        "log2C": choose_bits(update.size, where.size),
        "elias_fano": elias_fano_bits(update.size, where.size),
        "gap_entropy": entropy_bits(gaps),
    }
    for name, bound in bounds.items():
        found["positions"] |= {f"{name}_bytes": bound / 8, f"ratio_to_{name}": bits / bound}
    body = coding.encode(symbols, SPARSE.layout(public.spec))
    found["body"] = {"bytes": len(body), "ratio_to_float32": 4 * update.size / len(body)}
    return found


def _entropies(size: int) -> dict[str, Any]:
    """Dense symbols against their order-0 entropy, a random support of 1 % against log2 C."""
    rng = np.random.default_rng(SEED)
    num = size // 100
    where = np.sort(rng.choice(size, num, replace=False)).astype(np.int64)
    body = coding.encode((where,), (Positions(size, num),))
    found: dict[str, Any] = {"positions_uniform": 8 * len(body) / choose_bits(size, num)}
    public = _public(size)
    symbols = DENSE.compress(_bell(size), None, public, rng)[0][0]
    body = coding.encode((symbols,), (Alphabet(15, size),))
    found["dense_4bit"] = 8 * len(body) / entropy_bits(symbols.astype(np.int64))
    ternary = {}
    for zeros in _ZEROS:
        drawn = rng.random(size)
        signs = np.where(drawn < zeros, 1, np.where(drawn < (1 + zeros) / 2, 0, 2)).astype(np.uint8)
        body = coding.encode((signs,), (Alphabet(3, size),))
        ternary[str(zeros)] = 8 * len(body) / entropy_bits(signs.astype(np.int64))
    return found | {"ternary": ternary}


# Speeds.


def _threaded(cases: dict[str, Case], threads: int, repeats: int) -> dict[str, dict[str, float]]:
    """Least seconds on the clock of each, in one thread and in up to `threads`, by turns: on the
    clock, what others do on this machine counts as well."""
    found: dict[str, dict[str, float]] = {}
    for name, case in cases.items():
        times: dict[int, list[float]] = {1: [], threads: []}
        for _ in range(repeats):
            for most, taken in times.items():
                kernels.limit_threads(most)
                case()
                begun = time.perf_counter()
                case()
                taken.append(time.perf_counter() - begun)
        found[name] = {str(most): min(taken) for most, taken in times.items()}
    return found


def _peak_bytes(case: Case) -> int:
    """The most memory that a case holds at once, over what is there before."""
    tracemalloc.start()
    try:
        case()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def _speeds(num: int, repeats: int) -> dict[str, Any]:
    update, dense_update = _heavy_tailed(num), _bell(num)
    public = _public(num)
    rng = np.random.default_rng(SEED)
    sums = Accumulator(num, FixedPoint(24, 100.0, 2**30))
    into = np.empty_like(update)
    k = SPARSE.layout(public.spec)[0].at_most  # type: ignore[union-attr]
    feedback = ErrorFeedback(SPARSE)
    _, state = feedback.compress(update, feedback.init(public.spec), public, rng)
    sparse_layout, dense_layout = SPARSE.layout(public.spec), DENSE.layout(public.spec)

    def encode_sparse() -> bytes:
        return coding.encode(SPARSE.compress(update, None, public, rng)[0], sparse_layout)

    def encode_feedback() -> bytes:
        return coding.encode(feedback.compress(update, state, public, rng)[0], sparse_layout)

    def encode_dense() -> bytes:
        return coding.encode(DENSE.compress(dense_update, None, public, rng)[0], dense_layout)

    sparse_body, dense_body = encode_sparse(), encode_dense()

    def add_sparse() -> None:
        sums.weight = 0
        decode_add(coding.find(sparse_body, sparse_layout), SPARSE, public, sums, 1)

    def add_dense() -> None:
        sums.weight = 0
        decode_add(coding.find(dense_body, dense_layout), DENSE, public, sums, 1)

    pairs = kernels.group(DENSE.compress(dense_update, None, public, rng)[0][0], 15, 2)  # type: ignore[arg-type]
    widths = np.zeros(225, np.int64)
    histograms = kernels.count_streams(pairs, 225)
    lengths, of_block = kernels.choose_tables(histograms, 4)
    num_bytes = kernels.stream_bytes(histograms, lengths, of_block)
    streams = kernels.write_streams(pairs, lengths, of_block, num_bytes)
    octets = np.concatenate([streams, np.zeros(8, np.uint8)])
    flags = kernels.largest(update[: 1 << 20], 1 << 13)[0]
    shape, no_contexts = np.array([[1, 1 << 20]], np.int64), np.zeros(0, np.uint8)
    size = min(num, 1 << 20)
    flags, shape = flags[flags < size], np.array([[1, size]], np.int64)
    ranged = kernels.encode_flags(flags, size, shape, no_contexts, 1 << 20)
    ranged_octets = np.concatenate([np.frombuffer(ranged or b"", np.uint8), np.zeros(8, np.uint8)])
    stop = ranged_octets.size - 8
    where = kernels.largest(update, k)[0]
    levels, table = np.zeros(where.size, np.uint8), np.ones(16, np.int64)
    total = sums.total
    steps = rng.integers(-1000, 1000, num)
    words = kernels.pack_lanes(steps, _LANE_BITS)

    cases: dict[str, Case] = {
        "read": lambda: kernels.peak(update),
        "memcpy": lambda: np.copyto(into, update),
        "add": lambda: np.add(into, update, out=into),
        "topk": lambda: kernels.largest(update, k),
        "argpartition": lambda: np.argpartition(np.abs(update), num - k),
        "quantise": lambda: kernels.quantise(dense_update, 1e-3, 7, None),
        "huffman_encode": lambda: plan(pairs, widths).write(),
        "huffman_decode": lambda: kernels.read_streams(
            octets, 0, pairs.size, num_bytes, of_block, lengths
        ),
        "pack_lanes": lambda: kernels.pack_lanes(steps, _LANE_BITS),
        "unpack_lanes": lambda: kernels.unpack_lanes(words, _LANE_BITS, num),
        "encode_sparse": encode_sparse,
        "encode_sparse_feedback": encode_feedback,
        "encode_dense": encode_dense,
        "decode_add_sparse": add_sparse,
        "decode_add_dense": add_dense,
        "scatter": lambda: kernels.add_table_at(total, where, levels, table),
        "add_int64": lambda: np.add(total, 1, out=total),
        "range_decode": lambda: kernels.decode_flags(
            ranged_octets, 0, stop, flags.size, size, shape, no_contexts
        ),
    }
    sizes = {"huffman": int(streams.size)} | _others(cases, pairs.tobytes())
    if find_spec("torch") is not None:
        import torch

        torch.set_num_threads(1)
        tensor = torch.from_numpy(update)
        cases["torch_topk"] = lambda: torch.topk(tensor.abs(), k, sorted=False)
    threads = kernels.limit_threads(1)
    try:
        seconds = shuffled_medians(cases, repeats, SEED)
        peaks = {
            name: _peak_bytes(cases[name])
            for name in ("encode_sparse", "encode_dense", "decode_add_sparse", "decode_add_dense")
        }
        threaded = {name: case for name, case in cases.items() if name in _THREADED}
        on_the_clock = _threaded(threaded, threads, repeats) if threads > 1 else {}
    finally:
        kernels.limit_threads(threads)
    ratios = {
        name: {limit: seconds[name] / seconds[limit] for limit in ("read", "memcpy", "add")}
        for name in seconds
    }
    return {
        "values": num,
        "seconds": seconds,
        "ratios": ratios,
        "coded_bytes": sizes,
        "range_decisions": size,
        "peak_bytes": peaks,
        "threads": on_the_clock,
    }


def _others(cases: dict[str, Case], data: bytes) -> dict[str, int]:
    """Add other coders of the same bytes to `cases`; their sizes."""

    def deflate() -> bytes:
        coder = zlib.compressobj(6, zlib.DEFLATED, -15, 9, zlib.Z_HUFFMAN_ONLY)
        return coder.compress(data) + coder.flush()

    deflated = deflate()
    cases["zlib_encode"] = deflate
    cases["zlib_decode"] = lambda: zlib.decompress(deflated, -15)
    sizes = {"zlib": len(deflated)}
    if find_spec("zstandard") is None:
        return sizes
    import zstandard

    huffman_only = zstandard.ZstdCompressionParameters(
        window_log=17,
        chain_log=6,
        hash_log=6,
        search_log=1,
        min_match=7,
        target_length=0,
        strategy=zstandard.STRATEGY_FAST,
    )
    coders = {
        "zstd": zstandard.ZstdCompressor(compression_params=huffman_only),
        "zstd3": zstandard.ZstdCompressor(level=3),
    }
    decoder = zstandard.ZstdDecompressor()
    for name, coder in coders.items():
        coded = coder.compress(data)
        sizes[name] = len(coded)
        cases[f"{name}_encode"] = lambda coder=coder: coder.compress(data)  # type: ignore[misc]
        cases[f"{name}_decode"] = lambda coded=coded: decoder.decompress(coded)  # type: ignore[misc]
    return sizes


# What is due.


def _targets(found: dict[str, Any], largest: str) -> list[dict[str, Any]]:
    seconds = found["speeds"][largest]["seconds"]
    values: dict[str, float] = {
        "positions_uniform / log2C": found["entropy"]["positions_uniform"],
        "dense_4bit / H0": found["entropy"]["dense_4bit"],
        "ternary_worst / H0": max(found["entropy"]["ternary"].values()),
        "range_decode Mbit/s": found["speeds"][largest]["range_decisions"]
        / seconds["range_decode"]
        / 1e6,
        "cold_start_seconds": found["cold_start_seconds"],
    }
    for model in ("MLP", "CNN"):
        if model in found["bytes"]:
            ratio = found["bytes"][model]["positions"]["ratio_to_elias_fano"]
            values[f"positions_{model} / Elias-Fano"] = ratio
    for name, (_, _, more) in TARGETS.items():
        if name in values:
            continue
        case, limit = name.split(" x " if more else " / ")
        limit = f"{limit}_{case.split('_')[1]}" if limit in ("zlib", "zstd") else limit
        if case in seconds and limit in seconds:
            ratio = seconds[case] / seconds[limit]
            values[name] = 1 / ratio if more else ratio
    rows = []
    for name, (due, aim, more) in TARGETS.items():
        if name in values:
            met = values[name] >= due if more else values[name] <= due
            row = {"name": name, "value": values[name], "due": due, "aim": aim, "met": bool(met)}
            rows.append(row)
    return rows


def _tables(found: dict[str, Any]) -> str:
    lines = [" ".join(f"{key} {value}" for key, value in found["machine"].items()), ""]
    lines.append(f"{'update':22}{'field':12}{'bytes':>10}{'bits each':>11}  against its bounds")
    for update, fields in found["bytes"].items():
        for field, row in fields.items():
            ratios = ", ".join(
                f"{value:.3f} x {key.removeprefix('ratio_to_')}"
                for key, value in row.items()
                if key.startswith("ratio_to_")
            )
            each = f"{row['bits_each']:11.3f}" if "bits_each" in row else " " * 11
            lines.append(f"{update:22}{field:12}{row['bytes']:>10}{each}  {ratios}")
    for size, speeds in found["speeds"].items():
        lines += [
            "",
            f"{size} values{'ms':>20}{'x read':>10}{'x memcpy':>10}{'x add':>10}{'MB':>8}",
        ]
        for name, seconds in speeds["seconds"].items():
            ratios = "".join(f"{value:10.2f}" for value in speeds["ratios"][name].values())
            peak = speeds["peak_bytes"].get(name)
            memory = f"{peak / 1e6:8.1f}" if peak is not None else ""
            lines.append(f"{name:24}{1e3 * seconds:>12.3f}{ratios}{memory}")
        if speeds["threads"]:
            lines += ["", f"{size} values, ms on the clock by the number of threads"]
        for name, by_threads in speeds["threads"].items():
            one, more = by_threads.items()
            lines.append(
                f"{name:24}{one[0]:>3}{1e3 * one[1]:>9.3f}{more[0]:>7}{1e3 * more[1]:>9.3f}"
            )
    lines += [
        "",
        f"cold start {found['cold_start_seconds']:.2f} s, at most"
        f" {found['cold_start_worst_seconds']:.2f}; beside all that is installed here"
        f" {found['cold_start_here_seconds']:.2f}",
    ]
    lines += ["", f"{'target':36}{'found':>9}{'due':>8}{'aim':>8}"]
    for row in found["targets"]:
        verdict = "" if row["met"] else "  missed"
        lines.append(
            f"{row['name']:36}{row['value']:9.3f}{row['due']:8.3f}{row['aim']:8.3f}{verdict}"
        )
    return "\n".join(lines)


def main() -> None:
    options = parser(__doc__, quick="1M values, few repeats").parse_args()
    result = measure(options.quick)
    report(_tables(result), result, options.json)


if __name__ == "__main__":
    main()
