"""The console in a real browser: `make test-browser`, which needs Chromium on the machine."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import matplotlib.image
import numpy as np
import pytest

from fedpress_protocols.model import Model
from fedpress_protocols.operators import Role
from fedpress_server.identity.operators import MAY
from tests.devices import Device, Operator
from tests.system.server_process import ADMIN_TOKEN, ServerProcess

pytest.importorskip("playwright", reason="a browser's tests need playwright: make test-browser")
pytest.importorskip("axe_playwright_python")

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect, sync_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")

MODEL = Model.from_tensors({"weight": np.zeros(1_000, np.float32)})
PATHS = (
    "",
    "/tasks/digits",
    "/tasks/digits/rounds/1",
    "/tasks/digits/models",
    "/tasks/digits/difference?old=0&new=2",
    "/tasks/digits/do/cancel",
    "/tasks/digits/promote/1",
    "/create",
    "/compare?task=digits",
    "/devices",
    "/audit",
    "/settings",
)


FORMS = {"/audit": "Check the chain", "/settings": "Look for problems"}
"""Pages that are looked at with the answer to their form, by its button."""


class Place:
    """A server with a task of which two rounds are done, and its device."""

    def __init__(self, folder: Path) -> None:
        self.server = ServerProcess(folder)
        self.server.start()
        self.console = f"{self.server.url}/console"
        self.http = httpx.Client(base_url=self.server.url, timeout=60)
        self.operator = Operator(self.http, ADMIN_TOKEN)
        self.device = Device(self.http)
        self.device.enrol(self.operator.token())
        self.begin("digits")
        self.round("digits", 2.0)
        self.round("digits", 1.0)

    def begin(self, task: str) -> None:
        self.operator.begin(MODEL, task, rounds=9, cohort={"size": 1, "minimum": 1})

    def round(self, task: str, loss: float) -> None:
        """One round with the device's update and its report on the result."""
        given = self.device.assignment(task)
        self.device.upload(
            given.assignment, self.device.body_for(given, np.ones(1_000, np.float32))
        )
        answer = self.device.check_in(task, given.assignment, wait=30)
        assert answer is not None
        report = {"model": answer.task.model, "num_examples": 50, "metrics": {"loss": loss}}
        self.device.json("POST", f"/v1/tasks/{task}/evaluations", json.dumps(report))

    def close(self) -> None:
        self.http.close()
        self.server.stop()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    place = Place(tmp_path_factory.mktemp("console"))
    yield place
    place.close()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def opened(
    chromium: Browser,
    place: Place,
    token: str = ADMIN_TOKEN,
    *,
    width: int = 1200,
    dark: bool = False,
) -> Iterator[Page]:
    """A page that has logged in; nothing may fail in its script or be refused by its policy."""
    context = chromium.new_context(
        viewport={"width": width, "height": 800}, color_scheme="dark" if dark else "light"
    )
    page, troubles = context.new_page(), list[str]()
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("console", lambda line: troubles.append(line.text) if line.type == "error" else None)
    page.goto(place.console)
    page.get_by_label("Operator's token").fill(token)
    page.get_by_role("button", name="Log in").click()
    page.wait_for_url(place.console)
    yield page
    context.close()
    assert not [each for each in troubles if "Failed to load resource" not in each]


def role_token(place: Place, role: Role) -> str:
    token: str = place.operator.post("/v1/admin/operators", {"role": role})["token"]
    return token


@pytest.mark.parametrize("dark", [False, True])
def test_a_comparison_is_saved_as_a_picture_in_the_page_s_colours(
    chromium: Browser, place: Place, tmp_path: Path, dark: bool
) -> None:
    if "second" not in {each["task"] for each in place.operator.get("/v1/tasks")}:
        place.begin("second")
        place.round("second", 3.0)
        place.round("second", 0.5)
    with opened(chromium, place, dark=dark) as page:
        page.goto(f"{place.console}/compare?task=digits&task=second")
        with page.expect_download() as download:
            page.get_by_role("button", name="Save as PNG").first.click()
        file = tmp_path / "chart.png"
        download.value.save_as(file)
        back = page.locator("figure").first.evaluate("each => getComputedStyle(each).background")
        colours = [
            page.locator(f".line-{number} .curve").first.evaluate(
                "each => getComputedStyle(each).stroke"
            )
            for number in (1, 2)
        ]
    assert download.value.suggested_filename == "fedpress-loss-over-rounds.png"
    pixels = (255 * matplotlib.image.imread(file)[..., :3]).round().astype(int)
    assert pixels.shape == (2 * (28 + 220 + 2 * 18), 2 * 520, 3)
    for colour, least in ((back, 400_000), (colours[0], 500), (colours[1], 500)):
        sought = [int(each) for each in re.findall(r"\d+", colour)[:3]]
        assert (pixels == sought).all(axis=2).sum() > least, colour


