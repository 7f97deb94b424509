"""Training by forward passes alone: what is estimated, what is kept, what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedpress.experimental import ZerothOrderTrainer, materialised
from fedpress_client.trainer import TrainingRequest
from fedpress_compression.tensors import Vector
from fedpress_protocols.errors import ConfigurationError, InvalidUpdate
from fedpress_protocols.model import Model
from fedpress_protocols.plan import TrainingTerms
from fedpress_protocols.subspace import MOVED, SEED, WEIGHTS

NUM_WEIGHTS = 24


class Bowl(nn.Module):
    """Its loss is a quadratic of all its values, whatever the inputs."""

    def __init__(self, num: int = 60) -> None:
        super().__init__()
        drawn = torch.Generator().manual_seed(3)
        self.values = nn.Parameter(torch.randn(num, generator=drawn))
        self.steepness = torch.rand(num, generator=drawn) + 0.5

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return (self.steepness * self.values.square()).sum() / 2 + 0.0 * inputs.sum()


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.Tanh(), nn.Linear(16, 2))


def examples(seed: int = 0, num: int = 96) -> torch.utils.data.TensorDataset:
    inputs = torch.randn(num, 6, generator=torch.Generator().manual_seed(seed))
    return torch.utils.data.TensorDataset(inputs, (inputs[:, 0] > 0).long())


def sgd(rate: float) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.SGD(parameters, lr=rate)


def trainer(model: nn.Module | None = None, **options: Any) -> ZerothOrderTrainer:
    data = examples()
    options = {"num_weights": NUM_WEIGHTS, "evaluation_data": data, **options}
    rate = options.pop("rate", 0.02)
    loss = options.pop("loss", nn.CrossEntropyLoss())
    return ZerothOrderTrainer(model or net(), loss, sgd(rate), data, **options)


def request(steps: int = 100, seed: int = 7, **terms: Any) -> TrainingRequest:
    return TrainingRequest("task", 1, 1, TrainingTerms(local_steps=steps, **terms), seed)


def own_values(made: ZerothOrderTrainer) -> dict[str, np.ndarray[Any, Any]]:
    state = made.model.inner.state_dict()
    return {name: tensor.float().numpy() for name, tensor in state.items()}


def test_it_learns_and_what_travels_has_no_more_values_than_it_says() -> None:
    made = trainer()
    first = made.initial_model()
    assert first.spec.size == NUM_WEIGHTS
    assert [tensor.name for tensor in first.spec.trained] == [WEIGHTS]
    trained = made.train(first, request())
    after = made.evaluate(first.with_parameters(trained.parameters))
    before = made.evaluate(first)
    assert before is not None
    assert after is not None
    assert after.metrics["loss"] < 0.9 * before.metrics["loss"]
    assert trained.report["steps"] == 100
    assert trained.num_examples == 96


def test_the_same_seed_gives_the_same_training() -> None:
    made, again = trainer(), trainer()
    first = made.initial_model()
    one, other = made.train(first, request(5)), again.train(first, request(5))
    assert one.parameters.tobytes() == other.parameters.tobytes()


def test_the_estimate_is_unbiased_on_a_quadratic() -> None:
    """One step of rate 1 from zero is minus the estimate; the mean of many is the gradient, within
    their own deviation. On a quadratic the slope between two points is exact."""
    bowl = Bowl()
    slopes = (bowl.steepness * bowl.values.detach()).numpy()
    made = trainer(bowl, rate=1.0, loss=lambda outputs, _: outputs, batch_size=96)
    first = made.initial_model()
    steps = [made.train(first, request(1, seed=seed)).parameters for seed in range(300)]
    signs = np.unpackbits(made.model.subspace.negative, bitorder="little", count=60)
    exact = np.zeros(NUM_WEIGHTS)
    np.add.at(exact, np.arange(60) % NUM_WEIGHTS, np.where(signs, -slopes, slopes))
    deviation = np.std(steps, axis=0) / np.sqrt(len(steps))
    error = np.mean(steps, axis=0) + exact
    assert (np.abs(error) < 4.5 * deviation).all()
    assert np.linalg.norm(error) < 0.5 * np.linalg.norm(exact)


def made_at(made: ZerothOrderTrainer, model: Model) -> ZerothOrderTrainer:
    made.evaluate(model)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_device_and_operator_have_the_same_bits(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(nn.Linear(6, 33), nn.Tanh(), nn.Linear(33, 2, bias=False)).to(dtype)
    model[0].bias.requires_grad_(False)

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs.float(), targets)

    inputs, targets = examples().tensors
    data = torch.utils.data.TensorDataset(inputs.to(dtype), targets)
    made = ZerothOrderTrainer(model, loss, sgd(1.0), data, num_weights=7, evaluation_data=data)
    first = made.initial_model()
    weights = np.random.default_rng(2).normal(scale=0.1, size=7).astype(np.float32)
    moved = first.with_parameters(weights)
    whole = materialised(moved)
    for block in (8, 40, 2**20):
        monkeypatch.setattr("fedpress_client.zeroth_order._BLOCK", block)
        ours = own_values(made_at(made, moved))
        file = Model.from_bytes(whole.to_bytes()).tensors()
        assert all(np.array_equal(file[name], ours[name]) for name in ours)
    assert [tensor.name for tensor in whole.spec.tensors if tensor.frozen] == ["0.bias"]
    assert np.array_equal(ours["0.bias"], first.tensors()["0.bias"])


def test_a_module_takes_the_base_and_the_subspace_of_the_task() -> None:
    theirs = trainer(seed=9)
    with torch.no_grad():
        for parameter in theirs.model.inner.parameters():
            parameter.add_(1.0)
    theirs = trainer(theirs.model.inner, seed=9)
    ours = trainer()
    first = theirs.initial_model()
    weights = np.linspace(-1, 1, NUM_WEIGHTS, dtype=np.float32)
    moved = first.with_parameters(weights)
    made_at(ours, moved)
    made_at(theirs, moved)
    assert ours.initial_model().base.digest == theirs.initial_model().base.digest
    expected = own_values(theirs)
    assert all(np.array_equal(each, expected[name]) for name, each in own_values(ours).items())


def test_tied_and_transposed_parameters_move_as_one() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    model[1].weight = model[0].weight
    model[0].bias = nn.Parameter(torch.randn(12)[::2])
    made = trainer(model)
    first = made.initial_model()
    assert len(first.spec.tensors) == 3 + 3
    moved = first.with_parameters(np.ones(NUM_WEIGHTS, np.float32))
    made_at(made, moved)
    assert model[1].weight is model[0].weight
    values = materialised(moved).tensors()
    assert all(np.array_equal(each, own_values(made)[name]) for name, each in values.items())


def test_parameters_with_channels_last_are_trained_as_others() -> None:
    inputs = torch.randn(8, 3, 4, 4, generator=torch.Generator().manual_seed(2))
    images = torch.utils.data.TensorDataset(inputs, torch.arange(8) % 2)

    def trained(memory_format: torch.memory_format) -> Vector:
        torch.manual_seed(3)
        convolution = nn.Conv2d(3, 2, 4)
        convolution.weight.data = convolution.weight.contiguous(memory_format=memory_format).data
        network = nn.Sequential(convolution, nn.Flatten())
        made = ZerothOrderTrainer(
            network, nn.CrossEntropyLoss(), sgd(0.02), images, num_weights=NUM_WEIGHTS
        )
        return made.train(made.initial_model(), request(steps=3)).parameters

    expected = trained(torch.contiguous_format)
    np.testing.assert_allclose(trained(torch.channels_last), expected, rtol=1e-4, atol=1e-6)


def test_no_pass_keeps_anything_for_a_backward_pass() -> None:
    made = trainer()
    kept = []

    def noted(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(noted, lambda tensor: tensor):
        made.train(made.initial_model(), request(3))
    assert kept == []
    assert all(parameter.grad is None for parameter in made.model.inner.parameters())


def test_dropout_is_off_and_batches_accumulate() -> None:
    made = trainer()
    first = made.initial_model()
    whole = made.train(first, request(1, batch_size=96))
    parts = made.train(first, request(1, batch_size=32, gradient_accumulation=3))
    assert np.allclose(whole.parameters, parts.parameters, rtol=1e-2)
    assert np.abs(whole.parameters).max() > 0


def test_outside_the_support_nothing_moves() -> None:
    made = trainer()
    first = made.initial_model()
    support = np.arange(0, NUM_WEIGHTS, 3)
    work = TrainingRequest("task", 1, 1, TrainingTerms(local_steps=3), 7, support=support)
    parameters = made.train(first, work).parameters
    assert set(np.flatnonzero(parameters)) == set(support)


def test_a_loss_that_is_not_finite_is_an_error_and_not_an_update() -> None:
    made = trainer(Bowl(), rate=1e30, loss=lambda outputs, _: outputs)
    with pytest.raises(InvalidUpdate, match=r"the loss is (nan|inf) ahead and .*expected finite"):
        made.train(made.initial_model(), request(50))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda: trainer(num_weights=NUM_WEIGHTS + 1), "float32.25., the module's float32.24."),
        (lambda: _renamed(), "in no subspace"),
    ],
)
def test_another_model_is_refused(change: Any, reason: str) -> None:
    made = change()
    model = made if isinstance(made, Model) else made.initial_model()
    with pytest.raises(ConfigurationError, match=reason):
        trainer().train(model, request(1))


def _renamed() -> Model:
    return Model.from_tensors({"w": np.ones(NUM_WEIGHTS, np.float32)})


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"num_weights": 0}, "a subspace of 0 weights for 146 moved values"),
        ({"num_weights": 147}, "a subspace of 147 weights for 146 moved values"),
        ({"perturbation": 0.0}, "perturbation must be positive"),
        ({"seed": -1}, "seed must lie in"),
        ({"model": net().double()}, "is float64 and cannot be moved"),
    ],
)
def test_what_cannot_be_is_refused_at_once(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        trainer(**options)


def test_the_model_says_what_names_its_subspace() -> None:
    made = trainer(seed=5)
    buffers = made.initial_model().buffers
    assert buffers[SEED].tolist() == [5, *[0] * 31]
    assert buffers[MOVED].tolist() == [1, 1, 1, 1]
