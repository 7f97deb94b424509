"""Model files that an operator may bring by mistake, or somebody with an operator's token."""

from __future__ import annotations

import hashlib

import httpx
import pytest

from tests.devices import ADMIN_TOKEN
from tests.hostile_models import FORGED, mutated
from tests.server.in_process import Server


def brought(http: Server, data: bytes) -> httpx.Response:
    headers = {"Authorization": f"Bearer {ADMIN_TOKEN}"}
    digest = hashlib.sha256(data).hexdigest()
    return http.put(f"/v1/admin/models/{digest}", headers=headers, content=data)


@pytest.mark.parametrize("data", FORGED.values(), ids=FORGED)
def test_a_forged_model_is_refused_by_the_server_with_the_reason(http: Server, data: bytes) -> None:
    answer = brought(http, data)
    assert answer.status_code == 422, answer.text
    assert answer.json()["detail"].isprintable()


@pytest.mark.soak
def test_a_mutated_model_is_taken_or_refused_by_the_server(http: Server, soak: bool) -> None:
    for data in mutated(3, 20_000 if soak else 500):
        answer = brought(http, data)
        assert answer.status_code in (200, 201, 422), (answer.text, data.hex())
