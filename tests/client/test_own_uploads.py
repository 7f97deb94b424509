"""Differences to a device's own last included upload, whatever becomes of uploads and of states."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedpress_client import Client, Ledger
from fedpress_compression.compressor import Compressor
from fedpress_compression.compressors.delta import Delta
from fedpress_compression.compressors.error_feedback import ErrorFeedback
from fedpress_compression.compressors.topk import TopK
from fedpress_protocols.messages import Assignment
from fedpress_protocols.model import Model
from tests.client.fake_server import FakeLink, FakeServer, Part, RandomTrainer, make_client

DELTA = Delta(TopK(fraction=0.1))


def small_model() -> Model:
    rng = np.random.default_rng(1)
    return Model.from_tensors({"w": rng.normal(size=(20, 12)).astype(np.float32)})


def joined(server: FakeServer, folder: Path, link: FakeLink | None = None) -> Client:
    return make_client(server, RandomTrainer(server.model.spec.size), folder, link)


def uploaded(client: Client, server: FakeServer) -> str:
    """Let the client take part once; its assignment."""
    before = set(server.parts)
    client.step()
    (name,) = set(server.parts) - before
    assert server.parts[name].body is not None
    return name


def test_the_base_is_the_last_included_upload(tmp_path: Path) -> None:
    server = FakeServer(small_model(), lambda round_, attempt: [DELTA], rounds=9)
    link = FakeLink(server)
    client = joined(server, tmp_path, link)
    included = None
    for keep in (True, True, False, True, False, False, True):
        name = uploaded(client, server)
        own = server.parts[name].assignment.own
        assert own == included
        server.close(keep=(lambda _: True) if keep else (lambda _: False))
        update = server.parts[name].update
        assert update is not None
        if keep:
            included = hashlib.sha256(update.dense().tobytes()).hexdigest()
    assert "own" not in link.calls, "the device had it all the time"


def test_a_device_that_lost_its_state_fetches_what_it_sent(tmp_path: Path) -> None:
    server = FakeServer(small_model(), lambda round_, attempt: [ErrorFeedback(DELTA)], rounds=5)
    client = joined(server, tmp_path)
    for _ in range(2):
        uploaded(client, server)
        server.close()
    client.close()
    (tmp_path / "tasks/task/ledger.safetensors").unlink()
    link = FakeLink(server)
    client = joined(server, tmp_path, link)
    name = uploaded(client, server)
    assert link.calls.count("own") == 1
    part = server.parts[name]
    assert part.update is not None
    held = client.ledger.pending[name].update.dense()
    np.testing.assert_array_equal(held, part.update.dense())
    server.close()
    uploaded(client, server)
    assert link.calls.count("own") == 1, "and has it again"


@pytest.mark.parametrize(("named", "sent"), [(960, 956), (964, 964)])
def test_other_bytes_for_the_base_are_declined(tmp_path: Path, named: int, sent: int) -> None:
    """Another digest than the assignment's; that digest, of another model's size."""
    server = FakeServer(small_model(), lambda round_, attempt: [DELTA], rounds=5)
    client = joined(server, tmp_path / "one")
    uploaded(client, server)
    server.close()
    client.close()
    shutil.rmtree(tmp_path / "one/tasks")
    link = FakeLink(server)
    link.own = lambda *_: bytes(sent)  # type: ignore[method-assign]
    client = joined(server, tmp_path / "one", link)
    server.bases = {name: np.zeros(named // 4, np.float32) for name in server.bases}
    client.step()
    (last,) = [part for part in server.parts.values() if part.round == 2]
    assert last.receipt is not None
    assert last.receipt.receipt.reason == "declined"
    assert not client.ledger.pending


def test_the_base_survives_the_disk_and_a_change_of_rate(tmp_path: Path) -> None:
    rates: list[Compressor[Any]] = [
        DELTA,
        Delta(TopK(fraction=0.3)),
        ErrorFeedback(DELTA),
        TopK(0.1),
        DELTA,
    ]
    server = FakeServer(small_model(), lambda round_, attempt: [rates[round_ % 5]], rounds=11)
    link = FakeLink(server)
    for _ in range(10):
        client = joined(server, tmp_path, link)
        uploaded(client, server)
        ledger = client.ledger
        assert Ledger.from_bytes(ledger.to_bytes()).to_bytes() == ledger.to_bytes()
        client.close()
        server.close()
    assert "own" not in link.calls


def test_an_earlier_upload_s_receipt_that_comes_last_moves_no_base() -> None:
    model = small_model()
    server = FakeServer(model, lambda round_, attempt: [DELTA])
    plan, rng = server.plan, np.random.default_rng(0)
    ledger = Ledger("task", "client0")
    parts, own = [], np.zeros(model.spec.size, np.float32)
    for number in (1, 2):
        moved = plan.model_copy(update={"round": number})
        assignment = Assignment(
            assignment=f"a{number}", client_id="client0", plan=moved, profile="p0"
        )
        update = rng.normal(size=model.spec.size).astype(np.float32)
        ledger, body = ledger.prepare(
            assignment, update, 1, model.spec, rng, knowledge={"own": own}
        )
        parts.append(Part(assignment, number, 1, body))
    latest = ledger.pending["a2"].update.dense()
    for part in reversed(parts):
        ledger = ledger.settle(server.conclude(part, "included", model.digest).receipt)
    assert ledger.own is not None
    np.testing.assert_array_equal(ledger.own[1], latest)
