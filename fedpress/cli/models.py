"""The commands `fedpress model ...`: versions of a task's model, aliases, export, retention."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from fedpress.cli.tables import echo, fields, moment, table, terminal_width
from fedpress.command_line import PATH, Group, argument, as_json, operates
from fedpress_protocols.errors import ConfigurationError

if TYPE_CHECKING:
    from fedpress.operator import Operator
    from fedpress_protocols.registry import Alias, ModelLineage

_WHICH = "A version's number, an alias, newest or best."


@click.group("model", cls=Group)
def models() -> None:
    """Manage model versions: list, promote, roll back, export."""


@models.command("list")
@click.argument("task")
@click.option("--limit", type=click.IntRange(1, 1000), default=50, help="Versions, the newest.")
@click.option("--before", type=click.IntRange(min=0), help="Only versions older than this one.")
@as_json
@operates
def list_models(server: Operator, task: str, limit: int, before: int | None, as_json: bool) -> None:
    """List a task's versions with their aliases, the newest first."""
    versions = server.versions(task, before=before, limit=limit)
    rows: list[Sequence[str]] = []
    for each in versions:
        marks = [
            *each.aliases,
            *(name for name in ("newest", "best") if getattr(each, f"is_{name}")),
        ]
        if each.collected_at is not None:
            marks.append("collected")
        rows.append(
            (
                str(each.version),
                each.model[:12],
                str(each.num_updates),
                f"{each.num_bytes:,}",
                time.strftime("%Y-%m-%d %H:%M", time.gmtime(each.created_at)),
                ", ".join(marks),
            )
        )
    headings = ("version", "model", "updates", "bytes", "made, UTC", "called")
    echo(versions, table(headings, rows, width=terminal_width()), as_json=as_json)


@models.command("show")
@click.argument("task")
@argument("which", help=_WHICH)
@as_json
@operates
def show_model(server: Operator, task: str, which: str, as_json: bool) -> None:
    """Show a version's lineage."""
    lineage = server.version(task, which)
    echo(lineage, _lineage(lineage), as_json=as_json)


@models.command("aliases")
@click.argument("task")
@as_json
@operates
def list_aliases(server: Operator, task: str, as_json: bool) -> None:
    """Show the aliases and their history."""
    aliases = server.aliases(task)
    rows = [
        (each.alias, str(each.version), each.model[:12], moment(each.history[-1].moved_at),
         ", ".join(f"{move.version}{' (undone)' if move.undone_at else ''}"
                   for move in each.history))
        for each in aliases
    ]  # fmt: skip
    headings = ("alias", "version", "model", "last moved", "moves, the oldest first")
    lines = table(headings, rows, width=terminal_width()) if rows else ["no alias yet"]
    echo(aliases, lines, as_json=as_json)


@models.command("promote")
@click.argument("task")
@argument("which", help=_WHICH)
@argument("alias", help="Such as candidate or production.")
@click.option(
    "--expect",
    metavar="N|none",
    help="Only if the alias points to version N now; none: only if it is new.",
)
@click.option(
    "--require",
    "required",
    multiple=True,
    metavar="WHAT>=N",
    help="Only if the version's metrics on devices meet this: 'accuracy>=0.95', "
    "'groups.accuracy>=0.9' for each group, 'classes[7].accuracy>=0.8', 'devices>=20'. May be "
    "repeated.",
)
@click.option("--dry-run", is_flag=True, help="Check the requirements without moving the alias.")
@as_json
@operates
def promote_model(
    server: Operator,
    task: str,
    which: str,
    alias: str,
    expect: str | None,
    required: tuple[str, ...],
    dry_run: bool,
    as_json: bool,
) -> None:
    """Point an alias to a version that meets the requirements."""
    from fedpress_protocols.promotion_gate import Requirement, checked

    requirements = [Requirement.parsed(text) for text in required]
    expected = _expected(expect)
    version = server.version(task, which)
    if requirements:
        status = server.round(task, version.version) if version.version else None
        for finding in checked(requirements, version, status):
            if not as_json:
                click.echo(f"{'ok' if finding.holds else 'NO':3} {finding}")
    if dry_run:
        line = f"{alias} would be version {version.version}, {version.model}"
        echo(version, [line], as_json=as_json)
    else:
        _echo(server.promote(task, alias, version.version, expect=expected), as_json)


