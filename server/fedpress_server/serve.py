"""The application behind uvicorn, with bounds on what a connection may take."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

import uvicorn
from fastapi import FastAPI

from fedpress_protocols.errors import ConfigurationError
from fedpress_server import failpoints
from fedpress_server.api.http_protocol import ConnectionLimits, bounded_protocol
from fedpress_server.app import create_app
from fedpress_server.identity.server_keys import first_keys
from fedpress_server.settings import Settings
from fedpress_server.storage.database import Database, migrate

_log = logging.getLogger(__name__)
_SECRETS = ("admin_token", "store_secret_access_key")


def main(arguments: Sequence[str] | None = None, *, program: str = "fedpress serve") -> None:
    """Serve with the settings that `arguments`, the environment and a TOML file give."""
    _with_settings(serve, "Run the aggregation server.", arguments, program)


def migrate_main(arguments: Sequence[str] | None = None) -> None:
    """Bring the database that such settings name up to date."""
    what = (
        "Bring the database up to date, which servers of a role of their own leave to this, and "
        "make the key files that the settings name if the database has none yet."
    )
    _with_settings(_migrate, what, arguments, "fedpress migrate")


def _migrate(settings: Settings) -> None:
    before, after = migrate(settings.resolved_database_url)
    print(f"the database is at schema {after}" + (f", was at {before}" if before else ""))
    for file in asyncio.run(_first_keys(settings)):
        print(f"made {file}: keep a copy apart, nothing else signs for this database")


async def _first_keys(settings: Settings) -> list[Path]:
    database = Database(settings.resolved_database_url, migrates=False)
    try:
        return await first_keys(settings, database)
    finally:
        await asyncio.to_thread(database.close)


def _with_settings(
    work: Callable[[Settings], None],
    description: str,
    arguments: Sequence[str] | None,
    program: str,
) -> None:
    parser = argparse.ArgumentParser(
        prog=program,
        description=description,
        epilog="A flag goes before its FEDPRESS_* variable, and that before the TOML file. "
        "No secret is a flag itself, as other users could read it there: "
        + ", ".join(f"FEDPRESS_{name.upper()}" for name in _SECRETS)
        + " come from the environment or from a file.",
    )
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        default=os.environ.get("FEDPRESS_CONFIG"),
        help="TOML file of settings, by the flags' names with underscores (FEDPRESS_CONFIG).",
    )
    for name, field in Settings.model_fields.items():
        if name in _SECRETS:
            continue  # every process may read another's command line
        default = "" if field.default in (None, "") else f" Default: {field.default}."
        parser.add_argument(
            "--" + name.replace("_", "-"),
            metavar="VALUE",
            help=f"{field.description}{default} (FEDPRESS_{name.upper()})".replace("%", "%%"),
        )
    flags = vars(parser.parse_args(arguments))
    try:
        config = flags.pop("config")
        work(Settings.load(Path(config) if config else None, **flags))
    except ConfigurationError as exc:
        parser.exit(2, f"{program}: {exc}\n")


def serve(settings: Settings) -> None:
    """Run until SIGTERM or SIGINT; prints one line with the address once it takes requests.

    Raises ConfigurationError if the data folder or the database is not to be had.
    """
    logging.basicConfig(
        level=settings.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    logging.getLogger("alembic").setLevel(logging.WARNING)
    if settings.failpoint:
        _log.warning("this server is to fail at %s", settings.failpoint)
    failpoints.arm(settings.failpoint)
    app = create_app(settings)
    closed = app.state.metrics.closed_connections
    limits = ConnectionLimits(
        header_timeout=settings.header_timeout, body_timeout=settings.body_timeout
    )
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        http=bounded_protocol(limits, lambda reason: closed.labels(reason).inc()),
        ws="none",
        lifespan="off",  # run below, so that a fault at the start comes out as itself
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=int(max(1, settings.header_timeout)),
        timeout_graceful_shutdown=settings.shutdown_seconds,
        ssl_certfile=settings.tls_certificate,
        ssl_keyfile=settings.tls_key,
    )

    async def run() -> None:
        async with app.router.lifespan_context(app):
            await _Server(config, app).serve()

    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(run())


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, app: FastAPI) -> None:
        super().__init__(config)
        self._app = app

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop, and be done with the signal: a server told to stop has not failed."""
        self.force_exit = self.should_exit
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        scheme = "https" if self.config.is_ssl else "http"
        shown = f"[{host}]" if ":" in host else host
        print(f"fedpress server ready on {scheme}://{shown}:{port}", flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._app.state.coordinator.release()
        await super().shutdown(sockets)