def test_a_wrong_token_is_refused_and_a_right_one_taken(chromium: Browser, place: Place) -> None:
    page = chromium.new_page()
    page.goto(f"{place.console}/devices")
    assert page.url.endswith("/console/login")
    page.get_by_label("Operator's token").fill("wrong")
    page.get_by_role("button", name="Log in").click()
    expect(page.get_by_role("alert")).to_contain_text("token")
    page.get_by_label("Operator's token").fill(ADMIN_TOKEN)
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Overview")).to_be_visible()
    page.get_by_role("button", name="Log out").click()
    page.goto(place.console)
    assert page.url.endswith("/console/login")
    page.close()


def test_a_round_is_followed_from_open_to_commit(chromium: Browser, place: Place) -> None:
    place.begin("live")
    with opened(chromium, place) as page:
        page.goto(f"{place.console}/tasks/live")
        live = page.locator("[data-live]")
        expect(live).to_contain_text("attempt 1: collecting")
        models = page.get_by_role("link", name="Models")
        models.focus()
        place.round("live", 3.0)
        place.round("live", 2.0)
        expect(live).to_contain_text("2 of 9", timeout=30_000)
        expect(live.locator("svg").first).to_be_visible(timeout=30_000)
        expect(models).to_be_focused()


def test_a_server_that_is_gone_is_said(chromium: Browser, place: Place) -> None:
    with opened(chromium, place) as page:
        note = page.get_by_text("The server does not answer")
        expect(note).to_be_hidden()
        page.route("**/console", lambda route: route.abort())
        expect(note).to_be_visible(timeout=30_000)
        page.unroute("**/console")
        expect(note).to_be_hidden(timeout=30_000)


@pytest.mark.parametrize("role", ["viewer", "registrar", "operator"])
def test_a_role_sees_its_own_buttons(chromium: Browser, place: Place, role: Role) -> None:
    runs = "run" in MAY[role]
    with opened(chromium, place, role_token(place, role)) as page:
        page.goto(f"{place.console}/tasks/digits")
        expect(page.get_by_role("link", name="Pause")).to_have_count(int(runs))
        page.goto(f"{place.console}/devices")
        expect(page.get_by_role("link", name="Revoke")).to_have_count(int("enrol" in MAY[role]))
        for path in ("/tasks/digits/do/cancel", "/create", "/tasks/digits/promote/1"):
            answer = page.goto(place.console + path)
            assert answer is not None
            assert answer.status == (200 if runs else 403)
        answer = page.goto(f"{place.console}/audit")
        assert answer is not None
        assert answer.status == 403


def test_a_task_is_paused_and_resumed(chromium: Browser, place: Place) -> None:
    with opened(chromium, place) as page:
        page.goto(f"{place.console}/tasks/digits")
        page.get_by_role("link", name="Pause").click()
        expect(page.get_by_text("No device gets work from now on")).to_be_visible()
        page.get_by_role("button", name="Confirm").click()
        expect(page.get_by_text("Paused by an operator")).to_be_visible()
        page.get_by_role("link", name="Resume").click()
        page.get_by_role("button", name="Confirm").click()
        expect(page.get_by_text("Paused by an operator")).to_be_hidden()


def test_a_version_is_promoted_and_rolled_back(chromium: Browser, place: Place) -> None:
    with opened(chromium, place) as page:
        for version in ("0", "1"):
            page.goto(f"{place.console}/tasks/digits/promote/{version}")
            page.get_by_label("Alias").fill("production")
            page.get_by_role("button", name="Confirm").click()
            row = page.get_by_role("region", name="Aliases").get_by_role("row").nth(1)
            expect(row).to_contain_text(f"production{version}")
        page.get_by_role("link", name="Roll back").click()
        page.get_by_role("button", name="Confirm").click()
        expect(row).to_contain_text("production0")


