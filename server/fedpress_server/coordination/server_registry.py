"""The servers of one database: each gives signs of itself there, and does what all are asked to.

Behind a proxy nobody chooses the server that answers. So what an operator asks of "the server" is
asked of the database, and every server, workers and schedulers too, answers for itself there.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, cast

from sqlalchemy.engine import Connection

from fedpress_protocols.fleet import (
    FleetStatus,
    LogLevel,
    Quantiles,
    ServerList,
    ServerLogLevel,
    ServerSince,
    ServerStatus,
)
from fedpress_server.identity import audit
from fedpress_server.metrics import Metrics
from fedpress_server.observing import logs, outages
from fedpress_server.observing.series import Distribution
from fedpress_server.settings import Settings
from fedpress_server.storage import leases, servers
from fedpress_server.storage.database import Database
from fedpress_server.storage.servers import ServerRecord

_EVERY = servers.GONE_SECONDS / 3
"""Seconds between two signs where nobody asks for any."""
_EVERY_ALONE = 60.0
"""... of the one server of a SQLite file: whoever comes after it sees until when it ran."""
_REMOVED = 3600.0
"""Seconds without a sign after which it is no longer listed either."""
_PATIENCE = 2.0
"""Seconds that whoever asks all servers waits for them."""
_LOG_LEVEL = "log-level"
"""The topic of the notification that all servers shall change their log level."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FleetCounts:
    """Device counters of one server or several: sums, which can be added up."""

    since: float
    """Unix seconds: when the first of them was started."""
    uplink: Sequence[int]
    ahead: Sequence[int]
    behind: Sequence[int]
    """Observations by bucket, of `Metrics.uplink` and of both sides of `Metrics.clock_skew`."""
    uplink_unmeasured: int
    download_bytes: int
    answer_bytes: int
    staged_bytes: int
    staged_float32_bytes: int

    @classmethod
    def of(cls, metrics: Metrics) -> FleetCounts:
        egress = {str(kind): each.value for (kind,), each in metrics.egress}
        return cls(
            metrics.since,
            tuple(metrics.uplink.labels().counts),
            tuple(metrics.clock_skew.labels("ahead").counts),
            tuple(metrics.clock_skew.labels("behind").counts),
            int(metrics.uplink_unmeasured.labels().value),
            int(egress.get("download", 0)),
            int(egress.get("answer", 0)),
            int(sum(each.value for _, each in metrics.staged_bytes)),
            int(sum(each.value for _, each in metrics.staged_float32_bytes)),
        )

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @classmethod
    def from_json(cls, fields: Any) -> FleetCounts:
        """Raises TypeError or KeyError for another release's that has other fields."""
        return cls(**{name: fields[name] for name in cls.__dataclass_fields__})

    def plus(self, other: FleetCounts) -> FleetCounts:
        """Of both. Raises ValueError where another release counts in other buckets."""

        def added(ours: Sequence[int], theirs: Sequence[int]) -> tuple[int, ...]:
            return tuple(a + b for a, b in zip(ours, theirs, strict=True))

        return FleetCounts(
            min(self.since, other.since),
            added(self.uplink, other.uplink),
            added(self.ahead, other.ahead),
            added(self.behind, other.behind),
            self.uplink_unmeasured + other.uplink_unmeasured,
            self.download_bytes + other.download_bytes,
            self.answer_bytes + other.answer_bytes,
            self.staged_bytes + other.staged_bytes,
            self.staged_float32_bytes + other.staged_float32_bytes,
        )


@dataclass(frozen=True, slots=True)
class Signs:
    """What a server says of itself beside its settings and its metrics."""

    version: str
    holder: str
    """See `ServerRecord`."""
    lag: Callable[[], float]
    """Seconds by which its own work is late."""


