"""Local SGD in PyTorch says what the plan says, on any model, the same each time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from fedpress_client import Evaluation, TorchTrainer, TrainingRequest
from fedpress_compression.compressors.eden import Eden
from fedpress_compression.compressors.error_feedback import ErrorFeedback
from fedpress_compression.compressors.quantize import Quantize
from fedpress_compression.tensors import ModelSpec, TensorSpec, Vector
from fedpress_protocols.errors import ConfigurationError, InvalidUpdate
from fedpress_protocols.model import Model
from fedpress_protocols.plan import TrainingTerms
from tests.client.fake_server import FakeServer, make_client

INPUTS = torch.randn(60, 5, generator=torch.Generator().manual_seed(0))
LABELS = (INPUTS[:, 0] > 0).long() + (INPUTS[:, 1] > 0).long()
DATA = TensorDataset(INPUTS, LABELS)


def network(seed: int = 0, *extra: nn.Module) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(5, 8), *extra, nn.ReLU(), nn.Linear(8, 3))


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def trainer(model: nn.Module | None = None, data: Any = DATA, **options: Any) -> TorchTrainer:
    options = {"batch_size": 10} | options
    return TorchTrainer(model or network(), nn.CrossEntropyLoss(), sgd, data, **options)


def work(seed: int = 1, **terms: Any) -> TrainingRequest:
    return TrainingRequest("task", 1, 1, TrainingTerms(**terms), seed)


def change(made: TorchTrainer, base: Model, asked: TrainingRequest) -> np.ndarray:
    return made.train(base, asked).parameters - base.parameters


def measured(made: TorchTrainer, model: Model) -> Evaluation:
    found = made.evaluate(model)
    assert found is not None
    return found


def test_training_repeats_from_its_seed_and_touches_no_global_generator() -> None:
    made = trainer(network(0, nn.Dropout(0.5)))
    base = made.initial_model()
    first = made.train(base, work(1, local_epochs=2))
    torch.rand(7)
    state = torch.random.get_rng_state()
    again = made.train(base, work(1, local_epochs=2))
    assert torch.equal(state, torch.random.get_rng_state())
    np.testing.assert_array_equal(first.parameters, again.parameters)
    assert (first.parameters != made.train(base, work(2, local_epochs=2)).parameters).any()
    assert first.num_examples == 60
    assert first.metrics["loss"] > 0
    with_loader = trainer(data=DataLoader(DATA, batch_size=10, shuffle=True))
    base = with_loader.initial_model()
    np.testing.assert_array_equal(
        change(with_loader, base, work(4)), change(with_loader, base, work(4))
    )


def test_epochs_are_as_many_steps_as_they_hold() -> None:
    made = trainer()
    base = made.initial_model()
    two_epochs = change(made, base, work(local_epochs=2))
    np.testing.assert_array_equal(two_epochs, change(made, base, work(local_steps=12)))
    assert (two_epochs != change(made, base, work(local_steps=11))).any()
    np.testing.assert_array_equal(two_epochs, change(trainer(local_epochs=2), base, work()))
    np.testing.assert_array_equal(
        change(made, base, work(batch_size=20)), change(trainer(batch_size=20), base, work())
    )


@pytest.mark.parametrize("steps", [{"local_steps": 4}, {"local_epochs": 2}])
def test_accumulated_gradients_are_those_of_a_large_batch(steps: dict[str, int]) -> None:
    data = TensorDataset(INPUTS[:57], LABELS[:57])  # the last batches are not full
    made = trainer(data=data)
    base = made.initial_model()
    large = change(made, base, work(batch_size=20, **steps))
    small = change(made, base, work(batch_size=5, gradient_accumulation=4, **steps))
    np.testing.assert_allclose(small, large, rtol=1e-4, atol=1e-7)


def test_the_plans_learning_rate_rules() -> None:
    made = trainer()
    base = made.initial_model()
    one = change(made, base, work(local_steps=1, learning_rate=0.1))
    ten = change(made, base, work(local_steps=1, learning_rate=1.0))
    np.testing.assert_allclose(ten, 10 * one, rtol=1e-2, atol=1e-6)
    np.testing.assert_array_equal(one, change(made, base, work(local_steps=1)))


def test_buffers_are_carried_and_statistics_trained() -> None:
    made = trainer(network(0, nn.BatchNorm1d(8)))
    base = made.initial_model()
    counter = "1.num_batches_tracked"
    assert set(base.buffers) == {counter}
    carried = Model(base.spec, base.parameters, {counter: np.array(41)})
    again = Model.from_bytes(carried.to_bytes())
    assert again.digest == carried.digest
    made.train(again, work())
    assert int(made.model.state_dict()[counter]) == 41 + 6
    moved = base.spec.unflatten(change(made, base, work()))
    assert moved["1.running_mean"].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_travels(dtype: torch.dtype) -> None:
    inputs = INPUTS.to(dtype)
    made = trainer(network().to(dtype), TensorDataset(inputs, LABELS))
    base = made.initial_model()
    assert {tensor.dtype for tensor in base.spec.trained} == {str(dtype).removeprefix("torch.")}
    assert Model.from_bytes(base.to_bytes()).digest == base.digest
    trained = made.train(base, work())
    assert trained.parameters.dtype == np.float32
    moved = torch.from_numpy(trained.parameters)
    assert torch.equal(moved, moved.to(dtype).float()), "values that the module can hold"
    assert (trained.parameters != base.parameters).any()


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_autocast_computes_in_half_precision_and_keeps_float32(kind: Any) -> None:
    computed: set[torch.dtype] = set()

    def seen(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        computed.add(output.dtype)

    made = trainer(autocast=kind, evaluation_data=DATA)
    made.model[0].register_forward_hook(seen)  # type: ignore[index]
    base = made.initial_model()
    first = made.train(base, work(local_epochs=2))
    assert computed == {getattr(torch, kind)}
    assert {each.dtype for each in made.model.parameters()} == {torch.float32}
    assert {tensor.dtype for tensor in base.spec.trained} == {"float32"}
    np.testing.assert_array_equal(
        first.parameters, made.train(base, work(local_epochs=2)).parameters
    )
    exact = trainer().train(base, work(local_epochs=2))
    assert (first.parameters != exact.parameters).any()
    np.testing.assert_allclose(first.parameters, exact.parameters, atol=0.02)
    assert first.report == exact.report == {"steps": 12}
    computed.clear()
    loss = measured(made, base).metrics["loss"]
    assert computed == {getattr(torch, kind)}
    assert loss == pytest.approx(
        measured(trainer(evaluation_data=DATA), base).metrics["loss"], 0.01
    )


def test_float16_scales_the_loss_and_adds_a_strategys_terms_unscaled() -> None:
    asked = dataclasses.replace(
        work(local_steps=3), correction=np.full(75, 0.25, np.float32), proximal=0.5
    )
    base = trainer().initial_model()
    exact = change(trainer(), base, asked)
    np.testing.assert_allclose(change(trainer(autocast="float16"), base, asked), exact, atol=0.003)

    def tiny(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return 1e-6 * nn.functional.cross_entropy(outputs, targets)

    def large(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1e5)

    made = TorchTrainer(network(), tiny, large, DATA, batch_size=10, autocast="float16")
    np.testing.assert_allclose(
        change(made, base, work(local_steps=3)),
        change(trainer(), base, work(local_steps=3)),
        atol=0.003,
    )


def test_sparse_gradients_take_a_strategys_terms() -> None:
    words = torch.tensor([[0, 3], [3, 5], [1, 1], [5, 0]])
    data = TensorDataset(words, torch.tensor([0, 1, 1, 0]))

    def trained(sparse: bool) -> Vector:
        torch.manual_seed(0)
        network = nn.Sequential(nn.Embedding(6, 4, sparse=sparse), nn.Flatten(), nn.Linear(8, 2))
        made = TorchTrainer(network, nn.functional.cross_entropy, sgd, data, batch_size=2)
        base = made.initial_model()
        correction = np.full(base.spec.size, 0.25, np.float32)
        asked = dataclasses.replace(work(local_steps=3), correction=correction, proximal=0.5)
        return change(made, base, asked)

    np.testing.assert_allclose(trained(sparse=True), trained(sparse=False), atol=1e-6)


def test_steps_whose_gradients_overflow_are_not_counted() -> None:
    def huge(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return 1e3 * nn.functional.cross_entropy(outputs, targets)

    made = TorchTrainer(network(), huge, sgd, DATA, batch_size=10, autocast="float16")
    base = made.initial_model()
    with pytest.raises(InvalidUpdate, match="in all 2 steps"):
        made.train(base, work(local_steps=2, learning_rate=1e-4))
    trained = made.train(base, work(local_steps=24, learning_rate=1e-4))
    assert 0 < trained.report["steps"] < 24
    assert np.isfinite(trained.parameters).all()


def test_autocast_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="autocast is 'half', not bfloat16 or float16"):
        trainer(autocast="half")
    with pytest.raises(ConfigurationError, match=r"'0.weight' is float16, and loss scaling"):
        trainer(network().half(), autocast="float16")
    with pytest.raises(ConfigurationError, match="no autocast on meta"):
        trainer(device="meta", autocast="bfloat16")


def test_evaluation_counts_every_example_once() -> None:
    made = trainer(evaluation_data=TensorDataset(INPUTS[:25], LABELS[:25]))
    model = made.initial_model()
    found = measured(made, model)
    with torch.no_grad():
        outputs = made.model.eval()(INPUTS[:25])
        loss = nn.CrossEntropyLoss()(outputs, LABELS[:25])
        accuracy = (outputs.argmax(1) == LABELS[:25]).float().mean()
    assert found.num_examples == 25
    assert found.metrics == pytest.approx({"loss": float(loss), "accuracy": float(accuracy)})
    assert trainer().evaluate(model) is None

    def mine(outputs: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
        return {"seven": 7.0}

    other = measured(trainer(evaluation_data=DATA, metrics=mine), model)
    assert other.metrics == pytest.approx({"loss": other.metrics["loss"], "seven": 7.0})
    targets = INPUTS.sum(dim=1, keepdim=True)
    regression = TorchTrainer(
        nn.Linear(5, 1), nn.MSELoss(), sgd, DATA, evaluation_data=TensorDataset(INPUTS, targets)
    )
    assert set(measured(regression, regression.initial_model()).metrics) == {"loss"}


def test_labels_that_the_loss_ignores_count_in_no_measure() -> None:
    kept = LABELS.clone()
    kept[::3] = -100
    kept[:10] = -100  # the first batch has no others, which gives a loss of NaN
    counted = kept >= 0
    made = trainer(evaluation_data=TensorDataset(INPUTS, kept))
    model = made.initial_model()
    found = measured(made, model)
    right = TensorDataset(INPUTS[counted], LABELS[counted])
    expected = measured(trainer(evaluation_data=right), model)
    assert found.num_examples == expected.num_examples == int(counted.sum())
    assert found.metrics == pytest.approx(expected.metrics)
    assert found.classes == expected.classes
    none = TensorDataset(INPUTS, torch.full_like(kept, -100))
    assert trainer(evaluation_data=none).evaluate(model) is None
    others = nn.CrossEntropyLoss(ignore_index=2)
    two = TorchTrainer(network(), others, sgd, DATA, evaluation_data=DATA, batch_size=10)
    assert measured(two, model).num_examples == int((LABELS != 2).sum())
    assert set(measured(two, model).classes) == {"0", "1"}


def test_one_column_is_no_score_of_classes() -> None:
    """A logit, or a regression on whole numbers: the highest of one score says nothing."""

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.binary_cross_entropy_with_logits(outputs[:, 0], targets.float())

    binary = TensorDataset(INPUTS, (LABELS > 0).long())
    made = TorchTrainer(nn.Linear(5, 1), loss, sgd, binary, evaluation_data=binary)
    found = measured(made, made.initial_model())
    assert set(found.metrics) == {"loss"}
    assert not found.classes


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


def test_inputs_go_in_by_name_or_by_place() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(5, 3)

        def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            return self.inner(left - right)

    rows = [(x, y) for x, y in zip(INPUTS, LABELS, strict=True)]
    named = [({"right": x * 2, "left": x}, y) for x, y in rows]
    first = trainer(Two(), named)
    base = first.initial_model()
    for placed in (
        [((x, x * 2), y) for x, y in rows],
        [(Pair(left=x, right=x * 2), y) for x, y in rows],
    ):
        second = trainer(Two(), placed)
        np.testing.assert_array_equal(change(first, base, work()), change(second, base, work()))


READY: Any = [(INPUTS[i : i + 10], LABELS[i : i + 10]) for i in range(0, 50, 10)]


class Batches(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """A stream of 5 batches of 10, which says that it has 50 examples."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return iter(READY)

    def __len__(self) -> int:
        return 50


