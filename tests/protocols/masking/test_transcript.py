"""One spelling for every value: what is not canonical is refused, what differs binds apart."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpress_protocols.errors import (
    ConfigurationError,
    FedpressError,
    IncompatiblePlan,
    InvalidSignature,
    MalformedRequest,
)
from fedpress_protocols.masking.messages import (
    Abandoned,
    Advertise,
    Inbox,
    Listing,
    Offer,
    Roster,
    SealedShares,
    parse,
    survivors_digest,
)
from fedpress_protocols.masking.transcript import (
    BITSET,
    U16,
    Bytes32,
    Flag,
    Members,
    PhaseSeconds,
    Reader,
    Record,
    SessionConfig,
    Text,
    Topology,
    VectorSpec,
    blob,
    choice,
    digest,
    statement,
)
from tests.protocols.masking.session import (
    AUTHORITY,
    MODEL,
    PLAN,
    POPULATION,
    SERVER,
    START,
    SUPPORT,
    certificate,
    config,
    identity,
)


@dataclass(frozen=True, slots=True)
class Item(Record):
    number: U16
    name: Text


@dataclass(frozen=True, slots=True)
class Everything(Record):
    key: Bytes32
    kind: Annotated[str, choice("one", "two")]
    is_set: Flag
    members: Members
    items: tuple[Item, ...]
    data: Annotated[bytes, blob(16)]


items = st.builds(Item, st.integers(0, 65_535), st.text(max_size=16))
records = st.builds(
    Everything,
    st.binary(min_size=32, max_size=32),
    st.sampled_from(["one", "two"]),
    st.booleans(),
    st.frozensets(st.integers(0, 300), max_size=20),
    st.lists(items, max_size=4).map(tuple),
    st.binary(max_size=16),
)


@given(records)
def test_a_record_is_its_bytes_and_back(record: Everything) -> None:
    assert Everything.from_bytes(record.to_bytes()) == record


@given(records, st.data())
def test_no_other_bytes_are_taken_for_the_same_record(record: Everything, data: Any) -> None:
    """Whatever is read is what is written: there is one spelling."""
    good = bytearray(record.to_bytes())
    good[data.draw(st.integers(0, len(good) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        read = Everything.from_bytes(bytes(good))
    except MalformedRequest:
        return
    assert read != record
    assert read.to_bytes() == bytes(good)


@given(records, st.integers(1, 40))
def test_what_is_short_or_long_is_refused(record: Everything, count: int) -> None:
    good = record.to_bytes()
    with pytest.raises(MalformedRequest, match="bytes at offset"):
        Everything.from_bytes(good[:-count])
    with pytest.raises(MalformedRequest, match="unexpected bytes"):
        Everything.from_bytes(good + bytes(count))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"key": bytes(31)}, "31 bytes, expected 32"),
        ({"kind": "three"}, "not one of one, two"),
        ({"data": bytes(17)}, "17 bytes; at most 16"),
        ({"items": (Item(65_536, ""),)}, "does not fit 2 bytes"),
        ({"items": (Item(-1, ""),)}, "does not fit 2 bytes"),
        ({"items": (Item(0, "x" * 65),)}, "65 bytes; at most 64"),
        ({"items": (Item(0, "\ud800"),)}, "cannot be encoded as UTF-8"),
        ({"items": (Item(0, ""),) * 65_537}, "65537 items"),
    ],
)
def test_what_has_no_room_is_not_written(changes: dict[str, Any], why: str) -> None:
    record = Everything(bytes(32), "one", False, frozenset(), (), b"")
    with pytest.raises(MalformedRequest, match=why):
        replace(record, **changes).to_bytes()


@pytest.mark.parametrize(
    ("head", "why"),
    [
        (b"\x02", "choice 2; 2 choices"),
        (b"\x01\x02", "a flag of 2"),
        (b"\x01\x01\x01\0\0\0\x00", "zero byte at its end"),
        (b"\x01\x01\x01\x30\0\0", "field of 12289 bytes"),
        (b"\x01\x01\0\0\0\0\x01\0\0\0\0\0\x01\0\0\0\xff", "not valid UTF-8"),
        (b"\x01\x01\0\0\0\0\0\0\x02\0", "131072 items"),
    ],
)
def test_what_is_not_canonical_is_refused(head: bytes, why: str) -> None:
    with pytest.raises(MalformedRequest, match=why):
        Everything.from_bytes(bytes(32) + head + bytes(64))


def test_a_set_of_bits_has_its_lowest_first() -> None:
    assert BITSET.write(frozenset({0, 3, 9})) == b"\x02\0\0\0\x09\x02"
    assert BITSET.read(Reader(b"\0\0\0\0")) == frozenset()


@given(st.lists(st.binary(max_size=8), max_size=4), st.lists(st.binary(max_size=8), max_size=4))
def test_statements_of_different_parts_differ(one: list[bytes], other: list[bytes]) -> None:
    """Invariant 18: lengths are in it, so no boundary can be moved."""
    assert (statement("x", *one) == statement("x", *other)) == (one == other)


def test_a_statement_is_its_label_and_parts() -> None:
    assert statement("cfg", b"ab", b"") == b"fl-sa1/cfg\0\2\0\0\0ab\0\0\0\0"
    assert len(digest("cfg", b"ab")) == 32
    assert digest("cfg", b"ab") != digest("cf", b"ab") != digest("cfg", b"a", b"b")


def test_a_statement_passes_for_no_other_thing_that_a_device_signs() -> None:
    assert statement("anything").startswith(b"fl-sa1/")
    assert not statement("").startswith((b'"', b"fedpress document"))


# The configuration


OTHERS: dict[str, Any] = {
    "population": "others",
    "task": "other",
    "round": 2,
    "attempt": 2,
    "server_key": bytes(32),
    "server_nonce": b"\1" * 32,
    "model": bytes(32),
    "support": bytes(32),
    "plan": bytes(32),
    "vectors": (VectorSpec("update", 37, 999), VectorSpec("examples", 1, 65_536)),
    "minimum": 4,
    "maximum": 11,
    "expires": int(START) + 1,
    "adversary": "semi-honest",
    "corrupt": 999,
    "dropout": 501,
    "suite": "aes-128-ctr",
    "hybrid": True,
    "seconds": PhaseSeconds(mask=121),
}


def test_every_term_is_in_the_digest() -> None:
    """Invariant 3: the configuration binds model, support, vectors, round and all the rest."""
    base = config(10)
    fixed = {"version", "rule"}
    assert {each.name for each in fields(SessionConfig)} == OTHERS.keys() | fixed
    digests = {replace(base, **{name: value}).digest for name, value in OTHERS.items()}
    assert len(digests | {base.digest}) == len(OTHERS) + 1
    assert SessionConfig.from_bytes(base.to_bytes()) == base


def test_a_session_is_spelled_as_the_specification_says() -> None:
    """The golden session: bytes made by hand, after SPEC-masking.md."""

    def text(value: bytes) -> bytes:
        return struct.pack("<I", len(value)) + value

    spelled = text(b"tests") + text(b"digits") + struct.pack("<II", 1, 1) + SERVER.public
    spelled += bytes(32) + MODEL + SUPPORT + PLAN
    spelled += struct.pack("<I", 2) + text(b"update") + struct.pack("<IQ", 37, 1000)
    spelled += text(b"examples") + struct.pack("<IQ", 1, 65_536)
    spelled += struct.pack("<IIQ", 3, 10, 1_003_600) + b"\1" + struct.pack("<HH", 1000, 500)
    spelled += b"\0\0" + struct.pack("<5I", 30, 30, 120, 30, 30) + struct.pack("<HH", 1, 1)
    base = config(10)
    assert base.to_bytes() == spelled
    cfg = hashlib.sha256(b"fl-sa1/cfg\0" + text(spelled)).digest()
    assert base.digest == cfg
    key = identity(1)
    vouched = key.public + text(key.key_id.encode()) + text(b"tests") + struct.pack("<Q", 1_086_400)
    vouched += AUTHORITY.sign(b"fl-sa1/certificate\0" + text(b"") + text(vouched))
    said = b"\x10" + vouched + text(b"m" * 32) + text(b"c" * 32) + b"n" * 32
    said += key.sign(b"fl-sa1/advertise\0" + text(cfg) + text(said))
    advertise = Advertise(certificate(key), b"m" * 32, b"c" * 32, b"n" * 32)
    assert advertise.signed(key, cfg).to_bytes() == said
    row = hashlib.sha256(key.public).digest()[:16]
    row += hashlib.sha256(b"fl-sa1/advertisement\0" + text(said)).digest()
    root = hashlib.sha256(b"fl-sa1/roster root\0" + text(row)).digest()
    listing = Listing((advertise.signed(key, cfg).row,))
    assert listing.root == root
    roster = b"\x02" + struct.pack("<I", 1) + row + struct.pack("<I", 1) + said
    roster += SERVER.sign(b"fl-sa1/roster\0" + text(cfg) + text(root) + text(said))
    assert Roster(listing, (advertise.signed(key, cfg),)).signed(SERVER, cfg).to_bytes() == roster
    sid = hashlib.sha256(b"fl-sa1/sid\0" + text(cfg) + text(root)).digest()
    assert base.session_id(root) == sid
    graph = hashlib.sha256(b"fl-sa1/graph\0" + text(sid)).digest()
    assert Topology.of(base, 10, sid) == Topology(10, 9, 7, graph)
    members = hashlib.sha256(b"fl-sa1/survivor set\0" + text(struct.pack("<II", 2, 300)))
    assert survivors_digest(frozenset({300, 2})) == members.digest()
    assert sid.hex() == "706573959a08d39592428547ca6ec6c73eeb11a3f4d2d2b9fbe742d961e91680"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"version": 2}, "version 2, rule 1"),
        ({"rule": 0}, "rule 0"),
        ({"minimum": 1}, "1 to 10 clients"),
        ({"minimum": 11}, "11 to 10 clients"),
        ({"maximum": 10_001}, "3 to 10001"),
        ({"corrupt": 9_000}, "0.9 corrupt of 10 clients"),
    ],
)
def test_a_configuration_that_makes_no_sense_is_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(IncompatiblePlan, match=why):
        config(10, **changes)


def test_the_packing_has_room_for_the_largest_cohort() -> None:
    assert config(10).packing.segments[0].max_sum == 10_000
    with pytest.raises(IncompatiblePlan, match="sums of 10"):
        _ = config(10, vectors=(VectorSpec("x", 1, 2**60),)).packing
    with pytest.raises(ConfigurationError, match="vectors"):
        _ = config(10, vectors=()).packing


def test_at_least_two_honest_clients_are_in_any_sum() -> None:
    """Invariant 16: the least cohort grows with the corrupt clients it has to bear."""
    assert config(10, minimum=2, corrupt=3_000).least(10) == 5
    assert config(10, minimum=7, corrupt=3_000).least(10) == 7


def test_a_large_cohort_against_a_malicious_server_has_the_second_rule() -> None:
    """By the first an arc of the ring can be cut off; who knows that alone refuses the other."""
    large = config(129)
    assert (large.rule, config(128).rule, config(129, adversary="semi-honest").rule) == (2, 1, 1)
    assert SessionConfig.from_bytes(large.to_bytes()) == large
    with pytest.raises(IncompatiblePlan, match="rule 1 for up to 129 clients, malicious") as raised:
        replace(large, rule=1)
    assert "upgrade the server" in str(raised.value.hint)
    with pytest.raises(IncompatiblePlan, match="rule 2 for up to 128 clients"):
        replace(large, maximum=128)
    with pytest.raises(
        IncompatiblePlan, match="rule 3; supported are version 1 and the rules 1 and 2"
    ):
        replace(large, rule=3)


def test_honest_clients_in_a_sum_are_no_matter_of_what_the_server_says() -> None:
    """Invariant 16: `minimum` counts those it names; of a sparse graph the bound is the graph's."""
    assert config(100, minimum=60).honest(100) == 60 - 10
    assert config(200, minimum=150).honest(200) == 96
    assert config(200, minimum=150).honest(100) == 150 - 10


