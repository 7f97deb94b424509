"""Callbacks get every closed round once, over stops and faults, and tools read what they wrote."""

from __future__ import annotations

import builtins
import json
import logging
import math
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import Result as Done

from fedpress.callbacks import Callback, ClosedRound, Delivery, Result, Run, from_options
from fedpress.cli.outcomes import FAILED
from fedpress.simulate.rows import Row
from fedpress_protocols.errors import ConfigurationError, MissingExtra
from fedpress_protocols.model import Model
from tests.devices import Device, Operator
from tests.face.commands import Command
from tests.server.in_process import Clock, Server, include_one

MODEL = Model.from_tensors({"w": np.zeros((3, 4), np.float32)})
SETTINGS = {"clients": 3, "training": {"learning_rate": 0.1}, "profiles": [{"name": "all"}]}


class Recording(Callback):
    """Keeps what it receives; raises in round `bad` if there is one."""

    def __init__(self, bad: int = 0) -> None:
        self.bad = bad
        self.runs: list[Run] = []
        self.rounds: list[ClosedRound] = []
        self.results: list[Result] = []

    def begin(self, run: Run) -> None:
        self.runs.append(run)

    def round_closed(self, closed: ClosedRound) -> None:
        if closed.figures.round == self.bad:
            raise RuntimeError("the disk is full")
        self.rounds.append(closed)

    def end(self, result: Result) -> None:
        self.results.append(result)

    @property
    def numbers(self) -> list[int]:
        return [each.figures.round for each in self.rounds]


def row(number: int) -> Row:
    loss = math.nan if number == 3 else 1 / number
    return Row(number, asked=4, up_bytes=10, down_bytes=100, test={"loss": loss}, nmse=0.25)


def deliver(callbacks: dict[str, Callback], state: Path, rounds: int, *, ends: bool = True) -> None:
    """A whole run, or a part of it, by a process of its own."""
    delivery = Delivery(callbacks, state, "the run 'digits'")
    delivery.begin("digits", SETTINGS)
    for number in range(1, rounds + 1):
        delivery.closed(row(number))
    delivery.end(Result(rounds, ends, "", "ab" * 32))


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The user's own module, `recorders:one` and `recorders:two`."""
    one, two = Recording(), Recording()
    module = SimpleNamespace(one=lambda: one, two=lambda: two, seen=one, other=two, text=lambda: "")
    monkeypatch.setitem(sys.modules, "recorders", module)
    return module


@pytest.fixture
def trainer(server: Server, clock: Clock) -> Device:
    """A device that has trained three of four rounds, the third at its second attempt."""
    operator, device = Operator(server), Device(server, clock)
    device.enrol(operator.token())
    operator.begin(MODEL, rounds=4, cohort={"size": 1, "minimum": 1}, max_attempts=5)
    for number in range(3):
        if number == 2:
            operator.post("/v1/admin/tasks/digits/abort-round", {"detail": "to see it"})
        train(device, number + 1)
    return device


def train(device: Device, number: int) -> None:
    """A round, and the device's evaluation of its model."""
    known = device.check_in("digits", include_one(device, MODEL, value=number), wait=30)
    assert known is not None
    report = {"model": known.task.model, "num_examples": 10, "metrics": {"accuracy": number / 10}}
    device.json("POST", "/v1/tasks/digits/evaluations", json.dumps(report))


