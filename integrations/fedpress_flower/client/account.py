"""Files that a client keeps from round to round: its account, and its state in sessions.

A SuperNode without authentication keys is another node to Flower after a restart. So an account is
named by what its owner's configuration says, DEVICE_ID or else partition-id, and by the node's id
where it says neither. Accounts of runs long over are removed when a new run begins.
"""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from flwr.app import Context
from pydantic import TypeAdapter, ValidationError

from fedpress_client.ledger import Ledger
from fedpress_client.state import Identity, write_cache, write_durably
from fedpress_flower import envelope
from fedpress_protocols.errors import ConfigurationError, Conflict, MalformedRequest, StateCorrupt
from fedpress_protocols.local_files import locked, open_lock
from fedpress_protocols.messages import Identifier
from fedpress_protocols.plan import Name
from fedpress_protocols.signatures import DeviceKey
from fedpress_protocols.validation import format_validation_errors

STATE_DIR = "fedpress-state-dir"
SEED = "fedpress-seed"
"""Names in the run's configuration, for what a mod was not told."""
DEVICE_ID = "fedpress-device-id"
"""In the node's configuration: under which name this device keeps its account."""
PARTITION = "partition-id"

KEEP_DAYS = 30.0
_DAY = 24 * 3600
_DEFAULT_DIR = "~/.fedpress/flower"
_DEVICE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")
_NAMES: TypeAdapter[tuple[str, str]] = TypeAdapter(tuple[Name, Identifier])
_SUFFIXES = (".account", ".session", ".identity", ".key", ".lock", ".tmp")
_log = logging.getLogger(__name__)


def state_folder(context: Context, state_dir: str | None) -> Path:
    """Return the folder of a client's files: `state_dir`, or what the node's or the run's
    configuration has under STATE_DIR, or ~/.fedpress/flower."""
    named = context.run_config.get(STATE_DIR, _DEFAULT_DIR)
    folder = state_dir or str(context.node_config.get(STATE_DIR, named))
    return Path(folder).expanduser().absolute()


def device_name(context: Context) -> str | None:
    """Under which name the device's owner wants its account, whatever Flower calls the node; None
    if the node's configuration does not say. Raises ConfigurationError."""
    named = context.node_config.get(DEVICE_ID)
    if named is None:
        partition = context.node_config.get(PARTITION)
        return None if partition is None else f"partition-{int(partition)}"
    if not _DEVICE.fullmatch(str(named)):
        raise ConfigurationError(
            f"{DEVICE_ID} is {named!r}, where 1 to 64 letters, digits, '.', '_' or '-' are due"
        )
    return f"device-{named}"


def collect(folder: Path, run_id: int, before: float) -> None:
    """Remove the files of other runs in which nothing was written since `before`, Unix seconds:
    a new run begins with nothing kept, so nothing reads them again."""
    for run in folder.iterdir() if folder.is_dir() else ():
        if not run.name.isdigit() or run.name == str(run_id):
            continue
        files = [path for path in run.glob("*/*") if path.suffix in _SUFFIXES]
        models = [path for path in run.glob("*/*") if path.suffix == ".models"]
        models += [path for path in run.glob("*/models") if path.is_dir()]
        with suppress(FileNotFoundError):  # another client removes them too
            if not files or max(path.stat().st_mtime for path in files + models) >= before:
                continue
            _log.info("removing the accounts of run %s, which is over", run.name)
            for path in models:
                shutil.rmtree(path, ignore_errors=True)
            for path in files:
                path.unlink(missing_ok=True)
        for empty in [*run.iterdir(), run]:
            with suppress(OSError):
                empty.rmdir()


def begun(ledger: Ledger, name: str, number: int, since: int) -> Ledger:
    """The account as the assignment `name` of round `number` finds it, before its receipts: in a
    new start that goes on from the one of the account, and from none before `since`, rounds count
    from 1 again; in another training all is new. Raises Conflict for a message that later ones
    overtook."""
    start = envelope.start_of(name)
    newest = max(map(envelope.start_of, [*ledger.pending, *ledger.settled]), default=start)
    if start < newest:
        raise Conflict(
            f"round {number} of the strategy's start {start} came after start {newest} had begun"
        )
    if start == newest and name not in ledger.pending and number <= ledger.round:
        raise Conflict(
            f"round {number} came after round {ledger.round} was answered",
            hint=f"if two nodes use one account, give each a {DEVICE_ID} of its own",
        )
    if start == newest:
        return ledger
    return replace(ledger, round=0) if newest >= since else ledger.restarted()