def test_two_versions_are_compared(chromium: Browser, place: Place) -> None:
    with opened(chromium, place) as page:
        page.goto(f"{place.console}/tasks/digits/models")
        page.get_by_label("Compare version").fill("0")
        page.get_by_role("button", name="Compare").click()
        tensors = page.get_by_role("region", name="Tensors").get_by_role("row")
        expect(tensors.nth(2)).to_contain_text("weight")


def test_a_device_is_found_from_its_round(chromium: Browser, place: Place) -> None:
    with opened(chromium, place) as page:
        page.goto(f"{place.console}/tasks/digits/rounds/1")
        page.get_by_role("link", name=place.device.client_id).click()
        done = page.get_by_role("region", name="Contribution by task")
        expect(done.get_by_role("link", name="digits")).to_be_visible()
        page.get_by_role("region", name="Assignments").get_by_role("link", name="1.1").last.click()
        expect(page.get_by_role("heading", name="digits, round 1")).to_be_visible()


def test_problems_are_looked_for(chromium: Browser, place: Place) -> None:
    with opened(chromium, place) as page:
        page.goto(f"{place.console}/settings")
        page.get_by_role("button", name="Look for problems").click()
        findings = page.get_by_role("region", name="Findings")
        expect(findings).to_contain_text("its schema is this release's")
        page.goto(f"{place.console}/audit")
        page.get_by_role("button", name="Check the chain").click()
        expect(page.get_by_role("status").first).to_contain_text("the audit log is whole")


def test_a_form_is_validated_here_and_there(chromium: Browser, place: Place) -> None:
    with opened(chromium, place) as page:
        page.goto(f"{place.console}/create")
        page.get_by_role("button", name="Check").click()
        assert page.locator("#task:invalid").count() == 1  # the browser's own check: it is required
        page.get_by_label("Name", exact=True).fill("by-form")
        page.get_by_label("Initial model").fill(MODEL.digest)
        page.get_by_label("Cohort size").fill("2")
        page.get_by_label("Minimum").fill("3")
        page.get_by_role("button", name="Check").click()
        expect(page.get_by_role("alert")).to_contain_text("minimum")
        page.get_by_label("Minimum").fill("1")
        page.get_by_role("button", name="Check").click()
        expect(page.get_by_role("status").first).to_contain_text("The task can be created")
        predicted = page.get_by_role("region", name="Predicted uploads").get_by_role("row")
        expect(predicted.nth(1)).to_contain_text("kB")
        page.get_by_role("button", name="Create").click()
        expect(page.get_by_role("heading", name="by-form")).to_be_visible()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1200, 390], ids=["desktop", "phone"])
def test_every_page_is_accessible_and_fits(
    chromium: Browser, place: Place, width: int, dark: bool
) -> None:
    axe = Axe()
    with opened(chromium, place, width=width, dark=dark) as page:
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (background == "rgb(18, 21, 26)") == dark
        for path in (*PATHS, f"/devices/{place.device.client_id}"):
            page.goto(place.console + path)
            if path in FORMS:
                page.get_by_role("button", name=FORMS[path]).click()
            violations = axe.run(page).response["violations"]
            serious = [
                (each["id"], [node["html"][:200] for node in each["nodes"]])
                for each in violations
                if each["impact"] in ("serious", "critical")
            ]
            assert not serious, (path, serious)
            wide = page.evaluate("document.documentElement.scrollWidth")
            assert wide <= width, path
            assert page.locator("h1").count() == 1, path


@pytest.mark.parametrize("width", [1200, 390], ids=["desktop", "phone"])
def test_long_words_widen_no_page(chromium: Browser, place: Place, width: int) -> None:
    name = f"{'o' * 60}{width}"
    place.begin(name)
    place.round(name, 2.0)
    place.round(name, 1.0)
    place.operator.post(f"/v1/admin/tasks/{name}/cancel", {"detail": "x" * 150})
    with opened(chromium, place, width=width) as page:
        for path in (f"/compare?task={name}", f"/tasks/{name}", f"/tasks/{name}/rounds/3"):
            page.goto(place.console + path)
            assert page.evaluate("document.documentElement.scrollWidth") <= width, path


def test_a_keyboard_is_enough(chromium: Browser, place: Place) -> None:
    with opened(chromium, place) as page:
        page.goto(place.console)
        page.keyboard.press("Tab")
        expect(page.get_by_text("Skip to the content")).to_be_focused()
        page.keyboard.press("Enter")
        page.keyboard.press("Tab")
        inside = page.evaluate("document.activeElement.closest('main') !== null")
        assert inside