@pytest.fixture
def follow(fedpress: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """`fedpress round follow digits`, which is stopped when it would wait for the server."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fedpress.cli.following.heed_stop_signals", lambda: None)

    def stop(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fedpress.cli.watching.time.sleep", stop)

    def run(*callbacks: str, more: tuple[str, ...] = ("--settle", "0")) -> Done:
        options = [text for each in callbacks for text in ("--callback", each)]
        return fedpress("round", "follow", "digits", *options, *more)

    return run


def test_a_followed_task_sends_each_round_once_with_what_devices_measured(
    follow: Any, trainer: Device, recorders: SimpleNamespace, tmp_path: Path
) -> None:
    seen = recorders.seen
    done = follow("recorders:one")
    assert done.exit_code == 130, done.output
    assert seen.numbers == [1, 2]  # the third is measured in the fourth
    assert follow("recorders:one").exit_code == 130
    train(trainer, 4)
    done = follow("recorders:one", more=("--settle", "0", "--json"))
    assert done.exit_code == 0, done.output
    assert [json.loads(line)["round"] for line in done.stdout.splitlines()] == [3, 4]
    assert seen.numbers == [1, 2, 3, 4]
    accuracies = [each.scalars["evaluation/accuracy"] for each in seen.rounds]
    assert accuracies == [0.1, 0.2, 0.3, 0.4]
    third = seen.rounds[2]
    assert [each.state for each in third.attempts] == ["abandoned", "committed"]
    assert third.figures.abandoned == "aborted to see it"
    assert [run.last_round for run in seen.runs] == [0, 2, 2]
    assert len({run.id for run in seen.runs}) == 1
    assert seen.runs[0].settings["task"] == "digits"
    assert [result.is_complete for result in seen.results] == [False, False, True]
    assert seen.results[-1].rounds == 4
    sent = sum(each.figures.up_bytes + each.figures.down_bytes for each in seen.rounds)
    assert seen.rounds[-1].total_bytes == sent > 0
    assert follow("recorders:one").exit_code == 0  # nothing is left to send
    assert seen.numbers == [1, 2, 3, 4]


def test_a_callback_that_raises_is_named_once_and_gets_the_rest_later(
    follow: Any,
    trainer: Device,
    recorders: SimpleNamespace,
    caplog: pytest.LogCaptureFixture,
) -> None:
    train(trainer, 4)
    recorders.seen.bad = 2
    done = follow("recorders:one", "recorders:two")
    assert done.exit_code == FAILED
    assert "failed: recorders:one; run again" in done.stderr
    warnings = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert warnings == [
        "fedpress: the callback recorders:one failed in round_closed, round 2: RuntimeError: "
        "the disk is full; the run goes on without it"
    ]
    assert (recorders.seen.numbers, recorders.other.numbers) == ([1], [1, 2, 3, 4])
    recorders.seen.bad = 0
    assert follow("recorders:one", "recorders:two").exit_code == 0
    assert (recorders.seen.numbers, recorders.other.numbers) == ([1, 2, 3, 4], [1, 2, 3, 4])
    totals = [
        [each.total_bytes for each in one.rounds] for one in (recorders.seen, recorders.other)
    ]
    assert totals[0] == totals[1]


def test_a_state_file_of_another_run_or_a_restored_server_is_refused(
    follow: Any, trainer: Device, recorders: SimpleNamespace, tmp_path: Path
) -> None:
    follow("recorders:one")
    state = tmp_path / "digits.callbacks.json"
    document = json.loads(state.read_text())
    ahead = {**document, "positions": {"recorders:one": {"round": 9, "total_bytes": 1}}}
    for text, problem in (
        (json.dumps(ahead), "round 9 has been sent, but task 'digits' has 3 rounds"),
        (json.dumps({**document, "source": "task 'x'"}), "is of task 'x', not of task 'digits'"),
        ("{}", "does not hold the positions"),
    ):
        state.write_text(text)
        error = follow("recorders:one").exception
        assert isinstance(error, ConfigurationError)
        assert problem in str(error)
    assert recorders.seen.numbers == [1, 2]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("tensorbord:runs", "no module 'tensorbord'"),
        ("recorders", "names no callback"),
        ("recorders:text", "returned a str"),
        ("recorders:none", "has no 'none'"),
    ],
)
def test_an_option_that_names_no_callback_says_which_there_are(
    recorders: SimpleNamespace, text: str, problem: str
) -> None:
    with pytest.raises(ConfigurationError, match=problem) as raised:
        from_options([text])
    assert "tensorboard:DIR" in (raised.value.hint or "")
    with pytest.raises(ConfigurationError, match="twice"):
        from_options(["recorders:one", "recorders:one"])


@pytest.mark.parametrize(
    ("text", "library"),
    [("tensorboard:runs", "tensorboardX"), ("mlflow", "mlflow"), ("wandb:digits", "wandb")],
)
def test_a_library_that_is_missing_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, text: str, library: str
) -> None:
    whole = builtins.__import__

    def without(name: str, *arguments: Any, **more: Any) -> Any:
        if name.partition(".")[0] == library:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return whole(name, *arguments, **more)

    kind = text.partition(":")[0]
    monkeypatch.delitem(sys.modules, f"fedpress.callbacks.{kind}_callback", raising=False)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtra, match=f"{library} is not installed") as raised:
        from_options([text])
    assert f"pip install 'fedpress[{kind}]'" in (raised.value.hint or "")


def test_a_faulty_end_or_begin_stops_nothing_and_no_password_is_written_down(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Recording):
        def begin(self, run: Run) -> None:
            raise ValueError("no such store")

    class Late(Recording):
        def end(self, result: Result) -> None:
            raise ValueError("closed twice")

    late, state = Late(), tmp_path / "state.json"
    deliver({"mlflow:http://me:secret@host/": Broken(), "late": late}, state, 2)
    assert late.numbers == [1, 2]
    messages = [each.getMessage() for each in caplog.records]
    assert len(messages) == 2
    assert "mlflow:http://host/ failed in begin" in messages[0]
    assert "late failed in end" in messages[1]
    assert "secret" not in state.read_text() + caplog.text


def test_tensorboard_reads_a_run_that_was_stopped_and_resumed(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    state, text = tmp_path / "state.json", f"tensorboard:{tmp_path / 'runs'}"
    deliver(from_options([text]), state, 2, ends=False)
    deliver(from_options([text]), state, 4)
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("digits-")
    events = accumulator.EventAccumulator(str(folder)).Reload()
    values = [(each.step, each.value) for each in events.Scalars("test/loss")]
    assert [step for step, _ in values] == [1, 2, 3, 4]
    assert math.isnan(values[2][1])
    assert [value for _, value in values[:2]] == [1.0, 0.5]
    totals = [each.value for each in events.Scalars("bytes/total")]
    assert totals == [110.0, 220.0, 330.0, 440.0]
    settings = events.Tensors("settings/text_summary")
    assert b'"learning_rate": 0.1' in settings[0].tensor_proto.string_val[0]


@pytest.mark.filterwarnings("ignore")  # its own use of SQLAlchemy
def test_mlflow_reads_a_run_that_was_stopped_and_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    uri = f"sqlite:///{tmp_path / 'store.db'}"
    state, text = tmp_path / "state.json", f"mlflow:{uri}"
    client = mlflow.MlflowClient(tracking_uri=uri)
    for rounds, status in ((2, "KILLED"), (4, "FINISHED")):
        deliver(from_options([text]), state, rounds, ends=status == "FINISHED")
        experiment = client.get_experiment_by_name("fedpress")
        (run,) = client.search_runs([experiment.experiment_id])
        assert run.info.status == status
        assert run.info.run_name == "digits"
    history = client.get_metric_history(run.info.run_id, "test/loss")
    assert [each.step for each in history] == [1, 2, 3, 4]
    assert history[1].value == 0.5
    assert math.isnan(history[2].value)
    assert run.data.params["training.learning_rate"] == "0.1"
    assert run.data.params["profiles"] == '[{"name": "all"}]'
    assert run.data.tags["fedpress.model"] == "ab" * 32


def records_of(file: Path) -> Iterator[bytes]:
    """The records of a W&B file: a log as LevelDB has it, behind seven bytes of its own."""
    data, at, record = file.read_bytes(), 7, b""
    while at < len(data):
        if 32768 - at % 32768 < 7:  # no header begins at a block's end
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or its last part
            yield record
            record = b""


@pytest.mark.slow
def test_weights_and_biases_has_an_offline_run_that_was_stopped_and_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    for name, value in (("MODE", "offline"), ("DIR", str(tmp_path)), ("SILENT", "true")):
        monkeypatch.setenv(f"WANDB_{name}", value)
    state = tmp_path / "state.json"
    deliver(from_options(["wandb:digits"]), state, 2, ends=False)
    deliver(from_options(["wandb:digits"]), state, 4)
    wandb.teardown()  # its own process has written everything, as at the end of this one
    losses, runs, codes = dict[int, float](), set[tuple[str, str]](), []
    for file in sorted(tmp_path.glob("wandb/offline-run-*/run-*.wandb")):
        for data in records_of(file):
            record = Record.FromString(data)
            if record.HasField("run"):
                runs.add((record.run.project, record.run.run_id))
            if record.HasField("exit"):
                codes.append(record.exit.exit_code)
            values = {
                "/".join(each.nested_key) or each.key: json.loads(each.value_json)
                for each in record.history.item
            }
            if "test/loss" in values:
                losses[values["_step"]] = values["test/loss"]
    assert runs == {("digits", json.loads(state.read_text())["id"])}
    assert sorted(losses) == [1, 2, 3, 4]
    assert losses[2] == 0.5
    assert codes == [1, 0]
