"""Run the Helm chart's pods on a Docker engine, as far as an engine can.

    python -m tests.compose.pods

For each pod that Helm has rendered (or --rendered FILE has) one container: its user and groups,
read-only root, capabilities, memory limit, variables, Secrets as a kubelet lays them out (links,
mode 0440, owned by root and the group), emptyDirs of the group. The probes are asked as the
manifest says, and a pod is ended as Kubernetes ends it: preStop, SIGTERM, the grace period. Then:
migrate, every role, a device that trains, servers replaced while it does, a key changed in the
Secret, a schema that does not change under servers that run.

It needs the image fedpress-server:0.1.0, and those of postgres and the store that
docker-compose.yml names, which tests/compose/run builds where they cannot be pulled. It is no
cluster: nothing here shows admission, scheduling, the kubelet, limits of
emptyDirs, autoscaling or network policies.
"""

from __future__ import annotations

import argparse
import json
import secrets
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import yaml

from fedpress.operator import Operator
from fedpress_protocols.errors import InvalidSignature
from fedpress_protocols.model import Model
from fedpress_protocols.signatures import DeviceKey
from tests import devices
from tests.golden.render_chart import CASES, rendered

NETWORK = "fedpress-pods"
IMAGE = "fedpress-server:0.1.0"
POSTGRES, STORE = "postgres:15", "versity/versitygw:v1.7.0"
VALUES = {
    **CASES["least"],
    "image": {"repository": IMAGE.partition(":")[0], "tag": IMAGE.partition(":")[2]},
    "store": {
        "url": "s3://fedpress/store",
        "endpoint": "http://fedpress-pods-store:7070",
        "accessKeyId": "fedpress",
    },
    "settings": {"FEDPRESS_POLL_SECONDS": "0.5", "FEDPRESS_LEASE_SECONDS": "5"},
}
Manifest = dict[str, Any]


def docker(*arguments: str, check: bool = True) -> str:
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True)
    if check and done.returncode:
        raise SystemExit(f"docker {' '.join(arguments)}\n{done.stdout}{done.stderr}")
    return done.stdout.strip() + ("" if check else done.stderr)


def say(what: str) -> None:
    print(f"== {what}", flush=True)


class Secret:
    """A Secret's folder as a kubelet mounts it; `update` changes it as a kubelet does."""

    def __init__(self, folder: Path, files: dict[str, bytes]) -> None:
        self.folder = folder
        folder.mkdir(mode=0o755)
        self.update(files)

    def update(self, files: dict[str, bytes]) -> None:
        version = self.folder / f"..{secrets.token_hex(4)}"
        version.mkdir(mode=0o755)
        for name, content in files.items():
            file = version / name
            file.write_bytes(content)
            shutil.chown(file, 0, 10001)
            file.chmod(0o440)
            if not (self.folder / name).is_symlink():
                (self.folder / name).symlink_to(f"..data/{name}")
        link = self.folder / "..data_tmp"
        link.symlink_to(version.name)
        link.rename(self.folder / "..data")
        for each in self.folder.iterdir():
            if not each.name.startswith("..") and each.name not in files:
                each.unlink()


