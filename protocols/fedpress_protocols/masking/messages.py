"""Messages of a masked session, as canonical bytes.

The client always initiates. It POSTs its message and GETs, by long poll, the answer of each phase;
an answer is a function of the session's state, so a GET may be repeated at any time.

| phase   | the client sends           | and waits for                        | in the profile |
|---------|----------------------------|--------------------------------------|----------------|
| offer   |                            | `Offer`                              | both           |
| P0      | `Advertise`                | `Roster`                             | both           |
| P1      | `Shares`                   | `Inbox`                              | both           |
| P2      | `MaskedInput` and the body | `Survivors`                          | both           |
| P3      | `Consent`                  | `Consents`                           | malicious      |
| P4      | `Reveal`                   | `Receipt`                            | both           |
| P2      | `Complaint`, and no more   |                                      | both           |
| any     |                            | `Abandoned`, in place of any answer  | both           |

A client's *slot* is its index in the roster, from 0. The *holders* of its secrets are its
neighbours in the session's graph and, where the graph is complete, the client itself.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, ClassVar, Self

from fedpress_protocols.errors import MalformedRequest
from fedpress_protocols.masking.certificates import Certificate
from fedpress_protocols.masking.keys import (
    HYBRID_PUBLIC_BYTES,
    HYBRID_SEAL_BYTES,
    INTRODUCTION_BYTES,
)
from fedpress_protocols.masking.shamir import SHARE_BYTES
from fedpress_protocols.masking.transcript import (
    U32,
    U64,
    UNSIGNED,
    Bytes32,
    CachedBytes,
    Members,
    Reader,
    Record,
    SessionConfig,
    Signature,
    Signed,
    blob,
    digest,
    fixed,
    statement,
    text,
)
from fedpress_protocols.signatures import Content


class Message(Signed):
    """A signed record after one byte, `TAG`, for its kind; `parse` reads any of them."""

    __slots__ = ()
    TAG: ClassVar[int]

    def to_bytes(self) -> bytes:
        return bytes([self.TAG]) + Record.to_bytes(self)

    @classmethod
    def read(cls, reader: Reader) -> Self:
        if (tag := reader.integer(1)) != cls.TAG:
            raise MalformedRequest(f"a message of kind {tag}, expected {cls.TAG} ({cls.NAME})")
        return super().read(reader)


# Messages of the server


@dataclass(frozen=True, slots=True)
class Offer(Message):
    """The start of a session; signed by the server over the configuration alone.

    The driver hands it to clients that have finished training. A client that declines stays silent.
    """

    TAG = 1
    NAME = "offer"

    config: SessionConfig
    signature: Signature = UNSIGNED


@dataclass(frozen=True, slots=True)
class RosterRow(Record):
    """One member of the roster: the key id of its identity, and the digest of its `Advertise`."""

    identity: Annotated[bytes, fixed(16)]
    advertised: Bytes32


@dataclass(frozen=True)
class Listing(CachedBytes):
    """All members of a session, ascending by `identity`, so that the server cannot choose the
    order."""

    rows: tuple[RosterRow, ...]

    @cached_property
    def root(self) -> bytes:
        """A digest of the rows, 32 bytes; part of the session's id."""
        return digest("roster root", b"".join(row.to_bytes() for row in self.rows))


@dataclass(frozen=True, slots=True)
class Roster(Message):
    """The answer of P0: the members. It determines the session's id.

    `entries` holds the `Advertise` of the receiver and of the members with which it shares its
    secrets, in the order of the listing: all of them if the graph is complete. The listing replaces
    the hash tree that secagg+ describes: 48 bytes per client, 480 kB for 10,000, and no proofs. The
    signature is over its root, which is the same for all, and over the entries.
    """

    TAG = 2
    NAME = "roster"

    listing: Listing
    entries: tuple[Advertise, ...]
    signature: Signature = UNSIGNED

    def _statement(self, context: bytes) -> bytes:
        entries = b"".join(entry.to_bytes() for entry in self.entries)
        return statement(self.NAME, context, self.listing.root, entries)


@dataclass(frozen=True, slots=True)
class Inbox(Message):
    """The answer of P1: the set of sharers, and the shares sealed for the receiver.

    `sealed` comes from the receiver's neighbours among `sharers`, in their order. The set U2 is
    frozen: a client masks with these neighbours and no other.
    """

    TAG = 3
    NAME = "inbox"

    sharers: Members
    sealed: tuple[SealedShares, ...]
    signature: Signature = UNSIGNED


@dataclass(frozen=True, slots=True)
class Survivors(Message):
    """The answer of P2: the clients whose masked input is in the sum, U3. Final once sent."""

    TAG = 4
    NAME = "survivors"

    members: Members
    signature: Signature = UNSIGNED


def survivors_digest(members: frozenset[int]) -> bytes:
    """The digest of a set of survivors, as in consents and receipts."""
    return digest("survivor set", b"".join(i.to_bytes(4, "little") for i in sorted(members)))


@dataclass(frozen=True, slots=True)
class Consents(Message):
    """The answer of P3: the consents of those survivors that hold shares of the receiver."""

    TAG = 5
    NAME = "consents"

    consents: tuple[Consent, ...]
    signature: Signature = UNSIGNED


