"""Three regions of five devices under one upper server, all over HTTP, and killed on the way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from fedpress.operator import Operator
from fedpress.relay import RegionalTrainer
from fedpress_client import Client, Ledger
from fedpress_client.state import StateDirectory
from fedpress_client.trainer import TrainingRequest
from fedpress_client.transport import HttpTransport, Retries
from fedpress_compression.compressors.error_feedback import ErrorFeedback
from fedpress_compression.compressors.none import Uncompressed
from fedpress_compression.compressors.topk import TopK
from fedpress_compression.tensors import Vector
from fedpress_protocols.errors import ConfigurationError, StateCorrupt, TransportError, UnknownTask
from fedpress_protocols.messages import Continuation, RoundStatus, TaskConfig, TaskSummary
from fedpress_protocols.model import Model
from fedpress_protocols.plan import CohortRules, Profile, TrainingTerms
from tests.system.server_process import ADMIN_TOKEN, ServerProcess

sys.path.insert(0, str(Path(__file__).parents[2] / "client_sdk" / "examples"))
from numpy_softmax import initial_model, make_trainer

REGIONS, DEVICES = 3, 5
UPPER_ROUNDS, ROUNDS = 3, 2
FAST = Retries(base=0.05, cap=0.3)
INSIDE = Profile(name="inside", compressor=Uncompressed())
BETWEEN = Profile(name="between", compressor=ErrorFeedback(TopK(0.1, magnitude_bits=4)))
TEMPLATE: dict[str, Any] = {
    "task": "digits",
    "profiles": [INSIDE.model_dump(mode="json")],
    "training": {"local_epochs": 1},
    "cohort": {"size": DEVICES, "minimum": DEVICES},
    "round_seconds": 3600,
    "seed": 3,
}


class Relay:
    """`fedpress client relay` as a process that can be killed."""

    def __init__(self, upper: ServerProcess, region: ServerProcess, folder: Path, token: str):
        folder.mkdir()
        config = folder / "region.json"
        config.write_text(json.dumps(TEMPLATE))
        self.folder = folder
        self._command = [
            *(
                sys.executable,
                "-m",
                "fedpress",
                "client",
                "relay",
                upper.url,
                "--region",
                region.url,
            ),
            *(
                "--config",
                str(config),
                "--rounds",
                str(ROUNDS),
                "--state-dir",
                str(folder / "state"),
            ),
        ]
        self._env = {
            **os.environ,
            "FEDPRESS_TOKEN": token,
            "FEDPRESS_ADMIN_TOKEN": ADMIN_TOKEN,
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        self.start()

    def start(self) -> None:
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(self._command, env=self._env, stdout=log, stderr=log)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@contextmanager
def servers(folder: Path, count: int) -> Iterator[list[ServerProcess]]:
    started = [ServerProcess(folder / f"server-{index}") for index in range(count)]
    try:
        for server in started:
            server.start(wait=False)
        for server in started:
            eventually(server.operator, lambda operator: operator.tasks() == [])
        yield started
    finally:
        for server in started:
            if server.is_running:
                server.kill()


def eventually(
    connect: Callable[[], Operator], is_so: Callable[[Operator], bool], seconds: float = 120
) -> None:
    give_up = time.monotonic() + seconds
    with connect() as operator:
        while True:
            try:
                if is_so(operator):
                    return
            except (TransportError, UnknownTask):
                pass
            assert time.monotonic() < give_up, "it takes too long"
            time.sleep(0.05)


@pytest.mark.slow
def test_regions_federate_through_crashes(tmp_path: Path) -> None:
    with servers(tmp_path, REGIONS + 1) as (upper, *regions):
        with upper.operator() as operator:
            initial = initial_model()
            operator.register_model(initial)
            token = operator.create_token(uses=REGIONS)
            operator.create_task(
                TaskConfig(
                    task="digits",
                    model=initial.digest,
                    rounds=UPPER_ROUNDS,
                    profiles=(BETWEEN,),
                    training=TrainingTerms(),
                    cohort=CohortRules(size=REGIONS, minimum=REGIONS),
                    round_seconds=3600,
                )
            )
        relays = [
            Relay(upper, region, tmp_path / f"relay-{index}", token)
            for index, region in enumerate(regions)
        ]
        failures: list[BaseException] = []
        threads, clients = [], []
        try:
            for index, region in enumerate(regions):
                eventually(region.operator, lambda operator: bool(operator.tasks()))
                with region.operator() as operator:
                    token = operator.create_token(uses=DEVICES)
                for each in range(DEVICES):
                    state = tmp_path / f"device-{index}-{each}"
                    client = Client(
                        region.url,
                        make_trainer(seed=10 * index + each, examples=60),
                        state_dir=state,
                        token=token,
                        seed=each,
                        transport=HttpTransport(
                            region.url, StateDirectory.open(state).key(), retries=FAST
                        ),
                    )
                    clients.append(client)
                    threads.append(threading.Thread(target=run, args=(client, failures)))
            for thread in threads[:-DEVICES]:
                thread.start()
            # The last region stands still, so all that follows falls into the first upper round.
            relays[0].kill()
            relays[0].start()
            eventually(
                regions[0].operator, lambda operator: operator.task("digits").round == ROUNDS
            )
            relays[2].kill()
            regions[1].kill()
            regions[1].start()
            upper.kill()
            upper.start()
            relays[2].start()
            for thread in threads[-DEVICES:]:
                thread.start()
            eventually(
                regions[2].operator, lambda operator: operator.task("digits").round == ROUNDS
            )
            relays[1].kill()
            regions[2].kill()
            regions[2].start()
            relays[1].start()
            for relay in relays:
                assert relay.process.wait(120) == 0, (relay.folder / "log").read_text()[-3000:]
            for thread in threads:
                thread.join(120)
                assert not thread.is_alive(), "a device hangs"
        finally:
            for client in clients:
                client.stop()
            for relay in relays:
                relay.kill()
        assert not failures, failures
        with upper.operator() as operator:
            done = operator.rounds("digits")
            last = operator.model(operator.task("digits").model).parameters
        assert [status.included for status in done] == [REGIONS] * UPPER_ROUNDS
        examples = make_trainer(seed=0, examples=60).train(initial, WORK).num_examples
        assert {status.num_examples for status in done} == {REGIONS * DEVICES * examples}
        moved = np.zeros(initial.spec.size)
        for region, relay in zip(regions, relays, strict=True):
            moved += (travelled(region, [status.base_model for status in done]) - left(relay)) / 3
        np.testing.assert_allclose(last - initial.parameters, moved, atol=1e-5)
        assert np.abs(moved).max() > 0.01


def run(client: Client, failures: list[BaseException]) -> None:
    try:
        summary = client.run()
        assert summary.state == "finished"
        assert summary.included == UPPER_ROUNDS * ROUNDS
    except BaseException as exc:
        failures.append(exc)


def travelled(region: ServerProcess, bases: list[str]) -> Vector:
    """How far the region has come in all its legs, each of which began at an upper model."""
    with region.operator() as operator:
        assert operator.task("digits").state == "finished"
        done = [status for status in operator.rounds("digits") if status.state == "committed"]
        assert [status.round for status in done] == list(range(1, UPPER_ROUNDS * ROUNDS + 1))
        assert [status.included for status in done] == [DEVICES] * len(done)
        assert [status.base_model for status in done[::ROUNDS]] == bases
        legs = zip(done[::ROUNDS], done[ROUNDS - 1 :: ROUNDS], strict=True)
        moved = [
            operator.model(str(end.model)).parameters - operator.model(start.base_model).parameters
            for start, end in legs
        ]
        return np.asarray(np.sum(moved, axis=0))


def left(relay: Relay) -> Vector:
    """What the region has yet to send up."""
    file = relay.folder / "state" / "tasks" / "digits" / "ledger.safetensors"
    ledger = Ledger.from_bytes(file.read_bytes())
    assert not ledger.pending
    assert ledger.included == UPPER_ROUNDS
    assert ledger.residual is not None
    return ledger.residual


class Region:
    """An operator's view of a region that answers from a script."""

    def __init__(self, *states: TaskSummary | Exception) -> None:
        self.states = list(states)
        self.continued: list[Continuation] = []

    def task(self, name: str) -> TaskSummary:
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        if isinstance(state, Exception):
            raise state
        return state

    def register_model(self, model: Model) -> str:
        return model.digest

    def continue_task(self, name: str, more: Continuation) -> None:
        self.continued.append(more)

    def model(self, digest: str) -> Model:
        return initial_model()

    def rounds(self, name: str) -> list[RoundStatus]:
        return []

    def finish_task(self, name: str) -> None:
        raise UnknownTask("none")