class Pod:
    """A container for the pod of a Deployment or a Job; `mounted` has the folders of Secrets by
    name, and under "emptyDirs" one for those."""

    def __init__(self, name: str, template: Manifest, mounted: dict[str, Path]) -> None:
        self.name = f"{NETWORK}-{name}"
        self.spec = template["spec"]
        (self.container,) = self.spec["containers"]
        context, confined = self.spec["securityContext"], self.container["securityContext"]
        command = ["run", "--detach", "--name", self.name, "--network", NETWORK]
        command += ["--user", f"{context['runAsUser']}:{context['runAsGroup']}"]
        command += ["--group-add", str(context["fsGroup"])]
        if confined["readOnlyRootFilesystem"]:
            command.append("--read-only")
        command += [f"--cap-drop={each}" for each in confined["capabilities"]["drop"]]
        if not confined["allowPrivilegeEscalation"]:
            command.append("--security-opt=no-new-privileges:true")
        memory = self.container["resources"]["limits"]["memory"]
        command += ["--memory", memory.replace("Mi", "m").replace("Gi", "g")]
        for each in self.container["env"]:
            command += ["--env", f"{each['name']}={each['value']}"]
        places = {each["name"]: each["mountPath"] for each in self.container["volumeMounts"]}
        for volume in self.spec["volumes"]:
            place = places[volume["name"]]
            if "secret" in volume:
                source = mounted[volume["secret"]["secretName"]]
                command += ["--volume", f"{source}:{place}:ro"]
            else:
                folder = Path(tempfile.mkdtemp(dir=mounted["emptyDirs"]))
                shutil.chown(folder, 0, context["fsGroup"])
                folder.chmod(0o2777)
                command += ["--volume", f"{folder}:{place}"]
        docker(*command, self.container["image"], *self.container["args"])

    def url(self, port: str) -> str:
        number = {each["name"]: each["containerPort"] for each in self.container["ports"]}[port]
        template = '{{(index .NetworkSettings.Networks "' + NETWORK + '").IPAddress}}'
        return f"http://{docker('inspect', '--format', template, self.name)}:{number}"

    def probe(self, kind: str) -> int | None:
        """The status that the probe gets; None without an answer."""
        get = self.container[f"{kind}Probe"]["httpGet"]
        try:
            return httpx.get(f"{self.url(get['port'])}{get['path']}", timeout=5).status_code
        except httpx.HTTPError:
            return None

    def wait(self) -> None:
        """Until it has started and is ready, as long as the startup probe lets it."""
        startup = self.container["startupProbe"]
        give_up = time.monotonic() + startup["periodSeconds"] * startup["failureThreshold"]
        for kind in ("startup", "readiness"):
            while self.probe(kind) != 200:
                if time.monotonic() > give_up or not self.is_running:
                    raise SystemExit(f"{self.name} does not get ready:\n{self.logs()[-3000:]}")
                time.sleep(0.2)
        assert self.probe("liveness") == 200

    @property
    def is_running(self) -> bool:
        return docker("inspect", "--format", "{{.State.Running}}", self.name) == "true"

    def logs(self) -> str:
        return docker("logs", self.name, check=False)

    def run(self, *command: str) -> str:
        return docker("exec", self.name, *command)

    def end(self) -> float:
        """End it as Kubernetes does; the seconds that it took. Fails if it had to be killed."""
        began = time.monotonic()
        hook = self.container.get("lifecycle", {}).get("preStop")
        if hook:
            self.run(*hook["exec"]["command"])
        docker("stop", "--time", str(self.spec["terminationGracePeriodSeconds"]), self.name)
        status = docker(
            "inspect", "--format", "{{.State.ExitCode}} {{.State.OOMKilled}}", self.name
        )
        assert status == "0 false", f"{self.name} ended with {status}:\n{self.logs()[-2000:]}"
        return time.monotonic() - began

    def exit_status(self) -> int:
        return int(docker("wait", self.name))


@contextmanager
def beside(store_secret: str) -> Iterator[str]:
    """PostgreSQL and a store; yields the database's password."""
    password = secrets.token_hex(16)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        (Path(folder) / "password").write_text(password)
        (Path(folder) / "password").chmod(0o444)
        docker("network", "create", NETWORK)
        postgres = ["--env", "POSTGRES_USER=fedpress", "--env", "POSTGRES_DB=fedpress"]
        postgres += ["--env", "POSTGRES_PASSWORD_FILE=/secret/password", "--shm-size", "128m"]
        postgres += ["--env", "POSTGRES_INITDB_ARGS=--auth-host=scram-sha-256"]
        postgres += ["--volume", f"{folder}:/secret:ro", POSTGRES]
        store = ["--env", "ROOT_ACCESS_KEY=fedpress", "--env", f"ROOT_SECRET_KEY={store_secret}"]
        serve = "exec versitygw --port :7070 --health /healthz --quiet posix /data"
        store += ["--entrypoint", "sh", STORE, "-c", f"mkdir -p /data/fedpress && {serve}"]
        for name, rest in (("postgres", postgres), ("store", store)):
            docker("run", "--detach", "--name", f"{NETWORK}-{name}", "--network", NETWORK, *rest)
        yield password


