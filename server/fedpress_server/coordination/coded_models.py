"""The coded forms of a task's models, made when they are first asked for and then kept as files.

A form is a function of the models it is of, which stay on the server. So nothing here is lost that
could not be made again, to the last bit: by any replica, after any crash.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from contextlib import suppress
from typing import NamedTuple

from fedpress_protocols.downlink import (
    DownlinkCoder,
    encode_difference,
    encode_model,
    encode_trained,
)
from fedpress_protocols.errors import ConfigurationError, NotFound
from fedpress_protocols.messages import TaskConfig
from fedpress_protocols.model import Model
from fedpress_server.coordination.background import Background
from fedpress_server.storage import evaluation, records
from fedpress_server.storage.database import Database
from fedpress_server.storage.files import coded_folder, coded_name, model_name, trained_name
from fedpress_server.storage.payloads import Payloads

_BASES = 256
"""Models whose base's digest is kept in memory."""


class CodedFile(NamedTuple):
    """A file that never changes, and what tells it from every other."""

    name: str
    tag: str
    num_bytes: int


class CodedModels:
    """Finds a coded form, or makes it, once at a time."""

    def __init__(self, database: Database, payloads: Payloads, background: Background) -> None:
        self._database = database
        self._payloads = payloads
        self._background = background
        self._bases: dict[str, str] = {}
        """By model, the digest of its base; of the last models asked for."""
        self._pruned: dict[str, frozenset[str]] = {}
        """By task: the newest models when its old differences were last removed."""
        self._making: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def find(self, config: TaskConfig, model: str, base: str | None) -> CodedFile:
        """The coded `model` of the task, whole or as the difference to `base`.

        A difference is there between two of the newest `keep` + 1 models of the task, if it is
        shorter than the whole. Raises NotFound for what is not there.
        """
        terms = config.downlink
        if terms is None:
            raise NotFound(f"task {config.task!r} has no downlink", task=config.task)
        task, keep = config.task, terms.keep
        newest = await self._database.read(lambda c: records.newest_models(c, task, keep + 1))
        if base is not None and not {model, base} <= set(newest):
            raise NotFound(
                f"{model[:12]} and {base[:12]} are not both among the newest models of the task",
                hint="fetch the model whole",
            )
        if await self._database.read(lambda c: evaluation.place_of(c, task, model)) is None:
            raise NotFound(f"task {task!r} has no model {model[:12]}", task=task)
        name = coded_name(task, model, base, terms.coder)
        try:
            async with self._making[name]:
                size = await self._background.in_thread(self._kept, name, model, base, terms.coder)
        finally:
            self._making.pop(name, None)
        if base is not None:
            whole = await self.find(config, model, None)
            if size >= whole.num_bytes:
                raise NotFound(f"{model[:12]} is shorter whole than from {base[:12]}")
        if self._pruned.get(task) != frozenset(newest):  # a listing, which a store takes long for
            await self._background.in_thread(self._prune, task, frozenset(newest))
            self._pruned[task] = frozenset(newest)
        return CodedFile(name, name.rpartition("/")[2], size)

    async def find_trained(self, config: TaskConfig, model: str, base: str) -> CodedFile:
        """The trained tensors of `model`, whose base has the digest `base`.

        They are coded where the task has a downlink and the model lies on its grid. Raises NotFound
        for another base.
        """
        coder = None if config.downlink is None else config.downlink.coder
        name = trained_name(config.task, model, base)
        try:
            async with self._making[name]:
                size = await self._background.in_thread(
                    self._kept_trained, name, model, base, coder
                )
        finally:
            self._making.pop(name, None)
        return CodedFile(name, f"{model}.{base}", size)

    def _kept_trained(self, name: str, model: str, base: str, coder: DownlinkCoder | None) -> int:
        """The size of the file, which is there then."""
        actual = self._bases.get(model)
        if actual is None or actual == base:
            try:
                return self._payloads.size(name)
            except NotFound:
                pass
            whole = self._model(model)
            actual = self._bases[model] = whole.base.digest
            while len(self._bases) > _BASES:
                self._bases.pop(next(iter(self._bases)), None)
        if actual != base:
            raise NotFound(
                f"{model[:12]} has the base {actual[:12]}, not {base[:12]}",
                hint="fetch the model whole",
            )
        data = encode_trained(whole, None)
        if coder is not None:
            with suppress(ConfigurationError):  # on no grid, like an average
                data = min(data, encode_trained(whole, coder), key=len)
        self._payloads.put(name, data)
        return len(data)

    def _kept(self, name: str, model: str, base: str | None, coder: DownlinkCoder) -> int:
        """The size of the file, which is there then."""
        try:
            return self._payloads.size(name)
        except NotFound:
            pass
        try:
            newer = self._model(model)
            if base is None:
                data = encode_model(newer, coder)
            else:
                data = encode_difference(self._model(base), newer, coder)
        except ConfigurationError as exc:
            raise NotFound(f"{model[:12]} has no coded form: {exc.detail}") from exc
        self._payloads.put(name, data)
        return len(data)

    def _model(self, digest: str) -> Model:
        return Model.from_bytes(self._payloads.get(model_name(digest)))

    def _prune(self, task: str, newest: frozenset[str]) -> None:
        """Remove the differences that nobody may ask for any more."""
        for name in list(self._payloads.names(coded_folder(task))):
            model, _, base = name.rpartition("/")[2].partition(".")[0].partition("-")
            if base and not {model, base} <= newest:
                self._payloads.drop(name)
