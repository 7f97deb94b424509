"""OpenTelemetry traces of requests and rounds. Disabled unless an endpoint is set.

A round belongs to no request, lasts for hours and involves several servers. The ids of its trace
and root span are derived from its name, so that every server adds to the same trace without storing
anything. A request has its own trace with links to its round's, and to the trace of a device's
header: a device cannot control what is recorded.
"""

from __future__ import annotations

import hashlib
import logging
import random
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from fedpress_protocols.errors import MissingExtra
from fedpress_server.observing.requests import SeenRequest

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.trace import Span, SpanContext

Key = tuple[str, int, int]
"""Task, round, attempt."""
_NOTHING = nullcontext()
_GIVE_UP = 3.0
"""Seconds for which an unresponsive collector may delay a server's stop."""
_log = logging.getLogger(__name__)
_now: Tracing | None = None


def start(tracing: Tracing) -> None:
    """Enable tracing in this process."""
    global _now
    _now = tracing


def stop() -> None:
    """Flush and disable tracing."""
    global _now
    tracing, _now = _now, None
    if tracing is not None:
        tracing.close()


def span(name: str) -> AbstractContextManager[object]:
    """A span of the current trace, if any; costs 0.2 microseconds without one."""
    return _NOTHING if _now is None else _now.part(name)


def in_round(key: Key, name: str) -> AbstractContextManager[object]:
    """A span in the trace of a round."""
    return _NOTHING if _now is None else _now.in_round(key, name)


def phase(key: Key, name: str, begun: float, ended: float) -> None:
    """Record a round's phase from `begun` to `ended` (Unix seconds)."""
    if _now is not None:
        _now.phase(key, name, begun, ended)


def whole(key: Key, outcome: str, begun: float, ended: float) -> None:
    """Record the root span of a finished round."""
    if _now is not None:
        _now.whole(key, outcome, begun, ended)


def of_request(request: SeenRequest) -> AbstractContextManager[object]:
    return _NOTHING if _now is None else _now.request(request)


def ids() -> Mapping[str, object]:
    """The current trace and span ids, for log lines."""
    return {} if _now is None else _now.ids()


