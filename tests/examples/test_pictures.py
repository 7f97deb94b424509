"""Every example shows a picture of its result, and the command that draws it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
READMES = sorted(page for page in EXAMPLES.glob("*/README.md") if page.parent.name != "notebooks")
"""Notebooks draw their pictures when they are run, and hold none."""
_PICTURE = re.compile(r"!\[([^\]]+)\]\(([^)\s]+)\)")
_BLOCK = re.compile(r"^```\n(.*?)^```", re.MULTILINE | re.DOTALL)
MOST_BYTES = {".svg": 60_000, ".png": 100_000}


@pytest.mark.parametrize("page", READMES, ids=lambda page: str(page.parent.name))
def test_an_example_shows_its_result_and_names_the_command(page: Path) -> None:
    text = page.read_text()
    pictures = _PICTURE.findall(text)
    assert pictures
    commands = "\n".join(_BLOCK.findall(text))
    for described, name in pictures:
        picture = page.parent / name
        assert described.strip()
        assert picture.stat().st_size < MOST_BYTES[picture.suffix]
        assert picture.read_bytes().startswith((b"\x89PNG", b"<?xml"))
        assert re.search(rf"^(python|fedpress plot) .*{re.escape(name)}$", commands, re.MULTILINE)
