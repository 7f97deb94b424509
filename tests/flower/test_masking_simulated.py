"""`fedpress simulate --secure`: one model on every engine and over HTTP, drop-outs and all."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("flwr")
pytest.importorskip("sklearn")

from threadpoolctl import threadpool_limits

from fedpress.compressor_option import compressor_from_option
from fedpress.simulate.grid import Chance
from fedpress.simulate.partition import Partition
from fedpress.simulate.run import TASK, Settings, simulate
from fedpress.simulate.tasks import Task
from fedpress_client import Client, MaskingRules
from fedpress_client.state import StateDirectory
from fedpress_client.transport import HttpTransport
from fedpress_compression.compressor import to_config
from fedpress_flower import envelope
from fedpress_flower.envelope import client_seed
from fedpress_protocols.errors import ConfigurationError
from fedpress_protocols.model import Model
from fedpress_server import Settings as ServerSettings
from fedpress_server import create_app
from tests.devices import ADMIN_TOKEN, Operator
from tests.masked import Unread
from tests.server.in_process import running

logging.getLogger("flwr").setLevel(logging.ERROR)

COMPRESSOR = "shared_support:fraction=0.3,explore=0.25"
QUICK: dict[str, Any] = {
    "clients": 12,
    "fraction": 1.0,
    "rounds": 3,
    "local_steps": 3,
    "seed": 5,
    "secure": True,
    "dropout": 0.2,
    "compressor": COMPRESSOR,
}


def rows_of(folder: Path, **changes: Any) -> list[Any]:
    return simulate(Settings(**{**QUICK, **changes}), folder).rows


def models_of(rows: list[Any]) -> list[str | None]:
    return [row.model for row in rows]


def test_one_seed_gives_one_model_on_local_and_on_processes(tmp_path: Path) -> None:
    local = rows_of(tmp_path / "local", engine="local")
    pool = rows_of(tmp_path / "pool", engine="processes")
    assert models_of(local) == models_of(pool)
    assert len({*models_of(local)}) == 3
    for one, other in zip(local, pool, strict=True):
        assert (one.included, one.lost, one.failed) == (other.included, other.lost, other.failed)
        assert one.upload_bytes == other.upload_bytes
    assert sum(row.lost for row in local) > 3
    assert models_of(rows_of(tmp_path / "all", engine="local", dropout=0.0)) != models_of(local)


def test_one_seed_gives_one_model_on_ray_too(tmp_path: Path) -> None:
    """In a process of its own: Ray leaves files open, and its processes outlive a call."""
    pytest.importorskip("ray")
    local = rows_of(tmp_path / "local", engine="local")
    command = [sys.executable, "-m", "fedpress", "simulate", "--engine", "ray", "--clients", "12"]
    command += ["--fraction", "1", "--dropout", "0.2", "--rounds", "3", "--local-steps", "3"]
    command += ["--seed", "5", "--workers", "2", "--secure", "--compressor", COMPRESSOR]
    command += ["--out", str(tmp_path / "ray")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run(command, env=environment, check=True, capture_output=True)
    document = json.loads((tmp_path / "ray" / "history.json").read_text())
    assert [row["model"] for row in document["history"]] == models_of(local)


def test_one_seed_gives_one_model_over_http_too(tmp_path: Path) -> None:
    """On fedpress's server, in its own masked rounds, with the same devices."""
    changes = {"clients": 4, "dropout": 0.0, "engine": "local"}
    rows = rows_of(tmp_path / "flower", **changes)
    assert model_over_http(tmp_path, Settings(**{**QUICK, **changes})) == rows[-1].model


def model_over_http(folder: Path, settings: Settings) -> str:
    partition = Partition.parse(settings.partition)
    task = Task.parse(settings.data, settings.clients, partition, settings.seed, "cpu")
    server_settings = ServerSettings(
        data_dir=folder / "server", admin_token=ADMIN_TOKEN, tick_seconds=3600
    )
    model = Model.from_bytes(task.initial_model().to_bytes())
    with running(create_app(server_settings)) as server, threadpool_limits(1):
        operator = Operator(server)
        compressor = compressor_from_option(COMPRESSOR, masked=True)
        operator.begin(
            model,
            TASK,
            rounds=settings.rounds,
            profiles=[{"name": "all", "compressor": to_config(compressor)}],
            cohort={"size": 4, "minimum": 3},
            training=settings.terms.model_dump(),
            seed=settings.seed,
            lane="masked",
        )
        clients = list(_devices(folder, settings, task, operator, server))
        going = list(clients)
        for _ in range(400):
            going = [client for client in going if client.step() is not None]
            if not going:
                break
        digest = clients[0].summary().model
        for client in clients:
            client.close()
    return digest


