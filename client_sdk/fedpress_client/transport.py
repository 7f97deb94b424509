"""The server's API, one method for each verb, and its form over HTTP."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol, Unpack

from fedpress_client.answers import MAX_RETRY_AFTER, Answer, News, json_of, retry_after_of
from fedpress_client.http_link import (
    MAX_ANSWER_BYTES,
    SHORT_BODY,
    SHORT_LIFETIME,
    HttpLink,
    LinkOptions,
    LinkSettings,
    Traffic,
)
from fedpress_client.http_parts import HttpParts
from fedpress_client.parts import (
    PART_SECONDS,
    PARTS_ABOVE,
    WHOLE_SECONDS,
    PartsNotOffered,
    largest_in,
)
from fedpress_client.retrying import Retries, TryAgain
from fedpress_protocols.key_rollover import ServerKeys
from fedpress_protocols.messages import (
    CheckInRequest,
    DeclineReason,
    EnrolRequest,
    EnrolResponse,
    EvaluationReport,
    Membership,
    RotationRequest,
    RotationResponse,
    SignedReceipt,
    TaskSummary,
    UploadAck,
    UploadFigures,
)
from fedpress_protocols.signatures import DeviceKey

__all__ = [
    "MAX_ANSWER_BYTES",
    "MAX_RETRY_AFTER",
    "SHORT_BODY",
    "SHORT_LIFETIME",
    "HttpTransport",
    "News",
    "Retries",
    "Traffic",
    "Transport",
]

_log = logging.getLogger(__name__)

_TASKS_SHOWN = 1000
"""Of one answer."""
_MOST_TASK_BYTES = 2 * MAX_ANSWER_BYTES
"""Of all the answers of one listing: no more is asked for beyond."""
_OCTETS = "application/octet-stream"


class Transport(Protocol):
    """The verbs of the API. Each blocks until it has an answer or gives up with a FedpressError."""

    traffic: Traffic

    def enrol(self, token: str, request: EnrolRequest) -> EnrolResponse: ...

    def rotate(self, request: RotationRequest) -> RotationResponse:
        """Bring in another key; it may be said again."""
        ...

    def use_key(self, key: DeviceKey) -> None:
        """Sign with `key` from now on."""
        ...

    def tasks(self) -> tuple[TaskSummary, ...]: ...

    def task(self, task: str) -> TaskSummary: ...

    def check_in(self, task: str, request: CheckInRequest) -> News: ...

    def model(self, digest: str, max_bytes: int, task: str) -> bytes:
        """The model's bytes; their SHA-256 is `digest`. They count as `task`'s."""
        ...

    def coded(self, digest: str, max_bytes: int, task: str) -> bytes:
        """The coded form of the model `digest`; what it is, decoding and its digest tell."""
        ...

    def difference(self, digest: str, base: str, max_bytes: int, task: str) -> bytes:
        """The same as the difference to the model `base`. Raises NotFound where there is none."""
        ...

    def trained(self, digest: str, base: str, max_bytes: int, task: str) -> bytes:
        """The trained tensors of the model `digest`, if its base has the digest `base`. Raises
        NotFound if not."""
        ...

    def artefact(self, digest: str, max_bytes: int, task: str) -> bytes:
        """As `model`, for what a plan names besides."""
        ...

    def own(self, assignment: str, digest: str, max_bytes: int, task: str) -> bytes:
        """As `model`, for what the device's last included upload stood for."""
        ...

    def upload(
        self, assignment: str, body: bytes, figures: UploadFigures | None = None
    ) -> UploadAck: ...

    def decline(
        self, assignment: str, reason: DeclineReason, needed_seconds: float | None = None
    ) -> SignedReceipt | None:
        """Give an assignment back; its receipt, if the server sends it at once. `needed_seconds`:
        the time that a device which is too slow expects to need."""
        ...

    def receipt(self, assignment: str) -> SignedReceipt | float:
        """The receipt, or the seconds until it is worth while to ask again."""
        ...

    def report(self, task: str, report: EvaluationReport) -> None: ...

    def certificate(self) -> Membership:
        """The server's word, or its authority's, that this device is one of the population."""
        ...

    def server_keys(self) -> ServerKeys:
        """The key that the server signs with, and how it came to it from earlier ones."""
        ...

    def ready(self, assignment: str) -> None:
        """In the masked lane: trained, and waiting for the session."""
        ...

    def say(self, assignment: str, step: str, message: bytes) -> None:
        """Answer a step of the session; the same bytes may be sent again."""
        ...

    def hear(self, assignment: str, step: str, wait: float) -> bytes | float:
        """The server's message once `step` is over, or the seconds until it is worth asking again;
        the server may hold the answer for `wait` seconds."""
        ...

    def close(self) -> None: ...


