"""`fedpress server doctor` diagnoses common problems and suggests fixes."""

import errno
import json
import os
import shutil
import socket
import sqlite3
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from click.testing import CliRunner
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from fedpress.cli import app
from fedpress.operator import asked
from fedpress_compression.compressors.none import Uncompressed
from fedpress_protocols.errors import ConfigurationError
from fedpress_protocols.messages import TaskConfig
from fedpress_protocols.model import Model
from fedpress_protocols.plan import CohortRules, Profile
from fedpress_server import Settings, create_app
from fedpress_server.doctor import Finding, examined, findings_of
from tests import ports
from tests.certificates import TestAuthority
from tests.system.server_process import ServerProcess

GOLDEN = Path(__file__).parents[1] / "golden" / "server-0.1.0.zip"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    process = ServerProcess(tmp_path_factory.mktemp("doctor"))
    process.start()
    yield process
    process.stop()


@pytest.fixture
def free_port() -> int:
    return ports.unused()


@pytest.fixture
def faults(tmp_path: Path, free_port: int) -> Callable[..., list[Finding]]:
    """The faults found with settings, and with the options of `examined` among them."""

    def found(**given: object) -> list[Finding]:
        options = {"url": "", "ask": asked, "clock": time.time, "min_free_bytes": 0}
        options |= {name: given.pop(name) for name in list(given) if name in options}
        settings = {"data_dir": tmp_path / "data", "port": free_port} | given
        findings = examined(lambda: Settings.load(**settings), **options)  # type: ignore[arg-type]
        return [each for each in findings if each.is_fault]

    return found


def signed_for(days: float, key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    """A certificate for localhost that ends in so many days."""
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    end = datetime.now(UTC) + timedelta(days=days)
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(end - timedelta(days=90))
        .not_valid_after(end)
        .sign(key, hashes.SHA256())
    )


