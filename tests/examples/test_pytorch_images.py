"""Devices with photographs: each has its own share, and all learn together."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from fedpress_protocols.errors import ConfigurationError
from fedpress_protocols.messages import TaskConfig
from fedpress_protocols.model import Model
from tests.examples.joining import fedpress, join
from tests.system.server_process import ServerProcess

pytest.importorskip("torch")
pytest.importorskip("sklearn")

FOLDER = Path(__file__).parents[2] / "examples" / "pytorch-images"


@pytest.fixture
def images(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return __import__("images")


def idx(shape: tuple[int, ...], content: bytes) -> bytes:
    sizes = b"".join(size.to_bytes(4, "big") for size in shape)
    return gzip.compress(bytes((0, 0, 8, len(shape))) + sizes + content)


def test_shares_are_all_of_the_data_and_no_image_twice(images: ModuleType) -> None:
    _, labels = images.data(None)
    shares = [images.share(labels, index, 4) for index in range(4)]
    assert sorted(np.concatenate(shares)) == list(range(len(labels)))
    parts = [np.bincount(labels[mine], minlength=10) / len(mine) for mine in shares]
    assert np.abs(parts[0] - parts[1]).sum() > 0.3
    with pytest.raises(ConfigurationError, match="take fewer devices"):
        images.share(labels, 0, 1000)


def test_published_files_are_read_and_others_named(images: ModuleType, tmp_path: Path) -> None:
    content = bytes(range(256)) * 10
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(idx((10, 16, 16), content))
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(idx((10,), bytes(range(10))))
    pictures, labels = images.data(str(tmp_path))
    assert pictures.shape == (10, 1, 16, 16)
    assert pictures.max() == 1
    assert list(labels) == list(range(10))
    assert images.network(16)(images.torch.from_numpy(pictures)).shape == (10, 10)
    wrong = tmp_path / "wrong.gz"
    for data in (b"", b"no gzip", gzip.compress(b""), idx((9, 16, 16), content), idx((10,), b"x")):
        wrong.write_bytes(data)
        with pytest.raises(ConfigurationError, match=r"wrong\.gz"):
            images.read(wrong, 3)
    with pytest.raises(ConfigurationError, match="IMAGES must name the folder"):
        images.data(str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"DEVICES": "4"}, "DEVICE is ''"),
        ({"DEVICE": "x", "DEVICES": "4"}, "DEVICE is 'x'"),
        ({"DEVICE": "4", "DEVICES": "4"}, "counts from 0"),
    ],
)
def test_a_wrong_number_is_named(
    images: ModuleType, monkeypatch: pytest.MonkeyPatch, given: dict[str, str], said: str
) -> None:
    for name in ("DEVICE", "DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match=said):
        images.trainer()


def test_both_tasks_differ_in_compression_alone(images: ModuleType) -> None:
    model = images.device(0, 4).initial_model()
    ours, plain = (
        TaskConfig.model_validate(
            {**json.loads((FOLDER / name).read_text()), "model": model.digest}
        )
        for name in ("task.json", "float32.json")
    )
    for each in ("rounds", "training", "cohort", "evaluation"):
        assert getattr(ours, each) == getattr(plain, each)
    assert f"`{ours.task}`" in (FOLDER / "README.md").read_text()


@pytest.mark.slow
def test_two_devices_learn_together(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path)
    server.start()
    try:
        begun, ended = tmp_path / "model.safetensors", tmp_path / "trained.safetensors"
        command = [sys.executable, "images.py", str(begun)]
        subprocess.run(command, cwd=FOLDER, check=True)
        task = json.loads((FOLDER / "task.json").read_text())
        task |= {"rounds": 3, "cohort": {"size": 2, "minimum": 2}}
        (tmp_path / "task.json").write_text(json.dumps(task))

        fedpress("task", "create", tmp_path / "task.json", begun, url=server.url)
        devices = {tmp_path / index: {"DEVICE": index, "DEVICES": "2"} for index in ("0", "1")}
        for printed in join(FOLDER, "images:trainer", server.url, devices):
            assert "3 uploads included, 0 not, 0 pending" in printed
        fedpress("task", "model", "images", ended, url=server.url)
    finally:
        server.stop()
    assert (
        Model.from_bytes(ended.read_bytes()).digest != Model.from_bytes(begun.read_bytes()).digest
    )
