"""One round of a large model through a real server: bytes, seconds, and the server's memory.

    python benchmarks/large_round.py [--values 100000000,1000000000] [--limit-gib 8] [--json FILE]

An operator brings a model of zeros; a device prepares an update of normal values (top-k 1 % under
error feedback) and uploads it in parts through a link that is cut 20 times; the server aggregates
it, and the device downloads the next model. Server and device are processes of their own. Of the
server's memory, what is its own (RssAnon) and what are pages of mapped files (RssFile) are sampled
while it works. With --limit-gib the server runs in a memory control group of that size (version 1,
as root), which counts its page cache too. Needs some 30 bytes a value of disk space in $TMPDIR.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from harness import machine, parser, report

from fedpress import Operator
from fedpress_client import Ledger
from fedpress_client.transport import HttpTransport, Retries
from fedpress_compression.compressor import from_config
from fedpress_compression.tensors import ModelSpec, TensorSpec
from fedpress_protocols.messages import (
    Assignment,
    CheckInRequest,
    EnrolRequest,
    PartialUpload,
    TaskConfig,
)
from fedpress_protocols.model import Model
from fedpress_protocols.plan import CohortRules, Profile, TrainingTerms
from fedpress_protocols.signatures import DeviceKey, to_base64url
from fedpress_strategies.strategy import AggregationSpace

TOKEN = "the token of a benchmark"
COMPRESSOR = {"id": "error_feedback", "inner": {"id": "topk", "fraction": 0.01}}
COLUMNS = 2500
CUTS = 20
GROUPS = Path("/sys/fs/cgroup/memory")
MIB = 2**20


class CutLink:
    """A TCP proxy on loopback that resets the connection that carries the byte of each cut."""

    def __init__(self, port: int, cuts: list[int]) -> None:
        self._port, self._cuts, self._lock = port, sorted(cuts), threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.num_bytes = self.num_cuts = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            device, _ = self._listener.accept()
            server = socket.create_connection(("127.0.0.1", self._port))
            for way in ((device, server, True), (server, device, False)):
                threading.Thread(target=self._carry, args=way, daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket, is_up: bool) -> None:
        try:
            while data := source.recv(65536):
                if is_up and self._is_cut(len(data)):
                    break
                target.sendall(data)
        except OSError:
            pass
        for end in (source, target):
            close(end)

    def _is_cut(self, num_bytes: int) -> bool:
        with self._lock:
            self.num_bytes += num_bytes
            if not self._cuts or self.num_bytes < self._cuts[0]:
                return False
            self._cuts.pop(0)
            self.num_cuts += 1
            return True


def close(end: socket.socket) -> None:
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()


def memory_of(pid: int | str) -> dict[str, int]:
    """The bytes of a process's memory by the names in its status, VmHWM the most it has had."""
    lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {line[0][:-1]: 1024 * int(line[1]) for line in lines if line[2:] == ["kB"]}