def trainer_of(
    region: Region,
    folder: Path,
    template: dict[str, Any] = TEMPLATE,
    rounds: int = ROUNDS,
    **how: Any,
) -> RegionalTrainer:
    return RegionalTrainer(cast(Operator, region), template, rounds, folder, **how)


def summary(state: str, round_: int) -> TaskSummary:
    digest = "0" * 64
    return TaskSummary.model_validate(
        {"task": "digits", "state": state, "model": digest, "spec": digest}
        | {"round": round_, "rounds": max(1, round_)}
    )


WORK = TrainingRequest("digits", 1, 1, TrainingTerms(), 0)


def test_a_region_that_is_cancelled_is_told(tmp_path: Path) -> None:
    region = Region(summary("paused", 4), summary("paused", 4), summary("cancelled", 5))
    trainer = trainer_of(region, tmp_path, sleep=lambda _: None)
    with pytest.raises(ConfigurationError, match="cancelled after 5 rounds where"):
        trainer.train(initial_model(), WORK)
    assert region.continued[0].after_round == 4
    trainer.finish()


def test_a_relay_waits_for_its_region(tmp_path: Path) -> None:
    away = TransportError("no answer")
    region = Region(away, away, summary("running", 1), summary("cancelled", 2))
    pauses: list[float] = []
    trainer = trainer_of(region, tmp_path, sleep=pauses.append)
    with pytest.raises(ConfigurationError):
        trainer.train(initial_model(), WORK)
    assert pauses == [1.0, 2.0, 1.0]
    assert trainer.evaluate(initial_model()) is None


