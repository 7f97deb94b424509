"""Uploads accepted durably by a server, against the least code that could accept them so.

    python benchmarks/ingest.py [--quick] [--part uploads|polls|memory] [--postgresql URL]
        [--json FILE]

Real processes on the loopback interface: the server as `fedpress server run` starts it, and beside
it a prototype of some hundred lines (ingest_prototype.py), which get the very same signed requests
in turns, so that ratios hold on a busy machine. Requests are made before the clock starts. CPU is
that of the process, without PostgreSQL's own. docs/bench-ingest.md explains each key.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import numpy as np
from harness import machine, parser, report
from ingest_load import Answer, Load, drive, plain_request, poll, request_of
from sqlalchemy.engine import Connection

from fedpress_compression.tensors import ModelSpec
from fedpress_protocols.errors import ConfigurationError, FedpressError
from fedpress_protocols.messages import Assignment, CheckInResponse
from fedpress_protocols.model import Model
from fedpress_protocols.signatures import DeviceKey, to_base64url
from fedpress_protocols.upload import Upload
from fedpress_server.storage import records
from fedpress_server.storage.database import Database

SIZES = {"14 kB": 14_000, "100 kB": 100_000}
TARGETS = {
    "rate / prototype": 0.8,
    "CPU / prototype": 1.3,
    "poll p99": 1.0,
    "memory / of 100": 1.2,
}
"""At least the first, at most the others."""

T = TypeVar("T")
TOKEN = "a-token-of-the-benchmark"
_JSON = "application/json"
CONNECTIONS = 64
_SIGNED_AHEAD = 512
_HELD = 20.0
"""Seconds for which the SDK asks that a check-in be held, by default."""
_START_SECONDS = 120.0
_READY = re.compile(r"ready on http://127\.0\.0\.1:([0-9]+)")
_PROTOTYPE = str(Path(__file__).with_name("ingest_prototype.py"))
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Amounts:
    """How much is measured."""

    uploads: int
    repeats: int
    pollers: int
    poll_seconds: float
    crowd: int


PARTS = ("uploads", "polls", "memory")
WHOLE = Amounts(uploads=512, repeats=5, pollers=10_000, poll_seconds=120.0, crowd=10_000)
QUICK = Amounts(uploads=128, repeats=3, pollers=500, poll_seconds=10.0, crowd=1_000)


def measure(amounts: Amounts, postgresql: str | None, parts: Sequence[str]) -> dict[str, Any]:
    """The figures of `parts`: uploads, polls, memory."""
    databases = {"sqlite": ""} | ({"postgresql": postgresql} if postgresql else {})
    found: dict[str, Any] = {
        "machine": machine(),
        "targets": TARGETS,
    }
    if "uploads" in parts:
        found["uploads"] = [
            row for name, url in databases.items() for row in _uploads(name, url, amounts)
        ]
    if "polls" in parts:
        found["polls"] = _polls(amounts)
    if "memory" in parts:
        found["memory"] = _memory(amounts)
    return found


# The processes


class Process:
    """A process that says where it is ready; ended at the end of the `with` block."""

    def __init__(self, arguments: Sequence[str], folder: Path, **variables: str) -> None:
        path = os.pathsep.join(filter(None, sys.path))
        self._log = (folder / f"{secrets.token_hex(4)}.log").open("w+b")
        self._process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **variables},
        )
        self.port = self._ready()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _ready(self) -> int:
        pipe, said = self._process.stdout, ""
        until = time.monotonic() + _START_SECONDS
        while pipe is not None and time.monotonic() < until:
            if select.select([pipe], [], [], 1.0)[0]:
                line = pipe.readline().decode()
                said += line
                match = _READY.search(line)
                if match is not None:
                    return int(match[1])
                if not line:
                    break
        self._process.kill()
        self._log.seek(0)
        raise ConfigurationError(
            f"a server did not start: {said}{self._log.read()[-3000:].decode()}"
        )

    @property
    def cpu_seconds(self) -> float:
        """That all its threads have spent."""
        stat = Path(f"/proc/{self._process.pid}/stat").read_text()
        user, system = stat.rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / _TICKS

    @property
    def peak_bytes(self) -> int:
        """The most memory that it has had resident."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return 1024 * int(status.partition("VmHWM:")[2].split()[0])

    def timed(self, requests: Sequence[bytes], status: int) -> tuple[float, float, Load]:
        """Requests per second and CPU seconds of a request; raises unless all are answered so."""
        before = self.cpu_seconds
        load = drive(self.port, requests, CONNECTIONS)
        spent = self.cpu_seconds - before
        check_answers(load, status)
        return len(requests) / load.seconds, spent / len(requests), load


