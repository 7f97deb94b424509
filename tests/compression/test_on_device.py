"""Triton's kernels give what numpy's give, bit for bit: on a GPU, or else under its interpreter."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="runs the kernels of fedpress[gpu]")
import torch

pytest.importorskip("triton", reason="runs the kernels of fedpress[gpu]")

from fedpress_compression import coding, kernels
from fedpress_compression.compressor import Compressor, Public
from fedpress_compression.compressors.coded import Coded
from fedpress_compression.compressors.error_feedback import ErrorFeedback
from fedpress_compression.compressors.quantize import Quantize
from fedpress_compression.compressors.topk import TopK
from fedpress_compression.decode_add import decode_add
from fedpress_compression.errors import ConfigurationError, DecodingError
from fedpress_compression.fixed_point import Accumulator, FixedPoint
from fedpress_compression.kernels import on_device, reference
from fedpress_compression.randomness import PublicRandomness
from fedpress_compression.tensors import ModelSpec, TensorSpec, Vector

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
OWN = [name for name in reference.__all__ if vars(on_device)[name].__module__ == on_device.__name__]


def drawn(rng: np.random.Generator, num: int) -> Vector:
    """Values with many ties and zeros."""
    values = np.round(rng.standard_t(3, num), 1).astype(np.float32)
    values[::7] = 0
    return values


def same(due: tuple[Any, ...], found: tuple[Any, ...]) -> bool:
    return [(a.dtype, a.tobytes()) for a in due] == [(a.dtype, a.tobytes()) for a in found]


def test_these_kernels_have_versions_for_a_device() -> None:
    assert set(OWN) == {
        *("add_largest", "add_table_at", "decode_lanes", "encode_lanes", "largest", "quantise"),
        "write_octets",
    }


@pytest.mark.parametrize(("num", "k"), [(0, 3), (1, 1), (2500, 0), (2500, 40), (2500, 3000)])
def test_the_largest_of_a_vector_and_of_a_sum_are_the_same(num: int, k: int) -> None:
    rng = np.random.default_rng(num + k)
    vector, residual = drawn(rng, num), drawn(rng, num)
    assert same(reference.largest(vector, k), on_device.largest(vector, k))
    totals = np.empty(num, np.float32), np.empty(num, np.float32)
    for scale in (1.0, 0.5):
        due = reference.add_largest(vector, residual, k, totals[0], scale)
        assert same(due, on_device.add_largest(vector, residual, k, totals[1], scale))
        assert totals[0].tobytes() == totals[1].tobytes()


def check_largest(vector: Vector, k: int) -> None:
    """By itself, and as a sum of halves of it, which is exact."""
    due = reference.largest(vector, k)
    assert same(due, on_device.largest(vector, k))
    totals = np.empty_like(vector), np.empty_like(vector)
    half = vector / np.float32(2)
    due = reference.add_largest(half, vector - half, k, totals[0])
    assert same(due, on_device.add_largest(half, vector - half, k, totals[1]))
    assert totals[0].tobytes() == totals[1].tobytes()


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The k of selections that counted all entries: the sample was of no use."""
    seen, count = list[int](), on_device._counted

    def watching(vector: torch.Tensor, k: int) -> torch.Tensor:
        seen.append(k)
        return count(vector, k)

    monkeypatch.setattr(on_device, "_counted", watching)
    return seen


STRIDE = on_device._STRIDE


