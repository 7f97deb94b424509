"""Polynomials over GF(2**61 - 1), in numpy.

A product of two elements has 122 bits, so it is put together from halves of 32: with a = al +
ah * 2**32, and because 2**61 is 1, al * b folds to its lower 61 bits and the 3 above them, and
ah * b * 2**32 to its lower 29 bits moved up and the rest.
"""

from __future__ import annotations

import numpy as np

from fedpress_compression.kernels.wire import Words

PRIME = 2**61 - 1

_P, _29, _32, _61 = np.uint64(PRIME), np.uint64(29), np.uint64(32), np.uint64(61)
_LOW29, _LOW32 = np.uint64(2**29 - 1), np.uint64(2**32 - 1)
_3 = np.uint64(3)


def evaluate(coefficients: Words, points: Words) -> Words:
    """[points, columns]: the polynomials whose coefficients are the columns of [terms, columns],
    the constant first and all below the prime, at each of `points`, below 2**32."""
    xs = points[:, np.newaxis]
    values = np.zeros((points.size, coefficients.shape[1]), np.uint64)
    for row in coefficients[::-1]:
        values = _fold(_times_small(values, xs) + row)
    return _canonical(values)


def lagrange(points: Words) -> Words:
    """The weight of each of `points`, distinct in [1, 2**32), in the value at 0 of a polynomial of
    one term for each: the product of x_j / (x_j - x_i) over all the others."""
    products = np.ones(points.size, np.uint64)
    negative = np.zeros(points.size, bool)
    for x in points:
        below = points > x
        apart = np.where(below, points - x, x - points)
        apart[points == x] = x
        products = _fold(_times_small(products, apart))
        negative ^= below
    # Each product is of the differences and of x_i itself: all x_j over it is the weight.
    numerator = 1
    for x in points.tolist():
        numerator = numerator * x % PRIME
    weights = [numerator * pow(each, -1, PRIME) % PRIME for each in products.tolist()]
    absolute = np.array(weights, np.uint64)
    return np.where(negative, _P - absolute, absolute)


def weighted_sums(weights: Words, values: Words) -> Words:
    """[sets, columns]: the sum over `values` [sets, terms, columns] times `weights` [terms], all
    below the prime, at most 2**31 terms."""
    by = weights[np.newaxis, :, np.newaxis]
    by_low, by_high = by & _LOW32, by >> _32
    low, high = values & _LOW32, values >> _32
    lowest, middle, highest = low * by_low, low * by_high + high * by_low, high * by_high
    products = (lowest & _P) + (lowest >> _61) + _moved(middle) + (highest << _3)
    sums = (products & _LOW32).sum(axis=1, dtype=np.uint64)
    return _canonical(_fold(sums + _moved((products >> _32).sum(axis=1, dtype=np.uint64))))


def _times_small(values: Words, by: Words) -> Words:
    """Below 2**62 + 2**34; `values` are below 2**61 + 4, `by` below 2**32."""
    low = (values & _LOW32) * by
    return (low & _P) + (low >> _61) + _moved((values >> _32) * by)


def _moved(values: Words) -> Words:
    """values * 2**32, below 2**61 + 2**35."""
    return (values >> _29) + ((values & _LOW29) << _32)


def _fold(values: Words) -> Words:
    """The same elements below 2**61 + 8."""
    return (values & _P) + (values >> _61)


def _canonical(values: Words) -> Words:
    """The same elements below the prime, from below twice the prime."""
    return np.where(values >= _P, values - _P, values)
