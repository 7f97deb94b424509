"""Every server of one database signs with one key."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

from fedpress_protocols.errors import ConfigurationError
from fedpress_protocols.model import Model
from fedpress_protocols.signatures import DeviceKey
from fedpress_server import Settings
from fedpress_server.command import migrate
from fedpress_server.identity.server_keys import first_keys, known_key
from fedpress_server.storage.database import Database
from tests.devices import ADMIN_TOKEN, Device, Operator
from tests.server.in_process import Clock, Start


@pytest.fixture
def shared(database_url: Any, tmp_path: Path) -> dict[str, Any]:
    """The database of two servers; in the tests they have it one after the other."""
    return {"database_url": database_url(tmp_path) or f"sqlite:///{tmp_path / 'shared.db'}"}


@pytest.mark.both_databases
def test_a_second_server_without_the_key_is_told_what_to_give_it(
    start: Start, tmp_path: Path, shared: dict[str, Any]
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    with start(data_dir=first, **shared):
        pass
    with (
        pytest.raises(ConfigurationError, match=r"no server key.*FEDPRESS_SERVER_KEY_FILE"),
        start(data_dir=second, **shared),
    ):
        pass
    assert not (second / "server-key.pem").exists()
    with (
        pytest.raises(ConfigurationError, match=r"no authority key.*FEDPRESS_AUTHORITY_KEY_FILE"),
        start(data_dir=second, server_key_file=first / "server-key.pem", **shared),
    ):
        pass
    files = {f"{name}_key_file": first / f"{name}-key.pem" for name in ("server", "authority")}
    with start(data_dir=second, **files, **shared) as http:
        assert http.get("/readyz").status_code == 200


def test_receipts_of_both_servers_are_signed_alike(
    start: Start, clock: Clock, tmp_path: Path, shared: dict[str, Any], model: Model
) -> None:
    key = tmp_path / "key.pem"
    key.write_bytes(DeviceKey.generate().to_pem())
    keys = {"server_key_file": key, "authority_key_file": key}
    told = []
    for name in ("first", "second"):
        with start(data_dir=tmp_path / name, **keys, **shared) as http:
            told.append(Device(http, clock).enrol(Operator(http).token()).server_key)
    assert told[0] == told[1]


def test_another_key_than_the_database_knows_is_refused(start: Start, tmp_path: Path) -> None:
    with start():
        pass
    (tmp_path / "data/server-key.pem").write_bytes(DeviceKey.generate().to_pem())
    with pytest.raises(ConfigurationError, match=r"but the database's is.*the same"), start():
        pass
    (tmp_path / "data/server-key.pem").write_bytes(b"no key")
    with pytest.raises(ConfigurationError, match="not an Ed25519 private key"), start():
        pass
    with (
        pytest.raises(ConfigurationError, match="server_key_file"),
        start(server_key_file=tmp_path / "none.pem"),
    ):
        pass


@pytest.mark.both_databases
def test_migrate_makes_the_keys_that_all_servers_are_to_share_once(
    start: Start, tmp_path: Path, shared: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    files = {f"{name}_key_file": tmp_path / f"{name}.pem" for name in ("server", "authority")}
    settings = {"data_dir": tmp_path / "none", **files, **shared}
    arguments = [
        part
        for name, value in settings.items()
        for part in (f"--{name.replace('_', '-')}", str(value))
    ]
    migrate.main(arguments, standalone_mode=False)
    assert f"made {files['server_key_file']}" in capsys.readouterr().out
    made = {file: file.read_bytes() for file in files.values()}
    assert {file.stat().st_mode & 0o777 for file in made} == {0o600}
    migrate.main(arguments, standalone_mode=False)
    assert "made" not in capsys.readouterr().out
    assert made == {file: file.read_bytes() for file in files.values()}
    for name in ("first", "second"):
        with start(data_dir=tmp_path / name, **files, **shared) as http:
            assert http.get("/readyz").status_code == 200
    files["server_key_file"].unlink()
    migrate.main(
        arguments, standalone_mode=False
    )  # the key is elsewhere: none is made in its place
    assert not files["server_key_file"].exists()


def test_a_key_that_cannot_be_made_where_it_should_be_is_told(tmp_path: Path) -> None:
    """As on a Secret that lacks it, which is mounted read-only."""
    (tmp_path / "keys").write_text("no folder")
    file = tmp_path / "keys" / "server-key.pem"
    arguments = ["--data-dir", str(tmp_path / "none"), "--server-key-file", str(file)]
    url = f"sqlite:///{tmp_path / 'test.db'}"
    with pytest.raises(ConfigurationError, match=r"server_key_file names .*openssl genpkey"):
        migrate.main([*arguments, "--database-url", url], standalone_mode=False)


def test_keys_that_openssl_made_are_taken_and_none_is_written(
    start: Start, tmp_path: Path, shared: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    files = {f"{name}_key_file": tmp_path / f"{name}.pem" for name in ("server", "authority")}
    for file in files.values():
        make = ["openssl", "genpkey", "-algorithm", "ed25519", "-out", str(file)]
        subprocess.run(make, check=True)
    made = {file: file.read_bytes() for file in files.values()}
    settings = {"data_dir": tmp_path / "none", **files, **shared}
    arguments = [
        part
        for name, value in settings.items()
        for part in (f"--{name.replace('_', '-')}", str(value))
    ]
    migrate.main(arguments, standalone_mode=False)
    assert "made" not in capsys.readouterr().out
    for name in ("first", "second"):
        with start(data_dir=tmp_path / name, **files, **shared) as http:
            assert http.get("/readyz").status_code == 200
    assert made == {file: file.read_bytes() for file in files.values()}


@pytest.mark.both_databases
def test_of_migrations_at_one_time_each_key_is_made_by_one(
    tmp_path: Path, shared: dict[str, Any]
) -> None:
    files: dict[str, Any] = {
        f"{name}_key_file": tmp_path / "keys" / f"{name}.pem" for name in ("server", "authority")
    }
    settings = Settings(data_dir=tmp_path / "data", admin_token=ADMIN_TOKEN, **files, **shared)
    Database(settings.resolved_database_url).close()
    ready = Barrier(4)

    async def made() -> list[Path]:
        database = Database(settings.resolved_database_url, migrates=False)
        try:
            ready.wait(30)
            return await first_keys(settings, database)
        finally:
            database.close()

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: asyncio.run(made()), range(4)))
    each_once = [file for files_of_one in found for file in files_of_one]
    assert sorted(each_once) == sorted(files.values())  # by one or by two of them, each once
    assert known(settings) == [
        DeviceKey.from_pem(each.read_bytes()).public for each in files.values()
    ]


@pytest.mark.slow
@pytest.mark.both_databases
def test_two_migrations_of_one_volume_both_end_well(
    tmp_path: Path,
    database_url: Callable[[Path], str],
    dialect: str,
    request: pytest.FixtureRequest,
) -> None:
    if dialect == "sqlite":
        url = f"sqlite:///{tmp_path / 'fedpress.db'}"
    else:
        url = request.getfixturevalue("cluster").new(is_migrated=False)
    keys = tmp_path / "keys"
    command = [
        *(sys.executable, "-m", "fedpress", "server", "migrate", "--data-dir", str(tmp_path)),
        *("--server-key-file", str(keys / "server.pem")),
        *("--authority-key-file", str(keys / "authority.pem")),
    ]
    environment = os.environ | {
        "FEDPRESS_DATABASE_URL": url,
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    running = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [each.communicate(timeout=120)[0] for each in running]
    assert [each.returncode for each in running] == [0, 0]
    assert sum(each.count("made ") for each in said) == 2
    Database(url, migrates=False).close()


def known(settings: Settings) -> list[bytes | None]:
    async def read() -> list[bytes | None]:
        database = Database(settings.resolved_database_url, migrates=False)
        try:
            return await database.read(
                lambda c: [known_key(c, "server"), known_key(c, "authority")]
            )
        finally:
            database.close()

    return asyncio.run(read())
