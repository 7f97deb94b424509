"""`fedpress simulate`: one model whatever the engine, and nothing done twice after a stop."""

import csv
import json
import logging
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

pytest.importorskip("flwr")
pytest.importorskip("sklearn")

from rich.console import Console
from threadpoolctl import threadpool_limits

from fedpress.compressor_option import compressor_from_option
from fedpress.simulate.history import History, draw
from fedpress.simulate.partition import Partition
from fedpress.simulate.run import TASK, Settings, run, simulate, sweep
from fedpress.simulate.screen import print_summary
from fedpress.simulate.tasks import Task
from fedpress_client import Client, Evaluation, Trained, TrainingRequest
from fedpress_client.state import StateDirectory
from fedpress_client.transport import HttpTransport
from fedpress_compression.compressor import to_config
from fedpress_flower.envelope import client_seed
from fedpress_protocols.errors import ConfigurationError, MissingExtra
from fedpress_protocols.model import Model
from fedpress_server import Settings as ServerSettings
from fedpress_server import create_app
from tests.devices import ADMIN_TOKEN, Operator
from tests.processes import heed_ctrl_c
from tests.server.in_process import Server, running

logging.getLogger("flwr").setLevel(logging.ERROR)

QUICK: dict[str, Any] = {
    "clients": 4,
    "fraction": 1.0,
    "rounds": 3,
    "local_steps": 3,
    "seed": 5,
}
COMPRESSORS = [
    "topk:fraction=0.02,magnitude_bits=1",
    "randomk:fraction=0.05,shared=false",  # of each client's own randomness
    "cafe",  # reads the model before
]


def model_of(folder: Path, **changes: Any) -> tuple[str | None, ...]:
    """The digest after every round."""
    history = simulate(Settings(**{**QUICK, **changes}), folder)
    return tuple(row.model for row in history.rows)


class Unread(httpx.BaseTransport):
    """To a server in this process, whose answers come as a stream, as over a socket."""

    def __init__(self, server: Server) -> None:
        self._transport = server._transport

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        answer = self._transport.handle_request(request)
        stream = httpx.ByteStream(answer.read())
        return httpx.Response(answer.status_code, headers=answer.headers, stream=stream)


def model_over_http(folder: Path, compressor: str) -> str:
    """The last model of the same task, with the same devices, on fedpress's server."""
    settings = Settings(**QUICK)
    partition = Partition.parse(settings.partition)
    task = Task.parse(settings.data, settings.clients, partition, settings.seed, "cpu")
    server_settings = ServerSettings(
        data_dir=folder / "server", admin_token=ADMIN_TOKEN, tick_seconds=3600
    )
    model = Model.from_bytes(task.initial_model().to_bytes())
    with running(create_app(server_settings)) as server, threadpool_limits(1):
        operator = Operator(server)
        operator.begin(
            model,
            TASK,
            rounds=settings.rounds,
            profiles=[{"name": "all", "compressor": to_config(compressor_from_option(compressor))}],
            cohort={"size": 4, "minimum": 4},
            training=settings.terms.model_dump(),
            seed=settings.seed,
        )
        clients = []
        for index in range(settings.clients):
            state = folder / f"device-{index}"
            key = StateDirectory.open(state).key()
            clients.append(
                Client(
                    "http://fedpress.test",
                    task.trainer(index),
                    state_dir=state,
                    task=TASK,
                    token=operator.token(),
                    seed=client_seed(settings.seed, index),
                    wait=0.0,
                    sleep=lambda seconds: None,
                    transport=HttpTransport("http://fedpress.test", key, http=Unread(server)),
                )
            )
        going = list(clients)
        for _ in range(200):
            going = [client for client in going if client.step() is not None]
            if not going:
                break
        digest = clients[0].summary().model
        for client in clients:
            client.close()
    return digest


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=lambda text: text.partition(":")[0])
def test_one_seed_gives_one_model_on_every_engine_and_over_http(
    compressor: str, tmp_path: Path
) -> None:
    local = model_of(tmp_path / "local", engine="local", compressor=compressor)
    pool = model_of(tmp_path / "pool", engine="processes", compressor=compressor)
    assert local == pool
    assert len({*local}) == 3
    assert model_over_http(tmp_path, compressor) == local[-1]


