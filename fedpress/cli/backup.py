"""The commands `fedpress backup`, `verify`, `restore` and `restores`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fedpress.command_line import PATH, Command, admin_token, argument, needs, operator, url

if TYPE_CHECKING:
    from fedpress_server.settings import Settings

_PLACE = "A folder, or a file that ends in .tar."
_config = click.option(
    "--config",
    type=PATH,
    envvar="FEDPRESS_CONFIG",
    show_envvar=True,
    help="TOML file of the server's settings; all others are read from FEDPRESS_* variables.",
)
_key = click.option(
    "--key-id",
    default="",
    show_default=False,
    help="The id of the server's key, to be sure whose backup it is; backup prints it.",
)


@click.command("backup", cls=Command)
@argument("place", type=PATH, help=_PLACE + " Not there yet.")
@click.option("--data-dir", type=PATH, help="The server's folder.")
@click.option("--with-keys", is_flag=True, help="Copy the keys that sign receipts, too.")
@_config
def backup(place: Path, data_dir: Path | None, with_keys: bool, config: Path | None) -> None:
    """Copy a server to PLACE, whole; it may run meanwhile."""
    import asyncio

    settings = _settings(config, data_dir)
    from fedpress_server.backup import back_up

    made = asyncio.run(back_up(settings, place, with_keys=with_keys))
    size = sum(entry.num_bytes for entry in made.files)
    click.echo(f"{place}: {len(made.files)} files, {size:,} bytes, as of {_said(made.began_at)}")
    if not with_keys:
        click.echo("the keys are not in it: keep server-key.pem apart, receipts are signed with it")


@click.command("verify", cls=Command)
@argument("place", type=PATH, help=_PLACE)
@_key
def verify(place: Path, key_id: str) -> None:
    """Check every byte of a backup; tell which part is damaged."""
    _settings_are_there()
    from fedpress_server.backup import verify as verified

    report = verified(place, key_id=key_id)
    for fault in report.faults:
        click.echo(fault)
    if report.faults or report.manifest is None:
        raise click.exceptions.Exit(1)
    made = report.manifest
    click.echo(
        f"{place}: whole, {len(made.files)} files as of {_said(made.began_at)}, "
        f"{report.num_receipts} receipts and the list signed by key {report.key_id}, "
        f"{report.num_open} open rounds replayed"
    )


@click.command("restore", cls=Command)
@argument("place", type=PATH, help=_PLACE)
@click.option("--data-dir", type=PATH, help="The new server's folder: not there, or empty.")
@_key
@_config
def restore(place: Path, data_dir: Path | None, key_id: str, config: Path | None) -> None:
    """Bring a backup back as a server that is new."""
    settings = _settings(config, data_dir)
    from fedpress_server.backup import restore as restored

    done = restored(place, settings, key_id=key_id)
    made = done.restore
    click.echo(
        f"{settings.data_dir}: restore {made.number}, as of {_said(made.backup_at)}; what was "
        "committed after that is in no model any more"
    )
    for task, number, attempt in done.open_rounds:
        click.echo(f"task {task}: round {number}.{attempt} was open, and will be begun anew")
    for file in done.missing_keys:
        click.echo(f"before it starts it needs its key again: {file}")
    click.echo("never start the old server again; devices report what is lost: fedpress restores")


@click.command("restores", cls=Command)
@admin_token
@url
def list_restores(admin_token: str, url: str) -> None:
    """Show the rounds that devices report as committed after a backup that came back."""
    with operator(url, admin_token) as server:
        found = server.restores()
    for each in found:
        click.echo(
            f"restore {each.number}: {_said(each.restored_at)}, from a backup as of "
            f"{_said(each.backup_at)}"
        )
        for lost in each.undone:
            click.echo(
                f"  task {lost.task} round {lost.round}.{lost.attempt} model "
                f"{(lost.model or 'unknown')[:12]}: {lost.devices} devices"
            )
        if not each.undone:
            click.echo("  no device has reported a round that was committed after it")
    if not found:
        click.echo("this server was never restored")


def _settings(config: Path | None, data_dir: Path | None) -> Settings:
    _settings_are_there()
    from fedpress_server.settings import Settings

    return Settings.load(config, data_dir=data_dir)


def _settings_are_there() -> None:
    try:
        import fedpress_server.app  # noqa: F401
    except ModuleNotFoundError as exc:
        needs("server", exc)


def _said(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
