"""The commands `fedpress task ...`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fedpress.cli.rounds import privacy_spent
from fedpress.cli.tables import echo, fields, table, terminal_width
from fedpress.cli.task_check import check_task
from fedpress.command_line import PATH, Group, argument, as_json, operates
from fedpress_protocols.errors import ConfigurationError

if TYPE_CHECKING:
    from fedpress.operator import Operator
    from fedpress_protocols.messages import PrivacyStatus, TaskSummary

_SPENT = (
    "devices without a participation left get no more work in this task, and it waits for others; "
    "enrol more devices, or start a new task from the model"
)


@click.group("task", cls=Group)
def tasks() -> None:
    """Create, check, list, continue, pause and cancel tasks."""


@tasks.command("create")
@argument("config", type=PATH, help="The task's configuration, YAML or JSON.")
@argument("model", type=PATH, help="The initial model, safetensors.")
@as_json
@operates
def create_task(server: Operator, config: Path, model: Path, as_json: bool) -> None:
    """Register a model and start a task on it; the configuration's `model` is filled in."""
    from fedpress.task_file import read_model, task_config

    initial = read_model(model)
    parsed = task_config(config, initial.digest)
    server.register_model(initial)
    _echo(server.create_task(parsed), as_json)


tasks.add_command(check_task)


@tasks.command("list")
@as_json
@operates
def list_tasks(server: Operator, as_json: bool) -> None:
    """List all tasks with their progress."""
    summaries = server.tasks()
    rows = [
        (each.task, each.state, f"{each.round}/{each.rounds}", each.lane, each.model[:12],
         each.reason)
        for each in summaries
    ]  # fmt: skip
    headings = ("task", "state", "rounds", "lane", "model", "why")
    lines = table(headings, rows, width=terminal_width()) if rows else ["no task yet"]
    echo(summaries, lines, as_json=as_json)


@tasks.command("show")
@click.argument("task")
@click.option(
    "--configuration", is_flag=True, help="Print its configuration instead: JSON, with defaults."
)
@as_json
@operates
def show_task(server: Operator, task: str, configuration: bool, as_json: bool) -> None:
    """Show one task: progress and models."""
    if configuration:
        click.echo(server.configuration(task).model_dump_json(indent=2))
        return
    summary = server.task(task)
    echo(summary, _fields(summary, _privacy(server, task)), as_json=as_json)


@tasks.command("continue")
@click.argument("task")
@click.option("--rounds", type=click.IntRange(min=1), default=1, help="How many more.")
@click.option(
    "--model", type=PATH, help="Safetensors file to start from; default: the task's model."
)
@as_json
@operates
def continue_task(
    server: Operator, task: str, rounds: int, model: Path | None, as_json: bool
) -> None:
    """Add rounds to an ended task; its optimizer starts from a fresh state."""
    from fedpress.task_file import read_model
    from fedpress_protocols.messages import Continuation

    before = server.task(task)
    digest = before.model
    if model is not None:
        digest = server.register_model(read_model(model))
    more = Continuation(after_round=before.round, rounds=rounds, model=digest)
    summary = server.continue_task(task, more)
    echo(summary, _fields(summary, _privacy(server, task), continues=True), as_json=as_json)


@tasks.command("pause")
@click.argument("task")
@as_json
@operates
def pause_task(server: Operator, task: str, as_json: bool) -> None:
    """Pause a running task: its devices get no work until `fedpress task resume`."""
    _echo(server.pause_task(task), as_json)


@tasks.command("resume")
@click.argument("task")
@as_json
@operates
def resume_task(server: Operator, task: str, as_json: bool) -> None:
    """Resume a task that `fedpress task pause` holds."""
    _echo(server.resume_task(task), as_json)


@tasks.command("finish")
@click.argument("task")
@as_json
@operates
def finish_task(server: Operator, task: str, as_json: bool) -> None:
    """Finish a task that paused after its last round, and release its devices; `fedpress task
    cancel` ends any other."""
    _echo(server.finish_task(task), as_json)


@tasks.command("cancel")
@click.argument("task")
@click.option("--why", default="", show_default=False, help="For the task's record.")
@as_json
@operates
def cancel_task(server: Operator, task: str, why: str, as_json: bool) -> None:
    """Cancel a task before its last round; its last model stays."""
    _echo(server.cancel_task(task, why), as_json)


@tasks.command("model")
@click.argument("task")
@argument("file", type=PATH, help="Where to write the safetensors file.")
@click.option("--best", is_flag=True, help="The model with the best measured metric so far.")
@click.option("--newest", is_flag=True, help="The newest model, also where an average is served.")
@as_json
@operates
def save_model(
    server: Operator, task: str, file: Path, best: bool, newest: bool, as_json: bool
) -> None:
    """Save the model that a task serves: the newest, or the average where that is better."""
    summary = server.task(task)
    if best and newest:
        raise ConfigurationError("--best and --newest name two models", hint="remove one of them")
    digest = summary.best if best else summary.model if newest else summary.served
    if digest is None:
        raise ConfigurationError(
            f"no model of {task!r} has been measured",
            hint="devices must report the metric that the task's evaluation terms name",
        )
    data = server.model(digest).to_bytes()
    file.write_bytes(data)
    saved = {"task": task, "model": digest, "file": str(file), "num_bytes": len(data)}
    click.echo(json.dumps(saved, indent=2) if as_json else f"{file}: {digest}")


def _echo(task: TaskSummary, as_json: bool) -> None:
    echo(task, _fields(task), as_json=as_json)


def _privacy(server: Operator, task: str) -> PrivacyStatus | None:
    """The privacy spent up to the newest attempt; None for a task without privacy terms."""
    newest = server.rounds(task, limit=1)
    return newest[-1].privacy if newest else None


def _fields(
    task: TaskSummary, privacy: PrivacyStatus | None = None, *, continues: bool = False
) -> Iterator[str]:
    is_spent = privacy is not None and privacy.participations >= privacy.max_participations
    pairs = [
        ("task", task.task),
        ("state", task.state),
        ("why", task.reason),
        ("rounds", f"{task.round} of {task.rounds}"),
        ("lane", task.lane),
        ("model", task.model),
        *((f"  {name}", digest) for name, digest in task.published.items()),
        ("best", task.best or ""),
        ("downloads", "coded" if task.downlink else "plain"),
        ("privacy", "" if privacy is None else privacy_spent(privacy)),
        ("hint", _SPENT if continues and is_spent else ""),
    ]
    return fields(pairs, width=terminal_width())
