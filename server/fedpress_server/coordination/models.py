"""The models of a server: brought by operators, found by their digests, coded on their way down."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from sqlalchemy.engine import Connection

from fedpress_protocols.errors import UnknownModel
from fedpress_protocols.model import Model, check_model
from fedpress_server.coordination.background import Background
from fedpress_server.identity import audit
from fedpress_server.registry import versions as registry
from fedpress_server.storage import records
from fedpress_server.storage.database import Database
from fedpress_server.storage.files import model_name
from fedpress_server.storage.payloads import Payloads
from fedpress_server.storage.records import ModelRecord


class Models:
    """Rows and files of models; those that rounds make, the task store writes."""

    def __init__(
        self,
        database: Database,
        payloads: Payloads,
        background: Background,
        clock: Callable[[], float],
    ) -> None:
        self._database = database
        self._payloads = payloads
        self._background = background
        self._clock = clock

    async def get(self, digest: str) -> ModelRecord:
        """Raises UnknownModel."""
        record, is_collected = await self._database.read(
            lambda c: (records.model(c, digest), registry.is_collected(c, digest))
        )
        if is_collected:
            raise UnknownModel(
                f"model {digest[:12]} was given up by the retention of its task",
                hint="fetch the task's newest model, or one that an alias points to",
            )
        if record is None:
            raise UnknownModel(f"no model {digest[:12]} is on this server")
        return record

    async def add(
        self, data: bytes, digest: str, *, by: str = audit.SERVER
    ) -> tuple[ModelRecord, bool]:
        """Keep a model that an operator brings; True if it is new. Raises ConfigurationError."""

        def store() -> ModelRecord:
            spec = Model.from_bytes(data).spec.digest
            self._payloads.put(model_name(digest), data)
            return ModelRecord(digest, spec, len(data), self._clock())

        return await self._added(store, by)

    def temporary(self) -> AbstractContextManager[Path]:
        """The path of a file for `add_file`; removed at the end unless it was added."""
        return self._payloads.temporary()

    async def add_file(
        self, path: Path, digest: str, *, by: str = audit.SERVER
    ) -> tuple[ModelRecord, bool]:
        """As `add`, a model in a temporary file of the store, which is taken over."""

        def store() -> ModelRecord:
            with path.open("rb") as file:
                num_bytes = os.fstat(file.fileno()).st_size
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if num_bytes else b""
            spec = check_model(data).digest
            self._payloads.put_file(model_name(digest), path)
            return ModelRecord(digest, spec, num_bytes, self._clock())

        return await self._added(store, by)

    async def _added(self, store: Callable[[], ModelRecord], by: str) -> tuple[ModelRecord, bool]:
        record = await self._background.in_thread(store)
        digest, now = record.digest, record.created_at

        def write(connection: Connection) -> bool:
            is_new = records.add_model(connection, record)
            registry.keep_again(connection, self._payloads, {digest})
            registry.mark_uploaded(connection, digest, now)
            if is_new:
                audit.add(connection, now, by, "model.brought", digest, bytes=record.num_bytes)
            return is_new

        return record, await self._database.write(write)
