"""What strangers learn of a server, and what other users of its machine do."""

from __future__ import annotations

import asyncio
import base64
import re
import stat
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.types import Message

from fedpress_protocols.errors import BodyTooLarge, ConfigurationError, MalformedRequest
from fedpress_protocols.messages import (
    MAX_ROTATIONS,
    EnrolRequest,
    KeyRotation,
    SignedRotation,
)
from fedpress_server.api.routing import SignedRoute
from fedpress_server.settings import Settings
from tests.devices import ADMIN, ADMIN_TOKEN, Device, Operator
from tests.server.in_process import Clock, Server, Start

METRICS_TOKEN = "a-token-for-prometheus-alone"


@pytest.mark.parametrize("path", ["/metrics", "/docs", "/openapi.json"])
def test_what_tells_about_the_server_needs_a_role(http: Server, path: str) -> None:
    assert http.get(path).status_code == 401
    viewer = Operator(http).post("/v1/admin/operators", {"role": "viewer"})["token"]
    for token in (ADMIN_TOKEN, viewer):
        assert http.get(path, headers={"Authorization": f"Bearer {token}"}).status_code == 200


@pytest.mark.parametrize("path", ["/redoc", "/docs/oauth2-redirect"])
def test_no_other_page_is_there(http: Server, path: str) -> None:
    assert http.get(path, headers=ADMIN).status_code == 404


def test_the_metrics_token_opens_the_metrics_alone(start: Start) -> None:
    seen = {"Authorization": f"Bearer {METRICS_TOKEN}"}
    with start(metrics_token=METRICS_TOKEN) as http:
        assert http.get("/metrics", headers=seen).status_code == 200
        assert http.get("/metrics", headers=ADMIN).status_code == 200
        for path in ("/docs", "/openapi.json", "/v1/tasks", "/v1/admin/operators"):
            assert http.get(path, headers=seen).status_code == 401
        assert http.get("/metrics").status_code == 401


def test_metrics_may_be_open(start: Start) -> None:
    with start(open_metrics=True) as http:
        assert http.get("/metrics").status_code == 200
        assert http.get("/openapi.json").status_code == 401


def test_a_short_metrics_token_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="metrics_token: the metrics token has 16"):
        Settings.load(metrics_token="short")


def test_a_browser_is_asked_for_the_token_and_loads_nothing_from_elsewhere(http: Server) -> None:
    answer = http.get("/docs")
    assert answer.headers["www-authenticate"].startswith("Basic ")
    assert "Basic" not in http.get("/openapi.json").headers["www-authenticate"]
    password = base64.b64encode(f"anybody:{ADMIN_TOKEN}".encode()).decode()
    page = http.get("/docs", headers={"Authorization": f"Basic {password}"})
    assert page.status_code == 200
    assert "default-src 'none'" in page.headers["content-security-policy"]
    for word in ("<script", "http://", "https://", "src=", "@import", "url("):
        assert word not in page.text.partition("<h2>Schemas")[0], word
    paths = http.get("/openapi.json", headers=ADMIN).json()["paths"]
    for path in paths:
        assert f"<code>{path}</code>" in page.text
    links = set(re.findall(r'href="#([^"]+)"', page.text))
    assert links
    assert links <= set(re.findall(r'id="([^"]+)"', page.text))
    others = http.get("/v1/admin/operators", headers={"Authorization": f"Basic {password}"})
    assert others.status_code == 401


@pytest.mark.parametrize(
    ("host", "is_meant"),
    [
        ("fl.example.org", True),
        ("FL.example.org:8443", True),
        ("a.b.example.net", True),
        ("example.net", False),
        ("evil.example", False),
        ("fl.example.org.evil.example", False),
        ("", False),
    ],
)
def test_a_request_for_another_host_is_refused(start: Start, host: str, is_meant: bool) -> None:
    with start(allowed_hosts="fl.example.org, *.example.net") as http:
        answer = http.get("/v1/tasks", headers={"Host": host, **ADMIN})
        assert answer.status_code == (200 if is_meant else 400), answer.text
        assert http.get("/livez", headers={"Host": host}).status_code == 200


