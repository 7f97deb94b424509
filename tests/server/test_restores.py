"""included y + residual + pending y + reported discards = everything computed, over restores."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import sqlalchemy as sa

from fedpress_client import Client, Discard, Ledger, Trained, TrainingRequest
from fedpress_client.ledger_records import Pending
from fedpress_client.state import StateDirectory
from fedpress_client.transport import HttpTransport
from fedpress_compression.update import Piece, Update
from fedpress_protocols.errors import Conflict, Forbidden, InvalidSignature
from fedpress_protocols.messages import Recall, Receipt, Restore, SignedReceipt
from fedpress_protocols.model import Model
from fedpress_protocols.signatures import DeviceKey
from fedpress_server import Settings
from fedpress_server.backup import back_up, restore, verify
from fedpress_server.registry import restores
from fedpress_server.storage.tables import assignments
from tests.devices import ADMIN_TOKEN, Operator
from tests.masked import TASK, Participant, Unread, drive, masked_task
from tests.server.in_process import Clock, Server, Start

EPS = float(np.finfo(np.float32).eps)
TOPK = {"id": "topk", "fraction": 0.1}
COMPRESSORS: dict[str, dict[str, Any]] = {
    "sparse": {"id": "error_feedback", "inner": TOPK},
    "dense": {"id": "error_feedback", "inner": {"id": "quantize", "bits": 4}},
    "without feedback": TOPK,
    "delta": {"id": "delta", "inner": TOPK},
}


class Link(httpx.BaseTransport):
    """To whichever server there is now."""

    def __init__(self) -> None:
        self.server: Server | None = None

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        assert self.server is not None
        return Unread(self.server).handle_request(request)


class Trainer:
    def __init__(self, number: int) -> None:
        self.rng = np.random.default_rng(number)
        self.total: np.ndarray | float = 0.0
        self.magnitude: np.ndarray | float = 0.0

    def train(self, model: Model, work: TrainingRequest) -> Trained:
        del work
        update = self.rng.standard_t(3, model.spec.size).astype(np.float32) / np.float32(8)
        parameters = model.parameters + update
        computed = (parameters - model.parameters).astype(np.float64)
        self.total += computed
        self.magnitude += np.abs(computed)
        return Trained(parameters, num_examples=1)

    def evaluate(self, model: Model) -> None:
        return None


class Device:
    """A real client; its oracle sees every upload while it is pending."""

    def __init__(self, number: int, link: Link, folder: Path, clock: Clock, token: str) -> None:
        self.number, self.link, self.folder, self.clock = number, link, folder, clock
        self.token, self.trainer = token, Trainer(number)
        self.sent: dict[str, np.ndarray] = {}
        self.bodies: dict[str, str] = {}
        self.discards: dict[int, Discard] = {}
        self.events: list[str] = []
        self.client = self.started()

    def started(self) -> Client:
        key = StateDirectory.open(self.folder).key()
        url = "http://fedpress.test"
        return Client(
            url,
            self.trainer,
            state_dir=self.folder,
            task="digits",
            token=self.token,
            seed=self.number,
            wait=0.0,
            transport=HttpTransport(url, key, http=self.link, clock=self.clock),
            clock=self.clock,
            on_discard=lambda discard: self.discards.update({discard.number: discard}),
            on_event=lambda event: self.events.append(event.kind),
        )

    def again(self) -> None:
        self.client.close()
        self.client = self.started()

    @property
    def ledger(self) -> Ledger:
        path = self.folder / "tasks" / "digits" / "ledger.safetensors"
        return Ledger.from_bytes(path.read_bytes())

    def step(self) -> bool:
        """True once the task is over for it."""
        is_over = self.client.step() is None
        self.check()
        return is_over

    def check(self) -> None:
        """The account on the disk against everything that was computed."""
        if not (self.folder / "tasks" / "digits" / "ledger.safetensors").exists():
            return
        ledger = self.ledger
        for name, held in ledger.pending.items():
            self.sent[name] = held.update.dense().astype(np.float64)
            self.bodies[name] = held.digest
        found = np.zeros_like(self.trainer.total)
        magnitude = np.array(self.trainer.magnitude)
        for name, outcome in ledger.settled.items():
            if outcome == "included":
                found += self.sent[name]
        for name in ledger.pending:
            found += self.sent[name]
        if ledger.residual is not None:
            found += ledger.residual
        for discard in (self.discards | {d.number: d for d in ledger.discards}).values():
            if discard.reason == "rolled-back":
                assert discard.assignment is not None
                lost = self.sent[discard.assignment]
                assert discard.norm == pytest.approx(float(np.linalg.norm(lost)))
                found += lost
            else:
                found += discard.vector
        magnitude += sum(np.abs(each) for each in self.sent.values())
        error = np.abs(found - self.trainer.total)
        np.testing.assert_array_less(error, 16 * EPS * magnitude + 1e-9)


class Fleet:
    def __init__(
        self, start: Start, clock: Clock, model: Model, tmp_path: Path, seed: int, **config: Any
    ) -> None:
        self.start, self.clock, self.model, self.folder = start, clock, model, tmp_path
        self.rng = np.random.default_rng(seed)
        self.config = config
        self.link = Link()
        self.devices: list[Device] = []

    def begin(self, http: Server, *, enrolled: bool = False) -> None:
        """A task, and devices that enrol now or with their first step; as its members, now."""
        self.link.server = http
        operator = Operator(http)
        token = operator.token(uses=4)
        self.devices = [
            Device(number, self.link, self.folder / f"device{number}", self.clock, token)
            for number in range(4)
        ]
        if enrolled:
            ids = [device.client.ledger.client_id for device in self.devices]
            if self.config.get("members"):
                self.config["members"] = ids
        operator.begin(self.model, **self.config)

    def back_up(self, http: Server, name: str) -> None:
        where = http.app.services.settings
        asyncio.run(back_up(where, self.folder / name, clock=self.clock, with_keys=True))

    def restored(self, backup: str, name: str) -> Path:
        folder = self.folder / name
        settings = Settings(data_dir=folder, admin_token=ADMIN_TOKEN)
        restore(self.folder / backup, settings, clock=self.clock)
        return folder

    def go_on(self, http: Server, rounds: int | None = None) -> None:
        """Until so many rounds are committed, or the task is over for every device."""
        self.link.server = http
        left = list(self.devices)
        for _ in range(5000):
            done = int(Operator(http).get("/v1/tasks/digits")["round"])
            if not left or (rounds is not None and done >= rounds):
                return
            device = left[self.rng.integers(len(left))]
            if self.rng.random() < 0.05:
                device.again()
            self.clock.advance(1)
            if device.step():
                left.remove(device)
        raise AssertionError("the task did not go on")

    def end(self, http: Server) -> None:
        """What devices take for included is what the server's receipts say, and in its models."""
        for device in self.devices:
            assert not device.ledger.pending
        read = http.app.services.database.read
        rows = http.call(read, lambda c: c.execute(sa.select(assignments)).all())
        by_round: dict[int, list[np.ndarray]] = {}
        sent = {name: y for device in self.devices for name, y in device.sent.items()}
        included = set()
        for row in rows:
            if row.receipt is None:
                continue
            receipt = SignedReceipt.model_validate_json(row.receipt).receipt
            if receipt.outcome == "included":
                included.add(receipt.assignment)
                by_round.setdefault(receipt.round, []).append(sent[receipt.assignment])
        taken = {
            name
            for device in self.devices
            for name, outcome in device.ledger.settled.items()
            if outcome == "included"
        }
        assert taken == included
        moved = sum(np.mean(each, axis=0) for each in by_round.values())
        newest = Operator(http).get("/v1/tasks/digits")["model"]
        data = http.get(f"/v1/models/{newest}", headers=Operator(http).headers).content
        change = Model.from_bytes(data).parameters.astype(np.float64) - self.model.parameters
        np.testing.assert_allclose(change, moved, atol=1e-5)


