"""Two api servers, two workers and a scheduler as processes, on one PostgreSQL and one S3 store."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import sqlalchemy as sa

from fedpress_protocols.model import Model
from fedpress_protocols.signatures import DeviceKey
from fedpress_server import Settings, create_app
from fedpress_server.storage.tables import jobs
from tests import postgres, s3
from tests.devices import Device, Operator
from tests.server.in_process import running
from tests.system.server_process import ADMIN_TOKEN, ServerProcess

SIZE = 400_000
MODEL = Model.from_tensors({"weight": np.zeros(SIZE, np.float32)})
ROUNDS, COHORT = 4, 3
LEASE = "3"


def end(process: ServerProcess) -> None:
    if process.is_running:
        process.kill()


class Fleet:
    """Devices that each send one update in every round, through whichever server answers."""

    def __init__(self, clients: list[httpx.Client]) -> None:
        self.clients = clients
        self.operator = Operator(clients[0], ADMIN_TOKEN)
        self.devices = [Device(clients[0], time.time) for _ in range(COHORT)]

    def begin(self) -> None:
        for device in self.devices:
            device.enrol(self.operator.token())
        self.operator.begin(
            MODEL,
            rounds=ROUNDS,
            strategy={"id": "fedavgm", "momentum": 0.5},
            cohort={"size": COHORT, "minimum": COHORT},
            round_seconds=3600.0,
        )

    def upload(self, number: int, place: int, by: int) -> None:
        """The update of the device at `place` for round `number`, through the server `by`."""
        device = self.devices[place]
        device.http = self.clients[by]
        for _ in range(600):
            answer = device.check_in("digits", wait=0.2)
            if answer and answer.assignment and answer.assignment.plan.round == number:
                break
        else:
            raise AssertionError(f"round {number} does not begin")
        update = np.random.default_rng([number, place]).normal(0, 0.1, SIZE).astype(np.float32)
        body = device.body_for(answer.assignment, update, num_examples=place + 1)
        device.upload(answer.assignment.assignment, body)

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = self.operator.get("/v1/tasks/digits")
        return found


def reference(folder: Path) -> str:
    """The model of the same task on one server that nobody disturbs."""
    settings = Settings(data_dir=folder, admin_token=ADMIN_TOKEN)
    with running(create_app(settings)) as server:
        fleet = Fleet([server])
        fleet.begin()
        for number in range(1, ROUNDS + 1):
            for place in range(COHORT):
                fleet.upload(number, place, 0)
        return str(until(fleet, ROUNDS)["model"])


def until(fleet: Fleet, number: int) -> dict[str, Any]:
    for _ in range(6000):
        if fleet.state()["round"] >= number:
            return fleet.state()
        time.sleep(0.02)
    raise AssertionError(f"no model of round {number}: {fleet.state()}")


@pytest.fixture
def place(tmp_path: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """A database's URL, and the settings that every server of this place has."""
    if postgres.binaries() is None:
        pytest.skip(postgres.MISSING)
    for name in ("psycopg", "obstore", "moto"):
        pytest.importorskip(name)
    keys = {}
    for purpose in ("server", "authority"):
        file = tmp_path / f"{purpose}.pem"
        file.write_bytes(DeviceKey.generate().to_pem())
        keys[f"FEDPRESS_{purpose.upper()}_KEY_FILE"] = str(file)
    with ExitStack() as stack:
        url = stack.enter_context(postgres.cluster()).new(is_migrated=False)
        endpoint = stack.enter_context(s3.store())
        s3.make_bucket(endpoint, "models")
        yield (
            url,
            {
                **keys,
                "FEDPRESS_DATABASE_URL": url,
                "FEDPRESS_STORE_URL": "s3://models/fedpress",
                "FEDPRESS_STORE_ENDPOINT": endpoint,
                "FEDPRESS_STORE_REGION": "us-east-1",
                "FEDPRESS_STORE_ACCESS_KEY_ID": s3.KEYS["access_key_id"],
                "FEDPRESS_STORE_SECRET_ACCESS_KEY": s3.KEYS["secret_access_key"],
                "FEDPRESS_LEASE_SECONDS": LEASE,
            },
        )


@pytest.mark.slow
def test_servers_killed_in_the_middle_of_a_task_change_nothing_in_its_model(
    place: tuple[str, dict[str, str]], tmp_path: Path
) -> None:
    url, settings = place

    def server(name: str, role: str) -> ServerProcess:
        return ServerProcess(tmp_path / name, {**settings, "FEDPRESS_ROLE": role})

    apis = [server("api1", "api"), server("api2", "api")]
    workers = [server("worker1", "worker"), server("worker2", "worker")]
    scheduler = server("scheduler", "scheduler")
    early = subprocess.run(
        [sys.executable, "-m", "fedpress_server"],
        env={**os.environ, **settings, "FEDPRESS_ROLE": "api", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert early.returncode == 2
    assert "fedpress server migrate" in early.stderr
    migrated = subprocess.run(
        [sys.executable, "-m", "fedpress", "server", "migrate"],
        env={**os.environ, **settings, "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert migrated.returncode == 0, migrated.stderr
    engine = sa.create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    with ExitStack() as stack:
        stack.callback(engine.dispose)
        for each in (*apis, *workers[:1], scheduler):
            each.start()
            stack.callback(end, each)
        stack.callback(lambda: end(workers[1]))
        clients = [stack.enter_context(httpx.Client(base_url=api.url, timeout=60)) for api in apis]
        fleet = Fleet(clients)
        fleet.begin()
        is_caught = False
        for number in range(1, ROUNDS + 1):
            for index in range(COHORT):
                fleet.upload(number, index, index % 2 if apis[1].is_running else 0)
            if not is_caught and kill_with_a_lease(engine, workers[0]):
                is_caught = fleet.state()["round"] < number
                workers[1].start()
            if number == 2 and apis[1].is_running:
                apis[1].kill()
            until(fleet, number)
        assert is_caught, "no worker was killed in the middle of an aggregation"
        assert "fedpress_lease_expired_total 1.0" in httpx.get(f"{workers[1].url}/metrics").text
        for kind in ("livez", "readyz"):
            assert httpx.get(f"{scheduler.url}/{kind}").status_code == 200
        assert httpx.get(f"{scheduler.url}/v1/tasks").status_code == 404
        made = fleet.state()
        assert made["state"] == "finished"
        history = fleet.operator.get("/v1/tasks/digits/rounds")
        assert [(each["attempt"], each["included"]) for each in history] == [(1, COHORT)] * ROUNDS
    assert made["model"] == reference(tmp_path / "alone")


def kill_with_a_lease(engine: sa.Engine, worker: ServerProcess) -> bool:
    """Kill the worker as soon as it holds a lease; False if none was seen in time."""
    query = sa.select(jobs.c.lease_token).where(jobs.c.lease_token.is_not(None))
    give_up = time.monotonic() + 20
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        while time.monotonic() < give_up:
            if connection.execute(query).first() is not None:
                worker.kill()
                return True
            time.sleep(0.002)
    return False
