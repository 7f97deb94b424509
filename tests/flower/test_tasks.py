"""The built-in tasks: their data are read as they lie, their gradients are right."""

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sklearn")

from fedpress.simulate.partition import Partition
from fedpress.simulate.tasks import PerceptronTrainer, Task, _perceptron
from fedpress_client.trainer import TrainingRequest
from fedpress_protocols.errors import ConfigurationError
from fedpress_protocols.model import Model
from fedpress_protocols.plan import TrainingTerms


def work(**terms: Any) -> TrainingRequest:
    return TrainingRequest("task", 1, 1, TrainingTerms(**terms), seed=3)


def test_the_perceptrons_gradient_is_that_of_its_loss() -> None:
    rng = np.random.default_rng(1)
    shapes = {"0.weight": (7, 5), "0.bias": (7,), "2.weight": (3, 7), "2.bias": (3,)}
    model = Model.from_tensors(
        {n: rng.normal(0, 1, s).astype(np.float32) for n, s in shapes.items()}
    )
    inputs, labels = rng.normal(0, 1, (9, 5)), rng.integers(0, 3, 9)
    flat = model.parameters
    _, _, gradient = _perceptron(model.spec, flat, inputs, labels)
    for place in range(0, flat.size, 5):
        step = np.zeros(flat.size, np.float32)
        step[place] = 1e-2
        up, down = (
            _perceptron(model.spec, flat + sign * step, inputs, labels)[0] for sign in (1, -1)
        )
        assert (up - down) / 2e-2 == pytest.approx(gradient[place], abs=2e-3)


def test_local_training_keeps_to_its_terms() -> None:
    task = Task(clients=10)
    model, trainer = task.initial_model(), task.trainer(3)
    one = trainer.train(model, work(local_steps=2, batch_size=4))
    same = trainer.train(model, work(local_steps=2, batch_size=4))
    assert np.array_equal(one.parameters, same.parameters)
    assert one.report["steps"] == 2
    slow = trainer.train(model, work(local_steps=2, batch_size=4, learning_rate=1e-6))
    assert np.abs(slow.parameters - model.parameters).max() < 1e-4
    assert one.num_examples == len(task.partition.deal(task.load().labels, 10, 0)[3])
    longer = trainer.train(model, work(local_epochs=2, batch_size=4))
    assert longer.report["steps"] == 2 * -(-one.num_examples // 4)


def test_a_trainer_honours_what_it_says() -> None:
    task = Task(clients=10)
    data, model = task.load(), task.initial_model()
    trainer = PerceptronTrainer(data.inputs[:40], data.targets[:40])
    assert trainer.evaluate(model) is None
    plain = trainer.train(model, work(local_epochs=3)).parameters
    held = TrainingRequest("task", 1, 1, TrainingTerms(local_epochs=3), 3, proximal=2.0)
    near = trainer.train(model, held).parameters
    assert np.linalg.norm(near - model.parameters) < 0.8 * np.linalg.norm(plain - model.parameters)
    support = np.arange(100, 200)
    some = TrainingRequest("task", 1, 1, TrainingTerms(local_epochs=3), 3, support=support)
    moved = np.flatnonzero(trainer.train(model, some).parameters != model.parameters)
    assert moved.size
    assert set(moved) <= set(support)
    full = TrainingRequest("task", 1, 1, TrainingTerms(), 3, full_batch=True, report=("loss",))
    trained = trainer.train(model, full)
    loss, _, gradient = _perceptron(
        model.spec, model.parameters, data.inputs[:40], data.targets[:40]
    )
    assert trained.report == {"steps": 1, "loss": loss}
    np.testing.assert_allclose(
        trained.parameters, model.parameters - np.float32(0.2) * gradient, atol=1e-7
    )


def written_fashion(folder: Path) -> None:
    rng = np.random.default_rng(0)
    for part, count in (("train", 60), ("t10k", 20)):
        images = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = rng.integers(0, 10, count, dtype=np.uint8)
        for name, array in (("images-idx3", images), ("labels-idx1", labels)):
            head = bytes((0, 0, 8, array.ndim)) + np.array(array.shape, ">u4").tobytes()
            path = folder / f"{part}-{name}-ubyte.gz"
            path.write_bytes(gzip.compress(head + array.tobytes()))


def test_fashion_mnist_is_read_and_trained(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    written_fashion(tmp_path)
    task = Task.parse(f"fashion-mnist:{tmp_path}", 3, Partition("iid", 0), 0, "cpu")
    model = task.initial_model()
    assert model.spec.size == 106_122
    trained = task.trainer(1).train(model, work(local_steps=2))
    assert trained.num_examples == 20
    assert not np.array_equal(trained.parameters, model.parameters)
    assert set(task.evaluate(model)) == {"loss", "accuracy"}
    with pytest.raises(ConfigurationError, match="cannot be read"):
        Task("fashion-mnist", str(tmp_path / "nowhere"), 3).load()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "begins with , not"),
        (bytes((0, 0, 13, 1)) + bytes(4), "begins with 00000d01, not as an IDX file of bytes in 1"),
        (bytes((0, 0, 8, 3)) + bytes(12), "begins with 00000803"),
        (bytes((0, 0, 8, 1, 0, 0)), "begins with 00000801"),
        (bytes((0, 0, 8, 1, 0, 0, 0, 9)) + bytes(8), "holds 8 values, not the 9 that it announces"),
        (bytes((0, 0, 8, 1, 255, 255, 255, 255)), "holds 0 values, not the 4,294,967,295"),
    ],
)
def test_a_file_of_another_kind_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    written_fashion(tmp_path)
    labels = tmp_path / "train-labels-idx1-ubyte.gz"
    labels.write_bytes(gzip.compress(content))
    with pytest.raises(ConfigurationError, match=f"train-labels-idx1-ubyte.gz {message}"):
        Task("fashion-mnist", str(tmp_path), 3).load()
    labels.write_bytes(gzip.compress(bytes(100_000))[:-30])
    with pytest.raises(ConfigurationError, match="cannot be read"):
        Task("fashion-mnist", str(tmp_path), 3).load()


PLAY = """\tA PLAY

\tDRAMATIS PERSONAE

DUKE\tof somewhere. (DUKE:)

\tACT I

\tSCENE I\tA street.

\t[Enter DUKE]

DUKE\t{duke}
\tand more of it. [Aside]

First Citizen\t{citizen}

\t[Exeunt]
"""


def test_shakespeare_is_read_by_role(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    text = PLAY.format(duke="So say I all. " * 100, citizen="We hear you well. " * 60)
    (tmp_path / "play.txt").write_text(text)
    task = Task.parse(f"shakespeare:{tmp_path}", 2, Partition("natural", 0), 0, "cpu")
    data = task.load()
    assert data.groups is not None
    assert set(data.groups) == {0, 1}
    assert np.array_equal(data.inputs[:, 1:], data.targets[:, :-1])
    assert len(data.test_inputs) == 3
    model = task.initial_model()
    trained = [task.trainer(index).train(model, work(local_steps=1)) for index in range(2)]
    assert [each.num_examples for each in trained] == [
        int((data.groups == g).sum()) for g in (0, 1)
    ]
    with pytest.raises(ConfigurationError, match="no plays"):
        Task("shakespeare", str(tmp_path / "nowhere"), 2).load()
