"""A strategy is complete with a public name and a place in the guide (CONTRIBUTING.md)."""

from __future__ import annotations

from pathlib import Path

import pytest

import fedpress.strategies
from fedpress_strategies import strategies

GUIDE = (Path(__file__).parents[2] / "docs" / "strategies.md").read_text()
OWN = {
    identifier: build
    for identifier, build in strategies().items()
    if build.__module__.startswith("fedpress_strategies.")
}


@pytest.mark.parametrize("identifier", OWN)
def test_users_import_it_from_the_public_name(identifier: str) -> None:
    name = OWN[identifier].__name__
    assert name in fedpress.strategies.__all__, (
        f"import {name} in fedpress/strategies.py and add it to __all__ there"
    )


@pytest.mark.parametrize("identifier", OWN)
def test_the_guide_has_it(identifier: str) -> None:
    assert f"`{identifier}`" in GUIDE, f"say in docs/strategies.md when to choose `{identifier}`"
