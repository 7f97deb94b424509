"""No request and no step waits for a store that is far away: the event loop never asks it."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from fedpress_protocols.model import Model
from fedpress_server import app
from fedpress_server.storage.payloads import LocalPayloads
from tests.devices import Operator
from tests.server.in_process import Clock, Enrolled, Server, Start
from tests.server.test_members import begin, send, settled

ASKS = ("put", "get", "open", "size", "drop", "names", "settled", "drop_settled")


class Remote(LocalPayloads):
    """A folder that passes for a store behind a network."""

    is_local = False

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.asked_by_the_loop: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in ASKS:
            return found

        def asked(*args: Any) -> Any:
            with suppress(RuntimeError):
                asyncio.get_running_loop()
                self.asked_by_the_loop.append(name)
            return found(*args)

        return asked


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Remote:
    made = Remote(tmp_path / "store")
    monkeypatch.setattr(app, "opened_payloads", lambda settings: made)
    return made


def test_the_event_loop_never_waits_for_the_store(
    start: Start, store: Remote, model: Model, clock: Clock, enrolled: Enrolled, operator: Operator
) -> None:
    """Rounds that replace an optimizer's state and what uploads stood for; what is replaced stays
    for the sweeper, and goes when it is old enough."""
    device = enrolled()
    begin(operator, model, [device], rounds=3, strategy={"id": "fedadam"})
    for seed in range(2):
        given, _ = send(device, model, seed)
        assert settled(device, given) == "included"
    device.own(device.assignment("digits"), model.spec.size)
    server = device.http
    assert isinstance(server, Server)
    assert store.asked_by_the_loop == []
    replaced = [*store.names("optimizers"), *store.names("bases/digits")]
    assert len(replaced) == 4
    for name in replaced:
        at = time.time() - 7200
        os.utime(store.path(name), (at, at))
    clock.advance(7200)
    server.call(server.app.services.scheduler.forget)
    assert len(list(store.names("optimizers"))) == 1
    assert len(list(store.names("bases/digits"))) == 1
    given, _ = send(device, model, 3)
    assert settled(device, given) == "included"
    assert store.asked_by_the_loop == []
    for name in list(store.names("bases/digits")):
        os.utime(store.path(name), (at, at))
    clock.advance(7200)
    server.call(server.app.services.scheduler.forget)
    assert list(store.names("bases/digits")) == []