class ServerRegistry:
    """This server among those of its database. `start()` and `stop()` it."""

    def __init__(
        self,
        settings: Settings,
        database: Database,
        metrics: Metrics,
        now: Callable[[Connection], float],
        signs: Signs,
    ) -> None:
        """`now` is the clock of all servers: the database's."""
        self._database, self._metrics, self._now = database, metrics, now
        self._role = settings.role
        self._signs = signs
        self._server_id = secrets.token_hex(8)
        self._host = socket.gethostname()
        self.name = f"{settings.role} {self._host} {os.getpid()}"
        self._asked = asyncio.Event()
        self._turn = asyncio.Lock()
        """One sign at a time: the last one that is written has the last level."""
        self._signing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self._sign()
        if self._database.is_shared:
            loop = asyncio.get_running_loop()

            def heard(topic: str | None) -> None:
                if topic in (None, _LOG_LEVEL):
                    with suppress(RuntimeError):  # the loop has ended
                        loop.call_soon_threadsafe(self._asked.set)

            self._database.listen(heard)
        self._signing = asyncio.create_task(self._sign_forever())

    async def stop(self) -> None:
        if self._signing is not None:
            self._signing.cancel()
            await asyncio.gather(self._signing, return_exceptions=True)
        try:
            await self._database.write(lambda c: servers.remove(c, self._server_id), locks=True)
        except Exception as exc:  # it is not counted any more in a moment
            outages.tell(_log, exc, "this server could not take its leave")

    async def _sign_forever(self) -> None:
        every = _EVERY if self._database.is_shared else _EVERY_ALONE
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(every):
                    await self._asked.wait()
            self._asked.clear()
            try:
                await self._sign()
            except Exception as exc:  # the database is away for a while
                outages.tell(_log, exc, "this server could not give a sign of itself")

    async def _sign(self) -> None:
        async with self._turn:
            requested = await self._write_sign()
            if requested is not None and requested != logs.level_now():
                _log.warning("the log level is %s now", requested)
                logs.set_level(cast(LogLevel, requested))
                await self._write_sign()  # that it is so

    async def _write_sign(self) -> str | None:
        """The log level that this server was asked for."""
        sign = self._as_it_is()

        def write(connection: Connection) -> str | None:
            now = self._now(connection)
            servers.remove_silent(connection, now - _REMOVED)
            return servers.heartbeat(connection, replace(sign, seen_at=now))

        return await self._database.write(write, locks=True)

    def _as_it_is(self) -> ServerRecord:
        """This server, with no time at which it was seen."""
        return ServerRecord(
            self._server_id,
            self.name,
            self._role,
            0.0,
            logs.level_now(),
            FleetCounts.of(self._metrics).to_json(),
            self._host,
            self._signs.version,
            self._signs.holder,
            self._metrics.since,
            self._signs.lag(),
        )

    async def _running(self) -> list[ServerRecord]:
        """Every server that runs: this one as it is, the others as their last signs have them."""
        this = self._as_it_is()

        def read(connection: Connection) -> list[ServerRecord]:
            now = self._now(connection)
            return _listed(connection, replace(this, seen_at=now), now - servers.GONE_SECONDS)

        return await self._database.read(read)

    async def status(self) -> ServerList:
        """List the servers that run, and those that fell silent within the last hour."""
        this = self._as_it_is()

        def read(connection: Connection) -> ServerList:
            now = self._now(connection)
            held, wait = leases.num_held(connection, now), leases.longest_wait(connection, now)
            return ServerList(
                servers=tuple(
                    ServerStatus(
                        server=each.name,
                        role=each.role,
                        version=each.version,
                        host=each.host,
                        started_at=each.started_at,
                        seen_at=each.seen_at,
                        is_stale=each.seen_at < now - servers.GONE_SECONDS,
                        leases=held[each.holder],
                        lag_seconds=max(each.lag, wait) if each.holder else each.lag,
                        log_level=cast(LogLevel, each.log_level),
                    )
                    for each in _listed(connection, replace(this, seen_at=now), now - _REMOVED)
                )
            )

        return await self._database.read(read)

    async def log_levels(self) -> tuple[ServerLogLevel, ...]:
        """By role and name."""
        return tuple(
            ServerLogLevel(server=each.name, level=cast(LogLevel, each.log_level))
            for each in await self._running()
        )

    async def set_log_level(
        self, level: LogLevel, by: str, at: float
    ) -> tuple[ServerLogLevel, ...]:
        """Have every server log from `level` on; what each logs then. One that has not said so
        after a moment is told of as it was, and follows with its next sign."""

        def write(connection: Connection) -> None:
            audit.add(connection, at, by, "log-level.changed", self._host, level=level)
            servers.ask_log_level(connection, level)
            self._database.notify(connection, _LOG_LEVEL)

        await self._database.write(write)
        _log.warning("the log level of all servers is to be %s", level, extra={"by": by})
        await self._sign()
        give_up = time.monotonic() + _PATIENCE
        while True:
            levels = await self.log_levels()
            if all(each.level == level for each in levels) or time.monotonic() > give_up:
                return levels
            await asyncio.sleep(0.05)

    async def fleet(self) -> FleetStatus:
        """Add up the device counters of all running servers, each since its start."""
        metrics, total = self._metrics, FleetCounts.of(self._metrics)
        listed = list[ServerSince]()
        for each in await self._running():
            if each.role not in ("all", "api"):
                continue  # no device comes there
            try:
                counts = FleetCounts.from_json(each.fleet)
                if each.server_id != self._server_id:
                    total = total.plus(counts)
            except (KeyError, TypeError, ValueError):
                _log.warning("%s is of another release: its devices are not counted", each.name)
                continue
            listed.append(ServerSince(server=each.name, since=counts.since))
        sent = total.download_bytes + total.answer_bytes
        return FleetStatus(
            server=self.name,
            since=total.since,
            uplink_bits_per_second=_spread(metrics.uplink.labels(), total.uplink),
            uplink_unmeasured=total.uplink_unmeasured,
            clocks_ahead_seconds=_spread(metrics.clock_skew.labels("ahead"), total.ahead),
            clocks_behind_seconds=_spread(metrics.clock_skew.labels("behind"), total.behind),
            download_bytes=total.download_bytes,
            answer_bytes=total.answer_bytes,
            egress_cost=metrics.cost(sent),
            egress_currency=metrics.currency,
            staged_bytes=total.staged_bytes,
            staged_float32_bytes=total.staged_float32_bytes,
            servers=tuple(listed),
        )


def _listed(connection: Connection, this: ServerRecord, since: float) -> list[ServerRecord]:
    """This server and the others with a sign since then, by role and name."""
    others = servers.listed(connection, since)
    every = [this, *(each for each in others if each.server_id != this.server_id)]
    return sorted(every, key=lambda each: (each.role, each.name))


def _spread(ours: Distribution, counts: Sequence[int]) -> Quantiles:
    distribution = ours.with_counts(counts)
    return Quantiles(
        num=sum(counts),
        tenth=distribution.quantile(0.1),
        median=distribution.quantile(0.5),
        nine_tenths=distribution.quantile(0.9),
    )
