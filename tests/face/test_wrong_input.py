"""Whatever an operator gets wrong is a sentence on stderr and a documented exit code."""

from __future__ import annotations

import json
import re
import sqlite3
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest

from fedpress.cli import main
from fedpress.cli.outcomes import FAILED, NO_ANSWER, NOT_ALLOWED, WRONG_USE
from fedpress_protocols.model import Model
from fedpress_server.tls import Certificates
from tests import databases, ports
from tests.certificates import Pair, TestAuthority

Ended = tuple[int, str, str]
Run = Callable[..., Ended]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """`fedpress` as a shell would start it, in a folder of its own: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    for name in ("URL", "ADMIN_TOKEN", "ADMIN_TOKEN_FILE", "CA", "TOKEN", "CONFIG", "DATA_DIR"):
        monkeypatch.delenv(f"FEDPRESS_{name}", raising=False)

    def run(*arguments: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["fedpress", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        told = capsys.readouterr()
        return int(ended.value.code or 0), told.out, told.err

    return run


@pytest.fixture
def closed() -> str:
    return f"http://127.0.0.1:{ports.unused()}"


class _Stranger(BaseHTTPRequestHandler):
    """A server on the web that is not fedpress: it answers with what its path asks for."""

    def do_GET(self) -> None:
        status = int(self.path.strip("/").partition("/")[0])
        self.send_response(status)
        if status == 301:
            self.send_header("Location", "https://elsewhere.example/")
        body = b"<html>hello</html>"
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def stranger() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), _Stranger)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def is_a_sentence(err: str) -> bool:
    return "Traceback" not in err and bool(re.search(r"^(fedpress|Error|Usage)", err))


TOKEN = ("--admin-token", "x" * 16)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("devices token create --hours nan", "nan"),
        ("devices token create --hours 0", "0.0"),
        ("devices token create --uses 0", "0"),
        ("round list digits --limit 0", "0"),
        ("server operator create viewer --days nan", "nan"),
        ("authority issue key public --out file --days nan", "nan"),
        ("plan 1M --link nan", "nan"),
        ("plan 1M --link 1 --deadline nan", "nan"),
        ("simulate --rounds 0", "0"),
        ("round show digits zero", "zero"),
        ("round watch digits --every nan", "nan"),
        ("model list digits --limit 1001", "1001"),
        ("model promote digits 1 production --expect x", "--expect"),
        ("model promote digits 1 production --require accuracy", "'accuracy>=0.95'"),
        ("model promote digits 1 production --require accuracy>=nan", "'accuracy>=0.95'"),
        ("task list --url ftp://somewhere", "no server's URL"),
        ("task list --url nonsense", "no server's URL"),
        ("task list --url http://[::1", "no server's URL"),
        ("task list --url http://host:port", "no server's URL"),
        ("task list --ca missing.pem", "missing.pem"),
        ("task list --ca text", "holds no certificate"),
        ("task create missing.json model", "missing.json"),
        ("task create folder model", "folder"),
        ("task create text model", "text"),
        ("task check text", "text"),
        ("task check deep.json", "deep.json"),
        ("nothing", "No such command"),
        ("task list --colour", "No such option"),
    ],
)
def test_a_wrong_value_is_wrong_use(run: Run, tmp_path: Path, arguments: str, says: str) -> None:
    wrong_files(tmp_path)
    given = arguments.split()
    groups = ("devices", "round", "model", "task", "server")
    asks_a_server = given[0] in groups and given[1:2] != ["check"]
    code, out, err = run(*given, *(TOKEN if asks_a_server else ()))
    assert (code, out) == (WRONG_USE, ""), err
    assert is_a_sentence(err), err
    assert says in err


def wrong_files(folder: Path) -> None:
    tensors = {"w": np.zeros((3, 4), np.float32)}
    (folder / "model").write_bytes(Model.from_tensors(tensors).to_bytes())
    (folder / "folder").mkdir()
    (folder / "text").write_bytes(b"\xff\xfe no JSON, no PEM, no TOML = [")
    (folder / "deep.json").write_text("[" * 100_000)
    (folder / "unknown.toml").write_text('colour = "red"\n')
    (folder / "wrong.toml").write_text('port = "many"\n')


@pytest.mark.parametrize("command", ["doctor", "migrate", "run", "backup"])
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--config missing.toml", "missing.toml"),
        ("--config folder", "folder"),
        ("--config text", "text"),
        ("--config unknown.toml", "colour"),
        ("--config wrong.toml", "port"),
    ],
)
def test_settings_that_cannot_work(
    run: Run, tmp_path: Path, command: str, options: str, says: str
) -> None:
    wrong_files(tmp_path)
    place = ["copy"] if command == "backup" else []
    code, out, err = run("server", command, *place, *options.split())
    assert code == (FAILED if command == "doctor" else WRONG_USE), err
    assert "Traceback" not in err
    assert says in (out if command == "doctor" else err)


@pytest.mark.parametrize("command", ["migrate", "run"])
@pytest.mark.parametrize("url", ["foo", "foo://bar", "postgresql://", "sqlite:////proc/no/db"])
def test_a_database_that_is_none(run: Run, command: str, url: str) -> None:
    code, _, err = run("server", command, "--database-url", url)
    assert code == WRONG_USE, err
    assert "Traceback" not in err
    assert "database" in err


@pytest.mark.parametrize("command", ["run", "migrate", "backup copy", "key show", "audit verify"])
@pytest.mark.parametrize("kept", [0, 4096])
def test_a_damaged_database(run: Run, tmp_path: Path, command: str, kept: int) -> None:
    file = tmp_path / "data" / "fedpress.db"
    databases.lay(file)
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[:kept] + bytes(range(256)) * ((size - kept) // 256))
    code, out, err = run("server", *command.split(), "--data-dir", "data")
    assert (code, out) == (WRONG_USE, ""), err
    assert f"fedpress: {file} is damaged" in err
    assert "restore.md" in err
    assert "Traceback" not in err


def test_a_database_with_a_damaged_table(run: Run, tmp_path: Path) -> None:
    """Which is met behind the look at the schema."""
    file = tmp_path / "data" / "fedpress.db"
    databases.lay(file)
    with closing(sqlite3.connect(file)) as database:
        page, size = database.execute(
            "SELECT rootpage, (SELECT page_size FROM pragma_page_size) FROM sqlite_master "
            "WHERE name = 'tasks'"
        ).fetchone()
    with file.open("r+b") as pages:
        pages.seek((page - 1) * size)
        pages.write(bytes(size))
    for command in ("run --port 0", "backup copy"):
        code, _, err = run("server", *command.split(), "--data-dir", "data")
        assert (code, "Traceback" in err) == (WRONG_USE, False), err
        assert "fedpress: the database is damaged: database disk image is malformed" in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("run --data-dir text", "'text' is no folder"),
        ("run --data-dir /proc/no", "'/proc/no' cannot be used"),
        ("migrate --data-dir missing", "/missing does not exist"),
        ("run --host 192.0.2.1", "--host, FEDPRESS_HOST"),
        ("run --host 300.1.1.1", "--host, FEDPRESS_HOST"),
        ("run --port 0 --admin-port 0 --admin-host 192.0.2.1", "--admin-host, FEDPRESS_ADMIN_HOST"),
        ("doctor --url nonsense", "no server's URL"),
    ],
)
def test_places_that_are_none(run: Run, tmp_path: Path, arguments: str, says: str) -> None:
    wrong_files(tmp_path)
    code, _, err = run("server", *arguments.split())
    assert code == WRONG_USE, err
    assert says in err
    assert "Traceback" not in err


@contextmanager
def secure(pair: Pair, client_ca: Path | None = None) -> Iterator[str]:
    """A stranger that speaks TLS."""
    server = HTTPServer(("127.0.0.1", 0), _Stranger)
    context = Certificates(*pair, client_ca).context
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"https://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_tls_that_fails_says_what_to_give(run: Run, tmp_path: Path, stranger: str) -> None:
    def told(url: str, *ca: str) -> Ended:
        return run("task", "list", "--url", url, *TOKEN, *ca)

    authority = TestAuthority(tmp_path / "authority")
    ca = ("--ca", str(authority.file))
    with secure(authority.issue("127.0.0.1")) as url:
        code, _, err = told(url)
        assert (code, "--ca, FEDPRESS_CA" in err) == (WRONG_USE, True), err
        code, _, err = told(url.replace("127.0.0.1", "localhost"), *ca)
        assert (code, "is for another name" in err) == (WRONG_USE, True), err
        code, _, err = told(url.replace("https", "http"))
        assert (code, "Then its URL begins with https://" in err) == (NO_ANSWER, True), err
        assert "is the server running" not in err
    code, _, err = told(stranger.replace("http", "https"))
    assert (code, "http:// in place of https://" in err) == (WRONG_USE, True), err
    with secure(authority.issue("127.0.0.1"), authority.file) as url:
        _, _, err = told(url, *ca)
        assert "FEDPRESS_ADMIN_PORT" in err


def test_no_server_is_there(run: Run, closed: str) -> None:
    code, out, err = run("task", "list", "--url", closed, *TOKEN)
    assert (code, out) == (NO_ANSWER, "")
    assert err.startswith(f"fedpress: no answer from {closed}")
    assert err.endswith("\n  see `fedpress explain transport`\n")
    code, out, err = run("task", "list", "--url", closed, *TOKEN, "--json")
    assert (code, out) == (NO_ANSWER, "")
    problem = json.loads(err)
    assert problem["type"] == "urn:fedpress:problem:transport"
    assert problem["hint"] == "is the server running?"


@pytest.mark.parametrize(
    ("status", "code", "says"),
    [
        (200, NO_ANSWER, "is no fedpress server"),
        (301, NO_ANSWER, "redirects to https://elsewhere.example/"),
        (404, NO_ANSWER, "is no fedpress server"),
        (502, NO_ANSWER, "answers 502, and not by the server itself"),
    ],
)
def test_something_else_is_there(
    run: Run, stranger: str, status: int, code: int, says: str
) -> None:
    ended, out, err = run("task", "list", "--url", f"{stranger}/{status}", *TOKEN)
    assert (ended, out) == (code, "")
    assert says in err
    assert is_a_sentence(err)


def test_a_token_and_where_it_is_from(
    run: Run, closed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = ("task", "list", "--url", closed)
    code, _, err = run(*where)
    assert code == WRONG_USE
    assert "Missing option '--admin-token'" in err
    file = tmp_path / "token"
    file.write_text("\n")
    file.chmod(0o600)
    code, _, err = run(*where, "--admin-token-file", str(file))
    assert (code, "empty" in err) == (WRONG_USE, True), err
    file.write_text("a token from a file\n")
    assert run(*where, "--admin-token-file", str(file))[0] == NO_ANSWER
    both = run(*where, *TOKEN, "--admin-token-file", str(file))
    assert (both[0], "not both" in both[2]) == (WRONG_USE, True), both[2]
    monkeypatch.setenv("FEDPRESS_ADMIN_TOKEN", "of the environment")
    assert run(*where, "--admin-token-file", str(file))[0] == NO_ANSWER
    monkeypatch.setenv("FEDPRESS_ADMIN_TOKEN_FILE", str(tmp_path / "nowhere"))
    assert run(*where)[0] == NO_ANSWER
    assert run(*where, "--admin-token", "a\ntoken")[0] == WRONG_USE


def test_not_allowed_is_its_own_exit_code() -> None:
    from fedpress.cli.outcomes import exit_code
    from fedpress_protocols.errors import Conflict, Forbidden, InvalidToken, StorageFull

    assert exit_code(InvalidToken()) == exit_code(Forbidden()) == NOT_ALLOWED
    assert exit_code(StorageFull()) == NO_ANSWER
    assert exit_code(Conflict()) == FAILED
