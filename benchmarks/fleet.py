"""CPU, database work and idle polling of the real server under a fleet of signed devices.

    python benchmarks/fleet.py [--devices 200,1000] [--rounds 2] [--model-bytes 14000]
        [--postgresql URL] [--json FILE]

Without a URL the server is the single process with SQLite. With one it is an api, a worker and a
scheduler as processes of their own, with an S3 store (moto's, so its own time says nothing). In a
round each device checks in, downloads the model, uploads 14 kB and fetches its receipt by another
check-in; every request is signed. Then devices for which there is no place check in, beside a bare
ASGI handler (bare_handler.py) that verifies the very same requests, in turns.

CPU is that of each process alone. A row that FILE has is not measured again, so a long run may be
interrupted. Rates depend on the machine's load; CPU depends on it much less.
"""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from harness import machine, parser, report, save
from ingest import (
    CONNECTIONS,
    Fleet,
    Process,
    body_of,
    check_answers,
    enrolled_before,
    in_parts,
    model_of,
    new_database,
    served,
)
from ingest_load import Answer, drive, request_of

from fedpress_protocols.errors import FedpressError
from fedpress_protocols.messages import CheckInResponse
from fedpress_protocols.signatures import DeviceKey

TARGETS = {
    "api CPU ms a device-round": 15.0,
    "row writes a device-round": 8.0,
    "empty check-ins / bare": 0.3,
}
"""At most the first two, at least the last."""

