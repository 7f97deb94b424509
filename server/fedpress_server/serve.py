"""Running the application under uvicorn with connection limits."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import signal
import socket
import threading
from contextlib import suppress
from contextvars import Context
from types import FrameType
from urllib.parse import unquote, urlsplit

import uvicorn
from pydantic import SecretStr

from fedpress_server import failpoints, open_files
from fedpress_server.api.http_protocol import ConnectionLimits, bounded_protocol
from fedpress_server.api.listeners import Listening
from fedpress_server.app import create_app
from fedpress_server.observing import logs
from fedpress_server.preconditions import cannot_listen
from fedpress_server.settings import Settings, unknown_variables
from fedpress_server.systems import check_system
from fedpress_server.tls import Certificates, certificates_of

_log = logging.getLogger(__name__)
_COLLECT_AFTER = 5_000
"""The garbage collector's threshold instead of Python's 700: requests create no cycles."""
_LOOK = 0.1
"""Poll interval in seconds for a second signal during shutdown."""
_LAST_REQUESTS = 0.2
"""Seconds to wait for the first bytes of connections accepted just before shutdown."""


def serve(settings: Settings) -> None:
    """Run until SIGTERM or SIGINT; prints one line with the address once it accepts requests.

    Raises ConfigurationError if the data folder or the database cannot be used, and on Windows.
    """
    check_system()
    lines = logs.install(
        settings.log_level, settings.log_format, role=settings.role, secrets=_spelt(settings)
    )
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGUSR1, lambda *_: _toggle(settings.log_level))
    for unknown in unknown_variables():
        _log.warning("%s", unknown)
    if settings.failpoint:
        _log.warning("this server has the failpoints %s", settings.failpoint)
    failpoints.arm(settings.failpoint)
    app = create_app(settings, lines=lines)
    closed = app.process.metrics.closed_connections
    files = open_files.raise_limit()
    in_all, of_address = open_files.connections(settings, files)
    if open_files.needed(settings) > files:
        _log.warning(
            "max_connections is %d, but only %d files may be open: set LimitNOFILE or ulimit -n "
            "to %d",
            in_all,
            files,
            open_files.needed(settings),
        )
    limits = ConnectionLimits(
        header_timeout=settings.header_timeout,
        body_timeout=settings.body_timeout,
        connections=in_all,
        address_connections=of_address,
        trusted_proxies=settings.proxies,
    )
    protocol = bounded_protocol(limits, lambda reason: closed.labels(reason).inc())
    public, to_operators = certificates_of(settings)
    config = _listening(settings, app, settings.host, settings.port, protocol, public)
    apart = None
    if app.for_operators is not None:
        where = (settings.admin_host, settings.admin_port or 0)
        apart = _listening(settings, app.for_operators, *where, protocol, to_operators)

    async def run() -> None:
        async with app.router.lifespan_context(app):
            renewing = [
                asyncio.create_task(each.renew_forever())
                for each in (public, to_operators)
                if each is not None
            ]
            try:
                await _Server(config, app, apart).serve()
            finally:
                for task in renewing:
                    task.cancel()

    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(run())


def _listening(
    settings: Settings,
    app: Listening,
    host: str,
    port: int,
    protocol: type[asyncio.Protocol],
    certificates: Certificates | None,
) -> uvicorn.Config:
    """The uvicorn configuration of a listener; both listeners have the same limits."""
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        http=protocol,
        ws="none",
        lifespan="off",  # run below, so that an error at startup is raised unchanged
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=int(max(1, settings.header_timeout)),
        timeout_graceful_shutdown=settings.shutdown_seconds,
        ssl_certfile=settings.tls_certificate,
        ssl_keyfile=settings.tls_key,
    )
    config.load()
    config.ssl = certificates.context if certificates else None
    return config


def _toggle(configured: logs.Level) -> None:
    level = logs.toggle(configured)
    Context().run(_log.warning, "the log level is %s now", level)  # it belongs to no request


def _spelt(settings: Settings) -> list[str]:
    """The secrets in these settings."""
    secrets = [each for _, each in settings if isinstance(each, SecretStr)]
    spellings = [each.get_secret_value() for each in secrets]
    with suppress(ValueError):
        password = urlsplit(settings.database_url).password or ""
        spellings += [password, unquote(password)]
    return [each for each in spellings if each]


class _Server(uvicorn.Server):
    """One server with one or two listeners: `apart` is the separate one for operators."""

    def __init__(
        self, config: uvicorn.Config, app: Listening, apart: uvicorn.Config | None
    ) -> None:
        super().__init__(config)
        self._app = app
        self._apart = apart
        self._is_ready = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop, and consume the signal: a requested stop is no failure."""
        self.force_exit = self.should_exit
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except SystemExit as exc:  # uvicorn's answer to an OSError, which it has logged
            if not isinstance(exc.__context__, OSError):
                raise
            config = self.config
            raise cannot_listen(exc.__context__, config.host, config.port) from exc
        if self._apart is not None:
            self.servers.append(await self._listen_apart(self._apart))
        _settle()
        if self._apart is not None:
            self._tell(f"fedpress operators' listener on {_address(self._apart, self.servers[1])}")
        self._tell(f"fedpress server ready on {_address(self.config, self.servers[0])}")
        self._is_ready = True

    async def _listen_apart(self, config: uvicorn.Config) -> asyncio.Server:
        """Start the operators' listener; it shares connection limits and shutdown with the
        other."""

        def made() -> asyncio.Protocol:
            protocol: asyncio.Protocol = config.http_protocol_class(  # type: ignore[call-arg]
                config=config, server_state=self.server_state, app_state=self.lifespan.state
            )
            return protocol

        try:
            return await asyncio.get_running_loop().create_server(
                made, host=config.host, port=config.port, ssl=config.ssl, backlog=config.backlog
            )
        except OSError as exc:
            await self.shutdown()
            raise cannot_listen(exc, config.host, config.port, "admin_") from exc

    def _tell(self, line: str) -> None:
        if self._app.process.settings.log_format == "json":
            _log.info(line)
        else:
            print(line, flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Report not ready, then stop accepting connections, then let running requests finish."""
        services = self._app.services
        services.readiness.is_stopping = True
        services.scheduler.release()
        is_asked = services.settings.role in ("all", "api")
        if self._is_ready and services.store.is_shared and is_asked:
            await self._pause(services.settings.drain_seconds)
        for server in self.servers:
            server.close()
        await self._pause(_LAST_REQUESTS)
        await super().shutdown(sockets)

    async def _pause(self, seconds: float) -> None:
        """Sleep until the timeout or a second signal."""
        for _ in range(math.ceil(seconds / _LOOK)):
            if self.force_exit:
                return
            await asyncio.sleep(_LOOK)


def _settle() -> None:
    """Freeze the objects created at startup for the garbage collector: scanning them takes 0.1 s,
    in which nothing else runs, every few hundred requests."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_COLLECT_AFTER, *gc.get_threshold()[1:])


def _address(config: uvicorn.Config, server: asyncio.Server) -> str:
    host, port = server.sockets[0].getsockname()[:2]
    shown_host = f"[{host}]" if ":" in host else host
    return f"{'https' if config.is_ssl else 'http'}://{shown_host}:{port}"
