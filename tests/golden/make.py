"""Leaves behind what a release would: a server in mid-round, and the devices of its task.

    python -m tests.golden.make                 server-<release>.zip, on SQLite
    python -m tests.golden.make postgresql      server-<release>-postgresql.zip

To be run once for each release, with its code; tests/server/test_releases.py goes on from what it
made. An archive holds the data folder, `devices.json`, and of PostgreSQL the database as
`database.sql`, what pg_dump writes with --inserts.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import zipfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from fedpress_protocols import __version__
from fedpress_protocols.model import Model
from fedpress_server import Settings, create_app
from tests import postgres
from tests.devices import ADMIN_TOKEN, Device, Operator
from tests.server.in_process import Clock, running

FIRST, SECOND = (1.0, 2.0), (0.5, -0.25)
"""The values of the two devices' updates in the first two rounds."""


def left_behind(folder: Path, url: str) -> dict[str, Any]:
    """A server in `folder` in the middle of the second of three rounds: one upload is staged, the
    other made and not sent. What its devices know."""
    clock = Clock()
    settings = Settings(data_dir=folder, database_url=url, admin_token=ADMIN_TOKEN)
    with running(create_app(settings, clock=clock)) as http:
        operator = Operator(http)
        weights = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
        model = Model.from_tensors({"weight": weights, "steps": np.array([3], np.int64)})
        operator.begin(
            model,
            rounds=3,
            strategy={"id": "fedavgm", "momentum": 0.5},
            cohort={"size": 2, "minimum": 2},
            round_seconds=3600.0,
        )
        devices = [Device(http, clock), Device(http, clock)]
        included = []
        for device, value in zip(devices, FIRST, strict=True):
            device.enrol(operator.token())
            assignment = device.assignment("digits")
            update = np.full(12, value, np.float32)
            device.upload(assignment.assignment, device.body_for(assignment, update))
            included.append(assignment.assignment)
        answer = devices[0].check_in("digits", included[0], wait=30)
        assert answer is not None
        told = []
        for device, value, name in zip(devices, SECOND, included, strict=True):
            assignment = device.assignment("digits")
            body = device.body_for(assignment, np.full(12, value, np.float32))
            told.append(
                {
                    "key": device.key.to_bytes().hex(),
                    "client_id": device.client_id,
                    "server_key": device.server_key.hex(),
                    "included": name,
                    "assignment": assignment.assignment,
                    "body": body.hex(),
                }
            )
        devices[0].upload(told[0]["assignment"], bytes.fromhex(told[0]["body"]))
        return {"now": clock.now, "model": answer.task.model, "devices": told}


def dumped(url: str) -> str:
    """The database as SQL statements, without those that only psql understands."""
    programs = postgres.binaries()
    assert programs is not None, postgres.MISSING
    pg_dump = str(programs / "pg_dump")
    command = [pg_dump, "--inserts", "--no-owner", "--no-privileges", url]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith("\\"))


def main(database: str = "sqlite") -> Path:
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url, suffix = "", ""
        if database == "postgresql":
            url, suffix = stack.enter_context(postgres.cluster()).new(), f"-{database}"
        told = left_behind(place / "data", url)
        (place / "devices.json").write_text(json.dumps(told, indent=1) + "\n")
        if url:
            (place / "database.sql").write_text(dumped(url))
        made = Path(__file__).with_name(f"server-{__version__}{suffix}.zip")
        with zipfile.ZipFile(made, "x", zipfile.ZIP_DEFLATED) as archive:
            for file in sorted(each for each in place.rglob("*") if each.is_file()):
                name = file.relative_to(place).as_posix()
                if name != "data/lock":
                    info = zipfile.ZipInfo(name, (2026, 1, 1, 0, 0, 0))
                    archive.writestr(info, file.read_bytes(), zipfile.ZIP_DEFLATED)
    return made


if __name__ == "__main__":
    print(main(*sys.argv[1:]))
