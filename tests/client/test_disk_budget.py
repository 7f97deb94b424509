"""A limit on the bytes of the device's folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedpress_client.bases import Bases
from fedpress_client.disk_budget import DiskBudget
from fedpress_client.failures import FailurePolicy
from fedpress_client.ledger_records import Discard
from fedpress_client.state import StateDirectory
from fedpress_compression.compressors.error_feedback import ErrorFeedback
from fedpress_compression.compressors.none import Uncompressed
from fedpress_compression.compressors.topk import TopK
from fedpress_protocols.errors import ConfigurationError, StateWriteError
from fedpress_protocols.model import Model
from tests.client.fake_server import FakeLink, FakeServer, RandomTrainer, make_client

SIZE = 2000


def fleet(compressor: Any = None, rounds: int = 3) -> FakeServer:
    model = Model.from_tensors({"w": np.zeros(SIZE, np.float32)})
    return FakeServer(model, lambda r, a: [compressor or Uncompressed()], rounds=rounds, auto=1)


def write(folder: Path, name: str, num_bytes: int, age: int) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(num_bytes))
    os.utime(path, (1_000_000 - age, 1_000_000 - age))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, num_bytes, age in (
        ("key.pem", 100, 9),
        ("tasks/a/ledger.safetensors", 400, 9),
        ("tasks/a/session", 50, 9),
        ("tasks/a/outgoing", 50, 9),
        ("tasks/a/own.safetensors", 100, 9),
        ("tasks/a/published", 200, 9),
        ("tasks/a/models/old.safetensors", 200, 5),
        ("tasks/b/models/new.safetensors", 200, 1),
        ("bases/middle.safetensors", 200, 3),
        ("bases/torn.tmp", 100, 7),
    ):
        write(tmp_path, name, num_bytes, age)
    return tmp_path


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file()}


KEPT = {"key.pem", "ledger.safetensors", "session", "outgoing", "own.safetensors"}


@pytest.mark.parametrize(
    ("num_bytes", "removed"),
    [
        (100, set()),
        (101, {"torn.tmp"}),
        (300, {"torn.tmp", "old.safetensors"}),
        (450, {"torn.tmp", "old.safetensors", "middle.safetensors"}),
        (800, {"torn.tmp", "old.safetensors", "middle.safetensors", "new.safetensors"}),
        (
            900,
            {"torn.tmp", "old.safetensors", "middle.safetensors", "new.safetensors", "published"},
        ),
    ],
)
def test_caches_make_room_the_least_recently_used_first(
    folder: Path, num_bytes: int, removed: set[str]
) -> None:
    before = names(folder)
    budget = DiskBudget(folder, 1700)
    assert budget.admits(folder / "tasks/a/models/another", num_bytes)
    assert names(folder) == before - removed


def test_what_can_never_fit_removes_nothing(folder: Path) -> None:
    before = names(folder)
    budget = DiskBudget(folder, 1700)
    assert not budget.admits(folder / "tasks/a/models/huge", 1001)
    with pytest.raises(StateWriteError, match="max_disk_bytes is 1,700") as caught:
        budget.require(folder / "tasks/a/ledger.safetensors", 1401)
    assert names(folder) == before
    assert caught.value.hint == "set max_disk_bytes to 1,701 or more"


def test_what_must_be_kept_takes_the_room_of_every_cache_and_of_nothing_else(folder: Path) -> None:
    DiskBudget(folder, 1700).require(folder / "tasks/a/ledger.safetensors", 1400)
    assert names(folder) == KEPT


def test_a_file_that_does_not_grow_fits_whatever_the_budget(folder: Path) -> None:
    DiskBudget(folder, 1).require(folder / "tasks/a/ledger.safetensors", 400)
    assert names(folder) >= KEPT


def test_without_a_limit_nothing_is_removed(folder: Path) -> None:
    before = names(folder)
    assert DiskBudget(folder).admits(folder / "x", 10**12)
    DiskBudget(folder).require(folder / "x", 10**12)
    assert names(folder) == before


@pytest.mark.parametrize("max_bytes", [0, -5])
def test_a_budget_is_at_least_a_byte(tmp_path: Path, max_bytes: int) -> None:
    with pytest.raises(ConfigurationError, match="max_disk_bytes must be a whole number from 1 on"):
        make_client(fleet(), RandomTrainer(SIZE), tmp_path, max_disk_bytes=max_bytes)


# In the client


def used(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_a_client_stays_within_its_budget_and_loses_nothing(tmp_path: Path) -> None:
    free = fleet(ErrorFeedback(TopK(0.1)))
    make_client(free, RandomTrainer(SIZE), tmp_path / "free", seed=1).run()
    tight = fleet(ErrorFeedback(TopK(0.1)))
    client = make_client(
        tight, RandomTrainer(SIZE), tmp_path / "tight", seed=1, max_disk_bytes=14_000
    )
    while client.step() is not None:
        assert used(tmp_path / "tight") <= 14_000
    client.close()
    assert used(tmp_path / "free") > 14_000
    assert tight.model.digest == free.model.digest
    assert client.summary().included == 3


def test_an_account_that_does_not_fit_ends_with_what_to_do(tmp_path: Path) -> None:
    server, discards = fleet(), list[Discard]()
    link = FakeLink(server)
    client = make_client(
        server,
        RandomTrainer(SIZE),
        tmp_path,
        link,
        max_disk_bytes=6_000,
        on_discard=discards.append,
        failures=FailurePolicy(allowed=0),
    )
    with pytest.raises(StateWriteError, match="max_disk_bytes is 6,000"):
        client.run()
    assert {code for _, code, _ in link.declined} == {"storage-failed"}
    assert discards  # what was trained in vain is reported
    assert used(tmp_path) <= 6_000
    assert not server.close()
    more = make_client(server, RandomTrainer(SIZE), tmp_path, max_disk_bytes=40_000)
    assert more.run().included == 3


def test_bases_and_published_models_are_left_out_of_a_full_folder(tmp_path: Path) -> None:
    directory = StateDirectory.open(tmp_path, 1_000)
    directory.key()
    frozen = {"w": np.zeros(8, np.float32), "base": np.ones(4096, np.float32)}
    model = Model.from_tensors(frozen, frozen={"base"})
    Bases(directory).keep(model)
    assert not list(tmp_path.glob("bases/*"))
    client = make_client(fleet(), RandomTrainer(SIZE), tmp_path, max_disk_bytes=1_000)
    assert client.model().digest == fleet().model.digest
    assert not list(tmp_path.glob("tasks/*/published*"))


def test_a_round_writes_the_account_twice_and_the_model_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As docs/guides/small-devices.md says of flash wear."""
    written = 0
    replace = os.replace

    def counted(source: Path, target: Path) -> None:
        nonlocal written
        written += source.stat().st_size
        replace(source, target)

    monkeypatch.setattr(os, "replace", counted)
    model = Model.from_tensors({"w": np.zeros(50_000, np.float32)})
    server = FakeServer(model, lambda r, a: [ErrorFeedback(TopK(0.02))], rounds=4, auto=1)
    make_client(server, RandomTrainer(50_000), tmp_path).run()
    assert 2.9 < written / (4 * model.spec.size * server.rounds) < 3.4
