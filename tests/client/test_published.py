"""The newest published model on a device: for inference, beside training."""

from __future__ import annotations

import errno
import math
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from fedpress_client import Client, Evaluation, Ledger, Trained, TrainingRequest, state
from fedpress_client.bases import Bases
from fedpress_client.state import StateDirectory, write_cache
from fedpress_protocols.errors import ConfigurationError, DigestMismatch, TransportError
from fedpress_protocols.messages import TaskSummary
from fedpress_protocols.model import Model
from tests.client.fake_server import TASK, FakeLink, RandomTrainer, make_client
from tests.client.test_failures import make_server


class Away(FakeLink):
    is_away = False

    def task(self, task: str) -> TaskSummary:
        self.calls.append("task")
        if self.is_away:
            raise TransportError("no answer")
        return super().task(task)


def test_a_model_is_to_be_had_before_while_and_after_training(tmp_path: Path) -> None:
    server = make_server(rounds=3)
    link = Away(server)
    seen: list[Model] = []

    class Watches(RandomTrainer):
        def train(self, model: Model, work: TrainingRequest) -> Trained:
            thread = threading.Thread(target=lambda: seen.append(client.model(max_age=0.0)))
            thread.start()
            thread.join()
            return super().train(model, work)

    client = make_client(server, Watches(50), tmp_path, link)
    first = client.model()
    assert first.digest == server.first.digest
    assert not server.parts, "it asks for no work"
    assert client.run().included == 3
    assert seen[0].digest == first.digest
    assert len({model.digest for model in seen}) == 3, "each round's newest"
    assert client.model(max_age=0.0).digest == server.model.digest
    assert link.calls.count("model") == 5, "what training has fetched is not fetched again"


def test_a_process_beside_the_one_that_trains_has_its_newest_personal_tensors(
    tmp_path: Path,
) -> None:
    reader = make_client(make_server(), RandomTrainer(50), tmp_path)
    served = reader.model(max_age=0.0).tensors()["w"]
    np.testing.assert_array_equal(served, np.zeros(50))
    files = StateDirectory.open(tmp_path).task(TASK)
    for value in (1.0, 2.0):
        own = {"w": np.full(50, value, np.float32)}
        files.save(Ledger(TASK, "trains-here", personal=own))
        np.testing.assert_array_equal(reader.model(max_age=0.0).tensors()["w"], own["w"])
    files.close()


def test_a_cache_that_cannot_be_written_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_cache(tmp_path / "kept", b"ol", b"d")

    def refuses(source: Path, target: Path) -> None:
        raise PermissionError(errno.EACCES, "in use")

    monkeypatch.setattr(state, "replace_file", refuses)
    with pytest.raises(PermissionError):
        write_cache(tmp_path / "kept", b"new")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"old"]


def test_what_killed_processes_left_of_bases_and_models_is_removed(tmp_path: Path) -> None:
    def leave(path: Path, *, is_old: bool = True) -> Path:
        path.write_bytes(b"half of")
        if is_old:
            os.utime(path, (0, 0))
        return path

    client = make_client(make_server(rounds=1), RandomTrainer(50), tmp_path)
    client.model()
    client.run()
    leave(next(tmp_path.glob("tasks/*")) / "published.1.tmp")
    client.model(max_age=0.0)
    client.close()
    directory = StateDirectory.open(tmp_path)

    def keep(value: float) -> None:
        base = {"base": np.full(2000, value, np.float32), "w": np.ones(1, np.float32)}
        Bases(directory).keep(Model.from_tensors(base, frozen={"base"}))

    keep(1.0)
    leave(tmp_path / "bases" / "a.2.tmp")
    another = leave(tmp_path / "bases" / "b.3.tmp", is_old=False)  # a process that writes it
    keep(2.0)
    assert list(tmp_path.glob("**/*.tmp")) == [another]


def test_the_average_is_served_where_there_is_one_and_measured_at_the_end(tmp_path: Path) -> None:
    server = make_server(rounds=1)
    average = server.first.with_parameters(server.first.parameters + 1)
    server.models[average.digest] = average.to_bytes()
    server.published = {"average": average.digest}

    class Measures(RandomTrainer):
        def evaluate(self, model: Model) -> Evaluation | None:
            return Evaluation(9, {"loss": 1.0})

    client = make_client(server, Measures(50), tmp_path)
    assert client.model().digest == average.digest
    client.run()
    measured = [report.model for _, report in server.evaluations]
    assert measured == [server.first.digest, server.model.digest, average.digest]
    server.best = server.model.digest
    assert client.model(max_age=0.0).digest == server.model.digest


def test_the_server_is_asked_no_more_often_than_it_may_be(tmp_path: Path) -> None:
    server, now = make_server(), [0.0]
    link = Away(server)
    client = make_client(server, RandomTrainer(50), tmp_path, link, clock=lambda: now[0])
    model = client.model()
    now[0] = 29.0
    assert client.model() is model
    assert link.calls.count("task") == 1
    now[0] = 31.0
    assert client.model() is model
    assert client.model(max_age=math.inf) is model
    assert link.calls.count("task") == 2
    with pytest.raises(ConfigurationError):
        client.model(max_age=math.nan)


def test_another_task_has_a_model_of_its_own(tmp_path: Path) -> None:
    server = make_server()

    class Named(Away):
        name = "first"

        def tasks(self) -> tuple[TaskSummary, ...]:
            return (server.summary.model_copy(update={"task": self.name}),)

    link = Named(server)
    client = Client(
        "http://fake", RandomTrainer(50), state_dir=tmp_path, token="token", transport=link
    )
    assert not client.model(max_age=60.0).parameters.any()
    server._publish(Model.from_tensors({"w": np.ones(50, np.float32)}))
    assert not client.model(max_age=60.0).parameters.any()
    link.name = "second"
    assert client.model(max_age=60.0).parameters.all()
    assert link.calls.count("task") == 2


def test_the_last_model_goes_on_where_the_server_is_away(tmp_path: Path) -> None:
    server = make_server()
    link = Away(server)
    link.is_away = True
    client = make_client(server, RandomTrainer(50), tmp_path, link)
    with pytest.raises(TransportError):
        client.model()
    link.is_away = False
    model = client.model(max_age=0.0)
    link.is_away = True
    assert client.model(max_age=0.0) is model
    again = make_client(server, RandomTrainer(50), tmp_path, link)
    assert again.model().digest == model.digest
    kept = tmp_path / "tasks" / TASK / "published"
    kept.write_bytes(kept.read_bytes()[:-1] + b"\xff")
    third = make_client(server, RandomTrainer(50), tmp_path, link)
    with pytest.raises(TransportError):
        third.model()
    link.is_away = False
    assert third.model().digest == model.digest


def test_other_bytes_under_the_name_of_the_model_are_refused(tmp_path: Path) -> None:
    server = make_server()
    client = make_client(server, RandomTrainer(50), tmp_path)
    other = Model.from_tensors({"w": np.ones(50, np.float32)})
    server.models[server.model.digest] = other.to_bytes()
    with pytest.raises(DigestMismatch):
        client.model()
    assert not (tmp_path / "tasks" / TASK / "published").exists()


def test_many_threads_have_one_model_and_one_download(tmp_path: Path) -> None:
    server = make_server()
    link = FakeLink(server)
    models: list[Model] = []
    client = make_client(server, RandomTrainer(50), tmp_path, link)
    threads = [threading.Thread(target=lambda: models.append(client.model())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(models) == 8
    assert all(model is models[0] for model in models)
    assert link.calls.count("model") == 1
