"""What the compose files and the monitoring promise, as far as it can be seen without an engine.

`tests/compose/run` executes them.
"""

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedpress_server import Settings
from fedpress_server.metrics import Metrics

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "deploy" / "monitoring"
DASHBOARD = MONITORING / "grafana" / "dashboards" / "fedpress.json"
ONE_SHOT = {"prepare", "migrate", "open-task", "device"}


def services(file: str) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / file).read_text())["services"]
    return found


FILES = ("docker-compose.yml", "compose.embedded.yml")
EACH = [(file, name) for file in FILES for name in services(file)]


@pytest.mark.parametrize(("file", "name"), EACH)
def test_a_container_can_do_no_more_than_it_must(file: str, name: str) -> None:
    service = services(file)[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    user = str(service.get("user", "10001"))  # the image's own
    assert not user.startswith("0")
    if name not in ONE_SHOT:
        limits = service["deploy"]["resources"]["limits"]
        assert {"cpus", "memory", "pids"} <= limits.keys()
        assert service["restart"] == "unless-stopped"


def test_the_image_has_what_the_bill_of_materials_lists() -> None:
    image = re.search(r"^ARG EXTRAS=(\S+)$", (ROOT / "server" / "Dockerfile").read_text(), re.M)
    bill = re.search(r"server:\[(\S+)\]", (ROOT / ".ci" / "sbom").read_text())
    assert image is not None
    assert bill is not None
    assert image[1] == bill[1]


def test_what_serves_says_whether_it_is_well() -> None:
    found = services("docker-compose.yml")
    for name in found.keys() - ONE_SHOT:
        assert found[name]["healthcheck"]["test"][0] == "CMD", name


def test_only_this_machine_reaches_a_port_unless_it_is_said_otherwise() -> None:
    ports = [port for file in FILES for each in services(file).values()
             for port in each.get("ports", [])]  # fmt: skip
    assert ports
    assert all(
        re.match(r"\$\{FEDPRESS_PUBLISH\w*:-127\.0\.0\.1:\d+\}:\d+$", each) for each in ports
    )


def test_no_secret_stands_in_a_compose_file() -> None:
    for file in FILES:
        for name, service in services(file).items():
            for variable, value in service.get("environment", {}).items():
                if re.search("TOKEN|PASSWORD|SECRET", variable):
                    from_file = variable.endswith("_FILE") and value.startswith("/run/secrets/")
                    assert from_file or value.startswith("${FEDPRESS_ADMIN_TOKEN:?"), (
                        name,
                        variable,
                    )


def test_servers_are_given_settings_that_there_are() -> None:
    for file in FILES:
        for name in services(file).keys() & {"api", "worker", "scheduler", "migrate", "server"}:
            for variable in services(file)[name]["environment"]:
                setting = variable.removeprefix("FEDPRESS_").lower()
                assert setting in Settings.model_fields, (name, variable)


def known_metrics() -> set[str]:
    names: set[str] = set()
    for family in Metrics().registry.collect():
        ends = {
            "counter": ("_total",),
            "gauge": ("",),
            "histogram": ("_bucket", "_sum", "_count"),
        }[family.type]
        names |= {family.name + end for end in ends}
    return names


def test_the_proxy_gives_up_idle_connections_before_a_server_does() -> None:
    text = (ROOT / "deploy" / "proxy" / "nginx.conf").read_text()
    upstreams = re.findall(r"upstream (\w+) \{(.*?)\n  \}", text, re.DOTALL)
    assert [name for name, _ in upstreams] == re.findall(r"proxy_pass http://(\w+);", text)
    limits = [Settings.model_fields[name].default for name in ("header_timeout", "drain_seconds")]
    for _, directives in upstreams:
        assert re.search(r" keepalive \d+;", directives)
        (seconds,) = re.findall(r"keepalive_timeout (\d+)s;", directives)
        assert int(seconds) < min(limits)
    assert 'proxy_set_header Connection "";' in text


def test_alerts_and_dashboards_ask_for_metrics_that_there_are() -> None:
    path = ROOT / "tests" / "compose" / "dashboard_queries.py"
    spec = importlib.util.spec_from_file_location("dashboard_queries", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    groups = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    asked = [*module.queries(DASHBOARD), *(rule["expr"] for rule in rules)]
    named = {name for each in asked for name in re.findall(r"\bfedpress_\w+", each)}
    assert len(named) > 15
    assert named <= known_metrics()
    for rule in rules:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert {"summary", "description"} <= rule["annotations"].keys()


def test_the_dashboard_is_the_one_that_grafana_is_told_of() -> None:
    source = yaml.safe_load(
        (MONITORING / "grafana/provisioning/datasources/prometheus.yml").read_text()
    )
    dashboard = json.loads(DASHBOARD.read_text())
    assert {panel["datasource"]["uid"] for panel in dashboard["panels"]} == {
        each["uid"] for each in source["datasources"]
    }
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    places = {tuple(panel["gridPos"].values()) for panel in dashboard["panels"]}
    assert len(places) == len(dashboard["panels"])
