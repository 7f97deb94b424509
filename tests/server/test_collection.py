"""Collection of old rounds: what goes, what stays, and a collection that dies in the middle."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa

from fedpress_protocols.model import Model
from fedpress_protocols.registry import Collected, ModelVersion
from fedpress_server import failpoints
from fedpress_server.registry import retention
from fedpress_server.storage.files import model_name
from fedpress_server.storage.tables import assignments, round_events, uploads
from tests.devices import Device, Operator
from tests.server.in_process import Clock, Server, Start, include_one

GRACE = 3600.0


def begin(http: Server, clock: Clock, model: Model, rounds: int, **config: Any) -> Device:
    """A task of cohorts of one, and a device that has been in so many rounds."""
    operator = Operator(http)
    cohort = {"size": 1, "minimum": 1}
    terms: dict[str, Any] = {"rounds": 50, "retention": {"last": 2}, "round_seconds": 9 * GRACE}
    operator.begin(model, **{"cohort": cohort} | terms | config)
    device = Device(http, clock)
    device.enrol(operator.token())
    for _ in range(rounds):
        device.check_in("digits", include_one(device, model), wait=30)
    return device


def collect(http: Server, *, dry_run: bool = False) -> Collected:
    answer = Operator(http).post("/v1/admin/models/collect", {"dry_run": dry_run})
    return Collected.model_validate(answer)


def rounds_of(http: Server, table: sa.Table) -> list[int]:
    """The rounds that rows of this table are of."""
    query = sa.select(table.c.round).distinct().order_by(table.c.round)
    rows: list[int] = http.call(http.app.services.database.read, lambda c: c.scalars(query).all())
    return list(rows)


def missing(http: Server) -> list[int]:
    """The versions of the task whose file is not there though nothing says so, or is there though
    it was collected."""
    listed = Operator(http).get("/v1/admin/tasks/digits/versions")
    versions = [ModelVersion.model_validate(each) for each in listed]
    folder = http.app.services.settings.data_dir
    return [
        each.version
        for each in versions
        if (folder / model_name(each.model)).exists() == (each.collected_at is not None)
    ]


@pytest.mark.both_databases(short=True)
def test_events_of_old_rounds_go_in_batches_and_all_that_somebody_may_ask_for_stays(
    start: Start, clock: Clock, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "_EVENTS_TOGETHER", 2)
    with start(retention_grace=GRACE) as http:
        device = begin(http, clock, model, 5)
        name = device.assignment("digits").assignment  # of round 6, which is open
        assert collect(http).num_events == 0
        clock.advance(GRACE + 1)
        foreseen = collect(http, dry_run=True).num_events
        assert rounds_of(http, round_events) == [1, 2, 3, 4, 5, 6]
        with failpoints.armed("events-dropped:pause:1000"):
            assert collect(http).num_events == foreseen == 9
        assert rounds_of(http, round_events) == [4, 5, 6]
        assert rounds_of(http, assignments) == [1, 2, 3, 4, 5, 6]
        count = sa.select(sa.func.count()).select_from(uploads)
        assert http.call(http.app.services.database.read, lambda c: c.scalar(count)) == 5
        assert collect(http).num_events == 0
    with start(retention_grace=GRACE) as http:
        device.http = http
        assert device.assignment("digits").assignment == name


def test_a_task_that_keeps_everything_keeps_its_events(
    start: Start, clock: Clock, model: Model
) -> None:
    with start(retention_grace=GRACE) as http:
        begin(http, clock, model, 4, retention=None)
        clock.advance(GRACE + 1)
        assert collect(http).num_events == 0
        assert rounds_of(http, round_events) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("point", ["models-given-up", "events-dropped"])
def test_a_collection_that_dies_in_the_middle_is_completed_by_the_next(
    start: Start, clock: Clock, model: Model, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    monkeypatch.setattr(retention, "_EVENTS_TOGETHER", 4)
    with start(retention_grace=GRACE) as http:
        device = begin(http, clock, model, 6)
        clock.advance(GRACE + 1)
        with failpoints.armed(f"{point}:raise"):
            http.call(http.app.services.scheduler._collect)
        assert (missing(http) == []) is (point == "events-dropped")
        assert rounds_of(http, round_events)[0] == (1 if point == "models-given-up" else 2)
    with start(retention_grace=GRACE) as http:
        device.http = http
        collect(http)
        assert missing(http) == []
        assert rounds_of(http, round_events) == [5, 6, 7]
        answer = device.check_in("digits", include_one(device, model), wait=30)
        assert answer is not None
        assert answer.task.round == 7
