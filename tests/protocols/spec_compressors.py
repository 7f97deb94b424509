"""A second decompressor, written from the chapters "Compressors" and "Low-rank, sketching and
feedback compressors" alone, one value at a time.

It shares no code with the package: if the text is wrong or leaves something open, this goes wrong.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

f32 = np.float32
Fields = list[list[Any]]
LEVELS = {
    1: [0.7978846],
    2: [0.4527800, 1.5104176],
    3: [0.2450942, 0.7560053, 1.3439093, 2.1519457],
    4: [
        *(0.1283950, 0.3880483, 0.6567591, 0.9423405),
        *(1.2562312, 1.6180464, 2.0690172, 2.7325896),
    ],
}


@dataclass
class Known:
    """What both ends share: the rows that the spec's digest is of, the seed, `previous`, `own`, the
    round's number and the basis of a round with two trips."""

    rows: list[list[Any]]
    seed: bytes
    previous: list[Any] | None
    own: list[Any] | None = None
    round: int = 1
    basis: list[Any] | None = None

    def of(self, tensors: list[int]) -> Known:
        """The same for some of the tensors alone, in the model's order."""
        here = [i for i, j in enumerate(self.tensor_of) if j in tensors]
        previous, own = (v and [v[i] for i in here] for v in (self.previous, self.own))
        rows = [self.rows[j] for j in tensors]
        return Known(rows, self.seed, previous, own, self.round, self.basis)

    @property
    def sizes(self) -> list[int]:
        return [math.prod(row[1]) for row in self.rows]

    @property
    def tensor_of(self) -> list[int]:
        return [j for j, size in enumerate(self.sizes) for _ in range(size)]

    def stream(self, wire_id: str, own: list[int] | None = None) -> Iterator[int]:
        """The 64-bit words of the method's stream."""
        text = json.dumps(self.rows, separators=(",", ":"))
        label = f"{wire_id} {hashlib.sha256(text.encode()).hexdigest()}"
        if own is not None:
            label += " " + bytes(own).hex()
        return stream_of(self.seed, label)


def stream_of(seed: bytes, label: str) -> Iterator[int]:
    seeded = b"fedpress public randomness v1\x00" + seed + label.encode()
    cipher = Cipher(ChaCha20(hashlib.sha256(seeded).digest(), bytes(16)), mode=None).encryptor()
    while True:
        yield int.from_bytes(cipher.update(bytes(8)), "little")


