"""Faults of docker-compose.yml's services while 10,000 simulated devices take part.

    tests/compose/run faults [FAULT...]
    python benchmarks/faults.py --table    # of the kept figures; causes nothing

tests/compose/run starts the services and calls this; it needs their Docker engine. Devices are a
key each and an upload of one coordinate: device i adds exactly 1 at coordinate i of the model for
each of its uploads that counts, so the model and the signed receipts say what was lost and what
was doubled. So many devices a second arrive, drawn from all; each repeats every request until it
is answered, and keeps its assignment until it has the receipt. At the end the uploads are
counted.

Recovery is the time from a SIGKILL, or from the end of another fault, until the second round
after it is committed: the second one was opened and filled after the fault.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import random
import secrets
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import sqlalchemy as sa
from harness import machine, save
from ingest_load import plain_request, request_of
from sqlalchemy.engine import Connection

from fedpress_compression.contexts import contexts_of
from fedpress_protocols.messages import CheckInResponse, SignedReceipt
from fedpress_protocols.model import Model
from fedpress_protocols.signatures import DeviceKey
from fedpress_protocols.upload import Upload
from fedpress_server.storage import records
from fedpress_server.storage.database import Database
from fedpress_server.storage.tables import clients

TASK = f"faults-{secrets.token_hex(4)}"
COHORT = 64
SERVICES = ("api", "worker", "scheduler", "postgres", "store", "proxy")
PAUSE_SECONDS = 40.0
TARGET_SECONDS = 20.0
"""Of recovery after a SIGKILL, at most."""

KEPT = Path(__file__).parent / "results" / "faults.json"

_PATIENCE = 180.0
_RETRY_SECONDS = 0.25
_WORKERS = 24
_FILLER = "filler-of-the-test"


@dataclass
class Device:
    """A device of the population, and what it was answered."""

    index: int
    key: DeviceKey
    is_busy: bool = False
    acknowledged: set[str] = field(default_factory=set)
    outcomes: dict[str, str] = field(default_factory=dict)


class Fleet:
    """Devices that arrive at `rate` a second, in threads, at the proxy."""

    def __init__(self, port: int, devices: Sequence[Device], rate: float) -> None:
        self._port = port
        self.devices = devices
        self.rate = rate
        self.is_over = threading.Event()
        self.failures = Counter[str]()
        self.statuses = Counter[str]()
        self._lock = threading.Lock()
        self._chance = random.Random(0)
        self._connections = threading.local()
        self._next = time.monotonic()
        self._bodies = dict[tuple[str, int], bytes]()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(_WORKERS)]
        self._waiting: list[tuple[Device, str]] = []

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """No more arrivals; every device waits for its receipts."""
        self.is_over.set()
        for thread in self._threads:
            thread.join(_PATIENCE)
            if thread.is_alive():
                raise SystemExit(f"devices wait for receipts: {len(self._waiting)}")

    def _run(self) -> None:
        try:
            while not self.is_over.is_set():
                self._receipts()
                self._arrive()
            while self._waiting:
                self._receipts()
                time.sleep(_RETRY_SECONDS)
        except BaseException as exc:
            self.failures[repr(exc)[:300]] += 1
            raise

    def _arrive(self) -> None:
        with self._lock:
            now = time.monotonic()
            self._next = max(self._next + 1 / self.rate, now - 1)
            pause = self._next - now
            device = self._chance.choice(self.devices)
            if device.is_busy:
                return
            device.is_busy = True
        time.sleep(max(0.0, pause))
        answer = self._ask(device, "POST", f"/v1/tasks/{TASK}/check-in", b"{}", stubborn=True)
        assignment = None
        if answer is not None and answer[0] == 200:
            assignment = CheckInResponse.model_validate_json(answer[1]).assignment
        if assignment is None:
            device.is_busy = False
            return
        name = assignment.assignment
        plan = assignment.plan
        spec = first_model(len(self.devices)).spec
        compressor, public = plan.compressor(assignment.profile), plan.public(spec)
        update = np.zeros(spec.size, np.float32)
        update[device.index] = COHORT
        rng = np.random.default_rng(0)
        symbols, _ = compressor.compress(update, compressor.init(spec), public, rng)
        layout = compressor.layout(spec)
        upload = Upload(plan.profile_index(assignment.profile), 1, symbols)
        body = upload.to_bytes(layout, contexts_of(layout, public))
        answer = self._ask(device, "PUT", f"/v1/assignments/{name}/update", body, stubborn=True)
        assert answer is not None
        if answer[0] in (200, 201):
            device.acknowledged.add(name)
        with self._lock:
            self._waiting.append((device, name))

    def _receipts(self) -> None:
        """One device asks for its receipt."""
        with self._lock:
            if not self._waiting:
                return
            device, name = self._waiting.pop(0)
        answer = self._ask(device, "GET", f"/v1/assignments/{name}/receipt", b"")
        if answer is None or answer[0] != 200:
            with self._lock:
                self._waiting.append((device, name))
            time.sleep(0.05)
            return
        receipt = SignedReceipt.model_validate_json(answer[1]).receipt
        device.outcomes[name] = receipt.outcome
        device.is_busy = False

    def _ask(
        self, device: Device, method: str, path: str, body: bytes, *, stubborn: bool = False
    ) -> tuple[int, bytes] | None:
        """Status and body. None without an answer to go by; `stubborn` asks until there is one."""
        while True:
            status, content = 0, b""
            try:
                request = request_of(device.key, method, path, body, kind="application/json")
                status, content = self.send(request)
                self.statuses[str(status)] += 1
            except (OSError, http.client.HTTPException) as exc:
                self.statuses[type(exc).__name__] += 1
            is_put_off = status in (0, 401, 429, 503, 507)
            if status >= 400 and not is_put_off and status not in (404, 409):
                self.failures[f"{status} {method} {content[:200]!r}"] += 1
            if not is_put_off:
                return status, content
            if not stubborn:
                return None
            time.sleep(_RETRY_SECONDS)

    def send(self, request: bytes) -> tuple[int, bytes]:
        return exchange(self._port, request, self._connections)


def exchange(port: int, request: bytes, kept: threading.local | None = None) -> tuple[int, bytes]:
    """The answer to a request as it goes over the wire, on this thread's connection."""
    connection = getattr(kept, "connection", None)
    if connection is None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.connect()
    if kept is not None:
        kept.connection = None
    connection.sock.sendall(request)
    answer = http.client.HTTPResponse(connection.sock)
    answer.begin()
    content = answer.read()
    if kept is not None and not answer.will_close:
        kept.connection = connection
    else:
        connection.close()
    return answer.status, content


