"""Aggregations whose arrays are files give the bytes of those in memory."""

from __future__ import annotations

import hashlib
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedpress_compression.compressor import Compressor
from fedpress_compression.compressors.none import Uncompressed
from fedpress_compression.compressors.topk import TopK
from fedpress_compression.tensors import ModelSpec, TensorSpec
from fedpress_protocols.errors import NotFound, StorageFull
from fedpress_protocols.model import Model
from fedpress_protocols.plan import CohortRules, FixedPointTerms, Profile, RoundPlan
from fedpress_protocols.upload import Upload
from fedpress_server.aggregation.accumulate import AggregationJob, StagedUpload, add_batch
from fedpress_server.aggregation.aggregate import AggregationResult, aggregate
from fedpress_server.aggregation.terms import RoundTerms
from fedpress_server.api import operators
from fedpress_server.storage.files import model_name, optimizer_name
from fedpress_server.storage.payloads import LocalPayloads
from fedpress_strategies import from_config
from fedpress_strategies import strategy as strategy_module
from tests.devices import ADMIN_TOKEN
from tests.server.in_process import Server

ON_DISK, IN_MEMORY = 1000, 2**28
ROUNDS = 3


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategy_module, "_BLOCK", 300)


def model_of(dtype: str, columns: int = 101) -> Model:
    spec = ModelSpec(
        (
            TensorSpec("z", (30, columns), dtype),
            TensorSpec("a", (7, columns), dtype),
            TensorSpec("table", (3,), "float16", frozen=True),
        )
    )
    values = np.random.default_rng(1).standard_normal(spec.size).astype(np.float32)
    return Model(spec, values, {"table": np.ones(3, np.float16)})


def job_of(
    payloads: LocalPayloads,
    model: str,
    spec: ModelSpec,
    strategy: dict[str, Any],
    compressor: Compressor[Any],
    number: int,
) -> AggregationJob:
    plan = RoundPlan(
        task="t",
        round=number,
        attempt=1,
        model=model,
        spec=spec.digest,
        profiles=(Profile(name="one", compressor=compressor),),
        cohort=CohortRules(size=3, minimum=1),
        deadline=0.0,
        fixed_point=FixedPointTerms(scale_bits=30, max_abs=2.0, max_examples=50),
        public_seed="1" * 64,
    )
    terms, staged = RoundTerms(plan, spec, payloads), []
    rng = np.random.default_rng(number)
    for client in range(3):
        update = np.clip(rng.laplace(0, 0.1, spec.size), -1, 1).astype(np.float32)
        symbols, _ = compressor.compress(update, compressor.init(spec), terms.public, rng)
        body = Upload(0, 1 + client, symbols).to_bytes(terms.layouts[0], terms.contexts[0])
        payloads.put(f"upload-{client}", body)
        digest = hashlib.sha256(body).hexdigest()
        staged.append(StagedUpload(f"upload-{client}", digest, "one"))
    return AggregationJob(terms, from_config(strategy), None, tuple(staged))


