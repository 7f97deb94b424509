"""The pages of docs/reference that the code determines are current."""

from __future__ import annotations

import inspect

import pytest
from click.testing import CliRunner

from fedpress.cli import app
from fedpress.cli.outcomes import documented_errors, explanation, message
from fedpress_protocols.errors import PROBLEM_PREFIX, ConfigurationError, FedpressError, RoundClosed
from fedpress_server.settings import Settings
from tests.face.test_site import anchors
from tests.tools.reference import FOLDER, PAGES, page

ERRORS = list(documented_errors())


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
    anchor, file = explanation(error), FOLDER / "errors.md"
    assert anchor in anchors(file)
    assert error.to_problem()["type"] == PROBLEM_PREFIX + anchor
    assert f"`{cls.__name__}`" in file.read_text().partition(f"\n## {anchor}\n")[2][:100]


@pytest.mark.parametrize("cls", ERRORS, ids=lambda cls: cls.slug)
def test_the_command_line_explains_every_error(cls: type[FedpressError]) -> None:
    done = CliRunner().invoke(app, ["explain", explanation(cls("what was found"))])
    assert done.exit_code == 0
    shown, section = " ".join(done.output.split()), (FOLDER / "errors.md").read_text()
    assert shown.startswith(f"{cls.slug}: {cls.title} ({cls.__name__}, HTTP status {cls.status})")
    assert " ".join(inspect.cleandoc(cls.__doc__ or "").split()) in shown
    assert cls.default_hint in shown
    assert inspect.cleandoc(cls.__doc__ or "") in section


def test_an_unknown_kind_of_error_is_refused_with_those_that_there_are() -> None:
    done = CliRunner().invoke(app, ["explain", "absent"])
    assert isinstance(done.exception, ConfigurationError)
    assert "there is no kind of error 'absent'" in str(done.exception)
    assert "round-closed" in str(done.exception)


def test_a_message_ends_with_its_section_on_a_line_of_its_own() -> None:
    class Folded(RoundClosed):
        """Of another package."""

        slug = "of-another-package"

    expected = [
        f"fedpress: round 7 is closed ({RoundClosed.default_hint})",
        "  see `fedpress explain round-closed`",
    ]
    assert message(RoundClosed("round 7 is closed"), as_json=False).splitlines() == expected
    assert message(Folded("round 7 is closed"), as_json=False).splitlines() == expected
    of_the_system = FedpressError("task.json: No such file or directory")
    assert message(of_the_system, as_json=False) == f"fedpress: {of_the_system}"


def test_every_setting_has_one_row() -> None:
    rows = [line.split("`")[1] for line in page("settings.md").splitlines() if line[:3] == "| `"]
    assert sorted(rows) == sorted(Settings.model_fields)