@pytest.fixture
def wide() -> Model:
    weights = np.linspace(-1, 1, 240, dtype=np.float32).reshape(12, 20)
    return Model.from_tensors({"weight": weights})


@pytest.mark.parametrize(
    "kind",
    [
        kind if kind == "sparse" else pytest.param(kind, marks=pytest.mark.slow)
        for kind in COMPRESSORS
    ],
)
def test_nothing_is_lost_over_a_restore(
    start: Start, clock: Clock, wide: Model, tmp_path: Path, kind: str
) -> None:
    more = {"members": True} if kind == "delta" else {}
    profile = {"name": "p", "compressor": COMPRESSORS[kind]}
    fleet = Fleet(
        start,
        clock,
        wide,
        tmp_path,
        seed=len(kind),
        rounds=9,
        profiles=[profile],
        cohort={"size": 3, "minimum": 2},
        **more,
    )
    with start() as http:
        fleet.begin(http, enrolled=kind == "delta")
        fleet.go_on(http, 2)
        fleet.back_up(http, "backup")
        fleet.go_on(http, 6)
        before = sum(device.ledger.included for device in fleet.devices)
        assert any(device.ledger.kept for device in fleet.devices)
    with start(data_dir=fleet.restored("backup", "other")) as http:
        fleet.link.server = http
        for device in fleet.devices:
            device.step()
        assert sum(device.ledger.included for device in fleet.devices) < before
        fleet.go_on(http)
        fleet.end(http)
        [status] = Operator(http).get("/v1/admin/restores")
        assert {each["round"] for each in status["undone"]} >= {4, 5}
    reasons = {d.reason for device in fleet.devices for d in device.discards.values()}
    match kind:
        case "sparse":
            assert not reasons  # all of it was there, and is in the residuals
        case "dense":
            assert reasons == {"rolled-back"}  # half a model is kept, not one
        case "delta":  # which keeps no residual
            assert reasons == {"rolled-back", "not-included", "not-sent"}
        case _:
            assert "rolled-back" not in reasons
            assert "not-included" in reasons


