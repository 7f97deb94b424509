"""Model files that nobody should have sent, for both ends."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np

from fedpress_compression.tensors import MAX_NAME_BYTES, MAX_TENSORS
from fedpress_protocols.model import Model

HONEST = Model.from_tensors(
    {
        "weight": np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4),
        "half": np.ones(3, np.float16),
        "steps": np.array([3], np.int64),
        "empty": np.zeros((0, 4), np.float32),
        "table": np.ones(2, np.float32),
    },
    frozen=["table"],
)


def file_of(header: Any, body: bytes = b"") -> bytes:
    """A file with this header, JSON text or what becomes it."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def one(name: str = "a", dtype: Any = "F32", shape: Any = (1,), offsets: Any = (0, 4)) -> Any:
    return {name: {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}}


_ONE = json.dumps(one())[1:-1]
FORGED = {
    "a shape that no array has": file_of(
        {**one(), **one("b", shape=(0, 2**62), offsets=(4, 4))}, bytes(4)
    ),
    "a product that wraps to nothing": file_of(one(shape=(2**32, 2**32), offsets=(0, 0))),
    "eighty dimensions": file_of(one(shape=[1] * 80), bytes(4)),
    "a line feed in a name": file_of(one("a\n"), bytes(4)),
    "an escape sequence in a name": file_of(one("\x1b[2J"), bytes(4)),
    "a text direction in a name": file_of(one("a\u202eb"), bytes(4)),
    "a path in a name": file_of(one("../../etc/a"), bytes(4)),
    "a path of another system": file_of(one("..\\a"), bytes(4)),
    "a name without end": file_of(one("a" * (MAX_NAME_BYTES + 1)), bytes(4)),
    "one name twice": file_of(f"{{{_ONE},{_ONE}}}".encode(), bytes(4)),
    "one key twice": file_of(
        b'{"a":{"dtype":"F32","dtype":"F16","shape":[1],"data_offsets":[0,4]}}', bytes(4)
    ),
    "too many tensors": file_of(
        {
            name: tensor
            for n in range(MAX_TENSORS + 1)
            for name, tensor in one(f"t{n}", offsets=(4 * n, 4 * n + 4)).items()
        },
        bytes(4 * MAX_TENSORS + 4),
    ),
    "a header of lists": file_of(b"[" * 2**20),
    "a header of many lists": file_of(b"[" + b"[]," * 2**21 + b"[]]"),
    "a metadata of no texts": file_of({"__metadata__": 3, **one()}, bytes(4)),
    "a header without end": (2**62).to_bytes(8, "little") + b"{}",
}
"""Each is refused, for its own reason."""

_VALUES: tuple[Any, ...] = (
    *(0, 1, -1, 2**31, 2**53, 2**62, 2**64, 1e300, None, True, "F32", "F8_E4M3", "C64", "x" * 40),
    *([], {}, [0, 2**62], [4, 0], [1] * 70, {"a": 1}, [[]]),
)


def mutated(seed: int, count: int) -> Iterator[bytes]:
    """Files that come of an honest one: bytes of it cut, flipped or overwritten, or values of its
    header in the place of others. Some may be good models."""
    chance = random.Random(seed)
    honest = HONEST.to_bytes()
    length = int.from_bytes(honest[:8], "little")
    header, body = json.loads(honest[8 : 8 + length]), honest[8 + length :]
    for _ in range(count):
        kind = chance.randrange(5)
        if kind == 0:
            yield honest[: chance.randrange(len(honest))]
        elif kind == 1:
            changed = bytearray(honest)
            for _ in range(chance.choice([1, 1, 2, 8])):
                changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
            yield bytes(changed)
        elif kind == 2:
            start = chance.randrange(len(honest))
            noise = chance.randbytes(chance.randrange(1, 9))
            yield honest[:start] + noise + honest[start + len(noise) :]
        else:
            forged = json.loads(json.dumps(header))
            name = chance.choice(list(forged))
            if kind == 3 and isinstance(forged[name], dict):
                forged[name][chance.choice([*forged[name], "more"])] = chance.choice(_VALUES)
            else:
                forged[chance.choice([name, "more", "..", "\x00", ""])] = chance.choice(_VALUES)
            yield file_of(forged, body)
