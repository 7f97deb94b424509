"""What `--help` of every command shows in 80 columns, how commands end, and completion."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner, Result

from fedpress.cli import app
from fedpress.cli.renamed import RENAMED
from fedpress_compression import kernels


def below(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of a command and of every one below it."""
    yield path
    if isinstance(command, click.Group):
        for name, each in command.commands.items():
            yield from below(each, (*path, name))


def command_at(path: tuple[str, ...]) -> click.Command:
    command: click.Command = app
    for name in path:
        assert isinstance(command, click.Group)
        command = command.commands[name]
    return command


def invoke(*arguments: str, **environment: str) -> Result:
    unset = dict.fromkeys(("FEDPRESS_URL", "FEDPRESS_ADMIN_TOKEN", "FEDPRESS_TOKEN"))
    return CliRunner().invoke(app, arguments, env={**unset, **environment})


def of_parameter(parameter: click.Parameter) -> Iterator[str]:
    """What help must say of it."""
    if isinstance(parameter, click.Option):
        yield from parameter.opts
    else:
        yield parameter.human_readable_name
    yield getattr(parameter, "help", None) or ""
    if parameter.envvar:
        yield f"env var: {parameter.envvar}"
    if parameter.required and isinstance(parameter, click.Option):
        yield "required]"


def unwrapped(text: str) -> str:
    """Without blanks, as a line may end at a blank or within a word behind a hyphen."""
    return "".join(text.split())


@pytest.mark.parametrize(
    "path",
    list(below(app)),
    ids=lambda path: " ".join(path),
)
def test_help_says_everything_in_80_columns(path: tuple[str, ...]) -> None:
    command = command_at(path)
    answer = invoke(*path, "--help")
    assert answer.exit_code == 0, answer.output
    assert answer.output == invoke(*path, "-h").output
    assert max(map(len, answer.output.splitlines())) <= 80
    told = [command.help, *(text for each in command.params for text in of_parameter(each))]
    if isinstance(command, click.Group):
        told += [
            f"{name} {each.help}" for name, each in command.commands.items() if not each.hidden
        ]
    shown = unwrapped(answer.output)
    for text in told:
        assert text is not None
        assert unwrapped(text) in shown


def test_the_commands_are_listed_by_section_on_one_screen() -> None:
    answer = invoke("--help")
    shown = [name for name, each in app.commands.items() if not each.hidden]
    names = [line.split()[0] for line in answer.output.splitlines() if re.match("  [a-z]", line)]
    assert [name for name in names if name in app.commands] == shown
    assert len(answer.output.splitlines()) <= 40


@pytest.mark.parametrize(("old", "new"), RENAMED.items(), ids=lambda words: " ".join(words))
def test_an_old_name_is_the_new_command(old: tuple[str, ...], new: tuple[str, ...]) -> None:
    answer = invoke(*old, "--help")
    assert answer.exit_code == 0, answer.output
    assert answer.stdout == invoke(*new, "--help").stdout
    assert answer.stderr == ""  # no terminal: scripts may read it


def test_an_old_name_is_noted_in_a_terminal_alone() -> None:
    controller, terminal = os.openpty()
    done = subprocess.run(
        [sys.executable, "-m", "fedpress", "token", "--help"],
        stdout=subprocess.PIPE,
        stderr=terminal,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=True,
    )
    os.close(terminal)
    note = os.read(controller, 1000).decode()
    os.close(controller)
    assert "fedpress token is now fedpress devices token" in note
    assert b"is now" not in done.stdout


def test_old_names_hide_no_command_of_today() -> None:
    assert not {path for path in below(app) if path in RENAMED}


def test_an_option_may_come_from_the_environment() -> None:
    missing = invoke("task", "list")
    assert missing.exit_code == 2
    assert "Missing option '--admin-token' (env var: 'FEDPRESS_ADMIN_TOKEN')" in missing.stderr
    given = {"FEDPRESS_URL": "http://127.0.0.1:9", "FEDPRESS_ADMIN_TOKEN": "x" * 16}
    assert "no answer from http://127.0.0.1:9" in str(invoke("task", "list", **given).exception)


def test_ctrl_c_ends_any_command_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(kernels, "warm_up", interrupted)
    answer = invoke("client", "warmup")
    assert (answer.exit_code, answer.output) == (130, "")


def test_the_shell_completes_commands() -> None:
    answer = fedpress_process(
        "from fedpress.cli import app; app(prog_name='fedpress')",
        _FEDPRESS_COMPLETE="bash_complete",
        COMP_WORDS="fedpress task c",
        COMP_CWORD="2",
    )
    commands = ["cancel", "check", "continue", "create"]
    assert answer.split() == [f"plain,{name}" for name in commands]


def test_the_command_line_needs_nothing_but_click() -> None:
    code = (
        "import sys; from fedpress.cli import app; app(['compressors'], standalone_mode=False); "
        "print(sorted({'typer', 'rich', 'pygments', 'click'} & sys.modules.keys()))"
    )
    assert fedpress_process(code).splitlines()[-1] == "['click']"


def fedpress_process(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
