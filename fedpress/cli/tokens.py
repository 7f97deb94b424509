"""The commands `fedpress devices token ...`: enrolment tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from fedpress.cli.tables import echo, moment, table, terminal_width
from fedpress.command_line import Group, Number, argument, as_json, operates

if TYPE_CHECKING:
    from fedpress.operator import Operator
    from fedpress_protocols.enrolment import TokenResponse, TokenStatus


@click.group("token", cls=Group)
def token() -> None:
    """Manage enrolment tokens: create, list, revoke."""


@token.command("create")
@click.option(
    "--uses", type=click.IntRange(1, 1_000_000), default=1, help="Devices that may enrol with it."
)
@click.option("--hours", type=Number(0.01, 87_840), default=24.0, help="How long it is valid.")
@click.option("--note", default="", show_default=False, help="For your own records.")
@click.option(
    "--approve-each",
    is_flag=True,
    help="Each device waits until you approve it: fedpress devices approve.",
)
@as_json
@operates
def create_token(
    server: Operator, uses: int, hours: float, note: str, approve_each: bool, as_json: bool
) -> None:
    """Print a new enrolment token; it is not stored and cannot be shown again."""
    created = server.new_token(
        uses=uses, expires_in=3600 * hours, note=note, approve_each=approve_each
    )
    echo(created, _new(created), as_json=as_json)


@token.command("list")
@as_json
@operates
def list_tokens(server: Operator, as_json: bool) -> None:
    """List enrolment tokens without their secrets, the newest first."""
    tokens = server.tokens()
    rows = [
        (
            each.token_id,
            each.state,
            f"{each.used}/{each.uses}",
            moment(each.expires_at),
            f"{'each approved; ' if each.approve_each else ''}{each.note}",
        )
        for each in tokens
    ]
    headings = ("token", "state", "used", "until", "note")
    lines = table(headings, rows, width=terminal_width()) if rows else ["no token yet"]
    echo(tokens, lines, as_json=as_json)


@token.command("revoke")
@argument("token_id", metavar="TOKEN", help="The token's id, as list shows it; not the secret.")
@as_json
@operates
def revoke_token(server: Operator, token_id: str, as_json: bool) -> None:
    """Revoke a token: no more devices enrol with it; enrolled devices stay."""
    revoked = server.revoke_token(token_id)
    echo(revoked, [_line(revoked)], as_json=as_json)


def _new(made: TokenResponse) -> Iterator[str]:
    yield made.token
    click.echo(_line(made), err=True)


def _line(each: TokenStatus) -> str:
    how = ", each to be approved" if each.approve_each else ""
    until = f"until {moment(each.expires_at)}"
    if each.revoked_at is not None:
        until = f"revoked since {moment(each.revoked_at)}"
    return f"token {each.token_id}: {each.used} of {each.uses} used{how}; {until}"
