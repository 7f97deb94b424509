"""Uploads and downloads under a limit of bytes a second."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from fedpress import Bandwidth
from fedpress_client import HttpTransport
from fedpress_client.http_link import HttpLink, LinkSettings
from fedpress_client.http_parts import HttpParts
from fedpress_client.parts import FIRST_PART, LEAST_PART, PARTS_ABOVE
from fedpress_client.settings import Stopped
from fedpress_compression.compressors.none import Uncompressed
from fedpress_protocols.errors import ConfigurationError
from fedpress_protocols.messages import UploadAck
from fedpress_protocols.model import Model
from fedpress_protocols.signatures import DeviceKey
from tests.client.fake_server import FakeServer, RandomTrainer, make_client
from tests.client.test_transport import KEY, Server, ack, raw

BODY = np.random.default_rng(0).bytes(30_000)
ACK = UploadAck(assignment="a", upload=hashlib.sha256(BODY).hexdigest(), received_at=1.0)


class Clock:
    """Time that passes in pauses alone."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


def limited(**rates: float) -> tuple[Bandwidth, Clock]:
    clock = Clock()
    return Bandwidth(**rates, clock=clock), clock


@pytest.mark.parametrize("rate", [1024, 5_000, 50_000])
def test_a_body_takes_its_time_and_comes_whole(rate: float) -> None:
    bandwidth, clock = limited(upload=rate)
    pieces = list(bandwidth.pieces(BODY, clock.sleep))
    assert b"".join(pieces) == BODY
    assert len(BODY) / rate - 0.1 - 1e-9 <= clock.now - 100 <= len(BODY) / rate
    assert max(map(len, pieces)) <= rate / 10
    again = clock.now
    list(bandwidth.pieces(BODY, clock.sleep))  # nothing was saved up meanwhile
    assert clock.now - again == pytest.approx(len(BODY) / rate)


def test_idle_time_is_not_saved_up() -> None:
    bandwidth, clock = limited(upload=5_000)
    list(bandwidth.pieces(BODY, clock.sleep))
    clock.now += 3600
    again = clock.now
    list(bandwidth.pieces(BODY, clock.sleep))
    assert clock.now - again == pytest.approx(len(BODY) / 5_000 - 0.1)


def test_a_slow_clock_of_pauses_does_not_lower_the_rate() -> None:
    bandwidth, clock = limited(upload=5_000)

    def oversleeps(seconds: float) -> None:
        clock.sleep(seconds + 0.03)

    list(bandwidth.pieces(BODY, oversleeps))
    assert clock.now - 100 <= len(BODY) / 5_000 + 0.03


def test_directions_have_limits_of_their_own() -> None:
    bandwidth, clock = limited(download=2_000)
    assert (bandwidth.upload, bandwidth.download) == (None, 2_000)
    assert b"".join(bandwidth.pieces(BODY, clock.sleep)) == BODY
    assert clock.now == 100
    bandwidth.received(4_000, clock.sleep)
    assert clock.now == pytest.approx(101.9)


def transport_of(server: Server, bandwidth: Bandwidth, clock: Clock) -> HttpTransport:
    return HttpTransport(
        "http://server:8000/",
        KEY,
        bandwidth=bandwidth,
        sleep=clock.sleep,
        http=httpx.MockTransport(server),
    )


def test_requests_and_answers_are_counted_and_signed_as_ever() -> None:
    bandwidth, clock = limited(upload=2_000, download=2_000)
    digest = hashlib.sha256(BODY).hexdigest()
    done = httpx.Response(201, content=ACK.model_dump_json())
    server = Server(done, raw(BODY[:16_000], BODY[16_000:]))
    transport = transport_of(server, bandwidth, clock)
    assert transport.upload("a", BODY) == ACK
    assert 14.89 <= clock.now - 100 < 15.5
    (request,) = server.requests
    assert request.headers["content-length"] == str(len(BODY))
    assert "transfer-encoding" not in request.headers
    before = clock.now
    assert transport.model(digest, 10**6, "task") == BODY
    assert 14.8 <= clock.now - before < 15.2
    assert transport.traffic.body_up == len(BODY)


