"""The console: log-in, roles, and what protects its forms and pages."""

from __future__ import annotations

import csv
import io
import itertools
import json
import re
from pathlib import Path
from urllib.parse import quote

import httpx
import numpy as np
import pytest
import sqlalchemy as sa
from fastapi.routing import iter_route_contexts
from pydantic import TypeAdapter

from fedpress_protocols.messages import RoundStatus
from fedpress_protocols.model import Model
from fedpress_protocols.operators import ROLES, Role
from fedpress_protocols.plan import Profile
from fedpress_protocols.policies import Course
from fedpress_protocols.signatures import DeviceKey
from fedpress_server import Settings, create_app
from fedpress_server.api.permissions import PERMISSIONS
from fedpress_server.console import charts, comparison, curves, model_pages
from fedpress_server.console.rendering import moment, size, span
from fedpress_server.identity.browser_sessions import BrowserSessions
from fedpress_server.identity.operators import MAY
from fedpress_server.identity.signing import SigningKeys
from fedpress_server.storage.tables import audit_log, rounds, uploads
from fedpress_strategies.policies.sizes import expected_bytes
from tests.devices import ADMIN_TOKEN, Device, Operator
from tests.server.in_process import Clock, Server, Start, include_one, running

SCRIPT = "<script>alert(1)</script>"


class Browser:
    """Keeps cookies by hand, as the test's transport is not a browser's."""

    def __init__(self, http: httpx.Client) -> None:
        self.http, self.cookies, self.csrf = http, dict[str, str](), ""

    def send(
        self, method: str, path: str, form: dict[str, str] | None = None, **headers: str
    ) -> httpx.Response:
        self.http.cookies.clear()
        headers["Cookie"] = "; ".join(f"{n}={v}" for n, v in self.cookies.items())
        answer = self.http.request(method, path, data=form, headers=headers, follow_redirects=False)
        for line in answer.headers.get_list("set-cookie"):
            name, _, value = line.partition(";")[0].partition("=")
            self.cookies[name] = value.strip('"')
        if sent := re.search(r'name="csrf" value="([^"]+)"', answer.text):
            self.csrf = sent[1]
        return answer

    def get(self, path: str, **headers: str) -> httpx.Response:
        return self.send("GET", path, None, **headers)

    def post(self, path: str, **form: str) -> httpx.Response:
        return self.send("POST", path, {"csrf": self.csrf, **form})

    def log_in(self, token: str) -> httpx.Response:
        self.get("/console/login")
        answer = self.post("/console/login", token=token)
        if answer.status_code == 303:
            self.get("/console")
        return answer


@pytest.fixture
def browser(http: Server) -> Browser:
    return Browser(http)


@pytest.fixture
def trained(http: Server, operator: Operator, clock: Clock, model: Model) -> Device:
    """A device that is in the model of the task's first round."""
    operator.begin(model, cohort={"size": 1, "minimum": 1}, rounds=3)
    device = Device(http, clock)
    device.enrol(operator.token(), name=SCRIPT)
    include_one(device, model)
    while operator.get("/v1/tasks/digits")["round"] < 1:
        clock.advance(1)
        http.tick()
    return device


def role_token(operator: Operator, role: Role) -> str:
    token: str = operator.post("/v1/admin/operators", {"role": role})["token"]
    return token


def test_a_token_opens_a_session_that_ends_with_logout(browser: Browser) -> None:
    assert browser.get("/console").headers["location"] == "/console/login"
    answer = browser.log_in("wrong" * 8)
    assert answer.status_code == 401
    assert "the operator&#39;s token is wrong" in answer.text
    answer = browser.log_in(ADMIN_TOKEN)
    assert (answer.status_code, answer.headers["location"]) == (303, "/console")
    cookie = answer.headers.get_list("set-cookie")[0]
    assert cookie.startswith("fedpress_session=")
    assert ADMIN_TOKEN not in cookie
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert "Path=/console" in cookie
    assert "Secure" not in cookie
    assert "Overview" in browser.get("/console").text
    answer = browser.post("/console/logout")
    assert answer.headers["location"] == "/console/login"
    assert "Max-Age=0" in answer.headers["set-cookie"]
    assert browser.get("/console").status_code == 303


def test_any_server_of_the_fleet_reads_a_session_and_no_other_cookie() -> None:
    def sessions(key: DeviceKey) -> BrowserSessions:
        return BrowserSessions(SigningKeys.of(key), lambda: 1e9)

    key = DeviceKey.generate()
    cookie = sessions(key).open("hash")
    session = sessions(key).find(cookie)
    assert session is not None
    assert session.token_hash == "hash"
    assert "hash" not in cookie
    for other in ("", "x", cookie[:-2], cookie.swapcase()):
        assert sessions(key).find(other) is None
    assert sessions(DeviceKey.generate()).find(cookie) is None


def test_the_cookie_is_secure_under_tls(http: Server) -> None:
    http.base_url = "https://fedpress.test"
    browser = Browser(http)
    answer = browser.log_in(ADMIN_TOKEN)
    assert all("Secure" in each for each in answer.headers.get_list("set-cookie")[:1])


def test_the_cookie_is_secure_behind_a_proxy_that_ends_tls(browser: Browser) -> None:
    browser.get("/console/login")
    form = {"csrf": browser.csrf, "token": ADMIN_TOKEN}
    answer = browser.send("POST", "/console/login", form, **{"X-Forwarded-Proto": "https"})
    assert answer.status_code == 303
    assert "Secure" in answer.headers.get_list("set-cookie")[0]


