"""The audit log on the disk: with what it tells of or not at all, without forks, and any row that
somebody changes is found."""

import asyncio
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, get_args

import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st

from fedpress_protocols.audit import NOTHING, AuditEntry, AuditPage, Head, checked, end_of
from fedpress_protocols.errors import (
    BrokenChain,
    ConfigurationError,
    MalformedRequest,
    RoleRequired,
)
from fedpress_protocols.model import Model
from fedpress_server import Settings
from fedpress_server.backup import back_up, restore, verify
from fedpress_server.identity import audit
from fedpress_server.storage import engines
from fedpress_server.storage.database import Database
from fedpress_server.storage.tables import audit_log
from tests.devices import ADMIN_TOKEN, Device, Operator
from tests.server.in_process import Clock, Enrolled, Server, Start, include_one
from tests.server.replicated import Databases

ENTRIES = 9


def log_of(operator: Operator) -> list[AuditEntry]:
    page = AuditPage.model_validate(operator.get("/v1/admin/audit?limit=1000"))
    assert end_of(checked(page.entries)) == page.head
    return list(page.entries)


def done(operator: Operator) -> list[tuple[str, str, str]]:
    return [(each.actor, each.action, each.subject) for each in log_of(operator)]


@pytest.mark.both_databases
def test_what_is_done_is_written_down_with_who_did_it(
    http: Server, operator: Operator, enrolled: Enrolled, model: Model, dialect: str
) -> None:
    made = operator.post("/v1/admin/operators", {"role": "operator", "note": "Ada"})
    somebody, name = Operator(http, made["token"]), f"operator:{made['operator_id']}"
    device = enrolled()
    bad = enrolled()
    operator.post(f"/v1/admin/clients/{bad.client_id}/revoke")
    somebody.begin(model, rounds=4, cohort={"size": 1, "minimum": 1})
    device.check_in("digits", include_one(device, model), wait=30)
    path = "/v1/admin/tasks/digits"
    headers = somebody.headers
    assert http.put(f"{path}/aliases/live", headers=headers, json={"version": 0}).status_code == 200
    for _ in range(2):  # the second changes nothing
        put = http.put(f"{path}/aliases/live", headers=headers, json={"version": 1})
        assert put.status_code == 200
        somebody.post(f"{path}/pause")
    somebody.post(f"{path}/aliases/live/rollback")
    somebody.post(f"{path}/resume")
    somebody.post(f"{path}/abort-round", {"detail": "slow"})
    somebody.post(f"{path}/cancel")
    http.delete(f"/v1/admin/operators/{made['operator_id']}", headers=operator.headers)
    found = done(operator)
    host = found[0][2]
    tokens = [subject for _, action, subject in found if action == "token.created"]
    settings = "settings-token"
    assert found == [
        ("server", "server.started", host),
        (settings, "operator.created", made["operator_id"]),
        (settings, "token.created", tokens[0]),
        (f"device:{device.client_id}", "device.enrolled", device.client_id),
        (settings, "token.created", tokens[1]),
        (f"device:{bad.client_id}", "device.enrolled", bad.client_id),
        (settings, "device.revoked", bad.client_id),
        (name, "model.brought", model.digest),
        (name, "task.created", "digits"),
        (name, "alias.promoted", "digits/live"),
        (name, "alias.promoted", "digits/live"),
        (name, "task.paused", "digits"),
        (name, "alias.rolled-back", "digits/live"),
        (name, "task.resumed", "digits"),
        (name, "round.aborted", "digits"),
        (name, "task.cancelled", "digits"),
        (settings, "operator.revoked", made["operator_id"]),
    ]
    told = json.dumps([entry.model_dump() for entry in log_of(operator)])
    assert made["token"] not in told
    assert ADMIN_TOKEN not in told


