"""Malformed uploads through real HTTP: each is refused with its reason, and the server goes on."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from fedpress_protocols.errors import FedpressError
from fedpress_protocols.messages import Assignment
from fedpress_protocols.model import Model
from fedpress_protocols.upload import Upload
from tests.devices import Device, Operator
from tests.system.server_process import ADMIN_TOKEN, ServerProcess

Mutation = Callable[[random.Random, bytes, bytes], bytes]
MODEL = Model.from_tensors(
    {"weight": np.zeros((64, 40), np.float32), "bias": np.zeros(40, np.float32)}
)
PRESSED = {
    "id": "error_feedback",
    "inner": {"id": "per_tensor", "large": {"id": "topk", "fraction": 0.05}},
}


def flipped(chance: random.Random, body: bytes, other: bytes) -> bytes:
    changed = bytearray(body)
    for _ in range(chance.choice([1, 1, 2, 8])):
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def overwritten(chance: random.Random, body: bytes, other: bytes) -> bytes:
    start = chance.randrange(len(body))
    noise = chance.randbytes(chance.randrange(1, 9))
    return body[:start] + noise + body[start + len(noise) :]


MUTATIONS: dict[str, Mutation] = {
    "truncated": lambda chance, body, other: body[: chance.randrange(len(body))],
    "extended": lambda chance, body, other: body + chance.randbytes(chance.randrange(1, 20)),
    "flipped": flipped,
    "overwritten": overwritten,
    "spliced": lambda chance, body, other: (
        body[: chance.randrange(len(body))] + other[chance.randrange(len(other)) :]
    ),
    "random": lambda chance, body, other: chance.randbytes(chance.randrange(len(body))),
}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    process = ServerProcess(tmp_path)
    process.start()
    yield process
    assert process.stop() == 0


def is_refused_here(body: bytes, assignment: Assignment) -> bool:
    """Whether this end's decoder refuses `body`; a mutation may happen to make a valid upload."""
    plan = assignment.plan
    index = plan.profile_index(assignment.profile)
    try:
        upload = Upload.from_bytes(body, plan.layouts(MODEL.spec), index)
        update = plan.compressor(assignment.profile).decompress(
            upload.symbols, plan.public(MODEL.spec)
        )
        update.check(plan.fixed_point.max_abs)
        return upload.num_examples > plan.fixed_point.max_examples
    except FedpressError:
        return True


@pytest.mark.soak
@pytest.mark.slow(short=True)
@pytest.mark.slow
def test_hostile_uploads_are_refused_and_the_server_goes_on(
    server: ServerProcess, slow: bool, soak: bool, record_property: Callable[[str, object], None]
) -> None:
    chance = random.Random(3)
    # A key may sign some four thousand requests in five minutes: more uploads take more devices.
    wanted, num_devices = (20_000, 8) if soak else (2_000 if slow else 300, 1)
    with httpx.Client(base_url=server.url, timeout=30) as http:
        operator = Operator(http, ADMIN_TOKEN)
        operator.begin(
            MODEL,
            rounds=1,
            profiles=[{"name": "pressed", "compressor": PRESSED}],
            cohort={"size": num_devices, "minimum": num_devices},
            round_seconds=3600.0,
        )
        answers: Counter[int] = Counter()
        for number in range(num_devices):
            device = Device(http)
            device.enrol(operator.token())
            assignment = device.assignment("digits")
            rng = np.random.default_rng(number)
            honest, other = (
                device.body_for(
                    assignment, (rng.standard_normal(MODEL.spec.size) ** 3).astype(np.float32), 40
                )
                for _ in range(2)
            )
            while sum(answers.values()) < wanted * (number + 1) // num_devices:
                mutate = MUTATIONS[chance.choice(list(MUTATIONS))]
                body = mutate(chance, honest, other)
                if not is_refused_here(body, assignment):
                    continue
                answer = device.put(assignment.assignment, body)
                answers[answer.status_code] += 1
                assert 400 <= answer.status_code < 500, (answer.text, body.hex())
                problem = answer.json()
                assert problem["type"].startswith("urn:fedpress:problem:")
                assert problem["detail"]
            assert device.put(assignment.assignment, honest).status_code == 201
        receipt = None
        while receipt is None:
            receipt = device.receipt(assignment.assignment)
        assert receipt.receipt.outcome == "included"
    counts = ", ".join(f"{count} x {status}" for status, count in sorted(answers.items()))
    record_property("figure", f"hostile uploads through HTTP: {counts}")