class Operator:
    """Requests with the admin token at the operators' port."""

    def __init__(self, port: int, token: str) -> None:
        self._port, self._token = port, token

    def ask(self, method: str, path: str, body: bytes = b"", kind: str = "application/json") -> Any:
        answer = self.raw(method, path, body, kind)
        if answer[0] >= 400:
            raise OSError(f"{answer[0]} {answer[1][:300]!r}")
        return json.loads(answer[1]) if answer[1] else None

    def raw(self, method: str, path: str, body: bytes = b"", kind: str = "") -> tuple[int, bytes]:
        return exchange(self._port, plain_request(method, path, self._token, body, kind))

    def rounds(self) -> list[dict[str, Any]]:
        return list(self.ask("GET", f"/v1/tasks/{TASK}/rounds"))

    def committed(self) -> int:
        return sum(each["state"] == "committed" for each in self.rounds())


def first_model(size: int) -> Model:
    return Model.from_tensors({"weight": np.zeros(size, np.float32)})


def docker(*words: str, check: bool = True) -> str:
    done = subprocess.run(["docker", *words], capture_output=True, text=True)
    if check and done.returncode:
        raise SystemExit(f"docker {' '.join(words)}: {done.stderr}")
    return done.stdout.strip()


def containers(service: str) -> list[str]:
    project = os.environ["COMPOSE_PROJECT_NAME"]
    names = (f"project={project}", f"service={service}")
    labels = [f"label=com.docker.compose.{name}" for name in names]
    return docker("ps", "-q", *(word for each in labels for word in ("--filter", each))).split()


# The faults: each returns when the service is free to recover, and the time from which that counts


def kill(service: str) -> float:
    """SIGKILL one container's first process, as the kernel would."""
    pid = int(docker("inspect", "--format", "{{.State.Pid}}", containers(service)[0]))
    began = time.monotonic()
    os.kill(pid, 9)
    return began


