"""What is signed, sealed and hashed in a masked session: one spelling for every value.

Everything that two parties of a session must agree on is a `Record`: a frozen dataclass whose
fields say how they are written, so that equal values are equal bytes and other bytes are refused.
Everything that is signed, authenticated or put into a key derivation is a `statement`: a label,
then fields with their lengths, so that no two statements share their bytes. SPEC-masking.md is the
norm.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import Annotated, Any, ClassVar, Generic, Self, TypeVar, cast, get_args, get_type_hints

from fedpress_protocols.errors import IncompatiblePlan, MalformedRequest
from fedpress_protocols.masking.graph import (
    COMPLETE_UP_TO,
    Adversary,
    Parameters,
    neighbours_of,
    parameters,
)
from fedpress_protocols.masking.keystream import SUITES, Suite
from fedpress_protocols.masking.ring import Bounded, Packing
from fedpress_protocols.signatures import DeviceKey, verify_signature

T = TypeVar("T")

SIGNATURE_BYTES = 64
UNSIGNED = bytes(SIGNATURE_BYTES)
"""What stands for the signature of a record that is yet to be signed."""

_DOMAIN = b"fl-sa1/"


def statement(label: str, *parts: bytes) -> bytes:
    """`parts` under `label`, each with its length: what is signed, hashed or authenticated.

    It begins like no HTTP signature base and no signed document, so a key may sign all three.
    """
    head = _DOMAIN + label.encode() + b"\x00"
    return head + b"".join(len(part).to_bytes(4, "little") + part for part in parts)


def digest(label: str, *parts: bytes) -> bytes:
    """SHA-256 of the statement; 32 bytes."""
    return hashlib.sha256(statement(label, *parts)).digest()


# Bytes and back


class Reader:
    """Takes bytes from the front of `data`; raises MalformedRequest where they run out."""

    def __init__(self, data: bytes) -> None:
        self._data = bytes(data)
        self._at = 0

    def take(self, count: int) -> bytes:
        end = self._at + count
        if end > len(self._data):
            raise MalformedRequest(
                f"{count} bytes are due at offset {self._at} where {len(self._data)} are in all"
            )
        taken = self._data[self._at : end]
        self._at = end
        return taken

    def integer(self, size: int) -> int:
        return int.from_bytes(self.take(size), "little")

    def finish(self) -> None:
        if left := len(self._data) - self._at:
            raise MalformedRequest(f"{left} bytes are left over at offset {self._at}")


@dataclass(frozen=True, slots=True)
class Codec(Generic[T]):
    """How a field is written: `write` gives bytes, `read` takes them."""

    write: Callable[[T], bytes]
    read: Callable[[Reader], T]


def unsigned(size: int) -> Codec[int]:
    """An integer of [0, 256**size), little-endian."""

    def write(value: int) -> bytes:
        if not 0 <= value < 256**size:
            raise MalformedRequest(f"{value} does not fit {size} bytes")
        return value.to_bytes(size, "little")

    return Codec(write, lambda reader: reader.integer(size))


def fixed(size: int) -> Codec[bytes]:
    """Exactly `size` bytes, without a length."""

    def write(value: bytes) -> bytes:
        if len(value) != size:
            raise MalformedRequest(f"{len(value)} bytes where {size} are due")
        return bytes(value)

    return Codec(write, lambda reader: reader.take(size))


def blob(at_most: int = 2**31) -> Codec[bytes]:
    """A length of 4 bytes, then as many."""

    def checked(length: int) -> int:
        if length > at_most:
            raise MalformedRequest(f"a field of {length} bytes where {at_most} are allowed")
        return length

    def write(value: bytes) -> bytes:
        return checked(len(value)).to_bytes(4, "little") + value

    return Codec(write, lambda reader: reader.take(checked(reader.integer(4))))


def text(at_most: int = 64) -> Codec[str]:
    """UTF-8 of at most `at_most` bytes, with its length."""
    inner = blob(at_most)

    def write(value: str) -> bytes:
        try:
            return inner.write(value.encode())
        except UnicodeEncodeError as exc:
            raise MalformedRequest("a text that has no UTF-8") from exc

    def read(reader: Reader) -> str:
        try:
            return inner.read(reader).decode()
        except UnicodeDecodeError as exc:
            raise MalformedRequest("a text that is not UTF-8") from exc

    return Codec(write, read)


def choice(*names: str) -> Codec[str]:
    """One of `names`, as its place among them; 1 byte."""

    def write(value: str) -> bytes:
        if value not in names:
            raise MalformedRequest(f"{value!r} is none of {', '.join(names)}")
        return bytes([names.index(value)])

    def read(reader: Reader) -> str:
        place = reader.integer(1)
        if place >= len(names):
            raise MalformedRequest(f"choice {place} where {len(names)} are known")
        return names[place]

    return Codec(write, read)


def many(inner: Codec[T], at_most: int = 2**16) -> Codec[tuple[T, ...]]:
    """A count of 4 bytes, then as many."""

    def checked(count: int) -> int:
        if count > at_most:
            raise MalformedRequest(f"{count} items where {at_most} are allowed")
        return count

    def write(values: tuple[T, ...]) -> bytes:
        head = checked(len(values)).to_bytes(4, "little")
        return head + b"".join(inner.write(value) for value in values)

    def read(reader: Reader) -> tuple[T, ...]:
        return tuple(inner.read(reader) for _ in range(checked(reader.integer(4))))

    return Codec(write, read)


@lru_cache(maxsize=8)  # the same sets are told to every client
def _bits(value: frozenset[int]) -> bytes:
    count = max(value, default=-1) + 1
    packed = bytearray(-(-count // 8))
    for index in value:
        packed[index // 8] |= 1 << index % 8
    return bytes(packed)


def _indices(packed: bytes) -> frozenset[int]:
    if packed and not packed[-1]:
        raise MalformedRequest("a set of bits with an empty byte at its end")
    return frozenset(
        8 * place + bit for place, byte in enumerate(packed) for bit in range(8) if byte >> bit & 1
    )


_BITS = blob(2**13)
BITSET: Codec[frozenset[int]] = Codec(
    lambda value: _BITS.write(_bits(value)), lambda reader: _indices(_BITS.read(reader))
)
"""A set of small integers: bit i % 8 of byte i // 8 stands for i; no empty byte at the end."""