def sampled_places(num: int) -> np.ndarray:
    """Where the sample of a vector of `num` entries looks."""
    places = torch.arange(num, dtype=torch.float32, device=on_device.DEVICE)
    sample = torch.empty(num // STRIDE, dtype=torch.int32, device=on_device.DEVICE)
    on_device._sample[on_device._blocks(sample.numel())](
        places, places, sample, sample.numel(), STRIDE, False, on_device._BLOCK
    )
    return sample.view(torch.float32).cpu().numpy().astype(np.int64)


def periodic(values: Vector) -> Vector:
    """The same entry of each row is large: one in each stride."""
    return np.where(np.arange(values.size) % STRIDE == 0, 1000 * values, values)


def rare(values: Vector) -> Vector:
    """Fewer entries that are not 0 than are to be kept."""
    return np.where(np.arange(values.size) % 500 == 1, values, 0).astype(np.float32)


def subnormal(values: Vector) -> Vector:
    return np.rint(values * 1000).astype(np.float32) * np.float32(2e-45)


@pytest.mark.parametrize(
    "changed", [np.asarray, np.sort, periodic, rare, subnormal, lambda values: np.round(values, 1)]
)
def test_a_sample_tells_which_may_be_the_largest(changed: Any, counted: list[int]) -> None:
    values = np.random.default_rng(5).standard_t(3, 9001).astype(np.float32)
    check_largest(changed(values), 90)
    assert not counted


def equal(values: Vector) -> Vector:
    return np.ones_like(values)


def spike(values: Vector) -> Vector:
    """One large entry, and all others the same."""
    return np.where(np.arange(values.size) == 7000, 1e30, -1e-3).astype(np.float32)


def hidden(values: Vector) -> Vector:
    """Large where the sample does not look: more reach its threshold than there is room for."""
    large = np.sign(values) * (1 + np.abs(values))
    large[sampled_places(values.size)] /= 1000
    return large


def shown(values: Vector) -> Vector:
    """Large where the sample looks and nowhere else: fewer reach its threshold than are kept."""
    large = values.copy()
    large[sampled_places(values.size)] *= 1e6
    return large


@pytest.mark.parametrize("changed", [equal, spike, hidden, shown])
def test_a_sample_that_misleads_costs_time_alone(changed: Any, counted: list[int]) -> None:
    values = np.random.default_rng(6).normal(0, 1, 9001).astype(np.float32)
    check_largest(changed(values), 90)
    assert counted == [90, 90]


@pytest.mark.parametrize("k", [1, 10, 100])
def test_a_vector_that_is_no_longer_than_the_room_is_counted(k: int, counted: list[int]) -> None:
    room = k + STRIDE * on_device._surely(on_device._surely(k / STRIDE))
    for num in (room - 1, room, room + 1, room + STRIDE):
        counted.clear()
        check_largest(drawn(np.random.default_rng(num), num), k)
        assert bool(counted) == (num <= room)


def test_a_longer_vector_has_a_sample_of_the_same_size(
    counted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_device, "_SAMPLES", 64)
    check_largest(drawn(np.random.default_rng(7), 5001), 50)
    assert not counted


def test_a_vector_beyond_the_indices_of_a_key_is_refused() -> None:
    vector = torch.zeros(1, device=on_device.DEVICE).expand((1 << 32) + 1)
    with pytest.raises(ConfigurationError, match=r"4294967297 values where .* 2\*\*32 at most"):
        on_device.device_largest(vector, None, 1, None)


@pytest.mark.parametrize("levels", [1, 7, 127])
@pytest.mark.parametrize("step", [0.0, 0.1, 0.25])
def test_rounded_values_are_the_same(levels: int, step: float) -> None:
    """0.25 has halves, which go to the even level."""
    rng = np.random.default_rng(levels)
    vector = (np.rint(rng.normal(0, 20, 1500)) / 8).astype(np.float32)
    for noise in (None, rng.random(vector.size)):
        due = reference.quantise(vector, step, levels, noise)
        assert on_device.quantise(vector, step, levels, noise).tobytes() == due.tobytes()


@pytest.mark.parametrize("width", range(1, 9))
def test_packed_bits_are_the_same(width: int) -> None:
    for num in (0, 1, 9, 1000):
        symbols = np.random.default_rng(num).integers(0, 2**width, num).astype(np.uint8)
        assert on_device.write_octets(symbols, width) == reference.write_octets(symbols, width)


@pytest.mark.parametrize("num_lanes", [8, 32, 70, 128])
def test_lanes_are_the_same_and_damaged_ones_are_refused(num_lanes: int) -> None:
    rng, num = np.random.default_rng(num_lanes), 501
    tables = np.array([[4096, 0, 0], [1, 4094, 1], [1000, 1000, 2096]], np.uint16)
    memory, classes = np.array([0, 1, 2], np.uint8), np.zeros(num, np.uint8)
    starts = set((np.arange(num_lanes) * num // num_lanes).tolist())
    symbols, contexts = np.zeros(num, np.uint8), np.zeros(num, np.uint8)
    for at in range(num):
        contexts[at] = 2 if at in starts else memory[symbols[at - 1]]
        symbols[at] = rng.choice(3, p=tables[contexts[at]] / 4096)
    memory[0], contexts[list(starts)] = 0, 0
    symbols[contexts == 0] = 0
    contexts = np.where(np.isin(np.arange(num), list(starts)), 0, memory[np.roll(symbols, 1)])
    contexts = contexts.astype(np.uint8)
    tables[0] = (2000, 1000, 1096)
    due_words, due = reference.encode_lanes(symbols, contexts, tables, num_lanes)
    words, stream = on_device.encode_lanes(symbols, contexts, tables, num_lanes)
    assert words.tolist() == due_words.tolist()
    assert stream.tobytes() == due.tobytes()
    octets = np.concatenate([stream, np.zeros(8, np.uint8)])
    given = classes, memory, tables, num_lanes
    assert on_device.decode_lanes(octets, 0, words, *given).tolist() == symbols.tolist()
    octets[1] ^= 4
    for module in (reference, on_device):
        with pytest.raises(DecodingError):
            module.decode_lanes(octets, 0, words, *given)


def test_sums_of_symbols_are_the_same() -> None:
    rng = np.random.default_rng(0)
    sums = [rng.integers(-(2**60), 2**60, 1500)]
    sums.append(sums[0].copy())
    where = np.flatnonzero(rng.random(1500) < 0.2)
    symbols = rng.integers(0, 4, where.size).astype(np.uint8)
    for module, total in zip((reference, on_device), sums, strict=True):
        module.add_table_at(total, where, symbols, np.array([5, -3, 2**50, 9]))
    assert sums[0].tolist() == sums[1].tolist()


@pytest.mark.parametrize(
    "compressor",
    [
        ErrorFeedback(Coded(TopK(0.06), "lanes")),
        Quantize(bits=4),
        Quantize(2, rounding="stochastic"),
    ],
)
def test_bodies_and_sums_are_those_of_the_host(
    compressor: Compressor[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = ModelSpec((TensorSpec("a", (60, 40)), TensorSpec("b", (60,))))
    public = Public(spec, PublicRandomness(bytes(32)))
    rng = np.random.default_rng(4)
    rows = np.outer(rng.random(60) < 0.3, rng.random(40) < 0.4).ravel()
    update = rng.normal(0, 1, spec.size).astype(np.float32)
    update[:2400][~rows] = 0
    update[2400:] = 0
    bodies, sums = [], []
    for module in (reference, on_device):
        for name in OWN:
            monkeypatch.setattr(kernels, name, getattr(module, name))
        state = compressor.init(spec)
        for _ in range(2):
            seeded = np.random.default_rng(1)
            symbols, state = compressor.compress(update, state, public, seeded)
        body = coding.encode(symbols, compressor.layout(spec))
        total = Accumulator(spec.size, FixedPoint(30, 100.0, 1000))
        decode_add(coding.find(body, compressor.layout(spec)), compressor, public, total, 3)
        bodies.append(body)
        sums.append(total.total.tobytes())
    assert bodies[0] == bodies[1]
    assert sums[0] == sums[1]


def run(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], env=os.environ | variables, capture_output=True, text=True
    )


def test_the_setting_selects_them() -> None:
    code = """
import numpy as np
from fedpress_compression import kernels
assert kernels.CHOSEN == "triton"
assert kernels.largest(np.array([1, -3, 2], "f4"), 2)[0].tolist() == [1, 2]
assert kernels.largest.__module__.endswith("on_device")
assert kernels.peak(np.array([1, -3, 2], "f4")) == 3
"""
    done = run(code, FEDPRESS_KERNELS="triton")
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_they_and_their_benchmarks_are_refused() -> None:
    code = "from fedpress_compression import kernels; kernels.largest"
    done = run(code, FEDPRESS_KERNELS="triton", TRITON_INTERPRET="0")
    assert "needs a GPU that torch can use" in done.stderr
    for name, interpreted in (
        *(("gpu_kernels.py", "0"), ("gpu_kernels.py", "1")),
        ("gpu_hook.py", "0"),
    ):
        own = {"PYTHONPATH": os.pathsep.join([*sys.path, str(ROOT / "benchmarks")])}
        script = str(ROOT / "benchmarks" / name)
        code = f"import runpy; runpy.run_path({script!r}, run_name='__main__')"
        done = run(code, TRITON_INTERPRET=interpreted, **own)
        assert done.returncode
        assert "needs a GPU" in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="the benchmark itself shows it")
def test_every_case_of_the_benchmark_runs() -> None:
    benchmark = runpy.run_path(str(ROOT / "benchmarks" / "gpu_kernels.py"))
    on_device, by_host = (call() for call in benchmark["exchanges"](1000).values())
    assert torch.count_nonzero(on_device) == 10
    assert torch.equal(on_device, by_host)
    cases = benchmark["cases"](100)
    due = {"copy", "largest", "sum and largest", "quantise", "pack"}
    assert due | {"select, quantise, pack", "select, quantise, encode"} < set(cases)
    for call, num_bytes in cases.values():
        call()
        assert num_bytes > 0
