"""Payloads in an S3 store: what the local folder promises, and what only a network can do."""

import hashlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedpress_protocols.errors import (
    ConfigurationError,
    MissingExtra,
    NotFound,
    ServerError,
    Unavailable,
)
from fedpress_protocols.model import Model
from fedpress_server.storage.bucket import Bucket
from fedpress_server.storage.files import artefact_name
from fedpress_server.storage.payloads import LocalPayloads, Payloads, digest_in
from tests.devices import Device, Operator
from tests.s3 import KEYS, FaultProxy, make_bucket, store
from tests.server.in_process import Clock, Enrolled, Server, Start, history, ones

pytest.importorskip("obstore")
pytest.importorskip("moto")


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with store() as url:
        make_bucket(url, "fedpress")
        yield url


@pytest.fixture
def proxy(endpoint: str) -> Iterator[FaultProxy]:
    standing = FaultProxy(endpoint)
    yield standing
    standing.close()


def bucket(endpoint: str, folder: Path, **how: Any) -> Bucket:
    how = {"timeout": 10.0, "grace": 3600.0, **how}
    return Bucket(f"s3://fedpress/{folder.parent.name}", folder, endpoint=endpoint, **KEYS, **how)


@pytest.fixture(params=["folder", "bucket"])
def payloads(request: pytest.FixtureRequest, tmp_path: Path) -> Payloads:
    if request.param == "folder":
        return LocalPayloads(tmp_path / "payloads")
    return bucket(request.getfixturevalue("endpoint"), tmp_path / "cache")


def named(data: bytes) -> str:
    return artefact_name(hashlib.sha256(data).hexdigest())


def test_what_was_put_is_found_and_what_was_dropped_is_not(payloads: Payloads) -> None:
    payloads.put("uploads/a/1-1/x", b"first")
    payloads.put("uploads/a/1-1/y", b"second")
    payloads.put("uploads/a/2-1/x", b"third")
    payloads.put("uploads/ab/x", b"another")
    payloads.put("uploads/a/1-1/x", b"again")
    assert payloads.get("uploads/a/1-1/x") == b"again"
    with payloads.open("uploads/a/1-1/y") as file:
        payloads.drop("uploads/a/1-1/y")
        file.seek(2)
        assert file.read() == b"cond"
    assert payloads.size("uploads/a/2-1/x") == 5
    assert list(payloads.names("uploads")) == ["uploads/a", "uploads/ab"]
    assert list(payloads.names("uploads/a")) == ["uploads/a/1-1", "uploads/a/2-1"]
    assert list(payloads.names("uploads/a/1-1")) == ["uploads/a/1-1/x"]
    payloads.drop("uploads/a")
    payloads.drop("uploads/a")
    assert list(payloads.names("uploads")) == ["uploads/ab"]
    assert list(payloads.names("none")) == []
    for ask in (payloads.get, payloads.open, payloads.size):
        with pytest.raises(NotFound):
            ask("uploads/a/1-1/x")
    payloads.check_writable()


def test_a_name_that_tells_its_content_is_written_once(endpoint: str, tmp_path: Path) -> None:
    here, data = bucket(endpoint, tmp_path / "cache"), b"content" * 1000
    for _ in range(2):
        here.put(named(data), data)
    assert here.get(named(data)) == data
    with pytest.raises(ServerError, match="SHA-256"):
        here.put(named(data), b"other bytes")
    here._put(named(data), b"spoiled", "overwrite")
    with pytest.raises(ServerError, match="was read from the store"):
        here.get(named(data))
    with pytest.raises(ServerError, match="was read from the store"):
        here.open(named(data))
    here.put(named(data), data)  # of another length than what is there: mended
    assert here.get(named(data)) == data


def test_names_of_other_kinds_tell_no_content() -> None:
    digest = "ab" * 32
    assert digest_in(f"models/{digest}.safetensors") == digest
    assert digest_in(f"uploads/digits/1-1/name-of-{digest}") == digest
    assert digest_in(f"coded/digits/{digest}.zstd") is None
    assert digest_in("uploads/digits/1-1") is None
    assert digest_in(f"models/{'AB' * 32}") is None


