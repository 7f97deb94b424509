"""A server in this process, and `fedpress` told to talk to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner, Result

from fedpress.cli import app
from fedpress_server import Settings, create_app
from tests import databases
from tests.devices import ADMIN_TOKEN
from tests.face.commands import Command
from tests.server.in_process import Clock, Server, running


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def server(tmp_path: Path, clock: Clock) -> Iterator[Server]:
    databases.lay(tmp_path / "data" / "fedpress.db")
    settings = Settings(data_dir=tmp_path / "data", admin_token=ADMIN_TOKEN, tick_seconds=3600)
    with running(create_app(settings, clock=clock)) as server:
        yield server


@pytest.fixture
def fedpress(server: Server, monkeypatch: pytest.MonkeyPatch) -> Command:
    whole = httpx.Client

    class Streaming(httpx.BaseTransport):
        def handle_request(self, request: httpx.Request) -> httpx.Response:
            found = server._transport.handle_request(request)
            stream = httpx.ByteStream(found.content)
            return httpx.Response(found.status_code, headers=found.headers, stream=stream)

    def client(**given: Any) -> httpx.Client:
        return whole(**given | {"transport": Streaming()})

    monkeypatch.setattr("fedpress.operator.httpx.Client", client)

    def run(*arguments: str, token: str = ADMIN_TOKEN) -> Result:
        environment = {"FEDPRESS_ADMIN_TOKEN": token, "FEDPRESS_URL": str(server.base_url)}
        return CliRunner().invoke(app, list(arguments), env=environment)

    return run
