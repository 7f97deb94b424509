"""Decoding of an upload directly into the sum, without materializing the update if that is faster.

The sum is that of `Upload.from_bytes`, `decompress` and `Accumulator.add`, to the last bit.
"""

from __future__ import annotations

from typing import Any

from fedpress_compression.coding import Found, Grouped
from fedpress_compression.compressor import Compressor, Public
from fedpress_compression.fixed_point import Accumulator


def decode_add(
    fields: Found,
    compressor: Compressor[Any],
    public: Public,
    accumulator: Accumulator,
    weight: int,
) -> None:
    """Add `weight` times the update of the symbols from `coding.find`.

    Raises DecodingError or InvalidUpdate without adding anything.
    """
    tabled = getattr(compressor.lossy, "tabled", None)
    update = tabled(fields, public) if tabled else None
    if update is not None and accumulator.add_tabled(update, weight):
        return
    symbols = tuple(field.read() if isinstance(field, Grouped) else field for field in fields)
    accumulator.add(compressor.decompress(symbols, public), weight)
