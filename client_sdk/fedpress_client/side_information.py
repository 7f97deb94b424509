"""Side information that compressors read, as a device obtains it: how the model came about, and
what the device's own last included upload stood for. See `fedpress_compression.public.Public`."""

from __future__ import annotations

import hashlib

import numpy as np

from fedpress_client.joined_task import JoinedTask
from fedpress_client.models import TaskModels, check_digest
from fedpress_client.transport import Transport
from fedpress_compression.coding.fields import Known
from fedpress_compression.compressor import Knowledge
from fedpress_compression.tensors import ModelSpec, Vector
from fedpress_protocols.errors import IncompatiblePlan
from fedpress_protocols.messages import Assignment
from fedpress_protocols.model import Model


class SideInformation:
    """Resolves each kind of side information, from files, the account or the server."""

    def __init__(self, models: TaskModels, transport: Transport) -> None:
        self._models, self._transport = models, transport

    def gather(
        self, task: JoinedTask, assignment: Assignment, model: Model, needs: frozenset[Knowledge]
    ) -> dict[Knowledge, Vector]:
        """The kinds that a compressor `needs`, each [size of what the plan's uploads are over]."""
        plan = assignment.plan
        shared = plan.shared(model.spec)
        values: dict[Knowledge, Vector] = {}
        for kind, digest in plan.sources.items():
            if kind not in needs:
                continue
            if digest is None or digest == plan.model:  # the first round
                values[kind] = np.zeros(shared.size, np.float32)
            elif kind == "activity":
                values[kind] = self._models.activity_map(task, digest, shared)
            else:
                change = self._moved_since(task, digest, model, kind)
                values[kind] = model.spec.part(change, shared)
        if "own" in needs:
            values["own"] = self._own(task, assignment, shared)
        return values

    def _moved_since(self, task: JoinedTask, digest: str, model: Model, kind: Known) -> Vector:
        """The difference of `model` to an earlier one."""
        other = self._models.read(task, digest)
        if other.spec.digest != model.spec.digest:
            raise IncompatiblePlan(f"the model that {kind} is taken from has other tensors")
        return model.parameters - other.parameters

    def _own(self, task: JoinedTask, assignment: Assignment, spec: ModelSpec) -> Vector:
        """The update that this device's last included upload stood for, as the assignment names it:
        from the account, or from the server if the account has been lost."""
        digest, own, num_bytes = assignment.own, task.ledger.own, 4 * spec.size
        if digest is None:
            return np.zeros(spec.size, np.float32)
        data = b"" if own is None else own[1].astype("<f4").tobytes()
        if hashlib.sha256(data).hexdigest() != digest:
            data = self._transport.own(assignment.assignment, digest, num_bytes, task.name)
            check_digest(data, digest)
        if len(data) != num_bytes:
            raise IncompatiblePlan(f"an upload before is of {len(data)} bytes, not {num_bytes}")
        return np.frombuffer(data, "<f4").astype(np.float32)
