"""`fedpress devices statistics`, `fedpress server list` and `fedpress server log-level`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, get_args

import click

from fedpress.cli.tables import echo, lasting, moment, table
from fedpress.command_line import Command, argument, as_json, operates
from fedpress_protocols.fleet import LogLevel

if TYPE_CHECKING:
    from fedpress.operator import Operator
    from fedpress_protocols.fleet import FleetStatus, Quantiles


@click.command("statistics", cls=Command)
@as_json
@operates
def statistics(server: Operator, as_json: bool) -> None:
    """Show measured uplinks, clock offsets and bytes sent, over all devices."""
    fleet = server.fleet()
    echo(fleet, _lines(fleet), as_json=as_json)


@click.command("list", cls=Command)
@as_json
@operates
def list_servers(server: Operator, as_json: bool) -> None:
    """List the servers of the database: role, version, heartbeat, leases, lag."""
    listed = server.servers()
    rows = [
        (
            each.role,
            each.host,
            each.version,
            moment(each.started_at),
            moment(each.seen_at),
            str(each.leases),
            lasting(each.lag_seconds),
            "stale" if each.is_stale else "running",
        )
        for each in listed
    ]
    headings = ("role", "host", "version", "started", "last heartbeat", "leases", "lag", "state")
    echo(listed, table(headings, rows), as_json=as_json)
    stale = [each.server for each in listed if each.is_stale]
    if stale:
        click.echo(
            f"no heartbeat from {', '.join(stale)}: killed, paused or cut off from the database; "
            "listed for an hour after the last one",
            err=True,
        )


@click.command("log-level", cls=Command)
@argument(
    "level",
    type=click.Choice(get_args(LogLevel)),
    required=False,
    help="The least severe level that all servers log, each until its restart; without it the "
    "current levels are shown.",
)
@as_json
@operates
def log_level(server: Operator, level: LogLevel | None, as_json: bool) -> None:
    """Show each server's log level, or change it for all."""
    levels = server.log_level() if level is None else server.set_log_level(level)
    rows = [(each.server, each.level) for each in levels.servers]
    echo(levels, table(("server", "level"), rows), as_json=as_json)
    late = [each.server for each in levels.servers if level is not None and each.level != level]
    for server_name in late:
        click.echo(f"{server_name} has not changed yet; ask again in a few seconds", err=True)


def _lines(fleet: FleetStatus) -> Iterator[str]:
    for each in fleet.servers:
        yield f"seen by {each.server} since {moment(each.since)}"
    rows = [
        ("uplink, kbit/s", *_cells(fleet.uplink_bits_per_second, 1e-3)),
        ("clocks ahead, s", *_cells(fleet.clocks_ahead_seconds, 1.0)),
        ("clocks behind, s", *_cells(fleet.clocks_behind_seconds, 1.0)),
    ]
    yield from table(("", "seen", "10 %", "50 %", "90 %"), rows)
    yield f"bodies received within 10 ms: {fleet.uplink_unmeasured}"
    if fleet.staged_bytes:
        ratio = fleet.staged_float32_bytes / fleet.staged_bytes
        yield f"uploads: {fleet.staged_bytes} bytes, {ratio:.1f} times smaller than float32"
    cost = f", {fleet.egress_cost:.3g} {fleet.egress_currency}" if fleet.egress_cost else ""
    yield f"sent: {fleet.download_bytes} bytes of downloads, {fleet.answer_bytes} of answers{cost}"


def _cells(spread: Quantiles, scale: float) -> tuple[str, str, str, str]:
    values = (spread.tenth, spread.median, spread.nine_tenths)
    tenth, median, most = ("-" if each is None else f"{each * scale:.3g}" for each in values)
    return str(spread.num), tenth, median, most
