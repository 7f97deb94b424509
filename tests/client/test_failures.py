"""A device whose training fails, whose deadlines are too short, or whose disk is full."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedpress_client import (
    Client,
    Discard,
    Evaluation,
    Event,
    FailurePolicy,
    Ledger,
    Progress,
    Trained,
    TrainingRequest,
)
from fedpress_client.transport import News
from fedpress_compression.compressors.error_feedback import ErrorFeedback
from fedpress_compression.compressors.topk import TopK
from fedpress_protocols.errors import ConfigurationError, StateWriteError
from fedpress_protocols.messages import CheckInRequest
from fedpress_protocols.model import Model
from tests.client.fake_server import FakeLink, FakeServer, RandomTrainer, make_client
from tests.ledgers import residual

FEEDBACK = ErrorFeedback(TopK(fraction=0.1))


def make_server(**options: Any) -> FakeServer:
    model = Model.from_tensors({"w": np.zeros(50, np.float32)})
    options = {"rounds": 2, "auto": 1} | options
    return FakeServer(model, lambda r, a: [FEEDBACK], **options)


class Fails(RandomTrainer):
    """Where `fails` says so, by the number of the call; `nan` in place of an exception."""

    def __init__(self, fails: set[int], *, nan: bool = False) -> None:
        super().__init__(50)
        self.fails, self.nan = fails, nan

    def train(self, model: Model, work: TrainingRequest) -> Trained:
        result = super().train(model, work)
        if self.calls not in self.fails:
            return result
        del self.computed[work.round, work.attempt]
        if self.nan:
            return Trained(np.full(50, np.nan, np.float32), 1)
        raise ZeroDivisionError("no data today")


@pytest.mark.parametrize("nan", [False, True])
def test_a_failed_training_is_declined_at_once_and_the_device_goes_on(
    tmp_path: Path, nan: bool
) -> None:
    server = make_server()
    link, trainer = FakeLink(server), Fails({1, 2, 4}, nan=nan)
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        server.close()  # nothing came: the next attempt

    policy = FailurePolicy(allowed=2, pause=30.0, longest_pause=50.0)
    client = make_client(server, trainer, tmp_path, link, sleep=sleep, failures=policy)
    summary = client.run()
    assert (summary.state, summary.included) == ("finished", 2)
    code = "invalid-update" if nan else "training-failed"
    assert [reason for _, reason, _ in link.declined] == [code] * 3
    assert pauses == pytest.approx([30 * 1.05, 50 * 1.05, 30 * 1.05]), "doubled, until it trains"
    sent = sum(part.update.dense() for part in server.parts.values() if part.update is not None)
    computed = sum(trainer.computed.values())
    np.testing.assert_allclose(sent + residual(client.ledger), computed, atol=1e-6)
    client.close()


@pytest.mark.parametrize("cause", [MemoryError, ZeroDivisionError])
def test_an_update_that_is_lost_after_training_is_told(
    tmp_path: Path, cause: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the machine while it is compressed, or by what the application does with progress."""
    server, trainer, lost = make_server(), RandomTrainer(50), list[Discard]()
    link, prepare = FakeLink(server), Ledger.prepare
    failures = iter([cause])

    def fails(self: Ledger, *arguments: Any, **options: Any) -> tuple[Ledger, bytes | None]:
        for failure in failures:
            raise failure
        return prepare(self, *arguments, **options)

    def on_progress(progress: Progress) -> None:
        if progress.step == "compress":
            for failure in failures:
                raise failure

    def sleep(seconds: float) -> None:
        server.close()

    options: dict[str, Any] = {"on_progress": on_progress}
    if cause is MemoryError:
        monkeypatch.setattr(Ledger, "prepare", fails)
        options = {}
    client = make_client(
        server, trainer, tmp_path, link, sleep=sleep, on_discard=lost.append, **options
    )
    assert client.run().state == "finished"
    assert [reason for _, reason, _ in link.declined] == ["training-failed"]
    assert [each.reason for each in lost] == ["not-sent"]
    sent = sum(part.update.dense() for part in server.parts.values() if part.update is not None)
    computed = sum(trainer.computed.values())
    kept = sent + residual(client.ledger) + sum(each.vector for each in lost)
    np.testing.assert_allclose(kept, computed, atol=1e-6)
    client.close()


