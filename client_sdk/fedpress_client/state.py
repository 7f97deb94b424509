"""The device's folder: its key, its ledgers, one process at a time.

    identity.json, key.pem            who this device is, and the server's key that it pinned
    next-key.pem, rotations.json      a change of key under way, and those before; see device_key.py
    bases/                            tensors that no task trains, by digest; see bases.py
    tasks/<task>/ledger.safetensors   the account, see ledger.py
    tasks/<task>/models/              a few models by digest, to spare a download
    tasks/<task>/durations.json       how long the last assignments took, see failures.py
    tasks/<task>/published            the newest published model, for inference; see published.py
    tasks/<task>/own.safetensors      what the device made of the task's last model
    tasks/<task>/own.of               the digest of that model
    tasks/<task>/session              secrets of the masked session under way; once there is one,
                                      the task's clear plans are declined
    tasks/<task>/outgoing, .json      the body being encoded, which upload its first parts are in
    tasks/<task>/lock, lock           held while in use; they never hold data

Every file that matters is written whole beside the old one, synced, and renamed over it, so that at
any moment one of the two is there in full. Owner and mode are checked where files have them.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import stat
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from fedpress_client.disk_budget import DiskBudget
from fedpress_client.ledger import Ledger
from fedpress_client.ledger_file import parts_of
from fedpress_protocols.errors import (
    ConfigurationError,
    StateCorrupt,
    StateLocked,
    StateWriteError,
)
from fedpress_protocols.local_files import (
    OPEN_FLAGS,
    locked,
    open_lock,
    remove_file,
    replace_file,
    sync_folder,
    try_lock,
)
from fedpress_protocols.signatures import DeviceKey
from fedpress_protocols.validation import format_validation_errors

_log = logging.getLogger(__name__)

_SWEPT = 3600.0
"""Seconds after which nobody writes a temporary file any more."""
_LEDGER = "ledger.safetensors"
_OWN = "own.safetensors"
_WINDOWS_DEVICES = {"con", "prn", "aux", "nul"} | {
    f"{port}{number}" for port in ("com", "lpt") for number in range(10)
}


class Identity(BaseModel):
    """What enrolment settled: `server_key` is pinned, every receipt must be signed by it. Where the
    device has followed it to another, `former_server_key` is the one before, left at `followed_at`
    (Unix seconds), and `left_server_keys` are all that a chain has led away from, the oldest first.

    For the masked lane: the `population`, the key of its enrolment `authority`, pinned too, and the
    device's certificate; empty until they are needed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str
    client_id: str
    server_key: str
    population: str = ""
    authority: str = ""
    certificate: str = ""
    former_server_key: str = ""
    followed_at: float = 0.0
    left_server_keys: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StateDirectory:
    """A folder that only its owner may enter."""

    path: Path
    budget: DiskBudget

    @classmethod
    def open(cls, path: str | os.PathLike[str], max_bytes: int | None = None) -> StateDirectory:
        """Make or take over `path`, which holds `max_bytes` at most; raises ConfigurationError if
        it cannot be made private."""
        folder = Path(path).expanduser().absolute()
        budget = DiskBudget(folder, max_bytes)
        _private_folder(folder)
        return cls(folder, budget)

    def key(self) -> DeviceKey:
        """The device's key, made and made durable on first use; raises StateCorrupt."""
        path = self.path / "key.pem"
        hint = f"restore it, or move all of {self.path} away and enrol anew with a new token"
        with self.alone():
            if not path.exists():
                if (self.path / "identity.json").exists():  # the server knows it by the lost key
                    raise StateCorrupt(f"{path} is missing beside identity.json", hint=hint)
                write_durably(path, DeviceKey.generate().to_pem())
        _private(path, 0o600)
        try:
            return DeviceKey.from_pem(path.read_bytes())
        except ConfigurationError as exc:
            raise StateCorrupt(f"{path}: {exc.detail}", hint=hint) from exc

    def identity(self) -> Identity | None:
        """None before enrolment; raises StateCorrupt."""
        path = self.path / "identity.json"
        if not path.exists():
            return None
        try:
            return Identity.model_validate_json(path.read_bytes())
        except ValidationError as exc:
            raise StateCorrupt(
                f"{path}: {format_validation_errors(exc)}",
                hint="restore it, or remove it and enrol again: the key is kept",
            ) from exc

    def enrolled(self, identity: Identity) -> None:
        """Remember `identity`, durably."""
        # An earlier release cannot read them.
        since = {"former_server_key", "followed_at", "left_server_keys"}
        unused = {name for name in since if not getattr(identity, name)}
        text = identity.model_dump_json(exclude=unused)
        write_durably(self.path / "identity.json", text.encode())

    @contextmanager
    def alone(self) -> Iterator[None]:
        """One at a time makes a key or enrols; waits for the other."""
        with locked(_open_lock(self.path / "lock")):
            yield

    def task_path(self, task: str) -> Path:
        """The folder of one task, which may not exist."""
        # Names of devices: Windows has no files called that. No task's name has a plus.
        is_device = sys.platform == "win32" and task.lower() in _WINDOWS_DEVICES
        return self.path / "tasks" / (f"{task}+" if is_device else task)

    def task_folder(self, task: str) -> Path:
        """The folder of one task, made if need be."""
        folder = self.task_path(task)
        _private_folder(folder.parent)
        _private_folder(folder)
        return folder

    def peek(self, task: str) -> Ledger | None:
        """A task's account as last saved, without its lock; None if there is none. Raises
        StateCorrupt."""
        try:
            return Ledger.from_bytes((self.task_path(task) / _LEDGER).read_bytes())
        except FileNotFoundError:
            return None

    def account_stamp(self, task: str) -> tuple[int, int] | None:
        """Another one after each time that the task's account was saved; None if there is none."""
        try:
            status = (self.task_path(task) / _LEDGER).stat()
        except FileNotFoundError:
            return None
        return status.st_mtime_ns, status.st_ino

    def own_model(self, task: str) -> bytes | None:
        """What the device made of the task's last model, without the lock; None if nothing."""
        try:
            return (self.task_path(task) / _OWN).read_bytes()
        except FileNotFoundError:
            return None

    def task(self, task: str) -> TaskFiles:
        """Take hold of one task's state; raises StateLocked if another holds it."""
        folder = self.task_folder(task)
        _private_folder(folder / "models")
        file = _open_lock(folder / "lock")
        if not try_lock(file):
            os.close(file)
            raise StateLocked(f"{folder} is in use")
        return TaskFiles(task, folder, file, self.budget)


