"""Every route of the API with every credential that should not open it."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx
import pytest

from fedpress_protocols.model import Model
from fedpress_protocols.signatures import Content, DeviceKey
from tests.devices import Device, Operator
from tests.server.in_process import Clock, Enrolled, Server

OPEN = {"/livez", "/readyz", "/metrics"}
ENROL = "/v1/enrol"
BOTH = {"/v1/tasks", "/v1/tasks/{task}", "/v1/tasks/{task}/rounds", "/v1/models/{digest}"}
"""What devices and operators read, with what is below."""


class Route(NamedTuple):
    method: str
    template: str
    path: str
    body: bytes

    @property
    def headers(self) -> dict[str, str]:
        return {"Content-Type": "application/json"} if self.body else {}

    @property
    def is_admins(self) -> bool:
        return self.template.startswith("/v1/admin/")

    @property
    def is_both(self) -> bool:
        below = ("/v1/tasks/{task}/rounds", "/v1/models/{digest}")
        return self.template in BOTH or self.template.startswith(below)


class Held:
    """A server with a task, a device with an open assignment and the beginning of an upload, and
    another device beside it."""

    def __init__(self, http: Server, operator: Operator, enrolled: Enrolled, model: Model) -> None:
        self.http, self.operator = http, operator
        self.device, self.other = enrolled(), enrolled()
        operator.begin(model, downlink={}, retention={"last": 1}, cohort={"size": 2, "minimum": 2})
        assignment = self.device.assignment("digits")
        self.assignment = assignment.assignment
        intent = json.dumps({"trip": "update", "max_bytes": 48})
        path = f"/v1/assignments/{self.assignment}/partials"
        partial = self.device.json("POST", path, intent).json()["partial"]
        self.known = {
            "task": "digits",
            "digest": assignment.plan.model,
            "base": assignment.plan.model,
            "assignment": self.assignment,
            "partial": partial,
            "client_id": self.device.client_id,
            "number": "1",
            "which": "0",
            "alias": "production",
            "step": "shares",
        }

    def routes(self) -> Iterator[Route]:
        for template, methods in self.http.get("/openapi.json").json()["paths"].items():
            for method, operation in methods.items():
                path = template.format(**self.known)
                needed = [
                    f"{each['name']}=0"
                    for each in operation.get("parameters", ())
                    if each["in"] == "query" and each.get("required")
                ]
                body = b"" if method in ("get", "head", "delete") else b"{}"
                yield Route(method.upper(), template, "?".join([path, *needed]), body)

    def state(self) -> Any:
        """What no refused request may have changed."""
        path = f"/v1/assignments/{self.assignment}/partials/{self.known['partial']}"
        held = self.device.request("HEAD", path)
        return (
            self.operator.get("/v1/tasks/digits"),
            self.operator.get("/v1/tasks/digits/rounds"),
            self.operator.get("/v1/admin/tasks/digits/aliases"),
            self.operator.get("/v1/admin/clients"),
            {n: v for n, v in held.headers.items() if n.startswith("upload-")},
        )


@pytest.fixture
def held(http: Server, operator: Operator, enrolled: Enrolled, model: Model) -> Held:
    return Held(http, operator, enrolled, model)


def unsigned(held: Held, route: Route, headers: dict[str, str]) -> httpx.Response:
    return held.http.request(
        route.method, route.path, content=route.body, headers={**route.headers, **headers}
    )


def signed(device: Device, route: Route) -> httpx.Response:
    return device.request(route.method, route.path, route.body, route.headers)


def test_nobody_and_strangers_are_refused_everywhere(
    held: Held, clock: Clock, enrolled: Enrolled
) -> None:
    revoked = enrolled()
    held.operator.post(f"/v1/admin/clients/{revoked.client_id}/revoke")
    stranger = Device(held.http, clock, DeviceKey.generate())
    before, seen = held.state(), 0
    for route in held.routes():
        if route.template in OPEN or route.template == ENROL:
            continue
        seen += 1
        tampered = held.device.sign(route.method, route.path, Content.of(route.body + b" "))
        moved = held.device.sign(route.method, "/v1/tasks/other", Content.of(route.body))
        late = held.device.sign(route.method, route.path, Content.of(route.body), skew=-4000)
        forged = {**held.device.sign(route.method, route.path, Content.of(route.body))}
        value = forged["Signature"] if "Signature" in forged else forged["signature"]
        name = "Signature" if "Signature" in forged else "signature"
        forged[name] = value[:-12] + ("A" * 9 if "A" * 9 not in value else "B" * 9) + value[-3:]
        refused = {
            "nobody": unsigned(held, route, {}),
            "no such token": unsigned(held, route, {"Authorization": f"Bearer {'x' * 40}"}),
            "an enrolment token": unsigned(
                held, route, {"Authorization": f"Bearer {held.operator.token()}"}
            ),
            "a stranger": signed(stranger, route),
            "revoked": signed(revoked, route),
            "another body": unsigned(held, route, tampered),
            "another path": unsigned(held, route, moved),
            "too old": unsigned(held, route, late),
            "a forged signature": unsigned(held, route, forged),
        }
        if not route.body:
            del refused["another body"]  # none is read
        for who, answer in refused.items():
            expected = {401}
            if who == "a forged signature":
                expected = {400, 401}  # it may be no base64
            if who == "another body":  # refused for its place before the body is read, or after
                expected = {400, 401, 409}
            assert answer.status_code in expected, (who, route, answer.text)
    assert seen > 30
    assert held.state() == before


def test_a_request_is_taken_once(held: Held) -> None:
    for route in held.routes():
        if route.template in OPEN or route.template == ENROL or route.is_admins:
            continue
        if route.method == "DELETE" or "check-in" in route.template:
            continue  # these do something, and the second of them would be refused for that
        headers = held.other.sign(
            route.method, route.path, Content.of(route.body), nonce=secrets.token_bytes(16)
        )
        first, second = (unsigned(held, route, headers) for _ in range(2))
        assert first.status_code != 401, (route, first.text)
        assert second.status_code == 401, (route, second.text)


def test_a_device_stays_out_of_what_is_another_ones_and_of_the_operators(held: Held) -> None:
    before = held.state()
    for route in held.routes():
        if route.is_admins:
            assert signed(held.device, route).status_code == 401, route
        elif "{assignment}" in route.template:
            answer = signed(held.other, route)
            # What is wrong with the request itself may be found first.
            assert answer.status_code in (400, 403), (route, answer.text)
            assert answer.status_code == 403 or "body" in answer.text, (route, answer.text)
    assert held.state() == before


def test_the_admin_token_is_no_device(held: Held) -> None:
    before = held.state()
    for route in held.routes():
        if route.is_admins or route.is_both or route.template in (*OPEN, ENROL):
            continue
        answer = unsigned(held, route, held.operator.headers)
        assert answer.status_code == 401, (route, answer.text)
    assert held.state() == before
