"""What an operator asks of one server is asked of all servers of its database."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from fedpress.operator import Operator
from tests import devices
from tests.system.forked_server import ForkedServer
from tests.system.server_process import ADMIN_TOKEN


@pytest.mark.slow
def test_an_operator_who_asks_one_server_reaches_all(
    place: Mapping[str, str], tmp_path: Path
) -> None:
    with ExitStack() as stack:
        servers = {}
        for name, role in (("api1", "api"), ("api2", "api"), ("worker", "worker")):
            server = ForkedServer(tmp_path / name, {**place, "role": role}, batch=2)
            stack.callback(server.kill)
            server.start()
            server.wait()
            servers[name] = server
        clients = [
            stack.enter_context(httpx.Client(base_url=servers[name].url, timeout=30))
            for name in ("api1", "api2")
        ]
        first, second = (
            stack.enter_context(Operator(servers[name].url, ADMIN_TOKEN))
            for name in ("api1", "api2")
        )
        before = first.log_level()
        assert [each.level for each in before.servers] == ["info"] * 3
        assert [each.server.split()[0] for each in before.servers] == ["api", "api", "worker"]
        after = second.set_log_level("debug")
        assert [each.level for each in after.servers] == ["debug"] * 3
        assert first.log_level().servers == after.servers
        for server in servers.values():
            assert "the log level is debug now" in server.log.read_text()

        tester = devices.Operator(clients[0], ADMIN_TOKEN)
        for client in clients:
            device = devices.Device(client)
            device.enrol(tester.token())
            assert device.request("GET", "/v1/tasks", skew=30).status_code == 200
        give_up = time.monotonic() + 30
        while first.fleet().clocks_ahead_seconds.num < 2:
            assert time.monotonic() < give_up, first.fleet()
            time.sleep(0.2)
        fleet = first.fleet()
        assert [each.server.split()[0] for each in fleet.servers] == ["api", "api"]
        assert fleet.since == min(each.since for each in fleet.servers)

        assert servers["api2"].stop() == 0
        assert [each.server.split()[0] for each in first.log_level().servers] == ["api", "worker"]
        assert len(first.fleet().servers) == 1