class TaskFiles:
    """One task's files, locked until `close`."""

    def __init__(self, task: str, folder: Path, lock: int, budget: DiskBudget) -> None:
        self.folder, self._budget = folder, budget
        self._task = task
        self._lock: int | None = lock
        self._path = folder / _LEDGER

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def load(self, client_id: str) -> Ledger:
        """The account as last saved, a new one before; raises StateCorrupt.

        There is no going back to an older account: what was sent since would be sent twice.
        """
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return Ledger(self._task, client_id)
        try:
            ledger = Ledger.from_bytes(data)
            if (ledger.task, ledger.client_id) != (self._task, client_id):
                raise StateCorrupt(
                    f"it belongs to client {ledger.client_id} in task {ledger.task}, not to client "
                    f"{client_id} in task {self._task}"
                )
        except StateCorrupt as exc:
            raise StateCorrupt(
                f"{self._path}: {exc.detail}",
                hint=exc.hint
                or "move it away to begin the task anew; what it still held is lost to the model",
            ) from exc
        return ledger

    def save(self, ledger: Ledger) -> None:
        """Durable when this returns; until then the account before is what there is."""
        parts = parts_of(ledger)
        self._budget.require(self._path, sum(map(len, parts)))
        write_durably(self._path, *parts)

    def model(self, digest: str) -> bytes | None:
        """A model kept here, None if there is none or its bytes have changed."""
        path = self._model_path(digest)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        if hashlib.sha256(data).hexdigest() != digest:
            remove_file(path)
            return None
        return data

    def keep_model(self, digest: str, data: bytes) -> None:
        """Keep it to spare a download; a full disk is no reason to stop."""
        path = self._model_path(digest)
        if not self._budget.admits(path, len(data)):
            return
        try:
            write_cache(path, data)
        except OSError as exc:
            _log.warning("model %s not kept: %s", digest[:12], exc)

    def used(self, digest: str) -> None:
        """Have the model kept here come first among `newest`."""
        with suppress(OSError):
            os.utime(self._model_path(digest))

    def newest(self) -> list[str]:
        """The digests of the files kept, the last used first; not all need be models."""
        models = []
        for path in self._kept():
            with suppress(FileNotFoundError):  # another process has made room on the disk
                models.append((path.stat().st_mtime_ns, path.stem))
        return [digest for _, digest in sorted(models, reverse=True)]

    def _kept(self) -> list[Path]:
        return [path for path in (self.folder / "models").iterdir() if path.suffix != ".tmp"]

    def drop_models(self, besides: Collection[str | None]) -> None:
        """Remove every model but these."""
        for path in (self.folder / "models").iterdir():
            if path.stem not in besides:
                remove_file(path)

    def session(self) -> bytes | None:
        """The record of the masked session under way; None before the first."""
        path = self.folder / "session"
        return path.read_bytes() if path.exists() else None

    def is_masked(self) -> bool:
        """Whether the device ever joined a masked round of the task: the record stays, emptied."""
        return (self.folder / "session").exists()

    def save_session(self, data: bytes) -> None:
        """Durable when this returns."""
        write_durably(self.folder / "session", data)

    def begin_outgoing(self) -> int:
        """An empty file for a body that is being encoded, open for writing."""
        self.end_outgoing()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | OPEN_FLAGS
        return os.open(self.folder / "outgoing", flags, 0o600)

    def outgoing_part(self, offset: int, max_bytes: int) -> bytes:
        """Up to `max_bytes` of the body from `offset` on."""
        with (self.folder / "outgoing").open("rb") as file:
            file.seek(offset)
            return file.read(max_bytes)

    def name_outgoing(self, assignment: str, partial: str) -> None:
        """Durably: the outgoing body's first parts are in this upload of the server."""
        document = json.dumps({"assignment": assignment, "partial": partial})
        write_durably(self.folder / "outgoing.json", document.encode())

    def outgoing(self) -> tuple[str, str] | None:
        """The assignment and the upload that `name_outgoing` wrote; None too if that is damaged: an
        upload that nobody drops expires by itself."""
        try:
            document = json.loads((self.folder / "outgoing.json").read_bytes())
            return str(document["assignment"]), str(document["partial"])
        except (FileNotFoundError, ValueError, TypeError, KeyError):
            return None

    def end_outgoing(self) -> None:
        for name in ("outgoing.json", "outgoing"):
            remove_file(self.folder / name)

    def durations(self) -> bytes | None:
        """The bytes that `keep_durations` wrote; None before the first."""
        path = self.folder / "durations.json"
        return path.read_bytes() if path.exists() else None

    def keep_durations(self, data: bytes) -> None:
        """Store the durations of assignments, see `failures.Durations`."""
        write_durably(self.folder / "durations.json", data)

    def has_own_model(self, digest: str) -> bool:
        """Whether the device has made its own model of the task's model of this digest."""
        path = self.folder / "own.of"
        return path.exists() and path.read_text() == digest

    def keep_own_model(self, digest: str, data: bytes) -> None:
        """Keep what the device made of the model of this digest; durable when this returns."""
        path = self.folder / _OWN
        self._budget.require(path, len(data))
        write_durably(path, data)
        # Last: after a crash between the two it is made again.
        write_durably(self.folder / "own.of", digest.encode())

    def _model_path(self, digest: str) -> Path:
        return self.folder / "models" / f"{digest}.safetensors"


