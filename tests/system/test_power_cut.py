"""The power fails: what was written and not synced is gone, and no acknowledged upload with it.

A library that is preloaded into the real server keeps what each file held when it was last synced
(`power_cut.c`); the cut kills the server and puts every file back to that. Names, unlike contents,
stay as they were. No special file system is needed, but a C compiler and Linux.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from fedpress_protocols.errors import FedpressError
from tests.system.one_hot_fleet import Fleet
from tests.system.server_process import ServerProcess

SOURCE = Path(__file__).with_name("power_cut.c")


class Disk:
    """What the server has synced."""

    def __init__(self, folder: Path, deaf: str) -> None:
        """`deaf`: part of the names of files whose syncs come to nothing."""
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None or sys.platform != "linux":
            pytest.skip("a power cut is made here by a C compiler and Linux's LD_PRELOAD")
        self._synced = folder / "synced"
        self._synced.mkdir()
        library = folder / "power_cut.so"
        flags = ["-shared", "-fPIC", "-O2", "-Wall", "-Werror"]
        subprocess.run([compiler, *flags, "-o", library, SOURCE, "-ldl"], check=True)
        self.settings = {
            "LD_PRELOAD": str(library),
            "POWER_CUT_ROOT": str(folder / "server"),
            "POWER_CUT_SYNCED": str(self._synced),
            "POWER_CUT_DEAF": deaf,
        }

    def forget(self, folder: Path) -> int:
        """Put every file back to what was synced of it; how many had more, or other bytes."""
        changed = 0
        for path in folder.rglob("*"):
            if path.is_file():
                kept = self._synced / str(path.stat().st_ino)
                data = kept.read_bytes() if kept.exists() else b""
                changed += path.read_bytes() != data
                with path.open("r+b") as file:  # in place, as the inode is the name of the copy
                    file.write(data)
                    file.truncate()
        return changed


def cut(folder: Path, cuts: int, deaf: str = "") -> tuple[int, int]:
    """A task in which the power fails so many times: uploads that count, files that were cut."""
    folder.mkdir(exist_ok=True)
    disk, chance, changed = Disk(folder, deaf), random.Random(6), 0
    server = ServerProcess(folder, disk.settings)
    server.start()
    try:
        with httpx.Client(base_url=server.url, timeout=30) as client:
            fleet = Fleet([client], rounds=400)
            with fleet.taking_part():
                for _ in range(cuts):
                    fleet.wait_for_rounds(1)
                    time.sleep(chance.random() / 2)
                    server.kill()
                    changed += disk.forget(server.data_dir)
                    server.start()
            return fleet.check(), changed
    finally:
        if server.is_running:
            server.kill()


@pytest.mark.soak
@pytest.mark.slow
def test_a_power_cut_loses_nothing_that_was_acknowledged(
    tmp_path: Path, soak: bool, record_property: Callable[[str, object], None]
) -> None:
    cuts = 30 if soak else 3
    uploads, changed = cut(tmp_path / "honest", cuts)
    assert changed, "nothing was ever on its way to the disk"
    figure = f"{cuts} power cuts, {uploads} uploads, 0 lost, 0 doubled; {changed} files were cut"
    record_property("figure", figure)


@pytest.mark.slow
def test_a_disk_that_says_it_has_synced_and_has_not_loses_what_was_acknowledged(
    tmp_path: Path,
) -> None:
    """The test above can fail: without the syncs of SQLite's log it would."""
    with pytest.raises((AssertionError, FedpressError, httpx.TransportError)):
        cut(tmp_path / "lying", 3, deaf="-wal")
