"""A body that leaves before it is whole: what is on which disk at whatever moment it all stops."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpress_client import Ledger
from fedpress_client.outgoing import Outgoing, SendsAhead, abandon_unfinished
from fedpress_client.parts import Delivery, PartSizes
from fedpress_client.state import StateDirectory, TaskFiles
from fedpress_compression.compressor import Compressor
from fedpress_compression.compressors.none import Uncompressed
from fedpress_compression.compressors.per_tensor import PerTensor
from fedpress_compression.compressors.randomk import RandomK
from fedpress_compression.compressors.topk import TopK
from fedpress_compression.update import Update
from fedpress_protocols.errors import TransportError
from fedpress_protocols.messages import Assignment, UploadAck, UploadFigures
from fedpress_protocols.model import Model
from tests.client.fake_server import FakeLink, FakeServer, RandomTrainer, make_client, make_plan
from tests.client.test_parts import BODY, Store

LEAST = 2000


class Link:
    """The parts of a transport that matter here, in front of a Store."""

    def __init__(self, store: Store) -> None:
        self.store, self.parts_above = store, LEAST
        self.sizes = PartSizes(num_bytes=700)

    def ahead(
        self,
        assignment: str,
        max_bytes: int,
        source: Callable[[int, int], bytes],
        begun: Callable[[str], None],
    ) -> None:
        delivery = Delivery(self.store, assignment, self.sizes, lambda: 0.0)
        delivery.ahead(source, max_bytes, begun)

    def drop_parts(self, assignment: str, partial: str) -> None:
        self.store.drop_parts(assignment, partial)

    def upload(
        self, assignment: str, body: bytes, figures: UploadFigures | None = None
    ) -> UploadAck:
        delivery = Delivery(self.store, assignment, self.sizes, lambda: 0.0)
        return delivery.whole(body)


@pytest.fixture
def files(tmp_path: Path) -> Iterator[TaskFiles]:
    found = StateDirectory.open(tmp_path / "device").task("task")
    yield found
    found.close()


def left(files: TaskFiles) -> list[str]:
    return sorted(path.name for path in files.folder.glob("outgoing*"))


def wait(holds: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(1000):
        if holds():
            return
        pause.wait(0.01)
    raise AssertionError


def test_what_left_early_is_not_sent_again(files: TaskFiles) -> None:
    store = Store()
    link = Link(store)
    assert isinstance(link, SendsAhead)
    with Outgoing(files, link, "a") as outgoing:
        outgoing.expect(len(BODY))
        for start in range(0, len(BODY), 500):
            outgoing.add(BODY[start : start + 500])
        wait(lambda: store.sent > 9000)
        assert store.staged == []
        assert files.outgoing() == ("a", next(iter(store.held)))
        outgoing.finish()
    assert left(files) == []
    link.upload("a", BODY)
    assert store.staged == [BODY]
    assert store.sent == len(BODY)


def test_a_part_leaves_once_it_is_on_the_disk_and_its_upload_is_named(
    files: TaskFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = [0]
    sync = os.fsync

    def noted(file: int) -> None:
        sync(file)
        if os.fstat(file).st_ino == (files.folder / "outgoing").stat().st_ino:
            synced[0] = os.fstat(file).st_size

    monkeypatch.setattr(os, "fsync", noted)
    store, seen = Store(), []

    def check(verb: str) -> None:
        if verb == "before part":
            held = len(next(iter(store.held.values())))
            seen.append((files.outgoing(), held < synced[0]))

    store.fault = check
    with Outgoing(files, Link(store), "a") as outgoing:
        outgoing.expect(len(BODY))
        for start in range(0, len(BODY), 500):
            outgoing.add(BODY[start : start + 500])
        wait(lambda: store.sent > 9000)
        outgoing.finish()
    assert seen
    assert all(named == ("a", next(iter(store.held))) and is_safe for named, is_safe in seen)


def test_what_comes_to_nothing_is_forgotten_at_both_ends(files: TaskFiles) -> None:
    store = Store()
    with Outgoing(files, Link(store), "a") as outgoing:
        outgoing.expect(len(BODY))
        outgoing.add(BODY)
        wait(lambda: store.sent > 700)
    assert store.held == {}
    assert left(files) == []


@pytest.mark.parametrize("most", [0, LEAST])
def test_a_small_body_stays_until_it_is_whole(files: TaskFiles, most: int) -> None:
    store = Store()
    with Outgoing(files, Link(store), "a") as outgoing:
        outgoing.expect(most)
        outgoing.add(BODY[:LEAST])
        assert left(files) == []
    with Outgoing(files, Link(store), "a") as outgoing:
        outgoing.expect(len(BODY))
        outgoing.add(BODY[:LEAST])  # as it turns out
    assert store.verbs == []


def test_any_other_transport_sends_whole_bodies(files: TaskFiles) -> None:
    with Outgoing(files, object(), "a") as outgoing:
        outgoing.expect(len(BODY))
        outgoing.add(BODY)
        assert left(files) == []
        outgoing.finish()


def test_a_link_that_breaks_is_of_no_consequence(files: TaskFiles) -> None:
    store = Store()

    def broken(verb: str) -> None:
        if store.verbs.count("part") == 3:
            raise TransportError("cut")

    store.fault = broken
    link = Link(store)
    with Outgoing(files, link, "a") as outgoing:
        outgoing.expect(len(BODY))
        outgoing.add(BODY)
        wait(lambda: store.verbs.count("part") == 3)
        outgoing.finish()
    store.fault = lambda verb: None
    link.upload("a", BODY)
    assert store.staged == [BODY]
    assert store.sent <= len(BODY) + store.part_bytes


def test_a_full_disk_is_of_no_consequence(
    files: TaskFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full() -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "begin_outgoing", full)
    store = Store()
    with Outgoing(files, Link(store), "a") as outgoing:
        outgoing.expect(len(BODY))
        for start in range(0, len(BODY), 500):
            outgoing.add(BODY[start : start + 500])
        outgoing.finish()
    assert store.verbs == []


@given(moment=st.integers(0, len(BODY)), is_saved=st.booleans(), reaches=st.booleans())
def test_after_a_crash_the_upload_is_resumed_or_can_never_count(
    moment: int, is_saved: bool, reaches: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The process ends after `moment` bytes were encoded, its account saved or not; `reaches`, if
    the device, back again, reaches the server to have it forget what it has."""
    directory = StateDirectory.open(tmp_path_factory.mktemp("device"))
    store, files = Store(), directory.task("task")
    link = Link(store)
    outgoing = Outgoing(files, link, "a")
    outgoing.expect(len(BODY))
    encoded = len(BODY) if is_saved else moment
    for start in range(0, encoded, 500):
        outgoing.add(BODY[start : min(start + 500, encoded)])
    outgoing._stop()  # and nothing else of it happens any more
    if outgoing._file is not None:
        os.close(outgoing._file)
    files.close()

    files = directory.task("task")
    if not reaches:
        store.fault = gone
    abandon_unfinished(files, link, frozenset({"a"} if is_saved else ()))
    store.fault = lambda verb: None
    assert left(files) == []
    assert store.staged == []
    body = BODY if is_saved else BODY[::-1]  # unsaved, it is trained and encoded anew
    sent = store.sent
    if not is_saved and reaches:
        assert store.held == {}
    ack = link.upload("a", body)
    assert ack.upload == hashlib.sha256(body).hexdigest()
    assert store.staged == [body]
    if is_saved:
        assert sent <= store.sent == len(body)
    files.close()