# The topology


@pytest.mark.parametrize("n", [3, 10, 130])
def test_whose_shares_a_client_holds_those_hold_its_own(n: int) -> None:
    topology = Topology.of(config(n), n, bytes(32))
    holders = {slot: topology.holders(slot) for slot in range(n)}
    assert topology.is_complete == (n <= 128)
    for slot in range(n):
        neighbours = topology.neighbours(slot)
        assert len(neighbours) == topology.degree
        assert list(neighbours) == sorted(set(neighbours) - {slot})
        assert (slot in holders[slot]) == topology.is_complete
        assert all(slot in holders[holder] for holder in holders[slot])


def test_another_session_has_another_graph() -> None:
    """Invariant 8: the graph is found from the session's id."""
    one, other = (Topology.of(config(130), 130, bytes([sid]) * 32) for sid in (1, 2))
    assert [one.neighbours(i) for i in range(9)] != [other.neighbours(i) for i in range(9)]


# Certificates and messages


def test_a_certificate_is_the_authoritys_word() -> None:
    """Invariant 9."""
    key = identity(1)
    good = certificate(key)
    good.check(AUTHORITY.public, population=POPULATION, now=START)
    for bad, now, why in (
        (replace(good, identity=identity(2).public), START, "did not make this signature"),
        (replace(good, client_id="x"), START, "did not make this signature"),
        (replace(good, expires=good.expires + 1), START, "did not make this signature"),
        (certificate(key, population="others"), START, "population 'others'"),
        (good, good.expires, "expired"),
    ):
        with pytest.raises(InvalidSignature, match=why):
            bad.check(AUTHORITY.public, population=POPULATION, now=now)
    with pytest.raises(InvalidSignature):
        good.check(SERVER.public, population=POPULATION, now=START)