@pytest.mark.slow
def test_nothing_is_lost_over_restores_of_old_backups(
    start: Start, clock: Clock, wide: Model, tmp_path: Path
) -> None:
    """The newest backup is lost as well: what devices let go of because of it, they report."""
    fleet = Fleet(
        start,
        clock,
        wide,
        tmp_path,
        seed=5,
        rounds=9,
        profiles=[{"name": "p", "compressor": COMPRESSORS["sparse"]}],
        cohort={"size": 3, "minimum": 2},
    )
    with start() as http:
        fleet.begin(http)
        fleet.back_up(http, "first")
        fleet.go_on(http, 3)
        clock.advance(600)
        fleet.back_up(http, "second")
        fleet.go_on(http, 6)
    with start(data_dir=fleet.restored("second", "other")) as http:
        fleet.go_on(http, 6)
    with start(data_dir=fleet.restored("first", "third")) as http:
        fleet.go_on(http)
        fleet.end(http)
    told = [d for device in fleet.devices for d in device.discards.values()]
    assert {each.reason for each in told} == {"rolled-back"}
    assert all("restored" in device.events for device in fleet.devices)


@pytest.mark.parametrize("at", [pytest.param("before", marks=pytest.mark.slow), "after"])
def test_a_crash_while_a_restore_is_taken_account_of_changes_nothing(
    start: Start, clock: Clock, wide: Model, tmp_path: Path, at: str
) -> None:
    fleet = Fleet(
        start,
        clock,
        wide,
        tmp_path,
        seed=6,
        rounds=6,
        profiles=[{"name": "p", "compressor": COMPRESSORS["sparse"]}],
        cohort={"size": 3, "minimum": 2},
    )

    class Crash(BaseException):
        pass

    with start() as http:
        fleet.begin(http, enrolled=True)
        fleet.back_up(http, "backup")
        fleet.go_on(http, 3)
    with start(data_dir=fleet.restored("backup", "other")) as http:
        fleet.link.server = http
        for device in fleet.devices:
            here = device.client._join()
            save: Callable[[Ledger], None] = here.files.save

            def dies(ledger: Ledger, save: Callable[[Ledger], None] = save) -> None:
                if at == "after":
                    save(ledger)
                raise Crash

            here.files.save = dies  # type: ignore[method-assign]
            with pytest.raises(Crash):
                device.client.step()
            device.check()
            device.again()
        fleet.go_on(http)
        fleet.end(http)


# The account alone


def account() -> Ledger:
    return Ledger("task", "me", spec="s", backup_at=100)


def kept_one(ledger: Ledger, name: str = "a", **more: Any) -> Ledger:
    """With an upload of ones at four coordinates of sixteen that was included."""
    where = np.arange(4, dtype=np.int64)
    held = Pending(
        body=b"body",
        update=Update(16, (Piece(where, np.ones(4, np.float32)),)),
        num_examples=1,
        round=1,
        attempt=1,
        model="m",
        spec="s",
        profile="p",
        feedback=True,
        compressor="",
        state_name='"error_feedback"',
        mark=None,
        number=ledger.counter + 1,
        **more,
    )
    ledger = replace(ledger, pending={name: held}, counter=ledger.counter + 1)
    return ledger.settle(receipt_of(name, held.digest))


def receipt_of(name: str, upload: str, **more: Any) -> Receipt:
    fields: dict[str, Any] = {
        "assignment": name,
        "client_id": "me",
        "task": "task",
        "round": 1,
        "attempt": 1,
        "outcome": "included",
        "reason": "included",
        "upload": upload,
        "model": "0" * 64,
        "issued_at": 200,
    }
    return Receipt(**(fields | more))


def recall_of(*names: str, client_id: str = "me") -> Recall:
    made = Restore(number=1, epoch="e", backup_at=100, restored_at=300)
    return Recall(client_id=client_id, task="task", restore=made, unknown=names, issued_at=300)


