"""Device key rotation: one statement, signed by the old key and the new key.

The old key's signature authorizes the new key; the new key's signature proves possession. So nobody
can move a device to a key that is not its own, nor claim the key of another device. Statements form
a chain from the key with which a device enrolled. SPEC-signatures.md, "Device key rotation", is
normative.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from fedpress_protocols.errors import InvalidSignature, MalformedRequest
from fedpress_protocols.messages import KeyRotation, SignedRotation
from fedpress_protocols.signatures import (
    DeviceKey,
    from_base64url,
    key_id_of,
    sign_document,
    to_base64url,
    verify_document,
)

ROTATION_CONTEXT = "fedpress device key v1"


def signed_rotation(client_id: str, old: DeviceKey, new: DeviceKey) -> SignedRotation:
    """Sign the statement that `new` replaces `old` for the device `client_id`; deterministic."""
    rotation = KeyRotation(
        client_id=client_id, old_key=to_base64url(old.public), new_key=to_base64url(new.public)
    )
    document = rotation.model_dump(mode="json")
    signatures = [
        sign_document(document, key, context=ROTATION_CONTEXT)["signature"] for key in (old, new)
    ]
    return SignedRotation(
        rotation=rotation, old_signature=signatures[0], new_signature=signatures[1]
    )


@dataclass(frozen=True, slots=True)
class Link:
    """A statement with parsed keys, whose signatures have not been verified yet."""

    signed: SignedRotation
    old: bytes
    new: bytes

    @property
    def old_id(self) -> str:
        return key_id_of(self.old)

    @property
    def new_id(self) -> str:
        return key_id_of(self.new)

    def check(self) -> None:
        """Verify both signatures; raises InvalidSignature."""
        document = self.signed.rotation.model_dump(mode="json")
        halves = (
            ("old", self.old, self.signed.old_signature),
            ("new", self.new, self.signed.new_signature),
        )
        for which, public, signature in halves:
            whole = {**document, "key_id": key_id_of(public), "signature": signature}
            try:
                verify_document(whole, public, context=ROTATION_CONTEXT)
            except InvalidSignature as exc:
                raise InvalidSignature(
                    f"the {which} key {key_id_of(public)} did not sign the change of key"
                ) from exc


def chain(rotations: Sequence[SignedRotation]) -> tuple[Link, ...]:
    """Parse one device's statements, each of which must start at the key where the previous one
    ended.

    Raises MalformedRequest for a gap or a repeated key; signatures are not verified here.
    """
    links = tuple(
        Link(
            each,
            from_base64url(each.rotation.old_key, 32),
            from_base64url(each.rotation.new_key, 32),
        )
        for each in rotations
    )
    for before, after in pairwise(links):
        if before.new != after.old:
            raise MalformedRequest(
                f"a rotation from key {after.old_id} follows one to key {before.new_id}"
            )
    if len({link.signed.rotation.client_id for link in links}) > 1:
        raise MalformedRequest("key rotations of more than one device")
    keys = [link.old for link in links[:1]] + [link.new for link in links]
    if len(set(keys)) < len(keys):
        raise MalformedRequest("a device returns to a key that it replaced before")
    return links
