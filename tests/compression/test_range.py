"""The range coder: lossless, the same bytes in every kernel, well below static codes, bounded."""

from __future__ import annotations

import hashlib
import runpy
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from fedpress_compression import kernels
from fedpress_compression.coding import (
    Alphabet,
    Coder,
    Contexts,
    Field,
    Grid,
    Integers,
    Known,
    Layout,
    Positions,
    Reals,
    Symbols,
    check_symbols,
    decode,
    encode,
)
from fedpress_compression.compressor import Public
from fedpress_compression.compressors.coded import Coded
from fedpress_compression.compressors.error_feedback import ErrorFeedback
from fedpress_compression.compressors.none import Uncompressed
from fedpress_compression.compressors.per_tensor import PerTensor
from fedpress_compression.compressors.stc import SparseTernary
from fedpress_compression.compressors.topk import TopK
from fedpress_compression.contexts import contexts_of
from fedpress_compression.kernels import range_model, range_reference
from fedpress_compression.randomness import PublicRandomness
from fedpress_compression.tensors import ModelSpec, TensorSpec, Vector
from fedpress_protocols.errors import ConfigurationError, DecodingError
from fedpress_protocols.upload import Upload, max_body_bytes
from tests.compression import coding_vectors
from tests.protocols import spec_reader

SCRIPT = coding_vectors.FOLDER / "make_range_vectors.py"
VECTORS = coding_vectors.names("range")
MALFORMED = coding_vectors.vector("range", "malformed")
CALLS = ("encode_flags", "decode_flags", "encode_values", "decode_values")
Generator = np.random.Generator


def compiled() -> ModuleType:
    return pytest.importorskip(
        "fedpress_compression.kernels.range_compiled", reason="compiled by fedpress[fast]"
    )


