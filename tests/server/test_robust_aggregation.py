"""Strategies that compare updates, on a server: over HTTP, across a restart, and on its disk."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedpress_compression.tensors import Vector
from fedpress_protocols.errors import IncompatiblePlan
from fedpress_protocols.model import Model
from fedpress_server.settings import MIB
from fedpress_server.storage.payloads import LocalPayloads
from fedpress_strategies.rows import Rows
from fedpress_strategies.strategy import AggregationSpace
from tests.devices import Device, Operator
from tests.server.in_process import Clock, Server, Start, history

TRIMMED = {"id": "trimmed_mean", "trim": 0.2}


@pytest.fixture
def wide() -> Model:
    """A model of several ranges of coordinates."""
    return Model.from_tensors({"w": np.zeros((30, 101), np.float32), "b": np.ones(7, np.float32)})


def updates(model: Model) -> list[Vector]:
    """Five clients', one of them forged."""
    rng = np.random.default_rng(3)
    rows = rng.standard_normal((5, model.spec.size)).astype(np.float32)
    rows[2] *= -50
    return list(rows)


def trimmed(rows: list[Vector]) -> Vector:
    kept = np.sort(np.array(rows, np.float64), axis=0)[1:4]
    return np.asarray((kept[0] + kept[1] + kept[2]) / 3)


def take_part(http: Server, clock: Clock, rows: list[Vector]) -> list[tuple[Device, str]]:
    """A new device for each row, and its whole part but the receipt."""
    parts = []
    for values in rows:
        device = Device(http, clock)
        device.enrol(Operator(http).token())
        assignment = device.assignment("digits")
        device.upload(assignment.assignment, device.body_for(assignment, values))
        parts.append((device, assignment.assignment))
    return parts


def begin(http: Server, model: Model, **config: Any) -> None:
    cohort = {"size": 5, "minimum": 5}
    settings: dict[str, Any] = {"rounds": 1, "cohort": cohort, "strategy": TRIMMED}
    Operator(http).begin(model, **(settings | config))


@pytest.mark.parametrize("restarts", [False, True])
def test_a_trimmed_round_survives_a_restart_in_its_midst(
    start: Start, clock: Clock, wide: Model, tmp_path: Path, restarts: bool
) -> None:
    rows = updates(wide)
    with start(fold_memory_bytes=MIB) as http:
        begin(http, wide)
        parts = take_part(http, clock, rows[:3])
        if not restarts:
            parts += take_part(http, clock, rows[3:])
            made = finished(http, parts)
    if restarts:
        with start() as http:
            for device, _ in parts:
                device.http = http
            parts += take_part(http, clock, rows[3:])
            made = finished(http, parts)
    expected = (wide.parameters + trimmed(rows)).astype(np.float32)
    np.testing.assert_array_equal(made.parameters, expected)
    left = {path.name for path in (tmp_path / "data").rglob("*") if path.is_file()}
    assert not [name for name in left if name.endswith(".tmp")]


def finished(http: Server, parts: list[tuple[Device, str]]) -> Model:
    device, assignment = parts[0]
    answer = device.check_in("digits", assignment, wait=30)
    assert answer is not None
    assert [status.state for status in history(Operator(http))] == ["committed"]
    assert all(d.receipt(a).receipt.outcome == "included" for d, a in parts)  # type: ignore[union-attr]
    return device.model(answer.task.model)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (
            {"profiles": [{"name": "sparse", "compressor": {"id": "topk"}}]},
            "coordinate-wise rules need dense or shared-support updates.*'sparse' clients choose",
        ),
        (
            {"cohort": {"size": 5, "minimum": 2}},
            "close with 2 uploads, and trimmed_mean without 1 updates",
        ),
        ({"cohort": {"size": 40, "minimum": 40}}, "updates takes 1310720 bytes of memory"),
    ],
)
def test_a_task_that_cannot_work_is_refused_when_it_is_made(
    start: Start, wide: Model, config: dict[str, Any], says: str
) -> None:
    with start(fold_memory_bytes=MIB) as http, pytest.raises(IncompatiblePlan, match=says):
        begin(http, wide, **config)


def test_nothing_stays_on_the_disk_of_a_fold_that_was_killed(tmp_path: Path) -> None:
    script = (
        "import os, sys, pathlib, numpy as np\n"
        "from fedpress_strategies.rows import Rows\n"
        "from fedpress_strategies.strategy import AggregationSpace\n"
        "rows = Rows(100_000, AggregationSpace(pathlib.Path(sys.argv[1])))\n"
        "rows.add(np.ones(100_000, np.float32))\n"
        "print(os.fstat(rows._file.fileno()).st_size, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    path = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, env=path
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert done.stdout == "400000\n"
    assert list(tmp_path.iterdir()) == []


def test_where_files_cannot_be_without_names_a_start_sweeps_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server killed between a file's making and its losing its name."""
    monkeypatch.setattr("tempfile._O_TMPFILE_WORKS", False)
    monkeypatch.setattr("os.unlink", lambda *args, **kwargs: None)
    payloads = LocalPayloads(tmp_path)
    rows = Rows(10, AggregationSpace(payloads.root))
    rows.add(np.ones(10, np.float32))
    monkeypatch.undo()
    assert len(list(tmp_path.iterdir())) == 1
    assert payloads.sweep_temporaries() == 1
    assert list(tmp_path.iterdir()) == []