def test_what_a_recall_undoes_returns_once() -> None:
    ledger = kept_one(account(), control=2.0)
    assert ledger.control is not None
    assert ledger.control.sum() == 8
    after = ledger.recalled(recall_of("a", "nobodys"))
    assert after.residual is not None
    assert after.residual.sum() == 4
    assert after.control is not None
    assert not after.control.any()
    assert after.settled == {"a": "not-included"}
    assert (after.included, after.not_included) == (0, 1)
    again = after.recalled(recall_of("a"))
    assert again.residual is after.residual
    assert Ledger.from_bytes(after.to_bytes()).to_bytes() == after.to_bytes()
    kept = Ledger.from_bytes(ledger.to_bytes())
    assert kept.to_bytes() == ledger.to_bytes()
    assert kept.fates == ledger.fates
    with pytest.raises(Forbidden):
        ledger.recalled(recall_of("a", client_id="you"))


def test_a_receipt_contradicts_another_in_a_later_epoch_alone() -> None:
    ledger = kept_one(account())
    lost = {"outcome": "not-included", "reason": "round-abandoned", "model": None}
    with pytest.raises(Conflict):
        ledger.settle(receipt_of("a", "0" * 64, **lost))
    after = ledger.settle(receipt_of("a", "0" * 64, **lost, epoch="e"))
    assert after.settled == {"a": "not-included"}
    assert after.residual is not None
    assert after.residual.sum() == 4
    with pytest.raises(Conflict):
        after.settle(receipt_of("a", "0" * 64, epoch="e"))


def test_an_account_keeps_no_more_than_half_a_model() -> None:
    ledger = account()
    for name in "abcd":
        ledger = kept_one(ledger, name)
    assert [each.update is not None for each in ledger.kept.values()] == [False, False, True, True]
    after = ledger.recalled(recall_of("a"))
    [discard] = after.discards
    assert (discard.reason, discard.assignment, discard.norm) == ("rolled-back", "a", 2.0)
    assert Ledger.from_bytes(after.to_bytes()).discards[0].norm == 2.0
    after = ledger.goes_back_to(500)
    assert all(each.update is None for each in after.kept.values())
    assert after.goes_back_to(400) is after


def test_a_server_without_backups_has_devices_keep_nothing() -> None:
    assert not kept_one(replace(account(), backup_at=None)).kept


def test_a_recall_that_the_server_did_not_sign_is_refused(
    start: Start, clock: Clock, wide: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = Fleet(start, clock, wide, tmp_path, seed=7, rounds=2, cohort={"size": 4, "minimum": 4})
    with start() as http:
        fleet.begin(http, enrolled=True)
        fleet.back_up(http, "backup")
        for device in fleet.devices[:2]:
            device.step()
    signed, forger = restores.signed, DeviceKey.generate()
    monkeypatch.setattr(restores, "signed", lambda key, *more: signed(forger, *more))
    with start(data_dir=fleet.restored("backup", "other")) as http:
        fleet.link.server = http
        pending = set(fleet.devices[0].ledger.pending)
        with pytest.raises(InvalidSignature):
            fleet.devices[0].client.step()
        assert set(fleet.devices[0].ledger.pending) == pending


def test_a_masked_session_of_the_backup_is_not_gone_on_with(
    start: Start, clock: Clock, wide: Model, tmp_path: Path
) -> None:
    """Backed up in the middle of a session, which ends in the server before: going on with it might
    ask for the other half of somebody's secrets. Its round begins anew, under new masks."""
    link, size = Link(), 4
    with start() as http:
        link.server = http
        operator = Operator(http)
        masked_task(operator, wide, size, rounds=2)
        token = operator.token(uses=size)
        devices = [
            Participant(tmp_path, number, token, lambda: link, clock, url="http://fedpress.test")
            for number in range(size)
        ]
        for _ in range(40):
            state = operator.get(f"/v1/tasks/{TASK}/rounds")[-1]["state"]
            if state == "masking":
                break
            for device in devices:
                device.step()
        assert state == "masking"
        place = tmp_path / "backup"
        asyncio.run(back_up(http.app.services.settings, place, clock=clock, with_keys=True))
        assert verify(place).faults == ()
        assert verify(place).num_open == 1
        for _ in range(200):
            for device in devices:
                device.step()
            if operator.get(f"/v1/tasks/{TASK}")["round"] == 1:
                break
        for device in devices:
            device.step()
    settings = Settings(data_dir=tmp_path / "other", admin_token=ADMIN_TOKEN)
    restore(place, settings, clock=clock)
    with start(data_dir=settings.data_dir) as http:
        link.server = http
        drive(devices, lambda: clock.advance(61))
        states = [each["state"] for each in Operator(http).get(f"/v1/tasks/{TASK}/rounds")]
        assert states == ["abandoned", "committed", "committed"]
        for device in devices:
            assert device.ledger.included == 2
            assert not device.ledger.pending
