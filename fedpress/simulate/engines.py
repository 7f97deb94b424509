"""Engines of our own for Flower's apps: one process, or a pool of them.

An engine answers messages to the nodes 1, 2, ..., `clients`. What an app keeps in `context.state`
lies in a file for each client that has any, so that the driver's memory does not grow with their
number and any process may serve any client. Pickle is spoken between our own processes alone.
"""

from __future__ import annotations

import contextlib
import logging
import math
import multiprocessing
import os
import signal
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol

from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedpress.simulate import flower_runtime as runtime
from fedpress_protocols.errors import ConfigurationError, ServerError
from fedpress_protocols.local_files import replace_file

_BUNDLE_SECONDS = 0.02
"""Of work that a process is given, and answers, at a time: each time costs it and us a waking."""
_MOST_IN_BUNDLE = 64
_PATIENCE_SECONDS = 0.25
"""Seconds after which idle processes take over messages that another has not started."""
_SHARED_KEPT = 4
_END_SECONDS = 5.0
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")


class Apps(Protocol):
    """Source of the client app; sent to other processes, so it must be picklable."""

    def client_app(self) -> ClientApp: ...


class Engine(Protocol):
    """Answers messages to nodes, for as long as `serve` runs."""

    def run(self, serve: Callable[[Any], None]) -> None: ...

    def stream(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterator[Message]: ...


@dataclass(frozen=True)
class Run:
    """Settings of every client of a run, and the `folder` of their state."""

    apps: Apps
    clients: int
    run_id: int
    run_config: runtime.UserConfig
    folder: Path


class _Host:
    """Runs the app for one client at a time, in this process."""

    def __init__(self, run: Run) -> None:
        runtime.begin_run(run.run_id)
        self._run, self._app = run, run.apps.client_app()
        self._states = run.folder / "contexts"
        self._states.mkdir(parents=True, exist_ok=True)

    def answer(self, message: Message) -> Message:
        """The app's reply; that of a failed client if it raises, or replies with nothing."""
        node, run = message.metadata.dst_node_id, self._run
        path = self._states / str(node)
        stored = path.read_bytes() if path.exists() else b""
        state = runtime.records_from_bytes(stored) if stored else RecordDict()
        config = runtime.node_config(node - 1, run.clients)
        context = Context(run.run_id, node, config, state, dict(run.run_config))
        try:
            reply = self._app(message, context)
            if not isinstance(reply, Message):
                raise TypeError(f"the app replied with a {type(reply).__name__}")
        except Exception as exc:
            reason = f"{type(exc).__name__}: {exc}"
            return runtime.failed(message, runtime.APP_FAILED, reason)
        after = runtime.records_to_bytes(context.state) if context.state else b""
        if after != stored:
            fresh = path.with_name(f"{node}.new")
            fresh.write_bytes(after)
            replace_file(fresh, path)
        return reply


class LocalEngine:
    """All clients in this process, one after another. It cannot interrupt one: what takes longer
    than the timeout allows is waited for, and the clients after it are not asked."""

    def __init__(self, run: Run) -> None:
        self._host = _Host(run)

    def run(self, serve: Callable[[LocalEngine], None]) -> None:
        serve(self)

    def stream(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterator[Message]:
        deadline = None if timeout is None else time.monotonic() + timeout
        for message in messages:
            if deadline is not None and time.monotonic() > deadline:
                return
            yield self._host.answer(runtime.copied(message))


class ProcessEngine:
    """A pool of `workers` processes, each of which serves any client. One that dies is replaced,
    and the client that it was serving has failed; those at work when the timeout is over are ended
    and replaced."""

    def __init__(self, run: Run, workers: int | None = None) -> None:
        count = min(workers or os.cpu_count() or 1, run.clients)
        if count < 1:
            raise ConfigurationError(f"workers must be at least 1, not {count}")
        self._run, self._count = run, count
        self._workers: list[_Worker] = []
        self._shared = _Shared(run.folder)
        self._each = 1.0  # second for a message, as far as known

    def run(self, serve: Callable[[ProcessEngine], None]) -> None:
        runtime.begin_run(self._run.run_id)
        self._shared = _Shared(Path(tempfile.mkdtemp(prefix="shared-", dir=self._run.folder)))
        try:
            serve(self)
        finally:
            for worker in self._workers:
                worker.end()
            self._shared.remove()

    def stream(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterator[Message]:
        """Replies in the order in which they come."""
        deadline = None if timeout is None else time.monotonic() + timeout
        todo = deque(messages)
        while len(self._workers) < self._count:
            self._workers.append(_Worker.started(self._run))
        try:
            while todo or any(worker.jobs for worker in self._workers):
                self._deal(todo)
                left = math.inf if deadline is None else deadline - time.monotonic()
                if left <= 0:
                    return
                busy: dict[Any, _Worker] = {w.pipe: w for w in self._workers if w.jobs}
                blocked = [worker for worker in busy.values() if len(worker.jobs) > 1]
                if blocked and len(busy) < self._count:
                    left = min(left, _PATIENCE_SECONDS)
                ready = wait(list(busy), None if left == math.inf else left)
                for pipe in ready:
                    yield from self._taken(busy[pipe], todo)
                if not ready:  # others could do what waits behind somebody slow
                    for worker in blocked:
                        todo.extend(worker.taken_back())
        finally:
            for worker in [worker for worker in self._workers if worker.jobs]:
                worker.end()
                self._workers.remove(worker)
            self._shared.clear()

    def _deal(self, todo: deque[Message]) -> None:
        """Two bundles to each process: one to work on, one so that it need not wait. A bundle is
        what takes a process some milliseconds, and at the end not more than its part."""
        for depth in range(2):
            for worker in self._workers:
                fair = -(-len(todo) // (2 * self._count))
                size = max(1, min(_MOST_IN_BUNDLE, fair, int(_BUNDLE_SECONDS / self._each)))
                if todo and len(worker.jobs) <= depth * size:
                    bundle = [todo.popleft() for _ in range(min(size, len(todo)))]
                    worker.give(bundle, self._shared)

    def _taken(self, worker: _Worker, todo: deque[Message]) -> list[Message]:
        """Receive a process's replies; the end of its stream means that a client failed."""
        try:
            data = worker.pipe.recv()
        except (EOFError, ConnectionError) as exc:
            culprit, others = worker.interrupted()
            todo.extendleft(reversed(others))
            code = worker.end()
            self._workers[self._workers.index(worker)] = _Worker.started(self._run)
            if not worker.has_answered and culprit is None:
                raise ServerError(f"a process ended with code {code} before it began") from exc
            if culprit is None:
                return []
            reason = f"its process ended with code {code}"
            return [runtime.failed(culprit, runtime.APP_CRASHED, reason)]
        if isinstance(data, Exception):
            raise data
        replies, seconds = data
        self._each = 0.5 * self._each + 0.5 * seconds / len(replies)
        worker.has_answered = True
        for number, _ in replies:
            del worker.jobs[number]
        return [runtime.from_bytes(reply) for _, reply in replies]


@dataclass(eq=False)
class _Worker:
    """A process of the pool as the driver sees it: its `jobs` by number, in order."""

    process: BaseProcess
    pipe: Connection
    desk: _Desk
    jobs: dict[int, Message] = field(default_factory=dict)
    given: int = 0
    has_answered: bool = False

    @classmethod
    def started(cls, run: Run) -> _Worker:
        # Spawned, not forked: a fork would take along locks that other threads hold.
        context = multiprocessing.get_context("spawn")
        ends: tuple[Any, Any] = context.Pipe()  # of another class on Windows
        ours, theirs = ends
        desk = _Desk(context.RawArray("q", 2), context.Lock())
        process = context.Process(target=_work, args=(theirs, desk, run), daemon=True)
        before = {name: os.environ.get(name) for name in _ONE_THREAD}
        os.environ.update(dict.fromkeys(_ONE_THREAD, "1"))
        try:
            process.start()
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
        theirs.close()
        return cls(process, ours, desk)

    def give(self, bundle: list[Message], shared: _Shared) -> None:
        """More messages; arrays that others get too are read from a file, and sent once."""
        sent = []
        for message in bundle:
            names = list(message.content)
            own, files = RecordDict(), {}
            for name, record in message.content.items():
                if isinstance(record, ArrayRecord):
                    files[name] = shared.file_of(record)
                else:
                    own[name] = record
            data = runtime.to_bytes(runtime.with_content(message, own))
            sent.append((self.given, names, files, data))
            self.jobs[self.given] = message
            self.given += 1
        with contextlib.suppress(BrokenPipeError, ConnectionError):  # its end shows in `recv`
            self.pipe.send(sent)

    def interrupted(self) -> tuple[Message | None, list[Message]]:
        """After the process has died: the message that it was at, None between two, and others."""
        culprit = self.jobs.pop(self.desk.at, None)
        return culprit, list(self.jobs.values())

    def taken_back(self) -> list[Message]:
        """The messages that it has not begun, which it will pass over."""
        first = self.desk.void(self.given)
        return [self.jobs.pop(number) for number in list(self.jobs) if number >= first]

    def end(self) -> int | None:
        """End the process, at once if it works on something or has not begun; its exit code."""
        self.pipe.close()
        if self.jobs or not self.has_answered:
            self.process.terminate()
        self.process.join(_END_SECONDS)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
        return self.process.exitcode


@dataclass(frozen=True)
class _Desk:
    """State shared by a process and the driver: the number of its current or last job,
    plus 1, and below which number jobs that it has not begun are void."""

    numbers: Any
    lock: Any

    @property
    def at(self) -> int:
        return int(self.numbers[0]) - 1

    def begin(self, number: int) -> bool:
        """In the process: whether it may do this job, which it is at from now on."""
        with self.lock:
            if number < self.numbers[1]:
                return False
            self.numbers[0] = number + 1
            return True

    def void(self, stop: int) -> int:
        """In the driver: make void what has not begun below `stop`; the first number of that."""
        if not self.lock.acquire(timeout=1.0):  # a process that was killed here holds it for ever
            return stop
        try:
            self.numbers[1] = stop
            return int(self.numbers[0])
        finally:
            self.lock.release()


class _Shared:
    """Records on the way to several clients: a file each, kept while messages are under way."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[int, tuple[ArrayRecord, str]] = {}
        self._count = 0

    def file_of(self, record: ArrayRecord) -> str:
        if id(record) not in self._files:
            self._count += 1
            path = self._folder / str(self._count)
            path.write_bytes(runtime.records_to_bytes(RecordDict({"arrays": record})))
            self._files[id(record)] = (record, str(path))
        return self._files[id(record)][1]

    def clear(self) -> None:
        for _, path in self._files.values():
            os.unlink(path)
        self._files = {}

    def remove(self) -> None:
        self.clear()
        self._folder.rmdir()


def _work(pipe: Connection, desk: _Desk, run: Run) -> None:
    """The life of a process of the pool."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver hears it, and ends us
    logging.getLogger("flwr").setLevel(logging.WARNING)
    try:
        host = _Host(run)
    except Exception as exc:
        pipe.send(exc)
        return
    cache: dict[str, Any] = {}
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            bundle, replies = pipe.recv(), list[tuple[int, bytes]]()
            since = time.perf_counter()
            for number, names, files, data in bundle:
                if not desk.begin(number):
                    continue
                message = runtime.from_bytes(data)
                for path in files.values():
                    if path not in cache:
                        shared = runtime.records_from_bytes(Path(path).read_bytes())
                        cache[path] = shared["arrays"]
                own = message.content
                message.content = RecordDict(
                    {n: cache[files[n]].copy() if n in files else own[n] for n in names}
                )
                replies.append((number, runtime.to_bytes(host.answer(message))))
                while len(cache) > _SHARED_KEPT:
                    del cache[next(iter(cache))]
                if time.perf_counter() - since > _BUNDLE_SECONDS:
                    pipe.send((replies, time.perf_counter() - since))
                    replies, since = [], time.perf_counter()
            if replies:
                pipe.send((replies, time.perf_counter() - since))
