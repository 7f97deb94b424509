"""Database access: transactions that are durable when they return.

Writes run one at a time in their own thread, and waiting writes share one commit (group commit),
since a commit costs a disk sync. Reads run concurrently. The callback of a write may run more than
once, after a rollback, so it must depend only on what it reads in its transaction.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from fedpress_protocols.errors import ConfigurationError, ServerError, StorageFull, Unavailable
from fedpress_server import failpoints
from fedpress_server.observing.outages import MAKE_ROOM, Outage
from fedpress_server.storage import schema
from fedpress_server.storage.engines import READERS, RESTORE, Backend, damage, opened

_log = logging.getLogger(__name__)

T = TypeVar("T")
Kind = Literal["read", "write"]
_COMMIT_TOGETHER = 64
_PAUSES = (0.0, 0.03, 0.1, 0.3)
_PATIENCE = 15.0
_SURE = 5.0
"""Seconds without a failure after which the end of an outage is logged."""


class _Job:
    """A pending write and the future of its outcome."""

    def __init__(self, work: Callable[[Connection], Any], *, alone: bool) -> None:
        self.work = work
        self.alone = alone
        self.future: Future[Any] = Future()
        self.result: Any = None
        self.error: BaseException | None = None


class Load(NamedTuple):
    """The load of a database as seen by one process."""

    used: int
    idle: int
    """Pool connections."""
    waiting_writes: int
    wal_bytes: int
    """Bytes of SQLite's write-ahead log; 0 for other databases."""


class _CommitFailed(Exception):
    """The outcome of the commit is unknown; the transaction must not be retried."""


