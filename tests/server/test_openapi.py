"""Requests drawn from the API's own description: none makes the server fail, and every answer is
one that the description has."""

from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from fedpress_protocols.model import Model
from fedpress_protocols.signatures import Content
from tests.devices import ADMIN, ADMIN_TOKEN, Device, Operator
from tests.server.in_process import Enrolled, Server, include_one

pytestmark = pytest.mark.both_databases
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
schemathesis.serializer.alias("application/offset+octet-stream", "application/octet-stream")
GENERATED = st.sampled_from(GenerationMode)


@pytest.mark.soak
@pytest.mark.slow(short=True)
def test_what_the_description_allows_is_answered_as_described(
    http: Server, operator: Operator, enrolled: Enrolled, model: Model, slow: bool, soak: bool
) -> None:
    device = enrolled()
    operator.begin(model, rounds=50, cohort={"size": 1, "minimum": 1})
    device.check_in("digits", include_one(device, model), wait=30)
    known = {
        "task": "digits",
        "digest": model.digest,
        "base": model.digest,
        "assignment": device.assignment("digits").assignment,
        "client_id": device.client_id,
        "round": 1,
        "number": 1,
    }
    schema = schemathesis.openapi.from_dict(http.get("/openapi.json", headers=ADMIN).json())
    for found in schema.get_all_operations():
        assert isinstance(found, Ok)
        operation = found.ok()
        names = [each.name for each in operation.path_parameters]
        given_names = {name: known[name] for name in names if name in known}
        drawn = st.one_of(
            GENERATED.flatmap(operation.as_strategy),
            GENERATED.flatmap(partial(operation.as_strategy, path_parameters=given_names)),
        )

        @seed(1)
        @settings(
            max_examples=200 if soak else 6 if slow else 2,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
            deadline=None,
            database=None,
        )
        @given(case=drawn)
        def is_answered(case: Any) -> None:
            if isinstance(case.body, dict) and "wait" in case.body:
                case.body["wait"] = 0  # a long poll is long
            case.validate_response(answer(http, device, case), checks=CHECKS)

        is_answered()


def answer(http: Server, device: Device, case: Any) -> Any:
    """To the drawn request, signed by the device and by the operator."""
    drawn = requests.Request(**case.as_transport_kwargs(base_url=str(http.base_url))).prepare()
    body = drawn.body or b""
    body = body.encode() if isinstance(body, str) else body
    assert isinstance(body, bytes)
    assert drawn.method is not None
    assert drawn.url is not None
    path = drawn.url.removeprefix(str(http.base_url).rstrip("/"))
    signed = device.sign(drawn.method, path, Content.of(body))
    headers: dict[str, Any] = {**drawn.headers, **signed, "Authorization": f"Bearer {ADMIN_TOKEN}"}
    answered = http.request(drawn.method, path, content=body, headers=headers)
    answered.elapsed = timedelta(0)  # which the in-process transport does not measure
    return answered
