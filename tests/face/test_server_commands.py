"""`fedpress server list` against a server in this process."""

from __future__ import annotations

import json

from tests.devices import ADMIN
from tests.face.commands import Command, said
from tests.server.in_process import Server


def test_servers_are_listed_for_those_who_may_see_them(fedpress: Command, server: Server) -> None:
    (row,) = json.loads(said(fedpress("server", "list", "--json")))
    assert (row["role"], row["is_stale"], row["leases"]) == ("all", False, 0)
    assert row["version"] == server.app.version
    shown = said(fedpress("server", "list"))
    assert row["host"] in shown
    assert "running" in shown
    assert server.get("/v1/admin/servers").status_code == 401
    assert server.get("/v1/admin/servers", headers=ADMIN).json()["servers"][0]["role"] == "all"
