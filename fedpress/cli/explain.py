"""The command `fedpress explain`."""

from __future__ import annotations

import inspect

import click

from fedpress.cli.outcomes import documented_errors
from fedpress.command_line import Command, argument
from fedpress_protocols.errors import ConfigurationError


@click.command("explain", cls=Command)
@argument("name", help="As a message shows it, or the last part of a problem's `type`.")
def explain(name: str) -> None:
    """Print what a kind of error means, and what to do."""
    known = {cls.slug: cls for cls in documented_errors()}
    cls = known.get(name)
    if cls is None:
        raise ConfigurationError(
            f"there is no kind of error {name!r}", hint=f"choose one of: {', '.join(known)}"
        )
    click.echo(f"{name}: {cls.title} ({cls.__name__}, HTTP status {cls.status})\n")
    click.echo(inspect.cleandoc(cls.__doc__ or ""))
    if cls.default_hint:
        click.echo(f"\nHint, where the message has no other: {cls.default_hint}.")
