"""The commands `fedpress server operator ...`: operators and their roles."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from fedpress.cli.tables import echo, moment, table, terminal_width
from fedpress.command_line import Group, argument, as_json, operates
from fedpress_protocols.errors import ConfigurationError
from fedpress_protocols.operators import ROLES, Role

if TYPE_CHECKING:
    from fedpress.operator import Operator
    from fedpress_protocols.operators import OperatorStatus, OperatorToken

_DAY = 86400.0


@click.group("operator", cls=Group)
def operator() -> None:
    """Manage operators' tokens and roles: create, list, revoke."""


@operator.command("create")
@argument(
    "role",
    type=click.Choice(ROLES),
    help="viewer reads; operator runs tasks and moves models; registrar admits and revokes "
    "devices; admin does all of it.",
)
@click.option("--note", default="", show_default=False, help="The owner or the purpose.")
@click.option("--days", type=float, default=90.0, help="Days until it expires.")
@as_json
@operates
def create_operator(server: Operator, role: Role, note: str, days: float, as_json: bool) -> None:
    """Create an operator and print the token, once; the server keeps only its hash."""
    if not 0 < days <= 10 * 366:
        raise ConfigurationError(f"--days {days:g}", hint="above 0, and 3660 at most")
    created = server.create_operator(role, expires_in=days * _DAY, note=note)
    echo(created, _new(created), as_json=as_json)


@operator.command("list")
@as_json
@operates
def list_operators(server: Operator, as_json: bool) -> None:
    """List operators, revoked and expired ones too; the admin token is not listed."""
    operators = server.operators()
    rows = [
        (each.operator_id, each.role, _state(each), moment(each.expires_at), each.note)
        for each in operators
    ]
    headings = ("operator", "role", "state", "until", "note")
    lines = table(headings, rows, width=terminal_width()) if rows else ["no operators"]
    echo(operators, lines, as_json=as_json)


@operator.command("revoke")
@argument("operator_id", metavar="OPERATOR", help="As list shows it.")
@as_json
@operates
def revoke_operator(server: Operator, operator_id: str, as_json: bool) -> None:
    """Revoke an operator's token."""
    revoked = server.revoke_operator(operator_id)
    line = f"{revoked.operator_id}, {revoked.role}: revoked at {moment(revoked.revoked_at)}"
    echo(revoked, [line], as_json=as_json)


def _new(made: OperatorToken) -> Iterator[str]:
    yield made.token
    click.echo(f"{made.role} {made.operator_id}, until {moment(made.expires_at)}", err=True)


def _state(each: OperatorStatus) -> str:
    if each.revoked_at is not None:
        return "revoked"
    return "good" if time.time() < each.expires_at else "expired"
