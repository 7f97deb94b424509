"""The server's key is changed under real devices, in the middle of what they do."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from fedpress_client.server_trust import FORMER_SECONDS, ServerTrust, pinned_anew
from fedpress_client.state import Identity, StateDirectory
from fedpress_protocols.errors import InvalidSignature, NotFound
from fedpress_protocols.key_rollover import ServerKeys, SignedKeyRollover, sign_key_rollover
from fedpress_protocols.signatures import (
    DeviceKey,
    from_base64url,
    key_id_of,
    sign_document,
    to_base64url,
)
from fedpress_server.identity import rotation
from fedpress_server.storage.database import Database
from tests.masked import TASK, Participant
from tests.server.in_process import Clock
from tests.system.test_masked_sessions import World

CONTEXT = "fedpress receipt v1"


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path, Clock())
    yield made
    made.stop()


def changed(world: World) -> str:
    """The id of the key that signs from now on; the server goes on meanwhile."""
    folder = world.folder / "server"

    async def run() -> str:
        database = Database(f"sqlite:///{folder / 'fedpress.db'}", migrates=False)
        try:
            place = folder / "server-key.pem"
            await rotation.rotate(database, place, world.clock)
            return (await rotation.switch(database, place, world.clock)).current
        finally:
            await asyncio.to_thread(database.close)

    return asyncio.run(run())


def pinned(device: Participant) -> str:
    identity = StateDirectory.open(device.folder).identity()
    assert identity is not None
    return key_id_of(from_base64url(identity.server_key, 32))


class Nobody:
    def server_keys(self) -> ServerKeys:
        raise NotFound("an old server")


class Told:
    """A server that says so."""

    def __init__(self, *said: SignedKeyRollover) -> None:
        self.said, self.asked = said, 0

    def server_keys(self) -> ServerKeys:
        self.asked += 1
        return ServerKeys(server_key=self.said[-1].succession.successor, successions=self.said)


@pytest.mark.parametrize(
    ("step", "restarts"),
    [
        pytest.param("ready", False, marks=pytest.mark.slow),
        pytest.param("advertise", True, marks=pytest.mark.slow),
        pytest.param("shares", False, marks=pytest.mark.slow),
        ("masked", True),
    ],
)
def test_a_masked_session_ends_under_the_key_that_its_round_was_opened_with(
    world: World, step: str, restarts: bool
) -> None:
    world.begin(4, rounds=2)
    devices = world.enrol(4)
    world.drive_until(lambda: any(step in each.steps for each in devices))
    newest = changed(world)
    if restarts:
        world.start()
    world.drive()
    assert [[each["state"], each["included"]] for each in statuses(world)] == [["committed", 4]] * 2
    for device in devices:
        assert pinned(device) == newest
        assert device.ledger.included == 2


def test_a_round_that_opens_after_the_change_is_signed_with_the_new_key(world: World) -> None:
    world.begin(3, cohort={"size": 3, "minimum": 3})
    devices = world.enrol(3)
    before = world.clock()
    keys = world.server.app.services.server_keys
    old = keys.current.key_id
    world.clock.advance(1)
    newest = changed(world)
    world.server.call(world.server.app.services.database.read, keys.read)
    assert keys.current.key_id == newest
    assert keys.at(before).key_id == old
    world.clock.advance(1)
    assert keys.at(world.clock()).key_id == newest
    world.drive()
    assert all(each.ledger.included == 1 for each in devices)


def test_a_device_that_was_away_for_two_changes_goes_on(world: World) -> None:
    world.begin(3, rounds=2, lane="clear", masking=None, cohort={"size": 1, "minimum": 1})
    (device,) = world.enrol(1, masking=None)
    world.drive_until(lambda: any(each.kind == "uploaded" for each in device.events))
    first = pinned(device)
    changed(world)
    newest = changed(world)
    world.clock.advance(2 * FORMER_SECONDS)
    world.start()
    world.drive()
    assert pinned(device) == newest != first
    assert device.ledger.included == 2


def statuses(world: World) -> Any:
    return world.operator.get(f"/v1/tasks/{TASK}/rounds")


# What a device believes


@pytest.fixture
def keys() -> list[DeviceKey]:
    return [DeviceKey.from_bytes(bytes([number]) * 32) for number in range(1, 5)]


@pytest.fixture
def directory(tmp_path: Path, keys: list[DeviceKey]) -> StateDirectory:
    made = StateDirectory.open(tmp_path / "device")
    made.enrolled(Identity(url="u", client_id="c", server_key=to_base64url(keys[0].public)))
    return made


def identity_of(directory: StateDirectory) -> Identity:
    identity = directory.identity()
    assert identity is not None
    return identity


def trust(directory: StateDirectory, source: Any, clock: Clock) -> ServerTrust:
    return ServerTrust(directory, identity_of(directory), source, clock)


def statement(key: DeviceKey) -> dict[str, Any]:
    return sign_document({"number": 1}, key, context=CONTEXT)


def test_the_key_before_is_believed_for_a_day_and_the_one_before_that_never(
    directory: StateDirectory, keys: list[DeviceKey]
) -> None:
    clock = Clock()
    source = Told(*(sign_key_rollover(a, b.public, 0) for a, b in pairwise(keys)))
    held = trust(directory, source, clock)
    held.verify(statement(keys[0]), CONTEXT)
    assert source.asked == 0
    held.verify(statement(keys[2]), CONTEXT)
    assert source.asked == 1
    for which in (trust(directory, Nobody(), clock), held):  # a device that began anew, too
        which.verify(statement(keys[1]), CONTEXT)
        which.verify(statement(keys[2]), CONTEXT)
    with pytest.raises(InvalidSignature):
        held.verify(statement(keys[0]), CONTEXT)
    clock.advance(FORMER_SECONDS)
    with pytest.raises(InvalidSignature):
        held.verify(statement(keys[1]), CONTEXT)
    held.verify(statement(keys[2]), CONTEXT)


def test_a_key_without_a_chain_is_refused_and_nothing_is_pinned(
    directory: StateDirectory, keys: list[DeviceKey]
) -> None:
    before = directory.identity()
    forked = [sign_key_rollover(keys[0], key.public, 0) for key in (keys[2], keys[1])]
    for source in (Nobody(), Told(sign_key_rollover(keys[1], keys[2].public, 0)), Told(*forked)):
        held = trust(directory, source, Clock())
        with pytest.raises(InvalidSignature):
            held.verify(statement(keys[2]), CONTEXT)
        assert not held.believes(keys[2].public)
    assert directory.identity() == before


def test_a_key_that_is_given_takes_the_place_of_one_that_no_chain_leads_to(
    directory: StateDirectory, keys: list[DeviceKey]
) -> None:
    identity = directory.identity()
    assert identity is not None
    given = to_base64url(keys[3].public)
    after = pinned_anew(directory, identity, given, Nobody())
    assert after.server_key == given
    assert directory.identity() == after
    # What was given long ago does not undo what a chain has led to since.
    source = Told(sign_key_rollover(keys[3], keys[1].public, 0))
    trust(directory, source, Clock()).verify(statement(keys[1]), CONTEXT)
    newest = directory.identity()
    assert newest is not None
    assert pinned_anew(directory, newest, given, source) == newest
    # ... and a server that was copied cannot lead back to a key that was given up.
    leaked = Told(sign_key_rollover(keys[0], keys[2].public, 0))
    with pytest.raises(InvalidSignature):
        trust(directory, leaked, Clock()).verify(statement(keys[2]), CONTEXT)


def test_a_key_that_a_chain_has_left_is_not_pinned_again_by_a_server_that_hides_the_chain(
    directory: StateDirectory, keys: list[DeviceKey]
) -> None:
    standing = to_base64url(keys[0].public)
    for number in (1, 2):
        source = Told(sign_key_rollover(keys[number - 1], keys[number].public, 0))
        trust(directory, source, Clock()).verify(statement(keys[number]), CONTEXT)
        newest = identity_of(directory)
        assert newest.server_key == to_base64url(keys[number].public)
        for left in (standing, to_base64url(keys[number - 1].public)):
            assert pinned_anew(directory, newest, left, Nobody()) == newest
    given = to_base64url(keys[3].public)
    assert pinned_anew(directory, newest, given, Nobody()).server_key == given
    after = identity_of(directory)
    assert pinned_anew(directory, after, standing, Nobody()) == after


def test_an_identity_of_before_can_be_read_and_one_without_a_change_looks_the_same(
    directory: StateDirectory, keys: list[DeviceKey]
) -> None:
    text = (directory.path / "identity.json").read_text()
    assert "former_server_key" not in text
    assert "followed_at" not in text
    assert "left_server_keys" not in text
    trust(directory, Told(sign_key_rollover(keys[0], keys[1].public, 0)), Clock()).verify(
        statement(keys[1]), CONTEXT
    )
    assert "former_server_key" in (directory.path / "identity.json").read_text()
