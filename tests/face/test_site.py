"""The documentation as a site: every page is in the navigation, and no link leads nowhere."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

TREE = Path(__file__).parents[2]
DOCS = TREE / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), *TREE.glob("*.md"), *TREE.glob("examples/*/*.md")])
_LINK = re.compile(r"(?<!!)\[[^\]\[]*\]\(([^)\s]+)\)")
_FROM_ELSEWHERE = re.compile(
    r"<(?:script|img|iframe|link)\b[^>]* (?:src|href)=\"?(?:https?:)?//[^>]*>"
)
_CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)


def named(entry: Any) -> Iterator[str]:
    """The pages of a part of the navigation."""
    if isinstance(entry, str):
        yield entry
        return
    for each in entry.values() if isinstance(entry, dict) else entry:
        yield from named(each)


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub and MkDocs make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ +(.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.lower()).strip().replace(" ", "-") for each in headings}


def test_the_navigation_has_every_page_once() -> None:
    pages = list(named(yaml.safe_load((TREE / "mkdocs.yml").read_text())["nav"]))
    assert sorted(pages) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(TREE)))
def test_links_lead_somewhere(page: Path) -> None:
    links = _LINK.findall(_CODE.sub("", page.read_text()))
    for link in links:
        target, _, anchor = link.partition("#")
        if "://" in target or target.startswith("mailto:"):
            continue
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), f"{link} leads nowhere"
        inside = page.is_relative_to(DOCS)
        assert not inside or file.is_relative_to(DOCS), f"{link} leads out of the site"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), f"{link} has no such heading"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("builder", "options", "folder"),
    [
        ("mkdocs", ["--strict"], "site"),
        ("zensical", ["--config-file", "zensical.yml", "--clean", "--strict"], "zensical"),
    ],
)
def test_the_site_builds_without_a_warning_and_loads_nothing_from_elsewhere(
    builder: str, options: list[str], folder: str
) -> None:
    pytest.importorskip(builder, reason="the builders come with fedpress[docs]")
    command = [sys.executable, "-m", builder, "build", *options]
    built = subprocess.run(command, cwd=TREE, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    site = TREE / "build" / folder
    for page in pages:
        path = re.sub(r"(README|index)\.md$|\.md$", lambda m: "" if m[1] else "/", page)
        text = (site / path / "index.html").read_text()
        assert not _FROM_ELSEWHERE.findall(text), page
