"""Every command in the fenced and indented blocks of README and docs: run as written, or, where the
suite cannot, checked against the command line's own parameters.

Pages run in one folder against one server, README first. REPLACED maps what a page leaves open;
NOT_RUN lists what is only checked. A new command in a page needs no line here unless it fails.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import click
import numpy as np
import pytest
import yaml
from click.testing import CliRunner

pytest.importorskip("sklearn")

from fedpress.cli import app
from fedpress_protocols.signatures import DeviceKey, to_base64url
from fedpress_server.settings import Settings
from tests.system.server_process import ADMIN_TOKEN, ServerProcess

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "client_sdk" / "examples"
FIRST = ("README.md", "docs/operations/machine.md")
PAGES = [*FIRST, "CONTRIBUTING.md"]
PAGES += sorted(
    name
    for page in (ROOT / "docs").rglob("*.md")
    if (name := page.relative_to(ROOT).as_posix()) not in PAGES
)
CHECKED = [*PAGES, *sorted(p.relative_to(ROOT).as_posix() for p in ROOT.glob("examples/*/*.md"))]
"""Pages whose commands are checked; tests/examples run what those of the examples run."""
WALKED = re.compile(r"docs/(quickstart-|tutorials/|guides/)")
"""Pages that tests/system/test_walkthroughs.py runs whole, each in a folder of its own."""

_LIVE = r"^sudo -u fedpress (?=fedpress )"
REPLACED: list[tuple[str, str, str, str]] = [
    # pages, what stands there, what runs, why
    ("", r"https://fl\.example\.org", "{url}", "the reader's server"),
    ("", r"http://127\.0\.0\.1:808[01]", "{url}", "the server's port here is a free one"),
    ("", r"FEDPRESS_TOKEN=(\.\.\.|\$\(cat token\))", "FEDPRESS_TOKEN={token}", "a good token"),
    ("", _LIVE, "", "there is no user fedpress here"),
    ("", r"/var/lib/fedpress-new", "{folder}/restored", "nothing is written outside the folder"),
    ("", r"(?<!-d )/var/lib/fedpress", "{data}", "the same"),
    ("", r"(/etc/fedpress/|(?<=--config ))server\.toml", "{folder}/server.toml", "the same"),
    ("", r"/backups/", "{folder}/backups/", "the same"),
    ("", r" --key-id (KEY|[\w-]{22})$", "", "another server's key"),
    ("command-line", r"accuracy>=0\.95", "accuracy>=1.5", "the page shows a refusal"),
    ("machine", r"accuracy>=0\.95", "accuracy>=0.5", "three rounds come no further"),
    ("quality-gate", r"accuracy>=0\.9(5|(?='))", "accuracy>=0.5", "the same"),
    ("", r"\btoday\.tar", "backups/today.tar", "where machine.md has put it"),
    ("", r"/backups/backups/", "/backups/", "the line above, where the folder is named"),
    ("", r"^(fedpress devices token revoke) \w+$", r"\1 {token_id}", "a token of this server"),
    ("", r"^(fedpress server operator revoke) \w+$", r"\1 {operator_id}", "an operator here"),
    ("", r"^(fedpress devices (approve|revoke)) [\w-]{12,16}", r"\1 {client}", "a client here"),
    ("", r"(?<= --key )\w{22}", "{client_key}", "its key"),
    ("", r"keyboard 42\b", "keyboard 2", "the task here has three rounds"),
    ("", r"^(fedpress round show digits) 44$", r"\1 2", "the same"),
    ("round-stuck", r"cancel digits", "cancel slow", "digits has ended here"),
    ("", r" --expect \d+", " --expect {production}", "where production points here"),
    ("", r"digits --round 48", "digits --round 3", "the task here has three rounds"),
    ("", r"(?<=digits) --rounds 354", " --rounds 1", "one more round is enough"),
    ("", r"^(fedpress round abort) TASK", r"\1 stuck", "a task that runs"),
    ("round-stuck", r"abort digits", "abort stuck", "digits has ended here"),
    ("compose", r"\btask\.json", "compose.json", "a task of the page's own"),
    ("machine", r"\btask\.json", "digits.json", "a task of the page's own"),
    ("", r"--app (my_app:make_trainer|digits:trainer)", "--app numpy_softmax:make_trainer",
     "the reader's app: the trainer that README names"),
    ("README", r"(?<=make_trainer)", " --task keyboard", "other tasks run beside it"),
    ("machine", r"(?<=make_trainer)", " --task digits", "other tasks run beside it"),
    ("compose", r"(?<=make_trainer)", " --task compose", "other tasks run beside it"),
    ("tls", r"\.\.\.$", "--app numpy_softmax:make_trainer", "left open by the page"),
    ("", r" +(on the device|or FEDPRESS_APPROVE_EACH).*$", "", "words beside the command"),
    ("", r"^(zsh|bash|fish): +", "", "the shell that it is for"),
    ("", r"~/", "{folder}/home/", "nothing is written to the home folder"),
    ("", r"\bsudo (?=cat )", "", "there is no root here"),
    ("", r"DEVICE_KEY|\bNEW_KEY\b", "{device_key}", "as `authority request` has printed it"),
    ("", r"(?<=authority )PUBLIC_KEY", "{authority}", "as `authority init` has printed it"),
    ("", r"authority request STATE_DIR", "authority request state", "the device of this folder"),
    ("", r"authority\.key (--encrypt)", r"encrypted.key \1", "another file: the key is there"),
    ("", r"simulate( *)$", "simulate --clients 4 --rounds 1 --engine local", "the smallest form"),
    ("", r"--secure --dropout 0\.1",
     "--secure --clients 40 --fraction 0.25 --rounds 1 --engine local",
     "the smallest form"),
    ("", r"--app examples/flower --clients 10",
     "--app {root}/examples/flower --clients 2 --rounds 1 --engine local",
     "the tree is not the current folder"),
    ("", r"--task task\.json --clients 20", "--task flower.json --clients 2", "smallest"),
    ("", r"--sweep settings\.json",
     "--sweep settings.json --clients 4 --rounds 1 --engine local", "smallest"),
    ("", r"rate-distortion$", "rate-distortion --update small.npz", "half a minute otherwise"),
    ("planning", r"\b(25|10)M\b", "0.1M", "half a minute of encoding otherwise"),
]  # fmt: skip

NOT_RUN: list[tuple[str, str]] = [
    (r"^make ", "whole runs of their own: demo, test and check are other jobs of the suite"),
    (r"^pip install ", "what it installs is here already"),
    (r"\bdocker\b|^deploy/make-secrets|^curl ", "wants a Docker engine: tests/compose/run"),
    (r"COMPOSE_PROJECT_NAME|secrets/admin-token", "belongs to docker compose"),
    (r"^(sudo (?!-u fedpress fedpress)|systemctl|install|chown|ln|mv|git|python3 -m venv)\b"
     r"|\bsystemctl ", "changes the machine"),
    (r"\bround follow\b", "follows a task to its end: tests/face/test_callbacks.py"),
    (r"^pip wheel ", "builds this checkout: tests/install does"),
    (r"/etc/fedpress/admin-token\b", "the machine's files"),
    (r"^openssl|^printf", "another program's; tests/system/test_mutual_tls.py has certificates"),
    (r"^python benchmarks/", "many minutes; tests/benchmarks run what they are made of"),
    (r"^fedpress server run", "a server runs already; the options are checked"),
    (r"--engine ray|fashion-mnist|shakespeare:DIR",
     "Ray's processes, and data that is no part of the tree"),
    (r"\|.*--app ", "three forms in one line: tests/flower/test_engines.py runs each"),
    (r"^fedpress client relay", "wants two servers: tests/system/test_relay.py"),
    (r"--client-certificate|--certificate device", "wants a TLS or masking server: tests/system"),
    (r"^fedpress server (restore|migrate) ", "the server has its folder: test_kills.py"),
    (r"server key ", "keys in step with a restart: tests/system/test_server_key_change.py"),
    (r"^fedpress authority (init .*--encrypt|issue .*--(requests|new-key)|inspect|renew|revoke)",
     "passphrase and lists: tests/face/test_masked_authority.py"),
    (r"^(du|rm|grep|echo) |\| grep", "another program's"),
    (r"doctor --config|^fedpress server doctor$", "the machine's port is taken by the server"),
    (r"^fedpress server audit verify( --head .*)?$",
     "reads the settings of the server's environment: tests/face/test_audit_commands.py"),
    (r"^export ", "the settings are in the environment already"),
    (r"--max-epsilon", "wants a private task: tests/system/test_private_tasks.py"),
    (r"fedpress plan .*--trial", "wants Flower, and minutes: tests/flower/test_trial.py"),
    (r"rotate-key", "the device's key is named by later lines"),
    (r"^fedpress client join .*\.\.\.$", "left open by the page"),
    (r"tests\.platforms\.rounds", "has a server of its own: tests/platforms/test_platforms.py"),
]  # fmt: skip

STATUS: list[tuple[str, str, int]] = [
    ("command-line", r"promote digits 1", 1),  # the page shows the refusal
    ("quality-gate", r"'devices>=20'", 1),
    ("quality-gate", r"groups\.accuracy", 1),  # the devices here name no region
]

BEFORE: dict[str, list[str]] = {
    # what a page takes to be there
    "README.md": [
        "fedpress task create stuck.json model.safetensors",
        "fedpress task create slow.json model.safetensors",
        "fedpress server operator create operator --note Ada",
    ],
    "docs/operations/quality-gate.md": ["fedpress model promote digits 1 production"],
    "docs/registry.md": [
        "fedpress model promote keyboard 1 production",
        "fedpress model promote keyboard 2 production",
    ],
}

_PROGRAMS = [
    *(
        "fedpress",
        "make",
        "docker",
        "curl",
        "sudo",
        "export",
        "deploy/make-secrets",
        "openssl",
        "printf",
    ),
    *("bash:", "zsh:", "fish:", "systemctl", "git", "mv", "install", "chown", "grep"),
    *("du", "rm", "echo", "python", "python3", "ln", "pip"),
]
_BEGINS = re.compile(
    r"(?:[A-Z_]+=(?:\$\([^)]*\)|\S+) )*(?:\(umask 077; )?(?:"
    + "|".join(map(re.escape, _PROGRAMS))
    + r")(?: (?!serve: )|$)"
)
_FENCED = re.compile(r"^([ \t]*)```(\w*)\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)
_INDENTED = re.compile(r"(?:^ {4,}\S.*\n)+", re.MULTILINE)


@dataclass(frozen=True)
class Line:
    page: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}: {self.text}"


def lines_of(page: str) -> Iterator[Line]:
    """The commands of a page, in its order."""
    text = (ROOT / page).read_text()
    blocks = [(m.start(), m[3]) for m in _FENCED.finditer(text) if m[2] in ("", "sh", "bash")]
    rest = _FENCED.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), text)
    blocks += [(m.start(), m[0]) for m in _INDENTED.finditer(rest)]
    for _, body in sorted(blocks):
        lines = [line.strip() for line in re.sub(r"\\\n\s*", " ", body).splitlines()]
        if any(line.startswith("$ ") for line in lines):
            lines = [line[2:] for line in lines if line.startswith("$ ")]
        for line in lines:
            if _BEGINS.match(line):
                yield Line(page, re.sub(r"\s+#.*$", "", line))


ALL = [line for page in CHECKED for line in lines_of(page)]


def calls(text: str) -> Iterator[list[str]]:
    """The arguments of every `fedpress` in a line of shell."""
    cleaned = re.sub(r"\$\(([^()]*)\)", r" ; \1 ; ", text)
    words = shlex.shlex(cleaned, posix=True, punctuation_chars="|&;()<>")
    words.whitespace_split = True
    words.commenters = ""
    command: list[str] = []
    for word in [*words, ";"]:
        if not set(word) <= set("|&;()<>"):
            command.append(word)
            continue
        while command and re.match(r"[A-Z_]+=", command[0]):
            del command[0]
        if command[:1] == ["fedpress"]:
            yield command[1:]
        command = []


def reason_not_to_run(text: str) -> str | None:
    if find_spec("flwr") is None and re.search(r"\bsimulate\b|simulation", text):
        return "Flower is not installed"
    return next((why for pattern, why in NOT_RUN if re.search(pattern, text)), None)


def replaced(line: Line, world: dict[str, str]) -> str:
    text = line.text
    for page, pattern, new, _ in REPLACED:
        if page in line.page:
            text = re.sub(pattern, new, text)
    return re.sub(r"\{(\w+)\}", lambda m: world.get(m[1], m[0]), text)


def parse(arguments: list[str]) -> None:
    """Raise click.UsageError where the command line does not take them."""
    command: click.Command = app
    rest = list(arguments)
    while isinstance(command, click.Group):
        if not rest and command.invoke_without_command:
            return
        assert rest, "no command"
        assert rest[0] in command.commands, f"no command {' '.join(arguments)}"
        command = command.commands[rest.pop(0)]
    if arguments[:2] in (["server", "run"], ["server", "migrate"]):
        flags = {"--config"} | {f"--{name.replace('_', '-')}" for name in Settings.model_fields}
        assert {word for word in rest if word.startswith("--")} <= flags, arguments
        return
    with_yes = ["--yes"] if any("--yes" in each.opts for each in command.params) else []
    names = ["-h", "--help"]  # click keeps the help option of the first context
    command.make_context(command.name, [*rest, *with_yes], help_option_names=names)


def test_pages_have_commands() -> None:
    assert len(ALL) > 150
    assert {"README.md", "docs/flower.md", "docs/operations/keys.md"} <= {e.page for e in ALL}


@pytest.mark.parametrize("line", dict.fromkeys(ALL), ids=str)
def test_the_command_line_takes_it(
    line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDPRESS_ADMIN_TOKEN", ADMIN_TOKEN)
    monkeypatch.chdir(tmp_path)
    for name in ("device.cert", "device.crt", "device.key"):
        (tmp_path / name).touch()
    world = {"token": "token", "url": "http://127.0.0.1:1", "production": "1"}
    for arguments in calls(replaced(line, world)):
        parse([word for word in arguments if word != "..."])


@pytest.mark.parametrize("pattern", [row[0] for row in NOT_RUN])
def test_what_is_not_run_stands_in_a_page(pattern: str) -> None:
    assert any(re.search(pattern, line.text) for line in ALL)


class World:
    """The folder that the pages' reader works in, and one server."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.server = ServerProcess(folder, {"FEDPRESS_LOG_FORMAT": "text"})
        self.server.start()
        self.environment = {
            **os.environ,
            "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join([str(EXAMPLES), *sys.path]),
            "FEDPRESS_URL": self.server.url,
            "FEDPRESS_ADMIN_TOKEN": ADMIN_TOKEN,
        }
        for name in ("bin", "backups", "home/.config/fish/completions"):
            (folder / name).mkdir(parents=True)
        command = folder / "bin" / "fedpress"
        command.write_text(f"#!/bin/sh\nexec '{sys.executable}' -m fedpress \"$@\"\n")
        command.chmod(0o700)
        self._write()

    def _write(self) -> None:
        """The files that pages speak of; the task is README's own, smaller."""
        from numpy_softmax import initial_model

        blocks = _FENCED.finditer((ROOT / "README.md").read_text())
        task = next(json.loads(block[3]) for block in blocks if block[2] == "json")
        task["cohort"] = {"size": 1, "minimum": 1}
        task["rounds"] = 3
        task["evaluation"] = {"metric": "accuracy", "goal": "highest"}
        names = {
            "task": "keyboard",
            "digits": "digits",
            "compose": "compose",
            "flower": "flower",
            "better-terms": "next",
        }
        for file, name in names.items():
            (self.folder / f"{file}.json").write_text(json.dumps({**task, "task": name}))
        for name in ("stuck", "slow"):
            running = {**task, "task": name, "rounds": 400}
            (self.folder / f"{name}.json").write_text(json.dumps(running))
        (self.folder / "task.yaml").write_text(yaml.safe_dump({**task, "task": "other"}))
        (self.folder / "model.safetensors").write_bytes(initial_model().to_bytes())
        (self.folder / "server.toml").write_text(f'data_dir = "{self.server.data_dir}"\n')
        (self.folder / "settings.json").write_text('[{"name": "plain", "compressor": "none"}]')
        rng = np.random.default_rng(0)
        np.savez(self.folder / "small.npz", updates=rng.standard_normal((1, 256), np.float32))

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        if self.server.is_running:
            self.server.stop()

    def run(self, text: str) -> tuple[int, str]:
        """In this process where it is a single `fedpress`, by bash otherwise."""
        plain = not re.search(r"[|&;<>$()]|^[A-Z_]+=", re.sub(r"'[^']*'|\"[^\"]*\"", "", text))
        if plain and text.startswith("fedpress "):
            names = ("FEDPRESS_URL", "FEDPRESS_ADMIN_TOKEN")
            environment = {name: self.environment[name] for name in names}
            done = CliRunner().invoke(app, shlex.split(text)[1:], env=environment)
            return done.exit_code, f"{done.output}{done.exception or ''}"
        command = ["bash", "--norc", "-c", text]
        ended = subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        return ended.returncode, ended.stdout + ended.stderr

    def known(self, line: Line) -> dict[str, str]:
        """The names that this server has given, in the place of those that a page shows."""
        names = {
            "url": self.server.url,
            "folder": str(self.folder),
            "data": str(self.server.data_dir),
            "root": str(ROOT),
        }
        with self.server.operator() as operator:
            names["token"] = operator.create_token(uses=1, expires_in=3600, note="")
            names["token_id"] = operator.tokens()[0].token_id
            names["operator_id"] = next((o.operator_id for o in operator.operators()), "")
            for client in operator.clients():
                names |= {"client": client.client_id, "client_key": client.key_id}
            task = re.search(r"^fedpress model \w+ (\w+).* --expect", line.text)
            aliases = operator.aliases(task[1]) if task else []
            known = {alias.alias: str(alias.version) for alias in aliases}
            names["production"] = known.get("production", "none")
        names["device_key"] = to_base64url(DeviceKey.generate().public)
        return names


@pytest.mark.timeout(900)  # some ninety commands, half a minute of CPU
@pytest.mark.slow
def test_the_pages_run_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    with World(tmp_path) as world:
        pages = [page for page in PAGES if not WALKED.match(page)]
        failed = [fault for page in pages for fault in run_page(world, page)]
    assert not failed, "\n\n".join(failed)


def run_page(world: World, page: str) -> Iterator[str]:
    """Run a page's commands; what went otherwise than it should."""
    for text in BEFORE.get(page, []):
        code, output = world.run(text)
        assert code == 0, f"{text}: {output}"
    for line in lines_of(page):
        if reason_not_to_run(line.text):
            continue
        text = replaced(line, world.known(line))
        expected = next(
            (
                code
                for part, pattern, code in STATUS
                if part in page and re.search(pattern, line.text)
            ),
            0,
        )
        code, output = world.run(text)
        if code != expected:
            yield f"{line}\n  ran {text}\n  ended with {code}: {output[-400:]}"
