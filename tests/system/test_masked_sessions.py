"""Masked rounds over HTTP: real devices, a real server, drop-outs and deaths at every step.

The oracle is the sum of the whole numbers that the devices prepared, taken in the clear.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import safetensors.numpy

from fedpress_client import MaskingRules
from fedpress_client import state as state_module
from fedpress_client.masking import MaskedPart
from fedpress_client.membership import Member, joined
from fedpress_client.state import Identity, StateDirectory
from fedpress_client.trainer import Evaluation
from fedpress_protocols.errors import (
    BodyTooLarge,
    ConfigurationError,
    Conflict,
    FedpressError,
    Forbidden,
    IncompatiblePlan,
    InvalidUpdate,
    MalformedRequest,
    PlanDeclined,
    RoundClosed,
    UpdateConflict,
)
from fedpress_protocols.masking.certificates import Certificate
from fedpress_protocols.masking.messages import Inbox, Reveal, survivors_digest
from fedpress_protocols.masking.payload import Payload
from fedpress_protocols.messages import MaskedSum, Membership, Receipt, RoundStatus, UploadFigures
from fedpress_protocols.model import Model
from fedpress_protocols.signatures import DeviceKey, to_base64url
from fedpress_server import Settings, create_app
from fedpress_server.aggregation.terms import RoundTerms
from fedpress_server.coordination.commands import Happen
from fedpress_server.rounds import UnmaskFailed
from fedpress_server.storage.records import RoundKey
from tests import databases
from tests.devices import ADMIN, ADMIN_TOKEN, Device, Operator
from tests.masked import TASK, Lost, Numbered, Participant, Unread, drive, masked_task, summed
from tests.server.in_process import Clock, Server, history, running

STEPS = ("ready", "advertise", "shares", "masked", "consent")
"""After which a device may be gone; `reveal` is the last thing it says."""
SIZE = 12
EPS = float(np.finfo(np.float32).eps)


class World:
    """A server in this process that can be put away and started again, and its devices."""

    def __init__(self, folder: Path, clock: Clock, **settings: Any) -> None:
        self.folder, self.clock, self.settings = folder, clock, settings
        self.model = Model.from_tensors({"w": np.linspace(-1, 1, 40, dtype=np.float32)})
        self.participants: list[Participant] = []
        self._running: Any = None
        self.start()

    def start(self) -> None:
        """Begin, or begin again from the disk."""
        self.stop()
        settings = Settings(
            data_dir=self.folder / "server",
            admin_token=ADMIN_TOKEN,
            tick_seconds=3600,
            **self.settings,
        )
        databases.lay(settings.data_dir / "fedpress.db")
        self._running = running(create_app(settings, clock=self.clock))
        self.server: Server = self._running.__enter__()
        self.operator = Operator(self.server)

    def stop(self) -> None:
        if self._running is not None:
            self._running.__exit__(None, None, None)
            self._running = None

    def begin(self, size: int, **config: Any) -> None:
        masked_task(self.operator, self.model, size, **config)

    def enrol(self, count: int, **options: Any) -> list[Participant]:
        token = self.operator.token(count)
        for number in range(len(self.participants), len(self.participants) + count):
            made = Participant(self.folder, number, token, self._transport, self.clock, **options)
            self.participants.append(made)
        return self.participants[-count:]

    def _transport(self) -> httpx.BaseTransport:
        world = self

        class ToWhateverRuns(httpx.BaseTransport):
            def handle_request(self, request: httpx.Request) -> httpx.Response:
                return Unread(world.server).handle_request(request)

        return ToWhateverRuns()

    @property
    def attempt(self) -> Any:
        return self.server.app.services.store.tasks[TASK].attempt

    @property
    def terms(self) -> RoundTerms:
        return self.terms_of(TASK)

    def terms_of(self, task: str) -> RoundTerms:
        attempt = self.server.app.services.store.tasks[task].attempt
        assert attempt is not None
        return attempt.terms

    @property
    def is_folding(self) -> bool:
        tasks = self.server.app.services.store.tasks.values()
        return any(each.attempt and each.attempt.round.phase == "folding" for each in tasks)

    def pass_time(self) -> None:
        """A while, in which deadlines pass; aggregation gets the time it needs."""
        if self.is_folding:
            give_up = time.monotonic() + 10.0
            while self.is_folding and time.monotonic() < give_up:
                time.sleep(0.005)
            if not self.is_folding:
                return  # else a lease has been lost to the leaps of this clock: it has to run out
        self.clock.advance(121)
        self.server.tick()

    def drive(self, turns: int = 200) -> None:
        drive(self.participants, self.pass_time, turns)

    def drive_until(self, is_so: Callable[[], bool]) -> None:
        """Everybody in turn, while time passes, until `is_so`."""
        for _ in range(100):
            before = [len(each.events) for each in self.participants]
            for each in self.participants:
                if is_so():
                    return
                if each.is_gone:
                    continue
                try:
                    each.step()
                except Lost:
                    each.is_gone = True
            if before == [len(each.events) for each in self.participants]:
                self.pass_time()
        raise AssertionError("it did not come to that")

    def revive(self) -> None:
        """Whoever is gone begins again from its disk."""
        for each in self.participants:
            each.on_event = lambda event: None
            if each.is_gone:
                each.is_gone = False
                each.start()

    def check_conserved(self) -> None:
        """included y + residual + pending y = everything computed, for every device."""
        for each in self.participants:
            ledger = each.ledger
            found = np.zeros(self.model.spec.size)
            computed, magnitude = found.copy(), found.copy()
            for name, held in each.plain.items():
                update = each.trainer.computed[held.round, held.attempt]
                computed += update
                magnitude += np.abs(update) + np.abs(held.update.dense())
                if name in ledger.pending or ledger.settled[name] == "included":
                    found += held.update.dense()
            if ledger.residual is not None:
                found += ledger.residual
                magnitude += np.abs(ledger.residual)
            assert not ledger.discards
            assert (np.abs(found - computed) <= 8 * EPS * magnitude).all()

    @property
    def statuses(self) -> list[RoundStatus]:
        return history(self.operator)

    def check(self, terms: RoundTerms, included: set[int], status: RoundStatus) -> None:
        """That the round of `terms` added up the integers of exactly these devices, and told each
        what became of it."""
        held = [
            each
            for participant in self.participants
            if participant.number in included
            for each in participant.plain.values()
            if (each.round, each.attempt) == (status.round, status.attempt)
        ]
        assert len(held) == len(included) == status.included
        before = Model.from_bytes(self._file(status.base_model)).parameters.astype(np.float64)
        after = Model.from_bytes(self._file(status.model or "")).parameters
        expected = (before + summed(terms.payload, held)).astype(np.float32)
        np.testing.assert_array_equal(after, expected)

    def _file(self, digest: str) -> bytes:
        return self.server.get(f"/v1/models/{digest}", headers=self.operator.headers).content

    def reasons(self) -> dict[int, list[str]]:
        return {
            each.number: [e.details["reason"] for e in each.events if e.kind == "settled"]
            for each in self.participants
        }


@pytest.fixture
def make(tmp_path: Path) -> Any:
    made: list[World] = []

    def world(**settings: Any) -> World:
        made.append(World(tmp_path, Clock(), **settings))
        return made[-1]

    yield world
    for each in made:
        for participant in each.participants:
            if participant.client is not None:
                participant.client.close()
        each.stop()


@pytest.fixture
def world(make: Callable[..., World]) -> World:
    return make()


# Drop-outs


def test_drop_outs_in_every_step_leave_an_exact_sum(world: World) -> None:
    world.begin(SIZE, cohort={"size": SIZE, "minimum": 5})
    devices = world.enrol(SIZE)
    for number, step in ((0, "ready"), (1, "advertise"), (2, "shares"), (3, "consent")):
        devices[number].die_after(step)
    terms = world.terms
    world.drive()
    (status,) = world.statuses
    assert status.state == "committed"
    world.check(terms, set(range(3, SIZE)), status)
    assert status.session is not None
    assert status.session.began == SIZE
    came = status.session.answered
    assert (came["advertise"], came["shares"], came["masked"]) == (11, 10, 9)
    assert status.session.silent["advertise"] == status.session.silent["shares"] == 1
    assert status.num_examples == sum(1 + number for number in range(3, SIZE))
    text = world.server.get("/metrics", headers=ADMIN).text
    assert 'fedpress_session_dropouts_total{step="masked",task="digits"} 1.0' in text
    world.revive()  # they learn their fate, and keep their updates
    world.drive()
    reasons = world.reasons()
    assert [reasons.pop(number) for number in (0, 1, 2)] == [["dropped-out"]] * 3
    assert set(map(tuple, reasons.values())) == {("included",)}


@pytest.mark.parametrize("adversary", ["semi-honest", "malicious"])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_any_pattern_of_drop_outs_gives_an_exact_sum_or_none(
    world: World, adversary: str, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    world.begin(
        6,
        cohort={"size": 6, "minimum": 3},
        masking={"adversary": adversary, "levels": 127, "corrupt": 0.0},
        rounds=1,
        max_attempts=3,
    )
    devices = world.enrol(6, masking=MaskingRules(adversary="semi-honest", corrupt=0.0))
    gone = {}
    for number in rng.choice(6, size=2, replace=False):
        gone[int(number)] = str(rng.choice(STEPS))
        devices[number].die_after(gone[int(number)])
    terms = world.terms
    world.drive()
    status = world.statuses[-1]
    if status.state == "committed" and status.attempt == 1:
        summed_up = {n for n in range(6) if gone.get(n) in (None, "masked", "consent")}
        world.check(terms, summed_up, status)
    assert {each.state for each in world.statuses} <= {"committed", "abandoned"}
    for each in devices:
        for receipt in [e for e in each.events if e.kind == "settled"]:
            assert (receipt.details["outcome"] == "included") == (
                (receipt.round, receipt.attempt) == (status.round, status.attempt)
                and status.state == "committed"
            )


def test_too_few_survivors_give_everything_back(world: World) -> None:
    world.begin(4, cohort={"size": 4, "minimum": 3})
    devices = world.enrol(4)
    for each in devices[:2]:
        each.die_after("shares")
    world.drive_until(lambda: world.terms.plan.attempt == 2)
    (status,) = world.statuses[:1]
    assert status.state == "abandoned"
    assert "too few" in status.reason
    world.revive()
    terms = world.terms
    world.drive()
    assert [status.state for status in world.statuses] == ["abandoned", "committed"]
    world.check(terms, {0, 1, 2, 3}, world.statuses[1])
    assert set(map(tuple, world.reasons().values())) == {("round-abandoned", "included")}
    world.check_conserved()


def is_past(world: World, attempt: RoundKey) -> bool:
    return world.attempt is None or world.attempt.key != attempt


@pytest.mark.slow
def test_nothing_is_lost_over_masked_rounds_with_drop_outs(world: World) -> None:
    rounds = 4
    world.begin(5, rounds=rounds, cohort={"size": 5, "minimum": 3}, masking={"levels": 3})
    devices = world.enrol(5)
    rng = np.random.default_rng(3)
    for _ in range(40):
        if world.attempt is None:
            break
        unlucky = devices[rng.integers(5)]
        unlucky.die_after(str(rng.choice(STEPS)))
        world.drive_until(partial(is_past, world, world.attempt.key))
        world.check_conserved()
        world.revive()
    world.drive()
    committed = [each for each in world.statuses if each.state == "committed"]
    assert len(committed) == rounds
    assert any(each.included < 5 for each in committed)
    reasons = [reason for each in world.reasons().values() for reason in each]
    assert {"included", "dropped-out"} <= set(reasons)
    world.check_conserved()


# Deaths


def test_a_server_that_begins_again_at_every_step_changes_nothing(world: World) -> None:
    world.begin(5, cohort={"size": 5, "minimum": 3})
    devices = world.enrol(5)
    devices[4].die_after("masked")
    terms = world.terms
    phases: list[str] = []

    def begins_again() -> bool:
        kept = world.attempt
        if kept is None:
            return True
        phase = kept.session_phase or kept.round.phase
        if phase not in phases:
            phases.append(phase)
            world.start()
            if phase in ("unmasking", "folding"):  # goes on at once, and may be over by now
                return False
            rounds = [replace(each.round, session=None) for each in (world.attempt, kept)]
            assert rounds[0] == rounds[1]
            if kept.session is not None:
                key = kept.session.machine.key
                machine = replace(world.attempt.session.machine, key=key)
                assert replace(world.attempt.session, machine=machine) == kept.session
        return False

    world.drive_until(begins_again)
    world.drive()
    (status,) = world.statuses
    world.check(terms, {0, 1, 2, 3, 4}, status)
    due = ["collecting", "advertising", "sharing", "masking", "consenting", "revealing"]
    assert phases[: len(due)] == due


class Mortal(httpx.BaseTransport):
    """Lets the device die before its n-th request leaves, or after the answer to it was lost."""

    def __init__(self, inner: httpx.BaseTransport, left: Callable[[], bool]) -> None:
        self._inner, self._dies = inner, left

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if self._dies():
            raise Lost("before a request")
        answer = self._inner.handle_request(request)
        if self._dies():
            raise Lost("after a request")
        return answer


@pytest.mark.soak
def test_a_device_that_dies_at_any_moment_masks_once(
    world: World,
    soak: bool,
    record_property: Callable[[str, object], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Killed before and after each of its requests and each of its files, and begun again, it says
    the same."""
    died, left, mortal = 0, 0, world.folder
    write = state_module.write_durably

    def dies() -> bool:
        nonlocal left
        left -= 1
        return left == 0

    def write_or_die(path: Path, *parts: bytes | memoryview) -> None:
        if mortal in path.parents and dies():
            raise Lost("before a file")
        write(path, *parts)
        if mortal in path.parents and dies():
            raise Lost("after a file")

    def to_mortal(whole: Callable[[], httpx.BaseTransport]) -> httpx.BaseTransport:
        return Mortal(whole(), dies)

    monkeypatch.setattr(state_module, "write_durably", write_or_die)
    for at in range(2, 70, 1 if soak else 17):
        task = f"t{at}"
        masked_task(world.operator, world.model, 3, task, cohort={"size": 3, "minimum": 3})
        devices = world.enrol(3, task=task)
        devices[1].step()
        whole, left, mortal = devices[0]._http, at, devices[0].folder
        devices[0]._http = partial(to_mortal, whole)
        terms = world.terms_of(task)
        drive(devices, world.pass_time, begin_again=True)
        died += left <= 0
        (status,) = history(world.operator, task)
        assert (status.state, status.included) == ("committed", 3)
        world.check(terms, {each.number for each in devices}, status)
    record_property("figure", f"a device died {died} times in masked sessions: every sum exact")


