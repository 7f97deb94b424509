"""Coding is lossless, close to the entropy, bounded and total; the golden bytes stay."""

from __future__ import annotations

import hashlib
import json
import math
import runpy
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpress_compression.coding import (
    Alphabet,
    Field,
    Integers,
    Layout,
    Positions,
    Reals,
    Symbols,
    check_symbols,
    decode,
    encode,
    sequences,
)
from fedpress_compression.coding.positions import plan_positions
from fedpress_protocols.errors import ConfigurationError, DecodingError, InvalidUpdate
from tests.compression.coding_vectors import layout_of
from tests.lengths import examples

SCRIPT = Path(__file__).parents[2] / "protocols" / "vectors" / "make_coding_vectors.py"
FOLDER = SCRIPT.parent / "coding"
VECTORS = sorted(path.stem for path in FOLDER.glob("*.json") if path.stem != "malformed")
MALFORMED = json.loads((FOLDER / "malformed.json").read_text())


def load(name: str) -> tuple[Layout, list[Any], bytes]:
    vector = json.loads((FOLDER / f"{name}.json").read_text())
    return layout_of(vector["layout"]), vector["symbols"], bytes.fromhex(vector["body"])


def assert_same(found: Symbols, due: Symbols) -> None:
    for a, b in zip(found, due, strict=True):
        assert a.dtype == b.dtype
        assert a.tobytes() == b.tobytes()


def round_trip(symbols: Symbols, layout: Layout) -> bytes:
    body = encode(symbols, layout)
    assert_same(decode(body, layout), symbols)
    return body


def entropy_bytes(symbols: np.ndarray) -> float:
    """Of order 0, as the symbols are."""
    counts = np.unique(symbols, return_counts=True)[1]
    return float(-(counts * np.log2(counts / symbols.size)).sum()) / 8


# The golden vectors.


@pytest.mark.parametrize("name", VECTORS)
def test_golden_bodies_decode_to_their_symbols_and_encode_to_the_same_bytes(name: str) -> None:
    layout, listed, body = load(name)
    symbols = decode(body, layout)
    for array, due in zip(symbols, listed, strict=True):
        if isinstance(due, dict):
            assert array.size == due["num"]
            assert hashlib.sha256(array.tobytes()).hexdigest() == due["sha256"]
        else:
            assert array.tolist() == due
    assert encode(symbols, layout) == body


def test_the_script_writes_the_golden_vectors_that_are_here(tmp_path: Path) -> None:
    runpy.run_path(str(SCRIPT))["main"](tmp_path)
    written = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert written == {path.name: path.read_text() for path in FOLDER.iterdir()}


def test_the_golden_vectors_have_every_mode() -> None:
    positions, alphabets = set(), set()
    for name in VECTORS:
        layout, _, body = load(name)
        if len(layout) == 1 and isinstance(layout[0], Positions):
            positions.add((body[0] & 3, bool(body[0] & 4)))
        if len(layout) == 1 and isinstance(layout[0], Alphabet) and body:
            alphabets.add(body[0] & 7)
    assert {mode for mode, _ in positions} == {0, 1, 2}
    assert {absent for _, absent in positions} == {False, True}
    assert alphabets == {0, 1, 2, 3, 6}


# Round trips.


