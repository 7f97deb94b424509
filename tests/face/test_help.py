"""What `--help` of every command shows in 80 columns, how commands end, and completion."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner, Result

from fedpress.cli import app
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
    [path for path in below(app) if path not in (("serve",), ("migrate",))],
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
        told += [f"{name} {each.help}" for name, each in command.commands.items()]
    shown = unwrapped(answer.output)
    for text in told:
        assert text is not None
        assert unwrapped(text) in shown


def test_commands_are_listed_as_they_are_defined() -> None:
    _, _, listed = invoke("--help").output.partition("Commands:\n")
    names = [line.split()[0] for line in listed.splitlines() if line[:3].strip()]
    assert names[: len(app.commands)] == list(app.commands)


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
    answer = invoke("warmup")
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