@dataclass(frozen=True, slots=True)
class Receipt(Message):
    """The sum over `members` was unmasked; `aggregate` is the SHA-256 of its bytes by the session's
    packing.

    A client commits its residual only if it is a member; any other client returns its update to the
    residual. Signed over the configuration: a client that never saw the roster can verify it too.
    """

    TAG = 6
    NAME = "receipt"

    session: Bytes32
    members: Members
    aggregate: Bytes32
    signature: Signature = UNSIGNED


@dataclass(frozen=True, slots=True)
class Abandoned(Message):
    """The end of a session without a sum: every client returns its update to the residual."""

    TAG = 7
    NAME = "abandoned"

    reason: Annotated[str, text(512)]
    signature: Signature = UNSIGNED


# Messages of a client


@dataclass(frozen=True)
class Advertise(CachedBytes, Message):
    """P0: the client's keys for this session alone; signed by its identity over the configuration.

    A key is 32 bytes, or 1216 where the configuration is hybrid. `nonce` keeps a server from
    replaying a session: the session's id depends on it.
    """

    TAG = 16
    NAME = "advertise"

    certificate: Certificate
    mask_key: Annotated[bytes, blob(HYBRID_PUBLIC_BYTES)]
    channel_key: Annotated[bytes, blob(HYBRID_PUBLIC_BYTES)]
    nonce: Bytes32
    signature: Signature = UNSIGNED

    @cached_property
    def row(self) -> RosterRow:
        identity = hashlib.sha256(self.certificate.identity).digest()[:16]
        return RosterRow(identity, digest("advertisement", self.to_bytes()))


@dataclass(frozen=True, slots=True)
class SealedShares(Record):
    """One client's message for one holder: a share of each of the sender's two secrets.

    `sealed` is the mask secret's share followed by the seed's, sealed by `ChannelKey.seal`, 96
    bytes or 1184 if hybrid; `introduction` is that of `MaskKey.introduce` for a holder in a higher
    slot, 1136 bytes if hybrid, otherwise empty. The seal covers it.
    """

    sealed: Annotated[bytes, blob(2 * SHARE_BYTES + HYBRID_SEAL_BYTES)]
    introduction: Annotated[bytes, blob(INTRODUCTION_BYTES)]


@dataclass(frozen=True, slots=True)
class Shares(Message):
    """P1: the shares of the client's secrets for its holders other than itself, in order.

    The `commitment` binds the seed of its own mask, so that a wrongly reconstructed seed is
    detected.
    """

    TAG = 17
    NAME = "shares"

    sender: U32
    commitment: Bytes32
    sealed: tuple[SealedShares, ...]
    signature: Signature = UNSIGNED


@dataclass(frozen=True, slots=True)
class MaskedInput(Message):
    """P2: the header of the masked body, which travels beside it.

    `partners` are the slots it is masked with: the sender's neighbours in the inbox's set. `sha256`
    and `length` (bytes) are the body's; the server accepts the input once the whole body is staged.
    """

    TAG = 18
    NAME = "masked input"

    sender: U32
    partners: Members
    sha256: Bytes32
    length: U64
    signature: Signature = UNSIGNED

    @property
    def content(self) -> Content:
        """The required length and digest of the body."""
        return Content(self.sha256, self.length)


@dataclass(frozen=True)
class Consent(CachedBytes, Message):
    """P3: the sender received this set of survivors and helps to unmask no other."""

    TAG = 19
    NAME = "consent"

    sender: U32
    survivors: Bytes32
    signature: Signature = UNSIGNED


@dataclass(frozen=True, slots=True)
class Reveal(Message):
    """P4: one share for every client in U2 whose shares the sender holds, in order: of its own
    mask's seed if it survived, of its mask secret if it did not. Never both."""

    TAG = 20
    NAME = "reveal"

    sender: U32
    survivors: Bytes32
    shares: Annotated[bytes, blob(SHARE_BYTES * 2**14)]
    signature: Signature = UNSIGNED


@dataclass(frozen=True, slots=True)
class Complaint(Message):
    """Sent instead of P2's message: the messages of these neighbours did not open to valid shares.

    The sender masks nothing and leaves the session. It reveals no secret: its channel secret would
    prove who is at fault, but would give the server, which may have forged the seals of an inbox,
    the shares of all others that it holds. So faults are attributed by comparing complaints.
    """

    TAG = 21
    NAME = "complaint"

    sender: U32
    accused: Members
    signature: Signature = UNSIGNED


ServerMessage = Offer | Roster | Inbox | Survivors | Consents | Receipt | Abandoned
ClientMessage = Advertise | Shares | MaskedInput | Consent | Reveal | Complaint
_KINDS: dict[int, type[ServerMessage | ClientMessage]] = {
    kind.TAG: kind
    for kind in (
        *(Offer, Roster, Inbox, Survivors, Consents, Receipt, Abandoned),
        *(Advertise, Shares, MaskedInput, Consent, Reveal, Complaint),
    )
}


def parse(data: bytes) -> ServerMessage | ClientMessage:
    """Parse a message; raises MalformedRequest. Its signature is not verified yet."""
    kind = _KINDS.get(data[0]) if data else None
    if kind is None:
        raise MalformedRequest(f"unknown message tag: {data[:1].hex() or 'no bytes'}")
    return kind.from_bytes(data)
