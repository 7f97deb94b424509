"""Exchanges of gradients on the device of Triton's kernels, on a GPU or under its interpreter, have
the bits of those on the host, and leave vectors where they are."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.client.data_parallel_device_process import COUNT, METHODS, SAVED, SPEC, STEPS, WORLD

if find_spec("triton") is None:  # not imported here: its import reads TRITON_INTERPRET
    pytest.skip("runs the kernels of fedpress[gpu]", allow_module_level=True)

pytestmark = pytest.mark.slow
Found = list[Mapping[str, np.ndarray]]
SCENARIOS = [*METHODS, "three", "sites", "adasum"]


def run(folder: Path, name: str, selected: str, other: str = "") -> Found:
    """What each of the processes found under the kernels `selected`."""
    own = {
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "FEDPRESS_KERNELS": selected,
        "TRITON_INTERPRET": "0" if torch.cuda.is_available() else "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    script = Path(__file__).with_name("data_parallel_device_process.py")
    command = [sys.executable, str(script), str(folder), name, *([other] if other else [])]
    subprocess.run(command, env=os.environ | own, check=True, timeout=240)
    return [dict(np.load(folder / f"{name}.{rank}.npz")) for rank in range(WORLD)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("device")


@pytest.fixture(scope="module")
def host(folder: Path) -> Found:
    """Without Triton; leaves the checkpoint that `device` goes on from."""
    return run(folder, "host", "numpy")


@pytest.fixture(scope="module")
def device(folder: Path, host: Found) -> Found:
    return run(folder, "device", "triton", "host")


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_bytes_means_and_residuals_are_the_host_s(
    scenario: str, host: Found, device: Found
) -> None:
    for due, found in zip(host, device, strict=True):
        for key in ("bytes", "means", "residuals"):
            name = f"{scenario}.{key}"
            assert (name in due) == (name in found)
            if name in due:
                assert found[name].tobytes() == due[name].tobytes()
    assert device[0][f"{scenario}.residuals"].any()
    assert device[0][f"{scenario}.means"].tobytes() == device[1][f"{scenario}.means"].tobytes()


def test_a_hook_s_steps_are_the_host_s(host: Found, device: Found) -> None:
    """A plain step, then two that stay on the device, one that does not, and those after it."""
    for due, found in zip(host, device, strict=True):
        for key in ("bytes", "means", "residual"):
            assert found[f"hook.{key}"].tobytes() == due[f"hook.{key}"].tobytes()
        np.testing.assert_allclose(found["hook.metrics"], due["hook.metrics"], rtol=1e-5)
        assert np.all(found["hook.metrics"][1:] > 0)
        assert len(found["hook.means"]) == STEPS


def test_a_checkpoint_of_each_goes_on_in_the_other(
    host: Found, device: Found, folder: Path
) -> None:
    for rank in range(WORLD):
        saved = [
            torch.load(folder / f"{name}.{rank}.pt", weights_only=True)
            for name in ("host", "device")
        ]
        buckets = [each.pop("buckets") for each in saved]
        assert buckets[0] == buckets[1]
        torch.testing.assert_close(*saved, rtol=0, atol=0)
    for resumed in (device, run(folder, "back", "numpy", "device")):
        for due, found in zip(host, resumed, strict=True):
            means = due["hook.means"][SAVED:]
            assert found["resumed.means"].tobytes() == means.tobytes()
            assert found["resumed.residual"].tobytes() == due["hook.residual"].tobytes()


def test_what_one_process_cannot_send_changes_nothing_in_any(host: Found, device: Found) -> None:
    for rank, (due, found) in enumerate(zip(host, device, strict=True)):
        assert np.isnan(found["refused.means"]).all()
        assert found["refused.means"].shape == (2, SPEC.size)
        assert found["refused.before"].any()
        assert found["refused.after"].tobytes() == found["refused.before"].tobytes()
        says = str(found["refused.says"])
        if rank == 3:
            assert says.startswith("InvalidUpdate: an update of [1240] values where 1241")
        else:
            assert says == str(due["refused.says"])
            assert "process 3 of the group could not compress" in says
        assert found["refused.next"].tobytes() == due["refused.next"].tobytes()


def test_vectors_stay_on_the_device(host: Found, device: Found) -> None:
    """Indices and values cross, of 4 bytes each: a process's own down, and up those of all."""
    for due, found in zip(host, device, strict=True):
        assert due["crossing.largest"] == SPEC.size
        assert found["crossing.largest"] < SPEC.size / 4
        assert found["crossing.bytes"].tolist() == [8 * COUNT, 8 * COUNT * WORLD]