def test_one_failure_too_many_in_a_row_ends_the_run_with_it(tmp_path: Path) -> None:
    server = make_server()
    link, trainer = FakeLink(server), Fails(set(range(1, 99)))
    policy = FailurePolicy(allowed=3)
    client = make_client(
        server, trainer, tmp_path, link, sleep=lambda s: server.close(), failures=policy
    )
    with pytest.raises(ZeroDivisionError, match="no data today"):
        client.run()
    assert (trainer.calls, len(link.declined)) == (4, 4)


def misfit(model: Model) -> Any:
    raise ConfigurationError("the task's model is not this one")


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (misfit, "is not this one"),
        (lambda model: model.parameters, "train returned a ndarray, not a Trained"),
    ],
)
def test_a_trainer_that_does_not_fit_the_task_ends_the_run_at_once(
    tmp_path: Path, train: Callable[[Model], Any], message: str
) -> None:
    server = make_server()

    class Misfit(RandomTrainer):
        def train(self, model: Model, request: TrainingRequest) -> Any:
            return train(model)

    link = FakeLink(server)
    client = make_client(server, Misfit(50), tmp_path, link)
    with pytest.raises(ConfigurationError, match=message):
        client.run()
    assert [reason for _, reason, _ in link.declined] == ["training-failed"]


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (Evaluation(1, 0.87), "metrics are a float, not a mapping"),  # type: ignore[arg-type]
        (Evaluation(0, {}), "num_examples must be a whole number from 1 to 4294967295, not 0"),
        ({"accuracy": 0.87}, "evaluate returned a dict, not an Evaluation"),
    ],
)
def test_a_wrong_evaluation_is_named(tmp_path: Path, result: Any, reason: str) -> None:
    server = make_server()
    events: list[Event] = []

    class Wrong(RandomTrainer):
        def evaluate(self, model: Model) -> Any:
            return result

    make_client(server, Wrong(50), tmp_path, on_event=events.append).run()
    failed = next(event for event in events if event.kind == "failed")
    assert failed.details["reason"].startswith(reason)


def test_an_evaluation_that_fails_costs_no_assignment(tmp_path: Path) -> None:
    server = make_server()
    events: list[Event] = []

    class Unmeasured(RandomTrainer):
        tries = 0

        def evaluate(self, model: Model) -> Evaluation | None:
            self.tries += 1
            if self.tries == 1:
                raise ZeroDivisionError("nothing to measure on")
            return Evaluation(1, {"loss": 1.0})

    client = make_client(server, Unmeasured(50), tmp_path, on_event=events.append)
    assert client.run().included == 2
    (failed,) = [event for event in events if event.kind == "failed"]
    assert failed.details == {"what": "evaluation", "reason": "nothing to measure on"}
    assert len(server.evaluations) == 2


@pytest.mark.parametrize(
    "fields",
    [
        {"allowed": -1},
        {"allowed": float("nan")},
        {"pause": 2.0, "longest_pause": 1.0},
        {"pause": float("nan")},
        {"pause": "short"},
        {"longest_pause": float("inf")},
        {"skips_late": "no"},
    ],
)
def test_a_policy_that_cannot_be_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        FailurePolicy(**fields)


# Deadlines


class Clocked(FakeServer):
    """Whose plans leave `seconds` each; its device's training takes as long as the test says."""

    now, seconds = 1000.0, 60.0

    def _publish(self, model: Model) -> None:
        super()._publish(model)
        self.plan = self.plan.model_copy(update={"deadline": self.now + self.seconds})


class ClockedLink(FakeLink):
    server: Clocked

    def check_in(self, task: str, request: CheckInRequest) -> News:
        news = super().check_in(task, request)
        if news.response is None:
            return news
        response = news.response.model_copy(update={"server_time": self.server.now})
        return news._replace(response=response)


class Slow(RandomTrainer):
    def __init__(self, server: Clocked, takes: float) -> None:
        super().__init__(50)
        self.server, self.takes = server, takes

    def train(self, model: Model, work: TrainingRequest) -> Trained:
        self.server.now += self.takes
        return super().train(model, work)


def slow_device(
    tmp_path: Path, takes: float, **options: Any
) -> tuple[Clocked, ClockedLink, Slow, Client]:
    server = Clocked(
        Model.from_tensors({"w": np.zeros(50, np.float32)}), lambda r, a: [FEEDBACK], rounds=2
    )
    link, trainer = ClockedLink(server), Slow(server, takes)
    client = make_client(
        server, trainer, tmp_path, link, clock=lambda: server.now - 77.0, **options
    )  # fmt: skip
    return server, link, trainer, client


