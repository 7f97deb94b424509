"""Masked bodies by parts, however small; and nothing else changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedpress_client.http_parts import HttpParts
from fedpress_client.parts import PartSizes
from fedpress_client.transport import HttpTransport
from fedpress_protocols.messages import PartialUpload, UploadAck
from tests.masked import TASK, drive
from tests.server.in_process import Clock, history
from tests.system.test_masked_sessions import World

PART = 16


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Makes every body go by parts of PART bytes; the assignments that they were of."""
    sent: list[str] = []
    send = HttpParts.send_part

    def counted(
        self: HttpParts, assignment: str, partial: str, offset: int, part: bytes
    ) -> PartialUpload:
        sent.append(assignment)
        return send(self, assignment, partial, offset, part)

    monkeypatch.setattr(PartSizes, "next", lambda self, most: PART)

    def by_parts(self: HttpTransport, assignment: str, body: bytes, query: str = "") -> UploadAck:
        return self._parts.deliver(assignment, body, query)

    monkeypatch.setattr(HttpTransport, "_deliver", by_parts)
    monkeypatch.setattr(HttpParts, "send_part", counted)
    return sent


def masked_model(folder: Path) -> str:
    world = World(folder, Clock())
    try:
        world.begin(4)
        devices = world.enrol(4)
        drive(devices, lambda: None)
        (status,) = history(world.operator, TASK)
        assert (status.state, status.included) == ("committed", 4)
        assert status.model is not None
        return status.model
    finally:
        world.stop()


@pytest.mark.slow
def test_a_masked_sum_by_parts_is_the_one_without(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    whole = masked_model(tmp_path / "whole")
    parts = request.getfixturevalue("parts")
    assert masked_model(tmp_path / "parts") == whole
    assert len(set(parts)) == 4
    assert len(parts) > 4
