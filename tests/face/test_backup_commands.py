"""`fedpress server backup`, `verify`, `restore` and `restores`, beside a server in this process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from click.testing import CliRunner, Result

from fedpress.cli import app
from fedpress_protocols.errors import ConfigurationError
from fedpress_protocols.messages import CheckInRequest, IncludedUpload
from fedpress_protocols.model import Model
from fedpress_server import Settings, create_app
from tests.devices import ADMIN_TOKEN, Device, Operator
from tests.server.in_process import Clock, Server, include_one, running

Command = Callable[..., Result]


@pytest.fixture
def fedpress(monkeypatch: pytest.MonkeyPatch) -> Command:
    whole = httpx.Client

    def run(*arguments: str, server: Server | None = None) -> Result:
        def client(**given: Any) -> httpx.Client:
            assert server is not None
            return whole(**given | {"transport": server._transport})

        monkeypatch.setattr("fedpress.operator.httpx.Client", client)
        environment = {"FEDPRESS_ADMIN_TOKEN": ADMIN_TOKEN, "FEDPRESS_URL": "http://fedpress.test"}
        return CliRunner().invoke(app, list(arguments), env=environment)

    return run


def said(done: Result) -> str:
    assert done.exit_code == 0, (done.output, done.exception)
    return done.output


def test_a_server_is_backed_up_verified_restored_and_asked(
    fedpress: Command, server: Server, clock: Clock, tmp_path: Path
) -> None:
    operator, device = Operator(server), Device(server, clock)
    device.enrol(operator.token())
    model = Model.from_tensors({"w": np.zeros((3, 4), np.float32)})
    operator.begin(model, rounds=9, cohort={"size": 1, "minimum": 1})
    device.check_in("digits", include_one(device, model), wait=30)
    place, data = str(tmp_path / "backup.tar"), str(tmp_path / "data")
    told = said(fedpress("server", "backup", place, "--data-dir", data))
    assert "files" in told
    assert "the keys are not in it" in told
    told = said(fedpress("server", "verify-backup", place))
    assert "whole" in told
    assert "1 receipts" in told
    assert "1 open rounds replayed" in told
    key = told.partition("signed by key ")[2].partition(",")[0]
    said(fedpress("server", "verify-backup", place, "--key-id", key))
    refused = fedpress("server", "verify-backup", place, "--key-id", "another")
    assert refused.exit_code == 1
    assert "expected another" in refused.output
    assert "never restored" in said(fedpress("server", "restores", server=server))
    new = tmp_path / "new"
    refused = fedpress("server", "restore", place, "--data-dir", str(new), "--key-id", "another")
    assert isinstance(refused.exception, ConfigurationError)
    assert refused.exception.detail.endswith(f"the server with key {key}, expected another")
    assert "--key-id" in refused.exception.hint
    assert not new.exists()
    told = said(fedpress("server", "restore", place, "--data-dir", str(new), "--key-id", key))
    assert "restore 1" in told
    assert "task digits: round 2.1 was open" in told
    assert str(new / "server-key.pem") in told
    again = fedpress("server", "restore", place, "--data-dir", str(new))
    assert isinstance(again.exception, ConfigurationError)
    for name in ("server", "authority"):
        (new / f"{name}-key.pem").write_bytes((tmp_path / "data" / f"{name}-key.pem").read_bytes())
    settings = Settings(data_dir=new, admin_token=ADMIN_TOKEN, tick_seconds=3600)
    with running(create_app(settings, clock=clock)) as restored:
        assert "no device has reported" in said(fedpress("server", "restores", server=restored))
        device.http = restored
        fate = IncludedUpload(assignment="gone", round=2, attempt=1, model="ab" * 32)
        asked = CheckInRequest(fates=(fate,)).model_dump_json()
        device.json("POST", "/v1/tasks/digits/check-in", asked)
        told = said(fedpress("server", "restores", server=restored))
        assert "task digits round 2.1 model abababababab: 1 devices" in told


def test_what_cannot_be_done_is_said_in_a_sentence(fedpress: Command, tmp_path: Path) -> None:
    for arguments, expected in (
        (("backup", str(tmp_path / "b"), "--data-dir", str(tmp_path / "no")), "no server database"),
        (("verify", str(tmp_path / "no")), "there is no backup"),
        (("restore", str(tmp_path / "no"), "--data-dir", str(tmp_path / "x")), "there is no"),
    ):
        done = fedpress(*arguments)
        assert isinstance(done.exception, ConfigurationError)
        assert expected in done.exception.detail
    assert not list(tmp_path.iterdir())