def test_a_refused_host_is_named_beside_those_expected(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with start(allowed_hosts="fl.example.org, *.example.net") as http:
        for host in ("fl.exampel.org:8443", "fl.exampel.org"):
            told = http.get("/v1/tasks", headers={"Host": host, **ADMIN}).json()
            assert f"the Host of the request, '{host}'," in told["detail"]
            assert "FEDPRESS_ALLOWED_HOSTS" in told["hint"]
    expected = "refused the Host 'fl.exampel.org:8443', expected fl.example.org, *.example.net"
    assert expected in caplog.messages


def test_a_key_that_stands_twice_is_refused(start: Start, clock: Clock) -> None:
    with start() as http:
        device, operator = Device(http, clock), Operator(http)
        device.enrol(operator.token())
        with pytest.raises(MalformedRequest, match="twice"):
            device.json("POST", "/v1/tasks/digits/check-in", '{"wait": 0, "wait": 0}')
        headers = {**ADMIN, "Content-Type": "application/json"}
        many = ", ".join(f'"{number}": 0' for number in range(80_000))
        for body in (
            '{"uses": 1, "uses": 5}',
            '{"note": "", "a": [{"b": 1, "b": 1}]}',
            f'{{{many}, "79999": 0}}',  # comparing each with each would take minutes
        ):
            answer = http.post("/v1/admin/tokens", headers=headers, content=body)
            assert answer.status_code == 400
            assert "twice" in answer.json()["detail"]


@pytest.mark.parametrize(("mode", "closed"), [(0o777, 0o750), (0o755, 0o750), (0o750, 0o750)])
def test_the_data_folder_and_its_database_are_closed_to_others(
    start: Start, tmp_path: Path, mode: int, closed: int
) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(mode)
    with start(data_dir=folder):
        pass
    database = folder / "fedpress.db"
    assert stat.S_IMODE(folder.stat().st_mode) == closed
    assert stat.S_IMODE(database.stat().st_mode) == 0o600
    database.chmod(0o644)
    with start(data_dir=folder):
        for file in folder.glob("fedpress.db*"):
            assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_stranger_is_refused_before_its_body_is_read(start: Start) -> None:
    """By the headers alone: the bodies here are no JSON, and too long."""
    signature = {"Signature-Input": "none", "Signature": "none", "Content-Digest": "none"}
    with start() as http:
        for path, headers, status in (
            ("/v1/enrol", {}, 401),
            ("/v1/enrol", {"Authorization": "Bearer x"}, 401),
            ("/v1/key-rotation", signature, 401),
        ):
            answer = http.post(path, headers=headers, content=bytes(SignedRoute.most_bytes + 1))
            assert answer.status_code == status, answer.text


def test_what_anybody_may_send_is_short_and_comes_at_once(
    start: Start, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    with start() as http:
        device, operator = Device(http, clock), Operator(http)
        with pytest.raises(BodyTooLarge, match="131072"):
            device.enrol(operator.token(), "x" * SignedRoute.most_bytes)

    class Quick(SignedRoute):
        most_seconds = 0.01

        async def admit(self, request: Request) -> None:
            return None

    async def endpoint(body: dict[str, Any]) -> None:
        raise AssertionError("a body came")

    async def never() -> Message:
        await asyncio.sleep(3600)
        raise AssertionError

    route = Quick("/", endpoint, methods=["POST"])
    scope = {"type": "http", "method": "POST", "path": "/", "headers": [], "query_string": b""}
    with pytest.raises(MalformedRequest, match=r"took longer than 0\.01 s"):
        asyncio.run(route.get_route_handler()(Request(scope, never)))


def test_the_most_rotations_fit(clock: Clock) -> None:
    rotation = KeyRotation(client_id="x" * 64, old_key="A" * 43, new_key="A" * 43)
    signed = SignedRotation(rotation=rotation, old_signature="A" * 86, new_signature="A" * 86)
    request = EnrolRequest(
        public_key="A" * 43, name="\u00fc" * 128, rotations=(signed,) * MAX_ROTATIONS
    )
    assert len(request.model_dump_json().encode()) < SignedRoute.most_bytes