class Fleet:
    """A server with enrolled devices."""

    def __init__(self, server: Process, keys: Sequence[DeviceKey]) -> None:
        self.server = server
        self.keys = keys

    @classmethod
    def enrolled(cls, server: Process, devices: int) -> Fleet:
        """So many new devices, by the server's own way."""
        fleet = cls(server, [DeviceKey.generate() for _ in range(devices)])
        wanted = {"uses": devices, "expires_in": 3600}
        token = fleet.ask("POST", "/v1/admin/tokens", json.dumps(wanted).encode())["token"]
        requests = []
        for key in fleet.keys:
            body = json.dumps({"public_key": to_base64url(key.public), "name": ""}).encode()
            requests.append(request_of(key, "POST", "/v1/enrol", body, token=token, kind=_JSON))
        check_answers(drive(server.port, requests, CONNECTIONS), 201)
        return fleet

    def ask(self, method: str, path: str, body: bytes = b"", kind: str = _JSON) -> Any:
        """The operator's request and what it comes to."""
        load = drive(self.server.port, [plain_request(method, path, TOKEN, body, kind)], 1)
        answer = load.answers[0]
        if answer.status >= 400:
            raise FedpressError.from_problem(json.loads(answer.body), answer.status)
        return json.loads(answer.body)

    def begin(
        self, task: str, model: Model, places: int, compressor: dict[str, Any] | None = None
    ) -> None:
        """A task of one round with so many places."""
        self.ask("PUT", f"/v1/admin/models/{model.digest}", model.to_bytes(), "")
        config = {
            "task": task,
            "model": model.digest,
            "rounds": 1,
            "profiles": [{"name": "whole", "compressor": compressor or {"id": "none"}}],
            "cohort": {"size": places, "minimum": 1},
            "round_seconds": 36_000.0,
            "seed": 7,
        }
        self.ask("POST", "/v1/admin/tasks", json.dumps(config).encode())

    def check_in(self, key: DeviceKey, task: str, held: float = 0.0) -> bytes:
        body = json.dumps({"wait": held}).encode()
        return request_of(key, "POST", f"/v1/tasks/{task}/check-in", body, kind=_JSON)

    def assignments(self, task: str) -> tuple[Assignment, list[str]]:
        """One of each device's: the first, and the names of all. To read a plan takes longer than
        to give it out."""
        answers = list[Answer]()
        for keys in in_parts(self.keys):
            load = drive(self.server.port, [self.check_in(key, task) for key in keys], CONNECTIONS)
            check_answers(load, 200)
            answers += load.answers
        first = CheckInResponse.model_validate_json(answers[0].body).assignment
        names = [json.loads(answer.body)["assignment"]["assignment"] for answer in answers]
        if first is None:
            raise FedpressError("a device was given nothing to do")
        return first, names

    def uploads(self, task: str, spec: ModelSpec) -> list[bytes]:
        """A signed upload of each device's."""
        first, names = self.assignments(task)
        body = body_of(first, spec)
        return [self.upload(*whose, body) for whose in zip(self.keys, names, strict=True)]

    def upload(self, key: DeviceKey, assignment: str, body: bytes) -> bytes:
        return request_of(key, "PUT", f"/v1/assignments/{assignment}/update", body)


