"""The least that accepts an upload as durably as the server does: ingest.py compares with it.

    python benchmarks/ingest_prototype.py FOLDER DATABASE

FastAPI behind uvicorn; the request's signature, the body's SHA-256, a synced file, a row in a
commit that those who wait share, and then the answer. DATABASE is a PostgreSQL URL, `sqlite` for a
file in FOLDER, or `none` for no row at all. FOLDER holds `keys.json`: public keys, in hexadecimal,
by key id. It has no tasks, no rounds, no limits, and forgets nonces.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import queue
import secrets
import socket
import sqlite3
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response

from fedpress_protocols.signatures import (
    Content,
    Target,
    parse_signature,
    signed_headers,
    verify_request,
)

_TABLE = "CREATE TABLE updates (name TEXT PRIMARY KEY, digest TEXT, num_bytes INTEGER, at REAL)"
_TOGETHER = 64
Row = tuple[str, str, int, float]
Commit = Callable[[list[Row]], None]


def sqlite(folder: Path) -> Commit:
    connection = sqlite3.connect(
        folder / "prototype.db", check_same_thread=False, isolation_level=None
    )
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute(_TABLE)

    def commit(rows: list[Row]) -> None:
        connection.execute("BEGIN IMMEDIATE")
        connection.executemany("INSERT INTO updates VALUES (?, ?, ?, ?)", rows)
        connection.execute("COMMIT")

    return commit


def postgresql(url: str) -> Commit:
    import psycopg

    connection = psycopg.connect(url)
    connection.execute(_TABLE)
    connection.commit()

    def commit(rows: list[Row]) -> None:
        with connection.transaction(), connection.cursor() as cursor:
            cursor.executemany("INSERT INTO updates VALUES (%s, %s, %s, %s)", rows)

    return commit


class Writer:
    """One thread that commits the rows of all who wait, `_TOGETHER` at a time."""

    def __init__(self, commit: Commit) -> None:
        self._commit = commit
        self._rows: queue.SimpleQueue[tuple[Row, Future[None]]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    async def add(self, row: Row) -> None:
        done: Future[None] = Future()
        self._rows.put((row, done))
        await asyncio.wrap_future(done)

    def _run(self) -> None:
        while True:
            batch = [self._rows.get()]
            while len(batch) < _TOGETHER and not self._rows.empty():
                batch.append(self._rows.get())
            self._commit([row for row, _ in batch])
            for _, done in batch:
                done.set_result(None)


def keep(folder: Path, name: str, body: bytes) -> None:
    """The body under its name, synced, and the name too."""
    beside = folder / f"{secrets.token_hex(8)}.tmp"
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(descriptor, body)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    beside.rename(folder / name)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def application(folder: Path, writer: Writer | None) -> FastAPI:
    app = FastAPI()
    keys = {
        name: bytes.fromhex(key)
        for name, key in json.loads((folder / "keys.json").read_text()).items()
    }
    threads = ThreadPoolExecutor(2)

    @app.put("/v1/assignments/{assignment}/update", status_code=201)
    async def put(request: Request, assignment: str) -> Any:
        headers = signed_headers(request.scope["headers"])
        parsed, now = parse_signature(headers), time.time()
        path = request.scope["raw_path"].decode()
        target = Target(request.method, headers["host"], path)
        due = verify_request(parsed, keys[parsed.key_id], target, headers, now=now)
        body, digest = bytearray(), hashlib.sha256()
        async for chunk in request.stream():
            body += chunk
            digest.update(chunk)
        due.check(Content(digest.digest(), len(body)))
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(threads, keep, folder, assignment, bytes(body))
        if writer is not None:
            await writer.add((assignment, digest.hexdigest(), len(body), now))
        found = {"assignment": assignment, "upload": digest.hexdigest(), "received_at": now}
        return Response(json.dumps(found), 201, media_type="application/json")

    return app


def main(folder: Path, database: str) -> None:
    writer = None
    if database != "none":
        writer = Writer(sqlite(folder) if database == "sqlite" else postgresql(database))
    config = uvicorn.Config(
        application(folder, writer), log_level="warning", access_log=False, server_header=False
    )
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as listener:
        print(f"ready on http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
        with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
            runner.run(uvicorn.Server(config).serve([listener]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
