"""The commands `fedpress authority ...`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from time import gmtime, strftime
from typing import TYPE_CHECKING, TypeVar

import click

from fedpress.cli.tables import echo, fields, table, terminal_width
from fedpress.command_line import PATH, Group, Number, argument, as_json, read, secret_option
from fedpress_protocols.errors import ConfigurationError

if TYPE_CHECKING:
    from fedpress.authority import EnrolmentAuthority, Entry
    from fedpress_protocols.masking.certificates import Certificate

C = TypeVar("C", bound=Callable[..., object])
_key_file = argument("authority_file", type=PATH, help="The authority's private key.")
_days = click.option(
    "--days",
    type=Number(min=0.01, max=36_500),
    default=365.0,
    help="Validity of certificates in days.",
)
_passphrase = secret_option(
    "ca-passphrase", "The passphrase of an encrypted key; asked for if not set.", is_needed=False
)


@click.group("authority", cls=Group)
def authorities() -> None:
    """Certify devices for secure aggregation: init, issue, renew."""


@authorities.command("init")
@argument("file", type=PATH, help="Where to write the private key.")
@click.option("--encrypt", is_flag=True, help="Protect it with a passphrase.")
@_passphrase
def make_authority(file: Path, encrypt: bool, ca_passphrase: str | None) -> None:
    """Create an authority's key and print its public half, for the server and the devices."""
    from fedpress import authority

    if encrypt and not ca_passphrase:
        ca_passphrase = click.prompt(
            "passphrase", hide_input=True, confirmation_prompt=True, err=True
        )
    if encrypt and not ca_passphrase:
        raise ConfigurationError("an empty passphrase protects nothing")
    click.echo(authority.make_authority(file, str(ca_passphrase) if encrypt else ""))


@authorities.command("public")
@_key_file
@_passphrase
def show_public(authority_file: Path, ca_passphrase: str | None) -> None:
    """Print the authority's public key."""
    click.echo(_opened(authority_file, ca_passphrase).public)


@authorities.command("request")
@argument("state_dir", type=PATH, help="The device's state directory.")
def request_certificate(state_dir: Path) -> None:
    """Print a device's public key, on the device, to have a certificate issued for it."""
    from fedpress import authority

    click.echo(authority.device_key(state_dir))


@authorities.command("issue")
@_key_file
@argument("public_key", required=False, metavar="[PUBLIC_KEY]", help="The device's public key.")
@click.option(
    "--requests",
    type=PATH,
    help="Instead of PUBLIC_KEY: a file of lines KEY NAME.",
)
@click.option(
    "--out", type=PATH, required=True, help="The certificate's file; with --requests their folder."
)
@click.option("--name", default="", show_default=False, help="The device's name.")
@click.option("--population", default="fedpress", help="As the server's --population.")
@click.option("--new-key", is_flag=True, help="The device of this name has rotated its key.")
@_days
@_passphrase
def issue_certificate(
    authority_file: Path,
    public_key: str | None,
    requests: Path | None,
    out: Path,
    name: str,
    population: str,
    new_key: bool,
    days: float,
    ca_passphrase: str | None,
) -> None:
    """Certify a device's key, or many; the files go to the devices."""
    from fedpress import authority

    if (public_key is None) == (requests is None):
        raise click.UsageError("give PUBLIC_KEY or --requests FILE")
    opened = _opened(authority_file, ca_passphrase)
    if requests is not None:
        try:
            asked = authority.read_requests(read(requests).decode("utf-8", "replace"))
        except ConfigurationError as exc:
            raise ConfigurationError(f"{requests}, {exc.detail}", hint=exc.hint) from exc
    else:
        asked = [authority.Request(str(public_key), name)]
    made = opened.issue(asked, population=population, days=days, new_key=new_key)
    if requests is None:
        out.write_bytes(made[0].to_bytes())
        click.echo(f"{out}: good for {days:g} days")
    else:
        _write_all(made, out)


@authorities.command("renew")
@_key_file
@click.option("--out", type=PATH, required=True, help="Folder for the new certificates.")
@click.option(
    "--within",
    type=Number(min=0),
    default=30.0,
    help="Days left.",
)
@_days
@_passphrase
def renew_certificates(
    authority_file: Path, out: Path, within: float, days: float, ca_passphrase: str | None
) -> None:
    """Renew certificates that expire soon or have expired, except those of revoked devices."""
    made = _opened(authority_file, ca_passphrase).renew(within_days=within, days=days)
    _write_all(made, out)


@authorities.command("revoke")
@_key_file
@argument("which", help="A device's key, its id, the name, or a certificate's serial.")
@as_json
def revoke_certificates(authority_file: Path, which: str, as_json: bool) -> None:
    """Stop renewing a device's certificates; revoke the device on the server until they expire."""
    left = _opened(authority_file, None).revoke(which)
    lines = [
        f"key {each.key_id} {each.name}: its certificate is good until {_day(each.expires)}; "
        "revoke the device on the server now: fedpress devices revoke"
        for each in left
    ]
    echo(left, lines or ["its certificates have expired already"], as_json=as_json)


@authorities.command("list")
@_key_file
@click.option("--all", "every", is_flag=True, help="Superseded certificates too.")
@as_json
def list_certificates(authority_file: Path, every: bool, as_json: bool) -> None:
    """List the issued certificates from the register beside the key; needs no passphrase."""
    entries = _opened(authority_file, None).entries()
    listed = [each for each in entries if every or each.state != "superseded"]
    headings = ("key", "state", "expires", "population", "name")
    lines = table(headings, list(map(_row, listed)), width=terminal_width())
    echo(listed, lines if listed else ["no certificate was issued yet"], as_json=as_json)


@authorities.command("inspect")
@argument("certificate", type=PATH, help="A certificate's file.")
@click.option("--authority", help="The public key of the authority that must have signed it.")
@as_json
def inspect_certificate(certificate: Path, authority: str | None, as_json: bool) -> None:
    """Show a certificate; with --authority verify its signature and validity."""
    import time

    from fedpress.authority import inspected, summary_of
    from fedpress_protocols.signatures import from_base64url

    opened = inspected(certificate)
    if authority is not None:
        key = from_base64url(authority, 32)
        opened.check(key, population=opened.population, now=time.time())
    summary = summary_of(opened)
    pairs = (
        ("serial", summary.serial),
        ("key", f"{summary.key} (id {summary.key_id})"),
        ("name", summary.name),
        ("population", summary.population),
        ("expires", strftime("%Y-%m-%d %H:%M:%S UTC", gmtime(summary.expires))),
        ("signature", "of this authority, and good" if authority else ""),
    )
    echo(summary, fields(pairs), as_json=as_json)


def _opened(file: Path, passphrase: str | None) -> EnrolmentAuthority:
    from time import time

    from fedpress.authority import EnrolmentAuthority

    def ask() -> str:
        return passphrase or str(click.prompt(f"passphrase of {file}", hide_input=True, err=True))

    return EnrolmentAuthority(file, ask, time)


def _write_all(made: Sequence[Certificate], folder: Path) -> None:
    """A file for each, by its name or else by its key's id."""
    from fedpress.authority import file_name

    folder.mkdir(parents=True, exist_ok=True)
    for each in made:
        (folder / file_name(each)).write_bytes(each.to_bytes())
    click.echo(f"{folder}: {len(made)} certificates")


def _row(each: Entry) -> tuple[str, ...]:
    return each.key_id, each.state, _day(each.expires), each.population, each.name


def _day(seconds: int) -> str:
    return strftime("%Y-%m-%d", gmtime(seconds))
