"""A device through a whole task, and through what it must not put up with."""

from __future__ import annotations

import hashlib
import importlib.util
import math
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedpress_client import (
    AssignmentDeclined,
    Client,
    Discard,
    Evaluation,
    Event,
    FailurePolicy,
    Ledger,
    MaskingRules,
    Trained,
    TrainingRequest,
    UpdateTrained,
    load_trainer,
)
from fedpress_client.state import TaskFiles
from fedpress_client.transport import News
from fedpress_compression import compressor as registry
from fedpress_compression.coding.fields import Layout, Symbols
from fedpress_compression.compressor import Compressor, Knowledge, Public
from fedpress_compression.compressors.coded import Coded
from fedpress_compression.compressors.error_feedback import ErrorFeedback
from fedpress_compression.compressors.none import Uncompressed
from fedpress_compression.compressors.quantize import Quantize
from fedpress_compression.compressors.randomk import RandomK
from fedpress_compression.compressors.topk import TopK
from fedpress_compression.tensors import ModelSpec, Vector
from fedpress_compression.update import Update
from fedpress_protocols.errors import (
    ConfigurationError,
    Conflict,
    FedpressError,
    Forbidden,
    IncompatiblePlan,
    InvalidSignature,
    InvalidToken,
    InvalidUpdate,
    RoundClosed,
    StateLocked,
    TransportError,
    UnknownAssignment,
    UpdateConflict,
)
from fedpress_protocols.messages import CheckInRequest, TaskSummary, UploadAck, UploadFigures
from fedpress_protocols.model import Model
from fedpress_protocols.plan import TrainingTerms
from fedpress_protocols.signatures import DeviceKey
from tests.client.fake_server import (
    TASK,
    FakeLink,
    FakeServer,
    RandomTrainer,
    make_client,
    signed,
)
from tests.ledgers import residual

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "client_sdk" / "examples"
FEEDBACK = ErrorFeedback(TopK(fraction=0.1))


