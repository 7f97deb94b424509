"""What a client keeps from round to round, in files: its account, and its part in sessions."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from flwr.app import Context
from pydantic import ValidationError

from fedpress_client.ledger import Ledger
from fedpress_client.state import Identity, write_durably
from fedpress_protocols import flower
from fedpress_protocols.errors import StateCorrupt
from fedpress_protocols.faults import explained
from fedpress_protocols.signatures import DeviceKey

STATE_DIR = "fedpress-state-dir"
SEED = "fedpress-seed"
"""Names in the run's configuration, for what a mod was not told."""

_DEFAULT_DIR = "~/.fedpress/flower"


def state_folder(context: Context, state_dir: str | None) -> Path:
    """Where a client's files are: `state_dir`, or what the node's or the run's configuration has
    under STATE_DIR, or ~/.fedpress/flower."""
    named = context.run_config.get(STATE_DIR, _DEFAULT_DIR)
    folder = state_dir or str(context.node_config.get(STATE_DIR, named))
    return Path(folder).expanduser().absolute()


@dataclass(frozen=True)
class Account:
    """The files of one client in one run: `path` is the ledger's, the others lie beside it."""

    path: Path
    durable: bool

    @classmethod
    def of(
        cls, context: Context, folder: Path, task: str, client_id: str, *, durable: bool
    ) -> Account:
        """Where `context` says, or where a new one belongs."""
        if flower.RECORD in context.state:
            return cls(Path(str(context.state[flower.RECORD]["account"])), durable)
        path = folder / str(context.run_id) / task / f"{client_id}.account"
        return cls(path, durable)

    def load(self, task: str, client_id: str) -> Ledger:
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return Ledger(task, client_id)
        try:
            ledger = Ledger.from_bytes(data)
        except StateCorrupt as exc:
            raise StateCorrupt(f"{self.path}: {exc.detail}", hint=exc.hint) from exc
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
            raise StateCorrupt(f"{path}: {explained(exc)}") from exc

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
        temporary = path.with_name(path.name + ".tmp")
        temporary.unlink(missing_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
