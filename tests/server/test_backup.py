"""A backup holds all that a server needs, and what a restore undoes is told to whom it concerns."""

import asyncio
import hashlib
import json
import os
import shutil
import sqlite3
import stat
import tarfile
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa
from alembic import command
from alembic.config import Config

from fedpress_protocols.errors import ConfigurationError, NotFound
from fedpress_protocols.messages import (
    RECALL_CONTEXT,
    CheckInRequest,
    CheckInResponse,
    IncludedUpload,
    Recall,
)
from fedpress_protocols.model import Model
from fedpress_protocols.restores import RestoreStatus
from fedpress_protocols.signatures import DeviceKey, verify_document
from fedpress_server import Settings
from fedpress_server.backup import back_up, restore, verify
from fedpress_server.backup.archive import Manifest
from fedpress_server.identity.server_keys import known_key
from fedpress_server.registry import restores
from fedpress_server.storage.files import model_name
from tests.devices import ADMIN_TOKEN, Device, Operator
from tests.server.in_process import Clock, Enrolled, Server, Start, history, include_one
from tests.server.test_durability import Party, begin, finish, outcome


def taken(http: Server, place: Path, clock: Clock, **how: Any) -> Manifest:
    return asyncio.run(back_up(http.app.services.settings, place, clock=clock, **how))


def settings_of(folder: Path, **more: Any) -> Settings:
    return Settings(data_dir=folder, admin_token=ADMIN_TOKEN, tick_seconds=3600, **more)


def asked(device: Device, task: str = "digits", **request: Any) -> CheckInResponse | None:
    body = CheckInRequest(**request).model_dump_json()
    answer = device.json("POST", f"/v1/tasks/{task}/check-in", body)
    return (
        None if answer.status_code == 204 else CheckInResponse.model_validate_json(answer.content)
    )


def recalled(device: Device, answer: CheckInResponse | None) -> Recall:
    assert answer is not None
    assert answer.recall is not None
    document = answer.recall.recall.model_dump(mode="json")
    whole = {
        **document,
        "key_id": answer.recall.key_id,
        "signature": answer.recall.signature,
    }
    assert verify_document(whole, device.server_key, context=RECALL_CONTEXT) == document
    return answer.recall.recall


