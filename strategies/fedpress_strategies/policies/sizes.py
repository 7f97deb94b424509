"""Estimates of the size of a body, before the first of its kind has been received."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from fedpress_compression import coding
from fedpress_compression.compressor import Compressor, Public
from fedpress_compression.contexts import contexts_of
from fedpress_compression.randomness import PublicRandomness
from fedpress_compression.tensors import ModelSpec, TensorSpec, Vector
from fedpress_protocols.errors import ConfigurationError, FedpressError
from fedpress_protocols.plan import Profile

_SAMPLE = 2**20
"""Values of a model that are compressed; of larger ones a part stands for the whole."""
_HEAD = 4
_LARGER = 1.25
"""By so many times, where less may be the sample's doing."""


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

    if "basis" in compressor.needs:
        return 4 * spec.size
    knowledge = {kind: drawn(sample.size) for kind in sorted(compressor.needs)}
    public = Public(sample, PublicRandomness(bytes(32)), knowledge)
    try:
        symbols, _ = compressor.compress(
            drawn(sample.size), compressor.init(sample), public, np.random.default_rng(1)
        )
        layout = compressor.layout(sample)
        body = coding.encode(symbols, layout, contexts_of(layout, public))
    except (FedpressError, ValueError):
        return 4 * spec.size
    return _HEAD + round(len(body) * scale)


def check_order(ladder: Sequence[Profile], spec: ModelSpec) -> None:
    """Raise ConfigurationError for a ladder with a harder profile before a gentler one.

    Only profiles that are the same but for one number are compared: of these the gentler is what
    sends more, whatever the data. Which of two methods is the gentler, nobody knows before.
    """
    sizes: dict[str, int] = {}

    def size(profile: Profile) -> int:
        if profile.name not in sizes:
            sizes[profile.name] = expected_bytes(profile.compressor, spec)
        return sizes[profile.name]

    for before, after in combinations(ladder, 2):
        if _by_one_number(before, after) and size(after) > _LARGER * size(before):
            raise ConfigurationError(
                f"profile {before.name!r} comes before {after.name!r}, and its bodies are some "
                f"{size(before):,} bytes where those of {after.name!r} are {size(after):,}",
                hint="policies take the profiles for a ladder: put the gentlest first, the one "
                "that sends most",
            )


def _by_one_number(one: Profile, other: Profile) -> bool:
    """Whether that is all in which their compressors differ."""
    mine, theirs = (
        dict(_leaves(each.model_dump(mode="json")["compressor"])) for each in (one, other)
    )
    changed = [place for place in mine | theirs if mine.get(place) != theirs.get(place)]
    return len(changed) == 1 and all(
        type(each.get(changed[0])) in (int, float) for each in (mine, theirs)
    )


def _leaves(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of a configuration, each with its path."""
    if not isinstance(value, dict | list):
        yield place, value
        return
    for name, each in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _leaves(each, f"{place}.{name}")


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
