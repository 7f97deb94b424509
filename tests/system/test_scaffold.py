"""SCAFFOLD over real HTTP: a server killed in its midst ends with the same model, and the control
variates of devices and server still agree."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from fedpress_client import Ledger
from fedpress_compression.compressors.topk import TopK
from fedpress_protocols.plan import Profile, TrainingTerms
from tests.system.test_crash import CLIENTS, federate


@pytest.mark.soak
@pytest.mark.slow
def test_control_variates_agree_after_crashes(
    tmp_path: Path, soak: bool, record_property: Callable[[str, object], None]
) -> None:
    rounds, kills = (20, 20) if soak else (4, 2)
    strategy = {"id": "ema", "inner": {"id": "scaffold", "clients": CLIENTS}}
    profile = Profile(name="device", compressor=TopK(0.3, magnitude_bits=4))
    training = TrainingTerms(local_steps=3, batch_size=16, learning_rate=0.3)
    task = (profile, strategy, training)
    calm = federate(tmp_path / "calm", rounds, 0, random.Random(0), *task)
    rough = federate(tmp_path / "rough", rounds, kills, random.Random(2), *task)
    assert rough == calm
    assert len(calm.included) == rounds * CLIENTS
    for folder in (tmp_path / "calm", tmp_path / "rough"):
        control = server_control(folder)
        assert np.abs(control).max() > 0.01
        np.testing.assert_allclose(control, mean_of_devices(folder), atol=1e-5)
    difference = np.abs(server_control(tmp_path / "calm") - server_control(tmp_path / "rough"))
    assert difference.max() == 0
    record_property("figure", f"SCAFFOLD, {kills} kills in {rounds} rounds: the same model and c")


def server_control(folder: Path) -> np.ndarray:
    (file,) = (folder / "server").rglob("optimizers/*.safetensors")
    return safetensors.numpy.load_file(file)["state.inner.control"]


def mean_of_devices(folder: Path) -> np.ndarray:
    kept = []
    for index in range(CLIENTS):
        path = folder / f"device-{index}" / "tasks" / "crash" / "ledger.safetensors"
        ledger = Ledger.from_bytes(path.read_bytes())
        assert ledger.control is not None
        assert not ledger.pending
        kept.append(ledger.control)
    return np.asarray(np.mean(kept, axis=0, dtype=np.float64))
