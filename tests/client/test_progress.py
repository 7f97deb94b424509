"""Progress within the steps of a round."""

from __future__ import annotations

import hashlib
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from fedpress import Progress, Trained, TrainingRequest
from fedpress_client import HttpTransport
from fedpress_compression.compressors.none import Uncompressed
from fedpress_protocols.errors import NotFound
from fedpress_protocols.messages import UploadAck
from fedpress_protocols.model import Model
from fedpress_protocols.plan import TrainingTerms
from tests.client.fake_server import FakeServer, RandomTrainer, make_client
from tests.client.test_transport import KEY, Server, raw


def fleet(rounds: int = 2) -> FakeServer:
    model = Model.from_tensors({"w": np.zeros(20, np.float32)})
    return FakeServer(model, lambda r, a: [Uncompressed()], rounds=rounds, auto=1)


class Counting(RandomTrainer):
    """Reports each of its three steps, the last not always."""

    def train(self, model: Model, work: TrainingRequest) -> Trained:
        for step in range(1, 4 if work.round == 1 else 3):
            work.progress(step, 3)
        return super().train(model, work)


def test_training_and_compression_are_reported_to_their_end(tmp_path: Path) -> None:
    seen: list[Progress] = []
    make_client(fleet(), Counting(20), tmp_path, on_progress=seen.append).run()
    rows = [(p.round, p.step, p.done, p.total) for p in seen]
    assert rows == [
        (1, "train", 1, 3),
        (1, "train", 2, 3),
        (1, "train", 3, 3),
        (1, "compress", 0, 1),
        (1, "compress", 1, 1),
        (2, "train", 1, 3),
        (2, "train", 2, 3),
        (2, "train", 3, 3),
        (2, "compress", 0, 1),
        (2, "compress", 1, 1),
    ]
    assert {p.task for p in seen} == {"task"}
    assert [p.is_done for p in seen[:3]] == [False, False, True]


def test_a_trainer_that_reports_nothing_ends_all_the_same(tmp_path: Path) -> None:
    seen: list[Progress] = []
    make_client(fleet(1), RandomTrainer(20), tmp_path, on_progress=seen.append).run()
    assert [(p.step, p.done, p.total) for p in seen] == [
        ("train", 1, 1),
        ("compress", 0, 1),
        ("compress", 1, 1),
    ]


def test_a_trainer_may_report_although_nobody_listens(tmp_path: Path) -> None:
    assert make_client(fleet(), Counting(20), tmp_path).run().included == 2
    request = TrainingRequest("task", 1, 1, TrainingTerms(), 0)
    request.progress(1, None)
    assert "progress" not in repr(request)
    other = TrainingRequest("task", 1, 1, TrainingTerms(), 0, progress=lambda done, total: None)
    assert request == other


BODY = np.random.default_rng(0).bytes(200_000)


def test_downloads_and_uploads_are_reported_by_bytes() -> None:
    seen: list[tuple[str, int, int | None]] = []
    done = UploadAck(assignment="a", upload=hashlib.sha256(BODY).hexdigest(), received_at=1.0)
    length: dict[str, Any] = {"content_length": str(len(BODY))}
    server = Server(
        raw(BODY[:70_000], fail=True, **length),
        raw(
            BODY[70_000:],
            status=206,
            content_range=f"bytes 70000-{len(BODY) - 1}/{len(BODY)}",
            content_length=str(len(BODY) - 70_000),
        ),
        raw(BODY),
        httpx.Response(201, content=done.model_dump_json()),
        httpx.Response(200, json=[]),
    )
    transport = HttpTransport(
        "http://server:8000/",
        KEY,
        sleep=lambda seconds: None,
        on_transfer=lambda *row: seen.append(row),
        http=httpx.MockTransport(server),
    )
    with closing(transport):
        for _ in range(2):
            assert transport.model(done.upload, 10**6, "task") == BODY
        transport.upload("a", BODY)
        transport.tasks()  # neither a file nor a body
    assert seen == [
        ("download", 70_000, 200_000),
        ("download", 200_000, 200_000),
        ("download", 200_000, None),
        ("upload", 65_536, 200_000),
        ("upload", 131_072, 200_000),
        ("upload", 196_608, 200_000),
        ("upload", 200_000, 200_000),
    ]


def test_a_callback_that_fails_ends_the_run(tmp_path: Path) -> None:
    def fails(progress: Progress) -> None:
        if progress.step == "upload":
            raise ZeroDivisionError

    done = httpx.Response(201, content=b"{}")
    transport = HttpTransport(
        "http://server:8000/",
        KEY,
        on_transfer=lambda step, sent, total: fails(Progress(step, sent, total)),
        http=httpx.MockTransport(Server(done)),
    )
    with pytest.raises(ZeroDivisionError), closing(transport):
        transport.upload("a", BODY)


def test_a_broken_upload_counts_from_the_beginning() -> None:
    seen: list[Any] = []
    transport = HttpTransport(
        "http://server:8000/",
        KEY,
        sleep=lambda seconds: None,
        on_transfer=lambda step, sent, total: seen.append(sent),
        http=httpx.MockTransport(
            Server(httpx.ReadError("cut"), httpx.Response(404, text="no such assignment"))
        ),
    )
    with pytest.raises(NotFound, match="404"), closing(transport):
        transport.upload("a", BODY)
    assert seen == 2 * [65_536, 131_072, 196_608, 200_000]
