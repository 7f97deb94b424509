"""Polynomials over GF(2**61 - 1), as machine code; see field_reference for the arithmetic."""

from __future__ import annotations

import numpy as np

from fedpress_compression.kernels.intrinsics import kernel
from fedpress_compression.kernels.wire import Words

_U = np.uint64
_P, _ONE = _U(2**61 - 1), _U(1)
_29, _32, _61, _3 = _U(29), _U(32), _U(61), _U(3)
_LOW29, _LOW32 = _U(2**29 - 1), _U(2**32 - 1)


def evaluate(coefficients: Words, points: Words) -> Words:
    values = np.zeros((coefficients.shape[1], points.size), np.uint64)
    _evaluate(np.ascontiguousarray(coefficients), points, values)
    return np.ascontiguousarray(values.T)


def lagrange(points: Words) -> Words:
    weights = np.empty(points.size, np.uint64)
    _lagrange(points, weights, np.empty(points.size, np.uint64))
    return weights


def weighted_sums(weights: Words, values: Words) -> Words:
    sums = np.zeros((values.shape[0], values.shape[2]), np.uint64)
    _weighted_sums(weights, np.ascontiguousarray(values), sums)
    return sums


@kernel
def _times_small(value, by):
    low, high = (value & _LOW32) * by, (value >> _32) * by
    return (low & _P) + (low >> _61) + (high >> _29) + ((high & _LOW29) << _32)


@kernel
def _times(value, by):
    """Below 2**61 + 8, from below 2**61 + 8."""
    low, high, by_low, by_high = value & _LOW32, value >> _32, by & _LOW32, by >> _32
    lowest, middle, highest = low * by_low, low * by_high + high * by_low, high * by_high
    product = (lowest & _P) + (lowest >> _61) + (highest << _3)
    return _fold(product + (middle >> _29) + ((middle & _LOW29) << _32))


@kernel
def _fold(value):
    return (value & _P) + (value >> _61)


@kernel
def _canonical(value):
    return value - _P if value >= _P else value


@kernel
def _evaluate(coefficients, points, values):
    for column in range(values.shape[0]):
        row = values[column]
        for term in range(coefficients.shape[0] - 1, -1, -1):
            coefficient = coefficients[term, column]
            for i in range(row.size):
                row[i] = _fold(_times_small(row[i], points[i]) + coefficient)
        for i in range(row.size):
            row[i] = _canonical(row[i])


@kernel
def _lagrange(points, weights, before):
    num = points.size
    weights[:] = _ONE
    numerator = _ONE
    for j in range(num):
        x = points[j]
        numerator = _times(numerator, x)
        for i in range(num):
            apart = points[i] - x if points[i] > x else x - points[i]
            weights[i] = _fold(_times_small(weights[i], apart if i != j else x))
    # All of them inverted at the price of one (Montgomery's trick): before[i] is the product of
    # those before i, `rest` the inverse of those up to i.
    product = _ONE
    for i in range(num):
        before[i] = product
        product = _times(product, weights[i])
    rest, square, exponent = _ONE, product, _P - _U(2)
    while exponent:
        if exponent & _ONE:
            rest = _times(rest, square)
        square = _times(square, square)
        exponent >>= _ONE
    for i in range(num - 1, -1, -1):
        weight = _canonical(_times(numerator, _times(rest, before[i])))
        rest = _times(rest, weights[i])
        smaller = 0
        for j in range(num):
            smaller += points[j] < points[i]
        weights[i] = _P - weight if smaller % 2 else weight


@kernel
def _weighted_sums(weights, values, sums):
    for at in range(values.shape[0]):
        for term in range(values.shape[1]):
            weight = weights[term]
            for column in range(values.shape[2]):
                product = _times(values[at, term, column], weight)
                sums[at, column] = _fold(sums[at, column] + product)
        for column in range(values.shape[2]):
            sums[at, column] = _canonical(sums[at, column])