@models.command("rollback")
@click.argument("task")
@click.argument("alias")
@click.option("--expect", metavar="N", help="Only if the alias points to version N now.")
@as_json
@operates
def roll_back_model(
    server: Operator, task: str, alias: str, expect: str | None, as_json: bool
) -> None:
    """Roll an alias back to the version that it pointed to before."""
    expected = _expected(expect)
    if expected == "none":
        raise ConfigurationError("--expect none, and what points nowhere cannot be rolled back")
    _echo(server.roll_back(task, alias, expect=expected), as_json)


@models.command("export")
@click.argument("task")
@argument("which", help=_WHICH)
@argument("file", type=PATH, help="Where to write the safetensors file.")
@click.option(
    "--materialised",
    is_flag=True,
    help="Experimental: of a task of zeroth-order training, the tensors that its weights stand "
    "for, with their base.",
)
@as_json
@operates
def export_model(
    server: Operator, task: str, which: str, file: Path, materialised: bool, as_json: bool
) -> None:
    """Save a version, and beside it FILE.json with its lineage."""
    lineage = server.version(task, which)
    model = server.model(lineage.model)
    if materialised:
        from fedpress_protocols.subspace import materialised as whole

        model = whole(model)
    data = model.to_bytes()
    beside = file.with_name(file.name + ".json")
    file.write_bytes(data)
    beside.write_text(lineage.model_dump_json(indent=2) + "\n", encoding="utf-8")
    lines = [
        f"{file}: version {lineage.version} of {task}, {lineage.model}"
        + (", materialised" if materialised else ""),
        f"{beside}: {lineage.num_updates} updates, {len(lineage.ancestors)} models before",
    ]
    echo(lineage, lines, as_json=as_json)


@models.command("collect")
@click.option("--dry-run", is_flag=True, help="Only list what would be removed.")
@as_json
@operates
def collect_models(server: Operator, dry_run: bool, as_json: bool) -> None:
    """Remove the models and the events of old rounds that retention no longer keeps, now instead of
    within the hour."""
    collected = server.collect(dry_run=dry_run)
    lines = []
    for each in collected.models:
        named = ", ".join(f"{task} {version}" for task, version in sorted(each.versions.items()))
        lines.append(f"{each.model[:12]}  {each.num_bytes:,} bytes  {named}")
    verb = "would be removed" if dry_run else "removed"
    lines.append(f"{len(collected.models)} models, {collected.num_bytes:,} bytes {verb}")
    lines.append(f"{collected.num_events:,} events of old rounds {verb}")
    echo(collected, lines, as_json=as_json)


def _echo(moved: Alias, as_json: bool) -> None:
    line = f"{moved.alias}: version {moved.version}, {moved.model}"
    echo(moved, [line], as_json=as_json)


def _lineage(lineage: ModelLineage) -> Iterator[str]:
    marks = [name for name in ("newest", "best") if getattr(lineage, f"is_{name}")]
    pairs = [
        ("version", f"{lineage.version} of {lineage.task}"),
        ("called", ", ".join((*lineage.aliases, *marks))),
        ("model", lineage.model),
        ("parent", lineage.parent or "none: the task began with it"),
        *((f"  {name}", digest) for name, digest in lineage.published.items()),
        ("bytes", f"{lineage.num_bytes:,}"),
        ("made", f"{moment(lineage.created_at)}, at attempt {lineage.attempt}"),
        ("file", f"given up {moment(lineage.collected_at)}" if lineage.collected_at else ""),
        ("updates", f"{lineage.num_updates}; --json has the SHA-256 of each"),
        ("before it", f"{len(lineage.ancestors)} models"),
        ("task file", lineage.config),
        ("release", lineage.code),
    ]
    return fields(pairs, width=terminal_width())


def _expected(text: str | None) -> int | Literal["any", "none"]:
    if text is None:
        return "any"
    if text == "none":
        return "none"
    if text.isdecimal():
        return int(text)
    raise ConfigurationError(f"--expect {text!r}", hint="give a version's number, or none")
