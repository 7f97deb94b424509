"""The glossary: every term it explains is one that the specification or the other pages use."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GLOSSARY = ROOT / "docs" / "glossary.md"
TERMS = sorted(set(re.findall(r"\*\*([^*]+)\*\*", GLOSSARY.read_text())))
PAGES = [
    *(ROOT / "protocols").glob("SPEC*.md"),
    *(each for each in (ROOT / "docs").rglob("*.md") if each != GLOSSARY),
    ROOT / "README.md",
]
TEXT = " ".join(" ".join(page.read_text().lower().split()) for page in PAGES)


@pytest.mark.parametrize("term", TERMS)
def test_a_term_of_the_glossary_is_used_elsewhere(term: str) -> None:
    assert re.search(rf"\b{re.escape(term.lower())}", TEXT), f"no other page uses {term!r}"


def test_readme_and_architecture_lead_to_the_glossary() -> None:
    assert "docs/glossary.md" in (ROOT / "README.md").read_text()
    assert "glossary.md" in (ROOT / "docs" / "architecture.md").read_text()
