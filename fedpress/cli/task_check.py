"""The command `fedpress task check`."""

from __future__ import annotations

from pathlib import Path

import click

from fedpress.command_line import PATH, Command, argument


@click.command("check", cls=Command)
@argument("config", type=PATH, help="The task's configuration, YAML or JSON.")
@click.option("--model", type=PATH, help="The initial model, safetensors; allows more checks.")
def check_task(config: Path, model: Path | None) -> None:
    """Check a task's configuration as a server would, without one."""
    from fedpress.task_file import checked, summary

    for line in summary(config, checked(config, model)):
        click.echo(line)