def clean() -> None:
    names = docker("ps", "--all", "--quiet", "--filter", f"name=^{NETWORK}-").split()
    if names:
        docker("rm", "--force", "--volumes", *names)
    docker("network", "rm", NETWORK, check=False)


def psql(statement: str) -> str:
    command = ("psql", "-h", "127.0.0.1", "-U", "fedpress", "-At", "-c", statement, "fedpress")
    return docker("exec", "--env", f"PGPASSWORD={_password[0]}", f"{NETWORK}-postgres", *command)


_password: list[str] = []


class Training:
    """A device that trains on and on, by any api pod that is there; each answer counts."""

    def __init__(self, pods: list[Pod], token: str, model: Model) -> None:
        self._pods, self._model, self._token = pods, model, token
        self.server_key = b""
        """Once it is changed; a real device follows the chain by itself."""
        self.failures = list[str]()
        self.committed = 0
        self.is_over = threading.Event()
        self._thread = threading.Thread(target=self._train)
        self._thread.start()

    def _train(self) -> None:
        device: devices.Device | None = None
        while not self.is_over.is_set():
            # As a Service does it: to a pod that is ready and is not about to end.
            with httpx.Client(base_url=self._pods[-1].url("devices"), timeout=40) as http:
                if device is None:
                    device = devices.Device(http)
                    device.enrol(self._token)
                device.http = http
                try:
                    self._round(device)
                except (AssertionError, httpx.HTTPError) as exc:
                    self.failures.append(repr(exc)[:300])
                    time.sleep(0.5)

    def _round(self, device: devices.Device) -> None:
        answer = device.check_in("digits", wait=5)
        if answer is None or answer.assignment is None:
            time.sleep(0.2)
            return
        name = answer.assignment.assignment
        body = device.body_for(answer.assignment, np.ones(self._model.spec.size, np.float32))
        device.upload(name, body)
        while not self.is_over.is_set():
            device.server_key = self.server_key or device.server_key
            try:
                told = device.check_in("digits", name, wait=5)
            except InvalidSignature:  # for the two seconds in which servers learn of the change
                time.sleep(0.2)
                continue
            if told is not None and any(r.receipt.assignment == name for r in told.receipts):
                self.committed += 1
                return

    def wait_for(self, number: int) -> None:
        give_up, goal = time.monotonic() + 90, self.committed + number
        while self.committed < goal:
            if time.monotonic() > give_up:
                raise SystemExit(f"no round is committed: {self.failures[-3:]}")
            time.sleep(0.1)

    def stop(self) -> None:
        self.is_over.set()
        self._thread.join()


