"""`fedpress fleet` and `fedpress log-level`: what the servers have seen, and what they log."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, get_args

import click

from fedpress.cli.tables import moment, table, tell
from fedpress.command_line import Command, argument, as_json, operates
from fedpress_protocols.fleet import LogLevel

if TYPE_CHECKING:
    from fedpress.operator import Operator
    from fedpress_protocols.fleet import FleetStatus, Spread


@click.command("fleet", cls=Command)
@as_json
@operates
def fleet(server: Operator, as_json: bool) -> None:
    """Show the devices' links and clocks as the servers have measured them, and what they sent."""
    found = server.fleet()
    tell(found, _lines(found), as_json=as_json)


@click.command("log-level", cls=Command)
@argument(
    "level",
    type=click.Choice(get_args(LogLevel)),
    required=False,
    help="The least severe message that all servers are to log from now on, each until it is "
    "started anew; without it, those that are.",
)
@as_json
@operates
def log_level(server: Operator, level: LogLevel | None, as_json: bool) -> None:
    """Show how much each server logs, or change it for all."""
    found = server.log_level() if level is None else server.set_log_level(level)
    rows = [(each.server, each.level) for each in found.servers]
    tell(found, table(("server", "level"), rows), as_json=as_json)
    late = [each.server for each in found.servers if level is not None and each.level != level]
    for server_name in late:
        click.echo(f"{server_name} has not followed yet; ask again in a few seconds", err=True)


def _lines(found: FleetStatus) -> Iterator[str]:
    for each in found.servers:
        yield f"seen by {each.server} since {moment(each.since)}"
    rows = [
        ("uplink, kbit/s", *_cells(found.uplink_bits_per_second, 1e-3)),
        ("clocks ahead, s", *_cells(found.clocks_ahead_seconds, 1.0)),
        ("clocks behind, s", *_cells(found.clocks_behind_seconds, 1.0)),
    ]
    yield from table(("", "seen", "10 %", "50 %", "90 %"), rows)
    yield f"bodies that came within 10 ms: {found.uplink_unmeasured}"
    if found.staged_bytes:
        ratio = found.staged_float32_bytes / found.staged_bytes
        yield f"uploads: {found.staged_bytes} bytes, {ratio:.1f} times smaller than float32"
    cost = f", {found.egress_cost:.3g} {found.egress_currency}" if found.egress_cost else ""
    yield f"sent: {found.download_bytes} bytes of downloads, {found.answer_bytes} of answers{cost}"


def _cells(spread: Spread, scale: float) -> tuple[str, str, str, str]:
    values = (spread.tenth, spread.median, spread.nine_tenths)
    tenth, median, most = ("-" if each is None else f"{each * scale:.3g}" for each in values)
    return str(spread.num), tenth, median, most
