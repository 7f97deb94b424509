"""What releases have left behind: their migrations, and a server of theirs in mid-round.

`golden/server-<release>.zip` is a data folder of that release, and the devices of its task; in
`golden/server-<release>-postgresql.zip` there is a dump of its database too. `golden/make.py` makes
both.
"""

import hashlib
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest

from fedpress_protocols import __version__
from fedpress_protocols.signatures import DeviceKey
from fedpress_server import migrations
from tests.devices import Device, Operator
from tests.postgres import Cluster
from tests.server.in_process import Clock, Start, history

GOLDEN = Path(__file__).parents[1] / "golden"


def test_a_released_migration_does_not_change() -> None:
    released = json.loads((GOLDEN / "migrations.json").read_text())
    folder = Path(migrations.__file__ or "").parent / "versions"
    for name, digest in released.items():
        found = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        assert found == digest, f"{name} has been released: add a migration instead"
    names = sorted(path.name for path in folder.glob("r*.py"))
    assert names[: len(released)] == sorted(released)


@pytest.mark.parametrize("release", sorted(path.stem for path in GOLDEN.glob("server-*.zip")))
def test_a_task_goes_on_under_the_next_release(
    start: Start, clock: Clock, tmp_path: Path, release: str, request: pytest.FixtureRequest
) -> None:
    with zipfile.ZipFile(GOLDEN / f"{release}.zip") as golden:
        golden.extractall(tmp_path)
    settings = {}
    if release.endswith("-postgresql"):
        settings["database_url"] = restored(
            request.getfixturevalue("cluster"), (tmp_path / "database.sql").read_text()
        )
    told = json.loads((tmp_path / "devices.json").read_text())
    clock.now = told["now"] + 60
    with start(**settings) as http:
        operator = Operator(http)
        devices = []
        for each in told["devices"]:
            device = Device(http, clock, DeviceKey.from_bytes(bytes.fromhex(each["key"])))
            device.client_id = each["client_id"]
            device.server_key = bytes.fromhex(each["server_key"])
            devices.append(device)
            receipt = device.receipt(each["included"])
            assert receipt is not None
            assert receipt.receipt.outcome == "included"
        statuses = [
            device.put(each["assignment"], bytes.fromhex(each["body"])).status_code
            for device, each in zip(devices, told["devices"], strict=True)
        ]
        assert statuses == [200, 201]  # the first had come before
        before = devices[0].model(told["model"]).parameters
        answer = devices[0].check_in("digits", told["devices"][0]["assignment"], wait=30)
        assert answer is not None
        after = devices[0].model(answer.task.model).parameters
        mean, momentum = (0.5 - 0.25) / 2, 0.5 * (1.0 + 2.0) / 2
        np.testing.assert_allclose(after - before, mean + momentum, atol=1e-6)
        third = [device.assignment("digits") for device in devices]
        for device, each in zip(devices, third, strict=True):
            device.upload(each.assignment, device.body_for(each, np.zeros(12, np.float32)))
        answer = devices[1].check_in("digits", third[1].assignment, wait=30)
        assert answer is not None
        assert answer.task.state == "finished"
        ended = [(each.round, each.state, each.included) for each in history(operator)]
        assert ended == [(number, "committed", 2) for number in (1, 2, 3)]


def restored(cluster: Cluster, dump: str) -> str:
    """A database from what pg_dump wrote."""
    import psycopg

    url = cluster.new(is_migrated=False)
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(dump.encode())
    return url


def test_a_release_leaves_one_behind_for_each_database() -> None:
    made = {path.stem for path in GOLDEN.glob("server-*.zip")}
    assert {f"server-{__version__}", f"server-{__version__}-postgresql"} <= made
