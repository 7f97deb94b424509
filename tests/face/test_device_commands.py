"""`fedpress devices` and `fedpress client` against a server in this process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedpress_client.state import Identity, StateDirectory
from fedpress_protocols.errors import (
    ConfigurationError,
    Conflict,
    InvalidToken,
    MalformedRequest,
    NotFound,
)
from fedpress_protocols.signatures import to_base64url
from tests.devices import Device, Operator
from tests.face.commands import Command, said
from tests.server.in_process import Clock, Server


def test_tokens_are_made_listed_and_revoked(
    fedpress: Command, server: Server, clock: Clock
) -> None:
    made = fedpress(
        "devices", "token", "create", "--uses", "3", "--note", "batch 7", "--approve-each"
    )
    token = said(made).strip()
    assert "each to be approved" in made.stderr
    Device(server, clock).enrol(token)
    (row,) = json.loads(said(fedpress("devices", "token", "list", "--json")))
    assert (row["used"], row["uses"], row["state"], row["note"]) == (1, 3, "good", "batch 7")
    shown = said(fedpress("devices", "token", "list"))
    assert token not in shown
    assert "1/3" in shown
    assert "each approved; batch 7" in shown
    assert "revoked since" in said(fedpress("devices", "token", "revoke", row["token_id"]))
    with pytest.raises(InvalidToken, match="revoked"):
        Device(server, clock).enrol(token)
    assert isinstance(fedpress("devices", "token", "revoke", token).exception, NotFound)
    whole = json.loads(said(fedpress("devices", "token", "create", "--json")))
    assert whole["token"].startswith("fpe_")


def test_devices_are_listed_shown_and_decided_on(
    fedpress: Command, server: Server, clock: Clock
) -> None:
    token = said(fedpress("devices", "token", "create", "--uses", "3", "--approve-each")).strip()
    devices = [Device(server, clock) for _ in range(3)]
    for device in devices:
        device.enrol(token, "kitchen")
    rows = json.loads(said(fedpress("devices", "list", "--state", "waiting", "--json")))
    assert [row["client_id"] for row in rows] == sorted(each.client_id for each in devices)
    good, bad, lost = devices
    refused = fedpress("devices", "approve", good.client_id, "--key", bad.key.key_id)
    assert isinstance(refused.exception, Conflict)
    approve = ("devices", "approve", good.client_id, "--key", good.key.key_id)
    assert "approved" in said(fedpress(*approve))
    assert "rejected" in said(fedpress("devices", "reject", bad.client_id))
    assert "revoked" in said(fedpress("devices", "revoke", lost.client_id))
    good.json("GET", "/v1/tasks")
    listed = said(fedpress("devices", "list"))
    assert [listed.count(word) for word in ("approved", "rejected", "revoked")] == [1, 1, 1]
    assert good.key.key_id in listed
    shown = said(fedpress("devices", "show", good.client_id))
    assert "kitchen" in shown
    assert "decided" in shown
    for word in ("show", "approve", "reject", "revoke"):
        assert isinstance(fedpress("devices", word, "no/body").exception, NotFound)
    assert fedpress("devices", "list", "--state", "wild").exit_code == 2


def test_a_name_cannot_rewrite_a_line(fedpress: Command, server: Server, clock: Clock) -> None:
    token = said(fedpress("devices", "token", "create", "--uses", "9")).strip()
    for name in (r"\u001b[1Gother", r"two\r\nlines", r"\u009b1G"):  # as JSON has them
        with pytest.raises(MalformedRequest, match="name"):
            Device(server, clock).enrol(token, name)
    Device(server, clock).enrol(token, "K\u00fcche \u202eneppo")
    assert "K\u00fcche \\u202eneppo" in said(fedpress("devices", "list"))


@pytest.fixture
def device(server: Server, clock: Clock, tmp_path: Path) -> Device:
    """Enrolled, its folder `device` in the test's own."""
    directory = StateDirectory.open(tmp_path / "device")
    device = Device(server, clock, directory.key())
    answer = device.enrol(Operator(server).token())
    directory.enrolled(
        Identity(url=str(server.base_url), client_id=answer.client_id, server_key=answer.server_key)
    )
    return device


def test_a_device_shows_itself_and_changes_its_key(
    fedpress: Command, device: Device, server: Server, tmp_path: Path
) -> None:
    folder = str(tmp_path / "device")
    shown = json.loads(said(fedpress("client", "identity", "--state-dir", folder, "--json")))
    assert shown["key_id"] == device.key.key_id
    assert shown["public_key"] == to_base64url(device.key.public)
    assert device.key.key_id in said(fedpress("client", "identity", "--state-dir", folder))
    line = said(fedpress("client", "rotate-key", "--state-dir", folder))
    assert f"in place of {device.key.key_id}" in line
    more = json.loads(said(fedpress("client", "rotate-key", "--state-dir", folder, "--json")))
    found = Operator(server).get(f"/v1/admin/clients/{device.client_id}")
    assert found["key_id"] == more["key_id"]
    assert [each["key_id"] for each in found["former_keys"]] == [
        device.key.key_id,
        more["former_key_id"],
    ]
    assert "2 times" in said(fedpress("client", "identity", "--state-dir", folder))
    assert more["former_key_id"] in said(fedpress("devices", "show", device.client_id))


def test_a_folder_without_a_device_is_left_alone(fedpress: Command, tmp_path: Path) -> None:
    for word in ("identity", "rotate-key"):
        done = fedpress("client", word, "--state-dir", str(tmp_path / "none"))
        assert isinstance(done.exception, ConfigurationError)
    assert not (tmp_path / "none").exists()
    StateDirectory.open(tmp_path / "new").key()
    done = fedpress("client", "rotate-key", "--state-dir", str(tmp_path / "new"))
    assert isinstance(done.exception, ConfigurationError)
    assert "not enrolled" in said(
        fedpress("client", "identity", "--state-dir", str(tmp_path / "new"))
    )
