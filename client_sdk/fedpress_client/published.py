"""The model that a task serves, for inference beside training: its own file, its own connection.

Nothing here touches what training holds: the ledger, its lock, its models. So any thread of the
process may ask, and so may another process on the same state directory.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from fedpress_client.bases import Bases
from fedpress_client.downloads import download_model
from fedpress_client.state import StateDirectory, sweep, write_cache
from fedpress_client.transport import Transport
from fedpress_protocols.errors import (
    ConfigurationError,
    NotFound,
    TransportError,
    Unavailable,
)
from fedpress_protocols.model import Model

_log = logging.getLogger(__name__)

_ABSENT = (TransportError, Unavailable, NotFound)
"""The server is away, or has given the model up between two answers: the one kept goes on."""


class PublishedModel:
    """The model that a task serves, as far as this device knows; safe for threads.

    `connect` opens a transport that is this object's alone for as long as it is in use.
    """

    def __init__(
        self,
        directory: StateDirectory,
        connect: Callable[[], AbstractContextManager[Transport]],
        clock: Callable[[], float],
        max_bytes: int,
    ) -> None:
        self._directory, self._connect = directory, connect
        self._clock, self._max_bytes = clock, max_bytes
        self._bases = Bases(directory)
        self._lock = threading.Lock()
        self._task = ""
        self._newest: tuple[str, Model] | None = None
        """Of `_task`, with its digest."""
        self._asked_at: float | None = None

    def get(self, task: str, max_age: float) -> Model:
        """See `Client.model`."""
        with self._lock:
            if task != self._task:  # a client without a task of its own asks for whichever runs
                self._task, self._newest, self._asked_at = task, None, None
            now = self._clock()
            is_fresh = self._asked_at is not None and 0 <= now - self._asked_at < max_age
            if self._newest is not None and is_fresh:
                return self._newest[1]
            cached = self._newest or self._kept(task)
            try:
                self._newest = self._refreshed(task, cached)
            except _ABSENT as exc:
                if cached is None:
                    raise
                _log.warning("the previous model is used: %s", exc.detail)
                self._newest = cached
            self._asked_at = now
            return self._newest[1]

    def _refreshed(self, task: str, cached: tuple[str, Model] | None) -> tuple[str, Model]:
        with self._connect() as transport:
            summary = transport.task(task)
            digest = summary.served
            if cached is not None and cached[0] == digest:
                return cached
            data = self._trained_on(task, digest)
            if data is not None:
                model = Model.from_bytes(data)
            else:
                files = [] if cached is None else [(cached[0], cached[1].to_bytes())]
                held = files if summary.downlink else None
                data, model = download_model(
                    transport, digest, task, self._max_bytes, held, self._bases
                )
        self._keep(task, data)
        return digest, model

    def _trained_on(self, task: str, digest: str) -> bytes | None:
        """The model's file if training has fetched it already; left as it is in any case."""
        path = self._directory.task_path(task) / "models" / f"{digest}.safetensors"
        try:
            data = path.read_bytes()
        except OSError:
            return None
        return data if hashlib.sha256(data).hexdigest() == digest else None

    def _path(self, task: str) -> Path:
        return self._directory.task_path(task) / "published"

    def _kept(self, task: str) -> tuple[str, Model] | None:
        """The model kept by this process or another, as `_keep` writes it."""
        try:
            data = self._path(task).read_bytes()
        except OSError:
            return None
        digest, data = data[:64].decode("ascii", "replace"), data[64:]
        if hashlib.sha256(data).hexdigest() != digest:
            _log.warning("the model kept in %s is damaged; it is fetched again", self._path(task))
            return None
        try:
            return digest, Model.from_bytes(data)
        except ConfigurationError as exc:
            _log.warning("the model kept in %s cannot be read: %s", self._path(task), exc.detail)
            return None

    def _keep(self, task: str, data: bytes) -> None:
        """Its SHA-256 in hex and then the model, for the next start; a full disk is no reason to do
        without it. Not synced: one that a power cut tears fails its digest."""
        path = self._path(task)
        if not self._directory.budget.admits(path, 64 + len(data)):
            return
        try:
            sweep(self._directory.task_folder(task))
            write_cache(path, hashlib.sha256(data).hexdigest().encode(), data)
        except OSError as exc:
            _log.warning("model not kept for the next start: %s", exc)