def gone(verb: str) -> None:
    raise TransportError("out of reach")


@pytest.mark.parametrize(
    "compressor",
    [Uncompressed(), TopK(0.1), PerTensor(TopK(0.1), min_size=64)],
    ids=["none", "topk", "per-tensor"],
)
def test_the_sections_are_the_body(compressor: Compressor[Any]) -> None:
    rng = np.random.default_rng(0)
    weights = {"w": np.zeros((700, 800), np.float32), "b": np.zeros(50, np.float32)}
    model = Model.from_tensors(weights)
    plan = make_plan(model, compressor)
    assignment = Assignment(assignment="a", client_id="c", plan=plan, profile="p0")
    update = rng.standard_normal(model.spec.size).astype(np.float32)
    sections: list[bytes] = []
    ledger = Ledger("task", "c")
    _, body = ledger.prepare(
        assignment, update, 3, model.spec, np.random.default_rng(1), sections=sections.append
    )
    assert b"".join(sections) == body
    assert len(sections) > 2
    assert max(map(len, sections)) <= 2**20
    _, again = ledger.prepare(assignment, update, 3, model.spec, np.random.default_rng(1))
    assert again == body


class AheadLink(FakeLink):
    """A FakeLink that takes parts as well, into a Store of its own."""

    parts_above = LEAST

    def __init__(self, server: FakeServer, store: Store) -> None:
        super().__init__(server)
        self.store, self.link = store, Link(store)

    def ahead(
        self,
        assignment: str,
        max_bytes: int,
        source: Callable[[int, int], bytes],
        begun: Callable[[str], None],
    ) -> None:
        self.link.ahead(assignment, max_bytes, source, begun)

    def drop_parts(self, assignment: str, partial: str) -> None:
        self.link.drop_parts(assignment, partial)


