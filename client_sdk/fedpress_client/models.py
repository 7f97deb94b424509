"""Models and other files that a plan names: from the task's folder, or else from the server.

Each is named by its SHA-256, which is checked whatever way it came.
"""

from __future__ import annotations

import hashlib

import numpy as np

from fedpress_client import tracing
from fedpress_client.bases import Bases
from fedpress_client.downloads import BASES, download_model
from fedpress_client.joined_task import JoinedTask
from fedpress_client.transport import Transport
from fedpress_compression import activity
from fedpress_compression.tensors import ModelSpec, Vector
from fedpress_protocols.errors import DecodingError, DigestMismatch, IncompatiblePlan
from fedpress_protocols.model import Model
from fedpress_protocols.plan import RoundPlan


class TaskModels:
    """Downloads, one model at a time in memory."""

    def __init__(self, transport: Transport, max_model_bytes: int, bases: Bases) -> None:
        self._transport, self._max_model_bytes, self._bases = transport, max_model_bytes, bases
        self._newest: tuple[str, Model] | None = None

    @tracing.traced("fetch")
    def fetch(self, task: JoinedTask, digest: str) -> Model:
        """A model, which stays in memory until another is fetched."""
        if self._newest is None or self._newest[0] != digest:
            self._newest = None  # two at a time would be one too many for a small device
            self._newest = (digest, self.read(task, digest))
        return self._newest[1]

    def forget(self) -> None:
        """Drop the model in memory; the next use reads it from the disk or the server."""
        self._newest = None

    def read(self, task: JoinedTask, digest: str) -> Model:
        """A model from the task's folder, or else from the server."""
        data = task.files.model(digest)
        if data is not None:
            return Model.from_bytes(data)
        held = None
        if task.has_downlink:
            files = ((each, task.files.model(each)) for each in task.files.newest())
            held = ((each, data) for each, data in files if data is not None)
        limit = self._max_model_bytes
        data, model = download_model(self._transport, digest, task.name, limit, held, self._bases)
        task.files.keep_model(digest, data)
        return model

    def keep_only(self, task: JoinedTask, plan: RoundPlan) -> None:
        """Remove the files that neither `plan` nor the download of its model needs."""
        required = {plan.model, *plan.sources.values(), *plan.artefacts}
        newest = task.files.newest()
        if task.has_downlink and plan.model not in newest:
            required |= set(newest[:BASES])
        task.files.drop_models(besides=required)

    def activity_map(self, task: JoinedTask, digest: str, spec: ModelSpec) -> Vector:
        """A map of activity [spec.size]; raises IncompatiblePlan if it is none."""
        data = self._artefact(task, digest, activity.max_bytes(spec))
        try:
            return activity.from_bytes(data, spec)
        except DecodingError as exc:
            raise IncompatiblePlan(f"{digest[:12]} is no map of activity: {exc.detail}") from exc

    def server_control(self, task: JoinedTask, plan: RoundPlan, spec: ModelSpec) -> Vector | None:
        """The server's control variate [spec.size]; None if the plan names none."""
        control = plan.client_terms.control
        if control is None or control.server is None:
            return None
        data = self._artefact(task, control.server, 4 * spec.size)
        if len(data) != 4 * spec.size:
            raise IncompatiblePlan(
                f"a control variate of {len(data)} bytes where {4 * spec.size} are due"
            )
        return np.frombuffer(data, "<f4").astype(np.float32)

    def _artefact(self, task: JoinedTask, digest: str, max_bytes: int) -> bytes:
        data = task.files.model(digest)
        if data is None:
            data = self._transport.artefact(digest, max_bytes, task.name)
            _keep(task, digest, data)
        return data


def check_digest(data: bytes, digest: str) -> None:
    """Raises DigestMismatch unless `digest` is the SHA-256 of `data`."""
    if hashlib.sha256(data).hexdigest() != digest:
        raise DigestMismatch(f"{digest[:12]} came with other bytes")


def _keep(task: JoinedTask, digest: str, data: bytes) -> None:
    check_digest(data, digest)
    task.files.keep_model(digest, data)
