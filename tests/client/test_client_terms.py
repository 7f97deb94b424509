"""A device does what a strategy asks, or says that it cannot; what is its own stays with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedpress_client import FailurePolicy, Ledger, TorchTrainer, Trained, TrainingRequest
from fedpress_client.client_terms import TermsAtWork
from fedpress_compression.compressors.none import Uncompressed
from fedpress_compression.tensors import Vector
from fedpress_protocols.errors import ConfigurationError, InvalidUpdate
from fedpress_protocols.model import Model
from fedpress_protocols.plan import ClientTerms, ControlTerms, RoundPlan, TrainingTerms
from tests.client.fake_server import FakeServer, RandomTrainer, make_client, make_plan
from tests.client.test_torch_trainer import DATA, INPUTS, LABELS, network, trainer, work

MODEL = Model.from_tensors({"w": np.arange(6, dtype=np.float32), "v": np.ones(2, np.float32)})


class Knows(RandomTrainer):
    honours = frozenset({"proximal", "steps"})


def one_round(made: RandomTrainer, folder: Path, **asked: Any) -> tuple[FakeServer, Any]:
    server = FakeServer(MODEL, lambda *_: [Uncompressed()], rounds=1, auto=1)
    server.plan = server.plan.model_copy(update=asked)
    return server, make_client(server, made, folder, failures=FailurePolicy(allowed=0))


def test_what_a_trainer_does_not_know_is_declined(tmp_path: Path) -> None:
    terms = ClientTerms(proximal=0.1, control=ControlTerms(scale=-1.0))
    made = Knows(MODEL.spec.size)
    server, client = one_round(made, tmp_path, client_terms=terms, report=("loss",))
    reasons = []
    client._events.on_event = lambda event: reasons.append(event.details.get("reason", ""))
    client.step()
    (part,) = server.parts.values()
    assert part.receipt is not None
    assert part.receipt.receipt.reason == "declined"
    assert made.calls == 0
    assert any("asks for control, loss, and the trainer" in reason for reason in reasons)


def test_a_trainer_that_forgets_to_report_is_told(tmp_path: Path) -> None:
    _, client = one_round(Knows(MODEL.spec.size), tmp_path, report=("steps",))
    with pytest.raises(ConfigurationError, match="the trainer did not report steps"):
        client.step()


def at_work(
    ledger: Ledger, server: Vector | None = None, report: tuple[str, ...] = (), **terms: Any
) -> TermsAtWork:
    asked = ClientTerms(**terms)
    plan: RoundPlan = make_plan(MODEL, Uncompressed(), client_terms=asked, report=report)
    return TermsAtWork(plan, MODEL, ledger, server)


def test_the_update_is_normalised_and_carries_the_servers_variate() -> None:
    server = np.full(6, 3.0, np.float32)
    control = ControlTerms(scale=-2.0, offset=0.5)
    terms = at_work(
        Ledger("task", "me"),
        server,
        ("steps",),
        control=control,
        normalise=True,
        personal=("v",),
    )
    change = np.arange(8, dtype=np.float32)
    told = Trained(MODEL.parameters + change, 1, report={"steps": 4, "more": 1.0})
    assert terms.update(change, told).tolist() == [0.25 * i + 1.5 for i in range(6)]
    assert terms.report(told) == {"steps": 4.0}
    asked = terms.work(9, None)
    assert asked.correction is not None
    assert asked.correction.tolist() == [3.0] * 6 + [0.0] * 2
    assert terms.personal(told)["v"].tolist() == [7.0, 8.0]
    with pytest.raises(InvalidUpdate, match="personal tensor holds NaN"):
        terms.personal(Trained(np.full(8, np.nan, np.float32), 1))


def test_a_variate_of_other_tensors_is_none() -> None:
    own = np.ones(8, np.float32)
    control = ControlTerms(scale=1.0)
    strange = at_work(Ledger("task", "me", spec="f" * 64, control=own), control=control)
    mine = at_work(Ledger("task", "me", spec=MODEL.spec.digest, control=own), control=control)
    assert not np.any(strange.work(0, None).correction)
    correction = mine.work(0, None).correction
    assert correction is not None
    assert correction.tolist() == [-1.0] * 8


def gradient(made: TorchTrainer, at: Vector) -> Vector:
    """Of the mean loss over all of DATA."""
    made._load(made.initial_model().with_parameters(at))
    made.model.zero_grad()
    nn.functional.cross_entropy(made.model(INPUTS), LABELS).backward()
    gradients = {name: p.grad for name, p in made.model.named_parameters()}
    arrays = {name: each.numpy() for name, each in gradients.items() if each is not None}
    return made.spec.flatten(arrays)


def asked(**terms: Any) -> TrainingRequest:
    return TrainingRequest("task", 1, 1, TrainingTerms(local_steps=3, batch_size=60), 1, **terms)


def test_torch_adds_to_gradients_what_work_says() -> None:
    made = trainer()
    base = made.initial_model()
    correction = np.random.default_rng(0).normal(size=made.spec.size).astype(np.float32)
    found = made.train(base, asked(proximal=0.5, correction=correction))
    x = base.parameters.copy()
    for _ in range(3):
        added = correction + 0.5 * (x - base.parameters)
        x = x - np.float32(0.1) * (gradient(made, x) + added)
    assert found.parameters == pytest.approx(x, abs=1e-5)


def test_torch_without_a_pull_trains_to_the_last_bit_as_ever() -> None:
    made = trainer(network(0, nn.Dropout(0.5)))
    base = made.initial_model()
    plain = made.train(base, work(3, local_epochs=2)).parameters
    same = made.train(
        base, TrainingRequest("task", 1, 1, TrainingTerms(local_epochs=2), 3, proximal=0.0)
    )
    assert (same.parameters == plain).all()
    told = TrainingRequest("task", 1, 1, TrainingTerms(local_epochs=2), 3, report=("loss",))
    assert (made.train(base, told).parameters == plain).all()


def test_torch_takes_one_full_batch_step() -> None:
    made = trainer(batch_size=7)
    base = made.initial_model()
    found = made.train(base, TrainingRequest("task", 1, 1, TrainingTerms(), 1, full_batch=True))
    step = -np.float32(0.1) * gradient(made, base.parameters)
    assert found.parameters - base.parameters == pytest.approx(step, abs=1e-6)
    assert found.report["steps"] == 1


def test_torch_reports_steps_and_the_loss_at_the_model_given() -> None:
    made = trainer(batch_size=25)
    base = made.initial_model()
    terms = TrainingTerms(local_epochs=2, gradient_accumulation=2)
    found = made.train(base, TrainingRequest("task", 1, 1, terms, 1, report=("steps", "loss")))
    with torch.no_grad():
        made._load(base)
        loss = float(nn.functional.cross_entropy(made.model(INPUTS), LABELS))
    assert found.report == {"steps": 4, "loss": pytest.approx(loss, abs=1e-6)}
    assert len(DATA) == 60


def test_the_last_model_is_trained_on_for_this_device_alone(tmp_path: Path) -> None:
    server = FakeServer(MODEL, lambda *_: [Uncompressed()], rounds=2, auto=1)
    made = RandomTrainer(MODEL.spec.size)
    terms = TrainingTerms(local_epochs=3)
    client = make_client(server, made, tmp_path, fine_tuning=terms, seed=5)
    assert client.own_model() is None
    events = []
    client._events.on_event = lambda event: events.append(event.kind)
    client.run()
    assert events.count("fine-tuned") == 1
    assert made.calls == 3
    assert len(server.parts) == 2
    own = client.own_model()
    assert own is not None
    assert (own.parameters != server.model.parameters).any()
    again = make_client(server, made, tmp_path / "other", fine_tuning=terms, seed=5)
    client.close()
    client = make_client(server, made, tmp_path, fine_tuning=terms, seed=5)
    client.run()
    assert made.calls == 3
    kept = client.own_model()
    assert kept is not None
    assert kept.digest == own.digest
    client.close()
    again.close()


def test_a_continued_task_gives_the_device_a_new_model_of_its_own(tmp_path: Path) -> None:
    server = FakeServer(MODEL, lambda *_: [Uncompressed()], rounds=1, auto=1)
    made, own = RandomTrainer(MODEL.spec.size), []
    for rounds in (1, 2, 2):
        server.rounds = rounds
        server.state = "running" if server.committed < rounds else "finished"
        client = make_client(server, made, tmp_path, fine_tuning=TrainingTerms(), seed=5)
        client.run()
        own.append(client.own_model())
        client.close()
    first, second, third = (each.digest for each in own if each is not None)
    assert first != second
    assert second == third
    assert made.calls == 4


def test_after_a_run_its_results_are_read_without_the_lock(tmp_path: Path) -> None:
    server = FakeServer(MODEL, lambda *_: [Uncompressed()], rounds=1, auto=1)
    made = RandomTrainer(MODEL.spec.size)
    first = make_client(server, made, tmp_path, fine_tuning=TrainingTerms(), seed=5)
    first.run()
    assert first.own_model() is not None
    assert first.ledger.included == 1
    with make_client(server, made, tmp_path) as second:
        second.step()
        assert first.own_model() is not None
        assert first.ledger.to_bytes() == second.ledger.to_bytes()
