"""The commands `fedpress server key ...`: the key that signs receipts, and its rotation."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from fedpress.cli.tables import echo
from fedpress.command_line import PATH, Group, as_json, needs

if TYPE_CHECKING:
    from fedpress_server.identity.rotation import Standing
    from fedpress_server.storage.database import Database

T = TypeVar("T")
_config = click.option(
    "--config",
    type=PATH,
    envvar="FEDPRESS_CONFIG",
    show_envvar=True,
    help="TOML file of the server's settings; all others are read from FEDPRESS_* variables.",
)
_data_dir = click.option("--data-dir", type=PATH, help="The server's folder.")


@click.group("key", cls=Group)
def server_keys() -> None:
    """Rotate the key that signs receipts, on the server's machine: rotate, switch, retire."""


@server_keys.command("show")
@_data_dir
@_config
@as_json
def show(data_dir: Path | None, config: Path | None, as_json: bool) -> None:
    """Show the current, next and former keys, and which are on this machine."""
    from fedpress_server.identity import rotation

    standing = _with(config, data_dir, rotation.standing)
    echo(standing, _lines(standing), as_json=as_json)


@server_keys.command("rotate")
@_data_dir
@_config
@as_json
def rotate(data_dir: Path | None, config: Path | None, as_json: bool) -> None:
    """Create the next key, announced and signed by the current one."""
    from time import time

    from fedpress_server.identity import rotation

    place: list[Path] = []

    def work(database: Database, file: Path) -> Awaitable[Standing]:
        place.append(rotation.next_file(file))
        return rotation.rotate(database, file, time)

    standing = _with(config, data_dir, work)
    lines = (
        f"made {place[0]}: key {standing.next}, which does not sign yet",
        "copy it beside the key of every server that has files of its own, then:",
        "  fedpress server key switch",
    )
    echo(standing, lines, as_json=as_json)


@server_keys.command("switch")
@_data_dir
@_config
@as_json
def switch(data_dir: Path | None, config: Path | None, as_json: bool) -> None:
    """Sign with the next key from now on; on other machines, move its file into place."""
    from time import time

    from fedpress_server.identity import rotation

    standing = _with(config, data_dir, lambda base, file: rotation.switch(base, file, time))
    echo(standing, _lines(standing), as_json=as_json)


@server_keys.command("replace")
@_data_dir
@_config
@click.confirmation_option(prompt="Devices trust nothing until they get the new key. Continue?")
@as_json
def replace(data_dir: Path | None, config: Path | None, as_json: bool) -> None:
    """After a leak: sign with a new, unannounced key and erase the old one."""
    from time import time

    from fedpress_server.identity import rotation

    standing = _with(config, data_dir, lambda base, file: rotation.replace(base, file, time))
    then = f"each device now needs: fedpress client join --server-key {standing.public}"
    lines = [*_lines(standing), then]
    echo(standing, lines, as_json=as_json)


@server_keys.command("retire")
@_data_dir
@_config
@as_json
def retire(data_dir: Path | None, config: Path | None, as_json: bool) -> None:
    """Erase this machine's copy of the previous key, once no masked round needs it."""
    from time import time

    from fedpress_server.identity import rotation

    standing = _with(config, data_dir, lambda base, file: rotation.retire(base, file, time))
    erased = standing.erased
    line = f"key {erased} is erased" if erased else "no former key is on this machine"
    echo(standing, (line,), as_json=as_json)


def _lines(standing: Standing) -> list[str]:
    def where(key: str) -> str:
        return "on this machine" if key in standing.here else "not on this machine"

    lines = [
        f"signs    {standing.current}  {where(standing.current)}",
        f"public   {standing.public}",
    ]
    if standing.next is not None:
        lines.append(f"next     {standing.next}  {where(standing.next)}")
    lines += [f"former   {key}  {where(key)}" for key in reversed(standing.former)]
    return lines


def _with(
    config: Path | None, data_dir: Path | None, work: Callable[[Database, Path], Awaitable[T]]
) -> T:
    """Run `work` on the database and the path of the server's key."""
    import asyncio

    try:
        from fedpress_server.identity.server_keys import key_file
        from fedpress_server.settings import Settings
        from fedpress_server.storage.database import Database, damage_refused
    except ModuleNotFoundError as exc:
        needs("server", exc)
    settings = Settings.load(config, data_dir=data_dir)

    async def run() -> T:
        database = Database(settings.resolved_database_url, migrates=False)
        try:
            return await work(database, key_file("server", settings))
        finally:
            await asyncio.to_thread(database.close)

    with damage_refused():
        return asyncio.run(run())
