"""Any threshold of shares gives the secret back, and fewer say nothing about it."""

from __future__ import annotations

import os
from types import ModuleType

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpress_compression import kernels
from fedpress_compression.kernels import reference
from fedpress_protocols.errors import ConfigurationError, InvalidShare
from fedpress_protocols.masking import shamir
from fedpress_protocols.masking.shamir import (
    LIMBS,
    PRIME,
    combine,
    combine_many,
    split,
    wrong_places,
)
from tests.lengths import examples

SECRET = bytes(range(32))
EDGES = [0, 1, 2, 2**29, 2**32 - 1, 2**32, 2**60, PRIME - 2, PRIME - 1]

secrets = st.one_of(
    st.binary(min_size=32, max_size=32), st.sampled_from([bytes(32), b"\xff" * 32, SECRET])
)
seeds = st.integers(0, 2**32 - 1)


def both() -> list[ModuleType]:
    try:
        from fedpress_compression.kernels import compiled
    except ModuleNotFoundError:
        return [reference]
    return [reference, compiled]


BOTH = both()


def elements(rng: np.random.Generator, *shape: int) -> npt.NDArray[np.uint64]:
    """Elements of the field, every fourth one at an edge of the arithmetic."""
    drawn = rng.integers(0, PRIME, shape, np.uint64)
    at_edge = rng.random(shape) < 0.25
    return np.where(at_edge, rng.choice(np.array(EDGES, np.uint64), shape), drawn)


def holders(rng: np.random.Generator, count: int) -> npt.NDArray[np.uint64]:
    few = rng.permutation(4 * count)[:count] + 1
    far = 2**32 - few
    return np.where(rng.random(count) < 0.2, far, few).astype(np.uint64)