def test_sessions_may_go_by_another_clock_than_the_records(tmp_path: Path, clock: Clock) -> None:
    settings = Settings(data_dir=tmp_path / "data", admin_token=ADMIN_TOKEN, tick_seconds=3600)
    watch = Clock()
    with running(create_app(settings, clock=clock, session_clock=watch)) as http:
        browser = Browser(http)
        browser.log_in(ADMIN_TOKEN)
        clock.advance(9 * 3600)
        assert browser.get("/console").status_code == 200
        watch.advance(9 * 3600)
        assert browser.get("/console").status_code == 303


def test_a_session_ends_with_its_time_and_with_its_token(
    browser: Browser, operator: Operator, clock: Clock, http: Server
) -> None:
    browser.log_in(ADMIN_TOKEN)
    clock.advance(8 * 3600 + 1)
    assert browser.get("/console").status_code == 303
    made = operator.post("/v1/admin/operators", {"role": "viewer"})
    browser.log_in(made["token"])
    assert browser.get("/console").status_code == 200
    http.delete(f"/v1/admin/operators/{made['operator_id']}", headers=operator.headers)
    assert browser.get("/console").status_code == 303


def test_a_form_needs_the_value_of_its_session_and_its_own_site(
    browser: Browser, trained: Device
) -> None:
    browser.log_in(ADMIN_TOKEN)
    pause = "/console/tasks/digits/do/pause"
    for form in ({}, {"csrf": ""}, {"csrf": "x" * 32}):
        assert browser.send("POST", pause, form or {"other": "1"}).status_code == 403
    right = {"csrf": browser.csrf}
    for origin in ("https://evil.test", "null", "http://["):
        assert browser.send("POST", pause, right, Origin=origin).status_code == 403
    assert browser.send("POST", "/console/login", {"token": ADMIN_TOKEN}).status_code == 403
    assert "do/resume" not in browser.get("/console/tasks/digits").text
    answer = browser.send("POST", pause, right, Origin="http://fedpress.test")
    assert answer.headers["location"] == "/console/tasks/digits"
    assert "do/resume" in browser.get("/console/tasks/digits").text


def test_no_redirect_leaves_the_console(browser: Browser) -> None:
    for path in (
        "/console?next=https://evil.test",
        "/console//evil.test",
        "/console/login?next=//e",
    ):
        assert "evil" not in browser.get(path).headers.get("location", "")
    browser.get("/console/login?next=https://evil.test")
    answer = browser.post("/console/login?next=https://evil.test", token=ADMIN_TOKEN)
    assert answer.headers["location"] == "/console"


DEEP = "/console/tasks/digits/models?before=9"
NO_PAGES = (
    "https://evil.test",
    "//evil.test",
    "/\\evil.test",
    "\\/evil.test",
    "/console@evil.test",
    "/console//evil.test",
    "/console/..//evil.test",
    "/console/../v1/tasks",
    "/console/./x",
    "/console/%2e%2e/v1/tasks",
    "/console/%2F/evil.test",
    "/console/tasks\\..\\evil",
    "/consoles",
    "/console.evil.test",
    "/v1/tasks",
    "javascript:alert(1)",
    " /console/devices",
    "/console/devices\n",
    "/console/devices\r\nSet-Cookie: a=b",
    "/console/devices#x",
    "/console/devices?x=//evil.test",
    "/console/login",
    "/console/logout",
    "/console/" + "a" * 3000,
)


def test_a_log_in_leads_to_the_page_that_was_asked_for(browser: Browser, trained: Device) -> None:
    to = browser.get(DEEP).headers["location"]
    assert to == "/console/login?next=%2Fconsole%2Ftasks%2Fdigits%2Fmodels%3Fbefore%3D9"
    browser.get(to)
    wrong = browser.post("/console/login", token="wrong" * 8, next=DEEP)
    assert f'name="next" value="{DEEP}"' in wrong.text
    answer = browser.post("/console/login", token=ADMIN_TOKEN, next=DEEP)
    assert (answer.status_code, answer.headers["location"]) == (303, DEEP)


@pytest.mark.parametrize("to", NO_PAGES)
def test_a_log_in_leads_nowhere_out_of_the_console(browser: Browser, to: str) -> None:
    page = browser.get(f"/console/login?next={quote(to, safe='')}")
    assert 'name="next" value="/console"' in page.text
    answer = browser.post("/console/login", token=ADMIN_TOKEN, next=to)
    assert (answer.status_code, answer.headers["location"]) == (303, "/console")


def test_the_forms_of_two_tabs_both_log_in(browser: Browser) -> None:
    browser.get("/console/login")
    first = browser.csrf
    browser.get("/console/login")
    for csrf in (first, browser.csrf):
        form = {"csrf": csrf, "token": ADMIN_TOKEN}
        assert browser.send("POST", "/console/login", form).status_code == 303
    browser.cookies["fedpress_login"] = '"><b>'
    assert re.fullmatch(r"[\w-]{32}", browser.csrf)
    assert "<b>" not in browser.get("/console/login").text
    assert re.fullmatch(r"[\w-]{32}", browser.cookies["fedpress_login"])


def test_a_form_whose_session_has_ended_links_to_the_log_in(
    browser: Browser, trained: Device, clock: Clock
) -> None:
    browser.log_in(ADMIN_TOKEN)
    clock.advance(8 * 3600 + 1)
    answer = browser.post("/console/tasks/digits/do/pause")
    assert answer.status_code == 401
    link = 'href="/console/login?next=%2Fconsole%2Ftasks%2Fdigits%2Fdo%2Fpause"'
    assert link in answer.text
    assert 'href="/console/login"' in browser.post("/console/logout").text


