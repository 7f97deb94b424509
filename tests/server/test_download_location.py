"""A proxy sends what devices fetch: the server says where it lies, and counts it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from fedpress_protocols.errors import FedpressError
from fedpress_protocols.model import Model
from fedpress_server import Settings
from tests.devices import Device, Operator
from tests.s3 import KEYS, make_bucket, store
from tests.server.in_process import Clock, Server, Start, history


@pytest.fixture
def endpoint() -> Iterator[str]:
    pytest.importorskip("obstore")
    pytest.importorskip("moto")
    with store() as url:
        make_bucket(url, "fedpress")
        yield url


def joined(server: Server, clock: Clock, model: Model) -> tuple[Operator, Device]:
    operator, device = Operator(server), Device(server, clock)
    device.enrol(operator.token())
    operator.begin(model)
    device.assignment("digits")
    return operator, device


def test_the_proxy_of_a_folder_is_told_the_file(
    start: Start, tmp_path: Path, clock: Clock, model: Model
) -> None:
    with start(download_location="/_store") as server:
        operator, device = joined(server, clock, model)
        answer = device.request("GET", f"/v1/models/{model.digest}?task=digits")
        assert answer.status_code == 200
        assert answer.content == b"", "the proxy sends the bytes"
        where = answer.headers["X-Accel-Redirect"].removeprefix("/_store/")
        assert (tmp_path / "data" / where).read_bytes() == model.to_bytes()
        assert answer.headers["ETag"] == f'"{model.digest}"'
        assert "immutable" in answer.headers["Cache-Control"]
        assert history(operator)[-1].download_bytes == len(model.to_bytes())


def test_the_proxy_of_a_bucket_gets_a_link_that_opens_that_file_alone(
    start: Start, endpoint: str, clock: Clock, model: Model
) -> None:
    settings = {
        "store_url": "s3://fedpress/place",
        "store_endpoint": endpoint,
        "store_access_key_id": KEYS["access_key_id"],
        "store_secret_access_key": KEYS["secret_access_key"],
    }
    with start(download_location="/_store", **settings) as server:
        _, device = joined(server, clock, model)
        links = [
            device.request("GET", f"/v1/models/{model.digest}").headers["X-Accel-Redirect"]
            for _ in range(2)
        ]
        assert links[0] == links[1], "one link for all, so that a cache may know it"
        link = links[0].removeprefix("/_store")
        assert urlsplit(link).path.startswith("/fedpress/place/models/")
        assert "X-Amz-Signature=" in link
        assert KEYS["secret_access_key"] not in link
        assert httpx.get(endpoint + link).content == model.to_bytes()
        some = httpx.get(endpoint + link, headers={"Range": "bytes=8-15"})
        assert some.content == model.to_bytes()[8:16]


def test_a_copy_that_the_device_has_and_a_range_outside_are_the_servers_to_answer(
    start: Start, clock: Clock, model: Model
) -> None:
    with start(download_location="/_store") as server:
        operator, device = joined(server, clock, model)
        path, size = f"/v1/models/{model.digest}?task=digits", len(model.to_bytes())
        for headers, status in (
            ({"If-None-Match": f'"{model.digest}"'}, 304),
            ({"Range": f"bytes={size}-"}, 416),
        ):
            answer = server.get(path, headers=operator.headers | headers)
            assert answer.status_code == status
            assert "X-Accel-Redirect" not in answer.headers
        server.get(path, headers=operator.headers | {"Range": f"bytes={size - 3}-"})
        device.request("GET", path).raise_for_status()
        assert history(operator)[-1].download_bytes == size


def test_a_stranger_is_told_no_place(start: Start, clock: Clock, model: Model) -> None:
    with start(download_location="/_store") as server:
        joined(server, clock, model)
        stranger = Device(server, clock)
        answer = stranger.request("GET", f"/v1/models/{model.digest}")
        assert answer.status_code == 401
        assert "X-Accel-Redirect" not in answer.headers


@pytest.mark.parametrize("location", ["_store", "/_store/", "/a b", "https://elsewhere"])
def test_a_location_that_is_no_path_is_refused(location: str) -> None:
    with pytest.raises(FedpressError, match="download_location"):
        Settings.load(download_location=location)