# What is refused


def session_of(participant: Participant) -> MaskedPart:
    assert participant.client is not None
    assert participant.client._joined is not None
    assert participant.client._joined.masked_part is not None
    return participant.client._joined.masked_part


def raw(world: World, participant: Participant) -> Device:
    """The same device, to say what it should not."""
    assert participant.client is not None
    device = Device(world.server, world.clock, participant.client._enrolment.key)
    device.client_id = participant.client.ledger.client_id
    return device


def refusal(answer: httpx.Response) -> type[FedpressError] | None:
    if answer.status_code < 400:
        return None
    return type(FedpressError.from_problem(answer.json(), answer.status_code))


def test_messages_are_idempotent_and_only_for_those_in_the_session(world: World) -> None:
    world.begin(3, cohort={"size": 3, "minimum": 3, "over_selection": 1.5})
    devices = world.enrol(5)
    late = devices[4]
    for each in devices[:4]:
        each.step()
    late.step()
    world.drive_until(lambda: world.attempt.session_phase == "sharing")
    inside, outside = raw(world, devices[0]), raw(world, devices[3])
    path = f"/v1/assignments/{session_of(devices[0]).assignment}"
    said = session_of(devices[0])._machine
    assert said is not None
    first = world.attempt.session.machine.advertised[inside.key.public].to_bytes()

    def say(device: Device, step: str, body: bytes, where: str = path) -> Any:
        headers = {"Content-Type": "application/octet-stream"}
        return refusal(device.request("POST", f"{where}/session/{step}", body, headers))

    assert say(inside, "advertise", first) is None
    assert say(inside, "advertise", first[:-1] + bytes([first[-1] ^ 1])) is UpdateConflict
    assert say(inside, "advertise", b"") is MalformedRequest
    assert say(inside, "advertise", first + b"x") is MalformedRequest
    assert say(inside, "shares", first) is MalformedRequest
    assert say(inside, "shares", bytes(10**6)) is BodyTooLarge
    assert say(inside, "nonsense", first) is MalformedRequest
    assert say(outside, "advertise", first) is Forbidden
    mine = f"/v1/assignments/{session_of(devices[3]).assignment}"
    assert say(outside, "advertise", first, mine) is Forbidden
    assert refusal(outside.request("GET", f"{mine}/session/offer")) is Forbidden
    assert refusal(inside.request("POST", f"{path}/ready")) is None
    assert refusal(outside.request("POST", f"{mine}/ready")) is RoundClosed
    assert refusal(inside.request("GET", f"{path}/session/masked?wait=0")) is None
    assert refusal(inside.request("GET", f"{path}/session/masked?wait=99")) is MalformedRequest
    answer = inside.request("GET", f"{path}/session/masked")
    assert (answer.status_code, answer.headers["retry-after"]) == (204, "1")
    assert refusal(inside.put(path.rpartition("/")[2], b"early")) is RoundClosed


