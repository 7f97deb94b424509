"""Renders deploy/helm/fedpress by Helm, which the tests do not need.

    python -m tests.golden.render_chart

To be run after each change of the chart; tests/examples/test_helm_chart.py looks at what it wrote,
and says so if the chart has changed since.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "fedpress"
RENDERED = Path(__file__).parent / "chart"
_STORE = {"store": {"url": "s3://models/fedpress"}}
CASES: Mapping[str, Mapping[str, Any]] = {
    "least": _STORE,
    "stopped": {**_STORE, "stopped": True},
    "everything": {
        "image": {"digest": "sha256:" + "0" * 64, "pullSecrets": [{"name": "registry"}]},
        "store": {
            "url": "s3://models/fedpress",
            "endpoint": "http://store:7070",
            "region": "eu-central-1",
            "accessKeyId": "fedpress",
        },
        "authority": False,
        "settings": {"FEDPRESS_LOG_LEVEL": "debug", "FEDPRESS_POLL_SECONDS": "7"},
        "trustedProxies": "10.0.0.0/8",
        "api": {"autoscaling": {"waitingCheckIns": 200}},
        "worker": {"autoscaling": {"enabled": True}},
        "ingress": {
            "enabled": True,
            "className": "nginx",
            "host": "fl.example.org",
            "tlsSecret": "fl-tls",
        },
        "networkPolicy": {
            "devicesFrom": [{"namespaceSelector": {}}],
            "operatorsFrom": [{"podSelector": {}}],
            "metricsFrom": [{"podSelector": {}}],
            "egressPorts": [5432, 7070],
        },
        "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "podLabels": {"team": "learning"},
        "podAnnotations": {"note": "a"},
        "nodeSelector": {"disk": "fast"},
        "tolerations": [{"operator": "Exists"}],
    },
}


def digest() -> str:
    """SHA-256 over names and contents of the chart's files but its README, and over the cases."""
    whole = hashlib.sha256(json.dumps(CASES, sort_keys=True).encode())
    for file in sorted(each for each in CHART.rglob("*") if each.is_file()):
        if file.name != "README.md":
            content = hashlib.sha256(file.read_bytes()).hexdigest()
            whole.update(f"{file.relative_to(CHART).as_posix()} {content}\n".encode())
    return whole.hexdigest()


def rendered(values: Mapping[str, Any]) -> str:
    """What `helm template` prints; raises CalledProcessError."""
    command = ["helm", "template", "demo", str(CHART), "--namespace", "fl", "--values", "-"]
    done = subprocess.run(command, input=json.dumps(values), text=True, capture_output=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return done.stdout


def main() -> None:
    RENDERED.mkdir(exist_ok=True)
    for name, values in CASES.items():
        (RENDERED / f"{name}.yaml").write_text(rendered(values))
    (RENDERED / "digest").write_text(f"{digest()}\n")


if __name__ == "__main__":
    main()
