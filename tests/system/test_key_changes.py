"""A server killed between the change of a device's key and the answer."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from fedpress.operator import Operator
from fedpress_client.device_key import change_key, is_changing
from fedpress_client.state import Identity, StateDirectory
from fedpress_client.transport import HttpTransport, Retries
from fedpress_protocols.errors import TransportError, UnknownDevice
from fedpress_protocols.messages import EnrolRequest
from fedpress_protocols.signatures import to_base64url
from tests.devices import Device
from tests.system.forked_server import ForkedServer
from tests.system.server_process import ADMIN_TOKEN


def test_a_server_killed_before_it_answers_knows_the_new_key(tmp_path: Path) -> None:
    server = ForkedServer(tmp_path / "server", {}, batch=64)
    directory = StateDirectory.open(tmp_path / "device")
    old = directory.key()
    transport = HttpTransport(server.url, old, retries=Retries(base=0.05, cap=0.1, patience=0.2))
    try:
        server.start()
        server.wait()
        with Operator(server.url, ADMIN_TOKEN) as operator:
            token = operator.create_token()
        request = EnrolRequest(public_key=to_base64url(old.public))
        enrolled = transport.enrol(token, request)
        directory.enrolled(
            Identity(url=server.url, client_id=enrolled.client_id, server_key=enrolled.server_key)
        )
        server.stop()
        server.start("device-changed:kill")
        server.wait()
        with pytest.raises(TransportError):
            change_key(directory, transport)
        assert server.process is not None
        server.process.join(30)
        assert server.was_killed
        assert is_changing(directory)
        assert directory.key().key_id == old.key_id
        server.start()
        server.wait()
        new = change_key(directory, transport)
        assert directory.key().key_id == new.key_id != old.key_id
        transport.tasks()
        with httpx.Client(base_url=server.url) as http, pytest.raises(UnknownDevice):
            Device(http, key=old).json("GET", "/v1/tasks")
        with Operator(server.url, ADMIN_TOKEN) as operator:
            (client,) = operator.clients()
            assert (client.client_id, client.key_id) == (enrolled.client_id, new.key_id)
            assert len(operator.client(client.client_id).former_keys) == 1
    finally:
        transport.close()
        server.kill()
