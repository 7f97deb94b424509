"""The workflows parse, run what is there, and pin what they take from others by digest."""

from __future__ import annotations

import re
import subprocess
import tomllib
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
def test_what_a_workflow_runs_is_there(workflow: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for step in steps(workflow):
        command = step.get("run", "")
        for script in re.findall(r"(?:^|\s)(\.ci/[\w-]+|tests/compose/run)", command):
            assert (ROOT / script).stat().st_mode & 0o111, script
        for path in re.findall(r"(?:^|\s)((?:tests|benchmarks)/[\w./-]+)", command):
            assert (ROOT / path).exists(), path
        for module in re.findall(r"python -m (tests[\w.]+)", command):
            assert (ROOT / module.replace(".", "/")).with_suffix(".py").exists(), module
        for target in re.findall(r"(?:^|\s)make ([a-z-]+)", command):
            assert target in targets, target


def test_devices_are_tested_on_every_system_and_python_that_the_package_names() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [each.rsplit(" :: ", 1)[-1] for each in project["classifiers"]]
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    matrix = workflow["jobs"]["device"]["strategy"]["matrix"]
    pythons = [each for each in named if each.startswith("3.")]
    assert matrix["python"] == pythons
    assert ">=" + pythons[0] == project["requires-python"]
    runners = {"Linux": "ubuntu", "MacOS": "macos", "Windows": "windows"}
    for system in (each for each in named if each in runners):
        assert any(os.startswith(runners[system]) for os in matrix["os"]), system


def test_only_the_job_that_publishes_may_ask_for_an_identity() -> None:
    document = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    assert document["permissions"] == {"contents": "read"}
    allowed = {name: job.get("permissions", {}) for name, job in document["jobs"].items()}
    assert allowed == {
        "build": {},
        "provenance": {"id-token": "write", "attestations": "write"},
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
