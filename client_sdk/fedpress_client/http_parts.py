"""Uploads by parts over HTTP: the verbs that `parts.Delivery` speaks."""

from __future__ import annotations

from collections.abc import Callable

from pydantic import ValidationError

from fedpress_client.answers import json_of
from fedpress_client.http_link import HttpLink
from fedpress_client.parts import (
    FIRST_PART,
    LEAST_PART,
    Delivery,
    PartSizes,
    PartsNotOffered,
    largest_in,
)
from fedpress_client.retrying import TryAgain
from fedpress_protocols.errors import NotFound, TransportError
from fedpress_protocols.messages import (
    PartialCompletion,
    PartialIntent,
    PartialUpload,
    UploadAck,
)

_OFFSET_OCTETS = "application/offset+octet-stream"


class HttpParts:
    """The uploads by parts of one device; each verb is one request, tried once."""

    def __init__(self, link: HttpLink, part_seconds: float) -> None:
        self._link, self._sizes = link, PartSizes(part_seconds)
        if link.max_upload_rate is not None:
            self._sizes.num_bytes = largest_in(part_seconds, link.max_upload_rate, FIRST_PART)

    def deliver(self, assignment: str, body: bytes, query: str = "") -> UploadAck:
        """Send a whole body, its completion with `query`; raises PartsNotOffered where it is to go
        in one."""

        def report(offset: int) -> None:
            self._link.report("upload", offset, len(body))

        delivery = Delivery(self, assignment, self._sizes, self._link.clock, report, query)

        furthest = 0

        def attempt() -> UploadAck:
            nonlocal furthest
            try:
                return delivery.whole(body)
            except TryAgain as retry:
                retry.progress = delivery.offset > furthest
                furthest = max(furthest, delivery.offset)
                delivery.cut()
                raise

        return self._link.retrying(attempt, _path(assignment))

    def ahead(
        self,
        assignment: str,
        max_bytes: int,
        source: Callable[[int, int], bytes],
        on_begin: Callable[[str], None],
    ) -> None:
        """Send the beginning of an update that is not whole yet, see `Delivery.ahead`."""
        try:
            delivery = Delivery(self, assignment, self._sizes, self._link.clock)
            delivery.ahead(source, max_bytes, on_begin)
        except TryAgain as retry:
            raise retry.error from retry

    def begin_parts(self, assignment: str, intent: PartialIntent) -> PartialUpload:
        path = _path(assignment)
        try:
            answer = self._link.once("POST", path, json_of(intent))
        except NotFound as exc:
            if type(exc) is NotFound:
                raise PartsNotOffered(f"the server has no {path}") from exc
            raise
        answer.check()
        return _checked(answer.parsed(PartialUpload))

    def held_parts(self, assignment: str, partial: str) -> PartialUpload:
        path = _path(assignment, partial)
        with self._link.sent("HEAD", path, b"", {}) as response:
            self._link.raise_refusal(response)
            headers = response.headers
        try:
            status = PartialUpload(
                partial=partial,
                offset=int(headers["upload-offset"]),
                digest=headers["upload-digest"],
                part_bytes=int(headers["upload-part-bytes"]),
                expires_at=float(headers["upload-expires"]),
            )
        except (KeyError, ValueError, ValidationError) as exc:
            raise TryAgain(TransportError(f"{path} does not say where it stands")) from exc
        return _checked(status)

    def send_part(self, assignment: str, partial: str, offset: int, part: bytes) -> PartialUpload:
        path = f"{_path(assignment, partial)}?offset={offset}"
        answer = self._link.once("PATCH", path, part, {"Content-Type": _OFFSET_OCTETS})
        answer.check()
        return _checked(answer.parsed(PartialUpload))

    def complete_parts(
        self, assignment: str, partial: str, completion: PartialCompletion, query: str
    ) -> UploadAck:
        path = f"{_path(assignment, partial)}/completion" + (query and f"?{query}")
        answer = self._link.once("POST", path, json_of(completion))
        answer.check()
        return answer.parsed(UploadAck)

    def drop_parts(self, assignment: str, partial: str) -> None:
        try:
            self._link.once("DELETE", _path(assignment, partial), b"")
        except NotFound:
            pass
        except TryAgain as retry:
            raise retry.error from retry


def _checked(status: PartialUpload) -> PartialUpload:
    """Raise PartsNotOffered for parts of so few bytes that the requests cost more than they."""
    if status.ack is None and status.part_bytes < LEAST_PART:
        raise PartsNotOffered(
            f"the server takes parts of {status.part_bytes} bytes, fewer than {LEAST_PART}"
        )
    return status


def _path(assignment: str, partial: str = "") -> str:
    path = f"/v1/assignments/{assignment}/partials"
    return f"{path}/{partial}" if partial else path