def in_parts(whole: Sequence[T]) -> Iterator[Sequence[T]]:
    """Few enough at a time that what was signed is not too old when it is sent."""
    for start in range(0, len(whole), _SIGNED_AHEAD):
        yield whole[start : start + _SIGNED_AHEAD]


def enrolled_before(folder: Path, devices: int, url: str = "") -> list[DeviceKey]:
    """So many devices, enrolled in the records of a server that has not begun: those of the
    database `url`, or of one in `folder`."""
    keys, now = [DeviceKey.generate() for _ in range(devices)], time.time()
    if not url:
        (folder / "data").mkdir(mode=0o700)
        url = f"sqlite:///{folder / 'data' / 'fedpress.db'}"
    database = Database(url)

    def write(connection: Connection) -> None:
        token = records.EnrolmentToken("crowd", "0" * 64, devices, 0, now, now + 3600, "")
        records.add_token(connection, token)
        for key in keys:
            whose = (secrets.token_urlsafe(12), key.key_id, key.public, "", token.token_id)
            records.add_device(connection, records.Device(*whose, now, None))

    try:
        asyncio.run(database.write(write))
    finally:
        database.close()
    return keys


@contextmanager
def served(folder: Path, database: str, **variables: str) -> Iterator[Process]:
    settings = {
        "FEDPRESS_HOST": "127.0.0.1",
        "FEDPRESS_PORT": "0",
        "FEDPRESS_DATA_DIR": str(folder / "data"),
        "FEDPRESS_DATABASE_URL": database,
        "FEDPRESS_ADMIN_TOKEN": TOKEN,
        "FEDPRESS_LOG_LEVEL": "warning",
        "FEDPRESS_ENROLMENTS_PER_SECOND": "1000000",
        "FEDPRESS_ENROLMENT_FAILURES_PER_MINUTE": "1000000",
    }
    with Process(["-m", "fedpress_server"], folder, **(settings | variables)) as server:
        yield server


