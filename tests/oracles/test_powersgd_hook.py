"""PowerSGD in two trips against torch's own hook, on two processes that train together."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from fedpress_compression.compressors.powersgd import two_trips
from fedpress_compression.matrices import views
from fedpress_compression.tensors import ModelSpec, TensorSpec
from tests.oracles.powersgd_process import (
    MIN_COMPRESSION_RATE,
    PLAIN_STEPS,
    SEED,
    STEPS,
    network,
)


def recorded(folder: Path, matrix_rank: int) -> list[dict[str, np.ndarray]]:
    """What went in and came out in each of two processes."""
    script = Path(__file__).with_name("powersgd_process.py")
    here = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    outs = [folder / f"{rank}.npz" for rank in (0, 1)]
    processes = [
        subprocess.Popen(
            [sys.executable, script, str(rank), folder / "store", outs[rank], str(matrix_rank)],
            env=here,
        )
        for rank in (0, 1)
    ]
    try:
        assert [process.wait(timeout=240) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    return [dict(np.load(out)) for out in outs]


@pytest.mark.parametrize("matrix_rank", [2])
@pytest.mark.slow
def test_two_trips_are_torch_s_hook(matrix_rank: int, tmp_path: Path) -> None:
    """Every step's mean gradient, from the same local gradients and the same start."""
    members = recorded(tmp_path, matrix_rank)
    order = [str(name) for name in members[0][f"order.{PLAIN_STEPS}"]]
    shapes = {name: tuple(p.shape) for name, p in network().named_parameters()}
    spec = ModelSpec(tuple(TensorSpec(name, shapes[name]) for name in order))
    factored, _ = views(spec, matrix_rank, MIN_COMPRESSION_RATE)
    torch.manual_seed(int(np.random.RandomState(SEED).randint(1_000_000_000)))
    rights = [
        torch.randn(1, view.columns, view.rank).numpy()[0].astype(np.float64) for view in factored
    ]
    assert 0 < len(factored) < len(order)
    errors = [np.zeros(spec.size), np.zeros(spec.size)]
    for step in range(PLAIN_STEPS, STEPS):
        whole = [
            error + np.concatenate([member[f"local.{step}.{name}"].ravel() for name in order])
            for error, member in zip(errors, members, strict=True)
        ]
        mean = np.mean(whole, axis=0)
        for index, view in enumerate(factored):
            matrices = [vector[view.where].reshape(view.rows, view.columns) for vector in whole]
            agreed, rights[index] = two_trips(matrices, rights[index])
            mean[view.where] = agreed.ravel()
        errors = [vector - mean for vector in whole]
        theirs = np.concatenate([members[0][f"mean.{step}.{name}"].ravel() for name in order])
        assert np.linalg.norm(theirs - mean) <= 2e-5 * np.linalg.norm(mean)
        assert np.linalg.norm(errors[0]) > 0.1 * np.linalg.norm(mean)  # something was at stake
