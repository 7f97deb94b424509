"""A server may name any bytes as its model: the device declines the work, and goes on."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from fedpress_compression.compressors.none import Uncompressed
from tests.client.fake_server import FakeServer, RandomTrainer, make_client
from tests.hostile_models import FORGED, HONEST, mutated


def refused(data: bytes, folder: Path) -> bool:
    """Whether the device declines to train on `data`; an error of another kind comes out."""
    server = FakeServer(HONEST, lambda number, attempt: [Uncompressed()] * 4)
    digest = hashlib.sha256(data).hexdigest()
    server.plan = server.plan.model_copy(update={"model": digest})
    server.models[digest] = data
    client = make_client(server, RandomTrainer(HONEST.spec.size), folder)
    try:
        client.step()
    finally:
        client.close()
    receipts = [part.receipt for part in server.parts.values()]
    return any(each is not None and each.receipt.reason == "declined" for each in receipts)


@pytest.mark.parametrize("data", FORGED.values(), ids=FORGED)
def test_a_forged_model_is_refused_by_the_device(data: bytes, tmp_path: Path) -> None:
    assert refused(data, tmp_path / "device")


@pytest.mark.soak
def test_a_mutated_model_is_trained_on_or_refused_by_the_device(tmp_path: Path, soak: bool) -> None:
    files = mutated(2, 5_000 if soak else 40)
    outcomes = [refused(data, tmp_path / str(n)) for n, data in enumerate(files)]
    assert sum(outcomes) > len(outcomes) / 2
