"""Bases of models, kept in the device's folder: tensors that no task trains, fetched once.

A base is named by the SHA-256 of its file and belongs to no task: tasks that fine-tune the same
base share it. A copy that is lost or damaged costs a download.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from fedpress_client.state import StateDirectory, sweep, write_cache
from fedpress_client.trainer import Trainer
from fedpress_protocols.errors import ConfigurationError
from fedpress_protocols.model import Base, Model

_log = logging.getLogger(__name__)

KEPT = 4
"""Bases on the disk, at most."""
OFFERED = 2
"""Bases that a server is asked about before the whole model is fetched, at most."""
_LEAST_BYTES = 4096
_LEAST_SHARE = 16
"""A base smaller than this, or than this part of its model's trained tensors, is not kept."""


class Bases:
    """The bases of a device, safe for threads and for processes that share its folder.

    `own` makes the model that the application has at hand, whose base then needs no download.
    """

    def __init__(
        self, directory: StateDirectory, own: Callable[[], Model | None] = lambda: None
    ) -> None:
        self._folder, self._budget = directory.path / "bases", directory.budget
        self._own: Callable[[], Model | None] | None = own

    def offered(self) -> Iterator[tuple[str, Base]]:
        """The bases at hand by digest, the last used first and then the application's own."""
        digests = self._kept()[:OFFERED]
        for digest in digests:
            base = self._load(digest)
            if base is not None:
                yield digest, base
        own, self._own = self._own, None
        model = None if own is None else own()
        if model is not None and _is_worth(model) and model.base.digest not in digests:
            yield model.base.digest, model.base

    def keep(self, model: Model, digest: str | None = None) -> None:
        """Keep the model's base, where it is large enough to spare a download; `digest` is the
        base's if that is known."""
        if not _is_worth(model):
            return
        path = self._path(digest or model.base.digest)
        try:
            if path.exists():
                os.utime(path)
            else:
                data = model.base.to_bytes()
                if self._budget.admits(path, len(data)):
                    self._folder.mkdir(mode=0o700, exist_ok=True)
                    sweep(self._folder)
                    write_cache(path, data)
            for old in self._kept()[KEPT:]:
                self._path(old).unlink(missing_ok=True)
        except OSError as exc:
            _log.warning("base %s not kept: %s", path.stem[:12], exc)

    def _path(self, digest: str) -> Path:
        return self._folder / f"{digest}.safetensors"

    def _kept(self) -> list[str]:
        """The digests of the files here, the last used first."""
        with suppress(FileNotFoundError):
            paths = [path for path in self._folder.iterdir() if path.suffix == ".safetensors"]
            ages = [(path.stat().st_mtime_ns, path.stem) for path in paths]
            return [digest for _, digest in sorted(ages, reverse=True)]
        return []

    def _load(self, digest: str) -> Base | None:
        path = self._path(digest)
        try:
            data = path.read_bytes()
        except OSError:
            return None
        if hashlib.sha256(data).hexdigest() == digest:
            with suppress(ConfigurationError):
                return Base.from_bytes(data)
        _log.warning("%s is damaged, and removed", path)
        with suppress(OSError):
            path.unlink()
        return None


def _is_worth(model: Model) -> bool:
    trained = sum(tensor.num_bytes for tensor in model.spec.trained)
    return model.base.num_bytes >= max(_LEAST_BYTES, trained // _LEAST_SHARE)


def own_model(trainer: Trainer) -> Model | None:
    """The `initial_model` of a trainer that has one, if it has frozen tensors."""
    initial = getattr(trainer, "initial_model", None)
    spec = getattr(trainer, "spec", None)
    if initial is None or spec is None or not any(tensor.frozen for tensor in spec.tensors):
        return None
    try:
        model: Model = initial()
    except ConfigurationError as exc:
        _log.warning("the trainer's own model offers no base: %s", exc.detail)
        return None
    return model
