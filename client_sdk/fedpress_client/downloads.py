"""Downloads of models: the smallest form that the server offers, checked in any case.

    here already → the difference to one that is here → its trained tensors, where the base is here
    → whole, coded → the file itself

Whatever way it came, a model is its file, and the file's SHA-256 is its name. So a coded form that
is gone, damaged, forged or too large is no harm: the next way is tried.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from fedpress_client.bases import Bases
from fedpress_client.transport import Transport
from fedpress_protocols.downlink import decode_difference, decode_model, decode_trained
from fedpress_protocols.errors import (
    BodyTooLarge,
    ConfigurationError,
    DigestMismatch,
    InvalidUpdate,
    MalformedRequest,
    NotFound,
)
from fedpress_protocols.model import Base, Model

_log = logging.getLogger(__name__)

_UNFIT = (ConfigurationError, InvalidUpdate, MalformedRequest, NotFound)
BASES = 2
"""Models that are here and named to the server before the whole is asked for, at most."""


def download_model(
    transport: Transport,
    digest: str,
    task: str,
    max_bytes: int,
    held: Iterable[tuple[str, bytes]] | None,
    bases: Bases,
) -> tuple[bytes, Model]:
    """The file of the model `digest`, and the model, whose base is among `bases` then; raises what
    fetching the plain file does.

    `held` are the digests and files of models that the device holds, the likeliest first, read as
    they are needed; None where the task has no downlink.
    """
    for base, way in _ways(transport, digest, task, max_bytes, held, bases):
        try:
            model = way()
            data = model.to_bytes()
            _check(data, digest)
        except _UNFIT as exc:
            _log.debug("model %s, coded: %s", digest[:12], exc.detail)
            continue
        bases.keep(model, base)
        return data, model
    try:
        data = transport.model(digest, max_bytes, task)
    except BodyTooLarge as exc:
        raise BodyTooLarge(
            f"model {digest[:12]} is larger than the {max_bytes:,} bytes of this device's "
            f"max_model_bytes: {exc.detail}",
            hint="raise Client(max_model_bytes=...) or --max-model-bytes where memory and disk "
            "allow it; a frozen base counts as well",
        ) from exc
    _check(data, digest)
    model = Model.from_bytes(data)
    bases.keep(model)
    return data, model


def _check(data: bytes, digest: str) -> None:
    if hashlib.sha256(data).hexdigest() != digest:
        raise DigestMismatch(f"model {digest[:12]} came with other bytes")


def _ways(
    transport: Transport,
    digest: str,
    task: str,
    max_bytes: int,
    held: Iterable[tuple[str, bytes]] | None,
    bases: Bases,
) -> Iterator[tuple[str | None, Callable[[], Model]]]:
    """The ways to the model, each with the digest of its base where that is known."""
    for base, model in islice(_models(held or ()), BASES):

        def by_difference(base: str = base, model: Model = model) -> Model:
            return decode_difference(transport.difference(digest, base, max_bytes, task), model)

        yield None, by_difference
    for name, each in bases.offered():

        def over_base(name: str = name, each: Base = each) -> Model:
            data = transport.trained(digest, name, max_bytes, task)
            return decode_trained(data, each, max_bytes)

        yield name, over_base
    if held is not None:
        yield None, lambda: decode_model(transport.coded(digest, max_bytes, task), max_bytes)


def _models(files: Iterable[tuple[str, bytes]]) -> Iterator[tuple[str, Model]]:
    """Those of the files that are models."""
    for digest, data in files:
        try:
            yield digest, Model.from_bytes(data)
        except ConfigurationError:  # a map of activity, say
            continue