def test_the_local_copies_are_bounded_and_cost_no_second_request(
    proxy: FaultProxy, tmp_path: Path
) -> None:
    here = bucket(proxy.url, tmp_path / "cache", cache_bytes=250)
    files = {named(bytes([n]) * 100): bytes([n]) * 100 for n in range(4)}
    for name, data in files.items():
        here.put(name, data)
    first, second, third, _ = files

    def read(name: str) -> list[str]:
        proxy.seen.clear()
        with here.open(name) as file:
            assert file.read() == files[name]
        return proxy.seen

    assert read(first) == ["GET"]
    assert read(second) == ["GET"]
    assert read(first) == []
    assert read(third) == ["GET"]  # in the place of the second
    assert read(first) == []
    assert read(second) == ["GET"]
    assert sum(path.stat().st_size for path in (tmp_path / "cache").iterdir()) <= 250
    again = bucket(proxy.url, tmp_path / "cache", cache_bytes=50)
    assert list((tmp_path / "cache").iterdir()) == []  # what an ended process left is not trusted
    with again.open(first) as file:
        assert file.read() == files[first]
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize("fault", [500, 503, "cut"])
def test_a_store_that_fails_now_and_then_is_asked_again(
    proxy: FaultProxy, tmp_path: Path, fault: int | str
) -> None:
    here, data = bucket(proxy.url, tmp_path / "cache"), b"content"
    proxy.faults = [fault, fault]
    here.put(named(data), data)
    proxy.faults = [fault]
    assert here.get(named(data)) == data
    assert not proxy.faults


@pytest.mark.parametrize("fault", [500, "stall"])
def test_a_store_that_goes_on_failing_is_unavailable_in_bounded_time(
    proxy: FaultProxy, tmp_path: Path, fault: int | str
) -> None:
    here, data = bucket(proxy.url, tmp_path / "cache", timeout=1.0), b"content"
    proxy.always = fault
    for ask in (
        lambda: here.put(named(data), data),
        lambda: here.get(named(data)),
        lambda: list(here.names("artefacts")),
    ):
        began = time.monotonic()
        with pytest.raises(Unavailable) as caught:
            ask()
        assert caught.value.members["retry_after"] == 5.0
        assert time.monotonic() - began < 60
    proxy.always = None
    here.put(named(data), data)


def test_what_was_just_put_is_not_swept_where_others_may_be_writing(
    endpoint: str, tmp_path: Path
) -> None:
    here = bucket(endpoint, tmp_path / "cache")
    here.put("uploads/a/1-1/x", b"first")
    assert list(here.settled("uploads")) == list(here.settled("uploads/a/1-1")) == []
    later = bucket(endpoint, tmp_path / "cache", grace=-3600.0)
    assert list(later.settled("uploads")) == ["uploads/a"]
    assert list(later.settled("uploads/a/1-1")) == ["uploads/a/1-1/x"]
    assert list(here.names("uploads/a/1-1")) == ["uploads/a/1-1/x"]


@pytest.mark.parametrize(
    ("url", "endpoint", "said"),
    [
        ("http://fedpress", "", "s3://bucket/prefix"),
        ("s3://key:secret@fedpress", "", "s3://bucket/prefix"),
        ("s3://fedpress", "http://127.0.0.1:1", "cannot be used"),
    ],
)
def test_a_store_that_cannot_work_is_told_in_a_sentence(
    tmp_path: Path, url: str, endpoint: str, said: str
) -> None:
    with pytest.raises(ConfigurationError, match=said) as caught:
        Bucket(url, tmp_path / "cache", endpoint=endpoint, timeout=1.0, **KEYS).check_settings()
    assert KEYS["secret_access_key"] not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_bucket_that_is_not_there_is_named(endpoint: str, tmp_path: Path) -> None:
    here = Bucket("s3://none", tmp_path / "cache", endpoint=endpoint, **KEYS)
    with pytest.raises(ConfigurationError, match="no such bucket"):
        here.check_settings()


def test_a_missing_library_is_told_by_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(MissingExtra, match=r"fedpress\[s3\]"):
        Bucket("s3://fedpress", tmp_path / "cache")


