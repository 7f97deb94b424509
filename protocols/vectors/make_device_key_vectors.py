"""Writes device_keys.json, the golden vectors of changes of key; the same bytes every time.

PYTHONPATH=protocols python protocols/vectors/make_device_key_vectors.py
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

from fedpress_protocols.device_keys import ROTATION_CONTEXT, chain, signed_rotation
from fedpress_protocols.errors import FedpressError
from fedpress_protocols.messages import RotationRequest, SignedRotation
from fedpress_protocols.signatures import DeviceKey, canonical_json

PATH = Path(__file__).with_name("device_keys.json")

KEYS = tuple(DeviceKey.from_bytes(bytes(range(first, first + 32))) for first in (0, 64, 96))
CLIENT = "q83vEjRWeJCr"


def changed(good: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Variants of a chain of two, and the type of the error that each gives."""
    first, second = good

    def with_(link: dict[str, Any], **fields: str) -> dict[str, Any]:
        return {**link, "rotation": {**link["rotation"], **fields}}

    variants = [
        ("another client", [with_(first, client_id="another")]),
        ("another old key", [with_(first, old_key=second["rotation"]["new_key"])]),
        ("another new key", [with_(first, new_key=second["rotation"]["new_key"])]),
        ("the signatures swapped", [{**first, "old_signature": first["new_signature"]}]),
        ("the new key has not signed", [{**first, "new_signature": first["old_signature"]}]),
        ("out of order", [second, first]),
        ("of two devices", [first, with_(second, client_id="another")]),
        (
            "back to a key that was left",
            [first, with_(second, new_key=first["rotation"]["old_key"])],
        ),
    ]
    return [{"name": name, "rotations": each, "error": error_of(each)} for name, each in variants]


def error_of(rotations: list[dict[str, Any]]) -> str:
    try:
        for link in chain([SignedRotation.model_validate(each) for each in rotations]):
            link.check()
    except FedpressError as exc:
        return exc.slug
    raise AssertionError("a chain that should not be taken")


def vectors() -> dict[str, Any]:
    rotations = tuple(signed_rotation(CLIENT, old, new) for old, new in pairwise(KEYS))
    for link in chain(rotations):
        link.check()
    good = [each.model_dump(mode="json") for each in rotations]
    rotation = good[0]["rotation"]
    return {
        "context": ROTATION_CONTEXT,
        "keys": [
            {"secret": key.to_bytes().hex(), "public": key.public.hex(), "key_id": key.key_id}
            for key in KEYS
        ],
        "messages": [
            {
                "signer": key.key_id,
                "message": (
                    b"fedpress document\x00"
                    + ROTATION_CONTEXT.encode()
                    + b"\x00"
                    + canonical_json({**rotation, "key_id": key.key_id})
                ).hex(),
            }
            for key in KEYS[:2]
        ],
        "request": json.loads(RotationRequest(rotations=rotations).model_dump_json()),
        "changed": changed(good),
    }


def text() -> str:
    return json.dumps(vectors(), indent=1) + "\n"


if __name__ == "__main__":
    PATH.write_text(text())