def test_a_message_says_which_it_is() -> None:
    message = Abandoned("why").signed(SERVER, bytes(32))
    assert parse(message.to_bytes()) == message
    with pytest.raises(MalformedRequest, match="kind 7, expected 1"):
        Offer.from_bytes(message.to_bytes())
    for data in (b"", b"\0", b"\xff" * 99):
        with pytest.raises(MalformedRequest, match="unknown message tag"):
            parse(data)


@given(st.binary(max_size=300), st.sampled_from([*range(1, 8), *range(16, 22)]))
def test_any_bytes_are_a_message_or_a_typed_error(data: bytes, tag: int) -> None:
    """Invariant 24: nothing else comes of what a stranger sends."""
    try:
        message = parse(bytes([tag]) + data)
    except FedpressError:
        return
    assert message.to_bytes() == bytes([tag]) + data


def test_a_signature_is_good_for_one_message_in_one_session() -> None:
    message = Inbox(frozenset({1}), (SealedShares(b"x", b""),)).signed(SERVER, bytes(32))
    message.verify(SERVER.public, bytes(32))
    for other in (
        replace(message, sharers=frozenset({1, 2})),
        replace(message, sealed=()),
        replace(message, signature=bytes(64)),
    ):
        with pytest.raises(InvalidSignature):
            other.verify(SERVER.public, bytes(32))
    for key, context in ((AUTHORITY, bytes(32)), (SERVER, b"\1" * 32)):
        with pytest.raises(InvalidSignature):
            message.verify(key.public, context)