def test_what_is_no_page_is_answered_by_a_page(browser: Browser) -> None:
    for path in ("/console/nope", "/console/tasks", "/console/a/b"):
        answer = browser.get(path)
        assert answer.status_code == 404
        assert "the console has no page" in answer.text
        assert 'href="/console"' in answer.text
    for path, page in (
        ("/console/", "/console"),
        ("/console/devices/?state=waiting", "/console/devices?state=waiting"),
        ("/console//evil.test/", "/console"),
    ):
        assert browser.get(path).headers["location"] == page


def test_a_device_is_approved_only_with_the_key_that_the_form_showed(
    browser: Browser, operator: Operator, http: Server, clock: Clock
) -> None:
    token = operator.post("/v1/admin/tokens", {"uses": 2, "expires_in": 60, "approve_each": True})
    device, other = Device(http, clock), Device(http, clock)
    for each in (device, other):
        each.enrol(token["token"])
    key, other_key = (
        operator.get(f"/v1/admin/clients/{each.client_id}")["key_id"] for each in (device, other)
    )
    browser.log_in(ADMIN_TOKEN)
    assert key in browser.get("/console/devices").text
    approve = f"/console/devices/{device.client_id}/approve"
    page = browser.get(approve).text
    assert f"<code><bdi>{key}</bdi></code>" in page
    assert f'name="key" value="{key}"' in page
    for form in ({}, {"key": ""}, {"key": other_key}):
        answer = browser.post(approve, **form)
        assert answer.status_code == 409
        assert key in answer.text
    path = f"/v1/admin/clients/{device.client_id}"
    assert operator.get(path)["state"] == "waiting"
    assert browser.post(approve, key=key).status_code == 303
    assert operator.get(path)["state"] == "approved"


def test_a_device_s_name_neither_reorders_nor_hides_what_a_page_says(
    browser: Browser, operator: Operator, http: Server, clock: Clock
) -> None:
    device = Device(http, clock)
    device.enrol(operator.token(), name="\u202egnp.exe\u2066\u200b")
    browser.log_in(ADMIN_TOKEN)
    link = f"/console/devices/{device.client_id}"
    for path in ("/console/devices", link, f"{link}/revoke"):
        text = browser.get(path).text
        assert not {"\u202e", "\u2066", "\u200b"} & set(text)
        assert r"\u202egnp.exe\u2066\u200b" in text
    assert f"<h1>Revoke {device.client_id}</h1>" in text
    more = '{\n\t"seed":\r\n 1}'
    assert more in browser.post("/console/create", more=more).text.replace("&#34;", '"')


def test_the_overview_says_since_when_bytes_are_counted(
    browser: Browser, trained: Device, operator: Operator
) -> None:
    browser.log_in(ADMIN_TOKEN)
    since = moment(operator.get("/v1/admin/fleet")["since"])
    assert f"the first at {since} UTC" in browser.get("/console").text


def test_a_finished_task_may_continue_and_is_said_to(browser: Browser, trained: Device) -> None:
    browser.log_in(ADMIN_TOKEN)
    text = browser.get("/console/tasks/digits/do/finish").text
    assert "for good" not in text
    assert "Continue gives it more rounds later." in text


PAGES = (
    "/console",
    "/console/tasks/digits",
    "/console/tasks/digits/rounds/1",
    "/console/tasks/digits/models",
    "/console/tasks/digits/difference?old=0&new=1",
    "/console/devices",
    "/console/audit",
    "/console/settings",
    "/console/tasks/digits/do/pause",
    "/console/tasks/digits/do/cancel",
    "/console/tasks/digits/promote/1",
    "/console/create",
    "/console/compare?task=digits",
)


def test_every_page_is_closed_to_scripts_and_frames(browser: Browser, trained: Device) -> None:
    browser.log_in(ADMIN_TOKEN)
    for path in (*PAGES, "/console/login", "/console/tasks/none", "/console/static/console.js"):
        answer = browser.get(path)
        assert answer.status_code == (404 if path.endswith("none") else 200), (path, answer.text)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-frame-options"] == "DENY"
        assert answer.headers["x-content-type-options"] == "nosniff"
        if path.endswith(".js"):
            continue
        assert not re.search(
            r"<style|style=| on[a-z]+=|<script(?! type=\"module\" src)", answer.text
        )
        assert not re.search(r'(src|href|action)="(?!/|#)', answer.text), path


def test_markup_in_names_is_text(browser: Browser, trained: Device) -> None:
    browser.log_in(ADMIN_TOKEN)
    text = browser.get("/console/devices").text
    assert SCRIPT not in text
    assert "&lt;script&gt;" in text
    cancel = "/console/tasks/digits/do/cancel"
    assert browser.post(cancel, detail=SCRIPT).status_code == 303
    for path in ("/console", "/console/tasks/digits", "/console/audit"):
        text = browser.get(path).text
        assert SCRIPT not in text
        assert "&lt;script&gt;" in text or "u003cscript" in text, path


def test_secrets_are_not_among_the_settings(browser: Browser) -> None:
    browser.log_in(ADMIN_TOKEN)
    assert ADMIN_TOKEN not in browser.get("/console/settings").text


def test_an_unchanged_page_is_not_sent_again(browser: Browser, trained: Device) -> None:
    browser.log_in(ADMIN_TOKEN)
    etag = browser.get("/console/devices").headers["etag"]
    answer = browser.get("/console/devices", **{"If-None-Match": etag})
    assert (answer.status_code, answer.content) == (304, b"")


