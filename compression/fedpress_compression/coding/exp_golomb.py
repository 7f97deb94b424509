"""Numbers of any size over a small alphabet: exp-Golomb buckets, and raw bits within the bucket.

With m mantissa bits, u = value + 2**m and e = floor(log2 u), the bucket is (e - m) * 2**m plus the
m bits after the leading one of u; the e - m bits below them follow raw (Teuhola 1978 for m = 0).
The smallest numbers have their own buckets, larger ones share a bucket with similar numbers, so
the Huffman code over the buckets follows any smooth distribution with few symbols.
"""

from __future__ import annotations

import numpy as np

from fedpress_compression import kernels
from fedpress_compression.coding import sequences
from fedpress_compression.coding.bits import Ints, Reader

MAX_MANTISSA = 3


def plan_numbers(
    values: Ints, bound: int, mantissa: int, anchors: Ints | None = None
) -> sequences.Candidate:
    """One or more numbers in [0, bound), bound <= 2**32; `anchors` as in `sequences.plan`."""
    raw_widths = _raw_widths(bound, mantissa)
    if values.size <= sequences.SMALL:
        buckets, raw = kernels.split(values, mantissa)
        return sequences.plan(buckets, raw_widths, raw, anchors)
    histograms = kernels.count_buckets(values, mantissa, raw_widths.size)
    return sequences.plan_counted(
        histograms, raw_widths, lambda: kernels.split(values, mantissa), anchors
    )


def read_numbers(
    reader: Reader, num: int, bound: int, mantissa: int, anchored: bool = False
) -> tuple[Ints, Ints | None]:
    """Read `num` numbers and the anchors. Numbers are below 2**33; the caller checks `bound`."""
    raw_widths = _raw_widths(bound, mantissa)
    buckets, raw, anchors = sequences.read(reader, num, raw_widths, anchored)
    if raw is None:
        raw = np.zeros(num, np.int64)
    return kernels.join(buckets, raw, mantissa), anchors


def _raw_widths(bound: int, mantissa: int) -> Ints:
    """The number of raw bits of each bucket for values below `bound` [at most 240]."""
    last, _ = kernels.split(np.array([bound - 1], np.int64), mantissa)
    return np.arange(int(last[0]) + 1, dtype=np.int64) >> mantissa