@dataclass(frozen=True)
class Account:
    """The files of one client in one run: `path` is the ledger's, the others lie beside it."""

    path: Path
    durable: bool

    @classmethod
    def of(
        cls,
        context: Context,
        folder: Path,
        task: str,
        client_id: str,
        *,
        durable: bool,
        name: str | None = None,
    ) -> Account:
        """Return the task's account that `context` names, or a new one under `name` or the client's
        id. Raises MalformedRequest for a task or a client that cannot be part of a path."""
        if envelope.RECORD in context.state:
            path = Path(str(context.state[envelope.RECORD]["account"]))
            if path.parent.name == task:
                return cls(path, durable)
        try:
            _NAMES.validate_python((task, client_id))
        except ValidationError as exc:
            raise MalformedRequest(f"a task {task!r} with a client {client_id!r}") from exc
        path = folder / str(context.run_id) / task / f"{name or client_id}.account"
        return cls(path, durable)

    @property
    def is_new(self) -> bool:
        return not self.path.exists()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """One process at a time; the others wait."""
        path = self.path.with_suffix(".lock")
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with locked(open_lock(path)):
            yield

    def warn_of_others(self) -> None:
        """Say so if a new account lies beside others, which may be this device's."""
        others = [path for path in self.path.parent.glob("*.account") if path.stem.isdigit()]
        if self.is_new and others:
            _log.warning(
                "%s is a new account beside %d of other nodes in this run. If this SuperNode was "
                "restarted without authentication keys, one of them was its own, and what waits "
                "there is lost to the model: start it with --node-config \"%s='NAME'\", or with "
                "authentication keys",
                self.path,
                len(others),
                DEVICE_ID,
            )

    def load(self, task: str, client_id: str, *, adopt: bool = False) -> Ledger:
        """The account; a new one before the first round. Raises StateCorrupt for another client's,
        unless the client may `adopt` it: it is then its own."""
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return Ledger(task, client_id)
        try:
            ledger = Ledger.from_bytes(data)
        except StateCorrupt as exc:
            raise StateCorrupt(f"{self.path}: {exc.detail}", hint=exc.hint) from exc
        if adopt and ledger.task == task:
            return replace(ledger, client_id=client_id)
        if (ledger.task, ledger.client_id) != (task, client_id):
            raise StateCorrupt(
                f"{self.path} belongs to client {ledger.client_id} in task {ledger.task}, not to "
                f"client {client_id} in task {task}"
            )
        return ledger

    def save(self, ledger: Ledger) -> None:
        self._write(self.path, ledger.to_bytes())

    def session(self) -> bytes | None:
        """The record of the masked session under way; None before the first."""
        path = self.path.with_suffix(".session")
        return path.read_bytes() if path.exists() else None

    def save_session(self, data: bytes) -> None:
        self._write(self.path.with_suffix(".session"), data)

    def identity(self) -> Identity | None:
        """Whom the client believes since its first masked round; None before."""
        path = self.path.with_suffix(".identity")
        if not path.exists():
            return None
        try:
            return Identity.model_validate_json(path.read_bytes())
        except ValidationError as exc:
            raise StateCorrupt(f"{path}: {format_validation_errors(exc)}") from exc

    def enrolled(self, identity: Identity) -> None:
        self._write(self.path.with_suffix(".identity"), identity.model_dump_json().encode())

    def key(self) -> DeviceKey:
        """The client's own key, made on first use."""
        path = self.path.with_suffix(".key")
        if not path.exists():
            self._write(path, DeviceKey.generate().to_pem())
        return DeviceKey.from_pem(path.read_bytes())

    def _write(self, path: Path, data: bytes) -> None:
        """In one step; mode 0600."""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self.durable:
            write_durably(path, data)
            return
        write_cache(path, data)
