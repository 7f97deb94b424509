"""What the Helm chart promises, on what Helm has made of it (`tests.golden.render_chart`)."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedpress_server import Settings
from fedpress_server.metrics import Metrics
from tests.compose import chart
from tests.golden.render_chart import CASES, CHART, RENDERED, digest, rendered

Manifest = dict[str, Any]
SERVERS = ("api", "worker", "scheduler")
VERSIONS = ("1.28", "1.34")
"""Of Kubernetes."""


@cache
def manifests(case: str) -> list[Manifest]:
    texts = yaml.safe_load_all((RENDERED / f"{case}.yaml").read_text())
    return [each for each in texts if each is not None]


def one(case: str, kind: str, name: str) -> Manifest:
    (manifest,) = (
        each for each in manifests(case) if (each["kind"], each["metadata"]["name"]) == (kind, name)
    )
    return manifest


def pods(case: str) -> Iterator[tuple[str, Manifest, Manifest]]:
    """The component, the pod's specification and its only container."""
    for each in manifests(case):
        if each["kind"] in ("Deployment", "Job"):
            template = each["spec"]["template"]
            (container,) = template["spec"]["containers"]
            component = template["metadata"]["labels"]["app.kubernetes.io/component"]
            yield component, template["spec"], container


def environment(container: Manifest) -> dict[str, str]:
    names = [each["name"] for each in container["env"]]
    assert len(set(names)) == len(names)
    return {each["name"]: each["value"] for each in container["env"]}


def selects(selector: Manifest, labels: Manifest) -> bool:
    return selector.items() <= labels.items()


def test_what_is_looked_at_here_is_of_this_chart() -> None:
    assert (RENDERED / "digest").read_text().strip() == digest(), (
        "the chart has changed: run python -m tests.golden.render_chart, with helm on the PATH"
    )


@pytest.mark.skipif(shutil.which("helm") is None, reason="helm is not on the PATH")
def test_helm_renders_the_same_again() -> None:
    for case, values in CASES.items():
        assert rendered(values) == (RENDERED / f"{case}.yaml").read_text()


@pytest.mark.skipif(
    importlib.util.find_spec("kubernetes_validate") is None,
    reason="kubernetes-validate, which has the schemas, is not installed",
)
def test_kubernetes_knows_every_field() -> None:
    import kubernetes_validate

    for version in VERSIONS:
        for each in (each for case in CASES for each in manifests(case)):
            if each["apiVersion"] != "monitoring.coreos.com/v1":
                kubernetes_validate.validate(each, version, strict=True)


@pytest.mark.parametrize("case", CASES)
def test_a_pod_can_do_no_more_than_it_must(case: str) -> None:
    components = []
    for component, pod, container in pods(case):
        components.append(component)
        assert pod["automountServiceAccountToken"] is False
        context = pod["securityContext"]
        assert context["runAsNonRoot"] is True
        assert context["runAsUser"] == context["fsGroup"] == 10001  # as in server/Dockerfile
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"] == {
            "readOnlyRootFilesystem": True,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        }
        assert "memory" in container["resources"]["limits"]
        assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
        mounts = {each["name"]: each for each in container["volumeMounts"]}
        for volume in pod["volumes"]:
            mount = mounts.pop(volume["name"])
            if "secret" in volume:
                assert volume["secret"]["defaultMode"] == 0o440
                assert mount["readOnly"] is True
            else:
                assert volume["emptyDir"]["sizeLimit"]
        assert not mounts
    assert sorted(components) == sorted((*SERVERS, "migrate"))


