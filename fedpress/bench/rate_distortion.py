"""`fedpress bench rate-distortion`: bytes and error of every method on real updates.

Bytes are those of whole upload bodies, each decoded again before its error is taken. NMSE is the
squared error over the squared norm of the update. Every method is coded by the static codes
(huffman), by these or the range coder, whichever is shorter (auto), and so in the context of the
last step (auto+previous). Methods that read an array that the file lacks are listed as not
measured. Every upload is a client's first.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any, cast

import numpy as np

from fedpress.compressor_table import by_default
from fedpress.update_file import Updates
from fedpress_compression.compressor import Compressor, Public, compressors, from_config, to_config
from fedpress_compression.compressors.coded import Coded
from fedpress_compression.contexts import contexts_of
from fedpress_protocols.errors import ConfigurationError
from fedpress_protocols.upload import Upload

_WHOLE = {
    "first": {"id": "lowrank", "rank": 3, "bits": 5, "rest": {"id": "half"}},
    "target_of": "whole",
}
SETTINGS: Mapping[str, tuple[dict[str, Any], ...]] = {
    "bernoulli": ({"probability": 0.01}, {"probability": 0.1}),
    "cafe": ({"inner": {"id": "stc"}}, {"inner": {"id": "topk", "fraction": 0.05}}),
    "count_sketch": ({"fraction": 0.05}, {"fraction": 0.2}),
    "ecsq": tuple(
        {"control": "nmse", "target": nmse, **optimised}
        for optimised in ({}, {"rdo": 0.14})
        for nmse in (0.7, 0.5, 0.3, 0.15, 0.05)
    ),
    "eden": tuple({"bits": bits, "scale": "mmse"} for bits in (0.5, 1, 2, 4)),
    "lowrank": ({"rank": 1}, {"rank": 2}, {"rank": 4}),
    "powersgd": ({"rank": 1}, {"rank": 4}),
    "powersgd_onesided": ({"rank": 1}, {"rank": 4}),
    "qsgd": ({"levels": 1}, {"levels": 4}, {"levels": 16}),
    "quantize": ({"bits": 2}, {"bits": 4}, {"bits": 8}),
    "randomk": ({"fraction": 0.01}, {"fraction": 0.1}),
    "shared_support": ({"fraction": 0.02}, {"fraction": 0.1}),
    "sign": ({"chunk": 64}, {"chunk": 256}),
    "simhash": ({"bits": 0.125}, {"bits": 1.0}),
    "stc": ({"fraction": 0.001}, {"fraction": 0.01}, {"fraction": 0.05}),
    "successive_refinement": tuple(
        {"second": {"id": "ecsq", "control": "nmse", "target": nmse}, **whole}
        for whole in ({}, _WHOLE)
        for nmse in (0.5, 0.15)
    ),
    "structured": ({"bits": 4}, {"bits": 8}),
    "threshold": ({"value": 0.003}, {"value": 0.01}),
    "topk": tuple({"fraction": fraction} for fraction in (0.001, 0.01, 0.05, 0.1)),
}
"""Settings that are measured instead of a method's defaults."""

_HEADINGS = ("method", "coder", "bytes", "bits/value", "NMSE", "encode ms", "decode ms")


@dataclass(frozen=True)
class Row:
    """Means over the clients; times are medians, in milliseconds."""

    method: str
    config: dict[str, Any]
    coder: str
    bytes: float
    bits_per_value: float
    nmse: float
    encode_ms: float
    decode_ms: float


def run(name: str, json_file: Path | None = None, only: str | None = None) -> str:
    """Measure all methods, or `only` one, on the updates `name`; the table, and JSON to a file."""
    updates = Updates.load(name)
    lacking = {wire_id: _lacking(wire_id, updates.public) for wire_id in _chosen(only)}
    if only is not None and lacking[only]:
        raise ConfigurationError(
            f"{only} reads {lacking[only]}, which {name} does not have",
            hint="add the array to the file, or choose another method with --only",
        )
    rows = [
        row
        for wire_id, missing in lacking.items()
        if not missing
        for row in measured(wire_id, updates)
    ]
    if json_file is not None:
        document = {"update": name, "values": updates.spec.size, "rows": list(map(asdict, rows))}
        json_file.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    skipped = [
        f"not measured, since the file has no {missing}: {wire_id}"
        for wire_id, missing in lacking.items()
        if missing
    ]
    return "\n".join([*_table(rows), *skipped])