class Watched:
    """The largest memory of a process since the last `peaks`, sampled twenty times a second."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._peaks: dict[str, int] = {}
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._done.wait(0.05):
            memory = memory_of(self._pid)
            for name in ("RssAnon", "RssFile"):
                self._peaks[name] = max(memory[name], self._peaks.get(name, 0))

    def peaks(self) -> dict[str, int]:
        peaks, self._peaks = self._peaks, {}
        return peaks

    def stop(self) -> None:
        self._done.set()
        self._thread.join()


@contextmanager
def limited(num_bytes: int) -> Iterator[Path | None]:
    """A memory control group of that size for a process that is added to it."""
    if not num_bytes:
        yield None
        return
    group = GROUPS / f"fedpress-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(num_bytes))
        yield group
    finally:
        for _ in range(100):  # its process is on its way out
            with suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.1)


def spec_of(values: int) -> ModelSpec:
    return ModelSpec((TensorSpec("weight", (values // COLUMNS, COLUMNS)),))


def first_model(folder: Path, values: int) -> Path:
    """Write a model of zeros, with no array in memory."""
    spec, path = spec_of(values), folder / "first.safetensors"
    zeros = AggregationSpace(folder, 0).zeros(spec.size, np.float32)
    Model(spec, zeros, {}).write(path)
    return path


def bring(url: str, path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        file.seek(0)
        answer = httpx.put(
            f"{url}/v1/admin/models/{digest}",
            headers={
                "Authorization": f"Bearer {TOKEN}",
                "Content-Length": str(path.stat().st_size),
            },
            content=iter(lambda: file.read(MIB), b""),
            timeout=3600,
        )
    answer.raise_for_status()
    return digest


def prepare(folder: Path, values: int) -> dict[str, Any]:
    """The device: enrol, check in, and prepare the upload, in `folder`."""
    asked, key = json.loads((folder / "asked.json").read_text()), DeviceKey.generate()
    link = HttpTransport(asked["url"], key)
    link.enrol(asked["token"], EnrolRequest(public_key=to_base64url(key.public)))
    response = link.check_in("large", CheckInRequest(wait=20)).response
    assert response is not None
    assert response.assignment is not None
    assignment: Assignment = response.assignment
    spec, before = spec_of(values), memory_of("self")["VmHWM"]
    update = np.random.default_rng(0).standard_normal(values, np.float32)
    update *= np.float32(1e-3)
    begin = time.process_time()
    ledger = Ledger("large", "client")
    _, body = ledger.prepare(assignment, update, 1, spec, np.random.default_rng(1))
    assert body is not None
    seconds = time.process_time() - begin
    (folder / "body").write_bytes(body)
    (folder / "key").write_bytes(key.to_bytes())
    (folder / "assignment").write_text(assignment.assignment)
    memory = memory_of("self")["VmHWM"] - before
    return {"bytes": len(body), "seconds": seconds, "memory": memory}


def upload(folder: Path, port: int) -> dict[str, Any]:
    """Send the body through the cut link; the bytes, and how many more than the body's."""
    body, key = (folder / "body").read_bytes(), DeviceKey.from_bytes((folder / "key").read_bytes())
    rng = random.Random(5)
    cuts = CutLink(port, [rng.randrange(2000, len(body)) for _ in range(CUTS)])
    retries = Retries(base=0.01, cap=0.05)
    link = HttpTransport(cuts.url, key, retries=retries, parts_above=2**16, part_seconds=1.0)
    parts: list[int] = []
    sender: Any = link._parts
    send = sender.send_part

    def counted(assignment: str, partial: str, offset: int, part: bytes) -> PartialUpload:
        parts.append(len(part))
        done: PartialUpload = send(assignment, partial, offset, part)
        return done

    sender.send_part = counted
    link.upload((folder / "assignment").read_text(), body)
    return {
        "cuts": cuts.num_cuts,
        "bytes": cuts.num_bytes,
        "largest_part": max(parts),
        "parts_lost": (sum(parts) - len(body)) / max(parts),
    }


def download(url: str, digest: str) -> int:
    """The bytes of the model, checked against its digest."""
    whole, num_bytes = hashlib.sha256(), 0
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with httpx.stream("GET", f"{url}/v1/models/{digest}", headers=headers, timeout=3600) as answer:
        answer.raise_for_status()
        for piece in answer.iter_bytes(MIB):
            whole.update(piece)
            num_bytes += len(piece)
    assert whole.hexdigest() == digest
    return num_bytes


