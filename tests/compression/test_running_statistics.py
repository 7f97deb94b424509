"""Which tensors are running statistics, and what is kept of them."""

from __future__ import annotations

import numpy as np

from fedpress_compression.running_statistics import (
    has_statistics,
    normalisations,
    statistics,
    with_statistics,
    with_variances,
)
from fedpress_protocols.model import Model

MODEL = Model.from_tensors(
    {
        "weight": np.zeros(60, np.float32),
        "bn.running_mean": np.zeros(20, np.float32),
        "bn.running_var": np.ones(20, np.float32),
        "moving_variance.scale": np.zeros(5, np.float32),
    }
)
SPEC = MODEL.spec


def test_a_variance_falls_by_a_factor_of_ten_in_a_round_at_most() -> None:
    before, after = MODEL.parameters, MODEL.parameters - 1
    kept = SPEC.unflatten(with_variances(SPEC, before, after))
    assert (kept["bn.running_var"] == np.float32(0.1)).all()
    assert (kept["bn.running_mean"] == -1).all()
    assert (kept["moving_variance.scale"] == -1).all(), "a weight of a layer of that name"
    assert (after[SPEC.slices["bn.running_var"]] == 0).all(), "the vector itself is not changed"
    other = Model.from_tensors({"weight": np.ones(3, np.float32)})
    assert with_variances(other.spec, other.parameters, other.parameters) is other.parameters


def test_a_block_knows_its_statistics() -> None:
    """Means are at 60 to 79, variances at 80 to 99."""
    assert list(statistics(SPEC, 50, 20)) == [slice(10, 20)]
    assert list(statistics(SPEC, 70, 100)) == [slice(0, 10), slice(10, 30)]
    assert list(statistics(SPEC, 100, 5)) == []
    assert list(statistics(None, 0, 105)) == []


def test_layers_are_known_by_their_names_in_torch_and_keras() -> None:
    names = ("a/moving_mean", "a/moving_variance", "b.running_var", "c.running_mean", "weight")
    tensors = {name: np.zeros(3, np.float32) for name in names}
    tensors["b.running_mean"] = np.zeros(4, np.float32)  # of another layer, as it seems
    spec = Model.from_tensors(tensors).spec
    found = [(each.name, mean and mean.name) for each, mean in normalisations(spec)]
    assert found == [("a/moving_variance", "a/moving_mean"), ("b.running_var", None)]
    assert has_statistics(spec)
    assert not has_statistics(Model.from_tensors({"weight": np.zeros(3, np.float32)}).spec)
    plain = Model.from_tensors({"weight": np.zeros(3, np.float32)})
    assert with_statistics(plain.spec, plain.parameters, plain.parameters) is plain.parameters
    zeros, ones = np.zeros(spec.size, np.float32), np.ones(spec.size, np.float32)
    taken = spec.unflatten(with_statistics(spec, zeros, ones))
    assert {name for name, values in taken.items() if values.any()} == set(tensors) - {"weight"}
