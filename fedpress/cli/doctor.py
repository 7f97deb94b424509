"""The command `fedpress server doctor`."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path

import click

from fedpress.command_line import PATH, Command, as_json, ca, needs


@click.command("doctor", cls=Command)
@click.option(
    "--config",
    type=PATH,
    envvar="FEDPRESS_CONFIG",
    show_envvar=True,
    help="TOML file of the server's settings; all others are read from FEDPRESS_* variables.",
)
@click.option("--data-dir", type=PATH, help="The server's folder.")
@click.option("--url", default="", help="A running server: check that it is reachable and ready.")
@ca
@click.option(
    "--min-free-mib",
    type=click.IntRange(0),
    default=1024,
    help="Free disk space required, in MiB.",
)
@as_json
def doctor(
    config: Path | None,
    data_dir: Path | None,
    url: str,
    ca: Path | None,
    min_free_mib: int,
    as_json: bool,
) -> None:
    """Diagnose common problems and suggest fixes; exit code 1 if there are any."""
    try:
        from fedpress_server.doctor import examined
        from fedpress_server.settings import Settings
    except ModuleNotFoundError as exc:
        needs("server", exc)
    from fedpress.operator import asked, checked

    if url:
        checked(url)
    findings = list(
        examined(
            lambda: Settings.load(config, data_dir=data_dir),
            url=url,
            ask=lambda where: asked(where, ca=ca),
            clock=time.time,
            min_free_bytes=min_free_mib * 2**20,
        )
    )
    if as_json:
        # `mend`: the earlier name of `fix`, for one more release.
        rows = [asdict(each) | {"is_fault": each.is_fault, "mend": each.fix} for each in findings]
        click.echo(json.dumps(rows, indent=2))
    else:
        for each in findings:
            click.echo(f"{'FAULT' if each.is_fault else 'ok':5}  {each.check}: {each.found}")
            if each.is_fault:
                click.echo(f"       fix: {each.fix}")
    if any(each.is_fault for each in findings):
        raise click.exceptions.Exit(1)