def test_one_seed_gives_one_model_on_ray_too(tmp_path: Path) -> None:
    """In a process of its own: Ray leaves files open, and its processes outlive a call."""
    pytest.importorskip("ray")
    local = model_of(tmp_path / "local", engine="local", clients=12, fraction=0.5, dropout=0.2)
    command = [sys.executable, "-m", "fedpress", "simulate", "--engine", "ray", "--clients", "12"]
    command += ["--fraction", "0.5", "--dropout", "0.2", "--rounds", "3", "--local-steps", "3"]
    command += ["--seed", "5", "--workers", "2", "--out", str(tmp_path / "ray")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run(command, env=environment, check=True, capture_output=True)
    document = json.loads((tmp_path / "ray" / "history.json").read_text())
    assert tuple(row["model"] for row in document["history"]) == local


def test_another_seed_gives_another_model_and_lost_clients_too(tmp_path: Path) -> None:
    one = model_of(tmp_path / "1", engine="local")
    assert model_of(tmp_path / "2", engine="local", seed=6) != one
    history = simulate(Settings(**{**QUICK, "engine": "local", "dropout": 0.5}), tmp_path / "3")
    assert tuple(row.model for row in history.rows) != one
    figures = history.summary()
    assert figures["lost"] > 0
    assert (figures["failed"], figures["answered"]) == (0, 12 - figures["lost"])


def test_a_run_that_was_stopped_goes_on_to_the_same_model(tmp_path: Path) -> None:
    whole = model_of(tmp_path / "whole", engine="local", dropout=0.2, clients=8)
    folder, stops = tmp_path / "stopped", iter([3, 9, 14])

    class Stopping:
        """A screen on which somebody presses Ctrl-C."""

        def __init__(self, after: int) -> None:
            self.left = after

        def update(self, history: Any, rounds: int, exchange: Any) -> None:
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt

    settings = Settings(**{**QUICK, "engine": "local", "dropout": 0.2, "clients": 8})
    for after in stops:
        with pytest.raises(KeyboardInterrupt):
            simulate(settings, folder, screen=Stopping(after))  # type: ignore[arg-type]
        assert not json.loads((folder / "history.json").read_text())["complete"]
    with pytest.raises(ConfigurationError, match="with another compressor"):
        simulate(Settings(**{**QUICK, "dropout": 0.2, "clients": 8, "compressor": "none"}), folder)
    history = simulate(settings, folder)
    assert tuple(row.model for row in history.rows) == whole
    assert not (folder / "run").exists()


def test_the_histories_say_what_went_over_the_wire(tmp_path: Path) -> None:
    settings = Settings(**{**QUICK, "engine": "local", "link": 2.0})
    history = simulate(settings, tmp_path)
    document = json.loads((tmp_path / "history.json").read_text())
    assert document["complete"]
    assert document["settings"]["seed"] == 5
    with (tmp_path / "history.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["round"]) for row in rows] == [1, 2, 3]
    for row, found in zip(rows, history.rows, strict=True):
        assert int(row["upload_bytes"]) == found.upload_bytes
        assert found.upload_bytes is not None
        assert found.nmse is not None
        # Flower's records hold the upload, and of ours and Flower's some 300 bytes besides.
        assert found.upload_bytes < found.up_bytes < found.upload_bytes + 4 * 500
        assert float(row["test.accuracy"]) == found.test["accuracy"] > 0.05
        assert 0 < found.nmse < 1
        per_client = 8 * (found.up_bytes + found.down_bytes) / 4 / 2e6
        assert found.link_seconds == pytest.approx(per_client, rel=0.02)  # bodies differ
    draw([history], tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def downloads(history: History) -> list[int]:
    sizes = [row.download_bytes for row in history.rows if row.download_bytes is not None]
    assert len(sizes) == len(history.rows)
    return sizes


def test_a_downlink_is_coded_and_counted(tmp_path: Path) -> None:
    whole = simulate(Settings(**QUICK, engine="local", downlink=False), tmp_path / "whole")
    coded = simulate(Settings(**QUICK, engine="local", downlink=True), tmp_path / "coded")
    plain, sent = downloads(whole), downloads(coded)
    assert sent[0] < 0.6 * plain[0]  # a whole model, coded
    assert all(0 < less < 0.3 * more for less, more in zip(sent[1:], plain[1:], strict=True))
    with pytest.raises(ConfigurationError, match="cannot be combined with --secure"):
        Settings(downlink=True, secure=True)


def test_a_sweep_runs_each_once(tmp_path: Path) -> None:
    settings = Settings(**{**QUICK, "engine": "local", "rounds": 1})
    variations = [{"name": "plain", "compressor": "none"}, {"name": "pressed"}]
    first = sweep(settings, variations, tmp_path)
    assert [history.name for history in first] == ["plain", "pressed"]
    plain, pressed = (history.rows[0].upload_bytes for history in first)
    assert plain is not None
    assert pressed is not None
    assert plain > 20 * pressed
    stamps = [(tmp_path / h.name / "history.json").stat().st_mtime_ns for h in first]
    again = sweep(settings, variations, tmp_path)
    assert stamps == [(tmp_path / h.name / "history.json").stat().st_mtime_ns for h in first]
    assert again[1].rows[0].model == first[1].rows[0].model
    with pytest.raises(ConfigurationError, match="the sweep's run '1': no setting colour"):
        sweep(settings, [{"colour": "red"}], tmp_path)


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"compressor": "nonsense"}, "no compressor has the id 'nonsense'"),
        ({"strategy": "nonsense"}, "--strategy: no strategy"),
        ({"partition": "iid:9"}, "iid takes no number"),
        ({"local_epochs": 1}, "not both"),
        ({"task": "nowhere.json", "fraction": 0.1, "rounds": None, "local_steps": None}, "nowhere"),
    ],
)
def test_a_sweep_is_checked_to_its_end_before_anything_runs(
    wrong: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    settings = Settings(**{**QUICK, "engine": "local", "rounds": 1})
    with pytest.raises(ConfigurationError) as error:
        sweep(settings, [{"name": "x"}, {"name": "y", **wrong}], tmp_path)
    assert error.value.detail.startswith("the sweep's run 'y': ")
    assert complaint in error.value.detail
    assert not (tmp_path / "x").exists()


def test_every_round_of_a_sweep_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "sweep.json"
    file.write_text('[{"name": "one"}, {"name": "two"}]')
    settings = Settings(**{**QUICK, "engine": "local", "rounds": 2, "link": 2.0})
    histories = run(settings, tmp_path / "out", Console(width=200), sweep_file=file)
    shown = capsys.readouterr().out
    for history in histories:
        spent = sum(row.link_seconds or 0.0 for row in history.rows)
        for number in (1, 2):
            assert shown.count(f"{history.name}: round   {number} ") == 1
        assert history.summary()["link_seconds"] == pytest.approx(spent)
        assert f" {spent:,.1f} " in shown
    assert "link, s" in shown


TRAINERS = """
from fedpress.simulate.tasks import Task

def make(index, clients):
    trainer = Task(clients=clients).trainer(index)
    trainer.initial_model = Task(clients=clients).initial_model
    return trainer
"""


def test_a_sweep_runs_again_what_has_another_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    source = tmp_path / "swept_trainers.py"
    source.write_text(TRAINERS)
    settings = Settings(**{**QUICK, "engine": "local", "rounds": 1}, app="swept_trainers:make")
    first = sweep(settings, [{}], tmp_path / "out")[0]
    history = tmp_path / "out" / "1" / "history.json"
    stamp = history.stat().st_mtime_ns
    assert sweep(settings, [{}], tmp_path / "out")[0].settings == first.settings
    assert history.stat().st_mtime_ns == stamp
    source.write_text(TRAINERS + "# changed\n")
    changed = sweep(settings, [{}], tmp_path / "out")[0]
    assert history.stat().st_mtime_ns != stamp
    assert changed.settings["app_sha256"] != first.settings["app_sha256"]


@pytest.mark.parametrize("damage", ["{", "[]", '{"complete": true}'])
def test_a_history_that_cannot_be_read_is_of_no_run_that_is_complete(
    damage: str, tmp_path: Path
) -> None:
    settings = Settings(**{**QUICK, "engine": "local", "rounds": 1})
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "history.json").write_text(damage)
    assert len(sweep(settings, [{}], tmp_path)[0].rows) == 1


