"""Models, health and the documents of the API."""

import hashlib
import threading
import time
from typing import Any

import numpy as np
import pytest

from fedpress_protocols.errors import (
    ConfigurationError,
    DigestMismatch,
    NotFound,
    ServerError,
    UnknownModel,
)
from fedpress_protocols.model import Model
from fedpress_server.api import health
from tests.devices import ADMIN, Operator, checked
from tests.server.in_process import Enrolled, Server, history, include_one

# Models


def test_a_model_is_fetched_whole_in_part_or_not_at_all(
    operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    digest, data = operator.bring(model), model.to_bytes()
    device = enrolled()
    path = f"/v1/models/{digest}"

    def get(**headers: str) -> Any:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return device.request("GET", path, headers=named)

    whole = get()
    assert (whole.status_code, whole.content) == (200, data)
    etag = whole.headers["etag"]
    assert etag == f'"{digest}"'
    assert "immutable" in whole.headers["cache-control"]
    assert get(If_None_Match=f'"other", W/{etag}').status_code == 304
    size = len(data)
    for asked, start, stop in (
        ("bytes=10-19", 10, 20),
        ("bytes=100-", 100, size),
        ("bytes=-7", size - 7, size),
        (f"bytes=0-{size * 2}", 0, size),
    ):
        part = get(Range=asked, If_Range=etag)
        assert (part.status_code, part.content) == (206, data[start:stop])
        assert part.headers["content-range"] == f"bytes {start}-{stop - 1}/{size}"
    for ignored in ("bytes=9-1", "bytes=-", "lines=1-2", "bytes=0-1,5-6", f"bytes=0-{'9' * 5000}"):
        assert get(Range=ignored).content == data
    assert get(Range="bytes=0-1", If_Range='"other"').content == data
    outside = get(Range=f"bytes={size}-")
    assert outside.status_code == 416
    assert outside.headers["content-range"] == f"bytes */{size}"
    assert outside.json()["status"] == 416


def test_an_unknown_model_is_not_found(enrolled: Enrolled) -> None:
    with pytest.raises(UnknownModel):
        enrolled().model("0" * 64)


def test_downloads_are_booked_under_the_round_they_were_for(
    operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    operator.begin(model)
    operator.begin(model, "another")
    device = enrolled()
    device.model(model.digest, "digits")
    assert history(operator)[0].download_bytes == 0
    device.assignment("digits")
    device.assignment("another")
    device.model(model.digest, "digits")
    device.model(model.digest, "nowhere")
    part = f"/v1/models/{model.digest}?task=digits"
    device.request("GET", part, headers={"Range": "bytes=0-9"})
    device.model(model.digest, "another")
    assert history(operator)[0].download_bytes == len(model.to_bytes()) + 10
    assert history(operator, "another")[0].download_bytes == len(model.to_bytes())


def test_a_model_comes_under_its_own_digest(http: Server, operator: Operator, model: Model) -> None:
    path, data = f"/v1/admin/models/{model.digest}", model.to_bytes()
    statuses = [
        http.put(path, headers=operator.headers, content=data).status_code for _ in range(2)
    ]
    assert statuses == [201, 200]
    with pytest.raises(DigestMismatch):
        checked(http.put(path, headers=operator.headers, content=data + b" "))
    other = hashlib.sha256(b"no model").hexdigest()
    with pytest.raises(ConfigurationError, match="safetensors"):
        checked(
            http.put(f"/v1/admin/models/{other}", headers=operator.headers, content=b"no model")
        )


# Health and documents


def test_a_failure_tells_nothing_of_the_inside(
    http: Server, operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("the secret inside")

    monkeypatch.setattr(http.app.services.queries, "tasks", fail)
    answer = http.get("/v1/tasks", headers=operator.headers)
    assert answer.status_code == 500
    assert "secret" not in answer.text
    with pytest.raises(ServerError):
        checked(answer)


def test_what_is_no_route_is_a_problem_too(http: Server) -> None:
    with pytest.raises(NotFound):
        checked(http.get("/v2/tasks"))
    answer = http.delete("/livez")
    assert (answer.status_code, answer.json()["status"]) == (405, 405)
    assert answer.headers["content-type"] == "application/problem+json"


def test_health_is_told(http: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    assert http.get("/livez").status_code == 200

    def fail() -> None:
        raise OSError("no disk")

    monkeypatch.setattr(http.app.services.payloads, "check_writable", fail)
    assert http.get("/readyz").status_code == 503
    monkeypatch.undo()
    assert http.get("/readyz").status_code == 200


def test_readiness_is_answered_soon_though_the_store_stalls(
    http: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = threading.Event()
    monkeypatch.setattr(health, "_READY_WITHIN", 0.1)
    monkeypatch.setattr(http.app.services.payloads, "check_writable", lambda: over.wait(20))
    began_at = time.monotonic()
    try:
        assert http.get("/readyz").status_code == 503
        assert time.monotonic() - began_at < 10
    finally:
        over.set()
    assert http.get("/readyz").status_code == 200


def test_metrics_are_counted(
    http: Server, operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    operator.begin(model)
    device = enrolled()
    include_one(device, model)
    text = http.get("/metrics", headers=ADMIN).text
    assert 'fedpress_uploads_total{result="staged",task="digits"} 1.0' in text
    assert 'route="/v1/assignments/{assignment}/update"' in text
    assert device.client_id not in text


def test_the_api_describes_itself(http: Server) -> None:
    schema = http.get("/openapi.json", headers=ADMIN).json()
    schemas = schema["components"]["schemas"]
    assert {"CheckInResponse", "RoundPlan", "Problem", "TaskConfig"} <= set(schemas)
    upload = schema["paths"]["/v1/assignments/{assignment}/update"]["put"]
    assert {"200", "201", "401", "409", "411", "413", "422"} <= set(upload["responses"])
    conflict = upload["responses"]["409"]["content"]["application/problem+json"]
    assert conflict["example"]["status"] == 409
    for path, operations in schema["paths"].items():
        for operation in operations.values():
            assert operation["summary"]
            assert operation["description"]
            assert ("401" in operation["responses"]) == (path not in ("/livez", "/readyz"))


def test_compressed_uploads_are_taken_too(operator: Operator, enrolled: Enrolled) -> None:
    model = Model.from_tensors({"w": np.zeros(4096, np.float32)})
    top = {"name": "top", "compressor": {"id": "topk", "fraction": 0.01, "magnitude_bits": 0}}
    operator.begin(model, profiles=[top], cohort={"size": 1, "minimum": 1}, rounds=1)
    device = enrolled()
    assignment = device.assignment("digits")
    update = np.zeros(4096, np.float32)
    update[:41] = 1.0
    body = device.body_for(assignment, update)
    device.upload(assignment.assignment, body)
    answer = device.check_in("digits", assignment.assignment, wait=30)
    assert answer is not None
    np.testing.assert_array_equal(device.model(answer.task.model).parameters, update)


def test_profiles_are_given_in_turn(operator: Operator, enrolled: Enrolled, model: Model) -> None:
    half = {"name": "half", "compressor": {"id": "topk", "fraction": 0.5}}
    whole = {"name": "whole", "compressor": {"id": "none"}}
    operator.begin(model, profiles=[whole, half])
    assert [enrolled().assignment("digits").profile for _ in range(2)] == ["whole", "half"]