def test_a_relay_says_what_is_wrong(tmp_path: Path) -> None:
    region = Region(summary("paused", 0))
    with pytest.raises(ConfigurationError, match="sets model"):
        trainer_of(region, tmp_path, {**TEMPLATE, "model": "0" * 64})
    with pytest.raises(ConfigurationError, match="no name"):
        trainer_of(region, tmp_path, {})
    with pytest.raises(ConfigurationError, match="would be lost with every leg"):
        trainer_of(region, tmp_path, {**TEMPLATE, "downlink": {}})
    following = {"name": "inside", "compressor": {"id": "coded", "inner": {"id": "ef21"}}}
    with pytest.raises(ConfigurationError, match="follows the model's last step"):
        trainer_of(region, tmp_path, {**TEMPLATE, "profiles": [following]})
    with pytest.raises(ConfigurationError, match="the region's task: round_seconds"):
        trainer_of(region, tmp_path, {**TEMPLATE, "round_seconds": 0})
    with pytest.raises(ConfigurationError, match="at least 1"):
        trainer_of(region, tmp_path, rounds=0)
    (tmp_path / "relay-digits.json").write_text("{")
    with pytest.raises(StateCorrupt, match="not a relay's note"):
        trainer_of(region, tmp_path).train(initial_model(), WORK)
