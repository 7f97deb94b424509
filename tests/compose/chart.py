"""Follow deploy/helm/fedpress/README.md on a Kubernetes cluster, and count what it costs devices.

    KUBECONFIG=... python -m tests.compose.chart --image REPOSITORY:TAG --next TAG

Runs the README's own commands, in an empty namespace that is removed afterwards: keys, Secrets,
values, install, a device that joins, update, roll back, uninstall; only names, passwords and
requests for CPU are replaced. Meanwhile 44 devices train and wait, pods are evicted and killed.
The namespace admits restricted pods alone. PostgreSQL, an S3 store and the devices are in a second
one. Prints a table of figures; exit code 1 if
a request failed, or an upload was lost or counted twice.

It needs kubectl and helm on the PATH, and images that the cluster's nodes can pull or have: the
server's, built from server/Dockerfile, at the two tags (which may be the same build);
fedpress-demo (--build-arg EXTRAS=demo), and those of PostgreSQL and the store. With --older TAG it
begins with a release of an older schema, and follows the README over the change of schema.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.golden.render_chart import CHART
from tests.ports import unused

ROOT = CHART.parents[2]
NAMESPACE, BESIDE = "fedpress-chart-test", "fedpress-chart-test-beside"
BESIDES = """
apiVersion: v1
kind: Secret
metadata: {{name: password}}
stringData: {{password: "{password}"}}
---
apiVersion: v1
kind: Pod
metadata: {{name: postgres, labels: {{app: postgres}}}}
spec:
  containers:
    - name: postgres
      image: {postgres}
      env:
        - {{name: POSTGRES_USER, value: fedpress}}
        - {{name: POSTGRES_DB, value: fedpress}}
        - {{name: POSTGRES_PASSWORD_FILE, value: /secret/password}}
        - {{name: POSTGRES_INITDB_ARGS, value: --auth-host=scram-sha-256}}
      volumeMounts: [{{name: secret, mountPath: /secret}}]
      readinessProbe:
        exec: {{command: [pg_isready, -h, 127.0.0.1, -U, fedpress]}}
        periodSeconds: 2
        timeoutSeconds: 10
  volumes: [{{name: secret, secret: {{secretName: password}}}}]
---
apiVersion: v1
kind: Service
metadata: {{name: postgres}}
spec: {{selector: {{app: postgres}}, ports: [{{port: 5432}}], publishNotReadyAddresses: true}}
---
apiVersion: v1
kind: Pod
metadata: {{name: store, labels: {{app: store}}}}
spec:
  containers:
    - name: store
      image: {store}
      command:
        - sh
        - -c
        - >-
          mkdir -p /data/models &&
          exec versitygw --port :7070 --health /healthz --quiet posix /data
      env:
        - {{name: ROOT_ACCESS_KEY, value: fedpress}}
        - {{name: ROOT_SECRET_KEY, value: "{password}"}}
      volumeMounts: [{{name: data, mountPath: /data}}]
      readinessProbe:
        httpGet: {{path: /healthz, port: 7070}}
        periodSeconds: 2
        timeoutSeconds: 10
  volumes: [{{name: data, emptyDir: {{}}}}]
---
apiVersion: v1
kind: Service
metadata: {{name: store}}
spec: {{selector: {{app: store}}, ports: [{{port: 7070}}], publishNotReadyAddresses: true}}
---
apiVersion: v1
kind: Pod
metadata: {{name: load}}
spec:
  containers:
    - name: load
      image: {demo}
      imagePullPolicy: IfNotPresent
      command: [sleep, infinity]
"""
REQUESTS = {"requests": {"cpu": "50m", "memory": "128Mi"}}
SMALL = {
    "settings": {"FEDPRESS_POLL_SECONDS": "0.5", "FEDPRESS_LEASE_SECONDS": "5"},
    "networkPolicy": {
        "operatorsFrom": [
            {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": BESIDE}}}
        ]
    },
    "api": {"resources": REQUESTS, "autoscaling": {"max": 2}},
    "worker": {"resources": REQUESTS},
    "scheduler": {"resources": REQUESTS},
}
"""What the README's values lack for a test on a small cluster."""