# A server on it


@pytest.fixture
def http(start: Start, proxy: FaultProxy, tmp_path: Path) -> Iterator[Server]:
    with start(**settings(proxy, tmp_path.name)) as client:
        yield client


def settings(proxy: FaultProxy, prefix: str) -> dict[str, Any]:
    return {
        "store_url": f"s3://fedpress/{prefix}",
        "store_endpoint": proxy.url,
        "store_access_key_id": KEYS["access_key_id"],
        "store_secret_access_key": KEYS["secret_access_key"],
        "store_timeout": 2.0,
    }


@pytest.mark.both_databases(short=True)
def test_a_federated_task_lives_in_the_store_and_waits_while_it_is_away(
    http: Server,
    operator: Operator,
    enrolled: Enrolled,
    model: Model,
    proxy: FaultProxy,
    tmp_path: Path,
) -> None:
    operator.begin(model, rounds=2, cohort={"size": 1, "minimum": 1})
    device = enrolled()
    assignment = device.assignment("digits")
    body = device.body_for(assignment, ones(model))
    proxy.always = 500
    answer = device.put(assignment.assignment, body)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    assert device.assignment("digits") == assignment  # nothing was acknowledged
    http.app.services.readiness.fresh_until = 0.0
    assert http.get("/readyz").status_code == 503
    proxy.always = None
    device.upload(assignment.assignment, body)
    news = device.check_in("digits", assignment.assignment, wait=30)
    assert news is not None
    assert news.receipts[0].receipt.outcome == "included"
    after = device.model(news.task.model)
    np.testing.assert_allclose(after.parameters - model.parameters, 1.0, atol=1e-6)
    assert http.get("/readyz").status_code == 200
    here = {path.name for path in (tmp_path / "data").iterdir()}
    assert here <= {"lock", "cache", "worker", "server-key.pem", "authority-key.pem"} | {
        name for name in here if name.startswith("fedpress.db")
    }


def test_a_deadline_moves_on_while_the_store_is_away(
    http: Server,
    operator: Operator,
    enrolled: Enrolled,
    model: Model,
    proxy: FaultProxy,
    clock: Clock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    cohort = {"size": 1, "minimum": 1}
    operator.begin(model, rounds=2, cohort=cohort, round_seconds=60.0, max_attempts=1)
    device = enrolled()
    assignment = device.assignment("digits")
    body = device.body_for(assignment, ones(model))
    proxy.always = 500
    assert device.put(assignment.assignment, body).status_code == 503
    clock.advance(61)
    http.call(http.app.services.scheduler.tick)
    assert "task digits round 1.1: the store did not answer, so its deadline moves on" in (
        caplog.messages
    )
    proxy.always = None
    device.upload(assignment.assignment, body)
    news = device.check_in("digits", assignment.assignment, wait=30)
    assert news is not None
    assert news.receipts[0].receipt.outcome == "included"
    first = [(each.attempt, each.state) for each in history(operator) if each.round == 1]
    assert first == [(1, "committed")]


def test_a_server_goes_on_from_the_store_with_an_empty_cache(
    start: Start, proxy: FaultProxy, model: Model, clock: Clock, tmp_path: Path
) -> None:
    device = Device(None, clock)  # type: ignore[arg-type]
    with start(**settings(proxy, tmp_path.name)) as http:
        device.http = http
        device.enrol(Operator(http).token())
        Operator(http).begin(model, rounds=2, cohort={"size": 1, "minimum": 1})
        assignment = device.assignment("digits")
        device.upload(assignment.assignment, device.body_for(assignment, ones(model)))
        assert device.check_in("digits", assignment.assignment, wait=30) is not None
    with start(**settings(proxy, tmp_path.name)) as http:
        device.http = http
        second = device.assignment("digits")
        assert second.plan.round == 2
        device.upload(second.assignment, device.body_for(second, ones(model)))
        answer = device.check_in("digits", second.assignment, wait=30)
        assert answer is not None
        after = device.model(answer.task.model)
        np.testing.assert_allclose(after.parameters - model.parameters, 2.0, atol=1e-6)
