"""`fedpress model ...`, and pausing a task, against a server in this process."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedpress_protocols.errors import ConfigurationError, Conflict, NotFound
from fedpress_protocols.model import Model
from fedpress_protocols.subspace import MOVED, SEED, WEIGHTS
from tests.devices import Device, Operator
from tests.face.commands import Command, said
from tests.server.in_process import Clock, Server, include_one


@pytest.fixture(autouse=True)
def task(server: Server, clock: Clock) -> None:
    """A task of four committed rounds, and a policy that keeps two."""
    operator, device = Operator(server), Device(server, clock)
    device.enrol(operator.token())
    model = Model.from_tensors({"w": np.zeros((3, 4), np.float32)})
    cohort = {"size": 1, "minimum": 1}
    operator.begin(model, rounds=9, cohort=cohort, retention={"last": 2})
    for _ in range(4):
        device.check_in("digits", include_one(device, model), wait=30)


def test_versions_are_listed_with_what_stands_for_them(fedpress: Command) -> None:
    said(fedpress("model", "promote", "digits", "2", "production"))
    lines = said(fedpress("model", "list", "digits")).splitlines()
    assert [line.split()[0] for line in lines] == ["version", "4", "3", "2", "1", "0"]
    assert lines[1].endswith("newest")
    assert "production" in lines[3]
    rows = json.loads(said(fedpress("model", "list", "digits", "--json", "--limit", "2")))
    assert [row["version"] for row in rows] == [4, 3]


def test_promotion_and_rollback_by_command(fedpress: Command) -> None:
    assert "version 4" in said(fedpress("model", "promote", "digits", "newest", "candidate"))
    said(fedpress("model", "promote", "digits", "1", "production", "--expect", "none"))
    refused = fedpress("model", "promote", "digits", "2", "production", "--expect", "3")
    assert isinstance(refused.exception, Conflict)
    said(fedpress("model", "promote", "digits", "candidate", "production", "--expect", "1"))
    assert "version 1" in said(
        fedpress("model", "rollback", "digits", "production", "--expect", "4")
    )
    told = json.loads(said(fedpress("model", "aliases", "digits", "--json")))
    assert {each["alias"]: each["version"] for each in told} == {"candidate": 4, "production": 1}
    for wrong in (("promote", "digits", "1", "a", "--expect", "x"),
                  ("rollback", "digits", "production", "--expect", "none")):  # fmt: skip
        assert isinstance(fedpress("model", *wrong).exception, ConfigurationError)
    assert isinstance(fedpress("model", "show", "digits", "no/where").exception, NotFound)


def test_an_export_is_the_file_of_that_digest_and_its_lineage(
    fedpress: Command, tmp_path: Path
) -> None:
    file = tmp_path / "model.safetensors"
    said(fedpress("model", "export", "digits", "3", str(file)))
    lineage = json.loads((tmp_path / "model.safetensors.json").read_text())
    assert Model.from_bytes(file.read_bytes()).digest == lineage["model"]
    assert lineage["version"] == 3
    assert len(lineage["updates"]) == 1
    assert len(lineage["ancestors"]) == 3
    assert json.loads(said(fedpress("model", "show", "digits", "3", "--json"))) == lineage


def test_a_model_in_a_subspace_can_be_materialised_and_no_other(
    fedpress: Command, server: Server, tmp_path: Path
) -> None:
    file = tmp_path / "model.safetensors"
    refused = fedpress("model", "export", "digits", "3", str(file), "--materialised")
    assert isinstance(refused.exception, ConfigurationError)
    assert "in no subspace" in str(refused.exception)
    assert not file.exists()
    tensors: dict[str, np.ndarray[Any, Any]] = {
        "w": np.ones((3, 4), np.float32),
        SEED: np.zeros(32, np.uint8),
        MOVED: np.ones(1, np.uint8),
        WEIGHTS: np.full(5, 0.5, np.float32),
    }
    Operator(server).begin(Model.from_tensors(tensors, frozen=["w"]), "subspace", rounds=1)
    said(fedpress("model", "export", "subspace", "0", str(file), "--materialised"))
    whole = Model.from_bytes(file.read_bytes())
    assert [tensor.name for tensor in whole.spec.trained] == ["w"]
    assert set(whole.parameters.tolist()) == {0.5, 1.5}


def test_collection_says_what_would_go_and_then_takes_it(fedpress: Command, clock: Clock) -> None:
    clock.advance(30 * 86400)
    assert "2 models" in said(fedpress("model", "collect", "--dry-run"))
    assert "would be removed" in said(fedpress("model", "collect", "--dry-run"))
    assert "digits 2" in said(fedpress("model", "collect"))
    assert "0 models, 0 bytes removed" in said(fedpress("model", "collect"))
    assert "collected" in said(fedpress("model", "list", "digits"))
    gone = fedpress("model", "export", "digits", "1", "anywhere")
    assert isinstance(gone.exception, NotFound)
    assert "given up by the retention" in str(gone.exception)


def test_a_task_is_paused_and_resumed_by_command(fedpress: Command) -> None:
    assert "held by the operator" in said(fedpress("task", "pause", "digits"))
    [row] = said(fedpress("task", "list")).splitlines()[1:]
    assert row.split()[:3] == ["digits", "running", "4/9"]
    assert row.endswith("held by the operator")
    assert "held" not in said(fedpress("task", "resume", "digits"))
    [task] = json.loads(said(fedpress("task", "list", "--json")))
    assert (task["state"], task["round"], task["reason"]) == ("running", 4, "")


def test_a_task_is_created_from_yaml(fedpress: Command, tmp_path: Path) -> None:
    model, file = tmp_path / "first.safetensors", tmp_path / "task.yaml"
    model.write_bytes(Model.from_tensors({"w": np.ones((3, 4), np.float32)}).to_bytes())
    file.write_text(
        "task: other\nrounds: 3\ncohort: {size: 2, minimum: 1}\n"
        "profiles:\n- {name: p, compressor: {id: topk, fraction: 5e-1}}\n"
    )
    created = json.loads(said(fedpress("task", "create", str(file), str(model), "--json")))
    assert (created["task"], created["rounds"]) == ("other", 3)
