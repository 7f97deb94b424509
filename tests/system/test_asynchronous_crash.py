"""A server killed in the middle of an asynchronous run loses nothing and counts nothing twice.

Every training sets one coordinate of its own to 1. Buffers of a power of two in which all uploads
count the same: so the final model times the buffer's size, with what devices still hold, is 1 in
every coordinate that was trained, exactly.
"""

from __future__ import annotations

import random
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fedpress_client import Client, Model, Trained, TrainingRequest
from fedpress_client.state import StateDirectory
from fedpress_client.transport import HttpTransport, Retries
from fedpress_compression.compressors.error_feedback import ErrorFeedback
from fedpress_compression.compressors.none import Uncompressed
from fedpress_protocols.messages import AsynchronousTerms, TaskConfig
from fedpress_protocols.plan import CohortRules, Profile
from tests.system.server_process import ServerProcess
from tests.system.test_crash import Pace, run

CLIENTS, BUFFER, SHARE = 4, 2, 500
PROFILE = Profile(name="device", compressor=ErrorFeedback(Uncompressed()))


class Counts:
    """Sets the next coordinate of its share to 1; the higher its `index`, the slower."""

    def __init__(self, index: int, pace: Pace) -> None:
        self.index, self.pace = index, pace
        self.trained = 0

    def train(self, model: Model, work: TrainingRequest) -> Trained:
        self.pace.wait(work.round)
        time.sleep(0.03 * self.index**2)
        parameters = model.parameters.copy()
        parameters[self.index * SHARE + self.trained] += 1
        self.trained += 1
        return Trained(parameters, num_examples=1)

    def evaluate(self, model: Model) -> None:
        return None


@pytest.mark.soak
@pytest.mark.slow
def test_a_server_killed_in_the_middle_of_an_asynchronous_run_loses_nothing(
    tmp_path: Path, soak: bool, record_property: Callable[[str, object], None]
) -> None:
    rounds, kills = (150, 50) if soak else (10, 4)
    chance = random.Random(5)
    pace = Pace(kills, rounds)
    server = ServerProcess(tmp_path)
    server.start()
    initial = Model.from_tensors({"counts": np.zeros(CLIENTS * SHARE, np.float32)})
    with server.operator() as operator:
        operator.register_model(initial)
        token = operator.create_token(uses=CLIENTS)
        operator.create_task(
            TaskConfig(
                task="crash",
                model=initial.digest,
                rounds=rounds,
                profiles=(PROFILE,),
                cohort=CohortRules(size=BUFFER, minimum=BUFFER),
                asynchronous=AsynchronousTerms(concurrency=CLIENTS, max_staleness=3),
                strategy={"id": "fedbuff", "exponent": 0},
                round_seconds=3600,
            )
        )
    trainers = [Counts(index, pace) for index in range(CLIENTS)]
    clients = [device(server, tmp_path, token, trainer) for trainer in trainers]
    failures: list[BaseException] = []
    threads = [threading.Thread(target=run, args=(client, failures)) for client in clients]
    for thread in threads:
        thread.start()
    try:
        while pace.killed < kills and not failures:
            time.sleep(chance.choice([0.05, 0.2, 0.5, 1.0]) * chance.random())
            server.kill()
            pace.count()
            server.start(wait=chance.random() < 0.7)
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive(), "a device hangs"
    finally:
        for client in clients:
            client.stop()
        if server.is_running:
            server.kill()
    assert not failures, failures
    check(server, tmp_path, trainers, rounds)
    record_property("figure", f"{kills} kills in {rounds} buffers: each upload once or not at all")


def device(server: ServerProcess, folder: Path, token: str, trainer: Counts) -> Client:
    state = folder / f"device-{trainer.index}"
    retries = Retries(base=0.05, cap=0.3)
    return Client(
        server.url,
        trainer,
        state_dir=state,
        task="crash",
        token=token,
        name=state.name,
        transport=HttpTransport(server.url, StateDirectory.open(state).key(), retries=retries),
    )


def check(server: ServerProcess, folder: Path, trainers: list[Counts], rounds: int) -> None:
    database = sqlite3.connect(server.data_dir / "fedpress.db")
    state, made, digest = database.execute("SELECT state, round, model FROM tasks").fetchone()
    outcomes = Counter(
        reason
        for (reason,) in database.execute(
            "SELECT json_extract(receipt, '$.receipt.reason') FROM assignments"
        )
    )
    database.close()
    assert (state, made) == ("finished", rounds)
    assert outcomes["included"] == rounds * BUFFER
    assert None not in outcomes, "every assignment has its receipt"
    model = Model.from_bytes((server.data_dir / f"models/{digest}.safetensors").read_bytes())
    found = model.parameters * BUFFER
    due = np.zeros_like(found)
    for trainer in trainers:
        due[trainer.index * SHARE :][: trainer.trained] = 1
        identity = StateDirectory.open(folder / f"device-{trainer.index}").identity()
        assert identity is not None
        files = StateDirectory.open(folder / f"device-{trainer.index}").task("crash")
        ledger = files.load(identity.client_id)
        files.close()
        assert not ledger.pending, "every upload has its receipt"
        if ledger.residual is not None:
            found += ledger.residual
    assert (found == due).all()
