"""How a server comes to sign with another key, and how a device follows it.

The old key names the new one in a signed statement. A device believes the key that it pinned when
it was enrolled, and whatever a chain of such statements leads to from there; SPEC-signatures.md is
the norm. A chain is worth as much as the secrecy of the keys in it: whoever has copied an old key
can name a successor too.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated

from pydantic import Field

from fedpress_protocols.errors import InvalidSignature
from fedpress_protocols.plan import Term
from fedpress_protocols.signatures import (
    DeviceKey,
    from_base64url,
    key_id_of,
    sign_document,
    to_base64url,
    verify_document,
)

KEY_ROLLOVER_CONTEXT = "fedpress server key v1"
MAX_KEY_ROLLOVERS = 256
PublicKey = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{42}[AEIMQUYcgkosw048]$")]
"""32 bytes, base64url without padding, in its one spelling."""


class KeyRollover(Term):
    """The word of `key` that from now on the server signs with `successor`."""

    key: PublicKey
    successor: PublicKey
    made_at: Annotated[int, Field(ge=0, lt=2**53)]
    """Unix seconds."""


class SignedKeyRollover(Term):
    """Signed by `key`, as receipts are: over the fields of the succession with `key_id`."""

    succession: KeyRollover
    key_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{22}$")]
    signature: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{86}$")]


class ServerKeys(Term):
    """The key that a server signs with now, and every change of it, the oldest first."""

    server_key: PublicKey
    successions: Annotated[tuple[SignedKeyRollover, ...], Field(max_length=MAX_KEY_ROLLOVERS)] = ()


def sign_key_rollover(key: DeviceKey, successor: bytes, made_at: int) -> SignedKeyRollover:
    """The statement by which `key` hands over to the public key `successor` (32 bytes)."""
    succession = KeyRollover(
        key=to_base64url(key.public), successor=to_base64url(successor), made_at=made_at
    )
    signed = sign_document(succession.model_dump(mode="json"), key, context=KEY_ROLLOVER_CONTEXT)
    return SignedKeyRollover(
        succession=succession, key_id=signed["key_id"], signature=signed["signature"]
    )


def verify_key_rollover(signed: SignedKeyRollover) -> tuple[bytes, bytes]:
    """The key and its successor; raises InvalidSignature unless the key itself says so."""
    key = from_base64url(signed.succession.key, 32)
    document = signed.succession.model_dump(mode="json")
    document |= {"key_id": signed.key_id, "signature": signed.signature}
    verify_document(document, key, context=KEY_ROLLOVER_CONTEXT)
    return key, from_base64url(signed.succession.successor, 32)


def follow_rollovers(
    pinned: bytes, key_id: str, successions: Collection[SignedKeyRollover]
) -> tuple[bytes, ...]:
    """The keys after `pinned` (32 bytes), in order, up to the one that is called `key_id`.

    Raises InvalidSignature where no chain leads there, or a key on the way names two successors.
    """
    by_key = {each.succession.key: each for each in successions}
    for each in successions:
        if by_key[each.succession.key].succession.successor != each.succession.successor:
            raise InvalidSignature(
                f"the server's key {each.key_id[:22]} names two successors",
                hint="somebody else may have a copy of that key: ask the operator which key is "
                "the server's, and give that one to the device",
            )
    at, passed = pinned, list[bytes]()
    while (signed := by_key.pop(to_base64url(at), None)) is not None:
        at = verify_key_rollover(signed)[1]
        passed.append(at)
        if key_id_of(at) == key_id:
            return tuple(passed)
    raise InvalidSignature(
        f"signed by key {key_id[:22]!r}, which no chain leads to from the pinned key "
        f"{key_id_of(pinned)}",
        hint="if the operator has changed the server's key without a chain, as after a leak, give "
        "the device the new one (server_key)",
    )
