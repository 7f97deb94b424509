"""Servers that are told to stop in the midst of work: nobody is left without an answer, nobody is
told of a failure, and nothing is lost or counted twice."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import httpx
import numpy as np
import pytest
import sqlalchemy as sa

from fedpress_protocols.errors import Unavailable
from fedpress_protocols.model import Model
from fedpress_protocols.signatures import Content
from fedpress_server.storage.engines import _TURNS
from tests.devices import Device, Operator
from tests.system.forked_server import ForkedServer
from tests.system.one_hot_fleet import Fleet
from tests.system.server_process import ADMIN_TOKEN
from tests.system.waiting_fleet import TASK, Answers, full_task, waiting

MODEL = Model.from_tensors({"weight": np.zeros(60_000, np.float32)})


def started(folder: Path, settings: Mapping[str, str], stack: ExitStack) -> ForkedServer:
    server = ForkedServer(folder, settings, batch=2)
    stack.callback(server.kill)
    server.start()
    server.wait()
    return server


def terminate(server: ForkedServer) -> None:
    """SIGTERM, and go on."""
    os.kill(server.pid, signal.SIGTERM)


def check_clean_end(server: ForkedServer) -> None:
    assert server.process is not None
    server.process.join(60)
    log = server.log.read_text()
    assert server.process.exitcode == 0, log[-3000:]
    assert "Traceback" not in log, log[-6000:]


def answered(work: Callable[[], object]) -> str:
    """The kind of answer that `work` got."""
    try:
        work()
    except Unavailable as exc:
        return "unavailable" if exc.members.get("retry_after", 0) >= 1 else "no Retry-After"
    return "answered"


def in_two_halves(body: bytes, begun: threading.Event, go_on: threading.Event) -> Iterator[bytes]:
    yield body[: len(body) // 2]
    begun.set()
    assert go_on.wait(30)
    yield body[len(body) // 2 :]


@pytest.mark.slow
def test_a_server_told_to_stop_says_so_answers_who_waits_and_finishes_uploads(
    place: Mapping[str, str], tmp_path: Path
) -> None:
    with ExitStack() as stack:
        server = started(tmp_path / "api", {**place, "role": "api"}, stack)
        http = stack.enter_context(httpx.Client(base_url=server.url, timeout=60))
        operator = Operator(http, ADMIN_TOKEN)
        full_task(operator, http)
        operator.begin(MODEL, "open", cohort={"size": 1, "minimum": 1})
        idle, sending = Device(http), Device(http)
        for device in (idle, sending):
            device.enrol(operator.token())
        assignment = sending.assignment("open")
        body = sending.body_for(assignment, np.ones(MODEL.parameters.size, np.float32))
        path = f"/v1/assignments/{assignment.assignment}/update"
        begun, go_on = threading.Event(), threading.Event()
        headers = sending.sign("PUT", path, Content.of(body)) | {
            "Content-Length": str(len(body)),
            "Content-Type": "application/octet-stream",
        }
        threads = stack.enter_context(ThreadPoolExecutor(2))
        stack.callback(go_on.set)
        upload = threads.submit(
            lambda: http.put(path, content=in_two_halves(body, begun, go_on), headers=headers)
        )
        asked = threads.submit(lambda: answered(lambda: idle.check_in(TASK, wait=30)))
        assert begun.wait(30)
        until(lambda: "fedpress_waiting_check_ins 1.0" in operator.http.get("/metrics").text)
        terminate(server)
        assert asked.result(5) == "unavailable"
        ready = httpx.get(f"{server.url}/readyz")
        assert ready.status_code == 503
        assert ready.headers["retry-after"]
        assert ready.headers["connection"] == "close"
        assert answered(lambda: idle.check_in(TASK, wait=30)) == "unavailable"
        go_on.set()
        assert upload.result(30).status_code == 201
        check_clean_end(server)


def until(is_so: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < give_up
        time.sleep(0.02)


@pytest.mark.slow
def test_what_waits_for_the_database_when_a_server_stops_is_put_off(
    place: Mapping[str, str], tmp_path: Path
) -> None:
    with ExitStack() as stack:
        settings = {**place, "role": "api", "shutdown_seconds": "1"}
        server = started(tmp_path / "api", settings, stack)
        http = stack.enter_context(httpx.Client(base_url=server.url, timeout=60))
        operator = Operator(http, ADMIN_TOKEN)
        operator.begin(MODEL, "open", cohort={"size": 50, "minimum": 50})
        devices = [Device(http) for _ in range(8)]
        for device in devices:
            device.enrol(operator.token())
        assignment = devices[0].assignment("open")
        body = devices[0].body_for(assignment, np.ones(MODEL.parameters.size, np.float32))
        engine = sa.create_engine(
            place["database_url"].replace("postgresql:", "postgresql+psycopg:"),
            isolation_level="AUTOCOMMIT",
        )
        stack.callback(engine.dispose)
        threads = stack.enter_context(ThreadPoolExecutor(len(devices)))
        with engine.connect() as other:
            other.execute(sa.text(f"SELECT pg_advisory_lock({_TURNS})"))

            def is_waiting() -> bool:
                query = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
                return bool(other.execute(sa.text(query)).scalar())

            asked: list[Future[str]] = [
                threads.submit(
                    lambda: answered(lambda: devices[0].upload(assignment.assignment, body))
                )
            ]
            for device in devices[1:]:
                asked.append(threads.submit(answered, partial(device.check_in, "open")))
            until(is_waiting)
            terminate(server)
            kinds = Counter(each.result(30) for each in asked)
        assert kinds == {"unavailable": len(devices)}
        check_clean_end(server)


@pytest.mark.slow
def test_servers_replaced_in_turn_under_load_fail_nobody_and_lose_nothing(
    place: Mapping[str, str], tmp_path: Path
) -> None:
    """Each of two api servers is stopped and begun again, with devices that train, and devices that
    wait, on the connections that they have."""
    answers = Answers()
    with ExitStack() as stack:
        draining = {**place, "drain_seconds": "1"}
        apis = [
            started(tmp_path / f"api{number}", {**draining, "role": "api"}, stack)
            for number in (1, 2)
        ]
        for role in ("worker", "scheduler"):
            started(tmp_path / role, {**place, "role": role}, stack)
        limits = httpx.Limits(max_connections=None)
        clients = [
            stack.enter_context(
                httpx.Client(base_url=api.url, timeout=60, event_hooks=answers.hooks, limits=limits)
            )
            for api in apis
        ]
        fleet = Fleet(clients, rounds=200)
        full_task(fleet.operator, clients[0])
        with waiting(40, fleet.operator, clients, answers, wait=5.0), fleet.taking_part():
            for api in apis:
                fleet.wait_for_rounds(1)
                terminate(api)
                check_clean_end(api)
                api.start()
                api.wait()
        assert fleet.check()
    assert not answers.failures
    assert answers.statuses[503], "nobody was there when a server stopped"
    assert "Traceback" not in "".join(api.log.read_text() for api in apis)
