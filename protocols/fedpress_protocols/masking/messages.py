"""What the two ends of a masked session say to each other, as canonical bytes.

A client always initiates. It POSTs what is its to send and GETs, by long poll, the answer of each
phase; an answer is a function of the session's state, so a GET may be repeated at any time.

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

A client's *slot* is its place in the roster, from 0. The *holders* of its secrets are its
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
    """A signed record behind one byte, `TAG`, that says which; `parse` reads any of them."""

    __slots__ = ()
    TAG: ClassVar[int]

    def to_bytes(self) -> bytes:
        return bytes([self.TAG]) + Record.to_bytes(self)

    @classmethod
    def read(cls, reader: Reader) -> Self:
        if (tag := reader.integer(1)) != cls.TAG:
            raise MalformedRequest(f"a message of kind {tag} where {cls.TAG} ({cls.NAME}) is due")
        return super().read(reader)


# What the server says


@dataclass(frozen=True, slots=True)
class Offer(Message):
    """A session opens; signed by the server over the configuration alone.

    A driver hands it to clients that have finished training. A client that does not take part says
    nothing.
    """

    TAG = 1
    NAME = "offer"

    config: SessionConfig
    signature: Signature = UNSIGNED


@dataclass(frozen=True, slots=True)
class Row(Record):
    """One member of the roster: the key id of its identity, and the digest of its `Advertise`."""

    identity: Annotated[bytes, fixed(16)]
    advertised: Bytes32


@dataclass(frozen=True)
class Listing(CachedBytes):
    """All members of a session, rising by `identity`: the server has no freedom in their order."""

    rows: tuple[Row, ...]

    @cached_property
    def root(self) -> bytes:
        """A digest of the rows, 32 bytes: what the session's id binds."""
        return digest("roster root", b"".join(row.to_bytes() for row in self.rows))


@dataclass(frozen=True, slots=True)
class Roster(Message):
    """P0's answer: who takes part. The session's id follows from it.

    Of the members that the receiver shares its secrets with and of itself, `entries` holds the
    `Advertise` in the order of the listing: all of them where the graph is complete. The listing
    stands in for the hash tree that secagg+ describes: 48 bytes a client, 480 kB at 10,000, and no
    proofs. The signature is over its root, which is the same for all, and over the entries.
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
    """P1's answer: who shared, for all, and what was sealed for the receiver.

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
    """P2's answer: whose masked input is in the sum, U3. Frozen: there is never another."""

    TAG = 4
    NAME = "survivors"

    members: Members
    signature: Signature = UNSIGNED


def survivors_digest(members: frozenset[int]) -> bytes:
    """What clients consent to, and what a receipt repeats."""
    return digest("survivor set", b"".join(i.to_bytes(4, "little") for i in sorted(members)))


@dataclass(frozen=True, slots=True)
class Consents(Message):
    """P3's answer: which survivors put their name to the same set, as far as they are holders of
    the receiver's secrets."""

    TAG = 5
    NAME = "consents"

    consents: tuple[Consent, ...]
    signature: Signature = UNSIGNED


@dataclass(frozen=True, slots=True)
class Receipt(Message):
    """The sum over `members` was unmasked; `aggregate` is the SHA-256 of its bytes by the session's
    packing.

    A client commits its residual if it is a member, and only then; a client that is not takes its
    update back. Signed over the configuration: a client that never saw the roster can check it too.
    """

    TAG = 6
    NAME = "receipt"

    session: Bytes32
    members: Members
    aggregate: Bytes32
    signature: Signature = UNSIGNED


@dataclass(frozen=True, slots=True)
class Abandoned(Message):
    """The session is over without a sum: every update goes back to its client."""

    TAG = 7
    NAME = "abandoned"

    reason: Annotated[str, text(512)]
    signature: Signature = UNSIGNED


# What a client says


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
    def row(self) -> Row:
        identity = hashlib.sha256(self.certificate.identity).digest()[:16]
        return Row(identity, digest("advertisement", self.to_bytes()))


@dataclass(frozen=True, slots=True)
class SealedShares(Record):
    """What one client has for one holder: a share of each of the sender's two secrets.

    `sealed` is what `ChannelKey.seal` makes of the mask secret's share and then the seed's, 96
    bytes or 1184; `introduction` is what `MaskKey.introduce` gives for a holder in a higher slot,
    1136 bytes where the configuration is hybrid, and empty otherwise. The seal covers it.
    """

    sealed: Annotated[bytes, blob(2 * SHARE_BYTES + HYBRID_SEAL_BYTES)]
    introduction: Annotated[bytes, blob(INTRODUCTION_BYTES)]


@dataclass(frozen=True, slots=True)
class Shares(Message):
    """P1: the client's secrets in shares, for its holders but itself, in their order.

    The `commitment` binds the seed of its own mask, so that a seed put together wrongly is noticed.
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

    `partners` are those it is masked with: the sender's neighbours in the inbox's set. `sha256` and
    `length`, in bytes, are the body's; the server counts the input in when all of it lies staged.
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
        """What the body must turn out to be."""
        return Content(self.sha256, self.length)


@dataclass(frozen=True)
class Consent(CachedBytes, Message):
    """P3: the sender saw this survivor set, and will help to unmask no other."""

    TAG = 19
    NAME = "consent"

    sender: U32
    survivors: Bytes32
    signature: Signature = UNSIGNED


@dataclass(frozen=True, slots=True)
class Reveal(Message):
    """P4: of every client in U2 whose holder the sender is, in their order, one share: of its
    own mask's seed if it survived, of its mask secret if it did not. Never both."""

    TAG = 20
    NAME = "reveal"

    sender: U32
    survivors: Bytes32
    shares: Annotated[bytes, blob(SHARE_BYTES * 2**14)]
    signature: Signature = UNSIGNED


@dataclass(frozen=True, slots=True)
class Complaint(Message):
    """In place of P2's message: what these neighbours sealed for the sender opens to no shares.

    The sender masks nothing and takes no further part. It tells no secret: its channel secret would
    prove who is at fault, and would give the server, who may have forged the seals of an inbox, the
    shares of everybody else that it holds. So who is at fault shows in who fails with whom.
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
    """The message with these bytes; raises MalformedRequest. Nothing in it is believed yet."""
    kind = _KINDS.get(data[0]) if data else None
    if kind is None:
        raise MalformedRequest(f"no message begins with {data[:1].hex() or 'nothing'}")
    return kind.from_bytes(data)
