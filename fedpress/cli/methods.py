"""The commands `fedpress compressors` and `fedpress strategies`."""

from __future__ import annotations

import click

from fedpress.command_line import Group, argument


@click.group("compressors", cls=Group, invoke_without_command=True)
@click.pass_context
def compressors(context: click.Context) -> None:
    """List the compressors; show NAME describes one."""
    if context.invoked_subcommand is None:
        from fedpress.compressor_table import table

        click.echo(table())


@compressors.command("show")
@argument("name", help="A compressor's id.")
def show_compressor(name: str) -> None:
    """Describe a compressor: settings, defaults, an example."""
    from fedpress.compressor_table import described

    click.echo(described(name))


@click.group("strategies", cls=Group, invoke_without_command=True)
@click.pass_context
def strategies(context: click.Context) -> None:
    """List the strategies; show NAME describes one."""
    if context.invoked_subcommand is None:
        from fedpress.strategy_table import table

        click.echo(table())


@strategies.command("show")
@argument("name", help="A strategy's id.")
def show_strategy(name: str) -> None:
    """Describe a strategy: settings, defaults, an example."""
    from fedpress.strategy_table import described

    click.echo(described(name))