@pytest.fixture(params=["numpy", "numba"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    module = range_reference if request.param == "numpy" else compiled()
    for call in CALLS:
        monkeypatch.setattr(kernels, call, getattr(module, call))


# Golden vectors.


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("name", VECTORS)
def test_golden_bodies_decode_to_their_symbols_and_encode_to_the_same_bytes(name: str) -> None:
    vector = coding_vectors.vector("range", name)
    layout, body = coding_vectors.layout_of(vector["layout"]), bytes.fromhex(vector["body"])
    contexts = coding_vectors.contexts_of(vector["contexts"])
    symbols = decode(body, layout, contexts)
    assert [array.tolist() for array in symbols] == vector["symbols"]
    assert encode(symbols, layout, contexts) == body


@pytest.mark.parametrize("name", VECTORS)
def test_the_text_is_enough_to_read_every_vector(name: str) -> None:
    vector = coding_vectors.vector("range", name)
    body = bytes.fromhex(vector["body"])
    found = spec_reader.read(body, vector["layout"], vector["contexts"])
    assert found == vector["symbols"]


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
    folder = coding_vectors.FOLDER / "range"
    assert written == {path.name: path.read_text() for path in folder.iterdir()}


def test_the_golden_vectors_have_every_mode() -> None:
    heads: dict[str, set[int]] = {"positions": set(), "alphabet": set(), "integers": set()}
    for name in VECTORS:
        kind = name.partition("-")[0]
        if kind in heads:
            heads[kind].add(int(coding_vectors.vector("range", name)["body"][:2], 16))
    assert heads["positions"] >= {0x03, 0x07}
    assert heads["alphabet"] >= {0x04, 0x0C, 0x05, 0x0D}
    assert heads["integers"] >= {0x03, 0x04}


def test_compiled_kernels_are_kept_for_this_model_alone() -> None:
    """numba keeps what it compiled for as long as the kernel's own file stays as it is."""
    text = Path(range_model.__file__).read_bytes()
    digest = hashlib.sha256(text).hexdigest()
    assert digest[:16] == compiled().MODEL, "write it there, or old kernels live on in caches"


# Round trips, and the two kernels against each other.


def planes(rng: Generator) -> tuple[Grid | None, int, Contexts]:
    """A grid of a few matrices, some of them empty, or none; its size; contexts or none."""
    matrices = tuple(
        (int(rng.integers(0, 12)), int(rng.integers(0, 25))) for _ in range(rng.integers(1, 5))
    )
    size = sum(height * width for height, width in matrices)
    known: Known | None = "previous" if rng.random() < 0.5 else None
    grid = Grid(tuple(map(str, range(len(matrices)))), matrices, known)
    if rng.random() < 0.2:
        return None, size, (None,)
    return grid, size, (rng.integers(0, 43, size).astype(np.uint8) if known else None,)


def filled(rng: Generator) -> tuple[Layout, Symbols, Contexts]:
    """Every kind of field, dense and at positions, of any size and skew."""
    grid, size, (known,) = planes(rng)
    share = float(rng.choice([0, 0.01, 0.1, 0.4, 0.6, 1]))
    where = np.flatnonzero(rng.random(size) < share * (rng.random(size) > 0.2))
    few, many = (int(rng.choice([1, 2, 3, 4, 5, 16, 255, 256])) for _ in range(2))
    bound = int(rng.choice([1, 2, 100, 2**31 - 1]))
    spread = float(rng.choice([0.2, 3, 40]))
    coder: Coder = "range" if rng.random() < 0.5 else "auto"

    def symbols(of: int, num: int) -> np.ndarray:
        drawn = np.rint(rng.normal(of // 2, spread, num))
        return np.clip(drawn, 0, of - 1).astype(np.uint8)

    def integers(num: int) -> np.ndarray:
        drawn = np.rint(rng.standard_cauchy(num) * spread * float(rng.choice([0.1, 1, 1e5])))
        return np.clip(drawn, -bound, bound).astype(np.int32)

    layout: tuple[Field, ...] = (
        Positions(size, size, coder, grid),
        Alphabet(few, None, coder),
        Integers(bound, None, coder),
        Alphabet(many, size, coder, grid),
        Integers(bound, size, coder, grid),
        Reals(2),
        Alphabet(many, 7, coder),
    )
    arrays = (
        *(where, symbols(few, where.size), integers(where.size), symbols(many, size)),
        *(integers(size), np.array([0.5, -2], "<f4"), symbols(many, 7)),
    )
    return layout, arrays, (known, None, None, known, known, None, None)


@pytest.mark.slow(short=True)
def test_what_is_encoded_comes_back_and_all_kernels_write_the_same(
    monkeypatch: pytest.MonkeyPatch, slow: bool
) -> None:
    modules = [range_reference]
    if find_spec("numba") is not None:
        modules.append(compiled())
    for seed in range(40 if slow else 12):
        layout, symbols, contexts = filled(np.random.default_rng(seed))
        bodies = set()
        for module in modules:
            for call in CALLS:
                monkeypatch.setattr(kernels, call, getattr(module, call))
            bodies.add(body := encode(symbols, layout, contexts))
            found = decode(body, layout, contexts)
            assert [a.tolist() for a in found] == [a.tolist() for a in symbols]
            assert [a.dtype for a in found] == [a.dtype for a in symbols]
            with pytest.raises(DecodingError):
                decode(body[:-1], layout, contexts)
            with pytest.raises(DecodingError):
                decode(body + b"\0", layout, contexts)
        assert len(bodies) == 1, seed


def test_the_second_decoder_reads_what_is_encoded() -> None:
    script = runpy.run_path(str(SCRIPT))
    for seed in range(12):
        layout, symbols, contexts = filled(np.random.default_rng([seed, 1]))
        body = encode(symbols, layout, contexts)
        listed = [None if known is None else known.tolist() for known in contexts]
        found = spec_reader.read(body, script["as_json"](layout), listed)
        assert found == [array.tolist() for array in symbols]


def test_a_carry_goes_through_bytes_of_255() -> None:
    rng = np.random.default_rng(0)
    chances = np.where(rng.random(200_000) < 0.9, 32768, 65532).tolist()
    bits = rng.integers(0, 2, 200_000).tolist()
    coder = range_reference._Encoder(10**6)
    for chance, bit in zip(chances, bits, strict=True):
        coder.bit(chance, bit)
    body = coder.finish()
    assert body is not None
    octets = np.frombuffer(body, np.uint8)
    decoder = range_reference._Decoder(octets, 0, octets.size)
    assert [decoder.bit(chance, 0) for chance in chances] == bits
    assert decoder.finish() == octets.size


def test_compiled_carries_go_through_bytes_of_255() -> None:
    module = compiled()
    rng = np.random.default_rng(0)
    magnitudes = rng.integers(0, 2**31, 60_000)
    plane = np.array([[1, magnitudes.size]], np.int64), np.zeros(0, np.uint8)
    where, signs = np.arange(magnitudes.size), np.zeros(magnitudes.size, np.uint8)
    body = module.encode_values(magnitudes, signs, 0, 2**31 - 1, where, *plane, 10**6)
    octets = np.frombuffer(body, np.uint8).copy()
    found, _, end = module.decode_values(octets, 0, len(body), 0, 2**31 - 1, where, *plane)
    assert end == len(body)
    assert (found == magnitudes).all()


# Sizes. Each prints what it measured: pytest -s.


def clustered(rng: Generator, height: int, width: int, share: float) -> np.ndarray:
    """A matrix some of whose rows and columns are far denser than others."""
    rows, columns = rng.gamma(0.3, 1, height), rng.gamma(0.3, 1, width)
    density = np.outer(rows, columns)
    return rng.random((height, width)) < np.minimum(1, share * density / density.mean())


def test_a_support_that_clusters_in_rows_and_columns_takes_a_sixth_less() -> None:
    matrix = clustered(np.random.default_rng(0), 300, 200, 0.02)
    where, size = np.flatnonzero(matrix), matrix.size
    grid = Grid(("a",), ((300, 200),))
    static = len(encode((where,), (Positions(size, size),)))
    ranged = len(encode((where,), (Positions(size, size, "range", grid),)))
    print(f"\n{where.size} of {size}: static {static} bytes, range {ranged}")
    assert ranged < 0.83 * static


def test_a_random_support_takes_at_most_3_percent_more_than_static_codes() -> None:
    size, num = 10**5, 2000
    where = np.sort(np.random.default_rng(0).choice(size, num, replace=False))
    static = len(encode((where,), (Positions(size, num),)))
    ranged = len(encode((where,), (Positions(size, num, "range"),)))
    auto = len(encode((where,), (Positions(size, num, "auto"),)))
    print(f"\n{num} of {size}: static {static} bytes, range {ranged}")
    assert ranged <= 1.03 * static
    assert auto == min(static, ranged)


def test_signs_that_follow_rows_and_columns_take_less_than_two_thirds_of_a_bit() -> None:
    rng = np.random.default_rng(1)
    matrix = clustered(rng, 300, 200, 0.03)
    signs = np.multiply.outer(rng.normal(0, 1, 300), np.abs(rng.normal(0, 1, 200)))
    signs += rng.normal(0, 0.1, signs.shape)
    where = np.flatnonzero(matrix)
    symbols = (where, (signs.ravel()[where] < 0).astype(np.uint8))
    layout = (Positions(matrix.size, matrix.size, "range", Grid(("a",), ((300, 200),))),)
    both = len(encode(symbols, (*layout, Alphabet(2, None, "range"))))
    bits = 8 * (both - len(encode(symbols[:1], layout))) / where.size
    print(f"\n{bits:.3f} bits a sign")
    assert bits < 0.66


def test_contexts_that_tell_where_take_a_third_off_positions() -> None:
    rng = np.random.default_rng(2)
    size = 40_000
    public_vector = rng.standard_t(2, size).astype(np.float32)
    hidden = np.abs(public_vector + rng.standard_t(2, size))
    where = np.sort(np.argsort(hidden)[-400:])
    spec = ModelSpec((TensorSpec("a", (200, 200)),))
    public = Public(spec, PublicRandomness(bytes(32)), knowledge={"previous": public_vector})
    sizes = {}
    for contexts in ("none", "previous"):
        layout = Coded(SparseTernary(0.01), "range", contexts).layout(spec)
        known = contexts_of(layout, public)
        sizes[contexts] = len(encode((where,), layout[:1], known[:1]))
    print(f"\nwithout contexts {sizes['none']} bytes, with {sizes['previous']}")
    assert sizes["previous"] < 0.67 * sizes["none"]


# What is refused.


@pytest.mark.parametrize(
    "field",
    [
        Positions(10, 10, "zip"),  # type: ignore[arg-type]
        Positions(10, 10, "range", Grid(("a",), ((2, 4),))),
        Alphabet(4, 10, "range", Grid(("a",), ((2, 4),))),
        Alphabet(4, None, "range", Grid(("a",), ((2, 4),))),
        Integers(0, 4),
        Integers(2**31, 4),
        Integers(4, -1),
        Integers(4, 10, "auto", Grid(("a",), ((2, 4),))),
    ],
)
def test_layouts_that_no_body_can_carry_are_refused(field: Field) -> None:
    with pytest.raises(ConfigurationError, match="field 0 of a layout cannot be coded"):
        decode(b"", (field,))


def test_contexts_must_be_there_where_a_grid_names_them() -> None:
    layout = (Positions(8, 8, "range", Grid(("a",), ((2, 4),), "drift")),)
    symbols = (np.array([1], np.int64),)
    with pytest.raises(ConfigurationError, match="needs the contexts drift, but has none"):
        encode(symbols, layout)
    with pytest.raises(ConfigurationError, match="but has 3 of its contexts"):
        encode(symbols, layout, (np.zeros(3, np.uint8),))
    with pytest.raises(ConfigurationError, match="2 contexts for 1 fields"):
        encode(symbols, layout, (None, None))


@pytest.mark.slow(short=True)
def test_both_decoders_refuse_and_read_the_same_damaged_bodies(slow: bool) -> None:
    rng = np.random.default_rng(0)
    script = runpy.run_path(str(SCRIPT))
    read = 0
    drawn = [filled(np.random.default_rng([seed, 2])) for seed in range(10)]
    bodies = [encode(symbols, layout, contexts) for layout, symbols, contexts in drawn]
    cases = 150 if slow else 50
    for case in range(cases):
        (layout, _, contexts), body = drawn[case % 10], bytearray(bodies[case % 10])
        for bit in rng.integers(0, 8 * len(body), 2).tolist():
            body[bit >> 3] ^= 1 << (bit & 7)
        listed = [None if known is None else known.tolist() for known in contexts]
        try:
            due = spec_reader.read(bytes(body), script["as_json"](layout), listed)
        except spec_reader.Refused:
            with pytest.raises(DecodingError):
                decode(bytes(body), layout, contexts)
            continue
        found = decode(bytes(body), layout, contexts)
        assert [array.tolist() for array in found] == due
        read += 1
    assert read < cases


@pytest.mark.slow(short=True)
@pytest.mark.usefixtures("kernel")
def test_damaged_bodies_are_refused_or_are_updates(slow: bool) -> None:
    for seed in range(60 if slow else 20):
        rng = np.random.default_rng([seed, 3])
        layout, symbols, contexts = filled(rng)
        body = bytearray(encode(symbols, layout, contexts))
        match int(rng.integers(0, 4)):
            case 0:
                del body[int(rng.integers(0, len(body))) :]
            case 1:
                body[int(rng.integers(0, len(body))) :] = rng.bytes(20)
            case 2:
                at = int(rng.integers(0, len(body)))
                body[at : at + 1] = rng.bytes(1)
            case _:
                body = bytearray(rng.bytes(60))
        try:
            found = decode(bytes(body), layout, contexts)
        except DecodingError:
            continue
        check_symbols(found, layout)


# Contexts, and the compressor that asks for them.

SPEC = ModelSpec(
    (
        TensorSpec("a", (12, 5, 2)),
        TensorSpec("b", (12,)),
        TensorSpec("steps", (), "int64"),
        TensorSpec("c", (8, 12)),
    )
)


def public_of(spec: ModelSpec, seed: int = 0) -> Public:
    drawn = np.random.default_rng(seed).standard_t(2, (3, spec.size)).astype(np.float32)
    drawn[:, ::7] = 0
    randomness = PublicRandomness(bytes(32))
    return Public(
        spec, randomness, {"previous": drawn[0], "drift": drawn[1], "activity": np.abs(drawn[2])}
    )


def ranks_by_sorting(vector: Vector) -> list[int]:
    """The definition in SPEC-coding.md, in another way."""
    ordered = sorted((abs(float(x)) for x in vector), reverse=True)
    found = []
    for x in vector.tolist():
        at_least = sum(abs(x) < other for other in ordered)  # how many are larger
        c = max((c for c in range(1, 11) if at_least < vector.size >> c), default=0)
        found.append((c if x else 0) + 16 * (x > 0) + 32 * (x < 0))
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 1000, 1025])
def test_contexts_are_ranks_and_signs(size: int) -> None:
    spec = ModelSpec((TensorSpec("a", (size,)),))
    vector = np.round(np.random.default_rng(size).standard_t(2, size), 1).astype(np.float32)
    vector[::5] = -0.0
    public = Public(spec, PublicRandomness(bytes(32)), knowledge={"drift": vector})
    layout = Coded(TopK(0.1), contexts="drift").layout(spec)
    [known, *others] = contexts_of(layout, public)
    assert known is not None
    assert known.tolist() == ranks_by_sorting(vector)
    assert others == [None] * (len(layout) - 1)


def test_the_grid_is_the_trained_tensors_as_matrices() -> None:
    layout = Coded(TopK(0.1), contexts="previous").layout(SPEC)
    grid = Grid(("a", "b", "c"), ((12, 10), (1, 12), (8, 12)), "previous")
    assert layout[0] == Positions(SPEC.size, 23, "auto", grid)
    assert layout[1] == Alphabet(2, None, "auto")
    assert layout[3:] == TopK(0.1).layout(SPEC)[3:]


def test_members_of_per_tensor_have_the_contexts_of_their_own_tensors() -> None:
    made = PerTensor(Coded(TopK(0.1), contexts="previous"), Uncompressed(), min_size=90)
    public = public_of(SPEC)
    layout = made.layout(SPEC)
    known = [c for c in contexts_of(layout, public) if c is not None]
    assert made.needs == {"previous"}
    assert [c.size for c in known] == [216]
    assert known[0].tolist() == ranks_by_sorting(
        np.concatenate([public.known("previous")[:120], public.known("previous")[132:]])
    )


@pytest.mark.parametrize("coder", ["huffman", "range", "auto"])
@pytest.mark.parametrize("contexts", ["none", "previous", "drift", "activity"])
def test_uploads_survive_in_every_coder_and_context(coder: Any, contexts: Any) -> None:
    if coder == "huffman" and contexts != "none":
        with pytest.raises(ValueError, match="Huffman codes have no contexts"):
            Coded(TopK(0.1), coder, contexts)
        return
    made = Coded(TopK(0.1), coder, contexts)
    assert made.needs == ({contexts} - {"none"})
    public, rng = public_of(SPEC), np.random.default_rng(0)
    update = rng.standard_t(2, SPEC.size).astype(np.float32)
    symbols, _ = made.compress(update, made.init(SPEC), public, rng)
    plain, _ = TopK(0.1).compress(update, None, public, rng)
    layout = made.layout(SPEC)
    known = contexts_of(layout, public)
    body = Upload(0, 9, symbols).to_bytes(layout, known)
    assert len(body) <= max_body_bytes(layout)
    found = Upload.from_bytes(body, (layout,), 0, known)
    assert [a.tolist() for a in found.symbols] == [a.tolist() for a in plain]
    if coder == "huffman":
        assert body[3:] == encode(plain, TopK(0.1).layout(SPEC))


def test_a_body_of_integers_is_bounded() -> None:
    layout = (Positions(100, 10, "auto"), Integers(2**31 - 1, None, "auto"), Integers(5, 7))
    where = np.arange(10, dtype=np.int64)
    values = np.full(10, 1 - 2**31, np.int32) + np.random.default_rng(0).integers(0, 2**30, 10)
    symbols = (where, values.astype(np.int32), np.arange(7, dtype=np.int32) - 2)
    assert len(Upload(0, 2**32 - 1, symbols).to_bytes(layout)) <= max_body_bytes(layout)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Coded(TopK(), "zip"), "coder is huffman, range, auto or lanes"),  # type: ignore[arg-type]
        (lambda: Coded(TopK(), contexts="next"), "contexts are none"),  # type: ignore[arg-type]
        (lambda: Coded(TopK(), "lanes", "drift"), "lanes have no contexts"),
        (lambda: Coded(PerTensor()), "into per_tensor, not around"),
        (lambda: Coded(ErrorFeedback(TopK())), "goes around coded"),
        (lambda: Coded(3), "not a compressor"),  # type: ignore[arg-type]
    ],
)
def test_configurations_that_make_no_sense_are_refused(
    make: Callable[[], Coded], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        make()
