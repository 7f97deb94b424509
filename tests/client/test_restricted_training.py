"""Restricted training: what is outside the support stays as it was, to the last bit."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from fedpress_client import TorchTrainer, TrainingRequest
from fedpress_compression.compressor import from_config
from fedpress_protocols.model import Model
from fedpress_protocols.plan import TrainingTerms
from tests.client.fake_server import FakeServer, RandomTrainer, make_client

INPUTS = torch.randn(60, 6, generator=torch.Generator().manual_seed(0))
LABELS = (INPUTS[:, 0] > 0).long() + (INPUTS[:, 1] > 0).long()
OPTIMIZERS = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.3),
}


class Tied(nn.Module):
    """Two layers of one weight, as embeddings and outputs often are."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 3)

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.last(self.norm(self.second(self.first(inputs).relu())).relu())


class Looked(nn.Module):
    """A table whose gradients are sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(10, 3, mode="sum", sparse=True)

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.table((inputs[:, :4].abs() * 3).long().clamp(max=9))


def trainer(model: nn.Module, optimizer: Any) -> TorchTrainer:
    data = TensorDataset(INPUTS, LABELS)
    return TorchTrainer(model, nn.CrossEntropyLoss(), optimizer, data, batch_size=10)


def moved(
    made: TorchTrainer, support: np.ndarray | None, base: Model | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The bits of the model, `base` or the trainer's own, before and after two epochs."""
    base = base or made.initial_model()
    work = TrainingRequest("task", 1, 1, TrainingTerms(local_epochs=2), 3, support)
    trained = made.train(base, work)
    return base.parameters.view(np.uint32), trained.parameters.view(np.uint32)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_what_is_outside_the_support_stays_bit_for_bit(optimizer: str) -> None:
    torch.manual_seed(0)
    made = trainer(Tied(), OPTIMIZERS[optimizer])
    size = made.spec.size
    support = np.sort(np.random.default_rng(1).choice(size, size // 3, replace=False))
    before, after = moved(made, support)
    outside = np.ones(size, bool)
    outside[support] = False
    np.testing.assert_array_equal(before[outside], after[outside])
    assert (before != after)[support].mean() > 0.4
    everything, free = moved(made, None)
    assert (everything != free).mean() > 0.9


def test_of_tied_parameters_moves_what_both_supports_have() -> None:
    torch.manual_seed(0)
    made = trainer(Tied(), OPTIMIZERS["momentum"])
    # As a task has it whose model came of a trainer that gave a tied weight each of its names.
    base = Model.from_tensors({n: t.numpy() for n, t in made.model.state_dict().items()})
    first, second = base.spec.slices["first.weight"], base.spec.slices["second.weight"]
    support = np.concatenate([np.arange(first.start, first.start + 20), [second.start + 3]])
    before, after = moved(made, support, base)
    changed = np.flatnonzero(before != after)
    assert changed.tolist() == [first.start + 3, second.start + 3]


def test_gradients_outside_move_no_average_of_the_optimizer() -> None:
    """Adam's step depends on the history alone: with all but one coordinate held, it is that of a
    model that has no other."""
    torch.manual_seed(0)
    made = trainer(nn.Linear(6, 3), OPTIMIZERS["adamw"])
    seen: list[torch.Tensor] = []

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        kept = list(parameters)
        found = torch.optim.SGD(kept, lr=0.1)
        found.register_step_pre_hook(
            lambda *_: seen.extend(p.grad.clone() for p in kept if p.grad is not None)
        )
        return found

    made = trainer(nn.Linear(6, 3), optimizer)
    moved(made, np.array([0, 18]))
    flat = [gradient.ravel() for gradient in seen]
    assert all(not gradient[1:].any() for gradient in flat)
    assert any(gradient[0] for gradient in flat)


def test_sparse_gradients_are_held_too() -> None:
    torch.manual_seed(0)
    made = trainer(Looked(), lambda p: torch.optim.SGD(p, lr=0.1))
    before, after = moved(made, np.array([0, 4, 5]))
    assert np.flatnonzero(before != after).tolist() == [0, 4, 5]


def test_the_numpy_example_honours_a_support(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "client_sdk" / "examples"))
    import numpy_softmax

    made, model = numpy_softmax.make_trainer(seed=1), numpy_softmax.initial_model()
    support = np.array([0, 5, 24])
    work = TrainingRequest("task", 1, 1, TrainingTerms(), 0, support)
    change = made.train(model, work).parameters - model.parameters
    assert np.flatnonzero(change).tolist() == support.tolist()
    sys.modules.pop("numpy_softmax")


class Keeping(RandomTrainer):
    """A RandomTrainer that keeps to the support, and remembers it."""

    honours = frozenset({"restricted"})
    supports: tuple[np.ndarray | None, ...] = ()

    def train(self, model: Model, work: TrainingRequest) -> Any:
        trained = super().train(model, work)
        self.supports = (*self.supports, work.support)
        if work.support is not None:
            outside = np.setdiff1d(np.arange(self.size), work.support)
            trained.parameters[outside] = model.parameters[outside]
        return trained


@pytest.mark.parametrize("restricted", [True, False])
def test_a_client_hands_the_support_to_its_trainer(restricted: bool, tmp_path: Path) -> None:
    model = Model.from_tensors({"w": np.zeros((20, 12), np.float32)})
    made = from_config({"id": "shared_support", "fraction": 0.1, "explore": 0.1})
    server = FakeServer(
        model,
        lambda round_, attempt: [made],
        rounds=2,
        auto=1,
        training=TrainingTerms(restricted=restricted),
    )
    device = Keeping(240)
    discards: list[Any] = []
    make_client(server, device, tmp_path, seed=2, on_discard=discards.append).run()
    assert len(device.supports) == 2
    if not restricted:
        assert device.supports == (None, None)
        assert any(np.count_nonzero(each.vector) > 100 for each in discards)
        return
    first, second = device.supports
    assert first is not None
    assert second is not None
    assert first.size == second.size == 24
    # What the first round moved is in the second's, up to nine tenths of it; of 24 that are drawn
    # two would be.
    assert 12 <= np.intersect1d(first, second).size < 24
    # All that was computed is inside, so nothing is lost but by rounding and clipping.
    assert all(np.count_nonzero(each.vector) <= 24 for each in discards)


def test_a_trainer_that_would_train_everything_is_not_asked(tmp_path: Path) -> None:
    """Nine tenths of its work would be thrown away."""
    made = from_config({"id": "shared_support"})
    server = FakeServer(
        Model.from_tensors({"w": np.zeros((20, 12), np.float32)}),
        lambda round_, attempt: [made],
        training=TrainingTerms(restricted=True),
    )
    device = RandomTrainer(240)
    events: list[Any] = []
    client = make_client(server, device, tmp_path, on_event=events.append)
    client.step()
    (declined,) = [event for event in events if event.kind == "declined"]
    assert "restricted" in declined.details["reason"]
    assert device.calls == 0
