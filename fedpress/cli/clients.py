"""The commands `fedpress client ...`: the devices as an operator sees them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from fedpress.cli.tables import fields, moment, table, tell, terminal_width
from fedpress.command_line import Group, argument, as_json, operates
from fedpress_protocols.enrolment import DEVICE_STATES, DeviceState

if TYPE_CHECKING:
    from fedpress.operator import Operator
    from fedpress_protocols.enrolment import ClientDetails, ClientStatus

_CLIENT = "Its id, as list shows it."


@click.group("client", cls=Group)
def clients() -> None:
    """Devices: list, show, approve, reject, revoke."""


@clients.command("list")
@click.option("--state", type=click.Choice(DEVICE_STATES), help="Of these alone.")
@as_json
@operates
def list_clients(server: Operator, state: DeviceState | None, as_json: bool) -> None:
    """List the devices that have enrolled, in that order."""
    found = server.clients(state)
    rows = [
        (each.client_id, each.state, each.key_id, moment(each.enrolled_at), each.name)
        for each in found
    ]
    headings = ("client", "state", "key", "enrolled", "name")
    lines = table(headings, rows, width=terminal_width()) if rows else ["there are none"]
    tell(found, lines, as_json=as_json)


@clients.command("show")
@argument("client_id", metavar="CLIENT", help=_CLIENT)
@as_json
@operates
def show_client(server: Operator, client_id: str, as_json: bool) -> None:
    """One device: its keys, the token that brought it, what was decided."""
    found = server.client(client_id)
    tell(found, _said(found), as_json=as_json)


@clients.command("approve")
@argument("client_id", metavar="CLIENT", help=_CLIENT)
@click.option(
    "--key", help="The key id that the device shows; where the server has another, nothing is done."
)
@as_json
@operates
def approve_client(server: Operator, client_id: str, key: str | None, as_json: bool) -> None:
    """Let a device in that waits, once its key id is what the device itself shows."""
    _tell(server.approve_client(client_id, key_id=key), as_json)


@clients.command("reject")
@argument("client_id", metavar="CLIENT", help=_CLIENT)
@as_json
@operates
def reject_client(server: Operator, client_id: str, as_json: bool) -> None:
    """Turn a device away that waits; it may be approved later after all."""
    _tell(server.reject_client(client_id), as_json)


@clients.command("revoke")
@argument("client_id", metavar="CLIENT", help=_CLIENT)
@as_json
@operates
def revoke_client(server: Operator, client_id: str, as_json: bool) -> None:
    """Turn a device away from now on, for good; what it has contributed stays."""
    _tell(server.revoke_client(client_id), as_json)


def _tell(client: ClientStatus, as_json: bool) -> None:
    tell(
        client, [f"client {client.client_id}, key {client.key_id}: {client.state}"], as_json=as_json
    )


def _said(client: ClientDetails) -> Iterator[str]:
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
    ]
    return fields(pairs, width=terminal_width())
