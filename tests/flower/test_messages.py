"""What both ends of a Flower message derive from it; no Flower is needed for this."""

import numpy as np
import pytest

from fedpress_flower import envelope
from fedpress_protocols.errors import ConfigurationError


def test_every_floating_array_is_trained_and_float64_counts_as_float32() -> None:
    arrays: dict[str, np.ndarray] = {
        "double": np.ones((2, 3)),
        "half": np.ones(4, np.float16),
        "count": np.array(7, np.int64),
    }
    spec = envelope.spec_of(arrays)
    assert [(t.name, t.dtype) for t in spec.trained] == [("double", "float32"), ("half", "float16")]
    model = envelope.model_of(arrays)
    assert model.parameters.tolist() == [1.0] * 10
    assert model.buffers["count"] == 7


def test_a_model_that_moved_keeps_its_types_and_what_is_not_trained() -> None:
    arrays: dict[str, np.ndarray] = {"double": np.ones((2, 3)), "count": np.array(7, np.int64)}
    spec = envelope.spec_of(arrays)
    after = envelope.moved(arrays, spec, np.full(6, 1.5, np.float32))
    assert after["double"].dtype == np.float64
    assert after["double"].tolist() == [[1.5] * 3] * 2
    assert after["count"] is arrays["count"]


def test_a_model_without_numbers_to_train_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="none of the model's 1 arrays"):
        envelope.spec_of({"trees": np.zeros(9, np.uint8)})


def test_clients_of_one_run_have_seeds_of_their_own() -> None:
    seeds = {envelope.client_seed(3, index) for index in range(1000)}
    assert len(seeds) == 1000
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert envelope.client_seed(3, 5) == envelope.client_seed(3, 5) != envelope.client_seed(4, 5)


def test_models_beside_the_rounds_own_have_names_of_ours() -> None:
    assert envelope.model_record("previous") == "fedpress.previous"


def test_what_a_joining_client_signs_is_for_one_server_task_and_client() -> None:
    signed = {
        envelope.joining(*words)
        for words in (("k", "t", "c"), ("x", "t", "c"), ("k", "x", "c"), ("k", "t", "x"))
    }
    assert len(signed) == 4
    assert envelope.joining("ab", "c", "d") != envelope.joining("a", "bc", "d")
