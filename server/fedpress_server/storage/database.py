"""The one door to the database: transactions that are on the disk when they return.

Writes run one at a time in a thread of their own, and those that wait share one commit, since a
commit's price is the disk's. Reads run beside them. What a write has been given to do may be done
more than once, in a transaction that was undone before, and so depends on nothing but what it
reads in it.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any, Literal, NamedTuple, TypeVar

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from fedpress_protocols.errors import ConfigurationError, StorageFull, Unavailable
from fedpress_server import failpoints
from fedpress_server.observing.outages import MAKE_ROOM, Outage
from fedpress_server.storage import schema
from fedpress_server.storage.engines import READERS, Backend, opened

_log = logging.getLogger(__name__)

T = TypeVar("T")
Kind = Literal["read", "write"]
_COMMIT_TOGETHER = 64
_PAUSES = (0.0, 0.03, 0.1, 0.3)
_PATIENCE = 15.0
_SURE = 5.0
"""Seconds without a failure after which a database that answers is said to be back."""


class _Job:
    """One write that waits for its turn, and where its outcome goes."""

    def __init__(self, work: Callable[[Connection], Any], *, alone: bool) -> None:
        self.work = work
        self.alone = alone
        self.future: Future[Any] = Future()
        self.result: Any = None
        self.error: BaseException | None = None


class Load(NamedTuple):
    """How busy a database is, as one process sees it."""

    used: int
    idle: int
    """Connections of the pool."""
    waiting_writes: int
    wal_bytes: int
    """Of SQLite's write-ahead log; 0 elsewhere."""


class _CommitFailed(Exception):
    """Nobody knows what became of the transaction; it must not be run again."""


