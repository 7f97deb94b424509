"""The pages of docs/reference that the code determines are current."""

from __future__ import annotations

import pytest

from fedpress_protocols.errors import FedpressError, error_classes
from fedpress_server.settings import Settings
from tests.tools.reference import FOLDER, PAGES, page


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_page_is_current(name: str) -> None:
    assert (FOLDER / name).read_text() == page(name), "run `make reference`"


def test_every_error_says_what_happened_and_what_to_do() -> None:
    for cls in error_classes():
        if cls.__module__.endswith(".errors") and cls is not FedpressError:
            happened, _, advice = (vars(cls).get("__doc__") or "").partition("\n\n")
            assert happened.strip(), cls
            assert advice.strip(), cls


def test_every_setting_has_one_row() -> None:
    rows = [line.split("`")[1] for line in page("settings.md").splitlines() if line[:3] == "| `"]
    assert sorted(rows) == sorted(Settings.model_fields)