def test_clients_that_share_a_limit_share_the_link() -> None:
    bandwidth, clock = limited(upload=2_000)
    for _ in range(2):
        done = httpx.Response(201, content=ACK.model_dump_json())
        transport_of(Server(done), bandwidth, clock).upload("a", BODY)
    assert 29.9 - 0.01 <= clock.now - 100 <= 30.0


def test_a_repeated_upload_is_sent_whole_again() -> None:
    bandwidth, clock = limited(upload=2_000)
    done = httpx.Response(201, content=ACK.model_dump_json())
    server = Server(httpx.ReadError("cut"), done)
    assert transport_of(server, bandwidth, clock).upload("a", BODY) == ACK
    assert [len(request.content) for request in server.requests] == 2 * [len(BODY)]


def test_a_stop_ends_a_slow_upload() -> None:
    bandwidth, _ = limited(upload=2_000)

    def stopped(seconds: float) -> None:
        raise Stopped

    transport = HttpTransport(
        "http://server:8000/",
        KEY,
        bandwidth=bandwidth,
        sleep=stopped,
        http=httpx.MockTransport(Server(ack())),
    )
    with pytest.raises(Stopped):
        transport.upload("a", BODY)


def test_a_slow_device_sends_by_parts_early() -> None:
    server = Server()
    assert server.transport().parts_above == PARTS_ABOVE
    assert server.transport(bandwidth=Bandwidth(download=5_000)).parts_above == PARTS_ABOVE
    assert server.transport(bandwidth=Bandwidth(upload=5_000)).parts_above == 150_000
    assert server.transport(bandwidth=Bandwidth(upload=1024)).parts_above == LEAST_PART
    assert server.transport(bandwidth=Bandwidth(upload=1e9)).parts_above == PARTS_ABOVE
    assert server.transport(bandwidth=Bandwidth(upload=5_000), parts_above=9).parts_above == 9

    def first_part(bandwidth: Bandwidth | None) -> int:
        with closing(HttpLink("http://s", KEY, LinkSettings(bandwidth=bandwidth))) as link:
            return HttpParts(link, 4.0)._sizes.num_bytes

    assert first_part(None) == first_part(Bandwidth(upload=1e9)) == FIRST_PART
    assert first_part(Bandwidth(upload=50_000)) == 200_000


@pytest.mark.parametrize("rate", [0, -1, 1023, float("nan"), float("inf")])
@pytest.mark.parametrize("direction", ["upload", "download"])
def test_rates_that_servers_would_cut_are_refused(direction: str, rate: float) -> None:
    limits: dict[str, Any] = {direction: rate}
    with pytest.raises(ConfigurationError, match=f"{direction} must be 1024 bytes a second"):
        Bandwidth(**limits)


def test_a_transport_of_ones_own_is_not_limited(tmp_path: Path) -> None:
    model = Model.from_tensors({"w": np.zeros(4, np.float32)})
    server = FakeServer(model, lambda r, a: [Uncompressed()])
    with pytest.raises(ConfigurationError, match="a transport of its own"):
        make_client(server, RandomTrainer(4), tmp_path, bandwidth=Bandwidth(upload=5_000))


@pytest.fixture
def bodies() -> Iterator[tuple[str, list[Any]]]:
    """A server over sockets, and the length and bytes of each body that reached it."""
    received: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_PUT(self) -> None:
            length = int(self.headers["Content-Length"])
            received.append((self.headers["Transfer-Encoding"], self.rfile.read(length)))
            answer = ACK.model_dump_json().encode()
            self.send_response(201)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", received
    server.shutdown()
    server.server_close()
    thread.join()


def test_over_sockets_a_body_has_its_length_and_all_its_bytes(
    bodies: tuple[str, list[Any]],
) -> None:
    url, received = bodies
    bandwidth = Bandwidth(upload=1e6, download=1e6)
    with closing(HttpTransport(url, DeviceKey.generate(), bandwidth=bandwidth)) as transport:
        for _ in range(2):  # the second over the same connection
            assert transport.upload("a", BODY) == ACK
    assert received == 2 * [(None, BODY)]
