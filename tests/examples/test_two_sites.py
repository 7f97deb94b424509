"""The example of two sites: the line between them carries a hundredth, and the model learns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("sklearn")

FOLDER = Path(__file__).parents[2] / "examples" / "data-parallel"
PARAMETERS = 64 * 256 + 256 + 256 * 128 + 128 + 128 * 10 + 10


@pytest.mark.slow
def test_four_processes_at_two_sites_learn_from_little(tmp_path: Path) -> None:
    out = tmp_path / "runs.json"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    subprocess.run(
        [*launcher, "--nproc-per-node", "4", "two_sites.py", "--steps", "40", "--out", out],
        cwd=FOLDER,
        env={
            **os.environ,
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
        check=True,
        timeout=300,
        capture_output=True,
    )
    curves = json.loads(out.read_text())
    (*_, plain), (*_, ours) = curves.values()
    assert plain[0] == ours[0] == 40
    assert plain[1] == pytest.approx(40 * 4 * PARAMETERS, rel=0.01)
    in_full = 2  # the steps before DistributedDataParallel's buckets are settled
    assert in_full * 4 * PARAMETERS < ours[1] < (in_full + 0.8) * 4 * PARAMETERS
    assert min(plain[2], ours[2]) > 0.4  # of ten classes
    pytest.importorskip("matplotlib")
    picture = tmp_path / "result.png"
    command = [sys.executable, "two_sites.py", "--draw", str(out), str(picture)]
    subprocess.run(command, cwd=FOLDER, check=True, timeout=120)
    assert picture.read_bytes().startswith(b"\x89PNG")
