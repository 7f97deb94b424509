"""`fedpress demo --ui`: the console of a demo, until Ctrl-C."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.processes import heed_ctrl_c
from tests.systems import posix_only

pytest.importorskip("sklearn")
pytest.importorskip("torch")
pytestmark = [pytest.mark.slow, posix_only]


def test_a_demo_stays_in_the_console_until_ctrl_c(tmp_path: Path) -> None:
    log = tmp_path / "demo.log"
    command = [sys.executable, "-m", "fedpress", "demo", "--quick", "--rounds", "1", "--ui"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with log.open("wb") as output:
        demo = subprocess.Popen(
            command,
            cwd=tmp_path,
            stdout=output,
            stderr=output,
            env=environment,
            preexec_fn=heed_ctrl_c,
        )
    try:
        give_up = time.monotonic() + 240
        while "Ctrl-C ends the server" not in (text := log.read_text()):
            assert demo.poll() is None, text
            assert time.monotonic() < give_up, text
            time.sleep(0.2)
        (console,) = re.findall(r"in a browser: (\S+)", text)
        (token,) = re.findall(r"the token to log in: (\S+)", text)
        assert httpx.get(f"{console}/login").status_code == 200
        server, viewer = console.removesuffix("/console"), {"Authorization": f"Bearer {token}"}
        assert len(httpx.get(f"{server}/v1/tasks", headers=viewer).json()) == 2
        cancel = httpx.post(f"{server}/v1/admin/tasks/plain/cancel", headers=viewer)
        assert cancel.status_code == 403
    finally:
        demo.send_signal(signal.SIGINT)
        try:
            status = demo.wait(60)
        finally:
            demo.kill()
            demo.wait()
    assert status == 0, log.read_text()
    assert "Summary" in log.read_text()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{console}/login")