class Tracing:
    """The tracer: exporter and sampling of requests."""

    def __init__(
        self,
        processor: SpanProcessor,
        name: bytes,
        *,
        resource: Mapping[str, str] | None = None,
        share: float = 1.0,
    ) -> None:
        """`name` identifies the servers of one database; `resource` has attributes of this one. A
        `share` in [0, 1] of the requests is traced."""
        from opentelemetry import context, trace
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider

        self._trace, self._context = trace, context
        self._ids = _round_ids()
        self._provider = TracerProvider(
            resource=Resource.create(dict(resource or {})),
            id_generator=self._ids,
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("fedpress_server")
        self._name = name
        self._share, self._chance = share, random.Random()  # noqa: S311

    @contextmanager
    def request(self, request: SeenRequest) -> Iterator[None]:
        if self._chance.random() >= self._share:
            yield
            return
        links = [self._trace.Link(brought)] if (brought := _brought(request)) is not None else []
        with self._tracer.start_as_current_span(
            request.method,
            self._context.Context(),
            kind=self._trace.SpanKind.SERVER,
            links=links,
            record_exception=False,
        ) as found:
            try:
                yield
            finally:
                self._tell(found, request)

    def _tell(self, found: Span, request: SeenRequest) -> None:
        facts = request.facts()
        found.update_name(f"{request.method} {request.route}")
        found.set_attributes(
            {
                "http.request.method": request.method,
                "http.route": request.route,
                "http.response.status_code": request.status,
                "http.request.body.size": request.received,
                "http.response.size": request.sent,
                "fedpress.request": request.request_id,
            }
        )
        if request.status >= 500 or not request.status:
            found.set_status(self._trace.StatusCode.ERROR)
        if "task" in facts:
            found.set_attribute("fedpress.task", str(facts["task"]))
        key = request.round_key
        if key is not None:
            found.add_link(self._round(key))

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        if not self._trace.get_current_span().is_recording():
            yield
            return
        with self._tracer.start_as_current_span(name):
            yield

    @contextmanager
    def in_round(self, key: Key, name: str) -> Iterator[None]:
        with self._tracer.start_as_current_span(
            name, self._within(key), attributes=_attributes(key)
        ):
            yield

    def phase(self, key: Key, name: str, begun: float, ended: float) -> None:
        found = self._tracer.start_span(
            name, self._within(key), attributes=_attributes(key), start_time=_ns(begun)
        )
        found.end(_ns(ended))

    def whole(self, key: Key, outcome: str, begun: float, ended: float) -> None:
        due = self._round(key)
        self._ids.next(due.trace_id, due.span_id)
        attributes = {**_attributes(key), "fedpress.outcome": outcome}
        found = self._tracer.start_span(
            "round", self._context.Context(), attributes=attributes, start_time=_ns(begun)
        )
        found.end(_ns(ended))

    def ids(self) -> Mapping[str, object]:
        found = self._trace.get_current_span().get_span_context()
        if not found.is_valid:
            return {}
        return {"trace": f"{found.trace_id:032x}", "span": f"{found.span_id:016x}"}

    def close(self) -> None:
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(_GIVE_UP)
        if closing.is_alive():
            _log.warning("the trace collector does not answer: the last traces are lost")

    def _round(self, key: Key) -> SpanContext:
        task, number, attempt = key
        text = f"{task}\x00{number}\x00{attempt}".encode()
        drawn = hashlib.sha256(b"fedpress round\x00" + self._name + text).digest()
        return self._trace.SpanContext(
            int.from_bytes(drawn[:16]) or 1,
            int.from_bytes(drawn[16:24]) or 1,
            is_remote=True,
            trace_flags=self._trace.TraceFlags(self._trace.TraceFlags.SAMPLED),
        )

    def _within(self, key: Key) -> Any:
        parent = self._trace.NonRecordingSpan(self._round(key))
        return self._trace.set_span_in_context(parent, self._context.Context())


def to_collector(endpoint: str, role: str, version: str, name: bytes, share: float) -> Tracing:
    """A tracer that exports to `endpoint` with OTLP over HTTP. Raises MissingExtra."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as exc:
        raise MissingExtra("traces need opentelemetry", hint="pip install fedpress[otel]") from exc
    resource = {"service.name": f"fedpress-{role}", "service.version": version}
    processor = BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=_GIVE_UP))
    return Tracing(processor, name, resource=resource, share=share)


def _round_ids() -> Any:
    """An id generator: random, except for a span whose ids were set by `next` in the same
    thread."""
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

    class RoundIds(RandomIdGenerator):
        def __init__(self) -> None:
            self._due = threading.local()

        def next(self, trace_id: int, span_id: int) -> None:
            self._due.ids = [trace_id, span_id]

        def generate_trace_id(self) -> int:
            due: list[int] = getattr(self._due, "ids", [])
            return due.pop(0) if len(due) == 2 else super().generate_trace_id()

        def generate_span_id(self) -> int:
            due: list[int] = getattr(self._due, "ids", [])
            return due.pop() if len(due) == 1 else super().generate_span_id()

    return RoundIds()


def _brought(request: SeenRequest) -> SpanContext | None:
    """The trace context in the request's W3C traceparent header."""
    from opentelemetry import trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    header = request.header(b"traceparent").decode("latin-1")
    if not header:
        return None
    context = TraceContextTextMapPropagator().extract({"traceparent": header})
    found = trace.get_current_span(context).get_span_context()
    return found if found.is_valid else None


def _attributes(key: Key) -> dict[str, str | int]:
    return {"fedpress.task": key[0], "fedpress.round": key[1], "fedpress.attempt": key[2]}


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
