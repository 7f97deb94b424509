"""A second decompressor, written from the chapter "Compressors" alone, one value at a time.

It shares no code with the package: if the text is wrong or leaves something open, this goes wrong.
"""

from __future__ import annotations

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
    """What both ends know: the rows that the spec's digest is of, the seed, `previous`, `own`."""

    rows: list[list[Any]]
    seed: bytes
    previous: list[Any] | None
    own: list[Any] | None = None

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
        seeded = b"fedpress public randomness v1\x00" + self.seed + label.encode()
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


METHODS: dict[str, Callable[[Any, Fields, Known], list[Any] | dict[int, Any]]] = {
    each.__name__: each
    for each in (
        *(none, quantize, qsgd, sign, terngrad, eden, simhash, topk, stc, bernoulli, randomk),
        *(shared_support, ecsq, structured, cafe, ef21, delta),
    )
} | {
    "threshold": topk,
    **dict.fromkeys(("clip", "error_feedback", "dgc", "coded"), around),
}


def decompressed(config: Any, fields: Fields, known: Known) -> list[Any]:
    """The update [d] that `fields` stand for."""
    values = METHODS[config["id"]](config, fields, known)
    if isinstance(values, dict):
        return [values.get(i, f32(0)) for i in range(sum(known.sizes))]
    return values
