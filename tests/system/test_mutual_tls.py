"""A server that asks devices for certificates, as a process, and the command that joins."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import httpx
import pytest

from fedpress.operator import Operator
from fedpress_client.transport import HttpTransport, Retries
from fedpress_protocols.errors import TransportError
from fedpress_protocols.messages import EnrolRequest
from fedpress_protocols.signatures import DeviceKey, to_base64url
from tests.certificates import Pair, TestAuthority
from tests.system.server_process import ADMIN_TOKEN, ServerProcess

T = TypeVar("T")
EXAMPLES = Path(__file__).parents[2] / "client_sdk/examples"


@pytest.fixture
def authority(tmp_path: Path) -> TestAuthority:
    return TestAuthority(tmp_path / "authority")


@pytest.fixture
def server(tmp_path: Path, authority: TestAuthority) -> Iterator[ServerProcess]:
    shown = authority.issue("127.0.0.1")
    settings = {
        "FEDPRESS_TLS_CERTIFICATE": str(shown.certificate),
        "FEDPRESS_TLS_KEY": str(shown.key),
        "FEDPRESS_TLS_CLIENT_CA": str(authority.file),
        "FEDPRESS_ADMIN_PORT": "0",
    }
    server = ServerProcess(tmp_path, settings)
    server.start()
    server.url = server.url.replace("http://", "https://")
    yield server
    server.stop()


def test_a_device_needs_a_certificate_and_an_operator_needs_none(
    server: ServerProcess, authority: TestAuthority, tmp_path: Path
) -> None:
    lines = server.log.read_text().splitlines()
    admin = next(line.split()[-1] for line in lines if "operators' listener on" in line)
    assert admin.startswith("https://")
    with Operator(admin, ADMIN_TOKEN, ca=authority.file) as operator:
        token = operator.create_token()
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"{server.url}/livez", verify=False)
    key, pair = DeviceKey.generate(), authority.issue("one", of_a_client=True)
    request = EnrolRequest(public_key=to_base64url(key.public))
    with pytest.raises(TransportError, match="--client-certificate"):
        talk(server, authority, key, None, lambda device: device.enrol(token, request))
    assert talk(server, authority, key, pair, lambda device: device.enrol(token, request)).client_id
    assert talk(server, authority, key, pair, HttpTransport.tasks) == ()
    expired = authority.issue("late", days=-1, of_a_client=True)
    with pytest.raises(TransportError, match=r"late.crt is valid from .* to"):
        talk(server, authority, key, expired, HttpTransport.tasks)


def talk(
    server: ServerProcess,
    authority: TestAuthority,
    key: DeviceKey,
    pair: Pair | None,
    say: Callable[[HttpTransport], T],
) -> T:
    """What a device with these certificates is answered, that tries once."""
    device = HttpTransport(
        server.url,
        key,
        verify=str(authority.file),
        client_certificate=pair.certificate if pair else None,
        client_key=pair.key if pair else None,
        retries=Retries(patience=0.0),
    )
    try:
        return say(device)
    finally:
        device.close()


@pytest.mark.slow
def test_the_command_says_which_certificate_is_missing(
    server: ServerProcess, authority: TestAuthority, tmp_path: Path
) -> None:
    command = [
        sys.executable,
        "-m",
        "fedpress",
        "client",
        "join",
        server.url,
        "--ca",
        str(authority.file),
    ]
    command += ["--app", "numpy_softmax:make_trainer", "--state-dir", str(tmp_path / "state")]
    wrong = authority.issue("one", of_a_client=True)
    other = authority.issue("two", of_a_client=True)
    command += ["--client-certificate", str(wrong.certificate), "--client-key", str(other.key)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, cwd=EXAMPLES
    )
    assert done.returncode == 2
    assert "is not the key of the client certificate" in done.stderr
