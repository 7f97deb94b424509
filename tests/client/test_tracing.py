"""OpenTelemetry in a device: nothing where nobody uses it, spans and a header elsewhere."""

import subprocess
import sys

import httpx
import pytest

from fedpress_client import tracing
from tests.client.test_transport import Server


def test_a_device_does_not_import_what_it_does_not_need() -> None:
    script = (
        "import sys, fedpress_client.client, fedpress_client.tracing as t\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]\n"
        "assert t.carried() == {}\n"
        "with t.span('train'): pass\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_a_span_of_the_application_goes_with_every_request() -> None:
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    server = Server(httpx.Response(200, json=[]), httpx.Response(200, json=[]))
    transport = server.transport()
    tracer = sdk.TracerProvider(shutdown_on_exit=False).get_tracer("an application")
    transport.tasks()
    with tracer.start_as_current_span("its own") as outer:
        transport.tasks()
    context = outer.get_span_context()
    assert "traceparent" not in server.requests[0].headers
    due = f"00-{context.trace_id:032x}-{context.span_id:016x}-0"
    assert server.requests[1].headers["traceparent"][:-1] == due

    @tracing.traced("step")
    def step(number: int) -> int:
        return number + 1

    assert step(1) == 2
