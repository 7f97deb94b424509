"""Every route of the API with every kind of credential, in one table."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import httpx
import pytest
from fastapi import APIRouter, FastAPI
from fastapi.routing import iter_route_contexts

from fedpress_protocols.model import Model
from fedpress_protocols.operators import ROLES
from fedpress_protocols.signatures import Content, DeviceKey
from fedpress_server import Settings, create_app
from fedpress_server.api.permissions import PERMISSIONS, permission_of
from fedpress_server.api.routing import AnyoneKnownRoute, OperatorRoute
from fedpress_server.identity.operators import MAY
from fedpress_server.identity.refusals import PER_SECOND
from tests.devices import ADMIN_TOKEN, Device, Operator
from tests.server.in_process import Clock, Server, Start

OPEN = {"/livez", "/readyz"}
BY_THEIR_BODY = {"/v1/enrol", "/v1/key-rotation"}
"""What the body says decides who may: tests of their own have those. Here it says nothing."""
DESCRIPTION = {"/openapi.json", "/docs"}
NO_PAGE = "/console/{path:path}"
"""Says that there is no such page."""
CONSOLE_OPEN = {"/console/login", "/console/static/{name}", NO_PAGE}
"""Pages before the log-in; tests/server/test_console.py has every other page of the console."""


class Route(NamedTuple):
    method: str
    template: str
    path: str
    body: bytes

    @property
    def headers(self) -> dict[str, str]:
        return {"Content-Type": "application/json"} if self.body else {}

    @property
    def is_operators(self) -> bool:
        return (self.method, self.template) in PERMISSIONS

    @property
    def is_devices(self) -> bool:
        is_else = self.template in OPEN or self.template in BY_THEIR_BODY
        return (
            not is_else
            and self.template.startswith("/v1/")
            and (not self.template.startswith("/v1/admin/"))
        )


Send = Callable[[Route], httpx.Response]
Paths = dict[str, dict[str, Any]]
SIGHTING = ("seen_at", "agent", "clock_ahead")


class Held:
    """A server with a task, a device with an open assignment and the beginning of an upload, other
    devices beside it, and an operator of every kind."""

    def __init__(self, http: Server, clock: Clock, model: Model, paths: Paths) -> None:
        self.http, self.clock, self.model, self.paths = http, clock, model, paths
        self.operator = operator = Operator(http)
        self.device, self.other = self.enrolled(), self.enrolled()
        self.revoked, self.victim = self.enrolled(), self.enrolled()
        operator.post(f"/v1/admin/clients/{self.revoked.client_id}/revoke")
        self.waiting = self.enrolled(approve_each=True)
        self.rejected = self.enrolled(approve_each=True)
        operator.post(f"/v1/admin/clients/{self.rejected.client_id}/reject")
        self.operators = {role: self.made(role) for role in ROLES}
        self.gone, self.late = self.made("admin"), self.made("admin", expires_in=1.0)
        revoked = f"/v1/admin/operators/{self.gone[0]}"
        assert http.delete(revoked, headers=operator.headers).status_code == 200
        clock.advance(2)
        operator.begin(
            model,
            downlink={},
            retention={"last": 1},
            cohort={"size": 2, "minimum": 2},
            round_seconds=1e6,
        )
        assignment = self.device.assignment("digits")
        self.assignment = assignment.assignment
        intent = json.dumps({"trip": "update", "max_bytes": 48})
        path = f"/v1/assignments/{self.assignment}/partials"
        partial = self.device.json("POST", path, intent).json()["partial"]
        token = operator.post("/v1/admin/tokens", {"note": "to be revoked"})
        self.known = {
            "task": "digits",
            "digest": assignment.plan.model,
            "base": assignment.plan.model,
            "assignment": self.assignment,
            "partial": partial,
            "client_id": self.victim.client_id,
            "token_id": token["token_id"],
            "operator_id": self.made("viewer")[0],
            "number": "1",
            "which": "0",
            "alias": "production",
            "step": "shares",
        }

    def enrolled(self, **how: Any) -> Device:
        device = Device(self.http, self.clock)
        device.enrol(self.operator.post("/v1/admin/tokens", how)["token"])
        return device

    def made(self, role: str, **how: Any) -> tuple[str, str]:
        """The id and the token of an operator."""
        made = self.operator.post("/v1/admin/operators", {"role": role, **how})
        return made["operator_id"], made["token"]

    def routes(self) -> Iterator[Route]:
        for template, methods in self.paths.items():
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
        """What no refused request may have changed. That a device was seen is noted of every one
        that it signed."""
        path = f"/v1/assignments/{self.assignment}/partials/{self.known['partial']}"
        held = self.device.request("HEAD", path)
        return (
            self.operator.get("/v1/tasks/digits"),
            self.operator.get("/v1/tasks/digits/rounds"),
            self.operator.get("/v1/admin/tasks/digits/aliases"),
            [
                {name: value for name, value in each.items() if name not in SIGHTING}
                for each in self.operator.get("/v1/admin/clients")
            ],
            self.operator.get("/v1/admin/operators"),
            self.operator.get("/v1/admin/tokens"),
            self.operator.get("/v1/admin/audit?limit=1000"),
            {n: v for n, v in held.headers.items() if n.startswith("upload-")},
        )

    # Credentials

    def bare(self, route: Route, headers: dict[str, str], http: Server | None = None) -> Any:
        return (http or self.http).request(
            route.method, route.path, content=route.body, headers={**route.headers, **headers}
        )

    def bearer(self, token: str) -> Send:
        return lambda route: self.bare(route, {"Authorization": f"Bearer {token}"})

    def signed(self, device: Device) -> Send:
        return lambda route: device.request(route.method, route.path, route.body, route.headers)

    def sign(self, route: Route, path: str = "", more: bytes = b"", **how: Any) -> dict[str, str]:
        return self.device.sign(
            route.method, path or route.path, Content.of(route.body + more), **how
        )

    def forged(self, route: Route) -> httpx.Response:
        headers = self.sign(route)
        name = next(each for each in headers if each.lower() == "signature")
        value = headers[name]
        headers[name] = value[:-12] + ("A" * 9 if "A" * 9 not in value else "B" * 9) + value[-3:]
        return self.bare(route, headers)

    def replayed(self, route: Route) -> httpx.Response:
        headers = self.sign(route, nonce=secrets.token_bytes(16))
        self.bare(route, headers)
        return self.bare(route, headers)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Paths:
    """As every server describes them, which each takes long to write."""
    app = create_app(Settings(data_dir=tmp_path_factory.mktemp("data"), admin_token=ADMIN_TOKEN))
    described: Paths = app.openapi()["paths"]
    return described


@pytest.fixture
def held(start: Start, clock: Clock, model: Model, paths: Paths) -> Iterator[Held]:
    with start() as http:
        yield Held(http, clock, model, paths)


STRANGERS: dict[str, tuple[Callable[[Held], Send], set[int]]] = {
    "nobody": (lambda held: lambda route: held.bare(route, {}), {401}),
    "no such token": (lambda held: held.bearer("x" * 40), {401}),
    "no such operator": (lambda held: held.bearer("fpo_" + "x" * 32), {401}),
    "an enrolment token": (lambda held: held.bearer(held.operator.token()), {401}),
    "an expired operator": (lambda held: held.bearer(held.late[1]), {401}),
    "a revoked operator": (lambda held: held.bearer(held.gone[1]), {401}),
    "a stranger's key": (
        lambda held: held.signed(Device(held.http, held.clock, DeviceKey.generate())),
        {401},
    ),
    "a revoked device": (lambda held: held.signed(held.revoked), {401}),
    "too old": (lambda held: lambda route: held.bare(route, held.sign(route, skew=-4000)), {401}),
    "too new": (lambda held: lambda route: held.bare(route, held.sign(route, skew=4000)), {401}),
    "another path": (
        lambda held: lambda route: held.bare(route, held.sign(route, "/v1/tasks/other")),
        {401},
    ),
    # It may be no base64.
    "a forged signature": (lambda held: held.forged, {400, 401}),
}
"""By name: who is refused everywhere, and how. That nobody says who they are is no device's fault,
so on routes for devices a right token is refused as what it is not: a signature."""


def admitted(answer: httpx.Response) -> bool:
    """Whether whoever asked was let in, whatever came of it."""
    return answer.status_code not in (401, 403, 429, 500)


def test_strangers_are_refused_everywhere(held: Held, clock: Clock) -> None:
    seen = 0
    for name, (made, expected) in STRANGERS.items():
        send = made(held)
        before = held.state()
        for route in held.routes():
            if route.template in OPEN or route.template in BY_THEIR_BODY:
                continue
            clock.advance(1 / PER_SECOND)  # wrong tokens at once are told to wait
            answer = send(route)
            assert answer.status_code in expected, (name, route, answer.text)
            seen += 1
        assert held.state() == before, name
    assert seen > 40 * len(STRANGERS)


def test_a_device_is_let_in_where_devices_are_and_nowhere_else(held: Held) -> None:
    before = held.state()
    for route in held.routes():
        if route.template in OPEN or route.template in BY_THEIR_BODY:
            continue
        tampered = held.bare(route, held.sign(route, more=b" "))
        cases = {
            "waiting": (held.signed(held.waiting)(route), {403}),
            "rejected": (held.signed(held.rejected)(route), {403}),
        }
        if route.body:  # else none is read; it is refused for its place before that, or after
            cases["another body"] = (tampered, {400, 401, 409})
        if not route.is_devices:
            others = (held.device, held.waiting, held.rejected, held.other)
            cases = {str(n): (held.signed(d)(route), {401}) for n, d in enumerate(others)}
        elif "{assignment}" in route.template:
            # What is wrong with the request itself may be found first.
            cases["another device"] = (held.signed(held.other)(route), {400, 403})
        for who, (answer, expected) in cases.items():
            assert answer.status_code in expected, (who, route, answer.text)
            if who == "another device":
                assert answer.status_code == 403 or "body" in answer.text, (route, answer.text)
    assert held.state() == before


def test_a_request_of_the_right_device_is_taken_once(held: Held) -> None:
    for route in held.routes():
        if not route.is_devices:
            continue
        if route.method == "DELETE" or "check-in" in route.template:
            continue  # these do something, and the second of them would be refused for that
        nonce = secrets.token_bytes(16)
        headers = held.other.sign(route.method, route.path, Content.of(route.body), nonce=nonce)
        first, second = (held.bare(route, headers) for _ in range(2))
        assert first.status_code != 401, (route, first.text)
        expected = first.status_code if route.method == "GET" else 401
        assert second.status_code == expected, (route, second.text)
    for route in held.routes():
        if route.is_devices and route.method != "DELETE":
            answer = held.signed(held.device)(route)
            assert admitted(answer), (route, answer.text)


def test_an_operator_may_what_the_role_says_and_nothing_else(held: Held) -> None:
    """Last what is allowed, since that is done."""
    tokens = {role: token for role, (_, token) in held.operators.items()}
    before, allowed = held.state(), []
    for route in held.routes():
        if route.template in OPEN or route.template in BY_THEIR_BODY:
            continue
        for role, token in tokens.items():
            if not route.is_operators:
                answer = held.bearer(token)(route)
                assert answer.status_code == 401, (role, route, answer.text)
            elif permission_of([route.method], route.template) not in MAY[role]:
                answer = held.bearer(token)(route)
                assert answer.status_code == 403, (role, route, answer.text)
                problem = answer.json()
                assert problem["type"].endswith(":role-required")
                assert problem["role"] == role
                assert set(problem["roles"]) == {
                    each
                    for each in ROLES
                    if permission_of([route.method], route.template) in MAY[each]
                }
            else:
                allowed.append((role, route))
        if not route.is_operators:
            answer = held.bare(route, held.operator.headers)
            assert answer.status_code == 401, (route, answer.text)
    assert held.state() == before
    for role, route in allowed:
        answer = held.bearer(tokens[role])(route)
        assert admitted(answer), (role, route, answer.text)
        answer = held.bare(route, held.operator.headers)
        assert admitted(answer), ("settings", route, answer.text)
    roles = {role for role, _ in allowed}
    assert roles == set(ROLES)


def test_what_says_by_its_body_who_may_lets_nobody_in_without_one(held: Held) -> None:
    before = held.state()
    tokens = [held.bearer(token) for _, token in held.operators.values()]
    devices = (held.device, held.other, held.revoked, held.waiting, held.rejected)
    for route in held.routes():
        if route.template not in BY_THEIR_BODY:
            continue
        sends = [held.signed(device) for device in devices] + tokens
        sends += [made(held) for made, _ in STRANGERS.values()]
        for send in sends:
            before_token = held.state()[:5]
            assert 400 <= send(route).status_code < 500, route
            assert held.state()[:5] == before_token
    assert held.state()[:5] == before[:5]


def every(app: FastAPI) -> set[tuple[str, str]]:
    """Every route that an application really has."""
    found = set()
    for context in iter_route_contexts(app.routes):
        for method in context.methods or ():
            assert context.path is not None
            found.add((method, context.path))
    return found


def test_no_route_is_forgotten(start: Start, paths: Paths) -> None:
    with start() as http:
        routes = every(http.app)
    described = {(method.upper(), path) for path, methods in paths.items() for method in methods}
    plain = {(method, path) for path in DESCRIPTION for method in ("GET", "HEAD")}
    console = {each for each in routes if each[1].startswith("/console")}
    assert routes - plain - console == described
    assert {each for each in console if each[1] not in CONSOLE_OPEN} <= PERMISSIONS.keys()
    operators = {each for each in described if each[1].startswith("/v1/admin/")}
    assert operators <= PERMISSIONS.keys()
    assert PERMISSIONS.keys() <= described | plain | console
    assert len(described) > 50


def test_a_route_without_a_line_in_the_table_cannot_be_made() -> None:
    for kind in (OperatorRoute, AnyoneKnownRoute):
        add = APIRouter(prefix="/v1/admin", route_class=kind).get("/new")
        with pytest.raises(LookupError, match=r"GET /v1/admin/new: say in .*api/permissions\.py"):
            add(lambda: None)


def test_each_listener_answers_what_is_its_own(start: Start, clock: Clock, model: Model) -> None:
    with start() as whole:
        everything = every(whole.app)
    with start(admin_port=0) as devices:
        assert devices.app.for_operators is not None
        operators = Server(devices.app.for_operators, devices.portal)
        operator = Operator(operators)
        device = Device(devices, clock)
        device.enrol(operator.token())
        operator.begin(model, cohort={"size": 1, "minimum": 1})
        ours, theirs = every(devices.app), every(operators.app)
        assert ours | theirs == everything
        known = {"task": "digits", "digest": model.digest, "base": model.digest, "number": "1"}

        def path(template: str) -> str:
            return template.replace(":path}", "}").format_map(_Anything(known))

        for method, template in sorted(everything):
            credentials: dict[str, dict[str, str]] = {
                "none": {},
                "bearer": operator.headers,
                "signed": device.sign(method, path(template), Content.of(b"")),
            }
            is_open = template in ("/livez", "/readyz")
            is_shared = (method, template) in PERMISSIONS and (
                "/admin/" not in template and template.startswith("/v1/")
            )
            is_theirs = "/admin/" in template or template in {*DESCRIPTION, "/metrics"}
            for who, headers in credentials.items():
                here = devices.request(method, path(template), headers=headers)
                there = operators.request(method, path(template), headers=headers)
                case = (who, method, template, here.text, there.text)
                if template.startswith("/console"):
                    assert here.status_code == 404, case
                    assert "no route" in here.text, case
                    assert "no route" not in there.text, case
                    is_page = template != NO_PAGE
                    assert there.status_code in ((200, 303, 400, 401, 403) if is_page else (404,))
                elif is_open:
                    assert here.status_code == there.status_code == 200, case
                elif is_shared:
                    expected = {"none": {401}, "bearer": {404}, "signed": {200, 400, 404}}
                    assert here.status_code in expected[who], case
                    assert ("listener of their own" in here.text) == (who == "bearer"), case
                    assert there.status_code == 401 or who == "bearer", case
                    assert admitted(there) == (who == "bearer"), case
                elif is_theirs:
                    assert here.status_code == 404, case
                    assert "no route" in here.text or method == "HEAD", case
                    assert "no route" not in there.text, case
                    assert there.status_code == 401 or who == "bearer", case
                else:
                    assert there.status_code == 404, case
                    assert "no route" in there.text or method == "HEAD", case
                    assert "no route" not in here.text, case


class _Anything(dict[str, str]):
    def __missing__(self, name: str) -> str:
        return "0"
