"""Downloads of a device for a round: the model as float32, or encoded.

Of a coded model the first bytes are measured, on normal values put on the task's grid; a step after
it takes what the terms allow it at most, which the server uses up.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from fedpress.planning.situation import Situation, sample
from fedpress_compression.tensors import array_dtype
from fedpress_protocols.downlink import decode_model, encode_model, on_grid
from fedpress_protocols.messages import DownlinkTerms
from fedpress_protocols.model import Model

SAMPLE = 1_000_000
"""Values up to which a model is coded as it is."""


@dataclass(frozen=True, slots=True)
class Downlink:
    """`each` bytes a round for a device that has the model before, `anew` for one that has none.
    `seconds` of this machine's CPU read a model, and a step takes no longer."""

    each: int
    anew: int
    seconds: float = 0.0


def downlink(situation: Situation) -> Downlink:
    """The one place that knows how models travel down."""
    if not situation.coded_downloads:
        return Downlink(each=situation.model_bytes, anew=situation.model_bytes)
    terms = DownlinkTerms()
    spec, factor = sample(situation.spec, SAMPLE)
    rng = np.random.default_rng(0)
    values = rng.standard_normal(spec.size).astype(np.float32)
    for tensor, where in zip(spec.trained, spec.slices.values(), strict=True):
        values[where] = on_grid(tensor, values[where], terms.bits)
    buffers = {t.name: np.zeros(t.shape, array_dtype(t)) for t in spec.tensors if not t.is_trained}
    whole = encode_model(Model(spec, values, buffers), terms.coder)
    begun = time.thread_time()
    decode_model(whole, 8 * spec.size + 2**24)
    seconds = factor * (time.thread_time() - begun)
    anew = round(factor * len(whole))
    return Downlink(min(anew, int(terms.rate * situation.spec.size / 8)), anew, seconds)
