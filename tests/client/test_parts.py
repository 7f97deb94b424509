"""Bodies that go by parts, against a small honest server and a link that cuts and loses."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpress_client.parts import FIRST_PART, LEAST_PART, Delivery, PartSizes
from fedpress_protocols.errors import (
    DigestMismatch,
    OffsetConflict,
    RoundClosed,
    TransportError,
    UnknownPartial,
)
from fedpress_protocols.messages import (
    PartialCompletion,
    PartialIntent,
    PartialUpload,
    UploadAck,
)

BODY = bytes(range(256)) * 40


class Cut(Exception):
    """The link broke."""


class Store:
    """What a server does with parts, and a link to it: `fault` runs before and after each verb."""

    def __init__(self, part_bytes: int = 1000) -> None:
        self.part_bytes = part_bytes
        self.held: dict[str, bytearray] = {}
        self.staged: list[bytes] = []
        self.sent = 0
        self.verbs: list[str] = []
        self.fault: Callable[[str], None] = lambda verb: None

    def _told(self, name: str) -> PartialUpload:
        data = self.held[name]
        return PartialUpload(
            partial=name,
            offset=len(data),
            digest=hashlib.sha256(data).hexdigest(),
            part_bytes=self.part_bytes,
            expires_at=0.0,
        )

    def _before(self, verb: str) -> None:
        self.verbs.append(verb)
        self.fault(f"before {verb}")

    def _known(self, partial: str) -> bytearray:
        if partial not in self.held:
            raise UnknownPartial
        return self.held[partial]

    def begin_parts(self, assignment: str, intent: PartialIntent) -> PartialUpload:
        self._before("begin")
        if self.staged and hashlib.sha256(self.staged[0]).hexdigest() == intent.upload:
            nothing = hashlib.sha256().hexdigest()
            told = PartialUpload(
                partial=None,
                offset=0,
                digest=nothing,
                part_bytes=1,
                expires_at=0.0,
                ack=self._ack(assignment),
            )
        else:
            if not self.held:
                self.held[f"u{len(self.verbs)}"] = bytearray()
            told = self._told(next(iter(self.held)))
        self.fault("after begin")
        return told

    def held_parts(self, assignment: str, partial: str) -> PartialUpload:
        self._before("held")
        self._known(partial)
        told = self._told(partial)
        self.fault("after held")
        return told

    def send_part(self, assignment: str, partial: str, offset: int, part: bytes) -> PartialUpload:
        self.sent += len(part)
        self._before("part")
        data = self._known(partial)
        if offset != len(data):
            raise OffsetConflict(offset=len(data))
        assert 0 < len(part) <= self.part_bytes
        data += part
        told = self._told(partial)
        self.fault("after part")
        return told

    def complete_parts(
        self, assignment: str, partial: str, completion: PartialCompletion, query: str
    ) -> UploadAck:
        self._before("completion")
        if self.staged and hashlib.sha256(self.staged[0]).hexdigest() == completion.upload:
            return self._ack(assignment)
        data = self._known(partial)
        if len(data) != completion.num_bytes:
            raise OffsetConflict(offset=len(data))
        if hashlib.sha256(data).hexdigest() != completion.upload:
            raise DigestMismatch
        self.staged.append(bytes(self.held.pop(partial)))
        self.fault("after completion")
        return self._ack(assignment)

    def _ack(self, assignment: str) -> UploadAck:
        digest = hashlib.sha256(self.staged[0]).hexdigest()
        return UploadAck(assignment=assignment, upload=digest, received_at=0.0)

    def drop_parts(self, assignment: str, partial: str) -> None:
        self._before("drop")
        self.held.pop(partial, None)


def delivery(store: Store, num_bytes: int = 700) -> Delivery:
    return Delivery(store, "a", PartSizes(num_bytes=num_bytes), lambda: 0.0)


def test_a_body_goes_in_parts_and_is_completed() -> None:
    store = Store()
    ack = delivery(store).whole(BODY)
    assert store.staged == [BODY]
    assert ack.upload == hashlib.sha256(BODY).hexdigest()
    assert store.sent == len(BODY)
    assert store.verbs[0] == "begin"
    assert store.verbs[-1] == "completion"
    assert set(store.verbs[1:-1]) == {"part"}


@given(faults=st.lists(st.integers(0, 6), max_size=40), restarts=st.booleans())
def test_however_often_the_link_breaks_no_part_is_sent_without_need(
    faults: list[int], restarts: bool
) -> None:
    """A request or its answer is lost at any place; the device may restart at any of them."""
    store, waits = Store(), list(faults)

    def fault(verb: str) -> None:
        if waits:
            waits[0] -= 1
            if waits[0] < 0:
                del waits[0]
                raise Cut(verb)

    store.fault = fault
    sender, cuts, ack = delivery(store), 0, None
    while ack is None:
        try:
            ack = sender.whole(BODY)
        except Cut:
            cuts += 1
            sender = delivery(store) if restarts else sender
    assert store.staged == [BODY]
    assert ack.upload == hashlib.sha256(BODY).hexdigest()
    assert store.sent <= len(BODY) + cuts * store.part_bytes


def test_what_another_body_left_is_dropped() -> None:
    store = Store()
    store.held["u0"] = bytearray(b"of another body")
    delivery(store).whole(BODY)
    assert store.staged == [BODY]
    assert store.verbs[:3] == ["begin", "drop", "begin"]


def test_more_than_the_body_is_another_one() -> None:
    store = Store()
    store.held["u0"] = bytearray(BODY + b"!")
    delivery(store).whole(BODY)
    assert store.staged == [BODY]


def test_an_upload_that_the_server_forgot_begins_again() -> None:
    store = Store()

    def forget(verb: str) -> None:
        if store.verbs.count("part") == 5:
            store.fault = lambda verb: None
            store.held.clear()

    store.fault = forget
    delivery(store).whole(BODY)
    assert store.staged == [BODY]


def test_a_refusal_ends_it() -> None:
    store = Store()

    def closed(verb: str) -> None:
        if store.verbs.count("part") == 3:
            raise RoundClosed

    store.fault = closed
    with pytest.raises(RoundClosed):
        delivery(store).whole(BODY)
    assert store.staged == []


def test_a_server_that_contradicts_itself_is_given_up() -> None:
    store = Store()

    def moved(verb: str) -> None:
        if verb == "before part":
            raise OffsetConflict(offset=1)

    store.fault = moved
    with pytest.raises(TransportError, match="where the server says they are not"):
        delivery(store).whole(BODY)


def test_a_part_that_the_server_does_not_count_is_not_sent_for_ever() -> None:
    class Forgetful(Store):
        def _told(self, name: str) -> PartialUpload:
            self.held[name].clear()
            return super()._told(name)

    store = Forgetful()
    with pytest.raises(TransportError, match="where the server says they are not"):
        delivery(store).whole(BODY)
    assert store.verbs.count("part") == 16


def test_ahead_of_the_whole_nothing_is_completed_and_nothing_is_sent_twice() -> None:
    store = Store()
    names: list[str] = []

    def source(offset: int, most: int) -> bytes:
        return b"" if offset > 5000 else BODY[offset : offset + most]

    delivery(store).ahead(source, len(BODY) + 8, names.append)
    (name,) = store.held
    assert names == [name]
    assert store.staged == []
    assert bytes(store.held[name]) == BODY[: len(store.held[name])]
    delivery(store).whole(BODY)
    assert store.staged == [BODY]
    assert store.sent == len(BODY)


def test_ahead_what_a_lost_process_left_is_dropped() -> None:
    store = Store()
    store.held["u0"] = bytearray(BODY[:9])
    delivery(store).ahead(lambda offset, most: b"", len(BODY), lambda name: None)
    assert store.held == {"u3": bytearray()}


def test_parts_are_as_long_as_the_link_carries_in_the_time() -> None:
    sizes = PartSizes(seconds=4.0)
    assert sizes.next(2**30) == FIRST_PART
    for _ in range(30):
        sizes.arrived(sizes.num_bytes, sizes.num_bytes / 2e5)
    assert sizes.num_bytes == 800_000
    sizes.cut()
    assert sizes.num_bytes == 400_000
    for _ in range(30):
        sizes.arrived(sizes.num_bytes, sizes.num_bytes / 1e3)
    assert sizes.num_bytes == LEAST_PART
    sizes.arrived(sizes.num_bytes, 0.0)
    assert sizes.num_bytes == 2 * LEAST_PART
    assert sizes.next(1000) == 1000


@given(steps=st.lists(st.tuples(st.floats(0, 1e6), st.booleans()), max_size=60))
def test_no_part_is_more_than_twice_the_one_before(steps: list[tuple[float, bool]]) -> None:
    sizes = PartSizes()
    for seconds, is_cut in steps:
        before = sizes.num_bytes
        sizes.cut() if is_cut else sizes.arrived(sizes.num_bytes, seconds)
        assert LEAST_PART <= sizes.num_bytes <= 2 * before
        assert sizes.num_bytes >= before // 2
