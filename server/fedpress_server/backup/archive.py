"""The format of a backup: a folder or a tar file, with a signed manifest.

    manifest.json         every other file with its size and SHA-256, signed by the server's key
    database.sqlite       the records, whatever database the server has
    files/...             models and all other files that the records refer to, by their names in
the store keys/...              only if requested

It is written to a temporary name and renamed once it is complete and durable, so a backup under its
final name is complete.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import secrets
import shutil
import tarfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, Self

from pydantic import Field, ValidationError

from fedpress_protocols.errors import ConfigurationError, NotFound
from fedpress_protocols.local_files import sync_folder
from fedpress_protocols.messages import Identifier
from fedpress_protocols.plan import Digest, Term
from fedpress_protocols.signatures import DeviceKey, sign_document, verify_document
from fedpress_protocols.validation import format_validation_errors
from fedpress_server.storage.payloads import Payloads

MANIFEST = "manifest.json"
DATABASE = "database.sqlite"
FILES = "files/"
KEYS = "keys/"
_CONTEXT = "fedpress backup v1"
_MAX_MANIFEST = 2**28
_CHUNK = 2**20
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*")


class Entry(Term):
    name: Annotated[str, Field(pattern=f"^{_NAME.pattern}$", max_length=512)]
    num_bytes: Annotated[int, Field(ge=0)]
    sha256: Digest


class Manifest(Term):
    """The contents of a backup. Everything committed before `began_at` is in it."""

    format: Literal[1] = 1
    backup: Identifier
    release: str
    """The fedpress release that created it."""
    revision: str
    """The schema version of its records."""
    dialect: Literal["sqlite", "postgresql"]
    """The dialect of the server's database."""
    began_at: int
    """Unix seconds."""
    files: tuple[Entry, ...]

    def to_bytes(self, key: DeviceKey) -> bytes:
        signed = sign_document(self.model_dump(mode="json"), key, context=_CONTEXT)
        return json.dumps(signed, indent=1).encode() + b"\n"

    @classmethod
    def parsed(cls, data: bytes) -> tuple[Self, dict[str, Any]]:
        """Parse a manifest; returns it with the document for `check_signature`.

        Raises ConfigurationError for any other content.
        """
        try:
            document = json.loads(data)
            plain = {k: v for k, v in document.items() if k not in ("key_id", "signature")}
            return cls.model_validate(plain), document
        except ValidationError as exc:
            raise ConfigurationError(
                f"{MANIFEST} is not a backup manifest: {format_validation_errors(exc)}"
            ) from exc
        except (ValueError, AttributeError, RecursionError) as exc:
            raise ConfigurationError(f"{MANIFEST} is not a backup manifest: {exc}") from exc

    @staticmethod
    def check_signature(document: dict[str, Any], public: bytes) -> None:
        """Verify the signature of `document`; raises InvalidSignature."""
        verify_document(document, public, context=_CONTEXT)


# Writing


class Writer(ABC):
    """Adds files in sequence; `commit` moves the backup to its place, `abandon` removes it."""

    def __init__(self, place: Path) -> None:
        self.entries: list[Entry] = []
        self._place = place
        self._beside = place.with_name(f".{place.name}.{secrets.token_hex(4)}.partial")

    def add(self, name: str, source: BinaryIO, num_bytes: int) -> Entry:
        """Add a file; raises ConfigurationError if `source` does not have `num_bytes`."""
        counting = _Counted(source)
        self._add(name, counting, num_bytes)
        if counting.num_bytes != num_bytes or source.read(1):
            raise ConfigurationError(
                f"{name} does not have the expected {num_bytes} bytes: it changed during the copy"
            )
        entry = Entry(name=name, num_bytes=num_bytes, sha256=counting.digest.hexdigest())
        self.entries.append(entry)
        return entry

    @abstractmethod
    def _add(self, name: str, source: _Counted, num_bytes: int) -> None: ...

    @abstractmethod
    def commit(self, manifest: bytes) -> None:
        """Make the backup durable and move it to its place."""

    @abstractmethod
    def abandon(self) -> None: ...


class _FolderWriter(Writer):
    def __init__(self, place: Path) -> None:
        super().__init__(place)
        self._beside.mkdir(mode=0o700)

    def _add(self, name: str, source: _Counted, num_bytes: int) -> None:
        path = self._beside / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "wb") as file:
            shutil.copyfileobj(source, file, _CHUNK)
            file.flush()
            os.fsync(descriptor)

    def commit(self, manifest: bytes) -> None:
        self._add(MANIFEST, _Counted(io.BytesIO(manifest)), len(manifest))
        for folder, _, _ in os.walk(self._beside):
            sync_folder(Path(folder))
        self._beside.rename(self._place)
        sync_folder(self._place.parent)

    def abandon(self) -> None:
        shutil.rmtree(self._beside, ignore_errors=True)


