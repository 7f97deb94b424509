"""The calls that docs/architecture.md draws between an upload's handler and the state machine."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from fedpress_protocols.model import Model
from fedpress_server.coordination.live import LiveTask
from fedpress_server.coordination.task_store import TaskStore
from fedpress_server.rounds.round import Round
from tests.devices import Operator
from tests.server.in_process import Enrolled, include_one

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"


def drawn() -> list[str]:
    """The numbered calls of the page, without their classes."""
    calls = re.findall(r"^  (\d) +([\w.]+)", PAGE.read_text(), re.MULTILINE)
    assert [int(number) for number, _ in calls] == list(range(1, len(calls) + 1))
    return [name.rpartition(".")[2] for _, name in calls]


def callers(first: str) -> list[str]:
    """The functions of the server that the one above this call's caller is in, from `first` on."""
    names = list[str]()
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if "fedpress_server" in frame.f_code.co_filename:
            names.append(frame.f_code.co_name)
            if names[-1] == first:
                return names[::-1]
        frame = frame.f_back
    raise AssertionError(f"{names[::-1]} were not called by {first}")


def test_an_upload_changes_its_round_after_the_calls_that_are_drawn(
    operator: Operator, enrolled: Enrolled, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command waits in the task's queue between `apply` and `_drain`."""
    operator.begin(model, rounds=1, cohort={"size": 1, "minimum": 1})
    device, found = enrolled(), dict[str, list[str]]()
    apply, on = TaskStore.apply, Round.on

    def applied(store: TaskStore, task: LiveTask, command: Any) -> Any:
        if type(getattr(command, "event", None)).__name__ == "UploadStaged":
            found["to the queue"] = [*callers("put_update"), "apply"]
        return apply(store, task, command)

    def changed(before: Round, event: Any, *more: Any) -> Any:
        if type(event).__name__ == "UploadStaged":
            found["from the queue"] = [*callers("_drain"), "on"]
        return on(before, event, *more)

    monkeypatch.setattr(TaskStore, "apply", applied)
    monkeypatch.setattr(Round, "on", changed)
    include_one(device, model)
    assert found["to the queue"] + found["from the queue"] == ["put_update", *drawn()]
    assert len(drawn()) <= 8
