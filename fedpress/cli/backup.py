"""The commands `fedpress server backup`, `verify-backup`, `restore` and `restores`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fedpress.cli.outcomes import FAILED
from fedpress.cli.tables import echo, moment
from fedpress.command_line import PATH, Command, argument, as_json, needs, operates

if TYPE_CHECKING:
    from fedpress.operator import Operator
    from fedpress_protocols.restores import RestoreStatus
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
    help="The id of the server's key, to check whose backup it is; verify-backup prints it.",
)


@click.command("backup", cls=Command)
@argument("place", type=PATH, help=_PLACE + " It must not exist yet.")
@click.option("--data-dir", type=PATH, help="The server's folder.")
@click.option("--with-keys", is_flag=True, help="Include the keys that sign receipts.")
@_config
@as_json
def backup(
    place: Path, data_dir: Path | None, with_keys: bool, config: Path | None, as_json: bool
) -> None:
    """Back up a server completely to PLACE; it may be running."""
    import asyncio

    settings = _settings(config, data_dir)
    from fedpress_server.backup import back_up

    made = asyncio.run(back_up(settings, place, with_keys=with_keys))
    size = sum(entry.num_bytes for entry in made.files)
    if as_json:
        summary = {
            "place": str(place),
            "backup": made.backup,
            "began_at": made.began_at,
            "num_files": len(made.files),
            "num_bytes": size,
            "has_keys": with_keys,
        }
        click.echo(json.dumps(summary, indent=2))
        return
    click.echo(f"{place}: {len(made.files)} files, {size:,} bytes, as of {moment(made.began_at)}")
    if not with_keys:
        click.echo("the keys are not in it: keep server-key.pem apart, receipts are signed with it")


@click.command("verify-backup", cls=Command)
@argument("place", type=PATH, help=_PLACE)
@_key
@as_json
def verify(place: Path, key_id: str, as_json: bool) -> None:
    """Check every byte of a backup and report damaged parts."""
    _settings_are_there()
    from fedpress_server.backup import verify as verified

    report = verified(place, key_id=key_id)
    made = report.manifest
    is_whole = made is not None and not report.faults
    if as_json:
        summary = {
            "place": str(place),
            "is_whole": is_whole,
            "faults": report.faults,
            "backup": made and made.backup,
            "began_at": made and made.began_at,
            "num_files": len(made.files) if made else 0,
            "key_id": report.key_id,
            "num_receipts": report.num_receipts,
            "num_open": report.num_open,
        }
        click.echo(json.dumps(summary, indent=2))
    else:
        for fault in report.faults:
            click.echo(fault)
        if made is not None and is_whole:
            click.echo(
                f"{place}: whole, {len(made.files)} files as of {moment(made.began_at)}, "
                f"{report.num_receipts} receipts and the list signed by key {report.key_id}, "
                f"{report.num_open} open rounds replayed"
            )
    if not is_whole:
        raise click.exceptions.Exit(FAILED)


@click.command("restore", cls=Command)
@argument("place", type=PATH, help=_PLACE)
@click.option("--data-dir", type=PATH, help="The new server's folder, empty or missing.")
@_key
@_config
@as_json
def restore(
    place: Path, data_dir: Path | None, key_id: str, config: Path | None, as_json: bool
) -> None:
    """Restore a backup as a new server."""
    settings = _settings(config, data_dir)
    from fedpress_server.backup import restore as restored

    done = restored(place, settings, key_id=key_id)
    made = done.restore
    if as_json:
        summary = made.model_dump(mode="json") | {
            "data_dir": str(settings.data_dir),
            "open_rounds": [
                {"task": task, "round": number, "attempt": attempt}
                for task, number, attempt in done.open_rounds
            ],
            "missing_keys": done.missing_keys,
        }
        click.echo(json.dumps(summary, indent=2))
        return
    click.echo(
        f"{settings.data_dir}: restore {made.number}, as of {moment(made.backup_at)}; what was "
        "committed after that is in no model any more"
    )
    for task, number, attempt in done.open_rounds:
        click.echo(f"task {task}: round {number}.{attempt} was open, and will start again")
    for file in done.missing_keys:
        click.echo(f"before it starts it needs its key again: {file}")
    click.echo(
        "devices, tokens and operators that were revoked after that are good again: revoke them "
        "once more"
    )
    click.echo("never start the old server again; fedpress server restores lists lost rounds")


@click.command("restores", cls=Command)
@as_json
@operates
def list_restores(server: Operator, as_json: bool) -> None:
    """Show rounds that a restore undid, as devices report them."""
    restores = server.restores()
    echo(restores, _undone(restores), as_json=as_json)


def _undone(restores: Sequence[RestoreStatus]) -> Iterator[str]:
    for each in restores:
        yield (
            f"restore {each.number}: {moment(each.restored_at)}, from a backup as of "
            f"{moment(each.backup_at)}"
        )
        for lost in each.undone:
            yield (
                f"  task {lost.task} round {lost.round}.{lost.attempt} model "
                f"{(lost.model or 'unknown')[:12]}: {lost.devices} devices"
            )
        if not each.undone:
            yield "  no device has reported a round that was committed after it"
    if not restores:
        yield "this server was never restored from a backup"


def _settings(config: Path | None, data_dir: Path | None) -> Settings:
    _settings_are_there()
    from fedpress_server.settings import Settings

    return Settings.load(config, data_dir=data_dir)


def _settings_are_there() -> None:
    try:
        import fedpress_server.app  # noqa: F401
    except ModuleNotFoundError as exc:
        needs("server", exc)
