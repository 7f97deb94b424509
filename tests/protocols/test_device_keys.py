"""A device's change of key: golden bytes, and every statement that is none."""

from __future__ import annotations

import json
import runpy
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import ValidationError

from fedpress_protocols.device_keys import chain, signed_rotation
from fedpress_protocols.errors import FedpressError, InvalidSignature, MalformedRequest
from fedpress_protocols.messages import (
    MAX_ROTATIONS,
    EnrolRequest,
    RotationRequest,
    SignedRotation,
)
from fedpress_protocols.signatures import DeviceKey, to_base64url

FOLDER = Path(__file__).parents[2] / "protocols" / "vectors"
VECTORS: dict[str, Any] = json.loads((FOLDER / "device_keys.json").read_text())
KEYS = [DeviceKey.from_bytes(bytes.fromhex(each["secret"])) for each in VECTORS["keys"]]


def test_the_vectors_are_what_the_script_writes() -> None:
    script = runpy.run_path(str(FOLDER / "make_device_key_vectors.py"))
    assert script["text"]() == (FOLDER / "device_keys.json").read_text()


def test_the_golden_request_is_read_and_made_again() -> None:
    request = RotationRequest.model_validate_json(json.dumps(VECTORS["request"]))
    links = chain(request.rotations)
    for link, (old, new) in zip(links, pairwise(KEYS), strict=True):
        link.check()
        assert (link.old_id, link.new_id) == (old.key_id, new.key_id)
        assert link.signed == signed_rotation(link.signed.rotation.client_id, old, new)


def test_the_signatures_are_of_the_messages_that_the_specification_says() -> None:
    signed = VECTORS["request"]["rotations"][0]
    for said, name in zip(VECTORS["messages"], ("old_signature", "new_signature"), strict=True):
        key = next(each for each in VECTORS["keys"] if each["key_id"] == said["signer"])
        secret = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(key["secret"]))
        assert to_base64url(secret.sign(bytes.fromhex(said["message"]))) == signed[name]


@pytest.mark.parametrize("vector", VECTORS["changed"], ids=lambda each: each["name"])
def test_a_changed_chain_is_refused(vector: dict[str, Any]) -> None:
    rotations = [SignedRotation.model_validate(each) for each in vector["rotations"]]

    def check() -> None:
        for link in chain(rotations):
            link.check()

    with pytest.raises(FedpressError) as caught:
        check()
    assert caught.value.slug == vector["error"]


def test_a_signature_that_is_missing_says_whose() -> None:
    old, new, other = (DeviceKey.generate() for _ in range(3))
    good, foreign = signed_rotation("c", old, new), signed_rotation("c", other, new)
    for field, name in (("old_signature", "old"), ("new_signature", "new")):
        forged = good.model_copy(update={field: getattr(foreign, field)})
        if name == "new":
            forged = good.model_copy(update={field: good.old_signature})
        with pytest.raises(InvalidSignature, match=f"the {name} key .* did not sign"):
            chain([forged])[0].check()


def test_a_key_is_spelled_in_one_way() -> None:
    rotation = signed_rotation("c", KEYS[0], KEYS[1]).model_dump(mode="json")
    loose = rotation["rotation"]["old_key"][:-1] + "/"
    rotation["rotation"]["old_key"] = loose
    with pytest.raises(ValidationError):
        SignedRotation.model_validate(rotation)


def test_a_chain_is_bounded() -> None:
    rotation = signed_rotation("c", KEYS[0], KEYS[1])
    with pytest.raises(ValidationError):
        RotationRequest(rotations=(rotation,) * (MAX_ROTATIONS + 1))
    with pytest.raises(ValidationError):
        RotationRequest(rotations=())
    with pytest.raises(MalformedRequest):
        chain((rotation,) * 2)
    assert chain(()) == ()


def test_an_enrolment_without_changes_of_key_is_what_it_was() -> None:
    public = to_base64url(KEYS[1].public)
    plain = EnrolRequest(public_key=public, name="n")
    assert plain.model_dump_json() == f'{{"public_key":"{public}","name":"n"}}'
    rotation = signed_rotation("c", KEYS[0], KEYS[1])
    told = EnrolRequest(public_key=public, rotations=(rotation,))
    assert EnrolRequest.model_validate_json(told.model_dump_json()) == told
