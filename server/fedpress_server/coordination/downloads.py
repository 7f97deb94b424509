"""The bytes that devices fetch, booked under the round for which they fetch them."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from typing import Literal

from sqlalchemy.engine import Connection

from fedpress_server.coordination.background import Background
from fedpress_server.coordination.task_store import TaskStore
from fedpress_server.metrics import Metrics
from fedpress_server.observing import outages
from fedpress_server.storage import records
from fedpress_server.storage.batched import Batched
from fedpress_server.storage.database import Database
from fedpress_server.storage.records import RoundKey

Form = Literal["plain", "coded", "difference"]
"""The form in which a model is sent: its file, or coded whole, or coded as a difference."""

_log = logging.getLogger(__name__)


class Downloads:
    """Counts bytes sent. A count that cannot be written is logged, and the device has its model."""

    def __init__(
        self, store: TaskStore, database: Database, metrics: Metrics, background: Background
    ) -> None:
        self._store = store
        self._database = database
        self._metrics = metrics
        self._background = background
        self._add = Batched(self._add_all)

    def count(
        self, client_id: str, task: str, num_bytes: int, form: Form = "plain"
    ) -> asyncio.Task[None]:
        """Book bytes sent under the attempt for which the device fetched them, if there is one.

        Booked once the task is done, awaited or not.
        """
        self._metrics.download_bytes.inc(num_bytes)
        self._metrics.downloaded.labels(form).inc(num_bytes)
        amounts = {"download_bytes": num_bytes}
        if form != "plain":
            amounts[f"{form}_download_bytes"] = num_bytes
        return self._background.finish(self._book(self._downloader(client_id, task), amounts))

    async def _book(self, key: RoundKey | None, amounts: dict[str, int]) -> None:
        num_bytes = amounts["download_bytes"]
        if key is None or not num_bytes:
            return
        try:
            await self._add((key, amounts))
        except Exception as exc:  # the device has its model all the same
            outages.tell(_log, exc, "%d bytes sent could not be booked", num_bytes)

    async def _add_all(self, counts: Sequence[tuple[RoundKey, dict[str, int]]]) -> list[None]:
        """A write for each round, whatever the number of devices that fetch something for it."""
        totals: dict[RoundKey, Counter[str]] = {}
        for key, amounts in counts:
            totals.setdefault(key, Counter()).update(amounts)

        def write(connection: Connection) -> None:
            for key, total in totals.items():
                records.count(connection, key, **total)

        await self._database.write(write)
        return [None] * len(counts)

    def _downloader(self, client_id: str, task: str) -> RoundKey | None:
        live = self._store.tasks.get(task)
        if live is None or live.attempt is None:
            return None
        part = live.attempt.round.part_of(client_id)
        return live.attempt.key if part is not None and part[1].is_open else None
