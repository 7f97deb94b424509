"""The file store: files are complete and durable before any record refers to them.

`Payloads` is the interface of a store; `LocalPayloads` is a folder, `bucket` an S3 store shared by
several servers. A name has all of its bytes or does not exist. Names are made of digests and ids;
their content never changes.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
import secrets
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from fedpress_protocols.errors import NotFound, ServerError, StorageFull
from fedpress_protocols.local_files import sync_folder
from fedpress_protocols.model import Buffer
from fedpress_server import failpoints
from fedpress_server.observing.outages import FULL, MAKE_ROOM, Outage

_log = logging.getLogger(__name__)

_TEMPORARY = ".tmp"
_FOLDER_GONE = 10
"""Maximum retries for a folder that is dropped while a file is written there."""
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL
_BY_CONTENT = {"models", "optimizers", "artefacts", "bases", "uploads", "parts"}
_HEX = frozenset("0123456789abcdef")


class Payloads(ABC):
    """Durable files by names such as `models/<digest>`. Thread-safe; every method may block on a
    disk or a network, and raises Unavailable if the store is not reachable."""

    is_local: bool
    """Whether it is a local disk, without network latency."""

    scratch: Path
    """A local folder for temporary files of the process."""

    @property
    def was_away(self) -> bool:
        """Whether this process has found the store unreachable in the last minute, in which devices
        that were put off may not have come back."""
        return False

    @abstractmethod
    def put(self, name: str, data: bytes) -> None:
        """Write a file; durable when it returns. Raises StorageFull without leaving anything
        behind.

        An existing file under `name` is replaced (by the same bytes if names are digests), which
        resets its age.
        """

    def put_all(self, files: Sequence[tuple[str, bytes]]) -> list[Exception | None]:
        """Put several files; returns the error of each, or None, in order."""
        return [self._failure(name, data) for name, data in files]

    def _failure(self, name: str, data: bytes) -> Exception | None:
        try:
            self.put(name, data)
        except Exception as exc:
            return exc
        return None

    def put_file(self, name: str, path: Path) -> None:
        """Put the file at `path`, one of `temporary`; raises as `put` does."""
        self.put(name, path.read_bytes())

    @contextmanager
    def temporary(self) -> Iterator[Path]:
        """The path of a new file in `scratch`, which is removed at the end unless it was put."""
        path = self.scratch / f"{secrets.token_hex(8)}{_TEMPORARY}"
        try:
            path.touch(0o600)
            yield path
        finally:
            path.unlink(missing_ok=True)

    @abstractmethod
    def get(self, name: str) -> bytes:
        """Read a file; raises NotFound."""

    def mapped(self, name: str, above: int) -> Buffer:
        """The bytes of a file; one of more than `above` is mapped into memory. Raises NotFound."""
        if self.size(name) <= above:
            return self.get(name)
        with self.open(name) as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    @abstractmethod
    def open(self, name: str) -> BinaryIO:
        """Open a file, which stays readable even if the name is dropped; raises NotFound."""

    @abstractmethod
    def link(self, name: str) -> str:
        """The path, with a query if it needs one, under which a proxy of the store reads the file
        for a while."""

    @abstractmethod
    def size(self, name: str) -> int:
        """The length of the file in bytes; raises NotFound."""

    @abstractmethod
    def drop(self, name: str) -> None:
        """Remove a file or a folder, if it exists."""

    @abstractmethod
    def names(self, folder: str) -> Iterator[str]:
        """The files and folders directly in `folder`. Very recent ones may be missing."""

    @abstractmethod
    def settled(self, folder: str, older_than: float = 0.0) -> Iterator[str]:
        """The candidates for sweeping among `names`: older than `older_than` seconds, so that no
        server is about to write a row for them."""

    @abstractmethod
    def drop_settled(self, name: str, older_than: float = 0.0) -> None:
        """Remove the file if it is still one of `settled`: it may have been put again since."""

    @abstractmethod
    def sweep_temporaries(self) -> int:
        """Remove the temporary files of interrupted writes; only at startup, without writers."""

    @abstractmethod
    def check_writable(self) -> None:
        """Raise OSError, Unavailable or StorageFull if nothing can be written."""


class LocalPayloads(Payloads):
    """A store in a folder. A file is written under a temporary name, synced and renamed, and the
    folder is synced, so a name has all of its bytes even after a power failure."""

    is_local = True

    def __init__(self, root: Path) -> None:
        self.root = self.scratch = root
        self._named: set[str] = set()
        """Folders whose own entries are known to be durable."""
        self._full = Outage(_log, MAKE_ROOM, f"{root} has disk space again")
        self._make_folder(root)

    def path(self, name: str) -> Path:
        return self.root / name

    def put(self, name: str, data: bytes) -> None:
        for _ in range(_FOLDER_GONE):
            with suppress(FileNotFoundError):  # its folder was dropped concurrently
                return self._put(name, data)
        return self._put(name, data)

    def put_all(self, files: Sequence[tuple[str, bytes]]) -> list[Exception | None]:
        """Put several files, with one sync per folder. Failed files are retried one by one: a
        folder may have been dropped concurrently."""
        if len(files) < 2:
            return super().put_all(files)
        placed: dict[str, list[int]] = {}
        outcomes: dict[int, Exception | None] = {}
        for index, (name, data) in enumerate(files):
            try:
                placed.setdefault(self._place(name, data), []).append(index)
            except OSError:
                continue
            except Exception as exc:
                outcomes[index] = exc
        for folder, indices in placed.items():
            with suppress(OSError):
                sync_folder(folder)
                outcomes.update((index, _passed("file-kept")) for index in indices)
        return [
            outcomes[index] if index in outcomes else self._failure(name, data)
            for index, (name, data) in enumerate(files)
        ]

    def put_file(self, name: str, path: Path) -> None:
        place = self.path(name)
        with self._reporting_full():
            with path.open("rb+") as file:
                os.fsync(file.fileno())
            failpoints.reach("file-written")
            for tries in range(_FOLDER_GONE + 1):
                try:
                    self._make_folder(place.parent)
                    path.rename(place)
                    break
                except FileNotFoundError:  # its folder was dropped concurrently
                    if tries == _FOLDER_GONE:
                        raise
            sync_folder(place.parent)
        failpoints.reach("file-kept")

    def _put(self, name: str, data: bytes) -> None:
        with self._reporting_full():
            sync_folder(self._place(name, data))
        failpoints.reach("file-kept")

    @contextmanager
    def _reporting_full(self) -> Iterator[None]:
        """Raise StorageFull in place of the OSError of a full disk."""
        try:
            yield
        except OSError as exc:
            if exc.errno in FULL:
                full = StorageFull("no space is left on the server", retry_after=60)
                self._full.failed(f"{full.detail} ({self.root})")
                raise full from exc
            raise

    def _place(self, name: str, data: bytes) -> str:
        """Write, sync and rename a file; returns its folder, which is not synced yet.

        Paths are strings here: creating `Path`s takes longer than writing a small file.
        """
        place = f"{self.root}/{name}"
        folder = place.rpartition("/")[0]
        beside = f"{folder}/{secrets.token_hex(8)}{_TEMPORARY}"
        try:
            descriptor = self._opened(folder, beside)
            try:
                _write_all(descriptor, data)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            failpoints.reach("file-written")
            os.rename(beside, place)
            self._full.worked()
        except OSError:
            with suppress(FileNotFoundError):
                os.unlink(beside)
            raise
        return folder

    def _opened(self, folder: str, beside: str) -> int:
        if folder in self._named:
            with suppress(FileNotFoundError):  # it was dropped concurrently
                return os.open(beside, _NEW, 0o600)
        self._make_folder(Path(folder))
        return os.open(beside, _NEW, 0o600)

    def get(self, name: str) -> bytes:
        try:
            return self.path(name).read_bytes()
        except FileNotFoundError as exc:
            raise NotFound(f"no file {name}") from exc

    def open(self, name: str) -> BinaryIO:
        try:
            return self.path(name).open("rb")
        except FileNotFoundError as exc:
            raise NotFound(f"no file {name}") from exc

    def link(self, name: str) -> str:
        """The name: the proxy's folder is the store's."""
        return f"/{name}"

    def size(self, name: str) -> int:
        try:
            return self.path(name).stat().st_size
        except FileNotFoundError as exc:
            raise NotFound(f"no file {name}") from exc

    def _make_folder(self, folder: Path) -> None:
        """Create the folder and its parents, private and durable: the entry of one created by
        another thread may not be on disk yet."""
        if str(folder) in self._named and folder.is_dir():
            return
        is_ours = folder != self.root and folder.is_relative_to(self.root)
        if not is_ours and folder.is_dir():
            return
        self._make_folder(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
        sync_folder(folder.parent)
        self._named.add(str(folder))

    def _forget_folders(self, place: Path) -> None:
        stale = [each for each in list(self._named) if Path(each).is_relative_to(place)]
        self._named.difference_update(stale)

    def drop(self, name: str) -> None:
        place = self.path(name)
        if place.is_dir():
            self._forget_folders(place)
            shutil.rmtree(place, ignore_errors=True)
            self._forget_folders(place)
        else:
            place.unlink(missing_ok=True)

    def names(self, folder: str) -> Iterator[str]:
        place = self.path(folder)
        if place.is_dir():
            yield from (f"{folder}/{entry.name}" for entry in sorted(place.iterdir()))

    def settled(self, folder: str, older_than: float = 0.0) -> Iterator[str]:
        """All names at startup of the folder's only server; later those that are old enough. The
        age of a folder is that of its newest file."""
        before = time.time() - older_than
        for name in self.names(folder):
            if not older_than or self._touched(name) < before:
                yield name

    def drop_settled(self, name: str, older_than: float = 0.0) -> None:
        if not older_than or self._touched(name) < time.time() - older_than:
            self.drop(name)

    def _touched(self, name: str) -> float:
        try:
            return self.path(name).stat().st_mtime
        except FileNotFoundError:
            return time.time()

    def sweep_temporaries(self) -> int:
        paths = list(self.root.rglob(f"*{_TEMPORARY}"))
        for path in paths:
            path.unlink(missing_ok=True)
        return len(paths)

    def check_writable(self) -> None:
        self.put("probe", b"\n")


def put_by_digest(payloads: Payloads, name: Callable[[str], str], path: Path) -> tuple[str, int]:
    """Put a `temporary` file under the `name` of its SHA-256; returns that and its bytes."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        num_bytes = os.fstat(file.fileno()).st_size
    payloads.put_file(name(digest), path)
    return digest, num_bytes


def digest_in(name: str) -> str | None:
    """The SHA-256 in a name, for names that have one."""
    if name.partition("/")[0] not in _BY_CONTENT:
        return None
    last = name.rpartition("/")[2].partition(".")[0].rpartition("-")[2]
    return last if len(last) == 64 and _HEX.issuperset(last) else None


def check_digest(name: str, data: bytes) -> None:
    """Raise ServerError unless `data` matches the digest in `name`."""
    expected = digest_in(name)
    if expected is not None:
        actual = hashlib.sha256(data).hexdigest()
        if actual != expected:
            raise ServerError(f"{name} was read from the store with SHA-256 {actual}")


def _passed(point: str) -> Exception | None:
    """The error raised at a failpoint."""
    try:
        failpoints.reach(point)
    except Exception as exc:
        return exc
    return None


def _write_all(descriptor: int, data: bytes) -> None:
    remaining = memoryview(data)
    while remaining:
        remaining = remaining[os.write(descriptor, remaining) :]