@st.composite
def filled_fields(draw: st.DrawFn, num_positions: int) -> tuple[Field, np.ndarray]:
    kind = draw(st.sampled_from(["positions", "alphabet", "tied", "reals"]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    if kind == "positions":
        size = draw(st.one_of(st.integers(0, 50), st.integers(0, 30_000)))
        share = draw(st.sampled_from([0, 0.001, 0.02, 0.4, 0.6, 0.99, 1]))
        density = share ** (1 + 2 * (np.arange(size) // 100 % 2)) if draw(st.booleans()) else share
        chosen = np.flatnonzero(rng.random(size) < density)
        slack = draw(st.integers(0, 3))
        return Positions(size, chosen.size + slack), chosen
    if kind in ("alphabet", "tied"):
        size = draw(st.sampled_from([1, 2, 3, 4, 5, 6, 7, 15, 16, 17, 33, 100, 255, 256]))
        num = draw(st.one_of(st.integers(0, 40), st.integers(0, 20_000)))
        num = num_positions if kind == "tied" else num
        skew = draw(st.sampled_from([0.0, 0.5, 3.0, 30.0]))
        order = rng.permutation(size) if draw(st.booleans()) else np.arange(size)
        weights = np.exp(-skew * np.arange(size) / size * 8)[order]
        symbols = rng.choice(size, num, p=weights / weights.sum()).astype(np.uint8)
        return Alphabet(size, None if kind == "tied" else num), symbols
    width = draw(st.sampled_from([2, 4]))
    count = draw(st.integers(0, 20))
    return Reals(count, width), rng.normal(size=count).astype(f"<f{width}")


@st.composite
def filled_layouts(draw: st.DrawFn) -> tuple[Layout, Symbols]:
    layout: list[Field] = []
    symbols: list[np.ndarray] = []
    num_positions = 0
    for _ in range(draw(st.integers(0, 4))):
        field, array = draw(filled_fields(num_positions))
        if isinstance(field, Positions):
            num_positions = array.size
        layout.append(field)
        symbols.append(array)
    return tuple(layout), tuple(symbols)


@settings(max_examples=examples(60, 300))
@given(filled_layouts())
def test_what_is_encoded_comes_back(filled: tuple[Layout, Symbols]) -> None:
    layout, symbols = filled
    body = round_trip(symbols, layout)
    assert encode(symbols, layout) == body
    with pytest.raises(DecodingError, match="after the last field"):
        decode(body + b"\0", layout)
    if body:
        with pytest.raises(DecodingError):
            decode(body[:-1], layout)


@given(st.sets(st.integers(0, 2**32 - 1), max_size=40))
def test_positions_of_32_bits_come_back(chosen: set[int]) -> None:
    round_trip((np.array(sorted(chosen), np.int64),), (Positions(2**32, 40),))


@pytest.mark.parametrize("size", [1, 2, 3, 256])
@pytest.mark.parametrize("num", [1, 2, 3, 2048, 2049, 8191, 8192, 8193, 8195])
def test_lengths_about_the_borders_of_blocks_come_back(size: int, num: int) -> None:
    rng = np.random.default_rng(num)
    symbols = (rng.geometric(0.2, num) % size).astype(np.uint8)
    gaps = rng.geometric(0.02, num) * (1 + 9 * (np.arange(num) // 64 % 2))
    layout = (Positions(2**24, num), Alphabet(size), Alphabet(size, num))
    round_trip((np.cumsum(gaps), symbols, symbols[::-1].copy()), layout)


@pytest.mark.parametrize("constant", [slice(0, 2), slice(3, 9), slice(17, 19)])
def test_blocks_of_one_symbol_take_no_bits_beside_others(constant: slice) -> None:
    rows = np.minimum(np.random.default_rng(8).geometric(0.1, (19, 8192)), 40).astype(np.uint8)
    rows[constant] = 99
    layout = (Alphabet(100, rows.size),)
    body = round_trip((rows.ravel(),), layout)
    varied = np.delete(rows, constant, axis=0).ravel()
    assert len(body) < 80 + len(encode((varied,), (Alphabet(100, varied.size),)))


# Sizes. Each prints what it measured: pytest -s.


def test_a_random_support_takes_at_most_1_percent_more_than_its_entropy() -> None:
    size, num = 10**6, 10**4
    chosen = np.sort(np.random.default_rng(0).choice(size, num, replace=False))
    body = round_trip((chosen,), (Positions(size, num),))
    log_choose = math.lgamma(size + 1) - math.lgamma(num + 1) - math.lgamma(size - num + 1)
    ratio = 8 * len(body) / (log_choose / math.log(2))
    print(f"\n{num} of {size} coordinates: {ratio:.4f} x log2 C(d, k)")
    assert ratio <= 1.01


@pytest.mark.parametrize("zeros", [0.34, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.97, 0.99, 0.999])
def test_ternary_symbols_take_at_most_2_5_percent_more_than_their_entropy(zeros: float) -> None:
    drawn = np.random.default_rng(1).random(10**6)
    symbols = np.where(drawn < zeros, 1, np.where(drawn < (1 + zeros) / 2, 0, 2)).astype(np.uint8)
    body = round_trip((symbols,), (Alphabet(3, symbols.size),))
    ratio = len(body) / entropy_bytes(symbols)
    print(f"\nternary, {zeros} zero: {ratio:.4f} x H0")
    assert ratio <= 1.025


@pytest.mark.parametrize("deviation", [0.7, 1, 1.5, 2.5, 4])
def test_4_bit_symbols_take_at_most_2_5_percent_more_than_their_entropy(deviation: float) -> None:
    drawn = np.random.default_rng(2).normal(0, deviation, 10**6)
    symbols = (np.clip(np.rint(drawn), -7, 7) + 7).astype(np.uint8)
    body = round_trip((symbols,), (Alphabet(15, symbols.size),))
    ratio = len(body) / entropy_bytes(symbols)
    print(f"\n4-bit, deviation {deviation} levels: {ratio:.4f} x H0")
    assert ratio <= 1.025


def test_symbols_without_structure_take_a_byte_more_than_stored() -> None:
    rng = np.random.default_rng(3)
    for size, stored in ((2, 1250), (3, 2000), (4, 2500), (5, 3334), (7, 3750), (256, 10_000)):
        body = round_trip(
            (rng.integers(0, size, 10_000).astype(np.uint8),), (Alphabet(size, 10_000),)
        )
        assert len(body) <= 1 + stored


def test_blocks_of_unlike_statistics_get_tables_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = np.random.default_rng(4)
    scales = np.repeat([2.0, 40.0, 2.0, 40.0], 8192)
    symbols = (np.clip(np.rint(rng.normal(0, scales)), -127, 127) + 127).astype(np.uint8)
    layout = (Alphabet(255, symbols.size),)
    several = encode((symbols,), layout)
    monkeypatch.setattr(sequences, "MAX_TABLES", 1)
    assert len(several) < 0.97 * len(encode((symbols,), layout))


# What is refused.


@pytest.mark.parametrize("case", MALFORMED, ids=lambda case: case["reason"])
def test_malformed_bodies_are_refused(case: dict[str, Any]) -> None:
    with pytest.raises(DecodingError):
        decode(bytes.fromhex(case["body"]), layout_of(case["layout"]))


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("more coordinates than at_most", r"field 0 \(positions\): 5 coordinates outside \[0, 4\]"),
        ("a stored symbol of 7 in 7", r"field 0 \(alphabet\): symbol 7 outside \[0, 7\)"),
        ("a stream of 3073 bytes", "a stream of 3073 bytes, at most 3072"),
        ("a block under table 1 of 1", "a block under table 1 of 1"),
        ("a Kraft sum of 5/4", "Kraft sum exceeds 1"),
        ("raw bits shorter than their length", "257 bytes of raw bits, but 258 are declared"),
        ("infinity", r"field 0 \(reals\): NaN or infinity"),
        ("the body ends within reals", "48 bits left, expected 64 more"),
    ],
)
def test_an_error_says_what_was_found_and_what_was_due(reason: str, said: str) -> None:
    [case] = [case for case in MALFORMED if case["reason"] == reason]
    with pytest.raises(DecodingError, match=said):
        decode(bytes.fromhex(case["body"]), layout_of(case["layout"]))


@pytest.mark.parametrize("name", VECTORS)
def test_no_beginning_of_a_body_is_a_body(name: str) -> None:
    layout, _, body = load(name)
    for end in {*range(min(len(body), 40)), *range(0, len(body), 1 + len(body) // 40)}:
        with pytest.raises(DecodingError):
            decode(body[:end], layout)


def test_damage_in_many_streams_is_refused_or_another_update() -> None:
    rng = np.random.default_rng(5)
    symbols = (np.clip(np.rint(rng.normal(0, 9, 140_000)), -60, 60) + 60).astype(np.uint8)
    layout = (Alphabet(121, symbols.size),)
    body = encode((symbols,), layout)
    refused = 0
    for at in rng.integers(0, len(body) - 64, 20).tolist():
        changed = body[:at] + rng.bytes(64) + body[at + 64 :]
        try:
            check_symbols(decode(changed, layout), layout)
        except DecodingError:
            refused += 1
    assert refused >= 10


@pytest.mark.parametrize(
    ("symbols", "field"),
    [
        (np.array([3, 2], np.int64), Positions(10, 4)),
        (np.array([3, 10], np.int64), Positions(10, 4)),
        (np.array([-1], np.int64), Positions(10, 4)),
        (np.arange(5, dtype=np.int64), Positions(10, 4)),
        (np.array([1], np.int32), Positions(10, 4)),
        (np.array([5], np.uint8), Alphabet(5, 1)),
        (np.array([1], np.uint8), Alphabet(5, 2)),
        (np.array([1], np.uint8), Alphabet(5)),
        (np.array([1], np.int64), Alphabet(5, 1)),
        (np.array([3], np.int32), Integers(2, 1)),
        (np.array([-(2**31)], np.int32), Integers(2**31 - 1, 1)),
        (np.array([1], np.int64), Integers(5, 1)),
        (np.array([1], np.int32), Integers(5, 2)),
        (np.array([1], np.int32), Integers(5)),
        (np.array([np.nan], "<f4"), Reals(1)),
        (np.array([np.inf], "<f2"), Reals(1, 2)),
        (np.array([1.0], "<f8"), Reals(1)),
        (np.array([1.0], "<f4"), Reals(2)),
    ],
)
def test_symbols_that_do_not_fill_the_layout_are_not_encoded(
    symbols: np.ndarray, field: Field
) -> None:
    with pytest.raises(InvalidUpdate):
        encode((symbols,), (field,))


def test_a_field_too_many_is_not_encoded() -> None:
    with pytest.raises(InvalidUpdate, match="1 fields, expected 0"):
        encode((np.zeros(0, np.uint8),), ())


@pytest.mark.parametrize(
    "field",
    [
        Positions(2**32 + 1, 1),
        Positions(-1, 1),
        Positions(1, -1),
        Alphabet(0, 1),
        Alphabet(257, 1),
        Alphabet(2, -1),
        Reals(-1),
        Reals(1, 8),
    ],
)
def test_layouts_that_no_body_can_carry_are_refused(field: Field) -> None:
    with pytest.raises(ConfigurationError, match="field 0 of a layout cannot be coded"):
        decode(b"", (field,))


# Bounds.


def peak_bytes(body: bytes, layout: Layout) -> int:
    tracemalloc.start()
    try:
        decode(body, layout)
    except DecodingError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak


@pytest.mark.parametrize(
    "body",
    [
        "00 80ade204",  # ten million stored coordinates
        "01 80ade204 ffffffffffffffffffffffffffffffff",
        "02 80ade204 01 00000000000000000000000000000000",
        "29 80ade204",
        "2a ffffffff0f",
    ],
)
def test_a_short_body_does_not_make_much_of_a_sparse_layout(body: str) -> None:
    layout = (Positions(2 * 10**7, 10**7), Alphabet(256))
    assert peak_bytes(bytes.fromhex(body), layout) < 50_000


def test_memory_is_a_small_multiple_of_what_the_layout_admits() -> None:
    rng = np.random.default_rng(6)
    num = 10**6
    sparse = np.sort(rng.choice(num, num // 20, replace=False))
    bodies: list[tuple[Field, np.ndarray]] = [
        (Alphabet(256, num), rng.integers(0, 200, num).astype(np.uint8)),
        (Alphabet(16, num), np.minimum(rng.geometric(0.3, num), 15).astype(np.uint8)),
        (Alphabet(3, num), (rng.random(num) < 0.3).astype(np.uint8)),
        (Alphabet(7, num), rng.integers(0, 7, num).astype(np.uint8)),
        (Positions(num, num // 20), sparse),
        (Positions(num, num), np.setdiff1d(np.arange(num), sparse)),
    ]
    for field, symbols in bodies:
        body = encode((symbols,), (field,))
        admitted = symbols.nbytes + (field.size if isinstance(field, Positions) else 0)
        assert peak_bytes(body, (field,)) < 2**20 + 30 * admitted, field
        junk = bytes(rng.integers(0, 256, 1000, np.uint8))
        assert peak_bytes(body[:8] + junk, (field,)) < 2**20 + 30 * admitted, field


@pytest.mark.parametrize("clustered", [0.0, 0.3, 0.5, 0.55, 0.7, 0.95])
@pytest.mark.parametrize("share", [0.02, 0.25, 0.5])
def test_what_cannot_be_short_enough_is_left_out_and_nothing_else(
    clustered: float, share: float
) -> None:
    rng = np.random.default_rng(7)
    flags = rng.random(60_000) < share
    stays = rng.random(flags.size) < clustered
    for at in np.flatnonzero(stays[1:]).tolist():
        flags[at + 1] = flags[at]
    where = np.flatnonzero(flags).astype(np.int64)
    shortest = plan_positions(where, flags.size)
    for below in (1, shortest.size, shortest.size + 1, 10**6):
        found = plan_positions(where, flags.size, below)
        assert found.size >= min(below, shortest.size)
        if shortest.size < below:
            assert found.write() == shortest.write()
