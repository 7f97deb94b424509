"""docs/operations/command-line.md says what is: exit codes, --json, completion, runbooks."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from fedpress.cli import app, outcomes
from tests.face.test_help import below, command_at

ROOT = Path(__file__).parents[2]
OPERATIONS = ROOT / "docs" / "operations"
PAGE = (OPERATIONS / "command-line.md").read_text()


def test_the_page_has_every_exit_code() -> None:
    codes = {int(code) for code in re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE)}
    assert codes == {
        value for name, value in vars(outcomes).items() if name.isupper() and isinstance(value, int)
    }


def test_every_command_that_asks_a_server_prints_json_if_asked() -> None:
    without = []
    for path in below(app):
        command = command_at(path)
        options = {name for each in command.params for name in each.opts}
        asks = "--admin-token" in options and not isinstance(command, click.Group)
        if asks and "--json" not in options:
            without.append(" ".join(path))
    assert without == ["client relay"]


def test_the_pages_name_commands_and_options_that_are_there() -> None:
    for page in sorted(OPERATIONS.glob("*.md")):
        for line in re.findall(r"fedpress(?: [a-z-]+)+(?: [^`\n|#]*)?", page.read_text()):
            words = line.split()[1:]
            path: tuple[str, ...] = ()
            command: click.Command = app
            while words and isinstance(command, click.Group) and words[0] in command.commands:
                path = (*path, words.pop(0))
                command = command_at(path)
            if not path or path[:2] in (("server", "run"), ("server", "migrate")):
                continue
            known = {name for each in command.params for name in each.opts} | {"--help"}
            used = {word.partition("=")[0] for word in words if re.fullmatch(r"--[a-z-]+", word)}
            if "&&" not in words:
                assert used <= known, f"{page.name}: {line}"


def test_links_between_the_pages_lead_somewhere() -> None:
    for page in sorted(OPERATIONS.glob("*.md")):
        for link in re.findall(r"\]\(([^)#:]+\.md)", page.read_text()):
            assert (page.parent / link).is_file(), f"{page.name} links to {link}"


def test_an_alert_leads_to_a_page_that_is_there() -> None:
    rules = (ROOT / "deploy" / "monitoring" / "alerts.yml").read_text()
    named = set(re.findall(r"docs/[a-z/-]+\.md", rules))
    assert "docs/operations/round-stuck.md" in named
    assert "docs/operations/disk-full.md" in named
    for page in named:
        assert (ROOT / page).is_file(), page


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_for_each_shell(shell: str) -> None:
    done = CliRunner().invoke(app, ["completion", shell])
    assert done.exit_code == 0
    assert f"_FEDPRESS_COMPLETE={shell}_complete" in done.output


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_a_command_by_the_script(tmp_path: Path) -> None:
    command = tmp_path / "fedpress"
    path = ":".join(sys.path)
    command.write_text(
        f"#!/bin/sh\nPYTHONPATH='{path}' exec '{sys.executable}' -c "
        "'from fedpress.cli import main; main()' \"$@\"\n"
    )
    command.chmod(0o700)
    asked = (
        f'PATH="{tmp_path}:$PATH"; eval "$(fedpress completion bash)"; '
        "COMP_WORDS=(fedpress round w); COMP_CWORD=2; _fedpress_completion fedpress; "
        'echo "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", asked], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "watch", done.stderr