def test_settings_of_a_stopped_run_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "replies").write_bytes(b"anything")
    (folder / "settings.json").write_text("{")
    settings = Settings(**{**QUICK, "engine": "local", "rounds": 1})
    with pytest.raises(ConfigurationError, match=r"settings\.json, of a run that was .* --fresh"):
        simulate(settings, tmp_path)
    assert len(simulate(settings, tmp_path, fresh=True).rows) == 1


def test_a_file_of_figures_that_cannot_be_written_is_refused_before_anything_runs(
    tmp_path: Path,
) -> None:
    settings = Settings(**{**QUICK, "engine": "local"})
    with pytest.raises(ConfigurationError, match=r"--json: .* cannot be written: Is a directory"):
        run(settings, tmp_path / "out", Console(), json_file=tmp_path)
    assert not (tmp_path / "out").exists()


def test_ray_that_is_not_installed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [each for each in sys.modules if each.partition(".")[0] == "ray"]:
        monkeypatch.delitem(sys.modules, name)
    backend = "flwr.server.superlink.fleet.vce.backend.raybackend"
    monkeypatch.delitem(sys.modules, backend, raising=False)
    monkeypatch.setattr(sys, "meta_path", [WithoutRay(), *sys.meta_path])
    with pytest.raises(MissingExtra, match="--engine processes"):
        simulate(Settings(**QUICK, engine="ray"), tmp_path)


