"""`fedpress compressors`: every method there is, what it costs and what it claims."""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from fedpress_compression.coding import encode
from fedpress_compression.compressor import (
    Compressor,
    Public,
    compressors,
    from_config,
    properties,
    to_config,
)
from fedpress_compression.randomness import PublicRandomness
from fedpress_compression.tensors import ModelSpec, TensorSpec, Vector
from fedpress_protocols.errors import ConfigurationError

_SPEC = ModelSpec((TensorSpec("weight", (240, 256)), TensorSpec("bias", (256,))))
_ROUNDS = 20
_HEADINGS = (
    *("id", "bits/value", "linear", "unbiased", "contractive"),
    *("client state", "server state", "source"),
)


def table() -> str:
    """A line for every method; bits/value is what its defaults make of one update."""
    return "\n".join(aligned([_HEADINGS, *_rows()]))


def described(name: str) -> str:
    """The method `name`: its description, settings with their defaults, claims and an example."""
    known = compressors()
    if name not in known:
        raise ConfigurationError(
            f"no compressor has the id {name!r}; known are {', '.join(known)}",
            hint="fedpress compressors lists what they are",
        )
    example = by_default(name)
    claimed, config = properties(example), to_config(example)
    settings = [
        (f"  {field.name}", json.dumps(config.get(field.name, field.default)))
        for field in dataclasses.fields(known[name])
    ]
    claims = [
        ("  rate", claimed.rate),
        ("  bits/value", f"{bits_per_value(example):.3f} with these settings, measured"),
        ("  linear", yes(example.commutes_with_sum)),
        ("  unbiased", yes(claimed.unbiased)),
        ("  contractive", yes(claimed.contractive)),
        ("  client state", claimed.client_state),
        ("  server state", claimed.server_state),
        ("  source", claimed.source),
    ]
    lines = [f"{name}: {inspect.getdoc(known[name])}"]
    if settings:
        lines += ["", "settings", *aligned(settings)]
    lines += ["", "properties", *aligned(claims), "", "example", f"  {json.dumps(config)}"]
    return "\n".join(lines)


def by_default(wire_id: str) -> Compressor[Any]:
    """The compressor `wire_id` with its defaults, around top-k if it must be around something."""
    fields = dataclasses.fields(compressors()[wire_id])
    missing = [
        field.name
        for field in fields
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    return from_config({"id": wire_id, **{name: {"id": "topk"} for name in missing}})


def bits_per_value(made: Compressor[Any]) -> float:
    """The coded bytes of one update, counted: 61,696 cubes of normal values, a third of them 0."""
    update, previous = _heavy_tailed(1), _heavy_tailed(2)
    first_upload = np.zeros(_SPEC.size, np.float32)
    randomness = PublicRandomness(bytes(32))
    public = Public(
        _SPEC, randomness, {"previous": previous, "drift": previous, "own": first_upload}
    )
    symbols, _ = made.compress(update, made.init(_SPEC), public, np.random.default_rng(0))
    return 8 * len(encode(symbols, made.layout(_SPEC))) / _SPEC.size


def never_sent(made: Compressor[Any]) -> float:
    """The share of an update's energy that does not arrive however often a client sends it, as the
    mean of 20 uploads has it; 0 for what is unbiased, or keeps a residual."""
    if properties(made).unbiased or getattr(made, "keeps_residual", False):
        return 0.0
    update, rng = _heavy_tailed(1), np.random.default_rng(0)
    state, last = made.init(_SPEC), np.zeros(_SPEC.size, np.float32)
    total = np.zeros(_SPEC.size)
    for number in range(1, _ROUNDS + 1):
        seed = PublicRandomness(number.to_bytes(32, "little"))
        public = Public(
            _SPEC,
            seed,
            {"previous": last, "drift": last, "activity": np.abs(last), "own": last},
            round=number,
        )
        symbols, state = made.compress(update, state, public, rng)
        last = made.decompress(symbols, public).dense()
        total += last
    rest = total / _ROUNDS - update
    return float(rest @ rest) / float(np.square(update, dtype=np.float64).sum())


def _heavy_tailed(seed: int) -> Vector:
    rng = np.random.default_rng(seed)
    cubes = rng.standard_normal(_SPEC.size) ** 3 * (rng.random(_SPEC.size) > 0.33)
    return (0.01 * cubes).astype(np.float32)


def _rows() -> Iterator[tuple[str, ...]]:
    for wire_id in compressors():
        made = by_default(wire_id)
        claimed = properties(made)
        yield (
            wire_id,
            f"{bits_per_value(made):.3f}",
            yes(made.commutes_with_sum),
            yes(claimed.unbiased),
            yes(claimed.contractive),
            claimed.client_state,
            claimed.server_state,
            claimed.source,
        )


def yes(claim: bool) -> str:
    return "yes" if claim else "-"


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(
            f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)
        ).rstrip()
