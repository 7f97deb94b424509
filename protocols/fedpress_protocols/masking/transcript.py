"""Canonical bytes of everything that is signed, sealed or hashed in a masked session.

Everything that two parties of a session must agree on is a `Record`: a frozen dataclass whose
fields define their encoding, so that equal values have equal bytes and other bytes are refused.
Everything that is signed, authenticated or put into a key derivation is a `statement`: a label,
then fields with their lengths, so that no two statements share their bytes. SPEC-masking.md is
normative.
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
"""The placeholder signature of a record that has not been signed yet."""

_DOMAIN = b"fl-sa1/"


def statement(label: str, *parts: bytes) -> bytes:
    """Concatenate `label` and `parts` with their lengths, to be signed, hashed or authenticated.

    No HTTP signature base or signed document starts alike, so one key may sign all three.
    """
    head = _DOMAIN + label.encode() + b"\x00"
    return head + b"".join(len(part).to_bytes(4, "little") + part for part in parts)


def digest(label: str, *parts: bytes) -> bytes:
    """SHA-256 of the statement; 32 bytes."""
    return hashlib.sha256(statement(label, *parts)).digest()


# Bytes and back


class Reader:
    """Reads bytes from the front of `data`; raises MalformedRequest at its end."""

    def __init__(self, data: bytes) -> None:
        self._data = bytes(data)
        self._at = 0

    def take(self, count: int) -> bytes:
        end = self._at + count
        if end > len(self._data):
            raise MalformedRequest(
                f"expected {count} bytes at offset {self._at}, but there are only "
                f"{len(self._data)} in all"
            )
        data = self._data[self._at : end]
        self._at = end
        return data

    def integer(self, size: int) -> int:
        return int.from_bytes(self.take(size), "little")

    def finish(self) -> None:
        if rest := len(self._data) - self._at:
            raise MalformedRequest(f"{rest} unexpected bytes at offset {self._at}")


@dataclass(frozen=True, slots=True)
class Codec(Generic[T]):
    """The encoding of a field: `write` returns bytes, `read` consumes them."""

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
            raise MalformedRequest(f"{len(value)} bytes, expected {size}")
        return bytes(value)

    return Codec(write, lambda reader: reader.take(size))


def blob(at_most: int = 2**31) -> Codec[bytes]:
    """A length of 4 bytes, then that many bytes."""

    def checked(length: int) -> int:
        if length > at_most:
            raise MalformedRequest(f"a field of {length} bytes; at most {at_most} are allowed")
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
            raise MalformedRequest("a text that cannot be encoded as UTF-8") from exc

    def read(reader: Reader) -> str:
        try:
            return inner.read(reader).decode()
        except UnicodeDecodeError as exc:
            raise MalformedRequest("a text that is not valid UTF-8") from exc

    return Codec(write, read)


def choice(*names: str) -> Codec[str]:
    """One of `names`, encoded as its index; 1 byte."""

    def write(value: str) -> bytes:
        if value not in names:
            raise MalformedRequest(f"{value!r} is not one of {', '.join(names)}")
        return bytes([names.index(value)])

    def read(reader: Reader) -> str:
        place = reader.integer(1)
        if place >= len(names):
            raise MalformedRequest(f"choice {place}; {len(names)} choices are known")
        return names[place]

    return Codec(write, read)


def many(inner: Codec[T], at_most: int = 2**16) -> Codec[tuple[T, ...]]:
    """A count of 4 bytes, then that many items."""

    def checked(count: int) -> int:
        if count > at_most:
            raise MalformedRequest(f"{count} items; at most {at_most} are allowed")
        return count

    def write(values: tuple[T, ...]) -> bytes:
        head = checked(len(values)).to_bytes(4, "little")
        return head + b"".join(inner.write(value) for value in values)

    def read(reader: Reader) -> tuple[T, ...]:
        return tuple(inner.read(reader) for _ in range(checked(reader.integer(4))))

    return Codec(write, read)


@lru_cache(maxsize=8)  # the same sets are sent to every client
def _bits(value: frozenset[int]) -> bytes:
    count = max(value, default=-1) + 1
    packed = bytearray(-(-count // 8))
    for index in value:
        packed[index // 8] |= 1 << index % 8
    return bytes(packed)


def _indices(packed: bytes) -> frozenset[int]:
    if packed and not packed[-1]:
        raise MalformedRequest("a bit set with a zero byte at its end")
    return frozenset(
        8 * place + bit for place, byte in enumerate(packed) for bit in range(8) if byte >> bit & 1
    )


_BITS = blob(2**13)
BITSET: Codec[frozenset[int]] = Codec(
    lambda value: _BITS.write(_bits(value)), lambda reader: _indices(_BITS.read(reader))
)
"""A set of small integers: bit i % 8 of byte i // 8 represents i; no zero byte at the end."""

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
    """Base of frozen dataclasses with canonical bytes: the fields in order.

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
        """Parse a record; raises MalformedRequest, also for trailing bytes."""
        reader = Reader(data)
        record = cls.read(reader)
        reader.finish()
        return record

    @classmethod
    def codec(cls) -> Codec[Self]:
        return Codec(lambda record: record.to_bytes(), cls.read)


class CachedBytes(Record):
    """Base of records that are serialized for many receivers: the bytes are computed once. Must
    precede other bases, in a dataclass without slots."""

    def to_bytes(self) -> bytes:
        return self._bytes

    @cached_property
    def _bytes(self) -> bytes:
        return super().to_bytes()


class Signed(Record):
    """A record that ends with an Ed25519 signature of all previous fields, under `NAME` and a
    context.

    The context identifies the session of the record: the digest of its configuration, or the
    session's id once there is one. Subclasses end with a field `signature`.
    """

    __slots__ = ()
    signature: bytes

    def signed(self, key: DeviceKey, context: bytes) -> Self:
        """Return the record signed with `key`."""
        signature = key.sign(self._statement(context))
        signed: Self = replace(cast(Any, self), signature=signature)
        return signed

    def verify(self, public_key: bytes, context: bytes) -> None:
        """Raise InvalidSignature unless `public_key` signed this record in this context."""
        verify_signature(public_key, self._statement(context), self.signature)

    def _statement(self, context: bytes) -> bytes:
        return statement(self.NAME, context, self.to_bytes()[:-SIGNATURE_BYTES])


_Field = tuple[str, Callable[[Any], bytes], Callable[[Reader], Any]]
_CODECS: dict[Any, tuple[_Field, ...]] = {}


def _codecs(cls: type[Record]) -> tuple[_Field, ...]:
    cached = _CODECS.get(cls)
    if cached is None:
        hints = get_type_hints(cls, include_extras=True)
        codecs = [(each.name, _codec_of(hints[each.name])) for each in fields(cast(Any, cls))]
        cached = tuple((name, codec.write, codec.read) for name, codec in codecs)
        _CODECS[cls] = cached
    return cached


def _codec_of(hint: Any) -> Codec[Any]:
    for extra in getattr(hint, "__metadata__", ()):
        if isinstance(extra, Codec):
            return extra
    if isinstance(hint, type) and issubclass(hint, Record):
        return hint.codec()
    items = [item for item in get_args(hint) if item is not Ellipsis]
    return many(_codec_of(items[0]))


# The configuration of a session

MAX_CLIENTS = 10_000
VERSION = 1
RULE = 1
"""The first rule for graph, degree and threshold."""
SPREAD_RULE = 2
"""The rule of sessions that may exceed 128 clients against a malicious server: above 128, the graph
is spread over the whole ring. Devices that only know the first rule refuse it."""


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
    """Timeout of each phase in whole seconds, at least 1."""

    advertise: U32 = 30
    share: U32 = 30
    mask: U32 = 120
    consent: U32 = 30
    reveal: U32 = 30


@dataclass(frozen=True)
class SessionConfig(Record):
    """Everything that the parties of a session agree on before it starts; `digest` binds it into
    every key, signature and mask.

    `model`, `support` and `plan` are the digests of the base model, of the sent coordinates and of
    the round's plan, which includes scales, clipping and noise. `corrupt` and
    `dropout` are the caps that `graph.parameters` takes, in parts of 10,000: degree and threshold
    are computed from them and the roster, never transmitted. Raises IncompatiblePlan for another
    version, or invalid numbers of clients.
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
    """Minimum number of survivors for unmasking, and so of clients."""
    maximum: U32
    """Maximum number of clients; determines the width of lanes."""
    expires: U64
    """Unix seconds at which the session expires for clients."""
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
                f"a session of version {self.version}, rule {self.rule}; supported are version "
                f"{VERSION} "
                f"and the rules {RULE} and {SPREAD_RULE}",
                hint="upgrade the older of the two ends",
            )
        if self.rule != (expected := rule_of(self.adversary, self.maximum)):
            raise IncompatiblePlan(
                f"rule {self.rule} for up to {self.maximum} clients, {self.adversary} profile, "
                f"expected rule {expected}",
                hint="upgrade the server: under the first rule a malicious server can open the "
                "sum of a part of a large cohort"
                if expected == SPREAD_RULE
                else "",
            )
        if not 2 <= self.minimum <= self.maximum <= MAX_CLIENTS:
            raise IncompatiblePlan(
                f"{self.minimum} to {self.maximum} clients, expected a range within [2, "
                f"{MAX_CLIENTS}]"
            )
        if self.least(self.maximum) > self.maximum:
            raise IncompatiblePlan(
                f"a share of {self.corrupt / 1e4:g} corrupt of {self.maximum} clients leaves "
                "fewer than two honest",
                hint="enlarge the cohort",
            )

    @cached_property
    def digest(self) -> bytes:
        """32 bytes; called cfg_hash in the specification."""
        return digest("cfg", self.to_bytes())

    @cached_property
    def packing(self) -> Packing:
        """The packing of the vectors into words and a body; raises IncompatiblePlan if sums of
        `maximum` clients do not fit."""
        return Packing.of(
            [Bounded(each.name, each.length, each.bound) for each in self.vectors], self.maximum
        )

    def least(self, n: int) -> int:
        """Minimum survivors of a roster of `n` for unmasking: `minimum`, and enough that two are
        honest with the maximum of corrupt ones."""
        return max(self.minimum, self.corrupt * n // 10_000 + 2)

    def honest(self, n: int) -> int:
        """Minimum honest clients, of a roster of `n`, in any sum, whatever the server claims about
        the survivors and with the maximum of corrupt clients."""
        sure = self.parameters(n).honest
        return sure or self.least(n) - self.corrupt * n // 10_000

    def session_id(self, roster_root: bytes) -> bytes:
        """The session's id, 32 bytes, from this configuration and all keys; each client computes
        it."""
        return digest("sid", self.digest, roster_root)

    def parameters(self, n: int) -> Parameters:
        """Degree and threshold for a roster of `n` clients; raises IncompatiblePlan."""
        return parameters(
            n, corrupt=self.corrupt / 1e4, dropout=self.dropout / 1e4, adversary=self.adversary
        )


@dataclass(frozen=True, slots=True)
class Topology:
    """The graph of secret sharing among the `n` clients of a session, by slots from 0."""

    n: int
    degree: int
    threshold: int
    seed: bytes
    is_spread: bool = False

    @classmethod
    def of(cls, config: SessionConfig, n: int, sid: bytes) -> Topology:
        """Compute the topology, as each party does; raises IncompatiblePlan if no graph is safe."""
        parameters, is_spread = config.parameters(n), config.rule == SPREAD_RULE
        return cls(n, parameters.degree, parameters.threshold, digest("graph", sid), is_spread)

    @property
    def is_complete(self) -> bool:
        return self.degree == self.n - 1

    def neighbours(self, slot: int) -> tuple[int, ...]:
        """The slots with which `slot` masks, ascending."""
        if self.is_complete:
            return tuple(other for other in range(self.n) if other != slot)
        row = neighbours_of(slot, self.n, self.degree, self.seed, is_spread=self.is_spread)
        return tuple(row.tolist())

    def holders(self, slot: int) -> tuple[int, ...]:
        """The slots that hold shares of `slot`'s secrets, ascending; holder i has the share of
        x = i + 1.

        The relation is symmetric. In a complete graph a client is among its own holders: it
        reveals its share of its own mask's seed if it survived.
        """
        return tuple(range(self.n)) if self.is_complete else self.neighbours(slot)
