"""Shared randomness: a specified stream, and what is drawn from it."""

from __future__ import annotations

import numpy as np
import pytest

from fedpress_compression.randomness import PublicRandomness, PublicStream
from fedpress_protocols.errors import ConfigurationError


def stream(label: str = "test") -> PublicStream:
    return PublicRandomness(bytes(range(32))).stream(label)


@pytest.mark.parametrize(
    ("bound", "count"), [(1, 0), (1, 1), (10, 5), (10, 6), (10, 10), (1000, 37), (1000, 990)]
)
def test_distinct_integers_are_those_that_are_drawn_first(bound: int, count: int) -> None:
    """What the specification says, one integer at a time; and the stream stops there."""
    fast, slow = stream(), stream()
    found = fast.distinct(bound, count)
    left_out = 2 * count > bound
    drawn: set[int] = set()
    while len(drawn) < (bound - count if left_out else count):
        drawn.add(int(slow.below(bound, 1)[0]))
    due = sorted(set(range(bound)) - drawn if left_out else drawn)
    assert found.tolist() == due
    assert found.dtype == np.int64
    assert fast.words(3).tolist() == slow.words(3).tolist()


def test_every_subset_is_as_likely() -> None:
    one = stream("subsets")
    counts = np.zeros((6, 6))
    for _ in range(3000):
        a, b = one.distinct(6, 2)
        counts[a, b] += 1
    seen = counts[np.triu_indices(6, 1)]
    assert seen.sum() == 3000
    assert ((seen - 200) ** 2 / 200).sum() < 36  # chi-squared, 14 degrees of freedom, 0.1 %


def test_more_than_there_are_cannot_be_drawn() -> None:
    with pytest.raises(ConfigurationError, match="4 distinct integers below 3"):
        stream().distinct(3, 4)


def test_bits_are_those_of_the_words_from_the_lowest_up() -> None:
    words = stream().words(3)
    due = [int(word) >> i & 1 for word in words for i in range(64)]
    assert stream().bits(150).tolist() == due[:150]
    assert stream().bits(0).tolist() == []
    one = stream()
    one.bits(65)
    assert one.words(1)[0] == words[2]
