"""Rounds in two phases, which an earlier release ran: refused, and ended where they are open."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from fedpress_protocols.errors import IncompatiblePlan, RoundClosed
from fedpress_protocols.messages import TaskConfig
from fedpress_protocols.model import Model
from fedpress_server.storage import leases
from fedpress_server.storage.leases import Job
from fedpress_server.storage.tables import jobs, round_events, rounds, tasks
from tests.devices import Device, Operator, checked
from tests.server.in_process import Clock, Start, history

pytestmark = pytest.mark.both_databases
TWO_PHASES: dict[str, Any] = {
    "profiles": [
        {
            "name": "two",
            "compressor": {
                "id": "error_feedback",
                "inner": {"id": "powersgd", "rank": 1, "trips": 2},
            },
        }
    ],
    "cohort": {"size": 2, "minimum": 1},
}


def test_a_new_task_in_two_phases_is_refused_and_told_what_to_use(
    operator: Operator, model: Model
) -> None:
    with pytest.raises(IncompatiblePlan, match="powersgd in one trip, or with lowrank"):
        operator.begin(model, **TWO_PHASES)


def between_the_phases(connection: Connection, assignment: str) -> None:
    """As an earlier release leaves a round whose basis is being made."""
    event = {"event": "FirstStaged", "assignment": assignment, "upload": "f" * 64}
    seq = connection.execute(sa.select(sa.func.max(round_events.c.seq))).scalar_one()
    key = {"task": "digits", "round": 1, "attempt": 1}
    row = {**key, "seq": seq + 1, "at": 0.0, "event": event}
    connection.execute(sa.insert(round_events), row)
    connection.execute(sa.update(rounds).values(state="basing"))
    connection.execute(sa.update(tasks).values(version=tasks.c.version + 1))
    leases.add(connection, [Job(("digits", 1, 1), "basis")], 0.0)


def test_an_open_task_of_an_earlier_release_is_cancelled_with_receipts(
    start: Start, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Devices take their updates back: nothing of them is in a model, and the receipt says so."""
    model = Model.from_tensors({"w": np.zeros((8, 8), np.float32)})
    with start() as http:
        monkeypatch.setattr(TaskConfig, "check_phases", lambda self: None)
        operator = Operator(http)
        operator.begin(model, **TWO_PHASES)
        monkeypatch.undo()
        device = Device(http, clock)
        device.enrol(operator.token())
        given = device.assignment("digits").assignment
        http.call(http.app.services.database.write, lambda c: between_the_phases(c, given))
    with start() as http:
        operator, device.http = Operator(http), http
        (status,) = history(operator)
        assert status.state == "abandoned"
        assert "begin a new task with powersgd in one trip" in status.reason
        assert operator.get("/v1/tasks/digits")["state"] == "cancelled"
        receipt = device.receipt(given)
        assert receipt is not None
        assert receipt.receipt.reason == "cancelled"
        with pytest.raises(RoundClosed):
            checked(device.request("PUT", f"/v1/assignments/{given}/first", b"images"))

        def left(connection: Connection) -> Any:
            return connection.execute(sa.select(jobs)).all()

        assert http.call(http.app.services.database.read, left) == []