@given(secrets, st.integers(1, 20), st.integers(0, 10), seeds)
def test_any_threshold_of_shares_gives_the_secret_back(
    secret: bytes, threshold: int, more: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    xs = holders(rng, threshold + more)
    shares = split(secret, threshold, xs)
    assert shares.shape == (xs.size, LIMBS)
    order = rng.permutation(xs.size)
    assert combine(xs[order], shares[order], threshold) == secret
    assert combine(xs[order[:threshold]], shares[order[:threshold]], threshold) == secret


def test_many_secrets_of_the_same_holders_come_back_at_once() -> None:
    xs = np.array([9, 1, 4, 7])
    dealt = [bytes([i]) * 32 for i in range(50)]
    shares = np.stack([split(secret, 3, xs) for secret in dealt])
    assert combine_many(xs, shares, 3) == dealt
    assert combine_many(xs, shares[:0], 3) == []


# The arithmetic.


@pytest.mark.parametrize("module", BOTH, ids=lambda module: module.__name__.split(".")[-1])
@settings(max_examples=examples(20, 60))
@given(seed=seeds, terms=st.integers(1, 12), num=st.integers(1, 9), columns=st.integers(1, 5))
def test_kernels_compute_what_whole_numbers_give(
    module: ModuleType, seed: int, terms: int, num: int, columns: int
) -> None:
    rng = np.random.default_rng(seed)
    xs, coefficients = holders(rng, num), elements(rng, terms, columns)
    found = module.evaluate(coefficients, xs)
    assert found.tolist() == [
        [
            sum(int(c) * int(x) ** power for power, c in enumerate(column)) % PRIME
            for column in coefficients.T
        ]
        for x in xs
    ]
    weights = module.lagrange(xs)
    due = []
    for x in xs.tolist():
        weight = 1
        for other in xs.tolist():
            if other != x:
                weight = weight * other * pow(other - x, -1, PRIME) % PRIME
        due.append(weight)
    assert weights.tolist() == due
    by, values = elements(rng, terms), elements(rng, num, terms, columns)
    assert module.weighted_sums(by, values).tolist() == [
        [sum(int(w) * int(v) for w, v in zip(by, column, strict=True)) % PRIME for column in each.T]
        for each in values
    ]


@pytest.mark.skipif(len(BOTH) == 1, reason="compares the compiled kernels of fedpress[fast]")
@settings(max_examples=20)
@given(seeds, st.integers(1, 200), st.integers(1, 200))
def test_compiled_kernels_give_the_same_bits(seed: int, terms: int, num: int) -> None:
    rng = np.random.default_rng(seed)
    xs, coefficients = holders(rng, num), elements(rng, terms, LIMBS)
    values, by = elements(rng, 3, terms, LIMBS), elements(rng, terms)
    first, second = (
        (
            module.evaluate(coefficients, xs).tobytes(),
            module.lagrange(xs).tobytes(),
            module.weighted_sums(by, values).tobytes(),
        )
        for module in BOTH
    )
    assert first == second


# What fewer shares say: nothing.


def rank(rows: list[list[int]]) -> int:
    """Of a matrix over the field, by elimination."""
    rows, found = [row[:] for row in rows], 0
    for column in range(len(rows[0])):
        pivot = next((i for i in range(found, len(rows)) if rows[i][column]), None)
        if pivot is None:
            continue
        rows[found], rows[pivot] = rows[pivot], rows[found]
        inverse = pow(rows[found][column], -1, PRIME)
        for i in range(found + 1, len(rows)):
            factor = rows[i][column] * inverse % PRIME
            rows[i] = [(a - factor * b) % PRIME for a, b in zip(rows[i], rows[found], strict=True)]
        found += 1
    return found


@pytest.mark.parametrize("threshold", [2, 3, 8, 25])
def test_shares_below_the_threshold_say_nothing(threshold: int) -> None:
    """Whatever the secret, any threshold - 1 shares are any values with the same chance: the map
    from the random coefficients to them is one to one. A threshold of them is not independent."""
    rng = np.random.default_rng(threshold)
    xs = holders(rng, threshold)
    units = np.eye(threshold, dtype=np.uint64)
    to_shares = kernels.evaluate(units, xs)  # [holders, coefficients]
    assert rank(to_shares[1:, 1:].tolist()) == threshold - 1
    assert rank(to_shares.tolist()) == threshold
    # Seen with a share of one's choice for a secret of one's choice: there is a polynomial for it.
    assert rank(to_shares[1:].tolist()) == threshold - 1


def test_coefficients_are_drawn_uniformly_and_from_the_system_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A word that is the prime itself is drawn again; the higher three bits are not used."""
    beyond, seen = b"\xff" * 8, []

    def urandom(count: int) -> bytes:
        seen.append(count)
        return (beyond + bytes([len(seen)]) * (count - 8)) if count > 8 else bytes([7]) * 8

    monkeypatch.setattr(os, "urandom", urandom)
    shares = split(bytes(32), 2, [1, 2])
    assert seen == [8 * LIMBS, 8]
    again = int.from_bytes(bytes([7]) * 8, "little") % 2**61
    assert shares[0].tolist() == [again, *[int.from_bytes(b"\1" * 8, "little")] * 4]
    assert (shares[1] == shares[0] * 2).all()


def test_two_splits_of_a_secret_have_nothing_in_common() -> None:
    first, second = split(SECRET, 3, range(1, 6)), split(SECRET, 3, range(1, 6))
    assert not np.isin(first, second).any()


# Wrong shares.


def changed(
    shares: npt.NDArray[np.uint64], places: npt.NDArray[np.int64], rng: np.random.Generator
) -> npt.NDArray[np.uint64]:
    """The shares in `places` with one to all of their limbs changed."""
    lies = shares.copy()
    for place in places:
        limbs = rng.permutation(LIMBS)[: rng.integers(1, LIMBS + 1)]
        by = rng.integers(1, PRIME, limbs.size, np.uint64)
        lies[place, limbs] = (lies[place, limbs] + by) % PRIME
    return lies


@given(seeds, st.integers(1, 20), st.integers(0, 12), st.data())
def test_as_many_wrong_shares_as_can_be_corrected_are_found(
    seed: int, threshold: int, more: int, data: st.DataObject
) -> None:
    rng = np.random.default_rng(seed)
    xs = holders(rng, threshold + more)
    num_wrong = data.draw(st.integers(0, more // 2))
    places = rng.permutation(xs.size)[:num_wrong]
    shares = changed(split(SECRET, threshold, xs), places, rng)
    assert wrong_places(xs, shares, threshold) == frozenset(places.tolist())
    right = np.setdiff1d(np.arange(xs.size), places)
    assert combine(xs[right], shares[right], threshold) == SECRET


@given(seeds, st.integers(1, 12), st.integers(1, 8), st.data())
def test_whatever_is_found_beyond_is_true(
    seed: int, threshold: int, more: int, data: st.DataObject
) -> None:
    """None, or shares whose removal leaves others that are of one secret."""
    rng = np.random.default_rng(seed)
    xs = holders(rng, threshold + more)
    num_wrong = data.draw(st.integers(more // 2 + 1, xs.size))
    places = rng.permutation(xs.size)[:num_wrong]
    shares = changed(split(SECRET, threshold, xs), places, rng)
    if data.draw(st.booleans()):  # wrong shares that agree: moved by one other polynomial
        by = split(bytes(range(32, 64)), threshold, xs)
        shares[places] = (split(SECRET, threshold, xs)[places] + by[places]) % PRIME
    wrong = wrong_places(xs, shares, threshold)
    if wrong is not None:
        assert len(wrong) <= more // 2
        others = [place for place in range(xs.size) if place not in wrong]
        assert wrong_places(xs[others], shares[others], threshold) == frozenset()
        for last in others[threshold:]:
            chosen = [*others[: threshold - 1], last]
            weights = kernels.lagrange(xs[chosen])
            first = kernels.lagrange(xs[others[:threshold]])
            assert (
                kernels.weighted_sums(weights, shares[np.newaxis, chosen])
                == kernels.weighted_sums(first, shares[np.newaxis, others[:threshold]])
            ).all()


def test_shares_that_agree_on_another_secret_outvote_the_others() -> None:
    """What no decoder can know: which of two polynomials the owner chose."""
    xs = np.arange(1, 10)
    first, second = (split(bytes([i]) * 32, 3, xs) for i in (1, 2))
    shares = np.concatenate([first[:3], second[3:]])
    assert wrong_places(xs, shares, 3) == frozenset({0, 1, 2})
    assert wrong_places(xs[:6], shares[:6], 3) is None


def test_wrong_places_need_shares_enough_and_within_the_field() -> None:
    xs = np.arange(1, 6)
    shares = split(SECRET, 3, xs)
    assert wrong_places(xs[:3], shares[:3], 3) == frozenset()
    with pytest.raises(InvalidShare, match="2 shares, at least 3 are required"):
        wrong_places(xs[:2], shares[:2], 3)
    shares[4, 2] = PRIME
    with pytest.raises(InvalidShare, match="limb outside"):
        wrong_places(xs, shares, 3)
    with pytest.raises(InvalidShare, match="two shares of one holder"):
        wrong_places(xs // 2 + 1, shares, 3)


# What is no share.


@pytest.fixture
def dealt() -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64]]:
    xs = np.arange(1, 6)
    return xs, split(SECRET, 3, xs)


Dealt = tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64]]


def test_too_few_shares_are_refused(dealt: Dealt) -> None:
    xs, shares = dealt
    with pytest.raises(InvalidShare, match="2 shares, at least 3 are required"):
        combine(xs[:2], shares[:2], 3)
    with pytest.raises(InvalidShare, match="at least 0 are required"):
        combine(xs, shares, 0)


def test_a_limb_beyond_the_field_is_refused(dealt: Dealt) -> None:
    xs, shares = dealt
    shares[4, 2] = PRIME
    with pytest.raises(InvalidShare, match="limb outside"):
        combine(xs, shares, 3)


def test_one_holder_twice_is_refused(dealt: Dealt) -> None:
    xs, shares = dealt
    xs[1] = xs[0]
    with pytest.raises(InvalidShare, match="two shares of one holder"):
        combine(xs, shares, 3)


@pytest.mark.parametrize(
    ("xs", "said"),
    [
        ([0, 1, 2], "holder outside"),
        ([1, 2, 2**32], "holder outside"),
        ([-1, 1, 2], "holder outside"),
        ([1.0, 2.0, 3.0], "expected a vector of integers"),
        ([[1, 2, 3]], "expected a vector of integers"),
    ],
)
def test_holders_that_cannot_be_are_refused(xs: list[int], said: str, dealt: Dealt) -> None:
    with pytest.raises(InvalidShare, match=said):
        combine(xs, dealt[1][:3], 3)
    with pytest.raises(ConfigurationError, match=said):
        split(SECRET, 2, xs)


def test_shares_of_another_shape_or_kind_are_refused(dealt: Dealt) -> None:
    xs, shares = dealt
    for wrong in (shares[:, :4], shares[:4], shares.astype(np.int64)):
        with pytest.raises(InvalidShare, match=r"expected uint64 \[secrets, 5, 5\]"):
            combine(xs, wrong, 3)


@given(st.integers(0, 4), st.integers(0, LIMBS - 1), st.integers(1, 2**61 - 2))
def test_a_changed_share_gives_another_secret_or_none(holder: int, limb: int, by: int) -> None:
    xs = np.arange(1, 6)
    shares = split(SECRET, 5, xs)
    shares[holder, limb] = (int(shares[holder, limb]) + by) % PRIME
    try:
        assert combine(xs, shares, 5) != SECRET
    except InvalidShare as exc:
        assert "do not give a 32-byte secret" in str(exc)  # noqa: PT017


def test_a_last_limb_of_more_than_48_bits_is_no_secret() -> None:
    shares = np.array([[0, 0, 0, 0, 2**48]], np.uint64)
    with pytest.raises(InvalidShare, match="do not give a 32-byte secret"):
        combine([1], shares, 1)


def test_what_cannot_be_split_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="31 bytes"):
        split(SECRET[1:], 2, [1, 2])
    with pytest.raises(
        ConfigurationError, match="threshold must be in \\[1, 2\\], the number of shares, not 3"
    ):
        split(SECRET, 3, [1, 2])
    with pytest.raises(ConfigurationError, match="not 0"):
        split(SECRET, 0, [1, 2])


def test_a_share_is_its_40_bytes() -> None:
    share = split(SECRET, 2, [1, 2])[1]
    data = shamir.to_bytes(share)
    assert len(data) == shamir.SHARE_BYTES
    assert shamir.from_bytes(data).tolist() == share.tolist()
    with pytest.raises(InvalidShare, match="39 bytes"):
        shamir.from_bytes(data[1:])
    with pytest.raises(InvalidShare, match="limb outside"):
        shamir.from_bytes(PRIME.to_bytes(8, "little") * 5)