def rounds_of(
    folder: Path, memory: int, strategy: dict[str, Any], dtype: str, *, in_batches: bool = False
) -> Iterator[AggregationResult]:
    payloads, first = LocalPayloads(folder), model_of(dtype)
    payloads.put(model_name(first.digest), first.to_bytes())
    model, state = first.digest, None
    for number in range(1, ROUNDS + 1):
        job = job_of(payloads, model, first.spec, strategy, TopK(fraction=0.3), number)
        job = replace(job, optimizer_state=state)
        if in_batches:
            batches = (job.uploads[:1], job.uploads[1:])
            sums = [add_batch(replace(job, uploads=b), payloads, "sums", memory) for b in batches]
            job = replace(job, sums=tuple(f"sums/{digest}" for digest in sums))
        result = aggregate(job, payloads, memory)
        model, state = result.model, result.optimizer_state
        yield result
    assert not list(folder.rglob("*.tmp"))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("strategy", "dtype"),
    [
        ({"id": "fedavg"}, "float32"),
        ({"id": "fedavg"}, "bfloat16"),
        ({"id": "fedavgm"}, "float16"),
        ({"id": "fedadam", "bias_correction": True}, "float32"),
        ({"id": "ema", "inner": {"id": "fedyogi"}}, "bfloat16"),
        ({"id": "norm_bounding", "max_norm": 5.0}, "float32"),
    ],
    ids=lambda each: each if isinstance(each, str) else each["id"],
)
def test_models_and_states_have_the_same_digests(
    tmp_path: Path, strategy: dict[str, Any], dtype: str
) -> None:
    expected = list(rounds_of(tmp_path / "memory", IN_MEMORY, strategy, dtype))
    assert list(rounds_of(tmp_path / "disk", ON_DISK, strategy, dtype)) == expected
    if strategy["id"] != "norm_bounding":  # whose uploads are not summed
        parted = rounds_of(tmp_path / "parts", ON_DISK, strategy, dtype, in_batches=True)
        assert list(parted) == expected
    assert len({result.model for result in expected}) == ROUNDS
    names = [model_name(result.model) for result in expected]
    names += [optimizer_name(r.optimizer_state) for r in expected if r.optimizer_state]
    for name in names:
        digest = name.partition("/")[2].partition(".")[0]
        data = (tmp_path / "disk" / name).read_bytes()
        assert hashlib.sha256(data).hexdigest() == digest


def test_no_array_of_the_models_size_is_held(tmp_path: Path) -> None:
    """Of what Python and numpy allocate; pages of mapped files belong to the system."""
    payloads, first = LocalPayloads(tmp_path), model_of("float32", columns=2**17)
    payloads.put(model_name(first.digest), first.to_bytes())
    strategy = {"id": "fedavgm"}
    job = job_of(payloads, first.digest, first.spec, strategy, TopK(fraction=0.001), 1)
    state = aggregate(job, payloads).optimizer_state  # with its kernels compiled
    job = replace(job, optimizer_state=state)
    _ = job.terms.public, job.terms.contexts
    tracemalloc.start()
    try:
        aggregate(job, payloads, 2**20)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 * first.spec.size


def test_a_file_that_cannot_be_written_is_an_error_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the job is tried again, and nothing is left behind."""
    payloads, first = LocalPayloads(tmp_path), model_of("float32")
    payloads.put(model_name(first.digest), first.to_bytes())
    job = job_of(payloads, first.digest, first.spec, {"id": "fedavg"}, Uncompressed(), 1)
    before = sorted(tmp_path.rglob("*"))
    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", full_disk)
        with pytest.raises(StorageFull):
            aggregate(job, payloads, ON_DISK)
    assert sorted(tmp_path.rglob("*")) == before
    aggregate(job, payloads, ON_DISK)


def full_disk(descriptor: int) -> None:
    raise OSError(28, "No space left on device")


# A model from an operator


def brought(http: Server, data: bytes, digest: str = "") -> tuple[int, str]:
    path = f"/v1/admin/models/{digest or hashlib.sha256(data).hexdigest()}"
    headers = {"Authorization": f"Bearer {ADMIN_TOKEN}"}
    answer = http.put(path, headers=headers, content=data)
    return answer.status_code, answer.text


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_large_model_is_received_in_a_file(
    http: Server, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    monkeypatch.setattr(operators, "_IN_MEMORY", 100)
    monkeypatch.setattr(Model, "from_bytes", None)
    model = model_of(dtype)
    data, payloads = model.to_bytes(), http.app.services.payloads
    assert [brought(http, data)[0] for _ in range(2)] == [201, 200]
    assert payloads.get(model_name(model.digest)) == data
    status, text = brought(http, data + b" ")
    assert status == 422
    assert "safetensors" in text
    assert brought(http, data, digest="0" * 64)[0] == 400
    bad = model.spec.flatten(model.tensors())
    unfinished = data.replace(bad[:1].tobytes(), np.array([np.nan], np.float32).tobytes(), 1)
    if dtype == "float32":
        assert "NaN" in brought(http, unfinished)[1]
    assert not list(payloads.scratch.rglob("*.tmp"))
    with pytest.raises(NotFound):
        payloads.get(model_name("0" * 64))
