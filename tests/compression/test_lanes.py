"""Interleaved lanes: lossless, the same bytes in every kernel, near one lane's size, bounded."""

from __future__ import annotations

import runpy
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from fedpress_compression import kernels
from fedpress_compression.coding import (
    Alphabet,
    Field,
    Grid,
    Integers,
    Layout,
    Positions,
    Symbols,
    check_symbols,
    decode,
    encode,
    laned,
)
from fedpress_compression.kernels import lanes_reference
from fedpress_protocols.errors import DecodingError
from tests.compression import coding_vectors
from tests.protocols import spec_reader

SCRIPT = coding_vectors.FOLDER / "make_lanes_vectors.py"
VECTORS = coding_vectors.names("lanes")
MALFORMED = coding_vectors.vector("lanes", "malformed")
CALLS = ("encode_lanes", "decode_lanes")
Generator = np.random.Generator


def compiled() -> ModuleType:
    return pytest.importorskip(
        "fedpress_compression.kernels.lanes_compiled", reason="compiled by fedpress[fast]"
    )


def use(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    for call in CALLS:
        monkeypatch.setattr(kernels, call, getattr(module, call))


@pytest.fixture(params=["numpy", "numba"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    use(lanes_reference if request.param == "numpy" else compiled(), monkeypatch)


# Golden vectors.


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("name", VECTORS)
def test_golden_bodies_decode_to_their_symbols_and_encode_to_the_same_bytes(name: str) -> None:
    vector = coding_vectors.vector("lanes", name)
    layout, body = coding_vectors.layout_of(vector["layout"]), bytes.fromhex(vector["body"])
    symbols = decode(body, layout)
    assert [array.tolist() for array in symbols] == vector["symbols"]
    assert encode(symbols, layout) == body


@pytest.mark.parametrize("name", VECTORS)
def test_the_text_is_enough_to_read_every_vector(name: str) -> None:
    vector = coding_vectors.vector("lanes", name)
    assert spec_reader.read(bytes.fromhex(vector["body"]), vector["layout"]) == vector["symbols"]


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("case", MALFORMED, ids=lambda case: case["reason"])
def test_malformed_bodies_are_refused(case: dict[str, Any]) -> None:
    with pytest.raises(DecodingError):
        decode(bytes.fromhex(case["body"]), coding_vectors.layout_of(case["layout"]))


@pytest.mark.parametrize("case", MALFORMED, ids=lambda case: case["reason"])
def test_the_text_refuses_every_malformed_body(case: dict[str, Any]) -> None:
    with pytest.raises(spec_reader.Refused):
        spec_reader.read(bytes.fromhex(case["body"]), case["layout"])


def test_the_script_writes_the_golden_vectors_that_are_here(tmp_path: Path) -> None:
    runpy.run_path(str(SCRIPT))["main"](tmp_path)
    written = {path.name: path.read_text() for path in tmp_path.iterdir()}
    folder = coding_vectors.FOLDER / "lanes"
    assert written == {path.name: path.read_text() for path in folder.iterdir()}


def test_the_golden_vectors_have_every_mode() -> None:
    heads: dict[str, set[int]] = {"positions": set(), "alphabet": set(), "integers": set()}
    for name in VECTORS:
        kind = name.partition("-")[0]
        if kind in heads:
            heads[kind].add(int(coding_vectors.vector("lanes", name)["body"][:2], 16))
    assert heads["positions"] >= {0x0B, 0x0F}
    assert heads["alphabet"] >= {0x14, 0x1C, 0x15}
    assert heads["integers"] >= {0x0B, 0x0C}


# Round trips, and the kernels against each other.


def filled(rng: Generator) -> tuple[Layout, Symbols]:
    """Every kind of field, dense and at positions, of any size and skew, in rows and columns that
    differ enough for lanes to be the shortest form."""
    matrices = tuple(
        (int(rng.choice([0, 1, 2, 20])), int(rng.choice([1, 30, 200])))
        for _ in range(rng.integers(1, 4))
    )
    size = sum(height * width for height, width in matrices)
    grid = Grid(tuple(map(str, range(len(matrices)))), matrices)
    share = float(rng.choice([0, 0.01, 0.3, 1]))
    dense = np.concatenate(
        [np.outer(rng.random(h) < 0.4, rng.random(w) < 0.4).ravel() for h, w in matrices]
    )
    where = np.flatnonzero(rng.random(size) < np.where(dense, share, share / 50))
    few, many = (int(rng.choice([1, 2, 3, 4, 5, 16, 255, 256])) for _ in range(2))
    bound = int(rng.choice([1, 2, 100, 2**31 - 1]))
    spread = float(rng.choice([0.2, 3, 40]))

    def symbols(of: int, num: int) -> np.ndarray:
        middle = of * (1 + np.sin(np.arange(num) / 50)) / 2
        return np.clip(np.rint(rng.normal(middle, spread)), 0, of - 1).astype(np.uint8)

    def integers(num: int) -> np.ndarray:
        drawn = np.rint(rng.standard_cauchy(num) * spread * float(rng.choice([0.1, 1, 1e5])))
        return np.clip(drawn, -bound, bound).astype(np.int32)

    layout: tuple[Field, ...] = (
        Positions(size, size, "lanes", grid),
        Alphabet(few, None, "lanes"),
        Integers(bound, None, "lanes"),
        Alphabet(many, size, "lanes", grid),
        Integers(bound, size, "lanes", grid),
        Alphabet(many, 7, "lanes"),
    )
    arrays = (
        *(where, symbols(few, where.size), integers(where.size), symbols(many, size)),
        *(integers(size), symbols(many, 7)),
    )
    return layout, arrays


@pytest.mark.slow(short=True)
def test_what_is_encoded_comes_back_and_all_kernels_write_the_same(
    monkeypatch: pytest.MonkeyPatch, slow: bool
) -> None:
    modules = [lanes_reference]
    if find_spec("numba") is not None:
        modules.append(compiled())
    for seed in range(40 if slow else 6):
        layout, symbols = filled(np.random.default_rng(seed))
        bodies = set()
        for module in modules:
            use(module, monkeypatch)
            bodies.add(body := encode(symbols, layout))
            found = decode(body, layout)
            assert [a.tolist() for a in found] == [a.tolist() for a in symbols]
            assert [a.dtype for a in found] == [a.dtype for a in symbols]
            with pytest.raises(DecodingError):
                decode(body[:-1], layout)
            with pytest.raises(DecodingError):
                decode(body + b"\0", layout)
        assert len(bodies) == 1, seed


def test_the_second_decoder_reads_what_is_encoded() -> None:
    as_json = runpy.run_path(str(SCRIPT))["as_json"]
    for seed in range(4):
        layout, symbols = filled(np.random.default_rng([seed, 1]))
        found = spec_reader.read(encode(symbols, layout), as_json(layout))
        assert found == [array.tolist() for array in symbols]


@pytest.mark.parametrize("num_lanes", [1, 2, 32, 64, 256])
def test_any_number_of_lanes_comes_back_in_every_kernel(num_lanes: int) -> None:
    """Lanes of unequal length, groups that are full and that are not, symbols without a choice."""
    modules = [lanes_reference]
    if find_spec("numba") is not None:
        modules.append(compiled())
    rng = np.random.default_rng(num_lanes)
    tables = np.array([[4096, 0, 0], [1, 4094, 1], [1000, 1000, 2096]], np.uint16)
    memory, num = np.array([0, 1, 2], np.uint8), 1001
    starts = set((np.arange(num_lanes) * num // num_lanes).tolist())
    symbols, contexts, last = [], [], 0
    for at in range(num):
        context = memory[0 if at in starts else last]
        last = int(rng.choice(3, p=tables[context] / 4096))
        contexts.append(int(context))
        symbols.append(last)
    drawn, rows = np.array(symbols, np.uint8), np.array(contexts, np.uint8)
    found = [module.encode_lanes(drawn, rows, tables, num_lanes) for module in modules]
    for num_words, stream in found:
        assert num_words.tolist() == found[0][0].tolist()
        assert stream.tobytes() == found[0][1].tobytes()
        octets = np.concatenate([np.zeros(3, np.uint8), stream, np.zeros(8, np.uint8)])
        zeros = np.zeros(num, np.uint8)
        for module in modules:
            back = module.decode_lanes(octets, 3, num_words, zeros, memory, tables, num_lanes)
            assert back.tolist() == symbols


# Sizes. Each prints what it measured: pytest -s.


def clustered(rng: Generator, height: int, width: int, share: float) -> np.ndarray:
    """A matrix some of whose rows and columns are far denser than others."""
    rows, columns = rng.gamma(0.3, 1, height), rng.gamma(0.3, 1, width)
    density = np.outer(rows, columns)
    return rng.random((height, width)) < np.minimum(1, share * density / density.mean())


def test_a_support_that_clusters_in_rows_and_columns_takes_a_sixth_less() -> None:
    matrix = clustered(np.random.default_rng(0), 600, 500, 0.02)
    where, size = np.flatnonzero(matrix), matrix.size
    grid = Grid(("a",), ((600, 500),))
    static = len(encode((where,), (Positions(size, size),)))
    lanes = len(encode((where,), (Positions(size, size, "lanes", grid),)))
    ranged = len(encode((where,), (Positions(size, size, "range", grid),)))
    print(f"\n{where.size} of {size}: static {static} bytes, lanes {lanes}, range {ranged}")
    assert lanes < 0.83 * static
    assert lanes < 1.08 * ranged


def test_lanes_take_at_most_a_percent_more_than_one_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = clustered(np.random.default_rng(2), 1000, 800, 0.05)
    where, size = np.flatnonzero(matrix), matrix.size
    layout = (Positions(size, size, "lanes", Grid(("a",), ((1000, 800),))),)
    many = len(encode((where,), layout))
    monkeypatch.setattr(laned, "_MOST_LANES", 1)
    one = len(encode((where,), layout))
    print(f"\none lane {one} bytes, many {many}: {100 * (many / one - 1):.2f} % more")
    assert one < many < 1.01 * one


def test_a_random_support_takes_no_more_than_static_codes() -> None:
    size, num = 10**5, 2000
    where = np.sort(np.random.default_rng(0).choice(size, num, replace=False))
    static = len(encode((where,), (Positions(size, num),)))
    assert len(encode((where,), (Positions(size, num, "lanes"),))) <= static


# What is refused.


@pytest.mark.slow(short=True)
def test_both_decoders_refuse_and_read_the_same_damaged_bodies(slow: bool) -> None:
    rng = np.random.default_rng(0)
    as_json = runpy.run_path(str(SCRIPT))["as_json"]
    drawn = [filled(np.random.default_rng([seed, 2])) for seed in range(4)]
    bodies = [encode(symbols, layout) for layout, symbols in drawn]
    for case in range(80 if slow else 16):
        (layout, _), body = drawn[case % 4], bytearray(bodies[case % 4])
        for bit in rng.integers(0, 8 * len(body), 2).tolist():
            body[bit >> 3] ^= 1 << (bit & 7)
        try:
            due = spec_reader.read(bytes(body), as_json(layout))
        except spec_reader.Refused:
            with pytest.raises(DecodingError):
                decode(bytes(body), layout)
            continue
        assert [array.tolist() for array in decode(bytes(body), layout)] == due


@pytest.mark.slow(short=True)
@pytest.mark.usefixtures("kernel")
def test_damaged_bodies_are_refused_or_are_updates(slow: bool) -> None:
    drawn = [filled(np.random.default_rng([seed, 3])) for seed in range(6)]
    bodies = [encode(symbols, layout) for layout, symbols in drawn]
    rng = np.random.default_rng(3)
    for case in range(300 if slow else 60):
        layout, body = drawn[case % 6][0], bytearray(bodies[case % 6])
        match case % 5:
            case 0:
                del body[int(rng.integers(0, len(body))) :]
            case 1:
                body[int(rng.integers(0, len(body))) :] = rng.bytes(20)
            case 2:
                at = int(rng.integers(0, len(body)))
                body[at : at + 1] = rng.bytes(1)
            case 3:
                body[int(rng.integers(0, min(40, len(body))))] ^= 1 << int(rng.integers(0, 8))
            case _:
                body = bytearray((0x0B, int(rng.integers(1, 9)), 0)) + rng.bytes(200)
        try:
            found = decode(bytes(body), layout)
        except DecodingError:
            continue
        check_symbols(found, layout)