class Database:
    """Of the newest schema, or else `migrates` brings it there; `close()` ends its threads.

    `retries` is told the kind of every transaction that is run again, `batches` of how many writes
    went into a commit. Raises ConfigurationError if there is no such database or its schema does
    not fit, MissingExtra if its driver is not installed.
    """

    def __init__(
        self,
        url: str,
        *,
        migrates: bool = True,
        retries: Callable[[Kind], None] = lambda kind: None,
        batches: Callable[[int], None] = lambda size: None,
    ) -> None:
        self._backend = _reachable(url, schema.migrate if migrates else schema.check)
        self._retries, self._batches = retries, batches
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._readers = ThreadPoolExecutor(READERS, "fedpress-read")
        self._closing = threading.Event()
        self._full = Outage(_log, MAKE_ROOM, "there is room for the database again")
        self._away = Outage(
            _log,
            "%s; see whether the database runs and can be reached: all goes on by itself then",
            "the database answers again",
            quiet=_SURE,
        )
        self._deaf = Outage(
            _log,
            "not listening to the database for a while: %s",
            "listening to the database again",
            quiet=0.0,
        )
        self._hearers: list[Callable[[str | None], None]] = []
        self._listener: threading.Thread | None = None
        self._writer = threading.Thread(target=self._write_jobs, name="fedpress-write", daemon=True)
        self._writer.start()

    @property
    def dialect(self) -> Literal["sqlite", "postgresql"]:
        return self._backend.dialect

    @property
    def is_shared(self) -> bool:
        """Whether other servers may write to it."""
        return self.dialect == "postgresql"

    def load(self) -> Load:
        """Asks nobody but this process and its file system."""
        pool = self._backend.writes.pool
        used = pool.checkedout() if isinstance(pool, sa.pool.QueuePool) else 0
        idle = pool.checkedin() if isinstance(pool, sa.pool.QueuePool) else 0
        return Load(used, idle, self._jobs.qsize(), self._backend.log_bytes())

    async def read(self, work: Callable[[Connection], T]) -> T:
        """What `work` makes of a consistent view, in a thread; Unavailable without a database."""

        def run() -> T:
            with self._backend.reads.connect() as connection:
                result = work(connection)
                connection.commit()  # PostgreSQL would count the end of every read as a rollback
                return result

        def patiently() -> T:
            try:
                found = self._tried(lambda again: run(), "read")
            except Exception as exc:
                failure = self._failure(exc)
                if failure is exc:
                    raise
                raise failure from exc
            self._away.worked()
            return found

        return await asyncio.get_running_loop().run_in_executor(self._readers, patiently)

    async def write(self, work: Callable[[Connection], T], *, locks: bool = False) -> T:
        """What `work` makes in a transaction; durable when this returns, undone if it raises.

        Nothing that `work` reads changes before it is written: no other server writes meanwhile.
        With `locks`, `work` sees to that itself: it locks every row on which what it writes
        depends (`with_for_update()`), and then writes of other servers that do the same go on
        beside it.

        Raises Unavailable if the database does not answer; if that was while it committed, what
        became of it is not known. Cancelling the caller does not undo it: shield a write whose
        outcome must be known.
        """
        job = _Job(work, alone=not locks)
        self._jobs.put(job)
        result: T = await asyncio.wrap_future(job.future)
        return result

    def notify(self, connection: Connection, topic: str) -> None:
        """Wake other servers' listeners when this transaction commits. A hint that may be lost:
        what must be known is read."""
        self._backend.notify(connection, topic)

    def listen(self, heard: Callable[[str | None], None]) -> None:
        """Tell `heard` every topic, in a thread of its own; None when some may have been missed,
        and once at the beginning.

        With SQLite there is nobody to listen to, and no thread.
        """
        if not self.is_shared:
            return
        self._hearers.append(heard)
        if self._listener is None:
            self._listener = threading.Thread(
                target=self._listen, name="fedpress-listen", daemon=True
            )
            self._listener.start()
        else:
            heard(None)

    def close(self) -> None:
        self._closing.set()
        self._jobs.put(None)
        self._writer.join()
        if self._listener is not None:
            self._listener.join()
        self._readers.shutdown()
        self._backend.dispose()

    def _listen(self) -> None:
        def tell(topic: str | None) -> None:
            self._deaf.worked()
            for heard in tuple(self._hearers):
                heard(topic)

        while not self._closing.is_set():
            try:
                self._backend.listen(tell, self._closing.is_set)
            except Exception as exc:
                self._deaf.failed(_said(exc))
            self._closing.wait(1.0)

    def _tried(self, attempt: Callable[[bool], T], kind: Kind) -> T:
        """`attempt`, told whether it is not the first, again where that may help."""
        began = time.monotonic()
        for number, pause in enumerate(_PAUSES):
            try:
                return attempt(number > 0)
            except Exception as exc:
                is_late = time.monotonic() - began > _PATIENCE
                if is_late or not self._backend.is_passing(exc):
                    raise
            self._retries(kind)
            time.sleep(pause * random.uniform(0.5, 1.5))  # noqa: S311
        return attempt(True)

    def _write_jobs(self) -> None:
        stopping = False
        while not stopping:
            batch = [self._jobs.get()]
            while batch[-1] is not None and len(batch) < _COMMIT_TOGETHER:
                try:
                    batch.append(self._jobs.get_nowait())
                except queue.Empty:
                    break
            stopping = batch[-1] is None
            jobs = [job for job in batch if job and job.future.set_running_or_notify_cancel()]
            if jobs:
                self._write_batch(jobs)

    def _write_batch(self, batch: list[_Job]) -> None:
        try:
            self._tried(lambda again: self._run(batch, again), "write")
            self._batches(len(batch))
        except Exception as exc:
            cause = exc.__cause__ if isinstance(exc, _CommitFailed) else exc
            for job in batch:
                job.error = job.error or cause
        for job in batch:
            if job.error is not None:
                job.future.set_exception(self._failure(job.error))
            else:
                self._full.worked()
                self._away.worked()
                job.future.set_result(job.result)

    def _failure(self, exc: BaseException) -> BaseException:
        """What a caller is told; an outage is told of in the log, too."""
        failure = self._backend.translated(exc)
        if failure is not exc and isinstance(failure, Unavailable):
            outage = self._full if isinstance(failure, StorageFull) else self._away
            outage.failed(f"{failure.detail} ({_said(exc)})")
        return failure

    def _run(self, batch: list[_Job], again: bool) -> None:
        """All of the batch in one transaction. What locks rows in another's way cannot do so a
        second time: then the batch runs alone."""
        for job in batch:
            job.result = job.error = None
        with (
            self._backend.writes.connect() as connection,
            connection.begin() as transaction,
        ):
            self._backend.take_turn(connection, alone=again or any(job.alone for job in batch))
            for job in batch:
                try:
                    # One that is alone is undone with the transaction.
                    with connection.begin_nested() if len(batch) > 1 else nullcontext():
                        job.result = job.work(connection)
                except Exception as exc:
                    if self._backend.is_passing(exc) or self._backend.is_undone(connection):
                        raise
                    job.error = exc
                    if len(batch) == 1:
                        transaction.rollback()
                        return
            try:
                failpoints.reach("commit-due")
                self._commit(transaction)
                failpoints.reach("committed")
            except Exception as exc:
                raise _CommitFailed from exc

    def _commit(self, transaction: sa.engine.RootTransaction) -> None:
        transaction.commit()


def migrate(url: str) -> tuple[str | None, str]:
    """Bring a database up to date: the versions of its schema before and after.

    Raises as `Database` does.
    """
    versions: list[tuple[str | None, str]] = []
    _reachable(url, lambda backend: versions.append(schema.migrate(backend))).dispose()
    return versions[0]


def _reachable(url: str, prepare: Callable[[Backend], Any]) -> Backend:
    backend = opened(url)
    try:
        prepare(backend)
    except sa.exc.OperationalError as exc:
        backend.dispose()
        raise ConfigurationError(
            f"the {backend.dialect} database cannot be used: {_said(exc)}",
            hint="look at FEDPRESS_DATABASE_URL, and whether the database runs",
        ) from exc
    except BaseException:
        backend.dispose()
        raise
    return backend


def _said(exc: BaseException) -> str:
    """The driver's own sentence, without the statement."""
    orig = getattr(exc, "orig", None) or exc
    return " ".join(str(orig).split())[:300]