class WithoutRay:
    """Finds what a Python without Ray does."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] == "ray":
            raise ModuleNotFoundError(f"No module named {name!r}", name="ray")


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"clients": 0}, "--clients"),
        ({"fraction": 0.0}, "--fraction"),
        ({"rounds": 0}, "--rounds"),
        ({"engine": "spark"}, "no engine 'spark'"),
        ({"link": 0.0}, "--link"),
        ({"timeout": 0.0}, "--timeout"),
        (
            {"timeout": math.inf},
            "--timeout must be more than 0 s and less than 2147483648, not inf",
        ),
        ({"link": math.inf}, "--link"),
        ({"seed": -1}, "--seed"),
        ({"dropout": 1.0}, "--dropout must lie in"),
        ({"dropout": -1.0, "task": "task.json"}, "--dropout must lie in"),
        ({"run_config": "foo=1"}, "--run-config is for a Flower app"),
        ({"app": "a:b", "data": "fashion-mnist:/nowhere"}, "--data cannot be combined with --app"),
        ({"app": "a:b", "partition": "iid"}, "--partition cannot be combined with --app"),
        ({"app": "a:b", "device": "cuda"}, "--device cannot be combined with --app"),
        ({"engine": "local", "workers": 7}, "--workers has no meaning with --engine local"),
    ],
)
def test_settings_that_cannot_be_are_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        Settings(**changes)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"data": "mnist"}, "no data 'mnist'"),
        ({"data": "digits:here"}, "where digits is due"),
        ({"data": "shakespeare"}, "where shakespeare:DIR is due"),
        ({"strategy": "fedprox"}, "proximal"),
        ({"partition": "natural"}, "in no groups"),
        ({"app": "tests.flower.apps:SHAPES"}, "no pair of apps"),
        ({"app": "tests.flower.nothing:pair"}, "no module"),
        ({"local_epochs": 1}, "not both"),
        (
            {"strategy": "scaffold"},
            r"needs clients \(give its settings as JSON: {\"id\": \"scaffold\"",
        ),
        ({"strategy": "fedprox"}, "simulate that with --task"),
        ({"secure": True, "clients": 2}, "asks 2 clients, .*raise --fraction or --clients"),
        ({"secure": True, "masking": '{"foo": 1}'}, "--masking: foo: .*known are adversary, "),
        (
            {"app": "tests.flower.test_simulate:digit_trainer", "run_config": "foo=1"},
            "--run-config is for a Flower app, and tests.flower.test_simulate:digit_trainer makes",
        ),
    ],
)
def test_what_cannot_be_simulated_is_refused(
    changes: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        simulate(Settings(**{**QUICK, "engine": "local", **changes}), tmp_path)


def test_trainers_of_ones_own_are_simulated_as_devices_would_train(tmp_path: Path) -> None:
    settings = Settings(
        **{**QUICK, "engine": "local", "app": "tests.flower.test_simulate:digit_trainer"}
    )
    history = simulate(settings, tmp_path)
    assert history.rows[-1].model is not None
    assert history.rows[-1].evaluation["accuracy"] > 0.05


def digit_trainer(index: int, clients: int) -> Any:
    trainer = Task(clients=clients).trainer(index)
    trainer.initial_model = Task(clients=clients).initial_model  # type: ignore[attr-defined]
    return trainer


class OnBackbone:
    """Moves its head, and measures an error, on 10,000 values that stay as they are."""

    backbone = np.linspace(0, 1, 10_000, dtype=np.float32)
    first = Model.from_tensors(
        {"backbone": backbone, "head": np.zeros(10, np.float32)}, frozen={"backbone"}
    )
    spec = first.spec

    def initial_model(self) -> Model:
        return self.first

    def train(self, model: Model, work: TrainingRequest) -> Trained:
        assert model.spec == self.spec
        np.testing.assert_array_equal(model.tensors()["backbone"], self.backbone)
        return Trained(model.parameters + np.float32(0.5), 1)

    def evaluate(self, model: Model) -> Evaluation:
        return Evaluation(1, {"loss": 1.0, "mse": float(model.tensors()["head"].mean())})


def on_backbone(index: int, clients: int) -> OnBackbone:
    return OnBackbone()


def test_frozen_tensors_do_not_travel_and_other_metrics_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    app = "tests.flower.test_simulate:on_backbone"
    changes = {"engine": "local", "rounds": 2, "app": app, "compressor": "none"}
    history = simulate(Settings(**{**QUICK, **changes}), tmp_path)
    row = history.rows[-1]
    assert row.evaluation["mse"] == pytest.approx(1.0)
    assert row.upload_bytes is not None
    assert row.upload_bytes < 200 * row.answered
    assert row.measured == "mse 1"
    print_summary(Console(width=200), [history], tmp_path)
    assert "mse 1" in capsys.readouterr().out


def unmeasured_trainer(index: int, clients: int) -> Any:
    trainer = digit_trainer(index, clients)
    if index:
        trainer.evaluate = lambda model: None
    return trainer


def test_trainers_that_have_nothing_to_measure_on_are_left_out_of_the_mean(tmp_path: Path) -> None:
    app = "tests.flower.test_simulate:unmeasured_trainer"
    settings = Settings(**{**QUICK, "engine": "local", "app": app, "rounds": 1})
    history = simulate(settings, tmp_path)
    assert history.rows[0].evaluation["accuracy"] > 0.05
    with_none = simulate(
        Settings(**{**QUICK, "engine": "local", "app": app.replace("unmeasured", "unable")}),
        tmp_path / "none",
    )
    assert with_none.rows[-1].evaluation == {}


def unable_trainer(index: int, clients: int) -> Any:
    return unmeasured_trainer(index + 1, clients + 1)


def test_a_pair_of_flower_apps_is_simulated(tmp_path: Path) -> None:
    settings = Settings(clients=4, workers=2, seed=5, app="tests.flower.apps:pair")
    history = simulate(settings, tmp_path)
    assert [row.answered for row in history.rows] == [4, 4, 4]
    assert history.rows[-1].model is None
    assert history.rows[-1].evaluation["mean"] == pytest.approx(7.5)


@pytest.mark.parametrize(
    "changes",
    [
        {"compressor": "nonsense"},
        {"strategy": "fedavg"},
        {"fraction": 1.0},
        {"learning_rate": 99.0},
        {"local_epochs": 7},
        {"local_steps": 7},
        {"batch_size": 3},
        {"downlink": False},
    ],
)
def test_what_a_flower_app_says_itself_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    settings = Settings(clients=4, engine="local", app="tests.flower.apps:pair", **changes)
    with pytest.raises(ConfigurationError, match="cannot be combined with a Flower app") as error:
        simulate(settings, tmp_path)
    assert "--run-config" in error.value.hint


def test_a_run_in_which_no_client_answers_fails_and_says_why(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(
        "from flwr.clientapp import ClientApp\n"
        "from tests.flower.apps import server\n"
        "client = ClientApp()\n"
        "@client.train()\n"
        "def train(message, context):\n"
        "    raise ValueError('300 values, where 400 are due')\n"
        "def pair():\n"
        "    return server, client\n"
    )
    done = subprocess.run(
        [
            *(sys.executable, "-m", "fedpress", "simulate", "--app", "broken:pair"),
            *("--clients", "2", "--engine", "local", "--out", tmp_path / "out"),
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stdout
    assert "ValueError: 300 values, where 400 are due" in done.stdout
    assert "no client answered in any round of simulation" in done.stderr


def test_the_command_stops_at_ctrl_c_and_goes_on(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fedpress", "simulate", "--clients", "4", "--fraction", "1"]
    command += ["--rounds", "12", "--local-steps", "200", "--engine", "local"]
    command += ["--out", str(tmp_path), "--json", str(tmp_path / "figures.json"), "--plot"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    stopped = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
        preexec_fn=heed_ctrl_c,
    )
    assert stopped.stdout is not None
    with stopped.stdout as lines:
        assert "round   1" in next(line for line in lines if "round" in line)
        stopped.send_signal(signal.SIGINT)
        assert stopped.wait(60) == 130
    before = json.loads((tmp_path / "history.json").read_text())
    assert not before["complete"]
    ended = subprocess.run(command, capture_output=True, env=environment, text=True, check=True)
    assert "round  12" in ended.stdout
    after = json.loads((tmp_path / "figures.json").read_text())
    assert after["complete"]
    assert after["rounds"] == 12
    assert (tmp_path / "accuracy.png").exists()
    for old, new in zip(before["history"][:-1], after["history"], strict=False):
        assert (old["model"], old["seconds"]) == (new["model"], new["seconds"])
