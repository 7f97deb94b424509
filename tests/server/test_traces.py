"""What is traced of requests and rounds, and what a device has no say in."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, ClassVar

import pytest

from fedpress_protocols.model import Model
from fedpress_server.observing import traces
from tests.devices import Operator
from tests.server.in_process import Clock, Enrolled, Server, Start, include_one, ones
from tests.server.test_observing import events, logged

pytest.importorskip("opentelemetry.sdk")


@pytest.fixture
def spans() -> Iterator[Any]:
    """Every span that ends meanwhile, of this process's one tracing."""
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    traces.start(traces.Tracing(SimpleSpanProcessor(exporter), b"a server"))
    yield exporter
    traces.stop()


def named(exporter: Any, name: str) -> Any:
    return [each for each in exporter.get_finished_spans() if each.name == name]


UPLOAD = "PUT /v1/assignments/{assignment}/update"


def test_an_upload_is_verified_read_staged_and_committed_in_one_trace(
    http: Server, operator: Operator, enrolled: Enrolled, model: Model, spans: Any
) -> None:
    operator.begin(model, rounds=2, cohort={"size": 1, "minimum": 1})
    device = enrolled()
    assignment = device.assignment("digits")
    body = device.body_for(assignment, ones(model))
    spans.clear()
    device.upload(assignment.assignment, body)
    (request,) = named(spans, UPLOAD)
    parts = [each for each in spans.get_finished_spans() if each.parent is not None
             and each.parent.span_id == request.context.span_id]  # fmt: skip
    assert {each.name for each in parts} == {"verify", "read", "stage", "commit"}
    assert {each.context.trace_id for each in parts} == {request.context.trace_id}
    assert request.attributes["http.response.status_code"] == 201
    assert request.attributes["fedpress.task"] == "digits"
    for each in spans.get_finished_spans():
        assert device.client_id not in str(dict(each.attributes))


def test_a_round_has_one_trace_that_every_server_names_alike(
    http: Server, operator: Operator, enrolled: Enrolled, model: Model, clock: Clock, spans: Any
) -> None:
    begun = clock.now
    operator.begin(model, rounds=2, cohort={"size": 1, "minimum": 1})
    device = enrolled()
    clock.advance(10)
    device.check_in("digits", include_one(device, model), wait=30)
    (whole,) = named(spans, "round")
    (collecting,) = named(spans, "collecting")
    (fold,) = named(spans, "job: fold")
    (publish,) = named(spans, "publish")
    (request,) = named(spans, UPLOAD)
    assert whole.parent is None
    assert whole.attributes["fedpress.outcome"] == "committed"
    assert (whole.start_time, whole.end_time) == (int(begun * 1e9), int((begun + 10) * 1e9))
    for part in (collecting, fold):
        assert part.context.trace_id == whole.context.trace_id
        assert part.parent.span_id == whole.context.span_id
    assert publish.parent.span_id == fold.context.span_id
    assert [link.context.span_id for link in request.links] == [whole.context.span_id]
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    replica, other = (
        traces.Tracing(SimpleSpanProcessor(InMemorySpanExporter()), name)
        for name in (b"a server", b"another")
    )
    assert replica._round(("digits", 1, 1)).trace_id == whole.context.trace_id
    assert other._round(("digits", 1, 1)).trace_id != whole.context.trace_id
    assert replica._round(("digits", 1, 2)).trace_id != whole.context.trace_id


@pytest.mark.parametrize(
    ("header", "is_linked"),
    [
        ("00-" + "ab" * 16 + "-" + "cd" * 8 + "-01", True),
        ("00-" + "00" * 16 + "-" + "cd" * 8 + "-01", False),
        ("99999", False),
        ("\x00" * 3000, False),
    ],
)
def test_what_a_device_brings_is_a_link_and_never_a_parent(
    http: Server, spans: Any, header: str, is_linked: bool
) -> None:
    http.get("/livez", headers={"traceparent": header})
    (request,) = named(spans, "GET /livez")
    assert request.parent is None
    assert request.context.trace_id != int("ab" * 16, 16)
    linked = [f"{link.context.trace_id:x}" for link in request.links]
    assert linked == (["ab" * 16] if is_linked else [])


def test_a_share_of_the_requests_is_traced(http: Server) -> None:
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    traces.start(traces.Tracing(SimpleSpanProcessor(exporter), b"", share=0.0))
    try:
        http.get("/livez")
    finally:
        traces.stop()
    assert not exporter.get_finished_spans()


def test_log_lines_name_the_trace(http: Server, spans: Any) -> None:
    with logged() as stream:
        stream.lines.tracing = traces.ids  # type: ignore[attr-defined]
        http.get("/livez")
    (request,) = named(spans, "GET /livez")
    (line,) = [each for each in events(stream) if each.get("route") == "/livez"]
    assert line["trace"] == f"{request.context.trace_id:032x}"


class Collector(BaseHTTPRequestHandler):
    """Takes OTLP over HTTP."""

    received: ClassVar[list[tuple[str, bytes]]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.received.append((self.path, body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        pass


def test_spans_arrive_at_a_collector_before_the_server_has_ended(start: Start) -> None:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    class Here(Collector):
        received: ClassVar[list[tuple[str, bytes]]] = []

    server = HTTPServer(("127.0.0.1", 0), Here)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        with start(otlp_endpoint=f"http://127.0.0.1:{server.server_port}/v1/traces") as http:
            http.get("/livez")
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    told = [ExportTraceServiceRequest.FromString(body) for _, body in Here.received]
    names = [span.name for each in told for resource in each.resource_spans
             for scope in resource.scope_spans for span in scope.spans]  # fmt: skip
    assert "GET /livez" in names
    assert {path for path, _ in Here.received} == {"/v1/traces"}
    services = {pair.value.string_value for each in told for resource in each.resource_spans
                for pair in resource.resource.attributes if pair.key == "service.name"}  # fmt: skip
    assert services == {"fedpress-all"}


def test_without_an_address_nothing_is_traced(http: Server) -> None:
    assert traces.span("anything") is traces.in_round(("task", 1, 1), "else")
    assert traces.ids() == {}
