"""The pages of docs/reference that the code determines are current."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedpress.cli.outcomes import explanation, message
from fedpress_protocols.errors import PROBLEM_PREFIX, FedpressError, RoundClosed, error_classes
from fedpress_server.settings import Settings
from tests.face.test_site import anchors
from tests.tools.reference import FOLDER, PAGES, page

TREE = Path(__file__).parents[2]
ERRORS = [
    cls
    for cls in error_classes()
    if cls.__module__.endswith(".errors") and cls is not FedpressError
]


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_page_is_current(name: str) -> None:
    assert (FOLDER / name).read_text() == page(name), "run `make reference`"


def test_every_error_says_what_happened_and_what_to_do() -> None:
    for cls in ERRORS:
        happened, _, advice = (vars(cls).get("__doc__") or "").partition("\n\n")
        assert happened.strip(), cls
        assert advice.strip(), cls


@pytest.mark.parametrize("cls", ERRORS, ids=lambda cls: cls.slug)
def test_every_error_leads_to_its_section(cls: type[FedpressError]) -> None:
    error = cls("what was found")
    file, _, anchor = explanation(error).partition("#")
    assert anchor in anchors(TREE / file)
    assert error.to_problem()["type"] == PROBLEM_PREFIX + anchor
    assert f"`{cls.__name__}`" in (TREE / file).read_text().partition(f"\n## {anchor}\n")[2][:100]


def test_a_message_ends_with_its_section_on_a_line_of_its_own() -> None:
    class Folded(RoundClosed):
        """Of another package."""

        slug = "of-another-package"

    expected = [
        f"fedpress: round 7 is closed ({RoundClosed.default_hint})",
        "  see docs/reference/errors.md#round-closed",
    ]
    assert message(RoundClosed("round 7 is closed"), as_json=False).splitlines() == expected
    assert message(Folded("round 7 is closed"), as_json=False).splitlines() == expected
    of_the_system = FedpressError("task.json: No such file or directory")
    assert message(of_the_system, as_json=False) == f"fedpress: {of_the_system}"


def test_every_setting_has_one_row() -> None:
    rows = [line.split("`")[1] for line in page("settings.md").splitlines() if line[:3] == "| `"]
    assert sorted(rows) == sorted(Settings.model_fields)