def measured(wire_id: str, updates: Updates) -> Iterator[Row]:
    """A row for each setting of a method under each coder that it can have."""
    for fields in SETTINGS.get(wire_id, ({},)):
        made = from_config({**to_config(by_default(wire_id)), **fields})
        for coder, coded in _coders(made, updates.public):
            yield _measured(fields, coder, made, coded, updates)


def _chosen(only: str | None) -> list[str]:
    known = [wire_id for wire_id in compressors() if wire_id != "coded"]
    if only is not None and only not in known:
        raise ConfigurationError(f"no method {only!r}; there are {', '.join(known)}")
    return [wire_id for wire_id in known if only in (None, wire_id)]


def _lacking(wire_id: str, public: Public) -> str:
    """The vectors that a method reads and that are not known."""
    needs = sorted(by_default(wire_id).needs)
    return " and ".join(what for what in needs if what not in public.knowledge)


def _coders(made: Compressor[Any], public: Public) -> Iterator[tuple[str, Compressor[Any]]]:
    yield "huffman", made
    try:
        yield "auto", cast(Compressor[Any], Coded(made, "auto"))
    except ValueError:  # what has compressors inside that it goes into
        return
    if "previous" in public.knowledge:
        yield "auto+previous", cast(Compressor[Any], Coded(made, "auto", "previous"))


def _measured(
    fields: dict[str, Any],
    coder: str,
    made: Compressor[Any],
    coded: Compressor[Any],
    updates: Updates,
) -> Row:
    public, figures = updates.public, []
    layout, state = coded.layout(updates.spec), coded.init(updates.spec)
    contexts = contexts_of(layout, public)
    for index, update in enumerate((updates.updates[0], *updates.updates)):
        rng = np.random.default_rng(index)
        begin = time.perf_counter()
        symbols, _ = coded.compress(update, state, public, rng)
        body = Upload(0, 1, symbols).to_bytes(layout, contexts)
        middle = time.perf_counter()
        decoded = Upload.from_bytes(body, (layout,), 0, contexts)
        received = coded.decompress(decoded.symbols, public).dense()
        end = time.perf_counter()
        error = np.square((update - received).astype(np.float64)).sum()
        nmse = float(error / np.square(update.astype(np.float64)).sum())
        figures.append((len(body), nmse, 1e3 * (middle - begin), 1e3 * (end - middle)))
    sizes, errors, encoding, decoding = zip(*figures[1:], strict=True)  # the first compiles kernels
    config = to_config(made)
    return Row(
        method=_named(config["id"], fields),
        config=config,
        coder=coder,
        bytes=mean(sizes),
        bits_per_value=8 * mean(sizes) / updates.spec.size,
        nmse=mean(errors),
        encode_ms=median(encoding),
        decode_ms=median(decoding),
    )


def _named(wire_id: str, fields: dict[str, Any]) -> str:
    settings = (
        f"{key}={value['id'] if isinstance(value, dict) else value}"
        for key, value in fields.items()
    )
    return " ".join((wire_id, *settings))


def _table(rows: list[Row]) -> Iterator[str]:
    lines = [
        _HEADINGS,
        *(
            (
                *(row.method, row.coder, f"{row.bytes:.0f}", f"{row.bits_per_value:.4f}"),
                *(f"{row.nmse:.4f}", f"{row.encode_ms:.1f}", f"{row.decode_ms:.1f}"),
            )
            for row in rows
        ),
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = [
            f"{c:<{w}}" if i < 2 else f"{c:>{w}}"
            for i, (c, w) in enumerate(zip(line, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()
