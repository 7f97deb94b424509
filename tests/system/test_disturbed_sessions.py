"""One device that disturbs masked sessions: it is named and left out, and rounds commit."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest

from fedpress_client.state import StateDirectory
from fedpress_compression.compressors.error_feedback import ErrorFeedback
from fedpress_compression.compressors.shared_support import SharedSupport
from fedpress_protocols.masking.messages import Complaint, SealedShares, Shares
from fedpress_protocols.messages import RoundStatus, TaskConfig
from fedpress_protocols.model import Model
from fedpress_protocols.plan import CohortRules, MaskingTerms, Profile
from fedpress_protocols.signatures import DeviceKey
from tests.devices import ADMIN
from tests.masked import TASK, Participant
from tests.server.in_process import Clock
from tests.server.test_audit import log_of
from tests.system.server_process import ServerProcess
from tests.system.test_masked_sessions import World


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path, Clock())
    yield made
    for each in made.participants:
        if each.client is not None:
            each.client.close()
    made.stop()


def client_id(participant: Participant) -> str:
    return next(e.details["client_id"] for e in participant.events if e.kind == "enrolled")


def sabotages(world: World, device: Participant, tamper: Callable[[Shares], Shares]) -> None:
    """From now on the device sends other shares than it made, under its own signature."""
    device.start()
    assert device.client is not None
    transport, key = device.client._transport, device.client._enrolment.key
    honest = transport.say

    def say(assignment: str, step: str, message: bytes) -> None:
        if step == "shares":
            shares = tamper(Shares.from_bytes(message))
            message = shares.signed(key, world.attempt.session.machine.sid).to_bytes()
        honest(assignment, step, message)

    transport.say = say  # type: ignore[method-assign]


def rubbish(shares: Shares) -> Shares:
    return replace(shares, sealed=tuple(SealedShares(os.urandom(96), b"") for _ in shares.sealed))


def another_seed(shares: Shares) -> Shares:
    return replace(shares, commitment=os.urandom(32))


def session_of(status: RoundStatus) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    assert status.session is not None
    return status.session.suspects, status.session.failures


@pytest.mark.parametrize("tamper", [rubbish, another_seed])
@pytest.mark.slow
def test_one_saboteur_of_twenty_is_named_and_left_out_and_rounds_commit(
    world: World, tamper: Callable[[Shares], Shares], caplog: pytest.LogCaptureFixture
) -> None:
    world.begin(20, rounds=2, cohort={"size": 20, "minimum": 15})
    devices = world.enrol(20)
    sabotages(world, devices[7], tamper)
    world.drive(400)
    saboteur = client_id(devices[7])
    first, *others = world.statuses
    assert (first.state, first.round, first.attempt) == ("abandoned", 1, 1)
    assert session_of(first)[0] == (saboteur,)
    if tamper is rubbish:
        assert {accused for _, accused in session_of(first)[1]} == {saboteur}
    assert [(each.state, each.included) for each in others] == [("committed", 19)] * 2
    assert [each.session.began for each in others if each.session] == [19, 19]
    # Nothing that an honest device computed is lost, and operators see who it was.
    world.participants.pop(7)
    world.check_conserved()
    assert f"disturbed by {saboteur}, left out" in caplog.text
    text = world.server.get("/metrics", headers=ADMIN).text
    assert 'fedpress_session_suspects_total{task="digits"} 1.0' in text
    (entry,) = (each for each in log_of(world.operator) if each.action == "session.disturbed")
    assert entry.details["clients"] == [saboteur]


@pytest.mark.slow
def test_one_saboteur_of_twenty_is_left_out_by_a_server_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    """The same over sockets: a server process, and twenty devices that run as they like, of which
    the last one comes when the saboteur has a place in the first session."""
    server = ServerProcess(tmp_path)
    server.start()
    with server.operator() as operator:
        model = Model.from_tensors({"w": np.linspace(-1, 1, 60, dtype=np.float32)})
        operator.register_model(model)
        feedback = ErrorFeedback(SharedSupport(fraction=0.5))
        config = TaskConfig(
            task=TASK,
            model=model.digest,
            rounds=2,
            lane="masked",
            masking=MaskingTerms(),
            profiles=(Profile(name="one", compressor=feedback),),
            cohort=CohortRules(size=19, minimum=15),
            round_seconds=60,  # then a session begins without those that are late
        )
        operator.create_task(config)
        token = operator.create_token(uses=20)
    devices = [
        Participant(tmp_path, number, token, httpx.HTTPTransport, time.time, url=server.url)
        for number in range(20)
    ]
    saboteur, honest = devices[7], Shares.signed
    saboteur_key = StateDirectory.open(saboteur.folder).key().public

    def signed(shares: Shares, identity: DeviceKey, sid: bytes) -> Shares:
        is_bad = identity.public == saboteur_key
        return honest(rubbish(shares) if is_bad else shares, identity, sid)

    monkeypatch.setattr(Shares, "signed", signed)
    threads = []
    for device in devices:
        device.patience, device.wait, device.pause = 60.0, 1.0, time.sleep
        device.start()
        assert device.client is not None
        threads.append(threading.Thread(target=device.client.run, daemon=True))
    try:
        for thread in threads[:-1]:
            thread.start()
        with server.operator() as operator:
            give_up = time.monotonic() + 120
            while not any(each.session for each in operator.rounds(TASK)):
                assert time.monotonic() < give_up, "no session begins"
                time.sleep(0.1)
        threads[-1].start()  # who takes the place of the one that is left out
        for device, thread in zip(devices, threads, strict=True):
            if device is not saboteur:
                thread.join(500)
                assert not thread.is_alive(), "a device hangs"
        with server.operator() as operator:
            statuses = operator.rounds(TASK)
            names = operator.audit().entries
    finally:
        for device in devices:
            if device.client is not None:
                device.client.stop()
        server.stop()
    # On a slow machine an attempt may end before enough devices are there: it has no session.
    sessions = [each for each in statuses if each.session is not None]
    first, *others = sessions
    assert session_of(first)[0] == (client_id(saboteur),)
    assert [(each.state, each.included) for each in others] == [("committed", 19)] * 2
    disturbed = [entry.details["clients"] for entry in names if entry.action == "session.disturbed"]
    assert disturbed == [[client_id(saboteur)]]
    record_property("sessions", len(sessions))


@pytest.mark.slow
def test_who_was_named_stays_out_over_a_restart(world: World) -> None:
    world.begin(8, rounds=2, cohort={"size": 8, "minimum": 5})
    devices = world.enrol(8)
    sabotages(world, devices[2], rubbish)
    world.drive_until(lambda: world.attempt.round.attempt == 2)
    assert world.attempt.round.left_out == {client_id(devices[2])}
    world.start()
    assert world.attempt.round.left_out == {client_id(devices[2])}
    world.drive(400)
    assert [each.state for each in world.statuses] == ["abandoned", "committed", "committed"]


@pytest.mark.slow
def test_a_device_that_keeps_one_peer_out_does_not_for_long(world: World) -> None:
    """Which of the two is at fault nobody can know: they are kept apart, in turn."""
    world.begin(8, rounds=3, cohort={"size": 8, "minimum": 4})
    devices = world.enrol(8)

    def for_one(shares: Shares) -> Shares:
        cohort = world.attempt.session.machine.cohort
        key = devices[3].client._enrolment.key.public if devices[3].client else b""
        if key not in cohort.slots:
            return shares
        sealed = list(shares.sealed)
        sealed[cohort.place(shares.sender, cohort.slots[key])] = SealedShares(os.urandom(96), b"")
        return replace(shares, sealed=tuple(sealed))

    sabotages(world, devices[5], for_one)
    world.drive(400)
    pair = client_id(devices[3]), client_id(devices[5])
    first, *others = world.statuses
    assert (first.state, first.included) == ("committed", 7)  # without the one that complained
    assert session_of(first) == ((), (pair,))
    assert [each.state for each in others] == ["committed"] * 2
    assert [each.included for each in others] == [7, 7]
    assert [session_of(each) for each in others] == [((), ())] * 2
    settled = world.reasons()
    assert settled[3].count("included") == settled[5].count("included") - 1 == 1


def test_a_device_that_complains_of_everybody_is_the_one_at_fault(world: World) -> None:
    """The honest ones are more, and it leaves the session to them."""
    world.begin(8, rounds=2, cohort={"size": 8, "minimum": 4})
    devices = world.enrol(8)
    liar = devices[1]
    liar.start()
    assert liar.client is not None
    transport, key = liar.client._transport, liar.client._enrolment.key
    honest = transport.say

    def say(assignment: str, step: str, message: bytes) -> None:
        if step == "masked" and world.attempt.session is not None:
            machine = world.attempt.session.machine
            own = machine.cohort.slots[key.public]
            lie = Complaint(own, machine.sharers - {own}).signed(key, machine.sid)
            step, message = "complaint", lie.to_bytes()
        honest(assignment, step, message)

    transport.say = say  # type: ignore[method-assign]
    world.drive(400)
    first, second = world.statuses
    assert session_of(first)[0] == (client_id(liar),)
    assert [(each.state, each.included) for each in (first, second)] == [("committed", 7)] * 2
    assert second.session is not None
    assert second.session.began == 7
