"""Typed client events, and the page that documents them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedpress
import fedpress_client
from fedpress.cli.client import _print_event
from fedpress_client import Trained, TrainingRequest, events
from fedpress_client.events import EVENTS, ClientEvent, Event, EventLog, markdown_table
from fedpress_compression.compressors.none import Uncompressed
from fedpress_protocols.errors import UnknownDevice
from fedpress_protocols.messages import EnrolRequest, EnrolResponse
from fedpress_protocols.model import Model
from tests.client.fake_server import FakeLink, FakeServer, RandomTrainer, make_client

PAGE = Path(__file__).parents[2] / "docs" / "client-events.md"


def test_every_kind_is_in_the_union_public_and_named_once() -> None:
    defined = {
        each
        for each in vars(events).values()
        if isinstance(each, type) and issubclass(each, ClientEvent) and each is not ClientEvent
    }
    missing = {each.__name__ for each in defined - set(EVENTS)}
    assert not missing, f"add {missing} to Event in client_sdk/fedpress_client/events.py"
    assert defined == set(EVENTS)
    assert len({each.kind for each in EVENTS}) == len(EVENTS), "two events have one kind"
    for each in EVENTS:
        name = each.__name__
        for package in (fedpress, fedpress_client):
            assert getattr(package, name, None) is each, (
                f"import {name} in {package.__file__} and add it to __all__ there"
            )
            assert name in package.__all__, f"add {name} to __all__ in {package.__file__}"


def test_the_page_has_the_table_that_the_classes_give() -> None:
    assert markdown_table() in PAGE.read_text(), (
        "paste what fedpress_client.events.markdown_table() returns into docs/client-events.md"
    )


def test_the_examples_of_the_page_run(capsys: pytest.CaptureFixture[str]) -> None:
    space: dict[str, Any] = {}
    trained = events.UpdateTrained(num_examples=3, body_bytes=40, metrics={"loss": 0.5})
    shown = []
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(block, space)
        EventLog(space["on_event"], "digits").emit(trained)
        shown.append(capsys.readouterr().out)
    assert shown[0] == "round 0: 3 examples, 40 bytes\n"
    assert json.loads(shown[1]) == {
        "kind": "trained",
        "task": "digits",
        "round": 0,
        "attempt": 0,
        "details": {"num_examples": 3, "body_bytes": 40, "metrics": {"loss": 0.5}, "figures": {}},
    }


def fleet_of_one(size: int = 20) -> FakeServer:
    model = Model.from_tensors({"w": np.zeros(size, np.float32)})
    return FakeServer(model, lambda r, a: [Uncompressed()], rounds=2, auto=1)


def test_the_events_of_a_task_are_plain_json(tmp_path: Path) -> None:
    seen: list[Event] = []
    make_client(fleet_of_one(), RandomTrainer(20), tmp_path, on_event=seen.append).run()
    assert {event.kind for event in seen} >= {"enrolled", "trained", "uploaded", "settled", "ended"}
    for event in seen:
        line = json.loads(json.dumps(event.to_dict()))
        assert line["kind"] == event.kind
        assert line["details"] == event.details
        for name, value in event.details.items():
            assert getattr(event, name) == value


class Fails(RandomTrainer):
    def train(self, model: Model, work: TrainingRequest) -> Trained:
        raise ZeroDivisionError


def test_a_declined_assignment_tells_its_round(tmp_path: Path) -> None:
    seen: list[Event] = []
    client = make_client(fleet_of_one(), Fails(20), tmp_path, on_event=seen.append)
    client.step()
    (declined,) = [event for event in seen if event.kind == "declined"]
    assert (declined.round, declined.attempt) == (1, 1)


class Forgets(FakeLink):
    """The link of a server that came back from a backup of before the device was enrolled."""

    is_forgotten = False

    def enrol(self, token: str, request: EnrolRequest) -> EnrolResponse:
        self.is_forgotten = False
        return super().enrol(token, request)

    def check_in(self, task: str, request: Any) -> Any:
        if self.is_forgotten:
            raise UnknownDevice("no such key")
        return super().check_in(task, request)


def test_a_device_that_enrols_again_shows_its_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server, seen = fleet_of_one(), list[Event]()
    link = Forgets(server)
    client = make_client(server, RandomTrainer(20), tmp_path, link, on_event=seen.append)
    client.step()
    link.is_forgotten = True
    client.step()
    first, again = (event for event in seen if event.kind == "enrolled")
    assert again == first
    _print_event(again)
    _print_event(events.AssignmentDeclined(assignment="a", code="too-slow", reason="no time"))
    said = capsys.readouterr().err
    assert said == f"enrolled as client {link.client_id}, key {client.key_id}\n"
