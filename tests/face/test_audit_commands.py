"""`fedpress server operator` and `fedpress server audit` against a server in this process."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from fedpress_protocols.errors import (
    BrokenChain,
    ConfigurationError,
    InvalidToken,
    NotFound,
    RoleRequired,
)
from tests.devices import Operator
from tests.face.commands import Command, said
from tests.server.in_process import Server


def test_an_operator_is_made_listed_and_revoked(fedpress: Command) -> None:
    token = said(
        fedpress("server", "operator", "create", "registrar", "--note", "Ada", "--days", "1")
    )
    token = token.strip()
    assert token.startswith("fpo_")
    assert said(fedpress("devices", "token", "create", token=token))
    assert isinstance(fedpress("server", "operator", "list", token=token).exception, RoleRequired)
    (row,) = json.loads(said(fedpress("server", "operator", "list", "--json")))
    assert (row["role"], row["note"], row["created_by"]) == ("registrar", "Ada", "settings-token")
    assert token not in said(fedpress("server", "operator", "list"))
    assert "registrar  good" in said(fedpress("server", "operator", "list"))
    assert "revoked at" in said(fedpress("server", "operator", "revoke", row["operator_id"]))
    assert "registrar  revoked" in said(fedpress("server", "operator", "list"))
    assert isinstance(fedpress("devices", "token", "create", token=token).exception, InvalidToken)
    assert isinstance(fedpress("server", "operator", "revoke", "nobody").exception, NotFound)


@pytest.mark.parametrize("days", ["0", "nan", "inf", "99999"])
def test_a_token_lasts_for_a_while(fedpress: Command, days: str) -> None:
    done = fedpress("server", "operator", "create", "viewer", "--days", days)
    assert isinstance(done.exception, ConfigurationError)


def test_a_role_that_there_is_not_is_wrong_use(fedpress: Command) -> None:
    assert fedpress("server", "operator", "create", "root").exit_code == 2


def head(text: str) -> str:
    return text.split()[-1]


def test_the_log_is_listed_exported_and_verified(fedpress: Command, tmp_path: Path) -> None:
    for _ in range(3):
        said(fedpress("devices", "token", "create"))
    lines = said(fedpress("server", "audit", "list", "--limit", "2")).splitlines()
    assert [line.split()[0] for line in lines] == ["seq", "3", "4", "the"]
    page = json.loads(said(fedpress("server", "audit", "list", "--json", "--after", "0")))
    assert [each["seq"] for each in page["entries"]] == [1, 2, 3, 4]
    file, data = tmp_path / "audit.jsonl", str(tmp_path / "data")
    first = head(said(fedpress("server", "audit", "export", str(file))))
    assert first == head(said(fedpress("server", "audit", "verify", "--data-dir", data)))
    assert first == head(lines[-1])
    said(fedpress("devices", "token", "create"))
    assert "1 entries more, 5 in all" in said(fedpress("server", "audit", "export", str(file)))
    assert "0 entries more" in said(fedpress("server", "audit", "export", str(file)))
    assert len(file.read_text().splitlines()) == 5
    told = json.loads(
        said(fedpress("server", "audit", "verify", str(file), "--head", first, "--json"))
    )
    assert told["is_whole"]
    assert told["head"].startswith("5:")


def test_what_was_changed_is_told_with_exit_code_1(
    fedpress: Command, server: Server, tmp_path: Path
) -> None:
    Operator(server).token()
    data, file = str(tmp_path / "data"), tmp_path / "audit.jsonl"
    last = head(said(fedpress("server", "audit", "export", str(file))))

    def broken(*arguments: str) -> str:
        done = fedpress("server", "audit", *arguments)
        assert done.exit_code == 1
        assert isinstance(done.exception, BrokenChain)
        return str(done.exception)

    whole = file.read_text()
    file.write_text(whole.replace("token.created", "token.revoked"))
    assert "entry 2 has hash" in broken("verify", str(file))
    file.write_text(whole.splitlines(keepends=True)[0])
    said(fedpress("server", "audit", "verify", str(file)))
    assert "entry 2 is missing" in broken("verify", str(file), "--head", last)
    file.write_text(whole[:-1])
    assert "line 2 has no end" in broken("verify", str(file))
    file.write_text("x" * 100_000)
    assert "line 1" in broken("verify", str(file))
    file.write_bytes(b"\xff\n")
    assert "line 1" in broken("verify", str(file))
    file.write_text(whole)
    with closing(sqlite3.connect(tmp_path / "data" / "fedpress.db")) as connection:
        connection.execute("DELETE FROM audit_log WHERE seq=2")
        connection.commit()
    said(fedpress("server", "audit", "verify", "--data-dir", data))
    assert "entry 2 is missing" in broken("verify", "--data-dir", data, "--head", last)
    assert "the log ends at 1:" in broken("export", str(file))


def test_what_cannot_be_looked_at_is_wrong_use(fedpress: Command, tmp_path: Path) -> None:
    for arguments in (
        ["verify", "--data-dir", str(tmp_path / "nowhere")],
        ["verify", "--head", "5"],
        ["verify", "--config", str(tmp_path / "none.toml")],
    ):
        done = fedpress("server", "audit", *arguments)
        assert isinstance(done.exception, ConfigurationError), (arguments, done.exception)
    assert isinstance(
        fedpress("server", "audit", "verify", str(tmp_path / "none")).exception, OSError
    )
    assert not (tmp_path / "nowhere").exists()