def test_models_are_promoted_rolled_back_and_downloaded(
    browser: Browser, trained: Device, operator: Operator
) -> None:
    browser.log_in(ADMIN_TOKEN)
    digest = operator.get("/v1/admin/tasks/digits/versions/0")["model"]
    for version in ("0", "1"):
        answer = browser.post(f"/console/tasks/digits/promote/{version}", alias="production")
        assert answer.status_code == 303, answer.text
    assert browser.post("/console/tasks/digits/promote/0", alias="a b").status_code == 400
    (alias,) = operator.get("/v1/admin/tasks/digits/aliases")
    rollback = "/console/tasks/digits/rollback/production"
    assert browser.get(rollback).status_code == 200
    assert alias["version"] == 1
    assert browser.post(rollback, expect="1").status_code == 303
    (alias,) = operator.get("/v1/admin/tasks/digits/aliases")
    assert alias["version"] == 0
    answer = browser.get(f"/console/models/{digest}")
    assert answer.status_code == 200
    assert answer.headers["content-disposition"].startswith("attachment")


def test_each_role_may_what_the_api_lets_it(start: Start, clock: Clock, model: Model) -> None:
    with start() as http:
        operator = Operator(http)
        operator.begin(model, cohort={"size": 1, "minimum": 1})
        device = Device(http, clock)
        device.enrol(operator.token())
        known = {
            "task": "digits",
            "number": "1",
            "version": "0",
            "alias": "production",
            "digest": model.digest,
            "client_id": device.client_id,
        }
        routes = {
            (method, path)
            for each in iter_route_contexts(http.app.routes)
            for path in [each.path or ""]
            for method in each.methods or ()
            if path.startswith("/console") and (method, path) in PERMISSIONS
        }
        assert len(routes) > 15
        for role in ROLES:
            browser = Browser(http)
            token = role_token(operator, role)
            browser.log_in(token)
            task = browser.get("/console/tasks/digits").text
            assert ("/do/pause" in task) == ("run" in MAY[role])
            assert ("/revoke" in browser.get("/console/devices").text) == ("enrol" in MAY[role])
            for method, template in sorted(routes):
                if template == "/console/logout":
                    continue
                # No such action: what is allowed is found malformed, and changes nothing.
                action = {"action": "none"}
                if method == "POST" and "{action}" not in template:
                    known_here = {**known, "version": "9999", "alias": "none"}
                else:
                    known_here = known
                path = template.format(**known_here, **action)
                answer = browser.send(
                    method, path, {"csrf": browser.csrf} if method == "POST" else None
                )
                is_allowed = PERMISSIONS[method, template] in MAY[role]
                assert (answer.status_code == 403) == (not is_allowed), (role, method, path)
                stranger = Browser(http).send(method, path)
                assert stranger.status_code == (303 if method == "GET" else 401)
                bearer = http.request(method, path, headers={"Authorization": f"Bearer {token}"})
                assert bearer.status_code == stranger.status_code


def test_the_open_round_is_shown_and_charts_run_forward(
    browser: Browser, operator: Operator, http: Server, clock: Clock, model: Model
) -> None:
    operator.begin(model, cohort={"size": 1, "minimum": 1}, rounds=4)
    device = Device(http, clock)
    device.enrol(operator.token())
    for number, loss in enumerate((2.0, 1.0, 0.5), 1):
        include_one(device, model)
        while operator.get("/v1/tasks/digits")["round"] < number:
            clock.advance(1)
            http.tick()
        newest = operator.get("/v1/tasks/digits")["model"]
        report = {"model": newest, "num_examples": 50, "metrics": {"loss": loss}}
        device.json("POST", "/v1/tasks/digits/evaluations", json.dumps(report))
    browser.log_in(ADMIN_TOKEN)
    text = browser.get("/console/tasks/digits").text
    assert "attempt 1: collecting" in text
    assert "Loss from 2 at 1 to 0.5 at 3;" in text
    assert re.search(r"Loss from 2 at [0-9.]+ k?B to 0.5 at", text)
    assert text.index(">4.1<") < text.index(">1.1<")
    whole = len(model.to_bytes())
    rounds = operator.get("/v1/tasks/digits/rounds")
    by_number = {each["round"]: each for each in rounds}
    for name, ways in (("up", ("upload",)), ("up and down", ("upload", "download"))):
        first, last = (
            f"{len(ways) * whole / sum(by_number[n][f'{way}_bytes'] for way in ways):.4g}"
            for n in (1, 3)
        )
        assert f", {name} from {first} at 1 to {last} at 3;" in text


def test_ticks_of_almost_equal_values_differ() -> None:
    chart = charts.line("Ratio", "rounds", [(1, 1.99998), (2, 1.99999)])
    assert chart is not None
    assert len({tick.label for tick in chart.y_ticks}) == 5


def test_what_is_never_negative_has_no_negative_tick() -> None:
    for values, lowest in (
        ((2.0, 6000.0), "0"),
        ((-10.0, 10.0), "-11"),
        ((10.0, 11.0), "9.95"),
    ):
        chart = charts.line("Ratio", "rounds", list(enumerate(values)))
        assert chart is not None
        assert chart.y_ticks[0].label == lowest


def test_lines_keep_their_place_s_colour_and_those_without_values_are_named() -> None:
    points = [(1.0, 2.0), (2.0, 1.0)]
    asked = {"a": [], "b": points, "c": [(1.0, 1.0)], "d": points}
    chart = charts.overlay("Loss", "rounds", asked)
    assert chart is not None
    assert [(line.name, line.number) for line in chart.lines] == [("b", 2), ("d", 4)]
    assert chart.missing == ("a", "c")


@pytest.mark.parametrize(
    ("last", "labels"),
    [
        (2, ["1", "2"]),
        (3, ["1", "2", "3"]),
        (12, ["1", "4", "6", "9", "12"]),
        (12_001, ["1", "3001", "6001", "9001", "12001"]),
    ],
)
def test_ticks_of_rounds_are_whole_and_stand_at_their_values(last: int, labels: list[str]) -> None:
    chart = charts.line("Loss", "rounds", [(1, 1.0), (last, 0.5)])
    assert chart is not None
    assert [tick.label for tick in chart.x_ticks] == labels
    width = charts.WIDTH - charts.LEFT - charts.RIGHT
    for tick in chart.x_ticks:
        right = charts.LEFT + (int(tick.label) - 1) / (last - 1) * width
        assert tick.at == pytest.approx(right, abs=0.06)