class Unsized:
    """A sampler that does not say how many it draws."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(30))


@pytest.mark.parametrize(
    ("loader", "expected"),
    [
        (lambda: DataLoader(DATA, 10, sampler=SubsetRandomSampler(range(20))), 20),
        (lambda: DataLoader(DATA, 10, sampler=RandomSampler(DATA, num_samples=40)), 40),
        (lambda: DataLoader(DATA, 10, sampler=WeightedRandomSampler([1.0] * 60, 600)), 60),
        (lambda: DataLoader(DATA, 10, sampler=DistributedSampler(DATA, 3, 0)), 20),
        (lambda: DataLoader(DATA, 10, sampler=Unsized()), 30),
        (lambda: DataLoader(DATA, batch_sampler=BatchSampler(range(40), 10, False)), 40),
        (lambda: DataLoader(DATA, batch_sampler=BatchSampler(Unsized(), 10, False)), 30),
        (lambda: DataLoader(DATA, None, sampler=BatchSampler(range(40), 10, False)), 40),
        (lambda: DataLoader(READY, batch_size=None), 50),
        (lambda: DataLoader(Batches(), batch_size=None), 50),
        (lambda: DataLoader(DATA, 25, drop_last=True), 60),
    ],
)
def test_an_update_counts_for_the_examples_of_an_epoch(
    loader: Callable[[], DataLoader[Any]], expected: int
) -> None:
    made = trainer(data=loader())
    base = made.initial_model()
    for epochs in (1, 2):
        assert made.train(base, work(local_epochs=epochs)).num_examples == expected


def test_local_steps_of_a_users_batches_count_for_the_whole_epoch() -> None:
    batches = BatchSampler(SubsetRandomSampler(range(40)), 10, drop_last=False)
    made = trainer(data=DataLoader(DATA, batch_sampler=batches))
    for terms in ({"local_steps": 1}, {"local_steps": 1, "gradient_accumulation": 2}):
        assert made.train(made.initial_model(), work(**terms)).num_examples == 40


def test_targets_are_counted_as_examples_however_they_are_collated() -> None:
    def loss(outputs: torch.Tensor, targets: Any) -> torch.Tensor:
        return outputs.square().mean()

    def collated(targets: Callable[[torch.Tensor], Any]) -> DataLoader[Any]:
        def collate(rows: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, Any]:
            return torch.stack([x for x, _ in rows]), targets(torch.stack([y for _, y in rows]))

        return DataLoader(DATA, 10, collate_fn=collate)

    for targets in (
        lambda y: {"y": y},
        lambda y: {"name": ["a name"] * len(y), "y": y},
        lambda y: (y, y + 1),
        lambda y: y.tolist(),
        lambda y: list(y),
        lambda y: [{"boxes": torch.zeros(7, 4), "y": each} for each in y],
    ):
        data = collated(targets)
        made = TorchTrainer(network(), loss, sgd, data, evaluation_data=data)
        assert measured(made, made.initial_model()).num_examples == 60
    single: Any = [(x, int(y)) for x, y in zip(INPUTS, LABELS, strict=True)]
    made = trainer(data=DataLoader(single, batch_size=None))
    with pytest.raises(ConfigurationError, match="yields one int for targets, where those of a b"):
        made.train(made.initial_model(), work())
    named = DataLoader(DATA, 10, collate_fn=lambda rows: {"inputs": rows, "targets": rows})
    with pytest.raises(ConfigurationError, match=r"yields a dict where \(inputs, targets\) is due"):
        trainer(data=named).train(made.initial_model(), work())


def test_a_stream_is_counted_as_it_passes() -> None:
    class Stream(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
        def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            return iter(zip(INPUTS[:25], LABELS[:25], strict=True))

    made = trainer(data=Stream())
    assert made.train(made.initial_model(), work(local_epochs=3)).num_examples == 25
    loader = trainer(data=DataLoader(Stream(), batch_size=5))
    assert loader.train(loader.initial_model(), work(batch_size=25)).num_examples == 25
    seen: list[tuple[float, float | None]] = []
    request = dataclasses.replace(work(), progress=lambda done, total: seen.append((done, total)))
    made.train(made.initial_model(), request)
    assert seen == [(1, None), (2, None), (3, None)]


@pytest.mark.parametrize(
    ("terms", "expected"),
    [
        ({"local_epochs": 2, "batch_size": 25}, [(step, 6) for step in range(1, 7)]),
        ({"local_steps": 2}, [(1, 2), (2, 2)]),
        (
            {"local_epochs": 1, "batch_size": 10, "gradient_accumulation": 4},
            [(1, 2), (2, 2)],
        ),
    ],
)
def test_training_reports_its_steps(
    terms: dict[str, int], expected: list[tuple[float, float | None]]
) -> None:
    seen: list[tuple[float, float | None]] = []
    made = trainer()
    request = dataclasses.replace(
        work(**terms), progress=lambda done, total: seen.append((done, total))
    )
    made.train(made.initial_model(), request)
    assert seen == expected


def test_a_loader_keeps_its_order_at_another_batch_size() -> None:
    seen: list[int] = []

    def collate(
        rows: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(len(rows))
        return torch.stack([x for x, _ in rows]), torch.stack([y for _, y in rows])

    made = trainer(data=DataLoader(DATA, batch_size=30, collate_fn=collate))
    base = made.initial_model()
    assert (change(made, base, work(1)) == change(made, base, work(2))).all(), "not shuffled"
    assert set(seen) == {30}
    seen.clear()
    made.train(base, work(batch_size=20))
    assert seen == [20, 20, 20]


def test_a_loader_of_the_users_own_class_is_kept_at_another_batch_size() -> None:
    class Half(DataLoader[Any]):
        """Yields the first half of each batch."""

        def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
            for inputs, targets in super().__iter__():
                yield inputs[: len(inputs) // 2], targets[: len(targets) // 2]

    loader = Half(DATA, batch_size=30)
    base = trainer().initial_model()
    first = TensorDataset(INPUTS[:10], LABELS[:10])
    np.testing.assert_array_equal(
        change(trainer(data=loader), base, work(batch_size=20, local_steps=1)),
        change(trainer(data=DataLoader(first, batch_size=10)), base, work()),
    )
    assert (loader.batch_size, len(loader)) == (30, 2)


def test_examples_that_make_no_batch_are_told_from_none() -> None:
    few = TensorDataset(INPUTS[:20], LABELS[:20])
    made = trainer(data=DataLoader(few, batch_size=8, drop_last=True))
    base = made.initial_model()
    assert made.train(base, work()).num_examples == 20
    with pytest.raises(ConfigurationError, match="20 examples make no batch of 64 with drop_last"):
        made.train(base, work(batch_size=64))
    none = trainer(data=DataLoader(few, 8, sampler=SubsetRandomSampler([]), drop_last=True))
    with pytest.raises(ConfigurationError, match="the data yields no batch, so there is nothing"):
        none.train(base, work())


def test_the_reported_loss_is_over_the_batches_of_the_plan() -> None:
    few = TensorDataset(INPUTS[:20], LABELS[:20])
    made = trainer(data=DataLoader(few, batch_size=64, drop_last=True))
    base = made.initial_model()
    asked = dataclasses.replace(work(batch_size=10), report=("loss",))
    expected = measured(trainer(evaluation_data=few), base).metrics["loss"]
    assert made.train(base, asked).report["loss"] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 3)), r"float32\[9, 5\], the mod"),
        (nn.Linear(5, 8), "has a tensor 'weight' that the module lacks"),
        (nn.Sequential(nn.Linear(5, 8)), r"it lacks '2\.weight'"),
        (network().bfloat16(), r"bfloat16\[8, 5\], the module's float32"),
    ],
)
def test_another_model_is_refused(other: nn.Module, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        trainer().train(trainer(other).initial_model(), work())


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="is complex64; known are float32"):
        trainer(nn.Sequential(nn.Linear(5, 3, dtype=torch.complex64)))
    nothing = TensorDataset(INPUTS[:0], LABELS[:0])
    for data in (nothing, DataLoader(nothing)):
        empty = trainer(data=data)
        with pytest.raises(ConfigurationError, match="the data yields no batch"):
            empty.train(empty.initial_model(), work())
    odd = trainer(data=[INPUTS[i] for i in range(10)])
    with pytest.raises(ConfigurationError, match=r"\(inputs, targets\) is due"):
        odd.train(odd.initial_model(), work())
    own_batches = DataLoader(DATA, batch_size=None)
    with pytest.raises(ConfigurationError, match="makes its own"):
        trainer(data=own_batches).train(trainer().initial_model(), work(batch_size=3))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "net"}, "model is a str, expected a torch.nn.Module"),
        ({"loss": 3}, "loss is a int, expected a function of outputs and targets"),
        ({"data": None}, "data is a NoneType, expected a Dataset or DataLoader"),
        ({"evaluation_data": 5}, "evaluation_data is a int, expected"),
        ({"batch_size": 0}, "batch_size is 0, expected a whole number from 1 on"),
        ({"local_epochs": 1.5}, r"local_epochs is 1\.5, expected a whole number"),
        ({"device": "nosuch"}, "device 'nosuch' cannot be used: Expected one of cpu"),
    ],
)
def test_wrong_arguments_are_refused_at_once(changes: dict[str, Any], message: str) -> None:
    right = {"model": network(), "loss": nn.CrossEntropyLoss(), "optimizer": sgd, "data": DATA}
    with pytest.raises(ConfigurationError, match=message):
        TorchTrainer(**{**right, **changes})


def test_an_optimizer_in_place_of_its_function_is_refused() -> None:
    made: Any = sgd(network().parameters())
    with pytest.raises(ConfigurationError, match="optimizer is a SGD, expected a function"):
        TorchTrainer(network(), nn.CrossEntropyLoss(), made, DATA)


def test_auto_takes_what_there_is() -> None:
    assert trainer(device="auto").device.type in ("cpu", "cuda")


def test_torch_devices_learn_together(tmp_path: Path) -> None:
    base = trainer(network(3, nn.BatchNorm1d(8))).initial_model()
    compressor = ErrorFeedback(Quantize(bits=4))
    server = FakeServer(
        base,
        lambda r, a: [compressor],
        rounds=5,
        auto=2,
        training=TrainingTerms(local_epochs=4, learning_rate=0.3),
    )
    clients = []
    for index in range(2):
        share = TensorDataset(INPUTS[index::2], LABELS[index::2])
        made = trainer(network(index, nn.BatchNorm1d(8)), share, evaluation_data=share)
        clients.append(make_client(server, made, tmp_path / str(index), seed=index))
    ended: set[int] = set()
    while len(ended) < 2:
        for index, client in enumerate(clients):
            if index not in ended and client.step() is None:
                ended.add(index)
    for client in clients:
        client.close()
    accuracies = [report.metrics["accuracy"] for _, report in server.evaluations]
    assert np.mean(accuracies[:2]) < 0.7 < 0.85 < np.mean(accuracies[-2:])


def test_float64_is_trained_as_float32_with_a_warning() -> None:
    wide = TensorDataset(INPUTS.double(), LABELS)
    with pytest.warns(UserWarning, match=r"4 parameters are float64, '0.weight' among them"):
        made = trainer(network().double(), wide, evaluation_data=wide)
    plain = trainer()
    base = made.initial_model()
    assert base.digest == plain.initial_model().digest
    np.testing.assert_array_equal(change(made, base, work()), change(plain, base, work()))
    assert made.evaluate(base) is not None


def test_data_of_float64_are_narrowed_with_one_warning() -> None:
    wide = TensorDataset(INPUTS.double(), LABELS)
    made, plain = trainer(network(), wide, evaluation_data=wide), trainer()
    base = plain.initial_model()
    with pytest.warns(UserWarning, match="the data yields float64"):
        narrowed = change(made, base, work())
    assert made.evaluate(base) is not None  # without another, which would be an error
    np.testing.assert_array_equal(narrowed, change(plain, base, work()))


def test_half_precision_stays_where_float64_is_narrowed() -> None:
    model = nn.Sequential(nn.Linear(5, 8).half(), nn.Linear(8, 3).double())
    with pytest.warns(UserWarning, match="2 parameters are float64"):
        made = trainer(model)
    assert [t.dtype for t in made.spec.tensors] == ["float16"] * 2 + ["float32"] * 2


def partly_frozen(seed: int = 0) -> nn.Sequential:
    """A network whose first layer is not to be trained."""
    model = network(seed)
    model[0].requires_grad_(False)
    return model


def thawed(model: Model) -> Model:
    """The same values in a model of before, which freezes nothing."""
    spec = ModelSpec(tuple(TensorSpec(t.name, t.shape, t.dtype) for t in model.spec.tensors))
    return Model(spec, spec.flatten(model.tensors()), {})


def decayed(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.5)


def test_frozen_parameters_are_in_the_model_and_in_no_update() -> None:
    made = trainer(partly_frozen())
    base = made.initial_model()
    assert [t.name for t in base.spec.trained] == ["2.weight", "2.bias"]
    assert set(base.buffers) == {"0.weight", "0.bias"}
    assert base.spec == Model.from_bytes(base.to_bytes()).spec == made.spec
    first = made.train(base, work())
    assert first.parameters.shape == (3 * 8 + 3,)
    other = trainer(partly_frozen(7))  # which takes the task's frozen values for its own
    np.testing.assert_array_equal(other.train(base, work()).parameters, first.parameters)
    weight = other.model.state_dict()["0.weight"].numpy()
    np.testing.assert_array_equal(weight, base.buffers["0.weight"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_frozen_half_precision_travels(dtype: torch.dtype) -> None:
    model = partly_frozen()
    model[0].to(dtype)
    base = Model.from_bytes(trainer(model).initial_model().to_bytes())
    assert set(base.buffers) == {"0.weight", "0.bias"}
    other = partly_frozen(7)
    other[0].to(dtype)
    trainer(other)._load(base)
    name = "0.weight"
    assert torch.equal(other.state_dict()[name], model.state_dict()[name])


def test_a_module_that_trains_what_the_task_freezes_leaves_it_alone() -> None:
    base = trainer(partly_frozen()).initial_model()
    made = TorchTrainer(network(), nn.CrossEntropyLoss(), decayed, DATA)
    assert (change(made, base, work()) != 0).any()
    weight = made.model.state_dict()["0.weight"].numpy()
    np.testing.assert_array_equal(weight, base.buffers["0.weight"])
    assert all(parameter.requires_grad for parameter in made.model.parameters())
    assert made.train(thawed(base), work()).parameters.shape == thawed(base).parameters.shape
    assert (change(made, thawed(base), work())[:48] != 0).all(), "trained again where it is due"


def test_what_a_task_freezes_is_free_again_after_a_failure() -> None:
    base = trainer(partly_frozen()).initial_model()
    made = trainer(data=[INPUTS[i] for i in range(10)])
    with pytest.raises(ConfigurationError, match=r"\(inputs, targets\) is due"):
        made.train(base, work())
    assert all(parameter.requires_grad for parameter in made.model.parameters())


def test_a_task_of_before_goes_on_where_the_module_freezes_with_one_warning() -> None:
    made = trainer(partly_frozen())
    base = thawed(made.initial_model())
    with pytest.warns(UserWarning, match=r"2 parameters that the module freezes, '0\.weight' .*Be"):
        moved = base.spec.unflatten(change(made, base, work()))
    assert not moved["0.weight"].any()
    assert moved["2.weight"].any()
    made.train(base, work())  # in silence: a second warning would be an error


def test_a_module_without_anything_to_train_says_so() -> None:
    base = trainer(partly_frozen()).initial_model()
    module = network()
    made = trainer(module)
    module[2].requires_grad_(False)
    with (
        pytest.warns(UserWarning, match=r"'2\.weight' among them"),
        pytest.raises(ConfigurationError, match="every parameter is frozen"),
    ):
        made.train(base, work())


def test_devices_with_frozen_parameters_learn_by_eden(tmp_path: Path) -> None:
    """Each part of the fleet's round: the file, the compressor, the residual and the sum."""
    base = trainer(partly_frozen(3)).initial_model()
    server = FakeServer(
        base,
        lambda r, a: [ErrorFeedback(Eden())],
        rounds=2,
        auto=2,
        training=TrainingTerms(local_epochs=2, learning_rate=0.3),
    )
    modules = [partly_frozen(0), network(1)]  # the second does not know that it is frozen
    clients = [
        make_client(server, trainer(module, DATA), tmp_path / str(index), seed=index)
        for index, module in enumerate(modules)
    ]
    ended: set[int] = set()
    while len(ended) < 2:
        for index, client in enumerate(clients):
            if index not in ended and client.step() is None:
                ended.add(index)
    for client in clients:
        client.close()
    before, after = base.tensors(), server.model.tensors()
    for name in ("0.weight", "0.bias"):
        np.testing.assert_array_equal(after[name], before[name])
    assert (after["2.weight"] != before["2.weight"]).all()