def model_of(num_bytes: int) -> Model:
    values = np.linspace(-1, 1, num_bytes // 4, dtype=np.float32)
    return Model.from_tensors({"weight": values})


def body_of(assignment: Assignment, spec: ModelSpec) -> bytes:
    compressor = assignment.plan.compressor(assignment.profile)
    rng = np.random.default_rng(0)
    update = rng.standard_normal(spec.size).astype(np.float32)
    public = assignment.plan.public(spec)
    symbols, _ = compressor.compress(update, compressor.init(spec), public, rng)
    index = assignment.plan.profile_index(assignment.profile)
    return Upload(index, 10, symbols).to_bytes(compressor.layout(spec))


def check_answers(load: Load, status: int) -> None:
    for answer in load.answers:
        if answer.status != status:
            raise FedpressError(f"{answer.status} where {status} is due: {answer.body[:500]!r}")


# What is measured


def _uploads(name: str, url: str, amounts: Amounts) -> Iterator[dict[str, Any]]:
    """Rates and CPU of uploads in turns, by size."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="fedpress-bench-")))
        urls = [stack.enter_context(new_database(url)) for _ in range(2)] if url else ["", "sqlite"]
        server = stack.enter_context(served(folder, urls[0]))
        fleet = Fleet.enrolled(server, amounts.uploads)
        others = {}
        for other, kept in {"prototype": urls[1], "no row": "none"}.items():
            place = folder / other.replace(" ", "-")
            place.mkdir()
            keys = {key.key_id: key.public.hex() for key in fleet.keys}
            (place / "keys.json").write_text(json.dumps(keys))
            arguments = [_PROTOTYPE, str(place), kept]
            others[other] = stack.enter_context(Process(arguments, place))
        for size, num_bytes in SIZES.items():
            yield {"database": name, "size": size, **_turns(fleet, others, num_bytes, amounts)}


def _turns(
    fleet: Fleet, others: dict[str, Process], num_bytes: int, amounts: Amounts
) -> dict[str, Any]:
    model = model_of(num_bytes)
    places = amounts.uploads + 1
    names = ["server", *others]
    rates: dict[str, list[float]] = {each: [] for each in names}
    cpu: dict[str, list[float]] = {each: [] for each in names}
    shares, tasks = [], []
    for turn in range(amounts.repeats + 1):
        task = f"t{num_bytes}-{turn}"
        tasks.append(task)
        fleet.begin(task, model, places)
        requests = fleet.uploads(task, model.spec)
        order = [("server", fleet.server), *others.items()]
        for each, process in order if turn % 2 else reversed(order):
            rate, seconds, load = process.timed(requests, 201)
            if turn:  # the first one warms up
                rates[each].append(rate)
                cpu[each].append(seconds)
                shares.append(load.cpu_seconds / load.seconds)
    for task in tasks:  # not earlier: the prototype never removes a file, so no turn is to
        fleet.ask("POST", f"/v1/admin/tasks/{task}/cancel")
    per_turn = [
        (ours / theirs, mine / its)
        for ours, theirs, mine, its in zip(
            rates["server"], rates["prototype"], cpu["server"], cpu["prototype"], strict=True
        )
    ]
    return {
        "rate": {each: median(rates[each]) for each in names},
        "cpu_ms": {each: 1000 * median(cpu[each]) for each in names},
        "rate / prototype": median(ratio for ratio, _ in per_turn),
        "CPU / prototype": median(ratio for _, ratio in per_turn),
        "load_generator_share": median(shares),
    }


def _polls(amounts: Amounts) -> dict[str, Any]:
    """Check-ins of devices for which there is no place, each when it was told to come: answered at
    once, and then held as the SDK asks, until the task ends."""
    with TemporaryDirectory(prefix="fedpress-bench-") as place, ExitStack() as stack:
        keys = enrolled_before(Path(place), amounts.pollers)
        server = stack.enter_context(served(Path(place), ""))
        fleet = Fleet(server, keys)
        fleet.begin("busy", model_of(400), 1)
        check_answers(drive(server.port, [fleet.check_in(fleet.keys[0], "busy")], 1), 200)
        found: dict[str, Any] = {"clients": amounts.pollers}
        ending = partial(fleet.ask, "POST", "/v1/admin/tasks/busy/cancel")
        for name, held, news in (("at once", 0.0, None), ("held", _HELD, ending)):
            requests = [partial(fleet.check_in, key, "busy", held) for key in fleet.keys]
            before, spread = server.cpu_seconds, amounts.poll_seconds / 2
            polls = poll(server.port, requests, spread, amounts.poll_seconds, held, news)
            spent = server.cpu_seconds - before
            figures = {
                "polls": len(polls.seconds) + len(polls.told),
                "failed": polls.failed.total(),
                "failures": dict(polls.failed),
                "connections": polls.open,
                "cpu_ms": 1000 * spent / (len(polls.seconds) + len(polls.told)),
                "generator_late": polls.late,
            }
            found[name] = figures | _spread_of(polls.seconds)
            if polls.told:
                found["news"] = {"told": len(polls.told)} | _spread_of(polls.told)
    return found


def _spread_of(seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        "p50": ordered[len(ordered) // 2],
        "p99": ordered[len(ordered) * 99 // 100],
        "most": ordered[-1],
    }


def _memory(amounts: Amounts) -> dict[str, Any]:
    """The most memory of a server whose round a few clients take part in, or a crowd."""
    peaks = {}
    for clients in (100, amounts.crowd):
        with TemporaryDirectory(prefix="fedpress-bench-") as place, ExitStack() as stack:
            keys = enrolled_before(Path(place), clients)
            server = stack.enter_context(served(Path(place), ""))
            fleet = Fleet(server, keys)
            model = model_of(SIZES["14 kB"])
            fleet.begin("crowd", model, clients + 1)
            first, names = fleet.assignments("crowd")
            body = body_of(first, model.spec)
            before, seconds = server.cpu_seconds, 0.0
            for part in in_parts(list(zip(keys, names, strict=True))):
                requests = [fleet.upload(*whose, body) for whose in part]
                load = drive(server.port, requests, CONNECTIONS)
                check_answers(load, 201)
                seconds += load.seconds
            cpu, rate = (server.cpu_seconds - before) / clients, clients / seconds
            peaks[clients] = server.peak_bytes
    few, many = peaks.values()
    return {
        "peak_bytes": {str(clients): peak for clients, peak in peaks.items()},
        "ratio": many / few,
        "rate": rate,
        "cpu_ms": 1000 * cpu,
    }


@contextmanager
def new_database(url: str) -> Iterator[str]:
    """A new database in the PostgreSQL of `url`; removed at the end."""
    import psycopg

    name = f"fedpress_bench_{secrets.token_hex(4)}"
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}".encode())
        try:
            head, _, query = url.partition("?")
            scheme, _, rest = head.partition("://")
            place = rest.partition("/")[0]
            yield f"{scheme}://{place}/{name}" + (f"?{query}" if query else "")
        finally:
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


# For people


def _tables(found: dict[str, Any]) -> str:
    lines = []
    if "uploads" in found:
        lines += [
            f"{'':22} {'server':>9} {'prototype':>9} {'no row':>9}   {'ratio':>5} {'target':>6}"
        ]
    for row in found.get("uploads", []):
        what = f"{row['database']}, {row['size']}"
        for key, ratio, unit in (
            ("rate", "rate / prototype", "uploads/s"),
            ("cpu_ms", "CPU / prototype", "ms of CPU"),
        ):
            figures = " ".join(f"{value:9.2f}" for value in row[key].values())
            target = ("≥ " if key == "rate" else "≤ ") + str(TARGETS[ratio])
            lines.append(f"{what:22} {figures}   {row[ratio]:5.2f} {target:>6}  {unit}")
    if "polls" in found:
        polls = found["polls"]
        for name in ("at once", "held"):
            row = polls[name]
            lines.append(
                f"{polls['clients']} clients poll, answered {name}: {row['polls']} polls, "
                f"{row['failed']} failed, p50 {row['p50']:.3f} s, p99 {row['p99']:.3f} s "
                f"(≤ {TARGETS['poll p99']}), {row['cpu_ms']:.2f} ms of CPU each"
            )
        news = polls.get("news")
        if news is not None:
            lines.append(
                f"{news['told']} of them held: all know the end within {news['most']:.2f} s"
            )
    if "memory" in found:
        memory = found["memory"]
        sizes = ", ".join(f"{n} clients {b / 1e6:.0f} MB" for n, b in memory["peak_bytes"].items())
        lines.append(
            f"memory: {sizes}; ratio {memory['ratio']:.2f} (≤ {TARGETS['memory / of 100']}), "
            f"{memory['rate']:.0f} uploads/s in the larger round"
        )
    return "\n".join(lines)


def main() -> None:
    command = parser(__doc__, quick="few uploads, few clients")
    command.add_argument(
        "--postgresql",
        metavar="URL",
        default=os.environ.get("FEDPRESS_BENCH_POSTGRESQL"),
        help="a PostgreSQL whose user may create databases, or FEDPRESS_BENCH_POSTGRESQL",
    )
    command.add_argument(
        "--part",
        dest="parts",
        choices=PARTS,
        action="append",
        help="one part alone; may be repeated",
    )
    options = command.parse_args()
    amounts = QUICK if options.quick else WHOLE
    result = measure(amounts, options.postgresql, options.parts or PARTS)
    report(_tables(result), result, options.json)


if __name__ == "__main__":
    main()
