"""The commands `fedpress client identity` and `rotate-key`."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import click

from fedpress.cli.client import client_certificate, client_key
from fedpress.cli.tables import fields, terminal_width
from fedpress.command_line import PATH, Command, as_json
from fedpress_protocols.errors import ConfigurationError

state_dir = click.option(
    "--state-dir",
    type=PATH,
    default="fedpress-state",
    help="The --state-dir of fedpress client join.",
)


@click.command("identity", cls=Command)
@state_dir
@as_json
def identity(state_dir: Path, as_json: bool) -> None:
    """Print this device's client id, server and key; operators compare the key id."""
    from fedpress_client.device_key import is_changing, rotations
    from fedpress_client.state import StateDirectory
    from fedpress_protocols.signatures import to_base64url

    _check_there(state_dir)
    directory = StateDirectory.open(state_dir)
    key, enrolled = directory.key(), directory.identity()
    summary = {
        "client_id": enrolled.client_id if enrolled else None,
        "url": enrolled.url if enrolled else None,
        "key_id": key.key_id,
        "public_key": to_base64url(key.public),
        "rotations": len(rotations(directory)),
        "is_changing_key": is_changing(directory),
    }
    if as_json:
        click.echo(json.dumps(summary, indent=2))
        return
    pairs = [
        ("client", str(summary["client_id"] or "not enrolled")),
        ("server", str(summary["url"] or "")),
        ("key", key.key_id),
        ("public key", str(summary["public_key"])),
        ("rotated", f"{summary['rotations']} times" if summary["rotations"] else ""),
        ("in progress", "a key rotation" if summary["is_changing_key"] else ""),
    ]
    for line in fields(pairs, width=terminal_width()):
        click.echo(line)


@click.command(
    "rotate-key",
    cls=Command,
    epilog="A running process of this device switches to the new key by itself. If the command is "
    "interrupted, run it again, or fedpress client join: both resume the change.",
)
@state_dir
@click.option("--ca", type=PATH, help="PEM file of the authority that signed the server.")
@client_certificate
@client_key
@click.option("--proxy", help="Proxy, http://host:port.")
@as_json
def rotate_key(
    state_dir: Path,
    ca: Path | None,
    client_certificate: Path | None,
    client_key: Path | None,
    proxy: str | None,
    as_json: bool,
) -> None:
    """Replace this device's key; the server refuses the old one from then on."""
    from fedpress_client.device_key import change_key
    from fedpress_client.state import StateDirectory
    from fedpress_client.transport import HttpTransport, Retries

    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    _check_there(state_dir)
    directory = StateDirectory.open(state_dir)
    before, enrolled = directory.key(), directory.identity()
    if enrolled is None:
        raise ConfigurationError(
            f"the device in {state_dir} is not enrolled",
            hint="enrol it with fedpress client join; a key that no server knows needs no rotation",
        )
    transport = HttpTransport(
        enrolled.url,
        before,
        verify=str(ca) if ca else None,
        client_certificate=client_certificate,
        client_key=client_key,
        proxy=proxy,
        retries=Retries(patience=60.0),
    )
    try:
        after = change_key(directory, transport)
    finally:
        transport.close()
    changed = {
        "client_id": enrolled.client_id,
        "key_id": after.key_id,
        "former_key_id": before.key_id,
    }
    line = f"client {enrolled.client_id}: key {after.key_id} in place of {before.key_id}"
    click.echo(json.dumps(changed, indent=2) if as_json else line)


def _check_there(state_dir: Path) -> None:
    if not (state_dir / "key.pem").exists():
        raise ConfigurationError(
            f"there is no device in {state_dir}",
            hint="give the --state-dir of client join",
        )
