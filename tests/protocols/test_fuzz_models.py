"""Whatever the bytes of a model: ConfigurationError, or a model, within the file's own memory."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import safetensors.numpy

from fedpress_compression.tensors import MAX_TENSORS
from fedpress_protocols.errors import ConfigurationError
from fedpress_protocols.model import Model
from tests.hostile_models import FORGED, file_of, mutated


@pytest.mark.parametrize("data", FORGED.values(), ids=FORGED)
def test_a_forged_model_is_refused_with_the_reason(data: bytes) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Model.from_bytes(data)
    assert caught.value.detail.isprintable()


def with_header(header: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (with_header(b"[]"), "not a JSON object"),
        (with_header(b"[" * 200_000), "nested too deeply"),
        (with_header(b"[" * 2_000_000), "more values than"),
        (
            with_header(b"{%s}" % b",".join(b'"t%d":0' % n for n in range(MAX_TENSORS + 2))),
            "tensors; at most",
        ),
        (
            safetensors.numpy.save(
                {"w": np.zeros(1, np.float32)}, {"fedpress.order": "[" * 200_000}
            ),
            "an order nested too deeply",
        ),
    ],
    ids=["list", "deep", "long", "many", "deep-order"],
)
def test_a_header_that_is_none_says_why(data: bytes, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        Model.from_bytes(data)


def test_a_mutated_model_is_a_model_or_refused(soak: bool) -> None:
    num_refused = 0
    for data in mutated(1, 100_000 if soak else 5_000):
        try:
            model = Model.from_bytes(data)
        except ConfigurationError:
            num_refused += 1
        else:
            assert Model.from_bytes(model.to_bytes()).spec == model.spec
    assert num_refused > 3_000


@pytest.mark.slow
def test_the_largest_number_of_tensors_is_read_in_a_few_times_its_file() -> None:
    header = {
        f"t{n}": {"dtype": "F32", "shape": [1], "data_offsets": [4 * n, 4 * n + 4]}
        for n in range(MAX_TENSORS)
    }
    data = file_of(header, bytes(4 * MAX_TENSORS))
    tracemalloc.start()
    try:
        model = Model.from_bytes(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert model.spec.size == MAX_TENSORS
    assert peak < 64 * 2**20