def _devices(
    folder: Path, settings: Settings, task: Task, operator: Operator, server: Any
) -> Iterator[Client]:
    for index in range(settings.clients):
        state = folder / f"device-{index}"
        http: httpx.BaseTransport = Unread(server)
        yield Client(
            "http://fedpress.test",
            task.trainer(index),
            state_dir=state,
            task=TASK,
            token=operator.token(),
            seed=client_seed(settings.seed, index),
            wait=0.0,
            sleep=lambda seconds: None,
            masking=MaskingRules(),
            transport=HttpTransport(
                "http://fedpress.test", StateDirectory.open(state).key(), http=http
            ),
        )


def test_a_masked_run_that_was_stopped_goes_on_to_the_same_model(tmp_path: Path) -> None:
    """Stopped in training, and within sessions, whose secrets the clients still have."""
    settings = Settings(**{**QUICK, "engine": "local", "clients": 8})
    whole = models_of(simulate(settings, tmp_path / "whole").rows)

    class Stopping:
        """A screen on which somebody presses Ctrl-C."""

        def __init__(self, after: int) -> None:
            self.left, self.kinds = after, set[str]()

        def update(self, history: Any, rounds: int, exchange: Any) -> None:
            self.left -= 1
            if not self.left:
                stopped.append(exchange.kind)
                raise KeyboardInterrupt

    stopped: list[str] = []
    for after in (3, 12, 21, 30, 39, 62, 75, 100, 120):
        with pytest.raises(KeyboardInterrupt):
            simulate(settings, tmp_path / "stopped", screen=Stopping(after))  # type: ignore[arg-type]
    assert {*stopped} >= {"join", "train", "shares", "masked"}
    assert models_of(simulate(settings, tmp_path / "stopped").rows) == whole


def test_the_histories_tell_what_masking_costs_and_why_there_was_no_sum(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, engine="local", dropout=0.5, clients=6, rounds=6)
    document = json.loads((tmp_path / "history.json").read_text())
    header = (tmp_path / "history.csv").read_text().splitlines()[0]
    for name in ("session_up_bytes", "session_down_bytes", "abandoned"):
        assert name in header
    assert document["session_bytes"] == sum(
        row.session_up_bytes + row.session_down_bytes for row in rows
    )
    assert {bool(row.abandoned) for row in rows} == {True, False}
    for row in rows:
        assert bool(row.abandoned) == (row.included == 0)
        assert row.session_up_bytes + (row.upload_bytes or 0) <= row.up_bytes
        if row.included:
            body = row.upload_bytes / row.included
            assert body == int(body)


def test_clients_are_lost_at_every_step_and_stay_lost() -> None:
    chance, steps = Chance(0.4, 3), ("train", *envelope.STEPS)
    lost: dict[str, int] = dict.fromkeys(steps, 0)
    for node in range(4000):
        fates = [chance.fate(7, node, step, steps) for step in steps]
        gone = [fate for fate in fates if fate != "answers"]
        assert fates == ["answers"] * (5 - len(gone)) + gone
        assert all(fate == "unreached" for fate in gone[1:])
        if gone:
            lost[steps[5 - len(gone)]] += 1
    assert 1450 < sum(lost.values()) < 1750
    assert all(230 < count < 410 for count in lost.values())
    assert [chance.fate(7, node) for node in range(50)] == [
        Chance(0.4, 3).fate(7, node, "train", ("train",)) for node in range(50)
    ]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"strategy": "fedbuff"}, "how old their models are"),
        ({"strategy": "fedbuff", "secure": False, "compressor": None}, "how old their models are"),
        ({"strategy": "median"}, "one by one"),
        ({"compressor": "topk"}, "does not commute"),
        ({"masking": "{"}, "not a JSON object"),
        ({"masking": "[]"}, "not a JSON object"),
        ({"masking": '{"levles": 3}'}, "levles"),
        ({"secure": False, "masking": "{}", "compressor": None}, "for masked rounds"),
        ({"masking": '{"dropout": 0.5}'}, "must stay"),
        ({"fraction": 0.1}, "asks 1 clients"),
        ({"app": "tests.flower.apps:pair"}, "masks by itself"),
    ],
)
def test_what_cannot_be_masked_is_refused_in_a_sentence(
    changes: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        rows_of(tmp_path, engine="local", **changes)


def test_the_terms_of_masking_can_be_chosen(tmp_path: Path) -> None:
    """Less of a server to protect from, fewer levels: smaller messages, smaller bodies."""
    common = {"engine": "local", "clients": 6, "rounds": 1, "dropout": 0.0}
    usual = rows_of(tmp_path / "usual", **common)[0]
    masking = '{"adversary": "semi-honest", "levels": 3}'
    other = rows_of(tmp_path / "other", masking=masking, **common)[0]
    assert other.included == 6
    assert other.upload_bytes < usual.upload_bytes
    assert other.session_down_bytes < usual.session_down_bytes
