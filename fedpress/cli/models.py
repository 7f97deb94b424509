"""The commands `fedpress model ...`: versions of a task's model, aliases, export, retention."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import click

from fedpress.command_line import PATH, Group, admin_token, argument, operator, url
from fedpress_protocols.errors import ConfigurationError

_WHICH = "A version's number, an alias, newest or best."


@click.group("model", cls=Group)
def models() -> None:
    """Versions of a task's model: list, promote, roll back, export."""


@models.command("list")
@click.argument("task")
@admin_token
@click.option("--limit", type=click.IntRange(1, 1000), default=50, help="Versions, the newest.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON in place of the table.")
@url
def list_models(task: str, admin_token: str, limit: int, as_json: bool, url: str) -> None:
    """List a task's versions with their aliases, the newest first."""
    from fedpress.compressor_table import aligned

    with operator(url, admin_token) as server:
        found = server.versions(task, limit=limit)
    if as_json:
        rows = [version.model_dump(mode="json") for version in found]
        click.echo(json.dumps(rows, indent=2))
        return
    table: list[Sequence[str]] = [("version", "model", "updates", "bytes", "made", "aliases", "")]
    for each in found:
        marks = [name for name in ("newest", "best") if getattr(each, f"is_{name}")]
        if each.collected_at is not None:
            marks.append("collected")
        table.append(
            (
                str(each.version),
                each.model[:12],
                str(each.num_updates),
                f"{each.num_bytes:,}",
                time.strftime("%Y-%m-%d %H:%M", time.gmtime(each.created_at)),
                ", ".join(each.aliases),
                ", ".join(marks),
            )
        )
    for line in aligned(table):
        click.echo(line)


@models.command("show")
@click.argument("task")
@argument("which", help=_WHICH)
@admin_token
@url
def show_model(task: str, which: str, admin_token: str, url: str) -> None:
    """Show what a version was made of, as JSON."""
    with operator(url, admin_token) as server:
        click.echo(server.version(task, which).model_dump_json(indent=2))


@models.command("aliases")
@click.argument("task")
@admin_token
@url
def list_aliases(task: str, admin_token: str, url: str) -> None:
    """Show where aliases point and have pointed, one JSON object a line."""
    with operator(url, admin_token) as server:
        for alias in server.aliases(task):
            click.echo(alias.model_dump_json())


@models.command("promote")
@click.argument("task")
@argument("which", help=_WHICH)
@argument("alias", help="Such as candidate or production.")
@admin_token
@click.option(
    "--expect",
    metavar="N|none",
    help="Only if the alias points to version N now; none: only if it is new.",
)
@url
def promote_model(
    task: str, which: str, alias: str, admin_token: str, expect: str | None, url: str
) -> None:
    """Point an alias to a version."""
    with operator(url, admin_token) as server:
        version = server.version(task, which).version
        moved = server.promote(task, alias, version, expect=_expected(expect))
    click.echo(f"{moved.alias}: version {moved.version}, {moved.model}")


@models.command("rollback")
@click.argument("task")
@click.argument("alias")
@admin_token
@click.option("--expect", metavar="N", help="Only if the alias points to version N now.")
@url
def roll_back_model(task: str, alias: str, admin_token: str, expect: str | None, url: str) -> None:
    """Point an alias to where it pointed before."""
    expected = _expected(expect)
    if expected == "none":
        raise ConfigurationError("--expect none, and what points nowhere cannot be rolled back")
    with operator(url, admin_token) as server:
        moved = server.roll_back(task, alias, expect=expected)
    click.echo(f"{moved.alias}: version {moved.version}, {moved.model}")


@models.command("export")
@click.argument("task")
@argument("which", help=_WHICH)
@argument("file", type=PATH, help="Where to write the safetensors file.")
@admin_token
@url
def export_model(task: str, which: str, file: Path, admin_token: str, url: str) -> None:
    """Save a version, and beside it FILE.json with its lineage."""
    with operator(url, admin_token) as server:
        lineage = server.version(task, which)
        data = server.model(lineage.model).to_bytes()
    beside = file.with_name(file.name + ".json")
    file.write_bytes(data)
    beside.write_text(lineage.model_dump_json(indent=2) + "\n")
    click.echo(f"{file}: version {lineage.version} of {task}, {lineage.model}")
    click.echo(f"{beside}: {lineage.num_updates} updates, {len(lineage.ancestors)} models before")


@models.command("collect")
@admin_token
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@url
def collect_models(admin_token: str, dry_run: bool, url: str) -> None:
    """Remove the files of models that tasks' retention gives up, now and not within the hour."""
    with operator(url, admin_token) as server:
        found = server.collect(dry_run=dry_run)
    for each in found.models:
        named = ", ".join(f"{task} {version}" for task, version in sorted(each.versions.items()))
        click.echo(f"{each.model[:12]}  {each.num_bytes:,} bytes  {named}")
    verb = "would go" if dry_run else "gone"
    click.echo(f"{len(found.models)} models, {found.num_bytes:,} bytes {verb}")


def _expected(text: str | None) -> int | Literal["any", "none"]:
    if text is None:
        return "any"
    if text == "none":
        return "none"
    if text.isdecimal():
        return int(text)
    raise ConfigurationError(f"--expect {text!r}", hint="give a version's number, or none")
