"""Who gets what: no row twice, nobody with nothing, and as uneven as asked for."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpress.simulate.partition import LEAST, Partition
from fedpress_protocols.errors import ConfigurationError

KINDS = ("iid", "dirichlet:0.1", "dirichlet:5", "shards:2", "quantity:0.3")


@given(
    kind=st.sampled_from(KINDS),
    clients=st.integers(1, 40),
    classes=st.integers(1, 12),
    seed=st.integers(0, 2**31 - 1),
)
def test_rows_are_dealt_once_and_all_and_everybody_has_some(
    kind: str, clients: int, classes: int, seed: int
) -> None:
    labels = np.random.default_rng(1).integers(0, classes, 640)
    dealt = Partition.parse(kind).deal(labels, clients, seed)
    assert len(dealt) == clients
    assert np.array_equal(np.sort(np.concatenate(dealt)), np.arange(640))
    assert min(rows.size for rows in dealt) >= LEAST
    again = Partition.parse(kind).deal(labels, clients, seed)
    assert all(np.array_equal(one, other) for one, other in zip(dealt, again, strict=True))


@given(kind=st.sampled_from(KINDS), seed=st.integers(0, 2**31 - 1))
def test_more_clients_than_rows_draw_theirs_with_replacement(kind: str, seed: int) -> None:
    labels = np.random.default_rng(1).integers(0, 5, 50)
    dealt = Partition.parse(kind).deal(labels, 200, seed)
    assert {rows.size for rows in dealt} == {LEAST}
    assert all(0 <= rows.min() <= rows.max() < 50 for rows in dealt)


def classes_of(dealt: list[np.ndarray], labels: np.ndarray) -> float:
    """How many classes a client has on average."""
    return float(np.mean([np.unique(labels[rows]).size for rows in dealt]))


def test_a_small_concentration_and_few_shards_leave_clients_few_classes() -> None:
    labels = np.random.default_rng(2).integers(0, 10, 5000)
    found = {
        kind: classes_of(Partition.parse(kind).deal(labels, 50, 0), labels)
        for kind in ("iid", "dirichlet:0.05", "dirichlet:100", "shards:2")
    }
    assert found["dirichlet:0.05"] < 4 < 9 < found["dirichlet:100"] <= 10
    assert found["shards:2"] <= 4
    assert found["iid"] > 9.9


def test_quantities_are_uneven_and_classes_are_not() -> None:
    labels = np.random.default_rng(3).integers(0, 4, 4000)
    dealt = Partition.parse("quantity:0.3").deal(labels, 20, 0)
    sizes = sorted(rows.size for rows in dealt)
    assert sizes[-1] > 10 * sizes[0]
    large = [rows for rows in dealt if rows.size > 100]
    assert all(np.bincount(labels[rows], minlength=4).min() > rows.size / 8 for rows in large)


def test_natural_groups_stay_whole_and_the_largest_are_taken() -> None:
    groups = np.array([0, 1, 1, 1, 2, 2, 0, 3])
    dealt = Partition.parse("natural").deal(np.zeros(8, np.int64), 3, 0, groups)
    assert [rows.tolist() for rows in dealt] == [[0, 6], [1, 2, 3], [4, 5]]
    with pytest.raises(ConfigurationError, match="4 groups for 5 clients"):
        Partition.parse("natural").deal(np.zeros(8, np.int64), 5, 0, groups)
    with pytest.raises(ConfigurationError, match="in no groups"):
        Partition.parse("natural").deal(np.zeros(8, np.int64), 5, 0)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("round", "no partition 'round'"),
        ("dirichlet:x", "is no number"),
        ("dirichlet:0", "more than 0"),
        ("shards:-1", "more than 0"),
        ("dirichlet:inf", "finite number"),
        ("quantity:inf", "finite number"),
        ("shards:inf", "finite number"),
        ("shards:1.5", "shards:1.5, where a whole number of 1 or more is due"),
        ("shards:0.2", "whole number"),
        ("iid:9", "iid takes no number"),
        ("natural:2", "natural takes no number"),
    ],
)
def test_a_partition_that_is_none_is_named(text: str, complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        Partition.parse(text)