class _TarWriter(Writer):
    def __init__(self, place: Path) -> None:
        super().__init__(place)
        descriptor = os.open(self._beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        self._file = open(descriptor, "wb")  # noqa: SIM115
        self._tar = tarfile.open(fileobj=self._file, mode="w", format=tarfile.PAX_FORMAT)  # noqa: SIM115

    def _add(self, name: str, source: _Counted, num_bytes: int) -> None:
        info = tarfile.TarInfo(name)
        info.size, info.mode = num_bytes, 0o600
        try:
            self._tar.addfile(info, source)
        except OSError as exc:
            if exc.errno is not None:
                raise
            raise ConfigurationError(f"{name} became shorter during the copy") from exc

    def commit(self, manifest: bytes) -> None:
        self._add(MANIFEST, _Counted(io.BytesIO(manifest)), len(manifest))
        self._tar.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._beside.rename(self._place)
        sync_folder(self._place.parent)

    def abandon(self) -> None:
        self._file.close()
        self._beside.unlink(missing_ok=True)


def check_place(place: Path) -> None:
    """Raises ConfigurationError if the place exists, or nothing can be written beside it."""
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise ConfigurationError(f"{place} already exists", hint="choose another name")
    if not place.parent.is_dir():
        raise ConfigurationError(f"the folder {place.parent} does not exist", hint="make it first")
    if not os.access(place.parent, os.W_OK | os.X_OK):
        raise ConfigurationError(
            f"user {os.getuid()} cannot write to {place.parent}", hint="choose another folder"
        )


def writer(place: Path) -> Writer:
    """A writer of a tar file if the name ends in .tar, else of a folder. Raises ConfigurationError
    if there is no place for it."""
    check_place(place)
    return _TarWriter(place) if place.suffix == ".tar" else _FolderWriter(place)


class _Counted(io.RawIOBase):
    """A source that counts and hashes its bytes as they are read."""

    def __init__(self, source: BinaryIO) -> None:
        self._source = source
        self.digest = hashlib.sha256()
        self.num_bytes = 0

    def read(self, size: int = -1) -> bytes:
        data = self._source.read(size)
        self.digest.update(data)
        self.num_bytes += len(data)
        return data


# Reading


class Reader(ABC):
    """Reads the regular files of a backup by name; other entries are ignored."""

    @abstractmethod
    def names(self) -> set[str]: ...

    @abstractmethod
    def open(self, name: str) -> BinaryIO:
        """Open a file; raises NotFound."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def manifest(self) -> bytes:
        with self.open(MANIFEST) as file:
            data = file.read(_MAX_MANIFEST + 1)
        if len(data) > _MAX_MANIFEST:
            raise ConfigurationError(f"{MANIFEST} is longer than {_MAX_MANIFEST} bytes")
        return data


class _FolderReader(Reader):
    def __init__(self, place: Path) -> None:
        self._place = place

    def names(self) -> set[str]:
        entries = self._place.rglob("*")
        return {str(p.relative_to(self._place)) for p in entries if p.is_symlink() or p.is_file()}

    def open(self, name: str) -> BinaryIO:
        path = self._place / name
        if not _NAME.fullmatch(name) or path.is_symlink() or not path.is_file():
            raise NotFound(f"no file {name} in the backup")
        return path.open("rb")

    def close(self) -> None: ...


class _TarReader(Reader):
    def __init__(self, place: Path) -> None:
        file = place.open("rb")
        try:
            self._tar = tarfile.open(fileobj=file, mode="r:")  # noqa: SIM115
            self._members = {each.name: each for each in self._tar.getmembers()}
            self._file = file
        except (tarfile.TarError, OSError, EOFError) as exc:
            file.close()
            raise ConfigurationError(f"{place} is not a tar file of a backup: {exc}") from exc

    def names(self) -> set[str]:
        return set(self._members)

    def open(self, name: str) -> BinaryIO:
        member = self._members.get(name)
        file = self._tar.extractfile(member) if member is not None and member.isreg() else None
        if file is None or not _NAME.fullmatch(name):
            raise NotFound(f"no file {name} in the backup")
        return file  # type: ignore[return-value]

    def close(self) -> None:
        self._tar.close()
        self._file.close()


def reader(place: Path) -> Reader:
    """A reader of the backup at `place`; raises ConfigurationError if there is none."""
    if place.is_dir():
        return _FolderReader(place)
    if place.is_file():
        return _TarReader(place)
    raise ConfigurationError(f"there is no backup at {place}")


class BackedUp(Payloads):
    """The files of a backup as a read-only store."""

    is_local = True

    def __init__(self, backup: Reader, scratch: Path) -> None:
        self._backup = backup
        self.scratch = scratch

    def open(self, name: str) -> BinaryIO:
        return self._backup.open(FILES + name)

    def get(self, name: str) -> bytes:
        with self.open(name) as file:
            return file.read()

    def size(self, name: str) -> int:
        with self.open(name) as file:
            return file.seek(0, os.SEEK_END)

    def link(self, name: str) -> str:
        raise AssertionError("no proxy reads a backup")

    def names(self, folder: str) -> Iterator[str]:
        start = f"{FILES}{folder}/"
        below = (n.removeprefix(start) for n in self._backup.names() if n.startswith(start))
        yield from sorted({f"{folder}/{name.partition('/')[0]}" for name in below})

    def settled(self, folder: str, older_than: float = 0.0) -> Iterator[str]:
        yield from ()

    def put(self, name: str, data: bytes) -> None:
        raise AssertionError("a backup is read-only")

    def drop(self, name: str) -> None:
        raise AssertionError("a backup is read-only")

    def drop_settled(self, name: str, older_than: float = 0.0) -> None:
        raise AssertionError("a backup is read-only")

    def sweep_temporaries(self) -> int:
        return 0

    def check_writable(self) -> None:
        raise AssertionError("a backup is not written to")
