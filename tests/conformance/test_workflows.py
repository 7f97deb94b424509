"""The workflows parse, run what is there, and pin what they take from others by digest."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def steps(workflow: Path) -> list[dict[str, Any]]:
    jobs = yaml.safe_load(workflow.read_text())["jobs"].values()
    return [step for job in jobs for step in job["steps"]]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_by_digest_and_name_their_version(workflow: Path) -> None:
    lines = re.findall(r"uses: (.*)", workflow.read_text())
    assert lines
    for line in lines:
        assert re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40} +# v\d+\.\d+\.\d+", line), line


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_the_scripts_of_a_workflow_are_there(workflow: Path) -> None:
    for step in steps(workflow):
        for script in re.findall(r"(?:^|\s)(\.ci/[\w-]+)", step.get("run", "")):
            assert (ROOT / script).stat().st_mode & 0o111, script


def test_only_the_job_that_publishes_may_ask_for_an_identity() -> None:
    document = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    assert document["permissions"] == {"contents": "read"}
    allowed = {name: job.get("permissions", {}) for name, job in document["jobs"].items()}
    assert allowed == {
        "build": {},
        "pypi": {"id-token": "write"},
        "notes": {"contents": "write"},
    }


def test_the_notes_of_a_release_are_its_section_of_the_changelog() -> None:
    def printed(version: str) -> subprocess.CompletedProcess[str]:
        script = ROOT / ".ci" / "changelog-section"
        return subprocess.run([script, version], capture_output=True, text=True, check=False)

    unreleased = printed("Unreleased")
    assert unreleased.returncode == 0, unreleased.stderr
    assert unreleased.stdout in (ROOT / "CHANGELOG.md").read_text()
    assert "## [" not in unreleased.stdout
    missing = printed("99.0.0")
    assert (missing.returncode, missing.stdout) == (1, "")
    assert "no section ## [99.0.0]" in missing.stderr


@pytest.mark.parametrize("form", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")))
def test_issue_forms_parse(form: Path) -> None:
    document = yaml.safe_load(form.read_text())
    if form.name != "config.yml":
        assert {"name", "description", "body"} <= document.keys()
        assert all(each["type"] and each["attributes"] for each in document["body"])