Flag = Annotated[bool, Codec(lambda flag: bytes([flag]), lambda reader: _flag(reader))]
U16 = Annotated[int, unsigned(2)]
U32 = Annotated[int, unsigned(4)]
U64 = Annotated[int, unsigned(8)]
Bytes32 = Annotated[bytes, fixed(32)]
Signature = Annotated[bytes, fixed(SIGNATURE_BYTES)]
Text = Annotated[str, text()]
Members = Annotated[frozenset[int], BITSET]


def _flag(reader: Reader) -> bool:
    value = reader.integer(1)
    if value > 1:
        raise MalformedRequest(f"a flag of {value}")
    return bool(value)


class Record:
    """Base of frozen dataclasses that are their canonical bytes: the fields in order.

    Every field is `Annotated` with its Codec, or is a Record or a tuple of Records itself.
    """

    __slots__ = ()
    NAME: ClassVar[str] = ""
    """The label under which the record is hashed or signed."""

    def to_bytes(self) -> bytes:
        return b"".join([write(getattr(self, name)) for name, write, _ in _codecs(type(self))])

    @classmethod
    def read(cls, reader: Reader) -> Self:
        return cls(*[read(reader) for _, _, read in _codecs(cls)])

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """The one record with these bytes; raises MalformedRequest, for left-over bytes too."""
        reader = Reader(data)
        record = cls.read(reader)
        reader.finish()
        return record

    @classmethod
    def codec(cls) -> Codec[Self]:
        return Codec(lambda record: record.to_bytes(), cls.read)


class CachedBytes(Record):
    """Base of records that are written again and again, for everybody that they concern: the bytes
    are made once. Comes before other bases, and is a dataclass without slots."""

    def to_bytes(self) -> bytes:
        return self._bytes

    @cached_property
    def _bytes(self) -> bytes:
        return super().to_bytes()