def test_a_masked_body_is_the_one_announced_and_comes_in_time(world: World) -> None:
    world.begin(4, cohort={"size": 4, "minimum": 3})
    devices = world.enrol(4)
    terms = world.terms
    bodies: list[bytes] = []
    slow = devices[3]

    def stop_before_upload(
        assignment: str, body: bytes, figures: UploadFigures | None = None
    ) -> Any:
        bodies.append(body)
        raise Lost(assignment)

    slow.start()
    assert slow.client is not None
    slow.client._transport.upload = stop_before_upload  # type: ignore[method-assign]
    world.drive_until(lambda: slow.is_gone)
    device, name = raw(world, slow), next(iter(slow.plain))
    (body,) = bodies
    assert body != slow.plain[name].body
    other = bytes([body[0] ^ 1]) + body[1:]
    assert refusal(device.put(name, other)) is InvalidUpdate
    assert refusal(device.put(name, body + b"x")) is BodyTooLarge
    world.drive_until(lambda: world.attempt.session_phase == "consenting")
    assert refusal(device.put(name, body)) is RoundClosed
    world.drive()
    (status,) = world.statuses
    world.check(terms, {0, 1, 2}, status)
    world.revive()
    world.drive()
    assert world.reasons()[3] == ["dropped-out"]
    world.check_conserved()


