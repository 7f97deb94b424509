"""How large a body will be, before the first of its kind has come."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from fedpress_protocols import coding
from fedpress_protocols.compression.compressor import Compressor, Public
from fedpress_protocols.compression.contexts import contexts_of
from fedpress_protocols.errors import FedpressError
from fedpress_protocols.model import ModelSpec, TensorSpec, Vector
from fedpress_protocols.randomness import PublicRandomness

_SAMPLE = 2**20
"""Values of a model that are compressed; of larger ones a part stands for the whole."""
_HEAD = 4


def expected_bytes(compressor: Compressor[Any], spec: ModelSpec) -> int:
    """The body of an update of `spec` by `compressor`, as one of a heavy-tailed distribution comes
    out: the cube of a Gaussian, a third of it zero.

    A guess, of the right order: what counts is what comes. Where the compressor reads what only a
    server has, or cannot take the sample, float32's size.
    """
    sample, scale = _sample(spec)
    rng = np.random.default_rng(0)

    def drawn(size: int) -> Vector:
        values = 0.01 * rng.standard_normal(size) ** 3
        return np.where(rng.random(size) < 1 / 3, 0.0, values).astype(np.float32)

    known: dict[str, Any] = {what: drawn(sample.size) for what in compressor.needs}
    if "basis" in known:
        return 4 * spec.size
    public = replace(Public(sample, PublicRandomness(bytes(32))), **known)
    try:
        symbols, _ = compressor.compress(
            drawn(sample.size), compressor.init(sample), public, np.random.default_rng(1)
        )
        layout = compressor.layout(sample)
        body = coding.encode(symbols, layout, contexts_of(layout, public))
    except (FedpressError, ValueError):
        return 4 * spec.size
    return _HEAD + round(len(body) * scale)


def _sample(spec: ModelSpec) -> tuple[ModelSpec, float]:
    """`spec`, or one with the same tensors and fewer rows, and how many times smaller it is."""
    if spec.size <= _SAMPLE:
        return spec, 1.0
    share = _SAMPLE / spec.size
    tensors = tuple(
        TensorSpec(
            each.name,
            (max(1, round(each.shape[0] * share)), *each.shape[1:]) if each.shape else (),
            each.dtype,
        )
        for each in spec.trained
    )
    smaller = ModelSpec(tensors)
    return smaller, spec.size / smaller.size