def write_durably(path: Path, *parts: bytes | memoryview) -> None:
    """Replace `path` by `parts` in one step that survives a power cut; mode 0600.

    Raises StateWriteError, and then leaves nothing of them behind that takes room.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        _write(temporary, *parts)
        replace_file(temporary, path)
        sync_folder(path.parent)
    except OSError as exc:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise not_written(path, exc, sum(map(len, parts))) from exc


def not_written(path: Path, exc: OSError, num_bytes: int) -> StateWriteError:
    """`num_bytes` could not be written to `path`: why, and what to do about it."""
    if exc.errno in (errno.ENOSPC, errno.EDQUOT):
        hint = f"free {num_bytes:,} bytes there, or move the state directory to another disk"
    elif exc.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        hint = "the device's user must be able to write there"
    else:
        hint = "check the disk"
    about = f"{path} cannot be written: {exc.strerror or exc}"
    return StateWriteError(f"{about}; what it held before is unchanged", hint=hint)


def write_cache(path: Path, *parts: bytes | memoryview) -> None:
    """Replace `path` by `parts` in one step, whatever other processes do there; mode 0600. Not
    synced: what a power cut tears has to fail its digest. Raises OSError, and then leaves nothing
    behind."""
    descriptor, name = tempfile.mkstemp(".tmp", f"{path.name}.", path.parent)
    temporary = Path(name)
    try:
        with open(descriptor, "wb") as file:
            file.writelines(parts)
        replace_file(temporary, path)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def sweep(folder: Path) -> None:
    """Remove what processes that were killed left of `write_cache` in `folder`."""
    begun = time.time() - _SWEPT
    for path in folder.iterdir():
        with suppress(OSError):
            if path.suffix == ".tmp" and path.stat().st_mtime < begun:
                path.unlink()


def _write(path: Path, *parts: bytes | memoryview) -> None:
    # What a crash left under this name is of no use to anyone.
    remove_file(path)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | OPEN_FLAGS, 0o600)
    try:
        for part in parts:
            rest = memoryview(part)
            while rest:
                rest = rest[os.write(file, rest) :]
        os.fsync(file)
    finally:
        os.close(file)


def _open_lock(path: Path) -> int:
    try:
        return open_lock(path)
    except OSError as exc:
        raise not_written(path, exc, 0) from exc


def _private_folder(path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise ConfigurationError(
            f"{path} is not a folder", hint="name a folder for the device's state"
        )
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        for folder in reversed(missing):
            folder.mkdir(mode=0o700, exist_ok=True)
            sync_folder(folder.parent)  # or a power cut could take the folder with all in it
    except OSError as exc:
        raise not_written(path, exc, 4096) from exc
    _private(path, 0o700)


def _private(path: Path, mode: int) -> None:
    """See to it that `path` is ours and that nobody else may read it."""
    status = os.lstat(path)
    if stat.S_ISLNK(status.st_mode):
        raise ConfigurationError(f"{path} is a link", hint="name the folder that it points to")
    if sys.platform == "win32":
        return  # see `local_files`
    if status.st_uid != os.geteuid():
        raise ConfigurationError(
            f"{path} belongs to user {status.st_uid}, not to {os.geteuid()}",
            hint="give this device a state directory of its own",
        )
    if stat.S_IMODE(status.st_mode) & 0o077:
        _log.warning("%s was open to others (mode %o)", path, stat.S_IMODE(status.st_mode))
        os.chmod(path, mode)