UPLOAD_BYTES = 14_000
_BARE = str(Path(__file__).with_name("bare_handler.py"))
_JSON = "application/json"
_TICKS = os.sysconf("SC_CLK_TCK")
_TURNS = 5
_IDLE_SECONDS = 4.0
_AGGREGATION_SECONDS = 300.0
_STORE = """
import warnings, sys
warnings.simplefilter("ignore")
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""
Figures = dict[str, float]


@dataclass(frozen=True, slots=True)
class Place:
    """Servers of one place, and the database's URL if it is PostgreSQL's."""

    fleet: Fleet
    servers: dict[str, Process]
    postgresql: str = ""


def measure(options: Any, url: str) -> dict[str, Any]:
    """A row for every number of devices; those in the file already are kept."""
    result: dict[str, Any] = {"machine": machine(), "targets": TARGETS, "rows": []}
    file = options.json if options.json != Path("-") else None
    if file is not None and file.is_file():
        result["rows"] = json.loads(file.read_text())["rows"]
    for number in (int(each) for each in options.devices.split(",")):
        key = {
            "database": "postgresql" if url else "sqlite",
            "devices": number,
            "model_bytes": options.model_bytes,
            "by_proxy": options.by_proxy,
        }
        if any(key.items() <= row.items() for row in result["rows"]):
            continue
        with TemporaryDirectory(prefix="fedpress-fleet-") as name, ExitStack() as stack:
            folder = Path(name)
            settings = {"FEDPRESS_DOWNLOAD_LOCATION": "/_store"} if options.by_proxy else {}
            if url:
                place = _split(folder, stack, url, number, settings)
            else:
                place = _single(folder, stack, number, settings)
            row = {**key, "rounds": options.rounds, "load": os.getloadavg()[0]}
            row |= _device_rounds(place, options.rounds, options.model_bytes)
            row["idle"] = _idle(place)
            row["empty"] = _empty(place, folder, stack, options.check_ins)
        result["rows"].append(row)
        save(result, file)
    return result


def _single(folder: Path, stack: ExitStack, devices: int, settings: dict[str, str]) -> Place:
    keys = enrolled_before(folder, devices)
    server = stack.enter_context(served(folder, "", **settings))
    return Place(Fleet(server, keys), {"api": server})


def _split(
    folder: Path, stack: ExitStack, url: str, devices: int, settings: dict[str, str]
) -> Place:
    """Three servers in their roles, on a database of their own."""
    database = stack.enter_context(new_database(url))
    keys = enrolled_before(folder, devices, database)
    shared = settings | {
        "FEDPRESS_STORE_URL": "s3://models/fleet",
        "FEDPRESS_STORE_ENDPOINT": stack.enter_context(_store()),
        "FEDPRESS_STORE_REGION": "us-east-1",
        "FEDPRESS_STORE_ACCESS_KEY_ID": "fedpress",
        "FEDPRESS_STORE_SECRET_ACCESS_KEY": "of no worth",
    }
    for purpose in ("server", "authority"):
        file = folder / f"{purpose}.pem"
        file.write_bytes(DeviceKey.generate().to_pem())
        shared[f"FEDPRESS_{purpose.upper()}_KEY_FILE"] = str(file)
    servers = {}
    for role in ("api", "worker", "scheduler"):
        own = folder / role
        own.mkdir()
        servers[role] = stack.enter_context(served(own, database, FEDPRESS_ROLE=role, **shared))
    return Place(Fleet(servers["api"], keys), servers, database)


@contextmanager
def _store() -> Iterator[str]:
    """The address of an S3 store with a bucket."""
    with subprocess.Popen(
        [sys.executable, "-c", _STORE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            port = int(process.stdout.readline())
            connection = http.client.HTTPConnection("127.0.0.1", port)
            connection.request("PUT", "/models")
            connection.getresponse().read()
            connection.close()
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


# What the database counts


class _Counters:
    """Counters of one PostgreSQL database since its statistics began."""

    def __init__(self, url: str) -> None:
        import psycopg

        self._connection = psycopg.connect(url, autocommit=True, application_name="fleet")
        try:
            self._connection.execute("CREATE EXTENSION IF NOT EXISTS pg_stat_statements")
            self._connection.execute("SELECT 1 FROM pg_stat_statements LIMIT 1")
            self._counts_statements = True
        except psycopg.Error:  # not among shared_preload_libraries
            self._counts_statements = False

    def read(self) -> Figures:
        time.sleep(1.5)  # each backend flushes its counts once a second
        row = self._connection.execute(
            "SELECT xact_commit, xact_rollback FROM pg_stat_database "
            "WHERE datname = current_database()"
        ).fetchone()
        wal = self._connection.execute("SELECT wal_bytes FROM pg_stat_wal").fetchone()
        pids = self._connection.execute(
            "SELECT pid FROM pg_stat_activity WHERE datname = current_database() "
            "AND application_name = 'fedpress'"
        ).fetchall()
        assert row is not None
        assert wal is not None
        figures = dict(zip(("commits", "rollbacks"), map(float, row), strict=True))
        figures["WAL bytes"] = float(wal[0])
        figures["PostgreSQL CPU ms"] = 1000 * sum(_cpu_seconds(pid) for (pid,) in pids)
        tables = self._connection.execute(
            "SELECT relname, n_tup_ins + n_tup_upd + n_tup_del FROM pg_stat_user_tables"
        ).fetchall()
        figures |= {f"rows of {name}": float(number) for name, number in tables}
        figures["row writes"] = float(sum(number for _, number in tables))
        if self._counts_statements:
            calls = self._connection.execute(
                "SELECT sum(calls) FROM pg_stat_statements s JOIN pg_database d ON s.dbid = d.oid "
                "WHERE datname = current_database()"
            ).fetchone()
            assert calls is not None
            figures["statements"] = float(calls[0])
        return figures

    def close(self) -> None:
        self._connection.close()


def _cpu_seconds(pid: int) -> float:
    """Of a process on this machine; 0 for one elsewhere."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0.0
    user, system = stat.rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / _TICKS


@contextmanager
def _counting(place: Place, figures: Figures, share: float) -> Iterator[None]:
    """Add what the block costs to `figures`, divided by `share`."""
    counters = _Counters(place.postgresql) if place.postgresql else None
    before = counters.read() if counters else {}
    spent = {role: server.cpu_seconds for role, server in place.servers.items()}
    try:
        yield
        for role, server in place.servers.items():
            figures[f"{role} CPU ms"] = 1000 * (server.cpu_seconds - spent[role]) / share
        for name, value in (counters.read() if counters else {}).items():
            if value != before[name] or not name.startswith("rows of"):
                figures[name] = (value - before[name]) / share
    finally:
        if counters:
            counters.close()