class Tied(nn.Module):
    """Scores of words by the very table that they are looked up in."""

    def __init__(self, *, is_tied: bool = True) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.embedding = nn.Embedding(11, 4)
            self.head = nn.Linear(4, 11, bias=False)
        if is_tied:
            self.head.weight = self.embedding.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(words))


WORDS = torch.arange(40) % 11
NEXT = TensorDataset(WORDS, (WORDS * 3 + 1) % 11)


def test_tied_weights_travel_once() -> None:
    made = trainer(Tied(), NEXT)
    base = made.initial_model()
    assert [tensor.name for tensor in base.spec.tensors] == ["embedding.weight"]
    assert base.spec.size == 11 * 4
    moved = base.with_parameters(made.train(base, work(local_epochs=2)).parameters)
    tied = Tied()
    other = trainer(tied, NEXT, evaluation_data=NEXT)
    other.evaluate(moved)
    assert tied.head.weight is tied.embedding.weight
    np.testing.assert_array_equal(tied.head.weight.detach().numpy().ravel(), moved.parameters)


def test_a_running_task_with_both_names_of_tied_weights_goes_on() -> None:
    made = trainer(Tied(), NEXT)
    both = trainer(Tied(is_tied=False), NEXT).initial_model()
    base = made.initial_model()
    both = both.with_parameters(np.tile(base.parameters, 2))
    assert [t.name for t in both.spec.trained] == ["embedding.weight", "head.weight"]
    moved = made.train(both, work()).parameters
    once = made.train(base, work()).parameters
    np.testing.assert_array_equal(moved, np.tile(once, 2))


