"""Every panel of the Grafana dashboard has data in a real Prometheus while tasks run."""

from __future__ import annotations

import json
import math
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from fedpress_client import Bandwidth, Client, Event, MaskingRules, SessionAdvanced
from fedpress_client.trainer import Evaluation, Trained, TrainingRequest
from fedpress_protocols.model import Model
from tests.devices import Operator
from tests.system.server_process import ADMIN_TOKEN, ServerProcess

PROMETHEUS = shutil.which("prometheus")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PROMETHEUS is None, reason="no prometheus (Debian's package prometheus)"),
]
DASHBOARDS = Path(__file__).parents[2] / "deploy" / "monitoring" / "grafana" / "dashboards"
MODEL = Model.from_tensors({"weight": np.zeros(2_000, np.float32)})
TASKS: dict[str, dict[str, Any]] = {
    "adaptive": {
        "profiles": [
            {"name": "gentle", "compressor": {"id": "topk", "fraction": 0.5}},
            {"name": "hard", "compressor": {"id": "topk", "fraction": 0.1}},
        ],
        "policies": [{"id": "accuracy_driven"}],
    },
    "asynchronous": {
        "asynchronous": {"concurrency": 3, "max_staleness": 5},
        "strategy": {"id": "fedbuff"},
    },
    "masked": {
        "lane": "masked",
        "round_seconds": 3.0,
        "profiles": [{"name": "shared", "compressor": {"id": "shared_support", "fraction": 0.5}}],
        "masking": {
            "adversary": "semi-honest",
            "corrupt": 0.0,
            "seconds": dict.fromkeys(("advertise", "share", "mask", "consent", "reveal"), 1),
        },
    },
}
CONFIG = """
global: {{scrape_interval: 1s, scrape_timeout: 1s}}
scrape_configs:
  - job_name: fedpress
    static_configs: [{{targets: ["{target}"], labels: {{role: all}}}}]
"""


class Walk:
    """Adds noise, and evaluates."""

    def train(self, model: Model, work: TrainingRequest) -> Trained:
        time.sleep(0.02)
        rng = np.random.default_rng(work.seed)
        step = rng.normal(scale=0.01, size=model.spec.size).astype(np.float32)
        return Trained(model.parameters + step, 10)

    def evaluate(self, model: Model) -> Evaluation | None:
        return Evaluation(10, {"loss": 1.0 + float(model.parameters.std()), "accuracy": 0.5})


class GoesError(BaseException):
    """The device is gone."""


def goes(event: Event) -> None:
    """Leave a masked session after its shares."""
    if isinstance(event, SessionAdvanced) and event.step == "shares":
        raise GoesError


@contextmanager
def at_work(server: ServerProcess, folder: Path) -> Iterator[None]:
    """Devices of each task, one of which leaves the masked one."""
    clients = list[Client]()
    with httpx.Client(base_url=server.url, timeout=60) as http:
        operator = Operator(http, ADMIN_TOKEN)
        for task, config in TASKS.items():
            size = 4 if task == "masked" else 2
            cohort = {"size": size, "minimum": 3 if task == "masked" else size}
            operator.begin(MODEL, task, **({"rounds": 10_000, "cohort": cohort} | config))
            clients += [
                Client(
                    server.url,
                    Walk(),
                    state_dir=folder / f"{task}-{number}",
                    task=task,
                    token=operator.token(),
                    seed=number,
                    masking=MaskingRules(
                        required=task == "masked", adversary="semi-honest", corrupt=0.0
                    ),
                    bandwidth=Bandwidth(upload=20_000),
                    on_event=goes if task == "masked" and number == 0 else None,
                )
                for number in range(size)
            ]
    threads = [threading.Thread(target=run, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for client in clients:
            client.stop()
        for thread in threads:
            thread.join()
        for client in clients:
            client.close()


def run(client: Client) -> None:
    with suppress(GoesError):
        client.run()


@contextmanager
def prometheus(target: str, folder: Path) -> Iterator[str]:
    """A Prometheus that scrapes `target` each second; its URL."""
    config, log = folder / "prometheus.yml", folder / "prometheus.log"
    config.write_text(CONFIG.format(target=target))
    command = [
        str(PROMETHEUS),
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'prometheus'}",
        "--web.listen-address=127.0.0.1:0",
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        give_up = time.monotonic() + 60
        while not (address := re.search(r'"Listening on" address=(\S+)', log.read_text())):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < give_up, log.read_text()
            time.sleep(0.05)
        yield f"http://{address[1]}"
    finally:
        process.terminate()
        process.wait()


def panels() -> list[tuple[str, str]]:
    """Title and query of everything that the dashboards ask."""
    return [
        (panel["title"], target["expr"])
        for file in DASHBOARDS.glob("*.json")
        for panel in json.loads(file.read_text())["panels"]
        for target in panel["targets"]
    ]


def without_data(url: str, asked: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """The queries that return no finite value now."""
    missing = []
    for title, query in asked:
        query_now = query.replace("$__rate_interval", "5s").replace("$task", ".*")
        answer = httpx.get(f"{url}/api/v1/query", params={"query": query_now}).json()
        values = [float(each["value"][1]) for each in answer.get("data", {}).get("result", ())]
        if not any(map(math.isfinite, values)):
            missing.append((title, query))
    return missing


def make_mistakes(server: ServerProcess) -> None:
    """A stranger's requests, and a connection that speaks no HTTP."""
    httpx.post(f"{server.url}/v1/tasks/adaptive/check-in", json={})
    httpx.get(f"{server.url}/v1/admin/tasks", headers={"Authorization": "Bearer wrong"})
    with socket.create_connection(("127.0.0.1", server.port)) as link:
        link.sendall(b"no request\r\n\r\n")
        link.recv(4096)


def test_every_panel_has_data_while_tasks_run(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path, {"FEDPRESS_EGRESS_PRICE": "0.09"})
    server.start()
    try:
        with (
            prometheus(server.url.removeprefix("http://"), tmp_path) as url,
            at_work(server, tmp_path),
        ):
            missing, give_up = panels(), time.monotonic() + 45
            assert len(missing) > 40
            while missing:
                make_mistakes(server)
                time.sleep(0.5)
                missing = without_data(url, missing)
                assert time.monotonic() < give_up or not missing, missing
    finally:
        server.stop()
