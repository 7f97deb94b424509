"""The commands `fedpress ca ...`."""

from __future__ import annotations

from pathlib import Path

import click

from fedpress.command_line import PATH, Group, argument


@click.group("ca", cls=Group)
def authorities() -> None:
    """An enrolment authority for secure aggregation, apart from the server."""


@authorities.command("init")
@argument("file", type=PATH, help="Where to write the private key.")
def make_authority(file: Path) -> None:
    """Make an authority's key and print its public half, for the server and the devices."""
    from fedpress import authority

    click.echo(authority.make_authority(file))


@authorities.command("request")
@argument("state_dir", type=PATH, help="The device's state directory.")
def request_certificate(state_dir: Path) -> None:
    """Print a device's public key, on the device, to have a certificate issued for it."""
    from fedpress import authority

    click.echo(authority.device_key(state_dir))


@authorities.command("issue")
@argument("authority_file", type=PATH, help="The authority's private key.")
@argument("public_key", help="The device's public key.")
@click.option("--out", type=PATH, required=True, help="Where to write the certificate.")
@click.option("--name", default="", show_default=False, help="What the device is called in it.")
@click.option("--population", default="fedpress", help="As the server's --population.")
@click.option(
    "--days",
    type=click.FloatRange(min=0.01, max=36_500),
    default=365.0,
    help="How long it is good for.",
)
def issue_certificate(
    authority_file: Path, public_key: str, out: Path, name: str, population: str, days: float
) -> None:
    """Certify a device's key; the file goes to the device."""
    from time import time

    from fedpress import authority

    made = authority.issue(
        authority_file,
        public_key=public_key,
        name=name,
        population=population,
        days=days,
        now=time(),
    )
    out.write_bytes(made)
    click.echo(f"{out}: good for {days:g} days")