class Signed(Record):
    """A record that ends with an Ed25519 signature of all before it, under `NAME` and a context.

    The context says to which session the record belongs: the digest of its configuration, or the
    session's id once there is one. Subclasses end with a field `signature`.
    """

    __slots__ = ()
    signature: bytes

    def signed(self, key: DeviceKey, context: bytes) -> Self:
        """The same record with `key`'s signature."""
        signature = key.sign(self._statement(context))
        signed: Self = replace(cast(Any, self), signature=signature)
        return signed

    def verify(self, public_key: bytes, context: bytes) -> None:
        """Raises InvalidSignature unless `public_key` signed this record in this context."""
        verify_signature(public_key, self._statement(context), self.signature)

    def _statement(self, context: bytes) -> bytes:
        return statement(self.NAME, context, self.to_bytes()[:-SIGNATURE_BYTES])


_Field = tuple[str, Callable[[Any], bytes], Callable[[Reader], Any]]
_CODECS: dict[Any, tuple[_Field, ...]] = {}


def _codecs(cls: type[Record]) -> tuple[_Field, ...]:
    found = _CODECS.get(cls)
    if found is None:
        hints = get_type_hints(cls, include_extras=True)
        codecs = [(each.name, _codec_of(hints[each.name])) for each in fields(cast(Any, cls))]
        found = tuple((name, codec.write, codec.read) for name, codec in codecs)
        _CODECS[cls] = found
    return found


def _codec_of(hint: Any) -> Codec[Any]:
    for extra in getattr(hint, "__metadata__", ()):
        if isinstance(extra, Codec):
            return extra
    if isinstance(hint, type) and issubclass(hint, Record):
        return hint.codec()
    items = [item for item in get_args(hint) if item is not Ellipsis]
    return many(_codec_of(items[0]))


# What a session is about

MAX_CLIENTS = 10_000
VERSION = 1
RULE = 1
"""Which rule gives graph, degree and threshold: the first."""
SPREAD_RULE = 2
"""Of sessions of more than 128 clients at most against a deviating server: above 128, the graph is
spread over the whole ring. Devices that know the first rule alone refuse it."""


def rule_of(adversary: Adversary, maximum: int) -> int:
    """The rule of sessions of this profile with up to `maximum` clients."""
    return SPREAD_RULE if adversary == "malicious" and maximum > COMPLETE_UP_TO else RULE


@dataclass(frozen=True, slots=True)
class VectorSpec(Record):
    """A named vector of the sum: `length` integers, each client's in [-bound, bound]."""

    name: Text
    length: U32
    bound: U64


@dataclass(frozen=True, slots=True)
class PhaseSeconds(Record):
    """How long the server waits in each phase, at most; whole seconds, at least 1."""

    advertise: U32 = 30
    share: U32 = 30
    mask: U32 = 120
    consent: U32 = 30
    reveal: U32 = 30