def test_a_device_that_cannot_make_the_deadline_learns_it_and_declines(tmp_path: Path) -> None:
    server, link, trainer, client = slow_device(tmp_path, 90.0)
    client.step()
    assert "upload" not in link.calls, "after the deadline nothing travels"
    server.close()
    client.step()
    assert (link.declined[0][1:], trainer.calls) == (("too-slow", 90.0), 1)
    kept = residual(client.ledger)
    np.testing.assert_array_equal(kept, trainer.computed[1, 1])
    client.close()
    server.close()
    again = make_client(server, trainer, tmp_path, link, clock=lambda: server.now - 77.0)
    again.step()
    assert (len(link.declined), trainer.calls) == (2, 1), "known over a restart"
    np.testing.assert_array_equal(residual(again.ledger), kept)
    server.seconds = 120.0
    server.close()
    again.step()
    assert (len(link.declined), trainer.calls) == (2, 2), "the operator gave more time"
    assert server.close()
    again.close()


@pytest.mark.parametrize(
    ("slow", "declined"),
    [
        pytest.param(1, [2], id="once"),
        pytest.param(4, [2, 4, 8, 8], id="four-times"),
    ],
)
def test_a_device_that_was_slow_tries_again_the_later_the_more_often_it_was(
    slow: int, declined: list[int], tmp_path: Path
) -> None:
    server, link, trainer, client = slow_device(tmp_path, 90.0)
    in_between: list[int] = []
    for _ in range(40):
        calls, before = trainer.calls, len(link.declined)
        trainer.takes = 90.0 if calls < slow else 1.0
        client.step()
        server.close()
        if trainer.calls > calls:
            in_between.append(before - sum(in_between))
    assert in_between[: slow + 1] == [0, *declined]
    client.close()


def test_a_device_may_be_told_to_try_whatever_the_deadline(tmp_path: Path) -> None:
    policy = FailurePolicy(skips_late=False)
    server, link, trainer, client = slow_device(tmp_path, 90.0, failures=policy)
    for _ in range(3):
        client.step()
        server.close()
    assert (link.declined, trainer.calls) == ([], 3)
    client.close()


@pytest.mark.parametrize("verb", ["model", "upload"])
def test_time_in_which_the_server_was_away_is_not_the_device_s(verb: str, tmp_path: Path) -> None:
    server, link, trainer, client = slow_device(tmp_path, 5.0)
    outages = [f"before {verb}"]

    def wait_for_the_store(point: str) -> None:
        if point in outages:
            outages.remove(point)
            server.now += 300.0
            link.traffic.seconds_away += 300.0

    link.fault = wait_for_the_store
    client.step()
    assert not outages
    server.close()
    client.step()
    assert (link.declined, trainer.calls) == ([], 2)
    client.close()


# Disks


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A function that fills the disk for the files whose names hold a text, and frees it again."""
    real = os.open
    full: list[str] = []

    def limited(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & os.O_CREAT and any(text in str(path) for text in full):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return real(path, flags, *rest, **named)

    monkeypatch.setattr("fedpress_client.state.os.open", limited)
    return full


def test_an_update_that_the_disk_has_no_room_for_is_told_and_given_back(
    tmp_path: Path, full_disk: list[str]
) -> None:
    server = make_server(rounds=1)
    link, trainer = FakeLink(server), RandomTrainer(50)
    discards: list[Discard] = []
    client = make_client(
        server, trainer, tmp_path, link, on_discard=discards.append,
        failures=FailurePolicy(allowed=1),
    )  # fmt: skip
    before = client.ledger
    full_disk.append("ledger.safetensors.tmp")
    assert client.step() == 10.0
    assert [reason for _, reason, _ in link.declined] == ["storage-failed"]
    assert client.ledger.residual is before.residual is None
    assert not client.ledger.pending
    (discard,) = discards
    assert discard.reason == "not-saved"
    np.testing.assert_array_equal(discard.vector, trainer.computed[1, 1])
    server.close()
    with pytest.raises(StateWriteError, match=r"ledger.safetensors cannot be written: No space"):
        client.step()
    full_disk.clear()
    server.close()
    assert client.run().included == 1


def test_a_full_disk_is_a_sentence_wherever_the_state_is_written(
    tmp_path: Path, full_disk: list[str]
) -> None:
    for name in ("key.pem.tmp", "identity.json.tmp"):
        full_disk[:] = [name]
        with pytest.raises(StateWriteError, match=f"{name[:-4]} cannot be written: No space") as e:
            make_client(make_server(), RandomTrainer(50), tmp_path).step()
        assert "free" in e.value.hint
    assert not list(tmp_path.rglob("*.tmp"))
