"""Selection, eligibility and evaluation over real HTTP, with a server that is killed on the way."""

from __future__ import annotations

import json
import sqlite3
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest
from click.testing import CliRunner

from fedpress.cli import app
from fedpress_client import Client, Event, Model, Summary
from fedpress_client.state import StateDirectory
from fedpress_client.transport import HttpTransport, Retries
from fedpress_protocols.messages import (
    Eligibility,
    EvaluationTerms,
    SelectionTerms,
    TaskConfig,
)
from fedpress_protocols.plan import CohortRules, Profile, TrainingTerms
from tests.system.server_process import ADMIN_TOKEN, ServerProcess

sys.path.insert(0, str(Path(__file__).parents[2] / "client_sdk" / "examples"))
from numpy_softmax import initial_model, make_trainer

DEVICES, SMALL = 5, 4
"""The last one has too little memory."""
REGIONS = "north", "south"


@pytest.mark.slow
def test_cohorts_are_chosen_among_the_eligible_and_the_task_stops_in_time(
    tmp_path: Path,
) -> None:
    server = ServerProcess(tmp_path)
    server.start()
    began = threading.Semaphore(0)
    initial = initial_model()
    with server.operator() as operator:
        operator.register_model(initial)
        token = operator.create_token(uses=DEVICES)
        config = {
            "task": "chosen",
            "model": initial.digest,
            "rounds": 30,
            "profiles": (Profile.model_validate({"name": "all", "compressor": {"id": "none"}}),),
            "training": TrainingTerms(local_epochs=1),
            "cohort": CohortRules(size=2, minimum=2),
            "selection": SelectionTerms(policy="loss", candidates=3, window=2.0),
            "eligible": {"memory_gib": Eligibility(minimum=2)},
            # Nothing is better by 100 points: three models measured are two too many.
            "evaluation": EvaluationTerms(
                metric="accuracy", goal="highest", patience=2, min_delta=1.0, group_by="region"
            ),
            "seed": 7,
        }
        operator.create_task(TaskConfig.model_validate(config))
    clients = [
        Client(
            server.url,
            make_trainer(seed=index, examples=60),
            state_dir=(state := tmp_path / f"device-{index}"),
            task="chosen",
            token=token,
            seed=index,
            attributes={
                "memory_gib": 1.0 if index == SMALL else 4.0,
                "region": REGIONS[index % 2],
            },
            on_event=lambda event: tell(event, began),
            transport=HttpTransport(
                server.url, StateDirectory.open(state).key(), retries=Retries(base=0.05, cap=0.3)
            ),
        )
        for index in range(DEVICES)
    ]
    ended: dict[int, Summary] = {}
    threads = [
        threading.Thread(target=lambda i=i: ended.update({i: clients[i].run()}))
        for i in range(DEVICES)
    ]
    for thread in threads:
        thread.start()
    try:
        for _ in range(2):
            assert began.acquire(timeout=120), "nobody is assigned"
            server.kill()
            server.start()
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive(), "a device hangs"
        check(server, ended, tmp_path)
    finally:
        for client in clients:
            client.stop()
        if server.is_running:
            server.kill()


def tell(event: Event, began: threading.Semaphore) -> None:
    if event.kind == "assigned":
        began.release()


def check(server: ServerProcess, ended: dict[int, Summary], folder: Path) -> None:
    assert {summary.state for summary in ended.values()} == {"finished"}
    with server.operator() as operator:
        task, history = operator.task("chosen"), operator.rounds("chosen")
        first, last = operator.round("chosen", 1), operator.round("chosen", task.round)
    assert task.round == 3
    assert "and no better by more than 1 in 2 models since" in task.reason
    assert [status.assigned for status in history] == [2, 2, 2]
    assert sum(summary.included for summary in ended.values()) == 6
    assert ended[SMALL].included == ended[SMALL].not_included == 0

    # Devices measured the models they began with, and those that took part the last one too.
    members = [index for index, summary in ended.items() if summary.included]
    assert set(first.metrics) == set(last.metrics) == {"accuracy", "loss"}
    regions = Counter(REGIONS[index % 2] for index in members)
    assert {name: group.num_clients for name, group in last.groups.items()} == regions
    by_class = last.classes.values()
    right = sum(each.num_examples * each.metrics["accuracy"] for each in by_class)
    measured = sum(each.num_examples for each in by_class)
    assert right / measured == pytest.approx(last.metrics["accuracy"])
    assert measured == sum(group.num_examples for group in last.groups.values())
    assert task.best == max(history, key=lambda each: each.metrics["accuracy"]).model

    events = Counter[str]()
    with sqlite3.connect(server.data_dir / "fedpress.db") as database:
        for (text,) in database.execute("SELECT event FROM round_events"):
            events[json.loads(text)["event"]] += 1
    database.close()
    assert events["CohortChosen"] >= 3
    assert events["ClientCheckedIn"] == 0

    file = folder / "best.safetensors"
    how = ["--best", "--admin-token", ADMIN_TOKEN, "--url", server.url]
    saved = CliRunner().invoke(app, ["task", "model", "chosen", str(file), *how])
    assert saved.exit_code == 0, saved.output
    assert Model.from_bytes(file.read_bytes()).digest == task.best
    shown = CliRunner().invoke(app, ["round", "show", "chosen", "3", "--json", *how[1:]])
    assert json.loads(shown.output)["classes"] == last.model_dump(mode="json")["classes"]