def test_tied_weights_go_by_whichever_name_the_task_has() -> None:
    made = trainer(Tied(), NEXT)
    base = made.initial_model()
    named = Model(ModelSpec((TensorSpec("head.weight", (11, 4)),)), base.parameters, {})
    correction = np.full(44, 0.3, np.float32)
    asked = dataclasses.replace(work(), correction=correction)
    np.testing.assert_array_equal(
        made.train(named, asked).parameters, made.train(base, asked).parameters
    )
    assert (made.train(named, work()).parameters != made.train(named, asked).parameters).any()


def test_what_is_restricted_holds_for_tied_weights_of_one_name() -> None:
    tied = Tied()
    made = trainer(tied, NEXT)
    base = made.initial_model()
    support = np.arange(0, 44, 3)
    moved = made.train(base, dataclasses.replace(work(), support=support)).parameters
    assert (moved != base.parameters).nonzero()[0].tolist() == support.tolist()
    weight = tied.head.weight.detach().numpy().ravel()
    np.testing.assert_array_equal(weight, moved)


def test_a_module_of_two_tables_does_not_take_a_model_of_one() -> None:
    base = trainer(Tied(), NEXT).initial_model()
    with pytest.raises(ConfigurationError, match=r"it lacks 'head\.weight'"):
        trainer(Tied(is_tied=False), NEXT).train(base, work())