# What is measured


def _device_rounds(place: Place, rounds: int, model_bytes: int) -> dict[str, Any]:
    """Figures of one device in one round; `phases` are the api's milliseconds."""
    fleet, devices = place.fleet, len(place.fleet.keys)
    _one_round(fleet, "warm-up", model_bytes, {})
    figures: Figures = {}
    phases: Figures = {}
    began = time.perf_counter()
    with _counting(place, figures, devices * rounds):
        for number in range(rounds):
            _one_round(fleet, f"round-{number}", model_bytes, phases)
    share = devices * rounds
    return {
        "per device-round": figures,
        "phases": {name: value / share for name, value in phases.items()},
        "device-rounds a second": share / (time.perf_counter() - began),
    }


def _one_round(fleet: Fleet, task: str, model_bytes: int, phases: Figures) -> None:
    """A task of one round in which every device takes part."""
    model, devices = model_of(model_bytes), len(fleet.keys)
    compressor: dict[str, Any] = {"id": "none"}
    if model_bytes > UPLOAD_BYTES:
        compressor = {"id": "topk", "fraction": UPLOAD_BYTES / model_bytes}
    fleet.begin(task, model, devices, compressor)
    names: list[str] = []
    with _phase(fleet, phases, "check-in"):
        for answer in _drive(fleet, [_check_in(fleet, key, task) for key in fleet.keys], 200):
            if not names:
                first = CheckInResponse.model_validate_json(answer.body).assignment
            names.append(json.loads(answer.body)["assignment"]["assignment"])
    assert first is not None
    with _phase(fleet, phases, "download"):
        path = f"/v1/models/{model.digest}?task={task}"
        _drive(fleet, [(key, "GET", path, b"") for key in fleet.keys], 200)
    body = body_of(first, model.spec)
    whose = dict(zip(names, fleet.keys, strict=True))
    with _phase(fleet, phases, "upload"):
        paths = {name: f"/v1/assignments/{name}/update" for name in names}
        _drive(fleet, [(whose[name], "PUT", paths[name], body) for name in names], 201)
    with _phase(fleet, phases, "aggregation"):
        until = time.monotonic() + _AGGREGATION_SECONDS
        while fleet.ask("GET", f"/v1/tasks/{task}")["state"] != "finished":
            if time.monotonic() > until:
                raise FedpressError(f"task {task} is not finished after its last upload")
            time.sleep(0.2)
    with _phase(fleet, phases, "receipt"):
        requests = [_check_in(fleet, whose[name], task, name) for name in names]
        for answer in _drive(fleet, requests, 200):
            (receipt,) = json.loads(answer.body)["receipts"]
            assert receipt["receipt"]["outcome"] == "included", receipt


@contextmanager
def _phase(fleet: Fleet, phases: Figures, name: str) -> Iterator[None]:
    before = fleet.server.cpu_seconds
    yield
    phases[name] = phases.get(name, 0.0) + 1000 * (fleet.server.cpu_seconds - before)


Request = tuple[DeviceKey, str, str, bytes]


def _check_in(fleet: Fleet, key: DeviceKey, task: str, *pending: str) -> Request:
    body = json.dumps({"pending": pending}).encode()
    return key, "POST", f"/v1/tasks/{task}/check-in", body


def _signed(requests: Sequence[Request]) -> list[bytes]:
    return [request_of(*each, kind=_JSON if each[1] == "POST" else "") for each in requests]


def _drive(fleet: Fleet, requests: Sequence[Request], status: int) -> list[Answer]:
    answers = []
    for part in in_parts(requests):
        load = drive(fleet.server.port, _signed(part), CONNECTIONS)
        check_answers(load, status)
        answers += load.answers
    return answers