def test_a_task_that_ends_by_itself_and_a_collection_are_the_servers(
    start: Start, clock: Clock, model: Model
) -> None:
    with start() as http:
        operator, device = Operator(http), Device(http, clock)
        device.enrol(operator.token())
        operator.begin(model, rounds=3, cohort={"size": 1, "minimum": 1}, retention={"last": 1})
        for _ in range(3):
            device.check_in("digits", include_one(device, model), wait=30)
        clock.advance(30 * 86400)
        operator.post("/v1/admin/models/collect")
        operator.post("/v1/admin/models/collect")
        entries = log_of(operator)
        ended = next(each for each in entries if each.action == "task.ended")
        assert (ended.actor, ended.subject) == ("server", "digits")
        assert ended.details["state"] in ("paused", "finished")
        collected = [each for each in entries if each.action == "models.collected"]
        assert [each.actor for each in collected] == ["settings-token"]
        assert collected[0].details["models"] > 0


@pytest.mark.both_databases
def test_the_log_goes_on_over_restarts_and_is_paged(start: Start, dialect: str) -> None:
    for number in range(1, 4):
        with start() as http:
            assert len(log_of(Operator(http))) == number
    with start() as http:
        operator = Operator(http)
        first = AuditPage.model_validate(operator.get("/v1/admin/audit?limit=3"))
        rest = AuditPage.model_validate(operator.get("/v1/admin/audit?after=3&limit=3"))
        assert [each.seq for each in (*first.entries, *rest.entries)] == [1, 2, 3, 4]
        assert first.head == rest.head
        settings = {each.details["settings"] for each in (*first.entries, *rest.entries)}
        assert len(settings) == 1
    with start(poll_seconds=7.0) as http:
        last = log_of(Operator(http))[-1]
        assert last.details["settings"] not in settings


@pytest.mark.both_databases
def test_writers_of_several_servers_make_one_chain(
    databases: Databases, tmp_path: Path, dialect: str
) -> None:
    """Each with a connection and a thread of its own, all at once."""
    url = databases.new(tmp_path)
    Database(url).close()
    doors = 4 if dialect == "postgresql" else 1

    async def one(database: Database, name: str) -> list[Head]:
        def write(number: int) -> Any:
            def work(connection: sa.Connection) -> Head:
                head = audit.add(connection, 1.0, name, "token.created", f"{name}-{number}")
                if number % 3 == 2:
                    raise ConfigurationError("undone")
                return head

            return work

        asked = [database.write(write(number)) for number in range(24)]
        made = await asyncio.gather(*asked, return_exceptions=True)
        assert sum(isinstance(each, ConfigurationError) for each in made) == 8
        return [each for each in made if isinstance(each, Head)]

    def run(index: int) -> list[Head]:
        database = Database(url)
        try:
            return asyncio.run(one(database, f"w{index}"))
        finally:
            database.close()

    with ThreadPoolExecutor(doors) as pool:
        made = [head for heads in pool.map(run, range(doors)) for head in heads]
    assert len(made) == 16 * doors
    end = asyncio.run(audit.verified(url, made))
    assert end.seq == 16 * doors
    databases.give_back(url)


_DIES = """
import asyncio, sys
from fedpress_server import failpoints
from fedpress_server.identity import audit
from fedpress_server.storage import records
from fedpress_server.storage.database import Database

database = Database(sys.argv[1])
failpoints.arm(sys.argv[2])

async def main():
    for number in range(4):
        token = records.EnrolmentToken(f"t{number}", f"h{number}", 1, 0, 0.0, 1.0, "")

        def write(connection):
            records.add_token(connection, token)
            audit.add(connection, 1.0, "x", "token.created", token.token_id)

        await database.write(write)

asyncio.run(main())
"""


