"""The processes of a demo end with it, however it is told to stop."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("rich")

from fedpress.demo.fleet import Fleet
from fedpress_protocols.errors import ServerError
from tests.processes import heed_ctrl_c
from tests.systems import posix_only

FLEET = """
import sys, time
from pathlib import Path
from fedpress.demo.fleet import Fleet

with Fleet(Path(sys.argv[1]), Path(sys.argv[1])) as fleet:
    for name in ("one", "two"):
        fleet.start(name, ["-c", "import os, time; print(os.getpid()); time.sleep(600)"], {})
    time.sleep(600)
"""
SLEEP = ["-c", "import time; print('up', flush=True); time.sleep(600)"]


def until_logged(path: Path, pattern: str) -> str:
    """What the first group of the pattern matches in a log, once it is there."""
    give_up = time.monotonic() + 60
    while not (found := re.search(pattern, path.read_text() if path.exists() else "")):
        assert time.monotonic() < give_up, path
        time.sleep(0.02)
    return found[1]


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@posix_only
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_no_process_outlives_a_fleet_that_is_told_to_stop(
    tmp_path: Path, number: signal.Signals
) -> None:
    fleet = subprocess.Popen(
        [sys.executable, "-c", FLEET, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stderr=subprocess.PIPE,
        preexec_fn=heed_ctrl_c,
    )
    try:
        pids = [int(until_logged(tmp_path / f"{name}.log", r"(\d+)\n")) for name in ("one", "two")]
        assert all(map(is_running, pids))
        fleet.send_signal(number)
        _, printed = fleet.communicate(timeout=60)
    finally:
        fleet.kill()
        fleet.wait()
    assert b"KeyboardInterrupt" in printed
    assert not any(map(is_running, pids))


@posix_only
def test_a_fleet_gives_its_signals_back(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Fleet(tmp_path, tmp_path):
        assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_killed_device_is_no_failure_and_may_begin_again(tmp_path: Path) -> None:
    with Fleet(tmp_path, tmp_path) as fleet:
        fleet.start("one", SLEEP, {})
        until_logged(tmp_path / "one.log", "(up)")
        fleet.kill("one")
        fleet.check()
        fleet.start("one", SLEEP, {})
        until_logged(tmp_path / "one.log", r"up\s+(up)")
        assert fleet.log("one").split() == ["up", "up"]
        fleet.check()


def test_a_device_that_fails_is_named_with_its_last_words(tmp_path: Path) -> None:
    (tmp_path / "one.log").write_text("of an earlier demo")
    with Fleet(tmp_path, tmp_path) as fleet:
        fleet.start("one", ["-c", "raise SystemExit('out of paper')"], {})
        fleet.finish()
        with pytest.raises(ServerError, match="one failed: out of paper"):
            fleet.check()
        assert fleet.log("one") == "out of paper\n"