def example() -> Any:
    spec = importlib.util.spec_from_file_location("numpy_softmax", EXAMPLES / "numpy_softmax.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def small(size: int = 50) -> Model:
    return Model.from_tensors({"w": np.zeros(size, np.float32)})


def make_server(*compressors: Compressor[Any], **options: Any) -> FakeServer:
    options = {"rounds": 2, "auto": 1} | options
    return FakeServer(small(), lambda r, a: list(compressors or [FEEDBACK]), **options)


def trained(server: FakeServer) -> RandomTrainer:
    return RandomTrainer(server.model.spec.size)


# Whole tasks


@pytest.mark.parametrize("compressor", [ErrorFeedback(Quantize(bits=4)), Uncompressed()])
def test_numpy_devices_learn_together(tmp_path: Path, compressor: Compressor[Any]) -> None:
    module = example()
    server = FakeServer(module.initial_model(), lambda r, a: [compressor], rounds=6, auto=3)
    clients = [
        make_client(server, module.make_trainer(seed=i), tmp_path / str(i), seed=i)
        for i in range(3)
    ]
    ended: set[int] = set()
    while len(ended) < 3:
        for index, client in enumerate(clients):
            if index not in ended and client.step() is None:
                ended.add(index)
    first = [r.metrics["accuracy"] for _, r in server.evaluations[:3]]
    last = [r.metrics["accuracy"] for _, r in server.evaluations[-3:]]
    assert np.mean(first) < 0.5 < 0.85 < np.mean(last)
    reported = {(client, report.model) for client, report in server.evaluations}
    assert len(reported) == len(server.evaluations) == 3 * 7, "each model once by each device"
    for client in clients:
        client.close()
        assert client.summary().included == 6
    assert all(part.assignment.plan.task == TASK for part in server.parts.values())


def test_the_plan_overrides_the_example() -> None:
    module = example()
    trainer, model = module.make_trainer(seed=1), module.initial_model()

    def after(seed: int = 3, **terms: Any) -> np.ndarray:
        work = TrainingRequest(TASK, 1, 1, TrainingTerms(**terms), seed)
        return trainer.train(model, work).parameters

    np.testing.assert_array_equal(after(), after())
    assert (after() != after(seed=4)).any()
    assert not model.parameters.any()
    others: tuple[dict[str, Any], ...] = (
        {"local_epochs": 2},
        {"local_steps": 1},
        {"learning_rate": 0.1},
    )
    for terms in others:
        assert (after(**terms) != after()).any()
    np.testing.assert_array_equal(
        after(batch_size=20, local_steps=3),
        after(batch_size=10, gradient_accumulation=2, local_steps=3),
    )


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    stochastic = ErrorFeedback(Quantize(bits=3, rounding="stochastic"))
    bodies = []
    for name, seed in (("a", 7), ("b", 7), ("c", 8), ("d", None)):
        server = make_server(stochastic)
        make_client(server, trained(server), tmp_path / name, seed=seed).run()
        bodies.append([part.body for part in server.parts.values()])
    assert bodies[0] == bodies[1]
    assert bodies[0] != bodies[2]
    assert bodies[3] not in bodies[:3]


@pytest.fixture
def telling(monkeypatch: pytest.MonkeyPatch) -> type:
    """A compressor that sends what differs from what the models tell, known for one test."""
    monkeypatch.setattr(registry, "_by_id", dict(registry.compressors()))

    @registry.compressor("tests.telling")
    @dataclass(frozen=True, slots=True)
    class Telling(registry.Stateless):
        @property
        def needs(self) -> frozenset[Knowledge]:
            return frozenset({"previous", "drift"})

        def layout(self, spec: ModelSpec) -> Layout:
            return Uncompressed().layout(spec)

        def compress(
            self, update: Vector, state: None, public: Public, rng: np.random.Generator
        ) -> tuple[Symbols, None]:
            told = public.known("previous") + public.known("drift")
            return Uncompressed().compress(update - told, None, public, rng)

        def decompress(self, symbols: Symbols, public: Public, num_summands: int = 1) -> Update:
            own = np.asarray(symbols[0], np.float32)
            return Update.from_dense(own + public.known("previous") + public.known("drift"))

    return Telling


def test_a_compressor_reads_earlier_models(tmp_path: Path, telling: type) -> None:
    server = make_server(ErrorFeedback(telling()), rounds=4)
    link = FakeLink(server)
    trainer = trained(server)
    client = make_client(server, trainer, tmp_path, link)
    client.run()
    for part in server.parts.values():
        sent = trainer.computed[part.round, part.attempt]
        assert part.update is not None
        np.testing.assert_allclose(part.update.dense(), sent, rtol=1e-4, atol=1e-5)
    assert link.calls.count("model") == 4, "each model once"


def test_a_map_of_activity_is_fetched_once_and_read(tmp_path: Path) -> None:
    server = make_server(ErrorFeedback(Coded(TopK(0.1), contexts="activity")), rounds=3)
    link = FakeLink(server)
    summary = make_client(server, trained(server), tmp_path, link).run()
    assert (summary.included, link.calls.count("artefact")) == (3, 3)
    server = make_server(ErrorFeedback(Coded(TopK(0.1), contexts="activity")), rounds=1)

    def dies(verb: str) -> None:
        if verb == "before upload":
            raise Dies

    with pytest.raises(Dies):
        make_client(server, trained(server), tmp_path / "other", FakeLink(server, dies)).run()
    again = FakeLink(server)
    assert make_client(server, trained(server), tmp_path / "other", again).run().included == 1
    assert "artefact" not in again.calls


def test_a_damaged_map_is_declined(tmp_path: Path) -> None:
    server = make_server(Coded(TopK(0.1), contexts="activity"), rounds=2, auto=None)
    reasons: list[str] = []

    def heard(event: Event) -> None:
        if event.kind == "declined":
            reasons.append(event.details["reason"])

    client = make_client(server, trained(server), tmp_path, on_event=heard)
    (digest,) = server.artefacts
    server.artefacts[digest] = b"other bytes"
    client.step()
    server.attempt = 2
    forged = b"\xff" * 40
    sealed = hashlib.sha256(forged).hexdigest()
    server._publish(server.model)
    server.artefacts = {sealed: forged}
    server.plan = server.plan.model_copy(update={"activity": sealed})
    client.step()
    assert "came with other bytes" in reasons[0]
    assert "is no map of activity" in reasons[1]
    assert not client.ledger.pending


def test_events_tell_the_story(tmp_path: Path) -> None:
    server = make_server(rounds=1)
    events: list[Event] = []
    client = make_client(server, trained(server), tmp_path, on_event=events.append)
    summary = client.run()
    assert [event.kind for event in events] == [
        "enrolled", "joined", "assigned", "trained", "uploaded", "settled", "ended",
    ]  # fmt: skip
    assert (events[4].task, events[4].round, events[4].attempt) == (TASK, 1, 1)
    assert summary == client.summary()
    assert (summary.state, summary.included, summary.not_included) == ("finished", 1, 0)
    assert summary.model == server.model.digest


def test_examples_beyond_those_that_count_are_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Many(RandomTrainer):
        def train(self, model: Model, work: TrainingRequest) -> Trained:
            return replace(super().train(model, work), num_examples=5000)

    server, counted = make_server(rounds=2), list[int]()

    def on_event(event: Event) -> None:
        if isinstance(event, UpdateTrained):
            counted.append(event.num_examples)

    make_client(server, Many(50), tmp_path, on_event=on_event).run()
    assert counted == [part.weight for part in server.parts.values()] == [1000, 1000]
    assert caplog.text.count("5000 examples counts as one of 1000") == 1


# Restarts


class Dies(BaseException):
    pass


def test_a_prepared_assignment_is_never_trained_again(tmp_path: Path) -> None:
    server = make_server()
    trainer = trained(server)

    def fault(verb: str) -> None:
        if verb == "before upload":
            raise Dies

    with pytest.raises(Dies):
        make_client(server, trainer, tmp_path, FakeLink(server, fault)).run()
    client = make_client(server, trainer, tmp_path)
    (held,) = client.ledger.pending.values()
    client.step()
    (part,) = [p for p in server.parts.values() if p.round == 1]
    assert part.body == held.body
    assert trainer.calls == 1
    client.run()
    assert trainer.calls == 2


def test_after_an_interrupt_the_disk_is_right_and_not_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server()
    trainer = trained(server)
    client = make_client(server, trainer, tmp_path)
    save = TaskFiles.save

    def interrupted(files: TaskFiles, ledger: Ledger) -> None:
        save(files, ledger)
        raise Dies

    monkeypatch.setattr(TaskFiles, "save", interrupted)
    with pytest.raises(Dies):
        client.step()
    monkeypatch.undo()
    assert client.run().included == 2
    assert trainer.calls == 2


def test_an_acknowledged_upload_is_not_sent_twice(tmp_path: Path) -> None:
    server = make_server(auto=None)
    link = FakeLink(server)
    client = make_client(server, trained(server), tmp_path, link)
    for _ in range(4):
        client.step()
    assert link.calls.count("upload") == 1
    assert len(client.ledger.pending) == 1


def test_a_second_process_is_kept_out_until_the_first_is_done(tmp_path: Path) -> None:
    server = make_server()
    with make_client(server, trained(server), tmp_path) as first:
        first.step()
        second = make_client(server, trained(server), tmp_path)
        with pytest.raises(StateLocked):
            second.step()
    second.run()


def test_stop_leaves_what_was_computed_for_the_next_run(tmp_path: Path) -> None:
    server = make_server()
    trainer = trained(server)

    class Stops(RandomTrainer):
        def train(self, model: Model, work: TrainingRequest) -> Trained:
            client.stop()
            return super().train(model, work)

    client = make_client(server, Stops(50), tmp_path)
    summary = client.run()
    assert (summary.state, summary.pending) == ("running", 1)
    assert make_client(server, trainer, tmp_path).run().included == 2
    assert trainer.calls == 1


def test_stop_ends_a_pause(tmp_path: Path) -> None:
    server = make_server(auto=None)
    client: Client = make_client(server, trained(server), tmp_path, sleep=lambda s: client.stop())
    summary = client.run()
    assert (summary.state, summary.pending) == ("running", 1)
    assert client.run() == summary, "stopped for good"


# What becomes of uploads


@pytest.mark.parametrize("error", [RoundClosed, UpdateConflict, UnknownAssignment])
def test_the_receipt_decides_and_not_the_answer(
    tmp_path: Path, error: type[FedpressError], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server(auto=None)
    link = FakeLink(server)
    client = make_client(server, trained(server), tmp_path, link)
    real = link.upload

    def upload(assignment: str, body: bytes, figures: UploadFigures | None = None) -> UploadAck:
        real(assignment, body)
        raise error

    monkeypatch.setattr(link, "upload", upload)
    assert client.step() == 0.0
    server.close()
    monkeypatch.setattr(link, "upload", real)
    client.step()
    assert client.ledger.included == 1


def test_an_upload_the_server_will_not_have_goes_back_to_the_residual(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server(auto=None)
    link = FakeLink(server)
    trainer = trained(server)
    client = make_client(server, trainer, tmp_path, link)

    def upload(assignment: str, body: bytes, figures: UploadFigures | None = None) -> UploadAck:
        raise InvalidUpdate("no")

    monkeypatch.setattr(link, "upload", upload)
    client.step()
    ledger = client.ledger
    assert (len(ledger.pending), ledger.not_included) == (0, 1)
    np.testing.assert_allclose(residual(ledger), trainer.computed[1, 1], rtol=1e-5, atol=1e-7)


def test_a_receipt_that_never_comes_is_no_reason_to_hang(tmp_path: Path) -> None:
    server = make_server(auto=None, rounds=1)
    client = make_client(server, trained(server), tmp_path)
    client.step()
    server.close()
    server.parts.clear()
    assert client.run().pending == 1


def test_receipts_are_waited_for_at_the_end(tmp_path: Path) -> None:
    server = make_server(auto=None, rounds=1)
    link = FakeLink(server)
    client = make_client(server, trained(server), tmp_path, link)
    client.step()
    server.state = "finished"
    assert client.step() == 1.0
    server.close()
    assert client.step() is None
    assert client.ledger.included == 1


def test_forged_and_foreign_receipts_are_refused(tmp_path: Path) -> None:
    server = make_server(auto=None)
    client = make_client(server, trained(server), tmp_path)
    client.step()
    (part,) = server.parts.values()
    honest = server.conclude(part, "included", server.model.digest)
    stranger = DeviceKey.generate()
    other = honest.receipt.model_copy(update={"client_id": "someone"})
    altered = honest.receipt.model_copy(update={"outcome": "not-included", "reason": "round-full"})
    for receipt, error in (
        (signed(honest.receipt, stranger), InvalidSignature),
        (honest.model_copy(update={"receipt": altered}), InvalidSignature),
        (honest.model_copy(update={"signature": "A" * 86}), InvalidSignature),
        (signed(other, server.key), Forbidden),
    ):
        part.receipt = receipt
        with pytest.raises(error):
            client.step()
        assert len(client.ledger.pending) == 1, "the account is as it was"
    part.receipt = honest
    client.step()
    assert client.ledger.included == 1


def test_a_second_receipt_that_contradicts_the_first_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server(auto=None)
    link = FakeLink(server)
    client = make_client(server, trained(server), tmp_path, link)
    client.step()
    (part,) = server.parts.values()
    server.close()
    client.step()
    assert part.receipt is not None
    other = part.receipt.receipt.model_copy(
        update={"outcome": "not-included", "reason": "cancelled"}
    )
    answer = link.check_in(TASK, CheckInRequest(pending=(part.assignment.assignment,)))
    assert answer.response is not None
    forged = answer.response.model_copy(update={"receipts": (signed(other, server.key),)})
    monkeypatch.setattr(link, "check_in", lambda task, request: News(forged, 1.0))
    with pytest.raises(Conflict, match="an earlier one said included"):
        client.step()


# Work that cannot be done


def test_a_plan_that_cannot_be_honoured_is_declined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server()
    link = FakeLink(server)
    trainer = trained(server)
    client = make_client(server, trainer, tmp_path, link)
    newer = server.plan.model_copy(update={"wire_version": 9})
    server.plan = newer
    assert client.step() == 1.0
    assert link.calls.count("decline") == 1
    server.attempt = 2
    server._publish(server.model)
    real = link.check_in

    def check_in(task: str, request: CheckInRequest) -> News:
        news = real(task, request)
        assert news.response is not None
        assert news.response.assignment is not None
        unfit = (news.response.assignment.assignment, IncompatiblePlan("no such compressor"))
        response = news.response.model_copy(update={"assignment": None})
        return News(response, 2.0, unfit)

    monkeypatch.setattr(link, "check_in", check_in)
    assert client.step() == 2.0
    assert link.calls.count("decline") == 2
    assert trainer.calls == 0


def test_a_decline_has_one_reason_in_the_log_the_event_and_for_the_server(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = make_server()
    link, codes = FakeLink(server), list[str]()

    def on_event(event: Event) -> None:
        if isinstance(event, AssignmentDeclined):
            codes.append(event.code)

    client = make_client(
        server, trained(server), tmp_path, link, on_event=on_event, masking=MaskingRules()
    )
    client.step()
    assert codes == [reason for _, reason, _ in link.declined] == ["masking-rules"]
    assert "declined (masking-rules): " in caplog.text


def test_a_trainer_that_fails_gives_its_place_away(tmp_path: Path) -> None:
    server = make_server()

    class Fails(RandomTrainer):
        def train(self, model: Model, work: TrainingRequest) -> Trained:
            raise ZeroDivisionError

    link = FakeLink(server)
    client = make_client(server, Fails(50), tmp_path, link, failures=FailurePolicy(allowed=0))
    with pytest.raises(ZeroDivisionError):
        client.run()
    assert link.calls[-1] == "decline"


@pytest.mark.parametrize(
    ("result", "error", "message"),
    [
        ((np.full(50, np.nan, np.float32), 1), InvalidUpdate, "NaN"),
        ((np.full(50, 1e300), 1), InvalidUpdate, "NaN"),
        ((np.zeros(49, np.float32), 1), ConfigurationError, "flatten"),
        (({"w": 0}, 1), ConfigurationError, "are a dict, not an array of real"),
        ((np.full(50, "a"), 1), ConfigurationError, "not an array of real numbers"),
        ((np.zeros(50, np.complex64), 1), ConfigurationError, "a ndarray of complex64, not"),
        (([[1.0], 2.0], 1), ConfigurationError, "not an array of real numbers"),
        ((np.zeros(50), 0), ConfigurationError, "a whole number from 1 .*, not 0"),
        ((np.zeros(50), 2.5), ConfigurationError, "num_examples .*, not 2.5"),
        ((np.zeros(50), 10**30), ConfigurationError, "num_examples .*, not 10000"),
        ((np.zeros(50), 1, 0.5), ConfigurationError, "metrics are a float"),
        ((np.zeros(50), 1, {"a": "b"}), ConfigurationError, "'a' of the metrics is 'b'"),
        ((np.zeros(50), 1, {}, []), ConfigurationError, "reported numbers are a list"),
    ],
)
def test_training_that_came_to_nothing_is_told(
    tmp_path: Path, result: tuple[Any, ...], error: type[FedpressError], message: str
) -> None:
    server = make_server()
    discards: list[Discard] = []

    class Diverges(RandomTrainer):
        def train(self, model: Model, work: TrainingRequest) -> Trained:
            return Trained(*result)

    link = FakeLink(server)
    client = make_client(
        server, Diverges(50), tmp_path, link, on_discard=discards.append,
        failures=FailurePolicy(allowed=0),
    )  # fmt: skip
    with pytest.raises(error, match=message):
        client.run()
    assert link.calls[-1] == "decline"
    assert [discard.reason for discard in discards] == (["invalid"] if "NaN" in message else [])


@pytest.mark.parametrize("feedback", [True, False])
def test_an_update_scaled_beyond_the_bound_ends_its_assignment_and_not_the_run(
    tmp_path: Path, feedback: bool
) -> None:
    scaled = RandomK(fraction=0.1, unbiased=True)
    made = ErrorFeedback(scaled) if feedback else scaled
    server = FakeServer(
        small(), lambda r, a: [made if a == 1 else Uncompressed()], rounds=1, auto=1, max_abs=1.0
    )
    events: list[Event] = []
    discards: list[Discard] = []

    class Steady(RandomTrainer):
        def train(self, model: Model, work: TrainingRequest) -> Trained:
            self.computed[work.round, work.attempt] = np.full(50, 0.5, np.float32)
            return Trained(model.parameters + np.float32(0.5), 1)

    trainer, link = Steady(50), FakeLink(server)

    def sleep(seconds: float) -> None:
        server.close()  # nothing came: attempt 2, with a compressor that scales nothing

    client = make_client(
        server, trainer, tmp_path, link, sleep=sleep, on_discard=discards.append,
        on_event=events.append,
    )  # fmt: skip
    summary = client.run()
    assert (summary.state, summary.included, summary.not_included) == ("finished", 1, 0)
    assert list(trainer.computed) == [(1, 1), (1, 2)]
    assert link.calls.count("decline") == 1
    (declined,) = [event for event in events if event.kind == "declined"]
    assert "goes beyond the plan's 1" in declined.details["reason"]
    assert [discard.reason for discard in discards] == ([] if feedback else ["not-sent"])
    sent = [part.update.dense() for part in server.parts.values() if part.update is not None]
    kept = residual(client.ledger) if feedback else discards[0].vector
    np.testing.assert_array_equal(np.sum(sent, axis=0) + kept, sum(trainer.computed.values()))
    client.close()


# Joining


def test_enrolment_needs_a_token_once(tmp_path: Path) -> None:
    server = make_server(rounds=3)
    link = FakeLink(server)
    options: dict[str, Any] = {"state_dir": tmp_path, "task": TASK, "transport": link}
    client = Client("http://fake", trained(server), **options)
    with pytest.raises(InvalidToken, match="has no token"):
        client.step()
    first = make_client(server, trained(server), tmp_path, link)
    first.step()
    first.close()
    again = Client("http://fake", trained(server), **options)
    assert again.ledger.client_id == "client0"
    again.close()
    assert link.calls.count("enrol") == 1


def test_the_only_running_task_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = make_server(rounds=1)
    link = FakeLink(server)
    client = Client(
        "http://fake", trained(server), state_dir=tmp_path, token="token", transport=link
    )
    assert client.run().task == TASK
    again = Client("http://fake", trained(server), state_dir=tmp_path, transport=link)
    with pytest.raises(ConfigurationError, match=r"no tasks are running.*task \(finished\)"):
        again.step()
    two = [server.summary.model_copy(update={"state": "running", "task": n}) for n in "ab"]
    monkeypatch.setattr(link, "tasks", lambda: tuple(map(TaskSummary.model_validate, two)))
    with pytest.raises(ConfigurationError, match=r"2 tasks .*a \(running\), b"):
        again.step()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("task", "../x"),
        ("seed", -1),
        ("seed", 1.5),
        ("seed", True),
        ("wait", 31.0),
        ("wait", "long"),
        ("timeout", 0),
        ("timeout", -1),
        ("timeout", math.inf),
        ("max_model_bytes", 0),
        ("max_disk_bytes", "many"),
        ("bandwidth", 5),
        ("rules", 3),
        ("masking", {"minimum": 3}),
        ("privacy", True),
        ("privacy", {"max_epsilon": 1.0}),
        ("fine_tuning", 5),
        ("failures", 2),
        ("attributes", ["uplink"]),
        ("should_participate", 3),
        ("server_key", "short"),
        ("server_key", 3),
    ],
)
def test_options_are_checked(tmp_path: Path, name: str, value: Any) -> None:
    options: dict[str, Any] = {name: value}
    with pytest.raises(ConfigurationError, match=re.escape(name if name != "task" else "../x")):
        Client("http://fake", RandomTrainer(1), state_dir=tmp_path, **options)


def test_numbers_of_numpy_are_options(tmp_path: Path) -> None:
    options: dict[str, Any] = {"seed": np.int64(3), "timeout": np.float32(2), "wait": np.int32(0)}
    Client("http://fake", RandomTrainer(1), state_dir=tmp_path, **options).close()


class Half:
    """A trainer that cannot measure."""

    def train(self, model: Model, request: TrainingRequest) -> Trained:
        raise AssertionError


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (object(), "is a object, which has no train and no evaluate"),
        (RandomTrainer, "is the class RandomTrainer, not an object of it"),
        (Half(), "is a Half, which has no evaluate"),
    ],
)
def test_what_is_no_trainer_is_refused_at_once(tmp_path: Path, wrong: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Client("http://fake", wrong, state_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


class InPlace(RandomTrainer):
    """Changes what it is given, in one of its methods."""

    culprit = "train"

    def train(self, model: Model, work: TrainingRequest) -> Trained:
        if self.culprit != "train":
            return super().train(model, work)
        parameters = model.parameters
        parameters += 1
        return Trained(parameters, 10)

    def evaluate(self, model: Model) -> Evaluation | None:
        if self.culprit == "evaluate":
            model.tensors()["w"][:] = 99
        return Evaluation(1, {"loss": 1.0})


@pytest.mark.parametrize("culprit", ["train", "evaluate"])
def test_a_trainer_that_changes_the_model_in_place_ends_the_run(
    tmp_path: Path, culprit: str
) -> None:
    server = make_server(Uncompressed(), rounds=1)
    trainer = InPlace(50)
    trainer.culprit = culprit
    client = make_client(server, trainer, tmp_path)
    with pytest.raises(ConfigurationError, match=f"{culprit} has changed the model .* in place"):
        client.run()
    assert not client.summary().pending


def test_after_a_change_in_place_the_next_step_has_the_model_as_it_came(tmp_path: Path) -> None:
    server = make_server(Uncompressed(), rounds=1)
    trainer = InPlace(50)
    trainer.culprit = "evaluate"
    client = make_client(server, trainer, tmp_path)
    with pytest.raises(ConfigurationError, match="in place"):
        client.step()
    trainer.culprit = "nothing"
    client.step()
    (part,) = server.parts.values()
    assert part.update is not None
    assert abs(part.update.dense()).max() < 50, "trained from zeros, not from 99"


def test_a_lost_link_leaves_a_consistent_state(tmp_path: Path) -> None:
    server = make_server()

    def fault(verb: str) -> None:
        if verb == "after upload":
            raise TransportError("lost")

    client = make_client(server, trained(server), tmp_path, FakeLink(server, fault))
    with pytest.raises(TransportError):
        client.step()
    assert len(client.ledger.pending) == 1
    client.close()


# --app


@pytest.mark.parametrize(
    ("app", "message"),
    [
        ("app_ok", "names no factory"),
        (":make", "names no factory"),
        ("no_such_module:make", "no module 'no_such_module'"),
        ("app_ok.py:text", "name the module without .py: app_ok:text"),
        ("app_ok.sub:make", "app_ok"),
        ("app_imports:make", "imports 'not_here_at_all'"),
        ("app_ok:absent", "has no 'absent'"),
        ("app_ok:number", "is a int and cannot be called"),
        ("app_ok:text", "the trainer is a str, which has no train and no evaluate"),
    ],
)
def test_a_bad_app_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, app: str, message: str
) -> None:
    (tmp_path / "app_ok.py").write_text("number = 3\ntext = lambda: 'x'\n")
    (tmp_path / "app_imports.py").write_text("import not_here_at_all\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(ConfigurationError, match=message):
        load_trainer(app, tmp_path)


def test_an_error_inside_a_factory_says_whose_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "app_fails.py").write_text("def make(): open('data.pt')\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(RuntimeError, match=r"the factory app_fails:make raised FileNotFoundError"):
        load_trainer("app_fails:make", tmp_path)


def test_the_example_is_an_app(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "numpy_softmax", raising=False)
    trainer = load_trainer("numpy_softmax:make_trainer", EXAMPLES)
    measured = trainer.evaluate(example().initial_model())
    assert measured is not None
    assert measured.num_examples == 60


def test_torch_is_named_when_it_is_missing_and_not_loaded_before() -> None:
    code = (
        "import sys, fedpress_client\n"
        "heavy = {'torch', 'fastapi', 'numba', 'fedpress_server'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "sys.modules['torch'] = None\n"
        "try:\n    fedpress_client.TorchTrainer\n"
        "except Exception as error:\n    print(type(error).__name__, error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "MissingExtra" in done.stdout
    assert "pip install fedpress[torch]" in done.stdout