def pause(service: str) -> float:
    container = containers(service)[0]
    docker("pause", container)
    time.sleep(PAUSE_SECONDS)
    docker("unpause", container)
    return time.monotonic()


def cut(service: str) -> float:
    """The service loses its network."""
    network = f"{os.environ['COMPOSE_PROJECT_NAME']}_inside"
    cut_off = containers(service)
    for container in cut_off:
        docker("network", "disconnect", network, container)
    time.sleep(PAUSE_SECONDS / 4)
    for container in cut_off:
        docker("network", "connect", "--alias", service, network, container)
    return time.monotonic()


def fill(service: str) -> float:
    """Leave no byte free on the service's file system for a while."""
    folder = {"postgres": "/database", "store": "/store"}[service]
    holder = f"{os.environ['COMPOSE_PROJECT_NAME']}-holder"
    file = f"{folder}/{_FILLER}"
    docker("exec", holder, "sh", "-c", f"cat /dev/zero > {file}", check=False)
    end = time.monotonic() + PAUSE_SECONDS / 4
    while time.monotonic() < end:
        # PostgreSQL writes into the files that it has until it must begin a new one of its log.
        for container in containers(service) if service == "postgres" else ():
            statement = "SELECT pg_switch_wal()"
            docker("exec", container, "psql", "-qU", "fedpress", "-c", statement, check=False)
        time.sleep(_RETRY_SECONDS)
    docker("exec", holder, "rm", "-f", file)
    return time.monotonic()


def roll() -> float:
    """Replace every server while devices go on."""
    subprocess.run(["deploy/replace-api"], check=True, stdout=subprocess.DEVNULL)
    compose = ["docker", "compose", "--progress", "quiet", "up", "-d", "--wait", "--no-deps"]
    subprocess.run([*compose, "--force-recreate", "worker", "scheduler"], check=True)
    return time.monotonic()


FAULTS: dict[str, Callable[[], float]] = {
    **{f"SIGKILL {each}": partial(kill, each) for each in SERVICES},
    "network cut": partial(cut, "postgres"),
    "disk full store": partial(fill, "store"),
    "disk full postgres": partial(fill, "postgres"),
    "rolling update": roll,
    **{f"pause {each}": partial(pause, each) for each in SERVICES},
}


def until_rounds(operator: Operator, goal: int) -> float:
    """Wait until so many rounds are committed; the time of it."""
    give_up = time.monotonic() + _PATIENCE
    while time.monotonic() < give_up:
        try:
            if operator.committed() >= goal:
                return time.monotonic()
        except (OSError, ValueError, http.client.HTTPException):
            pass
        time.sleep(0.2)
    raise SystemExit(f"round {goal} was not committed in {_PATIENCE:.0f} s")


def count(operator: Operator, fleet: Fleet) -> dict[str, int]:
    """Uploads that count, those lost and those doubled, by the model and the receipts."""
    if fleet.failures:
        raise SystemExit(f"devices failed: {fleet.failures}")
    digest = operator.ask("GET", f"/v1/tasks/{TASK}")["model"]
    status, content = fleet.send(
        request_of(fleet.devices[0].key, "GET", f"/v1/models/{digest}?task={TASK}")
    )
    assert status == 200, content
    values = Model.from_bytes(content).parameters
    expected = np.zeros(values.size)
    unanswered = 0
    for device in fleet.devices:
        expected[device.index] = sum(each == "included" for each in device.outcomes.values())
        unanswered += len(device.acknowledged - device.outcomes.keys())
    assert np.array_equal(values, np.rint(values)), "a coordinate is no whole number"
    lost = np.maximum(expected - values, 0).sum() + unanswered
    doubled = np.maximum(values - expected, 0).sum()
    return {"uploads": int(expected.sum()), "lost": int(lost), "doubled": int(doubled)}


def enrolled(url: str, number: int) -> list[Device]:
    """A population in the records of the running servers."""
    database, now = Database(url), time.time()
    devices = [Device(index, DeviceKey.generate()) for index in range(number)]

    def write(connection: Connection) -> None:
        token = records.EnrolmentToken(
            TASK, secrets.token_hex(32), number, number, now, now + 3600, ""
        )
        records.add_token(connection, token)
        rows = []
        for each in devices:
            whose = (secrets.token_urlsafe(12), each.key.key_id, each.key.public, "", TASK)
            rows.append(asdict(records.Device(*whose, now, None)))
        connection.execute(sa.insert(clients), rows)

    try:
        asyncio.run(database.write(write))
    finally:
        database.close()
    return devices


