"""Nothing that a server, its devices and its operators print at level debug has a secret in it.

Everything is a process of its own here. What each of them printed, and every file of logs, is
looked through for all secrets that were used, in each form in which they could be written.
"""

from __future__ import annotations

import base64
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest

from fedpress.operator import Operator
from fedpress_client.state import StateDirectory
from fedpress_protocols.messages import TaskConfig
from fedpress_protocols.signatures import DeviceKey
from tests.masked import SHARED
from tests.system.server_process import ServerProcess

EXAMPLES = Path(__file__).parents[2] / "client_sdk" / "examples"
sys.path.insert(0, str(EXAMPLES))
from numpy_softmax import initial_model  # noqa: E402

PLAIN = {"id": "error_feedback", "inner": {"id": "quantize", "bits": 4}}
DEVICES = 3
TOKEN = "FEDPRESS_ADMIN_TOKEN"


def forms(secret: str | bytes) -> set[bytes]:
    """How a secret could come to be written."""
    raw = secret.encode() if isinstance(secret, str) else secret
    found = {raw, raw.hex().encode(), base64.b64encode(raw), base64.urlsafe_b64encode(raw)}
    found |= {each.rstrip(b"=") for each in found} | {quote(raw).encode(), repr(raw)[2:-1].encode()}
    return {each for each in found if len(each) > 7}


def forms_of_key(key: DeviceKey) -> set[bytes]:
    lines = key.to_pem().splitlines()[1:-1]
    return forms(key.to_bytes()) | forms(b"".join(lines))


