"""Verification of a backup: whether it can be restored, and which of its parts are damaged."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from fedpress_protocols.audit import checked, end_of
from fedpress_protocols.errors import BrokenChain, ConfigurationError, FedpressError, NotFound
from fedpress_protocols.messages import RECEIPT_CONTEXT, SignedReceipt, TaskConfig
from fedpress_protocols.model import Model
from fedpress_protocols.signatures import DeviceKey, key_id_of, verify_document
from fedpress_server.aggregation.masked import Host
from fedpress_server.backup import snapshots
from fedpress_server.backup.archive import (
    DATABASE,
    FILES,
    KEYS,
    MANIFEST,
    BackedUp,
    Manifest,
    Reader,
    reader,
)
from fedpress_server.backup.taking import needed
from fedpress_server.coordination.journal import reopened
from fedpress_server.identity import audit
from fedpress_server.identity.membership import Authority
from fedpress_server.identity.rotation import replaced
from fedpress_server.identity.server_keys import known_key
from fedpress_server.identity.signing import SigningKeys, history
from fedpress_server.storage import database as door
from fedpress_server.storage import engines, records
from fedpress_server.storage.files import model_name
from fedpress_server.storage.payloads import digest_in
from fedpress_server.storage.tables import assignments

_CHUNK = 2**20
_MOST = 100
"""Maximum number of reported faults."""


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a verification. `faults` are sentences that start with the damaged part."""

    manifest: Manifest | None
    key_id: str
    """The id of the server's key, which signed manifest and receipts; empty if unknown."""
    num_receipts: int
    num_open: int
    """Open attempts in the backup, all replayed."""
    is_anothers: bool
    """Whether its server never had the expected key; this is one of the faults, too."""
    faults: tuple[str, ...]


def verify(place: Path, *, key_id: str = "") -> Report:
    """Verify every byte of a backup: the manifest and its signature, the size and digest of every
    file, the database as SQLite and as a server reads it, the files of all models, and the
    signatures of all receipts.

    `key_id` is the expected server key; without it the backup's own is trusted. Raises
    ConfigurationError if there is no backup.
    """
    with reader(place) as backup, tempfile.TemporaryDirectory() as scratch:
        verification = _Verification(backup, Path(scratch), key_id)
        verification.look()
        return Report(
            verification.manifest,
            key_id_of(verification.public) if verification.public else "",
            verification.num_receipts,
            verification.num_open,
            verification.is_anothers,
            tuple(verification.faults[:_MOST]),
        )