@pytest.mark.parametrize("where", ["commit-due", "committed"])
@pytest.mark.parametrize("at", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_kill_leaves_both_the_deed_and_its_entry_or_neither(
    tmp_path: Path, where: str, at: int
) -> None:
    file = tmp_path / "test.db"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", _DIES, f"sqlite:///{file}", f"{where}:kill:{at}"]
    died = subprocess.run(command, env=environment)
    assert died.returncode == -signal.SIGKILL
    end = asyncio.run(audit.verified(f"sqlite:///{file}", []))
    with closing(sqlite3.connect(file)) as connection:
        tokens = connection.execute("SELECT token_id FROM enrolment_tokens").fetchall()
        subjects = connection.execute("SELECT subject FROM audit_log").fetchall()
    assert tokens == subjects
    assert end.seq == len(tokens) == (at if where == "committed" else at - 1)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("audit") / "whole.db"
    database = Database(f"sqlite:///{file}")

    def write(connection: sa.Connection) -> None:
        for number in range(ENTRIES):
            told = {"number": number, "note": "Zoë"}
            audit.add(connection, 1e9 + number, "server", "token.created", f"t{number}", **told)

    try:
        asyncio.run(database.write(write))
    finally:
        database.close()
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("PRAGMA journal_mode=DELETE")
    return file


def end_in(file: Path, heads: list[Head]) -> Head:
    backend = engines.opened(f"sqlite:///{file}")
    try:
        with backend.reads.connect() as connection:
            return end_of(checked(audit.entries(connection), heads=heads))
    finally:
        backend.dispose()


cells = st.one_of(
    st.none(),
    st.integers(-(2**62), 2**62),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=6),
    st.binary(max_size=4),
    st.floats(allow_nan=False),
    st.sampled_from(["{}", '{"a": 1}', '{"number":0}', "[" * 3000, "0" * 64, "f" * 64]),
)