class Scene:
    """Processes whose output is kept, and the secrets that they were given."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.secrets: dict[str, set[bytes]] = {}
        self.printed: dict[str, bytes] = {}
        self.started: list[subprocess.Popen[bytes]] = []
        self.servers: list[ServerProcess] = []
        self.admin = self.secret("admin token", secrets.token_urlsafe(24))

    def secret(self, name: str, value: str | None = None) -> str:
        value = value or "pw" + secrets.token_urlsafe(18)
        self.secrets[name] = forms(value)
        return value

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-m", "fedpress", *arguments],
            cwd=EXAMPLES,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self.started.append(process)
        return process

    def server(self, folder: Path, **settings: str) -> ServerProcess:
        self.servers.append(ServerProcess(folder, settings))
        return self.servers[-1]

    def run(self, *arguments: str, **environment: str) -> bytes:
        return self.ended(self.start(*arguments, **environment), " ".join(arguments))

    def ended(self, process: subprocess.Popen[bytes], name: str) -> bytes:
        out, _ = process.communicate(timeout=200)
        self.printed[name] = self.printed.get(name, b"") + out
        return out

    def check(self) -> None:
        """Fails on the first secret that was written down."""
        for log in self.folder.rglob("*.log"):
            self.printed[str(log)] = log.read_bytes()
        for where, text in self.printed.items():
            assert b"[secret]" not in text, f"the net had something to catch in {where}"
            for name, spelt in self.secrets.items():
                for each in spelt:
                    assert each not in text, f"{name} stands in what {where} printed"


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path)
    yield made
    for process in made.started:
        process.kill()
        process.wait()
    for server in made.servers:
        if server.is_running:
            server.kill()


def join(scene: Scene, url: str, index: int, task: str, *more: str) -> list[str]:
    state = scene.folder / f"device-{index}"
    scene.secrets[f"key of device {index}"] = forms_of_key(StateDirectory.open(state).key())
    return ["client", "join", url, "--app", "numpy_softmax:make_trainer", "--state-dir", str(state),
            "--task", task, "--verbose", *more]  # fmt: skip


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_what_a_fleet_prints_at_debug_has_no_secret(scene: Scene) -> None:
    server = scene.server(
        scene.folder,
        FEDPRESS_ADMIN_TOKEN=scene.admin,
        FEDPRESS_LOG_LEVEL="debug",
        FEDPRESS_LOG_FORMAT="json",
        # Failures with tracebacks, in the middle of an upload and after an answer.
        FEDPRESS_FAILPOINT="upload-committed:raise:2,request-answered:raise:7",
    )
    server.start()
    as_admin = {"FEDPRESS_URL": server.url, TOKEN: scene.admin}
    ca = scene.folder / "ca.pem"
    told = scene.run("authority", "init", str(ca))
    assert ca.exists(), told.decode()
    for file in (ca, server.data_dir / "server-key.pem", server.data_dir / "authority-key.pem"):
        scene.secrets[file.name] = forms_of_key(DeviceKey.from_pem(file.read_bytes()))
    with Operator(server.url, scene.admin) as operator:
        digest = operator.register_model(initial_model())
        common = {"model": digest, "rounds": 2, "training": {"local_epochs": 1},
                  "cohort": {"size": DEVICES, "minimum": DEVICES}}  # fmt: skip
        plain = {"profiles": [{"name": "one", "compressor": PLAIN}]}
        masked = {"profiles": [{"name": "one", "compressor": SHARED}], "lane": "masked",
                  "masking": {"headroom": 8.0, "levels": 127}}  # fmt: skip
        operator.create_task(TaskConfig.model_validate({"task": "plain", **common, **plain}))
        operator.create_task(TaskConfig.model_validate({"task": "masked", **common, **masked}))
        token = operator.create_token(uses=2 * DEVICES, expires_in=3600, note="fleet")
        scene.secret("enrolment token", token)
        http = httpx.Client(base_url=server.url, trust_env=False, timeout=30)
        with http:
            bearer = {"Authorization": f"Bearer {scene.admin}"}
            made = http.post("/v1/admin/operators", headers=bearer, json={"role": "viewer"})
            viewer = scene.secret("operator token", made.json()["token"])
            devices = []
            for index in range(2 * DEVICES):
                task, more = ("plain", ()) if index < DEVICES else ("masked", ("--semi-honest",))
                how = join(scene, server.url, index, task, *more)
                devices.append(scene.start(*how, FEDPRESS_TOKEN=token))
            strangers(scene, http, viewer)
        wrong, strange = scene.secret("wrong admin token"), scene.secret("wrong enrolment token")
        refused = join(scene, server.url, 99, "plain")
        beside = {
            "viewer": scene.start("task", "pause", "plain", **{**as_admin, TOKEN: viewer}),
            "stranger": scene.start("devices", "list", **{**as_admin, TOKEN: wrong}),
            "strange device": scene.start(*refused, FEDPRESS_TOKEN=strange),
        }
        for index, device in enumerate(devices):
            scene.ended(device, f"device {index}")
            assert device.returncode == 0, scene.printed[f"device {index}"][-3000:].decode()
        for what in ("task", "client", "token", "audit"):
            beside[what] = scene.start(what, "list", **as_admin)
        beside["fleet"] = scene.start("devices", "statistics", **as_admin)
        beside["log-level"] = scene.start("server", "log-level", "debug", "--json", **as_admin)
        for name, process in beside.items():
            scene.ended(process, name)
        for task in ("plain", "masked"):
            assert operator.task(task).state == "finished"
    assert b"uplink, kbit/s" in scene.printed["fleet"]
    assert json.loads(scene.printed["log-level"])["level"] == "debug"
    assert server.stop() == 0
    text = server.log.read_text()
    events = [json.loads(line) for line in text.splitlines()]
    assert any(each.get("level") == "debug" for each in events)
    failures = [each["exception"] for each in events if "exception" in each]
    assert {each["type"] for each in failures} == {"FailpointReached"}
    assert len(failures) == 2
    assert len({each["client"] for each in events if "client" in each}) == 2 * DEVICES
    scene.check()
    # The search finds what is there.
    server.log.write_text(text + scene.admin)
    with pytest.raises(AssertionError, match="admin token stands in"):
        scene.check()


def strangers(scene: Scene, http: httpx.Client, viewer: str) -> None:
    """Requests with credentials that are wrong, or in the wrong place."""
    guess = scene.secret("guessed token")
    answers = [
        http.get("/v1/admin/clients", headers={"Authorization": f"Bearer {guess}"}),
        http.get("/v1/admin/clients", headers={"Authorization": guess}),
        http.get("/v1/admin/clients", params={"token": guess}),
        http.post("/v1/admin/tasks", headers={"Authorization": f"Bearer {viewer}"}, json={}),
        http.post(
            "/v1/enrol",
            headers={"Authorization": f"Bearer {guess}", "Signature": guess},
            json={"public_key": "A" * 43, "name": ""},
        ),
        http.put(
            "/v1/assignments/none/update",
            headers={"Signature-Input": "fp=()", "Signature": f"fp=:{guess}:"},
            content=b"x",
        ),
    ]
    assert all(400 <= answer.status_code < 500 for answer in answers)
    for number, answer in enumerate(answers):
        scene.printed[f"problem {number}"] = answer.content
    http.get(f"/v1/nothing/{guess}")  # whoever asks is told his own path, nobody else


@pytest.mark.slow
def test_a_server_that_cannot_start_says_no_password(scene: Scene) -> None:
    password = scene.secret("database password", "p@ss/" + secrets.token_urlsafe(12))
    store = scene.secret("store secret")
    settings = {
        "FEDPRESS_DATA_DIR": str(scene.folder / "server"),
        "FEDPRESS_ADMIN_TOKEN": scene.admin,
        "FEDPRESS_LOG_LEVEL": "debug",
        "FEDPRESS_STORE_URL": "s3://bucket/prefix",
        "FEDPRESS_STORE_ENDPOINT": "http://127.0.0.1:9",
        "FEDPRESS_STORE_ACCESS_KEY_ID": "fedpress",
        "FEDPRESS_STORE_SECRET_ACCESS_KEY": store,
        "FEDPRESS_STORE_TIMEOUT": "1",
    }
    started = {}
    for address in (f"fedpress:{quote(password, safe='')}@127.0.0.1:9", f"f:{password}@127.0.0.1"):
        url = f"postgresql://{address}/fedpress"
        for command in ("run", "migrate", "doctor"):
            process = scene.start("server", command, **settings, FEDPRESS_DATABASE_URL=url)
            started[f"{command} {address[:2]}"] = process
    for name, process in started.items():
        assert scene.ended(process, name)
        assert process.returncode != 0
    server = scene.server(scene.folder / "store", **settings)
    server.start(wait=False)
    give_up = time.monotonic() + 60
    while server.is_running and b"ready on" not in server.log.read_bytes():
        assert time.monotonic() < give_up
        time.sleep(0.1)
    if server.is_running:
        httpx.get(f"{server.url}/readyz", trust_env=False, timeout=30)
        server.stop()
    scene.check()
