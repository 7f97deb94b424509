"""Writes server-keys.json, the golden vectors of changes of a server's key; the same each time.

PYTHONPATH=protocols python protocols/vectors/make_server_key_vectors.py
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

from fedpress_protocols.errors import FedpressError
from fedpress_protocols.key_rollover import SignedKeyRollover, follow_rollovers, sign_key_rollover
from fedpress_protocols.signatures import DeviceKey

PATH = Path(__file__).with_name("server-keys.json")
MADE_AT = 1_790_000_000
KEYS = tuple(DeviceKey.from_bytes(bytes(range(start, start + 32))) for start in (32, 0, 64, 96))


def statements() -> list[SignedKeyRollover]:
    return [
        sign_key_rollover(key, successor.public, MADE_AT + 86_400 * index)
        for index, (key, successor) in enumerate(pairwise(KEYS))
    ]


def chain(name: str, pinned: int, wanted: int, said: list[SignedKeyRollover]) -> dict[str, Any]:
    vector: dict[str, Any] = {
        "name": name,
        "pinned": KEYS[pinned].public.hex(),
        "key_id": KEYS[wanted].key_id,
        "successions": [each.model_dump(mode="json") for each in said],
    }
    try:
        passed = follow_rollovers(KEYS[pinned].public, KEYS[wanted].key_id, said)
        return vector | {"passed": [key.hex() for key in passed], "error": None}
    except FedpressError as exc:
        return vector | {"passed": None, "error": exc.slug}


def vectors() -> dict[str, Any]:
    first, second, third = said = statements()
    two = sign_key_rollover(KEYS[0], KEYS[2].public, MADE_AT)
    forged = first.model_copy(update={"signature": second.signature})
    renamed = first.model_copy(update={"key_id": KEYS[1].key_id})
    later = first.model_copy(
        update={"succession": first.succession.model_copy(update={"made_at": MADE_AT + 1})}
    )
    back = sign_key_rollover(KEYS[1], KEYS[0].public, MADE_AT)
    return {
        "keys": [
            {"secret": key.to_bytes().hex(), "public": key.public.hex(), "key_id": key.key_id}
            for key in KEYS
        ],
        "chains": [
            chain("one change", 0, 1, [first]),
            chain("three changes", 0, 3, said),
            chain("from the middle", 1, 3, said),
            chain("only as far as is needed", 0, 2, said),
            chain("in another order", 0, 3, [third, first, second]),
            chain("twice the same", 0, 2, [first, first, second]),
            chain("no statement", 0, 1, []),
            chain("a key that nobody names", 0, 3, [first]),
            chain("a link that is missing", 0, 3, [first, third]),
            chain("against its direction", 1, 0, said),
            chain("two successors", 0, 2, [first, two, second]),
            chain("another's signature", 0, 1, [forged]),
            chain("another's key id", 0, 1, [renamed]),
            chain("a changed time", 0, 1, [later]),
            chain("round in a circle", 0, 3, [first, back]),
        ],
    }


def text() -> str:
    return json.dumps(vectors(), indent=1) + "\n"


if __name__ == "__main__":
    PATH.write_text(text())