class _Verification:
    def __init__(self, backup: Reader, scratch: Path, key_id: str) -> None:
        self._backup = backup
        self._scratch = scratch
        self._key_id = key_id
        self.manifest: Manifest | None = None
        self.public: bytes | None = None
        self.num_receipts = 0
        self.num_open = 0
        self.is_anothers = False
        self.faults: list[str] = []

    def look(self) -> None:
        try:
            self.manifest, document = Manifest.parsed(self._backup.manifest())
        except NotFound:
            self.faults.append(f"{MANIFEST}: it is missing")
            return
        except ConfigurationError as exc:
            self.faults.append(exc.detail)
            return
        self.faults += self._files(self.manifest)
        whole = self._scratch / DATABASE
        if not self._opened(whole):
            return
        url = f"sqlite:///{whole}"
        backend = engines.opened(url)
        try:
            with backend.reads.connect() as connection:
                self._signatures(connection, document)
                self.faults += self._chain(connection)
                self.faults += self._led_to(connection)
                self.faults += self._attempts(connection)
        finally:
            backend.dispose()

    def _files(self, manifest: Manifest) -> Iterator[str]:
        listed = {entry.name for entry in manifest.files}
        for name in sorted(self._backup.names() - listed - {MANIFEST}):
            yield f"{name}: it is not in the manifest"
        for entry in manifest.files:
            try:
                with self._backup.open(entry.name) as file:
                    digest, num_bytes = hashlib.sha256(), 0
                    while chunk := file.read(_CHUNK):
                        digest.update(chunk)
                        num_bytes += len(chunk)
            except NotFound:
                yield f"{entry.name}: it is missing"
                continue
            except OSError as exc:
                yield f"{entry.name}: it cannot be read: {exc}"
                continue
            if num_bytes != entry.num_bytes:
                yield f"{entry.name}: {num_bytes} bytes, expected {entry.num_bytes}"
            elif digest.hexdigest() != entry.sha256:
                yield f"{entry.name}: its SHA-256 is not the manifest's"
            expected = digest_in(entry.name.removeprefix(FILES))
            if entry.name.startswith(FILES) and expected not in (None, entry.sha256):
                yield f"{entry.name}: its content does not match its name"

    def _opened(self, whole: Path) -> bool:
        """A copy of the database with the newest schema, if the database is intact."""
        try:
            with self._backup.open(DATABASE) as source, whole.open("wb") as file:
                shutil.copyfileobj(source, file, _CHUNK)
        except NotFound:
            return False
        errors = snapshots.faults(whole)
        self.faults += [f"{DATABASE}: {error}" for error in errors]
        if errors:
            return False
        try:
            door.migrate(f"sqlite:///{whole}")
        except (FedpressError, sa.exc.SQLAlchemyError) as exc:
            self.faults.append(f"{DATABASE}: {exc}")
            return False
        return True

    def _signatures(self, connection: Connection, document: dict[str, object]) -> None:
        self.public = known_key(connection, "server")
        if self.public is None:
            self.faults.append(f"{DATABASE}: it has no key of the server")
            return
        keys = {key_id_of(key): key for key in history(connection, self.public).keys}
        self.is_anothers = bool(self._key_id) and self._key_id not in keys
        if self.is_anothers:
            self.faults.append(
                f"{DATABASE}: the server's key is {key_id_of(self.public)}, expected {self._key_id}"
            )
        try:
            Manifest.check_signature(document, keys.get(str(document.get("key_id")), self.public))
        except FedpressError as exc:
            self.faults.append(f"{MANIFEST}: {exc.detail}")
        if (pem := f"{KEYS}server-key.pem") in self._backup.names():
            self._private_half(pem, self.public)
        row = assignments.c
        rows = sa.select(row.assignment, row.receipt).where(row.receipt.is_not(None))
        keys |= {key_id_of(key): key for key in replaced(connection)}
        for name, text in connection.execute(rows):
            self.num_receipts += 1
            fault = _receipt_fault(name, text, keys)
            if fault:
                self.faults.append(f"{DATABASE}: the receipt of assignment {name}: {fault}")

    def _private_half(self, name: str, public: bytes) -> None:
        try:
            with self._backup.open(name) as file:
                is_its = DeviceKey.from_pem(file.read(_CHUNK)).public == public
        except (FedpressError, ValueError) as exc:
            self.faults.append(f"{name}: {exc}")
            return
        if not is_its:
            self.faults.append(f"{name}: it is not the key that signed the receipts")

    def _chain(self, connection: Connection) -> Iterator[str]:
        try:
            end_of(checked(audit.entries(connection)))
        except BrokenChain as exc:
            yield f"{DATABASE}: the audit log was changed: {exc.detail}"

    def _led_to(self, connection: Connection) -> Iterator[str]:
        present = self._backup.names()
        try:
            names = sorted(needed(connection))
        except FedpressError as exc:
            yield f"{DATABASE}: its references cannot be read: {exc.detail}"
            return
        for name in names:
            if FILES + name not in present:
                yield f"{FILES}{name}: the records refer to it, but it is missing"

    def _attempts(self, connection: Connection) -> Iterator[str]:
        payloads = BackedUp(self._backup, self._scratch)
        nobody = DeviceKey.generate()
        host = Host(SigningKeys.of(nobody), Authority.here("fedpress", nobody))
        for record in records.task_records(connection):
            if record.state != "running":
                continue
            try:
                spec = Model.from_bytes(payloads.get(model_name(record.model))).spec
                config = TaskConfig.model_validate_json(record.config)
                reopened(connection, config, spec, payloads, host)
                self.num_open += 1
            except Exception as exc:  # whatever the error, this round cannot be resumed
                description = f"the open round of task {record.task!r} cannot be replayed"
                yield f"{DATABASE}: {description}: {exc}"


def _receipt_fault(name: str, text: str, keys: Mapping[str, bytes]) -> str:
    """The fault of a receipt, or ""; `keys` are the signing keys of this database by id."""
    try:
        signed = SignedReceipt.model_validate_json(text)
        document = signed.receipt.model_dump(mode="json")
        document |= {"key_id": signed.key_id, "signature": signed.signature}
        public = keys.get(signed.key_id)
        if public is None:
            return f"signed by key {signed.key_id[:22]!r}, which is not the server's"
        verify_document(document, public, context=RECEIPT_CONTEXT)
    except (FedpressError, ValueError) as exc:
        return str(exc)
    return "" if signed.receipt.assignment == name else "it belongs to another assignment"