class Shell:
    """Runs commands in a folder, and shows them with what they print."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"

    def run(self, command: str, *, fails: bool = False) -> str:
        """What it prints; SystemExit unless it fails or does not, as it should."""
        print("$ " + command.strip().replace("\n", "\n> "), flush=True)
        began = time.monotonic()
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=self._folder,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PATH": self._path},
        )
        print(done.stdout, end="", flush=True)
        if (done.returncode != 0) != fails:
            seconds = time.monotonic() - began
            raise SystemExit(f"FAILED: exit code {done.returncode} after {seconds:.0f} s")
        return done.stdout

    def kubectl(self, arguments: str, *, fails: bool = False) -> str:
        return self.run(f"kubectl -n {NAMESPACE} {arguments}", fails=fails)

    def read(self, arguments: str) -> str:
        """What kubectl prints, which is not shown."""
        command = ["bash", "-euo", "pipefail", "-c", f"kubectl -n {NAMESPACE} {arguments}"]
        return subprocess.run(command, text=True, check=True, stdout=subprocess.PIPE).stdout


def say(what: str) -> None:
    print(f"\n== {what}", flush=True)


class Readme:
    """The README's code blocks, with this test's names for the reader's."""

    def __init__(self, replaced: dict[str, str]) -> None:
        self._text = (CHART / "README.md").read_text()
        self._replaced = replaced

    def block(self, heading: str, containing: str) -> str:
        """The first one below a heading that contains a text."""
        section = self._text.split(f"\n## {heading}\n")[1].split("\n## ")[0]
        pattern = re.compile(r"^( *)```\w+\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
        indent, text = next(each for each in pattern.findall(section) if containing in each[1])
        text = re.sub(f"^{indent}", "", text, flags=re.MULTILINE)
        for old, new in self._replaced.items():
            text = text.replace(old, new)
        return str(text)


class Load:
    """tests.compose.load in a pod: devices that train and devices that wait."""

    def __init__(self, shell: Shell) -> None:
        self._shell = shell
        inside = f"kubectl -n {BESIDE} exec -i load --"
        shell.run(
            f"(cd {ROOT} && tar -c --exclude=__pycache__ tests/*.py tests/compose tests/system)"
            f" | {inside} tar -x -C /tmp"
        )
        shell.kubectl(
            "get secret fedpress -o 'jsonpath={.data.admin-token}' | base64 -d"
            f" | {inside} sh -c 'cat > /tmp/token'"
        )
        urls = f"http://fl.{NAMESPACE}:8080 http://fl-operators.{NAMESPACE}:8081"
        command = f"python -m tests.compose.load {urls} /tmp/token"
        shell.run(f"{inside} sh -c 'cd /tmp; {command} > /tmp/log 2>&1 & echo $! > /tmp/pid'")
        self._wait_for("under load")

    def _log(self) -> str:
        command = ["kubectl", "-n", BESIDE, "exec", "load", "--", "cat", "/tmp/log"]
        return subprocess.run(command, text=True, check=True, stdout=subprocess.PIPE).stdout

    def _wait_for(self, text: str) -> None:
        give_up = time.monotonic() + 300
        while text not in (log := self._log()):
            if time.monotonic() > give_up or "Traceback" in log:
                raise SystemExit(f"FAILED: the load does not say {text!r}:\n{log[-3000:]}")
            time.sleep(1)

    def end(self) -> list[str]:
        """What it counted; SystemExit if it lost or doubled anything."""
        self._shell.run(f"kubectl -n {BESIDE} exec load -- sh -c 'kill -TERM $(cat /tmp/pid)'")
        self._wait_for("0 lost, 0 doubled")
        time.sleep(1)  # ... until the lines after that one are written, too
        return [line for line in self._log().splitlines() if line != "under load"]


class Figures:
    """Seconds that each step took, and what was counted meanwhile."""

    def __init__(self) -> None:
        self.rows = list[tuple[str, str]]()

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        say(what)
        began = time.monotonic()
        yield
        self.rows.append((what, f"{time.monotonic() - began:.0f} s"))

    def show(self) -> None:
        width = max(len(what) for what, _ in self.rows)
        for what, figure in self.rows:
            print(f"{what:{width}}  {figure}")


class Cluster:
    """The steps, in the README's order."""

    def __init__(self, given: argparse.Namespace, folder: Path) -> None:
        self.given, self.shell, self.figures = given, Shell(folder), Figures()
        repository, _, self.tag = given.image.rpartition(":")
        self.password = secrets.token_hex(16)
        (folder / "small.json").write_text(json.dumps(SMALL))
        devices, operators = unused(), unused()
        self.readme = Readme(
            {
                "-n fl ": f"-n {NAMESPACE} ",
                "namespace fl\n": f"namespace {NAMESPACE}\n",
                "registry.example.org/fedpress-server": repository,
                "fedpress:PASSWORD@postgres.db:": f"fedpress:{self.password}@postgres.{BESIDE}:",
                "'SECRET'": self.password,
                "minio.store:9000": f"store.{BESIDE}:7070",
                "9000": "7070",
                "-f my-values.yaml": "-f my-values.yaml -f small.json",
                "--wait": "--wait --timeout 10m",
                "deploy/helm/fedpress": str(CHART),
                "examples/compose": str(ROOT / "examples" / "compose"),
                # Ports of this machine that no other server has; inside a pod they stay.
                "8080:8080": f"{devices}:8080",
                "http://127.0.0.1:8080": f"http://127.0.0.1:{devices}",
                "8081:8081": f"{operators}:8081",
                "URL=http://127.0.0.1:8081\n": f"URL=http://127.0.0.1:{operators}\n",
            }
        )
        self.values = folder / "my-values.yaml"

    def backends(self) -> None:
        say("PostgreSQL and a store")
        self.shell.run(f"kubectl create namespace {BESIDE}")
        account = "--for=create serviceaccount/default --timeout=60s"  # pods are refused before
        self.shell.run(f"kubectl -n {BESIDE} wait {account}")
        text = BESIDES.format(
            postgres=self.given.postgres,
            store=self.given.store,
            demo=self.given.demo,
            password=self.password,
        )
        self.shell.run(f"kubectl -n {BESIDE} apply -f - <<'END'{text}END")
        self.shell.run(f"kubectl -n {BESIDE} wait --for=condition=Ready pod --all --timeout=300s")

    def install(self, tag: str) -> None:
        say("keys, Secrets, values")
        self.shell.run(self.readme.block("Install", "genpkey"))
        strict = "pod-security.kubernetes.io/enforce=restricted"
        self.shell.run(f"kubectl label namespace {NAMESPACE} {strict}")
        self.shell.run(self.readme.block("Install", "admin-token"))
        text = self.readme.block("Install", "image:")
        # No ingress controller is asked for, so devices come to the Service.
        lines = (each for each in text.splitlines() if not each.startswith(("ingress", "trusted")))
        self.values.write_text("\n".join(lines))
        with self.figures.timed(f"helm install {tag}"):
            command = self.readme.block("Install", "helm install")
            self.shell.run(f"{command.strip()} --set image.tag={tag}")
        self.shell.kubectl("get pods,services,hpa,pdb,networkpolicy")

    def enrol(self) -> None:
        with self.figures.timed("task of the example, three devices of the example, 30 rounds"):
            blocks = ("service/fl-operators", "task create", "digits:trainer")
            text = "".join(self.readme.block("Enrol a device", each) for each in blocks)
            self.shell.run(f"trap 'kill $(jobs -p)' EXIT\n{text}fedpress task list")

    def change_schema(self, old: str) -> None:
        upgrade = self.readme.block("Update", "image.tag=0.2.0")
        upgrade = upgrade.replace("image.tag=0.2.0", f"image.tag={self.tag}")
        with self.figures.timed("helm upgrade to another schema under servers that run: refused"):
            self.shell.run(upgrade, fails=True)
        if "stop them first" not in self.shell.kubectl("logs job/fl-migrate"):
            raise SystemExit("FAILED: migrate does not say why")
        self.list_servers()
        with self.figures.timed("servers are stopped, and started again with the new release"):
            text = self.readme.block("Update", "stopped=true")
            text = text.replace("image.tag=0.1.0", f"image.tag={old}")
            self.shell.run(text.replace("image.tag=0.2.0", f"image.tag={self.tag}"))
        with self.figures.timed("helm rollback over a schema: times out, the new servers go on"):
            text = self.readme.block("Roll back", "helm rollback")
            self.shell.run(
                text.replace("rollback fl", "rollback fl 1").replace("10m", "60s"), fails=True
            )
            self.list_servers()
            self.shell.run(upgrade)

    def list_servers(self) -> None:
        self.shell.run(self.readme.block("Enrol a device", "exec deployment/fl-api"))

    def update(self) -> None:
        upgrade = self.readme.block("Update", "image.tag=0.2.0").strip()
        upgrade = upgrade.replace("image.tag=0.2.0", f"image.tag={self.given.next}")
        history = self.shell.run(f"helm history fl -n {NAMESPACE} -o json | tail -n 1")
        revision = json.loads(history)[-1]["revision"]
        load = Load(self.shell)
        with self.figures.timed(f"helm upgrade from {self.tag} to {self.given.next}"):
            self.shell.run(upgrade)
        with self.figures.timed("helm upgrade of a setting"):
            self.shell.run(f"{upgrade} --set settings.FEDPRESS_LOG_LEVEL=warning")
        rollback = self.readme.block("Roll back", "helm rollback")
        with self.figures.timed("helm rollback of the setting"):
            self.shell.run(rollback)
        with self.figures.timed(f"helm rollback to {self.tag}"):
            self.shell.run(rollback.replace("rollback fl", f"rollback fl {revision}"))
        with self.figures.timed("every api server is evicted; the budget admits one at a time"):
            self.evict()
        counted = load.end()
        self.figures.rows += [("under load", line) for line in counted]
        if any(line.startswith("FAILED") for line in counted):
            raise SystemExit("FAILED: not all requests were answered as they should be")

    def evict(self) -> None:
        # Helm may return while the last server of the other release is still there.
        self.shell.kubectl("rollout status deployment/fl-api --timeout=300s")
        names = self.pods("api")
        body = '{"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "%s"}}'
        for number, name in enumerate(names):
            path = f"/api/v1/namespaces/{NAMESPACE}/pods/{name}/eviction"
            evict = f"kubectl create --raw {path} -f - <<< '{body % name}'"
            if number:
                answer = self.shell.run(evict, fails=True)
                if "disruption budget" not in answer:
                    raise SystemExit("FAILED: it is not the budget that refuses")
                self.shell.kubectl("rollout status deployment/fl-api --timeout=300s")
                time.sleep(5)
            self.shell.run(evict)
        self.shell.kubectl("rollout status deployment/fl-api --timeout=300s")

    def pods(self, component: str) -> list[str]:
        """The pods of a role that are not about to end."""
        label = f"app.kubernetes.io/component={component}"
        every = json.loads(self.shell.read(f"get pods -l {label} -o json"))["items"]
        names = (e["metadata"]["name"] for e in every if "deletionTimestamp" not in e["metadata"])
        return list(names)

    def uninstall(self) -> None:
        with self.figures.timed("helm uninstall"):
            self.shell.run(self.readme.block("Uninstall", "helm uninstall"))
            self.shell.kubectl("wait --for=delete pod --all --timeout=120s")
        every_namespace = self.shell.run(f"kubectl -n {BESIDE} get configmaps -o name")
        left = self.shell.kubectl(
            "get all,secrets,configmaps,pdb,hpa,networkpolicy,ingress,jobs -o name"
        )
        expected = {"secret/fedpress", "secret/fedpress-keys", *every_namespace.split()}
        if more := set(left.split()) - expected:
            raise SystemExit(f"FAILED: left behind: {more}")


def remove() -> None:
    subprocess.run(
        ["kubectl", "delete", "namespace", NAMESPACE, BESIDE, "--ignore-not-found", "--wait"]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--image", required=True, help="the server's, REPOSITORY:TAG")
    parser.add_argument("--next", required=True, help="tag of the release to upgrade to")
    parser.add_argument("--older", help="tag of a release with an older schema, to begin with")
    parser.add_argument("--demo", default="fedpress-demo", help="image that devices run in")
    parser.add_argument("--postgres", default="postgres:15")
    parser.add_argument("--store", default="versity/versitygw:v1.7.0")
    given = parser.parse_args()
    remove()
    try:
        with tempfile.TemporaryDirectory() as folder:
            cluster = Cluster(given, Path(folder))
            cluster.backends()
            cluster.install(given.older or cluster.tag)
            cluster.enrol()
            if given.older:
                cluster.change_schema(given.older)
            cluster.update()
            cluster.uninstall()
    finally:
        remove()
    say("all is as it should be")
    cluster.figures.show()


if __name__ == "__main__":
    main()