@pytest.mark.parametrize("values", [(1.0, 1.0), (0.98, 1.0), (0.0, 0.0), (0.0, 1.0)])
def test_the_axis_of_shares_does_not_leave_0_to_1(values: tuple[float, float]) -> None:
    chart = charts.line("Share", "rounds", list(enumerate(values)))
    assert chart is not None
    ticks = [float(tick.label) for tick in chart.y_ticks]
    assert 0 <= min(ticks) < max(ticks) <= 1


@pytest.mark.parametrize(
    ("form", "first", "last"), [(span, 1101.3, 1109.6), (size, 1_234_567.5, 1_236_000.5)]
)
def test_ticks_of_near_times_and_bytes_differ(
    form: charts.Format, first: float, last: float
) -> None:
    chart = charts.line("Loss", "time", [(first, 1.0), (last, 0.5)], form)
    assert chart is not None
    assert len({tick.label for tick in chart.x_ticks}) == 5


FIELDS = {
    "task": "letters",
    "rounds": "3",
    "size": "2",
    "minimum": "1",
    "round_seconds": "60",
    "lane": "clear",
    "more": '{"strategy": {"id": "fedavgm"}, "cohort": {"over_selection": 1.5}}',
    "uplink": "1",
}


def test_a_task_is_checked_and_created_by_the_form(
    browser: Browser, operator: Operator, trained: Device, model: Model
) -> None:
    browser.log_in(ADMIN_TOKEN)
    page = browser.get("/console/create").text
    assert f'<option value="{model.digest}">digits 0, ' in page
    newest = operator.get("/v1/tasks/digits")["model"]
    assert f'<option value="{newest}">digits 1, ' in page
    link = f"/console/create?model={newest}"
    assert f'href="{link}"' in browser.get("/console/tasks/digits/models").text
    assert f'value="{newest}" required' in browser.get(link).text
    form = {**FIELDS, "model": model.digest}
    answer = browser.post("/console/create", **form, do="check")
    assert answer.status_code == 200
    assert "The task can be created. An upload is at most" in answer.text
    assert "over_selection&#34;: 1.5" in answer.text
    assert [each["task"] for each in operator.get("/v1/tasks")] == ["digits"]
    answer = browser.post("/console/create", **form, do="create")
    assert answer.headers["location"] == "/console/tasks/letters"
    page = browser.get("/console/tasks/letters").text
    assert "&#34;id&#34;: &#34;fedavgm&#34;" in page
    assert "&#34;size&#34;: 2" in page
    assert "task.created" in browser.get("/console/audit").text
    again = browser.post("/console/create", **form, do="check")
    assert again.status_code == 409
    assert "there is a task" in again.text


WRONG = (
    ({"rounds": "many"}, "rounds"),
    ({"rounds": "0"}, "rounds"),
    ({"task": "a b"}, "task"),
    ({"model": "0" * 64}, "no model 000000000000"),
    ({"model": "0" * 64}, "or bring one: fedpress task create CONFIG MODEL"),
    ({"size": "3", "minimum": "5"}, "minimum"),
    ({"round_seconds": "inf"}, "round_seconds"),
    ({"lane": "tunnel"}, "lane"),
    ({"more": "{"}, "further settings are no JSON"),
    ({"more": "[" * 9000}, "further settings are no JSON"),
    ({"more": "[1]"}, "no JSON object"),
    ({"more": '{"seed": 1, "seed": 2}'}, "seed is there twice"),
    ({"more": '{"rounds": 9}'}, "name rounds, which the form has a field for"),
    ({"more": '{"cohort": 1}'}, "cohort in the further settings"),
    ({"more": '{"speed": 1}'}, "speed"),
    ({"more": json.dumps({"strategy": {"id": SCRIPT}})}, "no strategy"),
)


def test_a_wrong_task_stays_in_the_form_with_the_reason(
    browser: Browser, operator: Operator, model: Model
) -> None:
    operator.bring(model)
    browser.log_in(ADMIN_TOKEN)
    for (wrong, words), button in itertools.product(WRONG, ("check", "create")):
        form = {**FIELDS, "model": model.digest, **wrong}
        answer = browser.post("/console/create", **form, do=button)
        assert 400 <= answer.status_code < 500, wrong
        assert 'role="alert"' in answer.text
        assert words in answer.text, wrong
        assert f'value="{form["rounds"]}"' in answer.text
        assert SCRIPT not in answer.text
    assert operator.get("/v1/tasks") == []


def test_averages_are_named_among_the_models(
    browser: Browser, operator: Operator, http: Server, clock: Clock, model: Model
) -> None:
    strategy = {"id": "ema", "decay": 0.5}
    operator.begin(model, cohort={"size": 1, "minimum": 1}, rounds=3, strategy=strategy)
    device = Device(http, clock)
    device.enrol(operator.token())
    for number in (1, 2):  # of one round, the average is the model
        include_one(device, model, value=number)
        while operator.get("/v1/tasks/digits")["round"] < number:
            clock.advance(1)
            http.tick()
    average = operator.get("/v1/admin/tasks/digits/versions/2")["published"]["average"]
    browser.log_in(ADMIN_TOKEN)
    page = browser.get("/console/tasks/digits/models").text
    assert f"average <code>{average[:16]}</code>" in page
    assert f'<a href="/console/models/{average}" download>Download average</a>' in page
    assert f'<option value="{average}">digits 2 average, ' in browser.get("/console/create").text


