"""Downloads of models: the smallest form that the server offers, checked in any case.

    here already → the difference to one that is here → whole, coded → the file itself

Whatever way it came, a model is its file, and the file's SHA-256 is its name. So a coded form that
is gone, damaged, forged or too large is no harm: the next way is tried.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from fedpress_client.transport import Transport
from fedpress_protocols.downlink import decode_difference, decode_model
from fedpress_protocols.errors import (
    ConfigurationError,
    DigestMismatch,
    InvalidUpdate,
    MalformedRequest,
    NotFound,
)
from fedpress_protocols.model import Model

_log = logging.getLogger(__name__)

_UNFIT = (ConfigurationError, InvalidUpdate, MalformedRequest, NotFound)
BASES = 2
"""Models that are here and named to the server before the whole is asked for, at most."""


def download_model(
    transport: Transport,
    digest: str,
    task: str,
    max_bytes: int,
    bases: Iterable[tuple[str, bytes]] | None,
) -> bytes:
    """The file of the model `digest`; raises what fetching the plain file does.

    `bases` are the digests and files of models that the device holds, the likeliest first, read as
    they are needed; None where the task has no downlink.
    """
    if bases is not None:
        for way in _ways(transport, digest, task, max_bytes, bases):
            try:
                data = way().to_bytes()
                if hashlib.sha256(data).hexdigest() != digest:
                    raise DigestMismatch(f"{digest[:12]} decodes to another model")
                return data
            except _UNFIT as exc:
                _log.info("model %s, coded: %s", digest[:12], exc.detail)
    return transport.model(digest, max_bytes, task)


def _ways(
    transport: Transport,
    digest: str,
    task: str,
    max_bytes: int,
    bases: Iterable[tuple[str, bytes]],
) -> Iterator[Callable[[], Model]]:
    for base, model in islice(_models(bases), BASES):

        def by_difference(base: str = base, model: Model = model) -> Model:
            return decode_difference(transport.difference(digest, base, max_bytes, task), model)

        yield by_difference
    yield lambda: decode_model(transport.coded(digest, max_bytes, task), max_bytes)


def _models(files: Iterable[tuple[str, bytes]]) -> Iterator[tuple[str, Model]]:
    """Those of the files that are models."""
    for digest, data in files:
        try:
            yield digest, Model.from_bytes(data)
        except ConfigurationError:  # a map of activity, say
            continue
