"""The models of a server: brought by operators, found by their digests, coded on their way down."""

from __future__ import annotations

from collections.abc import Callable

from sqlalchemy.engine import Connection

from fedpress_protocols.errors import UnknownModel
from fedpress_protocols.model import Model
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

        def store() -> str:
            spec = Model.from_bytes(data).spec.digest
            self._payloads.put(model_name(digest), data)
            return spec

        spec = await self._background.in_thread(store)
        now = self._clock()
        record = ModelRecord(digest, spec, len(data), now)

        def write(connection: Connection) -> bool:
            is_new = records.add_model(connection, record)
            registry.keep_again(connection, self._payloads, {digest})
            registry.mark_uploaded(connection, digest, now)
            if is_new:
                audit.add(connection, now, by, "model.brought", digest, bytes=len(data))
            return is_new

        return record, await self._database.write(write)
