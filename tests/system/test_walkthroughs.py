"""Tutorials, quick starts and guides, walked as a reader would: each page in an empty folder, from
top to bottom, every block of it.

A comment before a block says more about it, to this test and to nobody who reads the page:

    <!-- file: NAME -->         the block is this file's content
    <!-- beside -->             another terminal: the next blocks that are not so wait for its end
    <!-- needs: MODULE -->      run where this module is installed
    <!-- not run: REASON -->    shown, and not run

Blocks without a language are shell, `python` are scripts, `text` shows output. A shell's exports
and folder stay for the blocks that follow. `pip install ./FOLDER` installs a package that the page
has written; what other lines install is here already. The server, its folder and its port are the
test's own, with the other options of the page's `fedpress server run`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.system.server_process import ADMIN_TOKEN, ServerProcess

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    page.relative_to(ROOT).as_posix()
    for pattern in ("docs/quickstart-*.md", "docs/tutorials/*.md", "docs/guides/*.md")
    for page in ROOT.glob(pattern)
)
_BLOCK = re.compile(
    r"(?:<!-- (?P<mark>[^>]*?) -->\n+)?^```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
_PATIENCE = 240.0
_OFFLINE = "--quiet --no-index --no-build-isolation --no-deps --disable-pip-version-check"
_REPLACED = (
    # what stands there, what runs
    (r"http://127\.0\.0\.1:8080", "{url}"),
    (r"https://fl\.example\.org", "{url}"),
    (r"^pip install (\./\S+)$", f"'{{python}}' -m pip install {_OFFLINE} --target '{{site}}' \\1"),
    (r"^pip install .*$", ":"),
    (r"^python3? -m venv .*$", ":"),
    (r"^\. \.venv/bin/activate$", ":"),
    (r"openssl rand -hex 32 > admin-token", f"printf %s '{ADMIN_TOKEN}' > admin-token"),
    (r"^fedpress server run .*$", ":"),
)


@dataclass(frozen=True)
class Block:
    mark: str
    language: str
    text: str


def blocks_of(page: str) -> Iterator[Block]:
    for match in _BLOCK.finditer((ROOT / page).read_text()):
        yield Block(match["mark"] or "", match["language"], match["text"])


class Reader:
    """A folder, a shell's environment, and what runs in other terminals."""

    def __init__(self, folder: Path, server: ServerProcess) -> None:
        self._folder, self._server, self._url = folder, server, server.url
        self._beside: list[tuple[str, Path, subprocess.Popen[bytes]]] = []
        programs = folder / "bin"
        programs.mkdir()
        for name, arguments in (("fedpress", "-m fedpress"), ("python", ""), ("torchrun", "")):
            module = "-m torch.distributed.run" if name == "torchrun" else arguments
            (programs / name).write_text(f"#!/bin/sh\nexec '{sys.executable}' {module} \"$@\"\n")
            (programs / name).chmod(0o700)
        (folder / "home").mkdir()
        self._site = folder / "site"
        self._site.mkdir()
        self._path = os.pathsep.join([str(self._site), *filter(None, sys.path)])
        self._place = folder / "reader"
        self._place.mkdir()
        self._environment = {
            **os.environ,
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": f"{self._path}{os.pathsep}.",
            "HOME": str(folder / "home"),
            "OMP_NUM_THREADS": "1",  # several trainings at a time, on few cores
            "FEDPRESS_URL": server.url,
            "FEDPRESS_ADMIN_TOKEN": ADMIN_TOKEN,
        }

    def take(self, block: Block) -> None:
        """Do with a block what its mark and its language say."""
        kind, _, argument = block.mark.partition(": ")
        if kind == "needs" and find_spec(argument) is None:
            return
        if kind == "not run" or block.language == "text":
            assert kind != "not run" or argument, "a block that is not run says why"
            return
        text = block.text
        for options in re.findall(r"^fedpress server run (.*)$", text, re.MULTILINE):
            self._serve(options)
        if kind == "file":
            file = self._place / argument
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text.replace("http://127.0.0.1:8080", self._url))
            return
        names = {"url": self._url, "python": sys.executable, "site": self._site}
        for pattern, new in _REPLACED:
            text = re.sub(pattern, new.format(**names), text, flags=re.MULTILINE)
        assert block.language in ("", "python"), f"what is a reader to do with this?\n{block}"
        if block.language == "python":
            script = self._folder / "block.py"
            script.write_text(text)
            text = f"python '{script}'"
        if kind == "beside":
            self._start(text)
            return
        self.wait()
        self._run(text)

    def _serve(self, options: str) -> None:
        """Start the server, with what `options` say besides its folder."""
        shown = subprocess.run(
            ["bash", "--norc", "-ec", f"printf '%s\\0' {options}"],
            cwd=self._place,
            env=self._environment,
            capture_output=True,
            text=True,
            check=True,
        )
        words = shown.stdout.split("\0")[:-1]
        settings = {
            f"FEDPRESS_{name.removeprefix('--').replace('-', '_').upper()}": value
            for name, value in zip(words[::2], words[1::2], strict=True)
            if name != "--data-dir"
        }
        if not self._server.is_running:
            self._server.start(settings={"PYTHONPATH": self._path, **settings})

    def _start(self, text: str) -> None:
        log = self._folder / f"beside-{len(self._beside)}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                ["bash", "--norc", "-ec", text],
                cwd=self._place,
                env=self._environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self._beside.append((text, log, process))

    def _run(self, text: str) -> None:
        kept = self._folder / "environment"
        ended = subprocess.run(
            ["bash", "--norc", "-ec", f"{text}\npwd > '{kept}.pwd'; env -0 > '{kept}'"],
            cwd=self._place,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
            check=False,
        )
        assert ended.returncode == 0, f"{text}\n{ended.stdout[-2000:]}{ended.stderr[-4000:]}"
        self._place = Path(Path(f"{kept}.pwd").read_text().strip())
        rows = kept.read_text().split("\0")
        self._environment = dict(row.split("=", 1) for row in rows if "=" in row)

    def wait(self) -> None:
        """Until the other terminals are done."""
        give_up = time.monotonic() + _PATIENCE
        while any(process.poll() is None for _, _, process in self._beside):
            assert time.monotonic() < give_up, self._logs()
            assert not any(process.poll() for _, _, process in self._beside), self._logs()
            time.sleep(0.05)
        assert not any(process.poll() for _, _, process in self._beside), self._logs()
        self._beside.clear()

    def _logs(self) -> str:
        return "\n".join(f"{text}\n{log.read_text()[-3000:]}" for text, log, _ in self._beside)

    def close(self) -> None:
        for _, _, process in self._beside:
            process.kill()
            process.wait()


@pytest.mark.parametrize("page", PAGES)
def test_a_page_says_of_every_block_what_it_is(page: str) -> None:
    for block in blocks_of(page):
        kind, _, argument = block.mark.partition(": ")
        assert kind in ("", "file", "beside", "needs", "not run"), f"what is {block.mark!r}?"
        assert argument or kind in ("", "beside"), f"{block.mark!r} says too little"
        is_run = kind in ("", "needs")
        assert not is_run or block.language in ("", "python", "text"), block.text[:200]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", PAGES)
def test_a_page_runs_from_top_to_bottom(page: str, tmp_path: Path) -> None:
    if "flower" in page:
        pytest.importorskip("flwr")
    if "peft" in page:
        pytest.importorskip("peft", reason="PEFT is not installed: pip install fedpress[peft]")
    server = ServerProcess(tmp_path / "server")
    blocks = list(blocks_of(page))
    if not any("fedpress server run" in block.text for block in blocks):
        server.start()
    reader = Reader(tmp_path, server)
    try:
        for block in blocks:
            reader.take(block)
        reader.wait()
    finally:
        reader.close()
        if server.is_running:
            server.stop()