def test_tasks_are_compared_on_common_axes(
    browser: Browser, operator: Operator, http: Server, clock: Clock, model: Model
) -> None:
    device = Device(http, clock)
    device.enrol(operator.token())
    for task, losses in (("fast", (2.0, 1.0, 0.5)), ("slow", (2.0, 1.5, 1.25))):
        operator.begin(model, task=task, cohort={"size": 1, "minimum": 1}, rounds=4)
        for number, loss in enumerate(losses, 1):
            include_one(device, model, task=task)
            while operator.get(f"/v1/tasks/{task}")["round"] < number:
                clock.advance(1)
                http.tick()
            newest = operator.get(f"/v1/tasks/{task}")["model"]
            report = {"model": newest, "num_examples": 50, "metrics": {"loss": loss}}
            device.json("POST", f"/v1/tasks/{task}/evaluations", json.dumps(report))
    browser.log_in(ADMIN_TOKEN)
    assert "<svg" not in browser.get("/console/compare").text
    both = "task=fast&task=slow"
    text = browser.get(f"/console/compare?{both}").text
    assert text.count("<svg") == 2
    assert text.count("<polyline") == 4
    assert "fast from 2 at 1 to 0.5 at 3;" in text
    assert "slow from 2 at 1 to 1.25 at 3;" in text
    answer = browser.get(f"/console/compare.csv?{both}")
    assert answer.headers["content-type"].startswith("text/csv")
    lines = answer.text.splitlines()
    assert lines[0].startswith("task,round,attempt,state,")
    assert lines[0].endswith(",loss")
    assert [line.partition(",")[0] for line in lines[1:]] == ["fast"] * 4 + ["slow"] * 4
    operator.begin(model, task="bare")
    text = browser.get("/console/compare?task=bare&task=slow").text
    assert text.count('<ul class="legend"><li class="line-2"><span></span>slow</li></ul>') == 2
    assert text.count('<g class="line-2">') == text.count("<polyline") == 2
    assert text.count("Fewer than two values: bare<") == 2
    assert browser.get("/console/compare?task=none").status_code == 404


def test_too_many_tasks_to_compare_stay_ticked_in_the_form(
    browser: Browser, operator: Operator, model: Model
) -> None:
    for number in range(10):
        operator.begin(model, task=f"t{number}")
    browser.log_in(ADMIN_TOKEN)
    ticked = "&".join(f"task=t{number}" for number in range(10))
    answer = browser.get(f"/console/compare?{ticked}")
    assert answer.status_code == 400
    assert 'role="alert"' in answer.text
    assert "10 tasks are ticked, and at most 8 can be compared." in answer.text
    assert "Untick 2 of them." in answer.text
    assert len(re.findall(r'value="t\d" checked', answer.text)) == 10
    assert "compare.csv" not in answer.text
    assert browser.get(f"/console/compare.csv?{ticked}").status_code == 400
    again = browser.get("/console/compare?" + "&".join(["task=t1"] * 9))
    assert again.status_code == 200


def test_messages_of_masked_sessions_count_among_the_bytes_up(
    browser: Browser, operator: Operator, http: Server, trained: Device
) -> None:
    attempt = operator.get("/v1/tasks/digits/rounds/1")
    up, down = attempt["upload_bytes"] + 500_000, attempt["download_bytes"]
    both = up + down
    session = {"began": 4, "answered": {"keys": 4}, "message_bytes": 500_000}
    change = sa.update(rounds).where(rounds.c.round == 1).values(session=session)
    http.call(http.app.services.database.write, lambda c: c.execute(change).rowcount)
    browser.log_in(ADMIN_TOKEN)
    text = browser.get("/console/tasks/digits").text
    assert f"<dt>Sent up and down</dt><dd>{size(both)}</dd>" in text
    assert f'<td class="number">{size(up)}<td class="number">{size(down)}' in text
    assert "<dt>Saved</dt><dd>–</dd>" in text
    assert f"<dt>Up</dt><dd>{size(up)}</dd>" in browser.get("/console/tasks/digits/rounds/1").text
    first, *_ = csv.DictReader(io.StringIO(browser.get("/console/compare.csv?task=digits").text))
    assert int(first["upload_bytes"]) + int(first["message_bytes"]) == up

    status = RoundStatus.model_validate({**attempt, "session": session, "metrics": {"loss": 2.0}})
    attempts = [status, status.model_copy(update={"round": 2, "metrics": {"loss": 1.0}})]
    _, over_bytes, *_ = curves.learning(attempts)
    assert f"2 at {size(both)} to 1 at {size(2 * both)};" in over_bytes.summary
    assert [at for _, at, _ in comparison.measured("loss", attempts)] == [both, 2 * both]
    ratio, *_ = curves.sending(attempts, up)
    assert "Times smaller than float32, up from 1 at 1 to 1 at 2;" in ratio.summary


def test_each_attempt_has_its_page_with_why_devices_declined(
    browser: Browser, operator: Operator, http: Server, clock: Clock, model: Model
) -> None:
    operator.begin(model)
    device = Device(http, clock)
    device.enrol(operator.token())
    assignment = device.assignment("digits").assignment
    device.json("DELETE", f"/v1/assignments/{assignment}?reason=training-failed")
    operator.post("/v1/admin/tasks/digits/abort-round")
    browser.log_in(ADMIN_TOKEN)
    text = browser.get("/console/tasks/digits").text
    assert "declined: 1 training-failed" in text
    page = "/console/tasks/digits/rounds/1"
    of_device = browser.get(f"/console/devices/{device.client_id}").text
    for linking in (text, of_device):
        assert f'href="{page}?attempt=1">1.1<' in linking
    first = browser.get(f"{page}?attempt=1").text
    assert "<dt>Attempt</dt><dd>1</dd>" in first
    assert "Declined: 1 training-failed" in first
    assert f"<code>{assignment}</code>" in first
    for latest in (browser.get(page).text, browser.get(f"{page}?attempt=2").text):
        assert "<dt>Attempt</dt><dd>2</dd>" in latest
        assert "Declined" not in latest
    for attempt, status in (("3", 404), ("0", 400), ("x", 400)):
        assert browser.get(f"{page}?attempt={attempt}").status_code == status
    assert browser.get("/console/tasks/digits/rounds/2?attempt=1").status_code == 404