@dataclass(frozen=True)
class SessionConfig(Record):
    """All that the parties of a session agree on before it begins; `digest` binds it into every
    key, signature and mask.

    `model`, `support` and `plan` are the digests of the model trained from, of the coordinates
    that are sent and of the round's plan, with scales, clipping and noise in it. `corrupt` and
    `dropout` are the caps that `graph.parameters` takes, in parts of 10,000: degree and threshold
    follow from them and the roster, and nobody states them. Raises IncompatiblePlan for another
    version, or numbers of clients that make no sense.
    """

    population: Text
    task: Text
    round: U32
    attempt: U32
    server_key: Bytes32
    server_nonce: Bytes32
    model: Bytes32
    support: Bytes32
    plan: Bytes32
    vectors: tuple[VectorSpec, ...]
    minimum: U32
    """Survivors without whom nothing is unmasked, and so the least number of clients."""
    maximum: U32
    """Clients at most, whose values have room in a lane."""
    expires: U64
    """Unix seconds after which no client takes part in any phase."""
    adversary: Annotated[Adversary, choice("semi-honest", "malicious")] = "malicious"
    corrupt: U16 = 1_000
    dropout: U16 = 500
    suite: Annotated[Suite, choice(*SUITES)] = "chacha20"
    hybrid: Flag = False
    seconds: PhaseSeconds = PhaseSeconds()
    version: U16 = VERSION
    rule: U16 = RULE

    def __post_init__(self) -> None:
        if self.version != VERSION or self.rule not in (RULE, SPREAD_RULE):
            raise IncompatiblePlan(
                f"a session of version {self.version}, rule {self.rule}, where version {VERSION} "
                f"and the rules {RULE} and {SPREAD_RULE} are spoken",
                hint="upgrade the older of the two ends",
            )
        if self.rule != (due := rule_of(self.adversary, self.maximum)):
            raise IncompatiblePlan(
                f"rule {self.rule} for up to {self.maximum} clients, {self.adversary} profile, "
                f"where rule {due} is due",
                hint="upgrade the server: by the first rule a server that deviates can open the "
                "sum of a part of a large cohort"
                if due == SPREAD_RULE
                else "",
            )
        if not 2 <= self.minimum <= self.maximum <= MAX_CLIENTS:
            raise IncompatiblePlan(
                f"{self.minimum} to {self.maximum} clients, not within 2 and {MAX_CLIENTS}"
            )
        if self.least(self.maximum) > self.maximum:
            raise IncompatiblePlan(
                f"{self.corrupt / 1e4:g} of {self.maximum} clients corrupt leave fewer than two",
                hint="enlarge the cohort",
            )

    @cached_property
    def digest(self) -> bytes:
        """32 bytes; called cfg_hash in the specification."""
        return digest("cfg", self.to_bytes())

    @cached_property
    def packing(self) -> Packing:
        """How the vectors lie in words and in a body; raises IncompatiblePlan where sums of
        `maximum` clients have no room."""
        return Packing.of(
            [Bounded(each.name, each.length, each.bound) for each in self.vectors], self.maximum
        )

    def least(self, n: int) -> int:
        """Survivors, of a roster of `n`, without whom no sum is unmasked: `minimum`, and two honest
        ones where as many are corrupt as may be."""
        return max(self.minimum, self.corrupt * n // 10_000 + 2)

    def honest(self, n: int) -> int:
        """Honest clients, of a roster of `n`, that every sum is of at least, whatever the server
        says of the survivors and as many being corrupt as may be."""
        sure = self.parameters(n).honest
        return sure or self.least(n) - self.corrupt * n // 10_000

    def session_id(self, roster_root: bytes) -> bytes:
        """32 bytes, of this configuration and of everybody's keys; each client finds it itself."""
        return digest("sid", self.digest, roster_root)

    def parameters(self, n: int) -> Parameters:
        """Degree and threshold for a roster of `n` clients; raises IncompatiblePlan."""
        return parameters(
            n, corrupt=self.corrupt / 1e4, dropout=self.dropout / 1e4, adversary=self.adversary
        )


@dataclass(frozen=True, slots=True)
class Topology:
    """Who shares with whom among the `n` clients of a session, by their slots, from 0."""

    n: int
    degree: int
    threshold: int
    seed: bytes
    is_spread: bool = False

    @classmethod
    def of(cls, config: SessionConfig, n: int, sid: bytes) -> Topology:
        """Each party finds it itself; raises IncompatiblePlan where no graph is safe."""
        found, is_spread = config.parameters(n), config.rule == SPREAD_RULE
        return cls(n, found.degree, found.threshold, digest("graph", sid), is_spread)

    @property
    def is_complete(self) -> bool:
        return self.degree == self.n - 1

    def neighbours(self, slot: int) -> tuple[int, ...]:
        """With whom `slot` masks, rising."""
        if self.is_complete:
            return tuple(other for other in range(self.n) if other != slot)
        row = neighbours_of(slot, self.n, self.degree, self.seed, is_spread=self.is_spread)
        return tuple(row.tolist())

    def holders(self, slot: int) -> tuple[int, ...]:
        """Who holds a share of `slot`'s secrets, rising; the one at place i has that of x = i + 1.

        Whose shares a client holds, those hold its own. In a complete graph a client is among its
        own holders: it gives its share of its own mask's seed where it survived.
        """
        return tuple(range(self.n)) if self.is_complete else self.neighbours(slot)
