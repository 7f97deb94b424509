"""`fedpress round ...` and the gate before a promotion, against a server in this process."""

from __future__ import annotations

import json
import re

import httpx
import numpy as np
import pytest

from fedpress.cli import rounds
from fedpress.cli.outcomes import FAILED
from fedpress.cli.tables import size
from fedpress_protocols.errors import Conflict, NotFound, TransportError
from fedpress_protocols.messages import RoundStatus
from fedpress_protocols.model import Model
from tests.devices import Device, Operator
from tests.face.commands import Command, said
from tests.server.in_process import Clock, Server, include_one

MODEL = Model.from_tensors({"w": np.zeros((3, 4), np.float32)})


@pytest.fixture(autouse=True)
def trainer(server: Server, clock: Clock) -> Device:
    """The device that has trained three rounds of a task, the last one at its second attempt, each
    measured by it and by another."""
    operator = Operator(server)
    trainer, other = Device(server, clock), Device(server, clock)
    for device in (trainer, other):
        device.enrol(operator.token())
    evaluation = {"metric": "accuracy", "goal": "highest", "group_by": "region"}
    cohort = {"size": 1, "minimum": 1}
    operator.begin(MODEL, rounds=4, cohort=cohort, max_attempts=5, evaluation=evaluation)
    other.json("DELETE", f"/v1/assignments/{other.assignment('digits').assignment}")
    for number in range(3):
        if number == 2:
            operator.post("/v1/admin/tasks/digits/abort-round", {"detail": "to see it"})
        told = trainer.check_in("digits", include_one(trainer, MODEL, value=number + 1), wait=30)
        assert told is not None
        others = {"a_share": 0.5, "a_size": 0.5} if number == 1 else {}
        for device, region, accuracy in ((trainer, "north", 0.9), (other, "south", 0.8)):
            report = {
                "model": told.task.model,
                "num_examples": 10,
                "metrics": {"accuracy": accuracy} | others,
                "attributes": {"region": region},
            }
            device.json("POST", "/v1/tasks/digits/evaluations", json.dumps(report))
    return trainer


def test_attempts_are_listed_the_newest_first(fedpress: Command) -> None:
    lines = said(fedpress("round", "list", "digits")).splitlines()
    assert [line.split()[0] for line in lines] == ["round", "4.1", "3.2", "3.1", "2.1", "1.1"]
    assert lines[3].endswith("aborted to see it")
    assert "accuracy 0.85" in lines[2]
    assert "accuracy 0.85, a_share 0.5" in lines[4]  # the task's own metric before others
    assert "a_size" not in lines[4]
    assert "\x1b" not in "".join(lines)
    page = json.loads(said(fedpress("round", "list", "digits", "--limit", "2", "--json")))
    assert [(each["round"], each["attempt"]) for each in page] == [(4, 1), (3, 2)]
    assert len(page[1]["model"]) == 64
    up = f"{size(page[1]['upload_bytes'])}  {size(page[1]['download_bytes'])}"  # both of bodies
    assert re.sub(" +", " ", up) in re.sub(" +", " ", lines[2])
    before = json.loads(said(fedpress("round", "list", "digits", "--before", "3", "--json")))
    assert [each["round"] for each in before] == [2, 1]
    assert "no round before" in said(fedpress("round", "list", "digits", "--before", "1"))


def test_messages_of_a_masked_session_are_among_the_bytes_up(server: Server) -> None:
    (attempt,) = Operator(server).get("/v1/tasks/digits/rounds?limit=1")
    session = {"began": 1, "answered": {}, "message_bytes": 3000}
    whole = {**attempt, "upload_bytes": 5000, "wire_upload_bytes": 9000, "session": session}
    assert rounds._row(RoundStatus.model_validate(whole), "accuracy")[3] == size(8000)


def test_a_round_is_shown_with_what_was_measured(fedpress: Command) -> None:
    told = said(fedpress("round", "show", "digits", "3"))
    assert "3 of task digits, attempt 2" in told
    assert "accuracy 0.85; by 2 devices on 20 examples" in told
    rows = [line.split() for line in told.splitlines() if line.startswith(("north", "south"))]
    assert rows == [
        ["north", "1", "10", "accuracy", "0.9"],
        ["south", "1", "10", "accuracy", "0.8"],
    ]
    assert "4 of task digits" in said(fedpress("round", "show", "digits"))
    shown = json.loads(said(fedpress("round", "show", "digits", "3", "--json")))
    model = RoundStatus.model_validate_json(json.dumps(shown)).model
    assert model is not None
    assert model in told
    assert isinstance(fedpress("round", "show", "digits", "9").exception, NotFound)


def test_a_round_says_what_its_strategy_made_of_the_update(
    fedpress: Command, server: Server, trainer: Device
) -> None:
    cohort = {"size": 1, "minimum": 1}
    clipping = {"id": "spike_clipping"}
    Operator(server).begin(MODEL, task="spiked", strategy=clipping, cohort=cohort)
    assert trainer.check_in("spiked", include_one(trainer, MODEL, "spiked"), wait=30) is not None
    spike = include_one(trainer, MODEL, "spiked", value=20.0)
    assert trainer.check_in("spiked", spike, wait=30) is not None
    usual = said(fedpress("round", "show", "spiked", "1"))
    assert re.search(r"^update +norm 3\.46$", usual, re.MULTILINE)  # sqrt(12) ones
    told = said(fedpress("round", "show", "spiked", "2"))
    assert re.search(r"^update +norm 69\.3; clipped_share 0\.85$", told, re.MULTILINE)
    (newest,) = json.loads(said(fedpress("round", "list", "spiked", "--limit", "1", "--json")))
    assert newest["strategy_figures"] == {"clipped_share": pytest.approx(0.85)}


