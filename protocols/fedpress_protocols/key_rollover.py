"""Server key rollover: how a server changes its signing key, and how a device follows it.

The old key names the new one in a signed statement. A device trusts the key that it pinned when
it enrolled, and every key that a chain of such statements leads to from there; SPEC-signatures.md
is normative. A chain is only as secure as the keys in it: a copy of an old key can name a successor
too.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated

from pydantic import FailFast, Field

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
"""32 bytes, canonical base64url without padding."""


class KeyRollover(Term):
    """The statement of `key` that the server signs with `successor` from now on."""

    key: PublicKey
    successor: PublicKey
    made_at: Annotated[int, Field(ge=0, lt=2**53)]
    """Unix seconds."""


class SignedKeyRollover(Term):
    """A rollover signed by `key`, like receipts: over its fields with `key_id`."""

    succession: KeyRollover
    key_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{22}$")]
    signature: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{86}$")]


class ServerKeys(Term):
    """The current signing key of a server, and all rollovers, oldest first."""

    server_key: PublicKey
    successions: Annotated[
        tuple[SignedKeyRollover, ...], FailFast(), Field(max_length=MAX_KEY_ROLLOVERS)
    ] = ()


def sign_key_rollover(key: DeviceKey, successor: bytes, made_at: int) -> SignedKeyRollover:
    """Sign the statement by which `key` hands over to the public key `successor` (32 bytes)."""
    succession = KeyRollover(
        key=to_base64url(key.public), successor=to_base64url(successor), made_at=made_at
    )
    signed = sign_document(succession.model_dump(mode="json"), key, context=KEY_ROLLOVER_CONTEXT)
    return SignedKeyRollover(
        succession=succession, key_id=signed["key_id"], signature=signed["signature"]
    )


def verify_key_rollover(signed: SignedKeyRollover) -> tuple[bytes, bytes]:
    """Return the key and its successor; raises InvalidSignature unless that key signed it."""
    key = from_base64url(signed.succession.key, 32)
    document = signed.succession.model_dump(mode="json")
    document |= {"key_id": signed.key_id, "signature": signed.signature}
    verify_document(document, key, context=KEY_ROLLOVER_CONTEXT)
    return key, from_base64url(signed.succession.successor, 32)


def follow_rollovers(
    pinned: bytes, key_id: str, successions: Collection[SignedKeyRollover]
) -> tuple[bytes, ...]:
    """Return the keys after `pinned` (32 bytes), in order, up to the one with id `key_id`.

    Raises InvalidSignature if no chain leads there, or if a key in it names two successors.
    """
    by_key = {each.succession.key: each for each in successions}
    for each in successions:
        if by_key[each.succession.key].succession.successor != each.succession.successor:
            raise InvalidSignature(
                f"the server's key {each.key_id[:22]} names two successors",
                hint="somebody else may have a copy of that key: ask the operator which key is "
                "the server's, and give that one to the device",
            )
    at, former = pinned, list[bytes]()
    while (signed := by_key.pop(to_base64url(at), None)) is not None:
        at = verify_key_rollover(signed)[1]
        former.append(at)
        if key_id_of(at) == key_id:
            return tuple(former)
    raise InvalidSignature(
        f"signed by key {key_id[:22]!r}, which no chain leads to from the pinned key "
        f"{key_id_of(pinned)}",
        hint="if the operator has changed the server's key without a chain, as after a leak, give "
        "the device the new one (server_key)",
    )
