"""The example of federated LoRA: its adapter loads in plain PEFT, and little of it travels."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fedpress.plotting import runs_in
from fedpress.task_file import task_config

pytest.importorskip("peft", reason="PEFT is not installed: pip install fedpress[peft]")

EXAMPLE = Path(__file__).parents[2] / "examples" / "lora" / "lora.py"
BYTES = re.compile(r"loss ([0-9.]+), up ([0-9,]+) bytes .*float16: ([0-9,]+)\), down ([0-9,]+)")


def test_three_devices_train_an_adapter_that_plain_peft_loads(tmp_path: Path) -> None:
    options = ("--rounds", "3", "--base-steps", "20", "--out", str(tmp_path / "out"))
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), *options],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "in plain PEFT: logits equal" in done.stdout
    names = {path.name for path in (tmp_path / "out" / "adapter").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json"} <= names
    history = tmp_path / "out" / "history.json"
    (run,) = runs_in(history, "loss")
    assert (run.name, [point.round for point in run.points]) == ("out", [1, 2, 3])
    rows = [[float(each.replace(",", "")) for each in row] for row in BYTES.findall(done.stdout)]
    assert len(rows) == 3
    assert rows[-1][0] < rows[0][0]
    assert run.points[-1].num_bytes == sum(up + down for _, up, _, down in rows)
    for _, up, half, down in rows[1:]:
        assert 0 < up < half / 15
        assert 0 < down < half / 4


def test_both_tasks_differ_in_compression_alone() -> None:
    ours, plain = (task_config(EXAMPLE.with_name(name)) for name in ("task.json", "float32.json"))
    assert plain.downlink is None
    changed = {"profiles": ours.profiles, "downlink": ours.downlink}
    assert plain.model_copy(update=changed) == ours