def written(folder: Path, days: float, other_key: bool = False) -> dict[str, Path]:
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = folder / "tls.crt"
    certificate.write_bytes(signed_for(days, key).public_bytes(Encoding.PEM))
    kept = ec.generate_private_key(ec.SECP256R1()) if other_key else key
    file = folder / "tls.key"
    file.write_bytes(kept.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    file.chmod(0o600)
    return {"tls_certificate": certificate, "tls_key": file}


def only(faults: list[Finding], check: str) -> Finding:
    assert [each.check for each in faults] == [check]
    return faults[0]


Faults = Callable[..., list[Finding]]


def test_all_is_well_with_a_new_server_and_with_one_that_runs(
    faults: Faults, server: ServerProcess, tmp_path: Path
) -> None:
    assert faults(**written(tmp_path, days=60)) == []
    assert faults(url=server.url, data_dir=server.data_dir) == []


def test_a_state_that_cannot_be_written(faults: Faults, tmp_path: Path) -> None:
    fault = only(faults(data_dir=Path("/proc/fedpress")), "state")
    assert "cannot write to /proc" in fault.found
    (tmp_path / "file").touch()
    assert "is no folder" in only(faults(data_dir=tmp_path / "file" / "data"), "state").found


def test_a_wrong_clock(faults: Faults, server: ServerProcess) -> None:
    ahead = only(faults(url=server.url, clock=lambda: time.time() + 3600), "clock")
    assert "ahead of" in ahead.found
    assert "NTP" in ahead.fix
    behind = only(faults(url=server.url, clock=lambda: time.time() - 3600), "clock")
    assert "behind" in behind.found


@pytest.mark.parametrize(
    ("late", "shows"), [(0.0, "0 s"), (1.9, "0 s"), (9.0, "8 s"), (-9.0, "10 s")]
)
def test_clocks_are_compared_at_the_request_however_long_the_other_checks_take(
    tmp_path: Path, late: float, shows: str
) -> None:
    """`late`: by how much the server's clock is behind, or its Date is old."""
    now = [1_800_000_000.0]

    def load() -> Settings:
        now[0] += 1000
        return Settings.load(data_dir=tmp_path / "data")

    def ask(url: str) -> httpx.Response:
        now[0] += 0.5
        date = format_datetime(datetime.fromtimestamp(int(now[0] - late), UTC), usegmt=True)
        return httpx.Response(200, headers={"Date": date})

    url = "http://127.0.0.1:1"
    findings = examined(load, url=url, ask=ask, clock=lambda: now[0], min_free_bytes=0)
    [clock] = [each for each in findings if each.check == "clock"]
    assert (clock.found, clock.fix) == (f"the two clocks are {shows} apart", "")


def test_a_closed_port(faults: Faults, server: ServerProcess, free_port: int) -> None:
    fault = only(faults(url=f"http://127.0.0.1:{free_port}"), "port")
    assert "no answer" in fault.found
    assert "firewall" in fault.fix
    taken = only(faults(port=server.port), "port")
    assert "cannot listen" in taken.found
    assert "FEDPRESS_PORT" in taken.fix


@pytest.mark.parametrize("host", ["300.1.1.1", "192.0.2.1"])
def test_an_address_of_no_machine_is_a_matter_of_the_host(faults: Faults, host: str) -> None:
    fault = only(faults(host=host), "port")
    assert "FEDPRESS_HOST" in fault.fix
    assert "FEDPRESS_PORT" not in fault.fix


def test_settings_with_which_no_server_starts(faults: Faults, tmp_path: Path) -> None:
    """What `server run` refuses; tests of the server say so."""
    cases: tuple[dict[str, Any], ...] = (
        {"masking_authority": "nonsense"},
        {"role": "worker"},
        {"watched_folders": str(tmp_path / "nowhere")},
    )
    for wrong in cases:
        fault = only(faults(**wrong), "settings")
        [name] = wrong
        assert name in fault.found
        with pytest.raises(ConfigurationError) as refused:
            create_app(Settings.load(data_dir=tmp_path / "data", **wrong))
        assert refused.value.detail == fault.found


def test_a_variable_that_nothing_reads(faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDPRESS_ADMIN_PROT", "27998")
    monkeypatch.setenv("FEDPRESS_API_PORT", "tcp://10.0.0.1:8080")
    monkeypatch.setenv("FEDPRESS_API_SERVICE_PORT_HTTP", "8080")
    fault = only(faults(), "settings")
    assert "FEDPRESS_ADMIN_PROT" in fault.found
    assert "did you mean FEDPRESS_ADMIN_PORT?" in fault.found


def test_a_relative_folder_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for says in ("data can be made in", "data can be written to"):
        settings = Settings.load(data_dir=Path("data"))
        [state] = [each for each in findings_of(settings, time.time()) if each.check == "state"]
        assert state.found.startswith(says)
        Path("data").mkdir(mode=0o700, exist_ok=True)


@pytest.mark.parametrize(
    ("days", "other_key", "says"),
    [(-1, False, "expired on"), (3, False, "expires on"), (120, False, "valid from"),
     (60, True, "is not the key of")],
)  # fmt: skip
def test_a_bad_certificate(
    faults: Faults, tmp_path: Path, days: float, other_key: bool, says: str
) -> None:
    assert says in only(faults(**written(tmp_path, days, other_key)), "certificate").found


@pytest.mark.slow
def test_a_certificate_of_ones_own_authority(tmp_path: Path, faults: Faults) -> None:
    authority = TestAuthority(tmp_path / "authority")
    pair = authority.issue("127.0.0.1")
    names = {"FEDPRESS_TLS_CERTIFICATE": str(pair.certificate), "FEDPRESS_TLS_KEY": str(pair.key)}
    secure = ServerProcess(tmp_path, names)
    secure.start()
    try:
        url = secure.url.replace("http://", "https://")
        fault = only(faults(url=url), "certificate")
        assert "--ca, FEDPRESS_CA" in fault.fix
        assert faults(url=url, ask=partial(asked, ca=authority.file)) == []
    finally:
        secure.stop()


def test_authorities_of_devices_that_are_none(faults: Faults, tmp_path: Path) -> None:
    files = written(tmp_path, days=60)
    fault = only(faults(**files, tls_client_ca=files["tls_key"]), "certificate")
    assert "tls_client_ca" in fault.found


def test_a_schema_that_is_behind(faults: Faults, tmp_path: Path) -> None:
    with zipfile.ZipFile(GOLDEN) as golden:
        golden.extractall(tmp_path / "old")
    [file] = (tmp_path / "old").rglob("fedpress.db")
    file.parent.chmod(0o700)
    for private in (file, *file.parent.glob("*.pem")):
        private.chmod(0o600)
    before = file.read_bytes()
    fault = only(faults(data_dir=file.parent), "database")
    assert "has schema" in fault.found
    assert "fedpress server migrate" in fault.fix
    assert file.read_bytes() == before


def test_a_full_disk(faults: Faults) -> None:
    fault = only(faults(min_free_bytes=2**62), "disk")
    assert "are free" in fault.found
    assert "make room" in fault.fix


def test_a_placeholder_in_place_of_a_secret(faults: Faults) -> None:
    fault = only(faults(admin_token="change-me-change-me"), "settings")
    assert "placeholder" in fault.found
    assert "openssl rand" in fault.found


def test_a_missing_extra(faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    fault = only(faults(database_url="postgresql://ada@host/name"), "extras")
    assert fault.fix == "pip install 'fedpress[postgres]'"


def test_a_store_that_is_not_reached(faults: Faults, free_port: int) -> None:
    fault = only(
        faults(
            store_url="s3://models",
            store_endpoint=f"http://127.0.0.1:{free_port}",
            store_access_key_id="ada",
            store_secret_access_key="0123456789abcdef",
            store_timeout=1.0,
        ),
        "store",
    )
    assert "FEDPRESS_STORE_ENDPOINT" in fault.fix


@pytest.fixture(scope="module")
def once_begun(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The data folder of a server that has had a task; the name of its model's file."""
    server = ServerProcess(tmp_path_factory.mktemp("begun"))
    server.start()
    with server.operator() as operator:
        model = Model.from_tensors({"w": np.zeros(4, np.float32)})
        operator.register_model(model)
        operator.register_model(model.with_parameters(np.ones(4, np.float32)))
        rules = CohortRules(size=1, minimum=1)
        whole = Profile(name="whole", compressor=Uncompressed())
        operator.create_task(
            TaskConfig(task="digits", model=model.digest, rounds=1, profiles=(whole,), cohort=rules)
        )
    server.stop()
    [file] = (server.data_dir / "models").glob(f"{model.digest}*")
    return server.data_dir, file.name


@pytest.fixture
def begun(once_begun: tuple[Path, str], tmp_path: Path) -> tuple[ServerProcess, Path]:
    """A server, stopped, that has had a task; the file of the task's model."""
    server = ServerProcess(tmp_path)
    shutil.copytree(once_begun[0], server.data_dir)
    return server, server.data_dir / "models" / once_begun[1]


@pytest.mark.slow
def test_a_model_that_is_lost(begun: tuple[ServerProcess, Path], faults: Faults) -> None:
    """No server starts without it, and says which task is concerned."""
    server, file = begun
    held = file.read_bytes()
    file.unlink()
    fault = only(faults(data_dir=server.data_dir), "models")
    assert "task digits" in fault.found
    assert f"models/{file.name}" in fault.fix
    with pytest.raises(AssertionError, match="task digits cannot go on"):
        server.start()
    file.write_bytes(held)
    assert not faults(data_dir=server.data_dir)
    server.start()
    server.stop()


def test_a_model_with_a_flipped_byte(begun: tuple[ServerProcess, Path], faults: Faults) -> None:
    server, file = begun
    for damaged, whose in ((file, "task digits"), (other_than(file), "model ")):
        held = damaged.read_bytes()
        damaged.write_bytes(held[:-1] + bytes([held[-1] ^ 1]))
        fault = only(faults(data_dir=server.data_dir), "models")
        assert fault.found.startswith(whose)
        assert "other bytes" in fault.found
        damaged.write_bytes(held)
    assert faults(data_dir=server.data_dir) == []


def other_than(file: Path) -> Path:
    [other] = set(file.parent.iterdir()) - {file}
    return other


def test_an_altered_row_of_the_audit_log(begun: tuple[ServerProcess, Path], faults: Faults) -> None:
    server, _ = begun
    with closing(sqlite3.connect(server.data_dir / "fedpress.db")) as database, database:
        database.execute("UPDATE audit_log SET actor = 'nobody' WHERE seq = 2")
    fault = only(faults(data_dir=server.data_dir), "audit")
    assert "entry 2" in fault.found
    assert "docs/audit.md" in fault.fix


@pytest.mark.parametrize("where", ["header", "page"])
def test_a_damaged_database(begun: tuple[ServerProcess, Path], faults: Faults, where: str) -> None:
    server, _ = begun
    file = server.data_dir / "fedpress.db"
    data = bytearray(file.read_bytes())
    if where == "header":
        data[:16] = bytes(16)
    else:  # the page of the table's index, so that reads of rows do not meet it
        with closing(sqlite3.connect(file)) as database:
            page, size = database.execute(
                "SELECT rootpage, (SELECT page_size FROM pragma_page_size) FROM sqlite_master "
                "WHERE type = 'index' AND tbl_name = 'operators'"
            ).fetchone()
        data = bytearray(file.read_bytes())
        data[(page - 1) * size : page * size] = bytes(size)
    file.write_bytes(data)
    fault = only(faults(data_dir=server.data_dir), "database")
    assert "is damaged" in fault.found
    assert "restore.md" in fault.fix


def test_inodes_that_run_out_are_no_matter_of_ownership(
    faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = os.statvfs("/")
    fields = [*usual[:5], 1_000_000, 12, 12, *usual[8:]]
    monkeypatch.setattr(os, "statvfs", lambda place: os.statvfs_result(fields))

    def refused(*arguments: object, **more: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "NamedTemporaryFile", refused)
    told = {each.check: each for each in faults()}
    assert "12 of 1,000,000 inodes" in told["disk"].found
    assert "df -i" in told["disk"].fix
    assert "chown" not in told["state"].fix
    assert "inodes" in told["state"].fix


def test_an_operators_port_that_is_taken(faults: Faults, free_port: int) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        fault = only(faults(admin_port=port), "port")
    assert f"127.0.0.1:{port}" in fault.found
    assert "FEDPRESS_ADMIN_PORT" in fault.fix
    assert faults(admin_port=0) == []


def test_what_others_on_the_machine_have_open(faults: Faults, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for mode, shown in ((0o777, "0777"), (0o755, "0755")):
        folder.chmod(mode)
        fault = only(faults(), "permissions")
        assert shown in fault.found
        assert f"chmod 0700 {folder}" in fault.fix
    folder.chmod(0o700)
    assert faults() == []


def test_too_few_files_for_the_connections(faults: Faults) -> None:
    fault = only(faults(max_connections=10**9), "files")
    assert "max_connections of 1000000000" in fault.found
    assert "LimitNOFILE" in fault.fix
    assert faults(max_connections=10) == []


def test_a_key_that_others_can_read(faults: Faults, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir(mode=0o700)
    key = tmp_path / "data" / "server-key.pem"
    key.touch(mode=0o600)
    assert faults() == []
    key.chmod(0o644)
    fault = only(faults(), "keys")
    assert "0644" in fault.found
    assert f"chmod 0600 {key}" in fault.fix
    key.chmod(0o600)
    assert "is not there" in only(faults(server_key_file=tmp_path / "other.pem"), "keys").found


def test_the_command_prints_what_it_found_and_fails_for_a_fault(
    tmp_path: Path, free_port: int
) -> None:
    runner = CliRunner(env={"FEDPRESS_PORT": str(free_port)})
    arguments = ["server", "doctor", "--data-dir", str(tmp_path)]
    good = runner.invoke(app, [*arguments, "--min-free-mib", "0"])
    assert good.exit_code == 0, good.output
    assert "FAULT" not in good.output
    bad = runner.invoke(app, [*arguments, "--min-free-mib", str(2**40)])
    assert bad.exit_code == 1
    assert "FAULT  disk:" in bad.output
    assert "fix: make room" in bad.output
    told = json.loads(runner.invoke(app, [*arguments, "--json", "--min-free-mib", "0"]).output)
    assert {each["check"] for each in told} >= {"settings", "state", "disk", "database", "port"}
    assert not any(each["is_fault"] for each in told)
