"""Constants of the range coder's model, as in protocols/SPEC-coding.md.

Data alone: each kernel, and the decoder of the tests, has the algorithm in its own words.
"""

from __future__ import annotations

import numpy as np

from fedpress_compression.kernels.wire import Ints

LOGISTIC = (
    *(32768, 40793, 47911, 53581, 57724, 60565, 62428, 63615, 64357, 64816, 65097, 65269),
    *(65374, 65438, 65476, 65500, 65514, 65523, 65528, 65531, 65533, 65534, 65535, 65535, 65536),
)
"""65536 / (1 + exp(-k / 2)) for k = 0 .. 24, to the nearest."""
MOST = 3072
"""Logits are whole numbers of 1/256 in [-MOST, MOST]."""
LEAST_CHANCE, MOST_CHANCE = 4, 65532
"""Bounds of a chance as it is coded, in 1/65536."""

LEARNT = 255
"""Bits after which an estimate learns no slower."""
RATES = tuple(131072 // (2 * n + 3) for n in range(LEARNT + 1))
"""The learning rate of an estimate at its n-th bit, in 1/65536."""

FLAG_SIZES = (256, 160, 160, 160, 1600, 160, 160)
"""The number of contexts of each estimate of a flag."""
FLAG_WEIGHT, FLAG_SHIFT = 9362, 16
COLUMN_ROWS = 60
"""Rows after which a column's density learns no slower."""

VALUE_SIZES = (64, 64, 64, 27, 512)
"""The number of contexts of each estimate of a decision, for each decision of a value."""
LONGER, SIGN, BITS, DECISIONS = 0, 33, 34, 146
"""Whether the magnitude is longer: one for each length; the sign; its bits: 7 for each length."""
SETS = 10
VALUE_WEIGHT, VALUE_SHIFT = 19661, 14


def logistic(logit: int) -> int:
    """The chance in 1/65536: between the numbers above, in straight lines."""
    index, rest = abs(logit) >> 7, abs(logit) & 127
    low, high = LOGISTIC[index], LOGISTIC[min(index + 1, 24)]
    chance = low + ((high - low) * rest + 64 >> 7)
    return chance if logit >= 0 else 65536 - chance


def tables() -> tuple[Ints, Ints]:
    """The chance by logit + MOST; the largest logit of a chance of at most c, by c."""
    chances = np.array([logistic(logit) for logit in range(-MOST, MOST + 1)], np.int64)
    logits = np.searchsorted(chances, np.arange(65536), side="right") - 1 - MOST
    return chances, logits.astype(np.int64)
