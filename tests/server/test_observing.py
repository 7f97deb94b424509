"""What operators see: lines of the log, figures, and neither a device's name nor a secret."""

import io
import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.parser import text_string_to_metric_families

from fedpress_protocols.errors import ConfigurationError
from fedpress_protocols.fleet import FleetStatus, LogLevelStatus
from fedpress_protocols.model import Model
from fedpress_server import Settings, failpoints
from fedpress_server.observing import logs
from fedpress_server.observing.series import Distribution, Histograms
from tests.devices import ADMIN, ADMIN_TOKEN, Operator
from tests.server.in_process import Clock, Enrolled, Server, Start, include_one, ones


@contextmanager
def logged(form: str = "json", level: logs.Level = "debug", **how: Any) -> Iterator[io.StringIO]:
    """What this process logs meanwhile; `lines` of it is what `install` returned."""
    names = ("", *logs.OURS, "uvicorn.error")
    before = {name: logging.getLogger(name).level for name in names}
    handlers, raises = logging.getLogger().handlers[:], logging.raiseExceptions
    stream = io.StringIO()
    try:
        for name in ("uvicorn", "uvicorn.error"):  # as serve leaves them
            logging.getLogger(name).setLevel(logging.NOTSET)
            logging.getLogger(name).propagate = True
            logging.getLogger(name).disabled = False
        stream.lines = logs.install(level, form, stream=stream, **how)  # type: ignore[attr-defined, arg-type]
        yield stream
    finally:
        logging.captureWarnings(False)
        logging.raiseExceptions = raises
        logging.getLogger().handlers[:] = handlers
        for name, old in before.items():
            logging.getLogger(name).setLevel(old)


