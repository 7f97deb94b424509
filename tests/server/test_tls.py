"""Who is answered over TLS, by which certificate, and what both ends are told otherwise."""

import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fedpress_client import tls as device_tls
from fedpress_client.transport import HttpTransport, Retries
from fedpress_protocols.errors import ConfigurationError, TransportError
from fedpress_protocols.signatures import DeviceKey
from fedpress_server.settings import Settings
from fedpress_server.tls import Certificates
from tests.certificates import Pair, TestAuthority

HOST = "127.0.0.1"
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Type: application/json\r\n\r\n[]"


@pytest.fixture
def authority(tmp_path: Path) -> TestAuthority:
    return TestAuthority(tmp_path / "authority")


@pytest.fixture
def devices(tmp_path: Path) -> TestAuthority:
    return TestAuthority(tmp_path / "devices", "devices")


@contextmanager
def answering(context: ssl.SSLContext, newest: ssl.TLSVersion | None = None) -> Iterator[str]:
    """A server that answers every connection once, at the URL."""
    if newest is not None:
        context.maximum_version = newest
    listener = socket.create_server((HOST, 0))

    def answer() -> None:
        while True:
            try:
                raw, _ = listener.accept()
            except OSError:
                return
            try:
                with context.wrap_socket(raw, server_side=True) as connection:
                    connection.recv(65536)
                    connection.sendall(ANSWER)
            except OSError:
                raw.close()

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    try:
        yield f"https://{HOST}:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(10)


def asked(url: str, authority: TestAuthority, pair: Pair | None = None) -> object:
    """What a device is told, that tries no second time."""
    transport = HttpTransport(
        url,
        DeviceKey.generate(),
        verify=str(authority.file),
        client_certificate=pair.certificate if pair else None,
        client_key=pair.key if pair else None,
        retries=Retries(patience=0.0),
        random=lambda: 1.0,
        sleep=lambda seconds: None,
    )
    try:
        return transport.tasks()
    finally:
        transport.close()


def told(url: str, authority: TestAuthority, pair: Pair | None = None) -> str:
    with pytest.raises(TransportError) as caught:
        asked(url, authority, pair)
    return str(caught.value)


@pytest.mark.parametrize("newest", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_only_a_device_with_a_certificate_of_the_authority_is_answered(
    authority: TestAuthority, devices: TestAuthority, tmp_path: Path, newest: ssl.TLSVersion
) -> None:
    shown = Certificates(*authority.issue(HOST), devices.file)
    with answering(shown.context, newest) as url:
        assert asked(url, authority, devices.issue("one", of_a_client=True)) == ()
        assert "has given none" in told(url, authority)
        stranger = TestAuthority(tmp_path / "strangers", "strangers").issue("one", of_a_client=True)
        assert "does not know the authority" in told(url, authority, stranger)
        expired = devices.issue("late", days=-1, of_a_client=True)
        assert "device's certificate has expired" in told(url, authority, expired)
        assert "clientAuth" in told(url, authority, devices.issue("server-like"))


def test_a_server_that_is_another_is_not_believed(authority: TestAuthority, tmp_path: Path) -> None:
    with answering(Certificates(*authority.issue("elsewhere.example")).context) as url:
        assert "for another address" in told(url, authority)
        assert "for another name" in told(url.replace(HOST, "localhost"), authority)
    with answering(Certificates(*authority.issue(HOST)).context) as url:
        assert "does not know" in told(url, TestAuthority(tmp_path / "others", "others"))
    with answering(Certificates(*authority.issue(HOST, days=-1)).context) as url:
        assert "certificate of the server has expired" in told(url, authority)


def test_nothing_older_than_tls_1_2_is_spoken(authority: TestAuthority) -> None:
    context = Certificates(*authority.issue(HOST)).context
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    assert device_tls.context_of(str(authority.file), None, None).minimum_version >= (
        ssl.TLSVersion.TLSv1_2
    )


def test_files_that_are_replaced_are_taken_up_without_a_restart(
    authority: TestAuthority, devices: TestAuthority, tmp_path: Path
) -> None:
    shown = authority.issue(HOST, days=-1)
    accepted = tmp_path / "accepted.crt"
    accepted.write_bytes(devices.file.read_bytes())
    certificates = Certificates(*shown, accepted)
    one = devices.issue("one", of_a_client=True)
    others = TestAuthority(tmp_path / "others", "others")
    with answering(certificates.context) as url:
        assert "expired" in told(url, authority, one)
        assert not certificates.renew()
        authority.issue(HOST)
        assert certificates.renew()
        assert asked(url, authority, one) == ()
        # A list that names the certificate, and then another authority in the place of this one.
        accepted.write_bytes(devices.file.read_bytes() + devices.revocations(one))
        assert certificates.renew()
        assert "was revoked" in told(url, authority, one)
        assert asked(url, authority, devices.issue("two", of_a_client=True)) == ()
        accepted.write_bytes(others.file.read_bytes())
        assert certificates.renew()
        assert "does not know the authority" in told(url, authority, one)
        assert asked(url, authority, others.issue("three", of_a_client=True)) == ()


def test_a_pair_that_does_not_fit_is_refused_and_never_replaces_one_that_does(
    authority: TestAuthority, caplog: pytest.LogCaptureFixture
) -> None:
    shown = authority.issue(HOST)
    certificates = Certificates(*shown)
    with answering(certificates.context) as url:
        shown.key.write_bytes(authority.issue("other").key.read_bytes())
        assert not certificates.renew()
        assert f"{shown.key} is not the key of {shown.certificate}" in caplog.text
        assert asked(url, authority) == ()


def test_a_key_that_was_made_private_is_looked_at_again(authority: TestAuthority) -> None:
    """As a key is that came readable by all, and was refused until somebody mended that."""
    shown = authority.issue(HOST)
    shown.key.chmod(0o644)
    certificates = Certificates(*shown)
    assert not certificates.renew()
    shown.key.chmod(0o600)
    assert certificates.renew()


def broken(text: str) -> Callable[[Pair], None]:
    def harm(pair: Pair) -> None:
        pair.certificate.write_text(text)

    return harm


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (lambda pair: pair.key.unlink(), "No such file"),
        (broken("nothing"), "are not a"),
        (lambda pair: pair.key.write_bytes(pair.certificate.read_bytes()), "are not a"),
    ],
)
def test_files_that_are_none_are_refused_in_a_sentence(
    authority: TestAuthority, harm: Callable[[Pair], None], says: str
) -> None:
    pair = authority.issue("one")
    harm(pair)
    with pytest.raises(ConfigurationError, match=says):
        Certificates(*pair)
    with pytest.raises(ConfigurationError, match=says):
        device_tls.context_of(str(authority.file), *pair)


def test_an_encrypted_key_or_half_a_pair_is_refused(
    authority: TestAuthority, tmp_path: Path
) -> None:
    pair = authority.issue("one", passphrase=b"secret")
    with pytest.raises(ConfigurationError, match="encrypted"):
        Certificates(*pair)
    with pytest.raises(ConfigurationError, match="encrypted"):
        device_tls.context_of(None, *pair)
    with pytest.raises(ConfigurationError, match="without its certificate"):
        device_tls.context_of(None, None, pair.key)
    no_list = tmp_path / "none.pem"
    no_list.write_text("nothing")
    with pytest.raises(ConfigurationError, match="tls_client_ca"):
        Certificates(*authority.issue("two"), no_list)
    with pytest.raises(ConfigurationError, match="tls_client_ca needs"):
        Settings.load(tls_client_ca=authority.file)