class Waits:
    """In the place of a method of TaskFiles: waits until parts have left, and goes on."""

    def __init__(self, store: Store, goes_on: Callable[..., None]) -> None:
        self.store, self.goes_on = store, goes_on

    def __call__(self, *arguments: object) -> None:
        wait(lambda: self.store.sent > 3000)
        self.goes_on(*arguments)


def world(*compressors: Compressor[Any], **options: Any) -> tuple[FakeServer, Store, AheadLink]:
    model = Model.from_tensors({"w": np.zeros((50, 50), np.float32)})
    server = FakeServer(model, lambda r, a: list(compressors), rounds=1, auto=1, **options)
    store = Store()
    return server, store, AheadLink(server, store)


def test_a_client_sends_the_beginning_of_the_body_that_it_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, store, link = world(Uncompressed())
    save = TaskFiles.save

    def goes_on(ledger: Ledger) -> None:
        assert client._joined is not None
        save(client._joined.files, ledger)

    waits = Waits(store, goes_on)
    monkeypatch.setattr(TaskFiles, "save", lambda files, ledger: waits(ledger))
    client = make_client(server, RandomTrainer(2500), tmp_path, link, seed=1)
    client.step()
    (part,) = server.parts.values()
    (left_early,) = store.held.values()
    assert part.body is not None
    assert len(left_early) > 3000
    assert part.body.startswith(left_early)
    assert "completion" not in store.verbs
    assert not list(tmp_path.rglob("outgoing*"))
    client.close()


def test_an_account_that_cannot_be_saved_takes_back_what_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, store, link = world(Uncompressed())

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(TaskFiles, "save", Waits(store, full))
        client = make_client(server, RandomTrainer(2500), tmp_path, link, seed=1)
        with pytest.raises(OSError, match="No space"):
            client.step()
        client.close()
    assert store.sent > 3000
    assert store.held == {}
    assert not list(tmp_path.rglob("outgoing*"))
    assert make_client(server, RandomTrainer(2500), tmp_path, link, seed=1).run().included == 1


def test_an_update_beyond_the_bound_takes_back_what_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compression scales it up beyond the plan's bound, which is seen once it is decoded."""
    server, store, link = world(RandomK(fraction=0.9, unbiased=True), max_abs=1.0)
    check = Update.check

    def late(update: Update, max_abs: float) -> None:
        wait(lambda: store.sent > 3000)
        check(update, max_abs)

    monkeypatch.setattr(Update, "check", late)
    client = make_client(server, RandomTrainer(2500, scale=100.0), tmp_path, link, seed=1)
    client.step()
    assert store.sent > 3000
    assert store.held == {}
    assert client.ledger.pending == {}
    assert [receipt for receipt in link.calls if receipt == "decline"]
    client.close()


@pytest.mark.parametrize("damaged", [b"", b'{"assignment": "a"', b"[]", b'{"assignment": "a"}'])
def test_a_damaged_name_stops_no_device(files: TaskFiles, damaged: bytes) -> None:
    os.close(files.begin_outgoing())
    (files.folder / "outgoing.json").write_bytes(damaged)
    abandon_unfinished(files, Link(Store()), frozenset())
    assert left(files) == []