@pytest.mark.parametrize("case", CASES)
def test_every_variable_is_a_setting_and_none_is_a_secret(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _, pod, container in pods(case):
        folders = [each["mountPath"] for each in container["volumeMounts"]]
        values = environment(container)
        for name, value in values.items():
            setting = name.removeprefix("FEDPRESS_").lower()
            assert setting in Settings.model_fields, name
            if setting.endswith(("_file", "_dir")):
                assert any(value.startswith(f"{folder}/") for folder in folders), name
        assert not {f"FEDPRESS_{name}" for name in ("ADMIN_TOKEN", "DATABASE_URL")} & values.keys()
        kept = {name: v for name, v in values.items() if not name.endswith("_FILE")}
        for name, value in kept.items():
            monkeypatch.setenv(name, value)
        if "FEDPRESS_STORE_ACCESS_KEY_ID" in kept:
            monkeypatch.setenv("FEDPRESS_STORE_SECRET_ACCESS_KEY", "as the file has it")
        loaded = Settings.load(None)
        assert loaded.store_url == "s3://models/fedpress"
        (data,) = (v for v in pod["volumes"] if v["name"] == "data")
        assert data["emptyDir"]["sizeLimit"] == "3Gi"
        assert loaded.store_cache_bytes < 3 * 2**30


@pytest.mark.parametrize("case", CASES)
def test_alive_is_not_ready_and_a_server_that_stops_has_time_to(case: str) -> None:
    for component, pod, container in pods(case):
        if component == "migrate":
            assert pod["restartPolicy"] == "Never"
            assert container["args"] == ["server", "migrate"]
            continue
        assert container["args"] == ["server", "run"]
        probes = {
            kind: container[f"{kind}Probe"]["httpGet"]["path"]
            for kind in ("startup", "liveness", "readiness")
        }
        assert probes == {"startup": "/livez", "liveness": "/livez", "readiness": "/readyz"}
        ports = {each["name"]: str(each["containerPort"]) for each in container["ports"]}
        values = environment(container)
        listens = {"devices": values["FEDPRESS_PORT"], "operators": values["FEDPRESS_ADMIN_PORT"]}
        assert ports == listens
        waits = int(values["FEDPRESS_DRAIN_SECONDS"]) + int(values["FEDPRESS_SHUTDOWN_SECONDS"])
        if component == "api":
            command, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
            assert command == "sleep"
            waits += int(seconds)
        assert pod["terminationGracePeriodSeconds"] >= waits + 10


def test_migrate_runs_before_servers_and_none_stops_before_another_is_ready() -> None:
    for case in CASES:
        hooks = one(case, "Job", "demo-migrate")["metadata"]["annotations"]
        assert hooks["helm.sh/hook"] == "pre-install,pre-upgrade"
        for role in SERVERS:
            strategy = one(case, "Deployment", f"demo-{role}")["spec"]["strategy"]
            assert strategy["rollingUpdate"]["maxUnavailable"] == 0


def test_a_release_that_is_stopped_has_no_server() -> None:
    for role in SERVERS:
        assert one("stopped", "Deployment", f"demo-{role}")["spec"]["replicas"] == 0
        assert one("least", "Deployment", f"demo-{role}")["spec"].get("replicas") == (
            None if role == "api" else 1
        )
    kinds = {each["kind"] for each in manifests("stopped")}
    assert "HorizontalPodAutoscaler" not in kinds


@pytest.mark.parametrize("case", CASES)
def test_what_selects_pods_selects_those_that_are_there(case: str) -> None:
    labels = {
        component: each["spec"]["template"]["metadata"]["labels"]
        for each in manifests(case)
        if each["kind"] in ("Deployment", "Job")
        for component in [each["metadata"]["labels"]["app.kubernetes.io/component"]]
    }
    every = set(labels)
    expected = {
        ("Deployment", "demo-api"): {"api"},
        ("Deployment", "demo-worker"): {"worker"},
        ("Deployment", "demo-scheduler"): {"scheduler"},
        ("Service", "demo"): {"api"},
        ("Service", "demo-operators"): {"api"},
        ("Service", "demo-metrics"): every,
        ("PodDisruptionBudget", "demo-api"): {"api"},
        ("PodDisruptionBudget", "demo-worker"): {"worker"},
        ("NetworkPolicy", "demo"): every,
        ("NetworkPolicy", "demo-api"): {"api"},
    }
    seen = set()
    for each in manifests(case):
        spec, place = each["spec"], (each["kind"], each["metadata"]["name"])
        if each["kind"] == "Service":
            selector = spec["selector"]
        elif place in expected:
            selector = spec.get("podSelector", spec.get("selector"))["matchLabels"]
        else:
            continue
        seen.add(place)
        assert {name for name, each in labels.items() if selects(selector, each)} == expected[place]
    assert expected.keys() - seen <= {("Service", "demo-metrics")}


def test_autoscaling_goes_by_deployments_and_metrics_that_there_are() -> None:
    scalers = [e for e in manifests("everything") if e["kind"] == "HorizontalPodAutoscaler"]
    assert {each["spec"]["scaleTargetRef"]["name"] for each in scalers} == {
        "demo-api",
        "demo-worker",
    }
    told = Metrics().text().decode()
    for each in scalers:
        target = one("everything", "Deployment", each["spec"]["scaleTargetRef"]["name"])
        assert "replicas" not in target["spec"]  # or each upgrade would undo the scaling
        for metric in each["spec"]["metrics"]:
            if metric["type"] == "Pods":
                assert f"# TYPE {metric['pods']['metric']['name']} gauge" in told
    budgets = [e for e in manifests("least") if e["kind"] == "PodDisruptionBudget"]
    assert [each["spec"]["maxUnavailable"] for each in budgets] == [1, 1]


def test_by_default_devices_come_in_operators_do_not_and_servers_reach_their_stores() -> None:
    everything = one("least", "NetworkPolicy", "demo")["spec"]
    assert everything["policyTypes"] == ["Ingress", "Egress"]
    assert "ingress" not in everything
    ports = [port["port"] for rule in everything["egress"] for port in rule["ports"]]
    assert ports == [53, 53, 5432, 443]
    (rule,) = one("least", "NetworkPolicy", "demo-api")["spec"]["ingress"]
    assert rule == {"ports": [{"protocol": "TCP", "port": "devices"}]}
    rules = one("everything", "NetworkPolicy", "demo-api")["spec"]["ingress"]
    assert [each["ports"][0]["port"] for each in rules] == ["devices", "operators"]
    assert all("from" in each for each in rules)


def test_the_readme_has_the_commands_that_are_executed_on_a_cluster() -> None:
    readme = chart.Readme({"-n fl ": "-n elsewhere "})
    used = re.findall(r'\.block\("([^"]+)", "([^"]+)"\)', Path(chart.__file__).read_text())
    assert len(used) > 8
    for heading, containing in used:
        block = readme.block(heading, containing)
        assert containing in block
        assert "-n fl " not in block
        if shutil.which("bash"):
            subprocess.run(["bash", "-n", "-c", block], check=True)


def test_values_and_their_schema_name_the_same() -> None:
    def names(value: Any, schema: Any, path: str = "") -> Iterator[str]:
        if "$ref" in schema:
            schema = document["definitions"][schema["$ref"].rpartition("/")[2]]
        if not isinstance(value, dict) or "properties" not in schema:
            return
        for name in value.keys() ^ schema["properties"].keys():
            yield f"{path}{name}"
        for name in value.keys() & schema["properties"].keys():
            yield from names(value[name], schema["properties"][name], f"{path}{name}.")

    document = yaml.safe_load((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert set(names(values, document)) == {"global", "worker.autoscaling.waitingCheckIns"}
