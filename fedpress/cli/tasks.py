"""The commands `fedpress task ...` and `fedpress token ...`."""

from __future__ import annotations

from pathlib import Path

import click

from fedpress.cli.task_check import check_task
from fedpress.command_line import PATH, Group, admin_token, argument, operator, read, url
from fedpress_protocols.errors import ConfigurationError


@click.group("task", cls=Group)
def tasks() -> None:
    """Start, list, watch and cancel tasks."""


@tasks.command("create")
@argument("config", type=PATH, help="The task's configuration, YAML or JSON.")
@argument("model", type=PATH, help="The initial model, safetensors.")
@admin_token
@url
def create_task(config: Path, model: Path, admin_token: str, url: str) -> None:
    """Register a model and start a task on it; the configuration's `model` is filled in."""
    from fedpress.task_file import task_config
    from fedpress_protocols.model import Model

    initial = Model.from_bytes(read(model))
    parsed = task_config(config, initial.digest)
    with operator(url, admin_token) as server:
        server.register_model(initial)
        click.echo(server.create_task(parsed).model_dump_json(indent=2))


tasks.add_command(check_task)


@tasks.command("list")
@admin_token
@url
def list_tasks(admin_token: str, url: str) -> None:
    """Every task and how far it is."""
    with operator(url, admin_token) as server:
        for task in server.tasks():
            why = f"  {task.reason}" if task.reason else ""
            click.echo(f"{task.task}  {task.state}  {task.round}/{task.rounds} rounds{why}")


@tasks.command("rounds")
@click.argument("task")
@admin_token
@click.option(
    "--round",
    "number",
    type=click.IntRange(min=1),
    help="Only this one, with metrics by group and by class.",
)
@url
def show_rounds(task: str, admin_token: str, number: int | None, url: str) -> None:
    """Every attempt at every round of a task, one JSON object a line."""
    with operator(url, admin_token) as server:
        for status in server.rounds(task) if number is None else [server.round(task, number)]:
            click.echo(status.model_dump_json())


@tasks.command("continue")
@click.argument("task")
@admin_token
@click.option("--rounds", type=click.IntRange(min=1), default=1, help="How many more.")
@click.option("--model", type=PATH, help="Begin at this safetensors file, not at the task's model.")
@url
def continue_task(task: str, admin_token: str, rounds: int, model: Path | None, url: str) -> None:
    """Give a task that has stopped more rounds; its optimizer begins anew."""
    from fedpress_protocols.messages import Continuation
    from fedpress_protocols.model import Model

    with operator(url, admin_token) as server:
        before = server.task(task)
        digest = before.model
        if model is not None:
            digest = server.register_model(Model.from_bytes(read(model)))
        more = Continuation(after_round=before.round, rounds=rounds, model=digest)
        click.echo(server.continue_task(task, more).model_dump_json(indent=2))


@tasks.command("pause")
@click.argument("task")
@admin_token
@url
def pause_task(task: str, admin_token: str, url: str) -> None:
    """Give a running task's devices no work until it is resumed; nothing is lost."""
    with operator(url, admin_token) as server:
        server.pause_task(task)


@tasks.command("resume")
@click.argument("task")
@admin_token
@url
def resume_task(task: str, admin_token: str, url: str) -> None:
    """Give a task's devices work again."""
    with operator(url, admin_token) as server:
        server.resume_task(task)


@tasks.command("finish")
@click.argument("task")
@admin_token
@url
def finish_task(task: str, admin_token: str, url: str) -> None:
    """End a paused task for good, so that its devices may go."""
    with operator(url, admin_token) as server:
        server.finish_task(task)


@tasks.command("cancel")
@click.argument("task")
@admin_token
@url
def cancel_task(task: str, admin_token: str, url: str) -> None:
    """End a task before its last round; its last model stays."""
    with operator(url, admin_token) as server:
        server.cancel_task(task)


@tasks.command("model")
@click.argument("task")
@argument("file", type=PATH, help="Where to write the safetensors file.")
@admin_token
@click.option("--best", is_flag=True, help="The one that devices measured best so far.")
@url
def save_model(task: str, file: Path, admin_token: str, best: bool, url: str) -> None:
    """Save a task's newest model."""
    with operator(url, admin_token) as server:
        found = server.task(task)
        digest = found.best if best else found.model
        if digest is None:
            raise ConfigurationError(
                f"no model of {task!r} has been measured",
                hint="devices must report the metric that the task's evaluation terms name",
            )
        model = server.model(digest)
    file.write_bytes(model.to_bytes())
    click.echo(f"{file}: {model.digest}")


@click.group("token", cls=Group)
def tokens() -> None:
    """Enrolment tokens."""


@tokens.command("create")
@admin_token
@url
@click.option(
    "--uses", type=click.IntRange(min=1), default=1, help="Devices that may enrol with it."
)
@click.option(
    "--hours", type=click.FloatRange(min=0.01), default=24.0, help="How long it is valid."
)
@click.option("--note", default="", show_default=False, help="For your own records.")
def create_token(admin_token: str, url: str, uses: int, hours: float, note: str) -> None:
    """Print a new enrolment token; it is not stored and cannot be shown again."""
    with operator(url, admin_token) as server:
        click.echo(server.create_token(uses=uses, expires_in=3600 * hours, note=note))