def bits(words: Iterator[int], count: int) -> list[int]:
    taken = [next(words) for _ in range(-(-count // 64))]
    return [word >> i & 1 for word in taken for i in range(64)][:count]


def distinct(words: Iterator[int], count: int, bound: int) -> list[int]:
    others = 2 * count > bound
    drawn: set[int] = set()
    while len(drawn) < (bound - count if others else count):
        word = next(words)
        if word < 2**64 // bound * bound:
            drawn.add(word % bound)
    return [i for i in range(bound) if (i in drawn) != others]


def hadamard(row: list[Any]) -> list[Any]:
    h = 1
    while h < len(row):
        for i in range(len(row)):
            if not i & h:
                row[i], row[i + h] = row[i] + row[i + h], row[i] - row[i + h]
        h *= 2
    return row


def rotated_back(row: list[Any], first: list[int], second: list[int]) -> list[Any]:
    turned = [-x if flip else x for x, flip in zip(hadamard(row), second, strict=True)]
    return [-x if flip else x for x, flip in zip(hadamard(turned), first, strict=True)]


def grid(symbol: int, half: int, step: Any) -> Any:
    return f32(int(symbol) - half) * f32(step)


def halves(number: int) -> int:
    return int(2 ** (number - 1) - 1)


def from_bytes(planes: Fields) -> list[Any]:
    return [np.frombuffer(bytes(each), "<f4")[0] for each in zip(*planes, strict=True)]


def signed(magnitudes: list[Any], signs: list[Any]) -> list[Any]:
    return [-x if sign else x for x, sign in zip(magnitudes, signs, strict=True)]


def none(_: Any, fields: Fields, __: Known) -> list[Any]:
    return fields[0]


def half(config: Any, fields: Fields, known: Known) -> list[Any]:
    words = [bytes([low, high]) for low, high in zip(fields[0], fields[1], strict=True)]
    if config["dtype"] == "bfloat16":
        return [np.frombuffer(bytes(2) + word, "<f4")[0] for word in words]
    values = [f32(np.frombuffer(word, "<f2")[0]) for word in words]
    return [x * fields[2][j] for x, j in zip(values, known.tensor_of, strict=True)]


def quantize(config: Any, fields: Fields, known: Known) -> list[Any]:
    tensor, number = known.tensor_of, config["bits"]
    if config["grid"] == "affine":
        ends = [(float(low), float(high)) for low, high in zip(fields[1], fields[2], strict=True)]
        most = 2**number - 1
        return [
            f32(ends[j][0] + (ends[j][1] - ends[j][0]) * int(s) / most)
            for s, j in zip(fields[0], tensor, strict=True)
        ]
    if config["clip"] is not None:
        step = f32(config["clip"] / halves(number))
        return [grid(s, halves(number), step) for s in fields[0]]
    pairs = zip(fields[0], tensor, strict=True)
    if number == 1:
        return [fields[1][j] if s else -fields[1][j] for s, j in pairs]
    return [grid(s, halves(number), fields[1][j]) for s, j in pairs]


def qsgd(config: Any, fields: Fields, _: Known) -> list[Any]:
    s = config["levels"]
    return [
        f32(int(symbol) - s) / f32(s) * fields[1][i // config["bucket"]]
        for i, symbol in enumerate(fields[0])
    ]


def sign(config: Any, fields: Fields, _: Known) -> list[Any]:
    magnitudes = [
        f32(fields[1][i // config["chunk"]]) * fields[2][0] for i in range(len(fields[0]))
    ]
    return signed(magnitudes, fields[0])


def terngrad(_: Any, fields: Fields, known: Known) -> list[Any]:
    return [f32(int(s) - 1) * fields[1][j] for s, j in zip(fields[0], known.tensor_of, strict=True)]


def eden(config: Any, fields: Fields, known: Known) -> list[Any]:
    size = sum(known.sizes)
    padded = -(-size // 64) * 64
    lengths = [2 ** config["log2_block"]] * (padded >> config["log2_block"])
    rest = padded % 2 ** config["log2_block"]
    lengths += [1 << bit for bit in reversed(range(config["log2_block"])) if rest >> bit & 1]
    upper = LEVELS[max(1, math.ceil(config["bits"]))]
    levels = [f32(-x) for x in reversed(upper)] + [f32(x) for x in upper]
    words = known.stream("eden", fields[0])
    first, second = bits(words, padded), bits(words, padded)
    symbols, out = iter(fields[1]), list[float]()
    for length, scale in zip(lengths, fields[2], strict=True):
        sent = min(length, math.ceil(config["bits"] * length))
        places = distinct(words, sent, length) if config["bits"] < 1 else range(length)
        row = [f32(0)] * length
        for place in places:
            row[place] = levels[next(symbols)]
        here = slice(len(out), len(out) + length)
        out += [x * scale for x in rotated_back(row, first[here], second[here])]
    return out[:size]


def simhash(config: Any, fields: Fields, known: Known) -> list[Any]:
    size = sum(known.sizes)
    length = 64
    while length < size:
        length *= 2
    words = known.stream("simhash")
    first, second = bits(words, length), bits(words, length)
    row = [f32(0)] * length
    places = distinct(words, math.ceil(config["bits"] * size), length)
    for place, symbol in zip(places, fields[0], strict=True):
        row[place] = f32(-1 if symbol else 1)
    return [x * fields[1][0] for x in rotated_back(row, first, second)[:size]]


def topk(config: Any, fields: Fields, known: Known) -> dict[int, Any]:
    """`threshold` as well, which has one group."""
    number = config["magnitude_bits"]
    symbols = fields[2] if number else [0] * len(fields[0])
    ratios, scales = fields[-2], fields[-1]
    by_tensor = config.get("scope") == "tensor"
    group = [known.tensor_of[i] if by_tensor else 0 for i in fields[0]]
    magnitudes = [
        f32(ratios[j * 2**number + q]) * scales[j] for q, j in zip(symbols, group, strict=True)
    ]
    return dict(zip(fields[0], signed(magnitudes, fields[1]), strict=True))


def stc(_: Any, fields: Fields, __: Known) -> dict[int, Any]:
    magnitudes = [fields[2][0]] * len(fields[0])
    return dict(zip(fields[0], signed(magnitudes, fields[1]), strict=True))


def bernoulli(_: Any, fields: Fields, __: Known) -> dict[int, Any]:
    return dict(zip(fields[0], from_bytes(fields[1:]), strict=True))


def randomk(config: Any, fields: Fields, known: Known) -> dict[int, Any]:
    size, half = sum(known.sizes), halves(config["bits"] or 2)
    wanted = config["count"] or math.ceil(config["fraction"] * size)
    k = min(size, wanted)
    own = None if config["shared"] else fields[0]
    where = distinct(known.stream("randomk", own), k, size)
    values = fields[-1]
    if config["bits"]:
        step = f32(config["clip"] / half)
        if config["unbiased"]:
            step = step * f32(size / k)
        values = [grid(s, half, step) for s in values]
    return dict(zip(where, values, strict=True))


def shared_support(config: Any, fields: Fields, known: Known) -> dict[int, Any]:
    assert known.previous is not None
    size, half = sum(known.sizes), halves(config["bits"])
    k = math.ceil(config["fraction"] * size)
    large = [i for i in range(size) if known.previous[i]]
    large.sort(key=lambda i: (-abs(known.previous[i]), i))  # type: ignore[index]
    chosen = large[: math.floor(k * (1 - config["explore"]))]
    others = [i for i in range(size) if i not in set(chosen)]
    words = known.stream("shared_support")
    chosen += [others[i] for i in distinct(words, k - len(chosen), len(others))]
    step = f32(config["clip"] / half)
    return dict(zip(sorted(chosen), (grid(s, half, step) for s in fields[0]), strict=True))


def ecsq(config: Any, fields: Fields, _: Known) -> dict[int, Any]:
    offsets, step = fields[3], fields[4][0]
    magnitudes = [
        (f32(int(s) + 1) + f32(offsets[min(int(s) + 1, config["centroids"]) - 1])) * step
        for s in fields[2]
    ]
    return dict(zip(fields[0], signed(magnitudes, fields[1]), strict=True))


def structured(config: Any, fields: Fields, known: Known) -> dict[int, Any]:
    cells, start = [], 0
    for j, (_, shape, *_rest) in enumerate(known.rows):
        height, width = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, known.sizes[j])
        for row in range(height):
            cells += [
                (j, start + row * width + at, min(16, width - at)) for at in range(0, width, 16)
            ]
        start += height * width
    found = {}
    for number, cell in enumerate(fields[0]):
        j, first, width = cells[cell]
        for i in range(width):
            if config["bits"] is None:
                planes = [[fields[1 + 4 * i + plane][number]] for plane in range(4)]
                found[first + i] = from_bytes(planes)[0]
            else:
                symbol = fields[1 + i][number]
                found[first + i] = grid(symbol, halves(config["bits"]), fields[-1][j])
    return found


def around(config: Any, fields: Fields, known: Known) -> list[Any]:
    return decompressed(config["inner"], fields, known)


def cafe(config: Any, fields: Fields, known: Known) -> list[Any]:
    assert known.previous is not None
    is_taken = True
    if config["guard"] is not None:
        *fields, (symbol,) = fields
        is_taken = symbol == 1
    inner = decompressed(config["inner"], fields, known)
    if not is_taken:
        return inner
    factor = f32(config["factor"])
    return [factor * last + x for last, x in zip(known.previous, inner, strict=True)]


def ef21(config: Any, fields: Fields, known: Known) -> list[Any]:
    assert known.previous is not None
    share = f32(config["participation"])
    inner = decompressed(config["inner"], fields, known)
    return [last + share * x for last, x in zip(known.previous, inner, strict=True)]


def delta(config: Any, fields: Fields, known: Known) -> list[Any]:
    assert known.own is not None
    inner = decompressed(config["inner"], fields, known)
    return [mine + x for mine, x in zip(known.own, inner, strict=True)]


# Methods over tensors and matrices. A matrix is a list of rows.

Matrix = list[list[float]]


def num_fields(config: Any, known: Known) -> int:
    """The length of the method's layout for the tensors at hand."""
    wire_id = config["id"]
    if wire_id == "per_tensor":
        return sum(num_fields(made, known.of(js)) for made, js in members(config, known))
    if wire_id in ("lowrank", "powersgd"):
        _, others = factored(config, known)
        own = 2 if config.get("trips") == 2 else 3
        return own + (num_fields(config["rest"], known.of(others)) if others else 0)
    if wire_id == "successive_refinement":
        return num_fields(config["first"], known) + num_fields(config["second"], known)
    if "inner" in config:
        return num_fields(config["inner"], known) + bool(config.get("guard"))
    if wire_id == "quantize":
        return 3 if config["grid"] == "affine" else 2 - (config["clip"] is not None)
    if wire_id in ("topk", "threshold"):
        return 5 if config["magnitude_bits"] else 4
    if wire_id == "randomk":
        return 1 if config["shared"] else 2
    if wire_id == "half":
        return 2 if config["dtype"] == "bfloat16" else 3
    if wire_id == "structured":
        return 65 if config["bits"] is None else 18
    counts = {"none": 1, "qsgd": 2, "sign": 3, "terngrad": 2, "eden": 3, "simhash": 2, "stc": 3}
    counts |= {"bernoulli": 5, "shared_support": 1, "ecsq": 5, "count_sketch": 1}
    return (counts | {"powersgd_onesided": 1})[wire_id]


def kinds(name: str, shape: list[int]) -> set[str]:
    last = name.rsplit(".", 1)[-1]
    if last.startswith("bias") or last.endswith("bias"):
        return {"bias"}
    if len(shape) < 2:
        return {"norm"}
    if len(shape) == 2 and any(part in name.lower() for part in ("embed", "wte", "wpe")):
        return {"embedding"}
    return {"matrix", "linear" if len(shape) == 2 else "convolution"}


def members(config: Any, known: Known) -> list[tuple[Any, list[int]]]:
    """The compressors that have tensors, and the numbers of these, in the order of the layouts."""
    made = [each for _, each in config["rules"]] + [config["small"], config["large"]]
    tensors: list[list[int]] = [[] for _ in made]
    for j, (name, shape, *_) in enumerate(known.rows):
        for rule, (pattern, _) in enumerate(config["rules"]):
            if pattern.startswith("kind:"):
                fits = pattern.removeprefix("kind:") in kinds(name, shape)
            else:
                fits = fnmatch.fnmatchcase(name, pattern)
            if fits:
                tensors[rule].append(j)
                break
        else:
            is_small = known.sizes[j] < config["min_size"]
            is_small |= config["spare_1d"] and len(shape) < 2
            tensors[-2 if is_small else -1].append(j)
    return [(each, js) for each, js in zip(made, tensors, strict=True) if js]


def per_tensor(config: Any, fields: Fields, known: Known) -> dict[int, Any]:
    values, rest = dict[int, Any](), list(fields)
    for made, tensors in members(config, known):
        own = known.of(tensors)
        count = num_fields(made, own)
        here = [i for i, j in enumerate(known.tensor_of) if j in tensors]
        values |= dict(zip(here, decompressed(made, rest[:count], own), strict=True))
        rest = rest[count:]
    assert not rest
    return values


def count_sketch(config: Any, fields: Fields, known: Known) -> list[Any]:
    size, rows, cells = sum(known.sizes), config["rows"], fields[0]
    width = max(1, math.ceil(config["fraction"] * size / rows))
    seed = known.seed
    if config["seed"] is not None:
        text = b"fedpress count sketch v1\x00" + config["seed"].to_bytes(8, "little")
        seed = hashlib.sha256(text).digest()
    estimates: list[list[int]] = [[] for _ in range(size)]
    for row in range(rows):
        words = stream_of(seed, f"count_sketch {row}")
        for i in range(size):
            word = next(words)
            cell = cells[row * width + ((word >> 32) * width >> 32)]
            estimates[i].append(-cell if word % 2 else cell)
    unit = 2.0 ** -config["scale_bits"]
    if config["recover"] == "mean":
        return [f32(sum(each) / rows * unit) for each in estimates]
    values = list[Any]()
    for each in map(sorted, estimates):
        values.append(f32((each[(rows - 1) // 2] + each[rows // 2]) / 2 * unit))
    largest = sorted(range(size), key=lambda i: (-abs(values[i]), i))
    stands = set(largest[: math.ceil(config["keep"] * size)])
    return [x if i in stands else f32(0) for i, x in enumerate(values)]


def factored(config: Any, known: Known) -> tuple[list[tuple[int, int, int, int]], list[int]]:
    """The number, rows, columns and components of each factored matrix; the rest's numbers."""
    matrices, others = [], []
    for j, (_, shape, *_) in enumerate(known.rows):
        m, n = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, known.sizes[j])
        k = min(config["rank"], m, n)
        if 0 < (m + n) * k * config["min_compression_rate"] < m * n:
            matrices.append((j, m, n, k))
        else:
            others.append(j)
    return matrices, others


def product(a: Matrix, b: Matrix, scales: list[float]) -> list[Any]:
    """Row after row; `a` and `b` are lists of columns."""
    values = []
    for i in range(len(a[0])):
        for j in range(len(b[0])):
            total = 0.0
            for left, right, scale in zip(a, b, scales, strict=True):
                total = total + (left[i] * right[j]) * scale
            values.append(f32(total))
    return values


def columns(numbers: Iterator[Any], count: int, length: int, less: int = 0) -> Matrix:
    return [[float(next(numbers)) - less for _ in range(length)] for _ in range(count)]


def placed(known: Known, tensors: dict[int, list[Any]]) -> list[Any]:
    return [x for j in range(len(known.rows)) for x in tensors[j]]


def factors(config: Any, fields: Fields, known: Known) -> list[Any]:
    """`lowrank` and `powersgd`."""
    matrices, others = factored(config, known)
    zero = 2 ** (config["bits"] - 1) - 1 if config["id"] == "lowrank" else 0
    if config.get("trips") == 2:
        assert known.basis is not None
        lefts, fields = iter(known.basis), [[], *fields]
    else:
        lefts = iter(fields[0])
    rights, scales = iter(fields[1]), iter(fields[2])
    tensors = {}
    for j, m, n, k in matrices:
        left, right = columns(lefts, k, m, zero), columns(rights, k, n, zero)
        tensors[j] = product(left, right, [float(next(scales)) for _ in range(k)])
    if others:
        own = known.of(others)
        rest = iter(decompressed(config["rest"], fields[3:], own))
        tensors |= {j: [next(rest) for _ in range(known.sizes[j])] for j in others}
    return placed(known, tensors)


def gridded(values: list[float], largest: int) -> list[float]:
    most = max(map(abs, values), default=0.0)
    if most == 0:
        return [0.0] * len(values)
    factor = largest / most
    return [float(round(x * factor)) for x in values]


def dot(a: list[float], b: list[float]) -> float:
    return float(sum(int(x) * int(y) for x, y in zip(a, b, strict=True)))


def public_basis(matrix: Matrix, k: int, words: Iterator[int]) -> Matrix:
    """The columns, of a matrix given by its rows."""
    m, n = len(matrix), len(matrix[0])
    flat = iter(gridded([x for row in matrix for x in row], 2**14))
    rows = [[next(flat) for _ in range(n)] for _ in range(m)]
    across = [list(column) for column in zip(*rows, strict=True)]

    def drawn(count: int) -> list[float]:
        return [2.0**15 if bit else -(2.0**15) for bit in bits(words, count)]

    def times(lines: Matrix, vectors: Matrix) -> Matrix:
        return [gridded([dot(line, v) for line in lines], 2**15) for v in vectors]

    first = drawn(k * n)
    ys = times(rows, [first[j * n : (j + 1) * n] for j in range(k)])
    for _ in range(2):
        ys = times(rows, times(across, ys))
    basis: Matrix = []
    for y in ys:
        v, share = apart(y, basis)
        while share < 2.0**-10:
            v, share = apart(drawn(m), basis)
        basis.append(v)
    return basis


def apart(v: list[float], basis: Matrix) -> tuple[list[float], float]:
    share = 0.0
    for time in range(2):
        before = max(map(abs, v))
        for u in basis:
            factor = dot(v, u) / dot(u, u)
            v = [float(round(x - factor * y)) for x, y in zip(v, u, strict=True)]
        if time == 0 and before:
            share = max(map(abs, v)) / before
        v = gridded(v, 2**15)
    return v, share


def powersgd_onesided(config: Any, fields: Fields, known: Known) -> list[Any]:
    assert known.previous is not None
    matrices, others = factored(config, known)
    integers, words = iter(fields[0]), known.stream("powersgd_onesided")
    starts = [sum(known.sizes[:j]) for j in range(len(known.rows))]

    def last_of(j: int) -> list[float]:
        assert known.previous is not None
        return [float(x) for x in known.previous[starts[j] : starts[j] + known.sizes[j]]]

    def step(values: list[float], count: int) -> float:
        squares = sum(int(x) ** 2 for x in gridded(values, 2**14))
        unit = max(map(abs, values)) / 2**14
        reach = config["headroom"] * (math.sqrt(squares / count) * unit)
        return float((reach or config["first_range"]) / halves(config["bits"]))

    tensors = {}
    for j, m, n, k in matrices:
        last = last_of(j)
        matrix = [last[i * n : (i + 1) * n] for i in range(m)]
        is_even = known.round % 2 == 0
        length = m if is_even else n
        rows = [[float(next(integers)) for _ in range(k)] for _ in range(length)]
        own = [list(column) for column in zip(*rows, strict=True)]
        if is_even:
            matrix = [list(column) for column in zip(*matrix, strict=True)]
        basis = public_basis(matrix, k, words)
        scale = step(last, length * k)
        scales = [scale / math.sqrt(dot(u, u)) for u in basis]
        tensors[j] = product(own, basis, scales) if is_even else product(basis, own, scales)
    for j in others:
        scale = step(last_of(j), known.sizes[j])
        tensors[j] = [f32(float(next(integers)) * scale) for _ in range(known.sizes[j])]
    return placed(known, tensors)


def successive_refinement(config: Any, fields: Fields, known: Known) -> list[Any]:
    count = num_fields(config["first"], known)
    first = decompressed(config["first"], fields[:count], known)
    second = decompressed(config["second"], fields[count:], known)
    return [f32(a) + f32(b) for a, b in zip(first, second, strict=True)]


METHODS: dict[str, Callable[[Any, Fields, Known], list[Any] | dict[int, Any]]] = {
    each.__name__: each
    for each in (
        *(none, half, quantize, qsgd, sign, terngrad, eden, simhash, topk, stc, bernoulli, randomk),
        *(shared_support, ecsq, structured, cafe, ef21, delta),
        *(per_tensor, count_sketch, powersgd_onesided, successive_refinement),
    )
} | {
    "threshold": topk,
    **dict.fromkeys(("lowrank", "powersgd"), factors),
    **dict.fromkeys(("clip", "error_feedback", "dgc", "coded"), around),
}


def decompressed(config: Any, fields: Fields, known: Known) -> list[Any]:
    """The update [d] that `fields` stand for."""
    values = METHODS[config["id"]](config, fields, known)
    if isinstance(values, dict):
        return [values.get(i, f32(0)) for i in range(sum(known.sizes))]
    return values