def _idle(place: Place) -> Figures:
    """The cost of servers without a request, in a second."""
    figures: Figures = {}
    with _counting(place, figures, _IDLE_SECONDS):
        time.sleep(_IDLE_SECONDS)
    return figures


def _empty(place: Place, folder: Path, stack: ExitStack, number: int) -> dict[str, Any]:
    """Check-ins of devices for which there is no place, and a bare handler's answers to the same,
    in turns of so many."""
    fleet = place.fleet
    fleet.begin("busy", model_of(400), 1)
    _drive(fleet, [_check_in(fleet, fleet.keys[0], "busy")], 200)
    keys = {key.key_id: key.public.hex() for key in fleet.keys}
    (folder / "keys.json").write_text(json.dumps(keys))
    bare = stack.enter_context(Process([_BARE, str(folder / "keys.json")], folder))
    waiting = fleet.keys[1:]
    rates: dict[str, list[float]] = {"server": [], "bare": []}
    cpu: dict[str, list[float]] = {"server": [], "bare": []}
    figures: Figures = {}
    with _counting(place, figures, number * (_TURNS + 1)):
        for turn in range(_TURNS + 1):
            whose = [waiting[(turn * number + each) % len(waiting)] for each in range(number)]
            requests = _signed([_check_in(fleet, key, "busy") for key in whose])
            for name, process in (("server", fleet.server), ("bare", bare)):
                rate, seconds, _ = process.timed(requests, 204)
                if turn:  # the first one warms up
                    rates[name].append(rate)
                    cpu[name].append(1000 * seconds)
    ratios = [ours / its for ours, its in zip(rates["server"], rates["bare"], strict=True)]
    return {
        "a second": {name: median(values) for name, values in rates.items()},
        "CPU ms": {name: median(values) for name, values in cpu.items()},
        "rate / bare": median(ratios),
        "per check-in": figures,
    }


def _tables(result: dict[str, Any]) -> str:
    lines = []
    for row in result["rows"]:
        lines.append(
            f"{row['devices']} devices, {row['database']}, model of {row['model_bytes']} B, "
            f"{row['rounds']} rounds, load {row['load']:.1f}"
        )
        for title in ("per device-round", "phases", "idle"):
            shown = ", ".join(f"{name} {value:.2f}" for name, value in row[title].items())
            lines.append(f"  {title}: {shown}")
        empty = row["empty"]
        rates = empty["a second"]
        lines.append(
            f"  empty check-ins a second: {rates['server']:.0f}, bare handler {rates['bare']:.0f}, "
            f"ratio {empty['rate / bare']:.2f}, CPU {empty['CPU ms']['server']:.2f} ms against "
            f"{empty['CPU ms']['bare']:.2f} ms"
        )
        shown = ", ".join(f"{name} {value:.2f}" for name, value in empty["per check-in"].items())
        lines.append(f"  per empty check-in: {shown}")
    return "\n".join(lines)


def main() -> None:
    command = parser(__doc__)
    command.add_argument("--devices", default="200", help="how many, separated by commas")
    command.add_argument(
        "--by-proxy",
        action="store_true",
        help="downloads are answered with X-Accel-Redirect; the proxy's own work is left out",
    )
    command.add_argument("--rounds", type=int, default=2)
    command.add_argument("--check-ins", type=int, default=512, help="empty ones of a turn")
    command.add_argument("--model-bytes", type=int, default=UPLOAD_BYTES)
    command.add_argument(
        "--postgresql",
        metavar="URL",
        default=os.environ.get("FEDPRESS_BENCH_POSTGRESQL", ""),
        help="a PostgreSQL whose user may create databases, or FEDPRESS_BENCH_POSTGRESQL",
    )
    options = command.parse_args()
    result = measure(options, options.postgresql)
    report(_tables(result), result, options.json)


if __name__ == "__main__":
    main()
