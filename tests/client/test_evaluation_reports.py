"""What a device says of a model and of itself."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from fedpress_client import Evaluation, FailurePolicy, Trained, TrainingRequest
from fedpress_client.torch_trainer import TorchTrainer
from fedpress_compression.compressors.none import Uncompressed
from fedpress_protocols.errors import ConfigurationError
from fedpress_protocols.messages import MAX_CLASSES
from fedpress_protocols.model import Model
from fedpress_protocols.plan import TrainingTerms
from tests.client.fake_server import FakeLink, FakeServer, make_client


class Counting:
    """Learns nothing, and counts as it is told."""

    def __init__(self, classes: Mapping[str, tuple[int, int]]) -> None:
        self.classes = classes

    def train(self, model: Model, work: TrainingRequest) -> Trained:
        return Trained(model.parameters + 1, 1)

    def evaluate(self, model: Model) -> Evaluation:
        return Evaluation(10, {"accuracy": 0.5}, self.classes)


def server() -> FakeServer:
    model = Model.from_tensors({"w": np.zeros(3, np.float32)})
    return FakeServer(model, lambda r, a: [Uncompressed()], rounds=1, auto=1)


def test_counts_and_attributes_go_with_the_report(tmp_path: Path) -> None:
    attributes = {"region": "north", "memory": 4}
    made = server()
    trainer = Counting({"cat": (6, 4), "dog": (4, 1)})
    with_counts = make_client(made, trainer, tmp_path / "a", attributes=attributes)
    with_counts.run()
    (_, report), *_ = made.evaluations
    assert {name: (c.num_examples, c.correct) for name, c in report.classes.items()} == {
        "cat": (6, 4),
        "dog": (4, 1),
    }
    assert report.attributes == attributes
    plain = server()
    make_client(plain, Counting({}), tmp_path / "b").run()
    (_, report), *_ = plain.evaluations
    assert report.classes == {}
    assert report.attributes == {}


@pytest.mark.parametrize("fine_tuning", [None, TrainingTerms()])
def test_a_device_that_was_assigned_no_round_measures_nothing(
    tmp_path: Path, fine_tuning: TrainingTerms | None
) -> None:
    made = server()
    made.state = "finished"
    link, events = FakeLink(made), list[str]()
    trainer = Counting({})
    client = make_client(made, trainer, tmp_path, link, fine_tuning=fine_tuning)
    client._events.on_event = lambda event: events.append(event.kind)
    assert client.run().state == "finished"
    assert made.evaluations == []
    assert "evaluated" not in events
    assert ("model" in link.calls) == (fine_tuning is not None)
    assert (client.own_model() is not None) == (fine_tuning is not None)


def test_what_cannot_be_sent_is_the_applications_fault(tmp_path: Path) -> None:
    for index, classes in enumerate(({"cat": (6, 7)}, {"a b": (1, 1)}, {"cat": (11, 1)})):
        policy = FailurePolicy(allowed=0)
        client = make_client(server(), Counting(classes), tmp_path / str(index), failures=policy)
        with pytest.raises(ConfigurationError, match="evaluation cannot be sent"):
            client.run()
    others: tuple[dict[str, Any], ...]
    others = ({"a b": 1}, {"a": "x" * 65}, {"a": float("nan")}, {"a": []})
    for attributes in others:
        with pytest.raises(ConfigurationError, match="attributes"):
            make_client(server(), Counting({}), tmp_path / "no", attributes=attributes)


# Torch


def evaluated(scores: torch.Tensor, labels: torch.Tensor, **options: Any) -> Evaluation:
    """Of a module that passes its inputs on."""
    data = TensorDataset(scores, labels)
    made = TorchTrainer(
        nn.Sequential(nn.Identity(), Nothing()),
        nn.CrossEntropyLoss(ignore_index=-100),
        lambda p: torch.optim.SGD(p, lr=0.1),
        data,
        evaluation_data=data,
        **options,
    )
    found = made.evaluate(made.initial_model())
    assert found is not None
    return found


class Nothing(nn.Module):
    """A parameter that does nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Parameter(torch.zeros(1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + 0 * self.idle


def test_right_ones_are_counted_by_class_over_all_batches() -> None:
    labels = torch.tensor([0, 2, 2, 1, 0, 2, -100])
    guesses = torch.tensor([0, 2, 0, 0, 1, 2, 0])
    found = evaluated(nn.functional.one_hot(guesses, 4).float(), labels, batch_size=2)
    assert found.num_examples == 6, "without the one that the loss ignores, alone in its batch"
    assert math.isfinite(found.metrics["loss"])
    assert found.classes == {"0": (2, 1), "1": (1, 0), "2": (3, 2)}
    assert list(found.classes) == ["0", "1", "2"]
    right = sum(correct for _, correct in found.classes.values())
    assert right / 6 == pytest.approx(found.metrics["accuracy"])
    own = evaluated(torch.eye(4), torch.arange(4), metrics=lambda outputs, targets: {"mine": 1.0})
    assert set(own.metrics) == {"loss", "mine"}
    assert own.classes == {str(label): (1, 1) for label in range(4)}


def test_where_outputs_are_no_scores_or_classes_too_many_none_are_counted() -> None:
    few = torch.arange(MAX_CLASSES)
    assert len(evaluated(torch.eye(MAX_CLASSES), few).classes) == MAX_CLASSES
    many = torch.arange(MAX_CLASSES + 1)
    found = evaluated(torch.eye(MAX_CLASSES + 1), many)
    assert found.classes == {}
    assert found.metrics["accuracy"] == 1.0