@pytest.fixture(params=["folder", "tar"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tmp_path / ("backup.tar" if request.param == "tar" else "backup")


@pytest.mark.both_databases
def test_a_task_is_backed_up_in_mid_round_and_completes_elsewhere(
    start: Start, clock: Clock, model: Model, tmp_path: Path, place: Path
) -> None:
    party = Party(clock)
    with start() as http:
        begin(http, party, model)
        operator = Operator(http)

        def is_mid_round() -> bool:
            newest = history(operator)[-1]
            return newest.round == 2 and newest.received == 1

        assert not finish(http, party, is_mid_round)
        made = taken(http, place, clock, with_keys=True)
        assert any(entry.name.startswith("files/uploads/") for entry in made.files)
    report = verify(place)
    assert report.faults == ()
    assert report.num_receipts == 2
    assert report.num_open == 1
    clock.advance(60)
    other = settings_of(tmp_path / "other")
    done = restore(place, other, clock=clock)
    assert [key[0] for key in done.open_rounds] == ["digits"]
    assert done.missing_keys == ()
    with start(data_dir=other.data_dir, database_url="") as http:
        ended = history(Operator(http))
        assert [(each.round, each.state) for each in ended] == [
            (1, "committed"),
            (2, "abandoned"),
            (2, "collecting"),
        ]
        assert "restore 1" in ended[1].reason
        assert finish(http, party)
        digest, _ = outcome(http, party)
    assert party.receipts
    assert digest != model.digest


@pytest.mark.both_databases
def test_what_came_after_the_backup_is_recalled_and_told(
    start: Start, clock: Clock, model: Model, tmp_path: Path
) -> None:
    place = tmp_path / "backup"
    with start() as http:
        operator = Operator(http)
        operator.begin(model, rounds=5, cohort={"size": 1, "minimum": 1})
        device = Device(http, clock)
        device.enrol(operator.token())
        first = include_one(device, model)
        told = device.check_in("digits", first, wait=30)
        assert told is not None
        assert told.receipts[0].receipt.outcome == "included"
        assert told.backup_at is None
        taken(http, place, clock, with_keys=True)
        clock.advance(5)
        fates = []
        for number in (2, 3):  # of which the first was given before the backup
            name = include_one(device, model)
            told = asked(device, pending=(name,), wait=30)
            assert told is not None
            assert told.backup_at == int(clock.now) - 5 - 60
            after = told.receipts[0].receipt
            fates.append(
                IncludedUpload(assignment=name, round=number, attempt=1, model=after.model)
            )
        last = device.assignment("digits").assignment
    other = settings_of(tmp_path / "other")
    restore(place, other, clock=clock)
    with start(data_dir=other.data_dir, database_url="") as http:
        device.http = http
        recall = recalled(device, asked(device, pending=(last,)))
        assert recall.unknown == (last,)
        assert recall.restore.number == 1
        answer = asked(device, pending=(last,), fates=tuple(fates))
        recall = recalled(device, answer)
        assert recall.unknown == (last, fates[1].assignment)
        assert answer is not None
        assert [each.receipt.reason for each in answer.receipts] == ["round-abandoned"]
        kept = IncludedUpload(assignment=first, round=1, attempt=1, model=None)
        answer = asked(device, fates=(kept,))
        assert recalled(device, answer).unknown == ()
        assert answer is not None
        assert [each.receipt.outcome for each in answer.receipts] == ["included"]
        done = asked(device, epoch=recall.restore.epoch)
        assert done is not None
        assert done.recall is None
        [status] = [
            RestoreStatus.model_validate(each) for each in Operator(http).get("/v1/admin/restores")
        ]
        assert [(lost.task, lost.round, lost.devices) for lost in status.undone] == [
            ("digits", 2, 1),
            ("digits", 3, 1),
        ]
        assert [lost.model for lost in status.undone] == [fate.model for fate in fates]
        with pytest.raises(NotFound):
            device.receipt(last)


def test_another_devices_assignment_is_not_called_unknown(
    start: Start, clock: Clock, model: Model, tmp_path: Path
) -> None:
    with start() as http:
        operator = Operator(http)
        operator.begin(model)
        devices = [Device(http, clock) for _ in range(2)]
        for device in devices:
            device.enrol(operator.token())
        theirs = devices[0].assignment("digits").assignment
        taken(http, tmp_path / "backup", clock, with_keys=True)
    restore(tmp_path / "backup", other := settings_of(tmp_path / "other"), clock=clock)
    with start(data_dir=other.data_dir) as http:
        devices[1].http = http
        recall = recalled(devices[1], asked(devices[1], pending=(theirs, "nobodys")))
        assert recall.unknown == ("nobodys",)


def test_a_device_enrolled_after_the_backup_gets_its_name_again(
    start: Start, clock: Clock, tmp_path: Path
) -> None:
    with start() as http:
        token = Operator(http).token(uses=2)
        taken(http, tmp_path / "backup", clock, with_keys=True)
        device = Device(http, clock)
        before = device.enrol(token)
    restore(tmp_path / "backup", other := settings_of(tmp_path / "other"), clock=clock)
    with start(data_dir=other.data_dir) as http:
        device.http = http
        assert device.enrol(token).client_id == before.client_id


def test_nothing_goes_that_a_backup_under_way_needs(
    start: Start, clock: Clock, model: Model, tmp_path: Path
) -> None:
    """The round under way in the snapshot ends, and two more, before its files are copied."""
    with start() as http:
        operator = Operator(http)
        strategy = {"id": "fedavgm", "momentum": 0.5}
        operator.begin(
            model,
            rounds=5,
            strategy=strategy,
            cohort={"size": 2, "minimum": 2},
            retention={"last": 1},
        )
        devices = [Device(http, clock) for _ in range(2)]
        for device in devices:
            device.enrol(operator.token())
        pending = ""

        def whole_round() -> None:
            nonlocal pending
            clock.advance(1)
            other = include_one(devices[1], model)
            devices[0].check_in("digits", pending, wait=30)
            devices[1].check_in("digits", other, wait=30)
            pending = include_one(devices[0], model)

        def goes_on() -> None:
            for _ in range(3):
                whole_round()
            clock.advance(300)
            told = operator.post("/v1/admin/models/collect", {"dry_run": False})
            assert told["dry_run"] is False

        pending = include_one(devices[0], model)
        whole_round()
        made = taken(http, tmp_path / "backup", clock, before_files=goes_on)
        assert verify(tmp_path / "backup").faults == ()
        kinds = {entry.name.split("/")[1] for entry in made.files if "/" in entry.name}
        assert kinds == {"models", "uploads", "optimizers"}
        data = http.app.services.settings.data_dir
        left = {path.name for path in (data / "optimizers").iterdir()}
        assert len(left) > 1
        clock.advance(2 * 3600)
        for path in [*(data / "optimizers").iterdir(), *(data / "uploads").rglob("*")]:
            os.utime(path, (0, 0))
        http.call(http.app.services.scheduler.forget)
        assert len(list((data / "optimizers").iterdir())) == 1


def test_a_backup_is_made_under_load(
    start: Start, clock: Clock, model: Model, tmp_path: Path
) -> None:
    """Devices go on meanwhile; each of the backups is whole, and so is the task in the end."""
    party = Party(clock)
    with start() as http:
        begin(http, party, model)
        ended = threading.Thread(target=finish, args=(http, party))
        ended.start()
        places: list[Path] = []
        while ended.is_alive() and len(places) < 20:
            places.append(tmp_path / f"backup{len(places)}")
            taken(http, places[-1], clock)
        ended.join()
        outcome(http, party)
    assert places
    for each in places:
        assert verify(each).faults == ()


def damaged_backup(start: Start, clock: Clock, model: Model, place: Path) -> str:
    with start() as http:
        operator = Operator(http)
        operator.begin(model, cohort={"size": 2, "minimum": 1})
        devices = [Device(http, clock) for _ in range(2)]
        for device in devices:
            device.enrol(operator.token())
        first = [include_one(device, model) for device in devices]
        devices[0].check_in("digits", first[0], wait=30)
        include_one(devices[0], model)
        taken(http, place, clock, with_keys=True)
        return str(operator.get("/v1/tasks/digits")["model"])


def flip(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def resigned(place: Path, change: Callable[[sqlite3.Connection], object]) -> None:
    """As if the server itself had written what `change` makes of the records."""
    with closing(sqlite3.connect(place / "database.sqlite")) as connection:
        connection.execute("PRAGMA foreign_keys=ON")
        change(connection)
        connection.commit()
    key = DeviceKey.from_pem((place / "keys/server-key.pem").read_bytes())
    manifest, _ = Manifest.parsed((place / "manifest.json").read_bytes())
    data = (place / "database.sqlite").read_bytes()
    entries = [
        entry
        if entry.name != "database.sqlite"
        else entry.model_copy(
            update={"num_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        )
        for entry in manifest.files
    ]
    again = manifest.model_copy(update={"files": tuple(entries)})
    (place / "manifest.json").write_bytes(again.to_bytes(key))


def test_verify_says_which_part_is_damaged(
    start: Start, clock: Clock, model: Model, tmp_path: Path
) -> None:
    newest = damaged_backup(start, clock, model, whole := tmp_path / "whole")
    assert verify(whole).faults == ()
    manifest, _ = Manifest.parsed((whole / "manifest.json").read_bytes())
    for entry in manifest.files:
        place = tmp_path / "one"
        shutil.copytree(whole, place)
        flip(place / entry.name, entry.num_bytes // 2)
        assert any(fault.startswith(f"{entry.name}: its SHA-256") for fault in verify(place).faults)
        (place / entry.name).unlink()
        assert any(fault == f"{entry.name}: it is missing" for fault in verify(place).faults)
        (place / entry.name).write_bytes(b"short")
        assert any(f"{entry.name}: 5 bytes, expected" in fault for fault in verify(place).faults)
        with pytest.raises(ConfigurationError, match="damaged"):
            restore(place, settings_of(tmp_path / "never"))
        assert not (tmp_path / "never").exists()
        shutil.rmtree(place)

    def faults(change: Callable[[Path], object]) -> list[str]:
        place = tmp_path / "one"
        shutil.copytree(whole, place)
        change(place)
        found = verify(place).faults
        shutil.rmtree(place)
        return list(found)

    def edited(place: Path) -> None:
        document = json.loads((place / "manifest.json").read_text())
        document["began_at"] += 1
        (place / "manifest.json").write_text(json.dumps(document))

    def of_records(statement: str) -> Callable[[Path], None]:
        return lambda place: resigned(place, lambda connection: connection.execute(statement))

    assert faults(lambda place: (place / "manifest.json").unlink()) == [
        "manifest.json: it is missing"
    ]
    assert "manifest.json: " in faults(edited)[0]
    assert faults(lambda place: (place / "manifest.json").write_text("{"))[0].startswith("manifest")
    assert faults(lambda place: (place / "more").write_text("")) == [
        "more: it is not in the manifest"
    ]
    found = faults(
        of_records("UPDATE assignments SET receipt = replace(receipt, 'included', 'included ')")
    )
    assert len(found) == 2
    assert all("the receipt of assignment" in fault for fault in found)
    found = faults(of_records("UPDATE rounds SET plan = '{}' WHERE state = 'collecting'"))
    assert any("the open round of task 'digits' cannot be replayed" in each for each in found)
    found = faults(
        lambda place: resigned(
            place,
            lambda connection: connection.execute(
                "INSERT INTO models SELECT ?, spec, num_bytes, created_at FROM models LIMIT 1",
                ("0" * 64,),
            ),
        )
    )
    assert found == [f"files/{model_name('0' * 64)}: the records refer to it, but it is missing"]
    found = faults(of_records("DELETE FROM server_keys"))
    assert "no key of the server" in found[0]
    assert f"files/{model_name(newest)}" in {entry.name for entry in manifest.files}
    other = verify(whole, key_id="other").faults
    assert "expected other" in other[0]
    assert verify(whole, key_id=verify(whole).key_id).faults == ()


def test_a_tar_file_that_is_cut_or_no_backup_is_refused(
    start: Start, clock: Clock, model: Model, tmp_path: Path
) -> None:
    place = tmp_path / "backup.tar"
    damaged_backup(start, clock, model, place)
    assert verify(place).faults == ()
    assert stat.S_IMODE(place.stat().st_mode) == 0o600
    with tarfile.open(place) as whole:
        assert all(member.mode == 0o600 for member in whole)
    flip(place, 3000)
    assert verify(place).faults
    place.write_bytes(place.read_bytes()[:5000])
    with pytest.raises(ConfigurationError, match=r"not a tar file|damaged"):
        restore(place, settings_of(tmp_path / "never"))
    with pytest.raises(ConfigurationError, match="not a tar file"):
        verify(Path(__file__))
    with pytest.raises(ConfigurationError, match="there is no backup"):
        verify(tmp_path / "nothing")


def test_nothing_is_written_over(start: Start, clock: Clock, model: Model, tmp_path: Path) -> None:
    place = tmp_path / "backup"
    damaged_backup(start, clock, model, place)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "something").write_text("mine")
    with pytest.raises(ConfigurationError, match="not empty"):
        restore(place, settings_of(tmp_path / "full"))
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["something"]
    (tmp_path / "empty").mkdir()
    restore(place, settings_of(tmp_path / "empty"))
    with start() as http:
        for there in (place, tmp_path / "full"):
            with pytest.raises(ConfigurationError, match="already exists"):
                taken(http, there, clock)
        with pytest.raises(ConfigurationError, match="own folder"):
            taken(http, tmp_path / "data" / "backup", clock)
        with pytest.raises(ConfigurationError, match=r"the folder .*/nosuch does not exist"):
            taken(http, tmp_path / "nosuch" / "backup.tar", clock)
    with pytest.raises(ConfigurationError, match="no server database"):
        asyncio.run(back_up(settings_of(tmp_path / "nowhere"), tmp_path / "more"))
    assert not (tmp_path / "nowhere").exists()
    assert not list(tmp_path.glob(".*"))


def test_a_folder_that_is_there_is_filled_from_inside_as_a_volume_has_to_be(
    start: Start, clock: Clock, model: Model, tmp_path: Path
) -> None:
    place, party = tmp_path / "backup", Party(clock)
    with start() as http:
        begin(http, party, model)
        finish(http, party, lambda: len(history(Operator(http))) > 1)
        taken(http, place, clock, with_keys=True)
    volume = tmp_path / "volume"
    volume.mkdir()
    before = volume.stat()
    nowhere = settings_of(
        volume,
        store_url="s3://bucket",
        store_endpoint="http://127.0.0.1:9",
        store_access_key_id="name",
        store_secret_access_key="long enough to be one",
        store_timeout=0.1,
    )
    with pytest.raises(ConfigurationError, match="cannot be used"):
        restore(place, nowhere, clock=clock)
    assert not list(volume.iterdir())
    (tmp_path / "link").symlink_to(volume)
    restore(place, settings_of(tmp_path / "link"), clock=clock)
    after = volume.stat()
    assert (after.st_ino, after.st_mode) == (before.st_ino, before.st_mode)
    assert {path.name for path in volume.iterdir()} > {"fedpress.db", "server-key.pem", "models"}
    assert not list(volume.glob(".*"))
    with start(data_dir=volume) as http:
        assert finish(http, party)
        outcome(http, party)


def test_keys_are_copied_if_asked_for_alone(start: Start, clock: Clock, tmp_path: Path) -> None:
    with start() as http:
        taken(http, tmp_path / "without", clock)
        taken(http, tmp_path / "with", clock, with_keys=True)
        key = (http.app.services.settings.data_dir / "server-key.pem").read_bytes()
    assert not (tmp_path / "without" / "keys").exists()
    assert stat.S_IMODE((tmp_path / "without").stat().st_mode) == 0o700
    pem = tmp_path / "with" / "keys" / "server-key.pem"
    assert pem.read_bytes() == key
    assert stat.S_IMODE(pem.stat().st_mode) == 0o600
    done = restore(tmp_path / "without", other := settings_of(tmp_path / "other"))
    needed = [tmp_path / "other" / f"{name}-key.pem" for name in ("server", "authority")]
    assert done.missing_keys == tuple(map(str, needed))
    with pytest.raises(ConfigurationError, match="no server key"), start(data_dir=other.data_dir):
        pass
    for file in needed:
        shutil.copy(tmp_path / "data" / file.name, file)
    with start(data_dir=other.data_dir) as http:
        assert http.get("/readyz").status_code == 200


def test_a_backup_that_fails_leaves_nothing_and_holds_nothing(
    start: Start, clock: Clock, model: Model, tmp_path: Path
) -> None:
    place = tmp_path / "backup"

    def fails() -> None:
        raise OSError("no space left on the device")

    with start() as http:
        Operator(http).begin(model)
        for name in ("backup", "backup.tar"):
            with pytest.raises(OSError, match="no space"):
                taken(http, tmp_path / name, clock, before_files=fails)
        assert not list(tmp_path.glob("*backup*"))
        database = http.app.services.database
        held = http.call(database.read, lambda c: restores.is_held(c, clock.now))
        assert not held
        with pytest.raises(ConfigurationError, match="was stopped"):
            taken(http, place, clock, before_files=lambda: clock.advance(3600))
        (http.app.services.settings.data_dir / model_name(model.digest)).unlink()
        with pytest.raises(ConfigurationError, match="not in the store"):
            taken(http, place, clock)
        assert not list(tmp_path.glob("*backup*"))


def test_a_restore_of_a_restore_is_another_epoch(
    start: Start, clock: Clock, model: Model, tmp_path: Path
) -> None:
    with start() as http:
        Operator(http).begin(model)
        taken(http, tmp_path / "first", clock, with_keys=True)
    one = restore(tmp_path / "first", settings_of(tmp_path / "one"), clock=clock)
    again = restore(tmp_path / "first", settings_of(tmp_path / "again"), clock=clock)
    assert one.restore.number == again.restore.number == 1
    assert one.restore.epoch != again.restore.epoch
    with start(data_dir=tmp_path / "one") as http:
        taken(http, tmp_path / "second", clock, with_keys=True)
    two = restore(tmp_path / "second", settings_of(tmp_path / "two"), clock=clock)
    assert two.restore.number == 2
    with start(data_dir=tmp_path / "two") as http:
        listed = Operator(http).get("/v1/admin/restores")
        assert [each["number"] for each in listed] == [2, 1]
        abandoned = [each for each in history(Operator(http)) if each.state == "abandoned"]
        assert len(abandoned) == 2


@pytest.mark.slow
def test_a_backup_of_postgresql_comes_back_to_either_database(
    start: Start, clock: Clock, model: Model, tmp_path: Path, cluster: Any
) -> None:
    party, place = Party(clock), tmp_path / "backup"
    with start(database_url=cluster.new()) as http:
        begin(http, party, model)
        finish(http, party, lambda: len(history(Operator(http))) > 1)
        made = taken(http, place, clock, with_keys=True)
        assert made.dialect == "postgresql"
    assert verify(place).faults == ()
    url = cluster.new()
    restore(place, settings_of(tmp_path / "other", database_url=url), clock=clock)
    assert not (tmp_path / "other" / "fedpress.db").exists()
    with pytest.raises(ConfigurationError, match="has rows"):
        restore(place, settings_of(tmp_path / "third", database_url=url), clock=clock)
    with start(data_dir=tmp_path / "other", database_url=url) as http:
        assert finish(http, party)
        outcome(http, party)


def test_open_assignments_of_an_asynchronous_task_are_given_up_too(
    start: Start, clock: Clock, model: Model, tmp_path: Path
) -> None:
    """Whatever a device knows of them from the server before, they are in no model of this one."""
    with start() as http:
        operator = Operator(http)
        operator.begin(
            model,
            strategy={"id": "fedbuff"},
            cohort={"size": 3, "minimum": 3},
            asynchronous={"concurrency": 3, "max_staleness": 4},
            max_attempts=1,
        )
        devices = [Device(http, clock) for _ in range(3)]
        for device in devices:
            device.enrol(operator.token())
        staged = include_one(devices[0], model)
        open_ = devices[1].assignment("digits").assignment
        taken(http, tmp_path / "backup", clock, with_keys=True)
    restore(tmp_path / "backup", other := settings_of(tmp_path / "other"), clock=clock)
    with start(data_dir=other.data_dir) as http:
        for device, name in zip(devices, (staged, open_), strict=False):
            device.http = http
            found = device.receipt(name)
            assert found is not None
            assert found.receipt.reason == "round-abandoned"
            assert found.receipt.epoch is not None
        assert Operator(http).get("/v1/tasks/digits")["state"] == "running"
        assert devices[0].assignment("digits").plan.attempt == 2


def test_the_last_attempt_of_a_backup_is_no_failure_when_its_deadline_has_passed(
    start: Start, clock: Clock, model: Model, tmp_path: Path
) -> None:
    with start() as http:
        operator, device = Operator(http), Device(http, clock)
        device.enrol(operator.token())
        operator.begin(model, max_attempts=1, round_seconds=60.0)
        device.assignment("digits")
        taken(http, tmp_path / "backup", clock, with_keys=True)
    restore(tmp_path / "backup", other := settings_of(tmp_path / "other"), clock=clock)
    clock.advance(3600)
    with start(data_dir=other.data_dir) as http:
        operator = Operator(http)
        assert operator.get("/v1/tasks/digits")["state"] == "running"
        first, second = operator.get("/v1/tasks/digits/rounds")
        assert first["reason"] == "given up by restore 1: open in the backup"
        assert second["attempt"] == 2


def test_the_records_of_a_backup_know_the_servers_key(
    start: Start, clock: Clock, tmp_path: Path
) -> None:
    with start() as http:
        taken(http, tmp_path / "backup", clock)
        public = http.app.services.server_keys.current.public
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'backup' / 'database.sqlite'}")
    with engine.connect() as connection:
        assert known_key(connection, "server") == public
    engine.dispose()


def test_a_backup_of_an_older_release_is_brought_up_to_date(
    start: Start, clock: Clock, tmp_path: Path
) -> None:
    """Its records are of schema 0010; what is newer, the migrations add when it comes back."""
    with start() as http:
        Operator(http).token()
        taken(http, place := tmp_path / "backup", clock, with_keys=True)
    url = f"sqlite:///{place / 'database.sqlite'}"
    engine, config = sa.create_engine(url), Config()
    config.set_main_option("script_location", "fedpress_server:migrations")
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.downgrade(config, "0010")
        connection.exec_driver_sql("DELETE FROM schema_releases")
    engine.dispose()
    key = DeviceKey.from_pem((place / "keys/server-key.pem").read_bytes())
    manifest, _ = Manifest.parsed((place / "manifest.json").read_bytes())
    data = (place / "database.sqlite").read_bytes()
    changed = {"num_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    files = tuple(
        each.model_copy(update=changed if each.name == "database.sqlite" else {})
        for each in manifest.files
    )
    older = manifest.model_copy(update={"files": files, "revision": "0010"})
    (place / "manifest.json").write_bytes(older.to_bytes(key))
    assert verify(place).faults == ()
    restore(place, other := settings_of(tmp_path / "other"), clock=clock)
    with start(data_dir=other.data_dir) as http:
        assert [each["number"] for each in Operator(http).get("/v1/admin/restores")] == [1]


def test_included_after_the_backup_and_abandoned_by_the_restore_contradict_nobody(
    start: Start, clock: Clock, model: Model, tmp_path: Path, enrolled: Enrolled
) -> None:
    """Open in the backup, included after it: the restored server's receipt says not included, and
    names the epoch, by which the device tells it from a forgery."""
    del enrolled
    with start(data_dir=tmp_path / "before") as http:
        operator = Operator(http)
        operator.begin(model, cohort={"size": 1, "minimum": 1})
        device = Device(http, clock)
        device.enrol(operator.token())
        name = device.assignment("digits")
        taken(http, tmp_path / "backup", clock, with_keys=True)
        device.upload(name.assignment, device.body_for(name, np.ones(12, np.float32)))
        told = asked(device, pending=(name.assignment,), wait=30)
        assert told is not None
        assert told.receipts[0].receipt.outcome == "included"
        assert told.receipts[0].receipt.epoch is None
    done = restore(tmp_path / "backup", other := settings_of(tmp_path / "other"), clock=clock)
    with start(data_dir=other.data_dir) as http:
        device.http = http
        fate = IncludedUpload(assignment=name.assignment, round=1, attempt=1, model=None)
        answer = asked(device, fates=(fate,))
        assert recalled(device, answer).unknown == ()
        assert answer is not None
        [receipt] = answer.receipts
        assert receipt.receipt.outcome == "not-included"
        assert receipt.receipt.epoch == done.restore.epoch
        [status] = Operator(http).get("/v1/admin/restores")
        assert [each["round"] for each in status["undone"]] == [1]
