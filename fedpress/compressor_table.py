"""`fedpress compressors`: every method there is, what it costs and what it claims."""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from fedpress_compression.bias import TYPICAL, typical_update
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
from fedpress_protocols.errors import ConfigurationError

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
    """The coded bytes of one typical update, counted."""
    update, previous = typical_update(1), typical_update(2)
    first_upload = np.zeros(TYPICAL.size, np.float32)
    randomness = PublicRandomness(bytes(32))
    public = Public(
        TYPICAL, randomness, {"previous": previous, "drift": previous, "own": first_upload}
    )
    symbols, _ = made.compress(update, made.init(TYPICAL), public, np.random.default_rng(0))
    return 8 * len(encode(symbols, made.layout(TYPICAL))) / TYPICAL.size


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