def test_a_round_s_page_tells_what_the_policies_decided(
    browser: Browser, http: Server, trained: Device
) -> None:
    course = Course(
        round=1, gentlest=0, hardest=1, why="gentler: too much is lost", warnings=("few devices",)
    )
    change = sa.update(rounds).where(rounds.c.round == 1)
    change = change.values(course=course.model_dump(mode="json"))
    http.call(http.app.services.database.write, lambda c: c.execute(change).rowcount)
    browser.log_in(ADMIN_TOKEN)
    text = browser.get("/console/tasks/digits/rounds/1").text
    assert "Policies: gentler: too much is lost<" in text
    assert '<p class="warn">few devices</p>' in text


def test_a_form_of_another_attempt_aborts_nothing(
    browser: Browser, operator: Operator, trained: Device, clock: Clock, http: Server
) -> None:
    browser.log_in(ADMIN_TOKEN)
    abort = "/console/tasks/digits/do/abort-round"
    expected = re.search(r'name="expect" value="([0-9.]+)"', browser.get(abort).text)
    assert expected is not None
    assert browser.post(abort, expect="1.1").status_code == 409
    assert browser.post(abort, expect=expected[1]).status_code == 303
    assert browser.post(abort, expect=expected[1]).status_code == 409


def test_a_device_s_page_tells_what_it_is_and_did(
    browser: Browser, operator: Operator, http: Server, trained: Device
) -> None:
    browser.log_in(ADMIN_TOKEN)
    link = f"/console/devices/{trained.client_id}"
    assert f'href="{link}"' in browser.get("/console/devices").text
    assert f'href="{link}"' in browser.get("/console/tasks/digits/rounds/1").text
    page = browser.get(link).text
    status = operator.get(f"/v1/admin/clients/{trained.client_id}")
    assert status["agent"] in page
    assert status["agent"].startswith("python-httpx/")
    (done,) = re.findall(r"<tr><td><a href=\"/console/tasks/digits\">.*</tr>", page)
    num_bytes = operator.get("/v1/tasks/digits/rounds/1")["upload_bytes"]
    assert re.findall(r"number\">([^<]+)", done) == ["1", "1", size(num_bytes), "1"]
    assert "<td>included</tr>" in page
    assert browser.get("/console/devices/nobody").status_code == 404


def test_the_page_of_an_idle_device_has_no_figures(
    browser: Browser, operator: Operator, http: Server, clock: Clock
) -> None:
    device = Device(http, clock)
    device.enrol(operator.token())
    browser.log_in(ADMIN_TOKEN)
    page = browser.get(f"/console/devices/{device.client_id}").text
    assert "It has had no assignment." in page
    assert "<dt>Uplink, measured</dt><dd>–</dd>" in page


def test_the_uplink_is_that_of_bodies_whose_duration_is_known(
    browser: Browser, http: Server, trained: Device
) -> None:
    body = sa.update(uploads).values(num_bytes=30_000, seconds=2.0)
    http.call(http.app.services.database.write, lambda c: c.execute(body).rowcount)
    browser.log_in(ADMIN_TOKEN)
    page = browser.get(f"/console/devices/{trained.client_id}").text
    assert "<dd>15 kB/s</dd>" in page


def test_two_versions_are_compared_by_tensor(
    browser: Browser, http: Server, trained: Device, operator: Operator
) -> None:
    browser.log_in(ADMIN_TOKEN)
    newest = operator.get("/v1/tasks/digits")["model"]
    report = {"model": newest, "num_examples": 50, "metrics": {"accuracy": 0.75}}
    trained.json("POST", "/v1/tasks/digits/evaluations", json.dumps(report))
    assert "/console/tasks/digits/difference" in browser.get("/console/tasks/digits/models").text
    page = browser.get("/console/tasks/digits/difference?old=0&new=1").text
    assert '<td>Names<td class="number">–<td class="number">newest</tr>' in page
    old, new = (
        Model.from_bytes(
            http.get(f"/v1/models/{each['model']}", headers=operator.headers).content
        ).tensors()
        for each in reversed(operator.get("/v1/admin/tasks/digits/versions"))
    )
    for name, values in old.items():
        moved = np.linalg.norm(new[name].astype(np.float64) - values)
        row = re.search(rf"<tr><td>{re.escape(name)}<td>.*", page)
        assert row is not None
        assert f"{np.linalg.norm(values):.4g}" in row[0]
        assert f"{moved:.4g}" in row[0]
    assert re.search(r"Accuracy<td class=\"number\">–<td class=\"number\">0\.75<", page)
    norm = operator.get("/v1/tasks/digits/rounds/1")["update_norm"]  # plain averages
    of_round = browser.get("/console/tasks/digits/rounds/1").text
    assert f"Aggregated update: norm {norm:.3g}." in of_round
    assert f">{norm:.4g}<" in re.findall("all tensors.*", page)[0]
    same = browser.get("/console/tasks/digits/difference?old=1&new=1").text
    assert re.search(r"all tensors<td><td [^>]*>[^<]*<td class=\"number\">0<", same)
    for query, status in (("old=0&new=9", 404), ("old=0", 400), ("old=-1&new=1", 400)):
        answer = browser.get(f"/console/tasks/digits/difference?{query}")
        assert answer.status_code == status