def table(result: dict[str, Any]) -> str:
    """The result as a Markdown table, and a line of what was counted at the end."""
    lines = [
        "| fault | recovery, s | two rounds before it, s | rounds from the fault on |",
        "|---|---|---|---|",
    ]
    for row in result["rows"]:
        figures = [row[name] for name in ("recovery_s", "two_rounds_before_s", "rounds")]
        lines.append(f"| {row['fault']} | {' | '.join(map(str, figures))} |")
    if total := result.get("total"):
        lines += [
            "",
            "{rounds:,} rounds, {uploads:,} uploads, {lost} lost, {doubled} doubled".format(
                **total
            ),
        ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("faults", nargs="*", help=f"by default all: {', '.join(FAULTS)}")
    parser.add_argument("--devices", type=int, default=10_000)
    parser.add_argument("--rate", type=float, default=40.0, help="arrivals a second")
    parser.add_argument("--ports", type=int, nargs=2, default=(18080, 18081))
    parser.add_argument("--database", metavar="URL")
    parser.add_argument("--token-file", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", action="store_true", help="of the kept figures")
    options = parser.parse_args()
    if options.table:
        print(table(json.loads(KEPT.read_text())))
        return
    if not (options.database and options.token_file and options.json):
        parser.error("run it by tests/compose/run faults; --table prints the kept figures")
    operator = Operator(options.ports[1], options.token_file.read_text().strip())
    devices = enrolled(options.database, options.devices)
    print(f"{len(devices)} devices enrolled", flush=True)
    model = first_model(len(devices))
    operator.ask("PUT", f"/v1/admin/models/{model.digest}", model.to_bytes(), "")
    config = {
        "task": TASK,
        "model": model.digest,
        "rounds": 100_000,
        "profiles": [{"name": "one", "compressor": {"id": "topk", "count": 1}}],
        "cohort": {"size": COHORT, "minimum": COHORT},
        "round_seconds": 36_000.0,
        "seed": 7,
    }
    operator.ask("POST", "/v1/admin/tasks", json.dumps(config).encode())
    result: dict[str, Any] = {
        "machine": machine(),
        "devices": len(devices),
        "arrivals a second": options.rate,
        "cohort": COHORT,
        "rows": [],
    }
    fleet = Fleet(options.ports[0], devices, options.rate)
    fleet.start()
    until_rounds(operator, 2)
    for name in options.faults or FAULTS:
        at, began = operator.committed(), time.monotonic()
        until_rounds(operator, at + 2)
        usual = time.monotonic() - began
        before, statuses = operator.committed(), Counter(fleet.statuses)
        free = FAULTS[name]()
        known = 0 if name.startswith("SIGKILL") else until_readable(operator)
        again = until_rounds(operator, max(before, known) + 2)
        answers = Counter(fleet.statuses) - statuses
        row = {
            "fault": name,
            "recovery_s": round(again - free, 1),
            "two_rounds_before_s": round(usual, 1),
            "rounds": operator.committed() - before,
            "answers": dict(answers),
            "load": os.getloadavg()[0],
        }
        if name.startswith("disk full") and not answers["503"] + answers["507"]:
            raise SystemExit(f"{name}: no request was refused, so the disk had room")
        result["rows"].append(row)
        print(json.dumps(row), flush=True)
        save(result, options.json)
    # Cancelling gives the uploads of the open round their receipts.
    operator.ask("POST", f"/v1/admin/tasks/{TASK}/cancel")
    fleet.stop()
    total = {"rounds": operator.committed(), **count(operator, fleet)}
    result["total"] = total
    print(table(result), flush=True)
    save(result, options.json)
    slow = [
        row["fault"]
        for row in result["rows"]
        if row["fault"].startswith("SIGKILL") and row["recovery_s"] > TARGET_SECONDS
    ]
    if slow or total["lost"] or total["doubled"]:
        raise SystemExit(f"lost or doubled uploads, or slow to recover: {slow}")


def until_readable(operator: Operator) -> int:
    """The rounds that are committed when the operators' port answers again."""
    until_rounds(operator, 0)
    return operator.committed()


if __name__ == "__main__":
    main()
