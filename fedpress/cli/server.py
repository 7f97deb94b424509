"""The commands `fedpress server ...`: run a server and maintain it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from fedpress.cli.audit import audit
from fedpress.cli.backup import backup, list_restores, restore, verify
from fedpress.cli.doctor import doctor
from fedpress.cli.observing import list_servers, log_level
from fedpress.cli.server_keys import server_keys
from fedpress.cli.server_operators import operator
from fedpress.command_line import Command, Group, needs

if TYPE_CHECKING:
    from fedpress_server.command import SettingsCommand


class _ServersOwn(Command):
    """A command that fedpress_server defines, imported on first use, as it needs an extra."""

    @property
    def _command(self) -> SettingsCommand:
        try:
            from fedpress_server import command
        except ModuleNotFoundError as exc:
            needs("server", exc)
        made: SettingsCommand = getattr(command, str(self.name))
        return made

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        return self._command.get_params(ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        self._command.format_options(ctx, formatter)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        self._command.format_epilog(ctx, formatter)

    def invoke(self, ctx: click.Context) -> Any:
        return self._command.invoke(ctx)


@click.group("server", cls=Group)
def server() -> None:
    """Run and maintain a server: run, doctor, backup, key, audit."""


for _command in (
    _ServersOwn("run", help="Run the aggregation server."),
    _ServersOwn("migrate", help="Update the database's schema to this release."),
    *(doctor, backup, verify, restore, list_restores),
    *(server_keys, operator, audit, list_servers, log_level),
):
    server.add_command(_command)
