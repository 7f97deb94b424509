"""The cost of the console to a server with many devices and a long history.

    python benchmarks/console_load.py [--devices 10000] [--rounds 1000] [--polls 40]

Starts a server on SQLite in a folder of its own with that many devices and rounds, each round
measured by ten devices, and asks for the pages as a browser does. Prints for each page its bytes,
the seconds to its last byte, and what a viewer who leaves it open takes: one poll in five seconds,
as a share of a core.
"""

from __future__ import annotations

import argparse
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import sqlalchemy as sa

from fedpress.operator import Operator
from fedpress_protocols.messages import TaskConfig
from fedpress_protocols.model import Model
from fedpress_server.console.routing import COOKIE
from fedpress_server.storage import tables

TASK = "history"
PER_ROUND = 10
"""Devices that measure a round's model, two metrics each."""
POLL_SECONDS = 5.0
DEVICE = "device000000"
TOKEN = secrets.token_urlsafe(24)


@contextmanager
def served(folder: Path) -> Iterator[tuple[str, int]]:
    """A server over `folder`: its URL and its process's number."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    settings = {
        "FEDPRESS_HOST": "127.0.0.1",
        "FEDPRESS_PORT": str(port),
        "FEDPRESS_DATA_DIR": str(folder),
        "FEDPRESS_ADMIN_TOKEN": TOKEN,
    }
    command = [sys.executable, "-m", "fedpress_server"]
    server = subprocess.Popen(command, env={**os.environ, **settings}, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                httpx.get(f"{url}/readyz").raise_for_status()
                break
            except httpx.HTTPError:
                time.sleep(0.1)
        yield url, server.pid
    finally:
        server.terminate()
        server.wait()


def fill(folder: Path, num_devices: int, num_rounds: int) -> None:
    """Add the devices, and the rounds to the task, which has ended."""
    engine = sa.create_engine(f"sqlite:///{folder / 'fedpress.db'}")
    with engine.begin() as connection:
        now, token = time.time(), secrets.token_hex(8)
        add(connection, tables.enrolment_tokens, [_as_the_first(connection, token)])
        clients = [
            {
                "client_id": f"device{number:06}",
                "key_id": secrets.token_urlsafe(16),
                "public_key": secrets.token_bytes(32),
                "name": f"sensor {number}",
                "token_id": token,
                "enrolled_at": now - num_devices + number,
                "approval": "approved",
            }
            for number in range(num_devices)
        ]
        add(connection, tables.clients, clients)
        (first,) = connection.execute(sa.select(tables.rounds).where(tables.rounds.c.task == TASK))
        digests = [secrets.token_hex(32) for _ in range(num_rounds)]
        spec = connection.execute(sa.select(tables.models.c.spec)).scalars().first()
        models = [
            {"digest": digest, "spec": spec, "num_bytes": 4_000_000, "created_at": now}
            for digest in digests
        ]
        add(connection, tables.models, models)
        row = {name: value for name, value in first._mapping.items() if value is not None}
        rounds = [
            {
                **row,
                "round": number,
                "attempt": 1,
                "state": "committed",
                "reason": "",
                "model": digest,
                "received": 10,
                "included": 10,
                "upload_bytes": 12_345,
                "download_bytes": 400_000,
                "closed_at": now,
            }
            for number, digest in enumerate(digests, 2)
        ]
        add(connection, tables.rounds, rounds)
        reports = [
            {
                "task": TASK,
                "model": digest,
                "client_id": clients[(number * PER_ROUND + each) % num_devices]["client_id"],
                "num_examples": 100,
                "reported_at": now,
            }
            for number, digest in enumerate(digests)
            for each in range(PER_ROUND)
        ]
        add(connection, tables.evaluations, reports)
        measured = [
            {
                **{name: report[name] for name in ("task", "model", "client_id")},
                "metric": metric,
                "value": float(np.random.default_rng(number).uniform()),
            }
            for number, report in enumerate(reports)
            for metric in ("loss", "accuracy")
        ]
        add(connection, tables.measures, measured)
    engine.dispose()


def add(connection: sa.Connection, table: sa.Table, rows: list[dict[str, Any]]) -> None:
    connection.execute(sa.insert(table), rows)


def _as_the_first(connection: sa.Connection, token: str) -> dict[str, Any]:
    """The row of the server's first enrolment token, under another name."""
    row = connection.execute(sa.select(tables.enrolment_tokens)).first()
    assert row is not None
    return {**row._mapping, "token_id": token, "token_hash": secrets.token_hex(32)}


def cpu(process: int) -> float:
    """Its CPU seconds so far, as Linux counts them."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--devices", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=1_000)
    parser.add_argument("--polls", type=int, default=40)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fedpress-console-") as name:
        folder = Path(name)
        with served(folder) as (url, _), Operator(url, TOKEN) as operator:
            model = Model.from_tensors({"weight": np.zeros(1_000, np.float32)})
            operator.register_model(model)
            fields = {"task": TASK, "model": model.digest, "rounds": 5000}
            cohort = {"size": 10, "minimum": 1}
            operator.create_task(TaskConfig.model_validate({**fields, "cohort": cohort}))
            operator.create_token()
            operator.cancel_task(TASK)
        fill(folder, arguments.devices, arguments.rounds)
        with served(folder) as (url, process), httpx.Client(base_url=url, timeout=60) as http:
            show(http, process, arguments.polls)


def show(http: httpx.Client, process: int, polls: int) -> None:
    page = http.get("/console/login").text
    csrf = page.split('name="csrf" value="')[1].split('"')[0]
    http.post("/console/login", data={"csrf": csrf, "token": TOKEN})
    assert COOKIE in http.cookies
    for name in ("console.js", "console.css"):
        print(f"{name:28} {len(http.get(f'/console/static/{name}').content):>9,} B")
    task, device = f"/tasks/{TASK}", f"/devices/{DEVICE}"
    for path in ("", task, f"{task}/models", "/devices", device, "/audit"):
        began = time.perf_counter()
        answer = http.get(f"/console{path}").raise_for_status()
        seconds = time.perf_counter() - began
        before, last = cpu(process), answer
        for _ in range(polls):
            headers = {"If-None-Match": last.headers["ETag"]}
            last = http.get(f"/console{path}", headers=headers)
            assert last.status_code in (200, 304)  # a heartbeat changes the overview
        share = (cpu(process) - before) / polls / POLL_SECONDS
        print(
            f"/console{path:24} {len(answer.content):>9,} B, to the last byte {seconds:.3f} s, "
            f"a viewer {share:.2%} of a core"
        )


if __name__ == "__main__":
    main()
