"""Models on their way down: decoded from a message, kept in files for the difference after it.

Beside each account lies a folder with the model that the client has and the one that it came from,
under their digests; the server sends differences to either. Clients that share a folder share the
files. They are a copy of what the server has: one that is lost or damaged costs a download.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from fedpress_client.state import sweep, write_cache
from fedpress_flower import envelope
from fedpress_flower.client.account import Account
from fedpress_protocols.downlink import decode_difference, decode_model
from fedpress_protocols.errors import ConfigurationError, DecodingError, DigestMismatch
from fedpress_protocols.model import Model

_log = logging.getLogger(__name__)
MAX_MODEL_BYTES = 1 << 32
"""Of a coded model's tensors, unless the mod is told otherwise."""


class LacksBase(Exception):
    """The message holds a difference to a model that is not here."""


@dataclass(frozen=True)
class Models:
    """The models that one client has: hard links to the files that all clients of a folder share,
    so that a file goes with its last owner."""

    own: Path
    shared: Path

    @classmethod
    def of(cls, account: Account) -> Models:
        return cls(account.path.with_suffix(".models"), account.path.parent / "models")

    def load(self, digest: str) -> Model | None:
        """None if it is not here, or is damaged."""
        return self._read(self.own / digest)

    def shares(self, digest: str) -> Model | None:
        """The model, if any client of the folder has it."""
        return self._read(self.shared / digest)

    def keep(self, model: Model, digest: str, base: str | None) -> None:
        """Have the model `digest`, and of the others no more than `base`."""
        for folder in (self.own, self.shared):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not (self.own / digest).exists():
            if not (self.shared / digest).exists():
                sweep(self.shared)
                write_cache(self.shared / digest, model.to_bytes())
            try:
                os.link(self.shared / digest, self.own / digest)
            except FileExistsError:
                pass
            except OSError:  # no links on this file system, or gone in the meantime
                (self.own / digest).write_bytes(model.to_bytes())
        for path in self.own.iterdir():
            if path.name not in (digest, base):
                path.unlink(missing_ok=True)
                self._unshare(path.name)

    def remove(self) -> None:
        if self.own.is_dir():
            names = [path.name for path in self.own.iterdir()]
            shutil.rmtree(self.own, ignore_errors=True)
            for name in names:
                self._unshare(name)

    def _unshare(self, digest: str) -> None:
        """Remove the shared file if it was the last owner's."""
        with suppress(FileNotFoundError):
            if (self.shared / digest).stat().st_nlink == 1:
                (self.shared / digest).unlink()

    def _read(self, path: Path) -> Model | None:
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        if hashlib.sha256(data).hexdigest() == path.name:
            with suppress(ConfigurationError):
                return Model.from_bytes(data)
        _log.warning("%s is damaged, and removed", path)
        path.unlink(missing_ok=True)
        return None


def model_in_message(message: Message, models: Models, max_bytes: int = MAX_MODEL_BYTES) -> Model:
    """The model that a message brings coded, kept in `models`.

    Raises LacksBase where the difference leads nowhere from here, DecodingError or DigestMismatch
    for a whole that is not the model.
    """
    ours: Any = message.content[envelope.RECORD]
    digest, base = str(ours[envelope.DIGEST]), ours.get(envelope.BASE)
    if not _is_digest(digest) or not (base is None or _is_digest(str(base))):
        raise DecodingError(f"{digest!r} and {base!r}, where digests of models are due")
    model = models.load(digest) or models.shares(digest)
    if model is None:
        arrays = message.content.array_records[str(ours[envelope.ARRAYS])]
        model = _decoded(arrays, models, digest, base, max_bytes)
    models.keep(model, digest, base)
    return model


def _decoded(
    arrays: Mapping[str, Array], models: Models, digest: str, base: str | None, max_bytes: int
) -> Model:
    data = coded_in(arrays)
    if data is None:
        raise DecodingError("no coded model, where the message names one")
    if base is None:
        model = decode_model(data, max_bytes)
        if model.digest != digest:
            raise DigestMismatch(f"model {digest[:12]} decodes to another one")
        return model
    before = models.load(base)
    if before is None:
        raise LacksBase(base)
    try:
        model = decode_difference(data, before)
    except DecodingError as exc:
        raise LacksBase(base) from exc
    if model.digest != digest:
        raise LacksBase(base)
    return model


def coded_in(arrays: Mapping[str, Array]) -> bytes | None:
    """The coded model that a record holds; None for one of plain arrays."""
    array = arrays.get(envelope.MODEL)
    return array.data if array is not None and array.stype == envelope.MODEL_STYPE else None


def with_arrays(message: Message, model: Model) -> RecordDict:
    """The message's content with the arrays of `model` as the app knows them, and the other models
    that the plan needs."""
    ours: Any = message.content[envelope.RECORD]
    doubles = set(ours.get(envelope.DOUBLES, []))
    tensors: dict[str, Any] = model.tensors()
    content = dict(message.content)
    content[str(ours[envelope.ARRAYS])] = ArrayRecord(
        {
            name: Array(tensor.astype("float64") if name in doubles else tensor)
            for name, tensor in tensors.items()
        }
    )
    for name, record in message.content.array_records.items():
        data = coded_in(record) if name.startswith(f"{envelope.RECORD}.") else None
        if data is not None:
            other = decode_difference(data, model)
            tensors = other.tensors()
            content[name] = ArrayRecord({n: Array(tensor) for n, tensor in tensors.items()})
    return RecordDict(content)


def holding(digest: str) -> ConfigRecord:
    """Return the reply's record of the model that is cached here; empty if the base was not."""
    return ConfigRecord({envelope.HOLDS: digest})


def _is_digest(name: str) -> bool:
    return len(name) == 64 and set(name) <= set("0123456789abcdef")