def executed(text: str, folder: Path) -> None:
    every = [each for each in yaml.safe_load_all(text) if each]
    templates = {
        each["metadata"]["labels"]["app.kubernetes.io/component"]: each["spec"]["template"]
        for each in every
        if each["kind"] in ("Deployment", "Job")
    }
    store_secret = secrets.token_hex(16)
    with beside(store_secret) as password:
        _password[:] = [password]
        keys = {}
        for name in ("server", "authority"):
            make = ["openssl", "genpkey", "-algorithm", "ed25519"]
            keys[f"{name}-key.pem"] = subprocess.run(make, check=True, capture_output=True).stdout
        admin = secrets.token_hex(24)
        url = f"postgresql://fedpress:{password}@{NETWORK}-postgres:5432/fedpress"
        texts = {"admin-token": admin, "metrics-token": secrets.token_hex(24)}
        texts |= {"database-url": url, "store-secret": store_secret}
        settings = Secret(folder / "fedpress", {n: each.encode() for n, each in texts.items()})
        key_secret = Secret(folder / "fedpress-keys", keys)
        mounted = {"fedpress": settings.folder, "fedpress-keys": key_secret.folder}
        mounted["emptyDirs"] = folder

        def pod(component: str, name: str) -> Pod:
            return Pod(name, templates[component], mounted)

        ready = ("exec", f"{NETWORK}-postgres", "pg_isready", "-h", "127.0.0.1", "-U", "fedpress")
        while "accepting" not in docker(*ready, check=False):
            time.sleep(0.2)

        say("migrate")
        job = pod("migrate", "migrate-1")
        assert job.exit_status() == 0, job.logs()
        print(job.logs().strip())

        say("servers")
        api, worker = [pod("api", "api-1"), pod("api", "api-2")], pod("worker", "worker-1")
        scheduler = pod("scheduler", "scheduler-1")
        for each in (*api, worker, scheduler):
            each.wait()
        operators = api[0].url("operators")
        with Operator(operators, admin) as operator:
            roles = [each.role for each in operator.servers()]
            assert roles == ["api", "api", "scheduler", "worker"], roles
            print(json.dumps([each.server for each in operator.servers()]))
        assert httpx.get(f"{api[0].url('devices')}/v1/admin/servers").status_code == 404
        assert httpx.get(f"{operators}/metrics").status_code == 401

        say("a device enrols and trains")
        model = Model.from_tensors({"weight": np.zeros(12, np.float32)})
        with httpx.Client(base_url=operators, timeout=30) as http:
            tester = devices.Operator(http, admin)
            tester.begin(model, rounds=1000, cohort={"size": 1, "minimum": 1})
            training = Training(api, tester.token(), model)
        try:
            training.wait_for(3)
            say("every server is replaced, a new one first")
            for old in list(api):
                new = pod("api", f"{old.name.rpartition('-')[2]}-new-api")
                new.wait()
                api.append(new)
                api.remove(old)
                print(f"{old.name} ended in {old.end():.1f} s")
                training.wait_for(1)
            worker_2, scheduler_2 = pod("worker", "worker-2"), pod("scheduler", "scheduler-2")
            for old, new in ((worker, worker_2), (scheduler, scheduler_2)):
                new.wait()
                print(f"{old.name} ended in {old.end():.1f} s")
                training.wait_for(1)
            with Operator(api[0].url("operators"), admin) as operator:
                listed = operator.servers()
                assert [each.role for each in listed] == ["api", "api", "scheduler", "worker"]
                assert not any(each.is_stale for each in listed)

            say("migrate runs again beside them, and would not change the schema")
            assert pod("migrate", "migrate-2").exit_status() == 0
            head = psql("SELECT version_num FROM alembic_version")
            psql("UPDATE alembic_version SET version_num = '0022'")
            job = pod("migrate", "migrate-3")
            assert job.exit_status() != 0
            psql(f"UPDATE alembic_version SET version_num = '{head}'")
            print(job.logs().strip())
            assert "stop them first" in job.logs()

            say("the server's key is changed by the Secret")
            there = "cp -L /run/secrets/fedpress-keys/*.pem* /tmp/ && "
            own = "FEDPRESS_SERVER_KEY_FILE=/tmp/server-key.pem fedpress server key"
            scheduler_2.run("sh", "-c", f"{there}{own} rotate")

            def copied(*names: str) -> dict[str, bytes]:
                files = {name: scheduler_2.run("cat", f"/tmp/{name}") for name in names}
                return {name: f"{each}\n".encode() for name, each in files.items()} | {
                    "authority-key.pem": keys["authority-key.pem"]
                }

            key_secret.update(copied("server-key.pem", "server-key.pem.next"))
            scheduler_2.run("sh", "-c", f"{own} switch")
            names = ("server-key.pem", "server-key.pem.former", "server-key.pem.chain")
            key_secret.update(copied(*names))
            training.server_key = DeviceKey.from_pem(copied(*names)["server-key.pem"]).public
            for each in (*api, worker_2, scheduler_2):
                give_up = time.monotonic() + 30
                while each.probe("readiness") != 200:
                    assert time.monotonic() < give_up, each.logs()[-2000:]
                    time.sleep(0.2)
            training.wait_for(2)
            print(api[0].run("fedpress", "server", "key", "show"))
        finally:
            training.stop()
        print(f"{training.committed} rounds, failed requests: {training.failures or 'none'}")
        assert not training.failures
        for each in (*api, worker_2, scheduler_2):
            each.end()
    say("all is as it should be")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rendered", type=Path, help="manifests; without it helm renders them")
    given = parser.parse_args()
    text = given.rendered.read_text() if given.rendered else rendered(VALUES)
    clean()
    try:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder).chmod(0o755)
            executed(text, Path(folder))
    finally:
        clean()


if __name__ == "__main__":
    main()