def measured(values: int, limit: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as place, limited(limit) as group:
        folder = Path(place)
        path = first_model(folder, values)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        process = start(folder, port, group, path.stat().st_size)
        watched = Watched(process.pid)
        try:
            return steps(folder, path, port, values, watched, group)
        finally:
            watched.stop()
            process.terminate()
            process.wait(60)


def start(folder: Path, port: int, group: Path | None, largest: int) -> subprocess.Popen[bytes]:
    variables = {
        "FEDPRESS_HOST": "127.0.0.1",
        "FEDPRESS_PORT": str(port),
        "FEDPRESS_DATA_DIR": str(folder / "server"),
        "FEDPRESS_ADMIN_TOKEN": TOKEN,
        "FEDPRESS_MAX_BODY_BYTES": str(2 * largest),
        "FEDPRESS_MAX_PART_BYTES": str(max(2**16, largest // 4000)),
    }
    join = f"echo $$ > {group}/cgroup.procs; " if group else ""
    process = subprocess.Popen(
        ["sh", "-c", f'{join}exec "$@"', "sh", sys.executable, "-m", "fedpress_server"],
        env={**os.environ, **variables},
        stdout=(folder / "server.log").open("wb"),
        stderr=subprocess.STDOUT,
    )
    until = time.monotonic() + 120
    while b"server ready" not in (folder / "server.log").read_bytes():
        if process.poll() is not None or time.monotonic() > until:
            raise SystemExit((folder / "server.log").read_text())
        time.sleep(0.1)
    return process


def steps(
    folder: Path, path: Path, port: int, values: int, watched: Watched, group: Path | None
) -> dict[str, Any]:
    url, rows = f"http://127.0.0.1:{port}", dict[str, Any]()

    def row(name: str, begin: float, **more: Any) -> None:
        time.sleep(0.1)
        rows[name] = {"wall": time.monotonic() - begin, **watched.peaks(), **more}

    begin = time.monotonic()
    digest = bring(url, path)
    row("bring", begin, bytes=path.stat().st_size)
    path.unlink()
    with Operator(url, TOKEN) as operator:
        profile = Profile(name="one", compressor=from_config(COMPRESSOR))
        operator.create_task(
            TaskConfig(
                task="large",
                model=digest,
                rounds=1,
                profiles=(profile,),
                training=TrainingTerms(),
                cohort=CohortRules(size=1, minimum=1),
                round_seconds=36000,
                seed=7,
            )
        )
        asked = {"url": url, "token": operator.create_token(uses=1)}
        (folder / "asked.json").write_text(json.dumps(asked))
        begin = time.monotonic()
        command = [sys.executable, __file__, "--device", str(folder), "--values", str(values)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        row("prepare", begin, device=json.loads(done.stdout))
        begin = time.monotonic()
        sent = upload(folder, port)
        row("upload", begin, **sent)
        begin = time.monotonic()
        while (summary := operator.task("large")).state == "running":
            if operator.rounds("large")[-1].attempt > 1:
                raise SystemExit((folder / "server.log").read_text())
            time.sleep(0.5)
        row("aggregate", begin)
        assert summary.model != digest
        begin = time.monotonic()
        row("download", begin, bytes=download(url, summary.model))
    found: dict[str, Any] = {"values": values, "model": summary.model, "steps": rows}
    if group is not None:
        used = int((group / "memory.max_usage_in_bytes").read_text())
        found["group"] = {"limit": int((group / "memory.limit_in_bytes").read_text()), "peak": used}
    return found


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| values | step | seconds | server's own memory, MB | its mapped files, MB |",
        "| --- | --- | --- | --- | --- |",
    ]
    for found in rows:
        for name, row in found["steps"].items():
            lines.append(
                f"| {found['values']:,} | {name} | {row['wall']:.0f} | {row['RssAnon'] / 1e6:,.0f} "
                f"| {row['RssFile'] / 1e6:,.0f} |"
            )
    for found in rows:
        device, sent = found["steps"]["prepare"]["device"], found["steps"]["upload"]
        lines.append(
            f"\n{found['values']:,} values: a body of {device['bytes']:,} bytes, prepared in "
            f"{device['memory'] / 1e6:,.0f} MB; {sent['cuts']} cuts lost "
            f"{sent['parts_lost']:.1f} parts"
        )
        if "group" in found:
            lines.append(f"control group, page cache too: {found['group']['peak'] / 1e6:,.0f} MB")
    return "\n".join(lines)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--values", default="100000000")
    options.add_argument("--limit-gib", type=float, default=0)
    options.add_argument("--device", type=Path, help=argparse.SUPPRESS)
    asked = options.parse_args()
    sizes = [int(each) for each in asked.values.split(",")]
    if asked.device is not None:
        print(json.dumps(prepare(asked.device, sizes[0])))
        return
    rows = [measured(values, int(asked.limit_gib * 2**30)) for values in sizes]
    report(table(rows), {"rows": rows, "machine": machine()}, asked.json)


if __name__ == "__main__":
    main()