@given(st.data())
def test_any_row_that_is_changed_is_found(
    whole: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    head = end_in(whole, [])
    assert head.seq == ENTRIES
    file = tmp_path_factory.getbasetemp() / "changed.db"
    shutil.copy(whole, file)
    kind = data.draw(st.sampled_from(["alter", "remove", "swap", "insert"]))
    seq = data.draw(st.integers(1, ENTRIES))
    names = [column.name for column in audit_log.columns]
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("PRAGMA ignore_check_constraints=ON")
        before = connection.execute("SELECT * FROM audit_log ORDER BY seq").fetchall()
        try:
            match kind:
                case "alter":
                    name, cell = data.draw(st.sampled_from(names)), data.draw(cells)
                    connection.execute(f"UPDATE audit_log SET {name}=? WHERE seq=?", (cell, seq))
                case "remove":
                    connection.execute("DELETE FROM audit_log WHERE seq=?", (seq,))
                case "swap":
                    other = seq % ENTRIES + 1
                    for old, new in ((seq, 100), (other, seq), (100, other)):
                        connection.execute("UPDATE audit_log SET seq=? WHERE seq=?", (new, old))
                case "insert":
                    row = list(before[seq - 1])
                    row[0] = data.draw(st.sampled_from([-5, 0, ENTRIES + 1, ENTRIES + 2]))
                    places = ",".join("?" * len(row))
                    connection.execute(f"INSERT INTO audit_log VALUES ({places})", row)
        except sqlite3.IntegrityError:
            return  # the database itself refuses it
        connection.commit()
        after = connection.execute("SELECT * FROM audit_log ORDER BY seq").fetchall()
    if after == before:
        assert end_in(file, [head]) == head
        return
    with pytest.raises(BrokenChain):
        end_in(file, [head])


def test_verification_needs_a_database_of_this_schema(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'none.db'}"
    with pytest.raises(ConfigurationError, match="there is no server's database"):
        asyncio.run(audit.verified(url, []))
    assert not (tmp_path / "none.db").exists()
    Database(url).close()
    assert asyncio.run(audit.verified(url, [])) == NOTHING


def test_a_restore_adds_an_entry_and_a_changed_log_is_no_whole_backup(
    start: Start, clock: Clock, tmp_path: Path
) -> None:
    with start() as http:
        settings = http.app.services.settings
        Operator(http).token()
        before = log_of(Operator(http))
        asyncio.run(back_up(settings, tmp_path / "backup", with_keys=True, clock=clock))
    other = settings.model_copy(update={"data_dir": tmp_path / "other"})
    done = restore(tmp_path / "backup", other, clock=clock)
    with start(data_dir=other.data_dir) as http:
        after = log_of(Operator(http))
    assert after[: len(before)] == before
    restored, started = after[len(before) :]
    assert (restored.actor, restored.action) == ("command-line", "server.restored")
    assert restored.subject == done.restore.epoch
    assert started.action == "server.started"
    file = other.data_dir / "fedpress.db"
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("UPDATE audit_log SET actor='nobody' WHERE seq=2")
        connection.commit()
    asyncio.run(back_up(other, tmp_path / "changed", with_keys=True, clock=clock))
    (fault,) = verify(tmp_path / "changed").faults
    assert "the audit log was changed: entry 2 has hash" in fault


@pytest.mark.both_databases
def test_a_backup_is_written_down_once_it_is_whole(
    start: Start, clock: Clock, tmp_path: Path, dialect: str
) -> None:
    def fails() -> None:
        raise OSError("no space left on the device")

    place = tmp_path / os.fsdecode(b"nightly-\xff.tar")  # no UTF-8, which the log is
    with start() as http:
        settings, operator = http.app.services.settings, Operator(http)
        before = log_of(operator)
        with pytest.raises(OSError, match="no space"):
            asyncio.run(back_up(settings, place, clock=clock, before_files=fails))
        assert log_of(operator) == before
        first = asyncio.run(back_up(settings, place, with_keys=True, clock=clock))
        entry = log_of(operator)[-1]
    assert (entry.actor, entry.action) == ("command-line", "server.backed-up")
    assert entry.subject == "nightly-?.tar"
    assert entry.details == {
        "backup": first.backup,
        "backup_at": first.began_at,
        "epoch": "",
        "files": len(first.files),
        "keys": True,
    }
    other = Settings(data_dir=tmp_path / "other", admin_token=ADMIN_TOKEN)
    done = restore(place, other, clock=clock)
    second = asyncio.run(back_up(other, tmp_path / "second", clock=clock))
    with start(data_dir=other.data_dir, database_url="") as http:
        log = log_of(Operator(http))
    restored, backed_up, _ = log[len(before) :]
    assert (restored.action, backed_up.action) == ("server.restored", "server.backed-up")
    assert backed_up.subject == "second"
    assert backed_up.details["backup"] == second.backup
    assert backed_up.details["epoch"] == done.restore.epoch


def test_refused_attempts_are_told_in_windows(start: Start, clock: Clock) -> None:
    with start() as http:
        operator = Operator(http)
        viewer = operator.post("/v1/admin/operators", {"role": "viewer"})
        strangers = [Operator(http, f"wrong-{number}") for number in range(200)]
        statuses = [http.get("/v1/admin/clients", headers=s.headers).status_code for s in strangers]
        assert set(statuses) == {401, 429}
        for _ in range(3):
            with pytest.raises(RoleRequired):
                Operator(http, viewer["token"]).token()
        assert [each.action for each in log_of(operator)] == ["server.started", "operator.created"]
        clock.advance(60)
        http.call(http.app.services.operators.write_refusals)
        http.call(http.app.services.operators.write_refusals)
        entry = log_of(operator)[-1]
        assert entry.seq == 3
        assert entry.action == "operator.refused"
        told = {(each["reason"], each["operator"]): each for each in entry.details["refused"]}
        assert told["role", viewer["operator_id"]]["count"] == 3
        wrong = told["unknown", ""]["count"]
        assert wrong + told["too-many", ""]["count"] == 200
        assert wrong < 50


def test_the_documentation_names_every_action() -> None:
    text = (Path(__file__).parents[2] / "docs" / "audit.md").read_text()
    table = text[text.index("## Actions") :]
    told = [line.split("`")[1] for line in table.splitlines() if line.startswith("| `")]
    assert sorted(told) == sorted(get_args(audit.Action))


@pytest.mark.parametrize("rest", [{"since": 0.5}, {"at": float("nan")}, {"half": "\ud800"}])
def test_what_has_no_one_spelling_is_not_written(tmp_path: Path, rest: dict[str, Any]) -> None:
    database = Database(f"sqlite:///{tmp_path / 'test.db'}")
    try:
        with pytest.raises(MalformedRequest):
            asyncio.run(
                database.write(lambda c: audit.add(c, 1.0, "x", "token.created", "t", **rest))
            )
        assert asyncio.run(database.read(audit.head)) == NOTHING
    finally:
        database.close()