def events(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def figure(http: Server, name: str, **labels: str) -> float:
    """The value of a metric as Prometheus would scrape it."""
    (found,) = [
        sample.value
        for family in text_string_to_metric_families(http.get("/metrics", headers=ADMIN).text)
        for sample in family.samples
        if sample.name == name and sample.labels == labels
    ]
    return float(found)


# Lines


def test_a_request_is_one_line_that_says_on_whose_behalf(
    http: Server, operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    operator.begin(model, rounds=2, cohort={"size": 1, "minimum": 1})
    device = enrolled()
    with logged(role="api") as stream:
        stream.lines.pseudonyms = logs.Pseudonyms(b"secret")  # type: ignore[attr-defined]
        device.check_in("digits", include_one(device, model), wait=30)
    told = events(stream)
    (line,) = [each for each in told if each.get("method") == "PUT" and "status" in each]
    assert line["route"] == "/v1/assignments/{assignment}/update"
    assert (line["level"], line["logger"]) == ("debug", "fedpress_server.requests")
    assert (line["status"], line["role"]) == (201, "api")
    assert (line["task"], line["round"], line["attempt"]) == ("digits", 1, 1)
    assert line["received_bytes"] > 0
    assert line["sent_bytes"] > 100
    assert line["seconds"] > 0
    assert line["client"] == logs.Pseudonyms(b"secret").of(device.client_id)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["at"])
    fold = next(each for each in told if "committed" in each["event"])
    assert (fold["task"], fold["round"], fold["job"]) == ("digits", 1, "fold")
    assert device.client_id not in stream.getvalue()


def test_at_info_devices_cost_no_line_and_what_operators_change_is_told(
    http: Server, operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    with logged(level="info") as stream:
        operator.begin(model, rounds=2, cohort={"size": 1, "minimum": 1})
        include_one(enrolled(), model)
    lines = [each for each in events(stream) if each["logger"] == "fedpress_server.requests"]
    assert lines
    assert all(each["route"].startswith("/v1/admin/") for each in lines)
    assert all(each["method"] in ("PUT", "POST") for each in lines)


@pytest.mark.parametrize(
    ("given", "is_taken"),
    [
        ("0123456789abcdef", True),
        ("req-2026.11.20_1", True),
        ("short", False),
        ("a" * 65, False),
        ("has a space in it", False),
        ('quote"quote"quote', False),
    ],
)
def test_a_request_keeps_a_sane_name_and_gets_another_for_one_that_is_not(
    http: Server, given: str, is_taken: bool
) -> None:
    answer = http.get("/v1/nothing", headers={"X-Request-Id": given})
    named = answer.headers["x-request-id"]
    assert (named == given) is is_taken
    assert answer.json()["request_id"] == named
    assert http.get("/livez").headers["x-request-id"] != named


def test_a_failure_is_one_line_with_its_traceback_as_a_field(http: Server) -> None:
    with logged() as stream, failpoints.armed("request-answered:raise"):
        http.get("/livez")
    (line,) = [each for each in events(stream) if "exception" in each]
    assert line["level"] == "error"
    assert line["route"] == "/livez"
    assert line["exception"]["type"] == "FailpointReached"
    assert "in reach" in line["exception"]["traceback"]
    assert "\n" in line["exception"]["traceback"]


def test_a_server_without_a_database_says_so_once_a_second(http: Server) -> None:
    with logged() as stream:
        http.app.services.database._backend.writes.dispose()
        http.app.services.readiness.fresh_until = 0.0
        gone = mock.Mock(side_effect=OSError("gone"))
        with mock.patch.object(http.app.services.payloads, "check_writable", gone):
            assert [http.get("/readyz").status_code for _ in range(5)] == [503] * 5
    told = [each for each in events(stream) if each["event"].startswith("put off")]
    assert 1 <= len(told) < 5
    assert told[0]["level"] == "warning"
    assert told[0]["cause"] == "OSError: gone"
    assert "exception" not in told[0]


def test_nobody_else_can_begin_a_line_of_text() -> None:
    with logged("text") as stream:
        logging.getLogger("fedpress_server").warning("task %s", "a\nERROR all is lost\x1b[2J")
    (line,) = stream.getvalue().splitlines()
    assert line.endswith(r"WARNING fedpress_server: task a\nERROR all is lost\x1b[2J")


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_line_that_is_too_long_is_cut(form: str) -> None:
    with logged(form) as stream:
        try:
            raise ValueError("x" * 10**6)
        except ValueError:
            logging.getLogger("fedpress_server").exception("y" * 10**6)
    assert len(stream.getvalue()) < 2 * 32768 + 3 * 4096


def test_libraries_stay_silent_at_debug_and_go_through_the_same_door() -> None:
    with logged() as stream:
        logging.getLogger("sqlalchemy.engine").info("INSERT INTO secrets")
        logging.getLogger("sqlalchemy.pool").error("gone")
        logging.getLogger("uvicorn.error").debug("a connection")
    assert [(each["logger"], each["event"]) for each in events(stream)] == [
        ("sqlalchemy.pool", "gone"),
        ("uvicorn.error", "a connection"),
    ]


def test_the_net_catches_what_looks_like_a_secret() -> None:
    secret = 'quo"te\\back'
    pem = "-----BEGIN PRIVATE KEY-----\nMC4CAQ\n-----END PRIVATE KEY-----"
    for form in ("text", "json"):
        with logged(form, secrets=[secret]) as stream:
            token = "fpe_" + "A1_-" * 8
            logging.getLogger("fedpress").error("%s and %s and %s", secret, token, pem)
            logging.getLogger("fedpress").error("more", extra={"field": secret})
        said = stream.getvalue()
        assert said.count("[secret]") == 4
        for each in (secret, token, "MC4CAQ", json.dumps(secret)[1:-1]):
            assert each not in said


def test_a_device_has_one_name_in_the_logs_of_one_deployment() -> None:
    ours, replica, others = (logs.Pseudonyms(key) for key in (b"a", b"a", b"b"))
    assert ours.of("client") == replica.of("client") != others.of("client")
    assert ours.of("client") != ours.of("other")
    assert re.fullmatch("[0-9a-f]{16}", ours.of("client"))


def test_no_device_is_named_before_the_key_is_there(http: Server, enrolled: Enrolled) -> None:
    device = enrolled()
    with logged() as stream:
        device.request("GET", "/v1/tasks")
    assert all("client" not in each for each in events(stream))
    assert device.client_id not in stream.getvalue()


# The level


def test_an_operator_changes_the_level_while_the_server_runs(
    http: Server, operator: Operator
) -> None:
    with logged(level="warning") as stream:
        before = LogLevelStatus.model_validate(operator.get("/v1/admin/log-level"))
        http.get("/livez")
        answer = http.put(
            "/v1/admin/log-level",
            json={"level": "debug"},
            headers={"Authorization": f"Bearer {ADMIN_TOKEN}"},
        )
        http.get("/livez")
    assert before.level == "warning"
    assert LogLevelStatus.model_validate(answer.json()).level == "debug"
    routes = [each.get("route") for each in events(stream)]
    assert routes.count("/livez") == 1
    with logged(level="info"):
        assert logs.toggle("info") == logs.level_now() == "debug"
        assert logs.toggle("info") == logs.level_now() == "info"
        with pytest.raises(ValueError, match="must be one of debug"):
            logs.set_level("loud")  # type: ignore[arg-type]


# Figures


def test_histograms_are_what_prometheus_client_would_make_of_the_same() -> None:
    bounds = (0.1, 1.0, 10.0)
    theirs, ours = CollectorRegistry(), CollectorRegistry()
    their = Histogram("h", "text", ("a",), registry=theirs, buckets=bounds)
    our = Histograms("h", "text", ("a",), bounds, ours)
    for value in (0.0, 0.1, 0.2, 1.0, 5.0, 10.0, 11.0, 1e9):
        their.labels("x").observe(value)
        our.labels("x").observe(value)
    for name, labels in [
        *(("h_bucket", {"a": "x", "le": le}) for le in ("0.1", "1.0", "10.0", "+Inf")),
        ("h_count", {"a": "x"}),
        ("h_sum", {"a": "x"}),
    ]:
        assert ours.get_sample_value(name, labels) == theirs.get_sample_value(name, labels)


def test_quantiles_lie_within_their_bucket() -> None:
    seen = Distribution((1.0, 2.0, 5.0))
    assert seen.quantile(0.5) is None
    for value in (1.5, 1.6, 4.0, 4.5):
        seen.observe(value)
    assert seen.quantile(0.5) == 2.0
    assert seen.quantile(0.75) == pytest.approx(3.5)
    seen.observe(99.0)
    assert seen.quantile(1.0) == 5.0


def test_what_is_sent_is_counted_and_priced(start: Start, model: Model, clock: Clock) -> None:
    with start(egress_price=0.5, egress_currency="USD") as http:
        operator = Operator(http)
        operator.begin(model)
        summary = operator.get("/v1/tasks/digits")
        headers = {"Authorization": f"Bearer {ADMIN_TOKEN}"}
        file = http.get(f"/v1/models/{summary['model']}", headers=headers)
        head = sum(len(k) + len(v) + 4 for k, v in file.headers.items())
        sent = figure(http, "fedpress_egress_bytes_total", kind="download")
        around = len("HTTP/1.1 200 OK\r\n\r\n") + len("date: Fri, 20 Nov 2026 20:00:00 GMT\r\n")
        assert sent == len(file.content) + head + around
        cost = figure(http, "fedpress_egress_cost_total", kind="download", currency="USD")
        assert cost == pytest.approx(sent / 2**30 * 0.5)
        fleet = FleetStatus.model_validate(operator.get("/v1/admin/fleet"))
        assert (fleet.download_bytes, fleet.egress_currency) == (sent, "USD")


def test_rounds_uploads_links_and_clocks_have_figures(
    http: Server, operator: Operator, enrolled: Enrolled, model: Model, clock: Clock
) -> None:
    operator.begin(model, rounds=5, cohort={"size": 2, "minimum": 2})
    first, second = enrolled(), enrolled()
    clock.advance(60)
    assignment = first.assignment("digits")
    second.assignment("digits")
    body = first.body_for(assignment, ones(model))
    clock.advance(30)
    first.upload(assignment.assignment, body)
    assert figure(http, "fedpress_round_state", task="digits", phase="collecting") == 1
    assert figure(http, "fedpress_round_participants", task="digits", state="staged") == 1
    assert figure(http, "fedpress_round_participants", task="digits", state="assigned") == 1
    assert figure(http, "fedpress_model_version", task="digits") == 0
    assert figure(http, "fedpress_tasks", state="running") == 1
    assert figure(http, "fedpress_staged_bytes_total", task="digits") == len(body)
    float32 = figure(http, "fedpress_staged_float32_bytes_total", task="digits")
    assert float32 == 4 * model.spec.size
    assert figure(http, "fedpress_uplink_unmeasured_total") == 1
    assert figure(http, "fedpress_bytes_in_flight_limit") == 256 * 2**20
    second.check_in("digits", include_one(second, model), wait=30)
    assert figure(http, "fedpress_model_version", task="digits") == 1
    name = "fedpress_round_duration_seconds_sum"
    assert figure(http, name, task="digits", phase="collecting") == 90.0
    assert figure(http, name, task="digits", phase="total") == 90.0
    assert figure(http, "fedpress_fold_job_seconds_count", kind="fold") == 1
    folder = str(http.app.services.settings.data_dir)
    assert figure(http, "fedpress_disk_free_bytes", folder=folder) > 0
    assert figure(http, "fedpress_db_pool_connections", state="used") >= 0
    first.request("GET", "/v1/tasks", skew=120)
    ahead = "fedpress_client_clock_skew_seconds_bucket"
    assert figure(http, ahead, side="ahead", le="120.0") == 1
    assert figure(http, ahead, side="ahead", le="60.0") == 0
    first.request("GET", "/v1/tasks", skew=-1000)
    first.request("GET", "/v1/tasks", headers={"Authorization": "Bearer of something wrong"})
    assert figure(http, "fedpress_auth_failures_total", reason="clock-skew") == 1
    assert figure(http, "fedpress_auth_failures_total", reason="invalid-token") == 1
    fleet = FleetStatus.model_validate(operator.get("/v1/admin/fleet"))
    assert fleet.clocks_ahead_seconds.num == 1
    assert fleet.clocks_ahead_seconds.median is not None
    assert 60 < fleet.clocks_ahead_seconds.median <= 120
    assert fleet.staged_float32_bytes == 8 * model.spec.size


def test_no_label_has_a_value_that_a_stranger_chooses(http: Server) -> None:
    for number in range(20):
        http.request(f"M{number}", f"/v1/x{number}", headers={"X-Request-Id": f"id-{number:08}"})
    series = [
        sample.labels
        for family in text_string_to_metric_families(http.get("/metrics", headers=ADMIN).text)
        for sample in family.samples
        if sample.name == "fedpress_http_request_duration_seconds_count"
    ]
    assert {"method": "other", "route": "unknown", "status": "404"} in series
    assert len(series) < 4


@pytest.mark.parametrize("price", [-0.01, float("nan"), float("inf"), "much"])
def test_a_price_is_a_number(price: Any) -> None:
    with pytest.raises(ConfigurationError, match="egress_price"):
        Settings.load(egress_price=price)


def test_the_disks_of_other_folders_are_told_of_too(start: Start, tmp_path: Path) -> None:
    (tmp_path / "database").mkdir()
    with start(watched_folders=f"{tmp_path / 'database'}, {tmp_path}") as http:
        for folder in (tmp_path / "database", tmp_path):
            size = figure(http, "fedpress_disk_size_bytes", folder=str(folder))
            assert 0 < figure(http, "fedpress_disk_free_bytes", folder=str(folder)) <= size


def test_a_folder_to_watch_that_is_not_there_is_refused(start: Start, tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigurationError, match=r"watched_folders names .*nowhere"),
        start(watched_folders=str(tmp_path / "nowhere")),
    ):
        pass
