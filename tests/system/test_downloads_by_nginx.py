"""nginx sends models from the store's folder, and devices notice nothing."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest

from fedpress_protocols.model import Model
from tests import s3
from tests.devices import Device, Operator
from tests.system.server_process import ADMIN_TOKEN, ServerProcess

CONFIGURATION = """
daemon off;
pid {folder}/nginx.pid;
error_log stderr warn;
{user}
events {{}}
http {{
  access_log {folder}/access.log;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  server {{
    listen unix:{folder}/socket;
    location / {{
      proxy_pass {server};
      proxy_set_header Host $http_host;
      proxy_request_buffering off;
    }}
    {store}
  }}
}}
"""


FOLDER = """
location ~ ^/_store/((models|coded|artefacts|bases)/.+)$ {{
  internal;
  alias {folder}/$1;
  sendfile on;
  etag off;
  add_header ETag $upstream_http_etag;
}}
"""
BUCKET = Path(__file__).parents[2] / "deploy" / "proxy" / "download.conf"
"""Of docker-compose.yml, whose store is at store:7070."""


@contextmanager
def proxied(folder: Path, server: ServerProcess, store: str) -> Iterator[httpx.Client]:
    """nginx before the server, on a socket in `folder`."""
    program = shutil.which("nginx")
    if program is None:
        pytest.skip("nginx is not installed here")
    file, socket = folder / "nginx.conf", folder / "socket"
    user = "user root;" if folder.owner() == "root" else ""
    text = CONFIGURATION.format(folder=folder, server=server.url, store=store, user=user)
    file.write_text(text)
    command = [program, "-p", str(folder), "-e", str(folder / "error.log"), "-c", str(file)]
    with subprocess.Popen(command) as nginx:
        try:
            give_up = time.monotonic() + 30
            while not socket.exists():
                assert nginx.poll() is None, "nginx did not start"
                assert time.monotonic() < give_up
                time.sleep(0.02)
            transport = httpx.HTTPTransport(uds=str(socket))
            with httpx.Client(transport=transport, base_url="http://fedpress.test") as http:
                yield http
        finally:
            nginx.terminate()


@pytest.fixture(params=["folder", "bucket"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[dict[str, str], str]]:
    """Settings of a store, and nginx's location for it."""
    if request.param == "folder":
        yield {}, FOLDER.format(folder=tmp_path / "server" / "server")
        return
    pytest.importorskip("obstore")
    pytest.importorskip("moto")
    with s3.store() as endpoint:
        s3.make_bucket(endpoint, "models")
        settings = {
            "FEDPRESS_STORE_URL": "s3://models/fedpress",
            "FEDPRESS_STORE_ENDPOINT": endpoint,
            "FEDPRESS_STORE_ACCESS_KEY_ID": s3.KEYS["access_key_id"],
            "FEDPRESS_STORE_SECRET_ACCESS_KEY": s3.KEYS["secret_access_key"],
        }
        shipped = BUCKET.read_text()
        assert "store:7070" in shipped
        yield settings, shipped.replace("store:7070", endpoint.removeprefix("http://"))


@pytest.mark.slow
def test_a_model_comes_through_nginx_whole_and_in_ranges(
    place: tuple[dict[str, str], str], tmp_path: Path
) -> None:
    settings, location = place
    folder = tmp_path / "nginx"
    folder.mkdir()
    model = Model.from_tensors({"weight": np.arange(100_000, dtype=np.float32)})
    data = model.to_bytes()
    server = ServerProcess(
        tmp_path / "server", {**settings, "FEDPRESS_DOWNLOAD_LOCATION": "/_store"}
    )
    server.start()
    try:
        with proxied(folder, server, location) as http:
            operator, device = Operator(http, ADMIN_TOKEN), Device(http)
            device.enrol(operator.token())
            operator.begin(model)
            device.assignment("digits")
            path = f"/v1/models/{model.digest}"
            whole = device.request("GET", f"{path}?task=digits")
            assert (whole.status_code, whole.content) == (200, data)
            assert whole.headers["ETag"] == f'"{model.digest}"'
            assert "immutable" in whole.headers["Cache-Control"]
            assert whole.headers.get_list("ETag") == [f'"{model.digest}"']
            assert len(whole.headers.get_list("Cache-Control")) == 1
            assert "X-Accel-Redirect" not in whole.headers
            span = {"Range": "bytes=1000-"}
            rest = http.get(path, headers=operator.headers | span)
            assert (rest.status_code, rest.content) == (206, data[1000:])
            where = f"/_store/models/{model.digest}.safetensors"
            assert http.get(where).status_code == 404, "nobody asks nginx for it"
            (status,) = operator.get("/v1/tasks/digits/rounds")
            assert status["download_bytes"] == len(data)
    finally:
        server.stop()
