"""The commands `fedpress server audit ...`: the log of operators' actions, and its verification."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fedpress.cli.tables import echo, moment, table, terminal_width
from fedpress.command_line import PATH, Group, argument, as_json, needs, operates
from fedpress_protocols.audit import (
    MAX_ENTRY_BYTES,
    NOTHING,
    AuditEntry,
    AuditPage,
    Head,
    checked,
    end_of,
)
from fedpress_protocols.errors import BrokenChain, ConfigurationError

if TYPE_CHECKING:
    from fedpress.operator import Operator

_PAGE = 1000


@click.group("audit", cls=Group)
def audit() -> None:
    """Read and verify the log of operators' actions: list, export, verify."""


@audit.command("list")
@click.option("--limit", type=click.IntRange(1, _PAGE), default=20, help="Entries.")
@click.option("--after", type=click.IntRange(0), help="Entries after this one; default: newest.")
@as_json
@operates
def list_audit(server: Operator, limit: int, after: int | None, as_json: bool) -> None:
    """List entries of a running server's log, by default the newest."""
    if after is None:
        after = max(0, server.audit(limit=1).head.seq - limit)
    page = server.audit(after=after, limit=limit)
    echo(page, _listed(page), as_json=as_json)


@audit.command("export")
@argument("file", type=PATH, help="One entry a line; an existing file is continued.")
@as_json
@operates
def export_audit(server: Operator, file: Path, as_json: bool) -> None:
    """Save a running server's log and verify it."""
    last = end_of(_lines(file, [])) if file.exists() else NOTHING
    before = last
    with file.open("a", encoding="utf-8", newline="\n") as out:
        while True:
            page = server.audit(after=last.seq, limit=_PAGE)
            for entry in checked(page.entries, after=last):
                out.write(entry.to_line() + "\n")
                last = Head(seq=entry.seq, hash=entry.hash)
            if not page.entries:
                break
    if page.head != last:
        raise BrokenChain(f"the log ends at {page.head}, and {file} at {last}", seq=page.head.seq)
    line = f"{file}: {last.seq - before.seq} entries more, {last.seq} in all, to {last}"
    _print({"file": str(file), "new": last.seq - before.seq, "head": str(last)}, line, as_json)


@audit.command("verify")
@argument("file", type=PATH, required=False, help="An exported log; by default the database's.")
@click.option(
    "--head",
    "heads",
    multiple=True,
    metavar="SEQ:HASH",
    help="A head that an earlier run printed: the log must still contain it. May be repeated.",
)
@click.option("--data-dir", type=PATH, help="The server's folder.")
@click.option(
    "--config",
    type=PATH,
    envvar="FEDPRESS_CONFIG",
    show_envvar=True,
    help="TOML file of the server's settings; all others are read from FEDPRESS_* variables.",
)
@as_json
def verify_audit(
    file: Path | None,
    heads: tuple[str, ...],
    data_dir: Path | None,
    config: Path | None,
    as_json: bool,
) -> None:
    """Check every link of a log; exit code 1 at the first broken one."""
    noted = [Head.parsed(text) for text in heads]
    if file is not None:
        last, where = end_of(_lines(file, noted)), str(file)
    else:
        last, where = _of_database(config, data_dir, noted)
    line = f"{where}: {last.seq} entries, whole; note the head, and check against it: {last}"
    _print({"where": where, "is_whole": True, "head": str(last)}, line, as_json)


def _of_database(
    config: Path | None, data_dir: Path | None, noted: Sequence[Head]
) -> tuple[Head, str]:
    import asyncio

    try:
        from fedpress_server.identity.audit import verified
        from fedpress_server.settings import Settings
    except ModuleNotFoundError as exc:
        needs("server", exc)
    settings = Settings.load(config, data_dir=data_dir)
    return asyncio.run(verified(settings.resolved_database_url, noted)), "the database"


def _lines(file: Path, noted: Sequence[Head]) -> Iterator[AuditEntry]:
    """The entries of an exported log, once each is checked."""
    yield from checked(_parsed(file), heads=noted)


def _parsed(file: Path) -> Iterator[AuditEntry]:
    with file.open("rb") as lines:
        for number in range(1, 2**53):
            line = lines.readline(MAX_ENTRY_BYTES + 1)
            if not line:
                return
            if len(line) > MAX_ENTRY_BYTES or not line.endswith(b"\n"):
                what = "is longer than any entry" if line.endswith(b"\n") else "has no end"
                raise BrokenChain(f"{file}, line {number} {what}", seq=number)
            try:
                yield AuditEntry.from_line(line[:-1].decode())
            except (ConfigurationError, UnicodeDecodeError) as exc:
                raise BrokenChain(f"{file}, line {number}: {exc}", seq=number) from exc


def _listed(page: AuditPage) -> Iterator[str]:
    rows = [
        (str(each.seq), moment(each.at // 1000), each.actor, each.action, _what(each))
        for each in page.entries
    ]
    yield from table(("seq", "at", "by", "action", "what"), rows, width=terminal_width())
    yield f"the log ends at {page.head}"


def _what(each: AuditEntry) -> str:
    details = (f"{name}={_short(value)}" for name, value in each.details.items())
    return " ".join((each.subject, *details)).strip()


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _print(document: dict[str, Any], line: str, as_json: bool) -> None:
    click.echo(json.dumps(document, indent=2) if as_json else line)
