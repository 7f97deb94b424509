"""The commands `fedpress devices ...`: the devices as an operator sees them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from fedpress.cli.tables import echo, fields, moment, table, terminal_width
from fedpress.command_line import Group, argument, as_json, operates
from fedpress_protocols.enrolment import DEVICE_STATES, DeviceState

if TYPE_CHECKING:
    from fedpress.operator import Operator
    from fedpress_protocols.enrolment import ClientDetails, ClientStatus

_CLIENT = "The client id, as list shows it."


@click.group("devices", cls=Group)
def devices() -> None:
    """Admit and inspect devices: token, list, approve, revoke."""


@devices.command("list")
@click.option("--state", type=click.Choice(DEVICE_STATES), help="Only devices in this state.")
@as_json
@operates
def list_clients(server: Operator, state: DeviceState | None, as_json: bool) -> None:
    """List the enrolled devices in the order of enrolment."""
    clients = server.clients(state)
    rows = [
        (each.client_id, each.state, each.key_id, moment(each.enrolled_at), each.name)
        for each in clients
    ]
    headings = ("client", "state", "key", "enrolled", "name")
    lines = table(headings, rows, width=terminal_width()) if rows else ["no devices"]
    echo(clients, lines, as_json=as_json)


@devices.command("show")
@argument("client_id", metavar="CLIENT", help=_CLIENT)
@as_json
@operates
def show_client(server: Operator, client_id: str, as_json: bool) -> None:
    """Show one device: keys, enrolment token, state, when it was last seen."""
    client = server.client(client_id)
    echo(client, _fields(client), as_json=as_json)


@devices.command("approve")
@argument("client_id", metavar="CLIENT", help=_CLIENT)
@click.option(
    "--key", help="The key id that the device shows; if the server has another, nothing changes."
)
@as_json
@operates
def approve_client(server: Operator, client_id: str, key: str | None, as_json: bool) -> None:
    """Approve a waiting device; compare its key id with what the device shows first."""
    _echo(server.approve_client(client_id, key_id=key), as_json)


@devices.command("reject")
@argument("client_id", metavar="CLIENT", help=_CLIENT)
@as_json
@operates
def reject_client(server: Operator, client_id: str, as_json: bool) -> None:
    """Reject a waiting device; it may be approved later."""
    _echo(server.reject_client(client_id), as_json)


@devices.command("revoke")
@argument("client_id", metavar="CLIENT", help=_CLIENT)
@as_json
@operates
def revoke_client(server: Operator, client_id: str, as_json: bool) -> None:
    """Refuse a device permanently; its contributions to models stay."""
    _echo(server.revoke_client(client_id), as_json)


def _echo(client: ClientStatus, as_json: bool) -> None:
    echo(
        client, [f"client {client.client_id}, key {client.key_id}: {client.state}"], as_json=as_json
    )


def _fields(client: ClientDetails) -> Iterator[str]:
    pairs = [
        ("client", client.client_id),
        ("name", client.name),
        ("state", client.state),
        ("key", client.key_id),
        ("since", moment(client.rotated_at)),
        *(("former key", f"{e.key_id} until {moment(e.retired_at)}") for e in client.former_keys),
        ("token", client.token_id),
        ("enrolled", moment(client.enrolled_at)),
        ("decided", moment(client.decided_at)),
        ("revoked", moment(client.revoked_at)),
        ("last seen", moment(client.seen_at)),
        ("software", client.agent),
        ("clock", "" if client.clock_ahead is None else f"{client.clock_ahead:+.1f} s"),
    ]
    return fields(pairs, width=terminal_width())
