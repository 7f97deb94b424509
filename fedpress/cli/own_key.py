"""The commands `fedpress device ...`: who this device is, and its key."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import click

from fedpress.cli.devices import client_certificate, client_key
from fedpress.cli.tables import fields, terminal_width
from fedpress.command_line import PATH, Group, as_json
from fedpress_protocols.errors import ConfigurationError

state_dir = click.option(
    "--state-dir", type=PATH, default="fedpress-state", help="As of fedpress join."
)


@click.group("device", cls=Group)
def device() -> None:
    """This device: who it is to its server, and a new key for it."""


@device.command("show")
@state_dir
@as_json
def show_device(state_dir: Path, as_json: bool) -> None:
    """Print who this device is; its key id is what an operator compares."""
    from fedpress_client.device_key import is_changing, rotations
    from fedpress_client.state import StateDirectory
    from fedpress_protocols.signatures import to_base64url

    _check_there(state_dir)
    directory = StateDirectory.open(state_dir)
    key, identity = directory.key(), directory.identity()
    found = {
        "client_id": identity.client_id if identity else None,
        "url": identity.url if identity else None,
        "key_id": key.key_id,
        "public_key": to_base64url(key.public),
        "rotations": len(rotations(directory)),
        "is_changing_key": is_changing(directory),
    }
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    pairs = [
        ("client", str(found["client_id"] or "not enrolled")),
        ("server", str(found["url"] or "")),
        ("key", key.key_id),
        ("public key", str(found["public_key"])),
        ("changed", f"{found['rotations']} times" if found["rotations"] else ""),
        ("under way", "a change of key" if found["is_changing_key"] else ""),
    ]
    for line in fields(pairs, width=terminal_width()):
        click.echo(line)


@device.command(
    "rotate-key",
    epilog="A process of this device that is running goes on with the new key by itself. Where the "
    "command does not get to its end, it, or the next fedpress join, goes on from there.",
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
    """Give this device a new key; copies of the old one are refused from then on."""
    from fedpress_client.device_key import change_key
    from fedpress_client.state import StateDirectory
    from fedpress_client.transport import HttpTransport, Retries

    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    _check_there(state_dir)
    directory = StateDirectory.open(state_dir)
    before, identity = directory.key(), directory.identity()
    if identity is None:
        raise ConfigurationError(
            f"the device in {state_dir} is not enrolled",
            hint="a key that no server knows needs no change",
        )
    transport = HttpTransport(
        identity.url,
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
        "client_id": identity.client_id,
        "key_id": after.key_id,
        "former_key_id": before.key_id,
    }
    line = f"client {identity.client_id}: key {after.key_id} in place of {before.key_id}"
    click.echo(json.dumps(changed, indent=2) if as_json else line)


def _check_there(state_dir: Path) -> None:
    if not (state_dir / "key.pem").exists():
        raise ConfigurationError(
            f"there is no device in {state_dir}", hint="give the --state-dir of fedpress join"
        )