@pytest.mark.parametrize(
    "arrival", ["any", "meanwhile", pytest.param("after", marks=pytest.mark.slow)]
)
def test_a_wrong_share_is_made_up_for_by_another(
    world: World, arrival: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server begins with the first shares that suffice, finds them wrong, and goes on with
    those that arrive while it tries the first, or after that."""
    world.begin(5, cohort={"size": 5, "minimum": 3})
    devices = world.enrol(5)
    terms, liar = world.terms, devices[0]
    liar.start()
    assert liar.client is not None
    transport, key = liar.client._transport, liar.client._enrolment.key
    honest = transport.say

    def say(assignment: str, step: str, message: bytes) -> None:
        if step == "reveal":
            told = Reveal.from_bytes(message)
            wrong = bytes([told.shares[0] ^ 1]) + told.shares[1:]
            sid = world.attempt.session.machine.sid
            message = replace(told, shares=wrong).signed(key, sid).to_bytes()
        honest(assignment, step, message)

    transport.say = say  # type: ignore[method-assign]
    failed: list[str] = []
    may_fail = threading.Event()
    if arrival != "any":
        world.drive_until(lambda: world.attempt.session_phase == "revealing")
        last = next(each for each in devices[1:] if "reveal" not in each.steps)
        last.is_gone = True
    store = world.server.app.services.store
    seen = store.apply

    async def apply(task: Any, command: Any) -> Any:
        if isinstance(command, Happen) and isinstance(command.event, UnmaskFailed):
            failed.append(command.event.detail)
            if arrival == "meanwhile":
                await asyncio.to_thread(may_fail.wait, 30)
        return await seen(task, command)

    monkeypatch.setattr(store, "apply", apply)
    if arrival != "any":
        for each in [each for each in devices if not each.is_gone] * 3:
            each.step()
        stops_at = "unmasking" if arrival == "meanwhile" else "revealing"
        give_up = time.monotonic() + 60
        while not (failed and world.attempt.session_phase == stops_at):
            if time.monotonic() > give_up:
                break
            time.sleep(0.005)
        assert failed
        assert world.attempt.session_phase == stops_at
    if arrival == "meanwhile":
        last.is_gone = False
        last.step()
        may_fail.set()
    if arrival == "after":
        world.start()
        last.is_gone = False
    world.drive()
    (status,) = world.statuses
    world.check(terms, {0, 1, 2, 3, 4}, status)
    assert failed or arrival == "any"


def test_the_clear_lane_has_no_session(world: World) -> None:
    world.operator.begin(world.model, TASK, rounds=1)
    device = Device(world.server, world.clock)
    device.enrol(world.operator.token())
    path = f"/v1/assignments/{device.assignment(TASK).assignment}"
    assert refusal(device.request("POST", f"{path}/ready")) is Conflict
    assert refusal(device.request("GET", f"{path}/session/offer")) is Conflict


def test_two_masked_tasks_live_side_by_side(world: World) -> None:
    for task in ("one", "two"):
        masked_task(world.operator, world.model, 3, task, cohort={"size": 3, "minimum": 3})
    terms = {task: world.terms_of(task) for task in ("one", "two")}
    members = {task: world.enrol(3, task=task) for task in ("one", "two")}
    drive(world.participants, lambda: None)
    for task, devices in members.items():
        (status,) = history(world.operator, task)
        world.check(terms[task], {each.number for each in devices}, status)


# Whom a device trusts


def test_a_device_declines_what_its_rules_do_not_admit(world: World) -> None:
    world.begin(3, cohort={"size": 4, "minimum": 3}, masking={"adversary": "semi-honest"})
    lax = MaskingRules(adversary="semi-honest")
    strict = {
        "no protection from a malicious server": MaskingRules(),
        "3 survivors, fewer than 4": replace(lax, minimum=4),
        "no post-quantum keys": replace(lax, hybrid=True),
        "0.1 corrupt clients, less than 0.2": replace(lax, corrupt=0.2),
        "the suite 'chacha20'": replace(lax, suites=("aes-128-ctr",)),
    }
    for why, rules in strict.items():
        (device,) = world.enrol(1, masking=rules)
        device.step()
        (declined,) = [each for each in device.events if each.kind == "declined"]
        assert why in declined.details["reason"]
        assert device.trainer.computed == {}


@pytest.mark.parametrize(
    ("rule", "bounds"),
    [
        ("max_weight", {"max_weight": 99}),
        ("compressors", {"compressors": ("randomk",)}),
        ("min_support", {"min_support": 21}),
    ],
)
def test_a_device_bounds_what_a_plan_may_choose(
    world: World, rule: str, bounds: dict[str, Any]
) -> None:
    """Half of forty coordinates, by shared_support, each update counting up to 100 times."""
    world.begin(3, cohort={"size": 3, "minimum": 3}, masking={"max_weight": 100})
    fits = MaskingRules(max_weight=100, compressors=("shared_support",), min_support=20)
    strict, lax = world.enrol(1, masking=replace(fits, **bounds)) + world.enrol(1, masking=fits)
    for each in (strict, lax):
        each.step()
    (declined,) = [each for each in strict.events if each.kind == "declined"]
    assert declined.details["rule"] == rule
    assert "the plan of round 1.1 of task 'digits'" in declined.details["reason"]
    assert strict.trainer.computed == {}
    assert len(lax.trainer.computed) == 1


def test_a_task_gets_no_more_updates_than_its_device_gives(world: World) -> None:
    world.begin(3, rounds=2, cohort={"size": 3, "minimum": 3})
    sparing = world.enrol(1, masking=MaskingRules(max_rounds=1))[0]
    world.enrol(2)
    world.drive_until(lambda: any("rule" in each.details for each in sparing.events))
    assert len(sparing.trainer.computed) == 1
    (declined,) = [each for each in sparing.events if "rule" in each.details]
    assert declined.details["rule"] == "max_rounds"
    assert declined.details["reason"].startswith("the plan of round 2.")


def test_a_task_that_was_masked_stays_masked_for_its_devices(world: World) -> None:
    """The lane is pinned by the first masked round, on the disk, for devices without rules too."""
    world.begin(3, cohort={"size": 3, "minimum": 3})
    devices = world.enrol(3, masking=None)
    plan = world.terms.plan.model_copy(update={"lane": "clear", "masking": None})
    world.drive()
    for each in devices:
        assert each.client is not None
        each.start()
        here = each.client._join()
        with pytest.raises(PlanDeclined, match="joined the task when it was masked") as refused:
            each.client._runner.masked.check_plan(here, plan)
        assert refused.value.members["rule"] == "pinned lane"


def test_a_state_directory_brought_back_from_a_copy_masks_nothing_else(world: World) -> None:
    """A copy of the folder is taken when the device is ready to mask. It masks, and dies before the
    body has left; then the copy of the session is brought back, to an account that holds other
    values. Under the same masks the two bodies would differ by what the updates differ by."""
    world.begin(3, cohort={"size": 3, "minimum": 3})
    devices = world.enrol(3)
    victim = devices[0]
    folder = victim.folder / "tasks" / TASK
    copies: list[bytes] = []
    mask = MaskedPart._mask

    def copy_first(part: MaskedPart, machine: Any) -> None:
        copies.append((folder / "session").read_bytes())
        mask(part, machine)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MaskedPart, "_mask", copy_first)
        victim.die_after("masked")
        world.drive_until(lambda: victim.is_gone)
    (name,) = victim.ledger.pending
    plain = victim.plain[name]
    packing = Payload(
        world.terms.plan,
        world.terms.plan.public(world.model.spec, {"previous": np.zeros(40, np.float32)}),
    ).packing
    values = dict(packing.unpack(packing.from_bytes(plain.body)))
    values["values"] = -values["values"]
    other = replace(plain, body=packing.to_bytes(packing.pack(values)))
    assert other.body != plain.body
    ledger = replace(victim.ledger, pending={name: other})
    (folder / "ledger.safetensors").write_bytes(ledger.to_bytes())
    (folder / "session").write_bytes(copies[0])
    world.revive()
    victim.step()
    assert victim.ledger.pending[name].session is None, "nothing was masked"
    assert victim.ledger.pending[name].body == other.body
    assert any("restored from a copy" in str(each.details) for each in victim.events)


def test_a_device_withdraws_from_a_server_that_lies(world: World) -> None:
    """Told that nobody else shared, it says nothing more, and the others go on without it."""
    world.begin(4, cohort={"size": 4, "minimum": 3})
    devices = world.enrol(4)
    terms, victim = world.terms, devices[0]
    victim.start()
    assert victim.client is not None
    transport = victim.client._transport
    honest = transport.hear

    def hear(assignment: str, step: str, wait: float) -> bytes | float:
        heard = honest(assignment, step, wait)
        if step != "shares" or not isinstance(heard, bytes):
            return heard
        machine = session_of(victim)._machine
        assert machine is not None
        key: DeviceKey = world.server.app.services.server_keys.current
        return Inbox(frozenset({0, 1, 2}), ()).signed(key, machine.sid).to_bytes()

    transport.hear = hear  # type: ignore[method-assign]
    world.drive()
    (status,) = world.statuses
    world.check(terms, {1, 2, 3}, status)
    (declined,) = [each for each in victim.events if each.kind == "declined"]
    assert "withdrawn from the session" in declined.details["reason"]
    assert world.reasons()[0] == ["declined"]
    assert victim.steps[-1] == "shares"
    assert (victim.folder / "tasks" / TASK / "session").stat().st_size < 100  # no secrets left
    world.check_conserved()


def test_what_the_server_did_not_sign_is_as_good_as_no_answer(world: World) -> None:
    """Somebody on the way answers first; the session goes on as if nobody had."""
    world.begin(3, cohort={"size": 3, "minimum": 3})
    devices = world.enrol(3)
    terms, victim = world.terms, devices[0]
    victim.start()
    assert victim.client is not None
    transport, stranger = victim.client._transport, DeviceKey.generate()
    honest = transport.hear
    forged: list[Inbox] = []

    def hear(assignment: str, step: str, wait: float) -> bytes | float:
        heard = honest(assignment, step, wait)
        if step == "shares" and isinstance(heard, bytes) and not forged:
            machine = session_of(victim)._machine
            assert machine is not None
            forged.append(Inbox(frozenset({0, 1, 2}), ()).signed(stranger, machine.sid))
            return forged[0].to_bytes()
        return heard

    transport.hear = hear  # type: ignore[method-assign]
    world.drive()
    assert forged
    assert "unsigned" in victim.steps
    world.check(terms, {0, 1, 2}, world.statuses[0])


def test_what_was_heard_before_is_no_reason_to_ask_again_at_once(world: World) -> None:
    """A server that repeats itself costs a question in a second, and nothing is written."""
    world.begin(3, cohort={"size": 3, "minimum": 3})
    devices = world.enrol(3)
    terms, victim = world.terms, devices[0]
    victim.start()
    assert victim.client is not None
    transport = victim.client._transport
    honest = transport.hear
    rosters: list[bytes] = []
    repeats: list[str] = []

    def hear(assignment: str, step: str, wait: float) -> bytes | float:
        if step == "shares" and len(repeats) < 5:
            repeats.append(step)
            return rosters[0]
        heard = honest(assignment, step, wait)
        if step == "advertise" and isinstance(heard, bytes):
            rosters.append(heard)
        return heard

    transport.hear = hear  # type: ignore[method-assign]
    world.drive_until(lambda: bool(repeats))
    path = victim.folder / "tasks" / TASK / "session"
    written = path.stat()
    for count in range(2, 6):
        pause = victim.step()
        assert pause is not None
        assert (len(repeats), pause >= 1.0) == (count, True)
    assert path.stat() == written
    world.drive()
    world.check(terms, {0, 1, 2}, world.statuses[0])


def test_nothing_yet_is_no_reason_to_ask_again_at_once(world: World) -> None:
    """Unless the server took its time to say so."""
    world.begin(3, cohort={"size": 3, "minimum": 3})
    victim = world.enrol(1)[0]
    victim.start()
    assert victim.client is not None
    takes = [0.0]

    def hear(assignment: str, step: str, wait: float) -> float:
        world.clock.advance(takes[-1])
        return 0.0

    victim.client._transport.hear = hear  # type: ignore[method-assign]
    victim.step()
    for seconds, pause in ((0.0, 1.0), (0.5, 1.0), (20.0, 0.0)):
        takes.append(seconds)
        assert session_of(victim).advance(20.0) == pause


def test_secrets_go_when_the_session_has_expired(world: World) -> None:
    """A device that was away until then forgets them by itself; its update comes back to it."""
    world.begin(4, cohort={"size": 4, "minimum": 3})
    devices = world.enrol(4)
    away = devices[0]
    away.die_after("shares")
    world.drive_until(lambda: world.attempt is None)
    held = (away.folder / "tasks" / TASK / "session").stat().st_size
    world.clock.advance(8 * 86_400)
    away.is_gone, away.on_event = False, lambda event: None
    away.start()
    assert away.client is not None
    assert away.client.ledger.pending
    part = session_of(away)
    part._expire()
    assert (away.folder / "tasks" / TASK / "session").stat().st_size < held / 2
    assert part._machine is not None
    assert part._machine.phase == "over"
    world.drive()
    world.check_conserved()


def test_a_session_that_lasts_for_weeks_is_declined(world: World) -> None:
    world.begin(3, cohort={"size": 3, "minimum": 3}, masking={"seconds": {"mask": 864_000}})
    devices = world.enrol(3)
    for _ in range(6):
        for device in devices:
            device.step()
    reasons = [e.details["reason"] for e in devices[0].events if e.kind == "declined"]
    assert "a session that may last 1" in reasons[0]


class Measuring(Numbered):
    def evaluate(self, model: Model) -> Evaluation:
        return Evaluation(10, {"loss": 1.0})


@pytest.mark.parametrize("reports", [False, True])
def test_losses_travel_beside_the_masks_only_by_choice(world: World, reports: bool) -> None:
    world.begin(3, cohort={"size": 3, "minimum": 3})
    devices = world.enrol(3, masking=MaskingRules(reports_evaluations=reports))
    for device in devices:
        device.trainer = Measuring(device.number)
    world.drive()
    assert any(event.kind == "evaluated" for event in devices[0].events)
    assert bool(world.statuses[0].metrics) == reports


class Correcting(Numbered):
    honours = frozenset({"control"})


def test_control_variates_agree_under_masks(world: World) -> None:
    """SCAFFOLD's server knows the mean of the clients' control variates from the sums alone; a
    device that drops out on the way changes nothing of its own."""
    world.begin(
        4,
        rounds=3,
        cohort={"size": 4, "minimum": 3},
        strategy={"id": "scaffold", "clients": 4},
        profiles=[{"name": "one", "compressor": {"id": "shared_support", "fraction": 0.5}}],
        training={"local_steps": 2, "learning_rate": 0.1},
    )
    devices = world.enrol(4)
    for device in devices:
        device.trainer = Correcting(device.number)
    devices[0].die_after("shares")
    world.drive()
    assert [status.included for status in world.statuses] == [3, 3, 3]
    (file,) = (world.folder / "server").rglob("optimizers/*.safetensors")
    control = safetensors.numpy.load_file(file)["state.control"]
    total = np.zeros(world.model.spec.size)
    for device in devices[1:]:
        assert device.client is not None
        assert device.client.ledger.control is not None
        total += device.client.ledger.control
    assert np.abs(control).max() > 0.01
    np.testing.assert_allclose(control, total / 4, atol=1e-5)


def test_a_receipt_is_of_the_sum_that_the_device_saw(world: World) -> None:
    world.begin(3, cohort={"size": 3, "minimum": 3})
    devices = world.enrol(3)
    world.drive_until(lambda: world.attempt.session_phase == "revealing")
    device = devices[0]
    world.drive_until(lambda: device.steps[-1] in ("reveal", "left"))
    part = session_of(device)
    assert part._machine is not None
    receipt = Receipt(
        assignment=part.assignment,
        client_id="c",
        task=TASK,
        round=1,
        attempt=1,
        outcome="included",
        reason="included",
        upload=None,
        model=None,
        issued_at=1,
        masked=MaskedSum(
            session=part._machine.sid.hex(),
            survivors=survivors_digest(frozenset({0, 1, 2})).hex(),
            aggregate="0" * 64,
        ),
    )
    part.check(receipt)
    other = {"session": "0" * 64}, {"survivors": "0" * 64}
    for change in other:
        masked = receipt.masked.model_copy(update=change) if receipt.masked else None
        with pytest.raises(Conflict, match="other"):
            part.check(receipt.model_copy(update={"masked": masked}))
    with pytest.raises(Conflict):
        part.check(receipt.model_copy(update={"masked": None}))


def test_a_certificate_is_renewed_in_time(world: World) -> None:
    world.begin(3, rounds=2, cohort={"size": 3, "minimum": 3})
    devices = world.enrol(3)
    world.drive_until(lambda: world.attempt.key[1] == 2)
    first = [StateDirectory.open(each.folder).identity() for each in devices]
    world.clock.advance(80 * 86_400)
    world.drive()
    for each, before in zip(devices, first, strict=True):
        after = StateDirectory.open(each.folder).identity()
        assert before is not None
        assert after is not None
        assert after.certificate != before.certificate
        assert (after.authority, after.population) == (before.authority, before.population)
    assert [status.included for status in world.statuses if status.model] == [3, 3]


def test_an_authority_is_pinned(tmp_path: Path) -> None:
    authority, key = DeviceKey.generate(), DeviceKey.generate()
    made = Certificate.issue(
        authority, identity=key.public, client_id="c", population="kitchen", expires=100
    )
    told = Membership(
        population="kitchen",
        authority=to_base64url(authority.public),
        certificate=to_base64url(made.to_bytes()),
    )
    blank = Identity(url="http://x", client_id="c", server_key="k")
    known = joined(blank, told, MaskingRules(), key=key.public, now=1.0)
    assert (known.population, known.authority) == (told.population, told.authority)
    other = told.model_copy(update={"authority": to_base64url(key.public)})
    with pytest.raises(ConfigurationError, match="pinned is"):
        joined(known, other, MaskingRules(), key=key.public, now=1.0)
    moved = told.model_copy(update={"population": "attic"})
    with pytest.raises(ConfigurationError, match="it was 'kitchen'"):
        joined(known, moved, MaskingRules(), key=key.public, now=1.0)
    with pytest.raises(ConfigurationError, match="expired"):
        joined(blank, told, MaskingRules(), key=key.public, now=100.0)
    with pytest.raises(ConfigurationError, match="its rules name"):
        Member.of(known, MaskingRules(authority=to_base64url(key.public)))


def test_an_authority_apart_certifies_devices(make: Callable[..., World], tmp_path: Path) -> None:
    authority, stranger = DeviceKey.generate(), DeviceKey.generate()
    public = to_base64url(authority.public)
    world = make(masking_authority=public, population="kitchen")
    world.begin(3, cohort={"size": 3, "minimum": 3})
    terms = world.terms

    def certified(by: DeviceKey, number: int, population: str = "kitchen") -> Path:
        key = StateDirectory.open(tmp_path / f"device-{number}").key()
        made = Certificate.issue(
            by,
            identity=key.public,
            client_id=f"camera {number}",
            population=population,
            expires=int(world.clock()) + 86_400 * 365,
        )
        path = tmp_path / f"certificate-{number}"
        path.write_bytes(made.to_bytes())
        return path

    for number in range(3):
        rules = MaskingRules(authority=public, certificate=certified(authority, number))
        world.enrol(1, masking=rules)
    world.drive()
    (status,) = world.statuses
    world.check(terms, {0, 1, 2}, status)
    masked_task(world.operator, world.model, 3, "other")
    number = len(world.participants)
    refused = {
        "pinned is": MaskingRules(authority=to_base64url(stranger.public)),
        "no certificate": MaskingRules(),
        "not a certificate": MaskingRules(certificate=Path(__file__)),
        "is of another key": MaskingRules(certificate=certified(authority, 99)),
        "not good for": MaskingRules(certificate=certified(stranger, number + 4)),
        "the population": MaskingRules(certificate=certified(authority, number + 5, "attic")),
    }
    for why, rules in refused.items():
        (device,) = world.enrol(1, task="other", masking=rules)
        device.step()
        (declined,) = [each for each in device.events if each.kind == "declined"]
        assert why in declined.details["reason"], why
        assert device.trainer.computed == {}


def test_a_strategy_that_looks_at_single_updates_is_refused(world: World) -> None:
    with pytest.raises(IncompatiblePlan, match="the sum alone"):
        world.begin(3, strategy={"id": "median"})
    with pytest.raises(IncompatiblePlan, match="commute with the sum"):
        world.begin(3, profiles=[{"name": "one", "compressor": {"id": "topk"}}])
    with pytest.raises(IncompatiblePlan, match=r"cohort\.minimum"):
        world.begin(3, cohort={"size": 3, "minimum": 2})