def test_an_alias_moves_only_to_what_meets_the_requirements(
    browser: Browser, trained: Device, operator: Operator
) -> None:
    browser.log_in(ADMIN_TOKEN)
    newest = operator.get("/v1/tasks/digits")["model"]
    report = {"model": newest, "num_examples": 50, "metrics": {"accuracy": 0.75}}
    trained.json("POST", "/v1/tasks/digits/evaluations", json.dumps(report))
    path = "/console/tasks/digits/promote/1"
    assert "Only if (optional)" in browser.get(path).text
    for required, status, words in (
        ("accuracy>=0.8", 409, "accuracy&gt;=0.8: found 0.75"),
        ("accuracy>=0.7; devices>=2", 409, "devices&gt;=2: found 1"),
        ("better", 422, "is no requirement"),
    ):
        answer = browser.post(path, alias="production", require=required)
        assert (answer.status_code, words in answer.text) == (status, True), answer.text
    first = "/console/tasks/digits/promote/0"
    assert browser.post(first, alias="production", require="devices>=1").status_code == 409
    assert operator.get("/v1/admin/tasks/digits/aliases") == []
    met = browser.post(path, alias="production", require=" accuracy>=0.7 ; devices>=1 ")
    assert met.status_code == 303
    (alias,) = operator.get("/v1/admin/tasks/digits/aliases")
    assert alias["version"] == 1


def test_models_too_large_to_compare_are_refused(
    browser: Browser, trained: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_pages, "MAX_COMPARED_BYTES", 10)
    browser.log_in(ADMIN_TOKEN)
    answer = browser.get("/console/tasks/digits/difference?old=0&new=1")
    assert answer.status_code == 409
    assert "compare the files" in answer.text


def test_a_changed_audit_log_is_found(browser: Browser, http: Server, trained: Device) -> None:
    browser.log_in(ADMIN_TOKEN)
    assert "the audit log is whole" not in browser.get("/console/audit").text
    assert "the audit log is whole" in browser.post("/console/audit").text

    def change(connection: sa.Connection) -> None:
        connection.execute(sa.update(audit_log).where(audit_log.c.seq == 2).values(actor="nobody"))

    http.call(http.app.services.database.write, change)
    answer = browser.post("/console/audit")
    assert answer.status_code == 200
    assert "the audit log was changed" in answer.text


def test_doctor_s_findings_stand_beside_the_settings(browser: Browser, trained: Device) -> None:
    browser.log_in(ADMIN_TOKEN)
    assert "Findings" not in browser.get("/console/settings").text
    text = browser.post("/console/settings").text
    assert "answers, and its schema is this release" in text
    assert "models were read, and are whole" in text
    assert ADMIN_TOKEN not in text


def test_the_form_predicts_the_uploads_of_each_profile(
    browser: Browser, operator: Operator, model: Model
) -> None:
    operator.bring(model)
    browser.log_in(ADMIN_TOKEN)
    profiles = [
        {"name": "whole", "compressor": {"id": "none"}},
        {"name": "few", "compressor": {"id": "topk", "fraction": 0.01}},
    ]
    form = {**FIELDS, "model": model.digest, "more": json.dumps({"profiles": profiles})}
    text = browser.post("/console/create", **{**form, "uplink": "0.5"}, do="check").text
    rows = dict(re.findall(r"<tr><td>(whole|few)<td class=\"number\">([^<]+)", text))
    sizes = {
        each.name: expected_bytes(each.compressor, model.spec)
        for each in TypeAdapter(list[Profile]).validate_python(profiles)
    }
    assert rows == {name: size(num_bytes) for name, num_bytes in sizes.items()}
    assert span(8 * sizes["whole"] / 5e5) in text
    assert size(sizes["few"] * 2 * 3) in text  # cohort and rounds of FIELDS
    for wrong in ("", "0", "-1", "fast", "inf"):
        answer = browser.post("/console/create", **{**form, "uplink": wrong}, do="check")
        assert answer.status_code == 422
        assert "Mbit/s" in answer.text


def test_the_newest_round_s_profiles_are_shown(browser: Browser, trained: Device) -> None:
    browser.log_in(ADMIN_TOKEN)
    text = browser.get("/console/tasks/digits").text
    assert "Profiles of round 1.1" in text
    profile = re.search(
        r'aria-label="Profiles".*?<tr><td>[^<]+<td class="number">1<td class="number">1<',
        text,
        re.S,
    )
    assert profile is not None


def test_time_participation_and_norms_are_drawn() -> None:
    opened = RoundStatus(
        task="t",
        round=1,
        attempt=1,
        state="committed",
        base_model="0" * 64,
        assigned=4,
        received=2,
        included=2,
        minimum=1,
        size=2,
        opened_at=1000.0,
        deadline=2000.0,
        closed_at=1090.0,
        upload_bytes=10,
        wire_upload_bytes=10,
        download_bytes=10,
        num_examples=2,
        metrics={"loss": 2.0},
        update_norm=3.0,
    )
    later = {
        "round": 2,
        "closed_at": 8200.0,
        "included": 4,
        "metrics": {"loss": 1.0},
        "update_norm": 6.0,
    }
    attempts = [opened, opened.model_copy(update=later)]
    words = " ".join(
        each.summary for each in (*curves.learning(attempts), *curves.sending(attempts, 40))
    )
    assert "Loss from 2 at 1.5 min to 1 at 2 h;" in words
    assert "Share of assigned devices included from 0.5 at 1 to 1 at 2;" in words
    assert "Norm of the aggregated update from 3 at 1 to 6 at 2;" in words
    assert "Privacy" not in words
