"""The fake server with bodies that come by parts and models that go down coded, and its links."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from fedpress_client.parts import Delivery, PartSizes
from fedpress_protocols.downlink import encode_difference, encode_model, on_grid
from fedpress_protocols.errors import DigestMismatch, NotFound, OffsetConflict, UnknownPartial
from fedpress_protocols.messages import (
    PartialCompletion,
    PartialIntent,
    PartialUpload,
    TaskSummary,
    UploadAck,
    UploadFigures,
)
from fedpress_protocols.model import Model
from tests.client.fake_server import Drops, FakeServer

PARTS_ABOVE = 40
PART_BYTES = 64
BITS = 12


def rounded(model: Model) -> Model:
    found = np.empty_like(model.parameters)
    for tensor, where in zip(model.spec.trained, model.spec.slices.values(), strict=True):
        found[where] = on_grid(tensor, model.parameters[where], BITS)
    return model.with_parameters(found)


@dataclass
class CodedServer(FakeServer):
    """Every model that it publishes lies on a grid; `held` has the parts by assignment."""

    held: dict[str, tuple[str, bytearray]] = field(default_factory=dict)
    begun: int = 0
    completed: int = 0
    """Uploads whose parts were joined."""

    def _publish(self, model: Model) -> None:
        super()._publish(rounded(model))

    @property
    def summary(self) -> TaskSummary:
        return super().summary.model_copy(update={"downlink": True})

    def told(self, assignment: str, ack: UploadAck | None = None) -> PartialUpload:
        name, data = (None, bytearray()) if ack is not None else self.held[assignment]
        return PartialUpload(
            partial=name,
            offset=len(data),
            digest=hashlib.sha256(data).hexdigest(),
            part_bytes=PART_BYTES,
            expires_at=0.0,
            ack=ack,
        )

    def data(self, assignment: str, partial: str) -> bytearray:
        name, data = self.held.get(assignment, ("", bytearray()))
        if name != partial:
            raise UnknownPartial(f"no upload {partial} of {assignment}")
        return data


class CodedLink(Drops):
    """A link that loses what Drops loses, of parts and of coded models too, and damages some."""

    parts_above = PARTS_ABOVE

    def __init__(self, server: CodedServer, rng: np.random.Generator, chance: float) -> None:
        super().__init__(server, rng, chance)
        self.coded_server, self.rng, self.chance = server, rng, chance
        self.sizes = PartSizes(num_bytes=PART_BYTES)

    # Models

    def coded(self, digest: str, max_bytes: int, task: str) -> bytes:
        for _ in self._around("coded"):
            data = encode_model(Model.from_bytes(self.server.models[digest]))
        return self._damaged(data)

    def difference(self, digest: str, base: str, max_bytes: int, task: str) -> bytes:
        for _ in self._around("difference"):
            if base not in self.server.models or self.rng.random() < self.chance:
                raise NotFound(f"{digest[:12]} is not offered from {base[:12]}")
            before, after = (Model.from_bytes(self.server.models[each]) for each in (base, digest))
            data = encode_difference(before, after)
        return self._damaged(data)

    def _damaged(self, data: bytes) -> bytes:
        if self.rng.random() >= self.chance:
            return data
        at = int(self.rng.integers(len(data)))
        return data[:at] + bytes((data[at] ^ 0x10,)) + data[at + 1 :]

    # Bodies

    def upload(
        self, assignment: str, body: bytes, figures: UploadFigures | None = None
    ) -> UploadAck:
        if len(body) <= self.parts_above:
            return super().upload(assignment, body, figures)
        return Delivery(self, assignment, self.sizes, lambda: 0.0).whole(body)

    def ahead(
        self,
        assignment: str,
        max_bytes: int,
        source: Callable[[int, int], bytes],
        begun: Callable[[str], None],
    ) -> None:
        delivery = Delivery(self, assignment, self.sizes, lambda: 0.0)
        delivery.ahead(source, max_bytes, begun)

    def begin_parts(self, assignment: str, intent: PartialIntent) -> PartialUpload:
        server = self.coded_server
        for _ in self._around("begin"):
            part = server.parts[assignment]
            held = None if part.body is None else hashlib.sha256(part.body).hexdigest()
            if held is not None or part.receipt is not None:
                # What a body in one would be answered, whatever its bytes.
                body = part.body if held == intent.upload and part.body is not None else b"other"
                return server.told(assignment, server.upload(self.client_id, assignment, body))
            if assignment not in server.held:
                server.begun += 1
                server.held[assignment] = (f"u{server.begun}", bytearray())
            told = server.told(assignment)
        return told

    def held_parts(self, assignment: str, partial: str) -> PartialUpload:
        for _ in self._around("held"):
            self.coded_server.data(assignment, partial)
            told = self.coded_server.told(assignment)
        return told

    def send_part(self, assignment: str, partial: str, offset: int, part: bytes) -> PartialUpload:
        for _ in self._around("part"):
            if self.rng.random() < self.chance / 5:  # it has expired
                self.coded_server.held.pop(assignment, None)
            data = self.coded_server.data(assignment, partial)
            if offset != len(data):
                raise OffsetConflict(offset=len(data))
            assert 0 < len(part) <= PART_BYTES
            data += part
            told = self.coded_server.told(assignment)
        return told

    def complete_parts(
        self, assignment: str, partial: str, completion: PartialCompletion, query: str = ""
    ) -> UploadAck:
        server = self.coded_server
        for _ in self._around("completion"):
            data = bytes(server.data(assignment, partial))
            if len(data) != completion.num_bytes:
                raise OffsetConflict(offset=len(data))
            if hashlib.sha256(data).hexdigest() != completion.upload:
                raise DigestMismatch
            del server.held[assignment]
            ack = server.upload(self.client_id, assignment, data)
            server.completed += 1
        return ack

    def drop_parts(self, assignment: str, partial: str) -> None:
        for _ in self._around("drop"):
            self.coded_server.held.pop(assignment, None)