class Database:
    """A database with the newest schema, after migration with `migrates`; `close()` ends its
    threads.

    `retries` is called with the kind of every retried transaction, `batches` with the number of
    writes of a commit. Raises ConfigurationError if the database does not exist or has another
    schema, MissingExtra if its driver is not installed.
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
        self._full = Outage(_log, MAKE_ROOM, "the database has disk space again")
        self._away = Outage(
            _log,
            "%s; check that the database runs and is reachable: the server then resumes by itself",
            "the database answers again",
            quiet=_SURE,
        )
        self._deaf = Outage(
            _log,
            "interrupted listening to the database: %s",
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
        """The current load, from this process and its file system only."""
        pool = self._backend.writes.pool
        in_use = pool.checkedout() if isinstance(pool, sa.pool.QueuePool) else 0
        idle = pool.checkedin() if isinstance(pool, sa.pool.QueuePool) else 0
        return Load(in_use, idle, self._jobs.qsize(), self._backend.log_bytes())

    async def read(self, work: Callable[[Connection], T], *, snapshot: bool = True) -> T:
        """Run `work` on a consistent snapshot in a thread; Unavailable without a database.

        Without a `snapshot` each statement of `work` is by itself, and has no transaction around
        it that would have to be begun and ended.
        """
        engine = self._backend.reads if snapshot else self._backend.looks

        def run() -> T:
            with engine.connect() as connection:
                result = work(connection)
                connection.commit()  # otherwise PostgreSQL counts every read as a rollback
                return result

        def patiently() -> T:
            try:
                result = self._tried(lambda is_retry: run(), "read")
            except Exception as exc:
                failure = self._failure(exc)
                if failure is exc:
                    raise
                raise failure from exc
            self._away.worked()
            return result

        return await asyncio.get_running_loop().run_in_executor(self._readers, patiently)

    async def write(self, work: Callable[[Connection], T], *, locks: bool = False) -> T:
        """Run `work` in a transaction; durable when this returns, rolled back if it raises.

        The transaction is exclusive among all servers, so nothing that `work` reads changes before
        the commit. With `locks`, `work` itself locks every row on which its writes depend
        (`with_for_update()`), and runs concurrently with such writes of other servers.

        Raises Unavailable if the database does not answer; during the commit, the outcome is
        unknown. Cancelling the caller does not roll it back: shield a write whose outcome must be
        known.
        """
        job = _Job(work, alone=not locks)
        self._jobs.put(job)
        result: T = await asyncio.wrap_future(job.future)
        return result

    def notify(self, connection: Connection, topic: str) -> None:
        """Notify other servers' listeners when this transaction commits. Only a hint, which may be
        lost."""
        self._backend.notify(connection, topic)

    def listen(self, callback: Callable[[str | None], None]) -> None:
        """Call `callback` with every notified topic, in its own thread; with None when some may
        have been missed, and once at the start.

        With SQLite there are no other servers, and no thread.
        """
        if not self.is_shared:
            return
        self._hearers.append(callback)
        if self._listener is None:
            self._listener = threading.Thread(
                target=self._listen, name="fedpress-listen", daemon=True
            )
            self._listener.start()
        else:
            callback(None)

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
            for callback in tuple(self._hearers):
                callback(topic)

        while not self._closing.is_set():
            try:
                self._backend.listen(tell, self._closing.is_set)
            except Exception as exc:
                self._deaf.failed(_said(exc))
            self._closing.wait(1.0)

    def _tried(self, attempt: Callable[[bool], T], kind: Kind) -> T:
        """Run `attempt` (its argument: whether it is a retry), and retry it after transient
        errors."""
        start = time.monotonic()
        for number, pause in enumerate(_PAUSES):
            try:
                return attempt(number > 0)
            except Exception as exc:
                is_late = time.monotonic() - start > _PATIENCE
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
            self._tried(lambda is_retry: self._run(batch, is_retry), "write")
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
        """The error for the caller; an outage is also logged."""
        failure = self._backend.translated(exc)
        if failure is not exc and isinstance(failure, Unavailable):
            outage = self._full if isinstance(failure, StorageFull) else self._away
            outage.failed(f"{failure.detail} ({_said(exc)})")
        return failure

    def _run(self, batch: list[_Job], is_retry: bool) -> None:
        """Run the batch in one transaction. A retry after a deadlock takes the exclusive lock, so
        it cannot deadlock again."""
        for job in batch:
            job.result = job.error = None
        with (
            self._backend.writes.connect() as connection,
            connection.begin() as transaction,
        ):
            self._backend.take_turn(connection, alone=is_retry or any(job.alone for job in batch))
            for job in batch:
                try:
                    # A single write is rolled back with the transaction.
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
    """Migrate a database on which no server runs; returns the schema versions before and after.

    Raises like `Database`, and ConfigurationError if servers of the old schema run.
    """
    versions: list[tuple[str | None, str]] = []

    def prepare(backend: Backend) -> None:
        versions.append(schema.migrate(backend, while_running=False))

    _reachable(url, prepare).dispose()
    return versions[0]


@contextmanager
def damage_refused() -> Iterator[None]:
    """For a start and for commands, which fail in the same way again: ConfigurationError if they
    meet damage behind what opening looks at."""
    try:
        yield
    except ServerError as exc:
        if exc.__cause__ is None or not damage(exc.__cause__):
            raise
        raise ConfigurationError(exc.detail, hint=exc.hint) from exc


def _reachable(url: str, prepare: Callable[[Backend], Any]) -> Backend:
    backend = opened(url)
    try:
        prepare(backend)
    except sa.exc.DatabaseError as exc:
        backend.dispose()
        if (error := _unusable(backend, exc)) is None:
            raise
        raise error from exc
    except BaseException:
        backend.dispose()
        raise
    return backend


def _unusable(backend: Backend, exc: sa.exc.DatabaseError) -> ConfigurationError | None:
    """The error of a database that cannot be used as it is; None for any other."""
    file = Path(backend.reads.url.database or "")
    if found := damage(exc):
        return ConfigurationError(f"{file} is damaged: {found}", hint=RESTORE)
    if not isinstance(exc, sa.exc.OperationalError):
        return None
    if backend.dialect == "sqlite" and not file.parent.is_dir():
        return ConfigurationError(
            f"the database's folder {file.parent} does not exist",
            hint="check FEDPRESS_DATA_DIR and FEDPRESS_DATABASE_URL; `fedpress server run` makes a "
            "new data folder",
        )
    return ConfigurationError(
        f"the {backend.dialect} database cannot be used: {_said(exc)}",
        hint="check FEDPRESS_DATABASE_URL, and that the database runs",
    )


def _said(exc: BaseException) -> str:
    """The driver's own message, without the statement."""
    orig = getattr(exc, "orig", None) or exc
    return " ".join(str(orig).split())[:300]
