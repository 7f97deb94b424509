"""Callbacks of a simulation: each round once, with all of its figures, whatever stops or raises."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")
pytest.importorskip("sklearn")

from fedpress.simulate.history import History
from fedpress.simulate.run import Settings, simulate, sweep
from tests.face.test_callbacks import Recording

QUICK: dict[str, Any] = {
    "clients": 3,
    "fraction": 1.0,
    "rounds": 3,
    "local_steps": 2,
    "engine": "local",
    "seed": 5,
}
TASK = {
    "task": "digits",
    "rounds": 3,
    "cohort": {"size": 3, "minimum": 3},
    "profiles": [{"name": "all", "compressor": {"id": "topk", "fraction": 0.02}}],
    "training": {"local_steps": 2, "batch_size": 16, "learning_rate": 0.2},
}


class Stopping(Recording):
    """Ctrl-C arrives in round `stop`."""

    def __init__(self, stop: int) -> None:
        super().__init__()
        self.stop = stop

    def round_closed(self, closed: Any) -> None:
        if closed.figures.round == self.stop:
            raise KeyboardInterrupt
        super().round_closed(closed)


def settings(tmp_path: Path, kind: str) -> Settings:
    if kind == "app":
        return Settings(**QUICK)
    path = tmp_path / "task.json"
    path.write_text(json.dumps(TASK))
    return Settings(clients=3, engine="local", seed=5, task=str(path))


@pytest.mark.parametrize("kind", ["app", "task"])
def test_a_run_that_was_stopped_delivers_each_round_once(tmp_path: Path, kind: str) -> None:
    first, other, asked = Stopping(2), Recording(bad=1), settings(tmp_path, kind)
    with pytest.raises(KeyboardInterrupt):
        simulate(asked, tmp_path / "out", callbacks={"one": first, "bad": other})
    assert [result.is_complete for result in first.results] == [False]
    second = Recording()
    history = simulate(asked, tmp_path / "out", callbacks={"one": second})
    assert history.complete
    assert (first.numbers, second.numbers) == ([1], [2, 3])
    assert other.numbers == []
    assert (second.runs[0].id, second.runs[0].last_round) == (first.runs[0].id, 1)
    rows = [each.figures for each in (*first.rounds, *second.rounds)]
    assert [(row.model, row.test) for row in rows] == [(r.model, r.test) for r in history.rows]
    assert all(row.test["accuracy"] > 0 for row in rows)
    totals = [row.up_bytes + row.down_bytes for row in rows]
    assert second.rounds[-1].total_bytes == sum(totals)
    assert (second.results[0].is_complete, second.results[0].model) == (True, rows[-1].model)
    assert all(bool(each.attempts) == (kind == "task") for each in second.rounds)
    assert not (tmp_path / "out" / "run").exists()


def test_each_run_of_a_sweep_is_a_run_of_its_own(tmp_path: Path) -> None:
    seen = Recording()
    variations: list[dict[str, Any]] = [
        {"name": "plain", "compressor": "none"},
        {"name": "few", "rounds": 1},
    ]
    histories: list[History] = sweep(
        Settings(**QUICK), variations, tmp_path, callbacks={"one": seen}
    )
    assert [run.name for run in seen.runs] == ["plain", "few"]
    assert seen.runs[0].id != seen.runs[1].id
    assert seen.numbers == [row.round for history in histories for row in history.rows]
    assert [result.rounds for result in seen.results] == [3, 1]