class HttpTransport:
    """The API over httpx; one connection, kept alive. Not for several threads at once.

    `verify` is the path of a CA bundle, or an ssl.SSLContext; None trusts the usual ones.
    `client_certificate` and `client_key` are PEM files for a server that asks devices for one.
    `proxy` overrides HTTP_PROXY, HTTPS_PROXY and NO_PROXY. `timeout` bounds, in seconds, every wait
    for the network, and an answer that comes at fewer than 256 bytes a second. `bandwidth` limits
    the bytes a second. A body of more than `parts_above` bytes, or of half a minute at that limit,
    goes by parts, of some `part_seconds` each, if the server takes it so. `on_transfer` is called
    with "download" or "upload", and the bytes of a file or of an update's body that have come or
    gone, and how many there are. `http` replaces the sockets in tests.
    """

    def __init__(
        self,
        url: str,
        key: DeviceKey,
        *,
        parts_above: int = PARTS_ABOVE,
        part_seconds: float = PART_SECONDS,
        **options: Unpack[LinkOptions],
    ) -> None:
        self._link = HttpLink(url, key, LinkSettings(**options))
        self._parts = HttpParts(self._link, part_seconds)
        rate = self._link.max_upload_rate
        if rate is not None:
            parts_above = min(parts_above, largest_in(WHOLE_SECONDS, rate, parts_above))
        self.parts_above = parts_above
        self._takes_parts = True
        self.traffic = self._link.traffic

    def close(self) -> None:
        self._link.close()

    def enrol(self, token: str, request: EnrolRequest) -> EnrolResponse:
        headers = {"Authorization": f"Bearer {token}"}
        answer = self._link.call("POST", "/v1/enrol", json_of(request), headers)
        return answer.parsed(EnrolResponse)

    def rotate(self, request: RotationRequest) -> RotationResponse:
        return self._link.call("POST", "/v1/key-rotation", json_of(request)).parsed(
            RotationResponse
        )

    def use_key(self, key: DeviceKey) -> None:
        self._link.key = key

    def tasks(self) -> tuple[TaskSummary, ...]:
        answer = self._link.call("GET", "/v1/tasks")
        tasks = page = answer.all_parsed(TaskSummary)
        num_bytes = len(answer.data)
        while len(page) >= _TASKS_SHOWN and num_bytes < _MOST_TASK_BYTES:
            last = tasks[-1].task
            answer = self._link.call("GET", f"/v1/tasks?after={last}")
            page = tuple(each for each in answer.all_parsed(TaskSummary) if each.task > last)
            tasks += page
            num_bytes += len(answer.data)
        return tasks

    def task(self, task: str) -> TaskSummary:
        return self._link.call("GET", f"/v1/tasks/{task}").parsed(TaskSummary)

    def check_in(self, task: str, request: CheckInRequest) -> News:
        path = f"/v1/tasks/{task}/check-in"

        def read(answer: Answer) -> News:
            if answer.status == 204:
                return News(None, answer.retry_after or 1.0)
            return answer.news()

        return self._link.retrying(
            lambda: read(self._link.once("POST", path, json_of(request), wait=request.wait)), path
        )

    def upload(
        self, assignment: str, body: bytes, figures: UploadFigures | None = None
    ) -> UploadAck:
        return self._deliver(assignment, body, "" if figures is None else figures.query)

    def decline(
        self, assignment: str, reason: DeclineReason, needed_seconds: float | None = None
    ) -> SignedReceipt | None:
        # In the query: a server that does not know these ignores them, and declines.
        path = f"/v1/assignments/{assignment}?reason={reason}"
        if needed_seconds is not None:
            path += f"&needed_seconds={needed_seconds:.3f}"
        answer = self._link.call("DELETE", path)
        return answer.parsed(SignedReceipt) if answer.data else None

    def receipt(self, assignment: str) -> SignedReceipt | float:
        answer = self._link.call("GET", f"/v1/assignments/{assignment}/receipt")
        return answer.retry_after or 1.0 if answer.status == 202 else answer.parsed(SignedReceipt)

    def report(self, task: str, report: EvaluationReport) -> None:
        self._link.call("POST", f"/v1/tasks/{task}/evaluations", json_of(report))

    def certificate(self) -> Membership:
        return self._link.call("GET", "/v1/membership").parsed(Membership)

    def server_keys(self) -> ServerKeys:
        return self._link.call("GET", "/v1/server-keys").parsed(ServerKeys)

    def ready(self, assignment: str) -> None:
        self._link.call("POST", f"/v1/assignments/{assignment}/ready")

    def say(self, assignment: str, step: str, message: bytes) -> None:
        path = f"/v1/assignments/{assignment}/session/{step}"
        self._link.call("POST", path, message, {"Content-Type": _OCTETS})

    def hear(self, assignment: str, step: str, wait: float) -> bytes | float:
        path = f"/v1/assignments/{assignment}/session/{step}?wait={wait:g}"

        def listen() -> bytes | float:
            with self._link.sent("GET", path, b"", {}, wait) as response:
                self._link.raise_refusal(response)
                data = b"".join(self._link.chunks(response, MAX_ANSWER_BYTES))
                if response.status_code == 204:
                    return retry_after_of(response, self._link.clock) or 0.0
                if response.headers.get("content-type") != _OCTETS:
                    answer = Answer(response.status_code, data, path, None)
                    raise TryAgain(answer.other("no message"))
                return data

        return self._link.retrying(listen, path)

    def model(self, digest: str, max_bytes: int, task: str) -> bytes:
        return self._link.file(f"/v1/models/{digest}?task={task}", digest, max_bytes)

    def coded(self, digest: str, max_bytes: int, task: str) -> bytes:
        before = self.traffic.body_down
        try:
            return self._link.file(f"/v1/models/{digest}/coded?task={task}", None, max_bytes)
        finally:
            self.traffic.coded_down += self.traffic.body_down - before

    def difference(self, digest: str, base: str, max_bytes: int, task: str) -> bytes:
        return self._relative(f"/v1/models/{digest}/from/{base}?task={task}", max_bytes)

    def trained(self, digest: str, base: str, max_bytes: int, task: str) -> bytes:
        return self._relative(f"/v1/models/{digest}/over/{base}?task={task}", max_bytes)

    def _relative(self, path: str, max_bytes: int) -> bytes:
        """A model relative to what the device holds, counted as such."""
        before = self.traffic.body_down
        try:
            return self._link.file(path, None, max_bytes)
        finally:
            self.traffic.difference_down += self.traffic.body_down - before

    def artefact(self, digest: str, max_bytes: int, task: str) -> bytes:
        return self._link.file(f"/v1/artefacts/{digest}?task={task}", digest, max_bytes)

    def own(self, assignment: str, digest: str, max_bytes: int, task: str) -> bytes:
        return self._link.file(f"/v1/assignments/{assignment}/own?task={task}", digest, max_bytes)

    # Bodies

    def _deliver(self, assignment: str, body: bytes, query: str = "") -> UploadAck:
        if len(body) > self.parts_above and self._takes_parts:
            try:
                return self._parts.deliver(assignment, body, query)
            except PartsNotOffered as exc:
                _log.info("%s", exc)
                self._takes_parts = False
        path = f"/v1/assignments/{assignment}/update" + (query and f"?{query}")
        return self._link.call("PUT", path, body, {"Content-Type": _OCTETS}).parsed(UploadAck)

    def ahead(
        self,
        assignment: str,
        max_bytes: int,
        source: Callable[[int, int], bytes],
        on_begin: Callable[[str], None],
    ) -> None:
        """Send parts of an update that is not whole yet, see `Delivery.ahead`; nothing is tried
        again. May run in a thread of its own, beside which nothing else is asked of this."""
        if not self._takes_parts:
            return
        try:
            self._parts.ahead(assignment, max_bytes, source, on_begin)
        except PartsNotOffered as exc:
            _log.info("%s", exc)
            self._takes_parts = False

    def drop_parts(self, assignment: str, partial: str) -> None:
        """Have the server forget an unfinished upload."""
        self._parts.drop_parts(assignment, partial)