def test_a_round_is_aborted_with_a_reason(fedpress: Command) -> None:
    told = said(fedpress("round", "abort", "digits", "--why", "worker replaced"))
    assert "round 4.1 is abandoned: aborted worker replaced" in told
    assert "task digits: running, 3 of 4 rounds" in told
    newest = json.loads(said(fedpress("round", "list", "digits", "--limit", "1", "--json")))[0]
    assert (newest["attempt"], newest["state"]) == (2, "collecting")


def test_a_watch_tells_each_change_and_ends_with_the_task(
    fedpress: Command, server: Server, trainer: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through a while without the server, too."""
    transport, steps = server._transport, iter(range(10))

    class Away(httpx.BaseTransport):
        def handle_request(self, request: httpx.Request) -> httpx.Response:
            raise httpx.ConnectError("away")

    def sleep(seconds: float) -> None:
        match next(steps):
            case 0:
                fedpress_sees(Away())
            case 1:
                fedpress_sees(transport)
                trainer.check_in("digits", include_one(trainer, MODEL), wait=30)

    def fedpress_sees(seen: httpx.BaseTransport) -> None:
        monkeypatch.setattr(Switch, "behind", seen)

    class Switch(httpx.BaseTransport):
        behind: httpx.BaseTransport = transport

        def handle_request(self, request: httpx.Request) -> httpx.Response:
            return type(self).behind.handle_request(request)

    monkeypatch.setattr(server, "_transport", Switch())
    monkeypatch.setattr("fedpress.cli.watching.time.sleep", sleep)
    done = fedpress("round", "watch", "digits")
    lines = said(done).splitlines()
    assert lines[0].split()[1:4] == ["round", "4.1", "collecting"]
    assert "round 4.1  committed  1 included" in lines[-2]
    assert lines[-1] == "task digits finished, 4/4"
    assert "retrying in" in done.stderr


def test_a_watch_of_a_cancelled_task_has_failed(fedpress: Command) -> None:
    assert "cancelled by the operator" in said(fedpress("task", "cancel", "digits"))
    done = fedpress("round", "watch", "digits")
    assert done.exit_code == FAILED
    assert "task digits cancelled, 3/4" in done.stdout
    assert fedpress("round", "watch", "digits", "--round", "3").exit_code == 0


def test_a_watch_of_nothing_ends_at_once(fedpress: Command, server: Server) -> None:
    assert isinstance(fedpress("round", "watch", "nothing").exception, NotFound)

    class Away(httpx.BaseTransport):
        def handle_request(self, request: httpx.Request) -> httpx.Response:
            raise httpx.ConnectError("away")

    server._transport = Away()
    assert isinstance(fedpress("round", "watch", "digits").exception, TransportError)


@pytest.mark.parametrize(
    "name",
    [
        *("..", "a/b", "%2e%2e"),
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in (".", "../models", "a?b", "a#b", "ä", " ")
        ),
    ],
)
def test_no_name_leads_to_another_route(fedpress: Command, name: str) -> None:
    for command in (("round", "list"), ("round", "abort"), ("task", "show"), ("task", "cancel"),
                    ("model", "list"), ("model", "aliases")):  # fmt: skip
        done = fedpress(*command, name)
        assert done.exit_code == 1
        assert type(done.exception).__name__ in ("NotFound", "UnknownTask", "MalformedRequest")
    assert "4 rounds" in said(fedpress("round", "abort", "digits"))


# The gate


def test_a_promotion_waits_for_what_is_required(fedpress: Command) -> None:
    promote = ("model", "promote", "digits", "3", "production")
    refused = fedpress(*promote, "--require", "accuracy>=0.85", "--require", "groups.accuracy>.8")
    assert isinstance(refused.exception, Conflict)
    assert "groups.accuracy>.8: found 0.8, group south" in refused.exception.detail
    assert "accuracy>=0.85" not in refused.exception.detail
    found = refused.exception.members["findings"]
    assert [(each["of"], each["holds"]) for each in found] == [
        ("", True), ("north", True), ("south", False)
    ]  # fmt: skip
    assert json.loads(said(fedpress("model", "aliases", "digits", "--json"))) == []
    looked = fedpress(*promote, "--require", "devices>=2", "--dry-run")
    assert "ok  devices>=2: found 2" in said(looked)
    assert json.loads(said(fedpress("model", "aliases", "digits", "--json"))) == []
    told = said(fedpress(*promote, "--require", "examples>=20", "--require", "accuracy<1"))
    assert "production: version 3" in told


def test_what_nobody_measured_fulfils_nothing(fedpress: Command) -> None:
    for required, says in (
        ("loss<1", "loss<1: was not measured"),
        ("classes.accuracy>=0", "no class was measured"),
        ("groups[west].accuracy>=0", "no group 'west'"),
    ):
        refused = fedpress("model", "promote", "digits", "3", "production", "--require", required)
        assert isinstance(refused.exception, Conflict)
        assert says in refused.exception.detail
    first = fedpress("model", "promote", "digits", "0", "production", "--require", "devices>=0")
    assert isinstance(first.exception, Conflict)
    assert "began with" in first.exception.detail
